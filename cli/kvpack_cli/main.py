"""The command group, and the one place where errors become a line on stderr and an exit status."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from types import FrameType

import click

from kvpack.errors import KvpackError, ResourceError, UsageError
from kvpack.version import __version__
from kvpack_cli.output import Output

__all__ = ["COMMANDS", "cli", "main"]

COMMANDS = (
    "demo", "keygen", "capture", "inspect", "verify", "diff", "install", "synth", "flatten", "generate", "store",
    "push", "pull",
)  # fmt: skip

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
BROKEN_PIPE = 128 + signal.SIGPIPE


class _Commands(click.Group):
    """The commands, each in the module of its name, imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"kvpack_cli.{cmd_name}").command
        return command


EPILOG = """\b
First steps:
  kvpack demo
  kvpack keygen --out me.key
  kvpack capture --model ./model --prompt-file prompt.txt --sign me.key -o session.kvpack
  kvpack inspect session.kvpack --trust me.key.pub
  kvpack install session.kvpack --model ./model --trust me.key.pub

\b
Warm starts: the second process reuses what the first one computed:
  kvpack generate --store file:/tmp/store --model ./model --prompt-file prompt.txt
  kvpack store ls --store file:/tmp/store

\b
Without a model:
  kvpack synth --geometry fixtures/geometries/small.json --position 1000 -o synth.kvpack
  kvpack install synth.kvpack --engine host --allow-unsigned --append 10 --recapture more.kvpack
  kvpack diff synth.kvpack more.kvpack

\b
Exit status (1: the packs that diff compared differ):
   0  good               12  Trust          16  Store
   2  usage              13  Decrypt        17  Engine
  10  Format             14  Compatibility  18  Install
  11  Integrity          15  Resource      130  interrupted
"""


@click.group(
    cls=_Commands,
    epilog=EPILOG,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, "-V", "--version", prog_name="kvpack", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """The KV cache of a language model's session as a portable, signed file.

    A session is captured in one process and goes on in another, bit for bit, or the command says why it cannot.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


class _Terminated(BaseException):
    """SIGTERM, raised in the main thread so that every temporary is removed on the way out."""


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM and the first SIGINT unwind the stack; further ones change nothing, so that clean-up is not cut short.

    After a signal the process is about to end, and its handlers stay; otherwise they are put back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stopped = False

    def unwind(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            raise KeyboardInterrupt if number == signal.SIGINT else _Terminated

    before = {number: signal.signal(number, unwind) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if not stopped:
            for number, handler in before.items():
                signal.signal(number, handler)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; ``arguments`` default to the process's own."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        # A file name that is not UTF-8, or a terminal that knows only ASCII, is no reason to fail.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    output = Output()
    # What is said twice, in options and in an error of the options themselves, is still one object on stdout.
    output.as_json = "--json" in given
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
        return _run(given, output)


def _run(arguments: list[str], output: Output) -> int:
    try:
        with _signals():
            return _invoke(arguments, output)
    except KvpackError as error:
        return _report(error, output)
    except click.UsageError as error:
        return _report(_usage_error(error), output)
    except click.ClickException as error:
        return _report(UsageError("usage", _one_line(error.format_message())), output)
    except BrokenPipeError:
        _abandon_stdout()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno == errno.ENOSPC:
            _abandon_stdout()
        return _report(_system_error(error), output)
    except MemoryError:
        return _report(ResourceError("out-of-memory", "there is not enough memory"), output)
    except (KeyboardInterrupt, click.Abort):
        click.echo("kvpack: interrupted", err=True)
        return INTERRUPTED
    except _Terminated:
        click.echo("kvpack: terminated", err=True)
        return TERMINATED


def _invoke(arguments: list[str], output: Output) -> int:
    # Not click's own `main`: it prints an empty line before an interrupt and has its own exit statuses.
    try:
        with cli.make_context("kvpack", arguments, obj=output) as context:
            cli.invoke(context)
            if context.invoked_subcommand is not None:
                output.finish()
    except click.exceptions.Exit as done:
        sys.stdout.flush()
        return done.exit_code
    sys.stdout.flush()
    return 0


def _report(error: KvpackError, output: Output) -> int:
    try:
        output.fail(error)
        sys.stdout.flush()
    except OSError:  # Nobody listens any more; the exit status still tells.
        _abandon_stdout()
    return error.exit_status


def _abandon_stdout() -> None:
    """Keep the interpreter from flushing a stream that is gone, which would print a traceback at exit."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _usage_error(error: click.UsageError) -> UsageError:
    path = error.ctx.command_path if error.ctx is not None else "kvpack"
    message = _one_line(error.format_message()).rstrip(".")
    return UsageError("usage", message[:1].lower() + message[1:], hint=f"see '{path} --help'")


def _system_error(error: OSError) -> ResourceError:
    """An operating system's refusal that no room turned into an error of its own."""
    codes = {errno.ENOSPC: "disk-full", errno.EROFS: "read-only", errno.EACCES: "permission-denied"}
    place = f"{error.filename}: " if error.filename else ""
    return ResourceError(
        codes.get(error.errno or 0, "io-error"), f"{place}{error.strerror or error}", found=error.filename
    )
