"""``kvpack push``: a pack into a store, for another process or another machine."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from kvpack.errors import UsageError
from kvpack.store.remote import RemoteStore
from kvpack_cli.options import FILE, json_option
from kvpack_cli.output import Output, bytes_text
from kvpack_cli.progress import Stopwatch
from kvpack_cli.store_access import open_store

__all__ = ["command"]


@click.command(
    "push",
    short_help="Send a pack to a store.",
    epilog="""\b
Examples:
  kvpack push session.kvpack s3://bucket/sessions
  kvpack push session.kvpack "s3://bucket/sessions?endpoint=http://127.0.0.1:8333"
  kvpack push session.kvpack file:/mnt/packs

\b
Credentials come from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, …
gs:// and az:// go by the same code and are untested.
""",
)
@click.argument("pack", type=FILE)
@click.argument("url")
@click.option(
    "--store-key",
    type=FILE,
    metavar="FILE",
    help="32 bytes, or 64 hex digits, under which prefixes are named. Default: the store's own.",
)
@json_option
@click.pass_obj
def command(output: Output, pack: Path, url: str, store_key: Path | None) -> None:
    """Send PACK, as it is and with its signatures, to the store at URL, and print the name to pull it by.

    Every byte is verified while it is sent, and the pack is visible once all of it is there. A push that was cut off
    goes on where it stopped when it is repeated. A delta needs its parent in the store: push that first.
    """
    if "#" in url:
        raise UsageError("bad-url", "the store of a push is named without #ID", field="url", found=url)
    watch = Stopwatch()
    size = pack.stat().st_size if pack.is_file() else 0
    with (
        contextlib.closing(open_store(url, store_key, create=True)) as store,
        watch.stage("push", f"sending {pack.name}") as progress,
    ):
        if isinstance(store, RemoteStore):
            done = 0

            def on_bytes(count: int) -> None:
                nonlocal done
                done += count
                progress(min(done, size), size)

            entry = store.put_file(pack, on_bytes=on_bytes)
        else:
            entry = store.put_file(pack)
    name = f"{url}#{entry.name}"
    seconds = watch.seconds["push"]
    output.facts |= {
        "pack": str(pack),
        "pack_id": entry.pack_id,
        "store": url,
        "name": name,
        "file_bytes": entry.stored_bytes,
        "new": entry.new,
        "parent": entry.parent,
        "seconds": watch.facts(),
    }
    speed = f" ({entry.stored_bytes / seconds / 1e6:.0f} MB/s)" if seconds > 0 and entry.new else ""
    output.fields(
        [
            ("pack", str(pack)),
            ("size", f"{bytes_text(entry.stored_bytes)}{speed}" if entry.new else "the store has it already"),
            ("pull it by", name),
        ]
    )
