"""What every store does, and the values that it answers with.

Two kinds of verbs. What an engine asks while it serves (:meth:`Store.longest`, :meth:`Store.get`) never raises for a
fault of the store: the answer is a miss, and a warning is logged under ``kvpack.store``. What a person asks (``pin``,
``gc``, ``fsck``, ``export``, …) raises StoreError. ``put`` raises too, and leaves the store as it was.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, TypeAlias

from kvpack.model.geometry import Geometry
from kvpack.model.identity import Identity
from kvpack.model.snapshot import CutView
from kvpack.pack.reader import FrontCheck
from kvpack.pack.view import PackChain, PackCut
from kvpack.pack.writer import Signer
from kvpack.store.prefix import ContentField, Tokens

__all__ = [
    "CheckFactory",
    "Entry",
    "EntryCut",
    "FsckReport",
    "GcReport",
    "Hit",
    "Stats",
    "Store",
    "StoredPack",
]

CheckFactory: TypeAlias = "Callable[[], FrontCheck]"
"""Makes the check of one pack's front: trust, passed in. Each pack of a chain gets one of its own."""


@dataclass(frozen=True)
class EntryCut:
    """A cut that an entry stores: position in tokens, state id (empty in an encrypted pack), last logits or not."""

    position: int
    state_id: bytes
    logits: bool


@dataclass(frozen=True)
class Entry:
    """One pack of a store. ``stored_bytes`` is what it takes there; ``chain`` counts it and its parents.

    ``parent`` is the pack that a delta needs, ``continues`` the pack whose deepest cut its tokens follow (a delta's
    parent, or a whole pack's predecessor). ``created`` in seconds since 1970; ``used`` is the store's own clock: the
    higher, the later. ``kept`` are the positions whose cuts outlive a collection (empty: all of them); ``new``
    says that this put wrote it.
    """

    pack_id: bytes
    stored_bytes: int
    position: int
    cuts: tuple[EntryCut, ...]
    created: float
    used: int
    hits: int = 0
    pinned: bool = False
    retired: bool = False
    parent: bytes | None = None
    continues: bytes | None = None
    chain: int = 1
    kept: tuple[int, ...] = ()
    new: bool = False

    @property
    def name(self) -> str:
        """The pack id in hex, as paths and the command line carry it."""
        return self.pack_id.hex()


@dataclass(frozen=True)
class Hit:
    """The deepest restorable prefix of the tokens asked for.

    ``position`` tokens are reused, through the pack's cut at ``cut_position`` (``position`` itself if ``at_cut``, else
    the next one behind it). ``needs_logits``: all tokens are reused and the next one is sampled from the stored
    logits. Nothing is open yet: ask :meth:`Store.get`.
    """

    position: int
    pack_id: bytes
    cut_position: int
    at_cut: bool
    needs_logits: bool
    same_numerics: bool
    tokens: array[int] = field(repr=False)
    count: Callable[[], None] = field(repr=False, compare=False)

    @property
    def tokens_to_prefill(self) -> tuple[int, ...]:
        """What is left to compute: ``tokens[position:]``."""
        return tuple(self.tokens[self.position :])

    def confirm(self) -> None:
        """Count the hit. Called once the state was verified and installed, and not before."""
        self.count()


class StoredPack:
    """An open pack of a store with its parents; it cannot be removed while it is open. A context manager.

    ``position`` is where the hit wants the restore, for ``install(..., at=position)``.
    """

    def __init__(
        self,
        chain: PackChain,
        names: Sequence[bytes],
        position: int,
        cut_position: int,
        release: Callable[[], None],
        reject: Callable[[], None],
    ) -> None:
        """Made by :meth:`Store.get`; ``names`` are the pack ids of the chain, newest first."""
        self.chain = chain
        self.names = tuple(names)
        self.position = position
        self.cut_position = cut_position
        self._release = release
        self._reject = reject

    def __enter__(self) -> StoredPack:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pack_id(self) -> bytes:
        """The pack's own id."""
        return self.names[0]

    def cut(self, position: int | None = None) -> PackCut:
        """The cut through which the hit restores, or the one at ``position``."""
        return self.chain.cut(self.cut_position if position is None else position)

    def reject(self) -> None:
        """Say that a tile of the pack did not verify: it is put aside, and the next put repairs the entry."""
        self._reject()

    def close(self) -> None:
        """Close the files and give the leases back; closing twice is fine."""
        self.chain.close()
        self._release()


@dataclass(frozen=True)
class Stats:
    """A store in numbers; sizes in bytes. ``reserved`` is promised to puts that are under way."""

    packs: int
    cuts: int
    stored_bytes: int
    pinned: int
    pinned_bytes: int
    retired: int
    reserved: int
    hits: int
    quota: int | None
    quarantined: int


@dataclass(frozen=True)
class GcReport:
    """What a collection removed and kept. Pack ids; ``leftovers`` are file names that no record and no index named."""

    removed: tuple[bytes, ...]
    freed_bytes: int
    stored_bytes: int
    leased: tuple[bytes, ...]
    flattened: tuple[bytes, ...]
    leftovers: tuple[str, ...]


@dataclass(frozen=True)
class FsckReport:
    """What a check found. ``quarantined`` names files and why; ``foreign`` are left alone; nothing was deleted."""

    packs: int
    stored_bytes: int
    quarantined: tuple[tuple[str, str], ...]
    adopted: tuple[bytes, ...]
    forgotten: tuple[bytes, ...]
    foreign: tuple[str, ...]

    @property
    def clean(self) -> bool:
        """Whether there was nothing to repair."""
        return not (self.quarantined or self.adopted or self.forgotten)


class Store(Protocol):
    """A prefix store."""

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
        """Store cuts of one session; acknowledged means found by everyone and, unless told otherwise, on disk.

        ``tokens`` are those of the last cut (by default what travels with it). With ``parent`` only what follows its
        cut is stored; ``kept`` names the positions of the chain whose cuts shall outlive a collection.
        """

    def put_file(
        self, path: str | os.PathLike[str], tokens: Tokens | None = None, *, content: Sequence[ContentField] = ()
    ) -> Entry:
        """Store a pack file as it is, with its signatures, every byte verified; its parent must be stored."""

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
        """The deepest restorable prefix of ``tokens``, or None: a miss, whatever the reason.

        ``only_cuts`` keeps to positions that are cuts, where the claim can be BITWISE. Unless ``need_logits`` is off,
        all of ``tokens`` are an answer only at a cut with last logits.
        """

    def get(self, found: Hit | bytes) -> StoredPack | None:
        """Open what :meth:`longest` found, or a pack by its id, with its parents; None if that fails."""

    def pin(self, pack_id: bytes) -> None:
        """Keep a pack (and what it needs) whatever the quota."""

    def unpin(self, pack_id: bytes) -> None:
        """Give a pack back to the least-recently-used order."""

    def gc(self, quota: int | None = None) -> GcReport:
        """Remove what is not wanted: retired packs, leftovers of dead writers, and the least recently used."""

    def fsck(self) -> FsckReport:
        """Hash everything again, quarantine what is damaged, and repair the index. Needs no key; deletes nothing."""

    def flatten(self, pack_id: bytes, *, whole: bool = True, sign: Signer | None = None) -> Entry:
        """Make a delta with its parents one pack, by copying their tiles, and retire what only it needed.

        Without ``whole`` parents that others continue, too, stay parents.
        """

    def entry(self, pack_id: bytes) -> Entry:
        """One entry; raises StoreError ``no-such-pack``."""

    def stats(self) -> Stats:
        """The store in numbers."""

    def ls(self) -> tuple[Entry, ...]:
        """Every entry, the most recently used first."""

    def export(self, pack_id: bytes, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Copy a pack out of the store to ``path``, every stored byte verified."""

    def close(self) -> None:
        """Close the store."""
