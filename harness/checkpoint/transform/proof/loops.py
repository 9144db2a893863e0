"""Compiled loops of proofs: decode codes to float64 by table, and compare two panels.

Inner loops only: arrays in, arrays or counts out, no checks, no threads; the caller
harness.checkpoint.transform.proof.compare has checked its arguments and defines the results.
Products of a table's entry and a scale are exact in float64 (at most 2 + 4 + 24 significant bits).
Bounds are made from the exponent bits of a float64, because that vectorises.

Importing this imports numba; the loops are compiled at first use and cached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from degarble.harness.base.compiled_loops import compiled
from degarble.harness.checkpoint.transform.proof.bounds import (
    ELEMENT,
    FACTOR,
    FACTOR_ROUNDING,
    NOTHING,
    ONE_ROUNDING,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Doubles = NDArray[np.float64]


# Layout of a float64 (IEEE 754 binary64).
_BIAS = 1023
_MANTISSA_BITS = 52
_EXPONENT = np.int64(0x7FF << _MANTISSA_BITS)


@compiled
def decode_pairs(packed: Bytes, pairs: Doubles, steps: Doubles, width: int, out: Doubles) -> None:
    """Decode packed codes [R, C/2], one scale for `width` values; `pairs` [256, 2]: both values."""
    rows, half = packed.shape
    each = width // 2
    for r in range(rows):
        for block in range(half // each):
            step = steps[r, block]
            for i in range(block * each, block * each + each):
                code = packed[r, i]
                out[r, 2 * i] = pairs[code, 0] * step
                out[r, 2 * i + 1] = pairs[code, 1] * step


@compiled
def decode_bytes(
    codes: Bytes, table: Doubles, steps: Doubles, first: int, block: Any, out: Doubles
) -> None:
    """Decode codes [R, C] of one byte; `first` rows of the first block lie above the panel."""
    rows, columns = codes.shape
    high, wide = block
    for r in range(rows):
        above = (first + r) // high
        for b in range((columns + wide - 1) // wide):
            step = steps[above, b]
            for c in range(b * wide, min(columns, b * wide + wide)):
                out[r, c] = table[codes[r, c]] * step


@compiled
def largest_of_blocks(values: Doubles, first: int, block: Any, largest: Doubles) -> None:
    """Raise `largest` [blocks of rows, blocks of columns] to the magnitudes of `values`."""
    rows, columns = values.shape
    high, wide = block
    for r in range(rows):
        above = (first + r) // high
        for b in range((columns + wide - 1) // wide):
            found = largest[above, b]
            for c in range(b * wide, min(columns, b * wide + wide)):
                found = max(found, abs(values[r, c]))
            largest[above, b] = found


@compiled
def _spread(steps: Doubles, wide: int, step: Doubles) -> None:
    """Write the scale of every column; the loops that follow are flat, so that they vectorise."""
    columns = step.shape[0]
    # NVFP4's block width as a constant that the compiler knows.
    if columns == steps.shape[0] * 16 and wide == 16:
        for b in range(steps.shape[0]):
            step[16 * b : 16 * b + 16] = steps[b]
        return
    for c in range(columns):
        step[c] = steps[c // wide]


@compiled
def _allow(x: Doubles, step: Doubles, bound: Any, allowed: Doubles) -> None:
    """Write the allowed distance of each element of a row."""
    columns = x.shape[0]
    kind, mantissa, lowest = bound
    if kind == NOTHING:
        allowed[:] = 0.0
        return
    if kind == FACTOR:
        for c in range(columns):
            allowed[c] = abs(x[c]) * FACTOR_ROUNDING
        return
    for c in range(columns):
        allowed[c] = x[c] / step[c]
    # What is left of a number's bits without sign and mantissa is a power of two.
    bits = allowed.view(np.int64)
    least = np.int64(lowest + _BIAS) << _MANTISSA_BITS
    for c in range(columns):
        bits[c] = max(bits[c] & _EXPONENT, least)
    # Half a unit in the last place, relative to the power of two.
    half = 0.5 ** (mantissa + 1)
    for c in range(columns):
        allowed[c] = allowed[c] * half * step[c] + abs(x[c]) * ONE_ROUNDING


@compiled
def count_differences(
    source: Doubles, output: Doubles, steps: Doubles, first: int, block: Any, bound: Any
) -> tuple[int, int]:
    """Count elements that differ, and those beyond the bound (kind, mantissa bits, lowest)."""
    rows, columns = source.shape
    high, wide = block
    allowed = np.empty(columns, np.float64)
    step = np.ones(columns, np.float64)
    different = beyond = 0
    for r in range(rows):
        x, y = source[r], output[r]
        unequal = 0
        for c in range(columns):
            unequal += x[c] != y[c]
        # Equal rows need no bound. A NaN counts as unequal here and is settled below.
        if not unequal:
            continue
        if bound[0] == ELEMENT:
            _spread(steps[(first + r) // high], wide, step)
        _allow(x, step, bound, allowed)
        for c in range(columns):
            gap = abs(y[c] - x[c])
            same = (x[c] == y[c]) | ((x[c] != x[c]) & (y[c] != y[c]))
            # A gap that is no finite number is beyond any bound.
            within = (gap <= allowed[c]) & (gap < np.inf)
            different += not same
            beyond += not (same | within)
    return different, beyond
