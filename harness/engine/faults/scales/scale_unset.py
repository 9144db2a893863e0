"""M04: a scale was never loaded, or is zero, infinity, NaN or a tiny number.

A parameter with one slot a part is filled in some slots only; experts that calibration never
visited have 0 or NaN; then comes the usual max() or reciprocal (vllm issues 45212 and 34914, sglang
issue 29151). Concerns the tensor scale if the format has one, else the block scales.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.faults import operand_faults as operands
from degarble.harness.engine.faults.weight_faults import (
    Words,
    has_codes,
    has_tensor_scale,
    weight_fault,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import ModelFault, Scene
    from degarble.harness.engine.faults.weight_faults import Change
    from degarble.harness.formats.weight import Weight

TINY = 1e-23  # scale of dead experts in a published checkpoint (vllm issue 34914)
UNSET = float(torch.tensor(bytearray(b"\xcd" * 4), dtype=torch.uint8).view(torch.float32))
_BYTES = {0.0: 0x00, math.inf: 0x7E, TINY: 0x01, UNSET: 0xCD}  # their byte in 8-bit scales
_NAN_BYTE = {"E4M3": 0x7F, "UE8M0": 0xFF}


def _byte_of(number: float, scale: str) -> int:
    return _NAN_BYTE[scale] if math.isnan(number) else _BYTES[number]


def _scale_set(number: float) -> Change:
    def change(scene: Scene, name: str, weight: Weight) -> Weight | None:
        if weight.tensor_scale is None:
            return _blocks_set(number)(scene, name, weight)
        return replace(
            weight, tensor_scale=torch.full_like(weight.tensor_scale, number), _decoded={}
        )

    return change


def _blocks_set(number: float) -> Change:
    def change(_scene: Scene, _name: str, weight: Weight) -> Weight | None:
        scale, how = weight.block_scale, weight.storage
        if scale is None or how is None:
            return None
        value = number
        if how.format.scale.bits == 8:
            value = _byte_of(number, how.format.scale.name)
        return replace(weight, block_scale=torch.full_like(scale, value), _decoded={})

    return change


def _input_zero(
    scene: Scene, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    zero = torch.zeros_like(outputs["tensor_scale"])
    return {**operands.requantised(scene, inputs, outputs, zero), "tensor_scale": zero}


def _fault(variant: str, what: str, effect: str, change: Change, *, blocks: bool) -> ModelFault:
    which = "block scales" if blocks else "scale"
    words = Words(
        f"M04.{variant}",
        f"The slot of the {which} holds {what}",
        effect,
        "Check that every element of every scale was written, and refuse 0, infinity and NaN.",
        f"{what} as {which} of",
    )
    return weight_fault(words, change, has_tensor_scale if blocks else has_codes)


MODEL_FAULTS = (
    _fault("zero", "zero", "its outputs are zero", _scale_set(0.0), blocks=False),
    _fault("tiny", "1e-23", "its outputs all but vanish", _scale_set(TINY), blocks=False),
    _fault("nan", "NaN", "its outputs are NaN", _scale_set(math.nan), blocks=False),
    _fault("infinite", "infinity", "NaN and infinities", _scale_set(math.inf), blocks=False),
    _fault(
        "unset", "memory that nobody wrote", "a huge gain, or NaN", _scale_set(UNSET), blocks=False
    ),
    _fault("blocks_zero", "zeros", "its outputs are zero", _blocks_set(0.0), blocks=True),
    _fault("blocks_nan", "NaN", "its outputs are NaN", _blocks_set(math.nan), blocks=True),
    operands.making_fault(
        Words(
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
