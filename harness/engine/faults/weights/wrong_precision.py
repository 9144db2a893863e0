"""M19: a module has another precision than the checkpoint states.

A rule that quantises every 2D tensor includes the router, fusion includes the indexer's key
projection, a fallback decodes and quantises again (TensorRT-LLM issue 11989, atlas issue 186, vllm
issue 47318). All of it is noise of a known kind, so only identical codes prove it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.faults.decoding import numbers_of
from degarble.harness.engine.faults.weight_faults import (
    Words,
    has_codes,
    is_matrix,
    is_plain_matrix,
    weight_fault,
)
from degarble.harness.formats.codec import decode_array, encode_array
from degarble.harness.formats.number_formats import E4M3, FP8_128X128_F32, MXFP4, NVFP4
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.harness.formats.weight import Weight

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import ModelFault, Scene
    from degarble.harness.engine.faults.weight_faults import Change, Needs
    from degarble.harness.formats.number_formats import BlockFormat


def _through(form: BlockFormat) -> Change:
    def change(_scene: Scene, _name: str, weight: Weight) -> Weight | None:
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


def _per_tensor(_scene: Scene, _name: str, weight: Weight) -> Weight | None:
    value = per_tensor_fp8(numbers_of(weight))
    return Weight(value=value, input_scale=weight.input_scale)


def _fault(variant: str, form: str, change: Change, needs: Needs) -> ModelFault:
    words = Words(
        f"M19.{variant}",
        f"A weight is quantised to {form} though the checkpoint keeps it otherwise",
        "noise of that format: routes flip, scores are coarse",
        "State the precision of every module once, and compare it with what was loaded.",
        f"quantising to {form} of",
    )
    return weight_fault(words, change, needs)


MODEL_FAULTS = (
    _fault("nvfp4", "NVFP4", _through(NVFP4), is_plain_matrix),
    _fault("mxfp4", "MXFP4", _through(MXFP4), is_matrix),
    _fault("fp8_block", "FP8 in blocks of 128x128", _through(FP8_128X128_F32), is_matrix),
    _fault("fp8_tensor", "FP8 with one scale", _per_tensor, is_matrix),
    _fault("nvfp4_again", "NVFP4 a second time", _through(NVFP4), has_codes),
)
