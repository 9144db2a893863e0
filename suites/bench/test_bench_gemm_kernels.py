"""The bench of the GEMM kernels: what a row says, and what it does without a GPU."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.base.errors import EXIT_REFUSED
from degarble.kernels.gemm.problem import OPERANDS
from degarble.suites.bench import bench_gemm_kernels as bench
from degarble.suites.bench.bench_quantise_kernel import Arm, Figure


def figure(name: str, *microseconds: float) -> Figure:
    return Figure(Arm(name, 1, 1, lambda: None, ()), microseconds)


def test_a_row_is_judged_round_by_round() -> None:
    cublas, kernel = (
        figure(bench.CUBLAS, 100.0, 200.0, 120.0),
        figure("kernel", 200.0, 200.0, 300.0),
    )
    row = bench.Row(kernel, 400_000_000)
    assert row.ratio(cublas) == pytest.approx(0.5)
    assert bench.Row(cublas, 1).ratio(cublas) == 1.0
    assert row.teraflops == pytest.approx(2.0)
    assert row.line(cublas) == "| kernel | 200.0 [200.0, 250.0] | 2 | 0.500 |"


def test_every_kind_of_operands_has_an_arm() -> None:
    made = {problem.operands: problem for problem in bench.problems((16, 7168, 4096))}
    assert set(made) == set(OPERANDS)
    assert made["nvfp4"].bytes_moved < made["fp8_block"].bytes_moved < made["bf16"].bytes_moved


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and this shows its absence")
def test_refuses_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == EXIT_REFUSED
    assert "CUDA device" in capsys.readouterr().err
