"""Turn after turn: a delta stores what is new, a chain that has grown long becomes one pack again.

A delta holds the rows that follow its parent, and one sliding tail and one state a cut. Old tails and states are what
a collection gets rid of: it flattens the packs of a conversation into one that has the kept cuts only, by copying
their tiles as they are stored.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final

from kvpack.errors import CompatibilityError, IntegrityError, StoreError
from kvpack.model.geometry import PlaneKey, Unit
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import CutView
from kvpack.pack.compose import CutRows, compose
from kvpack.pack.index import Tile
from kvpack.pack.manifest import Manifest
from kvpack.pack.reader import PackReader
from kvpack.pack.view import MAX_CHAIN, PackChain, PackCut
from kvpack.pack.writer import EncodedTile, Signer, TileCopy, write_into
from kvpack.store import lineage
from kvpack.store.objects import Temporary
from kvpack.store.prefix import BLOCK_TOKENS, ContentField, Tokens
from kvpack.store.protocol import Entry, Store, StoredPack
from kvpack.store.putting import manifest_bound, plane_bytes, store_pack, tokens_of
from kvpack.store.record import (
    BETWEEN,
    CUT,
    LOGITS_HERE,
    ON_THE_WAY,
    RESTORES,
    NodeRow,
    Record,
    restorable_positions,
)

if TYPE_CHECKING:
    from kvpack.store.local import LocalStore

__all__ = ["flatten_chain", "put_turn"]

_ALIGN: Final = 32


def put_turn(
    store: Store,
    cut: CutView,
    tokens: Tokens | None = None,
    *,
    content: Sequence[ContentField] = (),
    keep_cuts: int = 1,
    codec: str = "split",
    sign: Signer | None = None,
) -> Entry:
    """Store a turn of a conversation: only what follows the deepest cut of it that is stored.

    The cuts of the last ``keep_cuts`` turns outlive a collection; of older turns only the growing rows stay. A chain
    of eight is flattened before it grows. Where the stored rows are not this session's (other numerics, other bytes)
    the turn is stored whole.
    """
    position = cut.record.position
    ids = tokens_of(cut, tokens)
    hit = store.longest(
        ids, cut.identity, cut.geometry, content=content, only_cuts=True, need_logits=False, capacity=position - 1
    )
    parent = store.get(hit) if hit is not None and hit.same_numerics and hit.position else None
    if parent is None:
        return store.put(cut, ids, content=content, kept=(position,), codec=codec, sign=sign)
    kept: tuple[int, ...] = (*(at for at in store.entry(parent.pack_id).kept if at < position), position)[
        -max(1, keep_cuts) :
    ]
    if len(parent.names) >= MAX_CHAIN:
        parent = _flattened(store, parent, sign)
        if parent is None:
            return store.put(cut, ids, content=content, kept=kept, codec=codec, sign=sign)
    with parent:
        try:
            return store.put(cut, ids, content=content, parent=parent, kept=kept, codec=codec, sign=sign)
        except CompatibilityError as error:
            if error.code not in ("not-a-continuation", "parent-too-deep"):
                raise
    return store.put(cut, ids, content=content, kept=(position,), codec=codec, sign=sign)


def _flattened(store: Store, parent: StoredPack, sign: Signer | None) -> StoredPack | None:
    """``parent`` in a chain that has room: what is its own made one pack, or everything; None where that fails."""
    at = parent.cut_position
    parent.close()
    flat = store.flatten(parent.pack_id, whole=False, sign=sign)
    if flat.chain >= MAX_CHAIN:
        flat = store.flatten(flat.pack_id, sign=sign)
    found = store.get(flat.pack_id)
    if found is not None and found.chain.readers[0].manifest.cut_at(at) is None:
        found.close()
        return None
    if found is not None:
        found.cut_position = at
    return found


def flatten_chain(store: LocalStore, stored: StoredPack, count: int, *, sign: Signer | None) -> Entry:
    """Make the newest ``count`` packs of an open chain one, a delta on the rest; what only they need is retired.

    Cuts that nobody keeps are left out. Raises StoreError ``signer-needed``: a signed pack is not replaced by an
    unsigned one.
    """
    merged = stored.names[:count]
    readers = stored.chain.readers
    records = [store.record(name) for name in stored.names]
    if any(record.signed for record in records[:count]) and sign is None:
        raise StoreError(
            "signer-needed",
            "the packs are signed, and the store has no key to sign the flattened one",
            hint="give a key",
        )
    if any(reader.preamble.encrypted for reader in readers):
        raise StoreError("encrypted", "an encrypted chain cannot be flattened without its keys")
    positions = kept_positions(records[:count])
    cuts = [_KeptCut(stored.chain, at) for at in sorted(positions)]
    base = stored.chain.cut(_parent_position(readers[count - 1])) if count < len(readers) else None
    newest = readers[0].manifest
    manifest = compose(
        cuts,
        created=int(store.clock().now),
        producer=newest.producer,
        salt=secrets.token_bytes(32),
        parent=base.as_parent if base is not None else None,
        epoch=newest.epoch,
        expires=newest.expires,
        stream=newest.stream,
    )
    states = [cut.record.state_id for cut in cuts]
    retired = store.index.read(lambda cursor: lineage.superseded(cursor, merged, states))

    def write(temporary: Temporary) -> Record:
        written = write_into(
            temporary.descriptor,
            temporary.path,
            manifest,
            CutRows(cuts),
            codec="split",
            signer=sign,
            copy=_copies(manifest, readers, cuts),
        )
        for cut in cuts:
            if written.state_ids[cut.record.position] != cut.record.state_id:
                raise IntegrityError("state-id", "flattening changed a state", field="state_id")
        return _record(temporary, written.pack_id, records, base, retired, signed=sign is not None)

    return store_pack(store, manifest_bound(manifest), write)


class _KeptCut(PackCut):
    """A cut of a chain with its own tail alone, not those that its pack and its parents store for other cuts.

    The tail reaches from the next multiple of 32 rows at or before ``window`` rows: enough for every placement.
    """

    def __init__(self, chain: PackChain, position: int) -> None:
        at = next(at for at, reader in enumerate(chain.readers) if reader.manifest.cut_at(position) is not None)
        super().__init__(chain.readers[at:], chain.cut(position).record)

    @cached_property
    def stored(self) -> Mapping[PlaneKey, RowSet]:
        """Plane key to the rows that are worth keeping."""
        held = dict(super().stored)
        for key, layer, plane in self.geometry.planes():
            if layer.window is not None and plane.unit is Unit.TOKEN:
                rows = self.reader.manifest.semantic(key, self.record)
                first = max(0, rows.end - layer.window) // _ALIGN * _ALIGN
                held[key] = held[key].intersection(RowSet.union_of((rows, RowSet.of((first, rows.end)))))
        return held


def kept_positions(records: Sequence[Record]) -> set[int]:
    """The cuts that a flattened pack keeps of ``records`` (newest first): those of packs that keep all, the newest, and
    those that it names."""
    newest = records[0]
    kept = {newest.cuts[-1].position, *newest.kept}
    return {cut.position for record in records for cut in record.cuts if not record.kept or cut.position in kept}


def _parent_position(reader: PackReader) -> int:
    assert reader.manifest.parent is not None
    return reader.manifest.parent.position


def _copies(manifest: Manifest, readers: Sequence[PackReader], cuts: Sequence[PackCut]) -> TileCopy:
    """Tiles that a source stores in exactly this extent are taken over as stored."""

    def copy(tile: Tile) -> EncodedTile | None:
        spec = manifest.planes[tile.plane].spec
        if spec.unit is Unit.STATE:
            cut = [cut for cut in cuts if spec.key in cut.specs][tile.ordinal]
            return _stored(cut.reader, spec.key, tile, cut.reader.manifest.ordinal(spec.key, cut.record))
        for reader in readers:
            found = _stored(reader, spec.key, tile, 0)
            if found is not None:
                return found
        return None

    return copy


def _stored(reader: PackReader, key: PlaneKey, tile: Tile, ordinal: int) -> EncodedTile | None:
    number = reader.manifest.numbers.get(key)
    record = reader.tile_at.get((number, ordinal, tile.first, tile.end)) if number is not None else None
    if record is None:
        return None
    stored = reader.read_stored(record)
    return EncodedTile(tile, record.codec, stored, record.raw_length, record.stored_hash, record.raw_hash)


def _record(
    temporary: Temporary,
    pack_id: bytes,
    records: Sequence[Record],
    base: PackCut | None,
    retired: tuple[bytes, ...],
    *,
    signed: bool,
) -> Record:
    """The flattened pack's record: the nodes of its sources, at which it restores; no token is needed for it."""
    with PackReader(temporary.path) as reader:
        manifest = reader.manifest
        sizes = plane_bytes(manifest, reader.records)
        planes = manifest.planes
        tails = sum(sizes(p.spec.key) for p in planes if p.window or p.spec.unit is Unit.STATE)
        return Record(
            pack_id=pack_id,
            file_bytes=reader.preamble.file_length,
            tail_bytes=tails,
            created=manifest.created,
            cuts=tuple(c for r in reversed(records) for c in r.cuts if manifest.cut_at(c.position) is not None),
            nodes=_nodes(manifest, records, base),
            numerics=records[0].numerics,
            signed=signed,
            parent=manifest.parent,
            continues=records[-1].continues,
            kept=records[0].kept,
            replaces=retired,
            content=records[0].content,
        )


def _nodes(manifest: Manifest, records: Sequence[Record], base: PackCut | None) -> tuple[NodeRow, ...]:
    positions = restorable_positions(manifest, base)
    least = manifest.parent.position if manifest.parent is not None else 0
    logits = {cut.position for record in records for cut in record.cuts if cut.logits}
    found: dict[tuple[bytes, bytes], NodeRow] = {}
    for row in (row for record in records for row in record.nodes):
        at, flags = row.position, 0
        if manifest.cut_at(at) is not None:
            flags |= RESTORES | CUT | (LOGITS_HERE if at in logits else 0)
        elif at > least and positions.at(at):
            flags |= RESTORES
        if row.tail <= 0 and positions.between_cuts and (at == 0 or positions.at(at)):
            flags |= BETWEEN
        if row.tail > 0 and not flags:
            continue
        if at < least // BLOCK_TOKENS * BLOCK_TOKENS:
            continue
        tail = max(0, row.tail) if flags else ON_THE_WAY
        name = (row.node, row.key if tail > 0 else b"")
        known = found.get(name)
        if known is None or not known.key:  # a later pack knows which token follows
            found[name] = NodeRow(row.node, tail, row.key if flags else b"", at, flags)
    return tuple(found.values())
