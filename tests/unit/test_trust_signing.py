from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpack.errors import FormatError, TrustError, UsageError
from kvpack.trust import (
    DetachedSignature,
    SignatureAlgorithm,
    SigningKey,
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
from kvpack.trust.keys import load_public_key
from kvpack.trust.signing import DETACHED_SIZE, REGION_SIZE, SLOT_SIZE

SIGNED = bytes(range(96)) + b"\x81\xa1a\x01"
KEY = SigningKey.from_seed(bytes(range(32)))
OTHER = SigningKey.from_seed(bytes(range(1, 33)))
ALGORITHMS = list(SignatureAlgorithm)
needs_ssh = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")


def flipped(encoded: bytes, bit: int) -> bytes:
    changed = bytearray(encoded)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def refused_slot(encoded: bytes) -> FormatError:
    with pytest.raises(FormatError) as caught:
        Slot.from_bytes(encoded)
    assert caught.value.code == "bad-signature-slot"
    return caught.value


def test_pre_authentication_encoding_byte_by_byte() -> None:
    assert pre_authentication_encoding(b"hello world") == (b"DSSEv1 31 application/vnd.kvpack.front.v1 11 hello world")
    assert pre_authentication_encoding(b"") == b"DSSEv1 31 application/vnd.kvpack.front.v1 0 "


def test_pack_id_is_the_hash_of_the_signed_bytes() -> None:
    assert pack_id(SIGNED) == blake3(SIGNED).digest()


def test_an_ed25519_slot_byte_by_byte() -> None:
    slot = sign(SIGNED, KEY)
    signature = KEY.sign(pre_authentication_encoding(SIGNED))
    expected = b"\x01\x00\x40\x00" + bytes(4) + KEY.public.key_id + signature + bytes(448 - 64) + bytes(8)
    assert slot.to_bytes() == expected
    assert len(expected) == SLOT_SIZE == 496


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sign_then_check(algorithm: SignatureAlgorithm) -> None:
    slot = Slot.from_bytes(sign(SIGNED, KEY, algorithm).to_bytes())
    assert slot.algorithm is algorithm
    assert check(slot, SIGNED, KEY.public)
    assert not check(slot, SIGNED, OTHER.public)
    assert not check(slot, SIGNED + b"\x00", KEY.public)
    assert not check(slot, SIGNED[:-1], KEY.public)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(bit=st.integers(0, len(SIGNED) * 8 - 1))
@settings(max_examples=40)
def test_a_flipped_bit_of_the_signed_bytes_is_refused(algorithm: SignatureAlgorithm, bit: int) -> None:
    assert not check(sign(SIGNED, KEY, algorithm), flipped(SIGNED, bit), KEY.public)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_flipped_bit_of_a_slot_is_refused(algorithm: SignatureAlgorithm) -> None:
    encoded = sign(SIGNED, KEY, algorithm).to_bytes()
    for bit in range(0, SLOT_SIZE * 8, 3):
        try:
            slot = Slot.from_bytes(flipped(encoded, bit))
        except FormatError:
            continue
        assert not check(slot, SIGNED, KEY.public)


def test_another_payload_type_does_not_pass() -> None:
    bare = Slot(SignatureAlgorithm.ED25519, KEY.public.key_id, KEY.sign(SIGNED))
    message = b"DSSEv1 31 application/vnd.kvpack.front.v2 %d %s" % (len(SIGNED), SIGNED)
    typed = Slot(SignatureAlgorithm.ED25519, KEY.public.key_id, KEY.sign(message))
    assert not check(bare, SIGNED, KEY.public)
    assert not check(typed, SIGNED, KEY.public)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_foreign_signature_under_a_trusted_key_id_is_refused(algorithm: SignatureAlgorithm) -> None:
    forged = Slot(algorithm, KEY.public.key_id, sign(SIGNED, OTHER, algorithm).signature)
    assert not check(forged, SIGNED, KEY.public)
    # And the other way round: the right signature under a wrong key id.
    renamed = Slot(algorithm, OTHER.public.key_id, sign(SIGNED, KEY, algorithm).signature)
    assert not check(renamed, SIGNED, KEY.public)


# --- slots and regions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "planted", "field"),
    [
        (0, b"\x00\x00", "algorithm"),
        (0, b"\x03\x00", "algorithm"),
        (2, b"\x3f\x00", "signature"),
        (2, b"\x41\x00", "length"),
        (2, b"\x00\x00", "signature"),
        (2, b"\xc1\x01", "length"),
        (4, b"\x01", "reserved"),
        (40 + 64, b"\x01", "signature"),
        (487, b"\x01", "signature"),
        (488, b"\x01", "reserved"),
        (495, b"\x80", "reserved"),
    ],
)
def test_malformed_slots(offset: int, planted: bytes, field: str) -> None:
    encoded = bytearray(sign(SIGNED, KEY).to_bytes())
    encoded[offset : offset + len(planted)] = planted
    assert refused_slot(bytes(encoded)).field == field


def test_malformed_slot_sizes() -> None:
    encoded = sign(SIGNED, KEY).to_bytes()
    for wrong in (b"", encoded[:-1], encoded + b"\x00"):
        assert refused_slot(wrong).field == "slot"
    empty_sshsig = bytearray(encoded)
    empty_sshsig[0:4] = b"\x02\x00\x00\x00"
    empty_sshsig[40:104] = bytes(64)
    assert refused_slot(bytes(empty_sshsig)).field == "length"
    with pytest.raises(FormatError):
        Slot(SignatureAlgorithm.SSHSIG, KEY.public.key_id, bytes(449))
    with pytest.raises(FormatError):
        Slot(SignatureAlgorithm.ED25519, bytes(31), bytes(64))


@given(
    st.lists(
        st.tuples(st.binary(min_size=32, max_size=32), st.binary(min_size=1, max_size=448)),
        max_size=8,
        unique_by=lambda pair: pair[0],
    )
)
def test_regions_round_trip(parts: list[tuple[bytes, bytes]]) -> None:
    slots = tuple(Slot(SignatureAlgorithm.SSHSIG, key_id, signature) for key_id, signature in parts)
    region = build_region(slots)
    assert len(region) == REGION_SIZE == 3968
    assert parse_region(region) == slots


def test_region_faults() -> None:
    first, second = sign(SIGNED, KEY).to_bytes(), sign(SIGNED, OTHER).to_bytes()
    empty = bytes(SLOT_SIZE)
    good = first + second + empty * 6
    assert len(parse_region(good)) == 2

    def refused_field(region: bytes) -> str | None:
        with pytest.raises(FormatError) as caught:
            parse_region(region)
        assert caught.value.code == "bad-signature-slot"
        return caught.value.field

    assert refused_field(first + empty + second + empty * 5) == "signatures[2]"
    assert refused_field(empty + first + empty * 6) == "signatures[1]"
    assert refused_field(first + first + empty * 6) == "signatures[1].key_id"
    assert refused_field(first + b"\x09" + second[1:] + empty * 6) == "signatures[1].algorithm"
    # A slot marked empty that is not all zero.
    assert refused_field(first + empty[:-1] + b"\x01" + empty * 6) == "signatures[1].algorithm"
    assert refused_field(good[:-1]) == "signatures"


def test_build_region_refuses_too_many_and_doubles() -> None:
    keys = [SigningKey.from_seed(bytes([number]) * 32) for number in range(9)]
    slots = [sign(SIGNED, key) for key in keys]
    assert len(parse_region(build_region(slots[:8]))) == 8
    with pytest.raises(UsageError) as caught:
        build_region(slots)
    assert caught.value.code == "too-many-signatures"
    with pytest.raises(FormatError, match="two signature slots"):
        build_region([slots[0], sign(SIGNED, keys[0], SignatureAlgorithm.SSHSIG)])


# --- detached -------------------------------------------------------------------------------------------------------


def test_detached_signatures() -> None:
    detached = DetachedSignature(pack_id(SIGNED), sign(SIGNED, KEY))
    encoded = detached.to_bytes()
    assert len(encoded) == DETACHED_SIZE == 528
    assert encoded[:32] == pack_id(SIGNED)
    read = DetachedSignature.from_bytes(encoded)
    assert read == detached
    assert check(read.slot_for(SIGNED), SIGNED, KEY.public)
    with pytest.raises(TrustError) as caught:
        read.slot_for(SIGNED + b"x")
    assert caught.value.code == "signature-of-another-pack"
    for wrong in (b"", encoded[:-1], encoded + b"\x00"):
        with pytest.raises(FormatError) as refused:
            DetachedSignature.from_bytes(wrong)
        assert refused.value.code == "bad-detached-signature"
    with pytest.raises(FormatError) as refused:
        DetachedSignature.from_bytes(encoded[:32] + bytes(SLOT_SIZE))
    assert refused.value.code == "bad-signature-slot"


# --- SSHSIG ---------------------------------------------------------------------------------------------------------


def planted_sshsig(old: bytes, new: bytes) -> Slot:
    genuine = sign(SIGNED, KEY, SignatureAlgorithm.SSHSIG)
    assert genuine.signature.count(old) >= 1
    return Slot(SignatureAlgorithm.SSHSIG, genuine.key_id, genuine.signature.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"SSHSIG\x00\x00\x00\x01", b"SSHSIG\x00\x00\x00\x02"),
        (b"SSHSIG", b"SSHSIX"),
        (b"kvpack-manifest-v1", b"kvpack-manifest-v2"),
        (b"\x00\x00\x00\x00\x00\x00\x00\x06sha512", b"\x00\x00\x00\x01x\x00\x00\x00\x06sha512"),
        (b"sha512", b"sha256"),
        (b"\x06sha512", b"\x04sha1"),
        (KEY.public.raw, OTHER.public.raw),
        (b"\x00\x00\x00\x33", b"\xff\xff\xff\xff"),
        (b"\x00\x00\x00\x40", b"\x00\x00\x00\x41"),
    ],
)
def test_damaged_ssh_signatures_are_refused_without_an_exception(old: bytes, new: bytes) -> None:
    assert not check(planted_sshsig(old, new), SIGNED, KEY.public)


def test_ssh_signatures_of_every_wrong_length_are_refused() -> None:
    genuine = sign(SIGNED, KEY, SignatureAlgorithm.SSHSIG)
    for length in range(1, len(genuine.signature)):
        shortened = Slot(genuine.algorithm, genuine.key_id, genuine.signature[:length])
        assert not check(shortened, SIGNED, KEY.public)
    assert not check(Slot(genuine.algorithm, genuine.key_id, genuine.signature + b"\x00"), SIGNED, KEY.public)


def test_armor_round_trip_and_refusals() -> None:
    slot = sign(SIGNED, KEY, SignatureAlgorithm.SSHSIG)
    armored = slot_to_sshsig(slot)
    assert slot_from_sshsig(armored) == slot
    with pytest.raises(UsageError):
        slot_to_sshsig(sign(SIGNED, KEY))
    for wrong in ("", "hello", armored.replace("BEGIN", "BEGUN"), armored.replace("U1NI", "!!!!", 1)):
        with pytest.raises(TrustError) as caught:
            slot_from_sshsig(wrong)
        assert caught.value.code == "bad-ssh-signature"


def ssh_keygen(*arguments: str | os.PathLike[str], stdin: bytes) -> subprocess.CompletedProcess[bytes]:
    command = ["ssh-keygen", *(os.fspath(argument) for argument in arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, check=False, timeout=60)


def make_ssh_key(folder: Path, kind: str = "ed25519") -> Path:
    made = ssh_keygen("-q", "-t", kind, "-N", "", "-C", "me@host", "-f", folder / kind, stdin=b"")
    assert made.returncode == 0, made.stderr
    return folder / kind


def ssh_sign(key: Path, message: bytes, namespace: str = "kvpack-manifest-v1", *options: str) -> str:
    signed = ssh_keygen("-Y", "sign", "-q", *options, "-n", namespace, "-f", key, stdin=message)
    assert signed.returncode == 0, signed.stderr
    return signed.stdout.decode()


@needs_ssh
@pytest.mark.parametrize("options", [[], ["-O", "hashalg=sha256"]], ids=["sha512", "sha256"])
def test_a_signature_made_by_ssh_keygen_passes(options: list[str], tmp_path: Path) -> None:
    path = make_ssh_key(tmp_path)
    key = load_public_key(tmp_path / "ed25519.pub")
    slot = slot_from_sshsig(ssh_sign(path, pre_authentication_encoding(SIGNED), "kvpack-manifest-v1", *options))
    assert slot.key_id == key.key_id
    assert check(Slot.from_bytes(slot.to_bytes()), SIGNED, key)
    assert not check(slot, flipped(SIGNED, 5), key)
    # A signature over the bare bytes, without the payload type, is not one of a pack.
    assert not check(slot_from_sshsig(ssh_sign(path, SIGNED)), SIGNED, key)


@needs_ssh
def test_ssh_signatures_for_other_purposes_or_of_other_types_are_refused(tmp_path: Path) -> None:
    path = make_ssh_key(tmp_path)
    message = pre_authentication_encoding(SIGNED)
    for_git = ssh_sign(path, message, "git")
    with pytest.raises(TrustError, match="another purpose"):
        slot_from_sshsig(for_git)
    with pytest.raises(TrustError, match="ssh-rsa") as caught:
        slot_from_sshsig(ssh_sign(make_ssh_key(tmp_path, "rsa"), message))
    assert caught.value.code == "unsupported-key-type"


@needs_ssh
def test_ssh_keygen_verifies_what_kvpack_signs(tmp_path: Path) -> None:
    (tmp_path / "allowed").write_text(f"alice {KEY.public.to_ssh_line()}\n")
    (tmp_path / "pack.sshsig").write_text(slot_to_sshsig(sign(SIGNED, KEY, SignatureAlgorithm.SSHSIG)))

    def verdict(signed_bytes: bytes) -> int:
        files = ("-f", tmp_path / "allowed", "-I", "alice", "-s", tmp_path / "pack.sshsig")
        message = pre_authentication_encoding(signed_bytes)
        return ssh_keygen("-Y", "verify", "-n", "kvpack-manifest-v1", *files, stdin=message).returncode

    assert verdict(SIGNED) == 0
    assert verdict(flipped(SIGNED, 700)) != 0
