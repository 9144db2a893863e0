"""Decode quantised weights to float64 by lookup tables: the same bits as dequantise, but faster.

A diagnosis decodes one weight about a hundred times, each time with another damage. Within
`remembering` each weight is decoded once, in bounded memory. `Decoding` decodes only what a fault
has changed, and only the rows that are needed.

Shape letters: N rows, K elements, R and C block scales along them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn.functional import embedding

from degarble.harness.formats.codec import decode_array
from degarble.harness.formats.number_formats import NibbleOrder, ScaleDirection
from degarble.harness.formats.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from degarble.harness.formats.number_formats import ElementFormat
    from degarble.harness.formats.quantise import QuantisedTensor

REMEMBERED = 256 << 20  # bytes of decoded weights at most
_RESULTS = 8  # of other work that are remembered

Made = TypeVar("Made")


class _Memory:
    """A bounded cache of decoded weights; the oldest are evicted."""

    def __init__(self) -> None:
        self._held: OrderedDict[int, tuple[Weight, Tensor]] = OrderedDict()
        self._bytes = 0
        self._results: OrderedDict[tuple[int, ...], tuple[Sequence[object], Any]] = OrderedDict()

    def once(self, given: Sequence[object], make: Callable[[], Made]) -> Made:
        """Compute once. Trap: the sources are kept alive, or their ids could be reused."""
        key = tuple(map(id, given))
        known = self._results.pop(key, None) or (given, make())
        self._results[key] = known
        while len(self._results) > _RESULTS:
            self._results.popitem(last=False)
        made: Made = known[1]
        return made

    def numbers(self, weight: Weight) -> Tensor:
        """Decode once. Trap: the weight is kept alive, or its id could be reused."""
        known = self._held.get(id(weight))
        if known is not None:
            self._held.move_to_end(id(weight))
            return known[1]
        values = _decoded(weight)
        self._held[id(weight)] = weight, values
        self._bytes += values.nbytes
        while self._bytes > REMEMBERED and self._held:
            _, (_, oldest) = self._held.popitem(last=False)
            self._bytes -= oldest.nbytes
        return values


_MEMORY: ContextVar[_Memory | None] = ContextVar("decoded", default=None)


@contextmanager
def remembering() -> Iterator[None]:
    """Cache decoded weights within this context; nobody may write into weights meanwhile."""
    if _MEMORY.get() is not None:  # who asks several times about one trouble holds it around them
        yield
        return
    token = _MEMORY.set(_Memory())
    try:
        yield
    finally:
        _MEMORY.reset(token)


def once(given: Sequence[object], make: Callable[[], Made]) -> Made:
    """Cache a value derived from these objects while remembering; callers must not change it."""
    memory = _MEMORY.get()
    return make() if memory is None else memory.once(given, make)


@cache
def _table(element: ElementFormat, order: NibbleOrder | None) -> Tensor:
    """Return what each byte stands for: one element, or two if packed."""
    with torch.inference_mode(mode=False):
        octets = torch.arange(256)
        if order is None:
            return decode_array(octets % element.code_count, element).double()[:, None]
        low, high = octets % 16, octets // 16
        pair = (low, high) if order is NibbleOrder.LOW_EVEN else (high, low)
        return torch.stack([decode_array(each, element).double() for each in pair], dim=-1)


def elements(tensor: QuantisedTensor) -> Tensor:
    """Return the elements [..., N, K] that codes stand for, without any scale."""
    return _elements(tensor, tensor.codes)


def _elements(tensor: QuantisedTensor, codes: Tensor) -> Tensor:
    table = _table(tensor.format.element, tensor.nibble_order)
    pairs: Tensor = embedding(codes.int(), table)
    return pairs.flatten(-2)


def scale_numbers(tensor: QuantisedTensor) -> Tensor:
    """Return block scales [..., R, C] as float32."""
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
    """Return elements times block scales [..., R, C] times the tensor scale."""
    values = elements(tensor) if element is None else element.double()
    high = tensor.format.block[0]
    spread = scales.double()
    if high > 1:
        spread = spread.repeat_interleave(high, -2)[..., : tensor.shape[-2], :]
    values = _scaled(values, spread, tensor.format.block[1])
    return _by_tensor_scale(values, tensor) if tensor_scale else values


def _scaled(values: Tensor, scales_NC: Tensor, wide: int) -> Tensor:
    columns = values.shape[-1]
    if columns % wide:
        return values * scales_NC.repeat_interleave(wide, -1)[..., :columns]
    blocks: Tensor = values.unflatten(-1, (-1, wide)) * scales_NC[..., None]
    return blocks.flatten(-2)


def _by_tensor_scale(values: Tensor, tensor: QuantisedTensor) -> Tensor:
    if tensor.tensor_scale is None:
        return values
    factor = tensor.tensor_scale.double()
    factor = factor.reshape(*factor.shape, *[1] * (values.ndim - factor.ndim))
    return values * factor if tensor.direction is ScaleDirection.DECODE else values / factor


def numbers_of(weight: Weight) -> Tensor:
    """Return the values of any weight, cached while remembering; callers must not change them."""
    if not weight.is_quantised:
        return weight.values(torch.float64)
    memory = _MEMORY.get()
    return _decoded(weight) if memory is None else memory.numbers(weight)


def _decoded(weight: Weight, rows: Tensor | None = None) -> Tensor:
    tensor = weight.quantised()
    scales = scale_numbers(tensor)
    if rows is None:
        return with_scales(tensor, scales)
    high, wide = tensor.format.block
    values = _scaled(_elements(tensor, tensor.codes[rows]), scales[rows // high].double(), wide)
    return _by_tensor_scale(values, tensor)


class Decoding(Mapping[str, Weight]):
    """Weights as numbers: `kept` are unchanged, changed ones are decoded again.

    `rows` are the only rows that are needed, None for all of them.
    """

    def __init__(
        self,
        weights: Mapping[str, Weight],
        kept: Mapping[str, Weight],
        rows: Tensor | None = None,
    ) -> None:
        self._weights = weights
        self._kept = kept
        self._rows = rows

    def __getitem__(self, key: str) -> Weight:
        weight, rows = self._weights[key], self._rows
        if not weight.is_quantised and rows is None:
            return weight
        if weight.is_quantised and weight is not self._kept.get(key):
            value = _decoded(weight, rows)
        else:
            value = numbers_of(weight)
            value = value if rows is None else value[rows]
        return Weight(value=value, input_scale=weight.input_scale)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
