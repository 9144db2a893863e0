"""Problem and arithmetic of a router: scores of experts, top-k choice, weights.

Scores are sqrt(softplus) or sigmoid, from an exponential and a logarithm whose every rounding is
stated, so that tensors and kernels give the same bits. Experts are chosen by score plus bias,
within the best groups where there are groups, or by a table of token ids.

Ties: the lower expert id first; -0 equals +0; a NaN lies above every number. That is torch's stable
descending sort, by which the references choose. The bias affects the choice alone. Weights are
shares of the chosen scores, summed from the first chosen one on, times a scale. An id outside (a
token's in the table, or an expert's that the table names) gives expert -1, weight 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import ceil_div, round_up
from degarble.kernels.primitives.quantise_problem import LARGEST_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable

LANES = 32
WARPS = 8  # of a thread block: a token each, or all on one
FEW_TOKENS = 64  # up to so many have a thread block each; a choice, of which one token was timed
MOST_EXPERTS = 512
MOST_CHOSEN = 16
SLOT_STEP = 4
SCORINGS = ("sqrtsoftplus", "sigmoid")  # scoring_func of DeepSeek's configs
IDS = ("int32", "int64")
NONE = -1  # expert of an id that lies outside


@dataclass(frozen=True)
class RouterProblem:
    """T tokens with logits of E experts; K are chosen by score, or by a table of token ids."""

    tokens: int
    experts: int
    chosen: int
    scoring: str = "sqrtsoftplus"
    scale: float = 1.0
    epsilon: float = 0.0  # added to the sum of the chosen scores
    normalises: bool = True  # divides by that sum
    groups: int = 1
    groups_kept: int = 1
    vocabulary: int = 0  # rows of the table; 0 chooses by score
    ids: str = "int64"  # of tokens and of the table

    def __post_init__(self) -> None:
        if (
            not 0 <= self.tokens < LARGEST_ROWS
            or not 1 <= self.experts <= MOST_EXPERTS
            or not 1 <= self.chosen <= min(MOST_CHOSEN, self.experts)
            or not 0 <= self.vocabulary < LARGEST_ROWS
        ):
            raise ShapeMismatch(
                "router",
                (self.tokens, self.experts, self.chosen, self.vocabulary),
                f"tokens and table rows below 2**31, 1 to {MOST_EXPERTS} experts, 1 to "
                f"{MOST_CHOSEN} of them chosen",
                "A model with more has no kernel yet.",
            )
        if self.scoring not in SCORINGS:
            raise UnknownName.among("scoring of a router", self.scoring, SCORINGS)
        if self.ids not in IDS:
            raise UnknownName.among("dtype of token ids", self.ids, IDS)
        self._require_groups()

    def _require_groups(self) -> None:
        divides = 1 <= self.groups <= LANES and self.experts % self.groups == 0
        holds = 1 <= self.groups_kept <= self.groups
        if (
            not divides
            or not holds
            or self.groups_kept * (self.experts // self.groups) < self.chosen
            or (self.vocabulary and self.groups > 1)
        ):
            raise InvalidArgument(
                "groups",
                (self.groups, self.groups_kept),
                f"at most {LANES} groups that divide {self.experts} experts, kept ones with at "
                f"least {self.chosen} of them; one where a table chooses",
                "V4 has no groups; V3.2 has 8 and keeps 4.",
            )

    @property
    def experts_of_group(self) -> int:
        """Return the number of adjacent experts in a group."""
        return self.experts // self.groups


@dataclass(frozen=True)
class RouterForm:
    """Compile-time parameters of a kernel; tokens, experts and table come with the launch."""

    slots: int  # experts of a lane
    chosen: int
    scoring: str
    normalises: bool
    groups: int
    groups_kept: int
    by_table: bool
    ids: str
    target: str
    few: bool = False  # tokens, a thread block each

    @property
    def tokens(self) -> int:
        """Return the tokens of a thread block."""
        return 1 if self.few else WARPS

    @property
    def lanes_of_group(self) -> int:
        """Return how many lanes look for the two best experts of a group."""
        return LANES // power_of_two_from(self.groups)


def power_of_two_from(number: int) -> int:
    """Return the least power of two that is at least the number."""
    return 1 << (number - 1).bit_length()


def halvings(lanes: int) -> tuple[int, ...]:
    """Return the distances by which so many neighbouring lanes exchange what they found."""
    return tuple(1 << step for step in range(lanes.bit_length() - 1))


def choose_form(problem: RouterProblem, target: str) -> RouterForm:
    """Return the form for a problem."""
    by_table = problem.vocabulary > 0
    return RouterForm(
        slots=0 if by_table else round_up(ceil_div(problem.experts, LANES), SLOT_STEP),
        chosen=problem.chosen,
        scoring=problem.scoring,
        normalises=problem.normalises,
        groups=problem.groups,
        groups_kept=problem.groups_kept,
        by_table=by_table,
        ids=problem.ids if by_table else IDS[0],
        target=target,
        few=not by_table and problem.tokens <= FEW_TOKENS,
    )


def grid(problem: RouterProblem, form: RouterForm) -> int:
    """Return the number of thread blocks of a launch."""
    blocks: int = ceil_div(problem.tokens, form.tokens)
    return blocks


# ---- the arithmetic of a score -------------------------------------------------------------------

_LOG2_E: Final = 1.4426950408889634
# ln 2 in two parts: the first has nine bits, so that its product with an integer below 151 is exact
_LN2_HIGH: Final = 0.693359375
_LN2_LOW: Final = -2.12194440e-4
_ROUNDER: Final = 12582912.0  # 1.5 * 2**23: a sum with it has the step 1
_ROUNDER_BITS: Final = 0x4B40_0000
_VANISHED: Final = 104.0  # exp(-104) is below half of the smallest subnormal
_EXP_TERMS: Final = tuple(1.0 / n for n in (5040, 720, 120, 24, 6, 2, 1, 1))  # 1 / k!
_LOG_TERMS: Final = tuple(1.0 / n for n in (15, 13, 11, 9, 7, 5, 3))
_THRESHOLD: Final = 20.0  # softplus is its argument beyond: torch's threshold, and the kernels'
_INFINITY: Final = 0x7F80_0000
_MAGNITUDE: Final = 0x7FFF_FFFF
_WORD: Final = 0xFFFF_FFFF
_NAN: Final = 0x7FC0_0000
LOWEST_KEY: Final = 0x007F_FFFF  # of -inf
TAKEN: Final = 0  # a key that no number has


def exp_of_minus(distance: Any) -> Any:
    """Return exp(-distance) of a number from 0 on: 2**-n times a polynomial; a NaN vanishes."""
    distance = ops.minimum(distance, _VANISHED)
    shifted = ops.add_rn(ops.multiply_rn(distance, _LOG2_E), _ROUNDER)
    whole = ops.subtract_rn(shifted, _ROUNDER)
    rest = ops.fma_rn(whole, -_LN2_HIGH, distance)
    rest = -ops.fma_rn(whole, -_LN2_LOW, rest)
    power = _horner(_EXP_TERMS, rest)
    number = ops.bits_of(shifted) - _ROUNDER_BITS
    half = ops.shift_right(number, 1)
    power = ops.multiply_rn(power, _inverse_power_of_two(half))
    return ops.multiply_rn(power, _inverse_power_of_two(number - half))


def log_of_one_plus(number: Any) -> Any:
    """Return log(1 + number) of a number from 0 to 1, by the series of the area tangent."""
    z = ops.divide_rn(number, ops.add_rn(number, 2.0))
    square, twice = ops.multiply_rn(z, z), ops.add_rn(z, z)
    return ops.fma_rn(twice, ops.multiply_rn(square, _horner(_LOG_TERMS, square)), twice)


def sqrt_softplus(logit: Any, square_root: Callable[[Any], Any]) -> Any:
    """Return sqrt(log(1 + e^x)); beyond 20 sqrt(x); NaN of a NaN."""
    tail = log_of_one_plus(exp_of_minus(ops.absolute(logit)))
    soft = ops.add_rn(ops.maximum(logit, 0.0), tail)
    soft = ops.select(logit > _THRESHOLD, logit, soft)
    return square_root(ops.select(_is_nan(logit), logit, soft))


def sigmoid(logit: Any) -> Any:
    """Return 1 / (1 + e^-x), below zero as e^x / (1 + e^x); NaN of a NaN."""
    tail = exp_of_minus(ops.absolute(logit))
    share = ops.divide_rn(ops.select(logit < 0.0, tail, 1.0), ops.add_rn(tail, 1.0))
    return ops.select(_is_nan(logit), logit, share)


def score_of(logit: Any, scoring: str, square_root: Callable[[Any], Any]) -> Any:
    """Return the score of a logit."""
    return sigmoid(logit) if scoring == "sigmoid" else sqrt_softplus(logit, square_root)


def key_of(number: Any) -> Any:
    """Return an integer that sorts as float32: NaN on top, -0 as +0; no key is 0."""
    bits = ops.bits_of(number)
    magnitude = bits & _MAGNITUDE
    negative = ops.select(magnitude == 0, 0x8000_0000, _WORD - bits)
    key = ops.select(bits > _MAGNITUDE, negative, bits + 0x8000_0000)
    # Trap: combined with a constant of 2**31 or more a DSL integer has 64 bits.
    return ops.unsigned(ops.select(magnitude > _INFINITY, _WORD, key))


def number_of_key(key: Any) -> Any:
    """Return a float32 of such a key: the only one, but +0 of both zeros."""
    bits = ops.select(key >= 0x8000_0000, key - 0x8000_0000, _WORD - key)
    return ops.number_of(ops.unsigned(ops.select(key == _WORD, _NAN, bits)))


def _is_nan(number: Any) -> Any:
    return (ops.bits_of(number) & _MAGNITUDE) > _INFINITY


def _inverse_power_of_two(exponent: Any) -> Any:
    return ops.number_of(ops.shift_left(127 - exponent, 23))


def _horner(terms: tuple[float, ...], number: Any) -> Any:
    """Sum a polynomial from its highest term on."""
    total = ops.fma_rn(number, terms[0], terms[1])
    for term in terms[2:]:
        total = ops.fma_rn(total, number, term)
    return total
