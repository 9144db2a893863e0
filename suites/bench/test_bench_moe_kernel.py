"""The bench of the grouped experts: what a share says, and what it does without a GPU."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.base.errors import EXIT_REFUSED
from degarble.suites.bench import bench_moe_kernel as bench
from degarble.suites.bench.bench_quantise_kernel import Arm, Figure


def figure(name: str, *microseconds: float) -> Figure:
    return Figure(Arm(name, 1, 1, lambda: None, ()), microseconds)


def test_a_share_is_judged_round_by_round_and_both_products_together() -> None:
    figures = {
        bench.PLAIN1: figure(bench.PLAIN1, 60.0, 100.0, 60.0),
        bench.PLAIN2: figure(bench.PLAIN2, 40.0, 100.0, 40.0),
        bench.FC1: figure(bench.FC1, 150.0, 150.0, 300.0),
        bench.FC2: figure(bench.FC2, 50.0, 50.0, 100.0),
    }
    assert bench.share(figures, (bench.FC1, bench.FC2)) == pytest.approx(0.5)
    assert bench.Row(figures[bench.FC1], 300_000_000).line() == "| grouped FC1 | 150.0 | 2 |"


def test_both_sides_are_credited_with_the_same_operations() -> None:
    problem = bench.problem_of("V4-Flash", 8192)
    assert problem.operations == sum(each.operations for each in bench.plain_problems(problem))


def test_weights_of_visited_experts_are_counted_with_their_scales() -> None:
    problem = bench.problem_of("V4-Flash", 16)
    assert bench.weight_bytes(problem, 256) == 256 * 3 * (4096 * 2048 // 2 + 4096 * 2048 // 16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and this shows its absence")
def test_refuses_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == EXIT_REFUSED
    assert "CUDA device" in capsys.readouterr().err
