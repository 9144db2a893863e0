"""Small models with a healthy run, into which random faults are planted.

A candidate in float32 runs prompts that begin at different steps, and decodes; its twin in float64
judges it. A second healthy run, of other tokens in the same steps, is held back: what an answer
claims is tried on it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.capture.files.records import CapturedStep, Phase
from degarble.harness.engine.faults.model_faults import ComponentContext
from degarble.harness.engine.localise.localise import localise
from degarble.harness.engine.localise.recorded_run import InMemoryRun, by_component
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.number_formats import (
    BLOCK_FORMATS,
    FP8_128X128_F32,
    MXFP4,
    NVFP4,
)
from degarble.harness.formats.quantise import quantise
from degarble.harness.formats.weight import Weight
from degarble.harness.model.components import component_named
from degarble.harness.model.recipes import recipe_named
from degarble.harness.museum.cases import RemainingRun, equal
from degarble.references.numerics import Numerics
from degarble.references.traced.family import TracedModel, logical_name
from degarble.suites.engine.diagnosing import double
from degarble.suites.museum.random_faults.conditions import Condition, drawn_condition
from degarble.suites.museum.random_faults.edits import Scene, drawn_edit
from degarble.suites.references.traced.traced_models import built, config_of, weights_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.capture.files.records import CapturedCall
    from degarble.harness.engine.localise.localise import Localised
    from degarble.harness.model.recipes import Recipe
    from degarble.references.binding import BoundModel
    from degarble.suites.museum.random_faults.edits import Edit

    Tensors = Mapping[str, Tensor]

OURS = ("v4 nvfp4-full", "v4 nvfp4-experts", "v32 nvfp4-full", "v32 official")
TRACED = (
    "llama bf16", "llama fp32", "gemma3_text bf16", "qwen3_moe bf16", "qwen3_moe fp32",
    "gpt_oss bf16", "lfm2 bf16", "qwen3_next bf16", "llama nvfp4", "llama fp8", "qwen2 mxfp4",
)  # fmt: skip
STAGES = (*OURS, *TRACED)
_STORED = {
    "nvfp4": NVFP4, "fp8": FP8_128X128_F32, "mxfp4": MXFP4, "int8": BLOCK_FORMATS["INT8_G32"],
    "int4": BLOCK_FORMATS["UINT4_G32"],
}  # fmt: skip
_WIDE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}  # more than one block
_SETTINGS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"sliding_window": 8}, "gemma3_text": {"sliding_window": 8},
    "llama": {"num_hidden_layers": 3},
}  # fmt: skip
_LENGTHS = {"v4": (133, 19, 40), "v32": (60, 19, 90), "traced": (23, 9, 70)}
_DECODED = 4  # steps in which all sequences decode
_TRIES = 24


@dataclass(frozen=True, eq=False)
class RandomFault:
    """An edit of one component, and when it acts."""

    component: str
    edit: Edit
    condition: Condition

    @property
    def truth(self) -> dict[str, Any]:
        return {
            "component": self.component, **self.edit.truth, "condition": self.condition.truth
        }  # fmt: skip

    def plant(self, call: ComponentCall, step: Any) -> ComponentCall:
        """Wrap a call; `step` returns the step that runs."""
        faulty = self.edit.apply(call)

        def planted(inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
            right, wrong = call(inputs, weights), faulty(inputs, weights)
            return self.condition.mixed(step(), inputs, right, wrong)

        return planted


@dataclass(eq=False)
class Stage:
    """A model, its healthy runs, and what is judged of a planted one."""

    name: str
    candidate: BoundModel
    twin: BoundModel
    recipe: Recipe
    lengths: tuple[int, ...]
    healthy: InMemoryRun = field(init=False)

    def __post_init__(self) -> None:
        self.healthy = self.run()
        self.calls = by_component(self.healthy)

    @cached_property
    def held(self) -> InMemoryRun:
        """A healthy run of other tokens, by which answers are tried."""
        return InMemoryRun.again(self.candidate, self.steps(seed=1))

    def steps(self, seed: int = 0) -> list[CapturedStep]:
        """Two prompts, a step of decoding, a third prompt, and decoding of all three."""
        drawn = random.Random(f"tokens {seed}")
        vocabulary, at = int(self.candidate.config.vocab_size), dict.fromkeys(range(3), 0)

        def step(number: int, owners: Sequence[int], phase: Phase) -> CapturedStep:
            tokens: list[int] = []
            positions: list[int] = []
            rows: list[int] = []
            for owner in owners:
                count = 1 if phase is Phase.DECODE else self.lengths[owner]
                tokens += [drawn.randrange(4, vocabulary - 4) for _ in range(count)]
                positions += range(at[owner], at[owner] + count)
                rows += [owner] * count
                at[owner] += count
            return CapturedStep(number, phase, tuple(tokens), tuple(positions), tuple(rows))

        return [
            step(0, (0, 1), Phase.PREFILL), step(1, (0, 1), Phase.DECODE),
            step(2, (2,), Phase.PREFILL),
            *(step(3 + number, (0, 1, 2), Phase.DECODE) for number in range(_DECODED)),
        ]  # fmt: skip

    def run(self, faults: Sequence[RandomFault] = ()) -> InMemoryRun:
        """Run the steps with faults planted."""
        bound, steps = self.candidate, self.steps()
        first = next(iter(by_component(self.healthy))) if faults else ""
        plain, at = dict(bound.calls), [-1]
        try:
            for fault in faults:
                name = fault.component
                bound.calls[name] = fault.plant(bound.calls[name], lambda: steps[at[0]])
            if faults:
                begins = bound.calls[first]

                def ticking(inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
                    at[0] += 1  # it runs once a step, before all others
                    return begins(inputs, weights)

                bound.calls[first] = ticking
            return InMemoryRun.again(bound, steps)
        finally:
            bound.calls.update(plain)

    def localised(self, run: InMemoryRun) -> Localised:
        """Judge a run; components whose calls are the healthy run's are not judged again."""
        if isinstance(self.twin, TracedModel):  # conventions are learned from all components
            return localise(self.twin, self.recipe, run)
        alike = {
            name for name, calls in by_component(run).items()
            if len(calls) == len(self.calls.get(name, ()))
            and all(map(lambda a, b: self._alike(run, a, b), calls, self.calls[name]))
        }  # fmt: skip
        return localise(self.twin, self.recipe, RemainingRun(run, frozenset(alike)))

    def _alike(self, run: InMemoryRun, call: CapturedCall, known: CapturedCall) -> bool:
        return equal(run.inputs(call), self.healthy.inputs(known)) and equal(
            run.outputs(call), self.healthy.outputs(known)
        )

    def context(self, name: str) -> ComponentContext:
        """Where an answer is tried."""
        component = component_named(self.twin.config, name, self.recipe)
        return ComponentContext(self.twin, component, self.recipe)

    def drawn(self, drawn: random.Random, but: Sequence[str] = ()) -> RandomFault:
        """Draw a fault that changes something of the healthy run."""
        by_role: dict[str, list[str]] = {}
        for name in self.calls:
            if name not in but:
                by_role.setdefault(self.context(name).component.role, []).append(name)
        for _ in range(_TRIES):
            name = drawn.choice(by_role[drawn.choice(sorted(by_role))])
            call = self.calls[name][0]
            inputs, outputs = self.healthy.inputs(call), self.healthy.outputs(call)
            weights = self.candidate.weights_of(name)
            edit = drawn_edit(drawn, Scene(name, inputs, outputs, weights, self._others(name)))
            condition = drawn_condition(drawn, self.healthy.steps, inputs)
            if edit is None:
                continue
            fault = RandomFault(name, edit, condition)
            if self._acts(fault):
                return fault
        raise AssertionError("no component can be changed")

    def _others(self, name: str) -> list[tuple[str, Weight]]:
        role = self.context(name).component.role
        return [
            (f"{other}: {each}", self.candidate.weights_of(other)[each])
            for other in self.calls
            if other != name and self.context(other).component.role == role
            for each in self.candidate.weights_of(other)
        ]

    def _acts(self, fault: RandomFault) -> bool:
        """Return whether it changes outputs in the healthy run's calls, and keeps them finite."""
        name, at = fault.component, [0]
        weights = self.candidate.weights_of(name)
        planted = fault.plant(self.candidate.calls[name], lambda: self.healthy.steps[at[0]])
        changed = False
        with torch.inference_mode():
            for call in self.calls[name]:
                at[0] = call.step
                try:
                    made = planted(self.healthy.inputs(call), weights)
                except (RuntimeError, IndexError, KeyError, ValueError):
                    return False
                right = self.healthy.outputs(call)
                if any(made[n].shape != t.shape or made[n].dtype != t.dtype or not _finite(made[n])
                       for n, t in right.items()):  # fmt: skip
                    return False
                changed |= not equal(made, right)
        return changed


def _finite(x: Tensor) -> bool:
    wide = x.is_floating_point() and x.dtype.itemsize > 1
    return not wide or not bool(x.isnan().any())


@cache
def stage(name: str) -> Stage:
    """Open a stage by its name."""
    model, kind = name.split()
    if name in OURS:
        own = double(model, kind)
        return Stage(name, own.candidate, own.twin, own.recipe, _LENGTHS[model])
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    settings = {**_SETTINGS.get(model, {}), **(_WIDE if kind in _STORED else {})}
    config: Any = config_of(model, dtype, **settings)
    made: Any = built(model, dtype, **settings)
    weights, recipe = weights_of(made), recipe_named("bf16", config)
    if kind in _STORED:
        for path, module in made.model.layers.named_modules(prefix="model.layers"):
            if isinstance(module, torch.nn.Linear):
                coded = quantise(module.weight.detach().float(), _STORED[kind], CANONICAL)
                weights[logical_name(f"{path}.weight")] = Weight.of(coded)
    numerics = replace(Numerics.bf16(), store=dtype)
    candidate, twin = (
        TracedModel(config, replace(numerics, work=wide, products=wide), weights, recipe)
        for wide in (torch.float32, torch.float64)
    )
    return Stage(name, candidate, twin, recipe, _LENGTHS["traced"])
