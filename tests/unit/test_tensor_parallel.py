"""Caches over ranks: shapes, transactions, growth, hydration; merging at a capture and splitting at an install."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpack
from kvpack.device.host import HostDevice
from kvpack.device.protocol import Buffer
from kvpack.errors import CompatibilityError, InstallError, ResourceError
from kvpack.live import transfer
from kvpack.live.cache import LiveCache
from kvpack.live.layers import LiveLayer
from kvpack.live.placement import Span
from kvpack.live.rank_growth import plan_growth, publish_growth, publish_hydration
from kvpack.live.rank_shapes import PlaneShare, RankPlan, StateAxis, layer_shares, rank_geometry, rank_shape
from kvpack.live.ranked_layer import RankedLayer
from kvpack.live.rebasing_ring import RebasingRing, rows_for
from kvpack.live.sizing import cache_size, default_layouts
from kvpack.live.tensor_parallel import RankedCache, Transaction, ranked_layouts
from kvpack.model.encoding import ENCODINGS
from kvpack.model.geometry import Geometry, LayerGeometry, PlaneGeometry, PlaneKey, Unit
from kvpack.model.layout import LayerLayout, ProducerLayout
from kvpack.model.planes import plane_specs
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import Cut
from tests import synthetic

WHO = synthetic.identity()
AXES = {"conv": StateAxis("channel", (8, 8, 16)), "ssm": StateAxis("head")}
DEGREES = (1, 2, 4, 8)


def attention(window: int | None = None, heads: int = 8, dim: int = 128) -> LayerGeometry:
    """K in q8_0 and V in q5_1: 8 heads of 128 are 1,024 wide."""
    planes = (
        PlaneGeometry("k", ENCODINGS["q8_0"], (heads, dim)),
        PlaneGeometry("v", ENCODINGS["q5_1"], (heads, dim)),
    )
    return LayerGeometry("sliding" if window else "full", planes, window=window)


def recurrent() -> LayerGeometry:
    planes = (
        PlaneGeometry("conv", synthetic.BF16, (32, 3), Unit.STATE, axes=("channel", "tap")),
        PlaneGeometry("ssm", synthetic.F32, (3, 8, 5), Unit.STATE, axes=("dim", "head", "state")),
    )
    return LayerGeometry("recurrent", planes)


def scaled() -> LayerGeometry:
    """K and V of fp8 with a scale a head and one of the whole plane."""
    planes = (
        *synthetic.kv(8, 16, "f8_e4m3"),
        PlaneGeometry("scale.k", synthetic.F32, (8,)),
        PlaneGeometry("scale.v", synthetic.F32, (1,), Unit.FIXED, rows=1),
    )
    return LayerGeometry("full", planes)


MANY = Geometry(
    (
        synthetic.full(8, 8),
        synthetic.sliding(8, heads=2),
        synthetic.sliding(6, heads=8, sink=2),
        synthetic.latent(pool=4),
        synthetic.latent(pool=1),
        recurrent(),
        synthetic.shared(0),
        scaled(),
        synthetic.full(8, 32, "q8_0"),
        synthetic.composite(),
    )
)
NO_STATES = Geometry(tuple(layer for layer in MANY.layers if layer.kind != "recurrent"))


def ranks(count: int) -> RankPlan:
    return RankPlan(count, replicate_heads=True, state_axes=AXES)


def content(key: PlaneKey, number: int, size: int) -> bytes:
    generator = np.random.default_rng([number, key.layer, *str(key).encode()])
    return generator.integers(0, 256, size, np.uint8).tobytes()


def rows_of(geometry: Geometry, start: int, count: int) -> dict[PlaneKey, bytes]:
    """Rows that depend on plane and position only, so that any history of a position gives the same state."""
    found: dict[PlaneKey, bytes] = {}
    layers = {key: layer for key, layer, _ in geometry.planes()}
    for key, spec in plane_specs(geometry).items():
        pool = layers[key].pool or 1
        if spec.unit is Unit.STATE:
            found[key] = content(key, start + count, spec.row_bytes)
        elif spec.unit is Unit.POOL:
            numbers = range(start // pool, (start + count) // pool)
            found[key] = b"".join(content(key, n, spec.row_bytes) for n in numbers)
        elif spec.unit is Unit.TOKEN:
            found[key] = b"".join(content(key, n, spec.row_bytes) for n in range(start, start + count))
    return found


def append(cache: RankedCache, transaction: Transaction, count: int) -> None:
    start = cache.staged_length
    cache.append(transaction, count, rows_of(cache.geometry, start, count), tokens=range(start, start + count))


def grow_to(cache: RankedCache, *steps: int) -> RankedCache:
    for step in steps:
        transaction = cache.begin()
        append(cache, transaction, step)
        cache.finalize(transaction, cache.commit(transaction, step))
    return cache


def new(geometry: Geometry = MANY, degree: int = 2, max_context: int = 64, **options: object) -> RankedCache:
    cache = RankedCache.allocate(geometry, ranks(degree), max_context=max_context, **options)  # type: ignore[arg-type]
    for key, spec in plane_specs(geometry).items():
        if spec.unit is Unit.FIXED:
            cache.cache.write_fixed(key, content(key, 0, spec.row_bytes * (spec.rows or 0)))
    return cache


def digest(cache: RankedCache) -> list[bytes]:
    """Every physical byte of every rank, and the lengths that their kernels read."""
    found = []
    for layer in cache.layers:
        for rank, member in layer.ranks():
            buffers = [plane.buffer for plane in member.planes.values()] + list(layer.lengths[rank : rank + 1])
            for buffer in buffers:
                held = bytearray(buffer.nbytes)
                member.device.read(buffer, 0, memoryview(held))
                found.append(bytes(held))
    return found


def check(cut: Cut) -> None:
    """Every row of the cut is whole, and is the one that was appended at its position."""
    for key, spec in cut.specs.items():
        if key.scope == "session":
            continue
        if spec.unit is Unit.STATE:
            at = cut.record.position
            wanted = content(key, at, spec.row_bytes) if at else bytes(spec.row_bytes)
        elif spec.unit is Unit.FIXED:
            wanted = content(key, 0, spec.row_bytes * (spec.rows or 0))
        else:
            wanted = b"".join(content(key, n, spec.row_bytes) for a, b in cut.stored[key] for n in range(a, b))
        assert bytes(cut.planes[key].buffer) == wanted, str(key)


def refusal(code: str, action: Callable[[], object]) -> InstallError | CompatibilityError:
    with pytest.raises((InstallError, CompatibilityError)) as caught:
        action()
    assert caught.value.code == code
    return caught.value


# --- shapes --------------------------------------------------------------------------------------------------------


def test_a_rank_of_eight_takes_232_bytes_a_token_and_20_in_all() -> None:
    shape = rank_shape(attention(), RankPlan(8))
    assert (shape.k_width, shape.v_width) == (128, 128)
    assert (shape.k_token_bytes, shape.v_token_bytes) == (136, 96)
    assert shape.bytes_per_token == 232
    assert shape.fixed_bytes == 8 + 8 + 4
    assert shape.allocation_bytes(262_144) == 232 * 262_144 + 20


@pytest.mark.parametrize("degree", DEGREES)
def test_the_allocator_takes_what_the_shape_says(degree: int) -> None:
    plan = RankPlan(degree)
    for layer, rows in ((attention(), 320), (attention(32), rows_for(32, 320))):
        cache = RankedCache.allocate(Geometry((layer,)), plan, max_context=320)
        wanted = rank_shape(layer, plan).allocation_bytes(rows)
        assert [cache.rank_bytes(rank) for rank in range(degree)] == [wanted] * degree
        local = rank_geometry(Geometry((layer,)), plan)
        size = cache_size(local, 320, ranked_layouts(local, 320))
        assert size.bytes_per_token + size.ring_bytes_per_token == rank_shape(layer, plan).bytes_per_token


@pytest.mark.parametrize(
    ("layer", "plan", "code"),
    [
        (attention(), RankPlan(0), "zero-ranks"),
        (attention(), RankPlan(-1), "zero-ranks"),
        (attention(), RankPlan(3), "ranks-do-not-divide"),
        (attention(), RankPlan(64), "blocks-split"),
        (attention(), RankPlan(16), "head-split"),
        (attention(heads=6), RankPlan(4), "head-split"),
        (attention(), RankPlan(12, replicate_heads=True), "ranks-do-not-divide"),
        (attention(heads=0), RankPlan(8), "zero-width"),
        (synthetic.full(2, 8), RankPlan(16), "head-split"),
        (synthetic.full(2, 8), RankPlan(5), "ranks-do-not-divide"),
        (recurrent(), RankPlan(2), "state-axis-undeclared"),
        (recurrent(), RankPlan(2, state_axes={"conv": StateAxis("head"), "ssm": None}), "state-axis-unknown"),
        (
            recurrent(),
            RankPlan(2, state_axes={"conv": StateAxis("channel", (8, 8)), "ssm": None}),
            "state-axis-unknown",
        ),
        (recurrent(), RankPlan(2, state_axes={"conv": StateAxis("tap"), "ssm": None}), "ranks-do-not-divide"),
        (recurrent(), RankPlan(16, state_axes=AXES), "ranks-do-not-divide"),
    ],
)
def test_a_division_that_cannot_be_is_refused_by_its_own_check(layer: LayerGeometry, plan: RankPlan, code: str) -> None:
    error = refusal(code, lambda: layer_shares(layer, plan, number=3))
    assert (error.layer, error.field) == (3, "ranks")
    assert code == "zero-ranks" or str(error.plane).startswith("layer.3.")
    if code != "zero-width":  # nothing can be allocated of such a plane at all
        whole = Geometry((layer,))
        refusal(code, lambda: RankedCache.allocate(whole, plan, max_context=8))


def test_a_block_of_a_state_is_not_split() -> None:
    state = PlaneGeometry("ssm", ENCODINGS["q8_0"], (4, 64), Unit.STATE, axes=("head", "state"))
    layer = LayerGeometry("recurrent", (state,))
    assert layer_shares(layer, RankPlan(2, state_axes={"ssm": StateAxis("state")}))["ssm"].local.row_bytes == 4 * 34
    refusal("blocks-split", lambda: layer_shares(layer, RankPlan(4, state_axes={"ssm": StateAxis("state")})))


def test_declared_replicas_hold_one_head_each() -> None:
    shares = layer_shares(attention(heads=2), RankPlan(8, replicate_heads=True))
    assert (shares["k"].replicas, shares["k"].local.row_shape) == (4, (1, 128))
    assert [shares["k"].runs(rank)[0].whole for rank in range(8)] == [0] * 4 + [136] * 4
    one = layer_shares(synthetic.full(1, 8), RankPlan(4, replicate_heads=True))["k"]
    assert (one.replicas, one.local) == (4, one.whole)


def test_scales_follow_their_heads() -> None:
    shares = layer_shares(scaled(), RankPlan(4))
    assert (shares["scale.k"].local.row_shape, shares["scale.k"].replicas) == ((2,), 1)
    assert (shares["scale.v"].local.row_shape, shares["scale.v"].replicas) == ((1,), 4)


def test_latent_planes_lie_whole_on_every_rank() -> None:
    for share in layer_shares(synthetic.latent(pool=4), RankPlan(8)).values():
        assert (share.replicas, share.local) == (8, share.whole)


def test_draft_layers_are_refused_by_name() -> None:
    geometry = Geometry((synthetic.full(),), draft_layers=(synthetic.full(1, 4),))
    refusal("ranked-draft", lambda: RankedCache.allocate(geometry, RankPlan(1), max_context=8))


@st.composite
def divided(draw: st.DrawFn) -> tuple[PlaneShare, int, PlaneGeometry]:
    """A plane and its division: heads in any encoding and degree, or a state along any of its axes, in sections."""
    degree = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    if draw(st.booleans()):
        encoding = ENCODINGS[draw(st.sampled_from(sorted(ENCODINGS)))]
        dim = encoding.block_elements * draw(st.integers(1, 3))
        few = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8) if degree % n == 0]))
        heads = draw(st.sampled_from([few, degree, 2 * degree]))
        plane = PlaneGeometry("k", encoding, (heads, dim))
        layer = LayerGeometry("full", (plane, replace(plane, role="v")))
        return layer_shares(layer, RankPlan(degree, replicate_heads=True))["k"], degree, plane
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    axis = draw(st.integers(0, len(shape) - 1))
    sections = tuple(degree * n for n in draw(st.lists(st.integers(1, 2), min_size=1, max_size=3)))
    shape[axis] = sum(sections)
    names = ("a", "b", "c")[: len(shape)]
    plane = PlaneGeometry(
        "ssm", ENCODINGS[draw(st.sampled_from(["f32", "bf16", "u8"]))], tuple(shape), Unit.STATE, names
    )
    declared = StateAxis(names[axis], sections if draw(st.booleans()) else ())
    layer = LayerGeometry("recurrent", (plane,))
    return layer_shares(layer, RankPlan(degree, state_axes={"ssm": declared}))["ssm"], degree, plane


def by_axis(plane: PlaneGeometry, share: PlaneShare, rows: bytes, rank: int) -> bytes:
    """A rank's rows by NumPy's own indexing: whole heads of a K plane."""
    heads = plane.row_shape[0]
    table = np.frombuffer(rows, np.uint8).reshape(-1, heads, plane.row_bytes // heads)
    local = share.local.row_shape[0]
    first = rank // share.replicas * local
    return np.ascontiguousarray(table[:, first : first + local]).tobytes()


@settings(max_examples=200)
@given(divided(), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_merging_what_was_split_gives_it_back(
    case: tuple[PlaneShare, int, PlaneGeometry], rows: int, seed: int
) -> None:
    share, degree, plane = case
    assert share.ranks == degree
    assert share.local.row_bytes * degree == plane.row_bytes * share.replicas
    count = rows if plane.unit is Unit.TOKEN else 1
    whole = np.random.default_rng(seed).integers(0, 256, count * plane.row_bytes, np.uint8).tobytes()
    parts = [share.split(memoryview(whole), rank) for rank in range(degree)]
    assert bytes(share.merge(parts)) == whole
    assert share.differing_replica(parts) is None
    covered = sorted((run.whole, run.count) for runs in share.shares for run in runs)
    assert sum(count for _, count in covered) == plane.row_bytes
    if plane.role == "k":
        assert [bytes(part) for part in parts] == [by_axis(plane, share, whole, rank) for rank in range(degree)]


def test_a_merge_in_another_order_is_noticed() -> None:
    """The control of the law above: the parts are not alike, and their order is part of the answer."""
    share = layer_shares(attention(), RankPlan(8))["k"]
    whole = content(PlaneKey("layer", 0, "k"), 0, share.whole.row_bytes * 3)
    parts = [share.split(memoryview(whole), rank) for rank in range(8)]
    assert bytes(share.merge(parts[::-1])) != whole


def test_a_state_in_sections_gives_each_rank_a_piece_of_each() -> None:
    share = layer_shares(recurrent(), RankPlan(2, state_axes=AXES))["conv"]
    channels = np.arange(32, dtype=np.uint16)
    whole = np.repeat(channels, 3).tobytes()
    held = [np.frombuffer(share.split(memoryview(whole), rank), np.uint16)[::3].tolist() for rank in range(2)]
    assert held == [
        [*range(4), *range(8, 12), *range(16, 24)],
        [*range(4, 8), *range(12, 16), *range(24, 32)],
    ]


# --- transactions --------------------------------------------------------------------------------------------------


def test_a_partial_commit_publishes_the_accepted_prefix() -> None:
    cache = new(NO_STATES, 4)
    transaction = cache.begin()
    append(cache, transaction, 3)
    assert (cache.committed_length, cache.staged_length) == (0, 3)
    cache.finalize(transaction, cache.commit(transaction, 2))
    assert (cache.committed_length, cache.staged_length, cache.active) == (2, 2, None)
    refusal("transaction-stale", lambda: cache.commit(transaction, 0))
    cut = cache.capture(WHO)
    assert (cut.record.position, cut.tokens) == (2, (0, 1))
    check(cut)


@pytest.mark.parametrize("degree", DEGREES)
def test_a_rollback_returns_every_plane(degree: int) -> None:
    cache = grow_to(new(MANY, degree, index_rows=8), 7, 4)
    before, cut = digest(cache), cache.capture(WHO)
    transaction = cache.begin()
    append(cache, transaction, 2)
    append(cache, transaction, 1)
    assert digest(cache) != before
    assert (cache.committed_length, cache.staged_length) == (11, 14)
    cache.finalize(transaction, transaction.base_length)
    assert (cache.committed_length, cache.staged_length) == (11, 11)
    again = cache.capture(WHO)
    check(again)
    assert again.record == cut.record
    assert {key: bytes(plane.buffer) for key, plane in again.planes.items()} == {
        key: bytes(plane.buffer) for key, plane in cut.planes.items()
    }
    refusal("transaction-stale", lambda: cache.finalize(transaction, 11))


def test_tokens_known_beyond_the_rows_survive_a_rollback() -> None:
    cache = grow_to(new(NO_STATES), 3)
    cache.cache.generation.tokens.append(99)
    transaction = cache.begin()
    append(cache, transaction, 2)
    cache.finalize(transaction, 3)
    assert cache.cache.generation.tokens == [0, 1, 2, 99]


def test_nested_stale_and_out_of_range_actions_are_refused() -> None:
    cache = new(NO_STATES, 2, max_context=4)
    transaction = cache.begin()
    refusal("transaction-active", cache.begin)
    refusal("transaction-active", lambda: cache.capture(WHO))
    refusal("zero-rows", lambda: cache.append(transaction, 0, {}))
    refusal("zero-rows", lambda: cache.prepare_append(transaction, -1))
    refusal("capacity-too-small", lambda: append(cache, transaction, 5))
    refusal("rows-and-bytes-differ", lambda: cache.append(transaction, 2, rows_of(NO_STATES, 0, 1)))
    append(cache, transaction, 4)
    refusal("bad-acceptance", lambda: cache.commit(transaction, 5))
    refusal("bad-acceptance", lambda: cache.commit(transaction, -1))
    refusal("finalize-out-of-range", lambda: cache.finalize(transaction, 5))
    other = Transaction(transaction.generation + 1, transaction.base_length)
    refusal("transaction-stale", lambda: cache.finalize(other, 0))
    refusal("transaction-stale", lambda: cache.finalize(replace(transaction, base_length=1), 1))
    assert (cache.staged_length, cache.active) == (4, transaction)
    cache.finalize(transaction, 0)
    refusal("transaction-stale", lambda: append(cache, transaction, 1))
    assert cache.begin().generation == transaction.generation + 1


def test_a_half_committed_cache_is_refused_until_it_is_rewound() -> None:
    cache = grow_to(new(NO_STATES), 2)
    cache.cache.append(1, rows_of(NO_STATES, 2, 1), tokens=[2])
    error = refusal("half-committed", cache.begin)
    assert (error.expected, error.found) == (2, 3)
    refusal("half-committed", lambda: cache.capture(WHO))
    refusal("half-committed", lambda: plan_growth(cache, 128))
    cache.rewind(3)
    check(cache.capture(WHO))
    assert cache.begin().base_length == 3


def test_a_rewind_ends_the_open_transaction() -> None:
    cache = grow_to(new(NO_STATES), 5)
    transaction = cache.begin()
    append(cache, transaction, 3)
    refusal("forward-rewind", lambda: cache.rewind(9))
    assert cache.active == transaction
    cache.rewind(1)
    assert (cache.committed_length, cache.staged_length, cache.active) == (1, 1, None)
    refusal("transaction-stale", lambda: cache.require(transaction))
    check(cache.capture(WHO))


def test_a_recurrent_state_goes_back_to_the_base_and_nowhere_else() -> None:
    cache = grow_to(new(MANY, 4), 5)
    transaction = cache.begin()
    append(cache, transaction, 3)
    error = refusal("state-has-no-past", lambda: cache.commit(transaction, 1))
    assert error.layer == 5
    refusal("state-has-no-past", lambda: cache.finalize(transaction, 6))
    refusal("state-has-no-past", lambda: cache.rewind(4))
    assert (cache.active, cache.staged_length) == (transaction, 8)
    cache.rewind(5)
    check(cache.capture(WHO))
    refusal("state-has-no-past", lambda: cache.rewind(4))
    grow_to(cache, 2)
    check(cache.capture(WHO))


def test_a_ring_that_cannot_go_back_refuses_the_append() -> None:
    """A rotating ring of just its window: what a wrapped append evicts is what a rollback would need."""
    geometry = Geometry((synthetic.sliding(8, heads=4),))
    cache = grow_to(new(geometry, 2, layouts=default_layouts(geometry, 64)), 8)
    transaction = cache.begin()
    before = digest(cache)
    error = refusal("lapped", lambda: append(cache, transaction, 1))
    assert error.layer == 0
    assert (digest(cache), cache.staged_length) == (before, 8)
    roomy = grow_to(new(geometry, 2, layouts=ProducerLayout((LayerLayout("modulo", 12),))), 8, 4, 3)
    transaction = roomy.begin()
    append(roomy, transaction, 4)
    refusal("lapped", lambda: append(roomy, transaction, 1))
    roomy.finalize(transaction, 15)
    check(roomy.capture(WHO))


def test_a_pool_ring_that_cannot_go_back_refuses_the_append() -> None:
    geometry = Geometry((synthetic.latent(pool=4),))
    cache = grow_to(new(geometry, 2, index_rows=8), 6)
    transaction = cache.begin()
    append(cache, transaction, 6)
    refusal("lapped", lambda: append(cache, transaction, 1))
    cache.finalize(transaction, 6)
    check(cache.capture(WHO))


def ring_cache(max_context: int = 10_000, degree: int = 8) -> RankedCache:
    return RankedCache.allocate(Geometry((attention(32),)), RankPlan(degree), max_context=max_context)


def hydrate(cache: RankedCache, length: int, first: int) -> RankedCache:
    """Rows as an engine that fills the ranks' planes itself would leave them, then published."""
    layer = cache.layers[0]
    placement = layer.state.placement
    assert isinstance(placement, RebasingRing)
    state = replace(layer.state, placement=placement.hydrated(length, first))
    rows = rows_of(cache.geometry, first, length - first)
    for plane in layer.planes.values():
        layer.write_rows(plane, first, memoryview(rows[plane.spec.key]), state)
    publish_hydration(cache, length, {0: first}, tokens=range(length))
    return cache


def ring_base(cache: RankedCache) -> int:
    placement = cache.layers[0].state.placement
    assert isinstance(placement, RebasingRing)
    return placement.base


def test_a_rebase_in_a_transaction_keeps_what_a_rollback_needs() -> None:
    cache = ring_cache()
    assert cache.layers[0].state.placement is not None
    assert cache.layers[0].state.placement.capacity == 32 + 4096 + 512 + 31
    hydrate(cache, 8762, 4096)
    before = cache.capture(WHO)
    transaction = cache.begin()
    plan = cache.prepare_append(transaction, 10)
    rows = plan.plans[0].rows
    assert rows is not None
    assert [(move.source, move.destination, move.count) for move in rows.moves] == [(4608, 0, 58)]
    assert rows.writes == (Span(8762, 58, 10),)
    refusal("rebase-not-published", lambda: cache.publish_append(plan, rows_of(cache.geometry, 8762, 10)))
    assert ring_base(cache) == 4096
    cache.publish_rebase(plan)
    assert (ring_base(cache), cache.staged_length) == (8704, 8762)
    cache.publish_rebase(plan)  # a second one finds the ring moved
    check(replace_position(cache, before))
    cache.publish_append(plan, rows_of(cache.geometry, 8762, 10), tokens=range(8762, 8772))
    assert (ring_base(cache), cache.staged_length) == (8704, 8772)
    placement = cache.layers[0].state.placement
    assert placement.spans(8740, 8772) == (Span(8740, 36, 32),)
    refusal("stale-plan", lambda: cache.publish_append(plan, {}))
    refusal("stale-plan", lambda: cache.publish_rebase(plan))
    assert cache.layers[0].base_length == 8762
    cache.finalize(transaction, cache.commit(transaction, 0))
    assert cache.layers[0].base_length is None
    refusal("transaction-stale", lambda: cache.publish_rebase(plan))
    assert (cache.committed_length, cache.staged_length) == (8762, 8762)
    refusal("beyond-headroom", lambda: cache.rewind(8200))
    after = cache.capture(WHO)
    check(after)
    assert after.stored == before.stored


def replace_position(cache: RankedCache, cut: Cut) -> Cut:
    """The rows of ``cut`` as they are read now, in an open transaction."""
    layer = cache.layers[0]
    planes = {}
    for key, plane in cut.planes.items():
        buffer = plane.buffer
        if key.scope == "layer":
            buffer = layer.read_rows(layer.planes[key.role], *next(iter(plane.rows)))
        planes[key] = replace(plane, buffer=buffer)
    return replace(cut, planes=planes)


def test_a_long_transaction_rebases_behind_its_base() -> None:
    """600 rows and 600 more from 4,000: a plain append would keep 512 rows of headroom and lose the base's window."""
    cache = hydrate(ring_cache(degree=2), 4000, 0)
    transaction = cache.begin()
    append(cache, transaction, 600)
    assert ring_base(cache) == 0
    append(cache, transaction, 600)
    assert ring_base(cache) == 3968
    cache.finalize(transaction, 4000)
    check(cache.capture(WHO))


def test_the_plain_rule_would_lose_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with the plain retain the same append is found to lap, before anything moves."""
    cache = hydrate(ring_cache(degree=2), 4000, 0)
    transaction = cache.begin()
    append(cache, transaction, 600)
    monkeypatch.setattr(RankedLayer, "plan_rows", LiveLayer.plan_rows)
    before = digest(cache)
    refusal("lapped", lambda: append(cache, transaction, 600))
    assert digest(cache) == before


def test_a_transaction_longer_than_the_ring_is_refused() -> None:
    cache = hydrate(ring_cache(degree=2), 4000, 3968)
    transaction = cache.begin()
    append(cache, transaction, 4096)
    refusal("ring-too-small", lambda: append(cache, transaction, 600))
    cache.finalize(transaction, 8096)
    check(cache.capture(WHO))


def test_rows_that_do_not_fit_their_planes_rebase_nothing() -> None:
    cache = hydrate(ring_cache(degree=2), 8762, 4096)
    transaction = cache.begin()
    before = digest(cache)
    refusal("rows-and-bytes-differ", lambda: cache.append(transaction, 10, rows_of(cache.geometry, 8762, 9)))
    assert (ring_base(cache), digest(cache)) == (4096, before)


class FailingDevice(HostDevice):
    """A rank whose memory stops taking rows."""

    failing = False

    def copy(self, source: Buffer, source_offset: int, target: Buffer, target_offset: int, nbytes: int) -> None:
        if self.failing:
            raise ResourceError("device-lost", "the device is gone")
        super().copy(source, source_offset, target, target_offset, nbytes)

    def scatter(self, moves: object, packed: memoryview) -> None:
        if self.failing:
            raise ResourceError("device-lost", "the device is gone")
        super().scatter(moves, packed)  # type: ignore[arg-type]


def test_a_rank_that_fails_midway_taints_the_cache() -> None:
    devices = [HostDevice(), FailingDevice()]
    cache = grow_to(new(NO_STATES, 2, device=lambda rank: devices[rank]), 5)
    transaction = cache.begin()
    devices[1].failing = True  # type: ignore[attr-defined]
    with pytest.raises(ResourceError):
        append(cache, transaction, 2)
    for action in (cache.begin, lambda: cache.finalize(transaction, 5), lambda: cache.rewind(5)):
        refusal("tainted", action)
    cache.reset()
    assert all(not any(held) for held in digest(cache))
    devices[1].failing = False  # type: ignore[attr-defined]
    refusal("transaction-stale", lambda: cache.require(transaction))
    assert cache.begin().generation == transaction.generation + 1


def test_a_rebase_or_a_rollback_that_fails_midway_taints_the_cache() -> None:
    devices = [HostDevice(), FailingDevice()]
    cache = RankedCache.allocate(
        Geometry((attention(32),)), RankPlan(2), max_context=10_000, device=lambda rank: devices[rank]
    )
    hydrate(cache, 8762, 4096)
    transaction = cache.begin()
    devices[1].failing = True  # type: ignore[attr-defined]
    with pytest.raises(ResourceError):
        append(cache, transaction, 10)
    refusal("tainted", lambda: cache.finalize(transaction, 8762))
    devices[1].failing = False  # type: ignore[attr-defined]
    states = new(MANY, 2, device=lambda rank: devices[rank])
    transaction = states.begin()
    append(states, transaction, 2)
    devices[1].failing = True  # type: ignore[attr-defined]
    with pytest.raises(ResourceError):
        states.finalize(transaction, 0)
    refusal("tainted", lambda: states.capture(WHO))


def test_every_rank_reads_the_length_and_has_its_own_device() -> None:
    devices = [HostDevice() for _ in range(4)]
    cache = grow_to(new(NO_STATES, 4, device=lambda rank: devices[rank]), 5)
    for layer in cache.layers:
        assert [member.device for member in layer.members] == devices
        for rank, buffer in enumerate(layer.lengths):
            held = bytearray(4)
            devices[rank].read(buffer, 0, memoryview(held))
            assert int.from_bytes(held, "little") == 5


# --- growth and hydration ------------------------------------------------------------------------------------------


def test_growth_takes_a_prefix_and_counts_on() -> None:
    geometry = Geometry((attention(),))
    cache = grow_to(RankedCache.allocate(geometry, RankPlan(8), max_context=8), 5)
    rolled_back = cache.begin()
    cache.finalize(rolled_back, rolled_back.base_length)
    growth = plan_growth(cache, 16, 3)
    k, v = PlaneKey("layer", 0, "k"), PlaneKey("layer", 0, "v")
    assert (growth.rows, growth.rank_bytes(k), growth.rank_bytes(v)) == (3, 3 * 136, 3 * 96)
    larger = RankedCache.allocate(geometry, RankPlan(8), max_context=16)
    publish_growth(larger, growth)
    assert (larger.committed_length, larger.staged_length, larger.max_context) == (3, 3, 16)
    cut = larger.capture(WHO)
    check(cut)
    assert cut.tokens == (0, 1, 2)
    following = larger.begin()
    assert (following.generation, following.base_length) == (rolled_back.generation + 1, 3)
    check(cache.capture(WHO))


def test_growth_of_a_ring_copies_the_aligned_window() -> None:
    cache = hydrate(ring_cache(), 8250, 4096)
    transaction = cache.begin()
    cache.finalize(transaction, transaction.base_length)
    growth = plan_growth(cache, 20_000)
    k, v = PlaneKey("layer", 0, "k"), PlaneKey("layer", 0, "v")
    assert growth.need == {k: RowSet.of((8192, 8250)), v: RowSet.of((8192, 8250))}
    assert cache.layers[0].spans(cache.layers[0].planes["k"], 8192, 8250) == (Span(8192, 4096, 58),)
    assert (growth.rank_bytes(k), growth.rank_bytes(v)) == (58 * 136, 58 * 96)
    larger = ring_cache(20_000)
    publish_growth(larger, growth)
    assert ring_base(larger) == 8192
    assert larger.layers[0].spans(larger.layers[0].planes["k"], 8192, 8250) == (Span(8192, 0, 58),)
    assert (larger.committed_length, larger.staged_length) == (8250, 8250)
    assert larger.begin().generation == transaction.generation + 1
    larger.rewind(8250)
    check(larger.capture(WHO))


@pytest.mark.parametrize("degree", DEGREES)
def test_growth_carries_every_kind(degree: int) -> None:
    cache = grow_to(new(MANY, degree, index_rows=8), 9, 7, 3)
    cache.cache.set_extra("logits", b"12345678", ENCODINGS["f32"], (2,))
    wanted = cache.capture(WHO)
    larger = RankedCache.allocate(MANY, ranks(degree), max_context=96, index_rows=8)
    publish_growth(larger, plan_growth(cache, 96))
    cut = larger.capture(WHO)
    check(cut)
    assert (cut.record, cut.stored) == (wanted.record, wanted.stored)
    grow_to(larger, 5)
    check(larger.capture(WHO))


def test_growth_is_refused_before_anything_moves() -> None:
    geometry = Geometry((attention(),))

    def cache(max_context: int = 16, degree: int = 8, whole: Geometry = geometry, **options: object) -> RankedCache:
        return RankedCache.allocate(whole, RankPlan(degree), max_context=max_context, **options)  # type: ignore[arg-type]

    source = grow_to(cache(8), 5)
    open_one = cache(8)
    open_one.begin()
    refusal("transaction-active", lambda: plan_growth(open_one, 16))
    refusal("not-larger", lambda: plan_growth(source, 8))
    refusal("position-out-of-range", lambda: plan_growth(source, 16, 6))
    refusal("position-out-of-range", lambda: plan_growth(source, 16, -1))
    growth = plan_growth(source, 16, 4)
    wider = Geometry((attention(heads=16),))
    paged = ProducerLayout((LayerLayout("paged", 16, page_size=4),))
    for other in (cache(whole=wider), cache(17), cache(degree=4), cache(layouts=paged)):
        refusal("layout-differs", lambda other=other: publish_growth(other, growth))
        assert (other.committed_length, other.next_generation) == (0, 1)
        assert not any(any(held) for held in digest(other))
    refusal("not-fresh", lambda: publish_growth(grow_to(cache(), 1), growth))
    used = cache()
    used.finalize(used.begin(), 0)
    refusal("not-fresh", lambda: publish_growth(used, growth))
    grow_to(source, 1)
    refusal("stale-plan", lambda: publish_growth(cache(), growth))


def test_growth_is_refused_into_another_division() -> None:
    geometry = Geometry((recurrent(),))

    def cache(max_context: int, sections: tuple[int, ...]) -> RankedCache:
        plan = RankPlan(2, state_axes={"conv": StateAxis("channel", sections), "ssm": StateAxis("head")})
        return RankedCache.allocate(geometry, plan, max_context=max_context)

    growth = plan_growth(grow_to(cache(8, (8, 8, 16)), 5), 16)
    refusal("layout-differs", lambda: publish_growth(cache(16, (16, 16)), growth))
    publish_growth(cache(16, (8, 8, 16)), growth)


def test_growth_by_a_prefix_leaves_the_logits() -> None:
    cache = grow_to(new(NO_STATES), 9)
    cache.cache.set_extra("logits", b"12345678", ENCODINGS["f32"], (2,))
    larger = RankedCache.allocate(NO_STATES, ranks(2), max_context=96)
    publish_growth(larger, plan_growth(cache, 96, 8))
    assert larger.capture(WHO).record.extras == ()


def test_growth_needs_the_window_and_the_state() -> None:
    cache = hydrate(ring_cache(degree=1), 8250, 8192)
    error = refusal("lapped", lambda: plan_growth(cache, 20_000, 8000))
    assert error.layer == 0
    states = grow_to(new(Geometry((synthetic.full(8, 8), recurrent()))), 5)
    refusal("state-has-no-past", lambda: plan_growth(states, 128, 4))


def test_growth_that_fails_midway_leaves_an_empty_cache() -> None:
    source = grow_to(new(NO_STATES, 2), 5)
    device = FailingDevice()
    host = HostDevice()
    larger = RankedCache.allocate(NO_STATES, ranks(2), max_context=96, device=lambda rank: (host, device)[rank])
    device.failing = True
    with pytest.raises(ResourceError):
        publish_growth(larger, plan_growth(source, 96))
    assert (larger.committed_length, larger.staged_length) == (0, 0)
    assert not any(any(held) for held in digest(larger))
    device.failing = False
    publish_growth(larger, plan_growth(source, 96))


def test_hydration_is_for_fresh_caches_and_possible_rows() -> None:
    cache = ring_cache(degree=1)
    refusal("lapped", lambda: publish_hydration(cache, 8762, {0: 8750}))
    refusal("ring-too-small", lambda: publish_hydration(cache, 8762, {0: 0}))
    refusal("tokens-behind", lambda: publish_hydration(cache, 8762, tokens=[1, 2]))
    linear = RankedCache.allocate(Geometry((attention(),)), RankPlan(2), max_context=16)
    refusal("hydration-from-zero", lambda: publish_hydration(linear, 8, {0: 2}))
    refusal("capacity-too-small", lambda: publish_hydration(linear, 17))
    linear.begin()
    refusal("not-fresh", lambda: publish_hydration(linear, 8))
    hydrate(cache, 8762, 4096)
    refusal("not-fresh", lambda: publish_hydration(cache, 8762, {0: 4096}))
    check(cache.capture(WHO))


# --- cuts ----------------------------------------------------------------------------------------------------------


def same_state(a: Cut, b: Cut) -> None:
    assert a.stored == b.stored
    for key, plane in a.planes.items():
        assert bytes(plane.buffer) == bytes(b.planes[key].buffer), str(key)
    assert (a.record, a.geometry, a.layout) == (b.record, b.geometry, b.layout)


def state_id(cut: Cut, path: Path) -> bytes:
    return kvpack.save(cut, path, force=True).state_ids[cut.record.position]


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("a", DEGREES)
def test_a_cut_knows_no_ranks(a: int, order: str, tmp_path: Path) -> None:
    layouts = ranked_layouts(MANY, 64)
    layouts = replace(layouts, layers=tuple(replace(layout, order=order) for layout in layouts.layers))
    cut = grow_to(new(MANY, a, index_rows=8, layouts=layouts), 8, 8, 5).capture(WHO)
    check(cut)
    named = state_id(cut, tmp_path / "a.kvpack")
    for b in DEGREES:
        other = RankedCache.allocate(MANY, ranks(b), max_context=64, index_rows=8, layouts=layouts)
        installed = other.install(kvpack.load(tmp_path / "a.kvpack", allow_unsigned=True), WHO)
        assert installed.dropped == ()
        again = other.capture(WHO)
        same_state(again, cut)
        assert state_id(again, tmp_path / "b.kvpack") == named
        grow_to(other, 3)
        check(other.capture(WHO))


def test_a_cache_without_ranks_gives_the_same_state(tmp_path: Path) -> None:
    whole = LiveCache.allocate(MANY, max_context=64, layouts=ranked_layouts(MANY, 64), index_rows=8)
    for key, spec in plane_specs(MANY).items():
        if spec.unit is Unit.FIXED:
            whole.write_fixed(key, content(key, 0, spec.row_bytes * (spec.rows or 0)))
    whole.append(21, rows_of(MANY, 0, 21), tokens=range(21))
    alone = transfer.capture(whole, WHO)
    ranked = grow_to(new(MANY, 4, index_rows=8), 21).capture(WHO)
    same_state(ranked, alone)
    assert state_id(ranked, tmp_path / "a.kvpack") == state_id(alone, tmp_path / "b.kvpack")
    fresh = LiveCache.allocate(MANY, max_context=64, layouts=ranked_layouts(MANY, 64), index_rows=8)
    transfer.install(fresh, ranked, WHO)
    same_state(transfer.capture(fresh, WHO), alone)


def test_a_streaming_capture_reads_the_same_rows() -> None:
    cache = grow_to(new(MANY, 4), 13)
    cut = cache.capture(WHO)
    with cache.holding(WHO) as live:
        refusal("quiesced", cache.begin)
        for key, plane in cut.planes.items():
            for first, end in plane.rows:
                middle = (first + end) // 2
                halves = bytes(live.rows(key, first, middle)) + bytes(live.rows(key, middle, end))
                assert halves == bytes(plane.slice(first, end)), str(key)
    cache.begin()


class PiecewiseCut:
    """A cut whose states arrive in pieces of a few bytes, as tiles of a large state do."""

    def __init__(self, cut: Cut, step: int) -> None:
        self._cut, self._step = cut, step

    def __getattr__(self, name: str) -> object:
        return getattr(self._cut, name)

    def read_rows(self, wanted: dict[PlaneKey, RowSet], sink: Callable[[PlaneKey, int, int, memoryview], None]) -> None:
        for key, rows in wanted.items():
            for first, end in rows:
                for at in range(first, end, self._step):
                    stop = min(end, at + self._step)
                    sink(key, at, stop - at, self._cut.planes[key].slice(at, stop))


@pytest.mark.parametrize("step", [1, 5, 64])
def test_states_may_arrive_in_pieces(step: int) -> None:
    cut = grow_to(new(MANY, 2), 9).capture(WHO)
    other = RankedCache.allocate(MANY, ranks(4), max_context=64)
    other.install(PiecewiseCut(cut, step), WHO)  # type: ignore[arg-type]
    check(other.capture(WHO))


@pytest.mark.parametrize(
    ("layer", "role", "rank"), [(3, "latent", 5), (1, "k", 3), (9, "latent", 7), (3, "index_key", 1), (7, "scale.v", 6)]
)
def test_copies_that_differ_are_refused_by_name(layer: int, role: str, rank: int) -> None:
    cache = grow_to(new(MANY, 8), 9)
    check(cache.capture(WHO))
    member = cache.layers[layer].members[rank]
    plane = member.planes[role]
    held = bytearray(1)
    member.device.read(plane.buffer, 2, memoryview(held))
    member.device.write(plane.buffer, 2, memoryview(bytes([held[0] ^ 1])))
    error = refusal("replicas-differ", lambda: cache.capture(WHO))
    assert (error.layer, error.plane, error.field) == (layer, f"layer.{layer}.{role}", "rank")
    assert f"rank {rank}" in error.message
    member.device.write(plane.buffer, 2, memoryview(held))
    check(cache.capture(WHO))


def test_a_refused_install_leaves_every_rank_as_it_was() -> None:
    cut = grow_to(new(MANY, 2), 9).capture(WHO)
    other = RankedCache.allocate(MANY, ranks(4), max_context=64)
    before = digest(other)
    refusal("weights-differ", lambda: other.install(cut, synthetic.identity(weights=b"x" * 32)))
    refusal("capacity-too-small", lambda: RankedCache.allocate(MANY, ranks(4), max_context=8).install(cut, WHO))
    swapped = replace(MANY, layers=(synthetic.full(4, 16), *MANY.layers[1:]))
    refusal("geometry-differs", lambda: RankedCache.allocate(swapped, ranks(4), max_context=64).install(cut, WHO))
    assert (digest(other), other.committed_length) == (before, 0)
    other.install(cut, WHO)
    refusal("not-fresh", lambda: other.install(cut, WHO))
    transaction = other.begin()
    refusal("not-fresh", lambda: other.install(cut, WHO))
    other.finalize(transaction, 9)


def test_an_install_that_fails_midway_leaves_an_empty_cache() -> None:
    cut = grow_to(new(MANY, 2), 9).capture(WHO)
    devices = [HostDevice(), HostDevice(), HostDevice(), FailingDevice()]
    other = RankedCache.allocate(MANY, ranks(4), max_context=64, device=lambda rank: devices[rank])
    devices[3].failing = True  # type: ignore[attr-defined]
    with pytest.raises(ResourceError):
        other.install(cut, WHO)
    assert not any(any(held) for held in digest(other))
    devices[3].failing = False  # type: ignore[attr-defined]
    other.install(cut, WHO)
    check(other.capture(WHO))


def test_a_staged_install_is_swapped_in() -> None:
    cut = grow_to(new(MANY, 2), 9).capture(WHO)
    live = grow_to(new(MANY, 4), 3)
    staged = transfer.stage(live.cache, cut, WHO)
    transaction = live.begin()
    refusal("transaction-active", lambda: live.swap(staged.generation))
    live.finalize(transaction, 3)
    check(live.capture(WHO))
    live.swap(staged.generation)
    assert (live.committed_length, live.capture(WHO).record.position) == (9, 9)
    grow_to(live, 4)
    check(live.capture(WHO))
    in_place = grow_to(new(MANY, 8), 3)
    transfer.publish_in_place(in_place.cache, transfer.stage(in_place.cache, cut, WHO))
    in_place.rewind(9)
    check(in_place.capture(WHO))


LAYERS = {
    "full": synthetic.full(8, 8),
    "few": synthetic.full(2, 16),
    "sliding": synthetic.sliding(5, heads=4),
    "sink": synthetic.sliding(4, heads=8, sink=3),
    "q5_1": attention(heads=8, dim=32),
    "latent": synthetic.latent(pool=4),
    "dsa": synthetic.latent(pool=1),
    "recurrent": recurrent(),
}


@settings(max_examples=25)
@given(
    kinds=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=4),
    steps=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6),
    a=st.sampled_from(DEGREES),
    b=st.sampled_from(DEGREES),
)
def test_any_history_at_any_degree_gives_the_same_state(
    kinds: list[str], steps: list[tuple[int, int]], a: int, b: int
) -> None:
    geometry = Geometry(tuple(LAYERS[kind] for kind in kinds))
    cache = new(geometry, a)
    length = 0
    for count, accepted in steps:
        transaction = cache.begin()
        append(cache, transaction, count)
        kept = min(accepted, count)
        if "recurrent" in kinds and kept < count:
            kept = 0
        cache.finalize(transaction, cache.commit(transaction, kept))
        length += kept
    cut = cache.capture(WHO)
    assert cut.record.position == length
    check(cut)
    other = new(geometry, b)
    if length:
        other.install(cut, WHO)
        same_state(other.capture(WHO), cut)
    grow_to(other, 3)
    check(other.capture(WHO))


def test_the_degrees_of_this_file_divide() -> None:
    """The control of the sweep: the planes of its ranks really are smaller."""
    sizes = [new(MANY, degree).rank_bytes(0) for degree in DEGREES]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4
