"""``kvpack keygen``: an Ed25519 key pair for signing packs."""

from __future__ import annotations

from pathlib import Path

import click

from kvpack.trust import SigningKey, save_key
from kvpack_cli.options import FILE, json_option, require_output
from kvpack_cli.output import Output

__all__ = ["command"]


@click.command(
    "keygen",
    short_help="Make a key pair for signing packs.",
    epilog="""\b
Example:
  kvpack keygen --out me.key
""",
)
@click.option(
    "--out", "-o", type=FILE, required=True, metavar="KEY", help="The private key; KEY.pub is the public one."
)
@click.option("--force", is_flag=True, help="Replace existing files.")
@json_option
@click.pass_obj
def command(output: Output, out: Path, force: bool) -> None:
    """Make an Ed25519 key pair.

    KEY holds the private half (PKCS8 PEM, readable by you alone): sign with it. KEY.pub holds the public half: give it
    to those who are to trust your packs.
    """
    require_output(out, force=force)
    key = SigningKey.generate()
    public = save_key(key, out, force=force)
    output.facts |= {
        "private_key": str(out),
        "public_key": str(public),
        "fingerprint": key.public.fingerprint,
        "key_id": key.public.key_id.hex(),
    }
    output.fields(
        [
            ("private key", f"{out}  (keep it to yourself; sign with --sign)"),
            ("public key", f"{public}  (give it away; trust it with --trust)"),
            ("fingerprint", key.public.fingerprint),
        ]
    )
