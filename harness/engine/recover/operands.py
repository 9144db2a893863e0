"""Take an operand of a product apart: elements, block scales, a scale of everything.

A weight and a quantised input have the same parts, so that what is recovered of one is recovered of
the other in the same way.

Shape letters: R rows, K columns, B blocks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.faults.weight_faults import (
    by_tensor_scale,
    elements,
    numbers_of,
    scale_numbers,
)
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.layouts import LINEAR
from degarble.harness.formats.number_formats import (
    BLOCK_FORMATS,
    WHOLE,
    NibbleOrder,
    ScaleDirection,
)
from degarble.harness.formats.quantise import QuantisedTensor
from degarble.references.linears import BLOCK_SCALE, CODES, TENSOR_SCALE, X, decode_activations

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.formats.number_formats import BlockFormat
    from degarble.harness.formats.weight import Weight


@dataclass(frozen=True, eq=False)
class StoredOperand:
    """Elements, block scales and a factor of every row; codes are None where there are none."""

    values: Tensor  # [R, K] of float64, without scales
    scales: Tensor  # [R, B] of float64
    factor: Tensor  # [R, 1] of float64, or [1, 1]
    width: int  # of a block
    form: BlockFormat | None = None
    codes: Tensor | None = None  # [R, K]
    scale_codes: Tensor | None = None  # [R, B]; None where scales are stored in float32

    @property
    def numbers(self) -> Tensor:
        """Return the numbers [R, K] as they are multiplied."""
        return self.values * self.spread(self.scales) * self.factor

    def spread(self, scales: Tensor) -> Tensor:
        """Return numbers of blocks for each element."""
        if scales.shape[1] == 1:
            return scales
        return scales.repeat_interleave(self.width, 1)[:, : self.values.shape[1]]

    def of_rows(self, rows: Tensor) -> StoredOperand:
        """Keep some rows."""
        return replace(
            self,
            values=self.values[rows],
            scales=self.scales[rows],
            factor=self.factor[rows] if len(self.factor) > 1 else self.factor,
            codes=None if self.codes is None else self.codes[rows],
            scale_codes=None if self.scale_codes is None else self.scale_codes[rows],
        )

    def of_columns(self, begin: int, end: int) -> StoredOperand:
        """Keep some columns, in whole blocks."""
        blocks = slice(begin // self.width, -(-end // self.width))
        several = self.scales.shape[1] > 1
        return replace(
            self,
            values=self.values[:, begin:end],
            scales=self.scales[:, blocks] if several else self.scales,
            codes=None if self.codes is None else self.codes[:, begin:end],
            scale_codes=None if self.scale_codes is None else self.scale_codes[:, blocks],
        )


def plain(numbers: Tensor) -> StoredOperand:
    """Return numbers as an operand of one block with the scale 1."""
    ones = torch.ones(len(numbers), 1, dtype=torch.float64)
    return StoredOperand(numbers.double(), ones, ones[:1], max(1, numbers.shape[1]))


def operand_of(weight: Weight) -> StoredOperand:
    """Return the parts of a matrix."""
    if not weight.is_quantised:
        return plain(numbers_of(weight))
    tensor = weight.quantised()
    if tensor.zero_point is not None or tensor.group_index is not None:
        return plain(numbers_of(weight))
    return _parts(tensor)


def operand_of_input(inputs: Mapping[str, Tensor], form: str | None) -> StoredOperand:
    """Return the parts of a product's input, leading extents flattened."""
    if CODES not in inputs or form is None:
        x = inputs[X]
        return plain(x.reshape(-1, x.shape[-1]))
    held = BLOCK_FORMATS[form]
    if held.block[1] == WHOLE and inputs[BLOCK_SCALE].shape[-1] > 1:  # one on each of several ranks
        x = decode_activations(inputs, form, torch.float64)
        return plain(x.reshape(-1, x.shape[-1]))
    codes, scales, scale = inputs[CODES], inputs[BLOCK_SCALE], inputs.get(TENSOR_SCALE)
    codes = codes.reshape(-1, codes.shape[-1])
    rows = scale is not None and scale.ndim > 0
    tensor = QuantisedTensor(
        codes=codes,
        block_scale=scales.reshape(-1, scales.shape[-1]),
        tensor_scale=torch.ones(()) if rows else scale,
        format=held,
        dialect=CANONICAL,
        layout=LINEAR,
        direction=None if scale is None else ScaleDirection.DECODE,
        nibble_order=NibbleOrder.LOW_EVEN if held.packed else None,
        shape=(len(codes), codes.shape[-1] * (2 if held.packed else 1)),
    )
    found = _parts(tensor)
    if rows and scale is not None:
        found = replace(found, factor=scale.double().reshape(-1, 1))
    return found


def _parts(tensor: QuantisedTensor) -> StoredOperand:
    high, wide = tensor.format.extents(*tensor.shape[-2:])
    rows = tensor.shape[-2]
    stored = tensor.linear_scale_codes()
    scales = scale_numbers(tensor).double()
    if high > 1:
        scales, stored = (each.repeat_interleave(high, -2)[:rows] for each in (scales, stored))
    factor = by_tensor_scale(torch.ones(1, 1, dtype=torch.float64), tensor)
    return StoredOperand(
        elements(tensor).reshape(rows, -1),
        scales,
        factor.reshape(1, 1),
        wide,
        tensor.format,
        tensor.element_codes().long(),
        None if stored.dtype is torch.float32 else stored.long(),
    )
