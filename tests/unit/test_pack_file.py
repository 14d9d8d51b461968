"""Writer and reader together: what goes in comes out, in every codec, and the bytes depend on nothing else."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpack
from kvpack.errors import CompatibilityError, IntegrityError, KvpackError, TrustError, UsageError
from kvpack.model.geometry import Geometry, PlaneKey, Unit
from kvpack.model.layout import LayerLayout, ProducerLayout
from kvpack.model.planes import needed_rows
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import Cut, Probe
from kvpack.pack.index import expected_tiles, payload_order
from tests import synthetic

SALT = b"s" * 32
MIXED = Geometry((synthetic.full(), synthetic.sliding(8), synthetic.recurrent()))


def write(cut: Cut, path: Path, codec: str = "raw", **options: object) -> kvpack.api.WrittenPack:
    return kvpack.save(cut, path, codec=codec, salt=SALT, created=1, **options)  # type: ignore[arg-type]


def rows_of(cut: Cut) -> dict[str, bytes]:
    return {str(key): bytes(rows.buffer) for key, rows in cut.planes.items()}


@pytest.mark.parametrize("codec", ["raw", "zstd", "split"])
def test_every_kind_of_state_comes_back(tmp_path: Path, codec: str) -> None:
    cut = synthetic.make_cut(synthetic.EVERY_KIND, 29, draft_position=27)
    written = write(cut, tmp_path / "a.kvpack", codec)
    back = kvpack.load(tmp_path / "a.kvpack", allow_unsigned=True)
    assert rows_of(back) == rows_of(cut)
    assert back.geometry == cut.geometry
    assert back.identity == cut.identity
    assert back.layout == cut.layout
    assert back.stored == cut.stored
    assert back.record == replace(cut.record, state_id=written.state_ids[29])
    assert back.tokens == cut.tokens


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 40), st.sampled_from(["raw", "zstd", "split"]), st.booleans())
def test_any_position(tmp_path_factory: pytest.TempPathFactory, position: int, codec: str, logits: bool) -> None:
    path = tmp_path_factory.mktemp("any") / "a.kvpack"
    cut = synthetic.make_cut(synthetic.EVERY_KIND, position, logits=16 if logits else 0)
    write(cut, path, codec)
    assert rows_of(kvpack.load(path, allow_unsigned=True)) == rows_of(cut)


def test_the_same_input_gives_the_same_file_however_many_threads(tmp_path: Path) -> None:
    cut = synthetic.make_cut(Geometry((synthetic.full(8, 128),) * 3), 2048)
    key = kvpack.SigningKey.from_seed(b"k" * 32)
    files = []
    for threads in (1, 2, 7):
        path = tmp_path / f"{threads}.kvpack"
        kvpack.save(cut, path, codec="split", salt=SALT, created=1, threads=threads, sign=key)
        files.append(path.read_bytes())
    assert files[0] == files[1] == files[2]


def test_the_producers_layout_is_not_in_the_state_or_the_payload(tmp_path: Path) -> None:
    cut = synthetic.make_cut(MIXED, 29)
    other = replace(cut, layout=ProducerLayout(tuple(LayerLayout("modulo", 64, "HND") for _ in MIXED.layers)))
    a, b = write(cut, tmp_path / "a"), write(other, tmp_path / "b")
    assert a.state_ids == b.state_ids
    assert a.pack_id != b.pack_id
    front = kvpack.inspect(tmp_path / "a").records[0].offset
    assert (tmp_path / "a").read_bytes()[front:] == (tmp_path / "b").read_bytes()[front:]


def test_the_state_id_names_the_state_and_nothing_else(tmp_path: Path) -> None:
    cut = synthetic.make_cut(MIXED, 29)
    key = PlaneKey("layer", 1, "k")
    same = [
        write(cut, tmp_path / "raw", "raw"),
        write(cut, tmp_path / "split", "split"),
        kvpack.save(cut, tmp_path / "later", created=99, sign=kvpack.SigningKey.generate()),
        write(synthetic.make_cut(MIXED, 29, surplus={key: RowSet.of((3, 5), (10, 29))}), tmp_path / "surplus"),
        write(synthetic.make_cut(MIXED, 29, logits=0, tokens=0), tmp_path / "bare"),
    ]
    assert len({w.state_ids[29] for w in same}) == 1
    others = [
        write(synthetic.make_cut(MIXED, 29, seed=1), tmp_path / "seed"),
        write(replace(cut, record=replace(cut.record, rope_delta=-2)), tmp_path / "delta"),
        write(
            synthetic.make_cut(Geometry((synthetic.full(), synthetic.sliding(9), synthetic.recurrent())), 29),
            tmp_path / "w",
        ),
    ]
    assert len({w.state_ids[29] for w in [same[0], *others]}) == 4


def test_tiles_of_a_growing_plane_and_a_token_prefix_is_one_byte_range(tmp_path: Path) -> None:
    cut = synthetic.make_cut(Geometry((synthetic.full(8, 128), synthetic.sliding(8, 8, 128))), 2048)
    write(cut, tmp_path / "a.kvpack")
    seen = kvpack.inspect(tmp_path / "a.kvpack")
    growing = [r for r in seen.records if seen.manifest.planes[r.tile.plane].spec.key.layer == 0]
    assert [r.tile.end - r.tile.first for r in growing] == [512] * 8
    assert [r.tile.first for r in growing] == sorted(r.tile.first for r in growing)
    assert str(seen.manifest.planes[seen.records[0].tile.plane].spec.key) == "session.tokens"
    assert list(seen.records[1 : 1 + len(growing)]) == growing
    assert list(payload_order(expected_tiles(seen.manifest), seen.manifest)) == [r.tile for r in seen.records]


def test_a_view_reads_only_the_tiles_that_it_needs(tmp_path: Path) -> None:
    cut = synthetic.make_cut(Geometry((synthetic.full(8, 128),)), 2048)
    write(cut, tmp_path / "a.kvpack")
    with kvpack.open_pack(tmp_path / "a.kvpack", allow_unsigned=True) as pack:
        view = pack.cut()
        key = PlaneKey("layer", 0, "k")
        got: dict[int, bytes] = {}
        view.read_rows({key: RowSet.of((500, 520))}, lambda k, first, n, rows: got.update({first: bytes(rows)}))
        assert b"".join(got[first] for first in sorted(got)) == bytes(cut.planes[key].slice(500, 520))
        assert view.bytes_to_read({key: RowSet.of((500, 520))}) == 2 << 20
        assert view.bytes_to_read({key: RowSet.of((0, 1))}) == 1 << 20
        with pytest.raises(CompatibilityError) as caught:
            view.read_rows({key: RowSet.of((0, 2049))}, lambda *_: None)
        assert caught.value.code == "rows-not-stored"
        with pytest.raises(CompatibilityError) as caught:
            pack.cut(5)
        assert caught.value.code == "no-such-cut"


def test_a_probe_and_the_session_planes_travel(tmp_path: Path) -> None:
    probe = Probe(29, (5, 6), (b"a" * 32, b"b" * 32), "bf16")
    cut = synthetic.make_cut(MIXED, 29, tokens=33, probe=probe)
    write(cut, tmp_path / "a.kvpack")
    back = kvpack.load(tmp_path / "a.kvpack", allow_unsigned=True)
    assert back.probe == probe
    assert len(back.tokens) == 33


def test_a_state_id_that_is_not_the_rows_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpack.pack.writer.state_id", lambda *_: b"x" * 32)
    write(synthetic.make_cut(MIXED, 29), tmp_path / "a.kvpack")
    for verb in (kvpack.verify, kvpack.load):
        with pytest.raises(IntegrityError) as caught:
            verb(tmp_path / "a.kvpack", allow_unsigned=True)
        assert caught.value.code == "state-id"


def test_trust(tmp_path: Path) -> None:
    key, other = kvpack.SigningKey.generate(), kvpack.SigningKey.generate()
    path = tmp_path / "a.kvpack"
    write(synthetic.make_cut(MIXED, 9), path, sign=key)
    assert kvpack.verify(path, trust=key.public).inspection.verification.trusted
    with pytest.raises(TrustError) as caught:
        kvpack.load(path, trust=other.public)
    assert caught.value.code == "untrusted-signer"
    with pytest.raises(TrustError):
        kvpack.load(path)
    assert kvpack.load(path, allow_unsigned=True).record.position == 9
    assert not kvpack.inspect(path, trust=other.public).verification.trusted
    write(synthetic.make_cut(MIXED, 9), path, sign=(key, other), force=True)
    assert kvpack.verify(path, trust=other.public).inspection.verification.trusted
    kvpack.save(synthetic.make_cut(MIXED, 9), path, sign=key, force=True, expires=100)
    with pytest.raises(TrustError) as caught:
        kvpack.load(path, trust=key.public, now=100)
    assert caught.value.code == "expired"
    assert kvpack.load(path, trust=key.public, now=99).record.position == 9


def test_every_flipped_byte_is_found_before_its_rows_are_released(tmp_path: Path) -> None:
    """Every byte of preamble and first slot, and a sample of manifest, index, payload and padding."""
    key = kvpack.SigningKey.from_seed(b"k" * 32)
    cut = synthetic.make_cut(Geometry((synthetic.full(1, 2), synthetic.sliding(4, 1, 2))), 6, logits=4)
    path = tmp_path / "a.kvpack"
    kvpack.save(cut, path, codec="raw", salt=SALT, created=1, sign=key)
    good = path.read_bytes()
    step = max(1, len(good) // 150)
    for at in sorted({*range(0, 240), *range(4096, 4096 + 1500, 11), *range(0, len(good), step)}):
        damaged = bytearray(good)
        damaged[at] ^= 1 << (at % 8)
        path.write_bytes(damaged)
        with pytest.raises(KvpackError) as caught:
            kvpack.verify(path, trust=key.public).require()
        assert caught.value.exit_status in (10, 11, 12), (at, caught.value)


def test_a_good_file_passes_the_same_check(tmp_path: Path) -> None:
    """The control of the test above."""
    key = kvpack.SigningKey.from_seed(b"k" * 32)
    write(synthetic.make_cut(MIXED, 6), tmp_path / "a.kvpack", sign=key)
    report = kvpack.verify(tmp_path / "a.kvpack", trust=key.public)
    report.require()
    assert report.faults == ()


def test_verify_names_every_bad_tile_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a.kvpack"
    write(synthetic.make_cut(Geometry((synthetic.full(),) * 4), 6), path)
    seen = kvpack.inspect(path)
    damaged = bytearray(path.read_bytes())
    wanted = []
    for record in (seen.records[1], seen.records[6]):
        damaged[record.offset + 3] ^= 1
        wanted.append(str(seen.manifest.planes[record.tile.plane].spec.key))
    path.write_bytes(damaged)
    report = kvpack.verify(path, allow_unsigned=True)
    assert [fault.plane for fault in report.faults] == wanted
    with pytest.raises(IntegrityError) as caught:
        report.require()
    assert (caught.value.code, caught.value.plane) == ("stored-hash", wanted[0])
    assert "1 more" in str(caught.value)


def test_files_are_private_and_names_are_not_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "a.kvpack"
    write(synthetic.make_cut(MIXED, 6), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()
    with pytest.raises(UsageError) as caught:
        write(synthetic.make_cut(MIXED, 7), path)
    assert caught.value.code == "output-exists"
    assert path.read_bytes() == before
    write(synthetic.make_cut(MIXED, 7), path, force=True)
    assert path.read_bytes() != before
    assert os.listdir(tmp_path) == ["a.kvpack"]


def test_not_files(tmp_path: Path) -> None:
    for path, code in ((tmp_path / "none", "no-such-file"), (tmp_path, "not-a-file")):
        with pytest.raises(UsageError) as caught:
            kvpack.inspect(path)
        assert caught.value.code == code
    with pytest.raises(UsageError) as caught:
        write(synthetic.make_cut(MIXED, 6), tmp_path / "no" / "a.kvpack")
    assert caught.value.code == "no-such-folder"


def test_the_needed_rows_are_the_least_that_a_pack_stores() -> None:
    cut = synthetic.make_cut(synthetic.EVERY_KIND, 29)
    for key, rows in needed_rows(synthetic.EVERY_KIND, 29, 29).items():
        assert cut.stored[key].contains(rows)
        assert cut.specs[key].unit is not Unit.STATE or rows.count == cut.specs[key].row_bytes
