"""The table of NVFP4 products: cosines of known roundings, rotation, and that it refuses a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from degarble.kernels.attention import problem as facts
from degarble.suites.bench import bench_nvfp4_products as bench

SMALL = bench.Inputs(
    "small",
    torch.randn(2, 3, 512, generator=torch.Generator().manual_seed(1)).bfloat16(),
    torch.randn(40, 512, generator=torch.Generator().manual_seed(2)).bfloat16(),
    torch.arange(40) < torch.tensor([[30], [40]]),
    torch.zeros(3),
)


def test_rows_name_what_is_rounded_and_lose_in_order() -> None:
    rows = bench.compared(SMALL, kernels=False)
    assert [row.kind for row in rows] == list(bench.KINDS)
    logits = [row.cosines[0] for row in rows]
    assert 1 > logits[0] > logits[1] > logits[2] > logits[3] > 0.98
    # Keys alone and queries alone each lose about half as much as both.
    assert logits[3] == pytest.approx(1 - 2 * (1 - logits[2]), abs=1e-3)
    assert rows[3].line().startswith("| small | nvfp4 keys and queries | 0.99")
    assert [products for _, products in bench.KINDS.values()].count(facts.EXPERIMENT) == 1


def test_keys_outside_the_mask_do_not_count() -> None:
    other = SMALL.keys.clone()
    other[30:] *= 100
    alone = replace(SMALL, q=SMALL.q[:1], seen=SMALL.seen[:1])
    assert bench.compared(alone, kernels=False) == bench.compared(
        replace(alone, keys=other), kernels=False
    )


def test_rotation_changes_no_logit_and_evens_out_channels() -> None:
    plain, turned = (bench.drawn(f"V4-Pro, outliers{end}") for end in ("", ", rotated"))
    logits = [bench.logits_of(each, each.q, each.keys) for each in (plain, turned)]
    assert bench.cosine(*logits) > 0.9999
    largest = [each.keys.float().square().mean(0).amax() for each in (plain, turned)]
    assert largest[0] > 20 * largest[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
def test_refuses_kernels_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--kernels"]) == 2
    assert "REFUSED" in capsys.readouterr().err
