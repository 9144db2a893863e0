"""Problems and arithmetic of mHC (hyper-connections): projecting and mixing streams.

Importable without the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.primitives import kv_problem as rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


# --------------------------------------------------------------------------------------------------
# Problem, parts, grid and arithmetic of mHC: mixing four residual streams (hyper-connections).
#
# Parts: coefficients (gates and Sinkhorn), collapse, both in one launch, the collapse at the
# model's end, and spreading a sublayer's output over the streams. The arithmetic of a token is
# written once for scalars, tensors and kernels; exponential, reciprocal and inverse root are
# parameters, because a GPU has its own instructions.
#
# Inputs come from one pass over the streams: products `fn . x` [T, 24] before the norm's factor,
# and the sum of squares [T]. Sums over streams begin with stream 0.

STREAMS = 4  # DeepSeek-V4 config.json, hc_mult
COEFFICIENTS = (2 + STREAMS) * STREAMS
CHUNK_VALUES = 8  # values of a thread's 16-byte loads
MIX_THREADS = 128
# Tokens of which each has four lanes. Every lane of a token does all steps of Sinkhorn, so beyond
# one warp for each quarter of each of an H200's 132 processors more lanes take longer.
MOST_WITH_FOUR = 4224
# Beyond so many tokens a launch waits before it lets the next one be set up: runtime/pdl says why.
MOST_SET_UP_EARLY = 32
SMALLEST_WIDTH, LARGEST_WIDTH = CHUNK_VALUES, 1 << 16
MOST_ITERATIONS = 1000
SPREADS_OUT = "post"
MIX_PARTS = ("all", "coefficients", "collapse", "head", SPREADS_OUT)


@dataclass(frozen=True)
class MhcMixProblem:
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
        if self.part not in MIX_PARTS:
            raise UnknownName.among("part of mHC", self.part, MIX_PARTS)
        if not SMALLEST_WIDTH <= self.width <= LARGEST_WIDTH or self.width % CHUNK_VALUES:
            raise ShapeMismatch(
                "width of a stream",
                self.width,
                f"{SMALLEST_WIDTH} to {LARGEST_WIDTH} in a multiple of {CHUNK_VALUES}",
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
class MhcMixForm:
    """Compile-time parameters of a kernel; extents come with the launch."""

    part: str
    target: str
    lanes: int = STREAMS  # of a token, which share its rows and gates
    ends_early: bool = False  # whether Sinkhorn ends where it stands still: pays for few tokens
    waits_first: bool = False  # before it lets the next launch be set up

    @property
    def makes_coefficients(self) -> bool:
        """Return whether post and mix are written."""
        return self.part in {"all", "coefficients"}

    @property
    def gates(self) -> tuple[int, ...]:
        """Return the groups of gates that lanes of a token compute, that of post first."""
        return (1, 0) if self.part == "coefficients" else (1,)

    @property
    def reads_early(self) -> bool:
        """Return whether lanes read weights, and compute addresses, before the wait."""
        return self.makes_coefficients and self.lanes == STREAMS

    @property
    def touches_streams(self) -> bool:
        """Return whether streams are read."""
        return self.part != "coefficients"


def groups_of_chunks(problem: MhcMixProblem) -> int:
    """Return the number of thread blocks that share a token's streams."""
    groups: int = ceil_div(problem.width, CHUNK_VALUES * MIX_THREADS)
    return groups


def choose_mix_form(problem: MhcMixProblem, target: str) -> MhcMixForm:
    """Return the form for a problem: by the part, and by some or many tokens."""
    tokens = problem.tokens if MhcMixForm(problem.part, "").makes_coefficients else 0
    lanes = 2 if tokens > MOST_WITH_FOUR else STREAMS
    waits_first = tokens > MOST_SET_UP_EARLY
    return MhcMixForm(problem.part, target, lanes, waits_first=waits_first)


def leading_blocks(problem: MhcMixProblem) -> int:
    """Return the number of thread blocks of coefficients; they are the first of a launch."""
    blocks: int = ceil_div(problem.tokens * choose_mix_form(problem, "").lanes, MIX_THREADS)
    return blocks if MhcMixForm(problem.part, "").makes_coefficients else 0


def mix_grid(problem: MhcMixProblem) -> int:
    """Return the number of thread blocks of a launch; raise where a grid does not hold them."""
    form = MhcMixForm(problem.part, "")
    of_streams = problem.tokens * groups_of_chunks(problem) * form.touches_streams
    blocks = leading_blocks(problem) + of_streams
    rows.require_extent("thread blocks of a launch", blocks)
    return blocks


# ---- the arithmetic of a token: float32 scalars, tensors, kernels --------------------------------


@dataclass(frozen=True)
class MhcMixPrimitives:
    """Functions for which a processor has its own instruction."""

    exponential: Callable[[Any], Any]
    reciprocal: Callable[[Any], Any]
    inverse_root: Callable[[Any], Any]


def norm_factor(squares: Any, share: Any, epsilon: Any, primitives: MhcMixPrimitives) -> Any:
    """Return 1 / sqrt(squares * share + epsilon); `share` is one over the number of values."""
    return primitives.inverse_root(ops.add_rn(ops.multiply_rn(squares, share), epsilon))


def logit(product: Any, factor: Any, scale: Any, base: Any) -> Any:
    """Return a coefficient before its gate or its softmax."""
    return ops.fma_rn(ops.multiply_rn(product, factor), scale, base)


def gate(number: Any, primitives: MhcMixPrimitives) -> Any:
    """Return the logistic function."""
    # 1 / (1 + e**-x).
    power = primitives.exponential(ops.multiply_rn(number, -1.0))
    return primitives.reciprocal(ops.add_rn(power, 1.0))


def total(numbers: Sequence[Any]) -> Any:
    """Sum four numbers: the first two, the last two, then both."""
    first, second, third, fourth = numbers
    return ops.add_rn(ops.add_rn(first, second), ops.add_rn(third, fourth))


def softmax_row(row: Sequence[Any], epsilon: Any, primitives: MhcMixPrimitives) -> list[Any]:
    """Return the softmax of four numbers, plus epsilon."""
    peak = ops.maximum(ops.maximum(row[0], row[1]), ops.maximum(row[2], row[3]))
    powers = [primitives.exponential(ops.subtract_rn(number, peak)) for number in row]
    share = primitives.reciprocal(total(powers))
    return [ops.add_rn(ops.multiply_rn(power, share), epsilon) for power in powers]


def reciprocals(numbers: Sequence[Any], primitives: MhcMixPrimitives) -> list[Any]:
    """Return one over each number."""
    return [primitives.reciprocal(number) for number in numbers]


def divisors(
    lines: Sequence[Sequence[Any]], factors: Sequence[Any], before: Sequence[Any], epsilon: Any
) -> list[Any]:
    """Return the divisors of lines, given the factors across and the previous divisors.

    A line of the mix is its powers times factors over its previous divisor. Its sum plus epsilon
    divides it again, so the divisor becomes the sum without it, plus epsilon of itself.
    """
    made = [ops.multiply_rn(epsilon, old) for old in before]
    for place, factor in enumerate(factors):  # a factor for all lines: none waits for another line
        made = [
            ops.fma_rn(line[place], factor, number)
            for line, number in zip(lines, made, strict=True)
        ]
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


def times(numbers: Sequence[Any], factor: Any) -> list[Any]:
    """Return each number times a factor."""
    return [ops.multiply_rn(number, factor) for number in numbers]


def rows_divided(
    powers: Sequence[Sequence[Any]], numbers: tuple[Any, ...]
) -> tuple[list[Any], list[Any], Any]:
    """Return the rows' divisors, the product of the others for each, and the product of all.

    Told: columns' factors, last divisors, epsilon. Each product is one over the row's divisor, but
    for the product of all, which scales what follows and cancels: a reciprocal takes longer.
    """
    found = divisors(powers, *numbers)
    first, second = (ops.multiply_rn(*found[at : at + 2]) for at in (0, 2))
    shares = [
        *times((found[1], found[0]), second),
        *times((found[3], found[2]), first),
    ]
    return found, shares, ops.multiply_rn(first, second)


def columns_divided(
    columns: Sequence[Sequence[Any]], numbers: tuple[Any, ...], primitives: MhcMixPrimitives
) -> tuple[list[Any], list[Any]]:
    """Return the columns' divisors and one over each, both scaled as the rows' factors are.

    Told: rows' factors, epsilon of the last divisors, their scale now.
    """
    found = divisors(columns, *numbers)
    return found, reciprocals(found, primitives)


def scaled_row(row: Sequence[Any], share: Any, factors: Sequence[Any]) -> list[Any]:
    """Return a row of the mix from its powers, its own factor and those of the columns."""
    return [
        ops.multiply_rn(ops.multiply_rn(power, share), factor)
        for power, factor in zip(row, factors, strict=True)
    ]


@dataclass(frozen=True)
class SinkhornState:
    """What an iteration leaves: divisors and factors of lines, the columns' scale, its inverse."""

    of_rows: Sequence[Any]
    shares: Sequence[Any]
    of_columns: Sequence[Any]
    factors: Sequence[Any]
    scale: Any
    inverse: Any


def sinkhorn_begun(
    columns: Sequence[Sequence[Any]], epsilon: Any, primitives: MhcMixPrimitives
) -> SinkhornState:
    """Return what the first iteration leaves: the softmax divided by rows, columns follow."""
    found = columns_at_first(columns, epsilon)
    ones = [1.0] * STREAMS
    return SinkhornState(ones, ones, found, reciprocals(found, primitives), 1.0, 1.0)


def sinkhorn_step(
    lines: tuple[Sequence[Sequence[Any]], Sequence[Sequence[Any]]],
    state: SinkhornState,
    epsilon: Any,
    primitives: MhcMixPrimitives,
) -> SinkhornState:
    """Divide by rows, then by columns; `lines` are the powers' rows and columns."""
    powers, columns = lines
    # Epsilon of the columns' divisors, without their scale.
    kept = times(state.of_columns, ops.multiply_rn(epsilon, state.inverse))
    numbers = (times(state.factors, state.scale), state.of_rows, epsilon)
    of_rows, shares, scale = rows_divided(powers, numbers)
    divided = columns_divided(columns, (shares, kept, scale), primitives)
    return SinkhornState(of_rows, shares, *divided, scale, primitives.reciprocal(scale))


def sinkhorn(
    logits: Sequence[Any], iterations: int, epsilon: Any, primitives: MhcMixPrimitives
) -> list[list[Any]]:
    """Return the rows of the mix; the iterations update factors, not the mix itself."""
    starts = range(0, STREAMS * STREAMS, STREAMS)
    powers = [softmax_row(logits[at : at + STREAMS], epsilon, primitives) for at in starts]
    columns = list(zip(*powers, strict=True))
    state = sinkhorn_begun(columns, epsilon, primitives)
    for _ in range(1, iterations):
        state = sinkhorn_step((powers, columns), state, epsilon, primitives)
    rows_and_shares = zip(powers, state.shares, strict=True)
    return [scaled_row(row, share, state.factors) for row, share in rows_and_shares]


def weighted(weights: Sequence[Any], numbers: Sequence[Any]) -> Any:
    """Sum products, from the first on, in float32."""
    result = ops.multiply_rn(weights[0], numbers[0])
    for weight, number in zip(weights[1:], numbers[1:], strict=True):
        result = ops.fma_rn(weight, number, result)
    return result


# --------------------------------------------------------------------------------------------------
# Problem, split weights and sum order of projecting four streams onto mHC's coefficients.
#
# T tokens of K = 4 D values against 24 rows (the head: 4). A float32 weight is split into three
# BF16 parts whose sum it is, so that matrix units multiply it without loss.
#
# K is cut into pieces by its length alone. A piece is summed by the matrix unit, sixteen values at
# a time, all three parts into one float32 sum. Pieces are added in groups, four groups in a span,
# spans to the whole, each in turn from zero. Which thread block computes a piece, and which sums go
# through memory, depends on T; no bit of the result does. Shape letters: T tokens, S streams, D
# width, N rows, K = S D.

BF16_PARTS = 3  # BF16 numbers that are one float32: 24 bits of significand in three times 8
STEP = 64  # values of K of a stage; zeros past the end of K
MOST_PIECES = 448  # a step each at V4-Pro's width: then no sum of the matrix unit waits for long
MOST_GROUPS = 16
MOST_IN_GROUP = MOST_PIECES // MOST_GROUPS
SPAN = 4  # groups
MOST_SPANS = MOST_GROUPS // SPAN
LINE = 32  # float32 numbers of a partial sum: products, then at SQUARES the sum of squares
SQUARES = 24
ROWS_OF_TILE = 16  # tokens of an instruction
TILE = 8  # rows of the weight of an instruction
STAGES = 3  # of shared memory: two are on their way, and a third takes longer
ROW_BYTES = 2 * STEP
ROWS_OF_BLOCK = 128  # tokens that many warps share
FEW_TOKENS = 512  # up to here a warp has sixteen tokens by itself
LEAST_TOKENS = 32  # up to here it has a piece of K, beyond that a group
WANTED_BLOCKS = 256  # where spans make so many: two a processor of an H200, all of them at once
WEIGHTS = {"layer": COEFFICIENTS, "head": STREAMS}


@dataclass(frozen=True)
class ProjectProblem:
    """T tokens of four streams of D values; `kind` says how many rows there are."""

    tokens: int
    width: int
    kind: str = "layer"

    def __post_init__(self) -> None:
        if self.kind not in WEIGHTS:
            raise UnknownName.among("projection of mHC", self.kind, WEIGHTS)
        MhcMixProblem(self.tokens, self.width)  # refuses what the parts refuse
        rows.require_extent("numbers of partial sums", self.tokens * MOST_GROUPS * LINE)

    @property
    def inner(self) -> int:
        """Return K, the number of summed values."""
        return STREAMS * self.width

    @property
    def products(self) -> int:
        """Return the number of products of a token."""
        return WEIGHTS[self.kind]

    @property
    def weight_rows(self) -> int:
        """Return the number of rows of the split weight, padding included."""
        return rows_of(self.kind)

    @property
    def partials(self) -> int:
        """Return the number of partial sums of a token in memory."""
        cut = InnerCut(self.inner)
        return {"pieces": cut.pieces, "groups": cut.groups, "spans": cut.spans}[self.lines]

    @property
    def lines(self) -> str:
        """Return which partial sums of a token go through memory."""
        if self.tokens <= LEAST_TOKENS:
            return "pieces"
        blocks = InnerCut(self.inner).spans * ceil_div(self.tokens, ROWS_OF_BLOCK)
        return "spans" if blocks >= WANTED_BLOCKS else "groups"

    @property
    def bytes_moved(self) -> int:
        """Return the fewest bytes: streams and weight read once, products and squares written."""
        weight = 2 * BF16_PARTS * self.products * self.inner
        return self.tokens * (2 * self.inner + 4 * (self.products + 1)) + weight


@dataclass(frozen=True)
class InnerCut:
    """Cut of K into steps, pieces, groups and spans; a function of K alone."""

    inner: int

    @property
    def steps(self) -> int:
        """Return the number of steps of K; the last may have half of its values."""
        steps: int = ceil_div(self.inner, STEP)
        return steps

    @property
    def per_piece(self) -> int:
        """Return the number of steps of a piece; the last may have fewer."""
        steps: int = ceil_div(self.steps, MOST_PIECES)
        return steps

    @property
    def pieces(self) -> int:
        """Return the number of pieces of K."""
        count: int = ceil_div(self.steps, self.per_piece)
        return count

    @property
    def per_group(self) -> int:
        """Return the number of pieces of a group; the last may have fewer."""
        pieces: int = ceil_div(self.pieces, MOST_GROUPS)
        return pieces

    @property
    def groups(self) -> int:
        """Return the number of groups of pieces."""
        count: int = ceil_div(self.pieces, self.per_group)
        return count

    @property
    def spans(self) -> int:
        """Return the number of spans of groups."""
        count: int = ceil_div(self.groups, SPAN)
        return count


@dataclass(frozen=True)
class ProjectForm:
    """Compile-time parameters of a kernel; extents come with the launch."""

    kind: str
    few: bool
    target: str
    lines: str = "groups"  # which sums of a token go through memory
    one_step: bool = False  # whether a warp has no more than one step of K

    @property
    def tiles(self) -> int:
        """Return the number of tiles of weight rows, of each part."""
        return rows_of(self.kind) // TILE

    @property
    def tokens_of_warp(self) -> int:
        """Return the number of tokens of a warp."""
        return ROWS_OF_TILE * (1 if self.few else 2)

    @property
    def warps(self) -> int:
        """Return the number of warps of a thread block: they share the weight's lines."""
        return 1 if self.few else 4

    @property
    def stage_rows(self) -> int:
        """Return the number of rows of a stage: tokens, then all parts of the weight."""
        return self.tokens_of_block + BF16_PARTS * rows_of(self.kind)

    @property
    def rows_at_once(self) -> int:
        """Return the rows of a stage that a thread block fetches at once, 16 bytes a thread."""
        return 32 * self.warps * 16 // ROW_BYTES

    @property
    def shared_bytes(self) -> int:
        """Return the shared memory of a thread block."""
        return (1 if self.one_step else STAGES) * self.stage_rows * ROW_BYTES

    @property
    def tokens_of_block(self) -> int:
        """Return the number of tokens of a thread block."""
        return self.tokens_of_warp * self.warps


def rows_of(kind: str) -> int:
    """Return rows of a split weight, padded to a tile."""
    padded: int = ceil_div(WEIGHTS[kind], TILE) * TILE
    return padded


def choose_form(problem: ProjectProblem, target: str) -> ProjectForm:
    """Return the form for a problem; it depends on the number of tokens, and on steps of K."""
    few = problem.tokens <= FEW_TOKENS
    one_step = problem.lines == "pieces" and InnerCut(problem.inner).per_piece == 1
    return ProjectForm(problem.kind, few, target, problem.lines, one_step)


def chunk_place(row: Any, chunk: Any) -> Any:
    """Return where a row's 16-byte chunk lies in its 128 bytes.

    Eight neighbouring rows have a chunk at eight places, so ldmatrix reads from all banks.
    """
    return chunk ^ (row % TILE)


def project_grid(problem: ProjectProblem, form: ProjectForm) -> tuple[int, int]:
    """Return the thread blocks: along x pieces, groups or spans, along y tokens."""
    return problem.partials, ceil_div(problem.tokens, form.tokens_of_block)


def split_weight(fn_NK: Tensor) -> Tensor:
    """Return BF16 [3, N, K] whose sum over the first axis is the float32 weight; N is padded.

    A number below 2**-100 may lose its last bits.
    """
    kind = next((name for name, count in WEIGHTS.items() if count == fn_NK.shape[0]), "")
    if not kind:
        raise UnknownName.among("rows of mHC's weight", str(fn_NK.shape[0]), WEIGHTS)
    made = fn_NK.new_zeros(BF16_PARTS, rows_of(kind), fn_NK.shape[1], dtype=torch.bfloat16)
    rest = fn_NK.float()
    for part in range(BF16_PARTS):
        made[part, : rest.shape[0]] = rest.bfloat16()
        rest = rest - rest.bfloat16().float()
    return made
