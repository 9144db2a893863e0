"""Try what may have been done to anything that a component computes with.

Inputs, weights, positions, numbers of the config, switches of the arithmetic, results on their way:
each is changed by the same few functions and rules, and the twin runs with it. A number is fitted
to a sample of the call. What leaves little of the difference there is for the proof to judge; no
list of known faults is read.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import CANNOT_RUN, DegarbleError
from degarble.harness.engine.diagnose.trial import beginning, distance, make, sampled
from degarble.harness.engine.faults.model_faults import (
    FaultVariant,
    decoded,
    facts_at,
    facts_of,
    has_facts,
    unrounded,
    unrounded_output,
    with_config,
    with_facts,
    with_inputs,
    with_outputs,
    with_switches,
    with_weights,
)
from degarble.harness.engine.faults.regions import full_name
from degarble.harness.engine.faults.weight_faults import numbers_of
from degarble.harness.engine.recover.changes import requantised
from degarble.harness.engine.recover.maps import simplest
from degarble.harness.engine.recover.numbers import functions, places
from degarble.harness.engine.recover.products import views_of
from degarble.harness.engine.recover.stated import operation
from degarble.harness.formats.number_formats import BLOCK_FORMATS
from degarble.harness.formats.weight import Weight
from degarble.harness.report.number_text import number
from degarble.references.linears import BLOCK_SCALE, CODES, TENSOR_SCALE, X_LOOSE, X
from degarble.references.numerics import InputQuantisation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.diagnose.trial import Sample
    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext

    Tensors = Mapping[str, Tensor]

LEAVES = 0.3  # of the difference in a sample, at most
MOST_PROVED = 8
POSITIONS = "positions"
CHOSEN = "chosen"
FEW_CHOSEN = 16  # places of a list, of which each is tried
FEWEST_NUMBERS = 4  # of a weight, that a function has to give
FEW_PLACES = 64  # of an axis along which every rule is tried
_GRID = (
    0.0, 1e-3, 0.01, 0.1, 0.25, 0.5, 0.8, 0.9, 1.1, 1.25, 2.0, 4.0, 10.0, 100.0, 1e3, 1e4, 1e5,
)  # fmt: skip
_TURNS = 24  # of a search for a number
_GOLDEN = 0.6180339887498949
_MOST_POWER = 30  # of two, in front of FP16
_SHIFTS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128)
_UNITS = range(2, 65)  # by which positions may be counted
_COUNTED = 1000  # a whole number of the config above this is taken for a real one
_PARTS = (32, 64, 128)  # columns of a partial sum
NEAR_FITTED = 2.0**-7  # of a number fitted to a sample: the range searched again over all rows
_ROUNDING = 2.0**-9
_CODED = frozenset({CODES, BLOCK_SCALE, TENSOR_SCALE, X_LOOSE})


@dataclass(frozen=True, eq=False)
class _Tried:
    """A variant, the share of the difference that it leaves, and its place in the order."""

    variant: FaultVariant
    left: float
    order: int


def edits_of(context: ComponentContext, record: CallRecord) -> list[FaultVariant]:
    """Return the edits that leave little of the difference, the best and simplest first."""
    sample = sampled(context, beginning(context, record))
    if not sample.before(distance):
        return []
    tried = []
    for order, variant in enumerate(_edits(context, sample, record)):
        left = _left(context, sample, variant)
        if left <= LEAVES:
            tried.append(_Tried(variant, left, order))
    tried.sort(key=lambda each: (math.floor(math.log(each.left + 1e-6, 4.0)), each.order))
    return [each.variant for each in tried[:MOST_PROVED]]


def _left(context: ComponentContext, sample: Sample, variant: FaultVariant) -> float:
    made = make(context, sample.record, variant, sample.plain)
    if made is None:
        return 1.0
    return distance(sample.candidate, sample.looked_at(made.outputs)) / sample.before(distance)


def _edits(context: ComponentContext, sample: Sample, record: CallRecord) -> Iterator[FaultVariant]:
    yield from _passed(sample.record)
    yield from _of_weights(context, record)
    yield from _of_inputs(sample.record)
    yield from _scaled_inputs(context, sample, record)
    yield from _of_positions(context, sample, record)
    yield from _of_chosen(sample.record)
    if has_facts(context):
        yield from _on_their_way(context, sample)
        read = _fields_read(context, sample)
        yield from _of_switches(context, read)
        yield from _of_config(context, sample, read)


# ---- outputs -------------------------------------------------------------------------------------


def _passed(record: CallRecord) -> Iterator[FaultVariant]:
    """An input passes, or one output is in the place of another."""
    for out, right in record.expected.items():
        for name, given in record.inputs.items():
            if given.numel() == right.numel() and given.is_floating_point():
                yield FaultVariant(
                    f"{_named(out, record.expected)} is the input {name}, unchanged",
                    with_outputs(partial(_input_as_output, name, out)),
                )
    for one, other in permutations(record.expected, 2):
        if record.expected[one].shape == record.expected[other].shape:
            yield FaultVariant(
                f"the output {one} holds {other}", with_outputs(partial(_exchanged, one, other))
            )


def _named(output: str, outputs: Tensors) -> str:
    return "the output" if len(outputs) == 1 else f"the output {output}"


@operation
def _input_as_output(name: str, out: str, inputs: Tensors, outputs: Tensors) -> Tensors:
    right = outputs[out]
    return {**outputs, out: inputs[name].reshape(right.shape).to(right.dtype)}


@operation
def _exchanged(one: str, other: str, _inputs: Tensors, outputs: Tensors) -> Tensors:
    return {**outputs, one: outputs[other]}


# ---- weights -------------------------------------------------------------------------------------


def _of_weights(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    """Vectors and tables are changed whole; matrices of products are tried row by row elsewhere."""
    weights = dict(context.weights)
    for name in context.bound.calls:
        sibling = context.sibling(name) if name != context.name else None
        if sibling is None or sibling.role != context.role:
            continue
        yield FaultVariant(
            f"its weights are those of {name}", with_weights(partial(_of_sibling, sibling))
        )
    few = {name: weight for name, weight in weights.items() if len(weight.shape) == 1}
    if len(weights) <= 4:
        multiplied = {view.name for view in views_of(context, record) if bool(view.wrong.any())}
        plain = {name: weight for name, weight in weights.items() if not weight.is_quantised}
        few = {name: weight for name, weight in plain.items() if name not in multiplied}
    few = {name: weight for name, weight in few.items() if _shows_enough(weight, record)}
    groups: list[tuple[str, ...]] = [(name,) for name in few]
    if len(few) > 1:
        groups.append(tuple(few))
    for names in groups:
        text = full_name(context, names[0]) if len(names) == 1 else "each of its weights"
        for each in functions():
            yield FaultVariant(
                f"every number of {text} is {each.words}",
                with_weights(partial(_by_function, frozenset(names), each.apply)),
            )
        shape = few[names[0]].shape
        for axis, count in enumerate(shape):
            of = ("rows", "columns")[axis] if len(shape) == 2 else "numbers"
            for rule in places(count):
                yield FaultVariant(
                    f"the {of} of {text} are {rule.words}",
                    with_weights(partial(_by_places, frozenset(names), axis, rule.of)),
                )
        for form in BLOCK_FORMATS.values() if len(shape) == 2 else ():
            if not form.zero_point:
                made = partial(_by_function, frozenset(names), partial(requantised, form))
                words = f"every number of {text} is quantised to {form.name}"
                yield FaultVariant(words, with_weights(made))


def _shows_enough(weight: Weight, record: CallRecord) -> bool:
    """Return whether outputs that are looked at show enough numbers of a weight for a function.

    Where it has one number for a head, and few heads are looked at, many functions give these.
    """
    heads = [
        mask.any(2).any(0)
        for mask in record.held.values()
        if mask.ndim == 3 and weight.shape == mask.shape[1:2]
    ]
    return not heads or int(torch.stack(heads).any(0).sum()) >= FEWEST_NUMBERS


@operation
def _of_sibling(sibling: ComponentContext, name: str, weight: Weight) -> Weight:
    parts = name.split(".")
    for other, held in dict(sibling.weights).items():
        if other == name or (sibling.component.block is None and other.split(".")[-1] == parts[-1]):
            return held if held.shape == weight.shape else weight
    return weight


@operation
def _by_function(
    names: frozenset[str], of: Callable[[Tensor], Tensor], name: str, weight: Weight
) -> Weight:
    if name not in names:
        return weight
    return Weight(value=of(numbers_of(weight).double()), input_scale=weight.input_scale)


@operation
def _by_places(
    names: frozenset[str], axis: int, of: Callable[[int], Tensor], name: str, weight: Weight
) -> Weight:
    if name not in names:
        return weight
    value = numbers_of(weight)
    return Weight(value=value.index_select(axis, of(value.shape[axis])))


# ---- inputs --------------------------------------------------------------------------------------


def _of_inputs(record: CallRecord) -> Iterator[FaultVariant]:
    given = numbers_given(record)
    for name in given:
        for each in functions():
            yield FaultVariant(
                f"the input {name} is {each.words}",
                with_inputs(partial(input_by, name, each.apply)),
            )
    for one, other in permutations(given, 2):
        if given[one].shape == given[other].shape:
            yield FaultVariant(
                f"the input {one} is the input {other}", with_inputs(partial(_replaced, one, other))
            )
            if one < other:
                yield FaultVariant(
                    f"the inputs {one} and {other} are exchanged",
                    with_inputs(partial(_swapped, one, other)),
                )
    for name, tensor in given.items():
        for axis in range(tensor.ndim):
            of = ("rows", "columns")[min(axis, 1)] if tensor.ndim == 2 else f"axis {axis}"
            rules = places(tensor.shape[axis]) if tensor.shape[axis] > 1 else ()
            for rule in rules[: FEW_PLACES if axis else 18]:
                yield FaultVariant(
                    f"{of} of the input {name} are {rule.words}",
                    with_inputs(partial(_input_moved, name, axis, rule.of)),
                )


def numbers_given(record: CallRecord) -> dict[str, Tensor]:
    """Return the inputs that are rows of numbers; codes, their scales and bounds are none."""
    return {
        name: tensor
        for name, tensor in record.inputs.items()
        if tensor.is_floating_point() and tensor.itemsize > 1 and tensor.ndim > 1
        and name not in _CODED
    }  # fmt: skip


def _scaled_inputs(
    context: ComponentContext, sample: Sample, record: CallRecord
) -> Iterator[FaultVariant]:
    for name in numbers_given(sample.record):
        fitted = _fitted(context, sample, partial(_scaled_input, name), 1.0)
        if fitted is None:
            continue
        yield fitted
        # Codes hardly answer to the last digits, so that these need all rows.
        every = sampled(context, record, sys.maxsize) if _CODED & record.outputs.keys() else None
        stored = _fitted(context, sample, partial(_scaled_and_stored, name), 1.0, every)
        if stored is not None:
            yield stored


def _scaled_input(name: str, factor: float) -> FaultVariant:
    return FaultVariant(
        f"the input {name} is multiplied by {number(factor, 4)}",
        with_inputs(partial(_times, name, factor)),
    )


def _scaled_and_stored(name: str, factor: float) -> FaultVariant:
    return FaultVariant(
        f"the input {name} is multiplied by {number(factor, 4)} and stored again",
        with_inputs(partial(input_by, name, partial(torch.mul, other=factor))),
    )


@operation
def _times(name: str, factor: float, inputs: Tensors) -> Tensors:
    # Not rounded: what multiplies it may do so in float32.
    return {**inputs, name: (inputs[name].double() * factor).float()}


@operation
def input_by(name: str, of: Callable[[Tensor], Tensor], inputs: Tensors) -> Tensors:
    """Return inputs of which one was changed."""
    return {**inputs, name: of(inputs[name].double()).to(inputs[name].dtype)}


@operation
def _replaced(one: str, other: str, inputs: Tensors) -> Tensors:
    return {**inputs, one: inputs[other].to(inputs[one].dtype)}


@operation
def _swapped(one: str, other: str, inputs: Tensors) -> Tensors:
    a, b = inputs[one], inputs[other]
    return {**inputs, one: b.to(a.dtype), other: a.to(b.dtype)}


@operation
def _input_moved(name: str, axis: int, of: Callable[[int], Tensor], inputs: Tensors) -> Tensors:
    tensor = inputs[name]
    return {**inputs, name: tensor.index_select(axis, of(tensor.shape[axis]))}


# ---- lists of what attention reads -----------------------------------------------------------


def _of_chosen(record: CallRecord) -> Iterator[FaultVariant]:
    """Some places of a list are not read, numbers are off by one, or rows have others' lists."""
    chosen = record.inputs.get(CHOSEN)
    if chosen is None or chosen.ndim != 2 or chosen.is_floating_point():
        return
    count = chosen.shape[1]
    ends = [(at, at + 1) for at in range(count)] if count <= FEW_CHOSEN else []
    ends += [(count // 2, count), (0, count // 2), (count - 1, count), (0, 1)]
    for begin, end in dict.fromkeys(ends):
        one = end - begin == 1
        which = f"place {begin}" if one else f"places {begin} to {end - 1}"
        words = f"{which} of each list of chosen rows {'is' if one else 'are'} not read"
        unread = partial(_places_unread, begin, end)
        yield FaultVariant(words, with_inputs(partial(_chosen_by, unread)))
    for by, side in ((1, "large"), (-1, "small")):
        words = f"the numbers of chosen rows are 1 too {side}"
        yield FaultVariant(words, with_inputs(partial(_chosen_by, partial(_moved_by, by))))
    for by, side in ((1, "before"), (-1, "after")):
        words = f"each token has the chosen rows of the token {side} it, around the end of a call"
        moved = partial(torch.roll, shifts=by, dims=0)
        yield FaultVariant(words, with_inputs(partial(_chosen_by, moved)))


@operation
def _chosen_by(of: Callable[[Tensor], Tensor], inputs: Tensors) -> Tensors:
    return {**inputs, CHOSEN: of(inputs[CHOSEN])}


@operation
def _places_unread(begin: int, end: int, chosen: Tensor) -> Tensor:
    made = chosen.clone()
    made[:, begin:end] = -1
    return made


@operation
def _moved_by(by: int, chosen: Tensor) -> Tensor:
    return torch.where(chosen < 0, chosen, (chosen + by).clamp(min=0))


# ---- positions -----------------------------------------------------------------------------------


def _of_positions(
    context: ComponentContext, sample: Sample, record: CallRecord
) -> Iterator[FaultVariant]:
    positions = record.inputs.get(POSITIONS)
    if positions is None:
        return
    none = FaultVariant("", with_inputs(partial(_positions_by, torch.zeros_like)))
    made = make(context, sample.record, none, sample.plain)
    if made is None or distance(sample.record.expected, made.outputs) == 0:
        return  # they are not read, or cannot be changed
    rules: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        (f"{abs(by)} too {'large' if by > 0 else 'small'}", partial(torch.add, other=by))
        for size in _SHIFTS
        for by in (size, -size)
    ]
    rules += [
        ("0", torch.zeros_like),
        ("turned in sign", torch.neg),
        *((f"multiplied by {by}", partial(torch.mul, other=by)) for by in _UNITS),
        *(
            (f"divided by {by}, rounded down", partial(torch.div, other=by, rounding_mode="floor"))
            for by in _UNITS
        ),
        ("those of the rows of the call", _counted_rows),
        ("counted from the call's first token", _from_first),
        ("in reverse order", partial(torch.flip, dims=(0,))),
    ]
    most = _right_until(record, positions)
    if most is not None:
        rules += [
            (f"not above {most}", partial(torch.clamp, max=most)),
            (f"0 above {most}", partial(_zero_above, most)),
            (f"counted anew above {most}", partial(torch.remainder, other=most + 1)),
        ]
    for words, of in rules:
        yield FaultVariant(f"positions are {words}", with_inputs(partial(_positions_by, of)))


@operation
def _counted_rows(positions: Tensor) -> Tensor:
    return torch.arange(len(positions)).to(positions.dtype)


@operation
def _from_first(positions: Tensor) -> Tensor:
    return positions - positions[:1]


@operation
def _zero_above(most: int, positions: Tensor) -> Tensor:
    return torch.where(positions > most, 0, positions)


@operation
def _positions_by(of: Callable[[Tensor], Tensor], inputs: Tensors) -> Tensors:
    return {**inputs, POSITIONS: of(inputs[POSITIONS])}


def _right_until(record: CallRecord, positions: Tensor) -> int | None:
    """Return the last position up to which all rows are right, where later ones are not."""
    for name, right in record.expected.items():
        seen = record.outputs.get(name)
        if seen is None or seen.shape != right.shape or len(right) != len(positions):
            continue
        wrong = (seen != right).reshape(len(right), -1).any(1)
        if bool(wrong.any()):
            first = int(positions[wrong].min())
            return first - 1 if first > 1 else None
    return None


# ---- results on their way ------------------------------------------------------------------------


def _on_their_way(context: ComponentContext, sample: Sample) -> Iterator[FaultVariant]:
    """Results are rounded by a function before they are stored, or partial sums are."""
    record = sample.record
    exact = with_facts(context, unrounded_output)(context.call)
    try:
        outputs = exact(record.inputs, context.weights)
    except CANNOT_RUN:
        return
    ways = [(each.words, each.apply) for each in functions()]
    for power in range(-_MOST_POWER, _MOST_POWER + 1, 2):
        words = f"rounded to FP16 in front of a factor of 2^{power}"
        ways.append((words, partial(_through_half, 2.0**power)))
    for name, seen in record.outputs.items():
        made = outputs.get(name)
        if made is None or made.shape != seen.shape or not seen.is_floating_point():
            continue
        before = distance({name: seen}, {name: record.expected[name]})
        for words, of in (*_gain(seen, made), *ways):
            try:
                stored = of(made.double()).to(seen.dtype)
            except CANNOT_RUN:
                continue
            if before and distance({name: seen}, {name: stored}) <= LEAVES * before:
                yield FaultVariant(
                    f"{_named(name, record.expected)} is {words} before it is stored",
                    partial(_finer, context, name, of),
                )
    if CODES in record.inputs or "x" in record.inputs:
        yield from _by_partial_sums(context)


def _gain(seen: Tensor, exact: Tensor) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Yield the factor between what was seen and results that are not rounded."""
    one, other = seen.double(), exact.double()
    held = one.isfinite() & other.isfinite()
    along = float(other[held].square().sum())
    if not along:
        return
    factor = float((one[held] * other[held]).sum()) / along
    error = _ROUNDING * float(one[held].norm()) / along**0.5 / max(1, int(held.sum())) ** 0.5
    plain = simplest(factor, 3 * error)
    for value in dict.fromkeys((plain, simplest(factor, error / 8))):
        if value != 1:
            yield f"multiplied by {number(value, 4)}", partial(torch.mul, other=value)


@operation
def _through_half(factor: float, x: Tensor) -> Tensor:
    return (x / factor).to(torch.float16).double() * factor


@operation
def _finer(context: ComponentContext, name: str, of: Callable[[Tensor], Tensor], call: Any) -> Any:
    exact = with_facts(context, unrounded_output)(call)

    def changed(inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        known = call(inputs, weights)
        made = of(exact(inputs, weights)[name].double()).to(known[name].dtype)
        return {**known, name: made}

    return changed


def _by_partial_sums(context: ComponentContext) -> Iterator[FaultVariant]:
    shapes = [weight.shape for weight in dict(context.weights).values() if len(weight.shape) > 1]
    if not shapes or any(len(shape) != 2 for shape in shapes):
        return
    width = max(shape[1] for shape in shapes)
    for form, dtype in (("BF16", torch.bfloat16), ("FP16", torch.float16)):
        for part in dict.fromkeys((*_PARTS, *(-(-width // count) for count in (2, 4, 8)))):
            if part < width <= 32 * part:
                words = f"sums over {part} columns are added up in {form}"
                for stored in (False, True):
                    yield FaultVariant(
                        f"{words}{', each stored before' if stored else ''}",
                        partial(_summed, context, (part, stored), dtype),
                        stores_within=True,
                    )


@operation
def _summed(
    context: ComponentContext, parts: tuple[int, bool], dtype: torch.dtype, call: Any
) -> Any:
    (part, stored), exact = parts, with_facts(context, unrounded)(call)
    facts = facts_of(exact)

    def changed(inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        known = dict(call(inputs, weights))
        width = max(weight.shape[-1] for weight in weights.values() if len(weight.shape) > 1)
        plain = decoded(facts, inputs, weights, torch.clone)
        x = plain[X]

        def of(begin: int, end: int) -> Tensors:
            alone = _alone(begin, end, x.reshape(*x.shape[:-1], -1, width)).reshape(x.shape)
            made = exact({**plain, X: alone}, weights)
            types = {name: known[name].dtype if stored else torch.float64 for name in made}
            return {name: tensor.to(types[name]).double() for name, tensor in made.items()}

        bias = of(0, 0)
        total = bias
        for begin in range(0, width, part):
            own = of(begin, begin + part)
            total = {n: (t + own[n] - bias[n]).to(dtype).double() for n, t in total.items()}
        return {name: total[name].to(output.dtype) for name, output in known.items()}

    return changed


def _alone(begin: int, end: int, x: Tensor) -> Tensor:
    made = torch.zeros_like(x)
    made[..., begin:end] = x[..., begin:end]
    return made


# ---- facts ---------------------------------------------------------------------------------------


class _FieldsRead:
    """Names of the fields of switches and config that a component reads; all, where unknown."""

    def __init__(self) -> None:
        self.names: set[str] | None = set()

    def __contains__(self, name: str) -> bool:
        return self.names is None or name in self.names

    def noting(self, record: Any, prefix: str = "") -> Any:
        """Return a copy of a dataclass that notes which fields are read, nested ones included."""
        own, names = type(record), self.names
        held = {each.name: getattr(record, each.name) for each in fields(record)}

        def noted(copied: Any, name: str) -> Any:
            if name in held and names is not None:
                names.add(prefix + name)
            return object.__getattribute__(copied, name)

        copy: Any = type(own.__name__, (own,), {"__getattribute__": noted})
        made = object.__new__(copy)
        for name, value in held.items():
            inner = is_dataclass(value) and not isinstance(value, type)
            kept = self.noting(value, f"{prefix}{name}.") if inner else value
            object.__setattr__(made, name, kept)
        return made

    def facts(self, facts: Any) -> Any:
        """Return the same facts with switches and a config that note what is read."""
        switches = self.noting(facts.numerics.switches)
        numerics = replace(facts.numerics, switches=switches)
        return replace(facts, config=self.noting(facts.config), numerics=numerics)


def _fields_read(context: ComponentContext, sample: Sample) -> _FieldsRead:
    """Run a component once to learn what it reads: what it does not read changes nothing."""
    read = _FieldsRead()
    variant = FaultVariant("", with_facts(context, read.facts))
    try:
        if _left(context, sample, variant) > LEAVES:
            return read
    except (*CANNOT_RUN, TypeError, AttributeError):
        pass
    read.names = None
    return read


def _of_switches(context: ComponentContext, read: _FieldsRead) -> Iterator[FaultVariant]:
    """The other side of everything in which correct implementations differ."""
    facts = facts_at(context)
    switches, formats = facts.numerics.switches, _activations(context, facts)
    reads_codes = any(each.name == CODES for each in context.component.inputs)
    for each in fields(switches):
        if each.name not in read:
            continue
        own = getattr(switches, each.name)
        if reads_codes and isinstance(own, InputQuantisation):
            continue  # its input was quantised before it came
        if isinstance(own, bool):
            values: list[Any] = [not own]
        elif hasattr(type(own), "__members__"):
            values = [value for value in type(own) if value is not own]
        else:
            continue
        for value in values:
            other = with_switches(facts, **{each.name: value})
            if reads_codes and _activations(context, other) != formats:
                continue  # codes that came have the format that they were made in
            shown = {True: "on", False: "off"}.get(value, str(value))
            yield FaultVariant(
                f"the switch {each.name} is {shown}",
                with_facts(context, partial(with_switches, **{each.name: value})),
            )


def _activations(context: ComponentContext, facts: Any) -> list[str | None]:
    """Return the formats in which facts say that a component's input arrives, for each weight."""
    return [facts.activation(name) for name in context.weights]


def _of_config(
    context: ComponentContext, sample: Sample, read: _FieldsRead
) -> Iterator[FaultVariant]:
    """Numbers of the config that are read here: whole ones next to their own, others fitted."""
    config = facts_at(context).config
    for path, own in _numbers_in(config):
        if path not in read:
            continue
        if isinstance(own, int) and own <= _COUNTED:
            for near in dict.fromkeys((own + 1, own - 1, 2 * own, own // 2)):
                if near > 0:
                    yield _config_variant(context, path, near)
            continue
        fitted = _fitted(context, sample, partial(_config_variant, context, path), own)
        if fitted is not None:
            yield fitted
        for other, value in _numbers_in(config):
            alike = other.rpartition("_")[2] == path.rpartition("_")[2]
            if alike and value > _COUNTED and value != own:
                yield _config_variant(context, path, value)
    for each in fields(config):
        if each.name in read and is_dataclass(getattr(config, each.name)):
            without = with_facts(context, partial(_with_field, each.name, None))
            yield FaultVariant(f"{each.name} is absent", without)


def _numbers_in(config: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    for each in fields(config):
        value = getattr(config, each.name)
        if is_dataclass(value) and not isinstance(value, type):
            yield from _numbers_in(value, f"{prefix}{each.name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{each.name}", value


@operation
def _with_field(path: str, value: Any, facts: Any) -> Any:
    head, _, rest = path.partition(".")
    if rest:
        value = _with_path(getattr(facts.config, head), rest, value)
    return with_config(facts, **{head: value})


def _with_path(record: Any, path: str, value: Any) -> Any:
    """Return a record with another value at a path of fields."""
    head, _, rest = path.partition(".")
    if rest:
        value = _with_path(getattr(record, head), rest, value)
    return replace(record, **{head: value})


def _config_variant(context: ComponentContext, path: str, value: float) -> FaultVariant:
    shown = str(value) if isinstance(value, int) else number(value, 4)
    return FaultVariant(
        f"{path} is {shown}", with_facts(context, partial(_with_field, path, value))
    )


def _fitted(
    context: ComponentContext,
    sample: Sample,
    of: Callable[[float], FaultVariant],
    own: float,
    every: Sample | None = None,
) -> FaultVariant | None:
    """Return the variant of a number that leaves least of the difference; None where none helps.

    `every` is all that is known: there the last digits are chosen.
    """

    def left(value: float, on: Sample = sample) -> float:
        try:
            return _left(context, on, of(value))
        except (*CANNOT_RUN, DegarbleError, OverflowError, ZeroDivisionError):
            return 1.0

    scale = own or 1.0
    if left(2 * scale) == left(0.5 * scale) == left(_GRID[-1] * scale) == 1.0:
        return None  # it is not read here, or changes nothing
    known = {factor: left(factor * scale) for factor in (*_GRID, 1.0)}
    best = min(known, key=lambda factor: known[factor])
    if known[best] >= 1.0:
        return None
    ranked = sorted(known)
    at = ranked.index(best)
    low, high = ranked[max(at - 1, 0)], ranked[min(at + 1, len(ranked) - 1)]
    if low > 0:  # factors, so steps of a logarithm
        found = math.exp(least(lambda e: left(math.exp(e) * scale), math.log(low), math.log(high)))
        found *= scale
    else:
        found = least(lambda factor: left(factor * scale), low, high) * scale
    leaves = left(found)
    if known[best] <= leaves:
        found, leaves = best * scale, known[best]
    last = sample
    if every is not None:
        last, near = every, NEAR_FITTED * abs(found)
        found = least(partial(left, on=every), found - near, found + near)
        leaves = left(found, every)
    for digits in range(1, 7):
        plain = float(f"{found:.{digits}g}")
        if left(plain, last) <= leaves * 1.1 + 1e-6:
            return of(plain)
    return of(found)


def least(of: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function of one number is least, between two, by golden sections."""
    a, b = low, high
    c, d = b - _GOLDEN * (b - a), a + _GOLDEN * (b - a)
    left, right = of(c), of(d)
    for _ in range(_TURNS):
        if left <= right:
            b, d, right = d, c, left
            c = b - _GOLDEN * (b - a)
            left = of(c)
        else:
            a, c, left = c, d, right
            d = a + _GOLDEN * (b - a)
            right = of(d)
    return (a + b) / 2
