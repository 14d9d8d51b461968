"""kvpack: the KV cache of a session as a portable, signed file.

>>> import kvpack
>>> from kvpack.engines import transformers as engine
>>> cut = engine.capture(model, cache, tokens)            # doctest: +SKIP
>>> kvpack.save(cut, "session.kvpack", sign=key)          # doctest: +SKIP
>>> cut = kvpack.load("session.kvpack", trust="key.pub")  # doctest: +SKIP
>>> engine.install(cut, model).cache                      # doctest: +SKIP

The verbs are the same everywhere: ``save`` and ``load`` move a cut between memory and a file, ``open_pack`` reads a
file on demand, ``inspect`` shows the front, ``verify`` checks every byte. Everything that goes wrong is a
:class:`kvpack.errors.KvpackError`.
"""

from __future__ import annotations

from kvpack.api import Inspection, Pack, Verified, inspect, load, open_pack, save, verify
from kvpack.errors import (
    CompatibilityError,
    DecryptError,
    EngineError,
    FormatError,
    InstallError,
    IntegrityError,
    KvpackError,
    ResourceError,
    StoreError,
    TrustError,
    UsageError,
)
from kvpack.model.identity import Claim, Identity
from kvpack.model.snapshot import Cut
from kvpack.trust import SigningKey, TrustPolicy, load_private_key, load_trust
from kvpack.version import __version__

__all__ = [
    "Claim",
    "CompatibilityError",
    "Cut",
    "DecryptError",
    "EngineError",
    "FormatError",
    "Identity",
    "Inspection",
    "InstallError",
    "IntegrityError",
    "KvpackError",
    "Pack",
    "ResourceError",
    "SigningKey",
    "StoreError",
    "TrustError",
    "TrustPolicy",
    "UsageError",
    "Verified",
    "__version__",
    "inspect",
    "load",
    "load_private_key",
    "load_trust",
    "open_pack",
    "save",
    "verify",
]
