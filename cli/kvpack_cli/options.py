"""Options that several commands share, and the checks of what they name, made before anything slow is started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from kvpack.errors import ResourceError, UsageError
from kvpack.trust import TrustPolicy, load_trust
from kvpack_cli.engine import ENGINES
from kvpack_cli.output import Output

__all__ = [
    "FILE",
    "allow_unsigned_option",
    "cache_options",
    "capacity_for",
    "codec_option",
    "force_option",
    "json_option",
    "model_options",
    "parents_option",
    "policy_of",
    "positions_option",
    "refuse_given",
    "require_ascending",
    "require_model",
    "require_output",
    "sign_option",
    "trust_option",
]

_Command = TypeVar("_Command", bound=Callable[..., Any])

FILE = click.Path(path_type=Path)


def _positions(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    words = [word.strip() for word in value.split(",")] if value is not None else []
    if not all(word.isascii() and word.isdigit() and len(word) < 11 for word in words):
        raise click.BadParameter(f"{value!r} is not a list of positions, such as 100,200", ctx, parameter)
    return tuple(map(int, words))


def positions_option(name: str, **settings: Any) -> Callable[[_Command], _Command]:
    """An option that takes positions in tokens, separated by commas; without it there are none."""
    return click.option(name, callback=_positions, **settings)


def _set_json(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    ctx.ensure_object(Output).as_json = value


def json_option(command: _Command) -> _Command:
    """``--json``: one JSON object on stdout instead of lines for people."""
    return click.option(
        "--json", is_flag=True, expose_value=False, callback=_set_json, help="Print one JSON object on stdout."
    )(command)


def trust_option(command: _Command) -> _Command:
    """``--trust``: who may have signed the pack."""
    return click.option(
        "--trust",
        type=FILE,
        metavar="FILE",
        help="A public key, or a trust file (OpenSSH's allowed-signers lines): who may have signed.",
    )(command)


def allow_unsigned_option(command: _Command) -> _Command:
    """``--allow-unsigned``: accept a pack that nobody known signed."""
    return click.option("--allow-unsigned", is_flag=True, help="Accept a pack that nobody, or nobody known, signed.")(
        command
    )


def codec_option(command: _Command) -> _Command:
    """``--codec``: how tiles are compressed."""
    return click.option("--codec", type=click.Choice(["raw", "zstd", "split"]), default="split", show_default=True)(
        command
    )


def sign_option(command: _Command) -> _Command:
    """``--sign``: who vouches for the pack that is written."""
    return click.option(
        "--sign", type=FILE, multiple=True, metavar="KEY", help="Sign with this private key; may be repeated."
    )(command)


def force_option(command: _Command) -> _Command:
    """``--force``: an output may exist."""
    return click.option("--force", is_flag=True, help="Replace an existing file.")(command)


def parents_option(command: _Command) -> _Command:
    """``--parents``: where the packs lie that a delta continues."""
    return click.option("--parents", type=FILE, metavar="DIR", help="Where the packs lie that a delta continues.")(
        command
    )


def require_ascending(positions: Sequence[int], begin: int, end: int, option: str) -> tuple[int, ...]:
    """Positions of cuts behind ``begin`` up to ``end``, with ``end`` itself as the last; UsageError ``bad-cuts``."""
    before = begin
    for position in positions:
        if not before < position <= end:
            raise UsageError(
                "bad-cuts",
                f"--{option}: cuts ascend from {begin + 1} to {end}, and {position} does not fit",
                field=option,
                expected=f"{before + 1} to {end}",
                found=position,
            )
        before = position
    return tuple(positions) if positions and positions[-1] == end else (*positions, end)


def policy_of(trust: Path | None) -> TrustPolicy:
    """The policy that ``--trust`` names; without it nobody is trusted."""
    return TrustPolicy() if trust is None else load_trust(trust)


def model_options(*, others: Sequence[str] = ()) -> Callable[[_Command], _Command]:
    """``--engine``, ``--model`` and ``--dtype``; ``others`` are engines that need no model."""

    def decorated(command: _Command) -> _Command:
        for option in (
            click.option("--dtype", type=click.Choice(["f32", "bf16", "f16"]), help="Default: the model's own."),
            click.option(
                "--model",
                type=FILE,
                required=not others,
                metavar="DIR|FILE.gguf",
                help="A model on this machine." + (f" Not with --engine {others[0]}." if others else ""),
            ),
            click.option(
                "--engine",
                type=click.Choice([*ENGINES, *others]),
                default="transformers",
                show_default=True,
                help=f"{others[0]}: a plain cache in main memory, without a model." if others else None,
            ),
        ):
            command = option(command)
        return command

    return decorated


def refuse_given(ctx: click.Context, names: Iterable[str], reason: str) -> None:
    """Refuse options that were given and mean nothing here; ``names`` are those of the command's parameters."""
    for name in names:
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise UsageError("usage", f"{option} {reason}", field=option.lstrip("-"), hint=f"leave out {option}")


def cache_options(command: _Command) -> _Command:
    """``--cache`` and ``--capacity``."""
    for option in (
        click.option(
            "--capacity",
            type=click.IntRange(min=1),
            metavar="N",
            help="Tokens that a static cache has room for. Default: just enough.",
        ),
        click.option("--cache", type=click.Choice(["dynamic", "static"]), default="dynamic", show_default=True),
    ):
        command = option(command)
    return command


def capacity_for(cache: str, capacity: int | None, tokens: int) -> int | None:
    """The capacity of a cache that must hold so many tokens; None for a dynamic one."""
    if cache == "dynamic":
        if capacity is not None:
            raise UsageError(
                "bad-capacity", "a dynamic cache has no capacity", field="capacity", hint="use --cache static"
            )
        return None
    if capacity is not None and capacity < tokens:
        raise UsageError(
            "bad-capacity",
            f"a cache of {capacity} tokens has no room for {tokens}",
            field="capacity",
            expected=tokens,
            found=capacity,
            hint="raise --capacity",
        )
    return capacity or tokens


def require_model(model: Path) -> None:
    """Refuse what cannot be a model before a library is loaded to find out (UsageError)."""
    shown = str(model)
    if model.is_dir():
        if not (model / "config.json").is_file():
            raise UsageError(
                "not-a-model",
                f"the folder {shown} holds no model: it has no config.json",
                field="model",
                found=shown,
                hint="give the folder that holds config.json, or a .gguf file",
            )
    elif not model.exists():
        raise UsageError(
            "no-such-model",
            f"there is no model at {shown}",
            field="model",
            found=shown,
            hint="give a model folder or a .gguf file on this machine",
        )
    elif model.suffix.lower() != ".gguf":
        raise UsageError(
            "not-a-model",
            f"{shown} is neither a model folder nor a .gguf file",
            field="model",
            found=shown,
            hint="give the folder that holds config.json, or a .gguf file",
        )


def require_output(path: Path, *, force: bool) -> None:
    """Refuse an output that could not be written, before the work is done and not after it."""
    folder, shown = path.parent, str(path)
    if path.is_dir() or (path.exists() and not path.is_file()):
        raise UsageError("not-a-file", f"{shown} is not a regular file", found=shown, hint="choose another name")
    if os.path.lexists(path) and not force:
        raise UsageError("output-exists", f"{shown} exists", found=shown, hint="choose another name, or use --force")
    if not folder.is_dir():
        raise UsageError("no-such-folder", f"there is no folder {folder}", found=str(folder), hint=f"mkdir {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        read_only = bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
        raise ResourceError(
            "read-only" if read_only else "permission-denied",
            f"{folder} is {'on a read-only file system' if read_only else 'not writable'}",
            found=str(folder),
            hint="write to another place",
        )
