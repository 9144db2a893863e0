"""Make quantised operands of what a kernel has in hand: packed bytes, scales, and their order.

docs/operands.md shows the call for ModelOpt, compressed-tensors, FlashInfer, CUTLASS and torchao.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.layouts import LINEAR, PACKED_MN, scale_layout, unpack_scales
from degarble.harness.formats.number_formats import (
    FP8_1X128_F32,
    FP8_1X128_UE8M0,
    FP8_128X128_F32,
    FP8_128X128_UE8M0,
    FP8_ROW,
    FP8_TENSOR,
    MXFP4,
    MXFP8,
    NVFP4,
    NibbleOrder,
    ScaleDirection,
    scale_shape,
)
from degarble.harness.formats.quantise import QuantisedTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from degarble.harness.formats.number_formats import BlockFormat

_FP4_CODES = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)
_FP8_CODES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
_E4M3_SCALES = (torch.uint8, torch.float8_e4m3fn)
_UE8M0_SCALES = (torch.uint8, torch.float8_e8m0fnu)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def nvfp4(
    codes: Tensor,
    block_scales: Tensor,
    tensor_scale: Tensor | float | None = None,
    layout: str = "linear",
    direction: str = "decode",
    nibble_order: str = "low_even",
) -> QuantisedTensor:
    """Make an NVFP4 operand of packed codes [..., M, K/2], E4M3 block scales and a tensor scale.

    The tensor scale multiplies codes ("decode": ModelOpt, torchao) or was multiplied to the values
    ("encode": compressed-tensors, FlashInfer); None is 1. `layout` is the order of the block
    scales: "linear", or "128x4" as FlashInfer and CUTLASS swizzle them.

    >>> import torch
    >>> from degarble import dequantise, nvfp4
    >>> codes = torch.full((2, 8), 0x22, dtype=torch.uint8)  # every element is 1
    >>> w = nvfp4(codes, torch.ones(2, 1).to(torch.float8_e4m3fn), 0.5)
    >>> dequantise(w)[0, :3].tolist()
    [0.5, 0.5, 0.5]
    """
    packed = _bytes("codes", codes, _FP4_CODES)
    shape = _shape(packed, NVFP4)
    scale = _tensor_scale(tensor_scale, packed)
    if direction not in tuple(ScaleDirection):
        raise UnknownName.among("direction", direction, ScaleDirection)
    return QuantisedTensor(
        codes=packed,
        block_scale=_scales(block_scales, _E4M3_SCALES, NVFP4, shape, layout),
        tensor_scale=scale,
        format=NVFP4,
        dialect=CANONICAL,
        layout=scale_layout(layout),
        direction=ScaleDirection(direction),
        nibble_order=_nibbles(nibble_order),
        shape=shape,
    )


def mxfp4(
    codes: Tensor, block_scales: Tensor, layout: str = "linear", nibble_order: str = "low_even"
) -> QuantisedTensor:
    """Make an MXFP4 operand of packed codes [..., M, K/2] and UE8M0 scales of 32 elements.

    >>> import torch
    >>> from degarble import dequantise, mxfp4
    >>> codes = torch.full((2, 16), 0x22, dtype=torch.uint8)  # every element is 1
    >>> w = mxfp4(codes, torch.full((2, 1), 128, dtype=torch.uint8))  # 2**(128 - 127)
    >>> dequantise(w)[0, :3].tolist()
    [2.0, 2.0, 2.0]
    """
    packed = _bytes("codes", codes, _FP4_CODES)
    return _without_tensor_scale(MXFP4, packed, block_scales, layout, _nibbles(nibble_order))


def mxfp8(codes: Tensor, block_scales: Tensor, layout: str = "linear") -> QuantisedTensor:
    """Make an MXFP8 operand of E4M3 codes [..., M, K] and UE8M0 scales of 32 elements.

    >>> import torch
    >>> from degarble import dequantise, mxfp8
    >>> x = torch.ones(2, 32).to(torch.float8_e4m3fn)
    >>> dequantise(mxfp8(x, torch.full((2, 1), 126, dtype=torch.uint8)))[0, :3].tolist()
    [0.5, 0.5, 0.5]
    """
    return _without_tensor_scale(
        MXFP8, _bytes("codes", codes, _FP8_CODES), block_scales, layout, None
    )


def fp8(codes: Tensor, block_scales: Tensor | float, layout: str = "linear") -> QuantisedTensor:
    """Make an FP8 operand of E4M3 codes [..., M, K] and decode scales, whose shape says of what.

    One scale for 128 x 128 elements, for 1 x 128, for a row, or for the tensor; floats, or UE8M0
    bytes of blocks. `layout="packed_mn"` takes UE8M0 bytes as DeepGEMM packs them into int32.

    >>> import torch
    >>> from degarble import dequantise, fp8
    >>> x = torch.ones(4, 256).to(torch.float8_e4m3fn)
    >>> fp8(x, torch.ones(4, 2)).format.name, fp8(x, 0.5).format.name
    ('FP8_1X128_F32', 'FP8_TENSOR')
    """
    stored = _bytes("codes", codes, _FP8_CODES)
    given = block_scales
    if not isinstance(given, torch.Tensor):
        given = torch.tensor(given, dtype=torch.float32, device=stored.device)
    if given.dtype in _FLOATS:
        if layout != LINEAR.name:
            raise InvalidArgument(
                "layout", layout, "linear where scales are floats",
                'Pass layout="linear": only scales of one byte are swizzled.',
            )  # fmt: skip
        form, grid = _form_of_grid(stored, given.detach().float())
        return _stored(form, stored, grid, layout, None)
    form = FP8_1X128_UE8M0
    high = tuple(stored.shape[:-1])
    if layout == LINEAR.name and tuple(given.shape[:-1]) != high:
        form = FP8_128X128_UE8M0
    return _without_tensor_scale(form, stored, given, layout, None)


# --------------------------------------------------------------------------------------------------
# What the four have in common


def _without_tensor_scale(
    form: BlockFormat, codes: Tensor, scales: Tensor, layout: str, order: NibbleOrder | None
) -> QuantisedTensor:
    shape = _shape(codes, form)
    if layout == PACKED_MN.name and getattr(scales, "dtype", None) is torch.int32:
        scales, layout = unpack_scales(scales, scale_shape(shape, form)[-1]), LINEAR.name
    return _stored(form, codes, _scales(scales, _UE8M0_SCALES, form, shape, layout), layout, order)


def _stored(
    form: BlockFormat, codes: Tensor, scales: Tensor, layout: str, order: NibbleOrder | None
) -> QuantisedTensor:
    return QuantisedTensor(
        codes=codes,
        block_scale=scales,
        tensor_scale=None,
        format=form,
        dialect=CANONICAL,
        layout=scale_layout(layout),
        direction=None,
        nibble_order=order,
        shape=_shape(codes, form),
    )


def _form_of_grid(codes: Tensor, scales: Tensor) -> tuple[BlockFormat, Tensor]:
    """Find the FP8 format by the number of scales; where several fit they mean the same."""
    forms = (FP8_128X128_F32, FP8_1X128_F32, FP8_ROW, FP8_TENSOR)
    shape, grids = _shape(codes, FP8_TENSOR), {}
    for form in forms:
        if form is FP8_1X128_F32 and shape[-1] % 128:
            continue  # no whole blocks
        grids[form.name] = grid = scale_shape(shape, form)
        # A scale a row is written [M] or [M, 1], a scale a tensor (), [1] or [1, 1].
        if tuple(scales.shape) in {grid, _without_ones(grid), _without_ones(grid) or (1,)}:
            return form, scales.reshape(grid).contiguous()
    listed = ", ".join(f"{list(grid)} ({name})" for name, grid in grids.items())
    raise ShapeMismatch(
        "block_scales",
        tuple(scales.shape),
        f"for codes {list(codes.shape)} one of {listed}",
        "Pass the scales as they are stored, one for each block.",
    )


def _without_ones(grid: Sequence[int]) -> tuple[int, ...]:
    *leading, rows, columns = grid
    return (*leading, *(extent for extent in (rows, columns) if extent != 1))


def _bytes(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype]) -> Tensor:
    """Return a tensor of one-byte elements as uint8."""
    known = isinstance(tensor, torch.Tensor)
    if not known or tensor.dtype not in dtypes:
        raise DtypeMismatch(
            name,
            tensor.dtype if known else type(tensor).__name__,
            f"a tensor of {', '.join(str(dtype) for dtype in dtypes)}",
            "Pass the stored bytes, or quantise() values first.",
        )
    return tensor.detach().contiguous().view(torch.uint8)


def _shape(codes: Tensor, form: BlockFormat) -> tuple[int, ...]:
    if codes.ndim < 2:
        expected = "[..., M, K/2]" if form.packed else "[..., M, K]"
        raise ShapeMismatch(
            "codes", tuple(codes.shape), expected, "Pass a vector as one row: codes[None]."
        )
    return (*codes.shape[:-1], codes.shape[-1] * (2 if form.packed else 1))


def _scales(
    scales: Tensor,
    dtypes: Sequence[torch.dtype],
    form: BlockFormat,
    shape: tuple[int, ...],
    layout: str,
) -> Tensor:
    """Return block scales as bytes: [..., R, C], or the storage of a layout [..., S]."""
    held = _bytes("block_scales", scales, dtypes)
    *leading, rows, columns = scale_shape(shape, form)
    order = scale_layout(layout)
    extents = (*leading, rows, columns)
    if order != LINEAR:
        extents = (*leading, order.storage_size(rows, columns))
    wanted = torch.Size(extents).numel()
    same = tuple(held.shape) == extents if order == LINEAR else held.numel() == wanted
    if not same:
        raise ShapeMismatch(
            "block_scales",
            tuple(held.shape),
            f"{list(extents)} in layout {layout} ({wanted:,} bytes) for {form.name} {list(shape)}",
            'Name the order that the kernel reads, such as layout="128x4" with padded rows.',
        )
    return held.reshape(extents)


def _tensor_scale(scale: Tensor | float | None, codes: Tensor) -> Tensor:
    """Return a float32 scale: one number, or one for each matrix of a stack."""
    try:
        found = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float32).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(
            "tensor_scale", type(scale).__name__, "a number, or a tensor of float32",
            "Pass the scale as it is stored.",
        ) from error  # fmt: skip
    leading = codes.shape[:-2]
    if found.numel() == 1 and not leading:
        return found.reshape(()).to(codes.device)
    if found.numel() == leading.numel():
        return found.reshape(leading).to(codes.device)
    if found.ndim:
        raise ShapeMismatch(
            "tensor_scale",
            tuple(found.shape),
            f"one number, or {list(leading)}: one for each matrix" if leading else "one number",
            "Pass one scale for the tensor; scales by row belong into the output's scale.",
        )
    return found.to(codes.device)


def _nibbles(order: str) -> NibbleOrder:
    if order not in tuple(NibbleOrder):
        raise UnknownName.among("nibble_order", order, NibbleOrder)
    return NibbleOrder(order)
