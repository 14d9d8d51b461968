"""Geometry: what travels, what is refused, and which rows a cut means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpack.errors import FormatError
from kvpack.model.geometry import Geometry, LayerGeometry, Rope, Unit
from kvpack.model.layout import LayerLayout, ProducerLayout
from kvpack.model.planes import PlaneSpec, needed_rows, plane_specs, semantic_rows
from kvpack.model.ranges import RowSet
from kvpack.model.wire import WireMap
from kvpack.pack import canonical
from tests import synthetic


def through_wire(geometry: Geometry) -> Geometry:
    return Geometry.from_wire(WireMap(canonical.decode(canonical.encode(geometry.to_wire())), "geometry"))


def test_every_kind_round_trips() -> None:
    assert through_wire(synthetic.EVERY_KIND) == synthetic.EVERY_KIND


def test_ropes_round_trip_and_must_exist() -> None:
    rope = Rope(dim=8, pairing="half", theta=10_000.0, digest=b"r" * 32)
    layer = LayerGeometry("full", synthetic.kv(), rope="local")
    geometry = Geometry((layer,), ropes={"local": rope})
    assert through_wire(geometry) == geometry
    with pytest.raises(FormatError) as caught:
        through_wire(Geometry((layer,)))
    assert (caught.value.code, caught.value.field) == ("bad-manifest", "geometry.layers[0].rope")


def test_layouts_round_trip_and_need_one_entry_a_layer() -> None:
    geometry = Geometry((synthetic.full(), synthetic.sliding()))
    layout = ProducerLayout((LayerLayout("linear", 64, "HND"), LayerLayout("paged", 64, page_size=16)))
    wire = canonical.decode(canonical.encode(layout.to_wire()))
    assert ProducerLayout.from_wire(WireMap(wire, "producer_layout"), geometry) == layout
    with pytest.raises(FormatError, match="one entry a layer"):
        ProducerLayout.from_wire(WireMap(wire, "producer_layout"), Geometry((synthetic.full(),)))


def _set(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(layer: dict[str, Any]) -> None:
        target: Any = layer
        *parents, last = path.split(".")
        for name in parents:
            target = target[int(name)] if name.isdigit() else target[name]
        if value is None:
            del target[last]
        else:
            target[last] = value

    return change


@pytest.mark.parametrize(
    ("layer", "change", "field"),
    [
        (synthetic.sliding(), _set("window", 0), "window"),
        (synthetic.sliding(), _set("window", None), "window"),
        (synthetic.full(), _set("window", 8), "window"),
        (synthetic.full(), _set("source", 0), "source"),
        (synthetic.full(), _set("kind", "Full"), "kind"),
        (synthetic.full(), _set("planes", []), "planes"),
        (synthetic.full(), _set("planes.0.role", "v"), "planes"),
        (synthetic.full(), _set("planes.0.unit", "pool"), "planes"),
        (synthetic.full(), _set("planes.0.unit", "row"), "planes[0].unit"),
        (synthetic.full(), _set("planes.0.row_shape", [2, 0]), "planes[0].row_shape[1]"),
        (synthetic.full(), _set("planes.0.row_shape", [1] * 9), "planes[0].row_shape"),
        (synthetic.full(), _set("planes.0.encoding", "BF16"), "planes[0].encoding"),
        (synthetic.full(), _set("planes.0.rows", 4), "planes[0].rows"),
        (synthetic.cross(), _set("planes.0.rows", None), "planes[0].rows"),
        (synthetic.latent(), _set("pool", 1), "planes"),
        (synthetic.latent(), _set("kv_rank", None), "kv_rank"),
        (synthetic.recurrent(), _set("planes.0.axes", ["tap"]), "planes[0].axes"),
        (synthetic.shared(0), _set("source", 1), "source"),
        (synthetic.hybrid(), _set("sink", 1), "sink"),
        (synthetic.hybrid(), _set("pool", 1), "pool"),
        (synthetic.hybrid(), _set("planes.2.unit", "token"), "planes"),
        (synthetic.hybrid(), _set("planes.2.role", "entry"), "planes"),
        (synthetic.hybrid(), _set("planes.3.role", "k.1"), "planes"),
        (replace(synthetic.hybrid(), planes=synthetic.kv()), _set("kind", "hybrid"), "planes"),
        (synthetic.compressed(), _set("window", None), "window"),
        (synthetic.compressed(), _set("pool", None), "pool"),
        (synthetic.compressed(), _set("planes.1.unit", "token"), "planes"),
        (synthetic.compressed(), _set("planes.3.unit", "pool"), "planes"),
        (synthetic.compressed(), _set("planes.6.unit", "token"), "planes"),
        (synthetic.compressed(), _set("planes.3.role", "entry.other"), "planes"),
        (replace(synthetic.compressed(), planes=synthetic.kv()[:1]), _set("kind", "compressed"), "planes"),
        (LayerGeometry("none", ()), _set("planes", [synthetic.kv()[0].to_wire()]), "planes"),
    ],
)
def test_one_broken_rule_is_one_error_that_names_the_field(
    layer: LayerGeometry, change: Callable[[dict[str, Any]], None], field: str
) -> None:
    wire: dict[str, Any] = {"layers": [layer.to_wire()]}
    change(wire["layers"][0])
    with pytest.raises(FormatError) as caught:
        Geometry.from_wire(WireMap(canonical.decode(canonical.encode(wire)), "geometry"))
    assert caught.value.code in ("bad-manifest", "limit-exceeded")
    assert str(caught.value.field).removeprefix("geometry.layers[0].") == field


def test_shared_layers_read_an_earlier_owner() -> None:
    good = Geometry((synthetic.full(), synthetic.shared(0)))
    assert through_wire(good) == good
    with pytest.raises(FormatError, match="earlier layer"):
        through_wire(Geometry((synthetic.full(), synthetic.shared(0), synthetic.shared(1))))


@given(st.integers(0, 200), st.integers(1, 20), st.integers(0, 10))
def test_sliding_means_the_window_and_the_sinks(position: int, window: int, sink: int) -> None:
    layer = synthetic.sliding(window, sink=sink or None)
    spec = next(iter(plane_specs(Geometry((layer,))).values()))
    visible = {k for k in range(position) if position - k < window or k < sink}
    assert {r for a, b in semantic_rows(layer, spec, position) for r in range(a, b)} == visible


@given(st.integers(0, 200), st.integers(1, 9))
def test_pool_keys_and_tail_cover_every_token_once(position: int, pool: int) -> None:
    layer = synthetic.latent(pool=pool)
    rows = {key.role: r for key, r in needed_rows(Geometry((layer,)), position).items()}
    assert rows["latent"] == RowSet.of((0, position))
    assert rows["index_key"].count == position // pool
    covered = rows["index_key"].count * pool + (rows["index_tail"].count if pool > 1 else 0)
    assert covered == position


@given(st.integers(0, 200), st.integers(1, 20), st.integers(1, 9))
def test_compressed_rows_slide_and_every_token_is_in_an_entry_or_waits(position: int, window: int, pool: int) -> None:
    layer = synthetic.compressed(window, pool)
    rows = {key.role: r for key, r in needed_rows(Geometry((layer,)), position).items()}
    assert rows["k"] == RowSet.of((max(0, position - (window - 1)), position))
    for entry in ("entry.compressor", "entry.indexer"):
        assert rows[entry] == RowSet.of((0, position // pool))
    for tail in ("tail_kv.compressor", "tail_gate.compressor"):
        assert rows[tail] == RowSet.of((position // pool * pool, position))
    assert rows["overlap_gate.compressor"] == RowSet.of((0, pool * 8 * 4))


@given(st.integers(0, 200), st.one_of(st.none(), st.integers(1, 20)))
def test_hybrid_rows_are_those_of_its_attention(position: int, window: int | None) -> None:
    rows = {key.role: r for key, r in needed_rows(Geometry((synthetic.hybrid(window),)), position).items()}
    alone = synthetic.sliding(window) if window else synthetic.full()
    wanted = {key.role: r for key, r in needed_rows(Geometry((alone,)), position).items()}
    assert {role: rows[role] for role in "kv"} == wanted
    assert (rows["conv"], rows["ssm"]) == (RowSet.of((0, 72)), RowSet.of((0, 480)))


@given(st.integers(1, 1 << 22))
def test_a_block_is_the_largest_power_of_two_within_a_mebibyte(row_bytes: int) -> None:
    spec = PlaneSpec(
        next(iter(plane_specs(Geometry((synthetic.full(),))))), synthetic.I8, (row_bytes,), row_bytes, Unit.TOKEN
    )
    block = spec.block
    assert block & (block - 1) == 0
    assert block * row_bytes <= 1 << 20 or block == 1
    assert block * 2 * row_bytes > 1 << 20


def test_figures_of_the_52_layer_model() -> None:
    """39 sliding layers (window 2,048) and 13 growing ones, 2 KV heads of 128, f16, at 131,072 tokens."""
    layer = synthetic.full(2, 128, "f16")
    one_row = sum(plane.row_bytes for plane in layer.planes)
    assert one_row == 1024
    assert 39 * 2048 * one_row == 81_788_928
    rows = needed_rows(Geometry((layer,) * 13), 131_072)
    assert sum(r.count for r in rows.values()) * 512 == 1_744_830_464
