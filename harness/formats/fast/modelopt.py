"""Quantise to NVFP4 in ModelOpt's dialect at speed, and search for better block scales.

`quantise_modelopt` equals harness.formats.quantise for MODELOPT bit for bit. `search_modelopt`
picks for each block the candidate scale with the least squared error. `measure` sums energy and
squared error of stored codes.

s is the decode scale of the tensor, a the amax of a block: scale byte = E4M3(clamp(a / (6 s))),
1.0 for a zero block; code = E2M1(x / (scale * s)), every step rounded to float32. A search tries
E4M3(clamp(a / (m s))) for every requested m, moved by every requested step of the scale's code, in
this order; the first wins ties.

Values have to be finite and scales within 2^-100 to 2^100: beyond, products leave float32's normal
range, and only the definition is exact. Importing this compiles nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.harness.formats.element_formats import E2M1, E4M3
from degarble.harness.formats.fast.nvfp4 import BLOCK, GRAIN_BLOCKS
from degarble.harness.formats.fast.threads import bits_view, run_parts, values_of
from degarble.harness.formats.spare_memory import empty_tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from numpy.typing import NDArray
    from torch import Tensor

SMALLEST_SCALE, LARGEST_SCALE = 2.0**-100, 2.0**100
_VALUE_DTYPES = (torch.bfloat16, torch.float32)
_SCALE_DTYPES = (torch.uint8, torch.float8_e4m3fn)
_INFINITY_BITS = 0x7F800000


class Search(NamedTuple):
    """Candidates of a block: elements that its largest magnitude may become, and code steps."""

    targets: tuple[float, ...]
    moves: tuple[int, ...] = (0,)


class Measured(NamedTuple):
    """Sums over a tensor: of squared values and of squared errors."""

    energy: float
    error: float


def quantise_modelopt(
    values: Tensor, decode_scale: float, *, threads: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return packed codes [..., K/2] and scale bytes [..., K/16] of `values` [..., K]."""
    scale = _scale(decode_scale)
    share = scale * np.float32(E2M1.largest)

    def encode(x: Any, packed: Any, scales: Any) -> Any:
        from degarble.harness.formats.fast import modelopt_loops as loops  # noqa: PLC0415  numba

        return loops.encode_blocks(x, share, _divisors(scale), packed, scales)

    return _encoded(values, encode, threads)


def search_modelopt(
    values: Tensor, decode_scale: float, search: Search, *, threads: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return codes and scale bytes, each block with its best candidate scale."""
    scale = _scale(decode_scale)
    shares = scale * np.array(search.targets, np.float32)
    rule = shares, np.array(search.moves, np.int64)
    tables = _divisors(scale), _steps(scale), _elements()

    def encode(x: Any, packed: Any, scales: Any) -> Any:
        from degarble.harness.formats.fast import modelopt_loops as loops  # noqa: PLC0415  numba

        return loops.search_blocks(x, rule, tables, packed, scales)

    return _encoded(values, encode, threads)


def measure(values: Tensor, codes: Tensor, block_scale: Tensor, decode_scale: float) -> Measured:
    """Compare values with what codes and scales decode to; one thread, sums in a fixed order."""
    from degarble.harness.formats.fast import modelopt_loops as loops  # noqa: PLC0415  numba

    sums = np.zeros(2)
    loops.measure_blocks(
        bits_view("values", values, _VALUE_DTYPES),
        bits_view("codes", codes, (torch.uint8,)),
        bits_view("block_scale", block_scale, _SCALE_DTYPES),
        (_steps(np.float32(decode_scale)), _elements()),
        sums,
    )
    return Measured(*map(float, sums))


def largest_magnitude(values: Tensor) -> float:
    """Return the largest magnitude; NaN beats infinity, infinity all numbers. No values give 0."""
    from degarble.harness.formats.fast import modelopt_loops as loops  # noqa: PLC0415  numba

    flat = bits_view("values", values, _VALUE_DTYPES)
    parts = run_parts(
        lambda start, stop: int(loops.largest_bits(flat[start:stop])),
        flat.size,
        GRAIN_BLOCKS * BLOCK,
        None,
    )
    return float(np.uint32(max(parts)).view(np.float32))


def largest_finite(values: Tensor) -> float:
    """Return the largest magnitude; refuse a tensor with anything that is not finite."""
    largest = largest_magnitude(values)
    _require_finite(int(np.float32(largest).view(np.uint32)))
    return largest


def _encoded(
    values: Tensor, encode: Callable[[Any, Any, Any], Any], threads: int | None
) -> tuple[Tensor, Tensor]:
    flat = bits_view("values", values, _VALUE_DTYPES)
    if values.dim() == 0 or values.shape[-1] % BLOCK:
        raise ShapeMismatch(
            "values", tuple(values.shape), "a last extent that is a multiple of 16", "Pad K."
        )
    lead, extent = values.shape[:-1], values.shape[-1]
    codes = empty_tensor((*lead, extent // 2), torch.uint8)
    block_scale = empty_tensor((*lead, extent // BLOCK), torch.uint8)
    packed = bits_view("codes", codes, (torch.uint8,))
    scales = bits_view("block_scale", block_scale, (torch.uint8,))

    def part(start: int, stop: int) -> int:
        x = flat[start * BLOCK : stop * BLOCK]
        return int(encode(x, packed[start * 8 : stop * 8], scales[start:stop]))

    _require_finite(max(run_parts(part, scales.size, GRAIN_BLOCKS, threads), default=0))
    return codes, block_scale


def _require_finite(bits: int) -> None:
    if bits >= _INFINITY_BITS:
        raise InvalidArgument(
            "largest magnitude of the values",
            float(np.uint32(bits).view(np.float32)),
            "finite values",
            "Find where NaN or infinity comes from; a weight has none.",
        )


def _scale(decode_scale: float) -> np.float32:
    scale = np.float32(decode_scale)
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        raise InvalidArgument(
            "decode_scale", float(scale), "2^-100 to 2^100", "Use quantise_definition beyond."
        )
    return scale


def _divisors(scale: np.float32) -> NDArray[np.float32]:
    products: NDArray[np.float32] = values_of(E4M3) * scale
    return products


def _steps(scale: np.float32) -> NDArray[np.float64]:
    """Return scale times decode scale without rounding: 4 and 24 bits fit in float64."""
    return values_of(E4M3).astype(np.float64) * np.float64(scale)


def _elements() -> NDArray[np.float64]:
    return values_of(E2M1).astype(np.float64)
