"""LiveCache against a model that keeps every row in lists: appends, rewinds, blocks, captures, installs, swaps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from kvpack.device.protocol import Move
from kvpack.errors import CompatibilityError, InstallError, IntegrityError, KvpackError
from kvpack.live import transfer
from kvpack.live.cache import LiveCache
from kvpack.live.sizing import cache_size
from kvpack.live.speculation import Speculation
from kvpack.model.geometry import Geometry, LayerGeometry, PlaneKey, Scope, Unit
from kvpack.model.layout import LayerLayout, ProducerLayout
from kvpack.model.planes import plane_specs
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import Cut
from tests import synthetic

WHO = synthetic.identity()
MIXED = Geometry(
    (synthetic.full(), synthetic.sliding(8), synthetic.latent(pool=4), synthetic.recurrent(), synthetic.shared(0))
)
TOKEN_AXES = Geometry((synthetic.full(), synthetic.sliding(8), synthetic.sliding(6, sink=2), synthetic.latent(pool=4)))


@dataclass
class Producer:
    """Feeds a cache rows that depend on position and plane only, so that any history of the same position agrees."""

    cache: LiveCache
    index_pool: int = 4

    def rows(self, geometry: Geometry, start: int, count: int, scope: Scope = Scope.LAYER) -> dict[PlaneKey, bytes]:
        found: dict[PlaneKey, bytes] = {}
        layers = {key: layer for key, layer, _ in geometry.planes()}
        for key, spec in plane_specs(geometry).items():
            if key.scope != scope.value or spec.unit is Unit.FIXED:
                continue
            if spec.unit is Unit.STATE:
                found[key] = row_bytes(key, start + count, spec.row_bytes)
            elif spec.unit is Unit.POOL:
                pool = layers[key].pool or 1
                found[key] = b"".join(
                    row_bytes(key, n, spec.row_bytes) for n in range(start // pool, (start + count) // pool)
                )
            else:
                found[key] = b"".join(row_bytes(key, n, spec.row_bytes) for n in range(start, start + count))
        return found

    def append(self, count: int) -> None:
        start = self.cache.position
        rows = self.rows(self.cache.geometry, start, count)
        self.cache.append(count, rows, tokens=range(start, start + count))
        if self.cache.geometry.draft_layers:
            draft = self.rows(self.cache.geometry, self.cache.draft_position, count, Scope.DRAFT)
            self.cache.append(count, draft, scope=Scope.DRAFT)


def row_bytes(key: PlaneKey, number: int, size: int) -> bytes:
    generator = np.random.default_rng([number, key.layer, *str(key).encode()])
    return generator.integers(0, 256, size, np.uint8).tobytes()


def expected(cut: Cut, key: PlaneKey) -> bytes:
    """The bytes that ``cut`` must hold of a plane, from the rule of :func:`row_bytes`."""
    spec = cut.specs[key]
    if spec.unit is Unit.STATE:
        return row_bytes(key, cut.record.position, spec.row_bytes)
    return b"".join(row_bytes(key, n, spec.row_bytes) for a, b in cut.stored[key] for n in range(a, b))


def check(cut: Cut) -> None:
    for key, spec in cut.specs.items():
        if key.scope != "session" and spec.unit is not Unit.FIXED:
            assert bytes(cut.planes[key].buffer) == expected(cut, key), str(key)


def new(geometry: Geometry = MIXED, max_context: int = 64, **options: object) -> Producer:
    return Producer(LiveCache.allocate(geometry, max_context=max_context, **options))  # type: ignore[arg-type]


def digest(cache: LiveCache) -> list[bytes]:
    found = []
    for layer, plane in cache.generation.every_plane():
        content = bytearray(plane.buffer.nbytes)
        layer.device.read(plane.buffer, 0, memoryview(content))
        found.append(bytes(content))
    return found


def layouts(geometry: Geometry, **by_kind: LayerLayout) -> ProducerLayout:
    return ProducerLayout(
        tuple(by_kind.get(layer.kind) or LayerLayout("linear", 64) for layer in geometry.layers),
        tuple(LayerLayout("linear", 64) for _ in geometry.draft_layers),
    )


@pytest.mark.parametrize("steps", [[29], [1] * 29, [7, 1, 13, 8], [8, 8, 8, 5], [20, 9]])
@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("law", ["modulo", "rebase", "chronological", "paged", "linear"])
def test_every_history_and_layout_gives_the_same_cut(steps: list[int], order: str, law: str) -> None:
    geometry = Geometry((*MIXED.layers[:4], synthetic.cross()), draft_layers=(synthetic.full(1, 4),))
    sliding = LayerLayout(law, {"modulo": 12, "chronological": 8}.get(law, 64), order, 4 if law == "paged" else None)
    full = LayerLayout("paged", 64, order, 16) if law == "paged" else LayerLayout("linear", 64, order)
    producer = new(geometry, layouts=layouts(geometry, sliding=sliding, full=full), index_rows=8)
    for step in steps:
        producer.append(step)
    cut = transfer.capture(producer.cache, WHO)
    check(cut)
    assert cut.record.position == cut.record.draft_position == 29
    assert cut.record.tokens == 29
    resident = transfer.capture(producer.cache, WHO, resident=True)
    check(resident)
    for key, rows in cut.stored.items():
        assert resident.stored[key].contains(rows)


def test_rows_of_a_wrapped_ring_land_where_sequential_appends_put_them() -> None:
    """A ring of 12, window 8, at 29 → a ring of 16: row p at p mod 16, next slot 13; a ring of 6 refuses."""
    geometry = Geometry((synthetic.sliding(8, 1, 1),))
    ring = layouts(geometry, sliding=LayerLayout("modulo", 12))
    producer = new(geometry, layouts=ring)
    producer.append(29)
    cut, resident = transfer.capture(producer.cache, WHO), transfer.capture(producer.cache, WHO, resident=True)
    key = PlaneKey("layer", 0, "k")
    assert cut.stored[key] == RowSet.of((21, 29))
    assert resident.stored[key] == RowSet.of((17, 29))
    wide = LiveCache.allocate(geometry, max_context=64, layouts=layouts(geometry, sliding=LayerLayout("modulo", 16)))
    transfer.install(wide, resident, WHO)
    plane = wide.generation.layers[0].planes["k"]
    content = bytearray(plane.buffer.nbytes)
    wide.generation.layers[0].device.read(plane.buffer, 0, memoryview(content))
    words = {p: bytes(content[2 * (p % 16) : 2 * (p % 16) + 2]) for p in range(21, 29)}
    assert words == {p: row_bytes(key, p, 2) for p in range(21, 29)}
    assert (21 % 16, 28 % 16) == (5, 12)
    counters = bytearray(wide.counters.nbytes)
    wide.generation.layers[0].device.read(wide.counters, 0, memoryview(counters))
    assert np.frombuffer(counters, "<i4").tolist() == [29, 13]
    narrow = LiveCache.allocate(geometry, max_context=64, layouts=layouts(geometry, sliding=LayerLayout("modulo", 6)))
    before = digest(narrow)
    with pytest.raises(CompatibilityError) as caught:
        transfer.install(narrow, resident, WHO)
    assert caught.value.code == "ring-too-small"
    assert digest(narrow) == before


@pytest.mark.parametrize("position", [0, 1, 3, 4, 9, 29])
@pytest.mark.parametrize(
    "layer",
    [synthetic.compressed(), synthetic.compressed(pool=1), synthetic.hybrid(), synthetic.hybrid(8)],
    ids=["compressed", "compressed-1", "hybrid", "hybrid-8"],
)
def test_layers_of_several_kinds_of_state_come_back_whole(layer: LayerGeometry, position: int) -> None:
    geometry = Geometry((layer, LayerGeometry("none", ())))
    producer = new(geometry, index_rows=8)
    if position:
        producer.append(position)
    cut = transfer.capture(producer.cache, WHO)
    other = new(geometry)
    transfer.install(other.cache, cut, WHO)
    if position:
        check(cut)
        other.append(5)
        check(transfer.capture(other.cache, WHO))


@pytest.mark.parametrize("position", [0, 1, 7, 8, 9, 15, 16, 17, 29, 64])
def test_install_then_continue_equals_never_having_left(position: int) -> None:
    producer = new(MIXED, index_rows=8)
    if position:
        producer.append(position)
    cut = transfer.capture(producer.cache, WHO)
    other = new(MIXED, index_rows=12)
    transfer.install(other.cache, cut, WHO)
    assert [layer.position for layer in other.cache.generation.layers] == [position] * 5
    again = transfer.capture(other.cache, WHO)
    assert {k: bytes(r.buffer) for k, r in again.planes.items()} == {k: bytes(r.buffer) for k, r in cut.planes.items()}
    if position < 60:
        producer.append(4)
        other.append(4)
        one, two = transfer.capture(producer.cache, WHO), transfer.capture(other.cache, WHO)
        assert {k: bytes(r.buffer) for k, r in one.planes.items()} == {
            k: bytes(r.buffer) for k, r in two.planes.items()
        }


def test_an_install_writes_nothing_outside_the_cuts_rows() -> None:
    producer = new(Geometry((synthetic.full(), synthetic.sliding(8))))
    producer.append(10)
    cut = transfer.capture(producer.cache, WHO)
    other = LiveCache.allocate(Geometry((synthetic.full(), synthetic.sliding(8))), max_context=16)
    for layer, plane in other.generation.every_plane():
        layer.device.fill(plane.buffer, 0, plane.buffer.nbytes, 0xA5)
    transfer.install(other, cut, WHO)
    full = digest(other)[0]
    assert full[10 * 32 :] == b"\xa5" * (6 * 32)
    assert b"\xa5\xa5\xa5\xa5" not in full[: 10 * 32]


def test_stale_rows_behind_the_cursor_do_not_leak() -> None:
    """Capacity 16, 10 live rows: whatever lies behind them, the cut is the same."""
    producer = new(Geometry((synthetic.full(),)), 16)
    producer.append(10)
    clean = transfer.capture(producer.cache, WHO)
    layer = producer.cache.generation.layers[0]
    for plane in layer.planes.values():
        layer.device.fill(plane.buffer, 10 * 32, 6 * 32, 0xDE)
    dirty = transfer.capture(producer.cache, WHO)
    assert clean.stored == dirty.stored
    assert all(bytes(clean.planes[k].buffer) == bytes(dirty.planes[k].buffer) for k in clean.planes)


def test_a_capture_is_a_copy() -> None:
    producer = new()
    producer.append(9)
    cut = transfer.capture(producer.cache, WHO)
    for layer, plane in producer.cache.generation.every_plane():
        layer.device.fill(plane.buffer, 0, plane.buffer.nbytes, 0xFF)
    check(cut)


class Damaged:
    """A cut whose reader finds a bad tile in one plane, after other rows were handed over."""

    def __init__(self, cut: Cut, bad: PlaneKey) -> None:
        self._cut, self._bad = cut, bad

    def __getattr__(self, name: str) -> object:
        return getattr(self._cut, name)

    def read_rows(self, wanted: dict[PlaneKey, RowSet], sink: object) -> None:
        for key in wanted:
            if key == self._bad:
                raise IntegrityError("stored-hash", f"{key} is damaged", plane=str(key))
            self._cut.read_rows({key: wanted[key]}, sink)  # type: ignore[arg-type]


@pytest.mark.parametrize("layer", [2, 3])
def test_a_damaged_layer_leaves_a_live_session_untouched_and_a_fresh_cache_zeroed(layer: int) -> None:
    geometry = Geometry((synthetic.full(),) * 4)
    producer = new(geometry)
    producer.append(6)
    bad = Damaged(transfer.capture(producer.cache, WHO), PlaneKey("layer", layer, "v"))
    live = new(geometry)
    live.append(9)
    before = digest(live.cache)
    with pytest.raises(IntegrityError, match=f"layer.{layer}.v"):
        transfer.stage(live.cache, bad, WHO)  # type: ignore[arg-type]
    assert (live.cache.position, digest(live.cache)) == (9, before)
    fresh = LiveCache.allocate(geometry, max_context=64)
    with pytest.raises(IntegrityError):
        transfer.install(fresh, bad, WHO)  # type: ignore[arg-type]
    assert fresh.position == 0
    assert all(set(content) == {0} for content in digest(fresh))
    assert fresh.tainted is None


def test_an_occupied_cache_refuses_an_install_but_takes_a_staged_one() -> None:
    producer, live = new(), new()
    producer.append(13)
    cut = transfer.capture(producer.cache, WHO)
    live.append(9)
    with pytest.raises(InstallError) as caught:
        transfer.install(live.cache, cut, WHO)
    assert caught.value.code == "not-fresh"
    staged = transfer.stage(live.cache, cut, WHO)
    assert live.cache.position == 9
    old = live.cache.swap(staged.generation)
    assert (live.cache.position, old.position) == (13, 9)
    check(transfer.capture(live.cache, WHO))


def test_publication_in_place_keeps_every_address_and_writes_the_counters_last() -> None:
    producer, live = new(), new()
    producer.append(13)
    live.append(9)
    buffers = [plane.buffer for _, plane in live.cache.generation.every_plane()]
    counters, generation = live.cache.counters, live.cache.generation
    staged = transfer.stage(live.cache, transfer.capture(producer.cache, WHO), WHO)
    transfer.publish_in_place(live.cache, staged)
    assert [plane.buffer for _, plane in live.cache.generation.every_plane()] == buffers
    assert live.cache.counters is counters
    assert live.cache.generation is generation
    check(transfer.capture(live.cache, WHO))
    live.append(3)
    check(transfer.capture(live.cache, WHO))


def test_a_failed_publication_taints(monkeypatch: pytest.MonkeyPatch) -> None:
    producer, live = new(), new()
    producer.append(13)
    live.append(9)
    staged = transfer.stage(live.cache, transfer.capture(producer.cache, WHO), WHO)
    device = live.cache.generation.layers[0].device
    calls = iter([None, None])
    copy = device.copy

    def failing(*arguments: object) -> None:
        if next(calls, "end") == "end":
            raise OSError("the device is gone")
        copy(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(device, "copy", failing)
    with pytest.raises(OSError, match="gone"):
        transfer.publish_in_place(live.cache, staged)
    monkeypatch.undo()
    assert live.cache.tainted == "a publication in place"
    for refused in (
        lambda: transfer.capture(live.cache, WHO),
        lambda: live.append(1),
        lambda: live.cache.rewind(1),
        lambda: Speculation(live.cache).checkpoint(),
    ):
        with pytest.raises(InstallError) as caught:
            refused()
        assert caught.value.code == "tainted"
    live.cache.reset()
    live.append(5)
    check(transfer.capture(live.cache, WHO))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ("a row too few", "rows-and-bytes-differ"),
        ("a plane missing", "plane-missing"),
        ("a plane too many", "plane-unknown"),
        ("a gap", "discontinuity"),
        ("a repeat", "discontinuity"),
        ("beyond the context", "capacity-too-small"),
        ("no rows", "zero-rows"),
    ],
)
def test_a_refused_append_changes_nothing(change: str, code: str) -> None:
    producer = new()
    producer.append(9)
    before, position = digest(producer.cache), producer.cache.position
    rows = producer.rows(MIXED, 9, 2)
    count, start = 2, None
    key = PlaneKey("layer", 1, "v")
    if change == "a row too few":
        rows[key] = rows[key][:-32]
    elif change == "a plane missing":
        del rows[key]
    elif change == "a plane too many":
        rows[PlaneKey("layer", 9, "v")] = b""
    elif change == "a gap":
        start = 10
    elif change == "a repeat":
        start = 8
    elif change == "beyond the context":
        count, rows = 60, producer.rows(MIXED, 9, 60)
    else:
        count, rows = 0, {}
    with pytest.raises(InstallError) as caught:
        producer.cache.append(count, rows, start=start)
    assert caught.value.code == code
    assert (digest(producer.cache), producer.cache.position, producer.cache.tainted) == (before, position, None)


def test_layers_that_disagree_are_not_captured() -> None:
    """12 attention rows, a state stamped 8."""
    producer = new(Geometry((synthetic.full(), synthetic.recurrent())))
    producer.append(12)
    layer = producer.cache.generation.layers[1]
    layer.state = replace(layer.state, stamp=8)
    with pytest.raises(InstallError) as caught:
        transfer.capture(producer.cache, WHO)
    assert (caught.value.code, caught.value.layer, caught.value.expected, caught.value.found) == (
        "layers-disagree",
        1,
        12,
        8,
    )


def test_pool_keys_behind_their_rows_are_not_captured() -> None:
    producer = new(Geometry((synthetic.latent(pool=4),)))
    producer.append(12)
    layer = producer.cache.generation.layers[0]
    assert layer.state.pool is not None
    layer.state = replace(layer.state, pool=replace(layer.state.pool, pools_ready=2))
    with pytest.raises(InstallError) as caught:
        transfer.capture(producer.cache, WHO)
    assert caught.value.code == "keys-behind"


def test_tokens_and_rows() -> None:
    """12 tokens and 11 rows: both are recorded. 11 tokens and 12 rows: refused."""
    producer = new(Geometry((synthetic.full(),)))
    producer.append(11)
    producer.cache.generation.tokens.append(99)
    cut = transfer.capture(producer.cache, WHO)
    assert (cut.record.position, cut.record.tokens, cut.tokens[-1]) == (11, 12, 99)
    del producer.cache.generation.tokens[10:]
    with pytest.raises(InstallError) as caught:
        transfer.capture(producer.cache, WHO)
    assert caught.value.code == "tokens-shorter-than-rows"


def test_extras_rope_delta_and_drafts_come_back() -> None:
    geometry = Geometry((synthetic.full(),), draft_layers=(synthetic.full(1, 4),))
    producer = new(geometry)
    producer.append(24)
    producer.cache.generation.rope_delta = -2
    producer.cache.generation.context_epoch = 3
    producer.cache.set_extra("logits", b"\x01\x02\x03\x04" * 4, synthetic.F32, (4,))
    producer.cache.set_extra("tap", b"\x07" * 16, synthetic.F32, (4,))
    cut = transfer.capture(producer.cache, WHO)
    assert cut.record.extras == ("logits", "tap")
    other = LiveCache.allocate(geometry, max_context=64)
    transfer.install(other, cut, WHO)
    now = other.generation
    assert (now.rope_delta, now.context_epoch, now.draft_position, len(now.tokens)) == (-2, 3, 24, 24)
    assert now.extras["logits"].content == b"\x01\x02\x03\x04" * 4
    plain = LiveCache.allocate(Geometry((synthetic.full(),)), max_context=64)
    report = transfer.install(plain, cut, WHO).report
    assert any("draft: not restored" in note for note in report.notes)
    with pytest.raises(CompatibilityError):
        transfer.install(LiveCache.allocate(geometry, max_context=64), transfer.capture(plain, WHO), WHO)


def test_an_unknown_extra_is_refused_unless_it_is_declared_optional() -> None:
    geometry = Geometry((synthetic.full(),))
    producer = new(geometry)
    producer.append(5)
    producer.cache.set_extra("mystery", b"\x00" * 4, synthetic.F32, (1,))
    cut = transfer.capture(producer.cache, WHO)
    other = LiveCache.allocate(geometry, max_context=64)
    with pytest.raises(CompatibilityError) as caught:
        transfer.install(other, cut, WHO)
    assert caught.value.code == "unknown-extra"
    assert transfer.install(other, cut, WHO, optional=frozenset({"mystery"})).dropped == ("mystery",)


def test_install_away_from_the_cut() -> None:
    geometry = Geometry((synthetic.full(), synthetic.sliding(8)))
    producer = new(geometry)
    producer.append(6)
    cut = transfer.capture(producer.cache, WHO)
    other = LiveCache.allocate(geometry, max_context=64)
    transfer.install(other, cut, WHO, at=4)
    assert (other.position, len(other.generation.tokens), other.generation.extras) == (4, 4, {})
    check(transfer.capture(other, WHO))
    producer.append(23)
    late = transfer.capture(producer.cache, WHO)
    third = LiveCache.allocate(geometry, max_context=64)
    before = digest(third)
    with pytest.raises(CompatibilityError) as caught:
        transfer.install(third, late, WHO, at=25)
    assert (caught.value.code, caught.value.layer) == ("rows-not-stored", 1)
    assert digest(third) == before


def test_the_session_is_held_while_a_capture_streams() -> None:
    producer = new()
    producer.append(9)
    with transfer.holding(producer.cache, WHO) as live:
        for refused in (lambda: producer.append(1), lambda: producer.cache.rewind(3), lambda: producer.cache.reset()):
            with pytest.raises(InstallError) as caught:
                refused()
            assert caught.value.code == "quiesced"
        key = PlaneKey("layer", 1, "k")
        assert bytes(live.rows(key, 3, 5)) == row_bytes(key, 3, 32) + row_bytes(key, 4, 32)
    producer.append(1)


def test_rewind_forgets_later_rows_and_refuses_what_is_gone() -> None:
    geometry = Geometry((synthetic.full(), synthetic.latent(pool=4)))
    producer = new(geometry)
    producer.append(14)
    producer.cache.rewind(9)
    producer.append(6)
    check(transfer.capture(producer.cache, WHO))
    ringed = new(Geometry((synthetic.full(), synthetic.sliding(8))))
    ringed.append(20)
    before = digest(ringed.cache)
    with pytest.raises(InstallError) as caught:
        ringed.cache.rewind(15)
    assert (caught.value.code, caught.value.layer) == ("beyond-headroom", 1)
    assert (ringed.cache.position, digest(ringed.cache)) == (20, before)
    stateful = new(Geometry((synthetic.full(), synthetic.recurrent())))
    stateful.append(9)
    with pytest.raises(InstallError) as caught:
        stateful.cache.rewind(8)
    assert caught.value.code == "state-has-no-past"


@pytest.mark.parametrize("start", [1, 5, 7, 8, 9, 16, 29])
@pytest.mark.parametrize("block", [1, 3, 8, 16])
def test_a_rolled_back_block_never_happened(start: int, block: int) -> None:
    geometry = Geometry(MIXED.layers, draft_layers=(synthetic.full(1, 4),))
    producer = new(geometry, index_rows=8)
    producer.append(start)
    producer.cache.set_extra("logits", b"\x01" * 16, synthetic.F32, (4,))
    before, cut = digest(producer.cache), transfer.capture(producer.cache, WHO)
    speculation = Speculation(producer.cache)
    speculation.checkpoint(block)
    for _ in range(block):
        producer.append(1)
    speculation.rollback()
    after = transfer.capture(producer.cache, WHO)
    assert after.record == cut.record
    assert {k: bytes(r.buffer) for k, r in after.planes.items()} == {k: bytes(r.buffer) for k, r in cut.planes.items()}
    ring = [i for i, (_, plane) in enumerate(producer.cache.generation.every_plane()) if plane.spec.key.layer == 1]
    if start >= 8:
        assert [digest(producer.cache)[i] for i in ring] == [before[i] for i in ring]
    producer.append(4)
    check(transfer.capture(producer.cache, WHO))


@pytest.mark.parametrize("start", [1, 7, 8, 13, 29])
@pytest.mark.parametrize(("block", "accepted"), [(1, 0), (1, 1), (5, 2), (8, 8), (16, 11), (16, 1)])
def test_a_commit_keeps_the_accepted_prefix(start: int, block: int, accepted: int) -> None:
    producer, plain = new(TOKEN_AXES, index_rows=8), new(TOKEN_AXES, index_rows=8)
    producer.append(start)
    plain.append(start + accepted)
    speculation = Speculation(producer.cache)
    speculation.checkpoint(block)
    producer.append(block)
    replay = speculation.commit(accepted)
    assert replay == (accepted if block > 8 else 0)  # a block that went round the ring of 8 overwrote what it accepted
    assert producer.cache.position == start + accepted - replay
    if replay:
        producer.append(replay)
    check(transfer.capture(producer.cache, WHO))
    producer.append(9)
    plain.append(9)
    one, two = transfer.capture(producer.cache, WHO), transfer.capture(plain.cache, WHO)
    assert {k: bytes(r.buffer) for k, r in one.planes.items()} == {k: bytes(r.buffer) for k, r in two.planes.items()}


def test_a_commit_over_a_recurrent_state_asks_for_a_replay() -> None:
    producer = new()
    producer.append(10)
    speculation = Speculation(producer.cache)
    speculation.checkpoint(6)
    producer.append(6)
    assert speculation.commit(4) == 4
    assert producer.cache.position == 10
    with pytest.raises(InstallError) as caught:
        transfer.capture(producer.cache, WHO)
    assert caught.value.code == "replay-pending"
    producer.append(4)
    check(transfer.capture(producer.cache, WHO))


def test_a_rollback_across_a_lapped_block_is_refused_and_changes_nothing() -> None:
    producer = new(TOKEN_AXES)
    producer.append(10)
    speculation = Speculation(producer.cache)
    speculation.checkpoint(4)
    producer.append(5)
    before = digest(producer.cache)
    with pytest.raises(InstallError) as caught:
        speculation.rollback()
    assert caught.value.code == "lapped"
    assert (digest(producer.cache), producer.cache.position) == (before, 15)


def test_blocks_are_bounded_and_do_not_nest() -> None:
    speculation = Speculation(new().cache)
    for tokens in (0, 17):
        with pytest.raises(InstallError):
            speculation.checkpoint(tokens)
    speculation.checkpoint(16)
    with pytest.raises(InstallError) as caught:
        speculation.checkpoint(1)
    assert caught.value.code == "checkpoint-open"


def test_sizes_come_from_one_function() -> None:
    """52 layers, 39 sliding (window 2,048), 13 growing, 2 heads of 128, f16, context 131,072."""
    sliding = LayerGeometry("sliding", synthetic.kv(2, 128, "f16"), window=2048)
    growing = synthetic.full(2, 128, "f16")
    geometry = Geometry((sliding,) * 39 + (growing,) * 13)
    size = cache_size(geometry, 131_072)
    assert size.ring_bytes == 81_788_928
    assert size.bytes_per_token * 131_072 == 1_744_830_464
    assert size.for_layers(0, 39).nbytes == 81_788_928
    latent = cache_size(Geometry((synthetic.latent(512, 0, 4, 256),) * 12), 1_048_576)
    tails = [p for p in latent.planes if p.key.role == "index_tail"]
    assert [p.nbytes for p in tails] == [5 << 20] * 12
    flat = cache_size(Geometry((synthetic.latent(512, 0, 4, 256),) * 12), 1_048_576, index_rows=0)
    assert sum(p.nbytes for p in flat.planes if p.key.role == "index_tail") == 12 << 30
    allocated = new(MIXED)
    assert sum(p.buffer.nbytes for _, p in allocated.cache.generation.every_plane()) == allocated.cache.size.nbytes


def test_unknown_kinds_and_laws_are_refused_by_name() -> None:
    with pytest.raises(KvpackError, match="ring_v2"):
        LiveCache.allocate(Geometry((LayerGeometry("ring_v2", synthetic.kv()),)), max_context=8)
    geometry = Geometry((synthetic.full(),))
    with pytest.raises(CompatibilityError) as caught:
        LiveCache.allocate(geometry, max_context=8, layouts=ProducerLayout((LayerLayout("modulo", 8),)))
    assert caught.value.code == "bad-layout"


def test_moves_are_values() -> None:
    producer = new()
    producer.append(9)
    layer = producer.cache.generation.layers[1]
    moves = layer.moves(layer.planes["k"], 2, 9)
    assert all(isinstance(move, Move) for move in moves)
    assert sum(move.rows for move in moves) == 7
