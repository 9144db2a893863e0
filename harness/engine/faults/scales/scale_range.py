"""M08: block scales leave the range that their format, or its reader, can represent.

E4M3 is subnormal below 2^-6 and zero below 2^-9. A reader decodes subnormals by the formula of
normal numbers, flushes them, or encodes all of them again with five bits of exponent; a producer
chooses a tensor scale that makes them small (flashinfer issue 3932, vllm issue 34577). Without
effect if no block scale is that small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.faults import operand_faults as operands
from degarble.harness.engine.faults.weight_faults import (
    Words,
    has_tensor_scale,
    of_scales,
    weight_fault,
)
from degarble.harness.formats.codec import decode_array, encode_array
from degarble.harness.formats.number_formats import E2M1, E4M3

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import ModelFault, Scene
    from degarble.harness.engine.faults.operand_faults import Making
    from degarble.harness.engine.faults.weight_faults import Change
    from degarble.harness.formats.quantise import QuantisedTensor

    Scaling = Callable[[QuantisedTensor, Tensor], Tensor]

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
    scene: Scene, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    one = torch.ones_like(outputs["tensor_scale"])
    return {**operands.requantised(scene, inputs, outputs, one), "tensor_scale": one}


def _next_code(
    scene: Scene, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Increase each scale code by one: rounded up, or one code too far."""
    return operands.with_block_scales(
        scene, inputs, outputs, lambda _, codes: (codes.int() + 1).clamp(max=E4M3.largest_code)
    )


def _of_half(part: slice) -> Making:
    """Take the largest magnitude of a part of each block for that of the whole."""

    def change(
        scene: Scene, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        def scales(blocks: Tensor, _codes: Tensor) -> Tensor:
            return encode_array(blocks[..., part].abs().amax(-1) / E2M1.largest, E4M3)

        return operands.with_block_scales(scene, inputs, outputs, scales)

    return change


def _fault(variant: str, title: str, doing: str, change: Change) -> ModelFault:
    words = Words(
        f"M08.{variant}",
        title,
        "small blocks are wrong by a factor, or vanish",
        "Choose the tensor scale so that block scales use the upper end of E4M3.",
        doing,
    )
    return weight_fault(words, change, has_tensor_scale)


MODEL_FAULTS = (
    _fault(
        "subnormal",
        "Subnormal block scales are decoded by the formula of normal ones",
        "subnormal block scales read as normal ones on",
        of_scales(_as_normal),
    ),
    _fault(
        "flushed",
        "Subnormal block scales are flushed to zero",
        "subnormal block scales flushed to zero on",
        of_scales(_flushed),
    ),
    _fault(
        "underflow",
        "The tensor scale is so large that block scales are subnormal",
        "block scales that were rounded 2^14 too small on",
        of_scales(_shifted()),
    ),
    _fault(
        "small_as_normal",
        "The tensor scale makes block scales subnormal, and they are decoded as normal ones",
        "block scales 2^14 too small, read as normal ones, on",
        of_scales(_shifted(_as_normal)),
    ),
    _fault(
        "small_flushed",
        "The tensor scale makes block scales subnormal, and they are flushed to zero",
        "block scales 2^14 too small, flushed to zero, on",
        of_scales(_shifted(_flushed)),
    ),
    _fault(
        "five_bits",
        "Block scales are encoded again with five bits of exponent, the top one assumed",
        "block scales below 2 lost on",
        of_scales(_five_bits),
    ),
    operands.making_fault(
        Words(
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
        Words(
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
            Words(
                f"M08.{name}",
                f"A block's scale follows from its {told} 8 numbers alone",
                "blocks whose largest number is among the others are clipped",
                "Take the largest magnitude of all numbers of a block.",
                f"scales by the {told} 8 numbers of every block at",
            ),
            _of_half(part),
            operands.has_tensor_scale,
        )
        for name, told, part in _PARTS
    ),
)
