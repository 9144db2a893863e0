"""Error budgets of spans: several components, of which a run recorded only the ends.

Nobody knows what the run stored in between, so every operation may have rounded its result to the
dtype of the trace, or not. Two bounds follow from that.

* Bounds of every error, carried through all operations. They hold always, and grow fast: after two
  products in BF16 they may be as large as the values.
* Where these say nothing, the span is computed a few more times with every result moved at random
  by up to half a spacing. `MARGIN` times the deviation of a row is the budget there: measured, not
  derived.

A choice of experts within the span is discontinuous: rows whose choice the moved results put in
doubt are not judged, nor are later rows that attend to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from degarble.harness.engine.budget.budget import Budget
from degarble.harness.engine.budget.rules import output_format
from degarble.harness.engine.budget.running_errors import RunningErrors
from degarble.harness.engine.budget.traced import Choices, short_summed, traced
from degarble.references.traced.definitions import Roundings, compute
from degarble.references.traced.family import by_sequence, is_sequential, keeps_state
from degarble.references.traced.spans import ComponentSpan

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.engine.budget.rules import JudgeableCall
    from degarble.references.traced.family import TracedFacts
    from degarble.references.traced.graph import TracedComponent

SAMPLES = 4
MARGIN = 16.0  # times the root mean square of a row's deviations
USEFUL = 0.25  # of a row's root mean square: a bound below it says something
_UNJUDGED = 1e6  # times a row's size: no difference is larger


class _Possible(Roundings):
    """Let every result be stored, or not, and bound the difference."""

    def __init__(self, errors: RunningErrors, ranks: int, store: torch.dtype) -> None:
        self._errors, self._ranks, self._store = errors, ranks, store

    def operation(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Widen the error of a result by half a spacing."""
        if not value.is_floating_point() or not dtype.is_floating_point:
            return value
        return self._errors.widened(value, torch.finfo(dtype).eps / 2)

    between = sums = operation

    def summed(self, coded: Tensor, product: Tensor, summed: Tensor) -> Tensor:
        """Sum as a tensor core does."""
        return short_summed(self._errors, coded, product, summed)

    def over_ranks(self, product: Tensor, operands: tuple[Tensor, Tensor]) -> Tensor:
        """Widen the error by the storing of each rank's term, and of partial sums over ranks.

        Where ranks have whole experts, terms of products are as large at least.
        """
        if self._ranks == 1:
            return product
        with _disable_current_modes():
            size = _terms(operands, self._ranks).abs().sum(0)
            spacings = (self._ranks + 1) / 2  # as over_ranks of a linear, and the product's own
            error = self._errors.of(product) + size * (spacings * torch.finfo(self._store).eps)
        self._errors.note(product, error)
        return product


class _Moved(Roundings):
    """Move every result at random, by half a spacing of its dtype at most."""

    def __init__(self, generator: torch.Generator, ranks: int, store: torch.dtype) -> None:
        self._generator, self._ranks, self._store = generator, ranks, store

    def operation(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Move a result."""
        if not value.is_floating_point() or not dtype.is_floating_point:
            return value
        share = torch.rand(value.shape, generator=self._generator, dtype=value.dtype) * 2 - 1
        return value * (1 + share * (torch.finfo(dtype).eps / 2))

    between = sums = operation

    def over_ranks(self, product: Tensor, operands: tuple[Tensor, Tensor]) -> Tensor:
        """Move each rank's term of a product."""
        if self._ranks == 1:
            return product
        terms = _terms(operands, self._ranks)
        return product + (self.operation(terms, self._store) - terms).sum(0)


def _terms(operands: tuple[Tensor, Tensor], ranks: int) -> Tensor:
    """Return the terms [ranks, rows, outputs] of a product x w^T that is split along K."""
    split = (side.tensor_split(ranks, 1) for side in operands)
    return torch.stack([x @ w.T for x, w in zip(*split, strict=True)])


@dataclass(frozen=True)
class _Slack:
    """How far each element may be off, which of it was measured, and rows without a claim."""

    slack: Tensor
    measured: Tensor
    doubtful: Tensor


def experts(call: JudgeableCall) -> dict[str, Budget]:
    """Return the budget of routed experts, whose kernels may be an engine's own."""
    facts: TracedFacts = call.known_facts
    return span(call) if facts.traced.is_fused else traced(call)


def span(call: JudgeableCall) -> dict[str, Budget]:
    """Return the budget of every output of a span."""
    facts: TracedFacts = call.known_facts
    parts: dict[str, list[_Slack]] = {name: [] for name in call.outputs}
    given = by_sequence(facts.traced, call.inputs) if is_sequential(facts.traced) else None
    for inputs, count in given if given is not None else [(dict(call.inputs), 0)]:
        for name, slack in _slack(call, facts, inputs).items():
            parts[name].append(_Slack(*(each[-count:] for each in vars(slack).values())))
    return {name: _budget(call.outputs[name], facts.traced, found) for name, found in parts.items()}


def _budget(out: Tensor, component: TracedComponent, parts: list[_Slack]) -> Budget:
    slack = torch.cat([part.slack for part in parts]).float().reshape(out.shape)
    measured = torch.cat([part.measured.flatten() for part in parts]).float().mean().item()
    doubtful = int(torch.cat([part.doubtful for part in parts]).sum())
    count = len(component.parts) if isinstance(component, ComponentSpan) else 1
    derivation = [f"{count} components computed as one, each result stored or not"]
    if measured:
        derivation.append(
            f"measured for {measured:.0%} of the elements: {MARGIN:.0f} times the deviation of"
            f" {SAMPLES} runs with results moved at random"
        )
    if doubtful:
        derivation.append(f"{doubtful} rows whose choice of experts is in doubt are not judged")
    return Budget(output_format(out), slack, tuple(derivation))


def _slack(call: JudgeableCall, facts: TracedFacts, inputs: dict[str, Tensor]) -> dict[str, _Slack]:
    graph, component, parameter = facts.graph, facts.traced, facts.parameter(call.weights)
    chosen = Choices()
    with chosen:
        exact = compute(graph, component, inputs, parameter, facts.roundings)
    errors = RunningErrors()
    with errors:
        possible = _Possible(errors, call.ranks, facts.numerics.store)
        made = compute(graph, component, inputs, parameter, possible)
    moved = _Moved(torch.Generator().manual_seed(0), call.ranks, facts.numerics.store)
    runs: list[dict[str, Tensor]] = []
    others: list[list[tuple[Tensor, int]]] = []
    for _ in range(SAMPLES):
        watched = Choices()
        with watched:
            runs.append(compute(graph, component, inputs, parameter, moved))
        others.append(watched.found)
    found = {}
    for name, out in exact.items():
        rows = out.shape[0]
        doubtful = _in_doubt(chosen.found, others, rows, along=keeps_state(component))
        derived = torch.where(
            errors.of(made[name]).isfinite(), errors.of(made[name]), torch.inf
        ).reshape(rows, -1)
        flat = out.reshape(rows, -1)
        if not out.is_floating_point():
            slack = torch.where(doubtful[:, None], _UNJUDGED, torch.zeros(flat.shape))
            found[name] = _Slack(slack, torch.zeros(flat.shape, dtype=torch.bool), doubtful)
            continue
        size = flat.square().mean(1, keepdim=True).sqrt()
        apart = torch.stack([run[name].reshape(rows, -1) - flat for run in runs])
        deviation = apart.square().mean((0, 2)).sqrt()[:, None].expand_as(flat) * MARGIN
        measured = (derived > USEFUL * size) & (deviation < derived)
        slack = torch.where(measured, deviation, derived)
        slack = torch.where(doubtful[:, None], _UNJUDGED * (1 + flat.abs().amax()), slack)
        found[name] = _Slack(slack, measured, doubtful)
    return found


def _in_doubt(
    chosen: list[tuple[Tensor, int]],
    others: list[list[tuple[Tensor, int]]],
    rows: int,
    *,
    along: bool,
) -> Tensor:
    """Return the rows in which a choice may go either way."""
    found = torch.zeros(rows, dtype=torch.bool)
    for number, (scores, count) in enumerate(chosen):
        if scores.shape[0] != rows or count >= scores.shape[-1]:
            continue
        ranked = scores.sort(-1, descending=True).values
        margin = ranked[..., count - 1] - ranked[..., count]
        apart = torch.stack([other[number][0] - scores for other in others])
        noise = apart.square().mean((0, -1)).sqrt() * MARGIN
        found |= (margin <= noise).reshape(rows, -1).any(1)
    return found.cummax(0).values if along else found
