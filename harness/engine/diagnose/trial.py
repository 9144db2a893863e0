"""Try one fault variant on a sample of a captured call, and measure how near its outputs are."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from degarble.harness.base.errors import CANNOT_RUN, DegarbleError, InvalidArgument
from degarble.harness.engine.budget.budget import HEADROOM, judge, spacing
from degarble.harness.engine.budget.codes_and_choices import judge_codes, weights_budget
from degarble.harness.engine.budget.judging import judge_outputs
from degarble.harness.engine.budget.roles import budgets_of
from degarble.harness.engine.budget.rules import JudgeableCall
from degarble.harness.engine.compare.compare import values_of_any
from degarble.harness.engine.diagnose.overflow import PARTS, beyond_float32
from degarble.harness.engine.faults.model_faults import facts_of
from degarble.harness.engine.faults.regions import cancelled, extents, flat
from degarble.harness.engine.faults.weight_faults import Decoding
from degarble.harness.engine.localise.judgeable_rows import rows_by_sequence
from degarble.harness.engine.localise.replay import RAGGED, STATE
from degarble.harness.report.number_text import share
from degarble.references.facts import spans_of
from degarble.references.linears import activation_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.engine.budget.budget import Budget
    from degarble.harness.engine.faults.model_faults import (
        CallRecord,
        ComponentContext,
        FaultVariant,
        ModelFault,
    )
    from degarble.harness.formats.weight import Weight
    from degarble.references.facts import ModelFacts

    Tensors = Mapping[str, Tensor]
    Measure = Callable[[Tensors, Tensors], float]


# --------------------------------------------------------------------------------------------------
# Try one fault variant on a captured call, and measure how near its outputs are.
#
# `distance` is a cheap measure without unit; trials are ordered by how much of it remains. `proof`
# judges the candidate against the twin with the variant, by a budget derived for that damaged twin,
# from its damaged operands. A variant that cannot run on this call explains nothing.


# Producers of one dialect differ in up to 0.56 % of codes (packing_diagnosis, NAMED_FROM).
CODES_UNLIKE = 0.0056
# Sums of one fault in two orders round otherwise in 0.03 % of elements (M02, O10 at wo_b).
_ROUNDED_OTHERWISE = 0.001
_OF_BEFORE = 0.05  # of the elements that differ without the variant may differ with it, by rounding
_STORED_WITHIN = frozenset({
    "attn.q_head_norm_rope", "attn.kv_norm_rope", "attn.compressor.pool",
    "attn.indexer.compressor.pool", "attn.indexer.q", "attn.indexer.k",
})  # fmt: skip
_SCALE_UNITS = 16 * 2.0**-24  # of a float32 scale: two reciprocals within 2 units, twice
_SPACINGS = 2  # of the stored format: a producer's value and the same one computed again
_STORED_SUM = 2.0**-7  # a spacing of BF16 near 1
_LAST_DIGITS = 4  # spacings of float32 at a row's largest number, for a step that a fault adds
_FEW_ROWS = 4  # by which a variant may be excluded
_FAR = 4.0  # times what an element may differ by
_MODERATE = 1e30  # sums of larger numbers may overflow
_KEPT = 64 << 20  # bytes of variants' outputs
_OF_DIFFERENCE = 1e-4  # that such a variant may leave
_TINY = 1e-30


@dataclass(frozen=True, eq=False)
class VariantOutputs:
    """The outputs of a variant, and the operands that its innermost call received."""

    outputs: Tensors
    inputs: Tensors
    weights: Mapping[str, Weight]
    stretch: Mapping[str, float]  # how much the variant enlarged an output after the call
    facts: ModelFacts | None = None  # of a traced component that runs with other ones
    stores_within: bool = False


@dataclass(frozen=True)
class VariantFit:
    """How well a variant explains one record, in units of budget; shares count elements."""

    ratio: float
    within: float
    identical: float
    worst: str = ""


def make(
    context: ComponentContext,
    record: CallRecord,
    variant: FaultVariant,
    plain: Tensors | None = None,
    rows: Tensor | None = None,
) -> VariantOutputs | None:
    """Run the twin with a variant on a record's inputs; None where the variant cannot run.

    `plain` holds the same inputs with codes decoded, for variants that leave inputs alone. `rows`
    selects rows of the single matrix whose outputs are compared.
    """
    seen: dict[str, Tensors] = {"inputs": {}, "outputs": {}}
    operands: list[Mapping[str, Weight]] = [context.weights]
    quick = context.bound.numerics.products is torch.float64
    # Codes are made of inputs with their factors, and so is what they are decoded to.
    factored = plain is not None and any(
        weight.channel_scale is not None for weight in context.weights.values()
    )

    def spied(inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        known = Decoding(weights, context.weights, rows) if quick else weights
        # Decoded inputs are valid only if the variant has not replaced the inputs.
        decoded = plain is not None and inputs is record.inputs
        given = plain if plain is not None and decoded else inputs
        if decoded and factored:
            known = {name: each.without_factors() for name, each in known.items()}
        outputs = context.call(given, known)
        seen.update(inputs=inputs, outputs=outputs)
        operands[0] = weights
        return outputs

    try:
        if record.implied:
            outputs: Tensors = variant.passed_on(
                {**record.inputs, **record.implied}, context.weights
            )
            return VariantOutputs(outputs, record.inputs, context.weights, {})
        applied = variant.apply(spied)
        outputs = applied(record.inputs, context.weights)
    except CANNOT_RUN:
        return None  # another shape or format than the variant is for
    stretch = {
        name: _stretch(seen["outputs"].get(name), output) for name, output in outputs.items()
    }
    typed = {
        name: _left_open(variant, output.to(record.outputs[name].dtype), record, name)
        if name in record.outputs
        else output
        for name, output in outputs.items()
    }
    facts = facts_of(applied) if context.component.kind else None
    given = seen["inputs"] or record.inputs
    return VariantOutputs(typed, given, operands[0], stretch, facts, variant.stores_within)


def _left_open(variant: FaultVariant, made: Tensor, record: CallRecord, name: str) -> Tensor:
    """Return a variant's output, with the recorded values where they need not be reproduced."""
    seen, held = record.outputs[name], record.held.get(name)
    if made.shape != seen.shape:
        return made
    if variant.unknown is not None:
        made = torch.where(variant.unknown(made), seen, made)
    return made if held is None else torch.where(held, made, seen)


def proposed(
    fault: ModelFault, context: ComponentContext, record: CallRecord
) -> Iterator[FaultVariant]:
    """Yield a fault's variants; stop at a failure on outputs that it cannot handle.

    These are outputs of other extents, or with values that are not finite, from which no number can
    be fitted.
    """
    try:
        yield from fault.signature(context, record)
    except (*CANNOT_RUN, OverflowError):
        sides = seen_tensors(record), untouched(record)
        if _extents(sides[0]) == _extents(sides[1]) and all(map(_is_finite, sides)):
            raise


def _is_finite(tensors: Tensors) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors.values() if _is_wide(tensor))


def _extents(tensors: Tensors) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def decoded_once(context: ComponentContext, record: CallRecord) -> Tensors | None:
    """Return inputs with codes decoded, so that trials need not decode them again."""
    if "codes" not in record.inputs or record.implied:
        return None
    form = JudgeableCall.from_twin(
        context.bound, context.name, record.inputs, record.expected
    ).activation
    if form is None:
        return None
    rest = {name: tensor for name, tensor in record.inputs.items() if name not in PARTS}
    numerics = context.bound.numerics
    return {**rest, "x": activation_values(record.inputs, form, numerics.products, numerics)}


def _stretch(inner: Tensor | None, final: Tensor) -> float:
    """Return how much longer an output became after the inner call; at least 1."""
    if inner is None or inner is final or not final.dtype.is_floating_point:
        return 1.0
    before, after = (float(tensor.double().nan_to_num(0, 0, 0).norm()) for tensor in (inner, final))
    return max(1.0, after / before) if before > 0 and math.isfinite(after / before) else 1.0


def seen_tensors(record: CallRecord) -> Tensors:
    """Return what a trial has to reproduce: outputs, or on an edge the wrong inputs."""
    if record.implied:
        return {name: record.inputs[name] for name in record.implied if name in record.inputs}
    return record.outputs


def untouched(record: CallRecord) -> Tensors:
    """Return what the tensors would be without a fault."""
    return record.implied or record.expected


def distance(candidate: Tensors, made: Tensors) -> float:
    """Return the distance of two sets of outputs: 0 if equal, about 1 per unrelated output."""
    return sum(
        _output_distance(*_in_order(tensor, made.get(name))) for name, tensor in candidate.items()
    )


def _in_order(c: Tensor, m: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Sort the choices of tokens: backends order them by score or by number."""
    if m is None or c.dtype not in (torch.int32, torch.int64) or c.ndim != 2 or m.ndim != 2:
        return c, m
    return c.sort(dim=-1).values, m.sort(dim=-1).values


def _output_distance(c: Tensor, m: Tensor | None) -> float:
    if m is None or m.shape != c.shape:
        return 2.0
    if not c.numel():
        return 0.0
    if not c.dtype.is_floating_point or c.dtype.itemsize == 1:
        return float((c != m).double().mean())
    c, m = c.double(), m.double()
    sizes = float(c.norm()), float(m.norm())
    if all(map(math.isfinite, sizes)):
        return float((c - m).norm()) / (sum(sizes) + _TINY)
    odd = ~(c.isfinite() & m.isfinite())
    alike = (c == m) | (c.isnan() & m.isnan())
    unlike = float((odd & ~alike).double().mean())
    c, m = c.masked_fill(odd, 0.0), m.masked_fill(odd, 0.0)
    return unlike + float((c - m).norm()) / (float(c.norm()) + float(m.norm()) + _TINY)


def only_roundings(candidate: Tensors, made: Tensors) -> bool:
    """Tell whether two sets of outputs differ by roundings of reordered sums alone."""
    return all(_rounds_alike(*_in_order(tensor, made.get(n))) for n, tensor in candidate.items())


def _rounds_alike(c: Tensor, m: Tensor | None) -> bool:
    if m is None or m.shape != c.shape:
        return False
    unlike = _unlike(c, m)
    if int(unlike.sum()) > max(1, int(c.numel() * _ROUNDED_OTHERWISE)):
        return False
    return bool((_within_spacings(c, m) | cancelled(c, m))[unlike].all())


def shape_distance(candidate: Tensors, made: Tensors) -> float:
    """Return the distance after removing a gain for each row, or for each column."""
    return sum(_shape_distance(tensor, made.get(name)) for name, tensor in candidate.items())


def _shape_distance(c: Tensor, m: Tensor | None) -> float:
    if m is None or m.shape != c.shape or not c.numel() or not _is_wide(c):
        return _output_distance(c, m)
    c, m = c.double().flatten(0, -2), m.double().flatten(0, -2)
    finite = c.isfinite() & m.isfinite()
    c, m = torch.where(finite, c, 0.0), torch.where(finite, m, 0.0)
    total = float(c.norm()) + _TINY
    found = []
    for dim in (0, 1):
        energy = m.square().sum(dim, keepdim=True)
        gain = (c * m).sum(dim, keepdim=True) / energy.clamp(min=_TINY)
        found.append(float((c - gain * m).norm()) / total)
    return min(found) + float((~finite).double().mean())


def _is_wide(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1 and tensor.ndim > 1


def proof(
    context: ComponentContext, record: CallRecord, variant_outputs: VariantOutputs
) -> VariantFit:
    """Judge a variant's outputs against the candidate."""
    fit = _fit_within(math.inf, context, record, variant_outputs)
    assert fit is not None, "no ratio is larger"
    return fit


def _fit_within(
    most: float, context: ComponentContext, record: CallRecord, variant_outputs: VariantOutputs
) -> VariantFit | None:
    """Return the proof of a variant; None, before shares are counted, where its ratio is larger."""
    candidate = seen_tensors(record)
    if record.implied:
        fit = _edge_proof(candidate, variant_outputs.outputs)
        return fit if fit.ratio <= most else None
    call = _call(context, variant_outputs)
    worst, words = 0.0, ""
    ratios = _ratios(call, candidate)
    known = all(math.isfinite(ratio) for ratio, _ in ratios.values())
    beyond = {} if known else beyond_float32(context, call, candidate)
    for name, budget in beyond.items():
        decisive = judge(candidate[name], call.outputs[name], budget).findings[0]
        ratios[name] = decisive.ratio, str(decisive)
    for name, (ratio, text) in ratios.items():
        # A variant that enlarges the output after the call enlarges its rounding errors as well.
        found = ratio / variant_outputs.stretch.get(name, 1.0)
        if found > HEADROOM and (call.role in _STORED_WITHIN or variant_outputs.stores_within):
            within = variant_outputs.stores_within
            found = min(
                found, _unlike_ratio(candidate[name], call.outputs[name], record, name, within)
            )
        if found > HEADROOM and context.component.kind:
            found = min(found, _last_digits_ratio(candidate, call.outputs, record, name))
        if found >= worst:
            worst, words = found, text
    if "codes" in call.outputs and worst <= HEADROOM:
        worst = max(worst, _codes_left(context, record, call.outputs))
    if worst > most:
        return None
    return VariantFit(worst, *shares(call, candidate, variant_outputs, beyond), words)


def explained(
    context: ComponentContext, call: CallRecord, variant: FaultVariant
) -> VariantFit | None:
    """Return the proof that a variant explains a call; None where it does not."""
    outputs = make(context, call, variant)
    if outputs is None or (not call.implied and few_rows_exclude(context, call, outputs)):
        return None
    return _fit_within(HEADROOM, context, call, outputs)


def in_every_call(
    context: ComponentContext,
    record: CallRecord,
    variant: FaultVariant,
    proved: Callable[..., VariantFit | None] = explained,
) -> VariantFit | None:
    """Return the worst proof of the single calls of a record; None where one is not explained."""
    worst: VariantFit | None = None
    for call in calls_in(record):
        fit = proved(context, call, variant)
        if fit is None:
            return None
        if worst is None or fit.ratio > worst.ratio:
            worst = fit
    return worst


def few_rows_exclude(context: ComponentContext, record: CallRecord, made: VariantOutputs) -> bool:
    """Return whether the rows that differ most show that a variant does not explain a call.

    Their budgets are their own where rows are independent, so this needs none of the other rows. It
    answers only for sums that nothing but an element's own budget may excuse.
    """
    role, seen = context.role, record.outputs
    excused = made.stores_within or role in _STORED_WITHIN or "codes" in seen
    if excused or not is_by_row(context, record) or made.outputs.keys() != seen.keys():
        return False
    count = _height(record)
    wide = [tensor.is_floating_point() and tensor.itemsize > 1 for tensor in seen.values()]
    small = [tensor.dtype is torch.float32 for tensor in seen.values()]
    if count <= _FEW_ROWS or not all(wide) or (context.component.kind and any(small)):
        return False
    sides = [*made.inputs.values(), *made.outputs.values()]
    if any(tensor.ndim and len(tensor) != count for tensor in sides):
        return False
    if any(tensor.shape != made.outputs[name].shape for name, tensor in seen.items()):
        return False
    far = torch.zeros(count, dtype=torch.float64)
    for name, tensor in seen.items():
        c, m = (side.reshape(count, -1).double() for side in (tensor, made.outputs[name]))
        far += ((c - m).abs().amax(1) / (m.abs().amax(1) + _TINY)).nan_to_num(0, 0, 0)
    rows = far.topk(_FEW_ROWS).indices

    def part(side: Tensors) -> dict[str, Tensor]:
        return {name: tensor[rows] if tensor.ndim else tensor for name, tensor in side.items()}

    few = replace(made, inputs=part(made.inputs), outputs=part(made.outputs))
    try:
        budgets = budgets_of(_call(context, few))
    except (DegarbleError, *CANNOT_RUN):
        return False
    return any(
        _is_far_beyond(seen[name][rows], few.outputs[name], budget, made.stretch.get(name, 1.0))
        for name, budget in budgets.items()
        if name in seen
    )


def _is_far_beyond(c: Tensor, m: Tensor, budget: Budget, stretch: float) -> bool:
    """Return whether an element is so far beyond its budget that no rounding of sums matters."""
    if budget.free is not None:
        return False
    t = m.double()
    e = budget.slack.double().expand(t.shape)
    if not bool(e.isfinite().all()):
        return False
    most = e + torch.from_numpy(spacing((t.abs() + e).nan_to_num(0, 0, 0).numpy(), budget.output))
    known = (most > 0) & (t.abs() < _MODERATE) & c.isfinite()
    return bool((((c.double() - t).abs() > _FAR * stretch * most) & known).any())


def _unlike_ratio(
    c: Tensor, m: Tensor, record: CallRecord, name: str, sums_stored: bool = False
) -> float:
    """Judge roundings of intermediate stored values by counting them.

    The budget knows which of them may fall either way for the healthy numbers; a variant has other
    ones. So few may differ, by a spacing or two, and far fewer than the elements to explain.
    """
    expected = record.expected.get(name)
    if expected is None or c.shape != m.shape or c.shape != expected.shape:
        return math.inf
    unlike, before = (_unlike(c, tensor) for tensor in (m, expected))
    near = _within_spacings(c, m)
    if sums_stored:  # partial sums are as large as the largest results of a row
        largest = torch.maximum(c.double().abs(), m.double().abs()).amax(-1, keepdim=True)
        near = near | ((c.double() - m.double()).abs() <= largest * _STORED_SUM)
    if not bool(near[unlike].all()):
        return math.inf
    few = min(int(c.numel() * _ROUNDED_OTHERWISE), int(before.sum()) * _OF_BEFORE)
    count = int(unlike.sum())
    return count / few * HEADROOM if few else math.inf


def _last_digits_ratio(candidate: Tensors, made: Tensors, record: CallRecord, name: str) -> float:
    """Judge float32 by the largest number of each row, where a variant explains all but roundings.

    A fault may add a step of its own, as a mean that is taken away first. What that step rounds in
    float32 is in no budget of the healthy component; it is a part of the row's size.
    """
    c, m, e = candidate[name], made[name], record.expected.get(name)
    if c.dtype is not torch.float32 or e is None or not c.shape == m.shape == e.shape:
        return math.inf
    gap, before = (flat(c).double() - flat(side).double() for side in (m, e))
    left = gap.norm() / before.norm().clamp(min=_TINY)
    if not bool(left <= _OF_DIFFERENCE):
        return math.inf
    floor = _LAST_DIGITS * torch.finfo(c.dtype).eps * flat(m).double().abs().amax(-1, keepdim=True)
    return float((gap.abs() / floor.clamp(min=_TINY)).max()) * HEADROOM


def _unlike(c: Tensor, m: Tensor) -> Tensor:
    return (c != m) & ((c == c) | (m == m))  # noqa: PLR0124  NaN


def _ratios(call: JudgeableCall, candidate: Tensors) -> dict[str, tuple[float, str]]:
    """Return each output's worst ratio in budgets; an output without a budget must be equal."""
    if "codes" in call.outputs:
        return {name: _coded_ratio(candidate.get(name), m) for name, m in call.outputs.items()}
    try:
        judged = judge_outputs(call, {**call.outputs, **candidate})
    except InvalidArgument:
        return _finite_ratios(call, candidate)
    found = {}
    shares = _weights_ratio(call, candidate)
    for name, result in judged.items():
        if name not in candidate:
            continue  # it was not captured
        ratio, words = result.ratio, str(result.worst or "")
        if name == "weights" and shares is not None:
            ratio, words = shares
        if _output_distance(*_of_same_experts(candidate, call.outputs, name)) == 0:
            ratio, words = 0.0, "the same to the bit"
        elif math.isnan(ratio):
            ratio, words = math.inf, result.undecided
        found[name] = ratio, words
    return found


def _of_same_experts(candidate: Tensors, made: Tensors, name: str) -> tuple[Tensor, Tensor]:
    """Return two outputs; weights of experts in the same order, where both chose the same ones."""
    c, m, own, other = candidate[name], made[name], candidate.get("experts"), made.get("experts")
    if name != "weights" or own is None or other is None or torch.equal(own, other):
        return c, m
    if not c.shape == m.shape == own.shape == other.shape:
        return c, m
    (one, at), (two, among) = own.sort(dim=-1, stable=True), other.sort(dim=-1, stable=True)
    return (c.gather(-1, at), m.gather(-1, among)) if torch.equal(one, two) else (c, m)


def _weights_ratio(call: JudgeableCall, candidate: Tensors) -> tuple[float, str] | None:
    """Judge routing weights of one choice relative to the variant's own weights.

    Elsewhere a router is judged by its scores alone, which do not reflect the variant.
    """
    made, sides = call.outputs.get("weights"), (call.outputs, candidate)
    experts, own = (side.get("experts") for side in sides)
    if call.role != "ffn.topk" or made is None or experts is None or own is None:
        return None
    if not torch.equal(experts, own) or candidate["weights"].shape != made.shape:
        return None
    expected, budget = weights_budget(call, experts)
    # The relative error of healthy weights, applied to the variant's weights.
    part = budget.slack / expected.abs().clamp(min=_TINY)
    result = judge(candidate["weights"], made.float(), replace(budget, slack=part * made.abs()))
    return result.ratio, str(result.worst)


def _coded_ratio(c: Tensor | None, m: Tensor) -> tuple[float, str]:
    """Judge codes and scales of a damaged producer, which may round quotients differently.

    A healthy producer is judged by the cells of its quotients. What a damaged one quantises is
    unknown here; but another producer of the same dialect has nearly all codes equal.
    """
    if c is None or c.shape != m.shape:
        return math.inf, "another shape"
    unlike = float(_other_codes(c, m).double().mean()) if c.numel() else 0.0
    return unlike / CODES_UNLIKE * HEADROOM, f"{share(unlike)} of codes are others"


def _codes_left(context: ComponentContext, record: CallRecord, made: Tensors) -> float:
    """Judge codes by how many differ without the variant, where few do.

    Else a variant that changes nothing would explain a fault of few codes. Those that roundings
    may move stay: a damaged producer moves about as many.
    """
    healthy = JudgeableCall.from_twin(context.bound, context.name, record.inputs, record.expected)
    worst = 0.0
    for name, m in made.items():
        c, e = record.outputs.get(name), record.expected.get(name)
        if c is None or e is None or not c.shape == m.shape == e.shape:
            continue
        left, before = (int(_other_codes(c, side).sum()) for side in (m, e))
        if left <= before * _OF_BEFORE:
            continue
        # Codes are held against the right scales: those that follow wrong ones are no roundings.
        legal = _legal_codes(healthy, {**record.expected, name: c}, name)
        few = 2 * legal + max(0, before - legal) * _OF_BEFORE
        worst = max(worst, left / few * HEADROOM if few else math.inf)
    return worst


def _legal_codes(call: JudgeableCall, candidate: Tensors, name: str) -> int:
    try:
        return judge_codes(call, candidate)[name].legal
    except DegarbleError:
        return 0  # undecided: what is quantised is not known


def _other_codes(c: Tensor, m: Tensor) -> Tensor:
    equal = (c == m) | ((c != c) & (m != m))  # noqa: PLR0124  NaN
    if c.dtype.is_floating_point and c.dtype.itemsize > 1:
        equal |= (c - m).abs() <= torch.maximum(c.abs(), m.abs()) * _SCALE_UNITS
    return ~equal


def _finite_ratios(call: JudgeableCall, candidate: Tensors) -> dict[str, tuple[float, str]]:
    """Judge outputs of operands that are not finite; only finite elements need a bound."""
    found = {}
    for name, budget in budgets_of(call).items():
        twin = call.outputs[name]
        slack = budget.slack.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        if name not in candidate or candidate[name].shape != twin.shape:
            found[name] = math.inf, f"{name} has another shape"
            continue
        worst = judge(candidate[name], twin, replace(budget, slack=slack)).findings[0]
        found[name] = worst.ratio, str(worst)
    return found


def _call(context: ComponentContext, variant_outputs: VariantOutputs) -> JudgeableCall:
    call = JudgeableCall.from_twin(
        context.bound, context.name, variant_outputs.inputs, variant_outputs.outputs
    )
    facts = variant_outputs.facts
    call = replace(call, weights=variant_outputs.weights)
    return call if facts is None else replace(call, facts=facts)


def shares(
    call: JudgeableCall,
    candidate: Tensors,
    variant_outputs: VariantOutputs,
    beyond: Mapping[str, Budget] | None = None,
) -> tuple[float, float]:
    """Return the shares of elements within budget, and of equal ones, over all outputs."""
    try:
        budgets = beyond or budgets_of(call)
    except DegarbleError:
        budgets = {}
    within = same = total = 0
    for name in variant_outputs.outputs.keys() & candidate.keys():  # others were not captured
        c, twin = candidate[name], variant_outputs.outputs[name]
        if c.shape != twin.shape:
            return 0.0, 0.0
        if c.dtype in (torch.int32, torch.int64) and c.ndim == 2:  # a choice, in any order
            c, twin = c.sort(dim=-1).values, twin.sort(dim=-1).values
        equal = (c == twin) | ((c != c) & (twin != twin))  # noqa: PLR0124  NaN
        total += c.numel()
        same += int(equal.sum())
        budget = budgets.get(name)
        if budget is None or not c.dtype.is_floating_point or c.dtype.itemsize == 1:
            within += int(equal.sum())
            continue
        stretch = variant_outputs.stretch.get(name, 1.0)
        slack = budget.slack.double().expand(c.shape).numpy() * stretch
        t = values_of_any(twin.detach().cpu())
        near = (slack + spacing(abs(t) + slack, budget.output)) / HEADROOM
        with np.errstate(invalid="ignore"):
            apart = abs(values_of_any(c.detach().cpu()) - t)
        good = (apart <= near) | equal.numpy()
        within += int((good if budget.free is None else good | budget.free.numpy()).sum())
    return (within / total, same / total) if total else (1.0, 1.0)


def _within_spacings(c: Tensor, m: Tensor) -> Tensor:
    """Tell where two numbers are a rounding or two of their format apart; codes must be equal."""
    if not c.dtype.is_floating_point or c.dtype.itemsize == 1:
        return c == m
    c, m, step = c.double(), m.double(), torch.finfo(c.dtype).eps * _SPACINGS
    return (c - m).abs() <= torch.maximum(c.abs(), m.abs()) * step


def _edge_proof(received: Tensors, passed: Tensors) -> VariantFit:
    """Judge what arrived: the producers' output, or computed from it within a spacing or two."""
    within = same = total = 0
    for name, c in received.items():
        m = passed.get(name)
        if m is None or m.shape != c.shape:
            return VariantFit(math.inf, 0.0, 0.0, f"{name} has another shape")
        equal = (c == m) | ((c != c) & (m != m))  # noqa: PLR0124  NaN
        near = equal | _within_spacings(c, m)
        within, same, total = within + int(near.sum()), same + int(equal.sum()), total + c.numel()
    if not total:
        return VariantFit(0.0, 1.0, 1.0)
    ratio = 0.0 if within == total else math.inf
    return VariantFit(ratio, within / total, same / total)


# --------------------------------------------------------------------------------------------------
# Sample a recorded call for trials: few rows and few columns, those that differ most.
#
# The call that shows most is chosen, a window of its rows, and columns of each output. A window is
# contiguous and begins at a multiple of its size, so that a fault that counts rows or tiles keeps
# its pattern. Calls with sequences are cut to their beginning: long ones, and to fit numbers.
# A sample only orders trials: a named fault is proved on every row of every call.
#
# Shape letters: T tokens, F columns.


_EXPERTS = 3  # experts kept in a sample
WINDOW = 64  # rows at most
_BEGINNING = 128  # rows at least
_LONG = 1024  # tokens: what sees all earlier ones takes seconds for each variant
COLUMNS = 256  # of an output at most: half of them the worst, half spread evenly
_FAINT = 0.01  # of an output's length: a few roundings of BF16
_OUTSIDE = frozenset({"offsets", "state"})


@dataclass(frozen=True, eq=False)
class Sample:
    """A record cut to a window of rows, and the columns of its outputs to compare."""

    record: CallRecord
    columns: Mapping[str, Tensor]
    whole: bool  # whether no row was left out
    plain: Tensors | None  # its inputs with codes decoded
    rows: Tensor | None = None  # rows of the single matrix whose outputs are compared

    @cached_property
    def candidate(self) -> dict[str, Tensor]:
        """Return the tensors that a trial has to reproduce, in the chosen columns."""
        return self.looked_at(seen_tensors(self.record))

    def before(self, measure: Measure) -> float:
        """Return the difference without any fault."""
        if measure not in self._before:
            self._before[measure] = measure(self.candidate, self.looked_at(untouched(self.record)))
        return self._before[measure]

    @cached_property
    def only_roundings(self) -> bool:
        """Tell whether only roundings are left to explain."""
        return only_roundings(self.candidate, self.looked_at(untouched(self.record)))

    @cached_property
    def _before(self) -> dict[Measure, float]:
        return {}

    @cached_property
    def _kept(self) -> dict[int, tuple[FaultVariant, dict[str, Tensor]]]:
        return {}

    def keep(self, variant: FaultVariant, outputs: dict[str, Tensor]) -> None:
        """Keep a variant's outputs, while there is room. Trap: its id must not be reused."""
        size = sum(output.nbytes for output in outputs.values())
        if size * (len(self._kept) + 1) <= _KEPT:
            self._kept[id(variant)] = variant, outputs

    def kept(self, variant: FaultVariant) -> dict[str, Tensor] | None:
        """Return a variant's outputs if they were kept."""
        known = self._kept.get(id(variant))
        return None if known is None else known[1]

    def looked_at(self, outputs: Tensors) -> dict[str, Tensor]:
        """Keep the chosen columns of outputs."""
        return {name: self._chosen(name, output) for name, output in outputs.items()}

    def _chosen(self, name: str, output: Tensor) -> Tensor:
        columns = self.columns.get(name)
        if columns is None or output.ndim < 2 or output.shape[-1] <= int(columns[-1]):
            return output
        return output.index_select(-1, columns)


def most_telling(records: Sequence[CallRecord]) -> CallRecord:
    """Return the call whose outputs are farthest from the right ones.

    Of faint differences, return the largest call at a similar distance: roundings are a large part
    of each, and few rows do not show what roundings hide.
    """
    far = [distance(seen_tensors(record), untouched(record)) for record in records]
    most = max(far)
    if not most <= _FAINT:  # a NaN is not faint
        return records[far.index(most)]
    near = [record for record, own in zip(records, far, strict=True) if own >= most / 2]
    return max(near, key=lambda record: sum(out.numel() for out in seen_tensors(record).values()))


def sampled(context: ComponentContext, record: CallRecord, window: int = WINDOW) -> Sample:
    """Cut a record to the window of rows that differs most, if its rows are independent."""
    cut = record
    if is_by_row(context, record):
        cut = _window(record, window)
    elif window < sys.maxsize:
        cut = beginning(context, record, _LONG)
    # A beginning has the first rows and tiles that differ, so a count of them shows.
    whole = cut is record or RAGGED in cut.inputs
    if "experts" in cut.inputs and context.role.startswith("ffn.experts.w") and window == WINDOW:
        cut = _few_experts(cut)
    columns = {
        name: _columns(tensor, untouched(cut)[name])
        for name, tensor in seen_tensors(cut).items()
        if name in untouched(cut) and tensor.ndim > 1 and tensor.shape[-1] > COLUMNS
    }
    chosen = {name: column for name, column in columns.items() if len(column)}
    rows = chosen.get("out") if len(extents(context, cut)) == 1 else None
    return Sample(cut, chosen, whole, decoded_once(context, cut), rows)


def is_by_row(context: ComponentContext, record: CallRecord) -> bool:
    """Tell whether rows are independent and lead every tensor that has one for each token."""
    if record.implied or any(each.via in _OUTSIDE for each in context.component.inputs):
        return False
    counts = {tensor.shape[0] for tensor in _all(record) if tensor.ndim}
    return len(counts) == 1


def _all(record: CallRecord) -> list[Tensor]:
    return [*record.inputs.values(), *record.outputs.values(), *record.expected.values()]


def beginning(context: ComponentContext, record: CallRecord, more_than: int = 0) -> CallRecord:
    """Cut a call of more tokens, which see earlier ones, to its first ones, with some that differ.

    They saw nothing that is left out, so what was done to all of a call shows in them as well.
    """
    offsets = record.inputs.get(RAGGED)
    count = 0 if offsets is None or not len(offsets) else int(offsets[-1])
    if offsets is None or count <= more_than or record.implied or not record.outputs:
        return record
    sides = [(out, record.expected.get(name)) for name, out in record.outputs.items()]
    if any(right is None or out.shape != right.shape or len(out) != count for out, right in sides):
        return record
    unlike = sum(_element_distances(*side).reshape(count, -1).sum(1) for side in sides)
    differing = torch.as_tensor(unlike).nonzero()
    kept = max(_BEGINNING, int(differing[0, 0]) + WINDOW) if len(differing) else count
    if 2 * kept > count:
        return record

    def part(side: Tensors) -> dict[str, Tensor]:
        return {
            name: tensor[:kept]
            if tensor.ndim and len(tensor) == count and not name.startswith(STATE)
            else tensor
            for name, tensor in side.items()
        }

    inputs, outputs, expected = (part(side) for side in _sides(record))
    inputs[RAGGED] = torch.cat((offsets[offsets < kept], offsets.new_tensor([kept])))
    facts: Any = facts_of(context.call)
    if facts is not None and "compressed" in inputs:  # entries that the tokens left here make
        entries = sum(span.entries_made(facts.decoder_block.ratio) for span in spans_of(inputs))
        inputs["compressed"] = inputs["compressed"][:entries]
    cut = replace(
        record, inputs=inputs, outputs=outputs, expected=expected, held=part(record.held), rows=(),
        owners=record.owners[:kept], places=None,
    )  # fmt: skip
    try:
        made = context.call(inputs, context.weights)
    except CANNOT_RUN:
        return record
    # Of some components an output is as wide as the longest sequence.
    return cut if _extents(made) == _extents(expected) else record


def _window(record: CallRecord, size: int) -> CallRecord:
    first = next(tensor for tensor in _all(record) if tensor.ndim)
    count = first.shape[0]
    if count <= size:
        return record
    weight_T = torch.zeros(count)
    for name, output in record.outputs.items():
        if not output.ndim:
            continue
        weight_T += _element_distances(output, record.expected.get(name)).reshape(count, -1).sum(1)
    # Sum of differences per window of `size` rows.
    windows = torch.nn.functional.pad(weight_T, (0, -count % size)).reshape(-1, size).sum(1)
    begin = int(windows.argmax()) * size
    return rows_of(record, slice(begin, min(begin + size, count)))


def _few_experts(record: CallRecord) -> CallRecord:
    """Keep the slots of the experts that differ most, and of one that differs least."""
    experts = record.inputs["experts"]
    if "out" not in record.outputs or record.outputs["out"].shape != record.expected["out"].shape:
        return record
    # [T, K] mean difference of each slot
    of_slot = _element_distances(record.outputs["out"], record.expected["out"]).mean(-1)
    held = experts[experts >= 0].unique().tolist()
    if len(held) <= _EXPERTS:
        return record
    ranked = sorted(held, key=lambda number: -float(of_slot[experts == number].mean()))
    # The expert that differs least guards against variants that damage every expert.
    chosen = torch.tensor([*ranked[: _EXPERTS - 1], ranked[-1]])
    kept = torch.isin(experts, chosen)

    def masked(side: Tensors) -> dict[str, Tensor]:
        return {**side, "out": torch.where(kept[..., None], side["out"], 0)}

    inputs = {**record.inputs, "experts": experts.where(kept, -1)}
    outputs, expected = masked(record.outputs), masked(record.expected)
    return replace(record, inputs=inputs, outputs=outputs, expected=expected)


def together(context: ComponentContext, records: Sequence[CallRecord]) -> list[CallRecord]:
    """Concatenate calls with independent rows, so that one record shows all experts."""
    first = records[0]
    if len(records) == 1 or not all(is_by_row(context, record) for record in records):
        return list(records)
    if any(_likeness(record) != _likeness(first) for record in records):
        return list(records)

    def joined(side: str) -> dict[str, Tensor]:
        parts = [getattr(record, side) for record in records]
        return {
            name: torch.cat([part[name] for part in parts]) if tensor.ndim else tensor
            for name, tensor in parts[0].items()
        }

    rows = tuple(count for record in records for count in (record.rows or (_height(record),)))
    owners = tuple(owner for record in records for owner in record.owners)
    sides = (joined("inputs"), joined("outputs"), joined("expected"))
    known = [record.places for record in records if record.places is not None]
    places = known[0].joined(known[1:]) if len(known) == len(records) else None
    return [
        replace(
            first, inputs=sides[0], outputs=sides[1], expected=sides[2], rows=rows, owners=owners,
            places=places,
        )
    ]  # fmt: skip


def _likeness(record: CallRecord) -> list[tuple[object, ...]]:
    """Return names, dtypes and extents; scalars that all rows share have to be equal."""
    sides = (record.inputs, record.outputs, record.expected)
    return [
        (name, tensor.dtype, *(tensor.shape[1:] if tensor.ndim else (float(tensor),)))
        for side in sides
        for name, tensor in side.items()
    ]


def _height(record: CallRecord) -> int:
    return next(tensor.shape[0] for tensor in _all(record) if tensor.ndim)


def calls_in(record: CallRecord) -> list[CallRecord]:
    """Split a record into its calls, where several are concatenated."""
    if len(record.rows) < 2:
        return [record]
    begins = [sum(record.rows[:at]) for at in range(len(record.rows))]
    parts = [
        rows_of(record, slice(begin, begin + count))
        for begin, count in zip(begins, record.rows, strict=True)
    ]
    return [replace(part, step=_step_of(part)) for part in parts]


def _step_of(record: CallRecord) -> int:
    """Return the step of a call that was cut from several, where its rows tell."""
    calls = None if record.places is None else record.places.calls
    known = calls is not None and len(calls) > 0 and int(calls[0, 0]) >= 0
    return int(calls[0, 0]) if calls is not None and known else record.step


def sequences_in(context: ComponentContext, record: CallRecord) -> list[CallRecord]:
    """Split one call by sequences; return it whole where they cannot be separated."""
    if is_by_row(context, record):
        return _by_owner(record)
    if record.implied or RAGGED not in record.inputs:
        return [record]
    return list(alone(context, record)) or [record]


def _by_owner(record: CallRecord) -> list[CallRecord]:
    owners = record.owners
    if len(owners) != _height(record):
        return [record]
    begins = [at for at in range(len(owners)) if not at or owners[at] != owners[at - 1]]
    ends = [*begins[1:], len(owners)]
    return [rows_of(record, slice(a, b)) for a, b in zip(begins, ends, strict=True)]


def alone(context: ComponentContext, record: CallRecord) -> Iterator[CallRecord]:
    """Yield every sequence of a call whose tokens interact; nothing where they are ambiguous."""
    lines = rows_by_sequence(context.component, context.bound.config, record.inputs)
    if lines is None:
        return
    for number in range(len(lines.spans)):
        counts = [span.count * (at == number) for at, span in enumerate(lines.spans)]
        sides = [lines.cut_side(side, counts) for side in _sides(record)]
        if any(side is None for side in sides):
            return
        inputs, outputs, expected = (side or {} for side in sides)
        yield replace(
            record, inputs=inputs, outputs=outputs, expected=expected, rows=(), owners=(),
            places=None,
        )  # fmt: skip


def _sides(record: CallRecord) -> tuple[Tensors, Tensors, Tensors]:
    return record.inputs, record.outputs, record.expected


def rows_of(record: CallRecord, rows: slice | Tensor) -> CallRecord:
    """Return some rows of a record with independent rows."""

    def part(side: Tensors) -> dict[str, Tensor]:
        return {name: tensor[rows] if tensor.ndim else tensor for name, tensor in side.items()}

    inputs, outputs, expected = (part(side) for side in _sides(record))
    held = part(record.held)
    known = torch.tensor(record.owners, dtype=torch.int64)
    owners = tuple(known[rows].tolist()) if record.owners else ()
    places = record.places
    if places is not None:
        chosen = torch.zeros(len(places.position), dtype=torch.bool)
        chosen[rows] = True
        places = places.select(chosen)
    return replace(
        record, inputs=inputs, outputs=outputs, expected=expected, rows=(), owners=owners,
        places=places, held=held,
    )  # fmt: skip


def _element_distances(c: Tensor, e: Tensor | None) -> Tensor:
    """Return a distance from 0 to 1 for each element, relative to both magnitudes."""
    if e is None or e.shape != c.shape:
        return torch.ones(c.shape)
    if not c.dtype.is_floating_point or c.dtype.itemsize == 1:
        return (c != e).float()
    # Where terms cancel only roundings are left, which would outweigh a faint fault; so ignore
    # these elements, unless nothing else differs.
    beside = (c == e) | cancelled(c, e)
    alike = c == e if bool(beside.all()) else beside
    c, e = c.float(), e.float()
    apart = torch.where(alike, 0.0, (c - e).abs() / (c.abs() + e.abs() + 1e-30))
    return torch.nan_to_num(apart, 1.0, 1.0, 1.0)


def _columns(c: Tensor, e: Tensor) -> Tensor:
    if e.shape != c.shape:
        return torch.empty(0, dtype=torch.int64)
    weight_F = _element_distances(c, e).flatten(0, -2).sum(0)
    # Half of the columns by difference, half evenly spread.
    worst = weight_F.topk(COLUMNS // 2).indices
    step = -(-len(weight_F) // (COLUMNS // 2))
    spread = torch.arange(0, len(weight_F), step)
    chosen: Tensor = torch.cat((worst, spread)).unique()
    return chosen
