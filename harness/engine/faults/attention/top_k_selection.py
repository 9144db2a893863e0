"""M31: the indexer's top-k loses members, breaks ties otherwise, or compares rounded scores.

Members of the bin that contains the threshold are lost when it overflows, the threshold is that of
another token, a precise projection was fused into a coarse one (sglang issues 35257 and 13459,
TensorRT-LLM issue 18339). Contexts short enough that everything is chosen are exact.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.model_faults import (
    ModelFault,
    Way,
    from_ways,
    with_inputs,
    with_outputs,
)
from degarble.harness.engine.faults.rebinding import is_v4

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import Scene

    Choose = Callable[[Tensor, Tensor], Tensor]

_CUT = (16, 17, 18, 19, 20, 21, 22)  # of 32, that a selection by digits may never look at
_COARSE = ("attn.indexer.weights_proj", "attn.indexer.scores")


def _in_place(words: str, choose: Choose) -> Way:
    """Return the way that replaces the right choice; `choose` gets scores and choice."""

    def change(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Any:
        return {**outputs, "out": choose(inputs["scores"], outputs["out"])}

    return Way(words, with_outputs(change))


def _scored(words: str, change: Callable[[Tensor], Tensor]) -> Way:
    """Return the way that selects correctly from changed scores."""

    def changed(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        scores = inputs["scores"]
        made = change(scores.float()).to(scores.dtype)
        return {**inputs, "scores": torch.where(scores.isneginf(), scores, made)}

    return Way(words, with_inputs(changed))


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


def _ways(scene: Scene) -> Iterator[Way]:
    del scene
    yield _in_place("members of the threshold's bin left out", _bin_lost)
    yield _in_place("the threshold of the token before", _stale_threshold)
    yield _in_place("the last of the chosen left out", _last_out)
    yield _in_place("half of the chosen left out", _half_out)
    yield _in_place("the best of the chosen left out", _best_out)
    yield _in_place("the smallest scores chosen", _smallest)
    yield _in_place("the newest entries chosen", _newest)


def _rounded_ways(scene: Scene) -> Iterator[Way]:
    del scene
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


def _coarse_ways(scene: Scene) -> Iterator[Way]:
    if not is_v4(scene):  # the official V4 code stores BF16 here
        yield Way("rounded to BF16", with_outputs(_as(torch.bfloat16)))
    yield Way("rounded to E4M3", with_outputs(_as(torch.float8_e4m3fn)))
    yield Way("rounded to E5M2", with_outputs(_as(torch.float8_e5m2)))


def _as(dtype: torch.dtype) -> Any:
    def change(_inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Any:
        out = outputs["out"]
        made = out.to(dtype).to(out.dtype)
        return {**outputs, "out": torch.where(out.isfinite(), made, out)}

    return change


def _weighing_ways(_scene: Scene) -> Iterator[Way]:
    yield Way("products without their ReLU", with_inputs(_not_rectified))
    yield Way("the weights of two neighbouring heads in each other's place", with_inputs(_paired))
    yield Way("heads without their weights", with_inputs(_alike))


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

MODEL_FAULTS = (
    ModelFault(
        id="M31.members",
        title="The selection loses members, or takes others",
        effect=_EFFECT,
        remedy="Audit the selection on recorded scores: the set must be exact.",
        sits=lambda scene: scene.role == "attn.indexer.topk",
        ways=_ways,
        signature=from_ways(_ways),
    ),
    ModelFault(
        id="M31.compared_coarsely",
        title="The selection compares scores that it has rounded",
        effect=_EFFECT,
        remedy="Compare fp32 scores; resolve ties by index.",
        sits=lambda scene: scene.role == "attn.indexer.topk",
        ways=_rounded_ways,
        signature=from_ways(_rounded_ways),
    ),
    ModelFault(
        id="M31.weighing",
        title="The indexer's products are weighed by another rule",
        effect=_EFFECT,
        remedy="A score is the sum of ReLU(q . k) over heads, each by its own weight.",
        sits=lambda scene: scene.role == "attn.indexer.scores",
        ways=_weighing_ways,
        signature=from_ways(_weighing_ways),
    ),
    ModelFault(
        id="M31.coarse_scores",
        title="The indexer's head weights or scores are stored too coarsely",
        effect=_EFFECT,
        remedy="Keep head weights and scores in fp32, or in BF16 where the official code does.",
        sits=lambda scene: scene.role in _COARSE,
        ways=_coarse_ways,
        signature=from_ways(_coarse_ways),
    ),
)
