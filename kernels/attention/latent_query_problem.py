"""Problem and thread mapping of V3.2's query rows.

A row has 576 values: 512 of the query after its head's key matrix, copied, and the last 64 of that
head's 192, rotated (RoPE) with one rounding to BF16. A thread has a chunk of 16 bytes. The
arithmetic of a pair is that of attention_rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.primitives import attention_rows as rows

THREADS = 288  # four rows at a time
CHUNKS = rows.WITH_KEY // rows.HALF  # of a query row, 16 bytes each
OF_LATENT = rows.WIDTH // rows.HALF
TURNED = rows.ROTATED // rows.HALF


@dataclass(frozen=True)
class QueryProblem:
    """T tokens of H heads of `width` numbers; positions are rows of the RoPE table."""

    tokens: int
    heads: int
    width: int  # of a head, the last 64 turned: qk_nope_head_dim + 64
    positions: int

    def __post_init__(self) -> None:
        rows.require_extent("tokens", self.tokens)
        rows.require_extent("positions of the table of turns", self.positions, 1)
        fits = self.width >= rows.ROTATED and self.width % rows.HALF == 0
        if not 1 <= self.heads < rows.MOST_HEADS or not fits or self.width >= rows.LARGEST:
            raise ShapeMismatch(
                "query heads and their width",
                (self.heads, self.width),
                f"1 to {rows.MOST_HEADS - 1} heads of a multiple of {rows.HALF} numbers, "
                f"{rows.ROTATED} of them turned",
                "V3.2 has heads of 192.",
            )
        rows.require_extent("chunks of a token", self.heads * CHUNKS)

    @property
    def chunks_of_head(self) -> int:
        """Return the number of chunks of a head as it arrives."""
        return self.width // rows.HALF

    @property
    def bytes_moved(self) -> int:
        """Return the fewest bytes that have to be read and written."""
        moved = 2 * self.heads * CHUNKS * 16
        return self.tokens * (moved + 8 + 4 * rows.TABLE_WIDTH)


@dataclass(frozen=True)
class QueryForm:
    """Compile-time parameters of a kernel; extents come with the launch."""

    target: str


def grid(problem: QueryProblem) -> tuple[int, int]:
    """Return the thread blocks: along x tokens, along y chunks of a token."""
    return problem.tokens, ceil_div(problem.heads * CHUNKS, THREADS)


def place_of(chunk: Any) -> tuple[Any, Any]:
    """Return the head of a chunk, and its number in the row; for ints and traced values."""
    return chunk // CHUNKS, chunk % CHUNKS
