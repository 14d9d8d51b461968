"""CUDA through CuPy: the few calls that kvpack makes, each with its failures as errors of kvpack.

CuPy is imported when the first CUDA device is opened. A missing library, a missing or too old driver and a device that
is not there are told apart before anything is allocated.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

from kvpack.errors import EngineError, ResourceError

__all__ = ["CudaRuntime", "address_range", "require_cupy"]

OUT_OF_MEMORY: Final = 2
INSUFFICIENT_DRIVER: Final = 35
NO_DEVICE: Final = 100
DEVICE_MEMORY_TYPES: Final = (2, 3)
"""``cudaMemoryTypeDevice`` and ``cudaMemoryTypeManaged``."""


def require_cupy() -> Any:
    """The module cupy, or EngineError ``missing-extra``."""
    try:
        import cupy
    except ImportError as error:
        raise EngineError(
            "missing-extra",
            "cupy is not installed",
            field="library",
            found="cupy",
            hint="pip install 'kvpack[cuda13]', or 'kvpack[cuda12]' for a driver of CUDA 12",
        ) from error
    return cupy


def require_driver(cupy: Any) -> int:
    """The number of devices of a driver that CuPy's CUDA can use.

    Raises EngineError ``no-driver``, ``driver-too-old``, ``no-device``.
    """
    runtime = cupy.cuda.runtime
    driver, toolkit = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if driver == 0:
        raise EngineError(
            "no-driver", "this machine has no CUDA driver", field="driver", expected=_version(toolkit), found=None
        )
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        if error.status == INSUFFICIENT_DRIVER:
            raise EngineError(
                "driver-too-old",
                f"the driver knows CUDA {_version(driver)}, and cupy is built for {_version(toolkit)}",
                field="driver",
                expected=_version(toolkit),
                found=_version(driver),
                hint="update the driver, or install 'kvpack[cuda12]'" if toolkit >= 13000 else "update the driver",
            ) from error
        if error.status == NO_DEVICE:
            raise EngineError("no-device", "the driver sees no CUDA device", field="device", found=0) from error
        raise EngineError("cuda-error", f"counting devices failed: {error}", found=str(error)) from error


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


@cache
def _driver_library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def address_range(pointer: int) -> tuple[int, int]:
    """The base and the length of the allocation that a device pointer lies in.

    CuPy has no call for it, so the driver's own (``cuMemGetAddressRange_v2``) is called. Raises EngineError
    ``unregistered-memory`` for an address of no allocation.
    """
    base, length = ctypes.c_uint64(), ctypes.c_size_t()
    status = _driver_library().cuMemGetAddressRange_v2(
        ctypes.byref(base), ctypes.byref(length), ctypes.c_uint64(pointer)
    )
    if status != 0:
        raise EngineError(
            "unregistered-memory", f"{pointer:#x} lies in no allocation of the device (status {status})", found=pointer
        )
    return base.value, length.value


class CudaRuntime:
    """CuPy's CUDA on one device: memory, copies, streams and events, errors translated.

    Raises EngineError ``missing-extra``, ``no-driver``, ``driver-too-old``, ``no-device``; each call EngineError
    ``cuda-error``, and ResourceError ``out-of-memory`` where memory ends.
    """

    def __init__(self, number: int) -> None:
        self.cupy = require_cupy()
        self.number = number
        found = require_driver(self.cupy)
        if not 0 <= number < found:
            raise EngineError(
                "no-device",
                f"there is no CUDA device {number}",
                field="device",
                expected=f"0 to {found - 1}",
                found=number,
            )
        self._runtime = self.cupy.cuda.runtime

    @property
    def architecture(self) -> str:
        """``sm_90``: what the device's code is compiled for."""
        return f"sm_{self.cupy.cuda.Device(self.number).compute_capability}"

    @contextmanager
    def calls(self, what: str) -> Iterator[None]:
        """A block of calls on this device, their CUDA errors translated."""
        try:
            with self.cupy.cuda.Device(self.number):
                yield
        except (self._runtime.CUDARuntimeError, self.cupy.cuda.driver.CUDADriverError) as error:
            if error.status == OUT_OF_MEMORY:
                raise ResourceError("out-of-memory", f"{what}: the device has too little memory") from error
            raise EngineError("cuda-error", f"{what} failed: {error}", found=str(error)) from error

    def allocate(self, nbytes: int) -> int:
        """The address of device memory, as it comes: not zeroed."""
        with self.calls(f"an allocation of {nbytes} bytes"):
            return int(self._runtime.malloc(nbytes))

    def free(self, address: int) -> None:
        """Give device memory back."""
        with self.calls("a release of memory"):
            self._runtime.free(address)

    def allocate_pinned(self, nbytes: int) -> int:
        """The address of page-locked host memory."""
        with self.calls(f"an allocation of {nbytes} pinned bytes"):
            return int(self._runtime.hostAlloc(nbytes, self._runtime.hostAllocDefault))

    def free_pinned(self, address: int) -> None:
        """Give page-locked memory back."""
        with self.calls("a release of pinned memory"):
            self._runtime.freeHost(address)

    def to_device(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Enqueue a copy from pinned memory."""
        self._copy(target, source, nbytes, self._runtime.memcpyHostToDevice, stream)

    def to_host(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Enqueue a copy to pinned memory."""
        self._copy(target, source, nbytes, self._runtime.memcpyDeviceToHost, stream)

    def within(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Enqueue a copy of ranges on the device that do not overlap."""
        self._copy(target, source, nbytes, self._runtime.memcpyDeviceToDevice, stream)

    def _copy(self, target: int, source: int, nbytes: int, kind: int, stream: Any) -> None:
        with self.calls(f"a copy of {nbytes} bytes"):
            self._runtime.memcpyAsync(target, source, nbytes, kind, stream.ptr)

    def fill(self, address: int, value: int, nbytes: int, stream: Any) -> None:
        """Enqueue a fill."""
        with self.calls(f"a fill of {nbytes} bytes"):
            self._runtime.memsetAsync(address, value, nbytes, stream.ptr)

    def stream(self) -> Any:
        """A new stream that does not wait for the default one."""
        with self.calls("making a stream"):
            return self.cupy.cuda.Stream(non_blocking=True)

    def foreign_stream(self, pointer: int) -> Any:
        """Another library's stream; 0 is the default stream."""
        with self.calls("wrapping a stream"):
            return self.cupy.cuda.ExternalStream(pointer, self.number)

    def event(self) -> Any:
        """A new event without a clock; waiting for it does not spin."""
        with self.calls("making an event"):
            return self.cupy.cuda.Event(block=True, disable_timing=True)

    def record(self, event: Any, stream: Any) -> None:
        """Mark the present end of a stream."""
        with self.calls("recording an event"):
            event.record(stream)

    def wait(self, stream: Any, event: Any) -> None:
        """What is enqueued on ``stream`` from here on runs after the event."""
        with self.calls("waiting for an event"):
            stream.wait_event(event)

    def finish(self, what: Any) -> None:
        """Block until an event has happened, or a stream has run empty."""
        with self.calls("work on the device"):
            what.synchronize()

    def launch(self, function: Any, grid: int, block: int, arguments: tuple[Any, ...], stream: Any) -> None:
        """Enqueue a kernel. Arguments are NumPy scalars of the kernel's own types."""
        with self.calls("a launch"), stream:
            function((grid,), (block,), arguments)

    def free_memory(self) -> int:
        """Bytes that the device could still give."""
        with self.calls("asking for free memory"):
            return int(self._runtime.memGetInfo()[0])

    def is_device_memory(self, pointer: int) -> bool:
        """Whether a pointer is memory of this device."""
        with self.calls("asking about a pointer"):
            attributes = self._runtime.pointerGetAttributes(pointer)
        return attributes.type in DEVICE_MEMORY_TYPES and attributes.device == self.number

    def export_handle(self, base: int) -> bytes:
        """The IPC handle of the allocation that begins at ``base``.

        Raises EngineError ``not-shareable``: what cudaMalloc did not make, such as PyTorch's expandable segments, has
        no handle of this kind.
        """
        with self.calls("an export"):
            try:
                return bytes(self._runtime.ipcGetMemHandle(base))
            except self._runtime.CUDARuntimeError as error:
                raise EngineError(
                    "not-shareable",
                    f"CUDA gives no handle to this allocation ({error}): it was not made by cudaMalloc",
                    expected="memory of cudaMalloc",
                    found="an expandable segment, a memory pool or managed memory",
                    hint="start the engine with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False",
                ) from error

    def open_handle(self, handle: bytes) -> int:
        """The address in this process of an allocation that another one exported."""
        with self.calls("opening another process's memory"):
            return int(self._runtime.ipcOpenMemHandle(handle))

    def close_handle(self, base: int) -> None:
        """Undo :meth:`open_handle`."""
        with self.calls("closing another process's memory"):
            self._runtime.ipcCloseMemHandle(base)
