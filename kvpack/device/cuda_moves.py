"""Moves as the kernels' tables have them: pieces that fit a chunk, and runs of rows as rings or block tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvpack.device.cuda_memory import CudaBuffer
from kvpack.device.protocol import Move, RowStrides

if TYPE_CHECKING:
    from kvpack_kernels.abi import Rows

__all__ = ["Piece", "bytes_as_move", "joined", "pieces"]

PAGE_ENTRY_BYTES = 4


@dataclass(frozen=True)
class Piece:
    """A part of a move that fits a chunk. ``pages`` is its block table, where it has one, in pages of ``page_rows``."""

    move: Move
    address: int
    pages: NDArray[np.int32] | None
    page_rows: int

    @property
    def nbytes(self) -> int:
        """Bytes of its rows."""
        return self.move.nbytes

    @property
    def page_bytes(self) -> int:
        """Bytes of its block table."""
        return 0 if self.pages is None else self.pages.nbytes

    def rows(self, pages_address: int) -> Rows:
        """The rows for a table; ``pages_address`` is where the block table lies on the device."""
        from kvpack_kernels.abi import Rows

        strides, runs = self.move.strides, self.move.runs
        plane, first, ring_rows = self.address + strides.base, runs[0][0], 0
        if self.pages is not None:
            first %= self.page_rows
        elif len(runs) == 2:
            # A ring that begins at the second run's first row and ends with the first run.
            plane += runs[1][0] * strides.row_stride
            first, ring_rows = first - runs[1][0], first + runs[0][1] - runs[1][0]
        return Rows(
            address=plane,
            parts=strides.parts,
            part_bytes=strides.part_bytes,
            row_stride=strides.row_stride,
            part_stride=strides.part_stride,
            first=first,
            rows=self.move.rows,
            ring_rows=ring_rows,
            pages=0 if self.pages is None else pages_address,
            page_rows=self.page_rows,
        )


def bytes_as_move(buffer: CudaBuffer, offset: int, nbytes: int) -> Move:
    """Plain bytes as one row of one part."""
    return Move(buffer, RowStrides(1, max(1, nbytes), max(1, nbytes), 0, offset), ((0, 1),) if nbytes else (), 0)


def joined(moves: Sequence[Move]) -> Iterator[Move]:
    """The same moves, those of one plane whose packed rows adjoin as one: a live cache gives each span its own."""
    held: list[Move] = []
    end = -1
    for move in moves:
        if held and (move.buffer is not held[0].buffer or move.strides != held[0].strides or move.packed_offset != end):
            yield _one(held)
            held = []
        held.append(move)
        end = move.packed_offset + move.nbytes
    if held:
        yield _one(held)


def _one(moves: list[Move]) -> Move:
    if len(moves) == 1:
        return moves[0]
    return replace(moves[0], runs=tuple(run for move in moves for run in move.runs))


def pieces(move: Move, most_bytes: int) -> Iterator[Piece]:
    """The rows of a move in pieces of at most ``most_bytes`` bytes, rows and block table together."""
    assert isinstance(move.buffer, CudaBuffer)
    address, row_bytes = move.buffer.address, move.strides.row_bytes
    if row_bytes + PAGE_ENTRY_BYTES > most_bytes:
        for part in _parts_of_rows(move, most_bytes):
            yield Piece(part, address, None, 1)
        return
    most_rows = most_bytes // (row_bytes + PAGE_ENTRY_BYTES)
    offset = move.packed_offset
    for runs in _groups(move.runs, most_rows):
        for some in _as_table(runs):
            piece = replace(move, runs=some[0], packed_offset=offset)
            yield Piece(piece, address, some[1], some[2])
            offset += piece.nbytes


def _parts_of_rows(move: Move, most_bytes: int) -> Iterator[Move]:
    """Rows that are longer than a piece, in runs of bytes."""
    strides, offset = move.strides, move.packed_offset
    for first, count in move.runs:
        for row in range(first, first + count):
            for part in range(strides.parts):
                place = strides.base + row * strides.row_stride + part * strides.part_stride
                for at in range(0, strides.part_bytes, most_bytes):
                    size = min(most_bytes, strides.part_bytes - at)
                    yield Move(move.buffer, RowStrides(1, size, size, 0, place + at), ((0, 1),), offset)
                    offset += size


def _groups(runs: Sequence[tuple[int, int]], most_rows: int) -> Iterator[list[tuple[int, int]]]:
    """Runs cut so that at most ``most_rows`` rows are together, empty ones left out, adjoining ones joined."""
    held: list[tuple[int, int]] = []
    room = most_rows
    for start, number in runs:
        first, count = start, number
        while count:
            taken = min(count, room)
            if held and sum(held[-1]) == first:
                held[-1] = (held[-1][0], held[-1][1] + taken)
            else:
                held.append((first, taken))
            first, count, room = first + taken, count - taken, room - taken
            if not room:
                yield held
                held, room = [], most_rows
    if held:
        yield held


def _as_table(
    runs: list[tuple[int, int]],
) -> Iterator[tuple[tuple[tuple[int, int], ...], NDArray[np.int32] | None, int]]:
    """Runs as one job where a ring or a block table can say them: (runs, block table, rows of a page)."""
    if len(runs) == 1 or (len(runs) == 2 and _is_ring(*runs)):
        yield tuple(runs), None, 1
        return
    if len(runs) == 2:
        for run in runs:
            yield (run,), None, 1
        return
    # The longest page of which every run but the first begins, and every run but the last ends, at a boundary.
    page_rows = math.gcd(*(first for first, _ in runs[1:]), *(first + count for first, count in runs[:-1]))
    pages = [np.arange(first // page_rows, -(-(first + count) // page_rows), dtype=np.int32) for first, count in runs]
    yield tuple(runs), np.concatenate(pages), page_rows


def _is_ring(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Whether the second run goes on at the start of a ring that the first one ends."""
    return second[0] <= first[0] and second[0] + second[1] <= first[0]
