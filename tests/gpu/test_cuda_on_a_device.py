"""What the emulation shows, on a real device: the contracts, memory of others, and tensors of torch."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvpack.device.cuda import CudaDevice, SharedMemory, cuda_device
from kvpack.device.host import HostDevice
from kvpack.device.protocol import Move, RowStrides
from kvpack.errors import EngineError, ResourceError
from kvpack.model.encoding import ENCODINGS
from tests.contract.device_contract import DeviceContract, content, filled, random_bytes
from tests.contract.live_contract import LiveContract

SLOTS = (1 << 13, 16 << 20)


class OnDevice(DeviceContract):
    slot_bytes = 0

    @contextmanager
    def opened(self) -> Iterator[CudaDevice]:
        device = CudaDevice(slot_bytes=self.slot_bytes)
        yield device
        device.close()


class TestSmallChunks(OnDevice):
    slot_bytes = SLOTS[0]


class TestChunks(OnDevice):
    slot_bytes = SLOTS[1]


class TestLiveCaches(LiveContract):
    @contextmanager
    def place(self) -> Iterator[tuple[str, Callable[[], int]]]:
        def allocated() -> int:
            gc.collect()
            return cuda_device(0).memory.allocated

        yield "cuda", allocated


@pytest.mark.parametrize("rows", [1, 131_072])
def test_a_long_head_major_ring(rows: int) -> None:
    """131,072 rows of 8 heads of 256 bytes: many chunks, both ways."""
    device, host = CudaDevice(), HostDevice()
    strides = RowStrides(8, 256, 256, rows * 256)
    packed = random_bytes(rows * 2048, 1)
    turn = rows // 3
    moves = [
        Move(where.allocate(packed.nbytes), strides, ((turn, rows - turn), (0, turn)), 0) for where in (device, host)
    ]
    device.scatter(moves[:1], packed.data)
    host.scatter(moves[1:], packed.data)
    assert np.array_equal(content(device, moves[0].buffer), content(host, moves[1].buffer))
    out = np.zeros_like(packed)
    device.gather(moves[:1], out.data)
    assert np.array_equal(out, packed)
    device.close()


def test_every_f16_word_and_many_f32_words_convert_as_on_the_host() -> None:
    device, host = CudaDevice(), HostDevice()
    words = np.arange(0, 1 << 32, 4099 * 32 // 32, dtype=np.uint64).astype(np.uint32)
    words = words[: words.size // 32 * 32]
    for name in ("f16", "bf16", "f8_e4m3", "f8_e5m2"):
        to = ENCODINGS[name]
        results = []
        for where in (device, host):
            source = filled(where, words.view(np.uint8))
            target = where.allocate(words.size * to.block_bytes)
            where.convert(source, 0, ENCODINGS["f32"], target, 0, to, words.size)
            back = where.allocate(words.nbytes)
            where.convert(target, 0, to, back, 0, ENCODINGS["f32"], words.size)
            results.append((content(where, target), content(where, back)))
        assert np.array_equal(results[0][0], results[1][0]), name
        assert np.array_equal(results[0][1], results[1][1]), name
    device.close()


def test_digests_are_blake3() -> None:
    from blake3 import blake3

    device = CudaDevice()
    rows = random_bytes(5 << 20, 2)
    buffer = filled(device, rows)
    extents = [(0, 5 << 20), (16, 0), (1024, 1), (1 << 20, (1 << 20) + 77)]
    found = device.digests([(buffer, at, size) for at, size in extents])
    assert found == [blake3(rows[at : at + size].tobytes()).digest() for at, size in extents]
    device.close()


def test_more_memory_than_there_is() -> None:
    device = CudaDevice()
    before = device.memory.allocated
    with pytest.raises(ResourceError) as refusal:
        device.allocate(1 << 45)
    assert refusal.value.code == "out-of-memory"
    assert device.memory.allocated == before


def test_a_pointer_of_the_host_is_refused() -> None:
    array = np.zeros(64, dtype=np.uint8)
    with pytest.raises(EngineError) as refusal:
        CudaDevice().wrap_pointer(array.ctypes.data, 64, array)
    assert refusal.value.code == "not-device-memory"


def test_cupys_arrays_are_used_in_place() -> None:
    import cupy

    device = CudaDevice()
    array = cupy.zeros((3, 8), dtype=cupy.uint16)
    cupy.cuda.Stream.null.synchronize()
    buffer = device.wrap(array)
    device.write(buffer, 2, memoryview(b"\xff\xff"))
    device.synchronise()
    assert int(array[0, 1]) == 0xFFFF
    assert int(array.sum()) == 0xFFFF


def _opened_elsewhere(shared: SharedMemory, answers: Any) -> None:
    device = CudaDevice()
    buffer = device.open(shared)
    answers.put(content(device, buffer).tobytes())
    device.write(buffer, 0, memoryview(b"\x07" * 16))
    device.synchronise()
    buffer.release()


def test_another_process_reads_and_writes() -> None:
    device = CudaDevice()
    whole = filled(device, random_bytes(1 << 20, 3))
    part = device.wrap_pointer(whole.address + 512, 1024, whole)
    device.synchronise()
    processes = multiprocessing.get_context("spawn")
    answers = processes.Queue()
    other = processes.Process(target=_opened_elsewhere, args=(device.export(part), answers))
    other.start()
    assert answers.get(timeout=120) == random_bytes(1 << 20, 3)[512:1536].tobytes()
    other.join(60)
    assert other.exitcode == 0
    assert set(content(device, part)[:16]) == {7}


# --- torch -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def torch() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return torch


def test_torchs_tensors_are_used_in_place(torch: Any) -> None:
    tensor = torch.arange(64, dtype=torch.bfloat16, device="cuda")
    device = CudaDevice()
    buffer = device.wrap(tensor)
    assert content(device, buffer).tobytes() == bytes(tensor.cpu().view(torch.uint8).numpy())
    device.write(buffer, 0, memoryview(b"\x80\x3f" * 64))
    device.synchronise()
    assert bool((tensor == 1).all())


@pytest.mark.parametrize("name", ["gemma3_text", "deepseek_v3", "falcon_h1"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_caches_of_transformers_go_through_the_kernels(
    torch: Any, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpack.engines import transformers as engine
    from kvpack.engines.transformers import on_device
    from tests.engines.tiny import CAPACITY, session, tiny_model

    model = tiny_model(name, "bf16").to("cuda")
    options: dict[str, Any] = {"capacity": CAPACITY} if kind == "static" else {}
    cache, logits, tokens = session(model, 130, kind, options.get("capacity"))
    launches = cuda_device(0).launches
    cut = engine.capture(model, cache, tokens, logits=logits)
    assert cuda_device(0).launches > launches
    restored = engine.install(cut, model, cache=kind, **options)
    again = engine.capture(model, restored.cache, tokens, logits=logits)
    monkeypatch.setattr(on_device, "device_of", lambda tensor: None)
    staged = engine.capture(model, restored.cache, tokens, logits=logits)
    expected = {key: bytes(rows.buffer) for key, rows in cut.planes.items()}
    for other in (again, staged):
        assert {key: bytes(rows.buffer) for key, rows in other.planes.items()} == expected
