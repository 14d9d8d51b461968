"""``convert.cu`` against :mod:`kvpack.device.quantise`, bit by bit, both ways."""

from __future__ import annotations

from ctypes import addressof, c_uint32, c_uint64
from typing import Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpack_kernels import abi
from numpy.typing import NDArray

from kvpack.device.quantise import dequantise, quantise
from kvpack.errors import CompatibilityError
from kvpack.model.encoding import ENCODINGS
from tests.emulation.build import UNORDERED, address, emulated, examples, memory, mode
from tests.emulation.planes import Bytes

SCALARS: Final = ("f16", "bf16", "f8_e4m3", "f8_e5m2")
BLOCKS: Final = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
GUARD: Final = 64
NOT_REFUSED: Final = 0xFFFFFFFF
STEPS: Final = 1 << 16


def write(name: str, values: NDArray[np.float32], order: str = "forward") -> tuple[Bytes, list[int]]:
    """The kernel's bytes for f32 values, behind them GUARD bytes that must stay, and its refusals."""
    encoding = ENCODINGS[name]
    units = values.size // encoding.block_elements
    rng = np.random.default_rng(values.size)
    source = memory(values.nbytes, rng)
    source[:] = values.view(np.uint8).reshape(-1)
    stored = memory(units * encoding.block_bytes + GUARD, rng)
    guard = stored[units * encoding.block_bytes :].copy()
    refused = (c_uint32 * 3)(*[NOT_REFUSED] * 3)
    arguments = [c_uint64(address(source)), c_uint64(address(stored)), c_uint64(units)]
    if name in BLOCKS:
        arguments.append(c_uint64(addressof(refused)))
    blocks = -(-units // abi.THREADS)
    emulated("convert").launch(f"kvpack_write_{name}", blocks, abi.THREADS, *arguments, order=order)
    assert np.array_equal(stored[units * encoding.block_bytes :], guard)
    return stored[: units * encoding.block_bytes], list(refused)


def read(name: str, stored: Bytes, order: str = "forward") -> NDArray[np.uint32]:
    """The kernel's f32 words for stored bytes."""
    encoding = ENCODINGS[name]
    units = stored.size // encoding.block_bytes
    rng = np.random.default_rng(stored.size)
    source = memory(stored.nbytes, rng)
    source[:] = stored
    values = memory(units * encoding.block_elements * 4 + GUARD, rng)
    guard = values[-GUARD:].copy()
    arguments = c_uint64(address(source)), c_uint64(address(values)), c_uint64(units)
    blocks = -(-units // abi.THREADS)
    emulated("convert").launch(f"kvpack_read_{name}", blocks, abi.THREADS, *arguments, order=order)
    assert np.array_equal(values[-GUARD:], guard)
    return values[:-GUARD].view(np.uint32)


def wanted_words(name: str, stored: Bytes) -> NDArray[np.uint32]:
    return dequantise(ENCODINGS[name], stored).view(np.uint32).reshape(-1)


def edge_words() -> NDArray[np.uint32]:
    """Words near every boundary: each sign and exponent with the fractions around every narrower rounding."""
    fractions = {0, 1, 0x7FFFFF, 0x7FFFFE, 0x400000, 0x3FFFFF, 0x400001}
    for bits in range(1, 23):
        for above in (0, 1 << bits if bits < 22 else 0):
            middle = (1 << bits >> 1) + above
            fractions |= {middle - 1 & 0x7FFFFF, middle, middle + 1}
    low = np.array(sorted(fractions), dtype=np.uint32)
    high = np.arange(512, dtype=np.uint32) << 23
    return (high[:, None] | low[None, :]).reshape(-1)


@pytest.mark.parametrize("name", SCALARS)
def test_scalars_near_every_boundary(name: str) -> None:
    values = edge_words().view(np.float32)
    stored, _ = write(name, values)
    assert np.array_equal(stored, quantise(ENCODINGS[name], values))


@pytest.mark.parametrize("name", SCALARS)
def test_scalars_over_the_whole_range(name: str) -> None:
    """Every f32 word at a stride that is no power of two, so that each low bit pattern comes with each exponent."""
    step = 4099 if mode() == "plain" else 65_539
    words = np.arange(0, 1 << 32, step, dtype=np.uint64).astype(np.uint32)
    values = words.view(np.float32)
    stored, _ = write(name, values, "reverse")
    assert np.array_equal(stored, quantise(ENCODINGS[name], values))


@pytest.mark.parametrize("name", SCALARS)
def test_every_code_of_a_scalar_is_read(name: str) -> None:
    size = ENCODINGS[name].block_bytes
    codes = np.arange(1 << 8 * size, dtype=f"<u{size}").view(np.uint8)
    assert np.array_equal(read(name, codes), wanted_words(name, codes))


def block_values(rng: np.random.Generator, blocks: int) -> NDArray[np.float32]:
    """Finite blocks of every kind: usual, tiny, subnormal, huge, constant, zeros of both signs, ties."""
    values = rng.standard_normal((blocks, 32), dtype=np.float32)
    values *= np.exp2(rng.integers(-149, 16, (blocks, 1)).astype(np.float32))
    kind = rng.integers(0, 10, blocks)
    values[kind == 0] = 0
    values[kind == 1] = np.copysign(np.float32(0), values[kind == 1])
    values[kind == 2] = values[kind == 2][:, :1]
    values[kind == 3] = np.rint(rng.standard_normal((int((kind == 3).sum()), 32)) * 8).astype(np.float32) / 2
    values[kind == 4, ::2] = -values[kind == 4, 1::2]
    values[kind == 5] = np.abs(values[kind == 5])
    values[kind == 6] *= np.float32(2.0**-100)
    return values


@given(st.sampled_from(BLOCKS), st.integers(1, 700), st.sampled_from(UNORDERED), st.integers(0, 1 << 32))
@examples(200)
def test_blocks_are_written(name: str, blocks: int, order: str, seed: int) -> None:
    values = block_values(np.random.default_rng(seed), blocks)
    fits = np.array([_fits(name, block) for block in values])
    values = values[fits] if fits.any() else np.ones((1, 32), dtype=np.float32)
    stored, refused = write(name, values, order)
    assert refused == [NOT_REFUSED] * 3
    assert np.array_equal(stored, quantise(ENCODINGS[name], values).reshape(-1))


def _fits(name: str, block: NDArray[np.float32]) -> bool:
    try:
        quantise(ENCODINGS[name], block)
    except CompatibilityError:
        return False
    return True


@given(st.sampled_from(BLOCKS), st.integers(1, 300), st.sampled_from(UNORDERED), st.integers(0, 1 << 32))
@examples(150)
def test_any_bytes_are_read(name: str, blocks: int, order: str, seed: int) -> None:
    """Random bytes: scales that are infinite, NaN or subnormal come as often as their patterns do."""
    rng = np.random.default_rng(seed)
    stored = memory(blocks * ENCODINGS[name].block_bytes, rng)
    columns = stored.reshape(blocks, -1)
    columns[::3, 1] |= 0x7C
    columns[1::3, 1] &= 0x83
    assert np.array_equal(read(name, stored, order), wanted_words(name, stored))


@pytest.mark.parametrize("name", BLOCKS)
def test_refused_blocks_are_named_and_not_written(name: str) -> None:
    values = np.random.default_rng(7).standard_normal((900, 32), dtype=np.float32)
    good = quantise(ENCODINGS[name], values)
    values[300, 31] = np.inf
    values[301, 0] = np.nan
    values[500] = np.linspace(-3e38, 3e38, 32, dtype=np.float32)
    values[600] = np.float32(1e8) + np.arange(32, dtype=np.float32) * 8
    values[601] = values[600]
    stored, refused = write(name, values, "shuffled")
    ranged = name in ("q5_1", "q4_1")
    # A block near 10⁸ has too large a scale, or a small scale and too large a minimum.
    assert refused == [300, 500, 600 if ranged else NOT_REFUSED]
    written = np.ones(900, dtype=bool)
    written[[300, 301, 500, 600, 601]] = False
    assert np.array_equal(stored.reshape(900, -1)[written], good.reshape(900, -1)[written])
    for block in (300, 500, 600):
        with pytest.raises(CompatibilityError) as raised:
            quantise(ENCODINGS[name], values[block])
        assert raised.value.code == ("not-finite" if block == 300 else "scale-overflow")
