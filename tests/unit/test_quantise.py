"""The encodings against independent implementations (gguf for blocks, torch for scalars) and by hand at the edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from kvpack.device import quantise as reference
from kvpack.device.quantise import dequantise, is_readable, is_writable, quantise
from kvpack.errors import CompatibilityError
from kvpack.model.encoding import ENCODINGS, CompositeEncoding, CompositeField, Encoding, UnknownEncoding

BLOCKS = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
SCALARS: dict[str, tuple[torch.dtype, Any]] = {
    "f16": (torch.float16, np.uint16),
    "bf16": (torch.bfloat16, np.uint16),
    "f8_e4m3": (torch.float8_e4m3fn, np.uint8),
    "f8_e5m2": (torch.float8_e5m2, np.uint8),
}
Reals = NDArray[np.float32]


def theirs(name: str) -> GGMLQuantizationType:
    return GGMLQuantizationType[name.upper()]


def words(values: Reals) -> NDArray[np.uint32]:
    return values.view(np.uint32)


def every_kind_of_f32() -> Reals:
    """All 16-bit upper halves with several lower halves, the range where fp8 and f16 are subnormal, random words."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    subnormal = np.arange(1 << 19, dtype=np.uint32) * 0x2000 + 0x33000000
    noise = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    lower = [upper | low for low in (0, 1, 0x1000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    return np.concatenate([*lower, subnormal, noise]).view(np.float32)


@pytest.mark.parametrize("name", SCALARS)
def test_scalars_are_written_as_torch_writes_them(name: str) -> None:
    dtype, word = SCALARS[name]
    values = every_kind_of_f32()
    numbers = values[~np.isnan(values)]
    ours = quantise(ENCODINGS[name], numbers).view(word)
    # torch turns what lies beyond e4m3 into a NaN; here it saturates.
    expected = np.clip(numbers, -448, 448) if name == "f8_e4m3" else numbers
    assert np.array_equal(ours, torch.from_numpy(expected.copy()).to(dtype).view(torch.uint8).numpy().view(word))


@pytest.mark.parametrize("name", SCALARS)
def test_every_word_is_read_as_torch_reads_it(name: str) -> None:
    dtype, word = SCALARS[name]
    codes = np.arange(1 << (8 * word().itemsize)).astype(word).view(np.uint8)
    ours = dequantise(ENCODINGS[name], codes)
    expected = torch.from_numpy(codes.copy()).view(dtype).float().numpy()
    nans = np.isnan(ours)
    assert np.array_equal(nans, np.isnan(expected))
    assert np.array_equal(words(ours)[~nans], words(expected)[~nans])


@pytest.mark.parametrize("name", SCALARS)
def test_every_word_comes_back(name: str) -> None:
    word = SCALARS[name][1]
    codes = np.arange(1 << (8 * word().itemsize)).astype(word)
    back = quantise(ENCODINGS[name], dequantise(ENCODINGS[name], codes.view(np.uint8))).view(word)
    quiet = {"f16": 0x200, "bf16": 0x40, "f8_e4m3": 0, "f8_e5m2": 3}[name]
    nan = np.isnan(dequantise(ENCODINGS[name], codes.view(np.uint8)))
    assert np.array_equal(back, np.where(nan, codes | quiet, codes))


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("f16", 0x7F800001, 0x7E00),
        ("f16", 0xFFC02000, 0xFE01),
        ("f16", 0x477FF000, 0x7C00),
        ("f16", 0x477FEFFF, 0x7BFF),
        ("bf16", 0x7F800001, 0x7FC0),
        ("bf16", 0xFFFFFFFF, 0xFFFF),
        ("bf16", 0x3F808000, 0x3F80),
        ("bf16", 0x3F818000, 0x3F82),
        ("bf16", 0x7F7FFFFF, 0x7F80),
        ("f8_e4m3", 0x7FC00000, 0x7F),
        ("f8_e4m3", 0xFF800001, 0xFF),
        ("f8_e4m3", 0x7F800000, 0x7E),
        ("f8_e4m3", 0xFF800000, 0xFE),
        ("f8_e4m3", 0x44000000, 0x7E),
        ("f8_e4m3", 0x3A800000, 0x00),
        ("f8_e4m3", 0x3A800001, 0x01),
        ("f8_e4m3", 0xBA800000, 0x80),
        ("f8_e5m2", 0x7F800000, 0x7C),
        ("f8_e5m2", 0x476FFFFF, 0x7B),
        ("f8_e5m2", 0x47700000, 0x7C),
        ("f8_e5m2", 0xFF800001, 0xFF),
    ],
)
def test_scalars_at_their_edges(name: str, value: int, code: int) -> None:
    stored = quantise(ENCODINGS[name], np.array([value], dtype=np.uint32).view(np.float32))
    assert int.from_bytes(stored.tobytes(), "little") == code


def test_f32_passes_every_word() -> None:
    values = np.array([0x7F800001, 0xFFC00001, 0x80000000, 1], dtype=np.uint32).view(np.float32)
    stored = quantise(ENCODINGS["f32"], values)
    assert stored.tobytes() == values.tobytes()
    assert np.array_equal(words(dequantise(ENCODINGS["f32"], stored)), words(values))


def spread(rows: int, seed: int) -> Reals:
    """Rows of 96 numbers whose sizes range over all that an f16 scale can say."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.uniform(-14, 9, (rows, 1)))
    return (rng.standard_normal((rows, 96)) * sizes).astype(np.float32)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_written_and_read_as_gguf_does(name: str) -> None:
    values = spread(4096, 1)
    ours = quantise(ENCODINGS[name], values)
    assert np.array_equal(ours, quants.quantize(values, theirs(name)))
    assert np.array_equal(words(dequantise(ENCODINGS[name], ours)), words(quants.dequantize(ours, theirs(name))))


@pytest.mark.parametrize("name", [*BLOCKS, "iq4_nl"])
def test_any_block_is_read_as_gguf_reads_it(name: str) -> None:
    size = ENCODINGS[name].block_bytes
    blocks = np.random.default_rng(2).integers(0, 256, (4096, size), dtype=np.uint8)
    blocks[:, 1] &= 0xBB
    if name in ("q5_1", "q4_1"):
        blocks[:, 3] &= 0xBB
    assert np.array_equal(words(dequantise(ENCODINGS[name], blocks)), words(quants.dequantize(blocks, theirs(name))))


@pytest.mark.parametrize("name", BLOCKS)
@given(values=hnp.arrays(np.float32, 32, elements=st.sampled_from([-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 127.0])))
def test_ties_are_broken_as_gguf_breaks_them(name: str, values: Reals) -> None:
    assert np.array_equal(quantise(ENCODINGS[name], values), quants.quantize(values, theirs(name)))


def broken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant one wrong reading of ggml in the writer of an encoding."""
    if name == "q8_0":
        monkeypatch.setattr(np, "trunc", np.rint)
    else:
        original = reference._pack
        monkeypatch.setattr(
            reference, "_pack", lambda n, scales, codes, *rest: original(n, scales, codes[:, ::-1].copy(), *rest)
        )


@pytest.mark.parametrize("name", BLOCKS)
def test_a_planted_fault_differs_from_gguf(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(32, dtype=np.float32) + np.float32(0.5)
    values[0] = 127
    expected = quants.quantize(values, theirs(name))
    assert np.array_equal(quantise(ENCODINGS[name], values), expected)
    broken(name, monkeypatch)
    assert not np.array_equal(quantise(ENCODINGS[name], values), expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("q8_0", "0000" + "00" * 32),
        ("q5_1", "0000" + "0000" + "00000000" + "00" * 16),
        ("q5_0", "0080" + "ffffffff" + "00" * 16),
        ("q4_1", "0000" + "0000" + "00" * 16),
        ("q4_0", "0080" + "88" * 16),
    ],
)
def test_a_block_of_zeros(name: str, expected: str) -> None:
    assert quantise(ENCODINGS[name], np.zeros(32, dtype=np.float32)).tobytes().hex() == expected
    if name in ("q5_0", "q4_0"):
        # ggml starts its search from +0, so the signs of the zeros do not reach the scale.
        assert quantise(ENCODINGS[name], -np.zeros(32, dtype=np.float32)).tobytes().hex() == expected


def test_the_first_of_equal_extremes_gives_the_scale() -> None:
    values = np.zeros(32, dtype=np.float32)
    values[3], values[9] = -8, 8
    assert quantise(ENCODINGS["q4_0"], values)[:2].view(np.float16)[0] == 1
    assert quantise(ENCODINGS["q4_0"], -values)[:2].view(np.float16)[0] == -1


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("size", [1e-45, 1e-40, 2e-39, 1e-38, 1e-20])
def test_a_scale_too_small_for_f16_gives_zeros(name: str, size: float) -> None:
    values = np.linspace(-1, 1, 32).astype(np.float32) * np.float32(size)
    stored = quantise(ENCODINGS[name], values)
    assert not dequantise(ENCODINGS[name], stored).any()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_block_that_holds_no_number_is_refused(name: str, value: float) -> None:
    values = np.ones((2, 64), dtype=np.float32)
    values[1, 40] = value
    with pytest.raises(CompatibilityError, match="block 3") as refusal:
        quantise(ENCODINGS[name], values)
    assert refusal.value.code == "not-finite"


@pytest.mark.parametrize("name", BLOCKS)
def test_a_scale_beyond_f16_is_refused(name: str) -> None:
    values = np.ones(64, dtype=np.float32)
    values[40], values[41] = 3e38, -3e38
    with pytest.raises(CompatibilityError, match="block 1") as refusal:
        quantise(ENCODINGS[name], values)
    assert refusal.value.code == "scale-overflow"


@pytest.mark.parametrize("name", [*BLOCKS, "iq4_nl"])
def test_a_scale_that_is_no_number_reads_as_one_kind_of_nan(name: str) -> None:
    block = np.zeros(ENCODINGS[name].block_bytes, dtype=np.uint8)
    block[:2] = np.array([0xFC01], dtype=np.uint16).view(np.uint8)
    assert set(words(dequantise(ENCODINGS[name], block)).tolist()) == {0x7FC00000}


@pytest.mark.parametrize("name", [*SCALARS, *BLOCKS, "f32"])
def test_rows_keep_their_leading_axes(name: str) -> None:
    encoding = ENCODINGS[name]
    values = spread(30, 3).reshape(5, 3, 2, 96)[:, ::2]
    stored = quantise(encoding, values)
    assert stored.shape == (5, 2, 2, encoding.row_bytes((96,)))
    assert np.array_equal(stored[3, 1, 0], quantise(encoding, values[3, 1, 0].copy()))
    assert dequantise(encoding, stored).shape == values.shape
    assert dequantise(encoding, quantise(encoding, values[:0])).shape == (0, 2, 2, 96)
    assert quantise(encoding, values[..., :0]).shape == (5, 2, 2, 0)


STRANGE = (
    UnknownEncoding("q9_9"),
    CompositeEncoding((CompositeField("value", ENCODINGS["f16"], 4),)),
    Encoding("f16", 1, 4, (("value", 4),)),
)


@pytest.mark.parametrize(
    "encoding",
    [*(ENCODINGS[name] for name in ("i8", "u8", "i32", "i64", "f64", "iq4_nl")), *STRANGE],
    ids=lambda encoding: encoding.name,
)
def test_what_has_no_conversion_is_refused_by_name(encoding: Any) -> None:
    assert not is_writable(encoding)
    with pytest.raises(CompatibilityError, match=encoding.name.partition("(")[0]) as refusal:
        quantise(encoding, np.zeros(32, dtype=np.float32))
    assert refusal.value.code == "no-conversion"
    if encoding != ENCODINGS["iq4_nl"]:
        assert not is_readable(encoding)
        with pytest.raises(CompatibilityError) as refusal:
            dequantise(encoding, np.zeros(32, dtype=np.uint8))
        assert refusal.value.code == "no-conversion"


def test_what_can_be_written_can_be_read() -> None:
    written = {name for name, encoding in ENCODINGS.items() if is_writable(encoding)}
    read = {name for name, encoding in ENCODINGS.items() if is_readable(encoding)}
    assert written == {"f32", *SCALARS, *BLOCKS}
    assert read == written | {"iq4_nl"}


def test_wrong_arrays_are_refused() -> None:
    q8_0 = ENCODINGS["q8_0"]
    calls: list[tuple[str, Any, NDArray[Any]]] = [
        ("no-conversion", quantise, np.zeros(32)),
        ("no-conversion", dequantise, np.zeros(34, dtype=np.int8)),
        ("block-straddles-head", quantise, np.zeros((2, 48), dtype=np.float32)),
        ("bad-row-shape", quantise, np.zeros((), dtype=np.float32)),
        ("bad-row-shape", dequantise, np.zeros((2, 33), dtype=np.uint8)),
        ("bad-row-shape", dequantise, np.zeros((), dtype=np.uint8)),
    ]
    for code, call, array in calls:
        with pytest.raises(CompatibilityError) as refusal:
            call(q8_0, array)
        assert refusal.value.code == code
