"""Derived facts of tcgen05 GEMM forms: tensor memory columns, warps, instructions, shared memory.

Columns of tensor memory that sums and scales take and where they begin; matrix instructions and
scale copies of a stage; arrivals at barriers; shared memory. Loads and their bytes come from
gemm.problem, which all architectures share. Host arithmetic only, no GPU and no DSL. Machine code
was inspected; nothing was run, for want of an sm_100a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.gemm import problem as facts
from degarble.kernels.runtime.targets import SM100A, TARGETS

if TYPE_CHECKING:
    from degarble.kernels.gemm.problem import GemmForm, GemmProblem

LANES = 128  # rows of tensor memory; PTX ISA 9.1, tensor memory addressing
LEAST_COLUMNS = 32  # of an allocation, which is a power of two; PTX ISA 9.1, tcgen05.alloc
INSTRUCTION_K = {
    "nvfp4": 64,
    "bf16": 16,
    "fp8_block": 32,
}  # of one tcgen05.mma; PTX ISA 9.1, tcgen05.mma shapes
SCALES_OF_WORD = 4  # a column of 32 bits holds a row's four scales
ROWS_OF_COLUMN = 32  # of scales: row i is lane i mod 32, column i div 32
SWIZZLE_BYTES = 128  # a row of a stage of codes

STORING_WARPS, MULTIPLYING_WARP, LOADING_WARP = 4, 4, 5
WARPS = 6
ACCUMULATORS = 2  # where two sums and the scales fit: stores overlap with the next tile
STAGE_ACCUMULATORS = 4  # where every stage has sums of its own, promoted one by one
ADDRESS_BYTES = 16  # where tcgen05.alloc leaves its address

# Two thread blocks together, a tile of 256 rows. A separate table, because it is not confirmed yet
# that their arithmetic equals that of one (docs/design-notes/sm100_gemm.md).
PAIRS = tuple(
    facts.GemmTactic(up_to, rows=LANES, columns=columns, inner=256, cluster_rows=2, together=2)
    for up_to, columns in ((256, 64), (512, 128), (2048, 192), (facts.ANY, 256))
)


def choose_pair(problem: GemmProblem) -> GemmForm:
    """Return the form of a pair of thread blocks for an NVFP4 problem, by the table."""
    tactic = next(tactic for tactic in PAIRS if problem.rows <= tactic.rows_up_to)
    return facts.GemmForm(problem.operands, problem.scales, SM100A.name, tactic)


def threads() -> int:
    """Return the threads of a thread block: four warps store, one multiplies, one loads."""
    return WARPS * facts.WARP


def threads_that_store() -> int:
    """Return the threads of the storing warps: one a lane of tensor memory."""
    return STORING_WARPS * facts.WARP


# ---- tensor memory -------------------------------------------------------------------------------


def scale_columns(form: GemmForm) -> tuple[int, int]:
    """Return the columns of a stage's scales of A and of B; 0 where there are none."""
    if form.operands != facts.NVFP4.name:
        return 0, 0
    words = form.tactic.inner // (facts.NVFP4.block * SCALES_OF_WORD)
    a, b = (
        ceil_div(rows, facts.SCALE_TILE_ROWS) * facts.SCALE_TILE_ROWS // ROWS_OF_COLUMN * words
        for rows in (form.tactic.rows, form.tactic.columns)
    )
    return a, b


def accumulators(form: GemmForm) -> int:
    """Return how many sums of tiles tensor memory holds at once."""
    left = TARGETS[form.target].tensor_memory_columns - sum(scale_columns(form))
    most = STAGE_ACCUMULATORS if form.operands == facts.FP8_BLOCK.name else ACCUMULATORS
    count: int = min(most, left // form.tactic.columns)
    if count < 1:
        raise InvalidArgument(
            "columns of a tile", form.tactic.columns, "tensor memory that holds it", "Use fewer."
        )
    return count


def overlaps(form: GemmForm) -> bool:
    """Return whether two sums share some columns: of a pair, where scales leave room for one.

    Sums are released once the shared columns, one piece, are in registers; the next tile is
    multiplied while the rest is stored.
    """
    shared = 2 * form.tactic.columns + sum(scale_columns(form))
    shared -= TARGETS[form.target].tensor_memory_columns
    fits: bool = 0 < shared <= facts.PIECE_COLUMNS
    return form.tactic.together > 1 and accumulators(form) == 1 and fits


def places_of_sums(form: GemmForm) -> int:
    """Return the number of places that sums take in turn."""
    return 2 if overlaps(form) else accumulators(form)


def columns_apart(form: GemmForm) -> int:
    """Return the columns from one place of sums to the next."""
    if not overlaps(form):
        return form.tactic.columns
    left: int = TARGETS[form.target].tensor_memory_columns - sum(scale_columns(form))
    return left - form.tactic.columns


def piece_in_turn(number: Any, place: Any, pieces: int) -> Any:
    """Return which piece of overlapping sums is read: shared first, the first place's last."""
    return number + (1 - place) * (pieces - 1 - 2 * number)


def columns_of_sums(form: GemmForm) -> int:
    """Return the columns of all places of sums."""
    return (places_of_sums(form) - 1) * columns_apart(form) + form.tactic.columns


def columns_held(form: GemmForm) -> int:
    """Return the columns of sums and scales."""
    return columns_of_sums(form) + sum(scale_columns(form))


def columns_allocated(form: GemmForm) -> int:
    """Return the columns that are allocated: a power of two."""
    return max(LEAST_COLUMNS, 1 << (columns_held(form) - 1).bit_length())


def first_columns(form: GemmForm) -> tuple[int, int]:
    """Return the columns where the scales of A and of B begin, after the sums."""
    a = columns_of_sums(form)
    return a, a + scale_columns(form)[0]


# ---- which scales a tile takes: on host integers, and inside a kernel ----------------------------


def tiles_of_boxes(tile: tuple[Any, ...], form: GemmForm) -> tuple[Any, ...]:
    """Return the box that each load brings of its matrix: codes of A and B, then scale tiles.

    Where a tile has an expert, boxes of B are those of the expert's matrices.
    """
    row, column, *expert = tile
    first = {
        "a": row * form.tactic.rows // facts.SCALE_TILE_ROWS,
        "b": column * (form.tactic.columns // form.parts) // facts.SCALE_TILE_ROWS,
    }
    # Of two thread blocks together each brings its half of B; neighbours along M are a pair.
    together = form.tactic.together
    boxes = [row, column if together == 1 else column * together + row % together]
    for load in facts.loads(form)[2:]:
        boxes.append(first[load.side] // load.rows)
        first[load.side] = first[load.side] + load.rows
    sides = (load.side for load in facts.loads(form))
    return tuple(
        (box, *expert) if expert and side == "b" else box
        for side, box in zip(sides, boxes, strict=True)
    )


def require_extents(problem: GemmProblem, form: GemmForm) -> None:
    """Raise for rows that a swapped tile cannot address: scales begin at whole 32 rows."""
    tactic = form.tactic
    if tactic.columns % ROWS_OF_COLUMN and problem.rows > tactic.columns:
        raise InvalidArgument(
            "M of a GEMM",
            problem.rows,
            f"no more than one tile of {tactic.columns}, which is not a multiple of "
            f"{ROWS_OF_COLUMN}",
            "Take the tactic that the table chooses.",
        )


def columns_skipped(column: Any, form: GemmForm) -> Any:
    """Return the columns of B's scales before this tile's, which may begin within 128 rows."""
    return column * form.tactic.columns % facts.SCALE_TILE_ROWS // ROWS_OF_COLUMN


def end_of_scales(blocks: Any, step: Any, form: GemmForm) -> tuple[Any, Any]:
    """Return the word of this step that K ends within, and the blocks of it that are kept.

    0 blocks are kept where K ends between words. `blocks` counts those of all of K.
    """
    left = blocks - step * (form.tactic.inner // facts.NVFP4.block)
    return left // SCALES_OF_WORD, left % SCALES_OF_WORD


# ---- instructions of a stage ---------------------------------------------------------------------


def instructions(form: GemmForm) -> int:
    """Return the tcgen05.mma of one stage: each takes all rows and columns of the tile."""
    return form.tactic.inner // INSTRUCTION_K[form.operands]


def stores(form: GemmForm) -> int:
    """Return the TMA stores of a thread block's part of a tile: one a piece."""
    columns: int = form.tactic.columns
    return 1 if form.tactic.swapped else columns // facts.PIECE_COLUMNS


def scale_copies(form: GemmForm) -> int:
    """Return the scale copies of a stage: 32 lanes of four columns each, one scale tile."""
    return sum(scale_columns(form)) // (facts.SCALE_TILE_ROWS // ROWS_OF_COLUMN)


# ---- who shares loads, who arrives ---------------------------------------------------------------


def sharers(form: GemmForm) -> tuple[int, ...]:
    """Return by load how many thread blocks of a cluster receive a box at once.

    In a pair each block has its own half of B's codes and the same scales of B.
    """
    tactic = form.tactic
    counts = {"a": tactic.cluster_columns, "b": tactic.cluster_rows}
    return tuple(
        counts[load.side] // (tactic.together if load.name == "b" else 1)
        for load in facts.loads(form)
    )


def arrivals_of_stage(form: GemmForm) -> int:
    """Return the arrivals that empty a stage: one per instruction stream that its boxes reach."""
    tactic = form.tactic
    return tactic.cluster_rows // tactic.together + tactic.cluster_columns - 1


def arrivals_of_sums(form: GemmForm) -> int:
    """Return the arrivals that free sums: every storing thread, of both blocks of a pair."""
    return form.tactic.together * threads_that_store()


# ---- shared memory -------------------------------------------------------------------------------


def piece_bytes() -> int:
    """Return the bytes of one TMA store: all lanes, 64 columns, BF16."""
    return LANES * facts.PIECE_COLUMNS * 2


def output_bytes(form: GemmForm) -> int:
    """Return the bytes of the piece buffers; a swapped piece is all columns of the tile.

    FC1 of experts (gate and up) leaves as codes from registers, without buffers.
    """
    if form.parts > 1:
        return 0
    if form.tactic.swapped:
        return facts.PIECES_AT_ONCE * LANES * form.tactic.columns * 2
    return facts.PIECES_AT_ONCE * piece_bytes()


def footprint(form: GemmForm) -> facts.Footprint:
    """Return a thread block's shared memory, with as many stages as fit."""
    row_bytes = facts.loads(form)[0].row_bytes
    if row_bytes != SWIZZLE_BYTES:
        raise InvalidArgument(
            "bytes of a row in a stage",
            row_bytes,
            f"{SWIZZLE_BYTES}",
            "Take that much of K at once.",
        )
    output = output_bytes(form)
    stage = facts.transaction_bytes(form)
    others = output + ADDRESS_BYTES + facts.ALIGNMENT
    stages = facts.stages_that_fit(stage, others, form.target)
    return facts.Footprint(stages, stage, 0, output, 2 * (stages + accumulators(form)))
