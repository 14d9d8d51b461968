"""Codecs: exact round trips, the normative split layout, and the bounds of the decoder."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvpack.errors import CompatibilityError, FormatError, IntegrityError, KvpackError, UsageError
from kvpack.model.encoding import (
    ENCODINGS,
    AnyEncoding,
    CompositeEncoding,
    CompositeField,
    Encoding,
    UnknownEncoding,
)
from kvpack.pack import planes, split, zstd_frame
from kvpack.pack.codecs import CODECS, Buffer, decode, encode
from kvpack.pack.split import decode_split, encode_split
from kvpack.pack.zstd_frame import compress_fast, compress_level1, decompress_frame

BF16 = ENCODINGS["bf16"]
LATENT = CompositeEncoding(
    (
        CompositeField("nope", ENCODINGS["f8_e4m3"], 32),
        CompositeField("scales", ENCODINGS["f32"], 3),
        CompositeField("rope", BF16, 8),
        CompositeField("quants", ENCODINGS["q4_1"], 64),
    )
)
SHAPES: dict[str, tuple[AnyEncoding, tuple[int, ...]]] = {
    **{name: (encoding, (2, 64)) for name, encoding in ENCODINGS.items()},
    "composite": (LATENT, ()),
}
# Quiet and signalling NaNs, infinities, both zeros, subnormals, as little-endian words of bf16, f16 and halves of f32.
SPECIAL_WORDS = (0x7F81, 0xFF81, 0x7FC0, 0xFFFF, 0x7F80, 0xFF80, 0x0000, 0x8000, 0x0001, 0x807F, 0x7C01, 0xFC00)


# The reference: the normative layout, read one element at a time, with nothing of the package in it.


def reference_planes(encoding: AnyEncoding, raw_length: int) -> list[tuple[str, list[list[int]]]]:
    """For each plane its kind and, entry by entry, the offsets in the tile of the bytes that the entry speaks of."""
    assert isinstance(encoding, (Encoding, CompositeEncoding))
    if isinstance(encoding, CompositeEncoding):
        row = sum(f.encoding.row_bytes((f.count,)) for f in encoding.fields)
        result, start = [], 0
        for field in encoding.fields:
            size = field.encoding.row_bytes((field.count,))
            inner = reference_planes(field.encoding, size)
            for kind, entries in inner:
                spread = [[r + start + o for o in e] for r in range(0, raw_length, row) for e in entries]
                result.append((kind, spread))
            start += size
        return result
    size = encoding.block_bytes
    starts = range(0, raw_length, size)
    if encoding.block_elements == 32:
        result, start = [], 0
        for _, length in encoding.fields:
            result.append(("byte", [[s + start + i] for s in starts for i in range(length)]))
            start += length
        return result
    if encoding.name in ("bf16", "f32"):
        upper = [[s + size - 2, s + size - 1] for s in starts]
        lower = [("byte", [[s + i] for s in starts]) for i in reversed(range(size - 2))]
        return [("E", upper), ("M", upper), *lower]
    return [("byte", [[s + i] for s in starts]) for i in reversed(range(size))]


def reference_decode(stored: bytes, encoding: AnyEncoding, channels: int, raw_length: int) -> bytes:
    version, flags, count = struct.unpack_from("<BBH", stored)
    layout = reference_planes(encoding, raw_length)
    assert (version, count) == (1, len(layout))
    position = 4 + 8 * count
    base = bytes(channels)
    if flags & 1:
        base = stored[position : position + channels]
        position += channels
    out = bytearray(raw_length)
    for number, (kind, entries) in enumerate(layout):
        mode, length = struct.unpack_from("<B3xI", stored, 4 + 8 * number)
        body = stored[position : position + length]
        position += length
        plane = zstandard.decompress(body) if mode == 1 else body
        for entry, (offsets, value) in enumerate(zip(entries, plane, strict=True)):
            if kind == "byte":
                out[offsets[0]] = value
                continue
            exponent = (value + base[entry % channels]) % 256
            word = exponent << 7 if kind == "E" else (value >> 7) << 15 | value & 0x7F
            out[offsets[0]] |= word & 0xFF
            out[offsets[1]] |= word >> 8
    assert position == len(stored)
    return bytes(out)


def split_tile(*bodies: tuple[int, bytes], base: bytes | None = None, count: int | None = None) -> bytes:
    """A split tile written by hand: (mode, stored bytes) a plane."""
    header = struct.pack("<BBH", 1, 0 if base is None else 1, len(bodies) if count is None else count)
    records = b"".join(struct.pack("<B3xI", mode, len(body)) for mode, body in bodies)
    return header + records + (base or b"") + b"".join(body for _, body in bodies)


def rle_frame(content_size: int, blocks: Sequence[int], descriptor: int = 0xE0, window: bytes = b"") -> bytes:
    """A zstd frame with an 8-byte content size whose blocks each repeat one zero byte."""
    body = b"".join(
        struct.pack("<I", (n == len(blocks) - 1) | 1 << 1 | size << 3)[:3] + b"\0" for n, size in enumerate(blocks)
    )
    return b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + window + struct.pack("<Q", content_size) + body


def tile_bytes(kind: str, encoding: AnyEncoding, shape: tuple[int, ...], rows: int) -> bytes:
    length = encoding.row_bytes(shape) * rows
    source = random.Random(f"{kind} {encoding.name} {rows}")
    if kind == "random":
        return source.randbytes(length)
    if kind == "special":
        words = b"".join(struct.pack("<H", source.choice(SPECIAL_WORDS)) for _ in range(length // 2 + 1))
        return words[:length]
    if kind == "repeating":
        distinct = [source.randbytes(encoding.row_bytes(shape)) for _ in range(5)]
        return b"".join(source.choice(distinct) for _ in range(rows))
    # Normal values seen as f32: the upper bytes repeat, the lower do not, whatever the encoding makes of them.
    values = struct.pack(f"<{length // 4 + 1}f", *(source.gauss(0, 1) for _ in range(length // 4 + 1)))
    return values[:length]


def check_round_trip(codec: str, raw: bytes, encoding: AnyEncoding, shape: tuple[int, ...]) -> int:
    codec_id, stored = encode(codec, raw, encoding, shape)
    assert decode(codec_id, stored, len(raw), encoding, shape) == raw
    out = memoryview(bytearray(b"\xa5" * len(raw)))
    assert decode(codec_id, bytes(stored), len(raw), encoding, shape, out) is out
    assert out == raw
    return codec_id


def tile_or_code(
    codec_id: int, stored: bytes, raw_length: int, encoding: AnyEncoding, shape: tuple[int, ...]
) -> Buffer | str:
    try:
        return decode(codec_id, stored, raw_length, encoding, shape)
    except KvpackError as error:
        return error.code


def check_split(raw: bytes, encoding: AnyEncoding, shape: tuple[int, ...], with_base: bool) -> bytes:
    """Encode with the package, decode with the package and with the reference."""
    stored = encode_split(raw, encoding, shape, with_base=with_base)
    assert stored is not None
    out = memoryview(bytearray(len(raw)))
    decode_split(stored, encoding, shape, out)
    assert out == raw
    channels = int(np.prod(shape))
    assert reference_decode(stored, encoding, channels, len(raw)) == raw
    return stored


@pytest.mark.parametrize("kind", ["random", "special", "repeating", "normal"])
@pytest.mark.parametrize("codec", ["raw", "zstd", "split"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_encoding_round_trips_through_every_codec(name: str, codec: str, kind: str) -> None:
    encoding, shape = SHAPES[name]
    for rows in (1, 3, 130):
        check_round_trip(codec, tile_bytes(kind, encoding, shape, rows), encoding, shape)


@pytest.mark.parametrize("kind", ["random", "special", "repeating", "normal"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_reference_reads_what_the_encoder_writes(name: str, kind: str) -> None:
    encoding, shape = SHAPES[name]
    check_split(tile_bytes(kind, encoding, shape, 70), encoding, shape, with_base=False)


@pytest.mark.parametrize("name", ["bf16", "f32"])
@pytest.mark.parametrize("shape", [(2, 64), (3,), (1,), (7, 5)])
def test_the_reference_reads_a_base(name: str, shape: tuple[int, ...]) -> None:
    encoding = ENCODINGS[name]
    for kind in ("random", "special", "normal"):
        stored = check_split(tile_bytes(kind, encoding, shape, 64), encoding, shape, with_base=True)
        assert stored[1] in (0, 1)
        short = check_split(tile_bytes(kind, encoding, shape, 63), encoding, shape, with_base=True)
        assert short[1] == 0
    assert check_split(tile_bytes("random", encoding, (2, 64), 64), encoding, (2, 64), with_base=True)[1] == 1


@pytest.mark.parametrize("name", ["bf16", "f32", "f16", "i64"])
@pytest.mark.parametrize("with_base", [False, True])
def test_a_tile_of_several_blocks_of_elements_round_trips(name: str, with_base: bool) -> None:
    encoding, shape = ENCODINGS[name], (3, 100)
    rows = 2 * planes._BLOCK // 300 + 11
    raw = np.random.default_rng(5).integers(0, 256, encoding.row_bytes(shape) * rows, np.uint8).tobytes()
    stored = encode_split(raw, encoding, shape, with_base=with_base)
    assert stored is not None
    out = memoryview(bytearray(len(raw)))
    decode_split(stored, encoding, shape, out)
    assert out == raw


def test_a_row_longer_than_a_block_of_elements_has_a_base_too() -> None:
    channels = planes._BLOCK + 3
    source = np.random.default_rng(6)
    base, exponents = source.integers(0, 256, channels, np.uint8), source.integers(0, 256, (2, channels), np.uint8)
    stored = split_tile((0, exponents.tobytes()), (0, bytes(2 * channels)), base=base.tobytes())
    raw = decode(2, stored, 4 * channels, BF16, (channels,))
    assert np.array_equal(np.frombuffer(raw, "<u2").reshape(2, -1) >> 7, exponents + base)


@given(st.sampled_from(sorted(SHAPES)), st.sampled_from(["zstd", "split"]), st.integers(0, 9), st.data())
def test_any_bytes_round_trip(name: str, codec: str, rows: int, draw: st.DataObject) -> None:
    encoding, shape = SHAPES[name]
    length = encoding.row_bytes(shape) * rows
    period = draw.draw(st.binary(min_size=1, max_size=40))
    raw = (period * (length // len(period) + 1))[:length]
    assert check_round_trip(codec, raw, encoding, shape) in (0, CODECS[codec].codec_id)


@given(st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=60), st.booleans())
def test_every_word_of_bf16_survives(words: list[int], with_base: bool) -> None:
    raw = struct.pack(f"<{64 * len(words)}H", *(words * 64))
    check_split(raw, BF16, (len(words),), with_base)


def test_all_bf16_words_survive() -> None:
    raw = struct.pack("<65536H", *range(65536))
    check_split(raw, BF16, (64,), with_base=True)


def test_a_merge_that_loses_the_sign_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(parts: list[np.ndarray], encoding: AnyEncoding, out: np.ndarray, base: np.ndarray | None) -> None:
        planes.merge_planes([parts[0], parts[1] & np.uint8(0x7F)], encoding, out, base)

    raw = tile_bytes("special", BF16, (2, 64), 70)
    check_split(raw, BF16, (2, 64), with_base=False)
    monkeypatch.setattr(split, "merge_planes", faulty)
    with pytest.raises(AssertionError):
        check_split(raw, BF16, (2, 64), with_base=False)


def test_an_encoder_that_turns_planes_around_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = tile_bytes("special", BF16, (2, 64), 70)
    monkeypatch.setattr(split, "split_planes", lambda tile, encoding: planes.split_planes(tile, encoding)[::-1])
    stored = encode_split(raw, BF16, (2, 64))
    assert stored is not None
    assert reference_decode(stored, BF16, 128, len(raw)) != raw


# Golden bytes: tiles written by hand from the layout.

GOLDEN: dict[str, tuple[AnyEncoding, tuple[int, ...], str, str]] = {
    # 1.0, -1.0, a signalling NaN and its negative: E 7F 7F FF FF, M 00 80 01 81.
    "bf16": (BF16, (2,), "803f 80bf 817f 81ff", "01000200 00000000 04000000 00000000 04000000 7f7fffff 00800181"),
    # The same words, rows of two channels whose bases are 7F and 80: E minus base 00 FF 80 7F.
    "bf16 base": (
        BF16,
        (2,),
        "803f 80bf 817f 81ff",
        "01010200 00000000 04000000 00000000 04000000 7f80 00ff807f 00800181",
    ),
    # -1.5 with lower bytes AB CD: word BFC0ABCD.
    "f32": (
        ENCODINGS["f32"],
        (1,),
        "cdabc0bf",
        "01000400 00000000 01000000 00000000 01000000 00000000 01000000 00000000 01000000 7f c0 ab cd",
    ),
    "f16": (ENCODINGS["f16"], (2,), "3412 7856", "01000200 00000000 02000000 00000000 02000000 1256 3478"),
    "u8": (ENCODINGS["u8"], (3,), "010203", "01000100 00000000 03000000 010203"),
    "i32": (
        ENCODINGS["i32"],
        (),
        "44332211",
        "01000400 00000000 01000000 00000000 01000000 00000000 01000000 00000000 01000000 11 22 33 44",
    ),
    "q4_1": (
        ENCODINGS["q4_1"],
        (64,),
        "0102 0304 " + "a0" * 16 + "0506 0708 " + "b1" * 16,
        "01000300 00000000 04000000 00000000 04000000 00000000 20000000 01020506 03040708" + "a0" * 16 + "b1" * 16,
    ),
    "composite": (
        CompositeEncoding((CompositeField("v", ENCODINGS["i8"], 2), CompositeField("r", BF16, 1))),
        (),
        "0102 803f 0304 80bf",
        "01000300 00000000 04000000 00000000 02000000 00000000 02000000 01020304 7f7f 0080",
    ),
    # Plane E as one frame: single segment, content size 4, one last RLE block of four bytes 7F.
    "bf16 frame": (
        BF16,
        (1,),
        "803f 80bf 803f 80bf",
        "01000200 01000000 0a000000 00000000 04000000 28b52ffd2004230000 7f 00800080",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_tiles_decode_to_their_words(name: str) -> None:
    encoding, shape, raw_hex, stored_hex = GOLDEN[name]
    raw, stored = bytes.fromhex(raw_hex), bytes.fromhex(stored_hex)
    assert decode(2, stored, len(raw), encoding, shape) == raw
    assert reference_decode(stored, encoding, int(np.prod(shape)), len(raw)) == raw


@pytest.mark.parametrize("name", GOLDEN)
def test_every_byte_of_a_golden_tile_counts(name: str) -> None:
    """Control: a change of any byte is refused or changes the decoded tile."""
    encoding, shape, raw_hex, stored_hex = GOLDEN[name]
    raw, stored = bytes.fromhex(raw_hex), bytes.fromhex(stored_hex)
    for position in range(len(stored)):
        damaged = bytearray(stored)
        damaged[position] ^= 0x15
        outcome = tile_or_code(2, bytes(damaged), len(raw), encoding, shape)
        assert outcome != raw
        if isinstance(outcome, str):
            assert outcome in ("bad-split-header", "bad-zstd-frame")


# What the encoder chooses.


def test_the_stored_planes_have_the_modes_that_pay() -> None:
    raw = np.random.default_rng(1).normal(size=(2000, 64)).astype("<f4").view("<u2")[:, 1::2].tobytes()
    stored = encode_split(raw, BF16, (64,))
    assert stored is not None
    assert (stored[4], stored[12]) == (1, 0)
    assert len(stored) < len(raw) * 3 // 4


def test_repeating_rows_are_matched_as_repeats() -> None:
    distinct = np.random.default_rng(2).integers(0, 256, (40, 384), np.uint8)
    raw = distinct[np.random.default_rng(3).integers(0, 40, 1000)].tobytes()
    stored = encode_split(raw, BF16, (3, 64))
    assert stored is not None
    assert len(stored) * 10 < len(raw)


def test_a_tile_that_does_not_shrink_by_two_percent_is_raw() -> None:
    raw = random.Random(4).randbytes(100_000)
    for codec in ("zstd", "split"):
        codec_id, stored = encode(codec, raw, BF16, (2,))
        assert codec_id == 0
        assert stored is raw


@pytest.mark.parametrize(("random_part", "codec_id"), [(9_700, 1), (9_900, 0)])
def test_the_two_percent_are_the_limit(random_part: int, codec_id: int) -> None:
    raw = random.Random(5).randbytes(random_part) + bytes(10_000 - random_part)
    assert encode("zstd", raw, BF16, (2,))[0] == codec_id


def test_split_does_not_apply_to_part_of_an_element() -> None:
    assert encode("split", bytes(1001), BF16, (2,))[0] == 0
    assert encode("split", bytes(1002), BF16, (2,))[0] == 2


def test_an_empty_tile_is_raw() -> None:
    for codec in ("raw", "zstd", "split"):
        assert encode(codec, b"", BF16, (2,)) == (0, b"")
    assert decode(0, b"", 0, BF16, (2,)) == b""


def test_the_frames_of_the_encoder_carry_their_size_and_nothing_else() -> None:
    for compress in (compress_fast, compress_level1):
        for length in (100, 70_000, 3_000_000):
            header = zstandard.get_frame_parameters(compress(bytes(length)))
            assert (header.content_size, header.dict_id, header.has_checksum) == (length, 0, False)
            assert header.window_size <= 1 << 19


# The bounds of the decoder.

CONTENT = bytes(range(256)) * 8
FRAME = compress_level1(CONTENT)


def frame_with(*, write_checksum: bool = False, write_content_size: bool = True) -> bytes:
    compressor = zstandard.ZstdCompressor(level=1, write_checksum=write_checksum, write_content_size=write_content_size)
    return compressor.compress(CONTENT)


def refuse_frame(frame: bytes, length: int, family: type[KvpackError]) -> KvpackError:
    """The frame is refused by ``decompress_frame``, by codec ``zstd`` and as the plane of a ``split`` tile."""
    with pytest.raises(family) as caught:
        decompress_frame(frame, length)
    assert caught.value.code == "bad-zstd-frame"
    out = memoryview(bytearray(b"\xa5" * length))
    for codec_id, stored in ((1, frame), (2, split_tile((1, frame)))):
        with pytest.raises(family) as again:
            decode(codec_id, stored, length, ENCODINGS["u8"], (1,), out)
        assert again.value.code == "bad-zstd-frame"
    assert set(out) == {0xA5}
    return caught.value


def test_a_good_frame_is_read() -> None:
    """Control for everything below: the frame, and frames written by hand, are good until something is changed."""
    assert decompress_frame(FRAME, len(CONTENT)) == CONTENT
    assert decompress_frame(rle_frame(300, [200, 100]), 300) == bytes(300)
    assert decompress_frame(rle_frame(300, [300], 0xC0, b"\x68"), 300) == bytes(300)


@pytest.mark.parametrize(
    ("frame", "field"),
    [
        (b"", "magic"),
        (FRAME[:3], "magic"),
        (FRAME[:4], "frame header"),
        (FRAME[:5], "frame header"),
        (b"\x50\x2a\x4d\x18" + struct.pack("<I", len(CONTENT)) + CONTENT, "magic"),
        (b"\x50\x2a\x4d\x18\x02\0\0\0ab" + FRAME, "magic"),
        (b"\x27\xb5\x2f\xfd" + FRAME[4:], "magic"),
        (frame_with(write_checksum=True), "frame descriptor"),
        (frame_with(write_content_size=False), "content size"),
        (b"\x28\xb5\x2f\xfd\xe1\x07" + rle_frame(2048, [2048])[5:], "frame descriptor"),
        (rle_frame(2048, [2048], 0xE8), "frame header"),
        (rle_frame(2048, [2048], 0xF0), "frame descriptor"),
        (rle_frame(2047, [2047]), "content size"),
        (rle_frame(2049, [2049]), "content size"),
        (rle_frame(2048, [2048], 0xC0, b"\x70"), "window size"),
        (rle_frame(2048, [2048], 0xC0, b"\x69"), "window size"),
    ],
)
def test_a_frame_that_the_format_does_not_allow_is_refused_unopened(
    frame: bytes, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zstd_frame._contexts, "decompressor", None)
    assert refuse_frame(frame, len(CONTENT), FormatError).field == field


@pytest.mark.parametrize(
    "frame",
    [
        FRAME + b"\0",
        FRAME + FRAME,
        FRAME + b"\x50\x2a\x4d\x18\0\0\0\0",
    ],
)
def test_a_frame_that_is_followed_by_anything_is_refused(frame: bytes) -> None:
    refuse_frame(frame, len(CONTENT), FormatError)


@pytest.mark.parametrize(
    "frame",
    [
        FRAME[:-1],
        FRAME[:20],
        rle_frame(2048, [2047]),
        rle_frame(2048, [2049]),
        rle_frame(2048, [2048])[:-1],
        rle_frame(2048, []),
        rle_frame(2048, [2048])[:-4] + b"\x07\0\0",
    ],
)
def test_a_frame_that_is_cut_or_damaged_is_refused(frame: bytes) -> None:
    refuse_frame(frame, len(CONTENT), IntegrityError)


def test_every_proper_prefix_of_a_frame_is_refused() -> None:
    for length in range(len(FRAME)):
        with pytest.raises(KvpackError) as caught:
            decompress_frame(FRAME[:length], len(CONTENT))
        assert caught.value.code == "bad-zstd-frame"


def test_a_small_frame_of_four_gigabytes_is_refused_unopened(monkeypatch: pytest.MonkeyPatch) -> None:
    lying = rle_frame(1 << 32, [1 << 17] * (1 << 15))
    assert len(lying) < 132_000
    assert zstandard.get_frame_parameters(lying).content_size == 1 << 32
    monkeypatch.setattr(zstd_frame._contexts, "decompressor", None)
    for length in (1, 1 << 20):
        assert refuse_frame(lying, length, FormatError).found == 1 << 32


def test_a_frame_that_delivers_more_than_it_declares_stays_within_the_declared_size() -> None:
    lying = rle_frame(1 << 20, [1 << 17] * (1 << 15))
    refuse_frame(lying, 1 << 20, IntegrityError)


def peak_bytes(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["bf16", "f32", "i64", "q8_0", "composite"])
def test_decoding_allocates_at_most_twice_the_raw_length(name: str) -> None:
    encoding, shape = SHAPES[name]
    row_bytes = encoding.row_bytes(shape)
    raw = bytes(range(256)) * row_bytes * ((6 << 20) // row_bytes // 256)
    codec_id, stored = encode("split", raw, encoding, shape)
    assert codec_id == 2
    assert peak_bytes(lambda: decode(2, stored, len(raw), encoding, shape)) < 2 * len(raw) + (2 << 20)
    # Control: the measure sees what zstd and NumPy allocate.
    assert peak_bytes(lambda: decode(2, stored, len(raw), encoding, shape)) > len(raw)


def test_without_its_checks_the_decoder_would_take_forbidden_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: zstd itself reads these frames, so the refusals above are the package's own."""
    monkeypatch.setattr(zstd_frame, "_DESCRIPTOR_FORBIDDEN", 0)
    monkeypatch.setattr(zstd_frame, "MAX_WINDOW", 1 << 30)
    assert decompress_frame(frame_with(write_checksum=True), len(CONTENT)) == CONTENT
    assert decompress_frame(rle_frame(2048, [2048], 0xC0, b"\x70"), 2048) == bytes(2048)


def test_an_empty_frame_stands_nowhere() -> None:
    empty = compress_level1(b"")
    with pytest.raises(FormatError) as caught:
        decompress_frame(empty, 0)
    assert caught.value.code == "bad-zstd-frame"
    with pytest.raises(FormatError) as refused:
        decode(1, empty, 0, BF16, (1,))
    assert refused.value.code == "raw-length"


GOOD = split_tile((0, bytes(8)), (0, bytes(8)))


def with_byte(position: int, value: int) -> bytes:
    return GOOD[:position] + bytes([value]) + GOOD[position + 1 :]


@pytest.mark.parametrize(
    ("stored", "field"),
    [
        (b"", "header"),
        (GOOD[:3], "header"),
        (GOOD[:19], "records"),
        (with_byte(0, 0), "version"),
        (with_byte(0, 2), "version"),
        (with_byte(1, 2), "flags"),
        (with_byte(1, 0x80), "flags"),
        (with_byte(2, 1), "planes"),
        (with_byte(3, 1), "planes"),
        (with_byte(4, 2), "mode"),
        (with_byte(5, 1), "reserved"),
        (with_byte(15, 1), "reserved"),
        (with_byte(1, 1), "stored length"),
        (GOOD + b"\0", "stored length"),
        (GOOD[:-1], "stored length"),
        (with_byte(11, 0xFF), "stored length"),
        (split_tile((0, bytes(7)), (0, bytes(9))), "stored length"),
        (split_tile((0, bytes(16))), "planes"),
        (split_tile((0, bytes(8)), (0, bytes(8)), (0, b"")), "planes"),
        (split_tile((0, bytes(8)), (0, bytes(8)), base=bytes(3)), "stored length"),
    ],
)
def test_a_bad_split_header_is_refused(stored: bytes, field: str) -> None:
    assert decode(2, GOOD, 16, BF16, (2,)) == bytes(16)
    out = memoryview(bytearray(b"\xa5" * 16))
    with pytest.raises(FormatError) as caught:
        decode(2, stored, 16, BF16, (2,), out)
    assert (caught.value.code, caught.value.field) == ("bad-split-header", field)
    assert set(out) == {0xA5}


def test_a_base_is_refused_where_the_encoding_or_the_rows_have_none() -> None:
    tile = split_tile((0, bytes(8)), (0, bytes(8)), base=bytes(2))
    assert decode(2, tile, 16, BF16, (2,)) == bytes(16)
    for encoding, shape in ((ENCODINGS["f16"], (2,)), (BF16, (3,))):
        with pytest.raises(FormatError) as caught:
            decode(2, tile, 16, encoding, shape)
        assert (caught.value.code, caught.value.field) == ("bad-split-header", "flags")
    composite = CompositeEncoding((CompositeField("k", BF16, 2),))
    with pytest.raises(FormatError):
        decode(2, tile, 16, composite, ())


@pytest.mark.parametrize(
    ("codec_id", "stored", "raw_length", "code"),
    [
        (3, b"", 0, "unknown-codec"),
        (-1, b"", 0, "unknown-codec"),
        (0, bytes(4), 5, "raw-length"),
        (0, bytes(4), 3, "raw-length"),
        (0, b"", -1, "raw-length"),
        (1, FRAME, 0, "raw-length"),
        (1, FRAME, -1, "raw-length"),
        (2, GOOD, 0, "raw-length"),
        (2, GOOD, 15, "raw-length"),
    ],
)
def test_an_impossible_tile_is_refused(codec_id: int, stored: bytes, raw_length: int, code: str) -> None:
    with pytest.raises(FormatError) as caught:
        decode(codec_id, stored, raw_length, BF16, (2,))
    assert caught.value.code == code
    if code == "unknown-codec":
        assert caught.value.found == codec_id
        assert str(codec_id) in str(caught.value)


def test_the_caller_is_told_of_a_bad_codec_or_buffer() -> None:
    for codec in ("lz4", "", 1):
        with pytest.raises(UsageError) as caught:
            encode(codec, bytes(4), BF16, (2,))  # type: ignore[arg-type]
        assert caught.value.code == "unknown-codec"
    gapped = memoryview(bytearray(8))[::2]
    for out in (memoryview(bytes(4)), memoryview(bytearray(5)), gapped):
        with pytest.raises(UsageError) as refused:
            decode(0, bytes(4), 4, BF16, (2,), out)
        assert refused.value.code == "bad-buffer"


def test_an_unknown_encoding_can_be_unpacked_but_not_split() -> None:
    unknown = UnknownEncoding("q3_9000")
    assert check_round_trip("zstd", bytes(5000), unknown, (7,)) == 1
    for attempt in (lambda: encode("split", bytes(4), unknown, (2,)), lambda: decode(2, GOOD, 16, unknown, (2,))):
        with pytest.raises(CompatibilityError) as caught:
            attempt()
        assert caught.value.code == "unknown-encoding"
    with pytest.raises(CompatibilityError) as straddles:
        decode(2, GOOD, 34, ENCODINGS["q8_0"], (2, 48))
    assert straddles.value.code == "block-straddles-head"


@given(st.binary(max_size=200), st.sampled_from(["bf16", "q4_0", "u8", "i64"]), st.integers(0, 3), st.data())
def test_any_stored_bytes_give_a_tile_or_an_error(noise: bytes, name: str, codec: int, draw: st.DataObject) -> None:
    encoding, shape = SHAPES[name]
    raw = tile_bytes("normal", encoding, shape, 2)
    stored: Buffer = encode_split(raw, encoding, shape) or b"" if codec == 2 else compress_level1(raw)
    position = draw.draw(st.integers(0, len(stored)))
    damaged = bytes(stored[:position]) + noise + bytes(stored[position + draw.draw(st.integers(0, 4)) :])
    outcome = tile_or_code(codec, damaged, len(raw), encoding, shape)
    if isinstance(outcome, str):
        assert outcome in ("bad-zstd-frame", "bad-split-header", "unknown-codec", "raw-length")
    else:
        assert len(outcome) == len(raw)


def test_threads_do_not_share_contexts() -> None:
    def work(seed: int) -> bool:
        raw = (np.random.default_rng(seed).normal(size=30_000).astype("<f4").view("<u2")[1::2]).tobytes()
        return all(check_round_trip(codec, raw, BF16, (2, 50)) for codec in ("zstd", "split") for _ in range(5))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(32)))


def test_importing_the_codecs_does_not_import_numpy() -> None:
    program = "import sys, kvpack.pack.codecs; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    program = "import sys, numpy, kvpack.pack.codecs; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 1
