"""What the planes of a session are, apart from their rows, and which rows a cut means.

Source of the rules: spec/kvpack-v1.md, sections 7.3, 8 and 9 (blocks).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Final

from kvpack.model.encoding import ENCODINGS, AnyEncoding, Encoding
from kvpack.model.geometry import Geometry, LayerGeometry, PlaneKey, Scope, Unit
from kvpack.model.ranges import RowSet

__all__ = [
    "BLOCK_BYTES",
    "LOGITS",
    "TAIL_ROLES",
    "TOKENS",
    "PlaneSpec",
    "needed_rows",
    "plane_specs",
    "semantic_rows",
    "session_spec",
    "tokens_spec",
]

BLOCK_BYTES: Final = 1 << 20
# Rows that wait for their pool to fill.
TAIL_ROLES: Final = ("index_tail", "tail_kv", "tail_gate")
TOKENS: Final = PlaneKey(Scope.SESSION.value, -1, "tokens")
LOGITS: Final = PlaneKey(Scope.SESSION.value, -1, "logits")


@dataclass(frozen=True)
class PlaneSpec:
    """What a plane's rows are: key, encoding, shape, bytes a row, unit, and the number of rows where that is fixed."""

    key: PlaneKey
    encoding: AnyEncoding
    row_shape: tuple[int, ...]
    row_bytes: int
    unit: Unit
    rows: int | None = None

    @property
    def base_role(self) -> str:
        """The role without its suffix: ``conv`` of ``conv.1``."""
        return self.key.role.partition(".")[0]

    @property
    def is_tail(self) -> bool:
        """Whether its rows wait for their pool to fill, and are dead once the pool's key or entry is final."""
        return self.base_role in TAIL_ROLES

    @property
    def axis_bytes(self) -> int:
        """Bytes of one step along the plane's axis: a row, or one byte of a state."""
        return 1 if self.unit is Unit.STATE else self.row_bytes

    @property
    def block(self) -> int:
        """Steps of the axis in one block: the largest power of two within 1 MiB, at least 1 (spec, section 9)."""
        return 1 << max(0, (BLOCK_BYTES // self.axis_bytes).bit_length() - 1)

    def pieces(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """``[first, end)`` of the plane's axis, split at absolute multiples of the block."""
        while first < end:
            stop = min(end, (first // self.block + 1) * self.block)
            yield first, stop
            first = stop


def plane_specs(geometry: Geometry) -> dict[PlaneKey, PlaneSpec]:
    """The specs of every layer and draft plane of a geometry whose encodings are known, in canonical order."""
    return {
        key: PlaneSpec(key, plane.encoding, plane.row_shape, plane.row_bytes, plane.unit, plane.rows)
        for key, _, plane in geometry.planes()
    }


def tokens_spec() -> PlaneSpec:
    """The session plane of token ids: one i32 a token."""
    return PlaneSpec(TOKENS, ENCODINGS["i32"], (), 4, Unit.TOKEN)


def session_spec(role: str, encoding: Encoding, row_shape: tuple[int, ...]) -> PlaneSpec:
    """A session plane that exists once a cut: the last logits row, drafter taps, sampler state."""
    size = prod(row_shape) // encoding.block_elements * encoding.block_bytes
    return PlaneSpec(PlaneKey(Scope.SESSION.value, -1, role), encoding, row_shape, size, Unit.STATE)


def semantic_rows(layer: LayerGeometry, spec: PlaneSpec, position: int) -> RowSet:
    """The rows of a layer's plane that a cut at ``position`` tokens means, in the plane's own unit.

    For ``STATE`` planes the axis is the bytes of the state: ``[0, row_bytes)``.
    """
    if spec.unit is Unit.STATE:
        return RowSet.of((0, spec.row_bytes))
    if spec.unit is Unit.FIXED:
        return RowSet.of((0, spec.rows or 0))
    if spec.unit is Unit.POOL:
        return RowSet.of((0, position // (layer.pool or 1)))
    if spec.is_tail and layer.pool is not None:
        return RowSet.of((position // layer.pool * layer.pool, position))
    if layer.window is not None:
        return RowSet.of((0, min(position, layer.sink or 0)), (max(0, position - (layer.window - 1)), position))
    return RowSet.of((0, position))


def needed_rows(geometry: Geometry, position: int, draft_position: int | None = None) -> dict[PlaneKey, RowSet]:
    """The semantic rows of every layer and draft plane at ``position``: the least that any destination needs.

    Raises CompatibilityError ``unknown-encoding`` for a geometry with an encoding of unknown size.
    """
    specs = plane_specs(geometry)
    return {
        key: semantic_rows(layer, specs[key], (draft_position or 0) if key.scope == Scope.DRAFT.value else position)
        for key, layer, _ in geometry.planes()
    }
