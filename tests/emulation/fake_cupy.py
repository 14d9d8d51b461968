"""The few calls of CuPy that kvpack makes, on the CPU: memory, copies, streams that really defer, kernels by g++.

Work is put into its stream and runs when the schedule lets it: a stream runs in order, waits for events as CUDA does,
and knows nothing else of the others. A schedule that holds streams back as long as it may, or runs one far ahead of the
other, gives other bytes as soon as a wait is missing. Kernels are those of :mod:`tests.emulation.build`; addresses are
those of NumPy arrays. Memory comes full of rubbish, and is full of rubbish again when it is freed.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from kvpack_kernels.abi import KERNELS
from numpy.typing import NDArray

from tests.emulation.build import emulated

RUBBISH = 0xCD
ALIGNMENT = 256
TYPES = {"uint64": ctypes.c_uint64, "uint32": ctypes.c_uint32}
IMAGE_END = b"\0"
SCHEDULES = ("at once", "on demand", "copies ahead", "work ahead", "random")
"""``on demand`` runs nothing before somebody waits, and then only what the wait needs."""


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class CUDADriverError(CUDARuntimeError): ...


class NVRTCError(RuntimeError): ...


@dataclass
class Operation:
    run: Callable[[], None]
    needs: Stamp | None = None
    touches: tuple[tuple[int, int], ...] = ()

    def may_touch(self, address: int, nbytes: int) -> bool:
        return any(low < address + nbytes and address < high for low, high in self.touches)


@dataclass(eq=False)
class Stamp:
    """One recording of an event."""

    stream: Stream
    done: bool = False


@dataclass(eq=False)
class Stream:
    ptr: int
    machine: Machine
    waiting: deque[Operation] = field(default_factory=deque)

    def synchronize(self) -> None:
        self.machine.count("synchronize")
        self.machine.run_until(lambda: not self.waiting, self)

    def wait_event(self, event: Event) -> None:
        self.machine.count("wait_event")
        stamp = event.stamp
        if stamp is not None:
            self.put(lambda: None, needs=stamp)

    def put(self, run: Callable[[], None], *touches: tuple[int, int], needs: Stamp | None = None) -> None:
        with self.machine.lock:
            self.waiting.append(Operation(run, needs, touches))
            self.machine.step()

    def __enter__(self) -> Stream:
        self.machine.current.__dict__.setdefault("streams", []).append(self)
        return self

    def __exit__(self, *unused: object) -> None:
        self.machine.current.streams.pop()


@dataclass(eq=False)
class Event:
    machine: Machine
    stamp: Stamp | None = None

    def record(self, stream: Stream) -> None:
        stamp = Stamp(stream)
        self.stamp = stamp

        def happen() -> None:
            stamp.done = True

        stream.put(happen)

    def synchronize(self) -> None:
        self.machine.count("synchronize")
        stamp = self.stamp
        if stamp is not None:
            self.machine.run_until(lambda: stamp.done, stamp.stream)


class Machine:
    """One device, its driver and its schedule. ``failing`` names calls that fail: name to (after how many, status)."""

    def __init__(self, schedule: str = "on demand", seed: int = 0, memory_bytes: int = 1 << 28) -> None:
        self.schedule = schedule
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.current = threading.local()
        self.streams: list[Stream] = []
        self.null = self.make_stream(0)
        self.memory_bytes = memory_bytes
        self.device: dict[int, tuple[NDArray[np.uint8], int]] = {}
        self.pinned: dict[int, tuple[NDArray[np.uint8], int]] = {}
        self.adopted: list[tuple[int, int]] = []
        self.exported: dict[bytes, int] = {}
        self.opened: dict[int, int] = {}
        self.failing: dict[str, tuple[int, int]] = {}
        self.calls: dict[str, int] = {}
        self.compiled: list[tuple[str, tuple[str, ...]]] = []
        self.driver_version, self.runtime_version, self.device_count = 13000, 13000, 1
        self.capability = "90"

    # --- the schedule

    def make_stream(self, pointer: int | None = None) -> Stream:
        stream = Stream(0x1000 + 16 * len(self.streams) if pointer is None else pointer, self)
        self.streams.append(stream)
        return stream

    def find_stream(self, pointer: int) -> Stream:
        return next(stream for stream in self.streams if stream.ptr == pointer)

    def run_one(self, stream: Stream) -> bool:
        """Run the next operation of a stream, if it may run."""
        if not stream.waiting:
            return False
        needs = stream.waiting[0].needs
        if needs is not None and not needs.done:
            return False
        stream.waiting.popleft().run()
        return True

    def step(self) -> None:
        """What the schedule runs of its own accord after something was enqueued. Kvpack makes the copy stream first."""
        ahead = {"at once": self.streams, "copies ahead": self.streams[1:2], "work ahead": self.streams[2:3]}
        if self.schedule == "random":
            for _ in range(self.random.randrange(4)):
                self.run_one(self.random.choice(self.streams))
            return
        while any(self.run_one(stream) for stream in ahead.get(self.schedule, [])):
            pass

    def run_until(self, done: Callable[[], bool], stream: Stream) -> None:
        """Run no more than ``done`` needs: the stream's own operations, and before them what they wait for."""
        with self.lock:
            while not done():
                self.advance(stream)

    def advance(self, stream: Stream) -> None:
        first = stream.waiting[0]
        if first.needs is not None and not first.needs.done:
            self.advance(first.needs.stream)
        else:
            assert self.run_one(stream)

    def idle(self) -> bool:
        return not any(stream.waiting for stream in self.streams)

    # --- memory

    def count(self, name: str) -> None:
        """Count a call, and fail it if it is its turn."""
        with self.lock:
            self.calls[name] = self.calls.get(name, 0) + 1
            if name in self.failing:
                left, status = self.failing[name]
                self.failing[name] = left - 1, status
                if left == 0:
                    raise CUDARuntimeError(status)

    def memory(self, pool: dict[int, tuple[NDArray[np.uint8], int]], nbytes: int) -> int:
        array = np.full(nbytes + ALIGNMENT, RUBBISH, dtype=np.uint8)
        address = int(array.__array_interface__["data"][0])
        address += -address % ALIGNMENT
        pool[address] = array, nbytes
        return address

    def malloc(self, nbytes: int) -> int:
        self.count("malloc")
        if sum(size for _, size in self.device.values()) + nbytes > self.memory_bytes:
            raise CUDARuntimeError(2)
        return self.memory(self.device, nbytes)

    def free(self, address: int) -> None:
        # cudaFree happens to wait for the device; nothing may count on it.
        self.take_back(self.device, address)

    def host_alloc(self, nbytes: int, flags: int) -> int:
        self.count("hostAlloc")
        return self.memory(self.pinned, nbytes)

    def free_host(self, address: int) -> None:
        self.take_back(self.pinned, address)

    def take_back(self, pool: dict[int, tuple[NDArray[np.uint8], int]], address: int) -> None:
        array, nbytes = pool.pop(address)
        waiting = [operation for stream in self.streams for operation in stream.waiting]
        assert not any(each.may_touch(address, nbytes) for each in waiting), "memory was freed while work needs it"
        array[:] = RUBBISH

    def holds(self, pool: dict[int, tuple[NDArray[np.uint8], int]], address: int, nbytes: int) -> bool:
        return any(base <= address and address + nbytes <= base + size for base, (_, size) in pool.items())

    def is_device(self, address: int, nbytes: int = 1) -> bool:
        adopted = any(base <= address and address + nbytes <= base + size for base, size in self.adopted)
        return adopted or self.holds(self.device, address, nbytes)

    def memcpy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        self.count("memcpyAsync")
        from_host, to_host = kind == 1, kind == 2
        for address, on_host in ((source, from_host), (target, to_host)):
            found = self.holds(self.pinned, address, nbytes) if on_host else self.is_device(address, nbytes)
            assert found, f"a copy of {nbytes} bytes outside of {'pinned' if on_host else 'device'} memory"
        if kind == 3:
            assert abs(target - source) >= nbytes, "a copy within the device between ranges that overlap"
        ranges = (target, target + nbytes), (source, source + nbytes)
        self.find_stream(stream).put(lambda: ctypes.memmove(target, source, nbytes) and None, *ranges)

    def memset(self, address: int, value: int, nbytes: int, stream: int) -> None:
        self.count("memsetAsync")
        assert self.is_device(address, nbytes)
        self.find_stream(stream).put(
            lambda: ctypes.memset(address, value, nbytes) and None, (address, address + nbytes)
        )

    # --- kernels

    def launch(self, kernel: str, grid: tuple[int], block: tuple[int], arguments: tuple[np.generic, ...]) -> None:
        self.count("launch")
        source = next(name for name, kernels in KERNELS.items() if kernel in kernels)
        order = "threaded" if source == "blake3" else self.random.choice(("forward", "reverse", "shuffled"))
        values = [TYPES[str(argument.dtype)](int(argument)) for argument in arguments]
        stream = self.current.streams[-1]
        anything = 0, 1 << 64
        stream.put(lambda: emulated(source).launch(kernel, grid[0], block[0], *values, order=order), anything)

    def module(self, path: str) -> SimpleNamespace:
        image = Path(path).read_bytes()
        assert image.endswith(IMAGE_END), "the image is a byte short"
        name = image.removesuffix(IMAGE_END).decode()

        def get_function(kernel: str) -> Callable[..., None]:
            assert kernel in KERNELS[name], (name, kernel)
            return lambda grid, block, arguments: self.launch(kernel, grid, block, arguments)

        return SimpleNamespace(get_function=get_function)

    def nvrtc(self) -> SimpleNamespace:
        programs: dict[int, str] = {}

        def create(text: str, name: str, headers: tuple[bytes, ...], names: tuple[bytes, ...]) -> int:
            assert isinstance(text, str)
            assert all(isinstance(each, bytes) for each in (*headers, *names))
            included = [line.split('"')[1] for line in text.splitlines() if line.startswith('#include "')]
            assert {each.encode() for each in included} <= set(names), "a header is missing"
            programs[len(programs) + 1] = name.removesuffix(".cu")
            return len(programs)

        def compile_program(program: int, options: tuple[str, ...]) -> None:
            try:
                self.count("compileProgram")
            except CUDARuntimeError as error:
                raise NVRTCError("compilation failed") from error
            self.compiled.append((programs[program], options))

        return SimpleNamespace(
            NVRTCError=NVRTCError,
            getVersion=lambda: (13, 0),
            getSupportedArchs=lambda: (75, 80, 86, 89, 90, 100, 120),
            createProgram=create,
            compileProgram=compile_program,
            getCUBIN=lambda program: programs[program].encode(),
            getProgramLog=lambda program: "",
            destroyProgram=programs.pop,
        )

    # --- other processes

    def export(self, base: int) -> bytes:
        self.count("ipcGetMemHandle")
        if base not in self.device:
            raise CUDARuntimeError(1)
        handle = base.to_bytes(64, "little")
        self.exported[handle] = base
        return handle

    def open(self, handle: bytes) -> int:
        self.count("ipcOpenMemHandle")
        if handle not in self.exported:
            raise CUDARuntimeError(400)
        base = self.exported[handle]
        assert base not in self.opened, "one process opens an allocation once"
        self.opened[base] = 1
        return base

    def address_range(self, base: Any, length: Any, pointer: ctypes.c_uint64) -> int:
        ranges = [(at, size) for at, (_, size) in self.device.items()] + self.adopted
        for at, size in ranges:
            if at <= pointer.value < at + max(1, size):
                base._obj.value, length._obj.value = at, size
                return 0
        return 1

    def module_cupy(self) -> ModuleType:
        """What ``import cupy`` gives."""
        runtime = SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            driverGetVersion=lambda: self.driver_version,
            runtimeGetVersion=lambda: self.runtime_version,
            getDeviceCount=self.devices,
            malloc=self.malloc,
            free=self.free,
            hostAlloc=self.host_alloc,
            hostAllocDefault=0,
            freeHost=self.free_host,
            memcpyAsync=self.memcpy,
            memcpyHostToDevice=1,
            memcpyDeviceToHost=2,
            memcpyDeviceToDevice=3,
            memsetAsync=self.memset,
            memGetInfo=lambda: (self.memory_bytes - sum(s for _, s in self.device.values()), self.memory_bytes),
            pointerGetAttributes=lambda at: SimpleNamespace(type=2 if self.is_device(at) else 0, device=0),
            ipcGetMemHandle=self.export,
            ipcOpenMemHandle=self.open,
            ipcCloseMemHandle=self.opened.pop,
        )

        @contextmanager
        def entered() -> Iterator[None]:
            yield

        def device(number: int) -> Any:
            found = entered()
            found.compute_capability = self.capability  # type: ignore[attr-defined]
            return found

        cupy = ModuleType("cupy")
        cupy.RawModule = lambda path: self.module(path)  # type: ignore[attr-defined]
        cupy.cuda = SimpleNamespace(  # type: ignore[attr-defined]
            runtime=runtime,
            driver=SimpleNamespace(CUDADriverError=CUDADriverError),
            nvrtc=self.nvrtc(),
            Device=device,
            Stream=lambda non_blocking: self.make_stream(),
            ExternalStream=lambda pointer, number: self.find_stream(pointer),
            Event=lambda block, disable_timing: Event(self),
        )
        return cupy

    def devices(self) -> int:
        if self.driver_version < self.runtime_version:
            raise CUDARuntimeError(35)
        if not self.device_count:
            raise CUDARuntimeError(100)
        return self.device_count


@contextmanager
def installed(machine: Machine) -> Iterator[Machine]:
    """``import cupy`` finds the machine, and ``libcuda`` is its driver, for the block."""
    from kvpack.device import cuda_runtime

    before = sys.modules.get("cupy")
    library = cuda_runtime._driver_library
    sys.modules["cupy"] = machine.module_cupy()
    cuda_runtime._driver_library = lambda: SimpleNamespace(  # type: ignore[assignment]
        cuMemGetAddressRange_v2=machine.address_range
    )
    try:
        yield machine
    finally:
        cuda_runtime._driver_library = library
        if before is None:
            del sys.modules["cupy"]
        else:
            sys.modules["cupy"] = before
