"""The local store: the contract, and what is special about a folder."""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
from pathlib import Path
from typing import Any

import pytest

import kvpack
from kvpack.errors import KvpackError, StoreError, UsageError
from kvpack.store import PrefixStore, put_turn
from kvpack.store.local import LocalStore
from kvpack.store.objects import parse_name
from tests.conftest import SmallFileSystem
from tests.contract.sessions import FULL, RECURRENT, SLIDING, WHO, cut_of, same_rows, tokens
from tests.contract.store_contract import IDS, OpenStore, StoreContract, installed, position_of


class TestLocalStore(StoreContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        def open_it(**options: Any) -> LocalStore:
            store = PrefixStore.open(f"file:{tmp_path / 'store'}", **{"grace": 0, "durability": "none"} | options)
            assert isinstance(store, LocalStore)
            return store

        return open_it


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore.open(tmp_path / "store", grace=0)


def objects(store: LocalStore) -> list[Path]:
    return sorted(p for p in (store.folder.root / "objects").glob("*/*") if not p.suffix)


def test_the_layout(store: LocalStore) -> None:
    entry = store.put(cut_of(FULL, IDS[:300]))
    root = store.folder.root
    path = root / "objects" / entry.name[:2] / entry.name
    assert kvpack.inspect(path).pack_id == entry.pack_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((root / "key").stat().st_mode) == 0o600
    assert path.with_name(entry.name + ".record").is_file()
    assert os.listdir(root / "tmp") == []
    assert (root / "version").read_text() == "kvpack-store 1\n"
    assert str(IDS[5]).encode() not in path.with_name(entry.name + ".record").read_bytes()


def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("file:a", f"file:{tmp_path}/b", f"file://{tmp_path}/c", f"file://localhost{tmp_path}/d", "e", "./f"):
        PrefixStore.open(url)
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c", "d", "e", "f"]
    for url, code in (("file://host/x", "bad-url"), ("file:", "bad-url"), ("ftp:x", "unknown-scheme")):
        with pytest.raises(StoreError) as caught:
            PrefixStore.open(url)
        assert caught.value.code == code


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        LocalStore.open(tmp_path / "none", create=False)
    assert caught.value.code == "no-such-store"
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "mum.txt").write_text("hello")
    with pytest.raises(StoreError) as caught:
        LocalStore.open(tmp_path / "letters")
    assert caught.value.code == "not-a-store"
    assert os.listdir(tmp_path / "letters") == ["mum.txt"]
    LocalStore.open(tmp_path / "new").close()
    (tmp_path / "new" / "version").write_text("kvpack-store 2\n")
    with pytest.raises(StoreError) as caught:
        LocalStore.open(tmp_path / "new")
    assert caught.value.code == "store-version"
    for options in ({"durability": "some"}, {"key": b"short"}):
        with pytest.raises(UsageError):
            LocalStore.open(tmp_path / "other", **options)


def test_a_network_file_system_only_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpack.store.objects.file_system_magic", lambda path: 0x6969)
    with pytest.raises(StoreError) as caught:
        LocalStore.open(tmp_path / "store")
    assert (caught.value.code, caught.value.found) == ("network-file-system", "NFS")
    LocalStore.open(tmp_path / "store", allow_network=True)


@pytest.mark.parametrize("name", ["../x", "/abs", "a\0b", "", "A" * 64, "a" * 63, "a" * 64 + "\n"])
def test_names_that_escape_are_refused(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_name(name)
    assert caught.value.code == "bad-pack-id"
    assert parse_name("ab" * 32) == b"\xab" * 32


def test_links_are_not_followed(store: LocalStore, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entry = store.put(cut_of(FULL, IDS[:300]))
    path = objects(store)[0]
    outside = tmp_path / "outside"
    path.rename(outside)
    before = (outside.read_bytes(), outside.stat().st_mtime_ns)
    path.symlink_to(outside)
    assert store.longest(IDS[:300], WHO, FULL) is None
    assert store.get(entry.pack_id) is None
    assert caplog.records
    store.fsck()
    again = store.put(cut_of(FULL, IDS[:300]))
    assert again.new
    store.gc(0)
    assert (outside.read_bytes(), outside.stat().st_mtime_ns) == before


def test_a_folder_that_is_a_link_is_refused(store: LocalStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in (f"{n:02x}" for n in range(256)):
        (store.folder.root / "objects" / name).symlink_to(outside)
    with pytest.raises(StoreError) as caught:
        store.put(cut_of(FULL, IDS[:300]))
    assert caught.value.code == "symlink"
    assert os.listdir(outside) == []
    (store.folder.root / "tmp").rmdir()
    (store.folder.root / "tmp").symlink_to(outside)
    with pytest.raises(StoreError):
        LocalStore.open(store.folder.root)


def test_foreign_files_are_left_alone(store: LocalStore) -> None:
    store.put(cut_of(FULL, IDS[:300]))
    root = store.folder.root
    mine = objects(store)[0]
    strangers = [root / "README", root / "objects" / "note", mine.parent / "x.txt", mine.parent / ("0" * 64 + ".bak")]
    for path in strangers:
        path.write_text("mine")
    report = store.fsck()
    assert set(report.foreign) == {str(p.relative_to(root)) for p in strangers}
    store.gc(0)
    assert all(path.read_text() == "mine" for path in strangers)
    LocalStore.open(root).close()


@pytest.mark.parametrize("size", [-1, 0])
def test_a_truncated_pack_is_a_miss_and_the_next_put_repairs_it(
    store: LocalStore, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    cut = cut_of(FULL, IDS[:300])
    store.put(cut)
    hit = store.longest(IDS[:300], WHO, FULL)
    path = objects(store)[0]
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    assert hit is not None
    if size < 0:
        assert store.get(hit) is None
    else:
        assert store.longest(IDS[:300], WHO, FULL) is None
    assert any(record.levelno == logging.WARNING for record in caplog.records)
    assert store.longest(IDS[:300], WHO, FULL) is None
    assert store.put(cut).new
    same_rows(kvpack.load(objects(store)[0], allow_unsigned=True), cut)
    assert position_of(store.longest(IDS[:300], WHO, FULL)) == 300
    assert store.stats().quarantined


def test_a_damaged_tile_is_found_by_the_reader_and_by_fsck(store: LocalStore) -> None:
    store.put(cut_of(FULL, IDS[:300]))
    path = objects(store)[0]

    def damage() -> None:
        content = bytearray(objects(store)[0].read_bytes())
        content[kvpack.inspect(objects(store)[0]).records[-1].offset] ^= 1
        objects(store)[0].write_bytes(content)

    damage()
    hit = store.longest(IDS[:300], WHO, FULL)
    assert hit is not None
    stored = store.get(hit)
    assert stored is not None
    with stored, pytest.raises(KvpackError):
        stored.cut().read_rows(stored.cut().stored, lambda *_: None)
    stored.reject()
    assert store.longest(IDS[:300], WHO, FULL) is None
    assert not path.exists()
    store.put(cut_of(FULL, IDS[:300]))
    damage()
    report = store.fsck()
    assert len(report.quarantined) == 1
    assert "damaged" in report.quarantined[0][1]
    assert not store.fsck().quarantined
    assert store.longest(IDS[:300], WHO, FULL) is None


def test_a_put_over_a_damaged_object_of_the_same_name_repairs_it(store: LocalStore, tmp_path: Path) -> None:
    store.put(cut_of(FULL, IDS[:300]))
    file = tmp_path / "a.kvpack"
    store.export(store.ls()[0].pack_id, file)
    os.truncate(objects(store)[0], 5000)
    with sqlite3.connect(store.folder.root / "index.sqlite") as connection:
        connection.executescript("DELETE FROM packs; DELETE FROM nodes; DELETE FROM cuts")
    connection.close()
    store.put_file(file)
    assert objects(store)[0].read_bytes() == file.read_bytes()
    assert position_of(store.longest(IDS[:300], WHO, FULL)) == 300


def test_a_pack_file_is_stored_with_its_signature(store: LocalStore, tmp_path: Path) -> None:
    key = kvpack.SigningKey.generate()
    kvpack.save(cut_of(SLIDING, IDS[:300]), tmp_path / "a", sign=key)
    entry = store.put_file(tmp_path / "a")
    assert kvpack.inspect(objects(store)[0], trust=key.public).verification.trusted
    installed(store, store.longest(IDS[:300], WHO, SLIDING), SLIDING)
    with kvpack.open_pack(tmp_path / "a", allow_unsigned=True) as pack:
        kvpack.save(cut_of(SLIDING, IDS[:400]), tmp_path / "b", parent=pack.cut())
    assert store.put_file(tmp_path / "b").parent == entry.pack_id
    installed(store, store.longest(IDS[:400], WHO, SLIDING), SLIDING)
    other = LocalStore.open(tmp_path / "other")
    with pytest.raises(StoreError) as caught:
        other.put_file(tmp_path / "b")
    assert caught.value.code == "parent-missing"


@pytest.mark.parametrize("harm", ["deleted", "zeroed", "garbage", "version", "rows", "other"])
def test_an_index_that_is_gone_or_damaged_is_rebuilt(store: LocalStore, harm: str) -> None:
    for end in (300, 700):
        put_turn(store, cut_of(SLIDING, IDS[:end]), keep_cuts=2)
    store.put(cut_of(FULL, IDS[:500]))
    store.pin(store.ls()[0].pack_id)
    wanted = {(e.pack_id, e.position, e.cuts, e.pinned, e.parent, e.kept) for e in store.ls()}
    path = store.folder.root / "index.sqlite"
    if harm == "deleted":
        path.unlink()
    elif harm == "rows":
        with sqlite3.connect(path) as connection:
            connection.executescript("DELETE FROM packs WHERE number = 1; DELETE FROM nodes WHERE pack = 2")
        connection.close()
        assert store.fsck().adopted
    else:
        store.close()
        for suffix in ("-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        if harm == "version":
            with sqlite3.connect(path) as connection:
                connection.execute("PRAGMA user_version = 7")
            connection.close()
        else:
            content = {"zeroed": b"", "garbage": os.urandom(8192), "other": b"SQLite format 3\x00" + bytes(4080)}[harm]
            path.write_bytes(content)
    for again in (store, LocalStore.open(store.folder.root, grace=0)):
        assert {(e.pack_id, e.position, e.cuts, e.pinned, e.parent, e.kept) for e in again.ls()} == wanted
        installed(again, again.longest(IDS[:700], WHO, SLIDING), SLIDING)
        assert again.fsck().clean


def test_what_another_handle_wrote_to_a_replaced_index_is_not_lost(store: LocalStore) -> None:
    other = LocalStore.open(store.folder.root, grace=0)
    (store.folder.root / "index.sqlite").unlink()
    store.put(cut_of(FULL, IDS[:300]))
    other.put(cut_of(FULL, IDS[:400]))
    assert {e.position for e in store.ls()} == {e.position for e in other.ls()} == {300, 400}


def test_leftovers_go_and_packs_without_rows_come_back(store: LocalStore) -> None:
    store.put(cut_of(FULL, IDS[:300]))
    path = objects(store)[0]
    (store.folder.root / "tmp" / "dead.pack").write_bytes(b"half")
    orphan = path.with_name(path.name[:2] + "0" * 62)
    orphan.write_bytes(path.read_bytes())
    alone = path.with_name(path.name[:2] + "1" * 62 + ".record")
    alone.write_bytes(b"x")
    with sqlite3.connect(store.folder.root / "index.sqlite") as connection:
        connection.executescript(
            "DELETE FROM packs; DELETE FROM nodes; INSERT INTO reservations VALUES ('dead.pack', 999)"
        )
    connection.close()
    with store.folder.temporary(".pack") as alive:
        leftovers = store.gc().leftovers
        assert alive.path.exists()
    assert len(leftovers) == 3
    assert not orphan.exists()
    assert not alone.exists()
    assert (store.stats().packs, store.stats().reserved) == (1, 0)
    assert position_of(store.longest(IDS[:300], WHO, FULL)) == 300


def test_fsck_deletes_nothing(store: LocalStore) -> None:
    store.put(cut_of(FULL, IDS[:300]))
    path = objects(store)[0]
    orphan = path.with_name(path.name[:2] + "0" * 62)
    orphan.write_bytes(b"not a pack")
    alone = path.with_name(path.name[:2] + "1" * 62 + ".record")
    alone.write_bytes(b"x")
    assert {Path(name).name for name, _ in store.fsck().quarantined} == {orphan.name, alone.name}
    kept = {p.name.split(".")[0]: p.read_bytes() for p in (store.folder.root / "quarantine").iterdir()}
    assert kept == {orphan.name: b"not a pack", alone.name.split(".")[0]: b"x"}
    assert store.fsck().clean


def test_a_quota_is_never_exceeded(tmp_path: Path) -> None:
    size = LocalStore.open(tmp_path / "a").put(cut_of(FULL, tokens(64))).stored_bytes
    store = LocalStore.open(tmp_path / "b", quota=5 * size, grace=0)
    for seed in range(12):
        store.put(cut_of(FULL, tokens(64, seed)))
        assert store.stats().stored_bytes <= 5 * size
        assert store.stats().reserved == 0
    assert store.stats().stored_bytes >= 3 * size
    for entry in store.ls():
        store.pin(entry.pack_id)

    def fill() -> None:
        for seed in range(20, 30):
            store.pin(store.put(cut_of(FULL, tokens(64, seed))).pack_id)

    with pytest.raises(StoreError) as caught:
        fill()
    assert caught.value.code == "quota-exceeded"
    assert (store.stats().reserved, os.listdir(store.folder.root / "tmp")) == (0, [])


@pytest.mark.parametrize("jump", [-(10**9), 10**9])
def test_a_clock_that_jumps_neither_keeps_for_ever_nor_loses_the_newest(tmp_path: Path, jump: int) -> None:
    now = [1.8e9]
    store = LocalStore.open(tmp_path / "store", grace=100, now=lambda: now[0])
    old = store.put(cut_of(FULL, tokens(64, 1)))
    assert store.gc(0).removed == ()  # young
    now[0] += jump
    new = store.put(cut_of(FULL, tokens(64, 2)))
    assert position_of(store.longest(tokens(64, 1), WHO, FULL)) == 64
    assert store.gc(0).removed == (old.pack_id,)
    assert [e.pack_id for e in store.ls()] == [new.pack_id]


def test_a_full_disk_is_one_clear_refusal(small_file_system: Any) -> None:
    disk: SmallFileSystem = small_file_system(1024)
    store = LocalStore.open(disk.path / "store", grace=0)

    def fill() -> None:
        for seed in range(64):
            store.put(cut_of(FULL, tokens(700, seed)))

    with pytest.raises(StoreError) as caught:
        fill()
    assert caught.value.code == "disk-full"
    assert os.listdir(store.folder.root / "tmp") == []
    for entry in store.ls():
        assert position_of(store.longest(tokens(700, 0), WHO, FULL)) == 700
        stored = store.get(entry.pack_id)
        assert stored is not None
        stored.close()
    store.close()


def test_an_engine_survives_a_store_that_vanishes(store: LocalStore, caplog: pytest.LogCaptureFixture) -> None:
    import shutil

    entry = store.put(cut_of(FULL, IDS[:300]))
    shutil.rmtree(store.folder.root)
    assert store.longest(IDS[:300], WHO, FULL) is None
    assert store.get(entry.pack_id) is None
    assert caplog.records
    with pytest.raises(StoreError):
        store.gc()
    with pytest.raises(StoreError):
        store.put(cut_of(FULL, IDS[:300]))


def test_twenty_turns_cost_what_is_kept(tmp_path: Path) -> None:
    """Growing rows once, one tail and one state a kept cut; after a collection at most 1.15 of that."""
    from kvpack.model.geometry import Geometry
    from tests import synthetic

    ids = tokens(32_768)
    ends = [32_768 * turn // 20 for turn in range(1, 21)]
    mixed = Geometry((synthetic.full(2, 32), synthetic.sliding(512, 8, 64), synthetic.recurrent()))
    for name, geometry, kept in (
        ("full", Geometry((synthetic.full(2, 32), synthetic.full(2, 32))), 1),
        ("mixed", mixed, 1),
        ("mixed3", mixed, 3),
    ):
        store = LocalStore.open(tmp_path / name, grace=0, durability="none")
        for end in ends:
            put_turn(store, cut_of(geometry, ids[:end]), codec="raw", keep_cuts=kept)
        store.gc()
        last = cut_of(geometry, ids)
        growing = sum(p.buffer.nbytes for key, p in last.planes.items() if (key.layer, key.role) not in _per_cut(last))
        per_cut = sum(p.buffer.nbytes for key, p in last.planes.items() if (key.layer, key.role) in _per_cut(last))
        assert store.stats().stored_bytes <= 1.15 * (growing + kept * per_cut), name
        assert position_of(store.longest(ids, WHO, geometry)) == 32_768
        if name != "full":
            for end in ends[-kept:]:
                assert position_of(store.longest(ids[:end], WHO, geometry)) == end
        assert store.fsck().clean
        same_rows(next_cut(store), last)


def _per_cut(cut: kvpack.Cut) -> set[tuple[int, str]]:
    layers = {(key.layer, key.role) for key, layer, _ in cut.geometry.planes() if layer.kind != "full"}
    return layers | {(-1, "logits")}


def next_cut(store: LocalStore) -> Any:
    stored = store.get(store.ls()[0].pack_id)
    assert stored is not None
    return stored.cut()


def test_flattening_copies_tiles_as_they_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack.model.geometry import Geometry
    from tests import synthetic

    geometry = Geometry((synthetic.full(8, 128), synthetic.recurrent()))  # blocks of 512 rows
    store = LocalStore.open(tmp_path / "store", grace=0, durability="none")
    ids = tokens(3 * 512)
    for end in (512, 1024, 1300, 1536):
        entry = put_turn(store, cut_of(geometry, ids[:end]), codec="raw", keep_cuts=1)
    encoded: list[int] = []
    monkeypatch.setattr(
        "kvpack.pack.writer.encode", lambda codec, raw, *a: (encoded.append(memoryview(raw).nbytes), (0, raw))[1]
    )
    flat = store.flatten(entry.pack_id)
    block = 512 * 8 * 128 * 2
    # Only the block that two turns share is joined and encoded again, for K and V, and the short planes.
    assert sorted(encoded)[-2:] == [block, block]
    assert sum(size == block for size in encoded) == 2
    assert (flat.chain, flat.cuts[-1].state_id) == (1, entry.cuts[-1].state_id)
    store.gc()
    assert [e.pack_id for e in store.ls()] == [flat.pack_id]
    same_rows(next_cut(store), cut_of(geometry, ids))
    installed(store, store.longest(ids, WHO, geometry), geometry)


def test_signed_turns_are_not_flattened_without_a_key(tmp_path: Path) -> None:
    from kvpack.trust import build_region, sign

    key = kvpack.SigningKey.generate()
    signer = lambda signed: build_region([sign(signed, key)])  # noqa: E731
    store = LocalStore.open(tmp_path / "store", grace=0)
    for end in (100, 200):
        entry = put_turn(store, cut_of(RECURRENT, IDS[:end]), sign=signer)
    with pytest.raises(StoreError) as caught:
        store.flatten(entry.pack_id)
    assert caught.value.code == "signer-needed"
    store.gc()
    assert store.stats().packs == 2
    store.flatten(entry.pack_id, sign=signer)
    store.gc()
    assert store.stats().packs == 1
    assert kvpack.inspect(objects(store)[0], trust=key.public).verification.trusted
