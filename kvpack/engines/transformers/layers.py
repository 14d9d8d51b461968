"""Cache layers of transformers, one adapter a class: what a live layer holds, and how to build one that holds it.

The registry is keyed by the exact class. A subclass may keep state that its parent does not, so it is another class
and refused by name until it has an adapter of its own.

The laws were read off transformers' ``cache_utils`` (5.24): a dynamic sliding layer keeps the last ``window - 1`` rows
as a view into the last step's concatenation; a static one keeps ``window`` rows, chronological once it is full, of
which the oldest is never read again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from kvpack.engines.transformers.library import encoding_name, require_torch, require_transformers, torch_dtype
from kvpack.errors import EngineError
from kvpack.model.encoding import ENCODINGS
from kvpack.model.geometry import LayerGeometry, PlaneGeometry

if TYPE_CHECKING:
    import torch

__all__ = ["LayerAdapter", "LayerRows", "adapter_of"]


@dataclass(frozen=True)
class LayerRows:
    """Rows ``[first, first + n)`` of each of a layer's planes, as views of the layer's own memory.

    ``planes`` maps a role to a tensor ``[num_kv_heads, n, head_dim]``; it is empty where the layer holds nothing yet.
    """

    first: int
    planes: Mapping[str, torch.Tensor]


class LayerAdapter(Protocol):
    """Everything that kvpack does with one class of cache layer. ``kind`` is the geometry's, ``law`` the layout's."""

    kind: str
    law: str

    def position(self, layer: Any) -> int:
        """The number of tokens that the layer has seen."""

    def batch(self, layer: Any) -> int:
        """The number of sequences in the layer; 1 where it holds nothing yet."""

    def planes(self, layer: Any) -> tuple[PlaneGeometry, ...]:
        """The planes of a layer that has seen at least one token."""

    def capacity(self, layer: Any) -> int:
        """Rows that the layer has memory for."""

    def export(self, layer: Any) -> LayerRows:
        """The rows that the layer holds now."""

    def restore(self, layer: Any, geometry: LayerGeometry, position: int, device: Any) -> LayerRows:
        """Make a fresh layer look as transformers leaves it after ``position`` tokens; returns the rows to write."""


class _KeyValueLayer:
    """What the four plain layers share: ``keys`` and ``values`` of shape ``[1, num_kv_heads, rows, head_dim]``."""

    def batch(self, layer: Any) -> int:
        return int(layer.keys.shape[0]) if _is_filled(layer) else 1

    def planes(self, layer: Any) -> tuple[PlaneGeometry, ...]:
        return tuple(
            PlaneGeometry(role, ENCODINGS[encoding_name(tensor.dtype)], (tensor.shape[1], tensor.shape[3]))
            for role, tensor in (("k", layer.keys), ("v", layer.values))
        )

    def capacity(self, layer: Any) -> int:
        return int(layer.keys.shape[-2]) if _is_filled(layer) else 0


class _DynamicFull(_KeyValueLayer):
    kind, law = "full", "linear"

    def position(self, layer: Any) -> int:
        return int(layer.get_seq_length())

    def export(self, layer: Any) -> LayerRows:
        return _rows(layer, first=0, at=0, count=self.position(layer))

    def restore(self, layer: Any, geometry: LayerGeometry, position: int, device: Any) -> LayerRows:
        if position:
            layer.lazy_initialization(*_no_rows(geometry, device))
            layer.keys, layer.values = (_zeros(plane, position, device) for plane in geometry.planes)
        return _rows(layer, first=0, at=0, count=position)


class _DynamicSliding(_KeyValueLayer):
    kind, law = "sliding", "chronological"

    def position(self, layer: Any) -> int:
        return int(layer.cumulative_length)

    def export(self, layer: Any) -> LayerRows:
        count = self.capacity(layer)
        return _rows(layer, first=self.position(layer) - count, at=0, count=count)

    def restore(self, layer: Any, geometry: LayerGeometry, position: int, device: Any) -> LayerRows:
        held = min(position, layer.sliding_window - 1)
        if position:
            layer.lazy_initialization(*_no_rows(geometry, device))
            # Past the window a step leaves a view without the oldest row of its concatenation of `window` rows.
            length = min(position, layer.sliding_window)
            layer.keys, layer.values = (
                _zeros(plane, length, device)[:, :, length - held :, :] for plane in geometry.planes
            )
            layer.cumulative_length = position
        return _rows(layer, first=position - held, at=0, count=held)


class _StaticFull(_KeyValueLayer):
    kind, law = "full", "linear"

    def position(self, layer: Any) -> int:
        return int(layer.cumulative_length)

    def capacity(self, layer: Any) -> int:
        return int(layer.max_cache_len)

    def export(self, layer: Any) -> LayerRows:
        return _rows(layer, first=0, at=0, count=self.position(layer))

    def restore(self, layer: Any, geometry: LayerGeometry, position: int, device: Any) -> LayerRows:
        if position:
            layer.lazy_initialization(*_no_rows(geometry, device))
            # In place: the counter's address is one that captured graphs replay from.
            layer.cumulative_length.fill_(position)
        return _rows(layer, first=0, at=0, count=position)


class _StaticSliding(_StaticFull):
    kind, law = "sliding", "chronological"

    def position(self, layer: Any) -> int:
        return int(layer.cumulative_length_int)

    def export(self, layer: Any) -> LayerRows:
        position = self.position(layer)
        count = min(position, self.capacity(layer))
        return _rows(layer, first=position - count, at=0, count=count)

    def restore(self, layer: Any, geometry: LayerGeometry, position: int, device: Any) -> LayerRows:
        capacity, window = self.capacity(layer), geometry.window or 0
        held = min(position, window - 1)
        if position:
            layer.lazy_initialization(*_no_rows(geometry, device))
            layer.cumulative_length_int = position
            # Appends below the window index by the tensor; a prefill that overruns the window leaves it at 0.
            layer.cumulative_length.fill_(position if position <= capacity else 0)
            if held < min(position, capacity):
                # The oldest slot stays empty: nothing reads it any more, unless a crop brought it back.
                layer._is_croppable = False
        return _rows(layer, first=position - held, at=min(position, capacity) - held, count=held)


def _is_filled(layer: Any) -> bool:
    return bool(layer.is_initialized) and layer.keys is not None and layer.keys.dim() == 4


def _rows(layer: Any, *, first: int, at: int, count: int) -> LayerRows:
    if not _is_filled(layer):
        return LayerRows(first, {})
    return LayerRows(first, {"k": layer.keys[0, :, at : at + count, :], "v": layer.values[0, :, at : at + count, :]})


def _shape(plane: PlaneGeometry, rows: int) -> tuple[int, int, int, int]:
    num_kv_heads, head_dim = plane.row_shape
    return 1, num_kv_heads, rows, head_dim


def _zeros(plane: PlaneGeometry, rows: int, device: Any) -> torch.Tensor:
    tensor: torch.Tensor = require_torch().zeros(
        _shape(plane, rows), dtype=torch_dtype(plane.encoding.name), device=device
    )
    return tensor


def _no_rows(geometry: LayerGeometry, device: Any) -> Sequence[torch.Tensor]:
    """Keys and values of zero tokens: what transformers' own ``early_initialization`` allocates a layer from."""
    return [_zeros(plane, 0, device) for plane in geometry.planes]


@cache
def _registry() -> Mapping[type, LayerAdapter]:
    require_transformers()
    from transformers import cache_utils

    return {
        cache_utils.DynamicLayer: _DynamicFull(),
        cache_utils.DynamicSlidingWindowLayer: _DynamicSliding(),
        cache_utils.StaticLayer: _StaticFull(),
        cache_utils.StaticSlidingWindowLayer: _StaticSliding(),
    }


def adapter_of(layer: Any, at: int) -> LayerAdapter:
    """The adapter of layer ``at``; EngineError ``unsupported-cache`` names a class that has none."""
    adapter = _registry().get(type(layer))
    if adapter is None:
        raise EngineError(
            "unsupported-cache",
            f"layer {at} is a {type(layer).__name__}, which kvpack cannot capture or install",
            layer=at,
            field="class",
            expected=", ".join(sorted(known.__name__ for known in _registry())),
            found=type(layer).__name__,
        )
    return adapter
