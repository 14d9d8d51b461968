"""``rope.cu`` against :func:`kvpack.device.rotary.rerotate`: whole planes, elements that do not turn included."""

from __future__ import annotations

from ctypes import c_uint32, c_uint64
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpack_kernels import abi
from numpy.typing import NDArray

from kvpack.device.quantise import dequantise, quantise
from kvpack.device.rotary import Pairing, rerotate, turn_table
from kvpack.model.encoding import ENCODINGS
from tests.emulation.build import UNORDERED, address, emulated, examples, memory
from tests.emulation.planes import Bytes, Place, places

QUIET_NAN = np.uint32(0x7FC00000)


@dataclass(frozen=True)
class Turned:
    """Rows of one plane and how they turn."""

    place: Place
    format: str
    pairs: int
    interleaved: bool
    same: bool
    before: int

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return ENCODINGS[self.format].block_bytes


@st.composite
def turns(draw: st.DrawFn) -> Turned:
    format_ = draw(st.sampled_from(("f32", "f16", "bf16")))
    size = ENCODINGS[format_].block_bytes
    heads = st.integers(8, 512).map(lambda dim: dim * size)
    place = draw(places(heads, aligned_to=4, plane_bytes=1 << 17))
    dim = place.part_bytes // size
    pairs = draw(st.one_of(st.just(dim // 2), st.integers(1, dim // 2)))
    before = draw(st.sampled_from((0, dim - 2 * pairs)))
    return Turned(place, format_, pairs, draw(st.booleans()), draw(st.booleans()), before)


def tables(job: Turned, rng: np.random.Generator) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines [rows or 1, pairs] of turns forward and back."""
    frequencies = 10000.0 ** (-np.arange(job.pairs) / job.pairs)
    rows = 1 if job.same else job.place.rows
    return turn_table(frequencies, rng.integers(-100_000, 100_000, rows))


def reference(job: Turned, plane: Bytes, cosines: NDArray[np.float32], sines: NDArray[np.float32]) -> None:
    """Turn the rows of a plane in place, with NumPy."""
    place, strides = job.place, job.place.strides
    part = np.arange(strides.part_bytes)
    starts = strides.base + place.physical()[:, None] * strides.row_stride
    heads = (starts + np.arange(strides.parts) * strides.part_stride)[:, :, None] + part
    keys = dequantise(ENCODINGS[job.format], plane[heads])
    turning = keys[..., job.before : job.before + 2 * job.pairs]
    shape = (place.rows, job.pairs)
    pairing = Pairing.INTERLEAVED if job.interleaved else Pairing.HALF
    with np.errstate(over="ignore", invalid="ignore"):
        turned = rerotate(turning, np.broadcast_to(cosines, shape), np.broadcast_to(sines, shape), pairing)
    turned.view(np.uint32)[np.isnan(turned)] = QUIET_NAN
    first = job.before * job.element_bytes
    stored = quantise(ENCODINGS[job.format], turned)
    plane[heads[..., first : first + stored.shape[-1]]] = stored


def check(jobs: list[Turned], order: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    planes = [job.place.memory(rng) for job in jobs]
    angles = [tables(job, rng) for job in jobs]
    expected = [plane.copy() for plane in planes]
    for job, plane, (cosines, sines) in zip(jobs, expected, angles, strict=True):
        reference(job, plane, cosines, sines)
    table, tiles = abi.rope_table(
        [
            abi.Rope(
                rows=job.place.in_table(plane),
                cosines=address(cosines),
                sines=address(sines),
                pairs=job.pairs,
                interleaved=job.interleaved,
                format=job.format,
                same=job.same,
                rotary_offset=job.before * job.element_bytes,
            )
            for job, plane, (cosines, sines) in zip(jobs, planes, angles, strict=True)
        ]
    )
    arguments = c_uint64(address(table)), c_uint32(len(table))
    emulated("rope").launch("kvpack_rope", tiles, abi.THREADS, *arguments, order=order)
    for plane, wanted in zip(planes, expected, strict=True):
        assert np.array_equal(plane, wanted)


@given(st.lists(turns(), min_size=1, max_size=4), st.sampled_from(UNORDERED), st.integers(0, 1 << 32))
@examples(300)
def test_any_mix_of_rows_in_one_launch(jobs: list[Turned], order: str, seed: int) -> None:
    check(jobs, order, seed)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("format_", ["f32", "f16", "bf16"])
def test_a_turn_of_a_single_pair_is_the_right_way_round(format_: str, interleaved: bool) -> None:
    """(1, 0) by a quarter is (0, 1), in elements that the pairing names; no reference has a part in this."""
    size = ENCODINGS[format_].block_bytes
    place = Place(parts=1, part_bytes=4 * size, head_major=False, capacity=1, first=0, rows=1)
    plane = memory(4 * size, np.random.default_rng(0))
    plane[:] = quantise(ENCODINGS[format_], np.array([1, 0, 0, 0], dtype=np.float32))
    cosines, sines = np.array([0, 1], dtype=np.float32), np.array([1, 0], dtype=np.float32)
    rope = abi.Rope(place.in_table(plane), address(cosines), address(sines), 2, interleaved, format_)
    table, tiles = abi.rope_table([rope])
    arguments = c_uint64(address(table)), c_uint32(1)
    emulated("rope").launch("kvpack_rope", tiles, abi.THREADS, *arguments, order="forward")
    turned = dequantise(ENCODINGS[format_], plane).tolist()
    assert turned == ([0, 1, 0, 0] if interleaved else [0, 0, 1, 0])
