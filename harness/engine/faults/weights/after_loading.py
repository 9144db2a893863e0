"""M20: a step after weight loading is skipped, repeated, or applied to packed bytes.

Rows shuffled a second time at a reload, alphas of the previous weights, block scales computed from
nibble pairs (sglang issue 28963, vllm issue 54125, Model-Optimizer issue 2038). A swizzle that was
done twice or not at all is M11.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.faults.weight_faults import (
    Words,
    has_tensor_scale,
    is_matrix,
    is_packed,
    of_scales,
    of_values,
    weight_fault,
)
from degarble.harness.formats.codec import decode_array, encode_array
from degarble.harness.formats.number_formats import E4M3, UE8M0

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import ModelFault, Scene
    from degarble.harness.engine.faults.weight_faults import Change, Needs
    from degarble.harness.formats.quantise import QuantisedTensor
    from degarble.harness.formats.weight import Weight

_RUN = 8  # rows that a kernel's shuffle moves together


def _shuffled(value: Tensor) -> Tensor:
    """Shuffle runs of eight rows a second time: every second run first."""
    if value.ndim != 2 or len(value) % (2 * _RUN):
        return value
    runs = value.unflatten(0, (-1, _RUN))
    return torch.cat((runs[0::2], runs[1::2])).flatten(0, 1)


def _scale_before(scene: Scene, name: str, weight: Weight) -> Weight | None:
    """Return the tensor scale of the same weight in the previous layer: an alpha not renewed."""
    if weight.tensor_scale is None or not scene.component.layer:
        return None
    other = scene.sibling(f"layers.{scene.component.layer - 1}.{scene.role}")
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


def _fault(variant: str, title: str, doing: str, change: Change, needs: Needs) -> ModelFault:
    words = Words(
        f"M20.{variant}",
        title,
        "right after the first load, wrong after the next; or wrong for one class of modules",
        "Mark every module with the layout that it is in, and refuse a second pass.",
        doing,
    )
    return weight_fault(words, change, needs)


MODEL_FAULTS = (
    _fault(
        "shuffled_again",
        "Rows were shuffled for the kernel a second time",
        "a second shuffle of the rows of",
        of_values(_shuffled),
        is_matrix,
    ),
    _fault(
        "scale_before",
        "The tensor scale is still that of another weight",
        "the tensor scale of the layer before on",
        _scale_before,
        has_tensor_scale,
    ),
    _fault(
        "scales_of_bytes",
        "Block scales were worked out from packed bytes",
        "block scales worked out from packed bytes on",
        of_scales(_of_bytes),
        is_packed,
    ),
)
