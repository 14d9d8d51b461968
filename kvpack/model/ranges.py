"""Sets of rows as ascending, disjoint, non-touching half-open ranges. Pure index arithmetic."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["RowSet"]


@dataclass(frozen=True, slots=True)
class RowSet:
    """A set of row numbers: ``ranges`` is ascending, disjoint and not touching, each ``(first, end)`` non-empty.

    Build one with :meth:`of`, which normalises; the constructor takes ranges that are normal already.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, *ranges: tuple[int, int]) -> RowSet:
        """The union of ``ranges``; empty ones (``end <= first``) vanish, touching ones merge."""
        merged: list[tuple[int, int]] = []
        for first, end in sorted(r for r in ranges if r[1] > r[0]):
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((first, end))
        return cls(tuple(merged))

    @classmethod
    def union_of(cls, sets: Iterable[RowSet]) -> RowSet:
        """The union of many sets."""
        return cls.of(*(r for rows in sets for r in rows.ranges))

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.ranges)

    def __str__(self) -> str:
        return " ".join(f"[{first}, {end})" for first, end in self.ranges) or "none"

    @property
    def count(self) -> int:
        """Number of rows in the set."""
        return sum(end - first for first, end in self.ranges)

    @property
    def end(self) -> int:
        """One past the last row; 0 for the empty set."""
        return self.ranges[-1][1] if self.ranges else 0

    def contains(self, other: RowSet) -> bool:
        """Whether every row of ``other`` is in this set."""
        firsts = [first for first, _ in self.ranges]
        for first, end in other.ranges:
            at = bisect_right(firsts, first) - 1
            if at < 0 or self.ranges[at][1] < end:
                return False
        return True

    def intersection(self, other: RowSet) -> RowSet:
        """Rows that are in both sets."""
        return RowSet.of(
            *((max(a, c), min(b, d)) for a, b in self.ranges for c, d in other.ranges if max(a, c) < min(b, d))
        )

    def minus(self, other: RowSet) -> RowSet:
        """Rows of this set that are not in ``other``."""
        left: list[tuple[int, int]] = []
        for first, end in self.ranges:
            at = first
            for a, b in other.ranges:
                if b <= at or a >= end:
                    continue
                left.append((at, a))
                at = max(at, b)
            left.append((at, end))
        return RowSet.of(*left)

    def offset_of(self, row: int) -> int:
        """How many rows of the set come before ``row``; ``row`` must be in the set.

        This is the index of ``row`` in a buffer that holds the set's rows one behind the other.
        """
        before = 0
        for first, end in self.ranges:
            if first <= row < end:
                return before + row - first
            before += end - first
        raise IndexError(row)

    def split_at(self, points: Iterable[int]) -> Iterator[tuple[int, int]]:
        """The set's ranges cut at every point that lies inside one, in ascending order."""
        ordered = sorted(set(points))
        for first, end in self.ranges:
            at = first
            for point in ordered[bisect_right(ordered, first) :]:
                if point >= end:
                    break
                yield at, point
                at = point
            yield at, end
