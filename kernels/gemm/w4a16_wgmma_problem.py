"""Form, division of K and memory layout of BF16 times NVFP4 (W4A16) by wgmma.

Order of sums: K is cut into as many runs of whole 128 as a cluster has thread blocks, which N and K
alone decide. wgmma adds up a run in the order of K; the runs' sums are then added in order. So a
result does not depend on M: equal rows give equal bits.

Host arithmetic only, no GPU and no DSL, so that a suite can check every number. The problem is that
of `w4a16_problem`. Shape letters: M rows of activations, N outputs, K columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from degarble.harness.formats.layouts import LINEAR, SWIZZLE_128X4, ceil_div
from degarble.kernels.gemm.w4a16_problem import (
    ALONE_BYTES,
    BLOCK,
    COLUMNS,
    SHARED_BYTES,
    W4A16Problem,
)

if TYPE_CHECKING:
    from typing import Any

HALF = 64  # of K: four wgmma
HALVES = 2
STEP = HALVES * HALF  # of K in a stage; rows of 64 bytes of codes, since those of 32 come slowly
STEPS_OF_CHUNK = 2  # of which scales are copied at once
CHUNK = STEPS_OF_CHUNK * STEP
ROWS = 64  # outputs of a warpgroup: M of wgmma, PTX ISA 9.1
CODE_BYTES = STEP // 2  # of a row in a stage
SCALE_BYTES = CHUNK // BLOCK  # of a row in a chunk
SCALE_ROWS = SWIZZLE_128X4.row_tile
SCALE_TILE_BYTES = SCALE_ROWS * SCALE_BYTES
SCALE_CODES = 0x007F_007F  # two, without their signs
SLOTS = 4  # chunks of scales in shared memory
# So that a slot is free when its next chunk is copied.
MOST_STAGES = SLOTS * STEPS_OF_CHUNK - (STEPS_OF_CHUNK - 1)
BARRIER_BYTES = 384  # 16 full, 16 empty and 16 ready barriers
GROUPS = (2, 3, 4, 1)  # warpgroups that multiply; of equal choices the first stands
# Of a thread block: with more, threads have too few registers, and ptxas runs wgmma one by one.
MOST_WARPS = 20
PLAIN, ENOUGH = 2, 0.7  # the choice that stands where so many processors are busy
PROCESSORS = 132  # of an H200; a constant, because the division of K follows from it
# Clusters, by their thread blocks, of which an H200 runs as many at a time, as far as measured: a
# cluster lies within one part of the chip. Two waves of them take twice as long.
CLUSTERS = {8: 14, 7: 14, 6: 18, 5: 22, 4: 28, 3: 40, 2: 66, 1: PROCESSORS}
SUM_PADDING = 4  # numbers behind a row of sums, so that eight lanes meet no bank twice


@dataclass(frozen=True)
class W4A16WgmmaForm:
    """Compile-time parameters; extents are passed at launch.

    A thread block has `groups` warpgroups of 64 outputs each, warps that permute activations, half
    a stage of 32 rows at a time, and one warp that issues TMA. The thread blocks of a cluster of
    `ranks` have one run of K each.
    """

    layout: str
    columns: int  # rows of activations that fit: N of wgmma
    groups: int
    ranks: int
    stages: int
    ragged: bool  # whether linear scales are on addresses that TMA rejects
    permuting: int  # warps that put activations in order
    target: str

    @property
    def threads(self) -> int:
        """Return the threads of a thread block."""
        return 32 * (self.warps + self.permuting + 1)

    @property
    def row_groups(self) -> int:
        """Return the groups of 32 rows of activations."""
        groups: int = ceil_div(self.columns, 32)
        return groups

    @property
    def warps(self) -> int:
        """Return the warps that multiply."""
        return 4 * self.groups

    @property
    def outputs(self) -> int:
        """Return the outputs of a thread block."""
        return ROWS * self.groups

    @property
    def activation_bytes(self) -> int:
        """Return the bytes of a stage's activations."""
        return self.columns * STEP * 2

    @property
    def code_bytes(self) -> int:
        """Return the bytes of a stage's codes."""
        return self.outputs * CODE_BYTES

    @property
    def scale_tiles(self) -> int:
        """Return the tiles of 128 rows of scales that a thread block's outputs meet."""
        tiles: int = ceil_div(self.outputs, SCALE_ROWS)
        return tiles

    @property
    def scale_boxes(self) -> int:
        """Return the TMA boxes that bring a chunk's scales."""
        return 1 if self.layout == LINEAR.name else self.scale_tiles

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of a chunk's scales."""
        if self.layout == LINEAR.name:
            return self.outputs * SCALE_BYTES
        return self.scale_tiles * SCALE_TILE_BYTES

    @property
    def codes_at(self) -> int:
        """Return the offset of the codes, behind the activations of all stages."""
        return self.stages * self.activation_bytes

    @property
    def scales_at(self) -> int:
        """Return the offset of the scales."""
        return self.codes_at + self.stages * self.code_bytes

    @property
    def barriers_at(self) -> int:
        """Return the offset of the barriers, behind the scales and the sums that replace them."""
        return max(self.scales_at + SLOTS * self.slot_bytes, self.sum_bytes)

    @property
    def sum_stride(self) -> int:
        """Return the bytes from a row of sums to the next."""
        return 4 * (self.outputs + SUM_PADDING)

    @property
    def sum_bytes(self) -> int:
        """Return the bytes of a thread block's sums in float32."""
        return self.columns * self.sum_stride

    @property
    def turns(self) -> int:
        """Return how many times a thread adds up the runs' sums of four outputs."""
        turns: int = ceil_div(self.columns * self.outputs // 4, self.ranks * self.threads)
        return turns

    @property
    def shared_bytes(self) -> int:
        """Return the shared memory of a thread block."""
        return max(self.barriers_at + BARRIER_BYTES, ALONE_BYTES)


def share(blocks: int) -> float:
    """Return the share of the processors that are busy, over all waves of thread blocks."""
    waves: int = ceil_div(blocks, PROCESSORS)
    return blocks / (PROCESSORS * waves)


def ranks_of(tiles: int, columns: int) -> int:
    """Return into how many runs K is cut: as many as keep all thread blocks in one wave."""
    chunks = ceil_div(columns, CHUNK)
    return next(
        ranks
        for ranks, clusters in CLUSTERS.items()
        if ranks == 1 or (ranks <= chunks and tiles <= clusters and tiles * ranks <= PROCESSORS)
    )


def division(outputs: int, columns: int) -> tuple[int, int]:
    """Return warpgroups of a thread block and thread blocks of a cluster, from N and K alone."""
    tiles = {groups: ceil_div(outputs, ROWS * groups) for groups in GROUPS}
    made = {groups: (groups, ranks_of(count, columns)) for groups, count in tiles.items()}
    busy = {groups: share(tiles[groups] * ranks) for groups, ranks in made.values()}
    if tiles[PLAIN] <= PROCESSORS and busy[PLAIN] >= ENOUGH:
        return made[PLAIN]
    return made[max(GROUPS, key=busy.__getitem__)]


def choose_form(problem: W4A16Problem, target: str) -> W4A16WgmmaForm:
    """Return the form of a problem; its rows decide the columns alone."""
    return form_of(problem, division(problem.outputs, problem.columns), target)


def form_of(problem: W4A16Problem, division: tuple[int, int], target: str) -> W4A16WgmmaForm:
    """Return the form of a division."""
    groups, ranks = division
    columns = COLUMNS
    while columns < problem.rows:
        columns *= 2
    ragged = problem.layout == LINEAR.name and problem.columns % CHUNK > 0
    form = W4A16WgmmaForm(problem.layout, columns, groups, ranks, 1, ragged, 0, target)
    # Trap: with more, a warp would have no part of some stages. It could reach a stage before its
    # copies of the round before have come, and their parity would let it pass.
    permuting = min(HALVES * form.row_groups, MOST_WARPS - form.warps - 1)
    free = SHARED_BYTES - BARRIER_BYTES - SLOTS * form.slot_bytes
    stages = min(MOST_STAGES, free // (form.activation_bytes + form.code_bytes))
    return replace(form, stages=stages, permuting=permuting)


def grid(problem: W4A16Problem, form: W4A16WgmmaForm) -> int:
    """Return the number of thread blocks."""
    blocks: int = ceil_div(problem.outputs, form.outputs) * form.ranks
    return blocks


def run_of(rank: Any, columns: Any, ranks: int, least: Any = min) -> tuple[Any, Any]:
    """Return the first step of a thread block's run of K, and the number of its steps.

    Runs on ints and inside the kernel, where `least` is cutlass.min. No run is empty.
    """
    steps = (columns + (STEP - 1)) // STEP
    each, more = steps // ranks, steps % ranks
    first = rank * each + least(rank, more)
    behind = (rank + 1) * each + least(rank + 1, more)
    return first, behind - first


def activation_box(form: W4A16WgmmaForm) -> tuple[int, int]:
    """Return the TMA box of activations, one of HALVES in a stage: rows, numbers of K."""
    return form.columns, HALF


def code_box(form: W4A16WgmmaForm) -> tuple[int, int]:
    """Return the TMA box of codes: rows, words."""
    return form.outputs, CODE_BYTES // 4


def scale_box(form: W4A16WgmmaForm) -> tuple[int, ...]:
    """Return the TMA box of scales in words, the inner extent first: one of `scale_boxes`."""
    if form.layout == LINEAR.name:
        return SCALE_BYTES // 4, form.outputs
    return SCALE_ROWS, CHUNK // HALF, 1


def row_of(warp: Any, group: Any) -> Any:
    """Return the first of the two rows that a quad of lanes decodes; the other is eight further on.

    A warp reads codes of rows 0, 1, 4 and 5 at once, then of 2, 3, 6 and 7: under TMA's 64-byte
    swizzle these meet no bank twice. Runs on ints and inside the kernel.
    """
    return warp * 16 + group % 2 + group // 2 % 2 * 4 + group // 4 * 2


def scale_word(row: Any, form: W4A16WgmmaForm) -> Any:
    """Return the offset in a slot of a row's scales for the first half step of a chunk.

    `row` counts from the first row of the slot: of the thread block, or of its first scale tile.
    Runs on ints and inside the kernel.
    """
    if form.layout == LINEAR.name:
        return row * SCALE_BYTES
    return row // SCALE_ROWS * SCALE_TILE_BYTES + row % 32 * 16 + row % SCALE_ROWS // 32 * 4


def scale_half(form: W4A16WgmmaForm) -> int:
    """Return the bytes from a row's scales of half a step to those of the next half."""
    return HALF // BLOCK if form.layout == LINEAR.name else SCALE_ROWS * HALF // BLOCK


def first_scale_row(tile: Any, form: W4A16WgmmaForm) -> Any:
    """Return the place of a thread block's first output in the slot of its scales."""
    return tile * 0 if form.layout == LINEAR.name else tile * form.outputs % SCALE_ROWS
