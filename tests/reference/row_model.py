"""A cache that forgets nothing: every row in a list, and beside it which of them the live cache still has.

Written from the rules of the laws, without a placement: a layer is its rows, one watermark below which rows are lost,
and a function from a row to its slot. Rows are unique bytes, so that a stale or misplaced one is never equal by chance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field

from kvpack.model.geometry import Geometry, LayerGeometry, PlaneKey, Scope, Unit
from kvpack.model.layout import LayerLayout, ProducerLayout
from kvpack.model.planes import PlaneSpec, plane_specs
from kvpack.model.ranges import RowSet

ALIGNMENT, HEADROOM, MAX_CHUNK = 32, 512, 4096


class RowMaker:
    """Bytes that never repeat."""

    def __init__(self) -> None:
        self._made = 0

    def __call__(self, size: int) -> bytes:
        self._made += 1
        return hashlib.shake_128(self._made.to_bytes(8, "little")).digest(size)


def aligned(row: int) -> int:
    return max(0, row) // ALIGNMENT * ALIGNMENT


@dataclass
class LayerModel:
    """One layer: per plane the rows (or keys) ever appended, or the state; ``lost`` and ``tail_lost`` watermarks."""

    scope: str
    geometry: LayerGeometry
    layout: LayerLayout
    specs: dict[str, PlaneSpec]
    max_context: int
    index_rows: int
    rows: dict[str, list[bytes]] = field(default_factory=dict)
    states: dict[str, bytes] = field(default_factory=dict)
    position: int = 0
    lost: int = 0
    tail_lost: int = 0

    def __post_init__(self) -> None:
        for role, spec in self.specs.items():
            if spec.unit is Unit.STATE:
                self.states.setdefault(role, bytes(spec.row_bytes))
            else:
                self.rows.setdefault(role, [])

    def copy(self) -> LayerModel:
        other = copy(self)
        other.rows = {role: list(rows) for role, rows in self.rows.items()}
        other.states = dict(self.states)
        return other

    @property
    def window(self) -> int:
        return self.geometry.window or 0

    @property
    def sink(self) -> int:
        return self.geometry.sink or 0

    @property
    def pool(self) -> int:
        return self.geometry.pool or 1

    @property
    def effective(self) -> int:
        """Rows of the indexer's ring; 0 where its plane is flat."""
        return self.index_rows // self.pool * self.pool if 0 < self.index_rows < self.max_context else 0

    def is_tail(self, role: str) -> bool:
        return role.partition(".")[0] == "index_tail"

    # --- appends and rewinds -------------------------------------------------------------------------------------

    def make(self, count: int, make: Callable[[int], bytes]) -> dict[str, list[bytes]]:
        """What an append of ``count`` tokens brings, plane by plane."""
        end, found = self.position + count, {}
        for role, spec in self.specs.items():
            number = {Unit.STATE: 1, Unit.POOL: end // self.pool - self.position // self.pool}.get(spec.unit, count)
            found[role] = [make(spec.row_bytes) for _ in range(number)]
        return found

    def append(self, count: int, brought: dict[str, list[bytes]]) -> None:
        for role, rows in brought.items():
            if role in self.states:
                self.states[role] = rows[0]
            else:
                self.rows[role].extend(rows)
        start, self.position = self.position, self.position + count
        if self.layout.law in ("modulo", "chronological"):
            self.lost = max(self.lost, self.position - self.layout.capacity)
        elif self.layout.law == "pinned":
            self.lost = max(self.lost, self.position - (self.layout.capacity - self.sink))
        elif self.layout.law == "rebase" and self.position - self.lost > self.rebase_rows:
            self.lost = max(self.lost, aligned(start - (self.window - 1) - HEADROOM))
        if self.effective:
            self.tail_lost = max(self.tail_lost, self.position - self.effective)

    @property
    def rebase_rows(self) -> int:
        return min(self.max_context, self.window + MAX_CHUNK + HEADROOM + ALIGNMENT - 1)

    def can_rewind(self, position: int) -> bool:
        if position > self.position:
            return False
        if self.states and position != self.position:
            return False
        if self.layout.law == "chronological" and 0 < position < self.position > self.layout.capacity:
            return False
        if self.layout.law == "rebase" and aligned(position - (self.window - 1)) < self.lost:
            return False  # at position 0 as well, where other rings need no row
        return all(self.held(role).contains(rows) for role, rows in self.need(position).items() if role in self.rows)

    def rewind(self, position: int) -> None:
        for role, rows in self.rows.items():
            del rows[position // self.pool if self.specs[role].unit is Unit.POOL else position :]
        self.position = position
        self.lost = 0 if position <= self.sink else min(self.lost, position)
        self.tail_lost = min(self.tail_lost, position)

    def restore(self, source: LayerModel, position: int) -> None:
        """Take over the rows of ``source`` as far as a restore at ``position`` needs them; all others are lost."""
        self.rows = {role: list(rows) for role, rows in source.rows.items()}
        self.states = dict(source.states)
        self.position = source.position
        self.rewind(position)
        tail = next((rows for role, rows in self.need(position).items() if not self.is_tail(role)), RowSet())
        if self.has_rows:
            self.lost = max((first for first, _ in tail), default=position)
            if self.lost <= self.sink:
                self.lost = 0
        self.tail_lost = position // self.pool * self.pool if self.geometry.pool else 0

    @property
    def has_rows(self) -> bool:
        return self.geometry.kind in ("full", "sliding", "latent")

    # --- what is needed, what is there, where it lies ------------------------------------------------------------

    def need(self, position: int) -> dict[str, RowSet]:
        return {role: self._need(role, spec, position) for role, spec in self.specs.items()}

    def _need(self, role: str, spec: PlaneSpec, position: int) -> RowSet:
        if spec.unit is Unit.STATE:
            return RowSet.of((0, spec.row_bytes))
        if spec.unit is Unit.POOL:
            return RowSet.of((0, position // self.pool))
        if self.is_tail(role):
            return RowSet.of((position // self.pool * self.pool, position))
        if not self.window:
            return RowSet.of((0, position))
        if self.layout.law == "rebase":
            return RowSet.of((aligned(position - (self.window - 1)), position))
        reach = self.window if self.layout.law in ("modulo", "pinned") else self.window - 1
        return RowSet.of((0, min(position, self.sink)), (max(0, position - reach), position))

    def held(self, role: str) -> RowSet:
        spec = self.specs[role]
        if spec.unit is Unit.STATE:
            return RowSet.of((0, spec.row_bytes))
        if spec.unit is Unit.POOL:
            return RowSet.of((0, self.position // self.pool))
        if self.is_tail(role):
            return RowSet.of((self.tail_lost, self.position))
        return RowSet.of((0, min(self.position, self.sink)), (self.lost, self.position))

    def slot(self, role: str, row: int) -> int:
        """The physical row of a held one."""
        if self.specs[role].unit is Unit.POOL:
            return row
        if self.is_tail(role):
            return row % self.effective if self.effective else row
        capacity, law = self.layout.capacity, self.layout.law
        if law == "modulo":
            return row % capacity
        if law == "pinned" and row >= self.sink:
            return self.sink + (row - self.sink) % (capacity - self.sink)
        if law == "chronological":
            return row - max(0, self.position - capacity)
        return row - self.lost if law == "rebase" else row

    def next_slot(self) -> int:
        """Where the next row goes, as a captured graph reads it; the capacity where nothing fits any more."""
        if not self.has_rows:
            return 0
        if self.layout.law in ("linear", "paged") and self.position >= self.layout.capacity:
            return self.layout.capacity
        after = self.copy()
        after.append(1, {})
        return after.slot(next(iter(self.specs)), self.position)

    def content(self, role: str, rows: RowSet) -> bytes:
        if role in self.states:
            return self.states[role]
        return b"".join(self.rows[role][row] for first, end in rows for row in range(first, end))


@dataclass
class SessionModel:
    """The whole session: layers, draft layers, tokens, extras."""

    geometry: Geometry
    layouts: ProducerLayout
    max_context: int
    index_rows: int
    layers: list[LayerModel] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    extras: dict[str, bytes] = field(default_factory=dict)
    epoch: int = 0
    owed: int = 0

    def __post_init__(self) -> None:
        if self.layers:
            return
        specs = plane_specs(self.geometry)
        for scope, layers, layouts in (
            (Scope.LAYER.value, self.geometry.layers, self.layouts.layers),
            (Scope.DRAFT.value, self.geometry.draft_layers, self.layouts.draft_layers),
        ):
            for number, (layer, layout) in enumerate(zip(layers, layouts, strict=True)):
                mine = {plane.role: specs[PlaneKey(scope, number, plane.role)] for plane in layer.planes}
                self.layers.append(LayerModel(scope, layer, layout, mine, self.max_context, self.index_rows))

    def copy(self) -> SessionModel:
        other = copy(self)
        other.layers = [layer.copy() for layer in self.layers]
        other.tokens, other.extras = list(self.tokens), dict(self.extras)
        return other

    def fresh(self, layouts: ProducerLayout | None = None) -> SessionModel:
        return SessionModel(self.geometry, layouts or self.layouts, self.max_context, self.index_rows)

    def of(self, scope: Scope) -> list[LayerModel]:
        return [layer for layer in self.layers if layer.scope == scope.value]

    def position(self, scope: Scope = Scope.LAYER) -> int:
        return max((layer.position for layer in self.of(scope)), default=0)

    @property
    def has_states(self) -> bool:
        return any(layer.states for layer in self.layers)

    def planes(self) -> Iterator[tuple[PlaneKey, LayerModel, str]]:
        for layer in self.layers:
            for role, spec in layer.specs.items():
                yield spec.key, layer, role

    def make(self, scope: Scope, count: int, make: RowMaker) -> list[dict[str, list[bytes]]]:
        return [layer.make(count, make) for layer in self.of(scope)]

    def append(self, scope: Scope, count: int, brought: list[dict[str, list[bytes]]], tokens: list[int]) -> None:
        for layer, rows in zip(self.of(scope), brought, strict=True):
            layer.append(count, rows)
        if scope is Scope.LAYER:
            self.tokens.extend(tokens)
            self.owed = max(0, self.owed - count)
        self.extras.clear()

    def stored(self, *, resident: bool) -> dict[PlaneKey, RowSet]:
        """The rows that a capture takes."""
        found = {}
        for key, layer, role in self.planes():
            everything = resident and layer.has_rows and layer.specs[role].unit is Unit.TOKEN
            if everything and not layer.is_tail(role):
                found[key] = layer.held(role)
            else:
                found[key] = layer.need(layer.position)[role]
        return found

    def restored(self, source: SessionModel, position: int, draft: int) -> SessionModel:
        """What an install of ``source``'s cut at ``position`` leaves in an empty cache of this layout."""
        other = self.fresh()
        for mine, theirs in zip(other.layers, source.layers, strict=True):
            mine.restore(theirs, draft if mine.scope == Scope.DRAFT.value else position)
        other.tokens = source.tokens[:position]
        other.epoch = source.epoch
        if position == source.position():
            other.tokens, other.extras = list(source.tokens), dict(source.extras)
        return other
