"""Block formats (NVFP4, MXFP4, MXFP8, FP8 128x128, FP8 1x128) and the shapes of codes and scales.

The FP8 block formats exist with fp32 and with UE8M0 scales. A vector is passed as [1, K].
Only 128x128 may have cut-off blocks: its scales count by ceiling division. Every other format
needs K in whole blocks, because nothing is padded silently.

Sources: NVFP4 facts of PTX ISA 9.1 (mxf4nvf4) and Transformer Engine; MX formats OCP Microscaling
1.0; FP8 blocks deepseek-ai/DeepSeek-V3 and V4, inference/kernel.py.
Shape letters: M rows, K elements along the blocks, R and C blocks along M and K.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from degarble.harness.base.errors import ShapeMismatch, UnknownName
from degarble.harness.formats.element_formats import E2M1, E4M3, FP32, UE8M0
from degarble.harness.formats.types import BlockFormat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NVFP4 = BlockFormat(
    name="NVFP4", element=E2M1, scale=E4M3, block=(1, 16), tensor_scale=True, packed=True
)
MXFP4 = BlockFormat(
    name="MXFP4", element=E2M1, scale=UE8M0, block=(1, 32), tensor_scale=False, packed=True
)
MXFP8 = BlockFormat(
    name="MXFP8", element=E4M3, scale=UE8M0, block=(1, 32), tensor_scale=False, packed=False
)
FP8_128X128_F32 = BlockFormat(
    name="FP8_128X128_F32",
    element=E4M3,
    scale=FP32,
    block=(128, 128),
    tensor_scale=False,
    packed=False,
    ragged=True,
)
FP8_128X128_UE8M0 = BlockFormat(
    name="FP8_128X128_UE8M0",
    element=E4M3,
    scale=UE8M0,
    block=(128, 128),
    tensor_scale=False,
    packed=False,
    ragged=True,
)
FP8_1X128_F32 = BlockFormat(
    name="FP8_1X128_F32",
    element=E4M3,
    scale=FP32,
    block=(1, 128),
    tensor_scale=False,
    packed=False,
)
FP8_1X128_UE8M0 = BlockFormat(
    name="FP8_1X128_UE8M0",
    element=E4M3,
    scale=UE8M0,
    block=(1, 128),
    tensor_scale=False,
    packed=False,
)

BLOCK_FORMATS: Mapping[str, BlockFormat] = MappingProxyType(
    {
        fmt.name: fmt
        for fmt in (
            NVFP4,
            MXFP4,
            MXFP8,
            FP8_128X128_F32,
            FP8_128X128_UE8M0,
            FP8_1X128_F32,
            FP8_1X128_UE8M0,
        )
    }
)


def block_format(name: str) -> BlockFormat:
    """Return the block format called `name`; raise with the nearest known names otherwise."""
    if name not in BLOCK_FORMATS:
        raise UnknownName.among("block format", name, BLOCK_FORMATS)
    return BLOCK_FORMATS[name]


def require_shape(shape: Sequence[int], fmt: BlockFormat) -> None:
    """Raise if the format cannot hold a logical shape."""
    if len(shape) < 2:
        raise ShapeMismatch(
            f"shape for {fmt.name}",
            tuple(shape),
            "at least two dimensions [..., M, K]",
            "Pass a vector as [1, K].",
        )
    if fmt.ragged:
        return
    for extent, block, name in zip(shape[-2:], fmt.block, ("M", "K"), strict=True):
        if extent % block:
            raise ShapeMismatch(
                f"{name} for {fmt.name}",
                extent,
                f"a multiple of {block}",
                "Pad it with zeros on purpose and keep the padded shape.",
            )


def codes_shape(shape: Sequence[int], fmt: BlockFormat) -> tuple[int, ...]:
    """Return the extents of the stored codes: K halves where two codes share a byte."""
    require_shape(shape, fmt)
    *leading, columns = shape
    return (*leading, columns // 2 if fmt.packed else columns)


def scale_shape(shape: Sequence[int], fmt: BlockFormat) -> tuple[int, ...]:
    """Return the extents [..., R, C] of the block scales in row-major order."""
    require_shape(shape, fmt)
    # Ceiling division: only ragged formats have a cut-off last block.
    *leading, rows, columns = shape
    block_rows, block_columns = fmt.block
    return (*leading, -(-rows // block_rows), -(-columns // block_columns))
