"""``kvpack inspect``: what a pack holds and what is proved about it, from its front alone."""

from __future__ import annotations

from pathlib import Path

import click

import kvpack
from kvpack.api import Inspection
from kvpack.model.identity import IdentityValue
from kvpack.model.snapshot import CutRecord
from kvpack.pack.manifest import StoredPlane
from kvpack_cli.options import FILE, json_option, policy_of, trust_option
from kvpack_cli.output import Output, bytes_text, count_text, printable, ratio_text, time_text

__all__ = ["command"]


@click.command(
    "inspect",
    short_help="Show what a pack holds, without reading its payload.",
    epilog="""\b
Examples:
  kvpack inspect session.kvpack
  kvpack inspect session.kvpack --trust me.key.pub --planes
  kvpack inspect session.kvpack --json | jq .planes[0]
""",
)
@click.argument("pack", type=FILE)
@trust_option
@click.option("--planes", is_flag=True, help="Every plane, one a line.")
@click.option("--tiles", is_flag=True, help="Every tile, one a line.")
@json_option
@click.pass_obj
def command(output: Output, pack: Path, trust: Path | None, planes: bool, tiles: bool) -> None:
    """Show what PACK holds: who made and signed it, the model's identity, the layers, the cuts.

    Only the front is read, so this is quick for a pack of any size. A pack that nobody trusted signed is shown too,
    with what is not proved about it; `kvpack verify` reads the rest.
    """
    inspection = kvpack.inspect(pack, trust=policy_of(trust))
    output.facts |= facts(inspection)
    if not output.as_json:
        _show(output, inspection, planes=planes, tiles=tiles)


def facts(inspection: Inspection) -> dict[str, object]:
    """The inspection as JSON."""
    manifest, stored = inspection.manifest, inspection.stored_bytes
    probe, parent = manifest.probe, manifest.parent
    return {
        "pack": str(inspection.path),
        "pack_id": inspection.pack_id,
        "file_bytes": inspection.file_bytes,
        "raw_bytes": inspection.raw_bytes,
        "stored_bytes": sum(stored.values()),
        "encrypted": inspection.encrypted,
        "created": manifest.created,
        "expires": manifest.expires,
        "epoch": manifest.epoch,
        "stream": manifest.stream,
        "producer": {"name": manifest.producer[0], "version": manifest.producer[1]},
        "provenance": dict(manifest.provenance),
        "signatures": inspection.verification.facts(),
        "position": manifest.position,
        "identity": manifest.identity.to_wire(),
        "geometry": manifest.geometry.to_wire(),
        "producer_layout": manifest.layout.to_wire(),
        "cuts": [cut.to_wire() for cut in manifest.cuts],
        "parent": None if parent is None else {"position": parent.position, "state_id": parent.state_id},
        "planes": [_plane_facts(plane, stored[plane.spec.key]) for plane in manifest.planes],
        "tiles": len(inspection.records),
        "probe": None
        if probe is None
        else {"position": probe.position, "steps": len(probe.tokens), "encoding": probe.encoding},
    }


def _plane_facts(plane: StoredPlane, stored_bytes: int) -> dict[str, object]:
    spec = plane.spec
    return {
        "scope": spec.key.scope,
        "layer": spec.key.layer_or_none,
        "role": spec.key.role,
        "unit": spec.unit.value,
        "encoding": spec.encoding.to_wire(),
        "row_shape": list(spec.row_shape),
        "row_bytes": spec.row_bytes,
        "rows": plane.rows.count,
        "ranges": [list(pair) for pair in plane.rows],
        "raw_bytes": plane.raw_bytes,
        "stored_bytes": stored_bytes,
    }


def _show(output: Output, inspection: Inspection, *, planes: bool, tiles: bool) -> None:
    from kvpack_cli.layer_map import layer_table, plane_table, strip, tile_table

    manifest = inspection.manifest
    output.fields([*_header(inspection), *_proof(inspection)])
    for title, entries in (
        ("Identity: must agree", manifest.identity.compatibility),
        ("Numerics: a difference lowers the claim to COMPATIBLE", manifest.identity.numerics),
    ):
        if entries:
            output.heading(title)
            output.fields([(printable(name), _value_text(value)) for name, value in entries.items()], indent=2)
    output.heading(f"Layers ({len(manifest.geometry.layers)})")
    for line in strip(inspection):
        output.line(f"  {line}")
    output.line()
    output.table(layer_table(inspection))
    output.heading("Cuts")
    output.fields([(count_text(cut.position), _cut_text(cut)) for cut in manifest.cuts], indent=2)
    if manifest.probe is not None:
        steps = f"{len(manifest.probe.tokens)} steps after {count_text(manifest.probe.position)}"
        output.fields([("probe", f"{steps}, {manifest.probe.encoding} logits")], indent=2)
    for title, wanted, table in (("Planes", planes, plane_table), ("Tiles", tiles, tile_table)):
        if wanted:
            output.heading(title)
            output.table(table(inspection))


def _header(inspection: Inspection) -> list[tuple[str, str]]:
    manifest = inspection.manifest
    ratio = ratio_text(inspection.raw_bytes, inspection.file_bytes)
    rows = [
        ("pack", str(inspection.path)),
        ("pack id", inspection.pack_id.hex()),
        ("size", f"{bytes_text(inspection.file_bytes)} for {bytes_text(inspection.raw_bytes)} of state ({ratio})"),
        ("position", f"{count_text(manifest.position)} tokens"),
        ("made by", f"{' '.join(manifest.producer)} on {time_text(manifest.created)}"),
    ]
    if manifest.expires is not None:
        rows.append(("expires", time_text(manifest.expires)))
    if manifest.epoch:
        rows.append(("epoch", str(manifest.epoch)))
    if manifest.stream is not None:
        rows.append(("stream", manifest.stream))
    if manifest.parent is not None:
        rows.append(("continues", f"{manifest.parent.state_id.hex()} from {count_text(manifest.parent.position)} on"))
    rows += [(name, value) for name, value in manifest.provenance.items()]
    if inspection.encrypted:
        rows.append(("encrypted", "yes; the payload, tokens and logits are secret"))
    return [(printable(label), value) for label, value in rows]


def _proof(inspection: Inspection) -> list[tuple[str, str]]:
    """What is proved about the pack, and what is not, in sentences."""
    verification = inspection.verification
    proved = ["the front is whole (its hash is right)"]
    if verification.trusted:
        proved.insert(0, f"the front is {verification.summary}")
    if verification.results and not verification.known_keys:
        missing = [f"who made it: {verification.summary} (give the public key with --trust)"]
    else:
        missing = list(verification.missing)
    missing.append("the payload, which inspect does not read (kvpack verify does)")
    return [
        *(("proved" if at == 0 else "", sentence) for at, sentence in enumerate(proved)),
        *(("not proved" if at == 0 else "", sentence) for at, sentence in enumerate(missing)),
    ]


def _value_text(value: IdentityValue) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def _cut_text(cut: CutRecord) -> str:
    parts = [f"state {cut.state_id.hex()[:16]}" if cut.state_id else "state id encrypted"]
    if cut.tokens:
        parts.append(f"{count_text(cut.tokens)} tokens")
    parts += cut.extras
    if cut.draft_position is not None:
        parts.append(f"draft at {count_text(cut.draft_position)}")
    if cut.rope_delta:
        parts.append(f"positions shifted by {cut.rope_delta}")
    if cut.context_epoch:
        parts.append(f"context epoch {cut.context_epoch}")
    return ", ".join(parts)
