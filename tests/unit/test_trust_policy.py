from __future__ import annotations

import base64
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpack.errors import KvpackError, TrustError, UsageError
from kvpack.trust import (
    SignatureAlgorithm,
    SignatureStatus,
    SigningKey,
    Slot,
    TrustedKey,
    TrustPolicy,
    Verification,
    apply_scope,
    load_trust,
    parse_public_key,
    parse_trust_text,
    require_trusted,
    save_key,
    sign,
    slot_from_sshsig,
    slot_to_sshsig,
    verify_signatures,
)

SIGNED = b"the exact bytes of a front"
ALICE, BOB, MALLORY = (SigningKey.from_seed(bytes([number]) * 32) for number in (1, 2, 3))
NOW = int(datetime(2026, 6, 1, tzinfo=UTC).timestamp())
DAY = 86_400
TRUST_ALICE = TrustPolicy((TrustedKey(ALICE.public, "alice"),))
TRUST_BOTH = TrustPolicy((TrustedKey(ALICE.public, "alice"), TrustedKey(BOB.public, "bob")), threshold=2)


def line_of(key: SigningKey) -> str:
    return key.public.to_ssh_line()


def verified(slots: list[Slot], policy: TrustPolicy, **claims: object) -> Verification:
    """Both steps, at NOW, for a pack that claims nothing unless told."""
    stated: dict[str, object] = {"tenant": None, "model": None, "epoch": 0, "expires": None, **claims}
    first = verify_signatures(slots, SIGNED, policy, now=NOW)
    return apply_scope(first, policy, now=NOW, **stated)  # type: ignore[arg-type]


def refusal(verification: Verification, allow_unsigned: bool = False) -> TrustError:
    with pytest.raises(TrustError) as caught:
        require_trusted(verification, allow_unsigned)
    assert caught.value.hint
    return caught.value


def broken(key: SigningKey) -> Slot:
    slot = sign(SIGNED, key)
    return Slot(slot.algorithm, slot.key_id, slot.signature[:10] + b"?" + slot.signature[11:])


# --- what a set of signatures proves --------------------------------------------------------------------------------


def test_a_trusted_signature() -> None:
    verification = verified([sign(SIGNED, ALICE)], TRUST_ALICE)
    assert verification.trusted
    assert verification.summary == f"signed by trusted alice ({ALICE.public.fingerprint})"
    assert verification.missing == ()
    assert [result.name for result in verification.signers] == ["alice"]
    require_trusted(verification, allow_unsigned=False)


def test_nothing_is_trusted_before_the_second_step() -> None:
    first = verify_signatures([sign(SIGNED, ALICE)], SIGNED, TRUST_ALICE, now=NOW)
    assert first.threshold_met
    assert not first.trusted
    assert first.missing == ("scope, epoch and expiry were not checked, because the manifest was not read",)
    require_trusted(first, allow_unsigned=False)


def test_unsigned() -> None:
    verification = verified([], TRUST_ALICE)
    assert (verification.trusted, verification.summary) == (False, "unsigned")
    assert verification.missing == ("nobody signed the pack",)
    error = refusal(verification)
    assert error.code == "unsigned"
    assert "--trust" in (error.hint or "")
    assert "--allow-unsigned" in (error.hint or "")
    require_trusted(verification, allow_unsigned=True)
    assert not verification.trusted


@pytest.mark.parametrize("algorithm", list(SignatureAlgorithm))
@pytest.mark.parametrize("policy", [TRUST_ALICE, TrustPolicy()], ids=["another-key", "no-key"])
def test_a_key_that_comes_with_the_pack_proves_nothing(algorithm: SignatureAlgorithm, policy: TrustPolicy) -> None:
    verification = verified([sign(SIGNED, MALLORY, algorithm)], policy)
    assert not verification.trusted
    assert verification.summary == f"signed by an unknown key ({MALLORY.public.short_id})"
    assert any("was not checked" in sentence for sentence in verification.missing)
    assert refusal(verification).code == "untrusted-signer"
    require_trusted(verification, allow_unsigned=True)


@pytest.mark.parametrize("unknown", [sign(SIGNED, MALLORY), broken(MALLORY)], ids=["valid", "invalid"])
def test_an_unknown_signature_neither_raises_nor_lowers_trust(unknown: Slot) -> None:
    for slots in ([sign(SIGNED, ALICE), unknown], [unknown, sign(SIGNED, ALICE)]):
        verification = verified(slots, TRUST_ALICE)
        assert verification.trusted
        assert verification.summary.startswith("signed by trusted alice")
    assert refusal(verified([sign(SIGNED, ALICE), unknown], TRUST_BOTH)).code == "threshold-not-met"


@pytest.mark.parametrize("allow_unsigned", [False, True])
def test_a_bad_signature_in_a_trusted_name_is_refused_whatever_else_is_there(allow_unsigned: bool) -> None:
    policy = TrustPolicy(TRUST_BOTH.keys, threshold=1)
    for slots in ([broken(ALICE)], [sign(SIGNED, BOB), broken(ALICE)]):
        verification = verified(slots, policy)
        assert not verification.trusted
        assert verification.summary == f"bad signature in the name of alice ({ALICE.public.fingerprint})"
        assert refusal(verification, allow_unsigned).code == "bad-signature"
        first = verify_signatures(slots, SIGNED, policy, now=NOW)
        assert refusal(first, allow_unsigned).code == "bad-signature"
    # Control: with the signature as it was made, the same policy is content.
    assert verified([sign(SIGNED, BOB), sign(SIGNED, ALICE)], policy).trusted


def test_changed_bytes_are_a_bad_signature() -> None:
    verification = verify_signatures([sign(SIGNED, ALICE)], SIGNED + b"!", TRUST_ALICE, now=NOW)
    assert verification.results[0].status is SignatureStatus.BAD_SIGNATURE


def test_threshold_counts_distinct_keys() -> None:
    assert verified([sign(SIGNED, ALICE), sign(SIGNED, BOB)], TRUST_BOTH).trusted
    once = verified([sign(SIGNED, ALICE)], TRUST_BOTH)
    # A detached signature may repeat a key of the region, and so may another algorithm.
    thrice = verified(
        [sign(SIGNED, ALICE), sign(SIGNED, ALICE), sign(SIGNED, ALICE, SignatureAlgorithm.SSHSIG)], TRUST_BOTH
    )
    for verification in (once, thrice):
        assert not verification.trusted
        assert len(verification.signers) == 1
        assert "1 of 2 required" in verification.summary
        for allow_unsigned in (False, True):
            error = refusal(verification, allow_unsigned)
            assert (error.code, error.expected, error.found) == ("threshold-not-met", 2, 1)
    # Two lines for one key are one key.
    doubled = TrustPolicy((TrustedKey(ALICE.public, "alice"), TrustedKey(ALICE.public, "alias")), threshold=2)
    assert refusal(verified([sign(SIGNED, ALICE)], doubled)).code == "threshold-not-met"


def test_a_threshold_below_one_is_refused() -> None:
    with pytest.raises(TrustError) as caught:
        TrustPolicy(threshold=0)
    assert caught.value.code == "bad-trust-policy"


def test_a_revoked_key_never_counts() -> None:
    revoked = TrustedKey(ALICE.public, "alice", revoked=True)
    for entries in ((revoked,), (TrustedKey(ALICE.public, "alice"), revoked)):
        verification = verified([sign(SIGNED, ALICE)], TrustPolicy(entries))
        assert verification.results[0].status is SignatureStatus.REVOKED
        for allow_unsigned in (False, True):
            assert refusal(verification, allow_unsigned).code == "revoked-key"
    policy = TrustPolicy((revoked, TrustedKey(BOB.public, "bob")))
    assert verified([sign(SIGNED, ALICE), sign(SIGNED, BOB)], policy).trusted
    assert refusal(verified([broken(ALICE)], policy), allow_unsigned=True).code == "bad-signature"


@pytest.mark.parametrize(
    ("entry", "now", "accepted"),
    [
        (TrustedKey(ALICE.public, "alice", valid_after=NOW), NOW, True),
        (TrustedKey(ALICE.public, "alice", valid_after=NOW), NOW - 1, False),
        (TrustedKey(ALICE.public, "alice", valid_before=NOW), NOW, True),
        (TrustedKey(ALICE.public, "alice", valid_before=NOW), NOW + 1, False),
    ],
)
def test_a_key_outside_its_time(entry: TrustedKey, now: int, accepted: bool) -> None:
    first = verify_signatures([sign(SIGNED, ALICE)], SIGNED, TrustPolicy((entry,)), now=now)
    assert first.threshold_met is accepted
    if not accepted:
        assert first.results[0].status is SignatureStatus.EXPIRED
        assert refusal(first, allow_unsigned=True).code == "expired"


@pytest.mark.parametrize(
    ("entry", "claims", "code"),
    [
        (TrustedKey(ALICE.public, "a", tenants=("acme*",)), {"tenant": "acme-eu"}, None),
        (TrustedKey(ALICE.public, "a", tenants=("acme*",)), {"tenant": "evil"}, "out-of-scope"),
        (TrustedKey(ALICE.public, "a", tenants=("acme*",)), {"tenant": None}, "out-of-scope"),
        (TrustedKey(ALICE.public, "a", tenants=("acme*", "!acme-eu")), {"tenant": "acme-eu"}, "out-of-scope"),
        (TrustedKey(ALICE.public, "a", models=("smol?m2",)), {"model": "smollm2"}, None),
        (TrustedKey(ALICE.public, "a", models=("smol?m2",)), {"model": "SmolLM2"}, "out-of-scope"),
        (TrustedKey(ALICE.public, "a", models=("[ab]",)), {"model": "a"}, "out-of-scope"),
        (TrustedKey(ALICE.public, "a", models=("[ab]",)), {"model": "[ab]"}, None),
        (TrustedKey(ALICE.public, "a", min_epoch=7), {"epoch": 7}, None),
        (TrustedKey(ALICE.public, "a", min_epoch=7), {"epoch": 6}, "epoch-too-old"),
        (TrustedKey(ALICE.public, "a", min_epoch=7), {"epoch": None}, "epoch-too-old"),
        (TrustedKey(ALICE.public, "a", namespaces=("git",)), {}, "out-of-scope"),
        (TrustedKey(ALICE.public, "a", namespaces=("git", "kvpack-*")), {}, None),
        (TrustedKey(ALICE.public, "a"), {"expires": NOW}, "expired"),
        (TrustedKey(ALICE.public, "a"), {"expires": NOW + 1}, None),
    ],
)
def test_scope(entry: TrustedKey, claims: dict[str, object], code: str | None) -> None:
    verification = verified([sign(SIGNED, ALICE)], TrustPolicy((entry,)), **claims)
    assert verification.trusted is (code is None)
    if code is None:
        require_trusted(verification, allow_unsigned=False)
    else:
        assert verification.missing
        for allow_unsigned in (False, True):
            assert refusal(verification, allow_unsigned).code == code


def test_an_expired_pack_is_refused_even_unsigned() -> None:
    verification = verified([], TRUST_ALICE, expires=NOW - 1)
    assert refusal(verification, allow_unsigned=True).code == "expired"


def test_two_lines_of_one_key_admit_what_either_admits() -> None:
    policy = TrustPolicy(
        (
            TrustedKey(ALICE.public, "old", tenants=("a",), valid_before=NOW - DAY),
            TrustedKey(ALICE.public, "new", tenants=("b",)),
        )
    )
    assert verified([sign(SIGNED, ALICE)], policy, tenant="b").signers[0].name == "new"
    assert not verified([sign(SIGNED, ALICE)], policy, tenant="a").trusted


def test_a_hostile_claim_does_not_reach_the_terminal() -> None:
    policy = TrustPolicy((TrustedKey(ALICE.public, "alice", tenants=("acme",)),))
    verification = verified([sign(SIGNED, ALICE)], policy, tenant="\x1b[2Jacme\n")
    assert all(sentence.isprintable() for sentence in verification.missing)
    assert str(refusal(verification)).isprintable()


def test_facts_are_plain() -> None:
    facts = verified([sign(SIGNED, ALICE), sign(SIGNED, MALLORY)], TRUST_ALICE).facts()
    assert facts["trusted"] is True
    assert facts["signatures"] == [
        {
            "key_id": ALICE.public.key_id.hex(),
            "algorithm": "ed25519",
            "status": "trusted",
            "name": "alice",
            "fingerprint": ALICE.public.fingerprint,
        },
        {
            "key_id": MALLORY.public.key_id.hex(),
            "algorithm": "ed25519",
            "status": "unknown-key",
            "name": None,
            "fingerprint": None,
        },
    ]


# --- trust files ----------------------------------------------------------------------------------------------------


def test_a_trust_file_with_everything() -> None:
    text = f"""
# who signs our packs
threshold 2
alice@acme,alice {line_of(ALICE)} a comment with "one quote
bob\tnamespaces="kvpack-*,git",VALID-AFTER="20260102",valid-before="202603040506",tenant="ac*, !acx",\
model="m 1",min-epoch=12 {line_of(BOB)}
"carol c" valid-before="20260304050607Z" {line_of(MALLORY)}
mallory revoked {line_of(SigningKey.from_seed(bytes(32)))}
"""
    policy = parse_trust_text(text)
    alice, bob, carol, mallory = policy.keys
    assert policy.threshold == 2
    assert alice == TrustedKey(ALICE.public, "alice@acme,alice")
    assert alice.key.comment == 'a comment with "one quote'
    assert bob == TrustedKey(
        BOB.public,
        "bob",
        namespaces=("kvpack-*", "git"),
        tenants=("ac*", "!acx"),
        models=("m 1",),
        min_epoch=12,
        valid_after=int(datetime(2026, 1, 2, tzinfo=UTC).timestamp()),
        valid_before=int(datetime(2026, 3, 4, 5, 6, tzinfo=UTC).timestamp()),
    )
    assert carol.name == "carol c"
    assert carol.valid_before == int(datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC).timestamp())
    assert mallory.revoked


KEY_LINE = line_of(ALICE)


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("", "bad-trust-file", "no key"),
        ("# nothing\n", "bad-trust-file", "no key"),
        ("alice\n", "bad-trust-file", "line 1: the line has no key"),
        (f"# c\n\n{KEY_LINE}\n{KEY_LINE}", "bad-trust-file", "line 3: .*no name"),
        ("alice ssh-rsa AAAA", "unsupported-key-type", "line 1: .*ssh-rsa"),
        ("alice ssh-ed25519 !", "bad-key", "line 1"),
        ("alice ssh-ed25519", "bad-key", "line 1"),
        (f"alice cert-authority {KEY_LINE}", "bad-trust-file", "cert-authority is not supported"),
        (f"alice tenants=x {KEY_LINE}", "bad-trust-file", "tenants is not supported"),
        (f"alice tenant={KEY_LINE}", "bad-trust-file", "no key"),
        (f'alice tenant="" {KEY_LINE}', "bad-trust-file", "tenant needs a list"),
        (f"alice tenant {KEY_LINE}", "bad-trust-file", "tenant needs a list"),
        (f'alice tenant="a,,b" {KEY_LINE}', "bad-trust-file", "tenant needs a list"),
        (f'alice tenant="a {KEY_LINE}', "bad-trust-file", "unmatched quote"),
        (f"alice revoked,revoked {KEY_LINE}", "bad-trust-file", "twice"),
        (f"alice revoked, {KEY_LINE}", "bad-trust-file", "cannot be read"),
        (f"alice revoked=no {KEY_LINE}", "bad-trust-file", "has no value"),
        (f"alice min-epoch=-1 {KEY_LINE}", "bad-trust-file", "whole number"),
        (f"alice min-epoch {KEY_LINE}", "bad-trust-file", "whole number"),
        (f"alice valid-after=2026 {KEY_LINE}", "bad-trust-file", "needs a time"),
        (f"alice valid-after=20260230 {KEY_LINE}", "bad-trust-file", "not a time that exists"),
        (f"threshold 0\nalice {KEY_LINE}", "bad-trust-file", "below 1"),
        (f"threshold 1\nthreshold 1\nalice {KEY_LINE}", "bad-trust-file", "line 2: a second threshold"),
        (f"threshold 2\nalice {KEY_LINE}\nalias {KEY_LINE}", "bad-trust-file", "never be met by 1"),
        (f"threshold two\nalice {KEY_LINE}", "bad-trust-file", "line 1"),
        (f"al\x1b[2Jice {KEY_LINE}", "bad-trust-file", "control character"),
    ],
)
def test_trust_files_that_are_refused(text: str, code: str, says: str) -> None:
    with pytest.raises(TrustError, match=says) as caught:
        parse_trust_text(text)
    assert caught.value.code == code


def test_a_weak_key_in_a_trust_file_is_refused_with_its_line() -> None:
    weak = ALICE.public.to_ssh_line().split()[1]
    blob = base64.b64decode(weak)[:-32] + (1).to_bytes(32, "little")
    encoded = base64.b64encode(blob).decode()
    with pytest.raises(TrustError, match=r"line 2: .*small order") as caught:
        parse_trust_text(f"alice {KEY_LINE}\neve ssh-ed25519 {encoded}\n")
    assert (caught.value.code, caught.value.field) == ("weak-key", "line 2")


def test_load_trust_takes_a_key_in_any_form_or_a_trust_file(tmp_path: Path) -> None:
    path = tmp_path / "trust"
    forms = {
        ALICE.public.to_pem().decode(): f"key {ALICE.public.short_id}",
        f"# mine\n{line_of(ALICE)} alice@host\n": "alice@host",
        ALICE.public.raw.hex() + "\n": f"key {ALICE.public.short_id}",
        f"alice {line_of(ALICE)}\n": "alice",
    }
    for text, name in forms.items():
        path.write_text(text)
        policy = load_trust(path)
        assert policy == TrustPolicy((TrustedKey(ALICE.public, name),))
        assert verified([sign(SIGNED, ALICE)], policy).trusted


def test_load_trust_names_the_file_and_the_mistake(tmp_path: Path) -> None:
    save_key(ALICE, tmp_path / "signer")
    with pytest.raises(TrustError, match=r"signer: this is a private key") as caught:
        load_trust(tmp_path / "signer")
    assert caught.value.code == "private-key-given"
    (tmp_path / "bad").write_text("alice\nbob\n")
    with pytest.raises(TrustError, match=r"bad: line 1: the line has no key"):
        load_trust(tmp_path / "bad")
    with pytest.raises(UsageError) as missing:
        load_trust(tmp_path / "missing")
    assert missing.value.code == "missing-file"


GENUINE = [
    f'alice tenant="a,b",min-epoch=3 {KEY_LINE}\nthreshold 1\n',
    ALICE.public.to_pem().decode(),
    KEY_LINE,
    slot_to_sshsig(sign(SIGNED, ALICE, SignatureAlgorithm.SSHSIG)),
]


@given(st.sampled_from(GENUINE), st.integers(0, 400), st.integers(0, 8), st.text(max_size=8))
def test_damaged_text_raises_nothing_but_kvpack_errors(text: str, start: int, length: int, planted: str) -> None:
    damaged = text[:start] + planted + text[start + length :]
    for parse in (parse_trust_text, parse_public_key, slot_from_sshsig):
        try:
            parse(damaged)
        except KvpackError:
            continue
