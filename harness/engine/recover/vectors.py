"""Solve for a small weight that all rows share: the gain of a norm, a bias, sinks, offsets.

How outputs answer to each of its numbers is measured with the twin; the numbers that give what was
seen follow by least squares over many rows, and are compared with the stored ones by rules. Where
no rule gives them, they are listed one by one: every row of every call has to follow from them.

Shape letters: K numbers of a weight, N numbers of outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.engine.diagnose.trial import is_by_row, rows_of
from degarble.harness.engine.faults.model_faults import (
    FaultVariant,
    has_facts,
    unrounded,
    with_facts,
    with_weights,
)
from degarble.harness.engine.faults.regions import full_name
from degarble.harness.engine.recover.differences import RecoveredRule, rules_of
from degarble.harness.engine.recover.maps import Sides
from degarble.harness.engine.recover.stated import operation
from degarble.harness.formats.weight import Weight
from degarble.harness.report.number_text import number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext

MOST_NUMBERS = 512  # of a weight that is solved for
MOST_ROWS = 96  # of a call
TURNS = 5  # of Newton's method, with the slopes of the first
SURE = 4.0  # standard errors
_STEP = 2.0**-12  # of a weight's size, by which numbers are changed
_TINY = 1e-300


@dataclass(frozen=True, eq=False)
class VectorRule:
    """What was done to a weight by a rule, the variant that it makes, and the weight's name."""

    rule: RecoveredRule
    made: Callable[[RecoveredRule], FaultVariant]
    name: str


def used_vectors(
    context: ComponentContext, record: CallRecord, sides: Sequence[Sides]
) -> Iterator[VectorRule]:
    """Yield rules for each small weight from which the outputs follow, as far as they show it."""
    if not has_facts(context) or not sides:
        return
    record, sides = _few(context, record, sides)
    for name, weight in dict(context.weights).items():
        value = weight.value
        if value is None or not value.is_floating_point() or value.numel() > MOST_NUMBERS:
            continue
        try:
            found = _solved(context, record, sides, name)
        except CANNOT_RUN:
            continue
        if found is None:
            continue
        full, made = full_name(context, name), partial(_variant, context, name)
        for rule in (*rules_of(found), *_rolled(found), *_table(found, value.dtype)):
            yield VectorRule(rule, made, full)


def _few(
    context: ComponentContext, record: CallRecord, sides: Sequence[Sides]
) -> tuple[CallRecord, Sequence[Sides]]:
    """Return some rows of a call, wrong ones first, where rows are independent."""
    if not is_by_row(context, record):
        return record, sides
    count = len(next(iter(record.expected.values())))
    if count <= MOST_ROWS:
        return record, sides
    far = torch.zeros(count, dtype=torch.float64)
    for each in sides:
        gap = (each.seen - each.right).abs() / each.allowed.clamp(min=_TINY)
        far += gap.reshape(count, -1).clamp(max=1.0).sum(1)
    rows = far.topk(MOST_ROWS).indices.sort().values

    def part(x: Tensor) -> Tensor:
        chosen: Tensor = x.reshape(count, -1, x.shape[-1])[rows].flatten(0, 1)
        return chosen

    return rows_of(record, rows), [
        replace(each, seen=part(each.seen), right=part(each.right), allowed=part(each.allowed))
        for each in sides
    ]


def _solved(
    context: ComponentContext, record: CallRecord, sides: Sequence[Sides], name: str
) -> Sides | None:
    """Return the numbers of a weight as they were used, with what they may be off."""
    weights = dict(context.weights)
    stored = weights[name].value
    assert stored is not None, "a weight of plain numbers"
    right = stored.double().flatten()
    call = with_facts(context, unrounded)(context.call)
    seen = torch.cat([each.seen.flatten() for each in sides])
    weigh = 1 / torch.cat([each.allowed.flatten() for each in sides]).clamp(min=_TINY)
    names = [each.output for each in sides]

    def made(numbers: Tensor) -> Tensor:
        own = replace(weights[name], value=numbers.reshape(stored.shape), _decoded={})
        outputs = call(record.inputs, {**weights, name: own})
        return torch.cat([outputs[each].double().flatten() for each in names])

    step = _STEP * max(float(right.square().mean().sqrt()), _TINY)
    used, error = right.clone(), right.clone()
    answers: Tensor | None = None
    for _ in range(TURNS):
        base = made(used)
        left = (seen - base) * weigh
        if not bool(left.isfinite().all()):
            return None
        if float(left.abs().max()) <= 1.0:
            break
        if answers is None:  # once: most weights act nearly linearly
            answers = torch.stack(
                [(made(used + step * unit) - base) * weigh / step
                 for unit in torch.eye(len(right), dtype=torch.float64)], 1,
            )  # fmt: skip
        size = answers.norm(dim=0)
        if bool((size <= _TINY).all()):
            return None
        scaled = answers / size.clamp(min=_TINY)
        gram = scaled.T @ scaled + 1e-9 * torch.eye(len(right), dtype=torch.float64)
        inverse = torch.linalg.inv(gram)
        used = used + (inverse @ (scaled.T @ left)) / size.clamp(min=_TINY)
        # Outputs are off by half of what is allowed at most: the rounding when they are stored.
        error = SURE / 2 * inverse.diagonal().clamp(min=0).sqrt() / size.clamp(min=_TINY)
        error = torch.where(size <= _TINY, torch.inf, error)
    if float(((seen - made(used)) * weigh).abs().max()) > 2.0:
        return None
    wide = stored.shape[-1]
    allowed = error + _eps(stored.dtype) * used.abs()
    return Sides(name, *(each.reshape(-1, wide) for each in (used, right, allowed)))  # type: ignore[arg-type]


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _variant(context: ComponentContext, name: str, rule: RecoveredRule) -> FaultVariant:
    words = f"in {full_name(context, name)}, {rule.words}"
    return FaultVariant(words, with_weights(partial(changed, name, rule.apply)))


@operation
def changed(name: str, of: Callable[[Tensor], Tensor], each: str, weight: Weight) -> Weight:
    """Return a weight of this name with its numbers, as a matrix, changed."""
    value = weight.value
    if each != name or value is None:
        return weight
    made = of(value.double().reshape(-1, value.shape[-1]))
    return Weight(value=made.reshape(value.shape).to(value.dtype), input_scale=weight.input_scale)


def _rolled(sides: Sides) -> Iterator[RecoveredRule]:
    """Yield numbers of a vector that are in each other's places, by a rule."""
    wide = sides.right.shape[1]
    if not bool((sides.right != sides.right[:, :1]).any()):
        return
    for by in range(1, wide):
        if bool(sides.equal(sides.seen, sides.right.roll(by, 1), sides.allowed).all()):
            yield RecoveredRule(
                f"numbers are rotated by {by}", partial(torch.roll, shifts=by, dims=1)
            )
            return
    if bool(sides.equal(sides.seen, sides.right.flip(1), sides.allowed).all()):
        yield RecoveredRule("numbers are in reverse order", partial(torch.flip, dims=(1,)))


def _table(sides: Sides, dtype: torch.dtype) -> Iterator[RecoveredRule]:
    """Yield the numbers as they were used, rounded as they are stored; right ones stay."""
    known = sides.allowed.isfinite()
    wrong = known & ((sides.seen - sides.right).abs() > sides.allowed)
    count = int(wrong.sum())
    if not count:
        return
    made = torch.where(wrong, sides.seen.to(dtype).double(), sides.right)
    at = wrong.nonzero().tolist()
    lines = tuple(
        f"number {column if len(sides.seen) == 1 else f'{row}, {column}'} was"
        f" {number(float(made[row, column]), 4)} in place of"
        f" {number(float(sides.right[row, column]), 4)}"
        for row, column in at
    )
    shown = "; ".join(lines[:2]) + ("; ..." if lines[2:] else "")
    words = f"{count} of {wrong.numel()} numbers are others: {shown}"
    yield RecoveredRule(words, partial(held, made), lines)


@operation
def held(made: Tensor, right: Tensor) -> Tensor:
    """Return numbers that were solved for."""
    return made if made.shape == right.shape else right
