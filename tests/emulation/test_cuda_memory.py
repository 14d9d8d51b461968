"""Memory of others, other processes, opening a device, and the kept images of kernels, on the emulated machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpack.device.cuda import CudaDevice, SharedMemory
from kvpack.errors import EngineError, KvpackError, ResourceError
from tests.contract.device_contract import content, filled, random_bytes
from tests.emulation.fake_cupy import Machine, installed
from tests.emulation.machines import machine_with_device, write_through

# --- memory of others ------------------------------------------------------------------------------------------------


class Shown:
    """An array of another library, by ``__cuda_array_interface__``."""

    def __init__(self, machine: Machine, array: Any, **changes: Any) -> None:
        machine.adopted.append((array.ctypes.data, array.nbytes))
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.ctypes.data, False),
            "strides": None,
            "version": 3,
            "stream": None,
        } | changes


def test_another_librarys_array_is_used_in_place_and_kept_alive() -> None:
    with machine_with_device() as (machine, device):
        array = np.zeros((4, 8), dtype=np.uint16)
        shown = Shown(machine, array)
        buffer = device.wrap(shown)
        count = sys.getrefcount(shown)
        device.write(buffer, 2, memoryview(b"\xff\xff"))
        device.synchronise()
        assert array[0, 1] == 0xFFFF
        buffer.release()
        buffer.release()
        assert sys.getrefcount(shown) == count - 1
        with pytest.raises(EngineError) as refusal:
            device.write(buffer, 0, memoryview(b""))
        assert refusal.value.code == "released-memory"


def test_what_cannot_be_used_in_place_is_refused() -> None:
    with machine_with_device() as (machine, device):
        array = np.zeros((4, 8), dtype=np.uint16)
        wrong = {
            "not-contiguous": Shown(machine, array, strides=(32, 2)),
            "read-only": Shown(machine, array, data=(array.ctypes.data, True)),
            "not-memory": object(),
            "not-device-memory": Shown(machine, array, data=(8, False)),
        }
        for code, shown in wrong.items():
            with pytest.raises(EngineError) as refusal:
                device.wrap(shown)
            assert refusal.value.code == code
        assert device.wrap(Shown(machine, array[:1], strides=(999, 2))).nbytes == 16


def test_a_producers_stream_is_waited_for() -> None:
    with machine_with_device() as (machine, device):
        array = np.zeros(64, dtype=np.uint8)
        stream = machine.make_stream()
        stream.put(lambda: array.fill(7))
        buffer = device.wrap(Shown(machine, array, stream=stream.ptr))
        assert set(content(device, buffer)) == {7}


def test_dlpack_tensors_of_any_type_are_used_in_place() -> None:
    torch = pytest.importorskip("torch")

    class OnDevice:
        """A CPU tensor that says that it is on the device."""

        def __init__(self, tensor: Any) -> None:
            self.tensor = tensor

        def __dlpack__(self, stream: int) -> Any:
            return self.tensor.__dlpack__()

    with machine_with_device() as (machine, device):
        tensor = torch.zeros(3, 4, dtype=torch.bfloat16)
        machine.adopted.append((tensor.data_ptr(), 24))
        buffer = device.wrap(OnDevice(tensor))
        assert buffer.nbytes == 24
        device.write(buffer, 0, memoryview(b"\x80\x3f" * 12))
        device.synchronise()
        assert bool((tensor == 1).all())
        with pytest.raises(EngineError) as refusal:
            device.wrap(OnDevice(tensor.t()))
        assert refusal.value.code == "not-contiguous"


def test_another_process_finds_base_and_offset() -> None:
    with machine_with_device() as (machine, device):
        whole = filled(device, random_bytes(4096, 4))
        part = device.wrap_pointer(whole.address + 512, 1024, whole)
        shared = device.export(part)
        assert (shared.offset, shared.nbytes) == (512, 1024)
        one, two = device.open(shared), device.open(device.export(whole))
        assert np.array_equal(content(device, one), random_bytes(4096, 4)[512:1536])
        one.release()
        assert np.array_equal(content(device, two), random_bytes(4096, 4))
        two.release()
        assert (machine.opened, device.memory.opened) == ({}, 0)


def test_memory_without_a_handle_is_refused() -> None:
    with machine_with_device() as (machine, device):
        array = np.zeros(64, dtype=np.uint8)
        with pytest.raises(EngineError) as refusal:
            device.export(device.wrap(Shown(machine, array)))
        assert refusal.value.code == "not-shareable"
        assert "expandable_segments:False" in (refusal.value.hint or "")
        short = device.allocate(64)
        for code, shared in {
            "bad-handle": SharedMemory(b"short", 0, 8),
            "cuda-error": SharedMemory(bytes(64), 0, 8),
            "out-of-bounds": SharedMemory(device.export(short).handle, 60, 8),
        }.items():
            with pytest.raises(KvpackError) as wrong:
                device.open(shared)
            assert wrong.value.code == code
        assert (machine.opened, device.memory.opened) == ({}, 0)


# --- opening ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "fields", "number"),
    [
        ("no-driver", {"driver_version": 0}, 0),
        ("driver-too-old", {"driver_version": 12080}, 0),
        ("no-device", {"device_count": 0}, 0),
        ("no-device", {}, 1),
    ],
)
def test_a_device_that_cannot_be_opened(code: str, fields: dict[str, int], number: int) -> None:
    machine = Machine()
    vars(machine).update(fields)
    with installed(machine), pytest.raises(EngineError) as refusal:
        CudaDevice(number)
    assert refusal.value.code == code
    assert machine.device == {}


def test_without_cupy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(EngineError) as refusal:
        CudaDevice()
    assert refusal.value.code == "missing-extra"
    assert "kvpack[cuda13]" in (refusal.value.hint or "")
    assert "kvpack[cuda12]" in (refusal.value.hint or "")


def test_kernels_are_compiled_once_and_kept(tmp_path: Path) -> None:
    for expected in (1, 0):
        with machine_with_device() as (machine, device):
            write_through(device, device.allocate(8), random_bytes(8, 0))
            assert len(machine.compiled) == expected
            for source, options in machine.compiled:
                assert source == "move"
                assert set(options) == {"--std=c++17", "--fmad=false", "--gpu-architecture=sm_90"}
    assert [path.suffix for path in (tmp_path / "cubin").iterdir()] == [".cubin"]


def test_a_changed_header_is_another_image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kvpack.device import cuda_kernels

    texts = dict(cuda_kernels.kernel_sources())
    for changed in ({}, {"tiles.h": texts["tiles.h"] + "\n"}):
        monkeypatch.setattr(cuda_kernels, "kernel_sources", lambda changed=changed: texts | changed)
        with machine_with_device() as (machine, device):
            write_through(device, device.allocate(8), random_bytes(8, 0))
            assert len(machine.compiled) == 1
    assert len(list((tmp_path / "cubin").iterdir())) == 2


def test_an_architecture_that_nvrtc_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine_with_device() as (machine, device):
        machine.capability = "130"
        with pytest.raises(EngineError) as refusal:
            write_through(device, device.allocate(8), random_bytes(8, 0))
        assert refusal.value.code == "unknown-architecture"


def test_a_cache_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVPACK_CACHE_DIR", str(tmp_path / "file"))
    with machine_with_device() as (_, device):
        with pytest.raises(ResourceError) as refusal:
            write_through(device, device.allocate(8), random_bytes(8, 0))
        assert refusal.value.code == "cache-unwritable"
