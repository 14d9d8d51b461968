"""Who a model is (spec/registry.md): the fields that must agree, and the numerics that lower a claim."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from blake3 import blake3

from kvpack.engines.transformers.caches import survey
from kvpack.engines.transformers.library import (
    encoding_name,
    host_words,
    require_torch,
    require_transformers,
)
from kvpack.engines.transformers.weights import ModelSource, weights_digest
from kvpack.errors import EngineError
from kvpack.model.identity import ABSENT, Identity, IdentityValue

__all__ = ["VOLATILE_CONFIG_NAMES", "chunked", "identify", "with_cache"]

VOLATILE_CONFIG_NAMES: Final = frozenset(
    {
        # names, paths, versions
        "architectures", "auto_map", "custom_pipelines", "name_or_path", "task_specific_params",
        "tokenizer_class", "transformers_version",
        # said by other fields: the element type, the weights' own form
        "dtype", "torch_dtype",
        # sizes that do not change the mathematics
        "max_position_embeddings", "chunk_size_feed_forward", "use_cache",
        # what a caller asks a forward to return
        "output_attentions", "output_hidden_states", "return_dict", "use_return_dict", "torchscript",
        # training
        "initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
        "classifier_dropout", "problem_type", "id2label", "label2id", "num_labels", "finetuning_task",
        "pretraining_tp", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
        # generation defaults, and tokens that only generation looks at
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "cls_token_id",
        "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "bad_words_ids",
        "begin_suppress_tokens",
        "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size",
        "num_beam_groups", "num_beams", "num_return_sequences", "output_scores", "prefix", "remove_invalid_values",
        "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p",
        "typical_p",
    }
)  # fmt: skip
"""Keys of a config that do not enter its digest, besides those that begin with ``_``."""


def identify(model: Any, tokenizer: Any = None, *, source: ModelSource | None = None, cache: Any = None) -> Identity:
    """The model's identity as it is in memory now. ``source`` may spare hashing a model that ``load_model`` read.

    With a live ``cache`` its class and capacity are among the numerics.

    Raises EngineError ``unsupported-adapter`` for adapters that cannot be read exactly, and what
    :func:`~kvpack.engines.transformers.weights.weights_digest` raises.
    """
    compatibility: dict[str, IdentityValue] = {
        "adapters": _adapters(model),
        "architecture": str(model.config.model_type),
        "config": _config_digest(model.config),
        "inputs": "tokens",
        "scalar": encoding_name(model.dtype),
        "template": ABSENT if tokenizer is None else _template_digest(tokenizer),
        "tokenizer": ABSENT if tokenizer is None else _tokenizer_digest(tokenizer),
        "weights": weights_digest(model, source),
    }
    identity = Identity(compatibility, _numerics(model))
    if cache is None:
        return identity
    live = survey(model, cache)
    return with_cache(identity, live.kind, live.capacity)


def with_cache(identity: Identity, kind: str, capacity: int | None) -> Identity:
    """The same identity for a session whose cache is of this kind; a capacity counts where it selects kernels."""
    numerics = {name: value for name, value in identity.numerics.items() if not name.startswith("cache_")}
    numerics["cache_class"] = kind
    if capacity is not None:
        numerics["cache_capacity"] = capacity
    return Identity(identity.compatibility, numerics)


def chunked(identity: Identity, boundaries: Sequence[int | str]) -> Identity:
    """The identity of a session whose prefill was divided there: another order of sums, so another numerics field."""
    if not boundaries:
        return identity
    divided = "cuts:" + ",".join(map(str, boundaries))
    return Identity(identity.compatibility, {**identity.numerics, "prefill": divided})


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str).encode()


def _config_digest(config: Any) -> bytes:
    wire = config.to_dict()
    return blake3(_canonical(_without_volatile(wire, _keeps_context(wire)))).digest()


def _keeps_context(value: object) -> bool:
    """Whether the context length is part of the mathematics: it is for scalings that depend on it."""
    if isinstance(value, Mapping):
        return value.get("rope_type") in ("dynamic", "longrope") or any(map(_keeps_context, value.values()))
    return False


def _without_volatile(value: object, keeps_context: bool) -> object:
    if not isinstance(value, Mapping):
        return value
    return {
        str(name): _without_volatile(entry, keeps_context)
        for name, entry in value.items()
        if not _is_volatile(str(name), entry) or (keeps_context and name == "max_position_embeddings")
    }


def _is_volatile(name: str, entry: object) -> bool:
    # A GGUF's blocks are decoded at load: the tensors in memory are plain, and only the config still speaks of them.
    if name == "quantization_config" and isinstance(entry, Mapping):
        return "gguf" in str(entry.get("quant_method", "")).lower()
    return name in VOLATILE_CONFIG_NAMES or name.startswith("_")


def _tokenizer_digest(tokenizer: Any) -> bytes:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        vocabulary = sorted(tokenizer.get_vocab().items())
        return blake3(_canonical([type(tokenizer).__name__, vocabulary, tokenizer.special_tokens_map])).digest()
    if backend.truncation is not None or backend.padding is not None:
        # Left behind by a call of the tokenizer; they are no part of its definition.
        backend = type(backend).from_str(backend.to_str())
        backend.no_truncation()
        backend.no_padding()
    return blake3(backend.to_str().encode()).digest()


def _template_digest(tokenizer: Any) -> IdentityValue:
    template = getattr(tokenizer, "chat_template", None)
    if template is None:
        return ABSENT
    return blake3(template.encode() if isinstance(template, str) else _canonical(template)).digest()


def _adapters(model: Any) -> IdentityValue:
    """``none``, or a digest over the active adapters: module, adapter, scale, tensors."""
    for name, settings in dict(getattr(model, "peft_config", None) or {}).items():
        if getattr(settings, "is_prompt_learning", False):
            raise EngineError(
                "unsupported-adapter",
                f"the adapter {name} puts learned rows before the prompt, which its tokens do not determine",
                field="adapters",
                found=type(settings).__name__,
            )
    whole = blake3(b"kvpack-adapters-v1\0")
    found = False
    for path, module in model.named_modules():
        if not _is_adapter(module):
            continue
        scales = getattr(module, "scaling", None)
        if not isinstance(scales, Mapping):
            raise EngineError(
                "unsupported-adapter",
                f"the adapter module {path} is a {type(module).__name__}, whose effect kvpack cannot read exactly",
                field="adapters",
                found=type(module).__name__,
            )
        for part in _active_parts(path, module, scales):
            found = True
            whole.update(struct.pack("<Q", len(part)) + part)
    return whole.digest() if found else "none"


def _is_adapter(module: Any) -> bool:
    """Whether a module is a tuner layer: it wraps a base layer and names its active adapters (PEFT's protocol)."""
    return hasattr(type(module), "active_adapters") and (hasattr(module, "base_layer") or hasattr(module, "scaling"))


def _active_parts(path: str, module: Any, scales: Mapping[str, float]) -> Iterator[bytes]:
    if getattr(module, "disable_adapters", False):
        return
    merged = tuple(getattr(module, "merged_adapters", ()))
    for adapter in sorted({*module.active_adapters, *merged} & scales.keys()):
        yield path.encode()
        yield adapter.encode()
        yield struct.pack("<d?", float(scales[adapter]), adapter in merged)
        for name, tensor in sorted(module.state_dict().items()):
            if adapter in name.split("."):
                yield name.encode()
                yield encoding_name(tensor.dtype).encode()
                yield host_words(tensor.cpu().contiguous().reshape(-1)).tobytes()


def _numerics(model: Any) -> dict[str, IdentityValue]:
    torch = require_torch()
    return {
        "attention": str(getattr(model.config, "_attn_implementation", None) or "eager"),
        "blas": _blas(torch.__config__.show()),
        "device": _device(torch, model.device),
        "engine": f"transformers {require_transformers().__version__}",
        "isa": _isa(torch),
        "matmul_precision": _matmul_precision(torch, model.device.type),
        "prefill": "whole",
        "threads": int(torch.get_num_threads()),
        "torch": str(torch.__version__),
    }


def _blas(build: str) -> str:
    """The matrix libraries that torch was built with, and their versions."""
    libraries = {"mkl": r"Math Kernel Library Version ([\w.]+)", "onednn": r"MKL-DNN v([\w.]+)"}
    found = [f"{name} {match[1]}" for name, text in libraries.items() if (match := re.search(text, build))]
    name = re.search(r"BLAS_INFO=(\w+)", build)
    if name and name[1] not in libraries:
        found.insert(0, name[1])
    return ", ".join(found) or "unknown"


def _device(torch: Any, device: Any) -> str:
    return f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device.type)


def _isa(torch: Any) -> str:
    """The instruction set that torch's own kernels use, and the extensions that oneDNN picks kernels by."""
    names = {"bf16": "_is_avx512_bf16_supported", "amx": "_is_amx_tile_supported", "amx-fp16": "_is_amx_fp16_supported"}
    extensions = [name for name, probe in names.items() if getattr(torch.cpu, probe, bool)()]
    return "+".join([str(torch.backends.cpu.get_cpu_capability()), *extensions])


def _matmul_precision(torch: Any, device: str) -> str:
    parts = [str(torch.get_float32_matmul_precision())]
    if torch.are_deterministic_algorithms_enabled():
        parts.append("deterministic")
    if device == "cuda":
        matmul = torch.backends.cuda.matmul
        parts += [
            name
            for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
            if getattr(matmul, name)
        ]
    return ", ".join(parts)
