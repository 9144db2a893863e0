"""Run the compiled inner loops of a comparison: sums over two rows, and misfits of codes.

float32 arrays in, sums of float64 out; no checks and no threads (the loops release the GIL).
Elements that are not finite on either side are counted, and excluded from every sum. Importing this
module imports numba; a loop is compiled at first use and cached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from degarble.harness.base.compiled_loops import compiled
from degarble.harness.checkpoint.audit.statistics.loops import compiled_sums

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

# Columns of the sums that compare_rows sets for each row.
REFERENCE, HERE, PRODUCT, ERROR, EQUAL, ODD_HERE, ODD_THERE = range(7)
SUMS = 7


@compiled_sums
def compare_rows(here: Floats, there: Floats, sums: Any) -> None:
    """Set sums [rows, SUMS]: squares there and here, products, squared errors, three counts.

    The counts: equal elements, not finite here though finite there, not finite there.
    """
    for r in range(here.shape[0]):
        x_row, y_row = here[r], there[r]
        yy, xx, xy, error = 0.0, 0.0, 0.0, 0.0
        equal, odd_here, odd_there = np.int64(0), np.int64(0), np.int64(0)
        for i in range(x_row.size):
            # Trap: comparing float32 with infinity would widen; a difference with itself does not.
            x_known = (x_row[i] - x_row[i]) == np.float32(0)
            y_known = (y_row[i] - y_row[i]) == np.float32(0)
            known = x_known and y_known
            x = np.float64(x_row[i]) if known else 0.0
            y = np.float64(y_row[i]) if known else 0.0
            gap = x - y
            yy, xx, xy, error = yy + y * y, xx + x * x, xy + x * y, error + gap * gap
            equal += np.int64(known and gap == 0.0)
            odd_here += np.int64(y_known and not x_known)
            odd_there += np.int64(not y_known)
        sums[r, 0], sums[r, 1], sums[r, 2], sums[r, 3] = yy, xx, xy, error
        sums[r, 4], sums[r, 5], sums[r, 6] = equal, odd_here, odd_there


@compiled
def count_misfits(
    codes: Any, scales: Any, how: Any, bounds: Any, there: Floats, counts: Any
) -> None:
    """Count, for each row, codes that are not the nearest: by a small and by a large slack.

    `how`: height and width of blocks, both slacks, and the magnitude that a zero scale may replace.
    """
    height, width, near, beyond, flushed = how
    for r in range(codes.shape[0]):
        first, second = np.int64(0), np.int64(0)
        for i in range(codes.shape[1]):
            scale = scales[r // height, i // width]
            y = np.float64(there[r, i])
            size = abs(y)
            lower = bounds[0, codes[r, i]] * scale
            upper = bounds[1, codes[r, i]] * scale
            gap = max(lower - y, y - upper)
            if scale == 0.0 and size <= flushed:
                gap = 0.0
            if gap > near * size:
                first += 1
            if gap > beyond * size:
                second += 1
        counts[r, 0], counts[r, 1] = first, second
