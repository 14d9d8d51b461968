"""Writing into a local store, in this order: reserve, write a private file, sync, name it, sync the folder, index."""

from __future__ import annotations

import secrets
import sqlite3
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvpack.errors import FormatError, IntegrityError, StoreError, UsageError
from kvpack.model.geometry import PlaneKey
from kvpack.model.planes import LOGITS, TOKENS
from kvpack.model.snapshot import CutView
from kvpack.pack.compose import CutRows, compose, require_continuation
from kvpack.pack.index import TileRecord, expected_tiles
from kvpack.pack.manifest import Manifest
from kvpack.pack.preamble import MANIFEST_OFFSET, RECORD_BYTES, TILE_ALIGN, align
from kvpack.pack.reader import PackReader
from kvpack.pack.view import MAX_CHAIN, PackCut
from kvpack.pack.writer import Signer, write_into
from kvpack.store import lineage, rows
from kvpack.store.finding import answering_blocks, usable_chain
from kvpack.store.objects import RECORD, Temporary, copy_bytes
from kvpack.store.opening import require_sound
from kvpack.store.prefix import BLOCK_TOKENS, ContentField, TokenChain, Tokens, numerics_digest, token_ids
from kvpack.store.protocol import Entry, StoredPack
from kvpack.store.record import CUT, LOGITS_HERE, Record, describe
from kvpack.store.space import Removal, reserve

if TYPE_CHECKING:
    from kvpack.store.local import LocalStore

__all__ = ["predecessor", "put_cuts", "put_file", "store_pack", "tokens_of"]

_PRODUCER: Final = ("kvpack-store", "1")
_PATIENCE: Final = 100


def put_cuts(
    store: LocalStore,
    cuts: Sequence[CutView],
    tokens: Tokens | None,
    *,
    content: Sequence[ContentField],
    parent: StoredPack | None,
    kept: Sequence[int],
    codec: str,
    sign: Signer | None,
) -> Entry:
    """See :meth:`kvpack.store.protocol.Store.put`."""
    if not cuts:
        raise UsageError("no-cuts", "a pack has at least one cut")
    last = cuts[-1]
    ids = tokens_of(last, tokens)
    chain = store.chain(ids, last.identity, last.geometry, content)
    stored = _stored_already(store, chain, cuts)
    found = store.index.read(lambda cursor: list(rows.entries(cursor, stored))) if stored is not None else []
    if found:  # a collection may have taken it meanwhile: then it is put again
        return found[0]
    base = parent.cut() if parent is not None else None
    manifest = compose(
        cuts,
        created=int(store.clock().now),
        producer=_PRODUCER,
        salt=secrets.token_bytes(32),
        parent=base.as_parent if base is not None else None,
    )
    if base is not None:
        require_continuation(last, base)
        if parent is not None and len(parent.names) >= MAX_CHAIN:
            raise StoreError("chain-too-long", "the parent's chain is full: flatten it first", expected=MAX_CHAIN)
    source = CutRows(cuts)
    continues = parent.pack_id if parent is not None else predecessor(store, chain, cuts[0].record.position)

    def write(temporary: Temporary) -> Record:
        written = write_into(temporary.descriptor, temporary.path, manifest, source, codec=codec, signer=sign)
        return record_of(
            temporary.path,
            written.pack_id,
            chain,
            created=manifest.created,
            base=base,
            continues=continues,
            kept=tuple(kept),
            signed=sign is not None,
        )

    return store_pack(store, manifest_bound(manifest), write)


def tokens_of(cut: CutView, tokens: Tokens | None) -> array[int]:
    """The tokens of a cut: those given, held to those that travel with it; raises UsageError."""
    position = cut.record.position
    carried = (
        array("i", bytes(cut.rows(TOKENS, 0, position)))
        if cut.record.tokens and TOKENS in cut.specs and position
        else None
    )
    if tokens is None and carried is None and position:
        raise UsageError("no-tokens", "no tokens travel with the cut, so the store must be told them", field="tokens")
    ids = carried if tokens is None else token_ids(tokens)
    if ids is None or len(ids) < position:
        found = 0 if ids is None else len(ids)
        if position:
            raise UsageError(
                "too-few-tokens", f"{found} tokens for a cut at {position}", expected=position, found=found
            )
        ids = array("i")
    ids = ids[:position]
    if carried is not None and ids != carried:
        raise UsageError("tokens-differ", "the tokens are not those that travel with the cut", field="tokens")
    return ids


def _stored_already(store: LocalStore, chain: TokenChain, cuts: Sequence[CutView]) -> bytes | None:
    """A pack that has every one of ``cuts``, with logits where they have them, of the same numerics, and is usable."""
    numerics = numerics_digest(cuts[-1].identity)

    def work(cursor: sqlite3.Cursor) -> set[bytes]:
        common: set[bytes] | None = None
        for cut in cuts:
            node, tail, key = chain.key_at(cut.record.position)
            needed = CUT | (LOGITS_HERE if LOGITS.role in cut.record.extras else 0)
            found = {
                c.pack_id
                for c in rows.candidates(cursor, node, tail, key or None, needed, 64)
                if c.numerics == numerics
            }
            common = found if common is None else common & found
        return common or set()

    return next((pack_id for pack_id in sorted(store.index.read(work)) if usable_chain(store, pack_id)), None)


def predecessor(store: LocalStore, chain: TokenChain, before: int) -> bytes | None:
    """The stored pack whose deepest cut lies on ``chain`` below ``before``: what the new pack continues."""

    for block in answering_blocks(store, chain.nodes):
        found = store.index.read(lambda cursor, block=block: _cut_under(cursor, chain, block, before))  # type: ignore[misc]
        if found is not None:
            return found
    return None


def _cut_under(cursor: sqlite3.Cursor, chain: TokenChain, block: int, before: int) -> bytes | None:
    most = min(len(chain) - block * BLOCK_TOKENS, BLOCK_TOKENS - 1)
    for tail in [*rows.tails(cursor, chain.nodes[block], most), 0]:
        key = chain.final(block, tail) if tail else None
        for found in rows.candidates(cursor, chain.nodes[block], tail, key, CUT, 1):
            if found.position < before:
                return found.pack_id
    return None


def manifest_bound(manifest: Manifest) -> int:
    """An upper bound of the size of a pack of ``manifest``, in bytes: nothing shrinks, every tile is padded."""
    tiles = sum(1 for _ in expected_tiles(manifest))
    raw = sum(plane.raw_bytes for plane in manifest.planes)
    cuts = 64 * len(manifest.cuts)
    front = MANIFEST_OFFSET + len(manifest.to_bytes()) + cuts + 64 + RECORD_BYTES * tiles
    return align(front, TILE_ALIGN) + raw + TILE_ALIGN * tiles


def record_of(
    path: Path,
    pack_id: bytes,
    chain: TokenChain,
    *,
    created: int,
    base: PackCut | None,
    continues: bytes | None,
    kept: tuple[int, ...] = (),
    signed: bool,
) -> Record:
    """The record of the pack file at ``path``, read back from its front."""
    with PackReader(path) as reader:
        if reader.pack_id != pack_id:
            raise IntegrityError("pack-id", "the file is not what was written to it", expected=pack_id.hex())
        return describe(
            reader.manifest,
            chain,
            pack_id=pack_id,
            file_bytes=reader.preamble.file_length,
            stored_bytes=plane_bytes(reader.manifest, reader.records),
            created=created,
            parent=base,
            continues=continues,
            kept=kept,
            signed=signed,
        )


def plane_bytes(manifest: Manifest, records: Sequence[TileRecord]) -> Callable[[PlaneKey], int]:
    """Bytes that each plane takes in a file, padding counted."""
    sizes: dict[PlaneKey, int] = {}
    for record in records:
        key = manifest.planes[record.tile.plane].spec.key
        sizes[key] = sizes.get(key, 0) + record.padded_end - record.offset
    return lambda key: sizes.get(key, 0)


def store_pack(store: LocalStore, most_bytes: int, write: Callable[[Temporary], Record]) -> Entry:
    """Let ``write`` fill a private file, and take it into the store; whatever fails, nothing half-done is visible."""
    folder = store.folder
    with folder.temporary(".pack") as temporary:
        token = temporary.path.name
        if store.quota is not None:
            _reserve(store, token, most_bytes)
        try:
            record = write(temporary)
            folder.sync(temporary)
            _publish(store, temporary, record)

            def add(cursor: sqlite3.Cursor) -> Entry:
                rows.add_record(cursor, record, pinned=folder.pinned(record.pack_id))
                cursor.execute("DELETE FROM reservations WHERE token = ?", (token,))
                # Read in the same transaction: once it ends, another process's collection may take the pack.
                return next(rows.entries(cursor, record.pack_id, new=True))

            return store.index.write(add)
        except BaseException:
            if store.quota is not None:
                _give_back(store, token)
            raise


def _reserve(store: LocalStore, token: str, need: int) -> None:
    quota = store.quota
    assert quota is not None
    with Removal(store.folder) as removal:
        removed = store.index.write(
            lambda cursor: reserve(cursor, store.folder, removal, token, need, quota, store.clock())
        )
        removal.finish(removed)


def _give_back(store: LocalStore, token: str) -> None:
    def work(cursor: sqlite3.Cursor) -> None:
        cursor.execute("DELETE FROM reservations WHERE token = ?", (token,))

    try:
        store.index.write(work)
    except (sqlite3.Error, OSError):
        return  # the lock of the private file goes with it, and the next writer gives the reservation back


def _publish(store: LocalStore, temporary: Temporary, record: Record) -> None:
    """Name the record, then the object: an object without a record could not be found again."""
    folder = store.folder
    with folder.temporary(".record") as beside:
        folder.fill(beside, record.to_bytes())
        folder.sync(beside)
        if not folder.publish(beside, record.pack_id, RECORD):
            folder.replace(beside, record.pack_id, RECORD)
        if not folder.publish(temporary, record.pack_id):
            _repair(store, temporary, record)
        folder.share(temporary)
        folder.sync_folder(folder.path(record.pack_id).parent)


def _repair(store: LocalStore, temporary: Temporary, record: Record) -> None:
    """The name is taken: keep a sound pack, put a damaged one aside and take its place, wait for one that is going."""
    folder = store.folder
    for _ in range(_PATIENCE):
        try:
            require_sound(folder, record.pack_id).close()
            return
        except FileNotFoundError:
            time.sleep(0.02)
        except (OSError, FormatError, IntegrityError, UsageError):
            folder.quarantine(folder.path(record.pack_id))
        if folder.publish(temporary, record.pack_id):
            return
    raise StoreError("busy", "another writer has the same pack in hand", found=record.pack_id.hex())


def put_file(store: LocalStore, path: Path, tokens: Tokens | None, content: Sequence[ContentField]) -> Entry:
    """See :meth:`kvpack.store.local.LocalStore.put_file`."""
    with PackReader(path, check=store.check() if store.check is not None else None) as reader:
        manifest = reader.manifest
        for record in reader.records:
            reader.read_stored(record)
        named = manifest.parent
        held = None if named is None else store.index.read(lambda c: lineage.pack_with_state(c, named.state_id))
        if named is not None and held is None:
            raise StoreError("parent-missing", "the store lacks the pack that this one continues", field="parent")
        parent = store.open_pack(held) if held is not None else None
        try:
            base = parent.cut(named.position) if parent is not None and named is not None else None
            whole = PackCut([reader, *(parent.chain.readers if parent is not None else ())], manifest.cuts[-1])
            ids = tokens_of(whole, tokens)
            chain = store.chain(ids, manifest.identity, manifest.geometry, content)
            size = reader.preamble.file_length
            signed = any(reader.signature_region)

            def write(temporary: Temporary) -> Record:
                with open(path, "rb") as source:
                    copy_bytes(source.fileno(), temporary.descriptor)
                continues = held if held is not None else predecessor(store, chain, manifest.cuts[0].position)
                made = int(store.clock().now)
                return record_of(
                    temporary.path, reader.pack_id, chain, created=made, base=base, continues=continues, signed=signed
                )

            return store_pack(store, size, write)
        finally:
            if parent is not None:
                parent.close()
