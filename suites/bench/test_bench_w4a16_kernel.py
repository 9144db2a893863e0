"""The bench of BF16 times NVFP4: what a row says, when targets are met, and without a GPU."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.base.errors import EXIT_REFUSED
from degarble.suites.bench import bench_w4a16_kernel as bench
from degarble.suites.bench.bench_quantise_kernel import Arm, Figure


def figure(name: str, bytes_moved: int, *microseconds: float) -> Figure:
    return Figure(Arm(name, bytes_moved, 1, lambda: None, ()), microseconds)


def row(kernel: float, cublas: float) -> bench.Row:
    return bench.Row(
        figure("8x32, M = 1", 16_000_000, kernel, kernel),
        figure("copy", 16_000_000, 6.0, 6.0),
        figure("large", 160_000_000, 40.0, 40.0),
        figure("cuBLAS", 58_000_000, cublas, cublas),
    )


def test_shares_and_times() -> None:
    found = row(8.0, 20.0)
    assert found.shares == pytest.approx((0.75, 0.5))
    assert found.faster == pytest.approx(2.5)
    assert found.line() == "| 8x32, M = 1 | 8.00 [8.00, 8.00] | 2.00 | 0.75 | 0.50 | 20.00 | 2.50 |"


def test_the_stricter_copy_and_cublas_decide() -> None:
    assert not row(8.0, 20.0).meets
    assert row(6.5, 20.0).meets
    assert not row(6.5, 12.0).meets


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and this shows its absence")
def test_refuses_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == EXIT_REFUSED
    assert "CUDA device" in capsys.readouterr().err
