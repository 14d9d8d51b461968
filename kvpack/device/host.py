"""The host device: planes in main memory, moved by NumPy. The default, and the oracle of every other device.

Each operation is checked whole before it touches a byte, so a refusal leaves every buffer as it was; the codes are in
:mod:`kvpack.device.checks`. A large move is cut into pieces that a few threads copy at once: NumPy releases the
interpreter's lock while it copies.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvpack.device.checks import (
    check_extent,
    check_moves,
    check_packed_disjoint,
    check_places_disjoint,
    check_separate,
    check_stage,
    extent,
    refused,
)
from kvpack.device.protocol import Buffer, Move, RowStrides
from kvpack.device.quantise import dequantise, is_readable, is_writable, quantise
from kvpack.device.staging import Stage
from kvpack.errors import CompatibilityError, EngineError, ResourceError
from kvpack.model.encoding import ENCODINGS, Encoding

__all__ = ["HostBuffer", "HostDevice"]

Bytes: TypeAlias = NDArray[np.uint8]

ALIGNMENT: Final = 64
PIECE_BYTES: Final = 1 << 21
SHORT_RUN_BYTES: Final = 1 << 16
THREADED_BYTES: Final = 1 << 23
MAX_THREADS: Final = 8
CONVERTED_ELEMENTS: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class Piece:
    """Two views of equal item size: ``places[picks]``, or all of ``places``, and the ``rows`` that belong there."""

    places: NDArray[np.void] | Bytes
    rows: NDArray[np.void] | Bytes
    picks: NDArray[np.int64] | None = None

    def scatter(self) -> None:
        """Rows into their places."""
        if self.picks is None:
            np.copyto(self.places, self.rows)
        else:
            self.places[self.picks] = self.rows

    def gather(self) -> None:
        """Rows out of their places."""
        np.copyto(self.rows, self.places if self.picks is None else self.places[self.picks])


class HostBuffer:
    """Bytes in main memory, made by :meth:`HostDevice.allocate` or :meth:`HostDevice.wrap`."""

    def __init__(self, array: Bytes) -> None:
        self._array: Bytes | None = array

    @property
    def array(self) -> Bytes:
        """The memory itself: uint8 [nbytes]. Raises EngineError ``released-memory`` after a release."""
        if self._array is None:
            raise EngineError("released-memory", "the buffer was released and can no longer be used")
        return self._array

    @property
    def nbytes(self) -> int:
        """Length in bytes; EngineError ``released-memory`` after a release."""
        return self.array.nbytes

    @property
    def address(self) -> int:
        """Where the first byte lies in this process."""
        return _address(self.array)

    def release(self) -> None:
        """Let go of the memory; every later use is refused. A second release changes nothing."""
        self._array = None


class HostDevice:
    """Main memory. Each operation is done when it returns, so there is nothing to wait for.

    ``threads`` bounds how many copy at once; without it, one a usable core and at most eight.

    A buffer that no host device made is an EngineError ``unregistered-memory``, one that was released an EngineError
    ``released-memory``. Host bytes that are not contiguous, or read-only where they are written, are an InstallError
    ``not-contiguous`` or ``read-only``.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)))) if threads is None else threads
        if self._threads < 1:
            raise refused("bad-value", "the threads of a host device", "1 or more", threads)

    @property
    def name(self) -> str:
        """``host``."""
        return "host"

    def allocate(self, nbytes: int) -> HostBuffer:
        """Zeroed memory, aligned to 64 bytes.

        Raises ResourceError ``out-of-memory``, and InstallError ``bad-run`` for a length below zero.
        """
        if nbytes < 0:
            raise refused("bad-run", "the length of a buffer", "0 or more bytes", nbytes)
        try:
            if nbytes > sys.maxsize - ALIGNMENT:
                raise MemoryError
            memory = np.zeros(nbytes + ALIGNMENT, dtype=np.uint8)
        except MemoryError:
            raise ResourceError("out-of-memory", f"{nbytes} bytes of memory for a plane", found=nbytes) from None
        start = -_address(memory) % ALIGNMENT
        return HostBuffer(memory[start : start + nbytes])

    def wrap(self, array: NDArray[np.generic]) -> HostBuffer:
        """A buffer over memory that another library owns; it is kept alive until the buffer is released.

        Raises EngineError ``not-contiguous``, ``read-only``, or ``not-memory`` for an array of Python objects.
        """
        if array.dtype.hasobject:
            raise EngineError("not-memory", "an array of Python objects holds no bytes", found=str(array.dtype))
        if not array.flags.c_contiguous:
            raise EngineError("not-contiguous", "only a contiguous array can be used in place", found=array.strides)
        if not array.flags.writeable:
            raise EngineError("read-only", "only a writable array can be used in place")
        return HostBuffer(array.reshape(-1).view(np.uint8))

    def write(self, buffer: Buffer, offset: int, source: memoryview) -> None:
        """Copy host bytes to ``buffer[offset:]``; the two may overlap."""
        self._copy(_host_bytes(source), 0, _array(buffer), offset, source.nbytes)

    def read(self, buffer: Buffer, offset: int, target: memoryview) -> None:
        """Copy ``buffer[offset:]`` into host bytes; the two may overlap."""
        self._copy(_array(buffer), offset, _host_bytes(target, written=True), 0, target.nbytes)

    def copy(self, source: Buffer, source_offset: int, target: Buffer, target_offset: int, nbytes: int) -> None:
        """Copy ``nbytes`` bytes; ranges that overlap are copied as if through a third place."""
        self._copy(_array(source), source_offset, _array(target), target_offset, nbytes)

    def fill(self, buffer: Buffer, offset: int, nbytes: int, value: int) -> None:
        """Set ``nbytes`` bytes to ``value`` (0 to 255)."""
        array = _array(buffer)
        check_extent("a fill", array.nbytes, offset, nbytes)
        if not 0 <= value <= 255:
            raise refused("bad-value", "the value of a fill", "0 to 255", value)
        array[offset : offset + nbytes] = value

    def gather(self, moves: Sequence[Move], packed: memoryview) -> None:
        """Rows out of their places into host bytes, in canonical order; packed bytes of no move are not touched."""
        target = _host_bytes(packed, written=True)
        planes = self._check_moves(moves, target)
        check_packed_disjoint(moves)
        self._run(_gather, _all_pieces(moves, planes, target))

    def scatter(self, moves: Sequence[Move], packed: memoryview) -> None:
        """Host bytes into the rows' places; bytes outside the rows are not touched."""
        source = _host_bytes(packed)
        planes = self._check_moves(moves, source)
        check_places_disjoint(moves, [_address(plane) for plane in planes])
        self._run(_scatter, _all_pieces(moves, planes, source))

    def stage(self, jobs: Sequence[Stage]) -> None:
        """Live ring rows into linear shadows, and each chunk's rows behind them; see :class:`Stage`."""
        memory = [(_array(job.ring), _array(job.shadow), _array(job.chunk)) for job in jobs]
        for index, job in enumerate(jobs):
            check_stage(index, job)
        shadows = [Move(job.shadow, job.shadow_strides, ((0, job.rows + job.chunk_rows),), 0) for job in jobs]
        check_places_disjoint(shadows, [_address(shadow) for _, shadow, _ in memory])
        written = [
            _range(shadow, *extent(move.strides, move.runs))
            for move, (_, shadow, _) in zip(shadows, memory, strict=True)
        ]
        for job, (ring, _, chunk) in zip(jobs, memory, strict=True):
            reads = (
                _range(ring, *extent(job.ring_strides, job.ring_runs)),
                _range(chunk, job.chunk_offset, job.chunk_offset + job.chunk_bytes),
            )
            for target in written:
                for read in reads:
                    check_separate("the shadow of a stage", target, read)
        self._run(
            _scatter, [piece for job, arrays in zip(jobs, memory, strict=True) for piece in _staged(job, *arrays)]
        )

    def convert(
        self,
        source: Buffer,
        source_offset: int,
        source_encoding: Encoding,
        target: Buffer,
        target_offset: int,
        target_encoding: Encoding,
        elements: int,
    ) -> None:
        """``elements`` elements from one encoding to another, through f32 (:mod:`kvpack.device.quantise`).

        Equal encodings are copied byte for byte. Raises CompatibilityError as :func:`~kvpack.device.quantise.quantise`
        does, with nothing written, and ``bad-row-shape`` where ``elements`` are not whole blocks of both.
        """
        read, write = _array(source), _array(target)
        if elements < 0:
            raise refused("bad-run", "the elements of a conversion", "0 or more", elements)
        for encoding in (source_encoding, target_encoding):
            if elements % encoding.block_elements:
                raise CompatibilityError(
                    "bad-row-shape",
                    f"{elements} elements are not whole blocks of {encoding.name}",
                    field="row_shape",
                    expected=encoding.block_elements,
                    found=elements,
                )
        sizes = [each.block_bytes * elements // each.block_elements for each in (source_encoding, target_encoding)]
        check_extent("the source of a conversion", read.nbytes, source_offset, sizes[0])
        check_extent("the target of a conversion", write.nbytes, target_offset, sizes[1])
        check_separate(
            "the target of a conversion",
            _range(write, target_offset, target_offset + sizes[1]),
            _range(read, source_offset, source_offset + sizes[0]),
        )
        stored = read[source_offset : source_offset + sizes[0]]
        if source_encoding != target_encoding:
            stored = _converted(stored, source_encoding, target_encoding)
        np.copyto(write[target_offset : target_offset + sizes[1]], stored)

    def synchronise(self) -> None:
        """Nothing to wait for: each operation is done when it returns."""

    def _check_moves(self, moves: Sequence[Move], packed: Bytes) -> list[Bytes]:
        planes = [_array(move.buffer) for move in moves]
        check_moves(moves, packed.nbytes)
        whole = _range(packed, 0, packed.nbytes)
        for move, plane in zip(moves, planes, strict=True):
            check_separate("the packed bytes", whole, _range(plane, *extent(move.strides, move.runs)))
        return planes

    def _copy(self, source: Bytes, source_offset: int, target: Bytes, target_offset: int, nbytes: int) -> None:
        check_extent("the source of a copy", source.nbytes, source_offset, nbytes)
        check_extent("the target of a copy", target.nbytes, target_offset, nbytes)
        read = source[source_offset : source_offset + nbytes]
        write = target[target_offset : target_offset + nbytes]
        if abs(_address(read) - _address(write)) < nbytes:
            # A slice of a memoryview is assigned with memmove, whichever way the two overlap.
            write.data[:] = read.data
            return
        starts = range(0, nbytes, PIECE_BYTES)
        self._run(_scatter, [Piece(write[at : at + PIECE_BYTES], read[at : at + PIECE_BYTES]) for at in starts])

    def _run(self, move: Callable[[list[Piece]], None], pieces: list[Piece]) -> None:
        """Move every piece; their targets are disjoint, so the order does not matter."""
        if self._threads == 1 or sum(piece.rows.nbytes for piece in pieces) < THREADED_BYTES:
            move(pieces)
            return
        with ThreadPoolExecutor(self._threads, "kvpack-host") as pool:
            list(pool.map(move, _batches(pieces)))


def _array(buffer: Buffer) -> Bytes:
    if not isinstance(buffer, HostBuffer):
        raise EngineError(
            "unregistered-memory",
            "the host device was given a buffer that it did not make",
            expected="a buffer of allocate or wrap",
            found=type(buffer).__name__,
        )
    return buffer.array


def _host_bytes(view: memoryview, *, written: bool = False) -> Bytes:
    if not view.c_contiguous:
        raise refused("not-contiguous", "host bytes", "one contiguous run", f"strides {view.strides}")
    if written and view.readonly:
        raise refused("read-only", "host bytes", "writable bytes", "read-only ones")
    return np.frombuffer(view, dtype=np.uint8) if view.nbytes else np.empty(0, dtype=np.uint8)


def _address(array: NDArray[np.generic]) -> int:
    return int(array.__array_interface__["data"][0])


def _range(array: Bytes, start: int, end: int) -> tuple[int, int]:
    address = _address(array)
    return address + start, address + end


def _all_pieces(moves: Sequence[Move], planes: Sequence[Bytes], packed: Bytes) -> list[Piece]:
    return [
        piece
        for move, plane in zip(moves, planes, strict=True)
        for piece in _pieces(plane, move.strides, move.runs, packed, move.packed_offset)
    ]


def _pieces(
    plane: Bytes, strides: RowStrides, runs: Sequence[tuple[int, int]], packed: Bytes, packed_offset: int
) -> Iterator[Piece]:
    """The rows of a move in pieces of about PIECE_BYTES.

    A run is one contiguous copy where its rows adjoin each other, and otherwise a two-dimensional copy of whole parts.
    Many short runs (pages) are picked by row instead, one part at a time: a slice each would cost more than its bytes.
    """
    rows_in_all = sum(count for _, count in runs)
    if len(runs) > 2 and rows_in_all * strides.row_bytes < len(runs) * SHORT_RUN_BYTES:
        yield from _picked(plane, strides, runs, packed, packed_offset)
        return
    parts, part_bytes = _fused(strides)
    dense = parts == 1 and strides.row_stride == part_bytes
    part = np.dtype((np.void, part_bytes))
    step = max(1, PIECE_BYTES // strides.row_bytes)
    for first, count in runs:
        for done in range(0, count, step):
            rows = min(step, count - done)
            place = strides.base + (first + done) * strides.row_stride
            packed_end = packed_offset + rows * strides.row_bytes
            if dense:
                yield Piece(plane[place : place + rows * part_bytes], packed[packed_offset:packed_end])
            else:
                yield Piece(
                    np.ndarray((rows, parts), part, plane, place, (strides.row_stride, strides.part_stride)),
                    np.ndarray((rows, parts), part, packed, packed_offset),
                )
            packed_offset = packed_end


def _picked(
    plane: Bytes, strides: RowStrides, runs: Sequence[tuple[int, int]], packed: Bytes, packed_offset: int
) -> Iterator[Piece]:
    firsts, counts = np.array(runs, dtype=np.int64).T
    ends = np.cumsum(counts)
    picks = np.arange(int(ends[-1])) + np.repeat(firsts - (ends - counts), counts)
    parts, part_bytes = _fused(strides)
    part = np.dtype((np.void, part_bytes))
    step = max(1, PIECE_BYTES // strides.row_bytes)
    for start in range(0, len(picks), step):
        some = picks[start : start + step]
        for index in range(parts):
            place = strides.base + index * strides.part_stride
            row = packed_offset + start * strides.row_bytes + index * part_bytes
            yield Piece(
                np.ndarray((int(some.max()) + 1,), part, plane, place, (strides.row_stride,)),
                np.ndarray((len(some),), part, packed, row, (strides.row_bytes,)),
                some,
            )


def _fused(strides: RowStrides) -> tuple[int, int]:
    """Parts and their bytes, where parts that adjoin each other count as one."""
    if strides.part_stride == strides.part_bytes:
        return 1, strides.row_bytes
    return strides.parts, strides.part_bytes


def _staged(job: Stage, ring: Bytes, shadow: Bytes, chunk: Bytes) -> Iterator[Piece]:
    """Ring rows and chunk rows as pieces of the shadow. A chunk to be converted is converted here."""
    row = 0
    for first, count in job.ring_runs:
        yield from _between(job.shadow_strides, shadow, row, job.ring_strides, ring, first, count)
        row += count
    if job.encoding is None:
        yield from _pieces(shadow, job.shadow_strides, ((row, job.chunk_rows),), chunk, job.chunk_offset)
    else:
        stored = chunk[job.chunk_offset : job.chunk_offset + job.chunk_bytes]
        rows = _converted(stored, ENCODINGS["f32"], job.encoding)
        yield from _pieces(shadow, job.shadow_strides, ((row, job.chunk_rows),), rows, 0)


def _between(
    to: RowStrides, target: Bytes, target_row: int, of: RowStrides, source: Bytes, source_row: int, count: int
) -> Iterator[Piece]:
    """Rows of one plane as rows of another."""
    part = np.dtype((np.void, to.part_bytes))
    step = max(1, PIECE_BYTES // to.row_bytes)
    for done in range(0, count, step):
        shape = (min(step, count - done), to.parts)
        place = to.base + (target_row + done) * to.row_stride
        origin = of.base + (source_row + done) * of.row_stride
        yield Piece(
            np.ndarray(shape, part, target, place, (to.row_stride, to.part_stride)),
            np.ndarray(shape, part, source, origin, (of.row_stride, of.part_stride)),
        )


def _converted(stored: Bytes, of: Encoding, to: Encoding) -> Bytes:
    """The same elements in another encoding, in slices that stay in the cache."""
    for encoding, usable, what in ((of, is_readable(of), "read as f32"), (to, is_writable(to), "written from f32")):
        if not usable:
            raise CompatibilityError(
                "no-conversion",
                f"encoding {encoding.name} cannot be {what}",
                field="encoding",
                found=encoding.name,
            )
    step = CONVERTED_ELEMENTS // of.block_elements * of.block_bytes
    slices = [quantise(to, dequantise(of, stored[at : at + step])) for at in range(0, stored.nbytes, step)]
    return np.concatenate(slices) if slices else np.empty(0, dtype=np.uint8)


def _batches(pieces: list[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    nbytes = 0
    for piece in pieces:
        batch.append(piece)
        nbytes += piece.rows.nbytes
        if nbytes >= PIECE_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _gather(pieces: list[Piece]) -> None:
    for piece in pieces:
        piece.gather()


def _scatter(pieces: list[Piece]) -> None:
    for piece in pieces:
        piece.scatter()
