"""The vocabulary of faults in quantised tensors. Imports no sibling.

Owns what a fault of one tensor is (an id, words for people, the part it damages, `inject` and
`signature`), and the reproduction on which every signature rests: apply the fault to the twin, and
see how much of what differs in the suspect comes out. A cause is never inferred from a symptom.
What keeps it honest: suites/engine/faults/ injects every fault and asks every signature about it.

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

    from degarble.harness.formats.quantised import QuantisedTensor


class Part(StrEnum):
    """What of a quantised tensor is damaged. The parts are judged one by one."""

    CODES = "codes"
    BLOCK_SCALE = "block scales"
    TENSOR_SCALE = "tensor scale"


@dataclass(frozen=True, eq=False)
class Case:
    """One part that differs: the twin (what a correct producer writes), the suspect, where.

    `rows` marks the rows in which the part differs; a signature looks at no others.
    """

    twin: QuantisedTensor
    suspect: QuantisedTensor
    rows: Tensor


@dataclass(frozen=True)
class Match:
    """How well a fault explains a case.

    `reproduced` is the share of the data in the differing rows that the twin with the fault gives;
    `untouched` the share that the twin gives as it is.
    """

    reproduced: float
    untouched: float
    evidence: str


@dataclass(frozen=True)
class Fault:
    """One known way to damage a quantised tensor.

    `inject` returns the damaged tensor, its labels telling what the reader believes; None where the
    fault cannot be (nibbles of an unpacked format). `signature` returns None where it does not fit.
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
        """The part of the id before the dot."""
        return self.id.partition(".")[0]


def element_codes(tensor: QuantisedTensor) -> Tensor:
    """Return one code a byte [N, K], rows of all leading extents below each other."""
    return tensor.element_codes().reshape(-1, tensor.shape[-1])


def read_scales(tensor: QuantisedTensor) -> Tensor:
    """Return the block scales as they are read [N, C], one row of scales a row of elements."""
    scales = tensor.linear_scale_codes()
    high = tensor.format.block[0]
    if high > 1:
        scales = scales.repeat_interleave(high, dim=-2)[..., : tensor.shape[-2], :]
    return scales.reshape(-1, scales.shape[-1])


def share_equal(left: Tensor, right: Tensor, rows_N: Tensor) -> float:
    """Return the share of equal numbers in the marked rows; 1 where no row is marked."""
    if not bool(rows_N.any()):
        return 1.0
    return float((left[rows_N] == right[rows_N]).double().mean())


def reproduction(case: Case, fault: QuantisedTensor | None, part: Part) -> tuple[float, float]:
    """Return (reproduced, untouched) of a part of codes or block scales."""
    read = element_codes if part is Part.CODES else read_scales
    suspect = read(case.suspect)
    untouched = share_equal(read(case.twin), suspect, case.rows)
    if fault is None:
        return 0.0, untouched
    return share_equal(read(fault), suspect, case.rows), untouched


def same_values(left: QuantisedTensor, right: QuantisedTensor) -> bool:
    """Whether two tensors decode alike, bit for bit: then a fault between them had no effect."""
    return torch.equal(
        dequantise(left, torch.float32).view(torch.int32),
        dequantise(right, torch.float32).view(torch.int32),
    )
