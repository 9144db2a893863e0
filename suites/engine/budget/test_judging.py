"""All outputs of a call: numbers, codes, choices; what is missing, too good, or not finite."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from degarble.harness.engine.budget.bounded_values import FUNCTION, BoundedValue
from degarble.harness.engine.budget.budget import HEADROOM, OutputResult, nearer_than_the_twin
from degarble.harness.engine.budget.codes_and_choices import (
    _pair_gap,
    _values,
    format_of,
    scores_of,
    values_of,
)
from degarble.harness.engine.budget.judging import judge_outputs
from degarble.harness.engine.budget.rules import JudgeableCall, U
from degarble.harness.formats.codec import decode_array, encode_array, pack_nibbles, unpack_nibbles
from degarble.harness.formats.number_formats import BLOCK_FORMATS, E4M3, NVFP4, NanRule
from degarble.harness.formats.weight import Weight
from degarble.harness.model.config.config import small_v4, small_v32
from degarble.harness.model.recipes import recipe_named
from degarble.harness.report.verdict import Verdict
from degarble.references.binding import BoundModel
from degarble.references.linears import quantise_activations
from degarble.references.numerics import Numerics, switches_of
from degarble.references.weights import quantised_weights, random_weights
from degarble.suites.engine.localise_cases import ATTN, localised, replaced, run_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.formats.number_formats import BlockFormat
    from degarble.references.facts import ModelFacts
    from degarble.suites.support.configs import DeepSeekConfig


# --------------------------------------------------------------------------------------------------
# One entry judges all outputs; what is missing, too good, or not finite.

V4 = small_v4(num_hidden_layers=3, compress_ratios=(0, 4, 128, 0))
V32 = small_v32(num_hidden_layers=2)


def test_an_output_that_is_missing_or_has_another_shape_differs() -> None:
    twin = BoundModel(V4, Numerics.twin(), random_weights(V4, 1))
    call = JudgeableCall.from_twin(twin, "embed", {"tokens": torch.tensor([3, 1])})
    for outputs in ({}, {"out": call.outputs["out"][:1]}):
        assert judge_outputs(call, outputs)["out"].verdict is Verdict.DIFFERS
    assert judge_outputs(call, call.outputs)["out"].ratio == 0


def operands(twin: BoundModel, component: str, seed: int) -> tuple[str, dict[str, Tensor]]:
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


@pytest.mark.parametrize(
    "name", ["nvfp4-full", "official", pytest.param("nvfp4-experts", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("family", ["v4", "v32"])
def test_too_good_is_usable_on_every_linear(family: str, name: str) -> None:
    """A healthy one is never nearer than the twin; one that left the quantisation out always is."""
    config = V4 if family == "v4" else V32
    recipe, plain = recipe_named(name, config), random_weights(config, 1)
    stored = quantised_weights(plain, config, recipe)
    twin = BoundModel(config, Numerics.twin(), stored, recipe)
    single = BoundModel(config, Numerics.twin(products=torch.float32), stored, recipe)
    bare, tried = BoundModel(config, Numerics.bf16(), plain), set[str]()
    for seed, component in enumerate(twin.calls):
        role = twin.bound_to(component)[0].role
        if role in tried or not role.endswith("act_quant"):
            continue
        linear, inputs = operands(twin, component, seed)
        codes = dict(twin.calls[component](inputs, twin.weights_of(component)))
        if "codes" not in codes:
            continue  # the drafter stays as it was
        listed = {key: inputs[key] for key in ("experts",) if key in inputs}
        call = JudgeableCall.from_twin(twin, linear, codes | listed)
        healthy = single.calls[linear](call.inputs, single.weights_of(linear))
        if component in bare.calls:
            inputs = dict(bare.calls[component](inputs, {})) | listed
            inputs["x"] = inputs.pop("out")
        reference = bare.calls[linear](inputs, bare.weights_of(linear))
        for made, good in ((healthy, False), (reference, True)):
            for key, output in judge_outputs(call, made).items():
                near = nearer_than_the_twin(output, made[key], call.outputs[key], reference[key])
                assert (near.ratio > 1) is good, (linear, key, str(near))
                assert good or near.ratio <= HEADROOM, (linear, key, str(near))
        tried.add(role)
    assert len(tried) > 3


def test_what_is_kept_holds_no_tensor() -> None:
    twin = BoundModel(V4, Numerics.twin(), random_weights(V4, 1))
    call = JudgeableCall.from_twin(twin, "embed", {"tokens": torch.tensor([3, 1])})
    result = judge_outputs(call, call.outputs)["out"].settled()
    assert result.derivation == judge_outputs(call, call.outputs)["out"].derivation
    assert result.comparison is not None
    assert result.comparison.identical == 1


def test_operands_that_are_not_finite_have_no_budget_and_equal_kinds_agree() -> None:
    twin = BoundModel(V4, Numerics.twin(), random_weights(V4, 1))
    x = torch.randn(3, V4.hidden_size).bfloat16()
    x[1, 5] = torch.nan
    call = JudgeableCall.from_twin(twin, "layers.0.attn.wq_a", {"x": x})
    result = judge_outputs(call, {"out": call.outputs["out"].clone()})["out"]
    assert result.verdict is Verdict.AGREES
    quiet = call.outputs["out"].nan_to_num()
    result = judge_outputs(call, {"out": quiet})["out"]
    assert result.verdict is Verdict.DIFFERS
    assert result.worst is not None
    assert result.worst.level == "kind of element"


# --------------------------------------------------------------------------------------------------
# Healthy candidates where few suites go: a window of one token, numbers at the end of float32.

SHORT = small_v4(num_hidden_layers=2, compress_ratios=(0, 4, 0), sliding_window=1)
JUDGING_EXTREMES_V4 = small_v4(num_hidden_layers=1, compress_ratios=(0, 0), num_hash_layers=0)


def test_a_window_of_one_token_remembers_nothing() -> None:
    found = localised(run_of(config=SHORT, recipe="bf16"), SHORT, "bf16")
    assert found.verdict is Verdict.AGREES, found.origins
    kept = replaced("state_window", lambda rows: torch.ones(3, rows.shape[-1], dtype=rows.dtype))
    run = run_of(f"{ATTN}attend", edge=kept, config=SHORT, recipe="bf16")
    (origin,) = localised(run, SHORT, "bf16").origins
    assert origin.component == f"{ATTN}kv_write"


def bound(config: DeepSeekConfig, inside: torch.dtype, weights: Mapping[str, Weight]) -> BoundModel:
    twin = Numerics.twin(
        switches_of(f"official-{'v4' if config is JUDGING_EXTREMES_V4 else 'v32'}")
    )
    numerics = replace(twin, work=inside, products=inside)
    return BoundModel(config, numerics, weights, recipe_named("bf16", config))


def spread(*shape: int) -> Tensor:
    """Numbers around -88.7, below which e^-x is no float32, and ordinary ones."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    return torch.where(noise > 0, -88.0 - noise, 10 * noise).bfloat16()


def gated(slots: int | None) -> dict[str, Tensor]:
    width = JUDGING_EXTREMES_V4.moe_intermediate_size
    x = torch.cat((spread(64, width), 50 * spread(64, width).flip(0)), dim=-1)
    if slots is None:
        return {"x": x}
    experts = torch.arange(slots).expand(64, slots)
    weights = torch.full((64, slots), 1.25)
    return {"x": x[:, None].expand(-1, slots, -1), "experts": experts, "weights": weights}


def attended() -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(3)
    shape = 8, JUDGING_EXTREMES_V4.num_attention_heads, JUDGING_EXTREMES_V4.head_dim
    return {
        "q": torch.randn(shape, generator=noise).bfloat16(),
        "window": torch.randn(8, JUDGING_EXTREMES_V4.head_dim, generator=noise).bfloat16(),
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
        (JUDGING_EXTREMES_V4, "layers.0.ffn.shared.act", gated(None)),
        (JUDGING_EXTREMES_V4, "layers.0.ffn.experts.act_quant", gated(2)),
        (JUDGING_EXTREMES_V4, "layers.0.attn.attend", attended()),
        (V32, "layers.1.ffn.topk", routed()),
    ],
    ids=["shared", "experts", "attention", "router"],
)
def test_what_float32_cannot_hold_is_no_difference(
    config: DeepSeekConfig, name: str, inputs: dict[str, Tensor]
) -> None:
    weights = random_weights(config, 1)
    for each in (key for key in weights if key.endswith("attn_sink")):
        # Beside the sink a share is some e^-88.
        weights[each] = Weight(
            value=torch.linspace(85.0, 95.0, JUDGING_EXTREMES_V4.num_attention_heads)
        )
    for each in (key for key in weights if key.endswith("gate.bias")):
        weights[each] = Weight(value=torch.zeros(V32.n_routed_experts))
    call = JudgeableCall.from_twin(bound(config, torch.float64, weights), name, inputs)
    candidate = bound(config, torch.float32, weights)
    made = dict(candidate.calls[name](inputs, candidate.weights_of(name)))
    key = "weights" if name.endswith("topk") else "out"
    twin = call.outputs[key].double()
    assert bool(((twin != 0) & (twin.abs() < 2.0**-126)).any()), "a kernel may flush these"
    made[key] = torch.where(twin.abs() < 2.0**-126, 0.0, made[key])
    for output in judge_outputs(call, made).values():
        assert output.ratio <= HEADROOM, output.worst
    largest = twin.abs().amax()
    made[key] = torch.where(twin.abs() == largest, 0.0, made[key])
    assert judge_outputs(call, made)[key].ratio > 1


@pytest.mark.parametrize("size", [200.0, 1e20, 1e25])
def test_the_end_of_float32_hides_no_number_where_there_is_none(size: float) -> None:
    """Far below -104 everybody's share is 0, however large the product beside it."""
    rows = torch.full((4, JUDGING_EXTREMES_V4.moe_intermediate_size), size)
    inputs = {"x": torch.cat((-rows, rows), dim=-1).bfloat16()}
    call = JudgeableCall.from_twin(
        bound(JUDGING_EXTREMES_V4, torch.float64, {}), "layers.0.ffn.shared.act", inputs
    )
    out = call.outputs["out"]
    assert judge_outputs(call, {"out": torch.zeros_like(out)})["out"].ratio <= HEADROOM
    assert judge_outputs(call, {"out": out + 2.0**-100})["out"].ratio > 1


def test_terms_that_cancel_are_rounded_where_they_arrive_in_float64() -> None:
    routed = spread(8, JUDGING_EXTREMES_V4.hidden_size).double() * (1 + 2.0**-30)
    inputs = {"routed": routed, "shared": (-routed).bfloat16()}
    call = JudgeableCall.from_twin(
        bound(JUDGING_EXTREMES_V4, torch.float64, {}), "layers.0.ffn.moe_sum", inputs
    )
    own = inputs["routed"].float() + inputs["shared"].float()
    assert not torch.equal(own.bfloat16(), call.outputs["out"])
    assert judge_outputs(call, {"out": own.bfloat16()})["out"].ratio <= HEADROOM
    assert judge_outputs(call, {"out": own.bfloat16() + 2.0**-12})["out"].ratio > 1


# --------------------------------------------------------------------------------------------------
# Codes and scales: legal where a quotient lies within slack of a boundary, nowhere else.

FORMATS = ("NVFP4", "MXFP8", "FP8_1X128_UE8M0", "FP8_1X128_F32", "MXFP4")
KINDS = ("normal", "heavy", "constant", "zeros", "powers")
UNIT = torch.tensor(1.0)


def rows(kind: str, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(24, 512, generator=generator)
    if kind == "heavy":
        x = x * torch.randn(24, 512, generator=generator).exp().square()
    elif kind == "constant":
        x = torch.full_like(x, 1.0 + 2.0**-6)
    elif kind == "zeros":
        x = torch.zeros_like(x)
    elif kind == "powers":
        x = torch.ldexp(x.sign(), (x * 4).int()) * 1.5
    return x.bfloat16()


def call_of(x: Tensor, name: str, input_scale: Tensor | None = None) -> JudgeableCall:
    """The quantisation in front of one linear."""
    facts = SimpleNamespace(activation=lambda _weight: name)
    weights = {"attn.wq_a": Weight(value=torch.zeros(1), input_scale=input_scale)}
    outputs = quantise_activations(x, name, input_scale)
    return JudgeableCall(
        "attn.wq_a.act_quant", {"x": x}, outputs, weights, facts=cast("ModelFacts", facts)
    )


def by_reciprocals(call: JudgeableCall, form: BlockFormat, seed: int) -> dict[str, Tensor]:
    """As a device quantises: each reciprocal up to 2 units off, products in float32."""
    generator = torch.Generator().manual_seed(seed)

    def reciprocal(x: Tensor) -> Tensor:
        off = torch.randint(-2, 3, x.shape, generator=generator).float() * 2.0**-23
        return x.double().reciprocal().float() * (1 + off)

    x = call.inputs["x"].float().unflatten(-1, (-1, form.block[1]))
    amax = x.abs().amax(-1)
    sixth = reciprocal(torch.tensor(form.element.largest))
    made = {name: part.clone() for name, part in call.outputs.items()}
    if form is NVFP4:
        tensor = call.outputs["tensor_scale"]
        encode = reciprocal(tensor.reshape(*tensor.shape, 1) if tensor.ndim else tensor)
        raw = (encode * (amax * sixth)).clamp(max=448.0)
        made["block_scale"] = encode_array(raw, E4M3)
        scale = decode_array(made["block_scale"], E4M3)
        factor = reciprocal(scale * reciprocal(encode)).nan_to_num(posinf=0.0)
    else:
        raw = amax.clamp(min=1e-4) * sixth
        if form.scale.bits == 32:
            made["block_scale"] = raw
            factor = reciprocal(raw)
        else:  # by the bits, as every kernel makes powers of two
            factor = decode_array(call.outputs["block_scale"], form.scale).reciprocal()
    codes = encode_array(x * factor.unsqueeze(-1), form.element, nan=NanRule.LARGEST).flatten(-2)
    made["codes"] = pack_nibbles(codes) if form.packed else codes
    return made


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_approximate_reciprocals_are_healthy(name: str, kind: str) -> None:
    form = BLOCK_FORMATS[name]
    scales = (None, torch.tensor(0.0123)) if form.tensor_scale else (None,)
    for scale in scales:
        call = call_of(rows(kind), name, scale)
        for seed in range(6):
            for key, output in judge_outputs(call, by_reciprocals(call, form, seed)).items():
                assert output.ratio <= HEADROOM, (key, str(output.worst))
                assert output.verdict is Verdict.AGREES


def test_codes_that_move_at_boundaries_are_counted_apart() -> None:
    x = (torch.arange(2048).reshape(4, 512) % 29 - 14).bfloat16() / 4
    call = call_of(x, "NVFP4", torch.tensor(0.1))
    moved = by_reciprocals(call, NVFP4, 3)
    result = judge_outputs(call, moved)["codes"]
    differ = unpack_nibbles(moved["codes"]) != unpack_nibbles(call.outputs["codes"])
    assert result.flips.count == int(differ.sum())
    assert result.flips.count > 0
    assert result.flips.rows == tuple(differ.any(-1).nonzero().flatten().tolist())
    assert result.comparison is not None
    assert result.comparison.shape == x.shape


def spoilt(
    call: JudgeableCall, form: BlockFormat, at: tuple[int, int], by: int
) -> dict[str, Tensor]:
    codes = unpack_nibbles(call.outputs["codes"]) if form.packed else call.outputs["codes"].clone()
    codes[at] = (int(codes[at]) + by) % form.element.code_count
    return dict(call.outputs) | {"codes": pack_nibbles(codes) if form.packed else codes}


def judged(call: JudgeableCall, outputs: dict[str, Tensor], name: str) -> OutputResult:
    return judge_outputs(call, outputs)[name]


@pytest.mark.parametrize("name", FORMATS)
def test_a_neighbour_far_from_a_boundary_differs(name: str) -> None:
    form, call = BLOCK_FORMATS[name], call_of(rows("normal"), name)
    for at in ((0, 3), (7, 130), (23, 511)):
        for by in (1, -1):
            result = judged(call, spoilt(call, form, at, by), "codes")
            assert result.ratio > 1, (at, by)
            assert result.worst is not None
            assert result.worst.place == at


@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize(("budgets", "legal"), [(1.5, False), (0.6, True)])
def test_one_and_a_half_budgets_off_a_boundary_are_caught(
    side: int, budgets: float, legal: bool
) -> None:
    """Scale and tensor scale are 1: a quotient is the value itself."""
    x = torch.ones(1, 16)
    x[0, 0], x[0, 5] = 6.0, 2.5 * (1 + side * budgets * 10 * U / HEADROOM)
    call = call_of(x, "NVFP4", UNIT)
    assert float(decode_array(call.outputs["block_scale"], E4M3)) == 1.0
    codes = unpack_nibbles(call.outputs["codes"])
    assert decode_array(codes, NVFP4.element)[0, 5] == (3.0 if side > 0 else 2.0)
    result = judged(call, spoilt(call, NVFP4, (0, 5), -side), "codes")
    assert (result.verdict is Verdict.AGREES) is legal
    assert result.ratio == pytest.approx(budgets, rel=0.1)  # the value is float32 itself


def test_a_tie_under_a_power_of_two_goes_to_the_even_code() -> None:
    x = torch.full((1, 128), 1.0)
    x[0, 0], x[0, 9] = 448.0, 1.0625  # between 1.0 and 1.125, whose code is odd
    call = call_of(x, "FP8_1X128_UE8M0")
    assert judged(call, dict(call.outputs), "codes").ratio == 0
    away = spoilt(call, BLOCK_FORMATS["FP8_1X128_UE8M0"], (0, 9), 1)
    assert judged(call, away, "codes").ratio > 1


@pytest.mark.parametrize("name", FORMATS)
def test_a_scale_one_step_away_differs_and_its_codes_are_judged_under_it(name: str) -> None:
    form, call = BLOCK_FORMATS[name], call_of(rows("normal"), name)
    outputs: dict[str, Any] = dict(call.outputs)
    scale = outputs["block_scale"].clone()
    scale[3, 1] = scale[3, 1] * 1.001 if scale.dtype is torch.float32 else scale[3, 1] + 1
    outputs["block_scale"] = scale
    found = judge_outputs(call, outputs)
    assert found["block_scale"].ratio > 1
    assert found["block_scale"].worst is not None
    assert found["block_scale"].worst.place == (3, 1)
    value = call.inputs["x"].float()[3].unflatten(-1, (-1, form.block[1]))[1]
    step = scale[3, 1] if form.scale.bits == 32 else decode_array(scale[3, 1], form.scale)
    if "tensor_scale" in outputs:
        step = step * outputs["tensor_scale"][3]
    codes = encode_array(value / step, form.element)
    wide = unpack_nibbles(outputs["codes"]) if form.packed else outputs["codes"].clone()
    width = form.block[1]
    wide[3, width : 2 * width] = codes
    outputs["codes"] = pack_nibbles(wide) if form.packed else wide
    assert judge_outputs(call, outputs)["codes"].ratio <= HEADROOM


def test_a_scale_at_its_boundary_may_be_either() -> None:
    """amax / 448 is a power of two: one ulp decides, and kernels form it differently."""
    x = torch.zeros(1, 128)
    x[0, 0], x[0, 1] = 448.0, 100.0
    call = call_of(x.bfloat16(), "FP8_1X128_UE8M0")
    outputs = dict(call.outputs) | {"block_scale": call.outputs["block_scale"] + 1}
    codes = encode_array(x / 2, E4M3)
    found = judge_outputs(call, outputs | {"codes": codes})
    assert found["block_scale"].ratio <= HEADROOM
    assert found["block_scale"].flips.count == 1
    assert found["codes"].ratio <= HEADROOM
    assert judge_outputs(call, outputs)["codes"].ratio > 1, "codes of the other scale"


@pytest.mark.parametrize("given", [None, torch.tensor(0.01)], ids=["own", "stored"])
def test_a_tensor_scale_is_its_owner_s(given: Tensor | None) -> None:
    call = call_of(rows("normal"), "NVFP4", given)
    scale = call.outputs["tensor_scale"]
    for factor, legal in ((1 + 2.0**-22, True), (1 + 2.0**-18, False), (2.0, False)):
        outputs = dict(call.outputs) | {"tensor_scale": scale * factor}
        result = judged(call, outputs, "tensor_scale")
        assert (result.verdict is Verdict.AGREES) is legal, (factor, str(result.worst))


def test_codes_of_a_slot_follow_its_experts_scale() -> None:
    """Experts with input scales of their own: a token's row is quantised once for each."""
    x, scale = rows("normal"), torch.tensor([0.01, 0.013]).expand(24, 2)
    call = replace(
        call_of(x, "NVFP4", scale[0, 0]),
        role="ffn.experts.w13.act_quant",
        outputs=quantise_activations(x.unsqueeze(1).expand(-1, 2, -1), "NVFP4", scale),
    )
    for output in judge_outputs(call, call.outputs).values():
        assert output.ratio <= HEADROOM
    swapped = dict(call.outputs) | {"codes": call.outputs["codes"].flip(1)}
    assert judge_outputs(call, swapped)["codes"].ratio > 1


def test_routed_experts_are_clamped_where_the_shared_one_is_not() -> None:
    """What the codes of a clamped product are judged by is the clamped product."""
    recipe, component = recipe_named("nvfp4-full", V4), "layers.1.ffn.experts.act_quant"
    numerics = Numerics.twin(switches_of("official-v4-flash-early"))
    twin = BoundModel(V4, numerics, quantised_weights(random_weights(V4, 1), V4, recipe), recipe)
    _, inputs = operands(twin, component, 1)
    inputs["x"] = inputs["x"] * 30
    call = JudgeableCall.from_twin(twin, component, inputs)
    assert call.known_facts.limit is not None
    assert call.known_facts.shared_limit is None
    judged_by, coded = _values(call).value, values_of(call.outputs, format_of(call))
    assert float((judged_by - coded).abs().max()) < float(coded.abs().max()) / 4


def test_codes_of_no_number_and_nan_scales_differ() -> None:
    call = call_of(rows("normal"), "FP8_1X128_F32")
    codes, scale = call.outputs["codes"].clone(), call.outputs["block_scale"].clone()
    codes[2, 2], scale[1, 0] = 0x7F, torch.nan
    found = judge_outputs(call, dict(call.outputs) | {"codes": codes, "block_scale": scale})
    assert found["codes"].ratio == found["block_scale"].ratio == float("inf")


# --------------------------------------------------------------------------------------------------
# Choices: legal flips near ties, illegal ones, and weights for the candidate's own choice.

CHOICES_V4 = small_v4(num_hidden_layers=3, compress_ratios=(0, 4, 128, 0), num_hash_layers=1)


def router(family: str, logits: Tensor, bias: Tensor | None = None) -> JudgeableCall:
    """The router of a scored layer."""
    config, name = (
        (CHOICES_V4, "layers.1.ffn.topk") if family == "v4" else (V32, "layers.1.ffn.topk")
    )
    local = "ffn.gate.bias"
    bias = torch.zeros(config.n_routed_experts) if bias is None else bias
    twin = BoundModel(config, replace(Numerics.twin(), work=torch.float64), {})
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
    v4 = call.facts is not None and call.facts.config is CHOICES_V4
    score = torch.nn.functional.softplus(logits).sqrt() if v4 else torch.sigmoid(logits)
    chosen = score.gather(1, experts)
    assert call.facts is not None
    factor: float = call.facts.config.routed_scaling_factor
    return chosen / chosen.sum(-1, keepdim=True) * factor


def answer(call: JudgeableCall, experts: Tensor) -> dict[str, Tensor]:
    return {"experts": experts, "weights": own_weights(call, experts)}


def test_each_pair_of_scores_has_its_own_errors() -> None:
    """The loosest chosen score excuses no other one, nor does the loosest that was left out."""
    value = torch.tensor([1.0, 0.9, 1.2, 1.3], dtype=torch.float64)
    error = torch.tensor([0.5, 0.0, 0.0, 0.5], dtype=torch.float64)
    everything = torch.ones(4, dtype=torch.bool)
    gap, allowed = _pair_gap(torch.tensor([0, 1]), BoundedValue(value, error), everything)
    assert gap == pytest.approx(0.3)
    assert allowed == 0


@pytest.mark.parametrize("family", ["v4", "v32"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_scores_of_functions_at_their_limits_stay_within(family: str, sign: int) -> None:
    """Every function two units off, every argument and sum rounded, all in one direction."""
    count = (CHOICES_V4 if family == "v4" else V32).n_routed_experts
    logits = torch.linspace(-12, 12, 8 * count).reshape(8, count)
    call = router(family, logits)
    x, unit, function = logits.double(), 1 + sign * U, 1 + sign * FUNCTION * U
    if family == "v4":
        grown = x.exp() * (1 + sign * 2 * x.abs() * U) * function
        made = (((1 + grown) * unit).log() * function).sqrt() * function
    else:
        grown = (-x).exp() * (1 - sign * 2 * x.abs() * U) / function
        made = 1 / ((1 + grown) / unit) * function
    near = scores_of(call)
    off = (made - near.value).abs()
    assert bool((off <= 1.01 * near.error).all())
    assert bool((off > near.error / 3).all()), "and the errors are no wider than that"


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
        result = judge_outputs(call, answer(call, torch.tensor([[0, 1]])))["experts"]
        assert (result.verdict is Verdict.AGREES) is legal, result.ratio
        assert result.ratio == pytest.approx(budgets, rel=0.2)


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
    twin = BoundModel(CHOICES_V4, Numerics.twin(), {})
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
    twin = BoundModel(config, Numerics.twin(), {})
    what, facts = twin.bound_to("layers.1.ffn.topk")
    (name,) = twin.weights_of("layers.1.ffn.topk")
    weights = {name: Weight(value=torch.zeros(8))}
    inputs = {"logits": torch.tensor([[2.0, 1.9, 1.8, 1.7, 1.6, 0.0, 0.0, 0.0]])}
    outputs = twin.calls["layers.1.ffn.topk"](inputs, weights)
    call = JudgeableCall(what.role, inputs, outputs, weights, facts=facts)
    other = dict(outputs) | {"experts": torch.tensor([[0, 1, 2, 4]])}
    assert judge_outputs(call, other)["experts"].ratio > 1


def listed(scores: Tensor) -> JudgeableCall:
    twin = BoundModel(CHOICES_V4, Numerics.twin(), {})
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
    result = judge_outputs(call, {"out": equal})["out"]
    assert (result.verdict, result.flips.count, result.flips.rows) == (Verdict.AGREES, 1, (0,))
    for at, row in ((0, 9), (3, 3), (0, 10), (0, 5), (0, -1)):
        wrong = call.outputs["out"].clone()
        wrong[1 if at == 3 else 0, 7 if at == 0 else at] = row
        assert judge_outputs(call, {"out": wrong})["out"].ratio == float("inf"), (at, row)


def test_scores_that_hold_nan_have_no_order() -> None:
    scores = torch.arange(10.0)[None].clone()
    scores[0, 3] = torch.nan
    call = listed(scores)
    assert judge_outputs(call, {"out": torch.arange(8)[None]})["out"].verdict is Verdict.AGREES
