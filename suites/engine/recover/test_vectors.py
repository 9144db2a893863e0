"""A small weight is solved for, and told by a rule or number by number."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.engine.faults.model_faults import FaultVariant, with_weights
from degarble.harness.formats.weight import Weight
from degarble.suites.engine.recover.test_described import told

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

NORM = "layers.1.attn.q_norm"


def of_vector(name: str, change: Callable[[Tensor], Tensor]) -> FaultVariant:
    def changed(each: str, weight: Weight) -> Weight:
        if each != name or weight.value is None:
            return weight
        return Weight(value=change(weight.value.double()).to(weight.value.dtype))

    return FaultVariant("a changed vector", with_weights(changed))


def shifted(x: Tensor) -> Tensor:
    made = x.clone()
    made[1::2] -= 0.25
    return made


def scattered(x: Tensor) -> Tensor:
    made = x.clone()
    made[[3, 17, 90]] = torch.tensor([0.5, 2.0, -1.0], dtype=x.dtype)
    return made


@pytest.mark.parametrize(("component", "weight", "change", "words"), [
    (NORM, "attn.q_norm", shifted, "columns 1, 3, ... (every 2) are 0.2500 too small"),
    (NORM, "attn.q_norm", scattered, "3 of 128 numbers are others: number 3 was 0.5000"),
    pytest.param(
        "layers.1.attn.hc_pre", "hc_attn_base", lambda x: x + 0.5, "are 0.5000 too large",
        marks=pytest.mark.slow,
    ),
])  # fmt: skip
def test_a_vector_is_told_as_it_was_used(
    component: str, weight: str, change: Callable[[Tensor], Tensor], words: str
) -> None:
    found = told(component, of_vector(weight, change))
    assert found is not None
    assert words in found.sentence
