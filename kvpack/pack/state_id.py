"""State ids: the name of the state at a cut, whatever pack holds it (spec, section 10)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from blake3 import blake3

from kvpack.model.encoding import AnyEncoding, CompositeEncoding
from kvpack.model.geometry import PlaneKey, Scope
from kvpack.model.planes import PlaneSpec
from kvpack.model.snapshot import CutRecord
from kvpack.pack.manifest import Manifest

__all__ = ["pieces", "state_id"]

_DOMAIN = b"kvpack-state-v1\x00"


def pieces(manifest: Manifest, key: PlaneKey, cut: CutRecord) -> Iterator[tuple[int, int]]:
    """A plane's semantic range at ``cut``, split at absolute multiples of its block, in order."""
    spec = manifest.planes[manifest.numbers[key]].spec
    for first, end in manifest.semantic(key, cut):
        yield from spec.pieces(first, end)


def state_id(manifest: Manifest, cut: CutRecord, piece_hash: Callable[[PlaneKey, int, int], bytes]) -> bytes:
    """The state id of ``cut``; ``piece_hash(key, first, end)`` gives BLAKE3 of one piece's raw bytes."""
    hasher = blake3(_DOMAIN)
    hasher.update(struct.pack("<QQq", cut.position, cut.draft_position or 0, cut.rope_delta))
    for plane in manifest.planes:
        key = plane.spec.key
        if key.scope == Scope.SESSION.value:
            continue
        name = _plane_name(plane.spec).encode()
        parts = manifest.semantic(key, cut).ranges
        hasher.update(struct.pack("<I", len(name)) + name + struct.pack("<I", len(parts)))
        hashes = {first: piece_hash(key, first, end) for first, end in pieces(manifest, key, cut)}
        for first, end in parts:
            hasher.update(struct.pack("<QQ", first, end))
            for at, digest in hashes.items():
                if first <= at < end:
                    hasher.update(digest)
    return hasher.digest()


def _plane_name(spec: PlaneSpec) -> str:
    return f"{spec.key}:{_encoding_name(spec.encoding)}:{spec.row_bytes}"


def _encoding_name(encoding: AnyEncoding) -> str:
    if isinstance(encoding, CompositeEncoding):
        return "{" + ",".join(f"{f.name}={f.encoding.name}*{f.count}" for f in encoding.fields) + "}"
    return encoding.name
