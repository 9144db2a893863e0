"""Adding a residual in front of a norm: problem, form, tactic."""

from __future__ import annotations

import pytest

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.kernels.primitives.quantise_problem import REGISTERS_OF_PROCESSOR
from degarble.kernels.rows import problem as facts
from degarble.kernels.rows.problem import NormProblem, ResidualProblem, norm_threads


def test_refuses_what_a_norm_refuses() -> None:
    with pytest.raises(ShapeMismatch, match="matrix to norm"):
        ResidualProblem(1, 100)
    with pytest.raises(UnknownName, match="dtype of a norm's weight"):
        ResidualProblem(1, 128, weight="fp16")
    with pytest.raises(InvalidArgument, match="epsilon"):
        ResidualProblem(1, 128, 2.0)


def test_two_rows_are_read_and_two_written() -> None:
    problem = ResidualProblem(8192, 7168, weight="fp32")
    assert problem.bytes_moved == 4 * 2 * 8192 * 7168 + 4 * 7168
    assert problem.norm == NormProblem(8192, 7168, weight="fp32")


@pytest.mark.parametrize("columns", [64, 512, 1024, 1040, 7168, 16_384])
def test_thread_blocks_fit_a_processor(columns: int) -> None:
    problem = ResidualProblem(8192, columns)
    tactic = facts.choose_residual_tactic(problem)
    held = tactic.walkers * norm_threads(problem.norm) * facts.RESIDUAL_REGISTERS
    assert held <= REGISTERS_OF_PROCESSOR
    assert facts.residual_grid(problem, tactic, 132) <= 132 * tactic.walkers
    assert facts.choose_residual_form(problem, "sm_90a").narrow is (columns <= 1024)
    assert facts.residual_grid(ResidualProblem(1, columns), tactic, 132) == 1
