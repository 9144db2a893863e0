"""Problem and grid of multiplying numbers by one factor (the weights of the indexer's heads).

value * factor in float32, the factor rounded to float32, the product rounded again if the output is
BF16. A factor of 1 widens BF16 exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.primitives import attention_rows as rows

THREADS = 256
KINDS = ("bf16", "fp32")


@dataclass(frozen=True)
class ScaleProblem:
    """`count` numbers times a factor."""

    count: int
    factor: float
    source: str = "fp32"
    out: str = "fp32"

    def __post_init__(self) -> None:
        rows.require_extent("numbers to scale", self.count)
        for name, kind in (("source", self.source), ("out", self.out)):
            if kind not in KINDS:
                raise UnknownName.among(f"dtype of {name} of a scaling", kind, KINDS)
        if not (math.isfinite(self.factor) and abs(self.factor) < 2.0**128):
            raise InvalidArgument(
                "factor", self.factor, "a finite float32 number", "Models have (I * N)^-1/2."
            )

    @property
    def blocks(self) -> int:
        """Return the number of thread blocks of a launch."""
        made: int = ceil_div(self.count, THREADS)
        return made


@dataclass(frozen=True)
class ScaleForm:
    """Compile-time parameters of a kernel; factor and count come with the launch."""

    source: str
    out: str
    target: str


def choose_form(problem: ScaleProblem, target: str) -> ScaleForm:
    """Return the form for a problem."""
    return ScaleForm(problem.source, problem.out, target)
