"""Healthy candidates where few suites go: a window of one token, numbers at the end of float32."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.engine.budget.budget import HEADROOM
from degarble.harness.engine.budget.judging import judge_outputs
from degarble.harness.engine.budget.rules import JudgeableCall
from degarble.harness.formats.weight import Weight
from degarble.harness.model.presets import small_v4, small_v32
from degarble.harness.model.recipes import recipe_named
from degarble.harness.report.verdict import Verdict
from degarble.references.binding import Bound
from degarble.references.numerics import Numerics, switches_of
from degarble.references.weights import random_weights
from degarble.suites.engine.localise_cases import ATTN, localised, replaced, run_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.model.config.config import Config

SHORT = small_v4(num_hidden_layers=2, compress_ratios=(0, 4, 0), sliding_window=1)
V4 = small_v4(num_hidden_layers=1, compress_ratios=(0, 0), num_hash_layers=0)
V32 = small_v32(num_hidden_layers=2)


def test_a_window_of_one_token_remembers_nothing() -> None:
    found = localised(run_of(config=SHORT, recipe="bf16"), SHORT, "bf16")
    assert found.verdict is Verdict.AGREES, found.origins
    kept = replaced("state_window", lambda rows: torch.ones(3, rows.shape[-1], dtype=rows.dtype))
    run = run_of(f"{ATTN}attend", edge=kept, config=SHORT, recipe="bf16")
    (origin,) = localised(run, SHORT, "bf16").origins
    assert origin.component == f"{ATTN}kv_write"


def bound(config: Config, inside: torch.dtype, weights: Mapping[str, Weight]) -> Bound:
    twin = Numerics.twin(switches_of(f"official-{'v4' if config is V4 else 'v32'}"))
    numerics = replace(twin, work=inside, products=inside)
    return Bound(config, numerics, weights, recipe_named("bf16", config))


def spread(*shape: int) -> Tensor:
    """Numbers around -88.7, below which e^-x is no float32, and ordinary ones."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    return torch.where(noise > 0, -88.0 - noise, 10 * noise).bfloat16()


def gated(slots: int | None) -> dict[str, Tensor]:
    width = V4.moe_intermediate_size
    x = torch.cat((spread(64, width), 50 * spread(64, width).flip(0)), dim=-1)
    if slots is None:
        return {"x": x}
    experts = torch.arange(slots).expand(64, slots)
    weights = torch.full((64, slots), 1.25)
    return {"x": x[:, None].expand(-1, slots, -1), "experts": experts, "weights": weights}


def attended() -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(3)
    shape = 8, V4.num_attention_heads, V4.head_dim
    return {
        "q": torch.randn(shape, generator=noise).bfloat16(),
        "window": torch.randn(8, V4.head_dim, generator=noise).bfloat16(),
        "positions": torch.arange(8),
        "token_offsets": torch.tensor([0, 8]),
    }


def routed() -> dict[str, Tensor]:
    """The best score is a number, the next one is none in float32."""
    logits = torch.full((4, V32.n_routed_experts), -100.0)
    logits[:, 0], logits[:, 1] = 3.0, torch.tensor([-86.0, -87.5, -88.5, -95.0])
    return {"logits": logits}


@pytest.mark.parametrize(
    ("config", "name", "inputs"),
    [
        (V4, "layers.0.ffn.shared.act", gated(None)),
        (V4, "layers.0.ffn.experts.act_quant", gated(2)),
        (V4, "layers.0.attn.attend", attended()),
        (V32, "layers.1.ffn.topk", routed()),
    ],
    ids=["shared", "experts", "attention", "router"],
)
def test_what_float32_cannot_hold_is_no_difference(
    config: Config, name: str, inputs: dict[str, Tensor]
) -> None:
    weights = random_weights(config, 1)
    for each in (key for key in weights if key.endswith("attn_sink")):
        # Beside the sink a share is some e^-88.
        weights[each] = Weight(value=torch.linspace(85.0, 95.0, V4.num_attention_heads))
    for each in (key for key in weights if key.endswith("gate.bias")):
        weights[each] = Weight(value=torch.zeros(V32.n_routed_experts))
    call = JudgeableCall.of(bound(config, torch.float64, weights), name, inputs)
    candidate = bound(config, torch.float32, weights)
    made = dict(candidate.calls[name](inputs, candidate.weights_of(name)))
    key = "weights" if name.endswith("topk") else "out"
    twin = call.outputs[key].double()
    assert bool(((twin != 0) & (twin.abs() < 2.0**-126)).any()), "a kernel may flush these"
    made[key] = torch.where(twin.abs() < 2.0**-126, 0.0, made[key])
    for found in judge_outputs(call, made).values():
        assert found.ratio <= HEADROOM, found.worst
    largest = twin.abs().amax()
    made[key] = torch.where(twin.abs() == largest, 0.0, made[key])
    assert judge_outputs(call, made)[key].ratio > 1


@pytest.mark.parametrize("size", [200.0, 1e20, 1e25])
def test_the_end_of_float32_hides_no_number_where_there_is_none(size: float) -> None:
    """Far below -104 everybody's share is 0, however large the product beside it."""
    rows = torch.full((4, V4.moe_intermediate_size), size)
    inputs = {"x": torch.cat((-rows, rows), dim=-1).bfloat16()}
    call = JudgeableCall.of(bound(V4, torch.float64, {}), "layers.0.ffn.shared.act", inputs)
    out = call.outputs["out"]
    assert judge_outputs(call, {"out": torch.zeros_like(out)})["out"].ratio <= HEADROOM
    assert judge_outputs(call, {"out": out + 2.0**-100})["out"].ratio > 1


def test_terms_that_cancel_are_rounded_where_they_arrive_in_float64() -> None:
    routed = spread(8, V4.hidden_size).double() * (1 + 2.0**-30)
    inputs = {"routed": routed, "shared": (-routed).bfloat16()}
    call = JudgeableCall.of(bound(V4, torch.float64, {}), "layers.0.ffn.moe_sum", inputs)
    own = inputs["routed"].float() + inputs["shared"].float()
    assert not torch.equal(own.bfloat16(), call.outputs["out"])
    assert judge_outputs(call, {"out": own.bfloat16()})["out"].ratio <= HEADROOM
    assert judge_outputs(call, {"out": own.bfloat16() + 2.0**-12})["out"].ratio > 1
