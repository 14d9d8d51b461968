"""torch and transformers, imported when they are needed, and the few calls that differ between their versions.

Element types: kvpack's registry names (``bf16``) on one side, torch's dtypes on the other. Rows are only ever moved as
integer words of the same size, so the payload bits of a NaN survive.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from kvpack.errors import EngineError

if TYPE_CHECKING:
    import torch

__all__ = [
    "encoding_name",
    "forward",
    "host_words",
    "one_line",
    "quiet",
    "require_torch",
    "require_transformers",
    "torch_dtype",
    "vocabulary_size",
]

_TORCH_NAMES: Final = MappingProxyType(
    {
        "f64": "float64",
        "f32": "float32",
        "bf16": "bfloat16",
        "f16": "float16",
        "f8_e4m3": "float8_e4m3fn",
        "f8_e5m2": "float8_e5m2",
        "i64": "int64",
        "i32": "int32",
        "i8": "int8",
        "u8": "uint8",
    }
)
_WORDS: Final = MappingProxyType({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64})
_LONGEST_MESSAGE: Final = 300


def _missing(library: str) -> EngineError:
    return EngineError(
        "missing-extra",
        f"{library} is not installed",
        field="library",
        found=library,
        hint="pip install 'kvpack[transformers]'",
    )


def require_torch() -> Any:
    """The module torch, or EngineError ``missing-extra``."""
    try:
        import torch
    except ImportError as error:
        raise _missing("torch") from error
    return torch


def require_transformers() -> Any:
    """The module transformers, or EngineError ``missing-extra``."""
    require_torch()
    try:
        import transformers
    except ImportError as error:
        raise _missing("transformers") from error
    return transformers


def one_line(error: BaseException) -> str:
    """The first line of an error's text, at most 300 characters; its class where it has no text."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= _LONGEST_MESSAGE else text[: _LONGEST_MESSAGE - 1] + "…"


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of an encoding's name; EngineError ``unsupported-dtype`` where there is none."""
    if name not in _TORCH_NAMES:
        raise EngineError(
            "unsupported-dtype",
            f"{name} is not an element type of torch",
            field="dtype",
            expected=", ".join(_TORCH_NAMES),
            found=name,
        )
    return getattr(require_torch(), _TORCH_NAMES[name])


def encoding_name(dtype: torch.dtype) -> str:
    """The registry's name of a torch dtype; EngineError ``unsupported-dtype`` where it has none."""
    wanted = str(dtype).removeprefix("torch.")
    for name, torch_name in _TORCH_NAMES.items():
        if torch_name == wanted:
            return name
    raise EngineError("unsupported-dtype", f"kvpack has no encoding for {dtype}", field="dtype", found=str(dtype))


def host_words(tensor: torch.Tensor) -> NDArray[Any]:
    """A host tensor's elements as unsigned words of the same size: a NumPy view of the same memory, any strides."""
    torch = require_torch()
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    words: NDArray[Any] = tensor.detach().view(signed).numpy().view(_WORDS[tensor.element_size()])
    return words


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars, advice and warnings, and put everything back afterwards.

    On a terminal, ``TRANSFORMERS_VERBOSITY`` set to ``warning`` or below keeps them.
    """
    if sys.stderr.isatty() and os.environ.get("TRANSFORMERS_VERBOSITY") in ("warning", "info", "debug"):
        yield
        return
    require_transformers()
    import transformers.modeling_gguf_pytorch_utils as gguf_reader
    from transformers.utils import logging as library_logging

    verbosity, bars = library_logging.get_verbosity(), library_logging.is_progress_bar_enabled()
    gguf_bar = gguf_reader.tqdm
    library_logging.set_verbosity(logging.CRITICAL)
    library_logging.disable_progress_bar()
    gguf_reader.tqdm = partial(gguf_bar, disable=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gguf_reader.tqdm = gguf_bar
        library_logging.set_verbosity(verbosity)
        if bars:
            library_logging.enable_progress_bar()


@cache
def _keywords(forward_of_class: Any) -> tuple[str, bool]:
    parameters = inspect.signature(forward_of_class).parameters
    # A wrapper that hands its keywords on names neither; transformers itself takes `cache`.
    is_older = "past_key_values" in parameters and "cache" not in parameters
    return ("past_key_values" if is_older else "cache"), "logits_to_keep" in parameters


def vocabulary_size(model: Any) -> int:
    """The number of rows of the model's input embedding."""
    return int(model.get_input_embeddings().weight.shape[0])


def forward(model: Any, tokens: Sequence[int], cache: Any) -> torch.Tensor:
    """One forward of ``tokens`` behind what ``cache`` holds; returns the last logits row ``[vocab_size]``.

    Only the last row is asked for where the model can do that, as transformers' own ``generate`` does. ``no_grad``, not
    ``inference_mode``: a static cache made in inference mode could not be written outside of it.

    Raises EngineError ``bad-token`` for a token id that the model has no embedding for, and ``forward-failed``.
    """
    torch = require_torch()
    size = vocabulary_size(model)
    for token in tokens:
        if not 0 <= token < size:
            raise EngineError(
                "bad-token",
                f"token id {token} is not in the model's vocabulary of {size}",
                field="tokens",
                expected=f"0 to {size - 1}",
                found=token,
            )
    cache_keyword, keeps_logits = _keywords(type(model).forward)
    arguments = {
        "input_ids": torch.tensor([list(tokens)], dtype=torch.long, device=model.device),
        cache_keyword: cache,
        "use_cache": True,
    }
    if keeps_logits:
        arguments["logits_to_keep"] = 1
    try:
        # Quiet: the first forward of some models advises to install faster kernels.
        with torch.no_grad(), quiet():
            return model(**arguments).logits[0, -1]
    except Exception as error:
        raise EngineError(
            "forward-failed",
            f"{type(model).__name__} failed on {len(tokens)} tokens: {one_line(error)}",
            field="model",
            found=type(error).__name__,
        ) from error
