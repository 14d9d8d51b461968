"""Canonical MessagePack: one value, one byte string; everything else is refused."""

from __future__ import annotations

import tracemalloc

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpack.errors import FormatError
from kvpack.pack.canonical import MAX_DEPTH, decode, encode

scalars = st.one_of(
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.text(max_size=40),
    st.binary(max_size=300),
    st.floats(allow_nan=False, allow_infinity=False),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(max_size=8), values, max_size=6))
def test_round_trip(value: dict[str, object]) -> None:
    assert decode(encode(value)) == value


@given(st.dictionaries(st.text(max_size=8), st.integers(), max_size=6))
def test_the_order_of_insertion_does_not_matter(value: dict[str, int]) -> None:
    backwards = dict(reversed(list(value.items())))
    try:
        assert encode(value) == encode(backwards)
    except OverflowError:
        assert any(not -(1 << 63) <= v < 1 << 64 for v in value.values())


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_a_value_or_one_error(buffer: bytes) -> None:
    try:
        value = decode(buffer)
    except FormatError:
        return
    assert encode(value) == buffer


@given(st.dictionaries(st.text(max_size=4), values, min_size=1, max_size=4), st.data())
def test_no_other_bytes_decode_to_the_same_value(value: dict[str, object], data: st.DataObject) -> None:
    good = bytearray(encode(value))
    at = data.draw(st.integers(0, len(good) - 1))
    good[at] ^= data.draw(st.integers(1, 255))
    try:
        other = decode(bytes(good))
    except FormatError:
        return
    assert encode(other) == bytes(good)
    assert encode(other) != encode(value)


def nested(depth: int) -> dict[str, object]:
    value: dict[str, object] = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    "buffer",
    [
        b"",
        b"\x80\x00",
        b"\x90",
        b"\x01",
        b"\x81\xa1a\xc0",
        b"\x81\xa1a\xc1",
        b"\x81\xa1a\xca\x00\x00\x00\x00",
        b"\x81\xa1a\xd4\x01\x00",
        b"\x81\xa1a\xd6\xff\x00\x00\x00\x00",
        b"\x81\xa1a\xcc\x01",
        b"\x81\xa1a\xd9\x01b",
        b"\x81\xa1a\xc5\x00\x01x",
        b"\x81\xa1a\xdc\x00\x01\x01",
        b"\xde\x00\x01\xa1a\x01",
        b"\x81\xd9\x01a\x01",
        b"\x82\xa1b\x01\xa1a\x01",
        b"\x82\xa1a\x01\xa1a\x01",
        b"\x81\x01\x01",
        b"\x81\xc4\x01a\x01",
        b"\x81\xa1\xff\x01",
        b"\x81\xa1a\xa1\xff",
        b"\x81\xa1a",
        b"\x81\xa1a\xdd\xff\xff\xff\xff",
        b"\x81\xa1a\xdd\x00\x00\x00\x09",
        msgpack.packb(nested(MAX_DEPTH + 1)),
    ],
)
def test_every_other_form_is_refused(buffer: bytes) -> None:
    with pytest.raises(FormatError) as caught:
        decode(buffer)
    assert caught.value.code in ("not-canonical", "limit-exceeded")


def test_the_deepest_allowed_value_is_read() -> None:
    assert decode(encode(nested(MAX_DEPTH))) == nested(MAX_DEPTH)


def test_a_lying_container_allocates_nothing() -> None:
    lie = b"\x81\xa1a" + b"\xdd\x00\x0f\xff\xff" * 8
    tracemalloc.start()
    with pytest.raises(FormatError):
        decode(lie)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
