"""``kvpack install --engine host``: a plain live cache, where its rows lie, and what comes out of it again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from kvpack_cli.synthetic import synthetic_cuts

import kvpack
from kvpack.model.geometry import Geometry
from tests import synthetic
from tests.cli.commands import Here
from tests.conftest import ROOT

SMALL = ROOT / "fixtures" / "geometries" / "small.json"
KV = {"num_kv_heads": 1, "head_dim": 4, "encoding": "bf16"}
RING = {"layers": [{"kind": "sliding", "window": 8, **KV}]}


@pytest.fixture
def made(kvpack_here: Here, tmp_path: Path) -> Any:
    """Run ``synth``: ``made("a.kvpack", 100)``; the state id."""

    def run(name: str, position: int, *arguments: object, geometry: object = None) -> str:
        path = SMALL
        if geometry is not None:
            path = tmp_path / "geometry.json"
            path.write_text(json.dumps(geometry))
        facts = kvpack_here.good(
            "synth", "--geometry", path, "--position", position, *arguments, "-o", tmp_path / name, "--force", "--json"
        ).json
        return str(facts["state_id"])

    return run


@pytest.fixture
def host(kvpack_here: Here, tmp_path: Path) -> Any:
    """Run ``install --engine host`` for a pack in the folder."""

    def run(name: str, *arguments: object) -> Any:
        return kvpack_here("install", tmp_path / name, "--engine", "host", "--allow-unsigned", *arguments, "--json")

    return run


def good(said: Any) -> Any:
    assert (said.status, said.err) == (0, ""), said
    return said.json


def test_what_it_reports(made: Any, host: Any) -> None:
    made("a.kvpack", 100)
    facts = good(host("a.kvpack"))
    assert set(facts) == {
        "pack", "pack_id", "signatures", "engine", "identity", "tensor_parallel", "position", "capacity",
        "cache_bytes", "claim", "lowered", "notes", "draft_position", "tokens", "appended", "dropped", "layers",
        "seconds",
    }  # fmt: skip
    assert (facts["engine"], facts["identity"]) == ("host", "taken from the pack")
    assert facts["notes"][0].startswith("identity: taken from the pack")
    assert (facts["position"], facts["draft_position"], facts["tokens"], facts["capacity"]) == (100, 100, 100, 100)
    places = [
        (f"{e['scope']}.{e['layer']}", e["law"], e["capacity"], e["origin_logical"], e["origin_physical"],
         e["next_slot"])
        for e in facts["layers"]
    ]  # fmt: skip
    assert places == [
        ("layer.0", "linear", 100, 0, 0, 100),
        ("layer.1", "modulo", 32, 68, 4, 4),
        ("layer.2", "pinned", 28, 76, 4, 4),
        ("layer.3", "linear", 100, 0, 0, 100),
        ("layer.4", "linear", 100, 0, 0, 100),
        ("layer.5", "linear", 100, 0, 0, 100),
        ("layer.6", "none", 0, None, None, None),
        ("layer.7", "none", 0, None, None, None),
        ("draft.0", "linear", 100, 0, 0, 100),
    ]
    assert sum(plane["bytes"] for entry in facts["layers"] for plane in entry["planes"]) == facts["cache_bytes"]


def test_digests_are_of_the_physical_bytes(made: Any, host: Any) -> None:
    made("a.kvpack", 29, geometry=RING)
    ((entry,),) = [good(host("a.kvpack", "--capacity", 16))["layers"]]
    geometry = Geometry((synthetic.sliding(8, 1, 4),))
    (cut,) = synthetic_cuts(geometry, [29], 0, "m")
    for plane in entry["planes"]:
        key = next(key for key in cut.specs if key.role == plane["role"])
        content = bytearray(16 * 8)
        for row in range(21, 29):
            content[row % 16 * 8 : row % 16 * 8 + 8] = cut.rows(key, row, row + 1)
        assert plane == {"role": key.role, "bytes": 128, "blake3": blake3(content).hexdigest()}


def test_a_ring_at_its_own_capacity(made: Any, host: Any) -> None:
    """A ring of 12 rows and window 8, at 29: into one of 16 the next slot is 13, and one of 6 is refused."""
    made("a.kvpack", 29, geometry=RING)
    (entry,) = good(host("a.kvpack", "--capacity", 16))["layers"]
    assert (entry["origin_logical"], entry["origin_physical"], entry["next_slot"]) == (21, 5, 13)
    (entry,) = good(host("a.kvpack", "--ring", 12))["layers"]
    assert (entry["capacity"], entry["origin_physical"], entry["next_slot"]) == (12, 9, 5)
    error = host("a.kvpack", "--capacity", 6).refused(14, "ring-too-small")
    assert (error["layer"], error["found"]) == (0, 6)


def test_what_is_captured_again_is_the_same_state(made: Any, host: Any, tmp_path: Path) -> None:
    state = made("a.kvpack", 100)
    facts = good(host("a.kvpack", "--ring", 40, "--capacity", 128, "--recapture", tmp_path / "b.kvpack"))
    assert (facts["recaptured"]["state_id"], facts["recaptured"]["same_state"]) == (state, True)
    kvpack.verify(tmp_path / "b.kvpack", allow_unsigned=True).require()
    # It knows its seed, and can go on.
    assert good(host("b.kvpack", "--append", 3))["position"] == 103


@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 64), (1, 3), (30, 2), (60, 40), (63, 200), (97, 3)])
def test_appending_gives_what_synth_gives(made: Any, host: Any, tmp_path: Path, start: int, count: int) -> None:
    made("a.kvpack", start, "--seed", 9)
    wanted = made("b.kvpack", start + count, "--seed", 9)
    facts = good(host("a.kvpack", "--append", count, "--recapture", tmp_path / "c.kvpack"))
    assert (facts["position"], facts["draft_position"], facts["appended"]) == (start + count, start + count, count)
    assert (facts["recaptured"]["state_id"], facts["recaptured"]["same_state"]) == (wanted, None)
    # The control: another seed's rows are another state.
    assert made("b.kvpack", start + count, "--seed", 8) != wanted


def test_appends_larger_than_a_chunk(made: Any, host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpack_cli.host_install._CHUNK_BYTES", 4096)
    made("a.kvpack", 10)
    wanted = made("b.kvpack", 110)
    facts = good(host("a.kvpack", "--append", 100, "--recapture", tmp_path / "c.kvpack"))
    assert facts["recaptured"]["state_id"] == wanted


def test_at_a_cut_and_between_cuts(made: Any, host: Any) -> None:
    made("a.kvpack", 100, "--cuts", "40,70")
    facts = good(host("a.kvpack", "--at", 70))
    assert (facts["position"], facts["claim"], facts["draft_position"]) == (70, "BITWISE", 70)
    host("a.kvpack", "--at", 71).refused(14, "draft-away-from-cut")
    host("a.kvpack", "--at", 101).refused(14, "position-out-of-range")
    made("b.kvpack", 100, geometry={"layers": [{"kind": "full", **KV}]})
    facts = good(host("b.kvpack", "--at", 71, "--append", 4))
    assert (facts["position"], facts["claim"], facts["tokens"]) == (75, "COMPATIBLE", 75)


def test_a_delta_with_its_parents(made: Any, host: Any, tmp_path: Path) -> None:
    made("p.kvpack", 40)
    state = made("whole.kvpack", 70)
    with (
        kvpack.open_pack(tmp_path / "p.kvpack", allow_unsigned=True) as parent,
        kvpack.open_pack(tmp_path / "whole.kvpack", allow_unsigned=True) as whole,
    ):
        kvpack.save(whole.cut(), tmp_path / "d.kvpack", parent=parent.cut())
    host("d.kvpack").refused(14, "parent-missing")
    (tmp_path / "whole.kvpack").unlink()
    facts = good(host("d.kvpack", "--parents", tmp_path, "--append", 2, "--recapture", tmp_path / "e.kvpack"))
    assert facts["recaptured"]["state_id"] == made("f.kvpack", 72)
    again = good(host("d.kvpack", "--parents", tmp_path, "--at", 40, "--recapture", tmp_path / "g.kvpack"))
    assert (again["position"], again["recaptured"]["same_state"]) == (40, True)
    assert state != again["recaptured"]["state_id"]


def test_a_window_less_one_goes_into_a_chronological_plane(make_pack: Any, host: Any) -> None:
    """What a dynamic cache keeps is a row less than a rotating ring needs."""
    make_pack()
    full, sliding = good(host("a.kvpack"))["layers"]
    assert (sliding["law"], sliding["capacity"], sliding["origin_logical"]) == ("chronological", 7, 33)
    assert full["law"] == "linear"


def test_the_dry_run(made: Any, host: Any, kvpack_here: Here, tmp_path: Path) -> None:
    made("a.kvpack", 100)
    facts = good(host("a.kvpack", "--dry-run"))
    assert (facts["fits"], facts["refusals"], "layers" in facts) == (True, [], False)
    said = host("a.kvpack", "--dry-run", "--capacity", 50)
    said.refused(14, "capacity-too-small")
    assert said.json["fits"] is False
    text = kvpack_here("install", tmp_path / "a.kvpack", "--engine", "host", "--allow-unsigned", "--dry-run")
    assert "It fits at 100" in text.out


def test_the_geometry_is_held_to_the_pack(made: Any, host: Any, tmp_path: Path) -> None:
    made("a.kvpack", 29, geometry=RING)
    good(host("a.kvpack", "--geometry", tmp_path / "geometry.json"))
    other = {"layers": [{"kind": "sliding", "window": 8, **KV, "num_kv_heads": 2, "head_dim": 2}]}
    (tmp_path / "geometry.json").write_text(json.dumps(other))
    error = host("a.kvpack", "--geometry", tmp_path / "geometry.json").refused(14, "geometry-differs")
    assert (error["plane"], error["field"], error["expected"], error["found"]) == (
        "layer.0.k", "row_shape", "1x4", "2x2",
    )  # fmt: skip


def test_what_it_refuses(made: Any, host: Any, make_pack: Any, kvpack_here: Here, tmp_path: Path) -> None:
    made("s.kvpack", 100)
    make_pack()
    host("a.kvpack", "--append", 5).refused(2, "no-synth-seed")
    host("s.kvpack", "--recapture", tmp_path / "a.kvpack").refused(2, "output-exists")
    host("s.kvpack", "--geometry", tmp_path / "missing").refused(2, "no-such-file")
    for arguments in (("--model", "m"), ("--prove",), ("--max-new-tokens", 3), ("--prompt-file", "p")):
        assert "host" in host("s.kvpack", *arguments).refused(2, "usage")["message"]
    for arguments in (("--append", 3), ("--geometry", SMALL), ("--ring", 9), ("--recapture", "x"), ("--force",)):
        said = kvpack_here("install", tmp_path / "s.kvpack", "--model", "m", "--allow-unsigned", *arguments, "--json")
        assert "--engine host" in said.refused(2, "usage")["message"]
    kvpack_here("install", tmp_path / "s.kvpack", "--engine", "host", "--json").refused(12, "unsigned")


HEADS = {
    "layers": [
        {"kind": "full", "num_kv_heads": 4, "head_dim": 8, "encoding": "bf16"},
        {"kind": "sliding", "window": 8, "num_kv_heads": 4, "head_dim": 8, "encoding": "bf16"},
        {"kind": "recurrent", "conv": {"shape": [6, 3], "encoding": "f32"}},
    ]
}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [7, 200])
def test_over_ranks_the_state_is_the_same(made: Any, host: Any, tmp_path: Path, ranks: int, count: int) -> None:
    made("a.kvpack", 40, geometry=HEADS)
    wanted = made("b.kvpack", 40 + count, geometry=HEADS)
    facts = good(
        host(
            "a.kvpack", "--tensor-parallel", ranks, "--append", count, "--recapture", tmp_path / "c.kvpack",
            *(("--replicate-heads",) if ranks > 4 else ()),
        )
    )  # fmt: skip
    assert (facts["tensor_parallel"], facts["position"]) == (ranks, 40 + count)
    assert facts["recaptured"]["state_id"] == wanted
    full, sliding, states = facts["layers"]
    assert [(plane["role"], plane["rank"]) for plane in full["planes"]] == [
        (role, rank) for rank in range(ranks) for role in "kv"
    ]
    assert sliding["capacity"] == 8 + min(count, 64)
    assert sliding["next_slot"] == (40 + count) % sliding["capacity"]
    assert len({plane["blake3"] for plane in states["planes"]}) == 1
    assert len({plane["blake3"] for plane in full["planes"]}) == 2 * min(ranks, 4)


def test_ranks_that_do_not_fit(made: Any, host: Any) -> None:
    made("a.kvpack", 40, geometry=HEADS)
    for ranks, code in ((3, "ranks-do-not-divide"), (8, "head-split")):
        assert host("a.kvpack", "--tensor-parallel", ranks).refused(14, code)["layer"] == 0
    host("a.kvpack", "--replicate-heads").refused(2, "usage")
    host("a.kvpack", "--tensor-parallel", 2, "--append", 5, "--ring", 8).refused(18, "lapped")
    made("a.kvpack", 40)
    host("a.kvpack", "--tensor-parallel", 2).refused(14, "ranked-draft")


def test_for_people(made: Any, kvpack_here: Here, tmp_path: Path) -> None:
    made("a.kvpack", 100)
    said = kvpack_here.good(
        "install", tmp_path / "a.kvpack", "--engine", "host", "--allow-unsigned", "--append", 5,
        "--recapture", tmp_path / "b.kvpack",
    )  # fmt: skip
    for words in ("105 tokens, 5 of them appended", "sliding 24+4", "shared of 0", "none of its own", "taken from"):
        assert words in said.out
