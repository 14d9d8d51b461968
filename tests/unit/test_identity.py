"""Two kinds of identity, two strengths of claim."""

from __future__ import annotations

import pytest

from kvpack.errors import FormatError
from kvpack.model.identity import ABSENT, Claim, Identity, compare
from kvpack.model.wire import WireMap
from tests import synthetic

MINE = synthetic.identity()


def test_equal_identities_are_bitwise() -> None:
    answer = compare(MINE, synthetic.identity())
    assert answer.claim is Claim.BITWISE
    assert (answer.refusals, answer.lowered, answer.not_compared) == ((), (), ())


@pytest.mark.parametrize("field", ["weights", "config", "tokenizer", "scalar", "architecture"])
def test_each_compatibility_field_refuses_alone_and_by_name(field: str) -> None:
    answer = compare(MINE, synthetic.identity(**{field: b"other"}))
    (refusal,) = answer.refusals
    assert refusal.field == field
    assert field in str(refusal)


def test_a_field_that_only_one_side_has_is_a_difference() -> None:
    answer = compare(MINE, synthetic.identity(adapters=b"a"))
    assert [r.field for r in answer.refusals] == ["adapters"]


def test_absent_is_said_and_not_compared() -> None:
    answer = compare(MINE, synthetic.identity(tokenizer=ABSENT))
    assert answer.not_compared == ("tokenizer",)
    assert answer.claim is Claim.BITWISE
    assert not answer.refusals


def test_numerics_lower_the_claim_and_never_refuse() -> None:
    other = Identity(MINE.compatibility, {"engine": "synthetic", "threads": 2, "isa": "avx2"})
    answer = compare(MINE, other)
    assert (answer.claim, answer.lowered, answer.refusals) == (Claim.COMPATIBLE, ("isa", "threads"), ())


def test_how_the_session_was_prefilled_is_its_history_and_lowers_nothing() -> None:
    pack = Identity(MINE.compatibility, {**MINE.numerics, "prefill": "cuts:5,9"})
    here = Identity(MINE.compatibility, {**MINE.numerics, "prefill": "whole"})
    assert compare(pack, here).claim is Claim.BITWISE


def test_an_override_is_used_reported_and_lowers_the_claim() -> None:
    answer = compare(MINE, synthetic.identity(config=b"x"), override=frozenset({"config", "weights"}))
    assert (answer.refusals, answer.overridden, answer.claim) == ((), ("config",), Claim.COMPATIBLE)


def test_values_are_strings_integers_or_binaries() -> None:
    wire = {"compatibility": {"weights": [1]}, "numerics": {}}
    with pytest.raises(FormatError) as caught:
        Identity.from_wire(WireMap(wire, "identity"))
    assert caught.value.field == "identity.compatibility.weights"
