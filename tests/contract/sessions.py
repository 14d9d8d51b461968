"""Sessions whose rows are random but fixed: every cut of one session agrees with every other, and nothing shrinks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from kvpack.model.geometry import Geometry, PlaneKey, Unit
from kvpack.model.identity import Identity
from kvpack.model.layout import LayerLayout, ProducerLayout
from kvpack.model.planes import LOGITS, TOKENS, PlaneSpec, needed_rows, plane_specs, session_spec, tokens_spec
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import Cut, CutRecord, CutView, PlaneRows
from tests import synthetic

FULL = Geometry((synthetic.full(), synthetic.full(1, 4)))
SLIDING = Geometry((synthetic.full(), synthetic.sliding(8), synthetic.sliding(6, sink=2)))
RECURRENT = Geometry((synthetic.full(), synthetic.recurrent()))
POOLED = Geometry((synthetic.latent(pool=4), synthetic.sliding(8)))
WHO = synthetic.identity()


def tokens(count: int, seed: int = 0) -> list[int]:
    """Token ids of one conversation; with another seed they differ from the first on."""
    return [int(t) for t in np.random.default_rng([99, seed]).integers(0, 50_000, count)]


@lru_cache(maxsize=64)
def _table(seed: int, scope: str, layer: int, role: str, size: int) -> bytes:
    return np.random.default_rng([seed, layer + 1, *scope.encode(), *role.encode()]).bytes(size)


def _rows(spec: PlaneSpec, rows: RowSet, position: int, seed: int) -> memoryview:
    key = spec.key
    if spec.unit is Unit.STATE:  # a state stands for its position alone
        return memoryview(
            np.random.default_rng([seed, position, key.layer + 1, *key.role.encode()]).bytes(spec.row_bytes)
        )
    size = 1 << max(12, (rows.end * spec.row_bytes).bit_length())
    table = memoryview(_table(seed, key.scope, key.layer, key.role, size))
    return memoryview(b"".join(table[a * spec.row_bytes : b * spec.row_bytes] for a, b in rows))


def cut_of(
    geometry: Geometry,
    ids: Sequence[int],
    *,
    logits: int = 16,
    seed: int = 0,
    who: Identity = WHO,
    carry: bool = True,
) -> Cut:
    """The cut behind ``ids``, with the last logits (unless 0) and the token ids (unless ``carry`` is off)."""
    position = len(ids)
    specs = plane_specs(geometry)
    needed = needed_rows(geometry, position)
    for key, layer, _ in geometry.planes():
        if layer.window is not None:  # what a rotating ring needs: one row more than the position means
            tail = RowSet.of((max(0, position - layer.window), position))
            needed[key] = RowSet.union_of((needed[key], tail))
    planes = {key: PlaneRows(specs[key], rows, _rows(specs[key], rows, position, seed)) for key, rows in needed.items()}
    if logits:
        spec = session_spec("logits", synthetic.F32, (logits,))
        whole = RowSet.of((0, spec.row_bytes))
        planes[LOGITS] = PlaneRows(spec, whole, _rows(spec, whole, position, seed))
    if carry and position:
        ids32 = np.asarray(ids, np.int32)
        planes[TOKENS] = PlaneRows(tokens_spec(), RowSet.of((0, position)), memoryview(ids32.tobytes()))
    layers = tuple(LayerLayout("linear", position) for _ in geometry.layers)
    record = CutRecord(position, tokens=position if carry else 0, extras=("logits",) if logits else ())
    return Cut(geometry, who, ProducerLayout(layers), record, planes)


def same_rows(found: CutView, wanted: CutView, need: dict[PlaneKey, RowSet] | None = None) -> None:
    """Every row that ``wanted`` has (or those of ``need``) is in ``found``, byte for byte."""
    for key, rows in (need or wanted.stored).items():
        for first, end in rows:
            assert bytes(found.rows(key, first, end)) == bytes(wanted.rows(key, first, end)), str(key)
