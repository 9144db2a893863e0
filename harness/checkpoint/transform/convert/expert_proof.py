"""Prove vLLM's fused and stacked parameters: find every member again and compare its values.

The inverse of a backend's order (swizzle, shuffle, interleave, swapped halves) is written here
independently, by reshape, slices and the published table. It shares no index function with the code
that wrote the tensors. Tensors without such an order are read by the names of the `vllm` layout.

Sources: FlashInfer utils.py (table of the shuffle of 32 rows), cuBLAS 128x4 scale tiles.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import torch

from degarble.harness.checkpoint.transform.proof.bounds import FACTOR_BOUND, NO_BOUND
from degarble.harness.checkpoint.transform.proof.checks import check_recoded
from degarble.harness.checkpoint.transform.proof.compare import (
    EXACT,
    Comparison,
    compare_rows,
    exact_values,
    rows_exactly,
    stacked_rows,
)
from degarble.harness.formats.block_formats import NVFP4
from degarble.harness.formats.dialects import MODELOPT
from degarble.harness.formats.layouts import LINEAR
from degarble.harness.formats.types import NibbleOrder, ScaleDirection
from degarble.harness.formats.weight import Storage, Weight
from degarble.harness.model.storage import Part

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from degarble.harness.checkpoint.transform.convert.vllm_unit import Fused
    from degarble.harness.checkpoint.transform.proof.bounds import Bound
    from degarble.harness.checkpoint.transform.units import TensorProof
    from degarble.harness.checkpoint.view.stored import StoredWeight
    from degarble.harness.checkpoint.view.view import Checkpoint

_SHUFFLED = [8 * (j % 4) + j // 4 for j in range(32)]  # 0 8 16 24 1 9 17 25 2 ...: row j goes there


def check_fused(fused: Fused, target: Checkpoint) -> Iterator[TensorProof]:
    """Compare every member of one path with its source."""
    if fused.is_arranged(Part.CODES):
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
            comparison, faults = Comparison(NO_BOUND), []
            comparison.add(_flat(source), _flat(output))
        faults += _scalar_faults(source.weight(), output.weight())
        yield comparison.proof(name, (source.form.module,), EXACT, faults)


def _flat(weight: StoredWeight) -> Tensor:
    value = weight.weight().value
    assert value is not None
    return value.double().reshape(1, -1)


def _bound(source: StoredWeight) -> Bound:
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


def _check_arranged(fused: Fused, target: Checkpoint) -> Iterator[TensorProof]:
    """Cut each expert out of its stack, undo the backend's order, and compare."""
    tensors = {slots[0].part: (name, slots) for name, slots in fused.tensors.items()}
    codes_name, slots = tensors[Part.CODES]
    for expert, group in groupby(slots, lambda slot: slot.parameter.expert):
        assert expert is not None
        names = [slot.parameter.name for slot in group]
        sources = [fused.checkpoint.stored(name) for name in names]
        parts = {}
        for part in (Part.CODES, Part.BLOCK_SCALE):
            stored = target.tensor(tensors[part][0])[expert].view(torch.uint8)
            parts[part] = _undone(fused, stored, part, sources[0].shape)
        factors = target.tensor(tensors[Part.TENSOR_SCALE][0])[expert].flatten()
        for position, (name, source) in enumerate(zip(names, sources, strict=True)):
            rows, columns = source.shape
            high, wide = fused.backend.padded((rows, columns), gated=fused.is_gated)
            begin = position * high
            cut, padding = {}, 0
            for part, unit in ((Part.CODES, 2), (Part.BLOCK_SCALE, 16)):
                whole = parts[part][begin : begin + high, : wide // unit]
                cut[part] = whole[:rows, : columns // unit]
                padding += int(whole.count_nonzero() - cut[part].count_nonzero())
            comparison = Comparison(_bound(source))
            for begin, values, _ in rows_exactly(source):
                rows_cut = {each: t[begin : begin + len(values)] for each, t in cut.items()}
                # Kernels use the first tensor scale for both members.
                output = _record(rows_cut, factors[0], (len(values), columns))
                comparison.add(values, exact_values(output)[0])
            faults = [f"{padding} bytes of padding are not zero"] if padding else []
            faults += _input_scale_faults(fused, target, source, (expert, position))
            yield comparison.proof(f"{codes_name}[{expert}]", (name,), EXACT, faults)
            for entry in source.form.parts.values():
                source.release(entry)
        for part in (Part.CODES, Part.BLOCK_SCALE):
            target.release(tensors[part][0])


def _record(parts: dict[Part, Tensor], factor: Tensor, shape: tuple[int, int]) -> Weight:
    direction, order = ScaleDirection.DECODE, NibbleOrder.LOW_EVEN
    return Weight(
        codes=parts[Part.CODES],
        block_scale=parts[Part.BLOCK_SCALE],
        tensor_scale=factor,
        storage=Storage(NVFP4, MODELOPT, LINEAR, direction, order, shape),
    )


def _input_scale_faults(
    fused: Fused, target: Checkpoint, source: StoredWeight, place: tuple[int, int]
) -> list[str]:
    ours = source.weight().input_scale
    names = [name for name, slots in fused.tensors.items() if slots[0].part is Part.INPUT_SCALE]
    if ours is None:
        return []
    if not names:
        return ["the input scale is lost"]
    theirs = target.tensor(names[0])[place[0]].flatten()[place[1]]
    return [] if float(ours) == float(theirs) else [f"input scale {theirs}, source {ours}"]


def _undone(fused: Fused, stored: Tensor, part: Part, shape: tuple[int, ...]) -> Tensor:
    """Return rows in the checkpoint's order, w1 above w3."""
    if part is Part.BLOCK_SCALE:
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
