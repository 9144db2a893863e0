"""O03: the lookup table that decodes 4-bit codes is wrong at its edges.

Suspected in the first field report: the largest code is missing or saturates at 4, the subnormal
code 0.5 is read as zero, the table continues in even steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.faults.codes.lost_sign import of_elements
from degarble.harness.engine.faults.weight_faults import Words, is_packed, weight_fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import ModelFault
    from degarble.harness.engine.faults.weight_faults import Change

_LARGEST, _SMALLEST = 6.0, 0.5  # of E2M1
_EVEN = 0.5  # the step of a table that forgets its exponent


def _magnitudes(change: Callable[[Tensor], Tensor]) -> Change:
    return of_elements(lambda _tensor, element: change(element.abs()) * element.sign())


def _in_even_steps(magnitude: Tensor) -> Tensor:
    codes = torch.where(magnitude < 2, magnitude / _EVEN, magnitude + 2)
    return torch.where(magnitude == _LARGEST, 7.0, codes) * _EVEN


def _fault(variant: str, title: str, doing: str, change: Callable[[Tensor], Tensor]) -> ModelFault:
    words = Words(
        f"O03.{variant}",
        title,
        "the values of one code are wrong, all others right",
        "E2M1 has 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; prove all 16.",
        doing,
    )
    return weight_fault(words, _magnitudes(change), is_packed)


MODEL_FAULTS = (
    _fault(
        "six_as_four",
        "The largest code decodes to 4 in place of 6",
        "6 decoded as 4 on",
        lambda magnitude: magnitude.clamp(max=4.0),
    ),
    _fault(
        "six_as_zero",
        "The largest code is missing from the table",
        "6 decoded as 0 on",
        lambda magnitude: torch.where(magnitude == _LARGEST, 0.0, magnitude),
    ),
    _fault(
        "half_as_zero",
        "The code of 0.5 decodes to zero",
        "0.5 decoded as 0 on",
        lambda magnitude: torch.where(magnitude == _SMALLEST, 0.0, magnitude),
    ),
    _fault(
        "even_steps",
        "The table goes on in even steps",
        "a table of even steps on",
        _in_even_steps,
    ),
)
