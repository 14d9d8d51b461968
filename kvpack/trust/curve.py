"""Which 32-byte strings may serve as Ed25519 public keys.

The library that verifies signatures checks neither that a public key is canonical nor that it has a large order: with
the identity point as "key", a signature of zeros fits every message. kvpack therefore decodes each public key by
itself, once, when the key is loaded. Nothing here handles secrets, so nothing needs constant time.

Source: RFC 8032, section 5.1 (the curve) and 5.1.3 (decoding).
"""

from __future__ import annotations

from kvpack.errors import TrustError

__all__ = ["Point", "decode_point", "has_small_order", "require_strong_key"]

Point = tuple[int, int]

_PRIME = 2**255 - 19
_D = -121665 * pow(121666, -1, _PRIME) % _PRIME
_SQRT_MINUS_ONE = pow(2, (_PRIME - 1) // 4, _PRIME)
_IDENTITY: Point = (0, 1)


def decode_point(raw: bytes) -> Point:
    """The affine point (x, y) that ``raw`` (32 bytes) encodes canonically.

    Raises TrustError ``weak-key`` for y >= 2^255 - 19 and for x = 0 with the sign bit set (two encodings of points
    that have another one), ``bad-key`` for a y that no point of the curve has.
    """
    encoded = int.from_bytes(raw, "little")
    sign = encoded >> 255
    y = encoded & ((1 << 255) - 1)
    if y >= _PRIME:
        raise TrustError("weak-key", "the public key is not canonical: its y is not below 2^255 - 19")
    numerator = (y * y - 1) % _PRIME
    denominator = (_D * y * y + 1) % _PRIME
    x_squared = numerator * pow(denominator, -1, _PRIME) % _PRIME
    x = pow(x_squared, (_PRIME + 3) // 8, _PRIME)
    if x * x % _PRIME != x_squared:
        x = x * _SQRT_MINUS_ONE % _PRIME
    if x * x % _PRIME != x_squared:
        raise TrustError("bad-key", "the public key is not a point of the Ed25519 curve")
    if x == 0 and sign:
        raise TrustError("weak-key", "the public key is not canonical: its sign bit is set although x is 0")
    if x & 1 != sign:
        x = _PRIME - x
    return x, y


def _double(point: Point) -> Point:
    x, y = point
    xx, yy = x * x % _PRIME, y * y % _PRIME
    product = _D * xx * yy % _PRIME
    # The denominators are never 0: the addition law of this curve is complete.
    doubled_x = 2 * x * y * pow(1 + product, -1, _PRIME) % _PRIME
    doubled_y = (yy + xx) * pow(1 - product, -1, _PRIME) % _PRIME
    return doubled_x, doubled_y


def has_small_order(point: Point) -> bool:
    """Whether ``point`` is one of the eight points whose order divides 8."""
    for _ in range(3):
        point = _double(point)
    return point == _IDENTITY


def require_strong_key(raw: bytes) -> None:
    """Raise TrustError unless ``raw`` is the canonical encoding of a curve point of large order."""
    if len(raw) != 32:
        raise TrustError(
            "bad-key",
            f"an Ed25519 public key has 32 bytes, this one has {len(raw)}",
            expected=32,
            found=len(raw),
        )
    if has_small_order(decode_point(raw)):
        raise TrustError(
            "weak-key",
            "the public key is a point of small order, for which a forged signature verifies",
            hint="this is not a key that any key generator makes; do not trust its source",
        )
