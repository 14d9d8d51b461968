"""Install: a cut into a fresh cache of the library's own making. Everything is gated before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvpack.engines.transformers.caches import LiveCache, describe, new_cache, survey
from kvpack.engines.transformers.identification import identify, with_cache
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


@dataclass(frozen=True)
class _Target:
    """Where rows of one plane go: words ``[num_kv_heads, rows, head_dim]`` of host memory, ``first`` its first row.

    ``device_rows`` is the tensor that the words are a staging copy of, where the layer is not in host memory.
    """

    words: NDArray[Any]
    first: int
    device_rows: torch.Tensor | None = None

    def write(self, first: int, rows: int, buffer: memoryview) -> None:
        num_kv_heads, _, head_dim = self.words.shape
        at = first - self.first
        source = np.frombuffer(buffer, dtype=self.words.dtype).reshape(rows, num_kv_heads, head_dim)
        self.words[:, at : at + rows, :] = source.transpose(1, 0, 2)


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
    and then no cache is handed out; InstallError ``rows-missing`` where rows did not come; ResourceError
    ``out-of-memory``.
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
    for target in targets.values():
        if target.device_rows is not None:
            target.device_rows.copy_(_as_tensor(target.words, target.device_rows.dtype))
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
        for role, tensor in held.planes.items():
            key = PlaneKey(Scope.LAYER.value, at, role)
            if _is_on_host(tensor):
                targets[key] = _Target(host_words(tensor), held.first)
            else:
                staging = require_torch().empty(tensor.shape, dtype=tensor.dtype)
                targets[key] = _Target(host_words(staging), held.first, tensor)
    return targets


def _is_on_host(tensor: torch.Tensor) -> bool:
    return bool(tensor.device.type == "cpu")


def _as_tensor(words: NDArray[Any], dtype: Any) -> torch.Tensor:
    signed = words.view(np.dtype(f"i{words.dtype.itemsize}")) if words.dtype.itemsize > 1 else words
    return require_torch().from_numpy(signed).view(dtype)


def _logits(spec: PlaneSpec, buffer: bytearray, device: Any) -> torch.Tensor:
    dtype = torch_dtype(spec.encoding.name)
    return require_torch().frombuffer(buffer, dtype=dtype).reshape(spec.row_shape).to(device)
