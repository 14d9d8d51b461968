"""From f32 to every encoding of :mod:`kvpack.model.encoding` that holds real numbers, and back.

This is the byte-level reference: every other implementation, a CUDA kernel above all, must give these bytes. Two rules
hold throughout: each f32 operation is rounded on its own (no fused multiply-add), and subnormal numbers are kept.

=========== ===========================================================================================================
f32         the bytes themselves
f16         IEEE 754 round to nearest, ties to even; beyond the largest number infinity; NaN see below
bf16        the upper half of the f32 word, ties to even; NaN see below
f8_e4m3     the "fn" variant of OCP OFP8: no infinity, largest 448, NaN is 0x7F and 0xFF; ties to even, **saturating**:
            what lies beyond 448, infinity too, becomes 448 with its sign
f8_e5m2     OCP OFP8, IEEE-like: ties to even, **not saturating**: what rounds beyond 57,344 becomes infinity; NaN is
            0x7F and 0xFF
q8_0 … q4_0 the reference quantisers of ggml (``quantize_row_*_ref`` in ``ggml-quants.c``)
iq4_nl      read only
=========== ===========================================================================================================

A NaN stays a NaN with its sign and the upper bits of its payload, made quiet, in f16 and bf16 (as the hardware
conversion and ggml do); reading f16 does the same, and reading bf16 keeps the word.

ggml leaves three cases of a block to the compiler; here they are decided. A block that holds an infinity or a NaN, or
whose f16 scale or minimum would be infinite, is refused. Where the reciprocal of the scale overflows (below about
2⁻¹²⁸, where the f16 scale is zero anyway) it counts as zero, as ggml has it for a scale of zero. Where reading a block
with an infinite or NaN scale gives a NaN, the NaN is 0x7FC00000.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvpack.errors import CompatibilityError
from kvpack.model.encoding import ENCODINGS, AnyEncoding, Encoding

__all__ = ["dequantise", "is_readable", "is_writable", "quantise"]

Bytes: TypeAlias = NDArray[np.uint8]
Reals: TypeAlias = NDArray[np.float32]

BLOCK: Final = 32
QUIET_NAN: Final = np.uint32(0x7FC00000)
IQ4_NL_VALUES: Final = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), dtype=np.float32
)


def quantise(encoding: AnyEncoding, values: NDArray[Any]) -> Bytes:
    """f32 values [..., n] as bytes [..., row bytes of n elements], in a new array.

    Raises CompatibilityError ``no-conversion`` for an encoding that cannot be written or values that are not f32,
    ``block-straddles-head`` where n is no multiple of the block, ``not-finite`` for an infinity or a NaN in a block
    encoding, and ``scale-overflow`` where a block's scale or minimum is beyond f16.
    """
    known = _known(encoding, _WRITERS, "written from f32")
    if values.dtype != np.float32:
        raise _no_conversion(f"{known.name} is written from f32, not from {values.dtype}", values.dtype)
    nbytes = _row_length(known, values.shape, values.shape[-1] if values.ndim else 0)
    flat = np.ascontiguousarray(values, dtype="<f4").reshape(-1)
    return _WRITERS[known.name](flat).reshape(*values.shape[:-1], nbytes)


def dequantise(encoding: AnyEncoding, stored: NDArray[Any]) -> Reals:
    """Bytes [..., row bytes of n elements] as f32 values [..., n], in a new array.

    Raises CompatibilityError ``no-conversion`` for an encoding that has no real numbers or bytes that are not uint8,
    and ``bad-row-shape`` where the bytes are not whole blocks.
    """
    known = _known(encoding, _READERS, "read as f32")
    if stored.dtype != np.uint8:
        raise _no_conversion(f"{known.name} is read from bytes, not from {stored.dtype}", stored.dtype)
    length = stored.shape[-1] if stored.ndim else -1
    if length < 0 or length % known.block_bytes:
        raise CompatibilityError(
            "bad-row-shape",
            f"{length} bytes are not whole blocks of {known.block_bytes} bytes of {known.name}",
            field="row_shape",
            expected=known.block_bytes,
            found=stored.shape,
        )
    elements = length // known.block_bytes * known.block_elements
    flat = np.ascontiguousarray(stored).reshape(-1)
    return _READERS[known.name](flat).reshape(*stored.shape[:-1], elements)


def is_writable(encoding: AnyEncoding) -> bool:
    """Whether :func:`quantise` knows the encoding."""
    return isinstance(encoding, Encoding) and ENCODINGS.get(encoding.name) == encoding and encoding.name in _WRITERS


def is_readable(encoding: AnyEncoding) -> bool:
    """Whether :func:`dequantise` knows the encoding."""
    return isinstance(encoding, Encoding) and ENCODINGS.get(encoding.name) == encoding and encoding.name in _READERS


def _known(encoding: AnyEncoding, table: MappingProxyType[str, Any], what: str) -> Encoding:
    if not isinstance(encoding, Encoding) or encoding.name not in table or ENCODINGS[encoding.name] != encoding:
        raise _no_conversion(f"encoding {encoding.name} cannot be {what}", encoding.name)
    return encoding


def _no_conversion(message: str, found: object) -> CompatibilityError:
    return CompatibilityError("no-conversion", message, field="encoding", found=found)


def _row_length(encoding: Encoding, shape: tuple[int, ...], elements: int) -> int:
    if not shape:
        raise CompatibilityError("bad-row-shape", "a single number is no row", field="row_shape", found=shape)
    return encoding.row_bytes((elements,)) if elements else 0


# --- scalars ---------------------------------------------------------------------------------------------------------


def _write_f16(values: Reals) -> Bytes:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        halves = values.astype("<f2").view("<u2")
    nans = np.isnan(values)
    if nans.any():
        words = values.view("<u4")[nans]
        halves[nans] = ((words >> 16) & 0x8000) | 0x7E00 | ((words >> 13) & 0x3FF)
    return halves.view(np.uint8)


def _read_f16(stored: Bytes) -> Reals:
    words = stored.view("<u2")
    with np.errstate(invalid="ignore"):
        values = words.view("<f2").astype("<f4")
    nans = np.isnan(values)
    if nans.any():
        wide = words[nans].astype(np.uint32)
        values.view("<u4")[nans] = ((wide & 0x8000) << 16) | QUIET_NAN | ((wide & 0x3FF) << 13)
    return values


def _write_bf16(values: Reals) -> Bytes:
    words = values.view("<u4")
    # At most 0x7F800000 (infinity) + 0x7FFF + 1 for a number, so the sum never leaves the word's 32 bits.
    rounded = (words + 0x7FFF + ((words >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (words >> 16) | 0x40, rounded).astype("<u2").view(np.uint8)


def _read_bf16(stored: Bytes) -> Reals:
    return (stored.view("<u2").astype("<u4") << 16).view("<f4")


def _write_f8(values: Reals, mantissa: int, bias: int, largest: int, beyond: int) -> Bytes:
    """Sign, exponent and ``mantissa`` bits of the nearest fp8 number; codes above ``largest`` become ``beyond``."""
    words = values.view("<u4")
    magnitude = words & 0x7FFFFFFF
    drop = 23 - mantissa
    # For a normal result: round the f32 word at its dropped bits (a carry moves into the exponent), then rebias.
    normal = (magnitude + ((1 << (drop - 1)) - 1) + ((magnitude >> drop) & 1)) >> drop
    normal -= np.minimum(normal, (127 - bias) << mantissa)
    # For a subnormal one: its code is the number of smallest steps; the product with a power of two is exact.
    small = magnitude < (128 - bias) << 23
    steps = np.rint(np.where(small, np.abs(values), 0) * np.float32(2.0 ** (bias - 1 + mantissa)))
    code = np.where(small, steps.astype("<u4"), normal)
    code = np.where(code > largest, beyond, code)
    code = np.where(magnitude > 0x7F800000, 0x7F, code)
    stored: Bytes = (code | (words >> 24 & 0x80)).astype(np.uint8)
    return stored


def _write_f8_e4m3(values: Reals) -> Bytes:
    return _write_f8(values, mantissa=3, bias=7, largest=0x7E, beyond=0x7E)


def _write_f8_e5m2(values: Reals) -> Bytes:
    return _write_f8(values, mantissa=2, bias=15, largest=0x7B, beyond=0x7C)


@cache
def _f8_e4m3_values() -> Reals:
    code = np.arange(128)
    exponent, fraction = code >> 3, code & 7
    magnitude = np.where(exponent, np.ldexp(1 + fraction / 8, exponent - 7), np.ldexp(fraction / 8, -6))
    magnitude[0x7F] = np.nan
    values = np.concatenate([magnitude, magnitude]).astype("<f4")
    values.view("<u4")[128:] |= 0x80000000
    return values


def _read_f8_e4m3(stored: Bytes) -> Reals:
    return np.take(_f8_e4m3_values(), stored)


def _read_f8_e5m2(stored: Bytes) -> Reals:
    # An e5m2 byte is the upper byte of an f16 word: the same sign, exponent width and bias.
    return _read_f16((stored.astype("<u2") << 8).view(np.uint8))


# --- blocks of 32 ----------------------------------------------------------------------------------------------------


def _blocks(values: Reals, name: str) -> Reals:
    blocks = values.reshape(-1, BLOCK)
    finite = np.isfinite(blocks).all(axis=-1)
    if not finite.all():
        block = int(np.argmin(finite))
        raise CompatibilityError(
            "not-finite",
            f"block {block} holds an infinity or a NaN, which {name} cannot hold",
            field="encoding",
            found=f"block {block}",
        )
    return blocks


def _halves(values: Reals, name: str) -> Bytes:
    """The f16 words of one column of block scales or minima."""
    stored = _write_f16(np.ascontiguousarray(values).reshape(-1)).reshape(-1, 2)
    infinite = (stored[:, 1] & 0x7C) == 0x7C
    if infinite.any():
        block = int(np.argmax(infinite))
        raise CompatibilityError(
            "scale-overflow",
            f"the scale or the minimum of block {block} is beyond the largest f16, so {name} cannot hold it",
            field="encoding",
            found=float(values.reshape(-1)[block]),
        )
    return stored


def _reciprocal(scale: Reals) -> Reals:
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scale
    return np.where(np.isinf(inverse), np.float32(0), inverse)


def _at(blocks: Reals, index: NDArray[np.intp]) -> Reals:
    picked: Reals = np.take_along_axis(blocks, index[:, None], axis=-1)
    return picked


def _write_q8_0(values: Reals) -> Bytes:
    blocks = _blocks(values, "q8_0")
    scale = np.abs(blocks).max(axis=-1, keepdims=True, initial=0) / np.float32(127)
    scaled = blocks * _reciprocal(scale)
    # roundf: halves away from zero. Adding 0.5 and truncating would round 0.49999997 up.
    whole = np.trunc(scaled)
    whole += np.copysign(np.abs(scaled - whole) >= np.float32(0.5), scaled).astype(np.float32)
    return np.concatenate([_halves(scale, "q8_0"), whole.astype(np.int8).view(np.uint8)], axis=-1).reshape(-1)


def _write_signed(values: Reals, name: str, bits: int) -> Bytes:
    """q4_0 and q5_0: the number of largest magnitude (the first of equals) becomes the lowest code, zero the middle."""
    blocks = _blocks(values, name)
    middle = 1 << (bits - 1)
    extreme = _at(blocks, np.abs(blocks).argmax(axis=-1))
    # ggml starts from +0, so a block of zeros has the scale -0 whatever the signs of its zeros.
    extreme[extreme == 0] = 0
    scale = extreme / np.float32(-middle)
    codes = (blocks * _reciprocal(scale) + np.float32(middle + 0.5)).astype(np.uint8)
    return _pack(name, [scale], np.minimum(codes, (1 << bits) - 1))


def _write_ranged(values: Reals, name: str, bits: int) -> Bytes:
    """q4_1 and q5_1: the minimum becomes 0 and the maximum the highest code."""
    blocks = _blocks(values, name)
    highest = (1 << bits) - 1
    lowest = _at(blocks, blocks.argmin(axis=-1))
    with np.errstate(over="ignore"):
        scale = (_at(blocks, blocks.argmax(axis=-1)) - lowest) / np.float32(highest)
    heads = [_halves(part, name) for part in (scale, lowest)]
    codes = ((blocks - lowest) * _reciprocal(scale) + np.float32(0.5)).astype(np.uint8)
    return _pack(name, [scale, lowest], np.minimum(codes, highest), heads)


def _pack(name: str, scales: list[Reals], codes: Bytes, heads: list[Bytes] | None = None) -> Bytes:
    """Scales, the fifth bits where there are any (bit ``i`` of a little-endian word is element ``i``'s), the nibbles
    (element ``i`` in the low half of byte ``i``, element ``i + 16`` in its high half)."""
    parts = heads if heads is not None else [_halves(scale, name) for scale in scales]
    if name.startswith("q5"):
        parts.append(np.packbits(codes >> 4, axis=-1, bitorder="little"))
    low, high = codes[:, :16] & np.uint8(0x0F), codes[:, 16:] << np.uint8(4)
    parts.append(low | high)
    return np.concatenate(parts, axis=-1).reshape(-1)


def _fields(stored: Bytes, name: str) -> dict[str, Bytes]:
    """The columns of the blocks by the names of :data:`ENCODINGS`."""
    encoding = ENCODINGS[name]
    blocks = stored.reshape(-1, encoding.block_bytes)
    columns, start = {}, 0
    for field, size in encoding.fields:
        columns[field] = blocks[:, start : start + size]
        start += size
    return columns


def _scales(column: Bytes) -> Reals:
    return _read_f16(np.ascontiguousarray(column).reshape(-1)).reshape(-1, 1)


def _scaled(columns: dict[str, Bytes], codes: Reals) -> Reals:
    with np.errstate(invalid="ignore"):
        values = _scales(columns["d"]) * codes
        if "m" in columns:
            values = values + _scales(columns["m"])
    nans = np.isnan(values)
    if nans.any():
        values.view("<u4")[nans] = QUIET_NAN
    return values.reshape(-1)


def _codes(columns: dict[str, Bytes]) -> Bytes:
    nibbles = columns["qs"]
    codes = np.concatenate([nibbles & 0x0F, nibbles >> 4], axis=-1)
    if "qh" in columns:
        codes |= np.unpackbits(columns["qh"], axis=-1, bitorder="little") << 4
    return codes


def _read_q8_0(stored: Bytes) -> Reals:
    columns = _fields(stored, "q8_0")
    return _scaled(columns, columns["qs"].view(np.int8).astype(np.float32))


def _read_nibbles(stored: Bytes, name: str, middle: int) -> Reals:
    columns = _fields(stored, name)
    return _scaled(columns, _codes(columns).astype(np.float32) - np.float32(middle))


def _read_iq4_nl(stored: Bytes) -> Reals:
    columns = _fields(stored, "iq4_nl")
    return _scaled(columns, IQ4_NL_VALUES[_codes(columns)])


_WRITERS: Final[MappingProxyType[str, Callable[[Reals], Bytes]]] = MappingProxyType(
    {
        "f32": lambda values: values.copy().view(np.uint8),
        "f16": _write_f16,
        "bf16": _write_bf16,
        "f8_e4m3": _write_f8_e4m3,
        "f8_e5m2": _write_f8_e5m2,
        "q8_0": _write_q8_0,
        "q5_1": lambda values: _write_ranged(values, "q5_1", 5),
        "q5_0": lambda values: _write_signed(values, "q5_0", 5),
        "q4_1": lambda values: _write_ranged(values, "q4_1", 4),
        "q4_0": lambda values: _write_signed(values, "q4_0", 4),
    }
)

_READERS: Final[MappingProxyType[str, Callable[[Bytes], Reals]]] = MappingProxyType(
    {
        "f32": lambda stored: stored.copy().view("<f4"),
        "f16": _read_f16,
        "bf16": _read_bf16,
        "f8_e4m3": _read_f8_e4m3,
        "f8_e5m2": _read_f8_e5m2,
        "q8_0": _read_q8_0,
        "q5_1": lambda stored: _read_nibbles(stored, "q5_1", 0),
        "q5_0": lambda stored: _read_nibbles(stored, "q5_0", 16),
        "q4_1": lambda stored: _read_nibbles(stored, "q4_1", 0),
        "q4_0": lambda stored: _read_nibbles(stored, "q4_0", 8),
        "iq4_nl": _read_iq4_nl,
    }
)
