"""Prefill and greedy decoding, with a digest of every step's logits: the proof that two sessions are one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from kvpack.engines.transformers.caches import survey
from kvpack.engines.transformers.library import encoding_name, forward, host_words, require_torch
from kvpack.errors import EngineError, UsageError
from kvpack.model.snapshot import Probe

if TYPE_CHECKING:
    import torch

__all__ = ["Decoded", "decode", "logits_digest", "prefill"]


@dataclass(frozen=True)
class Decoded:
    """What a greedy continuation gave. ``digests[i]`` is BLAKE3 of the raw last logits row after ``tokens[i]`` was fed.

    ``logits`` is the last row, ``encoding`` its element type.
    """

    tokens: tuple[int, ...]
    digests: tuple[bytes, ...]
    logits: torch.Tensor
    encoding: str

    def probe(self, position: int) -> Probe:
        """The continuation as proof for a cut at ``position``, where it began."""
        return Probe(position, self.tokens, self.digests, self.encoding)


def logits_digest(row: torch.Tensor) -> bytes:
    """BLAKE3 of the raw elements of a logits row, in the model's own element type."""
    return blake3(host_words(row.cpu().contiguous()).tobytes()).digest()


def prefill(model: Any, tokens: Sequence[int], cache: Any) -> torch.Tensor:
    """Feed ``tokens`` in one forward behind what the cache holds; returns the last logits row ``[vocab_size]``.

    Raises UsageError ``empty-prompt`` for no tokens, EngineError ``bad-token``, ``capacity-too-small``.
    """
    if not tokens:
        raise UsageError("empty-prompt", "the prompt has no tokens", field="tokens", expected="at least 1", found=0)
    _require_room(model, cache, len(tokens))
    return forward(model, tokens, cache)


def decode(
    model: Any,
    cache: Any,
    first_logits: torch.Tensor,
    steps: int,
    *,
    eos: Collection[int] = (),
    on_token: Callable[[int], None] | None = None,
) -> Decoded:
    """Continue greedily for ``steps`` tokens from the logits of the last forward.

    Each step takes the most likely token, hands it to ``on_token``, feeds it and digests the new last row. A token of
    ``eos`` is the last one; it is fed and digested too.

    Raises EngineError ``capacity-too-small`` before the first step where a static cache has no room for all of them.
    """
    _require_room(model, cache, steps)
    torch = require_torch()
    row = first_logits
    tokens: list[int] = []
    digests: list[bytes] = []
    for _ in range(steps):
        token = int(torch.argmax(row))
        tokens.append(token)
        if on_token is not None:
            on_token(token)
        row = forward(model, [token], cache)
        digests.append(logits_digest(row))
        if token in eos:
            break
    return Decoded(tuple(tokens), tuple(digests), row, encoding_name(row.dtype))


def _require_room(model: Any, cache: Any, count: int) -> None:
    live = survey(model, cache)
    if live.most_tokens is None:
        return
    position = max(adapter.position(layer) or 0 for layer, adapter in live.layers)
    if position + count > live.most_tokens:
        raise EngineError(
            "capacity-too-small",
            f"{count} tokens behind {position} do not fit into a static cache of {live.most_tokens}",
            field="capacity",
            expected=position + count,
            found=live.most_tokens,
            hint="raise --capacity",
        )
