"""Encode and decode plain E2M1 at memory speed, one code a byte, without scales.

Bit for bit as harness.formats.arrays: nearest even, saturating, -0 and the sign of small negatives
kept. NaN gives +6, as the hardware conversion does. Importing this compiles nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import DtypeMismatch
from degarble.harness.formats.element_formats import E2M1
from degarble.harness.formats.fast.threads import (
    bits_of,
    bits_view,
    output_tensor,
    run_parts,
    values_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

UNIT = 16  # elements that are decoded at once; parts start at whole units
GRAIN_UNITS = 1 << 16  # a part of 1,048,576 elements takes as long as starting a thread

_FLOAT_DTYPES = (torch.bfloat16, torch.float32)
_CODE_DTYPES = (torch.uint8,)


def encode_e2m1(values: Tensor, *, out: Tensor | None = None, threads: int | None = None) -> Tensor:
    """Return the E2M1 code of each value, one a byte."""
    flat = bits_view("values", values, _FLOAT_DTYPES)
    result = output_tensor(out, values.shape, torch.uint8)
    codes = bits_view("out", result, _CODE_DTYPES)

    from degarble.harness.formats.fast import loops as fast_loops  # noqa: PLC0415  imports numba

    def part(start: int, stop: int) -> None:
        fast_loops.encode_elements(flat[start:stop], codes[start:stop])

    _run(part, flat.size, threads)
    return result


def decode_e2m1(
    codes: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    out: Tensor | None = None,
    threads: int | None = None,
) -> Tensor:
    """Return the value of each code, exactly; the upper nibble of a byte is ignored."""
    if dtype not in _FLOAT_DTYPES:
        raise DtypeMismatch("dtype", dtype, "torch.bfloat16 or torch.float32", "Convert after.")
    flat = bits_view("codes", codes, _CODE_DTYPES)
    result = output_tensor(out, codes.shape, dtype)
    values = bits_view("out", result, (dtype,))
    table = bits_of(values_of(E2M1), dtype)

    from degarble.harness.formats.fast import loops as fast_loops  # noqa: PLC0415  imports numba

    stream = fast_loops.streams(values)

    def part(start: int, stop: int) -> None:
        fast_loops.decode_elements(flat[start:stop], table, values[start:stop], stream)

    _run(part, flat.size, threads)
    return result


def round_e2m1(values: Tensor, *, out: Tensor | None = None, threads: int | None = None) -> Tensor:
    """Return each value after a trip through its E2M1 code, in the dtype of `values`."""
    flat = bits_view("values", values, _FLOAT_DTYPES)
    result = output_tensor(out, values.shape, values.dtype)
    rounded = bits_view("out", result, (values.dtype,))
    table = bits_of(values_of(E2M1), values.dtype)

    from degarble.harness.formats.fast import loops as fast_loops  # noqa: PLC0415  imports numba

    stream = fast_loops.streams(rounded)

    def part(start: int, stop: int) -> None:
        fast_loops.round_elements(flat[start:stop], table, rounded[start:stop], stream)

    _run(part, flat.size, threads)
    return result


def _run(part: Callable[[int, int], None], count: int, threads: int | None) -> None:
    """Split `count` elements at whole units: streamed output must stay aligned."""
    units = -(-count // UNIT)
    run_parts(
        lambda start, stop: part(start * UNIT, min(stop * UNIT, count)), units, GRAIN_UNITS, threads
    )
