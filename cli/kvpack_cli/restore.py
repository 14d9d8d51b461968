"""Which of a pack's cuts, and which position of it, serves a prompt best. Pure: tokens and cuts in, a choice out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpack.api import Pack
from kvpack.errors import CompatibilityError
from kvpack.model.gate import deepest_position
from kvpack.model.geometry import PlaneKey
from kvpack.model.planes import TOKENS
from kvpack.model.ranges import RowSet
from kvpack.pack.view import PackCut
from kvpack_cli.texts import common_length

__all__ = ["Choice", "choose", "known_tokens"]


@dataclass(frozen=True)
class Choice:
    """Restore ``cut`` at position ``at`` and feed ``rest``; with no rest, the stored logits give the next token.

    ``at`` may lie beyond what the cut can restore: the gate then says why.
    """

    cut: PackCut
    at: int
    rest: tuple[int, ...]


def known_tokens(pack: Pack) -> tuple[int, ...]:
    """The token ids that the pack carries, those of its last cut; empty if it carries none."""
    cut = pack.cut()
    if not cut.record.tokens or TOKENS not in cut.specs:
        return ()
    wanted = RowSet.of((0, cut.record.tokens))
    buffer = bytearray(4 * cut.record.tokens)

    def fill(key: PlaneKey, first: int, count: int, rows: memoryview) -> None:
        buffer[4 * first : 4 * (first + count)] = rows

    cut.read_rows({TOKENS: wanted}, fill)
    return tuple(int.from_bytes(buffer[at : at + 4], "little") for at in range(0, len(buffer), 4))


def choose(
    pack: Pack, stored: Sequence[int], prompt: Sequence[int] | None, *, limit: int | None, needs_logits: bool
) -> Choice:
    """The deepest restore that the pack allows for ``prompt``, or for the pack's own tokens if there is no prompt.

    ``limit`` is the deepest position that may be restored; without a prompt the session also ends there. The
    next token needs logits (``needs_logits``): a cut that carries them, or at least one token to feed.

    Raises CompatibilityError ``prompt-parts`` where nothing of the pack can serve the prompt, ``no-logits`` where the
    pack carries neither tokens nor logits to go on from. A position that is not restorable is left to the gate, which
    names the rows that are missing.
    """
    if prompt is not None:
        found = _deepest(pack, prompt, common_length(stored, prompt), limit, needs_logits)
        if found is None or not found.at:
            raise _parted(stored, prompt)
        return found
    position = pack.manifest.position
    if limit is not None and limit > position:
        return Choice(pack.cut(), limit, ())
    if not stored:
        cut = pack.cut(limit)
        if needs_logits and "logits" not in cut.record.extras:
            raise CompatibilityError(
                "no-logits",
                f"the pack carries neither tokens nor logits at {cut.record.position}, so nothing follows from it",
                field="logits",
                hint="restore without decoding: --max-new-tokens 0",
            )
        return Choice(cut, cut.record.position, ())
    own = stored if limit is None else stored[:limit]
    found = _deepest(pack, own, len(own), limit, needs_logits)
    if found is None or (own and not found.at):
        at = min(position, len(own))
        return Choice(pack.cut(), at, tuple(own[at:]))
    return found


def _deepest(pack: Pack, session: Sequence[int], common: int, limit: int | None, needs_logits: bool) -> Choice | None:
    deepest = common if limit is None else min(common, limit)
    cuts = [pack.cut(position) for position in pack.chain.positions]
    if deepest == len(session):
        for cut in cuts:
            if cut.record.position == deepest and (not needs_logits or "logits" in cut.record.extras):
                return Choice(cut, deepest, ())
        if needs_logits:
            deepest -= 1
    best: tuple[int, bool, PackCut] | None = None
    for cut in cuts:
        at = deepest_position(cut, deepest)
        if at is None:
            continue
        exact = at == cut.record.position
        # At equal depth a cut's own position: what is restored there is what was captured there.
        if best is None or (at, exact) > best[:2]:
            best = at, exact, cut
    return None if best is None else Choice(best[2], best[0], tuple(session[best[0] :]))


def _parted(stored: Sequence[int], prompt: Sequence[int]) -> CompatibilityError:
    at = common_length(stored, prompt)
    if not stored:
        message = "the pack does not carry its tokens, so no prompt can be held to it"
    elif at == len(prompt):
        message = f"the prompt ends at token {at}, and nothing of the pack can be restored before its end"
    elif at == len(stored):
        message = f"the pack's tokens end at token {at}, and nothing of it can be restored"
    else:
        message = f"the prompt parts from the pack's tokens at token {at}, and nothing can be restored up to there"
    return CompatibilityError(
        "prompt-parts",
        message,
        field="tokens",
        expected=stored[at] if at < len(stored) else None,
        found=prompt[at] if at < len(prompt) else None,
        hint="give the prompt that the pack was captured from, or one that continues it",
    )
