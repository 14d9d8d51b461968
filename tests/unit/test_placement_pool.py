"""The pool ring: sizing, take, drain and truncation, with every key built from the rows that the ring really holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpack.errors import InstallError
from kvpack.live.placement import AppendPlan, Span
from kvpack.live.pool_ring import WORKING_ROWS, PoolRing, pool_ring_rows, take
from kvpack.model.ranges import RowSet
from tests.unit.placement_model import Cells, check_spans, fill, move_and_write

ROW_BYTES = 256 * 4
Keys = dict[int, tuple[int | None, ...]]


def run(ring: PoolRing, cells: Cells, keys: Keys, count: int) -> tuple[PoolRing, Cells]:
    """Drain a call, build each completed pool's key from the cells, and hold every step to the rules."""
    pool = ring.known_pool()
    for step in ring.drain(ring.length, count):
        cells = move_and_write(cells, step.append)
        rows = [cells[span.physical + i] for span in step.reads for i in range(span.count)]
        for number in range(step.first_pool, step.end_pool):
            keys[number] = tuple(rows[(number - step.first_pool) * pool :][:pool])
        assert step.append.after.live <= (step.append.after.effective or ring.max_context)
        ring = step.after
    ring.require_drained()
    return ring, cells


def sound(ring: PoolRing, cells: Cells, keys: Keys) -> None:
    """Every ready key is of its own rows, and the rows of the open pool are where the ring says."""
    pool = ring.known_pool()
    for number in range(ring.pools_ready):
        assert keys[number] == tuple(range(number * pool, number * pool + pool))
    assert ring.resident.contains(RowSet.of((ring.pools_ready * pool, ring.length)))
    check_spans(ring, cells)


SIZES = [(rows, pool) for rows in range(8) for pool in range(1, 5) if rows == 0 or rows >= pool]


def walk(fresh: PoolRing) -> int:
    """From every state at a call boundary: calls of every length, and truncations to every position."""
    states: list[tuple[PoolRing, Cells, Keys]] = [(fresh, [None] * fresh.capacity, {})]
    for position in range(fresh.max_context + 1):
        placed = fresh.restored(position)
        pool = fresh.known_pool()
        keys: Keys = {n: tuple(range(n * pool, n * pool + pool)) for n in range(position // pool)}
        states.append((placed, fill(placed, fresh.capacity, fresh.need(position)), keys))
    seen: set[PoolRing] = set()
    while states:
        ring, cells, keys = states.pop()
        if ring in seen:
            continue
        seen.add(ring)
        sound(ring, cells, keys)
        for count in range(1, fresh.max_context - ring.length + 1):
            grown_keys = dict(keys)
            grown, grown_cells = run(ring, cells, grown_keys, count)
            states.append((grown, grown_cells, grown_keys))
        for position in range(ring.length + 1):
            need = {row for first, end in fresh.need(position) for row in range(first, end)}
            at = {row: row % (ring.effective or ring.max_context) for row in need}
            if all(cells[at[row]] == row for row in need):
                states.append((ring.rewind(position), cells, keys))
            else:
                with pytest.raises(InstallError) as refusal:
                    ring.rewind(position)
                assert refusal.value.code == "beyond-headroom"
    return len(seen)


@pytest.mark.parametrize(("rows", "pool"), SIZES)
def test_against_the_model(rows: int, pool: int) -> None:
    assert walk(PoolRing(rows, pool, 13)) >= 14


class KeepsReadyKeys(PoolRing):
    def rewind(self, position: int, *, layer: int | None = None) -> PoolRing:
        shorter = super().rewind(position, layer=layer)
        return replace(shorter, pools_ready=min(self.pools_ready, -(-position // self.known_pool())))


class TakesOneRowMore(PoolRing):
    def take(self, remaining: int, *, layer: int | None = None) -> int:
        return min(super().take(remaining, layer=layer) + 1, remaining)


class ForgetsWhatWasOverwritten(PoolRing):
    def append(self, start: int, count: int, *, layer: int | None = None) -> AppendPlan[PoolRing]:
        plan = super().append(start, count, layer=layer)
        return replace(plan, after=replace(plan.after, floor=self.floor))


@pytest.mark.parametrize("broken", [KeepsReadyKeys, TakesOneRowMore, ForgetsWhatWasOverwritten])
def test_a_planted_fault_is_found(broken: type[PoolRing]) -> None:
    with pytest.raises((AssertionError, InstallError, pytest.fail.Exception)):
        walk(broken(7, 3, 13))


# -- sizing --------------------------------------------------------------------------------------------------------


def test_the_working_set_does_not_grow_with_the_context() -> None:
    assert WORKING_ROWS == 5120
    assert [pool_ring_rows(c) for c in (8192, 262_144, 1 << 20)] == [5120] * 3
    assert [pool_ring_rows(c) for c in (4096, 5120, 5121)] == [0, 0, 5120]
    assert [pool_ring_rows(1 << 20, 0), pool_ring_rows(64, 16), pool_ring_rows(64, 64)] == [0, 16, 0]
    assert pool_ring_rows(1 << 20) * ROW_BYTES == 5 << 20
    assert 12 * (1 << 20) * ROW_BYTES == 12 << 30


@pytest.mark.parametrize("max_context", [8192, 262_144, 1 << 20])
def test_a_call_of_the_whole_context_drains_through_the_ring(max_context: int) -> None:
    ring = PoolRing(pool_ring_rows(max_context), 4, max_context)
    steps = ring.drain(0, max_context)
    assert sum(step.append.count for step in steps) == max_context
    assert all(step.append.count > 0 for step in steps)
    assert steps[-1].after.pools_ready == steps[-1].after.num_keys == max_context // 4
    assert len(steps) == -(-max_context // 5120)
    assert ring.capacity == 5120 < max_context


def test_effective_rows_are_whole_pools() -> None:
    assert PoolRing(18, 4, 64).effective == 16
    assert PoolRing(4, 4, 64).effective == 4
    with pytest.raises(InstallError) as refusal:
        PoolRing(3, 4, 64)
    assert (refusal.value.code, refusal.value.found) == ("ring-too-small", 3)


@pytest.mark.parametrize("rows", [0, 64, 65])
def test_a_flat_plane_keeps_every_row(rows: int) -> None:
    plane = PoolRing(rows, 4, 64)
    assert (plane.is_flat, plane.capacity, plane.effective) == (True, 64, 0)
    (step,) = plane.drain(0, 63)
    assert step.after.resident == RowSet.of((0, 63))
    assert step.after.pools_ready == 15
    assert step.after.rewind(21).pools_ready == 5


# -- take ----------------------------------------------------------------------------------------------------------


def test_take() -> None:
    assert take(0, 4, 0, 0, 1 << 20) == 1 << 20
    assert take(64, 4, 0, 0, 1024) == 64
    for length in range(64):
        assert 64 - 4 + 1 <= take(64, 4, length // 4, length, 1024) <= 64
    assert take(64, 4, 4, 16, 1) == 1
    assert take(16, 4, 0, 15, 1) == 1
    assert PoolRing(16, 4, 64, 15).take(8) == 1


@pytest.mark.parametrize(("pools_ready", "length", "live"), [(0, 64, 64), (0, 16, 16), (5, 16, -4)])
def test_lapped(pools_ready: int, length: int, live: int) -> None:
    with pytest.raises(InstallError) as refusal:
        take(16, 4, pools_ready, length, 1, layer=3)
    error = refusal.value
    assert (error.code, error.layer, error.expected, error.found) == ("lapped", 3, "0 to 15", live)


def test_an_append_never_overwrites_a_live_row() -> None:
    with pytest.raises(InstallError) as refusal:
        PoolRing(16, 4, 64, 15).append(15, 2)
    assert (refusal.value.code, refusal.value.found) == ("lapped", 2)
    with pytest.raises(InstallError) as refusal:
        PoolRing(16, 4, 64, 20)
    assert refusal.value.code == "lapped"


@given(st.integers(0, 60), st.integers(1, 9), st.lists(st.integers(1, 90), max_size=8))
def test_calls_of_any_length_build_the_keys_of_a_flat_plane(rows: int, pool: int, calls: list[int]) -> None:
    ring = PoolRing(max(rows, pool) if rows else 0, pool, 800)
    cells: Cells = [None] * ring.capacity
    keys: Keys = {}
    for count in calls:
        ring, cells = run(ring, cells, keys, count)
    assert keys == {n: tuple(range(n * pool, n * pool + pool)) for n in range(sum(calls) // pool)}
    assert ring == PoolRing(ring.rows, pool, 800).drain(0, sum(calls))[-1].after if calls else True


# -- capture, restore and truncation -------------------------------------------------------------------------------


def test_a_restore_needs_the_rows_of_the_open_pool() -> None:
    ring = PoolRing(16, 4, 64)
    assert ring.need(30) == RowSet.of((28, 30))
    assert not ring.need(28)
    restored = ring.restored(30)
    assert (restored.pools_ready, restored.spans(28, 30)) == (7, (Span(28, 12, 2),))
    assert PoolRing(16, 1, 64).restored(30).resident == RowSet()
    for position, legal in ((29, True), (28, True), (27, False), (24, True), (0, True)):
        if legal:
            shorter = restored.rewind(position)
            assert (shorter.position, shorter.pools_ready) == (position, position // 4)
        else:
            with pytest.raises(InstallError) as refusal:
                restored.rewind(position, layer=1)
            assert (refusal.value.code, refusal.value.layer) == ("beyond-headroom", 1)


def test_keys_are_sized_by_the_destination() -> None:
    assert PoolRing(16, 4, 66).restored(30).num_keys == 16
    assert PoolRing(16, 4, 1000).restored(30).num_keys == 250


def test_keys_behind() -> None:
    PoolRing(16, 4, 64, 15, 3).require_drained()
    with pytest.raises(InstallError) as refusal:
        PoolRing(16, 4, 64, 15, 2).require_drained(layer=6)
    error = refusal.value
    assert (error.code, error.layer, error.expected, error.found) == ("keys-behind", 6, 3, 2)


def test_pool_unresolved_and_pool_differs() -> None:
    unknown = PoolRing(16, None, 64)
    for refuse in (
        lambda: unknown.append(0, 1, layer=8),
        lambda: unknown.drain(0, 1, layer=8),
        lambda: unknown.restored(4, layer=8),
        lambda: unknown.require_drained(layer=8),
    ):
        with pytest.raises(InstallError) as refusal:
            refuse()
        assert (refusal.value.code, refusal.value.layer) == ("pool-unresolved", 8)
    assert unknown.with_pool(4).restored(9).pools_ready == 2
    with pytest.raises(InstallError) as refusal:
        unknown.with_pool(4).with_pool(8, layer=8)
    error = refusal.value
    assert (error.code, error.layer, error.expected, error.found) == ("pool-differs", 8, 4, 8)


@pytest.mark.parametrize(
    "refuse",
    [
        lambda: PoolRing(-1, 4, 64),
        lambda: PoolRing(16, 0, 64),
        lambda: PoolRing(16, 4, 0),
        lambda: PoolRing(16, 4, 64, 15, 4),
        lambda: PoolRing(16, 4, 64, 65, 16, 64),
        lambda: PoolRing(16, 4, 64, 4, 1, 5),
        lambda: PoolRing(16, None, 64, 4),
    ],
)
def test_bad_placement(refuse: Any) -> None:
    with pytest.raises(InstallError) as refusal:
        refuse()
    assert refusal.value.code == "bad-placement"


def test_capacity_too_small() -> None:
    plane = PoolRing(16, 4, 64)
    for refuse in (lambda: plane.drain(0, 65, layer=0), lambda: plane.restored(65, layer=0)):
        with pytest.raises(InstallError) as refusal:
            refuse()
        assert (refusal.value.code, refusal.value.layer, refusal.value.found) == ("capacity-too-small", 0, 64)
