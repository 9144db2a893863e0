"""What faults planted around attention do, done to stand-ins: a check names the cause, on any CPU.

The faults themselves are those of cutedsl_faults_attention, in kernels' code; here a stand-in is
handed what such a kernel would have computed with, so that the naming is seen without a GPU.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.record.verdict import Verdict
from degarble.suites.runs import cutedsl_cases as cases
from degarble.suites.runs import cutedsl_faults_attention as faults
from degarble.suites.runs.cutedsl_standin import STAND_INS, StandIn

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Made = tuple[torch.Tensor, ...]
    Instead = Callable[[Callable[..., Made], Any, dict[str, Any]], Made]

pytestmark = pytest.mark.slow


def _with(name: str, change: Callable[[Any], Any]) -> Instead:
    return lambda true, problem, given: true(problem, {**given, name: change(given[name])})


def _another_width(true: Callable[..., Made], problem: Any, given: dict[str, Any]) -> Made:
    return true(replace(problem, scale=2 * problem.scale), given)


def _one_fewer(true: Callable[..., Made], problem: Any, given: dict[str, Any]) -> Made:
    (scores,) = true(problem, given)
    seen = (given["positions"] + 1) // problem.ratio - 1
    return (scores.masked_fill(torch.arange(scores.shape[1]) >= seen[:, None], -torch.inf),)


def _transposed(true: Callable[..., Made], problem: Any, given: dict[str, Any]) -> Made:
    if problem.part != "post":
        return true(problem, given)
    return true(problem, {**given, "mix": given["mix"].transpose(1, 2).contiguous()})


def _oldest_out(slots: torch.Tensor) -> torch.Tensor:
    made = slots.clone()
    made[:, 0] = -1
    return made


INSTEAD: dict[str, Instead] = {
    "positions a place later": _with("positions", lambda x: x + 1),
    "sink counted twice": _with("sink", lambda x: x + math.log(2)),
    "logits scaled by another width": _another_width,
    "window of one less": _with("window_slots", _oldest_out),
    "an entry too late": _one_fewer,
    "mix the other way round": _transposed,
}


class Faulty(StandIn):
    """A stand-in of which one kernel does something else."""

    def __init__(self, kernel: str, instead: Instead) -> None:
        super().__init__()
        self._kernel, self._instead = kernel, instead

    def _run(self, kernel: str, problem: Any, tensors: Any) -> Made:
        if kernel != self._kernel:
            made: Made = super()._run(kernel, problem, tensors)
            return made
        given = {name: each for name, each in tensors.items() if each is not None}
        return self._instead(STAND_INS[kernel], problem, given)


@pytest.mark.parametrize("name", INSTEAD)
def test_what_a_planted_fault_does_is_named(tmp_path: Path, name: str) -> None:
    fault = faults.BY_NAME[name]
    model = cases.write_model(tmp_path, "v4", "nvfp4-full", 1)
    prompts = (tuple(range(6, 26)) * 7,) if fault.prompts else (tuple(range(6, 26)), (9, 40, 9))
    cases.capture_by(
        Faulty(fault.kernel, INSTEAD[name]), model.checkpoint, tmp_path / "run", prompts,
        new_tokens=2, components=f"*{fault.component}",
    )  # fmt: skip
    found = cases.checked(tmp_path / "run", model)
    assert found.verdict is Verdict.DIFFERS
    named = {
        each.id
        for origin in found.origins
        if origin.trouble.component.endswith(fault.component) and origin.diagnosed
        for each in origin.diagnosed.named
    }
    assert any(each.startswith(f"{fault.cause}.") for each in named), named
