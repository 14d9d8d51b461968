"""Growth and hydration of a ranked cache: how rows come into a fresh one other than by a transaction.

Growth copies what counts of a smaller cache, rank by rank, into a larger one; hydration publishes rows that something
else put in place. Both are published only after every check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvpack.errors import InstallError
from kvpack.live.layers import LayerState
from kvpack.live.placement import refused
from kvpack.live.ranked_layer import RankedLayer
from kvpack.live.rebasing_ring import RebasingRing
from kvpack.live.tensor_parallel import RankedCache
from kvpack.model.geometry import PlaneKey, Unit
from kvpack.model.ranges import RowSet

__all__ = ["GrowthPlan", "plan_growth", "publish_growth", "publish_hydration"]


@dataclass(frozen=True)
class GrowthPlan:
    """What a larger cache takes over: the first ``rows`` of ``committed`` tokens, of each plane the rows of ``need``.

    ``rank_row_bytes`` are the bytes of one such row on one rank; a state's rows are its bytes on one rank.
    """

    source: RankedCache
    committed: int
    rows: int
    max_context: int
    next_generation: int
    need: Mapping[PlaneKey, RowSet]
    rank_row_bytes: Mapping[PlaneKey, int]

    def rank_bytes(self, key: PlaneKey) -> int:
        """Bytes of a plane that are copied on one rank."""
        return self.need[key].count * self.rank_row_bytes[key]


def plan_growth(source: RankedCache, max_context: int, rows: int | None = None) -> GrowthPlan:
    """What a cache for ``max_context`` tokens takes over of the first ``rows`` (all committed by default).

    Of a ring this is the aligned window and nothing older. Raises InstallError ``transaction-active``,
    ``half-committed``, ``not-larger``, ``position-out-of-range``, ``lapped``, and ``state-has-no-past`` for fewer rows
    than a recurrent state stands behind.
    """
    source.cache.require_usable("a growth")
    source.require_settled("a growth")
    committed = source.committed_length
    taken = committed if rows is None else rows
    if max_context <= source.max_context:
        raise refused("not-larger", "a growth is to more tokens", None, f"more than {source.max_context}", max_context)
    if not 0 <= taken <= committed:
        raise refused("position-out-of-range", "a growth takes committed rows", None, f"0 to {committed}", taken)
    need: dict[PlaneKey, RowSet] = {}
    row_bytes: dict[PlaneKey, int] = {}
    for layer in source.layers:
        wanted = layer.need(taken)
        for role, plane in layer.members[0].planes.items():
            key = plane.spec.key
            row_bytes[key] = plane.spec.axis_bytes
            if plane.spec.unit is Unit.STATE:
                if taken != committed:
                    raise refused("state-has-no-past", f"{key} stands behind all rows", layer.number, committed, taken)
                need[key] = RowSet.of((0, plane.spec.row_bytes))
            else:
                _require_held(layer, role, wanted[key], taken)
                need[key] = wanted[key]
    return GrowthPlan(source, committed, taken, max_context, source.next_generation, need, row_bytes)


def _require_held(layer: RankedLayer, role: str, rows: RowSet, taken: int) -> None:
    for first, end in rows:
        try:
            layer.spans(layer.planes[role], first, end)
        except InstallError as error:
            raise refused(
                "lapped",
                f"plane {role} does not hold the window of {taken}",
                layer.number,
                error.expected,
                error.found,
            ) from None


def publish_growth(target: RankedCache, growth: GrowthPlan) -> None:
    """Take the planned rows over into a fresh, larger cache; its transactions count on from the smaller one's.

    Everything is checked before a byte moves, and what fails afterwards leaves the larger cache empty; the smaller one
    is only read. Raises InstallError ``not-fresh``, ``stale-plan``, ``layout-differs``.
    """
    source = growth.source
    target.require_fresh("a growth")
    if target.next_generation != 1:
        raise refused("not-fresh", "a growth is into a cache without a past", None, 1, target.next_generation)
    source.cache.require_usable("a growth")
    before = (None, growth.committed, growth.committed, growth.next_generation)
    now = (source.active, source.committed_length, source.staged_length, source.next_generation)
    if now != before:
        raise refused("stale-plan", "the smaller cache changed since", None, before, now)
    states = _grown_states(target, growth)
    try:
        for layer, other, state in zip(target.layers, source.layers, states, strict=True):
            for (_, member), (_, old) in zip(layer.ranks(), other.ranks(), strict=True):
                for role, plane in member.planes.items():
                    for first, end in growth.need[plane.spec.key]:
                        member.write_rows(plane, first, old.read_rows(old.planes[role], first, end), state)
    except BaseException:
        target.cache.reset()
        raise
    smaller, larger = source.cache.generation, target.cache.generation
    whole = growth.rows == growth.committed
    larger.tokens[:] = smaller.tokens if whole else smaller.tokens[: growth.rows]
    larger.extras = dict(smaller.extras) if whole else {}
    larger.rope_delta, larger.context_epoch = smaller.rope_delta, smaller.context_epoch
    target.next_generation = growth.next_generation
    target.publish(states, growth.rows)


def _grown_states(target: RankedCache, growth: GrowthPlan) -> list[LayerState]:
    """Every layer's state in the larger cache, once the two caches are held to each other."""
    source = growth.source
    if source.geometry != target.geometry:
        raise refused("layout-differs", "the larger cache is of another geometry", None, "an equal one", "another")
    if growth.max_context != target.max_context:
        raise refused(
            "layout-differs", "the larger cache is of another size", None, growth.max_context, target.max_context
        )
    if source.plan.ranks != target.plan.ranks:
        raise refused("layout-differs", "another number of ranks", None, source.plan.ranks, target.plan.ranks)
    states = []
    for layer, other in zip(target.layers, source.layers, strict=True):
        for name in ("law", "order", "page_size"):
            theirs, mine = getattr(other.layout, name), getattr(layer.layout, name)
            if theirs != mine:
                raise refused("layout-differs", f"the larger cache has another {name}", layer.number, theirs, mine)
        if other.shares != layer.shares:
            raise refused(
                "layout-differs", "the larger cache divides otherwise", layer.number, "equal shares", "other ones"
            )
        states.append(_restored(layer, growth.rows))
    return states


def publish_hydration(
    target: RankedCache,
    length: int,
    first_rows: Mapping[int, int] | None = None,
    *,
    tokens: Sequence[int] = (),
) -> None:
    """Publish that the ranks' planes of a fresh cache hold the state of ``length`` tokens, written from outside.

    ``first_rows`` gives the first resident row of rebasing rings by layer number, where it is not the start of the
    aligned window; every other plane's rows lie where a restore puts them. Raises InstallError ``not-fresh``,
    ``lapped``, ``ring-too-small``, ``capacity-too-small``, ``hydration-from-zero``, ``tokens-behind``.
    """
    target.require_fresh("a hydration")
    states = []
    for layer in target.layers:
        first = (first_rows or {}).get(layer.number)
        placement = layer.state.placement
        if isinstance(placement, RebasingRing) and first is not None:
            states.append(LayerState(placement.hydrated(length, first, layer=layer.number), None, length))
        elif first:
            raise refused("hydration-from-zero", "only a rebasing ring begins behind row 0", layer.number, 0, first)
        else:
            states.append(_restored(layer, length))
    if tokens and len(tokens) < length:
        raise refused("tokens-behind", "the token list ends before the rows", None, length, len(tokens))
    target.cache.generation.tokens[:] = tokens
    target.publish(states, length)


def _restored(layer: RankedLayer, length: int) -> LayerState:
    placement, pool = layer.state.placement, layer.state.pool
    return LayerState(
        placement.restored(length, layer=layer.number) if placement is not None else None,
        pool.restored(length, layer=layer.number) if pool is not None else None,
        length,
    )
