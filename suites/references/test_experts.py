"""The router and the routed experts against dense evaluations, with ties and group limits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.harness.model.config.config import small_v4, small_v32
from degarble.harness.model.recipes import Recipe, Rule
from degarble.references import experts
from degarble.references.binding import BoundModel
from degarble.references.numerics import Numerics
from degarble.references.weights import quantised_weights, random_weights

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.formats.weight import Weight
    from degarble.suites.support.configs import DeepSeekConfig


# --------------------------------------------------------------------------------------------------
# Routed experts against a dense evaluation of every expert for every token.

V4 = small_v4(hidden_size=64, moe_intermediate_size=48, swiglu_limit=0.7)
V32 = small_v32(hidden_size=64, moe_intermediate_size=48)
RECIPE = Recipe("experts", (Rule("*.ffn.experts.*", "NVFP4", "NVFP4"),))
LAYER = 2


def case(config: DeepSeekConfig, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(7, config.hidden_size, generator=generator)
    chosen = torch.rand(7, 8, generator=generator).argsort(-1)[:, :3]
    return x, chosen, torch.rand(7, 3, generator=generator)


def run(bound: BoundModel, x: Tensor, chosen: Tensor, shares: Tensor) -> dict[str, Tensor]:
    """All four components of routed experts; every output by name."""
    p = f"layers.{LAYER}.ffn.experts."
    given, found = {"x": x}, {}
    if bound.quantises(f"{p}w13"):
        given = dict(bound(f"{p}w13.act_quant", x=x, experts=chosen))
    found["w13"] = bound(f"{p}w13", **given, experts=chosen)["out"]
    made = bound(f"{p}act_quant", x=found["w13"], experts=chosen, weights=shares)
    given = {"x": made["out"]} if "out" in made else dict(made)
    found["w2"] = bound(f"{p}w2", **given, experts=chosen)["out"]
    found["out"] = bound(f"{p}combine", x=found["w2"], weights=shares)["out"]
    return found


def dense(
    config: DeepSeekConfig, weights: dict[str, Weight], x: Tensor, chosen: Tensor, shares: Tensor
) -> Tensor:
    """Every expert for every token, masked by the choice."""
    limit = getattr(config, "swiglu_limit", None)
    out = torch.zeros(7, config.hidden_size, dtype=torch.float64)
    for number in range(config.n_routed_experts):
        w1, w2, w3 = (
            weights[f"layers.{LAYER}.ffn.experts.{number}.{part}"].values(torch.float64)
            for part in ("w1", "w2", "w3")
        )
        gate, up = x.double() @ w1.T, x.double() @ w3.T
        if limit:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        made = (torch.nn.functional.silu(gate) * up) @ w2.T
        out += made * ((chosen == number) * shares.double()).sum(-1, keepdim=True)
    return out


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
@pytest.mark.parametrize("before", [True, False])
def test_definition_equals_the_dense_evaluation(
    config: DeepSeekConfig, before: bool, seed: int
) -> None:
    weights = random_weights(config, seed)
    x, chosen, shares = case(config, seed)
    numerics = Numerics.definition(routing_weight_before_w2=before)
    made = run(BoundModel(config, numerics, weights), x, chosen, shares)["out"]
    expected = dense(config, weights, x, chosen, shares)
    assert (made - expected).abs().max() < 1e-12 * expected.abs().max() * 10
    turned = run(BoundModel(config, numerics, weights), x, chosen.flip(0), shares)["out"]
    assert (turned - expected).abs().max() > 0.1 * expected.abs().max()  # wrong experts are seen


def test_one_token_takes_the_same_way_as_many(seed: int) -> None:
    weights = random_weights(V4, seed)
    x, chosen, shares = case(V4, seed)
    bound = BoundModel(V4, Numerics.definition(), weights)
    many = run(bound, x, chosen, shares)["out"]
    one = torch.cat([run(bound, x[t : t + 1], chosen[t : t + 1], shares[t : t + 1])["out"]
                     for t in range(7)])  # fmt: skip
    assert (many - one).abs().max() < 1e-13


def test_slots_of_no_expert_yield_zero(seed: int) -> None:
    weights = random_weights(V4, seed)
    x, chosen, shares = case(V4, seed)
    bound = BoundModel(V4, Numerics.definition(), weights)
    some = chosen.clone()
    some[:, 1], some[3] = -1, -1
    made = run(bound, x, some, shares)
    assert not made["w2"][:, 1].any()
    assert not made["out"][3].any()
    lost = shares.clone()
    lost[:, 1] = 0.0
    assert (made["out"][:3] - run(bound, x, chosen, lost)["out"][:3]).abs().max() < 1e-13
    nobody = run(bound, x, torch.full_like(chosen, -1), shares)["out"]
    assert nobody.shape == (7, V4.hidden_size)
    assert not nobody.any()
    assert list(experts.slots_by_expert(torch.tensor([[5, -1, 2]]))) == [
        (2, slice(2, 3)), (5, slice(0, 1)),
    ]  # fmt: skip


def quantised(weights: dict[str, Weight], seed: int) -> dict[str, Weight]:
    made = quantised_weights(weights, V4, RECIPE)
    scales = torch.rand(1000, generator=torch.Generator().manual_seed(seed)) * 0.002 + 0.0005
    for number, (name, weight) in enumerate(sorted(made.items())):
        if weight.is_quantised:
            made[name] = replace(weight, input_scale=scales[number], _decoded={})
    return made


@pytest.mark.parametrize("shared", [False, True], ids=["per_expert", "largest"])
def test_twin_quantises_each_slot_with_its_experts_scale(shared: bool, seed: int) -> None:
    weights = quantised(random_weights(V4, seed), seed)
    x, chosen, shares = case(V4, seed)
    x = x.bfloat16()
    numerics = Numerics.twin(input_scale_shared=shared)
    made = run(BoundModel(V4, numerics, weights, RECIPE), x, chosen, shares)

    def scale(number: int, *parts: str) -> Tensor:
        numbers = range(8) if shared else [number]
        tensors = [weights[f"layers.{LAYER}.ffn.experts.{n}.{p}"].input_scale
                 for n in numbers for p in parts]  # fmt: skip
        return torch.stack([s for s in tensors if s is not None]).amax()

    def through(row: Tensor, number: int, *parts: str) -> Tensor:
        """One row, quantised as one, through some matrices of one expert."""
        code = quantise(row[None], NVFP4, decode_scale=scale(number, *parts))
        value = dequantise(code, torch.float64)
        matrices = [weights[f"layers.{LAYER}.ffn.experts.{number}.{p}"] for p in parts]
        return torch.cat([(value @ m.values(torch.float64).T)[0] for m in matrices]).bfloat16()

    for t in range(7):
        total = torch.zeros(64)
        for k in range(3):
            number = int(chosen[t, k])
            both = through(x[t], number, "w1", "w3")
            assert torch.equal(made["w13"][t, k], both)
            gate, up = both.float().chunk(2)
            act = torch.nn.functional.silu(gate.clamp(max=0.7)) * up.clamp(-0.7, 0.7)
            down = through((act * shares[t, k]).bfloat16(), number, "w2")
            assert torch.equal(made["w2"][t, k], down)
            total = total + down.float()
        assert torch.allclose(made["out"][t], total, rtol=1e-6, atol=1e-6)


def test_the_two_scale_rules_differ(seed: int) -> None:
    weights = quantised(random_weights(V4, seed), seed)
    x, chosen, shares = case(V4, seed)
    made = [
        run(BoundModel(V4, Numerics.twin(input_scale_shared=s), weights, RECIPE), x, chosen, shares)
        for s in (False, True)
    ]
    assert not torch.equal(made[0]["w13"], made[1]["w13"])


def test_weight_before_w2_matters_once_activations_are_rounded(seed: int) -> None:
    weights = quantised(random_weights(V4, seed), seed)
    x, chosen, shares = case(V4, seed)
    outs = []
    for before in (True, False):
        numerics = Numerics.twin(routing_weight_before_w2=before)
        outs.append(run(BoundModel(V4, numerics, weights, RECIPE), x, chosen, shares)["out"])
    assert not torch.equal(outs[0], outs[1])
    assert (outs[0] - outs[1]).norm() < 0.3 * outs[0].norm()


# --------------------------------------------------------------------------------------------------
# Expert choice against its formulas, row by row, with ties and group limits.

EXACT = Numerics.definition()


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_scores_are_roots_of_softplus() -> None:
    x = [-40.0, -1.0, 0.0, 2.0, 19.9, 20.1, 300.0]
    expected = [math.sqrt(math.log1p(math.exp(v)) if v <= 20 else v) for v in x]
    made = experts.sqrt_softplus(torch.tensor(x, dtype=torch.float64))
    assert made.tolist() == pytest.approx(expected, rel=1e-12)


def test_choice_is_by_size_and_ties_go_to_the_lower_id() -> None:
    scores = torch.tensor([[0.5, 2.0, 0.5, 2.0, 0.5], [1.0, 1.0, 1.0, 1.0, 1.0]])
    assert experts.largest_experts(scores, 3).tolist() == [[1, 3, 0], [0, 1, 2]]


def test_choice_before_or_after_the_scoring_function_is_the_same(seed: int) -> None:
    """A negative control: without a bias both orders are right, so they must not be told apart."""
    logits = noise(50, 8, seed=seed)
    expected = experts.largest_experts(logits, 3)
    assert torch.equal(experts.largest_experts(experts.sqrt_softplus(logits), 3), expected)
    assert torch.equal(experts.largest_experts(torch.sigmoid(logits), 3), expected)
    biased = experts.largest_experts(experts.sqrt_softplus(logits) + noise(8, seed=seed + 1), 3)
    assert not torch.equal(biased, expected)


def test_weights_are_shares_of_the_chosen_scores(seed: int) -> None:
    scores = noise(4, 6, seed=seed).abs()
    chosen = experts.largest_experts(scores, 2)
    made = experts.router_weights(scores, chosen, 2.5, 0.0)
    for row, ids, out in zip(scores.tolist(), chosen.tolist(), made.tolist(), strict=True):
        total = sum(row[i] for i in ids)
        assert out == pytest.approx([2.5 * row[i] / total for i in ids])
    assert made.sum(-1).tolist() == pytest.approx([2.5] * 4)
    assert (experts.router_weights(scores, chosen, 2.5, 0.1) < made).all()  # an epsilon is seen


def test_groups_are_worth_their_two_best(seed: int) -> None:
    scores = noise(7, 12, seed=seed)
    made = experts.grouped_scores(scores, experts.GroupFacts(groups=4, kept=2))
    for row, out in zip(scores.tolist(), made.tolist(), strict=True):
        groups = [row[3 * g : 3 * g + 3] for g in range(4)]
        worth = [sum(sorted(group)[-2:]) for group in groups]
        best = sorted(range(4), key=lambda g: -worth[g])[:2]
        expected = [v if i // 3 in best else -math.inf for i, v in enumerate(row)]
        assert out == expected
        by_one = sorted(range(4), key=lambda g: -max(groups[g]))[:2]
        if set(by_one) != set(best):
            break
    else:
        pytest.fail("no row tells two best from one")


def test_router_rounds_only_where_the_switch_says(seed: int) -> None:
    x, w = noise(3, 16, seed=seed).bfloat16(), noise(5, 16, seed=seed + 1).bfloat16()
    official = experts.router_logits(x, w, Numerics.bf16())
    assert torch.equal(official, x.float() @ w.float().T)
    theirs = experts.router_logits(x, w, Numerics.bf16(router_in_storage_dtype=True))
    assert theirs.dtype is torch.bfloat16
    assert torch.equal(theirs, official.bfloat16())
    assert not torch.equal(theirs.float(), official)
