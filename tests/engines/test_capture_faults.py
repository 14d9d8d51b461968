"""What capture refuses, and what a cut holds. One planted fault each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpack.engines import transformers as engine
from kvpack.engines.transformers.library import host_words
from kvpack.errors import EngineError, KvpackError, UsageError
from kvpack.model.geometry import PlaneKey
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import Probe
from tests.engines.tiny import WINDOW, captured, session, tiny_model, tiny_prompt

CAPACITY = 200
K0 = PlaneKey("layer", 0, "k")


@pytest.fixture(scope="module")
def gemma() -> Any:
    """Five sliding layers and a full one (layer 5)."""
    return tiny_model("gemma3_text")


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama")


def _refused(code: str, call: Any) -> KvpackError:
    with pytest.raises(EngineError) as caught:
        call()
    assert caught.value.code == code
    return caught.value


@pytest.mark.parametrize(("kind", "capacity"), [("dynamic", None), ("static", CAPACITY)])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_rows_are_token_major_and_in_order(kind: str, capacity: int | None, dtype: str) -> None:
    model = tiny_model("gemma3_text", dtype)
    cache, logits, tokens = session(model, 100, kind, capacity)
    cut = engine.capture(model, cache, tokens, logits=logits)
    for layer, wanted in ((0, RowSet.of((100 - (WINDOW - 1), 100))), (5, RowSet.of((0, 100)))):
        for role, tensor in (("k", cache.layers[layer].keys), ("v", cache.layers[layer].values)):
            rows = cut.planes[PlaneKey("layer", layer, role)]
            assert rows.rows == wanted
            words = host_words(tensor)
            got = np.frombuffer(rows.buffer, words.dtype).reshape(wanted.count, 2, 16)
            end = 100 if layer == 5 else words.shape[2]
            assert np.array_equal(got, words[0, :, end - wanted.count : end].transpose(1, 0, 2))
    assert cut.tokens == tuple(tokens)
    assert cut.record.extras == ("logits",)
    assert bytes(cut.planes[PlaneKey("session", -1, "logits")].buffer) == host_words(logits).tobytes()


def test_resident_rows_are_all_that_a_layer_holds(gemma: Any) -> None:
    cache, _, tokens = session(gemma, 100, "static", CAPACITY)
    cut = engine.capture(gemma, cache, tokens, resident=True)
    assert cut.stored[K0] == RowSet.of((100 - WINDOW, 100))
    assert engine.install(cut, gemma, cache="static", capacity=CAPACITY).report.claim.value == "BITWISE"


def test_a_cut_never_aliases_the_live_cache(gemma: Any) -> None:
    for position in (1, 100):  # one row, one head axis away from a copy-free view
        cache, logits, tokens = session(gemma, position)
        cut = engine.capture(gemma, cache, tokens, logits=logits)
        before = {key: bytes(rows.buffer) for key, rows in cut.planes.items()}
        for layer in cache.layers:
            layer.keys.fill_(7.0)
            layer.values.fill_(7.0)
        logits.fill_(7.0)
        assert {key: bytes(rows.buffer) for key, rows in cut.planes.items()} == before


def test_an_installed_cache_never_aliases_the_cut(llama: Any) -> None:
    cut = captured(llama, 20)
    restored = engine.install(cut, llama)
    before = {key: bytes(rows.buffer) for key, rows in cut.planes.items()}
    for layer in restored.cache.layers:
        layer.keys.fill_(7.0)
    assert restored.logits is not None
    restored.logits.fill_(7.0)
    assert {key: bytes(rows.buffer) for key, rows in cut.planes.items()} == before


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        ("bf16", [0x7F7F, 0x0001, 0x7F81, 0x7FC1, 0x8000, 0x3300]),
        ("f16", [0x7C01, 0x0001, 0xFE01, 0x7BFF, 0x8000, 0x3300]),
        ("f32", [0x7F800001, 0x00000001, 0xFFC00001, 0x3F800001, 0x80000000, 0x33000000]),
    ],
)
@pytest.mark.parametrize(("kind", "capacity"), [("dynamic", None), ("static", CAPACITY)])
def test_payload_bits_of_nan_and_denormals_survive(
    dtype: str, words: list[int], kind: str, capacity: int | None
) -> None:
    model = tiny_model("gemma3_text", dtype)
    cache, _, tokens = session(model, 100, kind, capacity)
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            view = host_words(tensor)
            view[0, :, 40:60, : len(words)] = words
    before = [host_words(layer.keys).copy() for layer in cache.layers]
    cut = engine.capture(model, cache, tokens)
    restored = engine.install(cut, model, cache=kind, capacity=capacity).cache
    for layer, wanted in zip(restored.layers, before, strict=True):
        got = host_words(layer.keys)
        # Row 0 of a full static sliding layer is never read again.
        first = 1 if kind == "static" and layer.is_sliding else 0
        assert np.array_equal(got[:, :, first:], wanted[:, :, first:])


def test_batch_of_two_is_refused(llama: Any) -> None:
    import torch

    cache = engine.new_cache(llama)
    with torch.no_grad():
        llama(input_ids=torch.tensor([tiny_prompt(8)] * 2), cache=cache)
    error = _refused("batch-not-one", lambda: engine.capture(llama, cache, tiny_prompt(8)))
    assert (error.layer, error.expected, error.found) == (0, 1, 2)
    _refused("batch-not-one", lambda: engine.capture(llama, cache, torch.tensor([tiny_prompt(8)] * 2)))


def test_a_padding_mask_is_refused(llama: Any) -> None:
    import torch

    cache, _, tokens = session(llama, 8)
    ones = torch.ones(1, 8, dtype=torch.long)
    assert engine.capture(llama, cache, tokens, attention_mask=ones).record.position == 8
    ones[0, 0] = 0
    _refused("padded", lambda: engine.capture(llama, cache, tokens, attention_mask=ones))


def test_inputs_that_tokens_do_not_determine_are_refused(llama: Any) -> None:
    cache, _, tokens = session(llama, 8)
    _refused("unsupported-inputs", lambda: engine.capture(llama, cache, tokens, inputs_embeds=object()))
    pictures = tiny_model("llama")
    pictures.config.image_token_id = tokens[3]
    error = _refused("unsupported-inputs", lambda: engine.capture(pictures, cache, tokens))
    assert error.field == "image_token_id"


def test_fewer_tokens_than_rows_are_refused_and_more_are_recorded(llama: Any) -> None:
    cache, _, tokens = session(llama, 12)
    error = _refused("tokens-shorter-than-rows", lambda: engine.capture(llama, cache, tokens[:11]))
    assert (error.expected, error.found) == (12, 11)
    cut = engine.capture(llama, cache, [*tokens, 9])
    assert (cut.record.position, cut.record.tokens) == (12, 13)
    assert engine.install(cut, llama).tokens[12:] == (9,)


@pytest.mark.parametrize(("kind", "capacity"), [("dynamic", None), ("static", CAPACITY)])
@pytest.mark.parametrize("at", [0, 5])
def test_a_layer_that_stands_elsewhere_is_named(gemma: Any, kind: str, capacity: int | None, at: int) -> None:
    cache, _, tokens = session(gemma, 40, kind, capacity)
    layer = cache.layers[at]
    if hasattr(layer, "cumulative_length_int"):
        layer.cumulative_length_int -= 1
    elif hasattr(layer, "cumulative_length"):
        layer.cumulative_length -= 1
    else:
        layer.keys = layer.keys[:, :, :-1]
    error = _refused("layers-disagree", lambda: engine.capture(gemma, cache, tokens))
    assert (error.layer, error.expected, error.found) == (at, 40, 39)


def test_a_window_with_missing_rows_is_named(gemma: Any) -> None:
    cache, _, tokens = session(gemma, 100)
    cache.layers[2].values = cache.layers[2].values[:, :, 1:]
    cache.layers[2].keys = cache.layers[2].keys[:, :, 1:]
    error = _refused("rows-missing", lambda: engine.capture(gemma, cache, tokens))
    assert (error.layer, error.plane) == (2, "layer.2.k")


def test_unknown_caches_are_named(llama: Any, gemma: Any) -> None:
    import torch
    from transformers import DynamicCache, EncoderDecoderCache, QuantizedCache, cache_utils

    class OtherLayer(cache_utils.DynamicLayer):  # type: ignore[misc]
        pass

    class OtherCache(DynamicCache):  # type: ignore[misc]
        pass

    cache, _, tokens = session(llama, 8)
    layer = OtherLayer()
    layer.update(cache.layers[2].keys, cache.layers[2].values)
    good = cache.layers[2]
    cache.layers[2] = layer
    error = _refused("unsupported-cache", lambda: engine.capture(llama, cache, tokens))
    assert (error.layer, error.found) == (2, "OtherLayer")
    cache.layers[2] = good
    cache.offloading = True
    error = _refused("unsupported-cache", lambda: engine.capture(llama, cache, tokens))
    assert error.found == "DynamicCache with offloading"
    for other in (
        OtherCache(config=llama.config),
        EncoderDecoderCache(DynamicCache(), DynamicCache()),
        QuantizedCache("fp8", llama.config),
    ):
        error = _refused("unsupported-cache", lambda other=other: engine.capture(llama, other, tokens))
        assert error.found == type(other).__name__
    # Made without the config, a cache keeps sliding layers' rows in plain layers: another session than the model's own.
    plain = DynamicCache()
    with torch.no_grad():
        gemma(input_ids=torch.tensor([tokens]), cache=plain)
    error = _refused("unsupported-cache", lambda: engine.capture(gemma, plain, tokens))
    assert (error.layer, error.expected) == (0, "DynamicSlidingWindowLayer")


def test_unsupported_layer_kinds_are_named() -> None:
    model = tiny_model("minimax_m3_vl_text")
    error = _refused("unsupported-cache", lambda: engine.describe(model))
    assert (error.layer, error.found) == (1, "MiniMaxM3VLSparseCacheLayer")


def test_a_class_of_a_known_name_is_not_the_known_class(llama: Any) -> None:
    from transformers import cache_utils

    impostor = type("DynamicLayer", (cache_utils.DynamicLayer,), {"__module__": cache_utils.__name__})
    cache, _, tokens = session(llama, 8)
    cache.layers[2] = impostor()
    error = _refused("unsupported-cache", lambda: engine.capture(llama, cache, tokens))
    assert (error.layer, error.found) == (2, "DynamicLayer")


def test_an_encoder_decoder_is_refused(llama: Any) -> None:
    cache, _, tokens = session(llama, 8)
    other = tiny_model("llama")
    other.config.is_encoder_decoder = True
    error = _refused("unsupported-inputs", lambda: engine.capture(other, cache, tokens))
    assert error.field == "is_encoder_decoder"


def test_a_model_that_fails_is_one_line(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(llama.lm_head, "forward", broken)
    error = _refused("forward-failed", lambda: engine.prefill(llama, [5], engine.new_cache(llama)))
    assert str(error) == "LlamaForCausalLM failed on 1 tokens: first line"
    monkeypatch.setattr(llama.config, "layer_types", ["no such kind"], raising=False)
    _refused("unsupported-cache", lambda: engine.new_cache(llama))


def test_a_probe_of_another_position_is_refused(llama: Any) -> None:
    cache, _, tokens = session(llama, 8)
    _refused("probe-elsewhere", lambda: engine.capture(llama, cache, tokens, probe=Probe(7, (1,), (bytes(32),), "f32")))


def test_senseless_calls_are_usage_errors(llama: Any) -> None:
    for code, call in {
        "unknown-cache-kind": lambda: engine.new_cache(llama, "paged"),
        "bad-capacity": lambda: engine.new_cache(llama, "static"),
        "empty-prompt": lambda: engine.prefill(llama, [], engine.new_cache(llama)),
    }.items():
        with pytest.raises(UsageError) as caught:
            call()
        assert caught.value.code == code
    with pytest.raises(UsageError):
        engine.new_cache(llama, "dynamic", 8)
    _refused("bad-token", lambda: engine.prefill(llama, [512], engine.new_cache(llama)))
    cache, logits, _ = session(llama, 8, "static", 10)
    _refused("capacity-too-small", lambda: engine.decode(llama, cache, logits, 3))
    assert len(engine.decode(llama, cache, logits, 2).tokens) == 2


def test_decoding_stops_behind_an_end_token(llama: Any) -> None:
    cache, logits, _ = session(llama, 8)
    seen: list[int] = []
    whole = engine.decode(llama, cache, logits, 6, on_token=seen.append)
    assert tuple(seen) == whole.tokens
    assert whole.probe(8).digests == whole.digests
    end = whole.tokens[2]
    cache, logits, _ = session(llama, 8)
    short = engine.decode(llama, cache, logits, 6, eos={end})
    count = whole.tokens.index(end) + 1
    assert short.tokens == whole.tokens[:count]
    assert short.digests == whole.digests[:count]
