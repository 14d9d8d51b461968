"""How a producer placed its rows: recorded beside a cut, and compared with nothing except the law ``history``.

Source of the rules: spec/kvpack-v1.md, section 7.5. A placement law belongs to a live cache, not to the geometry: a
cut of a rotating ring installs into a paged cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvpack.model.geometry import Geometry
from kvpack.model.wire import WireMap, bad_manifest

__all__ = ["KNOWN_LAWS", "LayerLayout", "ProducerLayout"]

KNOWN_LAWS: Final = (
    "linear",
    "modulo",
    "pinned",
    "chronological",
    "rebase",
    "pool",
    "paged",
    "history",
    "none",
)


@dataclass(frozen=True)
class LayerLayout:
    """How the producer placed one layer's rows: recorded, and compared with nothing except the law ``history``."""

    law: str
    capacity: int
    order: str = "NHD"
    page_size: int | None = None

    def to_wire(self) -> dict[str, object]:
        """The layout as the manifest holds it."""
        wire: dict[str, object] = {"capacity": self.capacity, "law": self.law, "order": self.order}
        if self.page_size is not None:
            wire["page_size"] = self.page_size
        return wire

    @classmethod
    def from_wire(cls, wire: WireMap) -> LayerLayout:
        """Read one layout; an unknown law is kept (the gate refuses it)."""
        layout = cls(
            law=wire.name("law"),
            capacity=wire.uint("capacity"),
            order=wire.string("order"),
            page_size=wire.opt_uint("page_size", least=1),
        )
        if layout.order not in ("NHD", "HND"):
            raise bad_manifest(wire.path("order"), "is not an order", expected="NHD, HND", found=layout.order)
        if (layout.page_size is not None) != (layout.law == "paged"):
            raise bad_manifest(wire.path("page_size"), "is present exactly for the law paged")
        wire.done()
        return layout


@dataclass(frozen=True)
class ProducerLayout:
    """The producer's layout, one entry a layer of the geometry. Round trip: ``from_wire(to_wire(x)) == x``."""

    layers: tuple[LayerLayout, ...]
    draft_layers: tuple[LayerLayout, ...] = ()

    def to_wire(self) -> dict[str, object]:
        """The layout as the manifest holds it."""
        wire: dict[str, object] = {"layers": [layer.to_wire() for layer in self.layers]}
        if self.draft_layers:
            wire["draft_layers"] = [layer.to_wire() for layer in self.draft_layers]
        return wire

    @classmethod
    def from_wire(cls, wire: WireMap, geometry: Geometry) -> ProducerLayout:
        """Read the layouts and hold their number to the geometry's."""
        layout = cls(
            layers=tuple(LayerLayout.from_wire(layer) for layer in wire.maps("layers")),
            draft_layers=(
                tuple(LayerLayout.from_wire(layer) for layer in wire.maps("draft_layers"))
                if wire.has("draft_layers")
                else ()
            ),
        )
        if len(layout.layers) != len(geometry.layers):
            raise bad_manifest(
                wire.path("layers"),
                "needs one entry a layer",
                expected=len(geometry.layers),
                found=len(layout.layers),
            )
        if len(layout.draft_layers) != len(geometry.draft_layers):
            raise bad_manifest(
                wire.path("draft_layers"),
                "needs one entry a draft layer",
                expected=len(geometry.draft_layers),
                found=len(layout.draft_layers),
            )
        wire.done()
        return layout
