"""``kvpack inspect``: everything from the front, for people and for programs, without the weight of numpy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import kvpack
from kvpack.model.geometry import Geometry
from kvpack.model.snapshot import Probe
from tests import synthetic
from tests.cli.commands import Here, in_a_process, python
from tests.cli.conftest import SEVERAL_TILES, KeyFiles
from tests.conftest import ROOT

MODULES = """
import sys
from kvpack_cli.main import main
status = main(sys.argv[1:])
heavy = ("numpy", "torch", "transformers", "zstandard", "rich")
print("loaded", status, *(name for name in heavy if name in sys.modules))
"""


def loaded(*arguments: object) -> list[str]:
    process = python(MODULES, *arguments)
    return process.stdout.splitlines()[-1].split()[1:]


def test_the_front_needs_neither_numpy_nor_torch(make_pack: Callable[..., Path]) -> None:
    pack = make_pack()
    assert not {"numpy", "torch", "transformers"} & set(loaded("inspect", pack, "--planes", "--tiles"))
    assert not {"numpy", "torch", "transformers", "rich"} & set(loaded("inspect", pack, "--json"))
    # The control: a command that decodes rows does load numpy, so its absence above is seen.
    assert "numpy" in loaded("verify", pack, "--allow-unsigned")


def test_the_json_has_every_plane(kvpack_here: Here, make_pack: Callable[..., Path], probe: Probe) -> None:
    pack = make_pack(synthetic.EVERY_KIND, 40, probe=probe, provenance={"model": "m"})
    facts = kvpack_here.good("inspect", pack, "--json").json
    assert set(facts) == {
        "pack", "pack_id", "file_bytes", "raw_bytes", "stored_bytes", "encrypted", "created", "expires", "epoch",
        "stream", "producer", "provenance", "signatures", "position", "identity", "geometry", "producer_layout",
        "cuts", "parent", "planes", "tiles", "probe",
    }  # fmt: skip
    assert facts["file_bytes"] == pack.stat().st_size
    assert facts["position"] == 40
    assert facts["probe"] == {"position": 40, "steps": 3, "encoding": "f32"}
    assert facts["provenance"] == {"model": "m"}
    assert facts["identity"]["compatibility"]["weights"] == (b"w" * 32).hex()
    assert facts["signatures"]["summary"] == "unsigned"
    planes = {(plane["scope"], plane["layer"], plane["role"]): plane for plane in facts["planes"]}
    assert len(planes) == len(facts["planes"]) == sum(1 for _ in synthetic.EVERY_KIND.planes()) + 2
    sliding = planes["layer", 1, "k"]
    assert (sliding["rows"], sliding["ranges"], sliding["row_shape"]) == (7, [[33, 40]], [2, 8])
    assert (sliding["encoding"], sliding["raw_bytes"]) == ("bf16", 7 * 2 * 8 * 2)
    assert planes["layer", 2, "k"]["ranges"] == [[0, 2], [35, 40]]
    assert planes["session", None, "tokens"]["rows"] == 40
    assert facts["raw_bytes"] == sum(plane["raw_bytes"] for plane in facts["planes"])
    assert facts["stored_bytes"] == sum(plane["stored_bytes"] for plane in facts["planes"])
    assert all((plane["stored_bytes"] > 0) == (plane["rows"] > 0) for plane in facts["planes"])


def test_the_layer_map_shows_what_is_held(kvpack_here: Here, make_pack: Callable[..., Path]) -> None:
    geometry = Geometry(
        (*(synthetic.sliding(),) * 5, synthetic.full(), *(synthetic.sliding(),) * 5, synthetic.full(),
         synthetic.latent(), synthetic.recurrent(), synthetic.shared(0), synthetic.cross())
    )  # fmt: skip
    lines = [re.sub(r"\s+", " ", line) for line in kvpack_here.good("inspect", make_pack(geometry)).out.splitlines()]
    assert " SSSSSFSSSSSFLR=X" in lines
    wanted = (
        "10 S sliding 8 k v 2x8 bf16 ······▒█ 7 4.38 KiB",
        "2 F full k v 2x8 bf16 ████████ 40 5.00 KiB",
        "1 L latent pool 4 latent 20 f32 ████████ 40",
        " index_key 4 f32 ████████ 10",
        "1 R recurrent conv 12x3 bf16 state 72 B",
        "1 = shared of 0 none of its own",
        "1 X cross k v 2x8 bf16 5 320 B",
        "session logits 16 f32 state 64 B",
        "session tokens 1 i32 ████████ 40 160 B",
    )
    for start in wanted:
        assert sum(line.startswith(start) for line in lines) == 1, (start, lines)


def test_it_fits_a_terminal_of_80_columns_and_a_pipe(
    kvpack_here: Here, make_pack: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, keys: tuple[KeyFiles, ...]
) -> None:
    geometry = Geometry((*(synthetic.sliding(512, 1, 256),) * 15, synthetic.full(1, 256)))
    pack = make_pack(geometry, 1500, sign=keys[0].key)
    monkeypatch.chdir(pack.parent)
    monkeypatch.setenv("COLUMNS", "80")
    narrow = kvpack_here.good("inspect", pack.name, "--trust", keys[0].public).out
    digests = re.compile(r"[0-9a-f]{64}")
    assert [line for line in narrow.splitlines() if len(line) > 80 and not digests.search(line)] == []
    assert "…" not in kvpack_here.good("inspect", make_pack(synthetic.EVERY_KIND, name="b.kvpack"), "--planes").out
    monkeypatch.delenv("COLUMNS")
    piped = in_a_process("inspect", "b.kvpack", "--planes", "--tiles", cwd=pack.parent)
    assert (piped.status, piped.err) == (0, "")
    assert "\x1b" not in piped.out
    assert not set(piped.out) & set("│┃─━┏╭╮")
    assert re.search(r"^layer\.1\.k +2x8 bf16 +token +\[33, 40\)", piped.out, re.M)
    assert re.search(r"^ *\d+ +layer\.5\.ssm +\[0, 480\) state 0 +(raw|split)", piped.out, re.M)


def test_a_file_cannot_drive_the_terminal(kvpack_here: Here, make_pack: Callable[..., Path]) -> None:
    pack = make_pack(
        provenance={"model": "\x1b[31mred\r\nfake line", "\x1b]0;t\x07": "x"},
        who=synthetic.identity(architecture="\x1b[2Jgone [red]x[/red]"),
    )
    out = kvpack_here.good("inspect", pack).out
    assert not [c for c in out if c != "\n" and not c.isprintable()]
    assert "\nfake line" not in out
    assert "[red]x[/red]" in out


def test_it_says_what_is_proved_and_what_is_not(
    kvpack_here: Here, make_pack: Callable[..., Path], keys: tuple[KeyFiles, ...]
) -> None:
    pack = make_pack(sign=keys[0].key)
    trusted = kvpack_here.good("inspect", pack, "--trust", keys[0].public).out
    assert f"the front is signed by trusted key {keys[0].key.public.short_id}" in trusted
    assert "not proved  the payload" in trusted
    unknown = kvpack_here.good("inspect", pack).out
    assert "who made it: signed by an unknown key" in unknown
    assert "trusted key" not in unknown
    other = kvpack_here.good("inspect", pack, "--trust", keys[1].public, "--json").json["signatures"]
    assert other["trusted"] is False
    assert [signature["status"] for signature in other["signatures"]] == ["unknown-key"]
    assert "nobody signed the pack" in kvpack_here.good("inspect", make_pack(name="b.kvpack")).out


def test_it_reads_only_the_front(kvpack_here: Here, make_pack: Callable[..., Path]) -> None:
    pack = make_pack(SEVERAL_TILES, 2000)
    before = kvpack_here.good("inspect", pack).out
    content = bytearray(pack.read_bytes())
    content[kvpack.inspect(pack).records[-1].offset] ^= 1
    pack.write_bytes(content)
    assert kvpack_here.good("inspect", pack).out == before
    kvpack_here("verify", pack, "--allow-unsigned", "--json").refused(11, "stored-hash")


@pytest.mark.parametrize("vector", sorted((ROOT / "fixtures/v1/accept").glob("*.kvpack")), ids=lambda path: path.stem)
def test_every_vector_can_be_shown(kvpack_here: Here, vector: Path) -> None:
    shown = kvpack_here.good("inspect", vector, "--planes", "--tiles")
    assert not [c for c in shown.out if c != "\n" and not c.isprintable()]
    assert kvpack_here.good("inspect", vector, "--json").json["position"] >= 0
