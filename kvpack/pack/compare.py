"""Where two packs part: identity, geometry, cuts, tokens, and the first row that differs. Pure over open packs.

Equal payload is not read. Two cuts of one state id have the same rows; rows of tiles with the same extent and the same
raw hash are the same. Only what neither of them settles is read: the first tile whose hashes differ, to find the row,
and tiles that two packs have split in different places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvpack.model.geometry import PlaneKey, Scope, Unit
from kvpack.model.planes import TOKENS
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import CutRecord
from kvpack.pack.manifest import Manifest
from kvpack.pack.view import PackChain, PackCut

__all__ = ["Difference", "FieldDifference", "PackComparison", "TokenComparison", "compare_packs"]

_CUT_FIELDS = ("draft_position", "rope_delta", "context_epoch", "origins", "tokens", "extras")
_LEAST_READ = 64


@dataclass(frozen=True)
class FieldDifference:
    """One value that differs, by its path; None on a side that does not have it."""

    path: str
    a: object
    b: object


@dataclass(frozen=True)
class TokenComparison:
    """The token ids: ``common`` agree from the start; ``parts_at`` is where they part, None where one continues the
    other. ``a`` and ``b`` are how many each side knows."""

    common: int
    parts_at: int | None
    a: int
    b: int


@dataclass(frozen=True)
class Difference:
    """The first row that differs: plane and row, for a state the byte. ``position_a`` and ``position_b`` are the cuts
    that were compared, ``planes`` how many planes differ by their hashes alone (at least: others may differ, too)."""

    key: PlaneKey
    unit: Unit
    row: int
    position_a: int
    position_b: int
    planes: int


@dataclass(frozen=True)
class PackComparison:
    """What comparing two packs found.

    ``cuts`` are differences of what a cut says of itself, ``positions_a`` and ``positions_b`` every position that a
    side restores at. ``not_compared`` says in sentences what nobody could compare; ``settled`` is false where that may
    hide a difference between packs that look the same (their payload is encrypted).
    """

    identity: tuple[FieldDifference, ...]
    geometry: FieldDifference | None
    positions_a: tuple[int, ...]
    positions_b: tuple[int, ...]
    cuts: tuple[FieldDifference, ...]
    same_state_at: tuple[int, ...]
    tokens: TokenComparison | None
    rows: Difference | None
    not_compared: tuple[str, ...]
    settled: bool
    bytes_read: int

    @property
    def equal(self) -> bool:
        """Whether the packs are known to hold the same sessions of the same model."""
        return (
            self.settled
            and not self.identity
            and self.geometry is None
            and self.positions_a == self.positions_b
            and not self.cuts
            and (self.tokens is None or (self.tokens.parts_at is None and self.tokens.a == self.tokens.b))
            and self.rows is None
        )


def compare_packs(a: PackChain, b: PackChain) -> PackComparison:
    """Compare two packs (deltas with their parents).

    Rows are compared at every position at which both have a cut, the first one first, then those that the last cuts of
    both mean; states only at a common position. Raises what reading a tile raises.
    """
    front_a, front_b = a.readers[0].manifest, b.readers[0].manifest
    geometry = next(_parts("", front_a.geometry.to_wire(), front_b.geometry.to_wire()), None)
    not_compared: list[str] = []
    shared = [at for at in a.positions if at in b.positions]
    pairs = {at: (a.cut(at), b.cut(at)) for at in shared}
    newest = _Sides(a.cut(), b.cut())
    sessions = [_Sides(*pair) for pair in pairs.values()]
    if not shared or (newest.a.record.position, newest.b.record.position) != (shared[-1], shared[-1]):
        sessions.append(newest)
    encrypted = [name for name, side in (("the first", a), ("the second", b)) if _is_encrypted(side)]
    same: tuple[int, ...] = ()
    tokens: TokenComparison | None = None
    rows: Difference | None = None
    bytes_read = 0
    same_pack = [r.pack_id for r in a.readers] == [r.pack_id for r in b.readers]
    if encrypted and not same_pack:
        not_compared.append(f"tokens, rows, states and state ids: {' and '.join(encrypted)} pack is encrypted")
    elif not encrypted:
        same = tuple(at for at, (x, y) in pairs.items() if x.record.state_id == y.record.state_id)
        tokens = _tokens(newest, not_compared)
        if geometry is not None:
            not_compared.append("rows and states: the geometries differ")
        else:
            known = [pairs[at][0] for at in same]
            rows = next(filter(None, (sides.first_difference(known) for sides in sessions)), None)
            if not shared:
                not_compared.append("states, and rows beyond the shorter session: the packs have no common position")
        bytes_read = sum(sides.bytes_read for sides in {id(sides): sides for sides in (*sessions, newest)}.values())
    return PackComparison(
        identity=tuple(_identity(front_a, front_b)),
        geometry=geometry,
        positions_a=a.positions,
        positions_b=b.positions,
        cuts=tuple(
            FieldDifference(f"cut at {at}: {name}", mine, theirs)
            for at, (x, y) in pairs.items()
            for name, mine, theirs in _record_differences(x.record, y.record)
        ),
        same_state_at=same,
        tokens=tokens,
        rows=rows,
        not_compared=tuple(not_compared),
        settled=same_pack or not encrypted,
        bytes_read=bytes_read,
    )


def _is_encrypted(chain: PackChain) -> bool:
    return any(reader.preamble.encrypted for reader in chain.readers)


def _identity(a: Manifest, b: Manifest) -> Iterator[FieldDifference]:
    for kind in ("compatibility", "numerics"):
        mine, theirs = getattr(a.identity, kind), getattr(b.identity, kind)
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                yield FieldDifference(f"{kind}.{name}", mine.get(name), theirs.get(name))


def _record_differences(a: CutRecord, b: CutRecord) -> Iterator[tuple[str, object, object]]:
    for name in _CUT_FIELDS:
        mine, theirs = getattr(a, name), getattr(b, name)
        if mine != theirs:
            yield name, mine, theirs


def _parts(path: str, a: object, b: object) -> Iterator[FieldDifference]:
    """Every place at which two wire values part, in order; of lists of different lengths the length first."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for name in [*a, *(name for name in b if name not in a)]:
            yield from _parts(f"{path}.{name}" if path else str(name), a.get(name), b.get(name))
    elif isinstance(a, list) and isinstance(b, list) and any(isinstance(entry, Mapping) for entry in [*a, *b]):
        if len(a) != len(b):
            yield FieldDifference(f"number of {path}", len(a), len(b))
        for at, (mine, theirs) in enumerate(zip(a, b, strict=False)):
            yield from _parts(f"{path}[{at}]", mine, theirs)
    elif a != b:
        yield FieldDifference(path, a, b)


def _tokens(sides: _Sides, not_compared: list[str]) -> TokenComparison | None:
    counts = [cut.record.tokens if TOKENS in cut.specs else 0 for cut in (sides.a, sides.b)]
    missing = [name for name, count in zip(("first", "second"), counts, strict=True) if not count]
    if missing:
        if len(missing) == 1:
            not_compared.append(f"tokens: the {missing[0]} pack carries none")
        return None
    common = min(counts)
    found = sides.first_row(TOKENS, RowSet.of((0, common)))
    return TokenComparison(common if found is None else found, found, *counts)


@dataclass
class _Sides:
    """Two cuts side by side, and how many bytes had to be read to tell them apart."""

    a: PackCut
    b: PackCut
    bytes_read: int = field(default=0)

    def first_difference(self, known: list[PackCut]) -> Difference | None:
        """The first plane, in canonical order, and its first row that differs; ``known`` are cuts of the first pack
        whose state the second is known to share."""
        first: tuple[PlaneKey, int] | None = None
        planes = 0
        for key, spec in self.a.specs.items():
            if key.scope == Scope.SESSION.value and (key == TOKENS or not self._at_one_position):
                continue
            if key not in self.b.specs or (spec.unit is Unit.STATE and not self._at_one_position):
                continue
            rows = self._meant(self.a, key).intersection(self._meant(self.b, key))
            if key.scope != Scope.SESSION.value:
                for cut in known:
                    if spec.unit is not Unit.STATE or cut.record.position == self.a.record.position:
                        rows = rows.minus(self._meant(cut, key))
            if not rows:
                continue
            if first is not None:
                planes += self._differs_by_hash(key, rows)
                continue
            row = self.first_row(key, rows)
            if row is not None:
                first, planes = (key, row), 1
        if first is None:
            return None
        unit = self.a.specs[first[0]].unit
        return Difference(first[0], unit, first[1], self.a.record.position, self.b.record.position, planes)

    @property
    def _at_one_position(self) -> bool:
        return self.a.record.position == self.b.record.position

    def _meant(self, cut: PackCut, key: PlaneKey) -> RowSet:
        return cut.reader.manifest.semantic(key, cut.record)

    def first_row(self, key: PlaneKey, rows: RowSet) -> int | None:
        """The first of ``rows`` in which the planes differ; of a state the first byte."""
        left = self._unsettled(key, rows)
        step = max(_LEAST_READ, self.a.specs[key].block)
        for begin, end in left:
            for at in range(begin, end, step):
                stop = min(at + step, end)
                mine, theirs = self.a.rows(key, at, stop), self.b.rows(key, at, stop)
                self.bytes_read += mine.nbytes + theirs.nbytes
                if mine != theirs:
                    return at + _first_byte(mine, theirs) // self.a.specs[key].axis_bytes
        return None

    def _unsettled(self, key: PlaneKey, rows: RowSet) -> RowSet:
        mine, theirs = dict(self.a.whole_tiles(key, rows)), dict(self.b.whole_tiles(key, rows))
        return rows.minus(RowSet.of(*(extent for extent, digest in mine.items() if theirs.get(extent) == digest)))

    def _differs_by_hash(self, key: PlaneKey, rows: RowSet) -> bool:
        theirs = dict(self.b.whole_tiles(key, rows))
        return any(theirs.get(extent, digest) != digest for extent, digest in self.a.whole_tiles(key, rows))


def _first_byte(a: memoryview, b: memoryview) -> int:
    """Where two buffers of one length part, by halves."""
    first, end = 0, a.nbytes
    while end - first > 1:
        middle = (first + end) // 2
        if a[first:middle] != b[first:middle]:
            end = middle
        else:
            first = middle
    return first
