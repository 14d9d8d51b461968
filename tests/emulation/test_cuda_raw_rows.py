"""Raw packs onto an emulated device: read into pinned memory, copied, hashed there, and only then scattered."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

import kvpack
from kvpack.device.cuda_runtime import CudaRuntime
from kvpack.device.cuda_verified import _Chunk
from kvpack.device.host import HostDevice
from kvpack.device.protocol import Move, RowStrides, Unverified, VerifyingDevice
from kvpack.errors import EngineError, InstallError, IntegrityError, KvpackError, ResourceError
from kvpack.live import transfer
from kvpack.live.cache import LiveCache
from kvpack.model.geometry import Geometry, PlaneKey
from kvpack.model.layout import LayerLayout
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import RowSink
from kvpack.pack.index import TileRecord
from kvpack.pack.reader import PackReader, _FileSource
from kvpack.pack.view import PackCut
from tests import synthetic
from tests.contract.device_contract import content, filled, random_bytes
from tests.contract.live_contract import same
from tests.emulation.fake_cupy import SCHEDULES, Machine, installed
from tests.emulation.machines import SLOT, machine_with_device
from tests.emulation.test_cuda_device import LAUNCH_FAILED, fails_in_a_process, without
from tests.emulation.test_cuda_live import named
from tests.unit.test_live_cache import MIXED, WHO, Producer, layouts

POSITION = 29


@dataclass
class Traffic:
    """What came by way of the host, and how many tiles the device was asked to accept."""

    by_host: dict[PlaneKey, RowSet]
    accepted: int = 0


@contextmanager
def watched() -> Iterator[Traffic]:
    traffic = Traffic({})
    read_rows, require = PackCut.read_rows, PackReader.require_stored

    def reading(cut: PackCut, wanted: dict[PlaneKey, RowSet], sink: RowSink, **options: Any) -> None:
        traffic.by_host.update({key: rows for key, rows in wanted.items() if rows})
        before = traffic.accepted
        read_rows(cut, wanted, sink, **options)
        traffic.accepted = before

    def requiring(reader: PackReader, record: TileRecord, digest: bytes, padding: bytes) -> None:
        require(reader, record, digest, padding)
        traffic.accepted += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackCut, "read_rows", reading)
        patch.setattr(PackReader, "require_stored", requiring)
        yield traffic


def saved(folder: Path, geometry: Geometry = MIXED, codec: str = "raw", position: int = POSITION) -> Path:
    source = Producer(LiveCache.allocate(geometry, max_context=64))
    source.append(position)
    path = folder / f"{codec}.kvpack"
    kvpack.save(transfer.capture(source.cache, WHO), path, codec=codec)
    return path


def pair(geometry: Geometry = MIXED, **options: Any) -> tuple[LiveCache, LiveCache]:
    one, two = (LiveCache.allocate(geometry, max_context=64, device=name, **options) for name in ("cuda", "host"))
    return one, two


def layer_tiles(path: Path) -> list[tuple[PlaneKey, TileRecord]]:
    with kvpack.open_pack(path, allow_unsigned=True) as pack:
        reader = pack.chain.readers[0]
        found = [(reader.manifest.planes[r.tile.plane].spec.key, r) for r in reader.records]
        return [(key, record) for key, record in found if key.scope == "layer"]


# --- the host's bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("law", "order"), [("modulo", "NHD"), ("modulo", "HND"), ("chronological", "NHD"), ("paged", "HND")]
)
def test_a_raw_pack_has_the_hosts_bytes_and_no_layers_row_comes_by_the_host(
    tmp_path: Path, schedule: str, law: str, order: str
) -> None:
    path = saved(tmp_path)
    rows = {"modulo": 12, "chronological": 8}.get(law, 64)
    sliding = LayerLayout(law, rows, order, 4 if law == "paged" else None)
    full = LayerLayout("paged", 64, order, 16) if law == "paged" else LayerLayout("linear", 64, order)
    with named(schedule) as (machine, devices), kvpack.open_pack(path, allow_unsigned=True) as pack:
        one, two = pair(layouts=layouts(MIXED, sliding=sliding, full=full), index_rows=8)
        need = transfer.install(two, pack.cut(), WHO).report.need
        with watched() as traffic:
            transfer.install(one, pack.cut(), WHO)
        assert {key.scope for key in traffic.by_host} == {"session"}
        tiles = [need[key].intersection(RowSet.of((r.tile.first, r.tile.end))) for key, r in layer_tiles(path)]
        assert traffic.accepted == sum(map(bool, tiles)) >= 9
        assert same(one, two)
        with watched() as traffic:
            one.swap(transfer.stage(one, pack.cut(), WHO).generation)
            transfer.publish_in_place(one, transfer.stage(one, pack.cut(), WHO))
        assert {key.scope for key in traffic.by_host} == {"session"}
        assert same(one, two)
        assert machine.idle()
        assert isinstance(devices[0], VerifyingDevice)
        assert not isinstance(HostDevice(1), VerifyingDevice)


@pytest.mark.parametrize("codec", ["zstd", "split"])
def test_encoded_tiles_come_by_the_host(tmp_path: Path, codec: str) -> None:
    """Of zeros: random rows would become no shorter, and be stored as they are."""
    geometry = Geometry((synthetic.full(), synthetic.full()))
    source = LiveCache.allocate(geometry, max_context=64)
    planes = {p.spec.key: bytes(64 * p.spec.row_bytes) for _, p in source.generation.every_plane()}
    source.append(64, planes, tokens=range(64))
    path = tmp_path / "a.kvpack"
    kvpack.save(transfer.capture(source, WHO), path, codec=codec)
    coded = {key for key, record in layer_tiles(path) if record.codec}
    assert coded
    with named("on demand"), kvpack.open_pack(path, allow_unsigned=True) as pack:
        one, two = pair(geometry)
        transfer.install(two, pack.cut(), WHO)
        with watched() as traffic:
            transfer.install(one, pack.cut(), WHO)
        assert coded <= set(traffic.by_host)
        assert same(one, two)


def test_a_tile_that_fits_no_chunk_comes_by_the_host_and_one_that_is_wanted_in_part_does_not(tmp_path: Path) -> None:
    wide = Geometry((synthetic.full(4, 64), synthetic.full()))
    path = saved(tmp_path, wide)  # 29 rows of 512 bytes are more than a chunk of 8 KiB
    with named("random"), kvpack.open_pack(path, allow_unsigned=True) as pack:
        one, two = pair(wide)
        transfer.install(two, pack.cut(), WHO)
        with watched() as traffic:
            transfer.install(one, pack.cut(), WHO)
        assert {key.layer for key in traffic.by_host if key.scope == "layer"} == {0}
        assert traffic.accepted == 2
        assert same(one, two)
        one, two = pair(wide)
        transfer.install(two, pack.cut(), WHO, at=11)
        with watched() as traffic:
            transfer.install(one, pack.cut(), WHO, at=11)
        assert {key.layer for key in traffic.by_host if key.scope == "layer"} == {0}
        assert traffic.accepted == 2
        assert same(one, two)


def test_every_cut_of_a_chain_has_the_hosts_bytes(tmp_path: Path) -> None:
    """A row comes from the newest pack that stores it: of its parent's tiles only some rows are wanted."""
    source = Producer(LiveCache.allocate(MIXED, max_context=64))
    paths = [tmp_path / "a.kvpack", tmp_path / "b.kvpack"]
    source.append(11)
    early = transfer.capture(source.cache, WHO)
    source.append(2)
    kvpack.save([early, transfer.capture(source.cache, WHO)], paths[0], codec="raw")
    source.append(16)
    with kvpack.open_pack(paths[0], allow_unsigned=True) as pack:
        kvpack.save(transfer.capture(source.cache, WHO), paths[1], codec="raw", parent=pack.cut(11))
    with named("random"), kvpack.open_pack(paths[1], parents=tmp_path, allow_unsigned=True) as pack:
        for position in pack.chain.positions:
            one, two = pair()
            transfer.install(two, pack.cut(position), WHO)
            with watched() as traffic:
                transfer.install(one, pack.cut(position), WHO)
            assert {key.scope for key in traffic.by_host} == {"session"}
            assert same(one, two)
        assert pack.chain.positions == (11, 13, POSITION)


def test_layers_on_several_devices_verify_their_own_rows(tmp_path: Path) -> None:
    from kvpack.device import cuda

    path = saved(tmp_path)
    with named("random") as (machine, devices), kvpack.open_pack(path, allow_unsigned=True) as pack:
        machine.device_count = 2
        one = LiveCache.allocate(MIXED, max_context=64, device=lambda layer: cuda.cuda_device(layer % 2))
        _, two = pair()
        for cache in (one, two):
            transfer.install(cache, pack.cut(), WHO)
        assert same(one, two)
        assert len(devices) == 2
        assert all(device.launches >= 3 for device in devices.values())


def test_a_pack_that_is_no_file_of_this_machine_comes_by_the_host(tmp_path: Path) -> None:
    path = saved(tmp_path)

    class Far:
        threads = 2

        def __init__(self) -> None:
            self.content = path.read_bytes()
            self.size = len(self.content)

        def read_at(self, offset: int, length: int) -> bytes:
            return self.content[offset : offset + length]

        def close(self) -> None: ...

    with PackReader(path, source=Far()) as reader:
        cut = PackCut([reader], reader.manifest.cuts[-1])
        assert list(cut.raw_tiles({key: rows for key, rows in cut.stored.items() if rows})) == []


# --- what is damaged -------------------------------------------------------------------------------------------------


def flipped(path: Path, at: int) -> Path:
    damaged = bytearray(path.read_bytes())
    damaged[at] ^= 4
    copy = path.with_name("damaged.kvpack")
    copy.write_bytes(damaged)
    return copy


def refusal_of(cache: LiveCache, cut: PackCut, move: Callable[..., object]) -> tuple[object, ...]:
    with pytest.raises(IntegrityError) as refusal:
        move(cache, cut, WHO)
    error = refusal.value
    return error.code, error.message, error.layer, error.plane, error.field, error.expected, error.hint


@pytest.mark.parametrize("part", ["payload", "padding"])
def test_a_flipped_byte_is_refused_as_the_host_refuses_it(tmp_path: Path, part: str) -> None:
    path = saved(tmp_path)
    with named("random"):
        one, two = pair()
        empty, _ = pair()
        for key, record in layer_tiles(path):
            at = record.offset + (record.stored_length - 1 if part == "payload" else record.stored_length)
            if at == record.padded_end:
                continue
            with kvpack.open_pack(flipped(path, at), allow_unsigned=True) as pack, watched() as traffic:
                mine = refusal_of(one, pack.cut(), transfer.install)
                assert not traffic.by_host, "the host was asked before the device refused"
                assert mine == refusal_of(two, pack.cut(), transfer.install)
                assert mine[0] == {"payload": "stored-hash", "padding": "tile-padding"}[part]
                assert mine[3] == str(key)
                assert one.position == 0
                assert same(one, empty)
        for cache in (one, two):
            Producer(cache).append(9)
        with kvpack.open_pack(path.with_name("damaged.kvpack"), allow_unsigned=True) as pack:
            assert refusal_of(one, pack.cut(), transfer.stage) == refusal_of(two, pack.cut(), transfer.stage)
        assert same(one, two)
        assert one.position == 9


def test_without_the_digests_the_flip_would_be_scattered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: nothing but the device's digest stands between the file and the planes."""
    path = saved(tmp_path)
    _, record = layer_tiles(path)[0]
    monkeypatch.setattr(PackReader, "require_stored", lambda *arguments: None)
    with named("on demand"):
        one, two = pair()
        with kvpack.open_pack(path, allow_unsigned=True) as pack:
            transfer.install(two, pack.cut(), WHO)
        with kvpack.open_pack(flipped(path, record.offset), allow_unsigned=True) as pack:
            transfer.install(one, pack.cut(), WHO)
        assert one.position == POSITION
        assert not same(one, two)


def test_a_tile_whose_two_hashes_differ_is_the_hosts_to_refuse(tmp_path: Path) -> None:
    from dataclasses import replace

    path = saved(tmp_path)
    with kvpack.open_pack(path, allow_unsigned=True) as pack:
        reader = pack.chain.readers[0]
        record = reader.records[-1]
        assert reader.is_plain(record)
        assert not reader.is_plain(replace(record, raw_hash=bytes(32)))


def test_a_read_that_fails_leaves_an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    original, calls = _FileSource.read_into, 0

    def failing(source: _FileSource, offset: int, target: memoryview) -> int:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise ResourceError("io-error", "planted")
        return original(source, offset, target)

    def short(source: _FileSource, offset: int, target: memoryview) -> int:
        return original(source, offset, target[1:])

    with named("on demand"), kvpack.open_pack(path, allow_unsigned=True) as pack:
        one, two = pair()
        for planted, code in ((failing, "io-error"), (short, "truncated")):
            monkeypatch.setattr(_FileSource, "read_into", planted)
            with pytest.raises(KvpackError) as failure:
                transfer.install(one, pack.cut(), WHO)
            assert failure.value.code == code
            assert same(one, two)
        monkeypatch.setattr(_FileSource, "read_into", original)
        for cache in (one, two):
            transfer.install(cache, pack.cut(), WHO)
        assert same(one, two)


@pytest.mark.parametrize("call", ["memcpyAsync", "launch", "wait_event", "synchronize"])
def test_a_device_that_fails_midway_leaks_nothing(tmp_path: Path, call: str) -> None:
    several_chunks = Geometry((synthetic.full(),) * 8)
    path = saved(tmp_path, several_chunks, position=60)
    with named("on demand") as (machine, devices), kvpack.open_pack(path, allow_unsigned=True) as pack:
        one, two = pair(several_chunks)
        for cache in (one, two):
            Producer(cache).append(9)
        for number in range(3):
            machine.failing[call] = (number, LAUNCH_FAILED)
            with pytest.raises(EngineError) as failure:
                transfer.stage(one, pack.cut(), WHO)
            assert failure.value.code == "cuda-error"
            machine.failing.clear()
            del failure  # it keeps the generation
            gc.collect()
            devices[0].synchronise()
            gc.collect()
            assert same(one, two)
        for cache in (one, two):
            cache.swap(transfer.stage(cache, pack.cut(), WHO).generation)
        assert same(one, two)


# --- chunks and their order ------------------------------------------------------------------------------------------


def parcel(move: Move, rows: Any, accepted: Callable[[], None] | None = None) -> Unverified:
    """``rows`` with their place and their digest."""
    digest = blake3(rows.tobytes()).digest()

    def read_into(target: memoryview) -> None:
        np.frombuffer(target, dtype=np.uint8)[:] = rows

    def accept(found: bytes) -> None:
        if found != digest:
            raise IntegrityError("stored-hash", "planted")
        if accepted is not None:
            accepted()

    return Unverified([move], len(rows), read_into, accept)


def parcels_of(buffer: Any, rows: Any, size: int, row_bytes: int = 16) -> list[Unverified]:
    """``rows`` in parcels of ``size`` bytes and a last one of what is left."""
    strides = RowStrides(1, row_bytes, row_bytes, 0)
    parts = [(at, rows[at : at + size]) for at in range(0, len(rows), size)]
    return [parcel(Move(buffer, strides, ((at // row_bytes, len(r) // row_bytes),), 0), r) for at, r in parts]


def session(device: Any) -> list[bytes]:
    """Chunks of either way, one behind the other, most of them with some still on their way."""
    one, two = device.allocate(24_000), device.allocate(24_000)
    strides = RowStrides(1, 16, 16, 0)
    found = []
    for step in range(3):
        device.scatter([Move(two, strides, ((0, 1500),), 0)], random_bytes(24_000, step).data)
        device.scatter_verified(parcels_of(one, random_bytes(24_000, step + 10), 2400))
        device.copy(one, 0, two, 12_000, 6000)
        device.scatter_verified(parcels_of(two, random_bytes(9600, step + 20), 480))
        found += [content(device, one).tobytes(), content(device, two).tobytes()]
    return found


def expected_session() -> list[bytes]:
    found = []
    for step in range(3):
        one, two = random_bytes(24_000, step + 10), random_bytes(24_000, step)
        two[12_000:18_000] = one[:6000]
        two[:9600] = random_bytes(9600, step + 20)
        found += [one.tobytes(), two.tobytes()]
    return found


def differs(schedule: str, seed: int) -> bool:
    from kvpack.device.cuda import CudaDevice

    with installed(Machine(schedule, seed)):
        try:
            return session(CudaDevice(slot_bytes=SLOT)) != expected_session()
        except IntegrityError:
            return True


WAITS = {
    "the copy into a slot waits for its last launch": ("wait", "copy"),
    "hashing waits for its copy": ("wait", "hash"),
    "digests are read after their copy": ("finish", "conclude"),
    "a slot is filled again after its copy": ("finish", "_open"),
}


@pytest.mark.parametrize("name", [*WAITS, "none"])
def test_a_missing_wait_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in WAITS:
        method, caller = WAITS[name]
        monkeypatch.setattr(CudaRuntime, method, without(method, caller, None))
    seen = any(
        fails_in_a_process(lambda schedule=schedule, seed=seed: differs(schedule, seed))  # type: ignore[misc]
        for schedule in SCHEDULES
        for seed in range(2)
    )
    assert seen == (name in WAITS)


def refused_parcel_stays_out(bad: int) -> bool:
    """Whether no parcel of the refused one's chunk, and none behind it, was scattered. Three parcels fit a chunk."""
    with machine_with_device("at once") as (_, device):
        before, rows = random_bytes(24_000, 1), random_bytes(24_000, 2)
        buffer = filled(device, before)
        parcels = parcels_of(buffer, rows, 2400)
        damaged = parcels_of(buffer, random_bytes(24_000, 3), 2400)[bad]
        parcels[bad] = Unverified(parcels[bad].moves, 2400, damaged.read_into, parcels[bad].accept)
        with pytest.raises(IntegrityError):
            device.scatter_verified(parcels)
        found = content(device, buffer)
        until = bad // 3 * 3 * 2400
        return np.array_equal(found[until:], before[until:]) and np.array_equal(found[:until], rows[:until])


@pytest.mark.parametrize("bad", [0, 2, 3, 7, 9])
def test_nothing_of_a_refused_chunk_is_scattered(bad: int) -> None:
    assert refused_parcel_stays_out(bad)


def test_a_scatter_before_the_verdict_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    original = _Chunk.conclude

    def too_early(chunk: _Chunk) -> None:
        batch: Sequence[Any] = chunk._batch
        chunk._batch = []
        original(chunk)
        chunk._batch = batch
        original(chunk)

    monkeypatch.setattr(_Chunk, "conclude", too_early)
    assert not refused_parcel_stays_out(4)


def test_the_arithmetic_of_the_floor_counts_the_launches() -> None:
    """``benchmarks/floor.py`` reckons without a device what the chunks cost."""
    from benchmarks.floor import LAUNCHES_A_VERIFIED_CHUNK, Session, verified_chunks

    session, tile_bytes = Session(tokens=900, layers=3, kv_heads=2, head_dim=16), 1024
    with machine_with_device() as (_, device):
        rows = random_bytes(session.tokens * session.row_bytes, 1)
        planes = [device.allocate(len(rows)) for _ in range(session.planes)]
        of_planes = [parcels_of(plane, rows, tile_bytes, session.row_bytes) for plane in planes]
        device.scatter_verified([each for together in zip(*of_planes, strict=True) for each in together])
        assert device.launches == LAUNCHES_A_VERIFIED_CHUNK * verified_chunks(session, SLOT, tile_bytes)
        assert all(np.array_equal(content(device, plane), rows) for plane in planes)


def test_parcels_are_accepted_in_order_and_in_the_callers_thread() -> None:
    import threading

    seen: list[tuple[int, int]] = []
    with machine_with_device("random") as (_, device):
        buffer, rows, strides = device.allocate(24_000), random_bytes(480, 4), RowStrides(1, 16, 16, 0)

        def numbered(number: int) -> Unverified:
            move = Move(buffer, strides, ((30 * number, 30),), 0)
            return parcel(move, rows, lambda: seen.append((number, threading.get_ident())))

        device.scatter_verified([numbered(number) for number in range(50)])
        device.scatter_verified([])
    assert seen == [(number, threading.get_ident()) for number in range(50)]


def test_bad_parcels_are_refused_before_anything_is_read() -> None:
    with machine_with_device() as (_, device):
        buffer, rows = filled(device, random_bytes(24_000, 1)), random_bytes(24_000, 2)
        before = content(device, buffer)

        def unread(target: memoryview) -> None:
            raise AssertionError("it was read")

        strides = RowStrides(1, 16, 16, 0)
        for code, moves, nbytes in (
            ("too-long", [Move(buffer, strides, ((0, 600),), 0)], 9600),
            ("out-of-bounds", [Move(buffer, strides, ((1400, 200),), 0)], 3200),
            ("out-of-bounds", [Move(buffer, strides, ((0, 200),), 0)], 3000),
            ("overlapping-destinations", [Move(buffer, strides, ((9, 1), (9, 1)), 0)], 32),
        ):
            good = Unverified(parcels_of(buffer, rows, 480)[49].moves, 480, unread, lambda digest: None)
            with pytest.raises(InstallError) as refusal:
                device.scatter_verified([good, Unverified(moves, nbytes, unread, lambda digest: None)])
            assert refusal.value.code == code
        assert np.array_equal(content(device, buffer), before)
