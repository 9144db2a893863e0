"""Matrix products of a linear, with and without quantised operands, and quantised activations.

Legend: T tokens, N outputs, K inputs, B blocks of an input, b elements of one.
In the twin (numerics.Mode) both operands are decoded exactly and summed in `numerics.products`; the
output is rounded once. Activations arrive as values `x`, or as `codes` with `block_scale` and
`tensor_scale`; the presence of codes decides, not a flag. An NVFP4 tensor scale is the checkpoint's
input scale; without one, it follows from every token's own largest magnitude, so that no token
depends on another. The same holds of formats with one scale a token: a stored scale is every
token's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.base.errors import UnknownName
from degarble.harness.formats.codec import decode_array, encode_array
from degarble.harness.formats.dialects import CANONICAL, COMPRESSED_TENSORS
from degarble.harness.formats.layouts import LINEAR
from degarble.harness.formats.number_formats import (
    BLOCK_FORMATS,
    E4M3,
    FP8_128X128_UE8M0,
    FP32,
    WHOLE,
    NibbleOrder,
    ScaleDirection,
)
from degarble.harness.formats.quantise import QuantisedTensor, dequantise, quantise, spread_blocks
from degarble.harness.formats.weight import DerivedWeight, Weight
from degarble.references import tensor_core
from degarble.references.numerics import FEW_TOKENS, CodeSums, DecodedOperands, cast, compiles

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.formats.number_formats import BlockFormat
    from degarble.references.numerics import Numerics
    from degarble.references.tensor_core import StepRule

CODES, X, BLOCK_SCALE, TENSOR_SCALE = "codes", "x", "block_scale", "tensor_scale"
X_LOOSE = "x_loose"  # beside codes that a twin made of a run's numbers: how far they may be off
_CHUNK = 1 << 24  # elements of a weight that are converted at once
_BLOCK = 128  # rows of the tallest blocks with one scale
_DEEPGEMM_ROWS = 64  # of which its weights have a multiple
STAGE = 128  # of K after which kernels add a tensor core's sum to float32
# The instruction that sums, and whether a sum begins again after every stage.
SHORT_SUMS: Mapping[CodeSums, tuple[StepRule, bool]] = MappingProxyType(
    {
        CodeSums.HOPPER: (tensor_core.WGMMA_FP8, False),
        CodeSums.HOPPER_IN_STAGES: (tensor_core.WGMMA_FP8, True),
        CodeSums.ADA: (tensor_core.MMA_FP8, False),
        CodeSums.ADA_IN_STAGES: (tensor_core.MMA_FP8, True),
    }
)


def quantise_activations(
    x: Tensor, format_name: str, input_scale: Tensor | None, *, stepwise: bool = False
) -> dict[str, Tensor]:
    """Return codes and scales of inputs [..., K]; `input_scale`: one, or one per leading index.

    `stepwise`: as compressed-tensors computes, every step in the dtype of `x`.
    """
    if format_name not in BLOCK_FORMATS:
        raise UnknownName.among("activation format", format_name, BLOCK_FORMATS)
    form = BLOCK_FORMATS[format_name]
    values = (x.float() if x.dtype is torch.float64 else x).contiguous()
    if form.scale is FP32 and (stepwise or (form.block[1] == WHOLE and input_scale is not None)):
        return _by_float_scales(values, form, input_scale, stepwise=stepwise)
    if stepwise and form.tensor_scale and input_scale is not None and input_scale.ndim == 0:
        made = quantise(values, form, COMPRESSED_TENSORS, decode_scale=input_scale)
        return {CODES: made.codes, BLOCK_SCALE: made.block_scale, TENSOR_SCALE: made.decode_scale}
    if not form.tensor_scale:
        made = quantise(values, form, CANONICAL)
        return {CODES: made.codes, BLOCK_SCALE: made.block_scale}
    if input_scale is not None and input_scale.ndim == 0:
        made = quantise(values, form, CANONICAL, decode_scale=input_scale)
        return {CODES: made.codes, BLOCK_SCALE: made.block_scale, TENSOR_SCALE: made.decode_scale}
    single = values.unsqueeze(-2)  # one row a matrix, so that each has a tensor scale of its own
    if input_scale is None:
        made = quantise(single, form, CANONICAL, amax=values.abs().amax(-1).float())
    else:
        made = quantise(single, form, CANONICAL, decode_scale=input_scale)
    return {
        CODES: made.codes.squeeze(-2),
        BLOCK_SCALE: made.block_scale.squeeze(-2),
        TENSOR_SCALE: made.decode_scale,
    }


def _by_float_scales(
    values: Tensor, form: BlockFormat, input_scale: Tensor | None, *, stepwise: bool
) -> dict[str, Tensor]:
    """Quantise by a stored scale, or by scales that are computed in the dtype of the values."""
    dtype = values.dtype if stepwise else torch.float32
    width = form.block[1] or values.shape[-1]
    x_Bb = values.to(dtype).unflatten(-1, (-1, width))
    if input_scale is not None:
        scale_B1 = input_scale.to(dtype).reshape(
            *input_scale.shape, *[1] * (x_Bb.ndim - input_scale.ndim)
        )
        scale_B1 = scale_B1.expand(*x_Bb.shape[:-1], 1)
    else:
        # compressed-tensors divides by half of the range: 127.5 for integers.
        half = (form.element.largest - form.element.lowest) / 2
        scale_B1 = x_Bb.abs().amax(-1, keepdim=True) / half
        scale_B1 = torch.where(scale_B1 == 0, torch.finfo(dtype).eps, scale_B1)
    codes = encode_array((x_Bb / scale_B1).flatten(-2), form.element)
    return {CODES: codes, BLOCK_SCALE: scale_B1.squeeze(-1).float().contiguous()}


@dataclass(frozen=True)
class InputQuantiser:
    """How the input of a product is quantised: by a stored scale, or by a token's own."""

    format: str
    scale: Tensor | None = None  # stored
    stepwise: torch.dtype | None = None  # in which every step is stored
    decoded: torch.dtype | None = None  # to which numbers are rounded once decoded
    ranks: int = 1  # each of which quantises its own part of K

    def codes(self, x: Tensor) -> dict[str, Tensor]:
        """Return codes and scales; of several ranks, a token has one scale on each."""
        whole = BLOCK_FORMATS[self.format].block[1] == WHOLE
        if self.ranks > 1 and whole and self.scale is None:
            alone = replace(self, ranks=1)
            made = [alone.codes(part) for part in x.chunk(self.ranks, -1)]
            return {name: torch.cat([each[name] for each in made], -1) for name in made[0]}
        if self.stepwise is None:
            return quantise_activations(x, self.format, self.scale)
        return quantise_activations(cast(x, self.stepwise), self.format, self.scale, stepwise=True)

    def values(self, codes: Mapping[str, Tensor]) -> Tensor:
        """Return what codes stand for, in float64, as they are multiplied."""
        if self.decoded is None:
            return decode_activations(codes, self.format, torch.float64)
        return cast(
            cast(decode_activations(codes, self.format, torch.float32), self.decoded), torch.float64
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Return values as they are multiplied."""
        return self.values(self.codes(x))


def largest_scale(weights: Iterable[Weight]) -> Tensor | None:
    """Return the largest input scale of weights that share their input; None where one has none."""
    scales = [weight.input_scale for weight in weights]
    known = [scale.to(torch.float32).reshape(()) for scale in scales if scale is not None]
    if not known or len(known) < len(scales):
        return None
    return known[0] if len(known) == 1 else torch.stack(known).amax()


def holds_codes(inputs: Mapping[str, Tensor]) -> bool:
    """Return whether the input arrives as codes."""
    return CODES in inputs


def decode_activations(
    inputs: Mapping[str, Tensor], format_name: str, dtype: torch.dtype
) -> Tensor:
    """Return the values [..., K] of codes that `quantise_activations` made."""
    form = BLOCK_FORMATS[format_name]
    codes, block_scale, scale = inputs[CODES], inputs[BLOCK_SCALE], inputs.get(TENSOR_SCALE)
    ranks = block_scale.shape[-1] if form.block[1] == WHOLE else 1
    if ranks > 1:
        pairs = zip(codes.chunk(ranks, -1), block_scale.chunk(ranks, -1), strict=True)
        parts = [{CODES: code, BLOCK_SCALE: own} for code, own in pairs]
        return torch.cat([decode_activations(part, format_name, dtype) for part in parts], -1)
    per_row = scale is not None and scale.ndim > 0
    if per_row:
        codes, block_scale = codes.unsqueeze(-2), block_scale.unsqueeze(-2)
    width = codes.shape[-1] * (2 if form.packed else 1)
    tensor = QuantisedTensor(
        codes=codes,
        block_scale=block_scale,
        tensor_scale=scale,
        format=form,
        dialect=CANONICAL,
        layout=LINEAR,
        direction=None if scale is None else ScaleDirection.DECODE,
        nibble_order=NibbleOrder.LOW_EVEN if form.packed else None,
        shape=(*codes.shape[:-1], width),
    )
    values = dequantise(tensor, dtype)
    return values.squeeze(-2) if per_row else values


def activation_values(
    inputs: Mapping[str, Tensor],
    format_name: str | None,
    dtype: torch.dtype,
    numerics: Numerics | None = None,
) -> Tensor:
    """Return the input in `dtype` as it is multiplied, decoded where codes arrived."""
    if not holds_codes(inputs):
        return cast(inputs[X], dtype)
    assert format_name is not None, "codes arrive only where the recipe quantises activations"
    if numerics is None or numerics.operands is not DecodedOperands.BOTH:
        return decode_activations(inputs, format_name, dtype)
    decoded = decode_activations(inputs, format_name, torch.float32)
    return cast(cast(decoded, numerics.decoded), dtype)


def weight_values(weight: Weight, dtype: torch.dtype, numerics: Numerics | None) -> Tensor:
    """Return a weight's values in `dtype`, as `numerics` multiplies them."""
    if numerics is None or numerics.operands is DecodedOperands.EXACT or not weight.is_decoded:
        return weight.values(dtype)
    return cast(cast(weight.values(torch.float32), numerics.decoded), dtype)


def weight_rows(
    weight: Weight, part: slice, dtype: torch.dtype, numerics: Numerics | None
) -> Tensor:
    """Return what `weight_values` does, of a part of the first axis."""
    if numerics is None or numerics.operands is DecodedOperands.EXACT or not weight.is_decoded:
        return weight.rows(part, dtype)
    return cast(cast(weight.rows(part, torch.float32), numerics.decoded), dtype)


def matrix_parts(shape: tuple[int, ...], most: int = _CHUNK) -> Iterator[slice]:
    """Yield slices of a matrix's rows with about so many elements, in whole blocks.

    Of a stack of matrices they are slices of its first axis.
    """
    rows = most // max(1, prod(shape[1:]))
    rows = max(1, rows) if len(shape) > 2 else max(_BLOCK, rows // _BLOCK * _BLOCK)
    for begin in range(0, shape[0], rows):
        yield slice(begin, min(begin + rows, shape[0]))


def with_powers_of_two(weight: Weight) -> Weight:
    """Return a weight in FP8 blocks quantised again, its scales rounded up to powers of two.

    It stays as it is where DeepGEMM does not take it: rows in parts of 64, columns in parts of 128.
    """
    *_, rows, columns = weight.shape if len(weight.shape) > 1 else (1, 1)
    if rows % _DEEPGEMM_ROWS or columns % STAGE or weight.channel_scale is not None:
        return weight
    if weight.is_quantised:
        whole = dequantise(weight.quantised(), torch.float32)
        return Weight.of(quantise(whole, FP8_128X128_UE8M0, CANONICAL), weight.input_scale)
    if weight.elements(slice(0, 1)) is None:
        return weight

    def again(part: slice) -> QuantisedTensor:
        found = weight.elements(part)
        assert found is not None, "its first entry has elements"
        return quantise(found[0] * found[1], FP8_128X128_UE8M0, CANONICAL)

    def values(part: slice, dtype: torch.dtype) -> Tensor:
        return dequantise(again(part), dtype)

    def elements(part: slice) -> tuple[Tensor, Tensor]:
        made = again(part)
        numbers = made.codes.view(torch.float8_e4m3fn).float()
        return numbers, spread_blocks(made, made.scale_values())

    return DerivedWeight(
        make=lambda dtype: values(slice(0, weight.shape[0]), dtype), extents=weight.shape,
        make_rows=values, make_elements=elements, from_codes=True, input_scale=weight.input_scale,
    )  # fmt: skip


def products(
    inputs: Mapping[str, Tensor],
    format_name: str | None,
    weights: Iterable[Weight],
    numerics: Numerics,
) -> list[Tensor]:
    """Return the products of one input, which may be codes, in the dtype of products."""
    dtype, x, made = numerics.products, None, []
    for weight in weights:
        out = short_summed(inputs, format_name, weight, numerics)
        if out is None:
            x = activation_values(inputs, format_name, dtype, numerics) if x is None else x
            out = product(x, weight, dtype, numerics)
        made.append(out)
    return made


def matmul(x_TK: Tensor, weight: Weight, numerics: Numerics) -> Tensor:
    """Return `x @ w.T` summed in the dtype of products, rounded once to the stored dtype."""
    return cast(product(x_TK, weight, numerics.products, numerics), numerics.store)


def product(
    x_TK: Tensor, weight: Weight, dtype: torch.dtype, numerics: Numerics | None = None
) -> Tensor:
    """Return `x @ w.T` in `dtype`; a large weight of another dtype is converted in pieces.

    `numerics` may allow the compiled loop for a few tokens.
    """
    value, x = weight.value, cast(x_TK, dtype)
    if value is None and len(weight.shape) == 2 and prod(weight.shape) > _CHUNK:
        parts = (weight_rows(weight, part, dtype, numerics) for part in matrix_parts(weight.shape))
        return torch.cat([torch.matmul(x, part.T) for part in parts], dim=-1)
    if value is None or value.dtype is dtype or weight.is_decoded:
        return torch.nn.functional.linear(x, weight_values(weight, dtype, numerics))
    if (
        numerics is not None
        and reads_as_stored(x, value, numerics)
        and x.shape[1] == value.shape[1]
    ):
        from degarble.references import compiled  # noqa: PLC0415  numba is heavy

        return compiled.product(x, value)
    if value.numel() <= _CHUNK:
        return torch.nn.functional.linear(x, weight.values(dtype))
    rows = max(1, _CHUNK // value.shape[1])
    return torch.cat([torch.matmul(x, part.to(dtype).T) for part in value.split(rows)], dim=-1)


class _Elements(NamedTuple):
    """An operand in FP8: codes [R, K], and the scales [R, S] of parts of K."""

    codes: Tensor
    scales: Tensor
    extent: int  # of K under one scale

    @classmethod
    def of(cls, codes: Tensor, scale: Tensor, form: BlockFormat) -> _Elements | None:
        """Return the operand; None if it is another format, or has a scale within 128 of K."""
        columns = codes.shape[-1]
        # Of several ranks each has a scale for its part of K.
        parts = 1 if form.block[0] == WHOLE else scale.shape[-1]
        extent = form.block[1] or columns // parts
        cut = form.tensor_scale or form.block[1] % STAGE
        if form.element is not E4M3 or codes.ndim != 2 or cut:
            return None
        values = scale if form.scale is FP32 else decode_array(scale, form.scale)
        if len(values) != len(codes):
            rows = form.block[0] or len(codes)
            values = values.repeat_interleave(rows, 0)[: len(codes)]
        return cls(codes, values, extent)

    @classmethod
    def of_numbers(cls, numbers: Tensor, scale: Tensor) -> _Elements | None:
        """Return an operand of what codes stand for, with a scale for each."""
        codes = numbers.to(torch.float8_e4m3fn).view(torch.uint8)
        for extent in (codes.shape[1], STAGE):
            scales = scale[:, ::extent]
            if torch.equal(scales.repeat_interleave(extent, 1)[:, : codes.shape[1]], scale):
                return cls(codes, scales, extent)
        return None


def short_summed(
    inputs: Mapping[str, Tensor], format_name: str | None, weight: Weight, numerics: Numerics
) -> Tensor | None:
    """Return `x @ w.T` of FP8 codes as a tensor core sums them; None where nothing does."""
    if numerics.code_sums is CodeSums.FLOAT32 or format_name is None or not holds_codes(inputs):
        return None
    if not weight.is_quantised:
        return None
    a = _Elements.of(inputs[CODES], inputs[BLOCK_SCALE], BLOCK_FORMATS[format_name])
    w = weight.quantised()
    b = _Elements.of(w.codes, w.block_scale, w.format)
    return None if a is None or b is None else _short_sums(a, b, numerics)


def short_summed_entry(
    x: Tensor, quantiser: InputQuantiser, weight: Weight, number: int, numerics: Numerics
) -> Tensor | None:
    """Return `x @ w.T` of one matrix of a stack as a tensor core sums FP8; None where none does."""
    if numerics.code_sums is CodeSums.FLOAT32:
        return None
    elements = weight.elements(slice(number, number + 1))
    if elements is None:
        return None
    given = quantiser.codes(x)
    a = _Elements.of(given[CODES], given[BLOCK_SCALE], BLOCK_FORMATS[quantiser.format])
    b = _Elements.of_numbers(elements[0][0], elements[1][0])
    return None if a is None or b is None else _short_sums(a, b, numerics)


def _short_sums(a: _Elements, b: _Elements, numerics: Numerics) -> Tensor:
    rule, in_stages = SHORT_SUMS[numerics.code_sums]
    shape, columns = (len(a.codes), len(b.codes)), a.codes.shape[1]
    out = torch.zeros(shape, dtype=numerics.products, device=b.codes.device)
    begins = {*range(0, columns, a.extent), *range(0, columns, b.extent)}
    if in_stages:  # a rank's part of K need not be in stages of 128, and begins with one of its own
        for first in range(0, columns, a.extent):
            begins |= {*range(first, min(first + a.extent, columns), STAGE)}
    for begin, end in pairwise([*sorted(begins), columns]):
        part = slice(begin, end)
        sums = tensor_core.short_sums(a.codes[:, part], b.codes[:, part], rule).to(out.dtype)
        x_scale, w_scale = a.scales[:, begin // a.extent], b.scales[:, begin // b.extent]
        out += sums * x_scale.to(out.dtype)[:, None] * w_scale.to(out.dtype)
    return out


def reads_as_stored(x_TK: Tensor, value_NK: Tensor, numerics: Numerics) -> bool:
    """Return whether the compiled loop may multiply these few tokens by a weight's stored BF16."""
    few = x_TK.ndim == 2 and x_TK.shape[0] <= FEW_TOKENS
    exact = x_TK.dtype is torch.float64 and value_NK.dtype is torch.bfloat16
    return few and exact and compiles(numerics, x_TK, value_NK)


def table_rows(weight: Weight, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of a table in `dtype`; only these are converted."""
    if weight.value is None:
        return weight.values(dtype)[numbers]
    return weight.value[numbers].to(dtype)
