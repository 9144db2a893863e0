"""Faults of block scales: M04 unset, M06 power of 2, M08 range, M12 address, O06 rank, O09 ones."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from degarble.harness.engine.faults import operand_faults as operands
from degarble.harness.engine.faults.model_faults import ChangedWeights, FaultVariant, ModelFault
from degarble.harness.engine.faults.regions import differing, expert_of, likeness, wrong_slots
from degarble.harness.engine.faults.weight_faults import (
    FaultFamily,
    FaultTexts,
    has_codes,
    has_scale_bytes,
    has_tensor_scale,
    kept,
    of_scales,
    scale_numbers,
    weight_fault,
    with_scales,
    with_tensor_scale,
)
from degarble.harness.formats.codec import decode_array, encode_array
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.number_formats import E2M1, E4M3, UE8M0, Rounding
from degarble.harness.formats.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext
    from degarble.harness.engine.faults.operand_faults import Making
    from degarble.harness.engine.faults.weight_faults import Change, WeightStorage
    from degarble.harness.formats.number_formats import BlockFormat
    from degarble.harness.formats.quantise import QuantisedTensor

    Scaling = Callable[[QuantisedTensor, Tensor], Tensor]


# --------------------------------------------------------------------------------------------------
# M04: a scale was never loaded, or is zero, infinity, NaN or a tiny number.
#
# A parameter with one slot a part is filled in some slots only; experts that calibration never
# visited have 0 or NaN; then comes the usual max() or reciprocal (vllm issues 45212 and 34914,
# sglang issue 29151). Concerns the tensor scale if the format has one, else the block scales.

TINY = 1e-23  # scale of dead experts in a published checkpoint (vllm issue 34914)
UNSET = float(torch.tensor(bytearray(b"\xcd" * 4), dtype=torch.uint8).view(torch.float32))
_BYTES = {0.0: 0x00, math.inf: 0x7E, TINY: 0x01, UNSET: 0xCD}  # their byte in 8-bit scales
_NAN_BYTE = {"E4M3": 0x7F, "UE8M0": 0xFF}


def _byte_of(number: float, scale: str) -> int:
    return _NAN_BYTE[scale] if math.isnan(number) else _BYTES[number]


def _scale_set(number: float) -> Change:
    def change(context: ComponentContext, name: str, weight: Weight) -> Weight | None:
        if weight.tensor_scale is None:
            return _blocks_set(number)(context, name, weight)
        return replace(
            weight, tensor_scale=torch.full_like(weight.tensor_scale, number), _decoded={}
        )

    return change


def _blocks_set(number: float) -> Change:
    def change(_context: ComponentContext, _name: str, weight: Weight) -> Weight | None:
        scale, encoding = weight.block_scale, weight.storage
        if scale is None or encoding is None:
            return None
        value = number
        if encoding.format.scale.bits == 8:
            value = _byte_of(number, encoding.format.scale.name)
        return replace(weight, block_scale=torch.full_like(scale, value), _decoded={})

    return change


def _input_zero(
    context: ComponentContext, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    zero = torch.zeros_like(outputs["tensor_scale"])
    return {**operands.requantised(context, inputs, outputs, zero), "tensor_scale": zero}


def _unset_fault(
    variant: str, what: str, effect: str, change: Change, *, blocks: bool
) -> ModelFault:
    which = "block scales" if blocks else "scale"
    words = FaultTexts(
        f"M04.{variant}",
        f"The slot of the {which} holds {what}",
        effect,
        "Check that every element of every scale was written, and refuse 0, infinity and NaN.",
        f"{what} as {which} of",
    )
    return weight_fault(words, change, has_tensor_scale if blocks else has_codes)


SCALE_UNSET_FAULTS = (
    _unset_fault("zero", "zero", "its outputs are zero", _scale_set(0.0), blocks=False),
    _unset_fault("tiny", "1e-23", "its outputs all but vanish", _scale_set(TINY), blocks=False),
    _unset_fault("nan", "NaN", "its outputs are NaN", _scale_set(math.nan), blocks=False),
    _unset_fault("infinite", "infinity", "NaN and infinities", _scale_set(math.inf), blocks=False),
    _unset_fault(
        "unset", "memory that nobody wrote", "a huge gain, or NaN", _scale_set(UNSET), blocks=False
    ),
    _unset_fault("blocks_zero", "zeros", "its outputs are zero", _blocks_set(0.0), blocks=True),
    _unset_fault("blocks_nan", "NaN", "its outputs are NaN", _blocks_set(math.nan), blocks=True),
    operands.making_fault(
        FaultTexts(
            "M04.input_zero",
            "The input scale is zero, and its reciprocal infinite",
            "codes saturate or are NaN for every token that comes here",
            "Refuse an input scale of zero at load; give unvisited experts the layer's largest.",
            "an input scale of zero at",
        ),
        _input_zero,
        operands.has_tensor_scale,
    ),
)


# --------------------------------------------------------------------------------------------------
# M06: a scale is rounded to a power of two while the codes stay those of the exact scale.
#
# Rounding up inflates each block by a factor in [1, 2), truncation shrinks it by one in (0.5, 1]; a
# wrong exponent rule is off by 2 or 1/2 (transformers issue 47030, sglang issues 28418 and 39193,
# ATOM issue 1601). Without effect on scales that are powers of two already.

_POWER_REMEDY = "Round the scale first and quantise with the rounded one, or keep it as it is."


def rounded_up(scales: Tensor) -> Tensor:
    """Round up to a power of two."""
    # frexp: scales = mantissa * 2^exponent with mantissa in [0.5, 1); 0.5 is a power of two.
    mantissa, exponent = torch.frexp(scales)
    return torch.where(mantissa == 0.5, scales, torch.ldexp(torch.ones_like(scales), exponent))


def truncated(scales: Tensor) -> Tensor:
    """Round down to a power of two, by keeping the exponent alone."""
    _, exponent = torch.frexp(scales)
    return torch.where(scales == 0, scales, torch.ldexp(torch.ones_like(scales), exponent - 1))


def nearest(scales: Tensor) -> Tensor:
    """Round to the power of two that is nearest in the logarithm."""
    return torch.where(scales == 0, scales, torch.exp2(torch.log2(scales).round()))


def _is_not_exponents(form: BlockFormat) -> bool:
    return form.scale != UE8M0


def _rounded_after(change: Callable[[Tensor], Tensor]) -> Making:
    """Let the producer round the scale after the codes are made."""

    def making(
        context: ComponentContext, _inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        form, scales = operands.activation_format(context), outputs["block_scale"]
        assert form is not None, "called only where codes are made"
        if form.scale.bits == 32:
            return {**outputs, "block_scale": change(scales)}
        made = change(decode_array(scales, form.scale)).clamp(max=form.scale.largest)
        return {**outputs, "block_scale": encode_array(made, form.scale)}

    return making


def _exponents_down(
    context: ComponentContext, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Truncate exponents where the format's rule rounds up, so that codes saturate."""
    rules = tuple(replace(rule, scale_rounding=Rounding.DOWN) for rule in CANONICAL.rules)
    return operands.requantised(context, inputs, outputs, dialect=replace(CANONICAL, rules=rules))


def _weight(
    variant: str, how: str, change: Callable[[Tensor], Tensor], *, tensor: bool = False
) -> ModelFault:
    which = "tensor scale" if tensor else "block scales"
    words = FaultTexts(
        f"M06.{variant}",
        f"The {which} {how} when read",
        "too large or too small by a factor below 2, codes unchanged",
        _POWER_REMEDY,
        f"{which} that {how} on",
    )
    lifted = with_tensor_scale(change) if tensor else of_scales(lambda _tensor, s: change(s))
    return weight_fault(words, lifted, has_tensor_scale if tensor else has_codes)


def _activation(variant: str, how: str, change: Callable[[Tensor], Tensor]) -> ModelFault:
    words = FaultTexts(
        f"M06.activation_{variant}",
        f"Activations are quantised with exact scales, which {how} afterwards",
        "each block of inputs is wrong by a factor below 2",
        _POWER_REMEDY,
        f"scales that {how} after their codes at",
    )
    return operands.making_fault(words, _rounded_after(change), _is_not_exponents)


_UP, _DOWN = "are rounded up to powers of two", "are cut to powers of two"
POWER_OF_TWO_FAULTS = (
    _weight("up", _UP, rounded_up),
    _weight("down", _DOWN, truncated),
    _weight("nearest", "are rounded to the nearest power of two", nearest),
    _weight("exponent_off", "have exponents that are one too small", lambda scales: scales / 2),
    _weight("tensor_down", "is cut to a power of two", truncated, tensor=True),
    _activation("up", _UP, rounded_up),
    _activation("down", _DOWN, truncated),
    operands.making_fault(
        FaultTexts(
            "M06.exponent_rule",
            "The exponent of a block is cut where it has to be rounded up",
            "the largest codes of every block saturate",
            "Round amax over the largest code up to a power of two.",
            "exponents cut instead of rounded up at",
        ),
        _exponents_down,
        lambda form: form.scale == UE8M0,
    ),
)


# --------------------------------------------------------------------------------------------------
# M08: block scales leave the range that their format, or its reader, can represent.
#
# E4M3 is subnormal below 2^-6 and zero below 2^-9. A reader decodes subnormals by the formula of
# normal numbers, flushes them, or encodes all of them again with five bits of exponent; a producer
# chooses a tensor scale that makes them small (flashinfer issue 3932, vllm issue 34577). Without
# effect if no block scale is that small.


_HALF = 8  # numbers of a block of 16
_PARTS = (("first_half", "first", slice(_HALF)), ("second_half", "last", slice(_HALF, None)))
_NORMAL = 2.0**-6  # the smallest normal E4M3 number
_SHIFT = 2.0**-14  # what a tensor scale that is too large takes from block scales
_ASSUMED = 2.0  # an encoder that drops the top bit of the exponent takes it for granted


def _as_normal(_tensor: QuantisedTensor, scales: Tensor) -> Tensor:
    """Read subnormal m / 8 * 2^-6 as (1 + m / 8) * 2^-7."""
    wrong = (1 + scales / _NORMAL) * (_NORMAL / 2)
    return torch.where((scales < _NORMAL) & (scales > 0), wrong, scales)


def _flushed(_tensor: QuantisedTensor, scales: Tensor) -> Tensor:
    return torch.where(scales < _NORMAL, 0.0, scales)


def _shifted(change: Callable[[QuantisedTensor, Tensor], Tensor] | None = None) -> Scaling:
    """Make block scales small by the tensor scale, optionally misread them, and undo the factor."""

    def shifted(tensor: QuantisedTensor, scales: Tensor) -> Tensor:
        small = decode_array(encode_array(scales * _SHIFT, E4M3), E4M3)
        return (small if change is None else change(tensor, small)) / _SHIFT

    return shifted


def _five_bits(_tensor: QuantisedTensor, scales: Tensor) -> Tensor:
    """Flush scales below 2, as five bits of exponent with the top one assumed do."""
    return torch.where(scales < _ASSUMED, 0.0, scales)


def _unit(
    context: ComponentContext, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    one = torch.ones_like(outputs["tensor_scale"])
    return {**operands.requantised(context, inputs, outputs, one), "tensor_scale": one}


def _next_code(
    context: ComponentContext, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Increase each scale code by one: rounded up, or one code too far."""
    return operands.with_block_scales(
        context, inputs, outputs, lambda _, codes: (codes.int() + 1).clamp(max=E4M3.largest_code)
    )


def _of_half(part: slice) -> Making:
    """Take the largest magnitude of a part of each block for that of the whole."""

    def change(
        context: ComponentContext, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        def scales(blocks: Tensor, _codes: Tensor) -> Tensor:
            return encode_array(blocks[..., part].abs().amax(-1) / E2M1.largest, E4M3)

        return operands.with_block_scales(context, inputs, outputs, scales)

    return change


_RANGE = FaultFamily(
    "M08",
    "small blocks are wrong by a factor, or vanish",
    "Choose the tensor scale so that block scales use the upper end of E4M3.",
)

SCALE_RANGE_FAULTS = (
    _RANGE.fault(
        "subnormal",
        "Subnormal block scales are decoded by the formula of normal ones",
        "subnormal block scales read as normal ones on",
        of_scales(_as_normal),
        has_tensor_scale,
    ),
    _RANGE.fault(
        "flushed",
        "Subnormal block scales are flushed to zero",
        "subnormal block scales flushed to zero on",
        of_scales(_flushed),
        has_tensor_scale,
    ),
    _RANGE.fault(
        "underflow",
        "The tensor scale is so large that block scales are subnormal",
        "block scales that were rounded 2^14 too small on",
        of_scales(_shifted()),
        has_tensor_scale,
    ),
    _RANGE.fault(
        "small_as_normal",
        "The tensor scale makes block scales subnormal, and they are decoded as normal ones",
        "block scales 2^14 too small, read as normal ones, on",
        of_scales(_shifted(_as_normal)),
        has_tensor_scale,
    ),
    _RANGE.fault(
        "small_flushed",
        "The tensor scale makes block scales subnormal, and they are flushed to zero",
        "block scales 2^14 too small, flushed to zero, on",
        of_scales(_shifted(_flushed)),
        has_tensor_scale,
    ),
    _RANGE.fault(
        "five_bits",
        "Block scales are encoded again with five bits of exponent, the top one assumed",
        "block scales below 2 lost on",
        of_scales(_five_bits),
        has_tensor_scale,
    ),
    operands.making_fault(
        FaultTexts(
            "M08.activation_unit",
            "Activations are quantised without a tensor scale",
            "block scales become subnormal or vanish: small inputs are lost",
            "Give the quantiser the input scale that the checkpoint holds.",
            "a tensor scale of 1 at",
        ),
        _unit,
        operands.has_tensor_scale,
    ),
    operands.making_fault(
        FaultTexts(
            "M08.next_code",
            "Block scales of activations are one code too large",
            "numbers are coded too coarsely, by up to an eighth: the largest codes stay unused",
            "Round a block's scale to the nearest E4M3 code, once.",
            "the next larger code for every block scale at",
        ),
        _next_code,
        operands.has_tensor_scale,
    ),
    *(
        operands.making_fault(
            FaultTexts(
                f"M08.{name}",
                f"A block's scale follows from its {text} 8 numbers alone",
                "blocks whose largest number is among the others are clipped",
                "Take the largest magnitude of all numbers of a block.",
                f"scales by the {text} 8 numbers of every block at",
            ),
            _of_half(part),
            operands.has_tensor_scale,
        )
        for name, text, part in _PARTS
    ),
)


# --------------------------------------------------------------------------------------------------
# M12: the address of scales or codes is computed wrongly: offsets, strides, shared views.
#
# An expert's offset without rounding up to 128 rows, a view of the first layer for all layers, a
# strided row read as dense, a scale column off by one (flashinfer issue 4044, vllm issues 42984 and
# 56248, ATOM issue 1466). The first expert, layer, row or column is exact; later ones are not.
#
# Shape letters: E experts, R and C block scales along rows and columns.

_ALIKE = 0.2  # cosine of outputs of which parts have another scale
_FEW = 0.02  # of numbers that differ
_PART = 64  # rows of gate in a tile that holds gate and up
_TILE = 128  # rows to which every expert's scales are padded
_ADDRESS_REMEDY = "Take strides and offsets from the tensor, and pad every expert on its own."


def _with_scales_of(weight: Weight, scales: Tensor) -> Weight | None:
    if not weight.is_quantised or scale_numbers(weight.quantised()).shape != scales.shape:
        return None
    value = with_scales(weight.quantised(), scales)
    return Weight(value=value, input_scale=weight.input_scale)


def _of_expert(context: ComponentContext, name: str, number: int) -> Weight | None:
    stem, _, rest = name.partition(".experts.")
    other = f"{stem}.experts.{number}.{rest.partition('.')[2]}"
    return context.weights.get(other)


def _unrounded_offset(context: ComponentContext, name: str, weight: Weight) -> Weight | None:
    """Read scales from row e * R on, though every expert begins at a multiple of 128."""
    number = expert_of(name)
    if number < 0 or not weight.is_quantised:
        return None
    own = scale_numbers(weight.quantised())
    rows = own.shape[-2]
    padded = -(-rows // _TILE) * _TILE
    begin = number * rows
    found = []
    for row in range(begin, begin + rows):
        holder = _of_expert(context, name, row // padded)
        if holder is None or row % padded >= rows:
            found.append(torch.zeros_like(own[0]))
        else:
            found.append(_scales(holder)[row % padded])
    return _with_scales_of(weight, torch.stack(found))


def _scales(weight: Weight) -> Tensor:
    return scale_numbers(weight.quantised())


def _previous_expert(context: ComponentContext, name: str, weight: Weight) -> Weight | None:
    holder = _of_expert(context, name, expert_of(name) - 1)
    return None if holder is None else _with_scales_of(weight, _scales(holder))


def _first_layer(context: ComponentContext, name: str, weight: Weight) -> Weight | None:
    """Return the scales of the first layer that has such a weight."""
    for layer in range(context.component.layer or 0):
        other = context.sibling(f"layers.{layer}.{context.role}")
        if other is not None and name in other.weights:
            holder = other.weights[name]
            return _with_scales_of(weight, _scales(holder)) if holder.is_quantised else None
    return None


def _dense_rows(_context: ComponentContext, _name: str, weight: Weight) -> Weight | None:
    """Read rows that are one block apart as if they were contiguous."""
    if weight.codes is None or weight.storage is None or weight.codes.ndim != 2:
        return None
    codes = weight.codes
    gap = 8 if weight.storage.format.packed else 16
    stored = torch.nn.functional.pad(codes, (0, gap)).flatten()[: codes.numel()]
    return replace(weight, codes=stored.reshape(codes.shape).contiguous(), _decoded={})


def _visited_before(call: ComponentCall) -> ComponentCall:
    """Combine an expert's codes with the scales of the previous expert that the call visits."""

    def faulty(inputs: Mapping[str, Tensor], weights: Mapping[str, Any]) -> Mapping[str, Tensor]:
        visited = [number for number in inputs["experts"].unique().tolist() if number >= 0]
        before = dict(pairwise(reversed(visited)))

        def changed(name: str, weight: Weight) -> Weight:
            number = before.get(expert_of(name))
            if number is None:
                return weight
            holder = weights[name.replace(f".{expert_of(name)}.", f".{number}.")]
            return _with_scales_of(weight, _scales(holder)) or weight

        return call(inputs, ChangedWeights(weights, changed))

    return faulty


def _visited_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    words = f"the scales of the visited expert before on {context.name}"
    yield FaultVariant(words, _visited_before, needs_whole_call=True)


def _visited_signature(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    """Propose if outputs resemble the expected ones and the first expert is mostly right."""
    wrong, experts = wrong_slots(record), record.inputs["experts"]
    if wrong is None or not bool(wrong.any()) or likeness(record) < _ALIKE:
        return
    if float(wrong[experts == experts[experts >= 0].min()].double().mean()) < 0.5:
        yield from _visited_variants(context)


def _up_offset(part: int) -> Change:
    """Look up's scales up `part` rows after gate's, though tiles of 128 rows alternate."""

    def change(context: ComponentContext, name: str, weight: Weight) -> Weight | None:
        stem, _, which = name.rpartition(".")
        gate = context.weights.get(f"{stem}.w1")
        if which != "w3" or gate is None or not weight.is_quantised or not gate.is_quantised:
            return None
        of_gate, own = _scales(gate), _scales(weight)
        if own.ndim != 2 or of_gate.shape != own.shape:
            return None
        height = -(-len(own) // _TILE) * _TILE
        of_gate, of_up = (pad(tensor, (0, 0, 0, height - len(own))) for tensor in (of_gate, own))
        row = torch.arange(len(own))
        tile, within = row // _TILE * _TILE, row % _TILE // part * part + part + row % part
        near = of_gate[tile + within.clamp(max=_TILE - 1)]
        far = of_up[tile + (within - _TILE).clamp(min=0)]
        return _with_scales_of(weight, torch.where((within < _TILE)[:, None], near, far))

    return change


def _of_up() -> ModelFault:
    fault = weight_fault(
        FaultTexts(
            "M12.up_offset",
            "Scales of up are read after a tile of gate that is not filled up to 128 rows",
            "up is scaled by gate's numbers or by padding; gate is exact",
            _ADDRESS_REMEDY,
            f"the scales after {_PART} rows of gate on",
        ),
        _up_offset(_PART),
        lambda kept: has_scale_bytes(kept) and kept.name.endswith(".w3"),
    )

    def signature(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
        """Propose if nearly all of gate is right."""
        mask = differing(record)
        if mask is None or float(mask[:, : mask.shape[1] // 2].double().mean()) < _FEW:
            yield from fault.signature(context, record)

    return replace(fault, signature=signature)


def _step_before(call: ComponentCall) -> ComponentCall:
    """Use both operands' scales of the previous step of K; the first step has its own."""

    def delayed(scales: Tensor) -> Tensor:
        return torch.cat((scales[..., :1], scales[..., :-1]), dim=-1)

    def changed(_name: str, weight: Weight) -> Weight:
        if not weight.is_quantised:
            return weight
        return _with_scales_of(weight, delayed(_scales(weight))) or weight

    def faulty(inputs: Mapping[str, Tensor], weights: Mapping[str, Any]) -> Mapping[str, Tensor]:
        if "block_scale" not in inputs:  # with some switches a linear gets plain numbers
            return call(inputs, weights)
        given = {**inputs, "block_scale": delayed(inputs["block_scale"])}
        return call(given, ChangedWeights(weights, changed))

    return faulty


def _step_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    yield FaultVariant(f"scales of the step of K before on {context.name}", _step_before)


def _step_signature(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    if "out" not in record.outputs or likeness(record) > _ALIKE:
        yield from _step_variants(context)


def _reads_codes(context: ComponentContext) -> bool:
    coded = any(each.name == "codes" for each in context.component.inputs)
    return coded and any(map(has_codes, kept(context)))


def _column_off(_tensor: QuantisedTensor, scales: Tensor) -> Tensor:
    return scales.roll(-1, -1)


def _row_off(_tensor: QuantisedTensor, scales: Tensor) -> Tensor:
    return scales.roll(-1, -2)


def _takes_slots(context: ComponentContext) -> bool:
    return any(each.name == "experts" for each in context.component.inputs)


def _routed(kept: WeightStorage) -> bool:
    return has_codes(kept) and kept.routed


_ADDRESS = FaultFamily("M12", "exact at first, wrong after it", _ADDRESS_REMEDY)

SCALE_ARITHMETIC_FAULTS = (
    _ADDRESS.fault(
        "expert_offset",
        "Scales of an expert are read from an offset that is not rounded up to 128 rows",
        "expert offsets without rounding up to 128 rows on",
        _unrounded_offset,
        _routed,
    ),
    _ADDRESS.fault(
        "previous_expert",
        "Every expert reads the scales of the one before it",
        "the scales of the expert before on",
        _previous_expert,
        _routed,
    ),
    _ADDRESS.fault(
        "first_layer",
        "Every layer reads the scales of the first one",
        "the scales of the first such layer on",
        _first_layer,
    ),
    _ADDRESS.fault(
        "dense_rows",
        "Rows of codes with a gap between them are read as dense",
        "reading strided rows of codes as dense on",
        _dense_rows,
    ),
    _ADDRESS.fault(
        "column_off",
        "The columns of the block scales are off by one",
        "scale columns off by one on",
        of_scales(_column_off),
        moves=True,
    ),
    _ADDRESS.fault(
        "row_off",
        "The rows of the block scales are off by one",
        "scale rows off by one on",
        of_scales(_row_off),
        moves=True,
    ),
    ModelFault(
        id="M12.visited_before",
        title="Every expert of a call reads the scales of the one before it in that call",
        effect="the first expert is exact, all others are scaled by another's numbers",
        remedy=_ADDRESS_REMEDY,
        applies_to=lambda context: any(map(_routed, kept(context))) and _takes_slots(context),
        variants=_visited_variants,
        signature=_visited_signature,
    ),
    _of_up(),
    ModelFault(
        id="M12.step_before",
        title="Every step of K is scaled by the scales of the step before",
        effect="the first step is exact, what follows is wrong by ratios of scales",
        remedy=_ADDRESS_REMEDY,
        applies_to=_reads_codes,
        variants=_step_variants,
        signature=_step_signature,
    ),
)


# --------------------------------------------------------------------------------------------------
# O06: block scales have another rank or dtype than the kernel reads.
#
# Found in the first field report: a scale with one dimension where a formatted block scale belongs,
# and E4M3 scales where float32 or exponents belong. Broadcasting makes it fit.


def _one(_tensor: QuantisedTensor, scales: Tensor) -> Tensor:
    return scales[..., :1, :1].expand_as(scales)


def _of_rows(_tensor: QuantisedTensor, scales: Tensor) -> Tensor:
    return scales[..., :, :1].expand_as(scales)


def _of_columns(_tensor: QuantisedTensor, scales: Tensor) -> Tensor:
    return scales[..., :1, :].expand_as(scales)


def _in_e4m3(tensor: QuantisedTensor, scales: Tensor) -> Tensor | None:
    if tensor.format.scale == E4M3:
        return None
    return decode_array(encode_array(scales, E4M3), E4M3)


def _has_other_scales(kept: WeightStorage) -> bool:
    return kept.form is not None and kept.form.scale != E4M3


_RANK = FaultFamily(
    "O06",
    "every block but the first is wrong by a factor of its own",
    "Check rank, extents and dtype of scales where they are read; broadcast nothing.",
)

SCALE_RANK_FAULTS = (
    _RANK.fault(
        "one_scale", "One block scale serves the whole matrix", "the first block scale for all of",
        of_scales(_one),
    ),
    _RANK.fault(
        "one_a_row", "One block scale serves a row of blocks",
        "the first block scale of each row for all of", of_scales(_of_rows),
    ),
    _RANK.fault(
        "one_a_column", "One block scale serves a column of blocks",
        "the first block scale of each column for all of", of_scales(_of_columns),
    ),
    _RANK.fault(
        "in_e4m3", "Block scales are cast to E4M3", "block scales cast to E4M3 on",
        of_scales(_in_e4m3), _has_other_scales,
    ),
)  # fmt: skip


# --------------------------------------------------------------------------------------------------
# O09: scales are all ones.
#
# Found in the first field report: a block scale filled with ones instead of the FP8 scale.
# Variants: block scales alone, block and tensor scale, or the byte 1, which encodes 1.0 in no scale
# format.


def _one_byte(_context: ComponentContext, _name: str, weight: Weight) -> Weight | None:
    scale = weight.block_scale
    if scale is None or scale.dtype is not torch.uint8:
        return None
    return replace(weight, block_scale=torch.ones_like(scale), _decoded={})


def _both(context: ComponentContext, name: str, weight: Weight) -> Weight | None:
    if weight.tensor_scale is None:
        return None
    alone = replace(weight, tensor_scale=torch.ones_like(weight.tensor_scale), _decoded={})
    return _BLOCKS(context, name, alone)


_BLOCKS = of_scales(lambda _tensor, scales: torch.ones_like(scales))


_ONES = FaultFamily(
    "O09",
    "every block is wrong by a factor of its own, its scale",
    "Fill the tensor that the kernel reads from the file, not from its initial value.",
)

ONES_FOR_SCALES_FAULTS = (
    _ONES.fault("blocks", "All block scales are 1", "block scales of 1 on", _BLOCKS, has_codes),
    _ONES.fault(
        "both", "Block and tensor scales are 1", "all scales of 1 on", _both, has_tensor_scale
    ),
    _ONES.fault(
        "byte", "All block scales hold the byte 1", "the byte 1 as block scales of", _one_byte,
        has_scale_bytes,
    ),
)  # fmt: skip
