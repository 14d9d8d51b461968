"""Cuts without a model: rows that say where they belong, in every kind of layer.

A 16-bit element of a token plane holds ``4096 * layer + 1024 * plane + row`` (plane 0 = K, 1 = V, 2 = other), modulo
65,536, so that a row in the wrong place is seen by eye; states and other encodings hold seeded random bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvpack.model.encoding import ENCODINGS, CompositeEncoding, CompositeField
from kvpack.model.geometry import Geometry, LayerGeometry, PlaneGeometry, PlaneKey, Unit
from kvpack.model.identity import Identity, IdentityValue
from kvpack.model.layout import LayerLayout, ProducerLayout
from kvpack.model.planes import LOGITS, TOKENS, PlaneSpec, needed_rows, plane_specs, session_spec, tokens_spec
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import Cut, CutRecord, PlaneRows, Probe

BF16, F32, I8 = ENCODINGS["bf16"], ENCODINGS["f32"], ENCODINGS["i8"]


def kv(
    heads: int = 2, dim: int = 8, encoding: str = "bf16", unit: Unit = Unit.TOKEN, rows: int | None = None
) -> tuple[PlaneGeometry, ...]:
    """The K and V planes of one attention layer."""
    return tuple(PlaneGeometry(role, ENCODINGS[encoding], (heads, dim), unit, rows=rows) for role in ("k", "v"))


def full(heads: int = 2, dim: int = 8, encoding: str = "bf16") -> LayerGeometry:
    return LayerGeometry("full", kv(heads, dim, encoding))


def sliding(window: int = 8, heads: int = 2, dim: int = 8, sink: int | None = None) -> LayerGeometry:
    return LayerGeometry("sliding", kv(heads, dim), window=window, sink=sink)


def latent(kv_rank: int = 16, rope_dim: int = 4, pool: int | None = 4, index_width: int = 8) -> LayerGeometry:
    planes = [PlaneGeometry("latent", F32, (kv_rank + rope_dim,))]
    if pool is not None:
        planes.append(PlaneGeometry("index_key", F32, (index_width // 2,), Unit.POOL))
        if pool > 1:
            planes.append(PlaneGeometry("index_tail", F32, (index_width,)))
    return LayerGeometry("latent", tuple(planes), pool=pool, kv_rank=kv_rank, rope_dim=rope_dim)


def recurrent() -> LayerGeometry:
    return LayerGeometry(
        "recurrent",
        (
            PlaneGeometry("conv", BF16, (12, 3), Unit.STATE, axes=("channel", "tap")),
            PlaneGeometry("ssm", F32, (4, 6, 5), Unit.STATE, axes=("head", "dim", "state")),
        ),
    )


def hybrid(window: int | None = None) -> LayerGeometry:
    return LayerGeometry("hybrid", (*kv(), *recurrent().planes), window=window)


def compressed(window: int = 8, pool: int = 4) -> LayerGeometry:
    return LayerGeometry(
        "compressed",
        (
            PlaneGeometry("k", BF16, (1, 8)),
            PlaneGeometry("entry.compressor", BF16, (8,), Unit.POOL),
            PlaneGeometry("entry.indexer", BF16, (4,), Unit.POOL),
            PlaneGeometry("tail_kv.compressor", BF16, (16,)),
            PlaneGeometry("tail_gate.compressor", BF16, (16,)),
            PlaneGeometry("overlap_kv.compressor", BF16, (pool, 8), Unit.STATE, axes=("token", "channel")),
            PlaneGeometry("overlap_gate.compressor", F32, (pool, 8), Unit.STATE, axes=("token", "channel")),
        ),
        window=window,
        pool=pool,
    )


def shared(source: int) -> LayerGeometry:
    return LayerGeometry("shared", (), source=source)


def cross(rows: int = 5) -> LayerGeometry:
    return LayerGeometry("cross", kv(unit=Unit.FIXED, rows=rows))


def composite() -> LayerGeometry:
    row = CompositeEncoding(
        (
            CompositeField("values", ENCODINGS["f8_e4m3"], 16),
            CompositeField("scale", F32, 1),
            CompositeField("rope", BF16, 4),
        )
    )
    return LayerGeometry("latent", (PlaneGeometry("latent", row, ()),), kv_rank=16, rope_dim=4)


EVERY_KIND = Geometry(
    (
        full(),
        sliding(),
        sliding(window=6, sink=2),
        latent(),
        latent(pool=1),
        recurrent(),
        shared(0),
        cross(),
        composite(),
        full(encoding="q8_0", dim=32),
        hybrid(),
        hybrid(window=6),
        compressed(),
        LayerGeometry("none", ()),
    ),
    draft_layers=(full(1, 4),),
)


def identity(**fields: IdentityValue) -> Identity:
    """An identity that is complete enough to be compared; keyword arguments change compatibility fields."""
    compatibility: dict[str, IdentityValue] = {
        "architecture": "synthetic",
        "config": b"c" * 32,
        "scalar": "bf16",
        "template": "absent",
        "tokenizer": b"t" * 32,
        "weights": b"w" * 32,
    }
    return Identity(compatibility | fields, {"engine": "synthetic", "threads": 1})


def plane_bytes(spec: PlaneSpec, rows: RowSet, seed: int = 0) -> memoryview:
    """The bytes of ``rows`` of a plane, by the rule of this module."""
    count = rows.count * spec.axis_bytes
    if spec.unit is Unit.TOKEN and spec.row_bytes % 2 == 0 and spec.key.role in ("k", "v"):
        plane = {"k": 0, "v": 1}.get(spec.key.role, 2)
        numbers = np.concatenate([np.arange(a, b) for a, b in rows] or [np.zeros(0, np.int64)])
        words = (4096 * spec.key.layer + 1024 * plane + numbers + seed).astype(np.uint16)
        return memoryview(np.repeat(words, spec.row_bytes // 2).tobytes())
    generator = np.random.default_rng([seed, spec.key.layer + 2, *spec.key.role.encode()])
    return memoryview(generator.integers(0, 256, count, np.uint8).tobytes())


def make_cut(
    geometry: Geometry,
    position: int,
    *,
    draft_position: int | None = None,
    tokens: int | None = None,
    logits: int = 16,
    probe: Probe | None = None,
    surplus: Mapping[PlaneKey, RowSet] | None = None,
    who: Identity | None = None,
    seed: int = 0,
) -> Cut:
    """A cut at ``position``: semantic rows (and ``surplus`` ones), tokens, and ``logits`` elements of last logits."""
    if geometry.draft_layers and draft_position is None:
        draft_position = position
    rows = needed_rows(geometry, position, draft_position)
    for key, more in (surplus or {}).items():
        rows[key] = RowSet.union_of((rows[key], more))
    planes = {
        key: PlaneRows(spec, rows[key], plane_bytes(spec, rows[key], seed))
        for key, spec in plane_specs(geometry).items()
    }
    known = position if tokens is None else tokens
    if logits:
        spec = session_spec("logits", F32, (logits,))
        planes[LOGITS] = PlaneRows(
            spec, RowSet.of((0, spec.row_bytes)), plane_bytes(spec, RowSet.of((0, spec.row_bytes)), seed)
        )
    if known:
        ids = np.arange(known, dtype=np.int32) * 7 % 512
        planes[TOKENS] = PlaneRows(tokens_spec(), RowSet.of((0, known)), memoryview(ids.tobytes()))
    return Cut(
        geometry=geometry,
        identity=who or identity(),
        layout=ProducerLayout(
            tuple(LayerLayout("linear", position) for _ in geometry.layers),
            tuple(LayerLayout("linear", position) for _ in geometry.draft_layers),
        ),
        record=CutRecord(position, tokens=known, extras=("logits",) if logits else (), draft_position=draft_position),
        planes=planes,
        probe=probe,
    )
