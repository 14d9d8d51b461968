"""A restored cache is the cache that transformers itself has after the same number of tokens, down to the strides."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpack.engines import transformers as engine
from kvpack.engines.transformers.layers import LayerRole
from kvpack.engines.transformers.registry import adapter_of
from kvpack.model.geometry import LayerGeometry
from tests.engines.tiny import WINDOW, captured, session, tiny_model, tiny_prompt

CAPACITY = 200


def _fact(value: Any) -> object:
    if not hasattr(value, "storage_offset"):
        return value
    if value.dim() == 0:
        return value.item(), value.dtype, value.device, vars(value)
    return (
        tuple(value.shape),
        value.stride(),
        value.storage_offset(),
        value.is_contiguous(),
        value.dtype,
        value.device,
        value.requires_grad,
        value.is_inference(),
        vars(value),
    )


def _without_unit_strides(fact: Any) -> object:
    """The library leaves any stride on a state's batch axis of one, which no element is reached by."""
    if not isinstance(fact, tuple) or len(fact) < 5:
        return fact
    shape, strides, *rest = fact
    return shape, tuple(stride for size, stride in zip(shape, strides, strict=True) if size > 1), *rest


def _facts(layer: Any) -> dict[str, object]:
    """Everything about a layer except the elements of its tensors."""
    facts: dict[str, object] = {"class": type(layer)}
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            facts[name] = {key: _without_unit_strides(_fact(entry)) for key, entry in value.items()}
        else:
            facts[name] = _fact(value)
    return facts


STATEFUL = [
    "deepseek_v3",
    "deepseek_v32",
    "falcon_h1",
    "gemma3n_text",
    "glm_moe_dsa+shared",
    "inkling_text",
    "jamba",
    "kimi_linear",
    "lfm2",
    "mamba2",
    "nemotron_h+mlp",
    "qwen3_next",
]
WINDOWED = [
    (name, position) for name in ("gemma3_text", "mistral") for position in (1, WINDOW - 1, WINDOW, WINDOW + 1, 130)
]
CASES = [*WINDOWED, *((name, position) for name in STATEFUL for position in (1, 2, 130))]


def _after_a_step(model: Any, position: int) -> Any:
    """The library's own cache after ``position`` tokens, the last of which was fed alone."""
    cache = session(model, position - 1)[0] if position > 1 else engine.new_cache(model)
    engine.prefill(model, tiny_prompt(position)[-1:], cache)
    return cache


@pytest.mark.parametrize(("name", "position"), [*CASES, ("gemma3_text", WINDOW - 2)])
def test_dynamic_layers_after_a_decode_step(name: str, position: int) -> None:
    model = tiny_model(name, "bf16")
    restored = engine.install(captured(model, position), model).cache
    library = _after_a_step(model, position)
    assert type(restored) is type(library)
    assert vars(restored).keys() == vars(library).keys()
    for mine, theirs in zip(restored.layers, library.layers, strict=True):
        assert _facts(mine) == _facts(theirs)


@pytest.mark.parametrize(("name", "position"), CASES)
def test_static_layers_after_a_prefill(name: str, position: int) -> None:
    model = tiny_model(name, "bf16")
    cut = captured(model, position, "static", CAPACITY)
    restored = engine.install(cut, model, cache="static", capacity=CAPACITY).cache
    library, _, _ = session(model, position, "static", CAPACITY)
    assert type(restored) is type(library)
    for mine, theirs in zip(restored.layers, library.layers, strict=True):
        assert _facts(mine) == _facts(theirs)


@pytest.mark.parametrize("position", [1, 3, 4, 127, 128, 130])
def test_compressed_layers_after_a_decode_step(position: int) -> None:
    """Views into larger memory (rows that wait for their pool) come back as memory of their own."""
    model = tiny_model("deepseek_v4", "bf16")
    restored = engine.install(captured(model, position), model).cache
    for mine, theirs in zip(restored.layers, _after_a_step(model, position).layers, strict=True):
        assert mine.values is mine.keys
        facts, wanted = _facts(mine), _facts(theirs)
        for name in ("buffer_kv", "buffer_gate"):
            for one, other in zip(vars(mine)[name].values(), vars(theirs)[name].values(), strict=True):
                assert (one.shape, one.dtype) == (other.shape, other.dtype)
            del facts[name], wanted[name]
        assert facts == wanted


def test_an_empty_session_is_a_fresh_cache() -> None:
    model = tiny_model("gemma3_text")
    cache = engine.new_cache(model)
    cut = engine.capture(model, cache, [5, 6])
    assert cut.record.position == 0
    assert cut.tokens == (5, 6)
    restored = engine.install(cut, model)
    assert restored.tokens == (5, 6)
    assert [layer.is_initialized for layer in restored.cache.layers] == [False] * 6
    with_kvpack = engine.decode(model, restored.cache, engine.prefill(model, [5, 6], restored.cache), 3)
    without = engine.decode(model, cache, engine.prefill(model, [5, 6], cache), 3)
    assert with_kvpack.digests == without.digests


def _copy_over(live: Any, fresh: Any, geometry: LayerGeometry, position: int) -> None:
    """Restore a fresh layer from a live one, without a pack between them."""
    import torch

    adapter = adapter_of(live, 0)
    held = adapter.export(live, geometry)
    made = adapter.restore(fresh, geometry, position, torch.device("cpu"))
    for role, target in made.rows.items():
        source = held.rows[role]
        for mine, theirs in zip(target.parts, source.parts, strict=True):
            mine.copy_(theirs[:, target.first - source.first : target.end - source.first])
    for role, state in made.states.items():
        state.copy_(held.states[role])


def _fresh(kind: str, window: int | None, capacity: int) -> Any:
    from transformers import cache_utils

    names = {
        ("dynamic", False): lambda: cache_utils.DynamicLayer(),
        ("dynamic", True): lambda: cache_utils.DynamicSlidingWindowLayer(sliding_window=window),
        ("static", False): lambda: cache_utils.StaticLayer(max_cache_len=capacity),
        ("static", True): lambda: cache_utils.StaticSlidingWindowLayer(max_cache_len=capacity, sliding_window=window),
    }
    return names[kind, window is not None]()


@given(
    kind=st.sampled_from(["dynamic", "static"]),
    window=st.one_of(st.none(), st.integers(2, 9)),
    history=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    future=st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_a_restored_layer_gives_attention_the_same_rows(
    kind: str, window: int | None, history: list[int], future: list[int]
) -> None:
    """Any chunks before, any chunks after: what `update` and `get_mask_sizes` return is equal where it is visible."""
    import torch

    capacity = sum(history) + sum(future)
    live, fresh = _fresh(kind, window, capacity), _fresh(kind, window, capacity)
    rows = torch.arange(capacity * 6, dtype=torch.float32).reshape(1, capacity, 2, 3).transpose(1, 2)
    at = 0
    for count in history:
        live.update(rows[:, :, at : at + count], -rows[:, :, at : at + count])
        at += count
    adapter = adapter_of(live, 0)
    _copy_over(live, fresh, adapter.geometry(live, LayerRole(0, "", window)), at)
    assert adapter.position(fresh) == adapter.position(live) == at
    for count in future:
        chunk = rows[:, :, at : at + count]
        assert fresh.get_mask_sizes(count) == live.get_mask_sizes(count)
        for mine, theirs in zip(fresh.update(chunk, -chunk), live.update(chunk, -chunk), strict=True):
            assert mine.shape == theirs.shape
            assert mine.stride() == theirs.stride()
            assert torch.equal(mine, theirs)
        at += count
