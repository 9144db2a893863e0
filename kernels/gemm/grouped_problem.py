"""Problem and forms of a grouped BF16 product: o_a's groups, or products with float32 results.

D[t, g] = A[t, g] B[g]^T with A [T, G K], B [G N, K], D [T, G N]. A group is a range of columns of A
and D and of rows of B, so the whole is the GEMM of gemm.problem in which A's steps of K begin at
the group of the tile.

Two options. `turned`: A's rows are heads, and inverse RoPE is applied to the last 64 values of each
on the way into the product (attention output into o_a). `out="fp32"`: D stays float32 (the
projections of the compressor). Host arithmetic only, no GPU, no DSL.
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

STEP = 64  # values of K of a stage: all of a head's rotated values, or none of them
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
    def steps_of_head(self) -> int:
        """Return the K steps of a head; inverse RoPE rotates the last one."""
        return self.turned // STEP


def fitting_tactic(tactics: Sequence[Tactic], tokens: int, groups: int, columns: int) -> Tactic:
    """Return the tactic for so many tokens, or a smaller one whose tiles lie within a group."""
    first = next(n for n, tactic in enumerate(tactics) if tokens <= tactic.rows_up_to)
    fitting = [
        tactic for tactic in tactics[: first + 1] if groups == 1 or columns % tactic.columns == 0
    ]
    return fitting[-1]


def choose_form(problem: GroupedProblem, target: str = SM90A.name) -> GroupedForm:
    """Return the form for a problem: tactic by number of tokens, tiles within one group."""
    if target not in TACTICS:
        raise UnknownName.among("target of grouped products", target, TACTICS)
    tactic = fitting_tactic(TACTICS[target], problem.tokens, problem.groups, problem.columns)
    form = GemmForm(gemm.BF16.name, "none", target, tactic)
    return GroupedForm(form, problem.turned, problem.out)


def tiles_of_group(problem: GroupedProblem, form: GroupedForm) -> int:
    """Return the tiles of a group along N; of a single group the last may exceed D."""
    tiles: int = -(-problem.columns // form.gemm.tactic.columns)
    return tiles
