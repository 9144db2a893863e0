"""Encode and decode scalar codes, pack them into bytes, and count the ulps between two of them.

`encode` and `decode` of one number are the readable definition of every scalar format;
`encode_array` and `decode_array` are their twins for tensors, equal bit for bit.
Shape letters: K elements, P = K / 2 bytes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch
from degarble.harness.formats.number_formats import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    FP32,
    UE8M0,
    ElementFormat,
    NanRule,
    NibbleOrder,
    Overflow,
    Rounding,
    TableFormat,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.harness.formats.number_formats import NumberFormat


# --------------------------------------------------------------------------------------------------
# Two 4-bit codes in a byte, along K
#
# Every known producer puts the even K index into the low nibble; the reverse is a named variant,
# because one checkpoint family stored it. `pack_pair`, `low_nibble` and `high_nibble` use operators
# on non-negative integers only, so that they run on ints, tensors and CuTe DSL values.


def pack_pair(low: Any, high: Any) -> Any:
    """Join two codes below 16 into one byte."""
    return low + high * 16


def low_nibble(byte: Any) -> Any:
    """Return the low half of a byte."""
    return byte % 16


def high_nibble(byte: Any) -> Any:
    """Return the high half of a byte."""
    return byte // 16


def pack_nibbles(codes_K: Tensor, order: NibbleOrder = NibbleOrder.LOW_EVEN) -> Tensor:
    """Pack uint8 codes [..., K] into bytes [..., K / 2]."""
    require_bytes("codes", codes_K)
    if codes_K.ndim == 0 or codes_K.shape[-1] % 2:
        raise ShapeMismatch(
            "last extent of the codes",
            tuple(codes_K.shape),
            "an even number of codes along K",
            "Pad K to an even extent with code 0 before packing.",
        )
    if codes_K.numel() and int(codes_K.max()) > 0xF:
        raise InvalidArgument(
            "4-bit code",
            int(codes_K.max()),
            "codes from 0 to 15",
            "Pack codes, one a byte, not bytes that are packed already.",
        )
    even_P, odd_P = codes_K[..., 0::2], codes_K[..., 1::2]
    if order is NibbleOrder.HIGH_EVEN:
        even_P, odd_P = odd_P, even_P
    packed_P: Tensor = pack_pair(even_P, odd_P)
    return packed_P


def unpack_nibbles(packed_P: Tensor, order: NibbleOrder = NibbleOrder.LOW_EVEN) -> Tensor:
    """Unpack bytes [..., P] into uint8 codes [..., 2 P]."""
    require_bytes("packed codes", packed_P)
    if packed_P.ndim == 0:
        raise ShapeMismatch(
            "packed codes", (), "at least one dimension", "Pass a tensor of bytes [..., K / 2]."
        )
    halves = [low_nibble(packed_P), high_nibble(packed_P)]
    if order is NibbleOrder.HIGH_EVEN:
        halves.reverse()
    return torch.stack(halves, dim=-1).flatten(-2)


def require_bytes(name: str, tensor: Tensor) -> None:
    """Raise if a tensor does not hold raw bytes."""
    if tensor.dtype is not torch.uint8:
        raise DtypeMismatch(
            name,
            tensor.dtype,
            "torch.uint8",
            "Reinterpret bytes with view(torch.uint8); never cast numerically.",
        )


# --------------------------------------------------------------------------------------------------
# One number: the readable definition of every scalar format
#
# - -0 keeps its sign where the format has one, and so does a small negative that rounds to zero.
# - NaN becomes the format's one positive quiet NaN; payload and sign are dropped. A format without
#   NaN (E2M1) raises unless a NanRule chooses a value.
# - Overflow.SATURATE clamps infinities as well. Overflow.IEEE needs a format with infinity or NaN.
# - UE8M0 has neither sign nor zero: negatives raise; zero and all below 2**-127 become 2**-127.


def is_nan(code: int, fmt: NumberFormat) -> bool:
    """Return whether `code` stands for no number."""
    if isinstance(fmt, ElementFormat) and isinstance(fmt.nan_codes, str):
        return (code & fmt.magnitude_mask) > fmt.exponent_mask << fmt.mantissa_bits
    return code in fmt.nan_codes


def decode(code: int, fmt: NumberFormat) -> float:
    """Return the number that `code` stands for, exactly."""
    if not 0 <= code < fmt.code_count:
        raise InvalidArgument(
            f"{fmt.name} code",
            code,
            f"an integer from 0 to {fmt.code_count - 1}",
            "Mask the code to the width of the format first.",
        )
    if isinstance(fmt, TableFormat):
        return fmt.table[code]
    assert isinstance(fmt, ElementFormat), fmt
    if is_nan(code, fmt):
        return math.nan
    sign = -1.0 if code & fmt.sign_mask else 1.0
    if code & fmt.magnitude_mask == fmt.infinity_code:
        return sign * math.inf
    exponent = (code & fmt.magnitude_mask) >> fmt.mantissa_bits
    significand = code & fmt.mantissa_mask
    if exponent == 0 and fmt.subnormals:
        exponent = 1
    else:
        significand += 1 << fmt.mantissa_bits  # the hidden bit
    return math.ldexp(sign * significand, exponent - fmt.bias - fmt.mantissa_bits)


def encode(
    value: float,
    fmt: NumberFormat,
    rounding: Rounding = Rounding.NEAREST_EVEN,
    overflow: Overflow = Overflow.SATURATE,
    nan: NanRule = NanRule.REFUSE,
) -> int:
    """Return the code of `value` rounded once by the named rules."""
    refuse_silent_overflow(fmt, overflow)
    if math.isnan(value):
        return encoded_nan(fmt, nan)
    negative = math.copysign(1.0, value) < 0
    if negative and value != 0 and not fmt.signed:
        raise InvalidArgument(
            f"value for {fmt.name}",
            value,
            "a number that is not negative",
            "The format has no sign; encode the magnitude, or look why a scale is negative.",
        )
    if isinstance(fmt, TableFormat):
        return _nearest_code(value, fmt, rounding)
    assert isinstance(fmt, ElementFormat), fmt
    sign = fmt.sign_mask if negative else 0
    if math.isinf(value):
        return overflow_code(fmt, overflow, sign)
    code = _round_magnitude(abs(value), negative, fmt, rounding)
    if code <= fmt.largest_code:
        return code | sign
    if points_toward_zero(rounding, negative):
        return fmt.largest_code | sign
    return overflow_code(fmt, overflow, sign)


def _nearest_code(value: float, fmt: TableFormat, rule: Rounding) -> int:
    """Return the code of a neighbour in the table; beyond its ends, the end."""
    values = [fmt.table[code] for code in fmt.ranked]
    if not values[0] < value < values[-1]:
        return fmt.ranked[0 if value <= values[0] else -1]
    above = bisect_left(values, value)
    if values[above] == value:
        return fmt.ranked[above]
    middle = (values[above - 1] + values[above]) / 2  # exact: float32 holds both
    lower, upper = fmt.ranked[above - 1], fmt.ranked[above]
    if rule is Rounding.NEAREST_EVEN:
        up = value > middle or (value == middle and lower % 2 == 1)
    elif rule is Rounding.NEAREST_AWAY:
        up = value > middle or (value == middle and value > 0)
    else:
        up = points_toward_zero(rule, value < 0) == (value < 0)
    return upper if up else lower


def points_toward_zero(rounding: Rounding, negative: bool) -> bool:
    """Return whether the rule never increases the magnitude of a number of this sign."""
    if rounding is Rounding.TOWARD_ZERO:
        return True
    return rounding is (Rounding.UP if negative else Rounding.DOWN)


def encoded_nan(fmt: NumberFormat, nan: NanRule) -> int:
    """Return the code that NaN becomes, or refuse it."""
    if fmt.nan_code is not None:
        return fmt.nan_code
    if nan is NanRule.REFUSE:
        raise InvalidArgument(
            f"value for {fmt.name}",
            math.nan,
            f"a number: {fmt.name} has no NaN",
            "Find where the NaN arose, or name a NanRule (LARGEST is what the hardware does).",
        )
    if nan is NanRule.LARGEST:
        return fmt.largest_code
    return _nearest_code(0.0, fmt, Rounding.NEAREST_EVEN) if isinstance(fmt, TableFormat) else 0


def refuse_silent_overflow(fmt: NumberFormat, overflow: Overflow) -> None:
    """Raise if Overflow.IEEE is asked of a format that has neither an infinity nor a NaN."""
    if overflow is Overflow.IEEE and fmt.infinity_code is None and fmt.nan_code is None:
        raise InvalidArgument(
            f"overflow rule for {fmt.name}",
            overflow.value,
            "a format with an infinity or a NaN",
            "Use Overflow.SATURATE.",
        )


def overflow_code(fmt: ElementFormat, overflow: Overflow, sign: int) -> int:
    """Return the code of a number beyond the range, `sign` being 0 or the sign bit."""
    if overflow is Overflow.SATURATE:
        return fmt.largest_code | sign
    if fmt.infinity_code is not None:
        return fmt.infinity_code | sign
    assert fmt.nan_code is not None, "refuse_silent_overflow lets no such format through"
    return fmt.nan_code


def _round_magnitude(magnitude: float, negative: bool, fmt: ElementFormat, rule: Rounding) -> int:
    """Return the magnitude code as if the exponent had no upper end."""
    binade = math.frexp(magnitude)[1] - 1 if magnitude else fmt.min_exponent
    binade = max(binade, fmt.min_exponent)
    # Exact: the scale is a power of two, and never shrinks a number below the smallest normal.
    significand = math.ldexp(magnitude, fmt.mantissa_bits - binade)
    lower = math.floor(significand)
    remainder = significand - lower
    hidden = 1 << fmt.mantissa_bits
    code = lower + ((binade - fmt.min_exponent) << fmt.mantissa_bits)
    if not fmt.subnormals:
        code -= hidden  # no code below the smallest normal, hence none for zero either
        if code < 0:
            return 0
    if rule is Rounding.NEAREST_EVEN:
        # Parity of the code, not of the significand: a format without mantissa needs it.
        return code + (remainder > 0.5 or (remainder == 0.5 and code % 2 == 1))
    if rule is Rounding.NEAREST_AWAY:
        return code + (remainder >= 0.5)
    if points_toward_zero(rule, negative):
        return code
    return code + (remainder > 0)


# --------------------------------------------------------------------------------------------------
# Whole tensors, bit for bit as the definition
#
# Codes are never negative: uint8 up to 8 bits, int32 for 16, int64 for 32 (`code_dtype`). Encoding
# works on the bits of the float64 value in integers, so it rounds exactly once from float16,
# bfloat16, float32 and float64 alike. CPU tensors of uint8 codes are decoded by table lookup.

# Elements handled at once: the int64 temporaries of one piece stay near the cache, and peak memory
# does not grow with the tensor.
_PIECE = 1 << 17
_GPU_PIECE = 1 << 26  # codes that are looked up at once on a GPU

_F64_MANTISSA_BITS = 52  # IEEE 754 binary64
_F64_BIAS = 1023

_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

FORMAT_OF_DTYPE: dict[torch.dtype, ElementFormat] = {
    torch.bfloat16: BF16,
    torch.float16: FP16,
    torch.float32: FP32,
    torch.float8_e4m3fn: E4M3,
    torch.float8_e5m2: E5M2,
    torch.float8_e8m0fnu: UE8M0,
}
_BIT_VIEW = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def code_dtype(fmt: NumberFormat) -> torch.dtype:
    """Return the dtype that holds codes of `fmt`, every one of them without a sign."""
    if fmt.bits <= 8:
        return torch.uint8
    return torch.int32 if fmt.bits <= 16 else torch.int64


def codes_of(tensor: Tensor) -> Tensor:
    """Reinterpret a tensor of a torch float dtype as codes of FORMAT_OF_DTYPE; nothing rounds."""
    fmt = FORMAT_OF_DTYPE.get(tensor.dtype)
    if fmt is None:
        raise DtypeMismatch(
            "tensor",
            tensor.dtype,
            f"one of {', '.join(str(dtype) for dtype in FORMAT_OF_DTYPE)}",
            "Other formats have no torch dtype; pass their codes.",
        )
    bits = tensor.contiguous().view(_BIT_VIEW[tensor.element_size()])
    return bits.to(code_dtype(fmt)) & (fmt.code_count - 1)


def decode_array(codes: Tensor, fmt: NumberFormat) -> Tensor:
    """Return the float32 values that `codes` (any integer dtype) stand for, exactly."""
    if codes.dtype not in _INTEGER_DTYPES:
        raise DtypeMismatch(
            f"{fmt.name} codes",
            codes.dtype,
            "an integer dtype",
            "Decode bit patterns, not values; codes_of reinterprets a float tensor.",
        )
    if _is_looked_up_on_gpu(codes) and fmt.bits <= 8:
        if fmt.bits < 8 and codes.numel() and int(codes.max()) >= fmt.code_count:
            return _decode_piece(codes, fmt)  # refuses
        return _on_gpu(codes, _entries(codes.device, fmt))
    if _is_looked_up(codes) and fmt.bits <= 8:
        table = _table(fmt)

        def convert(piece: Tensor) -> Tensor:
            if fmt.bits < 8 and piece.numel() and int(piece.max()) >= fmt.code_count:
                return _decode_piece(piece, fmt)  # refuses
            return torch.from_numpy(np.take(table, piece.numpy(), mode="clip"))

        return _in_pieces(codes, torch.float32, convert)
    return _in_pieces(codes, torch.float32, lambda piece: _decode_piece(piece, fmt))


def decode_pairs(
    packed_P: Tensor, fmt: NumberFormat, order: NibbleOrder, dtype: torch.dtype
) -> Tensor:
    """Return the values [..., 2 P] of bytes that hold two 4-bit codes, in float32 or float64."""
    if _is_looked_up_on_gpu(packed_P):
        pairs_P = _on_gpu(packed_P, _entries(packed_P.device, fmt, (order, dtype))).view(dtype)
        return pairs_P.reshape(*packed_P.shape[:-1], 2 * packed_P.shape[-1])
    if not _is_looked_up(packed_P):
        return decode_array(unpack_nibbles(packed_P, order), fmt).to(dtype)
    table = _pair_table(fmt, order, dtype)
    flat = packed_P.reshape(-1).numpy()
    pairs = np.empty(flat.shape, table.dtype)
    for start in range(0, flat.size, _PIECE):
        piece = slice(start, start + _PIECE)
        np.take(table, flat[piece], mode="clip", out=pairs[piece])
    values = torch.from_numpy(pairs.view(np.float64 if dtype is torch.float64 else np.float32))
    return values.reshape(*packed_P.shape[:-1], 2 * packed_P.shape[-1])


def encode_array(
    values: Tensor,
    fmt: NumberFormat,
    rounding: Rounding = Rounding.NEAREST_EVEN,
    overflow: Overflow = Overflow.SATURATE,
    nan: NanRule = NanRule.REFUSE,
) -> Tensor:
    """Return the codes of `values`, each rounded once by the named rules."""
    if values.dtype not in _FLOAT_DTYPES:
        raise DtypeMismatch(
            f"values for {fmt.name}",
            values.dtype,
            "float16, bfloat16, float32 or float64",
            "Convert on purpose before encoding.",
        )
    refuse_silent_overflow(fmt, overflow)
    return _in_pieces(
        values, code_dtype(fmt), lambda piece: _encode_piece(piece, fmt, rounding, overflow, nan)
    )


def is_nan_array(codes: Tensor, fmt: NumberFormat) -> Tensor:
    """Return which codes stand for no number."""
    if isinstance(fmt, ElementFormat) and isinstance(fmt.nan_codes, str):
        return (codes & fmt.magnitude_mask) > fmt.exponent_mask << fmt.mantissa_bits
    found = torch.zeros_like(codes, dtype=torch.bool)
    for code in fmt.nan_codes:
        found |= codes == code
    return found


def _in_pieces(source: Tensor, dtype: torch.dtype, convert: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply an elementwise conversion piece by piece."""
    flat = source.reshape(-1)
    result = torch.empty(flat.shape, dtype=dtype, device=flat.device)
    for start in range(0, flat.numel(), _PIECE):
        result[start : start + _PIECE] = convert(flat[start : start + _PIECE])
    return result.reshape(source.shape)


def _is_looked_up(codes: Tensor) -> bool:
    return codes.dtype is torch.uint8 and codes.device.type == "cpu"


def _is_looked_up_on_gpu(codes: Tensor) -> bool:
    return codes.dtype is torch.uint8 and codes.device.type == "cuda"


def _on_gpu(codes: Tensor, entries: Tensor) -> Tensor:
    """Return the entries of a table by code, in few launches: they cost more than the numbers."""
    flat = codes.reshape(-1)
    result = torch.empty(flat.shape, dtype=entries.dtype, device=flat.device)
    for start in range(0, flat.numel(), _GPU_PIECE):
        piece = slice(start, start + _GPU_PIECE)
        torch.index_select(entries, 0, flat[piece].int(), out=result[piece])
    return result.reshape(codes.shape)


@cache
def _entries(
    device: torch.device, fmt: NumberFormat, pairs: tuple[NibbleOrder, torch.dtype] | None = None
) -> Tensor:
    """Return a table on a device; a copy for each use would wait for all launches before it."""
    table = _table(fmt) if pairs is None else _pair_table(fmt, *pairs)
    with torch.inference_mode(mode=False):
        return torch.from_numpy(table).to(device)


@cache
def _table(fmt: NumberFormat) -> NDArray[np.float32]:
    """Return every value of a format of 8 bits or fewer, indexed by code."""
    with torch.inference_mode(mode=False):
        made: NDArray[np.float32] = _decode_piece(torch.arange(fmt.code_count), fmt).numpy()
        return made


@cache
def _pair_table(fmt: NumberFormat, order: NibbleOrder, dtype: torch.dtype) -> NDArray[Any]:
    """Return both values of every byte, each pair viewed as one number of twice their size."""
    with torch.inference_mode(mode=False):
        codes = unpack_nibbles(torch.arange(256, dtype=torch.uint8), order)
        values: NDArray[Any] = torch.from_numpy(_table(fmt)[codes.numpy()]).to(dtype).numpy()
    # Containers of 16 and 8 bytes: one look-up of a byte then copies both values.
    return values.view(np.complex128 if dtype is torch.float64 else np.int64)


def _decode_piece(codes: Tensor, fmt: NumberFormat) -> Tensor:
    code = codes.to(torch.int64)
    if codes.dtype is not torch.uint8 or fmt.bits < 8:
        wrong = (code < 0) | (code >= fmt.code_count)
        if bool(wrong.any()):
            raise InvalidArgument(
                f"{fmt.name} code",
                int(code[wrong][0]),
                f"an integer from 0 to {fmt.code_count - 1}",
                "Mask the codes to the width of the format first.",
            )
    if isinstance(fmt, TableFormat):
        return torch.tensor(fmt.table, dtype=torch.float32, device=code.device)[code]
    assert isinstance(fmt, ElementFormat), fmt
    magnitude = code & fmt.magnitude_mask
    exponent = magnitude >> fmt.mantissa_bits
    significand = magnitude & fmt.mantissa_mask
    if fmt.subnormals:
        significand = significand + (exponent > 0).to(torch.int64) * (1 << fmt.mantissa_bits)
        exponent = exponent.clamp(min=1)
    else:
        significand = significand + (1 << fmt.mantissa_bits)
    # A power of two from its bits: pow and ldexp of torch promise no exactness at the ends.
    exponent_f64 = exponent + (_F64_BIAS - fmt.bias - fmt.mantissa_bits)
    power = (exponent_f64 << _F64_MANTISSA_BITS).view(torch.float64)
    value = significand.to(torch.float64) * power
    if fmt.infinity_code is not None:
        value[magnitude == fmt.infinity_code] = torch.inf
    value = torch.where((code & fmt.sign_mask) != 0, -value, value)
    value[is_nan_array(code, fmt)] = torch.nan
    return value.to(torch.float32)


def _encode_piece(
    values: Tensor,
    fmt: NumberFormat,
    rounding: Rounding,
    overflow: Overflow,
    nan: NanRule,
) -> Tensor:
    value = values.to(torch.float64)
    is_nan = value.isnan()
    negative = value.signbit()
    if not fmt.signed and bool((value < 0).any()):
        raise InvalidArgument(
            f"value for {fmt.name}",
            float(value[value < 0][0]),
            "a number that is not negative",
            "The format has no sign; encode the magnitude, or look why a scale is negative.",
        )
    if isinstance(fmt, TableFormat):
        return _nearest_codes(value, fmt, rounding, encoded_nan(fmt, nan) if is_nan.any() else 0)
    assert isinstance(fmt, ElementFormat), fmt
    code = _round_magnitudes(value.abs(), negative, fmt, rounding)
    sign = negative.to(torch.int64) * fmt.sign_mask
    beyond = overflow_code(fmt, overflow, 0)
    largest = torch.full_like(code, fmt.largest_code)
    # An infinity of the input is no overflow: no rounding rule makes a finite number of it.
    kept = _toward_zero(rounding, negative) & ~value.isinf()
    code = torch.where(
        code > fmt.largest_code, torch.where(kept, largest, torch.full_like(code, beyond)), code
    )
    if beyond == fmt.nan_code:
        sign = sign * (code != beyond).to(torch.int64)  # the one NaN is positive
    code = code | sign
    if bool(is_nan.any()):
        code[is_nan] = encoded_nan(fmt, nan)
    return code.to(code_dtype(fmt))


def _nearest_codes(value: Tensor, fmt: TableFormat, rule: Rounding, nan_code: int) -> Tensor:
    """Return the codes of neighbours in the table: the twin of _nearest_code."""
    ranked = torch.tensor(fmt.ranked, device=value.device)
    values = torch.tensor(fmt.table, dtype=torch.float64, device=value.device)[ranked]
    inside = value.clamp(values[0], values[-1]).nan_to_num(0.0)
    above = torch.searchsorted(values, inside).clamp(min=1)
    lower, upper = ranked[above - 1], ranked[above]
    middle = (values[above - 1] + values[above]) / 2
    exact = inside == values[above]
    if rule in {Rounding.NEAREST_EVEN, Rounding.NEAREST_AWAY}:
        ties_up = lower % 2 == 1 if rule is Rounding.NEAREST_EVEN else inside > 0
        up = (inside > middle) | ((inside == middle) & ties_up)
    else:
        negative = inside < 0
        up = _toward_zero(rule, negative) == negative
        up &= inside > values[above - 1]  # the smallest value itself
    code = torch.where(up | exact, upper, lower)
    return torch.where(value.isnan(), nan_code, code).to(code_dtype(fmt))


def _toward_zero(rounding: Rounding, negative: Tensor) -> Tensor:
    """Return for each sign whether the rule never increases the magnitude."""
    below, above = (points_toward_zero(rounding, sign) for sign in (True, False))
    return (negative & below) | (~negative & above)


def _round_magnitudes(
    magnitude: Tensor, negative: Tensor, fmt: ElementFormat, rule: Rounding
) -> Tensor:
    """Return magnitude codes as if the exponent had no upper end (NaN yields anything)."""
    bits = magnitude.view(torch.int64)
    field = bits >> _F64_MANTISSA_BITS
    hidden = (field > 0).to(torch.int64) << _F64_MANTISSA_BITS
    significand = (bits & ((1 << _F64_MANTISSA_BITS) - 1)) | hidden
    binade = field.clamp(min=1) - _F64_BIAS
    below = (fmt.min_exponent - binade).clamp(min=0)
    # 54 places empty the 53-bit significand and leave it under half: more would say the same.
    shift = (below + (_F64_MANTISSA_BITS - fmt.mantissa_bits)).clamp(max=_F64_MANTISSA_BITS + 2)
    lower = significand >> shift
    remainder = significand - (lower << shift)
    code = lower + ((binade.clamp(min=fmt.min_exponent) - fmt.min_exponent) << fmt.mantissa_bits)
    if not fmt.subnormals:
        code = code - (1 << fmt.mantissa_bits)
    if rule in {Rounding.NEAREST_EVEN, Rounding.NEAREST_AWAY}:
        half = torch.ones_like(shift) << (shift - 1)
        ties_up = (code & 1) == 1 if rule is Rounding.NEAREST_EVEN else torch.ones_like(negative)
        up = (remainder > half) | ((remainder == half) & ties_up)
    else:
        up = (remainder > 0) & ~_toward_zero(rule, negative)
    if not fmt.subnormals:
        # All below the smallest number becomes the smallest number: there is no zero.
        up = up & (code >= 0)
        code = code.clamp(min=0)
    return code + up.to(torch.int64)


# --------------------------------------------------------------------------------------------------
# Distance in ulps: how many representable numbers two elements are apart
#
# A code's ordinal is its magnitude code with the sign of the number, so that neighbours differ by
# one across binades, through zero and into the subnormals. -0 and +0 share ordinal 0. An infinity
# is one step beyond the largest finite number. Two NaN are at distance 0, a NaN and a number at
# `nan_distance(fmt)`, which exceeds every distance of numbers. Ordinals of a table rank its values.


def nan_distance(fmt: NumberFormat) -> int:
    """Return the distance between a NaN and any number."""
    return fmt.code_count


def ordinal(code: int, fmt: NumberFormat) -> int:
    """Return the index of a code on the number line; for a NaN the result is meaningless."""
    if isinstance(fmt, TableFormat):
        return fmt.ranked.index(code)
    assert isinstance(fmt, ElementFormat), fmt
    magnitude = code & fmt.magnitude_mask
    return -magnitude if code & fmt.sign_mask else magnitude


def ulp_distance(code: int, other: int, fmt: NumberFormat) -> int:
    """Return the steps between two codes: the definition."""
    if is_nan(code, fmt) or is_nan(other, fmt):
        return 0 if is_nan(code, fmt) and is_nan(other, fmt) else nan_distance(fmt)
    return abs(ordinal(code, fmt) - ordinal(other, fmt))


def ordinal_array(codes: Tensor, fmt: NumberFormat) -> Tensor:
    """Return the int64 ordinals of codes."""
    code = codes.to(torch.int64)
    if isinstance(fmt, TableFormat):
        return torch.tensor(fmt.ranked, device=code.device).argsort()[code]
    assert isinstance(fmt, ElementFormat), fmt
    magnitude = code & fmt.magnitude_mask
    return torch.where((code & fmt.sign_mask) != 0, -magnitude, magnitude)


def ulp_distance_array(codes: Tensor, others: Tensor, fmt: NumberFormat) -> Tensor:
    """Return the int64 steps between two tensors of codes: the fast twin."""
    if codes.shape != others.shape:
        raise ShapeMismatch(
            "tensors to compare",
            (tuple(codes.shape), tuple(others.shape)),
            "one shape",
            "Broadcast on purpose before measuring a distance.",
        )
    code, other = codes.to(torch.int64), others.to(torch.int64)
    distance = (ordinal_array(code, fmt) - ordinal_array(other, fmt)).abs()
    nan, other_nan = is_nan_array(code, fmt), is_nan_array(other, fmt)
    distance[nan & other_nan] = 0
    distance[nan ^ other_nan] = nan_distance(fmt)
    return distance


def value_ulp_distance(values: Tensor, others: Tensor) -> Tensor:
    """Return the int64 steps between two tensors of one torch float dtype."""
    if values.dtype is not others.dtype:
        raise DtypeMismatch(
            "tensors to compare",
            (values.dtype, others.dtype),
            "one dtype: an ulp belongs to a format",
            "Round both to the format whose ulps are meant, by a named rule.",
        )
    codes, other_codes = codes_of(values), codes_of(others)
    return ulp_distance_array(codes, other_codes, FORMAT_OF_DTYPE[values.dtype])
