"""The compile gate: every kernel passes it on every architecture, and it refuses what it is there to refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from kvpack_kernels.abi import KERNELS

from tests.emulation import compile_gate as gate
from tests.emulation.build import mode

pytestmark = pytest.mark.skipif(mode() != "plain", reason="compilers need no sanitizer")

COMPILERS = {"nvcc": gate.nvcc(), "nvrtc": gate.nvrtc()}

BAD = """
extern "C" __global__ void kvpack_gather(const unsigned* in, unsigned* out, unsigned n) {
    __shared__ unsigned shared[32];
    unsigned kept[32];
    for (unsigned i = 0; i < 32; ++i) {
        kept[(i * n) % 32] = in[i];
    }
    unsigned* somewhere = n > in[0] ? shared : out;
    somewhere[threadIdx.x] = kept[n % 32];
    out[32] = shared[n % 32];
}

extern "C" __global__ void kvpack_rope(float* x) { x[0] = fmaf(x[0], x[1], x[2]); }
"""


def have(name: str) -> gate.Compiler:
    """The compiler, or a skip that says why there is none."""
    compiler = COMPILERS[name]
    if isinstance(compiler, gate.Missing):
        pytest.skip(compiler.reason)
    return compiler


def have_nvdisasm() -> None:
    reader = gate.nvdisasm()
    if isinstance(reader, gate.Missing):
        pytest.skip(reader.reason)


@pytest.mark.parametrize("architecture", gate.ARCHITECTURES)
@pytest.mark.parametrize("source", KERNELS)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_every_kernel_passes(compiler: str, source: str, architecture: int) -> None:
    reports = gate.reports(have(compiler), source, architecture)
    assert set(reports) == set(KERNELS[source])
    for kernel, report in reports.items():
        assert not list(gate.complaints(kernel, report)), kernel


@pytest.mark.parametrize("compiler", COMPILERS)
def test_machine_code_was_read(compiler: str) -> None:
    have_nvdisasm()
    reports = gate.reports(have(compiler), "move", 90)
    for kernel, report in reports.items():
        assert report.opcodes is not None, kernel
        assert sum(report.opcodes[opcode] for opcode in report.opcodes if opcode.startswith("LDG.E.128")) >= gate.UNROLL


def test_numbers_are_the_recorded_ones() -> None:
    compiler = have("nvcc")
    have_nvdisasm()
    if compiler.version != gate.recorded_version():
        pytest.skip(f"resources.json is of nvcc {gate.recorded_version()}, this one is {compiler.version}")
    assert not gate.differences(compiler), "if they should differ: python -m tests.emulation.compile_gate --update"


@pytest.mark.parametrize("compiler", COMPILERS)
def test_stack_generic_accesses_and_fused_roundings_are_refused(compiler: str, tmp_path: Path) -> None:
    have_nvdisasm()
    (tmp_path / "bad.cu").write_text(BAD)
    reports = gate.compiled(have(compiler), tmp_path / "bad.cu", 80)
    said = "\n".join(gate.complaints("kvpack_gather", reports["kvpack_gather"]))
    assert "128 of stack" in said
    assert "generic access: ST." in said
    assert "local access: LDL" in said
    assert "0 LDG of 128 bits" in said
    assert "0 STG of 128 bits" in said
    assert "fused multiply-add: FFMA" in "".join(gate.complaints("kvpack_rope", reports["kvpack_rope"]))


def test_a_spill_is_refused() -> None:
    log = """ptxas info    : Compiling entry function 'k' for 'sm_90'
ptxas info    : Function properties for k
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers
"""
    assert gate.resource_usage(log) == {"k": (255, 16, 20)}
    report = gate.Report(registers=255, stack=0, spills=20, opcodes=None)
    assert list(gate.complaints("k", report)) == ["20 bytes of spills, 0 of stack"]
    assert not list(gate.complaints("k", replace(report, spills=0)))


def test_without_a_toolkit_the_gate_says_that_it_was_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gate.shutil, "which", lambda name: None)
    monkeypatch.setattr(gate, "_nvidia_files", lambda pattern: [])
    monkeypatch.setattr(gate, "nvrtc", lambda: gate.Missing("NVRTC cannot be loaded (no such file)"))
    monkeypatch.setattr(gate.sys, "argv", ["compile_gate"])
    gate.nvdisasm.cache_clear()
    try:
        assert gate.main() == 0
    finally:
        gate.nvdisasm.cache_clear()
    printed = capsys.readouterr().out
    assert "skipped: nvcc is not on the path" in printed
    assert "skipped: NVRTC cannot be loaded" in printed
    assert "skipped: nvdisasm is not here" in printed
