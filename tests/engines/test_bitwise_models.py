"""Real models: SmolLM2 (full layers) and Gemma 3 270M (sliding, window 512, and full), 20 steps in a fresh process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.batch import assert_bitwise, run_batch

POSITIONS = (511, 512, 513, 700, 1025)
CAPACITY = 1100
DTYPES = ("bf16", "f32")
KINDS = {"dynamic": None, "static": CAPACITY}
CASES = [(dtype, kind, position) for dtype in DTYPES for kind in KINDS for position in POSITIONS]


def _run(folder: Path, gguf: Path, models: Path, environment: dict[str, str]) -> dict[str, Any]:
    sessions = [
        {"model": str(gguf), "dtype": dtype, "kind": kind, "capacity": KINDS[kind], "position": position}
        for dtype, kind, position in CASES
    ]
    return run_batch(folder, sessions, {**environment, "KVPACK_CACHE_DIR": str(models)})


@pytest.fixture(scope="module")
def smollm2(
    tmp_path_factory: pytest.TempPathFactory,
    smollm2_gguf: Path,
    models_folder: Path,
    process_environment: Callable[[int], dict[str, str]],
) -> dict[str, Any]:
    return _run(tmp_path_factory.mktemp("smollm2"), smollm2_gguf, models_folder, process_environment(2))


@pytest.fixture(scope="module")
def gemma3(
    tmp_path_factory: pytest.TempPathFactory,
    gemma3_gguf: Path,
    models_folder: Path,
    process_environment: Callable[[int], dict[str, str]],
) -> dict[str, Any]:
    return _run(tmp_path_factory.mktemp("gemma3"), gemma3_gguf, models_folder, process_environment(2))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("dtype", "kind", "position"), CASES)
def test_smollm2(dtype: str, kind: str, position: int, smollm2: dict[str, Any], smollm2_gguf: Path) -> None:
    produced, consumed = smollm2[f"{smollm2_gguf.stem}-{dtype}-{kind}-{position}"]
    assert_bitwise((produced, consumed))
    assert consumed["reused"] == position


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("dtype", "kind", "position"), CASES)
def test_gemma3(dtype: str, kind: str, position: int, gemma3: dict[str, Any], gemma3_gguf: Path) -> None:
    produced, consumed = gemma3[f"{gemma3_gguf.stem}-{dtype}-{kind}-{position}"]
    assert_bitwise((produced, consumed))
    assert consumed["reused"] == position
