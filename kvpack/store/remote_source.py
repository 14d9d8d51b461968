"""A pack in a bucket as the bytes that a reader asks for: the front first, then ranges, several at once."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvpack.errors import IntegrityError, StoreError
from kvpack.pack.reader import FrontCheck, PackReader
from kvpack.store.bucket import PARALLEL, Bucket
from kvpack.store.objects import pack_name

__all__ = ["RemoteSource", "object_name", "open_remote"]

HEAD_BYTES: Final = 1 << 20
"""What is read first: the front of nearly every pack, and the token ids, which lie right behind it."""


def object_name(pack_id: bytes, suffix: str = "") -> str:
    """Where a pack (or what lies beside it) is in every store; raises UsageError ``bad-pack-id``."""
    name = pack_name(pack_id)
    return f"objects/{name[:2]}/{name}{suffix}"


class RemoteSource:
    """One object; a :class:`~kvpack.pack.reader.ByteSource`. Its first mebibyte is read when it is made."""

    threads: int = PARALLEL

    def __init__(self, bucket: Bucket, name: str) -> None:
        """Raises StoreError, FileNotFoundError where there is no such object."""
        self._bucket = bucket
        self._name = name
        found = bucket.read(name, 0, HEAD_BYTES)
        if found is None:
            raise FileNotFoundError(f"{bucket.url} has no {name}")
        self._head, self._size = memoryview(found[0]), found[1]

    @property
    def size(self) -> int:
        """Length of the object in bytes."""
        return self._size

    def close(self) -> None:
        """Let go of what was read."""
        self._head = memoryview(b"")

    def read_at(self, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset`` on, fewer only at the end; raises StoreError."""
        end = min(offset + length, self._size)
        if end <= len(self._head):
            return bytes(self._head[offset:end])
        found = self._bucket.read(self._name, offset, end - offset)
        if found is None:
            raise StoreError("no-such-pack", f"{self._name} was removed while it was read", found=self._name)
        return bytes(found[0])


def open_remote(bucket: Bucket, pack_id: bytes, check: FrontCheck | None = None) -> PackReader:
    """Open a pack in a bucket, its front verified; no tile is read.

    Raises FileNotFoundError, StoreError, and what the reader raises; IntegrityError ``pack-id`` for another pack.
    """
    name = object_name(pack_id)
    source = RemoteSource(bucket, name)
    try:
        reader = PackReader(Path(pack_name(pack_id)), check=check, source=source)
    except BaseException:
        source.close()
        raise
    if reader.pack_id != pack_id:
        reader.close()
        raise IntegrityError("pack-id", "the object is another pack", expected=pack_id.hex())
    return reader
