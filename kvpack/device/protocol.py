"""What a live cache asks of the place where its bytes are. The NumPy host device is the specification of every
operation.

A plane is a buffer and four numbers (:class:`RowStrides`); a placement reduces rows to runs of physical rows. So one
gather and one scatter, over a list of :class:`Move`, serve every plane of every layer in one call: on CUDA, in one
launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Buffer", "Device", "Move", "RowStrides"]


class Buffer(Protocol):
    """Memory of one plane on a device: zeroed when allocated, owned by whoever allocated it."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""


@dataclass(frozen=True)
class RowStrides:
    """Where the parts of a physical row lie, in bytes.

    Part ``h`` of row ``r`` is the ``part_bytes`` bytes at ``base + r * row_stride + h * part_stride``. Token-major
    ``[capacity][heads][dim]``: one part, or ``row_stride = heads * part_bytes`` and ``part_stride = part_bytes``.
    Head-major ``[heads][capacity][dim]``: ``row_stride = part_bytes`` and ``part_stride = capacity * part_bytes``.
    """

    parts: int
    part_bytes: int
    row_stride: int
    part_stride: int
    base: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in canonical order."""
        return self.parts * self.part_bytes


@dataclass(frozen=True)
class Move:
    """Rows of one plane between their places and canonical order (rows one behind the other, token-major).

    ``runs`` are (first physical row, rows) in logical order; ``packed_offset`` is where the first row lies in the
    packed buffer.
    """

    buffer: Buffer
    strides: RowStrides
    runs: tuple[tuple[int, int], ...]
    packed_offset: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(count for _, count in self.runs)

    @property
    def nbytes(self) -> int:
        """Bytes in the packed buffer."""
        return self.rows * self.strides.row_bytes


class Device(Protocol):
    """A place where planes live. Operations are ordered; :meth:`synchronise` waits until all of them are done."""

    @property
    def name(self) -> str:
        """How people call it: ``host``, ``cuda:0``."""

    def allocate(self, nbytes: int) -> Buffer:
        """Zeroed memory; ResourceError ``out-of-memory``."""

    def write(self, buffer: Buffer, offset: int, source: memoryview) -> None:
        """Copy host bytes to ``buffer[offset:]``."""

    def read(self, buffer: Buffer, offset: int, target: memoryview) -> None:
        """Copy ``buffer[offset:]`` into host bytes."""

    def copy(self, source: Buffer, source_offset: int, target: Buffer, target_offset: int, nbytes: int) -> None:
        """Copy within the device; overlapping ranges of one buffer are copied as if through a third place."""

    def fill(self, buffer: Buffer, offset: int, nbytes: int, value: int) -> None:
        """Set bytes."""

    def gather(self, moves: Sequence[Move], packed: memoryview) -> None:
        """Rows out of their places into host bytes, canonical order."""

    def scatter(self, moves: Sequence[Move], packed: memoryview) -> None:
        """Host bytes into the rows' places; bytes outside the rows are not touched. Destinations must be disjoint."""

    def synchronise(self) -> None:
        """Wait until everything that was asked for is done."""
