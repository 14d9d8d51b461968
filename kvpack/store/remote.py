"""A prefix store in a bucket that many machines share: S3 through obstore; ``gs:`` and ``az:`` by the same code.

The same names as in a folder (``objects/aa/<pack id>`` and its ``.record``, ``version``, ``key``), a log in place of
the SQLite file (:mod:`kvpack.store.remote_log`), ``leases/`` and ``quarantine/``. Each handle keeps an index of its
own that follows the log, so that a question is answered by SQLite here and costs a few requests, however large the
store. A put is acknowledged once the object, its record and its event are there, in this order.

A reader leases what it opens with a small object and then looks whether it was dropped; a collection drops first and
then looks for leases: one of the two sees the other. A lease counts for an hour.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import sqlite3
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from kvpack.errors import DecryptError, KvpackError, StoreError, TrustError
from kvpack.model.geometry import Geometry
from kvpack.model.identity import Identity
from kvpack.model.snapshot import CutView
from kvpack.pack.reader import PackReader
from kvpack.pack.view import MAX_CHAIN, PackChain
from kvpack.pack.writer import Signer
from kvpack.store import remote_upkeep, rows, upkeep
from kvpack.store.bucket import Bucket
from kvpack.store.finding import Finder
from kvpack.store.local import DEFAULT_GRACE, LocalStore
from kvpack.store.objects import pack_name
from kvpack.store.opening import BrokenPackError
from kvpack.store.prefix import KEY_BYTES, ContentField, PrefixKeys, TokenChain, Tokens
from kvpack.store.protocol import CheckFactory, Entry, FsckReport, GcReport, Hit, Stats, StoredPack
from kvpack.store.record import Record
from kvpack.store.remote_founding import RemoteFolder, require_store, settled
from kvpack.store.remote_log import Event, Log
from kvpack.store.remote_put import put_remote_file, take
from kvpack.store.remote_source import object_name, open_remote
from kvpack.store.remote_transfer import pull

__all__ = ["RemoteStore"]

_log = logging.getLogger("kvpack.store")


class RemoteStore(LocalStore):
    """See :class:`~kvpack.store.protocol.Store` for the verbs, and :meth:`open_url` for what it is opened with."""

    def __init__(
        self,
        bucket: Bucket,
        mirror: Path,
        keys: PrefixKeys,
        *,
        check: CheckFactory | None,
        sign: Signer | None,
        quota: int | None,
        grace: float,
        now: Callable[[], float],
    ) -> None:
        """Made by :meth:`open_url`."""
        folder = RemoteFolder(mirror, lambda path, pack_id, record: take(self, path, pack_id, record))
        super().__init__(folder, keys, check=check, sign=sign, quota=None, grace=grace, now=now)
        self.bucket = bucket
        self.log = Log(bucket, self.index)
        self.room = quota
        self.objects = folder
        folder.look = self._look

    @classmethod
    def open_url(
        cls,
        url: str,
        *,
        key: bytes | None = None,
        tenant: str | None = None,
        check: CheckFactory | None = None,
        sign: Signer | None = None,
        quota: int | None = None,
        grace: float = DEFAULT_GRACE,
        create: bool = True,
        read_only: bool = False,
        mirror: str | os.PathLike[str] | None = None,
        config: dict[str, str] | None = None,
        now: Callable[[], float] = time.time,
    ) -> RemoteStore:
        """Open the store under a bucket's URL (see :class:`~kvpack.store.bucket.Bucket`), or make one there.

        ``mirror`` is a folder of this machine that keeps the index from one start to the next; without it the index is
        read anew and removed in the end. ``read_only`` writes nothing, neither hits nor leases; ``http(s):`` is always
        so. The other options are those of :meth:`LocalStore.open`.

        Raises StoreError ``missing-extra``, ``unreachable``, ``access-denied``, ``no-such-bucket``, ``no-such-store``,
        ``store-version``, ``no-conditional-writes``; UsageError ``bad-store-key``.
        """
        bucket = Bucket(url, config=config)
        bucket.read_only = bucket.read_only or read_only
        require_store(bucket, create=create)
        own = settled(bucket, "key", secrets.token_bytes(KEY_BYTES)) if key is None else key
        keys = PrefixKeys(own)
        if tenant is not None:
            keys = keys.for_tenant(tenant)
        if not bucket.read_only:
            bucket.require_conditional_writes()
        root = Path(mirror) if mirror is not None else Path(tempfile.mkdtemp(prefix="kvpack-mirror-"))
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        store = cls(bucket, root, keys, check=check, sign=sign, quota=quota, grace=grace, now=now)
        if mirror is None:
            weakref.finalize(store, shutil.rmtree, root, ignore_errors=True)
        store.asking(store.log.sync)
        return store

    def records(self) -> Iterator[tuple[Record, bool]]:
        """An index that was lost follows the log from the beginning."""
        return iter(())

    def require_writable(self) -> None:
        """Raise StoreError ``read-only`` where nothing may be written."""
        if self.bucket.read_only:
            raise StoreError("read-only", f"{self.bucket.url} is open to read only", found=self.bucket.url)

    def decide(self, make: Callable[[], Event | None]) -> Event | None:
        """Log what ``make`` decides from the present state; decided again where another process was faster."""
        self.require_writable()
        while True:
            self.log.sync()
            seen = self.log.applied()
            event = make()
            if event is None or self.log.append(event, expected=seen):
                return event

    def _look(self, pack_id: bytes) -> None:
        """Ask for the sizes of a pack and its parents at once."""
        chain = self.index.read(lambda cursor: rows.chain_of(cursor, pack_id, MAX_CHAIN))
        names = list(dict.fromkeys((pack_id, *(name for _, name, _ in chain))))
        for name, found in zip(names, self.bucket.many(lambda n: self.bucket.head(object_name(n)), names), strict=True):
            self.objects.sizes[name] = None if found is None else found.size

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
        """Store cuts of one session (see :meth:`LocalStore.put`)."""
        self._begin(write=True)
        return super().put(cuts, tokens, content=content, parent=parent, kept=kept, codec=codec, sign=sign)

    def put_file(
        self,
        path: str | os.PathLike[str],
        tokens: Tokens | None = None,
        *,
        content: Sequence[ContentField] = (),
        on_bytes: Callable[[int], None] | None = None,
    ) -> Entry:
        """Store a pack file as it is (see :meth:`LocalStore.put_file`); every byte is verified while it is sent.

        An upload that another process began and did not end goes on where it stopped.
        """
        self._begin(write=True)
        return self.asking(lambda: put_remote_file(self, Path(path), tokens, content, on_bytes))

    def _begin(self, *, write: bool = False) -> None:
        if write:
            self.require_writable()
        self.objects.sizes.clear()
        self.asking(self.log.sync)

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

        def work() -> Hit | None:
            self.objects.sizes.clear()
            self.log.sync()
            return finder.find()

        return self._serving("longest", work)

    def restores_to(self, pack_id: bytes, chain: TokenChain, block: int, most: int) -> int | None:
        """How far a pack goes along with ``chain`` (see :class:`~kvpack.store.opening.KnownTokens`)."""
        return self._known.deepest(pack_id, lambda: self._opened(pack_id, lambda: None), chain, block, most)

    def get(self, found: Hit | bytes) -> StoredPack | None:
        """Open a pack with its parents (see :meth:`Store.get`)."""
        if isinstance(found, Hit):
            return super().get(found)
        pack_name(found)

        def work() -> StoredPack:
            self.log.sync()
            return self.open_pack(found)

        return self._serving("get", work)

    def open_pack(self, pack_id: bytes, position: int | None = None, cut_position: int | None = None) -> StoredPack:
        """Open a pack with its parents, leased; raises BrokenPackError, StoreError ``no-such-pack``."""
        if self.bucket.read_only:
            return self._opened(pack_id, lambda: None, position, cut_position)
        names = self._chain(pack_id)
        leases = [f"leases/{pack_name(name)}.{secrets.token_hex(8)}" for name in names]

        def release() -> None:
            gone, leases[:] = list(leases), []
            try:
                self.bucket.delete(gone)
            except StoreError as error:
                _log.warning("a lease of pack %s stays until it expires: %s", pack_id.hex()[:16], error)

        try:
            self.bucket.many(lambda name: self.bucket.create(name, b""), leases)
            self.log.sync()
            return self._opened(pack_id, release, position, cut_position)
        except BaseException:
            with contextlib.suppress(KvpackError):
                release()
            raise

    def _chain(self, pack_id: bytes) -> list[bytes]:
        found = self.index.read(lambda cursor: rows.chain_of(cursor, pack_id, MAX_CHAIN))
        if not found:
            raise StoreError("no-such-pack", "the store has no such pack", found=pack_id.hex())
        return [name for _, name, _ in found]

    def _opened(
        self, pack_id: bytes, release: Callable[[], None], position: int | None = None, cut_position: int | None = None
    ) -> StoredPack:
        names = self._chain(pack_id)
        readers: list[PackReader] = []
        blamed = names[0]

        def one(name: bytes) -> PackReader | OSError | KvpackError:
            try:
                return open_remote(self.bucket, name, self.check() if self.check is not None else None)
            except (OSError, KvpackError) as error:
                return error

        opened = self.bucket.many(one, names)
        readers = [found for found in opened if isinstance(found, PackReader)]
        try:
            for blamed, found in zip(names, opened, strict=True):
                if not isinstance(found, PackReader):
                    raise found
                self.objects.sizes[blamed] = found.preamble.file_length
            blamed = names[0]
            chain = PackChain(readers)
            cut_at = chain.readers[0].manifest.position if cut_position is None else cut_position
            chain.cut(cut_at).require_state_id()
        except (OSError, KvpackError) as error:
            for reader in readers:
                reader.close()
            damaged = isinstance(error, KvpackError) and error.family in ("Format", "Integrity")
            raise BrokenPackError(blamed, error, damaged=damaged) from None
        at = cut_at if position is None else position
        return StoredPack(chain, names, at, cut_at, release, lambda: self.reject(names[0]))

    def put_aside(self, broken: BrokenPackError) -> None:
        """Log why a pack could not be used; quarantine it where its bytes are damaged."""
        gone = isinstance(broken.error, FileNotFoundError)
        refused = isinstance(broken.error, (TrustError, DecryptError))
        super().put_aside(broken)
        if self.bucket.read_only and (gone or broken.damaged) and not refused:
            self.refused.add(broken.pack_id)

    def reject(self, pack_id: bytes) -> None:
        """Move a pack whose bytes did not verify to ``quarantine/``, and drop it for everybody; never raises."""
        self._known.forget(pack_id)
        self.objects.sizes.pop(pack_id, None)
        if self.bucket.read_only:
            return
        try:
            remote_upkeep.put_aside(self, pack_id)
        except (KvpackError, sqlite3.Error, OSError) as error:
            _log.warning("pack %s cannot be quarantined: %s", pack_id.hex()[:16], error)

    def _forget(self, pack_id: bytes) -> None:
        self._known.forget(pack_id)
        if self.bucket.read_only:
            return
        try:
            if self.bucket.head(object_name(pack_id)) is None:
                self.log.append(Event(drop=(pack_id,)))
        except (KvpackError, sqlite3.Error, OSError) as error:
            _log.warning("pack %s cannot be forgotten: %s", pack_id.hex()[:16], error)

    def count_hit(self, pack_ids: Iterable[bytes]) -> None:
        """Count a use of a pack and its parents; never raises."""
        if not self.bucket.read_only:
            self._serving("confirm", lambda: self.log.append(Event(used=tuple(pack_ids))) or None)

    def _set_pin(self, pack_id: bytes, pinned: bool) -> None:
        pack_name(pack_id)

        def make() -> Event:
            self._chain(pack_id)
            return Event(pin=(pack_id,)) if pinned else Event(unpin=(pack_id,))

        self.asking(lambda: self.decide(make))

    def record(self, pack_id: bytes) -> Record:
        """The record of a pack, as the log has it; raises StoreError ``no-such-pack``, ``bad-record``."""
        found = self.log.record(pack_id)
        if found is None:
            raise StoreError("no-such-pack", "the store has no such pack", found=pack_id.hex())
        return Record.parse(found)

    def gc(self, quota: int | None = None) -> GcReport:
        """Remove what is not wanted (see :meth:`Store.gc`)."""
        self._begin(write=True)
        return self.asking(lambda: remote_upkeep.collect(self, self.room if quota is None else quota))

    def fsck(self) -> FsckReport:
        """Hash everything again (see :meth:`Store.fsck`)."""
        self._begin(write=True)
        return self.asking(lambda: remote_upkeep.check(self))

    def flatten(self, pack_id: bytes, *, whole: bool = True, sign: Signer | None = None) -> Entry:
        """Make a delta and its parents one pack (see :meth:`Store.flatten`)."""
        pack_name(pack_id)
        self._begin(write=True)
        return super().flatten(pack_id, whole=whole, sign=sign)

    def entry(self, pack_id: bytes, *, new: bool = False) -> Entry:
        """One entry; raises StoreError ``no-such-pack``."""
        self.asking(self.log.sync)
        return super().entry(pack_id, new=new)

    def ls(self) -> tuple[Entry, ...]:
        """Every entry, the most recently used first."""
        self._begin()
        return super().ls()

    def stats(self) -> Stats:
        """The store in numbers."""
        self._begin()
        return self.asking(lambda: remote_upkeep.statistics(self, upkeep.statistics(self)))

    def export(self, pack_id: bytes, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Copy a pack to ``path`` (see :meth:`Store.export`); a copy that was begun goes on."""
        pack_name(pack_id)
        self.entry(pack_id)
        self.asking(lambda: pull(self.bucket, pack_id, Path(path), force=force))
