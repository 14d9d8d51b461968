"""Install: a cut into a fresh cache of the library's own making. Everything is gated before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvpack.engines.transformers import on_device
from kvpack.engines.transformers.caches import LiveCache, describe, new_cache, survey
from kvpack.engines.transformers.identification import identify, with_cache
from kvpack.engines.transformers.layers import HeldRows
from kvpack.engines.transformers.library import host_words, one_line, require_torch, torch_dtype
from kvpack.errors import CompatibilityError, InstallError, ResourceError
from kvpack.model.gate import Destination, GateReport, gate
from kvpack.model.geometry import Geometry, PlaneKey, Scope
from kvpack.model.identity import Identity
from kvpack.model.planes import LOGITS, TOKENS, PlaneSpec
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import CutView

if TYPE_CHECKING:
    import torch

__all__ = ["Installed", "install", "plan"]


@dataclass(frozen=True)
class Installed:
    """A restored session: its cache, what the gate said, its tokens and, at a cut that carries them, the last logits.

    ``tokens`` are those known at the restored position; at the cut itself they may be more than its position: the rest
    is to be fed next. ``logits`` is ``[vocab_size]``.
    """

    cache: Any
    report: GateReport
    tokens: tuple[int, ...]
    logits: torch.Tensor | None


class _Staged:
    """Host memory of a tensor: its own, or a staging copy where the layer is elsewhere."""

    def __init__(self, tensor: torch.Tensor) -> None:
        staging = tensor if _is_on_host(tensor) else require_torch().empty(tensor.shape, dtype=tensor.dtype)
        self.words: NDArray[Any] = host_words(staging)
        self._device_rows = None if staging is tensor else tensor

    def publish(self) -> None:
        if self._device_rows is not None:
            self._device_rows.copy_(_as_tensor(self.words, self._device_rows.dtype))


class _Target(Protocol):
    """Where what is read of one plane goes."""

    def write(self, first: int, rows: int, buffer: memoryview) -> None: ...

    def publish(self) -> None: ...


class _RowTarget:
    """Rows of one plane, into the parts ``[heads, rows, width]`` of which each row is made."""

    def __init__(self, held: HeldRows) -> None:
        self._first = held.first
        self._parts = [_Staged(part) for part in held.parts]

    def write(self, first: int, rows: int, buffer: memoryview) -> None:
        at, column = first - self._first, 0
        words = np.frombuffer(buffer, dtype=self._parts[0].words.dtype).reshape(rows, -1)
        for part in self._parts:
            heads, _, width = part.words.shape
            source = words[:, column : column + heads * width].reshape(rows, heads, width)
            part.words[:, at : at + rows, :] = source.transpose(1, 0, 2)
            column += heads * width

    def publish(self) -> None:
        for part in self._parts:
            part.publish()


class _StateTarget:
    """One state; ``first`` and ``rows`` count its bytes."""

    def __init__(self, state: torch.Tensor) -> None:
        self._staged = _Staged(state)
        self._bytes = self._staged.words.reshape(-1).view(np.uint8)

    def write(self, first: int, rows: int, buffer: memoryview) -> None:
        self._bytes[first : first + rows] = np.frombuffer(buffer, dtype=np.uint8)

    def publish(self) -> None:
        self._staged.publish()


def _row_target(held: HeldRows) -> _Target:
    where = on_device.device_of(held.parts[0])
    return _RowTarget(held) if where is None else on_device.RowsOnDevice(where, held)


def _state_target(state: torch.Tensor) -> _Target:
    where = on_device.device_of(state)
    return _StateTarget(state) if where is None else on_device.StateOnDevice(where, state)


class _Session:
    """The sink of one install: rows into their targets, session planes into buffers, and a count of what came."""

    def __init__(self, targets: Mapping[PlaneKey, _Target], buffers: Mapping[PlaneKey, bytearray]) -> None:
        self._targets = targets
        self._buffers = buffers
        self._lock = Lock()
        self._arrived: dict[PlaneKey, int] = {}

    def __call__(self, key: PlaneKey, first: int, rows: int, buffer: memoryview) -> None:
        target = self._targets.get(key)
        if target is not None:
            target.write(first, rows, buffer)
        else:
            at = first * (buffer.nbytes // rows)
            self._buffers[key][at : at + buffer.nbytes] = buffer
        with self._lock:
            self._arrived[key] = self._arrived.get(key, 0) + rows

    def require_whole(self, wanted: Mapping[PlaneKey, RowSet]) -> None:
        for key, rows in wanted.items():
            found = self._arrived.get(key, 0)
            if found != rows.count:
                raise InstallError(
                    "rows-missing",
                    f"{key}: {rows.count} rows were wanted and {found} came",
                    layer=key.layer_or_none,
                    plane=str(key),
                    field="rows",
                    expected=rows.count,
                    found=found,
                )


def plan(
    cut: CutView,
    model: Any,
    *,
    cache: str = "dynamic",
    capacity: int | None = None,
    at: int | None = None,
    identity: Identity | None = None,
    tokenizer: Any = None,
    override: frozenset[str] = frozenset(),
) -> GateReport:
    """Hold a cut to a fresh cache of this kind for this model, without reading a row or allocating one.

    Raises only what makes the question senseless (UsageError) or the model unusable (EngineError); every reason
    against the cut is in the report.
    """
    live = survey(model, new_cache(model, cache, capacity))
    known = identity if identity is not None else identify(model, tokenizer)
    destination = Destination(
        geometry=describe(model),
        identity=with_cache(known, live.kind, live.capacity),
        capacity=live.most_tokens,
        override=override,
    )
    report = gate(cut, destination, at=at)
    refusals = [*report.refusals, *_delta_faults(cut)]
    notes = [*report.notes, *_dropped(cut, report.position)]
    return replace(report, refusals=tuple(refusals), notes=tuple(notes))


def install(
    cut: CutView,
    model: Any,
    *,
    cache: str = "dynamic",
    capacity: int | None = None,
    at: int | None = None,
    identity: Identity | None = None,
    tokenizer: Any = None,
    override: frozenset[str] = frozenset(),
) -> Installed:
    """Restore a cut into a fresh ``dynamic`` cache, or a ``static`` one for ``capacity`` tokens.

    ``at`` restores at an earlier position than the cut's, where the rows suffice; the claim is then COMPATIBLE.
    ``override`` names compatibility fields whose difference the caller accepts. The tensors have the class, strides and
    contiguity that transformers itself leaves after the same number of tokens.

    Raises the gate's first refusal (CompatibilityError) before anything is allocated; what reading the rows raises,
    and then no cache is handed out; InstallError ``rows-missing`` where rows did not come, ``state-too-early`` for a
    state that the session is too short to have; ResourceError ``out-of-memory``.
    """
    report = plan(
        cut,
        model,
        cache=cache,
        capacity=capacity,
        at=at,
        identity=identity,
        tokenizer=tokenizer,
        override=override,
    )
    report.require()
    fresh = new_cache(model, cache, capacity)
    targets = _allocate(survey(model, fresh), cut.geometry, report.position, model.device)
    wanted = {key: rows for key, rows in report.need.items() if rows}
    wanted |= _session_rows(cut, report.position)
    buffers = {
        key: bytearray(rows.end * cut.specs[key].axis_bytes) for key, rows in wanted.items() if key not in targets
    }
    session = _Session(targets, buffers)
    cut.read_rows(wanted, session)
    session.require_whole(wanted)
    _require_empty(buffers, report.position)
    for target in targets.values():
        target.publish()
    return Installed(
        cache=fresh,
        report=report,
        tokens=tuple(np.frombuffer(buffers.get(TOKENS, b""), dtype="<i4").tolist()),
        logits=_logits(cut.specs[LOGITS], buffers[LOGITS], model.device) if LOGITS in buffers else None,
    )


def _delta_faults(cut: CutView) -> list[CompatibilityError]:
    delta = cut.record.rope_delta
    if not delta:
        return []
    return [
        CompatibilityError(
            "rope-delta-unsupported",
            f"the session's positions are shifted by {delta}, which this engine cannot continue",
            field="rope_delta",
            expected=0,
            found=delta,
        )
    ]


def _dropped(cut: CutView, position: int) -> list[str]:
    taken = set(_session_rows(cut, position))
    return [
        f"{key}: not restored"
        for key, rows in cut.stored.items()
        if key.scope == Scope.SESSION.value and rows and key not in taken
    ]


def _session_rows(cut: CutView, position: int) -> dict[PlaneKey, RowSet]:
    """The rows of the session's own planes that belong to ``position``: tokens, and logits at the cut itself."""
    at_cut = position == cut.record.position
    wanted: dict[PlaneKey, RowSet] = {}
    known = cut.record.tokens if at_cut else min(position, cut.record.tokens)
    if known and TOKENS in cut.specs:
        wanted[TOKENS] = RowSet.of((0, known))
    if at_cut and "logits" in cut.record.extras:
        wanted[LOGITS] = RowSet.of((0, cut.specs[LOGITS].row_bytes))
    return wanted


def _allocate(live: LiveCache, geometry: Geometry, position: int, device: Any) -> dict[PlaneKey, _Target]:
    targets: dict[PlaneKey, _Target] = {}
    for at, (layer, adapter) in enumerate(live.layers):
        try:
            held = adapter.restore(layer, geometry.layers[at], position, device)
        except RuntimeError as error:
            raise ResourceError(
                "out-of-memory",
                f"layer {at} cannot be allocated: {one_line(error)}",
                layer=at,
                field="capacity",
            ) from error
        made: dict[str, _Target] = {role: _row_target(rows) for role, rows in held.rows.items()}
        made |= {role: _state_target(state) for role, state in held.states.items()}
        targets |= {PlaneKey(Scope.LAYER.value, at, role): target for role, target in made.items()}
    return targets


def _require_empty(buffers: Mapping[PlaneKey, bytearray], position: int) -> None:
    """A state that the library does not have yet after so few tokens says nothing: it must be zeros."""
    for key, content in buffers.items():
        if key.scope == Scope.LAYER.value and any(content):
            raise InstallError(
                "state-too-early",
                f"{key}: the pack has a state at {position}, where the model's own cache has none yet",
                layer=key.layer,
                plane=str(key),
                field="position",
                found=position,
            )


def _is_on_host(tensor: torch.Tensor) -> bool:
    return bool(tensor.device.type == "cpu")


def _as_tensor(words: NDArray[Any], dtype: Any) -> torch.Tensor:
    signed = words.view(np.dtype(f"i{words.dtype.itemsize}")) if words.dtype.itemsize > 1 else words
    return require_torch().from_numpy(signed).view(dtype)


def _logits(spec: PlaneSpec, buffer: bytearray, device: Any) -> torch.Tensor:
    dtype = torch_dtype(spec.encoding.name)
    return require_torch().frombuffer(buffer, dtype=dtype).reshape(spec.row_shape).to(device)
