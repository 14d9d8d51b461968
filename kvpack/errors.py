"""The error tree: one class per family, one process exit status per family, one stable code per broken rule.

Stability: the class names, the codes and the exit statuses are public and only ever added to.

Everything that leaves kvpack's public API on bad input is a :class:`KvpackError`. An error says what is wrong in one
line (``str(error)``), carries the facts a program needs (``layer``, ``plane``, ``field``, ``expected``, ``found``) and,
where there is one, the next thing to do (``hint``).
"""

from __future__ import annotations

__all__ = [
    "CompatibilityError",
    "DecryptError",
    "EngineError",
    "FormatError",
    "InstallError",
    "IntegrityError",
    "KvpackError",
    "ResourceError",
    "StoreError",
    "TrustError",
    "UsageError",
]


class KvpackError(Exception):
    """Base of every error that kvpack raises.

    ``code`` is a stable kebab-case name of the broken rule (``bad-magic``, ``weights-differ``); ``family`` and
    ``exit_status`` come from the subclass. ``layer`` is a layer number, ``plane`` a plane name such as
    ``layers.3.k``, ``field`` the name of a header, manifest or identity field.
    """

    family: str = "Error"
    exit_status: int = 1

    def __init__(
        self,
        code: str,
        message: str,
        *,
        layer: int | None = None,
        plane: str | None = None,
        field: str | None = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.layer = layer
        self.plane = plane
        self.field = field
        self.expected = expected
        self.found = found
        self.hint = hint

    def facts(self) -> dict[str, object]:
        """The error as plain JSON-ready facts; absent facts are left out."""
        facts: dict[str, object] = {"family": self.family, "code": self.code, "message": self.message}
        for name in ("layer", "plane", "field", "expected", "found", "hint"):
            value = getattr(self, name)
            if value is not None:
                facts[name] = value if isinstance(value, (int, str, bool)) else str(value)
        return facts


class UsageError(KvpackError):
    """The caller asked for something that cannot be meant: a missing file, an existing output, an empty prompt."""

    family = "Usage"
    exit_status = 2


class FormatError(KvpackError):
    """The bytes are not a well-formed pack of a version and with the features that this reader knows."""

    family = "Format"
    exit_status = 10


class IntegrityError(KvpackError):
    """The bytes are well formed but are not the bytes that were written: a hash or a padding byte differs."""

    family = "Integrity"
    exit_status = 11


class TrustError(KvpackError):
    """No key that the caller trusts vouches for the pack, or the policy refuses who does."""

    family = "Trust"
    exit_status = 12


class DecryptError(KvpackError):
    """The payload is encrypted and cannot be opened with what the caller holds."""

    family = "Decrypt"
    exit_status = 13


class CompatibilityError(KvpackError):
    """The pack is sound but belongs to another model, geometry, encoding or position than the destination."""

    family = "Compatibility"
    exit_status = 14


class ResourceError(KvpackError):
    """The machine said no: disk full, read-only, permission denied, not enough memory."""

    family = "Resource"
    exit_status = 15


class StoreError(KvpackError):
    """A prefix store is unusable: unreachable, of another version, or without the guarantees it needs."""

    family = "Store"
    exit_status = 16


class EngineError(KvpackError):
    """An engine, a model or a cache cannot be used: not installed, unknown class, unsupported input."""

    family = "Engine"
    exit_status = 17


class InstallError(KvpackError):
    """A destination refused or failed an install; it is as it was, or fresh and empty."""

    family = "Install"
    exit_status = 18
