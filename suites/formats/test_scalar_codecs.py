"""Codecs of one number in the worlds of scalars and tensors, against the readable definition.

The third world, a kernel's, is proven in suites/kernels: on the host everywhere, on a GPU there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from degarble.harness.formats import codec
from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.codec import unpack_nibbles
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.number_formats import (
    BF16,
    E2M1,
    E4M3,
    NVFP4,
    UE8M0,
    NanRule,
    Overflow,
    Rounding,
)
from degarble.harness.formats.quantise import quantise

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.harness.formats.number_formats import ElementFormat


@dataclass(frozen=True)
class Codec:
    """A format's two functions under test, and the rules that the hardware rounds by."""

    fmt: ElementFormat
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    rounding: Rounding = Rounding.NEAREST_EVEN
    overflow: Overflow = Overflow.SATURATE

    def defined(self, value: float) -> int:
        """Encode by the definition; a scale's sign is ignored."""
        value = value if self.fmt.signed else abs(value)
        return codec.encode(value, self.fmt, self.rounding, self.overflow, NanRule.LARGEST)


CODECS = (
    Codec(E2M1, codecs.e2m1_encode, codecs.e2m1_decode),
    Codec(E4M3, codecs.e4m3_encode, codecs.e4m3_decode),
    Codec(UE8M0, codecs.ue8m0_encode, codecs.ue8m0_decode, rounding=Rounding.UP),
    Codec(BF16, codecs.bf16_encode, codecs.bf16_decode, overflow=Overflow.IEEE),
)
each_codec = pytest.mark.parametrize("unit", CODECS, ids=lambda unit: unit.fmt.name)


def all_bfloat16() -> Tensor:
    """Return the 65,536 bfloat16 numbers as float32."""
    return (torch.arange(1 << 16) << 16).to(torch.int32).view(torch.float32)


def between_codes(fmt: ElementFormat) -> Tensor:
    """Return every number, every midpoint, and both neighbours of each in float32."""
    codes = range(0, fmt.largest_code, 1 if fmt.bits <= 8 else 61)
    points = []
    for code in codes:
        below, above = codec.decode(code, fmt), codec.decode(code + 1, fmt)
        points += [below, (below + above) / 2]
    points.append(codec.decode(fmt.largest_code, fmt))
    exact = np.array(points, dtype=np.float32)
    lower, upper = (np.nextafter(exact, np.float32(to)) for to in (-np.inf, np.inf))
    values = np.concatenate([exact, lower, upper])
    return torch.from_numpy(np.concatenate([values, -values]))


def mismatches(unit: Codec, encode: Callable[[Any], Any], numbers: Tensor) -> list[float]:
    """Return the numbers that `encode`, on scalars, takes elsewhere than the definition."""
    found = []
    for value in numbers.numpy():
        code = encode(value)
        assert type(code) is int
        if code != unit.defined(float(value)):
            found.append(float(value))
    return found


@each_codec
def test_encodes_every_bfloat16_as_defined(unit: Codec) -> None:
    assert mismatches(unit, unit.encode, all_bfloat16()) == []


@each_codec
def test_encodes_around_every_boundary_as_defined(unit: Codec) -> None:
    assert mismatches(unit, unit.encode, between_codes(unit.fmt)) == []


@each_codec
def test_tensors_encode_what_scalars_encode(unit: Codec) -> None:
    numbers = torch.cat([all_bfloat16(), between_codes(unit.fmt)])
    codes = unit.encode(numbers)
    assert codes.dtype is torch.int64
    assert codes.tolist() == [unit.encode(value) for value in numbers.numpy()]


@each_codec
def test_decodes_every_code_as_defined(unit: Codec) -> None:
    numbers = unit.decode(torch.arange(unit.fmt.code_count))
    assert numbers.dtype is torch.float32
    for code, got in enumerate(numbers.numpy()):
        scalar = unit.decode(code)
        assert isinstance(scalar, np.float32)
        expected = np.float32(codec.decode(code, unit.fmt))
        if math.isnan(expected):
            assert math.isnan(scalar)
            assert math.isnan(got)
        else:
            assert ops.bits_of(expected) == ops.bits_of(scalar) == ops.bits_of(got)


def test_special_numbers_by_name() -> None:
    nan, inf = math.nan, math.inf
    assert [codecs.e2m1_encode(x) for x in (nan, -nan, inf, -inf, -0.0, -1e-30)] == [
        *(7, 7, 7, 15, 8, 8)
    ]
    assert [codecs.e2m1_encode(x) for x in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)] == [
        *(0, 2, 2, 4, 4, 6, 6)
    ]
    assert [codecs.e4m3_encode(x) for x in (nan, -nan, inf, -inf, -0.0, 464.0, 1e9)] == [
        *(0x7F, 0x7F, 0x7E, 0xFE, 0x80, 0x7E, 0x7E)
    ]
    assert [codecs.e4m3_encode(2.0**-10 * x) for x in (1, 1.5, 3, 15, 16)] == [0, 1, 2, 8, 8]
    assert [codecs.ue8m0_encode(x) for x in (nan, inf, 0.0, 2.0**-127, 1.0, 1.0000001)] == [
        *(255, 254, 0, 0, 127, 128)
    ]
    assert [codecs.bf16_encode(x) for x in (nan, inf, -inf, 3.4e38, -0.0)] == [
        *(0x7FC0, 0x7F80, 0xFF80, 0x7F80, 0x8000)
    ]


def test_torch_rounds_to_bfloat16_and_decodes_e4m3_alike() -> None:
    bits = torch.arange(1 << 16) * 0x1_0001
    numbers = ops.number_of(bits)
    numbers = numbers[~numbers.isnan()]
    assert torch.equal(codecs.bf16_round(numbers), numbers.bfloat16().float())
    stored = torch.arange(256, dtype=torch.uint8)
    torch.testing.assert_close(
        codecs.e4m3_decode(stored),
        stored.view(torch.float8_e4m3fn).float(),
        rtol=0,
        atol=0,
        equal_nan=True,
    )


def test_a_tie_that_goes_the_wrong_way_is_detected() -> None:
    def half_up(value: Any) -> int:
        boundaries = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
        magnitude = abs(float(value))
        sign = 8 * (math.copysign(1, value) < 0)
        code = 7 if math.isnan(value) else sum(magnitude >= boundary for boundary in boundaries)
        return code + (0 if math.isnan(value) else sign)

    unit = CODECS[0]
    assert mismatches(unit, half_up, between_codes(E2M1)) == [
        *(0.25, 1.25, 2.5, 5.0, -0.25, -1.25, -2.5, -5.0)
    ]


def blocks(seed: int) -> Tensor:
    """Return bfloat16 [M, 64]: ordinary blocks, tiny and huge ones, zeros, one value, ties."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(96, 64, generator=generator)
    x[:32] *= torch.logspace(-20, 3, 32)[:, None]
    x[32, :16] = 0.0
    x[33, 1:] = 0.0
    x[34] = 1e-4
    x[35, :32] = -0.0
    x[36] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 8)
    x[37, 3] = 100.0
    return x.bfloat16()


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a matrix with the functions under test; codes one a byte, scale codes."""
    encode_scale = codecs.nvfp4_tensor_encode_scale(x.float().abs().max())
    values = x.float().view(x.shape[0], -1, 16)
    scale_codes = codecs.nvfp4_block_scale(values.abs().amax(-1), encode_scale)
    factor = codecs.nvfp4_block_encode_scale(scale_codes, encode_scale)
    codes = codecs.nvfp4_encode(values, factor[..., None])
    return codes.flatten(-2).to(torch.uint8), scale_codes.to(torch.uint8)


@pytest.mark.parametrize("factor", [1.0, 1e-3, 3e4, 1e-38])
def test_the_scale_rule_is_that_of_the_canonical_dialect(seed: int, factor: float) -> None:
    x = (blocks(seed).float() * factor).bfloat16()
    codes, scale_codes = quantised(x)
    definition = quantise(x, NVFP4, CANONICAL)
    assert torch.equal(scale_codes, definition.block_scale)
    assert torch.equal(codes, unpack_nibbles(definition.codes))


def test_scalars_quantise_as_tensors_do(seed: int) -> None:
    x = blocks(seed)[30:40]
    codes, scale_codes = quantised(x)
    encode_scale = codecs.nvfp4_tensor_encode_scale(np.float32(x.float().abs().max()))
    for row, code, scale in zip(x.float().numpy(), codes, scale_codes, strict=True):
        for block in range(4):
            values = row[16 * block : 16 * block + 16]
            scale_code = codecs.nvfp4_block_scale(np.abs(values).max(), encode_scale)
            factor = codecs.nvfp4_block_encode_scale(scale_code, encode_scale)
            assert scale_code == scale[block]
            got = [codecs.nvfp4_encode(value, factor) for value in values]
            assert got == code[16 * block : 16 * block + 16].tolist()


def test_a_shorter_scale_rule_would_be_detected(seed: int) -> None:
    amax = torch.rand(4000, generator=torch.Generator().manual_seed(seed)) * 3.7
    encode_scale = codecs.nvfp4_tensor_encode_scale(torch.tensor(3.7))
    scale_code = codecs.nvfp4_block_scale(amax, encode_scale)
    factor = codecs.nvfp4_block_encode_scale(scale_code, encode_scale)
    one_division = encode_scale / codecs.e4m3_decode(scale_code)
    assert int((factor != one_division).sum()) > 400  # a quarter of all; Transformer Engine has two


def test_tensor_scale_edges() -> None:
    scale = codecs.nvfp4_tensor_encode_scale
    assert [float(scale(x)) for x in (0.0, math.inf, 2688.0)] == [1.0, 1.0, 1.0]
    assert float(scale(1e-45)) == float(scale(math.nan)) == codecs.FLOAT32_MAX
    assert float(np.finfo(np.float32).max) == codecs.FLOAT32_MAX
    assert float(np.float32(1 / 6)) == codecs.ONE_SIXTH
    # Zero block: scale 0, and zeros times the largest float32 stay zeros of either sign.
    assert codecs.nvfp4_block_scale(0.0, scale(1.0)) == 0
    factor = codecs.nvfp4_block_encode_scale(0, scale(1.0))
    assert float(factor) == codecs.FLOAT32_MAX
    assert codecs.nvfp4_encode(-0.0, factor) == 8


def test_products_of_element_and_block_scale_are_exact() -> None:
    codes = torch.arange(16)[:, None]
    scales = torch.arange(256)[None, :]
    product = codecs.nvfp4_decode(codes, scales)
    exact = codecs.e2m1_decode(codes).double() * codecs.e4m3_decode(scales).double()
    torch.testing.assert_close(product.double(), exact, rtol=0, atol=0, equal_nan=True)
    finite = product[~product.isnan()]
    assert torch.equal(codecs.bf16_round(finite), finite)  # why bf16 tensor cores can judge them


def test_rope_rounds_each_product(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 4096, generator=generator).bfloat16().float()
    angle = torch.rand(4096, generator=generator) * 100
    cos, sin = angle.cos(), angle.sin()
    even, odd = codecs.rope_rotate(x[0], x[1], cos, sin)
    assert torch.equal(even, x[0] * cos - x[1] * sin)
    assert torch.equal(odd, x[0] * sin + x[1] * cos)
    for i in range(0, 4096, 97):
        arguments = (x[0, i], x[1, i], cos[i], sin[i])
        scalars = codecs.rope_rotate(*(np.float32(a) for a in arguments))
        assert [float(s) for s in scalars] == [even[i].item(), odd[i].item()]
    # The trap: contracted as ptxas does with plain operators, a quarter of the results changes.
    contracted = ops.fma_rn(x[0], cos, -(x[1] * sin))
    assert int((contracted != even).sum()) > 400
