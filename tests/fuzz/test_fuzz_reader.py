"""A moment of the fuzzer in every run; ``make fuzz`` goes on for longer."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.fuzz_reader import SEEDS, fuzz, read_everything


def test_damaged_packs_are_refused_by_kvpack_errors_only(tmp_path: Path) -> None:
    seen = fuzz(tmp_path, seed=20260101, seconds=30, most=1500)
    assert len(seen) > 12, seen  # the damage reaches many checks, not one
    assert sum(seen.values()) == 1500


def test_the_undamaged_packs_are_read(tmp_path: Path) -> None:
    """The control: what the fuzzer starts from is good, or refused for the one reason that its vector is for."""
    answers = {path.stem: read_everything(path) for path in SEEDS}
    bad = {name: answer for name, answer in answers.items() if answer != "good"}
    assert set(bad.values()) <= {"Decrypt/encrypted", "Compatibility/unknown-encoding", "Compatibility/rows-not-stored"}
    assert len(bad) < len(answers) / 4
