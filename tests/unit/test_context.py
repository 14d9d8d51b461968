"""Context shifts: what is kept, in whole units; the rebuild and its publication; epochs and lineage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpack.errors import CompatibilityError, InstallError, KvpackError, UsageError
from kvpack.live import transfer
from kvpack.live.cache import LiveCache
from kvpack.live.context import (
    ContextPolicy,
    plan_chat_shift,
    plan_raw_shift,
    rebuild,
    relocate_rows,
    require_epoch,
    require_lineage,
    shift,
)
from kvpack.live.layers import LiveLayer
from kvpack.live.rank_shapes import RankPlan
from kvpack.live.tensor_parallel import RankedCache
from kvpack.model.encoding import ENCODINGS
from kvpack.model.geometry import Geometry, LayerGeometry, PlaneKey, Scope, Unit
from kvpack.model.layout import LayerLayout
from kvpack.model.planes import plane_specs
from kvpack.model.ranges import RowSet
from tests import synthetic

WHO = synthetic.identity()


@dataclass(frozen=True)
class Said:
    role: str
    text: str = ""


def said(script: str) -> list[Said]:
    """``s`` system, ``d`` developer, ``u`` user, ``a`` assistant, ``c`` tool call, ``t`` tool result, ``i`` image."""
    roles = {
        "s": "system",
        "d": "developer",
        "u": "user",
        "a": "assistant",
        "c": "assistant",
        "t": "tool",
        "i": "image",
    }
    return [Said(roles[letter], f"{letter}{at}") for at, letter in enumerate(script)]


def kept(script: str, counts: Sequence[int], max_context: int, reserve: int) -> str:
    """The letters of the messages that a shift keeps."""
    plan = plan_chat_shift(said(script), counts, max_context, reserve)
    return "".join(script[first:end] for first, end in plan.kept_messages)


def refusal(code: str, action: Callable[[], object]) -> KvpackError:
    with pytest.raises(KvpackError) as caught:
        action()
    assert caught.value.code == code
    return caught.value


# --- plans ---------------------------------------------------------------------------------------------------------


def test_a_request_that_fits_is_kept_whole() -> None:
    plan = plan_chat_shift(said("suaua"), [5, 2, 3, 2, 3], 20, 5)
    assert (plan.shifts, plan.kept, plan.kept_messages) == (False, RowSet.of((0, 15)), RowSet.of((0, 5)))
    assert plan.select(range(15)) == tuple(range(15))


def test_the_oldest_whole_turns_go_and_the_prologue_stays() -> None:
    script, counts = "sduacctauiua", [3, 2, 4, 1, 1, 1, 2, 1, 4, 6, 2, 1]
    assert sum(counts) == 28
    assert kept(script, counts, 33, 5) == script
    assert kept(script, counts, 32, 5) == "sduiua"
    assert kept(script, counts, 23, 5) == "sduiua"
    assert kept(script, counts, 22, 5) == "sdua"
    plan = plan_chat_shift(said(script), counts, 22, 5)
    assert plan.kept == RowSet.of((0, 5), (25, 28))
    assert plan.select(range(28)) == (0, 1, 2, 3, 4, 25, 26, 27)
    assert (plan.shifts, plan.token_count, plan.budget) == (True, 28, 17)


def test_what_follows_a_user_message_moves_with_it() -> None:
    """Dropping one token of a turn drops its tool calls, results and images too."""
    script = "uctita" + "uctita" + "ua"
    counts = [1] * len(script)
    assert kept(script, counts, 13, 0) == "uctitaua"
    assert kept(script, counts, 8, 0) == "uctitaua"
    assert kept(script, counts, 7, 0) == "ua"


def test_messages_before_the_first_user_message_are_a_turn() -> None:
    assert kept("saua", [1, 1, 1, 1], 3, 0) == "sua"
    assert kept("aua", [1, 1, 1], 2, 0) == "ua"


@pytest.mark.parametrize(
    ("script", "counts", "max_context", "reserve", "code"),
    [
        ("usua", [1] * 4, 100, 0, "system-after-turn"),
        ("suad", [1] * 4, 100, 0, "system-after-turn"),
        ("suaua", [5, 2, 3, 2, 3], 14, 5, "unit-too-large"),
        ("u", [9], 8, 0, "unit-too-large"),
        ("ss", [1, 1], 8, 0, "empty-request"),
        ("", [], 8, 0, "empty-request"),
        ("ua", [1], 8, 0, "bad-context"),
        ("ua", [1, -1], 8, 0, "bad-context"),
        ("ua", [1, 1], 8, 8, "bad-context"),
        ("ua", [1, 1], 8, -1, "bad-context"),
    ],
)
def test_a_request_that_cannot_be_kept_is_refused(
    script: str, counts: list[int], max_context: int, reserve: int, code: str
) -> None:
    error = refusal(code, lambda: plan_chat_shift(said(script), counts, max_context, reserve))
    assert isinstance(error, UsageError)


def test_the_smallest_unit_may_just_fit() -> None:
    assert kept("suaua", [5, 2, 3, 2, 3], 15, 5) == "sua"


def test_the_policy_error_refuses_what_would_be_shifted() -> None:
    messages, counts = said("suaua"), [5, 2, 3, 2, 3]
    error = refusal("context-full", lambda: plan_chat_shift(messages, counts, 19, 5, policy=ContextPolicy.ERROR))
    assert (error.expected, error.found) == (14, 15)
    assert not plan_chat_shift(messages, counts, 20, 5, policy=ContextPolicy.ERROR).shifts
    refusal("context-full", lambda: plan_raw_shift(16, 2, 20, 5, policy=ContextPolicy.ERROR))
    assert not plan_raw_shift(15, 2, 20, 5, policy=ContextPolicy.ERROR).shifts
    assert [ContextPolicy("shift"), ContextPolicy("error")] == list(ContextPolicy)


def test_a_raw_prompt_keeps_its_prefix_and_the_newest_tokens() -> None:
    assert plan_raw_shift(15, 4, 20, 5).kept == RowSet.of((0, 15))
    plan = plan_raw_shift(100, 4, 20, 5)
    assert plan.kept == RowSet.of((0, 4), (89, 100))
    assert plan.select(range(100)) == (0, 1, 2, 3, *range(89, 100))
    assert plan_raw_shift(100, 0, 20, 5).kept == RowSet.of((85, 100))
    assert plan_raw_shift(100, 14, 20, 5).kept == RowSet.of((0, 14), (99, 100))
    assert plan_raw_shift(3, 14, 20, 5).kept == RowSet.of((0, 3))
    refusal("unit-too-large", lambda: plan_raw_shift(100, 15, 20, 5))
    refusal("bad-context", lambda: plan_raw_shift(100, -1, 20, 5))
    refusal("bad-context", lambda: plan_raw_shift(100, 0, 5, 5))
    refusal("empty-request", lambda: plan_raw_shift(0, 0, 20, 5))


def test_a_plan_selects_from_its_own_tokens_only() -> None:
    refusal("tokens-differ", lambda: plan_raw_shift(100, 4, 20, 5).select(range(99)))


@settings(max_examples=200)
@given(
    system=st.lists(st.integers(0, 5), max_size=3),
    turns=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=6),
    max_context=st.integers(1, 60),
    reserve=st.integers(0, 20),
)
def test_any_chat_keeps_the_most_that_fits(
    system: list[int], turns: list[list[int]], max_context: int, reserve: int
) -> None:
    """Against every way to drop turns from the front, tried one after the other."""
    messages = [Said("system", str(at)) for at in range(len(system))]
    for number, turn in enumerate(turns):
        messages += [Said("user" if at == 0 else "assistant", f"{number}.{at}") for at in range(len(turn))]
    counts = [*system, *(count for turn in turns for count in turn)]
    possible = [
        dropped
        for dropped in range(len(turns))
        if sum(system) + sum(map(sum, turns[dropped:])) <= max_context - reserve
    ]
    if reserve >= max_context or not possible:
        with pytest.raises(UsageError):
            plan_chat_shift(messages, counts, max_context, reserve)
        return
    plan = plan_chat_shift(messages, counts, max_context, reserve)
    gone = sum(len(turn) for turn in turns[: possible[0]])
    wanted = [*range(len(system)), *range(len(system) + gone, len(messages))]
    assert [at for first, end in plan.kept_messages for at in range(first, end)] == wanted
    tokens = [at for at, count in enumerate(counts) for _ in range(count)]
    assert plan.select(tokens) == tuple(at for at in tokens if at in wanted)
    assert plan.kept.count <= plan.budget


@given(st.integers(1, 80), st.integers(0, 20), st.integers(1, 40), st.integers(0, 20))
def test_any_raw_prompt_fills_the_budget(tokens: int, prefix: int, max_context: int, reserve: int) -> None:
    budget = max_context - reserve
    if budget < 1 or (tokens > budget and prefix >= budget):
        with pytest.raises(UsageError):
            plan_raw_shift(tokens, prefix, max_context, reserve)
        return
    chosen = plan_raw_shift(tokens, prefix, max_context, reserve).select(range(tokens))
    assert len(chosen) == min(tokens, budget)
    assert chosen[: min(prefix, len(chosen))] == tuple(range(min(prefix, len(chosen))))
    assert chosen[-1] == tokens - 1


# --- lineage -------------------------------------------------------------------------------------------------------


def test_the_retained_turns_are_one_run_of_the_request() -> None:
    whole = said("suauctaua")
    retained = [whole[0], *whole[3:7]]
    assert require_lineage(retained, whole) == 7
    assert require_lineage(retained, [whole[0], *whole[3:]]) == 5
    assert require_lineage(retained, retained) == 5
    no_system = whole[1:]
    assert require_lineage(no_system[2:6], no_system) == 6


def test_another_lineage_is_refused() -> None:
    whole = said("suauctaua")
    retained = [whole[0], *whole[3:7]]
    edited = [*whole[:4], replace(whole[4], text="edited"), *whole[5:]]
    gap = [*whole[:5], Said("tool", "between"), *whole[5:]]
    swapped = [whole[0], *whole[3:5], whole[6], whole[5], *whole[7:]]
    other_system = [replace(whole[0], text="other"), *whole[1:]]
    more_system = [whole[0], Said("system", "more"), *whole[1:]]
    for request in (edited, gap, swapped, other_system, more_system, whole[1:], [whole[0], *whole[7:]], whole[:6]):
        error = refusal("lineage-differs", lambda request=request: require_lineage(retained, request))
        assert isinstance(error, CompatibilityError)
    refusal("system-after-turn", lambda: require_lineage(retained, [*whole, whole[0]]))


def test_a_run_that_does_not_begin_at_a_turn_is_none() -> None:
    retained = [Said("assistant", "x"), Said("assistant", "y")]
    refusal("lineage-differs", lambda: require_lineage(retained, [Said("user", "u"), *retained]))


def test_a_run_that_occurs_twice_is_ambiguous() -> None:
    turn = [Said("user", "hi"), Said("assistant", "hello")]
    refusal("lineage-ambiguous", lambda: require_lineage(turn, [*turn, *turn, Said("user", "next")]))


def test_what_a_plan_keeps_is_found_again() -> None:
    whole = said("suaucta")
    plan = plan_chat_shift(whole, [2] * 7, 12, 0)
    retained = [whole[at] for first, end in plan.kept_messages for at in range(first, end)]
    assert require_lineage(retained, [*whole, Said("user", "next")]) == 7


# --- the shift -----------------------------------------------------------------------------------------------------

MIXED = Geometry(
    (synthetic.full(), synthetic.sliding(8), synthetic.latent(pool=4), synthetic.recurrent(), synthetic.shared(0)),
    draft_layers=(synthetic.full(1, 4),),
)


def content(key: PlaneKey, tokens: tuple[int, ...], size: int) -> bytes:
    """Bytes that depend on all tokens up to a row, as those of a model do."""
    generator = np.random.default_rng([len(tokens), *tokens, *str(key).encode()])
    return generator.integers(0, 256, size, np.uint8).tobytes()


def prefill(cache: LiveCache, tokens: Sequence[int], chunk: int = 5, *, draft: bool = True) -> None:
    """Append ``tokens`` in chunks, to the draft layers as well."""
    known = tuple(tokens)
    layers = {key: layer for key, layer, _ in cache.geometry.planes()}
    for start in range(0, len(known), chunk):
        end = min(len(known), start + chunk)
        rows: dict[PlaneKey, bytes] = {}
        for key, spec in plane_specs(cache.geometry).items():
            pool = layers[key].pool or 1
            if spec.unit is Unit.STATE:
                rows[key] = content(key, known[:end], spec.row_bytes)
            elif spec.unit is Unit.POOL:
                numbers = range(start // pool, end // pool)
                rows[key] = b"".join(content(key, known[: (n + 1) * pool], spec.row_bytes) for n in numbers)
            else:
                rows[key] = b"".join(content(key, known[: n + 1], spec.row_bytes) for n in range(start, end))
        for scope in (Scope.LAYER, Scope.DRAFT) if draft and cache.geometry.draft_layers else (Scope.LAYER,):
            mine = {key: given for key, given in rows.items() if key.scope == scope.value}
            cache.append(end - start, mine, tokens=known[start:end] if scope is Scope.LAYER else (), scope=scope)


def session(tokens: Sequence[int], geometry: Geometry = MIXED) -> LiveCache:
    cache = LiveCache.allocate(geometry, max_context=32)
    prefill(cache, tokens)
    cache.set_extra("logits", b"12345678", ENCODINGS["f32"], (2,))
    return cache


def state(cache: LiveCache) -> dict[str, bytes]:
    cut = transfer.capture(cache, WHO)
    return {str(key): bytes(plane.buffer) for key, plane in cut.planes.items()} | {"record": repr(cut.record).encode()}


def test_a_shift_is_a_session_of_the_kept_tokens_at_the_next_epoch() -> None:
    tokens = tuple(range(100, 130))
    cache = session(tokens)
    before = state(cache)
    plan = plan_raw_shift(len(tokens), 4, 32, 12)
    old = shift(cache, plan.select(tokens), prefill)
    assert (cache.position, cache.draft_position, cache.generation.context_epoch) == (20, 20, 1)
    record = transfer.capture(cache, WHO).record
    assert (record.position, record.draft_position, record.context_epoch, record.extras) == (20, 20, 1, ())
    alone = LiveCache.allocate(MIXED, max_context=32)
    prefill(alone, plan.select(tokens))
    alone.generation.context_epoch = 1
    assert state(cache) == state(alone)
    cache.swap(old)
    assert state(cache) == before


def test_an_edit_in_place_would_not_be_that_session() -> None:
    """The control: rows of the old session at their new positions are not the rows of the rebuilt one."""
    tokens = tuple(range(100, 130))
    cache = session(tokens)
    layer = cache.generation.layers[0]
    survivors = bytes(layer.read_rows(layer.planes["k"], 20, 30))
    shift(cache, tokens[:4] + tokens[20:], prefill)
    layer = cache.generation.layers[0]
    assert bytes(layer.read_rows(layer.planes["k"], 4, 14)) != survivors


def test_every_shift_advances_the_epoch_and_older_continuations_are_refused() -> None:
    cache = session(range(20))
    require_epoch(cache.generation, 0)
    for epoch in (1, 2, 3):
        shift(cache, range(10 + epoch), prefill)
        assert cache.generation.context_epoch == epoch
        require_epoch(cache.generation, epoch)
        for older in range(epoch):
            error = refusal("stale-epoch", lambda older=older: require_epoch(cache.generation, older))
            assert (error.expected, error.found) == (epoch, older)
    refusal("epoch-ahead", lambda: require_epoch(cache.generation, 4))


def test_the_epoch_travels_with_a_cut() -> None:
    cache = session(range(20))
    shift(cache, range(12), prefill)
    cut = transfer.capture(cache, WHO)
    other = LiveCache.allocate(MIXED, max_context=32)
    transfer.install(other, cut, WHO)
    require_epoch(other.generation, 1)
    refusal("stale-epoch", lambda: require_epoch(other.generation, 0))


class PlantedError(Exception):
    """What a planted fault raises."""


def fails_at_once(cache: LiveCache, tokens: Sequence[int]) -> None:
    raise PlantedError


def fails_midway(cache: LiveCache, tokens: Sequence[int]) -> None:
    prefill(cache, tokens[:7])
    raise PlantedError


def leaves_tokens_out(cache: LiveCache, tokens: Sequence[int]) -> None:
    prefill(cache, tokens[:-1])


def leaves_the_draft_out(cache: LiveCache, tokens: Sequence[int]) -> None:
    prefill(cache, tokens, draft=False)


def feeds_other_tokens(cache: LiveCache, tokens: Sequence[int]) -> None:
    prefill(cache, [token + 1 for token in tokens])


def leaves_a_taint(cache: LiveCache, tokens: Sequence[int]) -> None:
    prefill(cache, tokens)
    cache.taint("a planted fault")


def leaves_a_replay(cache: LiveCache, tokens: Sequence[int]) -> None:
    prefill(cache, tokens)
    cache.owe_replay(1)


def leaves_a_layer_behind(cache: LiveCache, tokens: Sequence[int]) -> None:
    prefill(cache, tokens)
    layer = cache.generation.layers[1]
    layer.state = layer.fresh_state(cache.max_context, cache.index_rows)


@pytest.mark.parametrize(
    ("broken", "code"),
    [
        (fails_at_once, None),
        (fails_midway, None),
        (leaves_tokens_out, "prefill-incomplete"),
        (leaves_the_draft_out, "prefill-incomplete"),
        (feeds_other_tokens, "prefill-incomplete"),
        (leaves_a_taint, "tainted"),
        (leaves_a_replay, "replay-pending"),
        (leaves_a_layer_behind, "layers-disagree"),
    ],
)
def test_a_shift_that_fails_leaves_the_live_session(
    broken: Callable[[LiveCache, Sequence[int]], None], code: str | None
) -> None:
    cache = session(range(20))
    live, before = cache.generation, state(cache)
    with pytest.raises((PlantedError, InstallError)) as caught:
        shift(cache, range(12), broken)
    assert getattr(caught.value, "code", None) == code
    assert cache.generation is live
    assert state(cache) == before
    shift(cache, range(12), prefill)
    assert cache.generation.context_epoch == 1


def test_a_session_that_cannot_be_shifted_is_refused() -> None:
    cache = session(range(20))
    refusal("empty-request", lambda: shift(cache, (), prefill))
    with transfer.holding(cache, WHO):
        refusal("quiesced", lambda: shift(cache, range(5), prefill))
    refusal("capacity-too-small", lambda: shift(cache, range(33), prefill))

    def publishes_another(staging: LiveCache, tokens: Sequence[int]) -> None:
        prefill(staging, tokens)
        cache.swap(cache.new_generation())

    refusal("generation-replaced", lambda: shift(cache, range(5), publishes_another))
    cache.taint("a planted fault")
    refusal("tainted", lambda: shift(cache, range(5), prefill))


def test_a_cache_over_ranks_is_shifted_by_its_swap() -> None:
    geometry = Geometry((synthetic.full(4, 8), synthetic.sliding(8, heads=4)))
    ranked = RankedCache.allocate(geometry, RankPlan(4), max_context=32)
    prefill(ranked.cache, range(20))
    ranked.rewind(20)
    transaction = ranked.begin()
    fresh = rebuild(ranked.cache, range(12), prefill)
    refusal("transaction-active", lambda: ranked.swap(fresh))
    ranked.finalize(transaction, 20)
    ranked.swap(fresh)
    alone = RankedCache.allocate(geometry, RankPlan(1), max_context=32)
    prefill(alone.cache, range(12))
    alone.rewind(12)
    shifted, wanted = ranked.capture(WHO), alone.capture(WHO)
    assert shifted.record == replace(wanted.record, context_epoch=1)
    assert {key: bytes(p.buffer) for key, p in shifted.planes.items()} == {
        key: bytes(p.buffer) for key, p in wanted.planes.items()
    }


# --- rows without rotation -----------------------------------------------------------------------------------------


def layer_of(geometry: LayerGeometry, order: str = "NHD", capacity: int = 32) -> LiveLayer:
    device = LiveCache.allocate(MIXED, max_context=8).generation.layers[0].device
    return LiveLayer.allocate("layer", 0, geometry, LayerLayout("linear", capacity, order), device, capacity)


@pytest.mark.parametrize("orders", [("NHD", "HND"), ("HND", "NHD"), ("HND", "HND")])
def test_rows_without_rotation_move_by_copying(orders: tuple[str, str]) -> None:
    cache = session(range(20))
    source = cache.generation.layers[0]
    kept_rows = RowSet.of((0, 3), (11, 20))
    middle, target = layer_of(source.geometry, orders[0]), layer_of(source.geometry, orders[1], 12)
    relocate_rows(source, middle, RowSet.of((0, 20)))
    relocate_rows(middle, target, kept_rows)
    assert (target.position, source.position) == (12, 20)
    for role, plane in source.planes.items():
        wanted = bytes(source.read_rows(plane, 0, 3)) + bytes(source.read_rows(plane, 11, 20))
        assert bytes(target.read_rows(target.planes[role], 0, 12)) == wanted
    empty = layer_of(source.geometry)
    relocate_rows(source, empty, RowSet())
    assert empty.position == 0


def test_rows_that_carry_positions_do_not_move() -> None:
    cache = session(range(20))
    rotated = replace(synthetic.full(), rope="global")
    for geometry in (rotated, synthetic.latent(pool=4)):
        error = refusal("position-bound", lambda g=geometry: relocate_rows(layer_of(g), layer_of(g), RowSet()))
        assert isinstance(error, CompatibilityError)
    sliding, states = cache.generation.layers[1], cache.generation.layers[3]
    refusal("position-bound", lambda: relocate_rows(sliding, sliding, RowSet()))
    refusal("position-bound", lambda: relocate_rows(states, states, RowSet()))
    source = cache.generation.layers[0]
    refusal("not-fresh", lambda: relocate_rows(source, source, RowSet.of((0, 3))))
    refusal("layout-differs", lambda: relocate_rows(source, layer_of(synthetic.full(4, 4)), RowSet.of((0, 3))))
    refusal("rows-not-resident", lambda: relocate_rows(source, layer_of(source.geometry), RowSet.of((0, 21))))
    small = layer_of(source.geometry, capacity=8)
    refusal("capacity-too-small", lambda: relocate_rows(source, small, RowSet.of((0, 9))))
    assert small.position == 0
