"""Warm starts: what one process computed, another one restores, and says so; what cannot be restored is computed."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvpack
from kvpack.api import check_factory
from kvpack.engines import transformers as engine
from kvpack.engines.transformers import warm
from kvpack.engines.transformers.keeping import CutPlan
from kvpack.errors import EngineError, StoreError
from kvpack.store import LocalStore, Store
from tests.engines.tiny import tiny_model, tiny_prompt
from tests.engines.warm_batch import QUESTIONS, ROOT, STEPS, FedTokens, name_of

TINY = [
    {"model": name, "shared": shared, "cache": cache}
    for name, shared, cache in (
        ("llama", 3000, "dynamic"),
        ("mistral", 3000, "dynamic"),
        ("gemma3_text", 3000, "dynamic"),
        ("gemma3_text", 600, "static"),
        ("qwen3_next", 3000, "dynamic"),
        ("mamba2", 3000, "dynamic"),
    )
]

# --- two processes --------------------------------------------------------------------------------------------------


def two_processes(folder: Path, runs: list[dict[str, Any]], environment: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Run both roles, each in a process of its own; name to what the first, the second and the lone run said."""
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"folder": str(folder), "runs": runs}), "utf-8")
    for role in ("first", "second"):
        outcome = subprocess.run(
            [sys.executable, "-W", "error", "-m", "tests.engines.warm_batch", str(plan), role],
            cwd=ROOT,
            env={**environment, "PYTHONPATH": os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert outcome.returncode == 0, f"{role}:\n{outcome.stdout}\n{outcome.stderr}"
        assert outcome.stderr == "", f"{role} warned:\n{outcome.stderr}"
    first, second = (json.loads((folder / f"{role}.json").read_text("utf-8")) for role in ("first", "second"))
    return {name: {"first": first[name][0], "warm": second[name][0], "alone": second[name][1]} for name in first}


@pytest.fixture(scope="module")
def tiny(
    tmp_path_factory: pytest.TempPathFactory, process_environment: Callable[[int], dict[str, str]]
) -> dict[str, dict[str, Any]]:
    return two_processes(tmp_path_factory.mktemp("warm"), TINY, process_environment(1))


def assert_warm(said: dict[str, Any], shared: int) -> None:
    """The second process reused all that was shared, and goes on as one that prefilled alone with the same cuts."""
    first, second, alone = said["first"], said["warm"], said["alone"]
    rest = len(QUESTIONS["second"])
    assert (first["reused"], first["computed"]) == (0, shared + len(QUESTIONS["first"]))
    assert (alone["reused"], alone["computed"], alone["claim"]) == (0, shared + rest, None)
    assert (second["reused"], second["computed"]) == (shared, rest)
    assert (second["claim"], second["lowered"], second["recomputed"]) == ("BITWISE", [], None)
    assert len(second["digests"]) == STEPS + 1
    assert second["digests"] == alone["digests"]
    assert second["tokens"] == alone["tokens"]
    # The digests can differ, and what was not computed was not computed secretly.
    assert not set(first["digests"]) & set(alone["digests"])
    assert (second["largest"], alone["largest"]) == (rest - 1, shared)
    assert [position for position, _ in second["stored"]] == [shared + rest - 1]
    assert second["stored"][0][1] == 2, "what the second process adds is a delta"


@pytest.mark.parametrize("run", TINY, ids=name_of)
def test_the_second_process_reuses_what_is_shared(run: dict[str, Any], tiny: dict[str, dict[str, Any]]) -> None:
    assert_warm(tiny[name_of(run)], run["shared"])


@pytest.mark.timeout(600)
def test_gemma3(
    tmp_path: Path,
    gemma3_gguf: Path,
    models_folder: Path,
    process_environment: Callable[[int], dict[str, str]],
) -> None:
    """700 shared tokens: more than the window of 512, so that the restored tails have wrapped."""
    run = {"model": str(gemma3_gguf), "shared": 700, "cache": "dynamic"}
    environment = {**process_environment(2), "KVPACK_CACHE_DIR": str(models_folder)}
    assert_warm(two_processes(tmp_path, [run], environment)[name_of(run)], 700)


# --- one process ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen3_next", "mamba2"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    with LocalStore.open(tmp_path / "store", durability="none") as opened:
        yield opened


def cold(model: Any, tokens: Any, folder: Path, **options: Any) -> engine.Generated:
    """The same with an empty store."""
    with LocalStore.open(folder / f"cold{len(os.listdir(folder))}", durability="none") as empty:
        return engine.generate(model, tokens, store=empty, max_new_tokens=4, **options)


A, B = [*tiny_prompt(300), 5, 6, 7], [*tiny_prompt(300), 9, 8]


def test_a_state_that_was_changed_is_seen(
    model: Any, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of every comparison of digests here: they depend on what was restored."""
    engine.generate(model, A, store=store, cuts=[300], max_new_tokens=0)

    def spoilt(*arguments: Any, **options: Any) -> Any:
        installed = engine.install(*arguments, **options)
        for layer in installed.cache.layers:
            for name in ("values", "recurrent_states"):
                if getattr(layer, name, None) is not None:
                    held = getattr(layer, name)
                    for tensor in held.values() if isinstance(held, dict) else [held]:
                        tensor.mul_(1.5)
        return installed

    monkeypatch.setattr(warm, "install", spoilt)
    made = engine.generate(model, B, store=store, cuts=[300], max_new_tokens=4)
    assert made.reused == 300
    assert made.digests != cold(model, B, tmp_path, cuts=[300]).digests


def test_a_restored_state_is_close_to_a_whole_prefill(model: Any, store: Store) -> None:
    """A model that ignored its cache would answer as if there had been no beginning."""
    engine.generate(model, A, store=store, cuts=[300], max_new_tokens=0)
    warmed = engine.warm_cache(model, B, store=store, cuts=[300], fill=False, rest_only=True)
    assert warmed.reused == 300
    found = engine.prefill(model, B[300:], warmed.cache)
    whole = engine.prefill(model, B, engine.new_cache(model))
    alone = engine.prefill(model, B[300:], engine.new_cache(model))
    assert (found - whole).abs().max() < 1e-2 * (alone - whole).abs().max()


def test_the_same_prompt_again(model: Any, store: Store) -> None:
    first = engine.generate(model, A, store=store, max_new_tokens=4)
    again = engine.generate(model, A, store=store, max_new_tokens=4)
    assert (again.reused, again.computed, again.stored) == (len(A) - 1, 1, ())
    assert again.digests == first.digests
    # A prompt that ends in a cut with logits needs no forward at all.
    shorter = engine.generate(model, A[:-1], store=store, max_new_tokens=4)
    assert (shorter.reused, shorter.computed) == (len(A) - 1, 0)
    assert store.stats().hits == 2


def test_a_damaged_pack_is_put_aside_and_repaired(
    model: Any, store: LocalStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled = engine.generate(model, A, store=store, cuts=[300], max_new_tokens=4)
    lone = cold(model, B, tmp_path, cuts=[300])
    path = store.folder.path(filled.stored[0].pack_id)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING, "kvpack"):
        made = engine.generate(model, B, store=store, cuts=[300], max_new_tokens=4)
    assert "damaged" in caplog.text
    assert made.reused == 0
    assert made.digests == lone.digests
    assert store.stats().quarantined
    again = engine.generate(model, A, store=store, cuts=[300], max_new_tokens=4)
    # The delta on it is whole again, too.
    assert (again.reused, again.digests) == (len(A) - 1, filled.digests)
    assert engine.generate(model, B, store=store, cuts=[300], max_new_tokens=0).reused == len(B) - 1


class FailingStore:
    """Every verb fails, or only those that are named."""

    def __init__(self, store: Store, error: Exception, *verbs: str) -> None:
        self._store, self._error, self._verbs = store, error, verbs

    def __getattr__(self, verb: str) -> Any:
        def fail(*_: Any, **__: Any) -> Any:
            raise self._error

        return fail if not self._verbs or verb in self._verbs else getattr(self._store, verb)


@pytest.mark.parametrize("error", [StoreError("gone", "the store is gone"), OSError(28, "No space left on device")])
@pytest.mark.parametrize("verbs", [(), ("put",), ("get",), ("entry",)])
def test_a_store_that_fails_is_a_warning(
    llama: Any, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception, verbs: tuple[str, ...]
) -> None:
    engine.generate(llama, A, store=store, cuts=[300], max_new_tokens=4)
    failing: Any = FailingStore(store, error, *verbs)
    with caplog.at_level(logging.WARNING, "kvpack.engines"):
        made = engine.generate(llama, B, store=failing, cuts=[300], max_new_tokens=4)
    assert str(error) in caplog.text
    assert made.reused == (300 if verbs and verbs != ("get",) else 0)
    assert made.digests == cold(llama, B, tmp_path, cuts=[300]).digests


FAULTS = [(name, "fails") for name in ("llama", "qwen3_next", "mamba2")]
# A cache that counts no tokens (mamba2) cannot tell that nothing was fed.
FAULTS += [(name, "feeds nothing") for name in ("llama", "qwen3_next")]


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_what_is_computed_again_is_said_loudly(
    name: str,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    model = tiny_model(name)
    engine.generate(model, A, store=store, cuts=[300], max_new_tokens=0)
    lone = cold(model, B, tmp_path, cuts=[300])
    calls = 0

    def faulty(model: Any, tokens: Any, cache: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            return engine.prefill(model, tokens, cache)
        if fault == "fails":
            raise EngineError("forward-failed", "no forward of several tokens behind a cache")
        return None

    monkeypatch.setattr(warm, "prefill", faulty)
    with caplog.at_level(logging.WARNING, "kvpack.engines"):
        made = engine.generate(model, B, store=store, cuts=[300], max_new_tokens=4)
    assert "300 tokens were restored and are COMPUTED AGAIN" in caplog.text
    assert made.recomputed
    assert (made.reused, made.computed, made.claim) == (0, len(B), None)
    assert made.digests == lone.digests


def test_an_error_of_the_model_itself_is_not_hidden(llama: Any, store: Store) -> None:
    with pytest.raises(EngineError) as caught:
        engine.generate(llama, [1, 2, 99_999], store=store)
    assert caught.value.code == "bad-token"


def test_between_cuts_only_where_it_pays(llama: Any, store: Store) -> None:
    """Full layers restore anywhere, but a cut keeps the claim; without one near, the claim is given up and named."""
    long = tiny_prompt(900)
    engine.generate(llama, long, store=store, cuts=[300], max_new_tokens=0)
    near = engine.generate(llama, [*long[:400], 1, 2, 3], store=store, max_new_tokens=0)
    assert (near.reused, near.claim) == (300, kvpack.Claim.BITWISE)
    far = engine.generate(llama, [*long[:800], 1, 2, 3], store=store, max_new_tokens=0)
    assert (far.reused, far.claim) == (800, kvpack.Claim.COMPATIBLE)
    assert far.lowered == ("position (not a cut of the pack)",)
    # What follows says that it does not come from a prefill that was divided there.
    found = store.get(far.stored[-1].pack_id)
    assert found is not None
    with found:
        assert found.cut().identity.numerics["prefill"] == "cuts:300,800~"


def test_only_trusted_packs_are_restored(llama: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = kvpack.SigningKey.from_seed(bytes(32))
    with LocalStore.open(tmp_path / "s", durability="none", check=check_factory(key.public)) as store:
        engine.generate(llama, A, store=store, cuts=[300], max_new_tokens=0)
        assert engine.generate(llama, B, store=store, cuts=[300], max_new_tokens=0).reused == 0
    with LocalStore.open(tmp_path / "s2", durability="none", check=check_factory(key.public)) as store:
        sign = kvpack.api.signer_of([key])
        engine.generate(llama, A, store=store, cuts=[300], max_new_tokens=0, sign=sign)
        assert engine.generate(llama, B, store=store, cuts=[300], max_new_tokens=0).reused == 300


# --- chats ----------------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of one token a character whose template folds the system's words into the first turn."""

    chat_template = "folding"

    def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool, return_dict: bool) -> list[int]:
        system = "".join(m["content"] + "|" for m in messages if m["role"] == "system")
        text, turns = "^", [m for m in messages if m["role"] != "system"]
        for at, message in enumerate(turns):
            text += f"<{message['role'][0]}>" + (system if at == 0 else "") + message["content"] + "\n"
        return [ord(letter) for letter in text + ("<m>" if add_generation_prompt else "")]


def test_where_a_chat_is_cut() -> None:
    system = {"role": "system", "content": "be brief"}
    question = {"role": "user", "content": "why?"}
    found = engine.chat_tokens(Letters(), [system, question])
    assert found.prologue == len("^<u>be brief|")
    assert found.turns == (len("^<u>be brief|why?\n"),)
    longer = engine.chat_tokens(Letters(), [system, question, {"role": "assistant", "content": "so."}, question])
    assert longer.prologue == found.prologue
    assert longer.turns[0] == found.turns[0]
    assert longer.turns[1] == found.turns[0] + len("<a>so.\n")
    with pytest.raises(EngineError, match="no chat template"):
        engine.chat_tokens(object(), [question])


def test_which_cuts_outlive_a_collection() -> None:
    plan = CutPlan.of(1000, lasting=[300, 0, 1000], passing=[300, 500, 700])
    assert plan.positions == (300, 500, 700, 999)
    assert plan.kept(300, 1) == ()
    assert plan.kept(700, 1) == (300, 700)
    assert plan.kept(999, 2) == (300, 700, 999)
    assert CutPlan.of(1, lasting=[], passing=[]).positions == ()


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3_next"])
def test_a_conversation_turn_by_turn(name: str, store: LocalStore) -> None:
    model = tiny_model(name)
    identity = engine.identify(model)
    messages = [{"role": "system", "content": "x" * 100}]
    before, sizes = 0, []
    for turn in range(6):
        messages.append({"role": "user", "content": f"question {turn} " * 3})
        chat = engine.chat_tokens(Letters(), messages)
        made = engine.generate(model, chat, store=store, max_new_tokens=0, identity=identity, keep_cuts=2)
        assert made.reused >= before
        assert (made.claim is None) == (turn == 0)
        before = chat.turns[-1]
        sizes.append(max(entry.chain for entry in made.stored))
        messages.append({"role": "assistant", "content": "answer " * 4})
    assert max(sizes) <= 8
    store.gc()
    assert store.fsck().clean
    # Another conversation under the same prologue, after the collection.
    other = engine.chat_tokens(Letters(), [messages[0], {"role": "user", "content": "Something else?"}])
    made = engine.generate(model, other, store=store, max_new_tokens=0, identity=identity)
    assert made.reused == other.prologue
    assert made.claim is not None


# --- the hook -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_model_generate_prefills_only_the_rest(name: str, store: Store) -> None:
    import torch

    model = tiny_model(name)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([B])
    engine.generate(model, A, store=store, cuts=[300], max_new_tokens=0)
    fed = FedTokens(model)
    wanted = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert fed.counts == [len(B), 1, 1, 1]
    for fill, first in ((False, len(B) - 300), (True, 1)):
        warmed = engine.warm_cache(model, ids, store=store, cuts=[300], fill=fill)
        fed.counts.clear()
        found = model.generate(ids, cache=warmed.cache, max_new_tokens=4, do_sample=False)
        assert warmed.reused == 300
        assert fed.counts == [first, 1, 1, 1]
        assert found.tolist() == wanted.tolist()
    # The hook stores as well: one token before the end.
    assert engine.warm_cache(model, ids, store=store, fill=False).reused == len(B) - 1


def test_a_cache_that_counts_no_tokens_is_not_fed_twice(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    import torch

    model = tiny_model("mamba2")
    model.generation_config.eos_token_id = None
    ids = torch.tensor([B])
    engine.generate(model, A, store=store, cuts=[300], max_new_tokens=0)
    wanted = model.generate(ids, max_new_tokens=4, do_sample=False).tolist()
    with caplog.at_level(logging.WARNING, "kvpack.engines"):
        warmed = engine.warm_cache(model, ids, store=store)
    assert "nothing is reused" in caplog.text
    assert warmed.reused == 0
    assert model.generate(ids, cache=warmed.cache, max_new_tokens=4, do_sample=False).tolist() == wanted
    warmed = engine.warm_cache(model, ids, store=store, fill=False, rest_only=True)
    assert warmed.reused == 300
    found = model.generate(ids[:, 300:], cache=warmed.cache, max_new_tokens=4, do_sample=False)
    assert [*B[:300], *found[0].tolist()] == wanted[0]


def test_the_hook_takes_one_sequence(llama: Any, store: Store) -> None:
    import torch

    with pytest.raises(EngineError, match="one sequence"):
        engine.warm_cache(llama, torch.zeros((2, 5), dtype=torch.long), store=store)
    with pytest.raises(kvpack.UsageError):
        engine.warm_cache(llama, [], store=store)
    with pytest.raises(kvpack.UsageError, match="capacity"):
        engine.warm_cache(llama, [1, 2], store=store, cache="static")
