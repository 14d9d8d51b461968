"""Who must have signed a pack for it to be trusted, and what a set of signatures proves under that rule.

Pure: no file, no clock; the caller passes the time (seconds since 1970, UTC). It goes in two steps, because the
manifest must not be parsed before the signatures over it were checked:

1. :func:`verify_signatures` on the exact signed bytes, before anything in them is decoded;
2. :func:`apply_scope` with what the decoded manifest says (tenant, model, epoch, expiry).

:func:`require_trusted` turns either answer into a refusal; a reader calls it after both.

Invariants:

* Only keys of the policy can make a pack trusted. A key that comes with the pack (in an SSHSIG blob) proves nothing.
* A signature by a key that the policy does not list neither raises nor lowers trust.
* A signature in the name of a listed key that does not verify is an error, whatever the other signatures say, and
  nothing lifts it: somebody changed the pack or the signature.
* Distinct keys count, not signatures and not lines of the trust file.
* A revoked key never counts, on whichever of its lines the revocation stands. Its signature does not harm a pack that
  enough other keys vouch for.
* The time is the reader's now, never a time that the pack states: who stole an expired key can backdate.
* A pack is ``trusted`` only after both steps. What was not looked at is listed in ``missing``.
* An expired pack is refused whether it is signed or not.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum

from kvpack.errors import TrustError
from kvpack.trust.keys import PublicKey
from kvpack.trust.signing import NAMESPACE, SignatureAlgorithm, Slot, check

__all__ = [
    "SignatureStatus",
    "SlotResult",
    "TrustPolicy",
    "TrustedKey",
    "Verification",
    "apply_scope",
    "require_trusted",
    "verify_signatures",
]


@dataclass(frozen=True)
class TrustedKey:
    """A key that the reader trusts, the name it goes by, and for what it is trusted.

    ``namespaces``, ``tenants`` and ``models`` are pattern lists as in OpenSSH: ``*`` and ``?`` are wild, a pattern
    after ``!`` excludes, an empty list admits all. ``min_epoch`` is the lowest epoch of a pack. The two times, in
    seconds since 1970 UTC, both belong to the time of validity. ``revoked`` wins over everything.
    """

    key: PublicKey
    name: str
    namespaces: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    min_epoch: int | None = None
    valid_after: int | None = None
    valid_before: int | None = None
    revoked: bool = False


@dataclass(frozen=True)
class TrustPolicy:
    """The trusted keys, and how many distinct ones must have signed. Without keys, nothing is trusted."""

    keys: tuple[TrustedKey, ...] = ()
    threshold: int = 1

    def __post_init__(self) -> None:
        if self.threshold < 1:
            raise TrustError(
                "bad-trust-policy",
                "the threshold is below one signature",
                expected=">= 1",
                found=self.threshold,
            )

    def entries(self, key_id: bytes) -> tuple[TrustedKey, ...]:
        """All entries for the key with this id."""
        return tuple(entry for entry in self.keys if entry.key.key_id == key_id)


class SignatureStatus(Enum):
    """What became of one signature."""

    TRUSTED = "trusted"
    UNKNOWN_KEY = "unknown-key"
    BAD_SIGNATURE = "bad-signature"
    REVOKED = "revoked"
    EXPIRED = "expired"
    EPOCH_TOO_OLD = "epoch-too-old"
    OUT_OF_SCOPE = "out-of-scope"


@dataclass(frozen=True)
class SlotResult:
    """One signature: who is said to have made it and what that is worth.

    ``name`` and ``fingerprint`` are the policy's, None for a key that it does not list. ``detail`` is a sentence that
    says why the status is not ``TRUSTED``, empty if it is.
    """

    key_id: bytes
    algorithm: SignatureAlgorithm
    status: SignatureStatus
    name: str | None = None
    fingerprint: str | None = None
    detail: str = ""

    @property
    def signer(self) -> str:
        """The signer in words: name and fingerprint, or the short key id."""
        if self.name is None:
            return f"an unknown key ({self.key_id.hex()[:16]})"
        return f"{self.name} ({self.fingerprint})"


@dataclass(frozen=True)
class Verification:
    """What the signatures of one pack prove under one policy, and what they do not.

    ``scope_checked`` says that the second step was done; ``pack_expired`` that the pack's own time is over.
    """

    results: tuple[SlotResult, ...]
    threshold: int
    known_keys: int
    scope_checked: bool = False
    pack_expired: bool = False

    @property
    def signers(self) -> tuple[SlotResult, ...]:
        """One result for each distinct trusted key."""
        distinct = {result.key_id: result for result in self.results if result.status is SignatureStatus.TRUSTED}
        return tuple(distinct.values())

    @property
    def threshold_met(self) -> bool:
        """Whether enough distinct keys are trusted by what was checked up to now, and no signature is bad."""
        bad = any(result.status is SignatureStatus.BAD_SIGNATURE for result in self.results)
        return not bad and len(self.signers) >= self.threshold

    @property
    def trusted(self) -> bool:
        """Whether the policy vouches for the pack: both steps were done and nothing is missing."""
        return self.threshold_met and self.scope_checked and not self.pack_expired

    @property
    def missing(self) -> tuple[str, ...]:
        """Sentences, each a thing that was not proved."""
        sentences: list[str] = []
        if not self.results:
            sentences.append("nobody signed the pack")
        elif not self.known_keys:
            sentences.append("no trusted key was given to check the signatures against")
        sentences += [result.detail for result in self.results if result.detail]
        if self.results and len(self.signers) < self.threshold:
            sentences.append(f"{len(self.signers)} of {self.threshold} required trusted signatures are there")
        if self.pack_expired:
            sentences.append("the pack's own time of validity is over")
        if not self.scope_checked:
            sentences.append("scope, epoch and expiry were not checked, because the manifest was not read")
        return tuple(sentences)

    @property
    def summary(self) -> str:
        """One line that says what was proved, as ``signed by trusted alice (SHA256:…)``."""
        if not self.results:
            return "unsigned"
        bad = [result.signer for result in self.results if result.status is SignatureStatus.BAD_SIGNATURE]
        if bad:
            return f"bad signature in the name of {_listed(bad)}"
        parts = []
        if self.signers:
            parts.append("trusted " + _listed([result.signer for result in self.signers]))
        for result in self.results:
            if result.status is SignatureStatus.UNKNOWN_KEY:
                parts.append(result.signer)
            elif result.status is not SignatureStatus.TRUSTED:
                parts.append(f"{result.signer}, not accepted: {result.status.value}")
        line = "signed by " + "; ".join(parts)
        if len(self.signers) < self.threshold and self.threshold > 1:
            line += f"; {len(self.signers)} of {self.threshold} required"
        return line + (", but expired" if self.pack_expired else "")

    def facts(self) -> dict[str, object]:
        """The verification as plain JSON-ready facts."""
        return {
            "trusted": self.trusted,
            "summary": self.summary,
            "threshold": self.threshold,
            "missing": list(self.missing),
            "signatures": [
                {
                    "key_id": result.key_id.hex(),
                    "algorithm": result.algorithm.name.lower(),
                    "status": result.status.value,
                    "name": result.name,
                    "fingerprint": result.fingerprint,
                }
                for result in self.results
            ],
        }


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


# --- step 1: signatures over exact bytes ----------------------------------------------------------------------------


def verify_signatures(slots: Sequence[Slot], signed_bytes: bytes, policy: TrustPolicy, *, now: int) -> Verification:
    """Check every slot against the keys of the policy, before anything in ``signed_bytes`` is parsed.

    Never raises for what the slots hold; :func:`require_trusted` refuses.
    """
    results = tuple(_verify_slot(slot, signed_bytes, policy, now) for slot in slots)
    return Verification(results, policy.threshold, len({entry.key.raw for entry in policy.keys}))


def _verify_slot(slot: Slot, signed_bytes: bytes, policy: TrustPolicy, now: int) -> SlotResult:
    entries = policy.entries(slot.key_id)
    if not entries:
        return SlotResult(
            slot.key_id,
            slot.algorithm,
            SignatureStatus.UNKNOWN_KEY,
            detail=f"the signature of key {slot.key_id.hex()[:16]} was not checked: this key is not a trusted one",
        )
    key = entries[0].key
    result = SlotResult(slot.key_id, slot.algorithm, SignatureStatus.TRUSTED, entries[0].name, key.fingerprint)
    if not check(slot, signed_bytes, key):
        return replace(
            result,
            status=SignatureStatus.BAD_SIGNATURE,
            detail=f"the signature in the name of {entries[0].name} does not belong to these bytes",
        )
    return _judge(result, entries, now, None)


@dataclass(frozen=True)
class _PackClaims:
    """What the decoded manifest says about itself; believed only because a trusted key signed it."""

    tenant: str | None
    model: str | None
    epoch: int | None


def _judge(result: SlotResult, entries: Sequence[TrustedKey], now: int, claims: _PackClaims | None) -> SlotResult:
    """A valid signature by a listed key: it counts if one of the key's entries admits it and none revokes the key."""
    for entry in entries:
        if entry.revoked:
            detail = f"the key of {entry.name} is revoked"
            return replace(result, status=SignatureStatus.REVOKED, name=entry.name, detail=detail)
    refusals = []
    for entry in entries:
        refusal = _refusal(entry, now, claims)
        if refusal is None:
            return replace(result, status=SignatureStatus.TRUSTED, name=entry.name, detail="")
        refusals.append((entry, refusal))
    entry, (status, detail) = refusals[0]
    return replace(result, status=status, name=entry.name, detail=detail)


def _refusal(entry: TrustedKey, now: int, claims: _PackClaims | None) -> tuple[SignatureStatus, str] | None:
    who = entry.name
    if not _admits(entry.namespaces, NAMESPACE):
        return SignatureStatus.OUT_OF_SCOPE, f"{who} is trusted for other namespaces, not for {NAMESPACE}"
    if entry.valid_after is not None and now < entry.valid_after:
        return SignatureStatus.EXPIRED, f"the key of {who} is valid only after {_utc(entry.valid_after)}"
    if entry.valid_before is not None and now > entry.valid_before:
        return SignatureStatus.EXPIRED, f"the key of {who} was valid only before {_utc(entry.valid_before)}"
    if claims is None:
        return None
    if not _admits(entry.tenants, claims.tenant):
        wanted, found = ",".join(entry.tenants), _claimed(claims.tenant)
        return SignatureStatus.OUT_OF_SCOPE, f"{who} is trusted for tenant {wanted}, not for {found}"
    if not _admits(entry.models, claims.model):
        wanted, found = ",".join(entry.models), _claimed(claims.model)
        return SignatureStatus.OUT_OF_SCOPE, f"{who} is trusted for model {wanted}, not for {found}"
    if entry.min_epoch is not None and (claims.epoch is None or claims.epoch < entry.min_epoch):
        found = "none" if claims.epoch is None else str(claims.epoch)
        return (
            SignatureStatus.EPOCH_TOO_OLD,
            f"{who} is trusted from epoch {entry.min_epoch} on, and the pack's epoch is {found}",
        )
    return None


def _admits(patterns: tuple[str, ...], text: str | None) -> bool:
    """OpenSSH's pattern lists. A pack that does not state the fact is outside every list but the empty one."""
    if not patterns:
        return True
    if text is None:
        return False
    admitted = False
    for pattern in patterns:
        negated = pattern.startswith("!")
        # fnmatch also knows [sets], OpenSSH's patterns do not.
        if fnmatch.fnmatchcase(text, pattern.removeprefix("!").replace("[", "[[]")):
            if negated:
                return False
            admitted = True
    return admitted


def _claimed(text: str | None) -> str:
    # ascii() keeps a hostile manifest's control characters off the terminal.
    return "a pack that names none" if text is None else ascii(text)


def _utc(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# --- step 2: what the manifest says ---------------------------------------------------------------------------------


def apply_scope(
    verification: Verification,
    policy: TrustPolicy,
    *,
    tenant: str | None,
    model: str | None,
    epoch: int | None,
    expires: int | None,
    now: int,
) -> Verification:
    """Apply the rest of the policy, with what the decoded manifest states (None: it states nothing).

    ``expires`` and ``now`` are seconds since 1970, UTC; at ``expires`` itself the pack is expired. The policy must be
    the one of the first step.
    """
    claims = _PackClaims(tenant, model, epoch)
    settled = (SignatureStatus.UNKNOWN_KEY, SignatureStatus.BAD_SIGNATURE)
    results = tuple(
        result if result.status in settled else _judge(result, policy.entries(result.key_id), now, claims)
        for result in verification.results
    )
    return replace(
        verification,
        results=results,
        scope_checked=True,
        pack_expired=expires is not None and now >= expires,
    )


# --- the refusal ----------------------------------------------------------------------------------------------------

_RE_SIGN = "have the pack signed by a key that the trust file accepts"

_REFUSALS: dict[SignatureStatus, tuple[str, str]] = {
    SignatureStatus.REVOKED: ("revoked-key", _RE_SIGN),
    SignatureStatus.EXPIRED: ("expired", _RE_SIGN),
    SignatureStatus.EPOCH_TOO_OLD: (
        "epoch-too-old",
        "get a newer pack; an old one may have been put back in its place",
    ),
    SignatureStatus.OUT_OF_SCOPE: ("out-of-scope", _RE_SIGN),
}


def require_trusted(verification: Verification, allow_unsigned: bool) -> None:
    """Raise TrustError unless the policy vouches for the pack by what was checked up to now; call it after each step.

    ``allow_unsigned`` lifts ``unsigned`` and ``untrusted-signer``. It never lifts ``bad-signature``, ``revoked-key``,
    ``expired``, ``epoch-too-old``, ``out-of-scope`` and ``threshold-not-met``: there the policy knows the signer, and
    says no.
    """
    for result in verification.results:
        if result.status is SignatureStatus.BAD_SIGNATURE:
            raise TrustError(
                "bad-signature",
                result.detail,
                field="signatures",
                found=result.signer,
                hint="the pack or its signature was changed; get it again from its source",
            )
    if verification.pack_expired:
        raise TrustError("expired", "the pack has expired", field="expires", hint="get a newer pack")
    if verification.threshold_met:
        return
    signers = verification.signers
    if signers:
        raise TrustError(
            "threshold-not-met",
            f"{verification.summary}; the trust file asks for {verification.threshold} distinct keys",
            field="signatures",
            expected=verification.threshold,
            found=len(signers),
            hint=_RE_SIGN,
        )
    for status, (code, hint) in _REFUSALS.items():
        for result in verification.results:
            if result.status is status:
                raise TrustError(code, result.detail, field="signatures", found=result.signer, hint=hint)
    if allow_unsigned:
        return
    if verification.results:
        raise TrustError(
            "untrusted-signer",
            f"the pack is {verification.summary}",
            field="signatures",
            hint="give the signer's public key with --trust FILE, or accept it unproved with --allow-unsigned",
        )
    raise TrustError(
        "unsigned",
        "the pack is not signed",
        field="signatures",
        hint="get a signed pack and give its signer's public key with --trust FILE, or use --allow-unsigned",
    )
