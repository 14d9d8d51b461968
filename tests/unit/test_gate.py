"""The gate: need ⊆ stored, every reason at once, nothing moved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpack.errors import CompatibilityError
from kvpack.model.encoding import UnknownEncoding
from kvpack.model.gate import Destination, deepest_position, gate
from kvpack.model.geometry import Geometry, LayerGeometry, PlaneGeometry, PlaneKey, Rope
from kvpack.model.identity import Claim
from kvpack.model.layout import LayerLayout, ProducerLayout
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import Cut
from tests import synthetic

MIXED = Geometry((synthetic.full(), synthetic.sliding(8)))


def here(geometry: Geometry = MIXED, capacity: int | None = None, **fields: str | bytes | int) -> Destination:
    return Destination(geometry, synthetic.identity(**fields), capacity)


def codes(cut: Cut, destination: Destination, at: int | None = None) -> list[str]:
    return [error.code for error in gate(cut, destination, at=at).refusals]


def test_the_same_model_fits_bitwise() -> None:
    report = gate(synthetic.make_cut(MIXED, 29), here())
    assert (report.refusals, report.claim, report.position) == ((), Claim.BITWISE, 29)
    assert report.need[PlaneKey("layer", 1, "k")] == RowSet.of((22, 29))


@pytest.mark.parametrize(
    ("other", "field", "layer"),
    [
        (Geometry((synthetic.full(4, 4), synthetic.sliding(8))), "row_shape", 0),
        (Geometry((synthetic.full(), synthetic.sliding(9))), "window", 1),
        (Geometry((synthetic.full(), synthetic.sliding(8, sink=2))), "sink", 1),
        (Geometry((synthetic.full(encoding="f16"), synthetic.sliding(8))), "encoding", 0),
        (Geometry((synthetic.sliding(8), synthetic.sliding(8))), "kind", 0),
        (Geometry((synthetic.full(),)), "layers", None),
    ],
)
def test_geometry_differences_name_layer_and_field(other: Geometry, field: str, layer: int | None) -> None:
    refusals = gate(synthetic.make_cut(MIXED, 29), here(other)).refusals
    assert (refusals[0].code, refusals[0].field, refusals[0].layer) == ("geometry-differs", field, layer)


def test_equal_bytes_are_not_equal_heads() -> None:
    """4 heads of 4 against 2 of 8, per layer, and the two swapped."""
    a, b = synthetic.full(4, 4), synthetic.full(2, 8)
    cut = synthetic.make_cut(Geometry((a, b)), 5)
    assert codes(cut, here(Geometry((a, b)))) == []
    assert codes(cut, here(Geometry((b, a)))) == ["geometry-differs"] * 4


@pytest.mark.parametrize(("part", "value"), [("theta", 500_000.0), ("pairing", "interleaved"), ("digest", b"y" * 32)])
def test_another_rope_is_refused_by_name(part: str, value: object) -> None:
    rope = Rope(8, "half", 10_000.0, b"x" * 32)
    layers = (LayerGeometry("full", synthetic.kv(), rope="r"),)
    cut = synthetic.make_cut(Geometry(layers, ropes={"r": rope}), 5)
    other = Geometry(layers, ropes={"r": replace(rope, **{part: value})})
    (refusal,) = gate(cut, here(other)).refusals
    assert refusal.field == {"digest": "ropes.r.scaling"}.get(part, f"ropes.r.{part}")


def test_every_reason_is_given_at_once() -> None:
    report = gate(
        synthetic.make_cut(MIXED, 29), here(Geometry((synthetic.full(1, 4), synthetic.sliding(4))), weights=b"z")
    )
    assert [r.field for r in report.refusals] == ["row_shape", "row_shape", "window", "weights"]
    with pytest.raises(CompatibilityError, match="row_shape"):
        report.require()


def test_a_sliding_tail_serves_its_cut_only() -> None:
    """A ring of 8 beside a full plane, at 29: asking for 25 is refused, at 6 asking for 4 works."""
    refusals = gate(synthetic.make_cut(MIXED, 29), here(), at=25).refusals
    assert {(r.code, r.layer) for r in refusals} == {("rows-not-stored", 1)}
    early = gate(synthetic.make_cut(MIXED, 6), here(), at=4)
    assert early.refusals == ()
    assert early.need[PlaneKey("layer", 1, "v")] == RowSet.of((0, 4))
    assert early.claim is Claim.COMPATIBLE


def test_a_ring_that_needs_window_rows_refuses_a_pack_of_one_less() -> None:
    key = PlaneKey("layer", 1, "k")
    ring = replace(here(), need={key: RowSet.of((21, 29))})
    (refusal,) = gate(synthetic.make_cut(MIXED, 29), ring).refusals
    assert (refusal.code, refusal.plane, refusal.expected, refusal.found) == (
        "rows-not-stored",
        "layer.1.k",
        "[21, 29)",
        "[22, 29)",
    )
    richer = synthetic.make_cut(MIXED, 29, surplus={key: RowSet.of((17, 29))})
    assert codes(richer, ring) == []


def test_recurrent_states_exist_at_the_cut_only() -> None:
    geometry = Geometry((synthetic.full(), synthetic.recurrent()))
    cut = synthetic.make_cut(geometry, 9)
    assert codes(cut, here(geometry)) == []
    assert set(codes(cut, here(geometry), at=8)) == {"rows-not-stored"}


def test_positions_out_of_range_and_small_destinations() -> None:
    cut = synthetic.make_cut(MIXED, 29)
    assert codes(cut, here(), at=30) == ["position-out-of-range"]
    assert codes(cut, here(), at=-1) == ["position-out-of-range"]
    assert codes(cut, here(capacity=28)) == ["capacity-too-small"]
    assert codes(cut, here(capacity=29)) == []


def test_unknown_names_are_refused_by_name() -> None:
    unknown = LayerGeometry("ring_v2", synthetic.kv())
    cut = synthetic.make_cut(Geometry((unknown,)), 5)
    refusals = gate(cut, here(Geometry((unknown,)))).refusals
    assert (refusals[0].code, refusals[0].found) == ("unknown-kind", "ring_v2")
    strange = LayerGeometry("full", tuple(PlaneGeometry(r, UnknownEncoding("q3_k"), (2, 8)) for r in ("k", "v")))
    geometry = Geometry((strange,))
    with pytest.raises(CompatibilityError, match="q3_k"):
        geometry.require_known()


@pytest.mark.parametrize("law", ["history", "spiral"])
def test_laws_that_cannot_be_honoured_are_refused(law: str) -> None:
    cut = replace(synthetic.make_cut(MIXED, 5), layout=ProducerLayout((LayerLayout(law, 8), LayerLayout("linear", 8))))
    assert codes(cut, here())[0] in ("history-not-honoured", "unknown-law")


@pytest.mark.parametrize(
    ("geometry", "position", "upto", "deepest"),
    [
        (Geometry((synthetic.full(),)), 29, 17, 17),
        (MIXED, 29, 29, 29),
        (MIXED, 29, 40, 29),
        (MIXED, 29, 28, 0),
        (MIXED, 7, 5, 5),
        (Geometry((synthetic.full(), synthetic.recurrent())), 29, 28, None),
    ],
)
def test_the_deepest_restorable_position(geometry: Geometry, position: int, upto: int, deepest: int | None) -> None:
    assert deepest_position(synthetic.make_cut(geometry, position), upto) == deepest
