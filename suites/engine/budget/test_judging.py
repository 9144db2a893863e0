"""One entry judges all outputs; what is missing, too good, or not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.engine.budget.budget import HEADROOM, nearer_than_the_twin
from degarble.harness.engine.budget.judging import judge_outputs
from degarble.harness.engine.budget.rules import JudgeableCall
from degarble.harness.model.presets import small_v4, small_v32
from degarble.harness.model.recipes import recipe_named
from degarble.harness.report.verdict import Verdict
from degarble.references.binding import Bound
from degarble.references.numerics import Numerics
from degarble.references.weights import quantised_weights, random_weights

if TYPE_CHECKING:
    from torch import Tensor

V4 = small_v4(num_hidden_layers=3, compress_ratios=(0, 4, 128, 0))
V32 = small_v32(num_hidden_layers=2)


def test_an_output_that_is_missing_or_has_another_shape_differs() -> None:
    twin = Bound(V4, Numerics.twin(), random_weights(V4, 1))
    call = JudgeableCall.of(twin, "embed", {"tokens": torch.tensor([3, 1])})
    for outputs in ({}, {"out": call.outputs["out"][:1]}):
        assert judge_outputs(call, outputs)["out"].verdict is Verdict.DIFFERS
    assert judge_outputs(call, call.outputs)["out"].ratio == 0


def operands(twin: Bound, component: str, seed: int) -> tuple[str, dict[str, Tensor]]:
    """The linear behind a quantisation, and what goes into the latter."""
    config, generator = twin.config, torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    tokens, slots = 16, config.num_experts_per_tok
    experts = torch.arange(tokens * slots).reshape(tokens, slots) % config.n_routed_experts
    if component.endswith("ffn.experts.act_quant"):
        x = random(tokens, slots, 2 * config.moe_intermediate_size)
        weights = torch.full((tokens, slots), 0.5)
        return component.replace("act_quant", "w2"), {
            "x": x, "experts": experts, "weights": weights,
        }  # fmt: skip
    linear = component.removesuffix(".act_quant")
    if linear.endswith("ffn.experts.w13"):
        return linear, {"x": random(tokens, config.hidden_size), "experts": experts}
    width = next(iter(twin.weights_of(linear).values())).shape[1]
    groups = config.o_groups if linear.endswith("wo_a") and config is V4 else 1
    return linear, {"x": random(tokens, width * groups)}


@pytest.mark.parametrize("name", ["nvfp4-full", "official", "nvfp4-experts"])
@pytest.mark.parametrize("family", ["v4", "v32"])
def test_too_good_is_usable_on_every_linear(family: str, name: str) -> None:
    """A healthy one is never nearer than the twin; one that left the quantisation out always is."""
    config = V4 if family == "v4" else V32
    recipe, plain = recipe_named(name, config), random_weights(config, 1)
    stored = quantised_weights(plain, config, recipe)
    twin = Bound(config, Numerics.twin(), stored, recipe)
    single = Bound(config, Numerics.twin(products=torch.float32), stored, recipe)
    bare, tried = Bound(config, Numerics.bf16(), plain), set[str]()
    for seed, component in enumerate(twin.calls):
        role = twin.bound_to(component)[0].role
        if role in tried or not role.endswith("act_quant"):
            continue
        linear, inputs = operands(twin, component, seed)
        codes = dict(twin.calls[component](inputs, twin.weights_of(component)))
        if "codes" not in codes:
            continue  # the drafter stays as it was
        listed = {key: inputs[key] for key in ("experts",) if key in inputs}
        call = JudgeableCall.of(twin, linear, codes | listed)
        healthy = single.calls[linear](call.inputs, single.weights_of(linear))
        if component in bare.calls:
            inputs = dict(bare.calls[component](inputs, {})) | listed
            inputs["x"] = inputs.pop("out")
        reference = bare.calls[linear](inputs, bare.weights_of(linear))
        for made, good in ((healthy, False), (reference, True)):
            for key, found in judge_outputs(call, made).items():
                near = nearer_than_the_twin(found, made[key], call.outputs[key], reference[key])
                assert (near.ratio > 1) is good, (linear, key, str(near))
                assert good or near.ratio <= HEADROOM, (linear, key, str(near))
        tried.add(role)
    assert len(tried) > 3


def test_what_is_kept_holds_no_tensor() -> None:
    twin = Bound(V4, Numerics.twin(), random_weights(V4, 1))
    call = JudgeableCall.of(twin, "embed", {"tokens": torch.tensor([3, 1])})
    found = judge_outputs(call, call.outputs)["out"].settled()
    assert found.derivation == judge_outputs(call, call.outputs)["out"].derivation
    assert found.comparison is not None
    assert found.comparison.identical == 1


def test_operands_that_are_not_finite_have_no_budget_and_equal_kinds_agree() -> None:
    twin = Bound(V4, Numerics.twin(), random_weights(V4, 1))
    x = torch.randn(3, V4.hidden_size).bfloat16()
    x[1, 5] = torch.nan
    call = JudgeableCall.of(twin, "layers.0.attn.wq_a", {"x": x})
    found = judge_outputs(call, {"out": call.outputs["out"].clone()})["out"]
    assert found.verdict is Verdict.AGREES
    quiet = call.outputs["out"].nan_to_num()
    found = judge_outputs(call, {"out": quiet})["out"]
    assert found.verdict is Verdict.DIFFERS
    assert found.worst is not None
    assert found.worst.level == "kind of element"
