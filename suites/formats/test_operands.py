"""Operands made of bytes and scales equal those that were taken apart, in every order."""

from __future__ import annotations

import doctest
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble import fp8, judge, mxfp4, mxfp8, nvfp4
from degarble.harness.base.errors import DegarbleError
from degarble.harness.formats import operands
from degarble.harness.formats.dialects import COMPRESSED_TENSORS
from degarble.harness.formats.layouts import LINEAR, SCALE_LAYOUTS, SWIZZLE_128X4, pack_scales
from degarble.harness.formats.number_formats import (
    BLOCK_FORMATS,
    MXFP4,
    MXFP8,
    NVFP4,
    NibbleOrder,
    ScaleDirection,
)
from degarble.harness.formats.quantise import QuantisedTensor, dequantise, quantise

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

FP8_FORMATS = [name for name in BLOCK_FORMATS if name.startswith("FP8")]


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def same(made: QuantisedTensor, given: QuantisedTensor) -> bool:
    return torch.equal(dequantise(made), dequantise(given)) and made.format is given.format


@pytest.mark.parametrize("layout", sorted(SCALE_LAYOUTS))
@pytest.mark.parametrize("shape", [(48, 96), (3, 48, 96)])
def test_nvfp4_of_every_order(layout: str, shape: tuple[int, ...]) -> None:
    stored = quantise(values(*shape), NVFP4).with_layout(SCALE_LAYOUTS[layout])
    for direction in ScaleDirection:
        for order in NibbleOrder:
            held = stored.with_direction(direction).with_nibble_order(order)
            parts = (held.codes, held.block_scale, held.tensor_scale)
            assert same(nvfp4(*parts, layout, direction, order), held)


def test_dtypes_and_shapes_of_producers() -> None:
    held = quantise(values(2, 128, 64), NVFP4)
    swizzled = held.with_layout(SWIZZLE_128X4)
    codes = held.codes.view(torch.float4_e2m1fn_x2)
    e4m3 = held.block_scale.view(torch.float8_e4m3fn)
    assert same(nvfp4(codes, e4m3, held.tensor_scale), held)
    padded = swizzled.block_scale.reshape(2, 128, 4)  # [rows, columns] with padding, as FlashInfer
    assert same(nvfp4(codes, padded, held.tensor_scale, layout="128x4"), held)
    flat = quantise(values(128, 64), NVFP4)
    assert flat.tensor_scale is not None
    for scale in (flat.tensor_scale.reshape(1), float(flat.tensor_scale)):
        assert same(nvfp4(flat.codes, flat.block_scale, scale), flat)
    other = quantise(values(128, 64), NVFP4, COMPRESSED_TENSORS)
    assert same(
        nvfp4(other.codes, other.block_scale, other.tensor_scale, direction="encode"), other
    )


def test_mx_formats() -> None:
    four, eight = quantise(values(48, 96), MXFP4), quantise(values(48, 96), MXFP8)
    assert same(mxfp4(four.codes, four.block_scale.view(torch.float8_e8m0fnu)), four)
    swizzled = eight.with_layout(SWIZZLE_128X4)
    codes = eight.codes.view(torch.float8_e4m3fn)
    assert same(mxfp8(codes, swizzled.block_scale, layout="128x4"), eight)


@pytest.mark.parametrize("name", FP8_FORMATS)
@pytest.mark.parametrize("shape", [(384, 512), (2, 384, 512)])
def test_fp8_by_the_shape_of_its_scales(name: str, shape: tuple[int, ...]) -> None:
    held = quantise(values(*shape), BLOCK_FORMATS[name])
    assert same(fp8(held.codes.view(torch.float8_e4m3fn), held.block_scale), held)


def test_fp8_scales_as_they_are_written() -> None:
    row, whole = (quantise(values(384, 512), BLOCK_FORMATS[f"FP8_{n}"]) for n in ("ROW", "TENSOR"))
    assert same(fp8(row.codes, row.block_scale.flatten()), row)
    assert same(fp8(whole.codes, whole.block_scale.reshape(())), whole)
    assert same(fp8(whole.codes, whole.block_scale.reshape(1)), whole)
    assert same(fp8(whole.codes, float(whole.block_scale)), whole)
    packed = quantise(values(384, 512), BLOCK_FORMATS["FP8_1X128_UE8M0"])
    assert same(fp8(packed.codes, pack_scales(packed.block_scale), layout="packed_mn"), packed)


def test_a_kernel_that_reads_swizzled_scales_is_judged() -> None:
    x, w = values(32, 128).bfloat16(), values(256, 128).bfloat16()
    xq, wq = (quantise(each, NVFP4).with_layout(SWIZZLE_128X4) for each in (x, w))
    out = (dequantise(xq) @ dequantise(wq).T).bfloat16()
    x_made, w_made = (nvfp4(e.codes, e.block_scale, e.tensor_scale, "128x4") for e in (xq, wq))
    assert judge("gemm", x_made, w_made, out)
    linear = wq.with_layout(LINEAR).block_scale
    assert judge("gemm", x_made, nvfp4(wq.codes, linear, wq.tensor_scale), out)
    misread = nvfp4(wq.codes, wq.block_scale.reshape(256, 8), wq.tensor_scale)
    assert not judge("gemm", x_made, misread, out)


unchecked: Any = nvfp4  # callers without a type checker
CODES = torch.zeros(128, 32, dtype=torch.uint8)
SCALES = torch.zeros(128, 4, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: nvfp4(CODES.float(), SCALES), "codes"),
        (lambda: unchecked([0], SCALES), "codes"),
        (lambda: nvfp4(CODES[0], SCALES), "codes"),
        (lambda: nvfp4(CODES, SCALES[:, :3]), "block_scales"),
        (lambda: nvfp4(CODES, SCALES.float()), "block_scales"),
        (lambda: nvfp4(CODES[:5], SCALES[:5], layout="128x4"), "block_scales"),
        (lambda: nvfp4(CODES, SCALES, torch.ones(128)), "tensor_scale"),
        (lambda: unchecked(CODES, SCALES, "1"), "tensor_scale"),
        (lambda: nvfp4(CODES, SCALES, layout="128X4"), "scale layout"),
        (lambda: nvfp4(CODES, SCALES, direction="decoded"), "direction"),
        (lambda: nvfp4(CODES, SCALES, nibble_order="low"), "nibble_order"),
        (lambda: mxfp4(CODES, SCALES), "block_scales"),
        (lambda: mxfp8(CODES, SCALES), "block_scales"),
        (lambda: fp8(CODES, torch.ones(3)), "block_scales"),
        (lambda: fp8(CODES, torch.ones(1), layout="128x4"), "layout"),
    ],
)
def test_refusals_name_the_parameter(make: Callable[[], Any], name: str) -> None:
    with pytest.raises(DegarbleError) as refused:
        make()
    assert refused.value.name == name
    assert "--" not in str(refused.value)


def test_examples_of_the_docstrings_run() -> None:
    done = doctest.testmod(operands)
    assert done.attempted >= 4 * 3
    assert not done.failed
