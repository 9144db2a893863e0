"""Picture the error of an origin: rows by columns, and distances in ulps, with and without a cause.

The candidate's values of one call are set against the twin's on the same inputs, and, where a cause
was found, against those of the twin with that cause. A picture has few cells, whatever the size of
the output: each shows the worst of its elements.

Shape letters: M rows, K columns, H and W cells.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.commands.check.output_statistics import histogram_of
from degarble.harness.engine.budget.budget import HEADROOM, spacing
from degarble.harness.engine.budget.roles import budgets_of
from degarble.harness.engine.budget.rules import JudgeableCall
from degarble.harness.engine.compare.compare import values_of_any
from degarble.harness.engine.diagnose.trial import make, seen_tensors, untouched
from degarble.harness.formats.codec import FORMAT_OF_DTYPE, value_ulp_distance
from degarble.harness.report.blocks import ErrorPicture, GridLine, PictureLayer
from degarble.reports.replay_panel import BUDGET_STEPS, distances

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.harness.commands.check.check import DiagnosedOrigin
    from degarble.harness.engine.faults.model_faults import FaultVariant
    from degarble.harness.engine.localise.discrepancy import Discrepancy
    from degarble.harness.formats.number_formats import ElementFormat
    from degarble.harness.report.blocks import Block

    Values = NDArray[np.float64]

_CELLS = (32, 64)  # of a picture, at most
_CLOSE = (16, 32)  # elements of a close picture
_MOST = 1 << 23  # elements at once; of a larger output the rows around its worst are pictured
_BY_TOKEN = 3  # axes of an output that has several rows a token: heads, slots, streams
_SCALE = 0.99  # of the twin's values lie on the scale of colours


def error_blocks(origin: DiagnosedOrigin) -> tuple[Block, ...]:
    """Return pictures and distributions of the call that shows an origin best; none without one."""
    discrepancy = origin.discrepancy
    record, name = discrepancy.record, discrepancy.name
    if record is None:
        return ()
    candidate, twin = (side.get(name) for side in (seen_tensors(record), untouched(record)))
    if candidate is None or twin is None or not twin.numel():
        return ()
    if (candidate.shape, candidate.dtype) != (twin.shape, twin.dtype):
        return ()  # the sentence says so
    other = "what was passed on" if record.implied else "the twin"
    sides = {"the candidate": candidate, other: twin}
    made = _reproduced(origin, name)
    if made is not None and made.shape == twin.shape and made.dtype == twin.dtype:
        sides[f"{other} with this cause"] = made
    return tuple(_blocks(discrepancy, sides, _Differences(discrepancy, candidate, twin)))


def _blocks(
    discrepancy: Discrepancy, sides: Mapping[str, Tensor], differences: _Differences
) -> Iterator[Block]:
    tall, wide = differences.shape
    worst, rows = differences.worst(), max(1, _MOST // wide)
    first = max(0, min(worst[0] - rows // 2, tall - rows))
    shown = slice(first, first + rows)
    values = {name: values_of_any(_as_matrix(side)[shown]) for name, side in sides.items()}
    ends = (first, min(tall, first + rows)), (0, wide)
    lines = _lines(discrepancy, wide)
    cell = tuple(-(-(e - s) // most) for (s, e), most in zip(ends, _CELLS, strict=True))
    step = discrepancy.record.step if discrepancy.record is not None else 0
    where = f"{discrepancy.site} in step {step}"
    views = _Views(values, differences.of(shown), differences.unit, lines)
    yield views.picture(
        f"The error of {where}, by rows and columns", ends, (cell[0], cell[1]), first
    )
    if cell != (1, 1):
        close = []
        for at, size, (start, end) in zip(worst, _CLOSE, ends, strict=True):
            begin = at // size * size
            close.append((max(start, begin), min(end, begin + size)))
        caption = f"Around its worst element, row {worst[0]}, column {worst[1]}"
        yield views.picture(caption, (close[0], close[1]), (1, 1), first)
    seen, *others = sides.items()
    for name, side in others:
        histogram = histogram_of(seen[1], side)
        if histogram is not None:
            yield distances(histogram, name)


class _Views:
    """The sides of one call as views of the same cells."""

    def __init__(
        self, values: Mapping[str, Values], apart: Values, unit: str, lines: Sequence[GridLine]
    ) -> None:
        self._values, self._apart, self._unit = values, apart, unit
        self._lines = tuple(lines)
        known = np.abs(list(values.values())[1])
        known = known[np.isfinite(known)]
        self._top = float(np.quantile(known, _SCALE) or known.max()) if known.size else 0.0

    def picture(
        self,
        caption: str,
        ends: tuple[tuple[int, int], tuple[int, int]],
        cell: tuple[int, int],
        first: int,
    ) -> ErrorPicture:
        """Return one picture; `first` is the row at which the sides begin."""
        rows, columns = slice(ends[0][0] - first, ends[0][1] - first), slice(*ends[1])
        part = rows, columns
        layers = [PictureLayer("difference", _digits(_largest(self._apart[part], cell)))]
        for name, side in self._values.items():
            cells = _signed(_extreme(side[part], cell), self._top)
            layers.append(PictureLayer(name, cells, signed=True, top=self._top))
        return ErrorPicture(
            caption, ends[0], ends[1], cell, tuple(layers), BUDGET_STEPS, self._unit, self._lines
        )


def _as_matrix(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().reshape(-1, tensor.shape[-1] if tensor.ndim > 1 else len(tensor))


class _Differences:
    """Every element's difference, for some rows at a time: a large output has many gigabytes."""

    def __init__(self, discrepancy: Discrepancy, candidate: Tensor, twin: Tensor) -> None:
        self._candidate, self._twin = _as_matrix(candidate), _as_matrix(twin)
        self._budget = _budget(discrepancy)
        self._has_ulps = twin.dtype in FORMAT_OF_DTYPE and twin.dtype.itemsize > 1
        known = "budgets" if self._budget is not None else "ulps"
        coded = self._budget is None and not self._has_ulps
        self.unit = "or more: other codes" if coded else known

    @property
    def shape(self) -> tuple[int, int]:
        """Return rows and columns."""
        return self._twin.shape[0], self._twin.shape[1]

    def of(self, rows: slice) -> Values:
        """Return the differences of some rows in budgets, or in steps where there are none."""
        candidate, twin = self._candidate[rows], self._twin[rows]
        c, t = values_of_any(candidate), values_of_any(twin)
        alike = (c == t) | (np.isnan(c) & np.isnan(t))
        finite = np.isfinite(c) & np.isfinite(t)
        if self._budget is not None:
            slack, kept = self._budget
            allowed = _allowed(t, slack[rows].double().numpy(), kept)
            with np.errstate(divide="ignore", invalid="ignore"):
                found = np.abs(c - t) / allowed
        elif self._has_ulps:
            found = value_ulp_distance(candidate, twin).double().numpy()
        else:
            found = np.ones(c.shape)
        return np.where(alike, 0.0, np.where(finite, found, math.inf))

    def worst(self) -> tuple[int, int]:
        """Return row and column of the largest difference."""
        (tall, wide), largest, worst = self.shape, -1.0, (0, 0)
        step = max(1, _MOST // wide)
        for first in range(0, tall, step):
            part = self.of(slice(first, first + step))
            row, column = divmod(int(part.argmax()), wide)
            if part[row, column] > largest:
                largest, worst = float(part[row, column]), (first + row, column)
        return worst


def _budget(discrepancy: Discrepancy) -> tuple[Tensor, ElementFormat] | None:
    """Return slack and format of an output; None on an edge, and where no budget is derived."""
    record, context = discrepancy.record, discrepancy.context
    if record is None or record.implied:
        return None
    try:
        call = JudgeableCall.from_twin(context.bound, context.name, record.inputs, record.expected)
        budget = budgets_of(call).get(discrepancy.name)
        if budget is None:
            return None
        slack = budget.slack.expand(record.expected[discrepancy.name].shape)
        return _as_matrix(slack), budget.output
    except CANNOT_RUN:
        return None


def _allowed(t_MK: Values, slack_MK: Values, kept: ElementFormat) -> Values:
    sized = np.nan_to_num(np.abs(t_MK) + slack_MK, posinf=0.0)
    return np.where(slack_MK > 0, (slack_MK + spacing(sized, kept)) / HEADROOM, 0.0)


def _reproduced(origin: DiagnosedOrigin, name: str) -> Tensor | None:
    """Return the output of the twin with the cause that was found; None without one."""
    told, record = origin.diagnosed, origin.discrepancy.record
    variant: FaultVariant | None = None
    context = origin.discrepancy.context
    if told is not None and told.named:
        variant = told.named[0].variant
    elif told is not None and told.described is not None:
        variant, context = told.described.variant, told.described.context or context
    if variant is None or record is None:
        return None
    try:
        with torch.inference_mode():
            made = make(context, record, variant)
    except CANNOT_RUN:
        return None
    return None if made is None else made.outputs.get(name)


def _lines(discrepancy: Discrepancy, wide: int) -> list[GridLine]:
    """Return the parts of an output: tiles, heads and other named columns, quantised blocks."""
    judged, record = discrepancy.judged, discrepancy.record
    compared = None if judged is None else judged.comparison
    found = []
    if compared is not None:
        tile = compared.places.tile
        found = [GridLine(f"tiles of {tile[0]} x {tile[1]}", *tile)]
        found += [
            GridLine(f"{name}s of {width} columns", 0, width)
            for name, width in compared.places.columns.items()
        ]
    output = None if record is None else untouched(record).get(discrepancy.name)
    if output is not None and output.ndim == _BY_TOKEN:
        found.append(GridLine(f"tokens of {output.shape[1]} rows", output.shape[1], 0))
    scales = None if record is None else record.expected.get("block_scale")
    if scales is not None and scales.ndim and scales.shape[-1] and not wide % scales.shape[-1]:
        block = wide // scales.shape[-1]
        found.append(GridLine(f"blocks of {block} columns", 0, block))
    return found


def _starts(extents: tuple[int, int], cell: tuple[int, int]) -> tuple[NDArray[np.int64], ...]:
    return tuple(np.arange(0, n, size) for n, size in zip(extents, cell, strict=True))


def _largest(part_MK: Values, cell: tuple[int, int]) -> Values:
    rows, columns = _starts((part_MK.shape[0], part_MK.shape[1]), cell)
    found: Values = np.maximum.reduceat(np.maximum.reduceat(part_MK, rows, 0), columns, 1)
    return found


def _extreme(part_MK: Values, cell: tuple[int, int]) -> Values:
    """Return the element of the largest magnitude of every cell; NaN where one is not finite."""
    up, down = _largest(part_MK, cell), -_largest(-part_MK, cell)
    return np.where(-down > up, down, up)


def _digits(cells_HW: Values) -> tuple[str, ...]:
    passed = np.searchsorted(np.array(BUDGET_STEPS), cells_HW, side="left")
    return tuple("".join(map(str, row)) for row in passed.tolist())


def _signed(cells_HW: Values, top: float) -> tuple[str, ...]:
    """Return digits from 0, at -top, to 8, at top; a blank where a value is not finite."""
    scaled = np.clip(np.nan_to_num(cells_HW) / (top or 1.0), -1, 1)
    levels = np.rint(4 * scaled).astype(np.int64) + 4
    known = np.isfinite(cells_HW)
    return tuple(
        "".join(str(level) if fine else " " for level, fine in zip(row, good, strict=True))
        for row, good in zip(levels.tolist(), known.tolist(), strict=True)
    )
