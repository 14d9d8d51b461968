"""Byte planes: the bytes of a tile regrouped so that like stands with like, and back. Lossless for any bits.

The planes of an encoding, in stored order (``t`` runs over the tile's elements or blocks):

- ``bf16``, word ``u``: E, bits 14..7; M, the sign in bit 7 and bits 6..0.
- ``f32``, word ``u``: E and M of bits 31..16 as for bf16; then bits 15..8; then bits 7..0.
- other scalars: the bytes of the element, the most significant first.
- block encodings: one plane a field; the field's bytes of every block, one behind the other.
- composite encodings: for each field in order, the planes of that field's encoding over all rows.

Words are little-endian in the tile. NumPy is imported inside the functions, so that reading the front of a
pack does not load it; its element loops release the interpreter lock. Where the optional ``base`` is given,
plane E of element ``t`` holds ``(E[t] - base[t mod channels]) mod 256``; only ``bf16`` and ``f32`` have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kvpack.errors import CompatibilityError
from kvpack.model.encoding import AnyEncoding, CompositeEncoding, Encoding, UnknownEncoding

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bytes: TypeAlias = npt.NDArray[np.uint8]
    Words: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

__all__ = ["BASE_ENCODINGS", "merge_planes", "plane_lengths", "split_planes", "subtract_base"]

BASE_ENCODINGS: Final = frozenset({"bf16", "f32"})

# Elements a pass, measured: in smaller blocks the calls cost more than the work, in larger ones the scratch
# leaves the second-level cache.
_BLOCK: Final = 131_072


def _block_planes(encoding: Encoding | UnknownEncoding) -> tuple[int, ...]:
    """Bytes that one block gives to each plane. Raises CompatibilityError ``unknown-encoding``."""
    if isinstance(encoding, UnknownEncoding):
        raise CompatibilityError(
            "unknown-encoding",
            f"encoding {encoding.name} is not known to this reader",
            field="encoding",
            found=encoding.name,
        )
    if encoding.is_block:
        return tuple(size for _, size in encoding.fields)
    return (1,) * encoding.block_bytes


def plane_lengths(encoding: AnyEncoding, raw_length: int) -> tuple[int, ...] | None:
    """Bytes of each plane of a tile of ``raw_length`` bytes; None where that is not a whole number of blocks
    or rows.

    Raises CompatibilityError ``unknown-encoding``.
    """
    if isinstance(encoding, CompositeEncoding):
        rows, rest = divmod(raw_length, encoding.row_bytes(()))
        per_unit = tuple(
            field.count // field.encoding.block_elements * size
            for field in encoding.fields
            if isinstance(field.encoding, Encoding)
            for size in _block_planes(field.encoding)
        )
        return None if rest else tuple(rows * size for size in per_unit)
    per_unit = _block_planes(encoding)
    blocks, rest = divmod(raw_length, sum(per_unit))
    return None if rest else tuple(blocks * size for size in per_unit)


def split_planes(raw: Bytes, encoding: AnyEncoding) -> list[Bytes]:
    """The planes of ``raw``, uint8 of a length that :func:`plane_lengths` accepts, each contiguous."""
    import numpy as np

    if isinstance(encoding, CompositeEncoding):
        return [
            plane
            for columns, field_encoding in _columns(raw, encoding)
            for plane in split_planes(np.ascontiguousarray(columns).reshape(-1), field_encoding)
        ]
    sizes = _block_planes(encoding)
    if len(sizes) == 1:
        return [raw]
    if isinstance(encoding, Encoding) and encoding.is_block:
        return [np.ascontiguousarray(part).view(np.uint8) for part in _block_fields(raw, sizes)]
    words = raw.view(f"<u{len(sizes)}")
    planes = [np.empty(words.size, np.uint8) for _ in sizes]
    # Made once: a fresh array a block costs more in page faults than the arithmetic.
    shifted = np.empty(min(_BLOCK, words.size), words.dtype)
    upper = np.empty(shifted.size, np.uint16)
    for start in range(0, words.size, _BLOCK):
        word = words[start : start + _BLOCK]
        parts = [plane[start : start + word.size] for plane in planes]
        if encoding.name in BASE_ENCODINGS:
            _split_float_block(word, parts, shifted[: word.size], upper[: word.size])
        else:
            _split_word_block(word, parts, shifted[: word.size])
    return planes


def merge_planes(planes: Sequence[Bytes], encoding: AnyEncoding, out: Bytes, base: Bytes | None = None) -> None:
    """Write into ``out`` the tile whose planes these are; the inverse of :func:`split_planes`.

    The planes have the lengths that :func:`plane_lengths` gives for ``out``. ``base`` (bf16 and f32 only) is
    one byte a channel, to be added to plane E.
    """

    if isinstance(encoding, CompositeEncoding):
        _merge_composite(planes, encoding, out)
        return
    sizes = _block_planes(encoding)
    if len(sizes) == 1:
        out[...] = planes[0]
    elif isinstance(encoding, Encoding) and encoding.is_block:
        for part, plane in zip(_block_fields(out, sizes), planes, strict=True):
            part[...] = plane.view(part.dtype)
    elif encoding.name in BASE_ENCODINGS:
        _merge_floats(planes, out.view(f"<u{len(sizes)}"), base)
    else:
        _merge_words(planes, out.view(f"<u{len(sizes)}"))


def _merge_composite(planes: Sequence[Bytes], encoding: CompositeEncoding, out: Bytes) -> None:
    """Some rows at a time, so that the scratch, one field of those rows, stays small."""
    import numpy as np

    row_bytes = encoding.row_bytes(())
    lengths = plane_lengths(encoding, row_bytes) or ()
    rows = out.size // row_bytes
    step = max(1, _BLOCK // row_bytes)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        parts = iter([plane[start * n : stop * n] for plane, n in zip(planes, lengths, strict=True)])
        for columns, field_encoding in _columns(out[start * row_bytes : stop * row_bytes], encoding):
            field_bytes = np.empty(columns.size, np.uint8)
            merge_planes([next(parts) for _ in _block_planes(field_encoding)], field_encoding, field_bytes)
            columns[...] = field_bytes.reshape(columns.shape)


def subtract_base(plane_e: Bytes, base: Bytes) -> None:
    """Replace E by ``(E[t] - base[t mod channels]) mod 256`` in place."""
    channels = base.size
    rows = plane_e.reshape(-1, channels)
    rows -= base


def _columns(tile: Bytes, encoding: CompositeEncoding) -> Iterator[tuple[Bytes, Encoding | UnknownEncoding]]:
    """Each field's columns of the tile as a (rows, bytes of the field) view."""
    rows = tile.reshape(-1, encoding.row_bytes(()))
    start = 0
    for field in encoding.fields:
        yield rows[:, start : start + field.field_bytes], field.encoding
        start += field.field_bytes


def _block_fields(tile: Bytes, sizes: tuple[int, ...]) -> list[npt.NDArray[np.void]]:
    """Each field of the tile's blocks as a strided view with one item a block."""
    import numpy as np

    blocks = tile.view(np.dtype([(str(number), f"V{size}") for number, size in enumerate(sizes)]))
    return [blocks[str(number)] for number in range(len(sizes))]


def _split_float_block(word: Words, parts: list[Bytes], shifted: Words, upper: Words) -> None:
    """E, M and, for 32-bit words, the two lower bytes of one block."""
    import numpy as np

    if len(parts) == 4:
        _split_word_block(word, parts[2:], shifted)
        np.right_shift(word, 16, out=shifted)
        np.copyto(upper, shifted, casting="unsafe")
        word, shifted = upper, shifted.view(np.uint16)[: upper.size]
    np.right_shift(word, 7, out=shifted)
    np.copyto(parts[0], shifted, casting="unsafe")
    # The sign in bit 15 moves to bit 7, which the mask has emptied.
    np.bitwise_and(word, 0x807F, out=upper)
    np.right_shift(upper, 8, out=shifted)
    upper |= shifted
    np.copyto(parts[1], upper, casting="unsafe")


def _split_word_block(word: Words, parts: list[Bytes], shifted: Words) -> None:
    """The low bytes of one block of words, as many as there are parts, the most significant first."""
    import numpy as np

    np.copyto(parts[-1], word, casting="unsafe")
    for number, part in enumerate(reversed(parts[:-1]), start=1):
        np.right_shift(word, 8 * number, out=shifted)
        np.copyto(part, shifted, casting="unsafe")


def _merge_floats(planes: Sequence[Bytes], words: Words, base: Bytes | None) -> None:
    import numpy as np

    plane_e, plane_m = planes[0], planes[1].view(np.int8)
    step = _BLOCK
    if base is not None:
        # A block holds whole rows, so that one repetition of the base serves every block without a broadcast.
        step = max(1, _BLOCK // base.size) * base.size
        base = np.tile(base, min(step, words.size) // base.size)
    kept = np.empty(min(step, words.size), np.int16)
    sums = np.empty(kept.size, np.uint8)
    upper = np.empty_like(kept, np.uint16) if len(planes) == 4 else None
    for start in range(0, words.size, step):
        word = words[start : start + step]
        block = slice(start, start + word.size)
        exponent = plane_e[block]
        if base is not None:
            exponent = np.add(exponent, base[: word.size], out=sums[: word.size])
        high = word if upper is None else upper[: word.size]
        sign_mantissa = kept[: word.size]
        np.multiply(exponent, np.uint16(1 << 7), out=high)
        # Widening the signed byte copies bit 7 to bits 15..8; the mask leaves the sign and the mantissa.
        np.bitwise_and(plane_m[block], np.int16(0x807F - 0x10000), out=sign_mantissa)
        high |= sign_mantissa.view(np.uint16)
        if upper is not None:
            np.copyto(word, high)
            _append_bytes(word, [planes[2][block], planes[3][block]])


def _merge_words(planes: Sequence[Bytes], words: Words) -> None:
    import numpy as np

    for start in range(0, words.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        np.copyto(words[block], planes[0][block])
        _append_bytes(words[block], [plane[block] for plane in planes[1:]])


def _append_bytes(words: Words, parts: Sequence[Bytes]) -> None:
    """Shift each word up by a byte and put the part's byte below, part by part."""
    for part in parts:
        words <<= 8
        words |= part
