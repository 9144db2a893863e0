"""Problems and forms of mHC for few tokens, in two launches a sublayer. Importable without the DSL.

`simt_mhc_onward` spreads a sublayer's output over the streams and projects the new streams for the
next sublayer; `simt_mhc_norm` adds up that projection, mixes, collapses and norms, and quantises
and decodes the normed row where products of NVFP4 follow. Each replaces several launches that take
longer to begin than to compute. The arithmetic and the order of every sum are those of the kernels
that they replace: mhc_problem, rows/problem.py (RMSNorm), quantise_problem, and moe's sum of rows.

Shape letters: T tokens, S streams, D width, K chosen experts, R rows of experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.primitives.quantise_problem import BLOCK
from degarble.kernels.rows import problem as norms
from degarble.kernels.rows.mhc_problem import (
    CHUNK_VALUES,
    LINE,
    MOST_GROUPS,
    STEP,
    STREAMS,
    InnerCut,
    MhcMixForm,
    MhcMixProblem,
    ProjectForm,
    ProjectProblem,
)
from degarble.kernels.rows.problem import NormProblem

MOST_TOKENS = 4  # whose values of a piece a warp computes at once
MOST_CLUSTER = 8  # thread blocks of a portable cluster
NORM_WARPS = 4  # of a thread block: half a block of 16 values a thread, 32 lanes of the norm
MIXING_THREADS = 32  # one more warp, for the coefficients
MOST_DECODED = 2
LAYER, ROWS = SOURCES = ("layer", "rows")


def serves(tokens: int, width: int) -> bool:
    """Return whether both kernels have a form for a width, and for so many tokens."""
    return (
        0 < tokens <= MOST_TOKENS
        and width % STEP == 0
        and norms.SMALLEST_COLUMNS <= width <= norms.LARGEST_COLUMNS
        and InnerCut(STREAMS * width).per_piece == 1
        and cluster_of(width) <= MOST_CLUSTER
    )


def require_served(tokens: int, width: int) -> None:
    """Raise for tokens or a width without a form."""
    if not serves(tokens, width):
        raise ShapeMismatch(
            "streams of few tokens", (tokens, width),
            f"1 to {MOST_TOKENS} tokens, and a width in a multiple of {STEP} up to 7168",
            "Use simt_mhc_project, simt_mhc and simt_rmsnorm.",
        )  # fmt: skip


def cluster_of(width: int) -> int:
    """Return the thread blocks that share a token: a warp of the norm's lanes each."""
    return norms.lanes_of_row(width) // norms.LANES


# --------------------------------------------------------------------------------------------------
# Spread a sublayer's output, and project the new streams.


@dataclass(frozen=True)
class OnwardProblem:
    """T tokens of four streams of D values, and what a sublayer made of them.

    `source` is a row a token, or rows of experts, whose weighted sum is that row.
    """

    tokens: int
    width: int
    source: str = LAYER
    chosen: int = 0  # experts of a token
    rows: int = 0  # of all experts
    rides: bool = False  # whether the shared expert's rows are the first of them

    def __post_init__(self) -> None:
        require_served(self.tokens, self.width)
        if self.source not in SOURCES:
            raise UnknownName.among("source of a spread", self.source, SOURCES)
        if (self.source == ROWS) != (self.chosen > 0 and self.rows > 0):
            raise InvalidArgument(
                "experts of a spread", (self.chosen, self.rows),
                f"some where the source is {ROWS!r}, none else", "Say how many rows there are.",
            )  # fmt: skip

    @property
    def project(self) -> ProjectProblem:
        """Return the projection of the new streams."""
        return ProjectProblem(self.tokens, self.width)

    @property
    def bytes_moved(self) -> int:
        """Return the fewest bytes: streams read and written, the output, weight, partial sums."""
        row = 2 * self.width
        made = self.rows * row if self.source == ROWS else self.tokens * row
        weight = self.project.bytes_moved - self.tokens * (STREAMS * row + 4 * 25)
        return 2 * self.tokens * STREAMS * row + made + weight + 4 * LINE * self.partials

    @property
    def partials(self) -> int:
        """Return the number of lines of partial sums of all tokens."""
        return self.tokens * InnerCut(self.project.inner).pieces


@dataclass(frozen=True)
class OnwardForm:
    """Compile-time parameters of a kernel; extents come with the launch."""

    source: str
    chosen: int
    words: int  # of a lane: those of one token, or of several at once
    target: str

    @property
    def project(self) -> ProjectForm:
        """Return the form of the projection whose device code sums a piece."""
        return ProjectForm("layer", few=True, target=self.target, lines="pieces", one_step=True)

    @property
    def lanes(self) -> int:
        """Return the lanes that share a token's values of a piece."""
        return STEP // 2 // self.words


def choose_onward_form(problem: OnwardProblem, target: str) -> OnwardForm:
    """Return the form for a problem."""
    words = 1 if problem.tokens == 1 else CHUNK_VALUES // 2
    return OnwardForm(problem.source, problem.chosen, words, target)


# --------------------------------------------------------------------------------------------------
# Add up a projection, mix, collapse, norm; quantise and decode.


@dataclass(frozen=True)
class MhcNormProblem:
    """T tokens of four streams of D values, with the partial sums of their projection.

    `decoded` is how many times the normed row is quantised, each with a scale of its own.
    """

    tokens: int
    width: int
    iterations: int = 20
    epsilon: float = 1e-6
    norm_epsilon: float = 1e-6
    weight: str = "bf16"
    decoded: int = 0

    def __post_init__(self) -> None:
        require_served(self.tokens, self.width)
        assert self.mix.part == "all", "refuses what the parts refuse"
        assert self.norm.layout is None, "and the norm"
        if not 0 <= self.decoded <= MOST_DECODED:
            raise InvalidArgument(
                "decoded rows", self.decoded, f"0 to {MOST_DECODED}", "More have no reader."
            )

    @property
    def mix(self) -> MhcMixProblem:
        """Return the mixing before the norm."""
        told = (self.iterations, self.epsilon, self.norm_epsilon)
        return MhcMixProblem(self.tokens, self.width, "all", *told)

    @property
    def norm(self) -> NormProblem:
        """Return the norm of what is collapsed."""
        return NormProblem(self.tokens, self.width, self.norm_epsilon, self.weight)

    @property
    def pieces(self) -> int:
        """Return the number of partial sums of a token."""
        return InnerCut(STREAMS * self.width).pieces

    @property
    def bytes_moved(self) -> int:
        """Return the fewest bytes that have to be read and written."""
        row = 2 * self.width
        made = (STREAMS + 2 + self.decoded) * row + 4 * (STREAMS + STREAMS * STREAMS)
        weight = self.width * (4 if self.weight == "fp32" else 2)
        return self.tokens * (made + 4 * LINE * self.pieces) + weight


@dataclass(frozen=True)
class MhcNormForm:
    """Compile-time parameters of a kernel; extents come with the launch."""

    weight: str
    decoded: int
    cluster: int  # thread blocks that share a token
    in_group: int  # partial sums of a group
    target: str

    @property
    def turns(self) -> int:
        """Return how many groups a warp adds up at most."""
        made: int = ceil_div(MOST_GROUPS, NORM_WARPS * self.cluster)
        return made

    @property
    def mixing(self) -> MhcMixForm:
        """Return the form of the coefficients."""
        return MhcMixForm("all", self.target, ends_early=True)


def choose_mhc_norm_form(problem: MhcNormProblem, target: str) -> MhcNormForm:
    """Return the form for a problem."""
    cut = InnerCut(STREAMS * problem.width)
    return MhcNormForm(
        problem.weight, problem.decoded, cluster_of(problem.width), cut.per_group, target
    )


assert BLOCK == 2 * CHUNK_VALUES, "half a block of values is a thread's chunk"
