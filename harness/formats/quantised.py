"""QuantisedTensor: codes and scales together with the six facts needed to read them.

It converts between layouts, directions and nibble orders. Consumers call `require` (one tensor
against what is read) and `require_same` (several tensors against each other), so tensors of
different dialects, layouts, directions, nibble orders or formats are never mixed silently. Every
torch function raises, because arithmetic on bytes means nothing. Contents are not checked: the NaN
scales of a broken checkpoint must be representable, or nobody could report them.

Shape letters: M rows, K elements along the blocks, R and C blocks along M and K, S storage bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from degarble.harness.base.errors import (
    DialectMismatch,
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    Refused,
    ScaleDirectionMismatch,
    ShapeMismatch,
)
from degarble.harness.formats.arrays import decode_array
from degarble.harness.formats.block_formats import codes_shape, scale_shape
from degarble.harness.formats.layouts import LINEAR, from_layout, require_storage, to_layout
from degarble.harness.formats.packing import pack_nibbles, unpack_nibbles
from degarble.harness.formats.types import NibbleOrder, ScaleDirection

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.formats.dialects import Dialect
    from degarble.harness.formats.layouts import ScaleLayout
    from degarble.harness.formats.types import BlockFormat

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
    for tensor in tensors[1:]:
        _require_stackable(first, tensor)
    for tensor in tensors[:-1]:
        if tensor.shape[-2] % first.format.block[0]:
            raise ShapeMismatch(
                f"rows of a {first.format.name} part",
                tensor.shape[-2],
                f"a multiple of {first.format.block[0]}",
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
