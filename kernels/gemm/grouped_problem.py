"""What a grouped product of BF16 matrices is asked for: o_a's groups, or one with float32 results.

D[t, g] = A[t, g] B[g]^T: A is [T, G K], B [G N, K], D [T, G N], so a group is a range of columns of
A and D and of rows of B, and the whole is the GEMM of gemm_problem whose steps of K begin where the
tile's group does. Two things may be added. A's rows are heads side by side, whose last 64 values
are turned back on their way into the product (attention's output into o_a). D stays float32 (the
compressor's projections). Pure host arithmetic, no GPU, no DSL. Refuses extents that do not fit.
Kept honest by suites/kernels/gemm/test_grouped_problem.py.
Shape letters: T tokens, G groups, N columns and K values of a group, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from degarble.harness.base.errors import ShapeMismatch, UnknownName
from degarble.kernels.gemm import problem as gemm
from degarble.kernels.gemm.problem import GemmForm, GemmProblem, Tactic
from degarble.kernels.primitives import attention_rows as rows
from degarble.kernels.runtime.targets import SM90A, SM100A

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

STEP = 64  # values of K of a stage: those of a head that are turned, or none of them
OUTPUTS: Mapping[str, int] = {"bf16": 2, "fp32": 4}  # bytes of a number of D
TACTICS: Mapping[str, tuple[Tactic, ...]] = {
    SM90A.name: (
        Tactic(64, rows=64, columns=64, inner=STEP),
        Tactic(512, rows=128, columns=128, inner=STEP),
        Tactic(gemm.ANY, rows=128, columns=256, inner=STEP, cluster_rows=2),
    ),
    SM100A.name: (
        Tactic(64, rows=128, columns=64, inner=STEP),
        Tactic(512, rows=128, columns=128, inner=STEP),
        Tactic(gemm.ANY, rows=128, columns=256, inner=STEP),
    ),
}


@dataclass(frozen=True)
class GroupedProblem:
    """T tokens, G groups of N columns, each a sum over K; heads of `turned` values are turned."""

    tokens: int
    groups: int
    columns: int
    inner: int
    turned: int = 0  # values of a head, 0: A is taken as it is
    positions: int = 0  # rows of the table of turns, 0 where nothing is turned
    out: str = "bf16"

    def __post_init__(self) -> None:
        if self.out not in OUTPUTS:
            raise UnknownName.among("dtype of grouped results", self.out, OUTPUTS)
        rows.require_extent("tokens", self.tokens)
        rows.require_extent("groups", self.groups, 1)
        rows.require_extent(
            "positions of the table of turns", self.positions, 1 if self.turned else 0
        )
        whole = self.inner % STEP == 0 and (self.groups == 1 or self.columns % STEP == 0)
        if self.turned:
            whole = whole and self.inner % rows.geometry(self.turned).width == 0
        if not whole:
            raise ShapeMismatch(
                "columns and values of a group",
                (self.columns, self.inner),
                f"K in multiples of {self.turned or STEP}, N of {STEP} where there are groups",
                "Pad both with zeros.",
            )
        assert self.gemm

    @property
    def gemm(self) -> GemmProblem:
        """All groups side by side, as a GEMM whose K is that of a group."""
        return GemmProblem(self.tokens, self.groups * self.columns, self.inner)

    @property
    def operations(self) -> int:
        """Floating-point operations, a product and a sum for each."""
        return self.gemm.operations

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes: A, B and D once, and the turns of each token."""
        wide = self.groups * self.columns
        turns = (8 + 4 * rows.TABLE_WIDTH) * bool(self.turned)
        a_and_d = 2 * self.groups * self.inner + OUTPUTS[self.out] * wide
        return self.tokens * (a_and_d + turns) + 2 * wide * self.inner


@dataclass(frozen=True)
class GroupedForm:
    """What a kernel is compiled for; extents, groups and pointers come with the launch."""

    gemm: GemmForm
    turned: int
    out: str

    @property
    def steps_of_head(self) -> int:
        """Steps of K of a head; the last of them is turned."""
        return self.turned // STEP


def fitting_tactic(tactics: Sequence[Tactic], tokens: int, groups: int, columns: int) -> Tactic:
    """Return the tactic of so many tokens, or one of fewer whose tiles lie within a group."""
    first = next(n for n, tactic in enumerate(tactics) if tokens <= tactic.rows_up_to)
    fitting = [
        tactic for tactic in tactics[: first + 1] if groups == 1 or columns % tactic.columns == 0
    ]
    return fitting[-1]


def choose_form(problem: GroupedProblem, target: str = SM90A.name) -> GroupedForm:
    """Return the form that answers a problem: by tokens, with tiles that lie within a group."""
    if target not in TACTICS:
        raise UnknownName.among("target of grouped products", target, TACTICS)
    tactic = fitting_tactic(TACTICS[target], problem.tokens, problem.groups, problem.columns)
    form = GemmForm(gemm.BF16.name, "none", target, tactic)
    return GroupedForm(form, problem.turned, problem.out)


def tiles_of_group(problem: GroupedProblem, form: GroupedForm) -> int:
    """Tiles along N of a group; of a single group the last may lie beyond D in part."""
    tiles: int = -(-problem.columns // form.gemm.tactic.columns)
    return tiles
