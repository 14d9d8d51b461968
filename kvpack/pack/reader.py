"""Reading a pack: the front in the order of the spec (section 13), then tiles in parallel, each verified in the
buffer used.

One file descriptor, positional reads, no memory mapping: what was hashed is what is used. The front is read without
NumPy.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Protocol

from blake3 import blake3

from kvpack.errors import (
    CompatibilityError,
    DecryptError,
    FormatError,
    IntegrityError,
    KvpackError,
    ResourceError,
    UsageError,
)
from kvpack.model.geometry import Geometry, PlaneKey, Scope, Unit
from kvpack.model.identity import Identity
from kvpack.model.layout import ProducerLayout
from kvpack.model.planes import PlaneSpec
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import CutRecord, Probe, RowSink
from kvpack.pack.codecs import decode
from kvpack.pack.index import Tile, TileRecord, parse_index, require_index_hash
from kvpack.pack.manifest import Manifest
from kvpack.pack.preamble import (
    MANIFEST_OFFSET,
    PREAMBLE_BYTES,
    Limits,
    Preamble,
    pack_id,
    require_front_hash,
    signed_bytes,
)
from kvpack.pack.state_id import state_id
from kvpack.pack.writer import default_threads

__all__ = ["FrontCheck", "PackCut", "PackReader", "TileFault"]


class FrontCheck(Protocol):
    """Trust, as a reader sees it: asked at step 6 with raw bytes, and at step 9 with the decoded manifest."""

    def signatures(self, region: bytes, signed: bytes) -> None:
        """Parse the 3,968 bytes of slots and check them; raises what the policy refuses."""

    def manifest(self, manifest: Manifest) -> None:
        """The rest of the policy: scope, epoch, expiry, threshold."""


@dataclass(frozen=True)
class TileFault:
    """One bad tile, as ``verify`` reports it."""

    tile: Tile
    plane: str
    error: KvpackError


class PackReader:
    """An open pack whose front has been verified. Close it, or use it as a context manager."""

    def __init__(
        self, path: Path, *, check: FrontCheck | None = None, limits: Limits | None = None, index: bool = True
    ) -> None:
        """Open ``path`` and take steps 1 to 10 (9 without ``index``); raises with each step's own error."""
        self.path = path
        self._limits = limits or Limits()
        self._descriptor = _open(path)
        try:
            self._read_front(check)
            self._records: tuple[TileRecord, ...] | None = self._read_index() if index else None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PackReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _read_front(self, check: FrontCheck | None) -> None:
        size = os.fstat(self._descriptor).st_size
        self.preamble = Preamble.parse(_read_at(self._descriptor, 0, PREAMBLE_BYTES, short=True), size, self._limits)
        front = _read_at(self._descriptor, 0, self.preamble.index_offset)
        head, region = front[:PREAMBLE_BYTES], front[PREAMBLE_BYTES:MANIFEST_OFFSET]
        end = MANIFEST_OFFSET + self.preamble.manifest_length
        body = front[MANIFEST_OFFSET:end]
        require_front_hash(self.preamble, head, region, body)
        _require_zero(front[end:], "manifest")
        signed = signed_bytes(head, body)
        self.pack_id = pack_id(signed)
        self.signature_region = region
        if check is not None:
            check.signatures(region, signed)
        self.manifest = Manifest.parse(body, self._limits, encrypted=self.preamble.encrypted)
        if check is not None:
            check.manifest(self.manifest)

    def _read_index(self) -> tuple[TileRecord, ...]:
        preamble = self.preamble
        block = _read_at(self._descriptor, preamble.index_offset, preamble.payload_offset - preamble.index_offset)
        require_index_hash(block[: preamble.index_length], self.manifest)
        _require_zero(block[preamble.index_length :], "index")
        return parse_index(block[: preamble.index_length], preamble, self.manifest, self._limits)

    @property
    def records(self) -> tuple[TileRecord, ...]:
        """The tile index, in payload order."""
        if self._records is None:
            self._records = self._read_index()
        return self._records

    @property
    def raw_bytes(self) -> int:
        """Bytes of all stored rows."""
        return sum(plane.raw_bytes for plane in self.manifest.planes)

    @cached_property
    def tiles_of(self) -> Mapping[int, tuple[TileRecord, ...]]:
        """Plane number to its tiles in ascending order."""
        found: dict[int, list[TileRecord]] = {}
        for record in self.records:
            found.setdefault(record.tile.plane, []).append(record)
        return {plane: tuple(records) for plane, records in found.items()}

    def read_tile(self, record: TileRecord) -> memoryview:
        """Step 12 for one tile: read, hash, padding, decode, hash again; the verified raw bytes."""
        if self.preamble.encrypted:
            raise DecryptError("encrypted", "the pack is encrypted, and this version cannot open its payload")
        spec = self.manifest.planes[record.tile.plane].spec
        key = spec.key
        block = _read_at(self._descriptor, record.offset, record.padded_end - record.offset)
        stored = memoryview(block)[: record.stored_length]
        where = f"{key} rows [{record.tile.first}, {record.tile.end})"
        if blake3(stored).digest() != record.stored_hash:
            raise IntegrityError(
                "stored-hash",
                f"{where}: the stored bytes are damaged",
                layer=key.layer_or_none,
                plane=str(key),
                field=f"[{record.tile.first}, {record.tile.end})",
                expected=record.stored_hash.hex(),
                hint="copy the file again from where it was made",
            )
        if any(block[record.stored_length :]):
            raise IntegrityError(
                "tile-padding", f"{where}: the padding is not zero", layer=key.layer_or_none, plane=str(key)
            )
        shape = () if spec.unit is Unit.STATE else spec.row_shape
        try:
            raw = memoryview(decode(record.codec, stored, record.raw_length, spec.encoding, shape))
        except (FormatError, IntegrityError, CompatibilityError) as error:
            error.layer, error.plane = key.layer_or_none, str(key)
            raise
        if blake3(raw).digest() != record.raw_hash:
            raise IntegrityError(
                "raw-hash",
                f"{where}: the rows are not what was written",
                layer=key.layer_or_none,
                plane=str(key),
                expected=record.raw_hash.hex(),
            )
        return raw

    def for_tiles(
        self,
        records: Iterable[TileRecord],
        work: Callable[[TileRecord, memoryview], None],
        *,
        threads: int | None = None,
        done: Callable[[TileRecord], None] | None = None,
    ) -> None:
        """Verify tiles in parallel and hand each to ``work`` in its worker; the first error stops the rest.

        ``done`` is called in the calling thread, once a tile.
        """

        def one(record: TileRecord) -> TileRecord:
            work(record, self.read_tile(record))
            return record

        count = threads or default_threads()
        waiting = iter(records)
        with ThreadPoolExecutor(count, thread_name_prefix="kvpack-read") as pool:
            running: set[Future[TileRecord]] = set()
            try:
                for record in waiting:
                    running.add(pool.submit(one, record))
                    if len(running) >= 4 * count:
                        running = _collect(running, done)
                while running:
                    running = _collect(running, done)
            except BaseException:
                for future in running:
                    future.cancel()
                raise

    def faults(
        self, *, threads: int | None = None, done: Callable[[TileRecord], None] | None = None
    ) -> tuple[TileFault, ...]:
        """Verify every tile and report every bad one, in payload order."""
        bad: list[tuple[int, TileFault]] = []

        def one(number: int, record: TileRecord) -> TileRecord:
            try:
                self.read_tile(record)
            except (IntegrityError, FormatError, CompatibilityError) as error:
                plane = str(self.manifest.planes[record.tile.plane].spec.key)
                bad.append((number, TileFault(record.tile, plane, error)))
            return record

        count = threads or default_threads()
        with ThreadPoolExecutor(count, thread_name_prefix="kvpack-verify") as pool:
            for record in pool.map(lambda pair: one(*pair), enumerate(self.records)):
                if done is not None:
                    done(record)
        return tuple(fault for _, fault in sorted(bad, key=lambda pair: pair[0]))

    def require_state_ids(self) -> None:
        """Hold every cut's state id to the index's raw hashes and, where those do not suffice, to the rows."""
        if self.manifest.parent is None and not self.preamble.encrypted:
            for cut in self.manifest.cuts:
                PackCut(self, cut).require_state_id()

    def cut(self, position: int | None = None) -> PackCut:
        """The cut at ``position`` (the last one by default); raises CompatibilityError ``no-such-cut``."""
        record = self.manifest.cuts[-1] if position is None else self.manifest.cut_at(position)
        if record is None:
            positions = ", ".join(str(cut.position) for cut in self.manifest.cuts)
            raise CompatibilityError(
                "no-such-cut",
                f"the pack has no cut at {position}; it has {positions}",
                field="position",
                expected=positions,
                found=position,
            )
        return PackCut(self, record)


class PackCut:
    """One cut of an open pack, seen as a :class:`kvpack.model.snapshot.CutView`.

    Rows are read and verified on demand.
    """

    def __init__(self, reader: PackReader, record: CutRecord) -> None:
        """``record`` must be one of the reader's cuts."""
        self._reader = reader
        self._record = record
        self.on_bytes: Callable[[int], None] | None = None

    @property
    def geometry(self) -> Geometry:
        """The producer's geometry."""
        return self._reader.manifest.geometry

    @property
    def identity(self) -> Identity:
        """Who produced the state."""
        return self._reader.manifest.identity

    @property
    def layout(self) -> ProducerLayout:
        """How the producer placed its rows."""
        return self._reader.manifest.layout

    @property
    def record(self) -> CutRecord:
        """The cut's position and what travels with it."""
        return self._record

    @property
    def probe(self) -> Probe | None:
        """The logits that followed this cut, where the producer recorded them."""
        probe = self._reader.manifest.probe
        return probe if probe is not None and probe.position == self._record.position else None

    @cached_property
    def specs(self) -> Mapping[PlaneKey, PlaneSpec]:
        """Plane key to spec, in canonical order; session states that this cut lacks are left out."""
        return {
            plane.spec.key: plane.spec
            for plane in self._reader.manifest.planes
            if plane.spec.key.scope != Scope.SESSION.value
            or plane.spec.unit is not Unit.STATE
            or plane.spec.key.role in self._record.extras
        }

    @cached_property
    def stored(self) -> Mapping[PlaneKey, RowSet]:
        """Plane key to the rows that the pack stores; for states the bytes of this cut's own."""
        manifest = self._reader.manifest
        return {
            key: RowSet.of((0, spec.row_bytes))
            if spec.unit is Unit.STATE
            else manifest.planes[manifest.numbers[key]].rows
            for key, spec in self.specs.items()
        }

    def _wanted_tiles(self, wanted: Mapping[PlaneKey, RowSet]) -> Iterator[TileRecord]:
        manifest = self._reader.manifest
        numbers = {manifest.numbers[key]: (key, rows) for key, rows in wanted.items() if rows}
        for record in self._reader.records:
            found = numbers.get(record.tile.plane)
            if found is None:
                continue
            key, rows = found
            if self.specs[key].unit is Unit.STATE and record.tile.ordinal != manifest.ordinal(key, self._record):
                continue
            if rows.intersection(RowSet.of((record.tile.first, record.tile.end))):
                yield record

    def read_rows(self, wanted: Mapping[PlaneKey, RowSet], sink: RowSink, *, threads: int | None = None) -> None:
        """Read, verify and hand over the wanted rows, tiles in parallel (see :data:`RowSink`).

        A tile that a wanted row lies in is verified whole. Raises IntegrityError before its rows are handed over.
        """
        manifest = self._reader.manifest
        for key, rows in wanted.items():
            if not self.stored.get(key, RowSet()).contains(rows):
                raise CompatibilityError(
                    "rows-not-stored",
                    f"{key}: rows {rows} were asked for, the pack stores {self.stored.get(key, RowSet())}",
                    layer=key.layer_or_none,
                    plane=str(key),
                    field="rows",
                    expected=str(rows),
                    found=str(self.stored.get(key, RowSet())),
                )

        def hand_over(record: TileRecord, raw: memoryview) -> None:
            spec = manifest.planes[record.tile.plane].spec
            tile, size = record.tile, spec.axis_bytes
            for first, end in wanted[spec.key].intersection(RowSet.of((tile.first, tile.end))):
                sink(spec.key, first, end - first, raw[(first - tile.first) * size : (end - tile.first) * size])

        def count(record: TileRecord) -> None:
            if self.on_bytes is not None:
                self.on_bytes(record.raw_length)

        self._reader.for_tiles(self._wanted_tiles(wanted), hand_over, threads=threads, done=count)

    def bytes_to_read(self, wanted: Mapping[PlaneKey, RowSet]) -> int:
        """Raw bytes of the tiles that :meth:`read_rows` would verify for ``wanted``."""
        return sum(record.raw_length for record in self._wanted_tiles(wanted))

    def require_state_id(self) -> None:
        """Hold the cut's state id to the raw hashes of the index, reading only pieces that lie in several tiles.

        The raw hashes are those that every tile is verified against, so a restore that read all tiles has the state
        that the id names.
        """
        found = state_id(self._reader.manifest, self._record, self._piece_hash)
        if found != self._record.state_id:
            raise IntegrityError(
                "state-id",
                f"the rows at position {self._record.position} are not the state that the pack names",
                field="state_id",
                expected=self._record.state_id.hex(),
                found=found.hex(),
            )

    @cached_property
    def _tiles(self) -> Mapping[tuple[int, int, int, int], TileRecord]:
        return {(r.tile.plane, r.tile.ordinal, r.tile.first, r.tile.end): r for r in self._reader.records}

    def _piece_hash(self, key: PlaneKey, first: int, end: int) -> bytes:
        manifest = self._reader.manifest
        number = manifest.numbers[key]
        ordinal = manifest.ordinal(key, self._record) if self.specs[key].unit is Unit.STATE else 0
        whole = self._tiles.get((number, ordinal, first, end))
        if whole is not None:
            return whole.raw_hash
        hasher = blake3()
        for record in self._reader.tiles_of.get(number, ()):
            if record.tile.ordinal == ordinal and first <= record.tile.first < end:
                hasher.update(self._reader.read_tile(record))
        return hasher.digest()


def _collect(running: set[Future[TileRecord]], done: Callable[[TileRecord], None] | None) -> set[Future[TileRecord]]:
    finished, left = wait(running, return_when=FIRST_EXCEPTION, timeout=0.05)
    for future in finished:
        record = future.result()
        if done is not None:
            done(record)
    return left


def _open(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UsageError("no-such-file", f"there is no file {path}", found=str(path)) from None
    except OSError as error:
        raise ResourceError("unreadable", f"{path}: {error.strerror}", found=str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UsageError("not-a-file", f"{path} is not a regular file", found=str(path))
    return descriptor


def _read_at(descriptor: int, offset: int, length: int, *, short: bool = False) -> bytes:
    parts: list[bytes] = []
    left = length
    while left:
        try:
            part = os.pread(descriptor, left, offset)
        except OSError as error:
            raise ResourceError("io-error", f"reading the pack failed: {error.strerror}") from None
        if not part:
            break
        parts.append(part)
        offset, left = offset + len(part), left - len(part)
    if left and not short:
        raise FormatError(
            "truncated", "the file became shorter while it was read", expected=length, found=length - left
        )
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _require_zero(padding: bytes, what: str) -> None:
    if any(padding):
        raise IntegrityError("front-padding", f"the padding after the {what} is not zero", field=what)
