"""M23: residual bookkeeping goes wrong: mHC's streams, and V3.2's plain sum.

Streams are collapsed and spread again, exchanged, or mixed wrongly; a residual is dropped or added
twice. A pipeline stage that unpacks its input spreads streams that were never one (vllm-ascend
issue 9473). The four streams are then equal, and stay nearly so.

Shape letters: T tokens, S streams, D hidden.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.model_faults import (
    ModelFault,
    Reach,
    Way,
    from_ways,
    with_inputs,
    with_outputs,
    with_weights,
)
from degarble.harness.engine.faults.rebinding import facts_at, is_v4, with_config, with_facts
from degarble.harness.formats.weight import Weight
from degarble.references import mixing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import Scene, Sight

    Change = Callable[[Tensor], Tensor]

_POST = ("attn.hc_post", "ffn.hc_post")
_PRE = ("attn.hc_pre", "ffn.hc_pre")


def _spread(one: Tensor, streams: Tensor) -> Tensor:
    return mixing.expand(one.to(streams.dtype), streams.shape[1])


def _changes(scene: Scene) -> Iterator[tuple[str, Change]]:
    """Yield wrong treatments of streams [T, S, D]."""
    head = scene.sibling("hc_head")
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


def _made_ways(scene: Scene) -> Iterator[Way]:
    for words, change in _changes(scene):
        yield Way(words, with_outputs(_to_output(change)))


def _to_output(change: Change) -> Any:
    def changed(_inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Any:
        return {**outputs, "out": change(outputs["out"])}

    return changed


def _arriving_ways(scene: Scene) -> Iterator[Way]:
    for words, change in _changes(scene):
        yield Way(f"{words}, on their way", with_inputs(_to_input("streams", change)))


def _to_input(name: str, change: Change) -> Any:
    def changed(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {**inputs, name: change(inputs[name])} if name in inputs else inputs

    return changed


def _mixed_ways(_scene: Scene) -> Iterator[Way]:
    yield Way("the mix taken the other way round", with_inputs(_to_input("mix", _transposed)))
    yield Way("no mix of the streams", with_inputs(_to_input("mix", _unmixed)))
    yield Way("post without its factor 2", with_inputs(_to_input("post", lambda post: post / 2)))
    yield Way("a plain residual sum", with_inputs(_plain))
    words = "the first two old streams in each other's place"
    yield Way(words, with_inputs(_to_input("mix", _first_exchanged)))


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


def _gate_ways(scene: Scene) -> Iterator[Way]:
    """Yield reordered gates, and the projection by what BF16 rounding removes from its weight."""
    streams = facts_at(scene).config.hc_mult
    number = torch.arange((2 + streams) * streams)
    backwards, turned = number.clone(), number.clone()
    backwards[:streams] = number[:streams].flip(0)
    turned[: 2 * streams] = number[: 2 * streams].roll(streams)
    for words, order in (
        ("the streams' gates in the reverse order", backwards),
        ("gates in front of the layer and behind it in each other's place", turned),
    ):
        yield Way(words, with_weights(partial(_ordered, order)))
    yield Way("a projection without the BF16 part of its weight", with_weights(_rest))


def _ordered(order: Tensor, _name: str, weight: Weight) -> Weight:
    """Reorder the rows of a weight and its base; the three scales stay."""
    value = weight.values(torch.float32)
    return Weight(value=value[order]) if len(value) == len(order) else weight


def _rest(name: str, weight: Weight) -> Weight:
    value = weight.values(torch.float32)
    return Weight(value=value - value.bfloat16().float()) if name.endswith("_fn") else weight


def _sinkhorn_ways(scene: Scene) -> Iterator[Way]:
    known = facts_at(scene).config.hc_sinkhorn_iters
    for iterations in (1, 2, max(3, known // 4)):
        words = f"{iterations} of {known} Sinkhorn iterations"
        change = _with_iterations(iterations)
        yield Way(words, with_facts(scene, change), {"iterations": iterations})


def _with_iterations(iterations: int) -> Any:
    return lambda facts: with_config(facts, hc_sinkhorn_iters=iterations)


def _residual_ways(_scene: Scene) -> Iterator[Way]:
    for words, change in (
        ("the residual left out", torch.zeros_like),
        ("the residual added twice", lambda residual: residual * 2),
        ("the residual of the token before", lambda residual: residual.roll(1, 0)),
    ):
        yield Way(words, with_inputs(_to_input("residual", change)))


def _residual_arrives(scene: Scene) -> Iterator[Way]:
    for way in _residual_ways(scene):
        yield Way(f"{way.words}, on its way", way.apply)


def _where_residual(scene: Scene) -> bool:
    inputs = {each.name for each in scene.component.inputs}
    return not is_v4(scene) and "residual" in inputs


def _first_differs(ways: Callable[[Scene], Iterator[Way]], name: str) -> Any:
    """Return the signature of an edge, restricted to calls in which the input itself differs."""

    def signature(scene: Scene, sight: Sight) -> Iterator[Way]:
        arrived, implied = sight.inputs.get(name), sight.implied.get(name)
        if arrived is not None and implied is not None and not torch.equal(arrived, implied):
            yield from ways(scene)

    return signature


MODEL_FAULTS = (
    ModelFault(
        id="M23.streams_made_alike",
        title="Residual streams are collapsed, spread again, or exchanged",
        effect="the four streams are one, or stand in another order",
        remedy="Spread the embedding once and collapse behind the last layer only.",
        sits=lambda scene: scene.role in _POST,
        ways=_made_ways,
        signature=from_ways(_made_ways),
    ),
    ModelFault(
        id="M23.streams_arrive_alike",
        title="Streams are collapsed, spread or exchanged on their way into a layer",
        effect="the layer begins with streams that are one, or in another order",
        remedy="Send all streams between stages; do not spread them at a stage's begin.",
        sits=lambda scene: scene.role in _PRE,
        ways=_arriving_ways,
        signature=_first_differs(_arriving_ways, "streams"),
        reach=Reach.EDGE,
    ),
    ModelFault(
        id="M23.mix",
        title="New streams are mixed from old ones the wrong way",
        effect="stream k takes mix[k, j] of stream j, or takes the residual plainly",
        remedy="new_k = post_k * v + sum_j mix[j, k] * old_j: the sum is over the first index.",
        sits=lambda scene: scene.role in _POST,
        ways=_mixed_ways,
        signature=from_ways(_mixed_ways),
    ),
    ModelFault(
        id="M23.gates",
        title="Streams are collapsed by gates of others, or by a part of their projection",
        effect="a layer's input takes streams in shares that belong elsewhere",
        remedy="Rows of the projection: pre, post, mix; add all parts of a split weight.",
        sits=lambda scene: scene.role in _PRE,
        ways=_gate_ways,
        signature=from_ways(_gate_ways),
    ),
    ModelFault(
        id="M23.sinkhorn",
        title="The mix is normalised too few times",
        effect="rows and columns of the mix do not sum to 1",
        remedy="Iterate hc_sinkhorn_iters times, the first pass included.",
        sits=lambda scene: scene.role in _PRE,
        ways=_sinkhorn_ways,
        signature=from_ways(_sinkhorn_ways),
    ),
    ModelFault(
        id="M23.residual",
        title="The residual is left out, added twice, or another token's",
        effect="what earlier layers found is lost, or counts double",
        remedy="Add the stored residual once, in front of every norm.",
        sits=_where_residual,
        ways=_residual_ways,
        signature=from_ways(_residual_ways),
    ),
    ModelFault(
        id="M23.residual_arrives",
        title="Another residual arrives than was passed on",
        effect="what earlier layers found is lost, or counts double",
        remedy="Send the residual between stages beside the hidden state.",
        sits=_where_residual,
        ways=_residual_arrives,
        signature=_first_differs(_residual_arrives, "residual"),
        reach=Reach.EDGE,
    ),
)
