"""Staging and conversion on the host device: against their definitions, with their controls and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import kvpack.device.host as host
from kvpack.device.host import HostBuffer, HostDevice
from kvpack.device.protocol import RowStrides
from kvpack.device.quantise import dequantise, quantise
from kvpack.device.staging import Stage
from kvpack.errors import CompatibilityError, InstallError
from kvpack.model.encoding import ENCODINGS

POISON = 0xA5
Bytes = NDArray[np.uint8]


def filled(device: HostDevice, nbytes: int, value: int | None = POISON, seed: int = 0) -> HostBuffer:
    """A buffer of one value, or of seeded random bytes."""
    buffer = device.allocate(nbytes)
    if value is None:
        buffer.array[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    else:
        buffer.array[:] = value
    return buffer


def stage_job(
    device: HostDevice, ring_rows: int, rotation: int, rows: int, chunk_rows: int, encoding: str | None
) -> Stage:
    """A head-major ring and a token-major shadow, f16 or bf16 parts of 3 elements, poison around the shadow's rows."""
    heads, part = 2, 6
    ring = filled(device, 5 + heads * ring_rows * part, None, seed=1)
    chunk_bytes = chunk_rows * heads * (12 if encoding else part)
    chunk = filled(device, chunk_bytes + 12, None, seed=2)
    if encoding:
        numbers = np.random.default_rng(4).standard_normal((chunk_bytes + 8) // 4).astype(np.float32)
        chunk.array[4:] = numbers.view(np.uint8)
    shadow = filled(device, 3 + (rows + chunk_rows) * heads * part + 9)
    return Stage(
        ring=ring,
        ring_strides=RowStrides(heads, part, part, ring_rows * part, 5),
        ring_rows=ring_rows,
        rotation=rotation,
        rows=rows,
        shadow=shadow,
        shadow_strides=RowStrides(heads, part, heads * part, part, 3),
        chunk=chunk,
        chunk_offset=4,
        chunk_rows=chunk_rows,
        encoding=ENCODINGS[encoding] if encoding else None,
    )


def staged(job: Stage) -> Bytes:
    """The shadow as the definition has it, row by row."""
    assert isinstance(job.ring, HostBuffer)
    assert isinstance(job.shadow, HostBuffer)
    assert isinstance(job.chunk, HostBuffer)
    shadow = job.shadow.array.copy()
    row_bytes = job.shadow_strides.row_bytes
    chunk = job.chunk.array[job.chunk_offset : job.chunk_offset + job.chunk_bytes]
    if job.encoding is not None:
        chunk = quantise(job.encoding, chunk.copy().view(np.float32)) if chunk.nbytes else chunk
    for row in range(job.rows + job.chunk_rows):
        slot = (job.rotation + row) % job.ring_rows
        for head in range(job.ring_strides.parts):
            if row < job.rows:
                at = job.ring_strides.base + slot * job.ring_strides.row_stride + head * job.ring_strides.part_stride
                part = job.ring.array[at : at + 6]
            else:
                at = (row - job.rows) * row_bytes + head * 6
                part = chunk[at : at + 6]
            place = job.shadow_strides.base + row * row_bytes + head * 6
            shadow[place : place + 6] = part
    return shadow


@given(
    st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1), st.integers(0, n))),
    st.integers(0, 9),
    st.sampled_from([None, "f16", "bf16"]),
)
def test_stage_unrotates_the_ring_and_appends_the_chunk(
    ring: tuple[int, int, int], chunk_rows: int, encoding: str | None
) -> None:
    device = HostDevice(1)
    jobs = [stage_job(device, *ring, chunk_rows, encoding), stage_job(device, 4, 3, 4, 2, None)]
    expected = [staged(job) for job in jobs]
    rings = [job.ring.array.copy() for job in jobs]  # type: ignore[attr-defined]
    device.stage(jobs)
    for job, shadow, before in zip(jobs, expected, rings, strict=True):
        assert np.array_equal(job.shadow.array, shadow)  # type: ignore[attr-defined]
        assert np.array_equal(job.ring.array, before)  # type: ignore[attr-defined]


@pytest.mark.parametrize("rotation", [0, 5])
def test_a_stage_that_does_not_unrotate_is_seen(monkeypatch: pytest.MonkeyPatch, rotation: int) -> None:
    device = HostDevice(1)
    job = stage_job(device, 8, rotation, 8, 3, "bf16")
    expected = staged(job)
    monkeypatch.setattr(Stage, "ring_runs", property(lambda job: ((0, job.rows),)))
    device.stage([job])
    assert np.array_equal(job.shadow.array, expected) == (rotation == 0)  # type: ignore[attr-defined]


STAGE_FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a rotation past the ring": ("bad-ring", {"rotation": 8}),
    "a rotation below the ring": ("bad-ring", {"rotation": -1}),
    "more rows than the ring": ("bad-ring", {"rows": 9}),
    "less than no rows": ("bad-run", {"rows": -1}),
    "a chunk of less than no rows": ("bad-run", {"chunk_rows": -1}),
    "a ring past its buffer": ("out-of-bounds", {"ring_rows": 90}),
    "a chunk past the shadow": ("out-of-bounds", {"chunk_rows": 9}),
    "a chunk past its buffer": ("out-of-bounds", {"chunk_offset": 13}),
    "parts that differ": ("bad-strides", {"ring_strides": RowStrides(2, 5, 5, 40)}),
    "a chunk that becomes blocks": ("no-conversion", {"encoding": ENCODINGS["q8_0"]}),
    "half an element": (
        "bad-strides",
        {"ring_strides": RowStrides(2, 5, 5, 40), "shadow_strides": RowStrides(2, 5, 10, 5)},
    ),
}


@pytest.mark.parametrize("name", STAGE_FAULTS)
def test_a_refused_stage_changes_nothing(name: str) -> None:
    device = HostDevice(1)
    sound, job = stage_job(device, 8, 5, 8, 3, "f16"), stage_job(device, 8, 5, 8, 3, "f16")
    code, fault = STAGE_FAULTS[name]
    before = [j.shadow.array.copy() for j in (sound, job)]  # type: ignore[attr-defined]
    with pytest.raises(InstallError) as refusal:
        device.stage([sound, replace(job, **fault)])
    assert refusal.value.code == code
    for j, shadow in zip((sound, job), before, strict=True):
        assert np.array_equal(j.shadow.array, shadow)  # type: ignore[attr-defined]


@pytest.mark.parametrize("field", ["ring", "chunk", "shadow"])
def test_a_shadow_over_memory_of_the_same_call_is_refused(field: str) -> None:
    device = HostDevice(1)
    first, second = stage_job(device, 8, 5, 8, 3, None), stage_job(device, 8, 5, 8, 3, None)
    memory = getattr(first, field).array
    shadow = device.wrap(memory)
    strides = RowStrides(2, 6, 12, 6)
    second = replace(second, shadow=shadow, shadow_strides=strides, rows=1, chunk_rows=1)
    with pytest.raises(InstallError) as refusal:
        device.stage([first, second])
    assert refusal.value.code == "overlapping-destinations"


@pytest.mark.parametrize("source", ["f32", "f16", "bf16", "f8_e4m3", "q8_0", "q4_1", "iq4_nl"])
@pytest.mark.parametrize("target", ["f32", "f16", "bf16", "f8_e5m2", "q8_0", "q5_0"])
def test_convert_goes_through_f32(monkeypatch: pytest.MonkeyPatch, source: str, target: str) -> None:
    monkeypatch.setattr(host, "CONVERTED_ELEMENTS", 64)
    device = HostDevice()
    elements, of, to = 160, ENCODINGS[source], ENCODINGS[target]
    numbers = np.random.default_rng(5).standard_normal(elements).astype(np.float32)
    stored = np.full(elements // 32 * 18, 0x15, dtype=np.uint8) if source == "iq4_nl" else quantise(of, numbers)
    expected = stored if of == to else quantise(to, dequantise(of, stored))
    read, write = filled(device, stored.nbytes + 3), filled(device, expected.nbytes + 8)
    read.array[3:] = stored
    device.convert(read, 3, of, write, 5, to, elements)
    assert np.array_equal(write.array[5:-3], expected)
    assert set(write.array[:5]) | set(write.array[-3:]) == {POISON}


def test_equal_encodings_are_copied_untouched() -> None:
    device = HostDevice()
    read, write = filled(device, 36, None, seed=6), device.allocate(36)
    device.convert(read, 0, ENCODINGS["iq4_nl"], write, 0, ENCODINGS["iq4_nl"], 64)
    assert np.array_equal(read.array, write.array)


CONVERSIONS: dict[str, tuple[str, tuple[str, int, str, int, int]]] = {
    "half a block": ("bad-row-shape", ("f32", 0, "q8_0", 0, 48)),
    "past the source": ("out-of-bounds", ("f32", 512, "f16", 0, 64)),
    "past the target": ("out-of-bounds", ("f32", 0, "f32", 960, 64)),
    "less than nothing": ("bad-run", ("f32", 0, "f16", 0, -32)),
    "not written": ("no-conversion", ("f32", 0, "iq4_nl", 0, 64)),
    "no real numbers": ("no-conversion", ("i32", 0, "f32", 0, 64)),
    "a NaN in the last block": ("not-finite", ("f32", 0, "q8_0", 0, 128)),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_refused_conversion_changes_nothing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(host, "CONVERTED_ELEMENTS", 32)
    device = HostDevice()
    code, (of, read_at, to, write_at, elements) = CONVERSIONS[name]
    read, write = device.allocate(512), filled(device, 1024)
    read.array[508:] = np.array([np.nan], dtype=np.float32).view(np.uint8)
    with pytest.raises((InstallError, CompatibilityError)) as refusal:
        device.convert(read, read_at, ENCODINGS[of], write, write_at, ENCODINGS[to], elements)
    assert refusal.value.code == code
    assert set(write.array) == {POISON}


def test_a_conversion_onto_itself_is_refused() -> None:
    buffer = HostDevice().allocate(512)
    with pytest.raises(InstallError) as refusal:
        HostDevice().convert(buffer, 0, ENCODINGS["f32"], buffer, 64, ENCODINGS["f16"], 32)
    assert refusal.value.code == "overlapping-destinations"
