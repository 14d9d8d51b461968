"""Run a batch of sessions through two processes, with the same environment on both sides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.engines.session_batch import name_of

ROOT = Path(__file__).resolve().parents[2]


def run_batch(
    folder: Path, sessions: list[dict[str, Any]], environment: dict[str, str]
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Produce in one process and consume in another; session name to (producer's report, consumer's report)."""
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"folder": str(folder), "sessions": sessions}), "utf-8")
    reports = []
    for role in ("produce", "consume"):
        command = [sys.executable, "-W", "error", "-m", "tests.engines.session_batch", role, str(plan)]
        outcome = subprocess.run(
            command,
            cwd=ROOT,
            env={**environment, "PYTHONPATH": os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert outcome.returncode == 0, f"{role}:\n{outcome.stdout}\n{outcome.stderr}"
        assert outcome.stderr == "", f"{role} was not silent:\n{outcome.stderr}"
        reports.append(json.loads((folder / f"{role}.json").read_text("utf-8")))
    produced, consumed = reports
    return {name_of(s): (produced[name_of(s)], consumed[name_of(s)]) for s in sessions}


def assert_bitwise(pair: tuple[dict[str, Any], dict[str, Any]], *, steps: int = 20) -> None:
    """Every step's logits in the fresh process are those of the uninterrupted run."""
    produced, consumed = pair
    assert len(produced["digests"]) == steps
    assert consumed["digests"] == produced["digests"]
    assert consumed["tokens"] == produced["tokens"]
    assert consumed["lowered"] == []
    assert consumed["claim"] == "BITWISE"
    assert consumed["same_tokens"]
