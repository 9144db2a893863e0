"""Judge one matrix product against exact arithmetic on the same operands, and name its cause.

The judgement is two-sided: beyond the budget of its twin, or nearer to the product of unquantised
operands than the format allows. Causes are known faults without a number, then fitted ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import (
    CANNOT_RUN,
    DtypeMismatch,
    InvalidArgument,
    ShapeMismatch,
    UnknownName,
)
from degarble.harness.engine.budget.budget import (
    OutputResult,
    ResultBasis,
    judge,
    nearer_than_the_twin,
)
from degarble.harness.engine.conventions.learned import LEANS
from degarble.harness.engine.conventions.registry import OPERANDS, REGISTRY
from degarble.harness.engine.diagnose.judge.product import (
    OUTPUTS,
    Explanation,
    MatrixOperand,
    OutputSelection,
    PredictedOutput,
    Product,
    ProductMismatch,
    require_data,
)
from degarble.harness.engine.diagnose.judge.report import (
    JudgedKernel,
    NamedCause,
    census_of,
    elements_of,
)
from degarble.harness.engine.faults.registry import FAULTS
from degarble.harness.formats.codec import FORMAT_OF_DTYPE, decode_array, encode_array, pack_nibbles
from degarble.harness.formats.layouts import LINEAR
from degarble.harness.formats.number_formats import E2M1, NibbleOrder, Rounding
from degarble.harness.formats.quantise import quantise, spread_blocks
from degarble.harness.report.number_text import number, share, span
from degarble.harness.report.verdict import Verdict
from degarble.references.numerics import DecodedOperands

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.budget.budget import Budget
    from degarble.harness.formats.quantise import QuantisedTensor

    Change = Callable[[QuantisedTensor], QuantisedTensor | None]


# --------------------------------------------------------------------------------------------------
# Known faults of a matrix product without a fitted number, as variants to reproduce.
#
# Variants: operands read wrongly (nibbles, scale layouts and columns, directions, counts, power-of-
# two scales, signs), outputs rounded or stored wrongly, sums kept in a narrow format, operands that
# were not quantised. Faults of a quantised tensor come from the registry of tensor faults. The
# suites plant every variant by this same code. A variant that these operands do not allow is left
# out.
#
# Shape letters: M rows, K summed, N outputs, C block scales of a row.


_NARROW = {torch.bfloat16: "BF16", torch.float16: "FP16"}
_STEPS = (16, 32, 64, 128, 256)  # of K that are summed before a narrow accumulator is written
_MINUS_HALF = 0x9
_ENCODERS = (
    ("truncated", "toward zero", Rounding.TOWARD_ZERO),
    ("ties_away", "half away from zero", Rounding.NEAREST_AWAY),
    ("upward", "toward plus infinity", Rounding.UP),
)


def variants_of(
    wrong: ProductMismatch, reference: Mapping[str, Tensor] | None
) -> Iterator[Explanation]:
    """Yield every variant, the cheapest to reject first."""
    product = wrong.product
    for name in ("w", "x"):
        operand: MatrixOperand = getattr(product, name)
        if operand.quantised is None:
            continue
        for fault, title, words, change in changes():
            changed = change(operand.quantised)
            if changed is not None:
                other = product.exchanged(**{name: MatrixOperand(changed)})
                yield Explanation(fault, title, f"{words}, in {name},", partial(predicted, other))
    yield from _permuted(product)
    yield from _rounded(product)
    if reference:
        yield from _unquantised(product, reference)
        yield from _encoded_otherwise(product, reference)
    if _is_near(wrong):
        yield from _narrow_sums(product)


def changes() -> Iterator[tuple[str, str, str, Change]]:
    """Yield what damages a quantised operand: fault, title, words, change."""
    for fault in FAULTS.values():
        yield fault.id, fault.title, f"applying {fault.id}", fault.inject
    for step, word in ((1, "next"), (-1, "previous")):
        for axis, line, family in ((-1, "column", "column_off"), (-2, "row", "row_off")):
            title = f"Every block takes the scale of the {word} {line}"
            for wraps in (True, False):
                words = f"reading block scales one {line} off" + (", around the end" * wraps)
                yield f"M12.{family}", title, words, partial(_shifted, step, axis, wraps)
    for rule, word in ((Rounding.DOWN, "down"), (Rounding.UP, "up")):
        yield (
            f"M06.{word}", f"Block scales are rounded {word} to powers of two",
            f"rounding block scales {word} to powers of two", partial(_power_of_two, rule),
        )  # fmt: skip
    yield (
        "O01.half_lost", "The code of -0.5 is read as 0.5",
        "reading code 0x9 as 0.5", partial(recoded, {_MINUS_HALF: 0x1}),
    )  # fmt: skip
    yield (
        "O01.magnitudes", "The sign bit of the elements is lost",
        "reading all codes without their sign", partial(recoded, {8 + k: k for k in range(8)}),
    )  # fmt: skip


def predicted(product: Product, part: OutputSelection | None) -> PredictedOutput:
    """Return a product as what an explanation predicts, whole or in part."""
    chosen = product if part is None else product.select(*part)
    return PredictedOutput(chosen.expected, chosen.budget)


def _shifted(step: int, axis: int, wraps: bool, tensor: QuantisedTensor) -> QuantisedTensor | None:
    """Give each block its neighbour's scale; the last one keeps its own, or takes the first's."""
    scales = tensor.linear_scale_codes()
    if scales.shape[axis] < 2:
        return None
    moved = scales.roll(-step, axis)
    if not wraps:
        # roll() wraps around; without wrapping the edge keeps its own scale.
        edge = scales.shape[axis] - 1 if step > 0 else 0
        moved.select(axis, edge).copy_(scales.select(axis, edge))
    return _with_scales(tensor, moved)


def _with_scales(tensor: QuantisedTensor, linear: Tensor) -> QuantisedTensor:
    plain = replace(tensor, block_scale=linear, layout=LINEAR)
    return plain.with_layout(tensor.layout)


def _power_of_two(rule: Rounding, tensor: QuantisedTensor) -> QuantisedTensor | None:
    """Round each block scale to a power of two."""
    fmt = tensor.format.scale
    values = tensor.scale_values()
    exponent = values.double().clamp(min=2.0**-60).log2()
    near = exponent.floor() if rule is Rounding.DOWN else exponent.ceil()
    whole = torch.where(values > 0, torch.exp2(near).float(), values)
    # float32 scales are stored as numbers, not as codes.
    if fmt.bits == 32:
        return _with_scales(tensor, whole)
    return _with_scales(tensor, encode_array(whole, fmt, Rounding.NEAREST_EVEN))


def recoded(table: Mapping[int, int], tensor: QuantisedTensor) -> QuantisedTensor | None:
    """Replace element codes by a table."""
    if tensor.format.element != E2M1:
        return None
    every = torch.arange(16, dtype=torch.uint8)
    for code, other in table.items():
        every[code] = other
    codes = every[tensor.element_codes().long()]
    order = tensor.nibble_order or NibbleOrder.LOW_EVEN
    return replace(tensor, codes=pack_nibbles(codes, order) if tensor.format.packed else codes)


def _permuted(product: Product) -> Iterator[Explanation]:
    """Yield the right numbers in the wrong columns or rows."""
    rows, columns = len(product.x.values), len(product.w.values)
    every = torch.arange(columns)
    orders = []
    if columns % 2 == 0:
        half = every.reshape(2, -1)
        orders = [
            ("M14.swapped", "The two halves of the output are exchanged",
             "exchanging both halves of the columns", half.flip(0).reshape(-1)),
            ("M14.interleaved", "Halves stand interleaved that belong side by side",
             "interleaving both halves of the columns", half.T.reshape(-1)),
            ("M14.pulled_apart", "Halves stand side by side that belong interleaved",
             "separating even and odd columns", every.reshape(-1, 2).T.reshape(-1)),
        ]  # fmt: skip
    for step in (1, -1):
        orders.append(
            ("M12.columns_shifted", "The output is shifted by one column",
             f"shifting all columns by {step}", every.roll(step))
        )  # fmt: skip
    for fault, title, words, order in orders:
        if not torch.equal(order, every):
            yield Explanation(fault, title, words, partial(_reordered, product, None, order))
    for step in (1, -1):
        if rows > 1:
            order = torch.arange(rows).roll(step)
            yield Explanation(
                "M12.rows_shifted", "The output is shifted by one row",
                f"shifting all rows by {step}", partial(_reordered, product, order, None),
            )  # fmt: skip


def _reordered(
    product: Product, rows: Tensor | None, columns: Tensor | None, part: OutputSelection | None
) -> PredictedOutput:
    """Return the product with its rows or columns in another order."""
    given = (
        [torch.arange(len(side.values)) for side in (product.x, product.w)]
        if part is None
        else list(part)
    )
    if rows is not None:
        given[0] = rows[given[0]]
    if columns is not None:
        given[1] = columns[given[1]]
    chosen = product.select(*given)
    return PredictedOutput(chosen.expected, chosen.budget)


def _rounded(product: Product) -> Iterator[Explanation]:
    """Yield the right sum with a wrong rounding after it."""
    if product.dtype is not torch.float32:
        for rule, word, fault in (
            (Rounding.TOWARD_ZERO, "truncated", "M40.coarse_output"),
            (Rounding.DOWN, "rounded down", "M40.coarse_output"),
            (Rounding.UP, "rounded up", "M40.coarse_output"),
        ):
            yield Explanation(
                fault, f"The output is {word} where it is to be rounded to nearest",
                f"an output that is {word}", partial(_by_rule, product, rule),
            )  # fmt: skip
    for dtype, word in _NARROW.items():
        if dtype is not product.dtype:
            yield Explanation(
                "M40.coarse_output", f"The output was stored in {word} on the way",
                f"storing the output in {word} first", partial(_stored, product, dtype),
            )  # fmt: skip
        if product.x_used.factor is not None or product.w_used.factor is not None:
            yield Explanation(
                "M40.small_accumulator", f"The sum is cast to {word} before its scales are applied",
                f"casting the sum to {word} in front of the tensor scales",
                partial(_cast_first, product, dtype),
            )  # fmt: skip


def _by_rule(product: Product, rule: Rounding, part: OutputSelection | None) -> PredictedOutput:
    chosen = product if part is None else product.select(*part)
    fmt = FORMAT_OF_DTYPE[product.dtype]
    rounded = decode_array(encode_array(chosen.exact, fmt, rule), fmt)
    return PredictedOutput(rounded.to(product.dtype), chosen.budget)


def _stored(product: Product, dtype: torch.dtype, part: OutputSelection | None) -> PredictedOutput:
    chosen = product if part is None else product.select(*part)
    return PredictedOutput(chosen.exact.to(dtype).to(product.dtype), _on_the_way(chosen, dtype))


def _cast_first(
    product: Product, dtype: torch.dtype, part: OutputSelection | None
) -> PredictedOutput:
    chosen = product if part is None else product.select(*part)
    total = (chosen.x_used.unit.double() @ chosen.w_used.unit.double().T).to(dtype)
    made = chosen.summed_up(total.double())
    return PredictedOutput(made.to(product.dtype), _on_the_way(chosen, dtype, 2))


def _on_the_way(product: Product, dtype: torch.dtype, times: float = 1.0) -> Budget:
    """Return a budget for values stored on the way: the coarser spacing, and `times` the slack."""
    budget = product.budget
    coarser = min(budget.output, FORMAT_OF_DTYPE[dtype], key=lambda fmt: fmt.mantissa_bits)
    words = f"{times:g} roundings to {_NARROW[dtype]} on the way, each with the slack of one"
    derivation = (*budget.derivation, words)
    return replace(budget, slack=budget.slack * times, output=coarser, derivation=derivation)


def _narrow_sums(product: Product) -> Iterator[Explanation]:
    """Yield partial sums kept in 16 bits."""
    for dtype, word in _NARROW.items():
        for step in _STEPS:
            if step < product.x.values.shape[1]:
                for behind in (False, True):
                    yield Explanation(
                        "M40.short_sums", f"Partial sums are kept in {word}",
                        f"keeping the sum in {word} after every {step} of K",
                        partial(_accumulated, product, (dtype, step, behind)), 1,
                    )  # fmt: skip


def _accumulated(
    product: Product, how: tuple[torch.dtype, int, bool], part: OutputSelection | None
) -> PredictedOutput:
    """Sum K in steps and round each partial sum; apply scales after the sum, or before."""
    dtype, step, behind = how
    chosen = product if part is None else product.select(*part)
    x, w = ((side.unit if behind else side.values).float() for side in (chosen.x, chosen.w))
    total = torch.zeros(len(x), len(w))
    for begin in range(0, x.shape[1], step):
        total += x[:, begin : begin + step] @ w[:, begin : begin + step].T
        total = total.to(dtype).float()
    made = chosen.summed_up(total.double()) if behind else total
    if not behind and chosen.bias is not None:
        made = made + chosen.bias.float()
    budget = _on_the_way(chosen, dtype, x.shape[1] / step)
    return PredictedOutput(made.to(product.dtype), budget)


def _unquantised(product: Product, reference: Mapping[str, Tensor]) -> Iterator[Explanation]:
    """Yield one operand, or both, as they were before quantisation."""
    known = {name: MatrixOperand(reference[name]) for name in ("x", "w") if name in reference}
    both = [{name: operand} for name, operand in known.items()]
    if len(known) == 2:
        both.insert(0, known)
    for chosen in both:
        names = " and ".join(chosen)
        yield Explanation(
            "M19.unquantised", f"A silent fallback: {names} went in unquantised",
            f"the product of unquantised {names}", partial(predicted, product.exchanged(**chosen)),
        )  # fmt: skip


def _encoded_otherwise(product: Product, reference: Mapping[str, Tensor]) -> Iterator[Explanation]:
    """Yield one operand whose elements another rule rounded."""
    for name in ("x", "w"):
        tensor = getattr(product, name).quantised
        if tensor is None or name not in reference:
            continue
        for variant, how, rounding in _ENCODERS:
            for other in _requantised(tensor, reference[name], rounding):
                yield Explanation(
                    f"M09.{variant}", f"{name} is rounded {how} when it is quantised",
                    f"rounding the elements of {name} {how}",
                    partial(predicted, product.exchanged(**{name: MatrixOperand(other)})),
                )  # fmt: skip


def _requantised(
    tensor: QuantisedTensor, values: Tensor, rounding: Rounding
) -> Iterator[QuantisedTensor]:
    """Quantise again with another rounding rule: quotients as rounded, and exact ones.

    The largest of a block is 6 in one arithmetic and 5.9999 in another, which truncates to 4.
    """
    rules = tuple(replace(rule, element_rounding=rounding) for rule in tensor.dialect.rules)
    dialect = replace(tensor.dialect, rules=rules, name=f"{tensor.dialect.name}, {rounding}")
    scale = None if tensor.tensor_scale is None else tensor.decode_scale
    rows = values.reshape(tensor.shape).float().contiguous()
    try:
        yield quantise(rows, tensor.format, dialect, decode_scale=scale)
    except CANNOT_RUN:
        return  # the rule needs another kind of scale
    if tensor.format.block[0] != 1 or not tensor.format.packed or tensor.zero_point is not None:
        return
    steps = tensor.scale_values().double() * (1.0 if scale is None else scale.double())
    steps = spread_blocks(tensor, steps)
    exact = rows.double() / steps.where(steps > 0, torch.inf)
    codes = encode_array(exact.float(), tensor.format.element, rounding)
    order = tensor.nibble_order or NibbleOrder.LOW_EVEN
    yield replace(tensor, codes=pack_nibbles(codes, order))


def _is_near(wrong: ProductMismatch) -> bool:
    """Tell whether the difference may be one of rounding: a few per cent, all values finite."""
    if not wrong.finite:
        return False
    c, t = wrong.candidate.double(), wrong.exact
    return bool((c - t).norm() < 0.1 * t.norm())


# --------------------------------------------------------------------------------------------------
# Fit candidate causes of a wrong matrix product: gains, moved tiles, missing K, wrong codes.
#
# * A factor on a box of rows and columns, named after the operands' scales where one matches.
# * Blocks of K that are missing or counted twice, by regression on the blocks of K.
# * Element codes read as other values, by regression on the codes.
# * Boxes that hold one constant, or the content of another box.
#
# A fit only proposes; reproduction decides whether it explains the output.
#
# Shape letters: M rows, K summed, N outputs, B blocks of K.

_BLOCK = 16  # of K: the smallest piece that is searched
_FEW = 16  # elements: a number fitted to fewer explains anything
_EQUATIONS = 4  # for each unknown of a regression
_SNAP = 0.1  # largest distance of a fitted share of a block from -1, 0 or 1
_NEAR_GAIN = 2e-3  # relative distance of a fitted factor from a named one; reproduction decides
_GRIDS = ((128, 128), (128, 256), (256, 128), (64, 128), (128, 64), (64, 64), (32, 32), (16, 16))


def fits_of(wrong: ProductMismatch) -> Iterator[Explanation]:
    """Yield the explanations fitted to the candidate."""
    yield from _constant(wrong)
    if not wrong.finite:
        return
    yield from _gains(wrong)
    yield from _moved(wrong)
    yield from _blocks_of_k(wrong)
    for name in ("w", "x"):
        yield from _recoded(wrong, name)


def _place(part: OutputSelection, shape: tuple[int, ...]) -> str:
    """Describe a box: rows, columns, or both; "the whole output" if it is everything."""
    found = [
        f"{word} {span(index.tolist(), total)}"
        for word, index, total in zip(("rows", "columns"), part, shape, strict=True)
        if len(index) < total
    ]
    return " and ".join(found) or "the whole output"


def _predicted(
    wrong: ProductMismatch, change: Tensor, box: OutputSelection, part: OutputSelection | None
) -> PredictedOutput:
    """Return the twin with a box replaced; `change` holds the box in the output's dtype."""
    output = wrong.twin.clone()
    output[box.rows[:, None], box.columns[None, :]] = change.to(output.dtype)
    if part is None:
        return PredictedOutput(output, wrong.budget)
    slack = wrong.budget.slack.expand(wrong.twin.shape)
    return PredictedOutput(
        part.select_from(output), replace(wrong.budget, slack=part.select_from(slack))
    )


def _constant(wrong: ProductMismatch) -> Iterator[Explanation]:
    """Yield a box that holds a single value."""
    for box in (*_boxes(wrong), wrong.box):
        held = box.select_from(wrong.candidate)
        if held.numel() < _FEW or not bool(wrong.beyond.any()):
            return
        value = held.reshape(-1)[0]
        if bool((held == value).all()) or bool((held.isnan() & value.isnan()).all()):
            break
    else:
        return
    if bool((box.select_from(wrong.twin) == value).all()):
        return
    words = f"{_place(box, tuple(wrong.twin.shape))} left at {float(value):g}"
    columns_alone = len(box.rows) == len(wrong.twin) and len(box.columns) < wrong.twin.shape[1]
    fault = "M41.columns_unwritten" if columns_alone else "M41.rows_unwritten"
    yield Explanation(
        fault, "Part of the output was never written", words,
        partial(_predicted, wrong, held, box), 1 if not value or not value.isfinite() else 2,
    )  # fmt: skip


def _gains(wrong: ProductMismatch) -> Iterator[Explanation]:
    """Yield one factor on a box, by least squares: under known names first, then as a number."""
    if wrong.product.bias is not None:
        return
    shape = tuple(wrong.twin.shape)
    for part in _boxes(wrong):
        c, t = part.select_from(wrong.candidate.double()), part.select_from(wrong.exact)
        energy = float((t * t).sum()) if t.numel() >= _FEW else 0.0
        # Least squares: <c, t> / <t, t>.
        gain = float((c * t).sum()) / energy if energy else math.nan
        # A gain this near to 1 is below one BF16 rounding (2^-9).
        if not math.isfinite(gain) or not gain or abs(gain - 1) < 2.0**-12:
            continue
        whole = len(part.rows) == shape[0] and len(part.columns) == shape[1]
        place = "" if whole else f" in {_place(part, shape)}"
        fault, title = "M43.whole", "All values are wrong by one factor"
        if not whole:
            by_columns = len(part.columns) < shape[1]
            fault = _fault_of_part(by_columns, len(part.rows) < shape[0], gain)
            title = f"Some {'columns' if by_columns else 'rows'} are wrong by one factor"
        for value, word, known in (
            *_factor_names(wrong.product, gain),
            (gain, f"{gain:.6g}", None),
        ):
            yield Explanation(
                known if known and whole else fault, title, f"the factor {word}{place}",
                partial(_predicted, wrong, t * value, part), 2 if word == f"{gain:.6g}" else 1,
            )  # fmt: skip


def _fault_of_part(by_columns: bool, by_rows: bool, gain: float) -> str:
    """Return the fault id: a scale is positive and covers all rows; other factors are a tile's."""
    if by_columns and (by_rows or gain < 0):
        return "M43.one_tile"
    return "M03.one_scale" if by_columns else "M43.whole"


def _factor_names(product: Product, gain: float) -> Iterator[tuple[float, str, str | None]]:
    """Yield names of a factor: wrong use of a tensor scale, or a power of two."""
    names: list[tuple[float, str, str | None]] = []
    for side in ("x", "w"):
        factor = getattr(product, side).factor
        if factor is None or factor.numel() > 1:
            continue
        s = float(factor)
        if s > 0:
            names += [
                (1 / s, f"1 / s of {side}", "M02.missing"),
                (s, f"s of {side}", "M02.applied_twice"),
                (1 / s**2, f"1 / s^2 of {side}", "M01.inverse"),
            ]
    nearest = 2.0 ** round(math.log2(abs(gain)))
    names.append((math.copysign(nearest, gain), f"{math.copysign(nearest, gain):g}", None))
    for value, word, known in names:
        if abs(gain / value - 1) < _NEAR_GAIN:
            yield value, word, known


def _moved(wrong: ProductMismatch) -> Iterator[Explanation]:
    """Yield a box that holds another box's content: a stale tile, a row written twice."""
    rows, columns = wrong.twin.shape
    (r0, r1), (c0, c1) = ((int(i.min()), int(i.max()) + 1) for i in wrong.box)
    most_of_it = (r1 - r0) * 2 > rows and (c1 - c0) * 2 > columns
    if most_of_it or (r1 - r0) * (c1 - c0) < _FEW:
        return
    grids = [(r1 - r0, c1 - c0), *_GRIDS]
    for high, wide in dict.fromkeys(grids):
        top, left = r0 // high * high, c0 // wide * wide
        if (high, wide) == grids[0]:
            top, left = r0, c0
        bottom, right = min(top + high, rows), min(left + wide, columns)
        if r1 > bottom or c1 > right:
            continue
        found = _other_box(wrong, (top, bottom), (left, right))
        if found is None:
            continue
        (r, c) = found
        box = OutputSelection(torch.arange(top, bottom), torch.arange(left, right))
        change = wrong.twin[r : r + bottom - top, c : c + right - left]
        words = (
            f"{_place(box, (rows, columns))} holding what belongs to row {r}, column {c} onwards"
        )
        yield Explanation(
            "M37.tile", "Part of the output holds what belongs elsewhere", words,
            partial(_predicted, wrong, change, box), 1,
        )  # fmt: skip
        return


def _other_box(
    wrong: ProductMismatch, high: tuple[int, int], wide: tuple[int, int]
) -> tuple[int, int] | None:
    """Return the twin's box, on the same grid, nearest to the candidate's content."""
    rows, columns = wrong.twin.shape
    height, width = high[1] - high[0], wide[1] - wide[0]
    held = wrong.candidate[high[0] : high[1], wide[0] : wide[1]].float()
    t = wrong.twin.float()
    # Within 5 % of its length, or it is another content.
    best, at = 0.05 * float(held.norm()), None
    for r in range(high[0] % height, rows - height + 1, height):
        for c in range(wide[0] % width, columns - width + 1, width):
            distance = float((t[r : r + height, c : c + width] - held).norm())
            if distance < best and (r, c) != (high[0], wide[0]):
                best, at = distance, (r, c)
    return at


def _blocks_of_k(wrong: ProductMismatch) -> Iterator[Explanation]:
    """Yield blocks of K that are missing from the sum, or counted twice."""
    x, w = wrong.product.x_used.values, wrong.product.w_used.values
    length = x.shape[1]
    if length % _BLOCK:
        return
    count = length // _BLOCK
    part = _equations(wrong, count)
    if len(part.rows) * len(part.columns) < 2 * count:
        return
    xs, ws = x[part.rows].double(), w[part.columns].double()
    pieces = torch.einsum(
        "mbk,nbk->mnb", xs.reshape(len(xs), count, -1), ws.reshape(len(ws), count, -1)
    ).reshape(-1, count)
    d = part.select_from(wrong.candidate.double() - wrong.exact).reshape(-1, 1)
    shares = torch.linalg.lstsq(pieces, d).solution.flatten()
    # -1: the block is missing from the sum; 1: it is counted twice.
    whole = shares.round().clamp(-1, 1)
    if bool((shares - whole).abs().max() > _SNAP) or not bool(whole.any()):
        return
    blocks = whole.nonzero().flatten().tolist()
    if len(blocks) == count:
        return  # this is a factor, or an output never written
    k = (whole.repeat_interleave(_BLOCK) * 1.0)[None, :]
    first, last = blocks[0] * _BLOCK, (blocks[-1] + 1) * _BLOCK - 1
    where = f"{len(blocks)} of {count} blocks of K, {first} to {last},"
    twice = bool((whole > 0).any())
    doing = f"{'counting' if twice else 'leaving out'} {where}{' twice' if twice else ''}"
    for box in _boxes(wrong):
        added = (x[box.rows].double() * k) @ w[box.columns].double().T
        place = _place(box, tuple(wrong.twin.shape))
        yield Explanation(
            "M41.repeated_k" if twice else "M41.tile_of_k",
            "Part of K is counted twice" if twice else "Part of K is left out of the sum",
            f"{doing} in {place}",
            partial(_predicted, wrong, box.select_from(wrong.exact) + added, box), 1,
        )  # fmt: skip


def _boxes(wrong: ProductMismatch) -> Iterator[OutputSelection]:
    """Yield the box, then its full columns and full rows: a mild fault leaves gaps."""
    rows, columns = (torch.arange(extent) for extent in wrong.twin.shape)
    hit, (tall, wide) = wrong.box, wrong.is_whole
    own = OutputSelection(rows if tall else hit.rows, columns if wide else hit.columns)
    yield own
    for box in (OutputSelection(rows, own.columns), OutputSelection(own.rows, columns)):
        if len(box.rows) > len(own.rows) or len(box.columns) > len(own.columns):
            yield box


def _equations(wrong: ProductMismatch, unknowns: int) -> OutputSelection:
    """Return enough elements for a regression, from the box or the rows or columns it covers."""
    wanted = _EQUATIONS * unknowns
    boxes = [wrong.box, *_boxes(wrong)]
    rows, columns = next((b for b in boxes if len(b.rows) * len(b.columns) >= wanted), boxes[0])
    many = min(len(columns), max(32, math.ceil(wanted / max(1, len(rows)))))
    high = min(len(rows), math.ceil(wanted / many))
    return OutputSelection(_spread(rows, high), _spread(columns, many))


def _spread(index: Tensor, count: int) -> Tensor:
    return index[torch.linspace(0, len(index) - 1, count).long()]


def _recoded(wrong: ProductMismatch, name: str) -> Iterator[Explanation]:
    """Yield element codes that are read as other values."""
    operand: MatrixOperand = getattr(wrong.product, name)
    tensor = operand.quantised
    if tensor is None or tensor.format.element != E2M1 or len(tensor.shape) != 2:
        return
    part = _equations(wrong, 64)
    lone = wrong.product.select(*part)
    own: MatrixOperand = getattr(lone, name)
    other = (lone.x if name == "w" else lone.w).values.double()
    codes = tensor.element_codes()[part.columns if name == "w" else part.rows]
    table = decode_array(torch.arange(16, dtype=torch.uint8), E2M1).double()
    elements = table[codes.long()]
    scales = torch.where(elements != 0, own.values.double() / elements.where(elements != 0, 1), 0)
    d = part.select_from(wrong.candidate.double() - wrong.exact).reshape(-1, 1)
    # Codes 0 and 8 are zeros, which no scale reveals.
    present = [code for code in range(1, 16) if code != 8 and bool((codes == code).any())]
    if not present or len(d) < 2 * len(present):
        return
    columns = [((codes == code) * scales) for code in present]
    pieces = [(other @ c.T if name == "w" else c @ other.T).reshape(-1) for c in columns]
    shift = torch.linalg.lstsq(torch.stack(pieces, 1), d).solution.flatten()
    changed: dict[int, float] = {}
    for code, step in zip(present, shift.tolist(), strict=True):
        value = float(table[code]) + step
        near = float(table[int((table - value).abs().argmin())])
        if abs(value - near) > _SNAP:
            return
        if near != float(table[code]):
            changed[code] = near
    if changed:
        yield _relabelled(wrong, name, changed)


def _relabelled(wrong: ProductMismatch, name: str, changed: dict[int, float]) -> Explanation:
    operand: MatrixOperand = getattr(wrong.product, name)
    table = decode_array(torch.arange(16, dtype=torch.uint8), E2M1).tolist()
    to = {code: table.index(value) for code, value in changed.items()}
    tensor = operand.quantised
    changed_to = None if tensor is None else recoded(to, tensor)
    assert changed_to is not None, "asked of a tensor of E2M1 alone"
    other = wrong.product.exchanged(**{name: MatrixOperand(changed_to)})
    text = ", ".join(f"0x{code:x} as {number(value)}" for code, value in changed.items())

    def make(part: OutputSelection | None) -> PredictedOutput:
        chosen = other if part is None else other.select(*part)
        return PredictedOutput(chosen.expected, chosen.budget)

    return Explanation(
        "M09.decode_table", "Element codes are read as other values",
        f"reading code {text}, in {name},", make, 1,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# The judgement is two-sided: beyond the budget of its twin, or nearer to the product of unquantised
# operands than the twin, which is a silent fallback. A cause is named when its reproduction is
# within its own budget everywhere; a few rows and columns are tried first, since they reject nearly
# all.

OUT = "out"


@dataclass(frozen=True)
class GemmCauseSearch:
    """Which causes are looked for: `first` are tried before all others, which stop at its proof.

    With `only`, nothing else is tried than these faults.
    """

    first: Callable[[ProductMismatch], Iterator[Explanation]] = lambda _wrong: iter(())
    only: frozenset[str] | None = None


def judge_product(
    name: str,
    product: Product,
    output: Any,
    reference: Any = None,
    search: GemmCauseSearch | None = GemmCauseSearch(),
) -> JudgedKernel:
    """Judge a kernel's output of a product; `reference` as in harness.api.judge."""
    operands, target = _reference(reference, product)
    candidate = require_output(OUT, output, product.shape)
    if candidate.dtype is not product.dtype:
        product = replace(product, dtype=candidate.dtype)
    rows = candidate.reshape(-1, candidate.shape[-1]).contiguous()
    wrong = ProductMismatch(product, rows, product.exact, product.expected, product.budget)
    result = judge(rows, wrong.twin, wrong.budget, output=OUT)
    too_good = None
    if operands:
        target = Product(
            operands.get("x", product.x), operands.get("w", product.w), product.dtype, product.bias
        ).expected
    if target is not None:
        too_good = nearer_than_the_twin(result, rows, wrong.twin, target)
    verdict = result.verdict
    if too_good is not None and too_good.ratio > 1:
        verdict = Verdict.DIFFERS
    if verdict is Verdict.AGREES:
        return JudgedKernel(name, verdict, {OUT: result}, too_good=too_good)
    named: tuple[NamedCause, ...] = ()
    tried: tuple[str, ...] = ()
    note, kind = "", followed_by(product, rows, result) if search else None
    if kind is not None:
        note = f"{REGISTRY[OPERANDS].words(kind)}: a convention ({OPERANDS}={kind}), not declared"
    elif search:
        plain = {key: operand.values for key, operand in operands.items()}
        named, tried = explanations(wrong, plain, search)
    census = census_of(candidate)
    return JudgedKernel(
        name, verdict, {OUT: result}, {OUT: elements_of(rows, wrong.twin, wrong.excess)},
        {OUT: census} if census else {}, named, tried,
        too_good if too_good is not None and too_good.ratio > 1 else None, note, kind,
    )  # fmt: skip


def followed_by(product: Product, rows: Tensor, result: OutputResult) -> DecodedOperands | None:
    """Return the convention of decoded operands that a differing product follows, or None.

    It has to be clearly nearer as well: a wider budget explains nothing.
    """
    if product.operands is not DecodedOperands.EXACT or result.verdict is Verdict.AGREES:
        return None
    kinds = [DecodedOperands.WEIGHTS] if product.w.quantised is not None else []
    if product.x.quantised is not None:
        kinds.append(DecodedOperands.BOTH)
    for kind in kinds:
        other = replace(product, operands=kind)
        judged = judge(rows, other.expected, other.budget)
        nearer = LEANS * judged.distance < result.distance
        if judged.verdict is Verdict.AGREES and nearer:
            return kind
    return None


def agrees_at_once(name: str, product: Product, output: Tensor) -> JudgedKernel | None:
    """Return agreement if the candidate equals this machine's own float32 product bit for bit.

    A float32 product is correct in any order of its sum, so nothing is left to judge. None
    otherwise, which proves nothing.
    """
    rows = output.reshape(-1, output.shape[-1])
    plain = product.plain()
    if plain.dtype is not rows.dtype or not torch.equal(plain, rows):
        return None
    words = "bit for bit the float32 product of the same operands on this machine"
    basis = ResultBasis(derivation=(words,))
    judged = OutputResult(OUT, Verdict.AGREES, reasons=lambda: basis)
    return JudgedKernel(name, Verdict.AGREES, {OUT: judged}, note=words)


def explanations(
    wrong: ProductMismatch, reference: Mapping[str, Tensor], search: GemmCauseSearch
) -> tuple[tuple[NamedCause, ...], tuple[str, ...]]:
    """Return the causes that reproduce a candidate, the likeliest first, and all faults tried."""
    tried: list[str] = []
    found: list[tuple[Explanation, OutputResult]] = []
    for explanation in chain(search.first(wrong), fits_of(wrong), variants_of(wrong, reference)):
        if found and found[0][0].other and not explanation.other:
            break  # a whole matrix of another component fits nothing by chance
        if search.only is not None and explanation.fault not in search.only:
            continue
        tried.append(explanation.fault)
        if not _survives(wrong, explanation):
            continue
        output = explanation.make(None)
        judgement = judge(wrong.candidate, output.output, output.budget)
        if judgement.verdict is Verdict.AGREES:
            found.append((explanation, judgement))
    # Explanations without a fitted parameter come first.
    found.sort(key=lambda pair: (pair[0].rank, pair[1].ratio))
    named: dict[str, NamedCause] = {}
    for explanation, judgement in found:
        named.setdefault(explanation.fault, _named_cause(explanation, judgement))
    return tuple(named.values()), tuple(dict.fromkeys(tried))


def _survives(wrong: ProductMismatch, explanation: Explanation) -> bool:
    """Tell whether an explanation holds on a few rows and columns."""
    part = wrong.sample
    output = explanation.make(part)
    # The explanation changes nothing here, though something is wrong here.
    if torch.equal(output.output, part.select_from(wrong.twin)) and bool(
        part.select_from(wrong.beyond).any()
    ):
        return False
    return (
        judge(part.select_from(wrong.candidate), output.output, output.budget).verdict
        is Verdict.AGREES
    )


def _named_cause(explanation: Explanation, judgement: OutputResult) -> NamedCause:
    equal = share(judgement.identical)
    evidence = f"{explanation.words} reproduces {equal} of the codes, and all within the budget"
    return NamedCause(
        explanation.fault, explanation.title, evidence, judgement.ratio,
        explanation.words, explanation.other,
    )  # fmt: skip


def require_output(name: str, output: Any, shape: tuple[int, ...]) -> Tensor:
    """Return the output on the CPU; raise if it is no output of this shape."""
    if not isinstance(output, torch.Tensor):
        raise InvalidArgument(
            name, type(output).__name__, "the tensor that the kernel returned", "Pass its output."
        )
    if output.dtype not in OUTPUTS:
        raise DtypeMismatch(
            name, output.dtype, "bfloat16, float16 or float32",
            "Pass what the kernel wrote, in the format in which it was written.",
        )  # fmt: skip
    if tuple(output.shape) != shape:
        raise ShapeMismatch(
            name, tuple(output.shape), str(shape), "Check which operands belong to this output."
        )
    require_data(name, output)
    return output.detach().cpu()


def _reference(given: Any, product: Product) -> tuple[dict[str, MatrixOperand], Tensor | None]:
    """Return unquantised operands by name, or their output."""
    if given is None:
        return {}, None
    if isinstance(given, torch.Tensor):
        target = require_output("reference", given, product.shape)
        return {}, target.reshape(-1, target.shape[-1])
    if not isinstance(given, dict):
        raise InvalidArgument(
            "reference", type(given).__name__, "operands by name, or the output that they give",
            "Pass {'x': x, 'w': w} as they were before they were quantised.",
        )  # fmt: skip
    operands = {}
    for name, each in given.items():
        if name not in {"x", "w"}:
            raise UnknownName.among("reference", name, ("x", "w"))
        own: MatrixOperand = getattr(product, name)
        operand = MatrixOperand.from_value(f"reference {name}", each)
        if operand.values.shape != own.values.shape or operand.quantised is not None:
            raise ShapeMismatch(
                f"reference {name}", tuple(operand.values.shape), str(tuple(own.values.shape)),
                "Pass the operand as it was before it was quantised.",
            )  # fmt: skip
        operands[name] = operand
    return operands, None
