"""Judge quantised activations: element codes, block scales and tensor scales, as numbers.

An element code is legal where the exact quotient rounds to it, or lies within its slack of that
cell. A block scale is judged likewise, by the block's largest magnitude. The codes of a block are
then judged under the stored block scale, and everything under the stored tensor scale, so that one
wrong scale does not count twice. Slack is derived:

* NVFP4: scale and quotient each take two reciprocals within 2 units (4 u each) and two products (u
  each): 10 u. A float32 scale takes one of each: 5 u. A quotient by a power of two is exact.
* A tensor scale goes through two reciprocals: 8 u; one per token through one more product.
* The quantised value may itself be computed and stored (SwiGLU). Then the neighbour of the stored
  value counts as well, where its rounding boundary lies within the error.

Codes under a scale of zero stand for zero, whatever they are.

Shape letters: R rows, B blocks, b elements of one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.engine.budget.bounded_values import FUNCTION, Near, exactly, stored
from degarble.harness.engine.budget.budget import HEADROOM, Finding
from degarble.harness.engine.budget.grid import QUOTIENT
from degarble.harness.engine.budget.rules import UNDERFLOW, U, cut_off
from degarble.harness.formats.arrays import decode_array
from degarble.harness.formats.block_formats import BLOCK_FORMATS
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.element_formats import UE8M0
from degarble.harness.formats.packing import unpack_nibbles
from degarble.references.linears import BLOCK_SCALE, CODES, TENSOR_SCALE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.engine.budget.call import Call
    from degarble.harness.formats.types import BlockFormat, ElementFormat

_TWO_SCALES = 2 * (FUNCTION + 1)  # of u: two reciprocals and two products
_TENSOR_SCALE = 2 * FUNCTION  # of u: a scale converted to its reciprocal and back


class Cells(NamedTuple):
    """For every code its value, and the quotients that round to it (NaN for no number)."""

    value: Tensor
    low: Tensor
    high: Tensor


@dataclass(frozen=True, eq=False)
class Coded:
    """The result for one output: the worst element, the number of legal differences, their rows."""

    worst: Finding
    legal: int
    total: int
    rows: tuple[int, ...]
    words: tuple[str, ...]


@lru_cache(maxsize=8)
def _numbers(fmt: ElementFormat) -> Tensor:
    """Return the value of every code."""
    return decode_array(torch.arange(fmt.code_count, dtype=torch.int64), fmt).double()


@lru_cache(maxsize=8)
def cells(fmt: ElementFormat) -> Cells:
    """Return the cells of a signed format, or of positive scales."""
    value = _numbers(fmt)
    size = value[: fmt.largest_code + 1]
    middle = (size[1:] + size[:-1]) / 2
    low = torch.full_like(value, torch.nan)
    high = low.clone()
    for sign in (False, True) if fmt.signed else (False,):
        first = fmt.sign_mask if sign else 0
        at = slice(first, first + len(size))
        ends = torch.cat((-middle[:1], middle)), torch.cat((middle, middle.new_tensor([math.inf])))
        low[at], high[at] = (-ends[1], -ends[0]) if sign else ends
    return Cells(value, low, high)


def is_coded(call: Call) -> bool:
    """Tell whether a component outputs codes."""
    return CODES in call.outputs


def judge_codes(call: Call, candidate: Mapping[str, Tensor]) -> dict[str, Coded]:
    """Judge codes, block scales and the tensor scale of one component."""
    form, twin = format_of(call), call.outputs
    near = _values(call)
    made = {}
    scale = torch.ones((), dtype=torch.float64)
    blocks = near.value.unflatten(-1, (-1, form.block[1]))
    error = near.error.expand(near.value.shape).unflatten(-1, (-1, form.block[1]))
    # Largest magnitude of each block [..., B].
    size = Near(blocks.abs().amax(-1), error.amax(-1))
    if TENSOR_SCALE in twin:
        made[TENSOR_SCALE] = _tensor_scale(call, candidate[TENSOR_SCALE], size, form)
        scale = candidate[TENSOR_SCALE].double()
    steps = scale.reshape(*scale.shape, 1) if scale.ndim else scale
    stored_RB = _scale_values(candidate[BLOCK_SCALE], form)
    made[BLOCK_SCALE] = _block_scale(call, candidate[BLOCK_SCALE], (size, steps, stored_RB), form)
    own = (stored_RB * steps).unsqueeze(-1)
    made[CODES] = _codes(call, candidate[CODES], (Near(blocks, error), own), form)
    return made


def values_of(outputs: Mapping[str, Tensor], form: BlockFormat) -> Tensor:
    """Decode codes to float32."""
    value = cells(form.element).value[_elements(outputs[CODES], form).long()]
    scale = _scale_values(outputs[BLOCK_SCALE], form)
    if TENSOR_SCALE in outputs:
        tensor = outputs[TENSOR_SCALE].double()
        scale = scale * (tensor.unsqueeze(-1) if tensor.ndim else tensor)
    return (value * scale.repeat_interleave(form.block[1], -1)).float()


def format_of(call: Call) -> BlockFormat:
    """Return the format that a component quantises to."""
    known = {"ffn.experts.act_quant": "w2", "ffn.experts.w13.act_quant": "w1"}
    part = known.get(call.role)
    name = f"ffn.experts.0.{part}" if part else next(iter(call.weights))
    form = call.known_facts.activation(name)
    assert form is not None, "codes come only where the recipe quantises"
    return BLOCK_FORMATS[form]


def _values(call: Call) -> Near:
    """Return the quantised values [..., K], one row for each row of codes."""
    x, codes = call.inputs["x"], call.outputs[CODES]
    if call.role == "ffn.experts.act_quant":
        numerics, near = call.known_facts.numerics, gated(call)
        rounds = numerics.switches.activation_rounded_before_codes
        return stored(near, numerics.store) if rounds else near
    if codes.ndim > x.ndim:
        x = x.unsqueeze(1).expand(*codes.shape[:-1], x.shape[-1])
    return exactly(x)


def gated(call: Call, *, shared: bool = False) -> Near:
    """Return SwiGLU of the routed experts with its weight, or of a shared one; not stored yet."""
    facts = call.known_facts
    limit = facts.shared_limit if shared else facts.limit
    gate, up = call.inputs["x"].double().chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    if facts.numerics.switches.gate_rounded_before_product and not facts.numerics.exact:
        return _gated_in_steps(call, gate, up, weighed=facts.weight_before_w2 and not shared)
    share, product = torch.sigmoid(gate), gate * up
    if facts.weight_before_w2:
        product = product * call.inputs["weights"].double()[..., None]
    value = product * share
    turns = 2 * gate.abs() * (1 - share) + FUNCTION  # of u: the exponential, by its argument
    error = value.abs() * ((turns + FUNCTION + 4) * U)  # 1 + e^x, reciprocal, three products
    return Near(value, error + cut_off(share) * product.abs() + UNDERFLOW)


def _gated_in_steps(call: Call, gate: Tensor, up: Tensor, *, weighed: bool) -> Near:
    """Return SwiGLU where SiLU is stored before the product."""
    share = torch.sigmoid(gate)
    turns = 2 * gate.abs() * (1 - share) + FUNCTION
    value = gate * share
    error = value.abs() * ((turns + FUNCTION + 2) * U) + cut_off(share) * gate.abs() + UNDERFLOW
    near = stored(Near(value, error), call.known_facts.numerics.store)
    factor = up * call.inputs["weights"].double()[..., None] if weighed else up
    made = near.value * factor
    return Near(made, near.error * factor.abs() + 3 * U * made.abs() + UNDERFLOW)


def _bits(codes: Tensor) -> Tensor:
    return codes if codes.dtype is torch.uint8 else codes.view(torch.uint8)


def _elements(codes: Tensor, form: BlockFormat) -> Tensor:
    return unpack_nibbles(_bits(codes)) if form.packed else _bits(codes)


def _scale_values(scales: Tensor, form: BlockFormat) -> Tensor:
    """Return block scales as numbers; float32 scales are stored as numbers already."""
    if form.scale.bits == 32:
        return scales.double()
    return _numbers(form.scale)[_bits(scales).long()]


def _tensor_scale(call: Call, candidate: Tensor, size: Near, form: BlockFormat) -> Coded:
    twin = call.outputs[TENSOR_SCALE].double()
    slack, words = (
        twin * (_TENSOR_SCALE * U),
        f"the checkpoint's, or its reciprocal's: {_TENSOR_SCALE} u",
    )
    first = next(iter(call.weights.values()), None)
    if first is not None and first.input_scale is None:
        full = form.element.largest * form.scale.largest
        slack = slack + twin * U + (size.error.amax(-1) / full if twin.ndim else 0.0)
        words = f"a token's largest magnitude / {full:g}: {_TENSOR_SCALE + 1} u, and its own error"
    off = (candidate.double() - twin).abs().nan_to_num(nan=math.inf)
    return _coded(off, slack.expand(off.shape), off > 0, (words,))


def _block_scale(
    call: Call, candidate: Tensor, operands: tuple[Near, Tensor, Tensor], form: BlockFormat
) -> Coded:
    size, steps, kept = operands
    rule = CANONICAL.rule_for(form)
    unit = form.element.largest * steps
    exact = size.value.clamp(min=rule.amax_floor) / unit
    slack = size.error / unit + exact * ((QUOTIENT if form.scale.bits == 32 else _TWO_SCALES) * U)
    differs = kept != _scale_values(call.outputs[BLOCK_SCALE], form)
    if form.scale.bits == 32:
        words: tuple[str, ...] = (
            f"largest magnitude of a block / {form.element.largest:g}: {QUOTIENT} u",
        )
        off, slack = (kept - exact).abs(), slack + U * exact
    elif form.scale is UE8M0:
        slack = size.error / unit + exact * (QUOTIENT * U)
        # UE8M0 rounds up: legal where kept / 2 <= exact <= kept.
        low = torch.where(kept <= form.scale.smallest, 0.0, kept / 2)
        off = torch.maximum(exact.clamp(min=form.scale.smallest) - kept, low - exact)
        words = (f"the power of two above amax / {form.element.largest:g}, within {QUOTIENT} u",)
    else:
        code = _bits(candidate).long()
        table = cells(form.scale)
        off = _outside(exact, table, code)
        words = (f"amax / ({form.element.largest:g} tensor scale): {_TWO_SCALES} u", "rounded once")
    known = size.value.isfinite() & kept.isfinite()
    off = torch.where(known, off.clamp(min=0.0), math.inf)
    return _coded(torch.where(differs, off, 0.0), slack.nan_to_num(), differs, words)


def _codes(
    call: Call, candidate: Tensor, operands: tuple[Near, Tensor], form: BlockFormat
) -> Coded:
    (value, error), scale = operands
    table = cells(form.element)
    width = form.block[1]
    code = _elements(candidate, form).long().unflatten(-1, (-1, width))
    other = _elements(call.outputs[CODES], form).long().unflatten(-1, (-1, width))
    # Under a zero scale every code stands for zero.
    alive = (scale > 0).expand(code.shape)
    safe = torch.where(scale > 0, scale, 1.0)
    quotient = value / safe
    # Dividing by a power of two is exact.
    rounding = 0 if form.scale is UE8M0 else (QUOTIENT if form.scale.bits == 32 else _TWO_SCALES)
    slack = error / safe + quotient.abs() * (rounding * U)
    off = _outside(quotient, table, code)
    # An exact tie, without slack: round half to even, so the odd code is wrong.
    tied = (
        (off == 0) & (slack == 0) & ((quotient == table.low[code]) | (quotient == table.high[code]))
    )
    off = torch.where(tied & (code & 1 == 1), quotient.abs(), off)
    off = torch.where(value.isfinite(), off, (code != other).double())
    slack = torch.where(value.isfinite(), slack, 0.0)
    off = torch.where(alive, off, 0.0)
    differs = alive & (table.value[code] != table.value[other])
    words = (
        f"a quotient by the stored scales: {rounding} u, and the error of what is quantised",
        "a code is legal where the quotient lies in its cell, or within slack of it",
    )
    return _coded(off.flatten(-2), slack.flatten(-2), differs.flatten(-2), words)


def _outside(quotient: Tensor, table: Cells, code: Tensor) -> Tensor:
    """Return how far quotients lie outside the cells of their codes; infinite for invalid codes."""
    off = torch.maximum(table.low[code] - quotient, quotient - table.high[code]).clamp(min=0.0)
    return torch.where(table.value[code].isnan(), math.inf, off)


def _coded(off: Tensor, slack: Tensor, differs: Tensor, words: tuple[str, ...]) -> Coded:
    """Return the worst element in units of budget, and how many differ legally."""
    allowed = slack / HEADROOM
    ratio = torch.where(off > 0, off / allowed, 0.0)
    width = off.shape[-1] if off.ndim else 1
    worst = Finding("element", (), 0.0, 0.0)
    if off.numel():
        at = int(ratio.flatten().argmax())
        place = divmod(at, width)
        measured, most = float(off.flatten()[at]), float(allowed.expand(off.shape).flatten()[at])
        worst = Finding("element", place, measured, most)
    legal = differs & (ratio <= 1)
    rows = legal.reshape(-1, width).any(-1).nonzero().flatten()[:16].tolist() if legal.any() else []
    return Coded(worst, int(legal.sum()), off.numel(), tuple(rows), words)
