"""Faults in quantised tensors: what is damaged, and how a signature recognises it.

Every signature rests on reproduction: apply the fault to the twin, and measure how much of the
suspect's difference that reproduces. A cause is never inferred from a symptom.

Shape letters: N rows of all leading extents together, K elements, C block scales of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from degarble.harness.formats.quantise import dequantise
from degarble.harness.report.number_text import number, share

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.harness.formats.quantise import QuantisedTensor


# --------------------------------------------------------------------------------------------------
# The vocabulary of faults in quantised tensors: Fault, Case, Match. Imports no sibling.


class TensorPart(StrEnum):
    """The part of a quantised tensor that is damaged; each part is judged separately."""

    CODES = "codes"
    BLOCK_SCALE = "block scales"
    TENSOR_SCALE = "tensor scale"
    ZERO_POINT = "zero points"


@dataclass(frozen=True, eq=False)
class DifferingPart:
    """One differing part: the twin (what a correct producer writes), the suspect, and the rows.

    `rows` marks the rows in which the part differs; a signature considers no others.
    """

    twin: QuantisedTensor
    suspect: QuantisedTensor
    rows: Tensor


@dataclass(frozen=True)
class Match:
    """How well a fault explains a case.

    `reproduced` is the share of the data in differing rows that the twin equals once the fault is
    applied, `untouched` the share that it equals without the fault.
    """

    reproduced: float
    untouched: float
    evidence: str


@dataclass(frozen=True)
class TensorFault:
    """One known way to damage a quantised tensor.

    `inject` returns the damaged tensor, labelled with what the reader believes, or None if the
    fault does not apply (nibbles of an unpacked format). `signature` returns None if it does not
    fit.
    """

    id: str
    title: str
    effect: str
    remedy: str
    part: TensorPart
    inject: Callable[[QuantisedTensor], QuantisedTensor | None]
    signature: Callable[[DifferingPart], Match | None]

    @property
    def family(self) -> str:
        """Return the part of the id before the dot."""
        return self.id.partition(".")[0]


def element_codes(tensor: QuantisedTensor) -> Tensor:
    """Return the codes [N, K], one a byte; leading extents are flattened into rows."""
    return tensor.element_codes().reshape(-1, tensor.shape[-1])


def read_scales(tensor: QuantisedTensor) -> Tensor:
    """Return the block scales as read [N, C], one row of scales per row of elements."""
    return spread_rows(tensor, tensor.linear_scale_codes())


def spread_rows(tensor: QuantisedTensor, number_RC: Tensor) -> Tensor:
    """Return one row of block numbers [N, C] per row of elements."""
    high = tensor.format.extents(*tensor.shape[-2:])[0]
    if high > 1:
        number_RC = number_RC.repeat_interleave(high, dim=-2)[..., : tensor.shape[-2], :]
    return number_RC.reshape(-1, number_RC.shape[-1])


def share_equal(left: Tensor, right: Tensor, rows_N: Tensor) -> float:
    """Return the share of equal numbers in the marked rows; 1 if no row is marked."""
    if not bool(rows_N.any()):
        return 1.0
    return float((left[rows_N] == right[rows_N]).double().mean())


def read_zero_points(tensor: QuantisedTensor) -> Tensor:
    """Return the zero points as read [N, C], one row of them per row of elements."""
    assert tensor.zero_point is not None, "a format with zero points"
    return spread_rows(tensor, tensor.zero_point)


_READ = {
    TensorPart.CODES: element_codes,
    TensorPart.BLOCK_SCALE: read_scales,
    TensorPart.ZERO_POINT: read_zero_points,
}


def reproduction(
    case: DifferingPart, fault: QuantisedTensor | None, part: TensorPart
) -> tuple[float, float]:
    """Return (reproduced, untouched) for codes, block scales or zero points."""
    read = _READ[part]
    suspect = read(case.suspect)
    untouched = share_equal(read(case.twin), suspect, case.rows)
    if fault is None:
        return 0.0, untouched
    return share_equal(read(fault), suspect, case.rows), untouched


def same_values(left: QuantisedTensor, right: QuantisedTensor) -> bool:
    """Return whether two tensors decode to the same bits, so that a fault has had no effect."""
    return torch.equal(
        dequantise(left, torch.float32).view(torch.int32),
        dequantise(right, torch.float32).view(torch.int32),
    )


# --------------------------------------------------------------------------------------------------
# Recognise faults of the tensor scale alone (M01, M02) by an exact gain.
#
# Two scales are the same if they differ by at most 2 ulp of float32: a reciprocal and a product are
# correctly rounded, so two producers of one scale are at most one rounding each apart.

SAME_WITHIN_ULP = 2


def same_scales(left: Tensor, right: Tensor) -> Tensor:
    """Mark scales that are equal within SAME_WITHIN_ULP; a NaN equals only a NaN."""
    both_nan = left.isnan() & right.isnan()
    distance = (left.view(torch.int32).long() - right.view(torch.int32).long()).abs()
    return both_nan | ((distance <= SAME_WITHIN_ULP) & ~left.isnan() & ~right.isnan())


def gain_match(case: DifferingPart, fault: QuantisedTensor | None, formula: str) -> Match | None:
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
