"""Problem, tactic table, form and memory layout of BF16 activations times NVFP4 weights (W4A16).

Order of sums: K is cut into 16 parts in every form; step i of 128 values belongs to part i mod 16.
A warp adds up one part of its outputs; the parts' sums are then added in the order of their number.
So a result does not depend on M, tiles, clusters or stages: equal rows give equal bits in every
form.

Derived facts: which lane reads which bytes, shared memory, thread blocks, bytes moved. Host
arithmetic only, no GPU and no DSL, so that a suite can check every number. Extents without a tail
in the kernel raise ShapeMismatch, unknown scale layouts UnknownName.
Shape letters: M rows of activations, N outputs, K columns, P = K / 2 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import ShapeMismatch, UnknownName
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import (
    LINEAR,
    SWIZZLE_128X4,
    ScaleLayout,
    ceil_div,
    scale_layout,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BLOCK = 16  # values that share a scale
LANE_VALUES = 32  # of a step: a lane takes two blocks, half a step apart
STEP = 4 * LANE_VALUES  # of K: what the four lanes of a row take at once
PARTS = 16  # of K, added up in this order
ROUND = PARTS * STEP
TILE = 16  # outputs of an mma: M of mma.m16n8k16, PTX ISA 9.1
COLUMNS = 8  # rows of activations of an mma: its N
COPIED = 256  # K of which a multiple puts linear scales on addresses that bulk copies take
LARGEST_ROWS = 64
LARGEST_WEIGHT = 1 << 32  # so that a byte of the codes has a 32-bit offset
BARRIER_BYTES = 512  # 16 full and 16 empty barriers, for stages and again for activations
DECODED_EXPONENT = -8  # what the kernel multiplies are weights times 2**-8: see e2m1.bf16_pairs
SUM_BUFFERS = 2  # by row: one is added up while the other one is filled
SCALE_SLOTS = 16  # by row: scales of runs that follow each other
DIVISION = 4  # by row: numbers of a launch that divide tiles among thread blocks
SLOT_BYTES = 16  # both factors of a scale, and whether they are known

LAYOUTS: Mapping[str, ScaleLayout] = MappingProxyType(
    {layout.name: layout for layout in (LINEAR, SWIZZLE_128X4)}
)


@dataclass(frozen=True)
class W4A16Problem:
    """M rows of K activations times N rows of K weights, whose scales are in `layout`."""

    rows: int
    outputs: int
    columns: int
    layout: str = LINEAR.name

    def __post_init__(self) -> None:
        extents = (self.rows, self.outputs, self.columns)
        if not 0 <= self.rows <= LARGEST_ROWS:
            raise ShapeMismatch(
                "rows of activations",
                self.rows,
                f"0 to {LARGEST_ROWS}: the kernel is for decoding",
                "Split the rows, or use a GEMM for prefill.",
            )
        if self.outputs < COLUMNS or self.outputs % COLUMNS:
            raise ShapeMismatch(
                "extents M, N, K", extents, f"N in a multiple of {COLUMNS}", "Pad with zero rows."
            )
        if self.columns < LANE_VALUES or self.columns % LANE_VALUES:
            raise ShapeMismatch(
                "extents M, N, K", extents, f"K in a multiple of {LANE_VALUES}", "Pad with zeros."
            )
        if self.outputs * self.columns >= LARGEST_WEIGHT:
            raise ShapeMismatch(
                "extents M, N, K", extents, f"N K below {LARGEST_WEIGHT}", "Split the outputs."
            )
        if self.layout not in LAYOUTS:
            scale_layout(self.layout)
            raise UnknownName.among("scale layout of a kernel", self.layout, LAYOUTS)

    @property
    def blocks(self) -> int:
        """Return the blocks of a row of weights."""
        return self.columns // BLOCK

    @property
    def scale_layout(self) -> ScaleLayout:
        """Return the record of the scale layout."""
        return LAYOUTS[self.layout]

    @property
    def scale_bytes(self) -> int:
        """Return the bytes of the scales, padding included."""
        size: int = self.scale_layout.storage_size(self.outputs, self.blocks)
        return size

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of codes and scales without padding: 0.5625 a weight."""
        return self.outputs * self.columns // 2 + self.outputs * self.blocks

    @property
    def bytes_moved(self) -> int:
        """Return the fewest bytes moved: every input and output once."""
        return self.weight_bytes + 2 * self.rows * (self.columns + self.outputs)

    @property
    def rounds(self) -> int:
        """Return the rounds: the steps of the longest part."""
        rounds: int = ceil_div(self.columns, ROUND)
        return rounds


@dataclass(frozen=True)
class W4A16Form:
    """Compile-time parameters; extents are passed at launch.

    A thread block has `groups` times 16 / `ranks` multiplying warps, each with `tiles` tiles of 16
    outputs, and one warp that issues TMA. The thread blocks of a cluster of `ranks` share the parts
    of K. A stage is a round's weights of one tile of every group.
    """

    layout: str
    columns: int  # rows of activations that fit: 8, 16, 32 or 64
    copied_rows: int  # rows of activations that are copied: those of the problem, or up to twice
    tiles: int
    groups: int
    ranks: int
    stages: int
    resident: int  # thread blocks for which a processor's shared memory has to suffice
    ragged: bool  # whether K ends inside of what is copied at once
    target: str

    @property
    def by_row(self) -> bool:
        """Return whether each row multiplies the matrices of its own expert."""
        return False

    @property
    def parts(self) -> int:
        """Return the warps that share the outputs of a group, one part of K each."""
        return PARTS // self.ranks

    @property
    def warps(self) -> int:
        """Return the warps that multiply."""
        return self.groups * self.parts

    @property
    def threads(self) -> int:
        """Return the threads of a thread block."""
        return 32 * (self.warps + 1)

    @property
    def outputs(self) -> int:
        """Return the outputs of a thread block."""
        return TILE * self.tiles * self.groups

    @property
    def pieces(self) -> int:
        """Return the runs of adjacent rows in a tile: one, or four with scales in 128x4 order."""
        return 1 if self.layout == LINEAR.name else 4

    @property
    def group_bytes(self) -> int:
        """Return the bytes of a tile's codes in a stage: step by step, 64 bytes of each row."""
        return self.parts * TILE * STEP // 2

    @property
    def half_bytes(self) -> int:
        """Return the bytes from the codes of a tile's row to those of its eighth row after it."""
        return 8 * STEP // 2 if self.pieces == 1 else self.group_bytes // 2

    @property
    def scales_at(self) -> int:
        """Return the offset of a stage's scales, which follow its codes."""
        return self.groups * self.group_bytes

    @property
    def stage_bytes(self) -> int:
        """Return the bytes of a stage's codes and scales."""
        return self.scales_at + self.scales_at // 8

    @property
    def copied_bytes(self) -> int:
        """Return the bytes of a stage that TMA copies; lanes read ragged linear scales."""
        alone = self.ragged and self.layout == LINEAR.name
        return self.scales_at if alone else self.stage_bytes

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of a round's activations."""
        return self.parts * self.copied_rows * STEP * 2

    @property
    def sum_bytes(self) -> int:
        """Return the bytes of a warp's sums in float32."""
        return self.tiles * TILE * self.columns * 4

    @property
    def ring_bytes(self) -> int:
        """Return the bytes of all stages, or of the sums that replace them if those are more."""
        return max(self.stages * self.stage_bytes, self.warps * self.sum_bytes)

    @property
    def more_bytes(self) -> int:
        """Return the bytes behind stages and activations."""
        return 0


@dataclass(frozen=True)
class W4A16ByRowForm(W4A16Form):
    """Compile-time parameters where each row multiplies its own expert's matrices.

    A run is what a thread block computes between two additions of parts: up to `outputs` of one
    matrix.
    """

    products: int  # matrices of an expert, over the same row: gate and up, or one
    early: bool  # whether weights are prefetched before the previous launch has ended

    def __post_init__(self) -> None:
        assert self.groups == self.ranks == 1, self
        # With fewer slots a scale could be overwritten before it is read: see `ask`.
        assert self.stages < SCALE_SLOTS, self

    @property
    def by_row(self) -> bool:
        """Return whether each row multiplies the matrices of its own expert."""
        return True

    @property
    def ring_bytes(self) -> int:
        """Return the bytes of all stages: the next run's weights come while sums are added."""
        return self.stages * self.stage_bytes

    @property
    def run_bytes(self) -> int:
        """Return the bytes of the sums of a run, part by part."""
        return PARTS * self.outputs * 4

    @property
    def more_bytes(self) -> int:
        """Return the bytes of sums and scales, behind stages and activations."""
        return SUM_BUFFERS * self.run_bytes + SCALE_SLOTS * SLOT_BYTES


@dataclass(frozen=True)
class W4A16Tactic:
    """A row of the table: the form for up to so many rows and outputs."""

    rows: int
    most_outputs: float
    tiles: int
    groups: int
    ranks: int
    stages: int
    resident: int


# Measured on an H200: docs/design-notes/w4a16_kernel.md.
_ANY = float("inf")
TACTICS = (
    W4A16Tactic(16, 2_112, tiles=1, groups=1, ranks=1, stages=4, resident=1),
    W4A16Tactic(16, 4_224, tiles=2, groups=1, ranks=1, stages=4, resident=1),
    W4A16Tactic(16, _ANY, tiles=4, groups=1, ranks=1, stages=4, resident=1),
    W4A16Tactic(32, _ANY, tiles=2, groups=2, ranks=2, stages=4, resident=1),
    W4A16Tactic(64, _ANY, tiles=1, groups=4, ranks=4, stages=4, resident=1),
)
SHARED_BYTES = 227 * 1024  # that a thread block may use; targets.py has the source
RESERVED_BYTES = 1024  # a thread block's own: CUDA C++ Programming Guide 13.0
# A thread block with more than half of a processor's shared memory has it to itself: else two of a
# launch may share one while another is idle.
ALONE_BYTES = 114 * 1024
LARGEST_KEPT = 6  # rounds of activations that have barriers


def choose_tactic(problem: W4A16Problem) -> W4A16Tactic:
    """Return the tactic that the table gives."""
    return next(
        tactic
        for tactic in TACTICS
        if problem.rows <= tactic.rows and problem.outputs <= tactic.most_outputs
    )


def choose_form(problem: W4A16Problem, tactic: W4A16Tactic, target: str) -> W4A16Form:
    """Return the form of a tactic; extents decide the columns and whether K is ragged."""
    copied_rows = 1
    while copied_rows < problem.rows:
        copied_rows *= 2
    return W4A16Form(
        layout=problem.layout,
        columns=max(COLUMNS, copied_rows),
        copied_rows=copied_rows,
        tiles=tactic.tiles,
        groups=tactic.groups,
        ranks=tactic.ranks,
        stages=tactic.stages,
        resident=tactic.resident,
        ragged=problem.columns % COPIED > 0,
        target=target,
    )


def tiles(problem: W4A16Problem) -> int:
    """Return the tiles of 16 outputs; with 128x4 scales, those of whole 128 rows."""
    tile = TILE if problem.layout == LINEAR.name else SWIZZLE_128X4.row_tile
    count: int = ceil_div(problem.outputs, tile) * (tile // TILE)
    return count


def grid(problem: W4A16Problem, form: W4A16Form) -> int:
    """Return the number of thread blocks."""
    blocks: int = ceil_div(tiles(problem), form.tiles * form.groups) * form.ranks
    return blocks


def rounds_kept(problem: W4A16Problem, form: W4A16Form, turns: int = 1) -> int:
    """Return how many rounds of activations shared memory holds at the same time.

    A thread block of several turns asks for those of its next run as well.
    """
    shared = (SHARED_BYTES + RESERVED_BYTES) // form.resident - RESERVED_BYTES
    fit = (shared - BARRIER_BYTES - form.ring_bytes - form.more_bytes) // form.kept_bytes
    assert fit > 0, (problem, form)
    return min(turns * problem.rounds, fit, LARGEST_KEPT)


def shared_bytes(problem: W4A16Problem, form: W4A16Form, turns: int = 1) -> int:
    """Return the shared memory of a thread block: barriers, stages, activations, by row more."""
    kept = rounds_kept(problem, form, turns) * form.kept_bytes
    used = BARRIER_BYTES + form.ring_bytes + kept + form.more_bytes
    return max(used, ALONE_BYTES) if form.resident == 1 else used


def activation_box(form: W4A16Form) -> tuple[int, ...]:
    """Return the TMA box of activations: values of a step, rows, steps."""
    box = (STEP, form.copied_rows, form.parts)
    return box[: 2 if form.ragged else 3]


def code_box(form: W4A16Form) -> tuple[int, ...]:
    """Return the TMA box of codes: words of a step, adjacent rows, steps, one of many matrices."""
    box = (STEP // 8, TILE // form.pieces, form.parts)
    return box[: 2 if form.ragged else 3] + (1,) * form.by_row


def scale_box(form: W4A16Form) -> tuple[int, ...]:
    """Return the TMA box of scales: scales of a round and rows, or 16 rows' words of four."""
    span = form.parts * STEP // BLOCK
    box = (span, TILE) if form.layout == LINEAR.name else (64, span // 4, 1)
    return box + (1,) * form.by_row


def row_of(tile: Any, place: Any, layout: str) -> Any:
    """Return the output at place 0 to 15 of a tile: outputs that its layout stores adjacently.

    Runs on ints and inside the kernel, as do the functions below: non-negative, // % * + ^ only.
    """
    if layout == LINEAR.name:
        return tile * TILE + place
    # 128x4: 64 bytes hold the scales of rows c + 32 a, c four neighbours, a 0 to 3.
    return tile // 8 * 128 + tile % 8 * 4 + place % 4 + place // 4 * 32


def scale_offset(row: Any, first: Any, extents: tuple[Any, Any], layout: str) -> Any:
    """Return the byte offset of a row's scale for the value at `first`; extents are N and K."""
    outputs, columns = extents
    return LAYOUTS[layout].offset_of(row, first // BLOCK, outputs, columns // BLOCK)


def slot_of(row: Any, shared: Any) -> Any:
    """Return the slot of a row, by row; rows of the shared expert come first, and have the first.

    Runs on ints and inside the kernel, as does the next function.
    """
    return ops.select(row < shared, shared * 0, row - shared)


def expert_of(row: Any, chosen: Any, counts: tuple[Any, Any, Any]) -> Any:
    """Return a row's expert from what its slot chose; counts: shared rows, routed, all experts.

    The shared expert's matrices follow those of the routed ones. A number of no routed expert gives
    one more than the last; below 0 it is a large unsigned number.
    """
    shared, routed, experts = counts
    found = ops.select(chosen < routed, chosen, experts)
    return ops.select(row < shared, routed, found)


def share_of(block: Any, every: Any, shares: Sequence[Any]) -> tuple[Any, Any]:
    """Return the first tile that a thread block walks, and the first that it does not.

    Shares: units that each walks at least, how many walk one more, tiles of a unit.
    """
    least, more, unit = shares
    begin = (block * least + ops.minimum(block, more)) * unit
    end = begin + (least + ops.select(block < more, block * 0 + 1, block * 0)) * unit
    return begin, ops.minimum(end, every)


def tile_place(tile: Any, of_matrix: Any, products: int) -> tuple[Any, Any, Any]:
    """Return a tile's place in its matrix, its row, and which of the row's matrices that is."""
    matrix = tile // of_matrix
    return tile % of_matrix, matrix // products, matrix % products


def run_length(tile: Any, end: Any, of_matrix: Any, most: int) -> Any:
    """Return the tiles of a run: as many as a form has, of one matrix, before the walk's end."""
    rest = of_matrix - tile % of_matrix
    return ops.minimum(ops.minimum(end - tile, rest), tile * 0 + most)


def run_sum_offset(part: Any, output: Any, outputs: int) -> Any:
    """Return the byte offset of a part's sum of one output of a run."""
    return (part * outputs + output) * 4


def sum_place(number: Any, tiles: int) -> tuple[Any, Any, Any]:
    """Return the sum that thread `number` adds up: place in a tile, tile, row of activations.

    16 adjacent outputs of two rows go to 32 threads, so that whole sectors are written.
    """
    pair = number // TILE
    return number % TILE, pair // 2 % tiles, pair // 2 // tiles * 2 + pair % 2


def lane_offset(fragment: Any, lane: Any) -> Any:
    """Return the byte offset of a lane's four sums of a fragment: 16 outputs, eight rows.

    The lane is permuted within its quarter; otherwise eight adding threads would share a bank.
    """
    return (fragment * 32 + (lane ^ (lane // 8))) * 16


def sum_offset(fragment: Any, place: Any, row: Any) -> Any:
    """Return the byte offset of one sum of a fragment, in the lane where mma.m16n8k16 puts it."""
    own = lane_offset(fragment, place % 8 * 4 + row % COLUMNS // 2)
    return own + place // 8 * 8 + row % 2 * 4
