"""Where a candidate differs: rows, columns, boxes, beyond what rounding does.

Owns the mask of what differs and the boxes around it, on which faults of one tile, one head or one
run of rows rest. A difference counts here from STEPS spacings of BF16 on, or from FLOOR of a row's
size; it proposes places and judges nothing. Kept honest by
suites/engine/faults/test_activation_regions.py. Shape letters: N rows of all leading extents, F
features of the last.
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
    """Rows and columns, half open, of an output seen as [N, F]."""

    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def index(self) -> tuple[slice, slice]:
        """For [N, F]."""
        return slice(*self.rows), slice(*self.columns)

    @property
    def where(self) -> dict[str, int]:
        """Its corner, for reports."""
        return {"row": self.rows[0], "column": self.columns[0]}


def flat(x: Tensor) -> Tensor:
    """All leading extents together [N, F]."""
    return x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x.reshape(1, -1)


def differing(sight: Sight, output: str = "out") -> Tensor | None:
    """Mark what differs [N, F]; None where outputs cannot be compared or nothing differs."""
    if output not in sight.outputs or output not in sight.expected:
        return None
    c, e = sight.outputs[output], sight.expected[output]
    if c.shape != e.shape or not c.numel():
        return None
    found = apart(c, e)
    return found if bool(found.any()) else None


def cancelled(c: Tensor, e: Tensor) -> Tensor:
    """Where what is between two sums is nothing beside others of their row: no share of it."""
    if not c.dtype.is_floating_point or c.dtype.itemsize == 1 or c.ndim < 2 or not c.numel():
        return torch.zeros_like(c, dtype=torch.bool)
    c, e = c.double(), e.double()
    largest = (x.nan_to_num(0, 0, 0).abs().amax(-1, keepdim=True) for x in (c, e))
    return (c - e).abs() <= torch.minimum(*largest) * _CANCELLED


def length_of_difference(sight: Sight, output: str = "out") -> float:
    """The difference in units of what was expected; infinite where it is no number."""
    c, e = sight.outputs.get(output), sight.expected.get(output)
    if c is None or e is None or c.shape != e.shape:
        return math.inf
    gap, size = float((c.double() - e.double()).norm()), float(e.double().norm())
    return gap / size if size and math.isfinite(gap / size) else math.inf


def likeness(sight: Sight, output: str = "out") -> float:
    """The cosine of what came out and what was expected; 0 where there is no telling.

    What scales parts of a sum leaves it large, what takes other operands does not.
    """
    c, e = sight.outputs.get(output), sight.expected.get(output)
    if c is None or e is None or c.shape != e.shape:
        return 0.0
    c, e = c.double().flatten(), e.double().flatten()
    size = float(c.norm()) * float(e.norm())
    return float(c @ e) / size if size and math.isfinite(size) else 0.0


def wrong_slots(sight: Sight) -> Tensor | None:
    """Mark slots [T, K] whose outputs are others than roundings make them; None of other calls."""
    c, e, experts = sight.outputs.get("out"), sight.expected.get("out"), sight.inputs.get("experts")
    if c is None or e is None or experts is None or c.shape != e.shape:
        return None
    c, e = c.double(), e.double()
    far = (c - e).norm(dim=-1) > _SLOT * torch.maximum(c.norm(dim=-1), e.norm(dim=-1))
    found: Tensor = (far | ~c.isfinite().all(-1)) & (experts >= 0)
    return found


def apart(candidate: Tensor, expected: Tensor) -> Tensor:
    """Mark what differs by more than roundings do [N, F]."""
    if not expected.dtype.is_floating_point or expected.dtype.itemsize == 1:
        return flat(candidate.contiguous().view(expected.dtype) != expected)
    c, e = flat(candidate).double(), flat(expected).double()
    known = torch.where(e.isfinite(), e, 0.0)
    size = known.square().mean(1, keepdim=True).sqrt() * FLOOR
    beyond = (c - e).abs() > torch.maximum(c.abs(), e.abs()) * STEPS + size
    unlike = ~((c == e) | (c.isnan() & e.isnan())) & ~(c.isfinite() & e.isfinite())
    return torch.where(c.isfinite() & e.isfinite(), beyond, unlike)


def box(mask_NF: Tensor) -> Region:
    """The smallest region around what is marked."""
    rows, columns = mask_NF.any(1).nonzero(), mask_NF.any(0).nonzero()
    return Region((int(rows[0]), int(rows[-1]) + 1), (int(columns[0]), int(columns[-1]) + 1))


def grown(region: Region, step: tuple[int, int], shape: tuple[int, int]) -> Region:
    """The region rounded out to whole tiles."""
    (r0, r1), (c0, c1) = region.rows, region.columns
    return Region(
        (r0 // step[0] * step[0], min(-(-r1 // step[0]) * step[0], shape[0])),
        (c0 // step[1] * step[1], min(-(-c1 // step[1]) * step[1], shape[1])),
    )


def replaced(
    outputs: Mapping[str, Tensor], output: str, region: Region, part: Tensor | float
) -> dict[str, Tensor]:
    """Outputs with other values in a region of one of them."""
    made = outputs[output].clone()
    rows = flat(made)
    index = region.index
    if isinstance(part, float):
        rows[index] = part
    else:
        rows[index] = part[: rows[index].shape[0], : rows[index].shape[1]].to(made.dtype)
    return {**outputs, output: rows.reshape(made.shape)}
