"""Running the command as a user does: in a process of its own, or in this one where only the answer matters."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kvpack_cli.main import main

from tests.conftest import ROOT, pinned_environment


@dataclass(frozen=True)
class Said:
    """What a command said and how it ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON object on stdout."""
        (line,) = self.out.splitlines()
        return json.loads(line)

    def refused(self, status: int, code: str) -> dict[str, Any]:
        """The error of a command that ran with ``--json``: one line on stderr, the family's status, the code."""
        assert (self.status, self.json["error"]["code"]) == (status, code), self
        assert self.err.startswith("kvpack: "), self.err
        assert self.err.count("\n") == 1, self.err
        assert self.err.endswith("\n")
        error: dict[str, Any] = self.json["error"]
        assert list(error) == [
            "family", "code", "message", "layer", "plane", "field", "expected", "found", "hint",
        ]  # fmt: skip
        return error


class Here:
    """The command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> Said:
        self._capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        said = self._capsys.readouterr()
        return Said(status, said.out, said.err)

    def good(self, *arguments: object) -> Said:
        """The same, and it must succeed in silence on stderr."""
        said = self(*arguments)
        assert (said.status, said.err) == (0, ""), said
        return said


def in_a_process(*arguments: object, cwd: Path, environment: Mapping[str, str] | None = None) -> Said:
    """The command in a fresh process, in a pipe."""
    process = subprocess.run(
        [sys.executable, "-m", "kvpack_cli", *map(str, arguments)],
        cwd=cwd,
        env={**pinned_environment(), "PYTHONWARNINGS": "", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Said(process.returncode, process.stdout, process.stderr)


def python(code: str, *arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A few lines of Python in a fresh process."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=cwd,
        env=pinned_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
