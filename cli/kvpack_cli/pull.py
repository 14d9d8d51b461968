"""``kvpack pull``: a pack out of a store, its front first."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import click

from kvpack.api import check_factory
from kvpack.errors import CompatibilityError, StoreError, UsageError
from kvpack.model.gate import Destination, gate
from kvpack.model.geometry import Geometry
from kvpack.pack.reader import FrontCheck, PackReader
from kvpack.pack.view import PackCut
from kvpack.store import PrefixStore
from kvpack.store.bucket import SCHEMES, Bucket
from kvpack.store.local import LocalStore
from kvpack.store.objects import parse_name
from kvpack.store.remote_source import open_remote
from kvpack.store.remote_transfer import pull
from kvpack_cli.geometry_file import read_geometry
from kvpack_cli.options import (
    FILE,
    allow_unsigned_option,
    force_option,
    json_option,
    policy_of,
    require_output,
    trust_option,
)
from kvpack_cli.output import Output, bytes_text, count_text, printable
from kvpack_cli.progress import Stopwatch
from kvpack_cli.store_access import resolve

__all__ = ["command"]

_LEAST_DIGITS = 4


@click.command(
    "pull",
    short_help="Fetch a pack from a store.",
    epilog="""\b
Examples:
  kvpack pull "s3://bucket/sessions#1f2e3d4c…" -o session.kvpack
  kvpack pull "s3://bucket/sessions#1f2e3d4c" --dry-run
  kvpack pull "s3://bucket/sessions#1f2e3d4c" -o session.kvpack --geometry G.json
  kvpack pull "https://host/sessions#…64 digits…" -o session.kvpack
""",
)
@click.argument("name", metavar="URL#ID")
@click.option("-o", "--output", "out", type=FILE, metavar="FILE", help="Where the pack goes; not with --dry-run.")
@click.option("--dry-run", is_flag=True, help="Read the front alone, and say what the pack is and whether it fits.")
@click.option("--geometry", type=FILE, metavar="G.json", help="Fetch it only if it fits a cache of this geometry.")
@trust_option
@allow_unsigned_option
@force_option
@json_option
@click.pass_obj
def command(
    output: Output,
    name: str,
    out: Path | None,
    dry_run: bool,
    geometry: Path | None,
    trust: Path | None,
    allow_unsigned: bool,
    force: bool,
) -> None:
    """Fetch the pack ID from the store at URL; ID is a pack id, or as many of its first digits as tell it apart.

    The front comes first: a pack that --trust does not vouch for, or that does not fit --geometry, is never fetched.
    Every tile is verified as it arrives. A pull that was cut off goes on where it stopped when it is repeated.
    """
    url, hash_sign, digits = name.rpartition("#")
    if not hash_sign or not re.fullmatch(rf"[0-9a-fA-F]{{{_LEAST_DIGITS},64}}", digits):
        raise UsageError("bad-url", "a pack is named URL#ID", field="name", found=name, hint="push prints the name")
    if (out is None) != dry_run:
        raise UsageError("usage", "give either --output or --dry-run", field="output")
    if out is not None:
        require_output(out, force=force)
    wanted = read_geometry(geometry) if geometry is not None else None
    check = check_factory(policy_of(trust), allow_unsigned=allow_unsigned)() if trust or allow_unsigned else None
    watch = Stopwatch()
    output.facts |= {"store": url, "fits": None}

    def accept(reader: PackReader) -> None:
        _say_front(output, reader)
        refusals = _refusals(reader, wanted) if wanted is not None else ()
        if wanted is not None:
            output.facts |= {"fits": not refusals, "refusals": [refusal.facts() for refusal in refusals]}
            if refusals:
                output.line(f"It would not fit, for {len(refusals)} reason{'s' if len(refusals) > 1 else ''}:")
                for refusal in refusals:
                    output.line(f"  {printable(refusal.message)}")
                raise refusals[0]
            output.line("It would fit.")

    scheme = url.partition(":")[0]
    if scheme in SCHEMES:
        bucket = Bucket(url)
        pack_id = _resolved(bucket, digits.lower())
        if out is None:
            try:
                with watch.stage("front", "reading the front"), open_remote(bucket, pack_id, check) as reader:
                    accept(reader)
            except FileNotFoundError:
                raise StoreError("no-such-pack", f"{bucket.url} has no such pack", found=digits) from None
        else:
            with watch.stage("pull", f"fetching {digits[:16]}") as progress:
                pulled = pull(bucket, pack_id, out, force=force, check=check, accept=accept, progress=progress)
            output.facts["resumed_bytes"] = pulled.resumed_bytes
    else:
        _from_folder(url, digits.lower(), out, force, check, accept, watch)
    _say_end(output, out, watch)


def _from_folder(
    url: str,
    digits: str,
    out: Path | None,
    force: bool,
    check: FrontCheck | None,
    accept: Callable[[PackReader], None],
    watch: Stopwatch,
) -> None:
    store = PrefixStore.open(url, create=False)
    if not isinstance(store, LocalStore):
        raise UsageError("bad-url", f"a pack is pulled from a folder or a bucket, not from {url}", found=url)
    try:
        entry = resolve(store, digits)
        path = store.folder.path(entry.pack_id)
        with watch.stage("front", "reading the front"), PackReader(path, check=check) as reader:
            accept(reader)
        if out is not None:
            with watch.stage("pull", f"copying {digits[:16]}"):
                store.export(entry.pack_id, out, force=force)
    finally:
        store.close()


def _resolved(bucket: Bucket, digits: str) -> bytes:
    """The pack whose id begins with ``digits``; raises StoreError ``no-such-pack``, ``ambiguous-pack``."""
    if len(digits) == 64:
        return parse_name(digits)
    if bucket.scheme in ("http", "https"):
        raise UsageError("bad-pack-id", "over HTTP a pack has all 64 digits of its id", expected=64, found=digits)
    names = {entry.name.rpartition("/")[2] for entry in bucket.list(f"objects/{digits[:2]}")}
    found = sorted(name for name in names if name.startswith(digits) and re.fullmatch("[0-9a-f]{64}", name))
    if not found:
        raise StoreError("no-such-pack", f"{bucket.url} has no such pack", found=digits)
    if len(found) > 1:
        raise StoreError(
            "ambiguous-pack", f"{len(found)} packs begin with {digits}", found=digits, hint="give more digits"
        )
    return parse_name(found[0])


def _refusals(reader: PackReader, wanted: Geometry) -> tuple[CompatibilityError, ...]:
    """Why the pack's last cut does not fit a cache of a geometry, under the identity that the pack itself names.

    The rows that a delta lacks are its parents', which are not looked for.
    """
    cut = PackCut([reader], reader.manifest.cuts[-1])
    report = gate(cut, Destination(wanted, cut.identity))
    delta = reader.manifest.parent is not None
    return tuple(refusal for refusal in report.refusals if not (delta and refusal.code == "rows-not-stored"))


def _say_front(output: Output, reader: PackReader) -> None:
    manifest, size = reader.manifest, reader.preamble.file_length
    parent = manifest.parent
    output.facts |= {
        "pack_id": reader.pack_id,
        "file_bytes": size,
        "raw_bytes": reader.raw_bytes,
        "position": manifest.position,
        "cuts": [cut.position for cut in manifest.cuts],
        "layers": len(manifest.geometry.layers),
        "parent": None if parent is None else {"position": parent.position, "state_id": parent.state_id},
    }
    output.fields(
        [
            ("pack id", reader.pack_id.hex()),
            ("size", f"{bytes_text(size)} for {bytes_text(reader.raw_bytes)} of state"),
            ("position", f"{count_text(manifest.position)} tokens, {len(manifest.geometry.layers)} layers"),
            *([("continues", f"a pack at {count_text(parent.position)}: pull that too")] if parent is not None else []),
        ]
    )


def _say_end(output: Output, out: Path | None, watch: Stopwatch) -> None:
    output.facts["seconds"] = watch.facts()
    if out is None:
        return
    output.facts["output"] = str(out)
    size, seconds = out.stat().st_size, watch.seconds["pull"]
    output.line(f"Fetched to {out}, every tile verified ({size / max(seconds, 1e-6) / 1e6:.0f} MB/s).")
