"""Opening packs of a local store: the whole chain leased, each front checked, nothing used that is not verified."""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

from kvpack.errors import IntegrityError, KvpackError, StoreError
from kvpack.model.planes import TOKENS
from kvpack.pack.reader import PackReader
from kvpack.pack.view import PackChain
from kvpack.store.objects import ObjectFolder
from kvpack.store.prefix import BLOCK_TOKENS, TokenChain
from kvpack.store.protocol import CheckFactory, StoredPack
from kvpack.store.restorable import RestorablePositions

__all__ = ["BrokenPackError", "KnownTokens", "open_chain", "require_sound"]

_KNOWN_PACKS = 64


class BrokenPackError(Exception):
    """A pack of the store cannot be used. ``damaged``: its bytes are not what was written, whoever asks."""

    def __init__(self, pack_id: bytes, error: BaseException, *, damaged: bool) -> None:
        super().__init__(str(error))
        self.pack_id = pack_id
        self.error = error
        self.damaged = damaged


def _is_damage(error: KvpackError) -> bool:
    return error.family in ("Format", "Integrity")


def open_chain(
    folder: ObjectFolder,
    names: Sequence[bytes],
    check: CheckFactory | None,
    *,
    position: int | None = None,
    cut_position: int | None = None,
    reject: Callable[[bytes], None],
) -> StoredPack:
    """Open the packs ``names`` (newest first) as one chain; raises BrokenPackError, which names the one to blame."""
    leases: list[int] = []
    readers: list[PackReader] = []

    def release() -> None:
        while leases:
            os.close(leases.pop())

    blamed = names[0]
    try:
        for blamed in names:
            leases.append(folder.lease(blamed))
            reader = PackReader(folder.path(blamed), check=check() if check is not None else None)
            readers.append(reader)
            if reader.pack_id != blamed:
                raise IntegrityError("pack-id", "the file is another pack", expected=blamed.hex())
        blamed = names[0]
        chain = PackChain(readers)
        last = chain.readers[0].manifest.position
        cut_at = last if cut_position is None else cut_position
        chain.cut(cut_at).require_state_id()
    except (OSError, StoreError) as error:
        _close(readers, release)
        raise BrokenPackError(blamed, error, damaged=False) from None
    except KvpackError as error:
        _close(readers, release)
        raise BrokenPackError(blamed, error, damaged=_is_damage(error)) from None
    except BaseException:
        _close(readers, release)
        raise
    at = cut_at if position is None else position
    return StoredPack(chain, names, at, cut_at, release, lambda: reject(names[0]))


def _close(readers: Sequence[PackReader], release: Callable[[], None]) -> None:
    for reader in readers:
        reader.close()
    release()


def require_sound(folder: ObjectFolder, pack_id: bytes) -> PackReader:
    """Hash every stored byte of a pack again; needs no key. Raises what is wrong with it; close the reader."""
    descriptor = folder.lease(pack_id)
    try:
        reader = PackReader(folder.path(pack_id))
        try:
            if reader.pack_id != pack_id:
                raise IntegrityError("pack-id", "the file is another pack", expected=pack_id.hex())
            for record in reader.records:
                reader.read_stored(record)
        except BaseException:
            reader.close()
            raise
        return reader
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class _Known:
    tokens: array[int]
    positions: RestorablePositions


class KnownTokens:
    """How far a pack goes along with the tokens asked for, behind the last node that they share.

    The token ids of the packs asked about last are remembered in this process; they never leave it.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._lock = Lock()

    def forget(self, pack_id: bytes) -> None:
        """Forget a pack."""
        with self._lock:
            self._known.pop(pack_id, None)

    def deepest(
        self, pack_id: bytes, open_pack: Callable[[], StoredPack], chain: TokenChain, block: int, most: int
    ) -> int | None:
        """The deepest position behind node ``block``, at most ``most``, at which the pack restores ``chain``'s tokens.

        Where content is bound behind the node, on either side, only nodes can tell: ``most`` must stop there.
        """
        with self._lock:
            known = self._known.get(pack_id)
        if known is None:
            with open_pack() as stored:
                known = _know(stored)
        with self._lock:
            self._known[pack_id] = known
            self._known.move_to_end(pack_id)
            while len(self._known) > _KNOWN_PACKS:
                self._known.popitem(last=False)
        first = block * BLOCK_TOKENS
        end = first
        stop = min(most, first + BLOCK_TOKENS, len(known.tokens), chain.content_from(first))
        while end < stop and chain.ids[end] == known.tokens[end]:
            end += 1
        return known.positions.deepest(end, first)


def _know(stored: StoredPack) -> _Known:
    cut = stored.chain.cut()
    count = min(cut.record.tokens, cut.record.position)
    carried = TOKENS in cut.specs and count
    tokens = array("i", bytes(cut.rows(TOKENS, 0, count))) if carried else array("i")
    return _Known(tokens, RestorablePositions(cut.geometry, cut.specs, cut.stored))
