"""``kvpack generate``: the second command reuses what the first one computed, and says how much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvpack_cli.main import main

import kvpack
from kvpack.store import LocalStore
from tests.cli.commands import Here, in_a_process
from tests.cli.conftest import KeyFiles

SYSTEM = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness."
STEPS = 4


class Asking:
    """``generate`` of one model with one store."""

    def __init__(self, here: Here, model: Path, folder: Path) -> None:
        self.here, self.model, self.folder = here, model, folder
        self.url = f"file:{folder / 'store'}"
        (folder / "system.txt").write_text(SYSTEM)

    def arguments(self, question: str, *more: object) -> tuple[object, ...]:
        prompt = self.folder / "question.txt"
        prompt.write_text(question)
        return (
            "generate", "--store", self.url, "--model", self.model, "--prompt-file", prompt,
            "--max-new-tokens", STEPS, "--ignore-eos", *more,
        )  # fmt: skip

    def chat(self, question: str, *more: object) -> Any:
        said = self.here.good(
            *self.arguments(question, "--chat", "--system-file", self.folder / "system.txt", *more), "--json"
        )
        return said.json

    def plain(self, question: str, *more: object) -> Any:
        return self.here.good(*self.arguments(question, *more), "--json").json


@pytest.fixture
def llama(kvpack_here: Here, tmp_path: Path, tiny_llama: Path) -> Asking:
    return Asking(kvpack_here, tiny_llama, tmp_path)


@pytest.fixture
def mistral(kvpack_here: Here, tmp_path: Path, tiny_mistral: Path) -> Asking:
    return Asking(kvpack_here, tiny_mistral, tmp_path)


PROLOGUE = len(f"<system>{SYSTEM}<user>")


def test_a_second_question_reuses_the_systems_words(mistral: Asking) -> None:
    first = mistral.chat("Who?")
    assert (first["reused"], first["claim"], first["pack_id"]) == (0, None, None)
    assert first["stored"][0]["position"] == PROLOGUE
    assert [entry["chain"] for entry in first["stored"]] == [1, 2, 3]
    second = mistral.chat("What else is there?")
    assert (second["reused"], second["claim"]) == (PROLOGUE, "BITWISE")
    assert second["pack_id"] == first["stored"][0]["pack_id"]
    assert (second["lowered"], second["recomputed"], second["warnings"]) == ([], None, [])
    assert second["computed"] == len("What else is there?<assistant>")
    assert set(second["seconds"]) >= {"find", "restore", "prefill", "decode", "load_model", "identify", "store"}
    mistral.url = f"file:{mistral.folder / 'other'}"
    alone = mistral.chat("What else is there?")
    assert alone["reused"] == 0
    assert alone["logits_digests"] == second["logits_digests"]
    assert len(second["tokens"]) == STEPS


def test_what_people_read(mistral: Asking) -> None:
    mistral.here.good(*mistral.arguments(SYSTEM + "one", "--cut-at", "100"))
    said = mistral.here.good(*mistral.arguments(SYSTEM + "two", "--cut-at", "100"))
    lines = said.out.splitlines()
    assert lines[0].startswith("reused    100 tokens in ")
    assert lines[0].endswith(", claim BITWISE")
    assert lines[1].startswith(f"computed  {len(SYSTEM) - 97} tokens in ")
    assert lines[2].startswith("stored    cuts at ")


def test_in_a_process_of_its_own(llama: Asking) -> None:
    here = llama.plain(SYSTEM)
    said = in_a_process(*llama.arguments(SYSTEM), "--json", cwd=llama.folder)
    assert (said.status, said.err) == (0, ""), said
    assert (said.json["reused"], said.json["claim"]) == (len(SYSTEM) - 1, "BITWISE")
    assert said.json["logits_digests"] == here["logits_digests"]


def test_a_damaged_pack_is_a_warning(llama: Asking) -> None:
    stored = llama.plain(SYSTEM)["stored"]
    (path,) = (llama.folder / "store" / "objects").rglob(stored[0]["pack_id"])
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)
    again = llama.plain(SYSTEM)
    assert (again["reused"], again["computed"]) == (0, len(SYSTEM))
    assert any("damaged" in warning for warning in again["warnings"])
    assert llama.plain(SYSTEM)["reused"] == len(SYSTEM) - 1


def test_only_who_is_trusted(llama: Asking, keys: tuple[KeyFiles, ...]) -> None:
    trust = ("--trust", keys[0].public)
    llama.plain(SYSTEM)
    assert llama.plain(SYSTEM, *trust)["reused"] == 0
    llama.url = f"file:{llama.folder / 'signed'}"
    llama.plain(SYSTEM, "--sign", keys[0].private)
    assert llama.plain(SYSTEM, *trust)["reused"] == len(SYSTEM) - 1
    assert llama.plain(SYSTEM, "--trust", keys[1].public)["reused"] == 0


def test_another_key_is_another_store(llama: Asking) -> None:
    key = llama.folder / "key"
    key.write_bytes(bytes(range(32)))
    llama.plain(SYSTEM, "--store-key", key)
    assert llama.plain(SYSTEM)["reused"] == 0
    hexadecimal = llama.folder / "hex"
    hexadecimal.write_text(bytes(range(32)).hex() + "\n")
    assert llama.plain(SYSTEM, "--store-key", hexadecimal)["reused"] == len(SYSTEM) - 1


def test_a_static_cache(llama: Asking) -> None:
    static = ("--cache", "static", "--capacity", 200, "--cut-at", 90)
    llama.plain(SYSTEM + "!", *static)
    found = llama.plain(SYSTEM + "?", *static)
    assert (found["reused"], found["claim"], found["lowered"]) == (len(SYSTEM), "BITWISE", [])
    fewer = llama.plain(SYSTEM[:100] + "?", *static)
    assert (fewer["reused"], fewer["claim"]) == (90, "BITWISE")


def test_what_is_said_loudly(
    llama: Asking, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvpack.engines import transformers as engine
    from kvpack.engines.transformers import warm

    llama.plain(SYSTEM)
    calls = []

    def once(model: Any, tokens: Any, cache: Any) -> Any:
        calls.append(len(tokens))
        if len(calls) == 1:
            raise kvpack.EngineError("forward-failed", "no forward behind a cache")
        return engine.prefill(model, tokens, cache)

    monkeypatch.setattr(warm, "prefill", once)
    capsys.readouterr()
    assert main([str(argument) for argument in llama.arguments(SYSTEM + "more")]) == 0
    said = capsys.readouterr()
    assert "COMPUTED AGAIN" in said.err
    assert said.out.startswith("reused    0 tokens")


def test_refusals(llama: Asking, tmp_path: Path) -> None:
    here = llama.here
    here(*llama.arguments("x", "--system-file", tmp_path / "system.txt"), "--json").refused(2, "usage")
    here(*llama.arguments("x", "--store-key", tmp_path / "none"), "--json").refused(2, "no-such-key")
    (tmp_path / "short").write_bytes(b"short")
    here(*llama.arguments("x", "--store-key", tmp_path / "short"), "--json").refused(2, "bad-store-key")
    llama.url = "gopher:store"
    here(*llama.arguments("x"), "--json").refused(2, "untrusted-store")
    here(*llama.arguments("x", "--allow-unsigned"), "--json").refused(16, "unknown-scheme")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    llama.url = str(tmp_path / "full")
    here(*llama.arguments("x"), "--json").refused(16, "not-a-store")
    with LocalStore.open(tmp_path / "fine") as store:
        assert store.ls() == ()
