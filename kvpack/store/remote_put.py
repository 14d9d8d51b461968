"""Writing into a remote store, in this order: the object, its record, its event; nothing else makes it visible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from kvpack.errors import FormatError, IntegrityError, StoreError
from kvpack.pack.reader import PackReader
from kvpack.pack.view import PackCut
from kvpack.store import lineage, rows
from kvpack.store.objects import RECORD
from kvpack.store.prefix import ContentField, Tokens
from kvpack.store.protocol import Entry
from kvpack.store.putting import predecessor, record_of, tokens_of
from kvpack.store.record import Record
from kvpack.store.remote_log import Event
from kvpack.store.remote_source import object_name, open_remote
from kvpack.store.remote_upkeep import quarantine, remove_dropped, victims
from kvpack.store.upload import upload

if TYPE_CHECKING:
    from kvpack.store.remote import RemoteStore

__all__ = ["put_remote_file", "take"]


def take(
    store: RemoteStore,
    path: Path,
    pack_id: bytes,
    record: bytes,
    *,
    before_complete: Callable[[], None] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Take the pack file ``path`` and its record into the store; where it has the pack already, hold it to its hashes.

    Raises StoreError; what was not acknowledged is removed by the next collection.
    """
    bucket, name = store.bucket, object_name(pack_id)
    store.require_writable()
    while not upload(bucket, name, path, before_complete=before_complete, on_bytes=on_bytes):
        if _is_sound(store, pack_id):
            break
        quarantine(store, pack_id)
    beside = object_name(pack_id, RECORD)
    if not bucket.create(beside, record):
        found = bucket.get(beside)
        if found is not None and found[0] != record and store.log.record(pack_id) is None:
            bucket.replace(beside, record, found[1])
    store.objects.sizes.pop(pack_id, None)
    _announce(store, pack_id, record)


def _is_sound(store: RemoteStore, pack_id: bytes) -> bool:
    try:
        with open_remote(store.bucket, pack_id) as reader:
            reader.for_stored(reader.records)
    except FileNotFoundError:
        return False
    except (FormatError, IntegrityError):
        return False
    return True


def _announce(store: RemoteStore, pack_id: bytes, record: bytes) -> None:
    size = Record.parse(record).file_bytes

    def make() -> Event | None:
        if store.log.record(pack_id) is not None:
            return None
        if store.room is None:
            return Event(add=(record,))
        missing = store.index.read(rows.used_bytes)[0] + size - store.room
        dropped, _ = victims(store, room=missing) if missing > 0 else ({}, set())
        if missing > sum(dropped.values()):
            raise StoreError(
                "quota-exceeded",
                f"{size} bytes do not fit into the store's quota of {store.room}: the rest is pinned, in use, young or"
                " needed",
                field="quota",
                expected=store.room,
                found=missing + store.room,
            )
        return Event(drop=tuple(dropped), add=(record,))

    before = {pack: store.log.record(pack) for pack in store.index.read(_packs)} if store.room is not None else {}
    try:
        event = store.decide(make)
    except StoreError as error:
        if error.code == "quota-exceeded":
            store.bucket.delete([object_name(pack_id, RECORD), object_name(pack_id)])
        raise
    if event is not None and event.drop:
        remove_dropped(store, {pack: before.get(pack) for pack in event.drop})


def _packs(cursor: object) -> list[bytes]:
    return [row[0] for row in cursor.execute("SELECT id FROM packs")]  # type: ignore[attr-defined]


def put_remote_file(
    store: RemoteStore,
    path: Path,
    tokens: Tokens | None,
    content: Sequence[ContentField],
    on_bytes: Callable[[int], None] | None,
) -> Entry:
    """See :meth:`kvpack.store.remote.RemoteStore.put_file`. The file is hashed while it is sent, and appears after."""
    with PackReader(path, check=store.check() if store.check is not None else None) as reader:
        manifest, named = reader.manifest, reader.manifest.parent
        held = None if named is None else store.index.read(lambda c: lineage.pack_with_state(c, named.state_id))
        if named is not None and held is None:
            raise StoreError("parent-missing", "the store lacks the pack that this one continues", field="parent")
        parent = store.open_pack(held) if held is not None else None
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="kvpack-push") as pool:
                verified = pool.submit(reader.for_stored, reader.records)
                base = parent.cut(named.position) if parent is not None and named is not None else None
                whole = PackCut([reader, *(parent.chain.readers if parent is not None else ())], manifest.cuts[-1])
                chain = store.chain(tokens_of(whole, tokens), manifest.identity, manifest.geometry, content)
                record = record_of(
                    path,
                    reader.pack_id,
                    chain,
                    created=int(store.clock().now),
                    base=base,
                    continues=held if held is not None else predecessor(store, chain, manifest.cuts[0].position),
                    signed=any(reader.signature_region),
                )
                new = store.log.record(reader.pack_id) is None
                take(
                    store,
                    path,
                    reader.pack_id,
                    record.to_bytes(),
                    before_complete=verified.result,
                    on_bytes=on_bytes,
                )
                verified.result()
            return _entry(store, reader, record, new)
        finally:
            if parent is not None:
                parent.close()


def _entry(store: RemoteStore, reader: PackReader, record: Record, new: bool) -> Entry:
    """The entry of a pack that was just put; from its own record where another machine has dropped it since."""
    try:
        return store.entry(reader.pack_id, new=new)
    except StoreError as error:
        if error.code != "no-such-pack":
            raise
    position = reader.manifest.position
    return Entry(reader.pack_id, record.file_bytes, position, record.cuts, float(record.created), used=0, new=new)
