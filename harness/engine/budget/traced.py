"""Error budgets of traced components, derived by running them with bounds of their errors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import Undecided
from degarble.harness.engine.budget.budget import Budget
from degarble.harness.engine.budget.rules import (
    exact,
    output_format,
    over_ranks,
    product_operand,
    summed,
)
from degarble.harness.engine.budget.running_errors import RunningErrors
from degarble.harness.formats.number_formats import FP32
from degarble.references.traced.definitions import Roundings, compute
from degarble.references.traced.family import TracedFacts, by_sequence, is_sequential
from degarble.references.traced.graph import StretchKind
from degarble.references.traced.spans import ComponentSpan
from degarble.references.traced.trace import BoundaryKind

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.engine.budget.rules import JudgeableCall


class _Tracked(Roundings):
    """Roundings of a run, with the errors that they leave."""

    def __init__(self, errors: RunningErrors, *, each: bool) -> None:
        self._errors, self._each = errors, each

    def operation(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Store a result where the run does."""
        return self._errors.stored(value, dtype) if self._each else value

    def shares(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Store shares, or let a fused kernel round them relative to a peak of its own."""
        if self._each or dtype is torch.float32:
            return self.operation(value, dtype)
        # Half a spacing of the dtype, of a share that may be any power of two larger when rounded.
        return self._errors.widened(value, torch.finfo(dtype).eps / 2)


def traced(call: JudgeableCall) -> dict[str, Budget]:
    """Return the budget of every output of a component that is computed as it was traced."""
    facts = call.facts
    assert isinstance(facts, TracedFacts), "bound by its family"
    errors = RunningErrors()
    with errors:
        made = _computed(call, facts, errors)
    if errors.unknown:
        raise Undecided(
            "budget", ", ".join(errors.unknown), "operators whose rounding has a derivation",
            "Judge it by its distance to the BF16 reference, or compare two runs.",
        )  # fmt: skip
    stored = "each stored" if facts.stores_operations else "kept in float32"
    return {
        name: Budget(
            output_format(out),
            errors.of(made[name]).float().reshape(out.shape),
            (f"{len(facts.traced.operations)} operations, {stored}, with their errors propagated",),
        )
        if out.dtype.is_floating_point
        else exact(FP32, f"{name} are whole numbers")
        for name, out in call.outputs.items()
    }


def _computed(call: JudgeableCall, facts: TracedFacts, errors: RunningErrors) -> dict[str, Tensor]:
    roundings = _Tracked(errors, each=facts.stores_operations)
    parameter = facts.parameter(call.weights)
    trace = facts.graph.trace
    if not is_sequential(facts.traced):
        return compute(trace, facts.traced, call.inputs, parameter, roundings)
    parts = []
    for given, count in by_sequence(facts.traced, call.inputs):
        made = compute(trace, facts.traced, given, parameter, roundings)
        parts.append({name: rows[-count:] for name, rows in made.items()})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _is_summed_over_ranks(call: JudgeableCall) -> bool:
    """Return whether ranks split a linear along its input: what attention or a gate returns."""
    facts = call.facts
    assert isinstance(facts, TracedFacts), "bound by its family"
    number = facts.traced.inputs["x"].number
    edge = facts.graph.edges.get(number)
    maker, _ = facts.graph.makers.get(edge.sources[0].number if edge else number, ("", ""))
    made = next((each for each in facts.graph.components if each.name == maker), None)
    last = made.parts[-1] if isinstance(made, ComponentSpan) else made
    return last is not None and last.kind in {BoundaryKind.ATTENTION, StretchKind.GATED}


def linear(call: JudgeableCall) -> dict[str, Budget]:
    """Return the budget of a product, with its bias where it has one."""
    out = call.outputs["out"]
    weight = next(each for name, each in call.weights.items() if name.endswith("weight"))
    x = call.x.reshape(-1, call.x.shape[-1])
    w = weight.values(torch.float32)
    budget = summed(product_operand(x), w, output_format(out))
    if call.ranks > 1 and _is_summed_over_ranks(call):
        budget = over_ranks(replace(budget, slack=budget.slack.reshape(len(x), -1)), x, w,
                            call.ranks, on_the_way=True)  # fmt: skip
    return {
        "out": Budget(
            budget.output, budget.slack.reshape(out.shape), budget.derivation, budget.repeats
        )
    }
