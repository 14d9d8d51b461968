"""The plan checker with planted faults, the placements that keep every row, and the layouts inside a plane."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpack.errors import InstallError
from kvpack.live.growing import Linear, Paged
from kvpack.live.placement import AppendPlan, Move, Placement, Span, ring_spans
from kvpack.live.plane_layout import ByteRuns, PlaneLayout
from kvpack.live.pool_ring import PoolRing
from kvpack.live.rebasing_ring import RebasingRing
from kvpack.live.rings import Chronological, PinnedRing, RotatingRing
from kvpack.model.geometry import MAX_POSITION
from kvpack.model.layout import KNOWN_LAWS
from tests.unit.placement_model import SlotOracle, explore

FRESH: dict[str, Placement] = {
    "linear": Linear(64),
    "modulo": RotatingRing(8, 8),
    "pinned": PinnedRing(8, 2, 6),
    "chronological": Chronological(8, 8),
    "rebase": RebasingRing(64, 8, headroom=4, alignment=4),
    "pool": PoolRing(8, 4, 64),
    "paged": Paged((3, 1, 2), 8, 4),
}


@pytest.mark.parametrize("law", FRESH)
def test_every_law_is_a_frozen_placement_that_a_producer_can_record(law: str) -> None:
    placement = FRESH[law]
    assert placement.law == law
    assert law in KNOWN_LAWS
    assert placement.position == 0
    assert not placement.resident
    assert placement.spans(0, 0) == ()
    with pytest.raises(FrozenInstanceError):
        placement.length = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("law", FRESH)
@pytest.mark.parametrize("start", [4, 6])
def test_discontinuity(law: str, start: int) -> None:
    after = FRESH[law].append(0, 5).after
    with pytest.raises(InstallError, match=r"layer 7: .*expected 5, found") as refusal:
        after.append(start, 1, layer=7)
    error = refusal.value
    assert (error.code, error.layer, error.expected, error.found) == ("discontinuity", 7, 5, start)


@pytest.mark.parametrize("law", FRESH)
@pytest.mark.parametrize("count", [0, -1])
def test_zero_rows(law: str, count: int) -> None:
    with pytest.raises(InstallError) as refusal:
        FRESH[law].append(0, count)
    assert (refusal.value.code, refusal.value.found) == ("zero-rows", count)


@pytest.mark.parametrize("law", FRESH)
def test_not_fresh(law: str) -> None:
    with pytest.raises(InstallError) as refusal:
        FRESH[law].append(0, 1).after.restored(1, layer=2)
    assert (refusal.value.code, refusal.value.layer) == ("not-fresh", 2)


@pytest.mark.parametrize("law", FRESH)
def test_forward_rewind(law: str) -> None:
    with pytest.raises(InstallError) as refusal:
        FRESH[law].append(0, 3).after.rewind(4)
    assert (refusal.value.code, refusal.value.expected, refusal.value.found) == ("forward-rewind", "at most 3", 4)


@pytest.mark.parametrize("law", FRESH)
@pytest.mark.parametrize("position", [-1, MAX_POSITION + 1])
def test_position_out_of_range(law: str, position: int) -> None:
    for call in (FRESH[law].restored, FRESH[law].rewind):
        with pytest.raises(InstallError) as refusal:
            call(position)
        assert refusal.value.code == "position-out-of-range"
    with pytest.raises(InstallError) as refusal:
        FRESH[law].append(0, MAX_POSITION + 1)
    assert refusal.value.code == "position-out-of-range"


@pytest.mark.parametrize("law", FRESH)
@pytest.mark.parametrize(("first", "end"), [(-1, 2), (2, 1), (0, 4), (3, 5)])
def test_rows_not_resident(law: str, first: int, end: int) -> None:
    with pytest.raises(InstallError) as refusal:
        FRESH[law].append(0, 3).after.spans(first, end)
    assert refusal.value.code == "rows-not-resident"


def test_an_append_of_a_refused_kind_changes_nothing() -> None:
    ring = RotatingRing(8, 8, 8, 5, 5)
    twin = replace(ring)
    for start, count in ((12, 1), (13, 0)):
        with pytest.raises(InstallError):
            ring.append(start, count)
    assert ring == twin


# -- the checker of plans ------------------------------------------------------------------------------------------

RING = RotatingRing(6, 6, 6, 3, 3)
SHIFTED = Chronological(4, 4, 6, 2)
REBASED = RebasingRing(8, 2, 0, 7, headroom=1, alignment=2)


def test_the_plans_that_the_controls_damage_are_sound() -> None:
    assert RING.append(9, 2).writes == (Span(9, 3, 2),)
    assert SHIFTED.append(6, 1).moves == (Move(1, 0, 3),)
    assert REBASED.append(7, 2).moves == (Move(4, 0, 3),)


DAMAGED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a slot too far": (RING.append(9, 2), {"writes": (Span(9, 4, 2),)}, "not written where they are read"),
    "a row too few": (RING.append(9, 2), {"writes": (Span(9, 3, 1),)}, "not written where they are read"),
    "no write": (RING.append(9, 2), {"writes": ()}, "not written where they are read"),
    "out of bounds": (RING.append(9, 2), {"writes": (Span(9, 5, 2),)}, "out of bounds"),
    "below zero": (RING.append(9, 2), {"writes": (Span(9, -1, 2),)}, "out of bounds"),
    "an empty write": (RING.append(9, 2), {"writes": (Span(9, 3, 2), Span(11, 5, 0))}, "empty"),
    "one row twice": (RING.append(9, 2), {"writes": (Span(9, 3, 2), Span(10, 4, 1))}, "meet in one physical row"),
    "position behind": (RING.append(9, 2), {"after": RING.append(9, 1).after}, "does not advance"),
    "position ahead": (RING.append(9, 2), {"count": 3}, "does not advance"),
    "origin not advanced": (
        RING.append(9, 2),
        {"after": RotatingRing(6, 6, 6, 5, 4), "writes": (Span(9, 2, 2),)},
        "nothing moved them",
    ),
    "no move": (SHIFTED.append(6, 1), {"moves": ()}, "nothing moved them"),
    "a move too short": (SHIFTED.append(6, 1), {"moves": (Move(1, 0, 2),)}, "nothing moved them"),
    "a move from one row off": (SHIFTED.append(6, 1), {"moves": (Move(0, 0, 3),)}, "nothing moved them"),
    "a move onto the new row": (SHIFTED.append(6, 1), {"moves": (Move(0, 0, 4),)}, "meet in one physical row"),
    "a move from outside": (REBASED.append(7, 2), {"moves": (Move(6, 0, 3),)}, "out of bounds"),
    "a rebase to row 1": (REBASED.append(7, 2), {"moves": (Move(4, 1, 2),)}, "nothing moved them"),
    "live rows overwritten": (Linear(8, 4).append(4, 2), {"moves": (Move(4, 1, 2),)}, "are overwritten"),
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_a_damaged_plan_is_refused(fault: str) -> None:
    plan, damage, reason = DAMAGED[fault]
    assert replace(plan) == plan
    with pytest.raises(InstallError, match=reason) as refusal:
        replace(plan, **damage)
    assert refusal.value.code == "bad-plan"
    assert refusal.value.expected is not None
    assert refusal.value.found is not None


@given(st.integers(1, 50), st.integers(0, 200), st.data())
def test_ring_spans_are_the_slots_modulo_the_ring(size: int, first: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, size))
    slot = data.draw(st.integers(0, size - 1))
    base = data.draw(st.integers(0, 9))
    spans = ring_spans(first, first + count, slot, size, base)
    placed = [(s.logical + i, s.physical + i) for s in spans for i in range(s.count)]
    assert placed == [(first + i, base + (slot + i) % size) for i in range(count)]
    assert len(spans) <= 2


# -- linear and paged ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", range(1, 8))
def test_linear_against_the_model(capacity: int) -> None:
    full = frozenset({"capacity-too-small"})
    states = explore(
        Linear(capacity),
        SlotOracle(capacity, lambda row: row),
        capacity + 2,
        restores=range(capacity + 1),
        refusals=full,
    )
    assert states == capacity + 1


def test_capacity_too_small() -> None:
    for refuse in (
        lambda: Linear(8, 6).append(6, 3, layer=1),
        lambda: Linear(8).restored(9, layer=1),
        lambda: Paged((0, 1), 4, 9, 6).append(6, 3, layer=1),
        lambda: Paged((0, 1), 4, 9).restored(9, layer=1),
    ):
        with pytest.raises(InstallError) as refusal:
            refuse()
        assert (refusal.value.code, refusal.value.layer, refusal.value.found) == ("capacity-too-small", 1, 8)


@pytest.mark.parametrize("page_size", [1, 2, 3])
@pytest.mark.parametrize("table", [(0,), (2, 0), (0, 1, 2), (2, 1, 0), (1, 3, 2), (1, 2, 0)])
def test_paged_against_the_model(table: tuple[int, ...], page_size: int) -> None:
    room = len(table) * page_size
    oracle = SlotOracle(4 * page_size, lambda row: table[row // page_size] * page_size + row % page_size)
    states = explore(
        Paged(table, page_size, 4),
        oracle,
        room + 1,
        restores=range(room + 1),
        refusals=frozenset({"capacity-too-small"}),
    )
    assert states == room + 1


@given(st.permutations(range(9)), st.integers(1, 5), st.data())
def test_paged_spans_partition_exactly(table: list[int], page_size: int, data: st.DataObject) -> None:
    end = data.draw(st.integers(0, 9 * page_size))
    first = data.draw(st.integers(0, end))
    spans = Paged(tuple(table), page_size, 9, end).spans(first, end)
    placed = [(s.logical + i, s.physical + i) for s in spans for i in range(s.count)]
    assert placed == [(r, table[r // page_size] * page_size + r % page_size) for r in range(first, end)]
    assert all(a.physical_end != b.physical for a, b in pairwise(spans))


def test_the_last_page_may_be_partial_and_pages_are_added_behind() -> None:
    paged = Paged((5, 2), 16, 8).restored(19)
    assert paged.spans(0, 19) == (Span(0, 80, 16), Span(16, 32, 3))
    with pytest.raises(InstallError):
        paged.append(19, 14)
    assert paged.with_pages(3).append(19, 14).writes == (Span(19, 35, 14),)


@pytest.mark.parametrize("table", [(0, 4), (-1,)])
def test_page_out_of_range(table: tuple[int, ...]) -> None:
    with pytest.raises(InstallError) as refusal:
        Paged(table, 4, 4)
    assert (refusal.value.code, refusal.value.found) == ("page-out-of-range", table[-1])


def test_page_duplicate() -> None:
    with pytest.raises(InstallError, match="page 1 twice") as refusal:
        Paged((1, 2, 1), 4, 4)
    assert refusal.value.code == "page-duplicate"
    with pytest.raises(InstallError, match="page 2 twice"):
        Paged((1, 2), 4, 4).with_pages(2)


@pytest.mark.parametrize(
    "refuse",
    [
        lambda: Linear(4, 5),
        lambda: Linear(4, -1),
        lambda: Paged((0,), 0, 4),
        lambda: Paged((), 4, 0),
        lambda: Paged((0,), 4, 4, 5),
        lambda: PlaneLayout("HDN", 4, 2, 8),
        lambda: PlaneLayout("NHD", 4, 0, 8),
    ],
)
def test_bad_placement(refuse: Any) -> None:
    with pytest.raises(InstallError) as refusal:
        refuse()
    assert refusal.value.code == "bad-placement"


# -- layouts -------------------------------------------------------------------------------------------------------


def named_bytes(layout: PlaneLayout) -> list[tuple[int, int, int]]:
    """The plane as a list of (row, head, byte), by its definition as a nested array."""
    rows, heads = range(layout.capacity), range(layout.num_heads)
    order = [(r, h) for r in rows for h in heads] if layout.order == "NHD" else [(r, h) for h in heads for r in rows]
    return [(r, h, b) for r, h in order for b in range(layout.head_bytes)]


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("capacity", [1, 2, 5])
@pytest.mark.parametrize("num_heads", [1, 2, 3])
@pytest.mark.parametrize("head_bytes", [1, 4])
def test_runs_against_explicit_enumeration(order: str, capacity: int, num_heads: int, head_bytes: int) -> None:
    layout = PlaneLayout(order, capacity, num_heads, head_bytes)
    names = named_bytes(layout)
    assert len(names) == layout.plane_bytes
    for row in range(capacity):
        for head in range(num_heads):
            assert names[layout.offset(row, head)] == (row, head, 0)
    for first in range(capacity):
        for end in range(first + 1, capacity + 1):
            runs = layout.runs(Span(100, first, end - first))
            picked = [names[runs.offset + i * runs.stride + b] for i in range(runs.count) for b in range(runs.length)]
            wanted = {(r, h, b) for r in range(first, end) for h in range(num_heads) for b in range(head_bytes)}
            assert set(picked) == wanted
            assert len(picked) == len(wanted)
            assert picked == [name for name in names if name in wanted], "in the order of the plane"


def test_the_runs_of_two_heads_of_256_bytes() -> None:
    span = Span(21, 5, 8)
    assert PlaneLayout("NHD", 2048, 2, 256).runs(span) == ByteRuns(2560, 2048 * 512, 4096, 1)
    assert PlaneLayout("HND", 2048, 2, 256).runs(span) == ByteRuns(1280, 2048 * 256, 2048, 2)
    assert PlaneLayout("NHD", 2048, 2, 256).row_bytes * 2 == 1024


@pytest.mark.parametrize("span", [Span(0, 0, 5), Span(0, 4, 1), Span(0, -1, 2), Span(0, 1, 0)])
def test_runs_outside_the_plane_are_refused(span: Span) -> None:
    with pytest.raises(InstallError) as refusal:
        PlaneLayout("HND", 4, 2, 8).runs(span)
    assert refusal.value.code == "bad-plan"


def test_a_plan_names_its_source_rows() -> None:
    plan: AppendPlan[RotatingRing] = RotatingRing(4, 4).append(0, 7)
    assert (plan.start, plan.first_source_row, plan.live_rows) == (0, 3, 4)
    assert [span.logical - plan.start for span in plan.writes] == [3, 4]
