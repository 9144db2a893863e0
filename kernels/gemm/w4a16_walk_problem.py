"""Form and memory of walks of one row of activations over NVFP4 matrices (sm_90a).

Sums have the order of w4a16_problem, so a row's bits are those of sm90_gemm_w4a16. How they are
made differs: a stage's codes are one box of 128-byte lines, swizzled; a warp keeps its part of the
activations, in order, for as long as the row stays; and the warps that load add up the parts, so
no warp that multiplies waits for another one.

A unit is what a stage of every round holds: a tile of 16 outputs, or two where K has no more steps
than half of the warps. Host arithmetic only, no GPU and no DSL; functions on places run on ints and
inside the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from degarble.harness.formats.layouts import SWIZZLE_128X4, ceil_div
from degarble.kernels.gemm import w4a16_problem as product
from degarble.kernels.primitives.e2m1 import HALF_SCALE_EXPONENT, HALF_VALUE_EXPONENT
from degarble.kernels.primitives.quantise_problem import SWIGLU, VALUES
from degarble.kernels.runtime.targets import SM90A

if TYPE_CHECKING:
    from degarble.kernels.gemm.w4a16_problem import W4A16Problem

WARPS = product.PARTS  # that multiply
LINE = 128  # bytes of codes that lie side by side in a stage: two steps of a row
LINE_STEPS = 2
CHUNK = 16  # bytes that the swizzle moves
RUN = 4  # rows of a tile that 128x4 stores side by side, and runs of a tile
CODE_BYTES = WARPS * product.TILE * product.STEP // 2  # of a stage
STAGE_BYTES = CODE_BYTES + CODE_BYTES // 8  # its scales follow its codes
STEP_BYTES = 2 * product.STEP  # of activations
SUM_BUFFERS = 4  # units whose sums may wait to be added up
# Warps that load and add up, a place of sums each. One on each of a processor's four schedulers:
# a single one would leave its scheduler more to issue than the other three, and all warps wait for
# the slowest.
LOADING = SUM_BUFFERS
SUM_BYTES = WARPS * product.TILE * 4  # of a unit
MOST_STAGES = 16
# Measured on an H200: docs/design-notes/moe_kernel.md.
STAGES = 3
RESIDENT = 2  # thread blocks of a processor
ALIGNMENT = 1024  # of stages: the swizzle depends on bits of the address
MOST_COLUMNS = 9 * product.ROUND  # V3.2's widest; longer rows are not measured
DECODED = "decoded"  # activations that are multiplied as they are
DECODED_EXPONENT = HALF_VALUE_EXPONENT + HALF_SCALE_EXPONENT  # of weights that are multiplied
SOURCES = (DECODED, VALUES.name, SWIGLU.name)


@dataclass(frozen=True)
class W4A16WalkForm:
    """Compile-time parameters. What is no decoded row is quantised and decoded by each warp."""

    products: int  # matrices of an expert, over the same row: gate and up, or one
    parts: int  # of K that have steps: 16, or 8 of each of two tiles
    rounds: int  # along K
    whole: bool  # whether all parts have a step in each round
    stages: int
    resident: int  # thread blocks of a processor
    source: str  # of the activations: decoded rows, values, or gate and up before SwiGLU
    limit: float | None  # of SwiGLU
    places: bool  # whether each slot's row is written, or that it has none
    early: bool  # whether weights are copied before the previous launch has ended
    target: str

    @property
    def tiles(self) -> int:
        """Return the tiles of a unit."""
        return WARPS // self.parts

    @property
    def threads(self) -> int:
        """Return the threads: of warps that multiply, and of those that load and add up."""
        return 32 * (WARPS + LOADING)

    @property
    def kept_values(self) -> int:
        """Return the values of a row that a lane loads at once.

        Four where a round is the whole row, so that all 32 lanes load; else eight.
        """
        return product.STEP // 32 if self.source != DECODED and self.rounds == 1 else 8


def serves(problem: W4A16Problem, target: str) -> bool:
    """Return whether a product of one row is walked: whole lines and whole 128 rows of 128x4."""
    n, k, layout = problem.outputs, problem.columns, problem.layout
    whole = n % SWIZZLE_128X4.row_tile == 0 and k % product.COPIED == 0
    return target == SM90A.name and layout == SWIZZLE_128X4.name and whole and k <= MOST_COLUMNS


def form_of(
    problem: W4A16Problem,
    products: int,
    *,
    source: str = DECODED,
    limit: float | None = None,
    places: bool = False,
    early: bool = False,
) -> W4A16WalkForm:
    """Return the form of a product of one row."""
    half = problem.columns <= product.ROUND // 2
    parts = product.PARTS // 2 if half else product.PARTS
    rounds = rounds_of(problem.columns)
    whole = problem.columns == rounds * parts * product.STEP
    # From a unit to the warp's next one, feed_units passes one matrix's end at most.
    assert tiles_of_matrix(problem.outputs) // (WARPS // parts) >= LOADING
    return W4A16WalkForm(
        products, parts, rounds, whole, STAGES, RESIDENT, source, limit, places, early, SM90A.name
    )


def most_shared(resident: int) -> int:
    """Return the shared memory of each of the thread blocks that share a processor."""
    every = product.SHARED_BYTES + product.RESERVED_BYTES
    return every // resident - product.RESERVED_BYTES


def shared_bytes(columns: int, stages: int) -> int:
    """Return the shared memory of a thread block: stages, activations, sums, barriers."""
    kept = rounds_of(columns) * WARPS * STEP_BYTES
    return stages * STAGE_BYTES + kept + SUM_BUFFERS * SUM_BYTES + product.BARRIER_BYTES


def rounds_of(columns: int) -> int:
    """Return the rounds along K."""
    rounds: int = ceil_div(columns, product.ROUND)
    return rounds


def tiles_of_matrix(outputs: int) -> int:
    """Return the tiles of a matrix of whole 128 rows."""
    return outputs // product.TILE


def shares(rows: int, outputs: int, form: W4A16WalkForm, processors: int) -> tuple[int, int, int]:
    """Return the thread blocks, the units that each walks at least, how many walk one more."""
    units = rows * form.products * tiles_of_matrix(outputs) // form.tiles
    blocks = min(units, form.resident * processors)
    return blocks, *divmod(units, blocks)


def code_box(form: W4A16WalkForm) -> tuple[int, ...]:
    """Return the TMA box of a tile's codes: words of a line, rows of a run, runs, lines, one."""
    return LINE // 4, RUN, RUN, form.parts // LINE_STEPS, 1


def scale_box(form: W4A16WalkForm) -> tuple[int, ...]:
    """Return the TMA box of a tile's scales: words of 16 rows, those words along K, one."""
    return product.TILE * 4, 2 * form.parts, 1


def place_of(group: Any) -> Any:
    """Return the place in a tile of an mma's row 0 to 7; that of row 8 and on is eight more.

    Even places first: then the 16 lanes that read at once reach every bank.
    """
    return group % 4 * 2 + group // 4


def code_offset(part: Any, place: Any, lane: Any) -> Any:
    """Return the byte offset in a tile of a lane's first codes of a place below 8.

    Those of its second block are at that offset with bit 5 changed, of place + 8 a KB behind.
    """
    line = part // LINE_STEPS * product.TILE + place
    chunk = part % LINE_STEPS * 4 + lane % 4 // 2
    return line * LINE + (chunk ^ place) * CHUNK + lane % 4 % 2 * 8


def scale_offset(part: Any, place: Any) -> Any:
    """Return the byte offset in a tile of a place's first scales; place + 8 is 8 bytes behind."""
    return part * 128 + place % RUN * 16 + place // RUN * 4
