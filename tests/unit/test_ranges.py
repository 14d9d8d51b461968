"""RowSet against plain Python sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpack.model.ranges import RowSet

ranges = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6)


def rows_of(parts: list[tuple[int, int]]) -> set[int]:
    return {row for first, end in parts for row in range(first, end)}


@given(ranges)
def test_of_is_the_union_in_normal_form(parts: list[tuple[int, int]]) -> None:
    rows = RowSet.of(*parts)
    assert rows_of(list(rows)) == rows_of(parts)
    assert all(first < end for first, end in rows)
    assert all(a[1] < b[0] for a, b in zip(rows.ranges, rows.ranges[1:], strict=False))


@given(ranges, ranges)
def test_set_operations(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    a, b = RowSet.of(*left), RowSet.of(*right)
    x, y = rows_of(left), rows_of(right)
    assert rows_of(list(a.intersection(b))) == x & y
    assert rows_of(list(a.minus(b))) == x - y
    assert a.contains(b) == (y <= x)
    assert RowSet.union_of((a, b)) == RowSet.of(*left, *right)
    assert a.count == len(x)
    assert a.end == max(x, default=-1) + 1


@given(ranges)
def test_offset_counts_the_rows_before(parts: list[tuple[int, int]]) -> None:
    rows = RowSet.of(*parts)
    for index, row in enumerate(sorted(rows_of(parts))):
        assert rows.offset_of(row) == index
    with pytest.raises(IndexError):
        rows.offset_of(99)


@given(ranges, st.lists(st.integers(-3, 45), max_size=8))
def test_split_at_cuts_exactly_at_the_points(parts: list[tuple[int, int]], points: list[int]) -> None:
    rows = RowSet.of(*parts)
    pieces = list(rows.split_at(points))
    assert rows_of(pieces) == rows_of(parts)
    assert sum(end - first for first, end in pieces) == rows.count
    starts = {first for first, _ in rows}
    assert {first for first, _ in pieces} == starts | {p for p in points if p in rows_of(parts) and p not in starts}
