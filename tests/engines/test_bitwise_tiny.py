"""Tiny models of every architecture with full and sliding layers: 20 steps after a restore in a fresh process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engines.batch import assert_bitwise, run_batch
from tests.engines.session_batch import name_of
from tests.engines.tiny import DTYPES, NAMES, WINDOW

CAPACITY = 340
# Positions around the window run on one model of each placement: all sliding, mixed, and chunked.
AROUND_WINDOW = ("mistral", "gemma3_text", "llama4_text")
KINDS = {"dynamic": None, "static": CAPACITY}


def _positions(name: str, dtype: str) -> tuple[int, ...]:
    around = (1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW) if name in AROUND_WINDOW and dtype != "f16" else ()
    return (*around, 300)


SESSIONS = [
    {"model": name, "dtype": dtype, "kind": kind, "capacity": capacity, "position": position}
    for name in NAMES
    for dtype in DTYPES
    for kind, capacity in KINDS.items()
    for position in _positions(name, dtype)
]


@pytest.fixture(scope="module")
def reports(
    tmp_path_factory: pytest.TempPathFactory, process_environment: Callable[[int], dict[str, str]]
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    return run_batch(tmp_path_factory.mktemp("tiny"), SESSIONS, process_environment(1))


@pytest.mark.parametrize("name", [name_of(session) for session in SESSIONS])
def test_restored_session_decodes_bit_for_bit(
    name: str, reports: dict[str, tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    assert_bitwise(reports[name])


def test_the_models_say_something(reports: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    # Digests of one constant row would agree whatever the cache held. (A prompt of one token may repeat itself.)
    constant = [
        name
        for name, (produced, _) in reports.items()
        if len(set(produced["digests"])) == 1 and not name.endswith("-1")
    ]
    assert constant == []
