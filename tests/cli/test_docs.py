"""The README and the command agree: every command is documented, and every line shown names what exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from kvpack_cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
SHOWN = [
    line.removeprefix("$ ")
    for block in re.findall(r"```(?:sh|console)\n(.*?)```", README, re.S)
    for line in block.replace("\\\n", " ").splitlines()
    if line.removeprefix("$ ").startswith("kvpack ")
]


def find(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that the words name, and what is left of them."""
    command: click.Command = cli
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(click.Context(command), words[0])
        assert found is not None, f"there is no command {words[0]}"
        command, words = found, words[1:]
    return command, words


def test_every_command_is_in_the_readme() -> None:
    missing = [name for name in cli.list_commands(click.Context(cli)) if f"kvpack {name}" not in README]
    assert missing == []


@pytest.mark.parametrize("line", SHOWN)
def test_what_is_shown_exists(line: str) -> None:
    command, words = find(shlex.split(line.partition(" #")[0])[1:])
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert [word for word in words if word.startswith("-") and word not in options] == []


def test_lines_are_shown() -> None:
    """The control: an empty list would pass."""
    assert len(SHOWN) >= 8
    with pytest.raises(AssertionError):
        find(["nothing"])
