"""Known faults of a matrix product without a fitted number, as variants to reproduce.

Variants: operands read wrongly (nibbles, scale layouts and columns, directions, counts,
power-of-two scales, signs), outputs rounded or stored wrongly, sums kept in a narrow format,
operands that were not quantised. Faults of a quantised tensor come from the registry of tensor
faults. The suites plant every variant by this same code. A variant that these operands do not allow
is left out.

Shape letters: M rows, K summed, N outputs, C block scales of a row.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.engine.diagnose.judge.mismatch import Explanation, Made
from degarble.harness.engine.diagnose.judge.product import Operand, Product
from degarble.harness.engine.faults.registry import FAULTS
from degarble.harness.formats.codec import FORMAT_OF_DTYPE, decode_array, encode_array, pack_nibbles
from degarble.harness.formats.layouts import LINEAR
from degarble.harness.formats.number_formats import E2M1, NibbleOrder, Rounding
from degarble.harness.formats.quantise import quantise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.budget.budget import Budget
    from degarble.harness.engine.diagnose.judge.mismatch import Part, Wrong
    from degarble.harness.formats.quantise import QuantisedTensor

    Change = Callable[[QuantisedTensor], QuantisedTensor | None]

_NARROW = {torch.bfloat16: "BF16", torch.float16: "FP16"}
_STEPS = (16, 32, 64, 128, 256)  # of K that are summed before a narrow accumulator is written
_MINUS_HALF = 0x9
_ENCODERS = (
    ("truncated", "toward zero", Rounding.TOWARD_ZERO),
    ("ties_away", "half away from zero", Rounding.NEAREST_AWAY),
    ("upward", "toward plus infinity", Rounding.UP),
)


def ways_of(wrong: Wrong, reference: Mapping[str, Tensor] | None) -> Iterator[Explanation]:
    """Yield every variant, the cheapest to reject first."""
    product = wrong.product
    for name in ("w", "x"):
        operand: Operand = getattr(product, name)
        if operand.quantised is None:
            continue
        for fault, title, words, change in changes():
            changed = change(operand.quantised)
            if changed is not None:
                other = product.exchanged(**{name: Operand(changed)})
                yield Explanation(fault, title, f"{words}, in {name},", partial(_of, other))
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


def _of(product: Product, part: Part | None) -> Made:
    chosen = product if part is None else product.at(*part)
    return Made(chosen.expected, chosen.budget)


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
    product: Product, rows: Tensor | None, columns: Tensor | None, part: Part | None
) -> Made:
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
    chosen = product.at(*given)
    return Made(chosen.expected, chosen.budget)


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


def _by_rule(product: Product, rule: Rounding, part: Part | None) -> Made:
    chosen = product if part is None else product.at(*part)
    fmt = FORMAT_OF_DTYPE[product.dtype]
    return Made(decode_array(encode_array(chosen.exact, fmt, rule), fmt).to(product.dtype),
                chosen.budget)  # fmt: skip


def _stored(product: Product, dtype: torch.dtype, part: Part | None) -> Made:
    chosen = product if part is None else product.at(*part)
    return Made(chosen.exact.to(dtype).to(product.dtype), _on_the_way(chosen, dtype))


def _cast_first(product: Product, dtype: torch.dtype, part: Part | None) -> Made:
    chosen = product if part is None else product.at(*part)
    total = (chosen.x_used.unit.double() @ chosen.w_used.unit.double().T).to(dtype)
    made = chosen.summed_up(total.double())
    return Made(made.to(product.dtype), _on_the_way(chosen, dtype, 2))


def _on_the_way(product: Product, dtype: torch.dtype, times: float = 1.0) -> Budget:
    """Return a budget for values stored on the way: the coarser spacing, and `times` the slack."""
    made = product.budget
    coarser = min(made.output, FORMAT_OF_DTYPE[dtype], key=lambda fmt: fmt.mantissa_bits)
    words = f"{times:g} roundings to {_NARROW[dtype]} on the way, each with the slack of one"
    derivation = (*made.derivation, words)
    return replace(made, slack=made.slack * times, output=coarser, derivation=derivation)


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


def _accumulated(product: Product, how: tuple[torch.dtype, int, bool], part: Part | None) -> Made:
    """Sum K in steps and round each partial sum; apply scales after the sum, or before."""
    dtype, step, behind = how
    chosen = product if part is None else product.at(*part)
    x, w = ((side.unit if behind else side.values).float() for side in (chosen.x, chosen.w))
    total = torch.zeros(len(x), len(w))
    for begin in range(0, x.shape[1], step):
        total += x[:, begin : begin + step] @ w[:, begin : begin + step].T
        total = total.to(dtype).float()
    made = chosen.summed_up(total.double()) if behind else total
    if not behind and chosen.bias is not None:
        made = made + chosen.bias.float()
    budget = _on_the_way(chosen, dtype, x.shape[1] / step)
    return Made(made.to(product.dtype), budget)


def _unquantised(product: Product, reference: Mapping[str, Tensor]) -> Iterator[Explanation]:
    """Yield one operand, or both, as they were before quantisation."""
    known = {name: Operand(reference[name]) for name in ("x", "w") if name in reference}
    both = [{name: operand} for name, operand in known.items()]
    if len(known) == 2:
        both.insert(0, known)
    for chosen in both:
        names = " and ".join(chosen)
        yield Explanation(
            "M19.unquantised", f"A silent fallback: {names} went in unquantised",
            f"the product of unquantised {names}", partial(_of, product.exchanged(**chosen)),
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
                    partial(_of, product.exchanged(**{name: Operand(other)})),
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
    if tensor.format.block[0] != 1 or not tensor.format.packed:
        return
    steps = tensor.scale_values().double() * (1.0 if scale is None else scale.double())
    blocks = rows.double().unflatten(-1, (-1, tensor.format.block[1]))
    exact = (blocks / steps.unsqueeze(-1).where(steps.unsqueeze(-1) > 0, torch.inf)).flatten(-2)
    codes = encode_array(exact.float(), tensor.format.element, rounding)
    order = tensor.nibble_order or NibbleOrder.LOW_EVEN
    yield replace(tensor, codes=pack_nibbles(codes, order))


def _is_near(wrong: Wrong) -> bool:
    """Tell whether the difference may be one of rounding: a few per cent, all values finite."""
    if not wrong.finite:
        return False
    c, t = wrong.candidate.double(), wrong.exact
    return bool((c - t).norm() < 0.1 * t.norm())
