"""Prefix keys: the names under which a store finds state by the tokens that led to it.

A chain of keyed BLAKE3 hashes. The root binds the compatibility fields of the identity and the geometry; each node
binds the one before it, the next 256 token ids and whatever content lies at their positions. A position that is not a
multiple of 256 has one *final* node of its own, made from the tokens since the last whole block.

Every message is injective: it begins with a tag of its kind, integers are little-endian and of fixed width (token ids
are i32), and every variable field has its length before it. So the same tokens have the same key in every process, on
every platform and in every integer type, and nobody without the store's 32-byte key can guess a name.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeAlias

import numpy as np
from blake3 import blake3

from kvpack.errors import UsageError
from kvpack.model.geometry import Geometry
from kvpack.model.identity import Identity, IdentityValue
from kvpack.pack import canonical

__all__ = [
    "BLOCK_TOKENS",
    "KEY_BYTES",
    "ContentField",
    "ContentKind",
    "PrefixKeys",
    "TokenChain",
    "Tokens",
    "numerics_digest",
    "token_ids",
]

BLOCK_TOKENS: Final = 256
KEY_BYTES: Final = 32
HINT_BYTES: Final = 8
_TOKEN_BYTES: Final = 4
_DOMAIN: Final = b"kvpack-prefix-v1\x00"
_ROOT, _BLOCK, _FINAL, _HINT, _TENANT, _NUMERICS = (_DOMAIN + bytes([tag]) for tag in range(1, 7))

Tokens: TypeAlias = Any
"""Token ids: a list, a tuple, an array, or a one-dimensional NumPy array or tensor of any integer type."""


class ContentKind(Enum):
    """What can stand at a position that its token id does not determine; the values are hashed."""

    IMAGE = "image"
    AUDIO = "audio"
    SOFT_PROMPT = "soft-prompt"
    ADAPTER = "adapter"
    SALT = "salt"


@dataclass(frozen=True)
class ContentField:
    """Content bound at a token position: every prefix that includes that token depends on it.

    ``content`` is the content or a digest of it. What holds for the whole session (an adapter, a tenant's salt) is
    bound at position 0.
    """

    kind: ContentKind
    position: int
    content: bytes


def token_ids(tokens: Tokens) -> array[int]:
    """``tokens`` as an ``array('i')``; the same values whatever the container and its integer type.

    Raises UsageError ``bad-tokens`` for anything but integers in one dimension, ``token-out-of-range`` outside i32.
    """
    if isinstance(tokens, array) and tokens.typecode == "i":
        return tokens
    if isinstance(tokens, (bytes, bytearray, memoryview, str)):
        raise UsageError("bad-tokens", "token ids are integers, not bytes or text", found=type(tokens).__name__)
    if not isinstance(tokens, (list, tuple, range, array, np.ndarray)) and hasattr(tokens, "tolist"):
        tokens = tokens.tolist()
    try:
        if isinstance(tokens, np.ndarray):
            return _from_numpy(tokens)
        return array("i", tokens)
    except TypeError:
        found = type(tokens).__name__
        raise UsageError("bad-tokens", "token ids are integers in one dimension", found=found) from None
    except OverflowError:
        raise UsageError("token-out-of-range", "a token id does not fit into 32 bits", expected="i32") from None


def _from_numpy(tokens: np.ndarray[Any, np.dtype[Any]]) -> array[int]:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise TypeError
    if tokens.size and (int(tokens.min()) < -(1 << 31) or int(tokens.max()) >= 1 << 31):
        raise OverflowError
    return array("i", tokens.astype(np.int32, copy=False).tobytes())


def _framed(payload: bytes) -> bytes:
    return struct.pack("<Q", len(payload)) + payload


def _value(value: IdentityValue) -> bytes:
    if isinstance(value, str):
        return b"s" + _framed(value.encode())
    if isinstance(value, bytes):
        return b"b" + _framed(value)
    return b"u" + struct.pack("<Q", value)


def _fields(fields: Iterable[tuple[str, IdentityValue]]) -> bytes:
    ordered = sorted(fields)
    return struct.pack("<I", len(ordered)) + b"".join(_framed(n.encode()) + _value(v) for n, v in ordered)


def numerics_digest(identity: Identity) -> bytes:
    """BLAKE3 of the numerics fields: two states with the same digest make the claim BITWISE of each other."""
    return blake3(_NUMERICS + _fields(identity.numerics.items())).digest()


@dataclass(frozen=True)
class PrefixKeys:
    """The keys of one store and one tenant; ``key`` is 32 secret bytes.

    Raises UsageError ``bad-store-key`` for another length.
    """

    key: bytes

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES:
            raise UsageError(
                "bad-store-key", f"a store's key has {KEY_BYTES} bytes", expected=KEY_BYTES, found=len(self.key)
            )

    def for_tenant(self, tenant: str) -> PrefixKeys:
        """The keys of a tenant: nothing that one tenant stores is found by another."""
        return PrefixKeys(self._hash(_TENANT + _framed(tenant.encode())))

    def chain(
        self, tokens: Tokens, identity: Identity, geometry: Geometry, content: Sequence[ContentField] = ()
    ) -> TokenChain:
        """The nodes of ``tokens``; raises UsageError ``bad-tokens``, ``token-out-of-range``, ``bad-content``."""
        ids = token_ids(tokens)
        for field in content:
            if not 0 <= field.position < max(1, len(ids)):
                raise UsageError(
                    "bad-content",
                    f"{field.kind.value} at {field.position} lies outside the {len(ids)} tokens",
                    field="position",
                    expected=f"0 to {len(ids) - 1}",
                    found=field.position,
                )
        ordered = sorted(content, key=lambda f: (f.position, f.kind.value, f.content))
        compatibility = _fields(identity.compatibility.items())
        root = self._hash(_ROOT + compatibility + _framed(canonical.encode(geometry.to_wire())))
        return TokenChain(self, ids, tuple(ordered), root)

    def _hash(self, message: bytes) -> bytes:
        return blake3(message, key=self.key).digest()


class TokenChain:
    """The nodes of one token sequence: ``nodes[i]`` names its first ``256 * i`` tokens."""

    def __init__(self, keys: PrefixKeys, ids: array[int], content: tuple[ContentField, ...], root: bytes) -> None:
        """Made by :meth:`PrefixKeys.chain`."""
        self.ids = ids
        self.content = content
        self._keys = keys
        native = array("i", ids)
        if sys.byteorder == "big":
            native.byteswap()
        self._wire = native.tobytes()
        self._by_block: dict[int, list[ContentField]] = {}
        for field in content:
            self._by_block.setdefault(field.position // BLOCK_TOKENS, []).append(field)
        nodes, key = [root], keys.key
        step = BLOCK_TOKENS * _TOKEN_BYTES
        lead, none = struct.pack("<I", BLOCK_TOKENS), struct.pack("<I", 0)
        for block in range(len(ids) // BLOCK_TOKENS):
            extra = self._content(block, BLOCK_TOKENS) if block in self._by_block else none
            body = b"".join((_BLOCK, nodes[-1], lead, self._wire[block * step : (block + 1) * step], extra))
            nodes.append(blake3(body, key=key).digest())
        self.nodes: tuple[bytes, ...] = tuple(nodes)

    def __len__(self) -> int:
        return len(self.ids)

    def final(self, block: int, tail: int) -> bytes:
        """The final node of the position ``tail`` tokens (1 to 255) behind node ``block``."""
        first = block * BLOCK_TOKENS * _TOKEN_BYTES
        tokens = self._wire[first : first + tail * _TOKEN_BYTES]
        body = _FINAL + self.nodes[block] + struct.pack("<I", tail) + tokens + self._content(block, tail)
        return self._keys._hash(body)

    def hint(self, block: int) -> bytes:
        """Eight bytes that name the one token behind node ``block``; empty where there is none."""
        at = block * BLOCK_TOKENS
        if at >= len(self.ids):
            return b""
        token = self._wire[at * _TOKEN_BYTES : (at + 1) * _TOKEN_BYTES]
        return self._keys._hash(_HINT + self.nodes[block] + token + self._content(block, 1))[:HINT_BYTES]

    def key_at(self, position: int) -> tuple[bytes, int, bytes]:
        """What names ``position``: its node, the tokens behind that node, and the final node (empty if none)."""
        block, tail = divmod(position, BLOCK_TOKENS)
        return self.nodes[block], tail, self.final(block, tail) if tail else b""

    def content_from(self, position: int) -> int:
        """The first position from ``position`` on at which content is bound; the length of the chain if nowhere."""
        return min((f.position for f in self.content if f.position >= position), default=len(self.ids))

    def _content(self, block: int, tail: int) -> bytes:
        first = block * BLOCK_TOKENS
        fields = [f for f in self._by_block.get(block, ()) if f.position < first + tail]
        parts = [struct.pack("<I", len(fields))]
        for field in fields:
            kind = field.kind.value.encode()
            parts += [struct.pack("<I", field.position - first), _framed(kind), _framed(field.content)]
        return b"".join(parts)
