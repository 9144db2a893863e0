"""Prove converted layouts: DeepGEMM's wo_a, and vLLM's fused and stacked parameters.

Every inverse here is written independently of the code that wrote the tensors.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.checkpoint.transform.proof.bounds import (
    FACTOR_BOUND,
    NO_BOUND,
    PanelScales,
    element_bound,
)
from degarble.harness.checkpoint.transform.proof.compare import (
    EXACT,
    PanelComparison,
    block_amax,
    check_recoded,
    compare_rows,
    decoded,
    exact_values,
    fp8_scale_faults,
    rows_exactly,
    stacked_rows,
)
from degarble.harness.checkpoint.transform.units import TensorProof
from degarble.harness.formats.dialects import MODELOPT
from degarble.harness.formats.layouts import LINEAR
from degarble.harness.formats.number_formats import (
    E4M3,
    FP8_128X128_F32,
    NVFP4,
    NibbleOrder,
    ScaleDirection,
)
from degarble.harness.formats.weight import Weight, WeightEncoding
from degarble.harness.model.tensors import PartKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from degarble.harness.checkpoint.transform.convert.vllm_parameters import FusedParameter
    from degarble.harness.checkpoint.transform.proof.bounds import ErrorBound
    from degarble.harness.checkpoint.transform.source import SourceLinear
    from degarble.harness.checkpoint.transform.units import ConversionOptions
    from degarble.harness.checkpoint.view.stored import StoredWeight
    from degarble.harness.checkpoint.view.view import Checkpoint


# --------------------------------------------------------------------------------------------------
# DeepGEMM's wo_a: unpack its scales by shifts and compare every value with the source. Rank, dtype
# and shape of the scales are checked first: given E4M3 scales, or a single scale, a kernel asserts
# or returns garbage.


class WrittenWoA(NamedTuple):
    """The location of a written wo_a, and its number of groups."""

    target: Checkpoint
    module: str
    groups: int


def check_wo_a(
    output: WrittenWoA, linear: SourceLinear, options: ConversionOptions, *, kept: bool
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
    comparison = PanelComparison(bound)
    codes = target.tensor(weight.name).view(torch.uint8).reshape(rows, columns)
    begin = 0
    for values in stacked_rows([linear.weight]):
        end = begin + values.shape[0]
        steps = PanelScales(step_RC, (128, 128)).cut(begin, end)
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


def _scales(stored: Tensor, wide: int, options: ConversionOptions) -> Tensor:
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


# --------------------------------------------------------------------------------------------------
# vLLM's parameters: find every member again and compare its values.
#
# A backend's order (swizzle, shuffle, interleave, swapped halves) is undone by reshape, slices and
# the published table, with no index function of the code that wrote the tensors. Tensors without
# such an order are read by the names of the `vllm` layout.
#
# Sources: FlashInfer utils.py (table of the shuffle of 32 rows), cuBLAS 128x4 scale tiles.

_SHUFFLED = [8 * (j % 4) + j // 4 for j in range(32)]  # 0 8 16 24 1 9 17 25 2 ...: row j goes there


def check_fused(fused: FusedParameter, target: Checkpoint) -> Iterator[TensorProof]:
    """Compare every member of one path with its source."""
    if fused.is_arranged(PartKind.CODES):
        yield from _check_arranged(fused, target)
        return
    for name in fused.members:
        if name in fused.changed:
            yield from check_recoded(target, name, fused.recoded[name])
            continue
        source, output = fused.checkpoint.stored(name), target.stored(name)
        if len(source.shape) == 2:
            rows = ((values, step) for _, values, step in rows_exactly(output))
            comparison, faults = compare_rows(stacked_rows([source]), rows, _bound(source))
        else:
            comparison, faults = PanelComparison(NO_BOUND), []
            comparison.add(_flat(source), _flat(output))
        faults += _scalar_faults(source.weight(), output.weight())
        yield comparison.proof(name, (source.form.module,), EXACT, faults)


def _flat(weight: StoredWeight) -> Tensor:
    value = weight.weight().value
    assert value is not None
    return value.double().reshape(1, -1)


def _bound(source: StoredWeight) -> ErrorBound:
    """Return no tolerance, or that of the one rounding where a divisor becomes a factor."""
    return FACTOR_BOUND if source.form.direction is ScaleDirection.ENCODE else NO_BOUND


def _scalar_faults(source: Weight, output: Weight) -> list[str]:
    ours, theirs = source.input_scale, output.input_scale
    if (ours is None) != (theirs is None):
        return ["the input scale is lost" if theirs is None else "an input scale from nowhere"]
    if ours is None or theirs is None:
        return []
    if not torch.equal(ours, theirs.reshape(ours.shape)):
        return [f"input scale {theirs.flatten().tolist()}, source {ours.tolist()}"]
    return []


def _check_arranged(fused: FusedParameter, target: Checkpoint) -> Iterator[TensorProof]:
    """Cut each expert out of its stack, undo the backend's order, and compare."""
    tensors = {slots[0].part: (name, slots) for name, slots in fused.tensors.items()}
    codes_name, slots = tensors[PartKind.CODES]
    for expert, group in groupby(slots, lambda slot: slot.parameter.expert):
        assert expert is not None
        names = [slot.parameter.name for slot in group]
        sources = [fused.checkpoint.stored(name) for name in names]
        parts = {}
        for part in (PartKind.CODES, PartKind.BLOCK_SCALE):
            stored = target.tensor(tensors[part][0])[expert].view(torch.uint8)
            parts[part] = _undone(fused, stored, part, sources[0].shape)
        factors = target.tensor(tensors[PartKind.TENSOR_SCALE][0])[expert].flatten()
        for position, (name, source) in enumerate(zip(names, sources, strict=True)):
            rows, columns = source.shape
            high, wide = fused.backend.padded((rows, columns), gated=fused.is_gated)
            begin = position * high
            cut, padding = {}, 0
            for part, unit in ((PartKind.CODES, 2), (PartKind.BLOCK_SCALE, 16)):
                whole = parts[part][begin : begin + high, : wide // unit]
                cut[part] = whole[:rows, : columns // unit]
                padding += int(whole.count_nonzero() - cut[part].count_nonzero())
            comparison = PanelComparison(_bound(source))
            for begin, values, _ in rows_exactly(source):
                rows_cut = {kind: t[begin : begin + len(values)] for kind, t in cut.items()}
                # Kernels use the first tensor scale for both members.
                output = _record(rows_cut, factors[0], (len(values), columns))
                comparison.add(values, exact_values(output)[0])
            faults = [f"{padding} bytes of padding are not zero"] if padding else []
            faults += _input_scale_faults(fused, target, source, (expert, position))
            yield comparison.proof(f"{codes_name}[{expert}]", (name,), EXACT, faults)
            for entry in source.form.parts.values():
                source.release(entry)
        for part in (PartKind.CODES, PartKind.BLOCK_SCALE):
            target.release(tensors[part][0])


def _record(parts: dict[PartKind, Tensor], factor: Tensor, shape: tuple[int, int]) -> Weight:
    direction, order = ScaleDirection.DECODE, NibbleOrder.LOW_EVEN
    return Weight(
        codes=parts[PartKind.CODES],
        block_scale=parts[PartKind.BLOCK_SCALE],
        tensor_scale=factor,
        storage=WeightEncoding(NVFP4, MODELOPT, LINEAR, direction, order, shape),
    )


def _input_scale_faults(
    fused: FusedParameter, target: Checkpoint, source: StoredWeight, place: tuple[int, int]
) -> list[str]:
    ours = source.weight().input_scale
    names = [name for name, slots in fused.tensors.items() if slots[0].part is PartKind.INPUT_SCALE]
    if ours is None:
        return []
    if not names:
        return ["the input scale is lost"]
    theirs = target.tensor(names[0])[place[0]].flatten()[place[1]]
    return [] if float(ours) == float(theirs) else [f"input scale {theirs}, source {ours}"]


def _undone(
    fused: FusedParameter, stored: Tensor, part: PartKind, shape: tuple[int, ...]
) -> Tensor:
    """Return rows in the checkpoint's order, w1 above w3."""
    if part is PartKind.BLOCK_SCALE:
        rows, columns = stored.shape
        # A 128x4 tile stores row 32 * q + p at [p, q]: permute to [tile row, q, p, tile column, c].
        tiles = stored.reshape(rows // 128, columns // 4, 32, 4, 4)
        stored = tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)
        high, _ = fused.backend.padded((shape[0], shape[1]), gated=fused.is_gated)
        stored = stored[: high * (2 if fused.is_gated else 1)]
    name = fused.backend.name
    if name == "trtllm":
        stored = stored.reshape(-1, 32, stored.shape[-1])[:, _SHUFFLED].flatten(0, 1)
    if not fused.is_gated or name == "vllm-cutlass":
        return stored
    if name == "trtllm":
        stored = torch.cat([stored[0::2], stored[1::2]])
    elif name == "cutedsl":
        pairs = stored.reshape(-1, 2, 64, stored.shape[-1])
        stored = torch.cat([pairs[:, 0].flatten(0, 1), pairs[:, 1].flatten(0, 1)])
    up, gate = stored.chunk(2)
    return torch.cat([gate, up])
