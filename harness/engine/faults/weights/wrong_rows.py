"""M16: a weight has the right shape but the wrong rows.

A fused matrix [a; b] is split by rank where each rank expects its own [a; b], groups are split by
heads, a redundant expert slot holds another expert (sglang issue 24321, exo issue 1996, vllm issue
37322).

Shape letters: G groups, N rows of one, K columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.faults.activation_regions import wrong_slots
from degarble.harness.engine.faults.decoding import numbers_of
from degarble.harness.engine.faults.model_faults import ModelFault, Way, with_inputs
from degarble.harness.engine.faults.weight_faults import (
    Words,
    is_matrix,
    is_routed,
    of_values,
    weight_fault,
)
from degarble.harness.engine.faults.weight_regions import expert_of, matrices
from degarble.harness.formats.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import Scene, Sight
    from degarble.harness.engine.faults.weight_faults import Change, Kept

_EXPERTS = ("ffn.experts.w13", "ffn.experts.w2")
_REMEDY = "Say which rows of which parameter a slot holds, and check a digest of each after load."


def _fused(scene: Scene, name: str) -> list[str]:
    """Return the parts of the fused matrix that contains a weight."""
    number = expert_of(name)
    return [each for each in matrices(scene) if expert_of(each) == number]


def _cut_by_rank(ranks: int) -> Change:
    """Give rank r the r-th run of rows of [a; b], read as its share of a above b."""

    def change(scene: Scene, name: str, weight: Weight) -> Weight | None:
        parts = _fused(scene, name)
        stacked = [numbers_of(scene.weights[each]) for each in parts]
        rows = torch.cat(stacked)
        if len(parts) < 2 or len(rows) % (ranks * len(parts)) or rows.ndim != 2:
            return None
        shares = [chunk.chunk(len(parts))[parts.index(name)] for chunk in rows.chunk(ranks)]
        value = torch.cat(shares)
        if value.shape != weight.shape:
            return None
        return Weight(value=value, input_scale=weight.input_scale)

    return change


def _by_heads(value: Tensor) -> Tensor:
    """Take rows [G, N] as [N, G], so that groups mix."""
    groups = 2 if len(value) % 4 else 4
    if len(value) % groups:
        return value
    rows: Tensor = value.unflatten(0, (groups, -1)).transpose(0, 1).flatten(0, 1)
    return rows.contiguous()


def _ranks_turned(value: Tensor) -> Tensor:
    """Exchange the first and the second half of the rows."""
    return value.roll(len(value) // 2, 0)


def _next_expert(step: int) -> Change:
    def change(scene: Scene, name: str, weight: Weight) -> Weight | None:
        number = expert_of(name)
        total = 1 + max(expert_of(each) for each in matrices(scene))
        if number < 0 or total < 2:
            return None
        stem, _, rest = name.partition(".experts.")
        other = (number + step) % total if step else 0
        holder = scene.weights[f"{stem}.experts.{other}.{rest.partition('.')[2]}"]
        if holder is weight:
            return None
        return Weight(value=numbers_of(holder), input_scale=weight.input_scale)

    return change


def _met(words: str, other: Callable[[Tensor], Tensor]) -> Way:
    """Route slots through another expert's matrices; `other` returns which, -1 for none."""

    def change(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        experts = inputs["experts"]
        if not bool((experts >= 0).any()):
            return inputs
        taken, scale = other(experts), inputs.get("tensor_scale")
        given = {**inputs, "experts": taken}
        if scale is not None and scale.shape == experts.shape:
            of_expert = scale.new_ones(int(experts.max()) + 1)
            of_expert[experts[experts >= 0]] = scale[experts >= 0]
            known = taken.clamp(0, len(of_expert) - 1)
            given["tensor_scale"] = of_expert[known]  # it meets the sums as the expert's own
        return given

    return Way(words, with_inputs(change), whole=True)


def _places(experts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the experts that a call visits, in order, and each slot's index among them."""
    visited = experts[experts >= 0].unique()
    return visited, torch.searchsorted(visited, experts.clamp(min=0))


def _beside(step: int) -> Callable[[Tensor], Tensor]:
    def other(experts: Tensor) -> Tensor:
        visited, place = _places(experts)
        found = visited[(place + step).clamp(0, len(visited) - 1)]
        return torch.where(experts < 0, experts, found)

    return other


def _as_places(experts: Tensor) -> Tensor:
    """Take expert numbers for indices among the visited experts; -1 if out of range."""
    visited, _ = _places(experts)
    there = (experts >= 0) & (experts < len(visited))
    return torch.where(there, visited[experts.clamp(0, len(visited) - 1)], -1)


_OTHERS = (_beside(-1), _beside(1), _as_places)


def _met_ways(_scene: Scene) -> Iterator[Way]:
    yield _met("the matrices of the visited expert before", _OTHERS[0])
    yield _met("the matrices of the visited expert behind", _OTHERS[1])
    yield _met("numbers of experts taken for places among the visited ones", _OTHERS[2])


def _meets(scene: Scene, sight: Sight) -> Iterator[Way]:
    """Propose ways under which, in some call, moved slots are mostly wrong and others are not."""
    wrong, experts = wrong_slots(sight), sight.inputs["experts"]
    if wrong is None or not bool(wrong.any()):
        return
    counts = list(sight.rows or (len(experts),))
    telling = (sight.outputs["out"] != 0).any(-1) | (sight.expected["out"] != 0).any(-1)
    sides = (each.split(counts) for each in (wrong, telling, experts))
    calls = list(zip(*sides, strict=True))
    for way, other in zip(_met_ways(scene), _OTHERS, strict=True):
        if any(_is_met(other, *call) for call in calls):
            yield way


def _is_met(
    other: Callable[[Tensor], Tensor], wrong: Tensor, telling: Tensor, experts: Tensor
) -> bool:
    """Compare moved and unmoved slots; slots that are zero on both sides carry no evidence."""
    if not bool((experts >= 0).any()):
        return False  # a call of a rank that holds none of its experts
    same = other(experts) == experts
    return _mostly(wrong[~same & telling]) and not _mostly(wrong[same & telling])


def _mostly(marked: Tensor) -> bool:
    return bool(marked.numel()) and float(marked.double().mean()) > 0.5


def _is_fused(kept: Kept) -> bool:
    return kept.linear and kept.role.rpartition(".")[2] in {"w13", "proj"}


def _fault(variant: str, title: str, doing: str, change: Change, **how: object) -> ModelFault:
    words = Words(
        f"M16.{variant}", title, "right size, wrong place: text is garbled", _REMEDY, doing
    )
    return weight_fault(words, change, **how)  # type: ignore[arg-type]


MODEL_FAULTS = (
    _fault(
        "cut_by_two_ranks", "A fused matrix is cut by two ranks, not each of its parts",
        "rows cut by two ranks on", _cut_by_rank(2), needs=_is_fused, whole=True,
    ),
    _fault(
        "cut_by_four_ranks", "A fused matrix is cut by four ranks, not each of its parts",
        "rows cut by four ranks on", _cut_by_rank(4), needs=_is_fused, whole=True,
    ),
    _fault(
        "groups_mixed", "Rows are cut by heads in front of a reshape by groups",
        "rows that belong to other groups on", of_values(_by_heads), needs=is_matrix,
    ),
    _fault(
        "ranks_turned", "Two ranks hold each other's rows",
        "the halves of the rows exchanged on", of_values(_ranks_turned), needs=is_matrix,
    ),
    _fault(
        "next_expert", "Expert slots hold the next expert",
        "the next expert's rows on", _next_expert(1), needs=is_routed,
    ),
    _fault(
        "first_expert", "Expert slots hold the first expert",
        "the first expert's rows on", _next_expert(0), needs=is_routed,
    ),
    ModelFault(
        "M16.visited",
        "Rows meet the matrices of another expert that the call visits",
        "slots get what their expert would not say: text is garbled, nothing is NaN",
        "Keep one map from an expert's number to its place, and look every group up in it.",
        lambda scene: scene.role in _EXPERTS,
        _met_ways,
        _meets,
    ),
)  # fmt: skip
