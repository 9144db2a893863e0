"""Quantise BF16 to NVFP4 (canonical dialect) and dequantise at memory speed, bit for bit.

The definition is harness.formats.quantise. The last extent has to be a multiple of 16; scales are
in linear layout, the low nibble holds the even K.

* Decode: code * block scale is exact in float32; times the tensor's decode scale rounds once;
  BF16 output rounds once more, to nearest even. All 256 x 16 results are tabulated per call.
* Encode, G the encode scale, every step rounded to float32: scale byte = E4M3(amax * (G * (1/6))),
  code = E2M1(x * min(1 / (scale * (1/G)), largest float32)), nearest even, saturating. NaN counts
  in no amax and becomes +6. Without `encode_scale`, G = 2688 / amax of the tensor, at most the
  largest float32, and 1 where amax is 0 or infinite.
* NaN results are the positive quiet NaN.

Importing this compiles nothing: the loops are compiled at first use and cached. The design note
docs/design-notes/fast_nvfp4.md says why these loops were chosen and which ones lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch
from degarble.harness.formats.element_formats import E2M1, E4M3
from degarble.harness.formats.fast.threads import (
    bits_of,
    bits_view,
    output_tensor,
    run_parts,
    values_of,
)
from degarble.harness.formats.spare_memory import empty_tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

BLOCK = 16
GRAIN_BLOCKS = 1 << 16  # a part of 1,048,576 elements takes as long as starting a thread

_FLOAT_DTYPES = (torch.bfloat16, torch.float32)
_CODE_DTYPES = (torch.uint8,)
_SCALE_DTYPES = (torch.uint8, torch.float8_e4m3fn)

_LARGEST = np.float32(np.finfo(np.float32).max)
# Below, 1/G or G/6 leaves float32; no tensor asks for it by itself (2688 / largest is 8e-36).
SMALLEST_ENCODE_SCALE = np.float32(2.0**-126)
_FULL_SCALE = np.float32(E4M3.largest * E2M1.largest)  # 2688


class PackedNVFP4(NamedTuple):
    """Canonical NVFP4: packed codes [..., K/2], E4M3 scale bytes [..., K/16], encode scale G."""

    codes: Tensor
    block_scale: Tensor
    encode_scale: float


def dequantise_nvfp4(
    codes: Tensor,
    block_scale: Tensor,
    decode_scale: float | Tensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    out: Tensor | None = None,
    threads: int | None = None,
) -> Tensor:
    """Decode packed codes [..., K/2] with scale bytes [..., K/16] to `dtype` [..., K]."""
    if dtype not in _FLOAT_DTYPES:
        raise DtypeMismatch("dtype", dtype, "torch.bfloat16 or torch.float32", "Convert after.")
    packed = bits_view("codes", codes, _CODE_DTYPES)
    scales = bits_view("block_scale", block_scale, _SCALE_DTYPES)
    shape = _value_shape(codes, block_scale)
    table = decode_table(_as_float32("decode_scale", decode_scale), dtype).reshape(-1)
    result = output_tensor(out, shape, dtype)
    values = bits_view("out", result, (dtype,))

    from degarble.harness.formats.fast import loops as fast_loops  # noqa: PLC0415  imports numba

    stream = fast_loops.streams(values)

    def part(start: int, stop: int) -> None:
        fast_loops.decode_blocks(
            packed[start * 8 : stop * 8],
            scales[start:stop],
            table,
            values[start * BLOCK : stop * BLOCK],
            stream,
        )

    run_parts(part, scales.size, GRAIN_BLOCKS, threads)
    return result


def quantise_nvfp4(
    values: Tensor, encode_scale: float | Tensor | None = None, *, threads: int | None = None
) -> PackedNVFP4:
    """Encode `values` [..., K] by the canonical rule; G follows from the tensor if not given."""
    flat = bits_view("values", values, _FLOAT_DTYPES)
    if values.dim() == 0 or values.shape[-1] % BLOCK:
        raise ShapeMismatch(
            "values", tuple(values.shape), "a last extent that is a multiple of 16", "Pad K."
        )
    if encode_scale is None:
        encode = encode_scale_of(largest_magnitude(values, threads=threads))
    else:
        encode = _as_float32("encode_scale", encode_scale)
        if not SMALLEST_ENCODE_SCALE <= encode <= _LARGEST:
            raise InvalidArgument(
                "encode_scale",
                float(encode),
                "a finite float32 from 2^-126",
                "Use 2688 / amax, or quantise_definition beyond.",
            )
    lead, extent = values.shape[:-1], values.shape[-1]
    codes = empty_tensor((*lead, extent // 2), torch.uint8)
    block_scale = empty_tensor((*lead, extent // BLOCK), torch.uint8)
    packed = bits_view("codes", codes, _CODE_DTYPES)
    scales = bits_view("block_scale", block_scale, _SCALE_DTYPES)
    factors = element_factors(encode)
    share = encode * np.float32(1 / 6)

    from degarble.harness.formats.fast import loops as fast_loops  # noqa: PLC0415  imports numba

    def part(start: int, stop: int) -> None:
        fast_loops.encode_blocks(
            flat[start * BLOCK : stop * BLOCK],
            share,
            factors,
            packed[start * 8 : stop * 8],
            scales[start:stop],
        )

    run_parts(part, scales.size, GRAIN_BLOCKS, threads)
    return PackedNVFP4(codes, block_scale, float(encode))


def largest_magnitude(values: Tensor, *, threads: int | None = None) -> float:
    """Return the largest |value|; NaN does not count, an empty or all-NaN tensor gives 0."""
    flat = bits_view("values", values, _FLOAT_DTYPES)

    from degarble.harness.formats.fast import loops as fast_loops  # noqa: PLC0415  imports numba

    parts = run_parts(
        lambda start, stop: fast_loops.largest_bits(flat[start:stop]),
        flat.size,
        GRAIN_BLOCKS * BLOCK,
        threads,
    )
    return float(np.uint32(max(parts)).view(np.float32))


def encode_scale_of(amax: float) -> np.float32:
    """Return G = 2688 / amax in float32, at most the largest float32; 1 for amax 0 or infinite."""
    if amax == 0.0 or np.isinf(amax):
        return np.float32(1.0)
    with np.errstate(over="ignore"):
        return min(_FULL_SCALE / np.float32(amax), _LARGEST)


def element_factors(encode_scale: np.float32) -> NDArray[np.float32]:
    """Return, for each scale byte, what the elements of its block are multiplied by."""
    with np.errstate(all="ignore"):
        product = values_of(E4M3) * (np.float32(1.0) / encode_scale)
        factors: NDArray[np.float32] = np.minimum(np.float32(1.0) / product, _LARGEST)
    return factors


def decode_table(decode_scale: np.float32, dtype: torch.dtype) -> NDArray[Any]:
    """Return the bits of all decoded values, [256 scale bytes, 16 codes]."""
    with np.errstate(all="ignore"):
        values = (values_of(E4M3)[:, None] * values_of(E2M1)) * decode_scale
    values[np.isnan(values)] = np.nan
    return bits_of(values, dtype)


def _value_shape(codes: Tensor, block_scale: Tensor) -> tuple[int, ...]:
    """Return [..., K], or refuse codes and scales that do not belong together."""
    if codes.dim() == 0 or codes.shape[-1] % (BLOCK // 2):
        raise ShapeMismatch(
            "codes", tuple(codes.shape), "a last extent that is a multiple of 8 bytes", "Pad K."
        )
    expected = (*codes.shape[:-1], codes.shape[-1] // (BLOCK // 2))
    if tuple(block_scale.shape) != expected:
        raise ShapeMismatch(
            "block_scale",
            tuple(block_scale.shape),
            f"{expected}, one byte for 8 bytes of codes",
            "Scales in another layout go through harness.formats.layouts.from_layout first.",
        )
    return (*codes.shape[:-1], codes.shape[-1] * 2)


def _as_float32(name: str, scale: float | Tensor) -> np.float32:
    """Return a scale as float32; a Python float rounds to nearest even, a tensor must be exact."""
    if isinstance(scale, torch.Tensor):
        if scale.dtype is not torch.float32 or scale.numel() != 1:
            raise DtypeMismatch(
                name,
                f"{scale.dtype} of shape {tuple(scale.shape)}",
                "one float32",
                "Pass one tensor scale; convert it on purpose.",
            )
        scale = float(scale)
    return np.float32(scale)
