"""Captures in pieces: several cuts of one prefill, and a prompt that goes on where another pack ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvpack.api import Pack
from kvpack.engines.transformers.identification import chunked
from kvpack.errors import CompatibilityError, UsageError
from kvpack.model.geometry import Unit
from kvpack.model.identity import Identity
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import Cut, PlaneRows
from kvpack.pack.view import PackCut
from kvpack_cli.restore import known_tokens
from kvpack_cli.texts import common_length

__all__ = ["Continuation", "chunked", "continuation", "without_growing_rows"]

_DIVIDED = "cuts:"


@dataclass(frozen=True)
class Continuation:
    """The cut of a parent that a prompt goes on from; ``boundaries`` are where its own prefill was divided, and its
    end."""

    cut: PackCut
    boundaries: tuple[int, ...]

    @property
    def position(self) -> int:
        """Tokens that need not be computed again."""
        return self.cut.record.position

    def facts(self) -> dict[str, object]:
        """The parent as JSON."""
        return {
            "pack": str(self.cut.reader.path),
            "pack_id": self.cut.reader.pack_id,
            "position": self.position,
            "state_id": self.cut.record.state_id,
        }


def continuation(parent: Pack, tokens: Sequence[int]) -> Continuation:
    """The deepest cut of ``parent`` that ``tokens`` go on from: they begin with its tokens, and there are more.

    Raises CompatibilityError ``no-tokens`` where the parent does not carry its tokens, ``prompt-parts`` where the
    prompt is not a continuation, UsageError ``nothing-to-add`` where it ends at the parent's first cut or before.
    """
    stored = known_tokens(parent)
    if not stored:
        raise CompatibilityError(
            "no-tokens", "the parent does not carry its tokens, so no prompt can be held to it", field="tokens"
        )
    common = common_length(stored, tokens)
    fitting = [at for at in parent.chain.positions if 0 < at <= common and at < len(tokens)]
    if fitting:
        cut = parent.cut(fitting[-1])
        return Continuation(cut, tuple(sorted({*_boundaries(cut.identity, cut.record.position), cut.record.position})))
    first = next((at for at in parent.chain.positions if at), 0)
    if common == len(tokens) or not first:
        raise UsageError(
            "nothing-to-add",
            f"the prompt ends at token {len(tokens)} and the parent begins at {first}: there is nothing to add",
            field="parent",
            expected=f"more than {first} tokens",
            found=len(tokens),
            hint="give a longer prompt, or capture without --parent",
        )
    raise CompatibilityError(
        "prompt-parts",
        f"the prompt parts from the parent's tokens at token {common}, before its first cut at {first}",
        field="tokens",
        expected=stored[common] if common < len(stored) else None,
        found=tokens[common],
        hint="give a prompt that continues the parent's",
    )


def _boundaries(identity: Identity, end: int) -> Iterable[int]:
    """Where the prefill that an identity speaks of was divided before ``end``."""
    words = str(identity.numerics.get("prefill", ""))
    if not words.startswith(_DIVIDED):
        return ()
    return [int(word) for word in words.removeprefix(_DIVIDED).split(",") if word.isdigit() and int(word) < end]


def without_growing_rows(cut: Cut) -> Cut:
    """A cut without the rows that a later cut of the same session holds as well: those that are only ever added to."""
    planes = dict(cut.planes)
    for key, layer, plane in cut.geometry.planes():
        if layer.kind in ("full", "latent") and plane.unit in (Unit.TOKEN, Unit.POOL) and plane.role != "index_tail":
            planes[key] = PlaneRows(planes[key].spec, RowSet(), memoryview(b""))
    return replace(cut, planes=planes)
