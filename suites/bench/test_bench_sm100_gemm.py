"""The bench of the Blackwell NVFP4 GEMM: its tactics, a row, and what it does without a B200."""

from __future__ import annotations

import pytest

from degarble.harness.base.errors import EXIT_REFUSED
from degarble.kernels.gemm import tensor_memory
from degarble.kernels.gemm.problem import GemmProblem
from degarble.kernels.runtime import targets
from degarble.suites.bench import bench_sm100_gemm as bench
from degarble.suites.bench import gpu
from degarble.suites.bench.bench_quantise_kernel import Arm, Figure
from degarble.suites.kernels import sm100_checks as blackwell
from degarble.suites.kernels import sm100_table


def test_every_tactic_meets_a_shape_that_it_can_address() -> None:
    seen = set()
    for m, n, k in bench.SHAPES:
        forms = bench.tactics(m)
        seen |= {blackwell.named(form) for form in forms}
        assert len(forms) == len({blackwell.named(form) for form in forms})
        for form in forms:
            tensor_memory.require_extents(GemmProblem(m, n, k, "nvfp4", "e4m3"), form)
    families = (blackwell.forms(), blackwell.pairs(), blackwell.swapped())
    assert {blackwell.named(form) for family in families for form in family} <= seen


def test_a_row_is_held_against_its_bound() -> None:
    problem = GemmProblem(4096, 7168, 4096, "nvfp4", "e4m3")
    form = blackwell.forms()[-1]
    bound = sm100_table.bound_of(problem, form)
    assert bound.seconds == pytest.approx(problem.operations / (bound.filled * sm100_table.PEAK))
    assert (bound.waves, bound.blocks, bound.limit) == (7, 148, "matrix")
    twice, cublas = (
        Figure(Arm(name, 1, 1, lambda: None, ()), (microseconds, microseconds))
        for name, microseconds in (("a", bound.seconds * 2e6), ("b", bound.seconds * 4e6))
    )
    assert bench.line(problem, form, twice, cublas).endswith("| 2.000 | matrix 0.50 |")
    few = GemmProblem(16, 512, 7168, "nvfp4", "e4m3")
    assert sm100_table.bound_of(few, bench.tactics(16)[0]).blocks == 4


def test_refuses_other_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "target_of_device", lambda: targets.SM90A)
    assert bench.main([]) == EXIT_REFUSED
    assert "Run it on a B200" in capsys.readouterr().err
