"""Encode and decode one number: the readable definition of every scalar format.

* -0 keeps its sign where the format has one, and so does a small negative that rounds to zero.
* NaN becomes the format's one positive quiet NaN; payload and sign are dropped. A format without
  NaN (E2M1) raises unless a NanRule chooses a value.
* Overflow.SATURATE clamps infinities as well. Overflow.IEEE needs a format with infinity or NaN.
* UE8M0 has neither sign nor zero: negatives raise; zero and all below 2**-127 become 2**-127.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.formats.types import NanRule, Overflow, Rounding

if TYPE_CHECKING:
    from degarble.harness.formats.types import ElementFormat


def is_nan(code: int, fmt: ElementFormat) -> bool:
    """Return whether `code` stands for no number."""
    if isinstance(fmt.nan_codes, str):
        return (code & fmt.magnitude_mask) > fmt.exponent_mask << fmt.mantissa_bits
    return code in fmt.nan_codes


def decode(code: int, fmt: ElementFormat) -> float:
    """Return the number that `code` stands for, exactly."""
    if not 0 <= code < fmt.code_count:
        raise InvalidArgument(
            f"{fmt.name} code",
            code,
            f"an integer from 0 to {fmt.code_count - 1}",
            "Mask the code to the width of the format first.",
        )
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
    fmt: ElementFormat,
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
    sign = fmt.sign_mask if negative else 0
    if math.isinf(value):
        return overflow_code(fmt, overflow, sign)
    code = _round_magnitude(abs(value), negative, fmt, rounding)
    if code <= fmt.largest_code:
        return code | sign
    if points_toward_zero(rounding, negative):
        return fmt.largest_code | sign
    return overflow_code(fmt, overflow, sign)


def points_toward_zero(rounding: Rounding, negative: bool) -> bool:
    """Return whether the rule never increases the magnitude of a number of this sign."""
    if rounding is Rounding.TOWARD_ZERO:
        return True
    return rounding is (Rounding.UP if negative else Rounding.DOWN)


def encoded_nan(fmt: ElementFormat, nan: NanRule) -> int:
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
    return fmt.largest_code if nan is NanRule.LARGEST else 0


def refuse_silent_overflow(fmt: ElementFormat, overflow: Overflow) -> None:
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
