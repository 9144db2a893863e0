"""Problem, parts, grid and arithmetic of mHC: mixing four residual streams (hyper-connections).

Parts: coefficients (gates and Sinkhorn), collapse, both in one launch, the collapse at the model's
end, and spreading a sublayer's output over the streams. The arithmetic of a token is written once
for scalars, tensors and kernels; exponential, reciprocal and inverse root are parameters, because a
GPU has its own instructions.

Inputs come from one pass over the streams: products `fn . x` [T, 24] before the norm's factor, and
the sum of squares [T]. Sums over streams begin with stream 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.primitives import attention_rows as rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STREAMS = 4  # DeepSeek-V4 config.json, hc_mult
COEFFICIENTS = (2 + STREAMS) * STREAMS
CHUNK = 8  # values of a thread's 16-byte loads
THREADS = 128
SMALLEST_WIDTH, LARGEST_WIDTH = CHUNK, 1 << 16
MOST_ITERATIONS = 1000
SPREADS_OUT = "post"
PARTS = ("all", "coefficients", "collapse", "head", SPREADS_OUT)


@dataclass(frozen=True)
class MixProblem:
    """T tokens of four streams of D values each; `part` names the operation."""

    tokens: int
    width: int
    part: str = "all"
    iterations: int = 20
    epsilon: float = 1e-6
    norm_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        rows.require_extent("lanes of all tokens", self.tokens * STREAMS)
        rows.require_epsilon(self.epsilon)
        rows.require_epsilon(self.norm_epsilon)
        if self.part not in PARTS:
            raise UnknownName.among("part of mHC", self.part, PARTS)
        if not SMALLEST_WIDTH <= self.width <= LARGEST_WIDTH or self.width % CHUNK:
            raise ShapeMismatch(
                "width of a stream",
                self.width,
                f"{SMALLEST_WIDTH} to {LARGEST_WIDTH} in a multiple of {CHUNK}",
                "Pad the streams with zeros; the norm divides by the width that is said.",
            )
        if not 1 <= self.iterations <= MOST_ITERATIONS:
            raise InvalidArgument(
                "Sinkhorn iterations",
                self.iterations,
                f"1 to {MOST_ITERATIONS}",
                "DeepSeek-V4 has 20; the first is softmax and columns.",
            )

    @property
    def products(self) -> int:
        """Return the number of products of the projection that are read for a token."""
        return {"collapse": 0, SPREADS_OUT: 0, "head": STREAMS}.get(self.part, COEFFICIENTS)

    @property
    def bytes_moved(self) -> int:
        """Return the fewest bytes that have to be read and written: every input and output once."""
        row, gates = 2 * self.width, 4 * STREAMS
        mix = 4 * STREAMS * STREAMS
        read_products = 4 * (self.products + 1)
        each = {
            "all": read_products + (STREAMS + 1) * row + gates + mix,
            "coefficients": read_products + 2 * gates + mix,
            "collapse": gates + (STREAMS + 1) * row,
            "head": read_products + (STREAMS + 1) * row,
            SPREADS_OUT: gates + mix + (2 * STREAMS + 1) * row,
        }
        return self.tokens * each[self.part]


@dataclass(frozen=True)
class MixForm:
    """Compile-time parameters of a kernel; extents come with the launch."""

    part: str
    target: str

    @property
    def makes_coefficients(self) -> bool:
        """Return whether post and mix are written."""
        return self.part in {"all", "coefficients"}

    @property
    def touches_streams(self) -> bool:
        """Return whether streams are read."""
        return self.part != "coefficients"


def groups_of_chunks(problem: MixProblem) -> int:
    """Return the number of thread blocks that share a token's streams."""
    groups: int = ceil_div(problem.width, CHUNK * THREADS)
    return groups


def leading_blocks(problem: MixProblem) -> int:
    """Return the number of thread blocks of coefficients, four lanes a token; first in a launch."""
    blocks: int = ceil_div(problem.tokens * STREAMS, THREADS)
    return blocks if MixForm(problem.part, "").makes_coefficients else 0


def grid(problem: MixProblem) -> int:
    """Return the number of thread blocks of a launch; raise where a grid does not hold them."""
    form = MixForm(problem.part, "")
    of_streams = problem.tokens * groups_of_chunks(problem) * form.touches_streams
    blocks = leading_blocks(problem) + of_streams
    rows.require_extent("thread blocks of a launch", blocks)
    return blocks


# ---- the arithmetic of a token: float32 scalars, tensors, kernels --------------------------------


@dataclass(frozen=True)
class Primitives:
    """Functions for which a processor has its own instruction."""

    exponential: Callable[[Any], Any]
    reciprocal: Callable[[Any], Any]
    inverse_root: Callable[[Any], Any]


def norm_factor(squares: Any, share: Any, epsilon: Any, primitives: Primitives) -> Any:
    """Return 1 / sqrt(squares * share + epsilon); `share` is one over the number of values."""
    return primitives.inverse_root(ops.add_rn(ops.multiply_rn(squares, share), epsilon))


def logit(product: Any, factor: Any, scale: Any, base: Any) -> Any:
    """Return a coefficient before its gate or its softmax."""
    return ops.fma_rn(ops.multiply_rn(product, factor), scale, base)


def gate(number: Any, primitives: Primitives) -> Any:
    """Return the logistic function."""
    # 1 / (1 + e**-x).
    power = primitives.exponential(ops.multiply_rn(number, -1.0))
    return primitives.reciprocal(ops.add_rn(power, 1.0))


def total(numbers: Sequence[Any]) -> Any:
    """Sum four numbers: the first two, the last two, then both."""
    first, second, third, fourth = numbers
    return ops.add_rn(ops.add_rn(first, second), ops.add_rn(third, fourth))


def softmax_row(row: Sequence[Any], epsilon: Any, primitives: Primitives) -> list[Any]:
    """Return the softmax of four numbers, plus epsilon."""
    peak = ops.maximum(ops.maximum(row[0], row[1]), ops.maximum(row[2], row[3]))
    powers = [primitives.exponential(ops.subtract_rn(number, peak)) for number in row]
    share = primitives.reciprocal(total(powers))
    return [ops.add_rn(ops.multiply_rn(power, share), epsilon) for power in powers]


def reciprocals(numbers: Sequence[Any], primitives: Primitives) -> list[Any]:
    """Return one over each number."""
    return [primitives.reciprocal(number) for number in numbers]


def divisors(
    lines: Sequence[Sequence[Any]], factors: Sequence[Any], before: Sequence[Any], epsilon: Any
) -> list[Any]:
    """Return the divisors of lines, given the factors across and the previous divisors.

    A line of the mix is its powers times factors over its previous divisor. Its sum plus epsilon
    divides it again, so the divisor becomes the sum without it, plus epsilon of itself.
    """
    made = []
    for line, old in zip(lines, before, strict=True):
        number = ops.multiply_rn(epsilon, old)
        for power, factor in zip(line, factors, strict=True):
            number = ops.fma_rn(power, factor, number)
        made.append(number)
    return made


def columns_at_first(columns: Sequence[Sequence[Any]], epsilon: Any) -> list[Any]:
    """Return the columns' divisors before any division: their sums and epsilon."""
    made = []
    for column in columns:
        number = epsilon
        for power in column:
            number = ops.add_rn(power, number)
        made.append(number)
    return made


def rows_divided(
    powers: Sequence[Sequence[Any]], told: tuple[Any, ...], primitives: Primitives
) -> tuple[list[Any], list[Any]]:
    """Return the rows' divisors and factors; told: columns' factors, last divisors, epsilon."""
    found = divisors(powers, *told)
    return found, reciprocals(found, primitives)


def columns_divided(
    columns: Sequence[Sequence[Any]], told: tuple[Any, ...], primitives: Primitives
) -> tuple[list[Any], list[Any]]:
    """Return the columns' divisors and factors; told: rows' factors, last divisors, epsilon."""
    found = divisors(columns, *told)
    return found, reciprocals(found, primitives)


def scaled_row(row: Sequence[Any], share: Any, factors: Sequence[Any]) -> list[Any]:
    """Return a row of the mix from its powers, its own factor and those of the columns."""
    return [
        ops.multiply_rn(ops.multiply_rn(power, share), factor)
        for power, factor in zip(row, factors, strict=True)
    ]


def sinkhorn(
    logits: Sequence[Any], iterations: int, epsilon: Any, primitives: Primitives
) -> list[list[Any]]:
    """Return the rows of the mix; the iterations update factors, not the mix itself."""
    # The softmax is the first division by rows; the first by columns follows.
    starts = range(0, STREAMS * STREAMS, STREAMS)
    powers = [softmax_row(logits[at : at + STREAMS], epsilon, primitives) for at in starts]
    columns = list(zip(*powers, strict=True))
    of_rows = shares = [1.0] * STREAMS
    of_columns = columns_at_first(columns, epsilon)
    factors = reciprocals(of_columns, primitives)
    for _ in range(1, iterations):
        told = (factors, of_rows, epsilon)
        of_rows, shares = rows_divided(powers, told, primitives)
        told = (shares, of_columns, epsilon)
        of_columns, factors = columns_divided(columns, told, primitives)
    return [scaled_row(row, share, factors) for row, share in zip(powers, shares, strict=True)]


def weighted(weights: Sequence[Any], numbers: Sequence[Any]) -> Any:
    """Sum products, from the first on, in float32."""
    result = ops.multiply_rn(weights[0], numbers[0])
    for weight, number in zip(weights[1:], numbers[1:], strict=True):
        result = ops.fma_rn(weight, number, result)
    return result
