"""One zstd frame of a known size: thread-local contexts, and a decoder that is bounded before it allocates.

A frame in a pack is exactly one Zstandard frame (RFC 8878) that declares its content size, has no checksum
and no dictionary id, asks for a window of at most 8 MiB and has nothing behind it. The declared size is
compared with the expected one before anything is decompressed: python-zstandard allocates whatever a frame
declares, whatever ``max_output_size`` says, and a frame of 131 KB can declare and deliver 4 GiB.
"""

from __future__ import annotations

import threading
from typing import Final, TypeAlias

import zstandard

from kvpack.errors import FormatError, IntegrityError

__all__ = ["MAX_WINDOW", "Buffer", "compress_fast", "compress_level1", "decompress_frame"]

Buffer: TypeAlias = bytes | bytearray | memoryview

MAX_WINDOW: Final = 8 << 20
_MAGIC: Final = b"\x28\xb5\x2f\xfd"
# Bit 4 is unused and bit 3 reserved in RFC 8878; bit 2 announces a checksum, bits 1 and 0 a dictionary id.
_DESCRIPTOR_FORBIDDEN: Final = 0x1F


class _Contexts(threading.local):
    """zstd contexts of one thread: they are costly to make and not safe to share."""

    def __init__(self) -> None:
        # Entropy coding without a real match search: on exponents the matches of level 1 cost time and gain
        # nothing.
        fast = zstandard.ZstdCompressionParameters(
            window_log=19,
            hash_log=6,
            chain_log=6,
            search_log=1,
            min_match=7,
            target_length=0,
            strategy=zstandard.STRATEGY_FAST,
            write_content_size=True,
            write_checksum=False,
            write_dict_id=False,
        )
        self.fast = zstandard.ZstdCompressor(compression_params=fast)
        self.level1 = zstandard.ZstdCompressor(
            level=1, write_content_size=True, write_checksum=False, write_dict_id=False
        )
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def compress_fast(plane: Buffer) -> bytes:
    """One frame with parameters for bytes whose frequencies, not repeats, carry the redundancy."""
    return _contexts.fast.compress(plane)


def compress_level1(plane: Buffer) -> bytes:
    """One frame at zstd level 1."""
    return _contexts.level1.compress(plane)


def _bad(message: str, *, field: str, expected: object = None, found: object = None) -> FormatError:
    return FormatError("bad-zstd-frame", message, field=field, expected=expected, found=found)


def decompress_frame(frame: Buffer, content_length: int) -> bytes:
    """The ``content_length`` bytes (at least 1) of the one frame that ``frame`` is.

    Raises FormatError ``bad-zstd-frame`` for a frame that the format does not allow, or that is followed by other
    bytes, and IntegrityError ``bad-zstd-frame`` for one that is truncated or damaged.
    """
    if content_length < 1:
        raise _bad("no bytes are stored as they are, never as a frame", field="content size", found=content_length)
    if bytes(frame[:4]) != _MAGIC:
        raise _bad("not a zstd frame", field="magic", expected=_MAGIC.hex(), found=bytes(frame[:4]).hex())
    try:
        header = zstandard.get_frame_parameters(frame)
    except zstandard.ZstdError as error:
        raise _bad(f"unreadable zstd frame header: {error}", field="frame header") from error
    if frame[4] & _DESCRIPTOR_FORBIDDEN:
        raise _bad(
            "a zstd frame has a checksum, a dictionary id or a reserved bit",
            field="frame descriptor",
            found=frame[4],
        )
    if header.content_size == zstandard.CONTENTSIZE_UNKNOWN:
        raise _bad("a zstd frame does not declare its size", field="content size", expected=content_length)
    if header.content_size != content_length:
        raise _bad(
            f"a zstd frame declares {header.content_size} bytes where {content_length} belong",
            field="content size",
            expected=content_length,
            found=header.content_size,
        )
    if header.window_size > MAX_WINDOW:
        raise _bad(
            "a zstd frame asks for too large a window",
            field="window size",
            expected=MAX_WINDOW,
            found=header.window_size,
        )
    try:
        content = _contexts.decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        if _decompresses_with_a_tail(frame, content_length):
            raise _bad("bytes follow a zstd frame", field="frame length", found=len(frame)) from error
        raise IntegrityError("bad-zstd-frame", f"a zstd frame does not decompress: {error}") from error
    if len(content) != content_length:
        raise IntegrityError(
            "bad-zstd-frame",
            f"a zstd frame gave {len(content)} bytes where {content_length} belong",
            expected=content_length,
            found=len(content),
        )
    return content


def _decompresses_with_a_tail(frame: Buffer, content_length: int) -> bool:
    try:
        return len(_contexts.decompressor.decompress(frame, allow_extra_data=True)) == content_length
    except zstandard.ZstdError:
        return False
