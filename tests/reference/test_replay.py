"""A session captured, saved, loaded and installed elsewhere gives the logits of the session that never stopped.

Compared bit for bit, with a decoder that meets rows in physical order (:mod:`tests.reference.decoder`). The control
installs the right rows at rotation 0: it must differ wherever the ring's origin is rotated, and agree where it is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvpack
from kvpack.errors import CompatibilityError, InstallError
from kvpack.live import transfer
from kvpack.live.rings import RotatingRing
from kvpack.live.speculation import Speculation
from kvpack.model.geometry import Geometry, LayerGeometry
from kvpack.model.identity import Claim
from kvpack.model.planes import LOGITS
from kvpack.model.snapshot import Cut
from tests import synthetic
from tests.reference import decoder
from tests.reference.decoder import Floats, Session

WHO = synthetic.identity()
WINDOW = 8
WRAPS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW - 1, 2 * WINDOW, 2 * WINDOW + 1, 3 * WINDOW + 5)
SHARED = LayerGeometry("shared", (), source=0)

EVERY = decoder.geometry(
    decoder.attention(WINDOW, turned=True),
    decoder.attention(),
    decoder.latent(),
    decoder.recurrent(),
    SHARED,
    decoder.attention(turned=True, encoding="f16"),
    decoder.attention(WINDOW - 3, turned=True, heads=1, encoding="f16"),
)
RINGS = decoder.geometry(decoder.attention(WINDOW, turned=True), decoder.attention(), SHARED)

TOKENS = np.random.default_rng(7).integers(0, decoder.VOCAB, 256).tolist()

History = Callable[[Session, int], object]


def chunks(session: Session, position: int) -> None:
    session.prefill(TOKENS[:position], 5)


def one_chunk(session: Session, position: int) -> None:
    """A batch of everything; past the first wrap it is wider than the ring."""
    session.prefill(TOKENS[:position], position)


def steps(session: Session, position: int) -> None:
    for token in TOKENS[:position]:
        session.decode(token)


def crossing(session: Session, position: int) -> None:
    """Up to just below the wrap in chunks, then one batch that crosses it, then single steps."""
    below = min(position, WINDOW - 2)
    session.prefill(TOKENS[:below], 3)
    across = min(position, below + 6)
    if across > below:
        session.prefill(TOKENS[below:across], across - below)
    for token in TOKENS[across:position]:
        session.decode(token)


HISTORIES = (chunks, one_chunk, steps, crossing)


def go_on(session: Session) -> list[bytes]:
    """The logits of what follows: single steps over every seam of the rings, a chunk, and steps again."""
    at = session.cache.position
    found = [session.decode(token).tobytes() for token in TOKENS[at : at + 2 * WINDOW + 1]]
    at = session.cache.position
    found.append(session.prefill(TOKENS[at : at + 5], 5).tobytes())
    return [*found, *(session.decode(token).tobytes() for token in TOKENS[at + 5 : at + 8])]


def travelled(session: Session, path: Path, *, resident: bool = False) -> Cut:
    """The session's cut after a pack file: captured, saved, loaded."""
    kvpack.save(transfer.capture(session.cache, WHO, resident=resident), path / "session.kvpack", force=True)
    return kvpack.load(path / "session.kvpack", allow_unsigned=True)


def restored(fresh: Session, cut: Cut) -> Session:
    report = transfer.install(fresh.cache, cut, WHO).report
    assert report.claim is Claim.BITWISE
    return fresh


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("position", WRAPS)
def test_a_restored_session_replays_bit_for_bit(tmp_path: Path, position: int, history: History) -> None:
    session = Session(EVERY)
    history(session, position)
    cut = travelled(session, tmp_path)
    other = restored(Session(EVERY), cut)
    assert bytes(cut.planes[LOGITS].buffer) == other.cache.generation.extras["logits"].content
    assert go_on(other) == go_on(session)


VARIANTS = {
    "a larger ring": (RINGS, {"capacity": WINDOW + 5}),
    "a ring of twice the window": (RINGS, {"capacity": 2 * WINDOW}),
    "a head-major ring": (RINGS, {"order": "HND"}),
    "a larger head-major ring": (RINGS, {"order": "HND", "capacity": WINDOW + 3}),
    "a plane that shifts": (RINGS, {"law": "chronological"}),
    "a rebasing ring": (RINGS, {"law": "rebase"}),
    "pages": (RINGS, {"law": "paged", "capacity": 96, "page_size": 4}),
    "a plane that grows": (RINGS, {"law": "linear", "capacity": 96}),
    "sinks": (decoder.geometry(decoder.attention(WINDOW, sink=2, turned=True), decoder.attention()), {}),
    "sinks, a larger ring": (
        decoder.geometry(decoder.attention(WINDOW, sink=3, turned=True)),
        {"capacity": WINDOW + 3 + 4, "order": "HND"},
    ),
    "one key a token": (decoder.geometry(decoder.latent(1), decoder.attention(WINDOW)), {}),
    "pools": (decoder.geometry(decoder.latent(3), decoder.latent(None), decoder.attention(WINDOW)), {}),
    "states only": (decoder.geometry(decoder.recurrent(), decoder.recurrent(taps=4)), {}),
    "f16 rings": (decoder.geometry(decoder.attention(WINDOW, encoding="f16", turned=True, heads=4, dim=4)), {}),
}


@pytest.mark.parametrize(
    ("position", "resident"), [*((at, False) for at in WRAPS), (WINDOW + 1, True), (3 * WINDOW + 5, True)]
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_law_and_kind_replays_bit_for_bit(tmp_path: Path, variant: str, position: int, resident: bool) -> None:
    model, sliding = VARIANTS[variant]
    layout = decoder.layouts(model, 96, **sliding)
    session = Session(model, layout=layout)
    crossing(session, position)
    other = restored(Session(model, layout=layout), travelled(session, tmp_path, resident=resident))
    assert go_on(other) == go_on(session)


def at_rotation_zero(session: Session) -> None:
    """The control: every ring's rows in the right order from physical row 0, as a restore without §4 leaves them."""
    for layer in session.cache.generation.layers:
        placement = layer.state.placement
        if not isinstance(placement, RotatingRing):
            continue
        first, end = placement.origin_logical, placement.position
        rows = {role: layer.read_rows(plane, first, end) for role, plane in layer.planes.items()}
        layer.state = replace(layer.state, placement=replace(placement, origin_physical=0))
        for role, plane in layer.planes.items():
            layer.device.fill(plane.buffer, 0, plane.buffer.nbytes, 0)
            layer.write_rows(plane, first, rows[role], layer.state)


@pytest.mark.parametrize("capacity", [WINDOW, WINDOW + 3])
@pytest.mark.parametrize("position", [*WRAPS, 3 * WINDOW, 4 * WINDOW, 2 * WINDOW + 3, 3 * WINDOW + 6])
def test_an_origin_0_restore_differs_exactly_where_the_origin_is_rotated(
    tmp_path: Path, position: int, capacity: int
) -> None:
    layout = decoder.layouts(RINGS, 96, capacity=capacity)
    session = Session(RINGS, layout=layout)
    chunks(session, position)
    cut = travelled(session, tmp_path)
    right, control = (restored(Session(RINGS, layout=layout), cut) for _ in range(2))
    at_rotation_zero(control)
    origin = max(0, position - WINDOW)
    rotated = origin % capacity != 0
    ring = control.cache.generation.layers[0].state.placement
    assert ring is not None
    assert ring.law == ("history" if rotated else "modulo")
    wanted = go_on(session)
    assert go_on(right) == wanted
    assert (go_on(control) != wanted) is rotated


def test_a_control_that_is_captured_says_history_and_is_refused(tmp_path: Path) -> None:
    session = Session(RINGS)
    chunks(session, WINDOW + 3)
    at_rotation_zero(session)
    cut = travelled(session, tmp_path)
    assert (cut.layout.layers[0].law, cut.record.origins) == ("history", (0, 0, 0))
    with pytest.raises(CompatibilityError) as caught:
        transfer.install(Session(RINGS).cache, cut, WHO)
    assert (caught.value.code, caught.value.layer) == ("history-not-honoured", 0)


@pytest.mark.parametrize("position", WRAPS)
@pytest.mark.parametrize(
    "there",
    [
        {"capacity": WINDOW + 5},
        {"capacity": 3 * WINDOW, "order": "HND"},
        {"law": "paged", "capacity": 96, "page_size": 4},
        {"law": "linear", "capacity": 96, "order": "HND"},
        {"law": "chronological", "capacity": WINDOW},
    ],
)
def test_at_another_capacity_it_is_the_session_that_always_ran_there(
    tmp_path: Path, position: int, there: dict[str, object]
) -> None:
    """Prefilled rows do not depend on the ring (each chunk is staged), so what differs is where they lie."""
    session = Session(RINGS)
    chunks(session, position)
    layout = decoder.layouts(RINGS, 96, **there)
    native = Session(RINGS, layout=layout)
    chunks(native, position)
    other = restored(Session(RINGS, layout=layout), travelled(session, tmp_path))
    wanted = go_on(native)
    assert go_on(other) == wanted
    if position > WINDOW and there != {"law": "chronological", "capacity": WINDOW}:
        assert go_on(session) != wanted  # the comparison can fail: a ring of the window sums in another order


@pytest.mark.parametrize("position", [*WRAPS, 33, 41])
def test_a_rebasing_ring_takes_what_covers_its_aligned_window(tmp_path: Path, position: int) -> None:
    """It reads from a row aligned down to 32: all resident rows of a ring of 48 reach there, a window's do not."""
    session = Session(RINGS, layout=decoder.layouts(RINGS, 96, capacity=48))
    layout = decoder.layouts(RINGS, 96, law="rebase")
    native = Session(RINGS, layout=layout)
    for each in (session, native):
        chunks(each, position)
    other = restored(Session(RINGS, layout=layout), travelled(session, tmp_path, resident=True))
    aligned = max(0, position - (WINDOW - 1)) // 32 * 32
    if aligned < position - WINDOW:
        with pytest.raises(CompatibilityError) as caught:
            transfer.install(Session(RINGS, layout=layout).cache, travelled(session, tmp_path), WHO)
        assert (caught.value.code, caught.value.expected) == ("rows-not-stored", f"[{aligned}, {position})")
    assert go_on(other) == go_on(native)


@pytest.mark.parametrize("delta", [False, True], ids=["one pack", "deltas"])
def test_several_cuts_of_one_session_replay_each(tmp_path: Path, delta: bool) -> None:
    """Marked while the session prefills: each cut continues as the session that was stopped there."""
    session, positions = Session(EVERY), (WINDOW - 1, WINDOW + 1, 2 * WINDOW, 3 * WINDOW + 5)
    cuts = []
    for position in positions:
        session.prefill(TOKENS[session.cache.position : position], 5)
        cuts.append(transfer.capture(session.cache, WHO))
    if delta:
        kvpack.save(cuts[:2], tmp_path / "parent.kvpack")
        with kvpack.open_pack(tmp_path / "parent.kvpack", allow_unsigned=True) as parent:
            kvpack.save(cuts[2:], tmp_path / "child.kvpack", parent=parent.cut())
    else:
        kvpack.save(cuts, tmp_path / "child.kvpack")
    for at, position in enumerate(positions):
        path = tmp_path / ("parent.kvpack" if delta and at < 2 else "child.kvpack")
        cut = kvpack.load(path, allow_unsigned=True, at=position, **({"parents": tmp_path} if delta else {}))
        plain = Session(EVERY)
        for first, end in zip((0, *positions[:at]), positions[: at + 1], strict=True):
            plain.prefill(TOKENS[first:end], 5)
        other = restored(Session(EVERY), cut)
        assert go_on(other) == go_on(plain)


def test_a_ring_below_the_window_is_refused(tmp_path: Path) -> None:
    session = Session(RINGS)
    chunks(session, 3 * WINDOW)
    cut = travelled(session, tmp_path)
    small = Session(RINGS, layout=decoder.layouts(RINGS, 96, capacity=WINDOW - 1))
    with pytest.raises(CompatibilityError) as caught:
        transfer.install(small.cache, cut, WHO)
    assert (caught.value.code, caught.value.layer) == ("ring-too-small", 0)
    assert small.cache.position == 0


# --- publication ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", WRAPS)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_published_generation_replays_bit_for_bit(tmp_path: Path, position: int, in_place: bool) -> None:
    session, busy = Session(EVERY), Session(EVERY)
    chunks(session, position)
    one_chunk(busy, 2 * WINDOW + 3)
    staged = transfer.stage(busy.cache, travelled(session, tmp_path), WHO)
    uninterrupted = Session(EVERY)
    one_chunk(uninterrupted, 2 * WINDOW + 3)
    token = TOKENS[0]
    assert busy.decode(token).tobytes() == uninterrupted.decode(token).tobytes()  # the live one goes on until then
    if in_place:
        transfer.publish_in_place(busy.cache, staged)
    else:
        old = busy.cache.swap(staged.generation)
        assert old.position == 2 * WINDOW + 4
    assert go_on(busy) == go_on(session)


def test_the_old_generation_can_be_swapped_back(tmp_path: Path) -> None:
    session, other, plain = Session(EVERY), Session(EVERY), Session(EVERY)
    for each in (session, plain):
        chunks(each, 2 * WINDOW + 3)
    steps(other, WINDOW + 1)
    old = session.cache.swap(transfer.stage(session.cache, travelled(other, tmp_path), WHO).generation)
    go_on(session)
    session.cache.swap(old)
    assert go_on(session) == go_on(plain)


# --- speculation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 5, 16])
@pytest.mark.parametrize("position", WRAPS)
def test_a_rolled_back_block_never_happened(position: int, block: int) -> None:
    session, plain = Session(EVERY), Session(EVERY)
    for each in (session, plain):
        crossing(each, position)
    speculation = Speculation(session.cache)
    for verified in (True, False):
        speculation.checkpoint(block)
        if verified:
            session.verify([3] * block)
        else:
            for token in range(block):
                session.decode(token)
        speculation.rollback()
    assert go_on(session) == go_on(plain)


def test_without_the_kept_rows_a_rollback_would_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with the integers alone put back, a full ring has lost the rows that the block overwrote."""
    session, plain = Session(RINGS), Session(RINGS)
    for each in (session, plain):
        chunks(each, 2 * WINDOW + 3)
    monkeypatch.setattr("kvpack.live.speculation._KeptRows.put_back", lambda *_: None)
    speculation = Speculation(session.cache)
    speculation.checkpoint(5)
    session.verify([3] * 5)
    speculation.rollback()
    assert go_on(session) != go_on(plain)


@pytest.mark.parametrize("model", [EVERY, RINGS], ids=["with a state", "token axes only"])
@pytest.mark.parametrize(("block", "accepted"), [(5, 2), (5, 4), (5, 5), (16, 3), (16, 11), (16, 0)])
@pytest.mark.parametrize("position", [3, WINDOW - 1, WINDOW, 2 * WINDOW + 1])
def test_a_partial_commit_is_having_fed_the_accepted_tokens_alone(
    model: Geometry, position: int, block: int, accepted: int
) -> None:
    """The rows of a block's first tokens do not depend on its later ones, so accepting is exact."""
    session, plain = Session(model), Session(model)
    for each in (session, plain):
        chunks(each, position)
    draft = TOKENS[100 : 100 + block]
    speculation = Speculation(session.cache)
    speculation.checkpoint(block)
    session.verify(draft)
    owed = speculation.commit(accepted)
    if owed:
        with pytest.raises(InstallError) as caught:
            transfer.capture(session.cache, WHO)
        assert caught.value.code == "replay-pending"
        session.verify(draft[:owed])
    if accepted:
        plain.verify(draft[:accepted])
    assert session.cache.position == plain.cache.position == position + accepted
    assert go_on(session) == go_on(plain)


@pytest.mark.parametrize("position", [WINDOW, 2 * WINDOW + 1])
def test_speculation_on_a_restored_session(tmp_path: Path, position: int) -> None:
    session = Session(RINGS)
    chunks(session, position)
    other = restored(Session(RINGS), travelled(session, tmp_path))
    for each in (session, other):
        speculation = Speculation(each.cache)
        speculation.checkpoint(6)
        each.verify(TOKENS[50:56])
        assert speculation.commit(2) == 0
    assert go_on(other) == go_on(session)


# --- the decoder itself -----------------------------------------------------------------------------------------------


def final_logits(session: Session, history: History, position: int) -> Floats:
    history(session, position)
    return np.frombuffer(session.cache.generation.extras["logits"].content, "<f4")


@pytest.mark.parametrize("position", [WINDOW + 1, 3 * WINDOW + 5])
def test_the_decoder_is_one_model_whatever_the_history(position: int) -> None:
    """Chunking changes no bit (each chunk is staged); single steps over a ring differ by rounding alone."""
    found = [final_logits(Session(EVERY), history, position) for history in HISTORIES]
    assert found[0].tobytes() == found[1].tobytes()
    for other in found[2:]:
        np.testing.assert_allclose(other, found[0], rtol=0, atol=2e-2)  # f16 rows round a differing sum either way
    assert found[2].tobytes() != found[0].tobytes()


def test_a_chunk_that_overwrote_before_it_attended_would_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control for staging: attention over the ring after the chunk's append has lost rows that it needs."""
    wanted = final_logits(Session(RINGS), one_chunk, 2 * WINDOW)
    monkeypatch.setattr(
        decoder,
        "staged",
        lambda layer, start, fresh: decoder.after_append(
            layer, layer.plan_append(start, len(next(iter(fresh.values())))), fresh
        ),
    )
    early = final_logits(Session(RINGS), chunks, 2 * WINDOW)
    assert np.abs(early - wanted).max() > 1e-3
