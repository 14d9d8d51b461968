"""Fetching a pack from a bucket into a file: the front first, then runs of tiles at once, each tile verified on the
way.

What has arrived lies in a hidden file beside the destination, named after the pack. A pull that was cut off goes on
there: whichever tiles in it have the right hash are not fetched again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from kvpack.errors import IntegrityError, KvpackError, StoreError, UsageError
from kvpack.pack.index import TileRecord
from kvpack.pack.reader import FrontCheck, PackReader
from kvpack.pack.writer import resource_error
from kvpack.store.bucket import Bucket
from kvpack.store.remote_source import object_name, open_remote

__all__ = ["Pulled", "fetch_into", "pull"]

_RUN_BYTES: Final = 16 << 20
_PARALLEL: Final = 4


@dataclass(frozen=True)
class Pulled:
    """What a pull did: bytes of the pack, and how many of them were there from an earlier try."""

    pack_id: bytes
    file_bytes: int
    resumed_bytes: int


def pull(
    bucket: Bucket,
    pack_id: bytes,
    path: Path,
    *,
    force: bool = False,
    check: FrontCheck | None = None,
    accept: Callable[[PackReader], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Pulled:
    """Fetch a pack to ``path``, every stored byte verified; ``accept`` may refuse it from its front alone.

    Raises StoreError ``no-such-pack``, ``unreachable``, …; UsageError ``output-exists``, ``busy``; what the reader and
    ``accept`` raise. Whatever fails, ``path`` is as it was, and the next pull goes on from what has arrived.
    """
    if not force and os.path.lexists(path):
        raise UsageError("output-exists", f"{path} exists", found=str(path), hint="choose another name, or use --force")
    try:
        reader = open_remote(bucket, pack_id, check)
    except FileNotFoundError:
        raise StoreError("no-such-pack", f"{bucket.url} has no such pack", found=pack_id.hex()) from None
    with reader:
        if accept is not None:
            accept(reader)
        partial = path.parent / f".{path.name}.{pack_id.hex()[:16]}.partial"
        try:
            with _private(partial) as descriptor:
                resumed = _Fetch(bucket, reader, descriptor, progress).run()
                os.fsync(descriptor)
                _name(partial, path, force=force)
        except FileNotFoundError:
            raise UsageError("no-such-folder", f"there is no folder {path.parent}", found=str(path.parent)) from None
        except OSError as error:
            raise resource_error(error, path) from None
        return Pulled(pack_id, reader.preamble.file_length, resumed)


def fetch_into(bucket: Bucket, pack_id: bytes, descriptor: int) -> None:
    """Fetch a pack into an open file, every stored byte verified; raises FileNotFoundError and as :func:`pull` does."""
    with open_remote(bucket, pack_id) as reader:
        _Fetch(bucket, reader, descriptor, None).run()


@contextlib.contextmanager
def _private(partial: Path) -> Iterator[int]:
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError("busy", f"another process is pulling to {partial.name}", found=str(partial)) from None
        yield descriptor
    finally:
        os.close(descriptor)


def _name(partial: Path, path: Path, *, force: bool) -> None:
    if force:
        os.replace(partial, path)
    else:
        try:
            os.link(partial, path)
        except FileExistsError:
            raise UsageError("output-exists", f"{path} exists", found=str(path), hint="use --force") from None
        os.unlink(partial)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class _Fetch:
    def __init__(
        self, bucket: Bucket, reader: PackReader, descriptor: int, progress: Callable[[int, int], None] | None
    ) -> None:
        self._bucket = bucket
        self._reader = reader
        self._descriptor = descriptor
        self._progress = progress or (lambda done, total: None)
        self._name = object_name(reader.pack_id)
        self._size = reader.preamble.file_length

    def run(self) -> int:
        had = os.fstat(self._descriptor).st_size
        os.ftruncate(self._descriptor, self._size)
        self._write(0, self._reader.front_bytes())
        done = self._reader.preamble.payload_offset
        resumed = 0
        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="kvpack-pull") as pool:
            running = {pool.submit(self._one, run, had) for run in _runs(self._reader.records)}
            try:
                while running:
                    finished, running = wait(running, return_when=FIRST_EXCEPTION, timeout=0.1)
                    for future in finished:
                        fetched, present = future.result()
                        resumed += present
                        done += fetched + present
                    self._progress(done, self._size)
            except BaseException:
                for future in running:
                    future.cancel()
                raise
        return resumed

    def _one(self, run: Sequence[TileRecord], had: int) -> tuple[int, int]:
        """Fetch what is missing of a run of tiles; bytes fetched and bytes that were there."""
        missing = [record for record in run if not self._is_here(record, had)]
        total = sum(record.padded_end - record.offset for record in run)
        fetched = 0
        for part in _runs(missing):
            first, end = part[0].offset, part[-1].padded_end
            found = self._bucket.read(self._name, first, end - first)
            if found is None:
                raise StoreError("no-such-pack", "the pack was removed while it was fetched", found=self._name)
            block = memoryview(found[0])
            for record in part:
                _require_tile(record, block[record.offset - first : record.padded_end - first])
            self._write(first, block)
            fetched += end - first
        return fetched, total - fetched

    def _is_here(self, record: TileRecord, had: int) -> bool:
        if record.padded_end > had:
            return False
        block = os.pread(self._descriptor, record.padded_end - record.offset, record.offset)
        try:
            _require_tile(record, memoryview(block))
        except KvpackError:
            return False
        return True

    def _write(self, offset: int, block: Any) -> None:
        view = memoryview(block)
        while view:
            written = os.pwrite(self._descriptor, view, offset)
            view, offset = view[written:], offset + written


def _require_tile(record: TileRecord, block: memoryview) -> None:
    """Hold a tile to its hash and its padding to zero."""
    whole = len(block) == record.padded_end - record.offset
    if not whole or blake3(block[: record.stored_length]).digest() != record.stored_hash:
        raise IntegrityError(
            "stored-hash", "a tile that arrived is damaged", expected=record.stored_hash.hex(), hint="pull again"
        )
    if any(block[record.stored_length :]):
        raise IntegrityError("tile-padding", "the padding of a tile that arrived is not zero")


def _runs(records: Sequence[TileRecord]) -> Iterator[list[TileRecord]]:
    """Neighbours in the file, some mebibytes at a time."""
    run: list[TileRecord] = []
    for record in records:
        if run and (run[-1].padded_end != record.offset or record.padded_end - run[0].offset > _RUN_BYTES):
            yield run
            run = []
        run.append(record)
    if run:
        yield run
