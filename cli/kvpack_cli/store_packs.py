"""The verbs of ``kvpack store`` that move packs: put, get, longest, export."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

import kvpack
from kvpack.api import signer_of
from kvpack.errors import StoreError, UsageError
from kvpack.model.geometry import Geometry
from kvpack.model.identity import Identity
from kvpack.store import Entry, Store, put_turn
from kvpack.trust import SigningKey, load_private_key
from kvpack_cli.engine import engine_module
from kvpack_cli.options import (
    FILE,
    allow_unsigned_option,
    force_option,
    json_option,
    parents_option,
    policy_of,
    require_model,
    require_output,
    sign_option,
    trust_option,
)
from kvpack_cli.output import Output, bytes_text, count_text
from kvpack_cli.restore import known_tokens
from kvpack_cli.store_access import open_store, resolve, store_options
from kvpack_cli.store_entries import entry_facts
from kvpack_cli.texts import read_prompt

__all__ = ["export_command", "get_command", "longest_command", "put_command"]


@click.command("put", short_help="Store pack files.")
@click.argument("packs", type=FILE, nargs=-1, required=True, metavar="PACK…")
@store_options
@click.option(
    "--keep-cuts",
    type=click.IntRange(min=1),
    metavar="N",
    help="Store each as a turn of its conversation: what is new of it, and the last N cuts outlive a collection.",
)
@parents_option
@trust_option
@allow_unsigned_option
@sign_option
@json_option
@click.pass_obj
def put_command(
    output: Output,
    packs: tuple[Path, ...],
    url: str,
    store_key: Path | None,
    keep_cuts: int | None,
    parents: Path | None,
    trust: Path | None,
    allow_unsigned: bool,
    sign: tuple[Path, ...],
) -> None:
    """Store PACKs as they are, with their signatures, every byte verified; a delta's parent comes first.

    With --keep-cuts a pack's last cut is written anew, as a delta on what the store has of its tokens.
    """
    if sign and keep_cuts is None:
        raise UsageError("usage", "--sign needs --keep-cuts: a pack as it is keeps its signatures", field="sign")
    keys = [load_private_key(path) for path in sign]
    entries: list[Entry] = []
    with contextlib.closing(
        open_store(url, store_key, trust=trust, allow_unsigned=allow_unsigned, sign=keys, create=True, reads=True)
    ) as store:
        for path in packs:
            if keep_cuts is None:
                entries.append(store.put_file(path))
            else:
                with kvpack.open_pack(
                    path, trust=policy_of(trust), allow_unsigned=allow_unsigned or trust is None, parents=parents
                ) as pack:
                    entries.append(_put_turn(store, pack, keep_cuts, keys))
    output.facts |= {"store": url, "entries": [{**entry_facts(entry), "new": entry.new} for entry in entries]}
    output.fields(
        [
            (
                str(path),
                f"{entry.name[:12]}, {bytes_text(entry.stored_bytes)}, position {count_text(entry.position)}"
                + ("" if entry.new else " (was there)"),
            )
            for path, entry in zip(packs, entries, strict=True)
        ]
    )


def _put_turn(store: Store, pack: kvpack.Pack, keep_cuts: int, keys: list[SigningKey]) -> Entry:
    return put_turn(store, pack.cut(), keep_cuts=keep_cuts, sign=signer_of(keys) if keys else None)


@click.command("get", short_help="Read a pack with its parents, every byte verified.")
@click.argument("pack_id", metavar="ID")
@store_options
@trust_option
@allow_unsigned_option
@json_option
@click.pass_obj
def get_command(
    output: Output, pack_id: str, url: str, store_key: Path | None, trust: Path | None, allow_unsigned: bool
) -> None:
    """Open the pack whose id begins with ID as an engine would, and read all of it and of its parents."""
    with contextlib.closing(
        open_store(url, store_key, trust=trust, allow_unsigned=allow_unsigned, reads=True)
    ) as store:
        entry = resolve(store, pack_id)
        stored = store.get(entry.pack_id)
        if stored is None:
            raise StoreError(
                "broken-pack", f"pack {entry.name[:12]} cannot be opened", found=entry.name, hint="run fsck"
            )
        with stored:
            raw = 0
            for reader in stored.chain.readers:
                for fault in reader.faults():
                    stored.reject()
                    raise fault.error
                raw += reader.raw_bytes
            names = list(stored.names)
    output.facts |= {"store": url, **entry_facts(entry), "packs": names, "raw_bytes": raw}
    output.fields(
        [
            ("pack id", entry.name),
            ("position", f"{count_text(entry.position)} tokens"),
            ("cuts", ", ".join(count_text(cut.position) for cut in entry.cuts)),
            ("made of", f"{len(names)} packs, {bytes_text(raw)} of state, every byte verified"),
            ("continues", entry.continues.hex() if entry.continues is not None else "nothing"),
            ("hits", count_text(entry.hits)),
        ]
    )


@click.command("longest", short_help="What the store has of a session's tokens.")
@click.argument("pack", type=FILE, required=False)
@store_options
@click.option("--model", type=FILE, metavar="DIR|FILE.gguf", help="Ask for a prompt of this model instead of a PACK.")
@click.option("--dtype", type=click.Choice(["f32", "bf16", "f16"]), help="Default: the model's own.")
@click.option("--prompt-file", type=FILE, metavar="FILE", help="The prompt, UTF-8 text; - is stdin.")
@click.option("--chat", is_flag=True, help="The prompt is one user message for the model's chat template.")
@click.option("--system-file", type=FILE, metavar="FILE", help="With --chat: the system's words, before the prompt.")
@click.option("--only-cuts", is_flag=True, help="Only positions that are cuts, where the claim can be BITWISE.")
@json_option
@click.pass_obj
def longest_command(
    output: Output,
    pack: Path | None,
    url: str,
    store_key: Path | None,
    model: Path | None,
    dtype: str | None,
    prompt_file: Path | None,
    chat: bool,
    system_file: Path | None,
    only_cuts: bool,
) -> None:
    """Say how much of a session's tokens a store can restore: of PACK's own, or of a prompt of --model.

    Nothing is installed, and no hit is counted.
    """
    if (pack is None) == (model is None or prompt_file is None):
        raise UsageError("usage", "give a PACK, or --model and --prompt-file")
    if system_file is not None and not chat:
        raise UsageError("usage", "--system-file needs --chat", field="system-file")
    if pack is not None:
        tokens, identity, geometry = _of_pack(pack)
    else:
        assert model is not None
        assert prompt_file is not None
        tokens, identity, geometry = _of_model(model, dtype, prompt_file, chat, system_file)
    with contextlib.closing(open_store(url, store_key)) as store:
        hit = store.longest(tokens, identity, geometry, only_cuts=only_cuts)
    output.facts |= {
        "store": url,
        "tokens": len(tokens),
        "hit": None
        if hit is None
        else {
            "pack_id": hit.pack_id,
            "position": hit.position,
            "cut_position": hit.cut_position,
            "at_cut": hit.at_cut,
            "same_numerics": hit.same_numerics,
            "computed": len(tokens) - hit.position,
        },
    }
    if hit is None:
        output.line(f"A miss: the store has no beginning of these {count_text(len(tokens))} tokens.")
        return
    rest = len(tokens) - hit.position
    output.fields(
        [
            ("reused", f"{count_text(hit.position)} of {count_text(len(tokens))} tokens, {count_text(rest)} left"),
            ("pack", hit.pack_id.hex()),
            ("cut", count_text(hit.cut_position) + ("" if hit.at_cut else ", restored before its end")),
        ]
    )


def _of_pack(path: Path) -> tuple[Any, Identity, Geometry]:
    with kvpack.open_pack(path, allow_unsigned=True) as pack:
        if pack.manifest.parent is not None:
            raise UsageError("is-a-delta", f"{path} is a delta, which has not all of its tokens", found=str(path))
        tokens = known_tokens(pack)
        if not tokens:
            raise UsageError("no-tokens", f"{path} does not carry its tokens", field="tokens", found=str(path))
        return tokens, pack.manifest.identity, pack.manifest.geometry


def _of_model(
    model: Path, dtype: str | None, prompt_file: Path, chat: bool, system_file: Path | None
) -> tuple[Any, Identity, Geometry]:
    require_model(model)
    prompt = read_prompt(prompt_file, chat=chat)
    if system_file is not None:
        prompt = replace(prompt, system=read_prompt(system_file, chat=False).text)
    verbs = engine_module("transformers")
    loaded = verbs.load_model(model, dtype=dtype)
    cache = verbs.new_cache(loaded.model)
    identity = verbs.identify(loaded.model, loaded.tokenizer, source=loaded.source, cache=cache)
    return prompt.tokens(loaded.tokenizer), identity, verbs.describe(loaded.model)


@click.command("export", short_help="Copy a pack out of the store.")
@click.argument("pack_id", metavar="ID")
@store_options
@force_option
@click.option("--out", "-o", type=FILE, required=True, metavar="PACK", help="The pack to write.")
@json_option
@click.pass_obj
def export_command(output: Output, pack_id: str, url: str, store_key: Path | None, force: bool, out: Path) -> None:
    """Copy the pack whose id begins with ID to a file, every stored byte verified. A delta stays one."""
    require_output(out, force=force)
    with contextlib.closing(open_store(url, store_key)) as store:
        entry = resolve(store, pack_id)
        store.export(entry.pack_id, out, force=force)
    output.facts |= {"store": url, "pack": str(out), **entry_facts(entry)}
    needs = f"; a delta on {entry.parent.hex()[:12]}" if entry.parent is not None else ""
    output.line(f"{out}: {bytes_text(entry.stored_bytes)}, position {count_text(entry.position)}{needs}")
