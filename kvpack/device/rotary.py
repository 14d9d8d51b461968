"""Keys that were rotated to one position, rotated on to another: the reference of the ``rope`` kernel.

A rotary embedding turns pair ``i`` of a key by ``position * inverse_frequency[i]`` (Su et al., RoFormer, section 3.2),
so a key moves to another position by a turn through the difference. A factor that scales sines and cosines alike
(YaRN's) is in the key already and stays. The turn is rounded, so a moved key is near the key that the model would have
computed there and not equal to it: a claim of COMPATIBLE, never of BITWISE.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvpack.device.checks import refused

__all__ = ["Pairing", "rerotate", "turn_table"]

Reals: TypeAlias = NDArray[np.float32]


class Pairing(Enum):
    """Which elements of a head turn together, with ``n`` pairs."""

    HALF = "half"
    """Element ``i`` with element ``n + i`` (GPT-NeoX, Llama in transformers)."""

    INTERLEAVED = "interleaved"
    """Element ``2i`` with element ``2i + 1`` (GPT-J, Llama as published)."""


def turn_table(inverse_frequency: NDArray[np.float64], turns: NDArray[np.int64]) -> tuple[Reals, Reals]:
    """Cosines and sines, each f32 [rows, pairs], of ``turns[row] * inverse_frequency[pair]`` radians.

    ``turns`` [rows] are new position minus old. Angles, cosines and sines are computed in f64 and rounded once.
    """
    angles = turns.astype(np.float64)[:, None] * inverse_frequency.astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rerotate(keys: Reals, cosines: Reals, sines: Reals, pairing: Pairing) -> Reals:
    """f32 keys [rows, heads, head_dim] turned by a table [rows, pairs], in a new array.

    The first ``2 * pairs`` elements of a head turn; the others, where the embedding is partial, are copied. With a pair
    ``(a, b)`` the result is ``(a * cos - b * sin, b * cos + a * sin)``: two products, each rounded to f32, then one
    sum or difference, rounded again (no fused multiply-add).

    Raises InstallError ``bad-rotary`` where the shapes do not fit each other.
    """
    pairs = cosines.shape[-1] if cosines.ndim == 2 else 0
    if keys.ndim != 3 or cosines.shape != sines.shape or cosines.shape != (keys.shape[0], pairs):
        raise refused("bad-rotary", "keys, cosines and sines", "[rows, heads, dim] and twice [rows, pairs]", keys.shape)
    if 2 * pairs > keys.shape[-1]:
        raise refused("bad-rotary", "the pairs of a table", f"at most {keys.shape[-1] // 2}", pairs)
    if pairing is Pairing.HALF:
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    else:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    a, b = keys[..., first], keys[..., second]
    cosine, sine = cosines[:, None, :], sines[:, None, :]
    turned = keys.copy()
    turned[..., first] = a * cosine - b * sine
    turned[..., second] = b * cosine + a * sine
    return turned
