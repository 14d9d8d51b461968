"""Keys moved to other positions, against complex numbers in f64 and against the rotation from scratch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvpack.device.rotary import Pairing, rerotate, turn_table
from kvpack.errors import InstallError


def frequencies(pairs: int, theta: float = 10_000.0) -> NDArray[np.float64]:
    return theta ** -(np.arange(pairs, dtype=np.float64) / pairs)


def rotated(
    raw: NDArray[np.float64], positions: NDArray[np.int64], pairs: int, pairing: Pairing
) -> NDArray[np.float64]:
    """The direct formula: each pair is a complex number, multiplied by exp(i * position * frequency)."""
    result = raw.copy()
    for pair in range(pairs):
        a, b = (pair, pairs + pair) if pairing is Pairing.HALF else (2 * pair, 2 * pair + 1)
        turned = (raw[..., a] + 1j * raw[..., b]) * np.exp(1j * positions * frequencies(pairs)[pair])[:, None]
        result[..., a], result[..., b] = turned.real, turned.imag
    return result


@given(st.sampled_from(Pairing), st.integers(1, 8), st.integers(0, 5), st.integers(0, 4000), st.integers(-4000, 4000))
def test_a_moved_key_is_near_the_key_rotated_there(
    pairing: Pairing, pairs: int, plain: int, start: int, shift: int
) -> None:
    raw = np.random.default_rng(pairs).standard_normal((6, 2, 2 * pairs + plain))
    old = start + np.arange(6)
    keys = rotated(raw, old, pairs, pairing).astype(np.float32)
    moved = rerotate(keys, *turn_table(frequencies(pairs), np.full(6, shift)), pairing)
    np.testing.assert_allclose(moved, rotated(raw, old + shift, pairs, pairing), atol=2e-6)
    assert np.array_equal(moved[..., 2 * pairs :], keys[..., 2 * pairs :])


def test_the_other_pairing_is_far() -> None:
    raw = np.random.default_rng(0).standard_normal((6, 2, 8))
    keys = rotated(raw, np.arange(6), 4, Pairing.HALF).astype(np.float32)
    moved = rerotate(keys, *turn_table(frequencies(4), np.full(6, 3)), Pairing.INTERLEAVED)
    assert np.abs(moved - rotated(raw, np.arange(6) + 3, 4, Pairing.HALF)).max() > 0.1


@pytest.mark.parametrize("pairing", Pairing)
def test_no_turn_changes_no_word(pairing: Pairing) -> None:
    keys = np.random.default_rng(1).standard_normal((4, 3, 10)).astype(np.float32)
    before = keys.copy()
    moved = rerotate(keys, *turn_table(frequencies(5), np.zeros(4, dtype=np.int64)), pairing)
    assert np.array_equal(moved.view(np.uint32), before.view(np.uint32))
    assert not np.shares_memory(moved, keys)


def test_each_product_is_rounded_on_its_own() -> None:
    rng = np.random.default_rng(2)
    keys = rng.standard_normal((50, 1, 2)).astype(np.float32)
    cosines, sines = turn_table(frequencies(1), np.arange(50))
    a, b, c, s = keys[:, 0, 0], keys[:, 0, 1], cosines[:, 0], sines[:, 0]
    fused = (a.astype(np.float64) * c - (b * s).astype(np.float64)).astype(np.float32)
    moved = rerotate(keys, cosines, sines, Pairing.HALF)[:, 0, 0]
    assert np.array_equal(moved, (a * c).astype(np.float32) - (b * s).astype(np.float32))
    assert not np.array_equal(moved, fused)


def test_the_table_is_computed_in_f64() -> None:
    cosines, _ = turn_table(frequencies(2), np.array([1_000_003]))
    assert cosines.dtype == np.float32
    assert cosines[0, 1] == np.float32(np.cos(1_000_003 * 0.01))
    assert cosines[0, 1] != np.cos(np.float32(1_000_003) * np.float32(0.01))


@pytest.mark.parametrize(
    ("keys", "cosines", "sines"),
    [((4, 8), (4, 2), (4, 2)), ((4, 1, 8), (3, 2), (3, 2)), ((4, 1, 8), (4, 2), (4, 3)), ((4, 1, 8), (4, 5), (4, 5))],
)
def test_shapes_that_do_not_fit_are_refused(
    keys: tuple[int, ...], cosines: tuple[int, ...], sines: tuple[int, ...]
) -> None:
    k, c, s = (np.zeros(shape, dtype=np.float32) for shape in (keys, cosines, sines))
    with pytest.raises(InstallError) as refusal:
        rerotate(k, c, s, Pairing.HALF)
    assert refusal.value.code == "bad-rotary"
