from __future__ import annotations

import base64
import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, rsa, x25519
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpack.errors import KvpackError, ResourceError, TrustError, UsageError
from kvpack.trust import PublicKey, SigningKey, load_private_key, load_public_key, parse_public_key, save_key
from kvpack.trust.curve import decode_point, has_small_order

PRIME = 2**255 - 19
SIGN = 1 << 255
needs_ssh = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")


def encoded(number: int) -> bytes:
    return number.to_bytes(32, "little")


# Orders 1, 2, 4, 4, 8, 8, 8, 8. A y of order 8 solves d y^4 + 2 y^2 - 1 = 0 (doubling must give y = 0).
Y8 = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7
SMALL_ORDER = [
    encoded(1),
    encoded(PRIME - 1),
    encoded(0),
    encoded(SIGN),
    encoded(Y8),
    encoded(Y8 | SIGN),
    encoded(PRIME - Y8),
    encoded((PRIME - Y8) | SIGN),
]
NOT_CANONICAL = [
    encoded(PRIME),  # y = 0 again
    encoded(PRIME + 1),  # y = 1, the identity, again
    encoded(2**255 - 1),
    encoded(2**256 - 1),
    encoded(1 | SIGN),  # x = 0 has no sign
    encoded((PRIME - 1) | SIGN),
]
# RFC 8032, section 7.1, tests 1 to 3: secret, public key, message, signature.
RFC_8032 = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
        "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
        "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
]
LARGE_ORDER_L = 2**252 + 27742317777372353535851937790883648493


@pytest.fixture
def key() -> SigningKey:
    return SigningKey.generate()


def ssh_keygen(*arguments: str | os.PathLike[str], stdin: bytes | None = None) -> bytes:
    command = ["ssh-keygen", *(os.fspath(argument) for argument in arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, check=True, timeout=60).stdout


@pytest.mark.parametrize(("secret", "public", "message", "signature"), RFC_8032)
def test_rfc_8032_vectors(secret: str, public: str, message: str, signature: str) -> None:
    key = SigningKey.from_seed(bytes.fromhex(secret))
    assert key.public.raw.hex() == public
    made = key.sign(bytes.fromhex(message))
    assert made.hex() == signature
    assert key.public.verify(made, bytes.fromhex(message))
    assert not key.public.verify(made, bytes.fromhex(message) + b"x")


def test_a_signature_with_s_plus_the_group_order_is_refused(key: SigningKey) -> None:
    signature = key.sign(b"message")
    shifted = int.from_bytes(signature[32:], "little") + LARGE_ORDER_L
    assert shifted < 2**256
    assert not key.public.verify(signature[:32] + encoded(shifted), b"message")


# --- points that must not be keys -----------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", SMALL_ORDER, ids=lambda raw: raw.hex()[:8])
def test_points_of_small_order_are_refused(raw: bytes) -> None:
    assert has_small_order(decode_point(raw))  # The vectors are what they say: canonical, and on the curve.
    with pytest.raises(TrustError) as caught:
        PublicKey(raw)
    assert caught.value.code == "weak-key"


@pytest.mark.parametrize("raw", NOT_CANONICAL, ids=lambda raw: raw.hex()[-8:])
def test_encodings_that_are_not_canonical_are_refused(raw: bytes) -> None:
    with pytest.raises(TrustError, match="canonical") as caught:
        PublicKey(raw)
    assert caught.value.code == "weak-key"


def test_control_the_library_alone_accepts_an_identity_key_and_a_forgery_with_it() -> None:
    identity = encoded(1)
    library_key = Ed25519PublicKey.from_public_bytes(identity)
    forgery = identity + bytes(32)
    library_key.verify(forgery, b"any message")
    library_key.verify(forgery, b"any other message")
    with pytest.raises(TrustError, match="small order"):
        PublicKey(identity)
    pem = library_key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo).decode()
    for text in (pem, identity.hex(), base64.b64encode(identity).decode()):
        with pytest.raises(TrustError, match="small order"):
            parse_public_key(text)


def test_a_y_without_a_point_is_refused() -> None:
    with pytest.raises(TrustError, match="not a point") as caught:
        PublicKey(encoded(2))
    assert caught.value.code == "bad-key"


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_key_has_32_bytes(length: int) -> None:
    with pytest.raises(TrustError) as caught:
        PublicKey(bytes(length))
    assert (caught.value.code, caught.value.expected, caught.value.found) == ("bad-key", 32, length)


@given(st.binary(min_size=32, max_size=32))
@settings(max_examples=50)
def test_every_generated_key_is_accepted_and_its_point_is_on_the_curve(seed: bytes) -> None:
    public = SigningKey.from_seed(seed).public
    x, y = decode_point(public.raw)
    d = -121665 * pow(121666, -1, PRIME)
    assert (y * y - x * x - 1 - d * x * x * y * y) % PRIME == 0
    assert encoded(y | ((x & 1) << 255)) == public.raw


# --- forms ----------------------------------------------------------------------------------------------------------


def test_key_id_and_equality(key: SigningKey) -> None:
    raw = key.public.raw
    assert key.public.key_id == blake3(b"kvpack-key-id-v1\x00" + raw).digest()
    assert key.public.key_id.hex().startswith(key.public.short_id)
    assert PublicKey(raw, "one") == PublicKey(raw, "two")
    assert PublicKey(raw) != SigningKey.generate().public


def test_every_text_form_of_a_public_key(key: SigningKey) -> None:
    public = PublicKey(key.public.raw, "alice@host")
    forms = [
        public.to_pem().decode(),
        public.to_ssh_line() + "\n",
        public.raw.hex(),
        public.raw.hex().upper() + "\n",
        base64.b64encode(public.raw).decode(),
    ]
    assert [parse_public_key(form) for form in forms] == [public] * len(forms)
    assert parse_public_key(forms[1]).comment == "alice@host"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "hello world",
        "ab" * 31,
        base64.b64encode(bytes(31)).decode(),
        "ssh-ed25519",
        "ssh-ed25519 !!!!",
        "ssh-ed25519 AAAA",
        "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
    ],
)
def test_text_that_is_no_key(text: str) -> None:
    with pytest.raises(TrustError) as caught:
        parse_public_key(text)
    assert caught.value.code == "bad-key"


def test_ssh_line_with_bytes_after_the_key_or_another_inner_type(key: SigningKey) -> None:
    blob = key.public.ssh_blob
    for damaged in (blob + b"\x00", blob[:-1], blob.replace(b"ed25519", b"ed25518")):
        with pytest.raises(TrustError, match="does not hold one"):
            parse_public_key("ssh-ed25519 " + base64.b64encode(damaged).decode())


def test_two_keys_where_one_is_wanted(key: SigningKey) -> None:
    for text in (key.public.to_pem().decode() * 2, (key.public.to_ssh_line() + "\n") * 2):
        with pytest.raises(TrustError, match="one public key is wanted"):
            parse_public_key(text)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: rsa.generate_private_key(65537, 2048), "RSA"),
        (lambda: ec.generate_private_key(ec.SECP256R1()), "EllipticCurve|EC"),
        (ed448.Ed448PrivateKey.generate, "Ed448"),
        (x25519.X25519PrivateKey.generate, "X25519"),
    ],
    ids=["rsa", "ec", "ed448", "x25519"],
)
def test_other_key_types_are_refused_by_name(make: Callable[[], rsa.RSAPrivateKey], name: str, tmp_path: Path) -> None:
    other = make()
    public_pem = other.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    with pytest.raises(TrustError, match=name) as caught:
        parse_public_key(public_pem.decode())
    assert caught.value.code == "unsupported-key-type"
    path = tmp_path / "other"
    path.touch(0o600)
    path.write_bytes(
        other.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    with pytest.raises(TrustError, match=name) as caught:
        load_private_key(path)
    assert caught.value.code == "unsupported-key-type"


@pytest.mark.parametrize("kind", ["ssh-rsa", "ecdsa-sha2-nistp256", "sk-ssh-ed25519@openssh.com"])
def test_other_ssh_key_types_are_refused_by_name(kind: str) -> None:
    with pytest.raises(TrustError, match=kind) as caught:
        parse_public_key(f"{kind} AAAA me")
    assert caught.value.code == "unsupported-key-type"


# --- files ----------------------------------------------------------------------------------------------------------


def test_save_and_load(key: SigningKey, tmp_path: Path) -> None:
    path = tmp_path / "signer"
    previous = os.umask(0o000)
    try:
        public_path = save_key(key, path)
    finally:
        os.umask(previous)
    assert public_path == tmp_path / "signer.pub"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(public_path.stat().st_mode) == 0o644
    loaded = load_private_key(path)
    assert loaded.public == load_public_key(public_path) == key.public
    assert loaded.sign(b"m") == key.sign(b"m")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["signer", "signer.pub"]


@pytest.mark.parametrize("existing", ["signer", "signer.pub"])
def test_save_never_overwrites_unless_forced(existing: str, key: SigningKey, tmp_path: Path) -> None:
    (tmp_path / existing).write_text("precious")
    with pytest.raises(UsageError) as caught:
        save_key(key, tmp_path / "signer")
    assert caught.value.code == "output-exists"
    assert [entry.name for entry in tmp_path.iterdir()] == [existing]
    assert (tmp_path / existing).read_text() == "precious"
    save_key(key, tmp_path / "signer", force=True)
    assert load_private_key(tmp_path / "signer").public == load_public_key(tmp_path / "signer.pub")
    assert len(list(tmp_path.iterdir())) == 2


def test_save_does_not_follow_a_dangling_link(key: SigningKey, tmp_path: Path) -> None:
    (tmp_path / "signer").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError):
        save_key(key, tmp_path / "signer")
    assert not (tmp_path / "elsewhere").exists()


def test_save_leaves_nothing_behind_when_the_disk_fails(
    key: SigningKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for force in (False, True):
        with pytest.raises(ResourceError) as caught:
            save_key(key, tmp_path / "signer", force=force)
        assert caught.value.code == "disk-full"
        assert list(tmp_path.iterdir()) == []


def test_save_into_a_missing_folder(key: SigningKey, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        save_key(key, tmp_path / "nowhere" / "signer")
    assert caught.value.code == "missing-file"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_private_key_open_to_others_is_refused(mode: int, key: SigningKey, tmp_path: Path) -> None:
    save_key(key, tmp_path / "signer")
    (tmp_path / "signer").chmod(mode)
    with pytest.raises(TrustError) as caught:
        load_private_key(tmp_path / "signer")
    assert caught.value.code == "unsafe-key-permissions"
    assert caught.value.hint == f"chmod 600 {tmp_path / 'signer'}"
    (tmp_path / "signer").chmod(0o400)
    assert load_private_key(tmp_path / "signer").public == key.public


def test_the_wrong_half_of_the_pair_is_named(key: SigningKey, tmp_path: Path) -> None:
    save_key(key, tmp_path / "signer")
    with pytest.raises(TrustError, match=r"signer: this is a private key, but a public key is wanted") as caught:
        load_public_key(tmp_path / "signer")
    assert caught.value.code == "private-key-given"
    with pytest.raises(TrustError, match=r"signer\.pub: this is a public key, but a private key is wanted") as caught:
        load_private_key(tmp_path / "signer.pub")
    assert caught.value.code == "public-key-given"


@pytest.mark.parametrize("load", [load_private_key, load_public_key])
def test_files_that_hold_no_key(load: Callable[[Path], object], tmp_path: Path) -> None:
    def code_of(path: Path) -> str:
        with pytest.raises(KvpackError) as caught:
            load(path)
        return caught.value.code

    foreign = tmp_path / "foreign"
    os.mkfifo(tmp_path / "pipe")
    assert code_of(tmp_path / "missing") == "missing-file"
    assert code_of(tmp_path) == "not-a-file"
    assert code_of(tmp_path / "pipe") == "not-a-file"
    foreign.write_bytes(b"\x89KVP\r\n\x1a\n" + bytes(100))
    assert code_of(foreign) == "bad-key"
    foreign.write_bytes(b"")
    assert code_of(foreign) == "bad-key"
    foreign.write_bytes(b"a" * 70_000)
    assert code_of(foreign) == "file-too-large"


def test_a_damaged_private_key(key: SigningKey, tmp_path: Path) -> None:
    save_key(key, tmp_path / "signer")
    text = (tmp_path / "signer").read_text()
    (tmp_path / "signer").write_text(text.replace("MC4C", "MC4D"))
    with pytest.raises(TrustError, match="damaged") as caught:
        load_private_key(tmp_path / "signer")
    assert caught.value.code == "bad-key"


def test_an_encrypted_private_key(key: SigningKey, tmp_path: Path) -> None:
    path = tmp_path / "signer"
    path.touch(0o600)
    path.write_bytes(
        key._private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"password"),
        )
    )
    with pytest.raises(TrustError, match="encrypted with a password") as caught:
        load_private_key(path)
    assert caught.value.code == "encrypted-key"


def test_the_private_half_is_in_no_repr(key: SigningKey) -> None:
    assert "rivate" not in repr(key)


@needs_ssh
def test_openssh_key_files(tmp_path: Path) -> None:
    ssh_keygen("-q", "-t", "ed25519", "-N", "", "-C", "me@host", "-f", tmp_path / "plain")
    ssh_keygen("-q", "-t", "ed25519", "-N", "password", "-f", tmp_path / "locked")
    ssh_keygen("-q", "-t", "rsa", "-N", "", "-f", tmp_path / "rsa")
    private, public = load_private_key(tmp_path / "plain"), load_public_key(tmp_path / "plain.pub")
    assert private.public == public
    assert public.comment == "me@host"
    assert ssh_keygen("-l", "-f", tmp_path / "plain.pub").decode().split()[1] == public.fingerprint
    assert ssh_keygen("-y", "-f", tmp_path / "plain").decode().split()[1] == public.to_ssh_line().split()[1]
    with pytest.raises(TrustError) as caught:
        load_private_key(tmp_path / "locked")
    assert caught.value.code == "encrypted-key"
    for load, name in ((load_private_key, "rsa"), (load_public_key, "rsa.pub")):
        with pytest.raises(TrustError, match=r"(?i)rsa") as caught:
            load(tmp_path / name)
        assert caught.value.code == "unsupported-key-type"
    with pytest.raises(TrustError) as caught:
        load_private_key(tmp_path / "rsa.pub")
    assert caught.value.code == "public-key-given"


@needs_ssh
def test_openssh_reads_the_public_key_that_kvpack_writes(key: SigningKey, tmp_path: Path) -> None:
    (tmp_path / "line.pub").write_text(key.public.to_ssh_line() + "\n")
    assert ssh_keygen("-l", "-f", tmp_path / "line.pub").decode().split()[1] == key.public.fingerprint
