"""The rows of a local store's index: written from records, read in seeks whose number does not grow with the store."""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvpack.store.protocol import Entry, EntryCut
from kvpack.store.record import Record

__all__ = [
    "Candidate",
    "add_record",
    "answering",
    "candidates",
    "chain_of",
    "cut_behind",
    "deepest_known",
    "entries",
    "forget",
    "from_numbers",
    "has_rows",
    "next_tick",
    "tails",
    "used_bytes",
]


@dataclass(frozen=True)
class Candidate:
    """A pack under a node: its number in the index, its id, the position of the node and the flags there."""

    number: int
    pack_id: bytes
    position: int
    flags: int
    numerics: bytes
    content: tuple[int, ...]


def next_tick(cursor: sqlite3.Cursor) -> int:
    """The store's own clock, one step on: what was used last, whatever the wall clock does."""
    tick: int = cursor.execute("UPDATE clock SET tick = tick + 1 RETURNING tick").fetchone()[0]
    return tick


def _numbers(values: Sequence[int]) -> bytes:
    return array("i", values).tobytes()


def from_numbers(blob: bytes) -> tuple[int, ...]:
    """Positions as the index holds them."""
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
