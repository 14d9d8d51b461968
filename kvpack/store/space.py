"""Room in a local store: reservations of puts under way, and what may be removed in which order.

Rows go first and files after the commit, so that whatever happens a row never promises what is not there; a pack is
claimed (locked against every reader) before its row goes.
"""

from __future__ import annotations

import os
import sqlite3
from dataclasses import dataclass

from kvpack.errors import StoreError
from kvpack.store.objects import ObjectFolder
from kvpack.store.rows import forget, used_bytes

__all__ = ["Removal", "drop_dead_reservations", "evict", "reserve"]

# A pack is needed while a delta's parent state is stored nowhere else: in no other pack that is there to stay.
_NEEDED = (
    "EXISTS (SELECT 1 FROM cuts c JOIN packs k ON k.parent_state = c.state_id AND k.number != p.number"
    " WHERE c.pack = p.number AND c.state_id != x'' AND NOT EXISTS (SELECT 1 FROM cuts d JOIN packs q"
    " ON q.number = d.pack WHERE d.state_id = c.state_id AND q.number NOT IN (p.number, k.number) AND q.retired = 0))"
)
_VICTIMS = (
    "SELECT number, id, bytes FROM packs p WHERE pinned = 0 AND retired >= ?1 AND (retired = 1 OR created <= ?2"
    f" OR created > ?3) AND NOT {_NEEDED} ORDER BY retired DESC, used LIMIT ?4"
)
_STILL_FREE = f"SELECT NOT {_NEEDED} FROM packs p WHERE number = ?"


@dataclass(frozen=True)
class Clock:
    """The wall clock as removals see it: seconds since 1970 and the age below which nothing is removed.

    A pack from the future (the clock was set back) counts as old: it must not stay for ever.
    """

    now: float
    grace: float


class Removal:
    """Packs that one transaction removes: claimed while it runs, unlinked once it is committed."""

    def __init__(self, folder: ObjectFolder) -> None:
        """Use it as a context manager: what was claimed is given back in the end."""
        self._folder = folder
        self._held: dict[bytes, int] = {}
        self.leased: set[bytes] = set()

    def __enter__(self) -> Removal:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._held.values():
            if descriptor >= 0:
                os.close(descriptor)

    def claim(self, pack_id: bytes) -> bool:
        """Lock a pack against readers; False while one has it."""
        if pack_id in self._held:
            return True
        descriptor = self._folder.claim(self._folder.path(pack_id))
        if descriptor is None and self._folder.size(pack_id) is not None:
            self.leased.add(pack_id)
            return False
        self._held[pack_id] = -1 if descriptor is None else descriptor
        return True

    def finish(self, removed: dict[bytes, int]) -> None:
        """Unlink what the committed transaction removed."""
        for pack_id in removed:
            self._folder.remove(pack_id)


def evict(
    cursor: sqlite3.Cursor, removal: Removal, clock: Clock, *, room: int | None, retired_only: bool = False
) -> dict[bytes, int]:
    """Remove rows in order (retired packs, then the least recently used) until ``room`` bytes are free.

    ``room`` None removes everything that comes into question. Pinned, leased, young and needed packs stay. Returns
    pack id to bytes; fewer bytes than asked for mean that nothing more may go.
    """
    removed: dict[bytes, int] = {}
    freed, limit, progress = 0, 64, True
    passed: set[int] = set()
    while progress and (room is None or freed < room):
        progress = False
        rows = cursor.execute(
            _VICTIMS, (int(retired_only), clock.now - clock.grace, clock.now, limit + len(passed))
        ).fetchall()
        for number, pack_id, size in rows:
            if room is not None and freed >= room:
                break
            if number in passed or not cursor.execute(_STILL_FREE, (number,)).fetchone()[0]:
                continue
            if not removal.claim(pack_id):
                passed.add(number)
                continue
            forget(cursor, number)
            removed[pack_id] = size
            freed, progress = freed + size, True
    return removed


def drop_dead_reservations(cursor: sqlite3.Cursor, folder: ObjectFolder) -> None:
    """Give back what writers reserved that are no more."""
    for (token,) in cursor.execute("SELECT token FROM reservations").fetchall():
        path = folder.root / "tmp" / token
        descriptor = folder.claim(path)
        if descriptor is not None:
            os.close(descriptor)
        if descriptor is not None or not path.exists():
            cursor.execute("DELETE FROM reservations WHERE token = ?", (token,))


def reserve(
    cursor: sqlite3.Cursor, folder: ObjectFolder, removal: Removal, token: str, need: int, quota: int, clock: Clock
) -> dict[bytes, int]:
    """Promise ``need`` bytes to the writer of ``tmp/<token>``, making room where it is missing.

    Raises StoreError ``quota-exceeded``, and nothing was removed.
    """
    drop_dead_reservations(cursor, folder)
    packs, reserved = used_bytes(cursor)
    missing = packs + reserved + need - quota
    removed = evict(cursor, removal, clock, room=missing) if missing > 0 else {}
    if missing > sum(removed.values()):
        raise StoreError(
            "quota-exceeded",
            f"{need} bytes do not fit into the store's quota of {quota}: the rest is pinned, in use, young or needed",
            field="quota",
            expected=quota,
            found=packs + reserved + need,
        )
    cursor.execute("INSERT INTO reservations VALUES (?, ?)", (token, need))
    return removed
