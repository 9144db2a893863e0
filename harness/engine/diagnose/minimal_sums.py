"""Shorten the summed dimension K of a reproducer to the blocks on which a named fault shows.

K is halved as long as one half is still beyond the budget. A captured output is a sum over all of
K, and its parts cannot be recovered. A named fault, proved on every row, can generate them: it is
applied to the whole operands, these are cut, and the result stands for the captured output. Without
a named fault K stays whole.

Cuts fall between scale blocks: multiples of the blocks of weight and activation, 16 at least. A
component that is no product, or weights in another layout, stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.engine.budget.rules import JudgeableCall
from degarble.harness.engine.faults.model_faults import ChangedWeights
from degarble.harness.formats.layouts import LINEAR
from degarble.harness.formats.number_formats import BLOCK_FORMATS
from degarble.harness.formats.weight import Weight
from degarble.harness.report.verdict import Verdict
from degarble.references.binding import Bound

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import FaultVariant

    Case = Any  # that of minimal_reproducer.py, which imports this module
    Tensors = Mapping[str, Tensor]

_LEAST = 16  # of K


@dataclass(frozen=True)
class _Sum:
    """The summed dimension of a product: its length, and the smallest piece of it."""

    length: int
    unit: int
    activation: str | None

    @classmethod
    def of(cls, case: Case) -> _Sum | None:
        """Return the summed dimension of a case; None if it is no product of a single length."""
        weights = [each for each in case.weights.values() if _held(each)]
        lengths = {each.shape[1] for each in weights if len(each.shape) == 2}
        if len(lengths) != 1 or any(len(each.shape) != 2 for each in weights):
            return None
        (length,) = lengths
        activation = JudgeableCall.of(case.twin, case.component, case.inputs, {}).activation
        operand = case.inputs.get("codes" if activation else "x")
        form = BLOCK_FORMATS[activation] if activation else None
        # Two 4-bit codes share a byte.
        per = 2 if form is not None and form.packed else 1
        if operand is None or operand.shape[-1] * per != length:
            return None
        blocks = [each.storage.format.block[1] for each in weights if each.storage is not None]
        # No scale block may be cut.
        unit = lcm(_LEAST, *blocks, form.block[1] if form is not None else 1)
        return None if length % unit else cls(length, unit, activation)


def shortest_sum(case: Case, way: FaultVariant, prefix: str) -> Case:
    """Return the case on the smallest part of K that is still beyond the budget."""
    found = _Sum.of(case)
    if found is None:
        return case
    best, low, high = case, 0, found.length // found.unit
    while high - low > 1:
        middle = (low + high) // 2
        # Keep the half with the larger excess; stop when neither shows the fault alone.
        halves = []
        for at in ((low, middle), (middle, high)):
            small = _cut(case, found, way, prefix, (at[0] * found.unit, at[1] * found.unit))
            ratio = _beyond(small)
            if small is not None and ratio > 1:
                halves.append((ratio, at, small))
        if not halves:
            break
        _, (low, high), best = max(halves, key=lambda each: each[0])
    return best


def _beyond(case: Case | None) -> float:
    """Return the worst difference of a case in budgets; 0 if it agrees or cannot be judged."""
    if case is None:
        return 0.0
    judged = case.judge(case.captured).values()
    return max((each.ratio for each in judged if each.verdict is Verdict.DIFFERS), default=0.0)


def _cut(
    case: Case, found: _Sum, way: FaultVariant, prefix: str, part: tuple[int, int]
) -> Case | None:
    """Return the case on K from `part[0]` to `part[1]`; None where it cannot be made."""
    try:
        weights = {prefix + name: _columns(each, part) for name, each in case.weights.items()}
        twin = Bound(case.twin.config, case.twin.numerics, weights, case.recipe)
        inputs = _inputs(case.inputs, found, part)
        with torch.inference_mode():
            made = _made(case, twin, found, way, part)
        captured = {
            name: made[name].to(each.dtype).reshape(-1, *each.shape[1:])
            for name, each in case.captured.items()
        }
    except CANNOT_RUN:
        return None  # the variant or the budget works for the original shape only
    words = f" (K {part[0]}..{part[1] - 1} of {found.length}, made there by the named fault)"
    return replace(case, title=case.title + words, twin=twin, inputs=inputs, captured=captured)


def _made(
    case: Case, twin: Bound, found: _Sum, way: FaultVariant, part: tuple[int, int]
) -> Tensors:
    """Return the fault's outputs on a part of K: damage the whole operands, then cut them.

    A variant that runs other code than the call that it wraps is run on the cut operands.
    """
    asked: list[Tensors] = []
    plain = twin.calls[case.component]

    def cutting(inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        asked.append(inputs)
        cut = ChangedWeights(weights, lambda _, each: _numbers(each, part))
        return plain(_inputs(inputs, found, part), cut)

    made = way.apply(cutting)(case.inputs, case.weights)
    if asked:
        return made
    return way.apply(plain)(_inputs(case.inputs, found, part), twin.weights_of(case.component))


def _inputs(inputs: Tensors, found: _Sum, part: tuple[int, int]) -> dict[str, Tensor]:
    """Return inputs on a part of K; keep those without that dimension."""
    (begin, end), made = part, dict(inputs)
    pieces = {"x": 1} if "x" in inputs else {}
    if found.activation is not None and "codes" in inputs:
        form = BLOCK_FORMATS[found.activation]
        pieces = {"codes": 2 if form.packed else 1, "block_scale": form.block[1]}
    for name, per in pieces.items():
        made[name] = inputs[name][..., begin // per : end // per].contiguous()
    return made


def _held(weight: Weight) -> bool:
    return weight.is_quantised or weight.value is not None


def _columns(weight: Weight, part: tuple[int, int]) -> Weight:
    """Return a weight on a part of K, in its own codes and scales."""
    begin, end = part
    if not _held(weight):
        return weight
    if weight.storage is None:
        assert weight.value is not None, "held"
        return Weight(value=weight.value[:, begin:end].contiguous(), input_scale=weight.input_scale)
    how = weight.storage
    if how.layout != LINEAR or weight.codes is None or weight.block_scale is None:
        raise ValueError(how.layout.name)
    per, wide = 2 if how.format.packed else 1, how.format.block[1]
    return Weight(
        codes=weight.codes[:, begin // per : end // per].contiguous(),
        block_scale=weight.block_scale[:, begin // wide : end // wide].contiguous(),
        tensor_scale=weight.tensor_scale,
        input_scale=weight.input_scale,
        storage=replace(how, shape=(how.shape[0], end - begin)),
    )


def _numbers(weight: Weight, part: tuple[int, int]) -> Weight:
    """Return the decoded values of a changed weight on a part of K."""
    values = weight.values(torch.float64)[:, part[0] : part[1]].contiguous()
    return Weight(value=values, input_scale=weight.input_scale)
