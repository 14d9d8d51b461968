"""Who a model is: the weights' recipe written out again, what enters the config's digest, tokenizers, adapters."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from kvpack.engines import transformers as engine
from kvpack.engines.transformers import weights
from kvpack.errors import EngineError
from kvpack.model.identity import ABSENT
from tests.engines.tiny import session, tiny_model

COMPATIBILITY = {"adapters", "architecture", "config", "inputs", "scalar", "template", "tokenizer", "weights"}
NUMERICS = {"attention", "blas", "device", "engine", "isa", "matmul_precision", "prefill", "threads", "torch"}


def _by_the_registry(model: Any) -> bytes:
    """The digest as spec/registry.md words it, tensor by tensor, without the library's code."""
    import torch

    names = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
    whole = blake3(b"kvpack-weights-v1\0")
    for name, tensor in sorted(model.state_dict().items()):
        for text in (name.encode(), names[tensor.dtype].encode()):
            whole.update(struct.pack("<I", len(text)) + text)
        whole.update(struct.pack("<I", tensor.dim()))
        for size in tensor.shape:
            whole.update(struct.pack("<Q", size))
        words = tensor.detach().clone(memory_format=torch.contiguous_format)
        if tensor.element_size() == 2:
            words = words.view(torch.int16)
        whole.update(blake3(words.numpy().tobytes()).digest())
    return whole.digest()


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])  # gemma ties its embeddings
def test_the_weights_digest_is_the_registry_s(name: str, dtype: str) -> None:
    model = tiny_model(name, dtype)
    assert engine.identify(model).compatibility["weights"] == _by_the_registry(model)


def test_strides_and_sharing_do_not_enter_the_weights_digest() -> None:
    model = tiny_model("llama")
    before = engine.identify(model).compatibility["weights"]
    projection = model.model.layers[0].mlp.up_proj
    projection.weight.data = projection.weight.data.t().contiguous().t()
    assert not projection.weight.is_contiguous()
    assert engine.identify(model).compatibility["weights"] == before


def test_fields_are_the_registry_s() -> None:
    model = tiny_model("llama", "bf16")
    cache, _, _ = session(model, 4, "static", 8)
    identity = engine.identify(model, cache=cache)
    assert set(identity.compatibility) == COMPATIBILITY
    assert set(identity.numerics) == {*NUMERICS, "cache_class", "cache_capacity"}
    assert set(engine.identify(model).numerics) == NUMERICS
    compatibility = identity.compatibility
    assert compatibility["adapters"] == "none"
    assert compatibility["architecture"] == "llama"
    assert compatibility["inputs"] == "tokens"
    assert compatibility["scalar"] == "bf16"
    assert (compatibility["template"], compatibility["tokenizer"]) == (ABSENT, ABSENT)
    assert (identity.numerics["cache_class"], identity.numerics["cache_capacity"]) == ("static", 8)


def test_what_does_not_change_the_mathematics_is_not_in_the_config_s_digest() -> None:
    config = engine.identify(tiny_model("llama")).compatibility["config"]
    other = tiny_model("llama", max_position_embeddings=77, eos_token_id=9, attention_dropout=0.5, use_cache=False)
    other.config._name_or_path = "/elsewhere"
    other.config._attn_implementation = "eager"
    assert engine.identify(other).compatibility["config"] == config
    assert engine.identify(tiny_model("llama", "bf16")).compatibility["config"] == config
    for changes in ({"rms_norm_eps": 1e-3}, {"hidden_act": "gelu"}, {"rope_theta": 5.0}, {"attention_bias": True}):
        assert engine.identify(tiny_model("llama", **changes)).compatibility["config"] != config
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    short, long = (
        engine.identify(tiny_model("llama", rope_parameters=dict(scaled), max_position_embeddings=context))
        for context in (512, 1024)
    )
    assert short.compatibility["config"] != long.compatibility["config"]


def _tokenizer(words: tuple[str, ...] = ("a", "b")) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: at for at, word in enumerate(("<unk>", *words))}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, "<unk>")))


def test_tokenizer_and_template() -> None:
    model = tiny_model("llama")
    tokenizer = _tokenizer()
    plain = engine.identify(model, tokenizer).compatibility
    assert plain["template"] == ABSENT
    assert plain["tokenizer"] == blake3(tokenizer.backend_tokenizer.to_str().encode()).digest()
    tokenizer("a b", truncation=True, max_length=1)  # a call leaves its settings in the backend
    assert tokenizer.backend_tokenizer.truncation is not None
    assert engine.identify(model, tokenizer).compatibility["tokenizer"] == plain["tokenizer"]
    assert engine.identify(model, _tokenizer(("b", "a"))).compatibility["tokenizer"] != plain["tokenizer"]
    tokenizer.chat_template = "{{ messages }}"
    one = engine.identify(model, tokenizer).compatibility["template"]
    tokenizer.chat_template = "{{ messages }} "
    assert one != engine.identify(model, tokenizer).compatibility["template"]


def test_another_tokenizer_is_refused_and_an_absent_one_is_said() -> None:
    model = tiny_model("llama")
    cache, logits, tokens = session(model, 8)
    cut = engine.capture(model, cache, tokens, _tokenizer(), logits=logits)
    assert [r.code for r in engine.plan(cut, model, tokenizer=_tokenizer(("b", "a"))).refusals] == ["tokenizer-differs"]
    report = engine.plan(cut, model)
    assert report.refusals == ()
    assert "tokenizer: absent on one side, not compared" in report.notes


def _adapted(scale: float = 2.0, *, active: tuple[str, ...] = ("style",), readable: bool = True) -> Any:
    """A llama with one projection wrapped as PEFT's LoRA layers wrap it."""
    import torch

    class TunerLayer(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, base: Any) -> None:
            super().__init__()
            self.base_layer = base
            generator = torch.Generator().manual_seed(3)
            weights = {"style": torch.randn(2, 64, generator=generator)}
            self.lora_A = torch.nn.ParameterDict(weights)
            if readable:
                self.scaling = {"style": scale}

        @property
        def active_adapters(self) -> tuple[str, ...]:
            return active

        def forward(self, x: Any) -> Any:
            return self.base_layer(x)

    model = tiny_model("llama")
    model.model.layers[1].self_attn.q_proj = TunerLayer(model.model.layers[1].self_attn.q_proj)
    return model


def test_adapters_count_with_their_scales_and_tensors() -> None:
    one = engine.identify(_adapted()).compatibility["adapters"]
    assert isinstance(one, bytes)
    assert engine.identify(_adapted()).compatibility["adapters"] == one
    assert engine.identify(_adapted(scale=1.0)).compatibility["adapters"] != one
    assert engine.identify(_adapted(active=())).compatibility["adapters"] == "none"
    changed = _adapted()
    changed.model.layers[1].self_attn.q_proj.lora_A["style"].data[0, 0] += 1
    assert engine.identify(changed).compatibility["adapters"] != one


def test_an_adapter_that_cannot_be_read_exactly_is_named() -> None:
    with pytest.raises(EngineError) as caught:
        engine.identify(_adapted(readable=False))
    assert (caught.value.code, caught.value.found) == ("unsupported-adapter", "TunerLayer")


def test_a_learned_prompt_is_refused() -> None:
    class Settings:
        is_prompt_learning = True

    model = tiny_model("llama")
    model.peft_config = {"persona": Settings()}
    with pytest.raises(EngineError) as caught:
        engine.identify(model)
    assert caught.value.code == "unsupported-adapter"


def test_weights_without_memory_are_refused() -> None:
    import torch

    with torch.device("meta"):
        model = tiny_model("llama")
    with pytest.raises(EngineError) as caught:
        engine.identify(model)
    assert caught.value.code == "unsupported-weights"


@pytest.fixture(params=[0, weights.LOOKED_AT_WHOLE_BYTES], ids=["sampled", "whole"])
def loaded(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> engine.LoadedModel:
    """A model read from files, as if it were too large to be hashed at every start; its tensors large, or small."""
    monkeypatch.setattr(weights, "LOOKED_AT_WHOLE_BYTES", request.param)
    monkeypatch.setenv("KVPACK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "REMEMBER_FROM_BYTES", 0)
    tiny_model("llama").save_pretrained(tmp_path / "model")
    return engine.load_model(tmp_path / "model")


def _count_hashes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    real = weights._hash

    def counted(tensors: Any) -> bytes:
        calls.append(1)
        return real(tensors)

    monkeypatch.setattr(weights, "_hash", counted)
    return calls


def test_a_digest_is_remembered_for_the_same_files(
    loaded: engine.LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _count_hashes(monkeypatch)
    first = engine.identify(loaded.model, source=loaded.source)
    again = engine.load_model(tmp_path / "model")
    assert engine.identify(again.model, source=again.source) == first
    assert len(calls) == 1
    assert engine.identify(again.model) == first  # without its source a model is hashed
    # A source says nothing about another model.
    assert engine.identify(tiny_model("llama"), source=again.source) == first
    assert len(calls) == 3
    half = engine.load_model(tmp_path / "model", dtype="bf16")
    assert engine.identify(half.model, source=half.source) != first
    assert len(calls) == 4
    for file in (tmp_path / "model").glob("*.safetensors"):
        os.utime(file, ns=(1, 1))
    touched = engine.load_model(tmp_path / "model")
    assert engine.identify(touched.model, source=touched.source) == first
    assert len(calls) == 5
    for memo in (tmp_path / "cache" / "digests").iterdir():
        memo.write_bytes(b"torn")
    assert engine.identify(touched.model, source=touched.source) == first
    assert len(calls) == 6


@pytest.mark.parametrize("through_data", [False, True])
def test_a_model_changed_in_memory_is_hashed_again(
    loaded: engine.LoadedModel, monkeypatch: pytest.MonkeyPatch, through_data: bool
) -> None:
    import torch

    first = engine.identify(loaded.model, source=loaded.source)
    calls = _count_hashes(monkeypatch)
    weight = loaded.model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        (weight.data if through_data else weight).mul_(2)
    assert engine.identify(loaded.model, source=loaded.source) != first
    assert len(calls) == 1


def test_a_cache_folder_that_cannot_be_written_costs_a_hash_only(
    loaded: engine.LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    monkeypatch.setenv("KVPACK_CACHE_DIR", str(tmp_path / "file"))
    assert engine.identify(loaded.model, source=loaded.source) == engine.identify(loaded.model)
