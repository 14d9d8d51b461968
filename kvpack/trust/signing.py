"""Signatures over the front of a pack: the signed message, the slots of a pack, detached signatures.

What is signed are exact bytes that this module is handed and never parses: the preamble up to its hash, then the
manifest. They are signed under a payload type (DSSE v1 pre-authentication encoding), so that a signature made for
another purpose with the same key can never pass for one of these.

Sources: DSSE v1 protocol (PAE); RFC 8032 (Ed25519); OpenSSH's PROTOCOL.sshsig (SSHSIG).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from blake3 import blake3

from kvpack.errors import FormatError, TrustError, UsageError
from kvpack.trust.keys import PublicKey, SigningKey, parse_ssh_public_key
from kvpack.trust.wire import WireReader, wire_string

__all__ = [
    "DETACHED_SIZE",
    "NAMESPACE",
    "PAYLOAD_TYPE",
    "REGION_SIZE",
    "SLOT_COUNT",
    "SLOT_SIZE",
    "DetachedSignature",
    "SignatureAlgorithm",
    "Slot",
    "build_region",
    "check",
    "pack_id",
    "parse_region",
    "pre_authentication_encoding",
    "sign",
    "slot_from_sshsig",
    "slot_to_sshsig",
]

PAYLOAD_TYPE = b"application/vnd.kvpack.front.v1"
NAMESPACE = "kvpack-manifest-v1"

SLOT_SIZE = 496
SLOT_COUNT = 8
REGION_SIZE = SLOT_SIZE * SLOT_COUNT
DETACHED_SIZE = 32 + SLOT_SIZE

_SLOT = struct.Struct("<HHI32s448s8s")
_MAX_SIGNATURE = 448
_ED25519_SIZE = 64
_PACK_ID_SIZE = 32

_SSHSIG_MAGIC = b"SSHSIG"
_SSHSIG_VERSION = 1
_SSHSIG_BEGIN = "-----BEGIN SSH SIGNATURE-----"
_SSHSIG_END = "-----END SSH SIGNATURE-----"


class SignatureAlgorithm(Enum):
    """What the signature bytes of a slot are; the values are those of the slot's first field."""

    ED25519 = 1
    SSHSIG = 2

    def to_wire(self) -> int:
        """The number in the slot."""
        return self.value

    @classmethod
    def from_wire(cls, number: int) -> SignatureAlgorithm:
        """The algorithm with that number. Raises FormatError ``bad-signature-slot`` for a number without one."""
        try:
            return cls(number)
        except ValueError as error:
            raise _bad_slot("algorithm", "the signature algorithm is unknown", "1 or 2", number) from error


def _bad_slot(field: str, message: str, expected: object = None, found: object = None) -> FormatError:
    return FormatError("bad-signature-slot", message, field=field, expected=expected, found=found)


@dataclass(frozen=True)
class Slot:
    """One signature: its algorithm, the 32-byte id of the key that is said to have made it, the signature's bytes.

    The key id is a hint for finding a key that the reader has; by itself it proves nothing.
    Raises FormatError ``bad-signature-slot`` for lengths that no slot can have.
    """

    algorithm: SignatureAlgorithm
    key_id: bytes
    signature: bytes

    def __post_init__(self) -> None:
        if len(self.key_id) != 32:
            raise _bad_slot("key_id", "a key id has 32 bytes", 32, len(self.key_id))
        length = len(self.signature)
        if self.algorithm is SignatureAlgorithm.ED25519 and length != _ED25519_SIZE:
            raise _bad_slot("length", "an Ed25519 signature has 64 bytes", _ED25519_SIZE, length)
        if not 1 <= length <= _MAX_SIGNATURE:
            raise _bad_slot("length", "the signature's length is out of bounds", f"1 to {_MAX_SIGNATURE}", length)

    def to_bytes(self) -> bytes:
        """The slot's 496 bytes."""
        return _SLOT.pack(self.algorithm.to_wire(), len(self.signature), 0, self.key_id, self.signature, bytes(8))

    @classmethod
    def from_bytes(cls, encoded: bytes) -> Slot:
        """The slot in 496 bytes. Raises FormatError ``bad-signature-slot``, for an empty slot as well."""
        if len(encoded) != SLOT_SIZE:
            raise _bad_slot("slot", "a signature slot has 496 bytes", SLOT_SIZE, len(encoded))
        algorithm, length, reserved, key_id, signature, tail = _SLOT.unpack(encoded)
        if algorithm == 0:
            raise _bad_slot("algorithm", "the signature slot is marked empty where a signature belongs", "1 or 2", 0)
        known = SignatureAlgorithm.from_wire(algorithm)
        if reserved or any(tail):
            raise _bad_slot("reserved", "reserved bytes of the signature slot are not zero")
        if length > _MAX_SIGNATURE:
            raise _bad_slot("length", "the signature's length is out of bounds", f"1 to {_MAX_SIGNATURE}", length)
        if any(signature[length:]):
            raise _bad_slot("signature", "the bytes after the signature are not zero")
        return cls(known, key_id, signature[:length])


# --- the region of a pack -------------------------------------------------------------------------------------------


def parse_region(region: bytes) -> tuple[Slot, ...]:
    """The non-empty slots of a pack's signature region (3968 bytes), in order.

    Raises FormatError ``bad-signature-slot``: a slot that is not well formed (``field`` is ``signatures[i].…``), a
    signature after an empty slot, a key id that occurs twice.
    """
    if len(region) != REGION_SIZE:
        raise _bad_slot("signatures", "the signature region has 3968 bytes", REGION_SIZE, len(region))
    slots: list[Slot] = []
    ended = False
    for number in range(SLOT_COUNT):
        encoded = region[number * SLOT_SIZE : (number + 1) * SLOT_SIZE]
        if not any(encoded):
            ended = True
            continue
        if ended:
            raise _bad_slot(f"signatures[{number}]", "a signature follows an empty slot")
        try:
            slots.append(Slot.from_bytes(encoded))
        except FormatError as error:
            error.field = f"signatures[{number}].{error.field}"
            raise
    _require_distinct(slots)
    return tuple(slots)


def build_region(slots: Sequence[Slot]) -> bytes:
    """The 3968-byte signature region that holds ``slots``, filled from the front.

    Raises UsageError ``too-many-signatures`` for more than eight, FormatError for two slots of one key.
    """
    if len(slots) > SLOT_COUNT:
        raise UsageError(
            "too-many-signatures",
            "a pack has room for 8 signatures",
            expected=f"<= {SLOT_COUNT}",
            found=len(slots),
            hint="keep further signatures as detached files",
        )
    _require_distinct(slots)
    return b"".join(slot.to_bytes() for slot in slots).ljust(REGION_SIZE, b"\x00")


def _require_distinct(slots: Sequence[Slot]) -> None:
    seen: set[bytes] = set()
    for number, slot in enumerate(slots):
        if slot.key_id in seen:
            raise _bad_slot(f"signatures[{number}].key_id", "one key id occurs in two signature slots")
        seen.add(slot.key_id)


# --- signing and checking -------------------------------------------------------------------------------------------


def pack_id(signed_bytes: bytes) -> bytes:
    """The 32 bytes that name a pack: BLAKE3 of exactly what is signed."""
    return blake3(signed_bytes).digest()


def pre_authentication_encoding(signed_bytes: bytes) -> bytes:
    """The message that a signature covers: payload type and signed bytes, each with its length in decimal."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE, len(signed_bytes), signed_bytes)


def sign(signed_bytes: bytes, key: SigningKey, algorithm: SignatureAlgorithm = SignatureAlgorithm.ED25519) -> Slot:
    """``key``'s signature. SSHSIG costs 124 bytes more of the slot and can be checked by a stock ``ssh-keygen``."""
    message = pre_authentication_encoding(signed_bytes)
    if algorithm is SignatureAlgorithm.ED25519:
        return Slot(algorithm, key.public.key_id, key.sign(message))
    signature = wire_string(b"ssh-ed25519") + wire_string(key.sign(_sshsig_message(message, "sha512")))
    blob = b"".join(
        (
            _SSHSIG_MAGIC,
            _SSHSIG_VERSION.to_bytes(4, "big"),
            wire_string(key.public.ssh_blob),
            wire_string(NAMESPACE.encode()),
            wire_string(b""),
            wire_string(b"sha512"),
            wire_string(signature),
        )
    )
    return Slot(algorithm, key.public.key_id, blob)


def check(slot: Slot, signed_bytes: bytes, key: PublicKey) -> bool:
    """Whether ``slot`` is ``key``'s signature of these bytes. Every reason against it, also a malformed SSHSIG blob or
    one that names another key, answers False: a signature that cannot be checked is no signature."""
    if slot.key_id != key.key_id:
        return False
    message = pre_authentication_encoding(signed_bytes)
    if slot.algorithm is SignatureAlgorithm.ED25519:
        return key.verify(slot.signature, message)
    parsed = _parse_sshsig(slot.signature)
    if parsed is None or parsed.key_blob != key.ssh_blob or parsed.namespace != NAMESPACE.encode():
        return False
    return key.verify(parsed.signature, _sshsig_message(message, parsed.hash_name))


# --- SSHSIG ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SshSignature:
    key_blob: bytes
    namespace: bytes
    hash_name: str
    signature: bytes


def _sshsig_message(message: bytes, hash_name: str) -> bytes:
    digest = hashlib.new(hash_name, message).digest()
    return _SSHSIG_MAGIC + b"".join(wire_string(part) for part in (NAMESPACE.encode(), b"", hash_name.encode(), digest))


def _parse_sshsig(blob: bytes) -> _SshSignature | None:
    """The parts of an SSHSIG version 1 blob with an ed25519 signature, or None for anything else."""
    reader = WireReader(blob)
    if reader.take(len(_SSHSIG_MAGIC)) != _SSHSIG_MAGIC or reader.uint32() != _SSHSIG_VERSION:
        return None
    key_blob, namespace, reserved = reader.string(), reader.string(), reader.string()
    hash_name, signature = reader.string(), reader.string()
    if key_blob is None or namespace is None or signature is None or not reader.at_end:
        return None
    # ssh-keygen signs over an empty reserved field whatever the blob says, so nothing else can be valid.
    if reserved != b"" or hash_name not in (b"sha256", b"sha512"):
        return None
    inner = WireReader(signature)
    kind, raw = inner.string(), inner.string()
    if kind != b"ssh-ed25519" or raw is None or len(raw) != _ED25519_SIZE or not inner.at_end:
        return None
    return _SshSignature(key_blob, namespace, hash_name.decode(), raw)


def slot_from_sshsig(armored: str) -> Slot:
    """The slot for a signature that ``ssh-keygen -Y sign -n kvpack-manifest-v1`` made over the
    :func:`pre_authentication_encoding`, for keys that only an agent or OpenSSH itself can use.

    Nothing is verified but the form. Raises TrustError ``bad-ssh-signature`` (not one, or of another namespace),
    ``unsupported-key-type``, ``weak-key``.
    """
    lines = [line.strip() for line in armored.strip().splitlines()]
    if len(lines) < 3 or lines[0] != _SSHSIG_BEGIN or lines[-1] != _SSHSIG_END:
        raise TrustError("bad-ssh-signature", "this is not an armored SSH signature", expected=_SSHSIG_BEGIN)
    try:
        blob = base64.b64decode("".join(lines[1:-1]), validate=True)
    except (binascii.Error, ValueError) as error:
        raise TrustError("bad-ssh-signature", "the SSH signature is not valid base64") from error
    reader = WireReader(blob)
    reader.take(len(_SSHSIG_MAGIC) + 4)
    key_blob = reader.string() or b""
    key_type = (WireReader(key_blob).string() or b"").decode("ascii", "replace")
    if not key_type.isprintable() or not key_type:
        raise TrustError("bad-ssh-signature", "the SSH signature names no key")
    key = parse_ssh_public_key(key_type, base64.b64encode(key_blob).decode())
    parsed = _parse_sshsig(blob)
    if parsed is None:
        raise TrustError("bad-ssh-signature", "the SSH signature is not a version 1 signature by an Ed25519 key")
    if parsed.namespace != NAMESPACE.encode():
        raise TrustError(
            "bad-ssh-signature",
            "the SSH signature was made for another purpose",
            field="namespace",
            expected=NAMESPACE,
            found=parsed.namespace.decode("utf-8", "backslashreplace"),
            hint=f"sign with: ssh-keygen -Y sign -n {NAMESPACE}",
        )
    return Slot(SignatureAlgorithm.SSHSIG, key.key_id, blob)


def slot_to_sshsig(slot: Slot) -> str:
    """The armored form of an SSHSIG slot, as ``ssh-keygen -Y verify`` reads it. Raises UsageError for Ed25519."""
    if slot.algorithm is not SignatureAlgorithm.SSHSIG:
        raise UsageError("not-an-ssh-signature", "only an SSHSIG slot has an armored SSH form")
    encoded = base64.b64encode(slot.signature).decode()
    lines = [encoded[start : start + 70] for start in range(0, len(encoded), 70)]
    return "\n".join([_SSHSIG_BEGIN, *lines, _SSHSIG_END, ""])


# --- detached signatures --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DetachedSignature:
    """A signature kept beside its pack: the 32-byte pack id and the slot (528 bytes together)."""

    pack_id: bytes
    slot: Slot

    def __post_init__(self) -> None:
        if len(self.pack_id) != _PACK_ID_SIZE:
            raise FormatError(
                "bad-detached-signature",
                "a pack id has 32 bytes",
                expected=_PACK_ID_SIZE,
                found=len(self.pack_id),
            )

    def to_bytes(self) -> bytes:
        """The file's 528 bytes."""
        return self.pack_id + self.slot.to_bytes()

    @classmethod
    def from_bytes(cls, encoded: bytes) -> DetachedSignature:
        """The signature in a file. Raises FormatError ``bad-detached-signature`` or ``bad-signature-slot``."""
        if len(encoded) != DETACHED_SIZE:
            raise FormatError(
                "bad-detached-signature",
                "a detached signature has 528 bytes",
                expected=DETACHED_SIZE,
                found=len(encoded),
            )
        return cls(encoded[:_PACK_ID_SIZE], Slot.from_bytes(encoded[_PACK_ID_SIZE:]))

    def slot_for(self, signed_bytes: bytes) -> Slot:
        """The slot, if it belongs to this pack. Raises TrustError ``signature-of-another-pack`` if not."""
        found = pack_id(signed_bytes)
        if found != self.pack_id:
            raise TrustError(
                "signature-of-another-pack",
                "the detached signature belongs to another pack",
                field="pack_id",
                expected=found.hex(),
                found=self.pack_id.hex(),
            )
        return self.slot
