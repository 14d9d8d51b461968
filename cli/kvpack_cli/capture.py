"""``kvpack capture``: prefill a prompt, and keep the session as a pack."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

import kvpack
from kvpack.errors import UsageError
from kvpack.pack.writer import WrittenPack
from kvpack.trust import SigningKey, load_private_key
from kvpack_cli.engine import engine_module
from kvpack_cli.options import (
    FILE,
    cache_options,
    capacity_for,
    json_option,
    model_options,
    require_model,
    require_output,
)
from kvpack_cli.output import Output, bytes_text, count_text, ratio_text, seconds_text
from kvpack_cli.progress import Stopwatch
from kvpack_cli.texts import Prompt, read_prompt, stop_tokens, text_of

__all__ = ["command"]


@click.command(
    "capture",
    short_help="Prefill a prompt and keep the session as a pack.",
    epilog="""\b
Examples:
  kvpack capture --model ./model --prompt-file prompt.txt -o session.kvpack
  kvpack capture --model m.gguf --dtype bf16 --prompt-file - --chat \\
      --sign me.key --continue 32 -o session.kvpack
""",
)
@model_options
@click.option("--prompt-file", type=FILE, required=True, metavar="FILE", help="The prompt, UTF-8 text; - is stdin.")
@click.option("--chat", is_flag=True, help="The prompt is one user message for the model's chat template.")
@cache_options
@click.option("--codec", type=click.Choice(["raw", "zstd", "split"]), default="split", show_default=True)
@click.option("--sign", type=FILE, multiple=True, metavar="KEY", help="Sign with this private key; may be repeated.")
@click.option(
    "--continue",
    "steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Go on for N tokens after the cut, and put the digest of every step's logits into the pack as its probe.",
)
@click.option("--ignore-eos", is_flag=True, help="With --continue: do not stop at the model's end token.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option("--out", "-o", type=FILE, required=True, metavar="PACK", help="The pack to write.")
@json_option
@click.pass_obj
def command(
    output: Output,
    engine: str,
    model: Path,
    dtype: str | None,
    prompt_file: Path,
    chat: bool,
    cache: str,
    capacity: int | None,
    codec: str,
    sign: tuple[Path, ...],
    steps: int | None,
    ignore_eos: bool,
    force: bool,
    out: Path,
) -> None:
    """Prefill a prompt and write the session's state to a pack.

    The whole prompt is read in one forward, the state is copied at its end, and the copy is written. With --continue,
    the same process goes on, so that an install can later prove that it goes on in the same way (install --prove).
    """
    if ignore_eos and steps is None:
        raise UsageError("usage", "--ignore-eos needs --continue", field="ignore-eos")
    require_output(out, force=force)
    require_model(model)
    keys = [load_private_key(path) for path in sign]
    prompt = read_prompt(prompt_file, chat=chat)
    if cache == "dynamic":
        capacity_for(cache, capacity, 0)
    watch = Stopwatch()
    cut, probe_text = _capture(
        output, watch, engine_module(engine), model, dtype, prompt, cache, capacity, steps, ignore_eos
    )
    with watch.stage("write", f"writing {out.name}") as progress:
        written = kvpack.save(cut, out, codec=codec, sign=keys, force=force, progress=progress)
    _report(output, watch, cut, written, keys, probe_text)


def _capture(
    output: Output,
    watch: Stopwatch,
    engine: Any,
    path: Path,
    dtype: str | None,
    prompt: Prompt,
    cache_kind: str,
    capacity: int | None,
    steps: int | None,
    ignore_eos: bool,
) -> tuple[kvpack.Cut, str | None]:
    """The cut at the end of the prompt, with its probe, and the continuation's text."""
    with watch.stage("load_model", f"loading {path.name}"):
        loaded = engine.load_model(path, dtype=dtype)
    tokens = prompt.tokens(loaded.tokenizer)
    capacity = capacity_for(cache_kind, capacity, len(tokens) + (steps or 0))
    with watch.stage("identify", "hashing the model"):
        identity = engine.identify(loaded.model, loaded.tokenizer, source=loaded.source)
    cache = engine.new_cache(loaded.model, cache_kind, capacity)
    with watch.stage("prefill", f"prefilling {count_text(len(tokens))} tokens"):
        logits = engine.prefill(loaded.model, tokens, cache)
    with watch.stage("capture", "copying the state"):
        cut: kvpack.Cut = engine.capture(
            loaded.model,
            cache,
            tokens,
            loaded.tokenizer,
            logits=logits,
            identity=identity,
            provenance={"model": path.resolve().name},
        )
    if steps is None:
        return cut, None
    with watch.stage("continue", f"continuing for {steps} tokens") as progress:
        fed: list[int] = []

        def on_token(token: int) -> None:
            fed.append(token)
            progress(len(fed), steps)

        eos = () if ignore_eos else stop_tokens(loaded.model)
        decoded = engine.decode(loaded.model, cache, logits, steps, eos=eos, on_token=on_token)
    return replace(cut, probe=decoded.probe(len(tokens))), text_of(loaded.tokenizer, decoded.tokens)


def _report(
    output: Output,
    watch: Stopwatch,
    cut: kvpack.Cut,
    written: WrittenPack,
    keys: list[SigningKey],
    text: str | None,
) -> None:
    position, probe = cut.record.position, cut.probe
    state_id = written.state_ids[position].hex()
    output.facts |= {
        "pack": str(written.path),
        "pack_id": written.pack_id,
        "state_id": state_id,
        "position": position,
        "file_bytes": written.file_bytes,
        "raw_bytes": written.raw_bytes,
        "stored_bytes": written.stored_bytes,
        "signed_by": [key.public.fingerprint for key in keys],
        "tokens": list(probe.tokens) if probe else [],
        "text": text,
        "logits_digests": list(probe.digests) if probe else [],
        "seconds": watch.facts(),
    }
    ratio = ratio_text(written.raw_bytes, written.file_bytes)
    rows = [
        ("pack", f"{written.path}"),
        ("position", f"{count_text(position)} tokens"),
        ("size", f"{bytes_text(written.file_bytes)} for {bytes_text(written.raw_bytes)} of state ({ratio})"),
        ("signed by", ", ".join(key.public.fingerprint for key in keys) or "nobody (sign with --sign KEY)"),
        ("pack id", written.pack_id.hex()),
        ("state id", state_id),
        ("time", ", ".join(f"{name.replace('_', ' ')} {seconds_text(s)}" for name, s in watch.seconds.items())),
    ]
    if probe:
        rows.append(("probe", f"{len(probe.tokens)} steps, the digest of every step's logits"))
    output.fields(rows)
    if text is not None:
        output.text("continued", text)
