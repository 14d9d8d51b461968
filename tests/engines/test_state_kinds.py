"""Every kind of state: what a cut holds of it, and that a wrong one is seen. Each control is one planted fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvpack.engines import transformers as engine
from kvpack.engines.transformers.library import host_words
from kvpack.errors import CompatibilityError, EngineError, InstallError
from kvpack.model.geometry import Geometry, PlaneKey, Unit
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import Cut
from tests.engines.tiny import NAMES, WINDOW, captured, session, tiny_model, tiny_prompt, with_rows

POSITION = 150
STEPS = 4


def _key(text: str) -> PlaneKey:
    scope, layer, role = text.split(".", 2)
    return PlaneKey(scope, int(layer), role)


def _shifted(cut: Cut, key: PlaneKey) -> bytes:
    content, size = bytes(cut.planes[key].buffer), cut.specs[key].row_bytes
    return content[size:] + content[:size]


def _zeroed(cut: Cut, key: PlaneKey) -> bytes:
    return bytes(cut.planes[key].buffer.nbytes)


def _of_the_token_before(cut: Cut, key: PlaneKey) -> bytes:
    return bytes(captured(tiny_model(_MODEL_OF[id(cut)]), POSITION - 1).planes[key].buffer)


def _of_layer(number: int) -> Callable[[Cut, PlaneKey], bytes]:
    return lambda cut, key: bytes(cut.planes[replace(key, layer=number)].buffer)


_MODEL_OF: dict[int, str] = {}
_CUTS: dict[str, tuple[Any, Cut, tuple[bytes, ...]]] = {}


def _session(name: str) -> tuple[Any, Cut, tuple[bytes, ...]]:
    """The model, a cut of its session at POSITION, and the digests of the uninterrupted run."""
    if name not in _CUTS:
        model = tiny_model(name)
        cache, logits, tokens = session(model, POSITION)
        cut = engine.capture(model, cache, tokens, logits=logits)
        _CUTS[name] = model, cut, engine.decode(model, cache, logits, STEPS).digests
        _MODEL_OF[id(cut)] = name
    return _CUTS[name]


def _continued(model: Any, cut: Cut, change: Callable[[Any], None] = lambda cache: None) -> tuple[bytes, ...]:
    restored = engine.install(cut, model)
    assert restored.logits is not None
    change(restored.cache)
    return engine.decode(model, restored.cache, restored.logits, STEPS).digests


FAULTS = [
    ("qwen3_next", "layer.0.ssm", _of_the_token_before),
    ("qwen3_next", "layer.0.conv", _zeroed),
    ("mamba2", "layer.1.ssm", _of_the_token_before),
    ("lfm2", "layer.0.conv", _of_the_token_before),
    ("falcon_h1", "layer.0.ssm", _of_the_token_before),
    ("falcon_h1", "layer.0.conv", _zeroed),
    ("falcon_h1", "layer.0.k", _shifted),
    ("inkling_text", "layer.1.conv.3", _of_the_token_before),
    ("inkling_text", "layer.1.v", _shifted),
    ("deepseek_v3", "layer.0.latent", _shifted),
    ("longcat_flash", "layer.7.latent", _of_layer(6)),
    ("deepseek_v32", "layer.1.index_key", _shifted),
    ("glm_moe_dsa+shared", "layer.0.index_key", _shifted),
    ("gemma3n_text", "layer.5.k", _of_layer(3)),
    ("gemma4_text+shared", "layer.4.v", _of_layer(3)),
    ("deepseek_v4", "layer.0.entry.compressor", _zeroed),
    ("deepseek_v4", "layer.3.entry.compressor", _shifted),
    ("deepseek_v4", "layer.3.tail_kv.compressor", _zeroed),
    ("deepseek_v4", "layer.3.tail_gate.compressor", _zeroed),
    ("deepseek_v4", "layer.3.overlap_kv.compressor", _zeroed),
    ("deepseek_v4", "layer.3.overlap_gate.compressor", _zeroed),
    ("deepseek_v4", "layer.3.k", _shifted),
]


@pytest.mark.parametrize(("name", "plane", "fault"), FAULTS, ids=[f"{name}-{plane}" for name, plane, _ in FAULTS])
def test_a_wrong_plane_changes_the_logits(name: str, plane: str, fault: Callable[[Cut, PlaneKey], bytes]) -> None:
    model, cut, uninterrupted = _session(name)
    assert _continued(model, cut) == uninterrupted
    key = _key(plane)
    wrong = fault(cut, key)
    assert wrong != bytes(cut.planes[key].buffer)
    assert _continued(model, with_rows(cut, {key: wrong})) != uninterrupted


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "falcon_h1", "lfm2"])
def test_a_state_that_is_not_said_to_be_there_changes_the_logits(name: str) -> None:
    model, cut, uninterrupted = _session(name)

    def forget(cache: Any) -> None:
        for layer in cache.layers:
            if hasattr(layer, "has_previous_state"):
                layer.has_previous_state[0] = False

    assert _continued(model, cut, forget) != uninterrupted


def test_a_wrong_count_of_entries_changes_the_logits() -> None:
    model, cut, uninterrupted = _session("deepseek_v4")

    def miscount(cache: Any) -> None:
        cache.layers[3].entry_count["compressor"] -= 1

    assert _continued(model, cut, miscount) != uninterrupted


def test_a_wrong_source_of_a_shared_layer_is_refused() -> None:
    model, cut, _ = _session("gemma3n_text")
    sources = {at: layer.source for at, layer in enumerate(cut.geometry.layers) if layer.kind == "shared"}
    assert sources == {6: 5, 7: 5, 8: 5, 9: 4}
    layers = list(cut.geometry.layers)
    layers[9] = replace(layers[9], source=5)
    with pytest.raises(CompatibilityError) as caught:
        engine.install(replace(cut, geometry=Geometry(tuple(layers), ropes=cut.geometry.ropes)), model)
    error = caught.value
    assert (error.layer, error.field, error.expected, error.found) == (9, "source", 5, 4)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("deepseek_v3", ["latent"] * 4),
        ("longcat_flash", ["latent"] * 8),
        ("kimi_linear", ["recurrent"] * 4 + ["latent"] + ["recurrent"] * 3),
        ("nemotron_h+mlp", ["recurrent", "none", "full", "recurrent", "full", "none"]),
        ("falcon_h1", ["hybrid"] * 4),
        ("gemma4_text+shared", ["sliding", "sliding", "full"] * 2 + ["shared"] * 3),
        ("deepseek_v4", ["compressed"] * 6),
    ],
)
def test_the_kinds_of_layers(name: str, kinds: list[str]) -> None:
    assert [layer.kind for layer in engine.describe(tiny_model(name)).layers] == kinds


def test_a_latent_row_is_the_latent_and_then_the_rotated_part() -> None:
    model = tiny_model("deepseek_v32", "bf16")
    cache, _, tokens = session(model, 20)
    cut = engine.capture(model, cache, tokens)
    layer = cut.geometry.layers[2]
    assert (layer.kv_rank, layer.rope_dim, layer.pool) == (32, 8, 1)
    rows = np.frombuffer(cut.planes[PlaneKey("layer", 2, "latent")].buffer, np.uint16).reshape(20, 40)
    assert np.array_equal(rows[:, :32], host_words(cache.layers[2].keys)[0, 0])
    assert np.array_equal(rows[:, 32:], host_words(cache.layers[2].values)[0, 0])
    keys = cut.planes[PlaneKey("layer", 2, "index_key")]
    assert (keys.spec.unit, keys.rows) == (Unit.POOL, RowSet.of((0, 20)))
    assert bytes(keys.buffer) == host_words(cache.layers[2].indexer_keys).tobytes()


def test_only_layers_that_run_an_indexer_have_its_keys() -> None:
    geometry = engine.describe(tiny_model("glm_moe_dsa+shared"))
    assert [layer.pool for layer in geometry.layers] == [1, None, 1, None]


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_each_state_has_its_own_element_type_and_axes(dtype: str) -> None:
    model = tiny_model("qwen3_next", dtype)
    cache, _, tokens = session(model, 20)
    cut = engine.capture(model, cache, tokens)
    conv, ssm = cut.geometry.layers[0].planes
    assert (conv.encoding.name, conv.row_shape, conv.axes) == (dtype, (128, 4), ("channel", "tap"))
    assert (ssm.encoding.name, ssm.row_shape, ssm.axes) == ("f32", (4, 16, 16), ("head", "row", "column"))
    for plane, tensor in ((conv, cache.layers[0].conv_states[0]), (ssm, cache.layers[0].recurrent_states[0])):
        assert bytes(cut.planes[PlaneKey("layer", 0, plane.role)].buffer) == host_words(tensor).tobytes()


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "mamba2"])
def test_states_exist_at_their_cut_only(name: str) -> None:
    model, cut, _ = _session(name)
    report = engine.plan(cut, model, at=POSITION - 1)
    states = {key.layer for key, _, plane in cut.geometry.planes() if plane.unit is Unit.STATE}
    assert {refusal.code for refusal in report.refusals} == {"rows-not-stored"}
    assert {refusal.layer for refusal in report.refusals} == states
    assert all("needs a state" in str(refusal) for refusal in report.refusals)


def test_a_cache_that_counts_nothing_stands_at_its_tokens() -> None:
    model = tiny_model("mamba2")
    cache, _, tokens = session(model, 20)
    assert engine.capture(model, cache, tokens).record.position == 20
    assert engine.capture(model, engine.new_cache(model), []).record.position == 0


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1", "deepseek_v4", "deepseek_v32"])
def test_an_empty_session_has_no_state_yet(name: str) -> None:
    model = tiny_model(name)
    cut = engine.capture(model, engine.new_cache(model), [])
    restored = engine.install(cut, model).cache
    assert engine.decode(model, restored, engine.prefill(model, tiny_prompt(9), restored), 2).digests == _plain(model)
    states = [key for key, _, plane in cut.geometry.planes() if plane.unit is Unit.STATE]
    if states:
        early = with_rows(cut, {states[-1]: b"\1" * cut.specs[states[-1]].row_bytes})
        with pytest.raises(InstallError) as caught:
            engine.install(early, model)
        assert (caught.value.code, caught.value.plane) == ("state-too-early", str(states[-1]))


def _plain(model: Any) -> tuple[bytes, ...]:
    cache, logits, _ = session(model, 9)
    return engine.decode(model, cache, logits, 2).digests


def _refused(name: str, change: Callable[[Any], None], *, code: str = "unsupported-cache") -> EngineError:
    model = tiny_model(name)
    cache, _, tokens = session(model, 20)
    engine.capture(model, cache, tokens)
    change(cache.layers)
    with pytest.raises(EngineError) as caught:
        engine.capture(model, cache, tokens)
    assert caught.value.code == code
    return caught.value


def _transposed(layers: Any) -> None:
    state = layers[1].recurrent_states[0]
    layers[1].recurrent_states[0] = state.transpose(-1, -2).contiguous().transpose(-1, -2)


def _recorded(layers: Any) -> None:
    import torch

    layers[2].conv_states[0] = torch.cat([layers[2].conv_states[0]] * 2, dim=-1)


def _half_typed(layers: Any) -> None:
    layers[0].values = layers[0].values.double()


def _positioned(layers: Any) -> None:
    layers[3].indexer_position_ids = layers[3].indexer_keys


def _widened(layers: Any) -> None:
    layers[1].keys = layers[1].keys.repeat(1, 2, 1, 1)


def _unshared(layers: Any) -> None:
    layers[3].values = layers[3].keys.clone()


def _miscounted(layers: Any) -> None:
    layers[0].entry_count["compressor"] += 1


@pytest.mark.parametrize(
    ("name", "change", "layer", "field"),
    [
        ("qwen3_next", _transposed, 1, "ssm"),
        ("qwen3_next", _recorded, 2, "record_past"),
        ("deepseek_v3", _half_typed, 0, "dtype"),
        ("deepseek_v32", _positioned, 3, "indexer_position_ids"),
        ("deepseek_v32", _widened, 1, "kind"),
        ("deepseek_v4", _unshared, 3, "values"),
        ("deepseek_v4", _miscounted, 0, "entry_count"),
    ],
)
def test_a_layer_that_holds_more_than_it_should_is_refused(
    name: str, change: Callable[[Any], None], layer: int, field: str
) -> None:
    error = _refused(name, change)
    assert (error.layer, error.field) == (layer, field)


def test_states_that_have_seen_nothing_disagree_with_the_rows() -> None:
    for name, layer in (("qwen3_next", 4), ("falcon_h1", 2)):
        error = _refused(name, lambda layers, at=layer: _forgotten(layers[at]), code="layers-disagree")
        assert (error.layer, error.expected, error.found) == (layer, 20, 0)


def _forgotten(layer: Any) -> None:
    layer.has_previous_state[0] = False


def test_states_without_rows_disagree() -> None:
    def emptied(layers: Any) -> None:
        for layer in layers:
            if not hasattr(layer, "has_previous_state"):
                layer.reset()

    error = _refused("qwen3_next", emptied, code="layers-disagree")
    assert (error.layer, error.expected, error.found) == (0, 0, None)


def test_index_keys_behind_their_rows_are_named() -> None:
    def behind(layers: Any) -> None:
        layers[2].indexer_keys = layers[2].indexer_keys[:, :-1]

    error = _refused("deepseek_v32", behind, code="rows-missing")
    assert (error.layer, error.plane) == (2, "layer.2.index_key")


def test_an_unknown_way_of_sharing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gemma3n_text")
    modes = [*model.config.kv_sharing_modes[:9], "reuse_but_indexer"]
    monkeypatch.setattr(type(model.config), "kv_sharing_modes", modes)
    with pytest.raises(EngineError) as caught:
        engine.describe(model)
    assert (caught.value.code, caught.value.layer, caught.value.found) == ("unsupported-cache", 9, "reuse_but_indexer")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("mamba2", "minimax_m3_vl_text")])
def test_the_rows_that_turn_are_those_of_layers_with_a_rotation(name: str) -> None:
    """The position of a token that is alone reaches nothing but the rotation of its key."""
    import torch

    model = tiny_model(name)
    layers = engine.describe(model).layers
    held = []
    for position in (0, 9):
        cache = engine.new_cache(model)
        with torch.no_grad():
            model(input_ids=torch.tensor([[5]]), position_ids=torch.tensor([[position]]), cache=cache, use_cache=True)
        held.append(engine.capture(model, cache, [5]))
    turned = {PlaneKey("layer", at, role): layer.rope for at, layer in enumerate(layers) for role in ("k", "latent")}
    for key in turned.keys() & held[0].planes.keys():
        one, other = (np.frombuffer(cut.planes[key].buffer, np.float32) for cut in held)
        assert np.allclose(one, other, atol=1e-3) == (turned[key] is None), str(key)


def test_windows_of_the_compressed_layers() -> None:
    _, cut, _ = _session("deepseek_v4")
    assert [(layer.window, layer.pool) for layer in cut.geometry.layers[2:4]] == [(WINDOW, 128), (WINDOW, 4)]
    assert {key.role: str(rows.rows) for key, rows in cut.planes.items() if key.layer == 0} == {
        "k": f"[{POSITION - WINDOW + 1}, {POSITION})",
        "entry.compressor": "[0, 1)",
        "tail_kv.compressor": f"[128, {POSITION})",
        "tail_gate.compressor": f"[128, {POSITION})",
    }
