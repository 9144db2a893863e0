"""M09: a codec rounds, saturates or decodes by other rules than its format.

E2M1 with ties away from zero, or truncated; E4M3 that saturates at 240 or 256 instead of 448, or
that uses the codes of another E4M3 with another bias (sglang issue 40581, aiter issue 3992).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from degarble.harness.engine.faults import operand_faults as operands
from degarble.harness.engine.faults.decoding import elements, scale_numbers, with_scales
from degarble.harness.engine.faults.weight_faults import (
    Words,
    has_codes,
    of_scales,
    weight_fault,
)
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.number_formats import E4M3, Rounding
from degarble.harness.formats.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import ModelFault, Scene
    from degarble.harness.engine.faults.operand_faults import Making
    from degarble.harness.engine.faults.weight_faults import Change, Kept

_REMEDY = "Round to nearest even and saturate at the largest number; prove it over all codes."


def _of_e4m3(change: Callable[[Tensor], Tensor]) -> Change:
    """Change how E4M3 decodes, for elements or for the block scales of narrower elements."""

    def changed(scene: Scene, name: str, weight: Weight) -> Weight | None:
        if not weight.is_quantised:
            return None
        tensor = weight.quantised()
        if tensor.format.element == E4M3:
            element = change(elements(tensor))
            value = with_scales(tensor, scale_numbers(tensor), element)
            return Weight(value=value, input_scale=weight.input_scale)
        if tensor.format.scale != E4M3:
            return None
        return of_scales(lambda _tensor, scales: change(scales))(scene, name, weight)

    return changed


def _has_e4m3(kept: Kept) -> bool:
    return (
        has_codes(kept) and kept.form is not None and E4M3 in (kept.form.element, kept.form.scale)
    )


def _rounded(rounding: Rounding) -> Making:
    """Requantise with another rounding of elements."""
    rules = tuple(replace(rule, element_rounding=rounding) for rule in CANONICAL.rules)
    dialect = replace(CANONICAL, rules=rules, name=f"canonical, {rounding}")

    def making(
        scene: Scene, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        return operands.requantised(scene, inputs, outputs, dialect=dialect)

    return making


def _decoder(variant: str, what: str, change: Callable[[Tensor], Tensor]) -> ModelFault:
    words = Words(
        f"M09.{variant}",
        f"E4M3 numbers {what} when decoded",
        "the largest values are too small, or all by one factor",
        _REMEDY,
        f"E4M3 numbers that {what} on",
    )
    return weight_fault(words, _of_e4m3(change), _has_e4m3)


def _encoder(variant: str, what: str, rounding: Rounding) -> ModelFault:
    words = Words(
        f"M09.{variant}",
        f"Activations are rounded {what} when encoded",
        "a few codes step to a neighbour: noise above the format's own",
        _REMEDY,
        f"rounding {what} at",
    )
    return operands.making_fault(words, _rounded(rounding), operands.any_format)


MODEL_FAULTS = (
    _decoder("saturates_at_240", "saturate at 240", lambda values: values.clamp(-240, 240)),
    _decoder("saturates_at_256", "saturate at 256", lambda values: values.clamp(-256, 256)),
    _decoder("other_bias", "have a bias of 8 in place of 7", lambda values: values / 2),
    _encoder("ties_away", "half away from zero", Rounding.NEAREST_AWAY),
    _encoder("truncated", "toward zero", Rounding.TOWARD_ZERO),
    _encoder("upward", "toward plus infinity", Rounding.UP),
)
