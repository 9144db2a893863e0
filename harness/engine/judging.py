"""All outputs of a component, judged alike: numbers, codes with their scales, and choices.

Owns the one entry for whoever replays a call:
`judge_outputs(Call.of(twin, component, inputs), outputs)`.
Numbers are judged by their budget, codes and scales by budget_codes, chosen rows and experts by
budget_choices. What has no derivation is UNDECIDED by name; it never passes for healthy. An output
that is missing, or has another shape, differs beyond every budget.

Refuses nothing that a candidate may put out. Kept honest by suites/engine/test_judging.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.budget import Finding, judge
from degarble.harness.engine.budget_choices import experts_chosen, rows_chosen, weights_budget
from degarble.harness.engine.budget_codes import format_of, is_coded, judge_codes, values_of
from degarble.harness.engine.budget_roles import budgets_of
from degarble.harness.engine.compare import compare
from degarble.harness.errors import Undecided
from degarble.harness.record.verdict import Verdict
from degarble.references.linears import CODES

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from torch import Tensor

    from degarble.harness.engine.budget import Budget
    from degarble.harness.engine.budget_call import Call
    from degarble.harness.engine.budget_choices import Chosen
    from degarble.harness.engine.comparison import Comparison, Places


@dataclass(frozen=True)
class Flips:
    """Legal differences of a choice or of codes, reported apart: how many of how many, and where.

    `rows` are the tokens (or rows) that hold one, at most a few of them.
    """

    count: int = 0
    total: int = 0
    rows: tuple[int, ...] = ()
    words: str = ""


@dataclass(frozen=True, eq=False)
class Judged:
    """One output: the findings (the worst first), what was legal all the same, and the reasons."""

    output: str
    verdict: Verdict
    findings: tuple[Finding, ...] = ()
    flips: Flips = Flips()
    comparison: Comparison | None = None
    derivation: tuple[str, ...] = ()
    undecided: str = ""  # why nothing is claimed
    allowed_length: float = math.nan  # what the whole difference's length may be

    @property
    def ratio(self) -> float:
        """The worst difference in units of budget; NaN where nothing is claimed."""
        if self.verdict is Verdict.UNDECIDED:
            return math.nan
        return self.findings[0].ratio if self.findings else 0.0

    @property
    def worst(self) -> Finding | None:
        """The finding that decides."""
        return self.findings[0] if self.findings else None


def judge_outputs(
    call: Call, outputs: Mapping[str, Tensor], places: Mapping[str, Places] | None = None
) -> dict[str, Judged]:
    """Judge what a candidate put out against the twin's outputs on the same inputs."""
    made = {
        name: _misshapen(name, outputs.get(name), twin)
        for name, twin in call.outputs.items()
        if name not in outputs or outputs[name].shape != twin.shape
    }
    named = places or {}
    try:
        if is_coded(call):
            found = {} if made else _coded(call, outputs, named)
        elif call.role in _CHOICES:
            found = {} if made else _CHOICES[call.role](call, outputs, named)
        else:
            found = _numbers(call, outputs, named, made)
    except Undecided as reason:
        found = {
            name: Judged(name, Verdict.UNDECIDED, undecided=str(reason)) for name in call.outputs
        }
    return {name: made.get(name) or found.get(name) or _unjudged(name) for name in call.outputs}


def _misshapen(name: str, candidate: Tensor | None, twin: Tensor) -> Judged:
    found = "missing" if candidate is None else f"{tuple(candidate.shape)}"
    words = (f"expected extents {tuple(twin.shape)}, found {found}",)
    return Judged(name, Verdict.DIFFERS, (Finding("shape", (), 1.0, 0.0),), derivation=words)


def _unjudged(name: str) -> Judged:
    return Judged(
        name, Verdict.UNDECIDED, undecided="it belongs to an output of another shape, see there"
    )


def _numbers(
    call: Call,
    outputs: Mapping[str, Tensor],
    places: Mapping[str, Places],
    passed_over: Container[str],
) -> dict[str, Judged]:
    made = {}
    for name, budget in budgets_of(call).items():
        if name not in passed_over:
            pair = outputs[name], call.outputs[name]
            made[name] = _judged(name, pair, budget, places.get(name))
    return made


def _judged(
    name: str, pair: tuple[Tensor, Tensor], budget: Budget, places: Places | None
) -> Judged:
    candidate, twin = pair
    if twin.dtype is torch.float64:
        twin = twin.float()
    known = twin.isfinite()
    if not bool(known.all()):  # of the same kind, or a finding: no slack belongs to it
        slack = torch.where(known, budget.slack.expand(twin.shape), 0.0)
        budget = replace(budget, slack=slack)
    if not bool(budget.slack.isfinite().all()):
        return Judged(name, Verdict.UNDECIDED, undecided="its operands are not finite: no budget")
    found = judge(candidate, twin, budget, places)
    return Judged(
        name,
        found.verdict,
        found.findings,
        comparison=found.comparison,
        derivation=budget.derivation,
        allowed_length=found.allowed_length,
    )


def _coded(
    call: Call, outputs: Mapping[str, Tensor], places: Mapping[str, Places]
) -> dict[str, Judged]:
    """Codes with their scales; the comparison is of the numbers that they stand for."""
    form = format_of(call)
    sides = [values_of(side, form) for side in (outputs, call.outputs)]
    compared = compare(sides[0], sides[1], places.get(CODES))
    made = {}
    for name, found in judge_codes(call, outputs).items():
        flips = Flips(found.legal, found.total, found.rows, "one step, at a rounding boundary")
        made[name] = Judged(
            name,
            Verdict.AGREES if found.worst.ratio <= 1 else Verdict.DIFFERS,
            (found.worst,),
            flips if found.legal else Flips(),
            compared if name == CODES else None,
            found.words,
        )
    return made


def _rows_listed(
    call: Call, outputs: Mapping[str, Tensor], places: Mapping[str, Places]
) -> dict[str, Judged]:
    found = rows_chosen(call, outputs["out"])
    return {"out": _chosen("out", call, outputs, found, places)}


def _experts_listed(
    call: Call, outputs: Mapping[str, Tensor], places: Mapping[str, Places]
) -> dict[str, Judged]:
    """Experts, and the weights for the candidate's own ones (the twin's where they are none)."""
    found = experts_chosen(call, outputs["experts"])
    own = outputs["experts"]
    exist = (own >= 0) & (own < call.inputs["logits"].shape[-1])
    expected, budget = weights_budget(call, own if bool(exist.all()) else call.outputs["experts"])
    pair = outputs["weights"], expected.to(torch.float32)
    return {
        "experts": _chosen("experts", call, outputs, found, places),
        "weights": _judged("weights", pair, budget, places.get("weights")),
    }


def _chosen(
    name: str,
    call: Call,
    outputs: Mapping[str, Tensor],
    found: Chosen,
    places: Mapping[str, Places],
) -> Judged:
    count = sum(found.flips.values())
    words = "another choice among scores within their errors"
    flips = (
        Flips(count, call.outputs[name].numel(), tuple(found.flips), words) if count else Flips()
    )
    return Judged(
        name,
        Verdict.AGREES if found.worst.ratio <= 1 else Verdict.DIFFERS,
        (found.worst,),
        flips,
        compare(outputs[name], call.outputs[name], places.get(name)),
        found.words,
    )


_CHOICES = {
    "ffn.topk": _experts_listed,
    "attn.indexer.topk": _rows_listed,
}
