"""Tiny models with random weights, the same in every process, and the sessions that the tests run on them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvpack.engines import transformers as engine
from kvpack.model.geometry import PlaneKey
from kvpack.model.snapshot import Cut, PlaneRows

CONFIGS = json.loads((Path(__file__).parent / "tiny_models.json").read_text("utf-8"))
NAMES = tuple(CONFIGS["models"])
DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
EAGER = ("deepseek_v4", "gemma2", "gpt_oss")
WINDOW = 64
CAPACITY = 340
VOCABULARY = CONFIGS["base"]["vocab_size"]


def tiny_model(name: str, dtype: str = "f32", **changes: Any) -> Any:
    """The tiny model of that name in that dtype; ``changes`` are config keywords.

    A name is a model type, or one with what is special about this config behind a ``+``.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    keywords = {**CONFIGS["base"], **CONFIGS["models"][name], **changes}
    options: dict[str, Any] = {"attn_implementation": "eager"} if name in EAGER else {}
    torch.manual_seed(20)
    config = AutoConfig.for_model(name.partition("+")[0], **keywords)
    # transformers' default initial weights are so small that every logit is nearly the same.
    config.initializer_range = 0.3
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, DTYPES[dtype]), **options)
    return model.eval()


def tiny_prompt(count: int) -> list[int]:
    """``count`` token ids, the same in every process; a longer prompt begins with the shorter one."""
    return [3 + (7919 * (at + 1) * (at + 5)) % (VOCABULARY - 3) for at in range(count)]


def session(model: Any, count: int, kind: str = "dynamic", capacity: int | None = None) -> tuple[Any, Any, list[int]]:
    """A live cache after a prefill of ``count`` tokens, the last logits, and the tokens."""
    tokens = tiny_prompt(count)
    cache = engine.new_cache(model, kind, capacity)
    return cache, engine.prefill(model, tokens, cache), tokens


def captured(model: Any, count: int, kind: str = "dynamic", capacity: int | None = None, **options: Any) -> Cut:
    """A cut after a prefill of ``count`` tokens."""
    cache, logits, tokens = session(model, count, kind, capacity)
    return engine.capture(model, cache, tokens, logits=logits, **options)


def with_rows(cut: Cut, changes: Mapping[PlaneKey, bytes]) -> Cut:
    """The cut with other bytes in some planes."""
    planes = dict(cut.planes)
    for key, content in changes.items():
        planes[key] = PlaneRows(planes[key].spec, planes[key].rows, memoryview(content))
    return replace(cut, planes=planes)
