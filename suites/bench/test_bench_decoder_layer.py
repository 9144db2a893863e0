"""The bench of a layer's step: what a table says, and what it does without a GPU."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.errors import EXIT_REFUSED
from degarble.suites.bench import bench_decoder_layer as bench
from degarble.suites.bench.bench_quantise_kernel import Arm, Figure


def figure(microseconds: float) -> Figure:
    return Figure(Arm("any", 1, 1, lambda: None, ()), (microseconds,))


def test_kernels_are_summed_over_their_launches_and_beside_the_whole() -> None:
    names = ["one", "two", "one"]
    lines = bench.told(names, [figure(each) for each in (20.0, 4.0, 10.0, 2.0)])
    assert "| two | 1 | 10.0 | 62.5% |" in lines
    assert "| one | 2 | 6.0 | 37.5% |" in lines
    assert lines.index("| two | 1 | 10.0 | 62.5% |") < lines.index("| one | 2 | 6.0 | 37.5% |")
    assert lines[-1] == "| the whole step as a graph | 1 | 20.0 | 125.0% |"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and this shows its absence")
def test_refuses_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == EXIT_REFUSED
    assert "NVIDIA GPU" in capsys.readouterr().err
