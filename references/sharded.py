"""Run a reference over several ranks, tensor, expert and pipeline parallel, by a sharding plan.

Every rank binds the same components to the boxes that harness.model.sharding gives it. Exchanges
between ranks are wrapped around single components (a sum after wo_b, a gather after head), so the
wiring is that of one rank. Tokens are the same on all ranks; attention is repeated where ep is
larger than tp. Sums run in the order of ranks, so all ranks have the same bits; in float64 the
result equals that of one rank to 1e-12.

The world may not be smaller than the plan. No cut may split a scale block.
Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.harness.formats.layouts import LINEAR
from degarble.harness.formats.weight import Weight
from degarble.harness.model.family import family_of
from degarble.harness.model.parameters import parameters
from degarble.harness.model.sharding import sharding_styles
from degarble.references.binding import BoundModel
from degarble.references.model import ForwardPass, TokenBatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.model.parameters import Parameter
    from degarble.harness.model.recipes import Recipe
    from degarble.harness.model.sharding import ShardingPlan
    from degarble.harness.model.types import Box
    from degarble.references.model import Sequence
    from degarble.references.numerics import Numerics

    Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Team:
    """Ranks that exchange tensors, in order; a team of one exchanges nothing."""

    ranks: tuple[int, ...]
    group: Any

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in the order of ranks."""
        if len(self.ranks) == 1:
            return [x]
        mine = x.contiguous().flatten().view(torch.uint8)  # gloo knows few dtypes
        tensors = [torch.empty_like(mine) for _ in self.ranks]
        distributed.all_gather(tensors, mine, group=self.group)
        return [tensor.view(x.dtype).reshape(x.shape) for tensor in tensors]

    def sum(self, x: Tensor, numerics: Numerics, *, kept: bool = False) -> Tensor:
        """Sum over ranks: in float32 and rounded once, or rounded at every step by the switch."""
        parts = self.gather(x)
        stepwise = numerics.switches.reduction_in_storage_dtype and not kept
        total = parts[0] if stepwise else parts[0].to(numerics.work)
        for part in parts[1:]:
            total = total + part.to(total.dtype)
        return total.to(x.dtype)


@dataclass(frozen=True)
class Teams:
    """The teams of one rank: attention, experts and pipeline, and its stage."""

    stage: int
    attention: Team
    experts: Team
    pipeline: Team

    @classmethod
    def from_plan(cls, plan: ShardingPlan) -> Teams | None:
        """Make the teams of a plan; every rank of the world calls this, ranks outside get None."""
        world, rank = distributed.get_world_size(), distributed.get_rank()
        if plan.ranks > world:
            raise InvalidArgument(
                "ranks", world, f"{plan.ranks} at least, for tp {plan.tp}, ep {plan.ep}, "
                f"pp {plan.pp}", "Start more processes, or plan for fewer.",
            )  # fmt: skip
        size = plan.ranks_per_stage
        stages = [tuple(range(s * size, (s + 1) * size)) for s in range(plan.pp)]
        tensor = [s[i : i + plan.tp] for s in stages for i in range(0, size, plan.tp)]
        lines = [tuple(range(member, plan.ranks, size)) for member in range(size)]
        # Experts are spread over a stage, or cut like everything else where ep is 1.
        found = [_teams(each) for each in (tensor, stages if plan.ep > 1 else tensor, lines)]
        if rank >= plan.ranks:
            return None
        mine = (next(team for team in teams if rank in team.ranks) for teams in found)
        return cls(rank // size, *mine)


def _teams(members: list[tuple[int, ...]]) -> list[Team]:
    return [Team(member, distributed.new_group(list(member))) for member in members]


class RankWeights(Mapping[str, Weight]):
    """One rank's part of a mapping of whole weights, cut when it is read.

    Experts of other ranks have their input scale only, as vLLM keeps it on every rank.
    """

    def __init__(self, whole: Mapping[str, Weight], plan: ShardingPlan, rank: int) -> None:
        self._whole = whole
        self._plan = plan
        self._rank = rank
        self._known = {p.name: p for p in parameters(plan.config) if self._is_here(p)}
        self._cut: dict[str, Weight] = {}

    def _is_here(self, parameter: Parameter) -> bool:
        return self._rank // self._plan.ranks_per_stage in self._plan.stages(parameter)

    def __getitem__(self, key: str) -> Weight:
        if key not in self._cut:
            parameter, weight = self._known[key], self._whole[key]
            box = self._plan.box_on(parameter, self._rank)
            if box is not None:
                self._cut[key] = sliced(weight, box, key)
            elif parameter.expert is not None:
                self._cut[key] = Weight(input_scale=weight.input_scale)
            else:
                self._cut[key] = Weight(value=self._nothing(parameter))
        return self._cut[key]

    def _nothing(self, parameter: Parameter) -> Tensor:
        """Return an empty piece: padding left nothing of this parameter for this rank."""
        cut = sharding_styles(self._plan.config)[self._plan.style][parameter.row.name].dim
        return torch.zeros([0 if i == cut else n for i, n in enumerate(parameter.shape)])

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def sliced(weight: Weight, box: Box, name: str) -> Weight:
    """Return one box of a weight; codes are cut together with their scales."""
    if weight.storage is None:
        value = weight.values(weight.value.dtype) if weight.value is not None else torch.empty(0)
        return Weight(value[tuple(slice(*r) for r in box.ranges)], input_scale=weight.input_scale)
    whole = weight.quantised().with_layout(LINEAR)
    if box.shape == whole.shape:
        return weight
    scales = []
    for (start, stop), extent, block in zip(
        box.ranges, whole.shape, whole.format.block, strict=True
    ):
        if start % block or (stop % block and stop != extent):
            raise ShapeMismatch(
                f"cut of {name}", (start, stop), f"a multiple of its scale blocks of {block}",
                "Choose another number of ranks, or another format.",
            )  # fmt: skip
        scales.append(slice(start // block, -(-stop // block)))
    # The check above makes r0 and c0 multiples of the scale block, hence also of a packed pair.
    (r0, r1), (c0, c1) = box.ranges
    packed = 2 if whole.format.packed else 1
    cut = replace(
        whole,
        codes=whole.codes[r0:r1, c0 // packed : c1 // packed].contiguous(),
        block_scale=whole.block_scale[tuple(scales)].contiguous(),
        shape=box.shape,
    )
    return Weight.of(cut, weight.input_scale)


class ShardedModel:
    """One rank's part of a model; `forward` is called by all ranks of the plan together."""

    def __init__(
        self,
        plan: ShardingPlan,
        teams: Teams,
        numerics: Numerics,
        weights: Mapping[str, Weight],
        recipe: Recipe | None = None,
    ) -> None:
        rank, config = distributed.get_rank(), plan.config
        self.plan = plan
        self.teams = teams
        self.bound = BoundModel(config, numerics, RankWeights(weights, plan, rank), recipe)
        _cross(self.bound, plan, teams, rank)
        self.model: ForwardPass = family_of(config).forward(self.bound, absorbed=True)
        start, stop = plan.stage_layers[teams.stage]
        self.layers = config.layers[start:stop]

    def forward(self, sequences: list[Sequence], tokens: list[Tensor]) -> Tensor:
        """Return logits [T, V] of the new tokens, on every rank, and advance the sequences."""
        step = TokenBatch.from_sequences([each.length for each in sequences], tokens)
        stage, line, last = self.teams.stage, self.teams.pipeline, self.plan.pp - 1
        state = self.model.buffers(len(step.tokens)) if stage else self.model.entering(step)
        if stage:
            for tensor in state.values():
                _receive(tensor, line.ranks[stage - 1])
        for block in self.layers:
            state = self.model.through(block, state, step, sequences)
        if stage < last:
            for tensor in state.values():
                _send(tensor, line.ranks[stage + 1])
        logits = self.model.leaving(state) if stage == last else None
        for sequence, new in zip(sequences, tokens, strict=True):
            sequence.length += len(new)
        return self._shared(logits, len(step.tokens))

    def _shared(self, logits: Tensor | None, tokens: int) -> Tensor:
        """Send the last stage's logits to every stage."""
        line = self.teams.pipeline
        if logits is None:
            work = self.model.bound.numerics.work
            logits = torch.empty(tokens, self.plan.config.vocab_size, dtype=work)
        if len(line.ranks) > 1:
            distributed.broadcast(logits, line.ranks[-1], group=line.group)
        return logits


def _send(x: Tensor, rank: int) -> None:
    distributed.send(x.contiguous().flatten().view(torch.uint8), rank)


def _receive(x: Tensor, rank: int) -> None:
    distributed.recv(x.flatten().view(torch.uint8), rank)


def _cross(bound: BoundModel, plan: ShardingPlan, teams: Teams, rank: int) -> None:
    """Wrap the components before or after which ranks exchange tensors."""
    cut = sharding_styles(plan.config)[plan.style] if plan.tp > 1 else {}
    low = _first_row(plan, rank)
    summed = {
        "attn.wo_b": "attn.wo_b" in cut,
        "attn.wo": "attn.wo" in cut,
        # Heads of the indexer are cut: each rank has the partial sum over its own heads.
        "attn.indexer.scores": "attn.indexer.wq_b" in cut,
        "ffn.w2": "ffn.w2" in cut,
        "ffn.shared.w2": "ffn.shared_experts.w2" in cut,
    }
    experts = plan.experts_of(rank)
    for name, call in list(bound.calls.items()):
        role = name.split(".", 2)[2] if name.startswith(("layers.", "mtp.")) else name
        if role == "embed":
            bound.calls[name] = partial(_embedded, call, teams.attention, low, bound)
        elif role == "head":
            bound.calls[name] = partial(_gathered, call, teams.attention)
        elif summed.get(role):
            bound.calls[name] = partial(_summed, call, teams.attention, bound.numerics, False)
        # Each rank sums its own experts or its cut of each; the total stays in the working dtype.
        elif role == "ffn.experts.combine":
            bound.calls[name] = partial(_summed, call, teams.experts, bound.numerics, True)
        elif role.startswith("ffn.experts.") and plan.ep > 1:
            bound.calls[name] = partial(_local, call, experts)


def _first_row(plan: ShardingPlan, rank: int) -> int:
    """Return the first row of the embedding that a rank holds; 0 where it holds none."""
    table = next(p for p in parameters(plan.config) if p.name == "embed")
    box = plan.box_on(table, rank)
    return box.ranges[0][0] if box else 0


def _summed(
    call: ComponentCall,
    team: Team,
    numerics: Numerics,
    kept: bool,
    inputs: Tensors,
    weights: Mapping[str, object],
) -> Tensors:
    """Sum a component's output over a team; `kept` where it is held in the working dtype."""
    outputs = dict(call(inputs, weights))
    outputs["out"] = team.sum(outputs["out"], numerics, kept=kept)
    return outputs


def _gathered(
    call: ComponentCall, team: Team, inputs: Tensors, weights: Mapping[str, object]
) -> Tensors:
    """Concatenate the logits of all parts of the vocabulary."""
    return {"out": torch.cat(team.gather(call(inputs, weights)["out"]), dim=-1)}


def _embedded(
    call: ComponentCall,
    team: Team,
    low: int,
    bound: BoundModel,
    inputs: Tensors,
    weights: Mapping[str, Weight],
) -> Tensors:
    """Look tokens up in the rows of this rank; all others are zero."""
    if len(team.ranks) == 1:
        return call(inputs, weights)
    rows = next(iter(weights.values())).shape[0]
    own = inputs["tokens"] - low
    here = (own >= 0) & (own < rows)
    # Clamped ids of other ranks' rows read some row here; the mask then makes it zero.
    out = call({**inputs, "tokens": own.clamp(0, rows - 1)}, weights)["out"]
    return {"out": team.sum(out * here[:, None], bound.numerics)}


def _local(
    call: ComponentCall, experts: range, inputs: Tensors, weights: Mapping[str, object]
) -> Tensors:
    """Keep the slots of a rank's own experts; set all others to -1."""
    if "experts" not in inputs:
        return call(inputs, weights)
    chosen = inputs["experts"]
    mine = (chosen >= experts.start) & (chosen < experts.stop)
    return call({**inputs, "experts": torch.where(mine, chosen, -1)}, weights)
