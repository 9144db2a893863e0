"""M17: a tensor is silently missing, so that leftover memory or a default is used.

A bias, a norm, a correction bias, a shard, the lower half of a fused matrix (vllm issue 34859,
llama.cpp issue 27178, atlas issue 186). Without effect where the default is what was stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.faults.weight_faults import (
    Words,
    is_matrix,
    is_number,
    of_values,
    weight_fault,
)

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import ModelFault
    from degarble.harness.engine.faults.weight_faults import Change, Kept, Needs


def _zeros(value: Tensor) -> Tensor:
    return torch.zeros_like(value)


def _ones(value: Tensor) -> Tensor:
    return torch.ones_like(value)


def _half(value: Tensor, *, second: bool) -> Tensor:
    made, middle = value.clone(), len(value) // 2
    made[slice(middle, None) if second else slice(middle)] = 0
    return made


def _is_vector(kept: Kept) -> bool:
    return is_number(kept) and not kept.linear


def _fault(variant: str, title: str, doing: str, change: Change, needs: Needs) -> ModelFault:
    words = Words(
        f"M17.{variant}",
        title,
        "one term or one factor is missing; the rest is right",
        "Compare the names in the files with those that were read; refuse what was left over.",
        doing,
    )
    return weight_fault(words, change, needs)


MODEL_FAULTS = (
    _fault("zeros", "A tensor is absent: zeros", "zeros in place of", of_values(_zeros), is_number),
    _fault(
        "ones", "A norm or bias is absent: ones", "ones in place of", of_values(_ones), _is_vector
    ),
    _fault(
        "second_half",
        "The second half of a matrix is absent",
        "zeros in the second half of",
        of_values(lambda value: _half(value, second=True)),
        is_matrix,
    ),
    _fault(
        "first_half",
        "The first half of a matrix is absent",
        "zeros in the first half of",
        of_values(lambda value: _half(value, second=False)),
        is_matrix,
    ),
)
