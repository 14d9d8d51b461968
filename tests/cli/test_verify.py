"""``kvpack verify``: every byte, every kind of damage, and who signed."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import kvpack
from kvpack.pack.preamble import MANIFEST_OFFSET, PREAMBLE_BYTES, Limits, Preamble, front_hash
from tests.cli.commands import Here
from tests.cli.conftest import SEVERAL_TILES, KeyFiles


def flip(path: Path, offset: int) -> Path:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
    return path


def test_a_good_pack(kvpack_here: Here, make_pack: Callable[..., Path], keys: tuple[KeyFiles, ...]) -> None:
    pack = make_pack(SEVERAL_TILES, 2000, sign=keys[0].key)
    said = kvpack_here.good("verify", pack, "--trust", keys[0].public)
    assert "Every byte is what was written." in said.out
    assert "0 bad" in said.out
    facts = kvpack_here.good("verify", pack, "--trust", keys[0].public, "--json").json
    front = kvpack.inspect(pack)
    assert set(facts) == {
        "pack", "pack_id", "file_bytes", "raw_bytes", "tiles", "bad_tiles", "signatures", "seconds",
    }  # fmt: skip
    assert (facts["tiles"], facts["bad_tiles"]) == (len(front.records), [])
    assert facts["pack_id"] == front.pack_id.hex()
    assert facts["signatures"]["trusted"] is True


def test_bad_tiles_are_named(kvpack_here: Here, make_pack: Callable[..., Path]) -> None:
    pack = make_pack(SEVERAL_TILES, 2000)
    records = kvpack.inspect(pack).records
    bad = [records[3], records[5]]
    for record in bad:
        flip(pack, record.offset)
    said = kvpack_here("verify", pack, "--allow-unsigned")
    assert said.status == 11
    assert f"{len(records)} checked, 2 bad" in said.out
    assert "Every byte" not in said.out
    planes = [str(kvpack.inspect(pack).manifest.planes[record.tile.plane].spec.key) for record in bad]
    for plane, record in zip(planes, bad, strict=True):
        assert f"bad  {plane} rows [{record.tile.first}, {record.tile.end})" in said.out
    assert said.err.startswith(f"kvpack: {planes[0]} rows [{bad[0].tile.first}, {bad[0].tile.end})")
    error = kvpack_here("verify", pack, "--allow-unsigned", "--json")
    assert error.refused(11, "stored-hash")["plane"] == planes[0]
    assert [tile["plane"] for tile in error.json["bad_tiles"]] == planes
    assert error.json["bad_tiles"][1]["rows"] == [bad[1].tile.first, bad[1].tile.end]


def test_who_signed_decides(kvpack_here: Here, make_pack: Callable[..., Path], keys: tuple[KeyFiles, ...]) -> None:
    signer, other = keys
    unsigned, signed = make_pack(name="u.kvpack"), make_pack(sign=signer.key)
    kvpack_here("verify", unsigned, "--json").refused(12, "unsigned")
    kvpack_here("verify", unsigned, "--trust", signer.public, "--json").refused(12, "unsigned")
    kvpack_here("verify", signed, "--json").refused(12, "untrusted-signer")
    kvpack_here("verify", signed, "--trust", other.public, "--json").refused(12, "untrusted-signer")
    kvpack_here("verify", signed, "--trust", signer.private, "--json").refused(12, "private-key-given")
    kvpack_here("verify", signed, "--trust", "no-such.pub", "--json").refused(2, "missing-file")
    kvpack_here.good("verify", unsigned, "--allow-unsigned")
    kvpack_here.good("verify", signed, "--allow-unsigned")
    expired = make_pack(name="e.kvpack", sign=signer.key, expires=1_700_000_001)
    kvpack_here("verify", expired, "--trust", signer.public, "--allow-unsigned", "--json").refused(12, "expired")


def test_a_signature_that_does_not_belong_is_never_accepted(
    kvpack_here: Here, make_pack: Callable[..., Path], keys: tuple[KeyFiles, ...]
) -> None:
    pack = make_pack(sign=keys[0].key)
    content = bytearray(pack.read_bytes())
    content[PREAMBLE_BYTES + 80] ^= 1
    end = MANIFEST_OFFSET + Preamble.parse(bytes(content[:PREAMBLE_BYTES]), len(content), Limits()).manifest_length
    region = bytes(content[PREAMBLE_BYTES:MANIFEST_OFFSET])
    content[96:128] = front_hash(bytes(content[:PREAMBLE_BYTES]), region, bytes(content[MANIFEST_OFFSET:end]))
    pack.write_bytes(content)
    for more in ((), ("--allow-unsigned",)):
        kvpack_here("verify", pack, "--trust", keys[0].public, *more, "--json").refused(12, "bad-signature")


def _foreign(folder: Path) -> dict[str, tuple[Path, str]]:
    files: dict[str, tuple[bytes, str]] = {
        "empty": (b"", "empty-file"),
        "text": (b"# a README\n" * 1000, "bad-magic"),
        "gguf": (b"GGUF" + bytes(8192), "bad-magic"),
        "llama.cpp": (b"qsgg" + bytes(8192), "bad-magic"),
        "other kvpack": (b"KVPKP1" + bytes(8192), "foreign-kvpack"),
        "another kvpack": (b"IOKVPK1" + bytes(8192), "foreign-kvpack"),
    }
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("x", bytes(8192))
    files["zip"] = archive.getvalue(), "bad-magic"
    save_file({"k": np.zeros((64, 64), np.float32)}, folder / "t.safetensors")
    files["safetensors"] = (folder / "t.safetensors").read_bytes(), "bad-magic"
    made_files = {}
    for name, (content, code) in files.items():
        path = folder / name.replace(" ", "-")
        path.write_bytes(content)
        made_files[name] = path, code
    return made_files


FOREIGN = ("empty", "text", "gguf", "llama.cpp", "other kvpack", "another kvpack", "zip", "safetensors")


@pytest.mark.parametrize("command", ["inspect", "verify", "install"])
@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_pack(kvpack_here: Here, tmp_path: Path, command: str, name: str) -> None:
    path, code = _foreign(tmp_path)[name]
    before = path.read_bytes()
    more = ("--model", tmp_path / "model") if command == "install" else ()
    error = kvpack_here(command, path, *more, "--json").refused(10, code)
    assert error["family"] == "Format"
    assert path.read_bytes() == before


@pytest.mark.parametrize("command", ["inspect", "verify", "install"])
def test_what_is_no_file(kvpack_here: Here, tmp_path: Path, command: str) -> None:
    more = ("--model", tmp_path / "model") if command == "install" else ()
    kvpack_here(command, tmp_path / "missing.kvpack", *more, "--json").refused(2, "no-such-file")
    kvpack_here(command, tmp_path, *more, "--json").refused(2, "not-a-file")


@pytest.mark.parametrize("command", ["inspect", "verify", "install"])
@pytest.mark.parametrize(
    ("damage", "status", "code"),
    [
        ("truncated front", 10, None),
        ("truncated payload", 10, None),
        ("one byte short", 10, None),
        ("over-long", 10, None),
        ("preamble bit", 10, None),
        ("signature bit", 11, "front-hash"),
        ("manifest bit", 11, "front-hash"),
        ("index bit", 11, None),
    ],
)
def test_a_damaged_front(
    kvpack_here: Here, make_pack: Callable[..., Path], command: str, damage: str, status: int, code: str | None
) -> None:
    pack = make_pack(SEVERAL_TILES, 600)
    content = pack.read_bytes()
    index = content.index(kvpack.inspect(pack).records[0].stored_hash)
    cut = {"truncated front": 5000, "truncated payload": len(content) - 8192, "one byte short": len(content) - 1}
    bit = {"preamble bit": 0, "signature bit": 200, "manifest bit": 4200, "index bit": index}
    if damage in bit:
        flip(pack, bit[damage])
    else:
        pack.write_bytes(content[: cut[damage]] if damage in cut else content + bytes(4096))
    more = {
        "inspect": (),
        "verify": ("--allow-unsigned",),
        "install": ("--allow-unsigned", "--model", pack.parent / "model"),
    }[command]
    said = kvpack_here(command, pack, *more, "--json")
    said.refused(status, code or said.json["error"]["code"])
