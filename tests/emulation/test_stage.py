"""``stage.cu`` against the host device: whole shadows, and rings and chunks that must stay as they were."""

from __future__ import annotations

from ctypes import c_uint32, c_uint64
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpack_kernels import abi

from kvpack.device.host import HostDevice
from kvpack.device.staging import Stage
from kvpack.model.encoding import ENCODINGS
from tests.emulation.build import UNORDERED, address, emulated, examples, memory
from tests.emulation.planes import QUANTISED_BYTES, Bytes, Place, places

HOST = HostDevice(threads=1)


@dataclass(frozen=True)
class Staged:
    """A ring with its live rows, a chunk behind them, and a shadow of its own layout."""

    ring: Place
    shadow: Place
    chunk_rows: int
    format: str
    chunk_offset: int

    @property
    def chunk_part_bytes(self) -> int:
        """Bytes of a head in the chunk."""
        return self.ring.part_bytes * (1 if self.format == "raw" else 2)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the chunk."""
        return self.chunk_rows * self.ring.parts * self.chunk_part_bytes


@st.composite
def stages(draw: st.DrawFn) -> Staged:
    format_ = draw(st.sampled_from(("f16", "bf16", "raw")))
    sizes = st.one_of(st.integers(8, 512).map(lambda n: 2 * n), st.integers(1, 64).map(lambda n: 16 * n))
    if format_ == "raw":
        sizes = st.one_of(sizes, st.integers(1, 300), st.sampled_from([4 * size for size in QUANTISED_BYTES]))
    aligned = draw(st.sampled_from((4, 16))) if format_ != "raw" else 1
    ring = draw(places(sizes, paged=False, aligned_to=aligned, plane_bytes=1 << 18))
    chunk_rows = draw(st.integers(1, max(1, min(300, (1 << 18) // (ring.parts * ring.part_bytes)))))
    rows = ring.rows + chunk_rows
    shadow = Place(
        parts=ring.parts,
        part_bytes=ring.part_bytes,
        head_major=draw(st.booleans()),
        capacity=rows + draw(st.integers(0, 3)),
        first=0,
        rows=rows,
        row_gap=draw(st.sampled_from((0, 0, 16, aligned))),
        base=draw(st.sampled_from((0, 16, aligned))),
    )
    return Staged(ring, shadow, chunk_rows, format_, draw(st.sampled_from((0, 0, aligned))))


def chunk_memory(staged: Staged, rng: np.random.Generator) -> Bytes:
    """f32 words of every kind (NaN and infinities too), half of them of a usual size; or random bytes."""
    chunk = memory(staged.chunk_bytes, rng, staged.chunk_offset)
    if staged.format != "raw":
        numbers = chunk.view(np.float32)
        numbers[::2] = rng.standard_normal(numbers[::2].size, dtype=np.float32)
    return chunk


def check(jobs: list[Staged], order: str, seed: int) -> None:
    """Stage with the kernel and with the host device, and compare every byte."""
    rng = np.random.default_rng(seed)
    rings = [job.ring.memory(rng) for job in jobs]
    chunks = [chunk_memory(job, rng) for job in jobs]
    shadows = [job.shadow.memory(rng) for job in jobs]
    untouched = [array.copy() for array in (*rings, *chunks)]
    expected = [shadow.copy() for shadow in shadows]
    HOST.stage(
        [
            Stage(
                ring=HOST.wrap(ring[job.ring.fixed * job.ring.strides.row_stride :]),
                ring_strides=job.ring.strides,
                ring_rows=job.ring.capacity - job.ring.fixed,
                rotation=job.ring.first,
                rows=job.ring.rows,
                shadow=HOST.wrap(shadow),
                shadow_strides=job.shadow.strides,
                chunk=HOST.wrap(chunk),
                chunk_offset=0,
                chunk_rows=job.chunk_rows,
                encoding=None if job.format == "raw" else ENCODINGS[job.format],
            )
            for job, ring, chunk, shadow in zip(jobs, rings, chunks, expected, strict=True)
        ]
    )
    table, tiles = abi.stage_table(
        [
            abi.Stage(
                ring=job.ring.in_table(ring),
                chunk=abi.Rows(
                    address=address(chunk),
                    parts=job.ring.parts,
                    part_bytes=job.chunk_part_bytes,
                    row_stride=job.ring.parts * job.chunk_part_bytes,
                    part_stride=job.chunk_part_bytes,
                    first=0,
                    rows=job.chunk_rows,
                ),
                shadow=job.shadow.in_table(shadow),
                format=job.format,
            )
            for job, ring, chunk, shadow in zip(jobs, rings, chunks, shadows, strict=True)
        ]
    )
    arguments = c_uint64(address(table)), c_uint32(len(table))
    emulated("stage").launch("kvpack_stage", tiles, abi.THREADS, *arguments, order=order)
    for shadow, wanted in zip(shadows, expected, strict=True):
        assert np.array_equal(shadow, wanted)
    for array, before in zip((*rings, *chunks), untouched, strict=True):
        assert np.array_equal(array, before)


@given(st.lists(stages(), min_size=1, max_size=4), st.sampled_from(UNORDERED), st.integers(0, 1 << 32))
@examples(300)
def test_any_mix_of_stages_in_one_launch(jobs: list[Staged], order: str, seed: int) -> None:
    check(jobs, order, seed)


@pytest.mark.parametrize("format_", ["f16", "bf16", "raw"])
@pytest.mark.parametrize("head_major", [False, True])
def test_every_rotation_and_fill_of_a_small_ring(head_major: bool, format_: str) -> None:
    jobs = [
        Staged(
            Place(parts=2, part_bytes=32, head_major=head_major, capacity=5, first=first, rows=rows, wraps=True),
            Place(parts=2, part_bytes=32, head_major=not head_major, capacity=rows + 3, first=0, rows=rows + 3),
            3,
            format_,
            0,
        )
        for first in range(5)
        for rows in range(1, 6)
    ]
    check(jobs, "reverse", 5)


@pytest.mark.parametrize("format_", ["f16", "bf16"])
def test_the_wide_path_is_the_narrow_one(format_: str) -> None:
    """The same rows once where everything is aligned and once where nothing is."""
    ring = Place(parts=3, part_bytes=128, head_major=False, capacity=50, first=33, rows=50, wraps=True)
    shadow = Place(parts=3, part_bytes=128, head_major=True, capacity=71, first=0, rows=71)
    shifted = Place(parts=3, part_bytes=128, head_major=True, capacity=71, first=0, rows=71, offset=2)
    check([Staged(ring, shadow, 21, format_, 0), Staged(ring, shifted, 21, format_, 4)], "shuffled", 6)
