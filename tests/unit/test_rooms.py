"""The table of rooms: who may import whom, held against every import statement of the three packages.

Imports inside functions count as well. What differs for them is weight: a heavy library may only be imported
there.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "kvpack": ROOT / "kvpack",
    "kvpack_cli": ROOT / "cli" / "kvpack_cli",
    "kvpack_kernels": ROOT / "kernels" / "kvpack_kernels",
}

# Each room and the rooms that it may import, besides itself and `errors`; `root` is `kvpack/*.py`.
LIBRARY = ("model", "device", "live", "pack", "trust", "store", "migrate", "engines")
ROOMS: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "model": frozenset(),
    "device": frozenset({"model"}),
    "live": frozenset({"model", "device"}),
    "pack": frozenset({"model"}),
    "trust": frozenset(),
    "store": frozenset({"model", "pack", "trust"}),
    "migrate": frozenset({"model", "device", "live", "pack", "trust", "store"}),
    "engines": frozenset({"model", "device", "live", "pack", "trust", "store", "migrate"}),
    "root": frozenset(LIBRARY),
    "kvpack_cli": frozenset({*LIBRARY, "root"}),
    "kvpack_kernels": frozenset(),
}
KERNELS_IMPORTER = "kvpack.device.cuda"
"""And what begins with its name: the CUDA device is a few files."""

# What else a room may import from outside the standard library.
LIBRARIES: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "model": frozenset(),
    "device": frozenset({"numpy", "cupy"}),
    "live": frozenset({"numpy"}),
    "pack": frozenset({"numpy", "msgpack", "zstandard", "blake3"}),
    "trust": frozenset({"cryptography", "blake3"}),
    "store": frozenset({"numpy", "blake3", "obstore"}),
    "migrate": frozenset({"numpy", "blake3"}),
    "engines": frozenset({"numpy", "blake3", "torch", "transformers", "gguf", "safetensors"}),
    "root": frozenset({"numpy", "blake3"}),
    "kvpack_cli": frozenset({"click", "rich", "numpy", "blake3"}),
    "kvpack_kernels": frozenset({"numpy"}),
}

# Optional or slow libraries: imported inside the function that needs them, and a missing one is an EngineError
# or a StoreError that names the extra.
LAZY = frozenset({"torch", "transformers", "cupy", "obstore", "gguf", "accelerate", "safetensors"})

# `kvpack inspect` reads the front of a pack through these (and the root and the command line) without numpy.
FRONT = (
    "errors",
    "model",
    "trust",
    "pack.preamble",
    "pack.canonical",
    "pack.manifest",
    "pack.index",
    "pack.reader",
)

# `model` says what a cache means and touches nothing; `live` moves bytes between memories, not to files.
PURE = ("errors", "model", "live")
FILES_AND_PROCESSES = frozenset(
    {
        "os",
        "io",
        "pathlib",
        "shutil",
        "tempfile",
        "mmap",
        "socket",
        "sqlite3",
        "subprocess",
        "multiprocessing",
        "urllib",
    }
)


@dataclass(frozen=True)
class Import:
    """One imported name: who imports it, its dotted name, the line, and whether it runs with the module."""

    importer: str
    target: str
    line: int
    eager: bool


def room_of(module: str) -> str:
    """The room of a module: the second part of its name, `root` for `kvpack/*.py`, or the other package."""
    package, _, rest = module.partition(".")
    if package != "kvpack":
        return package
    first = rest.partition(".")[0]
    if first in ROOMS or (first and (PACKAGES["kvpack"] / first).is_dir()):
        return first
    return "root"


def imports_of(module: str, source: str, *, is_package: bool = False) -> Iterator[Import]:
    """Every import of a module, relative ones resolved; what stands under TYPE_CHECKING is not eager."""

    def walk(node: ast.AST, eager: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno, eager)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, *([base] if base else [])])
            for alias in node.names:
                yield Import(module, _submodule(base, alias.name), node.lineno, eager)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for statement in node.body:
                yield from walk(statement, False)
            for statement in node.orelse:
                yield from walk(statement, eager)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from walk(child, eager and not inside)

    yield from walk(ast.parse(source), True)


def _submodule(base: str, name: str) -> str:
    """`from kvpack import pack` names a room, `from kvpack import save` the root: the files decide."""
    package, *parts = base.split(".")
    if package in PACKAGES:
        path = PACKAGES[package].joinpath(*parts, name)
        if path.is_dir() or path.with_suffix(".py").is_file():
            return f"{base}.{name}"
    return base


def violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """Each import of the module that the tables do not allow, as a line that says which rule it breaks."""
    room = room_of(module)
    if room not in ROOMS:
        return [f"{module}: the room {room} is not in the table"]
    front = room in ("root", "kvpack_cli") or any(f"{module}.".startswith(f"kvpack.{name}.") for name in FRONT)
    found = []
    for imported in imports_of(module, source, is_package=is_package):
        library = imported.target.partition(".")[0]
        broken = []
        if library in PACKAGES:
            target = room_of(imported.target)
            if target == "kvpack_kernels":
                if not module.startswith(KERNELS_IMPORTER) and room != "kvpack_kernels":
                    broken.append(f"only {KERNELS_IMPORTER} may import the kernels")
            elif target not in {room, "errors", *ROOMS[room]}:
                broken.append(f"the room {room} may not import {target}")
        elif library not in sys.stdlib_module_names and library not in LIBRARIES[room]:
            broken.append(f"the room {room} may not import the library {library}")
        if imported.eager and library in LAZY | {"kvpack_kernels"} and room != library:
            broken.append(f"{library} must be imported inside the function that needs it")
        if imported.eager and library == "numpy" and front:
            broken.append("kvpack inspect runs through this module and must start without numpy")
        if library in FILES_AND_PROCESSES and room in PURE:
            broken.append(f"the room {room} touches no files and no processes")
        if library == "mmap":
            broken.append("verified bytes are read by position, never mapped")
        found += [f"{module}:{imported.line}: {imported.target}: {rule}" for rule in broken]
    return found


def modules() -> list[tuple[str, Path]]:
    """Every module of the three packages and its file."""
    found = []
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found.append((".".join([package, *(part for part in parts if part != "__init__")]), path))
    return found


@pytest.mark.parametrize(("module", "path"), [pytest.param(*pair, id=pair[0]) for pair in modules()])
def test_imports_stay_in_the_table(module: str, path: Path) -> None:
    found = violations(module, path.read_text("utf-8"), is_package=path.name == "__init__.py")
    assert found == []


def eager_closure(start: str) -> set[str]:
    """Every name that importing `start` imports at once, through the modules of the house and their packages."""
    files = dict(modules())
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        if "." in name:
            waiting.append(name.rpartition(".")[0])
        if path := files.get(name):
            found = imports_of(name, path.read_text("utf-8"), is_package=path.name == "__init__.py")
            waiting += [imported.target for imported in found if imported.eager]
    return reached


@pytest.mark.parametrize("name", FRONT)
def test_the_front_of_a_pack_is_read_without_numpy(name: str) -> None:
    assert not eager_closure(f"kvpack.{name}") & {"numpy", *LAZY}


def test_the_closure_follows_imports() -> None:
    assert {"kvpack", "__future__"} <= eager_closure("kvpack.errors")


def test_every_folder_is_a_room() -> None:
    folders = {path.parent.name for path in PACKAGES["kvpack"].glob("*/__init__.py")}
    assert folders <= set(ROOMS)


def test_the_table_has_no_cycle() -> None:
    order = ["errors", *LIBRARY, "root", "kvpack_cli"]
    for position, room in enumerate(order):
        assert ROOMS[room] <= set(order[:position]), room


CONTROLS = {
    "another room": ("kvpack.pack.planted", "from kvpack.trust import keys", "may not import trust"),
    "another room, lazily": (
        "kvpack.model.planted",
        "def f():\n    import kvpack.pack.reader",
        "may not import pack",
    ),
    "another room, relatively": ("kvpack.trust.planted", "from ..pack import reader", "may not import pack"),
    "a room through the root": ("kvpack.pack.planted", "from kvpack import trust", "may not import trust"),
    "the root itself": ("kvpack.store.planted", "import kvpack", "may not import root"),
    "the root's functions": ("kvpack.engines.planted", "from kvpack import save", "may not import root"),
    "the command line": ("kvpack.engines.planted", "import kvpack_cli.main", "may not import kvpack_cli"),
    "the kernels": ("kvpack.device.host", "def f():\n    import kvpack_kernels", "may import the kernels"),
    "the kernels, at once": (KERNELS_IMPORTER, "import kvpack_kernels", "inside the function"),
    "torch at module level": ("kvpack.engines.planted", "import torch", "inside the function"),
    "torch in a try": (
        "kvpack.engines.planted",
        "try:\n    import torch\nfinally:\n    pass",
        "inside the function",
    ),
    "torch in a class body": ("kvpack.engines.planted", "class C:\n    import torch", "inside the function"),
    "torch outside engines": ("kvpack.pack.planted", "def f():\n    import torch", "the library torch"),
    "torch beside TYPE_CHECKING": (
        "kvpack.engines.planted",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import torch",
        "inside the function",
    ),
    "obstore at module level": (
        "kvpack.store.planted",
        "from obstore.store import S3Store",
        "inside the function",
    ),
    "numpy in the model": ("kvpack.model.planted", "def f():\n    import numpy", "the library numpy"),
    "numpy in the front": ("kvpack.pack.reader", "import numpy as np", "without numpy"),
    "files in the model": ("kvpack.model.planted", "from pathlib import Path", "touches no files"),
    "mapped memory": ("kvpack.pack.planted", "import mmap", "never mapped"),
    "an undeclared library": ("kvpack.pack.planted", "import requests", "the library requests"),
}


@pytest.mark.parametrize(("module", "source", "rule"), CONTROLS.values(), ids=CONTROLS)
def test_a_planted_import_is_found(module: str, source: str, rule: str) -> None:
    found = violations(module, source)
    assert any(rule in line for line in found), found


ALLOWED = {
    "itself": ("kvpack.pack.planted", "from .canonical import encode"),
    "errors": ("kvpack.trust.planted", "from kvpack.errors import TrustError"),
    "errors through the root": ("kvpack.trust.planted", "from kvpack import errors"),
    "the model": ("kvpack.pack.planted", "from kvpack.model.encoding import Encoding"),
    "torch in a function": ("kvpack.engines.planted", "def f():\n    import torch"),
    "torch for types": (
        "kvpack.engines.planted",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
    ),
    "the kernels in a function": (KERNELS_IMPORTER, "def f():\n    import kvpack_kernels"),
    "numpy behind the front": ("kvpack.pack.codecs", "import numpy as np"),
    "numpy in a function of the front": ("kvpack.pack.reader", "def f():\n    import numpy"),
    "everything": ("kvpack_cli.planted", "import kvpack\nfrom kvpack import engines, model, pack, trust"),
}


@pytest.mark.parametrize(("module", "source"), ALLOWED.values(), ids=ALLOWED)
def test_an_allowed_import_is_not_found(module: str, source: str) -> None:
    assert violations(module, source) == []
