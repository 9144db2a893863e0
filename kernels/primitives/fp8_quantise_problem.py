"""Problem and form of quantising rows to FP8 in blocks of 128, and the numbers of the recipe.

Rows may be adjacent heads, whose last values are rotated back first. Importable without the
DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats.scalar_ops import bf16_round
from degarble.kernels.primitives import attention_rows as heads
from degarble.kernels.primitives.quantise_problem import SOURCES, SWIGLU
from degarble.kernels.primitives.quantise_problem import VALUES as PLAIN

BLOCK = 128
VALUES = 16  # of a thread
LANES = BLOCK // VALUES
THREADS = 256
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
    source: str = PLAIN.name
    limit: float | None = None  # of the SwiGLU in front; None clamps nothing
    turned: int = 0  # values of a head that is turned back in front, 0: none is
    positions: int = 0  # rows of the table of turns, 0 where nothing is turned

    def __post_init__(self) -> None:
        whole = self.columns > 0 and self.columns % BLOCK == 0
        if not whole or not 0 <= self.rows * self.columns // VALUES < LARGEST:
            raise ShapeMismatch(
                "matrix to quantise",
                (self.rows, self.columns),
                f"columns in a multiple of {BLOCK}, and fewer than 2**31 sixteens of values",
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
        if self.turned and (self.source != PLAIN.name or self.columns % self.width):
            raise ShapeMismatch(
                "values in front of which heads are turned back",
                (self.source, self.columns),
                f"{PLAIN.name}, in whole heads of {self.turned}",
                "Turn attention's output alone, all heads of a token side by side.",
            )

    @property
    def width(self) -> int:
        """Return the number of values of a head that kernels know."""
        return heads.geometry(self.turned).width

    @property
    def blocks(self) -> int:
        """Return the number of blocks of a row."""
        return self.columns // BLOCK

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


def choose_form(problem: Fp8Problem, target: str) -> Fp8Form:
    """Return the form for a problem; extents are no part of it."""
    return Fp8Form(problem.scales, problem.source, problem.limit, target, problem.turned)


def group_of(part: Any, width: int) -> Any:
    """Return which sixteen of the rotated values a thread has; below 0: none."""
    of_head = width // VALUES
    return part % of_head - (of_head - heads.ROTATED // VALUES)
