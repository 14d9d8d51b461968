"""The job tables: NumPy and C++ agree about every byte, and reciprocals divide exactly."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kvpack_kernels import abi

from tests.emulation.build import SOURCES, emulated, examples

PRINT_FIELD = 'std::printf("{struct} {field} %zu %zu\\n", offsetof({struct}, {field}), sizeof({struct}::{field}));'


@pytest.fixture(scope="module")
def in_c(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a C++ compiler says about abi.h: ``struct field`` → ``offset size``, ``struct`` → ``size``."""
    folder: Path = tmp_path_factory.mktemp("abi")
    lines = ["#include <cstddef>", "#include <cstdio>", '#include "abi.h"', "using namespace kvpack;", "int main() {"]
    for struct in abi.STRUCTS:
        lines.append(f'std::printf("{struct} %zu\\n", sizeof({struct}));')
        lines += [PRINT_FIELD.format(struct=struct, field=name) for name, _ in abi.STRUCTS[struct]]
    for constant in ("kThreads", "kTileUnits", "kChunkBytes", "kF32", "kF16", "kBf16", "kRaw"):
        lines.append(f'std::printf("{constant} %u\\n", {constant});')
    (folder / "abi.cpp").write_text("\n".join([*lines, "}"]))
    program = folder / "abi"
    subprocess.run(["g++", "-std=c++17", f"-I{SOURCES}", folder / "abi.cpp", "-o", program], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    words = [line.split(" ") for line in printed.splitlines()]
    return {" ".join(line[:-2]): " ".join(line[-2:]) for line in words if len(line) == 4} | {
        line[0]: line[1] for line in words if len(line) == 2
    }


@pytest.mark.parametrize("struct", abi.STRUCTS)
def test_every_offset_and_size_is_that_of_the_c_struct(struct: str, in_c: dict[str, str]) -> None:
    dtype = abi.job_dtype(struct)
    assert dtype.fields is not None
    assert in_c[struct] == str(dtype.itemsize)
    ours = {f"{struct} {name}": f"{offset} {field.itemsize}" for name, (field, offset, *_) in dtype.fields.items()}
    assert ours == {name: size for name, size in in_c.items() if name.startswith(f"{struct} ")}


def test_no_field_of_a_struct_is_left_out() -> None:
    header = (SOURCES / "abi.h").read_text()
    for struct in abi.STRUCTS:
        body = header.split(f"struct {struct} {{")[1].split("};")[0]
        declared = [line.split(";")[0].split()[-1] for line in body.splitlines() if ";" in line]
        assert declared == [name for name, _ in abi.STRUCTS[struct]]


def test_a_move_job_has_96_bytes() -> None:
    assert abi.job_dtype("MoveJob").itemsize == 96


def test_constants_agree(in_c: dict[str, str]) -> None:
    assert in_c["kThreads"] == str(abi.THREADS)
    assert in_c["kTileUnits"] == str(abi.TILE_UNITS)
    assert in_c["kChunkBytes"] == str(abi.CHUNK_BYTES)
    assert {name[1:].lower(): int(in_c[name]) for name in ("kF32", "kF16", "kBf16", "kRaw")} == abi.FORMATS


@pytest.mark.parametrize("source", abi.KERNELS)
def test_every_kernel_is_listed(source: str) -> None:
    library = emulated(source).library
    for kernel in abi.KERNELS[source]:
        assert getattr(library, f"emulated_{kernel}")
    texts = (SOURCES / f"{source}.cu").read_text()
    assert source == "convert" or texts.count('extern "C" __global__') == len(abi.KERNELS[source])


@given(st.integers(0, abi.MAX_UNITS), st.integers(1, abi.MAX_UNITS))
@example(abi.MAX_UNITS, 1)
@example(abi.MAX_UNITS, abi.MAX_UNITS)
@example(abi.MAX_UNITS - 1, abi.MAX_UNITS)
@example(abi.MAX_UNITS, (1 << 30) + 1)
@examples(500)
def test_a_reciprocal_divides_exactly(n: int, number: int) -> None:
    for dividend in {n, max(0, n // number * number - 1), n // number * number}:
        by, magic, shift = abi.divisor(number)
        assert by == number
        assert magic < 1 << 32
        assert dividend * magic < 1 << 64
        assert dividend * magic >> shift == dividend // number


def test_a_job_beyond_the_units_of_one_is_split() -> None:
    rows = abi.Rows(address=1, parts=1, part_bytes=1000, row_stride=1000, part_stride=1000, first=7, rows=5_000_000)
    table, tiles = abi.move_table([(rows, 1 << 40)])
    most = abi.MAX_UNITS // 1000
    assert table["units"].tolist() == [most * 1000, most * 1000, (5_000_000 - 2 * most) * 1000]
    assert table["first"].tolist() == [7, 7 + most, 7 + 2 * most]
    assert (table["packed"] - (1 << 40)).tolist() == [0, most * 1000, 2 * most * 1000]
    begins = np.cumsum([0, *(-(-table["units"].astype(np.int64) // abi.TILE_UNITS))])
    assert table["tile_begin"].tolist() == begins[:-1].tolist()
    assert tiles == begins[-1]


def test_a_split_ring_goes_on_where_it_wrapped() -> None:
    rows = abi.Rows(0, 1, 2000, 2000, 2000, first=1_500_000, rows=2_000_000, ring_rows=2_000_000)
    table, _ = abi.move_table([(abi.Rows(**(vars(rows) | {"address": 1})), 1)])
    most = abi.MAX_UNITS // 2000
    assert table["first"].tolist() == [(1_500_000 + done) % 2_000_000 for done in range(0, 2_000_000, most)]


@pytest.mark.parametrize(("lowest_bit", "unit"), [(1, 1), (2, 2), (4, 4), (8, 8), (16, 16), (64, 16)])
@pytest.mark.parametrize("where", ["address", "part_bytes", "row_stride", "part_stride", "packed"])
def test_a_job_takes_the_widest_access_that_everything_allows(where: str, lowest_bit: int, unit: int) -> None:
    numbers = dict.fromkeys(("address", "part_bytes", "row_stride", "part_stride", "packed"), 4096) | {
        where: lowest_bit
    }
    packed = numbers.pop("packed")
    rows = abi.Rows(parts=2, first=0, rows=3, **(numbers | {"part_stride": numbers["part_stride"] + 8192}))
    table, _ = abi.move_table([(rows, packed)])
    assert table["unit_bytes"].tolist() == [unit]
