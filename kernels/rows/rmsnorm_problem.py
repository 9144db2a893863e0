"""Problem, form, tactic and arithmetic of RMSNorm, with or without NVFP4 quantisation.

Importable without the DSL; the arithmetic of a row is written once for kernels and tensors.

The order of the sum is a function of K alone. A lane holds two blocks of 16 values, T lanes apart.
It sums each half of a block from its first value on by fma, adds both halves, then both blocks; 32
lanes are folded by distance 16, 8, 4, 2, 1, that is lane i and lane i + 16 first; 16 warps by 8, 4,
2, 1, absent ones being 0. So a row's bits depend on neither M nor the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import LINEAR, ceil_div, round_up, scale_layout
from degarble.kernels.primitives.quantise_problem import (
    BLOCK,
    LARGEST_ROWS,
    LAYOUTS,
    REGISTERS_OF_PROCESSOR,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HALF = BLOCK // 2
SLOTS = 2  # blocks of a lane
QUARTERS = 4  # of a processor: each has a quarter of its registers, for warps of its own
LANES = 32
NARROW_WARPS = 8  # of a thread block where a warp has rows of its own
USUAL_WARPS = 7  # of rows up to 7168 wide
MOST_WARPS = 16
SMALLEST_COLUMNS, LARGEST_COLUMNS = 64, MOST_WARPS * LANES * SLOTS * BLOCK
WEIGHTS = ("bf16", "fp32")


@dataclass(frozen=True)
class NormProblem:
    """M rows of K BF16 values; normed, and quantised where a layout of scales is named."""

    rows: int
    columns: int
    epsilon: float = 1e-6
    weight: str = "bf16"
    layout: str | None = None  # of NVFP4 scales; None writes the normed values alone
    keeps_values: bool = False  # whether the normed values are written as well as the codes

    def __post_init__(self) -> None:
        if (
            not 0 <= self.rows < LARGEST_ROWS
            or not SMALLEST_COLUMNS <= self.columns <= LARGEST_COLUMNS
            or self.columns % BLOCK
        ):
            raise ShapeMismatch(
                "matrix to norm",
                (self.rows, self.columns),
                f"rows below 2**31, columns {SMALLEST_COLUMNS} to {LARGEST_COLUMNS} in a multiple "
                f"of {BLOCK}",
                "Wider rows have no kernel yet.",
            )
        if self.weight not in WEIGHTS:
            raise UnknownName.among("dtype of a norm's weight", self.weight, WEIGHTS)
        if self.layout is not None and self.layout not in LAYOUTS:
            scale_layout(self.layout)
            raise UnknownName.among("scale layout of a kernel", self.layout, LAYOUTS)
        if not 0 <= self.epsilon < 1:
            raise InvalidArgument(
                "epsilon", self.epsilon, "a number from 0 up to 1", "Models have 1e-6 or 1e-20."
            )
        if self.keeps_values and self.layout is None:
            raise InvalidArgument(
                "keeps_values",
                True,
                "a layout of scales",
                "Without one, the values are the result.",
            )

    @property
    def writes_values(self) -> bool:
        """Return whether normed BF16 values are among the outputs."""
        return self.layout is None or self.keeps_values

    @property
    def blocks(self) -> int:
        """Return the number of blocks of a row that share a scale."""
        return self.columns // BLOCK

    @property
    def padded_rows(self) -> int:
        """Return the rows that the launch walks: scale padding is written like the rest."""
        return round_up(self.rows, LAYOUTS[self.layout].row_tile) if self.layout else self.rows

    @property
    def scale_bytes(self) -> int:
        """Return the bytes of the scales, padding included."""
        size: int = LAYOUTS[self.layout].storage_size(self.rows, self.blocks) if self.layout else 0
        return size

    @property
    def bytes_moved(self) -> int:
        """Return the fewest bytes that have to be read and written: every input and output once."""
        numbers = self.rows * self.columns
        weight = self.columns * (4 if self.weight == "fp32" else 2)
        codes = numbers // 2 if self.layout else 0
        return 2 * numbers + weight + codes + self.scale_bytes + 2 * numbers * self.writes_values


@dataclass(frozen=True)
class NormForm:
    """Compile-time parameters of a kernel; extents come with the launch."""

    weight: str
    layout: str | None
    keeps_values: bool
    narrow: bool  # a warp has its rows, not a thread block
    most_warps: int  # of a thread block: bounds registers
    roomy: bool  # whether unpacked weights and values have registers
    target: str

    @property
    def writes_values(self) -> bool:
        """Return whether normed BF16 values are among the outputs."""
        return self.layout is None or self.keeps_values

    @property
    def unpacks_twice(self) -> bool:
        """Return whether a row is unpacked again for the product, which saves registers."""
        return not self.roomy and (self.narrow or self.layout is not None or self.weight == "fp32")

    @property
    def layout_walked(self) -> str:
        """Return the layout of scales, or one without padding where there are none."""
        return self.layout or LINEAR.name


@dataclass(frozen=True)
class Tactic:
    """Number of thread blocks a processor that walk down the rows; 0: one a row."""

    walkers: int


def choose_form(problem: NormProblem, target: str) -> NormForm:
    """Return the form for a problem."""
    return NormForm(
        weight=problem.weight,
        layout=problem.layout,
        keeps_values=problem.keeps_values,
        narrow=is_narrow(problem.columns),
        most_warps=most_warps(problem.columns),
        roomy=is_roomy(problem),
        target=target,
    )


def choose_tactic(problem: NormProblem) -> Tactic:
    """Return the tactic: as many walking thread blocks as a processor holds at once.

    Measured on an H200 at 7168 columns: docs/design-notes/row_kernels.md.
    """
    registers = 96 if problem.weight == "bf16" else 128
    warps = REGISTERS_OF_PROCESSOR // QUARTERS // (registers * LANES) * QUARTERS
    return Tactic(max(1, warps // (threads(problem) // LANES)))


def is_roomy(problem: NormProblem) -> bool:
    """Return whether codes of a row take seven warps: two rows leave 128 registers a thread."""
    seven = lanes_of_row(problem.columns) == USUAL_WARPS * LANES
    return seven and problem.layout is not None and problem.weight == "bf16"


def is_narrow(columns: int) -> bool:
    """Return whether one warp holds a row."""
    return columns <= LANES * SLOTS * BLOCK


def most_warps(columns: int) -> int:
    """Return the bound on warps of a thread block that the form is compiled for."""
    if is_narrow(columns):
        return NARROW_WARPS
    return USUAL_WARPS if lanes_of_row(columns) <= USUAL_WARPS * LANES else MOST_WARPS


def lanes_of_row(columns: int) -> int:
    """Return the number of lanes that share a row, a multiple of a warp."""
    lanes: int = round_up(ceil_div(columns, SLOTS * BLOCK), LANES)
    return lanes


def threads(problem: NormProblem) -> int:
    """Return the number of threads of a thread block."""
    lanes = lanes_of_row(problem.columns)
    return NARROW_WARPS * lanes if is_narrow(problem.columns) else lanes


def grid(problem: NormProblem, tactic: Tactic, processors: int) -> int:
    """Return the number of thread blocks of a launch."""
    warps_apart = NARROW_WARPS if is_narrow(problem.columns) else 1
    needed: int = ceil_div(problem.padded_rows, warps_apart)
    return min(needed, processors * tactic.walkers) if tactic.walkers else needed


def threads_declared(form: NormForm) -> int:
    """Return the threads by which ptxas bounds registers: 640 leave 96 a thread, 512 leave 128."""
    few = 512 if form.roomy else 640
    return max(form.most_warps * LANES, few if form.weight == "bf16" else 0)


# ---- the arithmetic of a row ---------------------------------------------------------------------


def sum_of_squares(numbers: Sequence[Any]) -> Any:
    """Return a block's sum: each half of its numbers from the first one on, then both."""
    sums = []
    for half in (numbers[:HALF], numbers[HALF:]):
        total = ops.multiply_rn(half[0], half[0])
        for number in half[1:]:
            total = ops.fma_rn(number, number, total)
        sums.append(total)
    return ops.add_rn(*sums)


def factor_of(total: Any, columns: Any, epsilon: Any, square_root: Callable[[Any], Any]) -> Any:
    """Return a row's norm factor; each step is rounded once, to nearest even."""
    mean = ops.divide_rn(total, columns)
    return ops.divide_rn(1.0, square_root(ops.add_rn(mean, epsilon)))


def normed(number: Any, weight: Any, factor: Any) -> Any:
    """Return a normed value in float32; the caller rounds it to BF16."""
    return ops.multiply_rn(weight, ops.multiply_rn(number, factor))
