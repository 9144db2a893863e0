"""Compare each matrix with its siblings: magnitude, direction of its scales, input scales.

Siblings have the same role in other experts or layers.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import numpy as np

from degarble.harness.checkpoint.audit import value_rules as rules
from degarble.harness.checkpoint.audit.rules import INPUT_SCALE_INSIDE
from degarble.harness.checkpoint.audit.table import Judging, indices, power
from degarble.harness.model.tensors import PartKind

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from numpy.typing import NDArray


# --------------------------------------------------------------------------------------------------
# Tensor scales that contain the input scale in many matrices at once. No healthy sibling is needed:
# either all experts or all other linears are too small for matrices of their width, each by about
# its own input scale. Trained matrices are, in the median, within a factor of 8 of one over the
# root of their width. If the other linears are as small, the checkpoint merely has small weights.
# For a single matrix, structure/formats.py decides from the scales alone.

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
            PartKind.TENSOR_SCALE,
            off_log2=round(float(off[index]), 2),
            input_scale=float(scale[index]),
        )
    return found


# --------------------------------------------------------------------------------------------------
# Magnitudes, directions of scales, dead experts. The expected magnitude is the median of the role
# in the layer (four experts at least), else in all layers, else one over the root of the width,
# which trained matrices keep to within a factor of a hundred. A median far from that last value is
# not used: where every scale of a checkpoint is wrong, siblings agree. Inverting a scale changes a
# magnitude by the square of the scale, some 2^25, so a swapped direction is recognised by undoing
# it.
#
# An expert all of whose matrices are tiny is dead, which training can cause, though never for most
# experts of a layer. An expert with a single tiny matrix is damaged.

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
        PartKind.TENSOR_SCALE if in_tensor else PartKind.BLOCK_SCALE,
        off_log2=round(off, 2),
        decode_scale_log2=round(decode, 2),
    )


def _explain(judging: Judging, index: int, off: float, decode: float) -> None:
    """Report the fault that explains a wrong magnitude, or else the deviation itself."""
    evidence = {"off_log2": round(off, 2), "decode_scale_log2": round(decode, 2)}
    text = f"makes its weight {power(off)}"
    if decode == 0 and judging.table["scale_bits"][index] >= 0:
        rule, part = rules.SCALE_IS_ONE, PartKind.TENSOR_SCALE
        message, remedy = f"= 1 {text}.", "The real scale was lost; quantise again."
    elif decode and abs(off - decode / 2) <= ABOUT_TWICE and not _holds_input(judging, index, off):
        rule, part = rules.SCALE_TWICE, PartKind.TENSOR_SCALE
        message = f"{text}, which is the root of it: the scale was applied twice."
        remedy = "Store its root, after comparing with the source."
    elif _is_all_ones(judging, index):
        rule, part = rules.SCALE_IS_ONE, PartKind.BLOCK_SCALE
        message, remedy = f"= 1 everywhere {text}.", "The real scales were lost; quantise again."
    else:
        rule = rules.MAGNITUDE if abs(off) >= TOO_FAR else rules.MAGNITUDE_FAR
        message = f"is {power(off)}, compared with its siblings."
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


# --------------------------------------------------------------------------------------------------
# Input scales: direction, outliers, uncalibrated experts. A healthy input scale stands for a
# largest activation between 2^-7 and 2^14, within a factor of 64 of its role's median in the layer.
#
# If no calibration token reached an expert, ModelOpt gives it the largest scale of the experts that
# were reached, by projection. So where several experts hold that very number, all but one were
# never calibrated: those that hold it in most of their projections, since hardly any token is the
# largest in all of them. Layers in which all experts agree were synchronised and prove nothing.

FULL_SCALE = 2688.0  # 6 * 448: an input scale is the largest activation over it
LARGEST_AMAX = 15.0  # log2: no calibration saw more in the middle of a model's linears
PLAUSIBLE_AMAX = (-7.0, 14.0)

Expert = tuple[str, int | None]  # place and number


def check_inputs(judging: Judging) -> None:
    """Check input scales against those of their siblings."""
    table, units = judging.table, judging.table.units
    scale = table["input_scale"]
    known = np.isfinite(scale) & (scale > 0)
    log = np.zeros(len(table))
    log[known] = np.log2(scale[known])
    roles = [unit.role for unit in units]
    median = group_median(roles, log, known, FEWEST_LAYERS)
    here = group_median([(u.role, u.place) for u in units], log, known, FEWEST_EXPERTS)
    median = np.where(np.isfinite(here), here, median)
    swapped = _swapped(log, median, known)
    for index in indices(swapped):
        amax = float(log[index] + np.log2(FULL_SCALE))
        judging.report(
            rules.INPUT_DIRECTION,
            index,
            f"= {scale[index]:.6g} stands for activations up to 2^{amax:.1f};"
            " read in the other direction, it fits.",
            "It is a divisor under a multiplier's name, or the reverse: store its reciprocal.",
            PartKind.INPUT_SCALE,
            amax_log2=round(amax, 2),
        )
    far = known & ~swapped & np.isfinite(median) & (np.abs(log - median) >= FAR)
    for index in indices(far):
        off = float(log[index] - median[index])
        judging.report(
            rules.INPUT_OUTLIER,
            index,
            f"= {scale[index]:.6g} is {power(off)}, compared with its siblings.",
            "Calibrate with more tokens, or give it the siblings' largest scale on purpose.",
            PartKind.INPUT_SCALE,
            off_log2=round(off, 2),
        )
    _check_ones(judging, known)
    # A scale of 1 is no fallback of ModelOpt's: _check_ones reports it.
    _check_fallbacks(judging, known & (scale != 1))
    if judging.checkpoint.names is None:
        _check_absent(judging)


def _swapped(
    log: NDArray[np.float64], median: NDArray[np.float64], known: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Return a mask of scales that fit only as reciprocals, alone or with their whole role."""
    full = np.log2(FULL_SCALE)
    low, high = PLAUSIBLE_AMAX
    # full + log is the log2 of the largest activation; full - log, if the scale is a divisor.
    fits = (full - log >= low) & (full - log <= high)
    role_is_off = np.isfinite(median) & (full + median >= LARGEST_AMAX)
    beside = np.abs(log - median) >= FAR
    fits_beside = np.abs(-log - median) <= NEAR_SIBLINGS
    alone = (full + log >= LARGEST_AMAX) & ~np.isfinite(median)
    swapped: NDArray[np.bool_] = (fits & (role_is_off | alone)) | (
        ~role_is_off & beside & fits_beside
    )
    return known & swapped


def _check_ones(judging: Judging, known: NDArray[np.bool_]) -> None:
    """Report input scales that are 1 throughout a role, which no calibration yields twice."""
    table, units = judging.table, judging.table.units
    by_role: dict[str, list[int]] = defaultdict(list)
    for index in indices(known):
        by_role[units[index].role].append(index)
    ones = table["input_scale"] == 1
    for role, members in by_role.items():
        if len(members) < 2 or not ones[members].all():
            continue
        for index in members:
            judging.report(
                rules.INPUT_IS_ONE,
                index,
                f"= 1, as in every module of {role}: activations of a largest value of 2688 each.",
                "Calibrate: 1 is what tools write where they measured nothing.",
                PartKind.INPUT_SCALE,
            )


def _check_fallbacks(judging: Judging, known: NDArray[np.bool_]) -> None:
    table, units = judging.table, judging.table.units
    by_layer: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index in indices(known):
        if units[index].expert is not None:
            by_layer[units[index].role, units[index].place].append(index)
    by_role: dict[str, list[int]] = defaultdict(list)
    for (role, _), members in by_layer.items():
        # All experts agree: the layer was synchronised, which proves nothing.
        if len(set(table["input_bits"][members].tolist())) > 1:
            by_role[role] += members
    at_largest: dict[Expert, set[str]] = defaultdict(set)
    for role, members in by_role.items():
        largest = table["input_scale"][members].max()
        same = [index for index in members if table["input_scale"][index] == largest]
        for index in same if len(same) > 1 else []:
            at_largest[units[index].place, units[index].expert].add(role)
    for expert in _unreached(at_largest):
        _report_fallback(judging, expert, sorted(at_largest[expert]))


def _unreached(at_largest: Mapping[Expert, set[str]]) -> list[Expert]:
    """Return the experts with the largest scale in most roles; the one that set it has fewer."""
    most = max(map(len, at_largest.values()), default=0)
    return [expert for expert, roles in at_largest.items() if len(roles) == most]


def _report_fallback(judging: Judging, expert: Expert, roles: list[str]) -> None:
    units = judging.table.units
    index = next(
        i for i, u in enumerate(units) if (u.place, u.expert) == expert and u.role == roles[0]
    )
    scale = float(judging.table["input_scale"][index])
    judging.report(
        rules.INPUT_FALLBACK,
        index,
        f"= {scale:.6g} is the largest of {roles[0]} and stands at other experts too;"
        f" so it is in {len(roles)} projections of this expert.",
        "Calibrate with more tokens, or accept the fallback knowingly.",
        PartKind.INPUT_SCALE,
        projections=roles,
    )


def _check_absent(judging: Judging) -> None:
    """Report modules without an input scale whose role has one; used without a config."""
    table, units = judging.table, judging.table.units
    present, quantised = table["input_bits"] >= 0, table.of_format("NVFP4")
    roles = {units[index].role for index in indices(present & quantised)}
    for index in indices(~present & quantised):
        if units[index].role in roles:
            message = "has no input scale; others of its role have one."
            judging.report(rules.INPUT_ABSENT, index, message, "Calibrate again.")
