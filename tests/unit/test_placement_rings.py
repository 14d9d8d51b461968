"""Rotating, pinned and chronological placements: exhaustive against the model, properties, figures and controls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpack.errors import InstallError
from kvpack.live.placement import AppendPlan, Move, Span
from kvpack.live.rings import Chronological, PinnedRing, RotatingRing
from kvpack.model.ranges import RowSet
from tests.unit.placement_model import Cells, ShiftOracle, SlotOracle, explore, fill, move_and_write

SIZES = [(capacity, window) for capacity in range(1, 8) for window in range(1, capacity + 1)]
SHIFTED_SIZES = [(capacity, window) for capacity in range(1, 8) for window in range(1, capacity + 2)]
PINNED_SIZES = [(c, sink, window) for c in range(1, 8) for sink in range(c) for window in range(1, c - sink + 1)]


def pinned_slot(capacity: int, sink: int) -> Any:
    return lambda row: row if row < sink else sink + (row - sink) % (capacity - sink)


def explore_rotating(ring: RotatingRing, limit: int) -> int:
    return explore(ring, SlotOracle(ring.capacity, lambda row: row % ring.capacity), limit, restores=range(limit + 1))


@pytest.mark.parametrize(("capacity", "window"), SIZES)
def test_rotating_against_the_model(capacity: int, window: int) -> None:
    assert explore_rotating(RotatingRing(capacity, window), 2 * capacity + 3) > 2 * capacity


@pytest.mark.parametrize(("capacity", "sink", "window"), PINNED_SIZES)
def test_pinned_against_the_model(capacity: int, sink: int, window: int) -> None:
    limit = 2 * capacity + 3
    oracle = SlotOracle(capacity, pinned_slot(capacity, sink))
    assert explore(PinnedRing(capacity, sink, window), oracle, limit, restores=range(limit + 1)) > capacity


@pytest.mark.parametrize(("capacity", "window"), SHIFTED_SIZES)
def test_chronological_against_the_model(capacity: int, window: int) -> None:
    limit = 2 * capacity + 3

    def may_rewind(plane: Chronological, position: int) -> bool:
        return position in (0, plane.position) or plane.position <= capacity

    fresh = Chronological(capacity, window)
    states = explore(fresh, ShiftOracle(capacity), limit, restores=range(limit + 1), may_rewind=may_rewind)
    assert states > capacity


# -- controls: a planted fault must be found by the model or by the checker of plans -------------------------------


class PackedAtOrigin(RotatingRing):
    def restored(self, position: int, *, layer: int | None = None) -> RotatingRing:
        return replace(super().restored(position, layer=layer), origin_physical=0)


class RotatedOneFurther(RotatingRing):
    def restored(self, position: int, *, layer: int | None = None) -> RotatingRing:
        ring = super().restored(position, layer=layer)
        return replace(ring, origin_physical=(ring.origin_physical + 1) % self.capacity)


class EvictsOneMore(RotatingRing):
    def append(self, start: int, count: int, *, layer: int | None = None) -> AppendPlan[RotatingRing]:
        plan = super().append(start, count, layer=layer)
        if plan.after.length < self.capacity:
            return plan
        after = replace(plan.after, length=self.capacity - 1, origin_logical=plan.after.origin_logical + 1)
        first = max(start, after.origin_logical)
        return AppendPlan(self, after, count, after.spans(first, after.position))


class KeepsOneMore(RotatingRing):
    def restored(self, position: int, *, layer: int | None = None) -> RotatingRing:
        length = min(position, self.window + 1, self.capacity)
        origin = position - length
        return replace(self, length=length, origin_logical=origin, origin_physical=origin % self.capacity)


@pytest.mark.parametrize("broken", [PackedAtOrigin, RotatedOneFurther, EvictsOneMore, KeepsOneMore])
def test_a_planted_formula_is_found(broken: type[RotatingRing]) -> None:
    with pytest.raises((AssertionError, InstallError)):
        explore_rotating(broken(5, 4), 13)


def test_a_pinned_slot_counted_from_row_zero_is_found() -> None:
    wrong = SlotOracle(6, lambda row: row if row < 2 else 2 + row % 4)
    with pytest.raises(AssertionError):
        explore(PinnedRing(6, 2, 3), wrong, 12)


# -- rotating ring -------------------------------------------------------------------------------------------------


def test_a_chunk_that_crosses_the_wrap() -> None:
    plan = RotatingRing(2048, 2048, 1900).append(1900, 512)
    assert plan.after == RotatingRing(2048, 2048, 2048, 364, 364)
    assert (plan.first_source_row, plan.live_rows) == (0, 512)
    assert plan.writes == (Span(1900, 1900, 148), Span(2048, 0, 364))


def test_a_chunk_in_steady_state() -> None:
    plan = RotatingRing(2048, 2048, 2048, 364, 364).append(2412, 512)
    assert plan.after == RotatingRing(2048, 2048, 2048, 876, 876)
    assert (plan.first_source_row, plan.live_rows) == (0, 512)


def test_a_batch_wider_than_the_ring_keeps_its_own_tail() -> None:
    plan = RotatingRing(8, 8, 3).append(3, 20)
    assert (plan.first_source_row, plan.live_rows) == (12, 8)
    assert plan.after == RotatingRing(8, 8, 8, 15, 7)


def test_a_cut_installs_at_a_larger_capacity() -> None:
    producer = RotatingRing(12, 8).append(0, 29).after
    assert producer.resident == RowSet.of((17, 29))
    assert producer.spans(21, 29) == (Span(21, 9, 3), Span(24, 0, 5))
    fresh = RotatingRing(16, 8)
    assert fresh.need(29) == RowSet.of((21, 29))
    ring = fresh.restored(29)
    assert ring.law == "modulo"
    assert ring.next_slot == 13
    assert ring.spans(21, 29) == (Span(21, 5, 8),)
    cells = fill(ring, 16, ring.need(29))
    assert [cells.index(row) for row in range(21, 29)] == [row % 16 for row in range(21, 29)]


def test_a_cut_of_an_unwrapped_ring() -> None:
    ring = RotatingRing(8, 8).restored(4)
    assert (ring.spans(0, 4), ring.next_slot) == ((Span(0, 0, 4),), 4)


@pytest.mark.parametrize(
    "refuse",
    [
        lambda: RotatingRing(6, 8).restored(29, layer=3),
        lambda: RotatingRing(6, 8).append(0, 7, layer=3),
        lambda: PinnedRing(8, 2, 8).restored(29, layer=3),
        lambda: PinnedRing(8, 2, 8).append(0, 9, layer=3),
        lambda: Chronological(6, 9).restored(29, layer=3),
        lambda: Chronological(6, 9).append(0, 7, layer=3),
    ],
)
def test_ring_too_small(refuse: Any) -> None:
    with pytest.raises(InstallError, match="room for 8 rows, found 6") as refusal:
        refuse()
    assert (refusal.value.code, refusal.value.layer, refusal.value.found) == ("ring-too-small", 3, 6)


def test_a_ring_below_its_window_serves_a_short_context() -> None:
    assert RotatingRing(6, 8).restored(6) == RotatingRing(6, 8).append(0, 6).after


@pytest.mark.parametrize("capacity", range(1, 8))
def test_only_a_rotation_by_position_is_modulo(capacity: int) -> None:
    for origin in range(12):
        for slot in range(capacity):
            ring = RotatingRing(capacity, capacity, capacity, origin, slot)
            assert ring.law == ("modulo" if slot == origin % capacity else "history")
            assert ring.append(ring.position, 5).after.law == ring.law


def test_a_rewind_across_the_wrap_is_refused() -> None:
    ring = RotatingRing(8, 8).restored(29)
    with pytest.raises(InstallError) as refusal:
        ring.rewind(25, layer=4)
    error = refusal.value
    assert (error.code, error.layer) == ("beyond-headroom", 4)
    assert (error.expected, error.found) == ("rows [17, 25)", "rows [21, 29)")
    assert RotatingRing(8, 8, 6).rewind(4).next_slot == 4


# -- pinned and chronological --------------------------------------------------------------------------------------


def test_pinned_rows_stay_and_the_tail_rotates_behind_them() -> None:
    ring = PinnedRing(12, 4, 8).restored(29)
    assert ring.need(29) == RowSet.of((0, 4), (21, 29))
    assert ring.need(10) == RowSet.of((0, 10))
    assert ring.spans(0, 4) == (Span(0, 0, 4),)
    assert ring.spans(21, 29) == (Span(21, 5, 7), Span(28, 4, 1))
    plan = PinnedRing(12, 4, 8).append(0, 29)
    assert plan.after == ring
    assert plan.writes == (Span(0, 0, 4), Span(21, 5, 7), Span(28, 4, 1))


@pytest.mark.parametrize("p", range(24))
def test_the_two_chronological_caches(p: int) -> None:
    """One keeps ``window - 1`` rows; one keeps ``window`` rows, whose oldest is neither read nor needed."""
    dynamic, static = Chronological(7, 8).restored(p), Chronological(8, 8).restored(p)
    assert dynamic.need(p) == static.need(p) == RowSet.of((max(0, p - 7), p))
    assert dynamic == (Chronological(7, 8).append(0, p).after if p else Chronological(7, 8))
    if p:
        (span,) = static.spans(p - 1, p)
        assert span.physical == min(p, 8) - 1


def test_a_chronological_append_moves_what_stays() -> None:
    plan = Chronological(4, 4, 6, 2).append(6, 3)
    assert plan.moves == (Move(3, 0, 1),)
    assert plan.writes == (Span(6, 1, 3),)
    assert Chronological(4, 4, 6, 2).append(6, 9).moves == ()


@pytest.mark.parametrize(
    "refuse",
    [
        lambda: RotatingRing(0, 1),
        lambda: RotatingRing(4, 0),
        lambda: RotatingRing(4, 4, 5),
        lambda: RotatingRing(4, 4, 4, -1),
        lambda: RotatingRing(4, 4, 4, 0, 4),
        lambda: PinnedRing(4, 4, 1),
        lambda: PinnedRing(4, -1, 1),
        lambda: PinnedRing(4, 1, 3, 9, 5),
        lambda: PinnedRing(4, 1, 3, 9, 10),
        lambda: Chronological(0, 1),
        lambda: Chronological(4, 4, 9, 4),
        lambda: Chronological(4, 4, 2, 3),
    ],
)
def test_bad_placement(refuse: Any) -> None:
    with pytest.raises(InstallError) as refusal:
        refuse()
    assert refusal.value.code == "bad-placement"


# -- properties ----------------------------------------------------------------------------------------------------


@st.composite
def rings(draw: st.DrawFn) -> Any:
    capacity = draw(st.integers(1, 100))
    kind = draw(st.sampled_from(["rotating", "pinned", "chronological"]))
    if kind == "pinned":
        sink = draw(st.integers(0, capacity - 1))
        return PinnedRing(capacity, sink, draw(st.integers(1, capacity - sink)))
    if kind == "rotating":
        return RotatingRing(capacity, draw(st.integers(1, capacity)))
    return Chronological(capacity, draw(st.integers(1, capacity + 1)))


batches = st.lists(st.integers(1, 120), min_size=1, max_size=5)


@given(rings(), batches)
def test_batches_leave_what_single_appends_leave(ring: Any, counts: list[int]) -> None:
    batched = single = ring
    cells: Cells = [None] * ring.capacity
    single_cells = list(cells)
    for count in counts:
        plan = batched.append(batched.position, count)
        batched, cells = plan.after, move_and_write(cells, plan)
        for _ in range(count):
            plan = single.append(single.position, 1)
            single, single_cells = plan.after, move_and_write(single_cells, plan)
        assert batched == single
    whole = ring.append(0, sum(counts))
    assert whole.after == batched
    assert move_and_write([None] * ring.capacity, whole) == cells == single_cells


@given(rings(), st.integers(1, 400), batches)
def test_a_restored_ring_lies_as_sequential_appends_left_it(ring: Any, position: int, more: list[int]) -> None:
    lived, restored = ring.append(0, position).after, ring.restored(position)
    for count in more:
        assert lived.resident.contains(restored.resident)
        assert restored.resident.contains(ring.need(restored.position))
        for first, end in restored.resident:
            assert restored.spans(first, end) == lived.spans(first, end)
        a, b = lived.append(lived.position, count), restored.append(restored.position, count)
        assert a.writes == b.writes
        lived, restored = a.after, b.after
    if restored.position - position >= ring.capacity:
        assert restored == lived


@given(rings(), st.integers(1, 400), st.data())
def test_spans_partition_exactly(ring: Any, position: int, data: st.DataObject) -> None:
    placed = ring.append(0, position).after
    resident = data.draw(st.sampled_from(placed.resident.ranges))
    first = data.draw(st.integers(*resident))
    end = data.draw(st.integers(first, resident[1]))
    spans = placed.spans(first, end)
    assert [s.logical + i for s in spans for i in range(s.count)] == list(range(first, end))
    rows = [s.physical + i for s in spans for i in range(s.count)]
    assert len(set(rows)) == len(rows)
    assert all(0 <= row < ring.capacity for row in rows)
    assert len(spans) <= 3
