"""The search for the deepest restorable prefix, node by node from the end."""

from __future__ import annotations

import errno
import logging
import sqlite3
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from kvpack.model.identity import Identity
from kvpack.pack.view import MAX_CHAIN
from kvpack.store import lineage, rows
from kvpack.store.opening import BrokenPackError
from kvpack.store.prefix import BLOCK_TOKENS, TokenChain, numerics_digest
from kvpack.store.protocol import Hit
from kvpack.store.record import BETWEEN, CUT, LOGITS_HERE, RESTORES
from kvpack.store.rows import Candidate

if TYPE_CHECKING:
    from kvpack.store.local import LocalStore

__all__ = ["Finder", "usable_chain"]

_log = logging.getLogger("kvpack.store")
_AT_ONCE: Final = 64
_CANDIDATES: Final = 16
_COMPARED: Final = 2
"""How many packs are compared token by token behind a shared node: the newest ones."""


class Finder:
    """One question to a store. At most one pass over the index; fronts are opened only to compare tokens."""

    def __init__(
        self,
        store: LocalStore,
        chain: TokenChain,
        identity: Identity,
        *,
        only_cuts: bool,
        need_logits: bool,
        capacity: int | None,
    ) -> None:
        """See :meth:`kvpack.store.protocol.Store.longest`."""
        self._store = store
        self._chain = chain
        self._limit = len(chain) if capacity is None else min(len(chain), capacity)
        self._only_cuts = only_cuts
        self._need_logits = need_logits
        self._numerics = numerics_digest(identity)

    def find(self) -> Hit | None:
        """The hit, or None."""
        blocks = self._limit // BLOCK_TOKENS
        for block in answering_blocks(self._store, self._chain.nodes[: blocks + 1]):
            for position, found in self._under(block):
                if found.pack_id in self._store.refused:
                    continue
                chain = usable_chain(self._store, found.pack_id)
                if chain:
                    return self._hit(position, found, chain)
        return None

    def _read(self, node: bytes, tail: int, key: bytes | None, needed: int, limit: int) -> list[Candidate]:
        found = self._store.index.read(lambda c: rows.candidates(c, node, tail, key, needed, limit))
        # Depth is equal here: what promises bitwise equality comes before what is newest.
        return sorted(found, key=lambda c: (c.numerics != self._numerics, not c.flags & CUT))

    def _flags(self, position: int) -> int:
        if position == len(self._chain) and self._need_logits:
            return CUT | LOGITS_HERE
        return CUT if self._only_cuts else RESTORES

    def _under(self, block: int) -> Iterator[tuple[int, Candidate]]:
        """Every answer at or behind a node, before the next node; the deepest first."""
        first = block * BLOCK_TOKENS
        most = min(self._limit - first, BLOCK_TOKENS - 1)
        node = self._chain.nodes[block]
        longer = sorted(self._longer(block, first), key=lambda pair: -pair[0])
        for tail in self._store.index.read(lambda cursor: rows.tails(cursor, node, most)):
            while longer and longer[0][0] > first + tail:
                yield longer.pop(0)
            key = self._chain.final(block, tail)
            for found in self._read(node, tail, key, self._flags(first + tail), _CANDIDATES):
                yield first + tail, found
        yield from longer
        if block:
            for found in self._read(node, 0, None, self._flags(first), _CANDIDATES):
                yield first, found

    def _longer(self, block: int, first: int) -> Iterator[tuple[int, Candidate]]:
        """Packs that go on with the same token behind the node, compared token by token."""
        hint = self._chain.hint(block)
        if self._only_cuts or not hint:
            return
        most = min(self._limit, len(self._chain) - 1 if self._need_logits else self._limit)
        for found in self._read(self._chain.nodes[block], 0, hint, BETWEEN, _COMPARED):
            if found.pack_id in self._store.refused:
                continue
            stop = min((at for at in found.content if at >= first), default=most)
            try:
                position = self._store.restores_to(found.pack_id, self._chain, block, min(most, stop))
            except BrokenPackError as broken:
                self._store.put_aside(broken)
                continue
            if position is not None and position > first:
                yield position, found

    def _hit(self, position: int, found: Candidate, chain: list[tuple[int, bytes, int]]) -> Hit:
        cut = self._store.index.read(lambda cursor: rows.cut_behind(cursor, found.pack_id, position))
        names = tuple(name for _, name, _ in chain)
        return Hit(
            position=position,
            pack_id=found.pack_id,
            cut_position=position if cut is None else cut,
            at_cut=cut == position,
            needs_logits=position == len(self._chain) and self._need_logits,
            same_numerics=found.numerics == self._numerics,
            tokens=self._chain.ids,
            count=lambda: self._store.count_hit(names),
        )


def answering_blocks(store: LocalStore, nodes: Sequence[bytes]) -> Iterator[int]:
    """The blocks of a chain at or behind which some pack restores, the deepest first."""
    end = store.index.read(lambda cursor: rows.deepest_known(cursor, nodes))
    while end > 0:
        first = max(0, end - _AT_ONCE)
        part = nodes[first:end]
        for at in store.index.read(lambda cursor, part=part: rows.answering(cursor, part)):  # type: ignore[misc]
            yield first + at
        end = first


def usable_chain(store: LocalStore, pack_id: bytes) -> list[tuple[int, bytes, int]]:
    """A pack's chain as (number, id, bytes), newest first, if every file of it is there in its full length.

    Otherwise nothing, with a warning, and what is broken is put aside.
    """

    def work(cursor: sqlite3.Cursor) -> tuple[list[tuple[int, bytes, int]], bool]:
        chain = rows.chain_of(cursor, pack_id, MAX_CHAIN)
        whole = bool(chain) and lineage.is_whole(cursor, chain[-1][0])
        return chain, whole

    chain, whole = store.index.read(work)
    if not whole or len(chain) > MAX_CHAIN:
        _log.warning("pack %s is passed over: its chain is not whole", pack_id.hex()[:16])
        return []
    for _, name, size in chain:
        found = store.folder.size(name)
        if found != size:
            gone = found is None
            error = OSError(errno.ENOENT, "it is not there") if gone else OSError(f"it has {found} bytes of {size}")
            store.put_aside(BrokenPackError(name, error, damaged=True))
            return []
    return chain
