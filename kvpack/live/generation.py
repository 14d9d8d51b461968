"""What a live cache consists of at one moment: a generation, which can be swapped in whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvpack.errors import InstallError, UsageError
from kvpack.live.layers import LayerState, LiveLayer, LivePlane
from kvpack.live.placement import refused
from kvpack.model.geometry import PlaneKey, Scope, Unit
from kvpack.model.planes import PlaneSpec

__all__ = ["Extra", "Generation", "Line", "next_row", "rewound"]


@dataclass(frozen=True)
class Extra:
    """A session state beside the layers: the last logits row, drafter taps, sampler state."""

    spec: PlaneSpec
    content: bytes


@dataclass
class Generation:
    """One complete cache state that can be swapped in whole."""

    layers: list[LiveLayer]
    draft_layers: list[LiveLayer]
    tokens: list[int] = field(default_factory=list)
    extras: dict[str, Extra] = field(default_factory=dict)
    rope_delta: int = 0
    context_epoch: int = 0
    position: int = 0
    draft_position: int = 0

    def every_layer(self) -> Iterator[LiveLayer]:
        """Layers, then draft layers."""
        yield from self.layers
        yield from self.draft_layers

    def every_plane(self) -> Iterator[tuple[LiveLayer, LivePlane]]:
        """Every plane with its layer, in canonical order."""
        for layer in self.every_layer():
            for plane in layer.planes.values():
                yield layer, plane

    def layer_of(self, key: PlaneKey) -> LiveLayer:
        """The layer that owns a plane; UsageError ``no-such-plane``."""
        layers = self.draft_layers if key.scope == Scope.DRAFT.value else self.layers
        if (
            key.scope == Scope.SESSION.value
            or not 0 <= key.layer < len(layers)
            or key.role not in layers[key.layer].planes
        ):
            raise UsageError("no-such-plane", f"the cache has no plane {key}", found=str(key))
        return layers[key.layer]


@dataclass
class Line:
    """A stretch of a session's life that only appends and rewinds made: how far back its rewinds went, in tokens."""

    lowest: int = 0
    lowest_draft: int = 0


def next_row(layer: LiveLayer) -> int:
    """The physical row that the next appended row goes to; 0 for layers without rows."""
    placement = layer.state.placement
    if placement is None:
        return 0
    try:
        return placement.append(placement.position, 1).writes[0].physical
    except InstallError:
        return placement.capacity  # full: the next append is refused


def rewound(layer: LiveLayer, position: int) -> LayerState:
    """The state of ``layer`` at an earlier position; raises what :meth:`LiveCache.rewind` refuses."""
    state = layer.state
    if position > layer.position:
        raise refused(
            "forward-rewind", "a rewind does not go forward", layer.number, f"at most {layer.position}", position
        )
    if any(True for _ in layer.keys(Unit.STATE)) and position != layer.position:
        raise refused("state-has-no-past", "a recurrent state cannot go back", layer.number, layer.position, position)
    return LayerState(
        state.placement.rewind(position, layer=layer.number) if state.placement is not None else None,
        state.pool.rewind(position, layer=layer.number) if state.pool is not None else None,
        position,
    )
