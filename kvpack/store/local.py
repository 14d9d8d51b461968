"""A prefix store in a folder of one machine: SQLite for finding, immutable files for the packs; nothing to start.

Layout: ``objects/aa/<pack id>`` with ``<pack id>.record`` beside it, ``index.sqlite``, ``tmp/``, ``leases/``,
``quarantine/``, ``version``, ``key``. Many processes use it at once. A put is acknowledged once the object, its record
and its row are on disk, in this order; what dies on the way leaves a file of ``tmp/`` or a pack that the next
collection adopts.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, TypeVar

from kvpack.errors import DecryptError, KvpackError, StoreError, TrustError, UsageError
from kvpack.model.geometry import Geometry
from kvpack.model.identity import Identity
from kvpack.model.snapshot import CutView
from kvpack.pack.view import MAX_CHAIN
from kvpack.pack.writer import Signer, publish
from kvpack.store import lineage, rows, upkeep
from kvpack.store.deltas import flatten_chain
from kvpack.store.finding import Finder
from kvpack.store.founding import found_store
from kvpack.store.index import Index, index_error
from kvpack.store.objects import RECORD, ObjectFolder, copy_bytes, store_error
from kvpack.store.opening import BrokenPackError, KnownTokens, open_chain, require_sound
from kvpack.store.prefix import ContentField, PrefixKeys, TokenChain, Tokens
from kvpack.store.protocol import (
    CheckFactory,
    Entry,
    FsckReport,
    GcReport,
    Hit,
    Stats,
    StoredPack,
)
from kvpack.store.putting import put_cuts, put_file
from kvpack.store.record import Record
from kvpack.store.space import Clock

__all__ = ["LocalStore"]

_log = logging.getLogger("kvpack.store")
DEFAULT_GRACE: Final = 60.0

Result = TypeVar("Result")


class LocalStore:
    """See :class:`~kvpack.store.protocol.Store` for the verbs, and :meth:`open` for what a store is opened with."""

    def __init__(
        self,
        folder: ObjectFolder,
        keys: PrefixKeys,
        *,
        check: CheckFactory | None,
        sign: Signer | None,
        quota: int | None,
        grace: float,
        now: Callable[[], float],
    ) -> None:
        """Made by :meth:`open`."""
        self.folder = folder
        self.keys = keys
        self.check = check
        self.sign = sign
        self.quota = quota
        self.index = Index(folder, self.records)
        self._grace = grace
        self._now = now
        self.refused: set[bytes] = set()
        self._known = KnownTokens()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        key: bytes | None = None,
        tenant: str | None = None,
        check: CheckFactory | None = None,
        sign: Signer | None = None,
        quota: int | None = None,
        durability: str = "full",
        grace: float = DEFAULT_GRACE,
        allow_network: bool = False,
        create: bool = True,
        now: Callable[[], float] = time.time,
    ) -> LocalStore:
        """Open the store in the folder ``path``, or make one (unless ``create`` is off).

        ``key`` are the 32 bytes under which prefixes are named; by default the store's own, in its file ``key``.
        ``check`` makes the trust check of each pack that is opened, ``sign`` signs what the store writes. ``quota``
        is in bytes of objects; ``grace`` are seconds in which a new pack is not removed. ``durability`` is ``full``
        or ``none``: then a power loss may lose packs, never show a torn one.

        Raises StoreError ``no-such-store``, ``not-a-store``, ``store-version``, ``network-file-system``, UsageError
        ``bad-store-key``.
        """
        if durability not in ("full", "none"):
            raise UsageError("bad-durability", "durability is full or none", expected="full, none", found=durability)
        folder, own_key = found_store(
            Path(path), durable=durability == "full", create=create, allow_network=allow_network, own_key=key is None
        )
        keys = PrefixKeys(own_key if key is None else key)
        if tenant is not None:
            keys = keys.for_tenant(tenant)
        store = cls(folder, keys, check=check, sign=sign, quota=quota, grace=grace, now=now)
        store.asking(lambda: store.index.read(lambda cursor: None))
        return store

    def __enter__(self) -> LocalStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the index; packs that are open stay so."""
        self.index.close()

    def clock(self) -> Clock:
        """The time now, and the grace of new packs."""
        return Clock(self._now(), self._grace)

    def asking(self, work: Callable[[], Result]) -> Result:
        """Run a verb that a person asked for: every fault of the store is a StoreError."""
        try:
            return work()
        except sqlite3.Error as error:
            raise index_error(error) from None
        except OSError as error:
            raise store_error(error, str(self.folder.root)) from None
        except BrokenPackError as broken:
            raise StoreError(
                "broken-pack",
                f"pack {broken.pack_id.hex()[:16]}: {broken.error}",
                found=broken.pack_id.hex(),
                hint="run fsck",
            ) from None

    def records(self) -> Iterator[tuple[Record, bool]]:
        """Every sound record that has an object of the right size, and whether the pack is pinned."""
        for pack_id in upkeep.named_packs(self.folder):
            try:
                record = self.record(pack_id)
            except (OSError, StoreError) as error:
                _log.warning("pack %s: its record cannot be read: %s", pack_id.hex()[:16], error)
                continue
            if record.pack_id == pack_id and self.folder.size(pack_id) == record.file_bytes:
                yield record, self.folder.pinned(pack_id)

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
        """Store cuts of one session (see :meth:`Store.put`).

        Where the same cuts, with as many extras and the same numerics, are stored already, nothing is written and
        that entry is the answer (``new`` is False). Raises StoreError ``quota-exceeded``, ``disk-full``,
        ``index-failed``, …, and what composing the pack raises; the store is as it was.
        """
        views = tuple(cuts) if isinstance(cuts, Sequence) else (cuts,)
        return self.asking(
            lambda: put_cuts(
                self, views, tokens, content=content, parent=parent, kept=kept, codec=codec, sign=sign or self.sign
            )
        )

    def put_file(
        self, path: str | os.PathLike[str], tokens: Tokens | None = None, *, content: Sequence[ContentField] = ()
    ) -> Entry:
        """Store a pack file as it is, with its signatures, every byte verified; its parent must be stored.

        ``tokens`` by default are those that travel in it. Raises what the reader raises, StoreError ``no-tokens``.
        """
        return self.asking(lambda: put_file(self, Path(path), tokens, content))

    def chain(
        self, tokens: Tokens, identity: Identity, geometry: Geometry, content: Sequence[ContentField]
    ) -> TokenChain:
        """The nodes of ``tokens`` under this store's key."""
        return self.keys.chain(tokens, identity, geometry, content)

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
        """The deepest restorable prefix (see :meth:`Store.longest`)."""
        chain = self.chain(tokens, identity, geometry, content)
        finder = Finder(self, chain, identity, only_cuts=only_cuts, need_logits=need_logits, capacity=capacity)
        return self._serving("longest", finder.find)

    def _serving(self, verb: str, work: Callable[[], Result | None]) -> Result | None:
        """Run what an engine asks for: a fault is a warning and a miss."""
        try:
            return work()
        except BrokenPackError as broken:
            self.put_aside(broken)
        except (sqlite3.Error, OSError, KvpackError) as error:
            _log.warning("%s: a miss, because the store failed: %s", verb, error)
        return None

    def put_aside(self, broken: BrokenPackError) -> None:
        """Log why a pack could not be used; quarantine it where its bytes are damaged."""
        _log.warning("pack %s is passed over: %s", broken.pack_id.hex()[:16], broken.error)
        if broken.damaged:
            self.reject(broken.pack_id)
        elif isinstance(broken.error, (TrustError, DecryptError)):
            self.refused.add(broken.pack_id)  # another handle may trust it; this one looks for the next best
        elif isinstance(broken.error, FileNotFoundError):
            self._forget(broken.pack_id)

    def reject(self, pack_id: bytes) -> None:
        """Quarantine a pack whose bytes did not verify, and forget its rows; never raises."""
        try:
            if self.folder.quarantine(self.folder.path(pack_id)):
                self.folder.quarantine(self.folder.path(pack_id, RECORD))
        except OSError as error:
            _log.warning("pack %s cannot be quarantined: %s", pack_id.hex()[:16], error)
        self._forget(pack_id)

    def _forget(self, pack_id: bytes) -> None:
        self._known.forget(pack_id)

        def work(cursor: sqlite3.Cursor) -> None:
            row = cursor.execute("SELECT number FROM packs WHERE id = ?", (pack_id,)).fetchone()
            if row is not None:
                rows.forget(cursor, row[0])

        try:
            if self.folder.size(pack_id) is None:
                self.index.write(work)
        except (sqlite3.Error, OSError) as error:
            _log.warning("pack %s cannot be forgotten: %s", pack_id.hex()[:16], error)

    def restores_to(self, pack_id: bytes, chain: TokenChain, block: int, most: int) -> int | None:
        """How far a pack goes along with ``chain`` behind node ``block`` (see :class:`KnownTokens`)."""
        return self._known.deepest(pack_id, lambda: self.open_pack(pack_id), chain, block, most)

    def open_pack(self, pack_id: bytes, position: int | None = None, cut_position: int | None = None) -> StoredPack:
        """Open a pack with its parents; raises BrokenPackError, StoreError ``no-such-pack``."""
        found = self.index.read(lambda cursor: rows.chain_of(cursor, pack_id, MAX_CHAIN))
        if not found:
            raise StoreError("no-such-pack", "the store has no such pack", found=pack_id.hex())
        return open_chain(
            self.folder,
            [name for _, name, _ in found],
            self.check,
            position=position,
            cut_position=cut_position,
            reject=self.reject,
        )

    def get(self, found: Hit | bytes) -> StoredPack | None:
        """Open a pack with its parents (see :meth:`Store.get`)."""
        if isinstance(found, Hit):
            hit = found
            return self._serving("get", lambda: self.open_pack(hit.pack_id, hit.position, hit.cut_position))
        self.folder.path(found)
        return self._serving("get", lambda: self.open_pack(found))

    def count_hit(self, pack_ids: Iterable[bytes]) -> None:
        """Count a use of a pack and its parents; never raises."""

        def work(cursor: sqlite3.Cursor) -> None:
            tick = rows.next_tick(cursor)
            for at, pack_id in enumerate(pack_ids):
                cursor.execute("UPDATE packs SET used = ?, hits = hits + ? WHERE id = ?", (tick, int(at == 0), pack_id))

        self._serving("confirm", lambda: self.index.write(work, durable=False))

    def pin(self, pack_id: bytes) -> None:
        """Keep a pack whatever the quota; raises StoreError ``no-such-pack``."""
        self._set_pin(pack_id, True)

    def unpin(self, pack_id: bytes) -> None:
        """Undo :meth:`pin`."""
        self._set_pin(pack_id, False)

    def _set_pin(self, pack_id: bytes, pinned: bool) -> None:
        def work(cursor: sqlite3.Cursor) -> None:
            # Inside the transaction: a collection must not come between the row and the file.
            if not cursor.execute("UPDATE packs SET pinned = ? WHERE id = ?", (pinned, pack_id)).rowcount:
                raise StoreError("no-such-pack", "the store has no such pack", found=pack_id.hex())
            self.folder.set_pin(pack_id, pinned)

        self.folder.path(pack_id)
        self.asking(lambda: self.index.write(work))

    def gc(self, quota: int | None = None) -> GcReport:
        """Remove what is not wanted (see :meth:`Store.gc`); ``quota`` by default is the one of :meth:`open`."""
        return self.asking(lambda: upkeep.collect(self, self.quota if quota is None else quota))

    def fsck(self) -> FsckReport:
        """Hash everything again (see :meth:`Store.fsck`)."""
        return self.asking(lambda: upkeep.check(self))

    def flatten(self, pack_id: bytes, *, whole: bool = True, sign: Signer | None = None) -> Entry:
        """Make a delta and its parents one pack (see :meth:`Store.flatten`); a whole pack is its own answer."""
        self.folder.path(pack_id)

        def work() -> Entry:
            with self.open_pack(pack_id) as stored:
                own = self.index.read(lambda cursor: lineage.linear(cursor, stored.names))
                count = len(stored.names) if whole or own < 2 else own
                if count == 1:
                    return self.entry(pack_id)
                return flatten_chain(self, stored, count, sign=sign or self.sign)

        return self.asking(work)

    def record(self, pack_id: bytes) -> Record:
        """The record of a pack; raises StoreError ``bad-record``, OSError."""
        return Record.parse(self.folder.read_record(pack_id))

    def entry(self, pack_id: bytes, *, new: bool = False) -> Entry:
        """One entry; raises StoreError ``no-such-pack``."""
        found = self.index.read(lambda cursor: list(rows.entries(cursor, pack_id, new=new)))
        if not found:
            raise StoreError("no-such-pack", "the store has no such pack", found=pack_id.hex())
        return found[0]

    def ls(self) -> tuple[Entry, ...]:
        """Every entry, the most recently used first."""
        return self.asking(lambda: self.index.read(lambda cursor: tuple(rows.entries(cursor))))

    def stats(self) -> Stats:
        """The store in numbers."""
        return self.asking(lambda: upkeep.statistics(self))

    def export(self, pack_id: bytes, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Copy a pack to ``path`` (see :meth:`Store.export`); raises UsageError ``output-exists``."""
        self.folder.path(pack_id)

        def work() -> None:
            self.entry(pack_id)
            with (
                require_sound(self.folder, pack_id) as reader,
                open(reader.path, "rb") as source,
                publish(Path(path), force=force) as descriptor,
            ):
                copy_bytes(source.fileno(), descriptor)

        self.asking(work)
