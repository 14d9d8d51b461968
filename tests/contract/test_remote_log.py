"""What makes many machines agree: the log, its checkpoints, leases, and a quota that holds for all."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvpack.errors import StoreError
from kvpack.store import PrefixStore, put_turn
from kvpack.store.remote import RemoteStore
from kvpack.store.remote_log import Event
from tests.contract.sessions import FULL, SLIDING, WHO, cut_of, tokens
from tests.contract.store_contract import IDS, installed, position_of

Open = Callable[..., RemoteStore]


def rows_of(store: RemoteStore) -> list[Any]:
    return [(e.pack_id, e.cuts, e.hits, e.pinned, e.retired, e.parent, e.kept) for e in store.ls()]


def test_events_survive_their_bytes() -> None:
    event = Event(drop=(b"a" * 32,), add=(b"record",), pin=(b"b" * 32,), unpin=(), used=(b"c" * 32, b"d" * 32))
    assert Event.parse(event.to_bytes()) == event
    for damaged in (b"", event.to_bytes()[:-1], event.to_bytes()[:-1] + b"\0"):
        with pytest.raises(StoreError) as caught:
            Event.parse(damaged)
        assert caught.value.code == "bad-log"


def test_who_lags_behind_a_checkpoint_catches_up(open_remote: Open, tmp_path: Path) -> None:
    writer, behind = open_remote(), open_remote()
    for end in (300, 500, 700):
        put_turn(writer, cut_of(SLIDING, IDS[:end]), keep_cuts=2)
    assert position_of(behind.longest(IDS[:700], WHO, SLIDING)) == 700
    kept = open_remote(mirror=tmp_path / "mirror")
    kept.close()
    writer.put(cut_of(FULL, IDS[:400]))
    writer.pin(writer.ls()[0].pack_id)
    hit = writer.longest(IDS[:400], WHO, FULL)
    assert hit is not None
    hit.confirm()
    assert writer.log.checkpoint()
    assert not writer.log.checkpoint()
    assert len(writer.bucket.list("log")) == 1
    wanted = rows_of(writer)
    late = [behind, open_remote(), open_remote(mirror=tmp_path / "mirror")]
    assert [rows_of(store) for store in late] == [wanted] * 3
    behind.put(cut_of(FULL, tokens(50, 2)))
    for store in (*late, writer):
        assert len(rows_of(store)) == 5
        installed(store, store.longest(IDS[:700], WHO, SLIDING), SLIDING)
    assert writer.log.checkpoint()
    assert len(writer.bucket.list("checkpoint")) == 1
    assert open_remote().fsck().clean


def test_a_number_that_a_checkpoint_freed_is_not_written_to(open_remote: Open) -> None:
    writer, asleep = open_remote(), open_remote()
    for number in range(4):
        writer.put(cut_of(FULL, tokens(50, number)))
    assert writer.log.checkpoint()
    # It decided before it fell asleep; its number is free again by now.
    name = writer.ls()[0].pack_id
    assert not asleep.log.append(Event(pin=(name,)), expected=0)
    assert not any(entry.pinned for entry in open_remote().ls())
    asleep.pin(name)
    assert [entry.pinned for entry in open_remote().ls()].count(True) == 1


def test_an_index_that_is_lost_follows_the_log_again(open_remote: Open) -> None:
    store = open_remote()
    put_turn(store, cut_of(FULL, IDS[:300]))
    wanted = rows_of(store)
    (store.folder.root / "index.sqlite").unlink()
    assert rows_of(store) == wanted


def test_what_another_machine_reads_is_not_removed(open_remote: Open) -> None:
    writer, reader = open_remote(), open_remote()
    entry = writer.put(cut_of(FULL, IDS[:300]))
    stored = reader.get(entry.pack_id)
    assert stored is not None
    assert (writer.gc(0).removed, writer.gc(0).leased) == ((), (entry.pack_id,))
    stored.close()
    assert writer.gc(0).removed == (entry.pack_id,)
    assert reader.get(entry.pack_id) is None
    assert writer.bucket.list("leases") == []


def test_a_lease_that_came_in_between_brings_the_pack_back(open_remote: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack.store import remote_upkeep

    writer, reader = open_remote(), open_remote()
    entry = writer.put(cut_of(FULL, IDS[:300]))
    opened: list[Any] = []
    real = remote_upkeep.leased

    def leased(store: RemoteStore) -> set[bytes]:
        held = real(store)
        if not opened:  # right after the collection has looked for the first time
            opened.append(reader.get(entry.pack_id))
        return held

    monkeypatch.setattr(remote_upkeep, "leased", leased)
    assert writer.gc(0).removed == ()
    with opened[0] as stored:
        stored.cut().read_rows(stored.cut().stored, lambda *_: None)
    assert position_of(open_remote().longest(IDS[:300], WHO, FULL)) == 300


def test_a_quota_holds_for_all_writers_together(open_remote: Open) -> None:
    size = open_remote().put(cut_of(FULL, tokens(64, 99))).stored_bytes
    stores = [open_remote(quota=4 * size) for _ in range(4)]

    def fill(number: int) -> None:
        for seed in range(4):
            stores[number].put(cut_of(FULL, tokens(64, 10 * number + seed)))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fill, range(4)))
    assert stores[0].stats().stored_bytes == 4 * size
    assert len([e for e in stores[0].bucket.list("objects") if not e.name.endswith(".record")]) == 4
    for entry in stores[0].ls():
        stores[0].pin(entry.pack_id)
    with pytest.raises(StoreError) as caught:
        stores[1].put(cut_of(FULL, tokens(64, 77)))
    assert caught.value.code == "quota-exceeded"
    assert stores[2].fsck().clean


def test_what_a_dead_writer_left_comes_back_or_goes(open_remote: Open) -> None:
    store = open_remote()
    entry = store.put(cut_of(FULL, IDS[:300]))
    name = f"objects/{entry.name[:2]}/{entry.name}"
    store.log.append(Event(drop=(entry.pack_id,)))  # as if its event had never been written
    assert store.longest(IDS[:300], WHO, FULL) is None
    assert store.fsck().adopted == (entry.pack_id,)
    assert position_of(store.longest(IDS[:300], WHO, FULL)) == 300
    other = "objects/00/" + "00" * 32
    store.bucket.create(other, b"half")
    assert store.gc().leftovers == (other,)
    store.bucket.delete([name])
    assert store.fsck().forgotten == (entry.pack_id,)
    assert store.longest(IDS[:300], WHO, FULL) is None


def test_without_obstore_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    for url in ("s3://bucket/p", "gs://bucket/p", "az://bucket/p", "https://host/p", "tiered:/nowhere,s3://bucket/p"):
        with pytest.raises(StoreError) as caught:
            PrefixStore.open(url)
        assert caught.value.code == "missing-extra"
        assert "kvpack[s3]" in (caught.value.hint or "")
