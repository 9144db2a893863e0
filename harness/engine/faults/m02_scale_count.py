"""M02: the tensor scale is left out, or applied twice.

Two places each think that the other one multiplies, or does not (vllm issue 52405). As in M01 the
proportions stay, and a cosine sees nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from degarble.harness.engine.faults.family import Fault, Part
from degarble.harness.engine.faults.gain import gain_match

if TYPE_CHECKING:
    from degarble.harness.engine.faults.family import Case, Match
    from degarble.harness.formats.quantised import QuantisedTensor


def inject_missing(tensor: QuantisedTensor) -> QuantisedTensor | None:
    """Put 1 in the place of the scale."""
    if tensor.tensor_scale is None:
        return None
    return replace(tensor, tensor_scale=tensor.tensor_scale.new_ones(tensor.tensor_scale.shape))


def inject_applied_twice(tensor: QuantisedTensor) -> QuantisedTensor | None:
    """Put the square in the place of the scale."""
    if tensor.tensor_scale is None:
        return None
    return replace(tensor, tensor_scale=tensor.tensor_scale * tensor.tensor_scale)


def signature_missing(case: Case) -> Match | None:
    """Compare the stored scale with 1."""
    return gain_match(case, inject_missing(case.twin), "1")


def signature_applied_twice(case: Case) -> Match | None:
    """Compare the stored scale with the square of the twin's."""
    return gain_match(case, inject_applied_twice(case.twin), "s * s")


FAULTS = (
    Fault(
        id="M02.missing",
        title="The tensor scale is left out",
        effect="all values are wrong by one factor, 1/s",
        remedy="Multiply by the tensor scale once: in the epilogue, or folded into alpha.",
        part=Part.TENSOR_SCALE,
        inject=inject_missing,
        signature=signature_missing,
    ),
    Fault(
        id="M02.applied_twice",
        title="The tensor scale is applied twice",
        effect="all values are wrong by one factor, s: the component falls silent",
        remedy="Multiply by the tensor scale once; look for an alpha that already contains it.",
        part=Part.TENSOR_SCALE,
        inject=inject_applied_twice,
        signature=signature_applied_twice,
    ),
)
