"""Compare input scales with those of their siblings: direction, outliers, uncalibrated experts.

A healthy input scale stands for a largest activation between 2^-7 and 2^14, within a factor of 64
of its role's median in the layer.

If no calibration token reached an expert, ModelOpt gives it the largest scale of the experts that
were reached, by projection. So where several experts hold that very number, all but one were never
calibrated: those that hold it in most of their projections, since hardly any token is the largest
in all of them. Layers in which all experts agree were synchronised and prove nothing.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from degarble.harness.checkpoint.audit import value_rules as rules
from degarble.harness.checkpoint.audit.numbers.judging import Judging, indices, power
from degarble.harness.checkpoint.audit.numbers.siblings import (
    FAR,
    FEWEST_EXPERTS,
    FEWEST_LAYERS,
    NEAR_SIBLINGS,
    group_median,
)
from degarble.harness.model.storage import Part

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

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
            Part.INPUT_SCALE,
            amax_log2=round(amax, 2),
        )
    far = known & ~swapped & np.isfinite(median) & (np.abs(log - median) >= FAR)
    for index in indices(far):
        off = float(log[index] - median[index])
        judging.report(
            rules.INPUT_OUTLIER,
            index,
            f"= {scale[index]:.6g} is {power(off)}, beside its siblings.",
            "Calibrate with more tokens, or give it the siblings' largest scale on purpose.",
            Part.INPUT_SCALE,
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
                Part.INPUT_SCALE,
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
        Part.INPUT_SCALE,
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
