"""``kvpack diff``: what it says, its exit status, and that equal payload stays where it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import kvpack
from kvpack.pack.reader import PackReader
from tests import synthetic
from tests.cli.commands import Here
from tests.cli.conftest import KeyFiles
from tests.conftest import ROOT

SMALL = ROOT / "fixtures" / "geometries" / "small.json"


@pytest.fixture
def packs(kvpack_here: Here, tmp_path: Path) -> Any:
    """Make synthetic packs: ``packs(a=(100, "--seed", 1), b=(100,))`` gives their paths."""

    def make(**named: tuple[object, ...]) -> list[Path]:
        for name, (position, *arguments) in named.items():
            kvpack_here.good(
                "synth", "--geometry", SMALL, "--position", position, *arguments, "-o", tmp_path / f"{name}.kvpack"
            )
        return [tmp_path / f"{name}.kvpack" for name in named]

    return make


def test_equal(kvpack_here: Here, packs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = packs(a=(100, "--codec", "raw"), b=(100,))
    monkeypatch.setattr(PackReader, "read_tile", lambda *_: pytest.fail("payload was read"))
    said = kvpack_here("diff", a, b)
    assert (said.status, said.err) == (0, "")
    assert re.search(r"packs +equal", said.out)
    facts = kvpack_here.good("diff", a, b, "--json").json
    assert facts == {
        "a": str(a), "b": str(b), "equal": True, "identity": [], "geometry": None,
        "positions": {"a": [100], "b": [100]}, "cuts": [], "same_state_at": [100],
        "tokens": {"common": 100, "parts_at": None, "a": 100, "b": 100},
        "rows": None, "not_compared": [], "bytes_read": 0,
    }  # fmt: skip


def test_different(kvpack_here: Here, packs: Any) -> None:
    a, b = packs(a=(100,), b=(100, "--seed", 1))
    said = kvpack_here("diff", a, b, "--json")
    assert (said.status, said.err) == (1, "")
    assert said.json["tokens"]["parts_at"] == 0
    assert said.json["rows"] == {
        "plane": "layer.0.k", "scope": "layer", "layer": 0, "role": "k", "row": 0, "unit": "token",
        "positions": {"a": 100, "b": 100}, "planes_at_least": 15,
    }  # fmt: skip
    text = kvpack_here("diff", a, b)
    assert (text.status, text.err) == (1, "")
    assert "part at token 0" in text.out
    assert "layer.0.k row 0" in text.out


def test_other_positions(kvpack_here: Here, packs: Any) -> None:
    a, b, c = packs(a=(60,), b=(90,), c=(90, "--cuts", "60"))
    said = kvpack_here("diff", a, b)
    assert said.status == 1
    for words in ("60 and 90", "60 are equal; the second goes on to 90", "no common position"):
        assert words in " ".join(said.out.split())  # where a line is broken depends on the figures in it
    said = kvpack_here("diff", a, c)
    assert said.status == 1
    assert "60 and 60, 90 (one state at 60)" in said.out
    assert "different" in said.out


def test_identity_and_geometry(kvpack_here: Here, make_pack: Any) -> None:
    one = make_pack(name="a.kvpack")
    two = make_pack(synthetic.Geometry((synthetic.full(),)), name="b.kvpack", who=synthetic.identity(weights=b"x" * 32))
    said = kvpack_here("diff", one, two)
    assert said.status == 1
    assert f"compatibility.weights: {(b'w' * 8).hex()} and {(b'x' * 8).hex()}" in said.out
    assert "number of layers: 2 and 1" in said.out
    assert "geometries differ" in said.out
    facts = kvpack_here("diff", one, two, "--json").json
    assert facts["identity"] == [
        {"field": "compatibility.weights", "a": (b"w" * 32).hex(), "b": (b"x" * 32).hex()},
    ]  # fmt: skip


def test_encrypted_packs_are_not_called_equal(kvpack_here: Here, tmp_path: Path) -> None:
    sealed = ROOT / "fixtures" / "v1" / "accept" / "encrypted-front.kvpack"
    with kvpack.open_pack(sealed, allow_unsigned=True) as pack:
        manifest = pack.manifest
    cut = synthetic.make_cut(manifest.geometry, manifest.position, logits=0, tokens=0, who=manifest.identity)
    kvpack.save(cut, tmp_path / "open.kvpack")
    said = kvpack_here("diff", sealed, tmp_path / "open.kvpack")
    assert said.status == 1
    assert "the first pack is encrypted" in said.out
    assert "not compared" in said.out
    assert kvpack_here("diff", sealed, sealed).status == 0


def test_nobody_needs_to_be_trusted_but_a_false_signature_is_seen(
    kvpack_here: Here, make_pack: Any, keys: tuple[KeyFiles, ...]
) -> None:
    signed, plain = make_pack(sign=keys[0].key), make_pack(name="b.kvpack")
    assert kvpack_here("diff", signed, plain).status == 0
    content = bytearray(signed.read_bytes())
    content[200] ^= 1
    signed.write_bytes(content)
    assert kvpack_here("diff", signed, plain, "--trust", keys[0].public, "--json").status in (11, 12)


def test_what_it_refuses(kvpack_here: Here, make_pack: Any, tmp_path: Path) -> None:
    pack = make_pack()
    kvpack_here("diff", pack, tmp_path / "missing", "--json").refused(2, "no-such-file")
    (tmp_path / "text").write_text("no pack")
    kvpack_here("diff", tmp_path / "text", pack, "--json").refused(10, "bad-magic")
    kvpack_here("diff", pack, "--json").refused(2, "usage")
