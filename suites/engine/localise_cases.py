"""Small models, a healthy candidate that sums in another precision, and runs with one fault."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.model_faults import FaultVariant
from degarble.harness.engine.localise.localise import localise
from degarble.harness.engine.localise.recorded_run import InMemoryRun
from degarble.harness.inference.weights import HeldWeights
from degarble.harness.model.config.config import small_v4, small_v32
from degarble.harness.model.recipes import recipe_named
from degarble.references.binding import BoundModel
from degarble.references.numerics import Mode, Numerics, switches_of
from degarble.references.weights import quantised_weights, random_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from degarble.harness.engine.localise.localise import Localised
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.recipes import Recipe

V4 = small_v4(num_hidden_layers=2, compress_ratios=(0, 4, 0))
V32 = small_v32(num_hidden_layers=1)
PROMPTS = ([7, 3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1])
ATTN, FFN = "layers.1.attn.", "layers.1.ffn."


def family_of(config: Config) -> str:
    return "v4" if config.family == V4.family else "v32"


@cache
def bound(config: Config, recipe_name: str, inside: torch.dtype = torch.float64) -> BoundModel:
    family, recipe = family_of(config), recipe_named(recipe_name, config)
    numerics = Numerics(
        Mode.TWIN, inside, torch.bfloat16, inside, switches_of(f"official-{family}")
    )
    return BoundModel(config, numerics, weights_of(config, recipe), recipe)


@cache
def weights_of(config: Config, recipe: Recipe) -> Mapping[str, Any]:
    return HeldWeights(quantised_weights(random_weights(config, 1), config, recipe))


@cache
def plain(config: Config) -> BoundModel:
    """The BF16 model."""
    switches = switches_of(f"official-{family_of(config)}")
    numerics = Numerics(Mode.TWIN, torch.float64, torch.bfloat16, torch.float64, switches)
    return BoundModel(config, numerics, HeldWeights(random_weights(config, 1)))


def run_of(
    name: str = "",
    way: Callable[..., Any] | None = None,
    edge: Callable[..., Any] | None = None,
    config: Config = V4,
    inside: torch.dtype = torch.float64,
    recipe: str = "nvfp4-full",
) -> InMemoryRun:
    """A run of the candidate, with a way around one component, or on its edge."""
    candidate = bound(config, recipe, inside)
    healthy = candidate.calls.get(name)
    if way is not None and healthy is not None:
        candidate.calls[name] = way(healthy)
    try:
        edges = {} if edge is None else {name: FaultVariant("planted", edge)}
        return InMemoryRun.from_prompts(candidate, PROMPTS, 3, edges)
    finally:
        if healthy is not None:
            candidate.calls[name] = healthy


def localised(run: InMemoryRun, config: Config = V4, recipe: str = "nvfp4-full") -> Localised:
    twin = bound(config, recipe, torch.float64)
    return localise(twin, recipe_named(recipe, config), run, plain(config))


def scaled(name: str, factor: float) -> Callable[..., Any]:
    """Outputs of a call times a factor."""

    def change(call: Any, inputs: Any, weights: Any) -> dict[str, Tensor]:
        made = dict(call(inputs, weights))
        made[name] = (made[name].float() * factor).to(made[name].dtype)
        return made

    return lambda call: partial(change, call)


def replaced(name: str, change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """One input of a call, changed wherever it arrives."""

    def faulty(call: Any, inputs: Any, weights: Any) -> Any:
        if name in inputs:
            inputs = {**inputs, name: change(inputs[name])}
        return call(inputs, weights)

    return lambda call: partial(faulty, call)
