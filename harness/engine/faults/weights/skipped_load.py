"""O08: a rule that skips fused parameters at loading also skips others, which stay uninitialised.

Found in the first field report: a skip rule for fused parameters also left out the scales of q_b,
o_a and o_b. The contents of such memory are unknown; the usual ones are covered: one repeated byte,
the bytes of the tensor that was there before, zeros (M04 and M17).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.faults.weight_faults import (
    Words,
    has_codes,
    has_scale_bytes,
    weight_fault,
)

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import ModelFault, Scene
    from degarble.harness.engine.faults.weight_faults import Change, Needs
    from degarble.harness.formats.weight import Weight

_FRESH = 0xCD  # debug allocators fill fresh memory with it
_FREED = 0xDD  # and freed memory with this


def _filled(codes: Tensor, byte: int) -> Tensor:
    octets = torch.full((codes.numel() * codes.element_size(),), byte, dtype=torch.uint8)
    return octets.view(codes.dtype).reshape(codes.shape)


def _codes_filled(byte: int) -> Change:
    def change(_scene: Scene, _name: str, weight: Weight) -> Weight | None:
        if weight.codes is None:
            return None
        return replace(weight, codes=_filled(weight.codes, byte), _decoded={})

    return change


def _scales_filled(byte: int) -> Change:
    def change(_scene: Scene, _name: str, weight: Weight) -> Weight | None:
        if weight.block_scale is None:
            return None
        return replace(weight, block_scale=_filled(weight.block_scale, byte), _decoded={})

    return change


def _codes_as_scales(_scene: Scene, _name: str, weight: Weight) -> Weight | None:
    """Fill the scales with the first bytes of the codes, as reused memory would."""
    scale, codes = weight.block_scale, weight.codes
    if scale is None or codes is None or scale.dtype is not torch.uint8:
        return None
    octets = codes.flatten()
    count = -(-scale.numel() // octets.numel())
    stale = octets.repeat(count)[: scale.numel()] & 0x7F  # a scale has no sign
    return replace(weight, block_scale=stale.reshape(scale.shape), _decoded={})


def _fault(variant: str, title: str, doing: str, change: Change, needs: Needs) -> ModelFault:
    words = Words(
        f"O08.{variant}",
        title,
        "noise of any size, another one at every start",
        "Fill parameters with NaN before loading, and refuse what is still NaN behind it.",
        doing,
    )
    return weight_fault(words, change, needs)


MODEL_FAULTS = (
    _fault(
        "codes_fresh", "Codes were never loaded: fresh memory", "bytes 0xCD as codes of",
        _codes_filled(_FRESH), has_codes,
    ),
    _fault(
        "codes_freed", "Codes were never loaded: freed memory", "bytes 0xDD as codes of",
        _codes_filled(_FREED), has_codes,
    ),
    _fault(
        "scales_fresh", "Block scales were never loaded: fresh memory",
        "bytes 0xCD as block scales of", _scales_filled(_FRESH), has_codes,
    ),
    _fault(
        "scales_stale", "Block scales were never loaded: bytes of another tensor",
        "stale codes as block scales of", _codes_as_scales, has_scale_bytes,
    ),
)  # fmt: skip
