"""A store whose writers die and whose disk lies: absent or whole, nothing lost that was acknowledged, no orphans."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpack.errors import StoreError
from kvpack.store.local import LocalStore
from tests.contract.sessions import FULL, SLIDING, WHO, cut_of, same_rows, tokens
from tests.contract.store_contract import position_of

ROOT = Path(__file__).resolve().parents[2]
SOAK_SECONDS = float(os.environ.get("KVPACK_SOAK_SECONDS", "60"))
SOAKING = "KVPACK_SOAK_SECONDS" in os.environ
IDS = tokens(300, seed=3)

# Everything that a put asks of the operating system about its files.
FILE_CALLS = (
    *("openat", "write", "pwrite64", "fsync", "fdatasync", "ftruncate", "link", "linkat", "unlink", "mkdir", "flock"),
    *("fstat", "newfstatat", "fcntl", "pread64", "read"),
)
LOOKING_CALLS = ("flock", "fstat", "newfstatat", "fcntl", "pread64", "read", "unlink")

WORKER = """
import os, signal, sys
sys.path.insert(0, {root!r})
from kvpack.errors import KvpackError
from kvpack.store.local import LocalStore
from tests.contract.sessions import FULL, cut_of, tokens
folder = sys.argv[1]
cut = cut_of(FULL, tokens(300, seed=3))
store = LocalStore.open(folder, quota=1 << 30, grace=0)
store.stats()
while True:
    print("ready", flush=True)
    if not sys.stdin.readline():
        break
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        code = 3
        try:
            store = LocalStore.open(folder, quota=1 << 30, grace=0)
            os.getppid()  # where the counting begins
            store.put(cut)
            code = 0
        except KvpackError as error:
            code = 1
        except BaseException as error:
            sys.stderr.write(repr(error))
            code = 2
        os._exit(code)
    os.waitpid(pid, os.WUNTRACED)
    print(pid, flush=True)
    done, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


class Putter:
    """A process with everything imported that forks once a put, stopped so that strace can take hold of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = [sys.executable, "-c", WORKER.format(root=str(ROOT)), str(folder)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, self.process.stderr.read() if self.process.stderr else ""
        return line

    def put(self, *strace: str, log: Path | None = None) -> int:
        """One put under strace with these options; the child's exit code (negative: the signal)."""
        assert self.process.stdin is not None
        assert self._line() == "ready"
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        pid = int(self._line())
        command = ["strace", "-f", "-qq", "-p", str(pid), "-o", str(log or os.devnull), *strace]
        tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        while True:
            status = Path(f"/proc/{pid}/status").read_text()
            traced = next(line.split()[1] for line in status.splitlines() if line.startswith("TracerPid"))
            if traced != "0":
                break
            if tracer.poll() is not None:
                os.kill(pid, signal.SIGKILL)
                self._line()
                pytest.skip(f"ptrace is not allowed here: {tracer.stderr.read() if tracer.stderr else ''}")
            time.sleep(0.002)
        os.kill(pid, signal.SIGCONT)
        code = int(self._line())
        assert tracer.stderr is not None
        tracer.communicate()
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def putter(tmp_path: Path) -> Iterator[Putter]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    LocalStore.open(tmp_path / "store", grace=0).close()
    made = Putter(tmp_path / "store")
    yield made
    made.close()


def check_whole(folder: Path, *, acknowledged: bool) -> None:
    """What holds after any fault: absent or whole, nothing acknowledged is lost, a check leaves no orphan."""
    store = LocalStore.open(folder, grace=0)
    try:
        report = store.fsck()
        assert not [why for _, why in report.quarantined if "not there" not in why], report
        assert store.fsck().clean
        objects = {p.name for p in (folder / "objects").glob("*/*")}
        assert objects == {n for e in store.ls() for n in (e.name, f"{e.name}.record")}
        hit = store.longest(IDS, WHO, FULL)
        assert hit is not None or not acknowledged
        store.put(cut_of(FULL, IDS))
        found = store.longest(IDS, WHO, FULL)
        assert position_of(found) == 300
        assert found is not None
        stored = store.get(found)
        assert stored is not None
        with stored:
            same_rows(stored.cut(), cut_of(FULL, IDS))
        removed = store.gc(0)
        assert len(removed.removed) == 1 or len(removed.removed) == 2
        assert os.listdir(folder / "tmp") == []
        stats = store.stats()
        assert (stats.packs, stats.reserved, stats.stored_bytes) == (0, 0, 0)
    finally:
        store.close()
        shutil.rmtree(folder / "quarantine")


def counted(putter: Putter, log: Path) -> dict[str, tuple[int, int]]:
    """Call name to (the first number that lies in the put, the last), counted as strace counts."""
    assert putter.put("-e", f"trace={','.join(FILE_CALLS)},getppid", log=log) == 0
    numbers: dict[str, tuple[int, int]] = {}
    counts: dict[str, int] = {}
    begun = False
    for line in log.read_text().splitlines():
        rest = line.split(None, 1)[1] if line.split(None, 1)[0].isdigit() else line
        name = rest.partition("(")[0]
        if name == "getppid":
            begun = True
        elif name in FILE_CALLS:
            counts[name] = counts.get(name, 0) + 1
            if begun:
                first = numbers.get(name, (counts[name], 0))[0]
                numbers[name] = (first, counts[name])
    assert begun
    return numbers


@pytest.mark.parametrize("fault", ["kill", "EIO", "ENOSPC"])
def test_a_fault_at_every_system_call_of_a_put(putter: Putter, tmp_path: Path, fault: str) -> None:
    """SIGKILL, EIO and ENOSPC; every call in `make soak`, otherwise a part of each kind, another part a fault."""
    folder = tmp_path / "store"
    numbers = counted(putter, tmp_path / "log")
    check_whole(folder, acknowledged=True)
    assert {"openat", "write", "fsync", "unlink", "flock"} <= numbers.keys()
    assert {"pwrite64", "fdatasync"} & numbers.keys()
    outcomes: dict[int, int] = {}
    offset = ["kill", "EIO", "ENOSPC"].index(fault)
    for name, (first, last) in numbers.items():
        if fault == "ENOSPC" and name in LOOKING_CALLS:
            continue  # no such call says that the disk is full
        for at in range(first, last + 1):
            step = 15 if name in LOOKING_CALLS else 3
            if not SOAKING and (at - first) % step != offset and at != last:
                continue
            inject = "signal=KILL" if fault == "kill" else f"error={fault}"
            (folder / "quarantine").mkdir(exist_ok=True)
            code = putter.put("-e", f"trace={name}", "-e", f"inject={name}:{inject}:when={at}")
            assert code in (0, 1, -signal.SIGKILL), f"{name} {at}: {code}"
            outcomes[code] = outcomes.get(code, 0) + 1
            check_whole(folder, acknowledged=code == 0)
    assert outcomes.get(-signal.SIGKILL if fault == "kill" else 1, 0) > 3, outcomes


SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>
#include <stdio.h>
/* Regular files outside SQLite get at most a third of what they are given, and it is really written. */
static size_t less(int fd, size_t n) {
  char path[64], name[4096];
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  ssize_t k = readlink(path, name, sizeof name - 1);
  if (k < 0) return n;
  name[k] = 0;
  if (!strstr(name, "/store/") || strstr(name, "sqlite") || n < 3) return n;
  return n / 3;
}
ssize_t write(int fd, const void *b, size_t n) {
  static ssize_t (*real)(int, const void *, size_t);
  if (!real) real = dlsym(RTLD_NEXT, "write");
  return real(fd, b, less(fd, n));
}
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t at) {
  static ssize_t (*real)(int, const void *, size_t, off64_t);
  if (!real) real = dlsym(RTLD_NEXT, "pwrite64");
  return real(fd, b, less(fd, n), at);
}
ssize_t pwrite(int fd, const void *b, size_t n, off_t at) { return pwrite64(fd, b, n, at); }
"""


def test_short_writes_are_finished(tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    source, shim = tmp_path / "short.c", tmp_path / "short.so"
    source.write_text(SHIM)
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(shim), str(source), "-ldl"], check=True)
    program = (
        "import os, sys\nfrom tests.contract.sessions import FULL, cut_of, tokens\n"
        "from kvpack.store.local import LocalStore\n"
        "store = LocalStore.open(sys.argv[1], grace=0)\n"
        "descriptor = os.open(sys.argv[1] + '/version', os.O_WRONLY)\n"
        "print(os.write(descriptor, b'kvpack-store 1\\n'))\n"
        "store.put(cut_of(FULL, tokens(300, seed=3)), codec='raw')\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "store")]
    environment = {**os.environ, "LD_PRELOAD": str(shim)}
    out = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.strip() == "5"  # the shim does write less
    check_whole(tmp_path / "store", acknowledged=True)


def test_an_error_of_fsync_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore.open(tmp_path / "store", grace=0)
    real, calls = os.fsync, []

    def failing(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            raise OSError(5, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StoreError) as caught:
        store.put(cut_of(FULL, IDS))
    assert (caught.value.code, len(calls)) == ("io-error", 1)
    assert store.longest(IDS, WHO, FULL) is None
    store.close()
    monkeypatch.undo()
    check_whole(tmp_path / "store", acknowledged=False)


def test_a_put_whose_pack_is_collected_at_once_was_still_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may collect the pack as soon as the put lets go of it: the answer does not ask again."""
    store = LocalStore.open(tmp_path / "store", grace=0)

    def gone(pack_id: bytes, **_: Any) -> Any:
        raise StoreError("no-such-pack", "the store has no such pack", found=pack_id.hex())

    monkeypatch.setattr(store, "entry", gone)
    entry = store.put(cut_of(FULL, IDS))
    assert entry.new
    assert [cut.position for cut in entry.cuts] == [len(IDS)]
    again = store.put(cut_of(FULL, IDS))
    assert (again.pack_id, again.new) == (entry.pack_id, False)
    store.gc(quota=0)
    assert store.stats().packs == 0
    assert store.put(cut_of(FULL, IDS)).new
    store.close()


CROWD = """
import os, random, sys
sys.path.insert(0, {root!r})
from kvpack.errors import StoreError
from kvpack.store import put_turn
from kvpack.store.local import LocalStore
from tests.contract.sessions import FULL, SLIDING, WHO, cut_of, same_rows, tokens
folder, quota, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
choose = random.Random(seed)
store = LocalStore.open(folder, quota=quota or None, grace=0)
log = os.open(sys.argv[4], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
print("ready", flush=True)
while True:
    kind, session, turn = choose.choice("ptlllgc"), choose.randrange(60), choose.randrange(1, 6)
    geometry = (FULL, SLIDING)[session % 2]
    ids = tokens(90 * turn, session)
    if kind in "pt":
        try:
            cut = cut_of(geometry, ids, seed=session)
            entry = store.put(cut) if kind == "p" else put_turn(store, cut, keep_cuts=9)
        except StoreError as error:
            if error.code == "quota-exceeded":
                continue
            raise
        os.write(log, f"{{session}} {{turn}}\\n".encode())
    elif kind == "g" and choose.random() < 0.2:
        report = store.gc()
        if quota:
            stats = store.stats()
            assert stats.stored_bytes + stats.reserved <= quota, stats
    elif kind == "c" and choose.random() < 0.05:
        report = store.fsck()
        assert not [why for _, why in report.quarantined if "not there" not in why], report
    else:
        hit = store.longest(ids, WHO, geometry)
        stored = store.get(hit) if hit is not None else None
        if stored is not None:
            with stored:
                wanted = cut_of(geometry, ids[:hit.position], seed=session) if hit.at_cut else None
                if wanted is not None:
                    same_rows(stored.cut(), wanted, {{k: r for k, r in wanted.stored.items() if k.role != "tokens"}})
                else:
                    assert geometry is FULL or hit.position <= 8
            hit.confirm()
"""


@pytest.mark.parametrize("limited", [False, True], ids=["all-kept", "quota"])
def test_eight_processes_that_are_killed_at_random(tmp_path: Path, limited: bool) -> None:
    """Put, longest, get, gc, fsck at once; without a quota whatever was acknowledged is there in the end."""
    folder = tmp_path / "store"
    quota = 40 * 24_576 if limited else 0
    LocalStore.open(folder, grace=0).close()
    program = CROWD.format(root=str(ROOT))
    choose = random.Random(7)
    log = tmp_path / "acknowledged"
    began = 0

    def start() -> subprocess.Popen[bytes]:
        nonlocal began
        began += 1
        command = [sys.executable, "-c", program, str(folder), str(quota), str(began), str(log)]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    crowd = [start() for _ in range(8)]
    for process in crowd:
        assert process.stdout is not None
        process.stdout.readline()
    failures: list[str] = []
    end = time.monotonic() + SOAK_SECONDS / (1 if SOAKING else 2)
    killed = 0
    while time.monotonic() < end and not failures:
        time.sleep(choose.uniform(0.05, 0.8))
        at = choose.randrange(len(crowd))
        if crowd[at].poll() is None:
            crowd[at].send_signal(signal.SIGKILL)
            killed += 1
        failures += finished(crowd[at])
        crowd[at] = start()
    for process in crowd:
        process.send_signal(signal.SIGKILL)
        failures += finished(process)
    assert failures == []
    assert killed
    store = LocalStore.open(folder, grace=0, quota=quota or None)
    report = store.fsck()
    assert not [why for _, why in report.quarantined if "not there" not in why], report
    assert store.fsck().clean
    report2 = store.gc()
    assert report2.leased == ()
    assert os.listdir(folder / "tmp") == []
    names = {p.name for p in (folder / "objects").glob("*/*")}
    assert names == {n for e in store.ls() for n in (e.name, f"{e.name}.record")}
    stats = store.stats()
    assert stats.reserved == 0
    lines = {tuple(map(int, line.split())) for line in log.read_text().splitlines()}
    assert lines
    if limited:
        assert stats.stored_bytes <= quota
    else:
        for session, turn in sorted(lines):
            ids = tokens(90 * turn, session)
            geometry = (FULL, SLIDING)[session % 2]
            hit = store.longest(ids, WHO, geometry)
            assert position_of(hit) == len(ids), (session, turn)
            assert hit is not None
            stored = store.get(hit)
            assert stored is not None
            with stored:
                same_rows(stored.cut(), cut_of(geometry, ids, seed=session))
    print(f"{began} processes, {killed} killed, {len(lines)} different puts, {stats}")


def finished(process: subprocess.Popen[bytes]) -> list[str]:
    """What a process has to say that did not die of our signal."""
    _, errors = process.communicate()
    if process.returncode == -signal.SIGKILL:
        return []
    return [errors.decode()[-2000:]]


def test_quota_and_order_of_use_hold_when_many_put_at_once(tmp_path: Path) -> None:
    """Eight processes fill a store of exactly ten packs; never more than the quota, and the newest are there."""
    size = LocalStore.open(tmp_path / "probe").put(cut_of(FULL, IDS)).stored_bytes
    folder, quota = tmp_path / "store", 12 * (size + 3 * 4096)
    LocalStore.open(folder, grace=0).close()
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from kvpack.store.local import LocalStore\nfrom tests.contract.sessions import FULL, cut_of, tokens\n"
        "store = LocalStore.open(sys.argv[1], quota=int(sys.argv[2]), grace=0)\n"
        "for n in range(6):\n"
        "    store.put(cut_of(FULL, tokens(300, 100 * int(sys.argv[3]) + n)))\n"
        "    stats = store.stats(); assert stats.stored_bytes + stats.reserved <= int(sys.argv[2]), stats\n"
    )
    crowd = [
        subprocess.Popen([sys.executable, "-c", program, str(folder), str(quota), str(n)], cwd=ROOT) for n in range(8)
    ]
    assert [process.wait(120) for process in crowd] == [0] * 8
    store = LocalStore.open(folder, quota=quota, grace=0)
    by_use = [entry.used for entry in store.ls()]
    assert len(by_use) == quota // size or len(by_use) >= 9
    assert sorted(by_use, reverse=True) == by_use
    # What is left was used later than everything that went: the last ticks without a gap.
    assert by_use[-1] > 49 - len(by_use)
    store.put(cut_of(FULL, tokens(300, 999)))
    assert store.ls()[0].position == 300
    assert store.stats().stored_bytes <= quota


def test_a_collection_that_dies_half_way_leaves_a_record_and_no_orphan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore.open(tmp_path / "store", grace=0)
    entry = store.put(cut_of(FULL, IDS))
    real, left = os.unlink, [1]

    def dying(path: object, **options: object) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        real(path)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "unlink", dying)
    with pytest.raises(KeyboardInterrupt):
        store.gc(0)
    monkeypatch.undo()
    assert [p.name for p in (tmp_path / "store" / "objects").glob("*/*")] == [f"{entry.name}.record"]
    assert store.ls() == ()
    store.close()
    check_whole(tmp_path / "store", acknowledged=False)


def test_the_clock_of_use_is_not_the_wall_clock(tmp_path: Path) -> None:
    now = [1.0e9]
    store = LocalStore.open(tmp_path / "store", grace=0, now=lambda: now[0])
    first = store.put(cut_of(SLIDING, tokens(40, 1)))
    now[0] -= 5.0e8
    second = store.put(cut_of(SLIDING, tokens(40, 2)))
    assert [e.pack_id for e in store.ls()] == [second.pack_id, first.pack_id]
    assert store.gc(second.stored_bytes).removed == (first.pack_id,)


Planted = Callable[[pytest.MonkeyPatch], None]


def _empty_record(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("kvpack.store.objects.ObjectFolder.fill", lambda self, temporary, content: None)


def _no_loop(patch: pytest.MonkeyPatch) -> None:
    def once(self: object, temporary: object, content: bytes) -> None:
        os.write(temporary.descriptor, content[: len(content) // 2])  # type: ignore[attr-defined]

    patch.setattr("kvpack.store.objects.ObjectFolder.fill", once)


@pytest.mark.parametrize("plant", [_empty_record, _no_loop])
def test_the_checks_find_a_planted_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Planted) -> None:
    """The control: a store that writes half a record does not pass the check of the tests above."""
    store = LocalStore.open(tmp_path / "store", grace=0)
    plant(monkeypatch)
    store.put(cut_of(FULL, IDS))
    store.close()
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        check_whole(tmp_path / "store", acknowledged=True)
