"""Derive budgets for damaged operands whose sums overflow float32.

A scale of 10^35 leaves partial sums that the float64 twin still adds up. A float32 sum becomes
infinite, with the sign on which its own order overflowed first, or NaN if it overflowed on both; a
scale applied after the sum leaves finite numbers. So where the sum of magnitudes overflows, a value
that is not finite depends on the order and is no evidence, and a finite value gets a budget derived
from smaller operands, in proportion. Operands that are not finite themselves get none: their
results have to be identical.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.budget.roles import SUMS, budgets_of
from degarble.harness.engine.faults.model_faults import ChangedWeights
from degarble.harness.engine.faults.weight_faults import numbers_of
from degarble.harness.formats.weight import Weight
from degarble.references.linears import X_LOOSE, activation_values

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.engine.budget.budget import Budget
    from degarble.harness.engine.budget.rules import JudgeableCall
    from degarble.harness.engine.faults.model_faults import ComponentContext

_LARGEST = torch.finfo(torch.float32).max
_SMALLER = 2.0**-100  # factor on weights: keeps sums far from both ends of float32
PARTS = frozenset({"codes", "block_scale", "tensor_scale", X_LOOSE})


def beyond_float32(
    context: ComponentContext, call: JudgeableCall, candidate: Mapping[str, Tensor]
) -> dict[str, Budget]:
    """Return budgets of outputs whose sums may exceed float32; empty where none may."""
    extents = {name: tensor.shape for name, tensor in candidate.items()}
    if call.role not in SUMS or extents != {n: output.shape for n, output in call.outputs.items()}:
        return {}
    x = activation_values(call.inputs, call.activation, torch.float64)
    rest = {name: tensor for name, tensor in call.inputs.items() if name not in PARTS}
    largest = float(x.abs().amax()) if x.numel() else 0.0
    if not 0 < largest < math.inf:
        return {}
    # Sums of magnitudes bound every partial sum in every order.
    sums = context.call({**rest, "x": x.abs()}, ChangedWeights(call.weights, _magnitudes))
    beyond = {name: ~total.isfinite() for name, total in sums.items()}
    if not any(bool(tensor.any()) for tensor in beyond.values()):
        return {}
    # Powers of two, so that scaling down and up again is exact.
    unit = 2.0 ** math.ceil(math.log2(largest))
    smaller = replace(
        call,
        inputs={**rest, "x": (x / unit).float()},
        weights=ChangedWeights(call.weights, _scaled_down),
    )
    known, found = budgets_of(call), {}
    for name, budget in budgets_of(smaller).items():
        slack = budget.slack.double() * (unit / _SMALLER)
        slack = torch.where(known[name].slack.isfinite(), known[name].slack.double(), slack)
        slack = torch.where(call.outputs[name].isfinite(), slack, 0.0).nan_to_num(0.0)
        # What overflowed in the candidate's own order of summation is not judged.
        free = beyond[name] & ~candidate[name].isfinite()
        found[name] = replace(budget, slack=slack, free=free)
    return found


def _magnitudes(_name: str, weight: Weight) -> Weight:
    """Return magnitudes; infinite beyond the largest float32, 0 for NaN and infinity."""
    size = numbers_of(weight).double().abs()
    size = torch.where(size.isfinite(), size.masked_fill(size > _LARGEST, math.inf), 0.0)
    return Weight(value=size, input_scale=weight.input_scale)


def _scaled_down(_name: str, weight: Weight) -> Weight:
    value = (numbers_of(weight).double() * _SMALLER).float()
    return Weight(value=value, input_scale=weight.input_scale)
