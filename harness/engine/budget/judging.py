"""Judge all outputs of a component call: numbers, codes with scales, and discrete choices.

Entry point for every replay: `judge_outputs(Call.of(twin, component, inputs), outputs)`. An output
without a derivation is UNDECIDED and never passes for healthy. An output that is missing, or has
another shape, differs beyond every budget.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import Undecided
from degarble.harness.base.sums import all_finite
from degarble.harness.engine.budget import traced
from degarble.harness.engine.budget.budget import (
    Flips,
    LevelFinding,
    OutputResult,
    ResultBasis,
    judge,
)
from degarble.harness.engine.budget.codes_and_choices import (
    experts_chosen,
    format_of,
    is_coded,
    judge_codes,
    rows_chosen,
    values_of,
    weights_budget,
)
from degarble.harness.engine.budget.roles import budgets_of, has_rule
from degarble.harness.engine.compare.compare import compare
from degarble.harness.report.verdict import Verdict
from degarble.references.linears import CODES

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping

    from torch import Tensor

    from degarble.harness.engine.budget.budget import Budget
    from degarble.harness.engine.budget.codes_and_choices import ChoiceResult
    from degarble.harness.engine.budget.rules import JudgeableCall
    from degarble.harness.engine.compare.compare import NamedPlaces


_NO_RULE = "its role has no derivation of rounding errors"


def judge_outputs(
    call: JudgeableCall,
    outputs: Mapping[str, Tensor],
    places: Mapping[str, NamedPlaces] | None = None,
) -> dict[str, OutputResult]:
    """Judge a candidate's outputs against the twin's on the same inputs."""
    made = {
        name: _misshapen(name, outputs.get(name), twin)
        for name, twin in call.outputs.items()
        if name not in outputs or outputs[name].shape != twin.shape
    }
    named = places or {}
    if not made and all(_equal(outputs[name], twin) for name, twin in call.outputs.items()):
        return _all_equal(call, outputs, named)
    try:
        found = _found(call, outputs, named, made)
    except Undecided as reason:
        found = {
            name: OutputResult(name, Verdict.UNDECIDED, undecided=str(reason))
            for name in call.outputs
        }
    return {name: made.get(name) or found.get(name) or _unjudged(name) for name in call.outputs}


def is_joint(call: JudgeableCall) -> bool:
    """Tell whether outputs can only be judged together: codes with scales, a choice."""
    return is_coded(call) or call.role in _CHOICES


def _found(
    call: JudgeableCall,
    outputs: Mapping[str, Tensor],
    places: Mapping[str, NamedPlaces],
    passed_over: Container[str] = (),
) -> dict[str, OutputResult]:
    """Judge by the rules of the role; outputs that belong together are left out together."""
    if not is_joint(call):
        return _numbers(call, outputs, places, passed_over)
    if passed_over:
        return {}
    return _CHOICES.get(call.role, _coded)(call, outputs, places)


def _equal(candidate: Tensor, twin: Tensor) -> bool:
    return candidate.dtype is twin.dtype and torch.equal(candidate, twin)


def _all_equal(
    call: JudgeableCall, outputs: Mapping[str, Tensor], places: Mapping[str, NamedPlaces]
) -> dict[str, OutputResult]:
    """Return AGREES where a rule exists and nothing differs; reasons are computed lazily."""
    if not has_rule(call):
        return {
            name: OutputResult(name, Verdict.UNDECIDED, undecided=_NO_RULE) for name in call.outputs
        }
    late = cache(lambda: _found(call, outputs, places))

    def reasons(name: str) -> ResultBasis:
        return late()[name].reasons()

    none = (LevelFinding("element", (0, 0), 0.0, 0.0),)
    return {
        name: OutputResult(name, Verdict.AGREES, none, reasons=partial(reasons, name))
        for name in call.outputs
    }


def _misshapen(name: str, candidate: Tensor | None, twin: Tensor) -> OutputResult:
    found = "missing" if candidate is None else f"{tuple(candidate.shape)}"
    words = (f"expected extents {tuple(twin.shape)}, found {found}",)
    return OutputResult(
        name,
        Verdict.DIFFERS,
        (LevelFinding("shape", (), 1.0, 0.0),),
        reasons=lambda: ResultBasis(derivation=words),
    )


def _unjudged(name: str) -> OutputResult:
    return OutputResult(
        name, Verdict.UNDECIDED, undecided="it belongs to an output of another shape, see there"
    )


def _numbers(
    call: JudgeableCall,
    outputs: Mapping[str, Tensor],
    places: Mapping[str, NamedPlaces],
    passed_over: Container[str],
) -> dict[str, OutputResult]:
    made = {}
    for name, budget in budgets_of(call).items():
        if name not in passed_over:
            pair = outputs[name], call.outputs[name]
            made[name] = _judged(name, pair, budget, places.get(name))
    return made


def _judged(
    name: str, pair: tuple[Tensor, Tensor], budget: Budget, places: NamedPlaces | None
) -> OutputResult:
    candidate, twin = pair
    # Only the reference computes in float64; outputs are judged as float32 at most.
    if twin.dtype is torch.float64:
        twin = twin.float()
    # NaN and infinity get no slack: the candidate has to be of the same kind.
    if not all_finite(twin):
        slack = torch.where(twin.isfinite(), budget.slack.expand(twin.shape), 0.0)
        budget = replace(budget, slack=slack)
    if not all_finite(budget.slack):
        return OutputResult(
            name, Verdict.UNDECIDED, undecided="its operands are not finite: no budget"
        )
    return judge(candidate, twin, budget, places, output=name)


def _coded(
    call: JudgeableCall, outputs: Mapping[str, Tensor], places: Mapping[str, NamedPlaces]
) -> dict[str, OutputResult]:
    """Judge codes with their scales; the comparison is of the numbers that they stand for."""

    def reasons(name: str, words: tuple[str, ...]) -> ResultBasis:
        if name != CODES:
            return ResultBasis(derivation=words)
        form = format_of(call)
        sides = [values_of(side, form) for side in (outputs, call.outputs)]
        return ResultBasis(compare(sides[0], sides[1], places.get(CODES)), words)

    made = {}
    for name, code in judge_codes(call, outputs).items():
        flips = Flips(code.legal, code.total, code.rows, "one step, at a rounding boundary")
        made[name] = OutputResult(
            name,
            Verdict.AGREES if code.worst.ratio <= 1 else Verdict.DIFFERS,
            (code.worst,),
            flips if code.legal else Flips(),
            reasons=partial(reasons, name, code.words),
        )
    return made


def _rows_listed(
    call: JudgeableCall, outputs: Mapping[str, Tensor], places: Mapping[str, NamedPlaces]
) -> dict[str, OutputResult]:
    result = rows_chosen(call, outputs["out"])
    return {"out": _chosen("out", call, outputs, result, places)}


def _experts_listed(
    call: JudgeableCall, outputs: Mapping[str, Tensor], places: Mapping[str, NamedPlaces]
) -> dict[str, OutputResult]:
    """Judge experts, and the weights for the candidate's own (the twin's if these are invalid)."""
    result = experts_chosen(call, outputs["experts"])
    own = outputs["experts"]
    exist = (own >= 0) & (own < call.inputs["logits"].shape[-1])
    expected, budget = weights_budget(call, own if bool(exist.all()) else call.outputs["experts"])
    pair = outputs["weights"], expected.to(torch.float32)
    return {
        "experts": _chosen("experts", call, outputs, result, places),
        "weights": _judged("weights", pair, budget, places.get("weights")),
    }


def _experts_as_traced(
    call: JudgeableCall, outputs: Mapping[str, Tensor], places: Mapping[str, NamedPlaces]
) -> dict[str, OutputResult]:
    result, weights, budget = traced.choice(call, outputs["experts"])
    return {
        "experts": _chosen("experts", call, outputs, result, places),
        "weights": _judged("weights", (outputs["weights"], weights), budget, places.get("weights")),
    }


def _rows_as_traced(
    call: JudgeableCall, outputs: Mapping[str, Tensor], places: Mapping[str, NamedPlaces]
) -> dict[str, OutputResult]:
    result = traced.choice_of_rows(call, outputs["out"])
    return {"out": _chosen("out", call, outputs, result, places)}


def _chosen(
    name: str,
    call: JudgeableCall,
    outputs: Mapping[str, Tensor],
    result: ChoiceResult,
    places: Mapping[str, NamedPlaces],
) -> OutputResult:
    count = sum(result.flips.values())
    words = "another choice among scores within their errors"
    flips = (
        Flips(count, call.outputs[name].numel(), tuple(result.flips), words) if count else Flips()
    )
    return OutputResult(
        name,
        Verdict.AGREES if result.worst.ratio <= 1 else Verdict.DIFFERS,
        (result.worst,),
        flips,
        reasons=lambda: ResultBasis(
            compare(outputs[name], call.outputs[name], places.get(name)), result.words
        ),
    )


_CHOICES: Mapping[str, Callable[..., dict[str, OutputResult]]] = {
    "ffn.topk": _experts_listed,
    "traced.topk": _experts_as_traced,
    "traced.choice": _rows_as_traced,
    "attn.indexer.topk": _rows_listed,
}
