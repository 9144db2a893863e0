"""Define the statistics of one weight after one pass over its bytes.

Values are codes times block scales; the tensor scale is a separate field.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from degarble.harness.checkpoint.audit.statistics import row_facts
from degarble.harness.checkpoint.audit.statistics.scales import share_far

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from degarble.harness.checkpoint.audit.statistics.scales import Pairing, ScaleStatistics


@dataclass(frozen=True)
class BlockStatistics:
    """Statistics of a quantised weight's blocks.

    zero_blocks  all codes are zero; `zero_scales` counts their scale bytes [256]
    underflown   codes that are not zero under a scale that is
    tops         blocks of ordinary scale, by the largest magnitude code in them
    """

    scale: ScaleStatistics
    zero_blocks: int
    zero_scales: NDArray[np.int64]
    underflown: int
    tops: NDArray[np.int64]
    pairing: Pairing


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of one weight; `amax` and `sum_squares` exclude its tensor scale.

    counts      codes by bit pattern, or floats by exponent field; empty for integers
    row_digest  does not depend on the order of rows; `digest` and `scale_digest` do
    columns     squares by column over some rows, `rows` squares by row; None if not requested
    """

    elements: int
    height: int
    counts: NDArray[np.int64]
    not_finite: int
    zeros: int
    amax: float
    sum_squares: float
    zero_rows: int
    zero_run: tuple[int, int]  # first row and length of the longest run of zero rows
    column_run: tuple[int, int]  # of columns that are zero in the rows that `columns` is from
    digest: int
    row_digest: int
    scale_digest: int
    byte_entropy: float
    tensor_scale: float | None  # as stored
    input_scale: float | None  # a decode scale, whatever is stored
    blocks: BlockStatistics | None = None
    extremes: tuple[float, float] | None = None  # of integers
    columns: NDArray[np.float32] | None = None
    rows: NDArray[np.float32] | None = None

    @property
    def is_zero(self) -> bool:
        """Whether all elements are zero."""
        return self.zeros == self.elements

    @property
    def code_entropy(self) -> float:
        """Entropy in bits a code, or an exponent field."""
        return row_facts.entropy(self.counts)

    @property
    def far(self) -> float:
        """Share of non-zero floats whose exponent is 40 or more from the median."""
        return share_far(np.arange(1, 255), self.counts[1:255], 40) if len(self.counts) else 0.0
