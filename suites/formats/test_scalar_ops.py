"""Operations that differ between worlds: each world against exact arithmetic, and the traps."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.formats import codec, scalar_ops
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.number_formats import FP32, Overflow, Rounding

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

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
        "from degarble.harness.formats import scalar_codecs as c\n"
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
