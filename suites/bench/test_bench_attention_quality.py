"""The table of attention's quality: what is missed, and what a row says."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.base.errors import EXIT_REFUSED
from degarble.suites.bench import bench_attention_quality as bench


def test_kernels_may_be_a_hair_below_the_twin_and_no_more() -> None:
    twins = (0.9997, 0.9998)
    near, far, absent = (
        bench.Row("rows, fp8 cache", "any", *twins, each) for each in (0.999695, 0.9996, None)
    )
    assert [each.missed for each in (near, far, absent)] == [False, True, False]
    assert bench.Row("any", "any", *twins, float("nan")).missed
    assert near.line().endswith("| 0.9997 | 0.9997000 | 0.9998000 | 0.9996950 |")
    assert absent.line().endswith("| not run |")


def test_a_cosine_is_of_all_numbers() -> None:
    a = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert bench.cosine(a, a.clone()) == 1.0
    assert bench.cosine(a, torch.tensor([[4.0, -3.0], [0.0, 0.0]])) == pytest.approx(0.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and this shows its absence")
def test_refuses_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == EXIT_REFUSED
    assert "NVIDIA GPU" in capsys.readouterr().err
