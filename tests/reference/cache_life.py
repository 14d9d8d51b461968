"""One random life of a live cache, step by step beside the model of :mod:`tests.reference.row_model`.

After each step every row that must be there is read from the slot where its law puts it. A refusal is foretold by code,
and changes no byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvpack.device.host import HostDevice
from kvpack.errors import KvpackError
from kvpack.live import transfer
from kvpack.live.cache import LiveCache
from kvpack.live.context import shift
from kvpack.live.speculation import MAX_BLOCK, Speculation
from kvpack.model.geometry import PlaneKey, Scope
from kvpack.model.layout import ProducerLayout
from kvpack.model.planes import LOGITS
from kvpack.model.snapshot import Cut
from tests import synthetic
from tests.reference.life_settings import SETTINGS, layout_choices
from tests.reference.row_model import LayerModel, RowMaker, SessionModel

WHO = synthetic.identity()
DEVICE = HostDevice(1)


def packed(layers: Sequence[LayerModel], brought: Sequence[dict[str, list[bytes]]]) -> dict[PlaneKey, bytes]:
    return {
        layer.specs[role].key: b"".join(rows)
        for layer, planes in zip(layers, brought, strict=True)
        for role, rows in planes.items()
    }


@dataclass
class Block:
    """An open checkpoint: the session as it was, and why it can no longer be rolled back, if so."""

    saved: SessionModel
    tokens: int
    broken: str | None = None


class CacheLife(RuleBasedStateMachine):
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.make = RowMaker()
        self.cuts: list[tuple[Cut, SessionModel]] = []

    @initialize(data=st.data(), name=st.sampled_from(sorted(SETTINGS)))
    def allocate(self, data: st.DataObject, name: str) -> None:
        self.setting = SETTINGS[name]
        self.layout_choices = layout_choices(self.setting)
        self.take(data.draw(self.layout_choices), None)

    def take(self, layouts: ProducerLayout, garbage: int | None = 0xA5) -> None:
        """A fresh cache of ``layouts``, its dead rows not zero, and a model of it."""
        one = self.setting
        self.cache = LiveCache.allocate(
            one.geometry, max_context=one.max_context, layouts=layouts, index_rows=one.index_rows, device=DEVICE
        )
        if garbage is not None:
            for layer, plane in self.cache.generation.every_plane():
                layer.device.fill(plane.buffer, 0, plane.buffer.nbytes, garbage)
        self.model = SessionModel(one.geometry, layouts, one.max_context, one.index_rows)
        self.speculation = Speculation(self.cache)
        self.block: Block | None = None

    # --- helpers -------------------------------------------------------------------------------------------------

    def memory(self) -> list[bytes]:
        return [plane.buffer.array.tobytes() for _, plane in self.cache.generation.every_plane()]

    def refuses(self, call: Callable[[], object], *codes: str) -> None:
        """``call`` is refused by one of ``codes``, and no byte or counter changes."""
        before, generation = self.memory(), self.cache.generation
        with pytest.raises(KvpackError) as caught:
            call()
        assert caught.value.code in codes, caught.value.code
        assert self.cache.generation is generation
        assert self.memory() == before
        assert self.cache.tainted is None

    def went_elsewhere(self) -> None:
        if self.block is not None:
            self.block.broken = "generation-replaced"

    # --- appends -------------------------------------------------------------------------------------------------

    def _append(self, count: int, scope: Scope) -> None:
        position = self.model.position(scope)
        brought = self.model.make(scope, count, self.make)
        rows = packed(self.model.of(scope), brought)
        tokens = [token % 997 for token in range(position, position + count)] if scope is Scope.LAYER else []
        call = lambda: self.cache.append(count, rows, tokens=tokens, scope=scope)  # noqa: E731
        if position + count > self.setting.max_context:
            self.refuses(call, "capacity-too-small", "ring-too-small")
            return
        call()
        self.model.append(scope, count, brought, tokens)

    @rule(count=st.integers(1, 4))
    def append(self, count: int) -> None:
        self._append(count, Scope.LAYER)

    @rule(data=st.data())
    def append_batch(self, data: st.DataObject) -> None:
        self._append(data.draw(st.integers(5, self.setting.biggest_batch)), Scope.LAYER)

    @precondition(lambda self: self.model.geometry.draft_layers)
    @rule(count=st.integers(1, 9))
    def append_draft(self, count: int) -> None:
        self._append(count, Scope.DRAFT)

    @precondition(lambda self: self.model.geometry.draft_layers)
    @rule(count=st.integers(1, 5))
    def append_pair(self, count: int) -> None:
        if max(map(self.model.position, (Scope.LAYER, Scope.DRAFT))) + count <= self.setting.max_context:
            self._append(count, Scope.LAYER)
            self._append(count, Scope.DRAFT)

    @rule(data=st.data(), fault=st.sampled_from(["gap", "repeat", "none", "short", "missing", "extra"]))
    def append_wrongly(self, data: st.DataObject, fault: str) -> None:
        position = self.model.position()
        count = data.draw(st.integers(1, 5))
        if position + count > self.setting.max_context:
            return
        rows = packed(self.model.of(Scope.LAYER), self.model.make(Scope.LAYER, count, self.make))
        start, code = position, "rows-and-bytes-differ"
        key = data.draw(st.sampled_from([key for key, content in rows.items() if content]))
        if fault in ("gap", "repeat"):
            start, code = position + (1 if fault == "gap" else -1), "discontinuity"
        elif fault == "none":
            count, rows, code = 0, {}, "zero-rows"
        elif fault == "short":
            rows[key] = rows[key][:-1]
        elif fault == "missing":
            del rows[key]
            code = "plane-missing"
        else:
            rows[PlaneKey("layer", 77, "k")], code = b"", "plane-unknown"
        self.refuses(lambda: self.cache.append(count, rows, start=start), code)

    @rule()
    def set_logits(self) -> None:
        content = self.make(16)
        self.cache.set_extra("logits", content, synthetic.F32, (4,))
        self.model.extras["logits"] = content

    # --- shortening ----------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        scope = data.draw(st.sampled_from([Scope.LAYER, Scope.DRAFT])) if self.model.of(Scope.DRAFT) else Scope.LAYER
        now = self.model.position(scope)
        position = data.draw(st.one_of(st.integers(max(0, now - 12), now + 1), st.integers(0, now)))
        call = lambda: self.cache.rewind(position, scope=scope)  # noqa: E731
        layers = self.model.of(scope)
        if not all(layer.can_rewind(position) for layer in layers if layer.specs):
            self.refuses(call, "beyond-headroom", "forward-rewind", "state-has-no-past")
            return
        call()
        for layer in layers:
            layer.rewind(position)
        if scope is Scope.LAYER:
            del self.model.tokens[position:]
        self.model.extras.clear()
        if self.block is not None and position < self.block.saved.position(scope):
            self.block.broken = self.block.broken or "rewound"

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.model = self.model.fresh()
        self.model.epoch = self.cache.generation.context_epoch
        assert all(set(content) <= {0} for content in self.memory())
        self.went_elsewhere()

    # --- speculation ---------------------------------------------------------------------------------------------

    @rule(tokens=st.integers(1, MAX_BLOCK))
    def checkpoint(self, tokens: int) -> None:
        call = lambda: self.speculation.checkpoint(tokens)  # noqa: E731
        if self.block is not None and self.block.broken is None:
            self.refuses(call, "checkpoint-open")
        elif any(shifts(layer, tokens) for layer in self.model.layers):
            self.refuses(call, "chronological-has-no-past")
        else:
            call()
            self.block = Block(self.model.copy(), tokens)

    def _lapped(self, block: Block) -> bool:
        scopes = (Scope.LAYER, Scope.DRAFT)
        return any(self.model.position(s) - block.saved.position(s) > block.tokens for s in scopes)

    @rule()
    def rollback(self) -> None:
        block = self.block
        if block is None:
            self.refuses(self.speculation.rollback, "no-checkpoint")
        elif block.broken is not None:
            self.refuses(self.speculation.rollback, "generation-replaced", "rewound")
        elif self._lapped(block):
            self.refuses(self.speculation.rollback, "lapped")
        else:
            self.speculation.rollback()
            self.model, self.block = block.saved, None
            self.model.owed = 0

    @precondition(lambda self: self.block is not None)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        block = self.block
        assert block is not None
        grown = self.model.position() - block.saved.position()
        accepted = data.draw(st.integers(0, max(0, grown)))
        call = lambda: self.speculation.commit(accepted)  # noqa: E731
        drafted = self.model.position(Scope.DRAFT) - block.saved.position(Scope.DRAFT)
        if block.broken is not None:
            self.refuses(call, "generation-replaced", "rewound")
        elif self.model.of(Scope.DRAFT) and drafted not in (0, grown):
            self.refuses(call, "pair-differs")
        elif accepted < grown and self._lapped(block):
            self.refuses(call, "lapped")
        else:
            self._committed(block, call(), accepted, grown)

    @rule(data=st.data(), tokens=st.integers(1, MAX_BLOCK), accepts=st.booleans())
    def speculate(self, data: st.DataObject, tokens: int, accepts: bool) -> None:
        """A whole round, in one batch or in steps."""
        self.checkpoint(tokens)
        if self.block is None or self.model.position() + tokens > self.setting.max_context:
            return
        left = tokens
        while left:
            count = data.draw(st.integers(1, left))
            self._append(count, Scope.LAYER)
            left -= count
        if accepts:
            self.commit(data)
        else:
            self.rollback()

    def _committed(self, block: Block, owed: object, accepted: int, grown: int) -> None:
        self.block = None
        if accepted == grown:
            assert owed == 0
            return
        assert owed in (0, accepted)
        if owed == accepted:
            self.model = block.saved
            self.model.owed = accepted
            return
        assert not self.model.has_states
        for at, layer in enumerate(self.model.layers):
            saved = block.saved.layers[at]
            keep = accepted if layer.position > saved.position else 0
            if layer.can_rewind(saved.position + keep):
                layer.rewind(saved.position + keep)
            else:
                spec, start, end = layer.specs, saved.position, saved.position + keep
                again = {
                    role: rows[start // layer.pool : end // layer.pool]
                    if spec[role].unit.value == "pool"
                    else rows[start:end]
                    for role, rows in layer.rows.items()
                }
                self.model.layers[at] = saved
                saved.append(keep, again)
        del self.model.tokens[self.model.position() :]
        self.model.extras.clear()

    # --- cuts ----------------------------------------------------------------------------------------------------

    @rule(resident=st.booleans())
    def capture(self, resident: bool) -> None:
        call = lambda: transfer.capture(self.cache, WHO, resident=resident)  # noqa: E731
        if self.model.owed:
            self.refuses(call, "replay-pending")
            return
        cut = call()
        wanted = self.model.stored(resident=resident)
        assert {key: rows for key, rows in cut.stored.items() if key.scope != "session"} == wanted
        for key, layer, role in self.model.planes():
            assert bytes(cut.planes[key].buffer) == layer.content(role, wanted[key]), str(key)
        assert list(cut.tokens) == self.model.tokens
        extras = {LOGITS: self.model.extras["logits"]} if self.model.extras else {}
        assert {k: bytes(p.buffer) for k, p in cut.planes.items() if k == LOGITS} == extras
        assert (cut.record.position, cut.record.context_epoch) == (self.model.position(), self.model.epoch)
        self.cuts = [*self.cuts[-3:], (cut, self.model.copy())]

    def _fits(self, cut: Cut, source: SessionModel, target: SessionModel, at: int) -> bool:
        """Whether every row that ``target`` needs at ``at`` is stored."""
        away = at != source.position()
        if away and (source.has_states or source.of(Scope.DRAFT)):
            return False
        draft = source.position(Scope.DRAFT)
        return all(
            cut.stored[key].contains(layer.need(draft if key.scope == Scope.DRAFT.value else at)[role])
            for key, layer, role in target.planes()
        )

    @precondition(lambda self: self.cuts)
    @rule(data=st.data())
    def install_fresh(self, data: st.DataObject) -> None:
        """Into another cache, of any layout, which is the live one from then on; at the cut, or below it."""
        cut, source = data.draw(st.sampled_from(self.cuts))
        position = source.position()
        at = data.draw(st.one_of(st.just(position), st.integers(max(0, position - 9), position)))
        old = (self.cache, self.model, self.speculation, self.block)
        self.take(data.draw(self.layout_choices))
        call = lambda: transfer.install(self.cache, cut, WHO, at=at)  # noqa: E731
        if not self._fits(cut, source, self.model, at):
            self.refuses(call, "rows-not-stored", "draft-away-from-cut")
            self.cache, self.model, self.speculation, self.block = old
            return
        before = self.memory()
        call()
        self.model = self.model.restored(source, at, source.position(Scope.DRAFT))
        self.require_outside_untouched(before)

    def require_outside_untouched(self, before: list[bytes]) -> None:
        """An install writes the rows that it restores and nothing else."""
        for (layer, plane), old, (_, model, role) in zip(
            self.cache.generation.every_plane(), before, self.model.planes(), strict=True
        ):
            if role in model.states:
                continue
            written = bytearray(plane.buffer.nbytes)
            for first, end in model.held(role):
                for row in range(first, end):
                    for a, b in parts_of(plane, model.slot(role, row)):
                        written[a:b] = b"\1" * (b - a)
            now = plane.buffer.array.tobytes()
            outside = [at for at in range(len(now)) if now[at] != old[at] and not written[at]] if now != old else []
            assert outside == [], (str(plane.spec.key), layer.number)

    @precondition(lambda self: self.cuts)
    @rule(data=st.data(), in_place=st.booleans())
    def install_staged(self, data: st.DataObject, in_place: bool) -> None:
        cut, source = data.draw(st.sampled_from(self.cuts))
        stage = lambda: transfer.stage(self.cache, cut, WHO)  # noqa: E731
        if not self._fits(cut, source, self.model.fresh(), source.position()):
            self.refuses(stage, "rows-not-stored")
            return
        before = self.memory()
        staged = stage()
        assert self.memory() == before
        buffers = [plane.buffer for _, plane in self.cache.generation.every_plane()]
        if in_place:
            transfer.publish_in_place(self.cache, staged)
            assert [plane.buffer for _, plane in self.cache.generation.every_plane()] == buffers
        else:
            self.cache.swap(staged.generation)
        self.model = self.model.restored(source, source.position(), source.position(Scope.DRAFT))
        self.went_elsewhere()

    @precondition(lambda self: self.cuts and (self.model.position() or self.model.position(Scope.DRAFT)))
    @rule(data=st.data())
    def install_into_a_live_session(self, data: st.DataObject) -> None:
        cut, _ = data.draw(st.sampled_from(self.cuts))
        self.refuses(lambda: transfer.install(self.cache, cut, WHO), "not-fresh")

    @precondition(lambda self: self.model.position() > 0)
    @rule(data=st.data())
    def shift(self, data: st.DataObject) -> None:
        """A prefix and a newest suffix are prefilled anew and published."""
        position = self.model.position()
        prefix = data.draw(st.integers(0, min(6, position)))
        newest = data.draw(st.integers(prefix, position - (prefix == 0)))
        kept = self.model.tokens[:prefix] + self.model.tokens[newest:position]
        fresh = self.model.fresh()

        def prefill(staging: LiveCache, tokens: Sequence[int]) -> None:
            for scope in (Scope.LAYER, Scope.DRAFT):
                if scope is Scope.DRAFT and not self.model.position(scope):
                    continue
                brought = fresh.make(scope, len(tokens), self.make)
                ids = list(tokens) if scope is Scope.LAYER else []
                staging.append(len(tokens), packed(fresh.of(scope), brought), tokens=ids, scope=scope)
                fresh.append(scope, len(tokens), brought, ids)

        fresh.epoch = self.model.epoch + 1
        shift(self.cache, kept, prefill)
        self.model = fresh
        self.went_elsewhere()

    # --- what always holds ---------------------------------------------------------------------------------------

    @invariant()
    def every_row_lies_where_its_law_puts_it(self) -> None:
        if not hasattr(self, "cache"):
            return
        type(self).steps += 1
        now = self.cache.generation
        assert (self.cache.position, self.cache.draft_position) == (
            self.model.position(),
            self.model.position(Scope.DRAFT),
        )
        assert now.tokens == self.model.tokens
        assert {role: extra.content for role, extra in now.extras.items()} == self.model.extras
        counters = memoryview(self.cache.counters.array.tobytes()).cast("i").tolist()
        wanted = [number for layer in self.model.layers for number in (layer.position, layer.next_slot())]
        assert counters == wanted
        for (_, plane), (key, layer, role) in zip(now.every_plane(), self.model.planes(), strict=True):
            content = plane.buffer.array.tobytes()
            if role in layer.states:
                if layer.position:
                    assert content == layer.states[role], str(key)
                continue
            for first, end in layer.held(role):
                for row in range(first, end):
                    found = b"".join(content[a:b] for a, b in parts_of(plane, layer.slot(role, row)))
                    assert found == layer.rows[role][row], f"{key} row {row}"


def parts_of(plane: object, slot: int) -> list[tuple[int, int]]:
    """The byte ranges of a physical row, head by head."""
    strides = plane.strides  # type: ignore[attr-defined]
    first = strides.base + slot * strides.row_stride
    starts = [first + part * strides.part_stride for part in range(strides.parts)]
    return [(start, start + strides.part_bytes) for start in starts]


def shifts(layer: LayerModel, tokens: int) -> bool:
    """Whether a batch of ``tokens`` tokens shifts rows of a chronological plane that stay in it."""
    end, capacity = layer.position + tokens, layer.layout.capacity
    return layer.layout.law == "chronological" and end > capacity and layer.position > max(layer.lost, end - capacity)
