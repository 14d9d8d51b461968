"""A live cache: what a session's state is while it runs.

Appends are planned for every layer before a byte moves, so a refusal changes nothing; an operation that fails after
bytes moved leaves the cache *tainted*, and a tainted cache refuses everything but :meth:`LiveCache.reset`. Captures
and installs are in :mod:`kvpack.live.transfer`, speculation in :mod:`kvpack.live.speculation`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from kvpack.device.named import device_named
from kvpack.device.protocol import Buffer, Device
from kvpack.errors import InstallError, UsageError
from kvpack.live.generation import Extra, Generation, Line, next_row, rewound
from kvpack.live.layers import LayerAppend, LayerState, LiveLayer
from kvpack.live.placement import refused, require_position
from kvpack.live.sizing import CacheSize, cache_size, default_layouts
from kvpack.model.encoding import Encoding
from kvpack.model.geometry import Geometry, PlaneKey, Scope, Unit
from kvpack.model.layout import ProducerLayout
from kvpack.model.planes import session_spec

__all__ = ["LiveCache", "Rows"]

Rows = Mapping[PlaneKey, "memoryview | bytes"]
"""New rows of an append, plane by plane, canonical order; whole states for planes of unit ``state``."""

DeviceChoice: TypeAlias = Device | Callable[[int], Device] | str | None
"""What :meth:`LiveCache.allocate` takes for a device."""


class LiveCache:
    """The cache of one session: batch 1, no padding, every layer at the same position.

    ``counters`` is an int32 array on the device, one (position, next physical row) pair a layer: what a captured graph
    would read. It keeps its address, and is written last.
    """

    def __init__(
        self,
        geometry: Geometry,
        layouts: ProducerLayout,
        max_context: int,
        devices: Callable[[int], Device],
        *,
        index_rows: int | None = None,
        allocate_layer: Callable[..., LiveLayer] = LiveLayer.allocate,
    ) -> None:
        """Use :meth:`allocate`; ``allocate_layer`` makes each layer, with the arguments of ``LiveLayer.allocate``."""
        self.geometry = geometry
        self.layouts = layouts
        self.max_context = max_context
        self._devices = devices
        self.index_rows = index_rows
        self._allocate_layer = allocate_layer
        self._taint: str | None = None
        self._quiesced = 0
        self._replay = 0
        self.line = Line()
        self.generation = self.new_generation()
        self.counters: Buffer = devices(0).allocate(8 * max(1, len(geometry.layers) + len(geometry.draft_layers)))

    @classmethod
    def allocate(
        cls,
        geometry: Geometry,
        *,
        max_context: int,
        device: DeviceChoice = None,
        layouts: ProducerLayout | None = None,
        index_rows: int | None = None,
    ) -> LiveCache:
        """An empty cache of ``geometry`` for ``max_context`` tokens.

        ``device`` is one device or its name (``host``, ``cuda``, ``cuda:1``), or a function from layer number to the
        device that owns it (pipeline placement; the host by default). ``layouts`` chooses law, capacity and order a
        layer (:func:`kvpack.live.sizing.default_layouts`). ``index_rows`` sizes an indexer's tail ring (None: the usual
        working set, 0: flat).

        Raises CompatibilityError for a layout that a kind cannot have, for unknown kinds and encodings; ResourceError
        ``out-of-memory``.
        """
        geometry.require_known()
        if max_context < 1:
            raise UsageError("bad-context", "a cache holds at least one token", field="max_context", found=max_context)
        return cls(
            geometry,
            layouts or default_layouts(geometry, max_context),
            max_context,
            device_choice(device),
            index_rows=index_rows,
        )

    @property
    def size(self) -> CacheSize:
        """What was allocated, by the function that the allocator uses."""
        return cache_size(self.geometry, self.max_context, self.layouts, index_rows=self.index_rows)

    @property
    def position(self) -> int:
        """Tokens whose state the cache holds."""
        return self.generation.position

    @property
    def draft_position(self) -> int:
        """The same of the draft layers."""
        return self.generation.draft_position

    @property
    def tainted(self) -> str | None:
        """What failed midway, or None for a usable cache."""
        return self._taint

    def new_generation(self) -> Generation:
        """A fresh, zeroed generation of this cache's configuration: a place to stage an install in."""

        def layers(scope: Scope) -> list[LiveLayer]:
            main = scope is Scope.LAYER
            geometries = self.geometry.layers if main else self.geometry.draft_layers
            layouts = self.layouts.layers if main else self.layouts.draft_layers
            return [
                self._allocate_layer(
                    scope.value,
                    number,
                    layer,
                    layouts[number],
                    self._devices(number),
                    self.max_context,
                    index_rows=self.index_rows,
                )
                for number, layer in enumerate(geometries)
            ]

        return Generation(layers(Scope.LAYER), layers(Scope.DRAFT))

    def beside(self) -> LiveCache:
        """An empty cache of this configuration on the same devices: where a session is rebuilt while this one lives.

        Its generation may be published here (:meth:`swap`).
        """
        return LiveCache(
            self.geometry,
            self.layouts,
            self.max_context,
            self._devices,
            index_rows=self.index_rows,
            allocate_layer=self._allocate_layer,
        )

    # --- usability -------------------------------------------------------------------------------------------------

    def require_usable(self, operation: str, *, quiet: bool = True) -> None:
        """Refuse on a tainted cache; with ``quiet`` also while a capture holds the session quiesced."""
        if self._taint is not None:
            raise InstallError(
                "tainted",
                f"{operation} is refused: the cache failed midway in {self._taint}",
                found=self._taint,
                hint="reset the cache and prefill, or install a pack",
            )
        if quiet and self._quiesced:
            raise InstallError("quiesced", f"{operation} is refused while the session is held for a capture")

    def taint(self, operation: str) -> None:
        """Mark the cache as failed midway; its logits and taps are dropped, since nothing vouches for them."""
        self._taint = operation
        self.generation.extras.clear()

    def reset(self) -> None:
        """Empty the cache in place and make it usable: addresses stay, every byte is zero."""
        if self._quiesced:
            raise InstallError("quiesced", "a reset is refused while the session is held for a capture")
        fresh = self.generation
        for layer in fresh.every_layer():
            layer.clear()
            layer.state = layer.fresh_state(self.max_context, self.index_rows)
        fresh.tokens.clear()
        fresh.extras.clear()
        fresh.rope_delta = fresh.position = fresh.draft_position = 0
        self._taint = None
        self.begin_line()
        self.write_counters()

    # --- appending -------------------------------------------------------------------------------------------------

    def append(
        self,
        count: int,
        rows: Rows,
        *,
        tokens: Sequence[int] = (),
        scope: Scope = Scope.LAYER,
        start: int | None = None,
    ) -> None:
        """Append ``count`` tokens to every layer of ``scope``: their rows, new pool keys, and the states after them.

        ``rows`` has one entry a plane that gets something: ``count`` rows of each token plane, a key for each pool that
        becomes complete, whole states. ``start`` guards continuity (the position that the caller believes in). The last
        logits and taps are dropped: they belonged to the old position.

        Raises InstallError (``discontinuity``, ``capacity-too-small``, ``lapped``, ``tainted``, ``quiesced``,
        ``rows-and-bytes-differ``, ``plane-missing``, ``plane-unknown``) before any byte moves.
        """
        plans, given = self.plan_append(count, rows, tokens=tokens, scope=scope, start=start)
        now = self.generation
        try:
            for layer, plan in plans:
                layer.execute(plan, given)
            for layer, _ in plans:
                layer.synchronise()
        except BaseException:
            self.taint("an append")
            raise
        for layer, plan in plans:
            layer.state = plan.after
        if scope is Scope.LAYER:
            _extend(now.tokens, now.position, tokens)
            now.position += count
            self._replay = max(0, self._replay - count)
        else:
            now.draft_position += count
        now.extras.clear()
        self.write_counters()

    def plan_append(
        self,
        count: int,
        rows: Rows,
        *,
        tokens: Sequence[int] = (),
        scope: Scope = Scope.LAYER,
        start: int | None = None,
    ) -> tuple[list[tuple[LiveLayer, LayerAppend]], dict[PlaneKey, memoryview]]:
        """Every check of :meth:`append`; gives each layer's plan and the rows, and changes nothing."""
        self.require_usable("an append")
        now = self.generation
        layers = now.layers if scope is Scope.LAYER else now.draft_layers
        position = now.position if scope is Scope.LAYER else now.draft_position
        begin = position if start is None else start
        plans = [(layer, layer.plan_append(begin, count)) for layer in layers]
        if begin != position:
            raise refused("discontinuity", "an append must start at the next position", None, position, begin)
        given = {key: memoryview(content).cast("B") for key, content in rows.items()}
        if count < 1:
            raise refused("zero-rows", "an append brings at least one row", None, "1 or more", count)
        if position + count > self.max_context:
            raise refused(
                "capacity-too-small",
                "the context does not hold the rows",
                None,
                f"{position + count}",
                self.max_context,
            )
        self._require_rows(scope, plans, given, count)
        reach = max(len(now.tokens), position + len(tokens)) if len(now.tokens) >= position else len(now.tokens)
        if scope is Scope.LAYER and tokens and reach < position + count:
            raise refused("tokens-behind", "the token list ends before the rows", None, position + count, reach)
        return plans, given

    def _require_rows(
        self,
        scope: Scope,
        plans: Sequence[tuple[LiveLayer, LayerAppend]],
        given: Mapping[PlaneKey, memoryview],
        count: int,
    ) -> None:
        wanted: dict[PlaneKey, int] = {}
        for layer, plan in plans:
            for plane in layer.planes.values():
                spec = plane.spec
                if spec.unit is Unit.FIXED:
                    continue
                number = {Unit.STATE: 1, Unit.POOL: plan.end_key - plan.first_key}.get(spec.unit, count)
                wanted[spec.key] = number * spec.row_bytes
        for key, nbytes in wanted.items():
            found = given[key].nbytes if key in given else None
            if found is None and nbytes:
                raise InstallError(
                    "plane-missing",
                    f"{key}: an append brings no rows for it",
                    layer=key.layer,
                    plane=str(key),
                    expected=nbytes,
                )
            if (found or 0) != nbytes:
                raise InstallError(
                    "rows-and-bytes-differ",
                    f"{key}: {count} tokens need {nbytes} bytes, got {found}",
                    layer=key.layer,
                    plane=str(key),
                    expected=nbytes,
                    found=found,
                )
        for key in given:
            if key not in wanted:
                raise InstallError(
                    "plane-unknown",
                    f"{key} is not a plane of the cache's {scope.value}s",
                    plane=str(key),
                    found=str(key),
                )

    def write_fixed(self, key: PlaneKey, rows: memoryview | bytes) -> None:
        """Fill a plane that exists once: encoder rows, per-tensor scales."""
        self.require_usable("a write")
        layer = self.generation.layer_of(key)
        plane = layer.planes[key.role]
        content = memoryview(rows).cast("B")
        if plane.spec.unit is not Unit.FIXED or content.nbytes != plane.buffer.nbytes:
            raise InstallError(
                "rows-and-bytes-differ",
                f"{key}: a fixed plane of {plane.buffer.nbytes} bytes is written whole",
                layer=key.layer,
                plane=str(key),
                expected=plane.buffer.nbytes,
                found=content.nbytes,
            )
        layer.write_rows(plane, 0, content, layer.state)

    def set_extra(self, role: str, content: bytes, encoding: Encoding, row_shape: tuple[int, ...]) -> None:
        """Keep a session state that belongs to the present position (``logits``, ``tap``, ``sampler``)."""
        self.require_usable("an extra")
        spec = session_spec(role, encoding, row_shape)
        if spec.row_bytes != len(content):
            raise InstallError(
                "rows-and-bytes-differ",
                f"{role}: shape and bytes disagree",
                plane=role,
                expected=spec.row_bytes,
                found=len(content),
            )
        self.generation.extras[role] = Extra(spec, bytes(content))

    # --- shortening ------------------------------------------------------------------------------------------------

    def rewind(self, position: int, *, scope: Scope = Scope.LAYER) -> None:
        """Go back to ``position``: no bytes move, later rows are forgotten, logits and taps are dropped.

        Target and draft layers have positions of their own; ``scope`` says whose is meant. Refused, with nothing
        changed, where a layer has lost rows that ``position`` needs (``beyond-headroom``), where a recurrent state
        stands elsewhere (``state-has-no-past``), and forward (``forward-rewind``).
        """
        self.require_usable("a rewind")
        now = self.generation
        states: list[tuple[LiveLayer, LayerState]] = []
        for layer in now.layers if scope is Scope.LAYER else now.draft_layers:
            states.append((layer, rewound(layer, position)))
        require_position(position, None)
        for layer, state in states:
            layer.state = state
        if scope is Scope.LAYER:
            now.position = position
            self.line.lowest = min(self.line.lowest, position)
            del now.tokens[position:]
        else:
            now.draft_position = position
            self.line.lowest_draft = min(self.line.lowest_draft, position)
        now.extras.clear()
        self.write_counters()

    # --- publication -----------------------------------------------------------------------------------------------

    def swap(self, generation: Generation) -> Generation:
        """Publish a staged generation by exchanging pointers, which cannot fail halfway; returns the old one."""
        self.require_usable("a swap")
        old, self.generation = self.generation, generation
        self.begin_line()
        self.write_counters()
        return old

    def write_counters(self) -> None:
        """Publish every layer's position and next physical row to the device, after everything else is done there."""
        words = bytearray()
        for layer in self.generation.every_layer():
            words += layer.position.to_bytes(4, "little") + next_row(layer).to_bytes(4, "little")
        first = self._devices(0)
        try:
            for layer in self.generation.every_layer():
                layer.synchronise()
            if words:
                first.write(self.counters, 0, memoryview(bytes(words)))
                first.synchronise()
        except BaseException:
            self.taint("a publication of counters")
            raise

    def begin_line(self) -> None:
        """What the cache holds from now on is whole, and no continuation of what it held before."""
        self._replay = 0
        self.line = Line(self.position, self.draft_position)

    def owe_replay(self, tokens: int) -> None:
        """After a rolled-back block: so many accepted tokens must be appended again before a capture is allowed."""
        self._replay = tokens

    def hold(self) -> None:
        """Quiesce the session for a capture; calls nest. Refused while accepted tokens wait to be replayed."""
        self.require_usable("a capture", quiet=False)
        if self._replay:
            raise InstallError(
                "replay-pending",
                f"{self._replay} accepted tokens must be replayed before a capture",
                expected=0,
                found=self._replay,
            )
        self._quiesced += 1

    def release(self) -> None:
        """End a :meth:`hold`."""
        self._quiesced -= 1


def device_choice(device: DeviceChoice) -> Callable[[int], Device]:
    """One device, its name, or a function from a number (of a layer, of a rank) to its device; the host by default."""
    if device is None or isinstance(device, str):
        device = device_named("host" if device is None else device)
    if callable(device):
        return device
    chosen: Device = device
    return lambda _: chosen


def _extend(known: list[int], position: int, tokens: Sequence[int]) -> None:
    """Note the tokens fed at ``position``; a known continuation is kept only as far as they agree with it."""
    if known[position : position + len(tokens)] != list(tokens[: max(0, len(known) - position)]):
        del known[position:]
    known[position : position + len(tokens)] = tokens
