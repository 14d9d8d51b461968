"""What a live cache asks of the place where its bytes are. The NumPy host device is the specification of every
operation.

A plane is a buffer and four numbers (:class:`RowStrides`); a placement reduces rows to runs of physical rows. So one
gather and one scatter, over a list of :class:`Move`, serve every plane of every layer in one call: on CUDA, in one
launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["Buffer", "Device", "Move", "RowStrides", "Unverified", "VerifyingDevice"]


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


@dataclass(frozen=True)
class Unverified:
    """Packed bytes that a device hashes where they arrive, and where their rows go afterwards: all or some of them.

    ``read_into`` fills ``nbytes`` host bytes, from any thread. ``accept`` is given the BLAKE3 of all of them as they
    lie on the device; in the caller's thread, it raises what keeps the rows from being scattered.
    """

    moves: Sequence[Move]
    nbytes: int
    read_into: Callable[[memoryview], None]
    accept: Callable[[bytes], None]


@runtime_checkable
class VerifyingDevice(Protocol):
    """A device that can hash what was copied to it before it is used: the part of :class:`Device` that is optional."""

    def can_verify(self, parcel: Unverified) -> bool:
        """Whether :meth:`scatter_verified` can take it."""

    def scatter_verified(self, parcels: Sequence[Unverified]) -> None:
        """Read, copy, hash, and scatter what is accepted. What ``read_into`` or ``accept`` raises ends it.

        No row is scattered before its parcel was accepted. After an error nothing is on its way any more; rows that
        were accepted before may be in their places.
        """
