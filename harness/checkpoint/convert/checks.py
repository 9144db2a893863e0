"""Proofs of recoded weights: values within one rounding, and scales that the values ask for.

Owns the check of a weight in BF16, FP8 128x128 or NVFP4 against the source weights it was made
from, and the rule that a new scale follows from the largest magnitude it covers: a scale of one
everywhere can leave values within a coarse grid's rounding, so the grid itself is judged as well.
Kept honest by the planted faults of suites/checkpoint/convert/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.anatomy.storage import Part
from degarble.harness.checkpoint.convert.compare import (
    EXACT,
    bfloat16_bound,
    compare_rows,
    element_bound,
    no_bound,
    rows_exactly,
    stacked_rows,
    table_of,
)
from degarble.harness.formats.block_formats import NVFP4

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from degarble.harness.checkpoint.convert.compare import Bound
    from degarble.harness.checkpoint.convert.recode import Recoded
    from degarble.harness.checkpoint.convert.units import TensorProof
    from degarble.harness.checkpoint.stored import StoredWeight
    from degarble.harness.checkpoint.view import Checkpoint
    from degarble.harness.formats.types import BlockFormat

FP8_FLOOR = 1e-4  # amax below it counts as this (DeepSeek-V4 inference/kernel.py, act_quant)
E4M3_LARGEST = 448.0
NVFP4_LARGEST = 6.0
_CLOSE = 2.0**-20  # two float32 roundings


def check_recoded(target: Checkpoint, module: str, recoded: Recoded) -> Iterator[TensorProof]:
    """Compare a written module with what it was made from."""
    output, fmt = target.stored(module), recoded.format
    sources = tuple(weight.name for weight in recoded.weights)
    kept = fmt is not None and all(map(recoded.keeps_codes, recoded.weights))
    faults = []
    if output.format != fmt:
        found = output.format.name if output.format else output.form.parts[Part.VALUE].dtype
        faults.append(f"stored as {found}, not {fmt.name if fmt else 'BF16'}")
    bound: Bound
    if fmt is None:
        bound, words = bfloat16_bound, "half a unit of bfloat16"
    elif kept:
        bound, words = no_bound, EXACT
    else:
        bound, words = element_bound(fmt), f"half a step of {fmt.element.name} times its scale"
    if faults:  # the grid of another format says nothing
        bound, words = no_bound, EXACT
    rows = ((values, step) for _, values, step in rows_exactly(output))
    comparison, more = compare_rows(stacked_rows(recoded.weights), rows, bound)
    faults += more
    if fmt is not None and not kept and not faults:
        faults += scale_faults(output, recoded, fmt)
    yield comparison.proof(module, sources, words, faults)


def scale_faults(output: StoredWeight, recoded: Recoded, fmt: BlockFormat) -> list[str]:
    """Tell scales that do not follow from the values they cover."""
    record = output.weight()
    assert record.block_scale is not None
    amax_RC = block_amax(stacked_rows(recoded.weights), fmt)
    scale = record.block_scale
    scale_RC = scale.double() if scale.dtype is torch.float32 else table_of(fmt.scale)[scale.int()]
    if fmt == NVFP4:
        assert record.tensor_scale is not None
        factor = float(record.tensor_scale)
        return nvfp4_scale_faults(scale_RC, factor, amax_RC, float(recoded.amax))
    return fp8_scale_faults(scale_RC, amax_RC, as_power=fmt.scale.bits == 8)


def block_amax(panels: Iterator[Tensor], fmt: BlockFormat) -> Tensor:
    """Return the largest magnitude of every block, float64; panels may end anywhere."""
    rows, columns = fmt.block
    found: list[Tensor] = []
    rest: Tensor | None = None

    def take(values: Tensor) -> Tensor:
        high, wide = -(-values.shape[0] // rows), -(-values.shape[1] // columns)
        full = values.new_zeros(high * rows, wide * columns)
        full[: values.shape[0], : values.shape[1]] = values.abs()
        return full.view(high, rows, wide, columns).amax((1, 3))

    for panel in panels:
        values = panel if rest is None else torch.cat([rest, panel])
        whole = values.shape[0] // rows * rows
        if whole:
            found.append(take(values[:whole]))
        rest = values[whole:]
    if rest is not None and rest.shape[0]:
        found.append(take(rest))
    return torch.cat(found)


def fp8_scale_faults(scale_RC: Tensor, amax_RC: Tensor, *, as_power: bool) -> list[str]:
    """Tell FP8 scales other than amax / 448, or the next power of two above it."""
    wanted = amax_RC.clamp(min=FP8_FLOOR) / E4M3_LARGEST
    if as_power:
        # Where amax / 448 is a power of two to float32's precision, both neighbours are right.
        low = torch.exp2(torch.log2(wanted * (1 - _CLOSE)).ceil())
        high = torch.exp2(torch.log2(wanted * (1 + _CLOSE)).ceil())
        wrong = (scale_RC != low) & (scale_RC != high)
    else:
        wrong = (scale_RC - wanted).abs() > wanted * _CLOSE
    return _told(wrong, scale_RC, wanted, "the largest magnitude over 448")


def nvfp4_scale_faults(
    scale_RC: Tensor, factor: float, amax_RC: Tensor, tensor_amax: float
) -> list[str]:
    """Tell NVFP4 scales that do not follow from the magnitudes they cover."""
    wanted = tensor_amax / (NVFP4_LARGEST * E4M3_LARGEST)
    if abs(factor - wanted) > wanted * _CLOSE:
        return [f"tensor scale {factor:g}, expected {wanted:g}: the largest magnitude over 2688"]
    if not factor:
        return []
    asked = amax_RC / (NVFP4_LARGEST * factor)
    # Half a step of E4M3: 1/16 of a normal number, 2**-10 of a subnormal; 2**-9 is the least kept.
    wrong = (scale_RC - asked).abs() > asked / 16 * (1 + _CLOSE) + 2.0**-9
    return _told(wrong & (amax_RC > 0), scale_RC, asked, "the block's largest magnitude over 6")


def _told(wrong: Tensor, found: Tensor, wanted: Tensor, rule: str) -> list[str]:
    count = int(wrong.sum())
    if not count:
        return []
    at = tuple(wrong.nonzero()[0].tolist())
    pair = f"{float(found[at]):g}, expected {float(wanted[at]):g}"
    return [f"{count} of {wrong.numel()} scales are not {rule}: at {at} {pair}"]
