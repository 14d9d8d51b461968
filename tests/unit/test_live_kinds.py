"""Live layers of the kinds that hold rows and states at once, hold nothing, or cannot be live."""

from __future__ import annotations

import pytest

from kvpack.live import transfer
from kvpack.model.geometry import Geometry, LayerGeometry
from tests import synthetic
from tests.unit.test_live_cache import WHO, check, new

GEOMETRY = Geometry((synthetic.full(), synthetic.hybrid(), synthetic.hybrid(8), LayerGeometry("none", ())))


@pytest.mark.parametrize("position", [0, 1, 7, 8, 9, 29])
def test_a_hybrid_layer_carries_its_rows_and_its_states(position: int) -> None:
    producer = new(GEOMETRY)
    if position:
        producer.append(position)
    cut = transfer.capture(producer.cache, WHO)
    if position:
        check(cut)
    other = new(GEOMETRY)
    transfer.install(other.cache, cut, WHO)
    assert [layer.position for layer in other.cache.generation.layers[:3]] == [position] * 3
    producer.append(3)
    other.append(3)
    one, two = (transfer.capture(each.cache, WHO) for each in (producer, other))
    check(two)
    assert {k: bytes(r.buffer) for k, r in one.planes.items()} == {k: bytes(r.buffer) for k, r in two.planes.items()}


def test_a_windowed_hybrid_layer_is_a_ring_and_a_plain_one_grows() -> None:
    size = new(GEOMETRY, max_context=64).cache.size
    row = 2 * 8 * 2
    assert {p.key.layer: p.nbytes for p in size.planes if p.key.role == "k"} == {0: 64 * row, 1: 64 * row, 2: 8 * row}
    assert size.fixed_bytes == 2 * (72 + 480)
