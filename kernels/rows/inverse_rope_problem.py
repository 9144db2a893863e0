"""What turning attention's outputs back is asked for, and what follows from it.

Owns the problem (T tokens of H heads of 512 or 128), two forms (into other memory, where all values
move, or in place, where the last 64 do and the others stay as they are), the chunk that a thread
has, and the grid. Pure host arithmetic; the arithmetic of a pair is that of attention_rows.
Refuses extents that do not fit. Kept honest by suites/kernels/rows/test_inverse_rope_problem.py.
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
    """T tokens of H heads; positions are rows of the table of turns."""

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
        """Chunks of a token that the launch moves."""
        return self.heads * chunks_of_head(self.width, in_place=self.in_place)

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes that have to be read and written."""
        return self.tokens * (2 * 16 * self.chunks + 8 + 4 * rows.TABLE_WIDTH)


@dataclass(frozen=True)
class BackForm:
    """What a kernel is compiled for; the extents come with the launch."""

    in_place: bool
    target: str
    width: int = rows.WIDTH


def chunks_of_head(width: int, *, in_place: bool) -> int:
    """Chunks of a head that a form moves."""
    return TURNED_CHUNKS if in_place else rows.geometry(width).chunks


def first_turned(width: int) -> int:
    """Return the first chunk of a head that is turned."""
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
    """Thread blocks: along x tokens, along y the chunks of a token."""
    return problem.tokens, ceil_div(problem.chunks, THREADS * AT_ONCE)
