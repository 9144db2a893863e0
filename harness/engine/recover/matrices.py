"""Recover numbers of a weight by rows and columns, to be compared with what is stored.

Columns of a product's input that no row needs are left out: other numbers in a few columns are
solved for with few rows of inputs, others anywhere with more rows than columns. Vectors, and other
small weights, are solved for by how outputs answer to each of their numbers; a table of rows is
read off the rows that were looked up.

Shape letters: T rows of inputs, N rows of a weight, K columns.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.engine.faults.model_faults import has_facts, unrounded, with_facts
from degarble.harness.engine.faults.weight_faults import numbers_of
from degarble.harness.engine.recover.maps import Sides
from degarble.harness.formats.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext
    from degarble.harness.engine.recover.products import ProductView

MOST_SOLVED = 64  # columns, of which other numbers are solved for one after the other
SPARE_ROWS = 4  # beyond those that determine every number, which a solution has to predict
MOST_NUMBERS = 512  # of a small weight
MOST_OUTPUTS = 1 << 14  # numbers that come out, by which a small weight is solved for
NEAR = 2.0  # times what outputs may be off by, as an error of what is solved for
_LOOSE = 2.0**-12  # of a number: what is solved for is known better than what is stored
_STEP = 2.0**-12
_LEFT = 0.01  # of the difference: small outputs may be known better than a sum is rounded
_TINY = 1e-300


def recovered_matrix(view: ProductView) -> Sides | None:
    """Return the numbers that a product's weight had; None where rows are too few to tell."""
    wrong = view.wrong.any(0).nonzero().flatten()
    if not len(wrong) or not bool(view.seen.isfinite().all()):
        return None
    gap, allowed = (view.seen - view.product)[:, wrong], view.allowed[:, wrong]
    rows = 1 / allowed.mean(1, keepdim=True).clamp(min=_TINY)
    x, gap, allowed = view.x * rows, gap * rows, allowed * rows
    along = x.square().sum(0)
    chosen: list[int] = []
    left = gap
    for _ in range(min(MOST_SOLVED, len(x) // 2, x.shape[1])):
        gain = (x.T @ left).square().sum(1) / along.clamp(min=_TINY)
        gain[along <= _TINY] = 0.0
        gain[chosen] = -1.0
        chosen.append(int(gain.argmax()))
        own = x[:, chosen]
        found = torch.linalg.lstsq(own, gap).solution
        left = gap - own @ found
        if bool((left.abs() <= allowed + 1).all()):  # allowed are 1 in the mean of a row
            return _matrix(view, wrong, torch.tensor(chosen), (own, found, allowed))
    if len(x) < x.shape[1] + SPARE_ROWS or int(torch.linalg.matrix_rank(x)) < x.shape[1]:
        return None
    found = torch.linalg.lstsq(x, gap).solution
    every = torch.arange(x.shape[1])
    if bool(((gap - x @ found).abs() <= allowed + 1).all()):
        return _matrix(view, wrong, every, (x, found, allowed))
    return None


def _matrix(
    view: ProductView, wrong: Tensor, columns: Tensor, solved: tuple[Tensor, Tensor, Tensor]
) -> Sides:
    x, found, allowed = solved
    right = view.numbers
    seen, slack = right.clone(), torch.full_like(right, _TINY)
    at = (wrong[:, None] + view.first_row, columns[None])
    seen[at] += found.T
    error = torch.linalg.pinv(x.T @ x).diagonal().clamp(min=0).sqrt()
    slack[at] = NEAR * allowed.square().mean(0).sqrt()[:, None] * error[None]
    return Sides(view.name, seen, right, slack, _LOOSE)


def recovered_vector(
    context: ComponentContext, record: CallRecord, name: str, sides: Sequence[Sides]
) -> Sides | None:
    """Return the numbers that a small weight had; None where outputs do not tell."""
    weights = dict(context.weights)
    if math.prod(weights[name].shape) > MOST_NUMBERS:
        return None
    right = numbers_of(weights[name]).double()
    gap, allowed = (
        torch.cat([side.reshape(-1) for side in each])
        for each in zip(*((s.seen - s.right, s.allowed) for s in sides), strict=True)
    )
    if not bool(gap.isfinite().all()):
        return None
    kept = torch.arange(len(gap))
    if len(gap) > MOST_OUTPUTS:
        kept = (gap / allowed.clamp(min=_TINY)).abs().topk(MOST_OUTPUTS).indices
    own = with_facts(context, unrounded)(context.call) if has_facts(context) else context.call
    step = _STEP * float(right.abs().mean() or 1.0)

    def made(values: Tensor) -> Tensor:
        changed = Weight(value=values.reshape(weights[name].shape))
        outputs = own(record.inputs, {**weights, name: changed})
        return torch.cat([outputs[s.output].double().reshape(-1) for s in sides])[kept]

    try:
        before, answers = made(right), []
        for number in range(right.numel()):
            values = right.flatten().clone()
            values[number] += step
            answers.append((made(values) - before) / step)
    except CANNOT_RUN:
        return None
    weigh = 1 / allowed[kept].clamp(min=_TINY)
    x, y = torch.stack(answers, 1) * weigh[:, None], gap[kept] * weigh
    size = x.norm(dim=0).clamp(min=_TINY)
    gram = (x / size).T @ (x / size) + 1e-12 * torch.eye(len(size), dtype=x.dtype)
    inverse = torch.linalg.inv(gram)
    found = inverse @ ((x / size).T @ y) / size
    left = y - x @ found
    if float(left.abs().max()) > 2 and float(left.norm()) > _LEFT * float(y.norm()):
        return None
    error = NEAR * inverse.diagonal().clamp(min=0).sqrt() / size
    wide = right.shape[-1] if right.ndim else 1
    values, slack = ((right.flatten() + found).reshape(-1, wide), error.reshape(-1, wide))
    return Sides(name, values, right.reshape(-1, wide), slack, _LOOSE)


def recovered_table(inputs: Mapping[str, Tensor], weight: Weight, sides: Sides) -> Sides | None:
    """Return the rows of a table that were looked up; what may differ in others is infinite."""
    tokens = [t for t in inputs.values() if t.ndim == 1 and not t.is_floating_point()]
    right = numbers_of(weight).double()
    if len(tokens) != 1 or len(inputs) != 1 or sides.right.shape[1:] != right.shape[1:]:
        return None
    rows, like = tokens[0].long(), sides.right
    if len(rows) != len(like) or int(rows.max()) >= len(right):
        return None
    factor = float((like * right[rows]).sum() / right[rows].square().sum().clamp(min=_TINY))
    if not factor or not bool(sides.equal(like, factor * right[rows], sides.allowed).all()):
        return None
    seen, allowed = right.clone(), torch.full_like(right, torch.inf)
    seen[rows], allowed[rows] = sides.seen / factor, sides.allowed / abs(factor)
    return Sides(sides.output, seen, right, allowed)
