"""One process of a warm start: ``python -m tests.engines.warm_batch PLAN ROLE``.

The plan is a JSON file: ``folder`` for the stores and the reports, and ``runs``, each with ``model`` (a tiny model's
name, or the path of a GGUF file), ``shared`` (tokens that both roles begin with) and ``cache``. ``first`` asks one
question and fills the store; ``second`` asks another one with that store, and then again with an empty one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvpack.engines import transformers as engine
from kvpack.store import PrefixStore
from tests.engines.tiny import CONFIGS, tiny_model, tiny_prompt

STEPS = 12
QUESTIONS = {"first": [5, 6, 7, 8] * 5, "second": [9, 8, 11] * 11}
ROOT = Path(__file__).resolve().parents[2]
TEXT = ROOT / "LICENSE"


def name_of(run: dict[str, Any]) -> str:
    """A run's name: its store's folder and its key in the reports."""
    return f"{Path(run['model']).stem}-{run['cache']}"


def _model(run: dict[str, Any]) -> tuple[Any, Any, Any, list[int]]:
    if run["model"] in CONFIGS["models"]:
        return tiny_model(run["model"]), None, None, tiny_prompt(run["shared"])
    loaded = engine.load_model(run["model"], dtype="bf16")
    tokens = loaded.tokenizer(TEXT.read_text("utf-8"))["input_ids"][: run["shared"]]
    return loaded.model, loaded.tokenizer, loaded.source, tokens


class FedTokens:
    """How many tokens each forward of a model was given."""

    def __init__(self, model: Any) -> None:
        self.counts: list[int] = []
        model.register_forward_pre_hook(self._seen, with_kwargs=True)

    def _seen(self, model: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.counts.append(int(keywords["input_ids"].shape[1]))


def ask(model: Any, prompt: list[int], folder: Path, fed: FedTokens, **options: Any) -> dict[str, Any]:
    """One ``generate``, and how many tokens the model was really fed before it decoded."""
    with PrefixStore.open(str(folder), durability="none") as store:
        warmed = engine.describe(model)  # its own forward is not counted
        assert warmed.layers
        fed.counts.clear()
        made = engine.generate(model, prompt, store=store, max_new_tokens=STEPS, **options)
    described = 1  # `generate` describes the model once more, and `install` once
    return {
        "tokens": made.tokens,
        "digests": [digest.hex() for digest in made.digests],
        "reused": made.reused,
        "computed": made.computed,
        "claim": made.claim and made.claim.value,
        "lowered": made.lowered,
        "recomputed": made.recomputed,
        "stored": [[entry.position, entry.chain] for entry in made.stored],
        "largest": max(fed.counts[described:]),
    }


def main(plan_path: str, role: str) -> None:
    plan = json.loads(Path(plan_path).read_text("utf-8"))
    folder, report = Path(plan["folder"]), {}
    for run in plan["runs"]:
        model, tokenizer, source, shared = _model(run)
        fed = FedTokens(model)
        prompt = [*shared, *QUESTIONS[role]]
        options = {
            "tokenizer": tokenizer,
            "cuts": [run["shared"]],
            "identity": engine.identify(model, tokenizer, source=source),
            "cache": run["cache"],
            "capacity": run["shared"] + 100 if run["cache"] == "static" else None,
        }
        name = name_of(run)
        report[name] = [ask(model, prompt, folder / name, fed, **options)]
        if role == "second":
            report[name].append(ask(model, prompt, folder / f"{name}-alone", fed, **options))
    (folder / f"{role}.json").write_text(json.dumps(report), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
