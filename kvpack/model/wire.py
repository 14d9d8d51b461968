"""Typed reading of a decoded manifest: every fault is one FormatError that names the field by its path.

The rules are those of spec/kvpack-v1.md, section 7: unknown keys are refused (``unknown-key``) unless they begin with
``x_``; a missing key, a wrong type or a value out of bounds is ``bad-manifest``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from kvpack.errors import FormatError

__all__ = ["HASH_BYTES", "MAX_STRING_BYTES", "WireMap", "bad_manifest"]

HASH_BYTES: Final = 32
MAX_STRING_BYTES: Final = 1024
_UINT64_MAX: Final = (1 << 64) - 1
_NAME: Final = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)?")


def bad_manifest(path: str, message: str, *, expected: object = None, found: object = None) -> FormatError:
    """The one error for a manifest that decodes but does not mean anything."""
    return FormatError("bad-manifest", f"manifest field {path}: {message}", field=path, expected=expected, found=found)


def _typed(value: object, wanted: type, path: str, name: str) -> None:
    if type(value) is not wanted:
        raise bad_manifest(path, f"must be {name}", expected=name, found=type(value).__name__)


class WireMap:
    """One map of the manifest, read key by key; :meth:`done` refuses what nobody asked for."""

    def __init__(self, value: object, path: str) -> None:
        _typed(value, dict, path or "(root)", "a map")
        assert isinstance(value, dict)
        self._values: Mapping[str, object] = value
        self._path = path
        self._read: set[str] = set()

    def path(self, key: str) -> str:
        """The full path of ``key``, as errors name it."""
        return f"{self._path}.{key}" if self._path else key

    def has(self, key: str) -> bool:
        """Whether an optional key is present."""
        return key in self._values

    def names(self) -> tuple[str, ...]:
        """Every key of the map, in stored order; marks them as read (for maps with free keys)."""
        self._read.update(self._values)
        return tuple(self._values)

    def get(self, key: str) -> object:
        """The raw value of a required key."""
        self._read.add(key)
        if key not in self._values:
            raise bad_manifest(self.path(key), "is missing")
        return self._values[key]

    def uint(self, key: str, *, least: int = 0, most: int = _UINT64_MAX) -> int:
        """A required unsigned integer within ``[least, most]``."""
        return self._bounded(key, least, most)

    def integer(self, key: str, *, least: int, most: int) -> int:
        """A required signed integer within ``[least, most]``."""
        return self._bounded(key, least, most)

    def _bounded(self, key: str, least: int, most: int) -> int:
        value = self.get(key)
        _typed(value, int, self.path(key), "an integer")
        assert isinstance(value, int)
        if not least <= value <= most:
            raise bad_manifest(self.path(key), "is out of bounds", expected=f"{least} to {most}", found=value)
        return value

    def opt_uint(self, key: str, *, least: int = 0, most: int = _UINT64_MAX) -> int | None:
        """An optional unsigned integer."""
        return self.uint(key, least=least, most=most) if self.has(key) else None

    def string(self, key: str) -> str:
        """A required string of at most 1 KiB."""
        value = self.get(key)
        _typed(value, str, self.path(key), "a string")
        assert isinstance(value, str)
        if len(value.encode()) > MAX_STRING_BYTES:
            raise FormatError(
                "limit-exceeded",
                f"manifest field {self.path(key)}: a string of over {MAX_STRING_BYTES} bytes",
                field=self.path(key),
                expected=MAX_STRING_BYTES,
                found=len(value.encode()),
            )
        return value

    def opt_string(self, key: str) -> str | None:
        """An optional string."""
        return self.string(key) if self.has(key) else None

    def name(self, key: str) -> str:
        """A required registry-style name: ``[a-z][a-z0-9_]*`` with an optional ``.suffix``."""
        value = self.string(key)
        if not _NAME.fullmatch(value):
            raise bad_manifest(self.path(key), "is not a name", expected=_NAME.pattern, found=value)
        return value

    def binary(self, key: str) -> bytes:
        """A required byte string."""
        value = self.get(key)
        _typed(value, bytes, self.path(key), "binary")
        assert isinstance(value, bytes)
        return value

    def hash(self, key: str) -> bytes:
        """A required 32-byte hash."""
        value = self.binary(key)
        if len(value) != HASH_BYTES:
            raise bad_manifest(self.path(key), "has another length", expected=HASH_BYTES, found=len(value))
        return value

    def float64(self, key: str) -> float:
        """A required float64."""
        value = self.get(key)
        _typed(value, float, self.path(key), "a float64")
        assert isinstance(value, float)
        return value

    def array(self, key: str, *, most: int = 1 << 20) -> list[object]:
        """A required array of at most ``most`` entries."""
        value = self.get(key)
        _typed(value, list, self.path(key), "an array")
        assert isinstance(value, list)
        if len(value) > most:
            raise FormatError(
                "limit-exceeded",
                f"manifest field {self.path(key)}: {len(value)} entries, at most {most} are read",
                field=self.path(key),
                expected=most,
                found=len(value),
            )
        return value

    def uints(
        self, key: str, *, most_entries: int = 1 << 20, least: int = 0, most: int = _UINT64_MAX
    ) -> tuple[int, ...]:
        """A required array of unsigned integers within ``[least, most]``."""
        values = self.array(key, most=most_entries)
        for at, value in enumerate(values):
            _typed(value, int, f"{self.path(key)}[{at}]", "an integer")
            assert isinstance(value, int)
            if not least <= value <= most:
                raise bad_manifest(
                    f"{self.path(key)}[{at}]", "is out of bounds", expected=f"{least} to {most}", found=value
                )
        return tuple(v for v in values if isinstance(v, int))

    def strings(self, key: str, *, most_entries: int = 1 << 16) -> tuple[str, ...]:
        """A required array of strings."""
        values = self.array(key, most=most_entries)
        for at, value in enumerate(values):
            _typed(value, str, f"{self.path(key)}[{at}]", "a string")
        return tuple(v for v in values if isinstance(v, str))

    def map(self, key: str) -> WireMap:
        """A required map."""
        return WireMap(self.get(key), self.path(key))

    def maps(self, key: str, *, most: int = 1 << 16) -> list[WireMap]:
        """A required array of maps."""
        return [WireMap(v, f"{self.path(key)}[{at}]") for at, v in enumerate(self.array(key, most=most))]

    def done(self) -> None:
        """Refuse keys that were never read, except extensions (``x_…``)."""
        for key in self._values:
            if key not in self._read and not key.startswith("x_"):
                raise FormatError(
                    "unknown-key",
                    f"manifest field {self.path(key)} is not known to this version",
                    field=self.path(key),
                    hint="a newer kvpack may read this pack",
                )
