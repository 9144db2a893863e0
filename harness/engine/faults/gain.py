"""Recognise faults of the tensor scale alone (M01, M02) by an exact gain.

Two scales are the same if they differ by at most 2 ulp of float32: a reciprocal and a product are
correctly rounded, so two producers of one scale are at most one rounding each apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.faults.family import Case, Match
from degarble.harness.report.number_text import number, share

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.formats.quantise import QuantisedTensor

SAME_WITHIN_ULP = 2


def same_scales(left: Tensor, right: Tensor) -> Tensor:
    """Mark scales that are equal within SAME_WITHIN_ULP; a NaN equals only a NaN."""
    both_nan = left.isnan() & right.isnan()
    distance = (left.view(torch.int32).long() - right.view(torch.int32).long()).abs()
    return both_nan | ((distance <= SAME_WITHIN_ULP) & ~left.isnan() & ~right.isnan())


def gain_match(case: Case, fault: QuantisedTensor | None, formula: str) -> Match | None:
    """Compare the stored scale with the twin's after the fault; one number, or one per matrix."""
    scales = [t.tensor_scale for t in (fault, case.twin, case.suspect) if t is not None]
    expected, own, stored = scales if len(scales) == 3 else (None, None, None)
    if expected is None or own is None or stored is None:
        return None
    differs = ~same_scales(own, stored)
    reproduced = float(same_scales(expected, stored)[differs].double().mean())
    first = tuple(differs.nonzero()[0].tolist())
    s, found = float(own[first]), float(stored[first])
    factor = float(
        case.suspect.decode_scale[first].double() / case.twin.decode_scale[first].double()
    )
    return Match(
        reproduced,
        0.0,
        f"The stored scale {number(found, 6)} is {formula} with s = {number(s, 6)}"
        f"{_of_many(reproduced, int(differs.sum()))}: "
        f"values become {number(factor)} times as large.",
    )


def _of_many(reproduced: float, count: int) -> str:
    return "" if count == 1 else f", and so in {share(reproduced)} of {count:,} scales"
