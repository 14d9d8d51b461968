"""The CUDA device: the same operations as the host's, with the same bytes and the same refusals, one launch a chunk.

Each operation is checked whole before anything is enqueued. Operations are ordered among themselves; other streams
know nothing of them: :meth:`CudaDevice.synchronise_with` puts them behind an engine's stream, and
:meth:`CudaDevice.synchronise` waits until they are done. CuPy and the kernels are imported when a device is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

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
from kvpack.device.cuda_convert import Conversion
from kvpack.device.cuda_kernels import CudaKernels
from kvpack.device.cuda_memory import CudaBuffer, CudaMemory, SharedMemory
from kvpack.device.cuda_moves import bytes_as_move, joined, pieces
from kvpack.device.cuda_pipeline import SLOT_BYTES, Pipeline
from kvpack.device.cuda_runtime import CudaRuntime
from kvpack.device.cuda_verified import VerifiedChunks, space_of
from kvpack.device.protocol import Buffer, Move, RowStrides, Unverified
from kvpack.device.staging import Stage
from kvpack.errors import EngineError, ResourceError
from kvpack.model.encoding import Encoding

if TYPE_CHECKING:
    from kvpack_kernels import abi

__all__ = ["CudaBuffer", "CudaDevice", "SharedMemory", "cuda_device"]

Bytes: TypeAlias = NDArray[np.uint8]

MIN_SLOT_BYTES: Final = 1 << 12


@cache
def cuda_device(number: int = 0) -> CudaDevice:
    """The process's device of that number, opened at the first call: its chunks are shared by every cache."""
    return CudaDevice(number)


class CudaDevice:
    """One CUDA device.

    A buffer that this device did not make or wrap is an EngineError ``unregistered-memory``, one that was released an
    EngineError ``released-memory``. Host bytes that are not contiguous, or read-only where they are written, are an
    InstallError ``not-contiguous`` or ``read-only``.
    """

    def __init__(self, number: int = 0, *, slot_bytes: int = SLOT_BYTES) -> None:
        """``slot_bytes`` is a chunk; there are two, on the device and pinned on the host.

        Raises EngineError ``missing-extra``, ``no-driver``, ``driver-too-old``, ``no-device``.
        """
        if slot_bytes < MIN_SLOT_BYTES or slot_bytes % 256:
            raise refused(
                "bad-value", "the bytes of a chunk", f"a multiple of 256 from {MIN_SLOT_BYTES} on", slot_bytes
            )
        self._runtime = CudaRuntime(number)
        self._pipeline = Pipeline(self._runtime, CudaKernels(self._runtime), slot_bytes)
        self.memory = CudaMemory(self._runtime, self._pipeline.synchronise, self._pipeline.settle)

    @property
    def name(self) -> str:
        """``cuda:0``."""
        return f"cuda:{self._runtime.number}"

    @property
    def launches(self) -> int:
        """Kernels launched so far."""
        return self._pipeline.launches

    # --- memory ----------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> CudaBuffer:
        """Zeroed memory, aligned to 256 bytes.

        Raises ResourceError ``out-of-memory``, and InstallError ``bad-run`` for a length below zero.
        """
        if nbytes < 0:
            raise refused("bad-run", "the length of a buffer", "0 or more bytes", nbytes)
        try:
            buffer = self.memory.allocate(nbytes)
        except (ResourceError, OverflowError):
            free = self._runtime.free_memory()
            raise ResourceError(
                "out-of-memory",
                f"{nbytes} bytes on {self.name}, which has {free} left",
                expected=f"at most {free}",
                found=nbytes,
            ) from None
        if nbytes:
            with self._pipeline.enqueuing():
                self._runtime.fill(buffer.address, 0, nbytes, self._pipeline.work_stream)
        return buffer

    def wrap(self, array: Any) -> CudaBuffer:
        """A buffer over another library's array: one with ``__cuda_array_interface__`` or ``__dlpack__``.

        The array is kept alive until the buffer is released. Later operations run after what its owner has enqueued, as
        far as the two protocols say. Raises EngineError ``not-contiguous``, ``read-only``, ``not-memory``,
        ``not-device-memory``.
        """
        if hasattr(array, "__cuda_array_interface__"):
            buffer, stream = self.memory.wrap_interface(array)
            if stream is not None:
                # The protocol's 1 and 2 are the legacy and the per-thread default stream, as in CUDA itself.
                self.synchronise_with(stream)
            return buffer
        if hasattr(array, "__dlpack__"):
            return self.memory.wrap_dlpack(array, self._pipeline.work_stream.ptr)
        raise EngineError(
            "not-memory",
            "the object shows no device memory",
            expected="__cuda_array_interface__ or __dlpack__",
            found=type(array).__name__,
        )

    def wrap_pointer(self, pointer: int, nbytes: int, owner: object) -> CudaBuffer:
        """A buffer over a raw pointer, for which ``owner`` answers: kept alive until the buffer is released.

        Raises EngineError ``not-device-memory``, InstallError ``bad-run``. Call :meth:`synchronise_with` where the
        owner's stream may still write.
        """
        return self.memory.wrap_pointer(pointer, nbytes, owner)

    def export(self, buffer: CudaBuffer) -> SharedMemory:
        """What another process opens the buffer by. Raises EngineError ``not-shareable``: expandable segments."""
        self._memory(buffer)
        return self.memory.export(buffer)

    def open(self, shared: SharedMemory) -> CudaBuffer:
        """Another process's buffer. Raises EngineError ``bad-handle``, ``cuda-error``; InstallError ``out-of-bounds``.

        The other process keeps it alive, and says when its bytes are written: CUDA orders nothing between processes.
        """
        return self.memory.open(shared)

    # --- the protocol ----------------------------------------------------------------------------------------------

    def write(self, buffer: Buffer, offset: int, source: memoryview) -> None:
        """Copy host bytes to ``buffer[offset:]``; they may be changed when it returns."""
        read, target = _host_bytes(source), self._memory(buffer)
        check_extent("the target of a copy", target.nbytes, offset, read.nbytes)
        self._put([bytes_as_move(target, offset, read.nbytes)], read)

    def read(self, buffer: Buffer, offset: int, target: memoryview) -> None:
        """Copy ``buffer[offset:]`` into host bytes; they are there when it returns."""
        written, source = _host_bytes(target, written=True), self._memory(buffer)
        check_extent("the source of a copy", source.nbytes, offset, written.nbytes)
        self._take([bytes_as_move(source, offset, written.nbytes)], written)

    def copy(self, source: Buffer, source_offset: int, target: Buffer, target_offset: int, nbytes: int) -> None:
        """Copy ``nbytes`` bytes; ranges that overlap are copied as if through a third place."""
        read, write = self._memory(source), self._memory(target)
        check_extent("the source of a copy", read.nbytes, source_offset, nbytes)
        check_extent("the target of a copy", write.nbytes, target_offset, nbytes)
        of, to = read.address + source_offset, write.address + target_offset
        if not nbytes or of == to:
            return
        runtime, stream = self._runtime, self._pipeline.work_stream
        with self._pipeline.enqueuing():
            if abs(of - to) >= nbytes:
                runtime.within(to, of, nbytes, stream)
                return
            # Piece by piece through scratch memory, from the end that is not yet overwritten.
            scratch, step = self._pipeline.scratch(), self._pipeline.scratch_bytes
            starts = range(0, nbytes, step)
            for at in starts if to < of else reversed(starts):
                size = min(step, nbytes - at)
                runtime.within(scratch, of + at, size, stream)
                runtime.within(to + at, scratch, size, stream)

    def fill(self, buffer: Buffer, offset: int, nbytes: int, value: int) -> None:
        """Set ``nbytes`` bytes to ``value`` (0 to 255)."""
        target = self._memory(buffer)
        check_extent("a fill", target.nbytes, offset, nbytes)
        if not 0 <= value <= 255:
            raise refused("bad-value", "the value of a fill", "0 to 255", value)
        if nbytes:
            with self._pipeline.enqueuing():
                self._runtime.fill(target.address + offset, value, nbytes, self._pipeline.work_stream)

    def gather(self, moves: Sequence[Move], packed: memoryview) -> None:
        """Rows out of their places into host bytes, in canonical order; they are there when it returns."""
        target = _host_bytes(packed, written=True)
        self._check_moves(moves, target.nbytes)
        check_packed_disjoint(moves)
        self._take(moves, target)

    def scatter(self, moves: Sequence[Move], packed: memoryview) -> None:
        """Host bytes into the rows' places; ``packed`` may be changed when it returns."""
        source = _host_bytes(packed)
        addresses = self._check_moves(moves, source.nbytes)
        check_places_disjoint(moves, addresses)
        self._put(moves, source)

    def scatter_filled(self, moves: Sequence[Move], fill: Callable[[int, Bytes], None]) -> None:
        """Scatter rows that ``fill(packed offset, pinned bytes)`` writes straight into pinned memory, piece by piece.

        What :meth:`scatter` does without the copy: for a reader that can put its bytes where it is told to.
        """
        last = max((move.packed_offset + move.nbytes for move in moves), default=0)
        check_places_disjoint(moves, self._check_moves(moves, last))
        self._fill_pieces(moves, fill)

    def stage(self, jobs: Sequence[Stage]) -> None:
        """Live ring rows into linear shadows, and each chunk's rows behind them; see :class:`Stage`.

        Raises also InstallError ``misaligned`` where f16 or bf16 shadows, or f32 chunks, are not at whole elements.
        """
        memory = [(self._memory(job.ring), self._memory(job.shadow), self._memory(job.chunk)) for job in jobs]
        for index, job in enumerate(jobs):
            check_stage(index, job)
        shadows = [Move(job.shadow, job.shadow_strides, ((0, job.rows + job.chunk_rows),), 0) for job in jobs]
        check_places_disjoint(shadows, [shadow.address for _, shadow, _ in memory])
        written = [_range(shadow, move) for (_, shadow, _), move in zip(memory, shadows, strict=True)]
        for job, (ring, _, chunk) in zip(jobs, memory, strict=True):
            begin = chunk.address + job.chunk_offset
            reads = _range(ring, Move(ring, job.ring_strides, job.ring_runs, 0)), (begin, begin + job.chunk_bytes)
            for target in written:
                for read in reads:
                    check_separate("the shadow of a stage", target, read)
        from kvpack_kernels import abi

        staged = [_stage_rows(index, job, *memory[index]) for index, job in enumerate(jobs)]
        most = self._pipeline.scratch_bytes // abi.job_dtype("StageJob").itemsize
        for start in range(0, len(staged), most):
            table, tiles = abi.stage_table(staged[start : start + most])
            self._launch_table("stage", "kvpack_stage", table, tiles)

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
        """``elements`` elements from one encoding to another, through f32; the host's bytes and refusals.

        ``iq4_nl`` has no kernel: CompatibilityError ``no-conversion``, except onto itself.
        """
        read, write = self._memory(source), self._memory(target)
        conversion = Conversion(source_encoding, target_encoding, elements)
        check_extent("the source of a conversion", read.nbytes, source_offset, conversion.source_bytes)
        check_extent("the target of a conversion", write.nbytes, target_offset, conversion.target_bytes)
        of, to = read.address + source_offset, write.address + target_offset
        check_separate(
            "the target of a conversion",
            (to, to + conversion.target_bytes),
            (of, of + conversion.source_bytes),
        )
        if source_encoding == target_encoding:
            self.copy(source, source_offset, target, target_offset, conversion.source_bytes)
            return
        conversion.run(self._runtime, self._pipeline, of, to)

    def synchronise(self) -> None:
        """Wait until everything that was asked for is done."""
        self._pipeline.synchronise()

    # --- beyond the protocol ---------------------------------------------------------------------------------------

    def synchronise_with(self, stream: int) -> None:
        """Later operations run after what another library has enqueued on its stream so far (0: the default stream).

        Nothing blocks. A capture calls it before it reads what an engine's kernels may still be writing.
        """
        with self._pipeline.enqueuing():
            event = self._runtime.event()
            self._runtime.record(event, self._runtime.foreign_stream(stream))
            self._runtime.wait(self._pipeline.work_stream, event)

    def digests(self, extents: Sequence[tuple[Buffer, int, int]]) -> list[bytes]:
        """BLAKE3-256 of (buffer, offset, length) each, computed on the device.

        Raises InstallError ``misaligned`` where a message does not begin at a multiple of 16 bytes.
        """
        from kvpack_kernels import abi

        messages = []
        for index, (buffer, offset, nbytes) in enumerate(extents):
            memory = self._memory(buffer)
            check_extent(f"message {index}", memory.nbytes, offset, nbytes)
            _require_aligned(f"message {index}", 16, memory.address + offset)
            messages.append((memory.address + offset, nbytes))
        found: list[bytes] = []
        most = self._pipeline.scratch_bytes // abi.job_dtype("HashJob").itemsize
        for start in range(0, len(messages), most):
            found += self._digests(messages[start : start + most])
        return found

    def _digests(self, messages: list[tuple[int, int]]) -> list[bytes]:
        from kvpack_kernels import abi

        table, tiles = abi.hash_table(messages)
        jobs, nodes = self.memory.allocate(table.nbytes), self.memory.allocate(32 * tiles)
        digests = self.memory.allocate(32 * len(messages))
        try:
            with self._pipeline.lock:
                self.write(jobs, 0, table.view(np.uint8).data)
                self._pipeline.flush()
                at, count = np.uint64(jobs.address), np.uint32(len(table))
                self._pipeline.launch("blake3", "kvpack_hash_tiles", tiles, at, count, np.uint64(nodes.address))
                roots = np.uint64(nodes.address), np.uint64(digests.address)
                self._pipeline.launch("blake3", "kvpack_hash_roots", len(messages), at, *roots)
            found = bytearray(digests.nbytes)
            self.read(digests, 0, memoryview(found))
        finally:
            for buffer in (jobs, nodes, digests):
                buffer.release()
        return [bytes(found[at : at + 32]) for at in range(0, len(found), 32)]

    def can_verify(self, parcel: Unverified) -> bool:
        """Whether the parcel, its tables and its hashes fit a chunk."""
        return space_of(parcel, self._pipeline.slot_bytes) <= self._pipeline.slot_bytes

    def scatter_verified(self, parcels: Sequence[Unverified]) -> None:
        """Rows straight into pinned memory, onto the device, hashed there, accepted, scattered; chunks overlap.

        One launch scatters a chunk, two hash it. Everything that :meth:`scatter` refuses is refused before a byte is
        read. Raises also InstallError ``too-long`` for a parcel that :meth:`can_verify` refuses.
        """
        addresses: list[int] = []
        for index, parcel in enumerate(parcels):
            addresses += self._check_moves(parcel.moves, parcel.nbytes)
            if not self.can_verify(parcel):
                raise refused("too-long", f"parcel {index}", "what fits a chunk", f"{parcel.nbytes} bytes")
        check_places_disjoint([move for parcel in parcels for move in parcel.moves], addresses)
        VerifiedChunks(self._runtime, self._pipeline).run(parcels)

    def close(self) -> None:
        """Give the chunks' memory back; a later operation allocates it again. Buffers stay as they are."""
        self._pipeline.close()

    # --- how -------------------------------------------------------------------------------------------------------

    def _memory(self, buffer: Buffer) -> CudaBuffer:
        if not isinstance(buffer, CudaBuffer) or buffer.memory is not self.memory:
            raise EngineError(
                "unregistered-memory",
                f"{self.name} was given a buffer that it did not make",
                expected="a buffer of allocate, wrap, wrap_pointer or open",
                found=type(buffer).__name__,
            )
        buffer.nbytes  # noqa: B018 - refuses released memory
        return buffer

    def _check_moves(self, moves: Sequence[Move], packed_bytes: int) -> list[int]:
        addresses = [self._memory(move.buffer).address for move in moves]
        check_moves(moves, packed_bytes)
        return addresses

    def _put(self, moves: Sequence[Move], source: Bytes) -> None:
        def fill(offset: int, pinned: Bytes) -> None:
            np.copyto(pinned, source[offset : offset + pinned.nbytes])

        self._fill_pieces(moves, fill)

    def _fill_pieces(self, moves: Sequence[Move], fill: Callable[[int, Bytes], None]) -> None:
        for move in joined(moves):
            for piece in pieces(move, self._pipeline.most_piece_bytes):
                offset = piece.move.packed_offset
                self._pipeline.put(piece, lambda pinned, offset=offset: fill(offset, pinned))  # type: ignore[misc]

    def _take(self, moves: Sequence[Move], target: Bytes) -> None:
        most = self._pipeline.most_piece_bytes
        self._pipeline.take((piece for move in joined(moves) for piece in pieces(move, most)), target)

    def _launch_table(self, source: str, kernel: str, table: NDArray[np.void], tiles: int) -> None:
        if tiles:
            count = np.uint32(len(table))
            self._pipeline.with_table(
                table, lambda address: self._pipeline.launch(source, kernel, tiles, address, count)
            )


def _host_bytes(view: memoryview, *, written: bool = False) -> Bytes:
    if not view.c_contiguous:
        raise refused("not-contiguous", "host bytes", "one contiguous run", f"strides {view.strides}")
    if written and view.readonly:
        raise refused("read-only", "host bytes", "writable bytes", "read-only ones")
    return np.frombuffer(view, dtype=np.uint8) if view.nbytes else np.empty(0, dtype=np.uint8)


def _range(buffer: CudaBuffer, move: Move) -> tuple[int, int]:
    start, end = extent(move.strides, move.runs)
    return buffer.address + start, buffer.address + end


def _require_aligned(what: str, to: int, *numbers: int) -> None:
    for number in numbers:
        if number % to:
            raise refused("misaligned", f"an address or a stride of {what}", f"a multiple of {to}", number)


def _stage_rows(index: int, job: Stage, ring: CudaBuffer, shadow: CudaBuffer, chunk: CudaBuffer) -> abi.Stage:
    from kvpack_kernels import abi

    chunk_address, what = chunk.address + job.chunk_offset, f"stage {index}"
    to, of = job.shadow_strides, job.ring_strides
    if job.encoding is not None:
        steps = [n for each in (to, of) for n in (each.row_stride, each.part_stride, each.part_bytes, each.base)]
        _require_aligned(what, 2, ring.address, shadow.address, *steps)
        _require_aligned(what, 4, chunk_address)
    if (job.rows + job.chunk_rows) * to.row_bytes > abi.MAX_UNITS:
        raise refused("too-long", f"the rows of {what}", f"at most {abi.MAX_UNITS} bytes", "more")
    part_bytes = to.part_bytes if job.encoding is None else to.part_bytes * 2
    chunk_strides = RowStrides(to.parts, part_bytes, to.parts * part_bytes, part_bytes)
    return abi.Stage(
        ring=_rows(ring.address, of, job.rotation, job.rows, job.ring_rows),
        chunk=_rows(chunk_address, chunk_strides, 0, job.chunk_rows),
        shadow=_rows(shadow.address, to, 0, job.rows + job.chunk_rows),
        format="raw" if job.encoding is None else job.encoding.name,
    )


def _rows(address: int, strides: RowStrides, first: int, rows: int, ring_rows: int = 0) -> abi.Rows:
    from kvpack_kernels import abi

    return abi.Rows(
        address=address + strides.base,
        parts=strides.parts,
        part_bytes=strides.part_bytes,
        row_stride=strides.row_stride,
        part_stride=strides.part_stride,
        first=first,
        rows=rows,
        ring_rows=ring_rows,
    )
