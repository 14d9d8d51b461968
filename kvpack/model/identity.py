"""Who produced a state, in two kinds of fields, and how strong a restore's claim is (spec, section 7.4).

*Compatibility* fields refuse when they differ: state of other weights is not state. *Numerics* fields never refuse:
they lower the claim from ``BITWISE`` to ``COMPATIBLE``, and the report names the field. The value ``absent`` says that
a side does not know a thing (a session without a tokenizer): it is reported and not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final, TypeAlias

from kvpack.errors import CompatibilityError
from kvpack.model.wire import WireMap, bad_manifest

__all__ = ["ABSENT", "Claim", "Comparison", "Identity", "IdentityValue", "compare"]

ABSENT: Final = "absent"
HISTORY: Final = frozenset({"prefill"})
"""Numerics fields that say how the session came to be. A restore takes the history over, so a destination has none."""
IdentityValue: TypeAlias = str | int | bytes

_FIELD_HINTS: Final[Mapping[str, str]] = {
    "weights": "load the model that made the pack, in the same dtype",
    "scalar": "load the model with the pack's dtype (--dtype)",
    "tokenizer": "use the tokenizer that made the pack",
    "template": "use the chat template that made the pack",
    "adapters": "activate the same adapters with the same scales",
}


class Claim(Enum):
    """What a restore promises about the next logits."""

    BITWISE = "BITWISE"
    COMPATIBLE = "COMPATIBLE"


@dataclass(frozen=True)
class Identity:
    """Field name to value, in the two kinds. Round trip: ``from_wire(to_wire(i)) == i``."""

    compatibility: Mapping[str, IdentityValue] = field(default_factory=dict)
    numerics: Mapping[str, IdentityValue] = field(default_factory=dict)

    def to_wire(self) -> dict[str, object]:
        """The identity as the manifest holds it."""
        return {"compatibility": dict(self.compatibility), "numerics": dict(self.numerics)}

    @classmethod
    def from_wire(cls, wire: WireMap) -> Identity:
        """Read an identity; values are strings, unsigned integers or binaries."""
        identity = cls(_fields(wire.map("compatibility")), _fields(wire.map("numerics")))
        wire.done()
        return identity


def _fields(wire: WireMap) -> Mapping[str, IdentityValue]:
    fields: dict[str, IdentityValue] = {}
    for name in wire.names():
        value = wire.get(name)
        if type(value) is str:
            fields[name] = wire.string(name)
        elif type(value) is int:
            fields[name] = wire.uint(name)
        elif type(value) is bytes:
            fields[name] = value
        else:
            raise bad_manifest(wire.path(name), "must be a string, an unsigned integer or binary")
    return MappingProxyType(fields)


def show(value: IdentityValue | None) -> str:
    """A value as people read it: digests in short hex."""
    if value is None:
        return "(not stated)"
    return value.hex()[:16] if isinstance(value, bytes) else str(value)


@dataclass(frozen=True)
class Comparison:
    """What comparing two identities gave: refusals, fields that lower the claim, and fields that nobody compared."""

    refusals: tuple[CompatibilityError, ...]
    lowered: tuple[str, ...]
    not_compared: tuple[str, ...]
    overridden: tuple[str, ...] = ()

    @property
    def claim(self) -> Claim:
        """BITWISE exactly if nothing lowered it."""
        return Claim.COMPATIBLE if self.lowered or self.overridden else Claim.BITWISE


def compare(pack: Identity, here: Identity, *, override: frozenset[str] = frozenset()) -> Comparison:
    """Compare the pack's identity with the destination's.

    ``override`` names compatibility fields whose difference the caller accepts; each one used is reported and lowers
    the claim. A field that only one side has is a difference.
    """
    refusals: list[CompatibilityError] = []
    overridden: list[str] = []
    not_compared: list[str] = []
    for name in sorted(pack.compatibility.keys() | here.compatibility.keys()):
        theirs, ours = pack.compatibility.get(name), here.compatibility.get(name)
        if ABSENT in (theirs, ours):
            if theirs != ours:
                not_compared.append(name)
        elif theirs != ours and name in override:
            overridden.append(name)
        elif theirs != ours:
            refusals.append(
                CompatibilityError(
                    f"{name}-differ" if name.endswith("s") else f"{name}-differs",
                    f"{name}: the pack was made with {show(theirs)}, the destination has {show(ours)}",
                    field=name,
                    expected=show(theirs),
                    found=show(ours),
                    hint=_FIELD_HINTS.get(name),
                )
            )
    lowered = tuple(
        name
        for name in sorted(pack.numerics.keys() | here.numerics.keys())
        if name not in HISTORY and pack.numerics.get(name) != here.numerics.get(name)
    )
    return Comparison(tuple(refusals), lowered, tuple(not_compared), tuple(overridden))
