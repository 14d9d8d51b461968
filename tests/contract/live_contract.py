"""What a live cache does on any device: the bytes that it has on the host. Subclass and give :meth:`place` a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvpack
from kvpack.errors import CompatibilityError, InstallError, IntegrityError, KvpackError
from kvpack.live import transfer
from kvpack.live.cache import LiveCache
from kvpack.live.speculation import Speculation
from kvpack.model.geometry import Geometry, PlaneKey
from kvpack.model.layout import LayerLayout
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import Cut, RowSink
from tests import synthetic
from tests.unit.test_live_cache import MIXED, TOKEN_AXES, WHO, Producer, digest, layouts


class FailingCut:
    """A cut whose rows stop coming after some."""

    def __init__(self, cut: Cut, after: int) -> None:
        self._cut, self._after = cut, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cut, name)

    def read_rows(self, wanted: dict[PlaneKey, RowSet], sink: RowSink) -> None:
        left = self._after

        def counted(key: PlaneKey, first: int, count: int, rows: memoryview) -> None:
            nonlocal left
            if left == 0:
                raise InstallError("planted", "the rows end")
            left -= 1
            sink(key, first, count, rows)

        self._cut.read_rows(wanted, counted)


def counters(cache: LiveCache) -> bytes:
    content = bytearray(cache.counters.nbytes)
    cache.generation.layers[0].device.read(cache.counters, 0, memoryview(content))
    return bytes(content)


def same(one: LiveCache, two: LiveCache) -> bool:
    return digest(one) == digest(two) and counters(one) == counters(two) and one.position == two.position


class LiveContract:
    """Tests of live caches on one device."""

    @contextmanager
    def place(self) -> Iterator[tuple[str, Callable[[], int]]]:
        """The device's name, and how many bytes are allocated there."""
        raise AssertionError("a subclass gives the device")
        yield

    @pytest.fixture
    def device(self) -> Iterator[str]:
        with self.place() as (name, _):
            yield name

    @staticmethod
    def pair(device: str, geometry: Geometry = MIXED, **options: Any) -> tuple[Producer, Producer]:
        """A cache on the device and one on the host."""
        made = (LiveCache.allocate(geometry, max_context=64, device=name, **options) for name in (device, "host"))
        one, two = made
        return Producer(one), Producer(two)

    @pytest.mark.parametrize("order", ["NHD", "HND"])
    @pytest.mark.parametrize("law", ["modulo", "rebase", "chronological", "paged"])
    def test_every_byte_is_the_hosts(self, device: str, order: str, law: str) -> None:
        geometry = Geometry(MIXED.layers, draft_layers=(synthetic.full(1, 4),))
        sliding = LayerLayout(
            law, {"modulo": 12, "chronological": 8}.get(law, 64), order, 4 if law == "paged" else None
        )
        full = LayerLayout("paged", 64, order, 16) if law == "paged" else LayerLayout("linear", 64, order)
        options: dict[str, Any] = {"layouts": layouts(geometry, sliding=sliding, full=full), "index_rows": 8}
        one, two = self.pair(device, geometry, **options)
        for steps in (7, 1, 13, 8):
            one.append(steps)
            two.append(steps)
            assert same(one.cache, two.cache)
        cuts = [transfer.capture(each.cache, WHO, resident=True) for each in (one, two)]
        assert {k: bytes(r.buffer) for k, r in cuts[0].planes.items()} == {
            k: bytes(r.buffer) for k, r in cuts[1].planes.items()
        }
        with transfer.holding(one.cache, WHO) as held, transfer.holding(two.cache, WHO) as twin:
            for key, rows in held.stored.items():
                assert [bytes(held.rows(key, *r)) for r in rows] == [bytes(twin.rows(key, *r)) for r in rows]

    def test_install_swap_and_publication_in_place(self, device: str) -> None:
        source = Producer(LiveCache.allocate(MIXED, max_context=64))
        source.append(29)
        cut = transfer.capture(source.cache, WHO)
        one, two = self.pair(device)
        for each in (one, two):
            transfer.install(each.cache, cut, WHO)
        assert same(one.cache, two.cache)
        for each in (one, two):
            each.append(5)
            addresses = [getattr(plane.buffer, "address", 0) for _, plane in each.cache.generation.every_plane()]
            transfer.publish_in_place(each.cache, transfer.stage(each.cache, cut, WHO))
            assert addresses == [getattr(p.buffer, "address", 0) for _, p in each.cache.generation.every_plane()]
            each.append(2)
        assert same(one.cache, two.cache)
        for each in (one, two):
            each.cache.swap(transfer.stage(each.cache, cut, WHO).generation)
        assert same(one.cache, two.cache)

    def test_a_raw_pack_installs_the_same_bytes_and_a_damaged_one_is_refused(self, device: str, tmp_path: Path) -> None:
        geometry = Geometry((synthetic.full(8, 128), synthetic.sliding(8), synthetic.latent(pool=4), *MIXED.layers[3:]))
        source = Producer(LiveCache.allocate(geometry, max_context=64))
        source.append(60)
        path = tmp_path / "a.kvpack"
        kvpack.save(transfer.capture(source.cache, WHO), path, codec="raw")
        one, two = self.pair(device, geometry)
        with kvpack.open_pack(path, allow_unsigned=True) as pack:
            for each in (one, two):
                transfer.install(each.cache, pack.cut(), WHO)
                each.append(3)
            assert same(one.cache, two.cache)
            records = pack.chain.readers[0].records
        damaged = bytearray(path.read_bytes())
        damaged[records[-1].offset] ^= 1
        path.write_bytes(damaged)
        with kvpack.open_pack(path, allow_unsigned=True) as pack:
            for each in (one, two):
                with pytest.raises(IntegrityError) as refusal:
                    transfer.stage(each.cache, pack.cut(), WHO)
                assert refusal.value.code == "stored-hash"
                each.append(1)
            assert same(one.cache, two.cache)
            for each in (one, two):
                each.cache.reset()
                with pytest.raises(IntegrityError):
                    transfer.install(each.cache, pack.cut(), WHO)
            assert same(one.cache, two.cache)
            assert one.cache.position == 0

    def test_a_block_is_rolled_back(self, device: str) -> None:
        one, two = self.pair(device, TOKEN_AXES)
        for each in (one, two):
            each.append(20)
            block = Speculation(each.cache)
            block.checkpoint(6)
            each.append(6)
            block.rollback()
            block.checkpoint(6)
            each.append(6)
            block.commit(4)
        assert same(one.cache, two.cache)

    def test_an_install_that_fails_leaves_an_empty_cache(self, device: str) -> None:
        source = Producer(LiveCache.allocate(MIXED, max_context=64))
        source.append(29)
        cut = FailingCut(transfer.capture(source.cache, WHO), 5)
        one, two = self.pair(device)
        with pytest.raises(InstallError) as failure:
            transfer.install(one.cache, cut, WHO)  # type: ignore[arg-type]
        assert failure.value.code == "planted"
        assert same(one.cache, two.cache)
        assert one.cache.position == 0

    def test_a_staging_that_fails_leaks_nothing(self) -> None:
        source = Producer(LiveCache.allocate(MIXED, max_context=64))
        source.append(29)
        cut = transfer.capture(source.cache, WHO)
        with self.place() as (device, allocated):
            one, two = self.pair(device)
            for each in (one, two):
                each.append(9)
            before = allocated()
            for _ in range(3):
                with pytest.raises(InstallError):
                    transfer.stage(one.cache, FailingCut(cut, 5), WHO)  # type: ignore[arg-type]
                with pytest.raises(CompatibilityError):
                    transfer.stage(one.cache, cut, synthetic.identity(), at=30)
            assert allocated() == before
            assert same(one.cache, two.cache)
            one.append(3)
            two.append(3)
            assert same(one.cache, two.cache)

    def test_a_refused_append_changes_nothing(self, device: str) -> None:
        one, two = self.pair(device)
        for each in (one, two):
            each.append(9)
            with pytest.raises(KvpackError):
                each.append(60)
        assert same(one.cache, two.cache)
