"""Problem, forms and thread mapping of rotating attention's outputs back (inverse RoPE).

T tokens of H heads of 512 or 128. Two forms: out of place, where all values are copied, and in
place, where only the last 64 are touched. The arithmetic of a pair is that of attention_rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.primitives import attention_rows as rows
from degarble.kernels.rows.qnorm_rope_problem import FEWEST_HEADS, MOST_HEADS

THREADS = 256
TURNED_CHUNKS = rows.ROTATED // rows.HALF  # of a head, 16 bytes each
AT_ONCE = 2  # chunks of a thread, a thread block's width apart


@dataclass(frozen=True)
class BackProblem:
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
class BackForm:
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


def place_of(chunk: Any, width: int, *, in_place: bool) -> tuple[Any, Any]:
    """Return a token's chunk, counted over whole heads, and which chunk of its head that is.

    Runs on ints and inside the kernel.
    """
    of_head = rows.geometry(width).chunks
    if not in_place:
        return chunk, chunk % of_head
    within = first_turned(width) + chunk % TURNED_CHUNKS
    return chunk // TURNED_CHUNKS * of_head + within, within


def grid(problem: BackProblem) -> tuple[int, int]:
    """Return the thread blocks: along x tokens, along y the chunks of a token."""
    return problem.tokens, ceil_div(problem.chunks, THREADS * AT_ONCE)
