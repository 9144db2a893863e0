"""Prove recoded weights: values within one rounding, and scales that follow from the values.

Compares a weight in BF16, FP8 128x128 or NVFP4 with the source weights it was made from. A new
scale must follow from the largest magnitude it covers. Scales are judged separately because a scale
of one everywhere makes a coarse grid, and values can still lie within its rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.checkpoint.transform.proof.bounds import (
    BFLOAT16_BOUND,
    NO_BOUND,
    element_bound,
)
from degarble.harness.checkpoint.transform.proof.compare import (
    EXACT,
    compare_rows,
    rows_exactly,
    stacked_rows,
    table_of,
)
from degarble.harness.formats.block_formats import NVFP4
from degarble.harness.model.storage import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from degarble.harness.checkpoint.transform.recode import Recoded
    from degarble.harness.checkpoint.transform.units import TensorProof
    from degarble.harness.checkpoint.view.stored import StoredWeight
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.formats.types import BlockFormat

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
        found = output.format.name if output.format else output.form.parts[Part.VALUE].dtype
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
    shape = (sum(each.shape[0] for each in weights), weights[0].shape[1])
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
