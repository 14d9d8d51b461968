"""``kvpack install``: a pack into a model's cache, and the session goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

import kvpack
from kvpack.errors import CompatibilityError, UsageError
from kvpack.model.gate import GateReport
from kvpack.model.identity import Identity
from kvpack.pack.view import PackCut
from kvpack_cli.engine import HOST, engine_module
from kvpack_cli.geometry_file import read_geometry
from kvpack_cli.host_install import HostInstall
from kvpack_cli.options import (
    FILE,
    allow_unsigned_option,
    capacity_for,
    json_option,
    model_options,
    parents_option,
    policy_of,
    refuse_given,
    require_model,
    require_output,
    trust_option,
)
from kvpack_cli.output import Output, count_text, printable, seconds_text
from kvpack_cli.progress import Stopwatch
from kvpack_cli.proof import Proof, replay
from kvpack_cli.restore import Choice, choose, known_tokens
from kvpack_cli.texts import Prompt, common_length, excerpt, read_prompt, stop_tokens, text_of

__all__ = ["command"]

DEFAULT_NEW_TOKENS = 32


# What only one of the two kinds of engine understands, by the names of the parameters.
_OF_MODELS = (
    "model", "dtype", "max_new_tokens", "ignore_eos", "prompt_file", "chat", "cache", "override", "prove",
)  # fmt: skip
_OF_THE_HOST = ("geometry", "ring", "tensor_parallel", "replicate_heads", "append", "recapture", "codec", "force")


@click.command(
    "install",
    short_help="Put a pack into a model's cache and go on.",
    epilog="""\b
Examples:
  kvpack install session.kvpack --model ./model --trust me.key.pub
  kvpack install session.kvpack --model ./model --trust me.key.pub --dry-run
  kvpack install session.kvpack --model ./model --trust me.key.pub \\
      --prompt-file longer.txt --max-new-tokens 100 --prove
  kvpack install delta.kvpack --model ./model --trust me.key.pub --parents ./packs

\b
Without a model, in a plain cache in main memory:
  kvpack install synth.kvpack --engine host --allow-unsigned
  kvpack install synth.kvpack --engine host --allow-unsigned \\
      --geometry G.json --capacity 4096 --at 1000 --append 50 --recapture more.kvpack
  kvpack install synth.kvpack --engine host --allow-unsigned --tensor-parallel 4
""",
)
@click.argument("pack", type=FILE)
@model_options(others=(HOST,))
@trust_option
@allow_unsigned_option
@parents_option
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=0),
    default=DEFAULT_NEW_TOKENS,
    show_default=True,
    metavar="N",
    help="Decode greedily for at most N tokens; 0 only installs.",
)
@click.option("--ignore-eos", is_flag=True, help="Do not stop at the model's end token.")
@click.option(
    "--prompt-file",
    type=FILE,
    metavar="FILE",
    help="The whole prompt; what it shares with the pack is reused, the rest is prefilled. Default: the pack's own.",
)
@click.option("--chat", is_flag=True, help="The prompt is one user message for the model's chat template.")
@click.option("--cache", type=click.Choice(["dynamic", "static"]), help="Default: as it was captured.")
@click.option(
    "--capacity",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens that a static cache has room for; host: rows of growing planes, or of the rings where none grows.",
)
@click.option(
    "--at", type=click.IntRange(min=1), metavar="P", help="Reuse at most P tokens; with no prompt, end there."
)
@click.option(
    "--override",
    multiple=True,
    metavar="FIELD",
    help="Accept a different identity field (tokenizer, template, …); lowers the claim. May be repeated.",
)
@click.option("--dry-run", is_flag=True, help="Only say whether it would fit, and if not, every reason.")
@click.option("--prove", is_flag=True, help="Replay the pack's probe and compare every step's logits.")
@click.option(
    "--geometry",
    type=FILE,
    metavar="G.json",
    help="host: what the cache looks like (see synth --help). Default: the pack's own.",
)
@click.option("--ring", type=click.IntRange(min=1), metavar="N", help="host: rows of rotating rings. Default: window.")
@click.option("--tensor-parallel", type=click.IntRange(min=1), metavar="N", help="host: divide the heads over N ranks.")
@click.option("--replicate-heads", is_flag=True, help="host: more ranks than KV heads hold copies of them.")
@click.option(
    "--append", type=click.IntRange(min=1), metavar="N", help="host: go on for N tokens, of a pack that synth made."
)
@click.option("--recapture", type=FILE, metavar="OUT", help="host: capture the cache again, to a new pack.")
@click.option(
    "--codec",
    type=click.Choice(["raw", "zstd", "split"]),
    default="split",
    show_default=True,
    help="host: of the pack that --recapture writes.",
)
@click.option("--force", is_flag=True, help="host: --recapture replaces an existing file.")
@json_option
@click.pass_obj
@click.pass_context
def command(
    ctx: click.Context,
    output: Output,
    pack: Path,
    engine: str,
    model: Path | None,
    dtype: str | None,
    trust: Path | None,
    allow_unsigned: bool,
    parents: Path | None,
    max_new_tokens: int,
    ignore_eos: bool,
    prompt_file: Path | None,
    chat: bool,
    cache: str | None,
    capacity: int | None,
    at: int | None,
    override: tuple[str, ...],
    dry_run: bool,
    prove: bool,
    geometry: Path | None,
    ring: int | None,
    tensor_parallel: int | None,
    replicate_heads: bool,
    append: int | None,
    recapture: Path | None,
    codec: str,
    force: bool,
) -> None:
    """Put the session of PACK into a fresh cache of a model, and decode from there.

    The pack is held to the model before anything moves. What fits is restored bit for bit (claim BITWISE); if something
    that can change the last bits differs, such as the number of threads, the claim is COMPATIBLE and names it.

    With --engine host there is no model: the state goes into a plain cache in main memory, under the identity that
    the pack names, and the command reports where every layer's rows lie and a digest of every plane's bytes.
    """
    policy = policy_of(trust)
    watch = Stopwatch()

    def opened() -> kvpack.Pack:
        with watch.stage("open", f"opening {pack.name}"):
            return kvpack.open_pack(pack, trust=policy, allow_unsigned=allow_unsigned, parents=parents)

    if engine == HOST:
        refuse_given(ctx, _OF_MODELS, "needs a model, and the host engine has none")
        if replicate_heads and tensor_parallel is None:
            raise UsageError("usage", "--replicate-heads needs --tensor-parallel", field="replicate-heads")
        described = read_geometry(geometry) if geometry is not None else None
        if recapture is not None:
            require_output(recapture, force=force)
        with opened() as source:
            host = HostInstall(
                output,
                watch,
                source,
                described or source.manifest.geometry,
                capacity=capacity,
                ring=ring,
                at=at,
                append=append or 0,
                ranks=tensor_parallel,
                replicate_heads=replicate_heads,
            )
            host.run(dry_run=dry_run, recapture=recapture, codec=codec, force=force)
        return
    refuse_given(ctx, _OF_THE_HOST, "belongs to --engine host")
    if model is None:
        raise click.MissingParameter(ctx=ctx, param_hint="'--model'", param_type="option")
    if chat and prompt_file is None:
        raise UsageError("usage", "--chat needs --prompt-file", field="chat")
    with opened() as source:
        if prove and source.manifest.probe is None:
            raise UsageError(
                "no-probe", "the pack carries no probe to replay", field="probe", hint="capture it with --continue N"
            )
        _require_fields(source, override)
        require_model(model)
        prompt = read_prompt(prompt_file, chat=chat) if prompt_file is not None else None
        session = _Session(output, watch, source, engine_module(engine), frozenset(override))
        session.choose_cache(cache, capacity)
        session.load(model, dtype)
        session.plan(prompt, at, max_new_tokens)
        if dry_run:
            session.answer()
            return
        session.require()
        session.restore()
        session.go_on(max_new_tokens, ignore_eos=ignore_eos)
        if prove:
            session.prove()
        session.summarise()


def _require_fields(pack: kvpack.Pack, names: Sequence[str]) -> None:
    """A misspelt field must not pass for one that was accepted."""
    known = pack.manifest.identity.compatibility
    for name in names:
        if name not in known:
            raise UsageError(
                "unknown-field",
                f"the pack's identity has no field {name!r} to override",
                field="override",
                expected=", ".join(known),
                found=name,
                hint=f"its fields are {', '.join(known)}",
            )


@dataclass
class _Session:
    """One install from the open pack to the text, step by step; each step adds its facts to the output."""

    output: Output
    watch: Stopwatch
    pack: kvpack.Pack
    engine: Any
    override: frozenset[str]
    cache_kind: str = "dynamic"
    capacity: int | None = None
    model: Any = None
    tokenizer: Any = None
    identity: Identity = field(default_factory=Identity)
    length: int = 0
    parted: str | None = None
    proof: Proof | None = None
    text: str | None = None

    def choose_cache(self, kind: str | None, capacity: int | None) -> None:
        """The kind that was asked for, or the one that the session was captured with."""
        captured = str(self.pack.manifest.identity.numerics.get("cache_class"))
        self.cache_kind = kind or (captured if captured in ("dynamic", "static") else "dynamic")
        self.capacity = capacity
        if self.cache_kind == "dynamic":
            capacity_for(self.cache_kind, capacity, 0)

    def load(self, path: Path, dtype: str | None) -> None:
        """The model and who it is."""
        with self.watch.stage("load_model", f"loading {path.name}"):
            loaded = self.engine.load_model(path, dtype=dtype)
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        with self.watch.stage("identify", "hashing the model"):
            self.identity = self.engine.identify(self.model, self.tokenizer, source=loaded.source)

    def plan(self, prompt: Prompt | None, limit: int | None, new_tokens: int) -> None:
        """Choose the cut and the position, and hold them to the model."""
        with self.watch.stage("gate", "reading the pack's tokens"):
            stored = known_tokens(self.pack)
        wanted = prompt.tokens(self.tokenizer) if prompt is not None else None
        self.choice = self._choose(stored, wanted, limit, needs_logits=new_tokens > 0)
        self.length = self.choice.at + len(self.choice.rest) + new_tokens
        if self.cache_kind == "static" and self.capacity is None:
            found = self.pack.manifest.identity.numerics.get("cache_capacity")
            self.capacity = found if isinstance(found, int) and found >= self.length else self.length
        with self.watch.stage("gate", "holding the pack to the model"):
            self.report: GateReport = self.engine.plan(self.choice.cut, self.model, at=self.choice.at, **self._how)
        self.output.facts |= {
            "pack": str(self.pack.reader.path),
            "pack_id": self.pack.reader.pack_id,
            "signatures": self.pack.verification.facts(),
            "position": self.choice.at,
            "cache": self.cache_kind,
            "capacity": self.capacity,
            "claim": self.report.claim.value,
            "lowered": list(self.report.lowered),
            "notes": list(self.report.notes),
        }

    def _choose(
        self, stored: Sequence[int], wanted: Sequence[int] | None, limit: int | None, *, needs_logits: bool
    ) -> Choice:
        try:
            choice = choose(self.pack, stored, wanted, limit=limit, needs_logits=needs_logits)
        except CompatibilityError as error:
            if error.code == "prompt-parts" and wanted is not None and stored:
                error.message = f"{error.message} ({self._around(stored, wanted)})"
            raise
        if wanted is not None:
            at = common_length(stored, wanted)
            if at < min(len(stored), len(wanted)):
                self.parted = f"at token {count_text(at)}: {self._around(stored, wanted)}"
        return choice

    def _around(self, stored: Sequence[int], wanted: Sequence[int]) -> str:
        at = common_length(stored, wanted)
        here, there = excerpt(self.tokenizer, wanted, at), excerpt(self.tokenizer, stored, at)
        return f"prompt {here}, pack {there}"

    @property
    def _how(self) -> dict[str, Any]:
        return {
            "cache": self.cache_kind,
            "capacity": self.capacity,
            "identity": self.identity,
            "tokenizer": self.tokenizer,
            "override": self.override,
        }

    def answer(self) -> None:
        """The dry run's answer; what would not fit is the first refusal's error."""
        refusals = self.report.refusals
        self.output.facts |= {"fits": not refusals, "refusals": [refusal.facts() for refusal in refusals]}
        if not refusals:
            self.require()
            computed = len(self.choice.rest)
            self.output.line(
                f"It fits: {count_text(self.choice.at)} tokens reused, {count_text(computed)} computed;"
                f" claim {self._claim_text}"
            )
            self._say_notes()
            return
        self.output.line(f"It would not fit, for {len(refusals)} reason{'s' if len(refusals) > 1 else ''}:")
        for reason in _grouped(refusals):
            self.output.line(f"  {printable(reason)}")
        self.require()

    def require(self) -> None:
        """Raise the refusal that explains the others, and what leaves no room for the new tokens."""
        if self.report.refusals:
            raise _leading(self.report.refusals)
        capacity_for(self.cache_kind, self.capacity, self.length)

    @property
    def _claim_text(self) -> str:
        lowered = self.report.lowered
        return f"{self.report.claim.value}, lowered by {', '.join(lowered)}" if lowered else self.report.claim.value

    def _say_notes(self) -> None:
        self.output.fields([("note", note) for note in self.report.notes])

    def _install(self, cut: PackCut, at: int, report: GateReport, stage: str) -> Any:
        total = cut.bytes_to_read(report.need)
        with self.watch.stage(stage, "reading the state") as progress:
            done = 0

            def on_bytes(count: int) -> None:
                nonlocal done
                done += count
                progress(min(done, total), total)

            cut.on_bytes = on_bytes
            return self.engine.install(cut, self.model, at=at, **self._how)

    def prove(self) -> None:
        """Replay the probe in an install of its own; under BITWISE a step that differs is an error."""
        probe = self.pack.manifest.probe
        assert probe is not None
        cut = self.pack.cut(probe.position)
        report: GateReport = self.engine.plan(cut, self.model, at=probe.position, **self._how)
        report.require()
        installed = self._install(cut, probe.position, report, "prove")
        with self.watch.stage("prove", f"replaying {len(probe.tokens)} steps") as progress:
            proof = replay(self.engine, self.model, installed, probe, progress)
        self.output.facts["proof"] = proof.facts()
        proof.require(report.claim)
        self.proof = proof

    def restore(self) -> None:
        """Install, and feed what the pack lacks; the last logits are there afterwards if they are needed."""
        self.installed = self._install(self.choice.cut, self.choice.at, self.report, "install")
        self.logits = None if self.choice.rest else self.installed.logits
        if self.choice.rest:
            with self.watch.stage("prefill", f"prefilling {count_text(len(self.choice.rest))} tokens"):
                self.logits = self.engine.prefill(self.model, self.choice.rest, self.installed.cache)

    def go_on(self, steps: int, *, ignore_eos: bool) -> None:
        """Decode greedily; without new tokens the session only stands ready."""
        tokens: list[int] = []
        digests: list[bytes] = []
        if steps:
            with self.watch.stage("decode", f"decoding up to {steps} tokens") as progress:

                def on_token(token: int) -> None:
                    tokens.append(token)
                    progress(len(tokens), steps)

                eos = () if ignore_eos else stop_tokens(self.model)
                decoded = self.engine.decode(
                    self.model, self.installed.cache, self.logits, steps, eos=eos, on_token=on_token
                )
                digests = list(decoded.digests)
            self.text = text_of(self.tokenizer, tokens)
        self.output.facts |= {"tokens": tokens, "text": self.text, "logits_digests": digests}

    def summarise(self) -> None:
        """The figures and the text."""
        seconds = self.watch.facts()
        # What a process that has the model loaded waits for; the model is loaded once for many sessions.
        first = self.watch.total("open", "gate", "install", "prefill")
        self.output.facts |= {
            "reused": self.choice.at,
            "computed": len(self.choice.rest),
            "prompt_parts": self.parted,
            "seconds": {**seconds, "first_token": round(first, 6)},
        }
        rows = [
            ("reused", f"{count_text(self.choice.at)} tokens, {count_text(len(self.choice.rest))} computed"),
            ("claim", self._claim_text),
            ("signatures", self.pack.verification.summary),
            ("time", ", ".join(f"{name.replace('_', ' ')} {seconds_text(s)}" for name, s in seconds.items())),
            ("first token", f"{seconds_text(first)} (open, gate, install, prefill)"),
        ]
        if self.parted:
            rows.insert(1, ("parted", self.parted))
        if self.proof:
            rows.insert(-2, ("proof", self.proof.sentence))
        rows += [("note", note) for note in self.report.notes]
        self.output.fields(rows)
        if self.text is not None:
            self.output.text("continued", self.text)


def _leading(refusals: Sequence[CompatibilityError]) -> CompatibilityError:
    """The refusal to act on first: in another element type or model, every plane differs as well."""
    order = ("scalar", "architecture", "weights")
    first = min(refusals, key=lambda refusal: order.index(refusal.field) if refusal.field in order else len(order))
    more = len(refusals) - 1
    return CompatibilityError(
        first.code,
        first.message + (f" ({more} more reason{'s' if more > 1 else ''})" if more else ""),
        layer=first.layer,
        plane=first.plane,
        field=first.field,
        expected=first.expected,
        found=first.found,
        hint=f"load the model with --dtype {first.expected}" if first.field == "scalar" else first.hint,
    )


def _grouped(refusals: Sequence[CompatibilityError]) -> list[str]:
    """One line for what differs in the same way in many planes."""
    groups: dict[str, list[str]] = {}
    for refusal in refusals:
        place = f"{refusal.plane}: "
        inside = refusal.plane is not None and refusal.message.startswith(place)
        groups.setdefault(refusal.message.removeprefix(place) if inside else refusal.message, []).append(
            refusal.plane if inside and refusal.plane else ""
        )
    return [
        reason if not places[0] else f"{places[0]}{f' and {len(places) - 1} more' if places[1:] else ''}: {reason}"
        for reason, places in groups.items()
    ]
