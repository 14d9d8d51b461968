"""A small decoder that keeps its state in a live cache, for the proof that a restored session replays bit for bit.

Seeded random weights, float32 arithmetic, and no product whose order of summation a library may choose: every sum over
dims or rows is a running sum, one addend after the other. So each token's values do not depend on how many tokens are
computed beside it, and the *only* order that can matter is the one in which attention meets the rows:

* a decode step appends its row and attends over the plane in **physical** order, as a kernel on a ring does;
* a prefill chunk stages the old rows un-rotated with its own behind them, attends over that one linear span, and is
  appended only afterwards, since a chunk that wraps overwrites rows that its own queries still read.

Kinds: full (NoPE or RoPE, any order), sliding (any law, with or without sinks), latent with an indexer (pool keys built
from pool rows; the best pools and always the tail are read), recurrent (a causal convolution and a decaying state),
shared (own queries over another layer's rows).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvpack.device.host import HostBuffer, HostDevice
from kvpack.device.protocol import RowStrides
from kvpack.device.staging import Stage
from kvpack.live.cache import LiveCache
from kvpack.live.layers import LayerAppend, LiveLayer, LivePlane
from kvpack.live.placement import Placement
from kvpack.live.rings import RotatingRing
from kvpack.model.encoding import ENCODINGS
from kvpack.model.geometry import Geometry, LayerGeometry, PlaneGeometry, PlaneKey, Rope, Unit
from kvpack.model.layout import LayerLayout, ProducerLayout

Floats = NDArray[np.float32]

WIDTH, VOCAB, QUERY_HEADS, TOP_POOLS = 24, 61, 4, 2
STORAGE = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2")}


# --- geometries -------------------------------------------------------------------------------------------------------


def rope(dim: int, theta: float = 10_000.0) -> Rope:
    return Rope(dim, "half", theta, hashlib.sha256(f"{dim} {theta}".encode()).digest())


def attention(
    window: int | None = None,
    *,
    sink: int | None = None,
    heads: int = 2,
    dim: int = 8,
    encoding: str = "f32",
    turned: bool = False,
) -> LayerGeometry:
    """A full layer, or a sliding one with a ``window``; ``turned`` rotates queries and keys by their positions."""
    planes = tuple(PlaneGeometry(role, ENCODINGS[encoding], (heads, dim)) for role in ("k", "v"))
    kind = "full" if window is None else "sliding"
    return LayerGeometry(kind, planes, window=window, sink=sink, rope=f"d{dim}" if turned else None)


def latent(pool: int | None = 4, *, kv_rank: int = 12, rope_dim: int = 4, index_width: int = 8) -> LayerGeometry:
    f32 = ENCODINGS["f32"]
    planes = [PlaneGeometry("latent", f32, (kv_rank + rope_dim,))]
    if pool is not None:
        planes.append(PlaneGeometry("index_key", f32, (index_width // 2,), Unit.POOL))
        if pool > 1:
            planes.append(PlaneGeometry("index_tail", f32, (index_width,)))
    return LayerGeometry("latent", tuple(planes), pool=pool, kv_rank=kv_rank, rope_dim=rope_dim, rope=f"d{rope_dim}")


def recurrent(channels: int = 12, taps: int = 3, heads: int = 3, states: int = 5) -> LayerGeometry:
    f32 = ENCODINGS["f32"]
    conv = PlaneGeometry("conv", f32, (channels, taps), Unit.STATE, axes=("channel", "tap"))
    ssm = PlaneGeometry("ssm", f32, (heads, channels // heads, states), Unit.STATE, axes=("head", "dim", "state"))
    return LayerGeometry("recurrent", (conv, ssm))


def geometry(*layers: LayerGeometry) -> Geometry:
    """A model of ``layers``, with every rotation that they name."""
    dims = {int(layer.rope[1:]) for layer in layers if layer.rope is not None}
    return Geometry(layers, ropes={f"d{dim}": rope(dim) for dim in sorted(dims)})


def layouts(model: Geometry, max_context: int, **sliding: object) -> ProducerLayout:
    """Growing planes head-major; sliding ones as given: ``law``, ``capacity``, ``order``, ``page_size``."""

    def of(layer: LayerGeometry) -> LayerLayout:
        if layer.kind == "sliding":
            law = sliding.get("law", "modulo" if layer.sink is None else "pinned")
            rows = sliding.get("capacity", (layer.window or 0) + (layer.sink or 0))
            return LayerLayout(str(law), int(rows), str(sliding.get("order", "NHD")), sliding.get("page_size"))  # type: ignore[call-overload, arg-type]
        if layer.kind in ("full", "latent"):
            return LayerLayout("linear", max_context, "HND")
        return LayerLayout("none", 0)

    return ProducerLayout(tuple(map(of, model.layers)))


# --- arithmetic in a fixed order --------------------------------------------------------------------------------------


def running_sum(addends: Floats, axis: int) -> Floats:
    """The sum along ``axis``, one addend after the other."""
    if addends.shape[axis] == 0:
        return np.zeros([n for at, n in enumerate(addends.shape) if at != axis % addends.ndim], np.float32)
    return np.add.accumulate(addends, axis=axis, dtype=np.float32).take(-1, axis=axis)


def linear(x: Floats, weight: Floats) -> Floats:
    """[T, in] by [in, out]."""
    return running_sum(x[:, :, None] * weight, 1)


def norm(x: Floats) -> Floats:
    """Root-mean-square normalisation of each row."""
    mean = running_sum(x * x, 1) / np.float32(x.shape[1])
    return x / np.sqrt(mean + np.float32(1e-5))[:, None]


def sigmoid(x: Floats) -> Floats:
    return np.float32(1) / (np.float32(1) + np.exp(-x))


def rotate(x: Floats, positions: NDArray[np.int64], theta: float) -> Floats:
    """RoPE of [T, heads, dim], halves paired."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = (turn(angles).astype(np.float32)[:, None, :] for turn in (np.cos, np.sin))
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attend(query: Floats, keys: Floats, values: Floats, visible: NDArray[np.bool_]) -> Floats:
    """One query [H, D] over rows [R, Hkv, D] and [R, Hkv, Dv], met in the order in which they come; [H, Dv]."""
    keys, values = keys[visible], values[visible]
    groups = query.shape[0] // keys.shape[1]
    keys, values = np.repeat(keys, groups, axis=1), np.repeat(values, groups, axis=1)
    scores = running_sum(query * keys, 2) / np.float32(np.sqrt(query.shape[-1]))
    weights = np.exp(scores - scores.max(axis=0))
    return running_sum(weights[:, :, None] * values, 0) / running_sum(weights, 0)[:, None]


# --- rows of a live cache ---------------------------------------------------------------------------------------------


def physical_rows(plane: LivePlane) -> NDArray[np.generic]:
    """A view of the plane's memory as [physical row, heads, dim], whatever its order."""
    spec, strides = plane.spec, plane.strides
    storage = STORAGE[spec.encoding.name]  # type: ignore[union-attr]
    heads, dim = spec.row_shape if len(spec.row_shape) == 2 else (1, spec.row_shape[-1])
    head_stride = strides.part_stride if strides.parts == heads and heads > 1 else dim * storage.itemsize
    assert isinstance(plane.buffer, HostBuffer)
    memory = plane.buffer.array
    rows = plane.buffer.nbytes // spec.row_bytes
    return np.ndarray((rows, heads, dim), storage, memory, 0, (strides.row_stride, head_stride, storage.itemsize))


@dataclass(frozen=True)
class Span:
    """What one attention meets, in its order: rows of each plane, and the logical row of each (-1: dead)."""

    rows: dict[str, NDArray[np.generic]]
    logical: NDArray[np.int64]

    def floats(self, role: str) -> Floats:
        return self.rows[role].astype(np.float32)


def after_append(layer: LiveLayer, plan: LayerAppend, fresh: dict[str, NDArray[np.generic]]) -> Span:
    """The planes as ``plan`` will leave them, in physical order."""
    assert plan.rows is not None
    rows = {}
    for role, new in fresh.items():
        plane = physical_rows(layer.planes[role]).copy()
        for move in plan.rows.moves:
            plane[move.destination : move.destination + move.count] = plane[
                move.source : move.source + move.count
            ].copy()
        for span in plan.rows.writes:
            plane[span.physical : span.physical_end] = new[span.logical - plan.start : span.logical_end - plan.start]
        rows[role] = plane
    after = plan.rows.after
    logical = np.full(len(next(iter(rows.values()))), -1, np.int64)
    for first, end in after.resident:
        for span in after.spans(first, end):
            logical[span.physical : span.physical_end] = np.arange(span.logical, span.logical_end)
    return Span(rows, logical)


def staged(layer: LiveLayer, start: int, fresh: dict[str, NDArray[np.generic]]) -> Span:
    """The old rows in logical order and the chunk's behind them; the planes are not written to."""
    placement = layer.state.placement
    assert placement is not None
    old = np.concatenate([np.arange(a, b) for a, b in placement.resident] or [np.zeros(0, np.int64)])
    count = len(next(iter(fresh.values())))
    rows = {role: _staged_plane(layer, layer.planes[role], placement, new) for role, new in fresh.items()}
    return Span(rows, np.concatenate([old, np.arange(start, start + count)]))


def _staged_plane(
    layer: LiveLayer, plane: LivePlane, placement: Placement, new: NDArray[np.generic]
) -> NDArray[np.generic]:
    shape = new.shape[1:]
    if not isinstance(placement, RotatingRing):
        old = b"".join(layer.read_rows(plane, a, b) for a, b in placement.resident)
        return np.concatenate([np.frombuffer(old, new.dtype).reshape(-1, *shape), new])
    device, strides = layer.device, plane.strides
    assert isinstance(device, HostDevice)
    shadow = device.allocate((placement.length + len(new)) * plane.spec.row_bytes)
    device.stage(
        [
            Stage(
                ring=plane.buffer,
                ring_strides=strides,
                ring_rows=placement.capacity,
                rotation=placement.origin_physical,
                rows=placement.length,
                shadow=shadow,
                shadow_strides=RowStrides(strides.parts, strides.part_bytes, strides.row_bytes, strides.part_bytes),
                chunk=device.wrap(np.ascontiguousarray(new)),
                chunk_offset=0,
                chunk_rows=len(new),
            )
        ]
    )
    return shadow.array.view(new.dtype).reshape(-1, *shape)


def state(layer: LiveLayer, role: str) -> Floats:
    """A copy of a recurrent state."""
    plane = layer.planes[role]
    content = layer.read_rows(plane, 0, plane.spec.row_bytes)
    return np.frombuffer(content, "<f4").reshape(plane.spec.row_shape).copy()


# --- the model --------------------------------------------------------------------------------------------------------


class Weights:
    """Seeded random matrices, made when they are first asked for; the same name gives the same matrix."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._made: dict[tuple[int, str], Floats] = {}

    def __call__(self, layer: int, name: str, rows: int, columns: int) -> Floats:
        if (layer, name) not in self._made:
            generator = np.random.default_rng([self._seed, layer + 1, *name.encode()])
            matrix = generator.standard_normal((rows, columns)) / np.sqrt(rows)
            self._made[layer, name] = matrix.astype(np.float32)
        return self._made[layer, name]


@dataclass
class _Pass:
    """One forward pass: the tokens' positions, the rows it makes, and the spans that shared layers read again."""

    positions: NDArray[np.int64]
    decode: bool
    rows: dict[PlaneKey, bytes] = field(default_factory=dict)
    spans: dict[int, Span] = field(default_factory=dict)

    @property
    def start(self) -> int:
        return int(self.positions[0])


class Session:
    """One sequence: its tokens, its position, its cache."""

    def __init__(
        self,
        model: Geometry,
        *,
        max_context: int = 96,
        layout: ProducerLayout | None = None,
        seed: int = 0,
        index_rows: int | None = 8,
    ) -> None:
        self.geometry = model
        self.weights = Weights(seed)
        chosen = layout or layouts(model, max_context)
        self.cache = LiveCache.allocate(
            model, max_context=max_context, layouts=chosen, index_rows=index_rows, device=HostDevice(1)
        )

    def prefill(self, tokens: Sequence[int], chunk: int) -> Floats:
        """Feed ``tokens`` in chunks, each staged before it is appended; the last token's logits [VOCAB]."""
        logits = np.zeros((1, VOCAB), np.float32)
        for first in range(0, len(tokens), chunk):
            logits = self._forward(tokens[first : first + chunk], decode=False)
        return logits[-1]

    def verify(self, tokens: Sequence[int]) -> Floats:
        """Feed a block as one chunk; the logits of each of its tokens [T, VOCAB]."""
        return self._forward(tokens, decode=False)

    def decode(self, token: int) -> Floats:
        """Feed one token, appended before it attends over the planes in physical order; its logits [VOCAB]."""
        return self._forward([token], decode=True)[-1]

    def _forward(self, tokens: Sequence[int], *, decode: bool) -> Floats:
        start, w = self.cache.position, self.weights
        this = _Pass(np.arange(start, start + len(tokens)), decode)
        embedding = w(-1, "embedding", VOCAB, WIDTH)
        x = embedding[np.asarray(tokens)]
        for number, layer in enumerate(self.geometry.layers):
            x = x + self._mixers[layer.kind](self, number, layer, norm(x), this)
            hidden = linear(norm(x), w(number, "up", WIDTH, 2 * WIDTH))
            x = x + linear(hidden * sigmoid(hidden), w(number, "down", 2 * WIDTH, WIDTH))
        logits = linear(norm(x), w(-1, "head", WIDTH, VOCAB))
        self.cache.append(len(tokens), this.rows, tokens=list(tokens), start=start)
        if decode:
            self._require_attended(this)
        self.cache.set_extra("logits", logits[-1].tobytes(), ENCODINGS["f32"], (VOCAB,))
        return logits

    def _require_attended(self, this: _Pass) -> None:
        """What a decode step attended over is what the append left in the planes, byte for byte."""
        for number, span in this.spans.items():
            for role, rows in span.rows.items():
                plane = physical_rows(self.cache.generation.layers[number].planes[role])
                assert rows.tobytes() == plane.tobytes(), f"layer {number} {role}"

    def _span(self, number: int, this: _Pass, fresh: dict[str, NDArray[np.generic]]) -> Span:
        layer = self.cache.generation.layers[number]
        for role, new in fresh.items():
            this.rows[layer.planes[role].spec.key] = new.tobytes()
        if this.decode:
            span = after_append(layer, layer.plan_append(this.start, 1), fresh)
        else:
            span = staged(layer, this.start, fresh)
        this.spans[number] = span
        return span

    def _heads(self, number: int, layer: LayerGeometry, x: Floats, name: str, heads: int, this: _Pass) -> Floats:
        dim = layer.planes[0].row_shape[1]
        rows = linear(x, self.weights(number, name, WIDTH, heads * dim)).reshape(-1, heads, dim)
        if layer.rope is None or name == "v":
            return rows
        return rotate(rows, this.positions, self.geometry.ropes[layer.rope].theta)

    def _attention(self, number: int, layer: LayerGeometry, x: Floats, this: _Pass) -> Floats:
        heads = layer.planes[0].row_shape[0]
        fresh: dict[str, NDArray[np.generic]] = {}
        for plane in layer.planes:
            rows = self._heads(number, layer, x, plane.role, heads, this)
            fresh[plane.role] = rows.astype(STORAGE[plane.encoding.name])
        return self._read(number, layer, x, this, self._span(number, this, fresh))

    def _shared(self, number: int, layer: LayerGeometry, x: Floats, this: _Pass) -> Floats:
        assert layer.source is not None
        return self._read(number, self.geometry.layers[layer.source], x, this, this.spans[layer.source])

    def _read(self, number: int, source: LayerGeometry, x: Floats, this: _Pass, span: Span) -> Floats:
        queries = self._heads(number, source, x, "q", QUERY_HEADS, this)
        keys, values, dim = span.floats("k"), span.floats("v"), source.planes[0].row_shape[1]
        mixed = []
        for query, position in zip(queries, this.positions, strict=True):
            visible = (span.logical >= 0) & (span.logical <= position)
            if source.window is not None:
                visible &= (position - span.logical < source.window) | (span.logical < (source.sink or 0))
            mixed.append(attend(query, keys, values, visible))
        weight = self.weights(number, "o", QUERY_HEADS * dim, WIDTH)
        return linear(np.stack(mixed).reshape(len(x), -1), weight)

    def _latent(self, number: int, layer: LayerGeometry, x: Floats, this: _Pass) -> Floats:
        rank, turned = layer.kv_rank or 0, layer.rope_dim or 0
        w = partial(self.weights, number)
        turn = partial(rotate, positions=this.positions, theta=self.geometry.ropes[layer.rope or ""].theta)
        content = linear(x, w("c", WIDTH, rank))[:, None]
        row = np.concatenate([content, turn(linear(x, w("r", WIDTH, turned))[:, None])], axis=2)
        span = self._span(number, this, {"latent": row})
        chosen = self._pools(number, layer, x, this)
        latents = span.floats("latent")
        queries = np.concatenate(
            [
                linear(x, w("qc", WIDTH, QUERY_HEADS * rank)).reshape(-1, QUERY_HEADS, rank),
                turn(linear(x, w("qr", WIDTH, QUERY_HEADS * turned)).reshape(-1, QUERY_HEADS, turned)),
            ],
            axis=2,
        )
        mixed = []
        for query, position, rows in zip(queries, this.positions, chosen, strict=True):
            visible = (span.logical >= 0) & (span.logical <= position)
            if rows is not None:
                visible &= np.isin(span.logical, rows)
            mixed.append(attend(query, latents, latents[:, :, :rank], visible))
        return linear(np.stack(mixed).reshape(len(x), -1), w("o", QUERY_HEADS * rank, WIDTH))

    def _pools(
        self, number: int, layer: LayerGeometry, x: Floats, this: _Pass
    ) -> Iterator[NDArray[np.int64] | None] | list[None]:
        """For each query the rows it may read: those of its best pools, and always the incomplete last pool."""
        if layer.pool is None:
            return [None] * len(x)
        live, pool, start = self.cache.generation.layers[number], layer.pool, this.start
        half = layer.planes[1].row_shape[0]
        width = half if pool == 1 else 2 * half
        new = linear(x, self.weights(number, "index", WIDTH, width))
        first = start // pool
        tail = b"" if pool == 1 else live.read_rows(live.planes["index_tail"], first * pool, start)
        rows = np.concatenate([np.frombuffer(tail, "<f4").reshape(-1, width), new])
        made = [_pool_key(rows[at : at + pool], half) for at in range(0, len(rows) // pool * pool, pool)]
        old = np.frombuffer(live.read_rows(live.planes["index_key"], 0, first), "<f4").reshape(-1, half)
        keys = np.concatenate([old, *(key[None] for key in made)])
        this.rows[live.planes["index_key"].spec.key] = keys[first:].tobytes()
        if pool > 1:
            this.rows[live.planes["index_tail"].spec.key] = new.tobytes()
        queries = linear(x, self.weights(number, "iq", WIDTH, half))
        return (_chosen_rows(q, keys, pool, int(p)) for q, p in zip(queries, this.positions, strict=True))

    def _recurrent(self, number: int, layer: LayerGeometry, x: Floats, this: _Pass) -> Floats:
        live = self.cache.generation.layers[number]
        conv, ssm = state(live, "conv"), state(live, "ssm")
        channels, taps = conv.shape
        heads, dim, states = ssm.shape
        w = partial(self.weights, number)
        inputs = linear(x, w("in", WIDTH, channels))
        kernel = w("kernel", channels, taps + 1)
        decay = sigmoid(linear(x, w("decay", WIDTH, heads)))[:, :, None, None]
        into = linear(x, w("b", WIDTH, heads * states)).reshape(-1, heads, 1, states)
        out = linear(x, w("c", WIDTH, heads * states)).reshape(-1, heads, 1, states)
        mixed = []
        for token, value in enumerate(inputs):
            history = np.concatenate([conv, value[:, None]], axis=1)
            conv = history[:, 1:]
            driven = running_sum(history * kernel, 1).reshape(heads, dim, 1)
            ssm = ssm * decay[token] + driven * into[token]
            mixed.append(running_sum(ssm * out[token], 2).reshape(-1))
        this.rows[live.planes["conv"].spec.key] = conv.tobytes()
        this.rows[live.planes["ssm"].spec.key] = ssm.tobytes()
        return linear(np.stack(mixed), w("o", channels, WIDTH))

    _mixers = {  # noqa: RUF012
        "full": _attention,
        "sliding": _attention,
        "shared": _shared,
        "latent": _latent,
        "recurrent": _recurrent,
    }


def _pool_key(rows: Floats, half: int) -> Floats:
    """The key of one pool: its rows' first halves, weighted by their second halves; a pool of one row is its key."""
    if rows.shape[1] == half:
        return rows[0]
    return running_sum(rows[:, :half] * sigmoid(rows[:, half:]), 0)


def _chosen_rows(query: Floats, keys: Floats, pool: int, position: int) -> NDArray[np.int64]:
    complete = (position + 1) // pool
    scores = running_sum(query * keys[:complete], 1)
    best = np.argsort(-scores, kind="stable")[:TOP_POOLS]
    tail = np.arange(complete * pool, position + 1)
    return np.concatenate([*(np.arange(n * pool, (n + 1) * pool) for n in np.sort(best)), tail, [position]])
