"""The CUDA device on an emulated machine: the contract, under schedules that show every missing wait."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvpack.device.cuda import CudaDevice
from kvpack.device.cuda_runtime import CudaRuntime
from kvpack.device.host import HostDevice
from kvpack.device.protocol import Move, RowStrides
from kvpack.errors import EngineError, InstallError, ResourceError
from tests.contract.device_contract import DeviceContract, content, filled, random_bytes, stage_job
from tests.emulation.fake_cupy import SCHEDULES, Machine, installed
from tests.emulation.machines import SLOT, machine_with_device, write_through

LAUNCH_FAILED = 719


class Emulated(DeviceContract):
    schedule = ""

    @contextmanager
    def opened(self) -> Iterator[CudaDevice]:
        with machine_with_device(self.schedule) as (_, device):
            yield device


class TestOnDemand(Emulated):
    schedule = "on demand"


class TestCopiesAhead(Emulated):
    schedule = "copies ahead"


class TestWorkAhead(Emulated):
    schedule = "work ahead"


class TestRandom(Emulated):
    schedule = "random"


# --- order ---------------------------------------------------------------------------------------------------------


def session(device: Any, machine: Machine | None) -> list[bytes]:
    """A little of everything, several chunks long, each step's outcome needed by the next."""
    strides = RowStrides(4, 64, 64, 64 * 200)
    plane, other = device.allocate(4 * 64 * 200), device.allocate(4 * 64 * 200)
    pages = tuple((row, 8) for row in range(192, -1, -8))
    out = bytearray(4 * 64 * 200)
    for step in range(3):
        device.scatter([Move(plane, strides, ((150, 50), (0, 150)), 0)], random_bytes(51_200, step).data)
        device.scatter([Move(other, strides, pages, 0)], random_bytes(51_200, step + 10).data)
        device.gather([Move(plane, strides, pages, 0)], memoryview(out))
        device.write(other, 1, memoryview(out)[:9_001])
        device.copy(other, 0, plane, 7, 20_000)
        jobs = [stage_job(device)]
        device.stage(jobs)
        device.scatter([Move(plane, strides, ((20, 9), (0, 20)), 0)], memoryview(out))
        device.copy(jobs[0].shadow, 0, plane, 1000 * step, jobs[0].shadow.nbytes)
    if machine is not None:
        engine = machine.make_stream()
        pattern = random_bytes(64, 77)
        address = plane.address
        engine.put(lambda: ctypes.memset(address, 0, 64) and None)
        engine.put(lambda: ctypes.memmove(address, pattern.ctypes.data, 64) and None)
        device.synchronise_with(engine.ptr)
    else:
        device.write(plane, 0, random_bytes(64, 77).data)
    found = [content(device, plane).tobytes(), content(device, other).tobytes()]
    device.write(other, 0, random_bytes(51_200, 3).data)
    device.synchronise()
    return [*found, content(device, other).tobytes()]


EXPECTED = session(HostDevice(1), None)


def differs(schedule: str, seed: int) -> bool:
    """Whether the session's bytes are wrong; a machine that cannot even go on counts."""
    machine = Machine(schedule, seed)
    with installed(machine):
        return session(CudaDevice(slot_bytes=SLOT), machine) != EXPECTED


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gives_the_same_bytes(schedule: str) -> None:
    assert not any(differs(schedule, seed) for seed in range(4 if schedule == "random" else 1))


# The method of CudaRuntime, its caller, and for a caller with several waits the stream that would wait.
WAITS: dict[str, tuple[str, str, str | None]] = {
    "the copy into a slot waits for its last launch": ("wait", "_scatter", "copy_stream"),
    "a scatter waits for its copy": ("wait", "_scatter", "work_stream"),
    "the copy of gathered rows waits for the gather": ("wait", "_gather", None),
    "a slot is filled again after its copy": ("finish", "_next_slot", None),
    "gathered rows are read after their copy": ("finish", "_hand_over", None),
    "a capture waits for the engine's stream": ("wait", "synchronise_with", None),
}


def without(method: str, caller: str, stream: str | None) -> Callable[..., None]:
    """The method of the runtime, except where that caller calls it."""
    original = getattr(CudaRuntime, method)

    def planted(runtime: CudaRuntime, *arguments: Any) -> None:
        frame = sys._getframe(1)
        if frame.f_code.co_name == caller and (
            stream is None or getattr(frame.f_locals["self"], stream) is arguments[0]
        ):
            return
        original(runtime, *arguments)

    return planted


def fails_in_a_process(check: Callable[[], bool]) -> bool:
    """Whether ``check`` says so or the process dies of it: a kernel that reads a wrong table may end it."""
    with warnings.catch_warnings():
        # From Python 3.12 on a fork beside other threads warns. The child calls nothing that takes their locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()
            os._exit(1 if check() else 0)
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1] != 0


@pytest.mark.parametrize("name", [*WAITS, "none"])
def test_a_missing_wait_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in WAITS:
        method, caller, stream = WAITS[name]
        monkeypatch.setattr(CudaRuntime, method, without(method, caller, stream))
    seen = any(
        fails_in_a_process(lambda schedule=schedule, seed=seed: differs(schedule, seed))  # type: ignore[misc]
        for schedule in SCHEDULES
        for seed in range(3)
    )
    assert seen == (name in WAITS)


# --- launches and bad input ------------------------------------------------------------------------------------------


def test_one_launch_moves_a_chunk_of_every_layer() -> None:
    """13 planes of 512 bytes and their jobs fit a chunk of 8 KiB: 40 are 4 chunks, whoever brings the rows."""
    with machine_with_device() as (machine, device):
        buffers = [device.allocate(512) for _ in range(40)]
        moves = [Move(b, RowStrides(2, 16, 16, 256), ((0, 16),), 512 * n) for n, b in enumerate(buffers)]
        packed = random_bytes(40 * 512, 5)
        device.scatter(moves, packed.data)
        device.synchronise()
        whole = device.launches
        for move in moves:
            device.scatter([Move(move.buffer, move.strides, move.runs, 0)], packed[move.packed_offset :].data)
        device.synchronise()
        assert whole == device.launches - whole == 4
        copies = machine.calls["memcpyAsync"]
        device.gather(moves, packed.data)
        assert device.launches - 2 * whole == 4
        assert machine.calls["memcpyAsync"] - copies == 2 * 4  # tables up, rows down


def test_the_arithmetic_of_the_floor_counts_the_launches() -> None:
    """``benchmarks/floor.py`` reckons without a device what the pipeline does."""
    from benchmarks.floor import Session, chunks

    session = Session(tokens=900, layers=3, kv_heads=2, head_dim=16)
    with machine_with_device() as (_, device):
        strides = RowStrides(2, 32, 32, 32 * session.tokens)
        size = session.tokens * session.row_bytes
        planes = [device.allocate(size) for _ in range(session.planes)]
        moves = [Move(plane, strides, ((0, session.tokens),), size * n) for n, plane in enumerate(planes)]
        device.scatter(moves, random_bytes(session.nbytes, 1).data)
        device.synchronise()
        assert device.launches == chunks(session, SLOT)


def test_several_threads_fill_one_chunk() -> None:
    with machine_with_device("random") as (_, device):
        strides = RowStrides(1, 16, 16, 0)
        buffer, rows = device.allocate(16 * 4000), random_bytes(16 * 4000, 1)

        def feed(first: int) -> None:
            for row in range(first, 4000, 4 * 25):
                piece = rows[16 * row : 16 * (row + 25)]
                device.scatter([Move(buffer, strides, ((row, 25),), 0)], piece.data)

        threads = [threading.Thread(target=feed, args=(25 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert np.array_equal(content(device, buffer), rows)


def test_rows_are_written_straight_into_pinned_memory() -> None:
    with machine_with_device() as (_, device):
        buffer, rows = device.allocate(20_000), random_bytes(20_000, 2)
        move = Move(buffer, RowStrides(1, 50, 50, 0), ((100, 300), (0, 100)), 0)

        def fill(offset: int, pinned: Any) -> None:
            pinned[:] = rows[offset : offset + pinned.nbytes]

        device.scatter_filled([move], fill)
        assert np.array_equal(content(device, buffer), np.roll(rows, 5000))

        def fail(offset: int, pinned: Any) -> None:
            raise OSError(5, "a read failed")

        with pytest.raises(OSError, match="a read failed"):
            device.scatter_filled([move], fail)
        assert np.array_equal(content(device, buffer), np.roll(rows, 5000))


def test_digests_are_blake3(monkeypatch: pytest.MonkeyPatch) -> None:
    from blake3 import blake3

    with machine_with_device() as (machine, device):
        rows = random_bytes(5000, 9)
        buffer = filled(device, rows)
        extents = [(0, 5000), (16, 0), (1024, 1), (4096, 904)]
        found = device.digests([(buffer, at, size) for at, size in extents])
        assert found == [blake3(rows[at : at + size].tobytes()).digest() for at, size in extents]
        allocated = device.memory.allocated
        with pytest.raises(InstallError) as refusal:
            device.digests([(buffer, 8, 8)])
        assert refusal.value.code == "misaligned"
        machine.failing["launch"] = (0, LAUNCH_FAILED)
        with pytest.raises(EngineError) as failure:
            device.digests([(buffer, 0, 8)])
        assert failure.value.code == "cuda-error"
        assert device.memory.allocated == allocated


def test_a_misaligned_stage_is_refused() -> None:
    from dataclasses import replace

    from kvpack.model.encoding import ENCODINGS

    with machine_with_device() as (_, device):
        job = stage_job(device, encoding=ENCODINGS["f16"])
        before = content(device, job.shadow)
        odd = replace(job.shadow_strides, base=3)
        for wrong in (replace(job, chunk_offset=2), replace(job, shadow_strides=odd)):
            with pytest.raises(InstallError) as refusal:
                device.stage([wrong])
            assert refusal.value.code == "misaligned"
        assert np.array_equal(content(device, job.shadow), before)


def test_too_little_memory_leaks_nothing() -> None:
    with machine_with_device(memory_bytes=1 << 20) as (machine, device):
        held = device.allocate(1 << 19)
        for _ in range(3):
            with pytest.raises(ResourceError) as refusal:
                device.allocate(1 << 20)
            assert refusal.value.code == "out-of-memory"
            assert refusal.value.expected == f"at most {1 << 19}"
        assert device.memory.allocated == 1 << 19
        held.release()
        assert device.memory.allocated == 0
        assert device.allocate(1 << 20).nbytes == 1 << 20
        gc.collect()
        assert device.memory.allocated == 0
        machine.memory_bytes = SLOT  # only one of the two chunks
        with pytest.raises(ResourceError):
            device.write(device.wrap_pointer(0, 0, None), 0, memoryview(b"")) or device.write(
                device.allocate(8), 0, memoryview(b"12345678")
            )
        gc.collect()
        assert machine.device == machine.pinned == {}


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("memcpyAsync", "cuda-error"),
        ("launch", "cuda-error"),
        ("wait_event", "cuda-error"),
        ("hostAlloc", "cuda-error"),
        ("compileProgram", "compile-failed"),
    ],
)
def test_a_failure_leaves_a_device_that_works(call: str, code: str) -> None:
    with machine_with_device() as (machine, device):
        buffer, rows = device.allocate(30_000), random_bytes(30_000, 3)
        machine.failing[call] = (0, LAUNCH_FAILED)
        with pytest.raises(EngineError) as failure:
            write_through(device, buffer, rows)
        assert failure.value.code == code
        device.write(buffer, 0, rows.data)
        assert np.array_equal(content(device, buffer), rows)
