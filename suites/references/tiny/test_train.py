"""Training: pieces make one run, state survives a stop, and a broken loss stops it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.references.tiny import train
from degarble.references.tiny.batches import KINDS, Batches, example
from degarble.references.tiny.language import Mixture
from degarble.references.tiny.optimiser import Optimiser, orthogonal
from degarble.references.tiny.trainable.common import Ablation

if TYPE_CHECKING:
    from pathlib import Path


def test_kinds_mark_the_answers(seed: int) -> None:
    ids, kinds = example(seed, Mixture(length=1281))
    assert len(ids) == 1281
    assert len(kinds) == 1280
    assert set(kinds) == set(range(len(KINDS)))


def test_batches_are_functions_of_their_number(seed: int) -> None:
    mixture = Mixture(length=65, facts=2)
    whole = Batches(2, mixture, seed, 0, 1)
    later = Batches(2, mixture, seed, 1, 1)
    try:
        first, second, again = whole(0), whole(1), later(1)
    finally:
        whole.pool.shutdown(cancel_futures=True)
        later.pool.shutdown(cancel_futures=True)
    assert first[0].shape == (2, 65)
    assert first[1].shape == (2, 64)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(second[0], again[0])
    assert torch.equal(second[1], again[1])


def test_the_rate_warms_up_stays_and_falls() -> None:
    rates = [train.rate(step, 1000, 1.0) for step in range(1000)]
    assert rates[0] < 0.01
    assert set(rates[199:600]) == {1.0}
    assert rates[-1] == 0.01
    assert rates[600:] == sorted(rates[600:], reverse=True)


def test_orthogonal_matrices_have_singular_values_near_one(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for shape in ((3, 24, 60), (2, 60, 24)):
        made = orthogonal(torch.randn(shape, generator=generator)).float()
        values = torch.linalg.svdvals(made)
        assert made.shape == shape
        assert values.min() > 0.3
        assert values.max() < 1.4


@pytest.mark.parametrize("name", ["v4", "v32"])
def test_training_lowers_the_loss_and_state_comes_back(name: str, tmp_path: Path) -> None:
    model = train.model_named(name, 0)
    optimiser = Optimiser(model.weights)
    trainer = train.Trainer(model, optimiser, graphs=False)
    trainer.switch(Ablation(dense_entries=True))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 512, (1, 129), generator=generator)
    kinds = torch.randint(0, len(KINDS), (1, 128), generator=generator)
    seen = []
    for _ in range(4):
        optimiser.set_rate(2e-3)
        seen.append(float(trainer(ids, kinds)[0]))
    assert seen[-1] < seen[0] - 0.3
    train.save(tmp_path, model, optimiser, 4)
    other = train.model_named(name, 1)
    second = Optimiser(other.weights)
    assert train.resume(tmp_path, other, second) == 4
    for key, value in model.named().items():
        assert torch.equal(value, other.named()[key]), key
    state = second.state()
    for kind, kept in optimiser.state().items():
        assert kept
        for key, value in kept.items():
            assert torch.equal(value, state[kind][key]), key
    resumed = train.Trainer(other, second, graphs=False)
    for each, through in ((trainer, optimiser), (resumed, second)):
        each.switch(Ablation(dense_entries=True))
        through.set_rate(2e-3)
        each(ids, kinds)
    for key, value in model.named().items():
        assert torch.equal(value, other.named()[key]), key  # the step that would have come


def test_a_loss_that_is_no_number_stops_the_run() -> None:
    with pytest.raises(SystemExit, match="step 3"):
        train.report(3, 1.0, [float("nan")] * 8)
