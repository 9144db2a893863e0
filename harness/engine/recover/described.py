"""Describe a cause that no known fault is: recover what was computed, and predict with it.

What is recovered becomes a variant of the component like a known fault's, and is held to the same
proof on every row of every call; rows that were not fitted are among them. So a description is said
only if it predicts what it was not made from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import CANNOT_RUN, DegarbleError
from degarble.harness.engine.budget.roles import budgets_of
from degarble.harness.engine.budget.rules import JudgeableCall
from degarble.harness.engine.diagnose.conditions import condition_of
from degarble.harness.engine.diagnose.trial import (
    distance,
    explained,
    in_every_call,
    is_by_row,
    make,
)
from degarble.harness.engine.faults.model_faults import (
    FaultVariant,
    with_inputs,
    with_outputs,
    with_weights,
)
from degarble.harness.engine.faults.regions import full_name
from degarble.harness.engine.faults.weight_faults import numbers_of
from degarble.harness.engine.localise.discrepancy import outputs_beyond
from degarble.harness.engine.recover.choices import never_chosen, other_choices, other_numbers_given
from degarble.harness.engine.recover.column_orders import orders_of
from degarble.harness.engine.recover.column_parts import (
    columns_of_equations,
    columns_of_input,
    columns_of_weight,
    rules_in_columns,
)
from degarble.harness.engine.recover.differences import RecoveredRule, rows_rolled, rules_of
from degarble.harness.engine.recover.earlier_calls import earlier_rows
from degarble.harness.engine.recover.edits import edits_of, input_by, least, numbers_given
from degarble.harness.engine.recover.heads import other_angles, other_heads
from degarble.harness.engine.recover.maps import (
    Sides,
    as_matrix,
    maps_of,
    simplest,
)
from degarble.harness.engine.recover.matrices import (
    recovered_matrix,
    recovered_table,
    recovered_vector,
)
from degarble.harness.engine.recover.operands import operand_of
from degarble.harness.engine.recover.products import allowance, is_comparable, views_of
from degarble.harness.engine.recover.quantisers import decoded_input, quantiser_edits
from degarble.harness.engine.recover.responses import recovered_input, seen_rows
from degarble.harness.engine.recover.seen_keys import rules_of_entries, rules_of_keys
from degarble.harness.engine.recover.shares import shares_of
from degarble.harness.engine.recover.slots import (
    CACHE,
    rules_of_slots,
    written_otherwise,
    written_rows,
)
from degarble.harness.engine.recover.stated import operation
from degarble.harness.engine.recover.transposed import squares_of, turned_square
from degarble.harness.engine.recover.vectors import used_vectors
from degarble.harness.engine.recover.weights import (
    SHOWN,
    RecoveredWeight,
    UsedWeights,
    lines_of,
    recovered_weight,
    remedy_of,
    sentence_of,
)
from degarble.harness.engine.recover.whole import (
    causes_in_operands,
    equations_of_input,
    given_by_rule,
    height,
    largest_call,
)
from degarble.harness.formats.weight import Weight
from degarble.harness.report.number_text import number, share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.engine.diagnose.conditions import ActiveCondition
    from degarble.harness.engine.diagnose.trial import VariantFit
    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext

FEWEST_CHOSEN = 4  # rows with other choices
NEARLY = 0.1  # of the difference, that a rule with a fitted number leaves
ROUGHLY = 0.6  # that one with a coarse number leaves
SAME_NUMBER = 2.0**-8  # of a number, by which one of fewer digits may differ: BF16 keeps no more
MOST_RULES = 10  # of one output that are proved
MOST_SOURCES = 64  # weights of other components among whose rows copies are looked up
MOST_NUMBERS = 1 << 26  # of one of them: half a gigabyte


@dataclass(frozen=True, eq=False)
class Described:
    """A recovered cause: the sentence, the table of what differs, its proof."""

    sentence: str
    remedy: str
    table: tuple[str, ...]
    variant: FaultVariant
    fit: VariantFit
    here: bool = False  # said of rows of these calls, and of no other call
    context: ComponentContext | None = None  # in which it was described

    @property
    def evidence(self) -> str:
        """Return what was recovered and how much of the outputs it gives."""
        return (
            f"{self.sentence} That gives {share(self.fit.within)} of outputs within budget"
            f" ({share(self.fit.identical)} to the bit), rows that it was not read off among them."
        )


def describe(context: ComponentContext, calls: Sequence[CallRecord]) -> Described | None:
    """Recover what a component computed with; None where nothing that is recovered predicts it.

    The first call is the one that shows most.
    """
    if not calls or calls[0].implied:
        return None
    found = _described(context, calls) or _by_heads(context, calls) or _in_a_share(context, calls)
    return None if found is None else replace(found, context=context)


def shows_enough(calls: Sequence[CallRecord]) -> bool:
    """Return whether enough rows differ: many rules explain the choices of a few."""
    rows = 0
    for record in calls:
        struck = torch.zeros(height(record), dtype=torch.bool)
        for name, right in record.expected.items():
            seen = record.outputs.get(name)
            if seen is None or seen.shape != right.shape or right.ndim != 2:
                return True
            wrong = (seen != right).any(1)
            if right.is_floating_point() or right.itemsize == 1:
                if bool(wrong.any()):
                    return True
                continue
            struck |= wrong
        rows += int(struck.sum())
    return rows >= FEWEST_CHOSEN


def _in_a_share(context: ComponentContext, calls: Sequence[CallRecord]) -> Described | None:
    """Describe what only some heads, or one rank's columns, show: others may follow it or not."""
    cut = shares_of(context, calls)
    found = None if cut is None else _described(context, cut.calls)
    if cut is None or found is None:
        return None
    variant = cut.alone(found.variant)
    fit = _predicts(context, calls, variant)
    if fit is None:
        return None
    sentence = f"{found.sentence.removesuffix('.')}, in {cut.words} alone."
    return replace(found, sentence=sentence, variant=variant, fit=fit)


def _described(context: ComponentContext, calls: Sequence[CallRecord]) -> Described | None:
    found = (
        _by_weights(context, calls) or _by_keys(context, calls) or _by_slots(context, calls)
        or _by_outputs(context, calls)
    )  # fmt: skip
    if found is not None and found.here:
        # Rows that hold those of others in these calls may be the same number in every call.
        return _by_earlier_calls(context, calls) or _by_whole_numbers(context, calls) or found
    return (
        found
        or _by_earlier_calls(context, calls)
        or _by_inputs(context, calls)
        or _by_angles(context, calls)
        or _by_squares(context, calls)
        or _by_operands(context, calls)
        or _by_numbers(context, calls)
        or (_by_edits(context, calls) if shows_enough(calls) else None)
        or _by_vectors(context, calls)
        or _by_codes(context, calls)
        or _by_whole_numbers(context, calls)
        or _by_orders(context, calls)
        or _by_columns(context, calls)
    )


def _predicts(
    context: ComponentContext, calls: Sequence[CallRecord], variant: FaultVariant
) -> VariantFit | None:
    """Return the worst proof of all calls; None where one is not within its budget."""
    worst: VariantFit | None = None
    for record in calls:
        fit = _explained(context, record, variant)
        if fit is None and len(record.rows) > 1:  # what depends on places holds call by call
            fit = in_every_call(context, record, variant, _explained)
        if fit is None:
            return None
        if worst is None or fit.ratio > worst.ratio:
            worst = fit
    return worst


def _explained(
    context: ComponentContext, record: CallRecord, variant: FaultVariant
) -> VariantFit | None:
    try:
        return explained(context, record, variant)
    except CANNOT_RUN:
        return None  # what it makes of this call cannot be judged: places that are not there


# ---- weights as they were used -------------------------------------------------------------------


def _by_weights(context: ComponentContext, calls: Sequence[CallRecord]) -> Described | None:
    found: list[RecoveredWeight] = []
    by_name: dict[str, list[RecoveredWeight]] = {}
    copied: dict[str, Tensor] = {}
    own = {full_name(context, name): numbers_of(w) for name, w in context.weights.items()}
    for view in views_of(context, calls[0]):
        if not bool(view.wrong.any()):
            continue
        name, width = full_name(context, view.name), view.numbers.shape[1]
        sources = {each: numbers for each, numbers in own.items() if _has_width(numbers, width)}
        elsewhere = islice(_elsewhere(context, width), MOST_SOURCES)
        recovered = recovered_weight(view, name, sources, elsewhere)
        if recovered is None:
            return None
        found.append(recovered[0])
        by_name.setdefault(view.name, []).append(recovered[0])
        copied |= recovered[1]
    if not found:
        return None
    variant = FaultVariant(
        "the weight as it was used", with_weights(UsedWeights(context, by_name, copied))
    )
    fit = _predicts(context, calls, variant)
    if fit is None:
        return None
    sentence = sentence_of(found, len(context.weights))
    kinds = {type(change) for each in found for row in each.rows for change in row.changes}
    return Described(sentence, remedy_of(kinds), lines_of(found), variant, fit)


def _has_width(numbers: Tensor, width: int) -> bool:
    return numbers.ndim == 2 and numbers.shape[1] == width


def _elsewhere(context: ComponentContext, width: int) -> Iterator[tuple[str, Tensor]]:
    """Yield weights of other components of this width, those of the same role first."""
    names = [name for name in context.bound.calls if name != context.name]
    siblings = [sibling for name in names if (sibling := context.sibling(name)) is not None]
    for sibling in sorted(siblings, key=lambda each: each.role != context.role):
        try:
            weights = dict(sibling.weights)
        except KeyError:
            continue  # the model was bound for one component
        for name, weight in weights.items():
            rows, columns = weight.shape if len(weight.shape) == 2 else (0, 0)
            if columns == width and rows * columns <= MOST_NUMBERS:
                yield full_name(sibling, name), numbers_of(weight)


# ---- an operand that was another one as a whole --------------------------------------------------


def _by_operands(context: ComponentContext, calls: Sequence[CallRecord]) -> Described | None:
    views = list(views_of(context, calls[0]))
    for cause in causes_in_operands(context, calls[0], views):
        fit = _predicts(context, calls, cause.variant)
        if fit is not None:
            return Described(
                f"The outputs follow if {cause.words}.",
                _QUANTISER if cause.of_input else _LOADER,
                cause.table[:SHOWN],
                cause.variant,
                fit,
            )
    return None


def _by_squares(context: ComponentContext, calls: Sequence[CallRecord]) -> Described | None:
    wrong = [view for view in views_of(context, calls[0]) if bool(view.wrong.any())]
    held: list[tuple[FaultVariant, VariantFit]] = []
    for what, square in islice(squares_of(wrong[0]), MOST_RULES) if len(wrong) == 1 else ():
        words = f"{square.words} are transposed"
        rule = RecoveredRule(words, partial(turned_square, square))
        variant = _ruled_weight(context, wrong[0].name, what, rule)
        fit = _predicts(context, calls, variant)
        if fit is not None:
            held.append((variant, fit))
    return _first_of(held, _LOADER)


def _first_of(
    held: Sequence[tuple[FaultVariant, VariantFit]],
    remedy: str,
    begin: str = "The outputs follow if",
) -> Described | None:
    """Describe the first variant that explains the outputs, and name the others."""
    if not held:
        return None
    variant, fit = held[0]
    return Described(f"{begin} {variant.words}{_others(held)}.", remedy, (), variant, fit)


def _others(held: Sequence[tuple[FaultVariant, object]]) -> str:
    """Name the variants after the first that explain the outputs as well."""
    several = " or ".join(other.words for other, _ in held[1:])
    return f" (or {several}: these explain it as well)" if several else ""


def _by_edits(context: ComponentContext, calls: Sequence[CallRecord]) -> Described | None:
    coded = quantiser_edits(context, largest_call(calls[0]))
    for variant in (*coded, *edits_of(context, calls[0])):
        fit = _predicts(context, calls, variant)
        if fit is not None:
            sentence = f"The outputs follow if {variant.words}."
            return Described(sentence, _COMPONENT, (), variant, fit)
    return None


_COMPONENT = (
    "Compare the kernel's operands, constants and roundings with the component's definition."
)
_LOADER = (
    "Look at how the weight is decoded: formats, order of codes and scales, loader and packer."
)
_QUANTISER = "Look at the quantiser of the input, and at how the kernel reads codes and scales."


# ---- what was done to the right outputs ----------------------------------------------------------


def _by_outputs(context: ComponentContext, calls: Sequence[CallRecord]) -> Described | None:
    # Rows of one call may be counted, or have moved within it.
    largest = max((largest_call(record) for record in calls), key=height)
    for record in (calls[0], *(() if largest is calls[0] else (largest,))):
        sides = list(_sides(context, record))
        for found in (each for side in sides for each in maps_of(side)):
            change = with_outputs(partial(mapped, found.output, found.apply))
            variant = FaultVariant(found.words, change)
            fit = _predicts(context, calls, variant)
            if fit is not None:
                return _of_output(found.output, variant, fit, here=found.here)
        for side in sides:
            like = record.expected[side.output]
            for wide, rule in _by_extents(side, like):
                made = partial(_ruled_output, side.output, wide)
                proved = _proved(context, calls, rule, made)
                if proved is not None:
                    return _of_output(side.output, *proved[1:], table=proved[0].table)
            for variant in _sums(side, record):
                fit = _predicts(context, calls, variant)
                if fit is not None:
                    return _of_output(side.output, variant, fit)
    return None


def _by_earlier_calls(context: ComponentContext, calls: Sequence[CallRecord]) -> Described | None:
    if len(calls) != 1:
        return None
    variants = earlier_rows(list(_sides(context, calls[0])), calls[0])
    fits = [(variant, _predicts(context, calls, variant)) for variant in variants]
    held = [(variant, fit) for variant, fit in fits if fit is not None]
    return _first_of(held, _CALLS, "The outputs are the right ones, but")


_CALLS = "Look at buffers that several calls share: offsets, when they are written, graph replays."


def in_some_rows(
    context: ComponentContext, calls: Sequence[CallRecord]
) -> tuple[Described, ActiveCondition] | None:
    """Describe rows that show other keys, or what belongs to a row beside them, and when.

    Calls are single ones. Wrong rows cannot be cut out of them, since they need their neighbours.
    What was done to the right outputs of these rows is described there as well.
    """
    struck = [(call, bad) for call in calls if (bad := _struck(context, call)) is not None]
    if not struck:
        return None
    cut = [replace(call, held=bad) for call, bad in struck]

    def held(variant: FaultVariant) -> tuple[FaultVariant, VariantFit, ActiveCondition] | None:
        fits = [_explained(context, call, variant) for call in cut]
        known = [fit for fit in fits if fit is not None]
        condition = condition_of(context, calls, variant) if len(known) == len(fits) else None
        if condition is None:
            return None
        return variant, max(known, key=lambda each: each.ratio), condition

    of_keys = [variant for group in rules_of_keys(context, calls)[:1] for variant in group]
    found = [each for each in map(held, of_keys) if each is not None]
    by_row = all(is_by_row(context, call) for call in calls)
    ways = [(_FOLLOW, _READING, iter(_beside(calls[0]) if by_row else ()))]
    if not by_row:
        most = max(cut, key=_looked_at)
        ways.append((_ARE_RIGHT, _EPILOGUE, _stored_otherwise(context, most)))
    begin, remedy = _FOLLOW, _MASK
    for begins, own, variants in () if found else ways:
        found = list(islice((each for each in map(held, variants) if each is not None), 1))
        if found:
            begin, remedy = begins, own
            break
    if not found:
        return None
    variant, worst, condition = found[0]
    others = _others([(each, fit) for each, fit, _ in found])
    sentence = f"{begin} {variant.words}{others}."
    return Described(sentence, remedy, (), variant, worst, context=context), condition


_FOLLOW = "The outputs follow if"
_ARE_RIGHT = "The outputs are the right ones in which"


def _looked_at(record: CallRecord) -> int:
    """Count the numbers that a variant has to give."""
    return sum(int(mask.sum()) for mask in record.held.values())


def _stored_otherwise(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    """Yield what was done to the right outputs of the rows that are looked at."""
    for side in _sides(context, record):
        mask = record.held.get(side.output)
        if mask is None:
            continue
        rows = as_matrix(mask).any(1)
        seen, right, allowed = (x[rows] for x in (side.seen, side.right, side.allowed))
        part = replace(side, seen=seen, right=right, allowed=allowed)
        for found in maps_of(part):
            if not found.here:
                change = with_outputs(partial(mapped, found.output, found.apply))
                yield FaultVariant(found.words, change)
        made = partial(_ruled_output, side.output, side.seen.shape[-1])
        for rule in islice(rules_of(part), MOST_RULES):
            yield made(rule)
            if rule.again is not None:
                yield made(_refined(context, record, rule, made))


def _struck(context: ComponentContext, call: CallRecord) -> dict[str, Tensor] | None:
    """Return masks of the rows that are beyond their budgets; None where none are, or unknown."""
    beyond = outputs_beyond(context, call, call.outputs)
    if not beyond or any(bad.ndim < 1 for bad, _ in beyond.values()):
        return None
    if not any(certain for _, certain in beyond.values()):
        return None  # roundings alone
    if len({len(bad) for bad, _ in beyond.values()}) > 1:
        return None  # rows of one output are no tokens of another
    sure = [bad for bad, certain in beyond.values() if certain]
    rows = torch.stack([bad.reshape(len(bad), -1).any(1) for bad in sure]).any(0)
    if not bool(rows.any()):
        return None
    return {
        name: rows.reshape(-1, *[1] * (bad.ndim - 1)).expand(bad.shape)
        for name, (bad, _) in beyond.items()
    }


def _beside(record: CallRecord) -> Iterator[FaultVariant]:
    for by, words in ((1, "the row before"), (-1, "the row after")):
        around = f"those of {words}, around the end of a call"
        for name, tensor in record.expected.items():
            if tensor.ndim:
                rolled = partial(mapped, name, partial(torch.roll, shifts=by, dims=0))
                yield FaultVariant(f"rows of the output {name} are {around}", with_outputs(rolled))
        for name, tensor in record.inputs.items():
            if tensor.ndim:
                moved_rows = with_inputs(partial(_rolled_input, name, by))
                yield FaultVariant(f"rows of the input {name} are {around}", moved_rows)


@operation
def _rolled_input(name: str, by: int, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {**inputs, name: inputs[name].roll(by, 0)}


def _of_output(
    output: str,
    variant: FaultVariant,
    fit: VariantFit,
    *,
    table: tuple[str, ...] = (),
    here: bool = False,
) -> Described:
    what = "" if output == "out" else f" of {output}"
    where = f"{what} of these calls" if here else what
    sentence = f"The outputs{where} are the right ones in which {variant.words}."
    return Described(sentence, _EPILOGUE, table[:SHOWN], variant, fit, here)


_EPILOGUE = "Look at how results are stored: epilogue, offsets of rows and tiles, casts."


@operation
def mapped(
    output: str,
    of: Callable[[Tensor], Tensor],
    _inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
) -> Mapping[str, Tensor]:
    """Return outputs of which one was changed, as a matrix."""
    right = outputs[output]
    return {**outputs, output: of(as_matrix(right)).reshape(right.shape).to(right.dtype)}


def _ruled(proved: tuple[RecoveredRule, FaultVariant, VariantFit], remedy: str) -> Described:
    rule, variant, fit = proved
    sentence = f"The outputs follow if {variant.words}."
    return Described(sentence, remedy, rule.table[:SHOWN], variant, fit)


def _ruled_output(output: str, wide: int, rule: RecoveredRule) -> FaultVariant:
    change = with_outputs(partial(mapped, output, partial(in_rows, rule.apply, wide)))
    return FaultVariant(rule.words, change, stores_within=rule.adds)


def _by_extents(sides: Sides, like: Tensor) -> Iterator[tuple[int, RecoveredRule]]:
    """Yield rules for rows of the last extent, then for rows of all but the first."""
    for wide in dict.fromkeys((like.shape[-1], like[0].numel())):
        seen, right, allowed = (
            side.reshape(-1, wide) for side in (sides.seen, sides.right, sides.allowed)
        )
        own = replace(sides, seen=seen, right=right, allowed=allowed)
        for rule in islice(rules_of(own), MOST_RULES):
            yield wide, rule
    yield from ((wide, rule) for rule in rows_rolled(own))


@operation
def in_rows(of: Callable[[Tensor], Tensor], wide: int, right: Tensor) -> Tensor:
    """Return numbers of which rows of so many were changed."""
    if right.numel() % wide:
        return right
    return of(right.reshape(-1, wide)).reshape(right.shape)


def _proved(
    context: ComponentContext,
    calls: Sequence[CallRecord],
    rule: RecoveredRule,
    made: Callable[[RecoveredRule], FaultVariant],
    nearly: float = NEARLY,
) -> tuple[RecoveredRule, FaultVariant, VariantFit] | None:
    """Prove a rule; if it has a number, with the one that leaves least as well."""
    variant = made(rule)
    fit = _predicts(context, calls, variant)
    if fit is None and rule.again is not None:
        rule = _refined(context, calls[0], rule, made, nearly)
        variant = made(rule)
        fit = _predicts(context, calls, variant)
    return None if fit is None else _in_fewest_digits(context, calls, (rule, variant, fit), made)


def _in_fewest_digits(
    context: ComponentContext,
    calls: Sequence[CallRecord],
    proved: tuple[RecoveredRule, FaultVariant, VariantFit],
    made: Callable[[RecoveredRule], FaultVariant],
) -> tuple[RecoveredRule, FaultVariant, VariantFit]:
    """Return the rule with the number of fewest digits that gives as much as the one it has."""
    rule, _, fit = proved
    for digits in range(1, 4) if rule.again is not None else ():
        plain = float(f"{rule.value:.{digits}g}")
        if plain == rule.value:
            break
        if abs(plain - rule.value) > SAME_NUMBER * abs(rule.value):
            continue
        assert rule.again is not None, "it has a number"
        other = rule.again(plain)
        variant = made(other)
        own = _predicts(context, calls, variant)
        if own is not None and own.identical >= fit.identical and own.ratio <= fit.ratio:
            return other, variant, own
    return proved


def _refined(
    context: ComponentContext,
    record: CallRecord,
    rule: RecoveredRule,
    made: Callable[[RecoveredRule], FaultVariant],
    nearly: float = NEARLY,
) -> RecoveredRule:
    """Return a rule with the number that leaves least of the difference."""
    again, seen = rule.again, record.outputs
    assert again is not None, "it has a number"

    def left(value: float) -> float:
        outputs = make(context, record, made(again(value)))
        return 2.0 if outputs is None else distance(seen, outputs.outputs)

    if left(rule.value) > nearly * distance(seen, record.expected):
        return rule
    span = NEARLY * abs(rule.value)
    value = least(left, rule.value - span, rule.value + span)
    leaves = left(value)
    for digits in range(1, 8):
        plain = float(f"{value:.{digits}g}")
        if left(plain) <= leaves * 1.05 + 1e-9:
            return again(plain)
    return again(value)


def _sums(sides: Sides, record: CallRecord) -> Iterator[FaultVariant]:
    """Yield inputs that were added to an output."""
    gap = sides.seen - sides.right
    weigh = 1 / sides.allowed.clamp(min=1e-300)
    for name, tensor in record.inputs.items():
        if tensor.numel() != gap.numel() or not tensor.is_floating_point():
            continue
        added = tensor.double().reshape(gap.shape) * weigh
        along = float(added.square().sum())
        if along <= 0:
            continue
        factor = simplest(float((added * gap * weigh).sum()) / along, along**-0.5)
        made = sides.right + factor * added / weigh
        if factor and bool(sides.equal(sides.seen, made, sides.allowed).all()):
            times = "" if abs(factor) == 1 else f" {number(abs(factor), 4)} times"
            words = f"the input {name} is {'added' if factor > 0 else 'subtracted'}{times}"
            change = with_outputs(partial(added_to, sides.output, name, factor))
            yield FaultVariant(words, change, stores_within=True)  # sums cancel what was rounded


@operation
def added_to(
    output: str,
    name: str,
    factor: float,
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
) -> Mapping[str, Tensor]:
    """Return outputs to one of which an input was added."""
    right = outputs[output]
    made = right.double() + factor * inputs[name].double().reshape(right.shape)
    return {**outputs, output: made.to(right.dtype)}


# ---- inputs as they were used --------------------------------------------------------------------


def _by_inputs(context: ComponentContext, calls: Sequence[CallRecord]) -> Described | None:
    record = calls[0]
    if not is_by_row(context, record):
        return None
    sides = [each for each in _sides(context, record) if each.loose]
    if len(sides) < len(record.expected):
        return None
    seen = seen_rows(context, record.inputs, sides, None)
    if seen is None:
        return None
    for name, tensor in numbers_given(record).items():
        for found in recovered_input(seen, name):
            for wide, rule in _by_extents(found, tensor):
                proved = _proved(context, calls, rule, partial(_ruled_input, name, wide))
                if proved is not None:
                    return _ruled(proved, _READING)
    return None


def _by_vectors(context: ComponentContext, calls: Sequence[CallRecord]) -> Described | None:
    sides = [each for each in _sides(context, calls[0]) if each.loose]
    for found in used_vectors(context, calls[0], sides):
        proved = _proved(context, calls, found.rule, found.made)
        if proved is not None:
            return _ruled(proved, _COMPONENT)
    return None


def _by_codes(context: ComponentContext, calls: Sequence[CallRecord]) -> Described | None:
    found = decoded_input(context, calls[0])
    if found is None:
        return None
    for wide, rule in _by_extents(found, calls[0].inputs[found.output]):
        made = partial(_ruled_input, found.output, wide)
        proved = _proved(context, calls, rule, made, nearly=1.0)  # codes are coarse
        if proved is not None:
            return _ruled(proved, _QUANTISER)
    return None


def _by_whole_numbers(context: ComponentContext, calls: Sequence[CallRecord]) -> Described | None:
    held: list[tuple[FaultVariant, VariantFit]] = []
    for variant in (
        *other_choices(calls[0]), *never_chosen(calls), *other_numbers_given(context, calls[0])
    ):  # fmt: skip
        fit = _predicts(context, calls, variant)
        if fit is not None:
            held.append((variant, fit))
    return _first_of(held[:SHOWN], _COMPONENT)


def _by_orders(context: ComponentContext, calls: Sequence[CallRecord]) -> Described | None:
    wrong = [view for view in views_of(context, calls[0]) if bool(view.wrong.any())]
    if not wrong:
        return None
    joined = equations_of_input(context, calls[0], wrong)
    for rule in islice(orders_of(joined[0]), MOST_RULES):
        variant = _ruled_numbers_given(*joined[1:], rule)
        fit = _predicts(context, calls, variant)
        if fit is not None:
            return _ruled((rule, variant, fit), _READING)
    return None


def _by_columns(context: ComponentContext, calls: Sequence[CallRecord]) -> Described | None:
    for rule, made, remedy in _in_columns(context, calls[0]):
        proved = _proved(context, calls, rule, made, nearly=ROUGHLY)  # bounds are tried coarsely
        if proved is not None:
            return _ruled(proved, remedy)
    return None


def _in_columns(
    context: ComponentContext, record: CallRecord
) -> Iterator[tuple[RecoveredRule, Callable[[RecoveredRule], FaultVariant], str]]:
    """Yield one operation in some columns of a weight or of an input, with how it is tried."""
    wrong = [view for view in views_of(context, record) if bool(view.wrong.any())]
    if len({view.name for view in wrong}) == 1:
        made = partial(_ruled_weight, context, wrong[0].name, "numbers")
        for tables, rows in map(columns_of_weight, wrong[:1]):
            yield from ((rule, made, _LOADER) for rule in rules_in_columns(tables, rows))
    if wrong:
        joined = equations_of_input(context, record, wrong)
        made = partial(_ruled_numbers_given, *joined[1:])
        tables = columns_of_equations(joined[0])
        yield from ((rule, made, _READING) for rule in rules_in_columns(tables))
        return
    sides = [each for each in _sides(context, record) if each.loose]
    if not sides or len(sides) < len(record.expected) or not is_by_row(context, record):
        return
    seen = seen_rows(context, record.inputs, sides, None)
    if seen is None:
        return
    for name, tensor in numbers_given(record).items():
        own = columns_of_input(seen, name)
        made = partial(_ruled_input, name, tensor.shape[-1])
        if own is not None:
            yield from ((rule, made, _READING) for rule in rules_in_columns(own))


_READING = "Look at how the kernel reads this input: offsets, tiles, casts, what was fused into it."


def _ruled_numbers_given(
    form: str | None, dtype: torch.dtype, coded: bool, rule: RecoveredRule
) -> FaultVariant:
    words = f"in the {'quantised ' if coded else ''}input {rule.words}"
    return FaultVariant(words, with_inputs(partial(given_by_rule, rule.apply, form, dtype)))


def _ruled_input(name: str, wide: int, rule: RecoveredRule) -> FaultVariant:
    change = with_inputs(partial(input_by, name, partial(in_rows, rule.apply, wide)))
    return FaultVariant(f"in the input {name}, {rule.words}", change)


# ---- keys that attention saw ---------------------------------------------------------------------


def _by_keys(context: ComponentContext, calls: Sequence[CallRecord]) -> Described | None:
    """Say which keys were seen; all rules that hold, where the calls do not tell them apart."""
    entries = [[variant] for variant in rules_of_entries(context, calls)]
    for group in (*rules_of_keys(context, calls), *entries):
        fits = [(variant, _predicts(context, calls, variant)) for variant in group]
        held = [(variant, fit) for variant, fit in fits if fit is not None]
        if held:
            return _first_of(held, _MASK)
    return None


def _by_slots(context: ComponentContext, calls: Sequence[CallRecord]) -> Described | None:
    """Say which slots of a cache hold what; all rules that hold, where calls do not tell."""
    for group in rules_of_slots(context, calls):
        fits = [(variant, _predicts(context, calls, variant)) for variant in group]
        held = [(variant, fit) for variant, fit in fits if fit is not None]
        if held:
            return _first_of(held, _SLOTS)
    if context.component.kind == CACHE and len(calls) > 1:
        return _as_written(context, calls)
    return None


def _as_written(context: ComponentContext, calls: Sequence[CallRecord]) -> Described | None:
    """Say what was done to the rows that each call wrote to a cache."""
    most = max(calls, key=lambda record: int(record.inputs["positions"].numel()))
    for side in _sides(context, most):
        right = most.expected[side.output]
        new = written_rows(most, len(right))
        if new is None:
            return None
        rows = new.repeat_interleave(len(side.seen) // len(right))
        seen, own, allowed = (x[rows] for x in (side.seen, side.right, side.allowed))
        part = replace(side, seen=seen, right=own, allowed=allowed)
        for rule in islice(rules_of(part), MOST_RULES):
            made = partial(_written_by, side.output)
            proved = _proved(context, calls, rule, made)
            if proved is not None:
                where = "" if len(most.expected) == 1 else f" of {side.output}"
                words = f"In the rows{where} that a call writes, {proved[1].words}."
                return Described(words, _SLOTS, proved[0].table[:SHOWN], *proved[1:])
    return None


def _written_by(output: str, rule: RecoveredRule) -> FaultVariant:
    return FaultVariant(rule.words, with_outputs(partial(written_otherwise, output, rule.apply)))


_SLOTS = "Look at how slots and pages of the cache are addressed, and when they are written."


def _by_heads(context: ComponentContext, calls: Sequence[CallRecord]) -> Described | None:
    """Say which heads of keys and values the query heads met."""
    variants = other_heads(context, calls[0], list(_sides(context, calls[0])))
    fits = [(variant, _predicts(context, calls, variant)) for variant in variants]
    return _first_of([(each, fit) for each, fit in fits if fit is not None], _HEADS)


_HEADS = "Look at how heads of queries are counted in those of keys: groups, ranks, offsets."


def _by_angles(context: ComponentContext, calls: Sequence[CallRecord]) -> Described | None:
    """Say by which other position's angles rows were rotated."""
    for variant in other_angles(context, calls[0]):
        fit = _predicts(context, calls, variant)
        if fit is not None:
            return _first_of([(variant, fit)], _READING)
    return None


_MASK = "Look at the mask: bounds of the loop over keys, windows, offsets of queries and keys."


# ---- numbers of a weight by rows and columns -----------------------------------------------------


def _by_numbers(context: ComponentContext, calls: Sequence[CallRecord]) -> Described | None:
    for name, part, sides in _recovered_weights(context, calls[0]):
        for rule in islice(rules_of(sides, rows=True), MOST_RULES):
            made = partial(_ruled_weight, context, name, part)
            proved = _proved(context, calls, rule, made)
            if proved is not None:
                return _ruled(proved, _LOADER)
    return None


def _recovered_weights(
    context: ComponentContext, record: CallRecord
) -> Iterator[tuple[str, str, Sides]]:
    """Yield names of weights, which of their parts, and what these were; one may be wrong."""
    wrong = [view for view in views_of(context, record) if bool(view.wrong.any())]
    found = recovered_matrix(wrong[0]) if len(wrong) == 1 else None
    if found is not None:
        name = wrong[0].name
        yield name, "numbers", found
        operand = operand_of(wrong[0].weight)
        if operand.form is not None:
            unit = (operand.spread(operand.scales) * operand.factor).expand_as(operand.values)
            unit = torch.where(unit == 0, 1.0, unit)
            yield name, "elements", replace(
                found, seen=found.seen / unit, right=operand.values,
                allowed=found.allowed / unit.abs(),
            )  # fmt: skip
    sides = [each for each in _sides(context, record) if each.loose]
    if found is not None or len(sides) < len(record.expected):
        return
    for name, weight in dict(context.weights).items():
        if len(sides) == 1 and len(weight.shape) == 2 and len(context.weights) == 1:
            table = recovered_table(record.inputs, weight, sides[0])
            if table is not None:
                yield name, "numbers", table
                continue
        if not weight.is_quantised and weight.shape:
            vector = recovered_vector(context, record, name, sides)
            if vector is not None:
                yield name, "numbers", vector


def _ruled_weight(
    context: ComponentContext, name: str, part: str, rule: RecoveredRule
) -> FaultVariant:
    what = f"the {part} of " if part != "numbers" else ""
    words = f"in {what}{full_name(context, name)}, {rule.words}"
    return FaultVariant(words, with_weights(partial(weight_by, name, part, rule.apply)))


@operation
def weight_by(
    name: str, part: str, of: Callable[[Tensor], Tensor], own: str, weight: Weight
) -> Weight:
    """Return a weight of which one part was changed as a matrix, if it is the one of this name."""
    if own != name:
        return weight
    if part == "elements":
        operand = operand_of(weight)
        made = replace(operand, values=of(operand.values)).numbers
    else:
        numbers = numbers_of(weight).double()
        wide = numbers.shape[-1] if numbers.ndim else 1
        made = of(numbers.reshape(-1, wide)).reshape(numbers.shape)
    if weight.value is not None:
        made = made.to(weight.value.dtype)
    return Weight(value=made, input_scale=weight.input_scale)


def _is_coded(x: Tensor) -> bool:
    return x.ndim > 1 and (not x.is_floating_point() or x.itemsize == 1)


def _sides(context: ComponentContext, record: CallRecord) -> Iterator[Sides]:
    """Yield the outputs of numbers that differ, with what they may."""
    call = JudgeableCall.from_twin(context.bound, context.name, record.inputs, record.expected)
    try:
        budgets = budgets_of(call)
    except DegarbleError:
        budgets = {}
    for name, right in record.expected.items():
        seen, budget = record.outputs.get(name), budgets.get(name)
        if not right.numel():
            continue  # tokens that fill no entry
        if seen is not None and seen.shape == right.shape and _is_coded(right):
            one, other = as_matrix(seen), as_matrix(right)
            allowed = torch.zeros_like(other)
            if name in record.held:
                allowed[as_matrix(record.held[name]) == 0] = torch.inf
            yield Sides(name, one, other, allowed, 0.0)
        if seen is None or not is_comparable(seen, right):
            continue
        if budget is None:  # scales that are handed on
            one, other = as_matrix(seen), as_matrix(right)
            size = torch.maximum(one.abs(), other.abs())
            yield Sides(name, one, other, size * torch.finfo(right.dtype).eps * 2)
            continue
        slack = as_matrix(budget.slack.double().expand(right.shape))
        one, other = as_matrix(seen), as_matrix(right)
        allowed = allowance(one, other, slack, budget.output)
        if name in record.held:
            allowed = torch.where(as_matrix(record.held[name]) > 0, allowed, torch.inf)
        yield Sides(name, one, other, allowed)
