"""The arithmetic of the floor: what a session's move costs at least, and what kvpack's tables make of it. No GPU.

    python benchmarks/floor.py
    python benchmarks/floor.py --tokens 32768 --layers 32 --kv-heads 8 --head-dim 128

Three figures. *Bytes moved against bytes needed*, a kernel: the units of its table times their width, read and written,
over the rows' bytes, read and written; 1.00 for the movers. *Launches a session*: one a chunk, whatever the number of
layers; a pack's raw tiles, which the device verifies, cost two more a chunk to hash. *Exposed time*: with chunks in a
pipeline only the first read and the last scatter are not hidden behind the slowest stage. The rates are inputs of the
model, not measurements.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import numpy as np
from kvpack_kernels import abi

JOB_AND_ALIGNMENT = 96 + 16
TILE_BYTES = 1 << 20
LAUNCHES_A_VERIFIED_CHUNK = 3
"""Two of the hash, one of the scatter."""


@dataclass(frozen=True)
class Session:
    """A session of full layers, 16-bit elements."""

    tokens: int
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def row_bytes(self) -> int:
        """A row of one plane."""
        return self.kv_heads * self.head_dim * 2

    @property
    def planes(self) -> int:
        """K and V of every layer."""
        return 2 * self.layers

    @property
    def nbytes(self) -> int:
        """All rows."""
        return self.tokens * self.planes * self.row_bytes


@dataclass(frozen=True)
class Rates:
    """Bytes a second: reading (and verifying, where the host does it), the link, the device's own memory (read plus
    write), hashing on the device. ``launch`` is seconds."""

    read: float
    link: float
    memory: float
    launch: float
    hash: float = np.inf


def layouts(session: Session) -> dict[str, abi.Rows]:
    """One plane in each layout, a ring turned by a third."""
    heads, head = session.kv_heads, session.head_dim * 2
    token = {"address": 1 << 20, "parts": heads, "part_bytes": head, "rows": session.tokens}
    turn = session.tokens // 3
    return {
        "token-major": abi.Rows(**token, row_stride=heads * head, part_stride=head, first=0),
        "token-major ring": abi.Rows(
            **token, row_stride=heads * head, part_stride=head, first=turn, ring_rows=session.tokens
        ),
        "head-major": abi.Rows(**token, row_stride=head, part_stride=session.tokens * head, first=0),
        "head-major ring": abi.Rows(
            **token, row_stride=head, part_stride=session.tokens * head, first=turn, ring_rows=session.tokens
        ),
        "pages of 16": abi.Rows(
            **token, row_stride=heads * head, part_stride=head, first=0, pages=1 << 30, page_rows=16
        ),
    }


def moved_and_needed(rows: abi.Rows) -> tuple[int, int]:
    """Bytes of a move's loads and stores, its table and its block table included, and of the rows both ways."""
    table, _ = abi.move_table([(rows, 1 << 21)])
    units = sum(int(job["units"]) * int(job["unit_bytes"]) for job in table)
    pages = 4 * -(-rows.rows // rows.page_rows) if rows.pages else 0
    return 2 * units + table.nbytes + pages, 2 * rows.rows * rows.row_bytes


def staged_and_needed(session: Session, live: int, chunk: int) -> tuple[int, int]:
    """The same of staging an f32 chunk behind a ring's live rows."""
    heads, head = session.kv_heads, session.head_dim * 2
    ring = abi.Rows(1 << 20, heads, head, heads * head, head, live // 3, live, live)
    shadow = abi.Rows(1 << 22, heads, head, heads * head, head, 0, live + chunk)
    given = abi.Rows(1 << 21, heads, 2 * head, 2 * heads * head, 2 * head, 0, chunk)
    table, _ = abi.stage_table([abi.Stage(ring, given, shadow, "bf16")])
    units = int(table["units"][0]) * int(table["unit_bytes"][0])
    reads = units + chunk * heads * head  # f32 is twice as wide
    row = heads * head
    return reads + units + table.nbytes, live * row * 2 + chunk * row * 3


def chunks(session: Session, slot_bytes: int) -> int:
    """Chunks, and so launches, of a session whose rows come in pieces of at most an eighth of a chunk."""
    piece = slot_bytes // 8 - JOB_AND_ALIGNMENT - 16
    rows_a_piece = piece // (session.row_bytes + 4)
    full, rest = divmod(session.tokens, rows_a_piece)
    sizes = np.array(([rows_a_piece] * full + [rest] * bool(rest)) * session.planes) * session.row_bytes
    used = count = 0
    for size in sizes.tolist():
        need = -(-size // 16) * 16 + 96
        if used + need > slot_bytes:
            count, used = count + 1, 0
        used += need
    return count + bool(used)


def verified_chunks(session: Session, slot_bytes: int, tile_bytes: int = TILE_BYTES) -> int:
    """Chunks of a session that comes as raw tiles, whole, in a pack's order, with what it takes to hash them."""
    rows_a_tile = 1 << ((tile_bytes // session.row_bytes).bit_length() - 1)
    used = count = 0
    for first in range(0, session.tokens, rows_a_tile):
        size = min(rows_a_tile, session.tokens - first) * session.row_bytes
        blocks = -(-size // (abi.THREADS * abi.CHUNK_BYTES))
        need = -(-size // 16) * 16 + 96 + 32 + 32 * (blocks + 1)
        for _ in range(session.planes):
            if used + need > slot_bytes:
                count, used = count + 1, 0
            used += need
    return count + bool(used)


def exposed(nbytes: int, slot_bytes: int, launches: int, rates: Rates) -> dict[str, float]:
    """Seconds of an install: all of the slowest stage, and of the others what the pipeline cannot hide."""
    stages = {
        "read": nbytes / rates.read,
        "copy": nbytes / rates.link,
        "hash on the device": nbytes / rates.hash,
        "launch and scatter": 2 * nbytes / rates.memory + launches * rates.launch,
    }
    slowest = max(stages, key=lambda name: stages[name])
    share = min(1.0, slot_bytes / nbytes)
    found = {name: seconds if name == slowest else seconds * share for name, seconds in stages.items()}
    return {"sum of the stages": sum(stages.values()), **found, "exposed": sum(found.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--slot-mib", type=int, default=16)
    parser.add_argument("--read-gb", type=float, default=2.0, help="verified host reads, GB/s")
    parser.add_argument("--raw-read-gb", type=float, default=10.0, help="reads into pinned memory, unverified, GB/s")
    parser.add_argument("--hash-gb", type=float, default=300.0, help="BLAKE3 on the device, GB/s")
    parser.add_argument("--link-gb", type=float, default=52.0, help="host to device, GB/s")
    parser.add_argument("--memory-tb", type=float, default=4.3, help="device memory, read plus write, TB/s")
    parser.add_argument("--launch-us", type=float, default=3.0)
    options = parser.parse_args()
    session = Session(options.tokens, options.layers, options.kv_heads, options.head_dim)
    slot = options.slot_mib << 20
    print(
        f"{session.tokens} tokens, {session.planes} planes of {session.row_bytes} B rows: {session.nbytes / 1e9:.2f} GB"
    )
    print("\nbytes moved against bytes needed")
    for name, rows in layouts(session).items():
        moved, needed = moved_and_needed(rows)
        print(f"  gather, scatter  {name:18} {moved / needed:.4f}")
    moved, needed = staged_and_needed(session, 1023, 512)
    print(f"  stage f32 → bf16 {'512 behind 1,023':18} {moved / needed:.4f}")
    count = chunks(session, slot)
    verified = verified_chunks(session, slot)
    launches = LAUNCHES_A_VERIFIED_CHUNK * verified
    print(f"\nlaunches a session: {count} (chunks of {options.slot_mib} MiB; {session.planes} planes)")
    print(f"launches a session of raw tiles, hashed on the device: {launches} ({verified} chunks)")
    raw_read = options.raw_read_gb * 1e9
    base = Rates(options.read_gb * 1e9, options.link_gb * 1e9, options.memory_tb * 1e12, options.launch_us * 1e-6)
    for what, number, rates in (
        ("host rows as they are verified", count, base),
        ("raw tiles, verified on the device", launches, replace(base, read=raw_read, hash=options.hash_gb * 1e9)),
        ("rows at hand, copy-bound", count, replace(base, read=np.inf)),
    ):
        print(f"\nan install, {what}")
        for name, seconds in exposed(session.nbytes, slot, number, rates).items():
            print(f"  {name:20} {seconds * 1e3:9.2f} ms")


if __name__ == "__main__":
    main()
