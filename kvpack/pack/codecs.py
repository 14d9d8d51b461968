"""Tile codecs by id and name: ``raw`` (0), ``zstd`` (1, one frame) and ``split`` (2, byte planes).

The decoders are normative and bounded: whatever the stored bytes say, decoding allocates at most twice the
raw length that the tile index gives plus blocks of fixed size (and, for composites, one row), and every
failure is a :class:`~kvpack.errors.KvpackError`. All of it may run in several threads at once, and the parts
that take time release the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

from kvpack.errors import FormatError, UsageError
from kvpack.model.encoding import AnyEncoding
from kvpack.pack.split import decode_split, encode_split
from kvpack.pack.zstd_frame import Buffer, compress_level1, decompress_frame

__all__ = ["CODECS", "MAX_TILE_BYTES", "Buffer", "Codec", "decode", "encode"]

MAX_TILE_BYTES: Final = 0xFFFF_FFFF
"""What the u32 lengths of an index record can say; readers set lower limits."""

RowShape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Codec:
    """A codec: its wire id, its name, and the two directions.

    ``compress`` gives the stored bytes, or None where the codec does not apply to the tile. ``expand`` writes
    the tile into the given view, whose length (at least 1) is the tile's raw length.
    """

    codec_id: int
    name: str
    compress: Callable[[memoryview, AnyEncoding, RowShape], Buffer | None]
    expand: Callable[[memoryview, AnyEncoding, RowShape, memoryview], None]


def _compress_raw(raw: memoryview, encoding: AnyEncoding, row_shape: RowShape) -> Buffer:
    return raw


def _expand_raw(stored: memoryview, encoding: AnyEncoding, row_shape: RowShape, out: memoryview) -> None:
    out[:] = stored


def _compress_zstd(raw: memoryview, encoding: AnyEncoding, row_shape: RowShape) -> Buffer:
    return compress_level1(raw)


def _expand_zstd(stored: memoryview, encoding: AnyEncoding, row_shape: RowShape, out: memoryview) -> None:
    out[:] = decompress_frame(stored, len(out))


_RAW: Final = Codec(0, "raw", _compress_raw, _expand_raw)
_ALL: Final = (
    _RAW,
    Codec(1, "zstd", _compress_zstd, _expand_zstd),
    Codec(2, "split", encode_split, decode_split),
)

CODECS: Final[Mapping[int | str, Codec]] = MappingProxyType(
    {key: codec for codec in _ALL for key in (codec.codec_id, codec.name)}
)
"""Every codec, under its id and under its name."""


def encode(codec: str, raw: Buffer, encoding: AnyEncoding, row_shape: RowShape) -> tuple[int, Buffer]:
    """The codec id and the stored bytes of a tile of rows of ``row_shape`` elements.

    A tile that the codec does not make at least 2 % smaller, or does not apply to, comes back as (0, ``raw``)
    uncopied.

    Raises UsageError ``unknown-codec`` and, for a buffer that is not contiguous, ``bad-buffer``; FormatError
    ``raw-length`` above :data:`MAX_TILE_BYTES`; with ``split`` CompatibilityError where the encoding is
    unknown or ``row_shape`` does not fit it.
    """
    chosen = CODECS.get(codec) if isinstance(codec, str) else None
    if chosen is None:
        names = ", ".join(known.name for known in _ALL)
        raise UsageError("unknown-codec", f"no codec is called {codec}", expected=names, found=codec)
    view = _byte_view(raw)
    if len(view) > MAX_TILE_BYTES:
        raise FormatError("raw-length", "a tile is too long", expected=MAX_TILE_BYTES, found=len(view))
    if chosen is not _RAW and len(view):
        stored = chosen.compress(view, encoding, row_shape)
        if stored is not None and len(stored) <= len(view) * 98 // 100:
            return chosen.codec_id, stored
    return _RAW.codec_id, raw


def decode(
    codec_id: int,
    stored: Buffer,
    raw_length: int,
    encoding: AnyEncoding,
    row_shape: RowShape,
    out: memoryview | None = None,
) -> Buffer:
    """The ``raw_length`` bytes of a tile: in ``out`` where it is given, else in a buffer (``raw``:
    ``stored``).

    ``raw`` and ``zstd`` need no knowledge of the encoding. ``out`` is written only after every check has
    passed.

    Raises FormatError ``unknown-codec``, ``raw-length``, ``bad-zstd-frame`` or ``bad-split-header``;
    IntegrityError ``bad-zstd-frame``; UsageError ``bad-buffer`` for an ``out`` that is read-only, not
    contiguous or of another length; with ``split`` CompatibilityError where the encoding is unknown or
    ``row_shape`` does not fit it.
    """
    chosen = CODECS.get(codec_id) if isinstance(codec_id, int) else None
    if chosen is None:
        raise FormatError(
            "unknown-codec", f"codec {codec_id} is not known to this reader", field="codec", found=codec_id
        )
    view = _byte_view(stored)
    expected = len(view) if chosen is _RAW else max(raw_length, 1)
    if raw_length != expected:
        raise FormatError(
            "raw-length",
            f"a tile of codec {chosen.name} with {len(view)} stored bytes cannot be {raw_length} bytes",
            field="raw length",
            expected=expected,
            found=raw_length,
        )
    if chosen is _RAW and out is None:
        return stored
    target = memoryview(bytearray(raw_length)) if out is None else _byte_view(out)
    if target.readonly or len(target) != raw_length:
        raise UsageError(
            "bad-buffer",
            "the output is read-only or of another length",
            expected=raw_length,
            found=len(target),
        )
    chosen.expand(view, encoding, row_shape, target)
    return target if out is None else out


def _byte_view(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise UsageError("bad-buffer", "a tile's buffer is not contiguous")
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(bytearray())
