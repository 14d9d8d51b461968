"""Sessions without a model: rows that a seed, a plane's name and a row's number determine, on every platform.

The rule: the bytes of a plane are the extendable output of BLAKE3 over ``kvpack-synth-v1``, a zero byte, the seed
(u64) and the plane's name (``layer.3.k``), row after row from row 0 on. A state's name is followed by a zero byte and
the position at which it stands (u64). In each float the upper bits of the exponent are then set, so that its size lies
in [1/8, 2): every value is finite, and a pack compresses about as well as one of a model. A token id has 15 bits.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Final

from blake3 import blake3

from kvpack.live.sizing import default_layouts
from kvpack.model.encoding import ENCODINGS, AnyEncoding, CompositeEncoding
from kvpack.model.geometry import Geometry, LayerGeometry, PlaneKey, Scope, Unit
from kvpack.model.identity import Identity
from kvpack.model.layout import ProducerLayout
from kvpack.model.planes import TOKENS, PlaneSpec, plane_specs, semantic_rows, tokens_spec
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import CutRecord, CutView, Probe, RowSink
from kvpack.pack import canonical

__all__ = [
    "RULE",
    "SynthCut",
    "SyntheticRows",
    "WithProvenance",
    "appended_rows",
    "provenance_of",
    "seed_of",
    "synthetic_cuts",
]

RULE: Final = "kvpack-synth-v1"
_SEED: Final = "synth_seed"
_RULE: Final = "synth_rule"

# An element, little-endian: the bits that stay random (sign, two bits of the exponent, mantissa), and those that are
# set.
_FLOATS: Final[Mapping[str, tuple[bytes, bytes]]] = {
    "f16": (b"\xff\x8f", b"\x00\x30"),
    "bf16": (b"\xff\x81", b"\x00\x3e"),
    "f32": (b"\xff\xff\xff\x81", b"\x00\x00\x00\x3e"),
    "f64": (b"\xff\xff\xff\xff\xff\xff\x3f\x80", b"\x00\x00\x00\x00\x00\x00\xc0\x3f"),
    "f8_e4m3": (b"\x9f", b"\x20"),
    "f8_e5m2": (b"\x8f", b"\x30"),
}
# The scale and the minimum of a block are f16; everything else in it is any bits.
_BLOCK_FLOATS: Final = ("d", "m")
_TOKEN: Final = (b"\xff\x7f\x00\x00", bytes(4))
_PASS_BYTES: Final = 4096


def seed_of(provenance: Mapping[str, str]) -> int | None:
    """The seed of a pack that this rule made, or None."""
    seed = provenance.get(_SEED, "")
    return int(seed) if provenance.get(_RULE) == RULE and seed.isascii() and seed.isdigit() and len(seed) < 21 else None


def provenance_of(seed: int, model: str) -> dict[str, str]:
    """What a synthetic pack says about where it comes from."""
    return {"model": model, _RULE: RULE, _SEED: str(seed)}


def _pattern(encoding: AnyEncoding) -> tuple[bytes, bytes]:
    """The bits that stay and those that are set, for one block of an encoding (for a composite, one row)."""
    if isinstance(encoding, CompositeEncoding):
        parts = [(entry.field_bytes, *_pattern(entry.encoding)) for entry in encoding.fields]
        keep = b"".join(keep * (size // len(keep)) for size, keep, _ in parts)
        return keep, b"".join(bits * (size // len(bits)) for size, _, bits in parts)
    if encoding.name in _FLOATS:
        return _FLOATS[encoding.name]
    fields = [
        _FLOATS["f16"] if name in _BLOCK_FLOATS and size == 2 else (b"\xff" * size, bytes(size))
        for name, size in ENCODINGS[encoding.name].fields
    ]
    return b"".join(keep for keep, _ in fields), b"".join(bits for _, bits in fields)


@lru_cache(maxsize=64)
def _masks(encoding: AnyEncoding, is_token: bool, at: int) -> tuple[bytes, bytes]:
    """The pattern from byte ``at`` of a plane on, repeated to some thousand bytes."""
    keep, bits = _TOKEN if is_token else _pattern(encoding)
    phase, times = at % len(keep), max(1, _PASS_BYTES // len(keep))
    return (keep[phase:] + keep[:phase]) * times, (bits[phase:] + bits[:phase]) * times


@dataclass(frozen=True)
class SyntheticRows:
    """The rule for one seed (0 to 2⁶⁴ - 1). It holds nothing, and may be asked from several threads."""

    seed: int

    def rows(self, spec: PlaneSpec, first: int, end: int, position: int) -> memoryview:
        """Rows ``[first, end)`` of a plane; of a state that stands at ``position`` its bytes ``[first, end)``."""
        import numpy as np

        name = RULE.encode() + b"\0" + struct.pack("<Q", self.seed) + str(spec.key).encode()
        if spec.unit is Unit.STATE:
            name += b"\0" + struct.pack("<Q", position)
        size = spec.axis_bytes
        content = blake3(name).digest((end - first) * size, seek=first * size)
        # Rows are whole blocks; only a state is read from a byte within one.
        at = first if spec.unit is Unit.STATE else 0
        mask, added = (np.frombuffer(part, np.uint8) for part in _masks(spec.encoding, spec.key == TOKENS, at))
        found = np.frombuffer(bytearray(content), np.uint8)
        whole = found[: found.size // mask.size * mask.size].reshape(-1, mask.size)
        rest = found[whole.size :]
        for part, width in ((whole, mask.size), (rest, rest.size)):
            part &= mask[:width]
            part |= added[:width]
        return found.data

    def tokens(self, first: int, end: int) -> list[int]:
        """Token ids ``[first, end)``."""
        return self.rows(tokens_spec(), first, end, 0).cast("i").tolist()


def _held(layer: LayerGeometry, spec: PlaneSpec, position: int) -> RowSet:
    """The rows that a cache of the usual layout holds: of a window one more than the cut means."""
    if layer.kind in ("sliding", "hybrid") and layer.window is not None and spec.unit is Unit.TOKEN:
        return RowSet.of((0, min(position, layer.sink or 0)), (max(0, position - layer.window), position))
    return semantic_rows(layer, spec, position)


@dataclass(frozen=True)
class SynthCut:
    """A cut at ``position`` whose rows are made when they are asked for: a :class:`~kvpack.model.snapshot.CutView`."""

    geometry: Geometry
    position: int
    source: SyntheticRows
    provenance: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def identity(self) -> Identity:
        """The identity of the rule and the geometry; the seed is the session, not the model."""
        scalar = next((plane.encoding.to_wire() for _, _, plane in self.geometry.planes()), "none")
        return Identity(
            {
                "adapters": "none",
                "architecture": "synthetic",
                "config": blake3(canonical.encode(self.geometry.to_wire())).digest(),
                "inputs": "tokens",
                "scalar": scalar if isinstance(scalar, str) else "composite",
                "template": "absent",
                "tokenizer": "absent",
                "weights": blake3(RULE.encode()).digest(),
            },
            {"engine": RULE},
        )

    @cached_property
    def layout(self) -> ProducerLayout:
        """That of a cache which just holds the session."""
        return default_layouts(self.geometry, max(1, self.position))

    @cached_property
    def record(self) -> CutRecord:
        """The cut; its draft layers stand at the same position."""
        draft = self.position if self.geometry.draft_layers else None
        return CutRecord(self.position, tokens=self.position, draft_position=draft)

    @cached_property
    def specs(self) -> Mapping[PlaneKey, PlaneSpec]:
        """Plane key to spec, in canonical order."""
        specs = plane_specs(self.geometry)
        return {**specs, TOKENS: tokens_spec()} if self.position else specs

    @cached_property
    def stored(self) -> Mapping[PlaneKey, RowSet]:
        """Plane key to the rows that can be made."""
        rows = {key: _held(layer, self.specs[key], self.position) for key, layer, _ in self.geometry.planes()}
        return {**rows, TOKENS: RowSet.of((0, self.position))} if self.position else rows

    @property
    def probe(self) -> Probe | None:
        """Nothing follows."""
        return None

    def rows(self, key: PlaneKey, first: int, end: int) -> memoryview:
        """Rows ``[first, end)``, made now."""
        return self.source.rows(self.specs[key], first, end, self.position)

    def read_rows(self, wanted: Mapping[PlaneKey, RowSet], sink: RowSink) -> None:
        """Hand the wanted rows to ``sink``."""
        for key, rows in wanted.items():
            for first, end in rows:
                sink(key, first, end - first, self.rows(key, first, end))


def appended_rows(
    source: SyntheticRows, specs: Mapping[PlaneKey, PlaneSpec], geometry: Geometry, scope: Scope, start: int, count: int
) -> dict[PlaneKey, memoryview]:
    """What an append of ``count`` tokens at ``start`` brings: rows, the keys of pools that fill up, and new states."""
    pools = {key: layer.pool or 1 for key, layer, plane in geometry.planes() if plane.unit is Unit.POOL}
    found: dict[PlaneKey, memoryview] = {}
    for key, spec in specs.items():
        if key.scope != scope.value or spec.unit is Unit.FIXED:
            continue
        first, end = (0, spec.row_bytes) if spec.unit is Unit.STATE else (start, start + count)
        if spec.unit is Unit.POOL:
            first, end = start // pools[key], (start + count) // pools[key]
        found[key] = source.rows(spec, first, end, start + count)
    return found


class WithProvenance:
    """A cut as it is, with another provenance: a live cache does not know where its rows once came from."""

    def __init__(self, cut: CutView, provenance: Mapping[str, str]) -> None:
        self._cut = cut
        self.provenance = provenance
        self.geometry, self.identity, self.layout = cut.geometry, cut.identity, cut.layout
        self.record, self.specs, self.stored = cut.record, cut.specs, cut.stored
        self.probe = cut.probe

    def rows(self, key: PlaneKey, first: int, end: int) -> memoryview:
        """The cut's own rows."""
        return self._cut.rows(key, first, end)

    def read_rows(self, wanted: Mapping[PlaneKey, RowSet], sink: RowSink) -> None:
        """The cut's own rows."""
        self._cut.read_rows(wanted, sink)


def synthetic_cuts(geometry: Geometry, positions: Sequence[int], seed: int, model: str) -> tuple[SynthCut, ...]:
    """One session's cuts at ascending positions."""
    source = SyntheticRows(seed)
    return tuple(SynthCut(geometry, position, source, provenance_of(seed, model)) for position in positions)
