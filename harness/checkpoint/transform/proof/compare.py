"""Compare written values and scales with their source, with a decoder of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.checkpoint.transform.proof.bounds import (
    BFLOAT16_BOUND,
    NO_BOUND,
    PanelScales,
    element_bound,
)
from degarble.harness.checkpoint.transform.units import FurthestElement, TensorProof
from degarble.harness.formats.codec import decode
from degarble.harness.formats.fast.buffers import empty_tensor
from degarble.harness.formats.number_formats import NVFP4, NibbleOrder, ScaleDirection
from degarble.harness.model.tensors import PartKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from degarble.harness.checkpoint.transform.proof.bounds import ErrorBound
    from degarble.harness.checkpoint.transform.recode import Recoded
    from degarble.harness.checkpoint.view.stored import StoredWeight
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.formats.number_formats import BlockFormat, NumberFormat
    from degarble.harness.formats.weight import Weight, WeightEncoding


# --------------------------------------------------------------------------------------------------
# Values, element by element.
#
# Decoding uses tables made from the definition of each element format, in float64, exact up to the
# tensor scale. It shares nothing with `quantise` or its fast twins. All data are read from disk by
# panels of rows. The loops are compiled; `defined_values` and `ErrorBound.allowed` define their
# results.

PANEL = 1 << 19  # elements: 4 MiB in float64, large enough to be taken from spare memory
EXACT = "equal"
# For values without scales: one block that covers any matrix.
_ONE_STEP = PanelScales(torch.ones(1, 1, dtype=torch.float64), (1 << 62, 1 << 62))


@lru_cache(maxsize=8)
def table_of(element: NumberFormat) -> Tensor:
    """Return the value of every code, float64, by the definition of the format."""
    values = [decode(code, element) for code in range(element.code_count)]
    return torch.tensor(values, dtype=torch.float64)


@lru_cache(maxsize=8)
def pairs_of(element: NumberFormat, order: NibbleOrder) -> Tensor:
    """Return both values of every byte of packed codes [256, 2], the even column's first."""
    byte = torch.arange(256)
    low, high = table_of(element)[byte & 15], table_of(element)[byte >> 4]
    return torch.stack((low, high) if order is NibbleOrder.LOW_EVEN else (high, low), -1)


def _loops() -> Any:
    from degarble.harness.checkpoint.transform.proof import loops as proof_loops  # noqa: PLC0415  imports numba

    return proof_loops


def steps_of(record: Weight) -> PanelScales | None:
    """Return the decode scales of a matrix, times its tensor scale; None for plain values."""
    if record.storage is None:
        return None
    encoding, scale = record.storage, record.block_scale
    assert scale is not None
    fmt = encoding.format
    if scale.dtype is torch.float32:
        step = scale.double()
    else:
        table = table_of(fmt.scale).numpy()
        step = torch.from_numpy(table.take(scale.numpy()))
    if record.tensor_scale is not None:
        factor = record.tensor_scale.double()
        step = step * factor if encoding.direction is ScaleDirection.DECODE else step / factor
    # One scale may cover whole rows, or the whole matrix.
    return PanelScales(step, fmt.extents(*encoding.shape[-2:]))


def exact_values(record: Weight, memory: Tensor | None = None) -> tuple[Tensor, PanelScales | None]:
    """Return values [R, C] in float64, and the scale of each block.

    `memory`: where the values may be written; fresh pages cost more than all arithmetic here.
    """
    steps = steps_of(record)
    if steps is None:
        assert record.value is not None
        return _placed(record.value.shape, memory).copy_(record.value), None
    codes, encoding = record.codes, record.storage
    assert codes is not None
    assert encoding is not None
    added = (record.zero_point, record.group_index, record.channel_scale)
    if any(each is not None for each in added):
        return _with_zeros_and_factors(record, steps), steps
    if not encoding.format.packed:
        return decoded(codes, encoding.format.element, steps, memory), steps
    values = _placed((codes.shape[0], 2 * codes.shape[1]), memory)
    pairs = pairs_of(encoding.format.element, encoding.nibble_order)
    arrays = (tensor.contiguous().numpy() for tensor in (codes, pairs, steps.scales))
    _loops().decode_pairs(*arrays, steps.block[1], values.numpy())
    return values, steps


def _with_zeros_and_factors(record: Weight, steps: PanelScales) -> Tensor:
    """Return the values of integers with zero points, or of columns with factors, by tables."""
    codes = _bytes_of(record)
    shape = tuple(codes.shape)
    values = table_of(_encoding(record).format.element)[codes.int()]

    def spread(of_groups: Tensor) -> Tensor:
        if record.group_index is not None:
            return of_groups[:, record.group_index.long()]
        return steps._replace(scales=of_groups).full(shape)

    if record.zero_point is not None:
        values = values - spread(record.zero_point.double())
    values = values * spread(steps.scales)
    return values if record.channel_scale is None else values * record.channel_scale.double()


def _encoding(record: Weight) -> WeightEncoding:
    assert record.storage is not None
    return record.storage


def _bytes_of(record: Weight) -> Tensor:
    """Return one code a byte [R, C]."""
    codes, encoding = record.codes, _encoding(record)
    assert codes is not None
    if not encoding.format.packed:
        return codes.view(torch.uint8)
    low, high = codes & 15, codes >> 4
    pair = (low, high) if encoding.nibble_order is NibbleOrder.LOW_EVEN else (high, low)
    return torch.stack(pair, -1).reshape(codes.shape[0], -1)


def decoded(
    codes: Tensor, element: NumberFormat, steps: PanelScales, memory: Tensor | None = None
) -> Tensor:
    """Return the values of codes [R, C] of one byte each."""
    values = _placed(codes.shape, memory)
    arrays = (tensor.contiguous().numpy() for tensor in (codes, table_of(element), steps.scales))
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
    codes = _bytes_of(record)
    step = steps.full(tuple(codes.shape))
    return table_of(_encoding(record).format.element)[codes.int()] * step, step


def by_reciprocal(record: Weight) -> Weight:
    """Return a record as engines read it: multiplied by the float32 reciprocal of a divisor."""
    encoding, scale = record.storage, record.tensor_scale
    if encoding is None or scale is None or encoding.direction is not ScaleDirection.ENCODE:
        return record
    multiplied = replace(encoding, direction=ScaleDirection.DECODE)
    return replace(record, tensor_scale=scale.reciprocal(), storage=multiplied, _decoded={})


def rows_exactly(
    weight: StoredWeight, reading: Callable[[Weight], Weight] | None = None
) -> Iterator[tuple[int, Tensor, PanelScales | None]]:
    """Yield (first row, values, steps) by panels of whole blocks; pages are released.

    Panels share one buffer: a panel is valid until the next one is requested.
    """
    rows, width = weight.shape
    unit = (weight.format.block[0] or 1) if weight.format else 1
    step = max(1, PANEL // max(width, 1) // unit) * unit
    memory = empty_tensor((max(PANEL, step * width),), torch.float64)
    for begin in range(0, rows, step):
        record = weight.rows(begin, min(begin + step, rows))
        yield (begin, *exact_values(reading(record) if reading else record, memory))
        for entry in weight.form.parts.values():
            weight.release(entry)


def stacked_rows(weights: Iterable[StoredWeight]) -> Iterator[Tensor]:
    """Yield the values of several weights in sequence, by panels as above."""
    for weight in weights:
        for _, values, _ in rows_exactly(weight):
            yield values


class PanelComparison:
    """A running comparison of panels of both sides that counts differences."""

    def __init__(self, bound: ErrorBound) -> None:
        self._bound = bound
        self.elements = self.different = self.beyond = 0
        self.worst: FurthestElement | None = None
        self._ratio = -1.0
        self._row = 0

    def add(self, source: Tensor, output: Tensor, steps: PanelScales | None = None) -> None:
        """Compare the next rows; a NaN on both sides is no difference."""
        scales, block, first = steps or _ONE_STEP
        bound = self._bound
        x, y, z = (tensor.contiguous().numpy() for tensor in (source, output, scales))
        kind = (bound.kind, bound.mantissa, bound.lowest)
        different, beyond = _loops().count_differences(x, y, z, first, tuple(block), kind)
        self.elements += source.numel()
        self.different += different
        self.beyond += beyond
        if beyond:
            self._find_worst(source, output, steps)
        self._row += source.shape[0]

    def _find_worst(self, source: Tensor, output: Tensor, steps: PanelScales | None) -> None:
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
            self.worst = FurthestElement(
                (self._row + row, column), *pair, float(allowed.flatten()[at])
            )

    def proof(
        self, tensor: str, sources: tuple[str, ...], bound: str, faults: Iterable[str] = ()
    ) -> TensorProof:
        """Return the result of the comparison."""
        counts = (self.elements, self.different, self.beyond)
        return TensorProof(tensor, sources, *counts, bound, self.worst, tuple(faults))


def compare_rows(
    source: Iterator[Tensor], output: Iterator[tuple[Tensor, PanelScales | None]], bound: ErrorBound
) -> tuple[PanelComparison, list[str]]:
    """Compare two streams of rows whose panels may end at different rows."""
    comparison = PanelComparison(bound)
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


# --------------------------------------------------------------------------------------------------
# Recoded weights: values within one rounding, and scales that follow from the values.
#
# Compares a weight in BF16, FP8 128x128 or NVFP4 with the source weights it was made from. A new
# scale must follow from the largest magnitude it covers. Scales are judged separately because a
# scale of one everywhere makes a coarse grid, and values can still lie within its rounding.

if TYPE_CHECKING:
    Cut = Callable[[int, int], Tensor]  # decode scales of rows of blocks, float64

FP8_FLOOR = 1e-4  # amax below it counts as this (DeepSeek-V4 inference/kernel.py, act_quant)
E4M3_LARGEST = 448.0
NVFP4_LARGEST = 6.0
_CLOSE = 2.0**-20  # two float32 roundings
_ROWS = 1024  # of scales that are judged at once: memory is theirs, whatever the weight's size


def check_recoded(target: Checkpoint, module: str, recoded: Recoded) -> Iterator[TensorProof]:
    """Compare a written module with what it was made from."""
    output, fmt = target.stored(module), recoded.format
    sources = tuple(weight.name for weight in recoded.weights)
    kept = fmt is not None and all(map(recoded.keeps_codes, recoded.weights))
    faults = []
    if output.format != fmt:
        found = output.format.name if output.format else output.form.parts[PartKind.VALUE].dtype
        faults.append(f"stored as {found}, not {fmt.name if fmt else 'BF16'}")
    bound, words = NO_BOUND, EXACT
    if fmt is None and not faults:  # the grid of another format says nothing
        bound, words = BFLOAT16_BOUND, "half a unit of bfloat16"
    elif fmt is not None and not kept and not faults:
        bound, words = element_bound(fmt), f"half a step of {fmt.element.name} times its scale"
    rows = ((values, steps) for _, values, steps in rows_exactly(output))
    source, largest = stacked_rows(recoded.weights), None
    if fmt is not None and not kept:
        largest = BlockMagnitudes(recoded.shape, fmt.block)
        source = largest.watching(source)
    comparison, more = compare_rows(source, rows, bound)
    faults += more
    if fmt is not None and largest is not None and not faults:
        faults += scale_faults(output, recoded, fmt, largest.found)
    yield comparison.proof(module, sources, words, faults)


class BlockMagnitudes:
    """The largest magnitude of every block, float64, collected from a stream of row panels."""

    def __init__(self, shape: tuple[int, int], block: tuple[int, int]) -> None:
        self.block = block
        extents = (-(-extent // size) for extent, size in zip(shape, block, strict=True))
        self.found = torch.zeros(*extents, dtype=torch.float64)

    def watching(self, panels: Iterator[Tensor]) -> Iterator[Tensor]:
        """Yield panels unchanged and record their magnitudes; panels may end anywhere."""
        from degarble.harness.checkpoint.transform.proof import loops as proof_loops  # noqa: PLC0415  imports numba

        row, high = 0, self.block[0]
        for panel in panels:
            into = self.found[row // high :].numpy()
            proof_loops.largest_of_blocks(panel.numpy(), row % high, self.block, into)
            row += panel.shape[0]
            yield panel


def block_amax(weights: Sequence[StoredWeight], fmt: BlockFormat) -> Tensor:
    """Return the largest magnitude of every block of weights stacked along rows."""
    shape = (sum(weight.shape[0] for weight in weights), weights[0].shape[1])
    largest = BlockMagnitudes(shape, fmt.block)
    for _ in largest.watching(stacked_rows(weights)):
        pass
    return largest.found


def scale_faults(
    output: StoredWeight, recoded: Recoded, fmt: BlockFormat, amax_RC: Tensor
) -> list[str]:
    """Return the scales that do not follow from the values they cover."""
    record = output.weight()
    stored = record.block_scale
    assert stored is not None

    def scale(begin: int, end: int) -> Tensor:
        cut = stored[begin:end]
        return cut.double() if cut.dtype is torch.float32 else table_of(fmt.scale)[cut.int()]

    if fmt != NVFP4:
        return fp8_scale_faults(scale, amax_RC, as_power=fmt.scale.bits == 8 or recoded.by_powers)
    assert record.tensor_scale is not None
    tensor_amax = _exact_amax(recoded, amax_RC)
    return nvfp4_scale_faults(scale, float(record.tensor_scale), amax_RC, tensor_amax)


def _exact_amax(recoded: Recoded, amax_RC: Tensor) -> float:
    """Return the largest magnitude of all partners; each one is read once."""
    known = recoded.partners.exact
    if len(recoded.weights) == 1:
        known[recoded.weights[0].name] = float(amax_RC.max())
    for weight in recoded.partners.weights:
        if weight.name not in known:
            rows, columns = weight.shape
            largest = BlockMagnitudes((rows, columns), (rows, columns))
            for _ in largest.watching(stacked_rows([weight])):
                pass
            known[weight.name] = float(largest.found)
    return max(known[weight.name] for weight in recoded.partners.weights)


def fp8_scale_faults(scale: Cut, amax_RC: Tensor, *, as_power: bool) -> list[str]:
    """Return FP8 scales other than amax / 448, or the next power of two above it."""

    def judge(scale_RC: Tensor, amax_RC: Tensor) -> tuple[Tensor, Tensor]:
        wanted = amax_RC.clamp(min=FP8_FLOOR) / E4M3_LARGEST
        if not as_power:
            return (scale_RC - wanted).abs() > wanted * _CLOSE, wanted
        # Where amax / 448 is a power of two to float32's precision, both neighbours are right.
        low = torch.exp2(torch.log2(wanted * (1 - _CLOSE)).ceil())
        high = torch.exp2(torch.log2(wanted * (1 + _CLOSE)).ceil())
        return (scale_RC != low) & (scale_RC != high), wanted

    return _judged(scale, amax_RC, judge, "the largest magnitude over 448")


def nvfp4_scale_faults(scale: Cut, factor: float, amax_RC: Tensor, tensor_amax: float) -> list[str]:
    """Return NVFP4 scales that do not follow from the magnitudes they cover."""
    wanted = tensor_amax / (NVFP4_LARGEST * E4M3_LARGEST) if tensor_amax else 1.0
    if abs(factor - wanted) > wanted * _CLOSE:
        return [f"tensor scale {factor:g}, expected {wanted:g}: the largest magnitude over 2688"]

    def judge(scale_RC: Tensor, amax_RC: Tensor) -> tuple[Tensor, Tensor]:
        asked = amax_RC / (NVFP4_LARGEST * factor)
        # Half a step of E4M3: 1/16 of a normal number, 2**-10 of a subnormal; 2**-9 is least.
        wrong = (scale_RC - asked).abs() > asked / 16 * (1 + _CLOSE) + 2.0**-9
        return wrong & (amax_RC > 0), asked

    return _judged(scale, amax_RC, judge, "the block's largest magnitude over 6")


def _judged(
    scale: Cut, amax_RC: Tensor, judge: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], rule: str
) -> list[str]:
    """Judge all scales in blocks of rows; report how many are wrong, and the first of them."""
    count, first = 0, ""
    for begin in range(0, amax_RC.shape[0], _ROWS):
        found = scale(begin, begin + _ROWS)
        wrong, wanted = judge(found, amax_RC[begin : begin + _ROWS])
        count += int(wrong.sum())
        if count and not first:
            row, column = wrong.nonzero()[0].tolist()
            pair = f"{float(found[row, column]):g}, expected {float(wanted[row, column]):g}"
            first = f"at {(begin + row, column)} {pair}"
    return [f"{count} of {amax_RC.numel()} scales are not {rule}: {first}"] if count else []
