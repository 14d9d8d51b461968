"""A cache over several ranks: every layer's planes divided, one placement, and rows that enter by transactions.

A transaction begins at the committed length, stages rows, and ends by publishing an accepted prefix; nothing staged
counts before. What a pack sees is rank-free: a capture merges ranks into whole heads (copies must agree), an install
divides a cut for this cache's own number of ranks. Growth and hydration, in :mod:`kvpack.live.rank_growth`, go into a
fresh cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kvpack.device.protocol import Buffer
from kvpack.errors import CompatibilityError, InstallError, UsageError
from kvpack.live import transfer
from kvpack.live.cache import DeviceChoice, LiveCache, Rows, device_choice
from kvpack.live.generation import Generation
from kvpack.live.layers import LayerAppend, LayerState
from kvpack.live.placement import refused
from kvpack.live.rank_shapes import RankPlan, layer_shares
from kvpack.live.ranked_layer import RankedLayer
from kvpack.live.rebasing_ring import RebasingRing, rows_for
from kvpack.live.sizing import default_layout
from kvpack.model.geometry import Geometry, LayerGeometry, PlaneKey, Unit
from kvpack.model.identity import Identity
from kvpack.model.layout import LayerLayout, ProducerLayout
from kvpack.model.snapshot import Cut, CutView

__all__ = ["RankedAppend", "RankedCache", "Transaction", "ranked_layouts"]


@dataclass(frozen=True)
class Transaction:
    """An open transaction: its number, and the committed length at which it began."""

    generation: int
    base_length: int


@dataclass(frozen=True)
class RankedAppend:
    """A checked append: the transaction, the first new row, how many, and what each layer does."""

    transaction: Transaction
    start: int
    count: int
    plans: tuple[LayerAppend, ...]


def ranked_layouts(geometry: Geometry, max_context: int) -> ProducerLayout:
    """The usual layouts of a cache with transactions: rebasing rings where rows slide, since they can go back.

    A pinned ring gets as many rows beyond its window.
    """

    def of(layer: LayerGeometry) -> LayerLayout:
        usual = default_layout(layer, max_context)
        if layer.window is None or usual.law not in ("modulo", "pinned"):
            return usual
        rows = rows_for(layer.window, max_context)
        return LayerLayout("rebase", rows) if usual.law == "modulo" else LayerLayout("pinned", (layer.sink or 0) + rows)

    return ProducerLayout(tuple(map(of, geometry.layers)))


class RankedCache:
    """The cache of one session over the ranks of ``plan``.

    ``cache`` is the whole behind it. Rows that enter there without a transaction leave this cache half-committed:
    captures, growth and transactions are refused until a :meth:`rewind` says which length counts.
    """

    def __init__(self, cache: LiveCache, plan: RankPlan) -> None:
        """Use :meth:`allocate`."""
        self.cache = cache
        self.plan = plan
        self.committed_length = 0
        self.next_generation = 1
        self._active: Transaction | None = None
        self._base_states: dict[tuple[PlaneKey, int], Buffer] = {}
        self._base_tokens: list[int] = []

    @classmethod
    def allocate(
        cls,
        geometry: Geometry,
        plan: RankPlan,
        *,
        max_context: int,
        device: DeviceChoice = None,
        layouts: ProducerLayout | None = None,
        index_rows: int | None = None,
    ) -> RankedCache:
        """An empty cache of ``geometry`` (the whole model's) for ``max_context`` tokens over ``plan.ranks`` ranks.

        ``device`` is one device or its name, or a function from rank to its device (the host by default). Every layer
        is divided before anything is allocated. Raises CompatibilityError: the refusals of
        :mod:`kvpack.live.rank_shapes`, ``ranked-draft`` for a geometry with draft layers, and what
        :meth:`LiveCache.allocate` refuses.
        """
        geometry.require_known()
        if geometry.draft_layers:
            raise CompatibilityError(
                "ranked-draft",
                "draft layers do not lie in the ranked cache of their target; give them a cache of their own",
                field="draft_layers",
                expected=0,
                found=len(geometry.draft_layers),
            )
        if max_context < 1:
            raise UsageError("bad-context", "a cache holds at least one token", field="max_context", found=max_context)
        for number, layer in enumerate(geometry.layers):
            layer_shares(layer, plan, number=number)
        devices = device_choice(device)
        cache = LiveCache(
            geometry,
            layouts or ranked_layouts(geometry, max_context),
            max_context,
            lambda _: devices(0),
            index_rows=index_rows,
            allocate_layer=partial(RankedLayer.over_ranks, plan=plan, devices=devices),
        )
        return cls(cache, plan)

    @property
    def geometry(self) -> Geometry:
        """The whole model's geometry."""
        return self.cache.geometry

    @property
    def max_context(self) -> int:
        """Tokens that the cache holds at most."""
        return self.cache.max_context

    @property
    def staged_length(self) -> int:
        """Tokens whose rows are there, committed or not."""
        return self.cache.position

    @property
    def active(self) -> Transaction | None:
        """The open transaction."""
        return self._active

    @property
    def layers(self) -> tuple[RankedLayer, ...]:
        """The layers with their ranks."""
        return tuple(layer for layer in self.cache.generation.layers if isinstance(layer, RankedLayer))

    def rank_bytes(self, rank: int) -> int:
        """What the cache takes on one rank: planes, pads and lengths."""
        return sum(layer.rank_bytes(rank) for layer in self.layers)

    # --- transactions ----------------------------------------------------------------------------------------------

    def begin(self) -> Transaction:
        """Open a transaction at the committed length; states are copied, so that a rollback can return them.

        Raises InstallError ``transaction-active``, ``half-committed``, ``tainted``, ``quiesced``.
        """
        self.cache.require_usable("a transaction")
        self.require_settled("a transaction")
        for layer in self.layers:
            for rank, member in layer.ranks():
                for plane in member.keys(Unit.STATE):
                    at = (plane.spec.key, rank)
                    copy = self._base_states.get(at)
                    if copy is None:
                        copy = self._base_states[at] = member.device.allocate(plane.spec.row_bytes)
                    member.device.copy(plane.buffer, 0, copy, 0, plane.spec.row_bytes)
        transaction = Transaction(self.next_generation, self.committed_length)
        self.next_generation += 1
        self._active = transaction
        self._base_tokens = self.cache.generation.tokens[self.committed_length :]
        for layer in self.layers:
            layer.base_length = transaction.base_length
        return transaction

    def prepare_append(self, transaction: Transaction, count: int) -> RankedAppend:
        """Plan ``count`` rows behind the staged ones; nothing changes.

        Raises InstallError ``transaction-stale``, ``zero-rows``, ``capacity-too-small``, and ``lapped`` where a
        rollback to the transaction's base would find rows gone.
        """
        self.require(transaction)
        if count < 1:
            raise refused("zero-rows", "an append brings at least one row", None, "1 or more", count)
        start = self.staged_length
        plans = []
        for layer in self.layers:
            plan = layer.plan_append(start, count)
            try:
                _rewound(plan.after, transaction.base_length, layer.number)
            except InstallError as error:
                raise refused(
                    "lapped",
                    f"an append up to {start + count} takes rows that a rollback to {transaction.base_length} needs",
                    layer.number,
                    error.expected,
                    error.found,
                ) from None
            plans.append(plan)
        return RankedAppend(transaction, start, count, tuple(plans))

    def publish_rebase(self, append: RankedAppend) -> None:
        """Move the rows that rebasing rings keep, on every rank, and publish the new bases; the append comes after."""
        self._require_current(append)
        try:
            for layer, plan in zip(self.layers, append.plans, strict=True):
                layer.rebase(plan)
        except BaseException:
            self.cache.taint("a rebase")
            raise
        self._publish_lengths()

    def publish_append(self, append: RankedAppend, rows: Rows, *, tokens: Sequence[int] = ()) -> None:
        """Write the planned rows (whole rows, all heads) and publish the staged length.

        Raises InstallError ``rebase-not-published`` where a ring has not moved yet, ``stale-plan``, and what
        :meth:`LiveCache.append` refuses.
        """
        self._require_current(append)
        for layer, plan in zip(self.layers, append.plans, strict=True):
            now, after = layer.state.placement, plan.after.placement
            if isinstance(now, RebasingRing) and isinstance(after, RebasingRing) and now.base != after.base:
                raise refused(
                    "rebase-not-published", "a ring is rebased before its append", layer.number, after.base, now.base
                )
        self.cache.append(append.count, rows, tokens=tokens, start=append.start)
        self._publish_lengths()

    def append(self, transaction: Transaction, count: int, rows: Rows, *, tokens: Sequence[int] = ()) -> None:
        """Stage ``count`` rows: plan, check the rows, rebase, write. Nothing has changed where any of it is refused."""
        append = self.prepare_append(transaction, count)
        self.cache.plan_append(count, rows, tokens=tokens, start=append.start)
        self.publish_rebase(append)
        self.publish_append(append, rows, tokens=tokens)

    def commit(self, transaction: Transaction, accepted: int) -> int:
        """The length that accepting the first ``accepted`` staged rows gives; :meth:`finalize` publishes it.

        Raises InstallError ``transaction-stale``, ``bad-acceptance`` for more rows than were staged, and
        ``state-has-no-past`` for a part of them where a recurrent state stands behind all of them.
        """
        self.require(transaction)
        staged = self.staged_length - transaction.base_length
        if not 0 <= accepted <= staged:
            raise refused("bad-acceptance", "a commit accepts what was staged", None, f"0 to {staged}", accepted)
        self.reachable(transaction.base_length + accepted)
        return transaction.base_length + accepted

    def finalize(self, transaction: Transaction, length: int) -> None:
        """End the transaction at ``length``: its base (a rollback), the staged length, or between.

        Raises InstallError ``transaction-stale``, ``finalize-out-of-range``, ``state-has-no-past``; nothing has
        changed then, and the transaction stays open.
        """
        self.require(transaction)
        if not transaction.base_length <= length <= self.staged_length:
            raise refused(
                "finalize-out-of-range",
                "a transaction ends within its own rows",
                None,
                f"{transaction.base_length} to {self.staged_length}",
                length,
            )
        self._return_to(length)

    def rewind(self, length: int) -> None:
        """Go back to ``length`` and end an open transaction; no bytes move, except that states return to its base.

        Raises InstallError ``forward-rewind``, ``beyond-headroom``, ``state-has-no-past``; nothing has changed then.
        """
        self.cache.require_usable("a rewind")
        self._return_to(length)

    def require(self, transaction: Transaction) -> None:
        """Hold an operation to the open transaction; ``transaction-stale`` for any other."""
        self.cache.require_usable("a transaction")
        if self._active != transaction:
            raise InstallError(
                "transaction-stale",
                f"transaction {transaction.generation} at {transaction.base_length} is not the open one",
                expected="none" if self._active is None else self._active.generation,
                found=transaction.generation,
            )

    def _require_current(self, append: RankedAppend) -> None:
        self.require(append.transaction)
        if append.start != self.staged_length:
            raise refused(
                "stale-plan", "rows were staged since the append was planned", None, append.start, self.staged_length
            )

    def require_settled(self, operation: str) -> None:
        """No transaction is open, all rows are committed: ``tainted``, ``transaction-active``, ``half-committed``."""
        self.cache.require_usable(operation, quiet=False)
        if self._active is not None:
            raise InstallError(
                "transaction-active",
                f"{operation} is refused: transaction {self._active.generation} is open at {self._active.base_length}",
                expected="none",
                found=self._active.generation,
            )
        if self.staged_length != self.committed_length:
            raise refused(
                "half-committed",
                f"{operation} is refused: rows are there that no transaction committed",
                None,
                self.committed_length,
                self.staged_length,
            )

    def reachable(self, length: int) -> tuple[list[LayerState], bool]:
        """Every layer's state at ``length``, and whether recurrent states go back to the transaction's base.

        Raises what :meth:`rewind` refuses.
        """
        if not 0 <= length <= self.staged_length:
            raise refused("forward-rewind", "a rewind goes back", None, f"0 to {self.staged_length}", length)
        goes_back = length != self.staged_length
        to_base = self._active is not None and length == self._active.base_length
        found = []
        for layer in self.layers:
            if goes_back and not to_base and any(True for _ in layer.keys(Unit.STATE)):
                raise InstallError(
                    "state-has-no-past",
                    f"layer {layer.number}: a recurrent state stands at {self.staged_length}, not at {length}",
                    layer=layer.number,
                    expected=self.staged_length,
                    found=length,
                    hint="roll the transaction back and append the accepted rows again",
                )
            found.append(_rewound(layer.state, length, layer.number))
        return found, goes_back and to_base

    def _return_to(self, length: int) -> None:
        states, restore = self.reachable(length)
        if restore:
            try:
                for layer in self.layers:
                    for rank, member in layer.ranks():
                        for plane in member.keys(Unit.STATE):
                            copy = self._base_states[plane.spec.key, rank]
                            member.device.copy(copy, 0, plane.buffer, 0, plane.spec.row_bytes)
            except BaseException:
                self.cache.taint("a rollback")
                raise
        now = self.cache.generation
        for layer, state in zip(self.layers, states, strict=True):
            layer.state = state
        if length != now.position:
            now.tokens[length:] = self._base_tokens if restore else []
            now.extras.clear()
        now.position = length
        self._settle()

    def _settle(self) -> None:
        """What is there counts; no transaction is open. Lengths are written last."""
        self.committed_length = self.cache.position
        self._active = None
        for layer in self.layers:
            layer.base_length = None
        self.cache.write_counters()
        self._publish_lengths()

    def _publish_lengths(self) -> None:
        for layer in self.layers:
            layer.publish_length()

    def require_fresh(self, operation: str) -> None:
        """The cache is empty and no transaction is open: ``not-fresh``."""
        self.cache.require_usable(operation)
        if self._active is not None or self.staged_length or self.committed_length:
            raise refused("not-fresh", f"{operation} is into an empty cache", None, "position 0", self.staged_length)

    def publish(self, states: Sequence[LayerState], length: int) -> None:
        """Publish rows that are in their places: every layer's state, then the position, then the ranks' lengths."""
        for layer, state in zip(self.layers, states, strict=True):
            layer.state = state
        self.cache.generation.position = length
        self._settle()

    # --- cuts ------------------------------------------------------------------------------------------------------

    def capture(self, identity: Identity, *, resident: bool = False) -> Cut:
        """The committed state as a rank-free cut, whole heads; a deep copy.

        Raises InstallError ``replicas-differ``, ``transaction-active``, ``half-committed``, and what
        :func:`kvpack.live.transfer.capture` refuses.
        """
        self.require_settled("a capture")
        return transfer.capture(self.cache, identity, resident=resident)

    @contextlib.contextmanager
    def holding(self, identity: Identity, *, resident: bool = False) -> Iterator[transfer.LiveCut]:
        """The same as :meth:`capture` without a copy, the session held quiesced until the block ends."""
        self.require_settled("a capture")
        with transfer.holding(self.cache, identity, resident=resident) as cut:
            yield cut

    def install(
        self,
        cut: CutView,
        identity: Identity,
        *,
        at: int | None = None,
        override: frozenset[str] = frozenset(),
        optional: frozenset[str] = frozenset(),
    ) -> transfer.Installed:
        """Install a cut of any number of ranks into this fresh cache (:func:`kvpack.live.transfer.install`)."""
        self.require_fresh("an install")
        installed = transfer.install(self.cache, cut, identity, at=at, override=override, optional=optional)
        self._settle()
        return installed

    def swap(self, generation: Generation) -> Generation:
        """Publish a generation that was staged for :attr:`cache`; ends no transaction: an open one refuses it."""
        self.require_settled("a swap")
        old = self.cache.swap(generation)
        self._settle()
        return old

    def reset(self) -> None:
        """Empty the cache in place, end an open transaction; older transactions stay stale."""
        self.cache.reset()
        self._settle()


def _rewound(state: LayerState, length: int, number: int) -> LayerState:
    return LayerState(
        state.placement.rewind(length, layer=number) if state.placement is not None else None,
        state.pool.rewind(length, layer=number) if state.pool is not None else None,
        length,
    )
