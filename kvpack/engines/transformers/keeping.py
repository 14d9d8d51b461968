"""What a warm-started run leaves in the store: one pack a cut, each a delta on the one before it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kvpack.errors import CompatibilityError, KvpackError
from kvpack.model.snapshot import CutView
from kvpack.pack.view import MAX_CHAIN
from kvpack.pack.writer import Signer
from kvpack.store.prefix import ContentField
from kvpack.store.protocol import Entry, Store, StoredPack

__all__ = ["CutPlan", "Keeper"]

_log = logging.getLogger("kvpack.engines")


@dataclass(frozen=True)
class CutPlan:
    """Where a prefill is divided and its state kept. ``lasting`` cuts (a shared prologue, the caller's own) outlive a
    collection, of the ``passing`` ones the last few do."""

    lasting: frozenset[int]
    passing: frozenset[int]

    @classmethod
    def of(cls, length: int, *, lasting: Sequence[int], passing: Sequence[int]) -> CutPlan:
        """The plan for ``length`` tokens: besides the given cuts, one a token before the end."""
        named = frozenset(at for at in lasting if 0 < at < length)
        others = {at for at in (*passing, length - 1) if 0 < at < length}
        return cls(named, frozenset(others) - named)

    @property
    def positions(self) -> tuple[int, ...]:
        """Every cut, ascending."""
        return tuple(sorted(self.lasting | self.passing))

    def kept(self, position: int, keep_cuts: int) -> tuple[int, ...]:
        """The cuts up to ``position`` that outlive a collection once the pack of ``position`` is the newest; empty
        (all of its cuts) for a lasting cut."""
        if position in self.lasting:
            return ()
        turns = sorted(at for at in self.passing if at <= position)[-max(1, keep_cuts) :]
        return tuple(sorted({*turns, *(at for at in self.lasting if at < position)}))


class Keeper:
    """Puts cuts of one run, in ascending order. Nothing that the store does wrong stops the run: it is logged."""

    def __init__(
        self,
        store: Store,
        plan: CutPlan,
        *,
        keep_cuts: int,
        codec: str,
        sign: Signer | None,
        content: Sequence[ContentField],
    ) -> None:
        """``parent`` is the pack that the next cut continues, with the cut's position."""
        self.store = store
        self.plan = plan
        self._keep_cuts = keep_cuts
        self._codec = codec
        self._sign = sign
        self.content = content
        self.parent: tuple[bytes, int] | None = None
        self.entries: list[Entry] = []

    def put(self, cut: CutView, tokens: Sequence[int]) -> None:
        """Store one cut; a delta where what it continues is stored, a whole pack otherwise."""
        position = cut.record.position
        content = [field for field in self.content if field.position < position]
        try:
            entry = self._put(cut, tokens[:position], content)
        except (KvpackError, OSError) as error:
            _log.warning("the cut at %d is not stored: %s", position, error)
            return
        self.parent = entry.pack_id, position
        self.entries.append(entry)

    def _put(self, cut: CutView, tokens: Sequence[int], content: Sequence[ContentField]) -> Entry:
        position = cut.record.position
        kept = self.plan.kept(position, self._keep_cuts)
        parent = self._open_parent()
        if parent is not None:
            with parent:
                try:
                    return self.store.put(
                        cut, tokens, content=content, parent=parent, kept=kept, codec=self._codec, sign=self._sign
                    )
                except CompatibilityError as error:
                    if error.code not in ("not-a-continuation", "parent-too-deep"):
                        raise
        return self.store.put(cut, tokens, content=content, kept=kept, codec=self._codec, sign=self._sign)

    def _open_parent(self) -> StoredPack | None:
        """The pack that is continued, in a chain that has room for one more; None where there is none."""
        if self.parent is None:
            return None
        pack_id, position = self.parent
        entry = self.store.entry(pack_id)
        if entry.chain >= MAX_CHAIN:
            entry = self.store.flatten(pack_id, whole=False, sign=self._sign)
        if entry.chain >= MAX_CHAIN:
            entry = self.store.flatten(entry.pack_id, sign=self._sign)
        if all(cut.position != position for cut in entry.cuts):
            return None
        found = self.store.get(entry.pack_id)
        if found is not None:
            found.cut_position = position
        return found
