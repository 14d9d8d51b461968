"""The manifest: everything about a pack except its rows (spec, sections 7 and 8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Final

from kvpack.errors import CompatibilityError, FormatError
from kvpack.model.encoding import UnknownEncoding
from kvpack.model.geometry import (
    MAX_POSITION,
    Geometry,
    LayerGeometry,
    PlaneGeometry,
    PlaneKey,
    Scope,
    Unit,
    plane_shape,
)
from kvpack.model.identity import Identity
from kvpack.model.layout import ProducerLayout
from kvpack.model.planes import TOKENS, PlaneSpec, semantic_rows, tokens_spec
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import CutRecord, Probe
from kvpack.model.wire import WireMap, bad_manifest
from kvpack.pack import canonical
from kvpack.pack.preamble import Limits

__all__ = ["Manifest", "Parent", "StoredPlane"]

_MAX_ROW_BYTES: Final = (1 << 32) - 1


@dataclass(frozen=True)
class Parent:
    """What a delta continues: a cut of another pack, by its state id."""

    position: int
    state_id: bytes


@dataclass(frozen=True)
class Sealed:
    """What an encrypted pack shows of its secrets: wrapped keys, and the encrypted state ids, parent and probe."""

    recipients: tuple[object, ...]
    ciphertext: bytes


@dataclass(frozen=True)
class StoredPlane:
    """A plane and the rows that the pack stores of it (for states: the ordinals ``[0, n)``).

    ``window`` says that it belongs to a sliding layer; ``tokens_per_row`` is the pool for pool keys, else 1.
    """

    spec: PlaneSpec
    rows: RowSet
    window: bool = False
    tokens_per_row: int = 1

    @property
    def raw_bytes(self) -> int:
        """Bytes of all stored rows."""
        return self.rows.count * self.spec.row_bytes

    def to_wire(self) -> dict[str, object]:
        """The plane as the manifest holds it."""
        spec = self.spec
        wire: dict[str, object] = {
            "encoding": spec.encoding.to_wire(),
            "ranges": [list(r) for r in self.rows],
            "role": spec.key.role,
            "row_bytes": spec.row_bytes,
            "row_shape": list(spec.row_shape),
            "scope": spec.key.scope,
            "unit": spec.unit.value,
        }
        if spec.key.layer_or_none is not None:
            wire["layer"] = spec.key.layer
        if spec.rows is not None:
            wire["rows"] = spec.rows
        return wire


@dataclass(frozen=True)
class Manifest:
    """A manifest as a value. Round trip: ``Manifest.parse(m.to_bytes()) == m``."""

    geometry: Geometry
    identity: Identity
    layout: ProducerLayout
    cuts: tuple[CutRecord, ...]
    planes: tuple[StoredPlane, ...]
    created: int
    producer: tuple[str, str]
    salt: bytes
    index_hash: bytes = bytes(32)
    epoch: int = 0
    expires: int | None = None
    stream: str | None = None
    parent: Parent | None = None
    probe: Probe | None = None
    provenance: Mapping[str, str] = field(default_factory=dict)
    sealed: Sealed | None = None

    @cached_property
    def numbers(self) -> Mapping[PlaneKey, int]:
        """Plane key to its number in ``planes``."""
        return {plane.spec.key: number for number, plane in enumerate(self.planes)}

    @cached_property
    def _layers(self) -> Mapping[PlaneKey, LayerGeometry]:
        return {key: layer for key, layer, _ in self.geometry.planes()}

    @property
    def position(self) -> int:
        """The pack's position: that of its last cut."""
        return self.cuts[-1].position

    def cut_at(self, position: int) -> CutRecord | None:
        """The cut at exactly ``position``, or None."""
        return next((cut for cut in self.cuts if cut.position == position), None)

    def semantic(self, key: PlaneKey, cut: CutRecord) -> RowSet:
        """The rows of a plane that ``cut`` means; for states the bytes ``[0, row_bytes)`` where the cut has one."""
        spec = self.planes[self.numbers[key]].spec
        if key.scope == Scope.SESSION.value:
            if spec.unit is Unit.STATE:
                return RowSet.of((0, spec.row_bytes)) if key.role in cut.extras else RowSet()
            return RowSet.of((0, cut.tokens))
        position = (cut.draft_position or 0) if key.scope == Scope.DRAFT.value else cut.position
        return semantic_rows(self._layers[key], spec, position)

    def ordinal(self, key: PlaneKey, cut: CutRecord) -> int:
        """Which of a state plane's states belongs to ``cut``."""
        earlier = [c for c in self.cuts if c.position < cut.position]
        if key.scope == Scope.SESSION.value:
            return sum(key.role in c.extras for c in earlier)
        return len(earlier)

    def to_bytes(self) -> bytes:
        """The canonical bytes."""
        wire: dict[str, object] = {
            "created": self.created,
            "cuts": [cut.to_wire() for cut in self.cuts],
            "epoch": self.epoch,
            "geometry": self.geometry.to_wire(),
            "identity": self.identity.to_wire(),
            "index_hash": self.index_hash,
            "planes": [plane.to_wire() for plane in self.planes],
            "producer": {"name": self.producer[0], "version": self.producer[1]},
            "producer_layout": self.layout.to_wire(),
            "provenance": dict(self.provenance),
            "salt": self.salt,
        }
        if self.expires is not None:
            wire["expires"] = self.expires
        if self.stream is not None:
            wire["stream"] = self.stream
        if self.parent is not None:
            wire["parent"] = {"position": self.parent.position, "state_id": self.parent.state_id}
        if self.probe is not None:
            wire["probe"] = self.probe.to_wire()
        if self.sealed is not None:
            wire["recipients"] = list(self.sealed.recipients)
            wire["sealed"] = self.sealed.ciphertext
        return canonical.encode(wire)

    @classmethod
    def parse(cls, buffer: bytes, limits: Limits, *, encrypted: bool = False) -> Manifest:
        """Steps 7 and 8 of a reader: canonical decode, then meaning. ``encrypted`` is the preamble's flag."""
        wire = WireMap(canonical.decode(buffer), "")
        sealed = _sealed_from_wire(wire, limits, encrypted)
        geometry = Geometry.from_wire(wire.map("geometry"))
        planes = wire.maps("planes", most=limits.planes)
        layers = {key: (layer, plane) for key, layer, plane in geometry.planes()}
        producer = wire.map("producer")
        manifest = cls(
            geometry=geometry,
            identity=Identity.from_wire(wire.map("identity")),
            layout=ProducerLayout.from_wire(wire.map("producer_layout"), geometry),
            cuts=tuple(CutRecord.from_wire(cut, sealed=encrypted) for cut in wire.maps("cuts", most=limits.cuts)),
            planes=tuple(_plane_from_wire(plane, layers) for plane in planes),
            created=wire.uint("created"),
            producer=(producer.string("name"), producer.string("version")),
            salt=wire.hash("salt"),
            index_hash=wire.hash("index_hash"),
            epoch=wire.uint("epoch"),
            expires=wire.opt_uint("expires"),
            stream=wire.opt_string("stream"),
            parent=_parent_from_wire(wire.map("parent")) if wire.has("parent") else None,
            probe=Probe.from_wire(wire.map("probe")) if wire.has("probe") else None,
            provenance=_provenance(wire.map("provenance")),
            sealed=sealed,
        )
        producer.done()
        wire.done()
        _require_order(manifest)
        _require_cuts(manifest)
        _require_rows(manifest, limits)
        return manifest

    def with_hashes(self, index_hash: bytes, state_ids: Mapping[int, bytes]) -> Manifest:
        """The manifest with its index hash and its cuts' state ids (by position) filled in."""
        cuts = tuple(replace(cut, state_id=state_ids[cut.position]) for cut in self.cuts)
        return replace(self, index_hash=index_hash, cuts=cuts)


def _parent_from_wire(wire: WireMap) -> Parent:
    parent = Parent(wire.uint("position", most=MAX_POSITION), wire.hash("state_id"))
    wire.done()
    return parent


def _sealed_from_wire(wire: WireMap, limits: Limits, encrypted: bool) -> Sealed | None:
    for key in ("recipients", "sealed"):
        if wire.has(key) and not encrypted:
            raise bad_manifest(wire.path(key), "stands in encrypted packs only")
    if not encrypted:
        return None
    for key in ("parent", "probe"):
        if wire.has(key):
            raise bad_manifest(wire.path(key), "stands in sealed in an encrypted pack")
    return Sealed(tuple(wire.array("recipients", most=limits.recipients)), wire.binary("sealed"))


def _provenance(wire: WireMap) -> Mapping[str, str]:
    return MappingProxyType({name: wire.string(name) for name in wire.names()})


def _plane_from_wire(wire: WireMap, layers: Mapping[PlaneKey, tuple[LayerGeometry, PlaneGeometry]]) -> StoredPlane:
    scope = wire.string("scope")
    if scope not in (s.value for s in Scope):
        raise bad_manifest(wire.path("scope"), "is not a scope", found=scope)
    in_session = scope == Scope.SESSION.value
    if in_session == wire.has("layer"):
        raise bad_manifest(wire.path("layer"), "is present exactly for the scopes layer and draft")
    layer = -1 if in_session else wire.uint("layer", most=65535)
    row_bytes = wire.uint("row_bytes", least=1, most=_MAX_ROW_BYTES)
    rows = wire.opt_uint("rows", most=MAX_POSITION)
    ranges = _ranges(wire, "ranges")
    shape = plane_shape(wire)
    wire.done()
    key = PlaneKey(scope, layer, shape.role)
    if in_session:
        _require_session_plane(wire, shape)
    spec = PlaneSpec(key, shape.encoding, shape.row_shape, row_bytes, shape.unit, rows)
    if not isinstance(shape.encoding, UnknownEncoding):
        try:
            wanted = shape.row_bytes
        except CompatibilityError as error:
            if error.code != "unknown-encoding":
                raise bad_manifest(wire.path("row_shape"), error.message) from None
            wanted = row_bytes
        if wanted != row_bytes:
            raise bad_manifest(
                wire.path("row_bytes"), "disagrees with shape and encoding", expected=wanted, found=row_bytes
            )
    found = layers.get(key)
    if found is None:
        return StoredPlane(spec, ranges)
    owner, plane = found
    for name, mine in (
        ("encoding", plane.encoding),
        ("row_shape", plane.row_shape),
        ("unit", plane.unit),
        ("rows", plane.rows),
    ):
        if getattr(spec, name) != mine:
            raise bad_manifest(wire.path(name), "disagrees with the geometry", expected=mine, found=getattr(spec, name))
    pool = owner.pool or 1
    slides = owner.window is not None and spec.unit is Unit.TOKEN
    return StoredPlane(spec, ranges, slides, pool if spec.unit is Unit.POOL else 1)


def _require_session_plane(wire: WireMap, shape: PlaneGeometry) -> None:
    if shape.role != TOKENS.role:
        if shape.unit is not Unit.STATE:
            raise bad_manifest(wire.path("unit"), "is state", expected="state", found=shape.unit.value)
        return
    wanted = tokens_spec()
    for name in ("unit", "encoding", "row_shape"):
        if getattr(shape, name) != getattr(wanted, name):
            raise bad_manifest(wire.path(name), "is not that of token ids: i32, shape [], unit token")


def _ranges(wire: WireMap, key: str) -> RowSet:
    ranges: list[tuple[int, int]] = []
    for at, entry in enumerate(wire.array(key)):
        path = f"{wire.path(key)}[{at}]"
        if not isinstance(entry, list) or len(entry) != 2 or any(type(v) is not int for v in entry):
            raise bad_manifest(path, "must be a pair of integers")
        first, end = entry
        if not 0 <= first < end <= MAX_POSITION:
            raise bad_manifest(path, "is not a range of rows", found=f"[{first}, {end})")
        if ranges and first <= ranges[-1][1]:
            raise bad_manifest(path, "overlaps, touches or precedes the range before it", found=f"[{first}, {end})")
        ranges.append((first, end))
    return RowSet(tuple(ranges))


def _require_order(manifest: Manifest) -> None:
    wanted = [key for key, _, _ in manifest.geometry.planes()]
    found = [plane.spec.key for plane in manifest.planes]
    for at, key in enumerate(wanted):
        if at >= len(found) or found[at] != key:
            raise bad_manifest(
                f"planes[{at}]",
                "is not the plane that the geometry has here",
                expected=str(key),
                found=str(found[at]) if at < len(found) else "nothing",
            )
    session = found[len(wanted) :]
    for at, key in enumerate(session, len(wanted)):
        if key.scope != Scope.SESSION.value:
            raise bad_manifest(f"planes[{at}]", "is not in the geometry", found=str(key))
        if at > len(wanted) and key.role <= session[at - len(wanted) - 1].role:
            raise bad_manifest(f"planes[{at}]", "session planes stand in ascending order of role", found=key.role)


def _require_cuts(manifest: Manifest) -> None:
    if not manifest.cuts:
        raise bad_manifest("cuts", "is empty")
    roles = {p.spec.key.role for p in manifest.planes if p.spec.key.scope == "session" and p.spec.unit is Unit.STATE}
    before = -1
    known = 0
    for at, cut in enumerate(manifest.cuts):
        if cut.position <= before:
            raise bad_manifest(f"cuts[{at}].position", "cuts stand in strictly ascending order", found=cut.position)
        before = cut.position
        if cut.tokens < known:
            raise bad_manifest(f"cuts[{at}].tokens", "is less than at an earlier cut", expected=known, found=cut.tokens)
        known = cut.tokens
        if (cut.draft_position is not None) != bool(manifest.geometry.draft_layers):
            raise bad_manifest(f"cuts[{at}].draft_position", "is present exactly if there are draft layers")
        history = any(layer.law == "history" for layer in manifest.layout.layers)
        if (cut.origins is not None) != history:
            raise bad_manifest(f"cuts[{at}].origins", "is present exactly under the law history")
        if cut.origins is not None and len(cut.origins) != len(manifest.geometry.layers):
            raise bad_manifest(f"cuts[{at}].origins", "needs one origin a layer")
        for role in cut.extras:
            if role not in roles:
                raise bad_manifest(f"cuts[{at}].extras", "names no session plane of unit state", found=role)
        if cut.tokens and TOKENS not in manifest.numbers:
            raise bad_manifest(f"cuts[{at}].tokens", "there is no tokens plane", found=cut.tokens)
    if manifest.parent is not None and manifest.parent.position > manifest.cuts[0].position:
        raise bad_manifest("parent.position", "lies behind the first cut", found=manifest.parent.position)
    if manifest.probe is not None and manifest.cut_at(manifest.probe.position) is None:
        raise bad_manifest("probe.position", "is not a cut", found=manifest.probe.position)


def _require_rows(manifest: Manifest, limits: Limits) -> None:
    if len(manifest.planes) * len(manifest.cuts) > limits.planes_by_cuts:
        raise FormatError(
            "limit-exceeded",
            f"{len(manifest.planes)} planes by {len(manifest.cuts)} cuts are more than are read",
            field="planes",
            expected=limits.planes_by_cuts,
            found=len(manifest.planes) * len(manifest.cuts),
        )
    for at, plane in enumerate(manifest.planes):
        spec = plane.spec
        if spec.unit is Unit.STATE:
            session = spec.key.scope == Scope.SESSION.value
            states = sum(not session or spec.key.role in cut.extras for cut in manifest.cuts)
            if plane.rows != RowSet.of((0, states)):
                raise bad_manifest(
                    f"planes[{at}].ranges", "needs one state a cut", expected=f"[0, {states})", found=str(plane.rows)
                )
        elif spec.unit is Unit.FIXED and plane.rows != RowSet.of((0, spec.rows or 0)):
            raise bad_manifest(f"planes[{at}].ranges", "needs every row", expected=spec.rows, found=str(plane.rows))
        elif plane.rows.end > (end := max(manifest.semantic(spec.key, cut).end for cut in manifest.cuts)):
            # Not only the last cut: rows that wait for their pool are none where it has just filled up.
            raise bad_manifest(
                f"planes[{at}].ranges",
                f"{spec.key} has rows behind the last cut",
                expected=end,
                found=plane.rows.end,
            )
        elif manifest.parent is None and manifest.sealed is None:
            for cut in manifest.cuts:
                missing = manifest.semantic(spec.key, cut).minus(plane.rows)
                if missing:
                    raise bad_manifest(
                        f"planes[{at}].ranges",
                        f"{spec.key} lacks rows that the cut at {cut.position} means",
                        expected=str(manifest.semantic(spec.key, cut)),
                        found=str(plane.rows),
                    )
