"""Placements that keep every row: one run of rows, and pages of a pool.

A sliding layer may lie in either. It then keeps all rows that it is given, and needs only those that its next query
reads: a rotating ring's cut installs into pages, with the rows below the window absent from ``first`` down.

Refusals of :class:`Paged` beside those of :mod:`kvpack.live.placement`: ``page-out-of-range``, ``page-duplicate``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpack.live.placement import (
    AppendPlan,
    Span,
    refused,
    require_capacity,
    require_fresh,
    require_next,
    require_position,
    require_resident,
    require_rewind,
)
from kvpack.model.ranges import RowSet

__all__ = ["Linear", "Paged"]


def _resident(placement: Linear | Paged) -> RowSet:
    return RowSet.of((0, min(placement.sink, placement.length)), (placement.first, placement.length))


def _need(placement: Linear | Paged, position: int) -> RowSet:
    if placement.window is None:
        return RowSet.of((0, position))
    return RowSet.of((0, min(position, placement.sink)), (max(0, position - (placement.window - 1)), position))


def _restored_first(placement: Linear | Paged, position: int) -> int:
    return 0 if placement.window is None else max(0, position - (placement.window - 1))


@dataclass(frozen=True)
class Linear:
    """The law ``linear``: ``physical = logical``. ``length`` rows of ``capacity`` are in use.

    ``window`` and ``sink`` are those of a sliding layer. ``first`` is 0 unless a restore brought a window only; the
    plane then holds ``[0, min(sink, length))`` and ``[first, length)``.
    """

    capacity: int
    length: int = 0
    window: int | None = None
    sink: int = 0
    first: int = 0

    law = "linear"

    def __post_init__(self) -> None:
        if not 0 <= self.length <= self.capacity:
            raise refused("bad-placement", "a linear plane", None, f"length 0 to {self.capacity}", self.length)
        if not 0 <= self.first <= self.length:
            raise refused("bad-placement", "a linear plane", None, f"first 0 to {self.length}", self.first)

    @property
    def position(self) -> int:
        """The logical row that comes next."""
        return self.length

    @property
    def resident(self) -> RowSet:
        """All rows, ``[0, length)``; after a restore of a window only the pinned ones and those from ``first`` on."""
        return _resident(self)

    def spans(self, first: int, end: int) -> tuple[Span, ...]:
        """One span, or none for an empty range."""
        require_resident(self, first, end)
        return (Span(first, first, end - first),) if end > first else ()

    def need(self, position: int) -> RowSet:
        """All rows, ``[0, position)``; of a sliding layer the pinned ones and the last ``window - 1``."""
        return _need(self, position)

    def append(self, start: int, count: int, *, layer: int | None = None) -> AppendPlan[Linear]:
        """Append ``count`` rows; ``capacity-too-small`` beyond the plane's end."""
        require_next(self, start, count, layer)
        require_capacity(start + count, self.capacity, layer)
        return AppendPlan(self, replace(self, length=start + count), count, (Span(start, start, count),))

    def rewind(self, position: int, *, layer: int | None = None) -> Linear:
        """Drop the rows from ``position`` on; ``beyond-headroom`` where a row that it needs was never restored."""
        require_rewind(self, position, layer)
        return replace(self, length=position, first=min(self.first, position))

    def restored(self, position: int, *, layer: int | None = None) -> Linear:
        """This empty plane after its need at ``position`` was written into it."""
        require_fresh(self, layer)
        require_position(position, layer)
        require_capacity(position, self.capacity, layer)
        return replace(self, length=position, first=_restored_first(self, position))


@dataclass(frozen=True)
class Paged:
    """The law ``paged``: logical row ``r`` lies in page ``block_table[r // page_size]``, at row ``r % page_size``
    of it.

    The pool has ``num_pages`` pages and is the plane; the session owns the pages of ``block_table``, of which the
    last one in use may be partial. Adjacent pages join into one span. ``window``, ``sink`` and ``first`` are as in
    :class:`Linear`.
    """

    block_table: tuple[int, ...]
    page_size: int
    num_pages: int
    length: int = 0
    window: int | None = None
    sink: int = 0
    first: int = 0

    law = "paged"

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.num_pages < 1:
            raise refused(
                "bad-placement",
                "a pool of pages",
                None,
                "page_size and num_pages of at least 1",
                f"{self.page_size} and {self.num_pages}",
            )
        seen: set[int] = set()
        for page in self.block_table:
            if not 0 <= page < self.num_pages:
                raise refused("page-out-of-range", "a block table", None, f"pages 0 to {self.num_pages - 1}", page)
            if page in seen:
                raise refused("page-duplicate", "a block table", None, "each page once", f"page {page} twice")
            seen.add(page)
        if not 0 <= self.length <= self._room:
            raise refused("bad-placement", "a paged plane", None, f"length 0 to {self._room}", self.length)
        if not 0 <= self.first <= self.length:
            raise refused("bad-placement", "a paged plane", None, f"first 0 to {self.length}", self.first)

    @property
    def capacity(self) -> int:
        """Physical rows of the whole pool."""
        return self.num_pages * self.page_size

    @property
    def _room(self) -> int:
        return len(self.block_table) * self.page_size

    @property
    def position(self) -> int:
        """The logical row that comes next."""
        return self.length

    @property
    def resident(self) -> RowSet:
        """All rows, ``[0, length)``; after a restore of a window only the pinned ones and those from ``first`` on."""
        return _resident(self)

    def spans(self, first: int, end: int) -> tuple[Span, ...]:
        """One span for each run of adjacent pages."""
        require_resident(self, first, end)
        found: list[Span] = []
        at = first
        while at < end:
            page, row = divmod(at, self.page_size)
            count = min(self.page_size - row, end - at)
            physical = self.block_table[page] * self.page_size + row
            if found and found[-1].physical_end == physical:
                found[-1] = replace(found[-1], count=found[-1].count + count)
            else:
                found.append(Span(at, physical, count))
            at += count
        return tuple(found)

    def need(self, position: int) -> RowSet:
        """All rows, ``[0, position)``; of a sliding layer the pinned ones and the last ``window - 1``."""
        return _need(self, position)

    def with_pages(self, *pages: int) -> Paged:
        """The same rows with ``pages`` added behind the block table."""
        return replace(self, block_table=(*self.block_table, *pages))

    def append(self, start: int, count: int, *, layer: int | None = None) -> AppendPlan[Paged]:
        """Append ``count`` rows; ``capacity-too-small`` beyond the last page of the block table."""
        require_next(self, start, count, layer)
        require_capacity(start + count, self._room, layer)
        after = replace(self, length=start + count)
        return AppendPlan(self, after, count, after.spans(start, start + count))

    def rewind(self, position: int, *, layer: int | None = None) -> Paged:
        """Drop the rows from ``position`` on; the block table keeps its pages. Refused as a linear plane does."""
        require_rewind(self, position, layer)
        return replace(self, length=position, first=min(self.first, position))

    def restored(self, position: int, *, layer: int | None = None) -> Paged:
        """This empty plane after its need at ``position`` was written into it."""
        require_fresh(self, layer)
        require_position(position, layer)
        require_capacity(position, self._room, layer)
        return replace(self, length=position, first=_restored_first(self, position))
