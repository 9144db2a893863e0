"""Prove a DeepGEMM wo_a: unpack its scales by shifts and compare every value with the source.

The two tensors are read independently of the code that packed them. Rank, dtype and shape of the
scales are checked first: given E4M3 scales, or a single scale, a kernel asserts or returns garbage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.checkpoint.transform.proof.bounds import NO_BOUND, Steps, element_bound
from degarble.harness.checkpoint.transform.proof.checks import block_amax, fp8_scale_faults
from degarble.harness.checkpoint.transform.proof.compare import (
    EXACT,
    Comparison,
    decoded,
    stacked_rows,
)
from degarble.harness.checkpoint.transform.units import TensorProof
from degarble.harness.formats.block_formats import FP8_128X128_F32
from degarble.harness.formats.element_formats import E4M3

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from degarble.harness.checkpoint.transform.source import Linear
    from degarble.harness.checkpoint.transform.units import Options
    from degarble.harness.checkpoint.view.view import Checkpoint


class Output(NamedTuple):
    """The location of a written wo_a, and its number of groups."""

    target: Checkpoint
    module: str
    groups: int


def check_wo_a(
    output: Output, linear: Linear, options: Options, *, kept: bool
) -> Iterator[TensorProof]:
    """Compare a written wo_a with its source."""
    target, module, groups = output
    rows, columns = linear.weight.shape
    weight, scale = (target.entry(module + end) for end in (".weight", ".weight_scale_inv"))
    high, wide = rows // groups // 128, -(-columns // 128)
    expected = {
        weight: ("F8_E4M3", (groups, rows // groups, columns)),
        scale: ("F32", (groups, high, wide))
        if options.gpu == "sm90"
        else ("I32", (groups, -(-wide // 4), rows // groups)),
    }
    faults = [
        f"{entry.name} is {entry.dtype} {list(entry.shape)}, not {dtype} {list(shape)}"
        for entry, (dtype, shape) in expected.items()
        if (entry.dtype, entry.shape) != (dtype, shape)
    ]
    if faults:
        count = rows * columns
        # With another dtype or shape nothing can be compared: all elements count as wrong.
        counts = (count, count, count)
        yield TensorProof(weight.name, linear.tensors, *counts, EXACT, None, tuple(faults))
        return
    step_RC = _scales(target.tensor(scale.name), wide, options)
    bound = NO_BOUND if kept else element_bound(FP8_128X128_F32)
    comparison = Comparison(bound)
    codes = target.tensor(weight.name).view(torch.uint8).reshape(rows, columns)
    begin = 0
    for values in stacked_rows([linear.weight]):
        end = begin + values.shape[0]
        steps = Steps(step_RC, (128, 128)).cut(begin, end)
        comparison.add(values, decoded(codes[begin:end], E4M3, steps), steps)
        begin = end
        target.release(weight.name)
    if not kept:
        amax_RC = block_amax([linear.weight], FP8_128X128_F32)
        if options.per == "tensor":
            amax_RC = amax_RC.max().expand_as(step_RC)
        as_power = options.gpu == "sm100"
        faults += fp8_scale_faults(lambda a, b: step_RC[a:b], amax_RC, as_power=as_power)
    if bool((step_RC == 1).all()):
        faults.append("every block scale is 1: the FP8 scale is lost")
    words = EXACT if kept else "half a step of E4M3 times its scale"
    yield comparison.proof(weight.name, linear.tensors, words, faults)


def _scales(stored: Tensor, wide: int, options: Options) -> Tensor:
    """Return decode scales [blocks of rows, blocks of columns] in float64."""
    if options.gpu == "sm90":
        step = stored.double()
    else:
        words = stored.long()[:, :, ::128]  # rows of a block repeat its scale
        repeated = words.repeat_interleave(128, 2)[:, :, : stored.shape[2]]
        same = torch.equal(repeated, stored.long())
        # Four UE8M0 bytes a word, the first one in the lowest bits; their bias is 127.
        exponents = torch.stack([words >> 8 * j & 255 for j in range(4)], 2)
        exponents = exponents.flatten(1, 2)[:, :wide].transpose(1, 2)
        step = torch.exp2((exponents - 127).double())
        # Where rows of a block disagree, NaN puts every value beyond its bound.
        step = step if same else torch.full_like(step, torch.nan)
    step = step.flatten(0, 1)
    return step.reciprocal() if options.direction == "encode" else step
