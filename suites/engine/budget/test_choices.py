"""Choices: legal flips near ties, illegal ones, and weights for the candidate's own choice."""

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
from degarble.harness.report.verdict import Verdict
from degarble.references.binding import Bound
from degarble.references.numerics import Numerics

if TYPE_CHECKING:
    from torch import Tensor

V4 = small_v4(num_hidden_layers=3, compress_ratios=(0, 4, 128, 0), num_hash_layers=1)
V32 = small_v32(num_hidden_layers=2)


def router(family: str, logits: Tensor, bias: Tensor | None = None) -> JudgeableCall:
    """The router of a scored layer."""
    config, name = (V4, "layers.1.ffn.topk") if family == "v4" else (V32, "layers.1.ffn.topk")
    local = "ffn.gate.bias"
    bias = torch.zeros(config.n_routed_experts) if bias is None else bias
    twin = Bound(config, replace(Numerics.twin(), work=torch.float64), {})
    weights = dict.fromkeys(twin.weights_of(name), Weight(value=bias)) or {
        local: Weight(value=bias)
    }
    what, facts = twin.bound_to(name)
    inputs = {"logits": logits}
    made = twin.calls[name](inputs, weights)
    outputs = {
        key: part.float() if part.is_floating_point() else part for key, part in made.items()
    }
    return JudgeableCall(what.role, inputs, outputs, weights, facts=facts)


def own_weights(call: JudgeableCall, experts: Tensor) -> Tensor:
    """The weights that a candidate computes for its choice, in float32."""
    logits = call.inputs["logits"]
    v4 = call.facts is not None and call.facts.config is V4
    score = torch.nn.functional.softplus(logits).sqrt() if v4 else torch.sigmoid(logits)
    chosen = score.gather(1, experts)
    assert call.facts is not None
    return chosen / chosen.sum(-1, keepdim=True) * call.facts.config.routed_scaling_factor


def answer(call: JudgeableCall, experts: Tensor) -> dict[str, Tensor]:
    return {"experts": experts, "weights": own_weights(call, experts)}


def test_a_near_tie_may_flip_and_a_gap_may_not() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0 + 2e-7, 0.0, -1.0, -2.0, -3.0, -4.0]] * 2)
    logits[1, 2] = 1.01
    call = router("v4", logits)
    assert call.outputs["experts"].tolist() == [[0, 2], [0, 2]]
    flipped = torch.tensor([[0, 1], [0, 2]])
    found = judge_outputs(call, answer(call, flipped))
    assert found["experts"].verdict is Verdict.AGREES
    assert found["experts"].flips.count == 1
    assert found["experts"].flips.rows == (0,)
    assert found["weights"].ratio <= HEADROOM
    found = judge_outputs(call, answer(call, torch.tensor([[0, 2], [0, 1]])))
    assert found["experts"].verdict is Verdict.DIFFERS
    assert found["experts"].worst is not None
    assert found["experts"].worst.place == (1,)
    assert 100 < found["experts"].ratio < float("inf"), "a gap in units of what is allowed"


def test_one_and_a_half_budgets_of_gap_are_caught() -> None:
    from degarble.harness.engine.budget.codes_and_choices import scores_of  # noqa: PLC0415  one use

    logits = torch.tensor([[3.0, 1.0, 1.0, 0.0, -1.0, -2.0, -3.0, -4.0]], dtype=torch.float64)
    error = float(scores_of(router("v4", logits)).error[0, 1])
    bias = torch.zeros(8, dtype=torch.float64)
    for budgets, legal in ((0.6, True), (1.5, False)):
        bias[2] = 2 * (error + 6e-8 * 1.1) * budgets / HEADROOM
        call = router("v4", logits, bias)
        found = judge_outputs(call, answer(call, torch.tensor([[0, 1]])))["experts"]
        assert (found.verdict is Verdict.AGREES) is legal, found.ratio
        assert found.ratio == pytest.approx(budgets, rel=0.2)


def test_the_order_of_experts_is_free_and_weights_follow() -> None:
    call = router("v4", torch.randn(5, 8, generator=torch.Generator().manual_seed(1)))
    turned = call.outputs["experts"].flip(1)
    found = judge_outputs(call, answer(call, turned))
    assert found["experts"].ratio == 0
    assert found["experts"].flips.count == 0
    assert found["weights"].ratio <= HEADROOM
    wrong = {"experts": turned, "weights": call.outputs["weights"]}
    assert judge_outputs(call, wrong)["weights"].ratio > 1, "weights of the other slots"


@pytest.mark.parametrize("experts", [[[0, 0]], [[0, 8]], [[0, -1]]], ids=str)
def test_experts_that_cannot_be_differ(experts: list[list[int]]) -> None:
    call = router("v4", torch.arange(8.0).flip(0)[None])
    outputs = {"experts": torch.tensor(experts), "weights": call.outputs["weights"]}
    assert judge_outputs(call, outputs)["experts"].ratio == float("inf")


def test_experts_of_the_table_are_exact() -> None:
    twin = Bound(V4, Numerics.twin(), {})
    what, facts = twin.bound_to("layers.0.ffn.topk")
    (name,) = twin.weights_of("layers.0.ffn.topk")
    weights = {name: Weight(value=torch.tensor([[1, 2], [3, 4]]))}
    inputs = {"logits": torch.ones(2, 8), "tokens": torch.tensor([0, 1])}
    outputs = twin.calls["layers.0.ffn.topk"](inputs, weights)
    call = JudgeableCall(what.role, inputs, outputs, weights, facts=facts)
    assert judge_outputs(call, dict(outputs))["experts"].ratio == 0
    other = dict(outputs) | {"experts": torch.tensor([[1, 2], [3, 5]])}
    assert judge_outputs(call, other)["experts"].ratio == float("inf")


def test_a_near_tie_of_groups_may_flip_experts_whose_own_scores_are_apart() -> None:
    """Four groups of two, two kept: 0 for certain; 1 and 2 are worth the same but for rounding."""
    wanted = torch.sigmoid(torch.tensor([1.0, 0.9, 1.2], dtype=torch.float64))
    equal = float(torch.logit(wanted[0] + wanted[1] - wanted[2]))
    logits = torch.tensor([[3.0, 0.4, 1.0, 0.9, 1.2, equal, -3.0, -3.0]])
    call = router("v32", logits)
    twin = call.outputs["experts"].tolist()
    assert twin in ([[0, 2]], [[0, 4]])
    other = torch.tensor([[0, 4]] if twin == [[0, 2]] else [[0, 2]])
    found = judge_outputs(call, answer(call, other))
    assert found["experts"].verdict is Verdict.AGREES
    assert found["experts"].flips.count == 1
    assert found["weights"].ratio <= HEADROOM
    for wrong in ([[0, 3]], [[2, 4]], [[0, 6]]):
        far = judge_outputs(call, answer(call, torch.tensor(wrong)))
        assert far["experts"].verdict is Verdict.DIFFERS, wrong
    logits[0, 5] += 1e-3
    call = router("v32", logits)
    assert call.outputs["experts"].tolist() == [[0, 4]]
    far = judge_outputs(call, answer(call, torch.tensor([[0, 2]])))
    assert far["experts"].verdict is Verdict.DIFFERS, "the groups are no longer alike"


def test_a_choice_from_more_groups_than_are_kept_differs() -> None:
    config = replace(V32, num_experts_per_tok=4, topk_group=2)
    twin = Bound(config, Numerics.twin(), {})
    what, facts = twin.bound_to("layers.1.ffn.topk")
    (name,) = twin.weights_of("layers.1.ffn.topk")
    weights = {name: Weight(value=torch.zeros(8))}
    inputs = {"logits": torch.tensor([[2.0, 1.9, 1.8, 1.7, 1.6, 0.0, 0.0, 0.0]])}
    outputs = twin.calls["layers.1.ffn.topk"](inputs, weights)
    call = JudgeableCall(what.role, inputs, outputs, weights, facts=facts)
    other = dict(outputs) | {"experts": torch.tensor([[0, 1, 2, 4]])}
    assert judge_outputs(call, other)["experts"].ratio > 1


def listed(scores: Tensor) -> JudgeableCall:
    twin = Bound(V4, Numerics.twin(), {})
    what, facts = twin.bound_to("layers.1.attn.indexer.topk")
    inputs = {"scores": scores}
    return JudgeableCall(
        what.role, inputs, twin.calls["layers.1.attn.indexer.topk"](inputs, {}), {}, facts=facts
    )


def test_rows_of_equal_scores_may_be_exchanged_and_others_may_not() -> None:
    scores = torch.tensor([[9.0, 8, 7, 6, 5, 4, 3, 2, 2, 1], [1.0] * 10])
    scores[1, 3:] = -torch.inf
    call = listed(scores)
    assert call.outputs["out"].tolist() == [list(range(8)), [0, 1, 2, -1, -1, -1, -1, -1]]
    equal = call.outputs["out"].flip(1).clone()
    assert judge_outputs(call, {"out": equal})["out"].flips.count == 0
    equal[0, 0] = 8
    found = judge_outputs(call, {"out": equal})["out"]
    assert (found.verdict, found.flips.count, found.flips.rows) == (Verdict.AGREES, 1, (0,))
    for at, row in ((0, 9), (3, 3), (0, 10), (0, 5), (0, -1)):
        wrong = call.outputs["out"].clone()
        wrong[1 if at == 3 else 0, 7 if at == 0 else at] = row
        assert judge_outputs(call, {"out": wrong})["out"].ratio == float("inf"), (at, row)


def test_scores_that_hold_nan_have_no_order() -> None:
    scores = torch.arange(10.0)[None].clone()
    scores[0, 3] = torch.nan
    call = listed(scores)
    assert judge_outputs(call, {"out": torch.arange(8)[None]})["out"].verdict is Verdict.AGREES
