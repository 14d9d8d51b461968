"""Which cut and position serves a prompt: index arithmetic over synthetic packs, without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from kvpack_cli.restore import choose, known_tokens

import kvpack
from kvpack.errors import CompatibilityError
from kvpack.model.geometry import Geometry
from tests import synthetic
from tests.conftest import ROOT

FULL = Geometry((synthetic.full(),))
SLIDING = Geometry((synthetic.full(), synthetic.sliding(8)))
RECURRENT = Geometry((synthetic.full(), synthetic.recurrent()))


def chosen(
    pack: Path,
    prompt: Callable[[list[int]], Sequence[int]] | None,
    limit: int | None = None,
    *,
    needs_logits: bool = True,
) -> tuple[int, int]:
    """(position, tokens to feed) for a prompt made from the pack's tokens."""
    with kvpack.open_pack(pack, allow_unsigned=True) as opened:
        stored = known_tokens(opened)
        wanted = prompt(list(stored)) if prompt is not None else None
        choice = choose(opened, stored, wanted, limit=limit, needs_logits=needs_logits)
        session = wanted if wanted is not None else stored[: limit or len(stored)]
        if session:
            assert list(choice.rest) == list(session[choice.at :])
        return choice.at, len(choice.rest)


def test_the_tokens_come_back(make_pack: Callable[..., Path]) -> None:
    with kvpack.open_pack(make_pack(FULL, 40, tokens=45), allow_unsigned=True) as pack:
        assert known_tokens(pack) == tuple(at * 7 % 512 for at in range(45))
    with kvpack.open_pack(make_pack(FULL, 40, tokens=0, name="b.kvpack"), allow_unsigned=True) as pack:
        assert known_tokens(pack) == ()


@pytest.mark.parametrize("geometry", [FULL, SLIDING, RECURRENT], ids=["full", "sliding", "recurrent"])
def test_the_whole_session_or_more_of_it(make_pack: Callable[..., Path], geometry: Geometry) -> None:
    pack = make_pack(geometry, 40)
    assert chosen(pack, None) == (40, 0)
    assert chosen(pack, list) == (40, 0)
    assert chosen(pack, lambda stored: [*stored, 1, 2, 3]) == (40, 3)


def test_tokens_that_were_known_and_not_fed_are_fed(make_pack: Callable[..., Path]) -> None:
    pack = make_pack(SLIDING, 40, tokens=45)
    assert chosen(pack, None) == (40, 5)
    assert chosen(pack, lambda stored: stored[:43]) == (40, 3)


def test_without_logits_the_last_token_is_fed_again(make_pack: Callable[..., Path]) -> None:
    pack = make_pack(FULL, 40, logits=0)
    assert chosen(pack, None) == (39, 1)
    assert chosen(pack, None, needs_logits=False) == (40, 0)
    assert chosen(pack, lambda stored: [*stored, 9]) == (40, 1)


def test_a_prompt_that_parts_reuses_what_full_layers_share(make_pack: Callable[..., Path]) -> None:
    pack = make_pack(FULL, 40)
    assert chosen(pack, lambda stored: [*stored[:25], 511, 511]) == (25, 2)
    assert chosen(pack, lambda stored: stored[:25]) == (24, 1)
    assert chosen(pack, lambda stored: [*stored[:25], 511], 10) == (10, 16)
    assert chosen(pack, None, 25) == (24, 1)


@pytest.mark.parametrize("geometry", [SLIDING, RECURRENT], ids=["sliding", "recurrent"])
@pytest.mark.parametrize("shared", [0, 1, 25, 39])
def test_a_prompt_that_parts_is_refused_where_layers_forget(
    make_pack: Callable[..., Path], geometry: Geometry, shared: int
) -> None:
    pack = make_pack(geometry, 40)
    with pytest.raises(CompatibilityError) as caught:
        chosen(pack, lambda stored: [*stored[:shared], 511, 511])
    assert caught.value.code == "prompt-parts"
    assert f"token {shared}" in caught.value.message


def test_a_position_that_cannot_be_restored_is_left_to_the_gate(make_pack: Callable[..., Path]) -> None:
    pack = make_pack(SLIDING, 40)
    with kvpack.open_pack(pack, allow_unsigned=True) as opened:
        stored = known_tokens(opened)
        for limit in (20, 41):
            assert choose(opened, stored, None, limit=limit, needs_logits=True).at == limit


def test_nothing_to_go_on_from(make_pack: Callable[..., Path]) -> None:
    pack = make_pack(FULL, 40, tokens=0, logits=0)
    assert chosen(pack, None, needs_logits=False) == (40, 0)
    with pytest.raises(CompatibilityError, match="neither tokens nor logits"):
        chosen(pack, None)
    with pytest.raises(CompatibilityError, match="does not carry its tokens"):
        chosen(pack, lambda _: [1, 2, 3])


def test_the_deepest_of_several_cuts_serves() -> None:
    pack = ROOT / "fixtures/v1/accept/several-cuts.kvpack"  # cuts at 3, 8 (with logits) and 12; a window of 4
    assert chosen(pack, None) == (8, 4)
    assert chosen(pack, None, needs_logits=False) == (12, 0)
    assert chosen(pack, lambda stored: stored[:8]) == (8, 0)
    assert chosen(pack, lambda stored: [*stored[:10], 511]) == (8, 3)
    assert chosen(pack, lambda stored: [*stored[:7], 511]) == (3, 5)
