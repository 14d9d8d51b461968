"""One layer over several ranks: a live layer whose rows are divided when they come in and merged when they go out.

Every rank has planes of its own (:class:`~kvpack.live.layers.LiveLayer` of the rank's geometry); the placement is one,
so ranks cannot disagree about where a row is. Towards captures and installs the layer is as whole as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from kvpack.device.protocol import Buffer, Device, RowStrides
from kvpack.errors import InstallError
from kvpack.live.layers import LayerAppend, LayerState, LiveLayer, LivePlane, empty_state
from kvpack.live.placement import AppendPlan, Placement
from kvpack.live.rank_shapes import LENGTH_BYTES, PlaneShare, RankPlan, layer_shares
from kvpack.live.rebasing_ring import RebasingRing, transaction_retain
from kvpack.live.sizing import plane_size
from kvpack.model.geometry import LayerGeometry, PlaneKey, Unit
from kvpack.model.layout import LayerLayout
from kvpack.model.planes import PlaneSpec

__all__ = ["RankedBuffer", "RankedLayer"]


@dataclass(frozen=True)
class RankedBuffer:
    """A plane that lies in pieces on its ranks: ``nbytes`` is what it would take whole, and no device reads it."""

    nbytes: int


@dataclass
class RankedLayer(LiveLayer):
    """A layer of a :class:`~kvpack.live.tensor_parallel.RankedCache`.

    ``members`` are its ranks. ``base_length`` is where the open transaction began, None outside of one. ``lengths``
    are one int32 a rank, the length that the rank's kernels read.
    """

    members: tuple[LiveLayer, ...] = ()
    lengths: tuple[Buffer, ...] = ()
    shares: Mapping[str, PlaneShare] = field(default_factory=dict)
    base_length: int | None = None

    on_one_device = False

    @classmethod
    def over_ranks(
        cls,
        scope: str,
        number: int,
        geometry: LayerGeometry,
        layout: LayerLayout,
        device: Device,
        max_context: int,
        *,
        plan: RankPlan,
        devices: Callable[[int], Device],
        index_rows: int | None = None,
    ) -> RankedLayer:
        """Zeroed planes on every rank, an empty placement. ``device`` is rank 0's; ``devices`` gives every rank's."""
        shares = layer_shares(geometry, plan, number=number)
        local = replace(geometry, planes=tuple(share.local for share in shares.values()))
        members = tuple(
            LiveLayer.allocate(
                scope, number, local, layout, devices(rank), max_context, index_rows=index_rows, tail_pad=True
            )
            for rank in range(plan.ranks)
        )
        state = empty_state(geometry, layout, max_context, index_rows)
        rows = state.placement is not None
        layer = cls(
            scope,
            number,
            geometry,
            layout,
            device,
            state,
            members=members,
            lengths=tuple(member.device.allocate(LENGTH_BYTES) for member in members if rows),
            shares=shares,
        )
        for plane in geometry.planes:
            key = PlaneKey(scope, number, plane.role)
            spec = PlaneSpec(key, plane.encoding, plane.row_shape, plane.row_bytes, plane.unit, plane.rows)
            size = plane_size(geometry, spec, layout, max_context, index_rows)
            strides = RowStrides(1, spec.row_bytes, spec.row_bytes, 0)
            layer.planes[plane.role] = LivePlane(spec, RankedBuffer(size.rows * size.row_bytes), strides)
        return layer

    def ranks(self) -> Iterator[tuple[int, LiveLayer]]:
        """Every rank's number and layer, at the state of this one."""
        for rank, member in enumerate(self.members):
            member.state = self.state
            yield rank, member

    def rank_bytes(self, rank: int) -> int:
        """What the layer takes on one rank, pads and length included."""
        planes = sum(plane.buffer.nbytes for plane in self.members[rank].planes.values())
        return planes + (self.lengths[rank].nbytes if self.lengths else 0)

    def publish_length(self) -> None:
        """Write the layer's length to every rank, after everything else."""
        for member, buffer in zip(self.members, self.lengths, strict=False):
            member.device.write(buffer, 0, memoryview(self.position.to_bytes(LENGTH_BYTES, "little")))

    def read_rows(self, plane: LivePlane, first: int, end: int) -> memoryview:
        """Rows of all heads, in canonical order; for states bytes ``[first, end)``.

        Raises InstallError ``replicas-differ`` where two ranks that hold the same rows hold different bytes.
        """
        role = plane.spec.key.role
        share = self.shares[role]
        is_state = plane.spec.unit is Unit.STATE
        a, b = (0, share.local.row_bytes) if is_state else (first, end)
        parts = [member.read_rows(member.planes[role], a, b) for _, member in self.ranks()]
        rank = share.differing_replica(parts)
        if rank is not None:
            raise InstallError(
                "replicas-differ",
                f"{plane.spec.key}: rank {rank} holds other bytes than rank {rank - rank % share.replicas}, "
                f"of which it should be a copy",
                layer=self.number,
                plane=str(plane.spec.key),
                field="rank",
                expected=f"the bytes of rank {rank - rank % share.replicas}",
                found=f"other bytes on rank {rank}",
            )
        rows = share.merge(parts)
        return rows[first:end] if is_state else rows

    def write_rows(self, plane: LivePlane, first: int, rows: memoryview, state: LayerState) -> None:
        """Rows of all heads from ``first`` on, each rank its part; for states bytes."""
        role = plane.spec.key.role
        share = self.shares[role]
        for rank, member in self.ranks():
            local = member.planes[role]
            if plane.spec.unit is Unit.STATE:
                self._write_state(share, rank, local.buffer, first, rows)
            else:
                member.write_rows(local, first, share.split(rows, rank), state)

    def _write_state(self, share: PlaneShare, rank: int, buffer: Buffer, first: int, content: memoryview) -> None:
        end = first + content.nbytes
        for run in share.runs(rank):
            low, high = max(first, run.whole), min(end, run.whole + run.count)
            if low < high:
                piece = content[low - first : high - first]
                self.members[rank].device.write(buffer, run.local + low - run.whole, piece)

    def plan_rows(self, start: int, count: int) -> AppendPlan[Placement] | None:
        """As in any layer, except that a rebase inside a transaction keeps what a rollback to its base needs."""
        placement = self.state.placement
        if isinstance(placement, RebasingRing) and self.base_length is not None:
            retain = transaction_retain(
                start + count, self.base_length, placement.window, alignment=placement.alignment
            )
            return placement.append(start, count, retain=retain, layer=self.number)
        return super().plan_rows(start, count)

    def execute(self, plan: LayerAppend, rows: Mapping[PlaneKey, memoryview]) -> None:
        """Move and write on every rank; the caller publishes ``plan.after``."""
        mine = {plane.spec.key: rows[plane.spec.key] for plane in self.planes.values() if plane.spec.key in rows}
        for rank, member in self.ranks():
            member.execute(plan, {key: self.shares[key.role].split(whole, rank) for key, whole in mine.items()})

    def rebase(self, plan: LayerAppend) -> None:
        """Do the move of a planned append on every rank and publish the ring's new base; no row is new."""
        placement, rows = self.state.placement, plan.rows
        if not isinstance(placement, RebasingRing) or rows is None or not isinstance(rows.after, RebasingRing):
            return
        if rows.after.base == placement.base:
            return
        for _, member in self.ranks():
            for plane in member.token_planes():
                for move in rows.moves:
                    member.shift(plane, move.source, move.destination, move.count)
        self.state = replace(self.state, placement=replace(placement, base=rows.after.base))

    def synchronise(self) -> None:
        """Wait on every rank until every byte is where it was sent."""
        for member in self.members:
            member.synchronise()

    def clear(self) -> None:
        """Zero every byte on every rank; the addresses stay."""
        for _, member in self.ranks():
            member.clear()

    def copy_from(self, other: LiveLayer) -> None:
        """Take over every byte of ``other``, rank by rank."""
        assert isinstance(other, RankedLayer)
        for member, source in zip(self.members, other.members, strict=True):
            member.copy_from(source)
