"""Capture: a deep copy of a live cache at its position, in logical order, token-major."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvpack.engines.transformers import on_device
from kvpack.engines.transformers.caches import LiveCache, describe, described_after, geometry_of, survey
from kvpack.engines.transformers.identification import identify, with_cache
from kvpack.engines.transformers.layers import HeldState
from kvpack.engines.transformers.library import encoding_name, host_words
from kvpack.engines.transformers.rotation import require_reproducible
from kvpack.errors import EngineError
from kvpack.model.encoding import ENCODINGS
from kvpack.model.geometry import MAX_POSITION, Geometry, LayerGeometry, PlaneKey, Unit
from kvpack.model.identity import Identity
from kvpack.model.layout import LayerLayout, ProducerLayout
from kvpack.model.planes import LOGITS, TOKENS, PlaneSpec, plane_specs, semantic_rows, session_spec, tokens_spec
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import Cut, CutRecord, PlaneRows, Probe

if TYPE_CHECKING:
    import torch

__all__ = ["capture"]


def capture(
    model: Any,
    cache: Any,
    tokens: Sequence[int],
    tokenizer: Any = None,
    *,
    logits: torch.Tensor | None = None,
    identity: Identity | None = None,
    probe: Probe | None = None,
    resident: bool = False,
    provenance: Mapping[str, str] | None = None,
    attention_mask: Any = None,
    inputs_embeds: Any = None,
) -> Cut:
    """The session's state at the cache's position, copied: later changes of the cache do not reach it.

    ``tokens`` are the ids that the cache has seen, and possibly more that are still to be fed; for a model whose
    cache counts no tokens (mamba2: states only) they are exactly those that it has seen. ``logits`` is the last
    forward's output, of which the last row is kept (``[vocab_size]``, or with leading axes of batch 1). Sliding layers
    give the last ``window - 1`` rows, with ``resident`` all that they hold. ``identity`` spares hashing the model
    again where the caller knows that it has not changed. ``attention_mask`` and ``inputs_embeds`` are the forwards'
    own, where the caller used them.

    Raises EngineError: ``batch-not-one``, ``padded``, ``unsupported-inputs``, ``unsupported-cache``,
    ``layers-disagree``, ``tokens-shorter-than-rows``, ``rows-missing``, ``bad-token``, ``probe-elsewhere``,
    ``history-dependent-rope``.
    """
    _require_plain_inputs(model, attention_mask, inputs_embeds)
    ids = _token_ids(model, tokens)
    live = survey(model, cache)
    _require_batch_one(live)
    position = _agreed_position(live, len(ids))
    if len(ids) < position:
        raise EngineError(
            "tokens-shorter-than-rows",
            f"the cache holds {position} tokens and only {len(ids)} token ids were given",
            field="tokens",
            expected=position,
            found=len(ids),
        )
    require_reproducible(model, position)
    if probe is not None and probe.position != position:
        raise EngineError(
            "probe-elsewhere",
            f"the probe begins at {probe.position}, the cache is at {position}",
            field="probe",
            expected=position,
            found=probe.position,
        )
    geometry = geometry_of(model, live) if position >= described_after(live) else describe(model)
    planes = _layer_planes(live, geometry, position, resident)
    if logits is not None:
        planes[LOGITS] = _logits_plane(logits)
    planes[TOKENS] = _tokens_plane(ids)
    known = identity if identity is not None else identify(model, tokenizer)
    return Cut(
        geometry=geometry,
        identity=with_cache(known, live.kind, live.capacity),
        layout=ProducerLayout(
            tuple(LayerLayout(adapter.law, adapter.capacity(layer), "HND") for layer, adapter in live.layers)
        ),
        record=CutRecord(position, tokens=len(ids), extras=("logits",) if logits is not None else ()),
        planes=planes,
        probe=probe,
        provenance=dict(provenance or {}),
    )


def _require_plain_inputs(model: Any, attention_mask: Any, inputs_embeds: Any) -> None:
    if inputs_embeds is not None:
        raise EngineError(
            "unsupported-inputs",
            "the session was fed inputs_embeds, which its tokens do not determine",
            field="inputs_embeds",
        )
    if model.config.is_encoder_decoder:
        raise EngineError(
            "unsupported-inputs",
            f"{model.config.model_type} is an encoder-decoder: its state depends on the encoder's input",
            field="is_encoder_decoder",
        )
    if attention_mask is not None and not bool((attention_mask == 1).all()):
        raise EngineError(
            "padded",
            "the attention mask hides tokens; kvpack captures sessions without padding",
            field="attention_mask",
        )


def _token_ids(model: Any, tokens: Any) -> list[int]:
    if hasattr(tokens, "reshape"):
        if tokens.ndim > 1 and tokens.shape[0] != 1:
            raise _batch_error(int(tokens.shape[0]), None)
        tokens = tokens.reshape(-1).tolist()
    ids = [int(token) for token in tokens]
    for token in ids:
        if not 0 <= token <= MAX_POSITION:
            raise EngineError("bad-token", f"{token} is not a token id", field="tokens", found=token)
    config = model.config
    for name in ("image_token_id", "video_token_id", "audio_token_id", "image_token_index"):
        if getattr(config, name, None) in ids:
            raise EngineError(
                "unsupported-inputs",
                f"the tokens hold the model's {name}: its state depends on what tokens do not determine",
                field=name,
                found=getattr(config, name),
            )
    return ids


def _batch_error(found: int, layer: int | None) -> EngineError:
    return EngineError(
        "batch-not-one",
        f"the session has a batch of {found}; kvpack captures one sequence at a time",
        layer=layer,
        field="batch",
        expected=1,
        found=found,
    )


def _require_batch_one(live: LiveCache) -> None:
    for at, (layer, adapter) in enumerate(live.layers):
        if adapter.batch(layer) != 1:
            raise _batch_error(adapter.batch(layer), at)


def _agreed_position(live: LiveCache, known: int) -> int:
    """The position on which all layers agree; the odd one out is the one that most others contradict.

    Layers that do not count stand where the others do; where none counts, at the number of known tokens.
    """
    positions = [adapter.position(layer) for layer, adapter in live.layers]
    counted = Counter(position for position in positions if position is not None)
    expected = counted.most_common(1)[0][0] if counted else known
    for at, ((layer, adapter), found) in enumerate(zip(live.layers, positions, strict=True)):
        uncounted = found is None and expected == 0 and adapter.is_filled(layer)
        if uncounted or found not in (None, expected):
            raise EngineError(
                "layers-disagree",
                f"layer {at} has seen {'some' if found is None else found} tokens, the others {expected}",
                layer=at,
                field="position",
                expected=expected,
                found=found,
            )
    return expected


def _layer_planes(live: LiveCache, geometry: Geometry, position: int, resident: bool) -> dict[PlaneKey, PlaneRows]:
    specs = plane_specs(geometry)
    held = [adapter.export(layer, of) for (layer, adapter), of in zip(live.layers, geometry.layers, strict=True)]
    planes: dict[PlaneKey, PlaneRows] = {}
    for key, layer, plane in geometry.planes():
        spec = specs[key]
        if plane.unit is Unit.STATE:
            planes[key] = _state(spec, held[key.layer])
        else:
            planes[key] = _rows(spec, layer, held[key.layer], position, resident)
    return planes


def _state(spec: PlaneSpec, held: HeldState) -> PlaneRows:
    """A state as it is; zeros where the session is too short for the layer to have one."""
    state = held.states.get(spec.key.role)
    if state is None:
        buffer = memoryview(bytes(spec.row_bytes))
    elif (device := on_device.device_of(state)) is not None:
        buffer = on_device.read_state(device, state)
    else:
        buffer = _owned(host_words(state.cpu()))
    return PlaneRows(spec, RowSet.of((0, spec.row_bytes)), buffer)


def _rows(spec: PlaneSpec, layer: LayerGeometry, held: HeldState, position: int, resident: bool) -> PlaneRows:
    """The rows that a cut at ``position`` means, with ``resident`` all that the layer holds."""
    wanted = semantic_rows(layer, spec, position)
    found = held.rows.get(spec.key.role)
    there = RowSet() if found is None else RowSet.of((found.first, found.end))
    if not there.contains(wanted):
        raise EngineError(
            "rows-missing",
            f"{spec.key}: the layer is at {position} and holds rows {there}, not {wanted}",
            layer=spec.key.layer,
            plane=str(spec.key),
            field="rows",
            expected=str(wanted),
            found=str(there),
        )
    rows = there if resident else wanted
    if found is None or not rows:
        return PlaneRows(spec, rows, memoryview(b""))
    ((begin, end),) = rows.ranges
    held_parts = [part[:, begin - found.first : end - found.first, :] for part in found.parts]
    device = on_device.device_of(held_parts[0])
    if device is not None:
        return PlaneRows(spec, rows, on_device.read_rows(device, held_parts))
    parts = [host_words(part.cpu()) for part in held_parts]
    # Each part lies as [heads, n, width]; a row is its heads side by side, part behind part.
    by_row = [words.transpose(1, 0, 2).reshape(end - begin, -1) for words in parts]
    return PlaneRows(spec, rows, _owned(np.concatenate(by_row, axis=1) if len(by_row) > 1 else by_row[0]))


def _owned(words: NDArray[Any]) -> memoryview:
    copy = np.array(words, order="C", copy=True)
    return copy.reshape(-1).data.cast("B")


def _logits_plane(logits: torch.Tensor) -> PlaneRows:
    size = int(logits.shape[-1])
    if logits.dim() == 3 and logits.shape[0] != 1:
        raise _batch_error(int(logits.shape[0]), None)
    row = host_words(logits.detach().reshape(-1, size)[-1].cpu())
    spec = session_spec("logits", ENCODINGS[encoding_name(logits.dtype)], (size,))
    return PlaneRows(spec, RowSet.of((0, spec.row_bytes)), _owned(row))


def _tokens_plane(ids: list[int]) -> PlaneRows:
    buffer = _owned(np.array(ids, dtype="<i4")) if ids else memoryview(b"")
    return PlaneRows(tokens_spec(), RowSet.of((0, len(ids))), buffer)
