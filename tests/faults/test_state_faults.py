"""Faults that people met with live state, each through a real, signed pack file: exact, or refused and nothing changed.

Words of token planes are ``4096 * layer + 1024 * plane + row``, dead rows are 0xA5. Where each kind of fault is held:

=====================================================  ==============================================================
a refused restore poisons; one layer damaged           :func:`test_a_damaged_tile_leaves_the_live_session`,
                                                       :func:`test_a_dropped_plane_leaves_the_live_session`,
                                                       :func:`test_a_fresh_cache_is_zeroed_by_a_bad_tile`
rows of a wrapped ring come back contiguously          :func:`test_a_wrapped_ring_lands_at_its_slots`;
                                                       tests/reference/test_replay.py holds the logits to it
a dtype that NumPy lacks is cast                       :func:`test_words_without_a_dtype_are_identical`,
                                                       :func:`test_a_bf16_pack_is_not_an_f16_one`
KV of other weights or another rope is reused          :func:`test_each_changed_field_is_named`
one (heads, dim) for all layers                        :func:`test_layers_of_different_heads`
the sliding tail and the full plane are cut alike      :func:`test_a_cut_away_from_its_position`
attention and recurrent lengths drift apart            :func:`test_every_counter_agrees_after_an_install`; the refusal
                                                       at capture: tests/unit/test_live_cache.py
rows past the cursor leak                              :func:`test_rows_past_the_cursor_are_in_no_pack`
token list and rows disagree                           :func:`test_the_token_list_says_what_to_feed_next`
live buffers are aliased                               :func:`test_a_cut_is_written_as_it_was_captured`; while a session
                                                       is held nothing changes it: tests/unit/test_live_cache.py
layers share a cache                                   :func:`test_shared_layers_travel_as_an_alias_map`
an unknown layer kind falls back                       :func:`test_an_unknown_kind_is_listed_and_refused`
state outside the KV is lost                           :func:`test_state_outside_the_rows_comes_back`,
                                                       :func:`test_a_missing_draft_is_said_or_refused`
the identity is too strict                             :func:`test_another_context_or_batch_size_installs`
torn writes, headers that lie, racing writers          tests/faults/test_pack_files.py, tests/conformance
names that escape, wrong batch, the real Gemma 3       they concern files, stores and engines, not live caches
=====================================================  ==============================================================
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvpack
from kvpack.errors import CompatibilityError, FormatError, InstallError, IntegrityError, KvpackError
from kvpack.live import transfer
from kvpack.model.encoding import ENCODINGS
from kvpack.model.geometry import Geometry, LayerGeometry, PlaneGeometry, PlaneKey, Rope, Scope
from kvpack.model.identity import Identity
from kvpack.model.layout import LayerLayout, ProducerLayout
from kvpack.model.planes import LOGITS
from kvpack.model.ranges import RowSet
from tests import synthetic
from tests.faults.live_state import DEVICE, KEY, WHO, allocate, counters, filled, flip, memory, refused, through, write

FOUR = Geometry((synthetic.full(),) * 4)


# --- damaged packs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [2, 3])
def test_a_damaged_tile_leaves_the_live_session(tmp_path: Path, layer: int) -> None:
    """The reason is the tile, not that the destination is occupied: the install goes through a staging generation."""
    path = write(synthetic.make_cut(FOUR, 6), tmp_path)
    live = filled(FOUR, 9, seed=500)
    flip(path, PlaneKey("layer", layer, "v"))
    with kvpack.open_pack(path, trust=KEY.public) as pack:
        error = refused(lambda: transfer.stage(live, pack.cut(), WHO), live)
    assert isinstance(error, IntegrityError)
    assert (error.layer, error.plane) == (layer, f"layer.{layer}.v")
    assert live.position == 9
    live.append(1, {k: bytes(32) for k, _, _ in FOUR.planes()}, tokens=[1])  # what follows is not poisoned


@pytest.mark.parametrize("layer", [2, 3])
def test_a_dropped_plane_leaves_the_live_session(tmp_path: Path, layer: int) -> None:
    cut = synthetic.make_cut(FOUR, 6)
    gone = PlaneKey("layer", layer, "v")
    path = write(replace(cut, planes={k: p for k, p in cut.planes.items() if k != gone}), tmp_path)
    live = filled(FOUR, 9, seed=500)

    def install() -> None:
        with kvpack.open_pack(path, trust=KEY.public) as pack:
            transfer.stage(live, pack.cut(), WHO)

    error = refused(install, live)
    assert isinstance(error, FormatError)
    assert (error.code, error.expected) == ("bad-manifest", str(gone))


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_a_fresh_cache_is_zeroed_by_a_bad_tile(tmp_path: Path, layer: int) -> None:
    path = write(synthetic.make_cut(FOUR, 6), tmp_path)
    flip(path, PlaneKey("layer", layer, "k"))
    fresh = allocate(FOUR, dead=0xA5)
    with kvpack.open_pack(path, trust=KEY.public) as pack, pytest.raises(IntegrityError):
        transfer.install(fresh, pack.cut(), WHO)
    assert (fresh.position, fresh.tainted, set(b"".join(memory(fresh)))) == (0, None, {0})
    transfer.install(fresh, through(synthetic.make_cut(FOUR, 6), tmp_path), WHO)
    assert fresh.position == 6


# --- rings and cuts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [False, True])
def test_a_wrapped_ring_lands_at_its_slots(tmp_path: Path, resident: bool) -> None:
    """A ring of 12, window 8, at 29 → a ring of 16: row p at p mod 16, the rest 0xA5; a ring of 6 refuses."""
    geometry = Geometry((synthetic.sliding(8, 1, 1),))
    producer = filled(geometry, 29, 64, LayerLayout("modulo", 12))
    cut = through(transfer.capture(producer, WHO, resident=resident), tmp_path)
    assert cut.stored[PlaneKey("layer", 0, "k")] == RowSet.of((17 if resident else 21, 29))
    wide = allocate(geometry, 64, LayerLayout("modulo", 16), dead=0xA5)
    transfer.install(wide, cut, WHO)
    for plane, content in enumerate(memory(wide)):
        slots = np.full(16, 0xA5A5, np.uint16)
        for row in range(21, 29):
            slots[row % 16] = 1024 * plane + row
        assert np.frombuffer(content, "<u2").tolist() == slots.tolist()
    assert (21 % 16, 28 % 16, counters(wide)) == (5, 12, [29, 13])
    narrow = allocate(geometry, 64, LayerLayout("modulo", 6), dead=0xA5)
    error = refused(lambda: transfer.install(narrow, cut, WHO), narrow)
    assert (error.code, error.layer) == ("ring-too-small", 0)


def test_a_cut_away_from_its_position(tmp_path: Path) -> None:
    """A ring of 8 and a full plane: at 29, 25 is refused with the full plane untouched; at 6, 4 gives rows 0..3."""
    geometry = Geometry((synthetic.full(1, 1), synthetic.sliding(8, 1, 1)))
    late = through(transfer.capture(filled(geometry, 29), WHO), tmp_path)
    fresh = allocate(geometry, dead=0xA5)
    error = refused(lambda: transfer.install(fresh, late, WHO, at=25), fresh)
    assert (error.code, error.layer, error.plane) == ("rows-not-stored", 1, "layer.1.k")
    early = through(transfer.capture(filled(geometry, 6), WHO), tmp_path)
    transfer.install(fresh, early, WHO, at=4)
    for number, content in enumerate(memory(fresh)):
        words = np.frombuffer(content, "<u2")
        first = 4096 * (number // 2) + 1024 * (number % 2)
        assert words.tolist() == [*range(first, first + 4), *[0xA5A5] * (len(words) - 4)]
    assert counters(fresh) == [4, 4, 4, 4]


def test_every_counter_agrees_after_an_install(tmp_path: Path) -> None:
    layers = (
        synthetic.full(),
        synthetic.recurrent(),
        synthetic.latent(pool=4),
        synthetic.sliding(8),
        synthetic.shared(0),
    )
    geometry = Geometry(layers, draft_layers=(synthetic.full(1, 4),))
    cut = through(synthetic.make_cut(geometry, 14, draft_position=12, surplus=tails(14)), tmp_path)
    cache = allocate(geometry)
    transfer.install(cache, cut, WHO)
    now = cache.generation
    assert [layer.position for layer in now.every_layer()] == [14] * 5 + [12]
    pool = now.layers[2].state.pool
    assert pool is not None
    assert (pool.position, pool.pools_ready, now.layers[1].state.stamp) == (14, 3, 14)
    assert counters(cache) == [14, 14, 14, 0, 14, 14, 14, 14 % 8, 14, 0, 12, 12]
    assert (now.position, now.draft_position, len(now.tokens)) == (14, 12, 14)


def tails(position: int) -> dict[PlaneKey, RowSet]:
    """What a rotating ring of 8 in layer 3 needs beyond the semantic rows."""
    return {PlaneKey("layer", 3, role): RowSet.of((position - 8, position)) for role in ("k", "v")}


def test_rows_past_the_cursor_are_in_no_pack(tmp_path: Path) -> None:
    """Capacity 16, 10 live rows, a stale cursor of 4 on the device, 0xDE behind the rows: the state is the same."""
    geometry = Geometry((synthetic.full(),))
    packs = []
    for stale in (False, True):
        cache = filled(geometry, 10, 16)
        if stale:
            for layer, plane in cache.generation.every_plane():
                layer.device.fill(plane.buffer, 10 * 32, 6 * 32, 0xDE)
            DEVICE.write(cache.counters, 0, memoryview((4).to_bytes(4, "little")))
        with transfer.holding(cache, WHO, resident=True) as live:
            path = write(live, tmp_path)
        packs.append(path.read_bytes()[kvpack.inspect(path).records[0].offset :])
        assert b"\xde\xde\xde\xde" not in packs[-1]
    assert packs[0] == packs[1]
    assert kvpack.load(path, trust=KEY.public).stored[PlaneKey("layer", 0, "k")] == RowSet.of((0, 10))


def test_the_token_list_says_what_to_feed_next(tmp_path: Path) -> None:
    """12 tokens, 11 rows: both are recorded. 11 tokens, 12 rows: the capture is refused, and so is such a manifest."""
    geometry = Geometry((synthetic.full(),))
    cache = filled(geometry, 11)
    cache.generation.tokens.append(99)
    other = allocate(geometry)
    transfer.install(other, through(transfer.capture(cache, WHO), tmp_path), WHO)
    assert (other.position, other.generation.tokens[other.position :]) == (11, [99])
    rows = {key: bytes(32) for key, _, _ in geometry.planes()}
    other.append(1, rows, tokens=[99])
    assert (other.position, len(other.generation.tokens), other.generation.tokens[-1]) == (12, 12, 99)
    other.generation.tokens.pop()
    error = refused(lambda: transfer.capture(other, WHO), other)
    assert (error.code, error.expected, error.found) == ("tokens-shorter-than-rows", 12, 11)
    with pytest.raises(KvpackError) as caught:
        through(synthetic.make_cut(geometry, 12, tokens=11), tmp_path)
    assert "tokens" in str(caught.value.field)


def test_other_tokens_than_those_that_were_to_come_replace_them() -> None:
    geometry = Geometry((synthetic.full(),))
    cache = filled(geometry, 3)
    cache.generation.tokens.extend([50, 51, 52])
    rows = {key: bytes(2 * 32) for key, _, _ in geometry.planes()}
    cache.append(2, rows, tokens=[50, 77])
    assert cache.generation.tokens[3:] == [50, 77]


def test_a_cut_is_written_as_it_was_captured(tmp_path: Path) -> None:
    cache = filled(FOUR, 9)
    cut = transfer.capture(cache, WHO)
    wanted = {key: bytes(plane.buffer) for key, plane in cut.planes.items()}
    for layer, plane in cache.generation.every_plane():
        layer.device.fill(plane.buffer, 0, plane.buffer.nbytes, 0xFF)
    cache.generation.tokens[:] = [0] * 9
    back = through(cut, tmp_path)
    assert {key: bytes(plane.buffer) for key, plane in back.planes.items()} == wanted


# --- words ------------------------------------------------------------------------------------------------------------

WORDS = bytes.fromhex("7f7f 0100 817f c17f 0080 0033")  # bf16 7F7F 0001 7F81 7FC1 8000 3300, little-endian
EIGHTS = bytes(range(256))
F32_WORD = (0x3F800001).to_bytes(4, "little")


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_words_without_a_dtype_are_identical(tmp_path: Path, order: str) -> None:
    """Signalling NaNs, subnormals, every fp8 byte, and an f32 state word that bf16 would round, in one bf16 model."""
    scalar = synthetic.recurrent().planes
    geometry = Geometry(
        (
            LayerGeometry("full", tuple(PlaneGeometry(r, ENCODINGS["bf16"], (2, 3)) for r in ("k", "v"))),
            LayerGeometry("full", tuple(PlaneGeometry(r, ENCODINGS["f8_e4m3"], (2, 128)) for r in ("k", "v"))),
            LayerGeometry("recurrent", scalar),
        )
    )
    rows = {
        PlaneKey("layer", 0, "k"): WORDS * 3,
        PlaneKey("layer", 0, "v"): WORDS[::-1] * 3,
        PlaneKey("layer", 1, "k"): EIGHTS * 3,
        PlaneKey("layer", 1, "v"): EIGHTS[::-1] * 3,
        PlaneKey("layer", 2, "conv"): WORDS * 6,
        PlaneKey("layer", 2, "ssm"): F32_WORD * 120,
    }
    layouts = (LayerLayout("linear", 8, order), LayerLayout("paged", 8, order, 2), LayerLayout("none", 0))
    cache = allocate(geometry, 8, *layouts)
    cache.append(3, rows, tokens=range(3))
    back = through(transfer.capture(cache, WHO), tmp_path)
    assert {key: bytes(back.planes[key].buffer) for key in rows} == rows
    other = allocate(geometry, 8, dead=0xA5)
    transfer.install(other, back, WHO)
    again = transfer.capture(other, WHO)
    assert {key: bytes(again.planes[key].buffer) for key in rows} == rows


@pytest.mark.parametrize(("mine", "yours"), [("bf16", "f16"), ("f16", "bf16"), ("f8_e4m3", "f8_e5m2"), ("i8", "u8")])
def test_a_bf16_pack_is_not_an_f16_one(tmp_path: Path, mine: str, yours: str) -> None:
    """The same shape and the same number of bytes, and other numbers."""
    cut = through(synthetic.make_cut(Geometry((synthetic.full(encoding=mine),)), 6), tmp_path)
    cache = allocate(Geometry((synthetic.full(encoding=yours),)), dead=0xA5)
    error = refused(lambda: transfer.install(cache, cut, WHO), cache)
    assert isinstance(error, CompatibilityError)
    assert (error.code, error.layer, error.field) == ("geometry-differs", 0, "encoding")
    assert (error.expected, error.found) == (mine, yours)


def test_encodings_of_equal_size_are_different_ones(tmp_path: Path) -> None:
    cut = through(synthetic.make_cut(Geometry((synthetic.full(1, 32, "q4_0"),)), 6), tmp_path)
    cache = allocate(Geometry((synthetic.full(1, 32, "iq4_nl"),)), dead=0xA5)
    error = refused(lambda: transfer.install(cache, cut, WHO), cache)
    assert (error.field, error.expected, error.found) == ("encoding", "q4_0", "iq4_nl")


# --- another model ----------------------------------------------------------------------------------------------------


def rope(theta: float = 10_000.0, digest: bytes = b"r" * 32) -> Rope:
    return Rope(8, "half", theta, digest)


def turned(encoding: str = "bf16", rotation: Rope | None = None) -> Geometry:
    layer = replace(synthetic.full(encoding=encoding), rope="main")
    return Geometry((layer, layer), ropes={"main": rotation or rope()})


ADAPTED = synthetic.identity(adapters=b"a" * 32)


@pytest.mark.parametrize(
    ("geometry", "who", "field"),
    [
        (turned(), synthetic.identity(adapters=b"a" * 32, weights=b"W" * 32), "weights"),
        (turned(rotation=rope(theta=500_000.0)), ADAPTED, "ropes.main.theta"),
        (turned(rotation=rope(digest=b"s" * 32)), ADAPTED, "ropes.main.scaling"),
        (turned("f16"), ADAPTED, "encoding"),
        (turned(), synthetic.identity(adapters=b"a" * 32, tokenizer=b"T" * 32), "tokenizer"),
        (turned(), synthetic.identity(adapters=b"b" * 32), "adapters"),
        (turned(), WHO, "adapters"),
    ],
)
def test_each_changed_field_is_named(tmp_path: Path, geometry: Geometry, who: Identity, field: str) -> None:
    cut = through(synthetic.make_cut(turned(), 6, who=ADAPTED), tmp_path)
    cache = allocate(geometry, dead=0xA5)
    error = refused(lambda: transfer.install(cache, cut, who), cache)
    assert isinstance(error, CompatibilityError)
    assert error.field == field
    live = filled(turned(), 9)
    if geometry == turned():
        refused(lambda: transfer.stage(live, cut, who), live)
    transfer.install(allocate(turned()), cut, ADAPTED)


def test_another_context_or_batch_size_installs(tmp_path: Path) -> None:
    """Names, contexts and batch sizes are no fields of an identity, so there is nothing in which they could differ."""
    cut = through(synthetic.make_cut(FOUR, 6), tmp_path)
    for context in (6, 7, 64, 4096):
        cache = allocate(FOUR, context)
        assert transfer.install(cache, cut, WHO).report.lowered == ()
    small = allocate(FOUR, 5)
    assert refused(lambda: transfer.install(small, cut, WHO), small).code == "capacity-too-small"


def test_layers_of_different_heads(tmp_path: Path) -> None:
    """Layer 0 of 4×4, layer 1 of 2×8: 32 bytes a row both, and not each other."""
    geometry = Geometry((synthetic.full(4, 4), synthetic.full(2, 8)))
    swapped = Geometry((synthetic.full(2, 8), synthetic.full(4, 4)))
    source = filled(geometry, 6)
    cut = through(transfer.capture(source, WHO), tmp_path)
    head_major = tuple(LayerLayout("linear", 64, "HND") for _ in range(2))
    other = allocate(geometry, 64, *head_major)
    transfer.install(other, cut, WHO)
    again = transfer.capture(other, WHO)
    assert all(bytes(again.planes[k].buffer) == bytes(p.buffer) for k, p in cut.planes.items())
    wrong = allocate(swapped, dead=0xA5)
    error = refused(lambda: transfer.install(wrong, cut, WHO), wrong)
    assert (error.code, error.layer, error.field, error.expected, error.found) == (
        "geometry-differs",
        0,
        "row_shape",
        "4x4",
        "2x8",
    )


def test_shared_layers_travel_as_an_alias_map(tmp_path: Path) -> None:
    """6 layers, 4 reads 2's and 5 reads 3's: 4 are stored; another map is refused."""
    four = (synthetic.full(),) * 4
    geometry = Geometry((*four, synthetic.shared(2), synthetic.shared(3)))
    path = write(transfer.capture(filled(geometry, 6), WHO), tmp_path)
    stored = {p.spec.key.layer for p in kvpack.inspect(path).manifest.planes if p.spec.key.scope == "layer"}
    assert stored == {0, 1, 2, 3}
    cut = kvpack.load(path, trust=KEY.public)
    good = allocate(geometry)
    transfer.install(good, cut, WHO)
    assert [layer.position for layer in good.generation.layers] == [6] * 6
    for four_reads, five_reads, layer in ((3, 2, 4), (2, 2, 5), (0, 3, 4)):
        other = allocate(Geometry((*four, synthetic.shared(four_reads), synthetic.shared(five_reads))), dead=0xA5)
        error = refused(lambda other=other: transfer.install(other, cut, WHO), other)  # type: ignore[misc]
        assert (error.code, error.layer, error.field) == ("geometry-differs", layer, "source")
    own = allocate(Geometry((synthetic.full(),) * 6), dead=0xA5)
    assert refused(lambda: transfer.install(own, cut, WHO), own).field == "kind"


def test_an_unknown_kind_is_listed_and_refused(tmp_path: Path) -> None:
    """``ring_v2``, validly signed: inspect lists it, install refuses it by name, nothing takes it for a plain one."""
    geometry = Geometry((synthetic.full(), LayerGeometry("ring_v2", synthetic.kv())))
    path = write(synthetic.make_cut(geometry, 6, logits=0), tmp_path)
    assert [layer.kind for layer in kvpack.inspect(path).manifest.geometry.layers] == ["full", "ring_v2"]
    cache = allocate(Geometry((synthetic.full(), synthetic.full())), dead=0xA5)
    with kvpack.open_pack(path, trust=KEY.public) as pack:
        error = refused(lambda: transfer.install(cache, pack.cut(), WHO), cache)
    assert (error.code, error.layer, error.found) == ("unknown-kind", 1, "ring_v2")


@pytest.mark.parametrize("law", ["history", "spiral"])
def test_a_law_that_cannot_be_rebuilt_is_refused(tmp_path: Path, law: str) -> None:
    cut = synthetic.make_cut(Geometry((synthetic.full(), synthetic.sliding(8))), 6)
    layout = ProducerLayout((LayerLayout("linear", 64), LayerLayout(law, 8)))
    record = replace(cut.record, origins=(0, 3) if law == "history" else None)
    cache = allocate(cut.geometry, dead=0xA5)
    sent = through(replace(cut, layout=layout, record=record), tmp_path)
    error = refused(lambda: transfer.install(cache, sent, WHO), cache)
    assert (error.code, error.layer, error.found) == (
        "history-not-honoured" if law == "history" else "unknown-law",
        1,
        law,
    )


# --- beside the rows --------------------------------------------------------------------------------------------------


def test_state_outside_the_rows_comes_back(tmp_path: Path) -> None:
    """A rope delta of -2 at 24 tokens, logits, taps, a draft cache at its own position."""
    geometry = Geometry((synthetic.full(),), draft_layers=(synthetic.full(1, 4),))
    cache = filled(geometry, 24)
    rows = {PlaneKey(Scope.DRAFT.value, 0, role): bytes(range(176)) for role in ("k", "v")}
    cache.append(22, rows, scope=Scope.DRAFT)
    cache.generation.rope_delta, cache.generation.context_epoch = -2, 5
    cache.set_extra("logits", bytes(range(16)), synthetic.F32, (4,))
    cache.set_extra("tap", bytes(range(8)), synthetic.F32, (2,))
    cut = through(transfer.capture(cache, WHO), tmp_path)
    assert bytes(cut.planes[LOGITS].buffer) == bytes(range(16))
    other = allocate(geometry)
    transfer.install(other, cut, WHO)
    now = other.generation
    assert (now.rope_delta, now.context_epoch, now.position, now.draft_position) == (-2, 5, 24, 22)
    assert {role: extra.content for role, extra in now.extras.items()} == {
        "logits": bytes(range(16)),
        "tap": bytes(range(8)),
    }
    again = transfer.capture(other, WHO)
    assert again.record == replace(cut.record, state_id=b"")


def test_a_missing_draft_is_said_or_refused(tmp_path: Path) -> None:
    drafted = Geometry((synthetic.full(),), draft_layers=(synthetic.full(1, 4),))
    plain = Geometry((synthetic.full(),))
    with_draft = through(synthetic.make_cut(drafted, 6), tmp_path)
    report = transfer.install(allocate(plain), with_draft, WHO).report
    assert any("draft: not restored" in note for note in report.notes)
    without = through(synthetic.make_cut(plain, 6), tmp_path)
    cache = allocate(drafted, dead=0xA5)
    error = refused(lambda: transfer.install(cache, without, WHO), cache)
    assert (error.code, error.field) == ("geometry-differs", "drafts")


def test_a_tainted_cache_is_of_no_use_until_it_is_reset(tmp_path: Path) -> None:
    cut = through(synthetic.make_cut(FOUR, 6), tmp_path)
    cache = filled(FOUR, 9)
    cache.taint("an append")
    for call in (
        lambda: transfer.capture(cache, WHO),
        lambda: transfer.install(cache, cut, WHO),
        lambda: cache.swap(cache.new_generation()),
        lambda: cache.rewind(3),
    ):
        with pytest.raises(InstallError) as caught:
            call()
        assert caught.value.code == "tainted"
    cache.reset()
    transfer.install(cache, cut, WHO)
    assert cache.position == 6
