"""Encodings: sizes, the rule that a block stays inside a head, and the wire form."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpack.errors import CompatibilityError, FormatError
from kvpack.model.encoding import (
    ENCODINGS,
    CompositeEncoding,
    CompositeField,
    UnknownEncoding,
    encoding_from_wire,
)

SCALAR_BYTES = {
    "f32": 4, "f16": 2, "bf16": 2, "i8": 1, "u8": 1, "i32": 4, "i64": 8, "f64": 8, "f8_e4m3": 1, "f8_e5m2": 1,
}  # fmt: skip
BLOCK_BYTES = {"q8_0": 34, "q5_1": 24, "q5_0": 22, "q4_1": 20, "q4_0": 18, "iq4_nl": 18}

names = st.from_regex(r"[a-z0-9_]{1,32}", fullmatch=True)


@st.composite
def composites(draw: st.DrawFn) -> CompositeEncoding:
    fields = []
    for name in draw(st.lists(names, min_size=1, max_size=5, unique=True)):
        encoding = draw(st.sampled_from(list(ENCODINGS.values())))
        fields.append(CompositeField(name, encoding, draw(st.integers(1, 9)) * encoding.block_elements))
    return CompositeEncoding(tuple(fields))


def test_the_registry_holds_exactly_the_known_encodings() -> None:
    found = {name: (e.block_elements, e.block_bytes) for name, e in ENCODINGS.items()}
    assert found == {n: (1, b) for n, b in SCALAR_BYTES.items()} | {n: (32, b) for n, b in BLOCK_BYTES.items()}


@pytest.mark.parametrize("name", ENCODINGS)
def test_the_fields_of_a_block_fill_it(name: str) -> None:
    encoding = ENCODINGS[name]
    assert encoding.name == name
    assert sum(size for _, size in encoding.fields) == encoding.block_bytes


def test_the_fields_of_the_block_encodings_are_in_stored_order() -> None:
    assert ENCODINGS["q5_1"].fields == (("d", 2), ("m", 2), ("qh", 4), ("qs", 16))
    assert ENCODINGS["q5_0"].fields == (("d", 2), ("qh", 4), ("qs", 16))
    assert ENCODINGS["q4_1"].fields == (("d", 2), ("m", 2), ("qs", 16))
    assert ENCODINGS["q8_0"].fields == (("d", 2), ("qs", 32))


@pytest.mark.parametrize("pair", [("q4_0", "iq4_nl"), ("f16", "bf16"), ("i8", "u8"), ("f8_e4m3", "f8_e5m2")])
def test_equal_sizes_are_not_equal_encodings(pair: tuple[str, str]) -> None:
    one, other = ENCODINGS[pair[0]], ENCODINGS[pair[1]]
    assert one.row_bytes((2, 64)) == other.row_bytes((2, 64))
    assert one != other
    assert one == encoding_from_wire(pair[0])


@given(name=st.sampled_from(sorted(SCALAR_BYTES)), shape=st.lists(st.integers(1, 9), max_size=4))
def test_a_scalar_row_is_its_elements(name: str, shape: list[int]) -> None:
    assert ENCODINGS[name].row_bytes(tuple(shape)) == prod(shape) * SCALAR_BYTES[name]


@given(
    name=st.sampled_from(sorted(BLOCK_BYTES)),
    outer=st.lists(st.integers(1, 9), max_size=2),
    head_dim=st.integers(1, 300),
)
def test_a_block_row_is_whole_blocks_a_head_or_refused(name: str, outer: list[int], head_dim: int) -> None:
    shape = (*outer, head_dim)
    if head_dim % 32 == 0:
        assert ENCODINGS[name].row_bytes(shape) == prod(outer) * (head_dim // 32) * BLOCK_BYTES[name]
        return
    with pytest.raises(CompatibilityError) as caught:
        ENCODINGS[name].row_bytes(shape)
    assert caught.value.code == "block-straddles-head"


def test_a_whole_number_of_blocks_is_not_enough_where_they_straddle_heads() -> None:
    """Two heads of 48 hold three blocks, the second of which would lie in both heads."""
    with pytest.raises(CompatibilityError) as caught:
        ENCODINGS["q8_0"].row_bytes((2, 48))
    assert caught.value.code == "block-straddles-head"
    assert ENCODINGS["q8_0"].row_bytes((96,)) == 3 * 34


def test_a_block_encoding_has_no_single_element() -> None:
    with pytest.raises(CompatibilityError) as caught:
        ENCODINGS["q4_0"].row_bytes(())
    assert caught.value.code == "block-straddles-head"
    assert ENCODINGS["i32"].row_bytes(()) == 4


@pytest.mark.parametrize("shape", [(0,), (2, -64), (0, 64)])
def test_an_empty_or_negative_dimension_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(CompatibilityError) as caught:
        ENCODINGS["bf16"].row_bytes(shape)
    assert caught.value.code == "bad-row-shape"


def test_a_composite_row_is_its_fields_one_behind_the_other() -> None:
    encoding = CompositeEncoding(
        (
            CompositeField("nope", ENCODINGS["f8_e4m3"], 512),
            CompositeField("scales", ENCODINGS["f32"], 4),
            CompositeField("rope", ENCODINGS["bf16"], 64),
        )
    )
    assert encoding.row_bytes(()) == 512 + 16 + 128
    with pytest.raises(CompatibilityError) as caught:
        encoding.row_bytes((656,))
    assert caught.value.code == "composite-row-shape"


def test_an_unknown_encoding_can_be_kept_but_not_measured() -> None:
    unknown = encoding_from_wire("q3_9000")
    assert unknown == UnknownEncoding("q3_9000")
    assert unknown.to_wire() == "q3_9000"
    inside = encoding_from_wire({"fields": [["values", "q3_9000", 7], ["scale", "f32", 1]]})
    assert inside.to_wire() == {"fields": [["values", "q3_9000", 7], ["scale", "f32", 1]]}
    for encoding in (unknown, inside):
        with pytest.raises(CompatibilityError) as caught:
            encoding.row_bytes(())
        assert caught.value.code == "unknown-encoding"
        assert caught.value.found == "q3_9000"


@given(st.one_of(composites(), st.sampled_from(list(ENCODINGS.values())), names.map(encoding_from_wire)))
def test_the_wire_form_round_trips(encoding: CompositeEncoding) -> None:
    again = encoding_from_wire(encoding.to_wire())
    assert again == encoding
    assert again.to_wire() == encoding.to_wire()


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        b"bf16",
        "",
        "BF16",
        "bf16\n",
        "a" * 33,
        [],
        {},
        {"fields": []},
        {"fields": "bf16"},
        {"fields": [["k", "bf16", 4]], "more": 1},
        {"fields": [["k", "bf16"]]},
        {"fields": [["k", "bf16", 0]]},
        {"fields": [["k", "bf16", -1]]},
        {"fields": [["k", "bf16", True]]},
        {"fields": [["k", "bf16", 4.0]]},
        {"fields": [["k", "bf16", (1 << 24) + 1]]},
        {"fields": [["k", "BF16", 4]]},
        {"fields": [["K!", "bf16", 4]]},
        {"fields": [["k", "bf16", 4], ["k", "f32", 1]]},
        {"fields": [["k", "q8_0", 33]]},
        {"fields": [["k", {"fields": [["v", "bf16", 1]]}, 4]]},
        {"fields": [[f"f{n}", "u8", 1] for n in range(65)]},
    ],
)
def test_a_malformed_wire_value_is_refused(value: object) -> None:
    with pytest.raises(FormatError) as caught:
        encoding_from_wire(value)
    assert caught.value.code == "bad-encoding"
