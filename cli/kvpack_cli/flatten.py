"""``kvpack flatten``: a delta and its parents as one pack, without computing or compressing anything again."""

from __future__ import annotations

import tempfile
from array import array
from pathlib import Path

import click

import kvpack
from kvpack.api import signer_of
from kvpack.errors import UsageError
from kvpack.store import LocalStore
from kvpack.trust import load_private_key
from kvpack_cli.options import (
    FILE,
    allow_unsigned_option,
    force_option,
    json_option,
    parents_option,
    policy_of,
    require_output,
    sign_option,
    trust_option,
)
from kvpack_cli.output import Output, bytes_text, count_text
from kvpack_cli.progress import Stopwatch
from kvpack_cli.restore import known_tokens

__all__ = ["command"]


@click.command(
    "flatten",
    short_help="Make a delta and its parents one pack.",
    epilog="""\b
Examples:
  kvpack flatten delta.kvpack --parents ./packs --trust me.key.pub --sign me.key -o whole.kvpack
  kvpack flatten delta.kvpack --parents ./packs --allow-unsigned -o whole.kvpack
""",
)
@click.argument("pack", type=FILE)
@parents_option
@trust_option
@allow_unsigned_option
@sign_option
@force_option
@click.option("--out", "-o", type=FILE, required=True, metavar="PACK", help="The pack to write.")
@json_option
@click.pass_obj
def command(
    output: Output,
    pack: Path,
    parents: Path | None,
    trust: Path | None,
    allow_unsigned: bool,
    sign: tuple[Path, ...],
    force: bool,
    out: Path,
) -> None:
    """Write one pack that holds every cut of PACK and of the packs that it continues. It needs no parents.

    Tiles are copied as they are stored, so the states stay what they are, and so do their ids. What was signed needs a
    new signature (--sign): the one who flattens vouches for it.
    """
    require_output(out, force=force)
    keys = [load_private_key(path) for path in sign]
    watch = Stopwatch()
    with (
        watch.stage("flatten", f"flattening {pack.name}"),
        kvpack.open_pack(pack, trust=policy_of(trust), allow_unsigned=allow_unsigned, parents=parents) as source,
    ):
        if source.manifest.parent is None:
            raise UsageError("not-a-delta", f"{pack} continues no other pack: it is whole already", found=str(pack))
        source.cut().require_state_id()
        paths = [reader.path for reader in source.chain.readers]
        tokens = array("i", known_tokens(source) or range(source.manifest.position))
        # A store beside the output does the work: what it flattens was checked, copied and compared as in any store.
        with (
            tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder,
            LocalStore.open(folder, durability="none", allow_network=True) as store,
        ):
            for path in reversed(paths):
                entry = store.put_file(path, tokens)
            flat = store.flatten(entry.pack_id, sign=signer_of(keys) if keys else None)
            store.export(flat.pack_id, out, force=force)
    made = kvpack.inspect(out)
    output.facts |= {
        "pack": str(out),
        "pack_id": made.pack_id,
        "parts": [str(path) for path in paths],
        "file_bytes": made.file_bytes,
        "cuts": [{"position": cut.position, "state_id": cut.state_id} for cut in made.manifest.cuts],
        "signed_by": [key.public.fingerprint for key in keys],
        "seconds": watch.facts(),
    }
    before = sum(path.stat().st_size for path in paths)
    output.fields(
        [
            ("pack", f"{out}"),
            ("made of", f"{len(paths)} packs, {bytes_text(before)}"),
            ("size", bytes_text(made.file_bytes)),
            ("cuts", ", ".join(count_text(cut.position) for cut in made.manifest.cuts)),
            ("signed by", ", ".join(key.public.fingerprint for key in keys) or "nobody (sign with --sign KEY)"),
            ("pack id", made.pack_id.hex()),
        ]
    )
