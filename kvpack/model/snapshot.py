"""A cut: the complete restorable state at one position, and the gate that a destination holds it to.

Source of the rules: spec/kvpack-v1.md, sections 7.2 and 7.6. A cut is seen through :class:`CutView`, whether its rows
are in memory (:class:`Cut`) or in a pack's tiles: the gate and the engines use nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

from kvpack.errors import CompatibilityError
from kvpack.model.geometry import MAX_POSITION, Geometry, PlaneKey
from kvpack.model.identity import Identity
from kvpack.model.layout import ProducerLayout
from kvpack.model.planes import TOKENS, PlaneSpec
from kvpack.model.ranges import RowSet
from kvpack.model.wire import WireMap, bad_manifest

__all__ = [
    "Cut",
    "CutRecord",
    "CutView",
    "PlaneRows",
    "Probe",
    "RawCut",
    "RawTile",
    "RowSink",
]


@dataclass(frozen=True)
class CutRecord:
    """One cut as the manifest records it. Positions in tokens.

    ``tokens`` is the number of known token ids: 0 (not carried) or at least ``position``. ``extras`` are the roles of
    session states that exist at this cut, ascending.
    """

    position: int
    tokens: int = 0
    extras: tuple[str, ...] = ()
    rope_delta: int = 0
    context_epoch: int = 0
    draft_position: int | None = None
    origins: tuple[int, ...] | None = None
    state_id: bytes = b""

    def to_wire(self) -> dict[str, object]:
        """The cut as the manifest holds it."""
        wire: dict[str, object] = {
            "context_epoch": self.context_epoch,
            "extras": list(self.extras),
            "position": self.position,
            "rope_delta": self.rope_delta,
            "state_id": self.state_id,
            "tokens": self.tokens,
        }
        if self.draft_position is not None:
            wire["draft_position"] = self.draft_position
        if self.origins is not None:
            wire["origins"] = list(self.origins)
        return wire

    @classmethod
    def from_wire(cls, wire: WireMap, *, sealed: bool = False) -> CutRecord:
        """Read one cut; raises FormatError with the field's path. ``sealed``: the state id stands elsewhere."""
        record = cls(
            position=wire.uint("position", most=MAX_POSITION),
            tokens=wire.uint("tokens", most=MAX_POSITION),
            extras=wire.strings("extras", most_entries=64),
            rope_delta=wire.integer("rope_delta", least=-MAX_POSITION - 1, most=MAX_POSITION),
            context_epoch=wire.uint("context_epoch"),
            draft_position=wire.opt_uint("draft_position", most=MAX_POSITION),
            origins=wire.uints("origins", most=MAX_POSITION) if wire.has("origins") else None,
            state_id=b"" if sealed else wire.hash("state_id"),
        )
        if record.tokens and record.tokens < record.position:
            raise bad_manifest(
                wire.path("tokens"),
                "is 0 or at least the position",
                expected=record.position,
                found=record.tokens,
            )
        if list(record.extras) != sorted(set(record.extras)):
            raise bad_manifest(wire.path("extras"), "must be ascending and without duplicates")
        wire.done()
        return record


@dataclass(frozen=True)
class Probe:
    """Proof that travels: the logits that followed a cut, one BLAKE3 a step of the raw last row.

    ``encoding`` is the element type of that row. Step ``i`` fed ``tokens[i]``.
    """

    position: int
    tokens: tuple[int, ...]
    digests: tuple[bytes, ...]
    encoding: str

    def to_wire(self) -> dict[str, object]:
        """The probe as the manifest holds it."""
        return {
            "digests": list(self.digests),
            "encoding": self.encoding,
            "position": self.position,
            "tokens": list(self.tokens),
        }

    @classmethod
    def from_wire(cls, wire: WireMap) -> Probe:
        """Read a probe."""
        digests: list[bytes] = []
        for at, value in enumerate(wire.array("digests")):
            if not isinstance(value, bytes) or len(value) != 32:
                raise bad_manifest(f"{wire.path('digests')}[{at}]", "must be a 32-byte hash")
            digests.append(value)
        probe = cls(
            position=wire.uint("position", most=MAX_POSITION),
            tokens=wire.uints("tokens", most=MAX_POSITION),
            digests=tuple(digests),
            encoding=wire.name("encoding"),
        )
        if not probe.digests or len(probe.digests) != len(probe.tokens):
            raise bad_manifest(
                wire.path("digests"),
                "needs one digest a token",
                expected=len(probe.tokens),
                found=len(digests),
            )
        wire.done()
        return probe


RowSink: TypeAlias = Callable[[PlaneKey, int, int, memoryview], None]
"""Receives rows: (plane, first row, number of rows, their bytes). For states: (plane, byte offset, bytes, …).

Called from several threads at once with disjoint rows; the buffer is only valid during the call.
"""


class CutView(Protocol):
    """One cut, wherever its rows are."""

    @property
    def geometry(self) -> Geometry:
        """The producer's geometry."""

    @property
    def identity(self) -> Identity:
        """Who produced the state."""

    @property
    def layout(self) -> ProducerLayout:
        """How the producer placed its rows."""

    @property
    def record(self) -> CutRecord:
        """The cut's position and what travels with it."""

    @property
    def specs(self) -> Mapping[PlaneKey, PlaneSpec]:
        """Plane key to spec, in canonical order."""

    @property
    def stored(self) -> Mapping[PlaneKey, RowSet]:
        """Plane key to the rows that can be read (for states: the bytes of this cut's state)."""

    @property
    def probe(self) -> Probe | None:
        """The logits that followed, where the producer recorded them."""

    @property
    def provenance(self) -> Mapping[str, str]:
        """Conversions, overrides and names that travel with the state."""

    def read_rows(self, wanted: Mapping[PlaneKey, RowSet], sink: RowSink) -> None:
        """Hand every wanted row to ``sink`` once, verified; raises before or instead of handing over a bad one."""

    def rows(self, key: PlaneKey, first: int, end: int) -> memoryview:
        """Rows ``[first, end)`` of one stored range, canonical order; for states bytes ``[first, end)``."""


class RawTile(Protocol):
    """Rows of one plane (for states: bytes) that lie in a pack as they are, not yet verified."""

    @property
    def key(self) -> PlaneKey:
        """The plane."""

    @property
    def first(self) -> int:
        """The tile's first row."""

    @property
    def nbytes(self) -> int:
        """Bytes of all rows of the tile, one behind the other."""

    @property
    def wanted(self) -> RowSet:
        """Those of its rows that were asked for. They are verified with all others."""

    def read_into(self, target: memoryview) -> None:
        """Read all rows into ``target``, ``nbytes`` long; from any thread. They must not be used yet."""

    def accept(self, digest: bytes) -> None:
        """Hold the BLAKE3 of what was read to the tile's own; the rows may be used once this returns.

        Raises IntegrityError as :meth:`CutView.read_rows` does.
        """


@runtime_checkable
class RawCut(Protocol):
    """A cut some of whose rows can be verified by whoever reads them: the part of :class:`CutView` that is optional."""

    def raw_tiles(self, wanted: Mapping[PlaneKey, RowSet]) -> Iterator[RawTile]:
        """Tiles with wanted rows that are stored as they are; the others' rows come by :meth:`CutView.read_rows` only.

        No row is wanted of two tiles.
        """


@dataclass(frozen=True)
class PlaneRows:
    """The rows of one plane in memory: ``buffer`` holds those of ``rows``, ascending, one behind the other."""

    spec: PlaneSpec
    rows: RowSet
    buffer: memoryview

    def __post_init__(self) -> None:
        wanted = self.rows.count * self.spec.axis_bytes
        if self.buffer.nbytes != wanted:
            raise CompatibilityError(
                "rows-and-bytes-differ",
                f"{self.spec.key}: {self.rows.count} rows need {wanted} bytes, got {self.buffer.nbytes}",
                layer=self.spec.key.layer_or_none,
                plane=str(self.spec.key),
                expected=wanted,
                found=self.buffer.nbytes,
            )

    def slice(self, first: int, end: int) -> memoryview:
        """The bytes of rows ``[first, end)``, which must lie in one stored range."""
        size = self.spec.axis_bytes
        at = self.rows.offset_of(first) * size
        return self.buffer[at : at + (end - first) * size]


@dataclass(frozen=True)
class Cut:
    """A cut in memory. It never aliases a live cache: ``planes`` own their bytes.

    ``planes`` holds every layer plane of the geometry (rows may be empty) and the session planes that travel.
    """

    geometry: Geometry
    identity: Identity
    layout: ProducerLayout
    record: CutRecord
    planes: Mapping[PlaneKey, PlaneRows]
    probe: Probe | None = None
    provenance: Mapping[str, str] = field(default_factory=dict)

    @property
    def specs(self) -> Mapping[PlaneKey, PlaneSpec]:
        """Plane key to spec, in canonical order."""
        return {key: rows.spec for key, rows in self.planes.items()}

    @property
    def stored(self) -> Mapping[PlaneKey, RowSet]:
        """Plane key to the rows that the cut holds."""
        return {key: rows.rows for key, rows in self.planes.items()}

    @property
    def tokens(self) -> tuple[int, ...]:
        """The token ids that travel with the cut; empty if none do."""
        rows = self.planes.get(TOKENS)
        return tuple(rows.buffer.cast("B").cast("i")) if rows is not None and rows.buffer.nbytes else ()

    def rows(self, key: PlaneKey, first: int, end: int) -> memoryview:
        """The bytes of rows ``[first, end)``, which must lie in one stored range; not a copy."""
        return self.planes[key].slice(first, end)

    def read_rows(self, wanted: Mapping[PlaneKey, RowSet], sink: RowSink) -> None:
        """Hand the wanted rows to ``sink`` (see :class:`CutView`)."""
        for key, rows in wanted.items():
            for first, end in rows:
                sink(key, first, end - first, self.planes[key].slice(first, end))
