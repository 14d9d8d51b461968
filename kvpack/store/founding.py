"""The ground of a local store: its folder, its version, its key."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Final

from kvpack.errors import StoreError
from kvpack.store.objects import FOLDERS, ObjectFolder, require_local, store_error
from kvpack.store.prefix import KEY_BYTES

__all__ = ["found_store"]

_VERSION: Final = b"kvpack-store 1\n"


def found_store(
    root: Path, *, durable: bool, create: bool, allow_network: bool, own_key: bool
) -> tuple[ObjectFolder, bytes]:
    """The folder of a store, made where there is none (if ``create``), and the store's own key (if asked for).

    Raises StoreError ``no-such-store``, ``not-a-store``, ``store-version``, ``network-file-system``, ``bad-key-file``.
    """
    try:
        _require_store(root, create=create)
        if not allow_network:
            require_local(root)
        folder = ObjectFolder(root, durable=durable)
        _require_version(folder)
        return folder, _own_key(folder) if own_key else b""
    except OSError as error:
        raise store_error(error, str(root)) from None


def _require_store(root: Path, *, create: bool) -> None:
    if (root / "version").exists():
        return
    if not create:
        raise StoreError("no-such-store", f"there is no store in {root}", found=str(root))
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    foreign = sorted(set(os.listdir(root)) - {*FOLDERS, "key", "version"})
    if foreign:
        raise StoreError(
            "not-a-store", f"{root} is not a store and is not empty: it has {foreign[0]}", found=foreign[0]
        )


def _require_version(folder: ObjectFolder) -> None:
    found = _settle(folder, "version", _VERSION)
    if found != _VERSION:
        raise StoreError(
            "store-version",
            f"{folder.root} is a store of another version",
            expected=_VERSION.decode().strip(),
            found=repr(found[:40]),
            hint="update kvpack",
        )


def _own_key(folder: ObjectFolder) -> bytes:
    key = _settle(folder, "key", secrets.token_bytes(KEY_BYTES))
    if len(key) != KEY_BYTES:
        raise StoreError("bad-key-file", f"{folder.root / 'key'} does not hold {KEY_BYTES} bytes", found=len(key))
    return key


def _settle(folder: ObjectFolder, name: str, content: bytes) -> bytes:
    """The content of a small file of the store; the first who asks gives it ``content``."""
    path = folder.root / name
    if not path.exists():
        with folder.temporary("." + name) as temporary:
            folder.fill(temporary, content)
            folder.sync(temporary)
            with contextlib.suppress(FileExistsError):
                os.link(temporary.path, path)
            folder.sync_folder(folder.root)
    return path.read_bytes()
