"""What norming and turning query heads is asked for, and what follows from it.

Owns the problem (T tokens of 1 to 128 heads of 512, or of 128), the form and the grid: a warp has a
head, a thread block eight heads of one token, so that they share the table's lines. Pure host
arithmetic; the arithmetic of a row is that of attention_rows.
Refuses extents that do not fit. Kept honest by suites/kernels/rows/test_qnorm_rope_problem.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.primitives import attention_rows as rows

WARPS = 8  # heads that a thread block works on
FEWEST_HEADS, MOST_HEADS = 1, 128


@dataclass(frozen=True)
class HeadsProblem:
    """T tokens of H query heads; positions are rows of the table of turns."""

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
        """The fewest bytes that have to be read and written: every input and output once."""
        return self.tokens * (4 * self.width * self.heads + 8 + 4 * rows.TABLE_WIDTH)


@dataclass(frozen=True)
class HeadsForm:
    """What a kernel is compiled for; the extents come with the launch."""

    target: str
    width: int = rows.WIDTH


def grid(problem: HeadsProblem) -> tuple[int, int]:
    """Thread blocks: along x tokens, along y eight heads each."""
    return problem.tokens, ceil_div(problem.heads, WARPS)
