"""What looking rows up in an embedding means: extents, dtype of ids, what an id outside becomes.

Owns the problem, the choice and the derived facts. Pure host arithmetic, no GPU and no DSL.

An id that lies outside the table gives a row of zeros on the GPU: a kernel cannot refuse, and what
a wrong id reads has to be the same every time. Ids on the CPU are looked at before anything runs.
Refuses extents that 16-byte vectors do not fill, and other dtypes of ids. Kept honest by
suites/kernels/rows/test_embed_problem.py.
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
        """Vectors of a row."""
        return self.columns // VECTOR

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written where every id is another one."""
        return self.tokens * (4 * self.columns + (8 if self.ids == "int64" else 4))


@dataclass(frozen=True)
class EmbedForm:
    """What a kernel is compiled for; the extents come with the launch."""

    ids: str
    target: str


def choose_form(problem: EmbedProblem, target: str) -> EmbedForm:
    """Return the form that answers a problem."""
    return EmbedForm(problem.ids, target)


def threads(problem: EmbedProblem) -> int:
    """Threads of a thread block: four vectors each, until there are 256."""
    needed: int = round_up(ceil_div(problem.vectors, VECTORS_OF_THREAD), LANES)
    return min(MOST_THREADS, needed)


def grid(problem: EmbedProblem) -> tuple[int, int]:
    """Thread blocks: one a token along x, and along y as many as a row needs."""
    across: int = ceil_div(problem.vectors, threads(problem) * VECTORS_OF_THREAD)
    return problem.tokens, across
