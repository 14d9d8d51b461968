"""``kvpack synth``: a pack of any geometry and size without a model."""

from __future__ import annotations

from pathlib import Path

import click

import kvpack
from kvpack.model.geometry import MAX_POSITION
from kvpack.trust import load_private_key
from kvpack_cli.geometry_file import read_geometry
from kvpack_cli.options import (
    FILE,
    codec_option,
    force_option,
    json_option,
    positions_option,
    require_ascending,
    require_output,
    sign_option,
)
from kvpack_cli.output import Output, bytes_text, count_text, ratio_text, seconds_text
from kvpack_cli.progress import Stopwatch
from kvpack_cli.synthetic import synthetic_cuts

__all__ = ["command"]


@click.command(
    "synth",
    short_help="Make a pack of a geometry without a model.",
    epilog="""\b
Examples:
  kvpack synth --geometry fixtures/geometries/small.json --position 1000 -o small.kvpack
  kvpack synth --geometry fixtures/geometries/52-layer.json --position 131072 \\
      --cuts 32768,65536 --seed 7 --sign me.key -o large.kvpack
  kvpack install large.kvpack --engine host --trust me.key.pub --append 100

\b
A geometry is one JSON object; layers are written out, repeated, or named:
  {"templates": {
     "local":  {"kind": "sliding", "window": 2048, "num_kv_heads": 2,
                "head_dim": 128, "encoding": "f16"},
     "global": {"kind": "full", "num_kv_heads": 2, "head_dim": 128,
                "k_encoding": "q8_0", "v_encoding": "q4_0"}},
   "layers": [{"repeat": 13, "pattern": ["local*3", "global"]},
              {"kind": "latent", "kv_rank": 512, "rope_dim": 64,
               "encoding": "bf16", "pool": 4, "index_width": 256},
              {"kind": "recurrent",
               "conv": {"shape": [12288, 3], "encoding": "f32"},
               "ssm": {"shape": [32, 128, 128], "encoding": "f32"}},
              {"kind": "shared", "source": 3}]}
fixtures/geometries/README.md describes every key. The geometry of any pack:
  kvpack inspect session.kvpack --json | jq .geometry > G.json
""",
)
@click.option("--geometry", type=FILE, required=True, metavar="G.json", help="What the cache looks like.")
@click.option(
    "--position",
    type=click.IntRange(0, MAX_POSITION),
    required=True,
    metavar="P",
    help="Tokens whose state the pack holds.",
)
@positions_option("--cuts", metavar="A,B", help="Earlier positions to restore at as well.")
@click.option(
    "--seed", type=click.IntRange(0, (1 << 64) - 1), default=0, show_default=True, metavar="S", help="Which session."
)
@codec_option
@sign_option
@force_option
@click.option("--out", "-o", type=FILE, required=True, metavar="OUT", help="The pack to write.")
@json_option
@click.pass_obj
def command(
    output: Output,
    geometry: Path,
    position: int,
    cuts: tuple[int, ...],
    seed: int,
    codec: str,
    sign: tuple[Path, ...],
    force: bool,
    out: Path,
) -> None:
    """Make a pack of P tokens of a cache that a JSON file describes, with rows that a seed determines.

    The rows depend on the seed, the plane and the row's number alone: packs of one seed and different positions are
    one session, and the same seed gives the same state ids on every machine. Every float is finite. The rows are
    made while they are written, so a pack of many gigabytes needs little memory.
    """
    require_output(out, force=force)
    keys = [load_private_key(path) for path in sign]
    described = read_geometry(geometry)
    positions = require_ascending(cuts, 0, position, "cuts")
    watch = Stopwatch()
    with watch.stage("write", f"writing {out.name}") as progress:
        views = synthetic_cuts(described, positions, seed, geometry.stem)
        written = kvpack.save(views, out, codec=codec, sign=keys, force=force, progress=progress)
    state_ids = {str(at): state_id.hex() for at, state_id in written.state_ids.items()}
    output.facts |= {
        "pack": str(out),
        "pack_id": written.pack_id,
        "state_id": state_ids[str(position)],
        "state_ids": state_ids,
        "position": position,
        "cuts": list(positions),
        "seed": seed,
        "file_bytes": written.file_bytes,
        "raw_bytes": written.raw_bytes,
        "stored_bytes": written.stored_bytes,
        "signed_by": [key.public.fingerprint for key in keys],
        "seconds": watch.facts(),
    }
    ratio = ratio_text(written.raw_bytes, written.file_bytes)
    speed = written.raw_bytes / max(watch.seconds["write"], 1e-9) / 1e9
    rows = [
        ("pack", str(out)),
        ("position", f"{count_text(position)} tokens of seed {seed}"),
        ("size", f"{bytes_text(written.file_bytes)} for {bytes_text(written.raw_bytes)} of state ({ratio})"),
        ("signed by", ", ".join(key.public.fingerprint for key in keys) or "nobody (sign with --sign KEY)"),
        ("pack id", written.pack_id.hex()),
        *((f"state at {count_text(int(at))}", state_id) for at, state_id in state_ids.items()),
        ("time", f"{seconds_text(watch.seconds['write'])} ({speed:.2f} GB/s)"),
    ]
    output.fields(rows)
