"""Problems, forms and tactics of quantising rows to NVFP4 and FP8. Importable without the DSL."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

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
from degarble.kernels.primitives import kv_problem as heads

if TYPE_CHECKING:
    from collections.abc import Mapping


# --------------------------------------------------------------------------------------------------
# NVFP4. M may be anything at a launch; a form is compiled once for all extents. A tile is 8 rows x
# 32 blocks. For swizzled scales a warp holds 8 rows x 4 blocks, the 32 scale bytes that are
# adjacent in memory: every sector that it reads or writes is whole. For linear scales, 32 blocks of
# one row. Padding is part of the tiles, so it is written without a second pass.

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
class BlockSource:
    """Where the 16 values of a block come from: how many numbers are read for each."""

    name: str
    read_for_one: int


VALUES = BlockSource("values", read_for_one=1)
SWIGLU = BlockSource("swiglu", read_for_one=2)
SOURCES: Mapping[str, BlockSource] = MappingProxyType({s.name: s for s in (VALUES, SWIGLU)})


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
    decoded: bool = False  # write codes times block scales as BF16, in place of both

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
        told = (self.layout, self.experts, self.keeps_values)
        if self.decoded and told != (LINEAR.name, 0, False):
            raise InvalidArgument(
                "decoded values of a quantisation",
                f"layout {told[0]}, {told[1]} experts, keeps_values={told[2]}",
                f"layout {LINEAR.name}, one scale for all rows, no other values",
                "Ask for codes, or for decoded values alone.",
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
        if self.decoded:
            return read + 2 * numbers
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
    decoded: bool = False

    @property
    def factors_apart(self) -> bool:
        """Return whether each block's factor is computed, not taken from a table."""
        return self.by_expert or self.decoded


@dataclass(frozen=True)
class QuantiseTactic:
    """A row of the table: thread blocks a processor that walk down the rows; 0: one a tile."""

    tiles: float  # problems of up to so many
    walkers: int


# Measured on an H200: docs/design-notes/quantise_kernel.md.
TACTICS = (QuantiseTactic(tiles=2_112, walkers=0), QuantiseTactic(tiles=float("inf"), walkers=8))


def choose_form(problem: QuantiseProblem, target: str) -> QuantiseForm:
    """Return the form for a problem; extents are no part of it."""
    return QuantiseForm(
        layout=problem.layout,
        source=problem.source,
        by_expert=problem.experts > 0,
        keeps_values=problem.keeps_values,
        limit=problem.limit,
        target=target,
        decoded=problem.decoded,
    )


def choose_tactic(problem: QuantiseProblem) -> QuantiseTactic:
    """Return the tactic by the table."""
    rows, columns = tiles(problem)
    return next(tactic for tactic in TACTICS if rows * columns <= tactic.tiles)


def tiles(problem: QuantiseProblem) -> tuple[int, int]:
    """Return the tiles along rows and columns, tiles of padding included."""
    layout = problem.scale_layout
    rows: int = ceil_div(round_up(problem.rows, layout.row_tile), TILE_ROWS)
    columns: int = ceil_div(round_up(problem.blocks, layout.column_tile), TILE_BLOCKS)
    return rows, columns


def grid(problem: QuantiseProblem, tactic: QuantiseTactic, processors: int) -> tuple[int, int, int]:
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
    if form.keeps_values or form.decoded:
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


# --------------------------------------------------------------------------------------------------
# FP8 in blocks of 128. Rows may be adjacent heads, whose last values are rotated back first.

FP8_BLOCK = 128
FP8_VALUES = 16  # of a thread
LANES = FP8_BLOCK // FP8_VALUES
FP8_THREADS = 256
AMAX_FLOOR = 1e-4  # DeepSeek-V4 inference/kernel.py, act_quant
SHARE = float(np.float32(1) / np.float32(448))  # of the largest E4M3 number
SCALES = ("float32", "ue8m0")
LARGEST = 1 << 31


@dataclass(frozen=True)
class Fp8Problem:
    """M rows of K values, after the fused input step."""

    rows: int
    columns: int
    scales: str = "float32"
    source: str = VALUES.name
    limit: float | None = None  # of the SwiGLU in front; None clamps nothing
    turned: int = 0  # values of a head that is turned back in front, 0: none is
    positions: int = 0  # rows of the table of turns, 0 where nothing is turned

    def __post_init__(self) -> None:
        whole = self.columns > 0 and self.columns % FP8_BLOCK == 0
        if not whole or not 0 <= self.rows * self.columns // FP8_VALUES < LARGEST:
            raise ShapeMismatch(
                "matrix to quantise",
                (self.rows, self.columns),
                f"columns in a multiple of {FP8_BLOCK}, and fewer than 2**31 sixteens of values",
                "Pad the columns with zeros.",
            )
        if self.scales not in SCALES:
            raise UnknownName.among("format of block scales", self.scales, SCALES)
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
        known = 1 if self.turned else 0
        heads.require_extent("positions of the table of turns", self.positions, known)
        if self.turned and (self.source != VALUES.name or self.columns % self.width):
            raise ShapeMismatch(
                "values in front of which heads are turned back",
                (self.source, self.columns),
                f"{VALUES.name}, in whole heads of {self.turned}",
                "Turn attention's output alone, all heads of a token side by side.",
            )

    @property
    def width(self) -> int:
        """Return the number of values of a head that kernels know."""
        return heads.geometry(self.turned).width

    @property
    def blocks(self) -> int:
        """Return the number of blocks of a row."""
        return self.columns // FP8_BLOCK

    @property
    def input_columns(self) -> int:
        """Return the number of columns of the matrix that is read."""
        return self.columns * SOURCES[self.source].read_for_one


@dataclass(frozen=True)
class Fp8Form:
    """Compile-time parameters of a kernel; extents come with the launch."""

    scales: str
    source: str
    limit: float | None
    target: str
    turned: int = 0


def choose_fp8_form(problem: Fp8Problem, target: str) -> Fp8Form:
    """Return the form for a problem; extents are no part of it."""
    return Fp8Form(problem.scales, problem.source, problem.limit, target, problem.turned)


def group_of(part: Any, width: int) -> Any:
    """Return which sixteen of the rotated values a thread has; below 0: none."""
    of_head = width // FP8_VALUES
    return part % of_head - (of_head - heads.ROTATED // FP8_VALUES)
