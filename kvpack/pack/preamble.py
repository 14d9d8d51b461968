"""The preamble and the arithmetic of the front (spec, sections 2 to 4 and 12). Pure functions over buffers."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from kvpack.errors import FormatError, IntegrityError

__all__ = [
    "FLAG_ENCRYPTED",
    "HASHED_BYTES",
    "MAGIC",
    "MANIFEST_OFFSET",
    "PREAMBLE_BYTES",
    "RECORD_BYTES",
    "TILE_ALIGN",
    "Limits",
    "Preamble",
    "align",
    "front_hash",
    "pack_id",
    "signed_bytes",
]

MAGIC: Final = b"\x89KVP\r\n\x1a\n"
PREAMBLE_BYTES: Final = 128
HASHED_BYTES: Final = 96
MANIFEST_OFFSET: Final = 4096
MANIFEST_ALIGN: Final = 64
TILE_ALIGN: Final = 4096
RECORD_BYTES: Final = 96
HASH_BLAKE3: Final = 1
FLAG_ENCRYPTED: Final = 1
_LAYOUT: Final = struct.Struct("<8sHHB3sIIQQQQ40s32s")
_FOREIGN: Final = (
    (b"KVPKP1", "foreign-kvpack", "a file of another project that is also called kvpack (KVPKP1)"),
    (b"IOKVPK1", "foreign-kvpack", "a file of another project that is also called kvpack (IOKVPK1)"),
    (b"\x89KVP\n", "bad-magic", "a pack that went through a text-mode copy (its line ends were changed)"),
    (b"\x89KVP\r\r\n", "bad-magic", "a pack that went through a text-mode copy (its line ends were changed)"),
    (b"GGUF", "bad-magic", "a GGUF model"),
    (b"ggsq", "bad-magic", "a llama.cpp session file"),
    (b"qsgg", "bad-magic", "a llama.cpp slot file"),
    (b"PK\x03\x04", "bad-magic", "a zip archive (a torch checkpoint or an .npz file)"),
    (b"\x93NUMPY", "bad-magic", "a NumPy array"),
    (b"\x1f\x8b", "bad-magic", "a gzip file"),
    (b"\x28\xb5\x2f\xfd", "bad-magic", "a zstd file"),
)


@dataclass(frozen=True)
class Limits:
    """What a reader is willing to read; lower them freely, sizes in bytes."""

    manifest_bytes: int = 16 << 20
    tiles: int = 4_194_304
    planes: int = 65_536
    cuts: int = 4_096
    recipients: int = 64
    planes_by_cuts: int = 4_194_304
    raw_tile_bytes: int = 16 << 20
    file_bytes: int = 16 << 40


def align(number: int, step: int) -> int:
    """The smallest multiple of ``step`` that is not less than ``number``."""
    return -(-number // step) * step


@dataclass(frozen=True)
class Preamble:
    """The first 128 bytes; lengths and offsets in bytes. Round trip: ``parse(p.to_bytes()) == p``."""

    tile_count: int
    manifest_length: int
    payload_offset: int
    file_length: int
    front_hash: bytes
    flags: int = 0
    minor: int = 0

    @classmethod
    def for_front(cls, *, manifest_length: int, tile_count: int, file_length: int = 0) -> Preamble:
        """A preamble whose offsets follow from its lengths; the hash is still to come."""
        index_end = MANIFEST_OFFSET + align(manifest_length, MANIFEST_ALIGN) + RECORD_BYTES * tile_count
        return cls(
            tile_count=tile_count,
            manifest_length=manifest_length,
            payload_offset=align(index_end, TILE_ALIGN),
            file_length=file_length,
            front_hash=bytes(32),
        )

    @property
    def index_offset(self) -> int:
        """Where the tile index begins."""
        return MANIFEST_OFFSET + align(self.manifest_length, MANIFEST_ALIGN)

    @property
    def index_length(self) -> int:
        """Bytes of the tile index, without padding."""
        return RECORD_BYTES * self.tile_count

    @property
    def encrypted(self) -> bool:
        """Whether the payload is encrypted."""
        return bool(self.flags & FLAG_ENCRYPTED)

    def to_bytes(self) -> bytes:
        """The 128 bytes."""
        return _LAYOUT.pack(
            MAGIC,
            1,
            self.minor,
            HASH_BLAKE3,
            bytes(3),
            self.flags,
            self.tile_count,
            self.manifest_length,
            self.index_length,
            self.payload_offset,
            self.file_length,
            bytes(40),
            self.front_hash,
        )

    @classmethod
    def parse(cls, head: bytes, file_size: int, limits: Limits) -> Preamble:
        """Steps 1 to 4 of a reader, over the first bytes of a file of ``file_size`` bytes (spec, section 13)."""
        _require_magic(head, file_size)
        if file_size < MANIFEST_OFFSET or len(head) < PREAMBLE_BYTES:
            raise FormatError(
                "too-short",
                f"the file has {file_size} bytes, and the front of a pack alone has {MANIFEST_OFFSET}",
                expected=MANIFEST_OFFSET,
                found=file_size,
                hint="the file was cut off; copy it again",
            )
        (_, major, minor, hash_id, zeros, flags, tiles, manifest, index, payload, length, zeros2, front) = (
            _LAYOUT.unpack(head[:PREAMBLE_BYTES])
        )
        if major != 1:
            raise FormatError(
                "unsupported-version",
                f"the pack has the format version {major}.{minor}, this reader knows version 1",
                field="major",
                expected=1,
                found=major,
                hint="update kvpack",
            )
        if hash_id != HASH_BLAKE3:
            raise FormatError(
                "unsupported-hash", f"hash id {hash_id} is not known", field="hash", expected=1, found=hash_id
            )
        if flags & ~FLAG_ENCRYPTED:
            raise FormatError(
                "unsupported-flag",
                f"the preamble has unknown flags {flags:#x}",
                field="flags",
                expected="0 or 1",
                found=flags,
            )
        if any(zeros) or any(zeros2):
            raise FormatError("reserved-not-zero", "a reserved byte of the preamble is not zero", field="reserved")
        preamble = cls(tiles, manifest, payload, length, front, flags, minor)
        preamble._require_lengths(index, file_size, limits)
        return preamble

    def _require_lengths(self, index_length: int, file_size: int, limits: Limits) -> None:
        for name, found, most in (
            ("tile_count", self.tile_count, limits.tiles),
            ("manifest_length", self.manifest_length, limits.manifest_bytes),
            ("file_length", self.file_length, limits.file_bytes),
        ):
            if found > most:
                raise FormatError(
                    "limit-exceeded",
                    f"{name} is {found}, at most {most} is read",
                    field=name,
                    expected=most,
                    found=found,
                )
        if self.manifest_length < 1:
            raise FormatError(
                "bad-length", "manifest_length is 0", field="manifest_length", expected="1 or more", found=0
            )
        derived = Preamble.for_front(manifest_length=self.manifest_length, tile_count=self.tile_count)
        for name, found, wanted in (
            ("index_length", index_length, self.index_length),
            ("payload_offset", self.payload_offset, derived.payload_offset),
        ):
            if found != wanted:
                raise FormatError(
                    "bad-length", f"{name} is {found}, and {wanted} follows", field=name, expected=wanted, found=found
                )
        if self.file_length < self.payload_offset or self.file_length % TILE_ALIGN:
            raise FormatError(
                "bad-length",
                f"file_length {self.file_length} is not a whole number of tiles behind the front",
                field="file_length",
                found=self.file_length,
            )
        if file_size < self.file_length:
            raise FormatError(
                "truncated",
                f"the file has {file_size} bytes of {self.file_length}",
                field="file_length",
                expected=self.file_length,
                found=file_size,
                hint="the file was cut off; copy it again",
            )
        if file_size > self.file_length:
            raise FormatError(
                "trailing-bytes",
                f"{file_size - self.file_length} bytes follow the end of the pack",
                field="file_length",
                expected=self.file_length,
                found=file_size,
            )


def _require_magic(head: bytes, file_size: int) -> None:
    if file_size == 0:
        raise FormatError("empty-file", "the file is empty", expected=MANIFEST_OFFSET, found=0)
    if head[:8] == MAGIC:
        return
    if MAGIC.startswith(head[:8]):
        raise FormatError(
            "too-short",
            f"the file has {file_size} bytes, and the front of a pack alone has {MANIFEST_OFFSET}",
            expected=MANIFEST_OFFSET,
            found=file_size,
        )
    for magic, code, name in _FOREIGN:
        if head.startswith(magic):
            raise FormatError(code, f"this is not a kvpack file but {name}", field="magic", found=head[:8].hex())
    if len(head) > 16 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < file_size:
        raise FormatError("bad-magic", "this is not a kvpack file but a safetensors file", field="magic")
    raise FormatError(
        "bad-magic",
        f"this is not a kvpack file (it begins with {head[:8].hex(' ')})",
        field="magic",
        found=head[:8].hex(),
    )


def signed_bytes(preamble: bytes, manifest: bytes) -> bytes:
    """What a signature covers: the preamble up to ``front_hash``, and the manifest without padding."""
    return preamble[:HASHED_BYTES] + manifest


def pack_id(signed: bytes) -> bytes:
    """The pack's name: BLAKE3 of the signed bytes, the same whoever signs them."""
    return blake3(signed).digest()


def front_hash(preamble: bytes, signatures: bytes, manifest: bytes) -> bytes:
    """The hash that finds rot anywhere in preamble, signature slots and manifest."""
    hasher = blake3(preamble[:HASHED_BYTES])
    hasher.update(signatures)
    hasher.update(manifest)
    return hasher.digest()


def require_front_hash(preamble: Preamble, head: bytes, signatures: bytes, manifest: bytes) -> None:
    """Step 5: the front is what was written."""
    found = front_hash(head, signatures, manifest)
    if found != preamble.front_hash:
        raise IntegrityError(
            "front-hash",
            "the front of the pack is damaged: its hash differs",
            field="front_hash",
            expected=preamble.front_hash.hex(),
            found=found.hex(),
            hint="copy the file again from where it was made",
        )
