"""Who vouches for a pack: Ed25519 keys, signatures over a pack's front, and the policy that judges them."""

from __future__ import annotations

from kvpack.trust.keys import (
    PublicKey,
    SigningKey,
    load_private_key,
    load_public_key,
    parse_public_key,
    save_key,
)
from kvpack.trust.policy import (
    SignatureStatus,
    SlotResult,
    TrustedKey,
    TrustPolicy,
    Verification,
    apply_scope,
    require_trusted,
    verify_signatures,
)
from kvpack.trust.signing import (
    DetachedSignature,
    SignatureAlgorithm,
    Slot,
    build_region,
    check,
    pack_id,
    parse_region,
    pre_authentication_encoding,
    sign,
    slot_from_sshsig,
    slot_to_sshsig,
)
from kvpack.trust.trust_file import load_trust, parse_trust_text

__all__ = [
    "DetachedSignature",
    "PublicKey",
    "SignatureAlgorithm",
    "SignatureStatus",
    "SigningKey",
    "Slot",
    "SlotResult",
    "TrustPolicy",
    "TrustedKey",
    "Verification",
    "apply_scope",
    "build_region",
    "check",
    "load_private_key",
    "load_public_key",
    "load_trust",
    "pack_id",
    "parse_public_key",
    "parse_region",
    "parse_trust_text",
    "pre_authentication_encoding",
    "require_trusted",
    "save_key",
    "sign",
    "slot_from_sshsig",
    "slot_to_sshsig",
    "verify_signatures",
]
