"""Run every tiny model's sessions and write what they found into the README's table of families.

Usage: ``python tests/engines/write_family_table.py [--json RESULTS]``; with ``--json`` also as a JSON file. The
suite's own run is compared with the table, so that the README says what the tests found.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.conftest import pinned_environment
from tests.engines.batch import ROOT
from tests.engines.families import results_of, run_sessions, table, with_table


def main(*arguments: str) -> None:
    """Run, and write."""
    with tempfile.TemporaryDirectory() as folder:
        results = results_of(run_sessions(Path(folder), pinned_environment()))
    if arguments[:1] == ("--json",):
        Path(arguments[1]).write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text("utf-8"), table(results)), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
