"""What BF16 times NVFP4 is asked for, which form of the kernel answers, and what follows.

Owns the problem (extents, layout of the weights' scales), the choice by table, and the derived
facts: who reads which bytes, in which order K is added up, shared memory, thread blocks, bytes.
Pure host arithmetic, no GPU and no DSL, so that a suite checks every number.

K is cut into 16 parts, whatever the form: step i of 128 values belongs to part i mod 16. A warp
adds up one part of its outputs; the parts' sums are then added in the order of their number. So M,
tiles, clusters and stages are no part of a result: equal rows give equal bits in every form.

Refuses extents that the kernel has no tails for, and layouts that it does not read. Kept honest by
suites/kernels/gemm/test_w4a16_problem.py, which walks every lane of a launch and counts.
Shape letters: M rows of activations, N outputs, K columns, P = K / 2 bytes
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import ShapeMismatch, UnknownName
from degarble.harness.formats.layouts import (
    LINEAR,
    SWIZZLE_128X4,
    ScaleLayout,
    ceil_div,
    scale_layout,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

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
BARRIER_BYTES = 512  # 16 that say full and 16 that say empty, for stages and for activations
DECODED_EXPONENT = -8  # what the kernel multiplies are weights times 2**-8: see e2m1_pairs

LAYOUTS: Mapping[str, ScaleLayout] = MappingProxyType(
    {layout.name: layout for layout in (LINEAR, SWIZZLE_128X4)}
)


@dataclass(frozen=True)
class W4A16Problem:
    """M rows of K activations times N rows of K weights, whose scales lie in `layout`."""

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
        """Blocks of a row of weights."""
        return self.columns // BLOCK

    @property
    def scale_layout(self) -> ScaleLayout:
        """The record of the layout."""
        return LAYOUTS[self.layout]

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales, padding included."""
        size: int = self.scale_layout.storage_size(self.outputs, self.blocks)
        return size

    @property
    def weight_bytes(self) -> int:
        """Packed codes and their scales without padding: 0.5625 bytes a weight."""
        return self.outputs * self.columns // 2 + self.outputs * self.blocks

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes that have to be read and written: every input and output once."""
        return self.weight_bytes + 2 * self.rows * (self.columns + self.outputs)

    @property
    def rounds(self) -> int:
        """Steps of the parts that have most."""
        rounds: int = ceil_div(self.columns, ROUND)
        return rounds


@dataclass(frozen=True)
class W4A16Form:
    """What a kernel is compiled for; the extents come with the launch.

    A thread block has `groups` times 16 / `ranks` warps that multiply, a warp `tiles` tiles of 16
    outputs; the thread blocks of a cluster of `ranks` share the parts of K, and one warp more asks
    for what the others read. A stage is a round's weights of one tile of every group.
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
    def parts(self) -> int:
        """Warps that share the outputs of a group, one part of K each."""
        return PARTS // self.ranks

    @property
    def warps(self) -> int:
        """Warps that multiply."""
        return self.groups * self.parts

    @property
    def threads(self) -> int:
        """Threads of a thread block."""
        return 32 * (self.warps + 1)

    @property
    def outputs(self) -> int:
        """Outputs of a thread block."""
        return TILE * self.tiles * self.groups

    @property
    def pieces(self) -> int:
        """Runs of neighbouring rows of a tile."""
        return 1 if self.layout == LINEAR.name else 4

    @property
    def group_bytes(self) -> int:
        """Codes of a tile in a stage: step by step, 64 bytes of each row."""
        return self.parts * TILE * STEP // 2

    @property
    def half_bytes(self) -> int:
        """Bytes from the codes of a tile's row to those of the eighth row after it."""
        return 8 * STEP // 2 if self.pieces == 1 else self.group_bytes // 2

    @property
    def scales_at(self) -> int:
        """Where a stage's scales begin: behind its codes."""
        return self.groups * self.group_bytes

    @property
    def stage_bytes(self) -> int:
        """A stage's codes and scales."""
        return self.scales_at + self.scales_at // 8

    @property
    def copied_bytes(self) -> int:
        """What of a stage is copied at once; ragged linear scales are read one by one."""
        alone = self.ragged and self.layout == LINEAR.name
        return self.scales_at if alone else self.stage_bytes

    @property
    def kept_bytes(self) -> int:
        """Activations of a round."""
        return self.parts * self.copied_rows * STEP * 2

    @property
    def sum_bytes(self) -> int:
        """A warp's sums in float32."""
        return self.tiles * TILE * self.columns * 4

    @property
    def ring_bytes(self) -> int:
        """What all stages take; the sums come in their place."""
        return max(self.stages * self.stage_bytes, self.warps * self.sum_bytes)


@dataclass(frozen=True)
class Tactic:
    """One row of the table: for up to so many rows and outputs, which form."""

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
    Tactic(16, 2_112, tiles=1, groups=1, ranks=1, stages=4, resident=1),
    Tactic(16, 4_224, tiles=2, groups=1, ranks=1, stages=4, resident=1),
    Tactic(16, _ANY, tiles=4, groups=1, ranks=1, stages=4, resident=1),
    Tactic(32, _ANY, tiles=2, groups=2, ranks=2, stages=4, resident=1),
    Tactic(64, _ANY, tiles=1, groups=4, ranks=4, stages=4, resident=1),
)
SHARED_BYTES = 227 * 1024  # that a thread block may use; targets.py has the source
RESERVED_BYTES = 1024  # a thread block's own: CUDA C++ Programming Guide 13.0
LARGEST_KEPT = 6  # rounds of activations that have barriers


def choose_tactic(problem: W4A16Problem) -> Tactic:
    """Return which form answers, by the table."""
    return next(
        tactic
        for tactic in TACTICS
        if problem.rows <= tactic.rows and problem.outputs <= tactic.most_outputs
    )


def choose_form(problem: W4A16Problem, tactic: Tactic, target: str) -> W4A16Form:
    """Return the form of a tactic; extents decide how many columns, and whether K is ragged."""
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
    """Tiles of 16 outputs; of whole 128 rows, where scales lie in these."""
    tile = TILE if problem.layout == LINEAR.name else SWIZZLE_128X4.row_tile
    count: int = ceil_div(problem.outputs, tile) * (tile // TILE)
    return count


def grid(problem: W4A16Problem, form: W4A16Form) -> int:
    """Thread blocks."""
    blocks: int = ceil_div(tiles(problem), form.tiles * form.groups) * form.ranks
    return blocks


def rounds_kept(problem: W4A16Problem, form: W4A16Form) -> int:
    """Rounds whose activations have a place in shared memory at the same time."""
    shared = (SHARED_BYTES + RESERVED_BYTES) // form.resident - RESERVED_BYTES
    fit = (shared - BARRIER_BYTES - form.ring_bytes) // form.kept_bytes
    assert fit > 0, (problem, form)
    return min(problem.rounds, fit, LARGEST_KEPT)


def shared_bytes(problem: W4A16Problem, form: W4A16Form) -> int:
    """Shared memory of a thread block: barriers, stages, activations."""
    kept = rounds_kept(problem, form) * form.kept_bytes
    return BARRIER_BYTES + form.ring_bytes + kept


def activation_box(form: W4A16Form) -> tuple[int, ...]:
    """Return what is copied at once: values of a step, rows, steps."""
    box = (STEP, form.copied_rows, form.parts)
    return box[: 2 if form.ragged else 3]


def code_box(form: W4A16Form) -> tuple[int, ...]:
    """Return what is copied at once: words of a step, neighbouring rows, steps."""
    box = (STEP // 8, TILE // form.pieces, form.parts)
    return box[: 2 if form.ragged else 3]


def scale_box(form: W4A16Form) -> tuple[int, ...]:
    """Return what is copied at once: scales of a round and rows, or 16 rows' words of four."""
    span = form.parts * STEP // BLOCK
    return (span, TILE) if form.layout == LINEAR.name else (64, span // 4, 1)


def row_of(tile: Any, place: Any, layout: str) -> Any:
    """Return the output at a place 0 to 15 of a tile: what its layout stores side by side.

    Runs on ints and inside the kernel, as do the functions below: non-negative, // % * + ^ alone.
    """
    if layout == LINEAR.name:
        return tile * TILE + place
    # 128x4: 64 bytes hold the scales of rows c + 32 a, c four neighbours, a 0 to 3.
    return tile // 8 * 128 + tile % 8 * 4 + place % 4 + place // 4 * 32


def scale_offset(row: Any, first: Any, extents: tuple[Any, Any], layout: str) -> Any:
    """Return the byte of a row's scale of the value at `first`; extents are N and K."""
    outputs, columns = extents
    return LAYOUTS[layout].offset_of(row, first // BLOCK, outputs, columns // BLOCK)


def sum_place(number: Any, tiles: int) -> tuple[Any, Any, Any]:
    """Return which sum a thread adds up by its number: place in a tile, tile, row of activations.

    16 neighbouring outputs of two rows for 32 threads: whole sectors are written.
    """
    pair = number // TILE
    return number % TILE, pair // 2 % tiles, pair // 2 // tiles * 2 + pair % 2


def lane_offset(fragment: Any, lane: Any) -> Any:
    """Return the byte of a lane's four sums of a fragment: 16 outputs, eight rows.

    Lanes of a quarter turn among themselves, else eight threads that add would meet in a bank.
    """
    return (fragment * 32 + (lane ^ (lane // 8))) * 16


def sum_offset(fragment: Any, place: Any, row: Any) -> Any:
    """Return the byte of one sum of a fragment, where `mma.m16n8k16` leaves it with a lane."""
    own = lane_offset(fragment, place % 8 * 4 + row % COLUMNS // 2)
    return own + place // 8 * 8 + row % 2 * 4
