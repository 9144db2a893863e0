"""Run the compiled loops of the audit: statistics of one weight, and sums over two.

Flat arrays in, sums added to arrays of the caller; no checks and no threads (the loops release the
GIL). Importing this module imports numba, so it is imported inside functions; a loop is compiled at
first use and cached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba.core import types
from numba.extending import intrinsic

from degarble.harness.base.compiled_loops import compiled, compiled_with

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


# --------------------------------------------------------------------------------------------------
# One weight: histograms, block statistics and row digests. statistics/tensor.py prepares the
# arrays. Sixteen E2M1 codes are one 64-bit word, counted by bit planes, so that a loop over words
# vectorises: a byte-wise table costs five times as much. A block is one word (16 codes) or several.
# Floats are handled by their bits; NaN and infinities are counted and excluded from every sum.

if TYPE_CHECKING:
    Words = NDArray[np.uint64]
    Bytes = NDArray[np.uint8]
    Bits = NDArray[Any]  # uint16 (bfloat16) or uint32 (float32)


U32, U64, F32 = np.uint32, np.uint64, np.float32

_LOWEST = U64(0x1111111111111111)  # the lowest bit of each nibble
_PRIME = U64(0x9E3779B97F4A7C15)  # odd; 2^64 over the golden ratio
_PLACE = U64(0xD1B54A32D192ED03)  # odd as well
_SHIFT = U64(29)


# Sums of floats may be taken in any order, hence by vectors.
compiled_sums = compiled_with(fastmath={"reassoc", "nsz"})


def _population_ir(_typing_context: Any, word: Any) -> tuple[Any, Callable[..., Any]]:
    """Emit LLVM's population count."""

    def generate(context: Any, build: Any, sig: Any, args: Any) -> Any:
        del context, sig
        return build.ctpop(args[0])

    return types.uint64(word), generate


_population: Any = intrinsic(_population_ir)


class E2M1Tables(NamedTuple):
    """Lookup tables of the loop over E2M1 blocks; scale bytes that are not positive have 0, NaN.

    square        float64 [256]: square of the scale, over 4: sums of squares count quarters
    scale_log     float32 [256]: binary logarithm of the scale, NaN where it has none
    quarters_log  float32: binary logarithm of a sum of squares in quarters, NaN for 0
    """

    square: NDArray[np.float64]
    scale_log: NDArray[np.float32]
    quarters_log: NDArray[np.float32]


class E2M1Tally(NamedTuple):
    """Sums that the loop over E2M1 blocks adds to.

    counts   int64 [16]: codes
    tops     int64 [256, 8]: blocks, by scale byte and largest magnitude code
    pairing  float64 [4]: of scale log and energy log, about their row's means: degrees of freedom,
             squares of the first, squares of the second, products
    """

    counts: NDArray[np.int64]
    tops: NDArray[np.int64]
    pairing: NDArray[np.float64]


@compiled
def _by_planes(words: Words, quarters: Words, tops: Words, counts: Words) -> None:
    """Set each word's sum of squares in quarters and largest code; add counts [16] of planes.

    A plane has one bit a code: where bits 0, 1, 2 are set, and every product of them. counts[p] is
    the number of codes with all bits of p set, counts[p + 8] of those that are negative too.
    """
    c1, c2, c3, c4 = U64(0), U64(0), U64(0), U64(0)
    c5, c6, c7, s0 = U64(0), U64(0), U64(0), U64(0)
    s1, s2, s3, s4 = U64(0), U64(0), U64(0), U64(0)
    s5, s6, s7 = U64(0), U64(0), U64(0)
    for i in range(words.size):
        w = words[i]
        e1, e2, e4 = w & _LOWEST, (w >> U64(1)) & _LOWEST, (w >> U64(2)) & _LOWEST
        e3, e5, e6 = e1 & e2, e1 & e4, e2 & e4
        e7 = e3 & e4
        p1, p2, p3, p4 = _population(e1), _population(e2), _population(e3), _population(e4)
        p5, p6, p7 = _population(e5), _population(e6), _population(e7)
        # the squares 1, 4, 9, 16, 36, 64, 144 of codes 1 to 7, as a sum over the planes they are in
        low = p1 + p2 * U64(4) + p3 * U64(4) + p4 * U64(16)
        quarters[i] = low + p5 * U64(19) + p6 * U64(44) + p7 * U64(56)
        # The largest code of a word is the last of the planes e1 to e7 that is not empty.
        top = U64(1) if e1 else U64(0)
        top = U64(2) if e2 else top
        top = U64(3) if e3 else top
        top = U64(4) if e4 else top
        top = U64(5) if e5 else top
        top = U64(6) if e6 else top
        tops[i] = U64(7) if e7 else top
        c1, c2, c3, c4 = c1 + p1, c2 + p2, c3 + p3, c4 + p4
        c5, c6, c7 = c5 + p5, c6 + p6, c7 + p7
        sign = (w >> U64(3)) & _LOWEST
        s0, s1 = s0 + _population(sign), s1 + _population(sign & e1)
        s2, s3 = s2 + _population(sign & e2), s3 + _population(sign & e3)
        s4, s5 = s4 + _population(sign & e4), s5 + _population(sign & e5)
        s6, s7 = s6 + _population(sign & e6), s7 + _population(sign & e7)
    for k, count in enumerate((c1, c2, c3, c4, c5, c6, c7, s0, s1, s2, s3, s4, s5, s6, s7)):
        counts[k + 1] += count


@compiled
def _of_planes(planes: Words) -> Any:
    """Return counts [8] of codes equal to k, from counts of codes that contain the bits of k."""
    found = planes.copy()
    for bit in (1, 2, 4):
        for k in range(8):
            if not k & bit:
                found[k] -= found[k | bit]
    return found


@compiled
def _joined(values: Words, size: int, greatest: bool) -> None:
    """Replace the first entries of `values` by the sum, or maximum, of each `size` entries."""
    for b in range(values.size // size):
        found = values[b * size]
        for k in range(b * size + 1, (b + 1) * size):
            found = max(found, values[k]) if greatest else found + values[k]
        values[b] = found


@compiled_sums
def _energy(scales: Bytes, quarters: Words, square: Any) -> Any:
    """Return the sum of squares of a row."""
    energy = 0.0
    for b in range(scales.size):
        energy += square[np.intp(scales[b])] * np.intp(quarters[b])
    return energy


@compiled_sums
def _logarithms(scales: Bytes, quarters: Words, tables: E2M1Tables, x: Any, y: Any) -> Any:
    """Set logarithms of scales and energies, 0 for blocks without; return how many have both."""
    count = np.int64(0)
    for b in range(scales.size):
        first = tables.scale_log[np.intp(scales[b])]
        second = tables.quarters_log[np.intp(quarters[b])]
        known = first == first and second == second  # noqa: PLR0124  neither is NaN
        x[b], y[b] = first if known else F32(0), second if known else F32(0)
        count += np.int64(known)
    return count


@compiled_sums
def _add_pairing(x: Any, y: Any, count: int, pairing: Any) -> None:
    """Add the sums of squares and products of a row, about its means."""
    x1, y1, xx, yy, xy = 0.0, 0.0, 0.0, 0.0, 0.0
    for b in range(x.size):
        first, second = np.float64(x[b]), np.float64(y[b])
        x1, y1 = x1 + first, y1 + second
        xx, yy, xy = xx + first * first, yy + second * second, xy + first * second
    if count > 1:
        pairing[0] += count - 1
        pairing[1] += xx - x1 * x1 / count
        pairing[2] += yy - y1 * y1 / count
        pairing[3] += xy - x1 * y1 / count


@compiled
def e2m1_rows(
    words: Words, scales: Bytes, tables: E2M1Tables, tally: E2M1Tally, energies: Any, paired: Any
) -> None:
    """Tally rows of blocks: words [rows, n], scales [rows, blocks]; energies [rows] are set.

    `paired` (first, every): the pairing samples rows whose number is divisible by `every`; `first`
    is the number of the first row here.
    """
    first, every = paired
    rows, count = words.shape
    blocks = scales.shape[1]
    quarters, tops = np.empty(count, np.uint64), np.empty(count, np.uint64)
    planes = np.zeros(16, np.uint64)
    x, y = np.empty(blocks, np.float32), np.empty(blocks, np.float32)
    # Four tables: increments of equal neighbours do not wait for each other.
    by_scale = np.zeros((4, 2048), np.int64)
    whole = blocks // 4 * 4
    for r in range(rows):
        row_scales = scales[r]
        _by_planes(words[r], quarters, tops, planes)
        if count > blocks:
            _joined(quarters, count // blocks, False)
            _joined(tops, count // blocks, True)
        energies[r] = _energy(row_scales, quarters, tables.square)
        if (first + r) % every == 0:
            known = _logarithms(row_scales, quarters, tables, x, y)
            _add_pairing(x, y, known, tally.pairing)
        for b in range(0, whole, 4):
            for k in range(4):
                by_scale[k, np.intp(row_scales[b + k]) * 8 + np.intp(tops[b + k])] += 1
        for b in range(whole, blocks):
            by_scale[0, np.intp(row_scales[b]) * 8 + np.intp(tops[b])] += 1
    tally.tops[:] += by_scale.sum(0).reshape(256, 8)
    # Every code contains the empty set of bits: 16 codes a word.
    planes[0] = U64(16 * rows * count)
    either, negative = _of_planes(planes[:8]), _of_planes(planes[8:])
    for k in range(8):
        tally.counts[k] += np.int64(either[k] - negative[k])
        tally.counts[k + 8] += np.int64(negative[k])


@compiled
def e2m1_columns(packed: Bytes, scales: Bytes, square: Any, every: int, energies: Any) -> None:
    """Add squares / 4 of one row in `every` to energies [K]; low nibbles are even columns."""
    quarters = np.array([0, 1, 4, 9, 16, 36, 64, 144] * 2, np.float32)
    width = packed.shape[1] // scales.shape[1]
    for r in range(0, packed.shape[0], every):
        for b in range(scales.shape[1]):
            factor = square[scales[r, b]]
            for j in range(b * width, (b + 1) * width):
                energies[2 * j] += factor * quarters[packed[r, j] & 15]
                energies[2 * j + 1] += factor * quarters[packed[r, j] >> 4]


@compiled
def e4m3_panel(codes: Bytes, width: int, squares: Any, counts: Any, blocks: Any) -> None:
    """Tally a panel of at most 128 rows, in blocks of at most 128 columns: counts [256] of codes.

    blocks [b, 2] become each block's sum of squares, by the table, and its largest magnitude code.
    """
    # A block has at most 128 x 128 codes, which 16 bits can count.
    four = np.empty((4, 256), np.uint16)
    for b in range(blocks.shape[0]):
        four[:] = 0
        for r in range(codes.shape[0]):
            row = codes[r, b * width : (b + 1) * width]
            whole = row.size // 4 * 4
            # Four tables: increments of equal neighbours do not wait for each other.
            for j in range(0, whole, 4):
                four[0, row[j]] += 1
                four[1, row[j + 1]] += 1
                four[2, row[j + 2]] += 1
                four[3, row[j + 3]] += 1
            for j in range(whole, row.size):
                four[0, row[j]] += 1
        energy, top = 0.0, 0
        for code in range(256):
            found = np.int64(four[0, code]) + four[1, code] + four[2, code] + four[3, code]
            counts[code] += found
            energy += squares[code] * found
            if found and (code & 127) != 127:
                top = max(top, code & 127)
        blocks[b, 0], blocks[b, 1] = energy, top


@compiled_sums
def _float_row(bits: Bits, shift: Any) -> Any:
    """Return a row's sum of squares, non-finite count, zeros, and largest finite bits."""
    energy, largest = 0.0, U32(0)
    odd, zeros = np.int64(0), np.int64(0)
    for i in range(bits.size):
        magnitude = U32(U32(U32(bits[i]) << shift) & U32(0x7FFFFFFF))
        finite = magnitude < U32(0x7F800000)
        kept = magnitude if finite else U32(0)
        value = np.float64(U32(kept).view(F32))
        energy += value * value
        odd += np.int64(not finite)
        zeros += np.int64(magnitude == U32(0))
        largest = max(largest, kept)
    return energy, odd, zeros, largest


@compiled
def float_rows(bits: Bits, shift: Any, exponents: Any, facts: Any, energies: Any) -> None:
    """Tally rows of bfloat16 (shift 16) or float32 (shift 0) bits; energies [rows] are set.

    exponents [256] counts exponent fields; facts [3]: not finite, zeros, largest magnitude's bits.
    """
    four = np.zeros((4, 256), np.int64)
    for r in range(bits.shape[0]):
        row = bits[r]
        energy, odd, zeros, largest = _float_row(row, shift)
        energies[r] = energy
        facts[0] += odd
        facts[1] += zeros
        facts[2] = max(facts[2], np.int64(largest))
        # Position of the exponent field: bit 23 in float32, bit 7 in bfloat16.
        field = U32(23) - shift
        for i in range(row.size):
            four[i & 3, (U32(row[i]) >> field) & U32(255)] += 1
    for part in range(4):
        for field in range(256):
            exponents[field] += four[part, field]


@compiled
def _digest(words: Words, mask: Any) -> Any:
    """Return a digest of a row, and the union of all bits of `mask` in it.

    Each word is mixed with its position and the results are added: the loop vectorises, because no
    word depends on the one before it.
    """
    total, seen = U64(words.size), U64(0)
    for i in range(words.size):
        word = words[i]
        seen |= word & mask
        mixed = (word ^ (U64(i) * _PLACE)) * _PRIME
        mixed = (mixed ^ (mixed >> U64(32))) * _PRIME
        total += mixed ^ (mixed >> _SHIFT)
    return total, seen


@compiled
def row_digests(words: Words, mask: Any, digests: Words, zero: Any) -> None:
    """Set the digest of each row, and whether it has no bit of `mask`."""
    for r in range(words.shape[0]):
        digest, seen = _digest(words[r], mask)
        digests[r] = digest
        zero[r] = seen == U64(0)


@compiled
def byte_counts(data: Bytes, counts: Any) -> None:
    """Count the bytes of a flat array."""
    four = np.zeros((4, 256), np.int64)
    whole = data.size // 4 * 4
    for i in range(0, whole, 4):
        for k in range(4):
            four[k, data[i + k]] += 1
    for i in range(whole, data.size):
        four[0, data[i]] += 1
    for byte in range(256):
        counts[byte] += four[0, byte] + four[1, byte] + four[2, byte] + four[3, byte]


# --------------------------------------------------------------------------------------------------
# Comparison: sums over two rows, and misfits of codes. float32 arrays in, sums of float64 out.
# Elements that are not finite on either side are counted, and excluded from every sum.

if TYPE_CHECKING:
    Floats = NDArray[np.float32]

# Columns of the sums that compare_rows sets for each row.
REFERENCE, HERE, PRODUCT, ERROR, EQUAL, ODD_HERE, ODD_THERE = range(7)
SUMS = 7


@compiled_sums
def compare_rows(here: Floats, there: Floats, sums: Any) -> None:
    """Set sums [rows, SUMS]: squares there and here, products, squared errors, three counts.

    The counts: equal elements, not finite here though finite there, not finite there.
    """
    for r in range(here.shape[0]):
        x_row, y_row = here[r], there[r]
        yy, xx, xy, error = 0.0, 0.0, 0.0, 0.0
        equal, odd_here, odd_there = np.int64(0), np.int64(0), np.int64(0)
        for i in range(x_row.size):
            # Trap: comparing float32 with infinity would widen; a difference with itself does not.
            x_known = (x_row[i] - x_row[i]) == np.float32(0)
            y_known = (y_row[i] - y_row[i]) == np.float32(0)
            known = x_known and y_known
            x = np.float64(x_row[i]) if known else 0.0
            y = np.float64(y_row[i]) if known else 0.0
            gap = x - y
            yy, xx, xy, error = yy + y * y, xx + x * x, xy + x * y, error + gap * gap
            equal += np.int64(known and gap == 0.0)
            odd_here += np.int64(y_known and not x_known)
            odd_there += np.int64(not y_known)
        sums[r, 0], sums[r, 1], sums[r, 2], sums[r, 3] = yy, xx, xy, error
        sums[r, 4], sums[r, 5], sums[r, 6] = equal, odd_here, odd_there


@compiled
def count_misfits(
    codes: Any, scales: Any, how: Any, bounds: Any, there: Floats, counts: Any
) -> None:
    """Count, for each row, codes that are not the nearest: by a small and by a large slack.

    `how`: height and width of blocks, both slacks, and the magnitude that a zero scale may replace.
    """
    height, width, near, beyond, flushed = how
    for r in range(codes.shape[0]):
        first, second = np.int64(0), np.int64(0)
        for i in range(codes.shape[1]):
            scale = scales[r // height, i // width]
            y = np.float64(there[r, i])
            size = abs(y)
            lower = bounds[0, codes[r, i]] * scale
            upper = bounds[1, codes[r, i]] * scale
            gap = max(lower - y, y - upper)
            if scale == 0.0 and size <= flushed:
                gap = 0.0
            if gap > near * size:
                first += 1
            if gap > beyond * size:
                second += 1
        counts[r, 0], counts[r, 1] = first, second
