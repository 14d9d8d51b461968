"""The frame of the command: help, usage errors, one line and one status for every family of errors."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from kvpack_cli.main import COMMANDS

import kvpack
from kvpack import errors
from tests.cli.commands import Here, in_a_process
from tests.conftest import pinned_environment

STATUSES = {
    errors.UsageError: 2,
    errors.FormatError: 10,
    errors.IntegrityError: 11,
    errors.TrustError: 12,
    errors.DecryptError: 13,
    errors.CompatibilityError: 14,
    errors.ResourceError: 15,
    errors.StoreError: 16,
    errors.EngineError: 17,
    errors.InstallError: 18,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_teaches(kvpack_here: Here, command: str) -> None:
    said = kvpack_here.good(command, "--help")
    assert "Example" in said.out
    assert f"kvpack {command}" in said.out
    assert max(map(len, said.out.splitlines())) <= 100


def test_the_group_lists_its_commands_and_statuses(kvpack_here: Here) -> None:
    said = kvpack_here.good("--help")
    for word in (*COMMANDS, "Exit status", "Compatibility", "interrupted"):
        assert word in said.out
    assert kvpack_here.good().out == said.out


def test_the_version(kvpack_here: Here) -> None:
    assert kvpack_here.good("--version").out == f"kvpack {kvpack.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("frobnicate",), "frobnicate"),
        (("inspect",), "PACK"),
        (("inspect", "a", "--planets"), "--planets"),
        (("install", "a"), "--model"),
        (("install", "a", "--model", "m", "--at", "0"), "--at"),
        (("capture", "--model", "m", "--prompt-file", "p", "-o", "x", "--dtype", "f64"), "f64"),
    ],
)
def test_a_usage_error_is_one_line(kvpack_here: Here, arguments: tuple[str, ...], words: str) -> None:
    said = kvpack_here(*arguments)
    assert (said.status, said.out) == (2, "")
    assert said.err.count("\n") == 1
    assert words in said.err
    assert "--help" in said.err
    kvpack_here(*arguments, "--json").refused(2, "usage")


@pytest.mark.parametrize(("kind", "status"), STATUSES.items())
def test_every_family_has_its_status(
    kvpack_here: Here, monkeypatch: pytest.MonkeyPatch, kind: type[errors.KvpackError], status: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise kind("a-code", "a message", layer=3, plane="layer.3.k", expected=b"e", found=7, hint="a hint")

    monkeypatch.setattr(kvpack, "inspect", refuse)
    said = kvpack_here("inspect", "x")
    assert (said.status, said.err, said.out) == (status, "kvpack: a message — a hint\n", "")
    error = kvpack_here("inspect", "x", "--json").refused(status, "a-code")
    assert (error["family"], error["layer"], error["found"]) == (kind.family, 3, 7)
    assert error["field"] is None


def test_no_family_is_forgotten() -> None:
    assert set(STATUSES) == set(errors.KvpackError.__subclasses__())


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (KeyboardInterrupt(), 130, "kvpack: interrupted\n"),
        (OSError(errno.EIO, "Input/output error", "f"), 15, "kvpack: f: Input/output error\n"),
        (MemoryError(), 15, "kvpack: there is not enough memory\n"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_what_is_no_error_of_ours(
    kvpack_here: Here, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, line: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(kvpack, "inspect", fail)
    said = kvpack_here("inspect", "x")
    assert (said.status, said.err, said.out) == (status, line, "")


def test_a_fault_of_the_program_is_not_swallowed(kvpack_here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvpack, "inspect", lambda *_, **__: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        kvpack_here("inspect", "x")


def test_a_reader_that_goes_away_is_no_error(make_pack: Callable[..., Path]) -> None:
    command = [sys.executable, "-m", "kvpack_cli", "inspect", str(make_pack())]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=pinned_environment(), text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait(60) == 141


def test_a_full_stdout_is_one_line(make_pack: Callable[..., Path]) -> None:
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "kvpack_cli", "inspect", str(make_pack())],
            stdout=full, stderr=subprocess.PIPE, env=pinned_environment(), text=True, check=False,
        )  # fmt: skip
    assert (process.returncode, process.stderr.count("\n")) == (15, 1)


def test_an_ascii_terminal_is_enough(make_pack: Callable[..., Path], tmp_path: Path) -> None:
    pack = make_pack()
    said = in_a_process("inspect", pack, cwd=tmp_path, environment={"PYTHONIOENCODING": "ascii"})
    assert (said.status, said.err) == (0, "")
    missing = in_a_process("inspect", "m\u00fcde", cwd=tmp_path, environment={"PYTHONIOENCODING": "ascii"})
    assert (missing.status, missing.err.count("\n")) == (2, 1)
