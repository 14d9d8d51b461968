"""The ground of a remote store: the folder of a handle, the store's version and its key in the bucket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvpack.errors import StoreError
from kvpack.store.bucket import Bucket
from kvpack.store.objects import RECORD, ObjectFolder, Temporary
from kvpack.store.prefix import KEY_BYTES

__all__ = ["RemoteFolder", "require_store", "settled"]

_VERSION: Final = b"kvpack-store 1\n"


class RemoteFolder(ObjectFolder):
    """The private folder of a handle (its index, its temporaries), and the objects in the bucket behind it."""

    def __init__(self, root: Path, publish_pack: Callable[[Path, bytes, bytes], None]) -> None:
        """``publish_pack(path, pack id, record)`` takes a finished pack into the bucket."""
        super().__init__(root, durable=False)
        self._publish_pack = publish_pack
        self._beside: dict[bytes, bytes] = {}
        self.look: Callable[[bytes], None] = lambda pack_id: None
        self.sizes: dict[bytes, int | None] = {}

    def size(self, pack_id: bytes) -> int | None:
        """Bytes of an object, asked once a question; None if it is not there. Raises StoreError."""
        if pack_id not in self.sizes:
            self.look(pack_id)
        return self.sizes.get(pack_id)

    def pinned(self, pack_id: bytes) -> bool:
        """Pins are events, and the index has them."""
        return False

    def publish(self, temporary: Temporary, pack_id: bytes, suffix: str = "") -> bool:
        """The record is kept until its pack comes, and goes with it."""
        if suffix == RECORD:
            self._beside[pack_id] = temporary.path.read_bytes()
        else:
            self._publish_pack(temporary.path, pack_id, self._beside.pop(pack_id))
        return True


def require_store(bucket: Bucket, *, create: bool) -> None:
    """Find the store's version, or write it where nothing is (if ``create``).

    Raises StoreError ``no-such-store``, ``not-a-store``, ``store-version``.
    """
    found = bucket.get("version")
    if found is None:
        if bucket.read_only or not create:
            raise StoreError("no-such-store", f"there is no store in {bucket.url}", found=bucket.url)
        foreign = [entry.name for entry in bucket.list("") if not entry.name.startswith("probe/")]
        # A store that another process is making this moment has its version first.
        if foreign and bucket.get("version") is None:
            raise StoreError("not-a-store", f"{bucket.url} is not a store and is not empty", found=foreign[0])
        settled(bucket, "version", _VERSION)
        found = bucket.get("version")
    if found is None or found[0] != _VERSION:
        raise StoreError(
            "store-version",
            f"{bucket.url} is a store of another version",
            expected=_VERSION.decode().strip(),
            found=repr(found[0][:40]) if found is not None else None,
            hint="update kvpack",
        )


def settled(bucket: Bucket, name: str, content: bytes) -> bytes:
    """The content of a small object; the first who asks gives it ``content``."""
    found = bucket.get(name)
    if found is None and not bucket.read_only:
        bucket.create(name, content)
        found = bucket.get(name)
    if found is None or (name == "key" and len(found[0]) != KEY_BYTES):
        raise StoreError(
            "bad-key-file",
            f"{bucket.url} has no {name} of the right length",
            found=None if found is None else len(found[0]),
        )
    return found[0]
