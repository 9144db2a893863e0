"""Compare one weight with its reference by blocks of rows, and measure its error floor.

`compare` sums over all values and by row, converts one row (or panel of rows) in eight of the
reference there and back, and keeps a sketch of each side. Memory is bounded by a window of rows on
each side and a few numbers a row. A row that is off by half of itself is measured again with its
own round trip, because a row too weak for its format is no fault.

Shape letters: M rows, K columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from degarble.harness.checkpoint.audit.against.codes import Misfits, misfits_of
from degarble.harness.checkpoint.audit.against.floor import ideal_like
from degarble.harness.checkpoint.audit.numbers.table import FORMATS
from degarble.harness.checkpoint.transform.source import row_values
from degarble.harness.formats.number_formats import ScaleDirection

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.harness.checkpoint.view.stored import StoredWeight
    from degarble.harness.formats.weight import Weight

SKETCH = 64  # values of each side that are kept
WINDOW = 1 << 20  # elements of a row block: 4 MiB of float32 a side
PANEL = 128  # rows: a multiple of every block's height
SAMPLED = 8  # one row, or panel, in so many has a round trip, where there are enough
_FEW_ROWS = 512
_ROW_OFF = 0.25  # of a row's squares
_WEAK = 2.0**-20  # of the strongest row's squares: weaker rows are not judged
_LOOKED_AT = 8  # rows that are looked at again
_SKETCH_ROWS = 16


@dataclass
class Compared:
    """Measurements of one weight against its reference."""

    format: str
    reference_format: str
    height: int
    elements: int
    sums: NDArray[np.float64] = field(default_factory=lambda: np.zeros(7))
    floor: NDArray[np.float64] = field(default_factory=lambda: np.zeros(4))
    rows: list[NDArray[np.float64]] = field(default_factory=list)
    sketches: NDArray[np.float64] = field(default_factory=lambda: np.zeros((2, SKETCH)))
    bad_rows: tuple[int, int] = (0, -1)  # how many, the first
    scales: tuple[float, float] = (math.nan, math.nan)  # of inputs, of codes
    misfits: Misfits = field(default_factory=Misfits)

    def facts(self) -> dict[str, float]:
        """Return the measurements by column of the table."""
        there, here, product, error, equal, odd_here, odd_there = map(float, self.sums)
        cosine = product / math.sqrt(there * here) if there and here else math.nan
        sampled, own, ideal, ideal_product = map(float, self.floor)
        worst, worst_error = self._worst()
        return {
            "format": FORMATS.index(self.format),
            "reference_format": FORMATS.index(self.reference_format),
            "elements": self.elements,
            "height": self.height,
            "cosine": min(max(cosine, -1.0), 1.0),
            "gain": _over(product, there),
            "error": math.sqrt(_over(error, there)) if there else (math.inf if error else 0.0),
            "residual": math.sqrt(max(0.0, 1 - cosine * cosine)) if here and there else math.nan,
            "floor": math.sqrt(_over(ideal, sampled)),
            "floor_gain": _over(ideal_product, sampled),
            "over_floor": math.sqrt(own / ideal) if ideal else (math.inf if own else math.nan),
            "equal": equal / max(self.elements, 1),
            "worst_row": worst,
            "worst_row_error": worst_error,
            "bad_rows": self.bad_rows[0],
            "first_bad_row": self.bad_rows[1],
            "odd_here": odd_here,
            "odd_there": odd_there,
            "energy": here,
            "reference_energy": there,
            "input_scale": self.scales[0],
            "decode_scale": self.scales[1],
            "judged_elements": self.misfits.judged,
            "misfits": self.misfits.near,
            "misfits_beyond": self.misfits.beyond,
            "misfit_rows": self.misfits.rows,
            "first_misfit": self.misfits.first,
        }

    def _worst(self) -> tuple[int, float]:
        """Return the row with the largest relative error, weak rows excluded."""
        if not self.rows:
            return -1, math.nan
        rows = np.concatenate(self.rows)
        strong = rows[:, 0] > _WEAK * rows[:, 0].max(initial=0.0)
        share = np.divide(rows[:, 1], rows[:, 0], out=np.full(len(rows), -1.0), where=strong)
        index = int(share.argmax()) if len(share) else -1
        if index < 0 or share[index] < 0:
            return -1, math.nan
        return index, math.sqrt(float(share[index]))


def _over(share: float, whole: float) -> float:
    return share / whole if whole else math.nan


def compare(here: StoredWeight, there: StoredWeight, first: int = 0) -> Compared:
    """Compare a weight with the reference's; `first`: its first row there."""
    shape = here.shape
    elements = math.prod(shape)
    found = Compared(
        _format_name(here), _format_name(there), math.prod(shape[:-1]) if shape else 1, elements
    )
    if not elements:
        return found
    for begin, ours, theirs in _row_blocks(here, there, first):
        if begin == 0:
            found.scales = _scales(ours)
        _take(found, begin, ours, theirs)
    if found.format != "integers":
        found.bad_rows = _bad_rows(found, here, there, first)
    return found


def _format_name(stored: StoredWeight) -> str:
    """Return the format's name; integers are recognised only when they are read."""
    return stored.format.name if stored.format else "plain"


def _row_blocks(
    here: StoredWeight, there: StoredWeight, first: int
) -> Iterator[tuple[int, Weight, Weight]]:
    """Yield (first row, weight here, weight there) by blocks of whole panels."""
    if len(here.shape) not in (1, 2):
        yield 0, here.weight(), there.weight()
        return
    height, width = here.shape[0], math.prod(here.shape[1:])
    step = max(PANEL, WINDOW // max(width, 1) // PANEL * PANEL)
    for begin in range(0, height, step):
        end = min(begin + step, height)
        yield begin, here.rows(begin, end), there.rows(first + begin, first + end)


def _take(found: Compared, begin: int, ours: Weight, theirs: Weight) -> None:
    from degarble.harness.checkpoint.audit.against import loops  # noqa: PLC0415  numba

    if _is_integer(ours) and _is_integer(theirs):
        assert ours.value is not None, "integers are values"
        assert theirs.value is not None, "integers are values"
        found.format = found.reference_format = "integers"
        same = ours.value.to(torch.int64) == theirs.value.to(torch.int64)
        found.sums[loops.EQUAL] += int(same.sum())
        return
    x_MK, y_MK = _floats(ours), _floats(theirs)
    sums = np.empty((len(x_MK), loops.SUMS))
    loops.compare_rows(x_MK.numpy(), y_MK.numpy(), sums)
    found.sums += sums.sum(0)
    found.rows.append(sums[:, [loops.REFERENCE, loops.ERROR]].copy())
    found.misfits = found.misfits.and_then(misfits_of(ours, theirs, y_MK, begin))
    _take_sketch(found, begin, x_MK, y_MK)
    _take_floor(found, begin, ours, y_MK, sums)


def _is_integer(weight: Weight) -> bool:
    return weight.value is not None and not weight.value.dtype.is_floating_point


def _floats(weight: Weight) -> Tensor:
    values = row_values(weight).float()
    return values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values.reshape(1, -1)


def _take_floor(
    found: Compared, begin: int, ours: Weight, y_MK: Tensor, sums: NDArray[np.float64]
) -> None:
    """Add the round trip of the sampled rows."""
    from degarble.harness.checkpoint.audit.against import loops  # noqa: PLC0415  numba

    rows = _due(found, begin, ours, sums[:, loops.ODD_HERE] + sums[:, loops.ODD_THERE] > 0)
    if not len(rows):
        return
    chosen = torch.from_numpy(rows)
    sampled = y_MK[chosen]
    ideal = ideal_like(ours, sampled, chosen)
    trip = np.empty((len(rows), loops.SUMS))
    loops.compare_rows(ideal.numpy(), sampled.numpy(), trip)
    found.floor += (
        sums[rows, loops.REFERENCE].sum(),
        sums[rows, loops.ERROR].sum(),
        trip[:, loops.ERROR].sum(),
        trip[:, loops.PRODUCT].sum(),
    )


def _due(found: Compared, begin: int, ours: Weight, odd: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Choose the sampled rows of a block: one row, or one panel, in SAMPLED.

    Rows, or panels, that hold something not finite are left out.
    """
    numbers = np.arange(begin, begin + len(odd))
    by_panel = ours.storage is not None and ours.storage.format.block[0] > 1
    unit = numbers // PANEL if by_panel else numbers
    due = ~np.isin(unit, unit[odd])
    if found.height > _FEW_ROWS:
        due &= unit % SAMPLED == 0
    return np.flatnonzero(due)


def _take_sketch(found: Compared, begin: int, x_MK: Tensor, y_MK: Tensor) -> None:
    """Keep a few values of a few rows, at places that depend on the shape alone."""
    columns = SKETCH // _SKETCH_ROWS
    for number in range(_SKETCH_ROWS):
        row = (2 * number + 1) * found.height // (2 * _SKETCH_ROWS) - begin
        if not 0 <= row < len(x_MK):
            continue
        # Primes spread the sampled columns, in the same way for every tensor of this width.
        places = (np.arange(columns) * 7919 + number * 104729) % x_MK.shape[1]
        kept = slice(number * columns, (number + 1) * columns)
        for side, values in enumerate((x_MK, y_MK)):
            # Trap: numpy warns where it widens a signalling NaN, which torch does silently.
            found.sketches[side, kept] = values[row][torch.from_numpy(places)].double().numpy()


def _scales(weight: Weight) -> tuple[float, float]:
    """Return the input scale and the decode scale; NaN for absent ones."""
    inputs, scale = weight.input_scale, weight.tensor_scale
    decode = float(scale) if scale is not None and scale.numel() == 1 else math.nan
    if weight.storage is not None and weight.storage.direction is ScaleDirection.ENCODE:
        decode = 1 / decode if decode else math.inf
    return float(inputs) if inputs is not None and inputs.numel() == 1 else math.nan, decode


def _bad_rows(
    found: Compared, here: StoredWeight, there: StoredWeight, first: int
) -> tuple[int, int]:
    """Count rows that are off by half of themselves though their own round trips are not."""
    rows = np.concatenate(found.rows)
    strong = rows[:, 0] > _WEAK * rows[:, 0].max(initial=0.0)
    off = np.flatnonzero(strong & (rows[:, 1] > _ROW_OFF * rows[:, 0]))
    if len(here.shape) != 2 or not len(off):
        return 0, -1
    explained = []
    for row in off[:_LOOKED_AT]:
        begin = int(row) // PANEL * PANEL
        end = min(begin + PANEL, here.shape[0])
        ours, theirs = here.rows(begin, end), there.rows(first + begin, first + end)
        values = _floats(theirs).nan_to_num(0.0, 0.0, 0.0)
        ideal = ideal_like(ours, values, torch.arange(len(values)))[row - begin]
        wanted = values[row - begin]
        trip = float((ideal - wanted).double().square().sum())
        # The round trip alone leaves more than half of the row's error (a quarter of its square).
        if 4 * trip > rows[row, 1]:
            explained.append(row)
    left = np.setdiff1d(off, explained)
    if len(explained) == min(len(off), _LOOKED_AT):
        return 0, -1
    return len(left), int(left[0])
