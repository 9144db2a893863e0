"""Compute the statistics of one weight in one pass: counts, extremes, energies, digests.

`statistics_of` walks a stored weight by row blocks; memory stays bounded and pages are released as
it goes. Values are codes times block scales. The tensor scale, one number that may itself be wrong,
is left to the caller. NaN and infinities are counted and excluded from every sum.

The pairing of a block format is the correlation, inside rows, between the logarithms of a block's
scale and of its codes' energy. A quantiser that scales by the block's largest value makes it
negative: an outlier raises the scale and shrinks the other codes. It vanishes when scales are
paired with other blocks' codes. Derivation: docs/design-notes/audit_statistics.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.checkpoint.audit.statistics.passes import pass_over
from degarble.harness.checkpoint.audit.statistics.records import BlockStatistics, TensorStatistics

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.checkpoint.view.stored import StoredWeight

__all__ = ["WINDOW_ELEMENTS", "BlockStatistics", "TensorStatistics", "statistics_of"]

WINDOW_ELEMENTS = 1 << 23  # of one row block: 4 MiB of E2M1 codes


def statistics_of(stored: StoredWeight, *, profile: bool = False) -> TensorStatistics:
    """Return a weight's statistics; `profile`: with squares by row and by (sampled) column."""
    found = pass_over(stored, profile=profile)
    if not found.elements:  # rows of nothing can be many
        return found.finish()
    for _, weight in stored.row_blocks(WINDOW_ELEMENTS):
        found.scalars = _scalar(weight.tensor_scale), _scalar(weight.input_scale)
        found.add(weight)
    return found.finish()


def _scalar(scale: Tensor | None) -> float | None:
    """Return the number in a scale; None for several, which only a stack has."""
    return float(scale) if scale is not None and scale.numel() == 1 else None
