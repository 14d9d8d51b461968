"""Ctrl-C, SIGTERM, full and read-only disks in the middle of a capture: nothing half-made stays.

The model is replaced by a synthetic cut, so that only the command and the writer are at work.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from kvpack_cli import capture

import kvpack
from kvpack.model.geometry import Geometry
from tests import synthetic
from tests.cli.commands import Here
from tests.conftest import ROOT, SmallFileSystem, pinned_environment

BIG = Geometry((synthetic.full(8, 128),) * 4)

# Says when it is in the middle of writing, and writes slowly from then on.
PRODUCER = """
import sys, time
from kvpack_cli import capture, main
from tests import synthetic
from tests.cli.test_interrupt import BIG
import kvpack
save = kvpack.save
def slow_save(cut, path, *, progress, **options):
    def tell(done, total):
        if done > total // 4:
            print("writing", flush=True)
            time.sleep(0.2)
    return save(cut, path, codec="raw", sign=options["sign"], force=options["force"], progress=tell)
kvpack.save = slow_save
capture._Session.load = lambda self, *_: setattr(self, "positions", (4096,))
capture._Session.prefill = lambda self: setattr(self, "cuts", [synthetic.make_cut(BIG, 4096)])
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A capture's arguments up to its output; the model is a folder that looks like one."""
    model, prompt = tmp_path / "model", tmp_path / "prompt.txt"
    model.mkdir()
    (model / "config.json").write_text("{}")
    prompt.write_text("a prompt")
    return ["capture", "--model", str(model), "--prompt-file", str(prompt)]


@pytest.mark.parametrize(
    ("number", "status", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
@pytest.mark.parametrize("existing", [False, True])
def test_a_signal_in_the_middle_leaves_nothing(
    tmp_path: Path, arguments: list[str], number: signal.Signals, status: int, word: str, existing: bool
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    pack = folder / "s.kvpack"
    if existing:
        pack.write_bytes(b"the old one")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with subprocess.Popen(
        [sys.executable, "-c", PRODUCER, *arguments, "--force", "-o", str(pack)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=pinned_environment(), text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        # The control: there is something to clean up.
        assert len(list(folder.iterdir())) == 1 + existing
        process.send_signal(number)
        for _ in range(50):
            process.send_signal(number)  # An impatient second one does not cut the clean-up short.
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (status, f"kvpack: {word}\n")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.fixture
def synthetic_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's model work replaced by a cut of 32 MiB."""
    monkeypatch.setattr(capture._Session, "load", lambda self, *_: setattr(self, "positions", (2048,)))
    monkeypatch.setattr(
        capture._Session, "prefill", lambda self: setattr(self, "cuts", [synthetic.make_cut(BIG, 2048)])
    )


@pytest.mark.usefixtures("synthetic_capture")
def test_a_full_disk(
    kvpack_here: Here, arguments: list[str], small_file_system: Callable[[int], SmallFileSystem]
) -> None:
    disk = small_file_system(1024)
    pack = disk.path / "s.kvpack"
    error = kvpack_here(*arguments, "--codec", "raw", "-o", pack, "--json").refused(15, "disk-full")
    assert error["hint"]
    assert list(disk.path.iterdir()) == []
    pack.write_bytes(b"the old one")
    kvpack_here(*arguments, "--codec", "raw", "--force", "-o", pack, "--json").refused(15, "disk-full")
    assert [path.read_bytes() for path in disk.path.iterdir()] == [b"the old one"]


def test_a_read_only_disk_is_seen_before_the_model_is_loaded(
    kvpack_here: Here,
    arguments: list[str],
    small_file_system: Callable[[int], SmallFileSystem],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_late(*_: object) -> None:
        raise AssertionError("the model was loaded first")

    monkeypatch.setattr(capture, "engine_module", too_late)
    disk = small_file_system(64)
    disk.make_read_only()
    kvpack_here(*arguments, "-o", disk.path / "s.kvpack", "--json").refused(15, "read-only")


@pytest.mark.usefixtures("synthetic_capture")
def test_the_control_writes_its_pack(kvpack_here: Here, arguments: list[str], tmp_path: Path) -> None:
    facts = kvpack_here.good(*arguments, "-o", tmp_path / "s.kvpack", "--json").json
    assert kvpack.verify(tmp_path / "s.kvpack", allow_unsigned=True).inspection.pack_id.hex() == facts["pack_id"]
