"""Collection and check of a local store: what may go, what is damaged, what the index forgot."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvpack.errors import KvpackError, StoreError
from kvpack.store import lineage, rows
from kvpack.store.deltas import flatten_chain
from kvpack.store.objects import RECORD, ObjectFolder
from kvpack.store.opening import BrokenPackError, require_sound
from kvpack.store.protocol import FsckReport, GcReport, Stats
from kvpack.store.record import Record
from kvpack.store.space import Removal, drop_dead_reservations, evict

if TYPE_CHECKING:
    from kvpack.store.local import LocalStore

__all__ = ["check", "collect", "flatten_wasteful", "named_packs", "statistics"]

_log = logging.getLogger("kvpack.store")
_NAME: Final = re.compile(r"([0-9a-f]{64})(\.record|\.pin)?")
_WASTE: Final = 10
"""A conversation is flattened where over a tenth of what is worth keeping would be tails that nobody keeps."""


def named_packs(folder: ObjectFolder, suffix: str | None = RECORD) -> Iterator[bytes]:
    """Pack ids that have a file with this ending (None: the object itself)."""
    for _, entries in folder.shelves():
        for entry in entries:
            found = _NAME.fullmatch(entry.name)
            if found is not None and found[2] == suffix:
                yield bytes.fromhex(found[1])


def statistics(store: LocalStore) -> Stats:
    """See :meth:`kvpack.store.protocol.Store.stats`."""

    def work(cursor: sqlite3.Cursor) -> tuple[int, ...]:
        packs: tuple[int, ...] = cursor.execute(
            "SELECT COUNT(*), COALESCE(SUM(bytes), 0), COALESCE(SUM(pinned), 0),"
            " COALESCE(SUM(bytes * pinned), 0), COALESCE(SUM(retired), 0), COALESCE(SUM(hits), 0) FROM packs"
        ).fetchone()
        cuts: int = cursor.execute("SELECT COUNT(*) FROM cuts").fetchone()[0]
        return (*packs, cuts, rows.used_bytes(cursor)[1])

    packs, stored, pinned, pinned_bytes, retired, hits, cuts, reserved = store.index.read(work)
    return Stats(
        packs=packs,
        cuts=cuts,
        stored_bytes=stored,
        pinned=pinned,
        pinned_bytes=pinned_bytes,
        retired=retired,
        reserved=reserved,
        hits=hits,
        quota=store.quota,
        quarantined=len(os.listdir(store.folder.root / "quarantine")),
    )


def collect(store: LocalStore, quota: int | None) -> GcReport:
    """See :meth:`kvpack.store.protocol.Store.gc`."""
    with store.folder.exclusive("gc.lock"):
        leftovers = _sweep(store)
        flattened = flatten_wasteful(store)
        with Removal(store.folder) as removal:
            removed = store.index.write(lambda cursor: _make_room(store, cursor, removal, quota))
            removal.finish(removed)
        return GcReport(
            removed=tuple(removed),
            freed_bytes=sum(removed.values()),
            stored_bytes=store.index.read(rows.used_bytes)[0],
            leased=tuple(sorted(removal.leased)),
            flattened=flattened,
            leftovers=tuple(leftovers),
        )


def _make_room(store: LocalStore, cursor: sqlite3.Cursor, removal: Removal, quota: int | None) -> dict[bytes, int]:
    drop_dead_reservations(cursor, store.folder)
    removed = evict(cursor, removal, store.clock(), room=None, retired_only=True)
    packs, reserved = rows.used_bytes(cursor)
    if quota is not None and packs + reserved > quota:
        removed |= evict(cursor, removal, store.clock(), room=packs + reserved - quota)
    return removed


def _sweep(store: LocalStore) -> list[str]:
    """Files that no living writer, no record and no row names; packs that have a record come back into the index."""
    folder = store.folder
    gone: list[str] = []

    def remove(path: Path, _: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
            gone.append(str(path.relative_to(folder.root)))

    folder.dead_temporaries(remove)
    objects, records = set(named_packs(folder, None)), set(named_packs(folder))
    indexed = store.index.read(lambda cursor: {name for (name,) in cursor.execute("SELECT id FROM packs")})
    for pack_id in sorted((objects ^ records) - indexed):
        path = folder.path(pack_id, "" if pack_id in objects else RECORD)
        descriptor = folder.claim(path)
        if descriptor is None:
            continue
        try:
            # Looked at again under the lock: the other half may have come meanwhile.
            if folder.size(pack_id) is None or not folder.path(pack_id, RECORD).exists():
                remove(path, descriptor)
        finally:
            os.close(descriptor)
    _adopt(store, objects & records)
    _forget_missing(store)
    return gone


def _adopt(store: LocalStore, packs: set[bytes]) -> list[bytes]:
    """Give packs their rows back from their records: those that the index lost, and those that never got any."""
    adopted: list[bytes] = []
    for pack_id in sorted(packs):
        with contextlib.suppress(OSError, StoreError):
            lease = store.folder.lease(pack_id)  # not while it is being written or removed
            try:
                record = store.record(pack_id)
                if record.file_bytes == os.fstat(lease).st_size and _add_missing(store, record):
                    adopted.append(pack_id)
            finally:
                os.close(lease)
    return adopted


def _add_missing(store: LocalStore, record: Record) -> bool:
    if store.index.read(lambda cursor: rows.has_rows(cursor, record)):
        return False
    pinned = store.folder.pinned(record.pack_id)
    store.index.write(lambda cursor: rows.add_record(cursor, record, pinned=pinned))
    return True


def _forget_missing(store: LocalStore) -> list[bytes]:
    """Remove rows whose object is not there."""

    def work(cursor: sqlite3.Cursor) -> list[bytes]:
        held = cursor.execute("SELECT number, id FROM packs").fetchall()
        missing = [(number, name) for number, name in held if store.folder.size(name) is None]
        for number, _ in missing:
            rows.forget(cursor, number)
        return [name for _, name in missing]

    return store.index.write(work)


def flatten_wasteful(store: LocalStore) -> tuple[bytes, ...]:
    """Flatten conversations whose old tails outweigh the cost; what cannot be flattened stays as it is."""
    made: list[bytes] = []
    for found in store.index.read(lineage.conversations):
        if found.waste_bytes * _WASTE <= found.stored_bytes - found.waste_bytes:
            continue
        try:
            with store.open_pack(found.pack_id) as stored:
                made.append(flatten_chain(store, stored, found.count, sign=store.sign).pack_id)
        except (BrokenPackError, KvpackError) as error:
            _log.warning("pack %s is not flattened: %s", found.pack_id.hex()[:16], error)
    return tuple(made)


def check(store: LocalStore) -> FsckReport:
    """See :meth:`kvpack.store.protocol.Store.fsck`."""
    folder = store.folder
    bad: list[tuple[str, str]] = []
    sound: set[bytes] = set()
    stored_bytes = 0

    def put_aside(path: Path, why: str) -> None:
        folder.quarantine(path)
        bad.append((f"objects/{path.parent.name}/{path.name}", why))

    with folder.exclusive("gc.lock"):
        for pack_id in list(named_packs(folder, None)):
            why = _fault(store, pack_id)
            if why is None:
                sound.add(pack_id)
                stored_bytes += folder.size(pack_id) or 0
            elif why:
                put_aside(folder.path(pack_id), why)
                folder.quarantine(folder.path(pack_id, RECORD))
        for pack_id in list(named_packs(folder)):
            path = folder.path(pack_id, RECORD)
            descriptor = folder.claim(path)
            if descriptor is not None:
                if folder.size(pack_id) is None and path.exists():
                    put_aside(path, "its pack is not there")
                os.close(descriptor)
        forgotten = _forget_missing(store)
        adopted = _adopt(store, sound)
    return FsckReport(
        packs=len(sound),
        stored_bytes=stored_bytes,
        quarantined=tuple(bad),
        adopted=tuple(adopted),
        forgotten=tuple(forgotten),
        foreign=tuple(folder.foreign()),
    )


def _fault(store: LocalStore, pack_id: bytes) -> str | None:
    """Why a pack is to be quarantined; None if it is sound, empty if it is being written or removed right now."""
    folder = store.folder
    try:
        require_sound(folder, pack_id).close()
    except FileNotFoundError:
        return ""
    except (OSError, KvpackError) as error:
        return str(error) if os.path.lexists(folder.path(pack_id)) else ""
    try:
        return None if store.record(pack_id).pack_id == pack_id else "its record is of another pack"
    except FileNotFoundError:
        return "it has no record" if os.path.lexists(folder.path(pack_id)) else ""
    except (OSError, KvpackError) as error:
        return str(error)
