"""Who needs whom: deltas and their parents, as the index knows them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from kvpack.store.rows import chain_of, from_numbers

__all__ = ["Conversation", "conversations", "is_whole", "linear", "pack_with_state", "superseded"]

_CHILDREN: Final = (
    "SELECT DISTINCT k.id FROM packs p JOIN cuts c ON c.pack = p.number JOIN packs k ON k.parent_state = c.state_id"
    " WHERE p.id = ? AND c.state_id != x'' AND k.number != p.number AND k.retired = 0"
)


def is_whole(cursor: sqlite3.Cursor, number: int) -> bool:
    """Whether a pack needs no parent."""
    row = cursor.execute("SELECT parent_state IS NULL FROM packs WHERE number = ?", (number,)).fetchone()
    return row is not None and bool(row[0])


def pack_with_state(cursor: sqlite3.Cursor, state_id: bytes) -> bytes | None:
    """A pack with the cut that a delta names as its parent."""
    row = cursor.execute(
        "SELECT p.id FROM cuts c JOIN packs p ON p.number = c.pack WHERE c.state_id = ?"
        " ORDER BY p.retired, p.parent_state IS NOT NULL LIMIT 1",
        (state_id,),
    ).fetchone()
    return row[0] if row is not None else None


def linear(cursor: sqlite3.Cursor, names: Sequence[bytes]) -> int:
    """How many of a chain's packs, from the newest on, belong to it alone: nothing else continues them, no pin holds
    them."""
    count = 1
    for child, name in pairwise(names):
        pinned = cursor.execute("SELECT pinned FROM packs WHERE id = ?", (name,)).fetchone()
        others = {k for (k,) in cursor.execute(_CHILDREN, (name,))} - {child}
        if pinned is None or pinned[0] or others:
            break
        count += 1
    return count


def superseded(cursor: sqlite3.Cursor, merged: Sequence[bytes], states: Iterable[bytes]) -> tuple[bytes, ...]:
    """Those of ``merged`` (newest first) that a pack with the cuts ``states`` replaces.

    No pin holds them, and nothing else continues them, except what finds the newest one's cut in the new pack.
    """
    kept, found = set(states), []
    for name in merged:
        rows = cursor.execute(
            "SELECT k.id, k.parent_state FROM packs p JOIN cuts c ON c.pack = p.number JOIN packs k"
            " ON k.parent_state = c.state_id WHERE p.id = ? AND k.number != p.number AND k.retired = 0",
            (name,),
        ).fetchall()
        pinned = cursor.execute("SELECT pinned FROM packs WHERE id = ?", (name,)).fetchone()
        if (
            pinned is not None
            and not pinned[0]
            and all(k in merged or (name == merged[0] and state in kept) for k, state in rows)
        ):
            found.append(name)
    return tuple(found)


@dataclass(frozen=True)
class Conversation:
    """The end of a conversation's chain: how many of its newest packs are its own, what they take, and how much of that
    are tails and states of cuts that nobody keeps. Sizes in bytes."""

    pack_id: bytes
    count: int
    stored_bytes: int
    waste_bytes: int


def conversations(cursor: sqlite3.Cursor) -> list[Conversation]:
    """Every chain that ends in a turn and has packs behind it that are its own."""
    leaves = cursor.execute(
        "SELECT id, kept, position FROM packs p WHERE retired = 0 AND pinned = 0 AND kept != x''"
        " AND parent_state IS NOT NULL AND NOT EXISTS (SELECT 1 FROM cuts c JOIN packs k"
        " ON k.parent_state = c.state_id WHERE c.pack = p.number AND k.number != p.number AND k.retired = 0)"
    ).fetchall()
    found: list[Conversation] = []
    for pack_id, blob, position in leaves:
        chain = chain_of(cursor, pack_id, 64)
        count = linear(cursor, [name for _, name, _ in chain])
        kept, total, waste = {position, *from_numbers(blob)}, 0, 0
        for number, _, size in chain[:count]:
            tails, own = cursor.execute("SELECT tail_bytes, kept FROM packs WHERE number = ?", (number,)).fetchone()
            cuts = [at for (at,) in cursor.execute("SELECT position FROM cuts WHERE pack = ?", (number,))]
            total += size
            if own:
                waste += tails * sum(at not in kept for at in cuts) // len(cuts)
        if count > 1:
            found.append(Conversation(pack_id, count, total, waste))
    return found
