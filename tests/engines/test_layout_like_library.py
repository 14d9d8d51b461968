"""A restored cache is the cache that transformers itself has after the same number of tokens, down to the strides."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpack.engines import transformers as engine
from kvpack.engines.transformers.layers import adapter_of
from kvpack.model.encoding import ENCODINGS
from kvpack.model.geometry import LayerGeometry, PlaneGeometry
from tests.engines.tiny import WINDOW, captured, session, tiny_model, tiny_prompt

CAPACITY = 200


def _facts(layer: Any) -> dict[str, object]:
    """Everything about a layer except the elements of its tensors."""
    facts: dict[str, object] = {"class": type(layer)}
    for name, value in vars(layer).items():
        if name in ("keys", "values"):
            facts[name] = (
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
        elif hasattr(value, "item"):
            facts[name] = (value.item(), value.dtype, value.device, vars(value))
        else:
            facts[name] = value
    return facts


@pytest.mark.parametrize("position", [1, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 130])
@pytest.mark.parametrize("name", ["gemma3_text", "mistral"])
def test_dynamic_layers_after_a_decode_step(name: str, position: int) -> None:
    model = tiny_model(name, "bf16")
    cut = captured(model, position)
    restored = engine.install(cut, model).cache
    library, _, _ = session(model, position - 1) if position > 1 else (engine.new_cache(model), None, None)
    engine.prefill(model, tiny_prompt(position)[-1:], library)
    assert type(restored) is type(library)
    assert vars(restored).keys() == vars(library).keys()
    for mine, theirs in zip(restored.layers, library.layers, strict=True):
        assert _facts(mine) == _facts(theirs)


@pytest.mark.parametrize("position", [1, WINDOW - 1, WINDOW, WINDOW + 1, 130])
@pytest.mark.parametrize("name", ["gemma3_text", "mistral"])
def test_static_layers_after_a_prefill(name: str, position: int) -> None:
    model = tiny_model(name, "bf16")
    cut = captured(model, position, "static", CAPACITY)
    restored = engine.install(cut, model, cache="static", capacity=CAPACITY).cache
    library, _, _ = session(model, position, "static", CAPACITY)
    assert type(restored) is type(library)
    for mine, theirs in zip(restored.layers, library.layers, strict=True):
        assert _facts(mine) == _facts(theirs)


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


def _geometry(window: int | None) -> LayerGeometry:
    planes = tuple(PlaneGeometry(role, ENCODINGS["f32"], (2, 3)) for role in ("k", "v"))
    return LayerGeometry("sliding" if window else "full", planes, window=window)


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
    held = adapter.export(live)
    written = adapter.restore(fresh, _geometry(window), at, torch.device("cpu"))
    for role, target in written.planes.items():
        count = target.shape[1]
        target.copy_(held.planes[role][:, written.first - held.first : written.first - held.first + count])
    assert adapter.position(fresh) == adapter.position(live) == at
    for count in future:
        chunk = rows[:, :, at : at + count]
        assert fresh.get_mask_sizes(count) == live.get_mask_sizes(count)
        for mine, theirs in zip(fresh.update(chunk, -chunk), live.update(chunk, -chunk), strict=True):
            assert mine.shape == theirs.shape
            assert mine.stride() == theirs.stride()
            assert torch.equal(mine, theirs)
        at += count
