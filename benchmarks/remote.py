"""A pack to and from a bucket, hashing included, against a bare transfer of the same bytes by obstore.

    python benchmarks/remote.py                     # starts SeaweedFS on loopback, 512 MiB
    python benchmarks/remote.py --mebibytes 256 --rounds 3

Every round sends and fetches both ways, one after the other, so that both meet the same machine; the best round
counts. The target is 0.9 of the bare transfer.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import obstore
from obstore.store import S3Store

import kvpack
from kvpack.model.geometry import Geometry
from kvpack.store.bucket import Bucket
from kvpack.store.remote import RemoteStore
from kvpack.store.remote_transfer import pull
from tests import synthetic
from tests.contract.seaweed import seaweed
from tests.contract.sessions import cut_of, tokens

TOKENS = 4096
TOKEN_BYTES = 32 << 10  # 8 layers of 8 heads of 128 in bf16, keys and values


def make_pack(path: Path, mebibytes: int) -> None:
    """A pack of random rows (nothing shrinks) of about this size."""
    layers = max(1, mebibytes * (1 << 20) // (TOKENS * (TOKEN_BYTES // 8)))
    geometry = Geometry(tuple(synthetic.full(8, 128) for _ in range(layers)))
    kvpack.save(cut_of(geometry, tokens(TOKENS)), path, codec="raw", salt=secrets.token_bytes(32))


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def fetch_bare(store: S3Store, name: str, path: Path) -> None:
    """The whole object into a file that is then on disk, as a pull leaves it."""
    with open(path, "wb") as file:
        for block in obstore.get(store, name).stream(min_chunk_size=8 << 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pack = folder / "a.kvpack"
        make_pack(pack, chosen.mebibytes)
        size = pack.stat().st_size
        (folder / "server").mkdir()
        with seaweed(folder / "server") as server:
            server.make_bucket("kvpack-bench")
            bare = S3Store("kvpack-bench", client_options={"allow_http": True}, config=server.config())
            best: dict[str, float] = {}
            for number in range(chosen.rounds):
                url = f"s3://kvpack-bench/{number}"
                store = RemoteStore.open_url(url, config=server.config())
                entry = None

                def push(store: RemoteStore = store) -> None:
                    nonlocal entry
                    entry = store.put_file(pack)

                seconds = {
                    "put, bare": timed(lambda n=number: obstore.put(bare, f"bare/{n}", pack)),
                    "push": timed(push),
                }
                assert entry is not None
                there = Bucket(url, config=server.config())
                fetches = {
                    "get, bare": lambda n=number: fetch_bare(bare, f"bare/{n}", folder / f"bare{n}"),
                    "pull": lambda t=there, e=entry: pull(t, e.pack_id, folder / "out"),
                }
                for what in sorted(fetches, reverse=number % 2 == 1):  # neither is always the first
                    os.sync()
                    seconds[what] = timed(fetches[what])
                (folder / f"bare{number}").unlink()
                assert (folder / "out").stat().st_size == size
                (folder / "out").unlink()
                store.close()
                obstore.delete(bare, [f"bare/{number}"])
                there.delete([entry.name for entry in there.list("objects")])
                for what, took in seconds.items():
                    best[what] = min(took, best.get(what, took))
        print(f"{size / (1 << 20):.0f} MiB, best of {chosen.rounds}, {os.cpu_count()} cores")
        for what, took in best.items():
            print(f"  {what:10} {took:6.2f} s  {size / took / 1e6:6.0f} MB/s")
        print(
            f"  push at {best['put, bare'] / best['push']:.2f} of bare, pull at {best['get, bare'] / best['pull']:.2f}"
        )


if __name__ == "__main__":
    main()
