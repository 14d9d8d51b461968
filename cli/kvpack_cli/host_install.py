"""``kvpack install --engine host``: a pack into a plain live cache in main memory, without a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

import kvpack
from kvpack.errors import InstallError, UsageError
from kvpack.live import transfer
from kvpack.live.cache import LiveCache
from kvpack.live.generation import next_row
from kvpack.live.layers import LiveLayer
from kvpack.live.rank_shapes import RankPlan
from kvpack.live.ranked_layer import RankedLayer
from kvpack.live.sizing import default_layouts
from kvpack.live.tensor_parallel import RankedCache
from kvpack.model.gate import GateReport, deepest_position
from kvpack.model.geometry import Geometry, LayerGeometry, PlaneKey, Scope, Unit
from kvpack.model.identity import Identity
from kvpack.model.layout import LayerLayout, ProducerLayout
from kvpack.model.planes import TOKENS, plane_specs
from kvpack.model.ranges import RowSet
from kvpack.pack.view import PackCut
from kvpack_cli.output import Output, bytes_text, count_text, printable, seconds_text
from kvpack_cli.progress import Meter, Stopwatch
from kvpack_cli.synthetic import SyntheticRows, WithProvenance, appended_rows, seed_of

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["HostInstall"]

GROWING_KINDS = ("full", "latent")
_CHUNK_BYTES = 16 << 20
_TRANSACTION_TOKENS = 64
IDENTITY_NOTE = "identity: taken from the pack, there is no model to hold it to"


@dataclass
class HostInstall:
    """One install from the open pack to the report; each step adds its facts to the output.

    ``capacity`` is the rows of growing planes and, where none grows, of rotating rings; ``ring`` that of rings alone.
    ``ranks`` divides the heads over so many ranks, all of them in main memory; states are whole on each. Ranks append
    in transactions, which keep the rows that they would overwrite: their rings have room for one beyond the window.
    """

    output: Output
    watch: Stopwatch
    pack: kvpack.Pack
    geometry: Geometry
    capacity: int | None = None
    ring: int | None = None
    at: int | None = None
    append: int = 0
    ranks: int | None = None
    replicate_heads: bool = False

    def __post_init__(self) -> None:
        self.source = self._source() if self.append else None
        self.cut = self._cut()
        self.position = self.cut.record.position if self.at is None else self.at
        self.ranked: RankedCache | None = None
        self.cache = self._allocate()
        self.cache_bytes = (
            self.cache.size.nbytes
            if self.ranked is None
            else sum(self.ranked.rank_bytes(rank) for rank in range(self.ranked.plan.ranks))
        )
        self.output.facts |= {
            "pack": str(self.pack.reader.path),
            "pack_id": self.pack.reader.pack_id,
            "signatures": self.pack.verification.facts(),
            "engine": "host",
            "identity": "taken from the pack",
            "position": self.position,
            "capacity": self.cache.max_context,
            "tensor_parallel": self.ranks,
            "cache_bytes": self.cache_bytes,
        }

    def run(self, *, dry_run: bool, recapture: Path | None, codec: str, force: bool) -> None:
        """All of it, or with ``dry_run`` only the answer."""
        if dry_run:
            self.answer()
            return
        self.install()
        self.go_on()
        if recapture is not None:
            self.recapture(recapture, codec=codec, force=force)
        self.summarise()

    def _source(self) -> SyntheticRows:
        seed = seed_of(self.pack.manifest.provenance)
        if seed is None:
            raise UsageError(
                "no-synth-seed",
                "--append makes rows by the rule of kvpack synth, and this pack does not name a seed of it",
                field="append",
                hint="append to a pack that kvpack synth made",
            )
        return SyntheticRows(seed)

    def _cut(self) -> PackCut:
        """The cut at the position that was asked for, or one that holds everything it needs; the gate has its say."""
        chain = self.pack.chain
        if self.at is None or self.at in chain.positions:
            return chain.cut(self.at)
        deeper = [chain.cut(position) for position in chain.positions if position > self.at]
        return next((cut for cut in deeper if deepest_position(cut, self.at) == self.at), chain.cut())

    def _allocate(self) -> LiveCache:
        grows = any(layer.kind in GROWING_KINDS for layer in (*self.geometry.layers, *self.geometry.draft_layers))
        length = self.position + self.append
        context = self.capacity if grows and self.capacity is not None else max(1, length)
        ring = self.ring if self.ring is not None or grows else self.capacity
        usual = default_layouts(self.geometry, context)

        def chosen(scope: Scope, layers: Sequence[LayerGeometry], layouts: Sequence[LayerLayout]) -> list[LayerLayout]:
            return [
                self._layout(scope, *entry, ring) for entry in zip(range(len(layers)), layers, layouts, strict=True)
            ]

        layouts = ProducerLayout(
            tuple(chosen(Scope.LAYER, self.geometry.layers, usual.layers)),
            tuple(chosen(Scope.DRAFT, self.geometry.draft_layers, usual.draft_layers)),
        )
        if self.ranks is None:
            return LiveCache.allocate(self.geometry, max_context=context, layouts=layouts)
        states = {plane.role: None for _, _, plane in self.geometry.planes() if plane.unit is Unit.STATE}
        plan = RankPlan(self.ranks, replicate_heads=self.replicate_heads, state_axes=states)
        self.ranked = RankedCache.allocate(self.geometry, plan, max_context=context, layouts=layouts)
        return self.ranked.cache

    def _layout(
        self, scope: Scope, number: int, layer: LayerGeometry, usual: LayerLayout, ring: int | None
    ) -> LayerLayout:
        """The usual layout; a chronological plane for a pack with one row less than a rotating ring needs."""
        if layer.window is None or usual.law not in ("modulo", "pinned"):
            return usual
        room = min(self.append, _TRANSACTION_TOKENS) if self.ranks is not None else 0
        capacity = usual.capacity + room if ring is None else ring
        if usual.law == "pinned":
            return LayerLayout("pinned", capacity)
        stored = self.cut.stored.get(PlaneKey(scope.value, number, layer.planes[0].role), RowSet())
        position = (self.cut.record.draft_position or 0) if scope is Scope.DRAFT else self.position
        if stored.contains(RowSet.of((max(0, position - layer.window), position))):
            return LayerLayout("modulo", capacity)
        return LayerLayout("chronological", max(1, min(capacity, layer.window - 1 + room) if ring is None else ring))

    def plan(self) -> GateReport:
        """Hold the cut to the cache, without moving a byte."""
        report = transfer.plan(self.cache, self.cut, self.cut.identity, at=self.at)
        self.output.facts |= {
            "claim": report.claim.value,
            "lowered": list(report.lowered),
            "notes": [IDENTITY_NOTE, *report.notes],
        }
        return report

    def install(self) -> None:
        """The cut into the cache; every row is verified."""
        total = self.cut.bytes_to_read(self.plan().need)
        with self.watch.stage("install", "reading the state") as progress:
            self.cut.on_bytes = _Counter(progress, total)
            if self.ranked is not None:
                self.installed = self.ranked.install(self.cut, self.cut.identity, at=self.at)
            else:
                self.installed = transfer.install(self.cache, self.cut, self.cut.identity, at=self.at)

    def go_on(self) -> None:
        """Append the synthetic tokens that were asked for, some at a time."""
        if self.source is None:
            return
        specs = plane_specs(self.geometry)
        per_token = sum(spec.row_bytes for spec in specs.values() if spec.unit is Unit.TOKEN)
        step = max(1, _CHUNK_BYTES // max(1, per_token))
        if self.ranked is not None:
            step = min(step, _TRANSACTION_TOKENS)
        carries_tokens = TOKENS in self.cut.specs
        with self.watch.stage("append", f"appending {count_text(self.append)} tokens") as progress:
            for done in range(0, self.append, step):
                count = min(step, self.append - done)
                start = self.position + done
                ids = self.source.tokens(start, start + count) if carries_tokens else ()
                rows = appended_rows(self.source, specs, self.geometry, Scope.LAYER, start, count)
                if self.ranked is not None:
                    transaction = self.ranked.begin()
                    self.ranked.append(transaction, count, rows, tokens=ids)
                    self.ranked.finalize(transaction, self.ranked.commit(transaction, count))
                else:
                    self.cache.append(count, rows, tokens=ids, start=start)
                if self.geometry.draft_layers:
                    at = self.cache.draft_position
                    rows = appended_rows(self.source, specs, self.geometry, Scope.DRAFT, at, count)
                    self.cache.append(count, rows, scope=Scope.DRAFT)
                progress(done + count, self.append)

    def recapture(self, out: Path, *, codec: str, force: bool) -> None:
        """The cache's state as a new pack; where nothing was appended it must be the state that was installed."""
        provenance = self.pack.manifest.provenance
        with (
            self.watch.stage("recapture", f"writing {out.name}") as progress,
            (self.ranked or self).holding(self.cut.identity) as live,
        ):
            view = WithProvenance(live, provenance)
            written = kvpack.save(view, out, codec=codec, force=force, progress=progress)
        found = written.state_ids[self.cache.position]
        known = self.cut.record.state_id if self.cache.position == self.cut.record.position else None
        self.output.facts["recaptured"] = {
            "pack": str(out),
            "pack_id": written.pack_id,
            "state_id": found,
            "same_state": None if known is None else found == known,
        }
        if known is not None and found != known:
            raise InstallError(
                "state-id-differs",
                f"the state that was captured again at {self.cache.position} is not the one that was installed",
                field="state_id",
                expected=known.hex(),
                found=found.hex(),
            )

    def holding(self, identity: Identity) -> AbstractContextManager[transfer.LiveCut]:
        """The plain cache as a cut, held quiesced; a ranked one has the same method."""
        return transfer.holding(self.cache, identity)

    def answer(self) -> None:
        """The dry run's answer; the first reason against it is the error."""
        report = self.plan()
        self.output.facts |= {"fits": not report.refusals, "refusals": [reason.facts() for reason in report.refusals]}
        if report.refusals:
            self.output.line(f"It would not fit, for {len(report.refusals)} reason(s):")
            for reason in report.refusals:
                self.output.line(f"  {printable(reason.message)}")
            report.require()
        self.output.line(f"It fits at {count_text(report.position)}, in {bytes_text(self.cache_bytes)} of memory")
        self.output.fields([("note", note) for note in (IDENTITY_NOTE, *report.notes)])

    def summarise(self) -> None:
        """Positions, where each layer's rows lie, and a digest of every plane's physical bytes."""
        with self.watch.stage("digest", "hashing the planes"):
            layers = [_layer_facts(layer) for layer in self.cache.generation.every_layer()]
        facts = self.output.facts
        facts |= {
            "position": self.cache.position,
            "draft_position": self.cache.draft_position if self.geometry.draft_layers else None,
            "tokens": len(self.cache.generation.tokens),
            "appended": self.append,
            "dropped": list(self.installed.dropped),
            "layers": layers,
            "seconds": self.watch.facts(),
        }
        if self.output.as_json:
            return
        claim, lowered = str(facts["claim"]), self.installed.report.lowered
        place = "the host" if self.ranks is None else f"{self.ranks} ranks of the host"
        rows = [
            ("position", f"{count_text(self.cache.position)} tokens, {count_text(self.append)} of them appended"),
            ("cache", f"{bytes_text(self.cache_bytes)} on {place}, for {count_text(self.cache.max_context)} tokens"),
            ("claim", f"{claim}, lowered by {', '.join(lowered)}" if lowered else claim),
            ("signatures", self.pack.verification.summary),
        ]
        again = facts.get("recaptured")
        if isinstance(again, dict):
            same = {True: ", the state that was installed", False: "", None: ""}[again["same_state"]]
            rows += [("recaptured", str(again["pack"])), ("state id", f"{again['state_id'].hex()}{same}")]
        rows.append(("time", ", ".join(f"{name} {seconds_text(s)}" for name, s in self.watch.seconds.items())))
        rows += [("note", note) for note in (IDENTITY_NOTE, *self.installed.report.notes)]
        self.output.fields(rows)
        self.output.heading(f"Layers ({len(layers)})")
        self.output.table(_table(self.cache.generation.every_layer(), layers))


class _Counter:
    """Bytes that have come, for a meter."""

    def __init__(self, progress: Meter, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def __call__(self, count: int) -> None:
        self._done += count
        self._progress(min(self._done, self._total), self._total)


def _layer_facts(layer: LiveLayer) -> dict[str, object]:
    """Where a layer's rows lie: the oldest row of its run, the physical row that holds it, and the one written next."""
    placement = layer.state.placement
    logical = physical = None
    if placement is not None:
        logical, physical = 0, 0
        ranges = placement.resident.ranges
        if ranges:
            logical = ranges[-1][0]
            physical = placement.spans(logical, logical + 1)[0].physical
    return {
        "scope": layer.scope,
        "layer": layer.number,
        "kind": layer.geometry.kind,
        "law": placement.law if placement is not None else "none",
        "capacity": placement.capacity if placement is not None else 0,
        "position": layer.position,
        "origin_logical": logical,
        "origin_physical": physical,
        "next_slot": next_row(layer) if placement is not None else None,
        "planes": list(_digests(layer)),
    }


def _digests(layer: LiveLayer) -> Iterator[dict[str, object]]:
    """BLAKE3 of every plane's physical bytes, rows that hold nothing included; of each rank's plane where there are
    ranks."""
    parts = list(layer.ranks()) if isinstance(layer, RankedLayer) else [(None, layer)]
    for rank, part in parts:
        for role, plane in part.planes.items():
            hasher, size = blake3(), plane.buffer.nbytes
            piece = memoryview(bytearray(min(size, _CHUNK_BYTES)))
            for at in range(0, size, _CHUNK_BYTES):
                piece = piece[: size - at]
                part.device.read(plane.buffer, at, piece)
                hasher.update(piece)
            entry: dict[str, object] = {"role": role} if rank is None else {"role": role, "rank": rank}
            yield {**entry, "bytes": size, "blake3": hasher.digest()}


def _table(layers: Iterator[LiveLayer], found: Sequence[dict[str, object]]) -> Table:
    from kvpack_cli.layer_map import kind_text, new_table

    numbers = ("rows", "origin", "at", "next")
    table = new_table("layer", "kind", "law", *numbers, "planes (BLAKE3)", right=numbers)
    for layer, entry in zip(layers, found, strict=True):
        planes = entry["planes"]
        assert isinstance(planes, list)
        shown = [
            "-" if entry[name] is None else str(entry[name])
            for name in ("capacity", "origin_logical", "origin_physical", "next_slot")
        ]
        table.add_row(
            f"{layer.scope}.{layer.number}",
            kind_text(layer.geometry),
            str(entry["law"]),
            *shown,
            " ".join(_plane_text(plane) for plane in planes) or "none of its own",
        )
    return table


def _plane_text(plane: Mapping[str, Any]) -> str:
    rank = f"@{plane['rank']}" if "rank" in plane else ""
    return f"{plane['role']}{rank} {plane['blake3'].hex()[:12]}"
