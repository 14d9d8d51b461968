"""At which positions a pack, with its parents, can be restored: the rule ``need ⊆ stored`` of the gate, precomputed.

At its cuts a pack restores by construction. Elsewhere it does where every plane's rows are stored: full planes at any
row, a ring that has not wrapped, pool keys at whole pools. States and draft layers exist at cuts only. Of a sliding
plane ``window`` rows are asked for, one more than a position means, so that a destination that rotates takes it too.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvpack.model.geometry import Geometry, LayerGeometry, PlaneKey, Unit
from kvpack.model.planes import PlaneSpec, semantic_rows
from kvpack.model.ranges import RowSet

__all__ = ["RestorablePositions"]


class RestorablePositions:
    """Positions between cuts; ``stored`` holds the rows of the pack and its parents together."""

    def __init__(
        self, geometry: Geometry, specs: Mapping[PlaneKey, PlaneSpec], stored: Mapping[PlaneKey, RowSet]
    ) -> None:
        """Planes that obey the same rule over the same rows are looked at once."""
        rules: dict[tuple[object, ...], tuple[LayerGeometry, PlaneSpec, RowSet]] = {}
        self.between_cuts = not geometry.draft_layers
        for key, layer, plane in geometry.planes():
            if plane.unit is Unit.STATE:
                self.between_cuts = False
            rows = stored.get(key, RowSet())
            rule = (layer.window, layer.sink, layer.pool, plane.base_role, plane.unit, rows)
            rules.setdefault(rule, (layer, specs[key], rows))
        self._rules = tuple(rules.values())

    def at(self, position: int) -> bool:
        """Whether ``position``, which is no cut, can be restored."""
        return self.between_cuts and all(
            rows.contains(_needed(layer, spec, position)) for layer, spec, rows in self._rules
        )

    def deepest(self, upto: int, above: int) -> int | None:
        """The deepest restorable position in ``(above, upto]``, or None."""
        return next((position for position in range(upto, above, -1) if self.at(position)), None)


def _needed(layer: LayerGeometry, spec: PlaneSpec, position: int) -> RowSet:
    rows = semantic_rows(layer, spec, position)
    if layer.window is None or spec.unit is not Unit.TOKEN:
        return rows
    return RowSet.union_of((rows, RowSet.of((max(0, position - layer.window), position))))
