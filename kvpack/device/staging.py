"""One job of the staging kernel: a ring's live rows in logical order, and a chunk's rows behind them.

A prefill chunk that wraps a rotating ring would overwrite rows that its own queries still read. So its attention runs
over a linear shadow, and the ring is appended to only afterwards. Staging never writes to the ring.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpack.device.protocol import Buffer, RowStrides
from kvpack.model.encoding import Encoding

__all__ = ["Stage"]


@dataclass(frozen=True)
class Stage:
    """Live rows of one ring, then the rows of one chunk, as the first rows of a shadow.

    Logical row ``i`` of the ``rows`` live ones lies in ring row ``(rotation + i) % ring_rows`` and goes to shadow row
    ``i``; row ``j`` of the ``chunk_rows`` goes to shadow row ``rows + j``. The chunk lies in canonical order at
    ``chunk_offset``: in the plane's own bytes where ``encoding`` is None, otherwise as f32 [chunk_rows][parts][elements
    of a part], which become ``encoding`` (f16 or bf16, ties to even). The parts of ring and shadow have equal bytes;
    their layouts may differ.
    """

    ring: Buffer
    ring_strides: RowStrides
    ring_rows: int
    rotation: int
    rows: int
    shadow: Buffer
    shadow_strides: RowStrides
    chunk: Buffer
    chunk_offset: int
    chunk_rows: int
    encoding: Encoding | None = None

    @property
    def ring_runs(self) -> tuple[tuple[int, int], ...]:
        """The live rows as (first ring row, rows) in logical order: one run, or two where the ring wraps."""
        head = min(self.rows, self.ring_rows - self.rotation)
        return ((self.rotation, head), (0, self.rows - head)) if head < self.rows else ((self.rotation, head),)

    @property
    def chunk_row_bytes(self) -> int:
        """Bytes of one row of the chunk, before any conversion."""
        row_bytes = self.shadow_strides.row_bytes
        return row_bytes if self.encoding is None else row_bytes // self.encoding.block_bytes * 4

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the chunk, before any conversion."""
        return self.chunk_rows * self.chunk_row_bytes
