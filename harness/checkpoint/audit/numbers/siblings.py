"""Compare each matrix with its siblings: magnitude, direction of its scale, dead experts.

Siblings have the same role in other experts or layers. The expected magnitude is the median of the
role in the layer (four experts at least), else in all layers, else one over the root of the width,
which trained matrices keep to within a factor of a hundred. A median far from that last value is
not used: where every scale of a checkpoint is wrong, siblings agree. Inverting a scale changes a
magnitude by the square of the scale, some 2^25, so a swapped direction is recognised by undoing it.

An expert all of whose matrices are tiny is dead, which training can cause, though never for most
experts of a layer. An expert with a single tiny matrix is damaged.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import numpy as np

from degarble.harness.checkpoint.audit import value_rules as rules
from degarble.harness.checkpoint.audit.numbers.factors import report_inside
from degarble.harness.checkpoint.audit.numbers.judging import Judging, indices, power
from degarble.harness.model.storage import Part

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
    """Check every linear's magnitude; report the cause if one explains a deviation."""
    table = judging.table
    with np.errstate(divide="ignore", invalid="ignore"):
        level = np.log2(table["rms"])
        decode = _decoding(judging)
    inside = report_inside(judging, level - prior_of(judging))
    expected, tolerance = expectations(judging)
    off = np.where(judging.linear, level - expected, 0.0)
    zero = judging.linear & (table["zeros"] == table["elements"]) & (table["elements"] > 0)
    low = (zero | (off < -FAR)) & ~inside
    dead = _dead_experts(judging, low)
    _report_dead(judging, dead)
    for index in indices(zero & ~dead):
        judging.report(
            rules.TENSOR_ZERO, index, "is zero throughout.", "Restore it from its source."
        )
    reversed_ = _reversed(judging, off, decode, tolerance)
    for index in indices(np.isfinite(off) & (np.abs(off) >= FAR) & ~dead & ~zero & ~inside):
        if reversed_[index]:
            _report_reversed(judging, index, float(off[index]), float(decode[index]))
        else:
            log = float(decode[index]) if table["scale_bits"][index] >= 0 else 0.0
            _explain(judging, index, float(off[index]), log)


def prior_of(judging: Judging) -> NDArray[np.float64]:
    """Return the log2 of one over the root of each row's width."""
    table = judging.table
    width = table["elements"] / np.maximum(table["height"], 1)
    prior: NDArray[np.float64] = -0.5 * np.log2(np.maximum(width, 1.0))
    return prior


def _decoding(judging: Judging) -> NDArray[np.float64]:
    """Return the log2 of each tensor scale, or of the mean block scale where there is none."""
    table = judging.table
    ends = table["scale_smallest"], table["scale_largest"]
    middle = 0.5 * (np.log2(ends[0]) + np.log2(ends[1]))
    blocks = np.where(np.isfinite(middle) & (table["blocks"] > 0), middle, 0.0)
    found: NDArray[np.float64] = np.where(
        table["scale_bits"] >= 0, np.log2(table["decode_scale"]), blocks
    )
    return found


def _reversed(
    judging: Judging,
    off: NDArray[np.float64],
    decode: NDArray[np.float64],
    tolerance: NDArray[np.float64],
) -> NDArray[np.bool_]:
    """Return a mask of scales that fit as reciprocals, extended to roles where most do."""
    units = judging.table.units
    with np.errstate(invalid="ignore"):
        # Inverting a scale s moves the log2 magnitude by 2 log2(s).
        left = off - 2 * decode
    far = np.abs(off) >= SWAPPED
    fits = far & (np.abs(left) <= np.minimum(tolerance, np.abs(off) / 2))
    roles: dict[str, list[int]] = defaultdict(list)
    for index in indices(judging.linear):
        roles[units[index].role].append(index)
    found = fits.copy()
    for members in roles.values():
        # Dead experts of a swapped role stay too small once the scale is inverted.
        if fits[members].mean() > 0.5:
            found[members] |= far[members] & (off[members] > 0) & (left[members] < 0)
    return found


def expectations(judging: Judging) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return each row's expected log2 of the root mean square, and its tolerance."""
    table, units = judging.table, judging.table.units
    prior = prior_of(judging)
    with np.errstate(divide="ignore"):
        level = np.log2(table["rms"])
    known = judging.linear & np.isfinite(level)
    expected, tolerance = prior.copy(), np.full(len(table), PLAUSIBLE)
    by_role = group_median([unit.role for unit in units], level, known, FEWEST_LAYERS)
    here = [(unit.role, unit.place) for unit in units]
    by_layer = group_median(here, level, known, FEWEST_EXPERTS)
    # The layer's median, taken last, overrides the role's.
    for median in (by_role, by_layer):
        believed = np.isfinite(median) & (np.abs(median - prior) <= PLAUSIBLE)
        expected[believed], tolerance[believed] = median[believed], NEAR_SIBLINGS
    return expected, tolerance


def group_median(
    keys: Sequence[Hashable], values: NDArray[np.float64], known: NDArray[np.bool_], fewest: int
) -> NDArray[np.float64]:
    """Return, for each row, its group's median of known values; NaN for small groups."""
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
    """Return a mask of experts whose matrices, two at least, are all low."""
    experts: dict[tuple[str, int], list[int]] = defaultdict(list)
    for index in indices(judging.linear):
        unit = judging.table.units[index]
        if unit.expert is not None:
            experts[unit.place, unit.expert].append(index)
    tiny = {k: m for k, m in experts.items() if len(m) > 1 and low[m].all()}
    living = Counter(place for place, expert in experts if (place, expert) not in tiny)
    among = Counter(place for place, _ in tiny)
    dead = np.zeros(len(low), np.bool_)
    for (place, _), members in tiny.items():
        # Training never kills most experts of a layer: then something else is wrong.
        if among[place] <= max(living[place], FEWEST_EXPERTS - 1):
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


def _report_reversed(judging: Judging, index: int, off: float, decode: float) -> None:
    table = judging.table
    in_tensor = table["scale_bits"][index] >= 0
    stored = f"= {table['tensor_scale'][index]:.6g}"
    if not in_tensor:
        ends = table["scale_smallest"][index], table["scale_largest"][index]
        stored = f"(from {ends[0]:.4g} to {ends[1]:.4g})"
    judging.report(
        rules.SCALE_DIRECTION,
        index,
        f"{stored} makes its weight {power(off)}; read in the other direction, it fits.",
        "It is a divisor under a multiplier's name, or the reverse: store its reciprocal.",
        Part.TENSOR_SCALE if in_tensor else Part.BLOCK_SCALE,
        off_log2=round(off, 2),
        decode_scale_log2=round(decode, 2),
    )


def _explain(judging: Judging, index: int, off: float, decode: float) -> None:
    """Report the fault that explains a wrong magnitude, or else the deviation itself."""
    evidence = {"off_log2": round(off, 2), "decode_scale_log2": round(decode, 2)}
    told = f"makes its weight {power(off)}"
    if decode == 0 and judging.table["scale_bits"][index] >= 0:
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
    """Return whether the input scale explains it as well (scales.input_scale_inside)."""
    scale = float(judging.table["input_scale"][index])
    return scale > 0 and abs(off - math.log2(scale)) <= ABOUT_TWICE


def _is_all_ones(judging: Judging, index: int) -> bool:
    table = judging.table
    is_one = table["scale_distinct"][index] == 1 and table["scale_largest"][index] == 1.0
    return bool(is_one and table["scale_bits"][index] < 0)
