"""Find columns of a product's input that were read in another order, from few rows.

In a part of the columns they may be reversed, exchanged in pairs, rotated, or all be the first one.
What each of these would change in the outputs is known, so every part is tried on a few outputs;
no number is solved for.

Shape letters: R rows, S outputs, K columns, B parts of N columns.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.engine.recover.differences import RecoveredRule
from degarble.harness.engine.recover.stated import operation
from degarble.harness.engine.recover.transposed import span_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from degarble.harness.engine.recover.changes import Equations

FEW = 8  # rows, and outputs of each
MOST_COLUMNS = 1024
_NEAR = 2.0**-5  # of what differs, that an order leaves in few outputs
_STEPS = (2, 3, 4, 6, 8, 16, 32, 64)
_SIZES = (2, 4, 8, 16, 32, 64, 128)
_FEWEST_ROTATED = 4
_TINY = 1e-300


@operation
class ColumnOrder(NamedTuple):
    """A part of the columns, and their order there: reversed, pairs, first, or rotated by some."""

    kind: str
    begin: int
    size: int
    step: int = 1
    by: int = 0

    @property
    def columns(self) -> Tensor:
        """Return the columns of the part."""
        return self.begin + self.step * torch.arange(self.size)

    @property
    def words(self) -> str:
        """Say what became of them."""
        where = span_words("columns", self.begin, self.size, self.step)
        return {
            "reversed": f"{where} are in reverse order",
            "pairs": f"{where} are exchanged in pairs",
            "first": f"{where} all hold the numbers of the first of them",
            "rotated": f"{where} are rotated by {self.by}",
        }[self.kind]


def _order(kind: str, size: int, by: int = 0) -> Tensor:
    own = torch.arange(size)
    match kind:
        case "reversed":
            return own.flip(0)
        case "pairs":
            return torch.where(own < size // 2 * 2, own ^ 1, own)
        case "first":
            return torch.zeros_like(own)
    return own.roll(by)


@operation
def reordered(order: ColumnOrder, right: Tensor) -> Tensor:
    """Return a matrix with columns in another order; as it is where it has no such columns."""
    columns = order.columns
    if int(columns[-1]) >= right.shape[1]:
        return right
    made = right.clone()
    made[:, columns] = right[:, columns[_order(order.kind, order.size, order.by)]]
    return made


def orders_of(equations: Equations) -> Iterator[RecoveredRule]:
    """Yield the orders that give the outputs that were looked at, smaller parts first."""
    wide = equations.other.shape[1]
    gap_RS = equations.seen - equations.right
    if not 1 < wide <= MOST_COLUMNS or not bool(gap_RS.isfinite().all()):
        return
    told_RS = gap_RS.abs() / equations.allowed.clamp(min=_TINY)
    rows = told_RS.sum(1).topk(min(FEW, len(told_RS))).indices
    outputs = told_RS[rows].sum(0).topk(min(FEW, gap_RS.shape[1])).indices
    gap = gap_RS[rows][:, outputs]
    x, other = equations.operand.numbers[equations.rows[rows]], equations.other[outputs]
    limit = _NEAR * float(gap.norm())
    if not limit:
        return
    for order in _orders(x, other, gap, limit):
        yield RecoveredRule(order.words, partial(reordered, order))


def _orders(x: Tensor, other: Tensor, gap: Tensor, limit: float) -> Iterator[ColumnOrder]:
    """Yield the orders of runs of columns, all runs of a size at once, then of every so many."""
    wide = x.shape[1]
    for size in (*(size for size in _SIZES if size < wide), wide):
        runs = x.unfold(1, size, 1), other.unfold(1, size, 1)
        for begin, kind, by in _held(*runs, gap, limit):
            yield ColumnOrder(kind, begin, size, 1, by)
    for step in _STEPS:
        for first in range(step):
            part = slice(first, None, step)
            size = len(range(first, wide, step))
            if size > 1:
                lines = x[:, None, part], other[:, None, part]
                for _, kind, by in _held(*lines, gap, limit):
                    yield ColumnOrder(kind, first, size, step, by)


def _held(
    x_RBN: Tensor, other_SBN: Tensor, gap: Tensor, limit: float
) -> Iterator[tuple[int, str, int]]:
    """Yield which of B parts, and which orders of it, give the difference."""
    size = x_RBN.shape[2]
    base_RSB = torch.einsum("rbn,sbn->rsb", x_RBN, other_SBN)
    wanted_RSB = base_RSB + gap[..., None]
    for kind in ("reversed", "pairs", "first"):
        made = torch.einsum("rbn,sbn->rsb", x_RBN[..., _order(kind, size)], other_SBN)
        left_B = (made - wanted_RSB).flatten(0, 1).norm(dim=0)
        for begin in (left_B <= limit).nonzero().flatten().tolist():
            yield begin, kind, 0
    if size < _FEWEST_ROTATED:
        return
    # A correlation gives what every rotation makes.
    spectrum = torch.fft.rfft(other_SBN)[None] * torch.fft.rfft(x_RBN)[:, None].conj()
    left_BN = (torch.fft.irfft(spectrum, size) - wanted_RSB[..., None]).flatten(0, 1).norm(dim=0)
    for begin, by in (left_BN <= limit).nonzero().tolist():
        if by:
            yield begin, "rotated", by
