"""Codes and scales: legal where a quotient lies within slack of a boundary, nowhere else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from degarble.harness.engine.budget.budget import HEADROOM
from degarble.harness.engine.budget.judging import OutputResult, judge_outputs
from degarble.harness.engine.budget.rules import JudgeableCall, U
from degarble.harness.formats.codec import decode_array, encode_array, pack_nibbles, unpack_nibbles
from degarble.harness.formats.number_formats import BLOCK_FORMATS, E4M3, NVFP4, NanRule
from degarble.harness.formats.weight import Weight
from degarble.harness.report.verdict import Verdict
from degarble.references.linears import quantise_activations

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.formats.number_formats import BlockFormat
    from degarble.references.facts import Facts

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
        "attn.wq_a.act_quant", {"x": x}, outputs, weights, facts=cast("Facts", facts)
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
            for key, found in judge_outputs(call, by_reciprocals(call, form, seed)).items():
                assert found.ratio <= HEADROOM, (key, str(found.worst))
                assert found.verdict is Verdict.AGREES


def test_codes_that_move_at_boundaries_are_counted_apart() -> None:
    x = (torch.arange(2048).reshape(4, 512) % 29 - 14).bfloat16() / 4
    call = call_of(x, "NVFP4", torch.tensor(0.1))
    moved = by_reciprocals(call, NVFP4, 3)
    found = judge_outputs(call, moved)["codes"]
    differ = unpack_nibbles(moved["codes"]) != unpack_nibbles(call.outputs["codes"])
    assert found.flips.count == int(differ.sum())
    assert found.flips.count > 0
    assert found.flips.rows == tuple(differ.any(-1).nonzero().flatten().tolist())
    assert found.comparison is not None
    assert found.comparison.shape == x.shape


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
            found = judged(call, spoilt(call, form, at, by), "codes")
            assert found.ratio > 1, (at, by)
            assert found.worst is not None
            assert found.worst.place == at


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
    found = judged(call, spoilt(call, NVFP4, (0, 5), -side), "codes")
    assert (found.verdict is Verdict.AGREES) is legal
    assert found.ratio == pytest.approx(budgets, rel=0.1)  # the value is float32 itself


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
        found = judged(call, outputs, "tensor_scale")
        assert (found.verdict is Verdict.AGREES) is legal, (factor, str(found.worst))


def test_codes_of_no_number_and_nan_scales_differ() -> None:
    call = call_of(rows("normal"), "FP8_1X128_F32")
    codes, scale = call.outputs["codes"].clone(), call.outputs["block_scale"].clone()
    codes[2, 2], scale[1, 0] = 0x7F, torch.nan
    found = judge_outputs(call, dict(call.outputs) | {"codes": codes, "block_scale": scale})
    assert found["codes"].ratio == found["block_scale"].ratio == float("inf")
