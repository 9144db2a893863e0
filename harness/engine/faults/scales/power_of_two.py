"""M06: a scale is rounded to a power of two while the codes stay those of the exact scale.

Rounding up inflates each block by a factor in [1, 2), truncation shrinks it by one in (0.5, 1]; a
wrong exponent rule is off by 2 or 1/2 (transformers issue 47030, sglang issues 28418 and 39193,
ATOM issue 1601). Without effect on scales that are powers of two already.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.faults import operand_faults as operands
from degarble.harness.engine.faults.weight_faults import (
    Words,
    has_codes,
    has_tensor_scale,
    of_scales,
    weight_fault,
    with_tensor_scale,
)
from degarble.harness.formats.codec import decode_array, encode_array
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.number_formats import UE8M0, Rounding

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import ModelFault, Scene
    from degarble.harness.engine.faults.operand_faults import Making
    from degarble.harness.formats.number_formats import BlockFormat

_REMEDY = "Round the scale first and quantise with the rounded one, or keep it as it is."


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
        scene: Scene, _inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        form, scales = operands.activation_format(scene), outputs["block_scale"]
        assert form is not None, "asked only where codes are made"
        if form.scale.bits == 32:
            return {**outputs, "block_scale": change(scales)}
        made = change(decode_array(scales, form.scale)).clamp(max=form.scale.largest)
        return {**outputs, "block_scale": encode_array(made, form.scale)}

    return making


def _exponents_down(
    scene: Scene, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Truncate exponents where the format's rule rounds up, so that codes saturate."""
    rules = tuple(replace(rule, scale_rounding=Rounding.DOWN) for rule in CANONICAL.rules)
    return operands.requantised(scene, inputs, outputs, dialect=replace(CANONICAL, rules=rules))


def _weight(
    variant: str, how: str, change: Callable[[Tensor], Tensor], *, tensor: bool = False
) -> ModelFault:
    which = "tensor scale" if tensor else "block scales"
    words = Words(
        f"M06.{variant}",
        f"The {which} {how} when read",
        "too large or too small by a factor below 2, codes unchanged",
        _REMEDY,
        f"{which} that {how} on",
    )
    lifted = with_tensor_scale(change) if tensor else of_scales(lambda _tensor, s: change(s))
    return weight_fault(words, lifted, has_tensor_scale if tensor else has_codes)


def _activation(variant: str, how: str, change: Callable[[Tensor], Tensor]) -> ModelFault:
    words = Words(
        f"M06.activation_{variant}",
        f"Activations are quantised with exact scales, which {how} afterwards",
        "each block of inputs is wrong by a factor below 2",
        _REMEDY,
        f"scales that {how} behind their codes at",
    )
    return operands.making_fault(words, _rounded_after(change), _is_not_exponents)


_UP, _DOWN = "are rounded up to powers of two", "are cut to powers of two"
MODEL_FAULTS = (
    _weight("up", _UP, rounded_up),
    _weight("down", _DOWN, truncated),
    _weight("nearest", "are rounded to the nearest power of two", nearest),
    _weight("exponent_off", "have exponents that are one too small", lambda scales: scales / 2),
    _weight("tensor_down", "is cut to a power of two", truncated, tensor=True),
    _activation("up", _UP, rounded_up),
    _activation("down", _DOWN, truncated),
    operands.making_fault(
        Words(
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
