"""Prefix stores: packs found by the tokens that led to them, shared by many processes and machines.

``PrefixStore.open(url)`` opens one; what can be asked of it is :class:`~kvpack.store.protocol.Store`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

from kvpack.errors import StoreError
from kvpack.store.deltas import put_turn
from kvpack.store.local import LocalStore
from kvpack.store.prefix import ContentField, ContentKind
from kvpack.store.protocol import (
    Entry,
    EntryCut,
    FsckReport,
    GcReport,
    Hit,
    Stats,
    Store,
    StoredPack,
)

__all__ = [
    "ContentField",
    "ContentKind",
    "Entry",
    "EntryCut",
    "FsckReport",
    "GcReport",
    "Hit",
    "LocalStore",
    "PrefixStore",
    "Stats",
    "Store",
    "StoredPack",
    "put_turn",
]

Opener: TypeAlias = "Callable[..., Store]"


def _open_file(url: str, **options: Any) -> Store:
    path = url.removeprefix("file:")
    if path.startswith("//"):
        host, _, rest = path[2:].partition("/")
        if host not in ("", "localhost"):
            raise StoreError("bad-url", f"{url} names another machine", found=host, hint="write file:/path")
        path = "/" + rest
    if not path or "\x00" in path:
        raise StoreError("bad-url", "a file: URL names a folder", found=repr(url)[:80])
    return LocalStore.open(path, **options)


def _open_remote(url: str, **options: Any) -> Store:
    from kvpack.store.remote import RemoteStore

    return RemoteStore.open_url(url, **options)


def _open_tiered(url: str, **options: Any) -> Store:
    from kvpack.store.tiered import open_tiered

    return open_tiered(url, **options)


class PrefixStore:
    """Opens stores by the scheme of their URL; other kinds of stores add themselves to ``openers``."""

    openers: ClassVar[dict[str, Opener]] = {
        "file": _open_file,
        **dict.fromkeys(("s3", "gs", "az", "http", "https"), _open_remote),
        "tiered": _open_tiered,
    }

    @classmethod
    def open(cls, url: str, **options: Any) -> Store:
        """The store at ``url``. The options are those of the kind of store.

        ``file:/path`` or a bare path: a folder of this machine (:meth:`LocalStore.open`). ``s3://bucket/prefix``: a
        bucket that many machines share; ``gs:`` and ``az:`` go by the same code and are untested; ``http(s):`` the
        same to read only (:meth:`kvpack.store.remote.RemoteStore.open_url`). ``tiered:FOLDER,URL``: a folder in front
        of a bucket (:func:`kvpack.store.tiered.open_tiered`).

        Raises StoreError ``unknown-scheme``, ``missing-extra``, and what opening raises.
        """
        scheme, colon, _ = url.partition(":")
        if not colon or "/" in scheme:
            scheme, url = "file", f"file:{url}"
        known: Mapping[str, Opener] = cls.openers
        if scheme not in known:
            names = ", ".join(f"{name}:" for name in sorted(known))
            raise StoreError("unknown-scheme", f"no store is opened by {scheme}:", expected=names, found=scheme)
        return known[scheme](url, **options)
