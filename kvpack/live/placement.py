"""Where the rows of a live plane lie: every placement answers with spans, every append is a checked plan.

A placement is a frozen value over plain integers. An operation returns a new placement, or raises
:class:`~kvpack.errors.InstallError` and has changed nothing; no bytes are touched here. *Logical* rows are token
positions of the session, *physical* rows are indices into the plane. The laws stand in sibling modules:
:mod:`kvpack.live.growing`, :mod:`kvpack.live.rings`, :mod:`kvpack.live.rebasing_ring` and :mod:`kvpack.live.pool_ring`.

Refusals (``code``): ``discontinuity``, ``zero-rows``, ``capacity-too-small``, ``ring-too-small``,
``position-out-of-range``, ``rows-not-resident``, ``lapped``, ``beyond-headroom``, ``forward-rewind``,
``not-fresh``, ``bad-placement`` (a state that the law cannot be in) and ``bad-plan`` (an append that would lose or
misplace a row).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, Protocol, Self, TypeVar

from kvpack.errors import InstallError
from kvpack.model.geometry import MAX_POSITION
from kvpack.model.ranges import RowSet

__all__ = [
    "AppendPlan",
    "Move",
    "Placement",
    "Span",
    "overwritten",
    "refused",
    "require_capacity",
    "require_fresh",
    "require_next",
    "require_position",
    "require_resident",
    "require_rewind",
    "ring_spans",
]


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """``count`` logical rows from ``logical`` lie in as many physical rows from ``physical``, in the same order."""

    logical: int
    physical: int
    count: int

    @property
    def logical_end(self) -> int:
        """One past the last logical row."""
        return self.logical + self.count

    @property
    def physical_end(self) -> int:
        """One past the last physical row."""
        return self.physical + self.count


@dataclass(frozen=True, slots=True)
class Move:
    """Copy ``count`` physical rows from ``source`` to ``destination``; the two ranges may overlap (``memmove``)."""

    source: int
    destination: int
    count: int


class Placement(Protocol):
    """A placement law with its state; operations return a new value. ``layer`` only names errors."""

    @property
    def law(self) -> str:
        """The law's name as a producer's layout records it (spec/kvpack-v1.md, section 7.5)."""

    @property
    def capacity(self) -> int:
        """Physical rows of the plane."""

    @property
    def position(self) -> int:
        """Tokens whose state has been appended: the logical row that comes next."""

    @property
    def resident(self) -> RowSet:
        """Logical rows that the plane still holds."""

    def spans(self, first: int, end: int) -> tuple[Span, ...]:
        """Where logical rows ``[first, end)`` lie: ascending, as few spans as there can be.

        Raises ``rows-not-resident`` unless the plane holds every one of them.
        """

    def need(self, position: int) -> RowSet:
        """Logical rows that a restore of this placement at ``position`` requires."""

    def append(self, start: int, count: int, *, layer: int | None = None) -> AppendPlan[Self]:
        """Plan an append of ``count`` rows, the first of them at logical row ``start``."""

    def rewind(self, position: int, *, layer: int | None = None) -> Self:
        """Drop the rows from ``position`` on; no bytes move. Refused where a row that ``position`` needs is gone."""

    def restored(self, position: int, *, layer: int | None = None) -> Self:
        """This empty placement once exactly :meth:`need` was written to where the result's spans say."""


P_co = TypeVar("P_co", bound=Placement, covariant=True)


@dataclass(frozen=True)
class AppendPlan(Generic[P_co]):
    """What an append of ``count`` rows at the position of ``before`` does: first every move, then every write.

    ``writes`` are spans of the new rows; row ``logical`` comes from source row ``logical - before.position``. New
    rows that a ring narrower than the batch does not keep are in no write. Building a plan checks it against both
    placements (``bad-plan``): destinations in bounds and disjoint, each new row written where ``after`` looks for
    it, each old row that ``after`` still holds either moved there or left alone.
    """

    before: P_co
    after: P_co
    count: int
    writes: tuple[Span, ...]
    moves: tuple[Move, ...] = ()

    @property
    def start(self) -> int:
        """Logical row of source row 0."""
        return self.before.position

    @property
    def first_source_row(self) -> int:
        """The first source row that is still live after the append; ``count`` if none is."""
        return self.writes[0].logical - self.start if self.writes else self.count

    @property
    def live_rows(self) -> int:
        """How many source rows are written."""
        return sum(span.count for span in self.writes)

    def __post_init__(self) -> None:
        fault = _positions_fault(self) or _destinations_fault(self) or _writes_fault(self) or _old_rows_fault(self)
        if fault is not None:
            reason, expected, found = fault
            raise refused("bad-plan", f"append of {self.count} rows at {self.start}: {reason}", None, expected, found)


_Fault = tuple[str, object, object]


def _positions_fault(plan: AppendPlan[Placement]) -> _Fault | None:
    if plan.after.position != plan.start + plan.count:
        return "the placement does not advance by the rows appended", plan.start + plan.count, plan.after.position
    return None


def _destinations(plan: AppendPlan[Placement]) -> list[tuple[int, int]]:
    """Physical ranges that the plan writes to, ascending."""
    moved = [(move.destination, move.destination + move.count) for move in plan.moves]
    return sorted([*moved, *((span.physical, span.physical_end) for span in plan.writes)])


def _destinations_fault(plan: AppendPlan[Placement]) -> _Fault | None:
    ranges = _destinations(plan)
    capacity = plan.after.capacity
    for first, end in [*ranges, *((move.source, move.source + move.count) for move in plan.moves)]:
        if not 0 <= first < end <= capacity:
            return "a range of physical rows is empty or out of bounds", f"[0, {capacity})", f"[{first}, {end})"
    for (_, end), (first, _) in pairwise(ranges):
        if first < end:
            return "two writes meet in one physical row", f"a start at {end} or later", first
    return None


def _writes_fault(plan: AppendPlan[Placement]) -> _Fault | None:
    fresh = plan.after.resident.intersection(RowSet.of((plan.start, plan.after.position)))
    wanted = tuple(span for first, end in fresh for span in plan.after.spans(first, end))
    return None if plan.writes == wanted else ("new rows are not written where they are read", wanted, plan.writes)


def _old_rows_fault(plan: AppendPlan[Placement]) -> _Fault | None:
    destinations = _destinations(plan)
    kept = plan.before.resident.intersection(plan.after.resident)
    for first, end in kept:
        for logical, old, new, count in _aligned(plan.before.spans(first, end), plan.after.spans(first, end)):
            if old != new:
                if not any(
                    move.source <= old
                    and old + count <= move.source + move.count
                    and move.destination - move.source == new - old
                    for move in plan.moves
                ):
                    return f"rows [{logical}, {logical + count}) are read where nothing moved them", old, new
            elif any(a < old + count and old < b for a, b in destinations):
                return f"live rows [{logical}, {logical + count}) are overwritten", "untouched", destinations
    return None


def _aligned(before: Iterable[Span], after: Iterable[Span]) -> Iterator[tuple[int, int, int, int]]:
    """Pieces ``(logical, physical before, physical after, count)`` of two span lists over the same logical range."""
    for old in before:
        for new in after:
            first, end = max(old.logical, new.logical), min(old.logical_end, new.logical_end)
            if first < end:
                yield first, old.physical + first - old.logical, new.physical + first - new.logical, end - first


def overwritten(plan: AppendPlan[Placement]) -> tuple[Span, ...]:
    """Spans of old live rows whose physical rows the plan writes to: what a checkpoint keeps to undo the append.

    Putting these rows' bytes back and returning to ``plan.before`` undoes the append exactly. A rotating ring of full
    length gives the evicted rows; a placement that grows into unused rows gives none.
    """
    found: list[Span] = []
    for first, end in plan.before.resident:
        for span in plan.before.spans(first, end):
            for a, b in _destinations(plan):
                low, high = max(a, span.physical), min(b, span.physical_end)
                if low < high:
                    found.append(Span(span.logical + low - span.physical, low, high - low))
    return tuple(sorted(found))


def ring_spans(first: int, end: int, slot: int, size: int, base: int = 0) -> tuple[Span, ...]:
    """Spans of ``[first, end)`` in a ring of ``size`` rows behind physical row ``base``, row ``first`` at ``slot``.

    At most two spans: up to the seam, and from the ring's first row on. ``end - first`` must be at most ``size``.
    """
    head = min(end - first, size - slot)
    spans = (Span(first, base + slot, head), Span(first + head, base, end - first - head))
    return tuple(span for span in spans if span.count > 0)


def refused(code: str, message: str, layer: int | None, expected: object, found: object) -> InstallError:
    """The one error of this room's index arithmetic: a line that names layer, expected and found."""
    where = f"layer {layer}: " if layer is not None else ""
    return InstallError(
        code,
        f"{where}{message}; expected {_words(expected)}, found {_words(found)}",
        layer=layer,
        expected=_words(expected),
        found=_words(found),
    )


def _words(fact: object) -> object:
    return fact if isinstance(fact, int) else str(fact)


def require_next(placement: Placement, start: int, count: int, layer: int | None) -> None:
    """Hold an append to continuity: it starts at the placement's position and brings at least one row."""
    if start != placement.position:
        raise refused("discontinuity", "an append must start at the next position", layer, placement.position, start)
    if count < 1:
        raise refused("zero-rows", "an append brings at least one row", layer, "1 or more", count)
    require_position(start + count, layer)


def require_position(position: int, layer: int | None) -> None:
    """Positions fit in an i32 and are not negative."""
    if not 0 <= position <= MAX_POSITION:
        raise refused("position-out-of-range", "a position is out of range", layer, f"0 to {MAX_POSITION}", position)


def require_capacity(rows: int, capacity: int, layer: int | None, *, ring: bool = False) -> None:
    """``rows`` rows must fit in ``capacity`` physical ones."""
    if rows > capacity:
        code, what = ("ring-too-small", "the ring") if ring else ("capacity-too-small", "the plane")
        raise refused(code, f"{what} does not hold the rows", layer, f"room for {rows} rows", capacity)


def require_fresh(placement: Placement, layer: int | None) -> None:
    """A restore goes into an empty placement."""
    if placement.position != 0:
        raise refused("not-fresh", "a restore needs an empty destination", layer, "position 0", placement.position)


def require_resident(placement: Placement, first: int, end: int) -> None:
    """Every logical row of ``[first, end)`` must be held; ``end < first`` is refused as well."""
    if end < first or not placement.resident.contains(RowSet.of((first, end))):
        raise refused(
            "rows-not-resident",
            "the plane does not hold all rows asked for",
            None,
            f"rows within {placement.resident}",
            f"[{first}, {end})",
        )


def require_rewind(placement: Placement, position: int, layer: int | None) -> None:
    """A rewind goes backward, to a position whose need is still resident; it is refused otherwise, never clamped."""
    require_position(position, layer)
    if position > placement.position:
        raise refused(
            "forward-rewind", "a rewind does not go forward", layer, f"at most {placement.position}", position
        )
    need = placement.need(position)
    if not placement.resident.contains(need):
        raise refused(
            "beyond-headroom",
            f"rows that position {position} needs are gone",
            layer,
            f"rows {need}",
            f"rows {placement.resident}",
        )
