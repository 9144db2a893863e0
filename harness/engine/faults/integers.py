"""Faults of integers by group, M15: zero points and scales of a group are read wrongly.

GPTQ's first format stores a zero point less 1, its second as it is; a reader of one decodes files
of the other with every zero point off by one (vllm and GPTQModel handle both since `gptq_v2`). An
index of groups that is off by one takes the numbers of the neighbour.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from degarble.harness.engine.faults.tensor_faults import (
    DifferingPart,
    Match,
    TensorFault,
    TensorPart,
    reproduction,
)
from degarble.harness.engine.faults.weight_faults import of_fault
from degarble.harness.formats.number_formats import TableFormat
from degarble.harness.report.number_text import share

if TYPE_CHECKING:
    from collections.abc import Callable

    from degarble.harness.engine.faults.model_faults import ModelFault
    from degarble.harness.engine.faults.weight_faults import WeightStorage
    from degarble.harness.formats.quantise import QuantisedTensor

    Inject = Callable[[QuantisedTensor], QuantisedTensor | None]


def inject_zero_point(tensor: QuantisedTensor, step: int) -> QuantisedTensor | None:
    """Move every zero point by one code."""
    if tensor.zero_point is None:
        return None
    return replace(tensor, zero_point=tensor.zero_point + step)


def inject_zero_point_of_next_group(tensor: QuantisedTensor) -> QuantisedTensor | None:
    """Give each group the zero point of the next one in its row."""
    if tensor.zero_point is None or tensor.zero_point.shape[-1] < 2:
        return None
    return replace(tensor, zero_point=tensor.zero_point.roll(-1, -1))


def inject_scale_of_group(tensor: QuantisedTensor, step: int) -> QuantisedTensor | None:
    """Give each group the scale of a neighbour in its row."""
    by_group = isinstance(tensor.format.element, TableFormat) and tensor.block_scale.shape[-1] > 1
    return replace(tensor, block_scale=tensor.block_scale.roll(step, -1)) if by_group else None


def _signature(case: DifferingPart, inject: Inject, part: TensorPart, action: str) -> Match | None:
    fault = inject(case.twin)
    if fault is None:
        return None
    reproduced, untouched = reproduction(case, fault, part)
    return Match(
        reproduced,
        untouched,
        f"{action} reproduces {share(reproduced)} of the {part}; as declared {share(untouched)}"
        " agree.",
    )


def _fault(
    texts: tuple[str, str, str, str], inject: Inject, part: TensorPart, remedy: str
) -> TensorFault:
    name, title, effect, action = texts
    return TensorFault(
        id=f"M15.{name}",
        title=title,
        effect=effect,
        remedy=remedy,
        part=part,
        inject=inject,
        signature=partial(_signature, inject=inject, part=part, action=action),
    )


_VERSION = (
    "Read zero points by the file's version: GPTQ v1 (checkpoint_format gptq) stores them less 1,"
    " gptq_v2 and AWQ as they are."
)
_GROUP = "Take column // group_size as the group, or g_idx where there is one."
_SHIFTED = "every value is off by one step of its group: text is garbled, nothing is NaN"
_NEIGHBOUR = "each group is decoded with another's numbers: wrong by a varying amount"

INTEGER_GROUP_TENSOR_FAULTS = (
    _fault(
        ("zero_point_high", "Zero points are one too high", _SHIFTED, "Adding 1 to zero points"),
        partial(inject_zero_point, step=1),
        TensorPart.ZERO_POINT,
        _VERSION,
    ),
    _fault(
        ("zero_point_low", "Zero points are one too low", _SHIFTED, "Taking 1 off zero points"),
        partial(inject_zero_point, step=-1),
        TensorPart.ZERO_POINT,
        _VERSION,
    ),
    _fault(
        (
            "zero_point_next_group",
            "Each group has the zero point of the next one",
            _NEIGHBOUR,
            "Moving zero points by one group",
        ),
        inject_zero_point_of_next_group,
        TensorPart.ZERO_POINT,
        _GROUP,
    ),
    _fault(
        (
            "scale_next_group",
            "Each group has the scale of the next one",
            _NEIGHBOUR,
            "Moving scales by one group",
        ),
        partial(inject_scale_of_group, step=-1),
        TensorPart.BLOCK_SCALE,
        _GROUP,
    ),
    _fault(
        (
            "scale_previous_group",
            "Each group has the scale of the one before",
            _NEIGHBOUR,
            "Moving scales back by one group",
        ),
        partial(inject_scale_of_group, step=1),
        TensorPart.BLOCK_SCALE,
        _GROUP,
    ),
)


def _model_fault(fault: TensorFault) -> ModelFault:
    """Lift a fault to linears of integers, whether or not a recipe names their format."""
    words = fault.signature.keywords["action"]  # type: ignore[attr-defined]
    return of_fault(fault, words[0].lower() + words[1:], _may_be_integers)


def _may_be_integers(kept: WeightStorage) -> bool:
    return kept.linear and (kept.form is None or isinstance(kept.form.element, TableFormat))


INTEGER_GROUP_FAULTS = tuple(map(_model_fault, INTEGER_GROUP_TENSOR_FAULTS))
