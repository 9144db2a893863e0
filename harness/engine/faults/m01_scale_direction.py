"""M01: the tensor scale is used in the wrong direction, 1/s instead of s.

One producer stores the scale that decodes, another the scale that encodes; who reads one as the
other is off by its square (modular issue 6600, vllm issue 55643). The proportions stay, so a cosine
stays perfect while the magnitude is wrong by up to ten orders.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from degarble.harness.engine.faults.family import Fault, Part
from degarble.harness.engine.faults.gain import gain_match

if TYPE_CHECKING:
    from degarble.harness.engine.faults.family import Case, Match
    from degarble.harness.formats.quantised import QuantisedTensor


def inject(tensor: QuantisedTensor) -> QuantisedTensor | None:
    """Store the reciprocal and leave the label as it was."""
    if tensor.tensor_scale is None:
        return None
    return replace(tensor, tensor_scale=tensor.tensor_scale.reciprocal())


def signature(case: Case) -> Match | None:
    """Compare the stored scale with the reciprocal of the twin's."""
    return gain_match(case, inject(case.twin), "1 / s")


FAULTS = (
    Fault(
        id="M01.inverse",
        title="The tensor scale is used in the wrong direction, 1/s instead of s",
        effect="all values are wrong by one factor, s squared: saturation, or silence",
        remedy="Store the scale that multiplies codes, or declare the direction as encode.",
        part=Part.TENSOR_SCALE,
        inject=inject,
        signature=signature,
    ),
)
