"""View a component as products: which rows of inputs meet which weight, in which outputs.

Linears and routed experts are linear in each of their weights. A view holds the inputs as they are
multiplied, the weight's numbers, what came out and what should have, and how far a healthy kernel
may be off. Where the twin's outputs are not that product (a gain, another sum) there is no view.

Shape letters: T rows of a view, N rows of a weight, K columns of a weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import DegarbleError
from degarble.harness.engine.budget.budget import spacing
from degarble.harness.engine.budget.roles import budgets_of
from degarble.harness.engine.budget.rules import JudgeableCall
from degarble.harness.engine.faults.regions import OutputColumns, expert_of, extents, matrices
from degarble.harness.engine.faults.weight_faults import numbers_of
from degarble.references.linears import CODES, X, activation_values, weight_values
from degarble.references.numerics import DecodedOperands

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext
    from degarble.harness.formats.number_formats import ElementFormat
    from degarble.harness.formats.weight import Weight

OUT = "out"
EXPERTS = "experts"
FEWEST_ROWS = 4  # of a view: fewer cannot tell one cause from another
MOST_ROWS = 256
_ROUNDING = 2.0**-9


@dataclass(frozen=True, eq=False)
class ProductView:
    """One weight of a component as a product; grouped ones are a view for each group of rows."""

    name: str
    weight: Weight
    # All of float64.
    x: Tensor  # [T, K]
    numbers: Tensor  # [N, K]
    seen: Tensor  # [T, N], what the candidate returned
    product: Tensor  # [T, N], not rounded
    allowed: Tensor  # [T, N], how far a healthy kernel may be off
    at: Tensor  # [T], the rows of the inputs
    first_row: int = 0  # of the weight
    first_column: int = 0  # of the inputs
    gain: float = 1.0  # that the component applies; it is in `x`

    @property
    def wrong(self) -> Tensor:
        """Mark outputs beyond what a healthy kernel may return."""
        beyond = (self.seen - self.product).abs() > self.allowed
        return beyond | ~self.seen.isfinite()

    def of_rows(self, rows_T: Tensor) -> ProductView:
        """Keep some rows."""
        parts = (self.x, self.seen, self.product, self.allowed, self.at)
        x, seen, product, allowed, at = (part[rows_T] for part in parts)
        return replace(self, x=x, seen=seen, product=product, allowed=allowed, at=at)


def views_of(context: ComponentContext, record: CallRecord) -> Iterator[ProductView]:
    """Yield the component's products, where it is linear in its weights and rows are enough."""
    if X not in record.inputs and CODES not in record.inputs:
        return
    call = JudgeableCall.from_twin(context.bound, context.name, record.inputs, record.expected)
    try:
        budgets = budgets_of(call)
    except DegarbleError:
        return
    x = activation_values(call.inputs, call.activation, torch.float64, context.bound.numerics)
    flat = x.flatten(0, -2)
    for name, output, rows, columns, at in _places(context, record, flat):
        seen, expected = record.outputs.get(output), record.expected[output]
        if seen is None or output not in budgets or not is_comparable(seen, expected):
            continue
        slack = budgets[output].slack.double().expand(expected.shape)
        if output in record.held:
            slack = torch.where(record.held[output], slack, torch.inf)
        cut = [each.double().flatten(0, -2)[rows][:, columns] for each in (seen, expected, slack)]
        weight = context.weights[name]
        bias = _bias(context, name)
        numbers = _multiplied(context, weight)
        if bias is not None and bias.shape == cut[1].shape[1:]:
            # Rounded by the size that it has with the bias.
            one, other, slack = cut
            wide = allowance(one, other, slack, budgets[output].output)
            cut = [one - bias, other - bias, wide]
        yield from _in_groups(name, weight, numbers, (flat[at], at), cut, budgets[output].output)


def _bias(context: ComponentContext, name: str) -> Tensor | None:
    """Return what is added to a product, where the component has it."""
    known = f"{name.rpartition('.')[0]}.bias".removeprefix(".")
    return numbers_of(context.weights[known]).double() if known in context.weights else None


def _multiplied(context: ComponentContext, weight: Weight) -> Tensor:
    """Return a weight's numbers as the run multiplies them: a run may round decoded ones."""
    numerics = context.bound.numerics
    if numerics.operands is DecodedOperands.EXACT or not weight.is_decoded:
        return numbers_of(weight).double()
    return weight_values(weight, torch.float64, numerics)


def _in_groups(
    name: str,
    weight: Weight,
    w_NK: Tensor,
    given: tuple[Tensor, Tensor],
    cut: Sequence[Tensor],
    stored: ElementFormat,
) -> Iterator[ProductView]:
    """Yield the view of a weight, or of each group of its rows that has inputs of its own."""
    seen, expected, slack = cut
    inputs, at = given
    groups = inputs.shape[1] // w_NK.shape[-1] if w_NK.ndim == 2 and w_NK.numel() else 0
    fits = groups and inputs.shape[1] == groups * w_NK.shape[1] and w_NK.shape[0] % groups == 0
    if len(seen) < FEWEST_ROWS or not fits or seen.shape[1] != w_NK.shape[0]:
        return
    high, wide = w_NK.shape[0] // groups, w_NK.shape[1]
    for number in range(groups):
        x = inputs[:, number * wide : (number + 1) * wide]
        rows = slice(number * high, (number + 1) * high)
        gain = _gain(x @ w_NK[rows].T, expected[:, rows])
        x = x * gain
        product = x @ w_NK[rows].T
        allowed = allowance(seen[:, rows], product, slack[:, rows], stored)
        if bool(((product - expected[:, rows]).abs() <= allowed).all()):
            sides = (x, w_NK, seen[:, rows], product, allowed, at)
            yield _most_telling(ProductView(name, weight, *sides, rows.start, number * wide, gain))


def _gain(product: Tensor, expected: Tensor) -> float:
    """Return the factor that the component applies to a product; 1 where roundings leave none."""
    along = float(product.square().sum())
    gain = float((product * expected).sum()) / along if along > 0 else 1.0
    return 1.0 if not math.isfinite(gain) or abs(gain - 1) < _ROUNDING else gain


def allowance(seen: Tensor, right: Tensor, slack: Tensor, stored: ElementFormat) -> Tensor:
    """Return how far outputs may be off, rounding included.

    A kernel rounds what it computed, which may be larger than what it should have been.
    """
    size = torch.maximum(seen.nan_to_num(0, 0, 0).abs(), right.abs()) + slack
    return slack + torch.from_numpy(spacing(size.numpy(), stored))


def is_comparable(seen: Tensor, expected: Tensor) -> bool:
    """Return whether two outputs are rows of numbers of the same extents."""
    numbers = seen.dtype.is_floating_point and seen.dtype.itemsize > 1
    return numbers and seen.shape == expected.shape and seen.ndim > 1


def _places(
    context: ComponentContext, record: CallRecord, rows: Tensor
) -> Iterator[tuple[str, str, Tensor, slice, Tensor]]:
    """Yield a weight, its output, its rows and columns there, and which inputs these rows have."""
    for extent in extents(context, record) or _with_bias(context, record):
        if len(rows) == record.expected[extent.output].flatten(0, -2).shape[0]:
            columns = slice(extent.begin, extent.end)
            every = torch.arange(len(rows))
            yield extent.name, extent.output, every, columns, every
    if EXPERTS not in record.inputs or not context.role.startswith("ffn.experts.w"):
        return
    slots = record.inputs[EXPERTS].flatten()
    each = len(slots) // len(rows) if len(rows) else 0
    if each * len(rows) != len(slots):
        return
    of_slot = torch.arange(len(slots)) // max(each, 1)
    for number in slots[slots >= 0].unique().tolist():
        own = (slots == number).nonzero().flatten()
        begin = 0
        for name in matrices(context):
            if expert_of(name) == number:
                end = begin + context.weights[name].shape[0]
                yield name, OUT, own, slice(begin, end), of_slot[own]
                begin = end


def _with_bias(context: ComponentContext, record: CallRecord) -> list[OutputColumns]:
    """Return the columns of the only matrix where all else is what is added to its product."""
    names = [name for name in matrices(context) if len(context.weights[name].shape) == 2]
    rest = [name for name in matrices(context) if name not in names]
    if len(names) != 1 or len(rest) != 1 or _bias(context, names[0]) is None:
        return []
    high = context.weights[names[0]].shape[0]
    fits = OUT in record.expected and record.expected[OUT].flatten(1).shape[1] == high
    return [OutputColumns(names[0], OUT, 0, high)] if fits else []


def _most_telling(view: ProductView) -> ProductView:
    """Keep the rows with most wrong outputs, in their order, where there are very many."""
    if len(view.x) <= MOST_ROWS:
        return view
    kept = view.wrong.sum(1).topk(MOST_ROWS).indices.sort().values
    return view.of_rows(kept)
