"""Training: pieces make one run, state survives a stop, and a broken loss stops it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.references.tiny import train
from degarble.references.tiny.configs import TINY_V4
from degarble.references.tiny.trainable import TrainableV4

if TYPE_CHECKING:
    from pathlib import Path


def test_kinds_mark_the_answers(seed: int) -> None:
    ids, kinds = train.example(seed, 1280)
    assert len(ids) == 1281
    assert len(kinds) == 1280
    assert set(kinds) == set(range(len(train.KINDS)))


def test_the_rate_warms_up_and_falls() -> None:
    rates = [train.rate(step, 1000, 1.0) for step in range(1000)]
    assert rates.index(max(rates)) in (199, 200)
    assert rates[0] < 0.01
    assert 0.02 <= rates[-1] < 0.025


def test_saved_state_comes_back(seed: int, tmp_path: Path) -> None:
    model = TrainableV4(TINY_V4, seed % 1000)
    optimiser = train.optimiser_of(model, 1e-3)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.grad = torch.ones_like(weight)
    optimiser.step()
    train.save(tmp_path, model, optimiser, 17)
    other = TrainableV4(TINY_V4, 1 + seed % 1000)
    second = train.optimiser_of(other, 1e-3)
    assert train.resume(tmp_path, other, second) == 17
    for name, value in model.named().items():
        assert torch.equal(value, other.named()[name]), name
    first_weight, second_weight = model["head"], other["head"]
    kept = optimiser.state[first_weight]["exp_avg"].to(torch.bfloat16)
    assert torch.equal(kept, second.state[second_weight]["exp_avg"].to(torch.bfloat16))


def test_a_loss_that_is_no_number_stops_the_run() -> None:
    with pytest.raises(SystemExit, match="step 3"):
        train.report(3, 1.0, [float("nan")] * 8)
