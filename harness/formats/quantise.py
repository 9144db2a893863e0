"""Quantise tensors to block formats, hold codes with their facts, and dequantise them.

Shape letters: M rows, K columns, R and C blocks along M and K, r and c inside a block, S storage
bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.nn.functional import pad

from degarble.harness.base.errors import (
    DialectMismatch,
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    Refused,
    ScaleDirectionMismatch,
    ShapeMismatch,
)
from degarble.harness.formats.codec import (
    decode_array,
    decode_pairs,
    encode_array,
    pack_nibbles,
    unpack_nibbles,
)
from degarble.harness.formats.dialects import (
    CANONICAL,
    MODELOPT,
    Dialect,
    Guard,
    NegativeZero,
    NonFinite,
    TensorScaleRule,
)
from degarble.harness.formats.fast import nvfp4 as fast_nvfp4
from degarble.harness.formats.layouts import LINEAR, from_layout, require_storage, to_layout
from degarble.harness.formats.number_formats import (
    NVFP4,
    WHOLE,
    BlockFormat,
    NanRule,
    NibbleOrder,
    ScaleDirection,
    codes_shape,
    require_shape,
    scale_shape,
)
from degarble.harness.formats.scale_rules import BLOCK_SCALE, TENSOR_SCALE, VALUE, TensorScales

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.formats.dialects import BlockRule
    from degarble.harness.formats.layouts import ScaleLayout


# --------------------------------------------------------------------------------------------------
# Codes and scales, together with the six facts needed to read them
#
# Consumers call `require` (one tensor against what is read) and `require_same` (several tensors
# against each other), so tensors of different dialects, layouts, directions, nibble orders or
# formats are never mixed silently. Every torch function raises, because arithmetic on bytes means
# nothing. Contents are not checked: the NaN scales of a broken checkpoint must be representable, or
# nobody could report them.

_ASPECTS: dict[str, tuple[type[Refused], str]] = {
    "format": (DtypeMismatch, "Decode with one format and quantise with the other."),
    "dialect": (DialectMismatch, "Decode and quantise again, or name the aspect in `but`."),
    "layout": (LayoutMismatch, "Convert with with_layout()."),
    "direction": (ScaleDirectionMismatch, "Convert with with_direction()."),
    "nibble_order": (LayoutMismatch, "Convert with with_nibble_order()."),
}


@dataclass(frozen=True, eq=False, repr=False)
class QuantisedTensor:
    """Codes and scales of a logical tensor [..., M, K], with everything needed to read them.

    codes         uint8: [..., M, K], or [..., M, K/2] where two codes share a byte
    block_scale   linear: [..., R, C], uint8 codes or float32; another layout: uint8 [..., S]
    tensor_scale  float32, one number or one per leading index; None where the format has none
    zero_point    float32 [..., R, C], the element that stands for 0; None where the format has none
    group_index   int32 [K], the block of each column where columns are not in order (act-order)
    direction     of tensor_scale, None with it; nibble_order is None for unpacked formats
    """

    codes: Tensor
    block_scale: Tensor
    tensor_scale: Tensor | None
    format: BlockFormat
    dialect: Dialect
    layout: ScaleLayout
    direction: ScaleDirection | None
    nibble_order: NibbleOrder | None
    shape: tuple[int, ...]
    zero_point: Tensor | None = None
    group_index: Tensor | None = None

    def __repr__(self) -> str:
        facts = (self.dialect.name, self.layout.name, self.direction, self.nibble_order)
        shown = ", ".join(str(fact) for fact in facts if fact is not None)
        return f"QuantisedTensor({self.format.name} {self.shape}, {shown})"

    # Every construction is checked, `replace` in the conversions below included.
    def __post_init__(self) -> None:
        self.dialect.rule_for(self.format)
        _require_tensor("codes", self.codes, torch.uint8)
        _require_extents("codes", self.codes, codes_shape(self.shape, self.format))
        self._check_block_scale()
        self._check_tensor_scale()
        self._check_zero_point()
        self._check_group_index()
        if (self.nibble_order is not None) != self.format.packed:
            raise InvalidArgument(
                "nibble_order",
                self.nibble_order,
                "a NibbleOrder" if self.format.packed else "None",
                f"{self.format.name} {'packs' if self.format.packed else 'does not pack'} codes.",
            )

    def _check_block_scale(self) -> None:
        extents = scale_shape(self.shape, self.format)
        stored_as_float = self.format.scale.bits == 32
        _require_tensor(
            "block_scale", self.block_scale, torch.float32 if stored_as_float else torch.uint8
        )
        if self.layout == LINEAR:
            _require_extents("block_scale", self.block_scale, extents)
            return
        if stored_as_float:
            raise LayoutMismatch(
                f"layout of {self.format.name} scales",
                self.layout.name,
                "linear",
                "Swizzled layouts hold one byte a scale; float32 scales stay row-major.",
            )
        # A swizzled matrix is one run of bytes: [..., R, C] becomes [..., S].
        *leading, rows, columns = extents
        require_storage(self.block_scale, self.layout, rows, columns)
        _require_extents(
            "block_scale", self.block_scale, (*leading, self.layout.storage_size(rows, columns))
        )

    def _check_tensor_scale(self) -> None:
        has_scale = self.tensor_scale is not None
        if has_scale != self.format.tensor_scale or has_scale != (self.direction is not None):
            raise ScaleDirectionMismatch(
                "tensor_scale and direction",
                (type(self.tensor_scale).__name__, self.direction),
                "a float32 scale with its direction"
                if self.format.tensor_scale
                else f"None and None: {self.format.name} has no tensor scale",
                "Say whether the stored scale decodes (multiplies codes) or encodes.",
            )
        if self.tensor_scale is None:
            return
        _require_tensor("tensor_scale", self.tensor_scale, torch.float32)
        require_scale_extents("tensor_scale", self.tensor_scale, self.shape)

    def _check_zero_point(self) -> None:
        if (self.zero_point is not None) != self.format.zero_point:
            raise InvalidArgument(
                f"zero_point of a {self.format.name} tensor",
                type(self.zero_point).__name__,
                "float32 zero points" if self.format.zero_point else "None",
                "Take the format that has zero points where they are stored; 0 is not assumed.",
            )
        if self.zero_point is not None:
            _require_tensor("zero_point", self.zero_point, torch.float32)
            _require_extents("zero_point", self.zero_point, scale_shape(self.shape, self.format))

    def _check_group_index(self) -> None:
        index = self.group_index
        if index is None:
            return
        _require_tensor("group_index", index, torch.int32)
        _require_extents("group_index", index, self.shape[-1:])
        groups = scale_shape(self.shape, self.format)[-1]
        wrong = (index < 0) | (index >= groups)
        if bool(wrong.any()):
            raise InvalidArgument(
                f"group_index of column {int(wrong.nonzero()[0])}",
                int(index[wrong][0]),
                f"a block from 0 to {groups - 1}",
                "Check that scales and group index are of one module.",
            )

    @property
    def decode_scale(self) -> Tensor:
        """Return the tensor scale as a factor of codes; 1 where the format has none."""
        return self._scale_toward(ScaleDirection.DECODE)

    @property
    def encode_scale(self) -> Tensor:
        """Return the tensor scale as a factor of inputs; 1 where the format has none."""
        return self._scale_toward(ScaleDirection.ENCODE)

    def _scale_toward(self, direction: ScaleDirection) -> Tensor:
        if self.tensor_scale is None:
            return torch.ones((), dtype=torch.float32, device=self.codes.device)
        return self.tensor_scale if self.direction is direction else self.tensor_scale.reciprocal()

    def with_layout(self, layout: ScaleLayout) -> QuantisedTensor:
        """Move the block scales into another layout; padding becomes zero."""
        if layout == self.layout:
            return self
        linear = self.linear_scale_codes()
        moved = linear if layout == LINEAR else to_layout(linear, layout)
        return replace(self, block_scale=moved, layout=layout)

    def with_direction(self, direction: ScaleDirection) -> QuantisedTensor:
        """Store the tensor scale the other way round: its reciprocal, rounded once to float32."""
        if direction is self.direction:
            return self
        if self.tensor_scale is None:
            raise ScaleDirectionMismatch(
                f"direction of a {self.format.name} tensor",
                direction,
                "none: the format has no tensor scale",
                "Leave the tensor as it is.",
            )
        return replace(self, tensor_scale=self._scale_toward(direction), direction=direction)

    def with_nibble_order(self, order: NibbleOrder) -> QuantisedTensor:
        """Swap the halves of every byte, if `order` asks for it."""
        if order is self.nibble_order:
            return self
        return replace(self, codes=pack_nibbles(self.element_codes(), order), nibble_order=order)

    def rows(self, part: slice) -> QuantisedTensor | None:
        """Return a part of the first axis; None where it would cut blocks."""
        if len(self.shape) < 2:
            return None
        begin, end, _ = part.indices(self.shape[0])
        blocks, scale = slice(begin, end), self.tensor_scale
        held = self
        if len(self.shape) == 2:
            high, _ = self.format.extents(*self.shape)
            if begin % high or (end % high and end < self.shape[0]):
                return None
            blocks, held = slice(begin // high, -(-end // high)), self.with_layout(LINEAR)
        return replace(
            held,
            codes=held.codes[begin:end],
            block_scale=held.block_scale[blocks],
            tensor_scale=scale[begin:end] if scale is not None and scale.ndim else scale,
            zero_point=None if held.zero_point is None else held.zero_point[blocks],
            shape=(end - begin, *self.shape[1:]),
        )

    def element_codes(self) -> Tensor:
        """Return one code a byte, [..., M, K]."""
        if self.nibble_order is None:
            return self.codes
        return unpack_nibbles(self.codes, self.nibble_order)

    def linear_scale_codes(self) -> Tensor:
        """Return block scales [..., R, C] as stored numbers: uint8 codes, or float32 values."""
        if self.layout == LINEAR:
            return self.block_scale
        rows, columns = scale_shape(self.shape, self.format)[-2:]
        return from_layout(self.block_scale, self.layout, rows, columns)

    def scale_values(self) -> Tensor:
        """Return block scales [..., R, C] as float32 values."""
        stored = self.linear_scale_codes()
        return stored if stored.dtype is torch.float32 else decode_array(stored, self.format.scale)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """Raise for every torch function: adding bytes of two dialects would give some result."""
        del types, args, kwargs
        raise InvalidArgument(
            "argument of a torch function",
            getattr(func, "__name__", func),
            "a tensor of values",
            "Decode with dequantise() first, or name the field you mean.",
        )


def require(
    tensor: QuantisedTensor,
    *,
    format: BlockFormat | None = None,  # noqa: A002  the field's own name
    dialect: Dialect | None = None,
    layout: ScaleLayout | None = None,
    direction: ScaleDirection | None = None,
    nibble_order: NibbleOrder | None = None,
) -> None:
    """Raise if a tensor differs from what the consumer reads; None means any."""
    _require_quantised("tensor", tensor)
    expected = {
        "format": format,
        "dialect": dialect,
        "layout": layout,
        "direction": direction,
        "nibble_order": nibble_order,
    }
    for aspect, value in expected.items():
        if value is not None:
            _require_aspect(aspect, tensor, value)


def require_same(*tensors: QuantisedTensor, but: tuple[str, ...] = ()) -> None:
    """Raise if tensors differ in an aspect that `but` does not name, or if one is a bare tensor."""
    for position, tensor in enumerate(tensors):
        _require_quantised(f"argument {position}", tensor)
    unknown = set(but) - set(_ASPECTS)
    if unknown:
        raise InvalidArgument(
            "but", sorted(unknown), f"names among {', '.join(_ASPECTS)}", "Name an aspect."
        )
    for tensor in tensors[1:]:
        for aspect in _ASPECTS:
            if aspect not in but:
                _require_aspect(aspect, tensor, getattr(tensors[0], aspect))


def concatenate_rows(*tensors: QuantisedTensor) -> QuantisedTensor:
    """Stack quantised matrices along M, as fused projections do; all facts and scales must agree.

    Scales of 128-row blocks can only be stacked where every block but the last is whole.
    """
    if not tensors:
        raise InvalidArgument("tensors", (), "at least one", "Pass the parts in order.")
    require_same(*tensors)
    first = tensors[0]
    zero_points = [tensor.zero_point for tensor in tensors if tensor.zero_point is not None]
    for tensor in tensors[1:]:
        _require_stackable(first, tensor)
    for tensor in tensors[:-1]:
        if first.format.block[0] == WHOLE or tensor.shape[-2] % first.format.block[0]:
            raise ShapeMismatch(
                f"rows of a {first.format.name} part",
                tensor.shape[-2],
                f"a multiple of {first.format.block[0] or 'no number: one scale has all rows'}",
                "Decode, concatenate and quantise again.",
            )
    linear = torch.cat([tensor.linear_scale_codes() for tensor in tensors], dim=-2)
    rows = sum(tensor.shape[-2] for tensor in tensors)
    return replace(
        first,
        codes=torch.cat([tensor.codes for tensor in tensors], dim=-2),
        block_scale=linear,
        layout=LINEAR,
        shape=(*first.shape[:-2], rows, first.shape[-1]),
        zero_point=torch.cat(zero_points, dim=-2) if zero_points else None,
    ).with_layout(first.layout)


def require_scale_extents(name: str, scale: Tensor, shape: tuple[int, ...]) -> None:
    """Raise if a tensor scale is neither one number nor one per leading index of `shape`."""
    if tuple(scale.shape) != shape[: scale.ndim] or scale.ndim > len(shape) - 2:
        raise ShapeMismatch(
            f"{name} of a tensor {shape}",
            tuple(scale.shape),
            f"() or the leading extents of {shape[:-2]}",
            "Reshape on purpose; a scale is never broadcast silently.",
        )


def _require_stackable(first: QuantisedTensor, tensor: QuantisedTensor) -> None:
    if first.shape[:-2] != tensor.shape[:-2] or first.shape[-1] != tensor.shape[-1]:
        raise ShapeMismatch(
            "shape of a part",
            tensor.shape,
            f"{first.shape} apart from M",
            "Only rows can be stacked.",
        )
    mine, other = first.group_index, tensor.group_index
    both = mine is not None and other is not None and torch.equal(mine, other)
    if mine is not other and not both:
        raise InvalidArgument(
            "group_index of a part",
            "another order of columns",
            "that of the first part",
            "Decode, concatenate and quantise again.",
        )
    if first.tensor_scale is not None and tensor.tensor_scale is not None:
        bits = (first.tensor_scale.view(torch.int32), tensor.tensor_scale.view(torch.int32))
        if not torch.equal(*bits):
            raise InvalidArgument(
                "tensor_scale of a part",
                tensor.tensor_scale.tolist(),
                f"{first.tensor_scale.tolist()}, the scale of the first part",
                "Quantise the parts with one common scale (the larger amax).",
            )


def _require_aspect(aspect: str, tensor: QuantisedTensor, expected: object) -> None:
    found = getattr(tensor, aspect)
    if found == expected:
        return
    error, remedy = _ASPECTS[aspect]
    name, wanted = (getattr(item, "name", item) for item in (found, expected))
    raise error(f"{aspect} of a quantised tensor", name, str(wanted), remedy)


def _require_quantised(name: str, tensor: object) -> None:
    if not isinstance(tensor, QuantisedTensor):
        raise InvalidArgument(
            name,
            type(tensor).__name__,
            "a QuantisedTensor",
            "Say what the bytes are: format, dialect, layout, direction, nibble order, shape.",
        )


def _require_tensor(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype is not dtype:
        raise DtypeMismatch(
            name,
            getattr(tensor, "dtype", type(tensor).__name__),
            str(dtype),
            "Reinterpret 8-bit codes with view(torch.uint8); never cast numerically.",
        )


def _require_extents(name: str, tensor: Tensor, extents: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != extents:
        raise ShapeMismatch(
            name,
            tuple(tensor.shape),
            str(extents),
            "Check the logical shape, the packing and the layout that were named.",
        )


# --------------------------------------------------------------------------------------------------
# Quantise and dequantise, as the facts of a dialect say
#
# Every step is one float32 operation, rounded to nearest even, in the order of the dialect's
# record; nothing is fused. The value of a code is element * block scale (exact, unless the scale is
# fp32), then one float32 multiply by a decode scale or divide by an encode scale, then one rounding
# to the output dtype. In float64 all of it is exact, apart from a division by an encode scale.
# Large NVFP4 tensors on the CPU take the compiled loops where their dialect has them
# (harness.formats.fast), bit for bit.
#
# NVFP4 and MX need K in whole blocks; only 128x128 may be ragged. NaN, infinities and zero tensors
# follow the record; where a producer leaves them undefined they raise. Approximate reciprocals of a
# device are modelled by correctly rounded ones, and the dialect records bit_exact=False.

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

    >>> import torch
    >>> from degarble import NVFP4, quantise
    >>> quantise(torch.ones(2, 16), NVFP4)
    QuantisedTensor(NVFP4 (2, 16), canonical, linear, decode, low_even)
    """
    _require_records(format, dialect)
    rule = dialect.rule_for(format)
    _require_values(values, rule)
    values = values.detach()  # a Parameter is quantised, not differentiated through
    given = {"amax": amax, "decode_scale": decode_scale, "encode_scale": encode_scale}
    scales = _tensor_scales(values, rule, given)
    zero_point = None
    if format.zero_point:
        codes, block_scale, zero_point = _quantise_affine(values, rule, scales)
    elif dialect == CANONICAL and format == NVFP4 and _suits_fast_path(values, scales.encode):
        codes, block_scale, _ = fast_nvfp4.quantise_nvfp4(values, scales.encode)
    elif dialect == MODELOPT and format == NVFP4 and _suits_modelopt(values, scales.decode):
        codes, block_scale = fast_nvfp4.quantise_modelopt(values, float(scales.decode))
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
        zero_point=zero_point,
    )


def dequantise(tensor: QuantisedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values [..., M, K] that the codes stand for, as `dtype`.

    >>> import torch
    >>> from degarble import NVFP4, dequantise, quantise
    >>> dequantise(quantise(torch.tensor([[0.1] * 8 + [1.2] * 8]), NVFP4)).unique().tolist()
    [0.10000000149011612, 1.2000000476837158]
    """
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
    if dtype is torch.float64 and has_fast_decoder(tensor, torch.float32):
        scales = tensor.linear_scale_codes().contiguous()
        assert tensor.tensor_scale is not None, "NVFP4 has one"
        return fast_nvfp4.dequantise_nvfp4_wide(tensor.codes, scales, tensor.tensor_scale)
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


def quantise_definition(
    values: Tensor, rule: BlockRule, scales: TensorScales
) -> tuple[Tensor, Tensor]:
    """Return codes, packed where the format packs, and block scales [..., R, C]."""
    x_RrCc = _into_blocks(values, rule.format).float()
    block_scale_RC, scaled_RrCc = _scale_blocks(x_RrCc, scales, rule, values.dtype)
    codes = _from_blocks(_encode_elements(scaled_RrCc, rule), tuple(values.shape))
    if rule.format.packed:
        codes = pack_nibbles(codes)
    return codes, block_scale_RC.contiguous()


def _quantise_affine(
    values: Tensor, rule: BlockRule, scales: TensorScales
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and zero points of blocks whose range, with 0 in it, fills the codes."""
    x_RrCc = _into_blocks(values, rule.format).float()
    low_RC = -_amax(x_RrCc.clamp(max=0), (-3, -1), rule.non_finite)
    range_RC = _amax(x_RrCc.clamp(min=0), (-3, -1), rule.non_finite) - low_RC
    raw_RC = BLOCK_SCALE[rule.block_scale](range_RC, scales.for_blocks(2), rule, values.dtype)
    stored_RC, scale_RC = _round_block_scale(raw_RC, range_RC, rule)
    zero_RC = (-low_RC / scale_RC).round().clamp(0, rule.format.element.largest)
    scale_R1C1, zero_R1C1 = (each[..., :, None, :, None] for each in (scale_RC, zero_RC))
    shifted_RrCc = VALUE[rule.value](x_RrCc, scale_R1C1, scales).round() + zero_R1C1
    elements = shifted_RrCc.clamp(0, rule.format.element.largest)
    codes = _from_blocks(_encode_elements(elements, rule), tuple(values.shape))
    if rule.format.packed:
        codes = pack_nibbles(codes)
    return codes, stored_RC.contiguous(), zero_RC.contiguous()


def dequantise_definition(tensor: QuantisedTensor, dtype: torch.dtype) -> Tensor:
    """Return element * block scale, then times decode scale or over encode scale, as `dtype`.

    Of an element its zero point is subtracted first, which is exact for integers.
    """
    working = torch.float64 if dtype is torch.float64 else torch.float32
    if tensor.zero_point is not None or tensor.group_index is not None:
        return _dequantise_affine(tensor, working).to(dtype)
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


def spread_blocks(tensor: QuantisedTensor, number_RC: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return one number for each element [..., M, K], of all rows or of the chosen ones."""
    count, columns = tensor.shape[-2:]
    high, wide = tensor.format.extents(count, columns)
    device = number_RC.device
    row_M = torch.arange(count, device=device) if rows is None else rows
    block_K = tensor.group_index
    if block_K is None:
        block_K = torch.arange(columns, device=device) // wide
    return number_RC[..., row_M // high, :][..., block_K.long()]


def _dequantise_affine(tensor: QuantisedTensor, dtype: torch.dtype) -> Tensor:
    """Return (element - zero point) * block scale, each column's block by its index."""
    value_MK = _elements(tensor, dtype)
    if tensor.zero_point is not None:
        value_MK = value_MK.sub_(spread_blocks(tensor, tensor.zero_point.to(dtype)))
    return value_MK.mul_(spread_blocks(tensor, tensor.scale_values().to(dtype)))


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
        and fast_nvfp4.SMALLEST_SCALE <= float(decode_scale) <= fast_nvfp4.LARGEST_SCALE
        and math.isfinite(fast_nvfp4.largest_magnitude_or_nan(values))
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


def _tensor_scales(
    values: Tensor, rule: BlockRule, given: dict[str, Tensor | None]
) -> TensorScales:
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
            return TensorScales(encode=scale.reciprocal(), decode=scale)
        if name == "encode_scale":
            return TensorScales(encode=scale, decode=scale.reciprocal())
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
        largest = (
            fast_nvfp4.largest_magnitude if ignores_nan else fast_nvfp4.largest_magnitude_or_nan
        )
        return torch.tensor(largest(values), dtype=torch.float32)
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
    block_rows, block_columns = fmt.extents(rows, columns)
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
    x_RrCc: Tensor, scales: TensorScales, rule: BlockRule, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the stored block scales [..., R, C] and the scaled values, not rounded yet."""
    amax_RC = _amax(x_RrCc, (-3, -1), rule.non_finite)
    raw_RC = BLOCK_SCALE[rule.block_scale](amax_RC, scales.for_blocks(2), rule, dtype)
    stored_RC, scale_RC = _round_block_scale(raw_RC, amax_RC, rule)
    scale_R1C1 = scale_RC[..., :, None, :, None]
    scaled_RrCc = VALUE[rule.value](x_RrCc, scale_R1C1, scales.for_blocks(4))
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
