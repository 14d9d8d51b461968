"""A bucket shared by many: races, dead writers, broken connections, wrong credentials, careless servers."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import kvpack
from kvpack.errors import IntegrityError, StoreError
from kvpack.store import PrefixStore, put_turn
from kvpack.store.bucket import Bucket
from kvpack.store.remote_source import object_name
from kvpack.store.tiered import TieredStore
from kvpack.store.upload import upload
from tests.contract.seaweed import Seaweed, proxy
from tests.contract.sessions import FULL, SLIDING, WHO, cut_of, tokens
from tests.contract.store_contract import IDS, installed, position_of
from tests.contract.wide_packs import WIDE, pack_file


def warned(caplog: pytest.LogCaptureFixture) -> bool:
    return any(r.levelno == logging.WARNING and r.name == "kvpack.store" for r in caplog.records)


def test_of_many_writers_of_one_pack_one_wins(open_remote: Any, bucket: Bucket, tmp_path: Path) -> None:
    path = pack_file(tmp_path / "a.kvpack", 300)
    open_remote().close()
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda _: upload(bucket, "objects/one", path), range(8)))
    assert won.count(True) == 1
    stores = [open_remote() for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        entries = list(pool.map(lambda store: store.put_file(path), stores))
    assert len({entry.pack_id for entry in entries}) == 1
    assert [store.stats().packs for store in stores] == [1] * 6
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda pair: pair[1].put(cut_of(FULL, tokens(64, pair[0]))), enumerate(stores)))
    assert [[entry.pack_id for entry in store.ls()] for store in stores] == [
        [entry.pack_id for entry in stores[0].ls()]
    ] * 6
    assert stores[0].stats().packs == 7


@pytest.mark.parametrize("size", [5000, -1], ids=["half", "one byte"])
def test_a_truncated_object_is_a_miss_and_the_next_put_repairs_it(
    open_remote: Any, bucket: Bucket, size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = pack_file(tmp_path / "a.kvpack", 300)
    entry = open_remote().put_file(path)
    name = object_name(entry.pack_id)
    whole = path.read_bytes()

    def truncate() -> None:
        bucket.delete([name])
        bucket.create(name, whole[:size])

    truncate()
    store = open_remote()
    assert store.get(entry.pack_id) is None
    assert warned(caplog)
    assert store.longest(tokens(300), WHO, WIDE) is None
    assert open_remote().put_file(path).new
    truncate()
    caplog.clear()
    assert open_remote().longest(tokens(300), WHO, WIDE) is None
    assert warned(caplog)
    assert open_remote().put_file(path).new
    installed(store, store.longest(tokens(300), WHO, WIDE), WIDE)
    # A damaged object that no event names yet: the writer of the same pack finds it.
    store.gc(0)
    bucket.create(name, whole[:size])
    open_remote().put_file(path)
    installed(store, store.longest(tokens(300), WHO, WIDE), WIDE)
    assert store.stats().quarantined >= 3


def test_a_damaged_tile_is_found_by_the_reader_and_by_fsck(open_remote: Any, bucket: Bucket, tmp_path: Path) -> None:
    path = pack_file(tmp_path / "a.kvpack", 300)
    content = bytearray(path.read_bytes())
    content[kvpack.inspect(path).records[-1].offset] ^= 1
    store = open_remote()
    name = object_name(store.put_file(path).pack_id)
    bucket.delete([name])
    bucket.create(name, bytes(content))
    hit = store.longest(tokens(300), WHO, WIDE)
    assert hit is not None
    with store.get(hit) as stored, pytest.raises(IntegrityError):
        stored.cut().read_rows(stored.cut().stored, lambda *_: None)
    report = store.fsck()
    assert [found for found, _ in report.quarantined] == [name]
    assert store.fsck().clean
    bucket.create("objects/strange", b"")
    assert store.fsck().foreign == ("objects/strange",)
    assert position_of(store.longest(tokens(300), WHO, WIDE)) == 0


def admin_verbs(store: Any, path: Path) -> list[Callable[[], object]]:
    return [
        store.stats,
        store.ls,
        store.gc,
        store.fsck,
        lambda: store.pin(b"p" * 32),
        lambda: store.export(b"p" * 32, path),
        lambda: store.put(cut_of(FULL, tokens(64))),
    ]


def no_crash(store: Any, hit: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An engine gets misses and warnings, a person gets StoreErrors."""
    caplog.clear()
    assert store.longest(IDS[:300], WHO, FULL) is None
    assert store.get(hit) is None
    assert store.get(hit.pack_id) is None
    hit.confirm()
    assert warned(caplog)
    for verb in admin_verbs(store, tmp_path / "x"):
        with pytest.raises(StoreError):
            verb()


def test_a_server_that_dies(
    server: Seaweed, open_remote: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with proxy(server.port) as wire:
        store = open_remote(port=wire.port)
        store.put(cut_of(FULL, IDS[:300]))
        hit = store.longest(IDS[:300], WHO, FULL)
        stored = store.get(hit)
        wire.cut(0)
        no_crash(store, hit, tmp_path, caplog)
        stored.close()
        with pytest.raises(StoreError) as caught:
            open_remote(port=wire.port)
        assert caught.value.code == "unreachable"
        wire.cut(None)
        installed(store, store.longest(IDS[:300], WHO, FULL), FULL)


def test_a_bucket_that_vanishes(server: Seaweed, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from kvpack.store.upload import _S3

    name = f"kvpack-{secrets.token_hex(4)}"
    server.make_bucket(name)
    mine = server.config(access_key_id="kvpack-user")
    store: Any = PrefixStore.open(f"s3://{name}/p", config=mine, grace=0)
    store.put(cut_of(FULL, IDS[:300]))
    hit = store.longest(IDS[:300], WHO, FULL)
    access = Bucket(f"s3://{name}/p", config=server.config()).s3_access
    assert access is not None
    _S3(access).call("DELETE", "")
    no_crash(store, hit, tmp_path, caplog)
    with pytest.raises(StoreError):
        PrefixStore.open(f"s3://{name}/p", config=mine)


def test_wrong_credentials(server: Seaweed, open_remote: Any, tmp_path: Path, caplog: Any) -> None:
    store = open_remote()
    store.put(cut_of(FULL, IDS[:300]))
    hit = store.longest(IDS[:300], WHO, FULL)
    with pytest.raises(StoreError) as caught:
        open_remote(config=server.config(secret_access_key="wrong-secret-word"))
    assert caught.value.code == "access-denied"
    assert "wrong-secret-word" not in str(caught.value.facts())
    store.bucket = store.log.bucket = Bucket(store.bucket.url, config=server.config(secret_access_key="wrong"))
    no_crash(store, hit, tmp_path, caplog)
    assert "wrong" not in caplog.text


def test_an_engine_in_front_of_a_dead_server_goes_on_with_its_folder(server: Seaweed, url: str, tmp_path: Path) -> None:
    with proxy(server.port) as wire:
        config = server.config(wire.port)
        store: Any = PrefixStore.open(f"tiered:{tmp_path / 't'},{url}", config=config, grace=0, write="back")
        assert isinstance(store, TieredStore)
        wire.cut(0)
        store.put(cut_of(FULL, IDS[:300]))
        installed(store, store.longest(IDS[:400], WHO, FULL), FULL)
        with pytest.raises(StoreError):
            store.flush()
        wire.cut(None)
        store.close()
    with PrefixStore.open(url, config=server.config()) as far:  # type: ignore[attr-defined]
        assert position_of(far.longest(IDS[:300], WHO, FULL)) == 300


class Careless(BaseHTTPRequestHandler):
    """An object store that knows no conditions: whoever writes last wins."""

    objects: dict[str, bytes]

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in (("Content-Length", str(len(body))), ("ETag", '"x"')):
            self.send_header(name, value)
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        self.objects[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200)

    def do_GET(self) -> None:
        if "list-type" in self.path:
            self._answer(200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
        elif self.path in self.objects:
            self._answer(200, self.objects[self.path])
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, b"<DeleteResult><Deleted><Key>x</Key></Deleted></DeleteResult>")

    def do_DELETE(self) -> None:
        self.objects.pop(self.path, None)
        self._answer(204)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def careless() -> Iterator[int]:
    handler = type("Handler", (Careless,), {"objects": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running.server_port
        running.shutdown()
        thread.join()


def test_a_server_without_conditional_writes_is_refused(server: Seaweed, careless: int) -> None:
    with pytest.raises(StoreError) as caught:
        PrefixStore.open("s3://bucket/p", config=server.config(careless))
    assert caught.value.code == "no-conditional-writes"
    PrefixStore.open("s3://bucket/p", config=server.config(careless), read_only=True).close()


def test_a_question_takes_four_round_trips_at_most(open_remote: Any) -> None:
    writer = open_remote()
    put_turn(writer, cut_of(FULL, IDS[:300]))
    for end in range(400, 1001, 100):
        put_turn(writer, cut_of(FULL, IDS[:end]))
    writer.put(cut_of(FULL, [*IDS[:600], *tokens(300, 7)]))
    writer.put(cut_of(SLIDING, IDS[:700]))
    asked = [
        (IDS[:1000], FULL),
        ([*IDS[:610], 60_000, *tokens(100, 9)], FULL),
        (IDS[:800], SLIDING),
        (tokens(500, 3), FULL),
        (IDS[:900], FULL),
    ]
    reader = open_remote()
    writer.put(cut_of(FULL, tokens(200, 11)))  # news for the first question
    for ids, geometry in asked:
        before = reader.bucket.round_trips
        hit = reader.longest(ids, WHO, geometry)
        assert reader.bucket.round_trips - before <= 4, (len(ids), position_of(hit))
    assert position_of(reader.longest(IDS[:1000], WHO, FULL)) == 1000


def test_who_reads_over_http_finds_and_installs(server: Seaweed, url: str, open_remote: Any) -> None:
    store = open_remote()
    store.put(cut_of(FULL, IDS[:300]))
    entry = put_turn(store, cut_of(FULL, IDS[:400]))
    web: Any = PrefixStore.open(f"{server.files}/{url.removeprefix('s3://')}")
    hit = web.longest(IDS[:500], WHO, FULL)
    assert (hit.position, hit.pack_id) == (400, entry.pack_id)
    installed(web, hit, FULL)
    for number in range(10):
        store.put(cut_of(FULL, tokens(40, number)))
    assert len(web.ls()) == 12
    for verb in (web.gc, lambda: web.pin(entry.pack_id), lambda: web.put(cut_of(FULL, IDS[:64]))):
        with pytest.raises(StoreError) as caught:
            verb()
        assert caught.value.code == "read-only"
    with pytest.raises(StoreError) as caught:
        PrefixStore.open(f"{server.files}/kvpack-tests/nothing-here")
    assert caught.value.code == "no-such-store"
