"""How far a quantised operand may be off: codes near a rounding boundary may go either way.

An operand is quantised at both ends of its error, and under the scales of either end. The largest
difference from the twin's is the bound. Kernels multiply by approximate reciprocals of scales, so
that even an exact operand has an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.budget.bounded_values import QUOTIENT
from degarble.harness.engine.budget.rules import U, ambiguous
from degarble.harness.formats.codec import decode_array, encode_array, pack_nibbles
from degarble.harness.formats.number_formats import BLOCK_FORMATS, FP32, UE8M0
from degarble.references.linears import BLOCK_SCALE, CODES, TENSOR_SCALE, decode_activations

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.engine.budget.bounded_values import BoundedValue
    from degarble.harness.formats.number_formats import BlockFormat
    from degarble.references.linears import InputQuantiser


def scale_roundings(form: BlockFormat) -> int:
    """Return the roundings of a quotient by a format's scales, in u; by powers of two it is exact.

    A scale takes a reciprocal within 2 units and a product, with a tensor scale twice.
    """
    if form.scale is UE8M0:
        return 0
    return QUOTIENT if form.scale is FP32 else 2 * QUOTIENT


def quantised_bound(quantiser: InputQuantiser, near: BoundedValue) -> Tensor:
    """Return how far the quantised numbers of an operand may be off, in float64."""
    form, value = BLOCK_FORMATS[quantiser.format], near.value.double()
    rounding = 0 if quantiser.stepwise is not None else scale_roundings(form)
    error = near.error.double() + value.abs() * (rounding * U)
    codes = quantiser.codes(near.value)
    exact = quantiser.values(codes)
    bound = torch.zeros_like(exact)
    if quantiser.decoded is not None:
        decoded = decode_activations(codes, quantiser.format, torch.float32)
        bound = ambiguous(decoded, quantiser.decoded).double()
    if not bool(error.any()):
        return bound
    away = torch.where(value < 0, -error, error)
    ends = value + away, value - away
    coded = [quantiser.codes(end) for end in ends]
    made = [quantiser.values(each) for each in coded]
    if quantiser.stepwise is None:
        # A largest magnitude at one end of its error, and another number at the other one.
        made += [quantiser.values(_under(form, ends[at], coded[1 - at])) for at in range(len(ends))]
    for each in made:
        bound = torch.maximum(bound, (each - exact).abs())
    return bound


def _under(form: BlockFormat, value: Tensor, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Encode numbers under the scales of others."""
    scale = given[BLOCK_SCALE]
    scale = scale.double() if form.scale is FP32 else decode_array(scale, form.scale).double()
    if TENSOR_SCALE in given:
        tensor = given[TENSOR_SCALE].double()
        scale = scale * (tensor.unsqueeze(-1) if tensor.ndim else tensor)
    # A token has one scale, or one on each of several ranks.
    blocks = value.unflatten(-1, (-1, form.block[1] or value.shape[-1] // scale.shape[-1]))
    quotient = torch.where(scale.unsqueeze(-1) > 0, blocks / scale.unsqueeze(-1), 0.0).flatten(-2)
    codes = encode_array(quotient, form.element)
    return {**given, CODES: pack_nibbles(codes) if form.packed else codes}
