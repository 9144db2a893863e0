"""Faults of loading: M16 rows, M17 absent, M19 precision, M20 later steps, O07 prefix, O08 skip."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.faults.model_faults import FaultVariant, ModelFault, with_inputs
from degarble.harness.engine.faults.regions import expert_of, matrices, wrong_slots
from degarble.harness.engine.faults.weight_faults import (
    FaultFamily,
    FaultTexts,
    has_codes,
    has_scale_bytes,
    has_tensor_scale,
    is_matrix,
    is_number,
    is_packed,
    is_plain_matrix,
    is_routed,
    numbers_of,
    of_scales,
    of_values,
    weight_fault,
)
from degarble.harness.formats.codec import decode_array, encode_array
from degarble.harness.formats.number_formats import E4M3, FP8_128X128_F32, MXFP4, NVFP4, UE8M0
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.harness.formats.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext
    from degarble.harness.engine.faults.weight_faults import Change, Needs, WeightStorage
    from degarble.harness.formats.number_formats import BlockFormat
    from degarble.harness.formats.quantise import QuantisedTensor


# --------------------------------------------------------------------------------------------------
# M16: a weight has the right shape but the wrong rows.
#
# A fused matrix [a; b] is split by rank where each rank expects its own [a; b], groups are split by
# heads, a redundant expert slot holds another expert (sglang issue 24321, exo issue 1996, vllm
# issue 37322).
#
# Shape letters: G groups, N rows of one, K columns.

_EXPERTS = ("ffn.experts.w13", "ffn.experts.w2")
_REMEDY = "Say which rows of which parameter a slot holds, and check a digest of each after load."


def _fused(context: ComponentContext, name: str) -> list[str]:
    """Return the parts of the fused matrix that contains a weight."""
    number = expert_of(name)
    return [matrix for matrix in matrices(context) if expert_of(matrix) == number]


def _cut_by_rank(ranks: int) -> Change:
    """Give rank r the r-th run of rows of [a; b], read as its share of a above b."""

    def change(context: ComponentContext, name: str, weight: Weight) -> Weight | None:
        parts = _fused(context, name)
        stacked = [numbers_of(context.weights[part]) for part in parts]
        rows = torch.cat(stacked)
        if len(parts) < 2 or len(rows) % (ranks * len(parts)) or rows.ndim != 2:
            return None
        shares = [chunk.chunk(len(parts))[parts.index(name)] for chunk in rows.chunk(ranks)]
        value = torch.cat(shares)
        if value.shape != weight.shape:
            return None
        return Weight(value=value, input_scale=weight.input_scale)

    return change


def _by_heads(value: Tensor) -> Tensor:
    """Take rows [G, N] as [N, G], so that groups mix."""
    groups = 2 if len(value) % 4 else 4
    if len(value) % groups:
        return value
    rows: Tensor = value.unflatten(0, (groups, -1)).transpose(0, 1).flatten(0, 1)
    return rows.contiguous()


def _ranks_turned(value: Tensor) -> Tensor:
    """Exchange the first and the second half of the rows."""
    return value.roll(len(value) // 2, 0)


def _next_expert(step: int) -> Change:
    def change(context: ComponentContext, name: str, weight: Weight) -> Weight | None:
        number = expert_of(name)
        total = 1 + max(expert_of(matrix) for matrix in matrices(context))
        if number < 0 or total < 2:
            return None
        stem, _, rest = name.partition(".experts.")
        other = (number + step) % total if step else 0
        holder = context.weights[f"{stem}.experts.{other}.{rest.partition('.')[2]}"]
        if holder is weight:
            return None
        return Weight(value=numbers_of(holder), input_scale=weight.input_scale)

    return change


def _met(words: str, other: Callable[[Tensor], Tensor]) -> FaultVariant:
    """Route slots through another expert's matrices; `other` returns which, -1 for none."""

    def change(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        experts = inputs["experts"]
        if not bool((experts >= 0).any()):
            return inputs
        taken, scale = other(experts), inputs.get("tensor_scale")
        given = {**inputs, "experts": taken}
        if scale is not None and scale.shape == experts.shape:
            of_expert = scale.new_ones(int(experts.max()) + 1)
            of_expert[experts[experts >= 0]] = scale[experts >= 0]
            known = taken.clamp(0, len(of_expert) - 1)
            given["tensor_scale"] = of_expert[known]  # it meets the sums as the expert's own
        return given

    return FaultVariant(words, with_inputs(change), needs_whole_call=True)


def _places(experts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the experts that a call visits, in order, and each slot's index among them."""
    visited = experts[experts >= 0].unique()
    return visited, torch.searchsorted(visited, experts.clamp(min=0))


def _beside(step: int) -> Callable[[Tensor], Tensor]:
    def other(experts: Tensor) -> Tensor:
        visited, place = _places(experts)
        found = visited[(place + step).clamp(0, len(visited) - 1)]
        return torch.where(experts < 0, experts, found)

    return other


def _as_places(experts: Tensor) -> Tensor:
    """Take expert numbers for indices among the visited experts; -1 if out of range."""
    visited, _ = _places(experts)
    there = (experts >= 0) & (experts < len(visited))
    return torch.where(there, visited[experts.clamp(0, len(visited) - 1)], -1)


_OTHERS = (_beside(-1), _beside(1), _as_places)


def _met_variants(_context: ComponentContext) -> Iterator[FaultVariant]:
    yield _met("the matrices of the expert visited before", _OTHERS[0])
    yield _met("the matrices of the next expert visited", _OTHERS[1])
    yield _met("numbers of experts taken for places among the visited ones", _OTHERS[2])


def _meets(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    """Propose variants with which, in some call, moved slots are mostly wrong, others not."""
    wrong, experts = wrong_slots(record), record.inputs["experts"]
    if wrong is None or not bool(wrong.any()):
        return
    counts = list(record.rows or (len(experts),))
    telling = (record.outputs["out"] != 0).any(-1) | (record.expected["out"] != 0).any(-1)
    sides = (tensor.split(counts) for tensor in (wrong, telling, experts))
    calls = list(zip(*sides, strict=True))
    for variant, other in zip(_met_variants(context), _OTHERS, strict=True):
        if any(_is_met(other, *call) for call in calls):
            yield variant


def _is_met(
    other: Callable[[Tensor], Tensor], wrong: Tensor, telling: Tensor, experts: Tensor
) -> bool:
    """Compare moved and unmoved slots; slots that are zero on both sides carry no evidence."""
    if not bool((experts >= 0).any()):
        return False  # a call of a rank that holds none of its experts
    same = other(experts) == experts
    return _mostly(wrong[~same & telling]) and not _mostly(wrong[same & telling])


def _mostly(marked: Tensor) -> bool:
    return bool(marked.numel()) and float(marked.double().mean()) > 0.5


def _is_fused(kept: WeightStorage) -> bool:
    return kept.linear and kept.role.rpartition(".")[2] in {"w13", "proj"}


_ROWS = FaultFamily("M16", "right size, wrong place: text is garbled", _REMEDY)

WRONG_ROWS_FAULTS = (
    _ROWS.fault(
        "cut_by_two_ranks", "A fused matrix is cut by two ranks, not each of its parts",
        "rows cut by two ranks on", _cut_by_rank(2), needs=_is_fused, whole=True,
    ),
    _ROWS.fault(
        "cut_by_four_ranks", "A fused matrix is cut by four ranks, not each of its parts",
        "rows cut by four ranks on", _cut_by_rank(4), needs=_is_fused, whole=True,
    ),
    _ROWS.fault(
        "groups_mixed", "Rows are cut by heads in front of a reshape by groups",
        "rows that belong to other groups on", of_values(_by_heads), needs=is_matrix,
    ),
    _ROWS.fault(
        "ranks_turned", "Two ranks hold each other's rows",
        "the halves of the rows exchanged on", of_values(_ranks_turned), needs=is_matrix,
    ),
    _ROWS.fault(
        "next_expert", "Expert slots hold the next expert",
        "the next expert's rows on", _next_expert(1), needs=is_routed,
    ),
    _ROWS.fault(
        "first_expert", "Expert slots hold the first expert",
        "the first expert's rows on", _next_expert(0), needs=is_routed,
    ),
    ModelFault(
        "M16.visited",
        "Rows meet the matrices of another expert that the call visits",
        "slots get what their expert would not say: text is garbled, nothing is NaN",
        "Keep one map from an expert's number to its place, and look every group up in it.",
        lambda context: context.role in _EXPERTS,
        _met_variants,
        _meets,
    ),
)  # fmt: skip


# --------------------------------------------------------------------------------------------------
# M17: a tensor is silently missing, so that leftover memory or a default is used.
#
# A bias, a norm, a correction bias, a shard, the lower half of a fused matrix (vllm issue 34859,
# llama.cpp issue 27178, atlas issue 186). Without effect where the default is what was stored.


def _zeros(value: Tensor) -> Tensor:
    return torch.zeros_like(value)


def _ones(value: Tensor) -> Tensor:
    return torch.ones_like(value)


def _half(value: Tensor, *, second: bool) -> Tensor:
    made, middle = value.clone(), len(value) // 2
    made[slice(middle, None) if second else slice(middle)] = 0
    return made


def _is_vector(kept: WeightStorage) -> bool:
    return is_number(kept) and not kept.linear


_ABSENT = FaultFamily(
    "M17",
    "one term or one factor is missing; the rest is right",
    "Compare the names in the files with those that were read; refuse what was left over.",
)

TENSOR_ABSENT_FAULTS = (
    _ABSENT.fault(
        "zeros", "A tensor is absent: zeros", "zeros in place of", of_values(_zeros), is_number
    ),
    _ABSENT.fault(
        "ones", "A norm or bias is absent: ones", "ones in place of", of_values(_ones), _is_vector
    ),
    _ABSENT.fault(
        "second_half",
        "The second half of a matrix is absent",
        "zeros in the second half of",
        of_values(lambda value: _half(value, second=True)),
        is_matrix,
    ),
    _ABSENT.fault(
        "first_half",
        "The first half of a matrix is absent",
        "zeros in the first half of",
        of_values(lambda value: _half(value, second=False)),
        is_matrix,
    ),
)


# --------------------------------------------------------------------------------------------------
# M19: a module has another precision than the checkpoint states.
#
# A rule that quantises every 2D tensor includes the router, fusion includes the indexer's key
# projection, a fallback decodes and quantises again (TensorRT-LLM issue 11989, atlas issue 186,
# vllm issue 47318). All of it is noise of a known kind, so only identical codes prove it.


def _through(form: BlockFormat) -> Change:
    def change(_context: ComponentContext, _name: str, weight: Weight) -> Weight | None:
        values = weight.values(torch.float32)
        if values.ndim != 2 or (not form.ragged and values.shape[-1] % form.block[1]):
            return None
        made = dequantise(quantise(values.contiguous(), form), torch.float64)
        return Weight(value=made, input_scale=weight.input_scale)

    return change


def per_tensor_fp8(values: Tensor) -> Tensor:
    """Round through E4M3 with one scale for the whole tensor, as loaders convert to FP8."""
    scale = (values.abs().amax() / 448).float().clamp(min=1e-12)
    codes = encode_array(values.float() / scale, E4M3)
    return decode_array(codes, E4M3).double() * scale


def _per_tensor(_context: ComponentContext, _name: str, weight: Weight) -> Weight | None:
    value = per_tensor_fp8(numbers_of(weight))
    return Weight(value=value, input_scale=weight.input_scale)


def _precision_fault(variant: str, form: str, change: Change, needs: Needs) -> ModelFault:
    words = FaultTexts(
        f"M19.{variant}",
        f"A weight is quantised to {form} though the checkpoint keeps it otherwise",
        "noise of that format: routes flip, scores are coarse",
        "State the precision of every module once, and compare it with what was loaded.",
        f"quantising to {form} of",
    )
    return weight_fault(words, change, needs)


WRONG_PRECISION_FAULTS = (
    _precision_fault("nvfp4", "NVFP4", _through(NVFP4), is_plain_matrix),
    _precision_fault("mxfp4", "MXFP4", _through(MXFP4), is_matrix),
    _precision_fault("fp8_block", "FP8 in blocks of 128x128", _through(FP8_128X128_F32), is_matrix),
    _precision_fault("fp8_tensor", "FP8 with one scale", _per_tensor, is_matrix),
    _precision_fault("nvfp4_again", "NVFP4 a second time", _through(NVFP4), has_codes),
)


# --------------------------------------------------------------------------------------------------
# M20: a step after weight loading is skipped, repeated, or applied to packed bytes.
#
# Rows shuffled a second time at a reload, alphas of the previous weights, block scales computed
# from nibble pairs (sglang issue 28963, vllm issue 54125, Model-Optimizer issue 2038). A swizzle
# that was done twice or not at all is M11.

_RUN = 8  # rows that a kernel's shuffle moves together


def _shuffled(value: Tensor) -> Tensor:
    """Shuffle runs of eight rows a second time: every second run first."""
    if value.ndim != 2 or len(value) % (2 * _RUN):
        return value
    runs = value.unflatten(0, (-1, _RUN))
    return torch.cat((runs[0::2], runs[1::2])).flatten(0, 1)


def _scale_before(context: ComponentContext, name: str, weight: Weight) -> Weight | None:
    """Return the tensor scale of the same weight in the previous layer: an alpha not renewed."""
    if weight.tensor_scale is None or not context.component.layer:
        return None
    other = context.sibling(f"layers.{context.component.layer - 1}.{context.role}")
    if other is None or name not in other.weights:
        return None
    scale = other.weights[name].tensor_scale
    if scale is None or scale.shape != weight.tensor_scale.shape:
        return None
    return replace(weight, tensor_scale=scale, _decoded={})


def _of_bytes(tensor: QuantisedTensor, scales: Tensor) -> Tensor | None:
    """Compute block scales from the largest byte of 16; half as many as there should be."""
    if tensor.format.scale not in {E4M3, UE8M0} or tensor.codes.shape[-1] % 16:
        return None
    largest = tensor.codes.unflatten(-1, (-1, 16)).amax(-1).float() / tensor.format.element.largest
    made = decode_array(encode_array(largest.clamp(min=2**-9), E4M3), E4M3)
    repeats = -(-scales.shape[-1] // made.shape[-1])
    return made.repeat_interleave(repeats, -1)[..., : scales.shape[-1]]


_AFTER_LOAD = FaultFamily(
    "M20",
    "right after the first load, wrong after the next; or wrong for one class of modules",
    "Mark every module with the layout that it is in, and refuse a second pass.",
)

AFTER_LOADING_FAULTS = (
    _AFTER_LOAD.fault(
        "shuffled_again",
        "Rows were shuffled for the kernel a second time",
        "a second shuffle of the rows of",
        of_values(_shuffled),
        is_matrix,
    ),
    _AFTER_LOAD.fault(
        "scale_before",
        "The tensor scale is still that of another weight",
        "the tensor scale of the layer before on",
        _scale_before,
        has_tensor_scale,
    ),
    _AFTER_LOAD.fault(
        "scales_of_bytes",
        "Block scales were worked out from packed bytes",
        "block scales worked out from packed bytes on",
        of_scales(_of_bytes),
        is_packed,
    ),
)


# --------------------------------------------------------------------------------------------------
# O07: a parameter is loaded under the prefix of another module.
#
# Found in the first field report: the indexer's compressor was read from the main compressor, which
# has four times as many rows, so that the first of them fit. Variants: the same module of the next
# layer, and parts of one module exchanged.


def _taken(weight: Weight, other: Weight | None) -> Weight | None:
    """Return the rows and columns of another parameter that fit, if it has enough of them."""
    if other is None or len(other.shape) != len(weight.shape):
        return None
    if any(there < here for there, here in zip(other.shape, weight.shape, strict=True)):
        return None
    value = numbers_of(other)
    for axis, extent in enumerate(weight.shape):
        value = value.narrow(axis, 0, extent)
    return Weight(value=value.contiguous(), input_scale=weight.input_scale)


def _from_main(context: ComponentContext, name: str, weight: Weight) -> Weight | None:
    other = context.sibling(context.name.replace(".indexer.", "."))
    if other is None or other.name == context.name:
        return None
    return _taken(weight, other.weights.get(name.replace(".indexer.", ".")))


def _from_layer(step: int) -> Change:
    def change(context: ComponentContext, name: str, weight: Weight) -> Weight | None:
        layer = context.component.layer
        if layer is None:
            return None
        other = context.sibling(f"layers.{layer + step}.{context.role}")
        return None if other is None else _taken(weight, other.weights.get(name))

    return change


def _from_partner(context: ComponentContext, name: str, weight: Weight) -> Weight | None:
    """Take the next part of the same module: gate for latent, up for gate."""
    stem = name.rpartition(".")[0]
    parts = [matrix for matrix in matrices(context) if matrix.rpartition(".")[0] == stem]
    other = parts[(parts.index(name) + 1) % len(parts)]
    return _taken(weight, context.weights[other]) if other != name else None


def _in_indexer(kept: WeightStorage) -> bool:
    return ".indexer.compressor" in kept.role


def _in_layer(kept: WeightStorage) -> bool:
    return is_number(kept) and kept.role not in {"embed", "head", "norm", "hc_head"}


def _has_partner(kept: WeightStorage) -> bool:
    return kept.linear and kept.role.rpartition(".")[2] in {"w13", "proj"}


def _prefix_fault(variant: str, what: str, change: Change, needs: Needs) -> ModelFault:
    words = FaultTexts(
        f"O07.{variant}",
        f"A parameter is read from {what}",
        "right size, wrong numbers: scores or values mean nothing",
        "Map every parameter by its full name; a tensor that is read twice is a warning.",
        f"reading {what} in place of",
    )
    return weight_fault(words, change, needs)


PREFIX_MIXUP_FAULTS = (
    _prefix_fault("main_compressor", "the main compressor", _from_main, _in_indexer),
    _prefix_fault("layer_before", "the layer before", _from_layer(-1), _in_layer),
    _prefix_fault("layer_behind", "the layer after", _from_layer(1), _in_layer),
    _prefix_fault("other_part", "the other part of its module", _from_partner, _has_partner),
)


# --------------------------------------------------------------------------------------------------
# O08: a rule that skips fused parameters at loading also skips others, which stay uninitialised.
#
# Found in the first field report: a skip rule for fused parameters also left out the scales of q_b,
# o_a and o_b. The contents of such memory are unknown; the usual ones are covered: one repeated
# byte, the bytes of the tensor that was there before, zeros (M04 and M17).

_FRESH = 0xCD  # debug allocators fill fresh memory with it
_FREED = 0xDD  # and freed memory with this


def _filled(codes: Tensor, byte: int) -> Tensor:
    octets = torch.full((codes.numel() * codes.element_size(),), byte, dtype=torch.uint8)
    return octets.view(codes.dtype).reshape(codes.shape)


def _codes_filled(byte: int) -> Change:
    def change(_context: ComponentContext, _name: str, weight: Weight) -> Weight | None:
        if weight.codes is None:
            return None
        return replace(weight, codes=_filled(weight.codes, byte), _decoded={})

    return change


def _scales_filled(byte: int) -> Change:
    def change(_context: ComponentContext, _name: str, weight: Weight) -> Weight | None:
        if weight.block_scale is None:
            return None
        return replace(weight, block_scale=_filled(weight.block_scale, byte), _decoded={})

    return change


def _codes_as_scales(_context: ComponentContext, _name: str, weight: Weight) -> Weight | None:
    """Fill the scales with the first bytes of the codes, as reused memory would."""
    scale, codes = weight.block_scale, weight.codes
    if scale is None or codes is None or scale.dtype is not torch.uint8:
        return None
    octets = codes.flatten()
    count = -(-scale.numel() // octets.numel())
    stale = octets.repeat(count)[: scale.numel()] & 0x7F  # a scale has no sign
    return replace(weight, block_scale=stale.reshape(scale.shape), _decoded={})


_SKIPPED = FaultFamily(
    "O08",
    "noise of any size, another one at every start",
    "Fill parameters with NaN before loading, and refuse what is still NaN after it.",
)

SKIPPED_LOAD_FAULTS = (
    _SKIPPED.fault(
        "codes_fresh", "Codes were never loaded: fresh memory", "bytes 0xCD as codes of",
        _codes_filled(_FRESH), has_codes,
    ),
    _SKIPPED.fault(
        "codes_freed", "Codes were never loaded: freed memory", "bytes 0xDD as codes of",
        _codes_filled(_FREED), has_codes,
    ),
    _SKIPPED.fault(
        "scales_fresh", "Block scales were never loaded: fresh memory",
        "bytes 0xCD as block scales of", _scales_filled(_FRESH), has_codes,
    ),
    _SKIPPED.fault(
        "scales_stale", "Block scales were never loaded: bytes of another tensor",
        "stale codes as block scales of", _codes_as_scales, has_scale_bytes,
    ),
)  # fmt: skip
