"""The job tables of ``abi.h`` as NumPy dtypes, and how a table is made from rows in their places.

Stability: internal to one version of kvpack; sources and tables travel together.

Addresses are integers, strides and offsets bytes. Nothing is checked here: that an address is a living allocation, that
rows stay inside it, that destinations are disjoint is the caller's to know before it launches. NumPy is imported by
the functions that need it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "CHUNK_BYTES",
    "FORMATS",
    "KERNELS",
    "STRUCTS",
    "THREADS",
    "TILE_UNITS",
    "Rope",
    "Rows",
    "Stage",
    "divisor",
    "hash_table",
    "job_dtype",
    "move_table",
    "rope_table",
    "stage_table",
]

Table: TypeAlias = "tuple[NDArray[np.void], int]"

THREADS: Final = 256
TILE_UNITS: Final = THREADS * 4
CHUNK_BYTES: Final = 1024
MAX_UNITS: Final = (1 << 31) - 1
FORMATS: Final = {"f32": 0, "f16": 1, "bf16": 2, "raw": 3}

_DIVISOR: Final = [("divisor", "<u4"), ("magic", "<u4"), ("shift", "<u4")]

STRUCTS: Final[dict[str, list[Any]]] = {
    "MoveJob": [
        ("plane", "<u8"),
        ("packed", "<u8"),
        ("pages", "<u8"),
        ("row_stride", "<u8"),
        ("part_stride", "<u8"),
        ("units", "<u4"),
        ("unit_bytes", "<u4"),
        ("row_units", _DIVISOR),
        ("part_units", _DIVISOR),
        ("page_rows", _DIVISOR),
        ("first", "<u4"),
        ("ring_rows", "<u4"),
        ("tile_begin", "<u4"),
    ],
    "StageJob": [
        ("ring", "<u8"),
        ("chunk", "<u8"),
        ("shadow", "<u8"),
        ("ring_row_stride", "<u8"),
        ("ring_part_stride", "<u8"),
        ("chunk_row_stride", "<u8"),
        ("chunk_part_stride", "<u8"),
        ("shadow_row_stride", "<u8"),
        ("shadow_part_stride", "<u8"),
        ("units", "<u4"),
        ("unit_bytes", "<u4"),
        ("row_units", _DIVISOR),
        ("part_units", _DIVISOR),
        ("first", "<u4"),
        ("ring_rows", "<u4"),
        ("live", "<u4"),
        ("format", "<u4"),
        ("tile_begin", "<u4"),
        ("reserved", "<u4"),
    ],
    "RopeJob": [
        ("plane", "<u8"),
        ("pages", "<u8"),
        ("cosines", "<u8"),
        ("sines", "<u8"),
        ("row_stride", "<u8"),
        ("part_stride", "<u8"),
        ("table_stride", "<u4"),
        ("units", "<u4"),
        ("row_pairs", _DIVISOR),
        ("pairs", _DIVISOR),
        ("page_rows", _DIVISOR),
        ("first", "<u4"),
        ("ring_rows", "<u4"),
        ("rotary_offset", "<u4"),
        ("pair_step", "<u4"),
        ("pair_gap", "<u4"),
        ("format", "<u4"),
        ("tile_begin", "<u4"),
    ],
    "HashJob": [
        ("source", "<u8"),
        ("length", "<u8"),
        ("tile_begin", "<u4"),
        ("tiles", "<u4"),
    ],
}
"""The structs of ``abi.h``, field by field, as ``numpy.dtype`` takes them; no struct has padding."""

_CONVERSIONS: Final = ("f16", "bf16", "f8_e4m3", "f8_e5m2", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")

KERNELS: Final[dict[str, tuple[str, ...]]] = {
    "move": ("kvpack_gather", "kvpack_scatter"),
    "stage": ("kvpack_stage",),
    "convert": tuple(f"kvpack_{way}_{name}" for name in _CONVERSIONS for way in ("write", "read")),
    "rope": ("kvpack_rope",),
    "blake3": ("kvpack_hash_tiles", "kvpack_hash_roots"),
}
"""Each source and its entry points."""


@cache
def job_dtype(name: str) -> np.dtype[np.void]:
    """The NumPy dtype of a struct of ``abi.h``."""
    import numpy as np

    return np.dtype(STRUCTS[name])


@dataclass(frozen=True)
class Rows:
    """Rows of one plane in their places; the meaning of the strides is that of ``kvpack.device.protocol.RowStrides``.

    ``address`` is that of part 0 of physical row 0. Row ``i`` is physical row ``first + i``, less ``ring_rows`` where
    it reaches that (0: the rows do not wrap); or, where ``pages`` is the address of an i32 block table, slot
    ``(first + i) % page_rows`` of page ``pages[(first + i) // page_rows]``.
    """

    address: int
    parts: int
    part_bytes: int
    row_stride: int
    part_stride: int
    first: int
    rows: int
    ring_rows: int = 0
    pages: int = 0
    page_rows: int = 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in canonical order."""
        return self.parts * self.part_bytes

    @property
    def wrap(self) -> int:
        """The ring's rows, or a bound that rows which do not wrap never reach."""
        return self.ring_rows or self.first + self.rows + 1

    def with_joined_parts(self) -> Rows:
        """The same bytes as one part, where the parts of a row lie one behind the other."""
        if self.parts > 1 and self.part_stride != self.part_bytes:
            return self
        return replace(self, parts=1, part_bytes=self.row_bytes, part_stride=self.row_bytes)

    def split(self, most_rows: int) -> Iterator[tuple[int, Rows]]:
        """Pieces of at most ``most_rows`` rows, each with the number of rows before it."""
        for done in range(0, self.rows, most_rows):
            first = self.first + done
            if self.ring_rows and not self.pages:
                first %= self.ring_rows
            yield done, replace(self, first=first, rows=min(most_rows, self.rows - done))


@dataclass(frozen=True)
class Stage:
    """One plane of a staged chunk: ``ring`` are the live rows, ``chunk`` those that come behind them, ``shadow`` the
    linear rows that both go to.

    ``format`` is ``raw`` for a chunk in the ring's own bytes, ``f16`` or ``bf16`` for one of f32 numbers that become
    the ring's.
    """

    ring: Rows
    chunk: Rows
    shadow: Rows
    format: str


@dataclass(frozen=True)
class Rope:
    """Rows to turn: ``pairs`` pairs a head, from ``rotary_offset`` on. ``cosines`` and ``sines`` are addresses of f32
    ``[rows][pairs]``, or of ``[pairs]`` where every row turns by the ``same`` angles."""

    rows: Rows
    cosines: int
    sines: int
    pairs: int
    interleaved: bool
    format: str
    same: bool = False
    rotary_offset: int = 0


def divisor(number: int) -> tuple[int, int, int]:
    """``(number, magic, shift)`` with ``n // number == (n * magic) >> shift`` for every ``n`` below 2³¹.

    With ``2^s >= number > 2^(s-1)`` the magic is ``2^(31+s) / number`` rounded up: it errs by less than ``number``, so
    the quotient by less than ``n / 2^31`` of one step, and fits 32 bits.
    """
    bits = (number - 1).bit_length()
    shift = 31 + bits
    return number, -(-(1 << shift) // number), shift


def move_table(moves: Sequence[tuple[Rows, int]]) -> Table:
    """The table of ``kvpack_gather`` and ``kvpack_scatter`` for (rows, address of the first in canonical order), and
    the launch's tiles. A job takes the widest access that all its addresses and strides allow."""
    jobs: list[tuple[Any, ...]] = []
    tiles = 0
    for given, packed_address in moves:
        rows = given.with_joined_parts()
        unit = _alignment(16, packed_address, rows.address, rows.row_stride, rows.part_bytes, rows.part_stride)
        row_units = rows.row_bytes // unit
        for done, piece in rows.split(MAX_UNITS // row_units):
            units = piece.rows * row_units
            jobs.append(
                (
                    piece.address,
                    packed_address + done * rows.row_bytes,
                    piece.pages,
                    piece.row_stride,
                    piece.part_stride,
                    units,
                    unit,
                    divisor(row_units),
                    divisor(piece.part_bytes // unit),
                    divisor(piece.page_rows),
                    piece.first,
                    piece.wrap,
                    tiles,
                )
            )
            tiles += _tiles(units)
    return _table("MoveJob", jobs), tiles


def stage_table(stages: Sequence[Stage]) -> Table:
    """The table of ``kvpack_stage`` and the launch's tiles. All rows of a job are fewer than 2³¹ units."""
    jobs: list[tuple[Any, ...]] = []
    tiles = 0
    for stage in stages:
        ring, chunk, shadow = stage.ring, stage.chunk, stage.shadow
        strides = [stride for rows in (ring, chunk, shadow) for stride in (rows.row_stride, rows.part_stride)]
        unit = _alignment(16, ring.address, chunk.address, shadow.address, ring.part_bytes, *strides)
        if stage.format != "raw" and unit < 16:
            unit = 2
        row_units = ring.row_bytes // unit
        units = (ring.rows + chunk.rows) * row_units
        if units == 0:
            continue
        jobs.append(
            (
                ring.address,
                chunk.address,
                shadow.address,
                *strides,
                units,
                unit,
                divisor(row_units),
                divisor(ring.part_bytes // unit),
                ring.first,
                ring.wrap,
                ring.rows,
                FORMATS[stage.format],
                tiles,
                0,
            )
        )
        tiles += _tiles(units)
    return _table("StageJob", jobs), tiles


def rope_table(ropes: Sequence[Rope]) -> Table:
    """The table of ``kvpack_rope`` and the launch's tiles."""
    jobs: list[tuple[Any, ...]] = []
    tiles = 0
    for rope in ropes:
        row_pairs = rope.rows.parts * rope.pairs
        for done, piece in rope.rows.split(MAX_UNITS // row_pairs):
            table_stride = 0 if rope.same else rope.pairs
            units = piece.rows * row_pairs
            jobs.append(
                (
                    piece.address,
                    piece.pages,
                    rope.cosines + done * table_stride * 4,
                    rope.sines + done * table_stride * 4,
                    piece.row_stride,
                    piece.part_stride,
                    table_stride,
                    units,
                    divisor(row_pairs),
                    divisor(rope.pairs),
                    divisor(piece.page_rows),
                    piece.first,
                    piece.wrap,
                    rope.rotary_offset,
                    2 if rope.interleaved else 1,
                    1 if rope.interleaved else rope.pairs,
                    FORMATS[rope.format],
                    tiles,
                )
            )
            tiles += _tiles(units)
    return _table("RopeJob", jobs), tiles


def hash_table(messages: Sequence[tuple[int, int]], threads: int = THREADS) -> Table:
    """The table of ``kvpack_hash_tiles`` and ``kvpack_hash_roots`` for each message's (address, length), and the tiles.

    They are the blocks of the first launch, and the nodes of 32 bytes that it writes. ``threads`` is its block, a power
    of two up to THREADS."""
    jobs: list[tuple[Any, ...]] = []
    tiles = 0
    for address, length in messages:
        count = max(1, -(-length // (threads * CHUNK_BYTES)))
        jobs.append((address, length, tiles, count))
        tiles += count
    return _table("HashJob", jobs), tiles


def _alignment(most: int, *numbers: int) -> int:
    """The largest power of two, at most ``most``, that divides every number."""
    together = most
    for number in numbers:
        together |= number
    return together & -together


def _tiles(units: int) -> int:
    return -(-units // TILE_UNITS)


def _table(name: str, jobs: list[tuple[Any, ...]]) -> NDArray[np.void]:
    import numpy as np

    return np.array(jobs, dtype=job_dtype(name))
