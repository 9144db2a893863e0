"""Outliers are large, and change no bit of what a model computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.model.parameters import parameters
from degarble.harness.model.types import Kind
from degarble.references.tiny.configs import TINY_V4, TINY_V32
from degarble.references.tiny.outliers import readers_of, with_outliers
from degarble.references.tiny.trainable.v4 import TrainableV4
from degarble.references.tiny.trainable.v32 import TrainableV32

if TYPE_CHECKING:
    from collections.abc import Callable

    from degarble.harness.model.config.config import Config
    from degarble.references.tiny.trainable.common import Trainable


def _set(model: Trainable, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in weights.items():
            model[name].copy_(value)


@pytest.mark.parametrize("make", [lambda: TrainableV4(TINY_V4), lambda: TrainableV32(TINY_V32)])
def test_the_function_stays(make: Callable[[], Trainable], seed: int) -> None:
    model = make()
    narrow = {
        name: value.to(torch.bfloat16).float() if value.is_floating_point() else value
        for name, value in model.named().items()
    }
    _set(model, narrow)
    ids = torch.randint(0, 512, (1, 128), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        before = model(ids)[0]
        changed = with_outliers(narrow, seed)
        _set(model, changed)
        after = model(ids)[0]
    torch.testing.assert_close(after, before, rtol=0.0, atol=1e-5)
    for name, value in changed.items():
        if value.is_floating_point():
            assert torch.equal(value, value.to(torch.bfloat16).float()), name


def test_outliers_are_large(seed: int) -> None:
    weights = TrainableV4(TINY_V4).named()
    changed = with_outliers(weights, seed)
    for name in (name for name in weights if readers_of(name, weights)):
        ratio = changed[name] / weights[name]
        assert 8.0 <= float(ratio.max()) <= 32.0
        assert 0.01 <= float((ratio > 1).float().mean()) <= 0.05


@pytest.mark.parametrize("config", [TINY_V4, TINY_V32])
def test_every_reader_of_a_norm_is_known(config: Config) -> None:
    """A norm that is rescaled without one of its readers would change the model."""
    named = {p.name: torch.empty(p.shape) for p in parameters(config)}
    width = {"attn_norm": "hidden_size", "ffn_norm": "hidden_size", "q_norm": "q_lora_rank"}
    for p in parameters(config):
        if p.kind is Kind.NORM and p.name.rpartition(".")[2] in width and p.block:
            readers = readers_of(p.name, named)
            assert readers, p.name
            expected = getattr(config, width[p.name.rpartition(".")[2]])
            assert all(named[name].shape[1] == expected for name in readers)
