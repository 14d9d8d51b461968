"""Packs, keys and tiny models for the command's tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import kvpack
from kvpack.model.geometry import Geometry
from kvpack.model.snapshot import Probe
from kvpack.trust import SigningKey, save_key
from tests import synthetic
from tests.cli.commands import Here
from tests.contract.conftest import server, url

__all__ = ["server", "url"]

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SMALL = Geometry((synthetic.full(), synthetic.sliding()))
SEVERAL_TILES = Geometry((synthetic.full(8, 128), synthetic.full(8, 128)))


@pytest.fixture
def kvpack_here(capsys: pytest.CaptureFixture[str]) -> Here:
    """The command in this process: ``kvpack_here("inspect", path)``."""
    return Here(capsys)


@dataclass(frozen=True)
class KeyFiles:
    """A key pair and its two files."""

    key: SigningKey
    private: Path
    public: Path


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[KeyFiles, KeyFiles]:
    """Two key pairs."""
    made = []
    for seed in (1, 2):
        path = tmp_path_factory.mktemp("keys") / f"signer{seed}.key"
        key = SigningKey.from_seed(bytes([seed]) * 32)
        made.append(KeyFiles(key, path, save_key(key, path)))
    return made[0], made[1]


@pytest.fixture
def make_pack(tmp_path: Path) -> Callable[..., Path]:
    """Write a pack of a synthetic cut: ``make_pack(geometry, position, sign=key)``; fixed salt and time."""

    def make(
        geometry: Geometry = SMALL, position: int = 40, *, name: str = "a.kvpack", codec: str = "split", **options: Any
    ) -> Path:
        path = tmp_path / name
        saved = {key: options.pop(key) for key in ("sign", "expires", "epoch") if key in options}
        provenance = options.pop("provenance", {})
        cut = synthetic.make_cut(geometry, position, **options)
        cut = kvpack.Cut(
            cut.geometry, cut.identity, cut.layout, cut.record, cut.planes, cut.probe, provenance=provenance
        )
        kvpack.save(cut, path, codec=codec, salt=bytes(32), created=1_700_000_000, **saved)
        return path

    return make


@pytest.fixture
def probe() -> Probe:
    """A probe of three steps after position 40."""
    return Probe(40, (1, 2, 3), tuple(bytes([step]) * 32 for step in range(3)), "f32")


def _save_tiny(name: str, folder: Path, **changes: Any) -> Path:
    """A tiny model with random weights, and a tokenizer that has one token a byte, as transformers saves them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.engines.tiny import tiny_model

    tiny_model(name, **changes).save_pretrained(folder)
    alphabet = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE({token: at for at, token in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny llama (full layers), saved in f32."""
    return _save_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def tiny_mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny mistral whose layers all slide over a window of 64."""
    return _save_tiny("mistral", tmp_path_factory.mktemp("mistral"))
