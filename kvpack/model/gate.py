"""The gate: a cut against a destination, before any byte moves. Fail-closed, and every reason at once.

The order of the checks is the order of the reasons: kinds and encodings that this version does not know, geometry
layer by layer and field by field, identity, position, rows. ``need ⊆ stored`` is the one rule for every kind of plane.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvpack.errors import CompatibilityError
from kvpack.model.geometry import MAX_POSITION, Geometry, LayerGeometry, PlaneKey, Scope, Unit
from kvpack.model.identity import Claim, Identity, compare
from kvpack.model.layout import KNOWN_LAWS
from kvpack.model.planes import needed_rows, semantic_rows
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import CutView

__all__ = ["Destination", "GateReport", "deepest_position", "gate"]


@dataclass(frozen=True)
class Destination:
    """What a destination is: its geometry, its identity, and the most tokens that it can hold (None: no limit).

    ``need`` holds the rows that it needs of planes where that is more than the semantic rows (a rotating ring that
    reads ``window`` rows); ``override`` names compatibility fields whose difference the caller accepts.
    """

    geometry: Geometry
    identity: Identity
    capacity: int | None = None
    need: Mapping[PlaneKey, RowSet] | None = None
    override: frozenset[str] = frozenset()


@dataclass(frozen=True)
class GateReport:
    """The gate's answer. ``refusals`` is empty exactly if the cut may be installed at ``position``.

    ``lowered`` names what made the claim fall; ``notes`` are sentences about what was not compared or not restored.
    """

    position: int
    refusals: tuple[CompatibilityError, ...]
    lowered: tuple[str, ...]
    notes: tuple[str, ...]
    need: Mapping[PlaneKey, RowSet]

    @property
    def claim(self) -> Claim:
        """BITWISE exactly if nothing lowered it."""
        return Claim.COMPATIBLE if self.lowered else Claim.BITWISE

    def require(self) -> None:
        """Raise the first refusal, if there is one."""
        if self.refusals:
            raise self.refusals[0]


def gate(cut: CutView, destination: Destination, *, at: int | None = None) -> GateReport:
    """Hold ``cut`` to ``destination`` for a restore at position ``at`` (the cut's own by default)."""
    position = cut.record.position if at is None else at
    refusals: list[CompatibilityError] = []
    notes: list[str] = []
    lowered: list[str] = []
    try:
        cut.geometry.require_known()
    except CompatibilityError as error:
        refusals.append(error)
    refusals.extend(_law_faults(cut))
    refusals.extend(_geometry_faults(cut.geometry, destination.geometry))
    comparison = compare(cut.identity, destination.identity, override=destination.override)
    refusals.extend(comparison.refusals)
    lowered.extend(comparison.lowered)
    lowered.extend(f"{name} (overridden)" for name in comparison.overridden)
    notes.extend(f"{name}: absent on one side, not compared" for name in comparison.not_compared)
    if cut.geometry.draft_layers and not destination.geometry.draft_layers:
        notes.append("draft: not restored, the destination has no draft layers")
    need: Mapping[PlaneKey, RowSet] = {}
    if not refusals:
        faults = list(_position_faults(cut, destination, position))
        refusals.extend(faults)
        if not faults:
            draft = cut.record.draft_position
            need = dict(needed_rows(destination.geometry, position, draft))
            need |= destination.need or {}
            refusals.extend(_row_faults(cut, need, position))
    if position != cut.record.position:
        lowered.append("position (not a cut of the pack)")
    return GateReport(position, tuple(refusals), tuple(lowered), tuple(notes), need)


def _law_faults(cut: CutView) -> Iterator[CompatibilityError]:
    for at, layout in enumerate(cut.layout.layers):
        if layout.law not in KNOWN_LAWS or layout.law == "history":
            yield CompatibilityError(
                "unknown-law" if layout.law != "history" else "history-not-honoured",
                f"layer {at} was placed by the law {layout.law!r}, which this destination cannot honour",
                layer=at,
                field="law",
                expected=", ".join(law for law in KNOWN_LAWS if law != "history"),
                found=layout.law,
            )


def _geometry_faults(pack: Geometry, here: Geometry) -> Iterator[CompatibilityError]:
    for scope, theirs, ours in (
        (Scope.LAYER, pack.layers, here.layers),
        (Scope.DRAFT, pack.draft_layers, here.draft_layers),
    ):
        if scope is Scope.DRAFT and not ours:
            continue  # said in the notes: a main session is whole without its draft
        if len(theirs) != len(ours):
            yield _differs(f"{scope.value}s", None, None, len(theirs), len(ours))
            continue
        for at, (a, b) in enumerate(zip(theirs, ours, strict=True)):
            yield from _layer_faults(scope.value, at, a, b)
    for name in sorted(pack.ropes.keys() | here.ropes.keys()):
        a_rope, b_rope = pack.ropes.get(name), here.ropes.get(name)
        if a_rope is None or b_rope is None:
            yield _differs(f"ropes.{name}", None, None, a_rope is not None, b_rope is not None)
            continue
        for part in ("theta", "pairing", "dim", "digest"):
            mine, yours = getattr(a_rope, part), getattr(b_rope, part)
            if mine != yours:
                label = "scaling" if part == "digest" else part
                yield _differs(f"ropes.{name}.{label}", None, None, _show(mine), _show(yours))
                break


def _layer_faults(scope: str, at: int, a: LayerGeometry, b: LayerGeometry) -> Iterator[CompatibilityError]:
    for name in ("kind", "window", "sink", "pool", "kv_rank", "rope_dim", "source", "rope"):
        mine, yours = getattr(a, name), getattr(b, name)
        if mine != yours:
            yield _differs(name, at, f"{scope}.{at}", mine, yours)
            return
    roles_a, roles_b = [p.role for p in a.planes], [p.role for p in b.planes]
    if roles_a != roles_b:
        yield _differs("planes", at, f"{scope}.{at}", ", ".join(roles_a), ", ".join(roles_b))
        return
    for p, q in zip(a.planes, b.planes, strict=True):
        for name in ("encoding", "row_shape", "unit", "axes", "rows"):
            mine, yours = getattr(p, name), getattr(q, name)
            if mine != yours:
                yield _differs(name, at, f"{scope}.{at}.{p.role}", _show(mine), _show(yours))
                break


def _show(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()[:16]
    if isinstance(value, tuple):
        return "x".join(str(v) for v in value)
    if isinstance(value, Unit):
        return value.value
    return getattr(value, "name", value)


def _differs(name: str, layer: int | None, where: str | None, mine: object, yours: object) -> CompatibilityError:
    place = f"{where}: " if where else ""
    return CompatibilityError(
        "geometry-differs",
        f"{place}{name} is {mine} in the pack and {yours} in the destination",
        layer=layer,
        plane=where,
        field=name,
        expected=mine,
        found=yours,
    )


def _position_faults(cut: CutView, destination: Destination, position: int) -> Iterator[CompatibilityError]:
    if not 0 <= position <= min(cut.record.position, MAX_POSITION):
        yield CompatibilityError(
            "position-out-of-range",
            f"position {position} was asked for, and the pack holds state up to {cut.record.position}",
            field="position",
            expected=f"0 to {cut.record.position}",
            found=position,
        )
    elif destination.capacity is not None and position > destination.capacity:
        yield CompatibilityError(
            "capacity-too-small",
            f"position {position} does not fit into a destination of {destination.capacity} tokens",
            field="capacity",
            expected=position,
            found=destination.capacity,
            hint="raise --capacity",
        )
    if position != cut.record.position and cut.record.draft_position is not None:
        yield CompatibilityError(
            "draft-away-from-cut",
            f"the draft layers can be restored at position {cut.record.position} only, not at {position}",
            field="position",
            expected=cut.record.position,
            found=position,
        )


def _row_faults(cut: CutView, need: Mapping[PlaneKey, RowSet], position: int) -> Iterator[CompatibilityError]:
    for key, rows in need.items():
        stored = cut.stored.get(key, RowSet())
        at_cut = position == cut.record.position
        if cut.specs[key].unit is Unit.STATE and not at_cut:
            stored = RowSet()
        if not stored.contains(rows):
            what = "a state" if cut.specs[key].unit is Unit.STATE else f"rows {rows}"
            yield CompatibilityError(
                "rows-not-stored",
                f"{key}: a restore at {position} needs {what}, the pack stores {stored}",
                layer=key.layer_or_none,
                plane=str(key),
                field="rows",
                expected=str(rows),
                found=str(stored),
                hint="restore at one of the pack's cuts",
            )


def deepest_position(cut: CutView, upto: int) -> int | None:
    """The deepest position at most ``upto`` at which every plane's semantic rows are stored, or None."""
    if upto >= cut.record.position:
        return cut.record.position
    if cut.record.draft_position is not None:
        return None
    laws: dict[tuple[object, ...], tuple[LayerGeometry, PlaneKey]] = {}
    for key, layer, plane in cut.geometry.planes():
        if plane.unit is Unit.STATE:
            return None
        rule = (layer.kind, layer.window, layer.sink, layer.pool, plane.base_role, cut.stored.get(key))
        laws.setdefault(rule, (layer, key))
    for position in range(upto, -1, -1):
        if all(
            cut.stored.get(key, RowSet()).contains(semantic_rows(layer, cut.specs[key], position))
            for layer, key in laws.values()
        ):
            return position
    return None
