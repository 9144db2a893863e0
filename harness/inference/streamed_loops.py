"""Compiled loop that decodes streamed FP8 weights. Import it inside functions: numba is heavy.

No fast-math, and one product a value, so that the result equals Weight.values bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.base.compiled_loops import compiled

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Bytes = NDArray[np.uint8]


@compiled
def decode_panels(
    codes_MK: Bytes, scale_PQ: Floats, table: Floats, block: tuple[int, int], out_MK: Floats
) -> None:
    """Each code's value times the scale of its block; panels begin with the first row."""
    width = codes_MK.shape[1]
    for m in range(codes_MK.shape[0]):
        for q in range(scale_PQ.shape[1]):
            scale = scale_PQ[m // block[0], q]
            for k in range(q * block[1], min((q + 1) * block[1], width)):
                out_MK[m, k] = table[codes_MK[m, k]] * scale
