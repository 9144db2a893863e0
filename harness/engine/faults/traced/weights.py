"""Faults of a traced component's weights: of other modules, rows in another order, gains, biases.

What a loader does wrong is the same in every model, so that only kinds and shapes are looked at.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness.engine.faults.gain_fit import both_gains, faint, gain_text, of_record
from degarble.harness.engine.faults.loading import per_tensor_fp8
from degarble.harness.engine.faults.model_faults import (
    FaultVariant,
    ModelFault,
    with_inputs,
    with_weights,
)
from degarble.harness.engine.faults.regions import differing_columns, flat
from degarble.harness.engine.faults.traced.operations import (
    apart,
    distance_of,
    fitted_number,
    of_kinds,
    others_of,
    rows_of,
    side_by_side,
    traced_facts,
    variant_of,
)
from degarble.harness.engine.faults.weight_faults import numbers_of, some_rows
from degarble.harness.formats.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext

    Tensors = Mapping[str, Tensor]

_SKETCHED = 8  # rows and columns on which another module's weight is tried first
_NEAR = 0.1  # of their length: more is left where the weight is another one
_MOST_ROWS = 0.5  # of a matrix that may be moved one by one
_BESIDE = 2  # layers before and after whose experts are tried
_LIKE = frozenset({
    "traced.linear", "traced.norm", "traced.embedding", "traced.experts", "traced.router",
})  # fmt: skip


def _taken(
    context: ComponentContext, other: ComponentContext, only: str | None = None
) -> FaultVariant:
    """Return the component with the weights of another one, in the order of their names.

    `only` names the one weight that is taken.
    """
    given = dict(zip(context.weights, other.weights, strict=True))

    def changed(name: str, weight: Weight) -> Weight:
        return weight if only not in {None, name} else other.weights[given[name]]

    what = "weights" if only is None else only.rpartition(".")[2]
    words = f"the {what} of {other.name}"
    return variant_of(context, words, with_weights(changed), taken=other.name)


def _alike(context: ComponentContext) -> Iterator[ComponentContext]:
    """Yield the other components of this kind whose weights have the same shapes."""
    own = [weight.shape for weight in context.weights.values()]
    held = set(context.component.weights)
    kinds = {context.component.kind, "traced.linear", "traced.embedding"}
    if context.component.kind not in {"traced.linear", "traced.embedding"}:
        kinds = {context.component.kind}
    for other in others_of(context):
        if other.component.kind not in kinds or held & set(other.component.weights):
            continue
        if [weight.shape for weight in other.weights.values()] == own:
            yield other


def _taken_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    for other in _alike(context):
        for only in _each_or_all(context):
            yield _taken(context, other, only)


def _each_or_all(context: ComponentContext) -> tuple[str | None, ...]:
    """Return the weights that may be another's: all of them, or a single one of several."""
    names = tuple(context.weights)
    return (None,) if len(names) == 1 else (None, *names)


def _shown(record: CallRecord) -> str | None:
    """Return the output by which weights are compared; None where it has another shape."""
    name = "out" if "out" in record.outputs else "logits"
    c, e = record.outputs.get(name), record.expected.get(name)
    return None if c is None or e is None or c.shape != e.shape else name


def _taken_fitting(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    """Yield the modules whose weights give a few elements of the output."""
    few = rows_of(record, _SKETCHED)
    name = _shown(few)
    if name is None:
        return
    c, e = flat(few.outputs[name]).double(), flat(few.expected[name]).double()
    columns = (c - e).abs().sum(0).topk(min(_SKETCHED, c.shape[1])).indices
    own = context.component.layer
    for other in _alike(context):
        layer = other.component.layer
        far = own is not None and layer is not None and abs(layer - own) > _BESIDE
        if context.component.kind == "traced.experts" and far:
            continue
        for only in _each_or_all(context):
            made = _sketch(context, _Taken(other, only), few, (name, columns))
            if float((made - c[:, columns]).norm()) < _NEAR * float(c[:, columns].norm()):
                yield _taken(context, other, only)


class _Taken(NamedTuple):
    """Another component, and the one weight of it that is taken; None for all."""

    other: ComponentContext
    only: str | None


def _sketch(
    context: ComponentContext, taken: _Taken, few: CallRecord, part: tuple[str, Tensor]
) -> Tensor:
    """Return a few elements of an output with another component's weights."""
    name, columns = part
    if context.component.kind != "traced.linear" or "x" not in few.inputs:
        variant = _taken(context, *taken)
        return flat(variant.apply(context.call)(few.inputs, context.weights)[name]).double()[
            :, columns
        ]
    made = torch.zeros((), dtype=torch.float64)
    for own, theirs in zip(context.weights, taken.other.weights, strict=True):
        here = taken.only not in {None, own}
        weight = context.weights[own] if here else taken.other.weights[theirs]
        if len(weight.shape) == 1:
            made = made + weight.values(torch.float64)[columns]
        else:
            made = made + flat(few.inputs["x"]).double() @ some_rows(weight, columns).double().T
    return made


def _stored_gain(name: str, factor: float, rows: tuple[int, int] | None) -> Any:
    """Multiply a weight and store it again in its own dtype."""

    def changed(own: str, weight: Weight) -> Weight:
        if own != name or weight.is_quantised or weight.value is None:
            return weight
        value = weight.value.clone()
        part = slice(None) if rows is None else slice(*rows)
        value[part] = (value[part].float() * factor).to(value.dtype)
        return Weight(value=value)

    return with_weights(changed)


def _matrix(context: ComponentContext) -> str | None:
    """Return the name of the weight with a row, or an element, for each column of the output."""
    return next((n for n in context.weights if n.endswith("weight")), None)


def _gain_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    name = _matrix(context)
    if name is None:
        return
    height = context.weights[name].shape[0]
    for factor in (1.01, -1.0, 0.5):
        words = f"{gain_text(factor)} stored in the weight"
        yield variant_of(context, words, _stored_gain(name, factor, None), gain=factor)
        if context.component.kind == "traced.linear" and height >= 16:
            rows = height // 4, height // 2
            words = f"{gain_text(factor)} stored in rows {rows[0]} to {rows[1] - 1} of the weight"
            yield variant_of(
                context, words, _stored_gain(name, factor, rows), gain=factor,
                rows=f"{rows[0]} to {rows[1] - 1}",
            )  # fmt: skip


def _gains_fitted(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    if context.component.kind == "traced.router":
        yield from _router_gains(context, record)
        return
    c, e = record.outputs.get("out"), record.expected.get("out")
    if c is None or e is None or c.shape != e.shape or not e.is_floating_point():
        return
    yield from _gains_before_bias(context, record)
    gain = of_record(record) or faint(c, e)
    if gain is not None and math.isfinite(gain):
        yield from _gain_at(context, gain, None)
        return
    if _matrix(context) is None or context.component.kind != "traced.linear":
        return
    columns = differing_columns(flat(c).double(), flat(e).double()).nonzero().flatten()
    if not len(columns):
        return
    rows = int(columns[0]), int(columns[-1]) + 1
    part = replace(
        record,
        outputs={"out": flat(c)[:, slice(*rows)]}, expected={"out": flat(e)[:, slice(*rows)]},
    )  # fmt: skip
    gain = of_record(part) or faint(part.outputs["out"], part.expected["out"])
    if gain is not None and math.isfinite(gain) and rows != (0, flat(c).shape[1]):
        yield from _gain_at(context, gain, rows)


def _gains_before_bias(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    """Yield factors on the weight of a linear whose bias they leave as it is."""
    name = _matrix(context)
    bias = next((n for n in context.weights if n.endswith("bias")), None)
    if name is None or bias is None or context.component.kind != "traced.linear":
        return
    added = numbers_of(context.weights[bias]).double()
    less = replace(
        record,
        outputs={"out": record.outputs["out"].double() - added},
        expected={"out": record.expected["out"].double() - added},
    )  # fmt: skip
    gain = of_record(less)
    if gain is None or not math.isfinite(gain):
        return
    for value in dict.fromkeys(_in_few_digits(gain)):
        if value != 1:
            words = f"{gain_text(value)} stored in the weight and not in the bias"
            yield variant_of(context, words, _stored_gain(name, value, None), gain=value)


def _in_few_digits(gain: float) -> list[float]:
    """Return a fitted factor as people write factors: with one to four digits."""
    return [float(f"{gain:.{digits}g}") for digits in (1, 2, 3, 4)]


def _router_gains(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    """Yield factors on a router's weight, fitted to its logits, be they scores already."""
    name, shown = _matrix(context), _shown(record)
    if name is None or shown is None:
        return

    def made(value: float) -> FaultVariant:
        words = f"{gain_text(value)} stored in the weight"
        return variant_of(context, words, _stored_gain(name, value, None), gain=value)

    logits = replace(rows_of(record), outputs={shown: rows_of(record).outputs[shown]})
    for value in fitted_number(lambda value: distance_of(context, logits, made(value)), 1.0):
        yield made(value)


def _gain_at(
    context: ComponentContext, gain: float, rows: tuple[int, int] | None
) -> Iterator[FaultVariant]:
    where: dict[str, Any] = {} if rows is None else {"rows": f"{rows[0]} to {rows[1] - 1}"}
    place = "the whole output" if rows is None else f"columns {rows[0]} to {rows[1] - 1}"

    def region(_inputs: Tensors, out: Tensor) -> Tensor | None:
        if rows is None:
            return None
        at = torch.arange(out.shape[-1])
        return ((at >= rows[0]) & (at < rows[1])).expand(out.shape)

    name = _matrix(context)
    for value in dict.fromkeys((*_in_few_digits(gain), gain)):
        if value == 1:
            continue
        words = f"{gain_text(value)} on {place}"
        yield from both_gains(
            context, f"{words} of {context.name}", value, None if rows is None else region,
            {"gain": value, **where},
        )  # fmt: skip
        if name is not None:
            words = f"{gain_text(value)} stored in the weight of {place}"
            yield variant_of(context, words, _stored_gain(name, value, rows), gain=value, **where)


def _row_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    """Yield matrices whose rows stand in another order, or which are transposed."""
    name = _matrix(context)
    if name is None or len(context.weights[name].shape) != 2:
        return
    height, width = context.weights[name].shape
    ways: list[tuple[str, Callable[[Tensor], Tensor]]] = []
    if height == width and context.component.kind == "traced.linear":
        ways.append(("the transposed weight", lambda x: x.T))
    for heads in _head_widths(context):
        if height % heads == 0 and heads % 2 == 0:
            ways += [
                (
                    f"rows of heads of {heads} as pairs",
                    partial(_rows_in_heads, side_by_side, heads),
                ),
                (f"rows of heads of {heads} as halves", partial(_rows_in_heads, apart, heads)),
            ]
    ways.append(("rows one too far", lambda x: x.roll(1, 0)))
    ways.append(("rows in reverse", lambda x: x.flip(0)))
    for words, change in ways:
        yield variant_of(context, words, with_weights(partial(_reordered, change)))
        if len(context.weights) > 1:
            alone = with_weights(partial(_matrix_reordered, change))
            yield variant_of(context, f"{words}, not of the bias,", alone)


def _matrix_reordered(change: Callable[[Tensor], Tensor], name: str, weight: Weight) -> Weight:
    return weight if len(weight.shape) == 1 else _reordered(change, name, weight)


def _reordered(change: Callable[[Tensor], Tensor], _name: str, weight: Weight) -> Weight:
    value = weight.values(torch.float64)
    vector = value.ndim == 1
    if vector and change(value[:, None]).shape[1] != 1:
        return weight  # a bias stays where a matrix is transposed
    made = change(value[:, None])[:, 0] if vector else change(value)
    return Weight(value=made.contiguous())


def _rows_in_heads(change: Callable[[Tensor], Tensor], width: int, value: Tensor) -> Tensor:
    heads = value.unflatten(0, (-1, width))
    return change(heads.transpose(-1, -2)).transpose(-1, -2).flatten(0, 1)


def _head_widths(context: ComponentContext) -> tuple[int, ...]:
    facts = traced_facts(context)
    found: dict[int, None] = {}
    for traced in facts.graph.components:
        if "query" in traced.inputs:
            found[int(facts.graph.trace.tensors[traced.inputs["query"].number].shape[-1])] = None
    return tuple(found)


def _rows_fitted(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    """Yield known orders, then the rows that single columns of the output show."""
    yield from _row_variants(context)
    name = _matrix(context)
    if name is None or context.component.kind != "traced.linear":
        return
    c, e = record.outputs.get("out"), record.expected.get("out")
    if c is None or e is None or c.shape != e.shape:
        return
    c, e = flat(c).double(), flat(e).double()
    columns = differing_columns(c, e).nonzero().flatten()
    c, e = c - c.mean(0), e - e.mean(0)  # a bias may stay in its place
    if not 0 < len(columns) <= _MOST_ROWS * c.shape[1] or len(c) < _SKETCHED:
        return
    distances = torch.cdist(c[:, columns].T.contiguous(), e.T.contiguous())
    nearest = distances.argmin(1)
    sizes = c[:, columns].norm(dim=0)
    if bool((distances.amin(1) > _NEAR * sizes).any()) or bool((nearest == columns).any()):
        return
    index = torch.arange(c.shape[1])
    index[columns] = nearest
    words = f"rows {_listed(nearest)} of the weight in place of rows {_listed(columns)}"
    for change in (_reordered, _matrix_reordered)[: len(context.weights)]:
        apply = with_weights(partial(change, lambda x: x[index]))
        yield variant_of(context, words, apply, rows=_listed(columns))


def _listed(index: Tensor) -> str:
    shown = ", ".join(map(str, index[:4].tolist()))
    return f"{shown}, ..." if len(index) > 4 else shown


def _gamma_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    """Yield a norm with another weight, or none at all."""
    for words, change in (
        ("1 added to the weight", lambda w: w + 1),
        ("1 taken from the weight", lambda w: w - 1),
        ("the weight applied twice", lambda w: w * w),
        ("the weight in reverse", lambda w: w.flip(0)),
        ("a weight of 1", torch.ones_like),
        ("a weight of 0", torch.zeros_like),
    ):
        yield variant_of(context, words, with_weights(partial(_reordered, change)))
        yield variant_of(context, f"{words}, stored,", with_weights(partial(_stored, change)))
    yield variant_of(context, "no norm: the input passes", _passing(lambda x, _w: x))
    yield variant_of(context, "no norm: the weight alone", _passing(lambda x, w: x * w))


def _stored(change: Callable[[Tensor], Tensor], _name: str, weight: Weight) -> Weight:
    return weight if weight.value is None else Weight(value=change(weight.value))


def _passing(made: Callable[[Tensor, Tensor], Tensor]) -> Any:
    def apply(call: Any) -> Any:
        def faulty(inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
            weight = next(iter(weights.values())).values(torch.float64)
            call(inputs, weights)  # whose operands the budget is of
            return {"out": made(inputs["x"].double(), weight)}

        return faulty

    return apply


def _stored_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    """Yield a weight that went through FP8 and is stored again in its own dtype."""
    name = _matrix(context)
    if name is not None and len(context.weights[name].shape) == 2:
        yield variant_of(
            context, "FP8 with one scale, stored again,",
            with_weights(partial(_through_fp8, name)),
        )  # fmt: skip


def _through_fp8(name: str, own: str, weight: Weight) -> Weight:
    if own != name or weight.value is None:
        return weight
    return Weight(value=per_tensor_fp8(weight.value).to(weight.value.dtype))


def _bias_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    for name in context.weights:
        if name.endswith("bias"):
            for words, factor in ((f"no {name}", 0.0), (f"{name} added twice", 2.0)):
                yield variant_of(context, words, with_weights(partial(_multiplied, name, factor)))


def _multiplied(name: str, factor: float, own: str, weight: Weight) -> Weight:
    return Weight(value=weight.values(torch.float64) * factor) if own == name else weight


def _token_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    if not any(each.name == "tokens" for each in context.component.inputs):
        return
    height = max(weight.shape[0] for weight in context.weights.values() if weight.shape)
    for words, step in (("the next token's row", 1), ("the row of the token id before", -1)):
        yield variant_of(context, words, with_inputs(partial(_other_ids, height, step)))


def _other_ids(height: int, step: int, inputs: Tensors) -> Tensors:
    return {**inputs, "tokens": (inputs["tokens"] + step) % height}


_GAINED = of_kinds(
    *_LIKE, "traced.module", "traced.attention", "traced.residual", "traced.gated",
    "traced.activation", "traced.rotation", "traced.stretch",
)  # fmt: skip

TRACED_WEIGHT_FAULTS = (
    ModelFault(
        "O07.other_module", "A module computes with the weight of another module",
        "right size, wrong numbers: what follows means nothing",
        "Map every parameter by its full name; a tensor that is read twice is a warning.",
        of_kinds(*_LIKE), _taken_variants, _taken_fitting,
    ),
    ModelFault(
        "M43.whole", "A systematic gain on an output, or on a part of it",
        "proportions stay, so a cosine sees nothing; distributions shift",
        "Look for a constant that is left out, or a scale that was applied twice.",
        _GAINED, _gain_variants, _gains_fitted,
    ),
    ModelFault(
        "M16.rows", "The rows of a weight stand in another order",
        "right size, wrong place: text is garbled",
        "Say which rows of which parameter a slot holds, and check a digest of each after load.",
        of_kinds("traced.linear", "traced.norm"), _row_variants, _rows_fitted,
    ),
    ModelFault(
        "M24.gamma", "A norm takes another weight, or none",
        "features are scaled by other numbers",
        "Some norms multiply by 1 + weight and others by the weight: look at the model's own.",
        of_kinds("traced.norm"), _gamma_variants,
    ),
    ModelFault(
        "M19.fp8_stored", "A weight went through FP8 though the checkpoint keeps it otherwise",
        "noise of that format", "State the precision of every module once, and compare it.",
        of_kinds("traced.linear", "traced.embedding"), _stored_variants,
    ),
    ModelFault(
        "M17.bias", "A bias is left out, or added twice", "one term is missing or doubled",
        "Compare the names in the files with those that were read.",
        of_kinds("traced.linear", "traced.experts", "traced.router", "traced.topk"), _bias_variants,
    ),
    ModelFault(
        "M17.token_row", "Tokens are looked up in another row", "every token is another one",
        "Check the tokenizer's ids against the rows of the embedding.",
        of_kinds("traced.embedding", "traced.module"), _token_variants,
    ),
)  # fmt: skip
