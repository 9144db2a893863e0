"""Problem, form and row arithmetic of preparing the indexer's queries and keys.

A row has 128 values: optional LayerNorm, stored; optional rotation of 64 of them, stored; optional
Hadamard transform, stored; then rounding as the sources have it: none, FP8 with one scale a row, or
MXFP4 with one scale for 32 values. Scales are powers of two, rounded up from amax. Stored means
rounded to BF16, nearest even. MXFP4's scale and rounding run on tensors as well as in kernels.

Eight lanes have a row, 16 adjacent values each. The order of every sum is fixed: LayerNorm's in a
lane from the first value on, then lanes folded by distance 4, 2, 1; Hadamard's by distance 1, 2, 4
up to 64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.primitives.e2m1_words import OPERATORS, SIGN_AND_EXPONENT, Primitives

WIDTH = 128
LANES = 8  # of a row
OF_LANE = WIDTH // LANES
ROWS_OF_WARP = 32 // LANES
WARPS = 8
ROWS = WARPS * ROWS_OF_WARP  # of a thread block
TURNED = 64  # values of a row
PAIRS = TURNED // 2
TABLE_WIDTH = TURNED  # 32 cosines, 32 sines
LARGEST = 1 << 31
PAIRINGS = ("none", "interleaved", "halves")  # V4: the last 64, (2i, 2i + 1); V3.2: the first 64
FORMATS = ("exact", "fp8", "mxfp4")
BLOCKS = {"fp8": WIDTH, "mxfp4": 32}
HADAMARD_FACTOR = WIDTH**-0.5
SMALLEST_MXFP4_AMAX: Final = 6.0 * 2.0**-126
NAN_CODE = 255  # of a UE8M0 scale
NAN_BF16 = 0x7F80  # amax from here on makes its block NaN: infinities as well
_SIGN: Final = 0x8000_0000
_SUMMAND: Final = 2.0**22


@dataclass(frozen=True)
class OperandProblem:
    """T tokens of N rows each; positions are rows of the RoPE table, 0 without rotation."""

    tokens: int
    heads: int
    pairing: str
    format: str
    hadamard: bool = False
    coded: bool = False  # FP8 codes and scales leave, not the BF16 values that they stand for
    normed: bool = False
    positions: int = 0
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        if self.pairing not in PAIRINGS:
            raise UnknownName.among("pairing of the indexer", self.pairing, PAIRINGS)
        if self.format not in FORMATS:
            raise UnknownName.among("format of the indexer", self.format, FORMATS)
        if self.coded and self.format != "fp8":
            raise InvalidArgument(
                "coded", self.format, "codes of fp8 alone", "MXFP4 is multiplied as BF16 values."
            )
        if not (self.tokens >= 0 and self.heads >= 1 and self.rows < LARGEST):
            raise ShapeMismatch(
                "tokens, heads", (self.tokens, self.heads), "below 2**31 rows", "Split the launch."
            )
        if (self.positions > 0) is not (self.pairing != "none") or self.positions >= LARGEST:
            raise ShapeMismatch(
                "positions of the table of turns",
                self.positions,
                "a table exactly where rows are turned",
                f"The pairing is {self.pairing}.",
            )
        if not 0 <= self.epsilon < 1:
            raise InvalidArgument("epsilon", self.epsilon, "from 0 up to 1", "Models have 1e-6.")

    @property
    def rows(self) -> int:
        """Return the number of rows of 128 values."""
        return self.tokens * self.heads

    @property
    def bytes_moved(self) -> int:
        """Return the fewest bytes: rows in, values or codes out, a table's row a token."""
        out = WIDTH + 4 if self.coded else 2 * WIDTH
        turns = (4 * TABLE_WIDTH + 8) * (self.pairing != "none")
        return self.rows * (2 * WIDTH + out) + self.tokens * turns


@dataclass(frozen=True)
class OperandForm:
    """Compile-time parameters of a kernel; extents come with the launch."""

    target: str
    pairing: str
    format: str
    hadamard: bool
    coded: bool
    normed: bool


def choose_form(problem: OperandProblem, target: str) -> OperandForm:
    """Return the form for a problem."""
    p = problem
    return OperandForm(target, p.pairing, p.format, p.hadamard, p.coded, p.normed)


def grid(problem: OperandProblem) -> int:
    """Return the number of thread blocks: a warp has four rows."""
    found: int = ceil_div(problem.rows, ROWS)
    return found


# ---- arithmetic of a block -----------------------------------------------------------------------


def mxfp4_scale_code(amax_bits: Any) -> Any:
    """Return the UE8M0 code of a block whose largest magnitude has these BF16 bits."""
    amax = ops.maximum(codecs.bf16_decode(amax_bits), SMALLEST_MXFP4_AMAX)
    bits = ops.bits_of(ops.multiply_rn(amax, codecs.ONE_SIXTH))  # positive and normal
    code = ops.shift_right(bits + 0x7F_FFFF, 23)
    return ops.select(amax_bits >= NAN_BF16, NAN_CODE, code)


def mxfp4_number(number: Any, how: Primitives = OPERATORS) -> Any:
    """Round a scaled number to the nearest E2M1 value, ties to even, 6 at most, sign kept.

    Adding 2**22 times the number's power of two (at least 1) leaves steps of half that power.
    """
    bounded = how.limited(number)
    sign_and_power = ops.number_of(ops.bits_of(bounded) & how.constant(SIGN_AND_EXPONENT))
    power = how.at_least_one(sign_and_power)
    rounded = ops.fma_rn(power, -_SUMMAND, ops.fma_rn(power, _SUMMAND, bounded))
    return ops.number_of(ops.bits_of(rounded) | (ops.bits_of(number) & how.constant(_SIGN)))
