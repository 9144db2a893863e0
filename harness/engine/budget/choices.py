"""Judge discrete choices: which experts a token is routed to, which rows it attends to.

Rows are chosen by scores that arrive as inputs. Nothing is computed, so another choice is legal
only among equal scores. Experts are chosen by scores computed here: another one is legal where both
scores lie within each other's errors, and, with expert groups, where some legal set of groups leads
to it. The order of a choice is free, since attention takes a set and each expert's weight stands in
its own slot. Weights are judged for the candidate's own choice.

An illegal choice is measured by the gap of the scores, in units of what their errors allow.

Shape letters: T tokens, E experts, K chosen, G groups, W rows.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.engine.budget.bounded_values import FUNCTION, Near
from degarble.harness.engine.budget.budget import HEADROOM, Budget, Finding
from degarble.harness.engine.budget.rules import UNDERFLOW, U
from degarble.harness.formats.element_formats import FP32
from degarble.harness.report.number_text import number
from degarble.references import routing
from degarble.references.facts import V4Facts, V32Facts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from degarble.harness.engine.budget.call import Call

_MOST_SETS = 64  # legal sets of groups that are tried for one token
_NONE = Finding("choice", (), 0.0, 0.0)
_TABLE = "experts are those of the table: nothing may differ"


class Chosen(NamedTuple):
    """The worst choice, the number of legal flips by token, and the reasons in words."""

    worst: Finding
    flips: dict[int, int]
    words: tuple[str, ...]


def rows_chosen(call: Call, candidate: Tensor) -> Chosen:
    """Judge lists of rows [T, K] by the scores that arrived."""
    scores, twin = call.inputs["scores"].double(), call.outputs["out"]
    words = ("rows are chosen by scores that arrive: only equal ones may be exchanged",)
    worst, flips = _NONE, dict[int, int]()
    for token in _moved(candidate, twin):
        mine, own = scores[token], candidate[token]
        if mine.isnan().any():
            continue  # no order is defined
        real = own[own >= 0]
        # -1 marks unused places; any other negative index is invalid.
        if not _proper(real, len(mine)) or (own < -1).any():
            return Chosen(Finding("choice", (token,), 1.0, 0.0), flips, words)
        expected = mine[twin[token][twin[token] >= 0]].sort(descending=True).values
        found = mine[real].sort(descending=True).values
        if len(found) != len(expected) or not torch.equal(found, expected):
            gap = _gap(found, expected)
            worst = max(worst, Finding("choice", (token,), gap, 0.0), key=_by_ratio)
        else:
            flips[token] = int((~torch.isin(own, twin[token])).sum())
    return Chosen(worst, flips, words)


def _gap(found: Tensor, expected: Tensor) -> float:
    """Return how far chosen scores lie below the expected ones; 1 where some are missing."""
    if len(found) != len(expected):
        return 1.0
    gap = (expected - found).abs().max().item()
    return gap if 0 < gap < float("inf") else 1.0


def _by_ratio(finding: Finding) -> tuple[float, float]:
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


def scores_of(call: Call) -> Near:
    """Return the router's scores [T, E] and their errors."""
    logit = call.inputs["logits"].double()
    if isinstance(call.known_facts, V32Facts):
        score = torch.sigmoid(logit)
        slope = score * (1 - score)
        off = slope * (2 * logit.abs() + FUNCTION) * U + (FUNCTION + 2) * U * score
        return Near(score, off + UNDERFLOW)
    plain = torch.nn.functional.softplus(logit, threshold=20.0)
    inner = torch.sigmoid(logit) * (2 * logit.abs() + FUNCTION)
    off = U * (inner + FUNCTION * plain + (logit < 20.0))  # 1 + e^x may be formed
    score = plain.sqrt()
    # The slope of the root, 1 / (2 score), is infinite at 0; there |sqrt(a) - sqrt(b)| <= sqrt|a -
    # b|.
    error = torch.where(plain > UNDERFLOW, off / (2 * score) + FUNCTION * U * score, off.sqrt())
    return Near(score, error)


def experts_chosen(call: Call, candidate: Tensor) -> Chosen:
    """Judge the experts [T, K] of every token."""
    twin, moved = call.outputs["experts"], _moved(candidate, call.outputs["experts"])
    # Hash layers: the expert follows from the token id alone, so no flip is legal.
    if any(name.endswith("tid2eid") for name in call.weights):
        at = (moved[0],) if moved else ()
        return Chosen(Finding("choice", at, float(len(moved)), 0.0), {}, (_TABLE,))
    (bias,) = (weight.values(torch.float64) for weight in call.weights.values())
    score = scores_of(call)
    value = score.value + bias
    # Adding the bias is one more rounding.
    biased = Near(value, score.error + U * value.abs())
    average = float(biased.error.mean()) if biased.error.numel() else 0.0
    words = (
        "scores: functions within 2 units, arguments rounded once, one sum with the bias",
        f"errors of scores: {number(average)} on average",
        "another expert is legal where both scores lie within their errors; order is free",
    )
    worst, flips = _NONE, dict[int, int]()
    for token in moved:
        own = candidate[token]
        if value[token].isnan().any():
            continue
        if not _proper(own, value.shape[1]):
            return Chosen(Finding("choice", (token,), 1.0, 0.0), flips, words)
        mine = Near(value[token], biased.error[token])
        gap, allowed = _gap_of_experts(own, mine, call)
        found = Finding("choice", (token,), gap, allowed / HEADROOM)
        if found.ratio <= 1:
            flips[token] = int((~torch.isin(own, twin[token])).sum())
        worst = max(worst, found, key=_by_ratio)
    return Chosen(worst, flips, words)


def _gap_of_experts(own: Tensor, score: Near, call: Call) -> tuple[float, float]:
    """Return the gap of the choice, and what errors allow, for the best legal set of groups."""
    facts = call.known_facts
    if isinstance(facts, V4Facts):
        return _pair_gap(own, score, torch.ones_like(score.value, dtype=torch.bool))
    assert isinstance(facts, V32Facts), "there are two families"
    found = [
        max(groups, _pair_gap(own, score, kept), key=_in_budgets)
        for kept, groups in _kept_sets(own, score, facts)
    ]
    return min(found, key=_in_budgets)


def _in_budgets(pair: tuple[float, float]) -> float:
    return Finding("", (), *pair).ratio


def _pair_gap(own: Tensor, score: Near, open_E: Tensor) -> tuple[float, float]:
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
    own: Tensor, score: Near, facts: V32Facts
) -> Iterator[tuple[Tensor, tuple[float, float]]]:
    """Yield sets of groups that hold the choice: their experts, and the gap of keeping them."""
    c = facts.config
    per = len(score.value) // c.n_group
    # DeepSeek V3 ranks groups by the sum of their two best scores.
    two = score.value.reshape(c.n_group, per).topk(min(2, per), dim=-1)
    error = score.error.reshape(c.n_group, per).gather(1, two.indices).sum(-1)
    worth = Near(two.values.sum(-1), error + U * two.values.sum(-1).abs())
    visited = set((own // per).tolist())
    others = [g for g in torch.argsort(worth.value, descending=True).tolist() if g not in visited]
    missing = c.topk_group - len(visited)
    every = torch.ones(c.n_group, dtype=torch.bool)
    if missing < 0:
        yield torch.ones_like(score.value, dtype=torch.bool), (1.0, 0.0)
        return
    for number_, more in enumerate(combinations(others, missing)):
        if number_ >= _MOST_SETS:
            return
        kept = torch.tensor(sorted(visited | set(more)))
        open_E = torch.isin(torch.arange(len(score.value)) // per, kept)
        yield open_E, _pair_gap(kept, worth, every)


def weights_budget(call: Call, experts: Tensor) -> tuple[Tensor, Budget]:
    """Return the weights [T, K] of a choice, and how far correct ones may be from them."""
    facts, score = call.known_facts, scores_of(call)
    scale = facts.config.routed_scaling_factor
    epsilon = facts.numerics.switches.routing_epsilon
    value = routing.weights(score.value, experts, scale, epsilon)
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
