"""Planes in every layout and placement, once as the kernels' table has them and once as the host device has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
from hypothesis import strategies as st
from kvpack_kernels.abi import Rows
from numpy.typing import NDArray

from kvpack.device.protocol import RowStrides
from tests.emulation.build import address, memory

Bytes: TypeAlias = NDArray[np.uint8]

PLANE_BYTES = 1 << 20
ELEMENT_BYTES = (1, 2, 4)
QUANTISED_BYTES = {18: 32, 20: 32, 22: 32, 24: 32, 34: 32}
"""Bytes of a block, and its elements."""


@dataclass(frozen=True)
class Place:
    """One plane and the rows of it that a job moves. Rows from ``fixed`` on may wrap (a ring), or lie in pages."""

    parts: int
    part_bytes: int
    head_major: bool
    capacity: int
    first: int
    rows: int
    wraps: bool = False
    fixed: int = 0
    page_rows: int = 0
    pages: tuple[int, ...] = ()
    row_gap: int = 0
    base: int = 0
    offset: int = 0
    table: NDArray[np.int32] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", np.array(self.pages, dtype=np.int32))

    @property
    def strides(self) -> RowStrides:
        """The plane's strides."""
        if self.head_major:
            part_bytes = self.part_bytes + self.row_gap
            return RowStrides(self.parts, self.part_bytes, part_bytes, part_bytes * self.capacity, self.base)
        row_stride = self.parts * self.part_bytes + self.row_gap
        return RowStrides(self.parts, self.part_bytes, row_stride, self.part_bytes, self.base)

    @property
    def nbytes(self) -> int:
        """Bytes from the buffer's start to the end of the last part of the last row: not a byte behind it."""
        strides = self.strides
        last = (self.capacity - 1) * strides.row_stride + (self.parts - 1) * strides.part_stride
        return self.base + last + self.part_bytes

    def physical(self) -> NDArray[np.int64]:
        """The physical row of every moved row, by the placement's definition."""
        logical = self.first + np.arange(self.rows)
        if self.page_rows:
            return self.table[logical // self.page_rows].astype(np.int64) * self.page_rows + logical % self.page_rows
        return self.fixed + logical % (self.capacity - self.fixed) if self.wraps else self.fixed + logical

    def runs(self) -> tuple[tuple[int, int], ...]:
        """The moved rows as runs of physical rows."""
        runs = []
        for _, group in groupby(enumerate(self.physical().tolist()), key=lambda pair: pair[1] - pair[0]):
            rows = [row for _, row in group]
            runs.append((rows[0], len(rows)))
        return tuple(runs)

    def memory(self, rng: np.random.Generator) -> Bytes:
        """A plane of random bytes."""
        return memory(self.nbytes, rng, self.offset)

    def in_table(self, plane: Bytes) -> Rows:
        """The rows for the kernels' table. It points at :attr:`table`, which lives as long as this place."""
        strides = self.strides
        return Rows(
            address=address(plane) + self.base + self.fixed * strides.row_stride,
            parts=strides.parts,
            part_bytes=strides.part_bytes,
            row_stride=strides.row_stride,
            part_stride=strides.part_stride,
            first=self.first,
            rows=self.rows,
            ring_rows=self.capacity - self.fixed if self.wraps else 0,
            pages=address(self.table) if self.page_rows else 0,
            page_rows=self.page_rows or 1,
        )


def part_sizes() -> st.SearchStrategy[int]:
    """Bytes of a head: of 8 to 512 elements of 1, 2 or 4 bytes, or of whole blocks."""
    scalars = st.builds(lambda dim, size: dim * size, st.integers(8, 512), st.sampled_from(ELEMENT_BYTES))
    usual = st.builds(lambda dim, size: dim * size, st.sampled_from((64, 128, 256)), st.sampled_from(ELEMENT_BYTES))
    blocks = st.builds(lambda size, count: size * count, st.sampled_from(tuple(QUANTISED_BYTES)), st.integers(1, 16))
    return st.one_of(scalars, usual, blocks)


@st.composite
def places(
    draw: st.DrawFn,
    part_bytes: st.SearchStrategy[int] | None = None,
    paged: bool = True,
    aligned_to: int = 1,
    plane_bytes: int = PLANE_BYTES,
) -> Place:
    """A plane of at most about ``plane_bytes`` and 5,000 rows, and rows of it."""
    size = draw(part_sizes() if part_bytes is None else part_bytes)
    most_parts = max(1, min(16, plane_bytes // size))
    parts = draw(st.integers(1, most_parts))
    most_rows = max(1, min(5000, plane_bytes // (parts * size)))
    capacity = draw(st.one_of(st.integers(1, most_rows), st.integers(1, min(64, most_rows)), st.just(most_rows)))
    steps = st.sampled_from([n * aligned_to for n in (0, 1, 2, 3, 4, 8, 16)])
    common: dict[str, Any] = {
        "parts": parts,
        "part_bytes": size,
        "head_major": draw(st.booleans()),
        "row_gap": draw(st.one_of(st.just(0), steps)),
        "base": draw(st.one_of(st.just(0), steps)),
        "offset": draw(st.sampled_from([n for n in (0, 0, 1, 2, 4, 8) if n % aligned_to == 0])),
    }
    law = draw(st.sampled_from(("linear", "ring", "pinned", "paged") if paged else ("linear", "ring", "pinned")))
    if law == "paged":
        page_rows = draw(
            st.one_of(st.integers(1, capacity), st.sampled_from([n for n in (1, 16, 32) if n <= capacity]))
        )
        blocks = capacity // page_rows
        shuffled = draw(st.randoms(use_true_random=False)).sample(range(blocks), draw(st.integers(1, min(blocks, 400))))
        first = draw(st.integers(0, len(shuffled) * page_rows - 1))
        rows = draw(st.integers(1, len(shuffled) * page_rows - first))
        # A plane of whole pages: the rows behind the last page belong to nobody.
        return Place(capacity=capacity, first=first, rows=rows, page_rows=page_rows, pages=tuple(shuffled), **common)
    fixed = draw(st.integers(0, capacity - 1)) if law == "pinned" else 0
    room = capacity - fixed
    first = draw(st.integers(0, room - 1))
    wraps = law != "linear"
    rows = draw(st.integers(1, room if wraps else room - first))
    return Place(capacity=capacity, first=first, rows=rows, wraps=wraps, fixed=fixed, **common)
