"""torch's tensors on a CUDA device: rows move between them and kvpack by kvpack's own kernels.

Used where CuPy is installed beside a CUDA build of torch; elsewhere rows are staged in host memory. Both ways give the
same bytes. Tensors are wrapped where they are, strides and all, and kept alive while their rows are on the way.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from kvpack.device.protocol import Move, RowStrides
from kvpack.engines.transformers.layers import HeldRows
from kvpack.engines.transformers.library import require_torch

if TYPE_CHECKING:
    import torch

    from kvpack.device.cuda import CudaBuffer, CudaDevice

__all__ = ["RowsOnDevice", "StateOnDevice", "device_of", "read_rows", "read_state"]


def device_of(tensor: torch.Tensor) -> CudaDevice | None:
    """The CUDA device of a tensor, or None where its rows are to be staged in host memory."""
    if tensor.device.type != "cuda" or require_torch().version.hip is not None or find_spec("cupy") is None:
        return None
    from kvpack.device.cuda import cuda_device

    return cuda_device(tensor.device.index)


def _behind_torch(device: CudaDevice, tensor: torch.Tensor) -> None:
    """Whatever torch has enqueued for the tensor comes first."""
    device.synchronise_with(current_stream(tensor))


def current_stream(tensor: torch.Tensor) -> int:
    """The stream that torch works on for the tensor's device."""
    return int(require_torch().cuda.current_stream(tensor.device).cuda_stream)


class _Part:
    """A part ``[heads, rows, width]`` of a plane, as a plane of its own whose elements in a head lie together."""

    def __init__(self, device: CudaDevice, part: torch.Tensor) -> None:
        size = part.element_size()
        heads, rows, width = part.shape
        by_head, by_row, _ = part.stride()
        last = ((heads - 1) * by_head + (rows - 1) * by_row + width) * size
        self.buffer: CudaBuffer = device.wrap_pointer(part.data_ptr(), last if part.numel() else 0, part)
        self.strides = RowStrides(heads, width * size, by_row * size, by_head * size)

    def move(self, first: int, rows: int, packed_offset: int) -> Move:
        """The move of some rows."""
        return Move(self.buffer, self.strides, ((first, rows),), packed_offset)


class RowsOnDevice:
    """Where the rows of one plane go: into its parts, each row made of all of them."""

    def __init__(self, device: CudaDevice, held: HeldRows) -> None:
        """Raises what :meth:`CudaDevice.wrap_pointer` raises."""
        self._device, self._first = device, held.first
        self._parts = [_Part(device, part) for part in held.parts]
        _behind_torch(device, held.parts[0])

    def write(self, first: int, rows: int, buffer: memoryview) -> None:
        """Rows ``[first, first + rows)``, canonical order; from any thread."""
        at = first - self._first
        if len(self._parts) == 1:
            self._device.scatter([self._parts[0].move(at, rows, 0)], buffer)
            return
        columns = np.frombuffer(buffer, dtype=np.uint8).reshape(rows, -1)
        column = 0
        for part in self._parts:
            size = part.strides.row_bytes
            of_part = columns[:, column : column + size]

            def fill(offset: int, pinned: np.ndarray, of_part: np.ndarray = of_part, size: int = size) -> None:
                begin, end = offset // size, -(-(offset + pinned.nbytes) // size)
                start = offset - begin * size
                pinned[:] = of_part[begin:end].reshape(-1)[start : start + pinned.nbytes]

            self._device.scatter_filled([part.move(at, rows, 0)], fill)
            column += size

    def publish(self) -> None:
        """Wait until the rows are there, and let go of the tensors."""
        for part in self._parts:
            part.buffer.release()


class StateOnDevice:
    """Where one state goes; ``first`` and ``rows`` count its bytes."""

    def __init__(self, device: CudaDevice, state: torch.Tensor) -> None:
        """The state is contiguous."""
        self._device = device
        self._buffer = device.wrap_pointer(state.data_ptr(), state.numel() * state.element_size(), state)
        _behind_torch(device, state)

    def write(self, first: int, rows: int, buffer: memoryview) -> None:
        """Bytes ``[first, first + rows)``."""
        self._device.write(self._buffer, first, buffer)

    def publish(self) -> None:
        """Wait until the bytes are there, and let go of the tensor."""
        self._buffer.release()


def read_rows(device: CudaDevice, parts: list[torch.Tensor]) -> memoryview:
    """Every row of the parts ``[heads, rows, width]``, each row's parts side by side; a copy."""
    planes = [_Part(device, part) for part in parts]
    _behind_torch(device, parts[0])
    rows = int(parts[0].shape[1])
    moves: list[Move] = []
    end = 0
    for plane in planes:
        moves.append(plane.move(0, rows, end))
        end += moves[-1].nbytes
    packed = np.empty(end, dtype=np.uint8)
    try:
        device.gather(moves, packed.data)
    finally:
        for plane in planes:
            plane.buffer.release()
    if len(moves) > 1:
        split = [packed[m.packed_offset : m.packed_offset + m.nbytes].reshape(rows, -1) for m in moves]
        packed = np.concatenate(split, axis=1).reshape(-1)
    return packed.data


def read_state(device: CudaDevice, state: torch.Tensor) -> memoryview:
    """A contiguous state's bytes; a copy."""
    buffer = device.wrap_pointer(state.data_ptr(), state.numel() * state.element_size(), state)
    _behind_torch(device, state)
    packed = memoryview(bytearray(buffer.nbytes))
    try:
        device.read(buffer, 0, packed)
    finally:
        buffer.release()
    return packed
