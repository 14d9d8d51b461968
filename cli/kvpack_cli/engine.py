"""Engines by name, imported when a command needs one."""

from __future__ import annotations

import importlib
import os
from typing import Any

__all__ = ["ENGINES", "HOST", "engine_module"]

ENGINES = {"transformers": "kvpack.engines.transformers"}
HOST = "host"
"""A plain cache in main memory: no engine, since it has no model."""


def engine_module(name: str) -> Any:
    """The module of an engine's verbs; ``name`` is a key of ``ENGINES``."""
    # A model is a folder on this machine: nothing asks a hub, and no tokenizer threads survive a fork.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return importlib.import_module(ENGINES[name])
