"""The bench of streamed weights at a small size: it runs, and every expert is visited."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.model.config.config import V3_2, V4_PRO
from degarble.references import experts
from degarble.suites.bench import bench_streaming as bench
from degarble.suites.bench import peak_streaming
from degarble.suites.bench.figures import measure
from degarble.suites.bench.timing import Settings

if TYPE_CHECKING:
    from degarble.harness.model.config.config import Config


@pytest.mark.slow
def test_it_measures_a_small_model() -> None:
    section = measure("streaming", Settings(size=64, rounds=1, threads=1, peers=False))
    by_claim = {target.claim: target for target in section.targets}
    assert by_claim["share of experts visited"].measured == 1.0
    assert 0 < by_claim["peak resident bytes"].measured < 3e9
    measured, estimates = section.tables
    assert float(measured.rows[0][0]) > 0
    assert [row[0] for row in estimates.rows] == ["V4-Pro", "V3.2"]


def test_a_fitted_bias_lets_every_expert_have_tokens(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(128, 16, generator=generator) + torch.linspace(-3, 3, 16)
    for bias, least in ((torch.zeros(16), 0), (peak_streaming.fitted_bias(logits, 2), 10)):
        chosen = (experts.sqrt_softplus(logits) + bias).topk(2, dim=-1).indices
        load = torch.bincount(chosen.flatten(), minlength=16)
        assert (int(load.min()) == 0) == (least == 0)
        assert int(load.min()) >= least


@pytest.mark.parametrize(("config", "gigabytes"), [(V4_PRO, 865), (V3_2, 690)])
def test_sizes_of_the_full_models_are_those_of_their_files(config: Config, gigabytes: int) -> None:
    """805.3 GiB of V4-Pro's headers, its drafter included; 671e9 FP8 weights of V3.2."""
    assert bench.official_bytes(config) / 1e9 == pytest.approx(gigabytes, rel=0.05)
