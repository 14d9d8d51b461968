"""``move.cu`` against the host device: whole planes, whole packed buffers, bytes of nobody included."""

from __future__ import annotations

from ctypes import c_uint32, c_uint64
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpack_kernels import abi

from kvpack.device.host import HostDevice
from kvpack.device.protocol import Move
from tests.emulation.build import UNORDERED, address, emulated, examples, memory
from tests.emulation.planes import Bytes, Place, places

HOST = HostDevice(threads=1)


def launch(kernel: str, jobs: list[tuple[Place, int]], planes: list[Bytes], packed: Bytes, order: str) -> int:
    """One launch for all jobs; the number of blocks that it had."""
    rows = [
        (place.in_table(plane), address(packed) + offset) for (place, offset), plane in zip(jobs, planes, strict=True)
    ]
    table, tiles = abi.move_table(rows)
    arguments = c_uint64(address(table)), c_uint32(len(table))
    emulated("move").launch(f"kvpack_{kernel}", tiles, abi.THREADS, *arguments, order=order)
    return tiles


def check(chosen: list[Place], gaps: list[int], packed_start: int, order: str, seed: int) -> int:
    """Gather and scatter these rows with the kernels and with the host device, and compare every byte."""
    rng = np.random.default_rng(seed)
    sizes = [place.rows * place.parts * place.part_bytes + gap for place, gap in zip(chosen, gaps, strict=True)]
    jobs = list(zip(chosen, accumulate(sizes, initial=0), strict=False))
    blocks = 0
    for kernel in ("gather", "scatter"):
        planes = [place.memory(rng) for place in chosen]
        packed = memory(sum(sizes) - gaps[-1], rng, packed_start)
        expected_planes, expected_packed = [plane.copy() for plane in planes], packed.copy()
        moves = [
            Move(HOST.wrap(plane), place.strides, place.runs(), offset)
            for (place, offset), plane in zip(jobs, expected_planes, strict=True)
        ]
        getattr(HOST, kernel)(moves, memoryview(expected_packed))
        blocks = launch(kernel, jobs, planes, packed, order)
        assert np.array_equal(packed, expected_packed), kernel
        for number, (plane, expected) in enumerate(zip(planes, expected_planes, strict=True)):
            assert np.array_equal(plane, expected), (kernel, number)
    return blocks


@given(
    st.lists(places(), min_size=1, max_size=5),
    st.lists(st.integers(0, 40), min_size=5, max_size=5),
    st.integers(0, 15),
    st.sampled_from(UNORDERED),
    st.integers(0, 1 << 32),
)
@examples(250)
def test_any_mix_of_jobs_in_one_launch(
    chosen: list[Place], gaps: list[int], packed_start: int, order: str, seed: int
) -> None:
    check(chosen, gaps[: len(chosen)], packed_start, order, seed)


@given(
    st.lists(places(st.integers(1, 64).map(lambda n: n * 16), aligned_to=16), min_size=1, max_size=4),
    st.sampled_from(UNORDERED),
    st.integers(0, 1 << 32),
)
@examples(150)
def test_the_wide_path(chosen: list[Place], order: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table, _ = abi.move_table([(place.in_table(place.memory(rng)), 16) for place in chosen])
    assert set(table["unit_bytes"].tolist()) == {16}
    check(chosen, [0] * len(chosen), 0, order, seed)


@pytest.mark.parametrize("order", UNORDERED)
@pytest.mark.parametrize("head_major", [False, True])
def test_every_rotation_of_a_small_ring(head_major: bool, order: str) -> None:
    ring = [
        Place(parts=3, part_bytes=34, head_major=head_major, capacity=7, first=first, rows=rows, wraps=True)
        for first in range(7)
        for rows in range(1, 8)
    ]
    check(ring, [0] * len(ring), 0, order, 1)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 4096])
def test_rows_around_the_ends_of_tiles(rows: int) -> None:
    places_ = [
        Place(parts=1, part_bytes=size, head_major=True, capacity=rows + 1, first=0, rows=rows, offset=offset)
        for size, offset in ((16, 0), (8, 8), (4, 4), (2, 2), (1, 1))
    ]
    check(places_, [0] * len(places_), 0, "reverse", rows)


def test_as_many_jobs_as_a_large_model_has_planes() -> None:
    layers = [
        Place(parts=2, part_bytes=256, head_major=layer % 2 == 0, capacity=40, first=layer % 40, rows=1 + layer % 40,
              wraps=True)
        for layer in range(2 * 61)
    ]  # fmt: skip
    check(layers, [0] * len(layers), 0, "shuffled", 2)


@pytest.mark.parametrize("order", UNORDERED)
def test_the_largest_geometry(order: str) -> None:
    """16 heads of 512 f16 elements, 5,000 rows: offsets beyond 2²⁶ bytes, a wrap in the middle."""
    ring = Place(parts=16, part_bytes=1024, head_major=True, capacity=5000, first=4990, rows=25, wraps=True)
    check([ring], [0], 0, order, 3)


def test_bytes_moved_are_bytes_needed() -> None:
    """The units of a table are the rows' bytes, each once: the movers read and write 1.00 times what they must."""
    rng = np.random.default_rng(4)
    ring = Place(parts=4, part_bytes=136, head_major=False, capacity=300, first=299, rows=300, wraps=True)
    table, tiles = abi.move_table([(ring.in_table(ring.memory(rng)), 16)] * 3)
    assert int((table["units"].astype(np.int64) * table["unit_bytes"]).sum()) == 3 * 300 * 4 * 136
    assert tiles == sum(-(-units // abi.TILE_UNITS) for units in table["units"].tolist())
