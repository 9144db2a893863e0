"""Find the operand of a component that was another one as a whole: its weights, or its input."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.engine.budget.rules import JudgeableCall
from degarble.harness.engine.diagnose.trial import calls_in
from degarble.harness.engine.faults.model_faults import FaultVariant, with_inputs, with_weights
from degarble.harness.engine.faults.regions import full_name
from degarble.harness.engine.recover.changes import (
    HOLDS,
    Equations,
    OperandChange,
    changes_of,
    on_numbers,
)
from degarble.harness.engine.recover.operands import operand_of, operand_of_input
from degarble.harness.engine.recover.products import views_of
from degarble.harness.engine.recover.stated import operation
from degarble.harness.formats.weight import Weight
from degarble.references.linears import BLOCK_SCALE, CODES, TENSOR_SCALE, X_LOOSE, X

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext
    from degarble.harness.engine.recover.operands import StoredOperand
    from degarble.harness.engine.recover.products import ProductView

MOST_CHANGES = 4  # of one operand that are proved
_CODED = frozenset({CODES, BLOCK_SCALE, TENSOR_SCALE, X_LOOSE, X})


@dataclass(frozen=True, eq=False)
class OperandCause:
    """An operand and what was done to it: a sentence's end, and the variant to prove."""

    words: str
    variant: FaultVariant
    of_input: bool
    constant: bool = False
    table: tuple[str, ...] = field(default=())


def causes_in_operands(
    context: ComponentContext, record: CallRecord, views: Sequence[ProductView]
) -> Iterator[OperandCause]:
    """Yield what may have been done to the weights, then to the input."""
    wrong = [view for view in views if bool(view.wrong.any())]
    if not wrong:
        return
    yield from _in_weights(context, wrong)
    yield from _in_input(context, record, wrong)
    if len(record.rows) > 1:  # rows of one call may have met others' of the same call
        alone = largest_call(record)
        some = [view for view in views_of(context, alone) if bool(view.wrong.any())]
        if some:
            yield from _in_input(context, alone, some)


def largest_call(record: CallRecord) -> CallRecord:
    """Return the call with most rows, where several are joined."""
    return max(calls_in(record), key=height)


def height(record: CallRecord) -> int:
    """Return the rows of a call."""
    return next((len(tensor) for tensor in record.outputs.values() if tensor.ndim), 0)


# ---- weights -------------------------------------------------------------------------------------


def _in_weights(context: ComponentContext, wrong: Sequence[ProductView]) -> Iterator[OperandCause]:
    by_name: dict[str, list[Equations]] = defaultdict(list)
    for view in wrong:
        operand = by_name[view.name][0].operand if by_name[view.name] else operand_of(view.weight)
        known = _scales_of_others(context, view.name) if operand.form is not None else {}
        by_name[view.name].append(replace(_of_weight(view, operand), known=known))
    names = sorted(by_name, key=lambda name: -by_name[name][0].seen.numel())
    for change in islice(_common(by_name[names[0]]), MOST_CHANGES):
        found = {names[0]: change}
        for name in names[1:]:
            own = _alike(change, by_name[name])
            if own is None:
                break
            found[name] = own
        else:
            yield _weights_cause(context, found)


def _scales_of_others(context: ComponentContext, name: str) -> dict[str, float]:
    """Return scales that may stand in the place of a weight's own, by what they are."""
    found: dict[str, float] = {}
    own = context.weights[name]
    if own.input_scale is not None and own.input_scale.numel() == 1:
        found["its input scale"] = float(own.input_scale)
    contexts = [context, *_siblings(context)]
    for other in contexts:
        for local, weight in dict(other.weights).items():
            if weight.tensor_scale is None or weight.tensor_scale.numel() > 1:
                continue
            if other is not context or local != name:
                scale = weight.quantised().decode_scale
                found[f"that of {full_name(other, local)}"] = float(scale)
    return {words: value for words, value in found.items() if value}


def _siblings(context: ComponentContext) -> Iterator[ComponentContext]:
    """Yield the components of the same role in other layers, as far as weights are bound."""
    for name in context.bound.calls:
        sibling = context.sibling(name) if name != context.name else None
        if sibling is None or sibling.role != context.role:
            continue
        try:
            dict(sibling.weights)
        except KeyError:
            continue  # the model was bound for one component
        yield sibling


def _of_weight(view: ProductView, operand: StoredOperand) -> Equations:
    rows = torch.arange(view.seen.shape[1]) + view.first_row
    sides = (view.seen.T, view.product.T, view.allowed.T)
    return Equations(operand, rows, view.x, *sides).in_proportion()


def _common(equations: Sequence[Equations]) -> Iterator[OperandChange]:
    """Yield what holds in every group of rows of one weight."""
    for change in changes_of(equations[0], constant=True):
        if all(_holds(change, each) for each in equations[1:]):
            yield change


def _alike(change: OperandChange, equations: Sequence[Equations]) -> OperandChange | None:
    """Return the same change of another weight, or another one of the same kind."""
    if not change.constant and all(_holds(change, each) for each in equations):
        return change
    return next(_common(equations), None)


def _holds(change: OperandChange, equations: Equations) -> bool:
    try:
        made = change.numbers(equations.operand)[equations.rows]
        return equations.given_by(made) >= HOLDS
    except CANNOT_RUN:
        return False


def _weights_cause(context: ComponentContext, found: Mapping[str, OperandChange]) -> OperandCause:
    by_words: dict[str, list[str]] = defaultdict(list)
    for name, change in found.items():
        by_words[change.words].append(full_name(context, name))
    parts = [f"in {_listed(names, len(context.weights))} {words}"
             for words, names in islice(by_words.items(), 2)]  # fmt: skip
    more = len(by_words) - len(parts)
    words = " and ".join(parts) + (f", and {more} weights more are changed" if more else "")
    table = tuple(line for change in found.values() for line in change.table)
    constant = any(change.constant for change in found.values())
    return OperandCause(
        words, FaultVariant(words, with_weights(ChangedOperands(found))), False, constant, table
    )


@operation
@dataclass(frozen=True, eq=False)
class ChangedOperands:
    """Change some weights of a component as operands; each is changed once."""

    changes: Mapping[str, OperandChange]
    _made: dict[str, tuple[Weight, Weight]] = field(default_factory=dict, init=False)

    def __call__(self, name: str, weight: Weight) -> Weight:
        """Return a weight as it was multiplied."""
        change = self.changes.get(name)
        if change is None:
            return weight
        known = self._made.get(name)
        if known is None or known[0] is not weight:
            numbers = change.numbers(operand_of(weight))
            known = weight, Weight(value=numbers, input_scale=weight.input_scale)
            self._made[name] = known
        return known[1]


def _listed(names: Sequence[str], everything: int) -> str:
    if len(names) == 1:
        return names[0]
    if len(names) == everything:
        return f"each of its {everything} weights"
    return f"each of {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"


# ---- the input -----------------------------------------------------------------------------------


def _in_input(
    context: ComponentContext, record: CallRecord, wrong: Sequence[ProductView]
) -> Iterator[OperandCause]:
    joined, form = _equations(context, record, wrong)
    dtype = context.bound.numerics.products
    changes = changes_of(joined[0], constant=False)
    for change in islice(changes, MOST_CHANGES):
        if change.constant or not all(_holds(change, each) for each in joined[1:]):
            continue
        words = f"in the {'quantised ' if CODES in record.inputs else ''}input {change.words}"
        changed = with_inputs(partial(_input_changed, change, form, dtype))
        yield OperandCause(words, FaultVariant(words, changed), True)


def _equations(
    context: ComponentContext, record: CallRecord, wrong: Sequence[ProductView]
) -> tuple[list[Equations], str | None]:
    """Return what products say of the rows of an input, most numbers first, and its format."""
    call = JudgeableCall.from_twin(context.bound, context.name, record.inputs, record.expected)
    operand = operand_of_input(record.inputs, call.activation)
    by_rows: dict[tuple[int, ...], list[ProductView]] = defaultdict(list)
    for view in wrong:
        by_rows[tuple(view.at.tolist())].append(view)
    joined = [_of_input(views, operand) for views in by_rows.values()]
    joined.sort(key=lambda each: -each.seen.numel())
    return joined, call.activation


def equations_of_input(
    context: ComponentContext, record: CallRecord, wrong: Sequence[ProductView]
) -> tuple[Equations, str | None, torch.dtype, bool]:
    """Return what most products say of an input, its format and type, and whether it is codes."""
    joined, form = _equations(context, record, wrong)
    coded = CODES in record.inputs
    dtype = context.bound.numerics.products if coded else record.inputs[X].dtype
    return joined[0], form, dtype, coded


@operation
def given_by_rule(
    of: Callable[[Tensor], Tensor],
    form: str | None,
    dtype: torch.dtype,
    inputs: Mapping[str, Tensor],
) -> Mapping[str, Tensor]:
    """Return the inputs of a product whose numbers, decoded, were changed as a matrix."""
    return _input_changed(OperandChange("", partial(on_numbers, of)), form, dtype, inputs)


@operation
def _input_changed(
    change: OperandChange, form: str | None, dtype: torch.dtype, inputs: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    made = change.numbers(operand_of_input(inputs, form))
    lead = inputs[CODES if CODES in inputs else X].shape[:-1]
    rest = {name: tensor for name, tensor in inputs.items() if name not in _CODED}
    return {**rest, X: made.reshape(*lead, -1).to(dtype)}


def _of_input(views: Sequence[ProductView], operand: StoredOperand) -> Equations:
    """Join products of the same rows: all of them are equations for these."""
    width = operand.values.shape[1]
    others = []
    for view in views:
        high = view.seen.shape[1]
        other = torch.zeros(high, width, dtype=torch.float64)
        numbers = view.numbers[view.first_row : view.first_row + high] * view.gain
        other[:, view.first_column : view.first_column + numbers.shape[1]] = numbers
        others.append(other)
    seen, right, allowed = (
        torch.cat([getattr(view, side) for view in views], 1)
        for side in ("seen", "product", "allowed")
    )
    return Equations(operand, views[0].at, torch.cat(others), seen, right, allowed).in_proportion()
