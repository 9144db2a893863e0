"""Judge discrete outputs: codes with their scales, routed experts, rows that attention reads.

A discrete value may differ only where the exact number lies within its error of a boundary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.engine.budget.bounded_values import (
    FUNCTION,
    QUOTIENT,
    BoundedValue,
    exactly,
    stored,
)
from degarble.harness.engine.budget.budget import HEADROOM, Budget, LevelFinding
from degarble.harness.engine.budget.quantised_inputs import scale_roundings
from degarble.harness.engine.budget.rules import UNDERFLOW, U, cut_off
from degarble.harness.formats.codec import decode_array, unpack_nibbles
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.number_formats import (
    BLOCK_FORMATS,
    FP32,
    UE8M0,
    WHOLE,
    ElementFormat,
    TableFormat,
)
from degarble.harness.model.family import family_of
from degarble.harness.report.number_text import number
from degarble.references import experts as routing
from degarble.references.linears import BLOCK_SCALE, CODES, TENSOR_SCALE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.budget.rules import JudgeableCall
    from degarble.harness.formats.number_formats import BlockFormat, NumberFormat


# --------------------------------------------------------------------------------------------------
# Quantised activations: element codes, block scales and tensor scales, as numbers.
#
# An element code is legal where the exact quotient rounds to it, or lies within its slack of that
# cell. A block scale is judged likewise, by the block's largest magnitude. The codes of a block are
# then judged under the stored block scale, and everything under the stored tensor scale, so that
# one wrong scale does not count twice. Slack is derived:
#
# * NVFP4: scale and quotient each take two reciprocals within 2 units (4 u each) and two products
#   (u each): 10 u. A float32 scale takes one of each: 5 u. A quotient by a power of two is exact.
# * A tensor scale goes through two reciprocals: 8 u; one per token through one more product.
# * The quantised value may itself be computed and stored (SwiGLU). Then the neighbour of the stored
#   value counts as well, where its rounding boundary lies within the error.
#
# Codes under a scale of zero stand for zero, whatever they are.
#
# Shape letters: R rows, B blocks, b elements of one.

_TWO_SCALES = 2 * QUOTIENT  # of u: two reciprocals and two products
_TENSOR_SCALE = 2 * FUNCTION  # of u: a scale converted to its reciprocal and back


class Cells(NamedTuple):
    """For every code its value, and the quotients that round to it (NaN for no number)."""

    value: Tensor
    low: Tensor
    high: Tensor


@dataclass(frozen=True, eq=False)
class CodeResult:
    """The result for one output: the worst element, the number of legal differences, their rows."""

    worst: LevelFinding
    legal: int
    total: int
    rows: tuple[int, ...]
    words: tuple[str, ...]


@lru_cache(maxsize=8)
def _numbers(fmt: NumberFormat) -> Tensor:
    """Return the value of every code."""
    return decode_array(torch.arange(fmt.code_count, dtype=torch.int64), fmt).double()


@lru_cache(maxsize=8)
def cells(fmt: NumberFormat) -> Cells:
    """Return the cells of a signed format, of integers, or of positive scales."""
    value = _numbers(fmt)
    if isinstance(fmt, TableFormat):
        ranked = torch.tensor(fmt.ranked)
        middle = (value[ranked][1:] + value[ranked][:-1]) / 2
        low, high = torch.empty_like(value), torch.empty_like(value)
        low[ranked] = torch.cat((middle.new_tensor([-math.inf]), middle))
        high[ranked] = torch.cat((middle, middle.new_tensor([math.inf])))
        return Cells(value, low, high)
    assert isinstance(fmt, ElementFormat), "floats have magnitude and sign"
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


def is_coded(call: JudgeableCall) -> bool:
    """Tell whether a component outputs codes."""
    return CODES in call.outputs


def judge_codes(call: JudgeableCall, candidate: Mapping[str, Tensor]) -> dict[str, CodeResult]:
    """Judge codes, block scales and the tensor scale of one component."""
    form, twin = format_of(call), call.outputs
    near = _values(call)
    made = {}
    scale = torch.ones((), dtype=torch.float64)
    width = form.block[1] or near.value.shape[-1]
    blocks = near.value.unflatten(-1, (-1, width))
    error = near.error.expand(near.value.shape).unflatten(-1, (-1, width))
    # Largest magnitude of each block [..., B].
    size = BoundedValue(blocks.abs().amax(-1), error.amax(-1))
    if TENSOR_SCALE in twin:
        made[TENSOR_SCALE] = _tensor_scale(call, candidate[TENSOR_SCALE], size, form)
        scale = candidate[TENSOR_SCALE].double()
    steps = scale.reshape(*scale.shape, 1) if scale.ndim else scale
    stored_RB = _scale_values(candidate[BLOCK_SCALE], form)
    made[BLOCK_SCALE] = _block_scale(call, candidate[BLOCK_SCALE], (size, steps, stored_RB), form)
    own = (stored_RB * steps).unsqueeze(-1)
    made[CODES] = _codes(call, candidate[CODES], (BoundedValue(blocks, error), own), form)
    return made


def values_of(outputs: Mapping[str, Tensor], form: BlockFormat) -> Tensor:
    """Decode codes to float32."""
    value = cells(form.element).value[_elements(outputs[CODES], form).long()]
    scale = _scale_values(outputs[BLOCK_SCALE], form)
    if TENSOR_SCALE in outputs:
        tensor = outputs[TENSOR_SCALE].double()
        scale = scale * (tensor.unsqueeze(-1) if tensor.ndim else tensor)
    return (value * scale.repeat_interleave(value.shape[-1] // scale.shape[-1], -1)).float()


def format_of(call: JudgeableCall) -> BlockFormat:
    """Return the format that a component quantises to."""
    known = {"ffn.experts.act_quant": "w2", "ffn.experts.w13.act_quant": "w1"}
    part = known.get(call.role)
    name = f"ffn.experts.0.{part}" if part else next(iter(call.weights))
    form = call.known_facts.activation(name)
    assert form is not None, "codes come only where the recipe quantises"
    return BLOCK_FORMATS[form]


def _values(call: JudgeableCall) -> BoundedValue:
    """Return the quantised values [..., K], one row for each row of codes."""
    x, codes = call.inputs["x"], call.outputs[CODES]
    if call.role == "ffn.experts.act_quant":
        numerics, near = call.known_facts.numerics, gated(call)
        rounds = numerics.switches.activation_rounded_before_codes
        return stored(near, numerics.store) if rounds else near
    if codes.ndim > x.ndim:
        x = x.unsqueeze(1).expand(*codes.shape[:-1], x.shape[-1])
    return exactly(x)


def gated(call: JudgeableCall, *, shared: bool = False) -> BoundedValue:
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
    return BoundedValue(value, error + cut_off(share) * product.abs() + UNDERFLOW)


def _gated_in_steps(
    call: JudgeableCall, gate: Tensor, up: Tensor, *, weighed: bool
) -> BoundedValue:
    """Return SwiGLU where SiLU is stored before the product."""
    share = torch.sigmoid(gate)
    turns = 2 * gate.abs() * (1 - share) + FUNCTION
    value = gate * share
    error = value.abs() * ((turns + FUNCTION + 2) * U) + cut_off(share) * gate.abs() + UNDERFLOW
    near = stored(BoundedValue(value, error), call.known_facts.numerics.store)
    factor = up * call.inputs["weights"].double()[..., None] if weighed else up
    made = near.value * factor
    return BoundedValue(made, near.error * factor.abs() + 3 * U * made.abs() + UNDERFLOW)


def _bits(codes: Tensor) -> Tensor:
    return codes if codes.dtype is torch.uint8 else codes.view(torch.uint8)


def _elements(codes: Tensor, form: BlockFormat) -> Tensor:
    return unpack_nibbles(_bits(codes)) if form.packed else _bits(codes)


def _scale_values(scales: Tensor, form: BlockFormat) -> Tensor:
    """Return block scales as numbers; float32 scales are stored as numbers already."""
    if form.scale.bits == 32:
        return scales.double()
    return _numbers(form.scale)[_bits(scales).long()]


def _tensor_scale(
    call: JudgeableCall, candidate: Tensor, size: BoundedValue, form: BlockFormat
) -> CodeResult:
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
    call: JudgeableCall,
    candidate: Tensor,
    operands: tuple[BoundedValue, Tensor, Tensor],
    form: BlockFormat,
) -> CodeResult:
    size, steps, kept = operands
    rule = CANONICAL.rule_for(form)
    unit = form.element.largest * steps
    exact = size.value.clamp(min=rule.amax_floor) / unit
    slack = size.error / unit + exact * ((QUOTIENT if form.scale.bits == 32 else _TWO_SCALES) * U)
    differs = kept != _scale_values(call.outputs[BLOCK_SCALE], form)
    first = next(iter(call.weights.values()), None)
    if form.scale is FP32 and first is not None and first.input_scale is not None:
        exact = call.outputs[BLOCK_SCALE].double()
        words: tuple[str, ...] = (f"the checkpoint's, or its reciprocal's: {_TENSOR_SCALE} u",)
        off, slack = (kept - exact).abs(), exact * (_TENSOR_SCALE * U)
    elif form.scale.bits == 32:
        words = (f"largest magnitude of a block / {form.element.largest:g}: {QUOTIENT} u",)
        off, slack = (kept - exact).abs(), slack + U * exact
        if form.block[1] == WHOLE:  # a token of zeros is one under any scale
            off = torch.where(size.value > 0, off, 0.0)
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
    call: JudgeableCall, candidate: Tensor, operands: tuple[BoundedValue, Tensor], form: BlockFormat
) -> CodeResult:
    (value, error), scale = operands
    table = cells(form.element)
    width = value.shape[-1]
    code = _elements(candidate, form).long().unflatten(-1, (-1, width))
    other = _elements(call.outputs[CODES], form).long().unflatten(-1, (-1, width))
    # Under a zero scale every code stands for zero.
    alive = (scale > 0).expand(code.shape)
    safe = torch.where(scale > 0, scale, 1.0)
    quotient = value / safe
    # Dividing by a power of two is exact.
    rounding = scale_roundings(form)
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


def _coded(off: Tensor, slack: Tensor, differs: Tensor, words: tuple[str, ...]) -> CodeResult:
    """Return the worst element in units of budget, and how many differ legally."""
    allowed = slack / HEADROOM
    ratio = torch.where(off > 0, off / allowed, 0.0)
    width = off.shape[-1] if off.ndim else 1
    worst = LevelFinding("element", (), 0.0, 0.0)
    if off.numel():
        at = int(ratio.flatten().argmax())
        place = divmod(at, width)
        measured, most = float(off.flatten()[at]), float(allowed.expand(off.shape).flatten()[at])
        worst = LevelFinding("element", place, measured, most)
    legal = differs & (ratio <= 1)
    rows = legal.reshape(-1, width).any(-1).nonzero().flatten()[:16].tolist() if legal.any() else []
    return CodeResult(worst, int(legal.sum()), off.numel(), tuple(rows), words)


# --------------------------------------------------------------------------------------------------
# Choices: which experts a token is routed to, which rows it attends to.
#
# Rows are chosen by scores that arrive as inputs. Nothing is computed, so another choice is legal
# only among equal scores. Experts are chosen by scores computed here: another one is legal where
# both scores lie within each other's errors, and, with expert groups, where some legal set of
# groups leads to it. The order of a choice is free, since attention takes a set and each expert's
# weight stands in its own slot. Weights are judged for the candidate's own choice.
#
# An illegal choice is measured by the gap of the scores, in units of what their errors allow.
#
# Shape letters: T tokens, E experts, K chosen, G groups, W rows.

_MOST_SETS = 64  # legal sets of groups that are tried for one token
NO_FINDING = LevelFinding("choice", (), 0.0, 0.0)
_TABLE = "experts are those of the table: nothing may differ"


class ChoiceResult(NamedTuple):
    """The worst choice, the number of legal flips by token, and the reasons in words."""

    worst: LevelFinding
    flips: dict[int, int]
    words: tuple[str, ...]


def rows_chosen(call: JudgeableCall, candidate: Tensor) -> ChoiceResult:
    """Judge lists of rows [T, K] by the scores that arrived."""
    scores, twin = call.inputs["scores"].double(), call.outputs["out"]
    words = ("rows are chosen by scores that arrive: only equal ones may be exchanged",)
    worst, flips = NO_FINDING, dict[int, int]()
    for token in _moved(candidate, twin):
        mine, own = scores[token], candidate[token]
        if mine.isnan().any():
            continue  # no order is defined
        real = own[own >= 0]
        # -1 marks unused places; any other negative index is invalid.
        if not _proper(real, len(mine)) or (own < -1).any():
            return ChoiceResult(LevelFinding("choice", (token,), 1.0, 0.0), flips, words)
        expected = mine[twin[token][twin[token] >= 0]].sort(descending=True).values
        found = mine[real].sort(descending=True).values
        if len(found) != len(expected) or not torch.equal(found, expected):
            gap = _gap(found, expected)
            worst = max(worst, LevelFinding("choice", (token,), gap, 0.0), key=_by_ratio)
        else:
            flips[token] = int((~torch.isin(own, twin[token])).sum())
    return ChoiceResult(worst, flips, words)


def _gap(found: Tensor, expected: Tensor) -> float:
    """Return how far chosen scores lie below the expected ones; 1 where some are missing."""
    if len(found) != len(expected):
        return 1.0
    gap = (expected - found).abs().max().item()
    return gap if 0 < gap < float("inf") else 1.0


def _by_ratio(finding: LevelFinding) -> tuple[float, float]:
    return finding.ratio, finding.measured


def _moved(candidate: Tensor, twin: Tensor) -> list[int]:
    """Return the tokens whose chosen set differs from the twin's."""
    same = (candidate.sort(-1).values == twin.sort(-1).values).all(-1)
    found: list[int] = (~same).nonzero().flatten().tolist()
    return found


def _proper(chosen: Tensor, count: int) -> bool:
    """Tell whether every number exists, and none occurs twice."""
    inside = bool(((chosen >= 0) & (chosen < count)).all())
    return inside and len(chosen.unique()) == len(chosen)


def scores_of(call: JudgeableCall) -> BoundedValue:
    """Return the router's scores [T, E] and their errors."""
    logit = call.inputs["logits"].double()
    if call.known_facts.config.scoring_func == "sigmoid":
        score = torch.sigmoid(logit)
        slope = score * (1 - score)
        off = slope * (2 * logit.abs() + FUNCTION) * U + (FUNCTION + 2) * U * score
        return BoundedValue(score, off + UNDERFLOW)
    plain = torch.nn.functional.softplus(logit, threshold=20.0)
    inner = torch.sigmoid(logit) * (2 * logit.abs() + FUNCTION)
    off = U * (inner + FUNCTION * plain + (logit < 20.0))  # 1 + e^x may be formed
    score = plain.sqrt()
    # The slope of the root, 1 / (2 score), is infinite at 0; there |sqrt(a) - sqrt(b)| <= sqrt|a -
    # b|.
    error = torch.where(plain > UNDERFLOW, off / (2 * score) + FUNCTION * U * score, off.sqrt())
    return BoundedValue(score, error)


def experts_chosen(call: JudgeableCall, candidate: Tensor) -> ChoiceResult:
    """Judge the experts [T, K] of every token."""
    twin, moved = call.outputs["experts"], _moved(candidate, call.outputs["experts"])
    # Hash layers: the expert follows from the token id alone, so no flip is legal.
    if any(name.endswith("tid2eid") for name in call.weights):
        at = (moved[0],) if moved else ()
        return ChoiceResult(LevelFinding("choice", at, float(len(moved)), 0.0), {}, (_TABLE,))
    (bias,) = (weight.values(torch.float64) for weight in call.weights.values())
    score = scores_of(call)
    value = score.value + bias
    # Adding the bias is one more rounding.
    biased = BoundedValue(value, score.error + U * value.abs())
    average = float(biased.error.mean()) if biased.error.numel() else 0.0
    words = (
        "scores: functions within 2 units, arguments rounded once, one sum with the bias",
        f"errors of scores: {number(average)} on average",
        "another expert is legal where both scores lie within their errors; order is free",
    )
    return chosen_among(
        candidate, twin, biased, words, lambda own, score: _gap_of_experts(own, score, call)
    )


def chosen_among(
    candidate: Tensor,
    twin: Tensor,
    score: BoundedValue,
    words: tuple[str, ...],
    gap_of: Callable[[Tensor, BoundedValue], tuple[float, float]] | None = None,
) -> ChoiceResult:
    """Judge what was chosen [T, K] by scores [T, E] and their errors; `gap_of` knows groups."""
    worst, flips = NO_FINDING, dict[int, int]()
    for token in _moved(candidate, twin):
        own = candidate[token]
        mine = BoundedValue(score.value[token], score.error[token])
        if mine.value.isnan().any():
            continue
        if not _proper(own, len(mine.value)):
            return ChoiceResult(LevelFinding("choice", (token,), 1.0, 0.0), flips, words)
        every = torch.ones_like(mine.value, dtype=torch.bool)
        gap, allowed = gap_of(own, mine) if gap_of else _pair_gap(own, mine, every)
        finding = LevelFinding("choice", (token,), gap, allowed / HEADROOM)
        if finding.ratio <= 1:
            flips[token] = int((~torch.isin(own, twin[token])).sum())
        worst = max(worst, finding, key=_by_ratio)
    return ChoiceResult(worst, flips, words)


def _gap_of_experts(own: Tensor, score: BoundedValue, call: JudgeableCall) -> tuple[float, float]:
    """Return the gap of the choice, and what errors allow, for the best legal set of groups."""
    config = call.known_facts.config
    groups = family_of(config).expert_groups(config)
    if groups is None:
        return _pair_gap(own, score, torch.ones_like(score.value, dtype=torch.bool))
    found = [
        max(gap, _pair_gap(own, score, kept), key=_in_budgets)
        for kept, gap in _kept_sets(own, score, *groups)
    ]
    return min(found, key=_in_budgets)


def _in_budgets(pair: tuple[float, float]) -> float:
    return LevelFinding("", (), *pair).ratio


def _pair_gap(own: Tensor, score: BoundedValue, open_E: Tensor) -> tuple[float, float]:
    """Return how far the best score left out exceeds the worst chosen one, and the allowed gap."""
    chosen = torch.zeros_like(open_E)
    chosen[own] = True
    if bool((chosen & ~open_E).any()):
        return 1.0, 0.0
    left = open_E & ~chosen
    if not bool(left.any()):
        return 0.0, 0.0
    # Worst pair: the best score left out, at its lower end, against the worst chosen, at its upper
    # end.
    above = (score.value - score.error).masked_fill(~left, -torch.inf).argmax()
    below = (score.value + score.error).masked_fill(~chosen, torch.inf).argmin()
    gap = float(score.value[above] - score.value[below])
    return max(0.0, gap), float(score.error[above] + score.error[below])


def _kept_sets(
    own: Tensor, score: BoundedValue, groups: int, most: int
) -> Iterator[tuple[Tensor, tuple[float, float]]]:
    """Yield sets of groups that hold the choice: their experts, and the gap of keeping them."""
    per = len(score.value) // groups
    # DeepSeek V3 ranks groups by the sum of their two best scores.
    two = score.value.reshape(groups, per).topk(min(2, per), dim=-1)
    error = score.error.reshape(groups, per).gather(1, two.indices).sum(-1)
    worth = BoundedValue(two.values.sum(-1), error + U * two.values.sum(-1).abs())
    visited = set((own // per).tolist())
    others = [g for g in torch.argsort(worth.value, descending=True).tolist() if g not in visited]
    missing = most - len(visited)
    every = torch.ones(groups, dtype=torch.bool)
    if missing < 0:
        yield torch.ones_like(score.value, dtype=torch.bool), (1.0, 0.0)
        return
    for number_, more in enumerate(combinations(others, missing)):
        if number_ >= _MOST_SETS:
            return
        kept = torch.tensor(sorted(visited | set(more)))
        open_E = torch.isin(torch.arange(len(score.value)) // per, kept)
        yield open_E, _pair_gap(kept, worth, every)


def weights_budget(call: JudgeableCall, experts: Tensor) -> tuple[Tensor, Budget]:
    """Return the weights [T, K] of a choice, and how far correct ones may be from them."""
    facts, score = call.known_facts, scores_of(call)
    scale = facts.config.routed_scaling_factor
    epsilon = facts.numerics.switches.routing_epsilon
    value = routing.router_weights(score.value, experts, scale, epsilon)
    chosen, error = (part.gather(1, experts.long()) for part in score)  # engines hold int32
    relative = error / chosen.clamp(min=UNDERFLOW)
    relative = relative + error.sum(-1, keepdim=True) / chosen.sum(-1, keepdim=True).clamp(
        min=UNDERFLOW
    )
    slack = value.abs() * (relative + (experts.shape[1] + FUNCTION + 3) * U)
    words = (
        "weights: the score's error, that of the sum of the chosen ones, quotient and scale",
        "for the candidate's own choice",
    )
    return value, Budget(FP32, slack, words)
