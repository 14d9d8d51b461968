"""``kvpack diff``: where two packs part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

import kvpack
from kvpack.pack.compare import FieldDifference, PackComparison, compare_packs
from kvpack_cli.options import FILE, json_option, parents_option, policy_of, trust_option
from kvpack_cli.output import Output, bytes_text, count_text

__all__ = ["DIFFERENT", "command"]

DIFFERENT = 1


@click.command(
    "diff",
    short_help="Show where two packs part.",
    epilog="""\b
Examples:
  kvpack diff before.kvpack after.kvpack
  kvpack diff whole.kvpack delta.kvpack --parents ./packs
  kvpack diff a.kvpack b.kvpack --json | jq .rows

\b
Exit status: 0 the packs hold the same, 1 they differ (or nobody can tell,
because they are encrypted); more for errors.
""",
)
@click.argument("a", type=FILE)
@click.argument("b", type=FILE)
@parents_option
@trust_option
@json_option
@click.pass_obj
def command(output: Output, a: Path, b: Path, parents: Path | None, trust: Path | None) -> None:
    """Show where the packs A and B part: the model's identity, the geometry, the positions of their cuts, the first
    token, and the first layer, plane and row that differ.

    State ids and hashes tell equal rows, which are not read: of two large packs that differ in one row, only that tile
    is read. Codec, layout, signatures, probes and who made a pack are not compared; a delta is compared as the whole
    session that it continues. Packs are only read, so nobody needs to have signed them.
    """
    policy = policy_of(trust)
    with (
        kvpack.open_pack(a, trust=policy, allow_unsigned=True, parents=parents) as first,
        kvpack.open_pack(b, trust=policy, allow_unsigned=True, parents=parents) as second,
    ):
        found = compare_packs(first.chain, second.chain)
        output.facts |= {"a": str(a), "b": str(b), **facts(found)}
        if not output.as_json:
            _show(output, found)
    if not found.equal:
        output.finish()
        raise click.exceptions.Exit(DIFFERENT)


def facts(found: PackComparison) -> dict[str, object]:
    """The comparison as JSON."""
    tokens, rows = found.tokens, found.rows
    return {
        "equal": found.equal,
        "identity": [_field(entry) for entry in found.identity],
        "geometry": None if found.geometry is None else _field(found.geometry),
        "positions": {"a": found.positions_a, "b": found.positions_b},
        "cuts": [_field(entry) for entry in found.cuts],
        "same_state_at": found.same_state_at,
        "tokens": None
        if tokens is None
        else {"common": tokens.common, "parts_at": tokens.parts_at, "a": tokens.a, "b": tokens.b},
        "rows": None
        if rows is None
        else {
            "plane": str(rows.key),
            "scope": rows.key.scope,
            "layer": rows.key.layer_or_none,
            "role": rows.key.role,
            "row": rows.row,
            "unit": rows.unit.value,
            "positions": {"a": rows.position_a, "b": rows.position_b},
            "planes_at_least": rows.planes,
        },
        "not_compared": found.not_compared,
        "bytes_read": found.bytes_read,
    }


def _field(entry: FieldDifference) -> dict[str, object]:
    return {"field": entry.path, "a": entry.a, "b": entry.b}


def _show(output: Output, found: PackComparison) -> None:
    rows = [
        ("packs", _verdict(found)),
        ("identity", _identity_text(found)),
        ("geometry", "equal" if found.geometry is None else _field_text(found.geometry)),
        ("positions", _positions_text(found)),
        *(("", _field_text(entry)) for entry in found.cuts),
        *([("tokens", _tokens_text(found))] if found.tokens is not None else []),
    ]
    if found.geometry is None:
        rows.append(("rows", _rows_text(found)))
    rows += [("not compared", sentence) for sentence in found.not_compared]
    rows.append(("read", f"{bytes_text(found.bytes_read)} of rows"))
    output.fields(rows)


def _verdict(found: PackComparison) -> str:
    if found.equal:
        return "equal"
    return "different" if replace(found, settled=True).equal is False else "not known to be equal"


def _identity_text(found: PackComparison) -> str:
    return "; ".join(_field_text(entry) for entry in found.identity) or "equal"


def _value_text(value: object) -> str:
    if value is None:
        return "nothing"
    return value.hex()[:16] if isinstance(value, bytes) else str(value)


def _field_text(entry: FieldDifference) -> str:
    return f"{entry.path}: {_value_text(entry.a)} and {_value_text(entry.b)}"


def _positions_text(found: PackComparison) -> str:
    a, b = (", ".join(map(count_text, positions)) for positions in (found.positions_a, found.positions_b))
    text = a if a == b else f"{a} and {b}"
    if found.same_state_at:
        text += f" (one state at {', '.join(map(count_text, found.same_state_at))})"
    return text


def _tokens_text(found: PackComparison) -> str:
    tokens = found.tokens
    assert tokens is not None
    if tokens.parts_at is not None:
        return f"part at token {count_text(tokens.parts_at)}; the {count_text(tokens.common)} before it are equal"
    if tokens.a == tokens.b:
        return f"equal, {count_text(tokens.common)} of them"
    longer = "the second" if tokens.b > tokens.a else "the first"
    return f"{count_text(tokens.common)} are equal; {longer} goes on to {count_text(max(tokens.a, tokens.b))}"


def _rows_text(found: PackComparison) -> str:
    rows = found.rows
    if rows is None:
        return "not compared" if not found.settled else "no difference found" if found.not_compared else "equal"
    place = "byte" if rows.unit.value == "state" else "row"
    text = f"first different: {rows.key} {place} {count_text(rows.row)}"
    if rows.position_a != rows.position_b:
        text += f" (between {count_text(rows.position_a)} and {count_text(rows.position_b)})"
    else:
        text += f" (at position {count_text(rows.position_a)})"
    return f"{text}; at least {count_text(rows.planes)} planes differ" if rows.planes > 1 else text
