"""``kvpack capture`` and ``kvpack install`` on tiny models: what is refused early, restored, and proved."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvpack_cli import capture, install

import kvpack
from tests.cli.commands import Here, in_a_process
from tests.cli.conftest import KeyFiles

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, "
STEPS = 6


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    """A prompt of 110 tokens, one a byte."""
    path = tmp_path / "prompt.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def captured(kvpack_here: Here, tmp_path: Path, prompt: Path, tiny_llama: Path) -> dict[str, Any]:
    """A captured session of the tiny llama: the command's JSON."""
    facts: dict[str, Any] = kvpack_here.good(
        "capture", "--model", tiny_llama, "--prompt-file", prompt, "--continue", STEPS, "--ignore-eos",
        "-o", tmp_path / "s.kvpack", "--json",
    ).json  # fmt: skip
    return facts


@pytest.fixture
def installed(kvpack_here: Here, tmp_path: Path, tiny_llama: Path) -> Callable[..., Any]:
    """Install ``s.kvpack`` into the tiny llama; the command's JSON."""

    def run(*arguments: object, model: Path = tiny_llama) -> Any:
        return kvpack_here(
            "install", tmp_path / "s.kvpack", "--model", model, "--allow-unsigned", "--max-new-tokens", STEPS,
            "--ignore-eos", *arguments, "--json",
        )  # fmt: skip

    return run


# --- before the model is loaded -------------------------------------------------------------------------------------


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading an engine is a failure of the test: the check comes first."""

    def too_late(_: str) -> None:
        raise AssertionError("the engine was loaded first")

    monkeypatch.setattr(capture, "engine_module", too_late)
    monkeypatch.setattr(install, "engine_module", too_late)


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"--prompt-file": "missing.txt"}, 2, "no-such-prompt"),
        ({"--prompt-file": "empty.txt"}, 2, "empty-prompt"),
        ({"--prompt-file": "binary.txt"}, 2, "not-text"),
        ({"--prompt-file": "."}, 2, "not-a-file"),
        ({"--model": "missing"}, 2, "no-such-model"),
        ({"--model": "empty"}, 2, "not-a-model"),
        ({"--model": "prompt.txt"}, 2, "not-a-model"),
        ({"-o": "exists.kvpack"}, 2, "output-exists"),
        ({"-o": "dangling.kvpack"}, 2, "output-exists"),
        ({"-o": "missing/s.kvpack"}, 2, "no-such-folder"),
        ({"-o": "empty"}, 2, "not-a-file"),
        ({"--sign": "missing.key"}, 2, "missing-file"),
        ({"--sign": "prompt.txt"}, 12, "bad-key"),
        ({"--capacity": "100"}, 2, "bad-capacity"),
        ({"--ignore-eos": None}, 2, "usage"),
    ],
    ids=str,
)
def test_what_capture_refuses_at_once(
    kvpack_here: Here,
    tmp_path: Path,
    prompt: Path,
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, str | None],
    status: int,
    code: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").mkdir()
    (tmp_path / "exists.kvpack").write_text("mine")
    (tmp_path / "dangling.kvpack").symlink_to("nowhere")
    before = sorted(path.name for path in tmp_path.iterdir())
    options: dict[str, str | None] = {"--model": str(tiny_llama), "--prompt-file": str(prompt), "-o": "s.kvpack"}
    arguments = [word for pair in (options | change).items() for word in pair if word is not None]
    kvpack_here("capture", *arguments, "--json").refused(status, code)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "exists.kvpack").read_text() == "mine"


@pytest.mark.usefixtures("no_engine")
def test_what_install_refuses_at_once(
    kvpack_here: Here, make_pack: Callable[..., Path], tmp_path: Path, tiny_llama: Path, keys: tuple[KeyFiles, ...]
) -> None:
    pack, good = make_pack(sign=keys[0].key), ("--model", tiny_llama, "--allow-unsigned")
    kvpack_here("install", pack, "--model", tiny_llama, "--json").refused(12, "untrusted-signer")
    kvpack_here("install", pack, "--model", tmp_path / "no", "--allow-unsigned", "--json").refused(2, "no-such-model")
    kvpack_here("install", pack, *good, "--prove", "--json").refused(2, "no-probe")
    kvpack_here("install", pack, *good, "--chat", "--json").refused(2, "usage")
    kvpack_here("install", pack, *good, "--prompt-file", "missing", "--json").refused(2, "no-such-prompt")
    kvpack_here("install", pack, *good, "--override", "wieghts", "--json").refused(2, "unknown-field")


# --- capture --------------------------------------------------------------------------------------------------------


def test_what_capture_reports(captured: dict[str, Any], tmp_path: Path) -> None:
    pack = tmp_path / "s.kvpack"
    front = kvpack.inspect(pack)
    assert set(captured) == {
        "pack", "pack_id", "state_id", "position", "cuts", "parent", "file_bytes", "raw_bytes", "stored_bytes",
        "signed_by", "tokens", "text", "logits_digests", "seconds",
    }  # fmt: skip
    assert captured["position"] == len(TEXT)
    assert captured["pack_id"] == front.pack_id.hex()
    assert captured["state_id"] == front.manifest.cuts[0].state_id.hex()
    assert (captured["file_bytes"], captured["raw_bytes"]) == (pack.stat().st_size, front.raw_bytes)
    assert set(captured["seconds"]) == {"load_model", "identify", "prefill", "capture", "continue", "write"}
    probe = front.manifest.probe
    assert probe is not None
    assert captured["tokens"] == list(probe.tokens)
    assert captured["logits_digests"] == [digest.hex() for digest in probe.digests]
    assert len(captured["tokens"]) == STEPS


def test_the_cut_is_the_state_before_the_continuation(
    kvpack_here: Here, captured: dict[str, Any], tmp_path: Path, prompt: Path, tiny_llama: Path
) -> None:
    alone = kvpack_here.good(
        "capture", "--model", tiny_llama, "--prompt-file", prompt, "-o", tmp_path / "alone.kvpack", "--json"
    ).json
    assert alone["state_id"] == captured["state_id"]
    assert (alone["tokens"], alone["logits_digests"], alone["text"]) == ([], [], None)
    cut = kvpack.load(tmp_path / "alone.kvpack", allow_unsigned=True)
    assert len(cut.tokens) == cut.record.position == len(TEXT)


@pytest.mark.usefixtures("captured")
def test_an_existing_pack_needs_force(kvpack_here: Here, tmp_path: Path, prompt: Path, tiny_llama: Path) -> None:
    arguments = ("capture", "--model", tiny_llama, "--prompt-file", prompt, "-o", tmp_path / "s.kvpack")
    before = (tmp_path / "s.kvpack").read_bytes()
    kvpack_here(*arguments, "--json").refused(2, "output-exists")
    assert (tmp_path / "s.kvpack").read_bytes() == before
    kvpack_here.good(*arguments, "--force")
    assert kvpack.inspect(tmp_path / "s.kvpack").manifest.probe is None


def test_stdin_chat_dtype_codec_and_signatures(
    kvpack_here: Here, tmp_path: Path, tiny_llama: Path, keys: tuple[KeyFiles, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = SimpleNamespace(buffer=SimpleNamespace(read=lambda: b"Hello"))
    monkeypatch.setattr("kvpack_cli.texts.sys.stdin", stdin)
    pack = tmp_path / "s.kvpack"
    said = kvpack_here.good(
        "capture", "--model", tiny_llama, "--prompt-file", "-", "--chat", "--dtype", "bf16", "--codec", "raw",
        "--sign", keys[0].private, "--sign", keys[1].private, "-o", pack,
    )  # fmt: skip
    assert keys[0].key.public.fingerprint in said.out
    front = kvpack.inspect(pack, trust=keys[1].public)
    assert front.verification.trusted
    assert len(front.verification.results) == 2
    assert {record.codec for record in front.records} == {0}
    assert front.manifest.identity.compatibility["scalar"] == "bf16"
    assert front.manifest.position == len("<user>Hello<assistant>")


# --- install --------------------------------------------------------------------------------------------------------


def test_another_process_goes_on_bit_for_bit(
    tmp_path: Path, prompt: Path, tiny_llama: Path, keys: tuple[KeyFiles, ...]
) -> None:
    made = in_a_process(
        "capture", "--model", tiny_llama, "--prompt-file", prompt, "--dtype", "bf16", "--sign", keys[0].private,
        "--continue", STEPS, "--ignore-eos", "-o", "s.kvpack", "--json", cwd=tmp_path,
    )  # fmt: skip
    assert (made.status, made.err) == (0, "")
    went_on = in_a_process(
        "install", "s.kvpack", "--model", tiny_llama, "--dtype", "bf16", "--trust", keys[0].public,
        "--max-new-tokens", STEPS, "--ignore-eos", "--prove", "--json", cwd=tmp_path,
    )  # fmt: skip
    assert (went_on.status, went_on.err) == (0, "")
    there, here = made.json, went_on.json
    for name in ("tokens", "text", "logits_digests", "pack_id"):
        assert here[name] == there[name]
    assert (here["claim"], here["lowered"]) == ("BITWISE", [])
    assert (here["reused"], here["computed"]) == (len(TEXT), 0)
    assert (here["proof"]["equal"], here["proof"]["steps"]) == (STEPS, STEPS)
    assert here["signatures"]["trusted"] is True


def test_what_install_reports(captured: dict[str, Any], installed: Callable[..., Any]) -> None:
    facts = installed().json
    assert set(facts) == {
        "pack", "pack_id", "signatures", "position", "cache", "capacity", "claim", "lowered", "notes", "tokens",
        "text", "logits_digests", "reused", "computed", "prompt_parts", "seconds",
    }  # fmt: skip
    assert set(facts["seconds"]) == {"open", "load_model", "identify", "gate", "install", "decode", "first_token"}
    assert facts["logits_digests"] == captured["logits_digests"]
    assert facts["position"] == len(TEXT)


@pytest.mark.usefixtures("captured")
def test_for_people_it_says_what_was_reused(kvpack_here: Here, tmp_path: Path, tiny_llama: Path) -> None:
    said = kvpack_here.good("install", tmp_path / "s.kvpack", "--model", tiny_llama, "--allow-unsigned", "--prove")
    assert f"{len(TEXT)} tokens, 0 computed" in said.out
    assert "BITWISE" in said.out
    assert f"{STEPS}/{STEPS} steps with logits bitwise equal" in said.out


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize(
    ("text", "reused", "computed", "parts"),
    [
        (TEXT, len(TEXT), 0, False),
        (TEXT + "and so on", len(TEXT), 9, False),
        (TEXT[:50] + "XYZ", 50, 3, True),
        (TEXT[:50], 49, 1, False),
        (TEXT[:-1] + "X", len(TEXT) - 1, 1, True),
    ],
)
def test_a_prompt_reuses_what_it_shares(
    installed: Callable[..., Any], prompt: Path, text: str, reused: int, computed: int, parts: bool
) -> None:
    prompt.write_text(text)
    facts = installed("--prompt-file", prompt).json
    assert (facts["reused"], facts["computed"], len(facts["tokens"])) == (reused, computed, STEPS)
    assert (facts["prompt_parts"] is not None) == parts
    assert facts["claim"] == ("BITWISE" if reused == len(TEXT) else "COMPATIBLE")


@pytest.mark.usefixtures("captured")
def test_a_prompt_that_shares_nothing_is_refused(installed: Callable[..., Any], prompt: Path) -> None:
    prompt.write_text("Call me Ishmael.")
    error = installed("--prompt-file", prompt).refused(14, "prompt-parts")
    assert "token 0" in error["message"]
    assert "'Call'" in error["message"]
    assert "'It w'" in error["message"]


def test_a_prompt_that_leaves_a_window_is_refused(
    kvpack_here: Here, tmp_path: Path, prompt: Path, tiny_mistral: Path, installed: Callable[..., Any]
) -> None:
    kvpack_here.good(
        "capture", "--model", tiny_mistral, "--prompt-file", prompt, "-o", tmp_path / "s.kvpack", "--continue", STEPS
    )
    prompt.write_text(TEXT[:80] + "but then")
    error = installed("--prompt-file", prompt, model=tiny_mistral).refused(14, "prompt-parts")
    assert "token 80" in error["message"]
    error = installed("--at", 80, model=tiny_mistral).refused(14, "rows-not-stored")
    assert "layer.0.k" in error["message"]
    prompt.write_text(TEXT + "and so on")
    assert installed("--prompt-file", prompt, "--prove", model=tiny_mistral).json["reused"] == len(TEXT)


@pytest.mark.usefixtures("captured")
def test_at_ends_the_session_earlier(installed: Callable[..., Any], prompt: Path) -> None:
    facts = installed("--at", 60).json
    assert (facts["position"], facts["reused"], facts["computed"]) == (59, 59, 1)
    limited = installed("--at", 60, "--prompt-file", prompt).json
    assert (limited["reused"], limited["computed"]) == (60, len(TEXT) - 60)
    assert installed("--at", 60, "--max-new-tokens", 0).json["reused"] == 60
    installed("--at", len(TEXT) + 1).refused(14, "position-out-of-range")


@pytest.mark.usefixtures("captured")
def test_without_new_tokens_it_only_installs(installed: Callable[..., Any]) -> None:
    facts = installed("--max-new-tokens", 0).json
    assert (facts["reused"], facts["computed"], facts["tokens"], facts["text"]) == (len(TEXT), 0, [], None)


def test_a_static_session_goes_on_as_it_was_captured(
    kvpack_here: Here, tmp_path: Path, prompt: Path, tiny_llama: Path, installed: Callable[..., Any]
) -> None:
    made = kvpack_here.good(
        "capture", "--model", tiny_llama, "--prompt-file", prompt, "--cache", "static", "--capacity", 160,
        "--continue", STEPS, "--ignore-eos", "-o", tmp_path / "s.kvpack", "--json",
    ).json  # fmt: skip
    facts = installed("--prove").json
    assert (facts["cache"], facts["capacity"], facts["claim"]) == ("static", 160, "BITWISE")
    assert facts["logits_digests"] == made["logits_digests"]
    other = installed("--cache", "dynamic").json
    assert (other["claim"], other["lowered"]) == ("COMPATIBLE", ["cache_capacity", "cache_class"])
    installed("--capacity", 100).refused(14, "capacity-too-small")
    installed("--capacity", len(TEXT) + 1).refused(2, "bad-capacity")


# --- refusals and proofs --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("captured")
def test_a_dry_run_says_that_it_fits(installed: Callable[..., Any], kvpack_here: Here) -> None:
    facts = installed("--dry-run").json
    assert (facts["fits"], facts["refusals"], facts["claim"]) == (True, [], "BITWISE")
    assert "tokens" not in facts


@pytest.mark.usefixtures("captured")
def test_a_dry_run_gives_every_reason(
    kvpack_here: Here, installed: Callable[..., Any], tmp_path: Path, tiny_llama: Path
) -> None:
    said = installed("--dry-run", "--dtype", "bf16")
    error = said.refused(14, "scalar-differs")
    assert error["hint"] == "load the model with --dtype f32"
    fields = [refusal["field"] for refusal in said.json["refusals"]]
    assert said.json["fits"] is False
    assert {"encoding", "scalar", "weights"} <= set(fields)
    assert f"({len(fields) - 1} more reasons)" in error["message"]
    shown = kvpack_here(
        "install", tmp_path / "s.kvpack", "--model", tiny_llama, "--allow-unsigned", "--dry-run", "--dtype", "bf16"
    )
    assert shown.status == 14
    assert f"It would not fit, for {len(fields)} reasons:" in shown.out
    assert "layer.0.k and 7 more: encoding is f32 in the pack and bf16 in the destination" in shown.out


@pytest.mark.usefixtures("captured")
def test_the_wrong_model_is_refused(installed: Callable[..., Any], tiny_mistral: Path) -> None:
    installed(model=tiny_mistral).refused(14, "architecture-differs")


@pytest.mark.usefixtures("captured")
def test_an_overridden_field_lowers_the_claim(installed: Callable[..., Any], tiny_llama: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in tiny_llama.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    template = other / "chat_template.jinja"
    template.write_text(template.read_text() + "!")
    installed(model=other).refused(14, "template-differs")
    facts = installed("--override", "template", model=other).json
    assert (facts["claim"], facts["lowered"]) == ("COMPATIBLE", ["template (overridden)"])


def _with_false_probe(path: Path, **numerics: str) -> None:
    cut = kvpack.load(path, allow_unsigned=True)
    assert cut.probe is not None
    digests = (*cut.probe.digests[:3], bytes(32), *cut.probe.digests[4:])
    identity = kvpack.Identity(cut.identity.compatibility, {**cut.identity.numerics, **numerics})
    kvpack.save(replace(cut, identity=identity, probe=replace(cut.probe, digests=digests)), path, force=True)


@pytest.mark.usefixtures("captured")
def test_a_probe_that_differs_is_an_error_under_bitwise(installed: Callable[..., Any], tmp_path: Path) -> None:
    assert installed("--prove").json["proof"]["equal"] == STEPS
    _with_false_probe(tmp_path / "s.kvpack")
    said = installed("--prove")
    error = said.refused(18, "probe-differs")
    assert "step 3" in error["message"]
    assert error["expected"] == bytes(32).hex()
    assert said.json["proof"]["first_different_step"] == 3
    assert installed().status == 0


@pytest.mark.usefixtures("captured")
def test_a_probe_that_differs_is_reported_under_compatible(installed: Callable[..., Any], tmp_path: Path) -> None:
    _with_false_probe(tmp_path / "s.kvpack", isa="another")
    facts = installed("--prove").json
    assert (facts["claim"], facts["lowered"]) == ("COMPATIBLE", ["isa"])
    assert facts["proof"] == {
        "position": len(TEXT), "steps": STEPS, "equal": STEPS - 1, "first_different_step": 3,
        "greedy_agreement": STEPS, "greedy_compared": STEPS,
    }  # fmt: skip


@pytest.mark.usefixtures("captured")
def test_a_damaged_row_is_found_before_it_is_used(installed: Callable[..., Any], tmp_path: Path) -> None:
    pack = tmp_path / "s.kvpack"
    record = next(r for r in kvpack.inspect(pack).records if r.tile.plane == 2)
    content = bytearray(pack.read_bytes())
    content[record.offset + 10] ^= 1
    pack.write_bytes(content)
    error = installed().refused(11, "stored-hash")
    assert error["plane"] == "layer.1.k"


# --- demo -----------------------------------------------------------------------------------------------------------


def test_the_demo_on_a_tiny_model(tmp_path: Path, tiny_llama: Path, prompt: Path) -> None:
    said = in_a_process(
        "demo", "--model", tiny_llama, "--prompt-file", prompt, "--steps", 4, "--keep", "kept", cwd=tmp_path
    )
    assert (said.status, said.err) == (0, "")
    assert "every step's logits bitwise equal: 4/4" in said.out
    assert kvpack.inspect(tmp_path / "kept" / "demo.kvpack").manifest.position == len(TEXT)


def test_the_demo_passes_a_failure_on(tmp_path: Path, prompt: Path, tiny_llama: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps({"model_type": "llama"}))
    said = in_a_process("demo", "--model", broken, "--prompt-file", prompt, cwd=tmp_path)
    assert said.status == 17
    assert said.err.count("\n") == 1
