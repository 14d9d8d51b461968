"""Collection and check of a remote store: what may go, what is damaged, what the log forgot."""

from __future__ import annotations

import re
import secrets
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvpack.errors import KvpackError, StoreError
from kvpack.store import rows, upkeep
from kvpack.store.bucket import Found
from kvpack.store.objects import RECORD, pack_name
from kvpack.store.protocol import FsckReport, GcReport, Stats
from kvpack.store.record import Record
from kvpack.store.remote_log import Event
from kvpack.store.remote_source import object_name, open_remote
from kvpack.store.space import Removal, evict
from kvpack.store.upload import abort_uploads

if TYPE_CHECKING:
    from kvpack.store.remote import RemoteStore

__all__ = ["check", "collect", "put_aside", "quarantine", "remove_dropped", "statistics", "victims"]

LEASE_SECONDS: Final = 3600
_UPLOAD_SECONDS: Final = 24 * 3600
_CHECKPOINT_EVENTS: Final = 256
_NAME: Final = re.compile(r"objects/([0-9a-f]{2})/(\1[0-9a-f]{62})(\.record)?")
_OWN: Final = re.compile(
    r"version|key|head|probe/[0-9a-f]{32}|log/[0-9]{16}|checkpoint/[0-9a-f-]+|leases/[0-9a-f]{64}\.[0-9a-f]{16}"
    r"|quarantine/.+"
)


class _RemoteRemoval(Removal):
    """What may go: everything that nobody leases."""

    def __init__(self, store: RemoteStore, held: set[bytes]) -> None:
        super().__init__(store.folder)
        self._leases = held

    def claim(self, pack_id: bytes) -> bool:
        """Whether nobody reads the pack."""
        if pack_id in self._leases:
            self.leased.add(pack_id)
            return False
        return True


def leased(store: RemoteStore) -> set[bytes]:
    """The packs that somebody reads; leases of readers that are long dead are removed."""
    held: set[bytes] = set()
    expired: list[str] = []
    for entry in store.bucket.list("leases"):
        name = entry.name.removeprefix("leases/").partition(".")[0]
        if entry.modified < time.time() - LEASE_SECONDS:
            expired.append(entry.name)
        elif re.fullmatch("[0-9a-f]{64}", name):
            held.add(bytes.fromhex(name))
    store.bucket.delete(expired)
    return held


def victims(
    store: RemoteStore, *, room: int, retired: bool = False, keep: frozenset[bytes] = frozenset()
) -> tuple[dict[bytes, int], set[bytes]]:
    """What goes so that ``room`` bytes are free (and all retired packs), with their sizes; and what is leased.

    ``keep`` counts as leased.
    """
    removal = _RemoteRemoval(store, leased(store) | keep)

    def work(cursor: sqlite3.Cursor) -> dict[bytes, int]:
        # A reading transaction is rolled back: the rows go when the event is applied.
        found = evict(cursor, removal, store.clock(), room=None, retired_only=True) if retired else {}
        left = room - sum(found.values())
        return found | (evict(cursor, removal, store.clock(), room=left) if left > 0 else {})

    return store.index.read(work), removal.leased


def remove_dropped(store: RemoteStore, dropped: Mapping[bytes, bytes | None]) -> set[bytes]:
    """Delete packs that an event dropped, except those that a reader leased meanwhile: they come back."""
    back = leased(store) & set(dropped)
    for pack_id in sorted(back):
        record = dropped[pack_id]
        if record is not None:
            store.log.append(Event(add=(record,)))
    gone = [pack_id for pack_id in dropped if pack_id not in back]
    store.bucket.delete([object_name(pack_id, RECORD) for pack_id in gone])
    store.bucket.delete([object_name(pack_id) for pack_id in gone])
    return back


def quarantine(store: RemoteStore, pack_id: bytes, suffix: str = "") -> bool:
    """Move an object out of the way; False if it is not there."""
    target = f"quarantine/{pack_name(pack_id)}{suffix}.{secrets.token_hex(4)}"
    return store.bucket.move(object_name(pack_id, suffix), target)


def put_aside(store: RemoteStore, pack_id: bytes) -> None:
    """Quarantine a pack and its record, and drop it for everybody."""
    if quarantine(store, pack_id):
        quarantine(store, pack_id, RECORD)
    if store.log.record(pack_id) is not None:
        store.log.append(Event(drop=(pack_id,)))


def statistics(store: RemoteStore, counted: Stats) -> Stats:
    """The numbers of the index, with what only the bucket knows."""
    return replace(counted, quota=store.room, quarantined=len(store.bucket.list("quarantine")))


def _named(store: RemoteStore) -> tuple[dict[bytes, Found], dict[bytes, Found]]:
    """The objects and the records in the bucket."""
    objects: dict[bytes, Found] = {}
    records: dict[bytes, Found] = {}
    for entry in store.bucket.list("objects"):
        found = _NAME.fullmatch(entry.name)
        if found is not None:
            (records if found[3] else objects)[bytes.fromhex(found[2])] = entry
    return objects, records


def collect(store: RemoteStore, quota: int | None, *, keep: frozenset[bytes] = frozenset()) -> GcReport:
    """See :meth:`kvpack.store.protocol.Store.gc`; ``keep`` are packs that somebody reads from a copy."""
    leftovers = _sweep(store)
    flattened = upkeep.flatten_wasteful(store)
    sizes: dict[bytes, int] = {}
    held: set[bytes] = set()
    bodies: dict[bytes, bytes | None] = {}

    def make() -> Event | None:
        used = store.index.read(rows.used_bytes)[0]
        found, busy = victims(store, room=0 if quota is None else used - quota, retired=True, keep=keep)
        for known, new in ((sizes, found), (bodies, {name: store.log.record(name) for name in found})):
            known.clear()
            known.update(new)  # type: ignore[arg-type]
        held.clear()
        held.update(busy)
        return Event(drop=tuple(found)) if found else None

    if store.decide(make) is not None:
        back = remove_dropped(store, bodies)
        held |= back
        for name in back:
            del sizes[name]
    if store.log.applied() >= _CHECKPOINT_EVENTS and len(store.bucket.list("log")) >= _CHECKPOINT_EVENTS:
        store.log.checkpoint()
    return GcReport(
        removed=tuple(sizes),
        freed_bytes=sum(sizes.values()),
        stored_bytes=store.index.read(rows.used_bytes)[0],
        leased=tuple(sorted(held)),
        flattened=flattened,
        leftovers=tuple(leftovers),
    )


def _sweep(store: RemoteStore) -> list[str]:
    """What dead writers left: unfinished uploads, objects without a record, packs without an event."""
    clock = store.clock()
    old = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(clock.now - _UPLOAD_SECONDS))
    gone = abort_uploads(store.bucket, before=old)
    objects, records = _named(store)
    indexed = store.index.read(_ids)
    # The clock of the server, which tells in whole seconds, is not that of this machine.
    settled = clock.now - clock.grace - 1 if clock.grace else float("inf")
    alone = [
        entry.name
        for one, other in ((objects, records), (records, objects))
        for pack_id, entry in one.items()
        if pack_id not in other and pack_id not in indexed and entry.modified <= settled
    ]
    store.bucket.delete(alone)
    _adopt(store, {name: objects[name] for name in objects.keys() & records.keys()})
    _drop_missing(store, set(objects))
    return sorted([*gone, *alone])


def _ids(cursor: sqlite3.Cursor) -> set[bytes]:
    return {name for (name,) in cursor.execute("SELECT id FROM packs")}


def _adopt(store: RemoteStore, whole: Mapping[bytes, Found]) -> list[bytes]:
    """Announce packs that have a record and no event: their writer died in between."""
    adopted: list[bytes] = []
    for pack_id in sorted(whole.keys() - store.index.read(_ids)):
        found = store.bucket.get(object_name(pack_id, RECORD))
        try:
            record = Record.parse(found[0]) if found is not None else None
        except StoreError:
            continue
        if found is None or record is None or record.pack_id != pack_id or record.file_bytes != whole[pack_id].size:
            continue
        body = found[0]

        def make(pack_id: bytes = pack_id, body: bytes = body) -> Event | None:
            return None if store.log.record(pack_id) is not None else Event(add=(body,))

        if store.decide(make) is not None:
            adopted.append(pack_id)
    return adopted


def _drop_missing(store: RemoteStore, objects: set[bytes]) -> list[bytes]:
    """Drop packs whose object is not there."""
    candidates = sorted(store.index.read(_ids) - objects)
    heads = store.bucket.many(lambda name: store.bucket.head(object_name(name)), candidates)
    missing = [name for name, found in zip(candidates, heads, strict=True) if found is None]
    if missing:
        store.log.append(Event(drop=tuple(missing)))
    return missing


def check(store: RemoteStore) -> FsckReport:
    """See :meth:`kvpack.store.protocol.Store.fsck`."""
    objects, records = _named(store)
    bad: list[tuple[str, str]] = []
    sound: dict[bytes, Found] = {}
    for pack_id, entry in objects.items():
        why = _fault(store, pack_id, pack_id in records)
        if why is None:
            sound[pack_id] = entry
        elif why:
            put_aside(store, pack_id)
            bad.append((entry.name, why))
    for pack_id, entry in records.items():
        if pack_id not in objects and store.bucket.head(object_name(pack_id)) is None:
            quarantine(store, pack_id, RECORD)
            bad.append((entry.name, "its pack is not there"))
    forgotten = _drop_missing(store, set(sound))
    adopted = _adopt(store, sound)
    names = [entry.name for entry in store.bucket.list("")]
    return FsckReport(
        packs=len(sound),
        stored_bytes=sum(entry.size for entry in sound.values()),
        quarantined=tuple(bad),
        adopted=tuple(adopted),
        forgotten=tuple(forgotten),
        foreign=tuple(name for name in names if not _NAME.fullmatch(name) and not _OWN.fullmatch(name)),
    )


def _fault(store: RemoteStore, pack_id: bytes, has_record: bool) -> str | None:
    """Why a pack is to be quarantined; None if it is sound, empty if it is being removed right now."""
    try:
        with open_remote(store.bucket, pack_id) as reader:
            reader.for_stored(reader.records)
    except FileNotFoundError:
        return ""
    except StoreError:
        raise
    except KvpackError as error:
        return str(error)
    if not has_record:
        return "it has no record"
    found = store.bucket.get(object_name(pack_id, RECORD))
    if found is None:
        return ""
    try:
        return None if Record.parse(found[0]).pack_id == pack_id else "its record is of another pack"
    except StoreError as error:
        return str(error)
