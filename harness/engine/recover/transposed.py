"""Find a square part of a weight that was read with its rows and columns exchanged.

Wrong outputs show the rows of the part. Every place of its columns is tried on a few rows of
inputs: what the exchange would change there is known.

Shape letters: T rows of inputs, N rows of the part, which has as many columns.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.engine.recover.operands import operand_of
from degarble.harness.engine.recover.stated import operation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from degarble.harness.engine.recover.products import ProductView

FEW_ROWS = 8  # of inputs
MOST_TRIED = 1 << 31  # products of numbers
_NEAR = 2.0**-6  # of what differs, that the exchange leaves in few rows
_STEPS = (1, 2, 4, 8, 16, 32)


@operation
class Square(NamedTuple):
    """So many rows and columns, each from a first one on, in steps."""

    row: int
    column: int
    size: int
    row_step: int = 1
    column_step: int = 1

    @property
    def words(self) -> str:
        """Name the rows and columns."""
        return f"{span_words('rows', self.row, self.size, self.row_step)} and " + span_words(
            "columns", self.column, self.size, self.column_step
        )

    @property
    def part(self) -> tuple[slice, slice]:
        """Return where it is in a matrix."""
        ends = ((self.row, self.row_step), (self.column, self.column_step))
        rows, columns = (slice(at, at + (self.size - 1) * by + 1, by) for at, by in ends)
        return rows, columns


def span_words(kind: str, first: int, count: int, step: int) -> str:
    """Name so many rows or columns from a first one on, in steps."""
    every = f" in steps of {step}" if step > 1 else ""
    return f"{kind} {first} to {first + (count - 1) * step}{every}"


@operation
def turned_square(square: Square, right: Tensor) -> Tensor:
    """Return a matrix with a part transposed; as it is where it has no such part."""
    made = right.clone()
    part = right[square.part]
    if part.shape == (square.size, square.size):
        made[square.part] = part.T
    return made


def squares_of(view: ProductView) -> Iterator[tuple[str, Square]]:
    """Yield parts that may be transposed: numbers of the weight, or elements without scales."""
    rows = view.wrong.any(0).nonzero().flatten().tolist()
    steps = {b - a for a, b in pairwise(rows)}
    size, (high, wide) = len(rows), view.numbers.shape
    if size < 2 or len(steps) > 1 or size > wide or not bool(view.seen.isfinite().all()):
        return
    step = steps.pop()
    gap = (view.seen - view.product)[:, rows]
    told = (gap.abs() / view.allowed[:, rows].clamp(min=1e-300)).sum(1).topk(
        min(FEW_ROWS, len(gap))
    ).indices  # fmt: skip
    x, gap = view.x[told], gap[told]
    whole = gap.norm()
    operand = operand_of(view.weight)
    kinds: list[tuple[str, Tensor, Tensor]] = []
    if operand.values.shape[0] >= view.first_row + high and operand.values.shape[1] == wide:
        own = operand.of_rows(torch.tensor(rows) + view.first_row)
        if operand.form is not None:
            unit = (own.spread(own.scales) * own.factor).expand_as(own.values)
            kinds.append(("elements", own.values, unit))
    kinds.append(("numbers", view.numbers[rows], torch.ones_like(view.numbers[rows])))
    for across in _STEPS:
        starts = wide - (size - 1) * across
        if starts < 1 or starts * size * size * len(x) > MOST_TRIED:
            continue
        for begin in range(starts):
            columns = slice(begin, begin + (size - 1) * across + 1, across)
            for what, values, unit in kinds:
                part, units = values[:, columns], unit[:, columns]
                if what == "elements" and bool((units == units[0, 0]).all()):
                    continue  # the same as of numbers
                changed = x[:, columns] @ ((part.T - part) * units).T
                if (gap - changed).norm() <= _NEAR * whole:
                    yield what, Square(rows[0] + view.first_row, begin, size, step, across)
