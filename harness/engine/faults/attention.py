"""Faults of attention: M29 softmax scale, M30 merge of partial softmaxes, M31 top-k."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.model_faults import (
    FaultVariant,
    ModelFault,
    block_function,
    has_facts,
    has_window,
    unrounded,
    with_facts,
    with_function,
    with_inputs,
    with_numerics,
    with_outputs,
    with_switches,
    with_weights,
)
from degarble.harness.engine.faults.rope import POOLS, rope_variant_of, rotate, turned
from degarble.harness.engine.faults.weight_faults import once
from degarble.harness.formats.weight import Weight
from degarble.harness.model.config.config import compressor_windows
from degarble.harness.model.family import family_of
from degarble.harness.report.number_text import number
from degarble.references.elementary import rms_norm
from degarble.references.facts import single, spans_of
from degarble.references.sparse_attention import PoolState, slots_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext

    Tensors = Mapping[str, Tensor]
    Weights = Mapping[str, Any]
    Choose = Callable[[Tensor, Tensor], Tensor]


# --------------------------------------------------------------------------------------------------
# V4's sparse attention over index lists, as a kernel computes it, with faults of those lists.
#
# Each token has two lists, its window's positions and its entries. The softmax runs over them with
# places left out, with empty places read, or with parts merged wrongly. The rows themselves are
# those that the reference attends to; with nothing changed the output is the component's own.
#
# Shape letters: T tokens of a sequence, H heads, L row width, R rows of a sequence.


FAR = 1 << 20  # places of entries begin here, after those of any window
_TILE = 64  # places that a kernel looks at together: none has those of both lists
_AT_ONCE = 32  # tokens, whose logits are held together


@dataclass(frozen=True, eq=False)
class ListedAttention:
    """One sequence's queries [T, H, L] and rows [R, L], and each row's place [T, R] in the lists.

    A place is -1 if the row is in neither list, and FAR or more if it is in the list of entries.
    `near` and `far` are the lengths of the lists.
    """

    q: Tensor
    rows: Tensor
    place: Tensor
    near: int
    far: int
    first: tuple[Tensor, Tensor]  # rows [1, L] of slot 0: of the call's window, of its entries

    def absent(self, step: int) -> tuple[Tensor, Tensor]:
        """Return how many places [T] of each list are empty, with lengths rounded up to `step`."""
        far = self.place >= FAR
        taken = ((self.place >= 0) & ~far).sum(1), far.sum(1)
        held = (-(-count // step) * step for count in (self.near, self.far))
        near, entries = (count - used for count, used in zip(held, taken, strict=True))
        return near, entries

    def places_of(self, some: slice) -> Tensor:
        """Return the places of some tokens, entries numbered on after the window's last tile."""
        place, held = self.place[some], -(-self.near // _TILE) * _TILE
        return torch.where(place >= FAR, place - FAR + held, place)


def by_lists(
    attend: Callable[[Any, ListedAttention, Tensor], Tensor],
    facts: Any,
    inputs: Tensors,
    weights: Any,
) -> Tensors:
    """Run a component with another attention over each sequence's lists."""
    sink = single(weights).values(facts.numerics.work)
    out = [attend(facts, attention, sink) for attention in lists_of(facts, inputs)]
    return {"out": torch.cat(out).to(facts.numerics.store)}


def lists_of(facts: Any, inputs: Tensors) -> Iterator[ListedAttention]:
    """Yield the lists of every sequence of a call."""
    window, ratio = facts.config.sliding_window, facts.decoder_block.ratio
    spans, work = spans_of(inputs), facts.numerics.work
    near = joined(inputs, "window", [(min(s.start, window - 1), s.count) for s in spans])
    counts = [(s.entries_before(ratio), s.entries_made(ratio)) if ratio else (0, 0) for s in spans]
    far = joined(inputs, "compressed", counts) if ratio else [near[0][:0] for _ in spans]
    widest = inputs["chosen"].shape[1] if "chosen" in inputs else max(map(len, far))
    firsts = tuple(torch.cat(each)[:1].to(work) for each in (near, far))
    for span, rows, entries in zip(spans, near, far, strict=True):
        positions = inputs["positions"][span.tokens]
        begin = span.start - min(span.start, window - 1)
        # The token at position p attends to p - window + 1 .. p: places 0 .. window - 1.
        place = torch.arange(len(rows)) + begin - positions[:, None] + window - 1
        place = torch.where((place >= 0) & (place < window), place, -1)
        numbers = _numbers(inputs, span, len(entries), (positions + 1) // ratio if ratio else None)
        yield ListedAttention(
            inputs["q"][span.tokens].to(work),
            torch.cat((rows, entries.to(rows.dtype))).to(work),
            torch.cat((place, numbers), dim=1),
            window,
            widest,
            firsts,  # type: ignore[arg-type]
        )


def joined(inputs: Tensors, name: str, counts: list[tuple[int, int]]) -> list[Tensor]:
    """Return each sequence's rows: those of earlier calls, then those of this one."""
    kept, made = ([pair[i] for pair in counts] for i in (0, 1))
    new = inputs[name]
    old = inputs.get(f"state_{name}", new[:0])[: sum(kept)].to(new.dtype)
    return [torch.cat(pair) for pair in zip(old.split(kept), new.split(made), strict=True)]


def _numbers(inputs: Tensors, span: Any, entries: int, visible: Tensor | None) -> Tensor:
    """Return the place of every entry in each token's list, -1 for none."""
    place = torch.full((span.count, entries + 1), -1)
    if "chosen" in inputs:
        chosen = inputs["chosen"][span.tokens].long()
        index = torch.where((chosen >= 0) & (chosen < entries), chosen, entries)
        place.scatter_(1, index, FAR + torch.arange(chosen.shape[1]).expand(chosen.shape))
        place = place[:, :entries]
    elif visible is not None:
        number = torch.arange(entries)
        place = torch.where(number < visible[:, None], FAR + number, -1)
    else:
        place = place[:, :entries]
    return place


def whole(facts: Any, listed: ListedAttention, sink_H: Tensor) -> Tensor:
    """Attend with nothing changed."""
    return _attended(facts, listed, sink_H, listed.place >= 0)


def without(
    gone: Callable[[ListedAttention], Tensor], facts: Any, listed: ListedAttention, sink_H: Tensor
) -> Tensor:
    """Attend with some places [T, R] left out."""
    return _attended(facts, listed, sink_H, (listed.place >= 0) & ~gone(listed))


def with_empty(step: int, facts: Any, listed: ListedAttention, sink_H: Tensor) -> Tensor:
    """Read empty places as slot 0 of their cache, without a mask."""
    times = [*listed.absent(step)]
    rows, counts = [listed.rows], [(listed.place >= 0).to(sink_H.dtype)]
    for first, absent in zip(listed.first, times, strict=True):
        if len(first):
            rows.append(first)
            counts.append(absent[:, None].to(sink_H.dtype))
    more = ListedAttention(
        listed.q, torch.cat(rows), listed.place, listed.near, listed.far, listed.first
    )
    return _attended(facts, more, sink_H, torch.cat(counts, dim=1))


def in_parts(part: int, facts: Any, listed: ListedAttention, sink_H: Tensor) -> Tensor:
    """Sum parts of `part` places, each relative to its own maximum, without rescaling them.

    Parts are cut out of both lists, entries after the window.
    """
    return _attended(facts, listed, sink_H, listed.place >= 0, part)


def _attended(
    facts: Any, listed: ListedAttention, sink_H: Tensor, times_TR: Tensor, part: int = 0
) -> Tensor:
    """Attend to rows with multiplicities; the sink adds to the denominator only."""
    numerics, made = facts.numerics, []
    for begin in range(0, len(listed.q), _AT_ONCE):
        some = slice(begin, begin + _AT_ONCE)
        q, times = listed.q[some], times_TR[some].to(sink_H.dtype)[:, None]
        logit = torch.einsum("thl,rl->thr", q, listed.rows) * q.shape[-1] ** -0.5
        logit = logit.masked_fill(times == 0, -torch.inf)
        largest = _finite(logit.amax(-1, keepdim=True))
        peak = _peaks(logit, listed.places_of(some) // part) if part else largest
        power = torch.exp(logit - peak)
        total = (power * times).sum(-1) + torch.exp(sink_H - largest.squeeze(-1))
        # Probabilities are rounded to the storage dtype before the second product.
        stored = power if numerics.exact else power.to(numerics.store).to(numerics.work)
        out = torch.einsum("thr,rl->thl", stored * times, listed.rows)
        made.append(out / total[..., None])
    return torch.cat(made)


def _peaks(logit_THR: Tensor, part_TR: Tensor) -> Tensor:
    """Return the largest logit of the part that each row is in."""
    found = torch.zeros_like(logit_THR)
    for part in part_TR.unique().tolist():
        inside = (part_TR == part)[:, None]
        peak = _finite(logit_THR.masked_fill(~inside, -torch.inf).amax(-1, keepdim=True))
        found = torch.where(inside, peak, found)
    return found


def _finite(peak: Tensor) -> Tensor:
    """Replace -inf: a token that sees nothing has no maximum, and -inf - -inf is NaN."""
    return peak.clamp(min=torch.finfo(peak.dtype).min)


# --------------------------------------------------------------------------------------------------
# M29: attention logits are multiplied by a wrong softmax scale.
#
# YaRN's mscale squared is left out where it belongs (V3.2), or multiplied in where it does not
# (V4), or a backend takes the width of another part of the head (onnx mobius issue 548, Primus
# issue 930). Attention becomes too flat or too sharp; tokens with a single row are exact.

_STEP = 1e-2  # of the factor, for the slope of the outputs
_ROUNDS = 6  # Newton's steps


def sits(context: ComponentContext) -> bool:
    """Return whether the component has a softmax."""
    return context.role == "attn.attend"


def mscale_squared(config: Any) -> float:
    """Return YaRN's factor of the logits, or what it would be in a model without one."""
    if config.yarn is None:
        return 1.0
    if has_mscale(config):
        return float(config.yarn.logit_scale)
    return float(config.yarn.amplitude(config.yarn.mscale or 1.0) ** 2)


def has_mscale(config: Any) -> bool:
    """Return whether YaRN scales the model's logits; it never does in V4."""
    yarn = family_of(config).logit_yarn(config)
    return yarn is not None and bool(yarn.mscale_all_dim)


def scaled(
    context: ComponentContext, words: str, factor: float, head: int | None = None
) -> FaultVariant:
    """Return the variant that multiplies the logits of all heads, or of one, by a factor."""
    config = context.bound.config
    yarn = family_of(config).logit_yarn(config)
    where: dict[str, Any] = {"factor": factor} | ({} if head is None else {"head": head})
    if head is None and yarn is not None and yarn.factor > 1:
        own = yarn.logit_scale
        mscale = (math.sqrt(own * factor) - 1) / (0.1 * math.log(yarn.factor))
        changed = replace(yarn, mscale=mscale or 1e-12, mscale_all_dim=mscale or 1e-12)
        return FaultVariant(
            words, with_facts(context, lambda facts: _with_yarn(facts, changed)), where
        )

    def change(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        q = inputs["q"].double()
        if head is None:
            return {**inputs, "q": q * factor}
        there = (torch.arange(q.shape[1]) == head)[:, None]
        return {**inputs, "q": torch.where(there, q * factor, q)}

    return FaultVariant(words, with_inputs(change), where)


def _with_yarn(facts: Any, yarn: Any) -> Any:
    # A config checks that YaRN's fields are positive; a fault's need not be.
    made = object.__new__(type(facts.config))
    made.__dict__.update(facts.config.__dict__)
    object.__setattr__(made, "yarn", yarn)
    return replace(facts, config=made)


def _named(context: ComponentContext) -> Iterator[tuple[str, float]]:
    """Yield the factors that have a name."""
    config = context.bound.config
    square = mscale_squared(config)
    if square != 1:
        if has_mscale(config):
            yield "logits without YaRN's mscale squared", 1 / square
            yield "logits with YaRN's mscale once", 1 / math.sqrt(square)
            yield "logits with YaRN's mscale squared twice", square
        else:
            yield "logits times YaRN's mscale squared", square
            yield "logits times YaRN's mscale", math.sqrt(square)
    own, parts = family_of(config).head_widths(config)
    for width in sorted(parts - {own}):
        yield f"logits scaled by {width}^-1/2", math.sqrt(own / width)
    yield "logits without a scale", math.sqrt(own)
    yield "logits scaled twice", 1 / math.sqrt(own)
    yield "logits in powers of 2", math.log(2)
    yield "logits times log2(e)", 1 / math.log(2)


def _logits_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    for words, factor in _named(context):
        yield scaled(context, words, factor)


def _odd_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    for factor in (0.9, 1.25, 3.0):
        yield scaled(context, f"logits times {number(factor)}", factor)
    for head in (0, context.bound.config.num_attention_heads - 1):
        yield scaled(context, f"logits of head {head} times {number(0.5)}", 0.5, head)


def _odd(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    """Propose the best-fitting factor, of all heads or of the only head that differs."""
    if not has_facts(context) or record.outputs["out"].shape != record.expected["out"].shape:
        return
    heads = context.bound.config.num_attention_heads
    c, e = (_by_head(each["out"], heads) for each in (record.outputs, record.expected))
    gaps = (c - e).square().sum((0, 2)) / e.square().sum((0, 2)).clamp(min=1e-30)
    if not bool(gaps.isfinite().all()):
        return
    head = int(gaps.argmax())
    alone = float(gaps[head]) > 20 * float(gaps.sum() - gaps[head])
    factor = _fitted(context, record, head if alone and heads > 1 else None)
    if not math.isfinite(factor):
        return
    short = [round(factor * 20) / 20, round(factor * 16) / 16]
    short += [float(f"{factor:.{digits}g}") for digits in (2, 3)]
    for value in dict.fromkeys((*short, factor)):
        if alone and heads > 1:
            yield scaled(context, f"logits of head {head} times {number(value)}", value, head)
        else:
            yield scaled(context, f"logits times {number(value)}", value)


def _by_head(out: Tensor, heads: int) -> Tensor:
    return out.double().reshape(len(out), heads, -1)


def _fitted(context: ComponentContext, record: CallRecord, head: int | None) -> float:
    """Fit the logarithm of the factor by least squares with Newton's method."""
    candidate, factor = record.outputs["out"].double(), 1.0
    # Trap: logits that are stored round by steps in which a small change of the factor is lost.
    smooth = with_facts(context, _smooth)(context.call)
    for _ in range(_ROUNDS):
        here, there = (
            scaled(context, "", each, head)
            .apply(smooth)(record.inputs, context.weights)["out"]
            .double()
            for each in (factor, factor * (1 + _STEP))
        )
        slope = (there - here) / math.log1p(_STEP)
        energy = float(slope.square().sum())
        if not energy:
            break
        step = float((slope * (candidate - here)).sum()) / energy
        factor *= math.exp(max(-1.0, min(1.0, step)))
    return factor


def _smooth(facts: Any) -> Any:
    return unrounded(with_switches(facts, attention_in_storage_dtype=False))


SOFTMAX_SCALE_FAULTS = (
    ModelFault(
        id="M29.scale",
        title="Attention's logits are scaled by another known number",
        effect="attention is too flat or too sharp, the more the longer the context",
        remedy="V4: head_dim^-1/2 alone. V3.2: qk_head_dim^-1/2 times mscale squared.",
        applies_to=sits,
        variants=_logits_variants,
    ),
    ModelFault(
        id="M29.other_scale",
        title="Attention's logits are scaled by another number",
        effect="attention is too flat or too sharp, of all heads or of one",
        remedy="Look for a scale of q or of the cache that reaches the keys alone.",
        applies_to=sits,
        variants=_odd_variants,
        signature=_odd,
    ),
)


# --------------------------------------------------------------------------------------------------
# M30: partial softmaxes of attention (split KV, window and entries) are merged with wrong weights.
#
# Attention in parts (window and entries, chunks of a long context) merges them by their log-sum-
# exp. That may be written in base 2 and read in base e, contain a maximum without the scale, or be
# undefined for a part without rows (TensorRT-LLM issue 19112, sglang issue 22688). Tokens whose
# rows all lie in one part are exact.
#
# Shape letters: T tokens, H heads, L row width.


_ROLE = "attn.attend"
_SPLITS = (64, 128, 576)  # keys that one thread block attends to
_MOST_KEPT = 1 << 18  # elements of q up to which parts are cached
_ENTRIES = ("compressed", "state_compressed", "chosen")


@dataclass(frozen=True, eq=False)
class PartialSoftmaxes:
    """Two partial softmaxes: outputs [T, H, L], log-sum-exps [T, H, 1]; the sink's logit [H, 1]."""

    first: Tensor
    second: Tensor
    log_first: Tensor
    log_second: Tensor
    sink: Tensor
    heads_joined: bool = False  # the component returns [T, H * L]


@dataclass(frozen=True)
class MergeRule:
    """How a log-sum-exp becomes a weight, and the weight of a part without rows."""

    weight: Callable[[Tensor], Tensor] = torch.exp
    empty: float = 0.0  # relative to the other part
    sinks: int = 1


def _fine(facts: Any) -> Any:
    exact = with_numerics(facts, store=torch.float64, work=torch.float64, products=torch.float64)
    return with_switches(exact, attention_in_storage_dtype=False)


def parts_of(facts: Any, inputs: Tensors, weights: Weights) -> PartialSoftmaxes:
    """Split attention by window and entries, or by older and newer half of the chosen rows."""
    windowed = family_of(facts.config).earlier_window(facts.config) is not None
    split = _window_and_entries if windowed else _older_and_newer
    work = partial(split, facts, inputs, weights)
    if inputs["q"].numel() > _MOST_KEPT:
        return work()
    return once([parts_of, facts, *inputs, *inputs.values(), *weights.values()], work)


def _window_and_entries(facts: Any, inputs: Tensors, weights: Weights) -> PartialSoftmaxes:
    fine, sink = _fine(facts), single(weights).values(torch.float64)
    alone = replace(fine, block=replace(fine.decoder_block, ratio=0))
    window = {name: x for name, x in inputs.items() if name not in _ENTRIES}
    near, log_near = _with_log_sum(alone, window, weights)
    total, log_total = _with_log_sum(fine, inputs, weights)
    # What the entries add to the window's sum, and their part of the output.
    share = (1 - torch.exp(log_near - log_total)).clamp(min=0.0)
    there = share > 1e-12
    far = torch.where(there, (total - (1 - share) * near) / share.clamp(min=1e-12), 0.0)
    log_far = torch.where(there, log_total + share.clamp(min=1e-300).log(), -torch.inf)
    return PartialSoftmaxes(near, far, log_near, log_far, sink[:, None])


def _with_log_sum(facts: Any, inputs: Tensors, weights: Weights) -> tuple[Tensor, Tensor]:
    """Return outputs without a sink, and the log-sum-exp, recovered by means of a sink of 0."""
    (name,), (own,) = weights, weights.values()
    plain = torch.zeros_like(own.values(torch.float64))
    function = block_function(facts, _ROLE)
    none, zero = (
        function(facts, inputs, {name: Weight(value=value)})["out"]
        for value in (torch.full_like(plain, -torch.inf), plain)
    )
    # With Z = sum(exp(logit)), a sink of 0 scales the output by kept = Z / (Z + 1).
    kept = (none * zero).sum(-1, keepdim=True) / none.square().sum(-1, keepdim=True)
    # 1 / kept - 1 = 1 / Z; the clamp avoids log(0) where rounding makes kept 1.
    return none, -torch.log((1 / kept - 1).clamp(min=1e-300))


def _older_and_newer(facts: Any, inputs: Tensors, weights: Weights) -> PartialSoftmaxes:
    fine, chosen = _fine(facts), inputs["chosen"]
    function = block_function(fine, _ROLE)
    older = chosen < (inputs["positions"][:, None] + 1) // 2
    heads = facts.config.num_attention_heads
    total, first, second = (
        function(fine, {**inputs, "chosen": tensor}, weights)["out"].reshape(len(chosen), heads, -1)
        for tensor in (chosen, torch.where(older, chosen, -1), torch.where(older, -1, chosen))
    )
    apart = first - second
    share = ((total - second) * apart).sum(-1, keepdim=True)
    share = share / apart.square().sum(-1, keepdim=True).clamp(min=1e-300)
    any_first = ((chosen >= 0) & older).any(-1)[:, None, None]
    any_second = ((chosen >= 0) & ~older).any(-1)[:, None, None]
    share = torch.where(any_first, torch.where(any_second, share.clamp(0.0, 1.0), 1.0), 0.0)
    none = torch.full((heads, 1), -torch.inf, dtype=torch.float64)
    return PartialSoftmaxes(first, second, share.log(), (1 - share).log(), none, heads_joined=True)


def merged(parts: PartialSoftmaxes, rule: MergeRule) -> Tensor:
    """Merge two parts by their log-sum-exps, relative to the larger one."""
    top = torch.maximum(parts.log_first, parts.log_second).clamp(min=-1e30)
    weights = [
        torch.where(log.isneginf(), rule.empty, rule.weight(log - top))
        for log in (parts.log_first, parts.log_second)
    ]
    # The sink is relative to the same maximum; a wrong reading of sums does not change it.
    below = rule.sinks * torch.exp(parts.sink - top)
    total = weights[0] * parts.first + weights[1] * parts.second
    return total / (weights[0] + weights[1] + below)


def _merging(rule: MergeRule, facts: Any, inputs: Tensors, weights: Weights) -> Tensors:
    parts = parts_of(facts, inputs, weights)
    out = merged(parts, rule).to(facts.numerics.store)
    return {"out": out.flatten(1) if parts.heads_joined else out}


def _power(exponent: float) -> Callable[[Tensor], Tensor]:
    return lambda log: torch.exp(log * exponent)


def _softmax_merge_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    if _has_parts(context):
        yield from _merge_variants(context)
    else:
        for words, change in (
            ("the sink counted twice", lambda sink: sink + math.log(2)),
            ("no sink", lambda sink: torch.full_like(sink, -torch.inf)),
        ):
            yield FaultVariant(words, with_weights(partial(_sink, change)))
    for part in _SPLITS if has_window(context) else ():
        words = f"sums of {part} keys each added as if their peaks were one"
        change = with_function(context, partial(by_lists, partial(in_parts, part)))
        yield FaultVariant(words, change, {"keys": part})


def _sink(change: Callable[[Tensor], Tensor], _name: str, weight: Weight) -> Weight:
    return Weight(value=change(weight.values(torch.float32)))


def _merge_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    square = mscale_squared(context.bound.config)
    found = [
        ("log-sums of base e read in base 2", MergeRule(_power(math.log(2)))),
        ("log-sums of base 2 read in base e", MergeRule(_power(1 / math.log(2)))),
        ("both parts weighed alike", MergeRule(torch.ones_like)),
        ("a part without rows weighed like the other", MergeRule(empty=1.0)),
    ]
    if square != 1:
        found.append(("log-sums times YaRN's mscale squared", MergeRule(_power(square))))
        found.append(("log-sums without YaRN's mscale squared", MergeRule(_power(1 / square))))
    if has_window(context):
        found.append(("the sink counted in both parts", MergeRule(sinks=2)))
        found.append(("no sink", MergeRule(sinks=0)))
    for words, rule in found:
        yield FaultVariant(words, with_function(context, partial(_merging, rule)))


def _pool_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    found = [("powers that are not divided by their sum", _powers), ("gates without softmax", _own)]
    if compressor_windows(_block(context)) == 2:
        found.append(("the window's own rows alone", _own_window))
        found.append(("the window before alone", _window_before))
    for words, weigh in found:
        yield FaultVariant(words, with_function(context, partial(_pooling, context.role, weigh)))


def _block(context: ComponentContext) -> Any:
    assert context.component.block is not None, "a pool is in a block"
    return context.component.block


def _powers(gate_WSE: Tensor) -> Tensor:
    return torch.exp(gate_WSE - gate_WSE.amax(1, keepdim=True))


def _own(gate_WSE: Tensor) -> Tensor:
    return torch.where(gate_WSE.isfinite(), gate_WSE, 0.0)


def _own_window(gate_WSE: Tensor) -> Tensor:
    seen = torch.arange(gate_WSE.shape[1]) >= gate_WSE.shape[1] // 2
    return torch.softmax(gate_WSE.masked_fill(~seen[:, None], -torch.inf), dim=1)


def _window_before(gate_WSE: Tensor) -> Tensor:
    """Pool with the first half of the window alone; weights are 0 if all of it is masked."""
    seen = torch.arange(gate_WSE.shape[1]) < gate_WSE.shape[1] // 2
    return torch.softmax(gate_WSE.masked_fill(~seen[:, None], -torch.inf), dim=1).nan_to_num(0.0)


def _pooling(role: str, weigh: Any, facts: Any, inputs: Tensors, weights: Weights) -> Tensors:
    """Run the component's own code with other pooled rows before its rotation."""

    def change(_normed: Tensor, positions: Tensor) -> Tensor:
        pooled = _pooled(weigh, facts, inputs, weights)
        return rotate(pooled, positions, rope_variant_of(facts, role), facts.numerics)

    return turned(facts, role, inputs, weights, change)


def _pooled(weigh: Any, facts: Any, inputs: Tensors, weights: Weights) -> Tensor:
    """Return normed rows, pooled with other weights than the softmax of their gates."""
    numerics, ratio = facts.numerics, facts.decoder_block.ratio
    part = {name.rpartition(".")[2]: weights[name].values(numerics.work) for name in weights}
    how, made = facts.pool(len(part["norm"])), []
    gates = inputs["gate"] + part["ape"][inputs["positions"] % ratio]
    base = ratio if how.overlap else 0
    for index, span in enumerate(spans_of(inputs)):
        before = PoolState(inputs["state_latent"][index], inputs["state_gate"][index])
        kept = slice(base, base + span.start % ratio)
        latent = torch.cat((before.latent[kept], inputs["latent"][span.tokens]))
        gate = torch.cat((before.gate[kept], gates[span.tokens]))
        whole = len(latent) // ratio * ratio
        if whole:
            rows = (latent[:whole], gate[:whole])
            latents, gated = slots_of(rows, before, span.start // ratio, how)
            made.append((weigh(gated) * latents).sum(1))
    pooled = torch.cat(made).to(numerics.store)
    return rms_norm(pooled, part["norm"], how.epsilon, numerics).to(numerics.work)


def _has_parts(context: ComponentContext) -> bool:
    block = context.component.block
    if context.role != _ROLE or block is None:
        return False
    return block.ratio > 0 or not has_window(context)


SOFTMAX_MERGE_FAULTS = (
    ModelFault(
        id="M30.merge",
        title="Partial softmaxes are merged with other weights than their sums",
        effect="one part of the context outweighs the other; contexts of one part are exact",
        remedy="Merge by exp(lse), all in one base and with one scale, and 0 where nothing is.",
        applies_to=lambda context: context.role == _ROLE,
        variants=_softmax_merge_variants,
    ),
    ModelFault(
        id="M30.pooled",
        title="A compressor pools its windows by other weights than the softmax of their gates",
        effect="compressed entries are other mixtures of their tokens",
        remedy="Softmax over all rows of both windows, channel by channel, and nothing else.",
        applies_to=lambda context: context.role in POOLS,
        variants=_pool_variants,
    ),
)


# --------------------------------------------------------------------------------------------------
# M31: the indexer's top-k loses members, breaks ties otherwise, or compares rounded scores.
#
# Members of the bin that contains the threshold are lost when it overflows, the threshold is that
# of another token, a precise projection was fused into a coarse one (sglang issues 35257 and 13459,
# TensorRT-LLM issue 18339). Contexts short enough that everything is chosen are exact.


_CUT = (16, 17, 18, 19, 20, 21, 22)  # of 32, that a selection by digits may never look at
_COARSE = ("attn.indexer.weights_proj", "attn.indexer.scores")


def _in_place(words: str, choose: Choose) -> FaultVariant:
    """Return the variant that replaces the right choice; `choose` gets scores and choice."""

    def change(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Any:
        return {**outputs, "out": choose(inputs["scores"], outputs["out"])}

    return FaultVariant(words, with_outputs(change))


def _scored(words: str, change: Callable[[Tensor], Tensor]) -> FaultVariant:
    """Return the variant that selects correctly from changed scores."""

    def changed(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        scores = inputs["scores"]
        made = change(scores.float()).to(scores.dtype)
        return {**inputs, "scores": torch.where(scores.isneginf(), scores, made)}

    return FaultVariant(words, with_inputs(changed))


def _bin_of(scores: Tensor) -> Tensor:
    """Keep the high 8 bits of FP16: sign, exponent, two bits of the significand."""
    codes = scores.half().contiguous().view(torch.int16)
    return (codes & -256).view(torch.float16).float()


def _bin_lost(scores: Tensor, chosen: Tensor) -> Tensor:
    """Drop all members of the threshold's bin except the first."""
    bins = _bin_of(scores)
    at = bins.gather(1, chosen.clamp(min=0))
    last = torch.where(chosen >= 0, at, torch.inf).amin(-1, keepdim=True)
    # If every candidate is chosen there is no threshold, and no bin overflows.
    full = (chosen >= 0).sum(-1, keepdim=True) < scores.isfinite().sum(-1, keepdim=True)
    within = (at == last) & full & (chosen >= 0)
    return torch.where(within & (within.cumsum(-1) > 1), -1, chosen)


def _stale_threshold(scores: Tensor, chosen: Tensor) -> Tensor:
    """Drop what is below the previous token's threshold."""
    at = scores.gather(1, chosen.clamp(min=0))
    least = torch.where(chosen >= 0, at, torch.inf).amin(-1)
    before = least.roll(1, 0)
    # The first token has no previous threshold.
    before[0] = -torch.inf
    keep = (at >= before[:, None]) & (chosen >= 0)
    return torch.where(keep, chosen, -1)


def _last_out(_scores: Tensor, chosen: Tensor) -> Tensor:
    return torch.cat((chosen[:, :-1], torch.full_like(chosen[:, -1:], -1)), dim=1)


def _half_out(_scores: Tensor, chosen: Tensor) -> Tensor:
    there = torch.arange(chosen.shape[1]) < (chosen.shape[1] + 1) // 2
    return torch.where(there, chosen, -1)


def _best_out(_scores: Tensor, chosen: Tensor) -> Tensor:
    return torch.cat((torch.full_like(chosen[:, :1], -1), chosen[:, 1:]), dim=1)


def _smallest(scores: Tensor, chosen: Tensor) -> Tensor:
    """Choose the smallest visible scores."""
    order = torch.where(scores.isneginf(), torch.inf, scores).sort(dim=-1, stable=True)
    found = order.indices[:, : chosen.shape[1]]
    return torch.where(order.values[:, : chosen.shape[1]].isinf(), -1, found)


def _newest(scores: Tensor, chosen: Tensor) -> Tensor:
    """Choose the last entries, whatever their scores."""
    number = torch.arange(scores.shape[1]).expand(scores.shape)
    order = torch.where(scores.isneginf(), -1, number).sort(dim=-1, descending=True)
    return order.values[:, : chosen.shape[1]]


def _ties_up(scores: Tensor, chosen: Tensor) -> Tensor:
    """Break ties towards the higher index."""
    order = scores.flip(1).sort(dim=-1, descending=True, stable=True)
    found = scores.shape[1] - 1 - order.indices[:, : chosen.shape[1]]
    return torch.where(order.values[:, : chosen.shape[1]].isneginf(), -1, found)


def _top_k_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    del context
    yield _in_place("members of the threshold's bin left out", _bin_lost)
    yield _in_place("the threshold of the token before", _stale_threshold)
    yield _in_place("the last of the chosen left out", _last_out)
    yield _in_place("half of the chosen left out", _half_out)
    yield _in_place("the best of the chosen left out", _best_out)
    yield _in_place("the smallest scores chosen", _smallest)
    yield _in_place("the newest entries chosen", _newest)


def _rounded_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    del context
    yield _scored("scores compared by the high 8 bits of FP16", _bin_of)
    yield _scored("scores compared as E4M3", lambda x: x.to(torch.float8_e4m3fn).float())
    yield _scored("scores compared by magnitude", torch.abs)
    yield _scored("scores compared as whole numbers", torch.round)
    for bits in _CUT:
        words = f"scores compared without the last {bits} bits of their keys"
        yield _scored(words, partial(_key_cut, bits))
    yield _in_place("ties broken towards the newer entry among coarse scores", _ties_up_coarse)


def _key_cut(bits: int, scores: Tensor) -> Tensor:
    """Cut the low bits of the radix-sort key, whose order is that of scores.

    The key of a negative score has inverted bits, hence the two cases.
    """
    low = (1 << bits) - 1
    code = scores.contiguous().view(torch.int32)
    return torch.where(code < 0, code | low, code & ~low).view(torch.float32)


def _ties_up_coarse(scores: Tensor, chosen: Tensor) -> Tensor:
    coarse = torch.where(scores.isneginf(), -torch.inf, _bin_of(scores))
    return _ties_up(coarse.to(scores.dtype), chosen)


def _coarse_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    if not family_of(context.bound.config).stores_indexer:  # else BF16 is what is stored
        yield FaultVariant("rounded to BF16", with_outputs(_as(torch.bfloat16)))
    yield FaultVariant("rounded to E4M3", with_outputs(_as(torch.float8_e4m3fn)))
    yield FaultVariant("rounded to E5M2", with_outputs(_as(torch.float8_e5m2)))


def _as(dtype: torch.dtype) -> Any:
    def change(_inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Any:
        out = outputs["out"]
        made = out.to(dtype).to(out.dtype)
        return {**outputs, "out": torch.where(out.isfinite(), made, out)}

    return change


def _weighing_variants(_context: ComponentContext) -> Iterator[FaultVariant]:
    yield FaultVariant("products without their ReLU", with_inputs(_not_rectified))
    yield FaultVariant(
        "the weights of two neighbouring heads in each other's place", with_inputs(_paired)
    )
    yield FaultVariant("heads without their weights", with_inputs(_alike))


def _not_rectified(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Cancel the ReLU with a second, negated set of heads: relu(x) - relu(-x) = x."""
    q, weights = inputs["q"], inputs["weights"]
    both = {"q": torch.cat((q, -q), dim=1), "weights": torch.cat((weights, -weights), dim=1)}
    return {**inputs, **both}


def _paired(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    weights = inputs["weights"]
    other = (torch.arange(weights.shape[1]) ^ 1).clamp(max=weights.shape[1] - 1)
    return {**inputs, "weights": weights[:, other]}


def _alike(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    heads, width = inputs["q"].shape[1:]
    return {**inputs, "weights": torch.full_like(inputs["weights"], (heads * width) ** -0.5)}


_EFFECT = "some tokens attend to rows that are not the best"

TOP_K_SELECTION_FAULTS = (
    ModelFault(
        id="M31.members",
        title="The selection loses members, or takes others",
        effect=_EFFECT,
        remedy="Audit the selection on recorded scores: the set must be exact.",
        applies_to=lambda context: context.role == "attn.indexer.topk",
        variants=_top_k_variants,
    ),
    ModelFault(
        id="M31.compared_coarsely",
        title="The selection compares scores that it has rounded",
        effect=_EFFECT,
        remedy="Compare fp32 scores; resolve ties by index.",
        applies_to=lambda context: context.role == "attn.indexer.topk",
        variants=_rounded_variants,
    ),
    ModelFault(
        id="M31.weighing",
        title="The indexer's products are weighed by another rule",
        effect=_EFFECT,
        remedy="A score is the sum of ReLU(q . k) over heads, each by its own weight.",
        applies_to=lambda context: context.role == "attn.indexer.scores",
        variants=_weighing_variants,
    ),
    ModelFault(
        id="M31.coarse_scores",
        title="The indexer's head weights or scores are stored too coarsely",
        effect=_EFFECT,
        remedy="Keep head weights and scores in fp32, or in BF16 where the official code does.",
        applies_to=lambda context: context.role in _COARSE,
        variants=_coarse_variants,
    ),
)
