"""Torn, racing and refused writes: a pack is absent or whole, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import kvpack
from kvpack.errors import FormatError, IntegrityError, KvpackError, ResourceError, UsageError
from kvpack.model.geometry import Geometry, PlaneKey
from kvpack.pack.preamble import MAGIC
from tests import synthetic
from tests.conftest import SmallFileSystem

SMALL = Geometry((synthetic.full(), synthetic.sliding()))
BIG = Geometry((synthetic.full(8, 128),) * 4)


class Failing:
    """A row source that fails in the middle, as a vanished device would."""

    def __init__(self, cut: kvpack.Cut, after: int, error: BaseException) -> None:
        self.cut, self.left, self.error = cut, after, error

    def rows(self, key: PlaneKey, ordinal: int, first: int, end: int) -> memoryview:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return self.cut.planes[key].slice(first, end)


@pytest.mark.parametrize("error", [OSError(5, "I/O error"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("force", [False, True])
def test_a_write_that_fails_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, force: bool
) -> None:
    path = tmp_path / "a.kvpack"
    if force:
        kvpack.save(synthetic.make_cut(SMALL, 9), path)
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    monkeypatch.setattr("kvpack.api.CutRows", lambda cuts: Failing(cuts[0], 5, error))
    with pytest.raises((type(error), KvpackError)):
        kvpack.save(synthetic.make_cut(BIG, 2048), path, force=force)
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_full_disk_is_one_clear_refusal(small_file_system: Callable[[int], SmallFileSystem]) -> None:
    disk = small_file_system(512)
    with pytest.raises(ResourceError) as caught:
        kvpack.save(synthetic.make_cut(BIG, 2048), disk.path / "a.kvpack", codec="raw")
    assert caught.value.code == "disk-full"
    assert list(disk.path.iterdir()) == []
    kvpack.save(synthetic.make_cut(SMALL, 9), disk.path / "b.kvpack")


def test_a_read_only_place_is_one_clear_refusal(small_file_system: Callable[[int], SmallFileSystem]) -> None:
    disk = small_file_system(512)
    disk.make_read_only()
    with pytest.raises(ResourceError) as caught:
        kvpack.save(synthetic.make_cut(SMALL, 9), disk.path / "a.kvpack")
    assert caught.value.code == "read-only"


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_killed_writer_never_shows_half_a_pack(tmp_path: Path, kill: signal.Signals) -> None:
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "import kvpack\nfrom tests import synthetic\n"
        "from kvpack.model.geometry import Geometry\n"
        "cut = synthetic.make_cut(Geometry((synthetic.full(8, 128),) * 4), 8192)\n"
        f"path = {str(tmp_path / 'a.kvpack')!r}\n"
        "print('ready', flush=True)\nwhile True: kvpack.save(cut, path, force=True, codec='raw')\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert writer.stdout is not None
    writer.stdout.readline()
    time.sleep(0.35)
    writer.send_signal(kill)
    writer.wait(30)
    writer.stdout.close()
    path = tmp_path / "a.kvpack"
    if path.exists():
        kvpack.verify(path, allow_unsigned=True).require()
    if kill is signal.SIGINT:
        assert [p.name for p in tmp_path.iterdir() if p != path] == []


def test_racing_writers_and_a_reader_see_whole_packs_only(tmp_path: Path) -> None:
    path = tmp_path / "a.kvpack"
    cuts = [synthetic.make_cut(SMALL, 9, seed=seed) for seed in (0, 1)]
    wanted = [bytes(cut.planes[PlaneKey("layer", 0, "k")].buffer) for cut in cuts]
    errors: list[BaseException] = []
    stop = threading.Event()

    def write(cut: kvpack.Cut) -> None:
        try:
            for _ in range(100):
                kvpack.save(cut, path, force=True)
        except BaseException as error:  # noqa: BLE001 - reported by the main thread
            errors.append(error)

    def read() -> None:
        while not stop.is_set():
            try:
                got = kvpack.load(path, allow_unsigned=True)
            except UsageError:
                continue
            except BaseException as error:  # noqa: BLE001 - reported by the main thread
                errors.append(error)
                return
            if bytes(got.planes[PlaneKey("layer", 0, "k")].buffer) not in wanted:
                errors.append(AssertionError("a mixed pack"))

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(cut,)) for cut in cuts]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert errors == []
    assert os.listdir(tmp_path) == ["a.kvpack"]


def test_without_force_exactly_one_of_many_writers_wins(tmp_path: Path) -> None:
    path = tmp_path / "a.kvpack"
    outcomes: list[str] = []

    def write(seed: int) -> None:
        try:
            kvpack.save(synthetic.make_cut(SMALL, 9, seed=seed), path)
            outcomes.append("won")
        except UsageError as error:
            outcomes.append(error.code)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["output-exists"] * 7 + ["won"]


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 127, 128, 4095, 4096, 5000, -1])
def test_truncated_files_are_refused_before_rows_are_read(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "a.kvpack"
    kvpack.save(synthetic.make_cut(SMALL, 9), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    with pytest.raises(FormatError) as caught:
        kvpack.inspect(path)
    assert caught.value.code in ("empty-file", "too-short", "truncated", "bad-length")
    path.write_bytes(whole + b"x")
    with pytest.raises(FormatError) as caught:
        kvpack.inspect(path)
    assert caught.value.code == "trailing-bytes"


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"\x40\x00\x00\x00\x00\x00\x00\x00" + b'{"a":{}}' + b" " * 5000, "bad-magic"),
        (b"GGUF" + bytes(5000), "bad-magic"),
        (b"PK\x03\x04" + bytes(5000), "bad-magic"),
        (b"KVPKP1" + bytes(5000), "foreign-kvpack"),
        (b"IOKVPK1" + bytes(5000), "foreign-kvpack"),
        (MAGIC.replace(b"\r\n", b"\n") + bytes(5000), "bad-magic"),
        (os.urandom(5000), "bad-magic"),
    ],
)
def test_foreign_files_are_named(tmp_path: Path, content: bytes, code: str) -> None:
    path = tmp_path / "a.kvpack"
    path.write_bytes(content)
    with pytest.raises(FormatError) as caught:
        kvpack.inspect(path)
    assert caught.value.code == code


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.kvpack"
    kvpack.save(synthetic.make_cut(SMALL, 9), path, codec="raw")
    with kvpack.open_pack(path, allow_unsigned=True) as pack:
        os.truncate(path, 4096)
        view = pack.cut()
        with pytest.raises((FormatError, IntegrityError)):
            view.read_rows(view.stored, lambda *_: None)


def test_the_cut_is_a_copy_and_not_the_live_cache(tmp_path: Path) -> None:
    cut = synthetic.make_cut(SMALL, 9)
    kvpack.save(cut, tmp_path / "a.kvpack")
    back = kvpack.load(tmp_path / "a.kvpack", allow_unsigned=True)
    key = PlaneKey("layer", 0, "k")
    back.planes[key].buffer[:2] = b"\xff\xff"
    assert bytes(kvpack.load(tmp_path / "a.kvpack", allow_unsigned=True).planes[key].buffer) == bytes(
        cut.planes[key].buffer
    )
