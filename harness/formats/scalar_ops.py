"""Scalar operations, codecs and scale rules for Python numbers, torch tensors and CuTe DSL values.

The operations differ between the three worlds; the codecs are written once in terms of them.
docs/design-notes/three_worlds.md says why.
"""

from __future__ import annotations

import operator
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from degarble.harness.base.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable


# --------------------------------------------------------------------------------------------------
# Operations that differ between the worlds
#
# The worlds are Python int and np.float32 (the definition), torch tensors, and CuTe DSL values
# inside a kernel that is being traced. Operators mean the same in all three while integers stay in
# 0 .. 2**32 - 1. Where they do not, a function here has one form a world, chosen by the types of
# the arguments; torch and CuTe DSL are imported when the first such value arrives.
#
# Integers are int, int64 tensors or Uint32; numbers np.float32, float32 tensors or Float32.
# Constants may be Python numbers; a float constant is rounded to float32. Not defined: a NaN's
# payload and sign, which zero a maximum of -0 and +0 returns, and shifts by 32 or more.
#
# Traps, each measured. A sum of comparisons is a logical OR for DSL booleans and for torch: use
# `count`. DSL `%` truncates while `//` floors: use `floor_mod`. ptxas makes one FFMA of
# `a * b - c * d`: use `multiply_rn`, `add_rn`, `subtract_rn`. A value that a kernel loads from
# unsigned memory is a signed DSL integer: call `unsigned` first. An int64 tensor keeps bits beyond
# 32: use `shift_left`.

_WORD = 0xFFFF_FFFF
_SIGN = 0x8000_0000


def unsigned(value: Any) -> Any:
    """Return an integer as the world's unsigned 32-bit integer, modulo 2**32.

    A narrow DSL integer is widened with zeros: loaded bytes are 0 to 255, whatever their type says.
    """
    return _world(value).unsigned(value)


def signed(value: Any) -> Any:
    """Return an integer as the world's signed 32-bit integer, modulo 2**32."""
    return _world(value).signed(value)


def single(value: Any) -> Any:
    """Return an integer below 2**24, or a number, as the world's float32, exactly."""
    return _world(value).single(value)


def bits_of(number: Any) -> Any:
    """Return the bit pattern of a float32."""
    return _world(number).bits_of(number)


def number_of(bits: Any) -> Any:
    """Return the float32 with this bit pattern."""
    return _world(bits).number_of(bits)


def count(*conditions: Any) -> Any:
    """Return how many of the conditions hold."""
    return _world(*conditions).count(conditions)


def select(condition: Any, if_true: Any, if_false: Any) -> Any:
    """Return one of two values of the same kind; both are computed."""
    return _world(condition, if_true, if_false).select(condition, if_true, if_false)


def minimum(left: Any, right: Any) -> Any:
    """Return the smaller; of two numbers a NaN is left out."""
    return _world(left, right).extreme(left, right, largest=False)


def maximum(left: Any, right: Any) -> Any:
    """Return the larger; of two numbers a NaN is left out."""
    return _world(left, right).extreme(left, right, largest=True)


def absolute(number: Any) -> Any:
    """Return a float32 without its sign."""
    return _world(number).absolute(number)


def floor_mod(value: Any, modulus: int) -> Any:
    """Return the remainder in 0 .. modulus - 1, for negative values as well; modulus > 0."""
    return value - value // modulus * modulus


def shift_left(value: Any, places: Any) -> Any:
    """Shift an unsigned integer by 0 to 31 places and drop what leaves the 32 bits."""
    return _world(value, places).shift_left(value, places)


def shift_right(value: Any, places: Any) -> Any:
    """Shift an unsigned integer by 0 to 31 places; zeros enter."""
    return _world(value, places).shift_right(value, places)


def multiply_rn(left: Any, right: Any) -> Any:
    """Multiply, rounded once to nearest even; never contracted with a later addition."""
    return _world(left, right).rounded(operator.mul, left, right)


def add_rn(left: Any, right: Any) -> Any:
    """Add, rounded once to nearest even; never contracted with an earlier product."""
    return _world(left, right).rounded(operator.add, left, right)


def subtract_rn(left: Any, right: Any) -> Any:
    """Subtract, rounded once to nearest even; never contracted with an earlier product."""
    return _world(left, right).rounded(operator.sub, left, right)


def divide_rn(left: Any, right: Any) -> Any:
    """Divide, rounded once to nearest even: no reciprocal, no flushed subnormals."""
    return _world(left, right).rounded(operator.truediv, left, right)


def fma_rn(left: Any, right: Any, addend: Any) -> Any:
    """Multiply and add, rounded once to nearest even at the end."""
    return _world(left, right, addend).fma_rn(left, right, addend)


def _world(*values: Any) -> type[_Scalars]:
    """Return the world of the arguments: a DSL value wins, then a tensor."""
    kinds: list[Any] = [type(value) for value in values]
    worlds = {_world_of_type(kind) for kind in kinds}
    return next((world for world in (_Dsl, _Tensors) if world in worlds), _Scalars)


@cache
def _world_of_type(kind: Any) -> type[_Scalars]:
    """Return the world by the package that defines the type: nothing is imported."""
    for base in kind.__mro__:
        package = base.__module__.partition(".")[0]
        if package == "cutlass":
            return _Dsl
        if package == "torch" and base.__name__ == "Tensor":
            return _Tensors
    # np.float64 is a subclass of float, so it is excluded by name.
    taken = int | float | np.bool_ | np.integer | np.float32
    if issubclass(kind, taken) and not issubclass(kind, np.float64):
        return _Scalars
    raise _refused("scalar", kind.__qualname__)


@cache
def _torch() -> Any:
    return import_module("torch")


@cache
def _cutlass() -> Any:
    return import_module("cutlass.cute") and import_module("cutlass")


def _refused(what: str, value: object) -> InvalidArgument:
    """Return the error for a type that is not taken; float64 would have to be rounded first."""
    return InvalidArgument(
        what,
        value,
        "an int, an np.float32, a torch tensor or a CuTe DSL number, of float32 at most",
        "Pass arrays as tensors, and round or convert other numbers first.",
    )


def _plain(constant: Any) -> Any:
    """Return a NumPy scalar as the Python number that the DSL accepts; others as they are."""
    return constant.item() if isinstance(constant, np.generic) else constant


def _step_to_odd(product: Any, addend: Any, bits_of_double: Callable[[Any], Any]) -> Any:
    """Return what the int64 bits of product + addend (float64) need to be rounded to odd.

    The sum then keeps that it was inexact, so rounding it to float32 is the only rounding
    (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    total = product + addend
    part = total - product
    # Knuth's two-sum: the exact rounding error of total, whichever addend is larger.
    error = (product - (total - part)) + (addend - part)
    is_even = bits_of_double(total) % 2 == 0
    is_inexact = (error > 0) | (error < 0)  # neither holds for NaN: infinite sums stay
    outward = (error > 0) == (total > 0)
    # One step away from zero if the error points that way, else one step towards it.
    return (is_inexact & is_even) * (outward * 2 - 1)


class _Scalars:
    """Python int and np.float32: the definition of every operation."""

    @staticmethod
    def unsigned(value: Any) -> Any:
        return int(value) & _WORD

    @staticmethod
    def signed(value: Any) -> Any:
        return ((int(value) + _SIGN) & _WORD) - _SIGN

    @staticmethod
    def single(value: Any) -> Any:
        return np.float32(value)

    @staticmethod
    def bits_of(number: Any) -> Any:
        return int(np.float32(number).view(np.uint32))

    @staticmethod
    def number_of(bits: Any) -> Any:
        return np.uint32(bits).view(np.float32)

    @staticmethod
    def count(conditions: tuple[Any, ...]) -> Any:
        return sum(1 for condition in conditions if condition)

    @staticmethod
    def select(condition: Any, if_true: Any, if_false: Any) -> Any:
        return if_true if condition else if_false

    @staticmethod
    def extreme(left: Any, right: Any, *, largest: bool) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            return max(left, right) if largest else min(left, right)
        left, right = np.float32(left), np.float32(right)
        # As fminf and fmaxf: the number wins over a NaN.
        if np.isnan(left) or np.isnan(right):
            return right if np.isnan(left) else left
        return max(left, right) if largest else min(left, right)

    @staticmethod
    def absolute(number: Any) -> Any:
        return np.abs(np.float32(number))

    @staticmethod
    def shift_left(value: Any, places: Any) -> Any:
        return (value << places) & _WORD

    @staticmethod
    def shift_right(value: Any, places: Any) -> Any:
        return value >> places

    @staticmethod
    def rounded(operation: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        with np.errstate(all="ignore"):  # overflow to infinity and NaN are results, not accidents
            return operation(np.float32(left), np.float32(right))

    @staticmethod
    def fma_rn(left: Any, right: Any, addend: Any) -> Any:
        with np.errstate(all="ignore"):
            product = np.float64(np.float32(left)) * np.float64(np.float32(right))
            addend = np.float64(np.float32(addend))
            step = _step_to_odd(product, addend, lambda double: double.view(np.int64))
            return np.float32(((product + addend).view(np.int64) + step).view(np.float64))


class _Tensors(_Scalars):
    """torch tensors of any shape; integers in int64, because uint32 tensors lack shifts."""

    @staticmethod
    def unsigned(value: Any) -> Any:
        return value.to(_torch().int64) & _WORD

    @staticmethod
    def signed(value: Any) -> Any:
        return ((value.to(_torch().int64) + _SIGN) & _WORD) - _SIGN

    @staticmethod
    def single(value: Any) -> Any:
        if getattr(value, "dtype", None) is _torch().float64:
            raise _refused("tensor", value.dtype)
        return _torch().as_tensor(value).to(_torch().float32)

    @staticmethod
    def bits_of(number: Any) -> Any:
        return _Tensors.unsigned(_Tensors.single(number).view(_torch().int32))

    @staticmethod
    def number_of(bits: Any) -> Any:
        return bits.to(_torch().int64).to(_torch().int32).view(_torch().float32)

    @staticmethod
    def count(conditions: tuple[Any, ...]) -> Any:
        return sum(_torch().as_tensor(condition).to(_torch().int64) for condition in conditions)

    @staticmethod
    def select(condition: Any, if_true: Any, if_false: Any) -> Any:
        return _torch().where(_torch().as_tensor(condition), if_true, if_false)

    @staticmethod
    def extreme(left: Any, right: Any, *, largest: bool) -> Any:
        like = left if isinstance(left, _torch().Tensor) else right
        kind = {"dtype": like.dtype, "device": like.device}
        left, right = (_torch().as_tensor(value, **kind) for value in (left, right))
        # Trap: fmin and fmax keep a signalling NaN, on which the hardware's min and max differ.
        chosen = (_torch().maximum if largest else _torch().minimum)(left, right)
        return _torch().where(right.isnan(), left, _torch().where(left.isnan(), right, chosen))

    @staticmethod
    def absolute(number: Any) -> Any:
        return _Tensors.single(number).abs()

    @staticmethod
    def rounded(operation: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        return operation(_Tensors.single(left), _Tensors.single(right))

    @staticmethod
    def fma_rn(left: Any, right: Any, addend: Any) -> Any:
        product = _Tensors.single(left).double() * _Tensors.single(right).double()
        addend = _Tensors.single(addend).double()
        step = _step_to_odd(product, addend, lambda double: double.view(_torch().int64))
        return ((product + addend).view(_torch().int64) + step).view(_torch().float64).float()


class _Dsl(_Scalars):
    """CuTe DSL values: what becomes instructions of the kernel that is being traced."""

    @staticmethod
    def unsigned(value: Any) -> Any:
        return _cutlass().Uint32(_plain(value))

    @staticmethod
    def signed(value: Any) -> Any:
        return _cutlass().Int32(_plain(value))

    @staticmethod
    def single(value: Any) -> Any:
        if isinstance(value, _cutlass().Float64):
            raise _refused("DSL number", "Float64")
        return _cutlass().Float32(_plain(value))

    @staticmethod
    def bits_of(number: Any) -> Any:
        return _Dsl.single(number).bitcast(_cutlass().Uint32)

    @staticmethod
    def number_of(bits: Any) -> Any:
        return _Dsl.unsigned(bits).bitcast(_cutlass().Float32)

    @staticmethod
    def count(conditions: tuple[Any, ...]) -> Any:
        return sum(_Dsl.unsigned(condition) for condition in conditions)

    @staticmethod
    def select(condition: Any, if_true: Any, if_false: Any) -> Any:
        kind = _Dsl._kind(if_true, if_false)
        if_true, if_false = kind(_plain(if_true)), kind(_plain(if_false))
        if isinstance(condition, bool | np.bool_):
            return if_true if condition else if_false
        return kind(_cutlass().select_(condition, if_true.ir_value(), if_false.ir_value()))

    @staticmethod
    def extreme(left: Any, right: Any, *, largest: bool) -> Any:
        kind = _Dsl._kind(left, right)
        left, right = kind(_plain(left)), kind(_plain(right))
        if kind.is_float:
            arch = _cutlass().cute.arch
            return (arch.fmax if largest else arch.fmin)(left, right)
        return _Dsl.select(left > right if largest else left < right, left, right)

    @staticmethod
    def absolute(number: Any) -> Any:
        return abs(_Dsl.single(number))

    @staticmethod
    def shift_left(value: Any, places: Any) -> Any:
        return _Dsl.unsigned(value) << _Dsl.unsigned(places)

    @staticmethod
    def shift_right(value: Any, places: Any) -> Any:
        return _Dsl.unsigned(value) >> _Dsl.unsigned(places)

    @staticmethod
    def rounded(operation: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        left, right = _Dsl.single(left), _Dsl.single(right)
        math = _cutlass().cute.math
        if operation is operator.sub:  # the DSL states no rounding for sub; negation is exact
            operation, right = operator.add, -right
        stated = {operator.mul: math.mul, operator.add: math.add, operator.truediv: math.div}
        return stated[operation](left, right, rounding=math.RoundingMode.NEAREST_EVEN)

    @staticmethod
    def fma_rn(left: Any, right: Any, addend: Any) -> Any:
        operands = (_Dsl.single(left), _Dsl.single(right), _Dsl.single(addend))
        math = _cutlass().cute.math
        return math.fma(*operands, rounding=math.RoundingMode.NEAREST_EVEN)

    @staticmethod
    def _kind(left: Any, right: Any) -> Any:
        """Return the type of whichever operand is a DSL value; constants take their own."""
        for value in (left, right):
            if _world(value) is _Dsl:
                return type(_cutlass().as_numeric(value))
        has_float = isinstance(left, float | np.float32) or isinstance(right, float | np.float32)
        return _cutlass().Float32 if has_float else _cutlass().Uint32


# --------------------------------------------------------------------------------------------------
# Codecs and scale rules, in terms of these operations
#
# E2M1, E4M3, UE8M0 and BF16 in both directions, the canonical NVFP4 scale rule, and the RoPE
# rotation with its roundings. A kernel and the code that judges it run the same text. Codes are
# unsigned integers in the low bits; numbers are float32.
#
# The rules are the hardware's (PTX ISA 9.1, cvt; CUDA 12.8 headers for the cases that it leaves
# open): nearest even, saturating, infinities too; -0 and negatives that round to zero keep the
# sign. NaN becomes 0x7 in E2M1 (+6, there is no NaN), 0x7F in E4M3, 0xFF in UE8M0, 0x7FC0 in BF16.
#
# Nothing is checked, because a kernel cannot raise. harness.formats.codec is the definition that
# checks. Both agree on every code and on all 65,536 bfloat16 inputs, and an H200 returns the same
# bytes.

_MAGNITUDE: Final = 0x7FFF_FFFF
_INFINITY: Final = 0x7F80_0000  # a magnitude above it is NaN
_NAN: Final = 0x7FC0_0000

FLOAT32_MAX: Final = 3.4028234663852886e38
E2M1_MAX: Final = 6.0
E4M3_MAX: Final = 448.0
ONE_SIXTH: Final = 0.1666666716337204  # 1/6 rounded to float32, as a CUDA constant is


def e2m1_encode(number: Any) -> Any:
    """Round a float32 to E2M1, nearest even: 0.25 and 0.75 go to 0 and 1.0, 5 goes to 4."""
    bits = bits_of(number)
    magnitude = bits & _MAGNITUDE
    # Seven boundaries between eight values; a boundary belongs to the even code of its neighbours.
    # Compared as integers, a NaN is above all of them.
    code = count(
        magnitude > 0x3E80_0000,  # 0.25, tie to 0
        magnitude >= 0x3F40_0000,  # 0.75, tie to 1.0
        magnitude > 0x3FA0_0000,  # 1.25, tie to 1.0
        magnitude >= 0x3FE0_0000,  # 1.75, tie to 2
        magnitude > 0x4020_0000,  # 2.5, tie to 2
        magnitude >= 0x4060_0000,  # 3.5, tie to 4
        magnitude > 0x40A0_0000,  # 5, tie to 4
    )
    sign = select(magnitude > _INFINITY, 0, shift_right(bits, 31))
    return code + sign * 8


def e2m1_decode(code: Any) -> Any:
    """Return the number of a code 0 to 15; higher bits are ignored."""
    code = unsigned(code)
    magnitude = code & 7
    # Normal values move exponent and mantissa into place; 0 and 0.5 are subnormal.
    normal = shift_left(magnitude, 22) + (126 << 23)
    bits = select(magnitude < 2, magnitude * 0x3F00_0000, normal)
    return number_of(bits + shift_left(code & 8, 28))


def e4m3_encode(number: Any) -> Any:
    """Round a float32 to E4M3, nearest even, saturating at 448; NaN becomes 0x7F."""
    bits = bits_of(number)
    magnitude = bits & _MAGNITUDE
    # Normal: drop 20 mantissa bits, the carry may run into the exponent; rebias 127 to 7.
    kept = shift_right(magnitude + 0x7_FFFF + (shift_right(magnitude, 20) & 1), 20)
    normal = minimum(maximum(kept, 960) - 960, 0x7E)
    # Subnormal: 2**14 has the step 2**-9, so adding it leaves the rounded code in the low bits.
    subnormal = bits_of(add_rn(number_of(magnitude), 16384.0)) & 0xF
    code = select(magnitude < 0x3C80_0000, subnormal, normal)  # 2**-6
    is_nan = magnitude > _INFINITY
    return select(is_nan, 0x7F, code + shift_right(bits, 31) * 128)


def e4m3_decode(code: Any) -> Any:
    """Return the number of a code 0 to 255; 0x7F and 0xFF are NaN."""
    code = unsigned(code)
    magnitude = code & 0x7F
    normal = shift_left(magnitude, 20) + (120 << 23)
    subnormal = bits_of(multiply_rn(single(magnitude), 2.0**-9))
    bits = select(magnitude < 8, subnormal, normal)
    bits = select(magnitude == 0x7F, _NAN, bits)
    return number_of(bits + shift_left(code & 0x80, 24))


def ue8m0_encode(number: Any) -> Any:
    """Round a magnitude up to a power of two; up to 2**-127 is code 0, infinity saturates to 254.

    By exponent bits, not by a logarithm: exact powers stay. The sign is ignored.
    """
    magnitude = bits_of(number) & _MAGNITUDE
    rounded_up = shift_right(magnitude + 0x7F_FFFF, 23)
    code = minimum(rounded_up, 254)
    code = select(magnitude <= 0x0040_0000, 0, code)  # 2**-127, a float32 subnormal
    return select(magnitude > _INFINITY, 255, code)


def ue8m0_decode(code: Any) -> Any:
    """Return 2 to the power of code - 127; 255 is NaN."""
    code = unsigned(code)
    bits = select(code == 0, 0x0040_0000, shift_left(code, 23))
    return number_of(select(code == 255, _NAN, bits))


def bf16_encode(number: Any) -> Any:
    """Round a float32 to BF16, nearest even; NaN becomes 0x7FC0."""
    bits = bits_of(number)
    kept = shift_right((bits & _MAGNITUDE) + 0x7FFF + (shift_right(bits, 16) & 1), 16)
    code = kept + shift_left(shift_right(bits, 31), 15)
    return select((bits & _MAGNITUDE) > _INFINITY, 0x7FC0, code)


def bf16_decode(code: Any) -> Any:
    """Return the number of a 16-bit code, exactly."""
    return number_of(shift_left(unsigned(code), 16))


def bf16_round(number: Any) -> Any:
    """Round a float32 to the nearest BF16 value, kept in float32."""
    return bf16_decode(bf16_encode(number))


def nvfp4_tensor_encode_scale(tensor_amax: Any) -> Any:
    """Return 2688 / amax, at most the largest float32; 1 where amax is 0 or infinite.

    Canonical dialect: Transformer Engine, common/cast/nvfp4/core_nvfp4.cuh.
    """
    scale = minimum(divide_rn(E2M1_MAX * E4M3_MAX, tensor_amax), FLOAT32_MAX)
    return select(scale == 0.0, 1.0, select(tensor_amax == 0.0, 1.0, scale))


def nvfp4_block_scale(block_amax: Any, encode_scale: Any) -> Any:
    """Return the E4M3 code of a block's decode scale: amax times (encode scale times 1/6)."""
    return e4m3_encode(multiply_rn(block_amax, multiply_rn(encode_scale, ONE_SIXTH)))


def nvfp4_block_encode_scale(scale_code: Any, encode_scale: Any) -> Any:
    """Return what the block's values are multiplied by; at most the largest float32.

    Three true divisions and products as the canonical dialect has them; no reciprocal estimate.
    """
    decode_scale = multiply_rn(e4m3_decode(scale_code), divide_rn(1.0, encode_scale))
    return minimum(divide_rn(1.0, decode_scale), FLOAT32_MAX)


def nvfp4_encode(number: Any, block_encode_scale: Any) -> Any:
    """Return the E2M1 code of one value of a block."""
    return e2m1_encode(multiply_rn(number, block_encode_scale))


def nvfp4_decode(code: Any, scale_code: Any) -> Any:
    """Return element times block scale, exact in float32; the tensor scale is the caller's."""
    return multiply_rn(e2m1_decode(code), e4m3_decode(scale_code))


def rope_rotate(x_even: Any, x_odd: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    """Rotate a pair in float32: round each product, then their sum; no FMA anywhere."""
    even = subtract_rn(multiply_rn(x_even, cos), multiply_rn(x_odd, sin))
    odd = add_rn(multiply_rn(x_even, sin), multiply_rn(x_odd, cos))
    return even, odd
