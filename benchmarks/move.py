"""Measure the host device's moves, as ratios against ``np.copyto`` of the same bytes in the same run.

    python benchmarks/move.py                       # one layer of 2 heads x 128 f16, 131,072 rows
    python benchmarks/move.py --heads 8 --head-bytes 136 --rows 65536

Every figure is the best of ``--repeats``; the contenders alternate, so that a slow second of the machine falls on all
of them. A ratio of 1.00 is the speed of one thread's plain copy; above it the copy is faster.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from kvpack.device.host import HostDevice
from kvpack.device.protocol import Move, RowStrides

PAGE = 16


def moves_of(device: HostDevice, rows: int, heads: int, head_bytes: int) -> dict[str, list[Move]]:
    """The same rows in each layout: a wrapped token-major ring, a head-major plane, shuffled pages of 16 rows."""
    nbytes = rows * heads * head_bytes
    token_major = RowStrides(heads, head_bytes, heads * head_bytes, head_bytes)
    head_major = RowStrides(heads, head_bytes, head_bytes, rows * head_bytes)
    ring = ((rows // 3, rows - rows // 3), (0, rows // 3))
    pages = tuple((int(page) * PAGE, PAGE) for page in np.random.default_rng(0).permutation(rows // PAGE))
    return {
        "token-major ring": [Move(device.allocate(nbytes), token_major, ring, 0)],
        "head-major plane": [Move(device.allocate(nbytes), head_major, ((0, rows),), 0)],
        "head-major ring": [Move(device.allocate(nbytes), head_major, ring, 0)],
        "token-major pages": [Move(device.allocate(nbytes), token_major, pages, 0)],
    }


def contenders(device: HostDevice, rows: int, heads: int, head_bytes: int) -> dict[str, Callable[[], object]]:
    nbytes = rows * heads * head_bytes
    packed = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
    target = np.zeros(nbytes, dtype=np.uint8)
    runs: dict[str, Callable[[], object]] = {"np.copyto": lambda: np.copyto(target, packed)}
    for layout, moves in moves_of(device, rows, heads, head_bytes).items():
        runs[f"scatter {layout}"] = lambda moves=moves: device.scatter(moves, packed.data)  # type: ignore[misc]
        runs[f"gather {layout}"] = lambda moves=moves: device.gather(moves, target.data)  # type: ignore[misc]
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=131_072, help="a multiple of 16")
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--head-bytes", type=int, default=256)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    runs = contenders(HostDevice(options.threads), options.rows, options.heads, options.head_bytes)
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(options.repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    nbytes = options.rows * options.heads * options.head_bytes
    print(f"{nbytes / 2**20:.1f} MiB, {options.rows} rows of {options.heads} x {options.head_bytes} bytes")
    for name, seconds in best.items():
        print(f"{name:26} {nbytes / seconds / 1e9:7.2f} GB/s  {best['np.copyto'] / seconds:5.2f} of np.copyto")


if __name__ == "__main__":
    main()
