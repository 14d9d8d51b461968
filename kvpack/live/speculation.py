"""Speculation: a block of draft tokens that may have to un-happen.

A checkpoint keeps what the block will overwrite and nothing more: for growing planes the placement (a few integers),
for rings also the bytes of the rows that the block's appends write over, for latent planes also their index rows, for
recurrent states a copy, in buffers that are reused from round to round. :meth:`Speculation.rollback` returns *every*
plane, target and draft as a pair, or refuses and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kvpack.device.protocol import Buffer, Move
from kvpack.errors import InstallError
from kvpack.live.cache import LiveCache
from kvpack.live.generation import Extra, Generation, Line, rewound
from kvpack.live.layers import LayerState, LiveLayer, LivePlane
from kvpack.live.placement import Placement, Span, overwritten, refused
from kvpack.live.rings import Chronological
from kvpack.model.geometry import PlaneKey, Unit
from kvpack.model.ranges import RowSet

__all__ = ["MAX_BLOCK", "Speculation"]

MAX_BLOCK = 16


@dataclass
class _KeptRows:
    """Rows of one plane that the block may overwrite: where they lie, and their bytes."""

    layer: LiveLayer
    plane: LivePlane
    runs: tuple[tuple[int, int], ...]
    content: memoryview

    def put_back(self, except_rows: frozenset[int] = frozenset()) -> None:
        """Write the kept rows back, except the physical rows that accepted tokens took over."""
        size, at, moves = self.plane.spec.row_bytes, 0, []
        for first, count in self.runs:
            for row in range(first, first + count):
                if row not in except_rows:
                    moves.append(Move(self.plane.buffer, self.plane.strides, ((row, 1),), at))
                at += size
        self.layer.device.scatter(moves, self.content)


@dataclass
class _Checkpoint:
    line: Line
    tokens: int
    states: list[LayerState]
    rows: list[_KeptRows]
    extras: dict[str, Extra]
    position: int
    draft_position: int
    rope_delta: int
    known_tokens: list[int] = field(default_factory=list)


class Speculation:
    """Checkpoint, commit and roll back for one cache, rounds one after the other; its copies of states are reused."""

    def __init__(self, cache: LiveCache) -> None:
        """Speculate on ``cache``; nothing is allocated until a recurrent layer asks for it."""
        self.cache = cache
        self._state_copies: dict[PlaneKey, Buffer] = {}
        self._active: _Checkpoint | None = None

    @property
    def active(self) -> bool:
        """Whether a block is open. One that can never be rolled back, since the cache went elsewhere, is not."""
        return self._active is not None and self._way_back_lost(self._active) is None

    def checkpoint(self, tokens: int = MAX_BLOCK) -> None:
        """Open a block of at most ``tokens`` tokens; at most :data:`MAX_BLOCK`, one block at a time.

        Raises InstallError ``checkpoint-open``, ``block-too-long``, ``tainted``, ``quiesced``, and
        ``chronological-has-no-past`` for a full plane that shifts its rows (transformers' layers).
        """
        self.cache.require_usable("a checkpoint")
        if self.active:
            raise InstallError("checkpoint-open", "a block is open already: commit it or roll it back first")
        if not 1 <= tokens <= MAX_BLOCK:
            raise refused("block-too-long", "a block of draft tokens", None, f"1 to {MAX_BLOCK}", tokens)
        now = self.cache.generation
        rows = [kept for layer in now.every_layer() for kept in self._kept_rows(layer, tokens)]
        for layer, plane in _states(now):
            copy = self._state_copies.get(plane.spec.key)
            if copy is None:
                copy = self._state_copies[plane.spec.key] = layer.device.allocate(plane.spec.row_bytes)
            layer.device.copy(plane.buffer, 0, copy, 0, plane.spec.row_bytes)
        self.cache.line = Line(now.position, now.draft_position)
        self._active = _Checkpoint(
            line=self.cache.line,
            tokens=tokens,
            states=[layer.state for layer in now.every_layer()],
            rows=rows,
            extras=dict(now.extras),
            position=now.position,
            draft_position=now.draft_position,
            rope_delta=now.rope_delta,
            known_tokens=list(now.tokens[now.position :]),
        )

    def _kept_rows(self, layer: LiveLayer, tokens: int) -> Iterator[_KeptRows]:
        state = layer.state
        if state.placement is not None:
            for plane in layer.token_planes():
                yield from self._kept(layer, plane, state.placement, tokens)
        if state.pool is not None and not state.pool.is_flat:
            for plane in layer.keys(Unit.TOKEN):
                if plane.spec.is_tail:
                    yield from self._kept_pool_rows(layer, plane, tokens)

    def _kept(self, layer: LiveLayer, plane: LivePlane, placement: Placement, tokens: int) -> Iterator[_KeptRows]:
        count = _room(placement, tokens)
        if count == 0:
            return
        appended = placement.append(placement.position, count)
        if isinstance(placement, Chronological) and appended.moves:
            raise InstallError(
                "chronological-has-no-past",
                f"{plane.spec.key}: a full plane that shifts its rows cannot take a block back",
                layer=layer.number,
                plane=str(plane.spec.key),
                hint="use a rotating ring",
            )
        spans = overwritten(appended)
        if spans:
            yield _keep(layer, plane, spans)

    def _kept_pool_rows(self, layer: LiveLayer, plane: LivePlane, tokens: int) -> Iterator[_KeptRows]:
        pool = layer.state.pool
        assert pool is not None
        count = min(tokens, pool.max_context - pool.position, pool.effective)
        if count == 0:
            return
        first = pool.position % pool.effective
        head = min(count, pool.effective - first)
        spans = [Span(0, first, head), Span(head, 0, count - head)]
        yield _keep(layer, plane, tuple(span for span in spans if span.count))

    def _require_open(self, operation: str) -> _Checkpoint:
        if self._active is None:
            raise InstallError("no-checkpoint", f"{operation} without an open block")
        return self._active

    def rollback(self) -> None:
        """Return every plane, counter, token and extra to the checkpoint.

        Raises InstallError ``lapped`` where more tokens were appended than the block announced (rows that nobody kept
        are gone), ``generation-replaced`` where the cache was reset, installed into or replaced meanwhile, and
        ``rewound`` where it went back below the checkpoint, even if it has grown again; nothing has changed then.
        """
        self.cache.require_usable("a rollback")
        saved = self._require_open("a rollback")
        now = self.cache.generation
        self._require_reach(saved, now)
        try:
            for kept in saved.rows:
                kept.put_back()
            for layer, plane in _states(now):
                layer.device.copy(self._state_copies[plane.spec.key], 0, plane.buffer, 0, plane.spec.row_bytes)
        except BaseException:
            self.cache.taint("a rollback")
            raise
        for layer, state in zip(now.every_layer(), saved.states, strict=True):
            layer.state = state
        now.position, now.draft_position, now.rope_delta = saved.position, saved.draft_position, saved.rope_delta
        now.tokens[saved.position :] = saved.known_tokens
        now.extras = dict(saved.extras)
        self._active = None
        self.cache.owe_replay(0)
        self.cache.write_counters()

    def _way_back_lost(self, saved: _Checkpoint) -> InstallError | None:
        """Why the rows below the checkpoint are no longer those that it counts on."""
        line = self.cache.line
        if line is not saved.line:
            return InstallError("generation-replaced", "the cache holds another session's state since the checkpoint")
        for what, lowest, position in (
            ("target", line.lowest, saved.position),
            ("draft", line.lowest_draft, saved.draft_position),
        ):
            if lowest < position:
                return refused("rewound", f"the {what} was rewound below the checkpoint", None, position, lowest)
        return None

    def _require_way_back(self, saved: _Checkpoint) -> None:
        lost = self._way_back_lost(saved)
        if lost is not None:
            raise lost

    def _require_reach(self, saved: _Checkpoint, now: Generation) -> None:
        self._require_way_back(saved)
        for what, grown in (
            ("target", now.position - saved.position),
            ("draft", now.draft_position - saved.draft_position),
        ):
            if grown > saved.tokens:
                raise refused("lapped", f"the {what} grew beyond the block", None, f"at most {saved.tokens}", grown)

    def commit(self, accepted: int) -> int:
        """Keep the first ``accepted`` tokens of the block and close it; returns how many tokens the caller must replay.

        Where every plane has a token axis, the rejected rows are taken back (rings get the rows that only rejected
        tokens overwrote) and nothing is to be replayed. Where a recurrent state exists, a partial acceptance rolls
        the whole block back and the caller replays the accepted tokens; until then captures are refused
        (``replay-pending``).
        """
        self.cache.require_usable("a commit")
        saved = self._require_open("a commit")
        self._require_way_back(saved)
        now = self.cache.generation
        grown = now.position - saved.position
        if not 0 <= accepted <= grown:
            raise refused("bad-acceptance", "a commit accepts what was appended", None, f"0 to {grown}", accepted)
        if now.draft_layers and now.draft_position - saved.draft_position not in (0, grown):
            raise refused(
                "pair-differs",
                "target and draft grew differently",
                None,
                grown,
                now.draft_position - saved.draft_position,
            )
        if accepted == grown:
            self._active = None
            return 0
        if accepted == 0 or any(True for _ in _states(now)):
            self.rollback()
            self.cache.owe_replay(accepted)
            return accepted
        self._require_reach(saved, now)
        try:
            self._take_back(saved, now, accepted)
        except _AcceptedRowsGoneError:
            self.rollback()
            self.cache.owe_replay(accepted)
            return accepted
        return 0

    def _take_back(self, saved: _Checkpoint, now: Generation, accepted: int) -> None:
        grown = {"layer": accepted, "draft": accepted if now.draft_position != saved.draft_position else 0}
        begin = {"layer": saved.position, "draft": saved.draft_position}
        plans = [
            (layer, *_partial(layer, state, begin[layer.scope], grown[layer.scope]))
            for layer, state in zip(now.every_layer(), saved.states, strict=True)
        ]
        taken = {id(layer): rows for layer, _, rows in plans}
        try:
            for kept in saved.rows:
                rows = taken[id(kept.layer)]
                if rows is not None:
                    kept.put_back(rows.of(kept.plane))
        except BaseException:
            self.cache.taint("a commit")
            raise
        for layer, state, _ in plans:
            layer.state = state
        now.position = saved.position + accepted
        now.draft_position = saved.draft_position + grown["draft"]
        del now.tokens[now.position :]
        now.extras.clear()
        self._active = None
        self.cache.write_counters()


class _AcceptedRowsGoneError(Exception):
    """Rejected tokens overwrote accepted ones, going round a ring, or moved them: only a replay brings them back."""


@dataclass(frozen=True)
class _TakenRows:
    """Physical rows that the accepted tokens of one layer were written to."""

    rows: frozenset[int]
    index_rows: frozenset[int]

    def of(self, plane: LivePlane) -> frozenset[int]:
        return self.index_rows if plane.spec.is_tail else self.rows


def _partial(layer: LiveLayer, saved: LayerState, begin: int, accepted: int) -> tuple[LayerState, _TakenRows | None]:
    """The layer's state after ``accepted`` tokens, and which kept rows must stay overwritten (None: no row goes back).

    A layer that still holds everything just rewinds. A ring that lost rows returns to the checkpoint's placement,
    appended by the accepted tokens alone, and gets back the rows that only rejected tokens overwrote.
    """
    try:
        return rewound(layer, begin + accepted), None
    except InstallError as error:
        if error.code not in ("beyond-headroom", "lapped"):
            raise
    plan = replace(layer, state=saved).plan_append(begin, accepted)
    fresh = RowSet.of((begin, begin + accepted))
    kept: list[tuple[Placement | None, Placement | None, RowSet]] = []
    if plan.after.placement is not None:
        kept.append((plan.after.placement, layer.state.placement, plan.after.placement.resident))
    if plan.after.pool is not None:
        kept.append((plan.after.pool, layer.state.pool, plan.after.pool.need(begin + accepted)))
    for after, now, wanted in kept:
        if after is not None and now is not None and not _lies_as(now, after, wanted.intersection(fresh)):
            raise _AcceptedRowsGoneError
    rows = frozenset(row for span in plan.rows.writes for row in _rows(span)) if plan.rows is not None else frozenset()
    steps = (span for step in plan.pool_steps for span in step.append.writes)
    return plan.after, _TakenRows(rows, frozenset(row for span in steps for row in _rows(span)))


def _lies_as(now: Placement, after: Placement, rows: RowSet) -> bool:
    """Whether ``rows`` are still there, and where ``after`` looks for them: a plane that shifts has moved them on."""
    return now.resident.contains(rows) and all(now.spans(a, b) == after.spans(a, b) for a, b in rows)


def _rows(span: Span) -> range:
    return range(span.physical, span.physical_end)


def _room(placement: Placement, tokens: int) -> int:
    """How many of ``tokens`` rows the placement can still take: a block near the end of the context is shorter."""
    for count in range(tokens, 0, -1):
        try:
            placement.append(placement.position, count)
        except InstallError:
            continue
        return count
    return 0


def _keep(layer: LiveLayer, plane: LivePlane, spans: tuple[Span, ...]) -> _KeptRows:
    runs = tuple((span.physical, span.count) for span in spans)
    content = memoryview(bytearray(sum(count for _, count in runs) * plane.spec.row_bytes))
    layer.device.gather([Move(plane.buffer, plane.strides, runs, 0)], content)
    return _KeptRows(layer, plane, runs, content)


def _states(generation: Generation) -> Iterator[tuple[LiveLayer, LivePlane]]:
    for layer in generation.every_layer():
        for plane in layer.keys(Unit.STATE):
            yield layer, plane
