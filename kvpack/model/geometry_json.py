"""A geometry as people write it: decoded JSON in, a geometry out. Pure; the file is read elsewhere.

The form is described in ``fixtures/geometries/README.md``. Layers are written one by one, repeated, by the names of
templates, or as the manifest itself holds them (with ``planes``); all four may be mixed, and what
``kvpack inspect --json`` prints as ``geometry`` is read as it stands.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Final

from kvpack.errors import CompatibilityError, FormatError, UsageError
from kvpack.model.encoding import encoding_from_wire, unknown_part
from kvpack.model.geometry import Geometry, LayerGeometry
from kvpack.model.wire import WireMap, bad_manifest

__all__ = ["MAX_LAYERS", "Digest", "geometry_from_json"]

MAX_LAYERS: Final = 4096
_MAX_DEPTH: Final = 8
_MOST: Final = 1e30
_TIMES: Final = re.compile(r"([A-Za-z][A-Za-z0-9_-]*)(?:\*([0-9]{1,4}))?")
_LAYER_NUMBERS: Final = ("window", "sink", "pool", "kv_rank", "rope_dim", "source")

Digest = Callable[[bytes], bytes]
"""BLAKE3: a rotation is named by the digest of its frequencies."""


def geometry_from_json(decoded: object, digest: Digest) -> Geometry:
    """Read the decoded JSON of a geometry.

    Raises UsageError ``bad-geometry``, with the path of the fault (``layers[3].pattern[0].window``) in the message and
    as its ``field``.
    """
    try:
        return _geometry(WireMap(decoded, ""), digest)
    except (FormatError, CompatibilityError) as error:
        message = error.message.removeprefix("manifest field ")
        raise UsageError(
            "bad-geometry",
            f"the geometry: {message}",
            field=error.field,
            expected=error.expected,
            found=error.found,
            hint="fixtures/geometries/README.md describes the form",
        ) from None


def _geometry(wire: WireMap, digest: Digest) -> Geometry:
    wire.opt_string("about")
    templates = _templates(wire)
    ropes: dict[str, object] = {}
    if wire.has("ropes"):
        table = wire.map("ropes")
        ropes = {name: _rope(table.map(name), digest) for name in table.names()}
    found: dict[str, object] = {"ropes": ropes} if ropes else {}
    places: dict[str, str] = {}
    for key in ("layers", "draft_layers"):
        if key == "layers" or wire.has(key):
            layers: list[object] = []
            for path, layer in _entries(wire, key, templates):
                places[f"{key}[{len(layers)}]"] = path
                layers.append(layer.to_wire())
                if len(layers) > MAX_LAYERS:
                    raise bad_manifest(path, "is one layer too many", expected=MAX_LAYERS, found=len(layers))
            found[key] = layers
    wire.done()
    try:
        geometry = Geometry.from_wire(WireMap(found, ""))
    except FormatError as error:
        # The layer's number is of little use to somebody who wrote `repeat`: name the place in the file.
        name, _, rest = (error.field or "").partition(".")
        place = f"{places.get(name, name)}.{rest}"
        raise FormatError(
            error.code,
            f"{place} ({name}){error.message.partition(error.field or '')[2]}",
            field=place,
            expected=error.expected,
            found=error.found,
        ) from None
    if not geometry.layers:
        raise bad_manifest("layers", "is empty")
    return geometry


def _templates(wire: WireMap) -> Mapping[str, WireMap]:
    if not wire.has("templates"):
        return {}
    table = wire.map("templates")
    return {name: table.map(name) for name in table.names()}


def _entries(
    wire: WireMap, key: str, templates: Mapping[str, WireMap], depth: int = 0
) -> Iterator[tuple[str, LayerGeometry]]:
    """Every layer of a list of entries, with the path of the entry that it is written in."""
    if depth > _MAX_DEPTH:
        raise bad_manifest(wire.path(key), f"is nested more than {_MAX_DEPTH} deep")
    for at, entry in enumerate(wire.array(key, most=MAX_LAYERS)):
        path = f"{wire.path(key)}[{at}]"
        times, layers = _entry(entry, path, templates, depth)
        # Held to the limit before anything is repeated.
        if times * len(layers) > MAX_LAYERS:
            raise bad_manifest(path, "makes too many layers", expected=f"at most {MAX_LAYERS}", found=times)
        for _ in range(times):
            yield from layers


def _entry(
    entry: object, path: str, templates: Mapping[str, WireMap], depth: int
) -> tuple[int, list[tuple[str, LayerGeometry]]]:
    """What one entry repeats, and how often."""
    if isinstance(entry, str):
        match = _TIMES.fullmatch(entry)
        if match is None or match[1] not in templates:
            known = ", ".join(templates) or "none are defined"
            raise bad_manifest(path, "is not the name of a template, or NAME*COUNT", expected=known, found=entry)
        return int(match[2] or 1), [(path, _layer(templates[match[1]], f"templates.{match[1]}"))]
    wire = WireMap(entry, path)
    times = wire.uint("repeat", least=1, most=MAX_LAYERS) if wire.has("repeat") else 1
    if not wire.has("pattern"):
        return times, [(path, _layer(wire, path))]
    layers = list(islice(_entries(wire, "pattern", templates, depth + 1), MAX_LAYERS + 1))
    wire.done()
    return times, layers


def _layer(wire: WireMap, path: str) -> LayerGeometry:
    """One layer, by its planes or by the words of its kind; held to the rules of the kind."""
    kind = wire.name("kind")
    found: dict[str, object] = {"kind": kind}
    found |= {name: wire.uint(name) for name in _LAYER_NUMBERS if wire.has(name)}
    if wire.has("rope"):
        found["rope"] = wire.string("rope")
    found["planes"] = wire.array("planes", most=256) if wire.has("planes") else _planes(wire, kind)
    wire.done()
    layer = LayerGeometry.from_wire(WireMap(found, path))
    for at, plane in enumerate(layer.planes):
        name = unknown_part(plane.encoding)
        if name is not None:
            raise bad_manifest(f"{path}.planes[{at}].encoding", "is not known to this version", found=name)
        try:
            plane.encoding.row_bytes(plane.row_shape)
        except CompatibilityError as error:
            where = f"{path} ({plane.role})"
            raise bad_manifest(where, error.message, expected=error.expected, found=error.found) from None
    return layer


def _planes(wire: WireMap, kind: str) -> list[object]:
    if kind in ("full", "sliding", "cross"):
        return _key_value(wire, kind)
    if kind == "latent":
        return _latent(wire)
    if kind == "recurrent":
        return _states(wire)
    if kind == "hybrid":
        return [*_key_value(wire, kind), *_states(wire)]
    if kind in ("shared", "none"):
        return []
    raise bad_manifest(wire.path("planes"), f"is missing; a layer of the kind {kind} is written with its planes")


def _encoding(wire: WireMap, key: str, default: str | None = None) -> object:
    if default is not None and wire.has(default):
        wire.get(default)  # known, also where the closer name takes its place
    if default is not None and not wire.has(key):
        key = default
    value = wire.get(key)
    try:
        encoding_from_wire(value)
    except FormatError as error:
        raise bad_manifest(wire.path(key), error.message, found=error.found) from None
    return value


def _key_value(wire: WireMap, kind: str) -> list[object]:
    heads = wire.uint("num_kv_heads", least=1)
    k_dim = wire.uint("head_dim", least=1)
    v_dim = wire.uint("v_head_dim", least=1) if wire.has("v_head_dim") else k_dim
    common: dict[str, object] = {"unit": "token"}
    if kind == "cross":
        common = {"unit": "fixed", "rows": wire.uint("rows", least=1)}
    keys = _encoding(wire, "k_encoding", "encoding")
    values = _encoding(wire, "v_encoding", "encoding")
    return [
        {"role": "k", "encoding": keys, "row_shape": [heads, k_dim], **common},
        {"role": "v", "encoding": values, "row_shape": [heads, v_dim], **common},
    ]


def _latent(wire: WireMap) -> list[object]:
    width = wire.uint("kv_rank") + (wire.uint("rope_dim") if wire.has("rope_dim") else 0)
    encoding = _encoding(wire, "encoding")
    shape = [width] if isinstance(encoding, str) else []
    planes: list[object] = [{"role": "latent", "encoding": encoding, "row_shape": shape, "unit": "token"}]
    if not wire.has("pool"):
        return planes
    index = _encoding(wire, "index_encoding", "encoding")
    if wire.uint("pool", least=1) == 1:
        dim = wire.uint("index_dim", least=1)
        return [*planes, {"role": "index_key", "encoding": index, "row_shape": [dim], "unit": "pool"}]
    tail = wire.uint("index_width", least=2)
    dim = wire.uint("index_dim", least=1) if wire.has("index_dim") else tail // 2
    return [
        *planes,
        {"role": "index_key", "encoding": index, "row_shape": [dim], "unit": "pool"},
        {"role": "index_tail", "encoding": index, "row_shape": [tail], "unit": "token"},
    ]


def _states(wire: WireMap) -> list[object]:
    """``conv`` and ``ssm``: one state each, or a list of them (``conv.0``, ``conv.1``, …)."""
    planes: list[object] = []
    for role in ("conv", "ssm"):
        if not wire.has(role):
            continue
        several = isinstance(wire.get(role), list)
        states = wire.maps(role, most=64) if several else [wire.map(role)]
        for at, state in enumerate(states):
            plane: dict[str, object] = {
                "role": f"{role}.{at}" if several else role,
                "encoding": _encoding(state, "encoding"),
                "row_shape": list(state.uints("shape", most_entries=8, least=1)),
                "unit": "state",
            }
            if state.has("axes"):
                plane["axes"] = list(state.strings("axes", most_entries=8))
            state.done()
            planes.append(plane)
    return planes


def _rope(wire: WireMap, digest: Digest) -> dict[str, object]:
    """A rotation. Without a ``digest`` it is the plain one: the frequencies ``theta ** (-2i / dim)``, in float32."""
    dim = wire.uint("dim", least=1, most=1 << 20)
    theta = _number(wire, "theta", least=1.0)
    scaling = _number(wire, "scaling", least=0.0) if wire.has("scaling") else 1.0
    if wire.has("digest"):
        try:
            found = bytes.fromhex(wire.string("digest"))
        except ValueError:
            raise bad_manifest(wire.path("digest"), "is not 64 hexadecimal digits") from None
    else:
        frequencies = [1.0 / theta ** (2 * at / dim) for at in range(dim // 2)]
        found = digest(struct.pack(f"<{len(frequencies)}fd", *frequencies, scaling))
    pairing = wire.string("pairing") if wire.has("pairing") else "half"
    wire.done()
    return {"digest": found, "dim": dim, "pairing": pairing, "theta": theta}


def _number(wire: WireMap, key: str, *, least: float) -> float:
    """A finite number of at least ``least``; JSON's ``10000`` is a float here."""
    value = wire.get(key)
    if type(value) not in (int, float):
        raise bad_manifest(wire.path(key), "must be a number", found=type(value).__name__)
    assert isinstance(value, int | float)
    if not least <= value <= _MOST:
        bounds = f"{least:g} to {_MOST:g}"
        raise bad_manifest(wire.path(key), "is out of bounds", expected=bounds, found=str(value)[:32])
    return float(value)
