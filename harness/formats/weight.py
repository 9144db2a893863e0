"""Weight: one parameter as a component receives it, either plain values or codes with their scales.

Checkpoints produce it, references and kernels read it, and `--patch` files replace it as a whole or
by field. `storage` says how its codes are to be read, so a field can be exchanged without changing
how the others are read; fields that do not fit together raise when they are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.formats.number_formats import E4M3
from degarble.harness.formats.quantise import QuantisedTensor, dequantise, spread_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.harness.formats.dialects import Dialect
    from degarble.harness.formats.layouts import ScaleLayout
    from degarble.harness.formats.number_formats import BlockFormat, NibbleOrder, ScaleDirection

_SMALL = 1 << 17  # elements of a weight that is decoded whole, once, when a part is asked for


@dataclass(frozen=True)
class WeightEncoding:
    """How codes and scales are read."""

    format: BlockFormat
    dialect: Dialect
    layout: ScaleLayout
    direction: ScaleDirection | None
    nibble_order: NibbleOrder | None
    shape: tuple[int, ...]


class _Decoded(NamedTuple):
    """Values, and everything that they were decoded from."""

    parts: tuple[Tensor, ...]
    versions: tuple[int, ...]
    storage: WeightEncoding | None
    values: Tensor
    version: int


@dataclass(eq=False, repr=False)
class Weight:
    """Either `value`, or `codes`, `block_scale` and `tensor_scale` read by `storage`.

    `input_scale` is the decode scale of the activations in front of it, where a checkpoint has one;
    of stacked experts, one an expert. `channel_scale` holds factors of these activations [K], which
    are multiplied before they are quantised; the weight's values include them, so that they are
    what a plain input is multiplied by. `without_factors` is the weight for one that has them.
    `from_codes` says that a value was decoded. `zero_point` and `group_index` are those of
    QuantisedTensor.

    >>> import torch
    >>> from degarble import NVFP4, Weight, quantise
    >>> Weight.of(quantise(torch.ones(2, 16), NVFP4)).values(torch.bfloat16).shape
    torch.Size([2, 16])
    """

    value: Tensor | None = None
    codes: Tensor | None = None
    block_scale: Tensor | None = None
    tensor_scale: Tensor | None = None
    input_scale: Tensor | None = None
    storage: WeightEncoding | None = None
    zero_point: Tensor | None = None
    group_index: Tensor | None = None
    channel_scale: Tensor | None = None
    from_codes: bool = field(default=False, kw_only=True)
    _decoded: dict[torch.dtype, _Decoded] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, tensor: QuantisedTensor, input_scale: Tensor | None = None) -> Weight:
        """Make a weight from a quantised tensor, split into replaceable fields."""
        storage = WeightEncoding(
            tensor.format,
            tensor.dialect,
            tensor.layout,
            tensor.direction,
            tensor.nibble_order,
            tensor.shape,
        )
        return cls(
            codes=tensor.codes,
            block_scale=tensor.block_scale,
            tensor_scale=tensor.tensor_scale,
            input_scale=input_scale,
            storage=storage,
            zero_point=tensor.zero_point,
            group_index=tensor.group_index,
        )

    def __repr__(self) -> str:
        form = "derived" if self.storage is None else self.storage.format.name
        if self.value is not None:
            form = str(self.value.dtype).removeprefix("torch.")
        parts = ("input_scale", "zero_point", "group_index", "channel_scale")
        more = "".join(f", {part}" for part in parts if getattr(self, part) is not None)
        shape = "empty" if form == "derived" and type(self) is Weight else self.shape
        return f"{type(self).__name__}({form} {shape}{more})"

    @property
    def is_quantised(self) -> bool:
        """Return whether it holds codes instead of values."""
        return self.storage is not None

    @property
    def is_decoded(self) -> bool:
        """Return whether its values are decoded from codes, its own or those of others."""
        return self.is_quantised or self.from_codes

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the logical extents."""
        if self.storage is not None:
            return self.storage.shape
        return tuple(self._plain().shape)

    def quantised(self) -> QuantisedTensor:
        """Return codes and scales as one checked tensor."""
        if self.storage is None or self.codes is None or self.block_scale is None:
            raise InvalidArgument(
                "weight", "without codes", "codes, block_scale and storage", "Read `value` instead."
            )
        encoding = self.storage
        return QuantisedTensor(
            codes=self.codes,
            block_scale=self.block_scale,
            tensor_scale=self.tensor_scale,
            format=encoding.format,
            dialect=encoding.dialect,
            layout=encoding.layout,
            direction=encoding.direction,
            nibble_order=encoding.nibble_order,
            shape=encoding.shape,
            zero_point=self.zero_point,
            group_index=self.group_index,
        )

    def without_factors(self) -> Weight:
        """Return the weight by which an input is multiplied that has its factors already."""
        return replace(self, channel_scale=None, _decoded={})

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the values in `dtype`; decoded once while no field changes."""
        plain = self.storage is None and self.channel_scale is None
        if plain and self.value is not None and self.value.dtype is dtype:
            return self.value
        parts = self._parts()
        if any(part.is_inference() for part in parts):
            return self._decode(dtype)  # no version counter would tell of a change
        # Trap: a patch may write into a tensor: its version changes, its identity does not.
        versions = tuple(part._version for part in parts)  # noqa: SLF001
        known = self._decoded.get(dtype)
        if (
            known is not None
            and known.versions == versions
            and known.storage == self.storage
            and known.values._version == known.version  # noqa: SLF001  not written to since
            and _same(known.parts, parts)
        ):
            return known.values
        values = self._decode(dtype)
        version = 0 if values.is_inference() else values._version  # noqa: SLF001
        if not values.is_inference():
            self._decoded[dtype] = _Decoded(parts, versions, self.storage, values, version)
        return values

    def _parts(self) -> tuple[Tensor, ...]:
        scales = (self.block_scale, self.tensor_scale, self.zero_point, self.group_index)
        fields = (self.value, self.codes, *scales, self.channel_scale)
        return tuple(part for part in fields if part is not None)

    def rows(self, part: slice, dtype: torch.dtype) -> Tensor:
        """Return the values of a part of the first axis; decode no others of a large weight."""
        if self.storage is None:
            return self._as_multiplied(self._plain()[part], dtype)
        if math.prod(self.storage.shape) <= _SMALL and self._is_remembered():
            return self.values(dtype)[part]
        cut = self.quantised().rows(part)
        return self.values(dtype)[part] if cut is None else self._as_multiplied(cut, dtype)

    def _is_remembered(self) -> bool:
        """Tell whether decoded values are kept; see `values`."""
        inside = torch.is_inference_mode_enabled()
        return not inside and not any(part.is_inference() for part in self._parts())

    def elements(self, part: slice) -> tuple[Tensor, Tensor] | None:
        """Return what codes of FP8 stand for in a part of the first axis, and the scale of each.

        None of every other format.
        """
        if self.storage is None or self.storage.format.element is not E4M3:
            return None
        cut = self.quantised().rows(part)
        if cut is None or cut.tensor_scale is not None or self.channel_scale is not None:
            return None
        numbers = cut.codes.view(torch.float8_e4m3fn).float()
        return numbers, spread_blocks(cut, cut.scale_values())

    def _decode(self, dtype: torch.dtype) -> Tensor:
        held = self._plain() if self.storage is None else self.quantised()
        return self._as_multiplied(held, dtype)

    def _as_multiplied(self, held: Tensor | QuantisedTensor, dtype: torch.dtype) -> Tensor:
        # A narrow dtype gets the rounded product with factors, not the product of rounded numbers.
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        inner = dtype if self.channel_scale is None else wide
        values = held.to(inner) if isinstance(held, torch.Tensor) else dequantise(held, inner)
        if self.channel_scale is None:
            return values
        return (values * self.channel_scale.to(wide)).to(dtype)

    def _plain(self) -> Tensor:
        if self.value is None:
            raise InvalidArgument(
                "weight", "empty", "either value or codes with storage", "Fill one of the two."
            )
        return self.value


@dataclass(eq=False, repr=False)
class DerivedWeight(Weight):
    """A weight whose values follow from others: stacked, joined, transposed.

    `make` computes them in a dtype, `make_rows` a part of the first axis, where it can, and
    `make_elements` what `elements` returns of it;
    `from_codes` says whether any of the others is quantised.
    """

    make: Callable[[torch.dtype], Tensor] = field(kw_only=True)
    extents: tuple[int, ...] = field(kw_only=True)
    make_rows: Callable[[slice, torch.dtype], Tensor] | None = field(default=None, kw_only=True)
    make_elements: Callable[[slice], tuple[Tensor, Tensor] | None] = field(
        default=lambda _part: None, kw_only=True
    )

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the logical extents."""
        return self.extents

    def rows(self, part: slice, dtype: torch.dtype) -> Tensor:
        """Return the values of a part of the first axis."""
        if self.make_rows is None:
            return self.values(dtype)[part]
        return self.make_rows(part, dtype)

    def elements(self, part: slice) -> tuple[Tensor, Tensor] | None:
        """Return what codes of FP8 stand for in a part of the first axis, and the scale of each."""
        return self.make_elements(part)

    def _decode(self, dtype: torch.dtype) -> Tensor:
        # Values made in inference mode would not be kept.
        with torch.inference_mode(mode=False):
            return self.make(dtype)


def _same(before: tuple[Tensor, ...], now: tuple[Tensor, ...]) -> bool:
    """Return whether these are the very tensors; a new one may lie where an old one was."""
    return len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))
