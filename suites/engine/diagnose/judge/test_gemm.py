"""Products are exact in every form; sixteen faults are named, healthy orders of sums are not."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.engine.diagnose import diagnose
from degarble.harness.engine.diagnose.judge.judge import judge
from degarble.harness.engine.diagnose.judge.product import MatrixOperand, Product
from degarble.harness.formats.codec import decode_array, encode_array, pack_nibbles
from degarble.harness.formats.layouts import SWIZZLE_128X4
from degarble.harness.formats.number_formats import (
    E2M1,
    E4M3,
    FP8_128X128_UE8M0,
    MXFP4,
    NVFP4,
    NibbleOrder,
    Rounding,
    ScaleDirection,
)
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.harness.report.verdict import Verdict
from degarble.references.tensor_core import block_scaled_gemm
from degarble.suites.engine.diagnose.judge.gemm_faults import (
    FAULTS,
    HEALTHY,
    INPUTS,
    Gemm,
    gemm,
    product,
    values,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from degarble.harness.engine.diagnose.judge.report import JudgedKernel
    from degarble.harness.formats.quantise import QuantisedTensor


# --------------------------------------------------------------------------------------------------
# Operands and products: exact whatever form they come in, and whole or in part the same.

X = torch.randn(40, 256, generator=torch.Generator().manual_seed(1))
W = torch.randn(150, 256, generator=torch.Generator().manual_seed(2))
FORMS: dict[str, QuantisedTensor] = {
    "nvfp4": quantise(W, NVFP4),
    "swizzled": quantise(W, NVFP4).with_layout(SWIZZLE_128X4),
    "encode": quantise(W, NVFP4).with_direction(ScaleDirection.ENCODE),
    "high even": quantise(W, NVFP4).with_nibble_order(NibbleOrder.HIGH_EVEN),
    "mxfp4": quantise(W, MXFP4),
    "fp8": quantise(W, FP8_128X128_UE8M0),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_product_is_exact_in_every_form(form: str) -> None:
    made = Product.from_operands(X, FORMS[form], torch.float32)
    expected = X.double() @ dequantise(FORMS[form], torch.float64).T
    assert float((made.exact - expected).abs().max()) < 1e-12 * float(expected.abs().max()) * 256
    assert torch.equal(made.expected, made.exact.float())


def test_scales_of_rows_go_with_their_rows() -> None:
    x = quantise(X[:, None], NVFP4, amax=X.abs().amax(1))
    made = Product.from_operands(x, W, torch.float32)
    assert made.shape == (40, 150)
    expected = dequantise(x, torch.float64)[:, 0] @ W.double().T
    assert torch.allclose(made.exact, expected, rtol=1e-12, atol=1e-9)


def test_the_values_are_the_same_before_and_after_the_unit() -> None:
    tensor = FORMS["nvfp4"]
    first, second = MatrixOperand(tensor), MatrixOperand(tensor)
    assert second.unit.shape == tensor.shape
    assert torch.equal(first.values, second.values)
    doubled = MatrixOperand(replace(tensor, tensor_scale=tensor.decode_scale * 2))
    assert torch.equal(doubled.unit, second.unit)
    assert torch.equal(doubled.values, second.values * 2)


def test_the_plain_product_is_float32_from_end_to_end() -> None:
    made = Product.from_operands(X, FORMS["nvfp4"], torch.float32)
    expected = X @ dequantise(FORMS["nvfp4"], torch.float32).T
    assert torch.equal(made.plain(), expected)


# --------------------------------------------------------------------------------------------------
# Sixteen faults of a W4A4 product: none missed, the cause named, and no healthy order blamed.

SHAPE = (192, 256, 256)


@lru_cache(maxsize=4)
def made(kind: str) -> Gemm:
    return gemm(kind, SHAPE)


def judged(g: Gemm, out: Tensor, reference: bool = True) -> JudgedKernel:
    unquantised = {"x": g.x, "w": g.w} if reference else None
    return judge("gemm", g.xq, g.wq, out.bfloat16(), reference=unquantised)


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("order", HEALTHY)
def test_every_legal_order_of_the_sum_agrees(kind: str, order: str) -> None:
    g = made(kind)
    assert judged(g, HEALTHY[order](g)).require().ratio <= 0.7


def _in_turn(names: Iterable[str]) -> list[Any]:
    """Cross names and inputs: by default each name has one kind of them, in turn."""
    return [
        pytest.param(name, kind, marks=() if n == number % len(INPUTS) else pytest.mark.slow)
        for number, name in enumerate(names)
        for n, kind in enumerate(INPUTS)
    ]


@pytest.mark.parametrize(("fault", "kind"), _in_turn(FAULTS))
def test_a_fault_is_found_and_its_cause_is_named_first(kind: str, fault: str) -> None:
    g = made(kind)
    kernel = judged(g, FAULTS[fault].run(g))
    assert kernel.verdict is Verdict.DIFFERS
    assert kernel.cause is not None, str(kernel)
    assert kernel.cause.fault == FAULTS[fault].named, str(kernel)


@pytest.mark.parametrize(("name", "kind"), _in_turn(["x", "w"]))
def test_an_operand_that_was_truncated_when_it_was_quantised_is_named(kind: str, name: str) -> None:
    """The codes are made here: quotients by the stored scales, rounded toward zero."""
    g = made(kind)
    plain, tensor = (g.x, g.xq) if name == "x" else (g.w, g.wq)
    scales = decode_array(tensor.block_scale, E4M3).double() * tensor.decode_scale.double()
    quotients = plain.double().unflatten(-1, (-1, 16)) / scales[..., None]
    codes = encode_array(quotients.flatten(-2).float(), E2M1, Rounding.TOWARD_ZERO)
    other = replace(tensor, codes=pack_nibbles(codes, NibbleOrder.LOW_EVEN))
    kernel = judged(g, product(other, g.wq) if name == "x" else product(g.xq, other))
    assert kernel.cause is not None, str(kernel)
    assert kernel.cause.fault == "M09.truncated"
    assert f"elements of {name} toward zero" in kernel.cause.evidence


def test_the_list_is_the_measured_one() -> None:
    assert len(FAULTS) == 16


def test_a_silent_fallback_is_too_good_for_the_quantised_operands() -> None:
    g = made("gaussian")
    kernel = judged(g, g.x.float() @ g.w.float().T)
    assert kernel.too_good is not None
    assert kernel.too_good.ratio > 1
    half = judged(g, g.x.float() @ values(g)[1].T)
    assert half.cause is not None
    assert half.cause.fault == "M18.plain_input"


@pytest.mark.slow
def test_a_fallback_without_the_unquantised_operands_differs_without_a_name() -> None:
    g = made("gaussian")
    blind = judged(g, g.x.float() @ g.w.float().T, reference=False)
    assert blind.verdict is Verdict.DIFFERS
    assert blind.named == ()


@pytest.mark.slow
def test_unknown_damage_is_found_without_claiming_a_cause() -> None:
    g = made("gaussian")
    generator = torch.Generator().manual_seed(1)
    noise = 1 + 0.05 * torch.randn(SHAPE[:2], generator=generator)
    kernel = judged(g, product(g.xq, g.wq) * noise)
    assert kernel.verdict is Verdict.DIFFERS
    assert kernel.named == ()
    assert "no known fault explains it" in kernel.sentence


@pytest.mark.slow
def test_a_cause_is_proved_on_the_whole_output() -> None:
    """A fault and one element more: no single way reproduces it, so none is claimed."""
    g = made("gaussian")
    out = FAULTS["nibbles swapped"].run(g)
    out[77, 3] *= 3
    assert judged(g, out).named == ()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda out: out.roll(1, 1), "M16.rows"),
        (lambda out: out.roll(1, 0), "M12.rows_shifted"),
        (lambda out: out.reshape(len(out), 2, -1).flip(1).reshape(out.shape), "M14.swapped"),
        (lambda out: out.reshape(len(out), 2, -1).mT.reshape(out.shape), "M14.interleaved"),
        (lambda out: out / 16, "M43.whole"),
    ],
)
def test_output_in_another_order_or_size(change: Callable[[Tensor], Tensor], named: str) -> None:
    g = made("heavy-tailed")
    kernel = judged(g, change(product(g.xq, g.wq)))
    assert kernel.cause is not None, str(kernel)
    assert kernel.cause.fault == named


def test_faults_of_the_activation_are_named_as_such() -> None:
    g = made("gaussian")
    shifted = replace(g.xq, block_scale=g.xq.block_scale.roll(-1, 1).contiguous())
    kernel = judged(g, product(shifted, g.wq))
    assert kernel.cause is not None
    assert kernel.cause.fault == "M12.activation_column"


def test_a_code_that_is_read_as_another_value() -> None:
    g = made("gaussian")
    low, high = (torch.where(h == 7, 6, h) for h in (g.wq.codes & 15, g.wq.codes >> 4))
    kernel = judged(g, product(g.xq, replace(g.wq, codes=(low | high << 4).to(torch.uint8))))
    assert kernel.cause is not None, str(kernel)
    assert kernel.cause.fault == "M09.decode_table"
    assert "0x7 as 4" in kernel.cause.evidence


def test_sums_in_sixteen_bits() -> None:
    g = made("gaussian")
    x, w = values(g)
    total = torch.zeros(SHAPE[:2])
    for begin in range(0, SHAPE[2], 32):
        total = (total + x[:, begin : begin + 32] @ w[:, begin : begin + 32].T).half().float()
    kernel = judged(g, total)
    assert kernel.cause is not None, str(kernel)
    assert "FP16 after every 32 of K" in kernel.cause.evidence


def test_the_tensor_core_model_agrees() -> None:
    g = gemm("gaussian", (32, 32, 128))
    out = tensor_core(g)
    assert judge("gemm", g.xq, g.wq, out).require().ratio <= 0.7


def tensor_core(g: Gemm) -> Tensor:
    sides = [(t.element_codes(), t.linear_scale_codes()) for t in (g.xq, g.wq)]
    (a, sa), (b, sb) = sides
    unit = block_scaled_gemm(a, sa, b, sb)
    return (unit * (g.xq.decode_scale * g.wq.decode_scale)).bfloat16()


def test_a_fit_is_no_cause_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget decides: with a proof that always fails, no proposal is a cause."""
    g = made("gaussian")
    monkeypatch.setattr(diagnose, "explained", lambda *_: None)
    assert judged(g, FAULTS["global scale x2"].run(g)).named == ()
