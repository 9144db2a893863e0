"""Problems and forms of grouped products: BF16, float32 results, and FP8 blocks.

Host arithmetic only, no GPU and no DSL.
Shape letters: T tokens, G groups, N columns and K values of a group, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import ShapeMismatch, UnknownName
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.gemm import problem as gemm
from degarble.kernels.gemm.problem import GemmForm, GemmProblem, GemmTactic
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.runtime.targets import SM90A, SM100A

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


# --------------------------------------------------------------------------------------------------
# Problem and forms of a grouped BF16 product: o_a's groups, or products with float32 results.
#
# D[t, g] = A[t, g] B[g]^T with A [T, G K], B [G N, K], D [T, G N]. A group is a range of columns of
# A and D and of rows of B, so the whole is the GEMM of gemm.problem in which A's steps of K begin
# at the group of the tile.
#
# Two options. `turned`: A's rows are heads, and inverse RoPE is applied to the last 64 values of
# each on the way into the product (attention output into o_a). `out="fp32"`: D stays float32 (the
# projections of the compressor).

GROUPED_STEP = 64  # values of K of a stage: all of a head's rotated values, or none of them
OUTPUTS: Mapping[str, int] = {"bf16": 2, "fp32": 4}  # bytes of a number of D
GROUPED_TACTICS: Mapping[str, tuple[GemmTactic, ...]] = {
    SM90A.name: (
        GemmTactic(64, rows=64, columns=64, inner=GROUPED_STEP),
        GemmTactic(512, rows=128, columns=128, inner=GROUPED_STEP),
        GemmTactic(gemm.ANY, rows=128, columns=256, inner=GROUPED_STEP, cluster_rows=2),
    ),
    SM100A.name: (
        GemmTactic(64, rows=128, columns=64, inner=GROUPED_STEP),
        GemmTactic(512, rows=128, columns=128, inner=GROUPED_STEP),
        GemmTactic(gemm.ANY, rows=128, columns=256, inner=GROUPED_STEP),
    ),
}


@dataclass(frozen=True)
class GroupedProblem:
    """T tokens, G groups of N columns, K values each; `turned` is the width of a rotated head."""

    tokens: int
    groups: int
    columns: int
    inner: int
    turned: int = 0  # values of a head, 0: A is used as it is
    positions: int = 0  # rows of the RoPE table, 0 where nothing is rotated
    out: str = "bf16"

    def __post_init__(self) -> None:
        if self.out not in OUTPUTS:
            raise UnknownName.among("dtype of grouped results", self.out, OUTPUTS)
        rows.require_extent("tokens", self.tokens)
        rows.require_extent("groups", self.groups, 1)
        rows.require_extent(
            "positions of the table of turns", self.positions, 1 if self.turned else 0
        )
        whole = self.inner % GROUPED_STEP == 0 and (
            self.groups == 1 or self.columns % GROUPED_STEP == 0
        )
        if self.turned:
            whole = whole and self.inner % rows.geometry(self.turned).width == 0
        if not whole:
            raise ShapeMismatch(
                "columns and values of a group",
                (self.columns, self.inner),
                f"K in multiples of {self.turned or GROUPED_STEP}, N of {GROUPED_STEP} where there "
                "are groups",
                "Pad both with zeros.",
            )
        assert self.gemm

    @property
    def gemm(self) -> GemmProblem:
        """Return the equivalent GEMM: all groups side by side, K that of one group."""
        return GemmProblem(self.tokens, self.groups * self.columns, self.inner)

    @property
    def operations(self) -> int:
        """Return the floating-point operations, counting a product and a sum as two."""
        return self.gemm.operations

    @property
    def bytes_moved(self) -> int:
        """Return the fewest bytes moved: A, B, D and the RoPE table rows once."""
        wide = self.groups * self.columns
        turns = (8 + 4 * rows.TABLE_WIDTH) * bool(self.turned)
        a_and_d = 2 * self.groups * self.inner + OUTPUTS[self.out] * wide
        return self.tokens * (a_and_d + turns) + 2 * wide * self.inner


@dataclass(frozen=True)
class GroupedForm:
    """Compile-time parameters; extents, groups and pointers are passed at launch."""

    gemm: GemmForm
    turned: int
    out: str

    @property
    def target(self) -> str:
        """Return the target."""
        return self.gemm.target

    @property
    def steps_of_head(self) -> int:
        """Return the K steps of a head; inverse RoPE rotates the last one."""
        return self.turned // GROUPED_STEP


def fitting_tactic(
    tactics: Sequence[GemmTactic], tokens: int, groups: int, columns: int
) -> GemmTactic:
    """Return the tactic for so many tokens, or a smaller one whose tiles lie within a group."""
    first = next(n for n, tactic in enumerate(tactics) if tokens <= tactic.rows_up_to)
    fitting = [
        tactic for tactic in tactics[: first + 1] if groups == 1 or columns % tactic.columns == 0
    ]
    return fitting[-1]


def choose_grouped_form(problem: GroupedProblem, target: str = SM90A.name) -> GroupedForm:
    """Return the form for a problem: tactic by number of tokens, tiles within one group."""
    if target not in GROUPED_TACTICS:
        raise UnknownName.among("target of grouped products", target, GROUPED_TACTICS)
    tactic = fitting_tactic(
        GROUPED_TACTICS[target], problem.tokens, problem.groups, problem.columns
    )
    form = GemmForm(gemm.BF16.name, "none", target, tactic)
    return GroupedForm(form, problem.turned, problem.out)


def tiles_of_grouped(problem: GroupedProblem, form: GroupedForm) -> int:
    """Return the tiles of a group along N; of a single group the last may exceed D."""
    tiles: int = -(-problem.columns // form.gemm.tactic.columns)
    return tiles


# --------------------------------------------------------------------------------------------------
# Problem and forms of a grouped product in FP8 blocks, used for o_a of FP8 checkpoints.
#
# D[t, g] = A[t, g] B[g]^T as above, with FP8_BLOCK operands: E4M3 codes, one scale per
# 128 values of K in A, one per 128 x 128 block in B. B and its scales are stored as in a
# checkpoint, all groups in one matrix, so one scale of 128 rows may span several groups.
#
# A is codes and scales. Or (`turned` > 0) A is attention's BF16 output: the kernel applies inverse
# RoPE to the last 64 values of each head and quantises on the way into the product, each thread
# block for its own tile. `turns_first` says when a separate kernel for that is faster.

FP8_STEP = 128  # values of K of a stage, which share a scale
LEAST_COLUMNS = 64  # of a tile
BITS_OF_HEADS = 16
# Measured on an H200: docs/design-notes/grouped_kernel.md.
FP8_TACTICS: Mapping[str, tuple[GemmTactic, ...]] = {
    SM90A.name: (
        GemmTactic(64, rows=64, columns=64, inner=FP8_STEP, blocks=2),
        GemmTactic(gemm.ANY, rows=128, columns=128, inner=FP8_STEP, cluster_rows=2),
    ),
}
TURNED_UP_TO = 0  # tokens for which one launch was faster than two: none


@dataclass(frozen=True)
class GroupedFp8Problem:
    """T tokens, G groups of N columns, K values each; `turned` is the width of a rotated head."""

    tokens: int
    groups: int
    columns: int
    inner: int
    scales: str = "float32"
    turned: int = 0  # values of a head, 0: A is codes and scales
    positions: int = 0  # rows of the RoPE table, 0 where nothing is rotated

    def __post_init__(self) -> None:
        rows.require_extent("tokens", self.tokens)
        rows.require_extent("groups", self.groups, 1)
        rows.require_extent(
            "positions of the table of turns", self.positions, 1 if self.turned else 0
        )
        whole = self.inner % FP8_STEP == 0
        whole = whole and (self.groups == 1 or self.columns % LEAST_COLUMNS == 0)
        if self.turned:
            whole = whole and self.inner % rows.geometry(self.turned).width == 0
        if not whole:
            raise ShapeMismatch(
                "columns and values of a group",
                (self.columns, self.inner),
                f"K in multiples of {self.turned or FP8_STEP}, N of {LEAST_COLUMNS} where there "
                "are groups",
                "Multiply group by group, by the plain product.",
            )
        assert self.gemm

    @property
    def gemm(self) -> GemmProblem:
        """Return the equivalent GEMM: all groups side by side, K that of one group."""
        columns = self.groups * self.columns
        return GemmProblem(self.tokens, columns, self.inner, gemm.FP8_BLOCK.name, self.scales)

    @property
    def blocks(self) -> int:
        """Return the scales of one row of B, or of one group in a row of A."""
        return self.inner // FP8_STEP

    @property
    def rows_of_scales(self) -> int:
        """Return the rows of B's scale matrix, all groups together."""
        return int(ceil_div(self.groups * self.columns, FP8_STEP))

    @property
    def operations(self) -> int:
        """Return the floating-point operations, counting a product and a sum as two."""
        return self.gemm.operations

    @property
    def bytes_moved(self) -> int:
        """Return the fewest bytes moved: A, B, D, scales and RoPE table rows once."""
        wide, width = self.groups * self.columns, 1 if self.scales == "ue8m0" else 4
        a = 2 * self.inner if self.turned else self.inner + width * self.blocks
        turns = (8 + 4 * rows.TABLE_WIDTH) * bool(self.turned)
        b = wide * self.inner + width * self.rows_of_scales * self.blocks
        return self.tokens * (self.groups * a + 2 * wide + turns) + b


@dataclass(frozen=True)
class GroupedFp8Form:
    """Compile-time parameters; extents, groups and pointers are passed at launch."""

    gemm: GemmForm
    turned: int

    @property
    def target(self) -> str:
        """Return the target."""
        return self.gemm.target

    @property
    def scales(self) -> str:
        """Return the format of block scales, including those that the kernel computes."""
        return self.gemm.scales

    @property
    def steps_of_head(self) -> int:
        """Return the K steps of a head; the last one holds the values that inverse RoPE rotates."""
        return self.turned // FP8_STEP


def choose_fp8_form(problem: GroupedFp8Problem, target: str = SM90A.name) -> GroupedFp8Form:
    """Return the form for a problem: tactic by number of tokens, tiles within one group."""
    if target not in FP8_TACTICS:
        raise UnknownName.among("target of grouped products in FP8", target, FP8_TACTICS)
    tactic = fitting_tactic(FP8_TACTICS[target], problem.tokens, problem.groups, problem.columns)
    bits = BITS_OF_HEADS if problem.turned else 0
    form = GemmForm(gemm.FP8_BLOCK.name, problem.scales, target, tactic, bits_of_a=bits)
    return GroupedFp8Form(form, problem.turned)


def tiles_of_fp8_group(problem: GroupedFp8Problem, form: GroupedFp8Form) -> int:
    """Return the tiles of a group along N; of a single group the last may exceed D."""
    return int(ceil_div(problem.columns, form.gemm.tactic.columns))


def quotient(number: Any, against: Any, inverse: Any, *, exact: bool) -> Any:
    """Return number / scale rounded once, given -scale and the rounded inverse of the scale.

    The inverse of a power of two is exact; otherwise one Markstein step corrects the product. The
    same code runs on host integers, tensors and in the kernel, so that a suite can walk all
    significands of BF16 numbers and of scales made from BF16.
    """
    first = ops.multiply_rn(number, inverse)
    if exact:
        return first
    return ops.fma_rn(ops.fma_rn(first, against, number), inverse, first)


def turns_first(tokens: int) -> bool:
    """Return whether a separate kernel for inverse RoPE and quantisation is faster."""
    return tokens > TURNED_UP_TO
