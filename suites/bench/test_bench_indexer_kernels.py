"""The bench of the indexer's kernels: what a row says, and what it does without a GPU."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.base.errors import EXIT_REFUSED
from degarble.kernels.indexer.problem import TopkProblem
from degarble.suites.bench import bench_indexer_kernels as bench
from degarble.suites.bench.bench_quantise_kernel import Arm, Figure


def figure(name: str, bytes_moved: int, *microseconds: float) -> Figure:
    return Figure(Arm(name, bytes_moved, 1, lambda: None, ()), microseconds)


def test_a_row_is_judged_round_by_round() -> None:
    slow, fast = figure("torch.topk", 8, 90.0, 60.0, 80.0), figure("ours", 8, 10.0, 20.0, 20.0)
    assert bench.ratio(slow, fast) == pytest.approx(4.0)
    row = bench.topk_row(TopkProblem(1, 8192, 512), slow, figure("ours", 2_000_000, 10, 20, 20))
    assert row == "| 1 | 8192 | 512 | 80.0 | 20.0 | 0.10 | 4.00 |"


def test_operations_are_those_of_every_head() -> None:
    problem = bench.scores_problem(2048, 16_384, 1, ("bf16", "float32"))
    assert problem.operations == 2 * 2048 * 16_384 * 64 * 128
    assert problem.pages.count * bench.PAGE == 16_384
    decode = bench.scores_problem(64, 8192, 64, ("fp8", "stored"))
    assert decode.bytes_moved > 64 * 8192 * 128
    assert set(bench.PARTS) == {"scores", "topk", "operand"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and this shows its absence")
def test_refuses_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == EXIT_REFUSED
    assert "CUDA device" in capsys.readouterr().err
