"""The cache layers of transformers that kvpack knows: one adapter a class.

The registry is keyed by the exact class. A subclass may keep state that its parent does not, so it is another class
and refused by name until it has an adapter of its own. Classes are looked up by module and name, because some live in
the module of one model, which only that model's use imports.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from kvpack.engines.transformers import attention, compressed, recurrent
from kvpack.engines.transformers.layers import LayerAdapter
from kvpack.errors import EngineError

__all__ = ["adapter_of"]

_CACHE_UTILS: Final = "transformers.cache_utils"
_DEEPSEEK_V4: Final = "transformers.models.deepseek_v4.modeling_deepseek_v4"
_ADAPTERS: Final[Mapping[tuple[str, str], LayerAdapter]] = MappingProxyType(
    {
        (_CACHE_UTILS, "DynamicLayer"): attention.DYNAMIC_FULL,
        (_CACHE_UTILS, "DynamicSlidingWindowLayer"): attention.DYNAMIC_SLIDING,
        (_CACHE_UTILS, "DynamicIndexedLayer"): attention.DYNAMIC_INDEXED,
        (_CACHE_UTILS, "StaticLayer"): attention.STATIC_FULL,
        (_CACHE_UTILS, "StaticSlidingWindowLayer"): attention.STATIC_SLIDING,
        (_CACHE_UTILS, "StaticIndexedLayer"): attention.STATIC_INDEXED,
        (_CACHE_UTILS, "LinearAttentionLayer"): recurrent.RECURRENT,
        (_CACHE_UTILS, "LinearAttentionAndFullAttentionLayer"): recurrent.hybrid(attention.DYNAMIC_FULL),
        (_CACHE_UTILS, "LinearAttentionAndSlidingWindowAttentionLayer"): recurrent.hybrid(attention.DYNAMIC_SLIDING),
        (_CACHE_UTILS, "LinearAttentionAndStaticFullAttentionLayer"): recurrent.hybrid(attention.STATIC_FULL),
        (_CACHE_UTILS, "LinearAttentionAndStaticSlidingWindowAttentionLayer"): recurrent.hybrid(
            attention.STATIC_SLIDING
        ),
        (_CACHE_UTILS, "DummyLayer"): attention.WITHOUT_CACHE,
        (_DEEPSEEK_V4, "DeepseekV4HCACache"): compressed.COMPRESSED,
        (_DEEPSEEK_V4, "DeepseekV4CSACache"): compressed.COMPRESSED,
    }
)


def adapter_of(layer: Any, at: int) -> LayerAdapter:
    """The adapter of layer ``at``; EngineError ``unsupported-cache`` names a class that has none."""
    kind = type(layer)
    adapter = _ADAPTERS.get((kind.__module__, kind.__qualname__))
    # A name is not a class: the module must say that this is the class of that name.
    if adapter is None or getattr(sys.modules.get(kind.__module__), kind.__name__, None) is not kind:
        raise EngineError(
            "unsupported-cache",
            f"layer {at} is a {kind.__name__}, which kvpack cannot capture or install",
            layer=at,
            field="class",
            expected=", ".join(sorted(name for _, name in _ADAPTERS)),
            found=kind.__name__,
        )
    return adapter
