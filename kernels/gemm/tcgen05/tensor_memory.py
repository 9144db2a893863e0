"""What follows from a GEMM form on sm_100a: tensor memory, shared memory, roles, instructions.

Owns the derived facts of tcgen05 forms: columns of tensor memory that sums and scale factors take,
and where they begin; matrix instructions and copies of scales a stage; warps by role; what shared
memory holds. Built on gemm_problem (loads, transaction_bytes, stages_that_fit), which all
architectures share. Pure host arithmetic: no GPU and no DSL.

Kept honest by suites/kernels/gemm/tcgen05/test_tensor_memory.py, and by the machine code of each
form in suites/kernels/gemm/test_sm100_gemm_nvfp4.py. Nothing of it was run: no sm_100a device is
here.
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

# Two thread blocks together, a tile of 256 rows. A table of its own: nobody has confirmed yet that
# their arithmetic is that of one (docs/design-notes/sm100_gemm.md).
PAIRS = tuple(
    facts.Tactic(up_to, rows=LANES, columns=columns, inner=256, cluster_rows=2, together=2)
    for up_to, columns in ((256, 64), (512, 128), (2048, 192), (facts.ANY, 256))
)


def choose_pair(problem: GemmProblem) -> GemmForm:
    """Return the form of two thread blocks together that answers an NVFP4 problem, by the table."""
    tactic = next(tactic for tactic in PAIRS if problem.rows <= tactic.rows_up_to)
    return facts.GemmForm(problem.operands, problem.scales, SM100A.name, tactic)


def threads() -> int:
    """Threads of a thread block: four warps store, one multiplies, one loads."""
    return WARPS * facts.WARP


def threads_that_store() -> int:
    """Threads of the warps that store: one a lane of tensor memory."""
    return STORING_WARPS * facts.WARP


# ---- tensor memory -------------------------------------------------------------------------------


def scale_columns(form: GemmForm) -> tuple[int, int]:
    """Columns that the scales of one stage of A and of B take; none where there are none."""
    if form.operands != facts.NVFP4.name:
        return 0, 0
    words = form.tactic.inner // (facts.NVFP4.block * SCALES_OF_WORD)
    a, b = (
        ceil_div(rows, facts.SCALE_TILE_ROWS) * facts.SCALE_TILE_ROWS // ROWS_OF_COLUMN * words
        for rows in (form.tactic.rows, form.tactic.columns)
    )
    return a, b


def accumulators(form: GemmForm) -> int:
    """Sums of tiles that tensor memory holds at once."""
    left = TARGETS[form.target].tensor_memory_columns - sum(scale_columns(form))
    most = STAGE_ACCUMULATORS if form.operands == facts.FP8_BLOCK.name else ACCUMULATORS
    count: int = min(most, left // form.tactic.columns)
    if count < 1:
        raise InvalidArgument(
            "columns of a tile", form.tactic.columns, "tensor memory that holds it", "Use fewer."
        )
    return count


def overlaps(form: GemmForm) -> bool:
    """Tell whether two sums share some columns: of two together, where the scales leave one alone.

    One is given back once the shared columns are in registers, which one piece holds; the next is
    multiplied while the rest of it is stored.
    """
    shared = 2 * form.tactic.columns + sum(scale_columns(form))
    shared -= TARGETS[form.target].tensor_memory_columns
    fits: bool = 0 < shared <= facts.PIECE_COLUMNS
    return form.tactic.together > 1 and accumulators(form) == 1 and fits


def places_of_sums(form: GemmForm) -> int:
    """Places that sums take in turn."""
    return 2 if overlaps(form) else accumulators(form)


def columns_apart(form: GemmForm) -> int:
    """Columns from one place of sums to the next."""
    if not overlaps(form):
        return form.tactic.columns
    left: int = TARGETS[form.target].tensor_memory_columns - sum(scale_columns(form))
    return left - form.tactic.columns


def piece_in_turn(number: Any, place: Any, pieces: int) -> Any:
    """Return which piece of overlapping sums is read: shared ones first, the first place's last."""
    return number + (1 - place) * (pieces - 1 - 2 * number)


def columns_of_sums(form: GemmForm) -> int:
    """Columns that all places of sums take."""
    return (places_of_sums(form) - 1) * columns_apart(form) + form.tactic.columns


def columns_held(form: GemmForm) -> int:
    """Columns that sums and scales take."""
    return columns_of_sums(form) + sum(scale_columns(form))


def columns_allocated(form: GemmForm) -> int:
    """Columns that are allocated: a power of two."""
    return max(LEAST_COLUMNS, 1 << (columns_held(form) - 1).bit_length())


def first_columns(form: GemmForm) -> tuple[int, int]:
    """Columns where the scales of A and of B begin, behind the sums."""
    a = columns_of_sums(form)
    return a, a + scale_columns(form)[0]


# ---- which scales a tile takes: on host integers, and inside a kernel ----------------------------


def tiles_of_boxes(tile: tuple[Any, ...], form: GemmForm) -> tuple[Any, ...]:
    """Return which box each load brings of its matrix: codes of A and B, then tiles of scales.

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
    """Refuse rows that a swapped tile cannot address: scales begin at whole 32 rows only."""
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
    """Columns of B's scales in front of this tile's: it may begin in the middle of 128 rows."""
    return column * form.tactic.columns % facts.SCALE_TILE_ROWS // ROWS_OF_COLUMN


def end_of_scales(blocks: Any, step: Any, form: GemmForm) -> tuple[Any, Any]:
    """Return the word of this step that K ends within, and the blocks of it that are kept.

    None are kept of none: K ends between words. `blocks` are those of all of K.
    """
    left = blocks - step * (form.tactic.inner // facts.NVFP4.block)
    return left // SCALES_OF_WORD, left % SCALES_OF_WORD


# ---- instructions of a stage ---------------------------------------------------------------------


def instructions(form: GemmForm) -> int:
    """Matrix instructions of one stage: each takes all rows and columns of the tile."""
    return form.tactic.inner // INSTRUCTION_K[form.operands]


def stores(form: GemmForm) -> int:
    """TMA stores of a thread block's part of a tile: one a piece."""
    columns: int = form.tactic.columns
    return 1 if form.tactic.swapped else columns // facts.PIECE_COLUMNS


def scale_copies(form: GemmForm) -> int:
    """Copies of scales a stage: 32 lanes of four columns each, one scale tile."""
    return sum(scale_columns(form)) // (facts.SCALE_TILE_ROWS // ROWS_OF_COLUMN)


# ---- who shares loads, who arrives ---------------------------------------------------------------


def sharers(form: GemmForm) -> tuple[int, ...]:
    """Return by load how many thread blocks of a cluster receive a box at once.

    Of two together each has its own half of B's codes, and all of B's scales as its neighbour has.
    """
    tactic = form.tactic
    counts = {"a": tactic.cluster_columns, "b": tactic.cluster_rows}
    return tuple(
        counts[load.side] // (tactic.together if load.name == "b" else 1)
        for load in facts.loads(form)
    )


def arrivals_of_stage(form: GemmForm) -> int:
    """Arrivals that make a stage empty: one of each instruction stream that its boxes go to."""
    tactic = form.tactic
    return tactic.cluster_rows // tactic.together + tactic.cluster_columns - 1


def arrivals_of_sums(form: GemmForm) -> int:
    """Arrivals that give sums back: every thread that read them, of both thread blocks."""
    return form.tactic.together * threads_that_store()


# ---- shared memory -------------------------------------------------------------------------------


def piece_bytes() -> int:
    """Bytes of what is handed to one TMA store: all lanes, 64 columns, BF16."""
    return LANES * facts.PIECE_COLUMNS * 2


def output_bytes(form: GemmForm) -> int:
    """Bytes of the buffers of pieces; of swapped operands a piece is all columns of the tile.

    Gate beside up leaves as codes out of registers: there are none.
    """
    if form.parts > 1:
        return 0
    if form.tactic.swapped:
        return facts.PIECES_AT_ONCE * LANES * form.tactic.columns * 2
    return facts.PIECES_AT_ONCE * piece_bytes()


def footprint(form: GemmForm) -> facts.Footprint:
    """Return what a thread block holds, with as many stages as fit."""
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
