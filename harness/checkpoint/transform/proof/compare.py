"""Compare source and output values element by element, with a decoder of its own.

Decoding uses tables made from the definition of each element format, in float64, exact up to the
tensor scale. It shares nothing with `quantise` or its fast twins. All data are read from disk by
panels of rows. The loops are compiled; `defined_values` and `Bound.allowed` define their results.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.checkpoint.transform.proof.bounds import Steps
from degarble.harness.checkpoint.transform.units import TensorProof, Worst
from degarble.harness.formats.codec import decode
from degarble.harness.formats.spare_memory import empty_tensor
from degarble.harness.formats.types import NibbleOrder, ScaleDirection

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from degarble.harness.checkpoint.transform.proof.bounds import Bound
    from degarble.harness.checkpoint.view.stored import StoredWeight
    from degarble.harness.formats.types import ElementFormat
    from degarble.harness.formats.weight import Weight

PANEL = 1 << 19  # elements: 4 MiB in float64, large enough to be taken from spare memory
EXACT = "equal"
# For values without scales: one block that covers any matrix.
_ONE_STEP = Steps(torch.ones(1, 1, dtype=torch.float64), (1 << 62, 1 << 62))


@lru_cache(maxsize=8)
def table_of(element: ElementFormat) -> Tensor:
    """Return the value of every code, float64, by the definition of the format."""
    values = [decode(code, element) for code in range(element.code_count)]
    return torch.tensor(values, dtype=torch.float64)


@lru_cache(maxsize=8)
def pairs_of(element: ElementFormat, order: NibbleOrder) -> Tensor:
    """Return both values of every byte of packed codes [256, 2], the even column's first."""
    byte = torch.arange(256)
    low, high = table_of(element)[byte & 15], table_of(element)[byte >> 4]
    return torch.stack((low, high) if order is NibbleOrder.LOW_EVEN else (high, low), -1)


def _loops() -> Any:
    from degarble.harness.checkpoint.transform.proof import loops as proof_loops  # noqa: PLC0415  imports numba

    return proof_loops


def steps_of(record: Weight) -> Steps | None:
    """Return the decode scales of a matrix, times its tensor scale; None for plain values."""
    if record.storage is None:
        return None
    how, scale = record.storage, record.block_scale
    assert scale is not None
    fmt = how.format
    if scale.dtype is torch.float32:
        step = scale.double()
    else:
        table = table_of(fmt.scale).numpy()
        step = torch.from_numpy(table.take(scale.numpy()))
    if record.tensor_scale is not None:
        factor = record.tensor_scale.double()
        step = step * factor if how.direction is ScaleDirection.DECODE else step / factor
    return Steps(step, fmt.block)


def exact_values(record: Weight, memory: Tensor | None = None) -> tuple[Tensor, Steps | None]:
    """Return values [R, C] in float64, and the scale of each block.

    `memory`: where the values may be written; fresh pages cost more than all arithmetic here.
    """
    steps = steps_of(record)
    if steps is None:
        assert record.value is not None
        return _placed(record.value.shape, memory).copy_(record.value), None
    codes, how = record.codes, record.storage
    assert codes is not None
    assert how is not None
    if not how.format.packed:
        return decoded(codes, how.format.element, steps, memory), steps
    values = _placed((codes.shape[0], 2 * codes.shape[1]), memory)
    pairs = pairs_of(how.format.element, how.nibble_order)
    arrays = (each.contiguous().numpy() for each in (codes, pairs, steps.scales))
    _loops().decode_pairs(*arrays, how.format.block[1], values.numpy())
    return values, steps


def decoded(
    codes: Tensor, element: ElementFormat, steps: Steps, memory: Tensor | None = None
) -> Tensor:
    """Return the values of codes [R, C] of one byte each."""
    values = _placed(codes.shape, memory)
    arrays = (each.contiguous().numpy() for each in (codes, table_of(element), steps.scales))
    _loops().decode_bytes(*arrays, steps.first, steps.block, values.numpy())
    return values


def _placed(shape: Sequence[int], memory: Tensor | None) -> Tensor:
    if memory is None:
        return torch.empty(tuple(shape), dtype=torch.float64)
    return memory[: prod(shape)].view(tuple(shape))


def defined_values(record: Weight) -> tuple[Tensor, Tensor | None]:
    """Return values and the scale of each element by tables alone: what the loops must equal."""
    steps = steps_of(record)
    if steps is None:
        return exact_values(record)[0], None
    codes, how = record.codes, record.storage
    assert codes is not None
    assert how is not None
    if how.format.packed:
        low, high = codes & 15, codes >> 4
        pair = (low, high) if how.nibble_order is NibbleOrder.LOW_EVEN else (high, low)
        codes = torch.stack(pair, -1).reshape(codes.shape[0], -1)
    step = steps.full(tuple(codes.shape))
    return table_of(how.format.element)[codes.int()] * step, step


def rows_exactly(weight: StoredWeight) -> Iterator[tuple[int, Tensor, Steps | None]]:
    """Yield (first row, values, steps) by panels of whole blocks; pages are released.

    Panels share one buffer: a panel is valid until the next one is requested.
    """
    rows, width = weight.shape
    unit = weight.format.block[0] if weight.format else 1
    step = max(1, PANEL // max(width, 1) // unit) * unit
    memory = empty_tensor((max(PANEL, step * width),), torch.float64)
    for begin in range(0, rows, step):
        yield (begin, *exact_values(weight.rows(begin, min(begin + step, rows)), memory))
        for entry in weight.form.parts.values():
            weight.release(entry)


def stacked_rows(weights: Iterable[StoredWeight]) -> Iterator[Tensor]:
    """Yield the values of several weights in sequence, by panels as above."""
    for weight in weights:
        for _, values, _ in rows_exactly(weight):
            yield values


class Comparison:
    """A running comparison of panels of both sides that counts differences."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
        self.elements = self.different = self.beyond = 0
        self.worst: Worst | None = None
        self._ratio = -1.0
        self._row = 0

    def add(self, source: Tensor, output: Tensor, steps: Steps | None = None) -> None:
        """Compare the next rows; a NaN on both sides is no difference."""
        scales, block, first = steps or _ONE_STEP
        how = self._bound
        x, y, z = (each.contiguous().numpy() for each in (source, output, scales))
        kind = (how.kind, how.mantissa, how.lowest)
        different, beyond = _loops().count_differences(x, y, z, first, tuple(block), kind)
        self.elements += source.numel()
        self.different += different
        self.beyond += beyond
        if beyond:
            self._find_worst(source, output, steps)
        self._row += source.shape[0]

    def _find_worst(self, source: Tensor, output: Tensor, steps: Steps | None) -> None:
        """Find the element furthest from its source, in a panel with some beyond the bound."""
        step = torch.ones(()) if steps is None else steps.full(tuple(source.shape))
        same = (source == output) | (source.isnan() & output.isnan())
        # A NaN on one side only is infinitely far.
        gap = torch.where(same, 0.0, (output - source).abs().nan_to_num(nan=torch.inf))
        allowed = self._bound.allowed(source, step)
        ratio = torch.where(gap == 0, 0.0, gap / allowed.nan_to_num(nan=0.0, posinf=0.0))
        largest = float(ratio.max())
        if largest > self._ratio:
            self._ratio, at = largest, int(ratio.argmax())
            row, column = divmod(at, source.shape[-1])
            pair = (float(source.flatten()[at]), float(output.flatten()[at]))
            self.worst = Worst((self._row + row, column), *pair, float(allowed.flatten()[at]))

    def proof(
        self, tensor: str, sources: tuple[str, ...], bound: str, faults: Iterable[str] = ()
    ) -> TensorProof:
        """Return the result of the comparison."""
        counts = (self.elements, self.different, self.beyond)
        return TensorProof(tensor, sources, *counts, bound, self.worst, tuple(faults))


def compare_rows(
    source: Iterator[Tensor], output: Iterator[tuple[Tensor, Steps | None]], bound: Bound
) -> tuple[Comparison, list[str]]:
    """Compare two streams of rows whose panels may end at different rows."""
    comparison = Comparison(bound)
    rest: Tensor | None = None
    for values, steps in output:
        begin = 0
        while begin < values.shape[0]:
            if rest is None or not rest.shape[0]:
                rest = next(source, None)
            if rest is None:
                return comparison, ["the output has more rows than its source"]
            count = min(rest.shape[0], values.shape[0] - begin)
            cut = None if steps is None else steps.cut(begin, begin + count)
            comparison.add(rest[:count], values[begin : begin + count], cut)
            rest, begin = rest[count:], begin + count
    if (rest is not None and rest.shape[0]) or next(source, None) is not None:
        return comparison, ["the source has more rows than the output"]
    return comparison, []
