"""Operands and products: exact whatever form they come in, and whole or in part the same."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.engine.diagnose.judge.product import Operand, Product
from degarble.harness.formats.layouts import SWIZZLE_128X4
from degarble.harness.formats.number_formats import (
    FP8_128X128_UE8M0,
    MXFP4,
    NVFP4,
    NibbleOrder,
    ScaleDirection,
)
from degarble.harness.formats.quantise import dequantise, quantise

if TYPE_CHECKING:
    from degarble.harness.formats.quantise import QuantisedTensor

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
    made = Product.of(X, FORMS[form], torch.float32)
    expected = X.double() @ dequantise(FORMS[form], torch.float64).T
    assert float((made.exact - expected).abs().max()) < 1e-12 * float(expected.abs().max()) * 256
    assert torch.equal(made.expected, made.exact.float())


@pytest.mark.parametrize("form", FORMS)
def test_some_rows_and_columns_are_those_of_the_whole(form: str) -> None:
    made = Product.of(X, FORMS[form], torch.bfloat16, torch.arange(150.0))
    rows, columns = torch.tensor([1, 39]), torch.tensor([0, 7, 149])
    part = made.at(rows, columns)
    assert torch.allclose(part.exact, made.exact[rows][:, columns], rtol=1e-13, atol=1e-12)
    slack, whole = part.budget.slack, made.budget.slack[rows][:, columns]
    assert float((slack / whole).max()) < 1.5
    again = part.at(torch.tensor([1]), torch.tensor([2])).exact
    assert torch.allclose(again, part.exact[1:, 2:], rtol=1e-13, atol=1e-12)


def test_scales_of_rows_go_with_their_rows() -> None:
    x = quantise(X[:, None], NVFP4, amax=X.abs().amax(1))
    made = Product.of(x, W, torch.float32)
    assert made.shape == (40, 150)
    rows, columns = torch.tensor([3, 4]), torch.arange(150)
    assert torch.allclose(made.at(rows, columns).exact, made.exact[rows], rtol=1e-13, atol=1e-12)
    expected = dequantise(x, torch.float64)[:, 0] @ W.double().T
    assert torch.allclose(made.exact, expected, rtol=1e-12, atol=1e-9)


def test_the_values_are_the_same_before_and_behind_the_unit() -> None:
    tensor = FORMS["nvfp4"]
    first, second = Operand(tensor), Operand(tensor)
    assert second.unit.shape == tensor.shape
    assert torch.equal(first.values, second.values)
    doubled = Operand(replace(tensor, tensor_scale=tensor.decode_scale * 2))
    assert torch.equal(doubled.unit, second.unit)
    assert torch.equal(doubled.values, second.values * 2)


def test_the_plain_product_is_float32_from_end_to_end() -> None:
    made = Product.of(X, FORMS["nvfp4"], torch.float32)
    expected = X @ dequantise(FORMS["nvfp4"], torch.float32).T
    assert torch.equal(made.plain(), expected)
