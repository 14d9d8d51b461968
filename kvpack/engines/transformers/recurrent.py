"""Recurrent layers of transformers' caches, alone or beside attention: states of a fixed shape, no count of tokens.

A state is carried as the library holds it, without the batch axis: a conv state is ``[channel, tap]``, with as many
taps as the library keeps; a recurrent one has the axes of the library's tensor, in its order. Each has its own element
type: in a bf16 model the recurrent state is f32 and the conv state bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from kvpack.engines.transformers.attention import plane_of, zeros
from kvpack.engines.transformers.layers import HeldState, LayerAdapter, LayerRole, unsupported_layer
from kvpack.model.geometry import LayerGeometry, PlaneGeometry, Unit

if TYPE_CHECKING:
    import torch

__all__ = ["RECURRENT", "hybrid"]

# What a recurrent state's axes are differs from family to family; the names say only which is which.
_AXES: Final = {
    ("conv", 2): ("channel", "tap"),
    ("ssm", 2): ("channel", "state"),
    ("ssm", 3): ("head", "row", "column"),
}


class _Recurrent:
    """``LinearAttentionLayer``: one or several pairs of a conv and a recurrent state, either of which may miss."""

    law = "none"

    def described_after(self, layer: Any) -> int:
        return 1

    def position(self, layer: Any) -> int | None:
        # The layer does not count: whatever it holds stands at the position of the session.
        return None if self.is_filled(layer) else 0

    def is_filled(self, layer: Any) -> bool:
        return any(
            layer.has_previous_state[at] or (bare and not layer.is_conv_states_initialized[at])
            for at, bare in layer.is_recurrent_states_initialized.items()
        )

    def batch(self, layer: Any) -> int:
        return max((int(state.shape[0]) for _, state in _states(layer)), default=1)

    def capacity(self, layer: Any) -> int:
        return 0

    def geometry(self, layer: Any, role: LayerRole) -> LayerGeometry:
        return LayerGeometry("recurrent", self.planes(layer, role))

    def planes(self, layer: Any, role: LayerRole) -> tuple[PlaneGeometry, ...]:
        """The planes of the states: every conv, then every ssm."""
        found = []
        for name, state in _states(layer):
            if not state.is_contiguous():
                raise unsupported_layer(
                    role,
                    layer,
                    f"holds a {name} state in another order than row-major",
                    field=name,
                    found=state.stride(),
                )
            base = name.partition(".")[0]
            axes = _AXES.get((base, state.dim() - 1), tuple(f"axis_{at}" for at in range(state.dim() - 1)))
            found.append(replace(plane_of(name, state, tuple(state.shape[1:]), Unit.STATE), axes=axes))
        for at, kernel in layer.conv_kernel_size.items():
            conv = layer.conv_states[at]
            if conv is not None and (int(conv.shape[-1]) != kernel or not layer.has_previous_state[at]):
                raise unsupported_layer(
                    role, layer, "records its past beside its state", field="record_past", found=tuple(conv.shape)
                )
        return tuple(found)

    def export(self, layer: Any, geometry: LayerGeometry) -> HeldState:
        return HeldState(states={name: state[0] for name, state in _states(layer)} if self.is_filled(layer) else {})

    def restore(self, layer: Any, geometry: LayerGeometry, position: int, device: Any) -> HeldState:
        if position:
            for plane in geometry.planes:
                name, _, at = plane.role.partition(".")
                state = zeros(plane, (1, *plane.row_shape), device)
                if name == "conv":
                    layer.lazy_initialization(conv_states=state, state_idx=int(at or 0))
                    layer.has_previous_state[int(at or 0)] = True
                elif name == "ssm":
                    layer.lazy_initialization(recurrent_states=state, state_idx=int(at or 0))
        return self.export(layer, geometry)


class _Hybrid:
    """A layer that keeps rows of attention and recurrent states: both in one layer of the geometry."""

    def __init__(self, attention: LayerAdapter) -> None:
        self._attention = attention
        self._recurrent = _Recurrent()
        self.law = attention.law

    def described_after(self, layer: Any) -> int:
        return 1

    def position(self, layer: Any) -> int | None:
        # A layer whose states have seen nothing stands at 0, whatever its rows say: the two never part in the library.
        return self._attention.position(layer) if self._recurrent.is_filled(layer) else 0

    def is_filled(self, layer: Any) -> bool:
        return self._attention.is_filled(layer) or self._recurrent.is_filled(layer)

    def batch(self, layer: Any) -> int:
        return max(self._attention.batch(layer), self._recurrent.batch(layer))

    def capacity(self, layer: Any) -> int:
        return self._attention.capacity(layer)

    def geometry(self, layer: Any, role: LayerRole) -> LayerGeometry:
        rows = self._attention.geometry(layer, role)
        if rows.kind not in ("full", "sliding"):
            raise unsupported_layer(role, layer, "keeps states beside latent rows", field="kind", found=rows.kind)
        return replace(rows, kind="hybrid", planes=(*rows.planes, *self._recurrent.planes(layer, role)))

    def export(self, layer: Any, geometry: LayerGeometry) -> HeldState:
        rows = self._attention.export(layer, geometry).rows
        return HeldState(rows, self._recurrent.export(layer, geometry).states)

    def restore(self, layer: Any, geometry: LayerGeometry, position: int, device: Any) -> HeldState:
        # The library's own order: the first update of such a layer is its recurrent part's.
        states = self._recurrent.restore(layer, geometry, position, device).states
        return HeldState(self._attention.restore(layer, geometry, position, device).rows, states)


def hybrid(attention: LayerAdapter) -> LayerAdapter:
    """The adapter of a class that is both this attention layer and a recurrent one."""
    return _Hybrid(attention)


def _states(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every state that the layer has, with its role; the number is left out where there is only one."""
    for base, states in (("conv", layer.conv_states), ("ssm", layer.recurrent_states)):
        for at, state in states.items():
            if state is not None:
                yield (base if layer.number_of_states == 1 else f"{base}.{at}"), state


RECURRENT: Final[LayerAdapter] = _Recurrent()
