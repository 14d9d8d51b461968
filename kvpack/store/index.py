"""The index of a local store: SQLite in WAL mode, rebuilt from the records beside the objects whenever it must be.

Nothing is kept here alone that a store could not lose: hit counts and the order of use are all. A process notices that
another one has replaced the file, and repeats what it wrote to the old one.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar
from weakref import WeakSet

from kvpack.errors import StoreError
from kvpack.store.objects import ObjectFolder
from kvpack.store.protocol import Entry, EntryCut
from kvpack.store.record import Record

__all__ = ["Candidate", "Index"]

_VERSION: Final = 1
_BUSY_SECONDS: Final = 60
_CACHE_KIB: Final = 16384
_SCHEMA: Final = """
CREATE TABLE clock (tick INTEGER NOT NULL);
INSERT INTO clock VALUES (1);
CREATE TABLE packs (
  number INTEGER PRIMARY KEY AUTOINCREMENT, id BLOB NOT NULL UNIQUE, bytes INTEGER NOT NULL,
  tail_bytes INTEGER NOT NULL, position INTEGER NOT NULL, created REAL NOT NULL, used INTEGER NOT NULL,
  hits INTEGER NOT NULL DEFAULT 0, pinned INTEGER NOT NULL DEFAULT 0, retired INTEGER NOT NULL DEFAULT 0,
  signed INTEGER NOT NULL, numerics BLOB NOT NULL, parent_state BLOB, parent_position INTEGER, continues BLOB,
  kept BLOB NOT NULL, content BLOB NOT NULL);
CREATE INDEX packs_by_use ON packs (retired, used);
CREATE INDEX packs_by_parent ON packs (parent_state) WHERE parent_state IS NOT NULL;
CREATE TABLE cuts (
  pack INTEGER NOT NULL, position INTEGER NOT NULL, state_id BLOB NOT NULL, logits INTEGER NOT NULL,
  PRIMARY KEY (pack, position)) WITHOUT ROWID;
CREATE INDEX cuts_by_state ON cuts (state_id);
CREATE TABLE nodes (
  node BLOB NOT NULL, tail INTEGER NOT NULL, key BLOB NOT NULL, pack INTEGER NOT NULL, position INTEGER NOT NULL,
  flags INTEGER NOT NULL, PRIMARY KEY (node, tail, key, pack)) WITHOUT ROWID;
CREATE INDEX nodes_by_pack ON nodes (pack);
CREATE TABLE reservations (token TEXT PRIMARY KEY, bytes INTEGER NOT NULL);
"""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Candidate:
    """A pack under a node: its number in the index, its id, the position of the node and the flags there."""

    number: int
    pack_id: bytes
    position: int
    flags: int
    numerics: bytes
    content: tuple[int, ...]


class Index:
    """Open connections are per process; a lock serialises the threads of one process."""

    def __init__(self, folder: ObjectFolder, records: Callable[[], Iterable[tuple[Record, bool]]]) -> None:
        """``records`` gives every record beside an object, and whether a pin lies there."""
        self._folder = folder
        self._path = folder.root / "index.sqlite"
        self._records = records
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._opened: tuple[int, int, int] | None = None
        _open_indexes.add(self)

    def close(self) -> None:
        """Close the connection of this process."""
        with self._lock:
            if self._connection is not None and self._opened is not None and self._opened[0] == os.getpid():
                self._connection.close()
            self._connection = None

    def _identity(self) -> tuple[int, int, int] | None:
        try:
            found = os.lstat(self._path)
        except FileNotFoundError:
            return None
        return os.getpid(), found.st_dev, found.st_ino

    def _connect(self) -> sqlite3.Connection:
        here = self._identity()
        if self._connection is not None and here == self._opened:
            return self._connection
        self.close()
        if here is None:
            self.build()
        self._opened = self._identity()
        self._connection = _open(self._path, self._folder.durable)
        if self._connection.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
            raise sqlite3.DatabaseError("the index is of another version")
        return self._connection

    def build(self, *, damaged: bool = False) -> None:
        """Make the file anew from the records and put it in place; ``damaged`` moves the present one away first."""
        seen = self._identity()
        with self._folder.exclusive("index.lock"):
            now = self._identity()
            if now is not None and (not damaged or now != seen):
                return  # somebody else was faster
            if now is not None:
                self._folder.quarantine(self._path)
            for suffix in ("-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{self._path}{suffix}")
            # Not under tmp/: closing any descriptor of a SQLite file drops the locks that SQLite holds on it.
            fresh = self._folder.root / "index.sqlite.new"
            for suffix in ("", "-wal", "-shm", "-journal"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{fresh}{suffix}")
            connection = sqlite3.connect(fresh, isolation_level=None)
            try:
                connection.executescript(f"PRAGMA journal_mode=WAL; PRAGMA user_version={_VERSION};{_SCHEMA}")
                connection.execute("BEGIN")
                for record, pinned in sorted(self._records(), key=lambda r: (r[0].created, r[0].cuts[-1].position)):
                    add_record(connection.cursor(), record, pinned=pinned)
                connection.execute("COMMIT")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            finally:
                connection.close()
            os.rename(fresh, self._path)
            self._folder.sync_folder(self._folder.root)

    def repair(self, work: Callable[[], Result]) -> Result:
        """Run ``work``; where the index turns out to be damaged, rebuild it and run ``work`` once more."""
        try:
            return work()
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise
        with self._lock:
            self.close()
            self.build(damaged=True)
        return work()

    def read(self, work: Callable[[sqlite3.Cursor], Result]) -> Result:
        """Run ``work`` on one snapshot; raises sqlite3.Error."""

        def once() -> Result:
            with self._lock, contextlib.closing(self._connect().cursor()) as cursor:
                cursor.execute("BEGIN")
                try:
                    return work(cursor)
                finally:
                    _rollback(cursor)

        return self.repair(once)

    def write(self, work: Callable[[sqlite3.Cursor], Result], *, durable: bool = True) -> Result:
        """Run ``work`` as one transaction, again if the file was replaced meanwhile; raises sqlite3.Error.

        Without ``durable`` a power loss may forget it (never tear it): counts of hits.
        """

        def once() -> Result:
            with self._lock:
                while True:
                    connection = self._connect()
                    if not durable:
                        connection.execute("PRAGMA synchronous=NORMAL")
                    cursor = connection.cursor()
                    try:
                        cursor.execute("BEGIN IMMEDIATE")
                        result = work(cursor)
                        cursor.execute("COMMIT")
                    except BaseException:
                        _rollback(cursor)
                        raise
                    finally:
                        cursor.close()
                        if not durable:
                            connection.execute(f"PRAGMA synchronous={'FULL' if self._folder.durable else 'NORMAL'}")
                    if self._identity() == self._opened:
                        return result

        return self.repair(once)


_open_indexes: WeakSet[Index] = WeakSet()
_held_for_fork: list[Index] = []


def _before_fork() -> None:
    # SQLite's own record of the locks that a process has would be wrong in the child: no connection crosses a fork.
    for opened in list(_open_indexes):
        opened._lock.acquire()
        opened.close()
        _held_for_fork.append(opened)


def _after_fork() -> None:
    while _held_for_fork:
        _held_for_fork.pop()._lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


def _open(path: Path, durable: bool) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
        connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
    except BaseException:
        connection.close()
        raise
    return connection


def _rollback(cursor: sqlite3.Cursor) -> None:
    if cursor.connection.in_transaction:
        with contextlib.suppress(sqlite3.Error):
            cursor.execute("ROLLBACK")


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return True  # the version, found by this module
    moved = code == sqlite3.SQLITE_READONLY_DBMOVED
    return moved or code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)


def index_error(error: sqlite3.Error) -> StoreError:
    """A failure of SQLite as a StoreError."""
    code = getattr(error, "sqlite_errorcode", 0) or 0
    names = {sqlite3.SQLITE_FULL: "disk-full", sqlite3.SQLITE_READONLY: "read-only", sqlite3.SQLITE_BUSY: "busy"}
    return StoreError(names.get(code & 0xFF, "index-failed"), f"the store's index: {error}", field="index.sqlite")


def next_tick(cursor: sqlite3.Cursor) -> int:
    """The store's own clock, one step on: what was used last, whatever the wall clock does."""
    tick: int = cursor.execute("UPDATE clock SET tick = tick + 1 RETURNING tick").fetchone()[0]
    return tick


def _numbers(values: Sequence[int]) -> bytes:
    return array("i", values).tobytes()


def from_numbers(blob: bytes) -> tuple[int, ...]:
    return tuple(array("i", blob))


def add_record(cursor: sqlite3.Cursor, record: Record, *, pinned: bool) -> int:
    """Add a pack's rows, or those of them that are missing; its number. What it replaces is retired."""
    found = cursor.execute("SELECT number FROM packs WHERE id = ?", (record.pack_id,)).fetchone()
    if found is None:
        parent = record.parent
        cursor.execute(
            "INSERT INTO packs (id, bytes, tail_bytes, position, created, used, pinned, signed, numerics,"
            " parent_state, parent_position, continues, kept, content) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
            (
                record.pack_id,
                record.file_bytes,
                record.tail_bytes,
                record.cuts[-1].position,
                record.created,
                next_tick(cursor),
                pinned,
                record.signed,
                record.numerics,
                parent.state_id if parent is not None else None,
                parent.position if parent is not None else None,
                record.continues,
                _numbers(record.kept),
                _numbers(record.content),
            ),
        )
        found = (cursor.lastrowid,)
    number: int = found[0]
    cursor.executemany(
        "INSERT OR IGNORE INTO cuts VALUES (?,?,?,?)",
        [(number, cut.position, cut.state_id, cut.logits) for cut in record.cuts],
    )
    cursor.executemany(
        "INSERT OR IGNORE INTO nodes VALUES (?,?,?,?,?,?)",
        [(row.node, row.tail, row.key, number, row.position, row.flags) for row in record.nodes],
    )
    cursor.executemany("UPDATE packs SET retired = 1 WHERE id = ?", [(old,) for old in record.replaces])
    return number


def forget(cursor: sqlite3.Cursor, number: int) -> None:
    """Remove a pack's rows."""
    for table, column in (("nodes", "pack"), ("cuts", "pack"), ("packs", "number")):
        cursor.execute(f"DELETE FROM {table} WHERE {column} = ?", (number,))


def used_bytes(cursor: sqlite3.Cursor) -> tuple[int, int]:
    """Bytes of all packs, and bytes reserved by puts under way."""
    packs = cursor.execute("SELECT COALESCE(SUM(bytes), 0) FROM packs").fetchone()[0]
    return packs, cursor.execute("SELECT COALESCE(SUM(bytes), 0) FROM reservations").fetchone()[0]


def deepest_known(cursor: sqlite3.Cursor, nodes: Sequence[bytes]) -> int:
    """How many of ``nodes`` any pack passes, from the first on: a node is known only where those before it are."""
    known, unknown = 0, len(nodes) + 1
    while unknown - known > 1:
        middle = (known + unknown) // 2
        row = cursor.execute("SELECT 1 FROM nodes WHERE node = ? LIMIT 1", (nodes[middle - 1],)).fetchone()
        known, unknown = (middle, unknown) if row is not None else (known, middle)
    return known


def answering(cursor: sqlite3.Cursor, nodes: Sequence[bytes]) -> list[int]:
    """Which of ``nodes`` (at most some thousands) have packs that restore at them or behind them, the last first."""
    values = ",".join(f"({at},?)" for at in range(len(nodes)))
    rows = cursor.execute(
        f"WITH want(at, node) AS (VALUES {values}) SELECT at FROM want"
        " WHERE EXISTS (SELECT 1 FROM nodes WHERE nodes.node = want.node AND tail >= 0) ORDER BY at DESC",
        nodes,
    )
    return [at for (at,) in rows]


def tails(cursor: sqlite3.Cursor, node: bytes, most: int) -> list[int]:
    """The different tails under a node, 1 to ``most``, the longest first; one seek each, however many packs have it."""
    rows = cursor.execute(
        "WITH RECURSIVE t(tail) AS (SELECT MAX(tail) FROM nodes WHERE node = ?1 AND tail BETWEEN 1 AND ?2 UNION ALL"
        " SELECT (SELECT MAX(tail) FROM nodes WHERE node = ?1 AND tail BETWEEN 1 AND t.tail - 1) FROM t"
        " WHERE t.tail IS NOT NULL) SELECT tail FROM t WHERE tail IS NOT NULL",
        (node, most),
    )
    return [tail for (tail,) in rows]


def candidates(
    cursor: sqlite3.Cursor, node: bytes, tail: int, key: bytes | None, needed: int, limit: int
) -> list[Candidate]:
    """Packs under (node, tail, key), the newest first, whose flags include ``needed``; any key for None."""
    by_key = "" if key is None else "AND n.key = ? "
    rows = cursor.execute(
        "SELECT p.number, p.id, n.position, n.flags, p.numerics, p.content FROM nodes n JOIN packs p"
        f" ON p.number = n.pack WHERE n.node = ? AND n.tail = ? {by_key}AND n.flags & ? = ? AND p.retired = 0"
        " ORDER BY n.key DESC, n.pack DESC LIMIT ?",
        (node, tail, *(() if key is None else (key,)), needed, needed, limit),
    )
    return [Candidate(n, i, at, flags, num, from_numbers(content)) for n, i, at, flags, num, content in rows]


def chain_of(cursor: sqlite3.Cursor, pack_id: bytes, most: int) -> list[tuple[int, bytes, int]]:
    """A pack and its parents, newest first, as (number, id, bytes); ends early where a parent is missing.

    A parent is whichever pack has the cut that a delta names: a flattened one before a retired one.
    """
    row = cursor.execute("SELECT number, id, bytes, parent_state FROM packs WHERE id = ?", (pack_id,)).fetchone()
    found: list[tuple[int, bytes, int]] = []
    while row is not None and len(found) <= most:
        found.append(row[:3])
        if row[3] is None:
            break
        row = cursor.execute(
            "SELECT p.number, p.id, p.bytes, p.parent_state FROM cuts c JOIN packs p ON p.number = c.pack"
            " WHERE c.state_id = ? AND p.number != ? ORDER BY p.retired, p.parent_state IS NOT NULL, p.number DESC"
            " LIMIT 1",
            (row[3], row[0]),
        ).fetchone()
    return found


def cut_behind(cursor: sqlite3.Cursor, pack_id: bytes, position: int) -> int | None:
    """The first cut of a pack at or behind ``position``."""
    row = cursor.execute(
        "SELECT MIN(c.position) FROM cuts c JOIN packs p ON p.number = c.pack WHERE p.id = ? AND c.position >= ?",
        (pack_id, position),
    ).fetchone()
    return row[0] if row is not None else None


def entries(cursor: sqlite3.Cursor, pack_id: bytes | None = None, *, new: bool = False) -> Iterator[Entry]:
    """One entry, or all, the most recently used first."""
    where, values = ("", ()) if pack_id is None else ("WHERE id = ?", (pack_id,))
    rows = cursor.execute(
        "SELECT number, id, bytes, position, created, used, hits, pinned, retired, continues, kept FROM packs"
        f" {where} ORDER BY used DESC",
        values,
    ).fetchall()
    for number, identifier, size, position, created, used, hits, pinned, retired, continues, kept in rows:
        cuts = cursor.execute(
            "SELECT position, state_id, logits FROM cuts WHERE pack = ? ORDER BY position", (number,)
        ).fetchall()
        chain = chain_of(cursor, identifier, 64)
        yield Entry(
            pack_id=identifier,
            stored_bytes=size,
            position=position,
            cuts=tuple(EntryCut(at, state, bool(logits)) for at, state, logits in cuts),
            created=created,
            used=used,
            hits=hits,
            pinned=bool(pinned),
            retired=bool(retired),
            parent=chain[1][1] if len(chain) > 1 else None,
            continues=continues,
            chain=len(chain),
            kept=from_numbers(kept),
            new=new,
        )


def has_rows(cursor: sqlite3.Cursor, record: Record) -> bool:
    """Whether the index has all rows of a pack."""
    row = cursor.execute(
        "SELECT (SELECT COUNT(*) FROM cuts WHERE pack = number), (SELECT COUNT(*) FROM nodes WHERE pack = number)"
        " FROM packs WHERE id = ?",
        (record.pack_id,),
    ).fetchone()
    return row is not None and tuple(row) == (len(record.cuts), len(record.nodes))
