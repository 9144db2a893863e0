"""Switches are tried as edits; one that says that no codes came is no edit where codes came."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.engine.faults.model_faults import FaultVariant, with_outputs
from degarble.harness.engine.recover.described import describe
from degarble.harness.engine.recover.edits import edits_of, numbers_given
from degarble.references.linears import BLOCK_SCALE, CODES, TENSOR_SCALE, X
from degarble.suites.engine.diagnosing import PROMPTS, Double, double, run_prompts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

GROUPED = "layers.1.attn.wo_a"
SWITCH = "wo_a_follows_recipe"


@pytest.fixture(scope="module")
def model() -> Double:
    """Return a run whose grouped product takes codes, which the official code's does not."""
    official = double("v4", "nvfp4-experts")
    candidate, twin = (
        bound.with_switches(**{SWITCH: True}) for bound in (official.candidate, official.twin)
    )
    calls: list[Mapping[str, Tensor]] = []

    def seen(component: str, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        del outputs
        if component == GROUPED:
            calls.append({name: tensor.clone() for name, tensor in inputs.items()})

    candidate.observer = seen
    run_prompts(candidate, PROMPTS)
    candidate.observer = None
    return replace(official, candidate=candidate, twin=twin, calls={GROUPED: tuple(calls)})


def test_scales_of_codes_are_no_numbers_that_are_given(model: Double) -> None:
    """FP8 has float32 scales for blocks, and experts' NVFP4 one for each slot of a token."""
    (record, *_) = model.sights(GROUPED, FaultVariant("", with_outputs(_rows_beside)))
    scales = {BLOCK_SCALE: torch.ones(3, 2), TENSOR_SCALE: torch.ones(3, 6), X: torch.ones(3, 8)}
    assert list(numbers_given(replace(record, inputs={**record.inputs, **scales}))) == [X]


def _rows_beside(_inputs: Any, outputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Sums that no other numbers lead to, so that every edit is tried."""
    return {name: (tensor * tensor.roll(1, 0)).roll(1, 1) for name, tensor in outputs.items()}


def test_codes_that_came_are_not_taken_for_numbers(model: Double) -> None:
    records = model.sights(GROUPED, FaultVariant("rows beside", with_outputs(_rows_beside)))
    context = model.naming(GROUPED)
    assert all(CODES in record.inputs for record in records)
    assert model.differs(GROUPED, records)
    with torch.inference_mode():
        for record in records:
            assert not any(SWITCH in variant.words for variant in edits_of(context, record))
        assert describe(context, records) is None
