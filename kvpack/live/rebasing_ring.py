"""The law ``rebase``: a window that is always one contiguous run, copied to the front when it would pass the end.

A reader of this plane starts at a row aligned down to the alignment, and a rewind is served from rows that the ring
keeps below its window on purpose. The ring is *sized* for both (:func:`rows_for`): headroom is granted where the
ring has it, and a rewind beyond it is refused, never clamped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from kvpack.live.placement import (
    AppendPlan,
    Move,
    Span,
    refused,
    require_capacity,
    require_fresh,
    require_next,
    require_position,
    require_resident,
    require_rewind,
)
from kvpack.model.ranges import RowSet

__all__ = [
    "ALIGNMENT",
    "HEADROOM",
    "MAX_CHUNK",
    "TAIL_PAD_BYTES",
    "RebasingRing",
    "RestorePlan",
    "plain_retain",
    "plane_bytes",
    "rows_for",
    "transaction_retain",
    "view_start",
]

ALIGNMENT: Final = 32
HEADROOM: Final = 512
MAX_CHUNK: Final = 4096
TAIL_PAD_BYTES: Final = 8


def rows_for(window: int, max_context: int) -> int:
    """Physical rows of a ring: the window, the largest prefill chunk, the rewind headroom and the alignment's slack."""
    return min(max_context, window + MAX_CHUNK + HEADROOM + ALIGNMENT - 1)


def plane_bytes(rows: int, token_bytes: int) -> int:
    """Bytes of a plane of ``rows`` rows, with the pad behind the last one."""
    return rows * token_bytes + TAIL_PAD_BYTES


def view_start(length: int, window: int, alignment: int = ALIGNMENT) -> int:
    """The first row that a reader at ``length`` looks at: the window's start, aligned down."""
    return max(0, length - (window - 1)) // alignment * alignment


def plain_retain(
    first_row: int, window: int, base: int, *, headroom: int = HEADROOM, alignment: int = ALIGNMENT
) -> int:
    """The first row that an append at ``first_row`` keeps: the window and the headroom, as far as ``base`` has them.

    Rows below ``base`` are gone and older than the window, so after a rewind the headroom is what is left of it.
    """
    return max(base, view_start(first_row - headroom, window, alignment))


def transaction_retain(target: int, base_length: int, window: int, *, alignment: int = ALIGNMENT) -> int:
    """The first row that an append up to ``target`` keeps inside a tensor-parallel transaction begun at
    ``base_length``.

    A rollback to ``base_length`` stays resident.
    """
    return min(max(0, target - window) // alignment * alignment, view_start(base_length, window, alignment))


@dataclass(frozen=True)
class RestorePlan:
    """Copy ``count`` physical rows from ``source`` of a ring to row 0 of a fresh one, rebased to logical row
    ``base``.
    """

    base: int
    source: int
    count: int


@dataclass(frozen=True)
class RebasingRing:
    """Rows ``[base, length)`` lie at ``row - base``; ``length`` is absolute, the session's position."""

    rows: int
    window: int
    base: int = 0
    length: int = 0
    headroom: int = HEADROOM
    alignment: int = ALIGNMENT

    law = "rebase"

    def __post_init__(self) -> None:
        if (
            min(self.rows, self.window, self.alignment) < 1
            or min(self.base, self.headroom) < 0
            or not self.base <= self.length <= self.base + self.rows
        ):
            raise refused(
                "bad-placement",
                "a rebasing ring",
                None,
                "rows, window and alignment at least 1, base <= length <= base + rows",
                self,
            )

    @property
    def capacity(self) -> int:
        """Physical rows."""
        return self.rows

    @property
    def position(self) -> int:
        """The logical row that comes next."""
        return self.length

    @property
    def resident(self) -> RowSet:
        """``[base, length)``."""
        return RowSet.of((self.base, self.length))

    def spans(self, first: int, end: int) -> tuple[Span, ...]:
        """One span: the physical range of ``[first, end)``; none for an empty range."""
        require_resident(self, first, end)
        return (Span(first, first - self.base, end - first),) if end > first else ()

    def view_start(self, length: int) -> int:
        """The first row that a reader at ``length`` looks at."""
        return view_start(length, self.window, self.alignment)

    def need(self, position: int) -> RowSet:
        """The aligned window: ``[view_start(position), position)``."""
        return RowSet.of((self.view_start(position), position))

    def retain(self, first_row: int) -> int:
        """The first row that a plain append at ``first_row`` keeps."""
        return plain_retain(first_row, self.window, self.base, headroom=self.headroom, alignment=self.alignment)

    def append(
        self, start: int, count: int, *, retain: int | None = None, layer: int | None = None
    ) -> AppendPlan[RebasingRing]:
        """Append ``count`` rows behind the others, or first move the rows from ``retain`` on to row 0 (the plan's
        one move).

        ``retain`` is the plain retain unless a transaction gives its own. ``lapped`` where rows from it on are gone
        or it lies above the rows that the append's own queries read; ``ring-too-small`` where kept and new rows do
        not fit.
        """
        require_next(self, start, count, layer)
        kept_from = self.retain(start) if retain is None else retain
        if not self.base <= kept_from <= self.view_start(start):
            raise refused(
                "lapped",
                f"an append at {start} cannot keep the rows from {kept_from} on",
                layer,
                f"a row within {self.base} to {self.view_start(start)}",
                kept_from,
            )
        if start + count - self.base <= self.rows:
            after = replace(self, length=start + count)
            moves: tuple[Move, ...] = ()
        else:
            kept = start - kept_from
            require_capacity(kept + count, self.rows, layer, ring=True)
            after = replace(self, base=kept_from, length=start + count)
            moves = (Move(kept_from - self.base, 0, kept),) if kept else ()
        return AppendPlan(self, after, count, after.spans(start, start + count), moves)

    def can_rewind_to(self, length: int) -> bool:
        """Whether the aligned window of ``length`` is still there."""
        return 0 <= length <= self.length and self.view_start(length) >= self.base

    def rewind(self, length: int, *, layer: int | None = None) -> RebasingRing:
        """Drop the rows from ``length`` on; ``beyond-headroom`` where the aligned window of ``length`` was dropped."""
        require_rewind(self, length, layer)
        if not self.can_rewind_to(length):
            raise refused(
                "beyond-headroom",
                f"the window of {length} starts below the ring",
                layer,
                f"a window from row {self.base} on",
                self.view_start(length),
            )
        return replace(self, length=length)

    def restore_plan(self, length: int, *, layer: int | None = None) -> RestorePlan:
        """The copy that gives a fresh ring the aligned window of absolute ``length``; ``lapped`` where it is gone.

        Growth copies by the same plan.
        """
        base = self.view_start(length)
        if not 0 <= length <= self.length or base < self.base:
            raise refused(
                "lapped",
                f"the ring does not hold the window of {length}",
                layer,
                f"rows within {self.resident}",
                f"[{base}, {length})",
            )
        return RestorePlan(base, base - self.base, length - base)

    def hydrated(self, length: int, first: int, *, layer: int | None = None) -> RebasingRing:
        """This empty ring, with rows ``[first, length)`` at row 0 on; they must cover the aligned window of
        ``length``.
        """
        require_fresh(self, layer)
        require_position(length, layer)
        if not 0 <= first <= self.view_start(length):
            raise refused(
                "lapped",
                f"rows from {first} on do not cover the window of {length}",
                layer,
                f"0 to {self.view_start(length)}",
                first,
            )
        require_capacity(length - first, self.rows, layer, ring=True)
        return replace(self, base=first, length=length)

    def restored(self, position: int, *, layer: int | None = None) -> RebasingRing:
        """This empty ring after its need at ``position`` was written into it."""
        return self.hydrated(position, self.view_start(position), layer=layer)
