"""Faults of one rank of several: another rank's part of a weight, or a factor on its own part.

Ranks divide a matrix along its rows (each computes some columns of the result), along its columns
(each computes a term of a sum), or experts among themselves. The map of an engine joins what ranks
have; here a difference is traced back to the rank that made it. Applies where a run was joined from
several ranks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness.engine.faults.gain_fit import gain_text, of_record
from degarble.harness.engine.faults.model_faults import FaultVariant, ModelFault, with_weights
from degarble.harness.engine.faults.regions import differing_columns, flat
from degarble.harness.engine.faults.traced.operations import rows_of, variant_of
from degarble.harness.engine.faults.weight_faults import some_rows
from degarble.harness.formats.weight import Weight
from degarble.references.traced.definitions import EXPERTS_OUT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext

_SKETCHED = 8  # rows and columns on which a rank's part is tried first
_NEAR = 0.1  # of a difference that a part may leave unexplained
_DIGITS = (1, 2, 3, 4)
_MOST_RANKS = 16
_MATRIX = 2
_LINEAR, _EMBEDDING, _EXPERTS = "traced.linear", "traced.embedding", "traced.experts"


class _Division(NamedTuple):
    """How ranks divide a weight: along an axis, `halves` each by itself."""

    weight: str
    axis: int
    words: str
    halves: bool = False


class _Held(NamedTuple):
    """A rank whose part is that of another, or its own times a factor.

    `stored`: the product is stored in the weight's dtype.
    """

    rank: int
    source: int
    factor: float = 1.0
    stored: bool = False


def _ranks(context: ComponentContext) -> int:
    return int(getattr(context.bound, "ranks", 1))


def _is_divided(context: ComponentContext) -> bool:
    kinds = {_LINEAR, _EMBEDDING, _EXPERTS}
    return 1 < _ranks(context) <= _MOST_RANKS and context.component.kind in kinds


def _divisions(context: ComponentContext) -> Iterator[_Division]:
    """Yield the ways in which ranks can divide the weights of a component."""
    ranks = _ranks(context)
    for name, weight in context.weights.items():
        if len(weight.shape) == _MATRIX and weight.shape[0] % ranks == 0:
            yield _Division(name, 0, "rows")
        is_linear = context.component.kind == _LINEAR and len(weight.shape) == _MATRIX
        if is_linear and weight.shape[1] % ranks == 0:
            yield _Division(name, 1, "columns")
        if len(weight.shape) > _MATRIX:
            words = ("experts", "outputs", "inputs")
            for axis, extent in enumerate(weight.shape):
                halves = axis > 0 and "gate_up" in name
                if extent % (2 * ranks if halves else ranks) == 0:
                    yield _Division(name, axis, words[axis], halves)


def _variant(context: ComponentContext, division: _Division, held: _Held) -> FaultVariant:
    ranks = _ranks(context)
    where: dict[str, Any] = {"rank": held.rank, "ranks": ranks}
    own = f"rank {held.rank} of {ranks}"
    if held.source != held.rank:
        where["holds"] = held.source
        words = f"the {division.words} of rank {held.source} on {own}"
    elif held.factor == 0:
        words = f"nothing for the {division.words} of {own}"
    else:
        where["gain"] = held.factor
        done = "stored in" if held.stored else "on"
        words = f"{gain_text(held.factor)} {done} the {division.words} of {own}"
    change = with_weights(partial(_changed, division, ranks, held))
    return variant_of(context, words, change, **where)


def _changed(division: _Division, ranks: int, held: _Held, name: str, weight: Weight) -> Weight:
    if name != division.weight:
        return weight
    value = weight.values(torch.float64)
    halves = value.chunk(2, division.axis) if division.halves else (value,)
    made = []
    for half in halves:
        parts = list(half.chunk(ranks, division.axis))
        part = parts[held.source] * held.factor
        if held.stored and weight.value is not None:
            part = part.to(weight.value.dtype).to(value.dtype)
        parts[held.rank] = part
        made += parts
    return Weight(value=torch.cat(made, division.axis))


def _exchanges(ranks: int) -> Iterator[_Held]:
    for rank in range(ranks):
        for source in range(ranks):
            if source != rank:
                yield _Held(rank, source)


def _held_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    for division in _divisions(context):
        for held in _exchanges(_ranks(context)):
            yield _variant(context, division, held)


def _gain_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    for division in _divisions(context):
        for rank in range(_ranks(context)):
            for factor in (0.0, 0.5, 2.0):
                yield _variant(context, division, _Held(rank, rank, factor))


# --------------------------------------------------------------------------------------------------
# What a recorded call shows.


def _held_fitting(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    """Yield the exchanges that give a few elements of the output."""
    if context.component.kind == _LINEAR:
        for division, held in _linear_parts(context, record):
            if held.source != held.rank:
                yield _variant(context, division, held)
        return
    few = _differing_rows(record)
    if few is None:
        return
    c = flat(few.outputs["out"]).double()
    for variant in _held_variants(context):
        made = flat(variant.apply(context.call)(few.inputs, context.weights)["out"]).double()
        if float((made - c).norm()) < _NEAR * float((c - flat(few.expected["out"])).norm()):
            yield variant


def _gains_fitting(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    """Yield factors on one rank's part of a linear, or of what experts multiply last."""
    parts = {_LINEAR: _linear_parts, _EXPERTS: _expert_parts}.get(context.component.kind)
    if parts is None:
        return
    for division, held in parts(context, record):
        if held.source != held.rank:
            continue
        rounded = [float(f"{held.factor:.{digits}g}") for digits in _DIGITS]
        for factor in dict.fromkeys((*rounded, held.factor)):
            if factor != 1:
                changed = held._replace(factor=factor)
                yield _variant(context, division, changed)
                yield _variant(context, division, changed._replace(stored=True))


def _differing_rows(record: CallRecord) -> CallRecord | None:
    """Return a few rows that differ most; None where shapes do."""
    c, e = record.outputs.get("out"), record.expected.get("out")
    if c is None or e is None or c.shape != e.shape:
        return None
    gaps = (flat(c).double() - flat(e).double()).norm(dim=1)
    if len(gaps) != len(c) or not bool((gaps > 0).any()):
        return None
    rows = gaps.topk(min(_SKETCHED, len(gaps))).indices.sort().values

    def cut(tensors: Any) -> Any:
        return {
            name: tensor[rows] if tensor.ndim and len(tensor) == len(gaps) else tensor
            for name, tensor in tensors.items()
        }

    return replace(
        record, inputs=cut(record.inputs), outputs=cut(record.outputs),
        expected=cut(record.expected),
    )  # fmt: skip


def _linear_parts(
    context: ComponentContext, record: CallRecord
) -> Iterator[tuple[_Division, _Held]]:
    """Yield which rank's part of a linear explains the difference, and how."""
    c, e = record.outputs.get("out"), record.expected.get("out")
    if c is None or e is None or c.shape != e.shape:
        return
    for division in _divisions(context):
        if division.axis == 0:
            for held in _of_rows(context, record):
                yield division, held
        elif "x" in record.inputs:
            for held in _of_terms(context, division, record):
                yield division, held


def _expert_parts(
    context: ComponentContext, record: CallRecord
) -> Iterator[tuple[_Division, _Held]]:
    """Yield the factor on each rank's part of the last product of experts that explains most."""
    few = _differing_rows(record)
    if few is None:
        return
    e = flat(few.expected["out"]).double()
    gap = flat(few.outputs["out"]).double() - e
    for division in _divisions(context):
        if not division.weight.endswith(EXPERTS_OUT):
            continue
        for rank in range(_ranks(context)):
            without = _variant(context, division, _Held(rank, rank, 0.0)).apply(context.call)
            term = e - flat(without(few.inputs, context.weights)["out"]).double()
            factor = _factor_of(gap, term)
            if factor is not None:
                yield division, _Held(rank, rank, factor)


def _factor_of(gap: Tensor, term: Tensor) -> float | None:
    """Return by which factor a term makes a difference; None where none does."""
    size = float((term * term).sum())
    excess = float((gap * term).sum()) / size if size else 0.0
    if float((gap - excess * term).norm()) >= _NEAR * float(gap.norm()):
        return None
    return 0.0 if abs(1 + excess) < _NEAR**2 else 1 + excess


def _of_rows(context: ComponentContext, record: CallRecord) -> Iterator[_Held]:
    """Look at the one rank whose columns of the output alone differ."""
    c, e = flat(record.outputs["out"]).double(), flat(record.expected["out"]).double()
    ranks = _ranks(context)
    columns = differing_columns(c, e).nonzero().flatten()
    width = c.shape[1] // ranks
    if not len(columns) or int(columns[0]) // width != int(columns[-1]) // width:
        return
    rank = int(columns[0]) // width
    own = c[:, rank * width : (rank + 1) * width]
    for source in range(ranks):
        theirs = e[:, source * width : (source + 1) * width]
        if source != rank and float((own - theirs).norm()) < _NEAR * float(own.norm()):
            yield _Held(rank, source)
    expected = e[:, rank * width : (rank + 1) * width]
    if not bool(own.any()):
        yield _Held(rank, rank, 0.0)
        return
    gain = of_record(replace(record, outputs={"out": own}, expected={"out": expected}))
    if gain is not None:
        yield _Held(rank, rank, gain)


def _of_terms(
    context: ComponentContext, division: _Division, record: CallRecord
) -> Iterator[_Held]:
    """Compare the difference with each rank's term of the sum, on a few elements."""
    few = _differing_rows(record) or rows_of(record, _SKETCHED)
    c, e = flat(few.outputs["out"]).double(), flat(few.expected["out"]).double()
    at = (c - e).abs().sum(0).topk(min(_SKETCHED, c.shape[1])).indices
    gap = (c - e)[:, at]
    if not float(gap.norm()):
        return
    ranks = _ranks(context)
    x = flat(few.inputs["x"]).double().chunk(ranks, 1)
    parts = some_rows(context.weights[division.weight], at).double().chunk(ranks, 1)
    for rank, own in enumerate(x):
        term = own @ parts[rank].T
        for source in range(ranks):
            if source == rank:
                continue
            left = gap - (own @ parts[source].T - term)
            if float(left.norm()) < _NEAR * float(gap.norm()):
                yield _Held(rank, source)
        factor = _factor_of(gap, term)
        if factor is not None:
            yield _Held(rank, rank, factor)


TRACED_RANK_FAULTS = (
    ModelFault(
        "M16.rank_part", "A rank holds another rank's part of a weight",
        "right size, wrong place: text is garbled as soon as ranks share the model",
        "Cut each weight at rank * size, by the loader's own rank and not by a device's number.",
        _is_divided, _held_variants, _held_fitting,
    ),
    ModelFault(
        "M21.rank_gain", "One rank computes with another scale, or not at all",
        "its columns, or its term of the sum, are off by a factor",
        "Compare the rank's scales with the files; reduce over all ranks of the group.",
        _is_divided, _gain_variants, _gains_fitting,
    ),
)  # fmt: skip
