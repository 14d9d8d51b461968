"""A pack's planes drawn small: which layers there are, what each kind holds of the session, and what it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from kvpack.api import Inspection
from kvpack.model.encoding import CompositeEncoding
from kvpack.model.geometry import LayerGeometry, PlaneKey, Scope, Unit
from kvpack.model.planes import PlaneSpec
from kvpack.model.ranges import RowSet
from kvpack.pack.index import CODEC_NAMES
from kvpack.pack.manifest import StoredPlane
from kvpack_cli.output import bytes_text, count_text, printable, ratio_text

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["kind_text", "layer_table", "new_table", "plane_table", "shape_text", "strip", "tile_table"]

GLYPHS: Mapping[str, str] = {
    "full": "F",
    "sliding": "S",
    "latent": "L",
    "recurrent": "R",
    "hybrid": "H",
    "compressed": "C",
    "none": "-",
    "shared": "=",
    "cross": "X",
}
BAR_CELLS = 8
STRIP_CELLS = 60
_NUMBERS = ("rows", "raw", "stored", "ratio", "tiles", "offset")


def glyph(layer: LayerGeometry) -> str:
    """One letter for a layer's kind; ``?`` for a kind that this version does not know."""
    return GLYPHS.get(layer.kind, "?")


def strip(inspection: Inspection) -> list[str]:
    """One letter a layer, 60 in a line: ``SSSSSFSSSSSF``."""
    geometry = inspection.manifest.geometry
    letters = "".join(glyph(layer) for layer in geometry.layers)
    lines = [letters[at : at + STRIP_CELLS] for at in range(0, len(letters), STRIP_CELLS)]
    if geometry.draft_layers:
        lines.append("".join(glyph(layer) for layer in geometry.draft_layers) + " (draft)")
    return lines


def shape_text(spec: PlaneSpec) -> str:
    """A row's shape as heads x dim: ``3x64``; a composite row has none."""
    return "x".join(str(size) for size in spec.row_shape) or "1"


def encoding_text(spec: PlaneSpec) -> str:
    """Shape and encoding; of a composite row only its bytes, since its fields take more than a line."""
    if isinstance(spec.encoding, CompositeEncoding):
        return f"composite {spec.row_bytes} B"
    return f"{shape_text(spec)} {spec.encoding.name}"


def kind_text(layer: LayerGeometry) -> str:
    """The kind and the number that belongs to it."""
    parts = [printable(layer.kind)]
    if layer.window is not None:
        parts.append(str(layer.window) + (f"+{layer.sink}" if layer.sink else ""))
    if layer.pool is not None:
        parts.append(f"pool {layer.pool}")
    if layer.source is not None:
        parts.append(f"of {layer.source}")
    return " ".join(parts)


def bar(plane: StoredPlane, position: int) -> str:
    """Which eighths of ``[0, position)`` a plane holds: ``█`` whole, ``▒`` in part, ``·`` not at all."""
    if plane.spec.unit in (Unit.STATE, Unit.FIXED):
        return ""
    length = position // plane.tokens_per_row
    cells = []
    for cell in range(BAR_CELLS if length else 0):
        wanted = RowSet.of((cell * length // BAR_CELLS, max((cell + 1) * length // BAR_CELLS, 1)))
        held = plane.rows.intersection(wanted).count
        cells.append("█" if held == wanted.count else "▒" if held else "·")
    return "".join(cells)


def rows_text(plane: StoredPlane) -> str:
    """How many rows a plane holds, in its own unit."""
    count = plane.rows.count
    if plane.spec.unit is Unit.STATE:
        return "state" if count == 1 else f"{count} states"
    return count_text(count)


@dataclass(frozen=True)
class _Part:
    """Neighbouring planes of one layer that differ in nothing but their role."""

    roles: tuple[str, ...]
    plane: StoredPlane
    raw_bytes: int
    stored_bytes: int

    @property
    def look(self) -> tuple[object, ...]:
        spec = self.plane.spec
        return self.roles, spec.encoding, spec.row_shape, spec.unit, self.plane.rows


def _parts(planes: list[StoredPlane], stored: Mapping[PlaneKey, int]) -> Iterator[_Part]:
    def look(plane: StoredPlane) -> tuple[object, ...]:
        return plane.spec.encoding, plane.spec.row_shape, plane.spec.unit, plane.rows

    for _, group in groupby(planes, key=look):
        members = list(group)
        yield _Part(
            tuple(plane.spec.key.role for plane in members),
            members[0],
            sum(plane.raw_bytes for plane in members),
            sum(stored[plane.spec.key] for plane in members),
        )


@dataclass
class _Group:
    """All layers of one scope that look the same."""

    layer: LayerGeometry
    draft: bool
    layers: int
    parts: list[_Part]


def _groups(inspection: Inspection) -> list[_Group]:
    manifest, stored = inspection.manifest, inspection.stored_bytes
    by_layer: dict[tuple[str, int], list[StoredPlane]] = {}
    for plane in manifest.planes:
        by_layer.setdefault((plane.spec.key.scope, plane.spec.key.layer), []).append(plane)
    groups: dict[tuple[object, ...], _Group] = {}
    for scope, layers in ((Scope.LAYER, manifest.geometry.layers), (Scope.DRAFT, manifest.geometry.draft_layers)):
        for at, layer in enumerate(layers):
            parts = list(_parts(by_layer.get((scope.value, at), []), stored))
            # Shared layers look alike whichever layer they read.
            rule = None if layer.kind == "shared" else (layer.window, layer.sink, layer.pool, layer.kv_rank)
            look = (scope, layer.kind, rule, tuple(part.look for part in parts))
            group = groups.get(look)
            if group is None:
                groups[look] = _Group(layer, scope is Scope.DRAFT, 1, parts)
                continue
            group.layers += 1
            group.parts = [
                _Part(a.roles, a.plane, a.raw_bytes + b.raw_bytes, a.stored_bytes + b.stored_bytes)
                for a, b in zip(group.parts, parts, strict=True)
            ]
    return list(groups.values())


def new_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table without lines; the ``right`` columns hold numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    return table


def layer_table(inspection: Inspection) -> Table:
    """One line for each kind of layer and shape of plane, and the session's own planes below."""
    manifest, stored = inspection.manifest, inspection.stored_bytes
    position = manifest.position
    table = new_table("layers", "kind", "planes", "holds", "rows", "raw", "stored", "ratio", right=_NUMBERS)

    def add(layers: str, kind: str, part: _Part) -> None:
        spec = part.plane.spec
        table.add_row(
            layers,
            kind,
            printable(f"{' '.join(part.roles)} {encoding_text(spec)}"),
            bar(part.plane, position),
            rows_text(part.plane),
            bytes_text(part.raw_bytes),
            bytes_text(part.stored_bytes),
            ratio_text(part.raw_bytes, part.stored_bytes),
        )

    for group in _groups(inspection):
        count = f"{group.layers} {glyph(group.layer)}" + (" draft" if group.draft else "")
        if not group.parts:
            table.add_row(count, kind_text(group.layer), "none of its own")
        for at, part in enumerate(group.parts):
            add(count if at == 0 else "", kind_text(group.layer) if at == 0 else "", part)
    for plane in manifest.planes:
        if plane.spec.key.scope == Scope.SESSION.value:
            key = plane.spec.key
            add("session", "", _Part((key.role,), plane, plane.raw_bytes, stored[key]))
    return table


def plane_table(inspection: Inspection) -> Table:
    """Every plane, one a line."""
    stored = inspection.stored_bytes
    tiles: dict[int, int] = {}
    for record in inspection.records:
        tiles[record.tile.plane] = tiles.get(record.tile.plane, 0) + 1
    table = new_table("plane", "row", "unit", "rows", "raw", "stored", "tiles", right=("raw", "stored", "tiles"))
    for number, plane in enumerate(inspection.manifest.planes):
        spec = plane.spec
        table.add_row(
            printable(str(spec.key)),
            printable(encoding_text(spec)),
            spec.unit.value,
            str(plane.rows),
            bytes_text(plane.raw_bytes),
            bytes_text(stored[spec.key]),
            str(tiles.get(number, 0)),
        )
    return table


def tile_table(inspection: Inspection) -> Table:
    """Every tile, one a line, in payload order."""
    table = new_table("offset", "plane", "rows", "codec", "raw", "stored", "hash", right=("offset", "raw", "stored"))
    for record in inspection.records:
        plane = inspection.manifest.planes[record.tile.plane]
        ordinal = f" state {record.tile.ordinal}" if plane.spec.unit is Unit.STATE else ""
        table.add_row(
            str(record.offset),
            printable(str(plane.spec.key)),
            f"[{record.tile.first}, {record.tile.end}){ordinal}",
            CODEC_NAMES[record.codec],
            str(record.raw_length),
            str(record.stored_length),
            record.stored_hash.hex()[:12],
        )
    return table
