"""Too good to be true: operands that were left unquantised are told from every other difference."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.anatomy.recipes import recipe_named
from degarble.harness.engine.blame import Kind
from degarble.harness.engine.localise import localise
from degarble.suites.engine.localise_cases import (
    ATTN,
    FFN,
    V4,
    V32,
    bound,
    localised,
    plain,
    run_of,
    scaled,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.anatomy.config import Config
    from degarble.harness.engine.seen import InMemoryRun


def bf16_weights(name: str, config: Config) -> Any:
    """Codes arrive as they should, and are multiplied with the weights of the BF16 model."""

    def faulty(call: Any, inputs: Any, _weights: Any) -> Any:
        return call(inputs, plain(config).weights_of(name))

    return lambda call: partial(faulty, call)


def fell_back(name: str, config: Config, recipe: str) -> InMemoryRun:
    """Neither activations nor weights are quantised, though the codes were made."""
    seen: dict[str, Tensor] = {}
    maker = f"{name}.act_quant"
    candidate = bound(config, recipe, torch.float64)
    healthy = candidate.calls[maker]

    def spied(inputs: Any, weights: Any) -> Mapping[str, Tensor]:
        seen["x"] = inputs["x"]
        return healthy(inputs, weights)

    def faulty(_call: Any, inputs: Any, _weights: Any) -> Mapping[str, Tensor]:
        rest = {n: e for n, e in inputs.items() if n == "experts"}
        model = plain(config)
        return model.calls[name]({"x": seen["x"], **rest}, model.weights_of(name))

    candidate.calls[maker] = spied
    try:
        return run_of(name, lambda call: partial(faulty, call), config=config, recipe=recipe)
    finally:
        candidate.calls[maker] = healthy


CASES = [
    (V4, "nvfp4-full", f"{ATTN}wo_b"),
    (V4, "nvfp4-full", f"{ATTN}wq_a"),
    (V4, "nvfp4-experts", f"{FFN}experts.w13"),
    (V32, "nvfp4-full", "layers.0.attn.wo"),
]


@pytest.mark.parametrize(("config", "recipe", "name"), CASES)
def test_bf16_weights_and_activations_are_called_too_good(
    config: Config, recipe: str, name: str
) -> None:
    (origin,) = localised(fell_back(name, config, recipe), config, recipe).origins
    assert (origin.kind, origin.component) == (Kind.FALLBACK, name)
    assert origin.where["operands"] == "unquantised"
    assert "nearer to the BF16 reference than its twin is" in origin.sentence


@pytest.mark.parametrize(("config", "recipe", "name"), CASES)
def test_bf16_weights_alone_are_too_good_as_well(config: Config, recipe: str, name: str) -> None:
    run = run_of(name, bf16_weights(name, config), config=config, recipe=recipe)
    (origin,) = localised(run, config, recipe).origins
    assert (origin.kind, origin.component) == (Kind.FALLBACK, name)


@pytest.mark.parametrize(("name", "factor"), [(f"{ATTN}wo_b", 0.98), (f"{ATTN}wq_a", 0.96)])
def test_a_gain_that_happens_to_help_is_none(name: str, factor: float) -> None:
    """Shrinking a noisy output brings it nearer to what was meant."""
    run = run_of(name, scaled("out", factor))
    (origin,) = localised(run).origins
    assert (origin.kind, origin.component) == (Kind.OUTPUT, name)


def test_without_a_reference_nothing_is_said_of_it() -> None:
    name, recipe = f"{ATTN}wq_a", recipe_named("nvfp4-full", V4)
    run = run_of(name, bf16_weights(name, V4))
    (origin,) = localise(bound(V4, "nvfp4-full", torch.float64), recipe, run).origins
    assert origin.kind is Kind.OUTPUT
