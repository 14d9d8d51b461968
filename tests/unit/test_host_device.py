"""The host device against a model that moves one byte at a time, poison around every row, and its refusals."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import kvpack.device.checks as checks
import kvpack.device.host as host
from kvpack.device.checks import check_places_disjoint
from kvpack.device.host import HostBuffer, HostDevice
from kvpack.device.protocol import Device, Move, RowStrides
from kvpack.errors import EngineError, InstallError, KvpackError, ResourceError

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


def places(move: Move) -> Iterator[tuple[int, int]]:
    """(byte of the plane, byte of the packed rows) of every byte of a move, by the definition of RowStrides."""
    s, packed = move.strides, move.packed_offset
    for first, count in move.runs:
        for row in range(first, first + count):
            for part in range(s.parts):
                for byte in range(s.part_bytes):
                    yield s.base + row * s.row_stride + part * s.part_stride + byte, packed
                    packed += 1


@dataclass(frozen=True)
class Case:
    """Moves over one or more buffers and a packed size with slack."""

    moves: tuple[Move, ...]
    packed_bytes: int


@st.composite
def plane_moves(draw: st.DrawFn, device: HostDevice, packed_offset: int) -> Move:
    """One plane in any layout, and disjoint runs of its rows in any order, as rings, spans and pages give them."""
    parts, part_bytes = draw(st.integers(1, 5)), draw(st.integers(1, 20))
    capacity = draw(st.integers(1, 24))
    gap, base = draw(st.integers(0, 5)), draw(st.integers(0, 9))
    if draw(st.booleans()):
        part_stride = part_bytes + draw(st.integers(0, 3))
        strides = RowStrides(parts, part_bytes, (parts - 1) * part_stride + part_bytes + gap, part_stride, base)
        nbytes = base + capacity * strides.row_stride
    else:
        row_stride = part_bytes + draw(st.integers(0, 3))
        strides = RowStrides(parts, part_bytes, row_stride, capacity * row_stride + gap, base)
        nbytes = base + parts * strides.part_stride
    cuts = sorted(draw(st.lists(st.integers(0, capacity), max_size=8)))
    runs = [(a, b - a) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    runs = draw(st.permutations(runs))
    buffer = filled(device, nbytes + draw(st.integers(0, 7)))
    return Move(buffer, strides, tuple(runs), packed_offset)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    device = HostDevice(1)
    moves: list[Move] = []
    offset = draw(st.integers(0, 5))
    for _ in range(draw(st.integers(0, 3))):
        moves.append(draw(plane_moves(device, offset)))
        offset += moves[-1].nbytes + draw(st.integers(0, 5))
    return Case(tuple(draw(st.permutations(moves))), offset + draw(st.integers(0, 5)))


def scatter_differs(device: HostDevice, case: Case) -> bool:
    """Whether any byte of any plane is not what the model expects after a scatter into poison."""
    packed = np.arange(case.packed_bytes, dtype=np.int64).astype(np.uint8) ^ 0x3C
    expected = []
    for move in case.moves:
        assert isinstance(move.buffer, HostBuffer)
        move.buffer.array[:] = POISON
        plane = move.buffer.array.copy()
        for place, row in places(move):
            plane[place] = packed[row]
        expected.append(plane)
    device.scatter(case.moves, packed.data.toreadonly())
    return any(
        not np.array_equal(plane, move.buffer.array)  # type: ignore[attr-defined]
        for move, plane in zip(case.moves, expected, strict=True)
    )


def gather_differs(device: HostDevice, case: Case) -> bool:
    """Whether any packed byte is not what the model expects, or a plane changed."""
    packed = np.full(case.packed_bytes, POISON, dtype=np.uint8)
    expected = packed.copy()
    before = []
    for seed, move in enumerate(case.moves):
        assert isinstance(move.buffer, HostBuffer)
        plane = move.buffer.array
        plane[:] = np.random.default_rng(seed).integers(0, 256, plane.nbytes, dtype=np.uint8)
        before.append(plane.copy())
        for place, row in places(move):
            expected[row] = plane[place]
    device.gather(case.moves, packed.data)
    return not np.array_equal(packed, expected) or any(
        not np.array_equal(plane, move.buffer.array)  # type: ignore[attr-defined]
        for move, plane in zip(case.moves, before, strict=True)
    )


@given(cases(), st.sampled_from([0, 1 << 16]))
@settings(max_examples=300)
def test_moves_equal_the_model(case: Case, short_run: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "SHORT_RUN_BYTES", short_run)
        assert not scatter_differs(HostDevice(1), case)
        assert not gather_differs(HostDevice(1), case)


@given(cases(), st.integers(1, 64), st.sampled_from([0, 1 << 16]))
@settings(max_examples=60)
def test_pieces_and_threads_change_no_byte(case: Case, piece_bytes: int, short_run: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "PIECE_BYTES", piece_bytes)
        patch.setattr(host, "THREADED_BYTES", 1)
        patch.setattr(host, "SHORT_RUN_BYTES", short_run)
        assert not scatter_differs(HostDevice(3), case)
        assert not gather_differs(HostDevice(3), case)


def wrapped_case(pages: bool) -> Case:
    """A head-major ring that wraps and a padded token-major plane of the same rows."""
    device = HostDevice(1)
    runs = ((5, 2), (1, 3), (8, 1)) if pages else ((5, 4), (0, 3))
    first = Move(filled(device, 300), RowStrides(3, 7, 8, 80, 4), runs, 2)
    second = Move(filled(device, 300), RowStrides(2, 5, 16, 6, 1), runs, first.packed_offset + first.nbytes + 1)
    return Case((first, second), second.packed_offset + second.nbytes + 40)


def mutated(fault: Callable[[Move], Move]) -> Callable[..., Any]:
    original = host._pieces

    def pieces(plane: Bytes, strides: RowStrides, runs: Any, packed: Bytes, offset: int) -> Any:
        move = fault(Move(HostBuffer(plane), strides, tuple(runs), offset))
        return original(plane, move.strides, move.runs, packed, move.packed_offset)

    return pieces


FAULTS: dict[str, Callable[[Move], Move]] = {
    "wrap off by one": lambda m: replace(m, runs=(m.runs[0], *((a + 1, n) for a, n in m.runs[1:]))),
    "runs in physical order": lambda m: replace(m, runs=tuple(sorted(m.runs))),
    "head stride": lambda m: replace(m, strides=replace(m.strides, part_stride=m.strides.part_stride + 1)),
    "row stride": lambda m: replace(m, strides=replace(m.strides, row_stride=m.strides.row_stride - 1)),
    "base forgotten": lambda m: replace(m, strides=replace(m.strides, base=0)),
    "packed offset": lambda m: replace(m, packed_offset=m.packed_offset + 1),
    "last row forgotten": lambda m: replace(m, runs=(*m.runs[:-1], (m.runs[-1][0], m.runs[-1][1] - 1))),
    "a row too many": lambda m: replace(m, runs=(*m.runs[:-1], (m.runs[-1][0], m.runs[-1][1] + 1))),
}


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(monkeypatch: pytest.MonkeyPatch, fault: str, pages: bool) -> None:
    case = wrapped_case(pages)
    assert not scatter_differs(HostDevice(1), case)
    assert not gather_differs(HostDevice(1), case)
    monkeypatch.setattr(host, "_pieces", mutated(FAULTS[fault]))
    assert scatter_differs(HostDevice(1), case)
    assert gather_differs(HostDevice(1), case)


def test_large_moves_are_threaded_and_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    original = host._scatter

    def watched(pieces: Any) -> None:
        seen.add(threading.current_thread().name)
        original(pieces)

    monkeypatch.setattr(host, "_scatter", watched)
    device = HostDevice(2)
    rows, heads, part = 40_000, 2, 256
    plane = device.allocate(rows * heads * part)
    packed = np.random.default_rng(3).integers(0, 256, plane.nbytes, dtype=np.uint8)
    runs = ((12_345, rows - 12_345), (0, 12_345))
    device.scatter([Move(plane, RowStrides(heads, part, part, rows * part), runs, 0)], packed.data)
    expected = np.roll(packed.reshape(rows, heads, part), 12_345, axis=0).transpose(1, 0, 2)
    assert np.array_equal(plane.array.reshape(heads, rows, part), expected)
    assert all(name.startswith("kvpack-host") for name in seen)


def test_the_host_device_is_a_device() -> None:
    device: Device = HostDevice()
    assert device.name == "host"
    device.synchronise()


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, 1_000_003])
def test_allocated_memory_is_zeroed_and_aligned(nbytes: int) -> None:
    buffer = HostDevice().allocate(nbytes)
    assert buffer.nbytes == nbytes
    assert not nbytes or buffer.address % 64 == 0
    assert not buffer.array.any()


@pytest.mark.parametrize("nbytes", [1 << 62, sys.maxsize, 1 << 80])
def test_too_much_memory_is_refused(nbytes: int) -> None:
    with pytest.raises(ResourceError) as refusal:
        HostDevice().allocate(nbytes)
    assert refusal.value.code == "out-of-memory"


@pytest.mark.parametrize("start", [0, 3, 17, 40])
@pytest.mark.parametrize("nbytes", [0, 1, 16, 23])
def test_a_copy_within_a_buffer_goes_through_a_third_place(start: int, nbytes: int) -> None:
    buffer = filled(HostDevice(), 64, None)
    expected = buffer.array.copy()
    expected[20 : 20 + nbytes] = buffer.array[start : start + nbytes].copy()
    HostDevice().copy(buffer, start, buffer, 20, nbytes)
    assert np.array_equal(buffer.array, expected)


def test_write_read_copy_and_fill_touch_what_they_say() -> None:
    device = HostDevice()
    buffer, other = filled(device, 32), filled(device, 32)
    device.write(buffer, 4, memoryview(b"abcdef"))
    device.copy(buffer, 5, other, 20, 4)
    device.fill(other, 30, 2, 7)
    target = bytearray(8)
    device.read(other, 18, memoryview(target))
    assert bytes(buffer.array) == b"\xa5" * 4 + b"abcdef" + b"\xa5" * 22
    assert bytes(target) == b"\xa5\xa5bcde\xa5\xa5"
    assert bytes(other.array[28:]) == b"\xa5\xa5\x07\x07"


def test_wrapped_memory_is_used_in_place_until_it_is_released() -> None:
    device = HostDevice()
    owned = np.zeros((3, 4), dtype=np.uint16)
    buffer = device.wrap(owned)
    device.fill(buffer, 2, 2, 0xFF)
    assert (owned[0, 1], owned.sum()) == (0xFFFF, 0xFFFF)
    buffer.release()
    buffer.release()
    with pytest.raises(EngineError) as refusal:
        device.fill(buffer, 0, 1, 0)
    assert refusal.value.code == "released-memory"


def test_memory_that_cannot_be_used_in_place_is_refused() -> None:
    device = HostDevice()
    fixed = np.zeros(8, dtype=np.uint8)
    fixed.flags.writeable = False
    unusable: dict[str, NDArray[Any]] = {
        "not-contiguous": np.zeros((4, 4))[:, ::2],
        "read-only": fixed,
        "not-memory": np.array([object()]),
    }
    for code, array in unusable.items():
        with pytest.raises(EngineError) as refusal:
            device.wrap(array)
        assert refusal.value.code == code


class Foreign:
    """A buffer that no host device made."""

    nbytes = 64


GOOD = RowStrides(2, 4, 8, 4)


def refused_calls(device: HostDevice, buffer: HostBuffer) -> dict[str, tuple[str, Callable[[], object]]]:
    """Calls that must be refused with the code, each beside a sound part that a hasty device would have done."""
    packed = np.zeros(256, dtype=np.uint8)

    def scatter(*moves: Move) -> Callable[[], None]:
        return lambda: device.scatter(moves, packed.data)

    def gather(*moves: Move) -> Callable[[], None]:
        return lambda: device.gather(moves, packed.data)

    sound = Move(buffer, GOOD, ((0, 2),), 0)
    short = memoryview(bytes(8))
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
        "a buffer of nobody": ("unregistered-memory", lambda: device.fill(Foreign(), 0, 1, 0)),
        "rows past the end": ("out-of-bounds", scatter(sound, Move(buffer, GOOD, ((7, 2),), 16))),
        "a last part past the end": (
            "out-of-bounds",
            scatter(sound, Move(buffer, RowStrides(2, 4, 4, 32), ((3, 6),), 16)),
        ),
        "a row before the start": ("bad-run", scatter(sound, Move(buffer, GOOD, ((-1, 2),), 16))),
        "less than no rows": ("bad-run", scatter(sound, Move(buffer, GOOD, ((5, -1),), 16))),
        "packed rows past the end": ("out-of-bounds", scatter(sound, Move(buffer, GOOD, ((4, 2),), 248))),
        "packed rows before the start": ("out-of-bounds", scatter(sound, Move(buffer, GOOD, ((4, 2),), -8))),
        "parts of nothing": ("bad-strides", scatter(sound, Move(buffer, replace(GOOD, part_bytes=0), ((4, 1),), 16))),
        "a stride backwards": (
            "bad-strides",
            scatter(sound, Move(buffer, replace(GOOD, row_stride=-8), ((4, 1),), 16)),
        ),
        "a row twice": ("overlapping-destinations", scatter(sound, Move(buffer, GOOD, ((1, 1),), 16))),
        "a row twice in one move": ("overlapping-destinations", scatter(Move(buffer, GOOD, ((0, 3), (2, 1)), 0))),
        "rows within rows": (
            "overlapping-destinations",
            scatter(Move(buffer, replace(GOOD, row_stride=6), ((0, 2),), 0)),
        ),
        "parts within parts": (
            "overlapping-destinations",
            scatter(Move(buffer, RowStrides(2, 4, 16, 3), ((0, 2),), 0)),
        ),
        "packed rows twice": (
            "overlapping-destinations",
            gather(sound, Move(buffer, GOOD, ((4, 2),), 8)),
        ),
        "rows gathered onto themselves": (
            "overlapping-destinations",
            lambda: device.gather([sound], buffer.array.data),
        ),
        "rows scattered from themselves": (
            "overlapping-destinations",
            lambda: device.scatter([sound], buffer.array.data),
        ),
        "no thread": ("bad-value", lambda: HostDevice(0)),
        "less than no memory": ("bad-run", lambda: device.allocate(-1)),
    }


NAMES = list(refused_calls(HostDevice(1), HostDevice(1).allocate(64)))


@pytest.mark.parametrize("name", NAMES)
def test_a_refusal_changes_nothing(name: str) -> None:
    device = HostDevice(1)
    buffer = filled(device, 64, None)
    before = buffer.array.copy()
    code, call = refused_calls(device, buffer)[name]
    with pytest.raises(KvpackError) as refusal:
        call()
    assert refusal.value.code == code
    assert isinstance(refusal.value, InstallError | EngineError)
    assert np.array_equal(buffer.array, before)


def test_two_buffers_over_the_same_memory_are_seen() -> None:
    device = HostDevice(1)
    memory = np.zeros(64, dtype=np.uint8)
    twins = [Move(device.wrap(memory), GOOD, ((0, 1),), 0), Move(device.wrap(memory), GOOD, ((0, 1),), 8)]
    with pytest.raises(InstallError) as refusal:
        device.scatter(twins, memoryview(bytes(16)))
    assert refusal.value.code == "overlapping-destinations"


def test_keys_and_values_may_alternate_within_a_row() -> None:
    device = HostDevice(1)
    buffer = filled(device, 64)
    keys, values = (Move(buffer, RowStrides(1, 4, 8, 4, base), ((0, 8),), at) for base, at in ((0, 0), (4, 32)))
    device.scatter([keys, values], memoryview(bytes(range(64))))
    assert bytes(buffer.array[:12]) == bytes([0, 1, 2, 3, 32, 33, 34, 35, 4, 5, 6, 7])
    with pytest.raises(InstallError) as refusal:
        device.scatter(
            [keys, replace(values, strides=RowStrides(1, 5, 8, 5, 3), runs=((0, 6),))], memoryview(bytes(64))
        )
    assert refusal.value.code == "overlapping-destinations"


def test_pages_that_alternate_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[list[int]] = []
    original = checks._check_exactly

    def watched(moves: Sequence[Move], addresses: Sequence[int], members: list[int]) -> None:
        searched.append(members)
        original(moves, addresses, members)

    monkeypatch.setattr(checks, "_check_exactly", watched)
    buffer = HostDevice(1).allocate(8 * 64)
    pages = tuple((row, 2) for row in range(60, -1, -4))
    keys, values = (Move(buffer, RowStrides(1, 3, 8, 3, base), pages, 0) for base in (0, 4))
    other = Move(buffer, GOOD, ((0, 8),), 0)
    here, there = buffer.address, 1 << 40
    check_places_disjoint([keys, other], [here, there])
    assert searched == []
    check_places_disjoint([other, keys, values], [there, here, here])
    assert searched == [[1, 2]]
    with pytest.raises(InstallError):
        check_places_disjoint([keys, replace(values, strides=RowStrides(1, 3, 8, 3, 2))], [here, here])


@given(st.data())
@settings(max_examples=300)
def test_the_search_for_double_writes_is_exact(data: st.DataObject) -> None:
    small = st.integers(0, 7)
    buffer = HostDevice(1).allocate(400)
    moves = []
    for _ in range(data.draw(st.integers(1, 3))):
        strides = RowStrides(
            data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)), *data.draw(st.tuples(*[small] * 3))
        )
        moves.append(
            Move(buffer, strides, tuple(data.draw(st.lists(st.tuples(small, st.integers(0, 4)), max_size=3))), 0)
        )
    written = [place for move in moves for place, _ in places(move)]
    if len(written) == len(set(written)):
        check_places_disjoint(moves, [buffer.address] * len(moves))
    else:
        with pytest.raises(InstallError) as refusal:
            check_places_disjoint(moves, [buffer.address] * len(moves))
        assert refusal.value.code == "overlapping-destinations"


def test_the_protocol_is_imported_without_numpy() -> None:
    code = "import sys, kvpack.device, kvpack.device.protocol, kvpack.device.staging; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
