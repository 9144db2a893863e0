"""The vocabulary of faults in quantised tensors: Fault, Case, Match. Imports no sibling.

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

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.harness.formats.quantise import QuantisedTensor


class Part(StrEnum):
    """The part of a quantised tensor that is damaged; each part is judged separately."""

    CODES = "codes"
    BLOCK_SCALE = "block scales"
    TENSOR_SCALE = "tensor scale"


@dataclass(frozen=True, eq=False)
class Case:
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
class Fault:
    """One known way to damage a quantised tensor.

    `inject` returns the damaged tensor, labelled with what the reader believes, or None if the
    fault does not apply (nibbles of an unpacked format). `signature` returns None if it does not
    fit.
    """

    id: str
    title: str
    effect: str
    remedy: str
    part: Part
    inject: Callable[[QuantisedTensor], QuantisedTensor | None]
    signature: Callable[[Case], Match | None]

    @property
    def family(self) -> str:
        """Return the part of the id before the dot."""
        return self.id.partition(".")[0]


def element_codes(tensor: QuantisedTensor) -> Tensor:
    """Return the codes [N, K], one a byte; leading extents are flattened into rows."""
    return tensor.element_codes().reshape(-1, tensor.shape[-1])


def read_scales(tensor: QuantisedTensor) -> Tensor:
    """Return the block scales as read [N, C], one row of scales per row of elements."""
    scales = tensor.linear_scale_codes()
    high = tensor.format.block[0]
    if high > 1:
        scales = scales.repeat_interleave(high, dim=-2)[..., : tensor.shape[-2], :]
    return scales.reshape(-1, scales.shape[-1])


def share_equal(left: Tensor, right: Tensor, rows_N: Tensor) -> float:
    """Return the share of equal numbers in the marked rows; 1 if no row is marked."""
    if not bool(rows_N.any()):
        return 1.0
    return float((left[rows_N] == right[rows_N]).double().mean())


def reproduction(case: Case, fault: QuantisedTensor | None, part: Part) -> tuple[float, float]:
    """Return (reproduced, untouched) for codes or block scales."""
    read = element_codes if part is Part.CODES else read_scales
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
