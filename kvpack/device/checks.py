"""What every device checks before it touches a byte. A copy, a kernel and a pointer trust nothing else.

All refusals are :class:`~kvpack.errors.InstallError`, with one of the codes

- ``out-of-bounds``: bytes before the start or behind the end of a buffer or of the packed bytes;
- ``bad-run``: a run of rows, or a number of bytes or elements, below zero;
- ``bad-strides``: parts or strides that describe no rows, or that differ where they must agree;
- ``bad-ring``: a rotation that is no ring row, or more live rows than the ring has;
- ``bad-value``: a fill value that is no byte;
- ``overlapping-destinations``: one byte would be written twice, or is read and written by the same call.

Addresses are absolute, so that two buffers over the same memory are found as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvpack.device.protocol import Move, RowStrides
from kvpack.device.staging import Stage
from kvpack.errors import InstallError

__all__ = [
    "check_extent",
    "check_moves",
    "check_packed_disjoint",
    "check_places_disjoint",
    "check_separate",
    "check_stage",
    "extent",
    "refused",
]

Intervals: TypeAlias = NDArray[np.int64]
"""[n, 2]: first byte and one past the last."""

MAX_ROW_BYTES: Final = 1 << 30
STAGED: Final = ("f16", "bf16")


def refused(code: str, message: str, expected: object, found: object) -> InstallError:
    """The one shape of a device's refusal."""
    return InstallError(code, f"{message}: expected {expected}, found {found}", expected=expected, found=found)


def check_extent(what: str, available: int, offset: int, nbytes: int) -> None:
    """``nbytes`` bytes from ``offset`` lie inside ``available`` bytes."""
    if nbytes < 0:
        raise refused("bad-run", f"the length of {what}", "0 or more bytes", nbytes)
    if offset < 0 or offset + nbytes > available:
        raise refused("out-of-bounds", what, f"bytes within [0, {available})", f"[{offset}, {offset + nbytes})")


def _check_strides(what: str, strides: RowStrides) -> None:
    if min(strides.parts, strides.part_bytes) < 1 or strides.row_bytes > MAX_ROW_BYTES:
        raise refused("bad-strides", what, f"rows of 1 to {MAX_ROW_BYTES} bytes", strides)
    if min(strides.row_stride, strides.part_stride, strides.base) < 0:
        raise refused("bad-strides", what, "strides of 0 or more bytes", strides)


def extent(strides: RowStrides, runs: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The first byte and one past the last that the rows of ``runs`` occupy; ``(0, 0)`` without rows."""
    live = [(first, first + count) for first, count in runs if count]
    if not live:
        return 0, 0
    first, end = min(start for start, _ in live), max(stop for _, stop in live)
    last_row = strides.base + (end - 1) * strides.row_stride
    return strides.base + first * strides.row_stride, last_row + _row_span(strides)


def _check_rows(what: str, available: int, strides: RowStrides, runs: Sequence[tuple[int, int]]) -> None:
    _check_strides(what, strides)
    for first, count in runs:
        if first < 0 or count < 0:
            raise refused("bad-run", what, "rows of 0 or more", f"{count} rows from row {first}")
    start, end = extent(strides, runs)
    if end > available:
        raise refused("out-of-bounds", what, f"bytes within [0, {available})", f"[{start}, {end})")


def check_moves(moves: Sequence[Move], packed_bytes: int) -> None:
    """Every move's rows lie inside its buffer, and its packed rows inside ``packed_bytes``."""
    for index, move in enumerate(moves):
        _check_rows(f"the rows of move {index}", move.buffer.nbytes, move.strides, move.runs)
        check_extent(f"the packed rows of move {index}", packed_bytes, move.packed_offset, move.nbytes)


def check_packed_disjoint(moves: Sequence[Move]) -> None:
    """No packed byte belongs to two moves: what a gather needs, since it writes there."""
    ranges = sorted((move.packed_offset, move.packed_offset + move.nbytes) for move in moves if move.nbytes)
    for (_, end), (start, _) in pairwise(ranges):
        if start < end:
            raise refused("overlapping-destinations", "the packed rows of a gather", f"a start from {end}", start)


def check_places_disjoint(moves: Sequence[Move], addresses: Sequence[int]) -> None:
    """No byte of a plane belongs to two of the moves' rows, or twice to one: what a scatter needs.

    ``addresses`` are those of the moves' buffers. The rows' bounding ranges settle nearly every call. Ranges that do
    meet, such as keys and values that alternate within a row, are compared part by part.
    """
    bounds = [_bounds(move, address) for move, address in zip(moves, addresses, strict=True)]
    owners = np.repeat(np.arange(len(bounds)), [len(each) for each in bounds])
    if not len(owners):
        return
    intervals = np.concatenate(bounds)
    order = np.argsort(intervals[:, 0], kind="stable")
    intervals, owners = intervals[order], owners[order]
    reach = np.maximum.accumulate(intervals[:, 1])
    cluster = np.concatenate([[0], np.cumsum(intervals[1:, 0] >= reach[:-1])])
    unnested = [index for index, move in enumerate(moves) if _nesting(move) is None]
    suspect = (np.bincount(cluster)[cluster] > 1) | np.isin(owners, unnested)
    if not suspect.any():
        return
    owners, cluster = owners[suspect], cluster[suspect]
    # Pages that alternate make a cluster each, but few different sets of moves.
    for members in {frozenset(g.tolist()) for g in np.split(owners, np.flatnonzero(np.diff(cluster)) + 1)}:
        _check_exactly(moves, addresses, sorted(members))


def _check_exactly(moves: Sequence[Move], addresses: Sequence[int], members: list[int]) -> None:
    parts = np.concatenate([_parts(moves[index], addresses[index]) for index in members])
    parts = parts[np.argsort(parts[:, 0], kind="stable")]
    met = parts[1:, 0] < parts[:-1, 1]
    if met.any():
        where = int(np.argmax(met))
        raise refused(
            "overlapping-destinations",
            f"the rows of moves {members}",
            "parts that do not meet",
            f"one of {int(parts[where, 1] - parts[where, 0])} bytes that the next meets after"
            f" {int(parts[where + 1, 0] - parts[where, 0])}",
        )


def _runs(move: Move) -> Intervals:
    runs = np.array(move.runs, dtype=np.int64).reshape(-1, 2)
    return runs[runs[:, 1] > 0]


def _nesting(move: Move) -> str | None:
    """``rows`` where parts lie within rows, ``parts`` where rows lie within parts, None where neither holds."""
    strides, longest = move.strides, max((count for _, count in move.runs), default=0)
    parts_apart = strides.parts == 1 or strides.part_stride >= strides.part_bytes
    if parts_apart and (longest <= 1 or strides.row_stride >= _row_span(strides)):
        return "rows"
    rows_span = (longest - 1) * strides.row_stride + strides.part_bytes
    if strides.row_stride >= strides.part_bytes and strides.part_stride >= rows_span:
        return "parts"
    return None


def _row_span(strides: RowStrides) -> int:
    return (strides.parts - 1) * strides.part_stride + strides.part_bytes


def _bounds(move: Move, address: int) -> Intervals:
    """A bounding interval for each run, or for each part of each run where the rows lie within the parts."""
    runs, strides = _runs(move), move.strides
    starts = address + strides.base + runs[:, 0] * strides.row_stride
    if _nesting(move) == "parts":
        starts = (starts[:, None] + np.arange(strides.parts) * strides.part_stride).reshape(-1)
        spans = np.repeat((runs[:, 1] - 1) * strides.row_stride + strides.part_bytes, strides.parts)
    else:
        spans = (runs[:, 1] - 1) * strides.row_stride + _row_span(strides)
    return np.stack([starts, starts + spans], axis=-1)


def _parts(move: Move, address: int) -> Intervals:
    """The interval of every single part."""
    strides = move.strides
    rows = np.concatenate([np.arange(first, first + count) for first, count in _runs(move)])
    starts = (
        address + strides.base + rows[:, None] * strides.row_stride + np.arange(strides.parts) * strides.part_stride
    )
    flat = starts.reshape(-1)
    return np.stack([flat, flat + strides.part_bytes], axis=-1)


def check_separate(what: str, written: tuple[int, int], read: tuple[int, int]) -> None:
    """The two ranges of absolute addresses share no byte."""
    if max(written[0], read[0]) < min(written[1], read[1]):
        raise refused(
            "overlapping-destinations",
            what,
            "memory that is not read by the same call",
            f"{min(written[1], read[1]) - max(written[0], read[0])} bytes in common",
        )


def check_stage(index: int, job: Stage) -> None:
    """The live rows lie in the ring, the shadow holds them and the chunk, the chunk lies in its buffer.

    Raises also InstallError ``no-conversion`` for a chunk that is to become anything but f16 or bf16.
    """
    what = f"stage {index}"
    if not 0 <= job.rotation < job.ring_rows:
        raise refused("bad-ring", f"the rotation of {what}", f"a row within [0, {job.ring_rows})", job.rotation)
    if job.rows > job.ring_rows:
        raise refused("bad-ring", f"the live rows of {what}", f"at most {job.ring_rows}", job.rows)
    for name, rows in (("live", job.rows), ("chunk", job.chunk_rows)):
        if rows < 0:
            raise refused("bad-run", f"the {name} rows of {what}", "0 or more", rows)
    ring, shadow = job.ring_strides, job.shadow_strides
    _check_rows(f"the ring of {what}", job.ring.nbytes, ring, ((0, job.ring_rows),))
    _check_rows(f"the shadow of {what}", job.shadow.nbytes, shadow, ((0, job.rows + job.chunk_rows),))
    if (ring.parts, ring.part_bytes) != (shadow.parts, shadow.part_bytes):
        raise refused("bad-strides", f"the parts of {what}", ring, shadow)
    if job.encoding is not None:
        if job.encoding.name not in STAGED:
            raise refused("no-conversion", f"the chunk of {what}", " or ".join(STAGED), job.encoding.name)
        if shadow.part_bytes % job.encoding.block_bytes:
            raise refused("bad-strides", f"the part of {what}", f"whole {job.encoding.name}", shadow.part_bytes)
    check_extent(f"the chunk of {what}", job.chunk.nbytes, job.chunk_offset, job.chunk_bytes)
