"""Known answers of a kernel: the definition agrees with itself, and a wrong byte is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.formats.block_formats import NVFP4
from degarble.harness.formats.layouts import to_layout
from degarble.harness.formats.quantise import quantise
from degarble.harness.record.verdict import Verdict
from degarble.harness.runs import night_kernels
from degarble.harness.runs.night_kernels import mismatches, values_of
from degarble.harness.runs.night_record import Asked
from degarble.kernels.common.quantise_problem import LAYOUTS, QuantiseProblem

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


def by_definition(values: Tensor, scale: float, problem: QuantiseProblem) -> tuple[Tensor, Tensor]:
    made = quantise(values, NVFP4, decode_scale=torch.tensor(scale))
    return made.codes, to_layout(made.block_scale, problem.scale_layout)


def with_wrong_byte(
    values: Tensor, scale: float, problem: QuantiseProblem
) -> tuple[Tensor, Tensor]:
    codes, scales = by_definition(values, scale, problem)
    codes[-1, -1] ^= 1
    scales.view(-1)[0] ^= 1
    return codes, scales


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_is_compared(layout: str) -> None:
    problem = QuantiseProblem(130, 528, layout)
    values = values_of(130, 528)
    assert torch.equal(values, values_of(130, 528))
    assert mismatches(problem, values, 0.0123, by_definition) == 0
    assert mismatches(problem, values, 0.0123, with_wrong_byte) == 2


def test_a_kernel_that_differs_turns_the_step_red(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = Asked(tmp_path, tmp_path, tmp_path, "2026-11-22", gpu=True)
    monkeypatch.setattr(night_kernels, "EXTENTS", ((1, 16), (130, 528)))
    monkeypatch.setattr(night_kernels, "_on_device", by_definition)
    assert night_kernels.kernels(asked, {}).verdict is Verdict.AGREES
    monkeypatch.setattr(night_kernels, "_on_device", with_wrong_byte)
    found = night_kernels.kernels(asked, {})
    assert found.verdict is Verdict.DIFFERS
    assert found.lines[0] == "1 x 16, linear, scale 1.0: 2 bytes differ"


def test_without_a_gpu_both_say_so_and_claim_nothing(tmp_path: Path) -> None:
    asked = Asked(tmp_path, tmp_path, tmp_path, "2026-11-22")
    for step in (night_kernels.kernels, night_kernels.figures):
        found = step(asked, {})
        assert (found.verdict, found.red) == (Verdict.UNDECIDED, False)
