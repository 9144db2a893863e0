"""Problems, forms and arithmetic of row kernels: norms, RoPE, embedding, scaling.

Importable without the DSL; the arithmetic of a row is written once for kernels and tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import LINEAR, ceil_div, round_up, scale_layout
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.quantise_problem import (
    BLOCK,
    LARGEST_ROWS,
    LAYOUTS,
    REGISTERS_OF_PROCESSOR,
)
from degarble.kernels.runtime.targets import TARGETS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


# --------------------------------------------------------------------------------------------------
# RMSNorm, with or without NVFP4 quantisation.
#
# The order of the sum is a function of K alone. A lane holds two blocks of 16 values, T lanes
# apart. It sums each half of a block from its first value on by fma, adds both halves, then both
# blocks; 32 lanes are folded by distance 16, 8, 4, 2, 1, that is lane i and lane i + 16 first; 16
# warps by 8, 4, 2, 1, absent ones being 0. So a row's bits depend on neither M nor the other rows.

HALF_BLOCK = BLOCK // 2
SLOTS_OF_LANE = 2  # blocks of a lane
PROCESSOR_QUARTERS = 4  # of a processor: each has a quarter of its registers, for warps of its own
LANES = 32
NARROW_WARPS = 8  # of a thread block where a warp has rows of its own
USUAL_WARPS = 7  # of rows up to 7168 wide
OF_WHOLE_WARP = LANES * SLOTS_OF_LANE * BLOCK  # columns of a warp of which each lane has its blocks
BLOCKS_OF_WHOLE_WARP = OF_WHOLE_WARP // BLOCK
WHOLE_ROW_THREADS = 896  # by which registers are bounded where rows are whole lines: 72 a thread
CODED_ROW_THREADS = 1024  # where their codes alone are written: 64 a thread
LIGHT_WARPS = 8  # of a whole row up to which its codes need no more than those 64
MOST_CODED_WARPS = 14  # up to which they need no more than 72
MOST_KEPT_WARPS = 8  # up to which codes and values need no more than 72
ROWS_TOGETHER = 4  # of seven warps, which fill a processor
LEAST_TOGETHER = 512  # rows from which they do: about what all processors hold
MOST_WARPS = 16
SMALLEST_COLUMNS, LARGEST_COLUMNS = 64, MOST_WARPS * LANES * SLOTS_OF_LANE * BLOCK
NORM_WEIGHTS = ("bf16", "fp32")


@dataclass(frozen=True)
class NormProblem:
    """M rows of K BF16 values; normed, and quantised where a layout of scales is named."""

    rows: int
    columns: int
    epsilon: float = 1e-6
    weight: str = "bf16"
    layout: str | None = None  # of NVFP4 scales; None writes the normed values alone
    keeps_values: bool = False  # whether the normed values are written as well as the codes
    decoded: bool = False  # whether beside them BF16 of what their NVFP4 codes stand for is written

    def __post_init__(self) -> None:
        if (
            not 0 <= self.rows < LARGEST_ROWS
            or not SMALLEST_COLUMNS <= self.columns <= LARGEST_COLUMNS
            or self.columns % BLOCK
        ):
            raise ShapeMismatch(
                "matrix to norm",
                (self.rows, self.columns),
                f"rows below 2**31, columns {SMALLEST_COLUMNS} to {LARGEST_COLUMNS} in a multiple "
                f"of {BLOCK}",
                "Wider rows have no kernel yet.",
            )
        if self.weight not in NORM_WEIGHTS:
            raise UnknownName.among("dtype of a norm's weight", self.weight, NORM_WEIGHTS)
        if self.layout is not None and self.layout not in LAYOUTS:
            scale_layout(self.layout)
            raise UnknownName.among("scale layout of a kernel", self.layout, LAYOUTS)
        if not 0 <= self.epsilon < 1:
            raise InvalidArgument(
                "epsilon", self.epsilon, "a number from 0 up to 1", "Models have 1e-6 or 1e-20."
            )
        if self.decoded and self.layout is not None:
            raise InvalidArgument(
                "layout", self.layout, "none beside decoded values", "Ask for codes, or for these."
            )
        if self.keeps_values and self.layout is None:
            raise InvalidArgument(
                "keeps_values",
                True,
                "a layout of scales",
                "Without one, the values are the result.",
            )

    @property
    def writes_values(self) -> bool:
        """Return whether normed BF16 values are among the outputs."""
        return self.layout is None or self.keeps_values

    @property
    def blocks(self) -> int:
        """Return the number of blocks of a row that share a scale."""
        return self.columns // BLOCK

    @property
    def padded_rows(self) -> int:
        """Return the rows that the launch walks: scale padding is written like the rest."""
        return round_up(self.rows, LAYOUTS[self.layout].row_tile) if self.layout else self.rows

    @property
    def scale_bytes(self) -> int:
        """Return the bytes of the scales, padding included."""
        size: int = LAYOUTS[self.layout].storage_size(self.rows, self.blocks) if self.layout else 0
        return size

    @property
    def bytes_moved(self) -> int:
        """Return the fewest bytes that have to be read and written: every input and output once."""
        numbers = self.rows * self.columns
        weight = self.columns * (4 if self.weight == "fp32" else 2)
        codes = numbers // 2 if self.layout else 0
        written = 2 * numbers * (self.writes_values + self.decoded)
        return 2 * numbers + weight + codes + self.scale_bytes + written


@dataclass(frozen=True)
class NormForm:
    """Compile-time parameters of a kernel; extents come with the launch."""

    weight: str
    layout: str | None
    keeps_values: bool
    narrow: bool  # a warp has its rows, not a thread block
    most_warps: int  # of a thread block: bounds registers
    roomy: bool  # whether unpacked weights and values have registers
    target: str
    warps: int = 0  # of a row of whole lines, 0: of any row
    ahead: bool = True  # whether a row of whole lines arrives while the one before is worked on
    decoded: bool = False
    together: int = 1  # rows of whole lines that a thread block has at once

    @property
    def converts(self) -> bool:
        """Return whether the target has a conversion to E2M1."""
        return TARGETS[self.target].converts_e2m1

    @property
    def coded_lines(self) -> bool:
        """Return whether a form codes rows of whole lines: instructions bound it, not memory."""
        return self.warps > 0 and self.layout is not None

    @property
    def writes_values(self) -> bool:
        """Return whether normed BF16 values are among the outputs."""
        return self.layout is None or self.keeps_values

    @property
    def unpacks_twice(self) -> bool:
        """Return whether a row is unpacked again for the product, which saves registers."""
        if self.warps:
            return not self.ahead
        return not self.roomy and (self.narrow or self.layout is not None or self.weight == "fp32")

    @property
    def layout_walked(self) -> str:
        """Return the layout of scales, or one without padding where there are none."""
        return self.layout or LINEAR.name


@dataclass(frozen=True)
class NormTactic:
    """Number of thread blocks a processor that walk down the rows; 0: one a row."""

    walkers: int


def choose_norm_form(problem: NormProblem, target: str) -> NormForm:
    """Return the form for a problem."""
    return NormForm(
        weight=problem.weight,
        layout=problem.layout,
        keeps_values=problem.keeps_values,
        narrow=is_narrow(problem.columns),
        most_warps=most_warps(problem.columns),
        roomy=is_roomy(problem),
        target=target,
        warps=0 if problem.decoded else whole_warps(problem.columns),
        ahead=problem.layout is not None,
        decoded=problem.decoded,
        together=rows_together(problem),
    )


def choose_norm_tactic(problem: NormProblem) -> NormTactic:
    """Return the tactic: as many walking thread blocks as a processor holds at once.

    Measured on an H200 at 7168 columns: docs/design-notes/row_kernels.md.
    """
    if whole_warps(problem.columns) and problem.layout is None and not problem.decoded:
        return NormTactic(0)  # many thread blocks read at once, so none reads ahead
    registers = 96 if problem.weight == "bf16" else 128
    if whole_warps(problem.columns) and not problem.decoded:
        declared = norm_threads_declared(choose_norm_form(problem, ""))
        registers = REGISTERS_OF_PROCESSOR // declared // 8 * 8
    warps = REGISTERS_OF_PROCESSOR // PROCESSOR_QUARTERS // (registers * LANES) * PROCESSOR_QUARTERS
    return NormTactic(max(1, warps // (norm_threads(problem) // LANES)))


def rows_together(problem: NormProblem) -> int:
    """Return the rows that a thread block has at once: as many as fill a processor, of seven warps.

    Four thread blocks of seven warps load a processor's quarters unequally; one of 28 does not. Its
    rows share weights and factors. Of few rows each has a thread block, on a processor of its own.
    """
    coded = problem.layout is not None and not problem.keeps_values
    seven = whole_warps(problem.columns) == USUAL_WARPS
    return ROWS_TOGETHER if coded and seven and problem.rows >= LEAST_TOGETHER else 1


def is_roomy(problem: NormProblem) -> bool:
    """Return whether codes of a row take seven warps: two rows leave 128 registers a thread."""
    seven = lanes_of_row(problem.columns) == USUAL_WARPS * LANES
    whole = whole_warps(problem.columns) > 0
    return seven and not whole and problem.layout is not None and problem.weight == "bf16"


def whole_warps(columns: int) -> int:
    """Return the warps of a row of whole lines, 0 for other rows."""
    return 0 if is_narrow(columns) or columns % OF_WHOLE_WARP else columns // OF_WHOLE_WARP


def is_narrow(columns: int) -> bool:
    """Return whether one warp holds a row."""
    return columns <= LANES * SLOTS_OF_LANE * BLOCK


def most_warps(columns: int) -> int:
    """Return the bound on warps of a thread block that the form is compiled for."""
    if is_narrow(columns):
        return NARROW_WARPS
    return USUAL_WARPS if lanes_of_row(columns) <= USUAL_WARPS * LANES else MOST_WARPS


def lanes_of_row(columns: int) -> int:
    """Return the number of lanes that share a row, a multiple of a warp."""
    lanes: int = round_up(ceil_div(columns, SLOTS_OF_LANE * BLOCK), LANES)
    return lanes


def norm_threads(problem: NormProblem) -> int:
    """Return the number of threads of a thread block."""
    lanes = lanes_of_row(problem.columns)
    return NARROW_WARPS * lanes if is_narrow(problem.columns) else lanes


def norm_grid(problem: NormProblem, tactic: NormTactic, processors: int) -> int:
    """Return the number of thread blocks of a launch."""
    warps_apart = NARROW_WARPS if is_narrow(problem.columns) else 1
    needed: int = ceil_div(problem.padded_rows, warps_apart)
    return min(needed, processors * tactic.walkers) if tactic.walkers else needed


def norm_threads_declared(form: NormForm) -> int:
    """Return the threads by which ptxas bounds registers.

    1024 leave 64 a thread, 896 leave 72, 512 leave 128.
    """
    if form.together > 1:
        return form.together * form.warps * LANES
    if form.warps:
        if not form.ahead:
            return WHOLE_ROW_THREADS
        if form.warps <= LIGHT_WARPS and not form.keeps_values:
            return CODED_ROW_THREADS
        most = MOST_KEPT_WARPS if form.keeps_values else MOST_CODED_WARPS
        return WHOLE_ROW_THREADS if form.warps <= most else MOST_WARPS * LANES
    few = 512 if form.roomy else 640
    return max(form.most_warps * LANES, few if form.weight == "bf16" else 0)


# ---- the arithmetic of a row ---------------------------------------------------------------------


def sum_of_squares(numbers: Sequence[Any]) -> Any:
    """Return a block's sum: each half of its numbers from the first one on, then both."""
    return ops.add_rn(*map(half_sum, (numbers[:HALF_BLOCK], numbers[HALF_BLOCK:])))


def half_sum(numbers: Sequence[Any]) -> Any:
    """Return the sum of squares of half of a block."""
    total = ops.multiply_rn(numbers[0], numbers[0])
    for number in numbers[1:]:
        total = ops.fma_rn(number, number, total)
    return total


def factor_of(total: Any, columns: Any, epsilon: Any, square_root: Callable[[Any], Any]) -> Any:
    """Return a row's norm factor; each step is rounded once, to nearest even."""
    mean = mean_of(total, columns)
    return ops.divide_rn(1.0, square_root(ops.add_rn(mean, epsilon)))


def mean_of(total: Any, columns: Any) -> Any:
    """Return the total over the columns, rounded once; an int that is a power of two multiplies."""
    if isinstance(columns, int) and columns.bit_count() == 1:
        return ops.multiply_rn(total, 1.0 / columns)
    return ops.divide_rn(total, float(columns) if isinstance(columns, int) else columns)


def normed(number: Any, weight: Any, factor: Any) -> Any:
    """Return a normed value in float32; the caller rounds it to BF16."""
    return ops.multiply_rn(weight, ops.multiply_rn(number, factor))


# --------------------------------------------------------------------------------------------------
# A residual that is added before an RMSNorm.
#
# total = x + residual in float32, stored rounded to BF16 once. The norm takes the float32 total, as
# the official V3.2 code does, or the stored one (`rounded`), as transformers does. The norm's
# arithmetic and the order of its sum are those above, so with `rounded` the bits are those of a
# separate addition and norm.

RESIDUAL_REGISTERS = 128  # a thread: a row and the next one, of both operands
WHOLE_SUM_THREADS = 768  # by which registers are bounded where a thread block has one whole row


@dataclass(frozen=True)
class ResidualProblem:
    """Add M rows of K BF16 values to as many, and norm the sums."""

    rows: int
    columns: int
    epsilon: float = 1e-6
    weight: str = "bf16"
    rounded: bool = False  # whether the stored sum is normed, not the float32 one

    def __post_init__(self) -> None:
        assert self.norm.layout is None, "nothing is quantised here"

    @property
    def norm(self) -> NormProblem:
        """Return the norm of the sums."""
        return NormProblem(self.rows, self.columns, self.epsilon, self.weight)

    @property
    def bytes_moved(self) -> int:
        """Return the fewest bytes that have to be read and written: every input and output once."""
        weight = self.columns * (4 if self.weight == "fp32" else 2)
        return 4 * 2 * self.rows * self.columns + weight


@dataclass(frozen=True)
class ResidualForm:
    """Compile-time parameters of a kernel; extents come with the launch."""

    weight: str
    rounded: bool
    narrow: bool  # a warp has its rows, not a thread block
    target: str
    warps: int = 0  # of a row of whole lines, 0: of any row

    @property
    def reads_weight_early(self) -> bool:
        """Return whether a thread has its weights before the wait for the launch in front.

        Of one row they are a third of what its processor reads. A stored sum that is normed has no
        registers for them: 8,192 rows took 1 to 2 % longer.
        """
        return self.warps > 0 and not self.rounded


def choose_residual_form(problem: ResidualProblem, target: str) -> ResidualForm:
    """Return the form for a problem."""
    narrow = is_narrow(problem.columns)
    warps = whole_warps(problem.columns)
    return ResidualForm(problem.weight, problem.rounded, narrow, target, warps)


def choose_residual_tactic(problem: ResidualProblem) -> NormTactic:
    """Return the tactic: thread blocks that walk, as many as a processor holds, or a row each."""
    if whole_warps(problem.columns):
        return NormTactic(0)
    warps = REGISTERS_OF_PROCESSOR // (RESIDUAL_REGISTERS * LANES)
    return NormTactic(max(1, warps // (norm_threads(problem.norm) // LANES)))


def residual_grid(problem: ResidualProblem, tactic: NormTactic, processors: int) -> int:
    """Return the number of thread blocks of a launch."""
    return norm_grid(problem.norm, tactic, processors)


def residual_threads_declared(form: ResidualForm) -> int:
    """Return the number of threads by which ptxas bounds registers."""
    if 0 < form.warps <= USUAL_WARPS and form.weight == "bf16":
        return WHOLE_SUM_THREADS
    declared: int = MOST_WARPS * LANES
    assert declared * RESIDUAL_REGISTERS == REGISTERS_OF_PROCESSOR
    return declared


# --------------------------------------------------------------------------------------------------
# Query heads: norm, then RoPE.
#
# T tokens of 1 to 128 heads of 512, or of 128. A warp has a head, a thread block eight heads of one
# token, so that they share the table's cache lines. The arithmetic is primitives/kv_problem's.

HEAD_WARPS = 8  # heads that a thread block works on
FEWEST_HEADS, MOST_HEADS = 1, 128


@dataclass(frozen=True)
class QNormRopeProblem:
    """T tokens of H query heads; positions are rows of the RoPE table."""

    tokens: int
    heads: int
    positions: int
    epsilon: float = 1e-6
    width: int = rows.WIDTH

    def __post_init__(self) -> None:
        rows.require_extent("tokens", self.tokens)
        rows.require_extent("positions of the table of turns", self.positions, 1)
        rows.require_epsilon(self.epsilon)
        rows.geometry(self.width)
        if not FEWEST_HEADS <= self.heads <= MOST_HEADS:
            raise ShapeMismatch(
                "query heads",
                self.heads,
                f"{FEWEST_HEADS} to {MOST_HEADS} heads of {self.width}",
                "Give each rank its own heads.",
            )

    @property
    def bytes_moved(self) -> int:
        """Return the fewest bytes that have to be read and written: every input and output once."""
        return self.tokens * (4 * self.width * self.heads + 8 + 4 * rows.TABLE_WIDTH)


@dataclass(frozen=True)
class QNormRopeForm:
    """Compile-time parameters of a kernel; extents come with the launch."""

    target: str
    width: int = rows.WIDTH
    few: bool = False  # few tokens: turns are read by guesses of positions


def choose_heads_form(problem: QNormRopeProblem, target: str) -> QNormRopeForm:
    """Return the form for a problem."""
    return QNormRopeForm(target, problem.width, problem.tokens <= rows.TOKENS_GUESSED)


def heads_grid(problem: QNormRopeProblem) -> tuple[int, int]:
    """Return the thread blocks: along x tokens, along y eight heads each."""
    return problem.tokens, ceil_div(problem.heads, HEAD_WARPS)


# --------------------------------------------------------------------------------------------------
# Attention's outputs, rotated back (inverse RoPE).
#
# T tokens of H heads of 512 or 128. Two forms: out of place, where all values are copied, and in
# place, where only the last 64 are touched. The arithmetic is primitives/kv_problem's.

BACK_THREADS = 256
TURNED_CHUNKS = rows.ROTATED // rows.HALF  # of a head, 16 bytes each
CHUNKS_AT_ONCE = 2  # chunks of a thread, a thread block's width apart


@dataclass(frozen=True)
class InverseRopeProblem:
    """T tokens of H heads; positions are rows of the RoPE table."""

    tokens: int
    heads: int
    positions: int
    in_place: bool = False
    width: int = rows.WIDTH  # of a head

    def __post_init__(self) -> None:
        rows.require_extent("tokens", self.tokens)
        rows.geometry(self.width)
        rows.require_extent("positions of the table of turns", self.positions, 1)
        if not FEWEST_HEADS <= self.heads <= MOST_HEADS:
            raise ShapeMismatch(
                "heads of attention's output",
                self.heads,
                f"{FEWEST_HEADS} to {MOST_HEADS} heads of {self.width}",
                "Give each rank its own heads.",
            )

    @property
    def chunks(self) -> int:
        """Return the number of chunks of a token that the launch moves."""
        return self.heads * chunks_of_head(self.width, in_place=self.in_place)

    @property
    def bytes_moved(self) -> int:
        """Return the fewest bytes that have to be read and written."""
        return self.tokens * (2 * 16 * self.chunks + 8 + 4 * rows.TABLE_WIDTH)


@dataclass(frozen=True)
class InverseRopeForm:
    """Compile-time parameters of a kernel; extents come with the launch."""

    in_place: bool
    target: str
    width: int = rows.WIDTH


def chunks_of_head(width: int, *, in_place: bool) -> int:
    """Return the number of chunks of a head that a form moves."""
    return TURNED_CHUNKS if in_place else rows.geometry(width).chunks


def first_turned(width: int) -> int:
    """Return the first rotated chunk of a head."""
    return rows.geometry(width).chunks - TURNED_CHUNKS


def place_of_chunk(chunk: Any, width: int, *, in_place: bool) -> tuple[Any, Any]:
    """Return a token's chunk, counted over whole heads, and which chunk of its head that is.

    Runs on ints and inside the kernel.
    """
    of_head = rows.geometry(width).chunks
    if not in_place:
        return chunk, chunk % of_head
    within = first_turned(width) + chunk % TURNED_CHUNKS
    return chunk // TURNED_CHUNKS * of_head + within, within


def back_grid(problem: InverseRopeProblem) -> tuple[int, int]:
    """Return the thread blocks: along x tokens, along y the chunks of a token."""
    return problem.tokens, ceil_div(problem.chunks, BACK_THREADS * CHUNKS_AT_ONCE)


# --------------------------------------------------------------------------------------------------
# Embedding lookup.
#
# An id outside the table gives a row of zeros on the GPU: a kernel cannot raise, and the result has
# to be the same every time. Ids on the CPU are checked before the launch.

EMBED_VECTOR = 8  # BF16 numbers of a 16-byte vector
EMBED_VECTORS_OF_THREAD = 4  # in flight at once
MOST_EMBED_THREADS = 256
ID_DTYPES = ("int32", "int64")


@dataclass(frozen=True)
class EmbedProblem:
    """T ids, each naming a row of a BF16 table [V, K]."""

    tokens: int
    vocabulary: int
    columns: int
    ids: str = "int64"

    def __post_init__(self) -> None:
        if (
            not 0 <= self.tokens < LARGEST_ROWS
            or not 1 <= self.vocabulary < LARGEST_ROWS
            or self.columns < EMBED_VECTOR
            or self.columns % EMBED_VECTOR
        ):
            raise ShapeMismatch(
                "embedding",
                (self.tokens, self.vocabulary, self.columns),
                f"tokens and rows below 2**31, columns in a multiple of {EMBED_VECTOR}",
                "Pad the columns with zeros.",
            )
        if self.ids not in ID_DTYPES:
            raise UnknownName.among("dtype of token ids", self.ids, ID_DTYPES)

    @property
    def vectors(self) -> int:
        """Return the number of vectors of a row."""
        return self.columns // EMBED_VECTOR

    @property
    def bytes_moved(self) -> int:
        """Return the bytes read and written if every id is different."""
        return self.tokens * (4 * self.columns + (8 if self.ids == "int64" else 4))


@dataclass(frozen=True)
class EmbedForm:
    """Compile-time parameters of a kernel; extents come with the launch."""

    ids: str
    target: str


def choose_embed_form(problem: EmbedProblem, target: str) -> EmbedForm:
    """Return the form for a problem."""
    return EmbedForm(problem.ids, target)


def embed_threads(problem: EmbedProblem) -> int:
    """Return the number of threads of a thread block: four vectors each, until there are 256."""
    needed: int = round_up(ceil_div(problem.vectors, EMBED_VECTORS_OF_THREAD), LANES)
    return min(MOST_EMBED_THREADS, needed)


def embed_grid(problem: EmbedProblem) -> tuple[int, int]:
    """Return the thread blocks: one a token along x, and along y as many as a row needs."""
    across: int = ceil_div(problem.vectors, embed_threads(problem) * EMBED_VECTORS_OF_THREAD)
    return problem.tokens, across


# --------------------------------------------------------------------------------------------------
# Numbers multiplied by one factor (the weights of the indexer's heads).
#
# value * factor in float32, the factor rounded to float32, the product rounded again if the output
# is BF16. A factor of 1 widens BF16 exactly.

SCALE_THREADS = 256
SCALE_KINDS = ("bf16", "fp32")


@dataclass(frozen=True)
class ScaleProblem:
    """`count` numbers times a factor."""

    count: int
    factor: float
    source: str = "fp32"
    out: str = "fp32"

    def __post_init__(self) -> None:
        rows.require_extent("numbers to scale", self.count)
        for name, kind in (("source", self.source), ("out", self.out)):
            if kind not in SCALE_KINDS:
                raise UnknownName.among(f"dtype of {name} of a scaling", kind, SCALE_KINDS)
        if not (math.isfinite(self.factor) and abs(self.factor) < 2.0**128):
            raise InvalidArgument(
                "factor", self.factor, "a finite float32 number", "Models have (I * N)^-1/2."
            )

    @property
    def blocks(self) -> int:
        """Return the number of thread blocks of a launch."""
        made: int = ceil_div(self.count, SCALE_THREADS)
        return made


@dataclass(frozen=True)
class ScaleForm:
    """Compile-time parameters of a kernel; factor and count come with the launch."""

    source: str
    out: str
    target: str


def choose_scale_form(problem: ScaleProblem, target: str) -> ScaleForm:
    """Return the form for a problem."""
    return ScaleForm(problem.source, problem.out, target)
