"""Sharding plans: which rank holds which box of which parameter, under TP, EP and PP.

A family has a table of cuts for each engine, one line a parameter; a plan applies it to a config.
A plan is data about logical parameters; the stored parts of a shard follow from its box
(`part_boxes`), and the tensors of one rank from the layout (`rank_tensors`).

Ranks are numbered stage by stage. A stage has max(tp, ep) ranks: attention is cut into tp and
repeated where ep is larger (data-parallel attention); experts are spread over ep, or, where ep is
1, cut into tp like everything else. Layers beyond an even split go to the stages before the last
one, which also holds the head and the drafter; a drafter has its own copy of the embedding.

TP must divide the output groups (V4) or heads (V3.2), EP must divide the experts and be a multiple
of TP, PP may not exceed the layers, and no cut may split a scale block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.model.parameters import parameters, routed_experts
from degarble.harness.model.registry import registered_for
from degarble.harness.model.tensors import PartKind, parts_of, tensors_of
from degarble.harness.model.types import Box, StoredTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.model.config.config import Config
    from degarble.harness.model.layouts import Layout
    from degarble.harness.model.parameters import Parameter
    from degarble.harness.model.recipes import Formats


class ShardCut(NamedTuple):
    """How a parameter is cut: along which dimension, and in what multiples.

    `padded`: ranks get whole multiples and the last ones less, or nothing.
    """

    dim: int
    multiple: int = 1
    padded: bool = False


ROWS, COLUMNS = ShardCut(0), ShardCut(1)


class ParameterShard(NamedTuple):
    """One box of a parameter, and the ranks that hold it."""

    box: Box
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class ShardingPlan:
    """A checked assignment of parameters to ranks; make it with `plan`."""

    config: Config
    style: str
    tp: int
    ep: int
    pp: int
    stage_layers: tuple[tuple[int, int], ...]  # half-open ranges, one a stage

    @property
    def ranks_per_stage(self) -> int:
        """Return the number of ranks that share a stage."""
        return max(self.tp, self.ep)

    @property
    def ranks(self) -> int:
        """Return the number of all ranks."""
        return self.pp * self.ranks_per_stage

    @cached_property
    def _cuts(self) -> Mapping[str, ShardCut]:
        return sharding_styles(self.config)[self.style]

    @cached_property
    def _drafter_embeds(self) -> bool:
        """Return whether a drafter reads the main model's embedding, as it stores none."""
        drafts = [p for p in parameters(self.config) if p.block and p.block.is_drafter]
        return bool(drafts) and not any(p.row.name == "embed" for p in drafts)

    def stages(self, parameter: Parameter) -> tuple[int, ...]:
        """Return the stages that need a parameter; two for the embedding of a drafting model."""
        block, last = parameter.block, self.pp - 1
        if block is None:
            if parameter.row.name != "embed":
                return (last,)
            return (0, last) if last and self._drafter_embeds else (0,)
        if block.is_drafter:
            return (last,)
        inside = (
            i for i, (start, stop) in enumerate(self.stage_layers) if start <= block.index < stop
        )
        return (next(inside),)

    def experts_of(self, rank: int) -> range:
        """Return the ids of the routed experts on a rank; all of them where ep is 1."""
        each = routed_experts(self.config) // self.ep
        first = (rank % self.ranks_per_stage) % self.ep * each
        return range(first, first + each)

    def shards(self, parameter: Parameter) -> tuple[ParameterShard, ...]:
        """Return the boxes that a parameter is cut into; empty boxes are left out."""
        whole = Box.whole(parameter.shape)
        if parameter.expert is not None and self.ep > 1:
            holder = parameter.expert // (routed_experts(self.config) // self.ep)
            return (ParameterShard(whole, self._ranks(parameter, [holder])),)
        cut = self._cuts.get(parameter.row.name)
        if cut is None or self.tp == 1:
            return (ParameterShard(whole, self._ranks(parameter, range(self.ranks_per_stage))),)
        shards = []
        for rank, (start, stop) in enumerate(_pieces(parameter, cut, self.tp)):
            if start == stop:
                continue
            ranges = list(whole.ranges)
            ranges[cut.dim] = (start, stop)
            members = range(rank, self.ranks_per_stage, self.tp)
            shards.append(ParameterShard(Box(tuple(ranges)), self._ranks(parameter, members)))
        return tuple(shards)

    def _ranks(self, parameter: Parameter, members: range | list[int]) -> tuple[int, ...]:
        size = self.ranks_per_stage
        return tuple(stage * size + rank for stage in self.stages(parameter) for rank in members)

    def box_on(self, parameter: Parameter, rank: int) -> Box | None:
        """Return what a rank holds of a parameter, or None."""
        held = (shard.box for shard in self.shards(parameter) if rank in shard.ranks)
        return next(held, None)


def sharding_styles(config: Config) -> Mapping[str, Mapping[str, ShardCut]]:
    """Return how the engines cut the parameters of a config, by style."""
    family = registered_for(config)
    known: Mapping[str, Mapping[str, ShardCut]] = family.sharding
    if not known:
        raise family.lacks("a sharding plan", "Run the model on one rank.")
    return known


def plan(
    config: Config, tp: int = 1, ep: int = 1, pp: int = 1, style: str = "vllm"
) -> ShardingPlan:
    """Make the plan of a config for tp x ep x pp, in the style of an engine."""
    known = sharding_styles(config)
    if style not in known:
        raise UnknownName.among("sharding style", style, known)
    layers, experts = len(config.layers), routed_experts(config)
    groups, what = registered_for(config).head_groups(config)
    _require(tp, groups % max(tp, 1) == 0, "tp", f"a divisor of {groups} {what}")
    _require(ep, experts % max(ep, 1) == 0, "ep", f"a divisor of {experts} experts")
    _require(ep, ep == 1 or ep % max(tp, 1) == 0, "ep", f"1, or a multiple of tp = {tp}")
    _require(
        ep, ep == tp or style != "official", "ep", f"tp = {tp}: the official code has one size"
    )
    _require(pp, pp <= layers, "pp", f"at most {layers} layers")
    sharding_plan = ShardingPlan(config, style, tp, ep, pp, _stages(layers, pp))
    for parameter in parameters(config):
        # All experts of a layer are cut alike, so the first one stands for them.
        if parameter.expert in {None, 0}:
            sharding_plan.shards(parameter)  # raise on an impossible cut now, not in use
    return sharding_plan


def _require(value: int, fits: bool, name: str, expectation: str) -> None:
    if type(value) is not int or value < 1 or not fits:
        raise InvalidArgument(
            name, value, expectation, "Choose another number of ranks for this model."
        )


def _stages(layers: int, pp: int) -> tuple[tuple[int, int], ...]:
    """Split layers evenly; the remainder goes to the stages before the last, latest first."""
    counts = [layers // pp] * pp
    for i in range(layers % pp):
        counts[pp - 2 - i] += 1
    starts = [sum(counts[:i]) for i in range(pp)]
    return tuple((start, start + count) for start, count in zip(starts, counts, strict=True))


def _pieces(parameter: Parameter, cut: ShardCut, tp: int) -> list[tuple[int, int]]:
    """Cut one extent into tp pieces."""
    extent = parameter.shape[cut.dim]
    if not cut.padded and extent % tp:
        raise ShapeMismatch(
            f"dimension {cut.dim} of {parameter.name}",
            extent,
            f"a multiple of tp = {tp}",
            "Choose another number of ranks for this model.",
        )
    blocks = -(-extent // cut.multiple)
    # Whole multiples a rank, rounded up: the last ranks may get less, or nothing.
    step = -(-blocks // tp) * cut.multiple
    return [(min(i * step, extent), min((i + 1) * step, extent)) for i in range(tp)]


def part_boxes(
    sharding_plan: ShardingPlan, parameter: Parameter, formats: Formats
) -> tuple[tuple[PartKind, tuple[ParameterShard, ...]], ...]:
    """Return the shards of every stored part; scalars go wherever the parameter goes."""
    shards = sharding_plan.shards(parameter)
    found = []
    for stored in parts_of(parameter, formats):
        if stored.shape:
            cut = [ParameterShard(stored.box_of(s.box, parameter.name), s.ranks) for s in shards]
        else:
            everyone = sorted({rank for shard in shards for rank in shard.ranks})
            cut = [ParameterShard(Box(()), tuple(everyone))]
        found.append((stored.part, tuple(cut)))
    return tuple(found)


def rank_tensors(
    sharding_plan: ShardingPlan, layout: Layout, rank: int
) -> tuple[StoredTensor, ...]:
    """List what one rank holds, in the names and shapes of a layout.

    Under EP experts are numbered anew from 0. vLLM keeps input_scale of all experts on every rank;
    here a rank lists its own.
    """
    if not 0 <= rank < sharding_plan.ranks:
        raise InvalidArgument(
            "rank", rank, f"0 to {sharding_plan.ranks - 1}", "Choose a rank of the plan."
        )
    first = sharding_plan.experts_of(rank).start
    recipe = layout.recipe_for(sharding_plan.config)
    held = []
    for parameter in parameters(sharding_plan.config):
        box = sharding_plan.box_on(parameter, rank)
        if box is None:
            continue
        for stored in parts_of(parameter, recipe.format_of(parameter)):
            stored.box_of(box, parameter.name)  # refuses a cut through a scale block
        expert = None if parameter.expert is None else parameter.expert - first
        held.append(replace(parameter, shape=box.shape, expert=expert))
    return tensors_of(sharding_plan.config, layout, held)
