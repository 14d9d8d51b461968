"""Measure the CUDA device: scatter and gather against a device-to-device copy, installs against the link. Needs a GPU.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --tokens 32768 --layers 32 --kv-heads 8

Times are CUDA events' for kernels and the clock's for whole installs, the best of ``--repeats``; contenders alternate.
Targets: kernels at 0.90 of the copy or better, a 131,072-token install at 0.90 of the link or better. The copy moves as
many bytes as the kernel, read and written. The install is measured three times: rows in ordinary memory, which each
thread first copies into pinned memory; rows that a reader writes straight there (``scatter_filled``), here by doing
nothing: what is left is kvpack's own path; and the same in tiles of 1 MiB that the device hashes before it scatters
them (``scatter_verified``).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from kvpack_kernels import abi

from kvpack.device.cuda import CudaDevice
from kvpack.device.cuda_moves import pieces
from kvpack.device.protocol import Move, RowStrides, Unverified
from kvpack.errors import EngineError

PAGE = 16
TILE_BYTES = 1 << 20


def plane_moves(device: CudaDevice, rows: int, heads: int, head_bytes: int) -> dict[str, Move]:
    nbytes = rows * heads * head_bytes
    token_major = RowStrides(heads, head_bytes, heads * head_bytes, head_bytes)
    head_major = RowStrides(heads, head_bytes, head_bytes, rows * head_bytes)
    ring = ((rows // 3, rows - rows // 3), (0, rows // 3))
    pages = tuple((int(page) * PAGE, PAGE) for page in np.random.default_rng(0).permutation(rows // PAGE))
    return {
        "token-major": Move(device.allocate(nbytes), token_major, ((0, rows),), 0),
        "head-major ring": Move(device.allocate(nbytes), head_major, ring, 0),
        "token-major pages": Move(device.allocate(nbytes), token_major, pages, 0),
    }


def seconds(cupy: Any, stream: Any, run: Callable[[], None]) -> float:
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record(stream)
    run()
    end.record(stream)
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end)) / 1e3


def measure_kernels(device: CudaDevice, options: argparse.Namespace) -> None:
    runtime, pipeline = device._runtime, device._pipeline
    cupy, stream = runtime.cupy, pipeline.work_stream
    heads, head_bytes = options.kv_heads, options.head_dim * 2
    nbytes = options.tokens * heads * head_bytes
    packed, other = device.allocate(nbytes), device.allocate(nbytes)
    runs: dict[str, Callable[[], None]] = {
        "device-to-device copy": lambda: runtime.within(other.address, packed.address, nbytes, stream)
    }
    keep: list[Any] = []
    for layout, move in plane_moves(device, options.tokens, heads, head_bytes).items():
        (piece,) = pieces(move, 1 << 62)
        pages = device.allocate(max(4, piece.page_bytes))
        if piece.pages is not None:
            device.write(pages, 0, memoryview(piece.pages).cast("B"))
        table, tiles = abi.move_table([(piece.rows(pages.address), packed.address)])
        jobs = device.allocate(table.nbytes)
        device.write(jobs, 0, memoryview(table.tobytes()))
        arguments = np.uint64(jobs.address), np.uint32(len(table))
        for kernel in ("kvpack_scatter", "kvpack_gather"):
            runs[f"{kernel[7:]} {layout}"] = lambda kernel=kernel, tiles=tiles, arguments=arguments: pipeline.launch(  # type: ignore[misc]
                "move", kernel, tiles, *arguments
            )
        keep += [move, pages, jobs]
    device.synchronise()
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(options.repeats + 1):
        for name, run in runs.items():
            best[name] = min(best[name], seconds(cupy, stream, run))
    print(f"\nkernels, one plane of {nbytes / 1e6:.0f} MB")
    for name, took in best.items():
        ratio = best["device-to-device copy"] / took
        print(f"  {name:26} {2 * nbytes / took / 1e9:8.0f} GB/s  {ratio:5.2f} of the copy")


def measure_installs(device: CudaDevice, options: argparse.Namespace) -> None:
    runtime = device._runtime
    heads, head_bytes = options.kv_heads, options.head_dim * 2
    row, count = heads * head_bytes, 2 * options.layers
    nbytes = options.tokens * row
    strides = RowStrides(heads, head_bytes, head_bytes, options.tokens * head_bytes)
    planes = [Move(device.allocate(nbytes), strides, ((0, options.tokens),), 0) for _ in range(count)]
    rows = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
    pinned, target, stream = runtime.allocate_pinned(nbytes), device.allocate(nbytes), runtime.stream()

    def link() -> None:
        for _ in range(count):
            runtime.to_device(target.address, pinned, nbytes, stream)
        runtime.finish(stream)

    def install(one: Callable[[Move], None]) -> Callable[[], None]:
        def run() -> None:
            with ThreadPoolExecutor(options.threads) as pool:
                list(pool.map(one, planes))
            device.synchronise()

        return run

    def tile(plane: Move, first: int) -> Unverified:
        rows_here = min(TILE_BYTES // row, options.tokens - first)
        move = Move(plane.buffer, strides, ((first, rows_here),), 0)
        return Unverified([move], rows_here * row, lambda target: None, lambda digest: None)

    tiles = [tile(plane, first) for first in range(0, options.tokens, TILE_BYTES // row) for plane in planes]
    out = np.empty(nbytes, dtype=np.uint8)
    runs: dict[str, Callable[[], None]] = {
        "the link (pinned copy)": link,
        "install, rows in memory": install(lambda move: device.scatter([move], rows.data)),
        "install, filled in place": install(lambda move: device.scatter_filled([move], lambda offset, pinned: None)),
        "install, hashed on device": lambda: device.scatter_verified(tiles) or device.synchronise(),
        "capture into memory": lambda: [device.gather([move], out.data) for move in planes] and None,
    }
    best = dict.fromkeys(runs, float("inf"))
    device.synchronise()
    for _ in range(options.repeats + 1):
        for name, run in runs.items():
            before = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - before)
    runtime.free_pinned(pinned)
    print(f"\n{options.tokens} tokens, {count} planes, {count * nbytes / 1e9:.2f} GB")
    for name, took in best.items():
        ratio = best["the link (pinned copy)"] / took
        print(f"  {name:26} {took * 1e3:8.1f} ms  {count * nbytes / took / 1e9:6.1f} GB/s  {ratio:5.2f} of the link")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072, help="a multiple of 16")
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    try:
        device = CudaDevice()
    except EngineError as error:
        sys.exit(f"no measurement: {error.code}: {error}")
    print(f"{device.name}, {device._runtime.architecture}")
    measure_kernels(device, options)
    measure_installs(device, options)


if __name__ == "__main__":
    main()
