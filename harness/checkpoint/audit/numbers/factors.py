"""Detect tensor scales that contain the input scale in many matrices at once.

No healthy sibling is needed: either all experts or all other linears are too small for matrices of
their width, each by about its own input scale. Trained matrices are, in the median, within a factor
of 8 of one over the root of their width. If the other linears are as small, the checkpoint merely
has small weights. For a single matrix, structure/scalars.py decides from the scales alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from degarble.harness.checkpoint.audit.numbers.judging import Judging, indices
from degarble.harness.checkpoint.audit.rules import INPUT_SCALE_INSIDE
from degarble.harness.model.storage import Part

if TYPE_CHECKING:
    from numpy.typing import NDArray

FEWEST = 8  # modules that have to show it together
SMALL = -4.5  # log2: no model has half of its matrices below that
EXPLAINED = 3.0  # how near the input scale has to come to what is lost, in the median
NEAR = 4.0  # and for one module
APART = 3.0  # from linears without an input scale, if there are enough
FEWEST_OTHERS = 3


def report_inside(judging: Judging, off: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Report modules too small by about their input scale (`off`: log2); return a mask."""
    table = judging.table
    scale = table["input_scale"]
    log = np.log2(np.where(np.isfinite(scale) & (scale > 0), scale, 1.0))
    seen = judging.linear & np.isfinite(off)
    known = seen & (log < 0) & (table["scale_bits"] >= 0) & table.of_format("NVFP4")
    others = seen & (table["input_bits"] < 0)
    # Linears without an input scale cannot have the fault: they show the checkpoint's own level.
    usual = float(np.median(off[others])) if others.sum() >= FEWEST_OTHERS else 0.0
    is_expert = np.array([unit.expert is not None for unit in table.units], np.bool_)
    found = np.zeros(len(table), np.bool_)
    for family in (known & is_expert, known & ~is_expert):
        if family.sum() < FEWEST:
            continue
        lost = float(np.median(off[family]))
        unexplained = float(np.median(np.abs(off - log)[family]))
        if lost <= min(SMALL, usual - APART) and unexplained <= EXPLAINED:
            found |= family & (off < 0) & (np.abs(off - log) <= NEAR)
    for index in indices(found):
        judging.report(
            INPUT_SCALE_INSIDE,
            index,
            f"makes its weight 2^{-off[index]:.1f} smaller than matrices of its width are;"
            f" divided by the module's input_scale {scale[index]:.4g}, it fits, as others do.",
            "Divide it by input_scale, which belongs to the activations.",
            Part.TENSOR_SCALE,
            off_log2=round(float(off[index]), 2),
            input_scale=float(scale[index]),
        )
    return found
