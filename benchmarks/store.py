"""How long a local store needs for an answer: `python benchmarks/store.py [--entries 1000000]`.

The index is filled directly with so many entries (rows of packs, cuts and nodes; every tenth shares a system prompt),
among them one real pack of 131,072 tokens. ``longest`` is then asked with as many: a hit of all of them, a hit of three
quarters that ends between two nodes, a miss. Figures are medians and 95th percentiles in milliseconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvpack.model.encoding import ENCODINGS
from kvpack.model.geometry import Geometry, LayerGeometry, PlaneGeometry
from kvpack.model.identity import Identity
from kvpack.model.layout import LayerLayout, ProducerLayout
from kvpack.model.planes import TOKENS, needed_rows, plane_specs, tokens_spec
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import Cut, CutRecord, PlaneRows
from kvpack.store.local import LocalStore

TOKENS_ASKED = 131_072
NODES_EACH = 4
WHO = Identity({"weights": b"w" * 32}, {})


def real_cut(ids: np.ndarray) -> Cut:
    planes = tuple(PlaneGeometry(role, ENCODINGS["bf16"], (1, 8)) for role in ("k", "v"))
    geometry = Geometry((LayerGeometry("full", planes),) * 4)
    specs = plane_specs(geometry)
    rows = {
        key: PlaneRows(specs[key], wanted, memoryview(bytes(wanted.count * specs[key].row_bytes)))
        for key, wanted in needed_rows(geometry, len(ids)).items()
    }
    rows[TOKENS] = PlaneRows(tokens_spec(), RowSet.of((0, len(ids))), memoryview(ids.astype("<i4").tobytes()))
    layout = ProducerLayout(tuple(LayerLayout("linear", len(ids)) for _ in geometry.layers))
    return Cut(geometry, WHO, layout, CutRecord(len(ids), tokens=len(ids)), rows)


def fill(store: LocalStore, entries: int, shared: list[bytes]) -> None:
    """Rows of ``entries`` packs under random names, written in one transaction."""

    def packs() -> Iterator[tuple[object, ...]]:
        for number in range(10, entries + 10):
            yield number, os.urandom(32), 1 << 20, 0, 1024, 0.0, number, 0, os.urandom(32), b"", b""

    def nodes() -> Iterator[tuple[object, ...]]:
        for number in range(10, entries + 10):
            for depth in range(NODES_EACH):
                node = shared[depth] if number % 10 == 0 and depth < len(shared) else os.urandom(32)
                yield node, 0, os.urandom(8), number, 256 * (depth + 1), 1
            yield os.urandom(32), number % 256 or 1, os.urandom(32), number, 1024, 7

    def work(cursor: object) -> None:
        cursor.executemany(  # type: ignore[attr-defined]
            "INSERT INTO packs"
            " (number, id, bytes, tail_bytes, position, created, used, signed, numerics, kept, content)"
            " VALUES (?,?,?,?,?,?,?,?,?,?,?)",
            packs(),
        )
        cursor.executemany(  # type: ignore[attr-defined]
            "INSERT INTO cuts VALUES (?,?,?,?)", ((n, 1024, os.urandom(32), 1) for n in range(10, entries + 10))
        )
        cursor.executemany("INSERT INTO nodes VALUES (?,?,?,?,?,?)", nodes())  # type: ignore[attr-defined]

    store.index.write(work)


def measured(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times), sorted(times)[int(repeats * 0.95)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=101)
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 128_000, TOKENS_ASKED)
    cut = real_cut(ids)
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore.open(Path(folder) / "store", durability="none")
        chain = store.chain(ids, WHO, cut.geometry, ())
        start = time.perf_counter()
        fill(store, options.entries, list(chain.nodes[1:3]))
        print(f"{options.entries} entries filled in {time.perf_counter() - start:.0f} s", flush=True)
        store.put(cut)
        other = ids.copy()
        other[TOKENS_ASKED * 3 // 4 + 100] += 1
        unknown = replace(WHO, compatibility={"weights": b"x" * 32})
        print(f"{'longest':34}{'found':>8}{'median ms':>11}{'p95 ms':>9}")
        for name, asked, who in (
            ("all tokens, int64 array", ids, WHO),
            ("all tokens, list of int", ids.tolist(), WHO),
            ("three quarters, int64 array", other, WHO),
            ("a miss, int64 array", ids, unknown),
        ):
            hit = store.longest(asked, who, cut.geometry)
            median, p95 = measured(lambda a=asked, w=who: store.longest(a, w, cut.geometry), options.repeats)  # type: ignore[misc]
            print(f"{name:34}{hit.position if hit else 0:8}{median:11.2f}{p95:9.2f}")
        keys, _ = measured(lambda: store.chain(ids, WHO, cut.geometry, ()), options.repeats)
        print(f"of which hashing 131,072 tokens: {keys:.2f} ms")


if __name__ == "__main__":
    main()
