"""What kvpack does with a cache layer of transformers: the contract of an adapter, and what passes through it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kvpack.errors import EngineError
from kvpack.model.geometry import LayerGeometry

if TYPE_CHECKING:
    import torch

__all__ = ["HeldRows", "HeldState", "LayerAdapter", "LayerRole", "unsupported_layer"]


@dataclass(frozen=True)
class LayerRole:
    """What the model's config says about cache layer ``number``.

    ``latent`` is (kv_rank, rope_dim) in a model with latent attention; ``source`` is the layer whose cache this one
    reads. LongCat has two cache layers a layer of the model: numbers count cache layers.
    """

    number: int
    layer_type: str
    window: int | None = None
    latent: tuple[int, int] | None = None
    source: int | None = None


@dataclass(frozen=True)
class HeldRows:
    """Rows ``[first, end)`` of one plane, as views of the layer's own memory.

    A row is the concatenation of its ``parts``, each ``[heads, n, width]``: K and V have one, latent rows two.
    """

    first: int
    parts: tuple[torch.Tensor, ...]

    @property
    def end(self) -> int:
        """Behind the last row that every part has."""
        return self.first + min(int(part.shape[1]) for part in self.parts)


@dataclass(frozen=True)
class HeldState:
    """What a layer holds: rows by role, and states by role (contiguous tensors without the batch axis).

    A role is missing where the layer holds nothing of it yet.
    """

    rows: Mapping[str, HeldRows] = field(default_factory=dict)
    states: Mapping[str, torch.Tensor] = field(default_factory=dict)


class LayerAdapter(Protocol):
    """Everything that kvpack does with one class of cache layer. ``law`` is the layout's."""

    law: str

    def described_after(self, layer: Any) -> int:
        """The number of tokens after which a fresh layer shows the shape of everything that it will ever hold."""

    def position(self, layer: Any) -> int | None:
        """The number of tokens that the layer has seen; None for a layer that does not count them."""

    def is_filled(self, layer: Any) -> bool:
        """Whether the layer holds state of at least one token."""

    def batch(self, layer: Any) -> int:
        """The number of sequences in the layer; 1 where it holds nothing."""

    def capacity(self, layer: Any) -> int:
        """Rows that the layer has memory for; 0 for a layer without rows."""

    def geometry(self, layer: Any, role: LayerRole) -> LayerGeometry:
        """The geometry, without its rope, of a layer that has seen enough tokens."""

    def export(self, layer: Any, geometry: LayerGeometry) -> HeldState:
        """What the layer holds now."""

    def restore(self, layer: Any, geometry: LayerGeometry, position: int, device: Any) -> HeldState:
        """Make a fresh layer look as transformers leaves it after ``position`` tokens; returns what is to be written.

        What the layer does not hold yet after so few tokens is missing from it.
        """


def unsupported_layer(role: LayerRole, layer: Any, reason: str, *, field: str, found: object) -> EngineError:
    """The refusal of a layer whose class is known and whose contents are not."""
    return EngineError(
        "unsupported-cache",
        f"layer {role.number} ({type(layer).__name__}) {reason}",
        layer=role.number,
        field=field,
        found=found,
    )
