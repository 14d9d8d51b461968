"""DeepSeek V4's layers: sliding keys that are their own values, and a compressed entry for each pool of tokens.

What such a layer holds at a position follows from the position: ``position // pool`` entries, the projections of the
``position % pool`` tokens that still wait for their pool to fill, and, where pools overlap, the part of the last full
pool that the next one reads. Roles end with the library's name of the entry: ``entry.compressor``, ``entry.indexer``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from kvpack.engines.transformers.attention import plane_of, zeros
from kvpack.engines.transformers.layers import HeldRows, HeldState, LayerAdapter, LayerRole, unsupported_layer
from kvpack.model.geometry import LayerGeometry, PlaneGeometry, Unit

if TYPE_CHECKING:
    import torch

__all__ = ["COMPRESSED"]

_ENTRIES: Final = {"entry": "compressed_kv", "tail_kv": "buffer_kv", "tail_gate": "buffer_gate"}
_OVERLAPS: Final = {"overlap_kv": "overlap_kv", "overlap_gate": "overlap_gate"}


class _Compressed:
    """``DeepseekV4HCACache`` and ``DeepseekV4CSACache``."""

    law = "chronological"

    def described_after(self, layer: Any) -> int:
        # An overlap shows its element type only once a pool has closed.
        return int(layer.compress_rate) if hasattr(layer, "overlap_kv") else 1

    def position(self, layer: Any) -> int | None:
        return int(layer.cumulative_length)

    def is_filled(self, layer: Any) -> bool:
        return bool(layer.is_initialized) and layer.keys is not None and layer.keys.dim() == 4

    def batch(self, layer: Any) -> int:
        return int(layer.keys.shape[0]) if self.is_filled(layer) else 1

    def capacity(self, layer: Any) -> int:
        return int(layer.keys.shape[-2]) if self.is_filled(layer) else 0

    def geometry(self, layer: Any, role: LayerRole) -> LayerGeometry:
        if layer.values is not layer.keys:
            raise unsupported_layer(role, layer, "has values that are not its keys", field="values", found="tensor")
        pool = int(layer.compress_rate)
        for name, count in layer.entry_count.items():
            if count != layer.compressed_kv[name].shape[1]:
                raise unsupported_layer(role, layer, f"miscounts its entries {name}", field="entry_count", found=count)
        keys = layer.keys
        planes: list[PlaneGeometry] = [plane_of("k", keys, (keys.shape[1], keys.shape[3]))]
        for base, name, tensor in _parts(layer, _ENTRIES):
            unit = Unit.POOL if base == "entry" else Unit.TOKEN
            planes.append(plane_of(f"{base}.{name}", tensor, (tensor.shape[2],), unit))
        for base, name, tensor in _parts(layer, _OVERLAPS):
            plane = plane_of(f"{base}.{name}", tensor, tuple(tensor.shape[1:]), Unit.STATE)
            planes.append(replace(plane, axes=("token", "channel")))
        return LayerGeometry("compressed", tuple(planes), window=int(layer.sliding_window), pool=pool)

    def export(self, layer: Any, geometry: LayerGeometry) -> HeldState:
        if not self.is_filled(layer):
            return HeldState()
        position, pool = int(layer.cumulative_length), int(layer.compress_rate)
        rows = {"k": HeldRows(position - self.capacity(layer), (layer.keys[0],))}
        for base, name, tensor in _parts(layer, _ENTRIES):
            first = 0 if base == "entry" else position // pool * pool
            rows[f"{base}.{name}"] = HeldRows(first, (tensor[:1],))
        return HeldState(rows, {f"{base}.{name}": tensor[0] for base, name, tensor in _parts(layer, _OVERLAPS)})

    def restore(self, layer: Any, geometry: LayerGeometry, position: int, device: Any) -> HeldState:
        if not position:
            return HeldState()
        window, pool = int(layer.sliding_window), int(layer.compress_rate)
        (heads, width), length = geometry.planes[0].row_shape, min(position, window)
        none = zeros(geometry.planes[0], (1, heads, 0, width), device)
        layer.lazy_initialization(none, none)
        layer.keys = zeros(geometry.planes[0], (1, heads, length, width), device)[:, :, -window + 1 :, :]
        layer.values = layer.keys
        layer.cumulative_length = position
        for plane in geometry.planes[1:]:
            base, _, name = plane.role.partition(".")
            if base in _ENTRIES:
                count = position // pool if base == "entry" else position % pool
                getattr(layer, _ENTRIES[base])[name] = zeros(plane, (1, count, plane.row_shape[0]), device)
                layer.entry_count[name] = position // pool
            elif position >= pool:
                getattr(layer, _OVERLAPS[base])[name] = zeros(plane, (1, *plane.row_shape), device)
        return self.export(layer, geometry)


def _parts(layer: Any, names: dict[str, str]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(base role, entry name, tensor) of every tensor that the layer holds, in canonical order."""
    for base, attribute in names.items():
        for name, tensor in getattr(layer, attribute, {}).items():
            if tensor is not None:
                yield base, name, tensor


COMPRESSED: Final[LayerAdapter] = _Compressed()
