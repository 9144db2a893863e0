"""Scalar operations and codecs in the worlds of scalars and tensors, against exact arithmetic."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.formats import codec, scalar_ops
from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.codec import unpack_nibbles
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.number_formats import (
    BF16,
    E2M1,
    E4M3,
    FP32,
    NVFP4,
    UE8M0,
    NanRule,
    Overflow,
    Rounding,
)
from degarble.harness.formats.quantise import quantise

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.harness.formats.number_formats import ElementFormat


# --------------------------------------------------------------------------------------------------
# Operations that differ between worlds: each world against exact arithmetic, and the traps.

# 0, -0, subnormals, the smallest normal, 1 and its neighbours, large, largest, infinity, NaN,
# signalling NaN.
SPECIAL_BITS = (
    *(0x0, 0x1, 0x3, 0x7F_FFFF, 0x80_0000, 0x80_0001),
    *(0x3F80_0000, 0x3F7F_FFFF, 0x3F80_0001, 0x4B00_0001, 0x7F00_0000, 0x7F7F_FFFF),
    *(0x7F80_0000, 0x7FC0_0000, 0x7F80_0001),
)


def random_numbers(seed: int, count: int) -> NDArray[np.float32]:
    """Return float32 of every exponent, the special ones of both signs among them."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)
    special = np.array(SPECIAL_BITS, dtype=np.uint32)
    return np.concatenate([special, special | 0x8000_0000, bits]).view(np.float32)


def nearby_numbers(seed: int, count: int) -> NDArray[np.float32]:
    """Return float32 between 1/4 and 4, of which products and sums round and cancel."""
    generator = np.random.default_rng(seed)
    exponent = generator.integers(125, 129, count, dtype=np.uint32) << 23
    sign = generator.integers(0, 2, count, dtype=np.uint32) << 31
    mantissa = generator.integers(0, 1 << 23, count, dtype=np.uint32)
    sparse = mantissa & np.uint32(0x7F_F000)
    return (exponent | sign | np.where(mantissa & 1, mantissa, sparse)).view(np.float32)


def rounded_exactly(value: Fraction, sign_of_zero: int) -> int:
    """Round a rational to float32, nearest even, without any floating-point operation."""
    if value == 0:
        return sign_of_zero << 31
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    steps = round(magnitude / unit)  # of a Fraction: nearest, ties to even
    code = codec.encode(float(steps * unit), FP32, Rounding.NEAREST_EVEN, Overflow.IEEE)
    return code | (int(value < 0) << 31)


def same_number(left: Any, right: Any) -> bool:
    """Whether two float32 are the same bits, or both NaN."""
    if math.isnan(left) or math.isnan(right):
        return math.isnan(left) and math.isnan(right)
    return bool(ops.bits_of(left) == ops.bits_of(right))


EXACT: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "multiply_rn": lambda a, b: a * b,
    "add_rn": lambda a, b: a + b,
    "subtract_rn": lambda a, b: a - b,
    "divide_rn": lambda a, b: a / b,
}


@pytest.mark.parametrize("name", EXACT)
def test_rounded_once_to_nearest_even(name: str, seed: int) -> None:
    left, right = nearby_numbers(seed, 3000), nearby_numbers(seed + 1, 3000)
    left[:40] *= np.float32(2.0**-126)  # results among the subnormals
    for a, b in zip(left, right, strict=True):
        exact = EXACT[name](Fraction(float(a)), Fraction(float(b)))
        got = ops.bits_of(getattr(ops, name)(a, b))
        assert got == rounded_exactly(exact, got >> 31), (a, b)


def test_fma_rounds_once_also_where_float64_would_round_twice(seed: int) -> None:
    left, right = nearby_numbers(seed, 4000), nearby_numbers(seed + 1, 4000)
    addend = -(left * right)
    addend[::2] *= np.float32(2.0**-25)  # beside a tie of the product
    cases = [*zip(left, right, addend, strict=True)]
    for a, b, c in cases:
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        got = ops.bits_of(ops.fma_rn(a, b, c))
        assert got == rounded_exactly(exact, got >> 31), (a, b, c)


def test_a_sum_in_float64_would_round_twice() -> None:
    a, b, c = (
        np.float32(2.0**-24 * (1 + 2.0**-15)),
        np.float32(1 - 2.0**-15),
        np.float32(1 + 2.0**-23),
    )
    naive = np.float32(np.float64(a) * np.float64(b) + np.float64(c))
    assert ops.bits_of(naive) == 0x3F80_0002  # float64 made a tie of what lies 2**-54 below it
    assert ops.bits_of(ops.fma_rn(a, b, c)) == 0x3F80_0001
    tensors = (torch.tensor([x]) for x in (a, b, c))
    assert ops.bits_of(ops.fma_rn(*tensors)).item() == 0x3F80_0001


WORLD_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "multiply_rn": ops.multiply_rn,
    "add_rn": ops.add_rn,
    "subtract_rn": ops.subtract_rn,
    "divide_rn": ops.divide_rn,
    "minimum": ops.minimum,
    "maximum": ops.maximum,
    "fma_rn": lambda a, b: ops.fma_rn(a, b, ops.subtract_rn(b, a)),
    "absolute": lambda a, _b: ops.absolute(a),
    "select": lambda a, b: ops.select(a > b, a, b),
    "bits": lambda a, b: ops.number_of(ops.bits_of(a) ^ (ops.bits_of(b) & 0xFFFF)),
}


@pytest.mark.parametrize("name", WORLD_OPERATIONS)
def test_tensors_return_what_scalars_return(name: str, seed: int) -> None:
    left = np.concatenate([random_numbers(seed, 150), nearby_numbers(seed, 150)])
    right = np.concatenate([random_numbers(seed + 1, 150)[::-1], nearby_numbers(seed + 1, 150)])
    if name in {"minimum", "maximum"}:  # which zero is not defined
        right = np.where((left == 0) & (right == 0), left, right)
    operation = WORLD_OPERATIONS[name]
    tensors = operation(torch.from_numpy(left.copy()), torch.from_numpy(right.copy()))
    assert tensors.dtype is torch.float32
    for a, b, got in zip(left, right, tensors.numpy(), strict=True):
        expected = operation(a, b)
        assert isinstance(expected, np.float32)
        assert same_number(expected, got), (name, a, b, expected, got)


def test_a_nan_is_left_out_of_minimum_and_maximum() -> None:
    for bits in (0x7FC0_0000, 0xFFC0_0001, 0x7F80_0001):  # the last one signals
        nan = ops.number_of(bits)
        for operation in (ops.minimum, ops.maximum):
            assert operation(nan, np.float32(2)) == operation(np.float32(2), nan) == 2
            assert math.isnan(operation(nan, nan))
            nans = ops.number_of(torch.tensor([bits]))
            assert operation(nans, 2.0).item() == operation(2.0, nans).item() == 2


INTEGERS = (0, 1, 5, 31, 127, 128, 255, 0x8000, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF)
INTEGER_OPERATIONS: dict[str, Callable[[Any, int], Any]] = {
    "unsigned": lambda a, _b: ops.unsigned(a),
    "signed": lambda a, _b: ops.signed(a),
    "wrapped": lambda a, b: ops.unsigned(a - b),
    "shift_left": lambda a, b: ops.shift_left(a, b % 32),
    "shift_right": lambda a, b: ops.shift_right(a, b % 32),
    "minimum": ops.minimum,
    "maximum": lambda a, b: ops.maximum(b, a),
    "floor_mod": lambda a, _b: ops.floor_mod(ops.signed(a), 37),
    "count": lambda a, b: ops.count(a > b, a >= b, a == b, a < 7, a < 9),
    "select": lambda a, b: ops.select(a < b, a, b),
    "single": lambda a, _b: ops.bits_of(ops.single(a % (1 << 24))),
}


@pytest.mark.parametrize("name", INTEGER_OPERATIONS)
def test_integer_operations_agree_between_worlds(name: str) -> None:
    operation = INTEGER_OPERATIONS[name]
    for b in INTEGERS:
        expected = [operation(a, b) for a in INTEGERS]
        assert all(type(value) is int for value in expected)
        got = operation(torch.tensor(INTEGERS), b)
        assert got.dtype is torch.int64
        assert got.tolist() == expected


def test_integer_operations_mean_what_they_say() -> None:
    assert ops.unsigned(-1) == 0xFFFF_FFFF
    assert ops.signed(0xFFFF_FFFF) == -1
    assert ops.signed(0x7FFF_FFFF) == 0x7FFF_FFFF
    assert ops.shift_left(0xFFFF_FFFF, 4) == 0xFFFF_FFF0
    assert ops.shift_right(0x8000_0000, 31) == 1
    assert ops.floor_mod(-1, 37) == 36
    assert ops.unsigned(torch.tensor([-1], dtype=torch.int32)).item() == 0xFFFF_FFFF
    assert ops.unsigned(torch.tensor([255], dtype=torch.uint8)).item() == 255
    assert ops.unsigned(np.uint8(255)) == 255


def test_count_adds_where_a_plain_sum_would_not() -> None:
    left, right = torch.tensor([True, True]), torch.tensor([True, False])
    assert (left + right).tolist() == [True, True]  # the trap
    assert ops.count(left, right).tolist() == [2, 1]
    assert ops.count(left, False).tolist() == [1, 1]
    assert ops.count(True, False, np.True_) == 2


def test_constants_follow_the_world_of_the_other_operand() -> None:
    number = torch.tensor([1.0, 2.0])
    third = np.float32(1 / 3)
    for result in (
        ops.multiply_rn(number, 0.5),
        ops.multiply_rn(third, number),
        ops.maximum(1.5, number),
        ops.select(number > 1, number, 7.0),
        ops.select(True, 3.0, number),
    ):
        assert result.dtype is torch.float32
        assert result.shape == (2,)
    assert ops.multiply_rn(number, third).tolist() == [float(third), float(2 * third)]
    assert isinstance(ops.multiply_rn(2, 0.1), np.float32)


@pytest.mark.parametrize("value", ["1", None, 1j, np.complex64(1), [1], b"1", np.float64(1)])
def test_other_types_are_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidArgument, match=type(value).__qualname__) as refusal:
        ops.unsigned(value)
    assert "Pass arrays as tensors" in str(refusal.value)


def test_arrays_and_float16_are_refused() -> None:
    for value in (np.zeros(3, np.float32), np.float16(1)):
        with pytest.raises(InvalidArgument, match=type(value).__qualname__):
            ops.bits_of(value)


def test_float64_is_refused_where_it_would_have_to_be_rounded() -> None:
    wide = torch.ones(2, dtype=torch.float64)
    for operation in (ops.single, ops.bits_of, ops.absolute, lambda x: ops.add_rn(x, 1.0)):
        with pytest.raises(InvalidArgument, match=r"torch\.float64"):
            operation(wide)
    assert ops.single(wide.bfloat16()).dtype is torch.float32  # exact


@pytest.mark.parametrize("name", WORLD_OPERATIONS)
def test_constants_go_to_the_device_of_the_tensor(name: str) -> None:
    """The meta device stands for a GPU: it computes nothing, and mixes with the CPU as badly."""
    elsewhere = torch.ones(4, device="meta")
    if name != "select":
        assert WORLD_OPERATIONS[name](elsewhere, 0.5).device.type == "meta"
    assert WORLD_OPERATIONS[name](elsewhere, elsewhere).device.type == "meta"


def test_no_world_is_imported_before_its_values_arrive() -> None:
    program = (
        "import sys\n"
        "from degarble.harness.formats import scalar_ops as c\n"
        "assert c.e2m1_encode(0.75) == 2\n"
        "assert c.e4m3_decode(0x38) == 1\n"
        "assert not {'torch', 'cutlass'} & set(sys.modules), 'imported too early'\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def test_a_tensor_subclass_is_a_tensor() -> None:
    parameter = torch.nn.Parameter(torch.tensor([-2.0]), requires_grad=False)
    assert ops.absolute(parameter).item() == 2
    assert scalar_ops._world(parameter) is scalar_ops._Tensors


# --------------------------------------------------------------------------------------------------
# Codecs of one number in the worlds of scalars and tensors, against the readable definition.
#
# The third world, a kernel's, is proven in suites/kernels: on the host everywhere, on a GPU there.


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
