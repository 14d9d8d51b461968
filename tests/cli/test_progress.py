"""Bars on a terminal for what takes long, and silence in a pipe."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

from kvpack_cli import progress

from tests.conftest import ROOT, pinned_environment

WORK = """
import sys, time
from kvpack_cli import progress
progress.DELAY_SECONDS = float(sys.argv[1])
with progress.meter("writing a.kvpack") as shown:
    for done in range(10):
        shown(done, 10)
        time.sleep(0.05)
"""


def said_on_a_terminal(delay: float) -> str:
    master, slave = pty.openpty()
    subprocess.run(
        [sys.executable, "-c", WORK, str(delay)], cwd=ROOT, stderr=slave, check=True, timeout=60,
        env={**pinned_environment(), "TERM": "xterm"},
    )  # fmt: skip
    os.close(slave)
    said = b""
    # A terminal whose other end is closed reads as an I/O error.
    try:
        while part := os.read(master, 4096):
            said += part
    except OSError:
        os.close(master)
    return said.decode()


def test_a_terminal_sees_a_bar_for_long_work_only() -> None:
    assert "writing a.kvpack" in said_on_a_terminal(0.01)
    assert said_on_a_terminal(60) == ""


def test_a_pipe_sees_nothing() -> None:
    process = subprocess.run(
        [sys.executable, "-c", WORK, "0.01"], cwd=ROOT, capture_output=True, check=True, env=pinned_environment()
    )
    assert (process.stdout, process.stderr) == (b"", b"")


def test_stages_are_timed_and_added_up() -> None:
    watch = progress.Stopwatch()
    for name in ("a", "b", "a"):
        with watch.stage(name, name):
            pass
    assert list(watch.facts()) == ["a", "b"]
    assert watch.total("a", "b", "never") == watch.seconds["a"] + watch.seconds["b"]
