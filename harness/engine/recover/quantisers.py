"""Recover how a quantiser made its codes: by which tensor scale, block scales and rounding.

Its outputs are codes, so nothing has to be solved for: block scales are compared with those of
other halves of a block, another tensor scale or a rule for places, and codes with the quotients of
the numbers and the scales that were seen or that are right.

Shape letters: R rows, K columns, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import CANNOT_RUN, DegarbleError
from degarble.harness.engine.faults.model_faults import (
    FaultVariant,
    facts_at,
    has_facts,
    with_facts,
    with_outputs,
)
from degarble.harness.engine.recover.maps import Sides, simplest
from degarble.harness.engine.recover.numbers import functions, grids, places, readings
from degarble.harness.engine.recover.stated import operation
from degarble.harness.formats.codec import (
    decode_array,
    encode_array,
    pack_nibbles,
    unpack_nibbles,
)
from degarble.harness.formats.number_formats import BLOCK_FORMATS, NanRule, Rounding
from degarble.harness.report.number_text import number
from degarble.references.linears import BLOCK_SCALE, CODES, TENSOR_SCALE, X, quantise_activations

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext
    from degarble.harness.formats.number_formats import BlockFormat

    Tensors = Mapping[str, Tensor]
    Scales = Callable[["Quantised"], Tensor]  # the codes [R, B] that are stored

ALIKE = 0.98  # of codes, and of block scales
MOST_PROVED = 6
_BORDER = 1.1  # of half a step: block scales are rounded as well
_TINY = 1e-300


@dataclass(frozen=True, eq=False)
class Quantised:
    """Numbers of a quantiser's rows, and what it should have made of them."""

    form: BlockFormat
    values: Tensor  # [R, K] of float64
    codes: Tensor  # [R, K], right ones
    scales: Tensor  # [R, B], right ones: codes, or float32
    factor: Tensor  # [R, 1] of float64: the tensor scale
    slots: int = 1  # rows of a token

    @property
    def width(self) -> int:
        """Return the columns of a block."""
        return self.values.shape[1] // max(1, self.scales.shape[1])

    def numbers_of(self, scales: Tensor) -> Tensor:
        """Return what scale codes stand for."""
        if scales.is_floating_point():
            return scales.double()
        return decode_array(scales, self.form.scale).double()

    def coded(self, scales: Tensor) -> Tensor:
        """Return numbers as the scale's format holds them."""
        if self.scales.is_floating_point():
            return scales.to(self.scales.dtype)
        return encode_array(scales.float().contiguous(), self.form.scale, nan=NanRule.LARGEST)

    def quotients(self, scales: Tensor, factor: Tensor) -> Tensor:
        """Return the numbers over the scales that they are stored with; 0 where these are 0."""
        divided = self.numbers_of(scales).repeat_interleave(self.width, 1) * factor
        return torch.where(divided == 0, 0.0, self.values / divided)

    def quantised(self, values: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and block scales of other numbers, or by another tensor scale."""
        scale = None
        if self.form.tensor_scale:
            scale = factor.reshape(-1).float().expand(len(values))
        return _parts(self.form, quantise_activations(values.float(), self.form.name, scale))


def quantiser_edits(context: ComponentContext, record: CallRecord) -> list[FaultVariant]:
    """Return ways to make codes that give those that were seen, the simplest first."""
    seen = record.outputs
    if CODES not in record.expected or seen.get(CODES) is None or not has_facts(context):
        return []
    held = _quantised(context, record.inputs, record.expected)
    if held is None or any(seen[n].shape != record.expected[n].shape for n in seen):
        return []
    other = _parts(held.form, seen)
    found = []
    scale, passed = seen.get(TENSOR_SCALE), ""
    if scale is not None and not torch.equal(scale, record.expected[TENSOR_SCALE]):
        if scale.unique().numel() > 1:
            return []
        passed = f", and the tensor scale that is handed on is {float(scale.reshape(-1)[0]):.4g}"
    for words, of_scales, of_codes in _ways(held, other):
        try:
            scales = of_scales(held)
            if _unlike(scales, other[1], held.scales) > 1 - ALIKE:
                continue
            if _unlike(of_codes(held, scales), other[0], held.codes) > 1 - ALIKE:
                continue
        except (*CANNOT_RUN, DegarbleError):
            continue
        handed_on = scale.reshape(-1)[0] if passed and scale is not None else None
        change = with_outputs(partial(_made_anew, context, of_scales, of_codes, handed_on))
        found.append(FaultVariant(words + passed, change))
        if len(found) == MOST_PROVED:
            break
    return found


def decoded_input(context: ComponentContext, record: CallRecord) -> Sides | None:
    """Return a quantiser's input as its codes hold it, within what rounding to codes may change."""
    seen, x = record.outputs, record.inputs.get(X)
    if CODES not in record.expected or seen.get(CODES) is None or not has_facts(context):
        return None
    if x is None or any(seen[n].shape != record.expected[n].shape for n in seen):
        return None
    held = _quantised(context, record.inputs, {**record.expected, **seen})
    if (
        held is None
        or x.shape[-1] != held.codes.shape[1]
        or len(held.factor) not in {1, len(held.codes)}
    ):
        return None
    table = decode_array(torch.arange(held.form.element.code_count), held.form.element).double()
    finite = table[table.isfinite()].unique()
    gaps = finite.diff()
    around = torch.maximum(
        torch.cat([gaps, gaps[-1:]]), torch.cat([gaps[:1], gaps])
    )  # fmt: skip
    elements = table[held.codes.long()]
    steps = held.numbers_of(held.scales).repeat_interleave(held.width, 1) * held.factor
    allowed = around[torch.searchsorted(finite, elements.nan_to_num(0, 0, 0))] / 2 * steps
    sides = (elements * steps, held.values, allowed * _BORDER)
    used, right, allowed = (side[:: held.slots] for side in sides)
    return Sides(X, used, right, allowed)


def _unlike(made: Tensor, seen: Tensor, right: Tensor) -> float:
    """Return the share of codes that are others, of all or of those that were not right."""
    unlike = made != seen
    if made.is_floating_point():
        unlike = ~torch.isclose(made, seen, rtol=1e-6)
    before = seen != right
    share = float(unlike.double().mean())
    return max(share, float(unlike[before].double().mean()) if bool(before.any()) else 0.0)


def _quantised(context: ComponentContext, inputs: Tensors, outputs: Tensors) -> Quantised | None:
    """Return a quantiser's numbers: its input, or what it computes before it quantises."""
    facts = facts_at(context)
    chosen = next((facts.activation(name) for name in context.weights), None)
    form = None if chosen is None else BLOCK_FORMATS.get(chosen)
    if form is None:
        return None
    codes, scales = _parts(form, outputs)
    x, lead = inputs[X], outputs[CODES].shape[:-1]
    if x.shape[-1] != codes.shape[1]:
        bare = with_facts(context, _unquantised)(context.call)
        x = bare(inputs, context.weights)["out"]
    if x.ndim < len(lead) + 1:
        x = x.unsqueeze(-2).expand(*lead, x.shape[-1])
    factor = outputs.get(TENSOR_SCALE, torch.ones(())).double().reshape(-1, 1)
    slots = len(codes) // max(1, lead[0])
    return Quantised(form, x.reshape(codes.shape).double(), codes, scales, factor, slots)


def _unquantised(facts: Any) -> Any:
    return replace(facts, formats={})


def _parts(form: BlockFormat, outputs: Tensors) -> tuple[Tensor, Tensor]:
    codes, scales = outputs[CODES], outputs[BLOCK_SCALE]
    codes = codes.reshape(-1, codes.shape[-1])
    codes = unpack_nibbles(codes) if form.packed else codes
    return codes, scales.reshape(-1, scales.shape[-1])


@operation
def _made_anew(
    context: ComponentContext,
    of_scales: Any,
    of_codes: Any,
    handed_on: Tensor | None,
    inputs: Tensors,
    outputs: Tensors,
) -> Tensors:
    held = _quantised(context, inputs, outputs)
    assert held is not None, "it was read before"
    scales = of_scales(held)
    codes = of_codes(held, scales).to(held.codes.dtype)
    packed = pack_nibbles(codes) if held.form.packed else codes
    scale = (
        {TENSOR_SCALE: handed_on.expand_as(outputs[TENSOR_SCALE])} if handed_on is not None else {}
    )
    return {
        **outputs,
        **scale,
        CODES: packed.reshape(outputs[CODES].shape).to(outputs[CODES].dtype),
        BLOCK_SCALE: scales.reshape(outputs[BLOCK_SCALE].shape).to(outputs[BLOCK_SCALE].dtype),
    }


# ---- ways ----------------------------------------------------------------------------------------

Codes = Callable[[Quantised, "Tensor"], "Tensor"]


def _ways(held: Quantised, other: tuple[Tensor, Tensor]) -> Iterator[tuple[str, Scales, Codes]]:
    """Yield words, the block scales, and the codes given these scales."""
    for rounding, words in _ROUNDINGS.items():
        yield f"codes are rounded {words}", _right, partial(_by_quotients, rounding)
    for each in functions():
        text = f"the numbers are {each.words} before they are coded"
        yield text, partial(_scales_of, each.apply), partial(_of_values, each.apply)
    for words, scales in _scale_ways(held, other[1]):
        yield f"{words}, and codes follow them", scales, partial(_by_quotients, _NEAREST)
        yield f"{words} after the codes are made", scales, _right_codes
    for words, of in _factors(held, other):
        text = f"the tensor scale is {words} when codes are made"
        yield text, partial(_by_factor, of), partial(_by_own_factor, of)
    constant = other[0][0, 0], other[1][0, 0]
    if all(bool((part == value).all()) for part, value in zip(other, constant, strict=True)):
        words = f"all codes are {int(constant[0]):#x} and all block scales {constant[1].item():g}"
        yield words, partial(_all_scales, constant[1]), partial(_all_codes, constant[0])
    for rule in places(held.codes.shape[1]):
        yield f"codes of columns are {rule.words}", _right, partial(_codes_moved, rule.of)
    for rule in places(held.scales.shape[1]) if held.scales.shape[1] > 1 else ():
        yield (
            f"blocks of a row are {rule.words}",
            partial(_blocks_of_scales, rule.of),
            partial(_blocks_moved, rule.of),
        )


_NEAREST = Rounding.NEAREST_EVEN
_ROUNDINGS = {
    Rounding.TOWARD_ZERO: "toward zero",
    Rounding.UP: "up",
    Rounding.DOWN: "down",
    Rounding.NEAREST_AWAY: "half away from zero",
}


@operation
def _right(held: Quantised) -> Tensor:
    return held.scales


@operation
def _right_codes(held: Quantised, _scales: Tensor) -> Tensor:
    return held.codes


@operation
def _by_quotients(rounding: Rounding, held: Quantised, scales: Tensor) -> Tensor:
    quotients = held.quotients(scales, held.factor).float()
    return encode_array(quotients, held.form.element, rounding, nan=NanRule.LARGEST)


@operation
def _all_scales(value: Tensor, held: Quantised) -> Tensor:
    return value.expand_as(held.scales)


@operation
def _all_codes(value: Tensor, held: Quantised, _scales: Tensor) -> Tensor:
    return value.expand_as(held.codes)


@operation
def _by_own_factor(of: Callable[[Tensor], Tensor], held: Quantised, scales: Tensor) -> Tensor:
    del scales
    return held.quantised(held.values, of(held.factor))[0]


@operation
def _of_values(of: Callable[[Tensor], Tensor], held: Quantised, scales: Tensor) -> Tensor:
    return _by_quotients(_NEAREST, replace(held, values=of(held.values)), scales)


@operation
def _scales_of(of: Callable[[Tensor], Tensor], held: Quantised) -> Tensor:
    return held.quantised(of(held.values), held.factor)[1]


@operation
def _codes_moved(of: Callable[[int], Tensor], held: Quantised, _scales: Tensor) -> Tensor:
    return held.codes[:, of(held.codes.shape[1])]


@operation
def _blocks_of_scales(of: Callable[[int], Tensor], held: Quantised) -> Tensor:
    return held.scales[:, of(held.scales.shape[1])]


@operation
def _blocks_moved(of: Callable[[int], Tensor], held: Quantised, _scales: Tensor) -> Tensor:
    count = held.scales.shape[1]
    moved: Tensor = held.codes.unflatten(1, (count, -1))[:, of(count)].flatten(1)
    return moved


def _scale_ways(held: Quantised, seen: Tensor) -> Iterator[tuple[str, Scales]]:
    half = held.width // 2
    column = torch.arange(held.values.shape[1]) % held.width
    for words, kept in (
        ("the first half", column < half), ("the second half", column >= half),
        ("the even columns", column % 2 == 0), ("the odd columns", column % 2 == 1),
    ):  # fmt: skip
        yield f"block scales are those of {words} of each block", partial(_of_part, kept)
    for each in functions():
        yield f"block scales are {each.words}", partial(_by_function, each.apply)
    if not held.scales.is_floating_point():
        for each in readings(held.form.scale):
            yield f"block scales are {each.words}", partial(_by_reading, each.apply)
    for rule in places(len(held.scales))[:24] if len(held.scales) > 1 else ():
        yield f"block scales of rows are {rule.words}", partial(_rows_of_scales, rule.of)
    for rule in places(held.scales.shape[1]) if held.scales.shape[1] > 1 else ():
        yield f"block scales of a row are {rule.words}", partial(_blocks_of_scales, rule.of)
    for grid in grids():
        yield f"block scales are {grid.words}", partial(_by_grid, grid.of)
    yield from _by_last_row(held, seen)


@operation
def _of_part(kept: Tensor, held: Quantised) -> Tensor:
    return held.quantised(torch.where(kept, held.values, 0.0), held.factor)[1]


@operation
def _by_function(of: Callable[[Tensor], Tensor], held: Quantised) -> Tensor:
    return held.coded(of(held.numbers_of(held.scales)))


@operation
def _by_reading(of: Callable[[Tensor], Tensor], held: Quantised) -> Tensor:
    return held.coded(of(held.scales))


@operation
def _rows_of_scales(of: Callable[[int], Tensor], held: Quantised) -> Tensor:
    return held.scales[of(len(held.scales))]


@operation
def _by_grid(of: Callable[[int, int], Tensor], held: Quantised) -> Tensor:
    where, flat = of(*held.scales.shape), held.scales.reshape(-1)
    made = torch.where(where < 0, torch.zeros_like(flat), flat[where.clamp(min=0)])
    return made.reshape(held.scales.shape)


def _by_last_row(held: Quantised, seen: Tensor) -> Iterator[tuple[str, Scales]]:
    """Yield one scale for the last row of a call, where no other row differs."""
    wrong = (seen != held.scales).any(1)
    value, last = seen[-1, 0], slice(len(seen) - held.slots, None)
    wrong_before = bool(wrong[: last.start].any())
    if bool(wrong[last].any()) and not wrong_before and bool((seen[last] == value).all()):
        shown = number(float(held.numbers_of(value.reshape(1))), 4)
        yield f"block scales of the last row are {shown}", partial(_last_row, value)


@operation
def _last_row(value: Tensor, held: Quantised) -> Tensor:
    made = held.scales.clone()
    made[len(made) - held.slots :] = value
    return made


def _factors(
    held: Quantised, seen: tuple[Tensor, Tensor]
) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Yield functions of the tensor scale, and the one by which the codes stand for the numbers."""
    if not held.form.tensor_scale:
        return
    for each in functions():
        yield each.words, each.apply
    elements = decode_array(seen[0], held.form.element).double()
    coded = elements * held.numbers_of(seen[1]).repeat_interleave(held.width, 1)
    clear = (elements.abs() < held.form.element.largest) & coded.isfinite() & (coded != 0)
    if not bool(clear.any()):
        return
    factor = float((held.values * coded)[clear].sum() / coded[clear].square().sum())
    for slack in (0.05, 0.01, 0.002, 0.0):
        value = simplest(factor, slack * abs(factor))
        yield number(value, 4), partial(torch.full_like, fill_value=value)


@operation
def _by_factor(of: Callable[[Tensor], Tensor], held: Quantised) -> Tensor:
    return held.quantised(held.values, of(held.factor))[1]
