"""Options and checks of the commands that work on a prefix store."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from kvpack.api import check_factory, signer_of
from kvpack.errors import ResourceError, StoreError, UsageError
from kvpack.store import Entry, PrefixStore, Store
from kvpack.trust import SigningKey
from kvpack_cli.options import FILE, policy_of

__all__ = ["open_store", "resolve", "store_options"]

_Command = TypeVar("_Command", bound=Callable[..., Any])
_KEY_BYTES = 32


def store_options(command: _Command) -> _Command:
    """``--store`` and ``--store-key``."""
    for option in (
        click.option(
            "--store-key",
            type=FILE,
            metavar="FILE",
            help="32 bytes, or 64 hex digits, under which prefixes are named. Default: the store's own.",
        ),
        click.option(
            "--store",
            "url",
            required=True,
            envvar="KVPACK_STORE",
            metavar="URL",
            help="The store: a folder, s3://bucket/prefix, https://…, tiered:FOLDER,URL. Default: KVPACK_STORE.",
        ),
    ):
        command = option(command)
    return command


def open_store(
    url: str,
    key_file: Path | None,
    *,
    trust: Path | None = None,
    allow_unsigned: bool = False,
    sign: Sequence[SigningKey] = (),
    create: bool = False,
    reads: bool = False,
) -> Store:
    """The store at ``url``; ``reads`` says that packs will be read, whose signers then matter.

    A folder of one's own vouches for its packs where no ``--trust`` is given; any other store does not. Raises
    UsageError ``untrusted-store``, what the key file is refused for, and what opening raises.
    """
    local = url.startswith("file:") or "/" in url.partition(":")[0] or ":" not in url
    options: dict[str, Any] = {"create": create}
    if key_file is not None:
        options["key"] = _read_key(key_file)
    if sign:
        options["sign"] = signer_of(sign)
    if trust is not None or allow_unsigned:
        options["check"] = check_factory(policy_of(trust), allow_unsigned=allow_unsigned)
    elif reads and not local:
        raise UsageError(
            "untrusted-store",
            f"whose packs of {url} shall be believed?",
            field="trust",
            hint="give --trust FILE, or --allow-unsigned",
        )
    return PrefixStore.open(url, **options)


def _read_key(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(
            "no-such-key",
            f"there is no key file {path}",
            field="store-key",
            found=str(path),
            hint=f"make one: head -c {_KEY_BYTES} /dev/urandom > {path}",
        ) from None
    except OSError as error:
        raise ResourceError("unreadable", f"the key file {path}: {error.strerror}", found=str(path)) from None
    text = content.strip()
    if len(content) != _KEY_BYTES and re.fullmatch(rb"[0-9a-fA-F]{64}", text):
        return bytes.fromhex(text.decode())
    if len(content) != _KEY_BYTES:
        raise UsageError(
            "bad-store-key",
            f"{path} holds no store key",
            field="store-key",
            expected=f"{_KEY_BYTES} bytes, or {2 * _KEY_BYTES} hex digits",
            found=f"{len(content)} bytes",
        )
    return content


def resolve(store: Store, name: str) -> Entry:
    """The entry whose pack id begins with the hex digits ``name``.

    Raises UsageError ``bad-pack-id``, StoreError ``no-such-pack``, ``ambiguous-pack``.
    """
    if not re.fullmatch(r"[0-9a-fA-F]{4,64}", name):
        raise UsageError(
            "bad-pack-id", f"{name!r} is no pack id", expected="at least 4 hex digits", found=name, hint="see store ls"
        )
    if len(name) == 64:
        return store.entry(bytes.fromhex(name))
    found = [entry for entry in store.ls() if entry.name.startswith(name.lower())]
    if not found:
        raise StoreError("no-such-pack", "the store has no such pack", found=name, hint="see store ls")
    if len(found) > 1:
        raise StoreError("ambiguous-pack", f"{len(found)} packs begin with {name}", found=name, hint="give more digits")
    return found[0]
