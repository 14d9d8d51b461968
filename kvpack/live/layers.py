"""One live layer: its planes on a device, its placement, and the checked plans by which rows enter and leave.

A layer's token planes share one placement, so K and V can never disagree. An indexer's tail ring, its pool keys and
recurrent states keep their own counters, which every check compares with the layer's position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from kvpack.device.protocol import Buffer, Device, Move, RowStrides
from kvpack.errors import CompatibilityError, InstallError
from kvpack.live.growing import Linear, Paged
from kvpack.live.placement import AppendPlan, Placement, Span, refused
from kvpack.live.plane_layout import PlaneLayout
from kvpack.live.pool_ring import DrainStep, PoolRing, pool_ring_rows
from kvpack.live.rebasing_ring import RebasingRing, rows_for
from kvpack.live.rings import Chronological, PinnedRing, RotatingRing
from kvpack.live.sizing import plane_parts, plane_size
from kvpack.model.geometry import LayerGeometry, PlaneKey, Unit
from kvpack.model.layout import LayerLayout
from kvpack.model.planes import TAIL_ROLES, PlaneSpec
from kvpack.model.ranges import RowSet

__all__ = ["LayerAppend", "LayerState", "LiveLayer", "LivePlane", "empty_state", "new_placement"]


@dataclass(frozen=True)
class LivePlane:
    """A plane's memory and how rows lie in it."""

    spec: PlaneSpec
    buffer: Buffer
    strides: RowStrides

    def move(self, span: Span, packed_offset: int) -> Move:
        """The move of one span."""
        return Move(self.buffer, self.strides, ((span.physical, span.count),), packed_offset)


@dataclass(frozen=True)
class LayerState:
    """Where a layer stands: everything about it that is not bytes. Frozen, so that a failed plan changes nothing.

    ``placement`` is None where no plane has a token axis; ``stamp`` is then the position at which the states stand.
    """

    placement: Placement | None
    pool: PoolRing | None
    stamp: int = 0

    @property
    def position(self) -> int:
        """Tokens whose state the layer holds."""
        return self.placement.position if self.placement is not None else self.stamp


@dataclass(frozen=True)
class LayerAppend:
    """A checked append to one layer: what its placement and its pool ring do, and the state afterwards."""

    start: int
    rows: AppendPlan[Placement] | None
    pool_steps: tuple[DrainStep, ...]
    first_key: int
    end_key: int
    after: LayerState


def new_placement(layer: LayerGeometry, layout: LayerLayout, max_context: int) -> Placement | None:
    """An empty placement of ``layout``'s law; None for a layer without token planes.

    Raises CompatibilityError ``bad-layout`` for a law that the kind cannot have, ``unknown-law`` for an unknown one.
    """
    if layer.kind not in ("full", "sliding", "latent", "hybrid", "compressed"):
        return None
    capacity, window = layout.capacity, layer.window
    if layout.law == "linear":
        return Linear(capacity, window=window, sink=layer.sink or 0)
    if layout.law == "paged" and layout.page_size is not None:
        pages = capacity // layout.page_size
        return Paged(tuple(range(pages)), layout.page_size, pages, window=window, sink=layer.sink or 0)
    if window is None:
        if layout.law in ("modulo", "pinned", "chronological", "rebase"):
            raise CompatibilityError(
                "bad-layout", f"a layer of the kind {layer.kind} cannot lie by the law {layout.law}", field="law"
            )
    elif layout.law == "modulo" and layer.sink is None:
        return RotatingRing(capacity, window)
    elif layout.law == "pinned":
        return PinnedRing(capacity, layer.sink or 0, window)
    elif layout.law == "chronological" and layer.sink is None:
        return Chronological(capacity, window)
    elif layout.law == "rebase" and layer.sink is None:
        return RebasingRing(rows_for(window, max_context), window)
    raise CompatibilityError(
        "unknown-law",
        f"a {layer.kind} layer{' with sinks' if layer.sink else ''} cannot be placed by the law {layout.law!r}",
        field="law",
        found=layout.law,
    )


def empty_state(geometry: LayerGeometry, layout: LayerLayout, max_context: int, index_rows: int | None) -> LayerState:
    """The state of a layer that holds nothing."""
    pool = None
    if geometry.pool is not None and any(plane.base_role in TAIL_ROLES for plane in geometry.planes):
        pool = PoolRing(pool_ring_rows(max_context, index_rows), geometry.pool, max_context)
    return LayerState(new_placement(geometry, layout, max_context), pool)


@dataclass
class LiveLayer:
    """One layer of a live cache on its device."""

    scope: str
    number: int
    geometry: LayerGeometry
    layout: LayerLayout
    device: Device
    state: LayerState
    planes: dict[str, LivePlane] = field(default_factory=dict)

    on_one_device: ClassVar[bool] = True
    """Whether the planes are memory of :attr:`device`, so that one gather may take rows of many layers."""

    @classmethod
    def allocate(
        cls,
        scope: str,
        number: int,
        geometry: LayerGeometry,
        layout: LayerLayout,
        device: Device,
        max_context: int,
        *,
        index_rows: int | None = None,
        tail_pad: bool = False,
    ) -> LiveLayer:
        """Zeroed planes of the sizes of :mod:`kvpack.live.sizing`, and an empty placement."""
        layer = cls(scope, number, geometry, layout, device, empty_state(geometry, layout, max_context, index_rows))
        for plane in geometry.planes:
            key = PlaneKey(scope, number, plane.role)
            spec = PlaneSpec(key, plane.encoding, plane.row_shape, plane.row_bytes, plane.unit, plane.rows)
            size = plane_size(geometry, spec, layout, max_context, index_rows, tail_pad=tail_pad)
            heads, head_bytes = plane_parts(spec)
            order = layout.order if spec.unit is Unit.TOKEN and heads > 1 else "NHD"
            shape = PlaneLayout(order, size.rows, heads, head_bytes)
            strides = RowStrides(heads, head_bytes, shape.row_stride, shape.head_stride)
            if order == "NHD":  # heads lie side by side: a row is one part, and a run of rows one copy
                strides = RowStrides(1, spec.row_bytes, spec.row_bytes, 0)
            layer.planes[plane.role] = LivePlane(spec, device.allocate(size.nbytes), strides)
        return layer

    @property
    def position(self) -> int:
        """Tokens whose state the layer holds; layers that own nothing follow the cache."""
        return self.state.position

    @property
    def has_rows(self) -> bool:
        """Whether a plane has a token axis."""
        return self.state.placement is not None

    def keys(self, unit: Unit | None = None) -> Iterator[LivePlane]:
        """The planes, of one unit if it is given."""
        return (p for p in self.planes.values() if unit is None or p.spec.unit is unit)

    def token_planes(self) -> Iterator[LivePlane]:
        """Planes that the layer's placement places: not the indexer's tail, which has a ring of its own."""
        return (p for p in self.keys(Unit.TOKEN) if not p.spec.is_tail)

    def fresh_state(self, max_context: int, index_rows: int | None) -> LayerState:
        """The state of this layer when it holds nothing."""
        return empty_state(self.geometry, self.layout, max_context, index_rows)

    def need(self, position: int, state: LayerState | None = None) -> dict[PlaneKey, RowSet]:
        """The rows that a restore at ``position`` requires, plane by plane, by the placements of ``state``."""
        return {p.spec.key: self._rows_of(p, position, state or self.state) for p in self.planes.values()}

    def stored(self, *, resident: bool) -> dict[PlaneKey, RowSet]:
        """The rows that a capture takes: the producer's contract, or with ``resident`` all that are there."""
        placement = self.state.placement
        found = self.need(self.position)
        if resident and placement is not None:
            found |= {plane.spec.key: placement.resident for plane in self.token_planes()}
        return found

    def _rows_of(self, plane: LivePlane, position: int, state: LayerState) -> RowSet:
        spec = plane.spec
        if spec.unit is Unit.STATE:
            return RowSet.of((0, spec.row_bytes))
        if spec.unit is Unit.FIXED:
            return RowSet.of((0, spec.rows or 0))
        if spec.unit is Unit.POOL:
            return RowSet.of((0, position // (self.geometry.pool or 1)))
        placement = self._placement_of(plane, state)
        return placement.need(position)

    @staticmethod
    def _placement_of(plane: LivePlane, state: LayerState) -> Placement:
        placement = state.pool if plane.spec.is_tail else state.placement
        if placement is None:
            raise InstallError("no-token-axis", f"{plane.spec.key} has no rows", plane=str(plane.spec.key))
        return placement

    def spans(self, plane: LivePlane, first: int, end: int, state: LayerState | None = None) -> tuple[Span, ...]:
        """Where rows ``[first, end)`` of a plane lie, by ``state`` (the layer's own by default)."""
        if plane.spec.unit in (Unit.STATE, Unit.FIXED, Unit.POOL):
            return (Span(first, first, end - first),) if end > first else ()
        return self._placement_of(plane, state or self.state).spans(first, end)

    def moves(
        self, plane: LivePlane, first: int, end: int, packed_offset: int = 0, state: LayerState | None = None
    ) -> list[Move]:
        """The moves of rows ``[first, end)`` between the plane and a packed buffer."""
        size = plane.spec.row_bytes
        return [
            plane.move(span, packed_offset + (span.logical - first) * size)
            for span in self.spans(plane, first, end, state)
        ]

    def moves_of_all(
        self, plane: LivePlane, rows: RowSet, packed_offset: int, state: LayerState | None = None
    ) -> list[Move]:
        """The moves of ``rows`` one behind the other, by ``state`` (its own by default); for states of bytes."""
        found: list[Move] = []
        for first, end in rows:
            if plane.spec.unit is Unit.STATE:
                strides = RowStrides(1, end - first, end - first, 0, first)
                found.append(Move(plane.buffer, strides, ((0, 1),), packed_offset))
            else:
                found += self.moves(plane, first, end, packed_offset, state)
            packed_offset += (end - first) * plane.spec.axis_bytes
        return found

    def read_rows(self, plane: LivePlane, first: int, end: int) -> memoryview:
        """Rows ``[first, end)`` in canonical order, copied; for states bytes ``[first, end)``."""
        packed = memoryview(bytearray((end - first) * plane.spec.axis_bytes))
        if plane.spec.unit is Unit.STATE:
            self.device.read(plane.buffer, first, packed)
        elif end > first:
            self.device.gather(self.moves(plane, first, end), packed)
        return packed

    def write_rows(self, plane: LivePlane, first: int, rows: memoryview, state: LayerState) -> None:
        """Rows from ``first`` on into the places that ``state`` gives them; for states bytes."""
        if plane.spec.unit is Unit.STATE:
            self.device.write(plane.buffer, first, rows)
            return
        count = rows.nbytes // plane.spec.row_bytes
        self.device.scatter(self.moves(plane, first, first + count, state=state), rows)

    def plan_append(self, start: int, count: int) -> LayerAppend:
        """A checked plan for ``count`` tokens; nothing changes, whatever it refuses."""
        state = self.state
        if self.position != start:
            raise refused(
                "discontinuity", "an append must start at the next position", self.number, self.position, start
            )
        rows = self.plan_rows(start, count)
        steps: tuple[DrainStep, ...] = ()
        pool = state.pool
        if pool is not None:
            steps = pool.drain(start, count, layer=self.number)
            pool = steps[-1].after
        every = self.geometry.pool or 0
        first_key, end_key = (start // every, (start + count) // every) if every else (0, 0)
        after = LayerState(rows.after if rows is not None else None, pool, start + count)
        return LayerAppend(start, rows, steps, first_key, end_key, after)

    def plan_rows(self, start: int, count: int) -> AppendPlan[Placement] | None:
        """What the placement does with ``count`` rows from ``start`` on; None where no plane has a token axis."""
        placement = self.state.placement
        return placement.append(start, count, layer=self.number) if placement is not None else None

    def synchronise(self) -> None:
        """Wait until every byte is where it was sent."""
        self.device.synchronise()

    def clear(self) -> None:
        """Zero every byte of every plane; the addresses stay."""
        for plane in self.planes.values():
            self.device.fill(plane.buffer, 0, plane.buffer.nbytes, 0)

    def copy_from(self, other: LiveLayer) -> None:
        """Take over every byte of ``other``, a layer of the same allocation."""
        for role, plane in self.planes.items():
            self.device.copy(other.planes[role].buffer, 0, plane.buffer, 0, plane.buffer.nbytes)

    def execute(self, plan: LayerAppend, rows: Mapping[PlaneKey, memoryview]) -> None:
        """Move and write by a plan; the caller publishes ``plan.after`` once every layer is done."""
        for plane in self.planes.values():
            spec = plane.spec
            given = rows.get(spec.key)
            if spec.unit is Unit.STATE and given is not None:
                self.device.write(plane.buffer, 0, given)
            elif spec.unit is Unit.POOL and given is not None and given.nbytes:
                self.write_rows(plane, plan.first_key, given, plan.after)
            elif spec.is_tail and given is not None:
                # A ring narrower than the call takes the rows step by step; later steps overwrite rows whose key is
                # final.
                for step in plan.pool_steps:
                    self._write(plane, step.append.writes, given, plan.start)
            elif spec.unit is Unit.TOKEN and plan.rows is not None and given is not None:
                for move in plan.rows.moves:
                    self.shift(plane, move.source, move.destination, move.count)
                self._write(plane, plan.rows.writes, given, plan.start)

    def _write(self, plane: LivePlane, writes: tuple[Span, ...], given: memoryview, start: int) -> None:
        size = plane.spec.row_bytes
        self.device.scatter([plane.move(span, (span.logical - start) * size) for span in writes], given)

    def shift(self, plane: LivePlane, source: int, destination: int, count: int) -> None:
        """Copy ``count`` physical rows of a plane, as if through a third place."""
        strides = plane.strides
        for part in range(strides.parts):
            base = strides.base + part * strides.part_stride
            self.device.copy(
                plane.buffer,
                base + source * strides.row_stride,
                plane.buffer,
                base + destination * strides.row_stride,
                count * strides.row_stride,
            )
