"""What adding a residual in front of an RMSNorm is asked for, and what follows from it.

total = x + residual in float32, stored rounded to BF16 once; what is normed is the total itself, as
the official V3.2 code has it, or the stored one, as transformers has it. The norm's arithmetic and
the order of its sum are rmsnorm_problem's, so with `rounded` the bits are those of an addition and
a norm one by one. Owns the problem, the form, and how many rows are walked at once. Pure host
arithmetic, no GPU and no DSL.

Refuses what an RMSNorm refuses. Kept honest by suites/kernels/rows/test_residual_problem.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from degarble.kernels.primitives.quantise_problem import REGISTERS_OF_PROCESSOR
from degarble.kernels.rows import rmsnorm_problem as norms
from degarble.kernels.rows.rmsnorm_problem import NormProblem, Tactic

REGISTERS = 128  # a thread: a row and the next one, of both operands


@dataclass(frozen=True)
class ResidualProblem:
    """M rows of K BF16 values are added to as many, and the sums normed."""

    rows: int
    columns: int
    epsilon: float = 1e-6
    weight: str = "bf16"
    rounded: bool = False  # whether the stored sum is normed, not the float32 one

    def __post_init__(self) -> None:
        assert self.norm.layout is None, "nothing is quantised here"

    @property
    def norm(self) -> NormProblem:
        """The norm of the sums."""
        return NormProblem(self.rows, self.columns, self.epsilon, self.weight)

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes that have to be read and written: every input and output once."""
        weight = self.columns * (4 if self.weight == "fp32" else 2)
        return 4 * 2 * self.rows * self.columns + weight


@dataclass(frozen=True)
class ResidualForm:
    """What a kernel is compiled for; the extents come with the launch."""

    weight: str
    rounded: bool
    narrow: bool  # a warp has its rows, not a thread block
    target: str


def choose_form(problem: ResidualProblem, target: str) -> ResidualForm:
    """Return the form that answers a problem."""
    narrow = norms.is_narrow(problem.columns)
    return ResidualForm(problem.weight, problem.rounded, narrow, target)


def choose_tactic(problem: ResidualProblem) -> Tactic:
    """Walk with as many thread blocks as a processor holds at once."""
    warps = REGISTERS_OF_PROCESSOR // (REGISTERS * norms.LANES)
    return Tactic(max(1, warps // (norms.threads(problem.norm) // norms.LANES)))


def grid(problem: ResidualProblem, tactic: Tactic, processors: int) -> int:
    """Thread blocks of a launch."""
    return norms.grid(problem.norm, tactic, processors)


def threads_declared() -> int:
    """Threads by which ptxas bounds registers."""
    declared: int = norms.MOST_WARPS * norms.LANES
    assert declared * REGISTERS == REGISTERS_OF_PROCESSOR
    return declared
