"""Quantise tensors to block formats and dequantise them, as the facts of a dialect say.

Every step is one float32 operation, rounded to nearest even, in the order of the dialect's record;
nothing is fused. The value of a code is element * block scale (exact, unless the scale is fp32),
then one float32 multiply by a decode scale or divide by an encode scale, then one rounding to the
output dtype. In float64 all of it is exact, apart from a division by an encode scale. Large NVFP4
tensors on the CPU take the compiled loops where their dialect has them (harness.formats.fast), bit
for bit.

NVFP4 and MX need K in whole blocks; only 128x128 may be ragged. NaN, infinities and zero tensors
follow the record; where a producer leaves them undefined they raise. Approximate reciprocals of a
device are modelled by correctly rounded ones, and the dialect records bit_exact=False.

Shape letters: M rows, K columns, R and C blocks along M and K, r and c inside a block.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument
from degarble.harness.formats.arrays import decode_array, decode_pairs, encode_array
from degarble.harness.formats.block_formats import NVFP4, require_shape, scale_shape
from degarble.harness.formats.dialects import (
    CANONICAL,
    MODELOPT,
    Dialect,
    Guard,
    NegativeZero,
    NonFinite,
    TensorScaleRule,
)
from degarble.harness.formats.fast import modelopt as fast_modelopt
from degarble.harness.formats.fast import nvfp4 as fast_nvfp4
from degarble.harness.formats.layouts import LINEAR
from degarble.harness.formats.packing import pack_nibbles
from degarble.harness.formats.quantised import QuantisedTensor, require_scale_extents
from degarble.harness.formats.scale_rules import BLOCK_SCALE, TENSOR_SCALE, VALUE, Scales
from degarble.harness.formats.types import BlockFormat, NanRule, NibbleOrder, ScaleDirection

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.formats.dialects import BlockRule

_VALUE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OUTPUT_DTYPES = (*_VALUE_DTYPES, torch.float64)
_FAST_DTYPES = (torch.float32, torch.bfloat16)
_FAST_FROM_ELEMENTS = 1 << 16  # below, importing numba costs more than the loops save


def quantise(
    values: Tensor,
    format: BlockFormat,  # noqa: A002  the word of the contract
    dialect: Dialect = CANONICAL,
    *,
    amax: Tensor | None = None,
    decode_scale: Tensor | None = None,
    encode_scale: Tensor | None = None,
) -> QuantisedTensor:
    """Quantise values [..., M, K] as `dialect` does; linear scales, low nibble even.

    The tensor scale follows from `amax` (default: of all values), or is given in one direction:
    one number, or one per leading index. It is stored in the direction that the dialect stores.
    """
    _require_records(format, dialect)
    rule = dialect.rule_for(format)
    _require_values(values, rule)
    values = values.detach()  # a Parameter is quantised, not differentiated through
    given = {"amax": amax, "decode_scale": decode_scale, "encode_scale": encode_scale}
    scales = _tensor_scales(values, rule, given)
    if dialect == CANONICAL and format == NVFP4 and _suits_fast_path(values, scales.encode):
        codes, block_scale, _ = fast_nvfp4.quantise_nvfp4(values, scales.encode)
    elif dialect == MODELOPT and format == NVFP4 and _suits_modelopt(values, scales.decode):
        codes, block_scale = fast_modelopt.quantise_modelopt(values, float(scales.decode))
    else:
        codes, block_scale = quantise_definition(values, rule, scales)
    stored = {
        None: None,
        ScaleDirection.DECODE: scales.decode,
        ScaleDirection.ENCODE: scales.encode,
    }[rule.stored_direction]
    return QuantisedTensor(
        codes=codes,
        block_scale=block_scale,
        tensor_scale=stored,
        format=format,
        dialect=dialect,
        layout=LINEAR,
        direction=rule.stored_direction,
        nibble_order=NibbleOrder.LOW_EVEN if format.packed else None,
        shape=tuple(values.shape),
    )


def dequantise(tensor: QuantisedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values [..., M, K] that the codes stand for, as `dtype`."""
    if not isinstance(tensor, QuantisedTensor):
        raise InvalidArgument(
            "tensor to decode",
            type(tensor).__name__,
            "a QuantisedTensor",
            "Say what the bytes are: format, dialect, layout, direction, nibble order, shape.",
        )
    if dtype not in _OUTPUT_DTYPES:
        raise DtypeMismatch(
            "dtype", dtype, "float32, bfloat16, float16 or float64", "Decode, then convert."
        )
    if has_fast_decoder(tensor, dtype):
        scales = tensor.linear_scale_codes().contiguous()
        return fast_nvfp4.dequantise_nvfp4(tensor.codes, scales, tensor.decode_scale, dtype)
    return dequantise_definition(tensor, dtype)


def has_fast_decoder(tensor: QuantisedTensor, dtype: torch.dtype) -> bool:
    """Return whether `dequantise` takes the compiled loop, which is as quick as reading memory."""
    return (
        tensor.format == NVFP4
        and tensor.direction is ScaleDirection.DECODE
        and tensor.nibble_order is NibbleOrder.LOW_EVEN
        and dtype in _FAST_DTYPES
        and _is_large_on_cpu(tensor.codes)
        and tensor.decode_scale.ndim == 0
    )


def quantise_definition(values: Tensor, rule: BlockRule, scales: Scales) -> tuple[Tensor, Tensor]:
    """Return codes, packed where the format packs, and block scales [..., R, C]."""
    x_RrCc = _into_blocks(values, rule.format).float()
    block_scale_RC, scaled_RrCc = _scale_blocks(x_RrCc, scales, rule, values.dtype)
    codes = _from_blocks(_encode_elements(scaled_RrCc, rule), tuple(values.shape))
    if rule.format.packed:
        codes = pack_nibbles(codes)
    return codes, block_scale_RC.contiguous()


def dequantise_definition(tensor: QuantisedTensor, dtype: torch.dtype) -> Tensor:
    """Return element * block scale, then times decode scale or over encode scale, as `dtype`."""
    working = torch.float64 if dtype is torch.float64 else torch.float32
    # [..., R, 1, C, 1]: one scale for the r x c elements of its block.
    scale_R1C1 = tensor.scale_values().to(working)[..., :, None, :, None]
    # In place: the elements were made here, and no other reference exists.
    value_RrCc = _into_blocks(_elements(tensor, working), tensor.format).mul_(scale_R1C1)
    if tensor.tensor_scale is not None:
        # [..., 1, 1, 1, 1]: one number, or one per leading index.
        factor = tensor.tensor_scale.to(working).reshape(*tensor.tensor_scale.shape, 1, 1, 1, 1)
        # Dividing rounds once; the product with a stored reciprocal would round twice.
        decodes = tensor.direction is ScaleDirection.DECODE
        value_RrCc = value_RrCc.mul_(factor) if decodes else value_RrCc.div_(factor)
    return _from_blocks(value_RrCc, tensor.shape).to(dtype)


def _elements(tensor: QuantisedTensor, dtype: torch.dtype) -> Tensor:
    """Return the values [..., M, K] of the element codes, in memory of their own."""
    fmt = tensor.format.element
    if tensor.nibble_order is not None and fmt.bits == 4:
        return decode_pairs(tensor.codes, fmt, tensor.nibble_order, dtype)
    return decode_array(tensor.element_codes(), fmt).to(dtype)


def _is_large_on_cpu(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.numel() >= _FAST_FROM_ELEMENTS
    )


def _suits_fast_path(values: Tensor, encode_scale: Tensor) -> bool:
    return (
        values.dtype in _FAST_DTYPES
        and _is_large_on_cpu(values)
        and encode_scale.ndim == 0
        and bool(encode_scale.isfinite())
        and float(encode_scale) >= float(fast_nvfp4.SMALLEST_ENCODE_SCALE)
    )


def _suits_modelopt(values: Tensor, decode_scale: Tensor) -> bool:
    return (
        values.dtype in _FAST_DTYPES
        and _is_large_on_cpu(values)
        and decode_scale.ndim == 0
        and fast_modelopt.SMALLEST_SCALE <= float(decode_scale) <= fast_modelopt.LARGEST_SCALE
        and math.isfinite(fast_modelopt.largest_magnitude(values))
    )


def _require_records(format: object, dialect: object) -> None:  # noqa: A002
    if not isinstance(format, BlockFormat):
        raise InvalidArgument("format", format, "a BlockFormat", "Look one up: block_format(name).")
    if not isinstance(dialect, Dialect):
        raise InvalidArgument("dialect", dialect, "a Dialect", "Look one up: dialect_named(name).")


def _require_values(values: Tensor, rule: BlockRule) -> None:
    dtype = values.dtype if isinstance(values, torch.Tensor) else type(values).__name__
    if dtype not in _VALUE_DTYPES:
        raise DtypeMismatch(
            "values", dtype, "a tensor of float32, bfloat16 or float16", "Convert on purpose first."
        )
    require_shape(values.shape, rule.format)
    if rule.non_finite is NonFinite.REFUSED and not bool(values.isfinite().all()):
        where = (~values.isfinite()).nonzero()[0].tolist()
        raise InvalidArgument(
            f"values{where}",
            float(values[tuple(where)]),
            "finite numbers: this dialect leaves NaN and infinities undefined",
            "Find their origin, or quantise with a dialect that defines them.",
        )


def _tensor_scales(values: Tensor, rule: BlockRule, given: dict[str, Tensor | None]) -> Scales:
    """Return the tensor scale, given or computed; 1 where the format has none."""
    named = {name: scale for name, scale in given.items() if scale is not None}
    for name, scale in named.items():
        _require_given(name, scale, values)
    # Copies: what is stored follows neither the caller's later writes nor a gradient.
    named = {name: scale.detach().clone() for name, scale in named.items()}
    if len(named) > 1 or (named and rule.tensor_scale is TensorScaleRule.ABSENT):
        raise InvalidArgument(
            " and ".join(named),
            tuple(named),
            "at most one of them" if rule.format.tensor_scale else "none of them",
            "Keep the one that the producer stored."
            if rule.format.tensor_scale
            else f"{rule.format.name} has no tensor scale.",
        )
    for name, scale in named.items():
        if name == "decode_scale":
            return Scales(encode=scale.reciprocal(), decode=scale)
        if name == "encode_scale":
            return Scales(encode=scale, decode=scale.reciprocal())
    largest = named.get("amax")
    if largest is None:
        largest = _tensor_amax(values, rule.non_finite)
    scales = TENSOR_SCALE[rule.tensor_scale](largest, rule.format, values.dtype)
    if not (rule.infinite_scale_defined or bool(scales.encode.isfinite().all())):
        raise InvalidArgument(
            "largest magnitude of the tensor",
            float(largest.min()),
            "so large that its reciprocal is finite: this dialect has no scale for zeros",
            "Pass the scale that its caller used.",
        )
    return scales


def _tensor_amax(values: Tensor, non_finite: NonFinite) -> Tensor:
    """Return the largest magnitude of the whole tensor as float32."""
    ignores_nan = non_finite is NonFinite.SUPPRESSED
    if values.dtype in _FAST_DTYPES and _is_large_on_cpu(values):
        fast = fast_nvfp4 if ignores_nan else fast_modelopt
        return torch.tensor(fast.largest_magnitude(values), dtype=torch.float32)
    return _amax(values.flatten(), 0, non_finite).float()


def _require_given(name: str, scale: Tensor, values: Tensor) -> None:
    dtype = scale.dtype if isinstance(scale, torch.Tensor) else type(scale).__name__
    if dtype is not torch.float32:
        raise DtypeMismatch(
            name,
            dtype,
            "a tensor of torch.float32",
            "Kernels reinterpret its bytes as fp32; convert on purpose.",
        )
    require_scale_extents(name, scale, tuple(values.shape))
    wrong = ~(scale >= 0)  # NaN compares false, and fmin would make a scale of it
    if bool(wrong.any()):
        raise InvalidArgument(
            name,
            float(scale[wrong][0]),
            "a number that is not negative",
            "Look where it came from.",
        )


def _into_blocks(values: Tensor, fmt: BlockFormat) -> Tensor:
    """View [..., M, K] as [..., R, r, C, c]; cut-off blocks are filled up with zeros."""
    *leading, rows, columns = values.shape
    block_rows, block_columns = fmt.block
    high, wide = scale_shape(values.shape, fmt)[-2:]
    # pad counts from the last dimension: columns first, then rows.
    missing = (0, wide * block_columns - columns, 0, high * block_rows - rows)
    if any(missing):
        values = pad(values, missing)
    return values.reshape(*leading, high, block_rows, wide, block_columns)


def _from_blocks(blocks: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Undo _into_blocks."""
    whole = blocks.flatten(-2).flatten(-3, -2)
    return whole[..., : shape[-2], : shape[-1]].contiguous()


def _amax(values: Tensor, dim: int | tuple[int, ...], non_finite: NonFinite) -> Tensor:
    """Return the largest magnitude; NaN is ignored as fmaxf does, or wins, as the policy says."""
    magnitude = values.abs()
    if non_finite is NonFinite.SUPPRESSED:
        magnitude = torch.where(magnitude.isnan(), torch.zeros_like(magnitude), magnitude)
    if magnitude.numel() == 0:
        return magnitude.sum(dim)  # zeros, in the extents that amax would have
    return magnitude.amax(dim)


def _scale_blocks(
    x_RrCc: Tensor, scales: Scales, rule: BlockRule, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the stored block scales [..., R, C] and the scaled values, not rounded yet."""
    amax_RC = _amax(x_RrCc, (-3, -1), rule.non_finite)
    raw_RC = BLOCK_SCALE[rule.block_scale](amax_RC, scales.beside(2), rule, dtype)
    stored_RC, scale_RC = _round_block_scale(raw_RC, amax_RC, rule)
    scale_R1C1 = scale_RC[..., :, None, :, None]
    scaled_RrCc = VALUE[rule.value](x_RrCc, scale_R1C1, scales.beside(4))
    is_dead_RC = {
        Guard.NONE: None,
        Guard.ZERO_AMAX: amax_RC == 0,
        Guard.ZERO_AMAX_AND_SCALE: amax_RC == 0,
        Guard.ZERO_SCALE: scale_RC == 0,
    }[rule.guard]
    if is_dead_RC is not None:
        # x * 0 keeps the sign of a zero, and makes NaN of NaN and infinities.
        scaled_RrCc = torch.where(is_dead_RC[..., :, None, :, None], x_RrCc * 0.0, scaled_RrCc)
    return stored_RC, scaled_RrCc


def _round_block_scale(raw_RC: Tensor, amax_RC: Tensor, rule: BlockRule) -> tuple[Tensor, Tensor]:
    """Round to the scale format; return the stored form and the float32 value of each."""
    if rule.guard is Guard.ZERO_AMAX_AND_SCALE:
        raw_RC = torch.where(amax_RC == 0, torch.zeros_like(raw_RC), raw_RC)
    if rule.zero_scale_before is not None:
        raw_RC = torch.where(raw_RC == 0, rule.zero_scale_before, raw_RC)
    raw_RC = raw_RC.clamp(min=rule.scale_low)
    if rule.format.scale.bits == 32:
        return raw_RC, raw_RC
    code_RC = encode_array(raw_RC, rule.format.scale, rule.scale_rounding)
    if rule.zero_scale_after is not None:
        filler = encode_array(raw_RC.new_tensor([rule.zero_scale_after]), rule.format.scale)
        code_RC = torch.where(code_RC == 0, filler, code_RC)
    return code_RC, decode_array(code_RC, rule.format.scale)


def _encode_elements(scaled: Tensor, rule: BlockRule) -> Tensor:
    """Round to the element format: saturating, NaN to +largest where the format has no NaN."""
    if rule.negative_zero is NegativeZero.DROPPED:
        scaled = torch.where(scaled == 0, torch.zeros_like(scaled), scaled)
    return encode_array(scaled, rule.format.element, rule.element_rounding, nan=NanRule.LARGEST)
