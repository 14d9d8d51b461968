"""``kvpack keygen``."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

from kvpack.trust import load_private_key, load_public_key
from tests.cli.commands import Here
from tests.conftest import SmallFileSystem


def test_a_key_pair_with_private_permissions(kvpack_here: Here, tmp_path: Path) -> None:
    key = tmp_path / "me.key"
    facts = kvpack_here.good("keygen", "--out", key, "--json").json
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert facts == {
        "private_key": str(key),
        "public_key": f"{key}.pub",
        "fingerprint": load_private_key(key).public.fingerprint,
        "key_id": load_public_key(f"{key}.pub").key_id.hex(),
    }
    assert "PRIVATE" not in Path(f"{key}.pub").read_text()


def test_for_people_it_says_which_half_is_secret(kvpack_here: Here, tmp_path: Path) -> None:
    said = kvpack_here.good("keygen", "-o", tmp_path / "me.key")
    assert "keep it to yourself" in said.out
    assert "SHA256:" in said.out


def test_existing_keys_stay(kvpack_here: Here, tmp_path: Path) -> None:
    for name in ("me.key", "me.key.pub"):
        for file in tmp_path.iterdir():
            file.unlink()
        (tmp_path / name).write_text("mine")
        kvpack_here("keygen", "-o", tmp_path / "me.key", "--json").refused(2, "output-exists")
        assert [file.read_text() for file in tmp_path.iterdir()] == ["mine"]
    kvpack_here.good("keygen", "-o", tmp_path / "me.key", "--force")


def test_a_folder_that_is_not_there(kvpack_here: Here, tmp_path: Path) -> None:
    kvpack_here("keygen", "-o", tmp_path / "no" / "me.key", "--json").refused(2, "no-such-folder")
    kvpack_here("keygen", "-o", tmp_path, "--json").refused(2, "not-a-file")


def test_a_read_only_disk(kvpack_here: Here, small_file_system: Callable[[int], SmallFileSystem]) -> None:
    disk = small_file_system(64)
    disk.make_read_only()
    kvpack_here("keygen", "-o", disk.path / "me.key", "--json").refused(15, "read-only")
    assert list(disk.path.iterdir()) == []


def test_a_full_disk_leaves_no_half_pair(
    kvpack_here: Here, small_file_system: Callable[[int], SmallFileSystem]
) -> None:
    disk = small_file_system(8)
    (disk.path / "filler").write_bytes(bytes(4096))
    kvpack_here("keygen", "-o", disk.path / "me.key", "--json").refused(15, "disk-full")
    assert [file.name for file in disk.path.iterdir()] == ["filler"]
