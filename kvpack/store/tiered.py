"""A folder of this machine in front of a bucket: what is found there is brought here, what is written here goes there.

Both tiers name prefixes with the same key, so that a pack's record is the same in both. ``through`` acknowledges a put
once both have it; ``back`` once the folder has it, and a thread sends it on: whatever a process left unsent, the next
one that opens the tiers for writing back sends.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Final

from kvpack.errors import KvpackError, StoreError, UsageError
from kvpack.model.geometry import Geometry
from kvpack.model.identity import Identity
from kvpack.model.snapshot import CutView
from kvpack.pack.view import MAX_CHAIN
from kvpack.pack.writer import Signer
from kvpack.store import remote_upkeep, rows
from kvpack.store.local import DEFAULT_GRACE, LocalStore
from kvpack.store.objects import Temporary, pack_name
from kvpack.store.opening import BrokenPackError
from kvpack.store.prefix import ContentField, Tokens
from kvpack.store.protocol import CheckFactory, Entry, FsckReport, GcReport, Hit, Stats, StoredPack
from kvpack.store.putting import store_pack
from kvpack.store.record import Record
from kvpack.store.remote import RemoteStore
from kvpack.store.remote_put import take
from kvpack.store.remote_transfer import fetch_into

__all__ = ["TieredStore", "open_tiered"]

_log = logging.getLogger("kvpack.store")
_WRITES: Final = ("through", "back")


def open_tiered(
    url: str,
    *,
    write: str = "through",
    key: bytes | None = None,
    tenant: str | None = None,
    check: CheckFactory | None = None,
    sign: Signer | None = None,
    quota: int | None = None,
    durability: str = "full",
    grace: float = DEFAULT_GRACE,
    allow_network: bool = False,
    create: bool = True,
    mirror: str | os.PathLike[str] | None = None,
    config: dict[str, str] | None = None,
    now: Callable[[], float] = time.time,
) -> TieredStore:
    """Open ``tiered:FOLDER,URL``: the store in a folder, in front of the one under a bucket's URL.

    ``write`` is ``through`` or ``back``; ``quota`` is the folder's. The other options are those of the two stores. In
    front of a store that is open to read only nothing is sent on. Raises StoreError ``bad-url`` and what opening
    either raises.
    """
    folder, comma, behind = url.removeprefix("tiered:").partition(",")
    if not comma or not folder or not behind:
        raise StoreError(
            "bad-url", "two tiers are written tiered:FOLDER,URL", found=url, hint="tiered:/tmp/kv,s3://bucket/kv"
        )
    if write not in _WRITES:
        raise UsageError("bad-write", "write is through or back", field="write", expected=_WRITES, found=write)
    remote = RemoteStore.open_url(
        behind,
        key=key,
        tenant=tenant,
        check=check,
        sign=sign,
        grace=grace,
        create=create,
        mirror=mirror,
        config=config,
        now=now,
    )
    local = LocalStore.open(
        folder,
        key=remote.keys.key,
        check=check,
        sign=sign,
        quota=quota,
        durability=durability,
        grace=grace,
        allow_network=allow_network,
        create=create,
        now=now,
    )
    return TieredStore(local, remote, write_back=write == "back")


class TieredStore:
    """Two stores as one; see :class:`~kvpack.store.protocol.Store` for the verbs."""

    def __init__(self, local: LocalStore, remote: RemoteStore, *, write_back: bool) -> None:
        """Made by :func:`open_tiered`."""
        self.local = local
        self.remote = remote
        self._write_back = write_back
        self._sending = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvpack-write-back") if write_back else None
        self._sent: Future[None] | None = None
        self._late_hits: list[bytes] = []

    def __enter__(self) -> TieredStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Send what is not sent yet, and close both."""
        if self._pool is not None:
            self._pool.submit(self._send_quietly).result()
            self._pool.shutdown()
        self.local.close()
        self.remote.close()

    def flush(self) -> None:
        """Send every pack of the folder that the bucket lacks; raises StoreError."""
        self.remote.asking(self._send)

    def _send(self) -> None:
        if self.remote.bucket.read_only:
            return
        with self._sending:
            self.remote.log.sync()
            entries = self.local.ls()
            # A parent is older than what continues it.
            for entry in sorted(entries, key=lambda e: (e.chain, e.used)):
                if not entry.retired and self.remote.log.record(entry.pack_id) is None:
                    self._send_one(entry)
            late, self._late_hits = self._late_hits, []
            for pack_id in late:
                self.remote.count_hit(_chain_names(self.remote, pack_id))

    def _send_one(self, entry: Entry) -> None:
        folder = self.local.folder
        lease = folder.lease(entry.pack_id)
        try:
            take(self.remote, folder.path(entry.pack_id), entry.pack_id, folder.read_record(entry.pack_id))
        finally:
            os.close(lease)
        if entry.pinned:
            self.remote.pin(entry.pack_id)

    def _send_quietly(self) -> None:
        try:
            self._send()
        except (KvpackError, OSError, sqlite3.Error) as error:
            _log.warning("packs wait in %s, because they cannot be sent: %s", self.local.folder.root, error)

    def _written(self, entry: Entry) -> Entry:
        if self._pool is not None:
            self._sent = self._pool.submit(self._send_quietly)
        else:
            self.flush()
        return entry

    def put(
        self,
        cuts: CutView | Sequence[CutView],
        tokens: Tokens | None = None,
        *,
        content: Sequence[ContentField] = (),
        parent: StoredPack | None = None,
        kept: Sequence[int] = (),
        codec: str = "split",
        sign: Signer | None = None,
    ) -> Entry:
        """Store cuts in the folder, and send them on (see :meth:`Store.put`)."""
        return self._written(
            self.local.put(cuts, tokens, content=content, parent=parent, kept=kept, codec=codec, sign=sign)
        )

    def put_file(
        self, path: str | os.PathLike[str], tokens: Tokens | None = None, *, content: Sequence[ContentField] = ()
    ) -> Entry:
        """Store a pack file in the folder, and send it on (see :meth:`LocalStore.put_file`)."""
        return self._written(self.local.put_file(path, tokens, content=content))

    def longest(
        self,
        tokens: Tokens,
        identity: Identity,
        geometry: Geometry,
        *,
        content: Sequence[ContentField] = (),
        only_cuts: bool = False,
        need_logits: bool = True,
        capacity: int | None = None,
    ) -> Hit | None:
        """The deeper answer of the two (see :meth:`Store.longest`); the bucket is not asked where it cannot be deeper.

        At the same depth what promises bitwise equality comes first, then what is here.
        """

        def ask(store: LocalStore) -> Hit | None:
            found = store.longest(
                tokens,
                identity,
                geometry,
                content=content,
                only_cuts=only_cuts,
                need_logits=need_logits,
                capacity=capacity,
            )
            return None if found is None else replace(found, count=lambda: self._count(found.pack_id))

        here = ask(self.local)
        most = len(here.tokens) if here is not None else 0
        if here is not None and here.same_numerics and here.position == min(most, capacity or most):
            return here
        there = ask(self.remote)
        if here is None or there is None:
            return here or there
        return max(here, there, key=lambda hit: (hit.position, hit.same_numerics, hit is here))

    def _count(self, pack_id: bytes) -> None:
        """Count a hit in both, so that both know what was used last."""
        for store in (self.local, self.remote):
            names = _chain_names(store, pack_id)
            if names:
                store.count_hit(names)
            elif store is self.remote and self._write_back:
                self._late_hits.append(pack_id)  # it is not sent yet

    def get(self, found: Hit | bytes) -> StoredPack | None:
        """Open a pack (see :meth:`Store.get`); one that only the bucket has is brought here first."""
        pack_id = found.pack_id if isinstance(found, Hit) else found
        pack_name(pack_id)
        if not _chain_names(self.local, pack_id):
            try:
                self._promote(pack_id)
            except BrokenPackError as broken:
                self.remote.put_aside(broken)
                return None
            except (KvpackError, OSError, sqlite3.Error) as error:
                _log.warning("pack %s stays in the bucket: %s", pack_id.hex()[:16], error)
        if _chain_names(self.local, pack_id):
            stored = self.local.get(found)
            if stored is not None:
                return stored
        return self.remote.get(found)

    def _promote(self, pack_id: bytes) -> None:
        """Bring a pack and its parents into the folder, the oldest first, every tile verified on the way."""
        self.remote.log.sync()
        for name in reversed(_chain_names(self.remote, pack_id)):
            if _chain_names(self.local, name):
                continue
            record = self.remote.record(name)

            def write(temporary: Temporary, name: bytes = name, record: Record = record) -> Record:
                try:
                    fetch_into(self.remote.bucket, name, temporary.descriptor)
                except (KvpackError, FileNotFoundError) as error:
                    damaged = isinstance(error, KvpackError) and error.family in ("Format", "Integrity")
                    raise BrokenPackError(name, error, damaged=damaged) from None
                return record

            store_pack(self.local, record.file_bytes, write)

    def pin(self, pack_id: bytes) -> None:
        """Keep a pack in both tiers; raises StoreError ``no-such-pack``."""
        self._each(pack_id, lambda store: store.pin(pack_id))

    def unpin(self, pack_id: bytes) -> None:
        """Undo :meth:`pin`."""
        self._each(pack_id, lambda store: store.unpin(pack_id))

    def _each(self, pack_id: bytes, work: Callable[[LocalStore], None]) -> None:
        pack_name(pack_id)
        self._settle()
        self.remote.asking(self.remote.log.sync)
        holders = [store for store in (self.local, self.remote) if _chain_names(store, pack_id)]
        if not holders:
            raise StoreError("no-such-pack", "the store has no such pack", found=pack_id.hex())
        for store in holders:
            if store is self.local or not self.remote.bucket.read_only:
                work(store)

    def gc(self, quota: int | None = None) -> GcReport:
        """Collect in both tiers (see :meth:`Store.gc`), each to ``quota`` or its own; what is open here stays there."""
        self._settle()
        here = self.local.gc(quota)
        if self.remote.bucket.read_only:
            return here
        self.flush()
        there = self.remote.asking(
            lambda: remote_upkeep.collect(
                self.remote, self.remote.room if quota is None else quota, keep=frozenset(here.leased)
            )
        )
        return GcReport(
            removed=tuple(dict.fromkeys((*here.removed, *there.removed))),
            freed_bytes=here.freed_bytes + there.freed_bytes,
            stored_bytes=max(here.stored_bytes, there.stored_bytes),
            leased=tuple(sorted({*here.leased, *there.leased})),
            flattened=tuple(dict.fromkeys((*here.flattened, *there.flattened))),
            leftovers=(*here.leftovers, *there.leftovers),
        )

    def _settle(self) -> None:
        """Wait for what is being sent."""
        sent = self._sent
        if sent is not None:
            sent.result()

    def fsck(self) -> FsckReport:
        """Check both tiers (see :meth:`Store.fsck`); packs and bytes of the two are added up."""
        self._settle()
        reports = [self.local.fsck()]
        if not self.remote.bucket.read_only:
            reports.append(self.remote.fsck())
        return FsckReport(
            packs=sum(report.packs for report in reports),
            stored_bytes=sum(report.stored_bytes for report in reports),
            quarantined=tuple(pair for report in reports for pair in report.quarantined),
            adopted=tuple(name for report in reports for name in report.adopted),
            forgotten=tuple(name for report in reports for name in report.forgotten),
            foreign=tuple(name for report in reports for name in report.foreign),
        )

    def flatten(self, pack_id: bytes, *, whole: bool = True, sign: Signer | None = None) -> Entry:
        """Flatten in the folder, and send the result on (see :meth:`Store.flatten`)."""
        pack_name(pack_id)
        if not _chain_names(self.local, pack_id):
            self.local.asking(lambda: self._promote(pack_id))
        return self._written(self.local.flatten(pack_id, whole=whole, sign=sign))

    def entry(self, pack_id: bytes) -> Entry:
        """One entry, the folder's before the bucket's; raises StoreError ``no-such-pack``."""
        return (self.local if _chain_names(self.local, pack_id) else self.remote).entry(pack_id)

    def ls(self) -> tuple[Entry, ...]:
        """Every entry: those of the folder, then those that only the bucket has."""
        here = self.local.ls()
        names = {entry.pack_id for entry in here}
        return (*here, *(entry for entry in self.remote.ls() if entry.pack_id not in names))

    def stats(self) -> Stats:
        """Both tiers in numbers, each pack once."""
        entries, here, there = self.ls(), self.local.stats(), self.remote.stats()
        pinned = [entry for entry in entries if entry.pinned]
        return replace(
            here,
            packs=len(entries),
            cuts=sum(len(entry.cuts) for entry in entries),
            stored_bytes=sum(entry.stored_bytes for entry in entries),
            pinned=len(pinned),
            pinned_bytes=sum(entry.stored_bytes for entry in pinned),
            retired=sum(entry.retired for entry in entries),
            hits=sum(entry.hits for entry in entries),
            quarantined=here.quarantined + there.quarantined,
        )

    def export(self, pack_id: bytes, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Copy a pack out (see :meth:`Store.export`)."""
        pack_name(pack_id)
        (self.local if _chain_names(self.local, pack_id) else self.remote).export(pack_id, path, force=force)


def _chain_names(store: LocalStore, pack_id: bytes) -> list[bytes]:
    """The chain of a pack that a store has, newest first; nothing where it lacks it."""
    found: Iterable[tuple[int, bytes, int]] = store.asking(
        lambda: store.index.read(lambda cursor: rows.chain_of(cursor, pack_id, MAX_CHAIN))
    )
    return [name for _, name, _ in found]
