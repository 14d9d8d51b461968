"""``push`` and ``pull``: a session goes to another machine through a bucket, resumable, its front first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import synthetic
from tests.cli.commands import Here, in_a_process
from tests.conftest import pinned_environment
from tests.contract.seaweed import Seaweed

GEOMETRIES = Path(__file__).resolve().parents[2] / "fixtures" / "geometries"
TEXT = "It was the best of times, it was the worst of times"


@pytest.fixture
def credentials(server: Seaweed, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the command reads from its environment."""
    names = {
        "AWS_ACCESS_KEY_ID": server.key,
        "AWS_SECRET_ACCESS_KEY": server.secret,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
    }
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    return names


def test_a_session_moves_between_machines_that_differ_in_threads_and_instruction_set(
    credentials: dict[str, str],
    url: str,
    tiny_llama: Path,
    tmp_path: Path,
) -> None:
    (tmp_path / "prompt.txt").write_text(TEXT)
    there = pinned_environment(1) | credentials
    here = pinned_environment(2) | credentials | {"ATEN_CPU_CAPABILITY": "default"}
    made = in_a_process(
        "capture", "--model", tiny_llama, "--prompt-file", tmp_path / "prompt.txt", "-o", tmp_path / "a.kvpack",
        "--json", cwd=tmp_path, environment=there,
    )  # fmt: skip
    assert made.status == 0, made.err
    pushed = in_a_process("push", tmp_path / "a.kvpack", url, "--json", cwd=tmp_path, environment=there)
    assert (pushed.status, pushed.err) == (0, "")
    pulled = in_a_process(
        "pull", pushed.json["name"], "-o", tmp_path / "b.kvpack", "--json", cwd=tmp_path, environment=here
    )
    assert (pulled.status, pulled.err) == (0, "")
    assert (tmp_path / "b.kvpack").read_bytes() == (tmp_path / "a.kvpack").read_bytes()
    found = in_a_process(
        "install", tmp_path / "b.kvpack", "--model", tiny_llama, "--allow-unsigned", "--max-new-tokens", 4, "--json",
        cwd=tmp_path, environment=here,
    )  # fmt: skip
    assert found.status == 0, found.err
    assert (found.json["claim"], found.json["lowered"]) == ("COMPATIBLE", ["isa", "threads"])
    assert found.json["reused"] == len(TEXT)


@pytest.mark.usefixtures("credentials")
def test_what_they_say(kvpack_here: Here, url: str, make_pack: Callable[..., Path], tmp_path: Path) -> None:
    pack = make_pack(position=40)
    pushed = kvpack_here.good("push", pack, url, "--json").json
    assert set(pushed) == {"pack", "pack_id", "store", "name", "file_bytes", "new", "parent", "seconds"}
    assert (pushed["new"], pushed["name"]) == (True, f"{url}#{pushed['pack_id']}")
    assert not kvpack_here.good("push", pack, url, "--json").json["new"]
    short = f"{url}#{pushed['pack_id'][:8]}"
    assert pushed["pack_id"] in kvpack_here.good("pull", short, "--dry-run").out
    assert list(tmp_path.glob("*")) == [pack]
    pulled = kvpack_here.good("pull", short, "-o", tmp_path / "b", "--json").json
    assert (pulled["pack_id"], pulled["resumed_bytes"], pulled["fits"]) == (pushed["pack_id"], 0, None)
    assert (tmp_path / "b").read_bytes() == pack.read_bytes()


@pytest.mark.usefixtures("credentials")
def test_a_pack_that_does_not_fit_is_refused_from_its_front(
    kvpack_here: Here,
    url: str,
    tmp_path: Path,
) -> None:
    small = GEOMETRIES / "small.json"
    kvpack_here.good("synth", "--geometry", small, "--position", 100, "-o", tmp_path / "a")
    name = kvpack_here.good("push", tmp_path / "a", url, "--json").json["name"]
    assert kvpack_here.good("pull", name, "--dry-run", "--geometry", small, "--json").json["fits"] is True
    other = json.loads(small.read_text())
    other["layers"] = other["layers"][:-1]
    (tmp_path / "other.json").write_text(json.dumps(other))
    for how in (["--dry-run"], ["-o", tmp_path / "b"]):
        said = kvpack_here("pull", name, *how, "--geometry", tmp_path / "other.json", "--json")
        said.refused(14, "geometry-differs")
        assert (said.json["fits"], bool(said.json["refusals"])) == (False, True)
    assert not (tmp_path / "b").exists()


@pytest.mark.usefixtures("credentials")
def test_whom_to_trust_is_decided_by_the_front(
    kvpack_here: Here,
    url: str,
    make_pack: Callable[..., Path],
    keys: Any,
    tmp_path: Path,
) -> None:
    name = kvpack_here.good("push", make_pack(sign=keys[0].key), url, "--json").json["name"]
    kvpack_here("pull", name, "-o", tmp_path / "b", "--trust", keys[1].public, "--json").refused(12, "untrusted-signer")
    assert not (tmp_path / "b").exists()
    kvpack_here.good("pull", name, "-o", tmp_path / "b", "--trust", keys[0].public)


def test_through_a_folder(kvpack_here: Here, make_pack: Callable[..., Path], tmp_path: Path) -> None:
    pack = make_pack(synthetic_geometry())
    name = kvpack_here.good("push", pack, f"file:{tmp_path / 'store'}", "--json").json["name"]
    kvpack_here.good("pull", name, "--dry-run")
    kvpack_here.good("pull", name, "-o", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == pack.read_bytes()


def synthetic_geometry() -> Any:
    from kvpack.model.geometry import Geometry

    return Geometry((synthetic.full(),))


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        (["push", "none", "s3://b/p#00"], 2, "bad-url"),
        (["push", "none", "s3://user:secret@b/p"], 16, "bad-url"),
        (["pull", "s3://b/p", "-o", "x"], 2, "bad-url"),
        (["pull", "s3://b/p#../../etc", "-o", "x"], 2, "bad-url"),
        (["pull", "s3://b/p#0123", "-o", "x", "--dry-run"], 2, "usage"),
        (["pull", "https://h/p#0123", "--dry-run"], 2, "bad-pack-id"),
        (["pull", "ftp://h/p#0123", "--dry-run"], 16, "unknown-scheme"),
    ],
)
def test_bad_names(kvpack_here: Here, arguments: list[str], status: int, code: str) -> None:
    said = kvpack_here(*arguments, "--json")
    said.refused(status, code)
    assert "secret" not in said.out + said.err
