"""The index of a local store: SQLite in WAL mode, rebuilt from the records beside the objects whenever it must be.

Nothing is kept here alone that a store could not lose: hit counts and the order of use are all. A process notices that
another one has replaced the file, and repeats what it wrote to the old one.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypeVar
from weakref import WeakSet

from kvpack.errors import StoreError
from kvpack.store.objects import ObjectFolder
from kvpack.store.record import Record
from kvpack.store.rows import add_record

__all__ = ["Index", "index_error"]

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
