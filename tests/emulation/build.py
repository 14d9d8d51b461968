"""The CUDA sources built for the CPU: g++ and :file:`shim.h`, one shared library a source and mode.

``KVPACK_EMULATION`` names the mode of a process: ``plain`` (-O3, the default), ``address`` (ASan and UBSan) or
``thread`` (TSan). A sanitizer's library must be there before Python itself, so :func:`sanitized_environment` makes the
environment of a process that has it. ``KVPACK_KERNEL_SOURCES`` names another folder of sources (planted faults).
Libraries are kept by the hash of what they are made from, in a folder that git ignores.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
from hypothesis import HealthCheck, Phase, settings

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCES: Final = ROOT / "kernels" / "kvpack_kernels"
BUILT: Final = ROOT / "build" / "emulation"
SHIM: Final = Path(__file__).with_name("shim.h")
MODE_VARIABLE: Final = "KVPACK_EMULATION"
SOURCES_VARIABLE: Final = "KVPACK_KERNEL_SOURCES"

FLAGS: Final = ("-std=c++17", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
# As on the GPU: no fused multiply-add. Kernels read memory by several types, which CUDA allows.
SAME_AS_CUDA: Final = ("-ffp-contract=off", "-fno-strict-aliasing")
MODES: Final = {
    "plain": ("-O3",),
    "address": ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-O1", "-g", "-fsanitize=thread"),
}
ORDERS: Final = {"forward": 0, "reverse": 1, "shuffled": 2, "threaded": 3}
UNORDERED: Final = ("forward", "reverse", "shuffled")
"""Orders for kernels without barriers; those with barriers need ``threaded``."""

_PREPROCESSED_KERNEL: Final = re.compile(r'extern "C"[^;{]*?\b(kvpack_[a-z0-9_]+)\(')


@dataclass(frozen=True)
class Emulated:
    """The kernels of one source."""

    library: ctypes.CDLL

    def launch(self, kernel: str, grid: int, block: int, *arguments: ctypes._SimpleCData[int], order: str) -> None:
        """Run every block and thread of a launch, in an order of :data:`ORDERS`."""
        addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(each) for each in arguments))
        entry = getattr(self.library, f"emulated_{kernel}")
        entry(addresses, ctypes.c_uint(grid), ctypes.c_uint(block), ctypes.c_int(ORDERS[order]), ctypes.c_uint(grid))


def mode() -> str:
    """The mode of this process."""
    return os.environ.get(MODE_VARIABLE, "plain")


def sources() -> Path:
    """The folder of the sources under test."""
    return Path(os.environ.get(SOURCES_VARIABLE, SOURCES))


def examples(count: int) -> settings:
    """Hypothesis settings: ``count`` examples, an eighth of them under a sanitizer. A planted fault is not shrunk."""
    fewer = count if mode() == "plain" else max(4, count // 8)
    phases = [Phase.explicit, Phase.generate]
    if SOURCES_VARIABLE not in os.environ:
        phases += [Phase.reuse, Phase.shrink]
    return settings(max_examples=fewer, phases=phases, suppress_health_check=[HealthCheck.too_slow])


@cache
def emulated(source: str) -> Emulated:
    """``<source>.cu`` in the mode of this process."""
    return Emulated(ctypes.CDLL(str(build(sources(), source, mode()))))


def build(folder: Path, source: str, how: str) -> Path:
    """Compile ``<source>.cu`` of a folder and return the library."""
    command = ["g++", *FLAGS, *SAME_AS_CUDA, *MODES[how], f"-I{folder}", f"-I{SHIM.parent}"]
    texts = [path.read_bytes() for path in (folder / f"{source}.cu", *sorted(folder.glob("*.h")), SHIM)]
    digest = hashlib.sha256(b"\0".join([*(part.encode() for part in command), *texts])).hexdigest()[:24]
    library = BUILT / f"{source}-{how}-{digest}.so"
    if library.is_file():
        return library
    BUILT.mkdir(parents=True, exist_ok=True)
    unit = library.with_suffix(f".{os.getpid()}.cpp")
    unfinished = library.with_suffix(f".{os.getpid()}.unfinished")
    included = f'#include "shim.h"\n#include "{source}.cu"\n'
    unit.write_text(included)
    names = _PREPROCESSED_KERNEL.findall(_run([*command, "-E", "-P", str(unit)]))
    unit.write_text(included + "".join(f"EMULATED({name})\n" for name in names))
    _run([*command, str(unit), "-o", str(unfinished)])
    unit.unlink()
    unfinished.replace(library)
    return library


def _run(command: list[str]) -> str:
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{outcome.stderr}")
    return outcome.stdout


def sanitized_environment(how: str) -> dict[str, str]:
    """The environment of a process in a sanitizer's mode. Nothing is said about leaks: Python's own are not ours."""
    runtime = {"address": "libasan.so", "thread": "libtsan.so"}[how]
    library = _run(["g++", f"-print-file-name={runtime}"]).strip()
    return dict(os.environ) | {
        MODE_VARIABLE: how,
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=66",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        # Only the kernels are built for TSan, so what Python and NumPy do is not followed.
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=1:exitcode=66:report_signal_unsafe=0",
    }


def memory(nbytes: int, rng: np.random.Generator, offset: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Random bytes that start ``offset`` past a multiple of 16; the allocation ends with them, for ASan to see."""
    array = np.empty(nbytes + offset, dtype=np.uint8)
    array[:] = np.frombuffer(rng.bytes(array.size), dtype=np.uint8)
    assert address(array) % 16 == 0
    return array[offset:]


def address(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> int:
    """Where an array's first byte lies."""
    return int(array.__array_interface__["data"][0])
