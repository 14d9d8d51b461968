"""The rotations of a model: which cache layer's rows are turned, by which frequencies, in which pairing.

The frequencies are read from the model's rotary modules, where they are in effect, and not from its config: a
buffer that somebody changed is another rotation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from blake3 import blake3

from kvpack.errors import EngineError
from kvpack.model.geometry import Rope

__all__ = ["Rotations", "kept_rotations", "require_reproducible", "rotations"]

# Pairs are neighbours (2i, 2i + 1) in these families; everywhere else they are (i, i + dim / 2).
_INTERLEAVED: Final = frozenset(
    {
        "cohere",
        "cohere2",
        "cohere2_moe",
        "deepseek_v2",
        "deepseek_v4",
        "ernie4_5",
        "ernie4_5_moe",
        "glm",
        "glm4",
        "helium",
        "llama4",
        "llama4_text",
    }
)
# In these families the full layers carry no rotation where the model has sliding layers.
_FULL_LAYERS_WITHOUT_ROPE: Final = frozenset({"cohere2", "exaone4", "exaone4_5_text", "exaone_moe", "kolibri1"})
# Rotations that the rotary module names by their use and not by the layer's type.
_NAMES_BY_USE: Final = {"sliding_attention": "main"}
_OTHER_USE: Final = "compress"
# The frequencies of these types change with the length of the session.
_HISTORY_DEPENDENT: Final = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True)
class Rotations:
    """The table of rotations, and the name of each cache layer's rotation (None: its rows carry none)."""

    table: dict[str, Rope]
    names: tuple[str | None, ...]


def rotations(model: Any, layer_types: Sequence[str]) -> Rotations:
    """Read the rotations of a model whose cache layers have these types.

    Raises EngineError ``unsupported-rope`` for a model with several rotary modules that do not agree.
    """
    config = model.config.get_text_config(decoder=True)
    pairing = "interleaved" if config.model_type in _INTERLEAVED else "half"
    table: dict[str, Rope] = {}
    for path, module in _modules(model):
        for name, prefix in _prefixes(module, layer_types):
            rope = _rope(config, module, name, prefix, pairing)
            if table.setdefault(name, rope) != rope:
                raise EngineError(
                    "unsupported-rope",
                    f"the rotary module {path} turns by other frequencies than the one before it",
                    field="rope",
                    expected=table[name].digest.hex()[:16],
                    found=rope.digest.hex()[:16],
                )
    names = tuple(
        _name(table, layer_type) if _turns(config, at, layer_type) else None
        for at, layer_type in enumerate(layer_types)
    )
    return Rotations({name: table[name] for name in table if name in names}, names)


def require_reproducible(model: Any, position: int) -> None:
    """Refuse a session whose frequencies have depended on its length.

    A dynamic NTK or LongRoPE model turns rows by other frequencies once a session is longer than the original context;
    which rows got which depends on how it got there. Raises EngineError ``history-dependent-rope``.
    """
    config = model.config.get_text_config(decoder=True)
    for parameters in _parameter_sets(config):
        kind = str(parameters.get("rope_type", "default"))
        context = int(parameters.get("original_max_position_embeddings") or config.max_position_embeddings)
        if kind in _HISTORY_DEPENDENT and position > context:
            raise EngineError(
                "history-dependent-rope",
                f"rope scaling {kind} depends on the session's history past {context} tokens, and this session"
                f" is at {position}",
                field="rope_type",
                expected=context,
                found=position,
            )


@contextmanager
def kept_rotations(model: Any) -> Iterator[None]:
    """Run a forward that leaves the state of dynamic rotary modules as it was."""
    types = {parameters.get("rope_type") for parameters in _parameter_sets(model.config.get_text_config(decoder=True))}
    kept = [
        (module, dict(module.__dict__), {name: (buffer, buffer.clone()) for name, buffer in module._buffers.items()})
        for _, module in (_modules(model) if types & _HISTORY_DEPENDENT else ())
    ]
    try:
        yield
    finally:
        for module, attributes, buffers in kept:
            module.__dict__.update(attributes)
            for name, (buffer, value) in buffers.items():
                module._buffers[name] = buffer.copy_(value)


def _modules(model: Any) -> Iterator[tuple[str, Any]]:
    text_config = type(model.config.get_text_config(decoder=True))
    for path, module in model.named_modules():
        has_frequencies = any(name.endswith("inv_freq") for name in module._buffers)
        if has_frequencies and isinstance(getattr(module, "config", None), text_config | None):
            yield path, module


def _prefixes(module: Any, layer_types: Sequence[str]) -> list[tuple[str, str]]:
    if "inv_freq" in module._buffers:
        return [("rope", "")]
    names = [*dict.fromkeys(layer_types), *_NAMES_BY_USE.values(), _OTHER_USE]
    kinds = [kind for kind in names if f"{kind}_inv_freq" in module._buffers]
    return [(kind, f"{kind}_") for kind in kinds]


def _rope(config: Any, module: Any, name: str, prefix: str, pairing: str) -> Rope:
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get(name, parameters)
    source = "original_inv_freq" if parameters.get("rope_type") in _HISTORY_DEPENDENT else "inv_freq"
    frequencies = module._buffers[f"{prefix}{source}"].detach().float().cpu().numpy().astype("<f4")
    scaling = np.array(float(getattr(module, f"{prefix}attention_scaling", 1.0)), dtype="<f8")
    return Rope(
        dim=2 * frequencies.size,
        pairing=pairing,
        theta=float(parameters.get("rope_theta") or getattr(config, "rope_theta", 0.0)),
        digest=blake3(frequencies.tobytes() + scaling.tobytes()).digest(),
    )


def _parameter_sets(config: Any) -> list[dict[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def _name(table: dict[str, Rope], layer_type: str) -> str | None:
    if "rope" in table:
        return "rope"
    if layer_type in table:
        return layer_type
    by_use = _NAMES_BY_USE.get(layer_type, _OTHER_USE)
    return by_use if by_use in table else None


def _turns(config: Any, at: int, layer_type: str) -> bool:
    # transformers' `no_rope_layers` holds 1 for the layers that do turn (smollm3, llama4).
    switches = getattr(config, "no_rope_layers", None)
    if switches:
        return bool(switches[at])
    if config.model_type in _FULL_LAYERS_WITHOUT_ROPE and getattr(config, "sliding_window", None) is not None:
        return layer_type != "full_attention"
    return True
