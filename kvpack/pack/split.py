"""The ``split`` codec: byte planes, each stored as it is or as one zstd frame.

Stored layout, little-endian, nothing before, between or behind:

====================  ========================================================================
u8                    version, 1
u8                    flags: bit 0 ``base``, the others zero
u16                   N, the number of planes that the encoding has
N records of 8 bytes  u8 mode (0 as it is, 1 one zstd frame), 3 zero bytes, u32 stored length
``channels`` bytes    with ``base`` only: one byte an element of a row
the planes            each plane's stored bytes, one behind the other
====================  ========================================================================

The planes and their lengths follow from the encoding and the raw length (:mod:`kvpack.pack.planes`), so a
header that says otherwise is refused. The decoder is normative. The encoder's choices are not, and any of
them may change:

- The frames use zstd's fast strategy almost without a match search
  (:func:`kvpack.pack.zstd_frame.compress_fast`).
- A plane that saves less than 1/32 is stored as it is, judged first on four samples of 4 KiB.
- Where many rows repeat exactly, as V of a first layer does (it depends on the token alone), every plane gets
  a level-1 frame, whose match search pays there.
- ``base`` is off unless asked for. On the bf16 rows of a small model (2,048 tokens) it made tiles 1.2 % smaller
  (ratio 1.505 to 1.523) and cost 17 % of the speed of encoding and 11 % of decoding; a link or disk faster than
  about 0.2 GB/s does not win back even the decoding. Where asked for, ``base[c]`` is the mean of E over up to 256
  rows: as small as the median of all rows, and far cheaper to find.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from kvpack.errors import FormatError
from kvpack.model.encoding import AnyEncoding
from kvpack.pack.planes import BASE_ENCODINGS, merge_planes, plane_lengths, split_planes, subtract_base
from kvpack.pack.zstd_frame import Buffer, compress_fast, compress_level1, decompress_frame

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["decode_split", "encode_split"]

_HEADER: Final = struct.Struct("<BBH")
_RECORD: Final = struct.Struct("<B3sI")
_VERSION: Final = 1
_FLAG_BASE: Final = 1
_MODE_RAW: Final = 0
_MODE_ZSTD: Final = 1

_SAMPLE_BYTES: Final = 4096
_SAMPLES: Final = 4
_SAVED_PART: Final = 32
_REPEAT_ROWS: Final = 256
_BASE_ROWS: Final = 256
_BASE_MIN_ROWS: Final = 64


def encode_split(
    raw: Buffer, encoding: AnyEncoding, row_shape: tuple[int, ...], *, with_base: bool = False
) -> bytes | None:
    """The stored bytes of a tile, or None where it does not hold whole blocks (composite: rows) of
    ``encoding``.

    ``raw`` holds rows of ``row_shape`` elements; allocates about twice its length. ``with_base`` stores a
    base a channel where the encoding has one and the tile is at least 64 whole rows that do not repeat.

    Raises CompatibilityError where the encoding is unknown or ``row_shape`` does not fit it.
    """
    import numpy as np

    row_bytes = encoding.row_bytes(row_shape)
    tile = np.frombuffer(raw, np.uint8)
    if not tile.size or plane_lengths(encoding, tile.size) is None:
        return None
    planes = split_planes(tile, encoding)
    repeats = _rows_repeat(tile, row_bytes)
    base = None
    rows, rest = divmod(tile.size, row_bytes)
    if with_base and encoding.name in BASE_ENCODINGS and not repeats and rows >= _BASE_MIN_ROWS and not rest:
        base = _mean_exponents(planes[0].reshape(rows, -1))
        subtract_base(planes[0], base)
    records, bodies = [], []
    for plane in planes:
        frame = _compress_plane(plane, repeats)
        body: Buffer = plane.data if frame is None else frame
        records.append(_RECORD.pack(_MODE_RAW if frame is None else _MODE_ZSTD, bytes(3), len(body)))
        bodies.append(body)
    header = _HEADER.pack(_VERSION, 0 if base is None else _FLAG_BASE, len(planes))
    return b"".join([header, *records, b"" if base is None else base.tobytes(), *bodies])


def _compress_plane(plane: npt.NDArray[np.uint8], repeats: bool) -> bytes | None:
    """A frame that saves at least 1/32 of the plane, or None."""
    if not repeats and plane.size >= 2 * _SAMPLES * _SAMPLE_BYTES:
        step = (plane.size - _SAMPLE_BYTES) // (_SAMPLES - 1)
        sample = b"".join(plane[i * step : i * step + _SAMPLE_BYTES].data for i in range(_SAMPLES))
        if not _saves(compress_fast(sample), len(sample)):
            return None
    frame = compress_level1(plane.data) if repeats else compress_fast(plane.data)
    return frame if _saves(frame, plane.size) else None


def _saves(frame: bytes, length: int) -> bool:
    return len(frame) <= length - length // _SAVED_PART


def _rows_repeat(tile: npt.NDArray[np.uint8], row_bytes: int) -> bool:
    """Whether at least 1/4 of a sample of rows repeat another one of it in their first 8 bytes."""
    import numpy as np

    rows = tile.size // row_bytes
    if rows < 16 or row_bytes < 8:
        return False
    heads = tile[: rows * row_bytes].reshape(rows, row_bytes)[:: -(-rows // _REPEAT_ROWS), :8]
    rows_sampled: int = heads.shape[0]
    distinct: int = np.unique(np.ascontiguousarray(heads).view(np.uint64)).size
    return distinct * 4 <= rows_sampled * 3


def _mean_exponents(exponents: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The mean of each channel over evenly spaced rows of the (rows, channels) exponents, rounded down."""
    import numpy as np

    sample = exponents[:: -(-exponents.shape[0] // _BASE_ROWS)]
    means: npt.NDArray[np.uint8] = (sample.sum(axis=0, dtype=np.uint32) // sample.shape[0]).astype(np.uint8)
    return means


def _bad(message: str, *, field: str, expected: object = None, found: object = None) -> FormatError:
    return FormatError("bad-split-header", message, field=field, expected=expected, found=found)


def decode_split(stored: Buffer, encoding: AnyEncoding, row_shape: tuple[int, ...], out: memoryview) -> None:
    """Write the tile that ``stored`` holds into ``out``, whose length is the tile's raw length (at least 1).

    ``out`` is written only after the header and every plane are found good. Allocates at most the raw length
    (the planes) plus a few blocks of 131,072 elements.

    Raises FormatError ``raw-length`` (not whole blocks or rows), ``bad-split-header`` or ``bad-zstd-frame``,
    IntegrityError ``bad-zstd-frame``, CompatibilityError where the encoding is unknown or ``row_shape`` does
    not fit it.
    """
    import numpy as np

    row_bytes = encoding.row_bytes(row_shape)
    lengths = plane_lengths(encoding, len(out))
    if lengths is None:
        raise FormatError(
            "raw-length",
            f"{len(out)} bytes are not whole blocks or rows of encoding {encoding.name}",
            field="raw length",
            found=len(out),
        )
    view = memoryview(stored).cast("B")
    has_base, records, position = _read_header(view, len(lengths))
    base = None
    if has_base:
        channels = _base_channels(encoding, row_bytes, len(out))
        base = np.frombuffer(view[position : position + channels], np.uint8)
        position += channels
    total = position + sum(length for _, length in records)
    if total != len(view):
        raise _bad(
            "the planes do not end where the tile ends",
            field="stored length",
            expected=total,
            found=len(view),
        )
    planes = []
    for number, ((mode, stored_length), length) in enumerate(zip(records, lengths, strict=True)):
        body = view[position : position + stored_length]
        position += stored_length
        if mode == _MODE_RAW and stored_length != length:
            raise _bad(
                f"plane {number} has another length",
                field="stored length",
                expected=length,
                found=stored_length,
            )
        planes.append(np.frombuffer(body if mode == _MODE_RAW else decompress_frame(body, length), np.uint8))
    merge_planes(planes, encoding, np.frombuffer(out, np.uint8), base)


def _read_header(view: memoryview, plane_count: int) -> tuple[bool, list[tuple[int, int]], int]:
    """Whether there is a base, each plane's (mode, stored length), and the length of header and records."""
    end = _HEADER.size + plane_count * _RECORD.size
    if len(view) < _HEADER.size:
        raise _bad("the header is cut short", field="header", expected=_HEADER.size, found=len(view))
    version, flags, count = _HEADER.unpack_from(view)
    if version != _VERSION:
        raise _bad("unknown version of the split layout", field="version", expected=_VERSION, found=version)
    if flags & ~_FLAG_BASE:
        raise _bad("unknown flags of the split layout", field="flags", found=flags)
    if count != plane_count:
        raise _bad(
            "another number of planes than the encoding has",
            field="planes",
            expected=plane_count,
            found=count,
        )
    if len(view) < end:
        raise _bad("the plane records are cut short", field="records", expected=end, found=len(view))
    records = []
    for number, (mode, reserved, length) in enumerate(_RECORD.iter_unpack(view[_HEADER.size : end])):
        if mode not in (_MODE_RAW, _MODE_ZSTD):
            raise _bad(f"plane {number} has an unknown mode", field="mode", found=mode)
        if any(reserved):
            raise _bad(f"plane {number} has nonzero reserved bytes", field="reserved", found=reserved.hex())
        records.append((mode, length))
    return bool(flags & _FLAG_BASE), records, end


def _base_channels(encoding: AnyEncoding, row_bytes: int, raw_length: int) -> int:
    if encoding.name not in BASE_ENCODINGS or raw_length % row_bytes:
        raise _bad(
            f"a base needs whole rows of bf16 or f32, not {raw_length} bytes of {encoding.name}",
            field="flags",
            found=1,
        )
    return row_bytes // {"bf16": 2, "f32": 4}[encoding.name]
