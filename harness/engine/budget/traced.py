"""Error budgets of traced components, derived by running them with bounds of their errors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from degarble.harness.base.errors import Undecided
from degarble.harness.engine.budget.bounded_values import BoundedValue
from degarble.harness.engine.budget.budget import MEASURED, Budget
from degarble.harness.engine.budget.codes_and_choices import NO_FINDING, ChoiceResult, chosen_among
from degarble.harness.engine.budget.quantised_inputs import quantised_bound
from degarble.harness.engine.budget.rules import (
    MatrixParts,
    U,
    ambiguous,
    exact,
    output_format,
    over_ranks,
    product_operand,
    summed,
)
from degarble.harness.engine.budget.running_errors import RunningErrors
from degarble.harness.formats.number_formats import BLOCK_FORMATS, FP32
from degarble.harness.report.number_text import number
from degarble.references.linears import CODES, matrix_parts, weight_rows, weight_values
from degarble.references.numerics import DecodedOperands
from degarble.references.traced.definitions import NARROW, Roundings, compute
from degarble.references.traced.evaluate import from_rows, joined
from degarble.references.traced.family import by_sequence, is_sequential
from degarble.references.traced.trace import operator_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from degarble.harness.engine.budget.rules import JudgeableCall
    from degarble.references.linears import InputQuantiser
    from degarble.references.traced.family import TracedFacts

_RUNS = 8  # of a recurrent component with perturbed operations
_SPREAD = 6  # standard deviations allowed, since so few runs are measured
_CHUNK = 64  # tokens that a chunk sums at least
_CUTS = 4  # deviations by which the losses of two short sums may differ
_DECODED = 2 * U  # a run may round the product of both scales, and then that with a code
_PART = 1 << 20  # elements of a matrix widened at once: they stay in a processor's cache


class _Tracked(Roundings):
    """Roundings of a run, with the errors that they leave."""

    def __init__(self, errors: RunningErrors, facts: TracedFacts) -> None:
        self._errors, self._each = errors, facts.stores_operations
        self._sums = facts.numerics.switches.expert_sums_stored

    def operation(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Store a result where the run does."""
        return self._errors.stored(value, dtype) if self._each else value

    def shares(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Store shares, or let a fused kernel round them relative to a peak of its own."""
        if self._each or dtype is torch.float32:
            return self.operation(value, dtype)
        # Half a spacing of the dtype, of a share that may be any power of two larger when rounded.
        return self._errors.widened(value, torch.finfo(dtype).eps / 2)

    def sums(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Store the sum over a token's experts where the run does."""
        return self.operation(value, dtype) if self._sums else value

    def quantised(self, value: Tensor, quantiser: InputQuantiser) -> Tensor:
        """Quantise an operand; numbers near a boundary may go either way."""
        errors = self._errors
        with _disable_current_modes():
            made = quantiser(value)
            bound = quantised_bound(quantiser, BoundedValue(value, errors.of(value)))
            if BLOCK_FORMATS[quantiser.format].tensor_scale:
                bound = bound + _DECODED * made.abs()
        errors.note(made, bound)
        return made

    def summed(self, coded: Tensor, product: Tensor, summed: Tensor) -> Tensor:
        """Sum as a tensor core does."""
        return short_summed(self._errors, coded, product, summed)


def short_summed(errors: RunningErrors, coded: Tensor, product: Tensor, summed: Tensor) -> Tensor:
    """Note the error of a tensor core's sum; of codes that may step, what it cuts off may differ.

    Each step's cut is then another number of the same size, so that the difference of two sums is
    as large as what they lose: that of the element, and some deviations of the row.
    """
    with _disable_current_modes():
        lost = (summed - product).abs()
        row = lost.square().mean(-1, keepdim=True).sqrt()
        steps = (errors.of(coded) > 0).any(-1, keepdim=True)
        error = errors.of(product) + torch.where(steps, lost + _CUTS * row, 0.0)
    errors.note(summed, error)
    return summed


def traced(call: JudgeableCall) -> dict[str, Budget]:
    """Return the budget of every output of a component that is computed as it was traced."""
    facts: TracedFacts = call.known_facts
    along = facts.traced.is_recurrent
    if along and not facts.traced.is_rectangular:
        return _measured(call, facts)
    errors = _errors_of(facts)
    with errors:
        made = _computed(call, facts, _Tracked(errors, facts))
    if errors.unknown and along:
        return _measured(call, facts)
    if errors.unknown:
        raise Undecided(
            "budget", ", ".join(errors.unknown), "operators whose rounding has a derivation",
            "Judge it by its distance to the BF16 reference, or compare two runs.",
        )  # fmt: skip
    stored = "each stored" if facts.stores_operations else "kept in float32"
    words = f"{len(facts.traced.operations)} operations, {stored}, with their errors propagated"
    share, reason = _otherwise_held(call, facts)
    return {
        name: Budget(
            output_format(out),
            (errors.of(made[name]) + share * made[name].abs()).float().reshape(out.shape),
            (words, *reason),
        )
        if out.dtype.is_floating_point
        else exact(FP32, f"{name} are whole numbers")
        for name, out in call.outputs.items()
    }


class _Given:
    """Stands in for the operator that chooses: takes what a run chose, and keeps the scores."""

    def __init__(self, own: Tensor, errors: RunningErrors) -> None:
        self._own, self._errors = own, errors
        self.scores = BoundedValue(own, own)  # until it has run

    def name(self) -> str:
        """Return the operator's name."""
        return "aten::topk"

    def __call__(self, scores: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Return the scores of what was chosen, and what was chosen."""
        self.scores = BoundedValue(scores, self._errors.of(scores))
        return scores.gather(-1, self._own), self._own


def choice(call: JudgeableCall, own: Tensor) -> tuple[ChoiceResult, Tensor, Budget]:
    """Judge a router's choice by its scores; return the weights of this choice, and their budget.

    Where the choice names no experts, the weights are those of the twin's.
    """
    facts: TracedFacts = call.known_facts
    twin = call.outputs["experts"]
    exist = bool(((own >= 0) & (own < call.inputs["logits"].shape[-1])).all())
    trace, errors = facts.graph.trace, _errors_of(facts)
    taken = from_rows(own if exist else twin, trace.tensors[facts.traced.outputs["experts"].number])
    given = _Given(taken.long(), errors)
    operations = list(trace.operations)
    last = max(n for n in facts.traced.operations if operations[n].name == "topk")
    operations[last] = replace(operations[last], function=given)
    graph = replace(facts.graph, trace=replace(trace, operations=tuple(operations)))
    with errors:
        parameter = facts.parameter(call.weights)
        made = compute(graph, facts.traced, call.inputs, parameter, _Tracked(errors, facts))
    weights = made["weights"]
    rows = BoundedValue(*(part.reshape(len(own), -1) for part in given.scores))
    words = (
        f"errors of scores: {number(float(rows.error.mean()) if len(own) else 0.0)} on average",
        "another expert is legal where both scores lie within their errors; order is free",
    )
    budget = Budget(output_format(call.outputs["weights"]), errors.of(weights).float(), words)
    return chosen_among(own, twin, rows, words), weights.float(), budget


def own_choice(call: JudgeableCall) -> dict[str, Budget]:
    """Return the budgets of the twin's choice."""
    whole = exact(FP32, "experts are whole numbers")
    return {"experts": whole, "weights": choice(call, call.outputs["experts"])[2]}


class Choices(TorchDispatchMode):
    """Keeps what `topk` chooses from, and how many."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not
        self.found: list[tuple[Tensor, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and look at its operand."""
        del types
        if operator_name(func) == "topk" and args[0].is_floating_point():
            self.found.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))


def choice_of_rows(call: JudgeableCall, own: Tensor) -> ChoiceResult:
    """Judge a choice of earlier tokens by its scores."""
    facts: TracedFacts = call.known_facts
    twin = call.outputs["out"]
    begun, worst, flips = 0, NO_FINDING, dict[int, int]()
    for given, count in by_sequence(facts.traced, call.inputs):
        errors, chosen = _errors_of(facts), Choices()
        with errors, chosen:
            roundings = _Tracked(errors, facts)
            compute(facts.graph, facts.traced, given, facts.parameter(call.weights), roundings)
        scores, _ = chosen.found[-1]
        width = scores.shape[-1]
        score = BoundedValue(
            *(each.reshape(-1, width)[-count:] for each in (scores, errors.of(scores)))
        )
        rows = slice(begun, begun + count)
        several = slice(width)  # more columns are of longer sequences
        found = chosen_among(own[rows, several].long(), twin[rows, several].long(), score, ())
        flips |= {begun + row: moved for row, moved in found.flips.items()}
        worst = max(worst, found.worst, key=lambda finding: finding.ratio)
        begun += count
    words = ("another token is legal where both scores lie within their errors; order is free",)
    return ChoiceResult(worst, flips, words)


def exact_rows(call: JudgeableCall) -> dict[str, Budget]:
    """Return the budget of the twin's choice."""
    return {name: exact(FP32, f"{name} are whole numbers") for name in call.outputs}


def _errors_of(facts: TracedFacts) -> RunningErrors:
    return RunningErrors(facts.numerics.store if facts.stores_operations else torch.float32)


class _Perturbed(Roundings):
    """Moves every result by up to a share of itself, at random."""

    def __init__(self, share: float, seed: int) -> None:
        self._share = share
        self._generator = torch.Generator().manual_seed(seed)

    def operation(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a result that errs."""
        del dtype
        if not value.is_floating_point():
            return value
        moved = torch.rand(value.shape, dtype=value.dtype, generator=self._generator)
        made = value * (1 + self._share * (2 * moved - 1))
        # No rounding passes 1: what is bounded by it, such as a decay, stays so.
        return torch.where(value.abs() <= 1, made.clamp(-1, 1), made)


def _measured(call: JudgeableCall, facts: TracedFacts) -> dict[str, Budget]:
    """Return how far outputs move when every operation errs, since no derivation covers all forms.

    What runs along the tokens is computed in chunks, token by token, or from a state that is kept
    in the storage dtype: each form rounds in other places.
    """
    store = facts.numerics.store
    narrow = store in NARROW
    tokens = max(rows.shape[0] for rows in call.inputs.values())
    share = torch.finfo(store).eps / 2 if narrow else U * math.sqrt(max(tokens, _CHUNK))
    exact_ = _computed(call, facts, Roundings())
    squares = {name: torch.zeros_like(out, dtype=torch.float64) for name, out in exact_.items()}
    for seed in range(_RUNS):
        moved = _computed(call, facts, _Perturbed(share, seed))
        for name, out in exact_.items():
            squares[name] += (moved[name] - out).square() / _RUNS
    words = (
        f"{MEASURED}: {_RUNS} runs whose operations err by {number(share)} of a result",
        f"slack = {_SPREAD} deviations of the element and of its row",
    )
    budgets = {}
    for name, out in call.outputs.items():
        if not out.is_floating_point():
            budgets[name] = exact(FP32, f"{name} are whole numbers")
            continue
        rows = squares[name].flatten(1).mean(1).reshape(-1, *[1] * (squares[name].ndim - 1))
        slack = _SPREAD * (squares[name] + rows).sqrt()
        budgets[name] = Budget(output_format(out), slack.float().reshape(out.shape), words)
    return budgets


def _otherwise_held(call: JudgeableCall, facts: TracedFacts) -> tuple[float, tuple[str, ...]]:
    """Return the share of a rounding that a run makes where its inputs are of another dtype.

    A model may hold a tensor in float32 in prefill and in BF16 in decode: casts that the trace
    shows as none are made then, or the reverse.
    """
    traced = {n: facts.graph.trace.tensors[r.number].dtype for n, r in facts.traced.inputs.items()}
    both = [{call.inputs[name].dtype, dtype} for name, dtype in traced.items()]
    mixed = [pair for pair in both if len(pair) > 1 and all(e.is_floating_point for e in pair)]
    narrow = [torch.finfo(dtype).eps / 2 for pair in mixed for dtype in pair]
    if not narrow:
        return 0.0, ()
    return max(narrow), ("an input is held in another dtype than in the traced pass: one rounding",)


def _computed(call: JudgeableCall, facts: TracedFacts, roundings: Roundings) -> dict[str, Tensor]:
    parameter = facts.parameter(call.weights)
    if not is_sequential(facts.traced):
        return compute(facts.graph, facts.traced, call.inputs, parameter, roundings)
    parts = []
    for given, count in by_sequence(facts.traced, call.inputs):
        made = compute(facts.graph, facts.traced, given, parameter, roundings)
        parts.append({name: rows[-count:] for name, rows in made.items()})
    return {name: joined(part[name] for part in parts) for name in parts[0]}


def linear(call: JudgeableCall) -> dict[str, Budget]:
    """Return the budget of a product, with its bias where it has one."""
    out = call.outputs["out"]
    weight = next(each for name, each in call.weights.items() if name.endswith("weight"))
    x = call.x.reshape(-1, call.x.shape[-1])
    facts, numerics = call.facts, None if call.facts is None else call.facts.numerics
    if facts is not None:
        x, weight = facts.multiplied(x, weight, coded=CODES in call.inputs)

    def parts() -> Iterator[Tensor]:
        for part in matrix_parts(weight.shape, _PART):
            yield weight_rows(weight, part, torch.float32, numerics)

    budget = summed(product_operand(x), MatrixParts(weight.shape, parts), output_format(out))
    if call.ranks > 1 and call.known_facts.summed_over_ranks:
        used = weight_values(weight, torch.float32, numerics)
        budget = over_ranks(replace(budget, slack=budget.slack.reshape(len(x), -1)), x, used,
                            call.ranks, on_the_way=True)  # fmt: skip
    if numerics is not None and call.operands is not DecodedOperands.EXACT and weight.is_decoded:
        # A decoded number near a boundary of BF16 may go either way.
        for part in matrix_parts(weight.shape, _PART):
            either = ambiguous(weight.rows(part, torch.float32), numerics.decoded).float()
            budget.slack[:, part] += x.abs().float() @ either.T
    if call.x_loose is not None:
        for part in matrix_parts(weight.shape, _PART):
            used = weight_rows(weight, part, torch.float32, numerics)
            budget.slack[:, part] += call.x_loose @ used.abs().T
    slack, derivation = budget.slack.reshape(out.shape), budget.derivation
    bias = next((each for name, each in call.weights.items() if name.endswith("bias")), None)
    if bias is not None:
        # torch does for rows that are not contiguous, engines for weights that are quantised.
        made = (out.double() - bias.values(torch.float64)).abs()
        slack = slack + (made * (torch.finfo(out.dtype).eps / 2)).float()
        derivation += ("the product may be stored before its bias is added",)
    return {"out": Budget(budget.output, slack, derivation, budget.repeats)}
