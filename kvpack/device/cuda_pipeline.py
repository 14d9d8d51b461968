"""Chunks between host and device: two pinned buffers, a copy stream and a work stream, joined by events.

Into planes: callers put packed rows straight into pinned memory (from several threads, if they like). A full chunk is
one copy, its job table with it, and one launch that scatters the rows of every plane. While the copy stream brings one
chunk, the work stream scatters the one before, and the host fills the next. Out of planes it is the reverse.

What orders it, for a chunk's slot:

- the host fills the slot's pinned memory again only after ``copied``, the event behind its last copy;
- the copy into the slot's device memory waits for ``moved``, the event behind the launch that read it last;
- a launch waits for ``copied``.

Everything else that touches planes runs on the work stream, behind what was asked for before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Condition, RLock
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvpack.device.checks import check_places_disjoint, extent
from kvpack.device.cuda_kernels import CudaKernels
from kvpack.device.cuda_moves import Piece
from kvpack.device.cuda_runtime import CudaRuntime
from kvpack.errors import InstallError, KvpackError

__all__ = ["SLOT_BYTES", "Pipeline"]

Bytes: TypeAlias = NDArray[np.uint8]

SLOT_BYTES: Final = 16 << 20
SCRATCH_BYTES: Final = 12 << 20
SLOTS: Final = 2
PIECES: Final = 8
JOB_BYTES: Final = 96
ALIGNMENT: Final = 16


def aligned(number: int) -> int:
    """The next multiple of the widest access."""
    return -(-number // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Placed:
    """A piece and where its packed rows and its block table lie in a slot."""

    piece: Piece
    start: int

    @property
    def pages_at(self) -> int:
        """Behind the rows."""
        return aligned(self.start + self.piece.nbytes)

    def job(self, slot_address: int) -> tuple[Any, int]:
        """The entry of ``abi.move_table``."""
        return self.piece.rows(slot_address + self.pages_at), slot_address + self.start


@dataclass
class Launch:
    """Pieces of one launch: no byte of a plane belongs to two of them."""

    placed: list[Placed] = field(default_factory=list)
    ranges: list[tuple[int, int]] = field(default_factory=list)

    def meets(self, piece: Piece) -> bool:
        """Whether the piece writes where one of this launch does, so that the order of the two matters."""
        low, high = absolute_range(piece)
        near = [each.piece for each, (a, b) in zip(self.placed, self.ranges, strict=True) if max(a, low) < min(b, high)]
        if not near:
            return False
        try:
            check_places_disjoint([each.move for each in (*near, piece)], [each.address for each in (*near, piece)])
        except InstallError:
            return True
        return False

    def add(self, placed: Placed) -> None:
        """Take a piece in."""
        self.placed.append(placed)
        self.ranges.append(absolute_range(placed.piece))


def absolute_range(piece: Piece) -> tuple[int, int]:
    """The first address of a piece's rows and one past the last."""
    start, end = extent(piece.move.strides, piece.move.runs)
    return piece.address + start, piece.address + end


class Slot:
    """One chunk: pinned memory, device memory of the same size, and the events that guard them."""

    def __init__(self, runtime: CudaRuntime, nbytes: int) -> None:
        self.nbytes = nbytes
        self.copied, self.hashed, self.moved = runtime.event(), runtime.event(), runtime.event()
        self.device = runtime.allocate(nbytes)
        try:
            self.pinned = runtime.allocate_pinned(nbytes)
        except BaseException:
            runtime.free(self.device)
            raise
        self.memory: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.pinned))
        self.clear()

    def clear(self) -> None:
        """Nothing is in it and nobody fills it."""
        self.used = self.jobs = self.writers = 0
        self.sealed = False
        self.launches: list[Launch] = []

    def has_room(self, piece: Piece) -> bool:
        """Whether the piece, its block table and every job's entry fit."""
        end = aligned(Placed(piece, self.used).pages_at + piece.page_bytes)
        return end + JOB_BYTES * (self.jobs + 1) <= self.nbytes

    def place(self, piece: Piece) -> Placed:
        """Set the piece's bytes aside; its block table is written at once."""
        placed = Placed(piece, self.used)
        if piece.pages is not None:
            self.memory[placed.pages_at : placed.pages_at + piece.page_bytes] = piece.pages.view(np.uint8)
        self.used = aligned(placed.pages_at + piece.page_bytes)
        self.jobs += 1
        return placed

    def free(self, runtime: CudaRuntime) -> None:
        """Give both memories back."""
        self.memory = np.empty(0, dtype=np.uint8)
        runtime.free_pinned(self.pinned)
        runtime.free(self.device)


class Pipeline:
    """The chunks of one device. Every method may be called from any thread."""

    def __init__(self, runtime: CudaRuntime, kernels: CudaKernels, slot_bytes: int) -> None:
        self._runtime = runtime
        self._kernels = kernels
        self._slot_bytes = slot_bytes
        self.lock = RLock()
        self._changed = Condition(self.lock)
        self._slots: list[Slot] = []
        self._current = 0
        self._scratch = 0
        self.copy_stream, self.work_stream = runtime.stream(), runtime.stream()
        self.launches = 0
        """Launches so far: what the floor is reckoned in."""

    @property
    def most_piece_bytes(self) -> int:
        """The longest piece: an eighth of a slot, so that little of it is empty when the next one does not fit."""
        return self._slot_bytes // PIECES - JOB_BYTES - 2 * ALIGNMENT

    @property
    def slot_bytes(self) -> int:
        """Bytes of a chunk."""
        return self._slot_bytes

    @property
    def scratch_bytes(self) -> int:
        """Bytes of :meth:`scratch`."""
        return min(SCRATCH_BYTES, self._slot_bytes)

    def scratch(self) -> int:
        """The address of device memory for one operation of the work stream at a time."""
        if not self._scratch:
            self._scratch = self._runtime.allocate(self.scratch_bytes)
        return self._scratch

    # --- into planes -----------------------------------------------------------------------------------------------

    def put(self, piece: Piece, fill: Callable[[Bytes], None]) -> None:
        """Have ``fill`` write the piece's packed rows into pinned memory; they are scattered when the chunk is full.

        Pieces that write the same byte keep their order.
        """
        with self._changed:
            slot = self._open_slot()
            while not slot.has_room(piece):
                self._submit(slot)
                slot = self._open_slot()
            placed = slot.place(piece)
            slot.writers += 1
        try:
            fill(slot.memory[placed.start : placed.start + piece.nbytes])
        except BaseException:
            with self._changed:
                self._written(slot)
            raise
        with self._changed:
            if not slot.launches or slot.launches[-1].meets(piece):
                slot.launches.append(Launch())
            slot.launches[-1].add(placed)
            self._written(slot)

    def flush(self) -> None:
        """Enqueue what waits in the open chunk. Call with the lock held, to enqueue more behind it."""
        with self._changed:
            if self._slots:
                slot = self._open_slot()
                if slot.used:
                    self._submit(slot)

    def _written(self, slot: Slot) -> None:
        slot.writers -= 1
        self._changed.notify_all()

    def _open_slot(self) -> Slot:
        """The slot that is being filled; waits while another thread sends it off."""
        if not self._slots:
            self._allocate_slots()
        while self._slots[self._current].sealed:
            self._changed.wait()
        return self._slots[self._current]

    def _allocate_slots(self) -> None:
        slots: list[Slot] = []
        try:
            for _ in range(SLOTS):
                slots.append(Slot(self._runtime, self._slot_bytes))
        except BaseException:
            for slot in slots:
                slot.free(self._runtime)
            raise
        self._slots = slots

    def _submit(self, slot: Slot) -> None:
        """Send a chunk off once nobody writes to it any more, and open the next one."""
        slot.sealed = True
        while slot.writers:
            self._changed.wait()
        try:
            if slot.launches:
                self._scatter(slot)
        finally:
            slot.clear()
            try:
                self._next_slot()
            finally:
                self._changed.notify_all()

    def _scatter(self, slot: Slot) -> None:
        from kvpack_kernels import abi

        runtime, end = self._runtime, slot.used
        prepared = []
        for launch in slot.launches:
            table, tiles = abi.move_table([placed.job(slot.device) for placed in launch.placed])
            slot.memory[end : end + table.nbytes] = table.view(np.uint8)
            prepared.append((end, len(table), tiles))
            end += table.nbytes
        runtime.wait(self.copy_stream, slot.moved)
        runtime.to_device(slot.device, slot.pinned, end, self.copy_stream)
        runtime.record(slot.copied, self.copy_stream)
        runtime.wait(self.work_stream, slot.copied)
        for table_at, jobs, tiles in prepared:
            self.launch("move", "kvpack_scatter", tiles, np.uint64(slot.device + table_at), np.uint32(jobs))
        runtime.record(slot.moved, self.work_stream)

    def _next_slot(self) -> Slot:
        """Turn to the other slot, once its last copy is done: the open slot's pinned memory is always the host's."""
        self._current = (self._current + 1) % SLOTS
        slot = self._slots[self._current]
        self._runtime.finish(slot.copied)
        return slot

    # --- out of planes ---------------------------------------------------------------------------------------------

    def take(self, pieces: Iterator[Piece], target: Bytes) -> None:
        """Gather pieces into ``target``, each at its move's packed offset; done when it returns."""
        with self.enqueuing():
            slot, before = self._open_slot(), None
            try:
                for batch in self._batches(pieces):
                    self._gather(slot, batch)
                    if before is not None:
                        self._hand_over(before, target)
                    before, slot = slot, self._next_slot()
                if before is not None:
                    self._hand_over(before, target)
            except BaseException:
                with suppress(KvpackError):  # what went wrong is already on its way
                    self.settle()
                raise
            finally:
                for each in self._slots:
                    each.clear()

    def _batches(self, pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
        batch: list[Piece] = []
        used = 0
        for piece in pieces:
            size = aligned(piece.nbytes) + aligned(piece.page_bytes) + JOB_BYTES
            if batch and used + size > self._slot_bytes:
                yield batch
                batch, used = [], 0
            batch.append(piece)
            used += size
        if batch:
            yield batch

    def _gather(self, slot: Slot, batch: list[Piece]) -> None:
        """Rows first, then block tables and jobs, so that each way is one copy."""
        from kvpack_kernels import abi

        runtime = self._runtime
        starts = np.cumsum([0, *(aligned(piece.nbytes) for piece in batch)]).tolist()
        tables_at = at = starts[-1]
        jobs = []
        launch = Launch()
        for piece, start in zip(batch, starts, strict=False):
            jobs.append((piece.rows(slot.device + at), slot.device + start))
            if piece.pages is not None:
                slot.memory[at : at + piece.page_bytes] = piece.pages.view(np.uint8)
                at = aligned(at + piece.page_bytes)
            launch.placed.append(Placed(piece, start))
        table, tiles = abi.move_table(jobs)
        slot.memory[at : at + table.nbytes] = table.view(np.uint8)
        end = at + table.nbytes
        slot.launches = [launch]
        slot.used = tables_at
        runtime.to_device(slot.device + tables_at, slot.pinned + tables_at, end - tables_at, self.work_stream)
        self.launch("move", "kvpack_gather", tiles, np.uint64(slot.device + at), np.uint32(len(table)))
        runtime.record(slot.moved, self.work_stream)
        runtime.wait(self.copy_stream, slot.moved)
        runtime.to_host(slot.pinned, slot.device, tables_at, self.copy_stream)
        runtime.record(slot.copied, self.copy_stream)

    def _hand_over(self, slot: Slot, target: Bytes) -> None:
        """Wait for a gathered chunk and copy its rows out of pinned memory."""
        self._runtime.finish(slot.copied)
        for placed in slot.launches[0].placed:
            offset, size = placed.piece.move.packed_offset, placed.piece.nbytes
            target[offset : offset + size] = slot.memory[placed.start : placed.start + size]

    # --- on the device ---------------------------------------------------------------------------------------------

    @contextmanager
    def enqueuing(self) -> Iterator[None]:
        """A block that enqueues on the work stream, behind everything that was asked for before."""
        with self._changed:
            self.flush()
            yield

    @contextmanager
    def chunks(self) -> Iterator[Sequence[Slot]]:
        """Both chunks, empty, for a block that fills and sends them itself; the first is the host's to fill at once.

        The block ends with no copy in flight. Where it raises, both streams are empty afterwards.
        """
        with self.enqueuing():
            first = self._open_slot()
            try:
                yield [first, *(slot for slot in self._slots if slot is not first)]
            except BaseException:
                with suppress(KvpackError):  # what went wrong is already on its way
                    self.settle()
                raise
            finally:
                for each in self._slots:
                    each.clear()

    def launch(self, source: str, kernel: str, grid: int, *arguments: Any) -> None:
        """Enqueue a kernel on the work stream; nothing where the grid is empty."""
        from kvpack_kernels.abi import THREADS

        if grid:
            self._runtime.launch(self._kernels.function(source, kernel), grid, THREADS, arguments, self.work_stream)
            self.launches += 1

    def with_table(self, table: NDArray[np.void], use: Callable[[np.uint64], None]) -> None:
        """Bring a job table onto the device and call ``use`` with its address, to launch what reads it.

        A table that is longer than a slot is the caller's to split.
        """
        with self.enqueuing():
            slot = self._open_slot()
            slot.memory[: table.nbytes] = table.view(np.uint8)
            try:
                self._runtime.to_device(slot.device, slot.pinned, table.nbytes, self.work_stream)
                self._runtime.record(slot.copied, self.work_stream)
                use(np.uint64(slot.device))
                self._runtime.record(slot.moved, self.work_stream)
            finally:
                self._next_slot()

    def peek(self, address: int, nbytes: int) -> bytes:
        """A few bytes as the work stream leaves them. Call within :meth:`enqueuing`: the open chunk is empty then."""
        slot = self._open_slot()
        self._runtime.to_host(slot.pinned, address, nbytes, self.work_stream)
        self._runtime.finish(self.work_stream)
        return slot.memory[:nbytes].tobytes()

    def settle(self) -> None:
        """Wait until both streams have run empty; what waits in the open chunk is left there."""
        self._runtime.finish(self.copy_stream)
        self._runtime.finish(self.work_stream)

    def synchronise(self) -> None:
        """Wait until everything that was asked for is done."""
        with self._changed:
            self.flush()
            self.settle()

    def close(self) -> None:
        """Give the chunks' memory back, once everything is done; a later call allocates it again."""
        with self._changed:
            self.synchronise()
            while self._slots:
                self._slots.pop().free(self._runtime)
            if self._scratch:
                scratch, self._scratch = self._scratch, 0
                self._runtime.free(scratch)
