"""Problem and form of adding a residual before an RMSNorm.

total = x + residual in float32, stored rounded to BF16 once. The norm takes the float32 total, as
the official V3.2 code does, or the stored one (`rounded`), as transformers does. The norm's
arithmetic and the order of its sum are rmsnorm_problem's, so with `rounded` the bits are those of a
separate addition and norm.
"""

from __future__ import annotations

from dataclasses import dataclass

from degarble.kernels.primitives.quantise_problem import REGISTERS_OF_PROCESSOR
from degarble.kernels.rows import rmsnorm_problem as norms
from degarble.kernels.rows.rmsnorm_problem import NormProblem, Tactic

REGISTERS = 128  # a thread: a row and the next one, of both operands


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


def choose_form(problem: ResidualProblem, target: str) -> ResidualForm:
    """Return the form for a problem."""
    narrow = norms.is_narrow(problem.columns)
    return ResidualForm(problem.weight, problem.rounded, narrow, target)


def choose_tactic(problem: ResidualProblem) -> Tactic:
    """Return the tactic: as many walking thread blocks as a processor holds at once."""
    warps = REGISTERS_OF_PROCESSOR // (REGISTERS * norms.LANES)
    return Tactic(max(1, warps // (norms.threads(problem.norm) // norms.LANES)))


def grid(problem: ResidualProblem, tactic: Tactic, processors: int) -> int:
    """Return the number of thread blocks of a launch."""
    return norms.grid(problem.norm, tactic, processors)


def threads_declared() -> int:
    """Return the number of threads by which ptxas bounds registers."""
    declared: int = norms.MOST_WARPS * norms.LANES
    assert declared * REGISTERS == REGISTERS_OF_PROCESSOR
    return declared
