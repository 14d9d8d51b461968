"""The rebasing ring: its sizing, retain, rebase, rewind and restore, against a list that is sliced."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpack.errors import InstallError
from kvpack.live.placement import AppendPlan, Move, Span
from kvpack.live.rebasing_ring import (
    RebasingRing,
    RestorePlan,
    plain_retain,
    plane_bytes,
    rows_for,
    transaction_retain,
    view_start,
)
from kvpack.model.ranges import RowSet
from tests.unit.placement_model import Cells, explore, move_and_write

WINDOW = 512
ROWS = rows_for(WINDOW, 262_144)


class ListOracle:
    """The plane as a list: sliced to the rows retained whenever the new ones do not fit behind it."""

    def __init__(self, rows: int, window: int, headroom: int, alignment: int) -> None:
        self.size, self.window, self.headroom, self.alignment = rows, window, headroom, alignment
        self.held: list[int] = []

    def append(self, start: int, count: int) -> None:
        if len(self.held) + count > self.size:
            wanted = max(0, start - (self.window - 1) - self.headroom)
            while wanted % self.alignment:
                wanted -= 1
            self.held = [row for row in self.held if row >= wanted]
        self.held += range(start, start + count)

    def rewind(self, position: int) -> None:
        self.held = [row for row in self.held if row < position]

    def restore(self, position: int, need: RowSet) -> None:
        self.held = [row for row in range(position) if need.contains(RowSet.of((row, row + 1)))]

    def rows(self, position: int) -> dict[int, int]:
        return {row: at for at, row in enumerate(self.held)}


@pytest.mark.parametrize("alignment", [1, 2, 4])
@pytest.mark.parametrize("headroom", [0, 1, 3])
@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("chunk", [1, 3])
def test_against_the_model(window: int, headroom: int, alignment: int, chunk: int) -> None:
    rows = window + chunk + headroom + alignment - 1
    fresh = RebasingRing(rows, window, headroom=headroom, alignment=alignment)
    states = explore(
        fresh,
        ListOracle(rows, window, headroom, alignment),
        2 * rows + 3,
        restores=range(2 * rows + 3),
        refusals=frozenset({"ring-too-small"}),
        may_rewind=lambda ring, position: ring.view_start(position) >= ring.base,
    )
    assert states > rows


@pytest.mark.parametrize("alignment", [1, 2, 4])
@pytest.mark.parametrize("headroom", [0, 1, 3])
@pytest.mark.parametrize("window", [1, 2, 4])
def test_a_chunk_that_the_ring_is_sized_for_always_fits(window: int, headroom: int, alignment: int) -> None:
    rows = window + 4 + headroom + alignment - 1
    for chunk in range(1, 5):
        ring = RebasingRing(rows, window, headroom=headroom, alignment=alignment)
        for _ in range(40):
            ring = ring.append(ring.position, chunk).after
            for depth in range(min(headroom, chunk) + 1):
                assert ring.can_rewind_to(ring.length - depth)


class RetainsTheBareWindow(RebasingRing):
    def retain(self, first_row: int) -> int:
        return max(self.base, self.view_start(first_row))


class RetainsOneRowMore(RebasingRing):
    def retain(self, first_row: int) -> int:
        return max(self.base, super().retain(first_row) - 1)


class CopiesFromTheNextRow(RebasingRing):
    def append(
        self, start: int, count: int, *, retain: int | None = None, layer: int | None = None
    ) -> AppendPlan[RebasingRing]:
        plan = super().append(start, count, retain=retain, layer=layer)
        return replace(plan, moves=tuple(replace(m, source=m.source + 1) for m in plan.moves))


class ClampsARewind(RebasingRing):
    def can_rewind_to(self, length: int) -> bool:
        return 0 <= length <= self.length


@pytest.mark.parametrize("broken", [RetainsTheBareWindow, RetainsOneRowMore, CopiesFromTheNextRow, ClampsARewind])
def test_a_planted_fault_is_found(broken: type[RebasingRing]) -> None:
    rows = 4 + 3 + 3 + 1
    with pytest.raises((AssertionError, InstallError, pytest.fail.Exception)):
        explore(
            broken(rows, 4, headroom=3, alignment=2),
            ListOracle(rows, 4, 3, 2),
            30,
            refusals=frozenset({"ring-too-small"}),
            may_rewind=lambda ring, position: ring.view_start(position) >= ring.base,
        )


# -- sizing and retain ---------------------------------------------------------------------------------------------


def test_rows_and_bytes() -> None:
    assert rows_for(512, 262_144) == 5151
    assert rows_for(512, 4096) == 4096
    assert rows_for(32, 10_000) == 32 + 4096 + 512 + 31
    assert plane_bytes(5151, 1088) == 5151 * 1088 + 8


def test_retain_grants_headroom_and_never_asks_below_base() -> None:
    retain = plain_retain(ROWS, WINDOW, 0)
    assert retain == 4128 <= view_start(ROWS, WINDOW) - 512
    assert ROWS - retain + 4096 <= ROWS
    ring = RebasingRing(ROWS, WINDOW, retain, ROWS)
    for depth in (1, 32, 256, 512):
        assert ring.can_rewind_to(ROWS - depth)
        shorter = ring.rewind(ROWS - depth)
        assert shorter.retain(shorter.length) >= ring.base
        assert shorter.append(shorter.length, 4096).after.position == ROWS - depth + 4096
    past = ROWS - (512 + WINDOW)
    assert view_start(past, WINDOW) < ring.base
    with pytest.raises(InstallError) as refusal:
        ring.rewind(past, layer=5)
    assert (refusal.value.code, refusal.value.layer) == ("beyond-headroom", 5)


def test_a_rewound_ring_appends_again() -> None:
    ring = RebasingRing(ROWS, WINDOW, 4128, 4669)
    assert ring.retain(4669) == 4128
    assert plain_retain(4669, WINDOW, 0) < 4128
    assert ring.append(4669, 1).writes == (Span(4669, 541, 1),)


@given(st.integers(0, 10**6), st.integers(1, 5000), st.integers(0, 10**6))
def test_retain_is_aligned_below_the_window_or_base(first_row: int, window: int, base: int) -> None:
    retain = plain_retain(first_row, window, base)
    assert retain == base or retain % 32 == 0
    assert retain >= base
    ideal = max(0, first_row - (window - 1) - 512)
    assert retain == max(base, ideal - ideal % 32)


def test_a_transaction_keeps_the_window_of_its_base() -> None:
    ring = RebasingRing(rows_for(32, 10_000), 32).hydrated(8762, 4096)
    assert ring.base == 4096
    retain = transaction_retain(8772, 8762, 32)
    assert retain == 8704
    plan = ring.append(8762, 10, retain=retain)
    assert plan.moves == (Move(4608, 0, 58),)
    assert plan.writes == (Span(8762, 58, 10),)
    assert plan.after.base == 8704
    assert plan.after.spans(8740, 8772) == (Span(8740, 36, 32),)
    rolled_back = plan.after.rewind(8762)
    assert rolled_back.length == 8762
    with pytest.raises(InstallError):
        rolled_back.rewind(8200)


@given(st.integers(0, 10**6), st.integers(1, 5000), st.integers(0, 4000), st.integers(1, 4000))
def test_a_transaction_never_retains_past_its_base(base_length: int, window: int, staged: int, count: int) -> None:
    retain = transaction_retain(base_length + staged + count, base_length, window)
    assert retain == view_start(base_length, window)


def test_the_retain_of_a_transaction_is_the_lower_of_its_two_bounds() -> None:
    assert [transaction_retain(target, 1000, 32) for target in (95, 96, 127, 128, 5000)] == [32, 64, 64, 96, 960]
    assert transaction_retain(31, 1000, 32) == 0


# -- append, rewind, restore ---------------------------------------------------------------------------------------


def test_before_the_end_the_ring_is_a_flat_plane() -> None:
    plan = RebasingRing(ROWS, WINDOW).append(0, 1024)
    assert (plan.moves, plan.writes) == ((), (Span(0, 0, 1024),))


def test_a_rebase_keeps_the_exact_aligned_view() -> None:
    first = RebasingRing(ROWS, WINDOW).append(0, 4096)
    cells: Cells = move_and_write([None] * ROWS, first)
    second = first.after.append(4096, 4096, retain=view_start(4096, WINDOW))
    cells = move_and_write(cells, second)
    assert second.after.base == 3584
    (view,) = second.after.spans(3584, 8192)
    assert cells[view.physical : view.physical_end] == list(range(3584, 8192))


def test_an_overlapping_copy() -> None:
    plan = RebasingRing(12, 8, headroom=0, alignment=1).append(0, 10).after.append(10, 4)
    assert plan.moves == (Move(3, 0, 7),)


def test_a_rewind_ends_where_the_window_was_lapped() -> None:
    ring = RebasingRing(ROWS, WINDOW).append(0, 4096).after.append(4096, 4096, retain=3584).after
    assert ring.can_rewind_to(4095)
    assert not ring.can_rewind_to(4094)
    assert not ring.can_rewind_to(0)
    assert not ring.can_rewind_to(8193)


def test_a_restore_copies_the_window_and_not_the_absolute_length() -> None:
    ring = RebasingRing(ROWS, WINDOW).append(0, 400).after
    assert ring.restore_plan(400) == RestorePlan(0, 0, 400)
    ring = RebasingRing(ROWS, WINDOW)
    while ring.length < 40_960:
        ring = ring.append(ring.length, 4096).after
    plan = ring.restore_plan(40_960)
    assert plan.base == 40_448 >= ring.base > 0
    assert plan.count == 40_960 - plan.base
    assert plan.source + plan.count <= ROWS
    assert RebasingRing(ROWS, WINDOW).restored(40_960) == RebasingRing(ROWS, WINDOW, plan.base, 40_960)
    for length in (400, 40_961):
        with pytest.raises(InstallError) as refusal:
            ring.restore_plan(length, layer=1)
        assert (refusal.value.code, refusal.value.layer) == ("lapped", 1)


def test_a_restore_ends_where_the_window_was_lapped() -> None:
    ring = RebasingRing(ROWS, WINDOW, 4128, 5151)
    assert ring.restore_plan(4639) == RestorePlan(4128, 0, 511)
    with pytest.raises(InstallError, match=r"found \[4096, 4638\)"):
        ring.restore_plan(4638)


def test_growth_copies_the_aligned_window() -> None:
    source = RebasingRing(rows_for(32, 10_000), 32).hydrated(8250, 4096)
    plan = source.restore_plan(8250)
    assert plan == RestorePlan(base=8192, source=4096, count=58)
    target = RebasingRing(rows_for(32, 20_000), 32).hydrated(8250, plan.base)
    assert target.spans(8192, 8250) == (Span(8192, 0, 58),)


def test_lapped() -> None:
    ring = RebasingRing(ROWS, WINDOW, 4128, 4669)
    for retain, found in ((4096, 4096), (4160, 4160)):
        with pytest.raises(InstallError) as refusal:
            ring.append(4669, 1, retain=retain, layer=9)
        assert (refusal.value.code, refusal.value.layer, refusal.value.found) == ("lapped", 9, found)
    with pytest.raises(InstallError) as refusal:
        RebasingRing(ROWS, WINDOW).hydrated(8250, 7744)
    assert (refusal.value.code, refusal.value.expected) == ("lapped", "0 to 7712")


def test_ring_too_small() -> None:
    for refuse in (
        lambda: RebasingRing(ROWS, WINDOW, 4128, 5151).append(5151, 4130, layer=2),
        lambda: RebasingRing(ROWS, WINDOW).hydrated(6000, 0, layer=2),
        lambda: RebasingRing(ROWS, WINDOW).append(0, ROWS + 1, layer=2),
    ):
        with pytest.raises(InstallError) as refusal:
            refuse()
        assert (refusal.value.code, refusal.value.layer, refusal.value.found) == ("ring-too-small", 2, ROWS)


@pytest.mark.parametrize(
    "refuse",
    [
        lambda: RebasingRing(0, 4),
        lambda: RebasingRing(8, 0),
        lambda: RebasingRing(8, 4, 3, 2),
        lambda: RebasingRing(8, 4, 3, 12),
        lambda: RebasingRing(8, 4, headroom=-1),
        lambda: RebasingRing(8, 4, alignment=0),
    ],
)
def test_bad_placement(refuse: Any) -> None:
    with pytest.raises(InstallError) as refusal:
        refuse()
    assert refusal.value.code == "bad-placement"


@given(st.integers(1, 64), st.lists(st.tuples(st.integers(1, 200), st.integers(0, 40)), max_size=12))
def test_appends_and_rewinds_keep_the_window(window: int, steps: list[tuple[int, int]]) -> None:
    ring = RebasingRing(window + 200 + 40 + 7, window, headroom=40, alignment=8)
    cells: Cells = [None] * ring.rows
    oracle = ListOracle(ring.rows, window, 40, 8)
    for count, back in steps:
        plan = ring.append(ring.length, count)
        cells = move_and_write(cells, plan)
        oracle.append(ring.length, count)
        ring = plan.after
        shorter = max(0, ring.length - back)
        if ring.can_rewind_to(shorter):
            ring = ring.rewind(shorter)
            oracle.rewind(shorter)
        held = copy.copy(oracle.held)
        (span,) = ring.spans(ring.base, ring.length) or (Span(0, 0, 0),)
        assert cells[span.physical : span.physical_end] == held
        assert ring.view_start(ring.length) >= ring.base
