"""Compiled comparison loops (numba): sums by cell and counts by row, in one pass over the codes.

`loops_of` compiles one loop for each number format. A loop reads contiguous codes and adds to
arrays that the caller owns. It checks nothing and starts no threads; it releases the GIL. Codes
become float32 by shifting them into place and one exact multiplication by a power of two, and are
summed in float64. Ordinals are subtracted in integers of the codes' own width, so that many fit
into one vector.

Sums within a cell follow the order of the machine's vectors: their last digits may differ between
CPU models, but never on one machine. A row with NaN or infinity is left to the caller: only its
first count is set, to SKIPPED.

Importing this module imports numba. Loops are compiled at first use and cached.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from degarble.harness.base.compiled_loops import compiled_with

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from degarble.harness.formats.number_formats import ElementFormat


U32, F32, F64 = np.uint32, np.float32, np.float64

_FLOAT32_MANTISSA = 23
_FLOAT32_BIAS = 127
SKIPPED = -1
_WORDS: dict[int, tuple[Any, Any, int]] = {  # bytes: unsigned, signed, elements counted at once
    1: (np.uint8, np.int8, 255),
    2: (np.uint16, np.int16, 32768),
    4: (np.uint32, np.int32, 1 << 20),
}


class LoopTotals(NamedTuple):
    """The arrays that a loop adds to.

    rows    float64 [M, 4], cells float64 [R, S, 4]: rr, cc, rd, dd
    counts  int64 [M, 4]: identical, outward, inward, largest distance in ulps
    """

    rows: NDArray[np.float64]
    cells: NDArray[np.float64]
    counts: NDArray[np.int64]


def word_of(fmt: ElementFormat) -> Any:
    """Return the unsigned integer that holds a code."""
    return _WORDS[max(8, fmt.bits) // 8][0]


def has_loops(fmt: ElementFormat) -> bool:
    """Tell whether a format has loops: signed, with subnormals, no wider than float32."""
    return fmt.signed and fmt.subnormals and fmt.bits <= 32


@cache
def loops_of(fmt: ElementFormat) -> Callable[..., None]:
    """Return compare_rows(candidate, reference, (first row, tile rows, cell width), tally)."""
    word, signed, run = _WORDS[max(8, fmt.bits) // 8]
    sign, magnitude = word(fmt.sign_mask), word(fmt.magnitude_mask)
    shift = U32(_FLOAT32_MANTISSA - fmt.mantissa_bits)
    sign_shift = U32(32 - fmt.bits)
    scale = F32(2.0 ** (_FLOAT32_BIAS - fmt.bias))
    beyond = U32(fmt.largest_code + 1)

    def compare_rows(candidate: Any, reference: Any, grid: Any, tally: LoopTotals) -> None:
        first, tall, wide = grid
        for i in range(candidate.shape[0]):
            c_row, r_row = candidate[i], reference[i]
            at = first + i
            band = at // tall
            equal, out, moved = np.int64(0), np.int64(0), np.int64(0)
            far, largest = word(0), word(0)
            # Counters have the codes' own width; `run` elements cannot overflow them.
            for begin in range(0, c_row.size, run):
                c, r = c_row[begin : begin + run], r_row[begin : begin + run]
                some_equal, some_out, some_moved = word(0), word(0), word(0)
                for j in range(c.size):
                    a, b = c[j], r[j]
                    am, bm = word(a & magnitude), word(b & magnitude)
                    # Ordinals: consecutive numbers differ by 1, and -0 equals 0.
                    ao = signed(am) if (a & sign) == word(0) else signed(-signed(am))
                    bo = signed(bm) if (b & sign) == word(0) else signed(-signed(bm))
                    far = max(far, word(word(max(ao, bo)) - word(min(ao, bo))))
                    largest = max(largest, am, bm)
                    some_equal = word(some_equal + word(a == b))
                    some_out = word(some_out + word(am > bm))
                    some_moved = word(some_moved + word(am != bm))
                equal, out, moved = equal + some_equal, out + some_out, moved + some_moved
            # Codes above the largest finite one are NaN or infinity.
            if U32(largest) >= beyond:
                tally.counts[at, 0] = SKIPPED
                continue
            tally.counts[at, 0], tally.counts[at, 1] = equal, out
            tally.counts[at, 2], tally.counts[at, 3] = moved - out, np.int64(far)
            for s in range(tally.cells.shape[1]):
                c, r = c_row[s * wide : (s + 1) * wide], r_row[s * wide : (s + 1) * wide]
                rr, cc, rd, dd = 0.0, 0.0, 0.0, 0.0
                for j in range(c.size):
                    a, b = U32(c[j]), U32(r[j])
                    # Widen to float32 bits; `scale` then corrects the exponent bias, subnormals
                    # included.
                    ab = U32(U32(U32(a & sign) << sign_shift) | U32(U32(a & magnitude) << shift))
                    bb = U32(U32(U32(b & sign) << sign_shift) | U32(U32(b & magnitude) << shift))
                    x, y = F64(ab.view(F32) * scale), F64(bb.view(F32) * scale)
                    d = x - y
                    rr, cc, rd, dd = rr + y * y, cc + x * x, rd + y * d, dd + d * d
                for k, found in enumerate((rr, cc, rd, dd)):
                    tally.rows[at, k] += found
                    tally.cells[band, s, k] += found

    relaxed = {"reassoc", "nsz", "contract"}  # allow vectorised sums
    return compiled_with(fastmath=relaxed)(compare_rows)
