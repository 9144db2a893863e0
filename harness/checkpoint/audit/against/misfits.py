"""Find what misfitting elements have in common: a factor, scales, rows, columns or single codes.

Misfits in most rows prove nothing by themselves: values that went through another format first, or
were rounded otherwise, have them everywhere. They count where one cause explains them all (a
factor, a neighbour's scales), or where most rows or columns have none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.checkpoint.audit import value_rules as rules
from degarble.harness.checkpoint.audit.against.codes import FP8_SLACK, SLACK, blocks_of
from degarble.harness.checkpoint.audit.findings import format_ranges

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.checkpoint.audit.against.codes import Blocks
    from degarble.harness.checkpoint.audit.rules import AuditRule
    from degarble.harness.formats.weight import Weight

MOSTLY = 0.75  # of the rows or columns: what is there is everywhere
_MOST_RUNS = 8
FEWER = 3.0  # times what chance leaves
# Share of misfits that no other format, or way of rounding, leaves so small: by slack.
SPARSE = {SLACK: 0.005, FP8_SLACK: 0.03}


class Reason(NamedTuple):
    """A broken rule, and the text that follows the weight's name."""

    rule: AuditRule
    message: str


def lines_told(what: str, numbers: list[int]) -> str:
    """Format rows or columns by their runs: `64 rows (rows 16-79)`."""
    runs = format_ranges(numbers).split(", ")
    more = f" and {len(runs) - _MOST_RUNS} runs more" if len(runs) > _MOST_RUNS else ""
    if len(numbers) == 1:
        return f"{what} {runs[0]}"
    return f"{len(numbers)} {what}s ({what}s {', '.join(runs[:_MOST_RUNS])}{more})"


def codes_told(weight: Weight, y_MK: Tensor, first: int) -> Reason | None:
    """Return the cause of misfits in some rows of codes, or None.

    `first`: number of the first row.
    """
    # First for values quantised directly, then for values that were FP8 before.
    for slack in (SLACK, FP8_SLACK):
        blocks = blocks_of(weight, y_MK, slack)
        if blocks is None or not bool(blocks.bad.any()):
            return None
        local = blocks.share < SPARSE[slack] or _is_local(blocks)
        found = _factor_told(blocks, first) or _scales_told(blocks, first, local=local)
        if found is not None:
            return found
        if local:
            return _codes_told(weight, blocks, y_MK, first)
    return None


def _is_local(blocks: Blocks) -> bool:
    """Return whether more rows, or columns, are free of misfits than chance explains."""
    for axis in (0, 1):
        lines = blocks.bad.any(axis)
        clean = 1 - float(lines.double().mean())
        across = blocks.bad.shape[axis] * (blocks.width if axis else blocks.height)
        chance = (1 - blocks.share) ** (across * (blocks.height if axis else blocks.width))
        if len(lines) > 1 and clean >= 1 - MOSTLY and clean > FEWER * chance:
            return True
    return False


def _factor_told(blocks: Blocks, first: int) -> Reason | None:
    """Return a factor common to all blocks, to those of some rows, or of some columns."""
    everywhere = torch.ones_like(blocks.bad)
    factor = blocks.factor(everywhere)
    if factor is not None:
        return Reason(rules.GAIN, _times(factor))
    for axis, what, height in ((1, "row", blocks.height), (0, "column", blocks.width)):
        lines = blocks.bad.any(axis)
        chosen = (lines[:, None] if axis else lines[None, :]) & everywhere
        factor = blocks.factor(chosen)
        if factor is not None and bool((~lines).any()):
            start = first if axis else 0
            numbers = [start + i for i in _spread(lines, height)]
            told = f"has block scales {factor:.4g} times as large in {lines_told(what, numbers)}."
            return Reason(rules.BLOCK_SCALE, told)
    return None


def _times(factor: float) -> str:
    return f"is {factor:.4g} times the reference."


def _scales_told(blocks: Blocks, first: int, *, local: bool) -> Reason | None:
    """Return a reason if block scales differ from those that made the codes."""
    count = int(blocks.bad.sum())
    if not bool((blocks.bad & blocks.fits).any()):
        return None
    rows = [first + i for i in _spread(blocks.bad.any(1), blocks.height)]
    where = f"{count} blocks of {lines_told('row', rows)}"
    neighbour = blocks.shifted()
    if neighbour is not None:
        return Reason(
            rules.BLOCK_SCALE,
            f"has the scales of {neighbour} in {where}, as wrong scale arithmetic (M12) leaves it.",
        )
    order = blocks.arranged()
    if order is not None:
        return Reason(rules.ORDER, f"has its block scales {order}, in {where}.")
    if not blocks.are_scaled(apart=not local):
        return None
    row, column = (int(each) for each in (blocks.bad & blocks.fits).nonzero()[0])
    stored = float(blocks.stored[row, column])
    low, high = float(blocks.low[row, column]), float(blocks.high[row, column])
    middle = low if math.isinf(high) else math.sqrt(low * high)
    ratio = stored / middle if middle else math.inf
    factor = blocks.factor(blocks.bad)
    every = f", {factor:.3g} times too large each" if factor is not None and count > 1 else ""
    return Reason(
        rules.BLOCK_SCALE,
        f"has other block scales than its codes were made with in {where}{every}: that of row"
        f" {first + row * blocks.height}, block {column} is about {ratio:.3g} times as large.",
    )


def _codes_told(weight: Weight, blocks: Blocks, y_MK: Tensor, first: int) -> Reason:
    rows = [first + i for i in _spread(blocks.bad.any(1), blocks.height)]
    row, column = (int(each) for each in blocks.bad.nonzero()[0])
    piece = (
        slice(row * blocks.height, (row + 1) * blocks.height),
        slice(column * blocks.width, (column + 1) * blocks.width),
    )
    values = weight.values(torch.float32)
    gap = (values[piece] - y_MK[piece]).abs()
    place = divmod(int(gap.argmax()), gap.shape[1])
    told = f"{float(values[piece][place]):.4g} where {float(y_MK[piece][place]):.4g} is meant"
    empty = " All codes of a block are zero." if bool((blocks.bad & blocks.empty).any()) else ""
    return Reason(
        rules.CODES,
        f"has codes that are not the nearest to the reference under their own scale, in"
        f" {int(blocks.bad.sum())} blocks of {lines_told('row', rows)}: at row"
        f" {first + piece[0].start + place[0]}, column {piece[1].start + place[1]} {told}.{empty}",
    )


def values_told(x_MK: Tensor, y_MK: Tensor, wrong: Tensor, first: int) -> Reason:
    """Return the reason for plain values that differ from the reference's."""
    rows = [first + int(i) for i in wrong.any(1).nonzero()]
    row, column = (int(each) for each in wrong.nonzero()[0])
    here, there = float(x_MK[row, column]), float(y_MK[row, column])
    return Reason(
        rules.BYTES,
        f"differs from the reference in {int(wrong.sum())} values of {lines_told('row', rows)}:"
        f" at row {first + row}, column {column} {here:.9g} is stored, {there:.9g} is meant.",
    )


def _spread(lines: Tensor, size: int) -> list[int]:
    """Return the element rows, or columns, that some rows or columns of blocks cover."""
    return [int(i) * size + k for i in lines.nonzero() for k in range(size)]
