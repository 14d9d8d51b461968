"""The specification and the vectors name the same errors: a rule without a vector is a rule that nobody holds."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ERROR = re.compile(r"`(Format|Integrity|Trust|Decrypt|Compatibility)/([a-z0-9-]+)`")

# Named by the specification, and met only where there is more than one file or a destination: held by other tests.
ELSEWHERE = {
    ("Compatibility", "rows-not-stored"): "tests/unit/test_gate.py",
    ("Trust", "unsigned"): "tests/unit/test_trust_policy.py",
}


def spec_errors() -> set[tuple[str, str]]:
    return set(ERROR.findall((ROOT / "spec/kvpack-v1.md").read_text("utf-8")))


def vector_errors() -> set[tuple[str, str]]:
    found = set()
    for sidecar in (ROOT / "fixtures/v1").glob("*/*.json"):
        facts = json.loads(sidecar.read_text("utf-8"))
        for place in (facts, facts.get("gate") or {}, facts.get("payload") or {}):
            if "code" in place:
                found.add((place["family"], place["code"]))
    return found


def test_every_error_of_the_spec_has_a_vector() -> None:
    assert spec_errors() - vector_errors() - set(ELSEWHERE) == set()


def test_every_error_of_the_vectors_is_in_the_spec() -> None:
    text = (ROOT / "spec/kvpack-v1.md").read_text("utf-8")
    assert {
        pair for pair in vector_errors() if f"{pair[0]}/{pair[1]}" not in text and f"`{pair[1]}`" not in text
    } == set()


def test_what_is_held_elsewhere_is_held_there() -> None:
    for (_, code), place in ELSEWHERE.items():
        assert f'"{code}"' in (ROOT / place).read_text("utf-8")


def test_the_pattern_finds_errors() -> None:
    """The control: an empty set would pass everything above."""
    assert len(spec_errors()) > 30
    assert len(vector_errors()) > 30
