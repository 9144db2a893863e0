"""Problem, form, tactic and grid of the NVFP4 quantising kernels. Importable without the DSL.

M may be anything at a launch; a form is compiled once for all extents. A tile is 8 rows x 32
blocks. For swizzled scales a warp holds 8 rows x 4 blocks, the 32 scale bytes that are adjacent in
memory: every sector that it reads or writes is whole. For linear scales, 32 blocks of one row.
Padding is part of the tiles, so it is written without a second pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats.layouts import (
    LINEAR,
    SWIZZLE_8X4,
    SWIZZLE_128X4,
    ScaleLayout,
    ceil_div,
    round_up,
    scale_layout,
)
from degarble.harness.formats.scalar_ops import bf16_round

if TYPE_CHECKING:
    from collections.abc import Mapping

BLOCK = 16  # values that share a scale
TILE_ROWS = 8
TILE_BLOCKS = 32
WARPS = 8
THREADS = 32 * WARPS
SCALE_CODES = 128  # of E4M3 without the sign: each has one factor, kept in shared memory
REGISTERS_OF_PROCESSOR = 65_536  # CUDA C++ Programming Guide 13.0, compute capability 9.0 and 10.0
LARGEST_ROWS = 1 << 31

LAYOUTS: Mapping[str, ScaleLayout] = MappingProxyType(
    {layout.name: layout for layout in (LINEAR, SWIZZLE_128X4, SWIZZLE_8X4)}
)


@dataclass(frozen=True)
class Source:
    """Where the 16 values of a block come from: how many numbers are read for each."""

    name: str
    read_for_one: int


VALUES = Source("values", read_for_one=1)
SWIGLU = Source("swiglu", read_for_one=2)
SOURCES: Mapping[str, Source] = MappingProxyType({s.name: s for s in (VALUES, SWIGLU)})


@dataclass(frozen=True)
class QuantiseProblem:
    """M rows of K values, after the fused input step; scales in `layout`."""

    rows: int
    columns: int
    layout: str = SWIZZLE_128X4.name
    source: str = VALUES.name
    experts: int = 0  # 0: one scale for all rows; else each expert has its own
    keeps_values: bool = False  # whether the bfloat16 values are written too
    limit: float | None = None  # of the SwiGLU in front; None clamps nothing

    def __post_init__(self) -> None:
        if not 0 <= self.rows < LARGEST_ROWS or self.columns < 1 or self.columns % BLOCK:
            raise ShapeMismatch(
                "matrix to quantise",
                (self.rows, self.columns),
                f"rows below 2**31 and columns in a multiple of {BLOCK}",
                "Pad the columns with zeros.",
            )
        if self.layout not in LAYOUTS:
            scale_layout(self.layout)
            raise UnknownName.among("scale layout of a kernel", self.layout, LAYOUTS)
        if self.source not in SOURCES:
            raise UnknownName.among("source of a kernel", self.source, SOURCES)
        if self.limit is not None and not (
            self.source == SWIGLU.name and 0 < self.limit == bf16_round(self.limit)
        ):
            raise InvalidArgument(
                "limit",
                self.limit,
                "a positive BF16 number, and a SwiGLU that it clamps",
                "Leave it out where nothing is clamped.",
            )

    @property
    def blocks(self) -> int:
        """Return the number of blocks of a row."""
        return self.columns // BLOCK

    @property
    def scale_layout(self) -> ScaleLayout:
        """Return the record of the layout."""
        return LAYOUTS[self.layout]

    @property
    def scale_bytes(self) -> int:
        """Return the bytes of the scales, padding included."""
        size: int = self.scale_layout.storage_size(self.rows, self.blocks)
        return size

    @property
    def input_columns(self) -> int:
        """Return the number of columns of the matrix that is read."""
        return self.columns * SOURCES[self.source].read_for_one

    @property
    def bytes_moved(self) -> int:
        """Return the fewest bytes that have to be read and written: every input and output once."""
        numbers = self.rows * self.columns
        read = 2 * self.rows * self.input_columns
        kept = 2 * numbers * self.keeps_values
        return read + numbers // 2 + self.scale_bytes + kept


@dataclass(frozen=True)
class QuantiseForm:
    """Compile-time parameters of a kernel; extents come with the launch."""

    layout: str
    source: str
    by_expert: bool
    keeps_values: bool
    limit: float | None
    target: str


@dataclass(frozen=True)
class Tactic:
    """A row of the table: thread blocks a processor that walk down the rows; 0: one a tile."""

    tiles: float  # problems of up to so many
    walkers: int


# Measured on an H200: docs/design-notes/quantise_kernel.md.
TACTICS = (Tactic(tiles=2_112, walkers=0), Tactic(tiles=float("inf"), walkers=8))


def choose_form(problem: QuantiseProblem, target: str) -> QuantiseForm:
    """Return the form for a problem; extents are no part of it."""
    return QuantiseForm(
        layout=problem.layout,
        source=problem.source,
        by_expert=problem.experts > 0,
        keeps_values=problem.keeps_values,
        limit=problem.limit,
        target=target,
    )


def choose_tactic(problem: QuantiseProblem) -> Tactic:
    """Return the tactic by the table."""
    rows, columns = tiles(problem)
    return next(tactic for tactic in TACTICS if rows * columns <= tactic.tiles)


def tiles(problem: QuantiseProblem) -> tuple[int, int]:
    """Return the tiles along rows and columns, tiles of padding included."""
    layout = problem.scale_layout
    rows: int = ceil_div(round_up(problem.rows, layout.row_tile), TILE_ROWS)
    columns: int = ceil_div(round_up(problem.blocks, layout.column_tile), TILE_BLOCKS)
    return rows, columns


def grid(problem: QuantiseProblem, tactic: Tactic, processors: int) -> tuple[int, int, int]:
    """Return the grid: along y one block for each tile of a row, along x those that walk down."""
    rows, columns = tiles(problem)
    at_once = processors * tactic.walkers if tactic.walkers else rows * columns
    return min(rows, max(1, at_once // columns)), columns, 1


def registers_allowed(thread_blocks: int) -> int:
    """Return the registers a thread if so many blocks share a processor; in steps of 8."""
    return min(255, REGISTERS_OF_PROCESSOR // (thread_blocks * THREADS) // 8 * 8)


def place_of(tile: Any, lane: Any, warp: Any, layout: str) -> tuple[Any, Any]:
    """Return row, and block within the tile, of a thread, as its layout stores them.

    Runs on ints and inside the kernel: non-negative integers, only // % * +.
    """
    if layout == LINEAR.name:
        return tile * TILE_ROWS + warp, lane
    block = warp * 4 + lane % 4
    if layout == SWIZZLE_8X4.name:
        return tile * TILE_ROWS + lane // 4, block
    # 128x4: 32 bytes hold rows 2 p and 2 p + 1 of each quarter of the 128 rows.
    within = (lane // 4 % 4) * 32 + tile % 16 * 2 + lane // 16
    return tile // 16 * 128 + within, block


def resident_blocks(form: QuantiseForm) -> int:
    """Return the number of thread blocks that a processor is expected to hold at once."""
    if form.keeps_values:
        return 4
    if form.source == SWIGLU.name:
        return 5
    return 8


def bound_blocks(form: QuantiseForm) -> int:
    """Return thread blocks a processor by which ptxas bounds registers; 0 sets no bound.

    Plain 8x4 misses the walk's eight blocks by one register; elsewhere the bound causes spills.
    """
    plain = form.source == VALUES.name and not form.by_expert and not form.keeps_values
    return resident_blocks(form) if plain and form.layout == SWIZZLE_8X4.name else 0
