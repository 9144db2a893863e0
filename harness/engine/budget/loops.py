"""Compiled loop over the elements of an output and their slacks. Import it inside functions.

Every number is rounded as in `budget.panel_definition`, and sums are in numpy's order, so that both
return the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from degarble.harness.base.compiled_loops import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

F64, I64 = np.float64, np.int64
_FLOAT64_BITS, _FLOAT64_BIAS = 52, 1023
_LANES = 8  # of a pairwise sum


@compiled
def summed_run(row: Array, begin: int, end: int) -> Any:
    """Return a sum as np.add.reduceat makes it: the first number, and the others pairwise."""
    first, begin = row[begin], begin + 1
    if end == begin:
        return first
    if end - begin < _LANES:
        total = -0.0
        for j in range(begin, end):
            total += row[j]
        return first + total
    a, b, c, d = row[begin], row[begin + 1], row[begin + 2], row[begin + 3]
    e, f, g, h = row[begin + 4], row[begin + 5], row[begin + 6], row[begin + 7]
    whole = end - (end - begin) % _LANES
    for j in range(begin + _LANES, whole, _LANES):
        a, b, c, d = a + row[j], b + row[j + 1], c + row[j + 2], d + row[j + 3]
        e, f, g, h = e + row[j + 4], f + row[j + 5], g + row[j + 6], h + row[j + 7]
    total = ((a + b) + (c + d)) + ((e + f) + (g + h))
    for j in range(whole, end):
        total += row[j]
    return first + total


@compiled
def panel(
    sides: tuple[Array, Array, Array], block: int, bits: int, rule: tuple[int, bool], stack: Array
) -> Any:
    """Fill the sums and maxima of runs; return the worst element's place, distance and allowance.

    `sides` are the candidate's values, the twin's, and slacks. `bits` are those of the output's
    mantissa; `rule` has the least exponent, and whether equal mantissas of a row count once.
    """
    c_MK, t_MK, e_MK = sides
    least, narrow = rule
    rows, width = c_MK.shape
    shift, mask = _FLOAT64_BITS - bits, (1 << bits) - 1
    alike = np.zeros(1 << bits if narrow else 1)
    terms = np.empty((8, width))
    worst, at, column, distance, allowed = -1.0, 0, 0, 0.0, 0.0
    for i in range(rows):
        c_K, t_K, e_K = c_MK[i], t_MK[i], e_MK[i]
        bits_K = t_K.view(I64)
        if narrow:
            alike[:] = 0.0
            for j in range(width):
                alike[(bits_K[j] >> shift) & mask] += 1.0
        for j in range(width):
            t, e = t_K[j], e_K[j]
            d, size, most = abs(c_K[j] - t), abs(t), 0.0
            if e > 0.0:
                # The distance of neighbours: a power of two, made of its exponent.
                exponent: Any = (F64(size + e).view(I64) >> _FLOAT64_BITS) - _FLOAT64_BIAS
                exponent = max(exponent, least)
                spacing = I64((exponent - bits + _FLOAT64_BIAS) << _FLOAT64_BITS).view(F64)
                most = e + spacing
            step, mean, ratio = 0.0, 0.0, 0.0
            if most > 0.0:
                step, mean = d / most, e / most
            if d > 0.0:
                ratio = step if most > 0.0 else np.inf
            if ratio > worst:
                worst, at, column, distance, allowed = ratio, i, j, d, most
            step = min(step, 1.0)
            if narrow:
                count = alike[(bits_K[j] >> shift) & mask]
                step, mean = step / count, mean / count
            square, largest = most * e, most * most
            terms[0, j], terms[1, j], terms[2, j] = square, square * largest, size * e
            terms[3, j], terms[4, j], terms[5, j] = t * t * square, step, mean
            terms[6, j], terms[7, j] = largest, size * most
        for s in range(stack.shape[1]):
            begin, end = s * block, min((s + 1) * block, width)
            for k in range(6):
                stack[i, s, k] = summed_run(terms[k], begin, end)
            stack[i, s, 6] = stack[i, s, 5]
            for k in (6, 7):
                largest = terms[k, begin]
                for j in range(begin + 1, end):
                    largest = max(largest, terms[k, j])
                stack[i, s, k + 1] = largest
            stack[i, s, 9] = 1.0
    return at, column, distance, allowed
