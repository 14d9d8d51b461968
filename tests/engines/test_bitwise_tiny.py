"""Tiny models of every architecture that is carried: 20 steps after a restore in a fresh process, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.batch import ROOT, assert_bitwise
from tests.engines.families import BEGIN, END, SESSIONS, Reports, results_of, run_sessions, table
from tests.engines.session_batch import name_of

# Model type and cache class to what is said: a layer class of the model's own that has no adapter, and a model for
# which transformers itself has no static cache.
REFUSALS = {
    ("minimax_m3_vl_text", "dynamic"): "layer 1 is a MiniMaxM3VLSparseCacheLayer",
    ("minimax_m3_vl_text", "static"): "layer 1 is a MiniMaxM3VLSparseStaticCacheLayer",
    ("deepseek_v4", "static"): "transformers makes no static cache for the model type deepseek_v4",
}
REFUSED = {name_of(s): reason for s in SESSIONS if (reason := REFUSALS.get((s["model"], s["kind"])))}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, process_environment: Callable[[int], dict[str, str]]) -> Reports:
    return run_sessions(tmp_path_factory.mktemp("tiny"), process_environment(1))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for session in SESSIONS if (name := name_of(session)) not in REFUSED])
def test_restored_session_decodes_bit_for_bit(name: str, reports: Reports) -> None:
    assert_bitwise(reports[name])


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_carried_whole_is_refused_by_name(name: str, reports: Reports) -> None:
    produced, consumed = reports[name]
    assert produced == consumed
    assert produced["refused"].startswith(REFUSED[name])


def test_the_models_say_something(reports: Reports) -> None:
    # Digests of one constant row would agree whatever the cache held. (A prompt of one token may repeat itself.)
    constant = [
        name
        for name, (produced, _) in reports.items()
        if name not in REFUSED and len(set(produced["digests"])) == 1 and not name.endswith("-1")
    ]
    assert constant == []


def test_the_readme_says_what_this_run_found(reports: Reports, tmp_path: Path) -> None:
    results = results_of(reports)
    (tmp_path / "families.json").write_text(json.dumps(results, indent=1), "utf-8")
    _, _, rest = (ROOT / "README.md").read_text("utf-8").partition(BEGIN)
    found = BEGIN + rest.partition(END)[0] + END
    assert found == table(results), "run `python tests/engines/write_family_table.py`"
