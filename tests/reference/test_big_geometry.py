"""The 131,072-token, 52-layer geometry: exact plane sizes, and captures and installs that need no second copy.

39 sliding layers of window 2,048 and 13 growing ones, 2 KV heads of 128, f16. A process of its own fills the cache to
the last token but one, streams it into a pack, and installs the pack into a fresh cache and into a staging generation;
it measures by how much its memory grew at the most. What is allowed beyond the caches themselves is 64 MiB.
"""

from __future__ import annotations

import gc
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

import kvpack
from kvpack.device.host import HostDevice
from kvpack.live import transfer
from kvpack.live.cache import LiveCache
from kvpack.model.geometry import Geometry, LayerGeometry, PlaneKey
from tests import synthetic
from tests.conftest import ROOT, pinned_environment

CONTEXT, WINDOW, POSITION, CHUNK = 131_072, 2_048, 131_071, 2_048
SLIDING = LayerGeometry("sliding", synthetic.kv(2, 128, "f16"), window=WINDOW)
GROWING = synthetic.full(2, 128, "f16")
MODEL = Geometry((SLIDING,) * 39 + (GROWING,) * 13)
RING_BYTES, GROWING_BYTES = 81_788_928, 1_744_830_464
ALLOWED = 64 << 20
WHO = synthetic.identity()


def planes_of(cache: LiveCache, kind: str) -> int:
    """Bytes that are allocated for the layers of a kind."""
    return sum(p.buffer.nbytes for layer, p in cache.generation.every_plane() if layer.geometry.kind == kind)


def allocate() -> LiveCache:
    return LiveCache.allocate(MODEL, max_context=CONTEXT, device=HostDevice(2))


def status(field: str) -> int:
    """A line of this process's memory status, in bytes: ``VmRSS`` now, ``VmHWM`` the most since it was reset."""
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def growth(work: Callable[[], object]) -> int:
    """By how many bytes the resident memory grew at the most while ``work`` ran."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def fill(cache: LiveCache) -> None:
    """Rows up to POSITION, other ones in every plane, in chunks that wrap the rings."""
    row_bytes = 512
    pool = memoryview(np.random.default_rng(3).integers(0, 256, (CHUNK + 8192) * row_bytes, np.uint8).tobytes())
    keys: list[PlaneKey] = [plane.spec.key for _, plane in cache.generation.every_plane()]
    while cache.position < POSITION:
        start = cache.position
        count = min(CHUNK, POSITION - start)
        rows = {}
        for number, key in enumerate(keys):
            first = (start // CHUNK * 61 + number * 7) % 8192 * row_bytes
            rows[key] = pool[first : first + count * row_bytes]
        cache.append(count, rows, start=start)


def digests(cache: LiveCache) -> list[str]:
    """One digest a plane over its physical bytes."""
    return [blake3(plane.buffer.array).hexdigest() for _, plane in cache.generation.every_plane()]


def captures(cache: LiveCache, path: Path) -> dict[str, int]:
    """The growth of a streaming capture, and of one in memory."""

    def stream() -> None:
        with transfer.holding(cache, WHO) as live:
            kvpack.save(live, path, codec="raw")

    return {"capture": growth(stream), "capture in memory": growth(lambda: transfer.capture(cache, WHO))}


def measure(path: Path) -> dict[str, object]:
    """Fill, capture, install, stage: what the process below reports."""
    cache = allocate()
    report: dict[str, object] = {"rings": planes_of(cache, "sliding"), "growing": planes_of(cache, "full")}
    fill(cache)
    wanted = digests(cache)

    report |= captures(cache, path) | {"file": path.stat().st_size}
    del cache
    gc.collect()
    with kvpack.open_pack(path, allow_unsigned=True) as pack:
        fresh = allocate()
        report["install"] = growth(lambda: transfer.install(fresh, pack.cut(), WHO))
        report["installed"] = digests(fresh) == wanted
        fresh.reset()
        staged: list[transfer.Staged] = []
        report["stage"] = growth(lambda: staged.append(transfer.stage(fresh, pack.cut(), WHO)))
        fresh.swap(staged[0].generation)
        report["swapped"] = digests(fresh) == wanted and fresh.position == POSITION
    return report


def test_planes_have_exactly_the_bytes_of_the_geometry() -> None:
    cache = allocate()
    assert (planes_of(cache, "sliding"), planes_of(cache, "full")) == (RING_BYTES, GROWING_BYTES)
    assert cache.size.nbytes == RING_BYTES + GROWING_BYTES


def test_streaming_needs_no_second_copy(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 4 * GROWING_BYTES:
        pytest.skip("the pack needs 2 GB of free disk")
    path = tmp_path / "big.kvpack"
    program = (
        "import json, pathlib, sys; from tests.reference import test_big_geometry as big;"
        "print(json.dumps(big.measure(pathlib.Path(sys.argv[1]))))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, str(path)],
            cwd=ROOT,
            env=pinned_environment() | {"MALLOC_ARENA_MAX": "2"},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        path.unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    print(report)
    caches = RING_BYTES + GROWING_BYTES
    assert (report["rings"], report["growing"]) == (RING_BYTES, GROWING_BYTES)
    assert caches < report["file"] + 13 * 1024 < caches + ALLOWED
    assert report["capture"] <= ALLOWED
    assert report["capture in memory"] > GROWING_BYTES  # a copy is seen
    assert report["install"] <= caches + ALLOWED
    assert report["stage"] <= caches + ALLOWED
    assert report["installed"]
    assert report["swapped"]
