"""The kernels, compiled for the device at hand and kept on disk.

NVRTC is called directly: CuPy's own way adds ``-ftz=true``, and its cache does not see a changed header. The bytes of a
conversion depend on the flags here, so they are part of the cache's key.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

from kvpack.device.cuda_runtime import CudaRuntime
from kvpack.errors import EngineError, ResourceError

__all__ = ["CACHE_VARIABLE", "CudaKernels", "cache_folder", "compile_source", "kernel_sources"]

CACHE_VARIABLE: Final = "KVPACK_CACHE_DIR"
FLAGS: Final = ("--std=c++17", "--fmad=false")


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``$KVPACK_CACHE_DIR/cubin``, or ``~/.cache/kvpack/cubin``."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return (Path(chosen) if chosen else Path.home() / ".cache" / "kvpack") / "cubin"


@cache
def kernel_sources() -> Mapping[str, str]:
    """Every source and header of the package by its file name."""
    from importlib.resources import files

    import kvpack_kernels

    folder = files(kvpack_kernels)
    named = sorted((entry.name, entry) for entry in folder.iterdir() if entry.name.endswith((".cu", ".h")))
    return {name: entry.read_text("utf-8") for name, entry in named}


def compile_source(nvrtc: Any, source: str, architecture: str) -> bytes:
    """``<source>.cu`` as a cubin for ``architecture`` (``sm_90``). Needs no device.

    Raises EngineError ``no-compiler`` where NVRTC is not installed, ``unknown-architecture`` where it is older than the
    device, ``compile-failed`` with its log.
    """
    texts = kernel_sources()
    # CuPy takes the source as str and the headers as bytes.
    headers = {name.encode(): text.encode() for name, text in texts.items() if name.endswith(".h")}
    try:
        known = [f"sm_{number}" for number in nvrtc.getSupportedArchs()]
    except RuntimeError as error:
        # CuPy looks for the library at the first call; what it raises then differs between its versions.
        raise EngineError(
            "no-compiler",
            f"NVRTC cannot be used: {str(error).splitlines()[0]}",
            field="library",
            found="nvrtc",
            hint="pip install nvidia-cuda-nvrtc (CUDA 13) or nvidia-cuda-nvrtc-cu12",
        ) from error
    if architecture not in known:
        raise EngineError(
            "unknown-architecture",
            f"NVRTC cannot compile for {architecture}",
            field="architecture",
            expected=", ".join(known),
            found=architecture,
            hint="install a newer NVRTC",
        )
    program = nvrtc.createProgram(texts[f"{source}.cu"], f"{source}.cu", tuple(headers.values()), tuple(headers))
    try:
        nvrtc.compileProgram(program, (*FLAGS, f"--gpu-architecture={architecture}"))
        # CuPy cuts the last byte off, as if the image were a string.
        return bytes(nvrtc.getCUBIN(program)) + b"\0"
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise EngineError("compile-failed", f"{source}.cu for {architecture}: {error}\n{log}", found=source) from error
    finally:
        nvrtc.destroyProgram(program)


class CudaKernels:
    """The entry points of the package's sources, each source compiled and loaded when it is first used."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._functions: dict[str, Any] = {}

    def function(self, source: str, kernel: str) -> Any:
        """What :meth:`CudaRuntime.launch` takes. Raises what :func:`compile_source` raises, and ``cuda-error``."""
        found = self._functions.get(kernel)
        if found is None:
            image = self._image(source)
            with self._runtime.calls(f"loading {source}"):
                found = self._runtime.cupy.RawModule(path=str(image)).get_function(kernel)
            self._functions[kernel] = found
        return found

    def _image(self, source: str) -> Path:
        """The cubin's file: of the cache, or compiled and put there, whole or not at all."""
        nvrtc = self._runtime.cupy.cuda.nvrtc
        architecture = self._runtime.architecture
        parts = [source, architecture, *FLAGS, _nvrtc_version(nvrtc)]
        parts += [part for name, text in kernel_sources().items() for part in (name, text)]
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
        path = cache_folder() / f"{source}-{architecture}-{digest}.cubin"
        if path.is_file():
            return path
        image = compile_source(nvrtc, source, architecture)
        unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(image)
            unfinished.replace(path)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink()
            raise ResourceError(
                "cache-unwritable",
                f"the compiled kernels cannot be kept in {path.parent}: {error.strerror}",
                found=str(path.parent),
                hint=f"name another folder with {CACHE_VARIABLE}",
            ) from error
        return path


def _nvrtc_version(nvrtc: Any) -> str:
    try:
        return str(nvrtc.getVersion())
    except RuntimeError:
        return "none"  # only a kept image can be used
