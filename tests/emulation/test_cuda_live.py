"""Whole live caches on the emulated machine, under every schedule."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvpack.device import cuda
from kvpack.device.cuda import CudaDevice
from kvpack.errors import EngineError, UsageError
from kvpack.live import transfer
from kvpack.live.cache import LiveCache
from tests.contract.live_contract import LiveContract, same
from tests.emulation.fake_cupy import Machine, installed
from tests.emulation.machines import SLOT
from tests.unit.test_live_cache import MIXED, WHO, Producer

LAUNCH_FAILED = 719


@contextmanager
def named(schedule: str) -> Iterator[tuple[Machine, dict[int, CudaDevice]]]:
    """``cuda`` and ``cuda:1`` are devices of an emulated machine."""
    machine, devices = Machine(schedule), dict[int, CudaDevice]()

    def open_once(number: int = 0) -> CudaDevice:
        if number not in devices:
            devices[number] = CudaDevice(number, slot_bytes=SLOT)
        return devices[number]

    with installed(machine), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "cuda_device", open_once)
        yield machine, devices
        gc.collect()
        for device in devices.values():
            device.close()
        assert machine.pinned == {}


class Emulated(LiveContract):
    schedule = ""

    @contextmanager
    def place(self) -> Iterator[tuple[str, Callable[[], int]]]:
        with named(self.schedule) as (_, devices):

            def allocated() -> int:
                gc.collect()
                return devices[0].memory.allocated

            yield "cuda", allocated


class TestOnDemand(Emulated):
    schedule = "on demand"


class TestCopiesAhead(Emulated):
    schedule = "copies ahead"


class TestWorkAhead(Emulated):
    schedule = "work ahead"


class TestRandom(Emulated):
    schedule = "random"


@pytest.mark.parametrize("call", ["memcpyAsync", "launch", "memsetAsync"])
@pytest.mark.parametrize("number", range(0, 6, 2))
def test_a_device_that_fails_midway_leaves_no_half_session(call: str, number: int) -> None:
    """An append taints; an install leaves nothing; the position is what it was."""
    source = Producer(LiveCache.allocate(MIXED, max_context=64))
    source.append(29)
    cut = transfer.capture(source.cache, WHO)
    with named("on demand") as (machine, devices):
        one = Producer(LiveCache.allocate(MIXED, max_context=64, device="cuda"))
        one.append(9)
        held = len(machine.device)
        machine.failing[call] = (number, LAUNCH_FAILED)
        try:
            transfer.stage(one.cache, cut, WHO)
        except EngineError as error:
            assert error.code == "cuda-error"  # noqa: PT017 - a short stage makes fewer calls than the number
        machine.failing.clear()
        gc.collect()
        devices[0].synchronise()
        gc.collect()
        assert len(machine.device) == held
        twin = Producer(LiveCache.allocate(MIXED, max_context=64))
        twin.append(9)
        assert same(one.cache, twin.cache)
        machine.failing["launch"] = (0, LAUNCH_FAILED)
        with pytest.raises(EngineError):
            one.append(1)
        assert one.cache.position == 9
        assert one.cache.tainted is not None
        one.cache.reset()
        transfer.install(one.cache, cut, WHO)
        assert one.cache.position == 29


def test_layers_may_lie_on_several_devices() -> None:
    with named("random") as (machine, devices):
        machine.device_count = 2
        one = Producer(LiveCache.allocate(MIXED, max_context=64, device=lambda layer: cuda.cuda_device(layer % 2)))
        two = Producer(LiveCache.allocate(MIXED, max_context=64))
        for each in (one, two):
            each.append(29)
        assert len(devices) == 2
        assert same(one.cache, two.cache)
        cuts = [transfer.capture(each.cache, WHO) for each in (one, two)]
        assert all(bytes(cuts[0].planes[key].buffer) == bytes(cuts[1].planes[key].buffer) for key in cuts[0].planes)


def test_counters_are_written_when_everything_else_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a captured graph reads last is true of every plane by then, and there when the call returns."""
    source = Producer(LiveCache.allocate(MIXED, max_context=64))
    source.append(29)
    cut = transfer.capture(source.cache, WHO)
    seen = 0
    with named("on demand") as (machine, _):
        one = Producer(LiveCache.allocate(MIXED, max_context=64, device="cuda"))
        original = CudaDevice.write

        def watched(device: CudaDevice, buffer: Any, offset: int, rows: memoryview) -> None:
            nonlocal seen
            if buffer is one.cache.counters:
                assert machine.idle()
                seen += 1
            original(device, buffer, offset, rows)

        monkeypatch.setattr(CudaDevice, "write", watched)
        transfer.install(one.cache, cut, WHO)
        assert machine.idle()
        one.append(2)
        assert machine.idle()
        transfer.publish_in_place(one.cache, transfer.stage(one.cache, cut, WHO))
        assert machine.idle()
        one.cache.swap(transfer.stage(one.cache, cut, WHO).generation)
        assert machine.idle()
    assert seen == 4


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "host:0", "cuda:1:2"])
def test_a_device_that_has_no_name(name: str) -> None:
    with pytest.raises(UsageError) as refusal:
        LiveCache.allocate(MIXED, max_context=64, device=name)
    assert refusal.value.code == "unknown-device"


def test_names_are_devices() -> None:
    with named("on demand") as (machine, devices):
        machine.device_count = 4
        made: list[Any] = [
            LiveCache.allocate(MIXED, max_context=8, device=name) for name in ("cuda", "cuda:0", "cuda:3")
        ]
        assert [cache.generation.layers[0].device for cache in made] == [devices[0], devices[0], devices[3]]
