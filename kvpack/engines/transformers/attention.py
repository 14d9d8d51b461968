"""Attention layers of transformers' caches: keys and values, latent rows, an indexer's keys, or nothing of their own.

The laws were read off transformers' ``cache_utils`` (5.24): a dynamic sliding layer keeps the last ``window - 1`` rows
as a view into the last step's concatenation; a static one keeps ``window`` rows, chronological once it is full, of
which the oldest is never read again. A latent (MLA) model puts the normalised latent into ``keys`` and the rotated part
into ``values``; a row of the plane ``latent`` is the one followed by the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from kvpack.engines.transformers.layers import HeldRows, HeldState, LayerAdapter, LayerRole, unsupported_layer
from kvpack.engines.transformers.library import encoding_name, require_torch, torch_dtype
from kvpack.model.encoding import ENCODINGS
from kvpack.model.geometry import LayerGeometry, PlaneGeometry, Unit

if TYPE_CHECKING:
    import torch

__all__ = [
    "DYNAMIC_FULL",
    "DYNAMIC_INDEXED",
    "DYNAMIC_SLIDING",
    "STATIC_FULL",
    "STATIC_INDEXED",
    "STATIC_SLIDING",
    "WITHOUT_CACHE",
    "empty_rows",
    "plane_of",
    "zeros",
]


def plane_of(role: str, tensor: torch.Tensor, row_shape: tuple[int, ...], unit: Unit = Unit.TOKEN) -> PlaneGeometry:
    """The plane that holds rows of this shape in the tensor's own element type."""
    return PlaneGeometry(role, ENCODINGS[encoding_name(tensor.dtype)], tuple(int(size) for size in row_shape), unit)


def zeros(plane: PlaneGeometry, shape: tuple[int, ...], device: Any) -> torch.Tensor:
    """Zeros of this shape in the plane's element type."""
    tensor: torch.Tensor = require_torch().zeros(shape, dtype=torch_dtype(plane.encoding.name), device=device)
    return tensor


class _Attention:
    """What all layers with ``keys`` and ``values`` of shape ``[1, heads, rows, width]`` share."""

    def described_after(self, layer: Any) -> int:
        return 1

    def is_filled(self, layer: Any) -> bool:
        return bool(layer.is_initialized) and layer.keys is not None and layer.keys.dim() == 4

    def batch(self, layer: Any) -> int:
        return int(layer.keys.shape[0]) if self.is_filled(layer) else 1

    def capacity(self, layer: Any) -> int:
        return int(layer.keys.shape[-2]) if self.is_filled(layer) else 0

    def geometry(self, layer: Any, role: LayerRole) -> LayerGeometry:
        keys, values = layer.keys, layer.values
        if role.latent is not None and _widths(layer) == (1, role.latent[0], 1, role.latent[1]):
            if keys.dtype != values.dtype:
                raise unsupported_layer(
                    role, layer, "has a latent row of two element types", field="dtype", found=str(values.dtype)
                )
            plane = plane_of("latent", keys, (sum(role.latent),))
            return LayerGeometry("latent", (plane,), kv_rank=role.latent[0], rope_dim=role.latent[1])
        planes = (
            plane_of("k", keys, (keys.shape[1], keys.shape[3])),
            plane_of("v", values, (values.shape[1], values.shape[3])),
        )
        return LayerGeometry("full", planes)

    def _held(self, layer: Any, geometry: LayerGeometry, first: int, at: int, count: int) -> HeldState:
        """Rows ``[first, first + count)`` that lie from physical row ``at`` on."""
        if not self.is_filled(layer):
            return HeldState()
        keys, values = layer.keys[0, :, at : at + count, :], layer.values[0, :, at : at + count, :]
        if geometry.kind == "latent":
            return HeldState({"latent": HeldRows(first, (keys, values))})
        return HeldState({"k": HeldRows(first, (keys,)), "v": HeldRows(first, (values,))})


class _Sliding(_Attention):
    """Layers that forget what lies behind their window."""

    def geometry(self, layer: Any, role: LayerRole) -> LayerGeometry:
        if role.window is None or role.window < 2:
            raise unsupported_layer(
                role, layer, "slides over a window of which no row is kept apart", field="window", found=role.window
            )
        found = super().geometry(layer, role)
        if found.kind != "full":
            raise unsupported_layer(role, layer, "slides over latent rows", field="kind", found=found.kind)
        return replace(found, kind="sliding", window=role.window)


class _DynamicFull(_Attention):
    """``DynamicLayer``: every row, grown by concatenation."""

    law = "linear"

    def position(self, layer: Any) -> int | None:
        return int(layer.get_seq_length())

    def export(self, layer: Any, geometry: LayerGeometry) -> HeldState:
        return self._held(layer, geometry, first=0, at=0, count=self.capacity(layer))

    def restore(self, layer: Any, geometry: LayerGeometry, position: int, device: Any) -> HeldState:
        if position:
            layer.lazy_initialization(*empty_rows(geometry, device))
            layer.keys, layer.values = _allocated(geometry, position, device)
        return self._held(layer, geometry, first=0, at=0, count=position)


class _DynamicSliding(_Sliding):
    """``DynamicSlidingWindowLayer``: the last ``window - 1`` rows and the true count."""

    law = "chronological"

    def position(self, layer: Any) -> int | None:
        return int(layer.cumulative_length)

    def export(self, layer: Any, geometry: LayerGeometry) -> HeldState:
        count = self.capacity(layer)
        return self._held(layer, geometry, first=int(layer.cumulative_length) - count, at=0, count=count)

    def restore(self, layer: Any, geometry: LayerGeometry, position: int, device: Any) -> HeldState:
        held = min(position, layer.sliding_window - 1)
        if position:
            layer.lazy_initialization(*empty_rows(geometry, device))
            # Past the window a step leaves a view without the oldest row of its concatenation of `window` rows.
            length = min(position, layer.sliding_window)
            layer.keys, layer.values = (rows[:, :, length - held :, :] for rows in _allocated(geometry, length, device))
            layer.cumulative_length = position
        return self._held(layer, geometry, first=position - held, at=0, count=held)


class _StaticFull(_Attention):
    """``StaticLayer``: memory for ``max_cache_len`` rows."""

    law = "linear"

    def position(self, layer: Any) -> int | None:
        return int(layer.cumulative_length)

    def capacity(self, layer: Any) -> int:
        return int(layer.max_cache_len)

    def export(self, layer: Any, geometry: LayerGeometry) -> HeldState:
        return self._held(layer, geometry, first=0, at=0, count=int(layer.cumulative_length))

    def restore(self, layer: Any, geometry: LayerGeometry, position: int, device: Any) -> HeldState:
        if position:
            layer.lazy_initialization(*empty_rows(geometry, device))
            # In place: the counter's address is one that captured graphs replay from.
            layer.cumulative_length.fill_(position)
        return self._held(layer, geometry, first=0, at=0, count=position)


class _StaticSliding(_Sliding):
    """``StaticSlidingWindowLayer``: ``window`` rows, of which the last ``window - 1`` are read again."""

    law = "chronological"

    def position(self, layer: Any) -> int | None:
        return int(layer.cumulative_length_int)

    def capacity(self, layer: Any) -> int:
        return int(layer.max_cache_len)

    def export(self, layer: Any, geometry: LayerGeometry) -> HeldState:
        position = int(layer.cumulative_length_int)
        count = min(position, self.capacity(layer))
        return self._held(layer, geometry, first=position - count, at=0, count=count)

    def restore(self, layer: Any, geometry: LayerGeometry, position: int, device: Any) -> HeldState:
        capacity, window = self.capacity(layer), geometry.window or 0
        held = min(position, window - 1)
        if position:
            layer.lazy_initialization(*empty_rows(geometry, device))
            layer.cumulative_length_int = position
            # Appends below the window index by the tensor; a prefill that overruns the window leaves it at 0.
            layer.cumulative_length.fill_(position if position <= capacity else 0)
            if held < min(position, capacity):
                # The oldest slot stays empty: nothing reads it any more, unless a crop brought it back.
                layer._is_croppable = False
        return self._held(layer, geometry, first=position - held, at=min(position, capacity) - held, count=held)


def _indexed(found: LayerGeometry, layer: Any, role: LayerRole) -> LayerGeometry:
    """The geometry of a layer that may run an indexer: one key a token (DSA), so pool 1."""
    if not layer.is_indexer_initialized:
        return found
    if found.kind != "latent":
        raise unsupported_layer(
            role, layer, "runs an indexer over rows that are not latent", field="kind", found="full"
        )
    if layer.indexer_position_ids is not None:
        raise unsupported_layer(
            role,
            layer,
            "keeps positions of its own beside the index keys",
            field="indexer_position_ids",
            found="tensor",
        )
    key = plane_of("index_key", layer.indexer_keys, (layer.indexer_keys.shape[2],), Unit.POOL)
    return replace(found, planes=(*found.planes, key), pool=1)


def _with_index(held: HeldState, layer: Any, count: int) -> HeldState:
    if not layer.is_indexer_initialized:
        return held
    # The batch axis of one stands where rows of K have their heads.
    return replace(held, rows={**held.rows, "index_key": HeldRows(0, (layer.indexer_keys[:1, :count, :],))})


def _start_indexer(layer: Any, geometry: LayerGeometry, device: Any) -> PlaneGeometry | None:
    """Initialise the indexer as its first update does; the plane of its keys, None for a layer that runs none."""
    plane = next((plane for plane in geometry.planes if plane.role == "index_key"), None)
    if plane is not None:
        layer.lazy_initialization_indexer(zeros(plane, (1, 0, plane.row_shape[0]), device))
    return plane


class _DynamicIndexed(_DynamicFull):
    """``DynamicIndexedLayer``: latent rows and an indexer's key for each of them."""

    def geometry(self, layer: Any, role: LayerRole) -> LayerGeometry:
        return _indexed(super().geometry(layer, role), layer, role)

    def export(self, layer: Any, geometry: LayerGeometry) -> HeldState:
        held = super().export(layer, geometry)
        return _with_index(held, layer, layer.indexer_keys.shape[1] if layer.is_indexer_initialized else 0)

    def restore(self, layer: Any, geometry: LayerGeometry, position: int, device: Any) -> HeldState:
        held = super().restore(layer, geometry, position, device)
        plane = _start_indexer(layer, geometry, device) if position else None
        if plane is not None:
            layer.indexer_keys = zeros(plane, (1, position, plane.row_shape[0]), device)
        return _with_index(held, layer, position)


class _StaticIndexed(_StaticFull):
    """``StaticIndexedLayer``: the same in memory for ``max_cache_len`` rows."""

    def geometry(self, layer: Any, role: LayerRole) -> LayerGeometry:
        return _indexed(super().geometry(layer, role), layer, role)

    def export(self, layer: Any, geometry: LayerGeometry) -> HeldState:
        held = super().export(layer, geometry)
        return _with_index(held, layer, int(layer.indexer_cumulative_length) if layer.is_indexer_initialized else 0)

    def restore(self, layer: Any, geometry: LayerGeometry, position: int, device: Any) -> HeldState:
        held = super().restore(layer, geometry, position, device)
        if position and _start_indexer(layer, geometry, device) is not None:
            layer.indexer_cumulative_length.fill_(position)
        return _with_index(held, layer, position)


class _WithoutCache:
    """``DummyLayer``: a layer that reads another one's cache, or needs none."""

    law = "none"

    def described_after(self, layer: Any) -> int:
        return 1

    def position(self, layer: Any) -> int | None:
        return None

    def is_filled(self, layer: Any) -> bool:
        return False

    def batch(self, layer: Any) -> int:
        return 1

    def capacity(self, layer: Any) -> int:
        return 0

    def geometry(self, layer: Any, role: LayerRole) -> LayerGeometry:
        return LayerGeometry("none", ()) if role.source is None else LayerGeometry("shared", (), source=role.source)

    def export(self, layer: Any, geometry: LayerGeometry) -> HeldState:
        return HeldState()

    def restore(self, layer: Any, geometry: LayerGeometry, position: int, device: Any) -> HeldState:
        return HeldState()


def _widths(layer: Any) -> tuple[int, ...]:
    return tuple(int(size) for rows in (layer.keys, layer.values) for size in (rows.shape[1], rows.shape[3]))


def _allocated(geometry: LayerGeometry, rows: int, device: Any) -> list[torch.Tensor]:
    """Zeroed ``keys`` and ``values`` of so many rows."""
    if geometry.kind == "latent":
        plane = geometry.planes[0]
        return [zeros(plane, (1, 1, rows, width or 0), device) for width in (geometry.kv_rank, geometry.rope_dim)]
    return [
        zeros(plane, (1, plane.row_shape[0], rows, plane.row_shape[1]), device)
        for plane in geometry.planes
        if plane.role in ("k", "v")
    ]


def empty_rows(geometry: LayerGeometry, device: Any) -> list[torch.Tensor]:
    """Keys and values of zero tokens: what transformers' own ``early_initialization`` allocates a layer from."""
    return _allocated(geometry, 0, device)


DYNAMIC_FULL: Final[LayerAdapter] = _DynamicFull()
DYNAMIC_INDEXED: Final[LayerAdapter] = _DynamicIndexed()
DYNAMIC_SLIDING: Final[LayerAdapter] = _DynamicSliding()
STATIC_FULL: Final[LayerAdapter] = _StaticFull()
STATIC_INDEXED: Final[LayerAdapter] = _StaticIndexed()
STATIC_SLIDING: Final[LayerAdapter] = _StaticSliding()
WITHOUT_CACHE: Final[LayerAdapter] = _WithoutCache()
