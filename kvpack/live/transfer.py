"""Cuts out of live caches and into them: capture at a quiesced moment, install as a transaction.

Capture has two forms: :func:`capture` copies into memory, :func:`holding` keeps the session quiesced and lets a writer
take rows from the live planes, without a second copy. Install gates every layer before a byte moves, writes verified
rows into a fresh cache or a staging generation, and publishes by pointer swap or in place, counters last. A pack's raw
tiles are verified on the device that they go to, where it can; all else on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kvpack.device.protocol import Device, Move
from kvpack.errors import CompatibilityError, InstallError
from kvpack.live.cache import LiveCache
from kvpack.live.generation import Extra, Generation
from kvpack.live.layers import LayerState, LiveLayer
from kvpack.live.raw_rows import write_raw_rows
from kvpack.live.rings import RotatingRing
from kvpack.model.gate import Destination, GateReport, gate
from kvpack.model.geometry import Geometry, PlaneKey, Scope
from kvpack.model.identity import Identity
from kvpack.model.layout import LayerLayout, ProducerLayout
from kvpack.model.planes import TOKENS, PlaneSpec, tokens_spec
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import Cut, CutRecord, CutView, PlaneRows, Probe, RowSink

__all__ = [
    "Installed",
    "LiveCut",
    "Staged",
    "capture",
    "holding",
    "install",
    "plan",
    "publish_in_place",
    "require_consistent",
    "stage",
]

KNOWN_EXTRAS = ("logits", "sampler", "tap")


class LiveCut:
    """A quiesced live cache as a :class:`~kvpack.model.snapshot.CutView`: rows are gathered when they are asked for."""

    def __init__(self, cache: LiveCache, identity: Identity, *, resident: bool) -> None:
        """Made by :func:`holding`; raises what a capture refuses."""
        require_consistent(cache)
        now = cache.generation
        self._generation = now
        self._identity = identity
        self._geometry = cache.geometry
        self._layout, origins = _layout_of(now)
        self._record = CutRecord(
            position=now.position,
            tokens=len(now.tokens),
            extras=tuple(sorted(now.extras)),
            rope_delta=now.rope_delta,
            context_epoch=now.context_epoch,
            draft_position=now.draft_position if now.draft_layers else None,
            origins=origins,
        )
        self._specs: dict[PlaneKey, PlaneSpec] = {plane.spec.key: plane.spec for _, plane in now.every_plane()}
        self._stored: dict[PlaneKey, RowSet] = {}
        for layer in now.every_layer():
            self._stored |= layer.stored(resident=resident)
        for role, extra in sorted(now.extras.items()):
            if role < "tokens" or not now.tokens:
                self._add_extra(extra)
        if now.tokens:
            self._specs[TOKENS] = tokens_spec()
            self._stored[TOKENS] = RowSet.of((0, len(now.tokens)))
            for role, extra in sorted(now.extras.items()):
                if role > "tokens":
                    self._add_extra(extra)

    def _add_extra(self, extra: Extra) -> None:
        self._specs[extra.spec.key] = extra.spec
        self._stored[extra.spec.key] = RowSet.of((0, extra.spec.row_bytes))

    @property
    def geometry(self) -> Geometry:
        """The cache's geometry."""
        return self._geometry

    @property
    def identity(self) -> Identity:
        """Who produced the state."""
        return self._identity

    @property
    def layout(self) -> ProducerLayout:
        """How the rows lie."""
        return self._layout

    @property
    def record(self) -> CutRecord:
        """Position and what travels."""
        return self._record

    @property
    def specs(self) -> Mapping[PlaneKey, PlaneSpec]:
        """Plane key to spec, in canonical order."""
        return self._specs

    @property
    def stored(self) -> Mapping[PlaneKey, RowSet]:
        """Plane key to the rows that can be read."""
        return self._stored

    @property
    def probe(self) -> Probe | None:
        """A live session has none."""
        return None

    @property
    def provenance(self) -> Mapping[str, str]:
        """Nothing was converted."""
        return {}

    def rows(self, key: PlaneKey, first: int, end: int) -> memoryview:
        """A copy of rows ``[first, end)``, canonical order; for states bytes ``[first, end)``."""
        now = self._generation
        if key == TOKENS:
            return memoryview(b"".join(t.to_bytes(4, "little", signed=True) for t in now.tokens[first:end]))
        if key.scope == Scope.SESSION.value:
            return memoryview(now.extras[key.role].content)[first:end]
        layer = now.layer_of(key)
        return layer.read_rows(layer.planes[key.role], first, end)

    def gathered(self) -> dict[PlaneKey, memoryview]:
        """Every stored row of the layers that lie on one device, by one gather a device."""
        found: dict[PlaneKey, memoryview] = {}
        for device, layers in _by_device(self._generation):
            places: dict[PlaneKey, tuple[int, int]] = {}
            moves: list[Move] = []
            end = 0
            for layer in layers:
                for plane in layer.planes.values():
                    key, rows = plane.spec.key, self._stored[plane.spec.key]
                    moves += layer.moves_of_all(plane, rows, end)
                    places[key] = end, end + rows.count * plane.spec.axis_bytes
                    end = places[key][1]
            packed = memoryview(bytearray(end))
            device.gather(moves, packed)
            found |= {key: packed[start:stop] for key, (start, stop) in places.items()}
        return found

    def read_rows(self, wanted: Mapping[PlaneKey, RowSet], sink: RowSink) -> None:
        """Hand the wanted rows to ``sink``."""
        for key, rows in wanted.items():
            for first, end in rows:
                sink(key, first, end - first, self.rows(key, first, end))


def _by_device(now: Generation) -> list[tuple[Device, list[LiveLayer]]]:
    """Layers of each device; without those that lie on several."""
    found: dict[int, tuple[Device, list[LiveLayer]]] = {}
    for layer in now.every_layer():
        if layer.on_one_device:
            found.setdefault(id(layer.device), (layer.device, []))[1].append(layer)
    return list(found.values())


def _layout_of(now: Generation) -> tuple[ProducerLayout, tuple[int, ...] | None]:
    def of(layer: LiveLayer) -> LayerLayout:
        placement = layer.state.placement
        return layer.layout if placement is None else replace(layer.layout, law=placement.law)

    layout = ProducerLayout(tuple(map(of, now.layers)), tuple(map(of, now.draft_layers)))
    if not any(entry.law == "history" for entry in layout.layers):
        return layout, None
    placements = (layer.state.placement for layer in now.layers)
    return layout, tuple(p.origin_physical if isinstance(p, RotatingRing) else 0 for p in placements)


def require_consistent(cache: LiveCache) -> None:
    """Every counter agrees: layers with each other and with the cache, pool keys with their rows, tokens with rows."""
    now = cache.generation
    for layers, position in ((now.layers, now.position), (now.draft_layers, now.draft_position)):
        for layer in layers:
            if layer.position != position:
                where = f"{layer.scope} {layer.number} ({layer.geometry.kind})"
                raise InstallError(
                    "layers-disagree",
                    f"{where} stands at {layer.position}, the cache at {position}",
                    layer=layer.number,
                    field="position",
                    expected=position,
                    found=layer.position,
                )
            if layer.state.pool is not None:
                layer.state.pool.require_drained(layer=layer.number)
    if now.tokens and len(now.tokens) < now.position:
        raise InstallError(
            "tokens-shorter-than-rows",
            f"{len(now.tokens)} tokens are known, and the cache holds the state of {now.position}",
            field="tokens",
            expected=now.position,
            found=len(now.tokens),
        )


@contextlib.contextmanager
def holding(cache: LiveCache, identity: Identity, *, resident: bool = False) -> Iterator[LiveCut]:
    """The cache as a cut, held quiesced: appends, rewinds and installs are refused until the block ends.

    ``resident`` takes all rows that are there, not only the producer's live contract. Raises InstallError (``tainted``,
    ``layers-disagree``, ``keys-behind``, ``tokens-shorter-than-rows``, ``replay-pending``).
    """
    cache.hold()
    try:
        yield LiveCut(cache, identity, resident=resident)
    finally:
        cache.release()


def capture(cache: LiveCache, identity: Identity, *, resident: bool = False) -> Cut:
    """A deep copy of the cache's state as a cut; it never aliases the live planes. Raises as :func:`holding` does."""
    with holding(cache, identity, resident=resident) as live:
        gathered = live.gathered()
        planes = {}
        for key, spec in live.specs.items():
            rows = live.stored[key]
            content = gathered[key] if key in gathered else memoryview(b"".join(live.rows(key, *r) for r in rows))
            planes[key] = PlaneRows(spec, rows, content)
        return Cut(live.geometry, identity, live.layout, live.record, planes)


@dataclass(frozen=True)
class Installed:
    """What an install did: the gate's report, and the names of what the pack has and the cache did not take."""

    report: GateReport
    dropped: tuple[str, ...]


@dataclass
class Staged:
    """A whole generation, installed and not yet published."""

    generation: Generation
    installed: Installed


@dataclass(frozen=True)
class _Plan:
    report: GateReport
    states: tuple[LayerState, ...]
    dropped: tuple[str, ...]
    position: int
    draft_position: int


def plan(
    cache: LiveCache,
    cut: CutView,
    identity: Identity,
    *,
    at: int | None = None,
    override: frozenset[str] = frozenset(),
    optional: frozenset[str] = frozenset(),
) -> GateReport:
    """Gate ``cut`` against this cache without moving a byte: every reason against it, and the claim."""
    return _plan(cache, cut, identity, at, override, optional)[0]


def _plan(
    cache: LiveCache,
    cut: CutView,
    identity: Identity,
    at: int | None,
    override: frozenset[str],
    optional: frozenset[str],
) -> tuple[GateReport, _Plan | None]:
    position = cut.record.position if at is None else at
    draft = cut.record.draft_position or 0
    layers = [
        (layer.fresh_state(cache.max_context, cache.index_rows), layer) for layer in cache.generation.every_layer()
    ]
    need: dict[PlaneKey, RowSet] = {}
    states: list[LayerState] = []
    refusals: list[CompatibilityError] = []
    for state, layer in layers:
        target = draft if layer.scope == Scope.DRAFT.value else position
        try:
            states.append(_restored(state, target, layer.number))
            need |= layer.need(target, state)
        except InstallError as error:
            refusals.append(
                CompatibilityError(
                    error.code, error.message, layer=layer.number, expected=error.expected, found=error.found
                )
            )
    destination = Destination(cache.geometry, identity, cache.max_context, need, override)
    report = gate(cut, destination, at=at)
    extras = [key.role for key in cut.specs if key.scope == Scope.SESSION.value and key != TOKENS]
    for role in extras:
        if role.partition(".")[0] not in KNOWN_EXTRAS and role not in optional:
            refusals.append(
                CompatibilityError(
                    "unknown-extra",
                    f"the pack has a session state {role!r}, which this cache does not know",
                    plane=f"session.{role}",
                    found=role,
                    hint="declare it optional to leave it out",
                )
            )
    dropped = [role for role in extras if role.partition(".")[0] not in KNOWN_EXTRAS]
    if position != cut.record.position:
        dropped += [role for role in extras if role not in dropped]
    report = replace(report, refusals=(*report.refusals, *refusals))
    if report.refusals:
        return report, None
    return report, _Plan(report, tuple(states), tuple(sorted(dropped)), position, draft)


def _restored(state: LayerState, position: int, layer: int) -> LayerState:
    return LayerState(
        state.placement.restored(position, layer=layer) if state.placement is not None else None,
        state.pool.restored(position, layer=layer) if state.pool is not None else None,
        position,
    )


def install(
    cache: LiveCache,
    cut: CutView,
    identity: Identity,
    *,
    at: int | None = None,
    override: frozenset[str] = frozenset(),
    optional: frozenset[str] = frozenset(),
) -> Installed:
    """Install ``cut`` into this fresh cache, in place: addresses stay, counters are written last.

    ``identity`` is the destination's own. Raises the gate's CompatibilityError, InstallError ``not-fresh`` or
    ``tainted`` with every byte as before; where a tile fails its verification, the error is raised with the cache
    zeroed and at length 0.
    """
    cache.require_usable("an install")
    if cache.position or cache.draft_position:
        raise InstallError(
            "not-fresh",
            f"the cache holds a session of {cache.position} tokens",
            field="position",
            expected=0,
            found=cache.position,
            hint="stage the install and swap it in, or reset the cache",
        )
    report, chosen = _plan(cache, cut, identity, at, override, optional)
    if chosen is None:
        report.require()
        raise AssertionError("a plan without refusals")
    try:
        _write(cache.generation, cut, chosen)
    except BaseException:
        cache.reset()
        raise
    cache.begin_line()
    cache.write_counters()
    return Installed(report, chosen.dropped)


def stage(
    cache: LiveCache,
    cut: CutView,
    identity: Identity,
    *,
    at: int | None = None,
    override: frozenset[str] = frozenset(),
    optional: frozenset[str] = frozenset(),
) -> Staged:
    """Install ``cut`` into a new generation beside the live session; publish it with :meth:`LiveCache.swap` or
    :func:`publish_in_place`. Whatever fails, the live session is untouched."""
    report, chosen = _plan(cache, cut, identity, at, override, optional)
    if chosen is None:
        report.require()
        raise AssertionError("a plan without refusals")
    generation = cache.new_generation()
    _write(generation, cut, chosen)
    return Staged(generation, Installed(report, chosen.dropped))


def publish_in_place(cache: LiveCache, staged: Staged) -> None:
    """Copy a staged generation over the live one, where captured graphs have addresses baked in; counters last.

    A failure midway taints the cache: nothing half-published is usable.
    """
    cache.require_usable("a publication")
    live, fresh = cache.generation, staged.generation
    try:
        for layer, other in zip(live.every_layer(), fresh.every_layer(), strict=True):
            layer.copy_from(other)
        for layer in live.every_layer():
            layer.synchronise()
    except BaseException:
        cache.taint("a publication in place")
        raise
    for layer, other in zip(live.every_layer(), fresh.every_layer(), strict=True):
        layer.state = other.state
    live.tokens[:] = fresh.tokens
    live.extras = dict(fresh.extras)
    live.rope_delta, live.context_epoch = fresh.rope_delta, fresh.context_epoch
    live.position, live.draft_position = fresh.position, fresh.draft_position
    cache.begin_line()
    cache.write_counters()


def _write(generation: Generation, cut: CutView, chosen: _Plan) -> None:
    """Rows into their places, then everything that is not bytes; extras and tokens come by the same verified read."""
    layers = list(generation.every_layer())
    states = dict(zip(((layer.scope, layer.number) for layer in layers), chosen.states, strict=True))
    owners = {plane.spec.key: (layer, plane) for layer, plane in generation.every_plane()}
    at_cut = chosen.position == cut.record.position
    tokens = min(cut.record.tokens, chosen.position) if not at_cut else cut.record.tokens
    session: dict[PlaneKey, bytearray] = {}
    wanted = {key: rows for key, rows in chosen.report.need.items() if key in owners}
    if tokens:
        wanted[TOKENS] = RowSet.of((0, tokens))
        session[TOKENS] = bytearray(4 * tokens)
    for key, spec in cut.specs.items():
        if key.scope == Scope.SESSION.value and key != TOKENS and at_cut and key.role not in chosen.dropped:
            wanted[key] = RowSet.of((0, spec.row_bytes))
            session[key] = bytearray(spec.row_bytes)

    def sink(key: PlaneKey, first: int, count: int, rows: memoryview) -> None:
        if key in session:
            size = cut.specs[key].axis_bytes
            session[key][first * size : (first + count) * size] = rows
            return
        layer, plane = owners[key]
        layer.write_rows(plane, first, rows, states[layer.scope, layer.number])

    try:
        cut.read_rows(write_raw_rows(cut, wanted, owners, states), sink)
    finally:  # whatever went wrong, no row is still on its way
        for layer in layers:
            layer.synchronise()
    for layer in layers:
        layer.state = states[layer.scope, layer.number]
    generation.tokens[:] = memoryview(session.pop(TOKENS, bytearray())).cast("i").tolist()
    generation.extras = {key.role: Extra(cut.specs[key], bytes(content)) for key, content in session.items()}
    generation.rope_delta, generation.context_epoch = cut.record.rope_delta, cut.record.context_epoch
    generation.position = chosen.position
    generation.draft_position = chosen.draft_position if generation.draft_layers else 0
