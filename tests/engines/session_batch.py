"""One process for a whole batch of sessions: ``python -m tests.engines.session_batch produce|consume PLAN``.

The plan is a JSON file: ``folder`` for packs and reports, and ``sessions``, each with ``model`` (a tiny model's name,
or the path of a GGUF file), ``dtype``, ``kind``, ``capacity`` and ``position``. The producer prefills, captures,
saves and decodes on; the consumer, in a fresh process, loads and decodes. Each writes one report of what it saw. A
session that the engine refuses is reported as refused, with the reason, by both.
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import kvpack
from kvpack.engines import transformers as engine
from kvpack.errors import EngineError
from kvpack.model.geometry import Geometry
from tests.engines.tiny import CONFIGS, tiny_model, tiny_prompt

STEPS = 20
TEXT = Path(__file__).resolve().parents[2] / "LICENSE"


def name_of(session: dict[str, Any]) -> str:
    """A session's name: its pack's file name and its key in the reports."""
    stem = Path(session["model"]).stem
    return f"{stem}-{session['dtype']}-{session['kind']}-{session['position']}"


def _model(session: dict[str, Any]) -> tuple[Any, Any, Any]:
    if session["model"] in CONFIGS["models"]:
        return tiny_model(session["model"], session["dtype"]), None, None
    loaded = engine.load_model(session["model"], dtype=session["dtype"])
    return loaded.model, loaded.tokenizer, loaded.source


def _tokens(tokenizer: Any, count: int) -> list[int]:
    if tokenizer is None:
        return tiny_prompt(count)
    tokens: list[int] = tokenizer(TEXT.read_text("utf-8"))["input_ids"][:count]
    assert len(tokens) == count
    return tokens


def refusal(model: Any, session: dict[str, Any]) -> str | None:
    """What the engine says against such a session's first token, or None."""
    try:
        engine.prefill(model, [3], engine.new_cache(model, session["kind"], session["capacity"]))
    except EngineError as error:
        return str(error)
    return None


def produce(folder: Path, session: dict[str, Any], model: Any, tokenizer: Any, identity: Any) -> dict[str, Any]:
    tokens = _tokens(tokenizer, session["position"])
    refused = refusal(model, session)
    if refused is not None:
        return {"refused": refused}
    cache = engine.new_cache(model, session["kind"], session["capacity"])
    logits = engine.prefill(model, tokens, cache)
    cut = engine.capture(model, cache, tokens, logits=logits, identity=identity)
    kvpack.save(cut, folder / f"{name_of(session)}.kvpack", codec="raw")
    decoded = engine.decode(model, cache, logits, STEPS)
    return {
        "tokens": decoded.tokens,
        "digests": [digest.hex() for digest in decoded.digests],
        "state": state_of(cut.geometry),
    }


def state_of(geometry: Geometry) -> dict[str, list[str]]:
    """Kind of layer to its planes with their element types, in the order of the layers."""
    found: dict[str, list[str]] = {}
    for layer in geometry.layers:
        planes = found.setdefault(layer.kind, [])
        planes.extend(text for plane in layer.planes if (text := f"{plane.role} {plane.encoding.name}") not in planes)
    return found


def consume(folder: Path, session: dict[str, Any], model: Any, tokenizer: Any, identity: Any) -> dict[str, Any]:
    path = folder / f"{name_of(session)}.kvpack"
    refused = refusal(model, session)
    if refused is not None:
        return {"refused": refused}
    with kvpack.open_pack(path, allow_unsigned=True) as pack:
        restored = engine.install(
            pack.cut(), model, cache=session["kind"], capacity=session["capacity"], identity=identity
        )
    path.unlink()
    decoded = engine.decode(model, restored.cache, restored.logits, STEPS)
    return {
        "tokens": decoded.tokens,
        "digests": [digest.hex() for digest in decoded.digests],
        "claim": restored.report.claim.value,
        "lowered": restored.report.lowered,
        "reused": restored.report.position,
        "same_tokens": list(restored.tokens) == _tokens(tokenizer, session["position"]),
    }


def main(role: str, plan_path: str) -> None:
    plan = json.loads(Path(plan_path).read_text("utf-8"))
    folder = Path(plan["folder"])
    work = {"produce": produce, "consume": consume}[role]
    report = {}
    # One load and one hash a model and dtype: sessions of the same one stand together in the plan.
    for _, group in groupby(plan["sessions"], key=lambda session: (session["model"], session["dtype"])):
        sessions = list(group)
        model, tokenizer, source = _model(sessions[0])
        identity = engine.identify(model, tokenizer, source=source)
        for session in sessions:
            report[name_of(session)] = work(folder, session, model, tokenizer, identity)
    (folder / f"{role}.json").write_text(json.dumps(report), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
