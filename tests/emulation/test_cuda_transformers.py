"""Caches of transformers whose tensors lie "on the device": the emulated machine's, which is this process's memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpack.device.cuda import CudaDevice
from kvpack.engines import transformers as engine
from kvpack.engines.transformers import on_device
from kvpack.engines.transformers.library import forward
from kvpack.errors import EngineError
from kvpack.model.snapshot import Cut
from tests.emulation.fake_cupy import SCHEDULES, Machine, installed
from tests.engines.tiny import session, tiny_model

# Rows in one part, in a ring's, in two parts (latent), and states beside them.
MODELS = ("gemma3_text", "deepseek_v3", "falcon_h1")
COUNT = 130


@pytest.fixture(params=MODELS, scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param, "bf16")


@pytest.fixture(params=[s for s in SCHEDULES if s != "at once"])
def machine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Every CPU tensor counts as one on the device."""
    monkeypatch.setenv("KVPACK_CACHE_DIR", str(tmp_path))
    machine = Machine(request.param)
    machine.adopted.append((0, 1 << 63))
    with installed(machine):
        device = CudaDevice(slot_bytes=1 << 14)
        monkeypatch.setattr(on_device, "device_of", lambda tensor: device)
        monkeypatch.setattr(on_device, "current_stream", lambda tensor: 0)
        yield machine
        device.close()
        assert machine.device == machine.pinned == {}


def planes(cut: Cut) -> dict[str, bytes]:
    return {str(key): bytes(rows.buffer) for key, rows in cut.planes.items()}


def fill(tensor: Any, value: int) -> None:
    tensor.fill_(value)


def logits_after(model: Any, cache: Any, token: int) -> Any:
    return forward(model, [token], cache)


def test_a_capture_and_an_install_are_those_of_the_host(model: Any, machine: Machine) -> None:
    cache, logits, tokens = session(model, COUNT)
    with pytest.MonkeyPatch.context() as staged:
        staged.setattr(on_device, "device_of", lambda tensor: None)
        expected = engine.capture(model, cache, tokens, logits=logits)
        twin = engine.install(expected, model)
    launched = machine.calls.get("launch", 0)
    cut = engine.capture(model, cache, tokens, logits=logits)
    assert planes(cut) == planes(expected)
    assert machine.calls["launch"] > launched
    restored = engine.install(cut, model)
    assert machine.idle()
    again = engine.capture(model, restored.cache, tokens, logits=logits)
    assert planes(again) == planes(expected)
    assert bool((logits_after(model, restored.cache, 5) == logits_after(model, twin.cache, 5)).all())


def test_a_capture_waits_for_what_torch_has_enqueued(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    part = torch.zeros(2, 6, 8, dtype=torch.bfloat16)
    device = on_device.device_of(part)
    assert device is not None
    machine.null.put(lambda: fill(part, 1))
    ones = np.frombuffer(on_device.read_rows(device, [part]), dtype=np.uint16)
    assert set(ones.tolist()) == {0x3F80}
    if machine.schedule == "on demand":  # the control: without the wait the rows are too old
        monkeypatch.setattr(on_device, "_behind_torch", lambda device, tensor: None)
        machine.null.put(lambda: fill(part, 2))
        assert set(np.frombuffer(on_device.read_rows(device, [part]), dtype=np.uint16).tolist()) == {0x3F80}
        machine.null.synchronize()


def test_an_install_that_fails_lets_go_of_everything(model: Any, machine: Machine) -> None:
    cache, logits, tokens = session(model, COUNT)
    cut = engine.capture(model, cache, tokens, logits=logits)
    machine.failing["memcpyAsync"] = (2, 719)
    with pytest.raises(EngineError) as failure:
        engine.install(cut, model)
    assert failure.value.code == "cuda-error"


def test_tensors_of_the_host_are_staged() -> None:
    torch = pytest.importorskip("torch")
    assert on_device.device_of(torch.zeros(1)) is None
