"""What the bytes of one weight say, gathered in one pass: counts, extremes, energies, digests.

Owns `statistics_of`: it walks a stored weight by row blocks (memory stays bounded, pages are given
back behind it) and returns a TensorStatistics. Values are those of codes times block scales; the
tensor scale, one number that may itself be wrong, is left to the caller. NaN and infinities are
counted and kept out of every sum. Nothing is judged here, and nothing refused: what a checkpoint
can hold can be counted.

The pairing of a block format is the correlation, inside rows, between the logarithm of a block's
scale and that of its codes' energy. A quantiser that scales by the block's largest value makes it
negative: an outlier raises the scale and shrinks its neighbours. It vanishes when scales stand
beside codes that are not theirs. docs/design-notes/audit_statistics.md has the derivation.

Kept honest by suites/checkpoint/audit/statistics/test_tensor.py, against the definition of the
formats.
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
    """Walk one weight; `profile`: also gather squares by row and, from some rows, by column."""
    found = pass_over(stored, profile=profile)
    if not found.elements:  # rows of nothing can be many
        return found.finish()
    for _, weight in stored.row_blocks(WINDOW_ELEMENTS):
        found.scalars = _scalar(weight.tensor_scale), _scalar(weight.input_scale)
        found.add(weight)
    return found.finish()


def _scalar(scale: Tensor | None) -> float | None:
    """Return one number; of several, which only a stack has, none."""
    return float(scale) if scale is not None and scale.numel() == 1 else None
