"""Define the number formats: elements (floats and tables of values), blocks, rounding rules.

A *code* is a bit pattern, a *value* the number that it stands for. A *decode scale* is multiplied
to decode, an *encode scale* is multiplied to encode. A record states independent facts; everything
else is derived from them. docs/formats.md shows the same numbers as tables. Imports no torch.

Sources: OCP Microscaling Formats 1.0 (E2M1, E4M3, E5M2, UE8M0, MX blocks), IEEE 754 (FP16, FP32),
PTX ISA 9.1 (mxf4nvf4) and Transformer Engine (NVFP4), deepseek-ai/DeepSeek-V3 and V4,
inference/kernel.py (FP8 blocks), compressed-tensors 0.20 and AutoGPTQ (integers by group).
Shape letters: M rows, K elements along the blocks, R and C blocks along M and K.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from struct import pack, unpack
from types import MappingProxyType
from typing import TYPE_CHECKING

from degarble.harness.base.errors import ShapeMismatch, UnknownName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


# --------------------------------------------------------------------------------------------------
# Rules and records


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
class NumberFormat:
    """One scalar number format: an ElementFormat, or a TableFormat that lists its values."""

    name: str
    bits: int

    if TYPE_CHECKING:  # fields of an ElementFormat, derived by a TableFormat

        @property
        def signed(self) -> bool:
            """Return whether some values are negative."""

        @property
        def nan_codes(self) -> tuple[int, ...] | str:
            """Return explicit codes, or "ieee": all ones exponent, mantissa != 0."""

    @property
    def code_count(self) -> int:
        """Return how many codes there are."""
        return 1 << self.bits

    @property
    def infinity_code(self) -> int | None:
        """Return the code of +infinity, or None."""
        return None

    @property
    def nan_code(self) -> int | None:
        """Return the positive quiet NaN that encoding yields; None where the format has no NaN."""
        return None

    @property
    def largest_code(self) -> int:
        """Return the code of the largest finite value."""
        raise NotImplementedError

    @property
    def largest(self) -> float:
        """Return the largest finite value."""
        raise NotImplementedError

    @property
    def lowest(self) -> float:
        """Return the most negative finite value, or 0."""
        return -self.largest if self.signed else 0.0

    @property
    def smallest(self) -> float:
        """Return the smallest positive value."""
        raise NotImplementedError


@dataclass(frozen=True)
class TableFormat(NumberFormat):
    """A format whose values are listed by code: integers, and any code book, as NF4's.

    The values are distinct and finite, and float32 holds each of them.
    """

    table: tuple[float, ...] = field(repr=False)

    def __post_init__(self) -> None:
        assert len(self.table) == self.code_count, f"{self.name} needs a value for each code"
        assert len(set(self.table)) == self.code_count, f"{self.name} has a value twice"
        kept = unpack(f"{self.code_count}f", pack(f"{self.code_count}f", *self.table))
        assert kept == self.table, f"{self.name} has a value that float32 does not hold"

    @property
    def signed(self) -> bool:
        """Return whether some values are negative."""
        return min(self.table) < 0

    @property
    def nan_codes(self) -> tuple[int, ...]:
        """Return no code: every code is a number."""
        return ()

    @property
    def largest_code(self) -> int:
        """Return the code of the largest value."""
        return self.ranked[-1]

    @property
    def largest(self) -> float:
        """Return the largest value; the most negative one may exceed it."""
        return self.table[self.largest_code]

    @property
    def lowest(self) -> float:
        """Return the most negative value, or the smallest."""
        return min(self.table)

    @property
    def smallest(self) -> float:
        """Return the smallest positive value."""
        return min(value for value in self.table if value > 0)

    @cached_property
    def ranked(self) -> tuple[int, ...]:
        """Return the codes in the order of their values."""
        return tuple(sorted(range(self.code_count), key=self.table.__getitem__))


@dataclass(frozen=True)
class ElementFormat(NumberFormat):
    """A float format: sign, exponent and mantissa.

    `infinities` and `nan_codes` say which codes are not numbers. UE8M0 has no sign, no mantissa,
    no zero and no subnormals.
    """

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


WHOLE = 0  # an extent of a block that is the matrix's own


@dataclass(frozen=True)
class BlockFormat:
    """Elements that share scales; `block` is one scale's (rows, columns), K in columns.

    An extent WHOLE takes all rows or columns. `scale` is the format of the block scale;
    `tensor_scale` says whether an fp32 scale per tensor exists as well. With `zero_point` a value
    is (element - zero point) * scale, one zero point a block.
    """

    name: str
    element: NumberFormat
    scale: ElementFormat
    block: tuple[int, int]
    tensor_scale: bool
    packed: bool  # two 4-bit codes a byte along K
    ragged: bool = False  # whether the last block of a row or column may be cut off
    zero_point: bool = False

    def extents(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the rows and columns of one block of a matrix."""
        return self.block[0] or max(rows, 1), self.block[1] or max(columns, 1)


# --------------------------------------------------------------------------------------------------
# Element formats

E2M1 = ElementFormat(
    name="E2M1",
    bits=4,
    exponent_bits=2,
    mantissa_bits=1,
    bias=1,
    signed=True,
    subnormals=True,
    infinities=False,
    nan_codes=(),
)
E4M3 = ElementFormat(
    name="E4M3",  # the "fn" variant: the all-ones exponent holds numbers, S.1111.111 alone is NaN
    bits=8,
    exponent_bits=4,
    mantissa_bits=3,
    bias=7,
    signed=True,
    subnormals=True,
    infinities=False,
    nan_codes=(0x7F, 0xFF),
)
E5M2 = ElementFormat(
    name="E5M2",
    bits=8,
    exponent_bits=5,
    mantissa_bits=2,
    bias=15,
    signed=True,
    subnormals=True,
    infinities=True,
    nan_codes="ieee",
)
UE8M0 = ElementFormat(
    name="UE8M0",  # byte b means 2**(b - 127): no sign, no zero
    bits=8,
    exponent_bits=8,
    mantissa_bits=0,
    bias=127,
    signed=False,
    subnormals=False,
    infinities=False,
    nan_codes=(0xFF,),
)
BF16 = ElementFormat(
    name="BF16",
    bits=16,
    exponent_bits=8,
    mantissa_bits=7,
    bias=127,
    signed=True,
    subnormals=True,
    infinities=True,
    nan_codes="ieee",
)
FP16 = ElementFormat(
    name="FP16",
    bits=16,
    exponent_bits=5,
    mantissa_bits=10,
    bias=15,
    signed=True,
    subnormals=True,
    infinities=True,
    nan_codes="ieee",
)
FP32 = ElementFormat(
    name="FP32",
    bits=32,
    exponent_bits=8,
    mantissa_bits=23,
    bias=127,
    signed=True,
    subnormals=True,
    infinities=True,
    nan_codes="ieee",
)


def _signed_integers(name: str, bits: int) -> TableFormat:
    half = 1 << (bits - 1)
    return TableFormat(name, bits, (*map(float, range(half)), *map(float, range(-half, 0))))


def _unsigned_integers(name: str, bits: int) -> TableFormat:
    return TableFormat(name, bits, tuple(map(float, range(1 << bits))))


INT4 = _signed_integers("INT4", 4)  # two's complement
INT8 = _signed_integers("INT8", 8)
UINT4 = _unsigned_integers("UINT4", 4)  # of a weight with zero points
UINT8 = _unsigned_integers("UINT8", 8)

ELEMENT_FORMATS: Mapping[str, ElementFormat] = MappingProxyType(
    {fmt.name: fmt for fmt in (E2M1, E4M3, E5M2, UE8M0, BF16, FP16, FP32)}
)
TABLE_FORMATS: Mapping[str, TableFormat] = MappingProxyType(
    {fmt.name: fmt for fmt in (INT4, INT8, UINT4, UINT8)}
)


# --------------------------------------------------------------------------------------------------
# Block formats, and the shapes of codes and scales
#
# The FP8 block formats exist with fp32 and with UE8M0 scales. A vector is passed as [1, K]. Only
# 128x128 and groups of integers may have cut-off blocks: their scales count by ceiling division.
# Every other format needs K in whole blocks, because nothing is padded silently.
#
# A row is an output channel of a weight, or a token of activations. Scales stored in BF16 or FP16
# are widened to fp32, which is exact. Signed integers are symmetric, unsigned ones have zero
# points.

NVFP4 = BlockFormat(
    name="NVFP4", element=E2M1, scale=E4M3, block=(1, 16), tensor_scale=True, packed=True
)
MXFP4 = BlockFormat(
    name="MXFP4", element=E2M1, scale=UE8M0, block=(1, 32), tensor_scale=False, packed=True
)
MXFP8 = BlockFormat(
    name="MXFP8", element=E4M3, scale=UE8M0, block=(1, 32), tensor_scale=False, packed=False
)
FP8_128X128_F32 = BlockFormat(
    name="FP8_128X128_F32",
    element=E4M3,
    scale=FP32,
    block=(128, 128),
    tensor_scale=False,
    packed=False,
    ragged=True,
)
FP8_128X128_UE8M0 = BlockFormat(
    name="FP8_128X128_UE8M0",
    element=E4M3,
    scale=UE8M0,
    block=(128, 128),
    tensor_scale=False,
    packed=False,
    ragged=True,
)
FP8_1X128_F32 = BlockFormat(
    name="FP8_1X128_F32",
    element=E4M3,
    scale=FP32,
    block=(1, 128),
    tensor_scale=False,
    packed=False,
)
FP8_1X128_UE8M0 = BlockFormat(
    name="FP8_1X128_UE8M0",
    element=E4M3,
    scale=UE8M0,
    block=(1, 128),
    tensor_scale=False,
    packed=False,
)

FP8_ROW = BlockFormat(
    name="FP8_ROW", element=E4M3, scale=FP32, block=(1, WHOLE), tensor_scale=False, packed=False
)
FP8_TENSOR = BlockFormat(
    name="FP8_TENSOR",
    element=E4M3,
    scale=FP32,
    block=(WHOLE, WHOLE),
    tensor_scale=False,
    packed=False,
)


def _integers(element: TableFormat, suffix: str, block: tuple[int, int]) -> BlockFormat:
    return BlockFormat(
        name=f"{element.name}_{suffix}",
        element=element,
        scale=FP32,
        block=block,
        tensor_scale=False,
        packed=element.bits == 4,
        ragged=True,
        zero_point=not element.signed,
    )


_INTEGERS = tuple(
    _integers(element, suffix, block)
    for element in (INT4, UINT4, INT8, UINT8)
    for suffix, block in (
        ("G128", (1, 128)),
        ("G64", (1, 64)),
        ("G32", (1, 32)),
        ("ROW", (1, WHOLE)),
        ("TENSOR", (WHOLE, WHOLE)),
    )
)

BLOCK_FORMATS: Mapping[str, BlockFormat] = MappingProxyType(
    {
        fmt.name: fmt
        for fmt in (
            NVFP4,
            MXFP4,
            MXFP8,
            FP8_128X128_F32,
            FP8_128X128_UE8M0,
            FP8_1X128_F32,
            FP8_1X128_UE8M0,
            FP8_ROW,
            FP8_TENSOR,
            *_INTEGERS,
        )
    }
)


def block_format(name: str) -> BlockFormat:
    """Return the block format called `name`; raise with the nearest known names otherwise."""
    if name not in BLOCK_FORMATS:
        raise UnknownName.among("block format", name, BLOCK_FORMATS)
    return BLOCK_FORMATS[name]


def require_shape(shape: Sequence[int], fmt: BlockFormat) -> None:
    """Raise if the format cannot hold a logical shape."""
    if len(shape) < 2:
        raise ShapeMismatch(
            f"shape for {fmt.name}",
            tuple(shape),
            "at least two dimensions [..., M, K]",
            "Pass a vector as [1, K].",
        )
    if fmt.ragged:
        if fmt.packed and shape[-1] % 2:
            raise ShapeMismatch(
                f"K for {fmt.name}",
                shape[-1],
                "an even number: two codes share a byte",
                "Pad it with zeros on purpose and keep the padded shape.",
            )
        return
    for extent, block, name in zip(shape[-2:], fmt.block, ("M", "K"), strict=True):
        if block != WHOLE and extent % block:
            raise ShapeMismatch(
                f"{name} for {fmt.name}",
                extent,
                f"a multiple of {block}",
                "Pad it with zeros on purpose and keep the padded shape.",
            )


def codes_shape(shape: Sequence[int], fmt: BlockFormat) -> tuple[int, ...]:
    """Return the extents of the stored codes: K halves where two codes share a byte."""
    require_shape(shape, fmt)
    *leading, columns = shape
    return (*leading, columns // 2 if fmt.packed else columns)


def scale_shape(shape: Sequence[int], fmt: BlockFormat) -> tuple[int, ...]:
    """Return the extents [..., R, C] of the block scales in row-major order."""
    require_shape(shape, fmt)
    # Ceiling division: only ragged formats have a cut-off last block.
    *leading, rows, columns = shape
    block_rows, block_columns = fmt.extents(rows, columns)
    return (*leading, -(-rows // block_rows), -(-columns // block_columns))
