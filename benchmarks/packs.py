"""Packs against what a user would pick instead, side by side in one run: `python benchmarks/packs.py [--mib 512]`.

A session of growing head-major planes and wrapped rings (104 planes, bf16-like rows) is captured to a file and restored
into live planes. Alternatives move the same rows: gather + ``safetensors.numpy.save_file``, ``load_file`` + scatter
(neither verifies), and bare ``write`` as the floor. Figures are GB/s of raw rows, and ratios to the safetensors way.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import kvpack
from kvpack.live import transfer
from kvpack.live.cache import LiveCache
from kvpack.model.encoding import ENCODINGS
from kvpack.model.geometry import Geometry, LayerGeometry, PlaneGeometry
from kvpack.model.identity import Identity
from kvpack.model.layout import LayerLayout, ProducerLayout

WHO = Identity({"weights": b"w" * 32}, {})
LAYERS, WINDOW = 52, 2048


def build(mib: int) -> LiveCache:
    planes = tuple(PlaneGeometry(role, ENCODINGS["bf16"], (2, 128)) for role in ("k", "v"))
    full, ring = LayerGeometry("full", planes), LayerGeometry("sliding", planes, window=WINDOW)
    geometry = Geometry(tuple(full if n % 4 == 3 else ring for n in range(LAYERS)))
    tails = 39 * WINDOW * 1024
    position = max(WINDOW + 700, (mib * (1 << 20) - tails) // (13 * 1024))
    layouts = ProducerLayout(
        tuple(
            LayerLayout("linear", position + 64, "HND") if layer.kind == "full" else LayerLayout("modulo", WINDOW)
            for layer in geometry.layers
        )
    )
    cache = LiveCache.allocate(geometry, max_context=position + 64, layouts=layouts)
    generator = np.random.default_rng(0)
    while cache.position < position:
        count = min(4096, position - cache.position)
        rows = {}
        for layer in cache.generation.layers:
            for plane in layer.planes.values():
                words = generator.standard_normal(count * 256, np.float32).view(np.uint16)[1::2]
                rows[plane.spec.key] = memoryview(np.ascontiguousarray(words)).cast("B")
        cache.append(count, rows, tokens=range(cache.position, cache.position + count))
    return cache


def timed(work: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    cache = build(options.mib)
    with transfer.holding(cache, WHO) as live:
        wanted = dict(live.stored)
        nbytes = sum(rows.count * live.specs[key].axis_bytes for key, rows in wanted.items())
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run(cache, wanted, nbytes, Path(folder), options.repeats)


def run(cache: LiveCache, wanted: dict, nbytes: int, folder: Path, repeats: int) -> None:
    tensors_file, bare = folder / "rows.safetensors", folder / "rows.bin"

    def rows() -> dict[str, np.ndarray]:
        cut = transfer.capture(cache, WHO)
        return {str(key): np.frombuffer(plane.buffer, np.uint8) for key, plane in cut.planes.items()}

    def capture_pack(codec: str) -> None:
        with transfer.holding(cache, WHO) as live:
            kvpack.save(live, folder / f"{codec}.kvpack", codec=codec, force=True)

    def capture_safetensors() -> None:
        save_file(rows(), tensors_file)

    def write_bare() -> None:
        with bare.open("wb") as file:
            for content in rows().values():
                file.write(content)
            file.flush()
            os.fsync(file.fileno())

    target = LiveCache.allocate(cache.geometry, max_context=cache.max_context, layouts=cache.layouts)

    def install_pack(codec: str) -> None:
        target.reset()
        with kvpack.open_pack(folder / f"{codec}.kvpack", allow_unsigned=True) as pack:
            transfer.install(target, pack.cut(), WHO)

    def install_safetensors() -> None:
        target.reset()
        loaded = load_file(tensors_file)
        for layer in target.generation.layers:
            layer.state = layer.fresh_state(target.max_context, None)
            placement = layer.state.placement
            assert placement is not None
            layer.state = type(layer.state)(placement.restored(cache.position), None, cache.position)
            for plane in layer.planes.values():
                for first, end in wanted[plane.spec.key]:
                    content = loaded[str(plane.spec.key)]
                    layer.write_rows(
                        plane, first, memoryview(content)[: (end - first) * plane.spec.row_bytes], layer.state
                    )
        target.generation.position = cache.position

    reset = timed(target.reset, repeats)
    print(f"{nbytes / 1e6:.0f} MB of rows in {len(wanted)} planes, {os.cpu_count()} cores")
    base: dict[str, float] = {}
    report("capture: gather + safetensors.save_file", timed(capture_safetensors, repeats), nbytes, base, "capture")
    report("capture: gather + write + fsync", timed(write_bare, repeats), nbytes, base, "capture")
    for codec in ("raw", "zstd", "split"):
        seconds = timed(lambda codec=codec: capture_pack(codec), repeats)
        size = (folder / f"{codec}.kvpack").stat().st_size
        report(f"capture: kvpack {codec} (hashed, synced), {nbytes / size:.2f}:1", seconds, nbytes, base, "capture")
    report(
        "install: safetensors.load_file + scatter, unverified",
        timed(install_safetensors, repeats) - reset,
        nbytes,
        base,
        "install",
    )
    for codec in ("raw", "zstd", "split"):
        seconds = timed(lambda codec=codec: install_pack(codec), repeats) - reset
        report(f"install: kvpack {codec}, every byte verified", seconds, nbytes, base, "install")


def report(name: str, seconds: float, nbytes: int, base: dict[str, float], group: str) -> None:
    base.setdefault(group, seconds)
    print(f"  {name:62} {nbytes / seconds / 1e9:5.2f} GB/s  {base[group] / seconds:5.2f}x")


if __name__ == "__main__":
    main()
