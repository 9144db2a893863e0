"""Find the regions of an output, rows by columns, in which candidate and twin differ.

Faults of one tile, one head or one run of rows are proposed from these regions. An element differs
if its gap exceeds STEPS spacings of BF16 plus FLOOR times the root mean square of its row. The mask
only proposes places; the budget decides.

Shape letters: N rows of all leading extents, F features of the last, T tokens, K slots of a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import Sight

STEPS = 4 * 2.0**-8  # four spacings of BF16
_SLOT = 0.05  # of a slot's length
FLOOR = 4e-3  # of a row's root mean square
_CANCELLED = 2.0**-16  # of the largest of a row: what summing leaves where terms cancel


@dataclass(frozen=True)
class Region:
    """Half-open ranges of rows and columns in an output viewed as [N, F]."""

    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def index(self) -> tuple[slice, slice]:
        """Return the slices that select the region from [N, F]."""
        return slice(*self.rows), slice(*self.columns)

    @property
    def where(self) -> dict[str, int]:
        """Return the first row and column, for reports."""
        return {"row": self.rows[0], "column": self.columns[0]}


def flat(x: Tensor) -> Tensor:
    """Flatten all leading extents: [N, F]."""
    return x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x.reshape(1, -1)


def differing(sight: Sight, output: str = "out") -> Tensor | None:
    """Mark the elements that differ [N, F]; None if shapes differ or nothing does."""
    if output not in sight.outputs or output not in sight.expected:
        return None
    c, e = sight.outputs[output], sight.expected[output]
    if c.shape != e.shape or not c.numel():
        return None
    found = apart(c, e)
    return found if bool(found.any()) else None


def cancelled(c: Tensor, e: Tensor) -> Tensor:
    """Mark differences of two sums that are negligible relative to the largest of their row."""
    if not c.dtype.is_floating_point or c.dtype.itemsize == 1 or c.ndim < 2 or not c.numel():
        return torch.zeros_like(c, dtype=torch.bool)
    c, e = c.double(), e.double()
    largest = (x.nan_to_num(0, 0, 0).abs().amax(-1, keepdim=True) for x in (c, e))
    return (c - e).abs() <= torch.minimum(*largest) * _CANCELLED


def length_of_difference(sight: Sight, output: str = "out") -> float:
    """Return the norm of the difference over that of the expected output; infinite if undefined."""
    c, e = sight.outputs.get(output), sight.expected.get(output)
    if c is None or e is None or c.shape != e.shape:
        return math.inf
    gap, size = float((c.double() - e.double()).norm()), float(e.double().norm())
    return gap / size if size and math.isfinite(gap / size) else math.inf


def likeness(sight: Sight, output: str = "out") -> float:
    """Return the cosine of actual and expected output; 0 where it cannot be computed.

    A gain on parts of a sum leaves the cosine large, other operands do not.
    """
    c, e = sight.outputs.get(output), sight.expected.get(output)
    if c is None or e is None or c.shape != e.shape:
        return 0.0
    c, e = c.double().flatten(), e.double().flatten()
    size = float(c.norm()) * float(e.norm())
    return float(c @ e) / size if size and math.isfinite(size) else 0.0


def wrong_slots(sight: Sight) -> Tensor | None:
    """Mark slots [T, K] that differ by more than rounding; None for calls without experts."""
    c, e, experts = sight.outputs.get("out"), sight.expected.get("out"), sight.inputs.get("experts")
    if c is None or e is None or experts is None or c.shape != e.shape:
        return None
    c, e = c.double(), e.double()
    # Relative to the longer of the two, so that either may be zero.
    far = (c - e).norm(dim=-1) > _SLOT * torch.maximum(c.norm(dim=-1), e.norm(dim=-1))
    found: Tensor = (far | ~c.isfinite().all(-1)) & (experts >= 0)
    return found


def apart(candidate: Tensor, expected: Tensor) -> Tensor:
    """Mark elements that differ by more than rounding explains [N, F]."""
    # Codes (integers, FP8) have no tolerance: they are compared as bits.
    if not expected.dtype.is_floating_point or expected.dtype.itemsize == 1:
        return flat(candidate.contiguous().view(expected.dtype) != expected)
    c, e = flat(candidate).double(), flat(expected).double()
    known = torch.where(e.isfinite(), e, 0.0)
    size = known.square().mean(1, keepdim=True).sqrt() * FLOOR
    beyond = (c - e).abs() > torch.maximum(c.abs(), e.abs()) * STEPS + size
    unlike = ~((c == e) | (c.isnan() & e.isnan())) & ~(c.isfinite() & e.isfinite())
    return torch.where(c.isfinite() & e.isfinite(), beyond, unlike)


def box(mask_NF: Tensor) -> Region:
    """Return the smallest region that contains every marked element."""
    rows, columns = mask_NF.any(1).nonzero(), mask_NF.any(0).nonzero()
    return Region((int(rows[0]), int(rows[-1]) + 1), (int(columns[0]), int(columns[-1]) + 1))


def grown(region: Region, step: tuple[int, int], shape: tuple[int, int]) -> Region:
    """Round a region outwards to whole tiles."""
    (r0, r1), (c0, c1) = region.rows, region.columns
    return Region(
        (r0 // step[0] * step[0], min(-(-r1 // step[0]) * step[0], shape[0])),
        (c0 // step[1] * step[1], min(-(-c1 // step[1]) * step[1], shape[1])),
    )


def replaced(
    outputs: Mapping[str, Tensor], output: str, region: Region, part: Tensor | float
) -> dict[str, Tensor]:
    """Return the outputs with one region of one of them overwritten."""
    made = outputs[output].clone()
    rows = flat(made)
    index = region.index
    if isinstance(part, float):
        rows[index] = part
    else:
        rows[index] = part[: rows[index].shape[0], : rows[index].shape[1]].to(made.dtype)
    return {**outputs, output: rows.reshape(made.shape)}
