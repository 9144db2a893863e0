"""M21: an all-reduce is done once too often, not at all, or over some of the ranks.

Replicated values are added as if they were partial sums, a shared expert is reduced by itself and
again with the total, or a rank's part is missing (sglang issues 31700, 31475; vllm issue 49378).
The gain is then a number of ranks or its reciprocal. Which part of K is missing follows from
replaying the product without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.gain_fit import fitted, gain_way, is_named, of_sight
from degarble.harness.engine.faults.model_faults import (
    ModelFault,
    Reach,
    Way,
    from_ways,
    with_inputs,
    with_outputs,
)
from degarble.harness.engine.faults.rebinding import with_x

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import Scene, Sight

RANKS = (2, 4, 8)
_SUMMED = ("ffn.experts.combine", "ffn.shared.w2", "ffn.w2", "attn.wo_b", "attn.wo")
_CUT = ("ffn.shared.w2", "ffn.w2", "attn.wo_b", "attn.wo")
_SCORED = "attn.indexer.scores"


def sits_summed(scene: Scene) -> bool:
    """Return whether the sharding plan sums here over ranks."""
    return scene.role in _SUMMED or scene.role == _SCORED


def sits_cut(scene: Scene) -> bool:
    """Return whether K is split between ranks."""
    return scene.role in _CUT


def _counts(words: str, factor: Callable[[int], float]) -> Callable[..., Iterator[Way]]:
    def ways(_scene: Scene) -> Iterator[Way]:
        for ranks in RANKS:
            yield gain_way(words.format(ranks), factor(ranks), places={"ranks": ranks})

    return ways


_AGAIN = _counts("the sum taken {} times", float)
_DIVIDED = _counts("the sum divided by {} ranks", lambda ranks: 1 / ranks)


def _of_gain(ways: Callable[..., Iterator[Way]]) -> Callable[[Scene, Sight], Iterator[Way]]:
    """Propose the ways whose number of ranks, or its reciprocal, is the fitted gain."""

    def signature(scene: Scene, sight: Sight) -> Iterator[Way]:
        gain = of_sight(sight)
        if gain is None and scene.role == _SCORED:
            gain = _of_scores(sight)
        for way in ways(scene) if gain is not None else ():
            ranks = float(way.where["ranks"])
            if is_named(gain or 0.0, ranks) or is_named(gain or 0.0, 1 / ranks):
                yield way

    return signature


def _of_scores(sight: Sight) -> float | None:
    """Fit the gain of visible scores; the others are -inf."""
    c, e = sight.outputs["out"], sight.expected["out"]
    if c.shape != e.shape:
        return None
    both = c.isfinite() & e.isfinite()
    return fitted(c[both], e[both])


def _part_ways(scene: Scene) -> Iterator[Way]:
    """Yield products without one rank's part of K."""
    for ranks in RANKS:
        for rank in (0, ranks - 1):
            kept = f"without the part of rank {rank} of {ranks}"
            yield Way(kept, _without(scene, rank, ranks), {"ranks": ranks, "rank": rank})


def _without(scene: Scene, rank: int, ranks: int) -> Any:
    def change(x: Tensor) -> Tensor:
        made, width = x.clone(), x.shape[-1] // ranks
        made[..., rank * width : (rank + 1) * width] = 0
        return made

    return with_x(scene, change)


def _on_the_way(scene: Scene) -> Iterator[Way]:
    del scene
    for name in ("shared", "routed"):
        for ranks in RANKS:
            words = f"the {name} term multiplied by {ranks} on its way"
            where = {"ranks": ranks, "term": name}
            yield Way(words, with_inputs(_multiplied(name, float(ranks))), where)
        words = f"the {name} term divided by 2 on its way"
        yield Way(words, with_inputs(_multiplied(name, 0.5)), {"ranks": 2, "term": name})
    words = "the shared term of another rank's tokens"
    yield Way(words, with_inputs(_rolled), {"term": "shared"})


def _multiplied(name: str, factor: float) -> Any:
    def change(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {**inputs, name: (inputs[name].double() * factor).to(inputs[name].dtype)}

    return change


def _rolled(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {**inputs, "shared": inputs["shared"].roll(1, 0)}


def _twice_ways(scene: Scene) -> Iterator[Way]:
    """Yield ways in which two ranks run one expert and both contributions are summed."""
    for expert in range(scene.bound.config.n_routed_experts):
        yield Way(
            f"expert {expert} counted twice", with_outputs(_doubled(expert)), {"expert": expert}
        )


def _doubled(expert: int) -> Any:
    def change(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        there = (inputs["experts"] == expert)[..., None]
        return {**outputs, "out": torch.where(there, outputs["out"] * 2, outputs["out"])}

    return change


def _twice(scene: Scene, sight: Sight) -> Iterator[Way]:
    """Propose experts whose own rows have the gain 2."""
    c, e, experts = sight.outputs["out"], sight.expected["out"], sight.inputs["experts"]
    for way in _twice_ways(scene) if c.shape == e.shape else ():
        there = experts == int(way.where["expert"])
        gain = fitted(c[there], e[there]) if bool(there.any()) else None
        if gain is not None and is_named(gain, 2.0):
            yield way


MODEL_FAULTS = (
    ModelFault(
        id="M21.summed_again",
        title="A sum over ranks is taken more than once",
        effect="the component's term is larger by the number of ranks",
        remedy="Reduce once: either in the module or in the runner that adds it up.",
        sits=sits_summed,
        ways=_AGAIN,
        signature=_of_gain(_AGAIN),
    ),
    ModelFault(
        id="M21.divided",
        title="A term is divided by the number of ranks and not summed",
        effect="the component's term is smaller by the number of ranks",
        remedy="Sum what was scaled for a sum, or do not scale it.",
        sits=sits_summed,
        ways=_DIVIDED,
        signature=_of_gain(_DIVIDED),
    ),
    ModelFault(
        id="M21.part_missing",
        title="A sum over ranks leaves some rank out",
        effect="the part of K that this rank holds is missing",
        remedy="Reduce over all ranks of the group that cuts this weight.",
        sits=sits_cut,
        ways=_part_ways,
        signature=from_ways(_part_ways),
    ),
    ModelFault(
        id="M21.expert_twice",
        title="One expert counts twice in the sum",
        effect="tokens that visit it get its contribution doubled",
        remedy="Map a logical expert to one physical one on all ranks, or mend a doubled scale.",
        sits=lambda scene: scene.role == "ffn.experts.w2",
        ways=_twice_ways,
        signature=_twice,
    ),
    ModelFault(
        id="M21.term_on_its_way",
        title="The routed or the shared term is scaled between its component and the sum",
        effect="one of the two terms of the sum is larger or smaller than it was made",
        remedy="Fit out = a * routed + b * shared; a or b is the number of ranks.",
        sits=lambda scene: scene.role == "ffn.moe_sum",
        ways=_on_the_way,
        signature=from_ways(_on_the_way),
        reach=Reach.EDGE,
    ),
)
