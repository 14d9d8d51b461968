"""The layouts inside a plane as strides: token-major ``NHD`` and head-major ``HND``.

The canonical order of a cut is token-major ``[token][head][dim]`` whatever the live layout is; with the two strides one
gather and one scatter serve both.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpack.live.placement import Span, refused

__all__ = ["ByteRuns", "PlaneLayout"]


@dataclass(frozen=True, slots=True)
class ByteRuns:
    """``count`` runs of ``length`` bytes; run ``i`` begins at byte ``offset + i * stride`` of the plane."""

    offset: int
    stride: int
    length: int
    count: int


@dataclass(frozen=True)
class PlaneLayout:
    """A plane of ``capacity`` physical rows, each ``num_heads`` heads of ``head_bytes`` bytes.

    ``NHD`` is ``[capacity][num_heads][head_bytes]``, ``HND`` is ``[num_heads][capacity][head_bytes]``. A plane
    without a head axis has one head.
    """

    order: str
    capacity: int
    num_heads: int
    head_bytes: int

    def __post_init__(self) -> None:
        if self.order not in ("NHD", "HND"):
            raise refused("bad-placement", "the order of a plane", None, "NHD or HND", self.order)
        if min(self.capacity, self.num_heads, self.head_bytes) < 1:
            raise refused("bad-placement", "the shape of a plane", None, "extents of at least 1", self)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, over all heads."""
        return self.num_heads * self.head_bytes

    @property
    def plane_bytes(self) -> int:
        """Bytes of the plane."""
        return self.capacity * self.row_bytes

    @property
    def row_stride(self) -> int:
        """Bytes from one physical row to the next, within a head."""
        return self.row_bytes if self.order == "NHD" else self.head_bytes

    @property
    def head_stride(self) -> int:
        """Bytes from one head to the next, within a row."""
        return self.head_bytes if self.order == "NHD" else self.capacity * self.head_bytes

    def offset(self, row: int, head: int) -> int:
        """The byte at which a head of a physical row begins."""
        return row * self.row_stride + head * self.head_stride

    def runs(self, span: Span) -> ByteRuns:
        """The contiguous bytes of a span: one run over all heads (``NHD``), or one run a head (``HND``)."""
        if span.count < 1 or span.physical < 0 or span.physical_end > self.capacity:
            raise refused(
                "bad-plan",
                "a span lies outside its plane",
                None,
                f"rows within [0, {self.capacity})",
                f"[{span.physical}, {span.physical_end})",
            )
        first = self.offset(span.physical, 0)
        if self.order == "NHD":
            return ByteRuns(first, self.plane_bytes, span.count * self.row_bytes, 1)
        return ByteRuns(first, self.head_stride, span.count * self.head_bytes, self.num_heads)
