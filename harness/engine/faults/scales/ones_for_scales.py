"""O09: scales are all ones.

Found in the first field report: a block scale filled with ones instead of the FP8 scale. Variants:
block scales alone, block and tensor scale, or the byte 1, which encodes 1.0 in no scale format.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.faults.weight_faults import (
    Words,
    has_codes,
    has_scale_bytes,
    has_tensor_scale,
    of_scales,
    weight_fault,
)

if TYPE_CHECKING:
    from degarble.harness.engine.faults.model_faults import ModelFault, Scene
    from degarble.harness.engine.faults.weight_faults import Change, Needs
    from degarble.harness.formats.weight import Weight


def _one_byte(_scene: Scene, _name: str, weight: Weight) -> Weight | None:
    scale = weight.block_scale
    if scale is None or scale.dtype is not torch.uint8:
        return None
    return replace(weight, block_scale=torch.ones_like(scale), _decoded={})


def _both(scene: Scene, name: str, weight: Weight) -> Weight | None:
    if weight.tensor_scale is None:
        return None
    alone = replace(weight, tensor_scale=torch.ones_like(weight.tensor_scale), _decoded={})
    return _BLOCKS(scene, name, alone)


_BLOCKS = of_scales(lambda _tensor, scales: torch.ones_like(scales))


def _fault(variant: str, title: str, doing: str, change: Change, needs: Needs) -> ModelFault:
    words = Words(
        f"O09.{variant}",
        title,
        "every block is wrong by a factor of its own, its scale",
        "Fill the tensor that the kernel reads from the file, not from its initial value.",
        doing,
    )
    return weight_fault(words, change, needs)


MODEL_FAULTS = (
    _fault("blocks", "All block scales are 1", "block scales of 1 on", _BLOCKS, has_codes),
    _fault(
        "both", "Block and tensor scales are 1", "all scales of 1 on", _both, has_tensor_scale
    ),
    _fault(
        "byte", "All block scales hold the byte 1", "the byte 1 as block scales of", _one_byte,
        has_scale_bytes,
    ),
)  # fmt: skip
