"""Search for the cause of a wrong weight: undo each candidate until the reference's values appear.

Candidates: signs, packing orders, block scales of other blocks, rows in another order, another
tensor of the reference, single codes. A cause is reported only if undoing it makes the weight
match. Shape letters: M rows, K columns.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from degarble.harness.checkpoint.audit import value_rules as rules
from degarble.harness.checkpoint.audit.against.codes import FP8_SLACK, SLACK, blocks_of
from degarble.harness.checkpoint.audit.against.comparison import (
    CHAINS,
    fits,
    ideal_in,
    reference_weight,
)
from degarble.harness.checkpoint.audit.findings import format_ranges
from degarble.harness.checkpoint.audit.statistics.inference import BLOCK, ORDERS
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.transform.source import row_values
from degarble.harness.checkpoint.view.stored import TORCH_DTYPES
from degarble.harness.checkpoint.view.weight_units import stored_of
from degarble.harness.formats.layouts import ROW_ORDERS
from degarble.harness.model.tensors import PartKind

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.checkpoint.audit.against.codes import Blocks
    from degarble.harness.checkpoint.audit.rules import AuditRule
    from degarble.harness.checkpoint.audit.table import AgainstTable
    from degarble.harness.checkpoint.view.stored import StoredWeight
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.formats.weight import Weight


# --------------------------------------------------------------------------------------------------
# Signs. Signs may be flipped in all of it, in some rows or columns, or without a pattern. A row or
# column counts as flipped if every sign in it is, and only where nearly all others keep theirs.

ALIKE = 0.97  # cosine: what is left is a format's error
_SIGNS_KEPT = 0.97  # zeros have none, and small values become zeros
_DISTINCT = 0.95  # of all rows or columns: kept or turned, and nothing between
_FEWEST = 8  # values that make a cosine of a row or column
_MOST_RUNS = 8


def cosine(ours: Tensor, theirs: Tensor) -> float:
    """Return the cosine of all values; 0 where one side is zero."""
    x, y = ours.double().flatten(), theirs.double().flatten()
    length = float(x.square().sum() * y.square().sum())
    return float((x * y).sum()) / math.sqrt(length) if length else 0.0


def describe_signs(x_MK: Tensor, y_MK: Tensor, first: int = 0) -> str | None:
    """Describe what is wrong with the signs of `x_MK`, or None. `first`: number of its row."""
    if cosine(x_MK.abs(), y_MK.abs()) < ALIKE:
        return None
    if cosine(x_MK, -y_MK) >= ALIKE:
        return "is the reference's with every sign turned."
    lines = describe_flipped_lines(x_MK, y_MK, first)
    if lines is not None:
        return f"has the reference's magnitudes, and every sign turned in {lines}."
    same = float((torch.sign(x_MK) == torch.sign(y_MK)).double().mean())
    if same > _SIGNS_KEPT:
        return None
    lost = " It has no negative value." if bool((x_MK >= 0).all()) else ""
    return f"has the reference's magnitudes, and its sign in {same:.1%} of the places.{lost}"


def describe_flipped_lines(x_MK: Tensor, y_MK: Tensor, first: int = 0) -> str | None:
    """Name the rows, or else the columns, in which every sign is flipped, or None."""
    if x_MK.ndim != 2:
        return None
    for what, axis, start in (("row", 1, first), ("column", 0, 0)):
        if x_MK.shape[axis] < _FEWEST:
            continue
        turned, kept = _flipped(x_MK, y_MK, axis)
        if bool(turned.any()) and float((turned | kept).double().mean()) >= _DISTINCT:
            return describe_lines(what, [start + int(each) for each in turned.nonzero()])
    return None


def _flipped(x_MK: Tensor, y_MK: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return masks of flipped and of kept lines; a line of zeros counts as kept."""
    x, y = x_MK.double(), y_MK.double()
    lengths = (x.square().sum(axis) * y.square().sum(axis)).sqrt()
    cosines = (x * y).sum(axis) / lengths.clamp(min=1e-300)
    return cosines <= -ALIKE, (cosines >= ALIKE) | (lengths == 0)


def describe_lines(what: str, numbers: list[int]) -> str:
    """Format rows or columns by their runs: `64 rows (rows 16-79)`."""
    runs = format_ranges(numbers).split(", ")
    more = f" and {len(runs) - _MOST_RUNS} runs more" if len(runs) > _MOST_RUNS else ""
    if len(numbers) == 1:
        return f"{what} {runs[0]}"
    return f"{len(numbers)} {what}s ({what}s {', '.join(runs[:_MOST_RUNS])}{more})"


# --------------------------------------------------------------------------------------------------
# What misfitting elements have in common: a factor, scales, rows, columns or single codes. Misfits
# in most rows prove nothing by themselves: values that went through another format first, or were
# rounded otherwise, have them everywhere. They count where one cause explains them all (a factor, a
# neighbour's scales), or where most rows or columns have none.

MOSTLY = 0.75  # of the rows or columns: what is there is everywhere
FEWER = 3.0  # times what chance leaves
# Share of misfits that no other format, or way of rounding, leaves so small: by slack.
SPARSE = {SLACK: 0.005, FP8_SLACK: 0.03}


class ReportedCause(NamedTuple):
    """A broken rule, and the text that follows the weight's name."""

    rule: AuditRule
    message: str


def cause_of_codes(weight: Weight, y_MK: Tensor, first: int) -> ReportedCause | None:
    """Return the cause of misfits in some rows of codes, or None.

    `first`: number of the first row.
    """
    # First for values quantised directly, then for values that were FP8 before.
    for slack in (SLACK, FP8_SLACK):
        blocks = blocks_of(weight, y_MK, slack)
        if blocks is None or not bool(blocks.bad.any()):
            return None
        local = blocks.share < SPARSE[slack] or _is_local(blocks)
        cause = _cause_in_factor(blocks, first) or _cause_in_scales(blocks, first, local=local)
        if cause is not None:
            return cause
        if local:
            return _cause_in_codes(weight, blocks, y_MK, first)
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


def _cause_in_factor(blocks: Blocks, first: int) -> ReportedCause | None:
    """Return a factor common to all blocks, to those of some rows, or of some columns."""
    everywhere = torch.ones_like(blocks.bad)
    factor = blocks.factor(everywhere)
    if factor is not None:
        return ReportedCause(rules.GAIN, _times(factor))
    for axis, what, height in ((1, "row", blocks.height), (0, "column", blocks.width)):
        lines = blocks.bad.any(axis)
        chosen = (lines[:, None] if axis else lines[None, :]) & everywhere
        factor = blocks.factor(chosen)
        if factor is not None and bool((~lines).any()):
            start = first if axis else 0
            numbers = [start + i for i in _spread(lines, height)]
            text = (
                f"has block scales {factor:.4g} times as large in {describe_lines(what, numbers)}."
            )
            return ReportedCause(rules.BLOCK_SCALE, text)
    return None


def _times(factor: float) -> str:
    return f"is {factor:.4g} times the reference."


def _cause_in_scales(blocks: Blocks, first: int, *, local: bool) -> ReportedCause | None:
    """Return a reason if block scales differ from those that made the codes."""
    count = int(blocks.bad.sum())
    if not bool((blocks.bad & blocks.explained).any()):
        return None
    rows = [first + i for i in _spread(blocks.bad.any(1), blocks.height)]
    where = f"{count} blocks of {describe_lines('row', rows)}"
    neighbour = blocks.shifted()
    if neighbour is not None:
        return ReportedCause(
            rules.BLOCK_SCALE,
            f"has the scales of {neighbour} in {where}, as wrong scale arithmetic (M12) leaves it.",
        )
    order = blocks.arranged()
    if order is not None:
        return ReportedCause(rules.ORDER, f"has its block scales {order}, in {where}.")
    if not blocks.are_scaled(apart=not local):
        return None
    row, column = (int(each) for each in (blocks.bad & blocks.explained).nonzero()[0])
    stored = float(blocks.stored[row, column])
    low, high = float(blocks.low[row, column]), float(blocks.high[row, column])
    middle = low if math.isinf(high) else math.sqrt(low * high)
    ratio = stored / middle if middle else math.inf
    factor = blocks.factor(blocks.bad)
    every = f", {factor:.3g} times too large each" if factor is not None and count > 1 else ""
    return ReportedCause(
        rules.BLOCK_SCALE,
        f"has other block scales than its codes were made with in {where}{every}: that of row"
        f" {first + row * blocks.height}, block {column} is about {ratio:.3g} times as large.",
    )


def _cause_in_codes(weight: Weight, blocks: Blocks, y_MK: Tensor, first: int) -> ReportedCause:
    rows = [first + i for i in _spread(blocks.bad.any(1), blocks.height)]
    row, column = (int(each) for each in blocks.bad.nonzero()[0])
    piece = (
        slice(row * blocks.height, (row + 1) * blocks.height),
        slice(column * blocks.width, (column + 1) * blocks.width),
    )
    values = weight.values(torch.float32)
    gap = (values[piece] - y_MK[piece]).abs()
    place = divmod(int(gap.argmax()), gap.shape[1])
    text = f"{float(values[piece][place]):.4g} where {float(y_MK[piece][place]):.4g} is meant"
    empty = " All codes of a block are zero." if bool((blocks.bad & blocks.empty).any()) else ""
    return ReportedCause(
        rules.CODES,
        f"has codes that are not the nearest to the reference under their own scale, in"
        f" {int(blocks.bad.sum())} blocks of {describe_lines('row', rows)}: at row"
        f" {first + piece[0].start + place[0]}, column {piece[1].start + place[1]} {text}.{empty}",
    )


def cause_of_values(x_MK: Tensor, y_MK: Tensor, wrong: Tensor, first: int) -> ReportedCause:
    """Return the reason for plain values that differ from the reference's."""
    rows = [first + int(i) for i in wrong.any(1).nonzero()]
    row, column = (int(each) for each in wrong.nonzero()[0])
    here, there = float(x_MK[row, column]), float(y_MK[row, column])
    return ReportedCause(
        rules.BYTES,
        f"differs from the reference in {int(wrong.sum())} values of {describe_lines('row', rows)}:"
        f" at row {first + row}, column {column} {here:.9g} is stored, {there:.9g} is meant.",
    )


def _spread(lines: Tensor, size: int) -> list[int]:
    """Return the element rows, or columns, that some rows or columns of blocks cover."""
    return [int(i) * size + k for i in lines.nonzero() for k in range(size)]


# --------------------------------------------------------------------------------------------------
# The search. Candidates are tried on some panels of rows from the middle of the weight: signs,
# packing orders, block scales of other blocks, rows in another order, another tensor of the
# reference (found by sketch, then read). Where none explains the weight, the measured error stands
# alone. A gain is named if it is a number stored with the weight, or a power of two.

PANEL, PANELS = 128, 8  # rows that are looked at, from the middle of a weight
SKETCHES_ALIKE = 0.9
NAMED_GAIN = 0.01
MOST_CANDIDATES = 3  # weights of one role in one block; the cause found last is used for the others
GAIN_SPREAD = 0.1  # of blocks under scales that are not theirs
_PROBES = 16  # rows that are looked for among all rows
_MOST_ELEMENTS = 1 << 25  # of a matrix whose rows are searched
_MOST_LOOKED_AT = 1 << 22  # elements that are looked at one by one for a cause
_ROW_OFF = 0.25  # of a row's squares
_STRONG = 2.0**-4  # of the squares of most rows, or columns
MOSTLY_VALUES = 0.25  # of plain values that another rounding on the way leaves otherwise
SORTED_ALIKE = 1 - 2.0**-16  # cosine of sorted values: the same ones
_FINER, _COARSER = 0.75, 1.1  # how far a rule may be from the ideal one's error


class CauseSearch:
    """The search for causes in one comparison. It reads panels of weights again."""

    def __init__(self, checkpoint: Checkpoint, reference: Checkpoint, table: AgainstTable) -> None:
        self._checkpoint, self._reference, self._table = checkpoint, reference, table
        self._counts: Counter[tuple[str, str]] = Counter()
        self._last: dict[tuple[str, str], ReportedCause | None] = {}
        self._dense: Counter[tuple[str, str]] = Counter()
        self._coarser: dict[tuple[str, str], list[str | None]] = {}

    def of_values(self, index: int) -> ReportedCause | None:
        """Return the cause of a weight's wrong values, if undoing one restores them."""
        if not self._table["energy"][index] and not self._table["odd_here"][index]:
            return ReportedCause(rules.VALUES, "is zero throughout; the reference is not.")
        unit = self._table.pairs[index].unit
        key = unit.role, unit.place
        other = self._other_tensor(index)
        if other is not None:
            return other
        if 0 < 2 * int(self._table["bad_rows"][index]) <= int(self._table["height"][index]):
            reason = self.of_rows(index)
            if reason is not None:
                return reason
        self._counts[key] += 1
        if self._counts[key] <= MOST_CANDIDATES:
            self._last[key] = self._tried(index)
        return self._last[key]

    def of_rows(self, index: int) -> ReportedCause | None:
        """Return the cause of wrong rows: flipped signs, zeros, moved rows, or elements."""
        here, there, first = self._both(index)
        if len(here.shape) != 2:
            return None
        begin = int(self._table["first_bad_row"][index]) // PANEL * PANEL
        end = min(begin + PANELS * PANEL, here.shape[0])
        ours = row_values(here.rows(begin, end)).float()
        theirs = row_values(there.rows(first + begin, first + end)).float()
        turned = describe_flipped_lines(ours, theirs, begin)
        if turned is not None:
            return ReportedCause(
                rules.SIGN, f"has the reference's magnitudes, and every sign turned in {turned}."
            )
        return self._zero_lines(index) or self._moved_lines(index) or self.of_elements(index)

    def of_elements(self, index: int, *, last: bool = False) -> ReportedCause | None:
        """Return what misfitting elements have in common; None where they prove nothing.

        `last`: no other cause was found.
        """
        table = self._table
        height, rows = int(table["height"][index]), int(table["misfit_rows"][index])
        if not table["misfits"][index]:
            return None
        here, there, _ = self._both(index)
        if here.format is None:
            return self._values_told(index, last=last)
        unit = table.pairs[index].unit
        if last and rows > MOSTLY * height:
            self._dense[unit.role, unit.place] += 1
            if self._dense[unit.role, unit.place] > MOST_CANDIDATES:
                return None  # weights of a role are made in one way, here by another rounding
        return self._codes_told(index, here, there)

    def _codes_told(
        self, index: int, here: StoredWeight, there: StoredWeight
    ) -> ReportedCause | None:
        if len(here.shape) != 2:
            return None
        begin, end, first = self._window(index)
        ours = here.rows(begin, end)
        theirs = row_values(there.rows(first + begin, first + end)).float()
        return cause_of_codes(ours, theirs, begin)

    def _window(self, index: int) -> tuple[int, int, int]:
        """Return the rows to examine: all of a small matrix, else from the first misfit on."""
        here, _, first = self._both(index)
        height, width = here.shape
        begin = 0
        if height * width > _MOST_LOOKED_AT:
            begin = int(self._table["first_misfit"][index]) // PANEL * PANEL
        step = max(PANEL, _MOST_LOOKED_AT // width // PANEL * PANEL)
        return begin, min(begin + step, height), first

    def _values_told(self, index: int, *, last: bool) -> ReportedCause | None:
        """Report plain values that differ: a few, or any number if no other cause is left.

        Another rounding on the way changes many values of another dtype, and none of the
        reference's own.
        """
        here, there, _ = self._both(index)
        stored = here.form.parts[PartKind.VALUE].dtype
        alike = there.format is None and there.form.parts[PartKind.VALUE].dtype == stored
        share = self._table["misfits"][index] / self._table["judged_elements"][index]
        if share > MOSTLY_VALUES and not (last and alike):
            return None
        begin, x, y = 0, _flat(here), _flat(there)
        if len(here.shape) == 2:
            begin, end, first = self._window(index)
            x = row_values(here.rows(begin, end)).float()
            y = row_values(there.rows(first + begin, first + end)).float()
        if there.format is not None:
            wrong = (x - y).abs() > SLACK * y.abs()
        else:
            wrong = (x != y.to(TORCH_DTYPES[stored]).float()) & ~(x.isnan() & y.isnan())
        # Nothing differs where signs of zero do, or bits of NaN.
        return cause_of_values(x, y, wrong, begin) if bool(wrong.any()) else None

    def _whole(self, index: int) -> tuple[Tensor, Tensor] | None:
        """Return all values of both sides; None where they are no matrix, or too many."""
        here, there, first = self._both(index)
        if len(here.shape) != 2 or math.prod(here.shape) > _MOST_ELEMENTS:
            return None
        ours = row_values(here.rows(0, here.shape[0])).float()
        return ours, row_values(there.rows(first, first + here.shape[0])).float()

    def _zero_lines(self, index: int) -> ReportedCause | None:
        """Report zero rows, or columns, that are not zero in the reference."""
        whole = self._whole(index)
        if whole is None:
            return None
        ours, theirs = whole
        for what, axis in (("row", 1), ("column", 0)):
            energy = theirs.double().square().sum(axis)
            # Weak lines become zeros in a healthy conversion as well.
            lines = ~(ours != 0).any(axis) & (energy > _STRONG * energy.median())
            if bool(lines.any()) and not bool(lines.all()):
                text = describe_lines(what, [int(i) for i in lines.nonzero()])
                return ReportedCause(rules.ROWS, f"is zero in {text}, where the reference is not.")
        return None

    def _moved_lines(self, index: int) -> ReportedCause | None:
        """Report rows that are other rows of the reference, or packed in another order."""
        whole = self._whole(index)
        if whole is None:
            return None
        ours, theirs = whole
        off = (ours - theirs).square().sum(1) > _ROW_OFF * theirs.square().sum(1)
        rows = off.nonzero().flatten()
        if not len(rows) or not bool(ours.isfinite().all()):
            return None
        text = describe_lines("row", [int(i) for i in rows])
        packed = _packing(ours[rows], theirs[rows])
        if packed is not None:
            return ReportedCause(rules.ORDER, f"{packed.message[:-1]} in {text}.")
        rows = rows[:_PROBES]
        cosines, found = (_unit_rows(ours[rows]) @ _unit_rows(theirs).T).max(1)
        if float(cosines.median()) < ALIKE or bool((found == rows).any()):
            return None
        return ReportedCause(
            rules.ORDER,
            f"has the reference's rows in other places in {text}: row {int(rows[0])} is its row"
            f" {int(found[0])}.",
        )

    def of_gain(self, index: int, gain: float) -> str:
        """Return a known name for a gain, as `, which is ...`; empty for an unknown one."""
        inputs = float(self._table["input_scale"][index])
        decode = float(self._table["decode_scale"][index])
        if decode == 1.0:
            return ", and its tensor scale is 1: the real one was lost"
        known = {
            "its input scale": inputs,
            "one over its input scale": 1 / inputs if inputs else math.nan,
            "its tensor scale": decode,
            "one over its tensor scale": 1 / decode if decode else math.nan,
            "the square of its tensor scale, so it was stored the other way round": decode**2,
            "the root of its tensor scale, so it was applied twice": math.sqrt(max(decode, 0.0)),
            "448 / 256, the full scales of amax and four-over-six": 448 / 256,
            "256 / 448, the full scales of four-over-six and amax": 256 / 448,
        }
        for name, value in known.items():
            if math.isfinite(value) and abs(gain - value) <= NAMED_GAIN * abs(value):
                return f", which is {name}"
        power = round(math.log2(gain)) if gain > 0 and math.isfinite(gain) else 0
        if power and abs(gain * 2.0**-power - 1) <= NAMED_GAIN:
            return f", which is 2^{power}"
        return ""

    def coarser(self, index: int) -> str | None:
        """Return the coarser format, or chain of two, that explains a weight's error, or None."""
        unit = self._table.pairs[index].unit
        known = self._coarser.setdefault((unit.role, unit.place), [])
        if len(known) >= MOST_CANDIDATES and len(set(known)) == 1:
            return known[0]
        known.append(self._coarser_of(index))
        return known[-1]

    def _coarser_of(self, index: int) -> str | None:
        ours, theirs = self._panels(index)
        whole = float(theirs.double().square().sum())
        if not whole or not bool(theirs.isfinite().all()):
            return None
        error = math.sqrt(float((ours - theirs).double().square().sum()) / whole)
        own = float(np.nan_to_num(self._table["floor"][index]))
        for chain in CHAINS:
            if not all(fits(fmt, theirs.shape[1]) for fmt in chain):
                continue
            made = theirs
            for fmt in chain:
                made = ideal_in(fmt, made)
            left = math.sqrt(float((made - theirs).double().square().sum()) / whole)
            if _FINER * left <= error <= _COARSER * math.hypot(left, own):
                return ", then ".join(fmt.name.partition("_")[0] for fmt in chain)
        return None

    def _tried(self, index: int) -> ReportedCause | None:
        ours, theirs = self._panels(index)
        if not (bool(ours.isfinite().all()) and bool(theirs.isfinite().all())):
            return None
        signs = describe_signs(ours, theirs, self._first(index))
        return (
            (ReportedCause(rules.SIGN, signs) if signs else None)
            or _packing(ours, theirs)
            or self._zero_lines(index)
            or self.of_elements(index)
            or self._block_scales(index, ours, theirs)
            or self._row_order(index, ours)
            or self._other_order(index)
        )

    def _other_order(self, index: int) -> ReportedCause | None:
        """Search for permuted columns, a transposed matrix, or a permuted vector."""
        here, there, first = self._both(index)
        if math.prod(here.shape) > _MOST_ELEMENTS:
            return None
        if len(here.shape) != 2:
            x, y = (_flat(weight).flatten() for weight in (here, there))
            if len(x) > 1 and cosine(x.sort().values, y.sort().values) > SORTED_ALIKE:
                return ReportedCause(rules.ORDER, "has the reference's values in another order.")
            return None
        height, width = here.shape
        ours = row_values(here.rows(0, height)).float()
        theirs = row_values(there.rows(first, first + height)).float()
        if cosine(ours, theirs.T.reshape(height, width)) >= ALIKE:
            return ReportedCause(rules.ORDER, "is the reference's transposed, in its shape.")
        step = max(1, width // _PROBES)
        probes = torch.arange(0, width, step)
        cosines, found = (_unit_rows(ours.T[probes]) @ _unit_rows(theirs.T).T).max(1)
        if float(cosines.median()) < ALIKE:
            return None
        moved = (found != probes).nonzero()
        if not len(moved):
            return None
        place = int(moved[0])
        return ReportedCause(
            rules.ORDER,
            f"has the reference's columns in other places: column {int(probes[place])} is its"
            f" column {int(found[place])}.",
        )

    def _panels(self, index: int) -> tuple[Tensor, Tensor]:
        here, there, first = self._both(index)
        if len(here.shape) != 2:
            return _flat(here), _flat(there)
        begin = _first_row(here.shape[0])
        end = min(begin + PANELS * PANEL, here.shape[0])
        pair = here.rows(begin, end), there.rows(first + begin, first + end)
        return row_values(pair[0]).float(), row_values(pair[1]).float()

    def _first(self, index: int) -> int:
        """Return the first row of the panels."""
        shape = stored_of(self._checkpoint, self._table.pairs[index].unit).shape
        return _first_row(shape[0]) if len(shape) == 2 else 0

    def _both(self, index: int) -> tuple[StoredWeight, StoredWeight, int]:
        pair = self._table.pairs[index]
        first = pair.rows[0] if pair.rows else 0
        here = stored_of(self._checkpoint, pair.unit)
        return here, reference_weight(self._reference, pair), first

    def _other_tensor(self, index: int) -> ReportedCause | None:
        """Search for the weight among the reference's others of its shape."""
        table, pairs = self._table, self._table.pairs
        own = table["sketches"][index, 0].astype(np.float32)
        same = table["elements"] == table["elements"][index]
        same &= table["height"] == table["height"][index]
        same[index] = False
        others = np.flatnonzero(same)
        if not len(others) or table["elements"][index] < own.size:
            return None
        sketches = table["sketches"][others, 1].astype(np.float32)
        lengths = np.linalg.norm(sketches, axis=1) * np.linalg.norm(own)
        cosines = np.divide(sketches @ own, lengths, out=np.zeros(len(others)), where=lengths > 0)
        best = int(others[int(np.argmax(cosines))])
        if cosines.max() < SKETCHES_ALIKE or len(pairs[best].unit.name) == 0:
            return None
        ours, theirs = self._panels(index)[0], self._panels(best)[1]
        if bool((ours == ours.flatten()[0]).all()):
            return None  # a constant panel matches any other constant one
        if ours.shape != theirs.shape or cosine(ours, theirs) < ALIKE:
            return None
        name = shown(pairs[best].reference_name)
        return ReportedCause(rules.OTHER_TENSOR, f"holds what the reference calls {name}.")

    def _block_scales(self, index: int, ours: Tensor, theirs: Tensor) -> ReportedCause | None:
        """Report block scales if every block is right up to a factor of its own."""
        here, _, _ = self._both(index)
        if here.format is None or len(here.shape) != 2:
            return None
        height, width = here.format.extents(*here.shape)
        rows = ours.shape[0] // height * height
        columns = ours.shape[1] // width * width
        if not rows or not columns:
            return None
        x, y = (_in_blocks(values[:rows, :columns], height, width) for values in (ours, theirs))
        products, xx, yy = (x * y).sum(1), (x * x).sum(1), (y * y).sum(1)
        known = (xx > 0) & (yy > 0)
        if not bool(known.any()):
            return None
        cosines = products[known] / (xx[known] * yy[known]).sqrt()
        gains = (products[known] / yy[known]).abs().clamp(min=1e-300)
        if bool(((xx == 0) & (yy > 0)).any()):
            return None  # zeros have no scale that would make values of them
        if float(cosines.median()) < ALIKE or bool((gains.max() / gains.min()) < 1 + GAIN_SPREAD):
            return None
        low, high = float(gains.quantile(0.01)), float(gains.quantile(0.99))
        return ReportedCause(
            rules.BLOCK_SCALE,
            f"has the reference's codes under other block scales: blocks are {low:.3g} to"
            f" {high:.3g} times the reference's.",
        )

    def _row_order(self, index: int, ours: Tensor) -> ReportedCause | None:
        """Search for some rows among all rows of the reference's weight."""
        here, there, first = self._both(index)
        if len(here.shape) != 2 or math.prod(here.shape) > _MOST_ELEMENTS:
            return None
        height = here.shape[0]
        theirs = row_values(there.rows(first, first + height)).float()
        begin = _first_row(height)
        probes = torch.arange(0, len(ours), max(1, len(ours) // _PROBES))[:_PROBES]
        table = _unit_rows(ours[probes]) @ _unit_rows(theirs).T
        cosines, found = table.max(1)
        own = table[torch.arange(len(probes)), begin + probes]
        if float(cosines.median()) < ALIKE or float(own.median()) >= ALIKE:
            return None
        name = _order_of(table, (begin + probes).tolist(), height)
        text = f", in the order `{name}`" if name else ""
        moved = int((own < ALIKE).nonzero()[0])
        return ReportedCause(
            rules.ORDER,
            f"has the reference's rows in other places{text}: row {int(begin + probes[moved])} is"
            f" its row {int(found[moved])}.",
        )


def _first_row(height: int) -> int:
    return max(0, height // 2 - PANELS * PANEL // 2) // PANEL * PANEL


def _packing(ours: Tensor, theirs: Tensor) -> ReportedCause | None:
    if ours.ndim != 2 or ours.shape[1] % BLOCK:
        return None
    blocks = ours.reshape(ours.shape[0], -1, BLOCK)
    for name, order in list(ORDERS.items())[1:]:
        # Try the order and its inverse: the codes may have been moved either way.
        for places in (order, np.argsort(order)):
            moved = blocks[:, :, torch.from_numpy(np.ascontiguousarray(places))]
            if cosine(moved.reshape(ours.shape), theirs) >= ALIKE:
                return ReportedCause(
                    rules.ORDER, f"is packed in the order `{name}`: read so, it is the reference's."
                )
    return None


def _in_blocks(values: Tensor, height: int, width: int) -> Tensor:
    rows, columns = values.shape
    blocks = values.double().view(rows // height, height, columns // width, width)
    return blocks.permute(0, 2, 1, 3).reshape(-1, height * width)


def _unit_rows(values: Tensor) -> Tensor:
    lengths: Tensor = values.norm(dim=1, keepdim=True)
    return values / lengths.clamp(min=1e-30)


def _order_of(cosines: Tensor, rows: list[int], height: int) -> str:
    """Return the known order that maps every row to one like it; `cosines` [rows, height]."""
    for name, order in ROW_ORDERS.items():
        if name == "as_stored" or height % order.multiple:
            continue
        for text, place in ((name, order.source), (f"{name}, undone", order.destination)):
            places = torch.tensor([place(row, height) for row in rows])
            if bool((cosines[torch.arange(len(rows)), places] >= ALIKE).all()):
                return text
    return ""


def _flat(stored: StoredWeight) -> Tensor:
    values = stored.values().float()
    return values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values.reshape(1, -1)
