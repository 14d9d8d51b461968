"""``kvpack verify``: every byte of a pack, without the model."""

from __future__ import annotations

from pathlib import Path

import click

import kvpack
from kvpack_cli.options import FILE, allow_unsigned_option, json_option, policy_of, trust_option
from kvpack_cli.output import Output, bytes_text, count_text
from kvpack_cli.progress import Stopwatch

__all__ = ["command"]

SHOWN_FAULTS = 10


@click.command(
    "verify",
    short_help="Check every byte of a pack and who signed it.",
    epilog="""\b
Examples:
  kvpack verify session.kvpack --trust me.key.pub
  kvpack verify session.kvpack --allow-unsigned --json
""",
)
@click.argument("pack", type=FILE)
@trust_option
@allow_unsigned_option
@json_option
@click.pass_obj
def command(output: Output, pack: Path, trust: Path | None, allow_unsigned: bool) -> None:
    """Check everything about PACK: the front, the signatures, the hash of every tile, the state ids.

    The model is not needed. Every bad tile is named with its plane and rows; the first one decides the exit status.
    """
    policy = policy_of(trust)
    watch = Stopwatch()
    with watch.stage("verify", f"verifying {pack.name}") as progress:
        verified = kvpack.verify(pack, trust=policy, allow_unsigned=allow_unsigned, progress=progress)
    seconds, front = watch.seconds["verify"], verified.inspection
    output.facts |= {
        "pack": str(pack),
        "pack_id": front.pack_id,
        "file_bytes": front.file_bytes,
        "raw_bytes": verified.raw_bytes,
        "tiles": verified.tiles,
        "bad_tiles": [
            {
                "plane": fault.plane,
                "layer": fault.error.layer,
                "rows": [fault.tile.first, fault.tile.end],
                "code": fault.error.code,
                "message": fault.error.message,
            }
            for fault in verified.faults
        ],
        "signatures": front.verification.facts(),
        "seconds": watch.facts(),
    }
    speed = verified.raw_bytes / seconds / 1e9 if seconds else 0.0
    state = f"{bytes_text(front.file_bytes)} in the file, {bytes_text(verified.raw_bytes)} of state"
    output.fields(
        [
            ("pack", f"{pack}"),
            ("pack id", front.pack_id.hex()),
            ("tiles", f"{count_text(verified.tiles)} checked, {count_text(len(verified.faults))} bad"),
            ("bytes", f"{state} ({speed:.2f} GB/s)"),
            ("signatures", front.verification.summary),
            *(("not proved", sentence) for sentence in front.verification.missing),
        ]
    )
    for fault in verified.faults[:SHOWN_FAULTS]:
        output.fields([("bad", f"{fault.plane} rows [{fault.tile.first}, {fault.tile.end})")])
    if len(verified.faults) > SHOWN_FAULTS:
        output.line(f"and {count_text(len(verified.faults) - SHOWN_FAULTS)} more bad tiles (all of them in --json)")
    verified.require()
    output.line("Every byte is what was written.")
