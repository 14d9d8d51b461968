"""Entries of a prefix store, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvpack.store import Entry
from kvpack_cli.layer_map import new_table
from kvpack_cli.output import bytes_text, count_text

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["age_text", "entry_facts", "entry_table", "tree"]

_SHORT_ID = 12


def age_text(seconds: float) -> str:
    """An age in its largest unit: ``40 s``, ``12 min``, ``5 h``, ``3 d``."""
    for unit, size, limit in (("s", 1, 90), ("min", 60, 5400), ("h", 3600, 172_800)):
        if seconds < limit:
            return f"{max(0, int(seconds / size))} {unit}"
    return f"{int(seconds / 86_400):,} d"


def entry_facts(entry: Entry) -> dict[str, object]:
    """An entry as JSON."""
    return {
        "pack_id": entry.pack_id,
        "position": entry.position,
        "cuts": [{"position": cut.position, "state_id": cut.state_id, "logits": cut.logits} for cut in entry.cuts],
        "stored_bytes": entry.stored_bytes,
        "created": entry.created,
        "used": entry.used,
        "hits": entry.hits,
        "pinned": entry.pinned,
        "retired": entry.retired,
        "parent": entry.parent,
        "continues": entry.continues,
        "chain": entry.chain,
        "kept": list(entry.kept),
    }


def tree(entries: Sequence[Entry]) -> Iterator[tuple[str, Entry]]:
    """Every entry once, below the one that it continues, with the branches to print before it."""
    known = {entry.pack_id for entry in entries}
    below: dict[bytes | None, list[Entry]] = {}
    for entry in entries:
        above = entry.continues if entry.continues in known and entry.continues != entry.pack_id else None
        below.setdefault(above, []).append(entry)
    # A stack and no recursion: a conversation may have thousands of turns.
    stack = [("", "", entry) for entry in reversed(below.get(None, []))]
    while stack:
        branch, under, entry = stack.pop()
        yield branch, entry
        children = sorted(below.get(entry.pack_id, []), key=lambda child: (child.position, child.pack_id))
        for at, child in enumerate(reversed(children)):
            last = at == 0
            stack.append((under + ("└ " if last else "├ "), under + ("  " if last else "│ "), child))


def entry_table(rows: Iterable[tuple[str, Entry]], *, now: float) -> Table:
    """One line an entry; the strings are the branches of the tree."""
    table = new_table("pack", "position", "cuts", "size", "age", "hits", "", right=("position", "size", "age", "hits"))
    for branch, entry in rows:
        marks = (("D", entry.parent is not None), ("P", entry.pinned), ("R", entry.retired))
        table.add_row(
            branch + entry.name[:_SHORT_ID],
            count_text(entry.position),
            _cuts_text([cut.position for cut in entry.cuts]),
            bytes_text(entry.stored_bytes),
            age_text(now - entry.created),
            count_text(entry.hits),
            "".join(mark for mark, found in marks if found),
        )
    return table


def _cuts_text(positions: Sequence[int]) -> str:
    shown = [count_text(at) for at in positions[-3:]]
    return " ".join(["…", *shown] if len(positions) > 3 else shown)
