"""The bench of the quantising kernel: what a row says, and what it does without a GPU."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.base.errors import EXIT_REFUSED
from degarble.suites.bench import bench_quantise_kernel as bench


def figure(name: str, bytes_moved: int, *microseconds: float) -> bench.Figure:
    return bench.Figure(bench.Arm(name, bytes_moved, 1, lambda: None, ()), microseconds)


def test_the_share_of_a_kernel_that_moves_other_bytes() -> None:
    copy = figure("copy", 100_000_000, 20.0, 25.0, 40.0)
    kernel = figure("kernel", 200_000_000, 50.0, 50.0, 100.0)
    assert kernel.share_of(copy) == pytest.approx(0.8)
    assert copy.share_of(copy) == 1.0
    assert copy.terabytes_a_second == pytest.approx(4.0)
    assert kernel.row(copy).startswith("| kernel | 200.00 | 50.00 [50.00, 75.00] | 4.000 | 0.8")


def test_buffer_sets_are_more_than_a_cache() -> None:
    for bytes_moved in (1_000, 10_000_000, 150_000_000):
        sets = bench.sets_for(bytes_moved)
        assert sets >= bench.SETS
        assert sets == 64 or sets * bytes_moved >= bench.COLD_BYTES - bytes_moved


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and this shows its absence")
def test_refuses_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == EXIT_REFUSED
    assert "CUDA device" in capsys.readouterr().err
