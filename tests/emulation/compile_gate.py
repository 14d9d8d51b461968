"""What the CUDA compilers make of every kernel, without a GPU: ``make compile-gate``.

Every source is compiled for every architecture by nvcc and by NVRTC, which is how kvpack compiles it for its users, and
what comes out is read: ptxas' resource report (registers, stack, spills) and, by nvdisasm, the machine code. The gate
refuses

- a spill or a byte of stack, a local access, and a load or store that has to find out what memory it is for;
- movers whose wide path is not made of 128-bit global loads and stores;
- a fused multiply-add in kernels that promise NumPy's roundings and do not divide (a division is made of them);
- numbers that differ from :file:`resources.json` beside the sources, which ``--update`` writes. They belong to one
  version of nvcc and are compared under that one.

What is not on this machine (nvcc, NVRTC, nvdisasm) is not checked, and the gate says so. Reports are kept by the hash
of everything that they come from, in a folder that git ignores.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Final

from kvpack_kernels.abi import KERNELS

from tests.emulation.build import ROOT, SOURCES

ARCHITECTURES: Final = (75, 80, 86, 89, 90, 100, 120)
OPTIONS: Final = ("--std=c++17", "--fmad=false")
KEPT: Final = ROOT / "build" / "compile-gate"
RESOURCES: Final = SOURCES / "resources.json"
MOVERS: Final = ("kvpack_gather", "kvpack_scatter")
UNROLL: Final = 4

_ENTRY: Final = re.compile(r"Compiling entry function '(\S+)'")
_STACK: Final = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS: Final = re.compile(r"Used (\d+) registers")
_SECTION: Final = re.compile(r"^\s*\.section\s+\.text\.(\w+)")
_INSTRUCTION: Final = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")


@dataclass(frozen=True)
class Report:
    """One kernel on one architecture. ``opcodes`` is None where there was no nvdisasm to read the machine code."""

    registers: int
    stack: int
    spills: int
    opcodes: dict[str, int] | None

    @property
    def instructions(self) -> int | None:
        """Machine instructions without padding."""
        if self.opcodes is None:
            return None
        return sum(count for opcode, count in self.opcodes.items() if opcode != "NOP")


@dataclass(frozen=True)
class Missing:
    """A tool that is not on this machine, and why the gate thinks so."""

    reason: str


@dataclass(frozen=True)
class Compiler:
    """A compiler of CUDA: its name, its version, and how it makes (report of ptxas, cubin) of a file."""

    name: str
    version: str
    compile: Callable[[Path, int], tuple[str, bytes]]


def nvcc() -> Compiler | Missing:
    """The toolkit's compiler on the path."""
    program = shutil.which("nvcc")
    if program is None:
        return Missing("nvcc is not on the path: no CUDA toolkit here")
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    version = re.search(r"V(\d+\.\d+\.\d+)", said.stdout)
    if said.returncode != 0 or version is None:
        return Missing(f"{program} --version fails: {said.stderr.strip() or said.stdout.strip()}")

    def compile_(source: Path, architecture: int) -> tuple[str, bytes]:
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder) / "kernel.cubin"
            target = [f"--gpu-architecture=sm_{architecture}", "--cubin", "--resource-usage", "-o", str(cubin)]
            command = [program, *OPTIONS, "-Werror", "all-warnings", *target, str(source)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
            return done.stdout + done.stderr, cubin.read_bytes()

    return Compiler("nvcc", version[1], compile_)


def nvrtc() -> Compiler | Missing:
    """The run-time compiler, from the package ``nvidia-cuda-nvrtc`` or wherever the loader finds it."""
    found = _nvidia_files("lib/libnvrtc.so*")
    try:
        # NVRTC opens this one by its name alone, which finds it where it is loaded already.
        for builtins in _nvidia_files("lib/libnvrtc-builtins.so*"):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(found[0]) if found else "libnvrtc.so")
    except OSError as error:
        return Missing(f"NVRTC cannot be loaded ({error}): the package nvidia-cuda-nvrtc has it")
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))

    def text_of(program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(library, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw

    def compile_(source: Path, architecture: int) -> tuple[str, bytes]:
        headers = sorted(source.parent.glob("*.h"))
        texts = (ctypes.c_char_p * len(headers))(*(path.read_bytes() for path in headers))
        names = (ctypes.c_char_p * len(headers))(*(path.name.encode() for path in headers))
        program = ctypes.c_void_p()
        text, name = source.read_bytes(), source.name.encode()
        library.nvrtcCreateProgram(ctypes.byref(program), text, name, len(headers), texts, names)
        options = [*OPTIONS, f"--gpu-architecture=sm_{architecture}", "--ptxas-options=-v"]
        status = library.nvrtcCompileProgram(
            program, len(options), (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        )
        log = text_of(program, "ProgramLog").decode().rstrip("\0")
        if status != 0:
            raise RuntimeError(f"NVRTC, {source}, {options}:\n{log}")
        cubin = text_of(program, "CUBIN")
        library.nvrtcDestroyProgram(ctypes.byref(program))
        return log, cubin

    return Compiler("nvrtc", f"{major.value}.{minor.value}", compile_)


@cache
def nvdisasm() -> Path | Missing:
    """The disassembler: of the toolkit, or of the package ``nvidia-cuda-nvdisasm``."""
    program = shutil.which("nvdisasm")
    found = [Path(program)] if program else _nvidia_files("bin/nvdisasm")
    return (
        found[0] if found else Missing("nvdisasm is not here, so no machine code is read: nvidia-cuda-nvdisasm has it")
    )


def _nvidia_files(pattern: str) -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    return [path for folder in folders for path in sorted(Path(folder).glob(f"*/{pattern}"))]


def reports(compiler: Compiler, source: str, architecture: int) -> dict[str, Report]:
    """The report of every kernel of a source on ``sm_<architecture>``; compiled at most once for equal inputs."""
    path = SOURCES / f"{source}.cu"
    texts = [path.read_bytes(), *(header.read_bytes() for header in sorted(SOURCES.glob("*.h")))]
    reader = nvdisasm()
    # This file is an input: it decides what is read out of what the compilers say.
    inputs = [compiler.name, compiler.version, str(architecture), *OPTIONS, str(reader), Path(__file__).read_text()]
    digest = hashlib.sha256(b"\0".join([*(each.encode() for each in inputs), *texts])).hexdigest()[:24]
    kept = KEPT / f"{source}-{compiler.name}-sm_{architecture}-{digest}.json"
    if not kept.is_file():
        made = {name: asdict(report) for name, report in compiled(compiler, path, architecture).items()}
        KEPT.mkdir(parents=True, exist_ok=True)
        unfinished = kept.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(made))
        unfinished.replace(kept)
    return {name: Report(**report) for name, report in json.loads(kept.read_text()).items()}


def compiled(compiler: Compiler, source: Path, architecture: int) -> dict[str, Report]:
    """The report of every kernel of a file, compiled now."""
    reader = nvdisasm()
    log, cubin = compiler.compile(source, architecture)
    resources = resource_usage(log)
    opcodes: dict[str, Counter[str]] | None = None
    if isinstance(reader, Path):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            opcodes = opcodes_of(
                subprocess.run([reader, "-c", file.name], capture_output=True, text=True, check=True).stdout
            )
    return {
        name: Report(registers, stack, spills, None if opcodes is None else dict(sorted(opcodes[name].items())))
        for name, (registers, stack, spills) in resources.items()
    }


def resource_usage(log: str) -> dict[str, tuple[int, int, int]]:
    """(registers, bytes of stack, bytes of spills) of every kernel, its device functions counted in."""
    usage: dict[str, tuple[int, int, int]] = {}
    entry = ""
    for line in log.splitlines():
        if found := _ENTRY.search(line):
            entry = found[1]
            usage[entry] = (0, 0, 0)
        elif found := _STACK.search(line):
            registers, stack, spills = usage[entry]
            usage[entry] = (registers, stack + int(found[1]), spills + int(found[2]) + int(found[3]))
        elif found := _REGISTERS.search(line):
            usage[entry] = (max(usage[entry][0], int(found[1])), *usage[entry][1:])
    return usage


def opcodes_of(disassembly: str) -> dict[str, Counter[str]]:
    """How often each opcode, with its suffixes, stands in each kernel."""
    opcodes: dict[str, Counter[str]] = {}
    kernel = ""
    for line in disassembly.splitlines():
        if found := _SECTION.match(line):
            kernel = found[1]
            opcodes[kernel] = Counter()
        elif kernel and (found := _INSTRUCTION.search(line)):
            opcodes[kernel][found[1]] += 1
    return opcodes


def complaints(kernel: str, report: Report) -> Iterator[str]:
    """What is wrong with a kernel."""
    if report.spills or report.stack:
        yield f"{report.spills} bytes of spills, {report.stack} of stack"
    if report.opcodes is None:
        return
    whole = {opcode: opcode.split(".") for opcode in report.opcodes}
    for opcode, parts in whole.items():
        if parts[0] in ("LD", "ST", "ATOM"):
            yield f"a generic access: {opcode}"
        if parts[0] in ("LDL", "STL"):
            yield f"a local access: {opcode}"
        if parts[0] == "FFMA" and (kernel == "kvpack_rope" or kernel.startswith("kvpack_read_")):
            yield f"a fused multiply-add: {opcode}"
    if kernel in MOVERS:
        for access in ("LDG", "STG"):
            wide = sum(
                report.opcodes[opcode] for opcode, parts in whole.items() if parts[0] == access and "128" in parts
            )
            if wide < UNROLL:
                yield f"{wide} {access} of 128 bits, not {UNROLL} or more"


def table(compiler: Compiler) -> dict[str, dict[str, dict[str, int | None]]]:
    """What :file:`resources.json` holds: kernel → architecture → numbers."""
    rows: dict[str, dict[str, dict[str, int | None]]] = {}
    for source in KERNELS:
        for architecture in ARCHITECTURES:
            for kernel, report in sorted(reports(compiler, source, architecture).items()):
                numbers = {"registers": report.registers, "instructions": report.instructions}
                rows.setdefault(kernel, {})[f"sm_{architecture}"] = numbers
    return rows


def differences(compiler: Compiler) -> list[str]:
    """Where this compiler's numbers differ from the recorded ones; ask only where the versions are equal."""
    recorded = json.loads(RESOURCES.read_text())["kernels"]
    found = []
    for kernel, rows in table(compiler).items():
        for architecture, numbers in rows.items():
            before = recorded.get(kernel, {}).get(architecture)
            if before != numbers:
                found.append(f"{kernel} {architecture}: {before} is recorded, {numbers} was compiled")
    return found + [
        f"{kernel}: recorded, and no kernel any more" for kernel in recorded.keys() - table(compiler).keys()
    ]


def recorded_version() -> str:
    """The nvcc that :file:`resources.json` was written with."""
    return str(json.loads(RESOURCES.read_text())["nvcc"])


def update(compiler: Compiler) -> None:
    """Write :file:`resources.json`, one line a kernel and architecture."""
    lines = [
        f'    "{kernel}": {{\n'
        + ",\n".join(f'      "{name}": {json.dumps(numbers)}' for name, numbers in rows.items())
        + "\n    }"
        for kernel, rows in table(compiler).items()
    ]
    body = ",\n".join(lines)
    RESOURCES.write_text(f'{{\n  "nvcc": "{compiler.version}",\n  "kernels": {{\n{body}\n  }}\n}}\n')


def main() -> int:
    """Print the numbers and every complaint; the exit status is 1 where there is one."""
    parser = argparse.ArgumentParser(description="Compile every kernel for every architecture and read the result.")
    parser.add_argument("--update", action="store_true", help="record the numbers of this nvcc in resources.json")
    wanted = parser.parse_args()
    failed = False
    for compiler in (nvcc(), nvrtc()):
        if isinstance(compiler, Missing):
            print(f"skipped: {compiler.reason}")
            continue
        print(f"{compiler.name} {compiler.version}: registers/instructions")
        for source in KERNELS:
            by_number = {number: reports(compiler, source, number) for number in ARCHITECTURES}
            for kernel in KERNELS[source]:
                rows = [(number, by_number[number][kernel]) for number in ARCHITECTURES]
                print(f"  {kernel:22}", *(f"sm_{number}: {row.registers}/{row.instructions}" for number, row in rows))
                for number, row in rows:
                    for complaint in complaints(kernel, row):
                        failed = True
                        print(f"    REFUSED sm_{number}: {complaint}")
        if compiler.name == "nvcc":
            if wanted.update:
                update(compiler)
            if compiler.version != recorded_version():
                print(f"skipped: resources.json is of nvcc {recorded_version()} and is not compared")
            else:
                changed = differences(compiler)
                failed = failed or bool(changed)
                for line in changed:
                    print(f"  DIFFERS {line}")
    reader = nvdisasm()
    if isinstance(reader, Missing):
        print(f"skipped: {reader.reason}")
    print("the compile gate " + ("refuses" if failed else "passes"))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
