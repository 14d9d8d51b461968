"""``kvpack store`` and ``kvpack flatten``, on synthetic sessions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvpack_cli.store_entries import age_text, tree

import kvpack
from kvpack.model.geometry import Geometry
from kvpack.store import Entry
from tests import synthetic
from tests.cli.commands import Here
from tests.cli.conftest import SMALL, KeyFiles


class Shop:
    """The store's commands on one store."""

    def __init__(self, here: Here, folder: Path) -> None:
        self.here, self.folder = here, folder
        self.url = f"file:{folder / 'store'}"

    def say(self, verb: str, *arguments: object) -> str:
        return self.here.good("store", verb, *arguments, "--store", self.url).out

    def facts(self, verb: str, *arguments: object) -> Any:
        return self.here.good("store", verb, *arguments, "--store", self.url, "--json").json

    def refused(self, status: int, code: str, verb: str, *arguments: object) -> Any:
        return self.here("store", verb, *arguments, "--store", self.url, "--json").refused(status, code)


@pytest.fixture
def shop(kvpack_here: Here, tmp_path: Path) -> Shop:
    return Shop(kvpack_here, tmp_path)


@pytest.fixture
def chain(make_pack: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """A pack at 40 and a delta on it at 90."""
    parent = make_pack(SMALL, 40, name="parent.kvpack")
    delta = tmp_path / "delta.kvpack"
    with kvpack.open_pack(parent, allow_unsigned=True) as pack:
        kvpack.save(synthetic.make_cut(SMALL, 90), delta, parent=pack.cut())
    return parent, delta


def test_the_life_of_a_store(shop: Shop, chain: tuple[Path, Path], tmp_path: Path) -> None:
    parent, delta = chain
    made = shop.facts("put", parent, delta)["entries"]
    assert [(entry["position"], entry["chain"], entry["new"]) for entry in made] == [(40, 1, True), (90, 2, True)]
    assert made[1]["parent"] == made[1]["continues"] == made[0]["pack_id"]
    assert shop.facts("put", parent)["entries"][0]["pack_id"] == made[0]["pack_id"]
    listed = shop.facts("ls")["entries"]
    assert {entry["pack_id"] for entry in listed} == {entry["pack_id"] for entry in made}
    lines = shop.say("ls").splitlines()
    assert lines[1].startswith(made[0]["pack_id"][:12])
    assert lines[2].startswith(f"└ {made[1]['pack_id'][:12]}")
    assert lines[2].endswith("D")
    assert "└" not in shop.say("ls", "--flat")
    stats = shop.facts("stats")
    assert (stats["packs"], stats["cuts"], stats["hits"], stats["quota"]) == (2, 2, 0, None)
    assert stats["stored_bytes"] == sum(entry["stored_bytes"] for entry in made)
    assert shop.say("stats").startswith("packs ")
    got = shop.facts("get", made[1]["pack_id"][:8])
    assert got["packs"] == [made[1]["pack_id"], made[0]["pack_id"]]
    shop.say("export", made[0]["pack_id"], "-o", tmp_path / "out.kvpack")
    assert (tmp_path / "out.kvpack").read_bytes() == parent.read_bytes()
    assert "a delta on" in shop.say("export", made[1]["pack_id"], "-o", tmp_path / "out2.kvpack")
    shop.refused(2, "output-exists", "export", made[0]["pack_id"], "-o", tmp_path / "out.kvpack")


def test_longest(shop: Shop, make_pack: Callable[..., Path]) -> None:
    full = Geometry((synthetic.full(),))
    asked = make_pack(full, 300, name="asked.kvpack")
    assert shop.here.good("store", "put", asked, "--store", shop.url).err == ""
    found = shop.facts("longest", asked)
    assert (found["tokens"], found["hit"]["position"], found["hit"]["computed"]) == (300, 300, 0)
    assert "300 of 300 tokens, 0 left" in shop.say("longest", asked)
    # The same tokens, and fewer of them: full layers restore anywhere, but not as a cut.
    shorter = make_pack(full, 200, name="shorter.kvpack")
    assert shop.facts("longest", shorter)["hit"]["position"] == 199
    assert "restored before its end" in shop.say("longest", shorter)
    assert shop.facts("longest", shorter, "--only-cuts")["hit"] is None
    other = make_pack(SMALL, 300, name="other.kvpack")
    assert shop.facts("longest", other)["hit"] is None
    assert shop.say("longest", other).startswith("A miss")
    assert shop.facts("stats")["hits"] == 0
    shop.refused(2, "usage", "longest")


def test_longest_of_a_models_prompt(shop: Shop, tiny_llama: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "p.txt"
    prompt.write_text("It was the best of times, it was the worst of times.")
    model = ("--model", tiny_llama, "--prompt-file", prompt)
    shop.here.good("generate", "--store", shop.url, *model, "--max-new-tokens", 0)
    found = shop.facts("longest", *model)
    assert found["hit"]["computed"] == 1
    assert found["hit"]["at_cut"]


def test_pinned_packs_stay(shop: Shop, make_pack: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = make_pack(SMALL, 40, name="1.kvpack"), make_pack(Geometry((synthetic.full(),)), 50, name="2.kvpack")
    first, second = (entry["pack_id"] for entry in shop.facts("put", a, b)["entries"])
    assert shop.facts("pin", first)["pinned"]
    assert sorted(line.split()[-1] for line in shop.say("ls").splitlines()[1:]) == ["0", "P"]
    assert shop.facts("stats")["pinned"] == 1
    monkeypatch.setattr("kvpack.store.local.DEFAULT_GRACE", 0.0)
    monkeypatch.setattr("kvpack_cli.store_access.PrefixStore", _without_grace())
    assert shop.facts("gc", "--quota", "1K")["removed"] == [second]
    assert not shop.facts("unpin", first[:10])["pinned"]
    assert shop.facts("gc", "--quota", "0")["removed"] == [first]
    assert shop.say("ls") == "The store is empty.\n"


def _without_grace() -> Any:
    from kvpack.store import PrefixStore

    class Eager(PrefixStore):
        @classmethod
        def open(cls, url: str, **options: Any) -> Any:
            return PrefixStore.open(url, grace=0.0, **options)

    return Eager


def test_fsck(shop: Shop, make_pack: Callable[..., Path]) -> None:
    pack_id = shop.facts("put", make_pack(SMALL, 40))["entries"][0]["pack_id"]
    assert shop.facts("fsck")["clean"]
    (path,) = (shop.folder / "store" / "objects").rglob(pack_id)
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)
    report = shop.facts("fsck")
    assert not report["clean"]
    assert report["quarantined"]
    assert "nothing to repair" in shop.say("fsck")


def test_a_turn_is_stored_as_a_delta(shop: Shop, make_pack: Callable[..., Path], keys: tuple[KeyFiles, ...]) -> None:
    packs = [make_pack(SMALL, at, name=f"{at}.kvpack") for at in (40, 90, 130)]
    made = shop.facts("put", *packs, "--keep-cuts", 2, "--sign", keys[0].private)["entries"]
    assert [entry["chain"] for entry in made] == [1, 2, 3]
    assert made[2]["kept"] == [90, 130]
    assert shop.facts("get", made[2]["pack_id"], "--trust", keys[0].public)["position"] == 130
    shop.refused(16, "broken-pack", "get", made[2]["pack_id"], "--trust", keys[1].public)
    shop.refused(2, "usage", "put", packs[0], "--sign", keys[0].private)


def test_refusals(shop: Shop, chain: tuple[Path, Path]) -> None:
    for verb in ("ls", "stats", "gc", "fsck"):
        shop.refused(16, "no-such-store", verb)
    shop.refused(16, "parent-missing", "put", chain[1])
    shop.refused(16, "no-such-pack", "pin", "abcd")
    shop.refused(16, "no-such-pack", "get", "ab" * 32)
    shop.refused(2, "bad-pack-id", "pin", "xyz")
    shop.refused(2, "usage", "gc", "--quota", "many")
    shop.here("store", "ls", "--json").refused(2, "usage")


def _entry(name: int, position: int, continues: int | None = None) -> Entry:
    above = bytes([continues]) * 32 if continues is not None else None
    return Entry(bytes([name]) * 32, 100, position, (), 0.0, name, continues=above)


def test_the_tree() -> None:
    entries = [_entry(4, 30, 2), _entry(1, 10), _entry(2, 20, 1), _entry(3, 25, 1), _entry(5, 9, 99)]
    assert [(branch, entry.pack_id[0]) for branch, entry in tree(entries)] == [
        ("", 1), ("├ ", 2), ("│ └ ", 4), ("└ ", 3), ("", 5),
    ]  # fmt: skip
    assert len(list(tree([_entry(at % 250, at, None) for at in range(50)]))) == 50


def test_ages() -> None:
    ages = {-5: "0 s", 40: "40 s", 600: "10 min", 7200: "2 h", 300_000: "3 d"}
    assert [age_text(seconds) for seconds in ages] == list(ages.values())


# --- flatten --------------------------------------------------------------------------------------------------------


def test_flatten(kvpack_here: Here, chain: tuple[Path, Path], tmp_path: Path) -> None:
    parent, delta = chain
    out = tmp_path / "whole" / "flat.kvpack"
    out.parent.mkdir()
    arguments = ("flatten", delta, "--parents", tmp_path, "--allow-unsigned", "-o", out)
    made = kvpack_here.good(*arguments, "--json").json
    assert [cut["position"] for cut in made["cuts"]] == [40, 90]
    assert made["parts"] == [str(delta), str(parent)]
    assert list(out.parent.iterdir()) == [out]
    kvpack.verify(out, allow_unsigned=True).require()
    flat, before = kvpack.inspect(out), kvpack.inspect(delta)
    assert flat.manifest.parent is None
    assert flat.manifest.cuts[-1].state_id == before.manifest.cuts[-1].state_id
    assert flat.manifest.identity == before.manifest.identity
    # Every byte of the session is the same, read from one file instead of two.
    compared = kvpack_here.good("diff", out, delta, "--parents", tmp_path, "--json")
    assert compared.json["rows"] is None
    kvpack_here(*arguments, "--json").refused(2, "output-exists")
    assert "made of" in kvpack_here.good(*arguments, "--force").out
    kvpack_here("flatten", parent, "--allow-unsigned", "-o", tmp_path / "x", "--json").refused(2, "not-a-delta")
    kvpack_here("flatten", delta, "--allow-unsigned", "-o", tmp_path / "x", "--json").refused(14, "parent-missing")
    kvpack_here("flatten", delta, "--parents", tmp_path, "-o", tmp_path / "x", "--json").refused(12, "unsigned")
    assert not (tmp_path / "x").exists()


def test_what_was_signed_is_signed_again(
    kvpack_here: Here, make_pack: Callable[..., Path], keys: tuple[KeyFiles, ...], tmp_path: Path
) -> None:
    parent = make_pack(SMALL, 40, name="parent.kvpack", sign=keys[0].key)
    delta, out = tmp_path / "delta.kvpack", tmp_path / "flat.kvpack"
    with kvpack.open_pack(parent, trust=keys[0].public) as pack:
        kvpack.save(synthetic.make_cut(SMALL, 90), delta, parent=pack.cut(), sign=keys[0].key)
    arguments = ("flatten", delta, "--parents", tmp_path, "--trust", keys[0].public, "-o", out)
    kvpack_here(*arguments, "--json").refused(16, "signer-needed")
    made = kvpack_here.good(*arguments, "--sign", keys[1].private, "--json").json
    assert made["signed_by"] == [keys[1].key.public.fingerprint]
    kvpack.verify(out, trust=keys[1].public).require()


def test_a_delta_without_tokens(kvpack_here: Here, tmp_path: Path) -> None:
    geometry = Geometry((synthetic.full(),))
    parent, delta, out = (tmp_path / f"{name}.kvpack" for name in ("parent", "delta", "flat"))
    kvpack.save(synthetic.make_cut(geometry, 40, tokens=0), parent)
    with kvpack.open_pack(parent, allow_unsigned=True) as pack:
        kvpack.save(synthetic.make_cut(geometry, 90, tokens=0), delta, parent=pack.cut())
    kvpack_here.good("flatten", delta, "--parents", tmp_path, "--allow-unsigned", "-o", out)
    kvpack.verify(out, allow_unsigned=True).require()
