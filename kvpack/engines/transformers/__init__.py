"""Sessions of Hugging Face transformers: load, describe, identify, capture, plan, install, and decode;
and a warm start from a prefix store.

Attention layers (full, sliding, chunked, latent, with an indexer, compressed), recurrent ones, both in one, and layers
that share a cache; dynamic and static caches, f32, bf16 and f16, one sequence without padding. Everything else is
refused by name. torch and transformers are imported by the first call that needs them.
"""

from kvpack.engines.transformers.caches import describe, new_cache
from kvpack.engines.transformers.capturing import capture
from kvpack.engines.transformers.chat import ChatTokens, chat_tokens
from kvpack.engines.transformers.decoding import Decoded, decode, logits_digest, prefill
from kvpack.engines.transformers.identification import identify
from kvpack.engines.transformers.installing import Installed, install, plan
from kvpack.engines.transformers.loading import LoadedModel, load_model
from kvpack.engines.transformers.warm import Generated, WarmCache, generate, warm_cache
from kvpack.engines.transformers.weights import ModelSource, cache_folder

__all__ = [
    "ChatTokens",
    "Decoded",
    "Generated",
    "Installed",
    "LoadedModel",
    "ModelSource",
    "WarmCache",
    "cache_folder",
    "capture",
    "chat_tokens",
    "decode",
    "describe",
    "generate",
    "identify",
    "install",
    "load_model",
    "logits_digest",
    "new_cache",
    "plan",
    "prefill",
    "warm_cache",
]
