"""Inputs around every representable number, with the code that each rounding rule must yield.

The expectation comes from the construction: between two neighbouring codes lie six points, and
each rule's choice at each of them is written in one table below, not computed by a rounder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from degarble.harness.formats import codec
from degarble.harness.formats import codec as arrays
from degarble.harness.formats.number_formats import NanRule, Overflow, Rounding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from degarble.harness.formats.number_formats import ElementFormat

# Primes that leave some hundreds of codes of a wide format.
_STRIDES = {16: 61, 32: 4_194_301}


@dataclass(frozen=True)
class Implementation:
    """The codec or its twin, both on lists."""

    name: str
    decode: Callable[[list[int], ElementFormat], list[float]]
    encode: Callable[..., list[int]]


def _encode_each(
    values: list[float],
    fmt: ElementFormat,
    rounding: Rounding = Rounding.NEAREST_EVEN,
    overflow: Overflow = Overflow.SATURATE,
    nan: NanRule = NanRule.REFUSE,
) -> list[int]:
    return [codec.encode(value, fmt, rounding, overflow, nan) for value in values]


def _encode_tensor(
    values: list[float],
    fmt: ElementFormat,
    rounding: Rounding = Rounding.NEAREST_EVEN,
    overflow: Overflow = Overflow.SATURATE,
    nan: NanRule = NanRule.REFUSE,
) -> list[int]:
    value = torch.tensor(values, dtype=torch.float64)
    codes: list[int] = arrays.encode_array(value, fmt, rounding, overflow, nan).tolist()
    return codes


def _decode_tensor(codes: list[int], fmt: ElementFormat) -> list[float]:
    values: list[float] = arrays.decode_array(torch.tensor(codes), fmt).tolist()
    return values


CODEC = Implementation(
    "codec", lambda codes, fmt: [codec.decode(code, fmt) for code in codes], _encode_each
)
ARRAYS = Implementation("arrays", _decode_tensor, _encode_tensor)


def magnitude_codes(fmt: ElementFormat) -> range:
    """Finite magnitude codes: all of them up to 8 bits, a stride beyond."""
    return range(0, fmt.largest_code, _STRIDES.get(fmt.bits, 1))


@dataclass(frozen=True)
class Case:
    """A positive value and what it lies next to: `code` is the code below or at it."""

    value: float
    code: int
    place: str  # exact, lower half, middle, upper half


def cases(fmt: ElementFormat) -> Iterator[Case]:
    """Yield points at, around and between neighbouring codes."""
    for code in magnitude_codes(fmt):
        below, above = codec.decode(code, fmt), codec.decode(code + 1, fmt)
        middle = (below + above) / 2
        yield Case(below, code, "exact")
        yield Case(middle, code, "middle")
        for point, towards, place in (
            (below, above, "lower half"),
            (middle, below, "lower half"),
            (middle, above, "upper half"),
            (above, below, "upper half"),
        ):
            yield Case(math.nextafter(point, towards), code, place)
            if fmt.bits <= 16:  # a float32 lies strictly between the points
                near = float(np.nextafter(np.float32(point), np.float32(towards)))
                yield Case(near, code, place)


# Whether a rule takes the code above. Even and odd codes are told apart where it matters.
_ROUNDS_UP: dict[Rounding, Callable[[Case, bool], bool]] = {
    Rounding.NEAREST_EVEN: lambda case, _negative: (
        case.place == "upper half" or (case.place == "middle" and case.code % 2 == 1)
    ),
    Rounding.NEAREST_AWAY: lambda case, _negative: case.place in {"upper half", "middle"},
    Rounding.TOWARD_ZERO: lambda _case, _negative: False,
    Rounding.UP: lambda case, negative: case.place != "exact" and not negative,
    Rounding.DOWN: lambda case, negative: case.place != "exact" and negative,
}


def expected_code(case: Case, fmt: ElementFormat, rule: Rounding, negative: bool) -> int:
    """Return the code that the rule must yield for the case with that sign."""
    up = _ROUNDS_UP[rule](case, negative)
    return (case.code + int(up)) | (fmt.sign_mask if negative else 0)


def mismatches(
    encode: Callable[..., list[int]], fmt: ElementFormat, rule: Rounding
) -> list[tuple[float, int, int]]:
    """Return (value, expected, got) wherever an encoder leaves the table."""
    found = []
    every = list(cases(fmt))
    for negative in (False, True) if fmt.signed else (False,):
        values = [-case.value if negative else case.value for case in every]
        got = encode(values, fmt, rule)
        for case, value, code in zip(every, values, got, strict=True):
            expected = expected_code(case, fmt, rule, negative)
            if code != expected:
                found.append((value, expected, code))
    return found
