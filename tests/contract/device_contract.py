"""What every device must do, held against the host device: subclass :class:`DeviceContract` and give it a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvpack.device.host import HostDevice
from kvpack.device.protocol import Buffer, Device, Move, RowStrides
from kvpack.device.quantise import quantise
from kvpack.device.staging import Stage
from kvpack.errors import CompatibilityError, EngineError, InstallError, KvpackError
from kvpack.model.encoding import ENCODINGS

HOST = HostDevice(1)
Bytes = NDArray[np.uint8]
GOOD = RowStrides(2, 4, 8, 4)


@dataclass(frozen=True)
class Plane:
    """A plane's size, its strides and the runs of rows that move."""

    nbytes: int
    strides: RowStrides
    runs: tuple[tuple[int, int], ...]


def random_bytes(nbytes: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def filled(device: Device, content: Bytes) -> Buffer:
    buffer = device.allocate(content.nbytes)
    device.write(buffer, 0, content.data)
    return buffer


def content(device: Device, buffer: Buffer) -> Bytes:
    found = np.zeros(buffer.nbytes, dtype=np.uint8)
    device.read(buffer, 0, found.data)
    return found


@st.composite
def planes(draw: st.DrawFn) -> Plane:
    """Any layout; disjoint runs in any order, as rings, spans and pages give them."""
    parts = draw(st.integers(1, 4))
    part_bytes = draw(st.sampled_from([1, 2, 6, 8, 16, 34, 48, 256, 1500]))
    capacity = draw(st.integers(1, 40))
    gap, base = draw(st.sampled_from([0, 0, 1, 2, 16])), draw(st.sampled_from([0, 0, 3, 8, 16]))
    if draw(st.booleans()):
        strides = RowStrides(parts, part_bytes, parts * part_bytes + gap, part_bytes, base)
        nbytes = base + capacity * strides.row_stride
    else:
        strides = RowStrides(parts, part_bytes, part_bytes + gap, capacity * (part_bytes + gap), base)
        nbytes = base + parts * strides.part_stride
    law = draw(st.sampled_from(["any", "ring", "pages"]))
    if law == "ring":
        low = draw(st.integers(0, capacity - 1))
        turn = draw(st.integers(low, capacity - 1))
        return Plane(nbytes, strides, ((turn, capacity - turn), (low, turn - low)))
    if law == "pages":
        size = draw(st.integers(1, capacity))
        numbers = draw(st.permutations(range(capacity // size)))
        return Plane(nbytes, strides, tuple((number * size, size) for number in numbers))
    cuts = sorted(draw(st.lists(st.integers(0, capacity), max_size=8)))
    runs = [(a, b - a) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    return Plane(nbytes, strides, tuple(draw(st.permutations(runs))))


def moves_of(device: Device, cases: list[Plane], split: bool) -> tuple[list[Move], int]:
    """Moves over planes of seeded bytes, with gaps between the packed rows; ``split`` makes each run a move, as a live
    cache does."""
    moves: list[Move] = []
    offset = 5
    for seed, case in enumerate(cases):
        buffer = filled(device, random_bytes(case.nbytes, seed))
        for runs in ((run,) for run in case.runs) if split else (case.runs,):
            moves.append(Move(buffer, case.strides, runs, offset))
            offset += moves[-1].nbytes
        offset += seed
    return moves, offset + 3


def stage_job(device: Device, **fields: Any) -> Stage:
    """A head-major ring of 9 rows and a token-major shadow."""
    heads, part, ring_rows, rotation, rows, chunk_rows = 2, 16, 9, 5, 8, 4
    encoding = fields.get("encoding")
    numbers = np.random.default_rng(3).standard_normal(chunk_rows * heads * part // 2 + 1, dtype=np.float32)
    numbers[7] = np.nan
    chunk = numbers.view(np.uint8) if encoding else random_bytes(chunk_rows * heads * part + 4, 4)
    job = Stage(
        ring=filled(device, random_bytes(heads * ring_rows * part + 2, 1)),
        ring_strides=RowStrides(heads, part, part, ring_rows * part, 2),
        ring_rows=ring_rows,
        rotation=rotation,
        rows=rows,
        shadow=filled(device, random_bytes((rows + chunk_rows) * heads * part + 16, 2)),
        shadow_strides=RowStrides(heads, part, heads * part, part, 4),
        chunk=filled(device, chunk),
        chunk_offset=4,
        chunk_rows=chunk_rows,
    )
    return replace(job, **fields)


class DeviceContract:
    """Tests of one device; ``opened`` gives a fresh one for each example."""

    def opened(self) -> AbstractContextManager[Any]:
        raise AssertionError("a subclass gives the device")

    @pytest.fixture
    def device(self) -> Iterator[Any]:
        with self.opened() as device:
            yield device

    def test_it_is_a_device(self, device: Any) -> None:
        as_device: Device = device
        assert as_device.name
        as_device.synchronise()

    @pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, 100_003])
    def test_allocated_memory_is_zeroed(self, device: Any, nbytes: int) -> None:
        buffer = device.allocate(nbytes)
        assert buffer.nbytes == nbytes
        assert not content(device, buffer).any()

    def test_too_much_memory_is_refused(self, device: Any) -> None:
        for nbytes in (1 << 50, 1 << 62, 1 << 80):
            with pytest.raises(KvpackError) as refusal:
                device.allocate(nbytes)
            assert refusal.value.code == "out-of-memory"

    @pytest.mark.parametrize("nbytes", [1, 17, 5_000, 70_001])
    def test_bytes_come_back(self, device: Any, nbytes: int) -> None:
        buffer = device.allocate(nbytes + 6)
        given_bytes = random_bytes(nbytes, 1)
        before = given_bytes.copy()
        device.write(buffer, 3, given_bytes.data)
        given_bytes[:] = 0  # it is the caller's again
        found = content(device, buffer)
        assert np.array_equal(found[3:-3], before)
        assert not found[:3].any()
        assert not found[-3:].any()

    @pytest.mark.parametrize("to", [0, 1, 300, 5_000, 12_000])
    @pytest.mark.parametrize("nbytes", [0, 5, 4_000, 17_000])
    def test_a_copy_goes_through_a_third_place(self, device: Any, to: int, nbytes: int) -> None:
        before = random_bytes(30_000, 2)
        buffer = filled(device, before)
        device.copy(buffer, 5_000, buffer, to, nbytes)
        before[to : to + nbytes] = before[5_000 : 5_000 + nbytes].copy()
        assert np.array_equal(content(device, buffer), before)

    def test_a_fill_sets_what_it_says(self, device: Any) -> None:
        buffer, expected = filled(device, random_bytes(100, 3)), random_bytes(100, 3)
        device.fill(buffer, 30, 40, 0xEE)
        expected[30:70] = 0xEE
        assert np.array_equal(content(device, buffer), expected)

    def test_moves_equal_the_hosts(self) -> None:
        # Inside, because one function cannot be the property of several classes.
        @given(st.lists(planes(), max_size=4), st.booleans())
        @settings(max_examples=40)
        def check(cases: list[Plane], split: bool) -> None:
            with self.opened() as device:
                moves, packed_bytes = moves_of(device, cases, split)
                twins, _ = moves_of(HOST, cases, split)
                packed = random_bytes(packed_bytes, 99)
                out, expected = packed.copy(), packed.copy()
                device.gather(moves, out.data)
                HOST.gather(twins, expected.data)
                assert np.array_equal(out, expected)
                device.scatter(moves, packed.data.toreadonly())
                HOST.scatter(twins, packed.data.toreadonly())
                for move, twin in zip(moves, twins, strict=True):
                    assert np.array_equal(content(device, move.buffer), content(HOST, twin.buffer))

        check()

    def test_operations_keep_their_order(self, device: Any) -> None:
        """Later bytes win, however the operations that bring them are mixed."""
        buffer, other = device.allocate(640), device.allocate(640)
        twin, twin_other = HOST.allocate(640), HOST.allocate(640)
        rng = np.random.default_rng(11)
        for step in range(120):
            at, size = int(rng.integers(0, 600)), int(rng.integers(1, 40))
            rows = random_bytes(640, step)
            runs = ((int(rng.integers(0, 70)), int(rng.integers(1, 10))),)
            kind = step % 4 if step < 100 else 1
            for where, one, two in ((device, buffer, other), (HOST, twin, twin_other)):
                if kind == 0:
                    where.write(one, at, rows[:size].data)
                elif kind == 1:
                    where.scatter([Move(one, RowStrides(2, 4, 8, 4), runs, 3)], rows.data)
                elif kind == 2:
                    where.copy(one, at, two, (at * 7) % 600, size)
                else:
                    where.fill(two, at, size, step)
        assert np.array_equal(content(device, buffer), content(HOST, twin))
        assert np.array_equal(content(device, other), content(HOST, twin_other))

    @pytest.mark.parametrize("encoding", [None, "f16", "bf16"])
    def test_stage_equals_the_hosts(self, device: Any, encoding: str | None) -> None:
        fields = {"encoding": ENCODINGS[encoding] if encoding else None}
        jobs, twins = ([stage_job(where, **fields), stage_job(where)] for where in (device, HOST))
        device.stage(jobs)
        HOST.stage(twins)
        for job, twin in zip(jobs, twins, strict=True):
            assert np.array_equal(content(device, job.shadow), content(HOST, twin.shadow))
            assert np.array_equal(content(device, job.ring), content(HOST, twin.ring))

    @pytest.mark.parametrize(
        ("code", "fields"),
        [
            ("bad-ring", {"rotation": 9}),
            ("bad-ring", {"rows": 10}),
            ("out-of-bounds", {"chunk_rows": 9}),
            ("bad-strides", {"ring_strides": RowStrides(2, 5, 5, 40)}),
            ("no-conversion", {"encoding": ENCODINGS["q8_0"]}),
        ],
    )
    def test_a_refused_stage_changes_nothing(self, device: Any, code: str, fields: dict[str, Any]) -> None:
        sound, job = stage_job(device), stage_job(device, **fields)
        before = content(device, sound.shadow)
        with pytest.raises(InstallError) as refusal:
            device.stage([sound, job])
        assert refusal.value.code == code
        assert np.array_equal(content(device, sound.shadow), before)

    @pytest.mark.parametrize("source", ["f32", "f16", "bf16", "f8_e4m3", "q8_0", "q4_1"])
    @pytest.mark.parametrize("target", ["f32", "f16", "bf16", "f8_e5m2", "q8_0", "q5_0"])
    def test_convert_equals_the_hosts(self, device: Any, source: str, target: str) -> None:
        elements, of, to = 1920, ENCODINGS[source], ENCODINGS[target]
        numbers = np.random.default_rng(5).standard_normal(elements).astype(np.float32)
        stored = np.concatenate([random_bytes(3, 0), quantise(of, numbers).reshape(-1)])
        read, twin = filled(device, stored), filled(HOST, stored)
        size = to.block_bytes * elements // to.block_elements
        write, expected = (filled(where, random_bytes(size + 8, 6)) for where in (device, HOST))
        device.convert(read, 3, of, write, 5, to, elements)
        HOST.convert(twin, 3, of, expected, 5, to, elements)
        assert np.array_equal(content(device, write), content(HOST, expected))

    @pytest.mark.parametrize(
        ("code", "call"),
        [
            ("bad-row-shape", ("f32", 0, "q8_0", 0, 48)),
            ("out-of-bounds", ("f32", 4096, "f16", 0, 64)),
            ("out-of-bounds", ("f32", 0, "f32", 8100, 64)),
            ("bad-run", ("f32", 0, "f16", 0, -32)),
            ("no-conversion", ("f32", 0, "iq4_nl", 0, 64)),
            ("no-conversion", ("i32", 0, "f32", 0, 64)),
            ("not-finite", ("f32", 0, "q8_0", 0, 1024)),
        ],
    )
    def test_a_refused_conversion_changes_nothing(
        self, device: Any, code: str, call: tuple[str, int, str, int, int]
    ) -> None:
        of, read_at, to, write_at, elements = call
        numbers = np.zeros(1024, dtype=np.float32)
        numbers[-1] = np.nan
        read, write = filled(device, numbers.view(np.uint8)), filled(device, random_bytes(8192, 7))
        with pytest.raises((InstallError, CompatibilityError)) as refusal:
            device.convert(read, read_at, ENCODINGS[of], write, write_at, ENCODINGS[to], elements)
        assert refusal.value.code == code
        assert np.array_equal(content(device, write), random_bytes(8192, 7))

    def refused_calls(self, device: Any, buffer: Buffer) -> dict[str, tuple[str, Callable[[], object]]]:
        packed = np.zeros(256, dtype=np.uint8)
        short = memoryview(bytes(8))
        sound = Move(buffer, GOOD, ((0, 2),), 0)
        released = device.allocate(64)
        released.release()

        def scatter(*moves: Move) -> Callable[[], None]:
            return lambda: device.scatter(moves, packed.data)

        return {
            "write past the end": ("out-of-bounds", lambda: device.write(buffer, 60, short)),
            "write before the start": ("out-of-bounds", lambda: device.write(buffer, -1, short)),
            "read past the end": ("out-of-bounds", lambda: device.read(buffer, 60, memoryview(bytearray(8)))),
            "read into fixed bytes": ("read-only", lambda: device.read(buffer, 0, short)),
            "write of every other byte": ("not-contiguous", lambda: device.write(buffer, 0, short[::2])),
            "copy past the end": ("out-of-bounds", lambda: device.copy(buffer, 0, buffer, 60, 8)),
            "copy of less than nothing": ("bad-run", lambda: device.copy(buffer, 0, buffer, 8, -4)),
            "fill past the end": ("out-of-bounds", lambda: device.fill(buffer, 63, 2, 0)),
            "fill with no byte": ("bad-value", lambda: device.fill(buffer, 0, 2, 256)),
            "a buffer of nobody": ("unregistered-memory", lambda: device.fill(object(), 0, 1, 0)),
            "a buffer of another device": ("unregistered-memory", scatter(sound, replace(sound, buffer=_Foreign()))),
            "a buffer that was released": ("released-memory", scatter(sound, replace(sound, buffer=released))),
            "a block out of range": ("out-of-bounds", scatter(sound, Move(buffer, GOOD, ((4, 2), (8, 2), (2, 1)), 16))),
            "a row before the start": ("bad-run", scatter(sound, Move(buffer, GOOD, ((-1, 2),), 16))),
            "packed rows past the end": ("out-of-bounds", scatter(sound, Move(buffer, GOOD, ((4, 2),), 248))),
            "parts of nothing": (
                "bad-strides",
                scatter(sound, Move(buffer, replace(GOOD, part_bytes=0), ((4, 1),), 16)),
            ),
            "a row twice": ("overlapping-destinations", scatter(sound, Move(buffer, GOOD, ((1, 1),), 16))),
            "parts within parts": (
                "overlapping-destinations",
                scatter(Move(buffer, RowStrides(2, 4, 16, 3), ((0, 2),), 0)),
            ),
            "packed rows twice": (
                "overlapping-destinations",
                lambda: device.gather([sound, Move(buffer, GOOD, ((4, 2),), 8)], packed.data),
            ),
            "less than no memory": ("bad-run", lambda: device.allocate(-1)),
        }

    def test_a_refusal_changes_nothing(self, device: Any) -> None:
        buffer, before = filled(device, random_bytes(64, 8)), random_bytes(64, 8)
        for name, (code, call) in self.refused_calls(device, buffer).items():
            with pytest.raises(KvpackError) as refusal:
                call()
            assert refusal.value.code == code, name
            assert isinstance(refusal.value, InstallError | EngineError), name
            assert np.array_equal(content(device, buffer), before), name


class _Foreign:
    """A buffer that no device made."""

    nbytes = 64
