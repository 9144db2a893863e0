"""Types of number formats: rounding rules, element formats and block formats. Imports no sibling.

A *code* is a bit pattern, a *value* the number that it stands for. A *decode scale* is multiplied
to decode, an *encode scale* is multiplied to encode. A record states independent facts; everything
else is derived from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Rounding(StrEnum):
    """Rules for rounding a real number to a representable one; every rounding names one."""

    NEAREST_EVEN = "nearest_even"
    NEAREST_AWAY = "nearest_away"
    TOWARD_ZERO = "toward_zero"
    UP = "up"  # toward +infinity
    DOWN = "down"  # toward -infinity


class Overflow(StrEnum):
    """Rules for a finite number that lies beyond the largest finite value after rounding."""

    SATURATE = "saturate"  # largest finite value of the same sign; infinities saturate as well
    # Infinity where the format has one, else NaN; refused for a format with neither (E2M1). As in
    # IEEE 754, a rounding rule that points toward zero still yields the largest finite value.
    IEEE = "ieee"


class NanRule(StrEnum):
    """Rules for NaN in a format that has none. A format with NaN always takes its own."""

    REFUSE = "refuse"
    # cvt.rn.satfinite.e2m1x2 and TE: +6.0, code 0x7 (PTX ISA 9.1 cvt; cuda_fp4.hpp)
    LARGEST = "largest"
    ZERO = "zero"  # SGLang's reference quantiser: code 0


class ScaleDirection(StrEnum):
    """Whether the stored per-tensor scale multiplies codes (decode) or inputs (encode)."""

    DECODE = "decode"
    ENCODE = "encode"


class NibbleOrder(StrEnum):
    """Which half of a byte holds the even K index."""

    LOW_EVEN = "low_even"  # every known producer
    HIGH_EVEN = "high_even"  # the reverse, as one checkpoint family stored it


@dataclass(frozen=True)
class ElementFormat:
    """One scalar number format.

    `infinities` and `nan_codes` say which codes are not numbers. UE8M0 has no sign, no mantissa,
    no zero and no subnormals.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    signed: bool
    subnormals: bool
    infinities: bool
    nan_codes: (
        tuple[int, ...] | str
    )  # explicit codes, "ieee" (all ones exponent, mantissa != 0) or ()

    @property
    def code_count(self) -> int:
        """Return how many codes there are."""
        return 1 << self.bits

    @property
    def sign_mask(self) -> int:
        """Return the sign bit, or 0 for an unsigned format."""
        return 1 << (self.bits - 1) if self.signed else 0

    @property
    def mantissa_mask(self) -> int:
        """Return the mantissa field."""
        return (1 << self.mantissa_bits) - 1

    @property
    def exponent_mask(self) -> int:
        """Return the exponent field, not shifted."""
        return (1 << self.exponent_bits) - 1

    @property
    def magnitude_mask(self) -> int:
        """Return all bits but the sign. Magnitude codes are ordered as their values are."""
        return self.code_count - 1 - self.sign_mask

    @property
    def min_exponent(self) -> int:
        """Return the exponent of the smallest normal number, or of the smallest number at all."""
        return 1 - self.bias if self.subnormals else -self.bias

    @property
    def infinity_code(self) -> int | None:
        """Return the code of +infinity, or None."""
        return self.exponent_mask << self.mantissa_bits if self.infinities else None

    @property
    def nan_code(self) -> int | None:
        """Return the positive quiet NaN that encoding yields; None where the format has no NaN."""
        if isinstance(self.nan_codes, str):
            return (self.exponent_mask << self.mantissa_bits) | (1 << (self.mantissa_bits - 1))
        return min(self.nan_codes, default=None)

    @property
    def largest_code(self) -> int:
        """Return the code of the largest finite value."""
        if self.infinity_code is not None:
            return self.infinity_code - 1
        return self.magnitude_mask if self.nan_code is None else self.nan_code - 1

    @property
    def largest(self) -> float:
        """Return the largest finite value."""
        return self._magnitude(self.largest_code)

    @property
    def smallest_normal(self) -> float:
        """Return the smallest positive value with a full significand."""
        return 2.0**self.min_exponent

    @property
    def smallest(self) -> float:
        """Return the smallest positive value: subnormal where the format has subnormals."""
        return self._magnitude(1 if self.subnormals else 0)

    def _magnitude(self, code: int) -> float:
        exponent = code >> self.mantissa_bits
        hidden = 1 << self.mantissa_bits
        significand = code & self.mantissa_mask
        if self.subnormals and exponent == 0:
            return significand * 2.0 ** (self.min_exponent - self.mantissa_bits)
        return (hidden + significand) * 2.0 ** (exponent - self.bias - self.mantissa_bits)


@dataclass(frozen=True)
class BlockFormat:
    """Elements that share scales; `block` is one scale's (rows, columns), K in columns.

    `scale` is the format of the block scale; `tensor_scale` says whether an fp32 scale per tensor
    exists as well.
    """

    name: str
    element: ElementFormat
    scale: ElementFormat
    block: tuple[int, int]
    tensor_scale: bool
    packed: bool  # two 4-bit codes a byte along K
    ragged: bool = False  # whether the last block of a row or column may be cut off
