"""Whole caches of transformers: making one, telling what one is, and the geometry that a model gives its cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvpack.engines.transformers.layers import LayerAdapter, LayerRole
from kvpack.engines.transformers.library import forward, one_line, quiet, require_transformers
from kvpack.engines.transformers.registry import adapter_of
from kvpack.engines.transformers.rotation import kept_rotations, rotations
from kvpack.errors import EngineError, UsageError
from kvpack.model.geometry import Geometry, Unit

__all__ = ["CACHE_KINDS", "LiveCache", "describe", "new_cache", "survey"]

CACHE_KINDS = ("dynamic", "static")


def new_cache(model: Any, kind: str = "dynamic", capacity: int | None = None) -> Any:
    """A fresh cache for the model, as transformers makes it: ``dynamic``, or ``static`` for ``capacity`` tokens.

    Raises UsageError ``unknown-cache-kind``, ``bad-capacity`` (a static cache without one, a dynamic one with one), and
    EngineError ``unsupported-cache`` where transformers itself cannot make it.
    """
    if kind not in CACHE_KINDS:
        raise UsageError(
            "unknown-cache-kind",
            f"there is no cache kind {kind!r}",
            field="cache",
            expected=", ".join(CACHE_KINDS),
            found=kind,
        )
    if (capacity is not None) != (kind == "static") or (capacity is not None and capacity < 1):
        raise UsageError(
            "bad-capacity",
            "a static cache needs a capacity of at least one token, and a dynamic one has none",
            field="capacity",
            found=capacity,
        )
    transformers = require_transformers()
    try:
        if kind == "static":
            return transformers.StaticCache(config=model.config, max_cache_len=capacity)
        return transformers.DynamicCache(config=model.config)
    except Exception as error:
        raise EngineError(
            "unsupported-cache",
            f"transformers makes no {kind} cache for the model type {model.config.model_type}: {one_line(error)}",
            field="architecture",
            found=model.config.model_type,
        ) from error


@dataclass(frozen=True)
class LiveCache:
    """What a live cache is: its kind, its capacity in rows (static layers of rows only), each layer with its adapter.

    ``most_tokens`` is the longest session that it can hold (None: no limit). A static sliding layer of at least its
    window goes on for ever; a smaller one would lose rows that its window still covers.
    """

    kind: str
    capacity: int | None
    most_tokens: int | None
    layers: tuple[tuple[Any, LayerAdapter], ...]


def survey(model: Any, cache: Any) -> LiveCache:
    """Hold a live cache to the classes that the model's own cache would have.

    Raises EngineError ``unsupported-cache``, naming the class, for a cache or a layer that kvpack does not know, one
    that offloads its layers, and one whose layers are not those of this model (a ``DynamicCache()`` that was made
    without the config keeps the rows of sliding layers in plain ones).
    """
    transformers = require_transformers()
    kinds = {transformers.DynamicCache: "dynamic", transformers.StaticCache: "static"}
    kind = kinds.get(type(cache))
    if kind is None or cache.offloading:
        name = type(cache).__name__ + (" with offloading" if getattr(cache, "offloading", False) else "")
        raise EngineError(
            "unsupported-cache",
            f"kvpack cannot capture or install the cache class {name}",
            field="class",
            expected="DynamicCache, StaticCache",
            found=name,
        )
    adapters = [(layer, adapter_of(layer, at)) for at, layer in enumerate(cache.layers)]
    wanted = _layers_of(model, kind)
    if len(wanted) != len(adapters):
        raise EngineError(
            "unsupported-cache",
            f"the cache has {len(adapters)} layers, the model's own cache has {len(wanted)}",
            field="layers",
            expected=len(wanted),
            found=len(adapters),
            hint="make the cache with the model's config and run a forward first",
        )
    for at, ((layer, _), other) in enumerate(zip(adapters, wanted, strict=True)):
        if type(layer) is not type(other):
            raise EngineError(
                "unsupported-cache",
                f"layer {at} is a {type(layer).__name__}, in the model's own cache it is a {type(other).__name__}",
                layer=at,
                field="class",
                expected=type(other).__name__,
                found=type(layer).__name__,
                hint="make the cache with the model's config: DynamicCache(config=model.config)",
            )
    if kind == "dynamic":
        return LiveCache(kind, None, None, tuple(adapters))
    capacities = [adapter.capacity(layer) for layer, adapter in adapters]
    capacity = max(capacities) or None
    # Layers without rows (recurrent ones, and those that read another's cache) never end.
    endless = all(
        rows == 0 or (role.window is not None and rows >= role.window)
        for rows, role in zip(capacities, layer_roles(model), strict=True)
    )
    return LiveCache(kind, capacity, None if endless else capacity, tuple(adapters))


def describe(model: Any) -> Geometry:
    """The geometry of the model's cache, learned from a forward of a token or a few through a fresh cache.

    The same for dynamic and static caches. Raises EngineError ``unsupported-cache`` for a layer kind that kvpack does
    not know.
    """
    cache = new_cache(model)
    count = described_after(survey(model, cache))
    with quiet(), kept_rotations(model):
        forward(model, [0] * count, cache)
    return geometry_of(model, survey(model, cache))


def described_after(live: LiveCache) -> int:
    """The number of tokens after which the cache shows the shape of everything that it will hold."""
    return max((adapter.described_after(layer) for layer, adapter in live.layers), default=1)


def geometry_of(model: Any, live: LiveCache) -> Geometry:
    """The geometry of a live cache whose layers have all seen enough tokens (:func:`described_after`)."""
    roles = layer_roles(model)
    turned = rotations(model, [role.layer_type for role in roles])
    layers = []
    for (layer, adapter), role, rope in zip(live.layers, roles, turned.names, strict=True):
        found = adapter.geometry(layer, role)
        has_rows = any(plane.unit is Unit.TOKEN for plane in found.planes)
        layers.append(replace(found, rope=rope if has_rows else None))
    used = {layer.rope for layer in layers}
    return Geometry(tuple(layers), ropes={name: rope for name, rope in turned.table.items() if name in used})


def layer_roles(model: Any) -> list[LayerRole]:
    """What each layer of the model's cache is, as transformers reads the config.

    Raises EngineError ``unsupported-cache`` for a way of sharing caches between layers that kvpack does not know.
    """
    require_transformers()
    from transformers.cache_utils import get_layer_types_and_kwargs

    config = model.config.get_text_config(decoder=True)
    layer_types, arguments = get_layer_types_and_kwargs(config)
    rank, rope_dim = getattr(config, "kv_lora_rank", None), getattr(config, "qk_rope_head_dim", None)
    latent = (int(rank), int(rope_dim)) if rank and rope_dim is not None else None
    sources = _sources(config)
    return [
        LayerRole(at, layer_type, _window(keywords), latent, sources.get(at))
        for at, (layer_type, keywords) in enumerate(zip(layer_types, arguments, strict=True))
    ]


def _window(keywords: dict[str, Any]) -> int | None:
    window = keywords.get("sliding_window", getattr(keywords.get("config"), "sliding_window", None))
    return None if window is None else int(window)


def _sources(config: Any) -> dict[int, int]:
    """The layer that each sharing layer reads: the last one of its own type that keeps a cache (gemma3n, gemma4)."""
    modes = getattr(config, "kv_sharing_modes", None) or []
    found: dict[int, int] = {}
    last: dict[str, int] = {}
    for at, mode in enumerate(modes):
        layer_type = config.layer_types[at]
        if mode == "reuse":
            found[at] = last[layer_type]
        elif mode in (None, "store"):
            last[layer_type] = at
        else:
            raise EngineError(
                "unsupported-cache",
                f"layer {at} shares its cache by the mode {mode!r}, which kvpack does not know",
                layer=at,
                field="kv_sharing_modes",
                expected="store, reuse",
                found=mode,
            )
    return found


def _layers_of(model: Any, kind: str) -> list[Any]:
    return list(new_cache(model, kind, 1 if kind == "static" else None).layers)
