"""The compiled loop that decodes streamed FP8 weights; imported inside functions: numba is heavy.

Owns one loop; no fast-math, one product a value. Refuses nothing: callers bring whole arrays.
Kept honest by suites/runs/test_streamed_weights.py, against Weight.values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

import numba

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Bytes = NDArray[np.uint8]

F = TypeVar("F", bound="Callable[..., Any]")


def _compiled(function: F) -> F:
    """Compile lazily, cached on disk where a place for the cache can be written."""
    try:
        return cast("F", numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:  # no cache directory can be written: compile again in every process
        return cast("F", numba.njit(nogil=True)(function))


@_compiled
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
