"""Problem and form of embedding lookup.

An id outside the table gives a row of zeros on the GPU: a kernel cannot raise, and the result has
to be the same every time. Ids on the CPU are checked before the launch.
"""

from __future__ import annotations

from dataclasses import dataclass

from degarble.harness.base.errors import ShapeMismatch, UnknownName
from degarble.harness.formats.layouts import ceil_div, round_up
from degarble.kernels.primitives.quantise_problem import LARGEST_ROWS

VECTOR = 8  # BF16 numbers of a 16-byte vector
VECTORS_OF_THREAD = 4  # in flight at once
MOST_THREADS = 256
LANES = 32
IDS = ("int32", "int64")


@dataclass(frozen=True)
class EmbedProblem:
    """T ids, each naming a row of a BF16 table [V, K]."""

    tokens: int
    vocabulary: int
    columns: int
    ids: str = "int64"

    def __post_init__(self) -> None:
        if (
            not 0 <= self.tokens < LARGEST_ROWS
            or not 1 <= self.vocabulary < LARGEST_ROWS
            or self.columns < VECTOR
            or self.columns % VECTOR
        ):
            raise ShapeMismatch(
                "embedding",
                (self.tokens, self.vocabulary, self.columns),
                f"tokens and rows below 2**31, columns in a multiple of {VECTOR}",
                "Pad the columns with zeros.",
            )
        if self.ids not in IDS:
            raise UnknownName.among("dtype of token ids", self.ids, IDS)

    @property
    def vectors(self) -> int:
        """Return the number of vectors of a row."""
        return self.columns // VECTOR

    @property
    def bytes_moved(self) -> int:
        """Return the bytes read and written if every id is different."""
        return self.tokens * (4 * self.columns + (8 if self.ids == "int64" else 4))


@dataclass(frozen=True)
class EmbedForm:
    """Compile-time parameters of a kernel; extents come with the launch."""

    ids: str
    target: str


def choose_form(problem: EmbedProblem, target: str) -> EmbedForm:
    """Return the form for a problem."""
    return EmbedForm(problem.ids, target)


def threads(problem: EmbedProblem) -> int:
    """Return the number of threads of a thread block: four vectors each, until there are 256."""
    needed: int = round_up(ceil_div(problem.vectors, VECTORS_OF_THREAD), LANES)
    return min(MOST_THREADS, needed)


def grid(problem: EmbedProblem) -> tuple[int, int]:
    """Return the thread blocks: one a token along x, and along y as many as a row needs."""
    across: int = ceil_div(problem.vectors, threads(problem) * VECTORS_OF_THREAD)
    return problem.tokens, across
