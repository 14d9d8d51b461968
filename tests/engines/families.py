"""Every architecture that is known: its tiny model's sessions, what became of each, and the README's table of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvpack.engines import transformers as engine
from kvpack.errors import EngineError
from tests.engines.batch import run_batch
from tests.engines.session_batch import name_of
from tests.engines.tiny import CAPACITY, DTYPES, NAMES, WINDOW, session, tiny_model

POSITION = 300
KINDS = {"dynamic": None, "static": CAPACITY}
BEGIN, END = "<!-- families:begin -->", "<!-- families:end -->"
_EDGES = (1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW)
# Positions where something begins or ends: windows (all sliding, mixed, chunked), pools of 4 and 128, taps of a conv.
_MORE_POSITIONS = {
    ("mistral", "dynamic"): _EDGES,
    ("mistral", "static"): _EDGES,
    ("gemma3_text", "dynamic"): _EDGES,
    ("gemma3_text", "static"): _EDGES,
    ("llama4_text", "dynamic"): _EDGES,
    ("llama4_text", "static"): _EDGES,
    ("deepseek_v32", "dynamic"): (1, 64, 65),
    ("deepseek_v4", "dynamic"): (1, 3, 4, 5, WINDOW, 127, 128, 129),
    ("falcon_h1", "dynamic"): (1, 3),
    ("gemma3n_text", "dynamic"): (1, WINDOW),
    ("inkling_text", "dynamic"): (1, 3, WINDOW),
    ("lfm2", "dynamic"): (1, 2),
    ("mamba2", "dynamic"): (1, 2, 4),
    ("qwen3_next", "dynamic"): (1, 3),
}


def _positions(name: str, dtype: str, kind: str) -> tuple[int, ...]:
    more = _MORE_POSITIONS.get((name, kind), ()) if dtype != "f16" else ()
    return (*more, POSITION)


SESSIONS = [
    {"model": name, "dtype": dtype, "kind": kind, "capacity": capacity, "position": position}
    for name in NAMES
    for dtype in DTYPES
    for kind, capacity in KINDS.items()
    for position in _positions(name, dtype, kind)
]

Reports = dict[str, tuple[dict[str, Any], dict[str, Any]]]


def run_sessions(folder: Path, environment: dict[str, str]) -> Reports:
    """All sessions, in one producing and one consuming process."""
    return run_batch(folder, SESSIONS, environment)


def outcome_of(pair: tuple[dict[str, Any], dict[str, Any]]) -> str:
    """``bitwise``, ``refused: …`` (by both processes, for the same reason), or what differs."""
    produced, consumed = pair
    if "refused" in produced:
        same = consumed.get("refused") == produced["refused"]
        return f"refused: {produced['refused']}" if same else "refused by one process only"
    if produced["digests"] != consumed["digests"]:
        pairs = zip(produced["digests"], consumed["digests"], strict=True)
        return f"differs from step {next(step for step, (one, other) in enumerate(pairs) if one != other)} on"
    return "bitwise" if consumed["claim"] == "BITWISE" else str(consumed["claim"]).lower()


def results_of(reports: Reports) -> dict[str, Any]:
    """The results as JSON: family to the kinds of state carried and to the outcome of each cache class and dtype."""
    families: dict[str, Any] = {}
    for one in SESSIONS:
        if one["position"] != POSITION:
            continue
        pair = reports[name_of(one)]
        family = families.setdefault(one["model"], {"state": {}, "outcomes": {}})
        family["outcomes"].setdefault(one["kind"], {})[one["dtype"]] = outcome_of(pair)
        if one["dtype"] == "bf16" and "state" in pair[0]:
            family["state"] = pair[0]["state"]
    return {"families": families, "refused": refused_sessions()}


def refused_sessions() -> dict[str, str]:
    """Sessions of a model that is carried, in a form that is not: what it is, and what capture says."""
    from transformers import DynamicCache, EncoderDecoderCache, QuantizedCache

    model = tiny_model("llama")
    cache, _, tokens = session(model, 8)

    def batch_of_two() -> Any:
        import torch

        two = engine.new_cache(model)
        with torch.no_grad():
            model(input_ids=torch.tensor([tokens, tokens]), cache=two)
        return two

    def offloaded() -> Any:
        cache.offloading = True
        return cache

    makers: dict[str, Callable[[], Any]] = {
        "a batch of two": batch_of_two,
        "a quantized cache": lambda: QuantizedCache("fp8", model.config),
        "an encoder-decoder cache": lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()),
        "an offloaded cache": offloaded,
    }
    found = {}
    for name, make in makers.items():
        try:
            engine.capture(model, make(), tokens)
        except EngineError as error:
            found[name] = f"{error.code}: {error}"
        else:
            found[name] = "captured"
    return found


def _state_text(state: Mapping[str, list[str]]) -> str:
    """``recurrent (conv, ssm f32)``: an element type is named where it is not the model's own."""
    parts = []
    for kind, planes in state.items():
        roles = ", ".join(plane.removesuffix(" bf16") for plane in planes)
        parts.append(f"{kind} ({roles})" if roles else kind)
    return "; ".join(parts)


def _cell(outcomes: Mapping[str, str]) -> str:
    if len(set(outcomes.values())) == 1:
        return next(iter(outcomes.values()))
    return "; ".join(f"{dtype}: {outcome}" for dtype, outcome in outcomes.items())


def table(results: Mapping[str, Any]) -> str:
    """The block of the README between its markers, markers included."""
    lines = [
        BEGIN,
        "| model type | state carried (a bf16 model) | dynamic cache | static cache |",
        "|---|---|---|---|",
    ]
    for name, family in results["families"].items():
        cells = (_cell(family["outcomes"][kind]) for kind in KINDS)
        lines.append(" | ".join((f"| `{name}`", _state_text(family["state"]), *cells)) + " |")
    lines += ["", "| refused | by |", "|---|---|"]
    lines += [f"| {name} | {reason} |" for name, reason in results["refused"].items()]
    return "\n".join([*lines, END])


def with_table(readme: str, block: str) -> str:
    """The README with the block in place of the one that it has, or at its end."""
    if BEGIN not in readme:
        return f"{readme.rstrip()}\n\n{block}\n"
    head, _, rest = readme.partition(BEGIN)
    return head + block + rest.partition(END)[2]
