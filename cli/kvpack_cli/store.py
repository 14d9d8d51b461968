"""``kvpack store``: what a prefix store holds, and its upkeep."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import click

from kvpack_cli.options import json_option
from kvpack_cli.output import Output, bytes_text, count_text
from kvpack_cli.store_access import open_store, resolve, store_options
from kvpack_cli.store_entries import age_text, entry_facts, entry_table, tree
from kvpack_cli.store_packs import export_command, get_command, longest_command, put_command

__all__ = ["command"]


@click.group(
    "store",
    short_help="Look into a prefix store, and look after it.",
    epilog="""\b
Examples:
  kvpack store ls --store file:/tmp/store
  kvpack store longest session.kvpack --store file:/tmp/store
  kvpack store gc --store file:/tmp/store --quota 20GiB

\b
The URL can be left out where the variable KVPACK_STORE names it.
""",
)
def command() -> None:
    """Packs that are found by the tokens that led to them, shared by many processes.

    `kvpack generate` fills a store and is served by it.
    """


command.add_command(put_command)
command.add_command(get_command)
command.add_command(longest_command)
command.add_command(export_command)


@command.command("ls", short_help="Every pack, as a tree of who continues whom.")
@store_options
@click.option("--flat", is_flag=True, help="One list, the most recently used first.")
@json_option
@click.pass_obj
def ls_command(output: Output, url: str, store_key: Path | None, flat: bool) -> None:
    """List the packs of a store: position, cuts, size, age and hits, and which pack continues which.

    A delta (marked D) needs the pack above it; P is pinned, R is retired: the next collection removes it.
    """
    with contextlib.closing(open_store(url, store_key)) as store:
        entries = store.ls()
    output.facts |= {"store": url, "entries": [entry_facts(entry) for entry in entries]}
    if output.as_json:
        return
    if not entries:
        output.line("The store is empty.")
        return
    output.table(entry_table([("", entry) for entry in entries] if flat else tree(entries), now=time.time()))


@command.command("stats", short_help="The store in numbers.")
@store_options
@json_option
@click.pass_obj
def stats_command(output: Output, url: str, store_key: Path | None) -> None:
    """How many packs and cuts a store has, what they take, and how often they were used."""
    with contextlib.closing(open_store(url, store_key)) as store:
        found = store.stats()
        entries = store.ls()
    oldest = min((entry.created for entry in entries), default=None)
    output.facts |= {
        "store": url,
        "packs": found.packs,
        "cuts": found.cuts,
        "stored_bytes": found.stored_bytes,
        "pinned": found.pinned,
        "pinned_bytes": found.pinned_bytes,
        "retired": found.retired,
        "reserved": found.reserved,
        "hits": found.hits,
        "quota": found.quota,
        "quarantined": found.quarantined,
        "oldest": oldest,
    }
    output.fields(
        [
            (
                "packs",
                f"{count_text(found.packs)} with {count_text(found.cuts)} cuts, {count_text(found.retired)} retired",
            ),
            ("size", bytes_text(found.stored_bytes)),
            ("pinned", f"{count_text(found.pinned)}, {bytes_text(found.pinned_bytes)}"),
            ("hits", count_text(found.hits)),
            ("oldest", age_text(time.time() - oldest) if oldest is not None else "-"),
            ("quota", bytes_text(found.quota) if found.quota is not None else "none"),
            ("quarantined", count_text(found.quarantined)),
        ]
    )


def _pin(output: Output, url: str, store_key: Path | None, name: str, *, pinned: bool) -> None:
    with contextlib.closing(open_store(url, store_key)) as store:
        entry = resolve(store, name)
        (store.pin if pinned else store.unpin)(entry.pack_id)
        output.facts |= {"store": url, **entry_facts(store.entry(entry.pack_id))}
    output.line(f"{entry.name[:12]} is {'pinned' if pinned else 'no longer pinned'}.")


@command.command("pin", short_help="Keep a pack whatever the quota.")
@click.argument("pack_id", metavar="ID")
@store_options
@json_option
@click.pass_obj
def pin_command(output: Output, pack_id: str, url: str, store_key: Path | None) -> None:
    """Keep the pack whose id begins with ID, and what it needs, whatever the quota."""
    _pin(output, url, store_key, pack_id, pinned=True)


@command.command("unpin", short_help="Undo pin.")
@click.argument("pack_id", metavar="ID")
@store_options
@json_option
@click.pass_obj
def unpin_command(output: Output, pack_id: str, url: str, store_key: Path | None) -> None:
    """Give the pack whose id begins with ID back to the order of least recent use."""
    _pin(output, url, store_key, pack_id, pinned=False)


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _size(ctx: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    text = value.strip().upper().removesuffix("B").removesuffix("I")
    number, unit = (text[:-1], text[-1:]) if text[-1:] in _UNITS and not text[-1:].isdigit() else (text, "")
    if not (number.isascii() and number.isdigit() and len(number) < 16):
        raise click.BadParameter(f"{value!r} is not a size, such as 500MiB or 20GiB", ctx, parameter)
    return int(number) * _UNITS[unit]


@command.command("gc", short_help="Remove what is not wanted.")
@store_options
@click.option("--quota", callback=_size, metavar="SIZE", help="Keep at most so much (20GiB), the least used go first.")
@json_option
@click.pass_obj
def gc_command(output: Output, url: str, store_key: Path | None, quota: int | None) -> None:
    """Remove retired packs, what dead writers left, and above the quota what was not used for longest.

    Packs that are in use, pinned or new stay.
    """
    with contextlib.closing(open_store(url, store_key)) as store:
        report = store.gc(quota)
    output.facts |= {
        "store": url,
        "removed": list(report.removed),
        "freed_bytes": report.freed_bytes,
        "stored_bytes": report.stored_bytes,
        "leased": list(report.leased),
        "flattened": list(report.flattened),
        "leftovers": list(report.leftovers),
    }
    output.fields(
        [
            ("removed", f"{count_text(len(report.removed))} packs, {bytes_text(report.freed_bytes)}"),
            ("flattened", f"{count_text(len(report.flattened))} chains"),
            ("in use", f"{count_text(len(report.leased))} packs"),
            ("leftovers", f"{count_text(len(report.leftovers))} files"),
            ("stored", bytes_text(report.stored_bytes)),
        ]
    )


@command.command("fsck", short_help="Hash everything again, and repair the index.")
@store_options
@json_option
@click.pass_obj
def fsck_command(output: Output, url: str, store_key: Path | None) -> None:
    """Hash every pack again, quarantine what is damaged, and repair the index. Nothing is deleted; no key is needed."""
    with contextlib.closing(open_store(url, store_key)) as store:
        report = store.fsck()
    output.facts |= {
        "store": url,
        "clean": report.clean,
        "packs": report.packs,
        "stored_bytes": report.stored_bytes,
        "quarantined": [{"file": name, "reason": reason} for name, reason in report.quarantined],
        "adopted": list(report.adopted),
        "forgotten": list(report.forgotten),
        "foreign": list(report.foreign),
    }
    verdict = "nothing to repair" if report.clean else "repaired"
    output.fields(
        [
            ("packs", f"{count_text(report.packs)}, {bytes_text(report.stored_bytes)}: {verdict}"),
            *(("quarantined", f"{name}: {reason}") for name, reason in report.quarantined),
            *(("adopted", pack_id.hex()) for pack_id in report.adopted),
            *(("forgotten", pack_id.hex()) for pack_id in report.forgotten),
            *(("foreign", name) for name in report.foreign),
        ]
    )
