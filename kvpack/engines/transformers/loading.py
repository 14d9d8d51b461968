"""Models from a folder or a GGUF file, which is converted once; the copy is kept in the user's cache folder."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from kvpack.engines.transformers.library import one_line, quiet, require_transformers, torch_dtype
from kvpack.engines.transformers.weights import FileStamp, ModelSource, cache_folder, source_of
from kvpack.errors import EngineError, ResourceError, UsageError

__all__ = ["LoadedModel", "load_model"]

_SCALARS: Final = ("f32", "bf16", "f16")
_WEIGHT_FILES: Final = ("*.safetensors", "*.bin", "*.json")
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run (``eval`` mode), its tokenizer where the folder has one, and where it came from."""

    model: Any
    tokenizer: Any
    source: ModelSource


def load_model(path: str | os.PathLike[str], *, dtype: str | None = None) -> LoadedModel:
    """Read a model from a folder that transformers saved, or from a ``.gguf`` file. No network is used.

    ``dtype`` is ``f32``, ``bf16`` or ``f16``; by default it is the folder's own, as its config says. A GGUF's own is
    ``f32``: its blocks are decoded to float32 once, and the converted copy is kept under :func:`cache_folder`.

    Raises UsageError ``no-such-model`` and ``unknown-dtype``, EngineError ``missing-extra`` and ``model-load-failed``,
    ResourceError ``cache-not-writable`` where the converted copy cannot be written.
    """
    if dtype is not None and dtype not in _SCALARS:
        raise UsageError(
            "unknown-dtype",
            f"a model cannot be loaded as {dtype!r}",
            field="dtype",
            expected=", ".join(_SCALARS),
            found=dtype,
        )
    named = Path(path)
    is_gguf = named.suffix.lower() == ".gguf" and named.is_file()
    if not is_gguf and not (named / "config.json").is_file():
        raise UsageError(
            "no-such-model",
            f"{named} is neither a folder with a config.json nor a .gguf file",
            field="model",
            found=str(named),
        )
    require_transformers()
    with quiet():
        folder = _converted(named) if is_gguf else named
        files = tuple(FileStamp.of(file) for pattern in _WEIGHT_FILES for file in sorted(folder.glob(pattern)))
        model = _from_pretrained(folder, dtype=torch_dtype(dtype) if dtype else "auto")
        tokenizer = _tokenizer(folder)
    return LoadedModel(model, tokenizer, source_of(model, named, files))


def _from_pretrained(folder: Path, **options: Any) -> Any:
    transformers = require_transformers()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)
    except Exception as error:
        raise _load_failed("model", folder, options, error) from error
    return model.eval()


def _tokenizer(folder: Path, **options: Any) -> Any:
    if not options and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    transformers = require_transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, **options)
    except Exception as error:
        raise _load_failed("tokenizer", folder, options, error) from error


def _load_failed(what: str, folder: Path, options: dict[str, Any], error: Exception) -> EngineError:
    place = folder / options.get("gguf_file", "")
    return EngineError(
        "model-load-failed",
        f"transformers could not load the {what} of {place}: {one_line(error)}",
        field=what,
        found=str(place),
    )


def _converted(gguf: Path) -> Path:
    """The folder of the converted copy of a GGUF file, made if it is not there yet."""
    stamp = FileStamp.of(gguf)
    key = blake3(f"{stamp.path}\0{stamp.size}\0{stamp.mtime_ns}".encode()).hexdigest()[:32]
    folder = cache_folder() / "models" / key
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(f".{key}.{os.getpid()}.unfinished")
    try:
        unfinished.mkdir(parents=True)
        _convert(gguf, unfinished)
        # Where another process was faster, its copy is as good.
        with contextlib.suppress(FileExistsError):
            unfinished.rename(folder)
    except OSError as error:
        if folder.is_dir():
            return folder
        raise ResourceError(
            "cache-not-writable",
            f"the converted copy of {gguf.name} cannot be written to {folder.parent}: {one_line(error)}",
            field="KVPACK_CACHE_DIR",
            found=str(folder.parent),
            hint="set KVPACK_CACHE_DIR to a folder with enough free space",
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    model = _from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch_dtype("f32"))
    tokenizer = _tokenizer(gguf.parent, gguf_file=gguf.name)
    # The tensors are plain floats by now; without this, transformers would save a quantised model.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
