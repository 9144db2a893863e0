"""Values of a source and of an output, element by element, decoded apart from the code that wrote.

Owns the decoding that proofs rest on: tables made by the definition of each element format, in
float64, exact up to the tensor scale; nothing of `quantise` or its fast twins. Owns the bounds:
what one rounding to the target's format explains. Everything is read from disk by panels of rows.

Kept honest by the planted faults of suites/checkpoint/convert/.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from degarble.harness.checkpoint.convert.units import TensorProof, Worst
from degarble.harness.formats.codec import decode
from degarble.harness.formats.types import NibbleOrder, ScaleDirection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from degarble.harness.checkpoint.stored import StoredWeight
    from degarble.harness.formats.types import BlockFormat, ElementFormat
    from degarble.harness.formats.weight import Weight

    Bound = Callable[[Tensor, Tensor | None], Tensor]

_PANEL = 1 << 20  # elements: 8 MiB in float64
_ONE_ROUNDING = 2.0**-22  # of products and quotients in float32 on the way
EXACT = "equal"


@lru_cache(maxsize=8)
def table_of(element: ElementFormat) -> Tensor:
    """Return the value of every code, float64, by the definition of the format."""
    values = [decode(code, element) for code in range(element.code_count)]
    return torch.tensor(values, dtype=torch.float64)


def exact_values(record: Weight) -> tuple[Tensor, Tensor | None]:
    """Return values in float64, and the scale that each element is multiplied by."""
    if record.storage is None:
        assert record.value is not None
        return record.value.double(), None
    how, codes, scale = record.storage, record.codes, record.block_scale
    assert codes is not None
    assert scale is not None
    fmt = how.format
    if fmt.packed:
        low, high = codes & 15, codes >> 4
        pair = (low, high) if how.nibble_order is NibbleOrder.LOW_EVEN else (high, low)
        codes = torch.stack(pair, -1).reshape(*codes.shape[:-1], -1)
    step = scale.double() if scale.dtype is torch.float32 else table_of(fmt.scale)[scale.int()]
    if record.tensor_scale is not None:
        factor = record.tensor_scale.double()
        step = step * factor if how.direction is ScaleDirection.DECODE else step / factor
    for axis, block in ((-2, fmt.block[0]), (-1, fmt.block[1])):
        step = step.repeat_interleave(block, axis)
    step = step[..., : codes.shape[-2], : codes.shape[-1]]
    return table_of(fmt.element)[codes.int()] * step, step


def rows_exactly(weight: StoredWeight) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """Yield (first row, values, steps) by panels of 128-row blocks; pages are given back."""
    rows, width = weight.shape
    step = max(1, _PANEL // max(width, 1) // 128) * 128
    for begin in range(0, rows, step):
        yield (begin, *exact_values(weight.rows(begin, min(begin + step, rows))))
        for entry in weight.form.parts.values():
            weight.release(entry)


def stacked_rows(weights: Iterable[StoredWeight]) -> Iterator[Tensor]:
    """Yield the values of several weights, one behind the other, row by row blocks."""
    for weight in weights:
        for _, values, _ in rows_exactly(weight):
            yield values


def bfloat16_bound(source: Tensor, _step: Tensor | None) -> Tensor:
    """Half a unit in the last place of bfloat16 (8 significant bits), after float32 products."""
    exponent = torch.frexp(source).exponent.clamp(min=-125).double()
    return torch.exp2(exponent - 9) + source.abs() * _ONE_ROUNDING


def element_bound(fmt: BlockFormat) -> Bound:
    """Half the distance of neighbouring codes where the value lies, times the scale there."""
    mantissa, lowest = fmt.element.mantissa_bits, fmt.element.min_exponent
    # The top code also takes what the rounding of an E4M3 scale pushes above it, by up to 1/16.

    def bound(source: Tensor, step: Tensor | None) -> Tensor:
        assert step is not None
        exponent = torch.frexp(source / step).exponent.clamp(min=lowest + 1) - 1
        half = torch.exp2((exponent - mantissa - 1).double())
        return half * step + source.abs() * _ONE_ROUNDING

    return bound


def no_bound(source: Tensor, _step: Tensor | None) -> Tensor:
    """Nothing may differ."""
    return torch.zeros_like(source)


class Comparison:
    """Takes panels of both sides in and counts what differs."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
        self.elements = self.different = self.beyond = 0
        self.worst: Worst | None = None
        self._ratio = -1.0
        self._row = 0

    def add(self, source: Tensor, output: Tensor, step: Tensor | None = None) -> None:
        """Compare the next rows; a NaN on both sides is no difference."""
        same = (source == output) | (source.isnan() & output.isnan())
        gap = torch.where(same, 0.0, (output - source).abs().nan_to_num(nan=torch.inf))
        allowed = self._bound(source, step)
        ratio = torch.where(gap == 0, 0.0, gap / allowed.nan_to_num(nan=0.0))
        self.elements += source.numel()
        self.different += int((~same).sum())
        self.beyond += int((ratio > 1).sum())
        largest = float(ratio.max()) if ratio.numel() else 0.0
        if largest > 0 and largest > self._ratio:
            self._ratio, at = largest, int(ratio.argmax())
            row, column = divmod(at, source.shape[-1])
            pair = (float(source.flatten()[at]), float(output.flatten()[at]))
            self.worst = Worst((self._row + row, column), *pair, float(allowed.flatten()[at]))
        self._row += source.shape[0]

    def proof(
        self, tensor: str, sources: tuple[str, ...], bound: str, faults: Iterable[str] = ()
    ) -> TensorProof:
        """Close the comparison."""
        counts = (self.elements, self.different, self.beyond)
        return TensorProof(tensor, sources, *counts, bound, self.worst, tuple(faults))


def compare_rows(
    source: Iterator[Tensor], output: Iterator[tuple[Tensor, Tensor | None]], bound: Bound
) -> tuple[Comparison, list[str]]:
    """Compare two streams of rows that are cut at different places."""
    comparison = Comparison(bound)
    rest: Tensor | None = None
    for values, step in output:
        begin = 0
        while begin < values.shape[0]:
            if rest is None or not rest.shape[0]:
                rest = next(source, None)
            if rest is None:
                return comparison, ["the output has more rows than its source"]
            count = min(rest.shape[0], values.shape[0] - begin)
            cut = slice(begin, begin + count)
            comparison.add(rest[:count], values[cut], None if step is None else step[cut])
            rest, begin = rest[count:], begin + count
    if (rest is not None and rest.shape[0]) or next(source, None) is not None:
        return comparison, ["the source has more rows than the output"]
    return comparison, []
