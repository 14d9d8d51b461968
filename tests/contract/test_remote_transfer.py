"""Packs on their way to and from a bucket: what was cut off goes on, and nothing is fetched that is not wanted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import kvpack
from kvpack.errors import CompatibilityError, IntegrityError, KvpackError, StoreError
from kvpack.model.geometry import Geometry
from kvpack.model.planes import needed_rows
from kvpack.store.bucket import Bucket
from kvpack.store.remote_transfer import pull
from kvpack.store.upload import upload
from tests import synthetic
from tests.contract.seaweed import Seaweed, proxy
from tests.contract.sessions import WHO, cut_of
from tests.contract.store_contract import IDS, position_of
from tests.contract.wide_packs import pack_file


def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest parts that S3 takes, two at a time."""
    monkeypatch.setattr("kvpack.store.upload.PART_BYTES", 5 << 20)
    monkeypatch.setattr("kvpack.store.upload._PARALLEL", 2)


def test_a_dead_writers_upload_goes_on(
    server: Seaweed, url: str, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_parts(monkeypatch)
    path = tmp_path / "big"
    path.write_bytes(os.urandom(22 << 20))
    with proxy(server.port) as wire:
        there = Bucket(url, config=server.config(wire.port))
        wire.cut(12 << 20)
        with pytest.raises(StoreError) as caught:
            upload(there, "objects/big", path)
        assert caught.value.code == "unreachable"
        assert bucket.head("objects/big") is None
        wire.cut(None)
        wire.passed = 0
        assert upload(there, "objects/big", path)
        assert wire.passed < 18 << 20
    found = bucket.read("objects/big", 0, 22 << 20)
    assert found is not None
    assert bytes(found[0]) == path.read_bytes()


def test_parts_of_other_bytes_are_sent_again(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_parts(monkeypatch)

    def stop() -> None:
        raise StoreError("stopped", "stopped")

    (tmp_path / "a").write_bytes(os.urandom(11 << 20))
    with pytest.raises(StoreError, match="stopped"):
        upload(bucket, "objects/x", tmp_path / "a", before_complete=stop)
    content = bytearray((tmp_path / "a").read_bytes())
    content[6 << 20] ^= 1
    (tmp_path / "b").write_bytes(content)
    assert upload(bucket, "objects/x", tmp_path / "b")
    found = bucket.read("objects/x", 0, 11 << 20)
    assert found is not None
    assert bytes(found[0]) == bytes(content)


def test_a_damaged_file_is_not_pushed(open_remote: Any, bucket: Bucket, tmp_path: Path) -> None:
    path = pack_file(tmp_path / "a.kvpack", 300)
    content = bytearray(path.read_bytes())
    content[kvpack.inspect(path).records[-1].offset] ^= 1
    path.write_bytes(content)
    with pytest.raises(IntegrityError):
        open_remote().put_file(path)
    assert bucket.list("objects") == []


def test_a_pull_goes_on_and_verifies_what_is_there(
    server: Seaweed, url: str, open_remote: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpack.store.remote_transfer._RUN_BYTES", 1 << 18)
    path = pack_file(tmp_path / "a.kvpack", 4000)
    size = path.stat().st_size
    pack_id = open_remote().put_file(path).pack_id
    out = tmp_path / "out"
    with proxy(server.port) as wire:
        there = Bucket(url, config=server.config(wire.port))
        wire.cut(size * 6 // 10)
        with pytest.raises(StoreError) as caught:
            pull(there, pack_id, out)
        assert caught.value.code == "unreachable"
        assert not out.exists()
        (partial,) = tmp_path.glob(".out.*.partial")
        with open(partial, "r+b") as file:  # what rotted meanwhile is fetched again
            at = kvpack.inspect(path).records[0].offset
            file.seek(at)
            file.write(b"\xff\xfe\xfd")
        wire.cut(None)
        wire.passed = 0
        resumed = pull(there, pack_id, out).resumed_bytes
        assert 0 < resumed < size
        assert wire.passed < size
    assert out.read_bytes() == path.read_bytes()
    assert list(tmp_path.glob(".out*")) == []
    with pytest.raises(KvpackError, match="exists"):
        pull(Bucket(url, config=server.config()), pack_id, out)


def test_a_pack_that_does_not_fit_is_never_fetched(server: Seaweed, url: str, open_remote: Any, tmp_path: Path) -> None:
    path = pack_file(tmp_path / "a.kvpack", 4000)
    pack_id = open_remote().put_file(path).pack_id

    def refuse(reader: object) -> None:
        raise CompatibilityError("geometry-differs", "no")

    with proxy(server.port) as wire:
        with pytest.raises(CompatibilityError):
            pull(Bucket(url, config=server.config(wire.port)), pack_id, tmp_path / "out", accept=refuse)
        assert wire.passed < path.stat().st_size // 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.kvpack"]


def test_only_the_tiles_of_the_wanted_cut_are_read(server: Seaweed, open_remote: Any) -> None:
    geometry = Geometry((synthetic.full(1, 4), *(synthetic.sliding(64, 8, 64) for _ in range(4))))
    open_remote().put([cut_of(geometry, IDS[:n]) for n in range(100, 1100, 100)], codec="raw")
    with proxy(server.port) as wire:
        store = open_remote(port=wire.port)
        hit = store.longest(IDS[:350], WHO, geometry)
        assert position_of(hit) == 300
        wire.passed = 0
        back = store.get(hit)
        tails = 4 * 2 * 65 * 8 * 64 * 2
        read: list[int] = []
        back.cut().read_rows(needed_rows(geometry, 300), lambda key, first, count, rows: read.append(len(rows)))
        whole = store.entry(hit.pack_id).stored_bytes
        assert wire.passed < (1 << 20) + 3 * tails < whole
        back.close()
