"""The files of a local store: immutable objects, private temporaries, leases, quarantine.

Every name is checked before it becomes a path, links are not followed, and a lease is a lock that the kernel drops
when its holder dies. An error of ``fsync`` is final: the pages are gone, and trying again would only say that
everything is well.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpack.errors import StoreError, UsageError

__all__ = [
    "FOLDERS",
    "PIN",
    "RECORD",
    "ObjectFolder",
    "Temporary",
    "copy_bytes",
    "pack_name",
    "parse_name",
    "require_local",
    "store_error",
]

RECORD: Final = ".record"
PIN: Final = ".pin"
_NAME: Final = re.compile(r"[0-9a-f]{64}")
FOLDERS: Final = ("objects", "tmp", "leases", "quarantine")

_NETWORK_FILE_SYSTEMS: Final = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x01021997: "9P",
    0x00C36400: "Ceph",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x65735546: "FUSE",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x73757245: "Coda",
    0x564C: "NCP",
    0xAAD7AAEA: "PanFS",
    0x19830326: "BeeGFS",
}


def file_system_magic(path: Path) -> int | None:
    """The type of the file system under ``path`` as statfs(2) gives it; None where that cannot be asked."""
    if not sys.platform.startswith("linux"):
        return None
    buffer = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), buffer) != 0:
        return None
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF


def require_local(path: Path) -> None:
    """Refuse a network file system (StoreError ``network-file-system``): its locks and syncs promise less."""
    name = _NETWORK_FILE_SYSTEMS.get(file_system_magic(path) or 0)
    if name is not None:
        raise StoreError(
            "network-file-system",
            f"{path} lies on a network file system ({name}), whose locks a store cannot rely on",
            found=name,
            hint="use a local disk, or ask for it: allow_network=True",
        )


def store_error(error: OSError, what: str) -> StoreError:
    """An operating system's refusal as a StoreError."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    code = "disk-full" if full else "read-only" if error.errno == errno.EROFS else "io-error"
    return StoreError(code, f"{what}: {error.strerror or error}", found=errno.errorcode.get(error.errno or 0))


def pack_name(pack_id: bytes) -> str:
    """The file name of a pack; raises UsageError ``bad-pack-id`` unless it is 32 bytes."""
    if not isinstance(pack_id, bytes) or len(pack_id) != 32:
        raise UsageError("bad-pack-id", "a pack id has 32 bytes", expected="32 bytes", found=repr(pack_id)[:80])
    return pack_id.hex()


def parse_name(name: str) -> bytes:
    """A pack id from its hex form; raises UsageError ``bad-pack-id`` for everything else (paths among it)."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            "bad-pack-id", "a pack id is 64 lower-case hex digits", expected="64 hex digits", found=repr(name)[:80]
        )
    return bytes.fromhex(name)


@dataclass
class Temporary:
    """A private file of a writer that is alive as long as its lock is held."""

    path: Path
    descriptor: int

    def close(self) -> None:
        """Remove the file and give the lock back."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        os.close(self.descriptor)


class ObjectFolder:
    """The folder of a store. ``durable`` syncs what is published; without it a power loss may lose packs, not tear
    them: whatever cannot be verified is a miss."""

    def __init__(self, root: Path, *, durable: bool) -> None:
        """Make the folders where they are missing; raises StoreError."""
        self.root = root
        self.durable = durable
        try:
            for name in FOLDERS:
                (root / name).mkdir(mode=0o700, exist_ok=True)
        except FileExistsError as error:
            raise StoreError("foreign-file", f"{error.filename} is not a folder", found=str(error.filename)) from None
        except OSError as error:
            raise store_error(error, str(root)) from None
        for name in FOLDERS:
            self._require_folder(root / name)

    def _require_folder(self, path: Path) -> None:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise StoreError("symlink", f"{path} is not a real folder", found=str(path), hint="remove it")

    def path(self, pack_id: bytes, suffix: str = "") -> Path:
        """Where a pack (or its record, its pin) lies."""
        name = pack_name(pack_id)
        return self.root / "objects" / name[:2] / (name + suffix)

    def _shelf(self, pack_id: bytes) -> Path:
        folder = self.path(pack_id).parent
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            self._require_folder(folder)
        else:
            self.sync_folder(folder.parent)
        return folder

    def sync_folder(self, folder: Path) -> None:
        """Make the names in ``folder`` durable."""
        if not self.durable:
            return
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def temporary(self, suffix: str) -> Iterator[Temporary]:
        """A new private file under ``tmp/``, locked by its writer, gone in the end."""
        while True:
            path = self.root / "tmp" / (secrets.token_hex(16) + suffix)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if os.fstat(descriptor).st_nlink:  # a collection may have come between the open and the lock
                    break
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        temporary = Temporary(path, descriptor)
        try:
            yield temporary
        finally:
            temporary.close()

    def fill(self, temporary: Temporary, content: bytes) -> None:
        """Write all of ``content``, however little each call writes."""
        view = memoryview(content)
        while view:
            view = view[os.write(temporary.descriptor, view) :]

    def sync(self, temporary: Temporary) -> None:
        """Put the file on disk."""
        if self.durable:
            os.fsync(temporary.descriptor)

    def publish(self, temporary: Temporary, pack_id: bytes, suffix: str = "") -> bool:
        """Give the file its name, never over another one; False if the name is taken. The folder is not synced yet."""
        self._shelf(pack_id)
        try:
            os.link(temporary.path, self.path(pack_id, suffix))
        except FileExistsError:
            return False
        return True

    def replace(self, temporary: Temporary, pack_id: bytes, suffix: str) -> None:
        """Give the file a name that an abandoned one of the same pack has."""
        os.replace(temporary.path, self.path(pack_id, suffix))

    def share(self, temporary: Temporary) -> None:
        """Let readers lease what was published, while nobody can remove it yet."""
        fcntl.flock(temporary.descriptor, fcntl.LOCK_SH)

    def size(self, pack_id: bytes) -> int | None:
        """Bytes of an object that is a regular file, else None."""
        try:
            found = os.lstat(self.path(pack_id))
        except OSError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def lease(self, pack_id: bytes) -> int:
        """Open a pack for reading and lease it; the descriptor holds the lease. Raises OSError.

        A pack that is being removed at this moment is not there any more: FileNotFoundError.
        """
        descriptor = self._open(self.path(pack_id))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BlockingIOError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "the pack is being removed", str(self.path(pack_id)))

    def _open(self, path: Path) -> int:
        self._require_folder(path.parent)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return descriptor

    def claim(self, path: Path) -> int | None:
        """Lock a file for its removal: a descriptor to close afterwards, or None while anybody holds it."""
        try:
            descriptor = self._open(path)
        except (OSError, StoreError):
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor

    def remove(self, pack_id: bytes) -> None:
        """Remove a pack that was claimed: the object first, for a record alone brings nothing back.

        The record stays if a writer has it: then the same pack is just being stored anew.
        """
        for suffix in ("", PIN):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path(pack_id, suffix))
        record = self.path(pack_id, RECORD)
        descriptor = self.claim(record)
        if descriptor is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(record)
            os.close(descriptor)

    def quarantine(self, path: Path) -> bool:
        """Move a damaged file out of the way, whatever it is (a link is moved, not followed); False if it is gone."""
        try:
            os.rename(path, self.root / "quarantine" / f"{path.name}.{secrets.token_hex(4)}")
        except FileNotFoundError:
            return False
        return True

    def read_record(self, pack_id: bytes) -> bytes:
        """The bytes of a record; raises OSError."""
        descriptor = self._open(self.path(pack_id, RECORD))
        with os.fdopen(descriptor, "rb") as file:
            return file.read()

    def pinned(self, pack_id: bytes) -> bool:
        """Whether a pin lies beside the pack."""
        return self.path(pack_id, PIN).exists()

    def set_pin(self, pack_id: bytes, pinned: bool) -> None:
        """Lay a pin beside a pack, or take it away; it outlives the index."""
        path = self.path(pack_id, PIN)
        if pinned:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        self.sync_folder(path.parent)

    def shelves(self) -> Iterator[tuple[Path, list[os.DirEntry[str]]]]:
        """Every folder of objects with its entries."""
        for folder in sorted((self.root / "objects").iterdir()):
            if re.fullmatch("[0-9a-f]{2}", folder.name) and stat.S_ISDIR(os.lstat(folder).st_mode):
                with os.scandir(folder) as entries:
                    yield folder, sorted(entries, key=lambda e: e.name)

    def foreign(self) -> Iterator[str]:
        """Names in the store that are not its own, relative to it; nothing is done to them."""
        index = {f"index.sqlite{new}{suffix}" for new in ("", ".new") for suffix in ("", "-wal", "-shm", "-journal")}
        known = {*FOLDERS, "version", "key", *index}
        yield from (name for name in sorted(os.listdir(self.root)) if name not in known)
        for folder in sorted((self.root / "objects").iterdir()):
            real = stat.S_ISDIR(os.lstat(folder).st_mode)
            if not real or not re.fullmatch("[0-9a-f]{2}", folder.name):
                yield f"objects/{folder.name}"
                continue
            for name in sorted(os.listdir(folder)):
                stem, _, suffix = name.partition(".")
                own = _NAME.fullmatch(stem) and name.startswith(folder.name) and suffix in ("", "record", "pin")
                if not own:
                    yield f"objects/{folder.name}/{name}"

    @contextlib.contextmanager
    def exclusive(self, name: str) -> Iterator[None]:
        """Hold the lock ``leases/<name>``, which other processes wait for."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self.root / "leases" / name, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def dead_temporaries(self, claimed: Callable[[Path, int], None]) -> None:
        """Call ``claimed(path, descriptor)`` for every file of a writer that is no more."""
        for name in sorted(os.listdir(self.root / "tmp")):
            path = self.root / "tmp" / name
            descriptor = self.claim(path)
            if descriptor is not None:
                try:
                    claimed(path, descriptor)
                finally:
                    os.close(descriptor)


def copy_bytes(source: int, target: int) -> None:
    """Copy an open file from its beginning into another, however little each call writes."""
    at = 0
    while block := os.pread(source, 1 << 20, at):
        view = memoryview(block)
        while view:
            view = view[os.write(target, view) :]
        at += len(block)
