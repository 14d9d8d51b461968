"""Writing a pack: tiles in parallel, offsets in order, the front last, and one atomic publication.

The file is built under a private name in the destination's folder (mode 0600) and appears under its own name only
when it is whole and on disk. The same contents, salt, time and codec give the same file, however many threads wrote it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from kvpack.errors import FormatError, KvpackError, ResourceError, UsageError
from kvpack.model.geometry import PlaneKey, Unit
from kvpack.pack.codecs import encode
from kvpack.pack.index import Tile, TileRecord, expected_tiles, index_hash, payload_order
from kvpack.pack.manifest import Manifest
from kvpack.pack.preamble import (
    MANIFEST_OFFSET,
    PREAMBLE_BYTES,
    TILE_ALIGN,
    Limits,
    Preamble,
    align,
    front_hash,
    pack_id,
    signed_bytes,
)
from kvpack.pack.state_id import state_id

__all__ = [
    "EncodedTile",
    "Progress",
    "RowSource",
    "Signer",
    "TileCopy",
    "WrittenPack",
    "default_threads",
    "publish",
    "resource_error",
    "write_into",
    "write_pack",
]

SIGNATURE_REGION = MANIFEST_OFFSET - PREAMBLE_BYTES


class RowSource(Protocol):
    """Where rows come from; called from several threads at once."""

    def rows(self, key: PlaneKey, ordinal: int, first: int, end: int) -> memoryview:
        """The raw bytes of rows ``[first, end)``, or of bytes ``[first, end)`` of state ``ordinal``."""


class Signer(Protocol):
    """Turns the signed bytes of a front into its signature region (3,968 bytes)."""

    def __call__(self, signed: bytes) -> bytes:
        """Sign."""


Progress = Callable[[int, int], None]
"""Called with (raw bytes done, raw bytes in all), from the writing thread only."""


@dataclass(frozen=True)
class WrittenPack:
    """What was written. Sizes in bytes; ``state_ids`` by position."""

    path: Path
    pack_id: bytes
    file_bytes: int
    raw_bytes: int
    stored_bytes: int
    tiles: int
    state_ids: dict[int, bytes]


def write_pack(
    path: Path,
    manifest: Manifest,
    source: RowSource,
    *,
    codec: str,
    signer: Signer | None = None,
    force: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> WrittenPack:
    """Write ``manifest`` (hashes and state ids still empty) and the rows of ``source`` to ``path``.

    Raises UsageError ``output-exists`` unless ``force``; ResourceError for a full or read-only disk. Whatever happens,
    no half-written file is visible under ``path``, and no temporary is left behind.
    """
    with publish(path, force=force) as descriptor:
        return write_into(
            descriptor, path, manifest, source, codec=codec, signer=signer, threads=threads, progress=progress
        )


def default_threads() -> int:
    """One thread a core that this process may use, at most 16: beyond that one memory bus is full."""
    return max(1, min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


@contextlib.contextmanager
def publish(path: Path, *, force: bool) -> Iterator[int]:
    """A private temporary beside ``path``; on success it is synced and takes the name, otherwise it is gone."""
    if not force and os.path.lexists(path):
        raise UsageError("output-exists", f"{path} exists", found=str(path), hint="choose another name, or use --force")
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise UsageError("no-such-folder", f"there is no folder {path.parent}", found=str(path.parent)) from None
    except OSError as error:
        raise resource_error(error, path) from None
    try:
        try:
            yield descriptor
            os.fsync(descriptor)
        except OSError as error:
            raise resource_error(error, path) from None
        finally:
            os.close(descriptor)
        _name(temporary, path, force=force)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _name(temporary: Path, path: Path, *, force: bool) -> None:
    try:
        if force:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except FileExistsError:
        raise UsageError(
            "output-exists", f"{path} exists", found=str(path), hint="choose another name, or use --force"
        ) from None
    except OSError as error:
        raise resource_error(error, path) from None


def resource_error(error: OSError, path: Path) -> KvpackError:
    """An operating system's refusal as the family that it belongs to."""
    hints = {
        errno.ENOSPC: ("disk-full", "free some space, or write elsewhere"),
        errno.EDQUOT: ("disk-full", "free some space, or write elsewhere"),
        errno.EROFS: ("read-only", "write to another place"),
        errno.EACCES: ("permission-denied", "check the permissions"),
        errno.EPERM: ("permission-denied", "check the permissions; --force where the file system has no hard links"),
    }
    code, hint = hints.get(error.errno or 0, ("io-error", "check the disk"))
    return ResourceError(code, f"{path}: {error.strerror or error}", found=str(path), hint=hint)


@dataclass(frozen=True)
class EncodedTile:
    """A tile as it is stored: codec id, stored bytes, raw length in bytes, BLAKE3 of stored and of raw bytes."""

    tile: Tile
    codec: int
    stored: memoryview
    raw_length: int
    stored_hash: bytes
    raw_hash: bytes


TileCopy = Callable[[Tile], EncodedTile | None]
"""A verified tile that is stored elsewhere, or None where it has to be encoded; called from several threads."""


def write_into(
    descriptor: int,
    path: Path,
    manifest: Manifest,
    source: RowSource,
    *,
    codec: str,
    signer: Signer | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    copy: TileCopy | None = None,
) -> WrittenPack:
    """Write a pack into an open, empty file; syncing and naming it (``path``) are the caller's.

    ``copy`` hands over tiles that are stored elsewhere, so that they are not encoded again. Raises OSError as the
    operating system does.
    """
    threads = threads or default_threads()
    tiles = payload_order(expected_tiles(manifest), manifest)
    _require_limits(manifest, tiles)
    hollow = manifest.with_hashes(bytes(32), {cut.position: bytes(32) for cut in manifest.cuts})
    front = Preamble.for_front(manifest_length=len(hollow.to_bytes()), tile_count=len(tiles))
    raw_total = sum(plane.raw_bytes for plane in manifest.planes)

    def encode_tile(tile: Tile) -> EncodedTile:
        copied = copy(tile) if copy is not None else None
        if copied is not None:
            return copied
        spec = manifest.planes[tile.plane].spec
        raw = source.rows(spec.key, tile.ordinal, tile.first, tile.end)
        raw_hash = blake3(raw).digest()
        shape = () if spec.unit is Unit.STATE else spec.row_shape
        codec_id, stored = encode(codec, raw, spec.encoding, shape)
        stored_hash = raw_hash if codec_id == 0 else blake3(stored).digest()
        return EncodedTile(tile, codec_id, memoryview(stored), raw.nbytes, stored_hash, raw_hash)

    records: list[TileRecord] = []
    raw_done, at = 0, front.payload_offset
    with ThreadPoolExecutor(threads, thread_name_prefix="kvpack-write") as pool:
        writes: deque[Future[None]] = deque()
        try:
            for encoded in _in_order(pool, encode_tile, tiles, window=2 * threads):
                record = TileRecord(
                    encoded.tile,
                    at,
                    encoded.stored.nbytes,
                    encoded.raw_length,
                    encoded.codec,
                    0,
                    encoded.stored_hash,
                    encoded.raw_hash,
                )
                records.append(record)
                at = record.padded_end
                writes.append(pool.submit(_write_at, descriptor, encoded.stored, record.offset))
                while len(writes) > 2 * threads or (writes and writes[0].done()):
                    writes.popleft().result()
                raw_done += encoded.raw_length
                if progress is not None:
                    progress(raw_done, raw_total)
            while writes:
                writes.popleft().result()
        except BaseException:
            for write in writes:
                write.cancel()
            raise
    os.truncate(descriptor, at)
    index = b"".join(r.to_bytes(is_state=manifest.planes[r.tile.plane].spec.unit is Unit.STATE) for r in records)
    state_ids = _state_ids(manifest, records, source)
    body = manifest.with_hashes(index_hash(index), state_ids).to_bytes()
    identifier = _write_front(descriptor, replace(front, file_length=at), body, index, signer)
    return WrittenPack(
        path=path,
        pack_id=identifier,
        file_bytes=at,
        raw_bytes=raw_total,
        stored_bytes=sum(r.stored_length for r in records),
        tiles=len(records),
        state_ids=state_ids,
    )


def _require_limits(manifest: Manifest, tiles: Sequence[Tile]) -> None:
    limits = Limits()
    for tile in tiles:
        spec = manifest.planes[tile.plane].spec
        size = (tile.end - tile.first) * spec.axis_bytes
        if size > limits.raw_tile_bytes:
            raise FormatError(
                "limit-exceeded",
                f"{spec.key}: one row has {size} bytes, and a tile at most {limits.raw_tile_bytes}",
                plane=str(spec.key),
                expected=limits.raw_tile_bytes,
                found=size,
            )
    if len(tiles) > limits.tiles:
        raise FormatError(
            "limit-exceeded", f"the pack would have {len(tiles)} tiles", expected=limits.tiles, found=len(tiles)
        )


def _in_order(
    pool: ThreadPoolExecutor, work: Callable[[Tile], EncodedTile], tiles: Sequence[Tile], *, window: int
) -> Iterator[EncodedTile]:
    pending: deque[Future[EncodedTile]] = deque()
    waiting = iter(tiles)
    try:
        for tile in waiting:
            pending.append(pool.submit(work, tile))
            if len(pending) >= window:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def _write_at(descriptor: int, buffer: memoryview | bytes, offset: int) -> None:
    view = memoryview(buffer).cast("B")
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _state_ids(manifest: Manifest, records: Sequence[TileRecord], source: RowSource) -> dict[int, bytes]:
    known = {(r.tile.plane, r.tile.ordinal, r.tile.first, r.tile.end): r.raw_hash for r in records}
    ids: dict[int, bytes] = {}
    for cut in manifest.cuts:

        def piece_hash(key: PlaneKey, first: int, end: int, cut_position: int = cut.position) -> bytes:
            number = manifest.numbers[key]
            here = manifest.cut_at(cut_position)
            assert here is not None
            is_state = manifest.planes[number].spec.unit is Unit.STATE
            ordinal = manifest.ordinal(key, here) if is_state else 0
            found = known.get((number, ordinal, first, end))
            return found if found is not None else blake3(source.rows(key, ordinal, first, end)).digest()

        ids[cut.position] = state_id(manifest, cut, piece_hash)
    return ids


def _write_front(descriptor: int, preamble: Preamble, manifest: bytes, index: bytes, signer: Signer | None) -> bytes:
    signed = signed_bytes(preamble.to_bytes(), manifest)
    signatures = signer(signed) if signer is not None else bytes(SIGNATURE_REGION)
    head = replace(preamble, front_hash=front_hash(preamble.to_bytes(), signatures, manifest)).to_bytes()
    body = head + signatures + manifest
    body += bytes(preamble.index_offset - len(body)) + index
    body += bytes(align(len(body), TILE_ALIGN) - len(body))
    _write_at(descriptor, body, 0)
    return pack_id(signed)
