"""How many bytes a live cache takes: the one source for admission and for the allocator.

Three parts are kept apart: bytes that every token of context adds (growing planes), bytes that are capped by a ring
whatever the context, and bytes that exist once (states, encoder rows, the working set of an indexer). A layer that
owns nothing (``shared``) adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from kvpack.errors import CompatibilityError
from kvpack.live.pool_ring import pool_ring_rows
from kvpack.live.rebasing_ring import TAIL_PAD_BYTES, rows_for
from kvpack.model.geometry import Geometry, LayerGeometry, PlaneKey, Scope, Unit
from kvpack.model.layout import LayerLayout, ProducerLayout
from kvpack.model.planes import PlaneSpec, plane_specs

__all__ = ["CacheSize", "PlaneSize", "cache_size", "default_layout", "default_layouts", "plane_parts", "plane_size"]

GROWING_LAWS = ("linear", "paged")


@dataclass(frozen=True)
class PlaneSize:
    """What one plane takes: ``rows`` physical rows of ``row_bytes`` bytes and ``pad_bytes`` behind them.

    ``growth`` is ``token`` (a row a token of context, or a row a pool), ``ring`` (capped) or ``fixed``;
    ``tokens_per_row`` is the pool for pool keys, otherwise 1.
    """

    key: PlaneKey
    rows: int
    row_bytes: int
    growth: str
    tokens_per_row: int = 1
    pad_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes to allocate."""
        return self.rows * self.row_bytes + self.pad_bytes


@dataclass(frozen=True)
class CacheSize:
    """The planes of a cache and their sums, in bytes."""

    planes: tuple[PlaneSize, ...]

    @property
    def bytes_per_token(self) -> Fraction:
        """What one more token of context adds to the growing planes; a fraction where keys are shared by a pool."""
        return sum((Fraction(p.row_bytes, p.tokens_per_row) for p in self._of("token")), Fraction(0))

    @property
    def ring_bytes(self) -> int:
        """What the rings take, however long the context."""
        return sum(p.nbytes for p in self._of("ring"))

    @property
    def ring_bytes_per_token(self) -> int:
        """What one row of every ring takes: the part of a token's bytes that a ring caps."""
        return sum(p.row_bytes for p in self._of("ring"))

    @property
    def fixed_bytes(self) -> int:
        """States, fixed rows, index working sets and pads."""
        return sum(p.nbytes for p in self._of("fixed")) + sum(p.pad_bytes for p in self._of("token"))

    @property
    def nbytes(self) -> int:
        """Everything."""
        return sum(p.nbytes for p in self.planes)

    def for_layers(self, first: int, end: int) -> CacheSize:
        """The part of layers ``[first, end)`` of the main list: what a pipeline stage owns."""
        return CacheSize(tuple(p for p in self.planes if p.key.scope == "layer" and first <= p.key.layer < end))

    def _of(self, growth: str) -> Iterator[PlaneSize]:
        return (p for p in self.planes if p.growth == growth)


def default_layout(layer: LayerGeometry, max_context: int) -> LayerLayout:
    """The usual layout of a kind: linear where rows grow, a rotating ring of the window where they slide."""
    if layer.kind in ("sliding", "hybrid", "compressed") and layer.window is not None:
        if layer.sink is not None:
            return LayerLayout("pinned", min(layer.sink + layer.window, max(max_context, layer.sink + 1)))
        return LayerLayout("modulo", min(layer.window, max_context))
    if layer.kind in ("full", "latent", "hybrid"):
        return LayerLayout("linear", max_context)
    return LayerLayout("none", 0)


def default_layouts(geometry: Geometry, max_context: int) -> ProducerLayout:
    """:func:`default_layout` of every layer."""
    return ProducerLayout(
        tuple(default_layout(layer, max_context) for layer in geometry.layers),
        tuple(default_layout(layer, max_context) for layer in geometry.draft_layers),
    )


def plane_parts(spec: PlaneSpec) -> tuple[int, int]:
    """How a row divides into heads: (number of heads, bytes of one). A plane without a head axis has one."""
    if len(spec.row_shape) < 2:
        return 1, spec.row_bytes
    heads = prod(spec.row_shape[:-1])
    return heads, spec.row_bytes // heads


def plane_size(
    layer: LayerGeometry,
    spec: PlaneSpec,
    layout: LayerLayout,
    max_context: int,
    index_rows: int | None = None,
    *,
    tail_pad: bool = False,
) -> PlaneSize:
    """The size of one plane under ``layout``; ``index_rows`` is the indexer's ring (None: the usual one, 0: flat).

    ``tail_pad`` puts the pad of a rebasing ring behind a plane of any law: the planes of a rank have it.
    """
    if spec.unit is Unit.STATE:
        return PlaneSize(spec.key, 1, spec.row_bytes, "fixed")
    if spec.unit is Unit.FIXED:
        return PlaneSize(spec.key, spec.rows or 0, spec.row_bytes, "fixed")
    if spec.unit is Unit.POOL:
        pool = layer.pool or 1
        return PlaneSize(spec.key, max(1, max_context // pool), spec.row_bytes, "token", pool)
    if spec.is_tail:
        rows = pool_ring_rows(max_context, index_rows)
        return PlaneSize(spec.key, rows or max_context, spec.row_bytes, "fixed" if rows else "token")
    growth = "token" if layout.law in GROWING_LAWS else "ring"
    pad = TAIL_PAD_BYTES if tail_pad or layout.law == "rebase" else 0
    return PlaneSize(spec.key, physical_rows(layer, layout, max_context), spec.row_bytes, growth, pad_bytes=pad)


def physical_rows(layer: LayerGeometry, layout: LayerLayout, max_context: int) -> int:
    """Rows of a token plane; a ``rebase`` ring is sized by its rule, everything else by its capacity."""
    if layout.law == "rebase":
        return rows_for(layer.window or 1, max_context)
    if layout.capacity < 1:
        raise CompatibilityError(
            "bad-layout", f"a plane of the law {layout.law} needs a capacity", field="capacity", found=layout.capacity
        )
    return layout.capacity


def cache_size(
    geometry: Geometry, max_context: int, layouts: ProducerLayout | None = None, *, index_rows: int | None = None
) -> CacheSize:
    """The size of a cache of ``geometry`` for ``max_context`` tokens; the allocator allocates exactly this."""
    chosen = layouts or default_layouts(geometry, max_context)
    specs = plane_specs(geometry)
    planes = [
        plane_size(layer, specs[key], _layout_of(chosen, key), max_context, index_rows)
        for key, layer, _ in geometry.planes()
    ]
    return CacheSize(tuple(planes))


def _layout_of(layouts: ProducerLayout, key: PlaneKey) -> LayerLayout:
    chosen: Sequence[LayerLayout] = layouts.draft_layers if key.scope == Scope.DRAFT.value else layouts.layers
    return chosen[key.layer]
