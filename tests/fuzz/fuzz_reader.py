"""Damaged packs against the reader: whatever the bytes say, the answer is a pack or one KvpackError.

``python tests/fuzz/fuzz_reader.py [--seconds 60] [--seed N]`` (``make fuzz``). Bytes are flipped, inserted and cut,
numbers set to extremes, the manifest is edited as a value; then hashes are made right again, so that the damage is not
hidden behind ``front-hash`` or ``index-hash``. The suite runs the same for a moment (``test_fuzz_reader.py``).
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from blake3 import blake3

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvpack.errors import KvpackError  # noqa: E402
from kvpack.pack import canonical  # noqa: E402
from kvpack.pack.preamble import (  # noqa: E402
    MANIFEST_OFFSET,
    PREAMBLE_BYTES,
    Limits,
    Preamble,
    align,
    front_hash,
)
from kvpack.pack.reader import PackReader  # noqa: E402
from kvpack.pack.view import PackCut  # noqa: E402

EXTREMES = (
    0,
    1,
    2,
    31,
    32,
    127,
    128,
    255,
    4095,
    4096,
    65535,
    1 << 20,
    1 << 31,
    (1 << 32) - 1,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
SEEDS = sorted(path for path in (ROOT / "fixtures/v1/accept").glob("*.kvpack") if path.stat().st_size < 1 << 17)


def damage(source: bytes, chance: random.Random) -> bytes:
    """One damaged copy of a good pack."""
    kind = chance.choice(("bytes", "bytes", "manifest", "manifest", "index", "preamble"))
    if kind == "bytes":
        return _bytes(source, chance)
    preamble = Preamble.parse(source[:PREAMBLE_BYTES], len(source), Limits())
    start, end = MANIFEST_OFFSET, MANIFEST_OFFSET + preamble.manifest_length
    manifest = canonical.decode(source[start:end])
    index = bytearray(source[preamble.index_offset : preamble.index_offset + preamble.index_length])
    payload = source[preamble.payload_offset :]
    if kind == "manifest":
        for _ in range(chance.randint(1, 3)):
            _edit(manifest, chance)
    elif kind == "index" and index:
        at = chance.randrange(0, len(index) - 4)
        index[at : at + 4] = chance.choice(EXTREMES).to_bytes(8, "little")[:4]
    manifest["index_hash"] = blake3(bytes(index)).digest()
    try:
        body = canonical.encode(manifest)
    except (ValueError, TypeError, OverflowError):
        return _bytes(source, chance)
    front = Preamble.for_front(manifest_length=len(body), tile_count=preamble.tile_count)
    shift = front.payload_offset - preamble.payload_offset
    if shift:
        for record in range(preamble.tile_count):
            units = int.from_bytes(index[96 * record : 96 * record + 4], "little")
            index[96 * record : 96 * record + 4] = ((units + shift // 4096) & 0xFFFFFFFF).to_bytes(4, "little")
        manifest["index_hash"] = blake3(bytes(index)).digest()
        body = canonical.encode(manifest)
    front = replace(front, file_length=front.payload_offset + len(payload), flags=preamble.flags)
    head = bytearray(front.to_bytes())
    if kind == "preamble":
        at = chance.randrange(8, 96)
        head[at] = chance.choice((0, 1, 255, chance.randrange(256)))
    region = source[PREAMBLE_BYTES:MANIFEST_OFFSET]
    head[96:] = front_hash(bytes(head), region, body)
    whole = bytes(head) + region + body
    whole += bytes(align(len(whole), 64) - len(whole)) + bytes(index)
    return whole + bytes(align(len(whole), 4096) - len(whole)) + payload


def _bytes(source: bytes, chance: random.Random) -> bytes:
    content = bytearray(source)
    for _ in range(chance.randint(1, 8)):
        at = chance.randrange(len(content))
        match chance.randrange(4):
            case 0:
                content[at] ^= 1 << chance.randrange(8)
            case 1:
                del content[at : at + chance.randint(1, 64)]
            case 2:
                content[at:at] = os.urandom(chance.randint(1, 64))
            case _:
                content[at : at + 8] = chance.choice(EXTREMES).to_bytes(8, "little")
        if not content:
            return b""
    return bytes(content)


def _edit(value: object, chance: random.Random) -> None:
    """Change something somewhere in a decoded manifest."""
    for _ in range(64):
        if isinstance(value, dict) and value:
            key = chance.choice(list(value))
        elif isinstance(value, list) and value:
            key = chance.randrange(len(value))
        else:
            return
        if isinstance(value[key], (dict, list)) and value[key] and chance.random() < 0.8:
            value = value[key]
            continue
        match chance.randrange(5):
            case 0:
                del value[key]
            case 1:
                value[key] = chance.choice(EXTREMES)
            case 2:
                value[key] = chance.choice(
                    ["", "x", "k", "q8_0", "full", "a\0b", "../x", b"", bytes(32), -1, 1.5, [], {}]
                )
            case 3 if isinstance(value, list):
                value.insert(key, value[key])
            case _:
                value[str(key) + "_" if isinstance(value, dict) else key] = value[key]
        return


def read_everything(path: Path) -> str:
    """Read a pack to the end; the code of the error, or ``good``."""
    try:
        with PackReader(path) as reader:
            for cut in reader.manifest.cuts:
                view = PackCut((reader,), cut)
                view.read_rows(view.stored, lambda *_: None, threads=1)
                if reader.manifest.parent is None:
                    view.require_state_id()
    except KvpackError as error:
        return f"{error.family}/{error.code}"
    return "good"


def fuzz(folder: Path, *, seed: int, seconds: float, most: int) -> Counter[str]:
    """Damage packs for a while; raises whatever is not a KvpackError, after saying how to see it again."""
    chance = random.Random(seed)
    seen: Counter[str] = Counter()
    sources = [path.read_bytes() for path in SEEDS]
    path = folder / "damaged.kvpack"
    until = time.monotonic() + seconds
    for number in range(most):
        if time.monotonic() > until:
            break
        content = damage(chance.choice(sources), chance)
        path.write_bytes(content)
        try:
            seen[read_everything(path)] += 1
        except BaseException:
            print(f"seed {seed}, case {number}: {path}", file=sys.stderr)
            raise
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    folder = ROOT / ".fuzz"
    folder.mkdir(exist_ok=True)
    print(f"seed {seed}")
    seen = fuzz(folder, seed=seed, seconds=options.seconds, most=sys.maxsize)
    for code, count in seen.most_common():
        print(f"{count:8}  {code}")
    print(f"{sum(seen.values())} packs, no error but KvpackError")


if __name__ == "__main__":
    main()
