"""A cut of a pack, or of a delta with its parents, as a :class:`~kvpack.model.snapshot.CutView`.

A delta stores only what follows a cut of its parent, which it names by state id. Rows of growing planes are taken
from the newest pack of the chain that stores them; sliding tails, states and fixed rows are never subtracted and come
from the pack whose cut it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from blake3 import blake3

from kvpack.errors import CompatibilityError, FormatError, IntegrityError
from kvpack.model.geometry import Geometry, PlaneKey, Scope, Unit
from kvpack.model.identity import Identity
from kvpack.model.layout import ProducerLayout
from kvpack.model.planes import PlaneSpec
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import CutRecord, Probe, RowSink
from kvpack.pack.index import TileRecord
from kvpack.pack.manifest import Parent
from kvpack.pack.reader import PackReader
from kvpack.pack.state_id import state_id

__all__ = ["MAX_CHAIN", "PackChain", "PackCut"]

MAX_CHAIN = 8


class PackChain:
    """A pack and, where it is a delta, its parents up to a whole pack, newest first. It owns the readers."""

    def __init__(self, readers: Sequence[PackReader]) -> None:
        """Hold the chain together: each pack continues a cut of the next, of the same geometry and identity.

        Raises FormatError ``chain-too-long``, CompatibilityError ``parent-missing`` and ``parent-differs``.
        """
        self.readers = tuple(readers)
        if len(self.readers) > MAX_CHAIN:
            raise FormatError(
                "chain-too-long",
                f"a chain of {len(self.readers)} packs, at most {MAX_CHAIN} are read",
                expected=MAX_CHAIN,
                found=len(self.readers),
                hint="flatten the chain into one pack",
            )
        for child, parent in pairwise(self.readers):
            _require_continues(child, parent)
        last = self.readers[-1].manifest.parent
        if last is not None:
            raise CompatibilityError(
                "parent-missing",
                f"{self.readers[-1].path.name} continues a pack at {last.position} that is not here",
                field="parent",
                expected=last.state_id.hex()[:16],
                hint="give the folder of its parents with --parents DIR",
            )

    def close(self) -> None:
        """Close every file."""
        for reader in self.readers:
            reader.close()

    @property
    def positions(self) -> tuple[int, ...]:
        """Every position at which some pack of the chain has a cut, ascending."""
        return tuple(sorted({cut.position for reader in self.readers for cut in reader.manifest.cuts}))

    def cut(self, position: int | None = None) -> PackCut:
        """The cut at ``position`` (the newest by default); raises CompatibilityError ``no-such-cut``."""
        for at, reader in enumerate(self.readers):
            record = reader.manifest.cuts[-1] if position is None else reader.manifest.cut_at(position)
            if record is not None:
                return PackCut(self.readers[at:], record)
        have = ", ".join(map(str, self.positions))
        raise CompatibilityError(
            "no-such-cut",
            f"there is no cut at {position}; there are cuts at {have}",
            field="position",
            expected=have,
            found=position,
        )

    def require_state_ids(self) -> None:
        """Hold the state id of every cut to the raw hashes of the indexes (see :meth:`PackCut.require_state_id`)."""
        for position in self.positions:
            self.cut(position).require_state_id()


def _require_continues(child: PackReader, parent: PackReader) -> None:
    named = child.manifest.parent
    cut = parent.manifest.cut_at(named.position) if named is not None else None
    if named is None or cut is None or cut.state_id != named.state_id:
        raise CompatibilityError(
            "parent-differs",
            f"{child.path.name} does not continue {parent.path.name}",
            field="parent",
            expected=named.state_id.hex()[:16] if named is not None else "no parent",
            found=cut.state_id.hex()[:16] if cut is not None else "no such cut",
        )
    for field in ("geometry", "identity"):
        mine, theirs = getattr(child.manifest, field), getattr(parent.manifest, field)
        same = mine == theirs if field == "geometry" else mine.compatibility == theirs.compatibility
        if not same:
            raise CompatibilityError(
                "parent-differs", f"{child.path.name} and its parent differ in their {field}", field=field
            )


@dataclass
class StoredTile:
    """A plain tile, read and verified by somebody else: a :class:`~kvpack.model.snapshot.RawTile`."""

    reader: PackReader
    record: TileRecord
    wanted: RowSet
    on_bytes: Callable[[int], None] | None
    _padding: bytes = b""

    @property
    def key(self) -> PlaneKey:
        """The plane."""
        return self.reader.manifest.planes[self.record.tile.plane].spec.key

    @property
    def first(self) -> int:
        """The tile's first row."""
        return self.record.tile.first

    @property
    def nbytes(self) -> int:
        """Bytes of all its rows."""
        return self.record.raw_length

    def read_into(self, target: memoryview) -> None:
        """All rows, unverified; raises FormatError ``truncated``, ResourceError ``io-error``."""
        self._padding = self.reader.read_into(self.record, target)

    def accept(self, digest: bytes) -> None:
        """Hold what was read to the record; raises IntegrityError ``stored-hash``, ``tile-padding``."""
        self.reader.require_stored(self.record, digest, self._padding)
        if self.on_bytes is not None:
            self.on_bytes(self.nbytes)


class PackCut:
    """One cut of an open pack or chain, seen as a :class:`kvpack.model.snapshot.CutView`.

    Rows are read and verified on demand, tiles in parallel.
    """

    def __init__(self, readers: Sequence[PackReader], record: CutRecord) -> None:
        """``record`` must be a cut of the first reader; the others are its parents, newest first."""
        self._readers = tuple(readers)
        self._record = record
        self.on_bytes: Callable[[int], None] | None = None

    @property
    def reader(self) -> PackReader:
        """The pack whose cut it is."""
        return self._readers[0]

    @property
    def geometry(self) -> Geometry:
        """The producer's geometry."""
        return self.reader.manifest.geometry

    @property
    def identity(self) -> Identity:
        """Who produced the state."""
        return self.reader.manifest.identity

    @property
    def layout(self) -> ProducerLayout:
        """How the producer placed its rows."""
        return self.reader.manifest.layout

    @property
    def record(self) -> CutRecord:
        """The cut's position and what travels with it."""
        return self._record

    @property
    def provenance(self) -> Mapping[str, str]:
        """Conversions, overrides and names that the pack records."""
        return self.reader.manifest.provenance

    @property
    def probe(self) -> Probe | None:
        """The logits that followed this cut, where the producer recorded them."""
        probe = self.reader.manifest.probe
        return probe if probe is not None and probe.position == self._record.position else None

    @property
    def as_parent(self) -> Parent:
        """This cut as the parent of a delta."""
        return Parent(self._record.position, self._record.state_id)

    @cached_property
    def specs(self) -> Mapping[PlaneKey, PlaneSpec]:
        """Plane key to spec, in canonical order; session states that this cut lacks are left out."""
        return {
            plane.spec.key: plane.spec
            for plane in self.reader.manifest.planes
            if plane.spec.key.scope != Scope.SESSION.value
            or plane.spec.unit is not Unit.STATE
            or plane.spec.key.role in self._record.extras
        }

    @cached_property
    def stored(self) -> Mapping[PlaneKey, RowSet]:
        """Plane key to the rows that the chain stores; for states the bytes of this cut's own."""
        return {
            key: RowSet.union_of(self._rows_in(reader, spec) for reader in self._readers)
            for key, spec in self.specs.items()
        }

    def _rows_in(self, reader: PackReader, spec: PlaneSpec) -> RowSet:
        if spec.unit in (Unit.STATE, Unit.FIXED):
            whole = spec.row_bytes if spec.unit is Unit.STATE else spec.rows or 0
            return RowSet.of((0, whole)) if reader is self.reader else RowSet()
        number = reader.manifest.numbers.get(spec.key)
        return reader.manifest.planes[number].rows if number is not None else RowSet()

    def _shares(self, wanted: Mapping[PlaneKey, RowSet]) -> Iterator[tuple[PackReader, dict[PlaneKey, RowSet]]]:
        """Which rows each pack serves: every row by the newest pack that stores it."""
        left = {key: rows for key, rows in wanted.items() if rows}
        for reader in self._readers:
            share = {}
            for key, rows in left.items():
                here = rows.intersection(self._rows_in(reader, self.specs[key]))
                if here:
                    share[key] = here
            left = {key: rows.minus(share[key]) if key in share else rows for key, rows in left.items()}
            if share:
                yield reader, share
        for key, rows in left.items():
            if rows:
                raise CompatibilityError(
                    "rows-not-stored",
                    f"{key}: rows {wanted[key]} were asked for, the pack stores {self.stored[key]}",
                    layer=key.layer_or_none,
                    plane=str(key),
                    field="rows",
                    expected=str(wanted[key]),
                    found=str(self.stored[key]),
                )

    def _tiles(self, reader: PackReader, share: Mapping[PlaneKey, RowSet]) -> Iterator[TileRecord]:
        manifest = reader.manifest
        numbers = {manifest.numbers[key]: (key, rows) for key, rows in share.items()}
        for record in reader.records:
            found = numbers.get(record.tile.plane)
            if found is None:
                continue
            key, rows = found
            if self.specs[key].unit is Unit.STATE and record.tile.ordinal != manifest.ordinal(key, self._record):
                continue
            if rows.intersection(RowSet.of((record.tile.first, record.tile.end))):
                yield record

    def read_rows(self, wanted: Mapping[PlaneKey, RowSet], sink: RowSink, *, threads: int | None = None) -> None:
        """Read, verify and hand over the wanted rows (see :data:`~kvpack.model.snapshot.RowSink`).

        A tile that a wanted row lies in is verified whole. Raises IntegrityError before its rows are handed over,
        CompatibilityError ``rows-not-stored`` before anything is read.
        """
        self._require_planes(wanted)
        for reader, share in list(self._shares(wanted)):

            def hand_over(
                record: TileRecord, raw: memoryview, reader: PackReader = reader, share: dict[PlaneKey, RowSet] = share
            ) -> None:
                spec = reader.manifest.planes[record.tile.plane].spec
                tile, size = record.tile, spec.axis_bytes
                for first, end in share[spec.key].intersection(RowSet.of((tile.first, tile.end))):
                    sink(spec.key, first, end - first, raw[(first - tile.first) * size : (end - tile.first) * size])

            def count(record: TileRecord) -> None:
                if self.on_bytes is not None:
                    self.on_bytes(record.raw_length)

            reader.for_tiles(self._tiles(reader, share), hand_over, threads=threads, done=count)

    def _require_planes(self, wanted: Mapping[PlaneKey, RowSet]) -> None:
        for key in wanted:
            if key not in self.specs:
                raise CompatibilityError("no-such-plane", f"the cut has no plane {key}", plane=str(key))

    def raw_tiles(self, wanted: Mapping[PlaneKey, RowSet]) -> Iterator[StoredTile]:
        """Tiles with wanted rows that are stored as they are, in payload order; nothing is read.

        Raises CompatibilityError as :meth:`read_rows` does.
        """
        self._require_planes(wanted)
        for reader, share in list(self._shares(wanted)):
            for record in self._tiles(reader, share):
                if reader.is_plain(record):
                    rows = share[reader.manifest.planes[record.tile.plane].spec.key]
                    here = rows.intersection(RowSet.of((record.tile.first, record.tile.end)))
                    yield StoredTile(reader, record, here, self.on_bytes)

    def bytes_to_read(self, wanted: Mapping[PlaneKey, RowSet]) -> int:
        """Raw bytes of the tiles that :meth:`read_rows` would verify for ``wanted``."""
        return sum(record.raw_length for reader, share in self._shares(wanted) for record in self._tiles(reader, share))

    def rows(self, key: PlaneKey, first: int, end: int) -> memoryview:
        """Rows ``[first, end)`` in memory, verified; for states bytes ``[first, end)``."""
        size = self.specs[key].axis_bytes
        packed = memoryview(bytearray((end - first) * size))

        def fill(_: PlaneKey, at: int, count: int, rows: memoryview) -> None:
            packed[(at - first) * size : (at - first + count) * size] = rows

        self.read_rows({key: RowSet.of((first, end))}, fill, threads=1)
        return packed

    def known_pieces(self, key: PlaneKey) -> Iterator[tuple[int, int, bytes]]:
        """Pieces of a plane up to this cut whose hash an index holds, as (first, end, BLAKE3 of the raw rows)."""
        end = self.stored[key].intersection(self.reader.manifest.semantic(key, self._record)).end
        for reader in self._readers:
            for record in reader.tiles_of.get(reader.manifest.numbers[key], ()):
                if record.tile.end <= end:
                    yield record.tile.first, record.tile.end, record.raw_hash

    def whole_tiles(self, key: PlaneKey, rows: RowSet) -> Iterator[tuple[tuple[int, int], bytes]]:
        """The tiles that lie within ``rows``, as ((first, end), BLAKE3 of the raw rows); each row's by the newest pack
        that stores it. Nothing is read."""
        spec = self.specs[key]
        for reader, share in self._shares({key: rows.intersection(self.stored[key])}):
            manifest = reader.manifest
            for record in reader.tiles_of.get(manifest.numbers[key], ()):
                tile = record.tile
                if spec.unit is Unit.STATE and tile.ordinal != manifest.ordinal(key, self._record):
                    continue
                if share[key].contains(RowSet.of((tile.first, tile.end))):
                    yield (tile.first, tile.end), record.raw_hash

    def require_state_id(self) -> None:
        """Hold the cut's state id to the raw hashes of the index, reading only pieces that lie in several tiles.

        The raw hashes are those that every tile is verified against, so a restore that read all tiles has the state
        that the id names. Raises IntegrityError ``state-id``.
        """
        if self.reader.preamble.encrypted:
            return
        found = state_id(self.reader.manifest, self._record, self._piece_hash)
        if found != self._record.state_id:
            raise IntegrityError(
                "state-id",
                f"the rows at position {self._record.position} are not the state that the pack names",
                field="state_id",
                expected=self._record.state_id.hex(),
                found=found.hex(),
            )

    def _piece_hash(self, key: PlaneKey, first: int, end: int) -> bytes:
        shares = list(self._shares({key: RowSet.of((first, end))}))
        if len(shares) == 1:
            reader = shares[0][0]
            number = reader.manifest.numbers[key]
            ordinal = reader.manifest.ordinal(key, self._record) if self.specs[key].unit is Unit.STATE else 0
            whole = reader.tile_at.get((number, ordinal, first, end))
            if whole is not None:
                return whole.raw_hash
        return blake3(self.rows(key, first, end)).digest()
