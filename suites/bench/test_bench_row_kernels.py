"""The bench of the row kernels: which targets are missed, and what it does without a GPU."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.base.errors import EXIT_REFUSED
from degarble.suites.bench import bench_row_kernels as bench


def test_a_missed_target_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench._judged("share", 0.86, 0.85) == []
    assert bench._judged("share", 0.84, 0.85) == ["share"]
    assert bench._judged("ratio", 1.2, 1.1, at_least=False) == ["ratio"]
    assert bench._judged("ratio", 1.0, 1.1, at_least=False) == []
    assert "share: 0.840, wanted at least 0.85" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and this shows its absence")
def test_refuses_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == EXIT_REFUSED
    assert "CUDA device" in capsys.readouterr().err


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(SystemExit):
        bench.main(["--only", "norm"])
