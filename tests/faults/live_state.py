"""Live caches with rows that say where they belong, packs of them, and refusals that must change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kvpack
from kvpack.device.host import HostDevice
from kvpack.errors import KvpackError
from kvpack.live import transfer
from kvpack.live.cache import LiveCache
from kvpack.model.geometry import Geometry, PlaneKey, Unit
from kvpack.model.layout import LayerLayout, ProducerLayout
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import Cut
from tests import synthetic

WHO = synthetic.identity()
KEY = kvpack.SigningKey.from_seed(b"state faults, a test key........"[:32])
DEVICE = HostDevice(1)


def write(cut: Cut | transfer.LiveCut, folder: Path) -> Path:
    """A signed pack of ``cut``."""
    kvpack.save(cut, folder / "state.kvpack", codec="raw", sign=KEY, force=True)
    return folder / "state.kvpack"


def through(cut: Cut, folder: Path) -> Cut:
    return kvpack.load(write(cut, folder), trust=KEY.public)


def allocate(geometry: Geometry, max_context: int = 64, *layouts: LayerLayout, dead: int = 0) -> LiveCache:
    cache = LiveCache.allocate(
        geometry, max_context=max_context, layouts=ProducerLayout(layouts) if layouts else None, device=DEVICE
    )
    for layer, plane in cache.generation.every_plane():
        layer.device.fill(plane.buffer, 0, plane.buffer.nbytes, dead)
    return cache


def filled(geometry: Geometry, position: int, max_context: int = 64, *layouts: LayerLayout, seed: int = 0) -> LiveCache:
    """A cache that holds the rows of :func:`tests.synthetic.make_cut`."""
    cache = allocate(geometry, max_context, *layouts)
    whole = {key: RowSet.of((0, position)) for key, _, plane in geometry.planes() if plane.unit is Unit.TOKEN}
    cut = synthetic.make_cut(geometry, position, surplus=whole, logits=0, seed=seed)
    rows = {key: plane.buffer for key, plane in cut.planes.items() if key.scope == "layer"}
    cache.append(position, rows, tokens=cut.tokens)
    return cache


def memory(cache: LiveCache) -> list[bytes]:
    return [plane.buffer.array.tobytes() for _, plane in cache.generation.every_plane()]  # type: ignore[attr-defined]


def counters(cache: LiveCache) -> list[int]:
    return np.frombuffer(cache.counters.array.tobytes(), "<i4").tolist()  # type: ignore[attr-defined]


def refused(call: Callable[[], object], cache: LiveCache) -> KvpackError:
    """The refusal of ``call``, with every byte and counter of ``cache`` as it was."""
    before, position, counted = memory(cache), cache.position, counters(cache)
    with pytest.raises(KvpackError) as caught:
        call()
    assert (memory(cache), cache.position, counters(cache), cache.tainted) == (before, position, counted, None)
    return caught.value


def flip(path: Path, key: PlaneKey) -> None:
    """Change one payload byte of a plane's last tile."""
    seen = kvpack.inspect(path)
    record = [r for r in seen.records if seen.manifest.planes[r.tile.plane].spec.key == key][-1]
    content = bytearray(path.read_bytes())
    content[record.offset + record.stored_length // 2] ^= 0x10
    path.write_bytes(content)
