"""Rotations: read from the modules that turn, per layer, and refused where they depend on the session's past."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from kvpack.engines import transformers as engine
from kvpack.errors import EngineError
from tests.engines.tiny import captured, session, tiny_model

DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}


def _digest(theta: float, scaling: float = 1.0, dim: int = 16) -> bytes:
    import torch

    frequencies = (1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))).numpy()
    return blake3(frequencies.astype("<f4").tobytes() + np.array(scaling, "<f8").tobytes()).digest()


def test_one_rotation_for_all_layers() -> None:
    geometry = engine.describe(tiny_model("llama"))
    (rope,) = geometry.ropes.values()
    assert (rope.dim, rope.pairing, rope.theta, rope.digest) == (16, "half", 1e4, _digest(1e4))
    assert {layer.rope for layer in geometry.layers} == {"rope"}


def test_two_thetas() -> None:
    geometry = engine.describe(tiny_model("gemma3_text"))
    assert {name: rope.digest for name, rope in geometry.ropes.items()} == {
        "sliding_attention": _digest(1e4),
        "full_attention": _digest(1e6),
    }
    assert [layer.rope for layer in geometry.layers] == ["sliding_attention"] * 5 + ["full_attention"]


@pytest.mark.parametrize(
    ("name", "bare", "pairing"),
    [("cohere2", {3, 7}, "interleaved"), ("smollm3", {3, 7}, "half"), ("llama4_text", {3, 7}, "interleaved")],
)
def test_layers_that_carry_no_rotation(name: str, bare: set[int], pairing: str) -> None:
    geometry = engine.describe(tiny_model(name))
    assert {at for at, layer in enumerate(geometry.layers) if layer.rope is None} == bare
    assert geometry.ropes["rope"].pairing == pairing


@pytest.mark.parametrize("name", ["cohere2", "smollm3", "llama4_text", "llama", "gemma3_text", "qwen2"])
def test_the_model_turns_what_the_geometry_says(name: str) -> None:
    """Another rotary output changes the keys of exactly the layers that are said to be turned."""
    import torch

    model = tiny_model(name)
    geometry = engine.describe(model)
    for at, layer in enumerate(geometry.layers):
        attention = model.model.layers[at].self_attn
        rotary = model.model.rotary_emb
        hidden = torch.ones(1, 4, 64)
        keys = []
        for offset in (0, 9):
            positions = torch.arange(offset, offset + 4)[None]
            kind = [model.config.layer_types[at]] if "rope" not in geometry.ropes else []
            cache = engine.new_cache(model)
            with torch.no_grad():
                attention(
                    hidden,
                    position_embeddings=rotary(hidden, positions, *kind),
                    position_ids=positions,
                    attention_mask=None,
                    cache=cache,
                )
            keys.append(cache.layers[at].keys)
        assert torch.equal(*keys) == (layer.rope is None), at


@pytest.mark.parametrize(("scaling", "context"), [(DYNAMIC, 48), (LONG, 32)])
def test_a_session_past_the_original_context_is_refused(scaling: dict[str, Any], context: int) -> None:
    model = tiny_model("llama", rope_parameters=dict(scaling), max_position_embeddings=48)
    cut = captured(model, context)
    cache, logits, tokens = session(model, context)
    past = engine.decode(model, cache, logits, 4)
    with pytest.raises(EngineError) as caught:
        engine.capture(model, cache, [*tokens, *past.tokens])
    assert caught.value.code == "history-dependent-rope"
    assert (caught.value.expected, caught.value.found) == (context, context + 4)
    # A cut from inside the context goes on past it exactly.
    fresh = tiny_model("llama", rope_parameters=dict(scaling), max_position_embeddings=48)
    restored = engine.install(cut, fresh)
    assert restored.logits is not None
    assert engine.decode(fresh, restored.cache, restored.logits, 4).digests == past.digests


def test_describing_a_model_leaves_its_rotation_where_a_session_brought_it() -> None:
    import torch

    model = tiny_model("llama", rope_parameters=dict(DYNAMIC), max_position_embeddings=48)
    cache, logits, _ = session(model, 47)
    engine.decode(model, cache, logits, 6)
    rotary = model.model.rotary_emb
    grown, length = rotary.inv_freq.clone(), rotary.max_seq_len_cached
    assert not torch.equal(grown, rotary.original_inv_freq)
    engine.describe(model)
    assert torch.equal(rotary.inv_freq, grown)
    assert rotary.max_seq_len_cached == length
