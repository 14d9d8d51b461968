"""The log of a remote store: what every process agrees on, one small object an event, in one order.

``log/<number>`` is created and never overwritten, so that of many writers one gets each number and the others take the
next; a writer that decides from what the store holds (room under a quota) asks for the very next number, and decides
again if somebody was faster. Each process applies the events in their order to an index of its own, and so all have
the same rows, the same order of use and the same hit counts.

``head`` names the last checkpoint and is replaced under If-Match only. Events up to a checkpoint are removed, except
the last one: who lags behind sees the gap and starts from the checkpoint.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from blake3 import blake3

from kvpack.errors import FormatError, StoreError
from kvpack.model.wire import HASH_BYTES, WireMap
from kvpack.pack import canonical
from kvpack.store import rows
from kvpack.store.bucket import Bucket
from kvpack.store.index import Index
from kvpack.store.record import Record

__all__ = ["Event", "Log"]

_TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS applied (number INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS records (id BLOB PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID",
)
_AHEAD: Final = 64


@dataclass(frozen=True)
class Event:
    """What changed, at once: packs dropped, packs added (as the bytes of their records), pins, uses.

    ``used`` are packs in the order of their use, the one that was hit first.
    """

    drop: tuple[bytes, ...] = ()
    add: tuple[bytes, ...] = ()
    pin: tuple[bytes, ...] = ()
    unpin: tuple[bytes, ...] = ()
    used: tuple[bytes, ...] = ()

    def to_bytes(self) -> bytes:
        """Canonical MessagePack with a BLAKE3 of itself behind it."""
        wire = {name: list(getattr(self, name)) for name in ("add", "drop", "pin", "unpin", "used")}
        return _sealed(wire)

    @classmethod
    def parse(cls, buffer: bytes) -> Event:
        """Read an event; raises StoreError ``bad-log``."""
        wire = _opened(buffer)
        return cls(**{name: _names(wire, name) for name in ("drop", "add", "pin", "unpin", "used")})

    def apply(self, cursor: sqlite3.Cursor) -> None:
        """Change the rows; applying an event twice in a row changes no more than once, except the order of use."""
        for pack_id in self.drop:
            found = cursor.execute("SELECT number FROM packs WHERE id = ?", (pack_id,)).fetchone()
            if found is not None:
                rows.forget(cursor, found[0])
            cursor.execute("DELETE FROM records WHERE id = ?", (pack_id,))
        for body in self.add:
            _add(cursor, body, pinned=False)
        for wanted, names in ((True, self.pin), (False, self.unpin)):
            cursor.executemany("UPDATE packs SET pinned = ? WHERE id = ?", [(wanted, name) for name in names])
        if self.used:
            tick = rows.next_tick(cursor)
            for at, pack_id in enumerate(self.used):
                cursor.execute("UPDATE packs SET used = ?, hits = hits + ? WHERE id = ?", (tick, int(at == 0), pack_id))


def _add(cursor: sqlite3.Cursor, body: bytes, *, pinned: bool) -> Record:
    record = Record.parse(body)
    rows.add_record(cursor, record, pinned=pinned)
    cursor.execute("INSERT OR REPLACE INTO records VALUES (?, ?)", (record.pack_id, body))
    return record


def _sealed(wire: object) -> bytes:
    body = canonical.encode(wire)
    return body + blake3(body).digest()


def _opened(buffer: bytes) -> WireMap:
    body, digest = buffer[:-HASH_BYTES], buffer[-HASH_BYTES:]
    if len(buffer) <= HASH_BYTES or blake3(body).digest() != digest:
        raise StoreError("bad-log", "an event of the store's log is damaged: its hash differs")
    try:
        return WireMap(canonical.decode(body), "")
    except FormatError as error:
        raise StoreError("bad-log", f"an event of the store's log cannot be read: {error.message}") from None


def _names(wire: WireMap, name: str) -> tuple[bytes, ...]:
    found = wire.array(name)
    if not all(isinstance(entry, bytes) for entry in found):
        raise StoreError("bad-log", f"an event of the store's log has a malformed {name}", field=name)
    return tuple(entry for entry in found if isinstance(entry, bytes))


@dataclass
class Log:
    """The log of one bucket and the index that follows it."""

    bucket: Bucket
    index: Index
    _checkpoints: int = field(default=0)

    def applied(self) -> int:
        """The number of the last event in the index."""
        return self.index.read(_applied)

    def record(self, pack_id: bytes) -> bytes | None:
        """The bytes of a pack's record."""

        def work(cursor: sqlite3.Cursor) -> bytes | None:
            if not _applied(cursor):
                return None
            row = cursor.execute("SELECT record FROM records WHERE id = ?", (pack_id,)).fetchone()
            return None if row is None else row[0]

        return self.index.read(work)

    def sync(self) -> None:
        """Apply what was logged since; two round trips at most, unless a checkpoint has to be loaded."""
        seen = self.applied()
        numbers, bodies = self._ahead(seen) if self.bucket.read_only else self._listed(seen)
        if (numbers and numbers[0] != seen + 1) or (not numbers and seen == 0):
            seen = self._load_checkpoint(seen)
            numbers, bodies = self._ahead(seen) if self.bucket.read_only else self._listed(seen)
            if numbers and numbers[0] != seen + 1:
                raise StoreError("bad-log", "the store's log has a gap", expected=seen + 1, found=numbers[0])
        events = [Event.parse(body) for body in bodies]
        if not events:
            return

        def work(cursor: sqlite3.Cursor) -> None:
            _prepare(cursor)
            done = _applied(cursor)
            for number, event in zip(numbers, events, strict=True):
                if number == done + 1:  # another process that shares the index may have been faster
                    event.apply(cursor)
                    done = number
            cursor.execute("UPDATE applied SET number = ?", (done,))

        self.index.write(work)

    def _listed(self, seen: int) -> tuple[list[int], list[bytes]]:
        found = self.bucket.list("log", after=_name(seen))
        numbers = [int(entry.name.rpartition("/")[2]) for entry in found]
        # Only the first run without a gap: a number may be taken while this list is made.
        run = [number for at, number in enumerate(numbers) if number == numbers[0] + at]
        if run and run[0] != seen + 1:
            return run, []
        bodies: list[bytes] = []
        for answer in self.bucket.many(lambda number: self.bucket.get(_name(number)), run):
            if answer is None:
                break  # removed behind a checkpoint meanwhile: the next question sees the gap
            bodies.append(answer[0])
        return run[: len(bodies)], bodies

    def _ahead(self, seen: int) -> tuple[list[int], list[bytes]]:
        """Where nothing can be listed: the next numbers, in growing steps, until one is not there."""
        bodies: list[bytes] = []
        step = 4
        while True:
            first = seen + 1 + len(bodies)
            answers = self.bucket.many(lambda number: self.bucket.get(_name(number)), range(first, first + step))
            for answer in answers:
                if answer is None:
                    return list(range(seen + 1, seen + 1 + len(bodies))), bodies
                bodies.append(answer[0])
            step = min(_AHEAD, 2 * step)

    def append(self, event: Event, *, expected: int | None = None) -> bool:
        """Log an event and apply it; with ``expected`` only as the number that follows that one, else False."""
        body = event.to_bytes()
        number = self.applied() + 1 if expected is None else expected + 1
        while not self.bucket.create(_name(number), body):
            if expected is not None:
                return False
            number += 1
        head = self._head()
        if head is not None and head[0] >= number:
            # The number was free only because a checkpoint had removed what lay there.
            self.sync()
            return False if expected is not None else self.append(event)
        self.sync()
        return True

    def _head(self) -> tuple[int, str, str | None] | None:
        found = self.bucket.get("head")
        if found is None:
            return None
        wire = _opened(found[0])
        return wire.uint("number"), wire.string("checkpoint"), found[1]

    def _load_checkpoint(self, seen: int) -> int:
        head = self._head()
        if head is None or head[0] <= seen:
            return seen
        found = self.bucket.get(f"checkpoint/{head[1]}")
        if found is None:
            raise StoreError("bad-log", "the store's checkpoint is not there", field="head")
        wire = _opened(found[0])
        number = wire.uint("number")

        def work(cursor: sqlite3.Cursor) -> None:
            _prepare(cursor)
            if _applied(cursor) >= number:
                return
            for table in ("nodes", "cuts", "packs", "records"):
                cursor.execute(f"DELETE FROM {table}")
            for entry in wire.maps("packs", most=1 << 20):
                record = _add(cursor, entry.binary("record"), pinned=entry.get("pinned") is True)
                cursor.execute("UPDATE packs SET hits = ? WHERE id = ?", (entry.uint("hits"), record.pack_id))
            retired = [(name,) for name in _names(wire, "retired")]
            cursor.executemany("UPDATE packs SET retired = 1 WHERE id = ?", retired)
            cursor.execute("UPDATE applied SET number = ?", (number,))

        self.index.write(work)
        return number

    def checkpoint(self) -> bool:
        """Write down what the events so far come to, and remove them; False if another process did so meanwhile."""
        head = self._head()
        number, body = self.index.read(_checkpoint)
        if number == 0 or (head is not None and head[0] >= number):
            return False
        name = f"{number:016d}-{secrets.token_hex(8)}"
        self.bucket.create(f"checkpoint/{name}", body)
        content = _sealed({"checkpoint": name, "number": number})
        made = self.bucket.create("head", content) if head is None else self.bucket.replace("head", content, head[2])
        if not made:
            self.bucket.delete([f"checkpoint/{name}"])
            return False
        old = [entry.name for entry in self.bucket.list("log") if entry.name < _name(number)]
        self.bucket.delete(old)
        if head is not None:
            self.bucket.delete([f"checkpoint/{head[1]}"])
        return True


def _name(number: int) -> str:
    return f"log/{number:016d}"


def _prepare(cursor: sqlite3.Cursor) -> None:
    for statement in _TABLES:
        cursor.execute(statement)
    if cursor.execute("SELECT COUNT(*) FROM applied").fetchone()[0] == 0:
        cursor.execute("INSERT INTO applied VALUES (0)")


def _applied(cursor: sqlite3.Cursor) -> int:
    if cursor.execute("SELECT COUNT(*) FROM sqlite_master WHERE name = 'applied'").fetchone()[0] == 0:
        return 0
    row = cursor.execute("SELECT number FROM applied").fetchone()
    return 0 if row is None else int(row[0])


def _checkpoint(cursor: sqlite3.Cursor) -> tuple[int, bytes]:
    number = _applied(cursor)
    if number == 0:
        return 0, b""
    found: Sequence[tuple[bytes, int, int, int, bytes]] = cursor.execute(
        "SELECT r.record, p.hits, p.pinned, p.retired, p.id FROM packs p JOIN records r ON r.id = p.id ORDER BY p.used"
    ).fetchall()
    wire = {
        "number": number,
        "packs": [{"hits": hits, "pinned": bool(pinned), "record": body} for body, hits, pinned, _, _ in found],
        "retired": [pack_id for _, _, _, retired, pack_id in found if retired],
    }
    return number, _sealed(wire)
