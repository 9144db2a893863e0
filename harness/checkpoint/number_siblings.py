"""Checks of a matrix beside its siblings: magnitude, direction of its scale, dead experts.

Owns what a matrix is expected to be like: the median of its role in its layer (four experts at
least), else of its role in all layers, else one over the root of its width, which trained matrices
keep to within a factor of a hundred. A median that is itself far from that is not believed: where
every scale of a checkpoint is wrong, siblings agree. A swapped direction moves a magnitude by the
square of the scale, some 2^25, so it is told from everything else by undoing it.

An expert all of whose matrices are tiny is dead, which training does; one of whose matrices is, is
damaged. Kept honest by suites/checkpoint/test_numbers.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from degarble.harness.anatomy.storage import Part
from degarble.harness.checkpoint import rules_numbers as rules
from degarble.harness.checkpoint.judging import Judging, indices, power

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

FEWEST_EXPERTS = 4
FEWEST_LAYERS = 3
PLAUSIBLE = 7.0  # binary orders of magnitude about one over the root of the width
FAR = 6.0  # from siblings: worth a look
TOO_FAR = 10.0  # from siblings: no training does that to one matrix
SWAPPED = 8.0  # how far off a swapped scale is at least
NEAR_SIBLINGS = 4.0  # how near undoing a fault must come, to siblings
ABOUT_TWICE = 2.0


def check_magnitudes(judging: Judging) -> None:
    """Check every linear's magnitude, and name what explains one that is off."""
    table = judging.table
    with np.errstate(divide="ignore", invalid="ignore"):
        level = np.log2(table["rms"])
        decode = np.log2(table["decode_scale"])
    expected, tolerance = expectations(judging)
    off = np.where(judging.linear, level - expected, 0.0)
    zero = judging.linear & (table["zeros"] == table["elements"]) & (table["elements"] > 0)
    low = zero | (off < -FAR)
    dead = _dead_experts(judging, low)
    _report_dead(judging, dead)
    for index in indices(zero & ~dead):
        judging.report(
            rules.TENSOR_ZERO, index, "is zero throughout.", "Restore it from its source."
        )
    scaled = table["scale_bits"] >= 0
    for index in indices(np.isfinite(off) & (np.abs(off) >= FAR) & ~dead & ~zero):
        log = float(decode[index]) if scaled[index] else 0.0
        _explain(judging, index, float(off[index]), log, float(tolerance[index]))


def expectations(judging: Judging) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return each row's expected log2 of the root mean square, and how exact that is."""
    table, units = judging.table, judging.table.units
    width = table["elements"] / np.maximum(table["height"], 1)
    prior = -0.5 * np.log2(np.maximum(width, 1.0))
    with np.errstate(divide="ignore"):
        level = np.log2(table["rms"])
    known = judging.linear & np.isfinite(level)
    expected, tolerance = prior.copy(), np.full(len(table), PLAUSIBLE)
    by_role = group_median([unit.role for unit in units], level, known, FEWEST_LAYERS)
    here = [(unit.role, unit.place) for unit in units]
    by_layer = group_median(here, level, known, FEWEST_EXPERTS)
    for median in (by_role, by_layer):
        believed = np.isfinite(median) & (np.abs(median - prior) <= PLAUSIBLE)
        expected[believed], tolerance[believed] = median[believed], NEAR_SIBLINGS
    return expected, tolerance


def group_median(
    keys: Sequence[Hashable], values: NDArray[np.float64], known: NDArray[np.bool_], fewest: int
) -> NDArray[np.float64]:
    """Return for each row the median of the known values of its group; NaN for small groups."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, key in enumerate(keys):
        if known[index]:
            groups[key].append(index)
    found = np.full(len(values), np.nan)
    medians = {
        key: float(np.median(values[members]))
        for key, members in groups.items()
        if len(members) >= fewest
    }
    for index, key in enumerate(keys):
        found[index] = medians.get(key, np.nan)
    return found


def _dead_experts(judging: Judging, low: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Tell which rows belong to an expert of which every matrix, of two at least, is low."""
    experts: dict[Hashable, list[int]] = defaultdict(list)
    for index in indices(judging.linear):
        unit = judging.table.units[index]
        if unit.expert is not None:
            experts[unit.place, unit.expert].append(index)
    dead = np.zeros(len(low), np.bool_)
    for members in experts.values():
        if len(members) > 1 and low[members].all():
            dead[members] = True
    return dead


def _report_dead(judging: Judging, dead: NDArray[np.bool_]) -> None:
    for index in indices(dead):
        rms = float(judging.table["rms"][index])
        judging.report(
            rules.DEAD_EXPERT,
            index,
            f"belongs to an expert whose matrices are all tiny: root mean square {rms:.3g}.",
            "Compare with the source; a dead expert is harmless where kernels take small scales.",
            rms=rms,
        )


def _explain(judging: Judging, index: int, off: float, decode: float, tolerance: float) -> None:
    """Name what undoes a wrong magnitude; otherwise tell how far it is off."""
    reversed_ = off - 2 * decode
    evidence = {"off_log2": round(off, 2), "decode_scale_log2": round(decode, 2)}
    told = f"makes its weight {power(off)}"
    if abs(off) >= SWAPPED and abs(reversed_) <= min(tolerance, abs(off) / 2):
        stored = float(judging.table["tensor_scale"][index])
        message = f"= {stored:.6g} {told}; read in the other direction, it fits."
        remedy = "It is a divisor under a multiplier's name, or the reverse: store its reciprocal."
        rule, part = rules.SCALE_DIRECTION, Part.TENSOR_SCALE
    elif decode == 0 and judging.table["scale_bits"][index] >= 0:
        rule, part = rules.SCALE_IS_ONE, Part.TENSOR_SCALE
        message, remedy = f"= 1 {told}.", "The real scale was lost; quantise again."
    elif decode and abs(off - decode / 2) <= ABOUT_TWICE and not _holds_input(judging, index, off):
        rule, part = rules.SCALE_TWICE, Part.TENSOR_SCALE
        message = f"{told}, which is the root of it: the scale was applied twice."
        remedy = "Store its root, after comparing with the source."
    elif _is_all_ones(judging, index):
        rule, part = rules.SCALE_IS_ONE, Part.BLOCK_SCALE
        message, remedy = f"= 1 everywhere {told}.", "The real scales were lost; quantise again."
    else:
        rule = rules.MAGNITUDE if abs(off) >= TOO_FAR else rules.MAGNITUDE_FAR
        message = f"is {power(off)}, beside its siblings."
        judging.report(rule, index, message, "Compare with the source.", None, **evidence)
        return
    judging.report(rule, index, message, remedy, part, **evidence)


def _holds_input(judging: Judging, index: int, off: float) -> bool:
    """Tell whether the input scale explains it as well: the rule scales.input_scale_inside."""
    scale = float(judging.table["input_scale"][index])
    return scale > 0 and abs(off - math.log2(scale)) <= ABOUT_TWICE


def _is_all_ones(judging: Judging, index: int) -> bool:
    table = judging.table
    is_one = table["scale_distinct"][index] == 1 and table["scale_largest"][index] == 1.0
    return bool(is_one and table["scale_bits"][index] < 0)
