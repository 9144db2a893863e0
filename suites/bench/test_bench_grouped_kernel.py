"""The bench of grouped products: its tables, its lines, its refusal."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.base.errors import EXIT_REFUSED
from degarble.suites.bench import bench_grouped_kernel as bench
from degarble.suites.bench.bench_quantise_kernel import Arm, Figure


def test_tables_have_titles_of_their_own_and_their_problems() -> None:
    found = bench.problems_of(64)
    assert [title for title, *_ in found] == [
        "o_a of V4-Pro", "o_a of V4-Flash",
        "o_a of V4-Pro in FP8, scales float32", "o_a of V4-Pro in FP8, scales ue8m0",
        "o_a of V4-Flash in FP8, scales float32", "o_a of V4-Flash in FP8, scales ue8m0",
        "compressor's projection",
    ]  # fmt: skip
    assert [problem.operations for _, problem, _ in found] == [
        2 * 64 * groups * 1024 * 4096 for groups in (16, 8, 16, 16, 8, 8)
    ] + [2 * 64 * 2048 * 7168]


def test_rates_and_shares_are_of_the_medians() -> None:
    _, problem, _ = bench.problems_of(8192)[1]
    figures = [Figure(Arm(name, 0, 1, lambda: None, ()), (time,)) for name, time in
               (("fused", 1000.0), ("cuBLAS", 800.0))]  # fmt: skip
    lines = bench.rows_of("o_a", problem, figures)
    assert lines[2] == "| fused | 1000.0 | 550 | 0.80 |"
    assert lines[3].endswith("| 1.00 |")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and this shows its absence")
def test_refuses_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == EXIT_REFUSED
    assert "CUDA device" in capsys.readouterr().err
