"""``kvpack capture``: prefill a prompt, and keep the session as a pack."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

import kvpack
from kvpack.errors import UsageError
from kvpack.pack.writer import WrittenPack
from kvpack.trust import SigningKey, load_private_key
from kvpack_cli.continuation import Continuation, chunked, continuation, without_growing_rows
from kvpack_cli.engine import engine_module
from kvpack_cli.options import (
    FILE,
    allow_unsigned_option,
    cache_options,
    capacity_for,
    codec_option,
    force_option,
    json_option,
    model_options,
    parents_option,
    policy_of,
    positions_option,
    refuse_given,
    require_ascending,
    require_model,
    require_output,
    sign_option,
    trust_option,
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

\b
One pack that restores after 1,000, after 2,000 and after all tokens:
  kvpack capture --model ./model --prompt-file prompt.txt --cut-at 1000,2000 -o cuts.kvpack

\b
Only what a longer prompt adds to a pack that is there:
  kvpack capture --model ./model --prompt-file longer.txt \\
      --parent packs/session.kvpack --trust me.key.pub --sign me.key -o packs/longer.kvpack
  kvpack install packs/longer.kvpack --model ./model --trust me.key.pub --parents packs
""",
)
@model_options()
@click.option("--prompt-file", type=FILE, required=True, metavar="FILE", help="The prompt, UTF-8 text; - is stdin.")
@click.option("--chat", is_flag=True, help="The prompt is one user message for the model's chat template.")
@cache_options
@positions_option("--cut-at", metavar="N,…", help="Also keep the state after N tokens: the pack restores at each.")
@click.option("--parent", type=FILE, metavar="PACK", help="Restore this pack, and store only what the prompt adds.")
@parents_option
@trust_option
@allow_unsigned_option
@codec_option
@sign_option
@click.option(
    "--continue",
    "steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Go on for N tokens after the cut, and put the digest of every step's logits into the pack as its probe.",
)
@click.option("--ignore-eos", is_flag=True, help="With --continue: do not stop at the model's end token.")
@force_option
@click.option("--out", "-o", type=FILE, required=True, metavar="PACK", help="The pack to write.")
@json_option
@click.pass_obj
@click.pass_context
def command(
    ctx: click.Context,
    output: Output,
    engine: str,
    model: Path,
    dtype: str | None,
    prompt_file: Path,
    chat: bool,
    cache: str,
    capacity: int | None,
    cut_at: tuple[int, ...],
    parent: Path | None,
    parents: Path | None,
    trust: Path | None,
    allow_unsigned: bool,
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

    With --cut-at the prompt is read in pieces that end at the given positions, and with --parent from the parent's
    position on. Where a prefill was divided can change the last bits, so the pack records it (numerics field prefill).
    """
    if ignore_eos and steps is None:
        raise UsageError("usage", "--ignore-eos needs --continue", field="ignore-eos")
    if parent is None:
        refuse_given(ctx, ("parents", "trust", "allow_unsigned"), "is about the pack that --parent names")
    require_output(out, force=force)
    require_model(model)
    keys = [load_private_key(path) for path in sign]
    prompt = read_prompt(prompt_file, chat=chat)
    if cache == "dynamic":
        capacity_for(cache, capacity, 0)
    require_ascending(cut_at, 0, max(cut_at, default=0), "cut-at")
    watch = Stopwatch()
    with contextlib.ExitStack() as opened:
        before = None
        if parent is not None:
            with watch.stage("open", f"opening {parent.name}"):
                pack = kvpack.open_pack(parent, trust=policy_of(trust), allow_unsigned=allow_unsigned, parents=parents)
            before = opened.enter_context(pack)
        session = _Session(output, watch, engine_module(engine), cache, before)
        session.load(model, dtype, prompt, capacity, cut_at, steps or 0)
        session.prefill()
        if steps is not None:
            session.go_on(steps, ignore_eos=ignore_eos)
        with watch.stage("write", f"writing {out.name}") as progress:
            written = kvpack.save(
                session.cuts,
                out,
                parent=session.before.cut if session.before is not None else None,
                codec=codec,
                sign=keys,
                force=force,
                progress=progress,
            )
    session.report(written, keys)


@dataclass
class _Session:
    """One capture from the model to the report, step by step."""

    output: Output
    watch: Stopwatch
    engine: Any
    cache_kind: str
    parent: kvpack.Pack | None
    before: Continuation | None = None
    text: str | None = None

    def load(
        self,
        path: Path,
        dtype: str | None,
        prompt: Prompt,
        capacity: int | None,
        cut_at: tuple[int, ...],
        steps: int,
    ) -> None:
        """The model, who it is, the prompt's tokens, and where they will be cut."""
        with self.watch.stage("load_model", f"loading {path.name}"):
            self.loaded = self.engine.load_model(path, dtype=dtype)
        self.tokens = prompt.tokens(self.loaded.tokenizer)
        self.capacity = capacity_for(self.cache_kind, capacity, len(self.tokens) + steps)
        if self.parent is not None:
            self.before = continuation(self.parent, self.tokens)
        begin = self.before.position if self.before is not None else 0
        self.positions = require_ascending(cut_at, begin, len(self.tokens), "cut-at")
        with self.watch.stage("identify", "hashing the model"):
            identity = self.engine.identify(self.loaded.model, self.loaded.tokenizer, source=self.loaded.source)
        divided = self.before.boundaries if self.before is not None else ()
        self.identity = chunked(identity, (*divided, *self.positions[:-1]))
        self.provenance = {"model": path.resolve().name}

    def prefill(self) -> None:
        """Read the prompt, or what it adds to the parent, and copy the state at every position."""
        begin, self.cache = 0, None
        if self.before is not None:
            begin, self.cache = self.before.position, self._restored(self.before)
        if self.cache is None:
            self.cache = self.engine.new_cache(self.loaded.model, self.cache_kind, self.capacity)
        self.cuts: list[kvpack.Cut] = []
        for end in self.positions:
            with self.watch.stage("prefill", f"prefilling {count_text(end - begin)} tokens"):
                self.logits = self.engine.prefill(self.loaded.model, self.tokens[begin:end], self.cache)
            with self.watch.stage("capture", "copying the state"):
                cut = self.engine.capture(
                    self.loaded.model,
                    self.cache,
                    self.tokens[:end],
                    self.loaded.tokenizer,
                    logits=self.logits,
                    identity=self.identity,
                    provenance=self.provenance,
                )
                self.cuts.append(cut if end == len(self.tokens) else without_growing_rows(cut))
            begin = end

    def _restored(self, before: Continuation) -> Any:
        with self.watch.stage("restore", "restoring the parent"):
            installed = self.engine.install(
                before.cut,
                self.loaded.model,
                cache=self.cache_kind,
                capacity=self.capacity,
                identity=self.identity,
                tokenizer=self.loaded.tokenizer,
            )
        if installed.report.lowered:
            self.provenance["parent_lowered"] = ", ".join(installed.report.lowered)
        return installed.cache

    def go_on(self, steps: int, *, ignore_eos: bool) -> None:
        """Continue behind the last cut; the probe belongs to it."""
        fed: list[int] = []
        with self.watch.stage("continue", f"continuing for {steps} tokens") as progress:

            def on_token(token: int) -> None:
                fed.append(token)
                progress(len(fed), steps)

            eos = () if ignore_eos else stop_tokens(self.loaded.model)
            decoded = self.engine.decode(self.loaded.model, self.cache, self.logits, steps, eos=eos, on_token=on_token)
        self.cuts[-1] = replace(self.cuts[-1], probe=decoded.probe(len(self.tokens)))
        self.text = text_of(self.loaded.tokenizer, decoded.tokens)

    def report(self, written: WrittenPack, keys: list[SigningKey]) -> None:
        """What was written."""
        position, probe = self.positions[-1], self.cuts[-1].probe
        state_ids = {at: state_id.hex() for at, state_id in written.state_ids.items()}
        before = self.before
        self.output.facts |= {
            "pack": str(written.path),
            "pack_id": written.pack_id,
            "state_id": state_ids[position],
            "position": position,
            "cuts": [{"position": at, "state_id": state_id} for at, state_id in state_ids.items()],
            "parent": before.facts() if before is not None else None,
            "file_bytes": written.file_bytes,
            "raw_bytes": written.raw_bytes,
            "stored_bytes": written.stored_bytes,
            "signed_by": [key.public.fingerprint for key in keys],
            "tokens": list(probe.tokens) if probe else [],
            "text": self.text,
            "logits_digests": list(probe.digests) if probe else [],
            "seconds": self.watch.facts(),
        }
        ratio = ratio_text(written.raw_bytes, written.file_bytes)
        rows = [
            ("pack", f"{written.path}"),
            ("position", f"{count_text(position)} tokens"),
            ("size", f"{bytes_text(written.file_bytes)} for {bytes_text(written.raw_bytes)} of state ({ratio})"),
            ("signed by", ", ".join(key.public.fingerprint for key in keys) or "nobody (sign with --sign KEY)"),
            ("pack id", written.pack_id.hex()),
            ("state id", state_ids[position]),
            *(("cut", f"{count_text(at)}, state id {state_ids[at]}") for at in self.positions[:-1]),
            (
                "time",
                ", ".join(f"{name.replace('_', ' ')} {seconds_text(s)}" for name, s in self.watch.seconds.items()),
            ),
        ]
        if before is not None:
            computed = count_text(position - before.position)
            reused = f"{count_text(before.position)} tokens of {before.cut.reader.path}, {computed} computed"
            rows.insert(2, ("continues", reused))
        if probe:
            rows.append(("probe", f"{len(probe.tokens)} steps, the digest of every step's logits"))
        self.output.fields(rows)
        if self.text is not None:
            self.output.text("continued", self.text)
