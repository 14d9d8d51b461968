"""Placements that keep a window of rows in a fixed place: rotating, pinned and chronological.

On append a ring overwrites its oldest rows. A batch's own queries may still need those: attention over the old rows
comes before the plan's writes (a staging copy, or a kernel that reads both). Where a row sits is part of the
answer, since attention sums rows in physical order: a restored ring therefore lies exactly where appending one row
after the other would have left it, at its own capacity.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpack.live.placement import (
    AppendPlan,
    Move,
    Span,
    refused,
    require_capacity,
    require_fresh,
    require_next,
    require_position,
    require_resident,
    require_rewind,
    ring_spans,
)
from kvpack.model.ranges import RowSet

__all__ = ["Chronological", "PinnedRing", "RotatingRing"]


@dataclass(frozen=True)
class RotatingRing:
    """``length`` rows from logical row ``origin_logical``, which lies at physical row ``origin_physical``, modulo
    capacity.

    Placement is state and never derived from a position while live. Where it equals ``row % capacity`` the law is
    ``modulo``, which a restore rebuilds; any other rotation is ``history``. ``capacity`` may exceed ``window``; a ring
    needs ``min(position, window)`` rows at any capacity.
    """

    capacity: int
    window: int
    length: int = 0
    origin_logical: int = 0
    origin_physical: int = 0

    def __post_init__(self) -> None:
        if (
            self.window < 1
            or not 0 <= self.length <= self.capacity
            or self.origin_logical < 0
            or not 0 <= self.origin_physical < self.capacity
        ):
            raise refused(
                "bad-placement",
                "a rotating ring",
                None,
                "window at least 1, length at most capacity, origin_physical below it",
                self,
            )

    @property
    def law(self) -> str:
        """``modulo`` where every row lies at ``row % capacity``, otherwise ``history``."""
        return "modulo" if self.origin_physical == self.origin_logical % self.capacity else "history"

    @property
    def position(self) -> int:
        """The logical row that comes next."""
        return self.origin_logical + self.length

    @property
    def next_slot(self) -> int:
        """The physical row that the next appended row goes to."""
        return (self.origin_physical + self.length) % self.capacity

    @property
    def resident(self) -> RowSet:
        """``[origin_logical, position)``."""
        return RowSet.of((self.origin_logical, self.position))

    def spans(self, first: int, end: int) -> tuple[Span, ...]:
        """One span, or two where the range crosses the physical end."""
        require_resident(self, first, end)
        slot = (self.origin_physical + first - self.origin_logical) % self.capacity
        return ring_spans(first, end, slot, self.capacity)

    def need(self, position: int) -> RowSet:
        """The last ``min(position, window)`` rows."""
        return RowSet.of((max(0, position - self.window), position))

    def append(self, start: int, count: int, *, layer: int | None = None) -> AppendPlan[RotatingRing]:
        """Append ``count`` rows over the oldest ones; of a batch wider than the ring only its tail is kept."""
        require_next(self, start, count, layer)
        evicted = max(0, self.length + count - self.capacity)
        if evicted:
            require_capacity(self.window, self.capacity, layer, ring=True)
        after = replace(
            self,
            length=self.length + count - evicted,
            origin_logical=self.origin_logical + evicted,
            origin_physical=(self.origin_physical + evicted) % self.capacity,
        )
        return AppendPlan(self, after, count, after.spans(max(start, after.origin_logical), after.position))

    def rewind(self, position: int, *, layer: int | None = None) -> RotatingRing:
        """Drop the rows from ``position`` on; ``beyond-headroom`` where a row that it needs was overwritten."""
        require_rewind(self, position, layer)
        if position < self.origin_logical:  # only position 0 needs no row that lies before the origin
            return replace(self, length=0, origin_logical=0, origin_physical=0)
        return replace(self, length=position - self.origin_logical)

    def restored(self, position: int, *, layer: int | None = None) -> RotatingRing:
        """This empty ring after its need at ``position`` was written into it, at the rotation of sequential appends."""
        require_fresh(self, layer)
        require_position(position, layer)
        length = min(position, self.window)
        require_capacity(length, self.capacity, layer, ring=True)
        origin = position - length
        return replace(self, length=length, origin_logical=origin, origin_physical=origin % self.capacity)


@dataclass(frozen=True)
class PinnedRing:
    """The law ``pinned``: rows ``[0, sink)`` stay at ``[0, sink)``, the others rotate in the rows behind them.

    Row ``r >= sink`` lies at ``sink + (r - sink) % (capacity - sink)``. The ring holds the rows ``[tail_first,
    position)`` of the tail; ``tail_first`` is at least ``sink``. ``window`` counts the rows of the tail, as in a
    rotating ring.
    """

    capacity: int
    sink: int
    window: int
    position: int = 0
    tail_first: int | None = None

    law = "pinned"

    def __post_init__(self) -> None:
        if self.tail_first is None:
            object.__setattr__(self, "tail_first", self.sink)
        if (
            self.sink < 0
            or self.capacity <= self.sink
            or self.window < 1
            or self.position < 0
            or not self.sink <= self._first <= max(self.sink, self.position)
            or self.position - self._first > self.capacity - self.sink
        ):
            raise refused(
                "bad-placement",
                "a pinned ring",
                None,
                "capacity above sink, window at least 1, sink <= tail_first <= position, a tail that fits",
                self,
            )

    @property
    def _first(self) -> int:
        return self.sink if self.tail_first is None else self.tail_first

    @property
    def _tail_capacity(self) -> int:
        return self.capacity - self.sink

    @property
    def resident(self) -> RowSet:
        """``[0, min(position, sink))`` and ``[tail_first, position)``."""
        return RowSet.of((0, min(self.position, self.sink)), (self._first, self.position))

    def spans(self, first: int, end: int) -> tuple[Span, ...]:
        """The pinned part and the tail's one or two spans; parts that touch physically are one."""
        require_resident(self, first, end)
        pinned = min(self.sink, end) - first
        tail = max(first, self.sink)
        slot = (tail - self.sink) % self._tail_capacity
        spans = list(ring_spans(tail, end, slot, self._tail_capacity, self.sink)) if end > tail else []
        if pinned > 0:
            if spans and spans[0].physical == self.sink:
                spans[0] = Span(first, first, pinned + spans[0].count)
            else:
                spans.insert(0, Span(first, first, pinned))
        return tuple(spans)

    def need(self, position: int) -> RowSet:
        """The pinned rows and the last ``min(position, window)`` rows, merged where they overlap."""
        return RowSet.of((0, min(position, self.sink)), (max(0, position - self.window), position))

    def append(self, start: int, count: int, *, layer: int | None = None) -> AppendPlan[PinnedRing]:
        """Append ``count`` rows: pinned while there is room, then over the oldest rows of the tail."""
        require_next(self, start, count, layer)
        end = start + count
        if end - self._first > self._tail_capacity:
            require_capacity(self.window, self._tail_capacity, layer, ring=True)
        after = replace(self, position=end, tail_first=max(self._first, end - self._tail_capacity))
        kept = RowSet.of((start, end)).intersection(after.resident)
        return AppendPlan(self, after, count, tuple(span for a, b in kept for span in after.spans(a, b)))

    def rewind(self, position: int, *, layer: int | None = None) -> PinnedRing:
        """Drop the rows from ``position`` on; ``beyond-headroom`` where a row that it needs was overwritten."""
        require_rewind(self, position, layer)
        first = self.sink if position <= self.sink else self._first
        return replace(self, position=position, tail_first=first)

    def restored(self, position: int, *, layer: int | None = None) -> PinnedRing:
        """This empty ring after its need at ``position`` was written into it."""
        require_fresh(self, layer)
        require_position(position, layer)
        first = max(self.sink, position - self.window)
        require_capacity(position - first, self._tail_capacity, layer, ring=True)
        return replace(self, position=position, tail_first=first)


@dataclass(frozen=True)
class Chronological:
    """The law ``chronological``: the oldest row at physical row 0, everything shifts down when the plane is full.

    Row ``r`` lies at ``r - max(0, position - capacity)``; the plane holds ``[first, position)``. A cache that keeps
    ``window - 1`` rows has that capacity; one of ``window`` rows never reads its oldest, so a restore needs the last
    ``window - 1`` rows of either and leaves row 0 dead in the second.
    """

    capacity: int
    window: int
    position: int = 0
    first: int = 0

    law = "chronological"

    def __post_init__(self) -> None:
        if self.capacity < 1 or self.window < 1 or self.position < 0 or not self._shift <= self.first <= self.position:
            raise refused(
                "bad-placement",
                "a chronological plane",
                None,
                "capacity and window at least 1, position - capacity <= first <= position",
                self,
            )

    @property
    def _shift(self) -> int:
        return max(0, self.position - self.capacity)

    @property
    def resident(self) -> RowSet:
        """``[first, position)``."""
        return RowSet.of((self.first, self.position))

    def spans(self, first: int, end: int) -> tuple[Span, ...]:
        """One span, or none for an empty range."""
        require_resident(self, first, end)
        return (Span(first, first - self._shift, end - first),) if end > first else ()

    def need(self, position: int) -> RowSet:
        """The last ``min(position, window - 1)`` rows."""
        return RowSet.of((max(0, position - (self.window - 1)), position))

    def append(self, start: int, count: int, *, layer: int | None = None) -> AppendPlan[Chronological]:
        """Append ``count`` rows: one overlapping move of the rows that stay, then the new rows behind them."""
        require_next(self, start, count, layer)
        end = start + count
        if end - self.first > self.capacity:
            require_capacity(self.window - 1, self.capacity, layer, ring=True)
        after = replace(self, position=end, first=max(self.first, end - self.capacity))
        kept = start - after.first
        moves: tuple[Move, ...] = ()
        if kept > 0 and after._shift > self._shift:
            moves = (Move(after.first - self._shift, after.first - after._shift, kept),)
        return AppendPlan(self, after, count, after.spans(max(start, after.first), end), moves)

    def rewind(self, position: int, *, layer: int | None = None) -> Chronological:
        """Drop the rows from ``position`` on; ``beyond-headroom`` once rows have shifted, as they would have to
        shift back.

        Position 0 needs no row, and gives an empty plane.
        """
        require_rewind(self, position, layer)
        if position == 0:
            return replace(self, position=0, first=0)
        if position < self.position and self._shift > 0:
            raise refused(
                "beyond-headroom",
                f"a rewind to {position} would shift the rows back",
                layer,
                f"a plane that has not shifted (position at most {self.capacity})",
                self.position,
            )
        return replace(self, position=position, first=min(self.first, position))

    def restored(self, position: int, *, layer: int | None = None) -> Chronological:
        """This empty plane after its need at ``position`` was written into it."""
        require_fresh(self, layer)
        require_position(position, layer)
        count = min(position, self.window - 1)
        require_capacity(count, self.capacity, layer, ring=True)
        return replace(self, position=position, first=position - count)
