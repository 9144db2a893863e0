"""Faults of sums: M21 count of all-reduces, M23 residual streams and the plain residual sum."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.gain_fit import fitted, gain_variant, is_named, of_record
from degarble.harness.engine.faults.model_faults import (
    FaultVariant,
    ModelFault,
    Reach,
    facts_at,
    with_config,
    with_facts,
    with_inputs,
    with_outputs,
    with_weights,
    with_x,
)
from degarble.harness.formats.weight import Weight
from degarble.references import mixing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext

    Change = Callable[[Tensor], Tensor]


# --------------------------------------------------------------------------------------------------
# M21: an all-reduce is done once too often, not at all, or over some of the ranks.
#
# Replicated values are added as if they were partial sums, a shared expert is reduced by itself and
# again with the total, or a rank's part is missing (sglang issues 31700, 31475; vllm issue 49378).
# The gain is then a number of ranks or its reciprocal. Which part of K is missing follows from
# replaying the product without it.

RANKS = (2, 4, 8)
_SUMMED = ("ffn.experts.combine", "ffn.shared.w2", "ffn.w2", "attn.wo_b", "attn.wo")
_CUT = ("ffn.shared.w2", "ffn.w2", "attn.wo_b", "attn.wo")
_SCORED = "attn.indexer.scores"


def sits_summed(context: ComponentContext) -> bool:
    """Return whether the sharding plan sums here over ranks."""
    return context.role in _SUMMED or context.role == _SCORED


def sits_cut(context: ComponentContext) -> bool:
    """Return whether K is split between ranks."""
    return context.role in _CUT


def _counts(words: str, factor: Callable[[int], float]) -> Callable[..., Iterator[FaultVariant]]:
    def variants(_context: ComponentContext) -> Iterator[FaultVariant]:
        for ranks in RANKS:
            yield gain_variant(words.format(ranks), factor(ranks), places={"ranks": ranks})

    return variants


_AGAIN = _counts("the sum taken {} times", float)
_DIVIDED = _counts("the sum divided by {} ranks", lambda ranks: 1 / ranks)


def _of_gain(
    variants: Callable[..., Iterator[FaultVariant]],
) -> Callable[[ComponentContext, CallRecord], Iterator[FaultVariant]]:
    """Propose the variants whose number of ranks, or its reciprocal, is the fitted gain."""

    def signature(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
        gain = of_record(record)
        if gain is None and context.role == _SCORED:
            gain = _of_scores(record)
        for variant in variants(context) if gain is not None else ():
            ranks = float(variant.where["ranks"])
            if is_named(gain or 0.0, ranks) or is_named(gain or 0.0, 1 / ranks):
                yield variant

    return signature


def _of_scores(record: CallRecord) -> float | None:
    """Fit the gain of visible scores; the others are -inf."""
    c, e = record.outputs["out"], record.expected["out"]
    if c.shape != e.shape:
        return None
    both = c.isfinite() & e.isfinite()
    return fitted(c[both], e[both])


def _part_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    """Yield products without one rank's part of K."""
    for ranks in RANKS:
        for rank in (0, ranks - 1):
            kept = f"without the part of rank {rank} of {ranks}"
            yield FaultVariant(kept, _without(context, rank, ranks), {"ranks": ranks, "rank": rank})


def _without(context: ComponentContext, rank: int, ranks: int) -> Any:
    def change(x: Tensor) -> Tensor:
        made, width = x.clone(), x.shape[-1] // ranks
        made[..., rank * width : (rank + 1) * width] = 0
        return made

    return with_x(context, change)


def _on_the_way(context: ComponentContext) -> Iterator[FaultVariant]:
    del context
    for name in ("shared", "routed"):
        for ranks in RANKS:
            words = f"the {name} term multiplied by {ranks} on its way"
            where = {"ranks": ranks, "term": name}
            yield FaultVariant(words, with_inputs(_multiplied(name, float(ranks))), where)
        words = f"the {name} term divided by 2 on its way"
        yield FaultVariant(words, with_inputs(_multiplied(name, 0.5)), {"ranks": 2, "term": name})
    words = "the shared term of another rank's tokens"
    yield FaultVariant(words, with_inputs(_rolled), {"term": "shared"})


def _multiplied(name: str, factor: float) -> Any:
    def change(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {**inputs, name: (inputs[name].double() * factor).to(inputs[name].dtype)}

    return change


def _rolled(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {**inputs, "shared": inputs["shared"].roll(1, 0)}


def _twice_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    """Yield variants in which two ranks run one expert and both contributions are summed."""
    for expert in range(context.bound.config.n_routed_experts):
        yield FaultVariant(
            f"expert {expert} counted twice", with_outputs(_doubled(expert)), {"expert": expert}
        )


def _doubled(expert: int) -> Any:
    def change(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        there = (inputs["experts"] == expert)[..., None]
        return {**outputs, "out": torch.where(there, outputs["out"] * 2, outputs["out"])}

    return change


def _twice(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    """Propose experts whose own rows have the gain 2."""
    c, e, experts = record.outputs["out"], record.expected["out"], record.inputs["experts"]
    for variant in _twice_variants(context) if c.shape == e.shape else ():
        there = experts == int(variant.where["expert"])
        gain = fitted(c[there], e[there]) if bool(there.any()) else None
        if gain is not None and is_named(gain, 2.0):
            yield variant


REDUCTION_COUNT_FAULTS = (
    ModelFault(
        id="M21.summed_again",
        title="A sum over ranks is taken more than once",
        effect="the component's term is larger by the number of ranks",
        remedy="Reduce once: either in the module or in the runner that adds it up.",
        applies_to=sits_summed,
        variants=_AGAIN,
        signature=_of_gain(_AGAIN),
    ),
    ModelFault(
        id="M21.divided",
        title="A term is divided by the number of ranks and not summed",
        effect="the component's term is smaller by the number of ranks",
        remedy="Sum what was scaled for a sum, or do not scale it.",
        applies_to=sits_summed,
        variants=_DIVIDED,
        signature=_of_gain(_DIVIDED),
    ),
    ModelFault(
        id="M21.part_missing",
        title="A sum over ranks leaves some rank out",
        effect="the part of K that this rank holds is missing",
        remedy="Reduce over all ranks of the group that cuts this weight.",
        applies_to=sits_cut,
        variants=_part_variants,
    ),
    ModelFault(
        id="M21.expert_twice",
        title="One expert counts twice in the sum",
        effect="tokens that visit it get its contribution doubled",
        remedy="Map a logical expert to one physical one on all ranks, or mend a doubled scale.",
        applies_to=lambda context: context.role == "ffn.experts.w2",
        variants=_twice_variants,
        signature=_twice,
    ),
    ModelFault(
        id="M21.term_on_its_way",
        title="The routed or the shared term is scaled between its component and the sum",
        effect="one of the two terms of the sum is larger or smaller than it was made",
        remedy="Fit out = a * routed + b * shared; a or b is the number of ranks.",
        applies_to=lambda context: context.role == "ffn.moe_sum",
        variants=_on_the_way,
        reach=Reach.EDGE,
    ),
)


# --------------------------------------------------------------------------------------------------
# M23: residual bookkeeping goes wrong: mHC's streams, and V3.2's plain sum.
#
# Streams are collapsed and spread again, exchanged, or mixed wrongly; a residual is dropped or
# added twice. A pipeline stage that unpacks its input spreads streams that were never one (vllm-
# ascend issue 9473). The four streams are then equal, and stay nearly so.
#
# Shape letters: T tokens, S streams, D hidden.


_POST = ("attn.hc_post", "ffn.hc_post")
_PRE = ("attn.hc_pre", "ffn.hc_pre")


def _spread(one: Tensor, streams: Tensor) -> Tensor:
    return mixing.expand(one.to(streams.dtype), streams.shape[1])


def _changes(context: ComponentContext) -> Iterator[tuple[str, Change]]:
    """Yield wrong treatments of streams [T, S, D]."""
    head = context.sibling("hc_head")
    if head is not None:
        call, weights = head.call, head.weights

        def collapsed(streams: Tensor) -> Tensor:
            return _spread(call({"streams": streams}, weights)["out"], streams)

        yield "streams collapsed by hc_head and spread again", collapsed
    yield "the mean of the streams spread again", lambda s: _spread(s.double().mean(1), s)
    yield "the sum of the streams spread again", lambda s: _spread(s.double().sum(1), s)
    yield "the first stream spread over all", lambda s: _spread(s[:, 0], s)
    yield "streams in the reverse order", lambda s: s.flip(1)
    yield "streams shifted by one", lambda s: s.roll(1, 1)


def _made_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    for words, change in _changes(context):
        yield FaultVariant(words, with_outputs(_to_output(change)))


def _to_output(change: Change) -> Any:
    def changed(_inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Any:
        return {**outputs, "out": change(outputs["out"])}

    return changed


def _arriving_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    for words, change in _changes(context):
        yield FaultVariant(f"{words}, on their way", with_inputs(_to_input("streams", change)))


def _to_input(name: str, change: Change) -> Any:
    def changed(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {**inputs, name: change(inputs[name])} if name in inputs else inputs

    return changed


def _mixed_variants(_context: ComponentContext) -> Iterator[FaultVariant]:
    yield FaultVariant(
        "the mix taken the other way round", with_inputs(_to_input("mix", _transposed))
    )
    yield FaultVariant("no mix of the streams", with_inputs(_to_input("mix", _unmixed)))
    yield FaultVariant(
        "post without its factor 2", with_inputs(_to_input("post", lambda post: post / 2))
    )
    yield FaultVariant("a plain residual sum", with_inputs(_plain))
    words = "the first two old streams in each other's place"
    yield FaultVariant(words, with_inputs(_to_input("mix", _first_exchanged)))


def _transposed(mix: Tensor) -> Tensor:
    return mix.transpose(1, 2).contiguous()


def _first_exchanged(mix: Tensor) -> Tensor:
    order = torch.arange(mix.shape[1])
    order[:2] = order[:2].flip(0)
    return mix[:, order]


def _unmixed(mix: Tensor) -> Tensor:
    return torch.eye(mix.shape[1], dtype=mix.dtype).expand(mix.shape).contiguous()


def _plain(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    ones = torch.ones_like(inputs["post"])
    return {**inputs, "mix": _unmixed(inputs["mix"]), "post": ones}


def _gate_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    """Yield reordered gates, and the projection by what BF16 rounding removes from its weight."""
    streams = facts_at(context).config.hc_mult
    number = torch.arange((2 + streams) * streams)
    backwards, turned = number.clone(), number.clone()
    backwards[:streams] = number[:streams].flip(0)
    turned[: 2 * streams] = number[: 2 * streams].roll(streams)
    for words, order in (
        ("the streams' gates in the reverse order", backwards),
        ("gates before and after the layer exchanged", turned),
    ):
        yield FaultVariant(words, with_weights(partial(_ordered, order)))
    yield FaultVariant("a projection without the BF16 part of its weight", with_weights(_rest))


def _ordered(order: Tensor, _name: str, weight: Weight) -> Weight:
    """Reorder the rows of a weight and its base; the three scales stay."""
    value = weight.values(torch.float32)
    return Weight(value=value[order]) if len(value) == len(order) else weight


def _rest(name: str, weight: Weight) -> Weight:
    value = weight.values(torch.float32)
    return Weight(value=value - value.bfloat16().float()) if name.endswith("_fn") else weight


def _sinkhorn_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    known = facts_at(context).config.hc_sinkhorn_iters
    for iterations in (1, 2, max(3, known // 4)):
        words = f"{iterations} of {known} Sinkhorn iterations"
        change = _with_iterations(iterations)
        yield FaultVariant(words, with_facts(context, change), {"iterations": iterations})


def _with_iterations(iterations: int) -> Any:
    return lambda facts: with_config(facts, hc_sinkhorn_iters=iterations)


def _residual_variants(_context: ComponentContext) -> Iterator[FaultVariant]:
    for words, change in (
        ("the residual left out", torch.zeros_like),
        ("the residual added twice", lambda residual: residual * 2),
        ("the residual of the token before", lambda residual: residual.roll(1, 0)),
    ):
        yield FaultVariant(words, with_inputs(_to_input("residual", change)))


def _residual_arrives(context: ComponentContext) -> Iterator[FaultVariant]:
    for variant in _residual_variants(context):
        yield FaultVariant(f"{variant.words}, on its way", variant.apply)


def _where_residual(context: ComponentContext) -> bool:
    return "residual" in {each.name for each in context.component.inputs}


def _first_differs(
    variants: Callable[[ComponentContext], Iterator[FaultVariant]], name: str
) -> Any:
    """Return the signature of an edge, restricted to calls in which the input itself differs."""

    def signature(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
        arrived, implied = record.inputs.get(name), record.implied.get(name)
        if arrived is not None and implied is not None and not torch.equal(arrived, implied):
            yield from variants(context)

    return signature


RESIDUAL_STREAMS_FAULTS = (
    ModelFault(
        id="M23.streams_made_alike",
        title="Residual streams are collapsed, spread again, or exchanged",
        effect="the four streams are one, or are in another order",
        remedy="Spread the embedding once and collapse after the last layer only.",
        applies_to=lambda context: context.role in _POST,
        variants=_made_variants,
    ),
    ModelFault(
        id="M23.streams_arrive_alike",
        title="Streams are collapsed, spread or exchanged on their way into a layer",
        effect="the layer begins with streams that are one, or in another order",
        remedy="Send all streams between stages; do not spread them at a stage's begin.",
        applies_to=lambda context: context.role in _PRE,
        variants=_arriving_variants,
        signature=_first_differs(_arriving_variants, "streams"),
        reach=Reach.EDGE,
    ),
    ModelFault(
        id="M23.mix",
        title="New streams are mixed from old ones the wrong way",
        effect="stream k takes mix[k, j] of stream j, or takes the residual plainly",
        remedy="new_k = post_k * v + sum_j mix[j, k] * old_j: the sum is over the first index.",
        applies_to=lambda context: context.role in _POST,
        variants=_mixed_variants,
    ),
    ModelFault(
        id="M23.gates",
        title="Streams are collapsed by gates of others, or by a part of their projection",
        effect="a layer's input takes streams in shares that belong elsewhere",
        remedy="Rows of the projection: pre, post, mix; add all parts of a split weight.",
        applies_to=lambda context: context.role in _PRE,
        variants=_gate_variants,
    ),
    ModelFault(
        id="M23.sinkhorn",
        title="The mix is normalised too few times",
        effect="rows and columns of the mix do not sum to 1",
        remedy="Iterate hc_sinkhorn_iters times, the first pass included.",
        applies_to=lambda context: context.role in _PRE,
        variants=_sinkhorn_variants,
    ),
    ModelFault(
        id="M23.residual",
        title="The residual is left out, added twice, or another token's",
        effect="what earlier layers found is lost, or counts double",
        remedy="Add the stored residual once, in front of every norm.",
        applies_to=_where_residual,
        variants=_residual_variants,
    ),
    ModelFault(
        id="M23.residual_arrives",
        title="Another residual arrives than was passed on",
        effect="what earlier layers found is lost, or counts double",
        remedy="Send the residual between stages with the hidden state.",
        applies_to=_where_residual,
        variants=_residual_arrives,
        signature=_first_differs(_residual_arrives, "residual"),
        reach=Reach.EDGE,
    ),
)
