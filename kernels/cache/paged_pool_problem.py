"""Problem and forms of pooling windows from paged states, vLLM's cache of states.

A state row is float32: latents, then gates with their bias. Position p of a sequence lies in the
page of entry p // rows of its table. A token's row is written to its slot first; then each token
that closes a window pools that window's rows from the pages, whatever call wrote them. So a cached
prefix is continued through its pages, and chunked prefill, batching and preemption change no bit.
The arithmetic is compressor_problem's. Shape letters as in compressor_problem; N pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from degarble.harness.base.errors import ShapeMismatch
from degarble.kernels.cache.compressor_problem import PoolForm, PoolProblem
from degarble.kernels.primitives import attention_rows as rows

VECTOR = 16  # bytes of a load; pages and their rows start at multiples of it
FEW_TOKENS = 8  # up to here more processors share a window's channels
ALONE = 256  # tokens up to which each has thread blocks of its own; most of more close nothing
SPANS = {4: 4, 128: 16}  # tokens that share thread blocks beyond that, by ratio
MOST_THREADS = 128  # of a block that keeps a token's row


@dataclass(frozen=True)
class StatePages:
    """A cache of states: slot s is row s % rows of page s // rows."""

    rows: int  # of a page
    count: int
    columns: int  # of latents, and of gates
    page_bytes: int = 0  # 0: rows close together; else a larger stride, as pools have it

    def __post_init__(self) -> None:
        rows.require_extent("rows of a page of states", self.rows, 1)
        rows.require_extent("columns of states", self.columns, 1)
        rows.require_extent("slots of states", self.rows * self.count)
        needed = self.rows * self.row_bytes
        if self.page_bytes and (self.page_bytes < needed or self.page_bytes % VECTOR):
            raise ShapeMismatch(
                "bytes of a page of states", self.page_bytes,
                f"a multiple of {VECTOR} and at least {needed} for {self.rows} rows",
                "Leave it out for rows close together.",
            )  # fmt: skip
        rows.require_extent("bytes of a page of states", self.stride)

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a token's latents and gates."""
        return 8 * self.columns

    @property
    def stride(self) -> int:
        """Return the bytes from page to page."""
        return self.page_bytes or self.rows * self.row_bytes

    @property
    def slots(self) -> int:
        """Return the number of rows of all pages."""
        return self.rows * self.count


@dataclass(frozen=True)
class PagedPoolProblem:
    """T tokens of B sequences, each with the pages of its states."""

    tokens: int
    sequences: int
    ratio: int
    pages: StatePages
    width: int = rows.WIDTH

    def __post_init__(self) -> None:
        rows.require_extent("tokens", self.tokens)
        rows.require_extent("sequences", self.sequences)
        wanted = PoolProblem(0, 0, 0, 1, self.ratio, self.width).columns
        if self.pages.columns != wanted:
            raise ShapeMismatch(
                "columns of states", self.pages.columns,
                f"{wanted} for windows of {self.ratio} and entries of {self.width}",
                "Build the pages for the compressor's states.",
            )  # fmt: skip
        rows.require_extent("pairs of channels of all tokens", self.tokens * self.width // 2)

    @property
    def columns(self) -> int:
        """Return the number of columns of latents, and of gates."""
        return self.pages.columns


@dataclass(frozen=True)
class PagedForm:
    """Compile-time parameters of the kernels; extents come with the launch."""

    pool: PoolForm
    rows: int  # of a page of states
    span: int  # tokens that a thread block looks at, one after the other

    @property
    def keeping_threads(self) -> int:
        """Return the number of threads that store a token's row, four columns each at a time."""
        return min(MOST_THREADS, self.pool.columns * 4 // VECTOR)


def choose_form(problem: PagedPoolProblem, target: str) -> PagedForm:
    """Return the form for a problem: few, some, and many tokens differ."""
    few = problem.tokens <= FEW_TOKENS
    span = 1 if problem.tokens <= ALONE else SPANS[problem.ratio]
    pool = PoolForm(problem.ratio, problem.width, alone=False, target=target, few=few)
    return PagedForm(pool, problem.pages.rows, span)
