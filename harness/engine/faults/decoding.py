"""Values of quantised weights in float64, from tables: the same bits as dequantise, sooner.

Owns elements by lookup, values from elements with any block scales, and a view of a component's
weights that decodes what a fault has changed. A diagnosis decodes one weight a hundred times, each
time with another damage, so that nothing can be kept. Kept honest by
suites/engine/faults/test_decoding.py: every format beside dequantise, bit for bit.
Shape letters: N rows, K elements, R and C block scales along them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import embedding

from degarble.harness.formats.arrays import decode_array
from degarble.harness.formats.types import NibbleOrder, ScaleDirection
from degarble.harness.formats.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from degarble.harness.formats.quantised import QuantisedTensor
    from degarble.harness.formats.types import ElementFormat


@cache
def _table(element: ElementFormat, order: NibbleOrder | None) -> Tensor:
    """What every byte stands for: one element, or two."""
    with torch.inference_mode(mode=False):
        octets = torch.arange(256)
        if order is None:
            return decode_array(octets % element.code_count, element).double()[:, None]
        low, high = octets % 16, octets // 16
        pair = (low, high) if order is NibbleOrder.LOW_EVEN else (high, low)
        return torch.stack([decode_array(each, element).double() for each in pair], dim=-1)


def elements(tensor: QuantisedTensor) -> Tensor:
    """The elements [..., N, K] that codes stand for, without any scale."""
    table = _table(tensor.format.element, tensor.nibble_order)
    return embedding(tensor.codes.int(), table).flatten(-2)


def scale_numbers(tensor: QuantisedTensor) -> Tensor:
    """Block scales [..., R, C] as float32 numbers."""
    stored = tensor.linear_scale_codes()
    if stored.dtype is torch.float32:
        return stored
    return embedding(stored.int(), _table(tensor.format.scale, None)).squeeze(-1).float()


def with_scales(
    tensor: QuantisedTensor,
    scales: Tensor,
    element: Tensor | None = None,
    *,
    tensor_scale: bool = True,
) -> Tensor:
    """Values from elements, block scales [..., R, C], and the tensor scale."""
    values = elements(tensor) if element is None else element.double()
    high, wide = tensor.format.block
    rows, columns = tensor.shape[-2:]
    spread = scales.double()
    if high > 1:
        spread = spread.repeat_interleave(high, -2)[..., :rows, :]
    if columns % wide:
        values = values * spread.repeat_interleave(wide, -1)[..., :columns]
    else:
        values = (values.unflatten(-1, (-1, wide)) * spread[..., None]).flatten(-2)
    if not tensor_scale or tensor.tensor_scale is None:
        return values
    factor = tensor.tensor_scale.double()
    factor = factor.reshape(*factor.shape, *[1] * (values.ndim - factor.ndim))
    return values * factor if tensor.direction is ScaleDirection.DECODE else values / factor


def numbers_of(weight: Weight) -> Tensor:
    """The numbers of any weight; not to be written into."""
    if not weight.is_quantised:
        return weight.values(torch.float64)
    tensor = weight.quantised()
    return with_scales(tensor, scale_numbers(tensor))


class Decoding(Mapping[str, Weight]):
    """Weights of which the changed ones arrive as numbers; `kept` are those that nobody changed."""

    def __init__(self, weights: Mapping[str, Weight], kept: Mapping[str, Weight]) -> None:
        self._weights = weights
        self._kept = kept

    def __getitem__(self, key: str) -> Weight:
        weight = self._weights[key]
        if not weight.is_quantised or weight is self._kept.get(key):
            return weight
        return Weight(value=numbers_of(weight), input_scale=weight.input_scale)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
