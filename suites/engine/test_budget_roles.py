"""Every component of both families on its own inputs: float32 inside against float64 inside."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.anatomy.components import components
from degarble.harness.anatomy.presets import small_v4, small_v32
from degarble.harness.anatomy.recipes import recipe_named
from degarble.harness.engine.budget import HEADROOM, judge, spacing
from degarble.harness.engine.budget_roles import RULES, Call, budgets_of
from degarble.harness.errors import Undecided
from degarble.references.binding import Bound
from degarble.references.model_v4 import ModelV4
from degarble.references.model_v32 import ModelV32
from degarble.references.numerics import Mode, Numerics, switches_of
from degarble.references.state import Sequence
from degarble.references.weights import quantised_weights, random_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from degarble.harness.anatomy.config import Config
    from degarble.harness.engine.budget import Budget

V4 = small_v4(num_hidden_layers=3, compress_ratios=(0, 4, 128, 0))
V32 = small_v32(num_hidden_layers=2)
UNDECIDED = {
    "hc_head",
    "attn.hc_pre",
    "ffn.hc_pre",
    "attn.compressor.pool",
    "attn.indexer.compressor.pool",
    "attn.indexer.q",
    "attn.indexer.k",
    "attn.indexer.scores",
    "attn.indexer.weights_proj",
    "ffn.experts.act_quant",
}


def numerics(inside: torch.dtype, family: str) -> Numerics:
    return Numerics(Mode.TWIN, inside, torch.bfloat16, inside, switches_of(f"official-{family}"))


def replayed(config: Config, recipe_name: str) -> Iterator[tuple[Call, Mapping[str, Tensor]]]:
    """Every call of a candidate's forward pass, with the twin's outputs on the same inputs."""
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
        known = {each.name: each for each in components(config, recipe)}
        for name, inputs, outputs in calls:
            exactly = twin.calls[name](inputs, twin.weights_of(name))
            made = {key: value.to(outputs[key].dtype) for key, value in exactly.items()}
            activation = "NVFP4" if "codes" in inputs else None
            call = Call(known[name].role, inputs, made, twin.weights_of(name), activation)
            yield call, outputs


def planted(candidate: Tensor, twin: Tensor, budget: Budget) -> Tensor:
    """One element of the candidate at one and a half budgets from the twin, or one number off."""
    spoilt, at = candidate.clone().flatten(), candidate.numel() * 2 // 3
    if not candidate.dtype.is_floating_point:
        spoilt[at] += 1
        return spoilt.reshape(candidate.shape)
    t, slack = twin.double().flatten()[at], budget.slack.double().expand(twin.shape).flatten()[at]
    allowed = (slack + float(spacing((abs(t) + slack).numpy(), budget.output))) / HEADROOM
    spoilt[at] = (t + 1.5 * allowed).to(candidate.dtype)
    return spoilt.reshape(candidate.shape)


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4-full"])
def test_every_component_is_healthy_or_undecided(config: Config, recipe: str) -> None:
    judged = set()
    for call, outputs in replayed(config, recipe):
        if call.role not in RULES or (call.role == "attn.attend" and config is V32):
            assert call.role in UNDECIDED | {"attn.attend"} or call.role.endswith("act_quant")
            with pytest.raises(Undecided, match="budget"):
                budgets_of(call)
            continue
        for name, budget in budgets_of(call).items():
            if not outputs[name].numel():
                continue  # no group of tokens was complete
            worst = judge(outputs[name], call.outputs[name], budget).worst
            assert worst.ratio <= HEADROOM, (call.role, name, str(worst), budget.derivation)
            caught = judge(
                planted(outputs[name], call.outputs[name], budget), call.outputs[name], budget
            )
            assert caught.worst.ratio > 1, (call.role, name, str(caught.worst))
            judged.add(call.role)
    assert len(judged) > 15
