"""The tile index: one fixed record a tile, and the one set of tiles that a manifest allows (spec, section 9)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from kvpack.errors import FormatError, IntegrityError
from kvpack.model.encoding import is_scalar
from kvpack.model.geometry import Unit
from kvpack.model.planes import TOKENS
from kvpack.pack.manifest import Manifest, StoredPlane
from kvpack.pack.preamble import TILE_ALIGN, Limits, Preamble, align

__all__ = ["CODEC_NAMES", "Tile", "TileRecord", "expected_tiles", "index_hash", "parse_index", "require_index_hash"]

CODEC_NAMES: Final = {0: "raw", 1: "zstd", 2: "split"}
_LAYOUT: Final = struct.Struct("<IIIIIIHHI32s32s")


@dataclass(frozen=True, slots=True)
class Tile:
    """A run of one plane along its axis: rows ``[first, end)``, or bytes ``[first, end)`` of state ``ordinal``."""

    plane: int
    ordinal: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class TileRecord:
    """One record of the index. ``offset`` and lengths in bytes. Round trip with :func:`parse_index`."""

    tile: Tile
    offset: int
    stored_length: int
    raw_length: int
    codec: int
    flags: int
    stored_hash: bytes
    raw_hash: bytes

    def to_bytes(self, *, is_state: bool) -> bytes:
        """The 96 bytes; a state's record holds the ordinal and the byte offset instead of rows."""
        tile = self.tile
        first, rows = (tile.ordinal, tile.first) if is_state else (tile.first, tile.end - tile.first)
        return _LAYOUT.pack(
            self.offset // TILE_ALIGN,
            self.stored_length,
            self.raw_length,
            tile.plane,
            first,
            rows,
            self.codec,
            self.flags,
            0,
            self.stored_hash,
            self.raw_hash,
        )

    @property
    def padded_end(self) -> int:
        """Where the tile's padding ends."""
        return align(self.offset + self.stored_length, TILE_ALIGN)


def plane_tiles(number: int, plane: StoredPlane, manifest: Manifest) -> Iterator[Tile]:
    """The tiles of one plane in ascending order: stored rows split at blocks and at the ends of every cut's range."""
    spec = plane.spec
    if spec.unit is Unit.STATE:
        for ordinal in range(plane.rows.count):
            for first, end in spec.pieces(0, spec.row_bytes):
                yield Tile(number, ordinal, first, end)
        return
    ends = [end for cut in manifest.cuts for part in manifest.semantic(spec.key, cut) for end in part]
    for first, end in plane.rows.split_at(ends):
        for piece in spec.pieces(first, end):
            yield Tile(number, 0, *piece)


def expected_tiles(manifest: Manifest) -> Iterator[Tile]:
    """Every tile that the manifest's planes have, plane by plane."""
    for number, plane in enumerate(manifest.planes):
        yield from plane_tiles(number, plane, manifest)


def index_hash(records: bytes) -> bytes:
    """The hash that the manifest holds of the whole index."""
    return blake3(records).digest()


def require_index_hash(buffer: bytes, manifest: Manifest) -> None:
    """The first part of step 10: the index is what was written."""
    found = index_hash(buffer)
    if found != manifest.index_hash:
        raise IntegrityError(
            "index-hash",
            "the tile index is damaged: its hash differs",
            field="index_hash",
            expected=manifest.index_hash.hex(),
            found=found.hex(),
        )


def parse_index(buffer: bytes, preamble: Preamble, manifest: Manifest, limits: Limits) -> tuple[TileRecord, ...]:
    """The rest of step 10 of a reader: records, exact coverage, and the end of the file."""
    records = tuple(_records(buffer, preamble, manifest, limits))
    _require_offsets(records, preamble)
    _require_coverage(records, manifest)
    return records


def _records(buffer: bytes, preamble: Preamble, manifest: Manifest, limits: Limits) -> Iterator[TileRecord]:
    planes = manifest.planes
    flag = 1 if preamble.encrypted else 0
    for number, fields in enumerate(_LAYOUT.iter_unpack(buffer)):
        units, stored, raw, plane, first, rows, codec, flags, zero, stored_hash, raw_hash = fields
        if zero:
            raise FormatError("reserved-not-zero", f"tile {number}: a reserved field is not zero", field="reserved")
        if codec not in CODEC_NAMES:
            raise FormatError(
                "unknown-codec", f"tile {number} has the codec {codec}, which is not known", field="codec", found=codec
            )
        if flags & ~3 or flags & 1 != flag or (flags & 2 and not flag):
            raise FormatError("unsupported-flag", f"tile {number} has flags {flags:#x}", field="flags", found=flags)
        if plane >= len(planes):
            raise FormatError(
                "bad-index", f"tile {number} is of plane {plane}", field="plane", expected=len(planes) - 1, found=plane
            )
        spec = planes[plane].spec
        if spec.unit is Unit.STATE:
            tile, wanted = Tile(plane, first, rows, rows + raw), raw
        else:
            tile, wanted = Tile(plane, 0, first, first + rows), rows * spec.row_bytes
        if not stored:
            raise FormatError("bad-index", f"tile {number} stores no bytes", field="stored_length", expected=1, found=0)
        if codec == 2 and spec.unit is Unit.STATE and not is_scalar(spec.encoding):
            raise FormatError(
                "bad-index",
                f"tile {number}: only states of scalar elements are split",
                plane=str(spec.key),
                field="codec",
                found=codec,
            )
        if raw != wanted or not raw:
            raise FormatError(
                "bad-index",
                f"tile {number}: lengths disagree with its rows",
                plane=str(spec.key),
                field="raw_length",
                expected=wanted,
                found=raw,
            )
        if raw > limits.raw_tile_bytes:
            raise FormatError(
                "limit-exceeded",
                f"tile {number} has {raw} raw bytes, at most {limits.raw_tile_bytes} are read",
                field="raw_length",
                expected=limits.raw_tile_bytes,
                found=raw,
            )
        if codec == 0 and stored != raw and not flag:
            raise FormatError(
                "bad-index",
                f"tile {number}: a raw tile of another length",
                field="stored_length",
                expected=raw,
                found=stored,
            )
        yield TileRecord(tile, units * TILE_ALIGN, stored, raw, codec, flags, stored_hash, raw_hash)


def _require_offsets(records: Sequence[TileRecord], preamble: Preamble) -> None:
    at = preamble.payload_offset
    for number, record in enumerate(records):
        if record.offset != at:
            raise FormatError(
                "bad-tile-offset",
                f"tile {number} lies at {record.offset}, and the one before ends at {at}",
                field="offset",
                expected=at,
                found=record.offset,
            )
        at = record.padded_end
    if at != preamble.file_length:
        raise FormatError(
            "bad-tile-offset",
            f"the tiles end at {at}, and the file at {preamble.file_length}",
            field="offset",
            expected=preamble.file_length,
            found=at,
        )


def _require_coverage(records: Sequence[TileRecord], manifest: Manifest) -> None:
    waiting: dict[int, Iterator[Tile]] = {}
    for record in records:
        plane = record.tile.plane
        if plane not in waiting:
            waiting[plane] = plane_tiles(plane, manifest.planes[plane], manifest)
        wanted = next(waiting[plane], None)
        if wanted != record.tile:
            raise _coverage(manifest, plane, wanted, record.tile)
    for plane, stored in enumerate(manifest.planes):
        left = next(waiting.get(plane) or plane_tiles(plane, stored, manifest), None)
        if left is not None:
            raise _coverage(manifest, plane, left, None)


def _coverage(manifest: Manifest, plane: int, wanted: Tile | None, found: Tile | None) -> FormatError:
    key = manifest.planes[plane].spec.key

    def show(tile: Tile | None) -> str:
        return "no tile" if tile is None else f"[{tile.first}, {tile.end})"

    return FormatError(
        "bad-coverage",
        f"{key}: the index has {show(found)} where {show(wanted)} follows from the manifest",
        layer=key.layer_or_none,
        plane=str(key),
        field="rows",
        expected=show(wanted),
        found=show(found),
    )


def payload_order(tiles: Iterable[Tile], manifest: Manifest) -> list[Tile]:
    """The writer's order: token ids, growing planes by first row, sliding tails, then states and fixed rows."""

    def key(tile: Tile) -> tuple[int, int, int, int]:
        plane = manifest.planes[tile.plane]
        if plane.spec.key == TOKENS:
            return (-1, 0, tile.plane, tile.first)
        if plane.spec.unit in (Unit.STATE, Unit.FIXED):
            return (2, tile.ordinal, tile.plane, tile.first)
        if plane.window:
            return (1, 0, tile.plane, tile.first)
        return (0, tile.first * plane.tokens_per_row, tile.plane, tile.first)

    return sorted(tiles, key=key)
