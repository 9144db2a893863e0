"""What a grouped product in FP8 blocks is asked for: o_a's groups, with heads turned back or not.

D[t, g] = A[t, g] B[g]^T as in grouped_problem, in the numbers of FP8_BLOCK: codes with a scale for
128 of K, B's for 128 x 128. B and its scales lie as a checkpoint has them, all groups one matrix: a
tile of 128 rows under one scale may have several groups. A is codes and scales; or it is
attention's output in BF16, whose heads are turned back and quantised on their way into the product,
each thread block for its own tile; `turns_first` says when codes made before are faster.

Pure host arithmetic, no GPU, no DSL. Refuses extents that do not fit. Kept honest by
suites/kernels/gemm/test_grouped_fp8_problem.py.
Shape letters: T tokens, G groups, N columns and K values of a group, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import ShapeMismatch, UnknownName
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.gemm import problem as gemm
from degarble.kernels.gemm.grouped_problem import fitting_tactic
from degarble.kernels.gemm.problem import GemmForm, GemmProblem, Tactic
from degarble.kernels.primitives import attention_rows as rows
from degarble.kernels.runtime.targets import SM90A

if TYPE_CHECKING:
    from collections.abc import Mapping

STEP = 128  # values of K of a stage, which share a scale
LEAST_COLUMNS = 64  # of a tile
BITS_OF_HEADS = 16
# Measured on an H200: docs/design-notes/grouped_kernel.md.
TACTICS: Mapping[str, tuple[Tactic, ...]] = {
    SM90A.name: (
        Tactic(64, rows=64, columns=64, inner=STEP, blocks=2),
        Tactic(gemm.ANY, rows=128, columns=128, inner=STEP, cluster_rows=2),
    ),
}
TURNED_UP_TO = 0  # tokens for which one launch was faster than two: none


@dataclass(frozen=True)
class GroupedFp8Problem:
    """T tokens, G groups of N columns, each a sum over K; heads of `turned` values are turned."""

    tokens: int
    groups: int
    columns: int
    inner: int
    scales: str = "float32"
    turned: int = 0  # values of a head, 0: A is codes and scales
    positions: int = 0  # rows of the table of turns, 0 where nothing is turned

    def __post_init__(self) -> None:
        rows.require_extent("tokens", self.tokens)
        rows.require_extent("groups", self.groups, 1)
        rows.require_extent(
            "positions of the table of turns", self.positions, 1 if self.turned else 0
        )
        whole = self.inner % STEP == 0
        whole = whole and (self.groups == 1 or self.columns % LEAST_COLUMNS == 0)
        if self.turned:
            whole = whole and self.inner % rows.geometry(self.turned).width == 0
        if not whole:
            raise ShapeMismatch(
                "columns and values of a group",
                (self.columns, self.inner),
                f"K in multiples of {self.turned or STEP}, N of {LEAST_COLUMNS} where there are "
                "groups",
                "Multiply group by group, by the plain product.",
            )
        assert self.gemm

    @property
    def gemm(self) -> GemmProblem:
        """All groups side by side, as a GEMM whose K is that of a group."""
        columns = self.groups * self.columns
        return GemmProblem(self.tokens, columns, self.inner, gemm.FP8_BLOCK.name, self.scales)

    @property
    def blocks(self) -> int:
        """Scales of a row of B, and of a group in a row of A."""
        return self.inner // STEP

    @property
    def rows_of_scales(self) -> int:
        """Rows of B's scales, for all groups."""
        return int(ceil_div(self.groups * self.columns, STEP))

    @property
    def operations(self) -> int:
        """Floating-point operations, a product and a sum for each."""
        return self.gemm.operations

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes: A, B and D once, scales, and the turns of each token."""
        wide, width = self.groups * self.columns, 1 if self.scales == "ue8m0" else 4
        a = 2 * self.inner if self.turned else self.inner + width * self.blocks
        turns = (8 + 4 * rows.TABLE_WIDTH) * bool(self.turned)
        b = wide * self.inner + width * self.rows_of_scales * self.blocks
        return self.tokens * (self.groups * a + 2 * wide + turns) + b


@dataclass(frozen=True)
class GroupedFp8Form:
    """What a kernel is compiled for; extents, groups and pointers come with the launch."""

    gemm: GemmForm
    turned: int

    @property
    def scales(self) -> str:
        """Return the format of block scales, those that the kernel makes included."""
        return self.gemm.scales

    @property
    def steps_of_head(self) -> int:
        """Steps of K of a head; the last of them has the values that are turned."""
        return self.turned // STEP


def choose_form(problem: GroupedFp8Problem, target: str = SM90A.name) -> GroupedFp8Form:
    """Return the form that answers a problem: by tokens, with tiles that lie within a group."""
    if target not in TACTICS:
        raise UnknownName.among("target of grouped products in FP8", target, TACTICS)
    tactic = fitting_tactic(TACTICS[target], problem.tokens, problem.groups, problem.columns)
    bits = BITS_OF_HEADS if problem.turned else 0
    form = GemmForm(gemm.FP8_BLOCK.name, problem.scales, target, tactic, bits_of_a=bits)
    return GroupedFp8Form(form, problem.turned)


def tiles_of_group(problem: GroupedFp8Problem, form: GroupedFp8Form) -> int:
    """Tiles along N of a group; of a single group the last may lie beyond D in part."""
    return int(ceil_div(problem.columns, form.gemm.tactic.columns))


def quotient(number: Any, against: Any, inverse: Any, *, exact: bool) -> Any:
    """Return number / scale rounded once, from the scale negated and its inverse rounded once.

    The inverse of a power of two is exact; else one step of Markstein's corrects the product. Runs
    in three worlds: a suite walks all significands that BF16 and scales made of BF16 have.
    """
    first = ops.multiply_rn(number, inverse)
    if exact:
        return first
    return ops.fma_rn(ops.fma_rn(first, against, number), inverse, first)


def turns_first(tokens: int) -> bool:
    """Say whether heads are turned and quantised by a kernel of their own, as it is faster then."""
    return tokens > TURNED_UP_TO
