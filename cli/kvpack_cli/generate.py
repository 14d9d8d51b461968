"""``kvpack generate``: a model goes on from a prompt, of which a store may have the beginning."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kvpack.api import signer_of
from kvpack.errors import UsageError
from kvpack.trust import load_private_key
from kvpack_cli.engine import engine_module
from kvpack_cli.options import (
    FILE,
    allow_unsigned_option,
    cache_options,
    capacity_for,
    codec_option,
    json_option,
    model_options,
    positions_option,
    require_model,
    sign_option,
    trust_option,
)
from kvpack_cli.output import Output, bytes_text, count_text, printable, seconds_text
from kvpack_cli.progress import Stopwatch
from kvpack_cli.store_access import open_store, store_options
from kvpack_cli.texts import Prompt, read_prompt, stop_tokens, text_of

__all__ = ["command"]


@click.command(
    "generate",
    short_help="Go on from a prompt, reusing what a store has of it.",
    epilog="""\b
Examples: the second command reuses the system's words that the first one computed
  kvpack generate --store file:/tmp/store --model ./model --chat \\
      --system-file manual.txt --prompt-file question1.txt
  kvpack generate --store file:/tmp/store --model ./model --chat \\
      --system-file manual.txt --prompt-file question2.txt

\b
A cut of one's own, where prompts that are not chats will part:
  kvpack generate --store file:/tmp/store --model ./model --prompt-file p.txt --cut-at 3000
""",
)
@store_options
@model_options()
@click.option("--prompt-file", type=FILE, required=True, metavar="FILE", help="The prompt, UTF-8 text; - is stdin.")
@click.option("--chat", is_flag=True, help="The prompt is one user message for the model's chat template.")
@click.option("--system-file", type=FILE, metavar="FILE", help="With --chat: the system's words, before the prompt.")
@cache_options
@positions_option("--cut-at", metavar="N,…", help="Also keep the state after N tokens, for good.")
@click.option(
    "--keep-cuts",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Of a conversation's turns the last N cuts outlive a collection (store gc).",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=0),
    default=32,
    show_default=True,
    metavar="N",
    help="Decode greedily for at most N tokens; 0 only prefills.",
)
@click.option("--ignore-eos", is_flag=True, help="Do not stop at the model's end token.")
@trust_option
@allow_unsigned_option
@codec_option
@sign_option
@json_option
@click.pass_obj
def command(
    output: Output,
    url: str,
    store_key: Path | None,
    engine: str,
    model: Path,
    dtype: str | None,
    prompt_file: Path,
    chat: bool,
    system_file: Path | None,
    cache: str,
    capacity: int | None,
    cut_at: tuple[int, ...],
    keep_cuts: int,
    max_new_tokens: int,
    ignore_eos: bool,
    trust: Path | None,
    allow_unsigned: bool,
    codec: str,
    sign: tuple[Path, ...],
) -> None:
    """Let a model go on from a prompt. The deepest prefix of it that the store has is restored, only the rest is
    computed, and its state is stored: at the end of the system's words, one token before the end, and with --cut-at.

    Packs that the store's own folder holds are believed; with --trust, or for any other store, only what is signed. A
    store that fails, or a damaged pack, is a warning, and the tokens are computed.
    """
    if system_file is not None and not chat:
        raise UsageError("usage", "--system-file needs --chat", field="system-file")
    require_model(model)
    keys = [load_private_key(path) for path in sign]
    prompt = read_prompt(prompt_file, chat=chat)
    if system_file is not None:
        prompt = replace(prompt, system=read_prompt(system_file, chat=False).text)
    if cache == "dynamic":
        capacity_for(cache, capacity, 0)
    watch = Stopwatch()
    warnings: list[str] = []
    with contextlib.ExitStack() as opened, _collected(warnings):
        store = open_store(
            url, store_key, trust=trust, allow_unsigned=allow_unsigned, sign=keys, create=True, reads=True
        )
        opened.callback(store.close)
        verbs = engine_module(engine)
        with watch.stage("load_model", f"loading {model.name}"):
            loaded = verbs.load_model(model, dtype=dtype)
        tokens, length = _tokens(verbs, prompt, loaded.tokenizer)
        with watch.stage("identify", "hashing the model"):
            identity = verbs.identify(loaded.model, loaded.tokenizer, source=loaded.source)
        with watch.stage("generate", f"going on from {count_text(length)} tokens"):
            made = verbs.generate(
                loaded.model,
                tokens,
                store=store,
                tokenizer=loaded.tokenizer,
                max_new_tokens=max_new_tokens,
                cuts=cut_at,
                keep_cuts=keep_cuts,
                cache=cache,
                capacity=capacity_for(cache, capacity, length + max_new_tokens),
                identity=identity,
                codec=codec,
                sign=signer_of(keys) if keys else None,
                eos=() if ignore_eos else stop_tokens(loaded.model),
            )
    seconds = {**watch.facts(), **{name: round(spent, 6) for name, spent in made.seconds.items()}}
    seconds["identify"] = round(watch.seconds["identify"] + made.seconds["identify"], 6)
    text = text_of(loaded.tokenizer, made.tokens)
    output.facts |= _facts(url, made, seconds, text, warnings)
    _show(output, made, seconds, text, warnings)


def _tokens(verbs: Any, prompt: Prompt, tokenizer: Any) -> tuple[Any, int]:
    plain = prompt.tokens(tokenizer)
    return (verbs.chat_tokens(tokenizer, prompt.messages) if prompt.chat else plain), len(plain)


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


@contextlib.contextmanager
def _collected(lines: list[str]) -> Iterator[None]:
    """What the library warns of, to be said with the result."""
    log, handler = logging.getLogger("kvpack"), _Lines(lines)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def _facts(url: str, made: Any, seconds: dict[str, float], text: str | None, warnings: list[str]) -> dict[str, object]:
    return {
        "store": url,
        "reused": made.reused,
        "computed": made.computed,
        "pack_id": made.pack_id,
        "claim": made.claim.value if made.claim is not None else None,
        "lowered": list(made.lowered),
        "recomputed": made.recomputed,
        "stored": [
            {
                "pack_id": entry.pack_id,
                "position": entry.position,
                "stored_bytes": entry.stored_bytes,
                "chain": entry.chain,
                "new": entry.new,
            }
            for entry in made.stored
        ],
        "tokens": list(made.tokens),
        "text": text,
        "logits_digests": list(made.digests),
        "warnings": warnings,
        "seconds": seconds,
    }


def _show(output: Output, made: Any, seconds: dict[str, float], text: str | None, warnings: list[str]) -> None:
    restore = sum(seconds.get(name, 0.0) for name in ("find", "restore"))
    prefill = seconds.get("prefill", 0.0)
    reused = f"{count_text(made.reused)} tokens in {seconds_text(restore)}"
    if made.claim is not None:
        lowered = f", lowered by {', '.join(made.lowered)}" if made.lowered else ""
        reused += f", claim {made.claim.value}{lowered}"
    kept = [f"{count_text(entry.position)} ({bytes_text(entry.stored_bytes)})" for entry in made.stored]
    names = ("load_model", "identify", "find", "restore", "prefill", "capture", "store", "decode")
    rows = [
        ("reused", reused),
        ("computed", f"{count_text(made.computed)} tokens in {seconds_text(prefill)}"),
        ("stored", f"cuts at {', '.join(kept)}" if kept else "nothing new"),
        ("time", ", ".join(f"{n.replace('_', ' ')} {seconds_text(seconds[n])}" for n in names if n in seconds)),
    ]
    output.fields([*rows, *(("warning", warning) for warning in warnings)])
    if made.recomputed is not None and not output.as_json:
        click.echo(printable(f"kvpack: restored state was COMPUTED AGAIN: {made.recomputed}"), err=True)
    if text is not None:
        output.text("continued", text)
