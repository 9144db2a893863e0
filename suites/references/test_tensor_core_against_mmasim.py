"""The models of tensor-core steps against the package mmasim, and faults planted in the models."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.references import tensor_core as tc
from degarble.suites.references.tensor_core_cases import (
    DENSE,
    SCALED,
    DenseCase,
    ScaledCase,
    assert_same_bits,
    bits,
    draw_dense,
    draw_scaled,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.harness.formats.number_formats import ElementFormat

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
DENSE_RULES = (tc.WGMMA_F16, tc.TCGEN05_F16)
SCALED_RULES = (tc.NVFP4_BLOCK16, tc.MXFP4_BLOCK32)
pytestmark = pytest.mark.needs("mmasim")


def dense_oracle(case: DenseCase, rule: tc.StepRule, operand: str) -> Tensor:
    from mmasim import nv_ptx  # type: ignore[import-untyped]  # noqa: PLC0415  optional

    n = case.b.shape[0]
    if rule is tc.WGMMA_F16:
        step = nv_ptx.WGMMA("Hopper", f"m64n{n}k16.f32.{operand}.{operand}")
    else:
        step = nv_ptx.TCGen05MMA("Blackwell", f"m64n{n}k16.kind::f16.f32.{operand}.{operand}")
    out: Tensor = step(case.a, case.b.T, case.c)
    return out


def scaled_oracle(case: ScaledCase, rule: tc.StepRule) -> Tensor:
    from mmasim import nv_ptx  # noqa: PLC0415  optional

    nvfp4 = rule.block == 16
    kind = "mxf4nvf4.block16.f32.e2m1.e2m1.ue4m3" if nvfp4 else "mxf4.block32.f32.e2m1.e2m1.ue8m0"
    n = case.b_codes.shape[0]
    step = nv_ptx.TCGen05MMABlockScale("Blackwell", f"m128n{n}k64.kind::{kind}")
    dtype = torch.float8_e4m3fn if nvfp4 else torch.float8_e8m0fnu
    out: Tensor = step(
        # mmasim unpacks the high nibble first; the order inside a group changes nothing
        (case.a_codes[:, 0::2] << 4) | case.a_codes[:, 1::2],
        ((case.b_codes[:, 0::2] << 4) | case.b_codes[:, 1::2]).T,
        case.c,
        case.a_scales.view(dtype),
        case.b_scales.view(dtype).T,
    )
    return out


# ---- against mmasim ------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", DENSE_RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("operand", DTYPES)
@pytest.mark.parametrize("family", DENSE)
def test_dense_gemm_equals_mmasim(family: str, operand: str, rule: tc.StepRule, seed: int) -> None:
    case = draw_dense(family, seed, DTYPES[operand])
    assert_same_bits(tc.dense_gemm(*case, rule=rule), dense_oracle(case, rule, operand))


@pytest.mark.parametrize("rule", SCALED_RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("family", SCALED)
def test_block_scaled_gemm_equals_mmasim(family: str, rule: tc.StepRule, seed: int) -> None:
    case = draw_scaled(family, seed, rule.block)
    assert_same_bits(tc.block_scaled_gemm(*case, rule=rule), scaled_oracle(case, rule))


# ---- planted faults ------------------------------------------------------------------------------

if TYPE_CHECKING:
    Plant = Callable[[pytest.MonkeyPatch, tc.StepRule], tc.StepRule]


def changed(**facts: int) -> Plant:
    """Return a plant that adds to the constants of the rule."""

    def plant(_: pytest.MonkeyPatch, rule: tc.StepRule) -> tc.StepRule:
        added = {name: getattr(rule, name) + change for name, change in facts.items()}
        return replace(rule, **added)

    return plant


def patched(name: str, function: Callable[..., Any]) -> Plant:
    """Return a plant that replaces one function of the model."""

    def plant(monkeypatch: pytest.MonkeyPatch, rule: tc.StepRule) -> tc.StepRule:
        monkeypatch.setattr(tc, name, function)
        return rule

    return plant


def nearest(total: Tensor, exponent: Tensor) -> Tensor:
    return (total.double() * torch.exp2(exponent.double())).float() + 0.0


def shifted_down(significand: Tensor, shift: Tensor) -> Tensor:
    return significand >> shift.clamp(max=31).to(significand.dtype)


_truncated_sum = tc.truncated_sum
_split_codes = tc.split_codes


def normalised(terms: tc.CodeParts, c_MN: Tensor, rule: tc.StepRule) -> Tensor:
    over = (terms.significand.abs() >> (rule.fraction_bits + 1)) > 0
    parts = tc.CodeParts(terms.significand >> over.int(), terms.exponent + over.int())
    return _truncated_sum(parts, c_MN, rule)


def cancels(a_TMK: Tensor, b_TNK: Tensor) -> Tensor:
    return torch.bmm(a_TMK, b_TNK.mT) == 0


def flushed(codes: Tensor, fmt: ElementFormat) -> tc.CodeParts:
    parts = _split_codes(codes, fmt)
    hidden = parts.significand.abs() >> fmt.mantissa_bits
    return tc.CodeParts(parts.significand * hidden, parts.exponent)


DENSE_FAULTS: dict[str, tuple[Plant, str]] = {
    "a fraction bit less": (changed(fraction_bits=-1), "cancelling"),
    "a fraction bit more": (changed(fraction_bits=1), "cancelling"),
    "zero exponent one higher": (changed(zero_exponent=1), "zero_exponent"),
    "zero exponent one lower": (changed(zero_exponent=-1), "zero_exponent"),
    "zero aligned at one": (changed(zero_exponent=133), "subnormal"),
    "result to nearest": (patched("fp32_toward_zero", nearest), "normal"),
    "terms rounded down": (patched("_shifted_toward_zero", shifted_down), "cancelling"),
    "products normalised": (patched("truncated_sum", normalised), "cancelling"),
    "subnormals flushed": (patched("split_codes", flushed), "subnormal"),
}

SCALED_FAULTS: dict[str, tuple[Plant, tc.StepRule, str]] = {
    "a fraction bit less": (changed(fraction_bits=-1), tc.NVFP4_BLOCK16, "cancelling_groups"),
    "a fraction bit more": (changed(fraction_bits=1), tc.NVFP4_BLOCK16, "cancelling_groups"),
    "zero aligned at one": (changed(zero_exponent=139), tc.NVFP4_BLOCK16, "zero_groups"),
    "zero one higher": (changed(zero_exponent=1), tc.MXFP4_BLOCK32, "scaled_zero_exponent"),
    "zero one lower": (changed(zero_exponent=-1), tc.MXFP4_BLOCK32, "scaled_zero_exponent"),
    "result to nearest": (
        patched("fp32_toward_zero", nearest),
        tc.NVFP4_BLOCK16,
        "codes_normal",
    ),
    "terms rounded down": (
        patched("_shifted_toward_zero", shifted_down),
        tc.NVFP4_BLOCK16,
        "cancelling_groups",
    ),
    "cancelling aligned as zero": (
        patched("all_products_zero", cancels),
        tc.NVFP4_BLOCK16,
        "cancelling_groups",
    ),
    "sums normalised": (
        patched("truncated_sum", normalised),
        tc.NVFP4_BLOCK16,
        "opposite_groups",
    ),
}


@pytest.mark.parametrize("fault", DENSE_FAULTS)
def test_a_fault_in_the_dense_model_is_detected(
    fault: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, family = DENSE_FAULTS[fault]
    case = draw_dense(family, seed, torch.bfloat16)
    want = dense_oracle(case, tc.WGMMA_F16, "bf16")
    assert_same_bits(tc.dense_gemm(*case), want)
    got = tc.dense_gemm(*case, rule=plant(monkeypatch, tc.WGMMA_F16))
    assert (bits(got) != bits(want)).any()


@pytest.mark.parametrize("fault", SCALED_FAULTS)
def test_a_fault_in_the_block_scaled_model_is_detected(
    fault: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, rule, family = SCALED_FAULTS[fault]
    case = draw_scaled(family, seed, rule.block)
    want = scaled_oracle(case, rule)
    assert_same_bits(tc.block_scaled_gemm(*case, rule=rule), want)
    got = tc.block_scaled_gemm(*case, rule=plant(monkeypatch, rule))
    assert (bits(got) != bits(want)).any()
