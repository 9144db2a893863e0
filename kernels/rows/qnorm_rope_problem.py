"""Problem and grid of norming query heads and applying RoPE.

T tokens of 1 to 128 heads of 512, or of 128. A warp has a head, a thread block eight heads of one
token, so that they share the table's cache lines. The arithmetic of a row is that of
attention_rows.
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
class HeadsForm:
    """Compile-time parameters of a kernel; extents come with the launch."""

    target: str
    width: int = rows.WIDTH


def grid(problem: HeadsProblem) -> tuple[int, int]:
    """Return the thread blocks: along x tokens, along y eight heads each."""
    return problem.tokens, ceil_div(problem.heads, WARPS)
