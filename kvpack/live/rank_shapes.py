"""What each rank of a tensor-parallel cache owns of a plane, and how whole rows divide over ranks and come together.

K and V divide by whole heads; where there are more ranks than heads, and only where it is declared, consecutive ranks
hold the same head. States divide along a declared axis, and latent planes, their indexers and per-tensor scales lie
whole on every rank. A division is a list of byte runs of one row, so one rule splits and merges every encoding; what it
never does is cut a head or a block.

Refusals (CompatibilityError): ``zero-ranks``, ``zero-width``, ``ranks-do-not-divide``, ``blocks-split``,
``head-split``, ``state-axis-undeclared`` and ``state-axis-unknown``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpack.errors import CompatibilityError
from kvpack.live.rebasing_ring import TAIL_PAD_BYTES
from kvpack.model.encoding import Encoding
from kvpack.model.geometry import Geometry, LayerGeometry, PlaneGeometry

__all__ = [
    "LENGTH_BYTES",
    "ByteRun",
    "PlaneShare",
    "RankPlan",
    "RankShape",
    "StateAxis",
    "layer_shares",
    "rank_geometry",
    "rank_shape",
]

LENGTH_BYTES: Final = 4  # one int32 a layer and rank: the length that the rank's kernels read


@dataclass(frozen=True)
class StateAxis:
    """The axis along which a state divides, by its name in the plane's ``axes``.

    ``sections`` are the lengths of parts that divide each by itself (the query, key and value channels of one
    convolution); a rank then holds its piece of every part, one behind the other. Empty: the axis is one part.
    """

    axis: str
    sections: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankPlan:
    """How a cache divides over ``ranks``.

    ``replicate_heads`` declares that ranks beyond the number of KV heads hold copies of them. ``state_axes`` gives the
    axis of each state by role (``ssm.1``) or base role (``ssm``); None for a state that every rank holds whole.
    """

    ranks: int
    replicate_heads: bool = False
    state_axes: Mapping[str, StateAxis | None] = field(default_factory=dict)


@dataclass(frozen=True)
class ByteRun:
    """``count`` bytes of one row: from ``whole`` on in the whole row, from ``local`` on in a rank's."""

    whole: int
    local: int
    count: int


@dataclass(frozen=True)
class PlaneShare:
    """One plane over its ranks: ``whole`` and ``local`` geometry, and the byte runs of each share of a row.

    ``replicas`` consecutive ranks hold one share; ``len(shares) * replicas`` is the number of ranks.
    """

    whole: PlaneGeometry
    local: PlaneGeometry
    replicas: int
    shares: tuple[tuple[ByteRun, ...], ...]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.shares) * self.replicas

    def runs(self, rank: int) -> tuple[ByteRun, ...]:
        """The byte runs of a rank's row."""
        return self.shares[rank // self.replicas]

    def split(self, rows: memoryview, rank: int) -> memoryview:
        """The part of whole rows (one behind the other; one whole state) that ``rank`` holds, copied."""
        source = _table(rows, self.whole.row_bytes)
        part = memoryview(bytearray(len(source) * self.local.row_bytes))
        target = _table(part, self.local.row_bytes)
        for run in self.runs(rank):
            target[:, run.local : run.local + run.count] = source[:, run.whole : run.whole + run.count]
        return part

    def merge(self, parts: Sequence[memoryview]) -> memoryview:
        """Whole rows out of every rank's; of replicas the first is taken (:meth:`differing_replica`)."""
        tables = [_table(part, self.local.row_bytes) for part in parts[:: self.replicas]]
        rows = memoryview(bytearray(len(tables[0]) * self.whole.row_bytes))
        target = _table(rows, self.whole.row_bytes)
        for table, runs in zip(tables, self.shares, strict=True):
            for run in runs:
                target[:, run.whole : run.whole + run.count] = table[:, run.local : run.local + run.count]
        return rows

    def differing_replica(self, parts: Sequence[memoryview]) -> int | None:
        """The first rank whose bytes differ from those of the rank that holds the same share, or None."""
        for rank, part in enumerate(parts):
            if part != parts[rank - rank % self.replicas]:
                return rank
        return None


def _table(rows: memoryview, row_bytes: int) -> NDArray[np.uint8]:
    flat = np.frombuffer(rows, np.uint8) if rows.nbytes else np.empty(0, np.uint8)
    return flat.reshape(-1, row_bytes)


@dataclass(frozen=True)
class RankShape:
    """What one rank allocates for the K and V planes of one layer: widths in elements, the rest in bytes.

    The bytes that do not depend on the context are two tail pads, one behind each plane (8 bytes: kernels load whole
    words past the last row), and one int32 with the layer's length.
    """

    k_width: int
    v_width: int
    k_token_bytes: int
    v_token_bytes: int
    fixed_bytes: int = 2 * TAIL_PAD_BYTES + LENGTH_BYTES

    @property
    def bytes_per_token(self) -> int:
        """K and V bytes of one token on one rank."""
        return self.k_token_bytes + self.v_token_bytes

    def allocation_bytes(self, capacity: int) -> int:
        """Bytes of planes of ``capacity`` rows, pads and length included."""
        return self.bytes_per_token * capacity + self.fixed_bytes


def rank_shape(layer: LayerGeometry, plan: RankPlan, *, number: int | None = None) -> RankShape:
    """The K and V planes of ``layer`` (numbered ``number`` in errors) on one rank. Raises as :func:`layer_shares`."""
    shares = layer_shares(layer, plan, number=number)
    k, v = shares["k"].local, shares["v"].local
    return RankShape(k.row_elements, v.row_elements, k.row_bytes, v.row_bytes)


def layer_shares(layer: LayerGeometry, plan: RankPlan, *, number: int | None = None) -> dict[str, PlaneShare]:
    """The division of every plane of a layer, by role, checked whole. Raises the refusals of this module."""
    if plan.ranks < 1:
        raise _refused("zero-ranks", "a cache lies on at least one rank", number, None, "1 or more", plan.ranks)
    return {plane.role: _share(layer, plane, plan, number) for plane in layer.planes}


def rank_geometry(geometry: Geometry, plan: RankPlan) -> Geometry:
    """The geometry of one rank: what its kernels see, and what sizing needs. Raises as :func:`layer_shares`."""

    def local(layers: Sequence[LayerGeometry]) -> tuple[LayerGeometry, ...]:
        return tuple(
            replace(layer, planes=tuple(s.local for s in layer_shares(layer, plan, number=number).values()))
            for number, layer in enumerate(layers)
        )

    return replace(geometry, layers=local(geometry.layers), draft_layers=local(geometry.draft_layers))


def _share(layer: LayerGeometry, plane: PlaneGeometry, plan: RankPlan, number: int | None) -> PlaneShare:
    if min(plane.row_shape, default=1) < 1:
        raise _refused("zero-width", f"plane {plane.role} has no elements", number, plane, "1 or more", plane.row_shape)
    if plan.ranks == 1:
        return _replicated(plane, 1)
    if plane.base_role in ("k", "v"):
        return _head_share(plane, plan, number)
    if plane.base_role in ("conv", "ssm"):
        return _state_share(plane, plan, number)
    if plane.base_role == "scale":
        of = next((p for p in layer.planes if p.role == plane.role.partition(".")[2]), None)
        if of is not None and of.base_role in ("k", "v") and plane.row_shape[:1] == (_heads(of),):
            return _head_share(plane, plan, number, _heads(of))
    return _replicated(plane, plan.ranks)


def _replicated(plane: PlaneGeometry, ranks: int) -> PlaneShare:
    return PlaneShare(plane, plane, ranks, ((ByteRun(0, 0, plane.row_bytes),),))


def _heads(plane: PlaneGeometry) -> int:
    return plane.row_shape[0] if len(plane.row_shape) > 1 else 1


def _head_share(plane: PlaneGeometry, plan: RankPlan, number: int | None, heads: int | None = None) -> PlaneShare:
    """Whole heads; the width is held to the ranks and to the blocks before the heads are, since it can fail alone."""
    heads = heads or _heads(plane)
    ranks, width = plan.ranks, plane.row_elements
    if plan.replicate_heads and ranks > heads:
        if ranks % heads:
            raise _refused(
                "ranks-do-not-divide",
                f"{heads} heads are not held by {ranks} ranks in equal numbers",
                number,
                plane,
                f"a multiple of {heads} ranks",
                ranks,
            )
        if heads == 1:
            return _replicated(plane, ranks)
        return _divided(plane, 0, (), heads, ranks // heads, number)
    if width % ranks:
        raise _refused(
            "ranks-do-not-divide",
            f"{width} elements of plane {plane.role} do not divide over {ranks} ranks",
            number,
            plane,
            f"a divisor of {width}",
            ranks,
        )
    _require_blocks(plane, width // ranks, number)
    if heads % ranks:
        raise _refused(
            "head-split",
            f"{heads} heads of plane {plane.role} do not lie whole on {ranks} ranks",
            number,
            plane,
            f"a divisor of {heads} heads",
            ranks,
            hint="declare replicate_heads" if ranks > heads else None,
        )
    return _divided(plane, 0, (), ranks, 1, number)


def _state_share(plane: PlaneGeometry, plan: RankPlan, number: int | None) -> PlaneShare:
    declared = plane.role if plane.role in plan.state_axes else plane.base_role
    if declared not in plan.state_axes:
        raise _refused(
            "state-axis-undeclared",
            f"along which axis plane {plane.role} divides over {plan.ranks} ranks is not declared",
            number,
            plane,
            f"one of {', '.join(plane.axes) or 'no axes'}",
            "none",
        )
    axis = plan.state_axes[declared]
    if axis is None:
        return _replicated(plane, plan.ranks)
    if axis.axis not in plane.axes:
        raise _refused(
            "state-axis-unknown",
            f"plane {plane.role} has no axis {axis.axis}",
            number,
            plane,
            f"one of {', '.join(plane.axes) or 'no axes'}",
            axis.axis,
        )
    at = plane.axes.index(axis.axis)
    if axis.sections and sum(axis.sections) != plane.row_shape[at]:
        raise _refused(
            "state-axis-unknown",
            f"the sections of axis {axis.axis} of plane {plane.role} are not the axis",
            number,
            plane,
            plane.row_shape[at],
            sum(axis.sections),
        )
    return _divided(plane, at, axis.sections, plan.ranks, 1, number)


def _divided(
    plane: PlaneGeometry,
    axis: int,
    sections: tuple[int, ...],
    shares: int,
    replicas: int,
    number: int | None,
) -> PlaneShare:
    """Every section of an axis cut into ``shares`` equal pieces."""
    length = plane.row_shape[axis]
    parts = sections or (length,)
    for part in parts:
        if part % shares:
            raise _refused(
                "ranks-do-not-divide",
                f"{part} elements of an axis of plane {plane.role} do not divide over {shares} ranks",
                number,
                plane,
                f"a divisor of {part}",
                shares,
            )
        if axis == len(plane.row_shape) - 1:
            _require_blocks(plane, part // shares, number)
    shape = plane.row_shape
    outer = prod(shape[:axis])
    local = replace(plane, row_shape=(*shape[:axis], length // shares, *shape[axis + 1 :]))
    whole_bytes, local_bytes = plane.row_bytes // outer, local.row_bytes // outer

    def runs(share: int) -> tuple[ByteRun, ...]:
        found = []
        for block in range(outer):
            start, at = 0, block * local_bytes
            for part in parts:
                first = start + part // shares * share
                count = part // shares * whole_bytes // length
                found.append(ByteRun(block * whole_bytes + first * whole_bytes // length, at, count))
                start, at = start + part, at + count
        return tuple(found)

    return PlaneShare(plane, local, replicas, tuple(runs(share) for share in range(shares)))


def _require_blocks(plane: PlaneGeometry, elements: int, number: int | None) -> None:
    if isinstance(plane.encoding, Encoding) and elements % plane.encoding.block_elements:
        raise _refused(
            "blocks-split",
            f"{elements} elements of plane {plane.role} a rank are not whole blocks of {plane.encoding.name}",
            number,
            plane,
            f"a multiple of {plane.encoding.block_elements}",
            elements,
        )


def _refused(
    code: str,
    message: str,
    number: int | None,
    plane: PlaneGeometry | None,
    expected: object,
    found: object,
    hint: str | None = None,
) -> CompatibilityError:
    where = f"layer {number}: " if number is not None else ""
    role = plane.role if plane is not None else None
    return CompatibilityError(
        code,
        f"{where}{message}; expected {expected}, found {found}",
        layer=number,
        plane=role if number is None or role is None else f"layer.{number}.{role}",
        field="ranks",
        expected=expected,
        found=found,
        hint=hint,
    )
