"""The scalar number formats E2M1, E4M3, E5M2, UE8M0, BF16, FP16 and FP32, one record each.

docs/formats.md shows the same numbers as tables.
Sources: OCP Microscaling Formats 1.0 (E2M1, E4M3, E5M2, UE8M0), IEEE 754 (FP16, FP32).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from degarble.harness.base.errors import UnknownName
from degarble.harness.formats.types import ElementFormat

if TYPE_CHECKING:
    from collections.abc import Mapping

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

ELEMENT_FORMATS: Mapping[str, ElementFormat] = MappingProxyType(
    {fmt.name: fmt for fmt in (E2M1, E4M3, E5M2, UE8M0, BF16, FP16, FP32)}
)


def element_format(name: str) -> ElementFormat:
    """Return the format called `name`; raise with the nearest known names otherwise."""
    if name not in ELEMENT_FORMATS:
        raise UnknownName.among("element format", name, ELEMENT_FORMATS)
    return ELEMENT_FORMATS[name]
