"""Two NVFP4 stacks of linears and experts, and the BF16 layer that both are compared with.

`Reference` multiplies BF16 values in float64 and rounds every output to BF16. `Twin` does the same
with weights and activations in canonical NVFP4. `Stack` is our kernels, with the same codes of
weights and the same scales. Scales of activations are calibrated on the inputs themselves.
Shape letters: T tokens, K chosen, D hidden, F width, N outputs, E experts
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.layouts import SWIZZLE_128X4
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.kernels.gemm.problem import GemmProblem
from degarble.kernels.moe.problem import MoeProblem
from degarble.kernels.primitives.quantise_problem import QuantiseProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.references import elementary

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.formats.quantise import QuantisedTensor

_LARGEST = 6.0 * 448.0  # of a code times a block scale


class Expert(NamedTuple):
    """An expert's matrices in BF16."""

    w1: Tensor  # [F, D]
    w3: Tensor
    w2: Tensor  # [D, F]


@dataclass(frozen=True, eq=False)
class Layer:
    """One input of one component: a linear has one matrix, experts have routing."""

    name: str
    kind: str  # linear, shared expert, experts
    x: Tensor  # [T, D]
    matrix: Tensor | None = None
    experts: tuple[Expert, ...] = ()
    chosen: Tensor | None = None  # [T, K]
    weights: Tensor | None = None  # [T, K]
    limit: float | None = None


def bf16(x: Tensor) -> Tensor:
    """Round once to BF16, and go on in float64."""
    return x.to(torch.bfloat16).double()


def decode_scale(x: Tensor) -> Tensor:
    """The tensor scale by which the largest number is the largest code."""
    return (x.float().abs().amax() / _LARGEST).clamp(min=2.0**-60)


def coded(x: Tensor, scale: Tensor) -> QuantisedTensor:
    """Canonical NVFP4 codes."""
    return quantise(x.float(), NVFP4, CANONICAL, decode_scale=scale)


class Reference:
    """BF16 weights and activations, exact sums."""

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x W^T, rounded once."""
        return bf16(x.double() @ weight.double().T)

    def hidden(self, x: Tensor, expert: Expert, limit: float | None) -> Tensor:
        """What w2 multiplies."""
        gate, up = (self.product(x, each) for each in (expert.w1, expert.w3))
        return bf16(elementary.swiglu(gate, up, limit))

    def expert(self, x: Tensor, expert: Expert, limit: float | None) -> Tensor:
        """One expert."""
        return self.product(self.hidden(x, expert, limit), expert.w2)

    def through(self, layer: Layer) -> Tensor:
        """The component's output, float64 [T, .]."""
        if layer.matrix is not None:
            return self.product(layer.x, layer.matrix)
        if layer.chosen is None or layer.weights is None:
            return self.expert(layer.x, layer.experts[0], layer.limit)
        out = torch.zeros_like(layer.x, dtype=torch.float64)
        for number, expert in enumerate(layer.experts):
            token, slot = (layer.chosen == number).nonzero(as_tuple=True)
            if len(token):
                made = self.expert(layer.x[token], expert, layer.limit)
                out.index_add_(0, token, made * layer.weights[token, slot, None].double())
        return out


class Twin(Reference):
    """NVFP4 on both sides, exact sums."""

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x W^T of what NVFP4 makes of both, rounded once."""
        values = (
            dequantise(coded(each, decode_scale(each)), torch.float64) for each in (x, weight)
        )
        a, b = values
        return bf16(a @ b.T)


def expert_rows(layer: Layer, number: int) -> Tensor:
    """The tokens that visit an expert; all of them visit a shared one."""
    if layer.chosen is None:
        return layer.x
    return layer.x[(layer.chosen == number).any(1)]


def calibrated(layer: Layer, number: int) -> tuple[Tensor, Tensor]:
    """The scales in front of w13 and of w2 of one expert, as the twin has them."""
    twin, rows = Twin(), expert_rows(layer, number)
    if not len(rows):
        return (torch.ones((), device=rows.device),) * 2
    hidden = twin.hidden(rows, layer.experts[number], layer.limit)
    return decode_scale(rows), decode_scale(hidden)


class Stack:
    """Our kernels."""

    settings = CompileSettings()

    def through(self, layer: Layer) -> Tensor:
        """The component's output, float64 [T, .]."""
        if layer.matrix is not None:
            return self.linear(layer.x, layer.matrix).double()
        kernels: Any = import_module("degarble.kernels.moe.sm90_moe_nvfp4")
        scales = [calibrated(layer, number) for number in range(len(layer.experts))]
        of_first, of_second = (torch.stack(each) for each in zip(*scales, strict=True))
        w13 = [[_in_128x4(each.w1), _in_128x4(each.w3)] for each in layer.experts]
        w2 = [[_in_128x4(each.w2)] for each in layer.experts]
        weights = kernels.MoeWeights(
            kernels.expert_weights(w13, of_first), kernels.expert_weights(w2, of_second)
        )
        problem = problem_of(layer)
        if layer.chosen is None or layer.weights is None:
            shared = import_module("degarble.kernels.moe.sm90_shared_expert").shared_expert_nvfp4
            out: Tensor = shared(layer.x, weights, problem, self.settings)
            return out.double()
        routing = kernels.Routing(layer.chosen.int(), layer.weights.float())
        made: Tensor = kernels.moe_nvfp4(layer.x, routing, weights, problem, self.settings)
        return made.double()

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Quantise and multiply."""
        gemm: Any = import_module("degarble.kernels.gemm.sm90_gemm_nvfp4")
        quantiser = import_module("degarble.kernels.quantise.simt_quantise_nvfp4").quantise_nvfp4
        scale = decode_scale(x).reshape(1)
        codes, scales, *_ = quantiser(x, scale, QuantiseProblem(*x.shape), self.settings)
        b = _in_128x4(weight)
        sides = (
            gemm.Nvfp4Operand(codes, scales, scale),
            gemm.Nvfp4Operand(b.codes, b.block_scale, b.decode_scale.reshape(1).float()),
        )
        columns, inner = weight.shape
        problem = GemmProblem(x.shape[0], columns, inner, "nvfp4", "e4m3")
        out: Tensor = gemm.gemm_nvfp4(*sides, problem, self.settings)
        return out


def problem_of(layer: Layer) -> MoeProblem:
    """What experts are asked for; a shared expert is one that every token visits."""
    (width, hidden), count = layer.experts[0].w1.shape, len(layer.experts)
    chosen = 1 if layer.chosen is None else layer.chosen.shape[1]
    return MoeProblem(len(layer.x), hidden, width, count, chosen, count, layer.limit)


def _in_128x4(weight: Tensor) -> QuantisedTensor:
    """A weight's codes as kernels read them."""
    made = coded(weight, decode_scale(weight)).with_layout(SWIZZLE_128X4)
    there = weight.device
    return replace(made, codes=made.codes.to(there), block_scale=made.block_scale.to(there))
