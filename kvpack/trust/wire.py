"""SSH wire strings (RFC 4251, section 5): a big-endian uint32 length and that many bytes."""

from __future__ import annotations

__all__ = ["WireReader", "wire_string"]


def wire_string(value: bytes) -> bytes:
    """``value`` with its length before it."""
    return len(value).to_bytes(4, "big") + value


class WireReader:
    """Reads a buffer front to back; a read that the buffer has too little for answers None,
    and so does every read after it."""

    def __init__(self, buffer: bytes) -> None:
        self._buffer = buffer
        self._position = 0

    def take(self, count: int) -> bytes | None:
        """The next ``count`` bytes."""
        end = self._position + count
        if end > len(self._buffer):
            self._position = len(self._buffer) + 1  # So that every later read fails as well.
            return None
        taken = self._buffer[self._position : end]
        self._position = end
        return taken

    def uint32(self) -> int | None:
        """The next big-endian uint32."""
        taken = self.take(4)
        return None if taken is None else int.from_bytes(taken, "big")

    def string(self) -> bytes | None:
        """The next string, without its length."""
        length = self.uint32()
        return None if length is None else self.take(length)

    @property
    def at_end(self) -> bool:
        """Whether nothing is left."""
        return self._position == len(self._buffer)
