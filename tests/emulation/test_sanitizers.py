"""The same tests in processes of their own: every kernel under ASan and UBSan, those with barriers under TSan.

An optimised build passes with a load one unit past the end of a plane; only ASan sees it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulation.build import ROOT, mode, sanitized_environment

HERE = Path(__file__).parent
WITH_BARRIERS = ("test_blake3.py",)
ALL = ("test_move.py", "test_stage.py", "test_convert.py", "test_rope.py", *WITH_BARRIERS)


def run_under(sanitizer: str, files: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run tests in a process with a sanitizer."""
    # Address space layout with many random bits leaves TSan no room for its shadow.
    prefix = ["setarch", "--addr-no-randomize"] if sanitizer == "thread" else []
    # A sanitizer ends the process with its report on the real standard error, which pytest would keep to itself.
    command = [*prefix, sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *(str(HERE / name) for name in files)],
        env=sanitized_environment(sanitizer),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(mode() != "plain", reason="this process has a sanitizer already")
@pytest.mark.parametrize(("sanitizer", "files"), [("address", ALL), ("thread", WITH_BARRIERS)])
def test_kernels_are_clean_under(sanitizer: str, files: tuple[str, ...]) -> None:
    outcome = run_under(sanitizer, files)
    assert outcome.returncode == 0, f"{outcome.stdout[-4000:]}\n{outcome.stderr[-8000:]}"
    assert " passed" in outcome.stdout
