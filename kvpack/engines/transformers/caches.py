"""Whole caches of transformers: making one, telling what one is, and the geometry that a model gives its cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpack.engines.transformers.layers import LayerAdapter, adapter_of
from kvpack.engines.transformers.library import forward, one_line, quiet, require_transformers
from kvpack.engines.transformers.rotation import kept_rotations, rotations
from kvpack.errors import EngineError, UsageError
from kvpack.model.geometry import Geometry, LayerGeometry

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
    """What a live cache is: its kind, its capacity in rows (static only), and each layer with its adapter.

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
            f"kvpack cannot capture or install a {name}",
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
    capacity = max(int(layer.max_cache_len) for layer, _ in adapters)
    _, windows = layer_types_and_windows(model)
    endless = all(
        window is not None and layer.max_cache_len >= window
        for (layer, _), window in zip(adapters, windows, strict=True)
    )
    return LiveCache(kind, capacity, None if endless else capacity, tuple(adapters))


def describe(model: Any) -> Geometry:
    """The geometry of the model's cache, learned from a forward of one token through a fresh cache.

    The same for dynamic and static caches. Raises EngineError ``unsupported-cache`` for a layer kind that kvpack does
    not know.
    """
    cache = new_cache(model)
    for at, layer in enumerate(cache.layers):
        adapter_of(layer, at)
    with quiet(), kept_rotations(model):
        forward(model, [0], cache)
    return geometry_of(model, survey(model, cache))


def geometry_of(model: Any, live: LiveCache) -> Geometry:
    """The geometry of a live cache whose layers have all seen a token."""
    layer_types, windows = layer_types_and_windows(model)
    turned = rotations(model, layer_types)
    layers = []
    for at, (layer, adapter) in enumerate(live.layers):
        window = windows[at]
        if adapter.kind == "sliding" and (window is None or window < 2):
            raise EngineError(
                "unsupported-cache",
                f"layer {at} slides over a window of {window}; transformers keeps no row of it apart",
                layer=at,
                field="window",
                expected="at least 2",
                found=window,
            )
        layers.append(LayerGeometry(adapter.kind, adapter.planes(layer), window=window, rope=turned.names[at]))
    return Geometry(tuple(layers), ropes=turned.table)


def layer_types_and_windows(model: Any) -> tuple[list[str], list[int | None]]:
    """The types of the cache's layers and their windows (None: not sliding), as transformers reads the config."""
    require_transformers()
    from transformers.cache_utils import get_layer_types_and_kwargs

    layer_types, arguments = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
    return list(layer_types), [keywords.get("sliding_window") for keywords in arguments]


def _layers_of(model: Any, kind: str) -> list[Any]:
    return list(new_cache(model, kind, 1 if kind == "static" else None).layers)
