"""Components of both families in float32 and by other means, within their budgets."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest
import torch

from degarble.harness.base.errors import Undecided
from degarble.harness.engine.budget.bounded_values import FUNCTION, exactly
from degarble.harness.engine.budget.budget import HEADROOM, spacing
from degarble.harness.engine.budget.chains import _balanced, _sigmoid
from degarble.harness.engine.budget.judging import judge_outputs
from degarble.harness.engine.budget.roles import RULES, WHOLE, JudgeableCall, budgets_of
from degarble.harness.engine.budget.rules import U
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.formats.quantise import quantise
from degarble.harness.formats.weight import Weight
from degarble.harness.model.components import components
from degarble.harness.model.config.config import small_v4, small_v32
from degarble.harness.model.recipes import recipe_named
from degarble.harness.model.types import RECIPE_NAMES
from degarble.harness.report.verdict import Verdict
from degarble.references import elementary
from degarble.references.binding import BoundModel
from degarble.references.model import ModelV4, ModelV32, Sequence
from degarble.references.numerics import DecodedOperands, Mode, Numerics, Switches, switches_of
from degarble.references.weights import quantised_weights, random_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.budget.budget import Budget
    from degarble.references.components.v4 import V4Facts
    from degarble.suites.support.configs import DeepSeekConfig


# --------------------------------------------------------------------------------------------------
# Every component of both families on its own inputs: float32 inside against float64 inside.

V4 = small_v4(num_hidden_layers=3, compress_ratios=(0, 4, 128, 0))
V32 = small_v32(num_hidden_layers=2)


# What few sources do, all at once.
RARE = Switches(
    norm_rounded_before_weight=True, gate_rounded_before_product=True,
    activation_rounded_before_codes=False, latent_rounded_before_rotation=False,
    entry_rounded_in_between=False, indexer_operand_rounded_in_between=False,
    indexer_sum_in_storage_dtype=False, decoded_operands=DecodedOperands.BOTH,
)  # fmt: skip


def numerics(inside: torch.dtype, source: str) -> Numerics:
    switches = RARE if source == "rare" else switches_of(source)
    return Numerics(Mode.TWIN, inside, torch.bfloat16, inside, switches)


def replayed(
    config: DeepSeekConfig, recipe_name: str, source: str = ""
) -> Iterator[tuple[JudgeableCall, Mapping[str, Tensor]]]:
    """Every call of a candidate's passes and of its drafter, with the twin's outputs beside it."""
    source = source or f"official-{'v4' if config is V4 else 'v32'}"
    recipe = recipe_named(recipe_name, config)
    weights = quantised_weights(random_weights(config, 1), config, recipe)
    twin = BoundModel(config, numerics(torch.float64, source), weights, recipe)
    calls: list[tuple[str, dict[str, Tensor], dict[str, Tensor]]] = []

    def seen(component: str, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        calls.append((component, dict(inputs), dict(outputs)))

    candidate = BoundModel(config, numerics(torch.float32, source), weights, recipe, observer=seen)
    model = ModelV4(candidate, V4) if config is V4 else ModelV32(candidate, V32)
    with torch.inference_mode():
        sequence = Sequence()
        for ids in (torch.arange(140) * 37 % 60, torch.tensor([5])):
            model.forward([sequence], [ids])
        for name, inputs, outputs in calls:
            yield JudgeableCall.from_twin(twin, name, inputs), outputs


def planted(candidate: Tensor, twin: Tensor, budget: Budget) -> Tensor:
    """One element of the candidate at one and a half budgets from the twin."""
    spoilt, at = candidate.clone().flatten(), candidate.numel() * 2 // 3
    t, slack = twin.double().flatten()[at], budget.slack.double().expand(twin.shape).flatten()[at]
    allowed = (slack + float(spacing((abs(t) + slack).numpy(), budget.output))) / HEADROOM
    spoilt[at] = (t + 1.5 * allowed).to(candidate.dtype)
    return spoilt.reshape(candidate.shape)


# By default what the official release and vLLM compute: together they have every kind of operand.
QUICK = {("official", ""), ("nvfp4-full", "vllm")}
HEALTHY = [
    pytest.param(recipe, source, marks=() if (recipe, source) in QUICK else pytest.mark.slow)
    for recipe, source in (
        *((recipe, "") for recipe in RECIPE_NAMES),
        *(("nvfp4-full", source) for source in ("transformers", "vllm", "rare")),
    )
]


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
@pytest.mark.parametrize(("recipe", "source"), HEALTHY)
def test_every_output_is_healthy(config: DeepSeekConfig, recipe: str, source: str) -> None:
    """Float32 against float64 inside: at most HEADROOM of each budget, and nothing undecided."""
    judged = set()
    for call, outputs in replayed(config, recipe, source):
        for name, output in judge_outputs(call, outputs).items():
            assert output.ratio <= HEADROOM, (call.role, name, output.worst, output.derivation)
            assert output.derivation
            judged.add(call.role)
    assert len(judged) > 25


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
def test_one_and_a_half_budgets_are_caught(config: DeepSeekConfig) -> None:
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
            result = judge_outputs(call, spoilt)[name]
            assert result.ratio > 1, (call.role, name, str(result.worst))
            done.add((call.role, name))
    assert len(done) > 25


def of_tokens(call: JudgeableCall, part: slice) -> JudgeableCall:
    """The same call of some of its tokens."""
    inputs, outputs = (
        {name: tensor[part] for name, tensor in side.items()}
        for side in (call.inputs, call.outputs)
    )
    return replace(call, inputs=inputs, outputs=outputs)


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
@pytest.mark.parametrize("source", ["", "vllm"])
def test_a_tokens_slack_is_its_own(config: DeepSeekConfig, source: str) -> None:
    """Where tokens do not meet, the budget of a few is theirs in the whole call."""
    part, done = slice(3, 6), set()
    for call, _ in replayed(config, "bf16", source):
        sides = [*call.inputs.values(), *call.outputs.values()]
        if "token_offsets" in call.inputs or {len(tensor) for tensor in sides} != {140}:
            continue
        few = budgets_of(of_tokens(call, part))
        for name, budget in budgets_of(call).items():
            out = call.outputs[name]
            slack, whole = few[name].slack.expand(out[part].shape), budget.slack.expand(out.shape)
            assert torch.allclose(slack, whole[part], rtol=1e-4, atol=0), (call.role, name)
        done.add(call.role)
    assert len(done) > 15


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_every_role_of_every_recipe_is_known(config: DeepSeekConfig, recipe: str) -> None:
    for component in components(config, recipe_named(recipe, config)):
        known = component.role in {**RULES, **WHOLE} or component.role.endswith(".act_quant")
        assert known, component.name


def test_a_residual_is_a_sum_and_its_norm_is_none() -> None:
    x, residual = (torch.randn(3, 64).bfloat16() for _ in range(2))
    total = x + residual
    outputs = {"out": total * 1.1, "residual": total}
    call = JudgeableCall("attn.norm", {"x": x, "residual": residual}, outputs, {})
    said = {name: budget.derivation[0] for name, budget in budgets_of(call).items()}
    assert said["residual"].startswith("sum of input and residual")
    assert "64" in said["out"]


def test_decoded_weights_at_a_boundary_may_round_either_way() -> None:
    """Every weight lies between two numbers of BF16; a decoder that is 1 u off takes the other."""
    generator = torch.Generator().manual_seed(1)
    powers = torch.randint(0, 3, (32, 64), generator=generator)
    powers[:, ::16] = 2
    signs = 1 - 2 * torch.randint(0, 2, (32, 64), generator=generator)
    near = torch.ldexp(signs.float(), powers)
    weight, boundary = Weight.of(quantise(near.bfloat16(), NVFP4)), 1 + 2.0**-8
    assert weight.tensor_scale is not None
    weight.tensor_scale = weight.tensor_scale / weight.values(torch.float32)[0, 0] * near[0, 0]
    weight.tensor_scale = weight.tensor_scale * boundary
    assert torch.equal(weight.values(torch.float32), near * boundary)
    facts = BoundModel(V32, numerics(torch.float64, "rare"), {}).bound_to("layers.1.attn.wq_a")[1]
    x = torch.randn(4, 64, generator=generator).bfloat16()
    exact = x.double() @ near.double().T
    call = JudgeableCall(
        "attn.wq_a", {"x": x}, {"out": exact.bfloat16()}, {"attn.wq_a": weight}, facts=facts
    )
    other = {"out": (exact * (1 + 2.0**-7)).bfloat16()}
    assert judge_outputs(call, other)["out"].ratio <= HEADROOM
    assert judge_outputs(replace(call, facts=None), other)["out"].ratio > 1


def test_a_call_without_facts_is_undecided_where_the_chain_needs_them() -> None:
    call = JudgeableCall("attn.hc_pre", {}, {"out": torch.zeros(1)}, {})
    with pytest.raises(Undecided, match="budget"):
        budgets_of(call)
    with pytest.raises(Undecided, match="budget"):
        budgets_of(JudgeableCall("markov", {}, {"out": torch.zeros(1)}, {}))


# --------------------------------------------------------------------------------------------------
# The indexer by other means: heads in another order, split sums, butterflies.

TOKENS = 40


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def indexer_numerics(config: DeepSeekConfig, work: torch.dtype) -> Numerics:
    source = "official-v4" if config is V4 else "official-v32"
    return replace(Numerics.twin(switches_of(source)), work=work)


def call_of(
    config: DeepSeekConfig, role: str, inputs: dict[str, Tensor], weights: dict[str, Tensor]
) -> JudgeableCall:
    twin, name = (
        BoundModel(config, indexer_numerics(config, torch.float64), {}),
        f"layers.1.attn.indexer.{role}",
    )
    what, facts = twin.bound_to(name)
    held = {local: Weight(value=value) for local, value in weights.items()}
    made = twin.calls[name](inputs, held)
    outputs = {
        key: tensor.float() if tensor.dtype is torch.float64 else tensor
        for key, tensor in made.items()
    }
    return JudgeableCall(what.role, inputs, outputs, held, facts=facts)


def scores_call(config: DeepSeekConfig) -> JudgeableCall:
    entries, width = TOKENS // 4 if config is V4 else TOKENS, config.index_head_dim
    given = {
        "q": random(TOKENS, config.index_n_heads, width, seed=1),
        "keys": random(entries, width, seed=2),
        "weights": random(TOKENS, config.index_n_heads, seed=3) / 16,
        "positions": torch.arange(TOKENS),
        "token_offsets": torch.tensor([0, TOKENS]),
    }
    return call_of(config, "scores", given, {})


def scored_otherwise(call: JudgeableCall, in_steps: bool) -> Tensor:
    """In float32, halves of the width apart and heads backwards."""
    q, keys = call.inputs["q"].float(), call.inputs["keys"].float()
    half = q.shape[-1] // 2
    dot = q[..., half:] @ keys[:, half:].T + q[..., :half] @ keys[:, :half].T
    dot = dot.relu()
    weights = call.inputs["weights"].float()[..., None]
    terms = dot.bfloat16().float() * weights if in_steps else dot * weights
    if in_steps:
        terms = terms.bfloat16().float()
    total = torch.zeros(terms.shape[0], terms.shape[2])
    for head in reversed(range(terms.shape[1])):
        total = total + terms[:, head]
    total = total.bfloat16().float() if in_steps else total
    return total.masked_fill(call.outputs["out"].isneginf(), -torch.inf)


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
def test_scores_in_another_order_are_healthy(config: DeepSeekConfig) -> None:
    call = scores_call(config)
    made = scored_otherwise(call, in_steps=config is V4)
    result = judge_outputs(call, {"out": made})["out"]
    assert result.ratio <= HEADROOM, str(result.worst)
    seen = made.clone()
    seen[3, -1] = 0.5
    assert judge_outputs(call, {"out": seen})["out"].ratio > 1, "an entry that is not visible yet"
    assert judge_outputs(call, {"out": made * (1 + 2.0**-6)})["out"].ratio > 1


@pytest.mark.parametrize(  # V4's keys are pooled: test_budget_pooling
    ("config", "role"), [(V4, "q"), (V32, "q"), (V32, "k")], ids=["v4-q", "v32-q", "v32-k"]
)
def test_operands_in_float32_are_healthy_and_another_pairing_is_not(
    config: DeepSeekConfig, role: str
) -> None:
    width = config.index_head_dim * (config.index_n_heads if role == "q" else 1)
    given = {"x": random(TOKENS, width, seed=4), "positions": torch.arange(TOKENS) * 91}
    held = {}
    if role == "k":
        held = {
            "attn.indexer.k_norm": random(width, seed=5),
            "attn.indexer.k_norm.bias": random(width, seed=6),
        }
    call = call_of(config, role, given, held)
    single = BoundModel(config, indexer_numerics(config, torch.float32), {}).calls[
        f"layers.1.attn.indexer.{role}"
    ]
    made = dict(single(call.inputs, call.weights))
    result = judge_outputs(call, made)["out"]
    assert result.ratio <= HEADROOM, str(result.worst)
    assert role == "q" or f"LayerNorm of {width}" in result.derivation[0]
    moved = dict(single(given | {"positions": given["positions"] + 1}, call.weights))
    assert judge_outputs(call, moved)["out"].ratio > 1
    step = made["out"].clone().flatten()
    at = int(step.abs().argmax())
    step[at] = step[at] * 0.75
    assert judge_outputs(call, {"out": step.reshape(made["out"].shape)})["out"].ratio > 1


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
def test_head_weights_in_another_order_are_healthy(config: DeepSeekConfig) -> None:
    x, weight = (
        random(TOKENS, config.hidden_size, seed=7),
        random(config.index_n_heads, config.hidden_size, seed=8),
    )
    call = call_of(config, "weights_proj", {"x": x}, {"attn.indexer.weights_proj": weight})
    parts = zip(x.float().flip(1).split(32, 1), weight.float().flip(1).split(32, 1), strict=True)
    made = torch.stack([a @ b.T for a, b in parts]).cumsum(0)[-1]
    if config is V4:
        made = made.bfloat16().float()
    made = made * (config.index_head_dim * config.index_n_heads) ** -0.5
    out = made.to(call.outputs["out"].dtype)
    result = judge_outputs(call, {"out": out})["out"]
    assert result.ratio <= HEADROOM, str(result.worst)
    assert judge_outputs(call, {"out": out * 2})["out"].ratio > 1


# --------------------------------------------------------------------------------------------------
# mHC by other means: sums in other orders, exponentials to the base 2, reciprocals 2 units off.

EPSILON, PASSES = V4.hc_eps, V4.hc_sinkhorn_iters


def mixing_call_of(strength: float, kind: str = "normal", tokens: int = 70) -> JudgeableCall:
    """A call whose logits have about `strength` as deviation."""
    generator = torch.Generator().manual_seed(3)
    twin = BoundModel(V4, replace(Numerics.twin(), work=torch.float64), {})
    what, facts = twin.bound_to("layers.0.attn.hc_pre")
    streams = torch.randn(tokens, 4, V4.hidden_size, generator=generator)
    if kind == "constant":
        streams = torch.full_like(streams, 0.75)
    streams = streams.bfloat16()
    fn = torch.randn(24, 4 * V4.hidden_size, generator=generator) / 32
    base = torch.randn(24, generator=generator)
    if kind == "permutation":
        base[8:] = 12 * torch.eye(4).flatten() - 6
    parts = {"fn": fn, "base": base, "scale": torch.tensor([1.0, 1.0, strength])}
    weights = {f"hc_attn_{name}": Weight(value=part) for name, part in parts.items()}
    inputs = {"streams": streams}
    made = twin.calls["layers.0.attn.hc_pre"](inputs, weights)
    outputs = {"out": made["out"], "post": made["post"].float(), "mix": made["mix"].float()}
    return JudgeableCall(what.role, inputs, outputs, weights, facts=facts)


def exponential(x: Tensor) -> Tensor:
    return torch.exp2(x * 1.4426950408889634)


def over(a: Tensor, b: Tensor, off: float) -> Tensor:
    return a * (b.reciprocal() * (1 + off))


def otherwise(call: JudgeableCall, off: float) -> dict[str, Tensor]:
    """The component in float32, summed backwards in blocks, with approximate functions."""
    fn, base, scale = (weight.value for weight in call.weights.values() if weight.value is not None)
    streams = call.inputs["streams"].float()
    flat = streams.flatten(1).flip(1)
    parts = zip(flat.split(64, 1), fn.flip(1).split(64, 1), strict=True)
    dot = torch.stack([x @ w.T for x, w in parts]).cumsum(0)[-1]
    square = flat.square().split(64, 1)
    mean = torch.stack([part.sum(1, keepdim=True) for part in square]).cumsum(0)[-1]
    m = dot * ((mean / flat.shape[1] + V4.rms_norm_eps).rsqrt() * (1 + off))
    m = m * scale.repeat_interleave(torch.tensor([4, 4, 16])) + base
    gates = over(torch.ones(()), 1 + exponential(-m[:, :8]), off)
    pre, post = gates[:, :4] + EPSILON, 2 * gates[:, 4:]
    out = sum(pre[:, k : k + 1] * streams[:, k] for k in (3, 1, 0, 2))
    logits = m[:, 8:].reshape(-1, 4, 4)
    mix = exponential(logits - logits.amax(-1, keepdim=True))
    mix = over(mix, mix.sum(-1, keepdim=True), off) + EPSILON
    mix = over(mix, mix.sum(-2, keepdim=True) + EPSILON, off)
    for _ in range(PASSES - 1):
        mix = over(mix, mix.sum(-1, keepdim=True) + EPSILON, off)
        mix = over(mix, mix.sum(-2, keepdim=True) + EPSILON, off)
    assert not isinstance(out, int)
    return {"out": out.bfloat16(), "post": post, "mix": mix}


@pytest.mark.parametrize("kind", ["normal", "constant", "permutation"])
@pytest.mark.parametrize("strength", [0.1, 1.0, 8.0])
def test_other_orders_and_functions_are_healthy(kind: str, strength: float) -> None:
    call = mixing_call_of(strength, kind)
    for off in (0.0, 2.0**-22, -(2.0**-22)):
        for name, output in judge_outputs(call, otherwise(call, off)).items():
            assert output.ratio <= HEADROOM, (name, str(output.worst))


@pytest.mark.parametrize("strength", [0.1, 1.0, 8.0])
def test_faults_of_mixing_are_caught(strength: float) -> None:
    call = mixing_call_of(strength)
    twin = call.outputs
    short = dict(twin)
    short["mix"] = twin["mix"].transpose(1, 2).contiguous()
    assert judge_outputs(call, short)["mix"].ratio > 1, "the other direction"
    short["mix"] = twin["mix"] * (1 + 1e-3 * max(1.0, strength))
    assert judge_outputs(call, short)["mix"].ratio > 1
    short["post"] = twin["post"] * (1 + 1e-3)
    assert judge_outputs(call, short)["post"].ratio > 1
    assert judge_outputs(call, short)["out"].ratio == 0


def test_gates_of_functions_at_their_limits_stay_within() -> None:
    m = torch.linspace(-20, 20, 401, dtype=torch.float64)
    for sign in (-1, 1):
        function = 1 + sign * FUNCTION * U
        grown = (-m).exp() * (1 - sign * 2 * m.abs() * U) / function
        made = 1 / (1 + grown) * (1 + sign * U) * function
        near = _sigmoid(exactly(m))
        off = (made - near.value).abs()
        assert bool((off <= near.error).all())
        assert bool((off > near.error / 3).all()), "and the errors are no wider than that"


@pytest.mark.parametrize("sign", [-1, 1])
def test_divisions_that_round_one_way_stay_within(sign: int) -> None:
    """In every pass each entry rounds towards one permutation, which no later pass removes."""
    call = mixing_call_of(0.1)
    assert call.facts is not None
    logits = torch.randn(70, 4, 4, generator=torch.Generator().manual_seed(4)).double() / 8

    def balanced(unit: Tensor) -> Tensor:
        mix = torch.softmax(logits, -1) + EPSILON
        mix = mix / (mix.sum(-2, keepdim=True) + EPSILON)
        for _ in range(PASSES - 1):
            mix = mix / (mix.sum(-1, keepdim=True) + EPSILON) * unit
            mix = mix / (mix.sum(-2, keepdim=True) + EPSILON) * unit
        return mix

    towards = 1 + sign * U * (2 * torch.eye(4, dtype=torch.float64) - 1)
    exact = balanced(torch.ones_like(towards))
    made = replace(call, outputs={"mix": exact})
    budget = _balanced(exactly(logits.flatten(1)), made, cast("V4Facts", call.facts).mixing)
    off = (balanced(towards) - exact).abs()
    assert bool((off <= budget.slack).all())
    assert bool((off > budget.slack / 16).any()), "and the budget is no wider than that"


# --------------------------------------------------------------------------------------------------
# Pooling by other means, and the carried state: what is read later is exact, the rest is free.

NUMERICS = Numerics.twin(switches_of("official-v4"))
TWIN = BoundModel(V4, replace(NUMERICS, work=torch.float64), {})


def pooling_call_of(
    layer: int, start: int, tokens: int, size: float = 1.0, part: str = ""
) -> JudgeableCall:
    """Tokens `start` onward of one sequence, pooled by 4 (overlapping) or by 128."""
    name = f"layers.{layer}.attn.{part}compressor.pool"
    generator = torch.Generator().manual_seed(start)
    what, facts = TWIN.bound_to(name)
    ratio, wide = (4, 2) if layer == 1 else (128, 1)
    width = V4.index_head_dim if part else V4.head_dim

    def random(*shape: int, by: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator) * by

    weights = {}
    for local in TWIN.weights_of(name):
        shape = (width,) if local.endswith("norm") else (ratio, wide * width)
        weights[local] = Weight(value=random(*shape))
    inputs = {
        "latent": random(tokens, wide * width),
        "gate": random(tokens, wide * width, by=size),
        "positions": torch.arange(start, start + tokens),
        "token_offsets": torch.tensor([0, tokens]),
        "state_latent": random(1, wide * ratio, wide * width),
        "state_gate": random(1, wide * ratio, wide * width, by=size),
    }
    made = TWIN.calls[name](inputs, weights)
    outputs = {
        key: tensor.float() if tensor.dtype is torch.float64 else tensor
        for key, tensor in made.items()
    }
    return JudgeableCall(what.role, inputs, outputs, weights, facts=facts)


def pooled_online(call: JudgeableCall, ratio: int) -> Tensor:
    """The first window of a sequence without overlap, slot by slot beside a running peak."""
    bias, norm = (
        next(w for n, w in call.weights.items() if n.endswith(part)).values(torch.float32)
        for part in ("ape", "norm")
    )
    peak = torch.full((V4.head_dim,), -torch.inf)
    total, out = torch.zeros(V4.head_dim), torch.zeros(V4.head_dim)
    for slot in reversed(range(ratio)):
        gate = (call.inputs["gate"][slot] + bias[slot]) * 1.4426950408889634
        higher = torch.maximum(peak, gate)
        fade, share = torch.exp2(peak - higher), torch.exp2(gate - higher)
        total, out = total * fade + share, out * fade + share * call.inputs["latent"][slot]
        peak = higher
    entry = (out / total).bfloat16().float()
    normed = (norm * (entry * (entry.square().mean() + V4.rms_norm_eps).rsqrt())).bfloat16()
    table = elementary.rotation_table(call.facts.rope, torch.tensor([0]), NUMERICS)  # type: ignore[union-attr]
    return elementary.rotate_tail(normed.float()[None], table).bfloat16()


@pytest.mark.parametrize("size", [0.1, 1.0, 6.0])
def test_a_running_peak_is_healthy(size: float) -> None:
    call = pooling_call_of(2, 0, 128, size)
    made = dict(call.outputs) | {"out": pooled_online(call, 128)}
    result = judge_outputs(call, made)["out"]
    assert result.ratio <= HEADROOM, str(result.worst)
    made["out"] = (made["out"].float() * 1.02).bfloat16()
    assert judge_outputs(call, made)["out"].ratio > 1


@pytest.mark.parametrize("part", ["", "indexer."])
@pytest.mark.parametrize(("start", "tokens"), [(0, 9), (3, 1), (5, 22), (6, 1)])
def test_float32_is_healthy_wherever_a_call_begins(part: str, start: int, tokens: int) -> None:
    call = pooling_call_of(1, start, tokens, part=part)
    name = f"layers.1.attn.{part}compressor.pool"
    made = dict(BoundModel(V4, NUMERICS, {}).calls[name](call.inputs, call.weights))
    for key, output in judge_outputs(call, made).items():
        assert output.ratio <= HEADROOM, (key, str(output.worst))


@pytest.mark.parametrize("name", ["state_latent", "state_gate"])
def test_rows_that_are_read_later_are_exact_and_others_are_free(name: str) -> None:
    call = pooling_call_of(1, 0, 10)  # two windows; tokens 8 and 9 wait in rows 4 and 5
    for row, free in ((0, False), (3, False), (4, False), (5, False), (6, True), (7, True)):
        state = call.outputs[name].clone()
        state[0, row, 17] += 1e-3
        result = judge_outputs(call, dict(call.outputs) | {name: state})[name]
        assert (result.verdict is Verdict.AGREES) is free, row
    first = pooling_call_of(
        1, 0, 2
    )  # no window yet: what would be the one before may hold anything
    state = first.outputs[name].clone()
    state[0, :4], state[0, 6:] = torch.nan, torch.nan
    assert judge_outputs(first, dict(first.outputs) | {name: state})[name].ratio == 0


def test_a_window_that_took_the_wrong_neighbour_is_caught() -> None:
    call = pooling_call_of(1, 8, 8)
    other = JudgeableCall(
        call.role,
        dict(call.inputs) | {"state_latent": call.inputs["state_latent"].roll(1, 1)},
        {},
        call.weights,
        facts=call.facts,
    )
    made = TWIN.calls["layers.1.attn.compressor.pool"](other.inputs, call.weights)
    outputs = {key: tensor.to(call.outputs[key].dtype) for key, tensor in made.items()}
    assert judge_outputs(call, outputs)["out"].ratio > 1
