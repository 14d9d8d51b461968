"""What a command says: lines for people or one JSON object on stdout, and one line on stderr if something is wrong."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from kvpack.errors import KvpackError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "Output",
    "bytes_text",
    "count_text",
    "jsonable",
    "printable",
    "ratio_text",
    "seconds_text",
    "time_text",
    "wants_colour",
]

ERROR_FIELDS = ("family", "code", "message", "layer", "plane", "field", "expected", "found", "hint")

# Nothing is wrapped in a pipe: a program that reads lines must find each fact on one.
_LONGEST_LINE = 10_000


def printable(text: str) -> str:
    """The text with everything that is not printable as an escape: a file's words must not drive a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def count_text(count: int) -> str:
    """``131072`` as ``131,072``."""
    return f"{count:,}"


def bytes_text(size: float) -> str:
    """A size in at most eight characters: ``984 B``, ``12.3 KiB``, ``1.20 GiB``."""
    if size < 1000:
        return f"{int(size)} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 999.5 or unit == "TiB":
            break
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{size:.{digits}f} {unit}"


def seconds_text(seconds: float) -> str:
    """A duration as people read it: ``41 ms``, ``3.2 s``."""
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"


def ratio_text(raw: int, stored: int) -> str:
    """How many times smaller the stored bytes are."""
    return f"{raw / stored:.2f}x" if stored else "-"


def time_text(seconds: int) -> str:
    """Seconds since 1970 as a UTC date, or as a number where they are beyond any date."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{seconds} s after 1970"


def jsonable(value: object) -> object:
    """A wire value as JSON: bytes in hex, sequences as lists."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    if isinstance(value, Mapping):
        return {str(key): jsonable(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [jsonable(entry) for entry in value]
    return value


def wants_colour() -> bool:
    """Whether stdout takes colour: a terminal, and nobody said no (NO_COLOR, TERM=dumb)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _width() -> int:
    """Columns that a line may take."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return shutil.get_terminal_size().columns
    return _LONGEST_LINE


class Output:
    """One command's output.

    ``facts`` is the JSON object, filled while the command works, so that it is there on an error. Everything else is
    for people.
    """

    def __init__(self) -> None:
        self.as_json = False
        self.facts: dict[str, object] = {}

    def line(self, text: str = "") -> None:
        """One line for people; nothing under ``--json``."""
        if not self.as_json:
            click.echo(text, color=wants_colour())

    def fields(self, rows: Iterable[tuple[str, str]], *, indent: int = 0) -> None:
        """Aligned ``label  value`` lines; an empty label continues the value above it."""
        pairs = [(printable(label), printable(text)) for label, text in rows]
        width = max((len(label) for label, _ in pairs), default=0)
        left = _width() - indent - width - 2
        for label, text in pairs:
            # A digest or a path that is longer than the line stays whole, to be copied.
            parts = textwrap.wrap(text, left, break_long_words=False, break_on_hyphens=False) if left > 20 else [text]
            for at, part in enumerate(parts or [""]):
                head = click.style((label if at == 0 else "").ljust(width), dim=True)
                self.line(f"{' ' * indent}{head}  {part}".rstrip())

    def heading(self, title: str) -> None:
        """A title above what follows."""
        self.line()
        self.line(click.style(title, bold=True))

    def text(self, label: str, text: str) -> None:
        """A model's words, below a label; they keep their lines."""
        self.line()
        self.line(click.style(f"{label}:", dim=True))
        for line in text.splitlines() or [""]:
            self.line(f"  {printable(line)}")

    def table(self, table: Table) -> None:
        """A table for people: markup and highlighting off, and never cut off to fit a terminal."""
        from rich.console import Console

        console = Console(file=sys.stdout, width=_LONGEST_LINE, markup=False, highlight=False, emoji=False)
        console.no_color = not wants_colour()
        console.print(table)

    def finish(self) -> None:
        """Print the JSON object, if one is wanted."""
        if self.as_json:
            click.echo(json.dumps(jsonable(self.facts), ensure_ascii=False, allow_nan=False))

    def fail(self, error: KvpackError) -> None:
        """One line on stderr that says what is wrong and what to do, and the JSON object with ``error`` in it."""
        # `message`, not str(): an error that named its file afterwards changed only that.
        hint = f" — {error.hint}" if error.hint else ""
        click.echo(printable(f"kvpack: {error.message}{hint}"), err=True)
        known = error.facts()
        self.facts["error"] = {name: known.get(name) for name in ERROR_FIELDS}
        self.finish()
