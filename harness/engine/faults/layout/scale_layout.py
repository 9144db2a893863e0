"""M11: block scales are complete but in another order (swizzle, transpose) than the reader expects.

Variants: a 128x4 swizzle read as linear (also vllm issue 55976), applied to bytes already swizzled
(modular issue 6600), or skipped; scales stored transposed. Each value gets the scale of another
block, so it is wrong by a factor that varies from block to block. A matrix whose scales are all
equal, or that has a single row and column tile, may not change at all.

Shape letters: R and C block scales along rows and columns, S storage bytes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.faults import operand_faults as operands
from degarble.harness.engine.faults.family import Fault, Match, Part, read_scales, reproduction
from degarble.harness.engine.faults.weight_faults import (
    Words,
    has_scale_bytes,
    of_fault,
    of_scales,
    weight_fault,
)
from degarble.harness.formats.layouts import LINEAR, SWIZZLE_128X4, to_layout
from degarble.harness.report.number_text import share

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.family import Case
    from degarble.harness.engine.faults.model_faults import Scene
    from degarble.harness.formats.layouts import ScaleLayout
    from degarble.harness.formats.quantise import QuantisedTensor


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
    case: Case,
    inject: Callable[[QuantisedTensor], QuantisedTensor | None],
    layout: ScaleLayout | None,
    doing: str,
) -> Match | None:
    """Compare the scales as read with the twin's after `inject`."""
    if layout is not None and case.suspect.layout != layout:
        return None
    fault = inject(case.twin)
    if fault is None:
        return None
    reproduced, untouched = reproduction(case, fault, Part.BLOCK_SCALE)
    count = int(case.rows.sum()) * read_scales(case.twin).shape[-1]
    return Match(
        reproduced,
        untouched,
        f"{doing} reproduces {share(reproduced)} of {count:,} block scales; "
        f"in the right order {share(untouched)} agree.",
    )


def _fault(
    variant: str,
    title: str,
    remedy: str,
    inject: Callable[[QuantisedTensor], QuantisedTensor | None],
    recognise: tuple[ScaleLayout | None, str],
) -> Fault:
    layout, doing = recognise
    return Fault(
        id=f"M11.{variant}",
        title=title,
        effect="each block is scaled by the scale of another one: wrong by a varying factor",
        remedy=remedy,
        part=Part.BLOCK_SCALE,
        inject=inject,
        signature=partial(signature, inject=inject, layout=layout, doing=doing),
    )


FAULTS = (
    _fault(
        "read_unswizzled",
        "Swizzled 128x4 block scales are read as if they were linear",
        "Declare the layout as 128x4, or unswizzle the scales before a linear reader.",
        inject_read_unswizzled,
        (LINEAR, "Reading a correct 128x4 swizzle as linear"),
    ),
    _fault(
        "swizzled_twice",
        "The 128x4 swizzle of the block scales was applied twice",
        "Swizzle once: either in the checkpoint or at load, not in both places.",
        inject_swizzled_twice,
        (SWIZZLE_128X4, "Applying the 128x4 swizzle a second time"),
    ),
    _fault(
        "swizzle_skipped",
        "Linear block scales are read as if they were swizzled 128x4",
        "Swizzle the scales for this kernel, or declare the layout as linear.",
        inject_swizzle_skipped,
        (SWIZZLE_128X4, "Reading linear scales through the 128x4 swizzle"),
    ),
    _fault(
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


def _read_turned(_scene: Scene, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    scales = inputs["block_scale"]
    rows = scales.flatten(0, -2)
    return {**inputs, "block_scale": rows.reshape(rows.shape[::-1]).t().reshape(scales.shape)}


def _read_backwards(_scene: Scene, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {**inputs, "block_scale": inputs["block_scale"].flip(-1)}


def _read_changed(_scene: Scene, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
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
MODEL_FAULTS = (
    *(
        of_fault(fault, doing, has_scale_bytes)
        for fault, doing in zip(FAULTS[:3], _DOING[:3], strict=True)
    ),
    weight_fault(
        Words(FAULTS[3].id, FAULTS[3].title, FAULTS[3].effect, FAULTS[3].remedy, _DOING[3]),
        of_scales(_turned),
        moves=True,
    ),
    weight_fault(
        Words(
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
        Words(
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
        Words(
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
        Words(
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
