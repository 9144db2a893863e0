"""Small runs of any conventions: models, recipes, prompts, chunks, orders of sums from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.capture.files.records import CapturedStep, Phase
from degarble.harness.engine.conventions.registry import REGISTRY
from degarble.harness.engine.faults.model_faults import ComponentContext
from degarble.harness.engine.faults.negative_controls import CONTROLS
from degarble.harness.engine.localise.localise import localise
from degarble.harness.engine.localise.recorded_run import InMemoryRun
from degarble.harness.model.components import component_named
from degarble.harness.model.config.config import small_v4, small_v32
from degarble.harness.model.recipes import recipe_named
from degarble.references.binding import BoundModel
from degarble.references.numerics import Mode, Numerics, switches_of
from degarble.suites.engine.localise_cases import family_of, weights_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.engine.conventions.registry import Convention
    from degarble.harness.engine.localise.localise import Localised
    from degarble.harness.model.config.config import Config

V4 = small_v4(num_hidden_layers=4, compress_ratios=(0, 4, 4, 0, 0))
V32 = small_v32(num_hidden_layers=3)
CONFIGS = (V4, V32)
RECIPES = ("nvfp4-full", "nvfp4-experts", "official", "bf16")
# Statements about structure, drafters, ranks or numbers too small to see: nothing here runs them.
_NOT_RUN = {"reduction_in_storage_dtype", "first_draft_embedding_zeroed", "cache_scale_floored"}
_ORDERS = tuple(control for control in CONTROLS if "order" in control.id or "sum" in control.id)


def model(
    config: Config, inside: torch.dtype, switches: Mapping[str, Any], recipe: str = "nvfp4-full"
) -> BoundModel:
    """Bind random weights; `inside` is float32 for a candidate and float64 for a twin."""
    made = recipe_named(recipe, config)
    official = switches_of(f"official-{family_of(config)}")
    numerics = Numerics(Mode.TWIN, inside, torch.bfloat16, inside, replace(official, **switches))
    return BoundModel(config, numerics, weights_of(config, made), made)


@cache
def choices(config: Config) -> tuple[tuple[Convention, Any], ...]:
    """Every convention that concerns the family, with each value that is not the official one."""
    twin = model(config, torch.float64, {})
    roles = {twin.bound_to(name)[0].role for name in twin.calls}
    return tuple(
        (convention, value)
        for convention in REGISTRY.values()
        for value in (convention.values or (1e-6,))
        if convention.roles & roles
        and convention.name not in _NOT_RUN
        and value != convention.assumed(twin.numerics, config.family)
    )


@cache
def combined(config: Config) -> tuple[dict[str, Any], ...]:
    """None, one, and all pairs of other values."""
    single = [{convention.name: value} for convention, value in choices(config)]
    pairs = [{**a, **b} for a, b in combinations(single, 2) if not a.keys() & b.keys()]
    return ({}, *single, *pairs)


@dataclass(frozen=True)
class RunCase:
    """One run: what is computed, by which conventions, and which of them are declared."""

    seed: int
    config: Config
    recipe: str
    switches: Mapping[str, Any]
    declared: Mapping[str, Any]

    @classmethod
    def of(cls, seed: int) -> RunCase:
        """Draw a case; consecutive seeds walk through all values and pairs of both families."""
        config, chance = CONFIGS[seed % 2], random.Random(seed)
        known = combined(config)
        switches = known[(seed // 2) % len(known)]
        hidden = chance.random() < 0.6  # what can be learned is mostly not declared
        declared = {n: v for n, v in switches.items() if not (hidden and REGISTRY[n].learned)}
        return cls(seed, config, chance.choice(RECIPES), switches, declared)

    @classmethod
    def joint(cls, number: int) -> RunCase:
        """Walk through all values and pairs of both families, with what can be learned undeclared.

        The first round has either recipe of NVFP4, the second the other, then come the others.
        """
        known = [(config, switches) for config in CONFIGS for switches in combined(config)]
        turn, at = divmod(number, len(known))
        config, switches = known[at]
        recipe = RECIPES[(at + turn) % 2 if turn < 2 else turn % len(RECIPES)]
        declared = {n: v for n, v in switches.items() if not REGISTRY[n].learned}
        return cls(number, config, recipe, switches, declared)

    def __str__(self) -> str:
        said = ", ".join(f"{n}={v}" for n, v in self.switches.items()) or "official"
        text = f"; declared: {', '.join(self.declared)}" if self.declared else ""
        return f"{self.config.family} {self.recipe}: {said}{text}"

    @property
    def steps(self) -> tuple[CapturedStep, ...]:
        """Prompts of one to three sequences, in chunks of some length, then tokens one by one."""
        chance = random.Random(self.seed + 1)
        lengths = [chance.choice((3, 9, 17, 41)) for _ in range(chance.randint(1, 3))]
        chunk, decoded = chance.choice((5, 16, 64)), chance.randint(1, 3)
        ids = [[chance.randrange(1, 500) for _ in range(n + decoded)] for n in lengths]
        cuts = [[*range(0, n, chunk), *range(n, n + decoded + 1)] for n in lengths]
        steps: list[CapturedStep] = []
        for at in range(max(map(len, cuts)) - 1):
            fed = [(o, c[at], c[at + 1]) for o, c in enumerate(cuts) if at + 1 < len(c)]
            tokens = tuple(token for o, a, b in fed for token in ids[o][a:b])
            places = tuple(place for _, a, b in fed for place in range(a, b))
            owners = tuple(o for o, a, b in fed for _ in range(a, b))
            phase = Phase.DECODE if at and len(tokens) == len(fed) else Phase.PREFILL
            steps.append(CapturedStep(len(steps), phase, tokens, places, owners))
        return tuple(steps)

    def candidate(self) -> BoundModel:
        """A healthy candidate in float32, in most cases with sums in another order."""
        bound = model(self.config, torch.float32, self.switches, self.recipe)
        chance = random.Random(self.seed + 2)
        for control in _ORDERS if chance.random() < 0.7 else ():
            for name in list(bound.calls):
                context = ComponentContext(
                    bound, component_named(self.config, name, self._recipe), self._recipe
                )
                variants = list(control.variants(context)) if control.applies_to(context) else []
                if variants and chance.random() < 0.5:
                    bound.calls[name] = chance.choice(variants).apply(bound.calls[name])
        return bound

    @property
    def _recipe(self) -> Any:
        return recipe_named(self.recipe, self.config)

    def run(self, candidate: BoundModel | None = None) -> InMemoryRun:
        """Run the case."""
        return InMemoryRun.again(candidate or self.candidate(), self.steps)

    def judged(self, run: InMemoryRun, declared: Mapping[str, Any] | None = None) -> Localised:
        """Judge a run by a twin that knows what is declared."""
        stated = self.declared if declared is None else declared
        twin = model(self.config, torch.float64, stated, self.recipe)
        twin.declared = stated
        return localise(twin, self._recipe, run)
