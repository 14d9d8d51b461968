"""Several cuts in one pack, and deltas against a parent's state id."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import kvpack
from kvpack.errors import CompatibilityError, FormatError, KvpackError, TrustError
from kvpack.live import transfer
from kvpack.live.cache import LiveCache
from kvpack.model.geometry import Geometry, PlaneKey
from kvpack.model.planes import TOKENS
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import Cut
from tests import synthetic
from tests.unit.test_live_cache import WHO, Producer, check

GEOMETRY = Geometry(
    (
        synthetic.full(),
        synthetic.sliding(8),
        synthetic.sliding(6, sink=2),
        synthetic.latent(pool=4),
        synthetic.recurrent(),
    )
)
POSITIONS = (5, 12, 13, 29)


def captures(positions: tuple[int, ...] = POSITIONS, geometry: Geometry = GEOMETRY) -> list[Cut]:
    producer = Producer(LiveCache.allocate(geometry, max_context=64))
    found = []
    for position in positions:
        producer.append(position - producer.cache.position)
        producer.cache.set_extra("logits", position.to_bytes(4, "little") * 4, synthetic.F32, (4,))
        found.append(transfer.capture(producer.cache, WHO))
    return found


def same(one: Cut, two: Cut) -> None:
    for key, rows in two.stored.items():
        for first, end in rows:
            assert bytes(one.rows(key, first, end)) == bytes(two.rows(key, first, end)), str(key)


@pytest.mark.parametrize("codec", ["raw", "split"])
def test_a_pack_of_several_cuts_restores_at_each(tmp_path: Path, codec: str) -> None:
    cuts = captures()
    path = tmp_path / "a.kvpack"
    written = kvpack.save(cuts, path, codec=codec)
    alone = {c.record.position: kvpack.save(c, tmp_path / f"{c.record.position}").state_ids for c in cuts}
    assert written.state_ids == {p: ids[p] for p, ids in alone.items()}
    kvpack.verify(path, allow_unsigned=True).require()
    with kvpack.open_pack(path, allow_unsigned=True) as pack:
        assert pack.chain.positions == POSITIONS
        for cut in cuts:
            cache = LiveCache.allocate(GEOMETRY, max_context=64)
            transfer.install(cache, pack.cut(cut.record.position), WHO)
            back = transfer.capture(cache, WHO)
            check(back)
            assert back.tokens == cut.tokens
            assert cache.generation.extras["logits"].content == cut.record.position.to_bytes(4, "little") * 4


def test_several_cuts_store_growing_rows_once_and_tails_as_their_union(tmp_path: Path) -> None:
    kvpack.save(captures(), tmp_path / "a.kvpack", codec="raw")
    manifest = kvpack.inspect(tmp_path / "a.kvpack").manifest
    stored = {str(p.spec.key): p.rows for p in manifest.planes}
    assert stored["layer.0.k"] == RowSet.of((0, 29))
    assert stored["layer.1.k"] == RowSet.of((0, 13), (21, 29))
    assert stored["layer.4.ssm"] == RowSet.of((0, 4))
    assert stored["session.logits"] == RowSet.of((0, 4))


def test_a_restore_at_one_cut_reads_only_its_tiles(tmp_path: Path) -> None:
    geometry = Geometry((synthetic.sliding(512, 8, 128), synthetic.recurrent()))
    producer = Producer(LiveCache.allocate(geometry, max_context=2048))
    marks = []
    for position in (600, 1400):
        producer.append(position - producer.cache.position)
        marks.append(transfer.capture(producer.cache, WHO))
    kvpack.save(marks, tmp_path / "a.kvpack", codec="raw")
    with kvpack.open_pack(tmp_path / "a.kvpack", allow_unsigned=True) as pack:
        view = pack.cut(600)
        need = {
            key: rows.intersection(RowSet.of((0, 600))) for key, rows in view.stored.items() if key.role in ("k", "v")
        }
        one_tail = 2 * 512 * 8 * 128 * 2
        assert view.bytes_to_read(need) <= one_tail + 2 * 2048


def deltas(folder: Path, positions: tuple[int, ...] = POSITIONS, **options: object) -> list[Path]:
    """A chain of packs, each continuing the one before."""
    paths: list[Path] = []
    for cut in captures(positions):
        path = folder / f"{cut.record.position:03}.kvpack"
        if paths:
            with kvpack.open_pack(paths[-1], allow_unsigned=True, parents=folder) as parent:
                kvpack.save(cut, path, parent=parent.cut(), **options)  # type: ignore[arg-type]
        else:
            kvpack.save(cut, path, **options)  # type: ignore[arg-type]
        paths.append(path)
    return paths


def test_a_chain_restores_what_one_whole_pack_would(tmp_path: Path) -> None:
    paths = deltas(tmp_path)
    whole = captures()
    stored = {str(p.spec.key): p.rows for p in kvpack.inspect(paths[-1]).manifest.planes}
    assert stored["layer.0.k"] == RowSet.of((13, 29))
    assert stored["layer.3.index_key"] == RowSet.of((3, 7))
    assert stored["layer.1.k"] == RowSet.of((21, 29))
    assert stored["session.tokens"] == RowSet.of((13, 29))
    same(kvpack.load(paths[-1], allow_unsigned=True, parents=tmp_path), whole[-1])
    with kvpack.open_pack(paths[-1], allow_unsigned=True, parents=tmp_path) as pack:
        assert pack.chain.positions == POSITIONS
        for cut in whole:
            cache = LiveCache.allocate(GEOMETRY, max_context=64)
            transfer.install(cache, pack.cut(cut.record.position), WHO)
            check(transfer.capture(cache, WHO))
    kvpack.verify(paths[-1], allow_unsigned=True).require()


def test_the_state_id_does_not_know_about_deltas_and_flattening_orphans_nobody(tmp_path: Path) -> None:
    paths = deltas(tmp_path)
    whole = kvpack.save(captures()[-1], tmp_path / "whole")
    assert kvpack.inspect(paths[-1]).manifest.cuts[-1].state_id == whole.state_ids[29]
    with kvpack.open_pack(paths[-2], allow_unsigned=True, parents=tmp_path) as pack:
        flat = kvpack.save(pack.cut(), tmp_path / "flat.kvpack", codec="zstd")
    for path in paths[:-1]:
        path.unlink()
    assert flat.path.exists()
    same(kvpack.load(paths[-1], allow_unsigned=True, parents=tmp_path), captures()[-1])


def test_a_missing_or_damaged_parent_is_refused_by_name(tmp_path: Path) -> None:
    paths = deltas(tmp_path)
    with pytest.raises(CompatibilityError) as caught:
        kvpack.load(paths[-1], allow_unsigned=True)
    assert caught.value.code == "parent-missing"
    paths[0].rename(tmp_path / "elsewhere")
    with pytest.raises(CompatibilityError) as caught:
        kvpack.load(paths[-1], allow_unsigned=True, parents=tmp_path)
    assert caught.value.code == "parent-missing"
    (tmp_path / "elsewhere").rename(paths[0])
    content = bytearray(paths[0].read_bytes())
    content[kvpack.inspect(paths[0]).records[1].offset] ^= 1
    paths[0].write_bytes(content)
    with pytest.raises(KvpackError) as caught2:
        kvpack.load(paths[-1], allow_unsigned=True, parents=tmp_path)
    assert caught2.value.exit_status == 11


def test_every_parent_passes_trust_on_its_own(tmp_path: Path) -> None:
    key = kvpack.SigningKey.generate()
    paths = deltas(tmp_path, sign=key)
    kvpack.load(paths[-1], trust=key.public, parents=tmp_path)
    with kvpack.open_pack(paths[0], allow_unsigned=True) as pack:
        kvpack.save(pack.cut(), tmp_path / "000.kvpack")  # unsigned, and found first
    with pytest.raises(TrustError):
        kvpack.load(paths[1], trust=key.public, parents=tmp_path)


def test_another_session_is_not_a_continuation(tmp_path: Path) -> None:
    paths = deltas(tmp_path, (5, 12))
    producer = Producer(LiveCache.allocate(GEOMETRY, max_context=64))
    producer.append(12)
    producer.append(9)
    layer = producer.cache.generation.layers[0]
    layer.device.fill(layer.planes["k"].buffer, 0, 4, 0xFF)
    with kvpack.open_pack(paths[0], allow_unsigned=True) as parent:
        with pytest.raises(CompatibilityError) as caught:
            kvpack.save(transfer.capture(producer.cache, WHO), tmp_path / "x", parent=parent.cut())
        assert (caught.value.code, caught.value.plane) == ("not-a-continuation", "layer.0.k")
        producer.cache.generation.tokens[2] = 77
        with pytest.raises(CompatibilityError, match="tokens"):
            kvpack.save(transfer.capture(producer.cache, WHO), tmp_path / "x", parent=parent.cut())
        with pytest.raises(CompatibilityError) as caught:
            kvpack.save(captures((3,))[0], tmp_path / "x", parent=parent.cut())
        assert caught.value.code == "parent-too-deep"
    assert not (tmp_path / "x").exists()


def test_cuts_of_two_sessions_do_not_mix(tmp_path: Path) -> None:
    one, two = captures((5, 9))
    for cuts, code in (((two, one), "cuts-differ"), ((one, one), "cuts-differ")):
        with pytest.raises(CompatibilityError) as caught:
            kvpack.save(cuts, tmp_path / "x")
        assert caught.value.code == code
    changed = bytearray(two.planes[TOKENS].buffer)
    changed[0] ^= 1
    other = replace(two, planes={**two.planes, TOKENS: replace(two.planes[TOKENS], buffer=memoryview(changed))})
    with pytest.raises(CompatibilityError, match="tokens"):
        kvpack.save((one, other), tmp_path / "x")


def test_a_chain_is_at_most_eight_long(tmp_path: Path) -> None:
    paths = deltas(tmp_path, tuple(range(3, 20, 2)))
    assert len(paths) == 9
    kvpack.load(paths[7], allow_unsigned=True, parents=tmp_path)
    with pytest.raises(FormatError) as caught:
        kvpack.load(paths[8], allow_unsigned=True, parents=tmp_path)
    assert caught.value.code == "chain-too-long"


def test_a_streaming_capture_gives_the_same_pack(tmp_path: Path) -> None:
    producer = Producer(LiveCache.allocate(GEOMETRY, max_context=64))
    producer.append(29)
    with transfer.holding(producer.cache, WHO) as live:
        a = kvpack.save(live, tmp_path / "a", salt=b"s" * 32, created=1)
    b = kvpack.save(transfer.capture(producer.cache, WHO), tmp_path / "b", salt=b"s" * 32, created=1)
    assert a.pack_id == b.pack_id
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_growing_planes_restore_at_any_row_of_the_chain(tmp_path: Path) -> None:
    geometry = Geometry((synthetic.full(),))
    paths: list[Path] = []
    for cut in captures((5, 12, 29), geometry):
        paths.append(tmp_path / f"{cut.record.position:03}.kvpack")
        if len(paths) > 1:
            with kvpack.open_pack(paths[-2], allow_unsigned=True, parents=tmp_path) as parent:
                kvpack.save(cut, paths[-1], parent=parent.cut())
        else:
            kvpack.save(cut, paths[-1])
    with kvpack.open_pack(paths[-1], allow_unsigned=True, parents=tmp_path) as pack:
        for at in (3, 11, 20):
            cache = LiveCache.allocate(geometry, max_context=64)
            transfer.install(cache, pack.cut(), WHO, at=at)
            back = transfer.capture(cache, WHO)
            assert bytes(back.planes[PlaneKey("layer", 0, "k")].buffer) == bytes(
                captures((at,), geometry)[0].planes[PlaneKey("layer", 0, "k")].buffer
            )
