"""Device memory that kvpack may touch: allocated, wrapped with its owner kept alive, or opened from another process.

Every launch takes its addresses from a :class:`CudaBuffer`, so memory that nobody registered, or that was released,
never reaches a kernel. Buffers hold contiguous bytes; strides belong to the moves.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvpack.device.checks import refused
from kvpack.device.cuda_runtime import CudaRuntime, address_range
from kvpack.errors import EngineError

__all__ = ["CudaBuffer", "CudaMemory", "SharedMemory"]

HANDLE_BYTES: Final = 64


class CudaBuffer:
    """Bytes in the memory of one device, made by :class:`~kvpack.device.cuda.CudaDevice`."""

    def __init__(
        self, memory: CudaMemory, address: int, nbytes: int, owner: object, give_back: Callable[[], None]
    ) -> None:
        self.memory = memory
        self._address = address
        self._nbytes = nbytes
        self._owner = owner
        self._finalizer = weakref.finalize(self, give_back)
        self._finalizer.atexit = False  # the driver frees what a process leaves

    @property
    def nbytes(self) -> int:
        """Length in bytes; EngineError ``released-memory`` after a release."""
        self._require_living()
        return self._nbytes

    @property
    def address(self) -> int:
        """Where the first byte lies on the device; EngineError ``released-memory`` after a release."""
        self._require_living()
        return self._address

    def _require_living(self) -> None:
        if not self._finalizer.alive:
            raise EngineError("released-memory", "the buffer was released and can no longer be used")

    def release(self) -> None:
        """Let go of the memory, once the device has done all that was asked of it; a second release changes nothing."""
        if self._finalizer.alive:
            self.memory.drain()
        self._finalizer()
        self._owner = None


@dataclass(frozen=True)
class SharedMemory:
    """How another process finds a buffer: the IPC handle of its allocation, and where in it the buffer lies."""

    handle: bytes
    offset: int
    nbytes: int


class CudaMemory:
    """The buffers of one device, and what of the device's memory is kvpack's."""

    def __init__(self, runtime: CudaRuntime, drain: Callable[[], None], settle: Callable[[], None]) -> None:
        """``settle`` blocks until the device's streams have run empty; no memory is given back before. ``drain``
        enqueues what still waits to be enqueued, and then does the same."""
        self._runtime = runtime
        self.drain = drain
        self._settle = settle
        self._allocated: dict[int, int] = {}
        self._opened: dict[bytes, tuple[int, int]] = {}

    @property
    def allocated(self) -> int:
        """Bytes of the allocations that are alive."""
        return sum(self._allocated.values())

    @property
    def opened(self) -> int:
        """Allocations of other processes that are open."""
        return len(self._opened)

    def allocate(self, nbytes: int) -> CudaBuffer:
        """Memory as it comes, aligned to 256 bytes; ResourceError ``out-of-memory``."""
        address = self._runtime.allocate(max(1, nbytes))
        self._allocated[address] = nbytes

        def give_back() -> None:
            self._settle()
            self._runtime.free(address)
            del self._allocated[address]

        return CudaBuffer(self, address, nbytes, None, give_back)

    def wrap_pointer(self, pointer: int, nbytes: int, owner: object) -> CudaBuffer:
        """``nbytes`` bytes from a raw pointer; ``owner`` is kept alive until the buffer is released.

        Raises EngineError ``not-device-memory`` for a pointer of the host or of another device.
        """
        if nbytes < 0:
            raise refused("bad-run", "the length of a buffer", "0 or more bytes", nbytes)
        if nbytes and not self._runtime.is_device_memory(pointer):
            raise EngineError(
                "not-device-memory",
                f"{pointer:#x} is no memory of CUDA device {self._runtime.number}",
                expected=f"cuda:{self._runtime.number}",
                found=pointer,
            )
        return CudaBuffer(self, pointer, nbytes, owner, self._settle)

    def wrap_interface(self, array: Any) -> tuple[CudaBuffer, int | None]:
        """An object with ``__cuda_array_interface__``, and the stream that writes its bytes, if it names one."""
        interface = array.__cuda_array_interface__
        shape, strides = tuple(interface["shape"]), interface.get("strides")
        itemsize = int(interface["typestr"][2:])
        pointer, read_only = interface["data"]
        if not _is_contiguous(shape, strides, itemsize):
            raise EngineError("not-contiguous", "only a contiguous array can be used in place", found=strides)
        if read_only:
            raise EngineError("read-only", "only a writable array can be used in place")
        return self.wrap_pointer(int(pointer), math.prod(shape) * itemsize, array), interface.get("stream")

    def wrap_dlpack(self, tensor: Any, stream: int) -> CudaBuffer:
        """An object with ``__dlpack__``, ready for work on ``stream``. Any element type goes, bf16 and fp8 too."""
        capsule = tensor.__dlpack__(stream=stream)
        found = _managed_tensor(capsule)
        shape = tuple(found.shape[axis] for axis in range(found.ndim))
        itemsize = found.bits * found.lanes // 8
        strides = tuple(found.strides[axis] for axis in range(found.ndim)) if found.strides else None
        if not _is_contiguous(shape, strides, 1):
            raise EngineError("not-contiguous", "only a contiguous tensor can be used in place", found=strides)
        # The capsule is never consumed: its destructor gives the tensor back when the buffer lets go of it.
        return self.wrap_pointer(found.address + found.byte_offset, math.prod(shape) * itemsize, capsule)

    def export(self, buffer: CudaBuffer) -> SharedMemory:
        """What another process needs to open the buffer; the buffer must outlive its use there."""
        base, _ = address_range(buffer.address)
        return SharedMemory(self._runtime.export_handle(base), buffer.address - base, buffer.nbytes)

    def open(self, shared: SharedMemory) -> CudaBuffer:
        """Another process's buffer; its allocation stays open until the last buffer of it is released."""
        if len(shared.handle) != HANDLE_BYTES or shared.offset < 0 or shared.nbytes < 0:
            raise EngineError("bad-handle", "this is no shared buffer of a CUDA device", found=shared)
        base, uses = self._opened.get(shared.handle, (0, 0))
        if not uses:
            base = self._runtime.open_handle(shared.handle)
        self._opened[shared.handle] = base, uses + 1

        def give_back() -> None:
            self._settle()
            _, left = self._opened[shared.handle]
            if left > 1:
                self._opened[shared.handle] = base, left - 1
                return
            del self._opened[shared.handle]
            self._runtime.close_handle(base)

        try:
            start, length = address_range(base)
            if shared.offset + shared.nbytes > length:
                raise refused(
                    "out-of-bounds",
                    "a shared buffer",
                    f"bytes within [0, {length})",
                    f"[{shared.offset}, {shared.offset + shared.nbytes})",
                )
        except BaseException:
            give_back()
            raise
        return CudaBuffer(self, start + shared.offset, shared.nbytes, None, give_back)


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None, step: int) -> bool:
    """Whether elements lie one behind the other, ``step`` apart. The stride of an axis of one element says nothing."""
    for size, stride in zip(reversed(shape), reversed(strides or ()), strict=False):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


class _Tensor(ctypes.Structure):
    """``DLTensor`` of dlpack.h, which begins every managed tensor."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )

    @property
    def address(self) -> int:
        return int(self.data)


def _managed_tensor(capsule: object) -> _Tensor:
    """The tensor in a capsule of the name ``dltensor``; EngineError ``not-memory`` for anything else."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    try:
        pointer = get(capsule, b"dltensor")
    except (ValueError, ctypes.ArgumentError) as error:
        raise EngineError("not-memory", f"this is no DLPack tensor: {error}") from error
    return _Tensor.from_address(pointer)
