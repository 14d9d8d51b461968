"""What install refuses, and the controls: a restore that is wrong by one row, one counter or one bit is seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpack import load, save
from kvpack.engines import transformers as engine
from kvpack.engines.transformers import installing
from kvpack.errors import CompatibilityError, InstallError, IntegrityError, ResourceError
from kvpack.model.encoding import ENCODINGS
from kvpack.model.geometry import Geometry, PlaneKey
from kvpack.model.identity import Claim, Identity
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import Cut, RowSink
from tests.engines.tiny import captured, session, tiny_model, with_rows

STEPS = 6
POSITION = 100


@pytest.fixture(scope="module")
def gemma() -> Any:
    return tiny_model("gemma3_text")


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def cut(gemma: Any) -> Cut:
    return captured(gemma, POSITION)


@pytest.fixture(scope="module")
def uninterrupted(gemma: Any) -> tuple[bytes, ...]:
    cache, logits, _ = session(gemma, POSITION)
    return engine.decode(gemma, cache, logits, STEPS).digests


def _continued(model: Any, restored: engine.Installed) -> tuple[bytes, ...]:
    assert restored.logits is not None
    return engine.decode(model, restored.cache, restored.logits, STEPS).digests


def _refusals(cut: Any, model: Any, **options: Any) -> list[CompatibilityError]:
    """What the gate says; an install must refuse with the first of it."""
    report = engine.plan(cut, model, **options)
    assert report.refusals
    with pytest.raises(CompatibilityError) as caught:
        engine.install(cut, model, **options)
    assert (caught.value.code, caught.value.field) == (report.refusals[0].code, report.refusals[0].field)
    return list(report.refusals)


def test_without_a_fault_every_step_is_equal(gemma: Any, cut: Cut, uninterrupted: tuple[bytes, ...]) -> None:
    restored = engine.install(cut, gemma)
    assert restored.report.claim is Claim.BITWISE
    assert restored.report.notes == ()
    assert _continued(gemma, restored) == uninterrupted


@pytest.mark.parametrize("layer", [0, 5])
@pytest.mark.parametrize("role", ["k", "v"])
def test_rows_shifted_by_one_change_the_logits(
    gemma: Any, cut: Cut, uninterrupted: tuple[bytes, ...], layer: int, role: str
) -> None:
    key = PlaneKey("layer", layer, role)
    content = bytes(cut.planes[key].buffer)
    size = cut.specs[key].row_bytes
    shifted = with_rows(cut, {key: content[size:] + content[:size]})
    assert _continued(gemma, engine.install(shifted, gemma)) != uninterrupted


def test_a_count_of_resident_rows_changes_the_logits(gemma: Any, cut: Cut, uninterrupted: tuple[bytes, ...]) -> None:
    restored = engine.install(cut, gemma)
    for layer in restored.cache.layers:
        if layer.is_sliding:
            layer.cumulative_length = layer.keys.shape[2]
    assert _continued(gemma, restored) != uninterrupted


@pytest.mark.parametrize("layer", [0, 5])
def test_one_bit_in_memory_changes_the_logits(
    gemma: Any, cut: Cut, uninterrupted: tuple[bytes, ...], layer: int
) -> None:
    key = PlaneKey("layer", layer, "v")
    content = bytearray(cut.planes[key].buffer)
    content[-1] ^= 0x40  # the upper exponent bit of the newest row's last element
    assert _continued(gemma, engine.install(with_rows(cut, {key: bytes(content)}), gemma)) != uninterrupted


def test_one_bit_in_a_pack_is_an_integrity_error(gemma: Any, cut: Cut, tmp_path: Path) -> None:
    path = tmp_path / "session.kvpack"
    save(cut, path, codec="raw")
    assert engine.install(load(path, allow_unsigned=True), gemma).report.claim is Claim.BITWISE
    content = bytearray(path.read_bytes())
    row = bytes(cut.planes[PlaneKey("layer", 5, "v")].buffer)[-64:]
    content[content.index(row)] ^= 1
    path.write_bytes(content)
    with pytest.raises(IntegrityError) as caught:
        engine.install(load(path, allow_unsigned=True), gemma)
    assert caught.value.plane == "layer.5.v"


class _Failing:
    """A cut whose rows stop coming after ``whole`` planes, with an error or silently."""

    def __init__(self, cut: Cut, whole: int, error: Exception | None) -> None:
        self._cut, self._whole, self._error = cut, whole, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cut, name)

    def read_rows(self, wanted: Mapping[PlaneKey, RowSet], sink: RowSink) -> None:
        self._cut.read_rows(dict(list(wanted.items())[: self._whole]), sink)
        if self._error is not None:
            raise self._error


def test_a_failed_read_hands_out_no_cache(gemma: Any, cut: Cut) -> None:
    with pytest.raises(IntegrityError, match="planted"):
        engine.install(_Failing(cut, 3, IntegrityError("raw-hash", "planted")), gemma)


def test_rows_that_never_come_are_named(gemma: Any, cut: Cut) -> None:
    with pytest.raises(InstallError) as caught:
        engine.install(_Failing(cut, 3, None), gemma)
    assert (caught.value.code, caught.value.plane, caught.value.found) == ("rows-missing", "layer.1.v", 0)


def test_another_model_is_refused_by_field(cut: Cut, gemma: Any) -> None:
    import torch

    changed = tiny_model("gemma3_text")
    with torch.no_grad():
        changed.model.layers[3].mlp.up_proj.weight[1, 1] += 1.0
    assert [r.field for r in _refusals(cut, changed)] == ["weights"]
    edited = tiny_model("gemma3_text")
    edited.model.layers[3].mlp.up_proj.weight.data[1, 1] = 0.25  # unseen by torch's version counter
    assert [r.field for r in _refusals(cut, edited)] == ["weights"]
    rope = dict(gemma.config.rope_parameters)
    rope["full_attention"] = {"rope_type": "default", "rope_theta": 20000.0}
    theta = _refusals(cut, tiny_model("gemma3_text", rope_parameters=rope))
    assert [r.field for r in theta] == ["ropes.full_attention.theta", "config"]
    rope["full_attention"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000000.0}
    scaling = _refusals(cut, tiny_model("gemma3_text", rope_parameters=rope))
    assert [r.field for r in scaling] == ["ropes.full_attention.scaling", "config"]
    turned = tiny_model("gemma3_text")
    turned.model.rotary_emb.sliding_attention_inv_freq[3] *= 1.01
    assert [r.field for r in _refusals(cut, turned)] == ["ropes.sliding_attention.scaling"]
    window = _refusals(cut, tiny_model("gemma3_text", sliding_window=32))
    assert {r.field for r in window} == {"window", "config"}
    assert [r.layer for r in window if r.field == "window"] == [0, 1, 2, 3, 4]


def test_another_dtype_is_refused_even_where_sizes_agree() -> None:
    refusals = _refusals(captured(tiny_model("llama", "bf16"), 20), tiny_model("llama", "f16"))
    assert {r.field for r in refusals} >= {"encoding", "scalar", "weights"}
    assert (refusals[0].layer, refusals[0].expected, refusals[0].found) == (0, "bf16", "f16")


def test_heads_and_dims_swapped_are_refused_though_bytes_agree(llama: Any) -> None:
    cut = captured(llama, 20)
    other = tiny_model("llama", num_key_value_heads=4, head_dim=8)
    refusals = _refusals(cut, other)
    assert (refusals[0].field, refusals[0].layer) == ("row_shape", 0)
    assert (refusals[0].expected, refusals[0].found) == ("2x16", "4x8")


def test_the_same_model_with_another_context_length_installs(llama: Any) -> None:
    restored = engine.install(captured(llama, 20), tiny_model("llama", max_position_embeddings=128, use_cache=False))
    assert restored.report.claim is Claim.BITWISE


def test_an_override_is_named_and_lowers_the_claim(llama: Any) -> None:
    changed = tiny_model("llama")
    changed.lm_head.weight.data[1, 1] = 0.25
    restored = engine.install(captured(llama, 20), changed, override=frozenset({"weights"}))
    assert restored.report.claim is Claim.COMPATIBLE
    assert restored.report.lowered == ("weights (overridden)",)


@pytest.mark.parametrize(("name", "position", "capacity"), [("gemma3_text", 100, 99), ("mistral", 40, 39)])
def test_a_static_capacity_that_is_too_small_is_refused(name: str, position: int, capacity: int) -> None:
    model = tiny_model(name)
    cut = captured(model, position)
    (refusal,) = _refusals(cut, model, cache="static", capacity=capacity)
    assert (refusal.code, refusal.expected, refusal.found) == ("capacity-too-small", position, capacity)
    assert engine.install(cut, model, cache="static", capacity=position).report.position == position


def test_a_static_ring_goes_on_past_its_capacity() -> None:
    model = tiny_model("mistral")
    cut = captured(model, 100, "static", 64)
    cache, logits, _ = session(model, 100, "static", 64)
    restored = engine.install(cut, model, cache="static", capacity=64)
    assert _continued(model, restored) == engine.decode(model, cache, logits, STEPS).digests


@pytest.mark.parametrize(
    ("kind", "capacity", "lowered"),
    [("dynamic", None, ("cache_capacity", "cache_class")), ("static", 150, ("cache_capacity",))],
)
def test_another_cache_class_or_capacity_lowers_the_claim(
    gemma: Any, kind: str, capacity: int | None, lowered: tuple[str, ...]
) -> None:
    report = engine.install(captured(gemma, 40, "static", 140), gemma, cache=kind, capacity=capacity).report
    assert report.claim is Claim.COMPATIBLE
    assert report.lowered == lowered


def test_a_sliding_tail_restores_at_its_cut_only(gemma: Any, cut: Cut) -> None:
    refusals = _refusals(cut, gemma, at=80)
    assert {r.code for r in refusals} == {"rows-not-stored"}
    assert [r.layer for r in refusals if r.plane and r.plane.endswith(".k")] == [0, 1, 2, 3, 4]
    # Below the window a sliding layer still has every row.
    early = captured(gemma, 60)
    restored = engine.install(early, gemma, at=40)
    assert (restored.report.position, restored.logits, len(restored.tokens)) == (40, None, 40)


def test_full_layers_restore_anywhere_and_say_compatible(llama: Any) -> None:
    cut = captured(llama, 60)
    restored = engine.install(cut, llama, at=40)
    assert restored.report.claim is Claim.COMPATIBLE
    assert restored.logits is None
    assert restored.tokens == cut.tokens[:40]
    short, _, _ = session(llama, 40)
    for mine, theirs in zip(restored.cache.layers, short.layers, strict=True):
        assert mine.keys.shape == theirs.keys.shape
    engine.prefill(llama, cut.tokens[40:], restored.cache)
    assert restored.cache.get_seq_length() == 60
    assert _refusals(cut, llama, at=61)[0].code == "position-out-of-range"


def test_what_this_engine_cannot_continue_is_refused(llama: Any) -> None:
    cut = captured(llama, 20)
    shifted = replace(cut, record=replace(cut.record, rope_delta=-2))
    assert _refusals(shifted, llama)[0].code == "rope-delta-unsupported"
    unknown = replace(cut.geometry.layers[1], kind="ring_v2")
    layers = (cut.geometry.layers[0], unknown, *cut.geometry.layers[2:])
    other = replace(cut, geometry=Geometry(layers, ropes=cut.geometry.ropes))
    assert (_refusals(other, llama)[0].code, _refusals(other, llama)[0].layer) == ("unknown-kind", 1)


def test_a_session_plane_that_is_not_taken_is_said(llama: Any) -> None:
    from kvpack.model.planes import session_spec
    from kvpack.model.snapshot import PlaneRows

    cut = captured(llama, 20)
    spec = session_spec("sampler", ENCODINGS["u8"], (4,))
    rows = PlaneRows(spec, RowSet.of((0, 4)), memoryview(b"abcd"))
    record = replace(cut.record, extras=("logits", "sampler"))
    more = replace(cut, record=record, planes={**cut.planes, spec.key: rows})
    assert engine.plan(more, llama).notes == ("session.sampler: not restored",)


def test_an_identity_that_the_caller_brings_is_compared(llama: Any) -> None:
    cut = captured(llama, 20)
    mine = engine.identify(llama)
    threads = Identity(mine.compatibility, {**mine.numerics, "threads": 99})
    assert engine.plan(cut, llama, identity=threads).lowered == ("threads",)
    other = Identity({**mine.compatibility, "weights": bytes(32)}, mine.numerics)
    assert _refusals(cut, llama, identity=other)[0].field == "weights"


def test_another_device_is_written_through_host_staging(
    gemma: Any, cut: Cut, uninterrupted: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installing, "_is_on_host", lambda tensor: False)
    assert _continued(gemma, engine.install(cut, gemma)) == uninterrupted


def test_a_capacity_that_no_memory_holds_is_a_resource_error(llama: Any) -> None:
    with pytest.raises(ResourceError) as caught:
        engine.install(captured(llama, 20), llama, cache="static", capacity=10**15)
    assert (caught.value.code, caught.value.layer) == ("out-of-memory", 0)
