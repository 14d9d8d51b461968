"""Reading a pack: the front in the order of the spec (section 13), then tiles in parallel, each verified in the
buffer used.

One file descriptor, positional reads, no memory mapping: what was hashed is what is used. The front is read without
NumPy.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping
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
from kvpack.model.geometry import Unit
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
from kvpack.pack.writer import default_threads

__all__ = ["ByteSource", "FrontCheck", "PackReader", "TileFault"]


class ByteSource(Protocol):
    """Where the bytes of a pack lie when that is not a file of this machine; read from several threads at once."""

    threads: int
    """How many reads may run at once: what is far away wants more than there are cores."""

    @property
    def size(self) -> int:
        """Length in bytes."""

    def read_at(self, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset`` on, fewer only at the end; raises KvpackError."""

    def close(self) -> None:
        """Give back what it holds; closing twice is fine."""


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
        self,
        path: Path,
        *,
        check: FrontCheck | None = None,
        limits: Limits | None = None,
        index: bool = True,
        source: ByteSource | None = None,
    ) -> None:
        """Open ``path`` and take steps 1 to 10 (9 without ``index``); raises with each step's own error.

        With ``source`` the bytes come from there, and ``path`` only names the pack in messages.
        """
        self.path = path
        self._limits = limits or Limits()
        self._source: ByteSource = source if source is not None else _FileSource(path)
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
        self._source.close()

    def _read_front(self, check: FrontCheck | None) -> None:
        head = self._source.read_at(0, PREAMBLE_BYTES)
        self.preamble = Preamble.parse(head, self._source.size, self._limits)
        front = self._read_at(0, self.preamble.index_offset)
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

    def _read_at(self, offset: int, length: int) -> bytes:
        block = self._source.read_at(offset, length)
        if len(block) < length:
            raise _truncated(length, len(block))
        return block

    def _read_index(self) -> tuple[TileRecord, ...]:
        preamble = self.preamble
        block = self._read_at(preamble.index_offset, preamble.payload_offset - preamble.index_offset)
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

    @cached_property
    def tile_at(self) -> Mapping[tuple[int, int, int, int], TileRecord]:
        """(plane number, state ordinal, first, end) to the tile that is exactly this piece."""
        return {(r.tile.plane, r.tile.ordinal, r.tile.first, r.tile.end): r for r in self.records}

    def read_stored(self, record: TileRecord) -> memoryview:
        """The stored bytes of one tile, held to their hash and padding; needs no key and decodes nothing."""
        block = self._read_at(record.offset, record.padded_end - record.offset)
        stored = memoryview(block)[: record.stored_length]
        self.require_stored(record, blake3(stored).digest(), block[record.stored_length :])
        return stored

    def require_stored(self, record: TileRecord, digest: bytes, padding: bytes) -> None:
        """Hold a tile that was read to its record. Raises IntegrityError ``stored-hash``, ``tile-padding``."""
        key = self.manifest.planes[record.tile.plane].spec.key
        where = f"{key} rows [{record.tile.first}, {record.tile.end})"
        if digest != record.stored_hash:
            raise IntegrityError(
                "stored-hash",
                f"{where}: the stored bytes are damaged",
                layer=key.layer_or_none,
                plane=str(key),
                field=f"[{record.tile.first}, {record.tile.end})",
                expected=record.stored_hash.hex(),
                hint="copy the file again from where it was made",
            )
        if any(padding):
            raise IntegrityError(
                "tile-padding", f"{where}: the padding is not zero", layer=key.layer_or_none, plane=str(key)
            )

    def is_plain(self, record: TileRecord) -> bool:
        """Whether :meth:`read_into` gives a tile's raw rows: a raw tile, not encrypted, of a file of this machine.

        Then its two hashes are one; a tile of which they differ is refused by :meth:`read_tile`.
        """
        raw = record.codec == 0 and record.stored_hash == record.raw_hash and not self.preamble.encrypted
        return raw and isinstance(self._source, _FileSource)

    def read_into(self, record: TileRecord, target: memoryview) -> bytes:
        """Read a plain tile's rows into ``target``, unverified; its padding, for :meth:`require_stored`."""
        assert isinstance(self._source, _FileSource)
        found = self._source.read_into(record.offset, target)
        if found < target.nbytes:
            raise _truncated(target.nbytes, found)
        end = record.offset + record.stored_length
        return self._read_at(end, record.padded_end - end)

    def front_bytes(self) -> bytes:
        """The front as it is stored: everything before the first tile."""
        return self._read_at(0, self.preamble.payload_offset)

    def for_stored(self, records: Iterable[TileRecord], *, threads: int | None = None) -> None:
        """Hold the stored bytes of tiles to their hashes, in parallel; needs no key. The first error stops the rest."""

        def one(record: TileRecord) -> None:
            self.read_stored(record)

        with ThreadPoolExecutor(threads or self._source.threads, thread_name_prefix="kvpack-check") as pool:
            running = [pool.submit(one, record) for record in records]
            try:
                for future in running:
                    future.result()
            except BaseException:
                for future in running:
                    future.cancel()
                raise

    def read_tile(self, record: TileRecord) -> memoryview:
        """Step 12 for one tile: read, hash, padding, decode, hash again; the verified raw bytes."""
        if self.preamble.encrypted:
            raise DecryptError("encrypted", "the pack is encrypted, and this version cannot open its payload")
        spec = self.manifest.planes[record.tile.plane].spec
        key = spec.key
        stored = self.read_stored(record)
        where = f"{key} rows [{record.tile.first}, {record.tile.end})"
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

        count = threads or self._source.threads
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

        count = threads or self._source.threads
        with ThreadPoolExecutor(count, thread_name_prefix="kvpack-verify") as pool:
            for record in pool.map(lambda pair: one(*pair), enumerate(self.records)):
                if done is not None:
                    done(record)
        return tuple(fault for _, fault in sorted(bad, key=lambda pair: pair[0]))


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


class _FileSource:
    """A regular file, by positional reads on one descriptor."""

    def __init__(self, path: Path) -> None:
        self.threads = default_threads()
        self._descriptor = _open(path)

    @property
    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read_at(self, offset: int, length: int) -> bytes:
        parts: list[bytes] = []
        left = length
        while left:
            try:
                part = os.pread(self._descriptor, left, offset)
            except OSError as error:
                raise ResourceError("io-error", f"reading the pack failed: {error.strerror}") from None
            if not part:
                break
            parts.append(part)
            offset, left = offset + len(part), left - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, offset: int, target: memoryview) -> int:
        """Fill ``target`` from ``offset`` on; how many bytes there were."""
        done = 0
        while done < target.nbytes:
            try:
                count = os.preadv(self._descriptor, [target[done:]], offset + done)
            except OSError as error:
                raise ResourceError("io-error", f"reading the pack failed: {error.strerror}") from None
            if not count:
                break
            done += count
        return done


def _truncated(expected: int, found: int) -> FormatError:
    return FormatError("truncated", "the file became shorter while it was read", expected=expected, found=found)


def _require_zero(padding: bytes, what: str) -> None:
    if any(padding):
        raise IntegrityError("front-padding", f"the padding after the {what} is not zero", field=what)
