"""What every prefix store does. A backend's tests inherit this class and give it the fixture ``open_store``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvpack
from kvpack.errors import CompatibilityError, KvpackError, StoreError, TrustError, UsageError
from kvpack.live import transfer
from kvpack.live.cache import LiveCache
from kvpack.model.geometry import Geometry
from kvpack.model.planes import needed_rows
from kvpack.store import ContentField, ContentKind, Hit, Store, put_turn
from kvpack.trust import build_region, sign
from tests import synthetic
from tests.contract.sessions import FULL, POOLED, RECURRENT, SLIDING, WHO, cut_of, same_rows, tokens

OpenStore = Callable[..., Store]
IDS = tokens(1100)


def position_of(hit: Hit | None) -> int:
    return 0 if hit is None else hit.position


def installed(store: Store, hit: Hit | None, geometry: Geometry) -> LiveCache:
    """A live cache restored from a hit, confirmed."""
    assert hit is not None
    stored = store.get(hit)
    assert stored is not None
    with stored:
        cache = LiveCache.allocate(geometry, max_context=2048)
        transfer.install(cache, stored.cut(), WHO, at=stored.position)
    hit.confirm()
    return cache


class Check:
    """A front check that wants one signature by one key."""

    def __init__(self, key: kvpack.SigningKey | None) -> None:
        self.key = key

    def signatures(self, region: bytes, signed: bytes) -> None:
        wanted = build_region([sign(signed, self.key)]) if self.key is not None else None
        if region != wanted:
            raise TrustError("untrusted", "nobody trusted signed this")

    def manifest(self, manifest: object) -> None:
        pass


class StoreContract:
    """The tests; ``open_store(**options)`` opens the same store each time, with ``key``, ``check`` and the like."""

    @pytest.fixture
    def open_store(self) -> OpenStore:
        raise NotImplementedError

    @pytest.fixture
    def store(self, open_store: OpenStore) -> Store:
        return open_store()

    @pytest.mark.parametrize("geometry", [FULL, SLIDING, RECURRENT, POOLED], ids=["full", "slide", "state", "pool"])
    def test_what_was_put_is_found_and_restored(self, open_store: OpenStore, geometry: Geometry) -> None:
        cut = cut_of(geometry, IDS[:700])
        entry = open_store().put(cut)
        store = open_store()  # another handle, as another process would have
        hit = store.longest(IDS[:700], WHO, geometry)
        assert hit is not None
        assert (hit.position, hit.pack_id, hit.at_cut, hit.needs_logits) == (700, entry.pack_id, True, True)
        assert hit.tokens_to_prefill == ()
        same_rows(transfer.capture(installed(store, hit, geometry), WHO), cut)
        longer = store.longest(IDS[:900], WHO, geometry)
        assert longer is not None
        assert (longer.position, longer.needs_logits) == (700, False)
        assert longer.tokens_to_prefill == tuple(IDS[700:900])

    @pytest.mark.parametrize("asked", [1, 5, 255, 256, 257, 511, 512, 513, 699])
    def test_full_planes_serve_every_shorter_position(self, store: Store, asked: int) -> None:
        cut = cut_of(FULL, IDS[:700])
        store.put(cut)
        hit = store.longest(IDS[:asked], WHO, FULL, need_logits=False)
        assert position_of(hit) == asked
        same_rows(transfer.capture(installed(store, hit, FULL), WHO), cut, needed_rows(FULL, asked))
        # Without logits there the last token is left to compute.
        assert position_of(store.longest(IDS[:asked], WHO, FULL)) == asked - 1

    @pytest.mark.parametrize("shared", [0, 3, 255, 256, 300, 512, 650])
    def test_full_planes_serve_what_two_conversations_share(self, store: Store, shared: int) -> None:
        store.put(cut_of(FULL, IDS[:700]))
        asked = [*IDS[:shared], 60_000, *tokens(300, seed=1)]
        assert position_of(store.longest(asked, WHO, FULL)) == shared
        # Only cuts can promise bitwise equality.
        assert store.longest(asked, WHO, FULL, only_cuts=True) is None

    @pytest.mark.parametrize("geometry", [SLIDING, RECURRENT], ids=["slide", "state"])
    def test_tails_and_states_are_served_at_their_cuts_only(self, store: Store, geometry: Geometry) -> None:
        cuts = [cut_of(geometry, IDS[:n]) for n in (300, 512, 700)]
        store.put(cuts)
        for asked, found in ((299, 0), (300, 300), (301, 300), (511, 300), (512, 512), (699, 512), (1000, 700)):
            hit = store.longest(IDS[:asked], WHO, geometry)
            assert position_of(hit) == found, asked
            if hit is not None:
                back = transfer.capture(installed(store, hit, geometry), WHO)
                same_rows(back, cuts[(300, 512, 700).index(found)], needed_rows(geometry, found))

    def test_a_ring_that_has_not_wrapped_serves_every_position(self, store: Store) -> None:
        geometry = Geometry((synthetic.full(), synthetic.sliding(64)))
        store.put(cut_of(geometry, IDS[:40]))
        for asked in (1, 17, 39):
            assert position_of(store.longest(IDS[:asked], WHO, geometry, need_logits=False)) == asked
        store.put(cut_of(geometry, IDS[:90]))
        assert position_of(store.longest(IDS[:80], WHO, geometry)) == 40

    def test_pool_keys_serve_whole_pools(self, store: Store) -> None:
        geometry = Geometry((synthetic.latent(pool=4),))
        store.put(cut_of(geometry, IDS[:30]))
        for asked, found in ((30, 30), (29, 29), (28, 28), (27, 24), (24, 24), (5, 4), (3, 0)):
            assert position_of(store.longest(IDS[:asked], WHO, geometry, need_logits=False)) == found

    def test_a_full_hit_without_last_logits_steps_back(self, store: Store) -> None:
        store.put(cut_of(SLIDING, IDS[:699], logits=0))
        store.put(cut_of(SLIDING, IDS[:700], logits=0))
        assert position_of(store.longest(IDS[:700], WHO, SLIDING)) == 699
        assert position_of(store.longest(IDS[:700], WHO, SLIDING, need_logits=False)) == 700
        store.put(cut_of(SLIDING, IDS[:700]))
        assert position_of(store.longest(IDS[:700], WHO, SLIDING)) == 700
        store.put(cut_of(FULL, IDS[:512], logits=0))
        assert position_of(store.longest(IDS[:512], WHO, FULL)) == 511

    def test_capacity_bounds_the_answer(self, store: Store) -> None:
        store.put([cut_of(SLIDING, IDS[:n]) for n in (300, 700)])
        assert position_of(store.longest(IDS[:900], WHO, SLIDING, capacity=699)) == 300
        assert store.longest(IDS[:900], WHO, SLIDING, capacity=299) is None

    def test_every_identity_field_and_the_geometry_are_part_of_the_key(self, store: Store) -> None:
        store.put(cut_of(FULL, IDS[:300]))
        for field in WHO.compatibility:
            other = replace(WHO, compatibility={**WHO.compatibility, field: b"other" * 8})
            assert store.longest(IDS[:300], other, FULL) is None, field
        assert store.longest(IDS[:300], replace(WHO, compatibility={**WHO.compatibility, "x": 1}), FULL) is None
        assert store.longest(IDS[:300], WHO, Geometry((synthetic.full(), synthetic.full(2, 2)))) is None
        assert store.longest(IDS[:300], WHO, FULL) is not None

    def test_other_numerics_are_found_and_the_same_ones_come_first(self, store: Store) -> None:
        other = replace(WHO, numerics={"engine": "synthetic", "threads": 8})
        first = store.put(cut_of(FULL, IDS[:300]))
        second = store.put(cut_of(FULL, IDS[:300], who=other, seed=1))
        for who, entry in ((WHO, first), (other, second)):
            hit = store.longest(IDS[:300], who, FULL)
            assert hit is not None
            assert (hit.pack_id, hit.same_numerics) == (entry.pack_id, True)
        third = store.longest(IDS[:300], replace(WHO, numerics={"threads": 3}), FULL)
        assert third is not None
        assert not third.same_numerics

    def test_content_that_tokens_do_not_determine(self, store: Store) -> None:
        cat, dog = (ContentField(ContentKind.IMAGE, 100, name) for name in (b"cat", b"dog"))
        store.put(cut_of(FULL, IDS[:300]), content=[cat])
        assert position_of(store.longest(IDS[:300], WHO, FULL, content=[cat])) == 300
        # The tokens in front of the image do not depend on it.
        for content in ([dog], [], [cat, dog], [replace(cat, kind=ContentKind.AUDIO)], [replace(cat, position=101)]):
            assert position_of(store.longest(IDS[:300], WHO, FULL, content=content)) == 100, content
        store.put(cut_of(SLIDING, IDS[:300]), content=[ContentField(ContentKind.ADAPTER, 0, b"a")])
        assert store.longest(IDS[:300], WHO, SLIDING) is None

    def test_a_wrong_key_and_another_tenant_are_misses(
        self, open_store: OpenStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        open_store(key=b"k" * 32).put(cut_of(FULL, IDS[:300]))
        open_store(key=b"k" * 32, tenant="a").put(cut_of(FULL, IDS[:400]))
        caplog.set_level(logging.DEBUG, "kvpack")
        for options in ({"key": b"x" * 32}, {"key": b"k" * 32, "tenant": "b"}, {}):
            assert open_store(**options).longest(IDS[:500], WHO, FULL) is None
        assert caplog.records == []
        assert position_of(open_store(key=b"k" * 32).longest(IDS[:500], WHO, FULL)) == 300
        assert position_of(open_store(key=b"k" * 32, tenant="a").longest(IDS[:500], WHO, FULL)) == 400

    def test_the_integer_type_of_the_tokens_does_not_matter(self, store: Store) -> None:
        store.put(cut_of(FULL, IDS[:300], carry=False), np.asarray(IDS[:300], np.uint16))
        for form in (IDS[:300], tuple(IDS[:300]), np.asarray(IDS[:300], np.int64)):
            assert position_of(store.longest(form, WHO, FULL)) == 300

    def test_a_put_is_held_to_its_tokens(self, store: Store) -> None:
        with pytest.raises(UsageError) as caught:
            store.put(cut_of(FULL, IDS[:300]), tokens(300, seed=1))
        assert caught.value.code == "tokens-differ"
        for given, code in ((None, "no-tokens"), (IDS[:299], "too-few-tokens")):
            with pytest.raises(UsageError) as caught:
                store.put(cut_of(FULL, IDS[:300], carry=False), given)
            assert caught.value.code == code
        assert store.stats().packs == 0

    def test_the_same_cuts_are_stored_once(self, store: Store) -> None:
        first = store.put(cut_of(SLIDING, IDS[:300], logits=0))
        assert first.new
        again = store.put(cut_of(SLIDING, IDS[:300], logits=0))
        assert (again.new, again.pack_id) == (False, first.pack_id)
        more = store.put(cut_of(SLIDING, IDS[:300]))  # with logits it says more
        assert more.new
        assert not store.put(cut_of(SLIDING, IDS[:300], logits=0)).new
        assert store.stats().packs == 2

    def test_a_hit_is_counted_when_it_is_confirmed(self, store: Store) -> None:
        store.put(cut_of(FULL, IDS[:300]))
        hit = store.longest(IDS[:300], WHO, FULL)
        assert hit is not None
        stored = store.get(hit)
        assert stored is not None
        stored.close()
        assert store.stats().hits == 0
        hit.confirm()
        assert (store.stats().hits, store.ls()[0].hits) == (1, 1)

    def test_trust_is_asked_about_every_pack(self, open_store: OpenStore, caplog: pytest.LogCaptureFixture) -> None:
        key = kvpack.SigningKey.generate()
        store = open_store()
        entry = store.put(cut_of(SLIDING, IDS[:300]), sign=lambda signed: build_region([sign(signed, key)]))
        trusting, wary = open_store(check=lambda: Check(key)), open_store(check=lambda: Check(None))
        hit = trusting.longest(IDS[:300], WHO, SLIDING)
        installed(trusting, hit, SLIDING)
        assert wary.get(entry.pack_id) is None
        assert "nobody trusted" in caplog.text
        assert trusting.longest(IDS[:300], WHO, SLIDING) is not None  # distrust is no damage
        store.put(cut_of(FULL, IDS[:300]))
        assert trusting.longest(IDS[:290], WHO, FULL) is None
        # What was refused once makes room for the next best.
        assert wary.longest(IDS[:300], WHO, SLIDING) is None

    @pytest.mark.parametrize("geometry", [FULL, SLIDING, RECURRENT, POOLED], ids=["full", "slide", "state", "pool"])
    def test_turn_after_turn(self, store: Store, geometry: Geometry) -> None:
        ends = range(100, 1100, 100)
        entries = [put_turn(store, cut_of(geometry, IDS[:end]), keep_cuts=2) for end in ends]
        assert all(entry.chain <= 8 for entry in entries)
        assert entries[1].parent == entries[0].pack_id
        assert entries[1].stored_bytes <= entries[0].stored_bytes + 4096
        for _ in range(2):
            for end in (900, 1000):
                hit = store.longest(IDS[:end], WHO, geometry)
                assert position_of(hit) == end
                same_rows(transfer.capture(installed(store, hit, geometry), WHO), cut_of(geometry, IDS[:end]))
            store.gc()
            assert store.fsck().clean
        if geometry is RECURRENT:  # what nobody keeps is gone, and what comes before it is prefilled again
            assert store.longest(IDS[:800], WHO, geometry) is None
        assert not put_turn(store, cut_of(geometry, IDS[:1000])).new

    def test_a_turn_of_other_bytes_is_stored_whole(self, store: Store) -> None:
        put_turn(store, cut_of(FULL, IDS[:100]))
        entry = put_turn(store, cut_of(FULL, IDS[:200], seed=5))
        assert entry.parent is None
        hit = store.longest(IDS[:200], WHO, FULL)
        same_rows(transfer.capture(installed(store, hit, FULL), WHO), cut_of(FULL, IDS[:200], seed=5))

    def test_branches_share_their_parent(self, store: Store) -> None:
        root = store.put(cut_of(SLIDING, IDS[:300]))
        branches = [IDS[:300] + tokens(50, seed) for seed in range(1, 4)]
        for ids in branches:
            assert put_turn(store, cut_of(SLIDING, ids)).parent == root.pack_id
        store.gc(0)
        assert store.stats().packs == 0
        root = store.put(cut_of(SLIDING, IDS[:300]))
        entries = [put_turn(store, cut_of(SLIDING, ids)) for ids in branches]
        flat = store.flatten(entries[0].pack_id)
        assert (flat.parent, flat.chain) == (None, 1)
        store.gc()
        for ids in branches:
            same_rows(
                transfer.capture(installed(store, store.longest(ids, WHO, SLIDING), SLIDING), WHO),
                cut_of(SLIDING, ids),
            )
        assert root.pack_id in {entry.pack_id for entry in store.ls()}

    def test_a_parent_stays_while_a_delta_needs_it(self, store: Store) -> None:
        first = put_turn(store, cut_of(FULL, IDS[:300]), keep_cuts=9)
        second = put_turn(store, cut_of(FULL, IDS[:400]), keep_cuts=9)
        store.pin(second.pack_id)
        assert store.gc(0).removed == ()
        store.unpin(second.pack_id)
        assert set(store.gc(0).removed) == {first.pack_id, second.pack_id}

    def test_what_is_open_is_not_removed(self, store: Store) -> None:
        entry = store.put(cut_of(FULL, IDS[:300]))
        stored = store.get(entry.pack_id)
        assert stored is not None
        report = store.gc(0)
        assert (report.removed, report.leased) == ((), (entry.pack_id,))
        same_rows(stored.cut(), cut_of(FULL, IDS[:300]))
        stored.close()
        stored.close()
        assert store.gc(0).removed == (entry.pack_id,)
        assert store.get(entry.pack_id) is None

    def test_the_least_recently_used_goes_first_and_pins_stay(self, store: Store) -> None:
        entries = [store.put(cut_of(FULL, tokens(64, seed))) for seed in range(6)]
        store.pin(entries[0].pack_id)
        hit = store.longest(tokens(64, 1), WHO, FULL)
        assert hit is not None
        hit.confirm()
        size = entries[0].stored_bytes
        report = store.gc(3 * size)
        assert report.stored_bytes == 3 * size
        assert set(report.removed) == {entry.pack_id for entry in entries[2:5]}
        assert {entry.pack_id for entry in store.ls()} == {entries[at].pack_id for at in (0, 1, 5)}

    def test_export_gives_the_pack(self, store: Store, tmp_path: Path) -> None:
        entry = store.put(cut_of(FULL, IDS[:300]))
        store.export(entry.pack_id, tmp_path / "a.kvpack")
        assert kvpack.inspect(tmp_path / "a.kvpack").pack_id == entry.pack_id
        same_rows(kvpack.load(tmp_path / "a.kvpack", allow_unsigned=True), cut_of(FULL, IDS[:300]))
        with pytest.raises(UsageError, match="exists"):
            store.export(entry.pack_id, tmp_path / "a.kvpack")

    @pytest.mark.parametrize("name", [b"", b"../x", b"a" * 31, b"a" * 33, "a" * 64])
    def test_only_pack_ids_are_names(self, store: Store, name: bytes, tmp_path: Path) -> None:
        for verb in (store.get, store.pin, store.unpin, store.flatten, lambda n: store.export(n, tmp_path / "x")):
            with pytest.raises(UsageError) as caught:
                verb(name)
            assert caught.value.code == "bad-pack-id"

    def test_verbs_of_a_person_raise_where_verbs_of_an_engine_miss(self, store: Store, tmp_path: Path) -> None:
        unknown = b"u" * 32
        assert store.get(unknown) is None
        for verb in (store.pin, store.unpin, store.entry, store.flatten, lambda n: store.export(n, tmp_path / "x")):
            with pytest.raises(StoreError) as caught:
                verb(unknown)
            assert caught.value.code == "no-such-pack"

    def test_a_delta_is_held_to_its_parent(self, store: Store) -> None:
        parent = store.put(cut_of(FULL, IDS[:300]))
        stored = store.get(parent.pack_id)
        assert stored is not None
        with stored, pytest.raises(CompatibilityError):
            store.put(cut_of(FULL, tokens(400, seed=1)), parent=stored)
        with pytest.raises(KvpackError):
            store.put([])
        assert store.stats().packs == 1
