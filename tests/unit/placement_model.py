"""A brute-force model of placements: planes as lists of logical rows, one naive oracle a law.

:func:`explore` walks every state that appends, rewinds and restores can reach up to a position, from every state
once, and holds the spans of each to the oracle and to the cells that the plans have written.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol

import pytest

from kvpack.errors import InstallError
from kvpack.live.placement import AppendPlan, Placement, overwritten
from kvpack.model.ranges import RowSet

Cells = list[int | None]


class Oracle(Protocol):
    """What a law does, one row after the other. ``rows`` gives physical by logical row for what is held."""

    def append(self, start: int, count: int) -> None: ...

    def rewind(self, position: int) -> None: ...

    def restore(self, position: int, need: RowSet) -> None: ...

    def rows(self, position: int) -> dict[int, int]: ...


class SlotOracle:
    """Row ``r`` is written to ``slot(r)`` and is there until another row is: linear, modulo, pinned, paged."""

    def __init__(self, capacity: int, slot: Callable[[int], int]) -> None:
        self.cells: Cells = [None] * capacity
        self.slot = slot

    def append(self, start: int, count: int) -> None:
        for row in range(start, start + count):
            self.cells[self.slot(row)] = row

    def rewind(self, position: int) -> None:
        pass

    def restore(self, position: int, need: RowSet) -> None:
        for first, end in need:
            self.append(first, end - first)

    def rows(self, position: int) -> dict[int, int]:
        return {row: self.slot(row) for row in range(position) if self.cells[self.slot(row)] == row}


class ShiftOracle:
    """Chronological: append behind the last row, and drop the first one when there is no room."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.cells: Cells = []

    def append(self, start: int, count: int) -> None:
        for row in range(start, start + count):
            self.cells.append(row)
            self.cells = self.cells[-self.capacity :]

    def rewind(self, position: int) -> None:
        self.cells = self.cells[:position]

    def restore(self, position: int, need: RowSet) -> None:
        self.append(0, position)
        self.cells = [
            row if row is not None and need.contains(RowSet.of((row, row + 1))) else None for row in self.cells
        ]

    def rows(self, position: int) -> dict[int, int]:
        return {row: at for at, row in enumerate(self.cells) if row is not None}


def move_and_write(cells: Cells, plan: AppendPlan[Any]) -> Cells:
    """The cells after a plan: moves through a copy of their source, then the new rows."""
    after = list(cells)
    for move in plan.moves:
        after[move.destination : move.destination + move.count] = after[move.source : move.source + move.count]
    for span in plan.writes:
        after[span.physical : span.physical_end] = range(span.logical, span.logical_end)
    return after


def fill(placement: Placement, capacity: int, rows: RowSet) -> Cells:
    """The cells after a restore has written ``rows`` where the placement says."""
    cells: Cells = [None] * capacity
    for first, end in rows:
        for span in placement.spans(first, end):
            cells[span.physical : span.physical_end] = range(span.logical, span.logical_end)
    return cells


def check_spans(placement: Placement, cells: Cells) -> dict[int, int]:
    """Every resident range is partitioned exactly, in order, into maximal spans of the right cells."""
    found: dict[int, int] = {}
    for first, end in placement.resident:
        for a in range(first, end):
            for b in range(a, end + 1):
                at, last = a, None
                for span in placement.spans(a, b):
                    assert span.logical == at
                    assert span.count > 0
                    assert 0 <= span.physical < span.physical_end <= placement.capacity
                    assert span.physical != last, "two spans that touch are one"
                    assert cells[span.physical : span.physical_end] == list(range(at, at + span.count))
                    found.update({at + i: span.physical + i for i in range(span.count)})
                    at, last = span.logical_end, span.physical_end
                assert at == b
    for row in range(placement.position + 2):
        if row not in found:
            with pytest.raises(InstallError) as refusal:
                placement.spans(row, row + 1)
            assert refusal.value.code == "rows-not-resident"
    assert len(set(found.values())) == len(found)
    return found


def check_undo(plan: AppendPlan[Any], before: Cells, after: Cells) -> None:
    """Putting the overwritten rows back restores every row that the placement held."""
    undone = list(after)
    for span in overwritten(plan):
        undone[span.physical : span.physical_end] = range(span.logical, span.logical_end)
    for first, end in plan.before.resident:
        for span in plan.before.spans(first, end):
            assert undone[span.physical : span.physical_end] == before[span.physical : span.physical_end]


def explore(
    fresh: Any,
    oracle: Oracle,
    limit: int,
    *,
    restores: Iterable[int] = (),
    refusals: frozenset[str] = frozenset(),
    may_rewind: Callable[[Any, int], bool] = lambda placement, position: True,
) -> int:
    """Reach every state up to position ``limit``; returns how many. ``refusals`` are codes an append may end with.

    A rewind must succeed exactly where the oracle still holds what the position needs and ``may_rewind`` agrees.
    """
    states: list[tuple[Any, Cells, Oracle]] = [(fresh, [None] * fresh.capacity, oracle)]
    for position in restores:
        placed, filled = fresh.restored(position), copy.deepcopy(oracle)
        filled.restore(position, fresh.need(position))
        states.append((placed, fill(placed, fresh.capacity, fresh.need(position)), filled))
    seen: set[Hashable] = set()
    while states:
        placement, cells, model = states.pop()
        if placement in seen:
            continue
        seen.add(placement)
        held = check_spans(placement, cells)
        assert held == model.rows(placement.position)
        for count in range(1, limit - placement.position + 1):
            try:
                plan = placement.append(placement.position, count)
            except InstallError as refusal:
                if refusal.code in refusals:
                    continue
                raise
            grown = copy.deepcopy(model)
            grown.append(placement.position, count)
            after = move_and_write(cells, plan)
            assert plan.live_rows == len([row for row in grown.rows(plan.after.position) if row >= plan.start])
            check_undo(plan, cells, after)
            states.append((plan.after, after, grown))
        for position in range(placement.position + 2):
            need = fresh.need(position)
            whole = position <= placement.position and all(row in held for a, b in need for row in range(a, b))
            if whole and may_rewind(placement, position):
                shorter = copy.deepcopy(model)
                shorter.rewind(position)
                states.append((placement.rewind(position), cells, shorter))
            else:
                with pytest.raises(InstallError) as error:
                    placement.rewind(position)
                forward = position > placement.position
                assert error.value.code == ("forward-rewind" if forward else "beyond-headroom")
    return len(seen)
