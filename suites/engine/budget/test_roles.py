"""Every component of both families on its own inputs: float32 inside against float64 inside."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import Undecided
from degarble.harness.engine.budget.budget import HEADROOM, spacing
from degarble.harness.engine.budget.judging import judge_outputs
from degarble.harness.engine.budget.roles import RULES, WHOLE, JudgeableCall, budgets_of
from degarble.harness.model.components import components
from degarble.harness.model.presets import small_v4, small_v32
from degarble.harness.model.recipes import RECIPE_NAMES, recipe_named
from degarble.references.binding import Bound
from degarble.references.model.v4 import ModelV4
from degarble.references.model.v32 import ModelV32
from degarble.references.numerics import Mode, Numerics, switches_of
from degarble.references.state import Sequence
from degarble.references.weights import quantised_weights, random_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.budget.budget import Budget
    from degarble.harness.model.config.config import Config

V4 = small_v4(num_hidden_layers=3, compress_ratios=(0, 4, 128, 0))
V32 = small_v32(num_hidden_layers=2)


def numerics(inside: torch.dtype, family: str) -> Numerics:
    return Numerics(Mode.TWIN, inside, torch.bfloat16, inside, switches_of(f"official-{family}"))


def replayed(
    config: Config, recipe_name: str
) -> Iterator[tuple[JudgeableCall, Mapping[str, Tensor]]]:
    """Every call of a candidate's passes and of its drafter, with the twin's outputs beside it."""
    family = "v4" if config is V4 else "v32"
    recipe = recipe_named(recipe_name, config)
    weights = quantised_weights(random_weights(config, 1), config, recipe)
    twin = Bound(config, numerics(torch.float64, family), weights, recipe)
    calls: list[tuple[str, dict[str, Tensor], dict[str, Tensor]]] = []

    def seen(component: str, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        calls.append((component, dict(inputs), dict(outputs)))

    candidate = Bound(config, numerics(torch.float32, family), weights, recipe, observer=seen)
    model = ModelV4(candidate, V4) if config is V4 else ModelV32(candidate, V32)
    with torch.inference_mode():
        sequence = Sequence()
        for ids in (torch.arange(140) * 37 % 60, torch.tensor([5])):
            model.forward([sequence], [ids])
        for name, inputs, outputs in calls:
            yield JudgeableCall.of(twin, name, inputs), outputs


def planted(candidate: Tensor, twin: Tensor, budget: Budget) -> Tensor:
    """One element of the candidate at one and a half budgets from the twin."""
    spoilt, at = candidate.clone().flatten(), candidate.numel() * 2 // 3
    t, slack = twin.double().flatten()[at], budget.slack.double().expand(twin.shape).flatten()[at]
    allowed = (slack + float(spacing((abs(t) + slack).numpy(), budget.output))) / HEADROOM
    spoilt[at] = (t + 1.5 * allowed).to(candidate.dtype)
    return spoilt.reshape(candidate.shape)


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_every_output_is_healthy(config: Config, recipe: str) -> None:
    """Float32 against float64 inside: at most HEADROOM of each budget, and nothing undecided."""
    judged = set()
    for call, outputs in replayed(config, recipe):
        for name, found in judge_outputs(call, outputs).items():
            assert found.ratio <= HEADROOM, (call.role, name, found.worst, found.derivation)
            assert found.derivation
            judged.add(call.role)
    assert len(judged) > 25


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
def test_one_and_a_half_budgets_are_caught(config: Config) -> None:
    """In one element of every output of numbers."""
    done = set()
    for call, outputs in replayed(config, "bf16"):
        for name, twin in call.outputs.items():
            if (call.role, name) in done or not twin.numel() or not twin.dtype.is_floating_point:
                continue
            budget = budgets_of(call)[name]
            if budget.free is not None and budget.free.expand(twin.shape).flatten()[-1]:
                continue
            if twin.flatten()[twin.numel() * 2 // 3].isinf():
                continue
            spoilt = dict(outputs) | {name: planted(outputs[name], twin, budget)}
            found = judge_outputs(call, spoilt)[name]
            assert found.ratio > 1, (call.role, name, str(found.worst))
            done.add((call.role, name))
    assert len(done) > 25


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_every_role_of_every_recipe_is_known(config: Config, recipe: str) -> None:
    for component in components(config, recipe_named(recipe, config)):
        known = component.role in {**RULES, **WHOLE} or component.role.endswith(".act_quant")
        assert known, component.name


def test_a_call_without_facts_is_undecided_where_the_chain_needs_them() -> None:
    call = JudgeableCall("attn.hc_pre", {}, {"out": torch.zeros(1)}, {})
    with pytest.raises(Undecided, match="budget"):
        budgets_of(call)
    with pytest.raises(Undecided, match="budget"):
        budgets_of(JudgeableCall("markov", {}, {"out": torch.zeros(1)}, {}))
