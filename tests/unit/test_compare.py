"""Where two packs part, held against packs that were changed in one known place; and what is read to find it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvpack
from kvpack.model.geometry import Geometry, PlaneKey
from kvpack.model.planes import LOGITS, TOKENS
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import Cut, PlaneRows
from kvpack.pack.compare import PackComparison, compare_packs
from kvpack.pack.reader import PackReader
from kvpack.pack.view import PackCut
from tests import synthetic
from tests.conftest import ROOT

GEOMETRY = synthetic.EVERY_KIND
TILES = Geometry((synthetic.full(8, 128), synthetic.full(8, 128)))  # 512 rows of 2 KiB in a tile


def changed(cut: Cut, key: PlaneKey, row: int) -> Cut:
    """The cut with one bit of one row (for a state one byte) turned."""
    plane = cut.planes[key]
    content = bytearray(plane.buffer)
    content[plane.rows.offset_of(row) * plane.spec.axis_bytes] ^= 1
    return replace(cut, planes={**cut.planes, key: PlaneRows(plane.spec, plane.rows, memoryview(content))})


@contextmanager
def opened(folder: Path, *packs: Cut | tuple[Cut, ...] | Path, **options: Any) -> Iterator[list[kvpack.Pack]]:
    """Packs of cuts, or files, open; each pack with another codec."""
    found: list[kvpack.Pack] = []
    try:
        for number, pack in enumerate(packs):
            path = pack if isinstance(pack, Path) else folder / f"{number}.kvpack"
            if not isinstance(pack, Path):
                kvpack.save(pack, path, codec=("raw", "split", "zstd")[number % 3], force=True)
            found.append(kvpack.open_pack(path, allow_unsigned=True, **options))
        yield found
    finally:
        for opened_pack in found:
            opened_pack.close()


def compared(folder: Path, *packs: Cut | tuple[Cut, ...] | Path, **options: Any) -> PackComparison:
    with opened(folder, *packs, **options) as (a, b):
        return compare_packs(a.chain, b.chain)


def test_equal_packs_are_equal_whatever_their_codec_and_nothing_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = synthetic.make_cut(GEOMETRY, 40)
    other = replace(cut, provenance={"model": "m"}, layout=replace(cut.layout))
    with opened(tmp_path, cut, other) as (a, b):
        monkeypatch.setattr(PackReader, "read_tile", lambda *_: pytest.fail("payload was read"))
        found = compare_packs(a.chain, b.chain)
    assert found.equal
    assert (found.bytes_read, found.not_compared, found.same_state_at) == (0, (), (40,))
    assert found.tokens is not None
    assert (found.tokens.common, found.tokens.parts_at) == (40, None)


def every_place() -> list[tuple[PlaneKey, int]]:
    cut = synthetic.make_cut(GEOMETRY, 40)
    return [
        (key, row) for key, rows in cut.stored.items() if key != TOKENS and rows
        for row in sorted({rows.ranges[0][0], rows.ranges[0][1] // 2, rows.end - 1})
        if rows.contains(RowSet.of((row, row + 1)))
    ]  # fmt: skip


@pytest.mark.parametrize(("key", "row"), every_place(), ids=str)
def test_one_bit_in_any_plane_is_found(tmp_path: Path, key: PlaneKey, row: int) -> None:
    cut = synthetic.make_cut(GEOMETRY, 40)
    found = compared(tmp_path, cut, changed(cut, key, row))
    assert found.rows is not None
    assert (found.rows.key, found.rows.row, found.rows.planes) == (key, row, 1)
    assert not found.equal
    # Logits belong to the session and not to the state.
    assert found.same_state_at == ((40,) if key == LOGITS else ())


def test_only_the_first_tile_that_differs_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = synthetic.make_cut(TILES, 2048, logits=0)
    k, v = PlaneKey("layer", 1, "k"), PlaneKey("layer", 1, "v")
    read: list[tuple[int, int, int]] = []
    original = PackReader.read_tile

    def watched(self: PackReader, record: Any) -> memoryview:
        read.append((record.tile.plane, record.tile.first, record.tile.end))
        return original(self, record)

    with opened(tmp_path, cut, changed(changed(changed(cut, v, 5), k, 700), k, 1500)) as (a, b):
        monkeypatch.setattr(PackReader, "read_tile", watched)
        found = compare_packs(a.chain, b.chain)
    assert found.rows is not None
    assert (found.rows.key, found.rows.row, found.rows.planes) == (k, 700, 2)
    assert read == [(2, 512, 1024)] * 2
    assert found.bytes_read == 2 << 20


@pytest.mark.parametrize("row", [0, 3, 11, 12, 28])
def test_tiles_that_were_split_elsewhere_are_read(tmp_path: Path, row: int) -> None:
    """Cuts at 5, 12 and 29 against one at 29: the same plane in other tiles."""
    geometry = Geometry((synthetic.full(), synthetic.sliding(8), synthetic.recurrent()))
    cuts = tuple(synthetic.make_cut(geometry, at) for at in (5, 12, 29))
    key = PlaneKey("layer", 0, "k")
    one = changed(cuts[2], key, row)
    found = compared(tmp_path, cuts, one)
    assert found.rows is not None
    assert (found.rows.key, found.rows.row) == (key, row)
    assert found.positions_a == (5, 12, 29)
    assert found.positions_b == (29,)
    # The control: without the change the state id settles it.
    same = compared(tmp_path, cuts, cuts[2])
    assert (same.rows, same.same_state_at, same.equal) == (None, (29,), False)
    assert same.bytes_read == 2 * 4 * 29  # the tokens, which a state id does not name


def test_sessions_of_different_lengths_agree_on_what_both_mean(tmp_path: Path) -> None:
    geometry = Geometry((synthetic.full(), synthetic.sliding(8), synthetic.recurrent()))
    short, long = synthetic.make_cut(geometry, 20, logits=0), synthetic.make_cut(geometry, 24, logits=0)
    found = compared(tmp_path, short, long)
    assert (found.rows, found.equal) == (None, False)
    assert found.tokens is not None
    assert (found.tokens.common, found.tokens.parts_at, found.tokens.a, found.tokens.b) == (20, None, 20, 24)
    assert any("no common position" in sentence for sentence in found.not_compared)
    parted = compared(tmp_path, short, changed(long, PlaneKey("layer", 1, "v"), 18))
    assert parted.rows is not None
    assert (parted.rows.key, parted.rows.row) == (PlaneKey("layer", 1, "v"), 18)
    assert (parted.rows.position_a, parted.rows.position_b) == (20, 24)
    # Row 15 has left the longer session's window: nobody can say that it differs.
    assert compared(tmp_path, changed(short, PlaneKey("layer", 1, "v"), 15), long).rows is None


@pytest.mark.parametrize(("at", "key", "row"), [
    (5, PlaneKey("layer", 2, "ssm"), 17),
    (12, PlaneKey("layer", 2, "conv"), 3),
    (12, PlaneKey("layer", 1, "k"), 6),
    (12, LOGITS, 9),
    (29, PlaneKey("layer", 2, "ssm"), 479),
])  # fmt: skip
def test_a_difference_in_one_of_several_cuts(tmp_path: Path, at: int, key: PlaneKey, row: int) -> None:
    geometry = Geometry((synthetic.full(), synthetic.sliding(8), synthetic.recurrent()))
    cuts = {position: synthetic.make_cut(geometry, position) for position in (5, 12, 29)}
    assert compared(tmp_path, tuple(cuts.values()), tuple(cuts.values())).equal
    found = compared(tmp_path, tuple(cuts.values()), tuple({**cuts, at: changed(cuts[at], key, row)}.values()))
    assert not found.equal
    assert found.rows is not None
    assert (found.rows.key, found.rows.row) == (key, row)
    assert (found.rows.position_a, found.rows.position_b) == (at, at)


def test_rows_behind_the_last_common_cut_are_compared_too(tmp_path: Path) -> None:
    geometry = Geometry((synthetic.full(),))
    cuts = [synthetic.make_cut(geometry, at, logits=0) for at in (10, 20, 30)]
    key = PlaneKey("layer", 0, "v")
    found = compared(tmp_path, (cuts[0], cuts[1]), (cuts[0], changed(cuts[2], key, 15)))
    assert found.same_state_at == (10,)
    assert found.rows is not None
    assert (found.rows.key, found.rows.row) == (key, 15)


@pytest.mark.parametrize("token", [0, 17, 39])
def test_where_the_tokens_part(tmp_path: Path, token: int) -> None:
    cut = synthetic.make_cut(GEOMETRY, 40)
    found = compared(tmp_path, cut, changed(cut, TOKENS, token))
    assert found.tokens is not None
    assert (found.tokens.parts_at, found.tokens.common) == (token, token)
    assert found.rows is None
    assert not found.equal
    missing = compared(tmp_path, cut, synthetic.make_cut(GEOMETRY, 40, tokens=0))
    assert missing.tokens is None
    assert not missing.equal
    assert "carries none" in missing.not_compared[0]


def test_identity_and_geometry_by_field(tmp_path: Path) -> None:
    one = synthetic.make_cut(Geometry((synthetic.full(), synthetic.sliding(8))), 20)
    two = synthetic.make_cut(
        Geometry((synthetic.full(), synthetic.sliding(9))), 20, who=synthetic.identity(weights=b"x" * 32, extra="new")
    )
    found = compared(tmp_path, one, two)
    assert [(entry.path, entry.a, entry.b) for entry in found.identity] == [
        ("compatibility.extra", None, "new"),
        ("compatibility.weights", b"w" * 32, b"x" * 32),
    ]
    assert found.geometry is not None
    assert (found.geometry.path, found.geometry.a, found.geometry.b) == ("layers[1].window", 8, 9)
    assert found.rows is None
    assert "rows and states: the geometries differ" in found.not_compared
    more = synthetic.make_cut(Geometry((synthetic.full(),)), 20)
    geometry = compared(tmp_path, one, more).geometry
    assert geometry is not None
    assert (geometry.path, geometry.a, geometry.b) == ("number of layers", 2, 1)


def test_a_cut_that_says_something_else_of_itself(tmp_path: Path) -> None:
    cut = synthetic.make_cut(Geometry((synthetic.full(),)), 20)
    found = compared(tmp_path, cut, replace(cut, record=replace(cut.record, rope_delta=3)))
    assert [(entry.path, entry.a, entry.b) for entry in found.cuts] == [("cut at 20: rope_delta", 0, 3)]
    assert not found.equal


def test_a_delta_is_the_session_that_it_continues(tmp_path: Path) -> None:
    geometry = Geometry((synthetic.full(), synthetic.sliding(8), synthetic.latent(pool=4), synthetic.recurrent()))
    first, second = (synthetic.make_cut(geometry, at, logits=0) for at in (12, 30))
    kvpack.save(first, tmp_path / "first.kvpack")
    with kvpack.open_pack(tmp_path / "first.kvpack", allow_unsigned=True) as parent:
        kvpack.save(second, tmp_path / "delta.kvpack", parent=parent.cut())
    kvpack.save((first, second), tmp_path / "whole.kvpack")
    whole, delta = tmp_path / "whole.kvpack", tmp_path / "delta.kvpack"
    assert compared(tmp_path, whole, delta, parents=tmp_path).equal
    key = PlaneKey("layer", 2, "latent")
    kvpack.save((first, changed(second, key, 20)), whole, force=True)
    found = compared(tmp_path, whole, delta, parents=tmp_path)
    assert found.same_state_at == (12,)
    assert found.rows is not None
    assert (found.rows.key, found.rows.row) == (key, 20)


def test_of_encrypted_packs_it_is_said_what_nobody_can_tell(tmp_path: Path) -> None:
    vectors = ROOT / "fixtures" / "v1" / "accept"
    sealed = vectors / "encrypted-front.kvpack"
    with opened(tmp_path, sealed) as (pack,):
        geometry, position = pack.manifest.geometry, pack.manifest.position
    found = compared(tmp_path, sealed, synthetic.make_cut(geometry, position, logits=0))
    assert (found.equal, found.settled, found.geometry, found.tokens, found.rows) == (False, False, None, None, None)
    assert "the first pack is encrypted" in found.not_compared[0]
    # The same file is the same whatever it says.
    assert compared(tmp_path, sealed, sealed).equal


@pytest.mark.parametrize("name", ["unknown-encoding", "unknown-kind", "unknown-law"])
def test_packs_of_a_newer_version_are_compared(tmp_path: Path, name: str) -> None:
    path = ROOT / "fixtures" / "v1" / "accept" / f"{name}.kvpack"
    assert compared(tmp_path, path, path).equal
    assert not compared(tmp_path, path, synthetic.make_cut(TILES, 3)).equal


def test_whole_tiles_come_from_the_newest_pack_of_a_chain(tmp_path: Path) -> None:
    geometry = Geometry((synthetic.full(),))
    first, second = (synthetic.make_cut(geometry, at, logits=0) for at in (12, 30))
    kvpack.save(first, tmp_path / "first.kvpack")
    with kvpack.open_pack(tmp_path / "first.kvpack", allow_unsigned=True) as parent:
        kvpack.save(second, tmp_path / "delta.kvpack", parent=parent.cut())
    with kvpack.open_pack(tmp_path / "delta.kvpack", allow_unsigned=True, parents=tmp_path) as pack:
        cut: PackCut = pack.cut()
        key = PlaneKey("layer", 0, "k")
        extents = [extent for extent, _ in cut.whole_tiles(key, RowSet.of((0, 30)))]
        assert sorted(extents) == [(0, 12), (12, 30)]
        assert [extent for extent, _ in cut.whole_tiles(key, RowSet.of((1, 30)))] == [(12, 30)]
