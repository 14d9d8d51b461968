"""Several cuts of one prefill, and captures that store only what they add to a parent; on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvpack_cli.continuation import chunked, continuation

import kvpack
from kvpack.errors import KvpackError
from kvpack.model.geometry import Geometry, PlaneKey
from kvpack.model.identity import Identity
from kvpack.model.ranges import RowSet
from tests import synthetic
from tests.cli.commands import Here, Said
from tests.cli.conftest import KeyFiles

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, "
STEPS = 4


class Captures:
    """``capture`` and ``install`` of one model, in one folder."""

    def __init__(self, here: Here, model: Path, folder: Path) -> None:
        self._here, self._model, self.folder = here, model, folder

    def capture(self, name: str, text: str, *arguments: object) -> Said:
        prompt = self.folder / f"{name}.txt"
        prompt.write_text(text)
        return self._here(
            "capture", "--model", self._model, "--prompt-file", prompt, *arguments, "-o", self.folder / name, "--json"
        )

    def made(self, name: str, text: str, *arguments: object) -> Any:
        said = self.capture(name, text, *arguments)
        assert (said.status, said.err) == (0, ""), said
        return said.json

    def install(self, name: str, *arguments: object) -> Said:
        return self._here(
            "install", self.folder / name, "--model", self._model, "--allow-unsigned", "--max-new-tokens", STEPS,
            "--ignore-eos", *arguments, "--json",
        )  # fmt: skip

    def installed(self, name: str, *arguments: object) -> Any:
        said = self.install(name, *arguments)
        assert (said.status, said.err) == (0, ""), said
        return said.json


@pytest.fixture
def llama(kvpack_here: Here, tmp_path: Path, tiny_llama: Path) -> Captures:
    return Captures(kvpack_here, tiny_llama, tmp_path)


@pytest.fixture
def mistral(kvpack_here: Here, tmp_path: Path, tiny_mistral: Path) -> Captures:
    """Every layer slides over 64 tokens, so that each cut has a tail of its own."""
    return Captures(kvpack_here, tiny_mistral, tmp_path)


# --- several cuts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_pack_restores_at_each_of_its_cuts(mistral: Captures, cache: str) -> None:
    kind = ("--cache", cache, *(("--capacity", 128) if cache == "static" else ()))
    facts = mistral.made("c.kvpack", TEXT, "--cut-at", "30,80", *kind)
    assert [cut["position"] for cut in facts["cuts"]] == [30, 80, len(TEXT)]
    assert facts["state_id"] == facts["cuts"][-1]["state_id"]
    manifest = kvpack.inspect(mistral.folder / "c.kvpack").manifest
    assert manifest.identity.numerics["prefill"] == "cuts:30,80"
    assert [cut.tokens for cut in manifest.cuts] == [30, 80, len(TEXT)]
    kvpack.verify(mistral.folder / "c.kvpack", allow_unsigned=True).require()
    for cut in facts["cuts"]:
        found = mistral.installed("c.kvpack", "--at", cut["position"])
        assert (found["reused"], found["computed"]) == (cut["position"], 0)
        assert (found["claim"], found["lowered"]) == ("BITWISE", [])
    # The first piece is a whole prefill of its own, and the others come from one that was divided in the same places.
    assert mistral.made("1.kvpack", TEXT[:30], *kind)["state_id"] == facts["cuts"][0]["state_id"]
    assert mistral.made("2.kvpack", TEXT[:80], "--cut-at", "30", *kind)["state_id"] == facts["cuts"][1]["state_id"]


def test_growing_rows_are_kept_once(llama: Captures) -> None:
    facts = llama.made("c.kvpack", TEXT, "--cut-at", "30,80", "--codec", "raw")
    whole = llama.made("w.kvpack", TEXT, "--codec", "raw")
    planes = {str(p.spec.key): p.rows for p in kvpack.inspect(llama.folder / "c.kvpack").manifest.planes}
    assert planes["layer.0.k"] == RowSet.of((0, len(TEXT)))
    assert planes["session.logits"] == RowSet.of((0, 3))
    assert facts["raw_bytes"] - whole["raw_bytes"] == 2 * planes_bytes(llama.folder / "w.kvpack", "logits")
    # A cut at the end is the end.
    again = llama.made("e.kvpack", TEXT, "--cut-at", f"30,80,{len(TEXT)}")
    assert again["cuts"] == facts["cuts"]


def planes_bytes(pack: Path, role: str) -> int:
    return sum(p.raw_bytes for p in kvpack.inspect(pack).manifest.planes if p.spec.key.role == role)


def test_the_probe_belongs_to_the_last_cut(llama: Captures) -> None:
    facts = llama.made("c.kvpack", TEXT, "--cut-at", "30", "--continue", STEPS, "--ignore-eos")
    found = llama.installed("c.kvpack", "--prove")
    assert (found["proof"]["position"], found["proof"]["equal"]) == (len(TEXT), STEPS)
    assert found["tokens"] == facts["tokens"]
    early = llama.installed("c.kvpack", "--at", 30)
    assert early["logits_digests"] != found["logits_digests"]


def test_cuts_are_held_to_the_prompt(llama: Captures) -> None:
    for cuts in ("0", "30,30", "80,30", f"{len(TEXT) + 1}"):
        error = llama.capture("c.kvpack", TEXT, "--cut-at", cuts).refused(2, "bad-cuts")
        assert error["field"] == "cut-at"
    llama.capture("c.kvpack", TEXT, "--cut-at", "x").refused(2, "usage")
    assert not (llama.folder / "c.kvpack").exists()


# --- deltas ---------------------------------------------------------------------------------------------------------


def test_a_delta_stores_what_the_prompt_adds(llama: Captures) -> None:
    parent = llama.made("p.kvpack", TEXT[:70])
    facts = llama.made("d.kvpack", TEXT, "--parent", llama.folder / "p.kvpack", "--allow-unsigned")
    assert facts["parent"] == {
        "pack": str(llama.folder / "p.kvpack"), "pack_id": parent["pack_id"], "position": 70,
        "state_id": parent["state_id"],
    }  # fmt: skip
    manifest = kvpack.inspect(llama.folder / "d.kvpack").manifest
    planes = {str(p.spec.key): p.rows for p in manifest.planes}
    assert planes["layer.0.k"] == planes["session.tokens"] == RowSet.of((70, len(TEXT)))
    assert manifest.identity.numerics["prefill"] == "cuts:70"
    # It is the session that one process would have prefilled in the same two pieces.
    assert facts["state_id"] == llama.made("c.kvpack", TEXT, "--cut-at", "70")["state_id"]
    llama.install("d.kvpack").refused(14, "parent-missing")
    delta = llama.installed("d.kvpack", "--parents", llama.folder)
    whole = llama.installed("c.kvpack")
    assert (delta["reused"], delta["computed"]) == (len(TEXT), 0)
    assert delta["logits_digests"] == whole["logits_digests"]
    # Positions of the parent can be restored too.
    assert llama.installed("d.kvpack", "--parents", llama.folder, "--at", 70)["reused"] == 70


def test_a_chain_of_sliding_layers(mistral: Captures) -> None:
    mistral.made("1.kvpack", TEXT[:40])
    mistral.made("2.kvpack", TEXT[:80], "--parent", mistral.folder / "1.kvpack", "--allow-unsigned", "--cut-at", "60")
    facts = mistral.made(
        "3.kvpack", TEXT, "--parent", mistral.folder / "2.kvpack", "--allow-unsigned", "--parents", mistral.folder,
        "--continue", STEPS, "--ignore-eos",
    )  # fmt: skip
    assert kvpack.inspect(mistral.folder / "3.kvpack").manifest.identity.numerics["prefill"] == "cuts:40,60,80"
    found = mistral.installed("3.kvpack", "--parents", mistral.folder, "--prove")
    assert (found["proof"]["equal"], found["tokens"]) == (STEPS, facts["tokens"])
    whole = mistral.made("w.kvpack", TEXT, "--cut-at", "40,60,80")
    assert whole["state_id"] == facts["state_id"]


def test_the_deepest_cut_that_the_prompt_shares(llama: Captures) -> None:
    llama.made("p.kvpack", TEXT, "--cut-at", "30,80")
    parent = ("--parent", llama.folder / "p.kvpack", "--allow-unsigned")
    assert llama.made("a.kvpack", TEXT[:85] + "XYZ", *parent)["parent"]["position"] == 80
    assert llama.made("b.kvpack", TEXT[:50] + "XYZ", *parent)["parent"]["position"] == 30
    # The same prompt again: its last token must be fed, so the cut at its end is of no use.
    assert llama.made("e.kvpack", TEXT, *parent)["parent"]["position"] == 80


def test_what_a_delta_refuses(llama: Captures, keys: tuple[KeyFiles, ...]) -> None:
    llama.made("p.kvpack", TEXT[:70], "--sign", keys[0].private)
    parent = ("--parent", llama.folder / "p.kvpack")
    llama.capture("d.kvpack", TEXT, *parent).refused(12, "untrusted-signer")
    trusted = (*parent, "--trust", keys[0].public)
    error = llama.capture("d.kvpack", "XYZ" + TEXT, *trusted).refused(14, "prompt-parts")
    assert "token 0" in error["message"]
    for text in (TEXT[:70], TEXT[:50]):
        llama.capture("d.kvpack", text, *trusted).refused(2, "nothing-to-add")
    error = llama.capture("d.kvpack", TEXT, *trusted, "--cut-at", "60").refused(2, "bad-cuts")
    assert error["expected"] == f"71 to {len(TEXT)}"
    for arguments in (("--parents", llama.folder), ("--trust", keys[0].public), ("--allow-unsigned",)):
        llama.capture("d.kvpack", TEXT, *arguments).refused(2, "usage")
    llama.capture("d.kvpack", TEXT, *trusted, "--dtype", "bf16").refused(14, "geometry-differs")
    assert not (llama.folder / "d.kvpack").exists()


def test_a_parent_without_tokens(tmp_path: Path) -> None:
    kvpack.save(synthetic.make_cut(Geometry((synthetic.full(),)), 20, tokens=0), tmp_path / "p.kvpack")
    with kvpack.open_pack(tmp_path / "p.kvpack", allow_unsigned=True) as pack, pytest.raises(KvpackError) as caught:
        continuation(pack, [1, 2, 3])
    assert caught.value.code == "no-tokens"


def test_the_divisions_of_a_prefill_are_remembered(tmp_path: Path) -> None:
    who = synthetic.identity()
    assert chunked(who, ()) is who
    divided = chunked(who, (5, 9))
    assert divided == Identity(who.compatibility, {**who.numerics, "prefill": "cuts:5,9"})
    cuts = [synthetic.make_cut(Geometry((synthetic.full(),)), at, who=divided) for at in (9, 20)]
    kvpack.save(cuts, tmp_path / "p.kvpack")
    with kvpack.open_pack(tmp_path / "p.kvpack", allow_unsigned=True) as pack:
        tokens = [at * 7 % 512 for at in range(30)]
        assert continuation(pack, tokens).boundaries == (5, 9, 20)
        assert continuation(pack, [*tokens[:15], 1]).boundaries == (5, 9)
        assert PlaneKey("layer", 0, "k") in continuation(pack, tokens).cut.stored
