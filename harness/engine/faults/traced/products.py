"""Faults of any product and of any output: parts of K, codes read otherwise, numbers out of place.

What is left out of a sum, or counted twice, and which codes are read as other values follow from
outputs by regression. A fit only proposes: reproduction decides.

Shape letters: M rows, K summed, N outputs, B blocks of K.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import combinations, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness.engine.faults.codes import of_elements
from degarble.harness.engine.faults.gain_fit import both_gains, fitted, gain_text
from degarble.harness.engine.faults.model_faults import (
    FaultVariant,
    ModelFault,
    unrounded_output,
    with_facts,
    with_inputs,
    with_outputs,
    with_weights,
)
from degarble.harness.engine.faults.operand_faults import any_format, reading_fault
from degarble.harness.engine.faults.regions import Region, box, differing, flat
from degarble.harness.engine.faults.traced.operations import apart as pulled_apart
from degarble.harness.engine.faults.traced.operations import (
    of_kinds,
    side_by_side,
    traced_facts,
    variant_of,
)
from degarble.harness.engine.faults.weight_faults import FaultTexts, numbers_of
from degarble.harness.formats.codec import decode_array
from degarble.harness.formats.number_formats import E2M1
from degarble.harness.formats.quantise import spread_blocks
from degarble.harness.formats.weight import Weight
from degarble.harness.report.number_text import number
from degarble.references.linears import BLOCK_SCALE, activation_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext
    from degarble.harness.formats.quantise import QuantisedTensor

    Tensors = Mapping[str, Tensor]

_BLOCK = 16  # of K: the smallest piece that is searched
_EQUATIONS = 4  # for each unknown of a regression
_SNAP = 0.1  # largest distance of a fitted share of a block from -1, 0 or 1, or of a value
_WIDE = 32  # columns of a regression at least, where there are as many
_CODES = 16  # of E2M1


class _Product(NamedTuple):
    """Operands x [M, K] and w [N, K] as numbers, how far outputs are off, and where they differ."""

    name: str
    weight: Weight
    x: Tensor
    w: Tensor
    gap: Tensor
    rows: Tensor
    columns: Tensor

    def equations(self, unknowns: int) -> tuple[Tensor, Tensor]:
        """Return rows and columns with enough elements for a regression."""
        wanted = _EQUATIONS * unknowns
        rows, columns = self.rows, self.columns
        if len(rows) * len(columns) < wanted:
            rows = torch.arange(len(self.gap))
        many = min(len(columns), max(_WIDE, math.ceil(wanted / max(1, len(rows)))))
        return _spread(rows, math.ceil(wanted / many)), _spread(columns, many)


def _spread(index: Tensor, count: int) -> Tensor:
    return index[torch.linspace(0, len(index) - 1, min(count, len(index))).long()]


def _product(context: ComponentContext, record: CallRecord) -> _Product | None:
    """Return a linear as numbers; None where its outputs are not finite or of another shape."""
    mask, facts = differing(record), traced_facts(context)
    name = next((each for each in context.weights if each.endswith("weight")), None)
    if mask is None or name is None or not bool(record.outputs["out"].isfinite().all()):
        return None
    x = activation_values(record.inputs, facts.activation(name), torch.float64, facts.numerics)
    exact = with_facts(context, unrounded_output)(context.call)(record.inputs, context.weights)
    gap = flat(record.outputs["out"]).double() - flat(exact["out"]).double()
    weight = context.weights[name]
    rows, columns = (mask.any(axis).nonzero().flatten() for axis in (1, 0))
    return _Product(name, weight, flat(x), numbers_of(weight).double(), gap, rows, columns)


def _summed(
    context: ComponentContext, name: str, blocks: Mapping[int, float], rows: tuple[int, int] | None
) -> FaultVariant:
    """Multiply blocks of K in a weight: 0 leaves them out, 2 counts them twice."""
    (factor,) = set(blocks.values())
    first, last = min(blocks) * _BLOCK, (max(blocks) + 1) * _BLOCK - 1
    gaps = "" if len(blocks) * _BLOCK == last + 1 - first else f" in {len(blocks)} blocks"
    doing = "left out" if not factor else "counted twice"
    place = "" if rows is None else f" for columns {rows[0]} to {rows[1] - 1}"
    words = f"columns {first} to {last} of K{gaps} {doing}{place}"
    where: dict[str, Any] = {"k": first}
    if rows is not None:
        where["rows"] = f"{rows[0]} to {rows[1] - 1}"

    def changed(own: str, weight: Weight) -> Weight:
        if own != name:
            return weight
        value = numbers_of(weight).double().clone()
        part = value[slice(None) if rows is None else slice(*rows)]
        for block in blocks:
            part[:, block * _BLOCK : (block + 1) * _BLOCK] *= factor
        return Weight(value=value, input_scale=weight.input_scale, from_codes=weight.is_decoded)

    return variant_of(context, words, with_weights(changed), **where)


def _planted_blocks(factor: float, context: ComponentContext) -> Iterator[FaultVariant]:
    name = next((each for each in context.weights if each.endswith("weight")), None)
    count = 0 if name is None else context.weights[name].shape[1] // _BLOCK
    if name is None or count < 2:
        return
    tile = min(4, count // 2)
    for begin in dict.fromkeys((0, count - tile)):
        yield _summed(context, name, dict.fromkeys(range(begin, begin + tile), factor), None)
    height = context.weights[name].shape[0]
    if height >= 4:
        part = height // 4, height // 2
        yield _summed(context, name, {count - 1: factor}, part)


def _fitted_blocks(
    factor: float, context: ComponentContext, record: CallRecord
) -> Iterator[FaultVariant]:
    """Yield the blocks of K that are missing from the sum, or counted twice, by regression."""
    made = _product(context, record)
    if made is None or made.x.shape[1] % _BLOCK:
        return
    count = made.x.shape[1] // _BLOCK
    rows, columns = made.equations(count)
    if len(rows) * len(columns) < 2 * count:
        return
    pieces = torch.einsum(
        "mbk,nbk->mnb",
        made.x[rows].reshape(len(rows), count, -1),
        made.w[columns].reshape(len(columns), count, -1),
    ).reshape(-1, count)
    gap = made.gap[rows][:, columns].reshape(-1, 1)
    shares = torch.linalg.lstsq(pieces, gap).solution.flatten()
    whole = shares.round().clamp(-1, 1)
    blocks = (whole == factor - 1).nonzero().flatten().tolist()
    snapped = bool((shares - whole).abs().max() <= _SNAP)
    if not snapped or not blocks or len(blocks) in {0, count} or bool((whole == 1 - factor).any()):
        return
    known = dict.fromkeys(blocks, factor)
    yield _summed(context, made.name, known, None)
    part = int(made.columns[0]), int(made.columns[-1]) + 1
    if part != (0, made.gap.shape[1]):
        yield _summed(context, made.name, known, part)


# --------------------------------------------------------------------------------------------------
# Codes of E2M1 that are read as other values


def _reads_pairs(context: ComponentContext) -> bool:
    return context.component.kind == "traced.linear" and any(
        weight.storage is not None and weight.storage.format.element == E2M1
        for weight in context.weights.values()
    )


def _table() -> Tensor:
    return decode_array(torch.arange(_CODES, dtype=torch.uint8), E2M1).double()


def _read_as(context: ComponentContext, changed: Mapping[int, int]) -> FaultVariant:
    """Read element codes as the values of others."""
    table = _table()
    for code, other in changed.items():
        table[code] = _table()[other]

    def elements(tensor: QuantisedTensor, _own: Tensor) -> Tensor:
        return table[tensor.element_codes().long()]

    def change(name: str, weight: Weight) -> Weight:
        made = of_elements(elements)(context, name, weight) if weight.is_quantised else None
        return weight if made is None else made

    text = ", ".join(
        f"0x{code:x} as {number(float(_table()[other]))}" for code, other in changed.items()
    )
    return variant_of(context, f"code {text}", with_weights(change))


def _planted_codes(context: ComponentContext) -> Iterator[FaultVariant]:
    for changed in ({7: 6}, {9: 1}, {3: 4, 11: 12}):
        yield _read_as(context, changed)


def _fitted_codes(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    """Yield what each code is read as, by regression on the elements that hold it."""
    made = _product(context, record)
    if made is None or not made.weight.is_quantised:
        return
    tensor = made.weight.quantised()
    if tensor.format.element != E2M1 or len(tensor.shape) != 2:
        return
    rows, columns = made.equations(4 * _CODES)
    codes = tensor.element_codes()[columns]
    scales = tensor.scale_values().double()
    if tensor.tensor_scale is not None:
        scales = scales * tensor.decode_scale.double()
    scales = spread_blocks(tensor, scales)[columns]
    # Codes 0 and 8 are zeros, which no scale reveals.
    present = [code for code in range(_CODES) if code % 8 and bool((codes == code).any())]
    gap = made.gap[rows][:, columns].reshape(-1, 1)
    if not present or len(gap) < 2 * len(present):
        return
    pieces = [(made.x[rows] @ ((codes == code) * scales).T).reshape(-1) for code in present]
    shift = torch.linalg.lstsq(torch.stack(pieces, 1), gap).solution.flatten()
    changed, table = dict[int, int](), _table()
    for code, step in zip(present, shift.tolist(), strict=True):
        value = float(table[code]) + step
        near = int((table - value).abs().argmin())
        if not abs(value - float(table[near])) <= _SNAP:
            return
        if float(table[near]) != float(table[code]):
            changed[code] = near
    if changed:
        yield _read_as(context, changed)


# --------------------------------------------------------------------------------------------------
# A gain on a box of rows and columns, scales of inputs in other places


def _box_gain(
    context: ComponentContext, spot: Region, gain: float, *, first: bool = False
) -> Iterator[FaultVariant]:
    (r0, r1), (c0, c1) = spot.rows, spot.columns

    def region(_inputs: Tensors, out: Tensor) -> Tensor:
        mask = torch.zeros(flat(out).shape, dtype=torch.bool)
        mask[spot.index] = True
        return mask.reshape(out.shape)

    words = f"{gain_text(gain)} on rows {r0} to {r1 - 1}, columns {c0} to {c1 - 1}"
    found = both_gains(
        context, f"{words} of {context.name}", gain, region, {**spot.where, "gain": gain}
    )
    for variant in islice(found, 1 if first else None):
        yield replace(variant, needs_whole_call=True)


def _planted_boxes(context: ComponentContext) -> Iterator[FaultVariant]:
    for gain in (0.97, -1.0):
        yield from _box_gain(context, Region((0, 16), (0, 16)), gain, first=True)


def _fitted_boxes(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    """Yield the factor of a box with all elements that differ; none if that is the whole output."""
    mask = differing(record)
    if mask is None:
        return
    spot = box(mask)
    c, e = (flat(side["out"])[spot.index] for side in (record.outputs, record.expected))
    # Columns of a linear are rows of its weight, and all of an output is no box.
    other = c.shape == mask.shape or (
        c.shape[0] == mask.shape[0] and context.component.kind == "traced.linear"
    )
    gain = None if other else fitted(c, e)
    if gain is None or not gain or not math.isfinite(gain):
        return  # zeros were never written
    short = (float(f"{gain:.{digits}g}") for digits in (1, 2, 3, 4))
    for value in dict.fromkeys((*short, gain)):
        if value != 1:
            yield from _box_gain(context, spot, value)


def _scales_moved(axis: int, _context: ComponentContext, inputs: Tensors) -> Tensors | None:
    scales = inputs[BLOCK_SCALE]
    if scales.ndim < 2 or scales.shape[axis] < 2:
        return None
    codes = scales.view(torch.uint8) if scales.dtype.itemsize == 1 else scales
    return {**inputs, BLOCK_SCALE: codes.roll(-1, axis).view(scales.dtype)}


def _moved_scales(name: str, line: str, axis: int) -> ModelFault:
    return reading_fault(
        FaultTexts(
            f"M12.{name}", f"Every block of an input takes the scale of the next {line}",
            "each block is scaled by the scale of another one",
            "Scale j belongs to columns from j times the block on, scale row t to token t.",
            f"scale {line}s off by one in the input of",
        ),
        partial(_scales_moved, axis), any_format,
    )  # fmt: skip


def _operand_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    """Yield a component that takes one of its inputs for another, of the same form."""
    facts = traced_facts(context)
    forms = {n: facts.graph.trace.tensors[ref.number] for n, ref in facts.traced.inputs.items()}
    wide = {n: form.shape for n, form in forms.items() if form.dtype.is_floating_point}
    for first, second in combinations(wide, 2):
        if wide[first] == wide[second]:
            words = f"{first} and {second} exchanged"
            yield variant_of(context, words, with_inputs(partial(_exchanged, first, second)))


def _exchanged(first: str, second: str, inputs: Tensors) -> Tensors:
    return {**inputs, first: inputs[second], second: inputs[first]}


# --------------------------------------------------------------------------------------------------
# Right numbers in other columns or rows of an output


def _halves_exchanged(out: Tensor) -> Tensor:
    return out.roll(out.shape[-1] // 2, -1)


_ORDERS: Mapping[str, tuple[tuple[str, Callable[[Tensor], Tensor]], ...]] = {
    "M14.swapped": (("both halves of the columns exchanged", _halves_exchanged),),
    "M14.interleaved": (("both halves of the columns interleaved", side_by_side),),
    "M14.pulled_apart": (("even columns in front of odd ones", pulled_apart),),
    "M12.columns_shifted": (
        ("columns shifted by 1", lambda out: out.roll(1, -1)),
        ("columns shifted by -1", lambda out: out.roll(-1, -1)),
    ),
    "M12.rows_shifted": (
        ("rows shifted by 1", lambda out: out.roll(1, 0)),
        ("rows shifted by -1", lambda out: out.roll(-1, 0)),
    ),
}
_EVEN = frozenset({"M14.swapped", "M14.interleaved", "M14.pulled_apart"})


def _reordered(change: Callable[[Tensor], Tensor], _inputs: Tensors, outputs: Tensors) -> Tensors:
    return {**outputs, "out": change(outputs["out"])}


def _ordered(fault: str, context: ComponentContext) -> Iterator[FaultVariant]:
    for words, change in _ORDERS[fault]:
        apply = with_outputs(partial(_reordered, change))
        yield FaultVariant(
            f"{words} in {context.name}", apply, needs_whole_call=fault == "M12.rows_shifted"
        )


def _order_fits(
    fault: str, context: ComponentContext, record: CallRecord
) -> Iterator[FaultVariant]:
    """Yield an order of rows or columns that gives nearly what came out."""
    c, e = record.outputs.get("out"), record.expected.get("out")
    if c is None or e is None or c.shape != e.shape or c.ndim < 2 or not c.is_floating_point():
        return
    if fault in _EVEN and c.shape[-1] % 2:
        return
    for variant, (_, change) in zip(_ordered(fault, context), _ORDERS[fault], strict=True):
        moved = change(e).double()
        if float((c.double() - moved).norm()) < _SNAP * float(moved.norm()):
            yield variant


def _order_fault(fault: str, title: str) -> ModelFault:
    return ModelFault(
        fault, title, "right numbers in wrong places: text is garbled",
        "Compare how the epilogue stores a tile with how the next kernel reads it.",
        _PLACED, partial(_ordered, fault), partial(_order_fits, fault),
    )  # fmt: skip


_PLACED = of_kinds(
    "traced.linear", "traced.norm", "traced.gated", "traced.activation", "traced.residual",
    "traced.module", "traced.stretch",
)  # fmt: skip
_SUMS = of_kinds("traced.linear")
_TACTIC = "Run every tactic and bucket of rows against the reference, with poisoned outputs."

TRACED_PRODUCT_FAULTS = (
    ModelFault(
        "M41.tile_of_k", "Part of K is left out of the sum",
        "outputs are off by what some inputs give; nothing looks broken", _TACTIC, _SUMS,
        partial(_planted_blocks, 0.0), partial(_fitted_blocks, 0.0),
    ),
    ModelFault(
        "M41.repeated_k", "Part of K is counted twice",
        "outputs are off by what some inputs give; nothing looks broken", _TACTIC, _SUMS,
        partial(_planted_blocks, 2.0), partial(_fitted_blocks, 2.0),
    ),
    ModelFault(
        "M09.decode_table", "Element codes are read as other values",
        "the values of some codes are wrong, all others right",
        "E2M1 has 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; prove all 16.",
        _reads_pairs, _planted_codes, _fitted_codes,
    ),
    ModelFault(
        "M43.one_tile", "A systematic gain on one tile of an output",
        "a tile of rows and columns is off by a factor, or has the other sign",
        "Look for a scale or a sign that is applied tile by tile.",
        _PLACED, _planted_boxes, _fitted_boxes,
    ),
    ModelFault(
        "M14.operands", "Two operands of a step are exchanged",
        "gate acts as up, or a difference has the other sign",
        "Compare the order of fused weights with the order in which the kernel reads them.",
        of_kinds("traced.gated", "traced.module", "traced.stretch"), _operand_variants,
    ),
    _moved_scales("activation_column", "column", -1),
    _moved_scales("activation_row", "row", 0),
    _order_fault("M14.swapped", "The two halves of the output are exchanged"),
    _order_fault("M14.interleaved", "Halves stand interleaved that belong side by side"),
    _order_fault("M14.pulled_apart", "Halves stand side by side that belong interleaved"),
    _order_fault("M12.columns_shifted", "The output is shifted by one column"),
    _order_fault("M12.rows_shifted", "The output is shifted by one row"),
)  # fmt: skip
