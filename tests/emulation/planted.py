"""Plant faults into a copy of the kernels, one by one, and require that the tests catch each: ``make planted``.

A fault is one edit that still compiles. The copy is built first, so that a compiler's error cannot pass for a caught
fault; the unchanged copy must pass the same tests. Some faults no optimised build shows: they name the sanitizer that
must, and what it must say.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.emulation.build import MODE_VARIABLE, ROOT, SOURCES, SOURCES_VARIABLE, build, sanitized_environment

HERE: Final = Path(__file__).parent


@dataclass(frozen=True)
class Fault:
    """``old`` becomes ``new`` in ``file``; in ``mode`` the tests of ``kernel`` must fail, with one of ``evidence``."""

    name: str
    file: str
    old: str
    new: str
    kernel: str
    mode: str = "plain"
    evidence: tuple[str, ...] = (" failed",)


ASAN: Final = ("ERROR: AddressSanitizer: heap-buffer-overflow",)
# Where a race has given a wrong digest before TSan saw it, the test ends there.
TSAN: Final = ("WARNING: ThreadSanitizer: data race", " failed")

FAULTS: Final = (
    Fault("wrap off by one", "tiles.h", "physical >= ring_rows ?", "physical > ring_rows ?", "move"),
    Fault("wrap off by one, staged", "tiles.h", "physical >= ring_rows ?", "physical > ring_rows ?", "stage"),
    Fault("head stride", "move.cu", "part * job.part_stride", "part * job.part_units.divisor * sizeof(Unit)", "move"),
    Fault(
        "head stride of a shadow", "stage.cu", "part * job.shadow_part_stride", "part * job.ring_part_stride", "stage"
    ),
    Fault(
        "page offset",
        "tiles.h",
        "const u32 slot = logical - page * page_rows.divisor;",
        "const u32 slot = row - divide(row, page_rows) * page_rows.divisor;",
        "move",
    ),
    Fault("job search", "tiles.h", ".tile_begin <= tile)", ".tile_begin < tile)", "move"),
    Fault(
        "tile overlap", "move.cu", "tile * kTileUnits + threadIdx.x", "tile * (kTileUnits - 1) + threadIdx.x", "move"
    ),
    Fault(
        "tile overlap in a tile",
        "move.cu",
        "begin + k * kThreads;\n        if",
        "begin + k * (kThreads - 1);\n        if",
        "move",
    ),
    Fault(
        "load clamp",
        "move.cu",
        "ahead < last ? ahead : last",
        "ahead <= last ? ahead : last + 1",
        "move",
        "address",
        ASAN,
    ),
    Fault("store clamp", "move.cu", "if (unit <= last)", "if (unit <= last + 1)", "move", "address", ASAN),
    Fault("last bytes of a message", "blake3.cu", "i < length; ++i", "i <= length; ++i", "blake3"),
    Fault("rounding up at a tie", "numbers.h", "(magnitude >> drop & 1)", "1", "convert"),
    Fault("rounding up at a tie, staged", "numbers.h", "(magnitude >> drop & 1)", "1", "stage"),
    Fault(
        "rounding of bf16", "numbers.h", "(word + 0x7FFF + (word >> 16 & 1)) >> 16", "(word + 0x8000) >> 16", "stage"
    ),
    Fault("rounding of subnormals", "numbers.h", "(significand >> shift & 1)", "1", "convert"),
    Fault("rounding of q8_0", "convert.cu", ">= 0.5f", "> 0.5f", "convert"),
    Fault(
        "the first of equals",
        "convert.cu",
        "magnitude_of(block[i]) > magnitude_of(extreme)",
        "magnitude_of(block[i]) >= magnitude_of(extreme)",
        "convert",
    ),
    Fault("a refused block", "convert.cu", "< kInfinity;", "<= kInfinity;", "convert"),
    Fault("rows of a chunk", "stage.cu", "(row - job.live) * job", "(row - row) * job", "stage"),
    Fault("turn the wrong way", "rope.cu", "a * sine + b * cosine", "b * cosine - a * sine", "rope"),
    Fault(
        "angles of another row", "rope.cu", "static_cast<u64>(row) * job.table_stride", "static_cast<u64>(0)", "rope"
    ),
    Fault("root of a tree", "blake3.cu", "job.tiles == 1 && 2 * stride >= count", "2 * stride >= count", "blake3"),
    Fault(
        "missing barrier",
        "blake3.cu",
        "        __syncthreads();\n        const u32 left",
        "        const u32 left",
        "blake3",
        "thread",
        TSAN,
    ),
    Fault(
        "missing barrier of the roots",
        "blake3.cu",
        "        }\n        __syncthreads();",
        "        }",
        "blake3",
        "thread",
        TSAN,
    ),
)


def tests_pass(folder: Path, kernel: str, mode: str) -> tuple[bool, str]:
    """Run the tests of a kernel on the sources of a folder; what they printed."""
    build(folder, kernel, mode)
    environment = dict(os.environ) | {MODE_VARIABLE: mode} if mode == "plain" else sanitized_environment(mode)
    environment[SOURCES_VARIABLE] = str(folder)
    prefix = ["setarch", "--addr-no-randomize"] if mode == "thread" else []
    outcome = subprocess.run(
        [
            *(*prefix, sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider"),
            *("-o", "addopts=--import-mode=importlib", "--hypothesis-seed=0", str(HERE / f"test_{kernel}.py")),
        ],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return outcome.returncode == 0, outcome.stdout + outcome.stderr


def planted(folder: Path, fault: Fault) -> Path:
    """A copy of the sources with the fault in it."""
    copy = folder / fault.name.replace(" ", "-").replace(",", "")
    shutil.copytree(SOURCES, copy, ignore=shutil.ignore_patterns("__pycache__"))
    text = (copy / fault.file).read_text()
    if text.count(fault.old) != 1:
        raise SystemExit(f"{fault.name}: {fault.old!r} stands {text.count(fault.old)} times in {fault.file}, not once")
    (copy / fault.file).write_text(text.replace(fault.old, fault.new))
    return copy


def main() -> int:
    """Plant every fault; the exit status is the number that nobody caught."""
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kernel, mode in sorted({(fault.kernel, fault.mode) for fault in FAULTS}):
            passed, printed = tests_pass(SOURCES, kernel, mode)
            if not passed:
                raise SystemExit(f"without a fault, the tests of {kernel} fail ({mode}):\n{printed}")
        for fault in FAULTS:
            passed, printed = tests_pass(planted(folder, fault), fault.kernel, fault.mode)
            caught = not passed and any(words in printed for words in fault.evidence)
            missed += not caught
            print(f"{'caught' if caught else 'MISSED'}  {fault.name}  ({fault.file}, {fault.kernel}, {fault.mode})")
            if not passed and not caught:
                print(printed[-3000:])
    print(f"{len(FAULTS) - missed} of {len(FAULTS)} planted faults were caught")
    return missed


if __name__ == "__main__":
    sys.exit(main())
