"""Random lives of a live cache against a model that keeps every row (:mod:`tests.reference.row_model`).

Appends, batches, checkpoints, rollbacks, commits, rewinds, captures, installs (fresh, staged, in place, away from the
cut), resets and shifts, over every law and kind; 10,000 steps a run. After each step every row that must be
there is read from the slot where its law puts it. Refusals are foretold by code, and change no byte.

The seed is printed; ``KVPACK_SEED=… pytest tests/reference/test_stateful.py`` runs the same lives again.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from kvpack.errors import KvpackError
from kvpack.live.rings import RotatingRing
from tests.reference.cache_life import CacheLife

EXAMPLES, STEPS, STEPS_IN_ALL = 60, 50, 10_000


def live(number: int, examples: int, *phases: Phase) -> int:
    """Run random lives from a seed; how many steps they took."""
    life = seed(number)(type("CacheLife", (CacheLife,), {"steps": 0}))
    run_state_machine_as_test(
        life,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=False,
            print_blob=True,
            database=None,
            phases=phases or settings.default.phases,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return int(life.steps)


@pytest.mark.timeout(900)  # a failing life is shortened before it is shown
def test_ten_thousand_steps_of_random_lives() -> None:
    number = int(os.environ.get("KVPACK_SEED") or secrets.randbits(32))
    print(f"KVPACK_SEED={number}")
    steps = rounds = 0
    while steps < STEPS_IN_ALL:
        steps += live(number + rounds, EXAMPLES)
        rounds += 1


def rotation_zero(ring: RotatingRing, position: int, **_: object) -> RotatingRing:
    length = min(position, ring.window)
    return replace(ring, length=length, origin_logical=position - length, origin_physical=0)


PLANTED = {
    "kept rows are not put back": ("kvpack.live.speculation._KeptRows.put_back", lambda *_: None),
    "a restored ring starts at row 0": ("kvpack.live.rings.RotatingRing.restored", rotation_zero),
    "a rollback does not ask where the cache went": (
        "kvpack.live.speculation.Speculation._way_back_lost",
        lambda *_: None,
    ),
    "a rewind forgets to look at the rows": ("kvpack.live.rings.require_rewind", lambda *_: None),
    "the counters are not written": ("kvpack.live.cache.LiveCache.write_counters", lambda *_: None),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(*PLANTED[fault])
    with pytest.raises((AssertionError, KvpackError, pytest.fail.Exception)):
        live(1, 150, Phase.generate)
