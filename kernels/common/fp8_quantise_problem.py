"""What quantising to FP8 in blocks of 128 of a row is asked for, and what follows from it.

Owns the problem, its form, and the numbers of the canonical recipe. Pure host arithmetic. Refuses
columns that leave a block unfilled. Kept honest by suites/kernels/test_simt_quantise_fp8.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from degarble.harness.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats.scalar_codecs import bf16_round
from degarble.kernels.common.quantise_problem import SOURCES, SWIGLU
from degarble.kernels.common.quantise_problem import VALUES as PLAIN

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
    """M rows of K values, after whatever is fused in front."""

    rows: int
    columns: int
    scales: str = "float32"
    source: str = PLAIN.name
    limit: float | None = None  # of the SwiGLU in front; None clamps nothing

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

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return self.columns // BLOCK

    @property
    def input_columns(self) -> int:
        """Columns of the matrix that is read."""
        return self.columns * SOURCES[self.source].read_for_one


@dataclass(frozen=True)
class Fp8Form:
    """What a kernel is compiled for; the extents come with the launch."""

    scales: str
    source: str
    limit: float | None
    target: str


def choose_form(problem: Fp8Problem, target: str) -> Fp8Form:
    """Return the form that answers a problem: extents are no part of it."""
    return Fp8Form(problem.scales, problem.source, problem.limit, target)
