"""Faults of layout: M11 order of block scales, M12 swizzled words, M14 gate and up rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from degarble.harness.engine.faults import operand_faults as operands
from degarble.harness.engine.faults.fused_operations import gated, sits
from degarble.harness.engine.faults.model_faults import (
    ChangedWeights,
    FaultVariant,
    ModelFault,
)
from degarble.harness.engine.faults.operand_faults import activation_format, is_packed
from degarble.harness.engine.faults.tensor_faults import (
    Match,
    TensorFault,
    TensorPart,
    read_scales,
    reproduction,
)
from degarble.harness.engine.faults.weight_faults import (
    FaultFamily,
    FaultTexts,
    has_codes,
    has_scale_bytes,
    is_gate_or_up,
    kept,
    numbers_of,
    of_fault,
    of_scales,
    scale_numbers,
    weight_fault,
    with_scales,
)
from degarble.harness.formats.layouts import LINEAR, SWIZZLE_128X4, to_layout
from degarble.harness.formats.weight import Weight
from degarble.harness.report.number_text import share
from degarble.references import elementary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.engine.faults.model_faults import ComponentContext
    from degarble.harness.engine.faults.tensor_faults import DifferingPart
    from degarble.harness.engine.faults.weight_faults import WeightStorage
    from degarble.harness.formats.layouts import ScaleLayout
    from degarble.harness.formats.quantise import QuantisedTensor

    Parts = Mapping[str, Tensor]


# --------------------------------------------------------------------------------------------------
# M11: block scales are complete but in another order (swizzle, transpose) than the reader expects.
#
# Variants: a 128x4 swizzle read as linear (also vllm issue 55976), applied to bytes already
# swizzled (modular issue 6600), or skipped; scales stored transposed. Each value gets the scale of
# another block, so it is wrong by a factor that varies from block to block. A matrix whose scales
# are all equal, or that has a single row and column tile, may not change at all.
#
# Shape letters: R and C block scales along rows and columns, S storage bytes.


def inject_read_unswizzled(tensor: QuantisedTensor) -> QuantisedTensor | None:
    """Label swizzled bytes as linear; padding is cut off, as a reader of R * C bytes does."""
    if tensor.format.scale.bits != 8:
        return None
    scales = tensor.linear_scale_codes()
    stored_S = to_layout(scales, SWIZZLE_128X4)
    count = scales.shape[-2] * scales.shape[-1]
    return replace(tensor, block_scale=stored_S[..., :count].reshape(scales.shape), layout=LINEAR)


def inject_swizzled_twice(tensor: QuantisedTensor) -> QuantisedTensor | None:
    """Swizzle bytes that are already swizzled."""
    if tensor.format.scale.bits != 8:
        return None
    once_S = to_layout(tensor.linear_scale_codes(), SWIZZLE_128X4)
    twice_S = to_layout(_as_padded_matrix(once_S, tensor), SWIZZLE_128X4)
    return replace(tensor, block_scale=twice_S, layout=SWIZZLE_128X4)


def inject_swizzle_skipped(tensor: QuantisedTensor) -> QuantisedTensor | None:
    """Label linear bytes as swizzled; the missing padding is zero."""
    if tensor.format.scale.bits != 8:
        return None
    scales = tensor.linear_scale_codes()
    stored_S = to_layout(scales, SWIZZLE_128X4).zero_()
    linear = scales.flatten(-2)
    stored_S[..., : linear.shape[-1]] = linear
    return replace(tensor, block_scale=stored_S, layout=SWIZZLE_128X4)


def inject_transposed(tensor: QuantisedTensor) -> QuantisedTensor | None:
    """Store the scales column by column; the reader expects rows, in the declared layout."""
    if tensor.format.scale.bits != 8:
        return None
    linear = tensor.with_layout(LINEAR)
    turned = linear.block_scale.transpose(-2, -1).reshape(linear.block_scale.shape)
    return replace(linear, block_scale=turned).with_layout(tensor.layout)


def _as_padded_matrix(stored_S: Tensor, tensor: QuantisedTensor) -> Tensor:
    tile = SWIZZLE_128X4.row_tile
    rows = -(-tensor.linear_scale_codes().shape[-2] // tile) * tile
    return stored_S.reshape(*stored_S.shape[:-1], rows, stored_S.shape[-1] // rows)


def signature(
    case: DifferingPart,
    inject: Callable[[QuantisedTensor], QuantisedTensor | None],
    layout: ScaleLayout | None,
    action: str,
) -> Match | None:
    """Compare the scales as read with the twin's after `inject`."""
    if layout is not None and case.suspect.layout != layout:
        return None
    fault = inject(case.twin)
    if fault is None:
        return None
    reproduced, untouched = reproduction(case, fault, TensorPart.BLOCK_SCALE)
    count = int(case.rows.sum()) * read_scales(case.twin).shape[-1]
    return Match(
        reproduced,
        untouched,
        f"{action} reproduces {share(reproduced)} of {count:,} block scales; "
        f"in the right order {share(untouched)} agree.",
    )


def _layout_fault(
    variant: str,
    title: str,
    remedy: str,
    inject: Callable[[QuantisedTensor], QuantisedTensor | None],
    recognise: tuple[ScaleLayout | None, str],
) -> TensorFault:
    layout, action = recognise
    return TensorFault(
        id=f"M11.{variant}",
        title=title,
        effect="each block is scaled by the scale of another one: wrong by a varying factor",
        remedy=remedy,
        part=TensorPart.BLOCK_SCALE,
        inject=inject,
        signature=partial(signature, inject=inject, layout=layout, action=action),
    )


SCALE_LAYOUT_TENSOR_FAULTS = (
    _layout_fault(
        "read_unswizzled",
        "Swizzled 128x4 block scales are read as if they were linear",
        "Declare the layout as 128x4, or unswizzle the scales before a linear reader.",
        inject_read_unswizzled,
        (LINEAR, "Reading a correct 128x4 swizzle as linear"),
    ),
    _layout_fault(
        "swizzled_twice",
        "The 128x4 swizzle of the block scales was applied twice",
        "Swizzle once: either in the checkpoint or at load, not in both places.",
        inject_swizzled_twice,
        (SWIZZLE_128X4, "Applying the 128x4 swizzle a second time"),
    ),
    _layout_fault(
        "swizzle_skipped",
        "Linear block scales are read as if they were swizzled 128x4",
        "Swizzle the scales for this kernel, or declare the layout as linear.",
        inject_swizzle_skipped,
        (SWIZZLE_128X4, "Reading linear scales through the 128x4 swizzle"),
    ),
    _layout_fault(
        "transposed",
        "The block scales are stored transposed",
        "Store the scales with K innermost: [rows, K / block].",
        inject_transposed,
        (None, "Transposing the scale matrix"),
    ),
)


def _in_fours(_tensor: QuantisedTensor, scales: Tensor) -> Tensor | None:
    """Reverse rows within groups of four, as a reader of another group order does."""
    if scales.shape[-2] % 4:
        return None
    turned: Tensor = scales.unflatten(-2, (-1, 4)).flip(-2).flatten(-3, -2)
    return turned


def _turned(tensor: QuantisedTensor, scales: Tensor) -> Tensor:
    del tensor
    return scales.transpose(-2, -1).reshape(scales.shape)


def _read_turned(_context: ComponentContext, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    scales = inputs["block_scale"]
    rows = scales.flatten(0, -2)
    return {**inputs, "block_scale": rows.reshape(rows.shape[::-1]).t().reshape(scales.shape)}


def _read_backwards(
    _context: ComponentContext, inputs: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    return {**inputs, "block_scale": inputs["block_scale"].flip(-1)}


def _read_changed(_context: ComponentContext, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Exchange rows g and g + 8 of every 16, which one thread holds."""
    scales = inputs["block_scale"]
    rows = scales.flatten(0, -2)
    other = (torch.arange(len(rows)) ^ 8).clamp(max=len(rows) - 1)
    return {**inputs, "block_scale": rows[other].reshape(scales.shape)}


_DOING = (
    "reading swizzled scales as linear on",
    "a second swizzle of the scales of",
    "reading linear scales through the swizzle on",
    "transposed scales on",
)
SCALE_LAYOUT_FAULTS = (
    *(
        of_fault(fault, action, has_scale_bytes)
        for fault, action in zip(SCALE_LAYOUT_TENSOR_FAULTS[:3], _DOING[:3], strict=True)
    ),
    weight_fault(
        FaultTexts(
            SCALE_LAYOUT_TENSOR_FAULTS[3].id,
            SCALE_LAYOUT_TENSOR_FAULTS[3].title,
            SCALE_LAYOUT_TENSOR_FAULTS[3].effect,
            SCALE_LAYOUT_TENSOR_FAULTS[3].remedy,
            _DOING[3],
        ),
        of_scales(_turned),
        moves=True,
    ),
    weight_fault(
        FaultTexts(
            "M11.groups_of_four",
            "The block scales of four rows are read in reversed order",
            "rows are scaled by their neighbours' scales: wrong by a varying factor",
            "Write and read scales with one order of rows in a group.",
            "reversing the scales within groups of four rows on",
        ),
        of_scales(_in_fours),
        moves=True,
    ),
    operands.reading_fault(
        FaultTexts(
            "M11.activation_transposed",
            "The scales of activations are read transposed",
            "exact for one token, wrong by a varying factor for several",
            "Move the data when a group-major buffer becomes token-major, or keep its strides.",
            "transposed scales of the activations of",
        ),
        _read_turned,
        operands.any_format,
    ),
    operands.reading_fault(
        FaultTexts(
            "M11.activation_reversed",
            "The scales of each token's activations are read from the last to the first",
            "each block is scaled by the scale of another one of the same token",
            "Scale j belongs to columns from j times the block on.",
            "reversed scales of the activations of",
        ),
        _read_backwards,
        operands.any_format,
    ),
    operands.reading_fault(
        FaultTexts(
            "M11.activation_rows",
            "Rows that are eight apart are scaled by each other's scales",
            "exact for one token, wrong by a varying factor for several",
            "The sums of a row, and its scales, are in the same registers: see the fragment's map.",
            "scales of rows eight apart exchanged in the product of",
        ),
        _read_changed,
        operands.any_format,
    ),
)


# --------------------------------------------------------------------------------------------------
# M12: both operands of a GEMM are read from shared memory one word or chunk off.
#
# A kernel keeps scales in words of four, 128 rows to a tile, and codes in chunks of 16 bytes that
# change places every four rows; an address that is one off reads the neighbour's, of A and of B
# (flashinfer issue 4044 is one of rows). The last row of a tile reads the next stage, which may not
# have arrived: outputs that depend on it are left unknown.
#
# Shape letters: N rows, C block scales of a row, B bytes of codes, S steps of K, P pieces of a row
# in a step, R rows of a tile, w width of a piece.


_TILE, _PART = 128, 32  # rows of a tile of scales, and rows whose words lie four apart
_WORD = 4  # scales
_CHUNK, _TURNS = 16, 4  # bytes; rows until the two chunks of a step change places


def words_behind(scales_NC: Tensor) -> Tensor:
    """Give every row the scales that lie one word after its own."""
    parts_NSP = pad(scales_NC, (0, -scales_NC.shape[1] % _WORD)).unflatten(-1, (-1, 1, _WORD))
    row = torch.arange(_TILE)[:, None]
    # The 128x4 layout: the words of rows r, r + 32, r + 64, r + 96 are adjacent.
    made = _behind(parts_NSP, row % _PART * 4 + row // _PART)
    return made.flatten(1)[:, : scales_NC.shape[1]].contiguous()


def chunks_behind(tile: int, codes_NB: Tensor) -> Tensor:
    """Replace every 16-byte chunk by the next one in a tile of steps of two swizzled chunks."""
    width = codes_NB.shape[1]
    parts_NSP = pad(codes_NB, (0, -width % (2 * _CHUNK))).unflatten(-1, (-1, 2, _CHUNK))
    row, number = torch.arange(tile)[:, None], torch.arange(2)
    # The swizzle: the two chunks of a step change places every four rows.
    made = _behind(parts_NSP, row * 2 + (row // _TURNS % 2 ^ number))
    return made.flatten(1)[:, :width].contiguous()


def _behind(parts_NSP: Tensor, place_RP: Tensor) -> Tensor:
    """Place pieces [N, S, P, w] in stages of R rows, and read each one place further on.

    Stages follow each other in the order of steps; zeros follow the last one.
    """
    count, steps, pieces, width = parts_NSP.shape
    tile = len(place_RP)
    tiles = pad(parts_NSP.transpose(0, -1), (0, -count % tile)).transpose(0, -1)
    tiles = tiles.unflatten(0, (-1, tile)).transpose(1, 2)  # [tiles, S, R, P, w]
    stage = tile * pieces
    at = torch.arange(steps)[:, None, None] * stage + place_RP
    # One more piece than the stages have: the last read goes past the end.
    memory = tiles.new_zeros(len(tiles), steps * stage + 1, width)
    memory[:, at.flatten()] = tiles.flatten(1, 3)
    found = memory[:, at.flatten() + 1].reshape(tiles.shape).transpose(1, 2)
    made: Tensor = found.flatten(0, 1)[:count]
    return made


def _of_both(part: str, change: Callable[[Tensor], Tensor], call: ComponentCall) -> ComponentCall:
    def changed(_name: str, weight: Weight) -> Weight:
        if not weight.is_quantised or len(weight.shape) > 2:
            return weight
        tensor = weight.quantised()
        if part == "codes":
            made = replace(tensor, codes=change(tensor.codes))
            return Weight.of(made, weight.input_scale)
        value = with_scales(tensor, change(scale_numbers(tensor)))
        return Weight(value=value, input_scale=weight.input_scale)

    def faulty(inputs: Parts, weights: Mapping[str, Any]) -> Parts:
        if part not in inputs:  # with some switches a linear gets plain numbers
            return call(inputs, weights)
        given = {**inputs, part: change(inputs[part])}
        return call(given, ChangedWeights(weights, changed))

    return faulty


def _last_of_tiles(tile: int, out_MN: Tensor) -> Tensor:
    """Mark outputs that depend on the last row of a tile of A or B."""
    last_M, last_N = (torch.arange(size) % tile == tile - 1 for size in out_MN.shape[-2:])
    mask: Tensor = (last_M[:, None] | last_N).to(out_MN.device)
    return mask


def _word_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    words = f"scales of both operands a word too far on {context.name}"
    change = partial(_of_both, "block_scale", words_behind)
    yield FaultVariant(words, change, needs_whole_call=True, unknown=partial(_last_of_tiles, _TILE))


def _chunk_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    for tile in (64, _TILE):
        words = (
            f"codes of both operands 16 bytes too far, in tiles of {tile} rows, on {context.name}"
        )
        change = partial(_of_both, "codes", partial(chunks_behind, tile))
        unknown = partial(_last_of_tiles, tile)
        yield FaultVariant(words, change, {"tile": tile}, needs_whole_call=True, unknown=unknown)


def _sits(context: ComponentContext) -> bool:
    """Return whether this is an NVFP4 by NVFP4 linear with all rows in one product."""
    names = {each.name for each in context.component.inputs}
    form = activation_format(context) if "codes" in names and "experts" not in names else None
    return form is not None and is_packed(form) and all(storage.form for storage in kept(context))


_REMEDY = "Fill tiles with a ramp, and read each address back by the layout's own function."
SWIZZLED_WORDS_FAULTS = (
    ModelFault(
        id="M12.word_behind",
        title="Block scales of both operands are read a word after their own",
        effect="rows are scaled by those 32 rows on; calls of few rows by zeros",
        remedy=_REMEDY,
        applies_to=_sits,
        variants=_word_variants,
    ),
    ModelFault(
        id="M12.chunk_behind",
        title="Codes of both operands are read 16 bytes after their own",
        effect="half of the codes are another row's: outputs are noise of the right size",
        remedy=_REMEDY,
        applies_to=_sits,
        variants=_chunk_variants,
    ),
)


# --------------------------------------------------------------------------------------------------
# M14: gate and up rows of w13 are stored in another order than the kernel expects.
#
# Halves swapped, rows interleaved but split in halves, or the reverse; with their scales, or the
# scales alone (sglang issues 26884 and 32430). SwiGLU is not symmetric, so silu(up) * gate comes
# out.
#
# Shape letters: F rows of one half, K columns.

_OTHER = {"w1": "w3", "w3": "w1"}


def _halves(context: ComponentContext, name: str) -> tuple[Tensor, Tensor]:
    """Return gate and up, as numbers, of the expert that a weight belongs to."""
    stem = name.rpartition(".")[0]
    gate, up = (numbers_of(context.weights[f"{stem}.{part}"]) for part in ("w1", "w3"))
    return gate, up


def _is_gate(name: str) -> bool:
    return name.endswith(".w1")


def _partner(context: ComponentContext, name: str) -> Weight | None:
    stem, _, part = name.rpartition(".")
    return context.weights[f"{stem}.{_OTHER[part]}"] if part in _OTHER else None


def _swapped(context: ComponentContext, name: str, weight: Weight) -> Weight | None:
    partner = _partner(context, name)
    if partner is None:
        return None
    return replace(partner, input_scale=weight.input_scale, _decoded={})


def _interleaved(context: ComponentContext, name: str, weight: Weight) -> Weight | None:
    """Store rows g0 u0 g1 u1 ...; the reader takes the first half for the gate."""
    if _partner(context, name) is None:
        return None
    gate, up = _halves(context, name)
    rows = torch.stack((gate, up), dim=1).flatten(0, 1)
    half = rows[: len(gate)] if _is_gate(name) else rows[len(gate) :]
    return Weight(value=half.contiguous(), input_scale=weight.input_scale)


def _pulled_apart(context: ComponentContext, name: str, weight: Weight) -> Weight | None:
    """Store gate rows above up rows; the reader takes every second row for the gate."""
    if _partner(context, name) is None:
        return None
    rows = torch.cat(_halves(context, name))
    half = rows[0::2] if _is_gate(name) else rows[1::2]
    return Weight(value=half.contiguous(), input_scale=weight.input_scale)


def _scales_swapped(context: ComponentContext, name: str, weight: Weight) -> Weight | None:
    partner = _partner(context, name)
    if partner is None or weight.block_scale is None or partner.block_scale is None:
        return None
    return replace(weight, block_scale=partner.block_scale, _decoded={})


def _has_scales(kept: WeightStorage) -> bool:
    return is_gate_or_up(kept) and has_codes(kept)


def _taken_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    def changed(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
        return elementary.swiglu(up, gate, limit)

    yield gated(context, "gate and up taken for each other", changed)


_GATE_UP = FaultFamily(
    "M14",
    "SwiGLU multiplies what does not belong together: text is garbled, nothing is NaN",
    "Tell the kernel which order w13 has, or shuffle the rows (and their scales) at load.",
)

GATE_AND_UP_FAULTS = (
    _GATE_UP.fault(
        "swapped",
        "Gate and up are swapped",
        "gate and up swapped on",
        _swapped,
        is_gate_or_up,
        whole=True,
    ),
    _GATE_UP.fault(
        "interleaved",
        "Rows of gate and up are interleaved, and split in halves",
        "interleaved rows of gate and up on",
        _interleaved,
        is_gate_or_up,
        whole=True,
    ),
    _GATE_UP.fault(
        "pulled_apart",
        "Gate is stored above up, and every second row is taken for the gate",
        "rows of gate and up pulled apart on",
        _pulled_apart,
        is_gate_or_up,
        whole=True,
    ),
    _GATE_UP.fault(
        "scales_swapped",
        "The block scales of gate and up are swapped, their codes are not",
        "swapped block scales of gate and up on",
        _scales_swapped,
        _has_scales,
        whole=True,
    ),
    ModelFault(
        id="M14.taken",
        title="SwiGLU takes up for the gate, and the gate for up",
        effect="up is gated by what it should have multiplied: text is garbled, nothing is NaN",
        remedy="Tell the kernel which half of its input is the gate.",
        applies_to=sits,
        variants=_taken_variants,
    ),
)
