"""Routed experts against Marlin's: NVFP4 activations (W4A4) against BF16 ones (W4A16).

Ours are those of a decoding step: up to four tokens each row multiplies its own experts' matrices,
as in graphs of so few lanes; more go in tiles.
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.graph.matrices import VERY_FEW_ROWS
from degarble.harness.cli.values import settings_here
from degarble.harness.formats.layouts import SWIZZLE_128X4, from_layout
from degarble.kernels.moe.by_row_problem import ByRowProblem
from degarble.suites.bench import gpu
from degarble.suites.bench.indexer import peak_arm
from degarble.suites.bench.kernel_peers import operands, vendors
from degarble.suites.bench.kernel_peers.contest import (
    OURS,
    PEAK,
    Call,
    Contender,
    Row,
    of_best,
    of_copy,
    of_peak,
)
from degarble.suites.bench.moe import MODELS, problem_of, weight_bytes
from degarble.suites.bench.runner import Arm, copy_arm
from degarble.suites.kernels.moe import by_row_checks
from degarble.suites.kernels.moe import moe_checks as checks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from degarble.kernels.moe.problem import MoeProblem

TOKENS = (1, 4, 16, 64, 256, 2048, 8192)
MODELS_HERE = tuple(MODELS)
FEW = 256  # tokens up to which a copy of the visited weights is the measure
SAMPLED = 4  # tokens that float64 computes
LARGEST_NVFP4 = 6 * 448  # of codes times block scales
MARLIN = "Marlin W4A16"


class Layer:
    """The experts of a model, their weights in our layout and in Marlin's; tokens by set."""

    def __init__(self, model: str) -> None:
        self.model = model

    @cached_property
    def weights(self) -> checks.MoeWeights:
        case = self.case(1)
        weights = checks.given_of(case, gpu.DEVICE).weights
        both = weights.w13.decode_scale  # Marlin has one scale for gate and up
        both[:, 1] = both[:, 0]
        # A suite's scales saturate on purpose. Here the largest gated value that there can be fits.
        assert case.problem.limit is not None, "DeepSeek-V4 clamps gate and up"
        weights.w2.input_scale.fill_(case.problem.limit**2 / LARGEST_NVFP4)
        return weights

    def case(self, tokens: int, seed: int = 0) -> checks.Case:
        return checks.Case(problem_of(self.model, tokens), "even", seed)

    def given(self, tokens: int, seed: int) -> checks.MoeInputs:
        """Draw tokens and their routing; all sets share the weights."""
        case = self.case(tokens, seed)
        p, generator = case.problem, torch.Generator(gpu.DEVICE).manual_seed(seed)
        x = torch.randn(tokens, p.hidden, generator=generator, device=gpu.DEVICE).bfloat16()
        weights = torch.rand(tokens, p.chosen, generator=generator, device=gpu.DEVICE)
        routing = checks.Routing(checks.chosen_experts(case, generator), weights)
        return checks.MoeInputs(x, routing, self.weights)

    def linear_scales(self, of: checks.ExpertWeights) -> Tensor:
        """Return scale bytes row by row."""
        *leading, rows, half = of.codes.shape
        flat = of.scales.reshape(-1, of.scales.shape[-1])
        made = torch.stack([from_layout(each, SWIZZLE_128X4, rows, half // 8) for each in flat])
        return made.view(*leading, rows, half // 8)

    @cached_property
    def marlin(self) -> vendors.MarlinMoe:
        """Pack the weights once."""
        w13, w2 = self.weights
        p, half = self.case(1).problem, w13.codes.shape[-1]
        first = vendors.marlin_experts(
            w13.codes.view(p.experts, 2 * p.width, half),
            self.linear_scales(w13).view(p.experts, 2 * p.width, half // 8),
            w13.decode_scale[:, 0],
        )
        second = vendors.marlin_experts(w2.codes, self.linear_scales(w2), w2.decode_scale)
        return vendors.MarlinMoe(first, second, (p.hidden, p.width, p.chosen))


def expert_of(of: checks.ExpertWeights, at: tuple[int, ...]) -> Tensor:
    """Return a matrix in float64."""
    rows, half = of.codes[at].shape
    scales = from_layout(of.scales[at], SWIZZLE_128X4, rows, half // 8)
    return operands.nvfp4(of.codes[at], scales) * of.decode_scale[at].double()


def reference(layer: Layer, given: checks.MoeInputs, limit: float | None) -> Tensor:
    """Compute sampled tokens in float64, with activations as they are."""
    made = []
    for token in operands.sample(len(given.x), SAMPLED):
        x, total = given.x[token].double(), torch.zeros(())
        for expert, share in zip(
            given.routing.experts[token].tolist(), given.routing.weights[token], strict=True
        ):
            gate, up = (expert_of(layer.weights.w13, (expert, part)) @ x for part in range(2))
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            middle = torch.nn.functional.silu(gate) * up
            total = total + share.double() * (expert_of(layer.weights.w2, (expert,)) @ middle)
        made.append(total)
    return torch.stack(made)


def visited(problem: MoeProblem) -> float:
    """Return how many experts the tokens of a call choose on average."""
    missed = (1 - problem.chosen / problem.routed) ** problem.tokens
    return problem.experts * (1 - missed)


def row(layer: Layer, tokens: int) -> Row:
    problem = problem_of(layer.model, tokens)
    shared = cache(lambda number: layer.given(tokens, number + 1))
    some = operands.sample(tokens, SAMPLED)

    def by_row(number: int) -> Call:
        case, given = by_row_checks.Case(ByRowProblem(problem)), shared(number).operands
        memory = by_row_checks.memory_of(case, given)
        return Call(
            lambda: by_row_checks.launch_whole(case, given, memory, settings_here()),
            lambda: memory["out"][some],
        )

    def by_tiles(number: int) -> Call:
        given = shared(number)
        out = torch.empty(given.x.shape, dtype=torch.float32, device=gpu.DEVICE)
        return Call(
            lambda: gpu.module("sm90_moe_nvfp4").KERNEL.run(
                problem, settings_here(), None, **given.operands, out=out
            ),
            lambda: out[some],
        )

    def their_call(number: int) -> Call:
        given, out = shared(number), torch.empty_like(shared(number).x)
        ids, weights = given.routing.experts, given.routing.weights
        moe = layer.marlin
        return Call(lambda: moe(given.x, ids, weights, problem.limit, out), lambda: out[some])

    our_call = by_row if tokens <= VERY_FEW_ROWS else by_tiles
    moved = int(weight_bytes(problem, visited(problem)))
    goals: list[Any] = [of_best(1.2)]
    ceilings: list[Arm] = [copy_arm(min(moved, 1 << 30))]
    if tokens <= FEW:
        goals.append(of_copy(0.80))
    elif tokens == TOKENS[-1]:
        goals.append(of_peak(0.60))
        peak = peak_arm()
        ceilings.append(Arm(PEAK, peak.make, peak.moved, peak.operations, sets=2))
    return Row(
        f"{layer.model}, {tokens} tokens", [Contender(OURS, our_call),
                                            Contender(MARLIN, their_call)],
        moved, problem.operations, lambda: reference(layer, shared(0), problem.limit), goals,
        sets=8 if tokens <= VERY_FEW_ROWS else 4, ceilings=ceilings,
    )  # fmt: skip


def experts() -> Iterator[Row]:
    """A model's weights stay while its rows are measured."""
    for model in MODELS_HERE:
        layer = Layer(model)
        for tokens in TOKENS:
            yield row(layer, tokens)
        del layer
