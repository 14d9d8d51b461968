"""The static contract of a cache: layers, kinds, planes, shapes, encodings, windows, sharing, positions.

Source of the rules: spec/kvpack-v1.md, sections 7.1 and 8. Two sessions can exchange state only if their
geometries are equal; equal byte counts are not equality (``(4 heads, 4 dims)`` is not ``(2 heads, 8 dims)``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod
from types import MappingProxyType
from typing import Final

from kvpack.errors import CompatibilityError, FormatError
from kvpack.model.encoding import AnyEncoding, CompositeEncoding, encoding_from_wire, unknown_part
from kvpack.model.wire import WireMap, bad_manifest

__all__ = [
    "KNOWN_KINDS",
    "MAX_POSITION",
    "Geometry",
    "LayerGeometry",
    "PlaneGeometry",
    "PlaneKey",
    "Rope",
    "Scope",
    "Unit",
    "plane_shape",
]

MAX_POSITION: Final = (1 << 31) - 1
MAX_RANK: Final = 8
MAX_DIM: Final = (1 << 31) - 1
KNOWN_KINDS: Final = ("full", "sliding", "latent", "recurrent", "hybrid", "compressed", "shared", "none", "cross")
# The roles of a compressed layer behind its keys: the first is required, and each may occur once an entry list.
_COMPRESSED: Final = ("entry", "tail_kv", "tail_gate", "overlap_kv", "overlap_gate")
_POOL_ROLES: Final = ("index_key", "entry")
_STATE_ROLES: Final = ("conv", "ssm", "overlap_kv", "overlap_gate")


class Unit(Enum):
    """What one row of a plane stands for."""

    TOKEN = "token"
    POOL = "pool"
    STATE = "state"
    FIXED = "fixed"


class Scope(Enum):
    """Whose plane it is: the model's layers, the draft model's, or the session's own extras."""

    LAYER = "layer"
    DRAFT = "draft"
    SESSION = "session"


@dataclass(frozen=True, order=True)
class PlaneKey:
    """Names one plane: ``layer.3.k``, ``draft.0.v``, ``session.tokens``. ``layer`` is -1 in the session scope."""

    scope: str
    layer: int
    role: str

    def __str__(self) -> str:
        if self.scope == Scope.SESSION.value:
            return f"session.{self.role}"
        return f"{self.scope}.{self.layer}.{self.role}"

    @property
    def layer_or_none(self) -> int | None:
        """The layer number as errors and JSON carry it."""
        return None if self.scope == Scope.SESSION.value else self.layer


@dataclass(frozen=True)
class PlaneGeometry:
    """One plane of a layer: ``row_shape`` elements of ``encoding`` a row, token-major (``[num_kv_heads, head_dim]``).

    ``axes`` names the axes of a state's shape; ``rows`` is the fixed number of rows of a ``FIXED`` plane.
    Round trip: ``from_wire(to_wire(p)) == p``.
    """

    role: str
    encoding: AnyEncoding
    row_shape: tuple[int, ...]
    unit: Unit = Unit.TOKEN
    axes: tuple[str, ...] = ()
    rows: int | None = None

    @property
    def base_role(self) -> str:
        """The role without its suffix: ``conv`` of ``conv.1``."""
        return self.role.partition(".")[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (of one whole state for ``STATE``)."""
        return self.encoding.row_bytes(self.row_shape)

    @property
    def row_elements(self) -> int:
        """Elements of one row."""
        return prod(self.row_shape)

    def to_wire(self) -> dict[str, object]:
        """The plane as the manifest's geometry holds it."""
        wire: dict[str, object] = {
            "encoding": self.encoding.to_wire(),
            "role": self.role,
            "row_shape": list(self.row_shape),
            "unit": self.unit.value,
        }
        if self.axes:
            wire["axes"] = list(self.axes)
        if self.rows is not None:
            wire["rows"] = self.rows
        return wire

    @classmethod
    def from_wire(cls, wire: WireMap) -> PlaneGeometry:
        """Read one plane; raises FormatError with the field's path."""
        plane = replace(
            plane_shape(wire),
            axes=wire.strings("axes", most_entries=MAX_RANK) if wire.has("axes") else (),
            rows=wire.opt_uint("rows", most=MAX_POSITION),
        )
        if plane.axes and len(plane.axes) != len(plane.row_shape):
            raise bad_manifest(wire.path("axes"), "must name every axis of row_shape")
        if (plane.rows is not None) != (plane.unit is Unit.FIXED):
            raise bad_manifest(wire.path("rows"), "is present exactly for the unit fixed")
        wire.done()
        return plane


def plane_shape(wire: WireMap) -> PlaneGeometry:
    """The part that a plane of the geometry and a plane record share: role, encoding, row shape, unit."""
    return PlaneGeometry(
        role=wire.name("role"),
        encoding=_encoding(wire, "encoding"),
        row_shape=wire.uints("row_shape", most_entries=MAX_RANK, least=1, most=MAX_DIM),
        unit=_unit(wire, "unit"),
    )


def _encoding(wire: WireMap, key: str) -> AnyEncoding:
    try:
        return encoding_from_wire(wire.get(key))
    except FormatError as error:
        raise bad_manifest(wire.path(key), error.message, found=error.found) from None


def _unit(wire: WireMap, key: str) -> Unit:
    value = wire.string(key)
    try:
        return Unit(value)
    except ValueError:
        raise bad_manifest(
            wire.path(key), "is not a unit", expected=", ".join(u.value for u in Unit), found=value
        ) from None


@dataclass(frozen=True)
class LayerGeometry:
    """One layer: its kind, its planes in canonical order, and what the kind adds.

    ``window`` and ``sink`` belong to ``sliding``, ``pool``, ``kv_rank`` and ``rope_dim`` to ``latent``, ``source`` to
    ``shared``; ``hybrid`` (attention and states side by side) may have a ``window``, ``compressed`` (sliding keys that
    are their own values, and entries of ``pool`` tokens each) has both ``window`` and ``pool``. ``rope`` names an entry
    of the geometry's ``ropes``; None means that rows carry no rotation.
    Round trip: ``from_wire(to_wire(x)) == x``.
    """

    kind: str
    planes: tuple[PlaneGeometry, ...]
    window: int | None = None
    sink: int | None = None
    pool: int | None = None
    kv_rank: int | None = None
    rope_dim: int | None = None
    source: int | None = None
    rope: str | None = None

    _NUMBERS = ("window", "sink", "pool", "kv_rank", "rope_dim", "source")

    def to_wire(self) -> dict[str, object]:
        """The layer as the manifest holds it."""
        wire: dict[str, object] = {"kind": self.kind, "planes": [p.to_wire() for p in self.planes]}
        for name in self._NUMBERS:
            value = getattr(self, name)
            if value is not None:
                wire[name] = value
        if self.rope is not None:
            wire["rope"] = self.rope
        return wire

    @classmethod
    def from_wire(cls, wire: WireMap) -> LayerGeometry:
        """Read one layer and hold it to the rules of its kind."""
        layer = cls(
            kind=wire.name("kind"),
            planes=tuple(PlaneGeometry.from_wire(p) for p in wire.maps("planes", most=256)),
            window=wire.opt_uint("window", least=1, most=MAX_POSITION),
            sink=wire.opt_uint("sink", least=1, most=MAX_POSITION),
            pool=wire.opt_uint("pool", least=1, most=MAX_POSITION),
            kv_rank=wire.opt_uint("kv_rank", least=1, most=MAX_DIM),
            rope_dim=wire.opt_uint("rope_dim", most=MAX_DIM),
            source=wire.opt_uint("source", most=65535),
            rope=wire.opt_string("rope"),
        )
        if layer.kind in KNOWN_KINDS:  # a kind of a newer version may have keys of its own
            wire.done()
        fault = layer.fault()
        if fault is not None:
            key, message = fault
            raise bad_manifest(wire.path(key), message)
        return layer

    def fault(self) -> tuple[str, str] | None:
        """The first broken rule of this layer's kind as (field, reason), or None. Unknown kinds have no rules."""
        roles = [p.role for p in self.planes]
        if len(set(roles)) != len(roles):
            return "planes", "a role occurs twice"
        if self.kind not in KNOWN_KINDS:
            return None
        owned = {
            "sliding": ("window", "sink"),
            "latent": ("pool", "kv_rank", "rope_dim"),
            "hybrid": ("window",),
            "compressed": ("window", "pool"),
            "shared": ("source",),
        }.get(self.kind, ())
        optional = {"sliding": ("sink",), "latent": ("pool",), "hybrid": ("window",)}.get(self.kind, ())
        for name in self._NUMBERS:
            if getattr(self, name) is not None and name not in owned:
                return name, f"does not belong to the kind {self.kind}"
        for name in owned:
            if getattr(self, name) is None and name not in optional:
                return name, f"is missing in a layer of the kind {self.kind}"
        return self._plane_fault()

    def _plane_fault(self) -> tuple[str, str] | None:
        leading = [p for p in self.planes if p.base_role != "scale"]
        if self.planes[: len(leading)] != tuple(leading):
            return "planes", "scale planes come last"
        roles = tuple(p.base_role for p in leading)
        wanted: tuple[str, ...]
        if self.kind in ("full", "sliding", "cross"):
            wanted = ("k", "v")
        elif self.kind == "latent":
            wanted = ("latent",)
            if self.pool is not None:
                wanted += ("index_key",) if self.pool == 1 else ("index_key", "index_tail")
        elif self.kind == "recurrent":
            wanted = _states(roles)
        elif self.kind == "hybrid":
            wanted = ("k", "v", *_states(roles[2:]))
        elif self.kind == "compressed":
            found = tuple(role for name in _COMPRESSED for role in roles if role == name)
            wanted = ("k", *(found if "entry" in found else _COMPRESSED[:1]))
        else:
            wanted = ()
        if roles != wanted:
            return "planes", f"a layer of the kind {self.kind} has the planes {', '.join(wanted) or 'none'}"
        if self.kind == "latent" and not isinstance(self.planes[0].encoding, CompositeEncoding):
            width = (self.kv_rank or 0) + (self.rope_dim or 0)
            if self.planes[0].row_shape != (width,):
                return "planes", f"the latent row has kv_rank + rope_dim = {width} elements"
        for plane in self.planes:
            if len(set(plane.axes)) != len(plane.axes):
                return "planes", f"plane {plane.role} names an axis twice"
            unit = self._unit_of(plane)
            if unit is not None and plane.unit is not unit:
                return "planes", f"plane {plane.role} has the unit {unit.value}"
        return None

    def _unit_of(self, plane: PlaneGeometry) -> Unit | None:
        if plane.base_role == "scale":
            return None
        if self.kind == "cross":
            return Unit.FIXED
        if plane.base_role in _STATE_ROLES:
            return Unit.STATE
        return Unit.POOL if plane.base_role in _POOL_ROLES else Unit.TOKEN


def _states(roles: tuple[str, ...]) -> tuple[str, ...]:
    """The order of state planes: every conv, then every ssm; at least one."""
    convs = sum(role == "conv" for role in roles)
    return ("conv",) * convs + ("ssm",) * (len(roles) - convs) if roles else ("conv", "ssm")


@dataclass(frozen=True)
class Rope:
    """One rotation: which dims are turned, how they pair, and the frequencies in effect.

    ``digest`` is BLAKE3 of the effective inverse frequencies (float32, little-endian) and the attention scaling
    (float64). Round trip: ``from_wire(to_wire(r)) == r``.
    """

    dim: int
    pairing: str
    theta: float
    digest: bytes

    def to_wire(self) -> dict[str, object]:
        """The rotation as the manifest holds it."""
        return {"digest": self.digest, "dim": self.dim, "pairing": self.pairing, "theta": self.theta}

    @classmethod
    def from_wire(cls, wire: WireMap) -> Rope:
        """Read one rotation."""
        rope = cls(
            dim=wire.uint("dim", least=1, most=MAX_DIM),
            pairing=wire.string("pairing"),
            theta=wire.float64("theta"),
            digest=wire.hash("digest"),
        )
        if rope.pairing not in ("half", "interleaved"):
            raise bad_manifest(
                wire.path("pairing"), "is not a pairing", expected="half, interleaved", found=rope.pairing
            )
        wire.done()
        return rope


@dataclass(frozen=True)
class Geometry:
    """Every layer of the model, of the draft model where there is one, and the rotations they name.

    Round trip: ``from_wire(to_wire(g)) == g``.
    """

    layers: tuple[LayerGeometry, ...]
    draft_layers: tuple[LayerGeometry, ...] = ()
    ropes: Mapping[str, Rope] = field(default_factory=dict)

    def to_wire(self) -> dict[str, object]:
        """The geometry as the manifest holds it."""
        wire: dict[str, object] = {"layers": [layer.to_wire() for layer in self.layers]}
        if self.draft_layers:
            wire["draft_layers"] = [layer.to_wire() for layer in self.draft_layers]
        if self.ropes:
            wire["ropes"] = {name: rope.to_wire() for name, rope in self.ropes.items()}
        return wire

    @classmethod
    def from_wire(cls, wire: WireMap) -> Geometry:
        """Read a geometry and hold its references together."""
        ropes: dict[str, Rope] = {}
        if wire.has("ropes"):
            table = wire.map("ropes")
            ropes = {name: Rope.from_wire(table.map(name)) for name in table.names()}
        geometry = cls(
            layers=tuple(LayerGeometry.from_wire(layer) for layer in wire.maps("layers")),
            draft_layers=(
                tuple(LayerGeometry.from_wire(layer) for layer in wire.maps("draft_layers"))
                if wire.has("draft_layers")
                else ()
            ),
            ropes=MappingProxyType(ropes),
        )
        for list_name, layers in (("layers", geometry.layers), ("draft_layers", geometry.draft_layers)):
            for at, layer in enumerate(layers):
                path = wire.path(f"{list_name}[{at}]")
                if layer.source is not None and (layer.source >= at or layers[layer.source].kind == "shared"):
                    raise bad_manifest(
                        f"{path}.source",
                        "must name an earlier layer that owns its planes",
                        found=layer.source,
                    )
                if layer.rope is not None and layer.rope not in ropes:
                    raise bad_manifest(f"{path}.rope", "is not in ropes", found=layer.rope)
        wire.done()
        return geometry

    def planes(self) -> Iterator[tuple[PlaneKey, LayerGeometry, PlaneGeometry]]:
        """Every plane of the layers and draft layers, in canonical order."""
        for scope, layers in ((Scope.LAYER, self.layers), (Scope.DRAFT, self.draft_layers)):
            for at, layer in enumerate(layers):
                for plane in layer.planes:
                    yield PlaneKey(scope.value, at, plane.role), layer, plane

    def require_known(self) -> None:
        """Refuse, by name, kinds and encodings that this version cannot place (CompatibilityError)."""
        for scope, layers in ((Scope.LAYER, self.layers), (Scope.DRAFT, self.draft_layers)):
            for at, layer in enumerate(layers):
                if layer.kind not in KNOWN_KINDS:
                    raise CompatibilityError(
                        "unknown-kind",
                        f"{scope.value} {at} has the kind {layer.kind!r}, which this version cannot install",
                        layer=at,
                        field="kind",
                        expected=", ".join(KNOWN_KINDS),
                        found=layer.kind,
                    )
        for key, _, plane in self.planes():
            name = unknown_part(plane.encoding)
            if name is not None:
                raise CompatibilityError(
                    "unknown-encoding",
                    f"{key} has the encoding {name!r}, which this version cannot install",
                    layer=key.layer_or_none,
                    plane=str(key),
                    field="encoding",
                    found=name,
                )
