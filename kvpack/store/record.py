"""The record beside a stored pack: what its index rows are rebuilt from.

Immutable, needs no key to be read and tells nothing about tokens: keys are hashes under the store's key. Canonical
MessagePack with a BLAKE3 of itself behind it. Round trip: ``Record.parse(r.to_bytes()) == r``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from kvpack.errors import FormatError, StoreError
from kvpack.model.geometry import PlaneKey, Unit
from kvpack.model.planes import LOGITS
from kvpack.model.snapshot import CutRecord
from kvpack.model.wire import HASH_BYTES, WireMap
from kvpack.pack import canonical
from kvpack.pack.manifest import Manifest, Parent
from kvpack.pack.view import PackCut
from kvpack.store.prefix import BLOCK_TOKENS, TokenChain, numerics_digest
from kvpack.store.protocol import EntryCut
from kvpack.store.restorable import RestorablePositions

__all__ = [
    "BETWEEN",
    "CUT",
    "LOGITS_HERE",
    "ON_THE_WAY",
    "RESTORES",
    "NodeRow",
    "Record",
    "describe",
    "restorable_positions",
]

_VERSION: Final = 1
RESTORES: Final = 1
"""The pack restores at this very position."""
CUT: Final = 2
"""It has a cut there."""
LOGITS_HERE: Final = 4
"""That cut has the last logits."""
BETWEEN: Final = 8
"""It restores at positions behind this node too: compare the tokens."""
ON_THE_WAY: Final = -1


@dataclass(frozen=True)
class NodeRow:
    """One way to find a pack: ``tail`` tokens behind ``node``.

    ``key`` is the final node where ``tail`` is not 0, else the hint of the token that follows in the pack. A ``tail``
    of ``ON_THE_WAY`` only says that the pack passes here: so that a node is known exactly if all before it are.
    """

    node: bytes
    tail: int
    key: bytes
    position: int
    flags: int


@dataclass(frozen=True)
class Record:
    """What a store knows of one pack. ``tail_bytes`` is the part of ``file_bytes`` that belongs to single cuts (sliding
    tails, states, logits); ``kept`` are the positions whose cuts outlive a collection; ``replaces`` the packs that it
    was flattened from; ``content`` the positions of content fields; ``continues`` the pack that it follows."""

    pack_id: bytes
    file_bytes: int
    tail_bytes: int
    created: int
    cuts: tuple[EntryCut, ...]
    nodes: tuple[NodeRow, ...]
    numerics: bytes
    signed: bool
    parent: Parent | None = None
    continues: bytes | None = None
    kept: tuple[int, ...] = ()
    replaces: tuple[bytes, ...] = ()
    content: tuple[int, ...] = ()

    def to_bytes(self) -> bytes:
        """The record's bytes, its hash last."""
        wire: dict[str, object] = {
            "content": list(self.content),
            "created": self.created,
            "cuts": [{"logits": c.logits, "position": c.position, "state_id": c.state_id} for c in self.cuts],
            "file_bytes": self.file_bytes,
            "kept": list(self.kept),
            "nodes": [[n.node, n.tail, n.key, n.position, n.flags] for n in self.nodes],
            "numerics": self.numerics,
            "pack_id": self.pack_id,
            "replaces": list(self.replaces),
            "signed": self.signed,
            "tail_bytes": self.tail_bytes,
            "version": _VERSION,
        }
        if self.parent is not None:
            wire["parent"] = {"position": self.parent.position, "state_id": self.parent.state_id}
        if self.continues is not None:
            wire["continues"] = self.continues
        body = canonical.encode(wire)
        return body + blake3(body).digest()

    @classmethod
    def parse(cls, buffer: bytes) -> Record:
        """Read a record; raises StoreError ``bad-record``."""
        body, digest = buffer[:-HASH_BYTES], buffer[-HASH_BYTES:]
        if len(buffer) <= HASH_BYTES or blake3(body).digest() != digest:
            raise StoreError("bad-record", "a record is damaged: its hash differs")
        try:
            wire = WireMap(canonical.decode(body), "")
            if wire.uint("version") != _VERSION:
                raise StoreError("bad-record", "a record is of another version", found=wire.uint("version"))
            return cls._from_wire(wire)
        except FormatError as error:
            raise StoreError("bad-record", f"a record cannot be read: {error.message}", field=error.field) from None

    @classmethod
    def _from_wire(cls, wire: WireMap) -> Record:
        parent = None
        if wire.has("parent"):
            named = wire.map("parent")
            parent = Parent(named.uint("position"), named.hash("state_id"))
        record = cls(
            pack_id=wire.hash("pack_id"),
            file_bytes=wire.uint("file_bytes"),
            tail_bytes=wire.uint("tail_bytes"),
            created=wire.uint("created"),
            cuts=tuple(_cut(cut) for cut in wire.maps("cuts")),
            nodes=tuple(_node(entry) for entry in wire.array("nodes")),
            numerics=wire.hash("numerics"),
            signed=wire.get("signed") is True,
            parent=parent,
            continues=wire.hash("continues") if wire.has("continues") else None,
            kept=wire.uints("kept"),
            replaces=tuple(entry for entry in wire.array("replaces") if isinstance(entry, bytes)),
            content=wire.uints("content"),
        )
        wire.done()
        return record


def _cut(wire: WireMap) -> EntryCut:
    return EntryCut(wire.uint("position"), wire.binary("state_id"), wire.get("logits") is True)


def _node(entry: object) -> NodeRow:
    if isinstance(entry, list) and len(entry) == 5:
        node, tail, key, position, flags = entry
        numbers = all(type(n) is int for n in (tail, position, flags)) and tail >= ON_THE_WAY
        if isinstance(node, bytes) and isinstance(key, bytes) and numbers:
            return NodeRow(node, tail, key, position, flags)
    raise StoreError("bad-record", "a record has a malformed node")


def restorable_positions(manifest: Manifest, parent: PackCut | None) -> RestorablePositions:
    """Where a pack of ``manifest`` restores between its cuts, with the rows of its parents added."""
    specs = {plane.spec.key: plane.spec for plane in manifest.planes}
    stored = {plane.spec.key: plane.rows for plane in manifest.planes}
    if parent is not None:
        for key, rows in parent.stored.items():
            if key in stored and specs[key].unit in (Unit.TOKEN, Unit.POOL):
                stored[key] = type(rows).union_of((rows, stored[key]))
    return RestorablePositions(manifest.geometry, specs, stored)


def node_rows(manifest: Manifest, chain: TokenChain, positions: RestorablePositions) -> tuple[NodeRow, ...]:
    """Every node under which a pack is found: its cuts, and each block at whose end it restores."""
    cuts = {cut.position: cut for cut in manifest.cuts}
    least = manifest.parent.position if manifest.parent is not None else 0
    rows: list[NodeRow] = []
    for block in range(least // BLOCK_TOKENS, manifest.position // BLOCK_TOKENS + 1):
        at = block * BLOCK_TOKENS
        flags = _cut_flags(cuts.get(at))
        if at > least and not flags and positions.at(at):
            flags |= RESTORES
        if positions.between_cuts and (at == 0 or positions.at(at)):
            flags |= BETWEEN
        if flags:
            hint = chain.hint(block) if at < manifest.position else b""
            rows.append(NodeRow(chain.nodes[block], 0, hint, at, flags))
        else:
            rows.append(NodeRow(chain.nodes[block], ON_THE_WAY, b"", at, 0))
    for at, cut in cuts.items():
        node, tail, key = chain.key_at(at)
        if tail:
            rows.append(NodeRow(node, tail, key, at, _cut_flags(cut)))
    return tuple(rows)


def _cut_flags(cut: CutRecord | None) -> int:
    if cut is None:
        return 0
    return RESTORES | CUT | (LOGITS_HERE if LOGITS.role in cut.extras else 0)


def describe(
    manifest: Manifest,
    chain: TokenChain,
    *,
    pack_id: bytes,
    file_bytes: int,
    stored_bytes: Callable[[PlaneKey], int],
    created: int,
    parent: PackCut | None = None,
    continues: bytes | None = None,
    kept: tuple[int, ...] = (),
    replaces: tuple[bytes, ...] = (),
    signed: bool = False,
) -> Record:
    """The record of a pack whose tokens are those of ``chain``."""
    tails = sum(stored_bytes(p.spec.key) for p in manifest.planes if p.window or p.spec.unit is Unit.STATE)
    return Record(
        pack_id=pack_id,
        file_bytes=file_bytes,
        tail_bytes=tails,
        created=created,
        cuts=tuple(EntryCut(c.position, c.state_id, LOGITS.role in c.extras) for c in manifest.cuts),
        nodes=node_rows(manifest, chain, restorable_positions(manifest, parent)),
        numerics=numerics_digest(manifest.identity),
        signed=signed,
        parent=manifest.parent,
        continues=continues,
        kept=kept,
        replaces=replaces,
        content=tuple(f.position for f in chain.content),
    )
