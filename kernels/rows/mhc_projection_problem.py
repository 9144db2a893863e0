"""Problem, split weights and sum order of projecting four streams onto mHC's coefficients.

T tokens of K = 4 D values against 24 rows (the head: 4). A float32 weight is split into three BF16
parts whose sum it is, so that matrix units multiply it without loss.

K is cut into pieces by its length alone. A piece is summed by the matrix unit, sixteen values at a
time, all three parts into one float32 sum. Pieces are added in groups, four groups in a span, spans
to the whole, each in turn from zero. Which thread block computes a piece, and which sums go through
memory, depends on T; no bit of the result does. Shape letters: T tokens, S streams, D width, N
rows, K = S D.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import UnknownName
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.primitives import attention_rows as rows
from degarble.kernels.rows.mhc_problem import COEFFICIENTS, STREAMS, MixProblem

if TYPE_CHECKING:
    from torch import Tensor

PARTS = 3  # BF16 numbers that are one float32: 24 bits of significand in three times 8
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
        MixProblem(self.tokens, self.width)  # refuses what the parts refuse
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
        cut = Cut(self.inner)
        return {"pieces": cut.pieces, "groups": cut.groups, "spans": cut.spans}[self.lines]

    @property
    def lines(self) -> str:
        """Return which partial sums of a token go through memory."""
        if self.tokens <= LEAST_TOKENS:
            return "pieces"
        blocks = Cut(self.inner).spans * ceil_div(self.tokens, ROWS_OF_BLOCK)
        return "spans" if blocks >= WANTED_BLOCKS else "groups"

    @property
    def bytes_moved(self) -> int:
        """Return the fewest bytes: streams and weight read once, products and squares written."""
        weight = 2 * PARTS * self.products * self.inner
        return self.tokens * (2 * self.inner + 4 * (self.products + 1)) + weight


@dataclass(frozen=True)
class Cut:
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
        return self.tokens_of_block + PARTS * rows_of(self.kind)

    @property
    def rows_at_once(self) -> int:
        """Return the rows of a stage that a thread block fetches at once, 16 bytes a thread."""
        return 32 * self.warps * 16 // ROW_BYTES

    @property
    def shared_bytes(self) -> int:
        """Return the shared memory of a thread block."""
        return STAGES * self.stage_rows * ROW_BYTES

    @property
    def tokens_of_block(self) -> int:
        """Return the number of tokens of a thread block."""
        return self.tokens_of_warp * self.warps


def rows_of(kind: str) -> int:
    """Return rows of a split weight, padded to a tile."""
    padded: int = ceil_div(WEIGHTS[kind], TILE) * TILE
    return padded


def choose_form(problem: ProjectProblem, target: str) -> ProjectForm:
    """Return the form for a problem; it depends on the number of tokens."""
    return ProjectForm(problem.kind, problem.tokens <= FEW_TOKENS, target, problem.lines)


def chunk_place(row: Any, chunk: Any) -> Any:
    """Return where a row's 16-byte chunk lies in its 128 bytes.

    Eight neighbouring rows have a chunk at eight places, so ldmatrix reads from all banks.
    """
    return chunk ^ (row % TILE)


def grid(problem: ProjectProblem, form: ProjectForm) -> tuple[int, int]:
    """Return the thread blocks: along x pieces, groups or spans, along y tokens."""
    return problem.partials, ceil_div(problem.tokens, form.tokens_of_block)


def split_weight(fn_NK: Tensor) -> Tensor:
    """Return BF16 [3, N, K] whose sum over the first axis is the float32 weight; N is padded.

    A number below 2**-100 may lose its last bits.
    """
    kind = next((name for name, count in WEIGHTS.items() if count == fn_NK.shape[0]), "")
    if not kind:
        raise UnknownName.among("rows of mHC's weight", str(fn_NK.shape[0]), WEIGHTS)
    made = fn_NK.new_zeros(PARTS, rows_of(kind), fn_NK.shape[1], dtype=torch.bfloat16)
    rest = fn_NK.float()
    for part in range(PARTS):
        made[part, : rest.shape[0]] = rest.bfloat16()
        rest = rest - rest.bfloat16().float()
    return made
