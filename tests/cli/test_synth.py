"""``kvpack synth``: any geometry and size without a model, the same on every machine, in little memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvpack_cli.synthetic import SyntheticRows, appended_rows, seed_of, synthetic_cuts

import kvpack
from kvpack.model.encoding import ENCODINGS
from kvpack.model.geometry import Geometry, PlaneKey, Scope
from kvpack.model.planes import TOKENS, plane_specs
from kvpack.model.ranges import RowSet
from tests import synthetic
from tests.cli.commands import Here, python
from tests.cli.conftest import KeyFiles
from tests.conftest import ROOT

FOLDER = ROOT / "fixtures" / "geometries"
SMALL = FOLDER / "small.json"


@pytest.fixture
def made(kvpack_here: Here, tmp_path: Path) -> Any:
    """Run ``synth`` for the small geometry; the command's JSON."""

    def run(name: str, position: int, *arguments: object, geometry: Path = SMALL) -> Any:
        return kvpack_here.good(
            "synth", "--geometry", geometry, "--position", position, *arguments, "-o", tmp_path / name, "--json"
        ).json

    return run


def test_what_it_reports(made: Any, tmp_path: Path, keys: tuple[KeyFiles, ...]) -> None:
    facts = made("a.kvpack", 100, "--seed", 7, "--codec", "zstd", "--sign", keys[0].private)
    assert set(facts) == {
        "pack", "pack_id", "state_id", "state_ids", "position", "cuts", "seed", "file_bytes", "raw_bytes",
        "stored_bytes", "signed_by", "seconds",
    }  # fmt: skip
    front = kvpack.inspect(tmp_path / "a.kvpack", trust=keys[0].public)
    assert front.verification.trusted
    assert facts["pack_id"] == front.pack_id.hex()
    assert facts["state_id"] == front.manifest.cuts[0].state_id.hex()
    assert (facts["file_bytes"], facts["raw_bytes"]) == ((tmp_path / "a.kvpack").stat().st_size, front.raw_bytes)
    assert seed_of(front.manifest.provenance) == 7
    assert front.manifest.provenance["model"] == "small"
    assert front.manifest.cuts[0].tokens == 100
    assert front.manifest.cuts[0].draft_position == 100
    kvpack.verify(tmp_path / "a.kvpack", allow_unsigned=True).require()


def test_for_people(kvpack_here: Here, tmp_path: Path) -> None:
    said = kvpack_here.good("synth", "--geometry", SMALL, "--position", 10, "-o", tmp_path / "a.kvpack")
    assert "10 tokens of seed 0" in said.out
    assert "nobody (sign with" in said.out


@pytest.mark.parametrize("position", [0, 1, 31, 32, 100])
def test_state_ids_depend_on_seed_and_position_alone(made: Any, position: int) -> None:
    one = made("a.kvpack", position, "--seed", 7)
    assert made("b.kvpack", position, "--seed", 7, "--codec", "raw")["state_id"] == one["state_id"]
    assert made("c.kvpack", position, "--seed", 8)["state_id"] != one["state_id"]
    assert made("d.kvpack", position + 1, "--seed", 7)["state_id"] != one["state_id"]


def test_the_rule_is_what_it_was(made: Any) -> None:
    """Computed once; another value here would make every synthetic pack in the world another session."""
    facts = made("a.kvpack", 200, "--cuts", "50,100")
    assert facts["state_ids"] == {
        "50": "ab19ca28027a878562d9fcaeab4e49e15d61becf2e4546f6b339b3710a1cf014",
        "100": "3336e7719770a512ccedfde26374d2b24a07e80b6a6dca8f4e5a8c4dfa1f5db8",
        "200": "2b7332ae7e7a9615fd1793b8db19a4a31cb8bf40c3b8e2087244a5e3d79c1712",
    }
    assert made("b.kvpack", 100)["state_id"] == facts["state_ids"]["100"]


def test_one_pack_of_several_cuts_is_whole(made: Any, tmp_path: Path) -> None:
    """The last position ends a pool, so the rows that wait for one are those of earlier cuts only."""
    assert made("a.kvpack", 200, "--cuts", "50,101")["cuts"] == [50, 101, 200]
    kvpack.verify(tmp_path / "a.kvpack", allow_unsigned=True).require()
    planes = {str(p.spec.key): p.rows for p in kvpack.inspect(tmp_path / "a.kvpack").manifest.planes}
    assert planes["layer.4.index_tail"] == RowSet.of((48, 50), (100, 101))
    assert planes["layer.1.k"] == RowSet.of((18, 50), (69, 101), (168, 200))
    assert planes["layer.2.k"] == RowSet.of((0, 4), (26, 50), (77, 101), (176, 200))
    for at in (50, 101, 200):
        kvpack.load(tmp_path / "a.kvpack", allow_unsigned=True, at=at)


def test_packs_of_different_positions_agree_on_their_common_rows(made: Any, tmp_path: Path) -> None:
    made("a.kvpack", 60)
    made("b.kvpack", 90)
    short, long = (kvpack.load(tmp_path / name, allow_unsigned=True) for name in ("a.kvpack", "b.kvpack"))
    compared = 0
    for key, rows in short.stored.items():
        if key.role not in ("conv", "ssm"):
            for first, end in rows.intersection(long.stored[key]):
                assert bytes(short.rows(key, first, end)) == bytes(long.rows(key, first, end)), str(key)
                compared += end - first
    assert compared > 60 * 6
    assert long.tokens[:60] == short.tokens
    assert bytes(short.planes[PlaneKey("layer", 6, "ssm")].buffer) != bytes(
        long.planes[PlaneKey("layer", 6, "ssm")].buffer
    )


@pytest.mark.parametrize("name", ["f16", "f32", "f64"])
def test_floats_are_finite_and_near_one(name: str) -> None:
    geometry = Geometry((synthetic.full(2, 16, name),))
    rows = SyntheticRows(3).rows(plane_specs(geometry)[PlaneKey("layer", 0, "k")], 5, 300, 0)
    values = np.frombuffer(rows, {"f16": "<f2", "f32": "<f4", "f64": "<f8"}[name])
    assert np.isfinite(values).all()
    assert 0.125 <= np.abs(values).min() < 0.13
    assert 1.9 < np.abs(values).max() < 2
    assert 0.4 < (values < 0).mean() < 0.6


@pytest.mark.parametrize(("name", "infinite"), [("bf16", 0x7F80), ("f8_e4m3", 0x78), ("f8_e5m2", 0x7C)])
def test_small_floats_are_finite(name: str, infinite: int) -> None:
    geometry = Geometry((synthetic.full(2, 16, name),))
    rows = SyntheticRows(3).rows(plane_specs(geometry)[PlaneKey("layer", 0, "k")], 0, 3000, 0)
    words = np.frombuffer(rows, "<u2" if name == "bf16" else "u1")
    assert (words & infinite != infinite).all()
    assert len(np.unique(words)) == (1024 if name == "bf16" else 64 if name == "f8_e4m3" else 32)


@pytest.mark.parametrize("name", ["q8_0", "q5_1", "q4_0", "iq4_nl"])
def test_scales_of_blocks_are_finite(name: str) -> None:
    geometry = Geometry((synthetic.full(2, 32, name),))
    rows = SyntheticRows(3).rows(plane_specs(geometry)[PlaneKey("layer", 0, "k")], 0, 100, 0)
    blocks = np.frombuffer(rows, np.uint8).reshape(-1, ENCODINGS[name].block_bytes)
    scales = np.ascontiguousarray(blocks[:, :2]).view("<f2")
    assert np.isfinite(scales).all()
    # The control: what is no scale is any byte.
    assert len(np.unique(blocks[:, -1])) > 100


@pytest.mark.parametrize("geometry", [synthetic.EVERY_KIND], ids=["every kind"])
def test_rows_do_not_depend_on_how_they_are_asked_for(geometry: Geometry) -> None:
    """Also within a state, where a piece may begin in the middle of an element."""
    (cut,) = synthetic_cuts(geometry, [40], 5, "m")
    for key, rows in cut.stored.items():
        for first, end in rows:
            whole = bytes(cut.rows(key, first, end))
            size = cut.specs[key].axis_bytes
            for at in range(first, end, 7):
                stop = min(at + 7, end)
                assert bytes(cut.rows(key, at, stop)) == whole[(at - first) * size : (stop - first) * size], str(key)


def test_an_append_brings_what_a_longer_cut_holds() -> None:
    geometry = synthetic.EVERY_KIND
    specs = plane_specs(geometry)
    (longer,) = synthetic_cuts(geometry, [49], 5, "m")
    for scope in Scope.LAYER, Scope.DRAFT:
        for key, content in appended_rows(SyntheticRows(5), specs, geometry, scope, 40, 9).items():
            rows = longer.stored[key].intersection(RowSet.of((40, 49)))
            if specs[key].unit.value == "token" and rows:
                first = rows.ranges[0][0]
                assert bytes(content)[(first - 40) * specs[key].row_bytes :] == bytes(longer.rows(key, first, 49))
            elif specs[key].unit.value == "state":
                assert bytes(content) == bytes(longer.rows(key, 0, specs[key].row_bytes))
    assert SyntheticRows(5).tokens(3, 9) == list(longer.rows(TOKENS, 3, 9).cast("i"))


def test_the_help_shows_a_geometry_that_works(kvpack_here: Here, made: Any, tmp_path: Path) -> None:
    text = kvpack_here.good("synth", "--help").out
    begin = text.index('{"templates"')
    geometry, _ = json.JSONDecoder().raw_decode(text[begin:])
    (tmp_path / "help.json").write_text(json.dumps(geometry))
    assert made("a.kvpack", 5, geometry=tmp_path / "help.json")["position"] == 5
    assert len(kvpack.inspect(tmp_path / "a.kvpack").manifest.geometry.layers) == 55


def test_what_it_refuses(kvpack_here: Here, tmp_path: Path) -> None:
    (tmp_path / "not.json").write_text("{")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "bad.json").write_text(json.dumps({"layers": [{"kind": "full", "heads": 2}]}))
    (tmp_path / "there.kvpack").write_text("mine")

    def refused(status: int, code: str, *arguments: object, geometry: Path = SMALL, out: str = "a.kvpack") -> Any:
        return kvpack_here(
            "synth", "--geometry", geometry, "-o", tmp_path / out, "--position", 100, *arguments, "--json"
        ).refused(status, code)

    assert "README" in refused(2, "bad-geometry", geometry=tmp_path / "not.json")["hint"]
    refused(2, "bad-geometry", geometry=tmp_path / "deep.json")
    assert refused(2, "bad-geometry", geometry=tmp_path / "bad.json")["field"] == "layers[0].num_kv_heads"
    refused(2, "no-such-file", geometry=tmp_path / "missing.json")
    refused(2, "not-a-file", geometry=tmp_path)
    refused(2, "output-exists", out="there.kvpack")
    for cuts in ("0", "50,50", "60,50", "101"):
        assert refused(2, "bad-cuts", "--cuts", cuts)["field"] == "cuts"
    for arguments in (("--cuts", "a"), ("--cuts", ""), ("--cuts", "-5"), ("--position", -1), ("--seed", -1)):
        refused(2, "usage", *arguments)
    refused(2, "usage", "--position", 1 << 31)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.json", "deep.json", "not.json", "there.kvpack"]
    assert kvpack_here(
        "synth", "--geometry", SMALL, "--position", 5, "--cuts", "5", "--force", "-o", tmp_path / "there.kvpack"
    ).status == 0  # fmt: skip


PEAK = """
import resource, sys
from kvpack_cli.main import main
assert main(sys.argv[1:]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_a_large_pack_needs_little_memory(tmp_path: Path) -> None:
    """155 MB of state in at most 48 MiB more than a pack of almost nothing takes."""

    def peak(position: int) -> int:
        process = python(
            PEAK, "synth", "--geometry", FOLDER / "52-layer.json", "--position", position, "--codec", "raw",
            "-o", tmp_path / f"{position}.kvpack", "--json",
        )  # fmt: skip
        facts, kibibytes = process.stdout.splitlines()
        assert json.loads(facts)["position"] == position
        return int(kibibytes)

    little, much = peak(16), peak(5500)
    assert (tmp_path / "5500.kvpack").stat().st_size > 150_000_000
    assert much - little < 48 * 1024
