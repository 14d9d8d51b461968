"""What may happen to a cache between a checkpoint and its end, and appends that no placement would refuse by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvpack.errors import InstallError
from kvpack.live import transfer
from kvpack.live.cache import LiveCache
from kvpack.live.speculation import Speculation
from kvpack.model.geometry import Geometry, PlaneKey, Scope
from kvpack.model.layout import LayerLayout
from kvpack.model.ranges import RowSet
from tests import synthetic
from tests.unit.test_live_cache import WHO, Producer, check, digest, layouts, new

FULL = Geometry((synthetic.full(),))


def overwrite(producer: Producer, count: int) -> None:
    """Append rows that are not those of the producer's rule."""
    start = producer.cache.position
    rows = {key: b"\xee" * len(rows) for key, rows in producer.rows(FULL, start, count).items()}
    producer.cache.append(count, rows, tokens=range(start, start + count))


def rewind_and_append(producer: Producer) -> None:
    producer.cache.rewind(5)
    overwrite(producer, 6)


def reset_and_append(producer: Producer) -> None:
    producer.cache.reset()
    overwrite(producer, 11)


def publish(producer: Producer) -> None:
    other = new(FULL)
    other.append(12)
    transfer.publish_in_place(producer.cache, transfer.stage(producer.cache, transfer.capture(other.cache, WHO), WHO))


def reset_and_install(producer: Producer) -> None:
    other = new(FULL)
    other.append(11)
    producer.cache.reset()
    transfer.install(producer.cache, transfer.capture(other.cache, WHO), WHO)


def swap(producer: Producer) -> None:
    other = new(FULL)
    other.append(11)
    producer.cache.swap(transfer.stage(producer.cache, transfer.capture(other.cache, WHO), WHO).generation)


@pytest.mark.parametrize("elsewhere", [rewind_and_append, reset_and_append, publish, reset_and_install, swap])
def test_a_block_whose_rows_were_replaced_is_not_rolled_back(elsewhere: Callable[[Producer], None]) -> None:
    """The position says nothing: the cache stands above the checkpoint again, over other rows."""
    producer = new(FULL)
    producer.append(10)
    speculation = Speculation(producer.cache)
    speculation.checkpoint(4)
    elsewhere(producer)
    before, position = digest(producer.cache), producer.cache.position
    assert position >= 10
    for refused in (speculation.rollback, lambda: speculation.commit(0)):
        with pytest.raises(InstallError) as caught:
            refused()
        assert caught.value.code == ("rewound" if elsewhere is rewind_and_append else "generation-replaced")
    assert (digest(producer.cache), producer.cache.position) == (before, position)
    assert not speculation.active
    speculation.checkpoint(4)  # the lost block does not stand in the way of the next one
    producer.append(4)
    speculation.rollback()
    assert producer.cache.position == position


def test_a_rewind_inside_the_block_can_still_be_rolled_back() -> None:
    producer = new(FULL)
    producer.append(10)
    speculation = Speculation(producer.cache)
    speculation.checkpoint(4)
    producer.append(4)
    producer.cache.rewind(11)
    overwrite(producer, 2)
    speculation.rollback()
    check(transfer.capture(producer.cache, WHO))


@pytest.mark.parametrize("steps", [[3], [1, 1, 1], [2, 1]])
def test_accepted_rows_that_a_plane_shifted_away_are_replayed(steps: list[int]) -> None:
    """Accepting 1 of 3 tokens would look for row 7 where it lay before the plane shifted twice."""
    geometry = Geometry((synthetic.sliding(8),))
    producer = new(geometry, layouts=layouts(geometry, sliding=LayerLayout("chronological", 8)))
    producer.append(7)
    speculation = Speculation(producer.cache)
    speculation.checkpoint(16)
    for count in steps:
        producer.append(count)
    assert (speculation.commit(1), producer.cache.position) == (1, 7)
    producer.append(1)
    check(transfer.capture(producer.cache, WHO))


@pytest.mark.parametrize("layer", [synthetic.sliding(8), synthetic.recurrent()])
@pytest.mark.parametrize(("count", "code"), [(0, "zero-rows"), (-2, "zero-rows"), (13, "capacity-too-small")])
def test_layers_that_never_fill_are_held_to_the_context(layer: object, count: int, code: str) -> None:
    producer = new(Geometry((layer,)), 16)  # type: ignore[arg-type]
    producer.append(4)
    before = digest(producer.cache)
    rows = producer.rows(producer.cache.geometry, 4, max(count, 0))
    with pytest.raises(InstallError) as caught:
        producer.cache.append(count, rows)
    assert caught.value.code == code
    assert (digest(producer.cache), producer.cache.position, producer.cache.tainted) == (before, 4, None)


@pytest.mark.parametrize("position", [5, 8, 29])
@pytest.mark.parametrize(
    "growing", [LayerLayout("paged", 64, "NHD", 4), LayerLayout("paged", 64, "HND", 16), LayerLayout("linear", 64)]
)
def test_a_rings_cut_installs_into_a_sliding_layer_that_keeps_everything(position: int, growing: LayerLayout) -> None:
    """It needs the window's ``window - 1`` rows and has no others; a rewind that asks for more is refused."""
    geometry = Geometry((synthetic.sliding(8), synthetic.sliding(6, sink=2)))
    producer = new(geometry)
    producer.append(position)
    other = Producer(LiveCache.allocate(geometry, max_context=64, layouts=layouts(geometry, sliding=growing)))
    transfer.install(other.cache, transfer.capture(producer.cache, WHO), WHO)
    first = max(0, position - 7)
    resident = transfer.capture(other.cache, WHO, resident=True)
    check(resident)
    assert resident.stored[PlaneKey("layer", 0, "k")] == RowSet.of((first, position))
    assert resident.stored[PlaneKey("layer", 1, "k")] == RowSet.of((0, 2), (max(0, position - 5), position))
    if position == 29:
        with pytest.raises(InstallError) as caught:
            other.cache.rewind(28)
        assert caught.value.code == "beyond-headroom"
    other.append(9)
    other.cache.rewind(position + 3)
    check(transfer.capture(other.cache, WHO, resident=True))


def test_the_draft_is_rewound_by_itself() -> None:
    geometry = Geometry((synthetic.full(),), draft_layers=(synthetic.full(1, 4),))
    producer = new(geometry)
    producer.append(10)
    producer.cache.rewind(6, scope=Scope.DRAFT)
    assert (producer.cache.position, producer.cache.draft_position, len(producer.cache.generation.tokens)) == (
        10,
        6,
        10,
    )
    check(transfer.capture(producer.cache, WHO))
    with pytest.raises(InstallError) as caught:
        producer.cache.rewind(7, scope=Scope.DRAFT)
    assert caught.value.code == "forward-rewind"
