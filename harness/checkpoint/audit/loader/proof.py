"""Prove which bytes of a checkpoint reach which parameter of an engine, without copying data.

`prove` applies a loader map to every stored tensor, computes which box of it each rank copies into
which box of which parameter, and checks that the boxes on both sides cover the whole. Where the
engine's layout is known, it also compares each write with the part, parameter and rows that belong
there. No loop visits elements. A tensor that does not fit its slot counts as not written.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import InvalidArgument, LayoutMismatch
from degarble.harness.checkpoint.audit import rules
from degarble.harness.checkpoint.audit.findings import format_ranges
from degarble.harness.checkpoint.audit.loader.engine_maps import layout_for
from degarble.harness.checkpoint.audit.loader.findings import NO_SLOT, SCALES, LoaderFindings
from degarble.harness.checkpoint.audit.loader.maps import (
    AS_STORED,
    EngineLayout,
    NameOutcome,
    compiled,
    unknown_parameters,
)
from degarble.harness.checkpoint.audit.loader.routes import Reads, Routes, Transfer, Writer
from degarble.harness.checkpoint.audit.loader.sources import require_unfused
from degarble.harness.checkpoint.audit.loader.targets import (
    ByteRuns,
    EngineTargets,
    byte_runs,
    cover,
    listed_targets,
    ranks_of,
)
from degarble.harness.checkpoint.audit.rules import Level
from degarble.harness.checkpoint.audit.structure.inventory import stored_recipe, take_inventory
from degarble.harness.checkpoint.read.types import DTYPE_BITS, shown, unknown_name
from degarble.harness.model.sharding import plan
from degarble.harness.model.types import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from degarble.harness.checkpoint.audit.findings import Finding
    from degarble.harness.checkpoint.audit.loader.findings import WrongWrite
    from degarble.harness.checkpoint.audit.loader.maps import LoaderMap, ResolvedName
    from degarble.harness.checkpoint.audit.loader.routes import AttemptedWrite, Identity
    from degarble.harness.checkpoint.audit.loader.sources import SourceTensor
    from degarble.harness.checkpoint.audit.loader.targets import (
        ExpectedContent,
        Key,
        RankTargets,
        TargetParameter,
    )
    from degarble.harness.checkpoint.read.types import TensorEntry
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.model.layouts import Layout


# --------------------------------------------------------------------------------------------------
# Findings that share a cause. A skipped tensor leaves its place unwritten, and a tensor in another
# one's place displaces that one. Each such pair is one finding: the consequence appears in the text
# of its cause.


class UnwrittenBoxes(NamedTuple):
    """Unwritten boxes of a parameter, with what belongs in the slots that they overlap."""

    target: TargetParameter
    boxes: tuple[Box, ...]
    empty: Mapping[Key, ExpectedContent | None]
    rank: int


def key_of(truth: ExpectedContent) -> Identity:
    """Return the identity, parameter name and part, of what belongs in a slot."""
    return truth.parameter.name, truth.part


def has_finding(resolved: ResolvedName) -> bool:
    """Return whether an unplaced tensor gets a finding; one that another loader reads does not."""
    return resolved.outcome is not NameOutcome.ELSEWHERE


class ReportedCauses:
    """Tensors and slots that have a finding already.

    `sources`: tensors with a finding; `taken`: tensors whose slot has one. `left`: parameters that
    a tensor leaves unwritten.
    """

    def __init__(self) -> None:
        self.sources: set[Identity] = set()
        self.taken: set[Identity] = set()
        self.left: dict[Identity, dict[str, None]] = defaultdict(dict)

    def wrong(self, source: SourceTensor, truth: ExpectedContent | None) -> None:
        """Record a wrong write: its tensor and its slot."""
        if source.parameter is not None:
            self.sources.add((source.parameter.name, source.part))
        if truth is not None:
            self.places([truth])

    def places(self, truths: Iterable[ExpectedContent]) -> None:
        """Record slots that have a finding."""
        self.taken.update(map(key_of, truths))

    def leaves(self, truths: Iterable[ExpectedContent], target: str) -> None:
        """Record a parameter that stays unwritten because of tensors that have a finding."""
        for truth in truths:
            self.left[key_of(truth)][target] = None


# --------------------------------------------------------------------------------------------------
# The proof. A tensor that does not fit its slot counts as not written, as in an engine that
# asserts. A checkpoint that is fused unlike the engine is rejected, and so is an engine's layout
# without a known config.

_ARRANGED = "experts are stored in the order of {} kernels; rows inside them are not judged"
_MOST_FATES = 8  # tensors whose outcome one finding lists


@dataclass(frozen=True)
class LoaderProof:
    """The result of `prove`: findings and coverage of one loader map on one checkpoint.

    `unread`: boxes of placed tensors that reach nothing. `unwritten`: boxes of parameters, by rank
    and name. `outcomes`: by stored tensor. Single transfers are recomputed on request, because
    there can be millions. `stopped`: partners that the engine fuses do not fit into one tensor, so
    its parameters cannot be laid out and nothing is proven.
    """

    map: LoaderMap
    entries: Mapping[str, TensorEntry]
    findings: list[Finding]
    unread: Mapping[str, tuple[Box, ...]]
    unwritten: Mapping[tuple[int, str], tuple[Box, ...]]
    outcomes: Mapping[str, NameOutcome]
    counts: Mapping[str, int]
    _held: Callable[[range], Iterator[RankTargets]]
    _writer: Writer
    stopped: bool = False

    @property
    def ranks(self) -> range:
        """Ranks that were proven."""
        return range(0) if self.stopped else ranks_of(self.map)

    def rank_parameters(self) -> Iterator[RankTargets]:
        """Yield the parameters of each rank, one rank after the other."""
        return self._held(self.ranks)

    def fills(self, parameter: str, rank: int) -> tuple[Transfer, ...]:
        """Return the transfers into a parameter of a rank."""
        if rank not in self.ranks:
            raise InvalidArgument("rank", rank, f"one of {list(self.ranks)}", "Choose another.")
        (held,) = self._held(range(rank, rank + 1))
        if parameter not in held.targets:
            raise unknown_name(f"parameter of rank {rank}", parameter, held.targets)
        return self._writer.transfers(held, held.targets[parameter])

    def reaches(self, tensor: str) -> Iterator[tuple[int, str, Transfer]]:
        """Yield (rank, parameter, transfer) for every destination of a stored tensor."""
        if tensor not in self.entries:
            raise unknown_name("stored tensor", tensor, self.entries)
        names = self._writer.routes.leading_to(tensor)
        for held in self._held(self.ranks):
            for name in names & held.targets.keys():
                for transfer in self._writer.transfers(held, held.targets[name]):
                    if tensor == transfer.source or tensor in transfer.made_from:
                        yield held.rank, name, transfer

    def bytes_of(self, transfer: Transfer) -> tuple[ByteRuns, ...]:
        """Return the bytes that a transfer reads; a conversion reads whole tensors."""
        if transfer.made_from:
            entries = (self.entries[name] for name in transfer.made_from)
            return tuple(byte_runs(entry, Box.whole(entry.shape)) for entry in entries)
        return (byte_runs(self.entries[transfer.source], transfer.source_box),)

    def summary(self) -> dict[str, int]:
        """Return counts and bytes for a report."""
        found: dict[str, int] = defaultdict(int, self.counts)
        for name, outcome in self.outcomes.items():
            found[f"tensors {outcome}"] += 1
            found[f"bytes {outcome}"] += self.entries[name].nbytes
        for name, boxes in self.unread.items():
            found["bytes unread"] += sum(byte_runs(self.entries[name], b).nbytes for b in boxes)
        unwritten = (box.count for boxes in self.unwritten.values() for box in boxes)
        return {**found, "elements unwritten": sum(unwritten)}


def prove(checkpoint: Checkpoint, loader_map: LoaderMap) -> LoaderProof:
    """Return what a loader with this map does with every byte of a checkpoint."""
    return _Prover(checkpoint, loader_map).prove()


class _Prover:
    """State of one proof while it is computed."""

    def __init__(self, checkpoint: Checkpoint, loader_map: LoaderMap) -> None:
        names = checkpoint.names
        self._checkpoint = checkpoint
        self._map = loader_map
        self._inventory = None if names is None else take_inventory(names)
        if loader_map.derived is not None:
            self._inventory = loader_map.derived.inventory
        if self._inventory is not None:
            engine = loader_map.parameters
            require_unfused(
                self._inventory, engine.name if isinstance(engine, EngineLayout) else ""
            )
        self._findings = LoaderFindings(self._inventory)
        self._fills = [(compiled("fill", fill.match), fill.value) for fill in loader_map.fill]
        self._layout = self._engine_layout()
        self._engine = self._engine_targets()
        self._routes = Routes(
            checkpoint, loader_map, self._inventory, _Known(self._names), self._findings
        )
        self._writer = Writer(loader_map, self._routes)
        self._reads = Reads()
        self._refused: set[str] = set()  # sources that fit no slot, which has its finding
        self._other_format: set[str] = set()  # parameters that have a finding as a whole
        self._reported = ReportedCauses()
        self._missing: list[UnwrittenBoxes] = []
        self._counts: Counter[str] = Counter()

    def prove(self) -> LoaderProof:
        """Return the proof."""
        unwritten: dict[tuple[int, str], tuple[Box, ...]] = {}
        stopped = False
        for caveat in (*self._map.caveats, *self._arranged()):
            self._findings.caveat(caveat)
        if self._map.derived is not None:
            self._findings.of_names(self._map.derived)
        try:
            self._routes.follow()
            self._judge_formats()
            for held in self._held(ranks_of(self._map)):
                self._counts["ranks"] += 1
                self._counts["parameters"] += len(held.targets)
                for target in held.targets.values():
                    missing = self._judge(held, target)
                    if missing:
                        unwritten[held.rank, target.name] = missing
            self._report_missing()
            self._findings.dead(self._routes.dead() + self._writer.splits.dead())
        except LayoutMismatch as error:
            self._findings.partners_differ(error)
            stopped = True
        unread = {} if stopped else self._judge_sources()
        return LoaderProof(
            self._map,
            self._checkpoint.entries,
            self._findings.sorted(),
            unread,
            unwritten,
            self._routes.outcomes,
            self._counts,
            self._held,
            self._writer,
            stopped,
        )

    def _arranged(self) -> Iterator[str]:
        if self._inventory is not None and self._inventory.fused:
            # Torch comes with it, and other checkpoints need none of it.
            from degarble.harness.checkpoint.transform.convert.vllm_parameters import (  # noqa: PLC0415
                stated_backend,
            )

            backend = stated_backend(self._checkpoint)
            if backend is not None:
                yield _ARRANGED.format(backend.name)

    def _names(self) -> set[str]:
        """Return the names of all parameters: stages differ, ranks of a stage do not."""
        first = ranks_of(self._map)[:: max(self._map.tp, self._map.ep)]
        return {name for held in self._held(first) for name in held.targets}

    def _engine_layout(self) -> Layout | None:
        """Return the layout of the engine's parameters with its recipe; None for a list."""
        engine = self._map.parameters
        if not isinstance(engine, EngineLayout):
            return None
        if self._inventory is None:
            raise unknown_parameters(f"parameters of the map {self._map.name}")
        layout = engine.layout
        if isinstance(layout, str):
            layout = layout_for(self._inventory, layout)
        recipe = stored_recipe(self._inventory) if engine.recipe == AS_STORED else engine.recipe
        return layout.with_recipe(recipe)

    def _engine_targets(self) -> EngineTargets | None:
        engine = self._map.parameters
        if self._layout is None or self._inventory is None or not isinstance(engine, EngineLayout):
            return None
        config = self._inventory.config
        sharding_plan = plan(config, self._map.tp, self._map.ep, self._map.pp, engine.style)
        return EngineTargets(config, self._layout, sharding_plan)

    def _held(self, ranks: range) -> Iterator[RankTargets]:
        return listed_targets(self._map, ranks) if self._engine is None else self._engine(ranks)

    def _judge_formats(self) -> None:
        """Report each weight that the engine builds in another format than the stored one."""
        if self._layout is None or self._inventory is None:
            return
        recipe = self._layout.recipe_for(self._inventory.config)
        for linear in self._inventory.linears:
            built = recipe.format_of(linear.parameter).weight
            name = linear.parameter.name
            if built == linear.weight or self._layout.omits(
                linear.parameter, self._inventory.config
            ):
                continue
            if self._routes.converted.get(name) is None:
                self._other_format.add(name)
                self._findings.format(linear, built)

    def _judge(self, held: RankTargets, target: TargetParameter) -> tuple[Box, ...]:
        """Check all writes to one parameter; return its boxes that are never written."""
        alike = self._writer.fill_once(held, target)
        if alike:
            for equal_writes in alike:
                self._reads.add_range(
                    (target.name, equal_writes.slot), equal_writes.experts, equal_writes.taken
                )
            self._counts["transfers"] += len(target.members)
            return ()
        done: list[AttemptedWrite] = []
        refused: list[Box] = []
        for write in self._writer.writes(held, target):
            source = write.source
            if write.wrong is not None:
                self._report_wrong(source, target, write.wrong, held.rank)
                # A warning alone must not suppress the finding on an unwritten slot.
                if write.wrong.rule.level is Level.ERROR:
                    self._reported.wrong(source, held.truth(write.member))
            if not write.arrives:
                if write.member is not NO_SLOT:
                    refused.append(write.member.box)
                self._refused.add(source.name)
                continue
            done.append(write)
            self._reads.add(source, write.taken)
        self._counts["transfers"] += len(done)
        return self._judge_cover(held, target, done, tuple(refused))

    def _report_wrong(
        self, source: SourceTensor, target: TargetParameter, wrong: WrongWrite, rank: int
    ) -> None:
        if source.parameter is None or source.parameter.name not in self._other_format:
            self._findings.wrong(source, target.name, wrong, rank)

    def _judge_cover(
        self,
        held: RankTargets,
        target: TargetParameter,
        done: list[AttemptedWrite],
        refused: tuple[Box, ...],
    ) -> tuple[Box, ...]:
        """Report boxes that are written twice or never; return those never written."""
        boxes = tuple(write.member.box for write in done)
        covered = cover(target.shape, boxes)
        if covered.twice and not any(write.wrong for write in done):
            names = sorted({write.source.name for write in done})[:4]
            why = f"by {', '.join(map(shown, names))}"
            self._findings.boxes(rules.WRITTEN_TWICE, target.name, covered.twice, why, held.rank)
        # A refused write has its own finding, so its slot needs none for being unwritten.
        untold = cover(target.shape, boxes + refused).missing if covered.missing else ()
        if untold:
            empty = {
                key: held.truth(member)
                for key, member in target.members.items()
                if any(box.overlaps(member.box) for box in untold)
            }
            self._missing.append(UnwrittenBoxes(target, untold, empty, held.rank))
        return covered.missing

    def _report_missing(self) -> None:
        """Report unwritten boxes, unless the tensor that belongs there has a finding already."""
        lost = {key for key, (_, resolved) in self._routes.lost.items() if has_finding(resolved)}
        explained = lost | self._reported.sources
        for target, boxes, empty, rank in self._missing:
            truths = [truth for truth in empty.values() if truth is not None]
            if any(truth.parameter.name in self._other_format for truth in truths):
                continue
            filled = [value for pattern, value in self._fills if pattern.search(target.name)]
            if filled:
                scale = any(truth.part in SCALES for truth in truths) or "scale" in target.name
                self._findings.constant(target.name, filled[0], scale, rank)
                self._reported.places(truths)
                continue
            if truths and all(key_of(truth) in explained for truth in truths):
                self._reported.leaves(truths, target.name)
                continue
            slots, gone = {slot for _, slot in target.members}, {slot for _, slot in empty}
            rule = rules.SLOT_UNWRITTEN if len(slots) > 1 and gone != slots else rules.UNWRITTEN
            why = "; ".join(dict.fromkeys(map(self._routes.outcome_of, truths[:_MOST_FATES])))
            self._findings.boxes(rule, target.name, boxes, why, rank)

    def _judge_sources(self) -> dict[str, tuple[Box, ...]]:
        """Report tensors that go nowhere, and boxes of placed tensors that no rank reads."""
        for key, (source, resolved) in self._routes.lost.items():
            told = key[0] in self._other_format or key in self._reported.taken
            if has_finding(resolved) and not told:
                self._findings.lost(source, resolved, self._reported.left.get(key, ()))
        unread: dict[str, tuple[Box, ...]] = {}
        if self._map.rank is not None:
            return unread  # the other ranks read the rest
        for target, expert, placed in self._routes.all_placed():
            missing, source = self._reads.missing(target, expert, placed), placed.source
            if missing and source.name in self._checkpoint.entries:
                stored = tuple(map(source.stored, missing))
                unread[source.name] = unread.get(source.name, ()) + stored
            if missing and source.name not in self._refused:
                self._findings.unread(source, missing)
        return unread


class _Known:
    """The names of the engine's parameters, computed at the first lookup."""

    def __init__(self, names: Callable[[], set[str]]) -> None:
        self._make = names
        self._names: set[str] | None = None

    def __contains__(self, name: object) -> bool:
        if self._names is None:
            self._names = self._make()
        return name in self._names


# --------------------------------------------------------------------------------------------------
# The sharding plan: bytes of parameters that each rank holds. Bytes are those of the parameters as
# the engine builds them, before any rearrangement. Caches and activations are not counted. The
# counts come from the same targets that a proof checks.

# What a parameter belongs to, in the order of a table's columns.
KINDS = ("routed experts", "attention", "feed-forward", "other")
_REST = "other"
_BEGINNINGS = (("attn.", "attention"), ("ffn.", "feed-forward"))

SHARE_HEADER = ("ranks", "experts", "parameters", *(f"{kind}, GB" for kind in KINDS), "all, GB")


class RankShare(NamedTuple):
    """The parameters of one rank, counted in bytes.

    `experts`: ids of its routed experts, half-open; equal where it has none. `by_kind`: bytes of
    each of KINDS; for an engine's own list of parameters only experts and the rest are separated.
    """

    rank: int
    experts: tuple[int, int]
    parameters: int
    by_kind: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(self.by_kind.values())

    def to_json(self) -> dict[str, Any]:
        """Return plain data for a JSON report."""
        return {
            "rank": self.rank,
            "experts": list(self.experts),
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "bytes_by_kind": dict(self.by_kind),
        }


def rank_shares(proof: LoaderProof) -> tuple[RankShare, ...]:
    """Return the share of each rank of a proof."""
    return tuple(map(_share, proof.rank_parameters()))


def _share(held: RankTargets) -> RankShare:
    counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    experts = 0
    for target in held.targets.values():
        counts[_kind(held, target)] += prod(target.shape) * DTYPE_BITS[target.dtype] // 8
        if target.stacked:
            experts = max(experts, target.shape[0])
    first = held.first_expert if experts else 0
    return RankShare(held.rank, (first, first + experts), len(held.targets), dict(counts))


def _kind(held: RankTargets, target: TargetParameter) -> str:
    if target.stacked:
        # Only routed experts are stacked.
        return KINDS[0]
    member = next(iter(target.members.values()))
    if member.position is None:
        return _REST
    name = held.parameters[member.position].row.name
    return next((kind for start, kind in _BEGINNINGS if name.startswith(start)), _REST)


def share_rows(shares: Sequence[RankShare]) -> tuple[tuple[str, ...], ...]:
    """Return table rows under SHARE_HEADER; ranks that differ only in expert ids share one."""
    alike: dict[tuple[object, ...], list[RankShare]] = defaultdict(list)
    for share in shares:
        first, stop = share.experts
        key = (stop - first, share.parameters, tuple(share.by_kind.items()))
        alike[key].append(share)
    return tuple(_row(group) for group in alike.values())


def _row(group: Sequence[RankShare]) -> tuple[str, ...]:
    sizes = [group[0].by_kind[kind] for kind in KINDS]
    # Ranks of one row may hold different experts: show how many, not which.
    every = len({share.experts for share in group}) > 1
    first, stop = group[0].experts
    experts = f"{stop - first} each" if every else format_ranges(range(first, stop))
    return (
        format_ranges(share.rank for share in group),
        experts or "none",
        f"{group[0].parameters:,}",
        *(f"{size / 1e9:.3f}" for size in (*sizes, sum(sizes))),
    )
