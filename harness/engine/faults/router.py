"""Faults of the MoE router: M26 scores, choice and weights; M27 the routed scaling factor."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.gain_fit import (
    both_gains,
    fitted,
    gain_variant,
    is_named,
    planted_gain,
)
from degarble.harness.engine.faults.model_faults import (
    FaultVariant,
    ModelFault,
    Reach,
    with_function,
    with_inputs,
    with_outputs,
)
from degarble.harness.model.family import family_of
from degarble.harness.model.types import MlpType
from degarble.harness.report.number_text import number
from degarble.references import experts as routing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext

    Score = Callable[[Tensor], Tensor]


# --------------------------------------------------------------------------------------------------
# M26: the MoE router scores, chooses or weighs experts by other rules.
#
# Another scoring function, no renormalisation, a bias that is rounded or added to the weights,
# groups that are left out or ranked otherwise, routing applied twice (flashinfer issue 2889, sglang
# issue 31213, tokenspeed issue 1231). Softmax before or after top-k is the same where there is no
# bias, and is a negative control.


_TAKING = ("ffn.experts.w13", "ffn.experts.act_quant", "ffn.experts.w2")


@dataclass(frozen=True)
class RouterRules:
    """The rules of a router; None stands for the model's own."""

    score: Score | None = None
    bias: Callable[[Tensor], Tensor] | None = None  # what becomes of it
    groups: Callable[[Tensor, Any], Tensor] | None = None
    renormed: bool = True
    from_biased: bool = False
    epsilon: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


def routed(
    rules: RouterRules, facts: Any, inputs: Mapping[str, Tensor], weights: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the variant that routes by other rules."""
    c, numerics = facts.config, facts.numerics
    ((name, source),) = weights.items()
    own: Score = torch.sigmoid if c.scoring_func == "sigmoid" else routing.sqrt_softplus
    score = (rules.score or own)(inputs["logits"])
    biased = score
    if name.endswith("tid2eid"):
        experts = source.values(torch.int64)[inputs["tokens"]]
    else:
        bias = source.values(numerics.work)
        biased = score + (bias if rules.bias is None else rules.bias(bias))
        kept = biased
        if family_of(c).expert_groups(c) is not None:
            kept = (rules.groups or _own_groups)(biased, c)
        experts = routing.largest_experts(kept, c.num_experts_per_tok)
    chosen = (biased if rules.from_biased else score).gather(1, experts)
    epsilon = numerics.switches.routing_epsilon if rules.epsilon is None else rules.epsilon
    if rules.renormed:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + epsilon)
    return {"experts": experts, "weights": chosen * c.routed_scaling_factor}


def _own_groups(biased: Tensor, c: Any) -> Tensor:
    return routing.grouped_scores(biased, routing.GroupFacts(c.n_group, c.topk_group))


def _by_best(biased: Tensor, c: Any) -> Tensor:
    """Rank groups by their single best expert."""
    by_group = biased.reshape(len(biased), c.n_group, -1)
    kept = routing.largest_experts(by_group.amax(-1), c.topk_group)
    keep = torch.zeros(by_group.shape[:2], dtype=torch.bool).scatter_(1, kept, value=True)
    return by_group.masked_fill(~keep[..., None], -torch.inf).flatten(1)


def _zeroed(biased: Tensor, c: Any) -> Tensor:
    """Set dropped groups to 0 instead of -inf, as a running maximum that starts at 0 does."""
    return _own_groups(biased, c).masked_fill(_own_groups(biased, c).isneginf(), 0.0)


def _softmax(logits: Tensor) -> Tensor:
    return torch.softmax(logits, dim=-1)


_SCORES: tuple[tuple[str, Score], ...] = (
    ("sigmoid scores", torch.sigmoid),
    ("softmax scores", _softmax),
    ("softplus scores without their root", torch.nn.functional.softplus),
    ("sqrt(softplus) scores", routing.sqrt_softplus),
    ("scores by exp", torch.exp),
    ("scores of BF16 logits", lambda x: routing.sqrt_softplus(x.bfloat16().to(x.dtype))),
)


def _router_variant(context: ComponentContext, words: str, rules: RouterRules) -> FaultVariant:
    return FaultVariant(words, with_function(context, partial(routed, rules)))


def _score_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    rooted = context.bound.config.scoring_func == "sqrtsoftplus"
    own = "sqrt(softplus) scores" if rooted else "sigmoid scores"
    for words, score in _SCORES:
        if words != own and (rooted or "BF16" not in words):
            yield _router_variant(context, words, RouterRules(score=score))


def _weight_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    yield _router_variant(context, "weights without renormalisation", RouterRules(renormed=False))
    yield _router_variant(context, "weights with 0.01 under the line", RouterRules(epsilon=0.01))
    if _scored(context):
        yield _router_variant(context, "weights of biased scores", RouterRules(from_biased=True))
    yield FaultVariant("equal weights", with_outputs(_equal))
    yield FaultVariant("weights in the reverse order of experts", with_outputs(_reversed))


def _equal(_inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Any:
    mean = outputs["weights"].mean(-1, keepdim=True)
    return {**outputs, "weights": mean.expand(outputs["weights"].shape).contiguous()}


def _reversed(_inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Any:
    return {**outputs, "weights": outputs["weights"].flip(-1)}


def _scored(context: ComponentContext) -> bool:
    block = context.component.block
    return block is not None and block.mlp_type is MlpType.SCORED


def _choice_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    config = context.bound.config
    yield _router_variant(context, "a bias rounded to BF16", RouterRules(bias=_coarse))
    yield _router_variant(context, "a bias of BF16 with an offset of 7", RouterRules(bias=_offset))
    yield _router_variant(context, "no bias", RouterRules(bias=torch.zeros_like))
    yield _router_variant(context, "the bias taken away", RouterRules(bias=torch.neg))
    yield FaultVariant("routing applied twice", with_function(context, _twice))
    yield FaultVariant("the next best experts", with_function(context, partial(_next_best)))
    if getattr(config, "n_group", 1) > 1:
        yield _router_variant(context, "no groups", RouterRules(groups=lambda biased, _c: biased))
        yield _router_variant(context, "groups by their best expert", RouterRules(groups=_by_best))
        yield _router_variant(context, "groups left out at 0", RouterRules(groups=_zeroed))


def _coarse(bias: Tensor) -> Tensor:
    return bias.bfloat16().to(bias.dtype)


def _offset(bias: Tensor) -> Tensor:
    """Round a bias as if it were stored near 7: in steps of 1/32."""
    return (bias + 7).bfloat16().to(bias.dtype) - 7


def _twice(facts: Any, inputs: Mapping[str, Tensor], weights: Mapping[str, Any]) -> Any:
    """Route the chosen experts again, with logs of their weights as logits."""
    first = routed(RouterRules(), facts, inputs, weights)
    share = first["weights"] / facts.config.routed_scaling_factor
    again = torch.full_like(inputs["logits"], -30.0)
    again.scatter_(1, first["experts"], share.clamp(min=1e-30).log())
    return routed(RouterRules(), facts, {**inputs, "logits": again}, weights)


def _next_best(facts: Any, inputs: Mapping[str, Tensor], weights: Mapping[str, Any]) -> Any:
    """Skip the best expert."""
    first = routed(RouterRules(), facts, inputs, weights)
    logits = inputs["logits"].scatter(1, first["experts"][:, :1], -1e4)
    return routed(RouterRules(), facts, {**inputs, "logits": logits}, weights)


def _table_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    """Yield variants for a layer that chooses by token id."""
    yield FaultVariant("experts by score and not by token id", with_function(context, _by_score))
    yield FaultVariant("the row of the token id before", with_inputs(_other_ids(-1)))
    yield FaultVariant("the row of the token before", with_inputs(_token_before))


def _by_score(facts: Any, inputs: Mapping[str, Tensor], weights: Mapping[str, Any]) -> Any:
    del weights
    score = routing.sqrt_softplus(inputs["logits"])
    experts = routing.largest_experts(score, facts.config.num_experts_per_tok)
    epsilon = facts.numerics.switches.routing_epsilon
    scale = facts.config.routed_scaling_factor
    return {"experts": experts, "weights": routing.router_weights(score, experts, scale, epsilon)}


def _other_ids(shift: int) -> Any:
    def change(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {**inputs, "tokens": (inputs["tokens"] + shift).clamp(min=0)}

    return change


def _token_before(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {**inputs, "tokens": inputs["tokens"].roll(1, 0)}


def _rolled(name: str, shift: int) -> Any:
    def change(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {**inputs, name: inputs[name].roll(shift, 0)} if name in inputs else inputs

    return change


def _next_expert(count: int) -> Any:
    def change(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {**inputs, "experts": (inputs["experts"] + 1) % count}

    return change


def _arrival_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    names = {each.name for each in context.component.inputs}
    count = context.bound.config.n_routed_experts
    if "experts" in names:
        yield FaultVariant("the experts of the token before", with_inputs(_rolled("experts", 1)))
        yield FaultVariant("the experts of the token after", with_inputs(_rolled("experts", -1)))
        yield FaultVariant("the expert with the next number", with_inputs(_next_expert(count)))
        yield FaultVariant(
            "experts in the reverse order of slots", with_inputs(_flipped("experts"))
        )
    if "weights" in names:
        yield FaultVariant("the weights of the token before", with_inputs(_rolled("weights", 1)))
        yield FaultVariant(
            "weights in the reverse order of slots", with_inputs(_flipped("weights"))
        )


def _flipped(name: str) -> Any:
    def change(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {**inputs, name: inputs[name].flip(-1)}

    return change


def _arrivals(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    names = [n for n in ("experts", "weights") if n in record.inputs and n in record.implied]
    if any(not torch.equal(record.inputs[n], record.implied[n]) for n in names):
        yield from _arrival_variants(context)


def _sum_variants(_context: ComponentContext) -> Iterator[FaultVariant]:
    for words, change in (
        ("no routing weights", torch.ones_like),
        ("routing weights applied twice", torch.square),
    ):
        yield FaultVariant(words, with_inputs(partial(_weighed, change)))


def _weighed(
    change: Callable[[Tensor], Tensor], inputs: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    return {**inputs, "weights": change(inputs["weights"])} if "weights" in inputs else inputs


def _weighs(context: ComponentContext) -> bool:
    """Return whether the context multiplies slots by their weights: before w2, or in the sum."""
    before = context.bound.bound_to(context.name)[1].weight_before_w2
    return context.role == ("ffn.experts.act_quant" if before else "ffn.experts.combine")


def _in_router(
    variants: Callable[[ComponentContext], Iterator[FaultVariant]], place: str
) -> Callable[[ComponentContext], bool]:
    del variants

    def applies_to(context: ComponentContext) -> bool:
        if context.role != "ffn.topk":
            return False
        return place == "any" or _scored(context) == (place == "scored")

    return applies_to


def _fault(name: str, words: tuple[str, str, str], ways: Any, place: str) -> ModelFault:
    title, effect, remedy = words
    return ModelFault(
        id=f"M26.{name}",
        title=title,
        effect=effect,
        remedy=remedy,
        applies_to=_in_router(ways, place),
        variants=ways,
    )


ROUTER_SEMANTICS_FAULTS = (
    _fault(
        "score",
        (
            "The router scores by another function",
            "experts get other weights, and others are chosen",
            "Take the scoring function from the config: sqrt(softplus) in V4, sigmoid in V3.2.",
        ),
        _score_variants,
        "any",
    ),
    _fault(
        "weights",
        (
            "The router weighs its experts by another rule",
            "the right experts with the wrong shares",
            "Weights are plain scores over their sum, times the routed scaling factor.",
        ),
        _weight_variants,
        "any",
    ),
    _fault(
        "choice",
        (
            "The router chooses by another rule",
            "some tokens visit other experts",
            "Choose by score plus the fp32 bias, inside the best groups where there are any.",
        ),
        _choice_variants,
        "scored",
    ),
    _fault(
        "table",
        (
            "A layer that chooses by token id does not",
            "tokens visit experts that were never trained on them",
            "Look the experts up in tid2eid by the token's id.",
        ),
        _table_variants,
        "hashed",
    ),
    ModelFault(
        id="M26.slots",
        title="Experts' outputs are weighed twice by the router's weights, or not at all",
        effect="every chosen expert counts alike, or the lesser ones hardly",
        remedy="Multiply a slot by its routing weight once: in front of w2, or in the sum.",
        applies_to=_weighs,
        variants=_sum_variants,
    ),
    ModelFault(
        id="M26.choice_arrives",
        title="The experts or weights of another token or slot arrive",
        effect="tokens go through experts that were chosen for others",
        remedy="Permute tokens, experts and weights together.",
        applies_to=lambda context: context.role in (*_TAKING, "ffn.experts.combine"),
        variants=_arrival_variants,
        signature=_arrivals,
        reach=Reach.EDGE,
    ),
)


# --------------------------------------------------------------------------------------------------
# M27: the routed scaling factor is applied twice, not at all, or to the wrong term.
#
# Three places may multiply by it: the router's weights, the experts' sum, the total (vllm issues
# 24119 and 45037, sglang issues 8333 and 28237). What remains is an exact gain of one term: the
# factor, or its reciprocal.

_OUTPUT = {"ffn.topk": "weights", "ffn.experts.combine": "out", "ffn.shared.w2": "out"}


def _factor(context: ComponentContext) -> float:
    return float(context.bound.config.routed_scaling_factor)


def _sits(*roles: str) -> Callable[[ComponentContext], bool]:
    return lambda context: context.role in roles and _factor(context) != 1.0


def _routed_variants(
    words: str, power: int
) -> Callable[[ComponentContext], Iterator[FaultVariant]]:
    def variants(context: ComponentContext) -> Iterator[FaultVariant]:
        gain, output = _factor(context) ** power, _OUTPUT[context.role]
        text = words.format(number(_factor(context)))
        if output == "out":
            yield planted_gain(context, text, gain)
        else:
            yield gain_variant(text, gain, output=output)

    return variants


def _named(
    words: str, power: int
) -> Callable[[ComponentContext, CallRecord], Iterator[FaultVariant]]:
    def signature(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
        output = _OUTPUT[context.role]
        c, e = record.outputs[output], record.expected[output]
        gain = fitted(c, e) if c.shape == e.shape else None
        if gain is not None and is_named(gain, _factor(context) ** power):
            if output == "out":
                text = words.format(number(_factor(context)))
                yield from both_gains(context, text, _factor(context) ** power)
            else:
                yield from _routed_variants(words, power)(context)

    return signature


_TWICE = ("the routed scaling factor {} applied twice", 1)
_MISSING = ("the routed scaling factor {} left out", -1)
_SHARED = ("the routed scaling factor {} applied to the shared expert", 1)
_SHARED_DIVIDED = ("the shared expert divided by the routed scaling factor {}", -1)
_ROUTED = ("ffn.topk", "ffn.experts.combine")

ROUTED_SCALING_FAULTS = (
    ModelFault(
        id="M27.applied_twice",
        title="The routed scaling factor is applied twice",
        effect="the routed term is larger by the factor",
        remedy="Multiply by it in one place: in the router's weights, or after the experts.",
        applies_to=_sits(*_ROUTED),
        variants=_routed_variants(*_TWICE),
        signature=_named(*_TWICE),
    ),
    ModelFault(
        id="M27.left_out",
        title="The routed scaling factor is left out",
        effect="the routed term is smaller by the factor",
        remedy="Multiply the routed term by it; look which backend was expected to.",
        applies_to=_sits(*_ROUTED),
        variants=_routed_variants(*_MISSING),
        signature=_named(*_MISSING),
    ),
    ModelFault(
        id="M27.shared_multiplied",
        title="The routed scaling factor is applied to the shared expert",
        effect="the shared term is larger by the factor",
        remedy="Multiply the routed term alone.",
        applies_to=_sits("ffn.shared.w2"),
        variants=_routed_variants(*_SHARED),
        signature=_named(*_SHARED),
    ),
    ModelFault(
        id="M27.shared_divided",
        title="The shared expert is divided by the routed scaling factor",
        effect="the shared term is smaller by the factor",
        remedy="A fused shared expert has the weight 1 / factor only if the total is multiplied.",
        applies_to=_sits("ffn.shared.w2"),
        variants=_routed_variants(*_SHARED_DIVIDED),
        signature=_named(*_SHARED_DIVIDED),
    ),
)
