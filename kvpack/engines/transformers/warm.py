"""Warm start: what a store has of a prompt is restored, only the rest is computed, and new cuts are kept.

A prompt is prefilled in pieces that end where its state will be wanted again: behind a chat's system prologue and each
of its turns, one token before the end, and where the caller says. Each of these cuts goes into the store, and the next
process that begins with the same tokens starts there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kvpack.engines.transformers.caches import describe, new_cache, survey
from kvpack.engines.transformers.capturing import capture
from kvpack.engines.transformers.chat import ChatTokens
from kvpack.engines.transformers.decoding import decode, logits_digest, prefill
from kvpack.engines.transformers.identification import chunked, identify, with_cache
from kvpack.engines.transformers.installing import Installed, install
from kvpack.engines.transformers.keeping import CutPlan, Keeper
from kvpack.errors import EngineError, FormatError, IntegrityError, KvpackError, UsageError
from kvpack.model.geometry import Geometry
from kvpack.model.identity import Claim, Identity
from kvpack.pack.writer import Signer
from kvpack.store.prefix import ContentField
from kvpack.store.protocol import Entry, Hit, Store, StoredPack

__all__ = ["Generated", "WarmCache", "generate", "warm_cache"]

_log = logging.getLogger("kvpack.engines")

_ATTEMPTS: Final = 4
_LEAST_PROLOGUE: Final = 16
_WORTH_A_CLAIM: Final = 256
"""How many tokens more a restore between cuts must save before it is preferred: there the claim is only COMPATIBLE."""


@dataclass(frozen=True)
class Generated:
    """What :func:`generate` gave.

    ``digests[0]`` is BLAKE3 of the logits row in which the prompt ends, ``digests[i + 1]`` of the row after
    ``tokens[i]``. ``reused`` tokens of the prompt came from the store and ``computed`` were prefilled. ``claim`` and
    ``lowered`` are the restore's (None: nothing was restored), ``pack_id`` its pack. ``recomputed`` says why state that
    was already installed had to be thrown away (None: it was not). ``stored`` are the new cuts' entries; ``seconds``
    has the stages identify, find, restore, prefill, capture, store and decode, as far as they ran.
    """

    tokens: tuple[int, ...]
    digests: tuple[bytes, ...]
    reused: int
    computed: int
    claim: Claim | None
    lowered: tuple[str, ...]
    pack_id: bytes | None
    recomputed: str | None
    stored: tuple[Entry, ...]
    seconds: Mapping[str, float]
    cache: Any


class WarmCache(NamedTuple):
    """A cache for ``model.generate(input_ids, cache=cache)``, and how many of its tokens came from the store."""

    cache: Any
    reused: int


def generate(
    model: Any,
    prompt: ChatTokens | Sequence[int],
    *,
    store: Store,
    tokenizer: Any = None,
    max_new_tokens: int = 32,
    cuts: Sequence[int] = (),
    keep_cuts: int = 1,
    cache: str = "dynamic",
    capacity: int | None = None,
    identity: Identity | None = None,
    content: Sequence[ContentField] = (),
    codec: str = "split",
    sign: Signer | None = None,
    eos: Collection[int] = (),
    on_token: Callable[[int], None] | None = None,
) -> Generated:
    """Continue ``prompt`` greedily, reusing the deepest prefix of it that ``store`` has, and keep its new cuts there.

    ``cuts`` are positions at which the caller wants cuts besides those of a chat (:func:`chat_tokens`) and the one a
    token before the end; they and a chat's prologue stay for ever, of the others the last ``keep_cuts`` outlive a
    collection. A ``static`` cache has room for ``capacity`` tokens (by default just enough; a capacity of one's own
    keeps the claims of prompts of other lengths BITWISE). ``identity`` spares hashing the model again, ``sign`` signs
    new packs; whose packs are accepted was said when the store was opened. ``eos`` tokens end the decoding.

    A store that fails, a pack that is damaged or does not fit: each is a warning (logger ``kvpack.engines``), and the
    tokens are computed. Raises what :func:`prefill`, :func:`decode` and :func:`identify` raise.
    """
    tokens, plan = _planned(prompt, cuts)
    room = capacity if capacity is not None or cache == "dynamic" else len(tokens) + max_new_tokens
    keeper = Keeper(store, plan, keep_cuts=keep_cuts, codec=codec, sign=sign, content=content)
    run = _Run(model, tokens, keeper, kind=cache, capacity=room, identity=identity, tokenizer=tokenizer)
    run.restore(len(tokens), need_logits=True)
    run.prefill(len(tokens))
    first = run.logits
    with run.stage("decode"):
        decoded = decode(model, run.cache, first, max_new_tokens, eos=eos, on_token=on_token)
    return Generated(
        tokens=decoded.tokens,
        digests=(logits_digest(first), *decoded.digests),
        reused=run.reused,
        computed=len(tokens) - run.reused,
        claim=run.claim,
        lowered=run.lowered,
        pack_id=run.pack_id,
        recomputed=run.recomputed,
        stored=tuple(run.keeper.entries),
        seconds=dict(run.seconds),
        cache=run.cache,
    )


def warm_cache(
    model: Any,
    input_ids: Any,
    *,
    store: Store,
    tokenizer: Any = None,
    cuts: Sequence[int] = (),
    keep_cuts: int = 1,
    cache: str = "dynamic",
    capacity: int | None = None,
    identity: Identity | None = None,
    content: Sequence[ContentField] = (),
    codec: str = "split",
    sign: Signer | None = None,
    fill: bool = True,
    rest_only: bool = False,
) -> WarmCache:
    """A cache that holds the beginning of ``input_ids``, for ``model.generate(input_ids, cache=cache)``.

    ``input_ids`` are ``[1, n]``, a row, or a :class:`ChatTokens`. What the store has is restored; with ``fill`` the
    cache is then prefilled to the last cut, one token before the end, and new cuts are stored as :func:`generate` does;
    without it the cache ends where the restore does.

    transformers' ``generate`` passes over the tokens that a cache has seen, except where the cache counts none (models
    that are recurrent throughout, such as mamba2): there it would feed all of ``input_ids`` again, on top of the state.
    For these nothing is restored and a warning says so, unless the caller promises ``rest_only``: to call
    ``model.generate(input_ids[:, n - 1:])``, or ``[:, reused:]`` without ``fill``.
    """
    tokens, plan = _planned(input_ids, cuts)
    if cache == "static" and capacity is None:
        raise UsageError("bad-capacity", "a static cache needs a capacity of at least one token", field="capacity")
    keeper = Keeper(store, plan, keep_cuts=keep_cuts, codec=codec, sign=sign, content=content)
    run = _Run(model, tokens, keeper, kind=cache, capacity=capacity, identity=identity, tokenizer=tokenizer)
    if all(run.cache.is_linear) and not rest_only:
        _log.warning(
            "nothing is reused: transformers' generate feeds all tokens to a %s again, whatever its cache holds; "
            "call kvpack's generate, or pass rest_only and only the tokens that are left",
            model.config.model_type,
        )
        return WarmCache(run.cache, 0)
    run.restore(len(tokens) - 1, need_logits=False)
    if fill:
        run.prefill(plan.positions[-1] if plan.positions else 0)
    return WarmCache(run.cache, run.reused)


def _planned(prompt: Any, cuts: Sequence[int]) -> tuple[tuple[int, ...], CutPlan]:
    if isinstance(prompt, ChatTokens):
        prologue = [prompt.prologue] if prompt.prologue >= _LEAST_PROLOGUE else []
        plan = CutPlan.of(len(prompt.tokens), lasting=[*cuts, *prologue], passing=prompt.turns)
        return prompt.tokens, plan
    if hasattr(prompt, "reshape"):
        if prompt.ndim > 1 and prompt.shape[0] != 1:
            raise EngineError(
                "batch-not-one", "kvpack restores one sequence at a time", field="batch", found=int(prompt.shape[0])
            )
        prompt = prompt.reshape(-1).tolist()
    tokens = tuple(int(token) for token in prompt)
    if not tokens:
        raise UsageError("empty-prompt", "the prompt has no tokens", field="tokens", expected="at least 1", found=0)
    return tokens, CutPlan.of(len(tokens), lasting=cuts, passing=())


class _Run:
    """One prompt on its way into a cache: restored as far as the store reaches, then prefilled cut by cut."""

    def __init__(
        self,
        model: Any,
        tokens: tuple[int, ...],
        keeper: Keeper,
        *,
        kind: str,
        capacity: int | None,
        identity: Identity | None,
        tokenizer: Any,
    ) -> None:
        self.seconds: dict[str, float] = {}
        self.keeper = keeper
        self._model, self._tokens, self._tokenizer = model, tokens, tokenizer
        self._kind, self._capacity = kind, capacity
        self.cache: Any = new_cache(model, kind, capacity)
        with self.stage("identify"):
            known = identity if identity is not None else identify(model, tokenizer)
            live = survey(model, self.cache)
            self._identity = with_cache(known, live.kind, live.capacity)
            self._geometry: Geometry = describe(model)
        self.logits: Any = None
        self.reused = 0
        self.claim: Claim | None = None
        self.lowered: tuple[str, ...] = ()
        self.pack_id: bytes | None = None
        self.recomputed: str | None = None
        self._at = 0
        self._divided: tuple[int | str, ...] = ()
        self._keeping = True

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage; stages of one name add up."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def restore(self, limit: int, *, need_logits: bool) -> None:
        """Install the deepest prefix of at most ``limit`` tokens that the store has; whatever fails is a miss."""
        for _ in range(_ATTEMPTS):
            try:
                with self.stage("find"):
                    hit = self._find(limit, need_logits)
                    stored = self.keeper.store.get(hit) if hit is not None else None
                if hit is None:
                    return
                if stored is None:
                    continue
                with stored, self.stage("restore"):
                    installed = self._install(stored)
                    if installed is None:
                        continue
                    self._take(hit, stored, installed)
            except (KvpackError, OSError) as error:
                _log.warning("nothing is reused: %s", error)
                return
            hit.confirm()
            return

    def _find(self, limit: int, need_logits: bool) -> Hit | None:
        def ask(only_cuts: bool) -> Hit | None:
            return self.keeper.store.longest(
                self._tokens,
                self._identity,
                self._geometry,
                content=self.keeper.content,
                only_cuts=only_cuts,
                need_logits=need_logits,
                capacity=limit,
            )

        at_cut = ask(only_cuts=True)
        if at_cut is not None and at_cut.position + _WORTH_A_CLAIM > limit:
            return at_cut
        deepest = ask(only_cuts=False)
        if deepest is None or at_cut is None:
            return deepest or at_cut
        return deepest if deepest.position >= at_cut.position + _WORTH_A_CLAIM else at_cut

    def _install(self, stored: StoredPack) -> Installed | None:
        """The restored session; None where the pack is damaged, which the store has then been told."""
        try:
            return install(
                stored.cut(),
                self._model,
                cache=self._kind,
                capacity=self._capacity,
                at=stored.position,
                identity=self._identity,
                tokenizer=self._tokenizer,
            )
        except (FormatError, IntegrityError) as error:
            _log.warning("pack %s is damaged and put aside: %s", stored.pack_id.hex()[:16], error)
            stored.reject()
            return None

    def _take(self, hit: Hit, stored: StoredPack, installed: Installed) -> None:
        at = installed.report.position
        if installed.tokens and installed.tokens[:at] != self._tokens[:at]:
            raise IntegrityError("tokens", f"pack {stored.pack_id.hex()[:16]} is of other tokens", field="tokens")
        if at == len(self._tokens) and installed.logits is None:
            raise IntegrityError("no-logits", f"pack {stored.pack_id.hex()[:16]} has no logits at {at}", field="logits")
        self.cache, self.logits, self._at, self.reused = installed.cache, installed.logits, at, at
        self.claim, self.lowered, self.pack_id = installed.report.claim, installed.report.lowered, stored.pack_id
        # Which way the state came to be is taken over; one restored between cuts is like no prefill that ended there.
        before = [word for word in _divisions(stored.cut().identity) if int(word.rstrip("~")) < at]
        self._divided = (*before, at if hit.at_cut else f"{at}~")
        if hit.at_cut:
            self.keeper.parent = stored.pack_id, at

    def prefill(self, upto: int) -> None:
        """Feed what is missing up to ``upto``, in pieces that end at cuts, and keep each cut's state."""
        ends = [at for at in self.keeper.plan.positions if self._at < at < upto]
        for end in [*ends, *([upto] if self._at < upto else [])]:
            try:
                with self.stage("prefill"):
                    self.logits = prefill(self._model, self._tokens[self._at : end], self.cache)
                self._require_position(end)
            except EngineError as error:
                if not self.reused:
                    raise
                self._start_again(str(error))
                self.prefill(upto)
                return
            self._at = end
            if end in self.keeper.plan.positions:
                self._keep(end)
                self._divided = (*self._divided, end)

    def _require_position(self, end: int) -> None:
        """A model that pays no heed to what its cache holds has begun again by itself."""
        positions = [adapter.position(layer) for layer, adapter in survey(self._model, self.cache).layers]
        wrong = next((at for at in positions if at not in (None, end)), None)
        if wrong is not None:
            raise EngineError(
                "cache-not-used",
                f"after {end} tokens the cache holds {wrong}",
                field="position",
                expected=end,
                found=wrong,
            )

    def _start_again(self, reason: str) -> None:
        _log.warning(
            "%d tokens were restored and are COMPUTED AGAIN: the model cannot go on from them: %s", self.reused, reason
        )
        self.recomputed = reason
        self.cache = new_cache(self._model, self._kind, self._capacity)
        self.reused = self._at = 0
        self.claim, self.lowered, self.pack_id, self._divided = None, (), None, ()
        self.keeper.parent = None

    def _keep(self, end: int) -> None:
        if not self._keeping:
            return
        try:
            with self.stage("capture"):
                cut = capture(
                    self._model,
                    self.cache,
                    self._tokens[:end],
                    logits=self.logits,
                    identity=chunked(self._identity, self._divided),
                    provenance={"restored_lowered": ", ".join(self.lowered)} if self.lowered else None,
                )
        except KvpackError as error:
            _log.warning("no cut is stored: %s", error)
            self._keeping = False
            return
        with self.stage("store"):
            self.keeper.put(cut, self._tokens)


def _divisions(identity: Identity) -> list[str]:
    """The words of the numerics field ``prefill``: where the prefill was divided (``~``: restored between cuts)."""
    words = str(identity.numerics.get("prefill", "")).removeprefix("cuts:").split(",")
    return [word for word in words if word.rstrip("~").isdigit()]
