"""Prefix keys: frozen values, every integer type, and no two things under one name."""

from __future__ import annotations

import subprocess
import sys
from array import array
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpack.errors import UsageError
from kvpack.model.geometry import Geometry
from kvpack.model.identity import Identity
from kvpack.model.planes import needed_rows, plane_specs
from kvpack.model.ranges import RowSet
from kvpack.store.prefix import ContentField, ContentKind, PrefixKeys, TokenChain, numerics_digest, token_ids
from kvpack.store.restorable import RestorablePositions
from tests import synthetic

KEYS = PrefixKeys(bytes(range(32)))
GEOMETRY = Geometry((synthetic.full(), synthetic.sliding(8)))
WHO = Identity({"weights": b"w" * 32, "scalar": "bf16", "revision": 7}, {"threads": 1})
CONTENT = (ContentField(ContentKind.IMAGE, 5, b"cat"), ContentField(ContentKind.SALT, 260, b"s"))


def chain(tokens: object, content: tuple[ContentField, ...] = (), who: Identity = WHO) -> TokenChain:
    return KEYS.chain(tokens, who, GEOMETRY, content)


def test_the_keys_are_frozen() -> None:
    made = chain(range(300), CONTENT)
    assert [node.hex() for node in made.nodes] == [
        "582166d398463412951f2e8b2043d90610faaa196504e4a0fe4450ec68a50648",
        "1406eb4d154961a6e63e5ea55b03a76f20bd1b74a74b8701b1ed16c779b98c68",
    ]
    assert made.final(1, 44).hex() == "d739e14f6d1944f7e4f596910210dd27690dbec4c2aa3009847f89500cc1d745"
    assert made.hint(1).hex() == "1d4dd71f7abf34d4"
    assert made.key_at(300) == (made.nodes[1], 44, made.final(1, 44))
    assert made.key_at(256) == (made.nodes[1], 0, b"")
    plain = "2169baa6e2991a386b040b07383b591de2552a6c5c8b04b866a570085e2a3973"
    assert chain(range(300)).nodes[1].hex() == plain
    assert KEYS.for_tenant("acme").key.hex() == "925536e3de2e34e395019edb0765429d61098b607c8d080badcfd7c2e56fba65"
    assert numerics_digest(WHO).hex() == "4f82ebddf09f80a739356d064a5dd45f6fd82a3028d532ae919a311b93799aae"


def test_another_process_makes_the_same_keys() -> None:
    program = (
        "from tests.unit.test_prefix import chain, CONTENT\n"
        "made = chain(range(300), CONTENT); print(made.nodes[1].hex(), made.final(1, 44).hex())"
    )
    made = chain(range(300), CONTENT)
    for seed in ("0", "77"):
        command = [sys.executable, "-c", program]
        out = subprocess.run(command, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout
        assert out.split() == [made.nodes[1].hex(), made.final(1, 44).hex()]


@given(st.lists(st.integers(0, 127), max_size=600))
def test_every_integer_type_gives_the_same_key(ids: list[int]) -> None:
    wanted = chain(ids)
    types = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, ">i4", ">i8")
    forms: list[object] = [tuple(ids), *(array(code, ids) for code in "bBhHiIlLqQ")]
    forms += [np.asarray(ids, kind) for kind in types]
    forms += [np.asarray(np.repeat(ids, 2), np.int64)[::2], [np.int64(token) for token in ids]]
    for form in forms:
        made = chain(form)
        assert made.nodes == wanted.nodes
        assert made.key_at(len(ids)) == wanted.key_at(len(ids))


def test_tensors_are_taken_by_their_values() -> None:
    torch = pytest.importorskip("torch")
    for kind in (torch.int16, torch.int32, torch.int64, torch.uint8):
        assert chain(torch.arange(200, dtype=kind)).key_at(200) == chain(range(200)).key_at(200)
    for bad in (torch.zeros(1, 4, dtype=torch.int64), torch.zeros(4)):
        with pytest.raises(UsageError):
            token_ids(bad)


@pytest.mark.parametrize(
    "bad", [[1.0], "abc", b"abcd", np.zeros(3), np.zeros((1, 3), np.int64), None, [None], 5, [[1]]]
)
def test_what_is_no_row_of_integers_is_refused(bad: object) -> None:
    with pytest.raises(UsageError) as caught:
        token_ids(bad)
    assert caught.value.code == "bad-tokens"


@pytest.mark.parametrize("bad", [[1 << 31], [-(1 << 31) - 1], np.asarray([1 << 31]), np.asarray([1 << 63], np.uint64)])
def test_token_ids_fit_into_32_bits(bad: object) -> None:
    with pytest.raises(UsageError) as caught:
        token_ids(bad)
    assert caught.value.code == "token-out-of-range"
    assert list(token_ids([-(1 << 31), (1 << 31) - 1])) == [-(1 << 31), (1 << 31) - 1]


@given(st.lists(st.integers(0, 3), max_size=520), st.lists(st.integers(0, 3), max_size=520))
def test_two_positions_share_a_key_exactly_if_they_share_their_tokens(one: list[int], two: list[int]) -> None:
    a, b = chain(one), chain(two)
    shared = next((at for at, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), min(len(one), len(two)))
    for position in {0, 1, shared - 1, shared, shared + 1, 255, 256, 257}:
        if 0 <= position <= min(len(one), len(two)):
            assert (a.key_at(position) == b.key_at(position)) == (position <= shared)


FIELDS = st.lists(
    st.builds(ContentField, st.sampled_from(ContentKind), st.integers(0, 299), st.binary(max_size=4)), max_size=3
)


@given(FIELDS, FIELDS)
def test_content_is_bound_where_it_stands(one: list[ContentField], two: list[ContentField]) -> None:
    a, b = chain(range(300), tuple(one)), chain(range(300), tuple(two))

    def seen(fields: list[ContentField], position: int) -> list[tuple[int, str, bytes]]:
        return sorted((f.position, f.kind.value, f.content) for f in fields if f.position < position)

    for position in (0, 1, 128, 255, 256, 257, 300):
        assert (a.key_at(position) == b.key_at(position)) == (seen(one, position) == seen(two, position))
    assert a.content_from(128) == min((f.position for f in one if f.position >= 128), default=300)


def test_the_order_in_which_content_is_named_does_not_matter_and_frames_do_not_run_together() -> None:
    assert chain(range(300), CONTENT).nodes == chain(range(300), CONTENT[::-1]).nodes
    image = ContentKind.IMAGE
    apart = (ContentField(image, 5, b"ab"), ContentField(image, 5, b"c"))
    together = (ContentField(image, 5, b"a"), ContentField(image, 5, b"bc"))
    assert chain(range(300), apart).nodes != chain(range(300), together).nodes
    for position in (-1, 300):
        with pytest.raises(UsageError) as caught:
            chain(range(300), (ContentField(image, position, b""),))
        assert caught.value.code == "bad-content"


def test_identity_geometry_key_and_tenant_are_part_of_every_node() -> None:
    roots = [chain(range(9)).nodes[0]]
    for change in ({"weights": b"x" * 32}, {"scalar": b"bf16"}, {"revision": "7"}, {"extra": 0}):
        roots.append(chain(range(9), who=Identity({**WHO.compatibility, **change}, WHO.numerics)).nodes[0])
    roots.append(KEYS.chain(range(9), WHO, Geometry((synthetic.full(),))).nodes[0])
    roots.append(PrefixKeys(b"k" * 32).chain(range(9), WHO, GEOMETRY).nodes[0])
    roots.append(KEYS.for_tenant("").chain(range(9), WHO, GEOMETRY).nodes[0])
    roots.append(KEYS.for_tenant("a").chain(range(9), WHO, GEOMETRY).nodes[0])
    assert len(set(roots)) == len(roots)
    assert chain(range(9), who=replace(WHO, numerics={"threads": 2})).nodes[0] == roots[0]
    with pytest.raises(UsageError) as caught:
        PrefixKeys(b"short")
    assert caught.value.code == "bad-store-key"


@given(
    st.sampled_from([synthetic.full(), synthetic.sliding(8), synthetic.sliding(6, sink=2), synthetic.latent(pool=4)]),
    st.integers(1, 40),
    st.integers(0, 12),
)
def test_what_is_called_restorable_is_stored(layer: object, position: int, surplus: int) -> None:
    geometry = Geometry((synthetic.full(), layer))  # type: ignore[arg-type]
    stored = {
        key: RowSet.union_of((rows, RowSet.of((max(0, rows.end - len(rows.ranges) * surplus), rows.end))))
        for key, rows in needed_rows(geometry, position).items()
    }
    positions = RestorablePositions(geometry, plane_specs(geometry), stored)
    for at in range(position + 2):
        if positions.at(at):
            assert all(stored[key].contains(rows) for key, rows in needed_rows(geometry, at).items())
    if layer.kind == "full":  # type: ignore[attr-defined]
        assert positions.deepest(position + 5, 0) == position
    assert not RestorablePositions(
        Geometry((synthetic.recurrent(),)), plane_specs(Geometry((synthetic.recurrent(),))), {}
    ).at(0)
