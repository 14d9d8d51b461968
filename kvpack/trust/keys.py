"""Ed25519 keys: the two key types, and the files that they come from.

Invariants:

* A :class:`PublicKey` that exists is a canonical point of large order (checked in its constructor).
* A private key is read only from a file that nobody but its owner may read, and written only to such a file.
* A file that holds the other half of a key pair, or another type of key, is refused by name, never "malformed".
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from kvpack.errors import KvpackError, ResourceError, TrustError, UsageError
from kvpack.trust.curve import require_strong_key
from kvpack.trust.wire import WireReader, wire_string

__all__ = [
    "KEY_ID_CONTEXT",
    "PublicKey",
    "SigningKey",
    "is_private_key_text",
    "is_ssh_key_type",
    "load_private_key",
    "load_public_key",
    "naming_file",
    "parse_public_key",
    "parse_ssh_public_key",
    "read_text_file",
    "save_key",
]

KEY_ID_CONTEXT = b"kvpack-key-id-v1\x00"
MAX_KEY_FILE_BYTES = 64 * 1024

_SSH_ED25519 = "ssh-ed25519"
_SSH_KEY_TYPE = re.compile(r"(?:sk-)?(?:ssh|ecdsa)-[a-z0-9@.-]+")
_PEM_LABEL = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----")


@dataclass(frozen=True)
class PublicKey:
    """An Ed25519 public key. Two keys are equal if their 32 bytes are; the comment only helps a reader.

    Raises TrustError ``weak-key`` or ``bad-key`` for bytes that must not serve as a key (see ``kvpack.trust.curve``).
    """

    raw: bytes
    comment: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        require_strong_key(self.raw)

    @property
    def key_id(self) -> bytes:
        """The 32 bytes that name this key in a signature slot."""
        return blake3(KEY_ID_CONTEXT + self.raw).digest()

    @property
    def short_id(self) -> str:
        """The first 16 hex digits of the key id, for people; never compared."""
        return self.key_id.hex()[:16]

    @property
    def ssh_blob(self) -> bytes:
        """The key in SSH wire form (RFC 8709, section 4)."""
        return wire_string(_SSH_ED25519.encode()) + wire_string(self.raw)

    @property
    def fingerprint(self) -> str:
        """``SHA256:`` and 43 characters of base64, as ``ssh-keygen -l`` prints it."""
        digest = hashlib.sha256(self.ssh_blob).digest()
        return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")

    def verify(self, signature: bytes, message: bytes) -> bool:
        """Whether ``signature`` (64 bytes) is this key's Ed25519 signature of ``message``."""
        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, message)
        except InvalidSignature:
            return False
        return True

    def to_pem(self) -> bytes:
        """SubjectPublicKeyInfo PEM (RFC 8410)."""
        return Ed25519PublicKey.from_public_bytes(self.raw).public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    def to_ssh_line(self) -> str:
        """The one-line OpenSSH form, without a newline."""
        line = f"{_SSH_ED25519} {base64.b64encode(self.ssh_blob).decode()}"
        return f"{line} {self.comment}" if self.comment else line


@dataclass(frozen=True)
class SigningKey:
    """An Ed25519 key pair. The private half is in no ``repr`` and in no comparison."""

    public: PublicKey
    _private: Ed25519PrivateKey = field(repr=False, compare=False)

    @classmethod
    def generate(cls) -> SigningKey:
        """A fresh key pair from the system's random source."""
        return cls._from_private(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> SigningKey:
        """The key pair of a 32-byte RFC 8032 secret, for test vectors."""
        if len(seed) != 32:
            raise TrustError("bad-key", "an Ed25519 secret has 32 bytes", expected=32, found=len(seed))
        return cls._from_private(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def _from_private(cls, private: Ed25519PrivateKey) -> SigningKey:
        raw = private.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        return cls(PublicKey(raw), private)

    def sign(self, message: bytes) -> bytes:
        """The 64-byte Ed25519 signature of ``message``."""
        return self._private.sign(message)

    def to_pem(self) -> bytes:
        """Unencrypted PKCS8 PEM (RFC 8410)."""
        return self._private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


# --- text forms -----------------------------------------------------------------------------------------------------


def is_private_key_text(text: str) -> bool:
    """Whether the text holds a PEM block of a private key of any kind."""
    return any(label.endswith("PRIVATE KEY") for label in _PEM_LABEL.findall(text))


def is_ssh_key_type(word: str) -> bool:
    """Whether ``word`` is an SSH key type, supported or not."""
    return _SSH_KEY_TYPE.fullmatch(word) is not None


def parse_ssh_public_key(key_type: str, encoded: str, comment: str | None = None) -> PublicKey:
    """The key of an OpenSSH public key's two words. Raises TrustError for another type or damaged base64."""
    if key_type != _SSH_ED25519:
        raise _unsupported(key_type)
    try:
        blob = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise TrustError("bad-key", "the ssh-ed25519 key is not valid base64") from error
    reader = WireReader(blob)
    inner_type, raw = reader.string(), reader.string()
    if inner_type is None or raw is None or not reader.at_end or inner_type != _SSH_ED25519.encode():
        raise TrustError("bad-key", "the base64 after ssh-ed25519 does not hold one ssh-ed25519 key")
    if comment is not None and not comment.isprintable():
        raise TrustError("bad-key", "the comment of the key holds control characters")
    return PublicKey(raw, comment)


def parse_public_key(text: str) -> PublicKey:
    """One public key: SPKI PEM, an OpenSSH line, or its 32 bytes as 64 hex digits or 44 characters of base64.

    Raises TrustError: ``private-key-given``, ``unsupported-key-type``, ``weak-key`` or ``bad-key``.
    """
    labels = _PEM_LABEL.findall(text)
    if is_private_key_text(text):
        raise TrustError(
            "private-key-given",
            "this is a private key, but a public key is wanted here",
            hint="give the .pub file of the pair, and keep the private key to yourself",
        )
    if labels:
        return _parse_spki(text, labels)
    words = text.split(None, 2)
    if len(words) >= 2 and is_ssh_key_type(words[0]):
        if len(text.strip().splitlines()) > 1:
            raise TrustError("bad-key", "one public key is wanted here, but there are several lines")
        return parse_ssh_public_key(words[0], words[1], words[2].strip() if len(words) == 3 else None)
    if len(words) == 1:
        raw = _raw_key_bytes(words[0])
        if raw is not None:
            return PublicKey(raw)
    raise TrustError(
        "bad-key",
        "this is not a public key",
        hint="a public key is SPKI PEM, an 'ssh-ed25519 AAAA...' line, 64 hex digits or 44 characters of base64",
    )


def _parse_spki(text: str, labels: list[str]) -> PublicKey:
    if len(labels) > 1:
        raise TrustError("bad-key", f"one public key is wanted here, but there are {len(labels)} PEM blocks")
    if labels != ["PUBLIC KEY"]:
        raise TrustError(
            "unsupported-key-type",
            f"a PEM block {labels[0]!r} is not an Ed25519 public key",
            expected="PUBLIC KEY",
        )
    try:
        key = serialization.load_pem_public_key(text.encode())
    except UnsupportedAlgorithm as error:
        raise TrustError("unsupported-key-type", "the PEM block holds a key of an unknown type") from error
    except ValueError as error:
        raise TrustError("bad-key", "the PEM block does not hold a well-formed public key") from error
    if not isinstance(key, Ed25519PublicKey):
        raise _unsupported(type(key).__name__.lstrip("_").removesuffix("PublicKey"))
    return PublicKey(key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw))


def _raw_key_bytes(word: str) -> bytes | None:
    if re.fullmatch(r"[0-9a-fA-F]{64}", word):
        return bytes.fromhex(word)
    if re.fullmatch(r"[A-Za-z0-9+/]{43}=", word):
        raw = base64.b64decode(word)
        return raw if base64.b64encode(raw).decode() == word else None
    return None


def _unsupported(key_type: str) -> TrustError:
    return TrustError(
        "unsupported-key-type",
        f"a key of type {key_type} is not supported",
        expected="Ed25519",
        found=key_type,
        hint="make an Ed25519 key with 'kvpack keygen' or 'ssh-keygen -t ed25519'",
    )


# --- files ----------------------------------------------------------------------------------------------------------


def load_public_key(path: str | os.PathLike[str]) -> PublicKey:
    """The public key in a file, in any form that :func:`parse_public_key` knows.

    Raises UsageError (no such file), ResourceError (not readable) or TrustError (not a usable public key).
    """
    text, _ = read_text_file(path, MAX_KEY_FILE_BYTES)
    with naming_file(path):
        return parse_public_key(text)


def load_private_key(path: str | os.PathLike[str]) -> SigningKey:
    """The key pair of a private key file: PKCS8 PEM or OpenSSH's own form, not encrypted.

    Raises UsageError (no such file), ResourceError (not readable), TrustError: ``public-key-given``,
    ``unsafe-key-permissions`` (group or others may read it), ``encrypted-key``, ``unsupported-key-type``, ``bad-key``.
    """
    text, mode = read_text_file(path, MAX_KEY_FILE_BYTES)
    with naming_file(path):
        if not is_private_key_text(text):
            _refuse_public(text)
        if os.name == "posix" and mode & 0o077:
            raise TrustError(
                "unsafe-key-permissions",
                f"the private key is open to others (mode {mode:04o})",
                expected="0600",
                found=f"{mode:04o}",
                hint=f"chmod 600 {os.fspath(path)}",
            )
        return _parse_private(text)


def _refuse_public(text: str) -> None:
    try:
        parse_public_key(text)
    except TrustError as error:
        # A public key that may not be used (weak, of another type) is a public key all the same.
        if error.code == "bad-key":
            raise TrustError(
                "bad-key",
                "this is not a private key",
                hint="a private key is a PKCS8 PEM file or an OpenSSH private key file, not encrypted",
            ) from error
    raise TrustError(
        "public-key-given",
        "this is a public key, but a private key is wanted here",
        hint="give the file without .pub",
    )


def _parse_private(text: str) -> SigningKey:
    labels = _PEM_LABEL.findall(text)
    if len(labels) > 1:
        raise TrustError("bad-key", f"one private key is wanted here, but there are {len(labels)} PEM blocks")
    load = (
        serialization.load_ssh_private_key if labels == ["OPENSSH PRIVATE KEY"] else serialization.load_pem_private_key
    )
    try:
        key = load(text.encode(), password=None)
    except TypeError as error:  # How the library says that a password is needed.
        raise TrustError(
            "encrypted-key",
            "the private key is encrypted with a password",
            hint="sign with an agent (ssh-keygen -Y sign), or remove the password from a copy (ssh-keygen -p)",
        ) from error
    except UnsupportedAlgorithm as error:
        raise TrustError("unsupported-key-type", "the private key is of a type that is not supported") from error
    except ValueError as error:
        raise TrustError("bad-key", "the private key is damaged") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise _unsupported(type(key).__name__.lstrip("_").removesuffix("PrivateKey"))
    return SigningKey._from_private(key)


def save_key(key: SigningKey, path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write the private key (PKCS8 PEM, mode 0600) to ``path`` and the public one (SPKI PEM, 0644) to ``path.pub``.

    Both files are on disk (fsync) when this returns the path of the public one. Without ``force`` neither may exist:
    UsageError ``output-exists``, and nothing is changed. ResourceError if the machine refuses.
    """
    private_path = Path(path)
    public_path = Path(os.fspath(path) + ".pub")
    if not force:
        for existing in (private_path, public_path):
            if existing.is_symlink() or existing.exists():
                raise _output_exists(existing)
    _write_file(private_path, key.to_pem(), 0o600, force)
    try:
        _write_file(public_path, key.public.to_pem(), 0o644, force)
    except KvpackError:
        if not force:
            private_path.unlink(missing_ok=True)
        raise
    return public_path


def _write_file(path: Path, content: bytes, mode: int, force: bool) -> None:
    """Write a new file; with ``force``, replace an old one in one step, so that no half of either is ever seen."""
    target = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp") if force else path
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise _output_exists(path) from error
    except OSError as error:
        raise os_failure(path, error) from error
    try:
        with os.fdopen(descriptor, "wb") as stream:
            os.fchmod(stream.fileno(), mode)
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        if force:
            os.replace(target, path)
        _sync_folder(path.parent)
    except BaseException as error:  # An interrupt, too, must not leave half a key behind.
        with contextlib.suppress(OSError):
            target.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise os_failure(path, error) from error
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _output_exists(path: Path) -> UsageError:
    return UsageError("output-exists", f"{path} exists already", hint="choose another name, or use --force")


def read_text_file(path: str | os.PathLike[str], limit: int) -> tuple[str, int]:
    """The UTF-8 text of a regular file of at most ``limit`` bytes, and its permission bits.

    Text and mode come from one open file, so that the file cannot be exchanged between the two.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UsageError("not-a-file", f"{os.fspath(path)} is not a regular file")
            content = stream.read(limit + 1)
    except OSError as error:
        raise os_failure(path, error) from error
    if len(content) > limit:
        raise UsageError(
            "file-too-large",
            f"{os.fspath(path)} is too large for a key or trust file",
            expected=f"<= {limit} bytes",
        )
    try:
        return content.decode(), stat.S_IMODE(status.st_mode)
    except UnicodeDecodeError as error:
        raise TrustError(
            "bad-key", f"{os.fspath(path)} is not a text file, so neither a key nor a trust file"
        ) from error


def os_failure(path: str | os.PathLike[str], error: OSError) -> KvpackError:
    """The kvpack error for what the operating system answered about ``path``."""
    name, reason = os.fspath(path), os.strerror(error.errno) if error.errno else str(error)
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return UsageError("missing-file", f"{name}: {reason}")
    if error.errno == errno.EISDIR:
        return UsageError("not-a-file", f"{name} is a folder")
    code = {
        errno.ENOSPC: "disk-full",
        errno.EDQUOT: "disk-full",
        errno.EROFS: "read-only",
        errno.EACCES: "permission-denied",
        errno.EPERM: "permission-denied",
    }.get(error.errno or 0, "io-error")
    return ResourceError(code, f"{name}: {reason}")


@contextlib.contextmanager
def naming_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Put the file's name before the message of a TrustError that leaves the block."""
    try:
        yield
    except TrustError as error:
        error.message = f"{os.fspath(path)}: {error.message}"
        error.args = (error.message,)
        raise
