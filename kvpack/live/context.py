"""When the context is full: what of a conversation is kept, and how the kept part becomes the live cache.

A middle cannot be taken out in place: rows of rotated layers carry their positions in their bytes. So a shift plans in
units that mean something (the system prologue, whole turns), re-prefills the kept tokens into an empty cache beside the
live one and publishes it by exchanging pointers. Each shift advances the session's context epoch, and a continuation
that was made for an older one is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol

from kvpack.errors import CompatibilityError, InstallError, UsageError
from kvpack.live.cache import LiveCache
from kvpack.live.generation import Generation
from kvpack.live.layers import LayerState, LiveLayer
from kvpack.live.placement import refused
from kvpack.live.transfer import require_consistent
from kvpack.model.geometry import Unit
from kvpack.model.ranges import RowSet

__all__ = [
    "SYSTEM_ROLES",
    "ContextPolicy",
    "Message",
    "ShiftPlan",
    "plan_chat_shift",
    "plan_raw_shift",
    "rebuild",
    "relocate_rows",
    "require_epoch",
    "require_lineage",
    "shift",
]

SYSTEM_ROLES: Final = ("system", "developer")
USER_ROLE: Final = "user"


class ContextPolicy(Enum):
    """What happens to a request that does not fit: keep the newest whole units, or refuse it."""

    SHIFT = "shift"
    ERROR = "error"


class Message(Protocol):
    """One message of a conversation; two messages are the same if they compare equal."""

    @property
    def role(self) -> str:
        """``system``, ``developer``, ``user``, or whoever else speaks: an assistant, a tool."""


@dataclass(frozen=True)
class ShiftPlan:
    """What is kept of a request: ``kept`` are its tokens, ``kept_messages`` its messages (none for a raw prompt).

    ``token_count`` and ``budget`` are in tokens: the request's, and the context less the output reserve.
    """

    token_count: int
    budget: int
    kept: RowSet
    kept_messages: RowSet = field(default_factory=RowSet)

    @property
    def shifts(self) -> bool:
        """Whether anything is dropped."""
        return self.kept.count < self.token_count

    def select(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The kept ones of the request's ``tokens``, in order: what is to be prefilled."""
        if len(tokens) != self.token_count:
            raise UsageError(
                "tokens-differ",
                "the tokens are not those that the shift was planned for",
                field="tokens",
                expected=self.token_count,
                found=len(tokens),
            )
        return tuple(token for first, end in self.kept for token in tokens[first:end])


def plan_chat_shift(
    messages: Sequence[Message],
    token_counts: Sequence[int],
    max_context: int,
    output_reserve: int,
    *,
    policy: ContextPolicy = ContextPolicy.SHIFT,
) -> ShiftPlan:
    """Keep the system prologue and as many of the newest whole turns as fit beside ``output_reserve`` tokens.

    ``token_counts`` are the tokens of each message as it is rendered. A turn begins at each user message; what follows
    it (replies, tool calls and results, images) stays with it, and messages before the first user message are a turn
    too. The newest turn is always kept.

    Raises UsageError: ``system-after-turn`` where a system message follows a turn, ``context-full`` for a request that
    does not fit under the policy ``error``, ``unit-too-large`` where prologue, newest turn and reserve do not fit,
    ``empty-request`` for no turn at all, ``bad-context`` for numbers that cannot be.
    """
    if len(token_counts) != len(messages):
        raise _bad("token_counts", "one count a message", len(messages), len(token_counts))
    if any(count < 0 for count in token_counts):
        raise _bad("token_counts", "counts are not negative", "0 or more", min(token_counts))
    budget = _budget(max_context, output_reserve)
    prologue, turns = _units(messages)
    offsets = [0]
    for count in token_counts:
        offsets.append(offsets[-1] + count)
    total = offsets[-1]
    _require_policy(policy, total, budget)
    first = next((turn for turn in turns if offsets[prologue] + total - offsets[turn] <= budget), None)
    if first is None:
        raise UsageError(
            "unit-too-large",
            "the system prologue and the newest turn do not fit beside the output reserve",
            field="max_context",
            expected=budget,
            found=offsets[prologue] + total - offsets[turns[-1]],
        )
    return ShiftPlan(
        total,
        budget,
        RowSet.of((0, offsets[prologue]), (offsets[first], total)),
        RowSet.of((0, prologue), (first, len(messages))),
    )


def plan_raw_shift(
    token_count: int,
    keep_prefix: int,
    max_context: int,
    output_reserve: int,
    *,
    policy: ContextPolicy = ContextPolicy.SHIFT,
) -> ShiftPlan:
    """Keep the first ``keep_prefix`` of ``token_count`` tokens and the newest ones that fit behind them.

    Raises UsageError: ``context-full`` under the policy ``error``, ``unit-too-large`` where not even one token fits
    behind the prefix, ``empty-request``, ``bad-context``.
    """
    if keep_prefix < 0:
        raise _bad("keep_prefix", "a prefix is not negative", "0 or more", keep_prefix)
    if token_count < 1:
        raise UsageError("empty-request", "a request has at least one token", expected="1 or more", found=token_count)
    budget = _budget(max_context, output_reserve)
    _require_policy(policy, token_count, budget)
    if token_count <= budget:
        return ShiftPlan(token_count, budget, RowSet.of((0, token_count)))
    if keep_prefix >= budget:
        raise UsageError(
            "unit-too-large",
            "the kept prefix leaves no room for a newest token beside the output reserve",
            field="keep_prefix",
            expected=f"less than {budget}",
            found=keep_prefix,
        )
    newest = token_count - (budget - keep_prefix)
    return ShiftPlan(token_count, budget, RowSet.of((0, keep_prefix), (newest, token_count)))


def _bad(name: str, message: str, expected: object, found: object) -> UsageError:
    return UsageError("bad-context", f"{name}: {message}", field=name, expected=expected, found=found)


def _budget(max_context: int, output_reserve: int) -> int:
    if output_reserve < 0:
        raise _bad("output_reserve", "a reserve is not negative", "0 or more", output_reserve)
    if max_context <= output_reserve:
        raise _bad("output_reserve", "a reserve leaves room for a request", f"less than {max_context}", output_reserve)
    return max_context - output_reserve


def _require_policy(policy: ContextPolicy, total: int, budget: int) -> None:
    if policy is ContextPolicy.ERROR and total > budget:
        raise UsageError(
            "context-full",
            "the request does not fit into the context beside the output reserve",
            field="max_context",
            expected=budget,
            found=total,
            hint="allow a shift, or send less",
        )


def _units(messages: Sequence[Message]) -> tuple[int, list[int]]:
    """How many messages are the system prologue, and where each turn begins."""
    roles = [message.role for message in messages]
    prologue = next((at for at, role in enumerate(roles) if role not in SYSTEM_ROLES), len(roles))
    for at in range(prologue, len(roles)):
        if roles[at] in SYSTEM_ROLES:
            raise UsageError(
                "system-after-turn",
                f"message {at} is a system message behind a turn: it would move when turns are dropped",
                field="messages",
                expected=f"system messages before message {prologue}",
                found=at,
            )
    turns = [at for at in range(prologue, len(roles)) if roles[at] == USER_ROLE or at == prologue]
    if not turns:
        raise UsageError("empty-request", "a request has at least one turn", field="messages", found=len(roles))
    return prologue, turns


# --- lineage -------------------------------------------------------------------------------------------------------


def require_epoch(generation: Generation, epoch: int) -> None:
    """Hold a continuation that was made at context epoch ``epoch`` to the live one.

    Raises CompatibilityError ``stale-epoch`` for an older epoch, ``epoch-ahead`` for one that has not been.
    """
    now = generation.context_epoch
    if epoch != now:
        code, what = ("stale-epoch", "before") if epoch < now else ("epoch-ahead", "after")
        raise CompatibilityError(
            code,
            f"the continuation is of context epoch {epoch}, {what} the session's {now}",
            field="context_epoch",
            expected=now,
            found=epoch,
            hint="send the whole conversation again",
        )


def require_lineage(retained: Sequence[Message], request: Sequence[Message]) -> int:
    """Hold a request to the conversation that the cache was rebuilt from: where its new messages begin.

    ``retained`` are the messages that the last shift kept. ``request`` must open with the same system prologue, and
    the retained turns must be in it, whole, in order and without anything between them, beginning at a turn and
    exactly once.

    Raises CompatibilityError ``lineage-differs``, and ``lineage-ambiguous`` where the run occurs more than once.
    """
    prologue, _ = _units(retained)
    asked, turns = _units(request)
    if list(retained[:prologue]) != list(request[:asked]):
        raise CompatibilityError(
            "lineage-differs", "the request opens with other system messages", field="messages", expected=prologue
        )
    run = list(retained[prologue:])
    found = [at for at in turns if list(request[at : at + len(run)]) == run]
    if len(found) != 1:
        code, what = ("lineage-ambiguous", "more than once") if found else ("lineage-differs", "not as one run")
        raise CompatibilityError(
            code,
            f"the turns that the cache holds occur in the request {what}",
            field="messages",
            expected=1,
            found=len(found),
        )
    return found[0] + len(run)


# --- the shift itself ----------------------------------------------------------------------------------------------


def rebuild(cache: LiveCache, tokens: Sequence[int], prefill: Callable[[LiveCache, Sequence[int]], None]) -> Generation:
    """A generation of ``tokens`` at the next context epoch, checked and not yet published: ``swap`` publishes it.

    ``prefill`` appends the tokens to the empty cache that it is given, draft layers as well where the live session has
    drafted: target and draft are one generation. Whatever fails, in ``prefill`` or in the checks of what it left, the
    live session is untouched.

    Raises InstallError ``tainted``, ``quiesced``, ``prefill-incomplete`` (positions or tokens are not those asked for),
    ``layers-disagree``, ``keys-behind``, ``replay-pending``, ``generation-replaced``; UsageError ``empty-request``.
    """
    cache.require_usable("a shift")
    if not tokens:
        raise UsageError("empty-request", "a session is rebuilt from at least one token", field="tokens", found=0)
    live = cache.generation
    staging = cache.beside()
    prefill(staging, tokens)
    staging.hold()
    try:
        require_consistent(staging)
    finally:
        staging.release()
    fresh = staging.generation
    drafted = len(tokens) if live.draft_position else 0
    for what, wanted, found in (
        ("target", len(tokens), fresh.position),
        ("draft", drafted, fresh.draft_position),
    ):
        if found != wanted:
            raise refused("prefill-incomplete", f"the {what} was not prefilled as asked", None, wanted, found)
    if (live.tokens or fresh.tokens) and fresh.tokens != list(tokens):
        raise refused("prefill-incomplete", "the rebuilt session has other tokens", None, len(tokens), "other ones")
    if cache.generation is not live:
        raise InstallError("generation-replaced", "another generation was published during the prefill")
    fresh.context_epoch = live.context_epoch + 1
    return fresh


def shift(cache: LiveCache, tokens: Sequence[int], prefill: Callable[[LiveCache, Sequence[int]], None]) -> Generation:
    """:func:`rebuild` the session from ``tokens`` and publish it; returns the generation that was live before.

    A cache over ranks is shifted by ``ranked.swap(rebuild(ranked.cache, tokens, prefill))``.
    """
    return cache.swap(rebuild(cache, tokens, prefill))


def relocate_rows(source: LiveLayer, target: LiveLayer, kept: RowSet) -> None:
    """Copy the ``kept`` rows of a layer without rotation to rows 0 on of an empty one, closing the gaps.

    The rows' bytes do not say where they stand, so attention reads from them what it read before; what they say is of
    the context in which they were made. Only for a ``full`` layer of token rows.

    Raises CompatibilityError ``position-bound`` for any other layer, InstallError ``not-fresh``, ``layout-differs``,
    ``rows-not-resident``, ``capacity-too-small``; nothing has changed then.
    """
    geometry = source.geometry
    if geometry.rope is not None or geometry.kind != "full" or any(p.unit is not Unit.TOKEN for p in geometry.planes):
        raise CompatibilityError(
            "position-bound",
            f"rows of layer {source.number} belong to their positions",
            layer=source.number,
            field="rope",
            expected="a full layer without rotation",
            found=f"{geometry.kind}, rope {geometry.rope}",
        )
    if target.geometry != geometry:
        raise refused(
            "layout-differs", "the other layer is of another geometry", source.number, "an equal one", "other"
        )
    placement = target.state.placement
    assert placement is not None  # a full layer has rows
    state = LayerState(placement.restored(kept.count, layer=target.number), None, kept.count)
    moved = {
        role: b"".join(source.read_rows(plane, first, end) for first, end in kept)
        for role, plane in source.planes.items()
    }
    for role, rows in moved.items():
        target.write_rows(target.planes[role], 0, memoryview(rows), state)
    target.state = state
