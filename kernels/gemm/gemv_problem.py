"""Problem, form and summation order of products of up to 8 BF16 rows with BF16 weights.

The summation order depends on K alone. Lane l of a warp takes the values 256 s + 8 l + i in order
of s, then i, by fma from 0 on in float32; lanes are folded by distance 16, 8, 4, 2, 1. A product of
two BF16 numbers is exact in float32, so only additions round. The bits of a row depend neither on M
and the other rows nor on N.

Host arithmetic only, no GPU and no DSL; `accumulated` is shared by the kernel and its reference.
Extents whose activations do not fit in one thread block's shared memory raise ShapeMismatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import ceil_div, round_up
from degarble.kernels.primitives.kv_problem import GEOMETRIES
from degarble.kernels.primitives.quantise_problem import LARGEST_ROWS
from degarble.kernels.runtime.targets import TARGETS

if TYPE_CHECKING:
    from collections.abc import Sequence

VECTOR = 8  # BF16 numbers of a lane's 16-byte load
LANES = 32
WARPS = 16
STEP = VECTOR * LANES  # values of K that a warp sums in a step


@dataclass(frozen=True)
class GemvWalk:
    """How a warp reads its rows of the weight; no bit of a result depends on it."""

    least_sums: int  # of a row of activations, from which on this walk is taken
    together: int  # rows of the weight that a warp sums at once
    ahead: int  # steps whose loads are under way while one is summed
    warps: int = WARPS  # of a thread block
    blocks: int = 1  # thread blocks of a multiprocessor
    copied: int = 1  # vectors of the activations that a thread loads at once
    exact: bool = False  # for plain products whose steps along K are whole turns of it
    once: bool = False  # a warp has one bundle at most, whose steps are one turn: none is refilled


# Few rows of a weight are spread over all warps of a GPU: by four, 128 rows would keep 32 warps
# busy, each waiting for memory by itself. Measured: docs/design-notes/row_kernels.md.
OF_ONE_ROW: tuple[GemvWalk, ...] = (
    GemvWalk(2048, 2, 3, exact=True),  # V3.2's K = 1536
    GemvWalk(2048, 2, 4),
    GemvWalk(0, 1, 14, warps=4, blocks=3, copied=8, exact=True),  # K = 7168
    GemvWalk(0, 1, 16, warps=4, blocks=3, copied=8, exact=True, once=True),  # V4's K = 4096
    GemvWalk(1280, 2, 4),
    GemvWalk(0, 1, 8),
)
OF_SEVERAL = (GemvWalk(8192, 4, 2), GemvWalk(0, 1, 4))
MOST_AHEAD = max(walk.ahead for walk in OF_ONE_ROW + OF_SEVERAL if not walk.exact)
ROWS = (1, 2, 4, 8)  # of activations: a form serves up to so many
DECODED_ROWS = (1, 4)  # of forms that quantise: the others would spill registers
MOST_COLUMNS = 16_384
OUTPUTS = ("fp32", "bf16")


@dataclass(frozen=True)
class GemvProblem:
    """G products of M rows of K activations with N rows of K weights, all BF16: M x G N sums.

    A row of activations holds those of all groups, one behind the other.
    """

    rows: int
    columns: int  # of a group
    inner: int  # of a group
    out: str = "fp32"
    groups: int = 1
    turned: int = 0  # values of a head, of heads whose last 64 are turned back before the product
    positions: int = 0  # rows of the table of turns
    decoded: bool = False  # whether sums are quantised to NVFP4 and decoded as well
    spared: int = 0  # multiprocessors left to launches on other branches of a graph

    def __post_init__(self) -> None:
        if self.spared < 0:
            raise InvalidArgument(
                "multiprocessors spared", self.spared, "0 or more", "0 takes all of them."
            )
        if (self.turned > 0) != (self.positions > 0):
            raise InvalidArgument(
                "positions of the table of turns", self.positions,
                "some where heads are turned back, none else", "Give both, or neither.",
            )  # fmt: skip
        if self.turned and (self.turned not in GEOMETRIES or self.inner % self.turned):
            raise ShapeMismatch(
                "heads of a product", (self.turned, self.inner),
                f"whole heads of {' or '.join(map(str, GEOMETRIES))} values in a group",
                "Turn them back by simt_inverse_rope.",
            )  # fmt: skip
        whole = self.columns > 0 and self.groups > 0 and self.sums < LARGEST_ROWS
        if not 0 <= self.rows <= ROWS[-1] or not whole:
            raise ShapeMismatch(
                "product of few rows",
                (self.rows, self.columns, self.groups),
                f"at most {ROWS[-1]} rows of activations, and rows of weights below 2**31",
                "More rows are a GEMM's business.",
            )
        if not VECTOR <= self.inner <= self.most_inner or self.inner % VECTOR:
            raise ShapeMismatch(
                "inner extent",
                self.inner,
                f"a multiple of {VECTOR} up to {self.most_inner} at {self.rows} rows",
                "Pad with zeros, or use a GEMM where the activations do not fit.",
            )
        if self.out not in OUTPUTS:
            raise UnknownName.among("dtype of a product", self.out, OUTPUTS)
        if self.decoded and not decodes(self):
            raise ShapeMismatch(
                "sums to quantise", (self.columns, self.out),
                f"bf16, and whole rounds of {WARPS} warps in a group", "Quantise them apart.",
            )  # fmt: skip

    @property
    def sums(self) -> int:
        """Return the sums of a row of activations, of all groups."""
        return self.groups * self.columns

    @property
    def most_inner(self) -> int:
        """Return the largest K whose activations fit in shared memory."""
        return inner_held(rows_of_form(self.rows))

    @property
    def bytes_moved(self) -> int:
        """Return the fewest bytes moved: every weight, activation and sum once."""
        sums = self.rows * self.sums * (4 if self.out == "fp32" else 2)
        return 2 * self.inner * (self.sums + self.rows * self.groups) + sums


@dataclass(frozen=True)
class GemvForm:
    """Compile-time parameters of the kernel; extents are passed at launch."""

    rows: int
    out: str
    target: str
    walk: GemvWalk
    turned: int = 0
    decoded: bool = False
    late: bool = False  # the next launch is set up when this one is through its bundles

    @property
    def together(self) -> int:
        """Return the neighbouring sums of a row that a thread block makes in a round."""
        return self.walk.warps * self.walk.together


def rows_of_form(rows: int) -> int:
    """Return the number of rows that the smallest sufficient form computes."""
    return next(most for most in ROWS if rows <= most)


def inner_held(rows: int) -> int:
    """Return how many activations of a row fit in shared memory, in whole turns of any walk."""
    limit = min(target.shared_memory_bytes for target in TARGETS.values())
    whole = MOST_AHEAD * STEP
    return min(MOST_COLUMNS, limit // (2 * rows) // whole * whole)


def choose_form(problem: GemvProblem, target: str) -> GemvForm:
    """Return the form that answers a problem."""
    rows, walk = rows_of_form(problem.rows), walk_of(problem)
    late = problem.spared > 0
    return GemvForm(rows, problem.out, target, walk, problem.turned, problem.decoded, late)


def walk_of(problem: GemvProblem) -> GemvWalk:
    """Return how the rows of a problem's weight are walked."""
    return _walk(problem, plain=not (problem.turned or problem.decoded))


def _walk(problem: GemvProblem, *, plain: bool) -> GemvWalk:
    walks = OF_ONE_ROW if rows_of_form(problem.rows) == 1 else OF_SEVERAL
    made = ceil_div(problem.inner, STEP)
    return next(
        walk
        for walk in walks
        if problem.sums >= walk.least_sums
        and (not walk.exact or (plain and made % walk.ahead == 0))
        and (not walk.once or made == walk.ahead)
    )


def decodes(problem: GemvProblem) -> bool:
    """Return whether sums can be quantised where they are made: by whole rounds of all warps."""
    walk = _walk(problem, plain=False)
    whole = problem.columns % (walk.warps * walk.together) == 0
    fits = rows_of_form(problem.rows) in DECODED_ROWS
    return fits and whole and problem.out == "bf16"


def steps(problem: GemvProblem, walk: GemvWalk) -> int:
    """Return the steps that a warp makes along K, rounded up to whole turns of its walk."""
    made: int = round_up(ceil_div(problem.inner, STEP), walk.ahead)
    return made


def grid(problem: GemvProblem, walk: GemvWalk, processors: int) -> tuple[int, int]:
    """Return the thread blocks of a group, and the groups.

    No more than a walk's blocks a multiprocessor that is not spared, of which at most a quarter
    are; but one block a group, and as many as it takes where each warp has one bundle (`once`).
    """
    bundles: int = ceil_div(problem.columns, walk.together)
    rounds = bundles // walk.warps if problem.decoded else bundles
    if walk.exact:  # no warp without a bundle
        rounds = ceil_div(bundles, walk.warps)
    if walk.once:
        return rounds, problem.groups
    spared = min(problem.spared, processors // 4)
    places = (processors - spared) * walk.blocks
    return min(rounds, max(1, places // problem.groups)), problem.groups


# ---- the arithmetic of a lane --------------------------------------------------------------------


def accumulated(total: Any, weights: Sequence[Any], activations: Sequence[Any]) -> Any:
    """Add the products of a lane's step to its sum in order, one fma each."""
    for weight, activation in zip(weights, activations, strict=True):
        total = ops.fma_rn(weight, activation, total)
    return total
