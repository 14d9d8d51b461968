"""Geometries written in JSON: every form of an entry, the shipped examples, and where a fault is said to be."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from kvpack_cli.output import jsonable

from kvpack.errors import UsageError
from kvpack.live.sizing import cache_size
from kvpack.model.encoding import ENCODINGS
from kvpack.model.geometry import Geometry, LayerGeometry, PlaneGeometry, Unit
from kvpack.model.geometry_json import MAX_LAYERS, geometry_from_json
from tests import synthetic
from tests.conftest import ROOT

FOLDER = ROOT / "fixtures" / "geometries"
KV = {"num_kv_heads": 2, "head_dim": 8, "encoding": "bf16"}
FULL = {"kind": "full", **KV}


def digest(frequencies: bytes) -> bytes:
    return blake3(frequencies).digest()


def read(**wire: Any) -> Geometry:
    # Through text, as a file is read.
    return geometry_from_json(json.loads(json.dumps(wire)), digest)


def refused(wire: object) -> UsageError:
    with pytest.raises(UsageError) as caught:
        geometry_from_json(wire, digest)
    assert caught.value.code == "bad-geometry"
    assert caught.value.message.startswith("the geometry: ")
    return caught.value


def shipped(name: str) -> Geometry:
    return geometry_from_json(json.loads((FOLDER / name).read_text()), digest)


def test_each_kind_by_its_words() -> None:
    state = {"shape": [12, 3], "encoding": "bf16", "axes": ["channel", "tap"]}
    ssm = {"shape": [4, 6, 5], "encoding": "f32", "axes": ["head", "dim", "state"]}
    found = read(
        layers=[
            FULL,
            {"kind": "sliding", "window": 8, **KV},
            {"kind": "sliding", "window": 6, "sink": 2, **KV},
            {"kind": "latent", "kv_rank": 16, "rope_dim": 4, "encoding": "f32", "pool": 4, "index_width": 8},
            {"kind": "latent", "kv_rank": 16, "rope_dim": 4, "encoding": "f32", "pool": 1, "index_dim": 4},
            {"kind": "recurrent", "conv": state, "ssm": ssm},
            {"kind": "shared", "source": 0},
            {"kind": "cross", "rows": 5, **KV},
            {
                "kind": "latent", "kv_rank": 16, "rope_dim": 4,
                "encoding": {"fields": [["values", "f8_e4m3", 16], ["scale", "f32", 1], ["rope", "bf16", 4]]},
            },
            {"kind": "full", "num_kv_heads": 2, "head_dim": 32, "encoding": "q8_0"},
        ],
        draft_layers=[{"kind": "full", "num_kv_heads": 1, "head_dim": 4, "encoding": "bf16"}],
    )  # fmt: skip
    # The other kinds (hybrid, compressed, none) have no words of their own: their planes are written out.
    assert found == replace(synthetic.EVERY_KIND, layers=synthetic.EVERY_KIND.layers[:10])


def test_what_a_kind_adds() -> None:
    (layer,) = read(layers=[{**FULL, "v_head_dim": 32, "k_encoding": "f16", "v_encoding": "q8_0"}]).layers
    assert [(p.encoding.name, p.row_shape) for p in layer.planes] == [("f16", (2, 8)), ("q8_0", (2, 32))]
    (layer,) = read(
        layers=[{"kind": "hybrid", "window": 8, **KV, "conv": [{"shape": [4], "encoding": "f32"}] * 2}]
    ).layers
    assert [p.role for p in layer.planes] == ["k", "v", "conv.0", "conv.1"]
    assert layer.planes[3] == PlaneGeometry("conv.1", ENCODINGS["f32"], (4,), Unit.STATE)
    (layer,) = read(layers=[{"kind": "none"}]).layers
    assert layer == LayerGeometry("none", ())
    (layer,) = read(
        layers=[
            {
                "kind": "latent", "kv_rank": 8, "rope_dim": 0, "encoding": "bf16",
                "pool": 2, "index_width": 10, "index_dim": 6, "index_encoding": "f8_e4m3",
            }
        ]
    ).layers  # fmt: skip
    assert [(p.role, p.row_shape, p.encoding.name) for p in layer.planes] == [
        ("latent", (8,), "bf16"), ("index_key", (6,), "f8_e4m3"), ("index_tail", (10,), "f8_e4m3"),
    ]  # fmt: skip


def test_repetition_patterns_and_templates_nest() -> None:
    local, last = {"kind": "sliding", "window": 8, **KV}, {"kind": "sliding", "window": 9, **KV}
    found = read(
        templates={"local": local, "global": FULL},
        layers=[
            {"repeat": 2, "pattern": ["local*2", "global", {"repeat": 2, "pattern": [last]}]},
            {"repeat": 3, **FULL},
            "local",
        ],
    )
    letters = "".join({8: "l", 9: "L", None: "g"}[layer.window] for layer in found.layers)
    assert letters == "llgLL" * 2 + "ggg" + "l"


def test_what_inspect_prints_is_a_geometry() -> None:
    ropes = read(ropes={"a": {"dim": 8, "theta": 10000}}, layers=[{**FULL, "rope": "a"}])
    for geometry in (synthetic.EVERY_KIND, ropes):
        assert geometry_from_json(jsonable(geometry.to_wire()), digest) == geometry


def test_a_rotation_is_named_by_its_frequencies() -> None:
    found = read(ropes={"a": {"dim": 4, "theta": 100}}, layers=[{**FULL, "rope": "a"}]).ropes["a"]
    assert (found.dim, found.pairing, found.theta) == (4, "half", 100.0)
    assert found.digest == digest(struct.pack("<ffd", 1.0, 0.1, 1.0))
    other = read(
        ropes={"a": {"dim": 4, "theta": 100.0, "pairing": "interleaved", "scaling": 2, "digest": "ab" * 32}},
        layers=[{**FULL, "rope": "a"}],
    ).ropes["a"]
    assert (other.pairing, other.digest) == ("interleaved", b"\xab" * 32)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_every_shipped_geometry_is_read_and_can_be_allocated(path: Path) -> None:
    geometry = shipped(path.name)
    assert cache_size(geometry, 131072).nbytes > 0
    assert f"`{path.name}`" in (FOLDER / "README.md").read_text()


def test_the_figures_of_the_shipped_geometries() -> None:
    size = cache_size(shipped("52-layer.json"), 131072)
    assert (size.ring_bytes, size.bytes_per_token * 131072) == (81_788_928, 1_744_830_464)
    hybrid = shipped("45-layer-hybrid.json")
    kinds = [layer.kind for layer in hybrid.layers]
    assert (kinds.count("recurrent"), kinds.count("latent"), len(kinds)) == (34, 11, 45)
    assert {layer.pool for layer in hybrid.layers if layer.kind == "latent"} == {4}
    gemma = shipped("gemma-like.json")
    assert [layer.kind for layer in gemma.layers[:6]] == ["sliding"] * 5 + ["full"]
    assert {name: rope.theta for name, rope in gemma.ropes.items()} == {"local": 1e4, "global": 1e6}
    deepseek = shipped("deepseek-like.json")
    assert [(layer.kv_rank, layer.rope_dim, layer.pool) for layer in deepseek.layers] == [(512, 64, 1)] * 61


@pytest.mark.parametrize(
    ("wire", "field"),
    [
        ([], "(root)"),
        ({}, "layers"),
        ({"layers": []}, "layers"),
        ({"layers": [FULL], "lairs": 1}, "lairs"),
        ({"layers": [{}]}, "layers[0].kind"),
        ({"layers": [{"kind": "full"}]}, "layers[0].num_kv_heads"),
        ({"layers": [FULL, {**FULL, "window": 8}]}, "layers[1].window"),
        ({"layers": [{**FULL, "heads": 8}]}, "layers[0].heads"),
        ({"layers": [{**FULL, "head_dim": True}]}, "layers[0].head_dim"),
        ({"layers": [{**FULL, "head_dim": 8.0}]}, "layers[0].head_dim"),
        ({"layers": [{**FULL, "head_dim": 0}]}, "layers[0].head_dim"),
        ({"layers": [{**FULL, "encoding": "f17"}]}, "layers[0].planes[0].encoding"),
        ({"layers": [{**FULL, "encoding": 16}]}, "layers[0].encoding"),
        ({"layers": [{**FULL, "encoding": "q8_0"}]}, "layers[0] (k)"),
        ({"layers": [{**FULL, "rope": "a"}]}, "layers[0].rope"),
        ({"layers": [{"kind": "sliding", **KV}]}, "layers[0].window"),
        ({"layers": [{"kind": "compressed", "window": 4, "pool": 4}]}, "layers[0].planes"),
        ({"layers": [{"kind": "recurrent"}]}, "layers[0].planes"),
        ({"layers": [{"kind": "recurrent", "conv": {"shape": []}}]}, "layers[0].conv.encoding"),
        ({"layers": [{"kind": "latent", "kv_rank": 8, "rope_dim": 0, "encoding": "f32", "pool": 4}]},
         "layers[0].index_width"),
        ({"layers": [{"repeat": 2, **FULL}, {"kind": "shared", "source": 2}]}, "layers[1].source"),
        ({"layers": ["a"]}, "layers[0]"),
        ({"layers": ["a**2"], "templates": {"a": FULL}}, "layers[0]"),
        ({"layers": ["a*0"], "templates": {"a": FULL}}, "layers"),
        ({"layers": ["a"], "templates": {"a": {**FULL, "head_dim": 0}}}, "templates.a.head_dim"),
        ({"layers": [{"pattern": [FULL, {**FULL, "x": 1}]}]}, "layers[0].pattern[1].x"),
        ({"layers": [{"pattern": [FULL], "kind": "full"}]}, "layers[0].kind"),
        ({"layers": [{"repeat": 0, **FULL}]}, "layers[0].repeat"),
        ({"layers": [{"repeat": MAX_LAYERS, "pattern": [FULL, FULL]}]}, "layers[0]"),
        ({"layers": [{"repeat": MAX_LAYERS, **FULL}, FULL]}, "layers[1]"),
        ({"layers": [FULL], "ropes": {"a": {"theta": 1e4}}}, "ropes.a.dim"),
        ({"layers": [FULL], "ropes": {"a": {"dim": 8, "theta": "1e4"}}}, "ropes.a.theta"),
        ({"layers": [FULL], "ropes": {"a": {"dim": 8, "theta": float("nan")}}}, "ropes.a.theta"),
        ({"layers": [FULL], "ropes": {"a": {"dim": 8, "theta": 10**400}}}, "ropes.a.theta"),
        ({"layers": [FULL], "ropes": {"a": {"dim": 8, "theta": 0}}}, "ropes.a.theta"),
        ({"layers": [FULL], "ropes": {"a": {"dim": 8, "theta": 1, "digest": "xy"}}}, "ropes.a.digest"),
        ({"layers": [FULL], "ropes": {"a": {"dim": 8, "theta": 1, "digest": "ab"}}}, "ropes.a.digest"),
        ({"layers": [FULL], "ropes": {"a": {"dim": 8, "theta": 1, "pairing": "odd"}}}, "ropes.a.pairing"),
        ({"layers": [FULL], "draft_layers": [{"kind": "x"}]}, "draft_layers[0].planes"),
    ],
    ids=str,
)  # fmt: skip
def test_a_fault_is_named_by_its_path(wire: object, field: str) -> None:
    error = refused(wire)
    assert error.field == field
    assert field in error.message


def test_nested_bombs_are_refused_before_they_grow() -> None:
    layers: object = [FULL]
    for _ in range(20):
        layers = [{"repeat": 4, "pattern": layers}]
    assert "nested" in refused({"layers": layers}).message
    layers = [FULL]
    for _ in range(7):
        layers = [{"repeat": 4000, "pattern": layers}]
    assert "too many layers" in refused({"layers": layers}).message
