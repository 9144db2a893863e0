"""Numba loops of fast.modelopt: flat arrays in, flat arrays out. Import it inside a function.

The loops check nothing, hold no Python objects and release the GIL. Every step is one float32
operation, rounded to nearest even, in ModelOpt's order. Errors are float64, where a decoded value
is exact, and add up as a tree of pairs, so that the definition can repeat them bit for bit.
Fast-math is off; division by zero yields what IEEE 754 says.

Trap: numba's disk cache checks only this file for changes. Touch it when fast/loops.py changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from degarble.harness.base.compiled_loops import compiled_with
from degarble.harness.formats.fast.loops import CHUNK_BLOCKS, _e2m1_code, _e4m3_code, _widened

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bits = NDArray[Any]  # uint16 (bfloat16) or uint32 (float32)
    Bytes = NDArray[np.uint8]
    Floats = NDArray[np.float32]
    Doubles = NDArray[np.float64]


U32 = np.uint32
F32 = np.float32
F64 = np.float64

_compiled = compiled_with(error_model="numpy")


@_compiled
def _code(value: Any, divisor: Any) -> Any:
    """Round a quotient to E2M1; adding +0 drops the sign of a zero, and of a zero alone."""
    return _e2m1_code(F32(F32(value / divisor) + F32(0.0)))


@_compiled
def _scale_code(amax: Any, share: Any) -> Any:
    """Round a block's scale: 0 becomes 1, the rest is clamped to [2^-9, 448]."""
    raw = F32(amax / share)
    # ModelOpt gives a zero block scale 1. 2^-9 is E4M3's smallest value.
    raw = F32(1.0) if raw == F32(0.0) else raw
    return _e4m3_code(max(raw, F32(0.001953125)))


@_compiled
def _block_amax(values: Bits, a: Bits, b: Bits, count: Any) -> Any:
    """Leave the largest magnitude of every block in `a`, as bits; NaN beats all numbers."""
    for i in range(count * 8):
        even = U32(_widened(values[2 * i]) & U32(0x7FFFFFFF))
        a[i] = max(even, U32(_widened(values[2 * i + 1]) & U32(0x7FFFFFFF)))
    for i in range(count * 4):
        b[i] = max(a[2 * i], a[2 * i + 1])
    for i in range(count * 2):
        a[i] = max(b[2 * i], b[2 * i + 1])
    largest = U32(0)
    for i in range(count):
        a[i] = max(a[2 * i], a[2 * i + 1])
        largest = max(largest, a[i])
    return largest


@_compiled
def largest_bits(values: Bits) -> Any:
    """Return the largest magnitude as float32 bits; NaN beats infinity, infinity all numbers."""
    largest = U32(0)
    for i in range(values.size):
        largest = max(largest, U32(_widened(values[i]) & U32(0x7FFFFFFF)))
    return largest


@_compiled
def encode_blocks(values: Bits, share: Any, divisors: Floats, packed: Bytes, scales: Bytes) -> Any:
    """Encode whole blocks; `share` is 6 s, divisors[byte] the scale times s. Return the amax."""
    a = np.empty(CHUNK_BLOCKS * 8, U32)
    b = np.empty(CHUNK_BLOCKS * 4, U32)
    spread = np.empty(CHUNK_BLOCKS * 8, F32)
    largest = U32(0)
    for start in range(0, scales.size, CHUNK_BLOCKS):
        stop = min(start + CHUNK_BLOCKS, scales.size)
        x, y, count = values[start * 16 : stop * 16], packed[start * 8 : stop * 8], stop - start
        largest = max(largest, _block_amax(x, a, b, count))
        for i in range(count):
            scales[start + i] = _scale_code(U32(a[i]).view(F32), share)
        for i in range(count):
            divisor = divisors[scales[start + i]]
            for j in range(8):
                spread[8 * i + j] = divisor
        for i in range(count * 8):
            even = _code(U32(_widened(x[2 * i])).view(F32), spread[i])
            odd = _code(U32(_widened(x[2 * i + 1])).view(F32), spread[i])
            y[i] = np.uint8(U32(even | U32(odd << U32(4))))
    return largest


@_compiled
def _fold(errors: Doubles, other: Doubles, count: Any) -> None:
    """Add 8 entries a block up as a tree of pairs; the sums end in errors[:count]."""
    for i in range(count * 4):
        other[i] = errors[2 * i] + errors[2 * i + 1]
    for i in range(count * 2):
        errors[i] = other[2 * i] + other[2 * i + 1]
    for i in range(count):
        other[i] = errors[2 * i] + errors[2 * i + 1]
    for i in range(count):
        errors[i] = other[i]


@_compiled
def _try(
    x: Bits, choice: Bytes, tables: Any, packed: Bytes, errors: Doubles, other: Doubles
) -> None:
    """Encode the blocks of a chunk with these scales; leave codes, and one squared error each."""
    divisors, steps, elements = tables
    count = choice.size
    spread = np.empty(CHUNK_BLOCKS * 8, F32)
    units = np.empty(CHUNK_BLOCKS * 8, F64)
    for i in range(count):
        divisor, step = divisors[choice[i]], steps[choice[i]]
        for j in range(8):
            spread[8 * i + j] = divisor
            units[8 * i + j] = step
    for i in range(count * 8):
        x0, x1 = U32(_widened(x[2 * i])).view(F32), U32(_widened(x[2 * i + 1])).view(F32)
        even, odd = _code(x0, spread[i]), _code(x1, spread[i])
        packed[i] = np.uint8(U32(even | U32(odd << U32(4))))
    _errors(x, packed, units, elements, errors, count)
    _fold(errors, other, count)


@_compiled
def _errors(
    x: Bits, packed: Bytes, units: Doubles, elements: Doubles, errors: Doubles, count: Any
) -> None:
    """Leave the squared error of every pair; a loop of its own, so that it becomes vectors."""
    for i in range(count * 8):
        x0, x1 = U32(_widened(x[2 * i])).view(F32), U32(_widened(x[2 * i + 1])).view(F32)
        pair = np.uint64(packed[i])
        d0 = F64(x0) - elements[pair & np.uint64(15)] * units[i]
        d1 = F64(x1) - elements[pair >> np.uint64(4)] * units[i]
        errors[i] = d0 * d0 + d1 * d1


@_compiled
def search_blocks(values: Bits, rule: Any, tables: Any, packed: Bytes, scales: Bytes) -> Any:
    """Encode whole blocks with the candidate scale of least squared error; the first one wins ties.

    `rule`: (shares, steps of the code): candidates are the scales of every share, moved by steps.
    """
    shares, moves = rule
    a = np.empty(CHUNK_BLOCKS * 8, U32)
    b = np.empty(CHUNK_BLOCKS * 4, U32)
    choice = np.empty(CHUNK_BLOCKS, np.uint8)
    codes = np.empty(CHUNK_BLOCKS * 8, np.uint8)
    errors = np.empty(CHUNK_BLOCKS * 8, F64)
    other = np.empty(CHUNK_BLOCKS * 4, F64)
    best = np.empty(CHUNK_BLOCKS, F64)
    largest = U32(0)
    for start in range(0, scales.size, CHUNK_BLOCKS):
        stop = min(start + CHUNK_BLOCKS, scales.size)
        x, y, count = values[start * 16 : stop * 16], packed[start * 8 : stop * 8], stop - start
        largest = max(largest, _block_amax(x, a, b, count))
        for i in range(count):
            best[i] = np.inf
            scales[start + i] = _scale_code(U32(a[i]).view(F32), shares[0])
        for i in range(count * 8):
            y[i] = 0
        for share in shares:
            for move in moves:
                for i in range(count):
                    base = np.int64(_scale_code(U32(a[i]).view(F32), share))
                    # 1 to 126 are the positive finite codes of E4M3: 0x7F is NaN.
                    choice[i] = np.uint8(min(max(base + move, 1), 126))
                _try(x, choice[:count], tables, codes, errors, other)
                for i in range(count):
                    # Strictly less: the first of equals wins; a NaN error never does.
                    if errors[i] < best[i]:
                        best[i] = errors[i]
                        scales[start + i] = choice[i]
                        for j in range(8):
                            y[8 * i + j] = codes[8 * i + j]
    return largest


@_compiled
def measure_blocks(values: Bits, packed: Bytes, scales: Bytes, tables: Any, sums: Doubles) -> None:
    """Add up, over whole blocks: energy and squared error."""
    steps, elements = tables
    energy = np.empty(CHUNK_BLOCKS * 8, F64)
    errors = np.empty(CHUNK_BLOCKS * 8, F64)
    other = np.empty(CHUNK_BLOCKS * 4, F64)
    units = np.empty(CHUNK_BLOCKS * 8, F64)
    for start in range(0, scales.size, CHUNK_BLOCKS):
        stop = min(start + CHUNK_BLOCKS, scales.size)
        x, y, count = values[start * 16 : stop * 16], packed[start * 8 : stop * 8], stop - start
        for i in range(count):
            step = steps[scales[start + i]]
            for j in range(8):
                units[8 * i + j] = step
        for i in range(count * 8):
            x0 = F64(U32(_widened(x[2 * i])).view(F32))
            x1 = F64(U32(_widened(x[2 * i + 1])).view(F32))
            energy[i] = x0 * x0 + x1 * x1
        _errors(x, y, units, elements, errors, count)
        _fold(energy, other, count)
        _fold(errors, other, count)
        for i in range(count):
            sums[0] += energy[i]
            sums[1] += errors[i]
