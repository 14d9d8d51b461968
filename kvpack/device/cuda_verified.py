"""Rows that are verified where they arrive: read into pinned memory, copied, hashed on the device, then scattered.

While the host reads one chunk, the copy stream brings the one before and the work stream hashes it; a chunk is
scattered once the host has seen its digests and accepted them. What orders it, for a chunk's slot, beyond what
:mod:`kvpack.device.cuda_pipeline` says:

- hashing waits for ``copied``;
- the host reads digests only after ``hashed``, the event behind their copy;
- the launch that scatters is enqueued only after every digest of its chunk was accepted.

A chunk is scattered before the next one is hashed: the copy stream then needs no hash to go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvpack.device.cuda_moves import Piece, joined, pieces
from kvpack.device.cuda_pipeline import JOB_BYTES, Pipeline, Slot, aligned
from kvpack.device.cuda_runtime import CudaRuntime
from kvpack.device.protocol import Unverified

__all__ = ["VerifiedChunks", "space_of"]

DIGEST_BYTES: Final = 32
HASH_JOB_BYTES: Final = 32
READERS: Final = 8
"""Reads at once: what keeps a drive's queue filled; copies out of a page cache need fewer."""


def _pieces_of(parcel: Unverified, slot_bytes: int) -> list[Piece]:
    return [piece for move in joined(parcel.moves) for piece in pieces(move, slot_bytes)]


def _hash_tiles(nbytes: int) -> int:
    from kvpack_kernels.abi import CHUNK_BYTES, THREADS

    return max(1, -(-nbytes // (THREADS * CHUNK_BYTES)))


def _space(parcel: Unverified, of_pieces: Sequence[Piece]) -> int:
    tables = sum(aligned(piece.page_bytes) + JOB_BYTES for piece in of_pieces) + HASH_JOB_BYTES
    return aligned(parcel.nbytes) + tables + DIGEST_BYTES * (_hash_tiles(parcel.nbytes) + 1)


def space_of(parcel: Unverified, slot_bytes: int) -> int:
    """Bytes that a parcel takes in a chunk: rows, block tables, jobs, nodes of its hash and its digest."""
    return _space(parcel, _pieces_of(parcel, slot_bytes))


@dataclass(frozen=True)
class _Placed:
    """A parcel and where its rows lie in a chunk."""

    parcel: Unverified
    pieces: Sequence[Piece]
    start: int


@dataclass(frozen=True)
class _Tables:
    """Where a chunk's tables lie, and what they hold."""

    moves_at: int
    moves: int
    move_tiles: int
    hashes_at: int
    hash_tiles: int
    nodes_at: int
    digests_at: int


class _Chunk:
    """One chunk on its way."""

    def __init__(self, runtime: CudaRuntime, pipeline: Pipeline, slot: Slot, batch: Sequence[_Placed]) -> None:
        self._runtime, self._pipeline, self._slot, self._batch = runtime, pipeline, slot, batch

    def read(self, readers: ThreadPoolExecutor) -> None:
        """Have every parcel read; nobody writes to the pinned memory any more when it returns or raises."""
        running = []
        try:
            for placed in self._batch:
                target = self._slot.memory[placed.start : placed.start + placed.parcel.nbytes]
                running.append(readers.submit(placed.parcel.read_into, target.data))
            for each in running:
                each.result()
        finally:
            for each in running:
                each.cancel()
            wait(running)

    def copy(self) -> None:
        """Rows and tables onto the device."""
        self._tables = tables = self._write_tables()
        runtime, slot, stream = self._runtime, self._slot, self._pipeline.copy_stream
        runtime.wait(stream, slot.moved)
        runtime.to_device(slot.device, slot.pinned, tables.nodes_at, stream)
        runtime.record(slot.copied, stream)

    def hash(self) -> None:
        """Digests of the rows as they lie on the device, and their copy to the host."""
        runtime, slot, tables = self._runtime, self._slot, self._tables
        stream, count = self._pipeline.work_stream, len(self._batch)
        jobs, nodes = np.uint64(slot.device + tables.hashes_at), np.uint64(slot.device + tables.nodes_at)
        digests = slot.device + tables.digests_at
        runtime.wait(stream, slot.copied)
        self._pipeline.launch("blake3", "kvpack_hash_tiles", tables.hash_tiles, jobs, np.uint32(count), nodes)
        self._pipeline.launch("blake3", "kvpack_hash_roots", count, jobs, nodes, np.uint64(digests))
        runtime.to_host(slot.pinned + tables.digests_at, digests, DIGEST_BYTES * count, stream)
        runtime.record(slot.hashed, stream)

    def conclude(self) -> None:
        """Scatter the rows, once every digest is accepted."""
        runtime, slot, tables = self._runtime, self._slot, self._tables
        runtime.finish(slot.hashed)
        found = slot.memory[tables.digests_at : tables.digests_at + DIGEST_BYTES * len(self._batch)].tobytes()
        for number, placed in enumerate(self._batch):
            placed.parcel.accept(found[DIGEST_BYTES * number : DIGEST_BYTES * (number + 1)])
        address, count = np.uint64(slot.device + tables.moves_at), np.uint32(tables.moves)
        self._pipeline.launch("move", "kvpack_scatter", tables.move_tiles, address, count)
        runtime.record(slot.moved, self._pipeline.work_stream)

    def _write_tables(self) -> _Tables:
        """Block tables, jobs of the scatter and jobs of the hashes behind the rows, so that one copy brings all."""
        from kvpack_kernels import abi

        slot, last = self._slot, self._batch[-1]
        at = aligned(last.start + last.parcel.nbytes)
        jobs: list[tuple[Any, int]] = []
        for placed in self._batch:
            for piece in placed.pieces:
                jobs.append((piece.rows(slot.device + at), slot.device + placed.start + piece.move.packed_offset))
                if piece.pages is not None:
                    slot.memory[at : at + piece.page_bytes] = piece.pages.view(np.uint8)
                    at = aligned(at + piece.page_bytes)
        moves, move_tiles = abi.move_table(jobs)
        messages = [(slot.device + placed.start, placed.parcel.nbytes) for placed in self._batch]
        hashes, hash_tiles = abi.hash_table(messages)
        moves_at, hashes_at = at, aligned(at + moves.nbytes)
        slot.memory[moves_at : moves_at + moves.nbytes] = moves.view(np.uint8)
        slot.memory[hashes_at : hashes_at + hashes.nbytes] = hashes.view(np.uint8)
        nodes_at = aligned(hashes_at + hashes.nbytes)
        digests_at = nodes_at + DIGEST_BYTES * hash_tiles
        return _Tables(moves_at, len(moves), move_tiles, hashes_at, hash_tiles, nodes_at, digests_at)


class VerifiedChunks:
    """Parcels through the chunks of a device."""

    def __init__(self, runtime: CudaRuntime, pipeline: Pipeline) -> None:
        self._runtime, self._pipeline = runtime, pipeline

    def run(self, parcels: Sequence[Unverified]) -> None:
        """Bring all parcels; each must fit a chunk, and no two may write the same byte."""
        with ThreadPoolExecutor(READERS, thread_name_prefix="kvpack-raw") as readers, self._pipeline.chunks() as slots:
            before: _Chunk | None = None
            for turn, batch in enumerate(self._batches(parcels)):
                chunk = self._open(slots[turn % len(slots)], batch)
                chunk.read(readers)
                chunk.copy()
                if before is not None:
                    before.conclude()
                chunk.hash()
                before = chunk
            if before is not None:
                before.conclude()

    def _open(self, slot: Slot, batch: Sequence[_Placed]) -> _Chunk:
        """A slot to be filled: what was asked for before may still be on its way out of its pinned memory."""
        self._runtime.finish(slot.copied)
        return _Chunk(self._runtime, self._pipeline, slot, batch)

    def _batches(self, parcels: Sequence[Unverified]) -> Iterator[list[_Placed]]:
        most = self._pipeline.slot_bytes
        batch: list[_Placed] = []
        used = start = 0
        for parcel in parcels:
            parts = _pieces_of(parcel, most)
            size = _space(parcel, parts)
            if batch and used + size > most:
                yield batch
                batch, used, start = [], 0, 0
            batch.append(_Placed(parcel, parts, start))
            used, start = used + size, start + aligned(parcel.nbytes)
        if batch:
            yield batch
