"""From cuts to a manifest and a row source: one cut, several cuts of one session, or a delta against a parent.

What a pack of several cuts stores of a plane is the union of what the cuts hold; what a delta leaves out are rows of
growing planes that a cut of its parent has. Sliding tails, states and fixed rows are never subtracted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from blake3 import blake3

from kvpack.errors import CompatibilityError, UsageError
from kvpack.model.geometry import PlaneKey, Scope, Unit
from kvpack.model.planes import TOKENS, PlaneSpec
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import CutRecord, CutView
from kvpack.pack.manifest import Manifest, Parent, StoredPlane
from kvpack.pack.view import PackCut

__all__ = ["CutRows", "compose", "require_continuation"]


class CutRows:
    """The rows of several cuts of one session as a writer's source: each row from the first cut that holds it."""

    def __init__(self, cuts: Sequence[CutView]) -> None:
        """``cuts`` in ascending order of position."""
        self._cuts = tuple(cuts)

    def rows(self, key: PlaneKey, ordinal: int, first: int, end: int) -> memoryview:
        """Rows ``[first, end)``, or bytes of state ``ordinal`` (see :class:`~kvpack.pack.writer.RowSource`)."""
        spec = next(cut.specs[key] for cut in self._cuts if key in cut.specs)
        if spec.unit is Unit.STATE:
            return [cut for cut in self._cuts if key in cut.specs][ordinal].rows(key, first, end)
        wanted = RowSet.of((first, end))
        for cut in reversed(self._cuts):
            if key in cut.specs and any(a <= first and end <= b for a, b in cut.stored[key]):
                return cut.rows(key, first, end)
        packed = memoryview(bytearray((end - first) * spec.row_bytes))
        for cut in self._cuts:
            held = cut.stored.get(key, RowSet()).intersection(wanted) if key in cut.specs else RowSet()
            for a, b in held:
                packed[(a - first) * spec.row_bytes : (b - first) * spec.row_bytes] = cut.rows(key, a, b)
            wanted = wanted.minus(held)
        if wanted:
            raise CompatibilityError("rows-not-stored", f"{key}: no cut holds rows {wanted}", plane=str(key))
        return packed


def compose(
    cuts: Sequence[CutView],
    *,
    created: int,
    producer: tuple[str, str],
    salt: bytes,
    parent: Parent | None = None,
    epoch: int = 0,
    expires: int | None = None,
    stream: str | None = None,
) -> Manifest:
    """The manifest of a pack of ``cuts`` (ascending positions, one session); hashes and state ids are still to come.

    Raises UsageError ``no-cuts``, CompatibilityError ``cuts-differ`` (geometry, identity, tokens, order),
    ``parent-too-deep``.
    """
    if not cuts:
        raise UsageError("no-cuts", "a pack has at least one cut")
    last = cuts[-1]
    for earlier, later in pairwise(cuts):
        _require_same_session(earlier, later)
    if parent is not None and parent.position > cuts[0].record.position:
        raise CompatibilityError(
            "parent-too-deep",
            f"the parent's cut at {parent.position} lies behind the first cut at {cuts[0].record.position}",
            field="parent",
            expected=f"at most {cuts[0].record.position}",
            found=parent.position,
        )
    specs: dict[PlaneKey, PlaneSpec] = {key: spec for key, spec in last.specs.items() if key.scope != "session"}
    session = {key: spec for cut in cuts for key, spec in cut.specs.items() if key.scope == Scope.SESSION.value}
    specs |= {key: session[key] for key in sorted(session, key=lambda k: k.role)}
    layers = {key: layer for key, layer, _ in last.geometry.planes()}
    planes = []
    for key, spec in specs.items():
        layer = layers.get(key)
        window = layer is not None and layer.window is not None
        pool = layer.pool or 1 if layer is not None and spec.unit is Unit.POOL else 1
        rows = _stored(key, spec, cuts, None if window else parent, pool)
        planes.append(StoredPlane(spec, rows, window, pool))
    return Manifest(
        geometry=last.geometry,
        identity=last.identity,
        layout=last.layout,
        cuts=tuple(_record(cut, cuts) for cut in cuts),
        planes=tuple(planes),
        created=created,
        producer=producer,
        salt=salt,
        epoch=epoch,
        expires=expires,
        stream=stream,
        parent=parent,
        probe=next((cut.probe for cut in reversed(cuts) if cut.probe is not None), None),
        provenance=_provenance(cuts),
    )


def _stored(key: PlaneKey, spec: PlaneSpec, cuts: Sequence[CutView], parent: Parent | None, pool: int) -> RowSet:
    if spec.unit is Unit.STATE:
        return RowSet.of((0, sum(key in cut.specs for cut in cuts)))
    held = RowSet.union_of(cut.stored[key] for cut in cuts if key in cut.specs)
    if parent is None or spec.unit is Unit.FIXED or spec.base_role == "index_tail" or key.scope == Scope.DRAFT.value:
        return held
    return held.minus(RowSet.of((0, parent.position // pool)))


def _record(cut: CutView, cuts: Sequence[CutView]) -> CutRecord:
    if cut.record.tokens or not any(other.record.tokens for other in cuts):
        return cut.record
    return replace(cut.record, tokens=cut.record.position)


def _provenance(cuts: Sequence[CutView]) -> Mapping[str, str]:
    merged: dict[str, str] = {}
    for cut in cuts:
        merged |= cut.provenance
    return merged


def _require_same_session(earlier: CutView, later: CutView) -> None:
    for name, mine, theirs in (
        ("position", earlier.record.position < later.record.position, True),
        ("geometry", earlier.geometry, later.geometry),
        ("identity", earlier.identity.compatibility, later.identity.compatibility),
    ):
        if mine != theirs:
            raise CompatibilityError(
                "cuts-differ",
                f"the cuts at {earlier.record.position} and {later.record.position} are not of one session: {name}",
                field=name,
            )
    if TOKENS in earlier.specs and TOKENS in later.specs:
        shared = earlier.stored[TOKENS].intersection(later.stored[TOKENS])
        for first, end in shared:
            if bytes(earlier.rows(TOKENS, first, end)) != bytes(later.rows(TOKENS, first, end)):
                raise CompatibilityError(
                    "cuts-differ",
                    f"the tokens of the cuts at {earlier.record.position} and {later.record.position} differ",
                    field="tokens",
                )


def require_continuation(cut: CutView, parent: PackCut) -> None:
    """Hold ``cut`` to the cut that a delta would continue: the same session up to the parent's position.

    Growing planes are compared by the hashes that the parent's index holds, without reading its payload; tokens by
    value. Raises CompatibilityError ``not-a-continuation``.
    """
    position = parent.record.position
    for name, mine, theirs in (
        ("geometry", cut.geometry, parent.geometry),
        ("identity", cut.identity.compatibility, parent.identity.compatibility),
    ):
        if mine != theirs:
            raise _not_a_continuation(position, name, None)
    if TOKENS in cut.specs and TOKENS in parent.specs:
        count = min(parent.record.tokens, position)
        if bytes(cut.rows(TOKENS, 0, count)) != bytes(parent.rows(TOKENS, 0, count)):
            raise _not_a_continuation(position, "tokens", None)
    layers = {key: layer for key, layer, _ in cut.geometry.planes()}
    for key, spec in cut.specs.items():
        layer = layers.get(key)
        if layer is None or layer.window is not None or spec.unit not in (Unit.TOKEN, Unit.POOL):
            continue
        for first, end, digest in parent.known_pieces(key):
            if any(a <= first and end <= b for a, b in cut.stored[key]) and (
                blake3(cut.rows(key, first, end)).digest() != digest
            ):
                raise _not_a_continuation(position, f"rows [{first}, {end})", key)


def _not_a_continuation(position: int, what: str, key: PlaneKey | None) -> CompatibilityError:
    where = f"{key}: " if key is not None else ""
    return CompatibilityError(
        "not-a-continuation",
        f"{where}the session is not the parent's up to {position}: {what} differ",
        layer=key.layer_or_none if key is not None else None,
        plane=str(key) if key is not None else None,
        field=what,
    )
