"""The law ``pool``: rows of an indexer that are read once, by the key of their pool, and are dead from then on.

A pool of ``pool`` rows gets one final key once its last row lands. Until then its rows are live; the live rows are
``[pools_ready * pool, length)``. A ring of whole pools therefore serves a call of any length, by appending what fits,
building the keys that this completes, and going on (:meth:`PoolRing.drain`). The keys themselves lie in a linear plane.

Refusals beside those of :mod:`kvpack.live.placement`: ``pool-unresolved``, ``pool-differs``, ``keys-behind``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from kvpack.live.placement import (
    AppendPlan,
    Span,
    refused,
    require_capacity,
    require_fresh,
    require_next,
    require_position,
    require_resident,
    ring_spans,
)
from kvpack.model.ranges import RowSet

__all__ = ["WORKING_ROWS", "DrainStep", "PoolRing", "pool_ring_rows", "take"]

WORKING_ROWS: Final = 5120


def pool_ring_rows(max_context: int, rows: int | None = None) -> int:
    """Rows to allocate for a ring: ``rows``, or the working set by default; 0 means the flat plane of
    ``max_context`` rows.

    A ring that is not shorter than the flat plane is none. The rows do not depend on the context beyond that.
    """
    wanted = WORKING_ROWS if rows is None else rows
    return wanted if 0 < wanted < max_context else 0


def take(ring: int, pool: int, pools_ready: int, length: int, remaining: int, *, layer: int | None = None) -> int:
    """How many of ``remaining`` rows may be appended before the next keys must be built.

    ``ring`` is the effective ring, whole pools of rows; 0 is the flat plane, which takes all. ``lapped`` where the
    live rows leave no room, or where keys are counted for rows that were not appended yet.
    """
    if ring == 0:
        return remaining
    live = length - pools_ready * pool
    if not 0 <= live < ring:
        raise refused("lapped", "rows without a final key do not fit in the ring", layer, f"0 to {ring - 1}", live)
    return min(ring - live, remaining)


@dataclass(frozen=True)
class DrainStep:
    """One step of a drain: append, then build the keys of pools ``[first_pool, end_pool)`` from ``reads``, then go
    on.
    """

    append: AppendPlan[PoolRing]
    first_pool: int
    end_pool: int
    reads: tuple[Span, ...]
    after: PoolRing


@dataclass(frozen=True)
class PoolRing:
    """Index rows ``[floor, length)`` of a session, of which the first ``pools_ready`` pools have their final key.

    ``rows`` physical rows are allocated; 0, or as many as ``max_context``, is the flat plane of ``max_context``
    rows. Row ``r`` lies at ``r % effective`` in a ring, at ``r`` in a flat plane. ``pool`` is None until it is known.
    """

    rows: int
    pool: int | None
    max_context: int
    length: int = 0
    pools_ready: int = 0
    floor: int = 0

    law = "pool"

    def __post_init__(self) -> None:
        pool = self.pool or 1
        if (
            min(self.rows, self.pools_ready, self.floor) < 0
            or self.max_context < 1
            or (self.pool is not None and self.pool < 1)
            or not self.floor <= self.length <= self.max_context
            or not self.pools_ready * pool <= self.length
            or (self.pool is None and self.length > 0)
        ):
            raise refused(
                "bad-placement",
                "a pool ring",
                None,
                "pool at least 1 once rows are there, floor <= length <= max_context, keys of complete pools only",
                self,
            )
        if self.pool is not None and not self.is_flat:
            require_capacity(self.pool, self.rows, None, ring=True)
            if self.live > self.effective or self.floor < self.length - self.effective:
                raise refused("lapped", "rows of a pool ring", None, f"at most {self.effective}", self.live)

    @property
    def is_flat(self) -> bool:
        """Whether the plane holds every row of the context at its own index."""
        return not 0 < self.rows < self.max_context

    @property
    def capacity(self) -> int:
        """Physical rows allocated."""
        return self.max_context if self.is_flat else self.rows

    @property
    def effective(self) -> int:
        """Rows of the ring that are used, whole pools; 0 for a flat plane."""
        return 0 if self.is_flat else self.rows // self.known_pool() * self.known_pool()

    @property
    def num_keys(self) -> int:
        """Rows of the key plane: the pools that the context of this plane can complete."""
        return self.max_context // self.known_pool()

    @property
    def position(self) -> int:
        """The logical row that comes next."""
        return self.length

    @property
    def live(self) -> int:
        """Rows that no final key has read yet."""
        return self.length - self.pools_ready * (self.pool or 1)

    @property
    def resident(self) -> RowSet:
        """``[floor, length)``: the live rows, and dead ones that were not overwritten yet."""
        return RowSet.of((self.floor, self.length))

    def known_pool(self, layer: int | None = None) -> int:
        """Rows a pool; ``pool-unresolved`` while it is unknown."""
        if self.pool is None:
            raise refused("pool-unresolved", "the plane's pool is not known yet", layer, "rows a pool", "none")
        return self.pool

    def with_pool(self, pool: int, *, layer: int | None = None) -> PoolRing:
        """This plane with its pool resolved; ``pool-differs`` where it already is, to another one."""
        if self.pool not in (None, pool):
            raise refused("pool-differs", "the plane has another pool", layer, self.pool, pool)
        return replace(self, pool=pool)

    def spans(self, first: int, end: int) -> tuple[Span, ...]:
        """One span, or two where the range crosses the ring's seam; a pool never does."""
        require_resident(self, first, end)
        if end == first:
            return ()
        if self.is_flat:
            return (Span(first, first, end - first),)
        return ring_spans(first, end, first % self.effective, self.effective)

    def need(self, position: int) -> RowSet:
        """The rows of the incomplete last pool: ``[position // pool * pool, position)``."""
        pool = self.known_pool()
        return RowSet.of((position // pool * pool, position))

    def take(self, remaining: int, *, layer: int | None = None) -> int:
        """How many of ``remaining`` rows fit before the next keys must be built."""
        pool = self.known_pool(layer)
        return take(self.effective, pool, self.pools_ready, self.length, remaining, layer=layer)

    def append(self, start: int, count: int, *, layer: int | None = None) -> AppendPlan[PoolRing]:
        """Append rows without building keys; ``lapped`` where that would overwrite a live row."""
        require_next(self, start, count, layer)
        require_capacity(start + count, self.max_context, layer)
        room = self.take(count, layer=layer)
        if room < count:
            raise refused("lapped", "the rows would overwrite rows without a key", layer, f"at most {room}", count)
        end = start + count
        floor = self.floor if self.is_flat else max(self.floor, end - self.effective)
        after = replace(self, length=end, floor=floor)
        return AppendPlan(self, after, count, after.spans(start, end))

    def built(self) -> PoolRing:
        """The plane once the keys of all its complete pools are built."""
        return replace(self, pools_ready=self.length // self.known_pool())

    def drain(self, start: int, count: int, *, layer: int | None = None) -> tuple[DrainStep, ...]:
        """Append a call of any length, building keys on the way; the last step's ``after`` has all complete pools
        ready.
        """
        require_next(self, start, count, layer)
        require_capacity(start + count, self.max_context, layer)
        pool = self.known_pool(layer)
        steps: list[DrainStep] = []
        now, end = self, start + count
        while now.length < end:
            plan = now.append(now.length, now.take(end - now.length, layer=layer), layer=layer)
            after = plan.after.built()
            reads = plan.after.spans(now.pools_ready * pool, after.pools_ready * pool)
            steps.append(DrainStep(plan, now.pools_ready, after.pools_ready, reads, after))
            now = after
        return tuple(steps)

    def require_drained(self, *, layer: int | None = None) -> None:
        """A capture finds a known pool and every complete pool's key: ``keys-behind`` otherwise."""
        wanted = self.length // self.known_pool(layer)
        if self.pools_ready != wanted:
            raise refused("keys-behind", "pool keys do not match their rows", layer, wanted, self.pools_ready)

    def rewind(self, position: int, *, layer: int | None = None) -> PoolRing:
        """Drop the rows from ``position`` on and clamp ``pools_ready``: a key whose rows may change is not final.

        ``beyond-headroom`` where a row that is live again was overwritten or never restored.
        """
        require_position(position, layer)
        if position > self.length:
            raise refused("forward-rewind", "a rewind does not go forward", layer, f"at most {self.length}", position)
        if position == 0:
            return replace(self, length=0, pools_ready=0, floor=0)
        pool = self.known_pool(layer)
        ready = min(self.pools_ready, position // pool)
        if ready * pool < min(self.floor, position):
            raise refused(
                "beyond-headroom",
                f"rows that position {position} needs are gone",
                layer,
                f"rows [{ready * pool}, {position})",
                f"rows {self.resident}",
            )
        return replace(self, length=position, pools_ready=ready, floor=min(self.floor, position))

    def restored(self, position: int, *, layer: int | None = None) -> PoolRing:
        """This empty plane after its need at ``position`` and the keys of all complete pools were written."""
        require_fresh(self, layer)
        require_position(position, layer)
        require_capacity(position, self.max_context, layer)
        pool = self.known_pool(layer)
        ready = position // pool
        return replace(self, length=position, pools_ready=ready, floor=ready * pool)
