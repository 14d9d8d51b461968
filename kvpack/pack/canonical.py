"""Canonical MessagePack (spec, section 6): one value, one byte string.

The structure is walked header by header, so that a container's stated size allocates nothing; scalars are msgpack's.
What was decoded is encoded again and must give the same bytes, which catches every longer form.
"""

from __future__ import annotations

from math import isfinite
from typing import Final

import msgpack

from kvpack.errors import FormatError

__all__ = ["MAX_DEPTH", "MAX_ENTRIES", "decode", "encode"]

MAX_DEPTH: Final = 12
MAX_ENTRIES: Final = 1 << 20


def encode(value: object) -> bytes:
    """The canonical bytes of ``value``: maps in ascending order of their keys' UTF-8 bytes, shortest forms."""
    packed: bytes = msgpack.packb(_ordered(value), use_bin_type=True)
    return packed


def _ordered(value: object) -> object:
    if isinstance(value, dict):
        return {key: _ordered(value[key]) for key in sorted(value, key=str.encode)}
    if isinstance(value, (list, tuple)):
        return [_ordered(entry) for entry in value]
    return value


def _fault(message: str, at: int) -> FormatError:
    return FormatError("not-canonical", f"the manifest is not canonical MessagePack: {message} (byte {at})")


def decode(buffer: bytes) -> dict[str, object]:
    """Decode one map and refuse everything that :func:`encode` would not have written.

    Raises FormatError ``not-canonical``, or ``limit-exceeded`` for a container of over 1,048,576 entries.
    """
    unpacker = msgpack.Unpacker(
        raw=False, strict_map_key=True, max_buffer_size=max(1, len(buffer)), max_str_len=len(buffer)
    )
    unpacker.feed(buffer)
    try:
        value = _Walker(buffer, unpacker).value(1)
    except FormatError:
        raise
    except (msgpack.OutOfData, msgpack.UnpackException, ValueError, UnicodeDecodeError) as error:
        raise _fault(str(error) or type(error).__name__, unpacker.tell()) from None
    if unpacker.tell() != len(buffer):
        raise _fault("bytes follow the map", unpacker.tell())
    if not isinstance(value, dict):
        raise _fault("the outermost value is not a map", 0)
    if encode(value) != buffer:
        raise _fault("a value is not in its shortest form", 0)
    return value


class _Walker:
    def __init__(self, buffer: bytes, unpacker: msgpack.Unpacker) -> None:
        self._buffer = buffer
        self._unpacker = unpacker

    def value(self, depth: int) -> object:
        at = self._unpacker.tell()
        if at >= len(self._buffer):
            raise _fault("it ends inside a value", at)
        if depth > MAX_DEPTH:
            raise _fault(f"deeper than {MAX_DEPTH}", at)
        lead = self._buffer[at]
        if 0x80 <= lead <= 0x8F or lead in (0xDE, 0xDF):
            return self._map(self._unpacker.read_map_header(), depth, at)
        if 0x90 <= lead <= 0x9F or lead in (0xDC, 0xDD):
            count = self._bounded(self._unpacker.read_array_header(), at)
            return [self.value(depth + 1) for _ in range(count)]
        if lead == 0xC0:
            raise _fault("nil", at)
        if lead in (0xC7, 0xC8, 0xC9) or 0xD4 <= lead <= 0xD8:
            raise _fault("an extension type", at)
        if lead == 0xCA:
            raise _fault("a float32", at)
        if lead == 0xC1:
            raise _fault("a byte that begins nothing", at)
        scalar: object = self._unpacker.unpack()
        if isinstance(scalar, float) and not isfinite(scalar):
            raise _fault("a float that is not finite", at)
        return scalar

    def _bounded(self, count: int, at: int) -> int:
        if count > MAX_ENTRIES:
            raise FormatError(
                "limit-exceeded",
                f"a container in the manifest states {count} entries, at most {MAX_ENTRIES} are read",
                expected=MAX_ENTRIES,
                found=count,
            )
        if count > len(self._buffer) - at:
            raise _fault("a container states more entries than bytes follow", at)
        return count

    def _map(self, count: int, depth: int, at: int) -> dict[str, object]:
        entries: dict[str, object] = {}
        before: bytes | None = None
        for _ in range(self._bounded(count, at)):
            at = self._unpacker.tell()
            if at < len(self._buffer) and not (
                0xA0 <= self._buffer[at] <= 0xBF or self._buffer[at] in (0xD9, 0xDA, 0xDB)
            ):
                raise _fault("a key that is not a string", at)
            key = self._unpacker.unpack()
            encoded = key.encode()
            if before is not None and encoded <= before:
                raise _fault(f"key {key!r} is a duplicate or out of order", at)
            before = encoded
            entries[key] = self.value(depth + 1)
        return entries
