"""Recover what was done to one operand of a product as a whole: its scales, elements, places.

An operand's rows meet the rows of the other one in the outputs, so both are equations for each
other. Unknown numbers are solved for on every other equation and have to give the rest; then they
are compared with what is stored: a function of the stored number or code, a rule for places, or,
of a weight, a table. A rule is proposed only if it gives what was seen.

Shape letters: R rows of the operand, S rows of the other one, K columns, B blocks, C codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.engine.recover.maps import simplest
from degarble.harness.engine.recover.numbers import (
    functions,
    grids,
    places,
    readings,
    rotations,
    scale_values,
)
from degarble.harness.engine.recover.operands import StoredOperand
from degarble.harness.engine.recover.stated import operation
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.number_formats import BLOCK_FORMATS
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.harness.report.number_text import number

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.engine.recover.numbers import Places
    from degarble.harness.formats.number_formats import BlockFormat

Function = Callable[[StoredOperand], "Tensor"]  # the numbers [R, K] that were multiplied
Numbers = Callable[["Tensor"], "Tensor"]
KEPT = "every number is kept"
FEWEST_ORDERED = 8  # rows that show which scale a block has
FEW_ROWS = 4  # on which rules are tried first
MOST_SOLVED = 64  # rows that numbers are read off
MOST_CODES = 256
MOST_AT_ONCE = 32  # sets of numbers
NEAR = 4.0  # standard errors
EXACT = 2.0**-9  # of a number
SCREENED = 8  # equations for each part of a sum, on which parts are tried first
FEWEST_SCREENED = 32  # equations more
MOST_KEPT_PLACES = 1 << 10  # rules for so many are kept
HARDLY = 0.5  # of these are given: of all of them fewer than hold are
SCARCE = 0.1  # of the outputs are wrong
HOLDS = 0.98  # of the outputs that a proposal gives; the proof is for all
_ROUNDING = 2.0**-7
_GOLDEN = 0.6180339887498949
_TINY = 1e-300


@operation
@dataclass(frozen=True, eq=False)
class OperandChange:
    """What was done to an operand: words that follow its name, and the numbers it had.

    `constant` changes hold numbers of this operand, and say nothing of another call's.
    """

    words: str
    apply: Function
    constant: bool = False
    table: tuple[str, ...] = field(default=(), metadata={"stated": False})
    gain: float | None = None  # a factor on these numbers, which is to be fitted
    by_row: bool = field(default=False, metadata={"stated": False})  # a row needs no other one

    def numbers(self, operand: StoredOperand) -> Tensor:
        """Return the numbers [R, K] that were multiplied."""
        made = self.apply(operand)
        return made if self.gain is None or self.gain == 1 else made * self.gain


@dataclass(frozen=True, eq=False)
class Equations:
    """Rows of an operand, the other operand, and what came out of them."""

    operand: StoredOperand  # whole
    rows: Tensor  # [R] of it
    other: Tensor  # [S, K] of float64
    seen: Tensor  # [R, S] of float64
    right: Tensor  # [R, S]
    allowed: Tensor  # [R, S]
    known: Mapping[str, float] = field(default_factory=dict)  # scales of other operands

    def of(self, chosen: Tensor) -> Equations:
        """Keep some rows."""
        parts = (self.rows, self.seen, self.right, self.allowed)
        rows, seen, right, allowed = (part[chosen] for part in parts)
        return replace(self, rows=rows, seen=seen, right=right, allowed=allowed)

    def in_proportion(self) -> Equations:
        """Return them with what healthy outputs may be off in proportion to small wrong ones."""
        seen, right = (side.nan_to_num(0, 0, 0).norm(dim=1) for side in (self.seen, self.right))
        part = (seen / right.clamp(min=_TINY)).clamp(_TINY, 1.0)
        return replace(self, allowed=self.allowed * part[:, None])

    @cached_property
    def wrong(self) -> Tensor:
        """Mark outputs [R, S] that are not the right ones."""
        return ~((self.seen - self.right).abs() <= self.allowed)

    def given_by(self, numbers_RK: Tensor) -> float:
        """Return the share of outputs that numbers of these rows give: of wrong ones, if less."""
        return float(self.given_by_each(numbers_RK[None])[0])

    def given_by_each(self, numbers_MRK: Tensor) -> Tensor:
        """Return that share [M] for several sets of numbers."""
        made = numbers_MRK @ self.other.T
        near = (made - self.seen).abs() <= torch.maximum(self.allowed, _ROUNDING * made.abs())
        near |= (made == self.seen) | (made.isnan() & self.seen.isnan())
        every, wrong = near.double().mean((1, 2)), self.wrong
        if not bool(wrong.any()):
            return every
        return torch.minimum(every, near[:, wrong].double().mean(1))

    def giving(self, tried: Iterable[tuple[OperandChange, Tensor]]) -> Iterator[OperandChange]:
        """Yield the changes whose numbers give what was seen, in their order."""
        left = iter(tried)
        while some := list(islice(left, MOST_AT_ONCE)):
            shares = self.given_by_each(torch.stack([numbers for _, numbers in some]))
            yield from (some[at][0] for at in (shares >= HOLDS).nonzero().flatten().tolist())

    def gain_of(self, numbers_RK: Tensor) -> tuple[float, float]:
        """Return the factor on numbers of these rows that fits best, and its standard error."""
        made = numbers_RK @ self.other.T
        weigh = torch.maximum(self.allowed, _ROUNDING / 4 * self.seen.abs()).clamp(min=_TINY)
        along = float((made / weigh).square().sum())
        across = float((made * self.seen / weigh.square()).sum())
        return (across / along, along**-0.5) if along > 0 else (1.0, 0.0)


def changes_of(equations: Equations, *, constant: bool) -> Iterator[OperandChange]:
    """Yield what gives the outputs, simplest first; tables only where `constant` ones may be."""
    wrong = equations.wrong.any(1).nonzero().flatten()
    if not len(wrong) or not equations.seen.numel():
        return
    few = equations.of(wrong[:: -(-len(wrong) // FEW_ROWS)])
    some = equations.of(_spread(equations, wrong))
    for change in _given_by_few(few, _proposed(equations, some, constant=constant)):
        if change.gain is not None:
            yield from _fitted(equations, change)
        elif _given(equations, change) >= HOLDS:
            yield change


def _given_by_few(few: Equations, proposed: Iterator[OperandChange]) -> Iterator[OperandChange]:
    """Yield the changes that give what was seen in a few rows, in their order."""
    own = few.operand.of_rows(few.rows)

    def tried() -> Iterator[tuple[OperandChange, Tensor]]:
        for change in proposed:
            try:
                made = change.numbers(own if change.by_row else few.operand)
                made = made if change.by_row else made[few.rows]
            except CANNOT_RUN:
                continue
            if made.shape == own.values.shape and made.dtype is few.other.dtype:
                yield change, made

    yield from few.giving(tried())


def _fitted(equations: Equations, change: OperandChange) -> Iterator[OperandChange]:
    """Yield a change that has a factor with the factor that all outputs show."""
    made = change.apply(equations.operand)[equations.rows]
    best, error = equations.gain_of(made)
    if change.words == KEPT:
        yield from _known_factors(equations, best, error)
    gain = simplest(best, 1.5 * error)
    own = replace(change, words=_with_gain(change.words, gain), gain=gain)
    if gain and _given(equations, own) >= HOLDS:
        yield own


def _known_factors(equations: Equations, gain: float, error: float) -> Iterator[OperandChange]:
    """Yield what the scale of everything may have been: a function of it, or another's."""
    own = equations.operand.factor
    if equations.operand.form is None or len(own) > 1 or not equations.operand.form.tensor_scale:
        return
    for each in functions():
        value = float(each.apply(own))
        if value != float(own) and abs(value / float(own) - gain) <= 3 * error:
            yield OperandChange(
                f"the tensor scale is {each.words}",
                partial(_on_factor, each.apply),
            )
    for name, value in equations.known.items():
        for words, used in ((name, value), (f"the reciprocal of {name}", 1 / value)):
            if abs(used / float(own) - gain) <= 3 * error:
                yield OperandChange(
                    f"the tensor scale is {words}",
                    partial(_on_factor, partial(torch.full_like, fill_value=used)),
                )


def _with_gain(words: str, gain: float) -> str:
    """Add the factor to what was done, where it is not 1."""
    if words == KEPT:
        return f"every number is multiplied by {number(gain, 4)}"
    if gain == 1:
        return words
    return f"{words}, and multiplied by {number(gain, 4)}"


def _spread(equations: Equations, wrong: Tensor) -> Tensor:
    """Choose rows to read numbers off: wrong ones, and right ones, which the numbers give too."""
    every = torch.arange(len(equations.rows))
    chosen = torch.cat([
        wrong[:: -(-len(wrong) // MOST_SOLVED)], every[:: -(-len(every) // (MOST_SOLVED // 4))]
    ])  # fmt: skip
    found: Tensor = chosen.unique()
    return found


def _given(equations: Equations, change: OperandChange) -> float:
    operand, rows = equations.operand, equations.rows
    try:
        if change.by_row:
            return equations.given_by(change.numbers(operand.of_rows(rows)))
        return equations.given_by(change.numbers(operand)[rows])
    except CANNOT_RUN:
        return 0.0


def _proposed(equations: Equations, some: Equations, *, constant: bool) -> Iterator[OperandChange]:
    yield from _by_functions(equations.operand)
    yield from _by_scales(some)
    yield from _by_parts(some)
    yield from _by_elements(some)
    yield from _by_places(equations)
    yield from _by_order_of_blocks(some)
    yield from _by_formats(equations.operand)
    if constant:
        yield from _by_free_scales(equations)


# ---- parts that a function is applied to ---------------------------------------------------------


@operation
def on_numbers(of: Numbers, operand: StoredOperand) -> Tensor:
    """Return an operand's numbers, changed."""
    return of(operand.numbers)


@operation
def _on_scaled_elements(of: Numbers, operand: StoredOperand) -> Tensor:
    return of(operand.values * operand.spread(operand.scales)) * operand.factor


@operation
def _on_scale_products(of: Numbers, operand: StoredOperand) -> Tensor:
    return operand.values * operand.spread(of(operand.scales * operand.factor))


@operation
def _on_factor(of: Numbers, operand: StoredOperand) -> Tensor:
    return replace(operand, factor=of(operand.factor)).numbers


@operation
def _on_scales(of: Numbers, operand: StoredOperand) -> Tensor:
    return replace(operand, scales=of(operand.scales).double()).numbers


@operation
def _on_scale_codes(of: Numbers, operand: StoredOperand) -> Tensor:
    assert operand.scale_codes is not None, "a reading of codes"
    return replace(operand, scales=of(operand.scale_codes).double()).numbers


@operation
def _on_scale_table(read: Mapping[int, float], operand: StoredOperand) -> Tensor:
    return replace(operand, scales=_by_table(operand.scales, operand.scale_codes, read)).numbers


@operation
def _on_elements(of: Numbers, operand: StoredOperand) -> Tensor:
    return replace(operand, values=of(operand.values)).numbers


@operation
def _on_codes(of: Numbers, operand: StoredOperand) -> Tensor:
    assert operand.codes is not None, "a reading of codes"
    return replace(operand, values=of(operand.codes)).numbers


@operation
def _on_element_table(read: Mapping[int, float], operand: StoredOperand) -> Tensor:
    return replace(operand, values=_by_table(operand.values, operand.codes, read)).numbers


@operation
def _in_columns(chosen: Tensor, of: Numbers, values: Tensor) -> Tensor:
    return torch.where(chosen, of(values), values)


@operation
def _columns_of(of: Callable[[int], Tensor], matrix: Tensor) -> Tensor:
    return matrix[:, of(matrix.shape[1])]


# ---- functions of all numbers --------------------------------------------------------------------


def _by_functions(operand: StoredOperand) -> Iterator[OperandChange]:
    for each in functions():
        yield OperandChange(
            f"every number is {each.words}", partial(on_numbers, each.apply), by_row=True
        )
    if operand.form is None:
        return
    for each in functions():
        yield OperandChange(
            f"every element times its block scale is {each.words}",
            partial(_on_scaled_elements, each.apply),
            by_row=True,
        )
        yield OperandChange(
            f"every product of block scale and tensor scale is {each.words}",
            partial(_on_scale_products, each.apply),
            by_row=True,
        )


def _by_formats(operand: StoredOperand) -> Iterator[OperandChange]:
    for form in BLOCK_FORMATS.values():
        if form != operand.form and not form.zero_point:
            yield OperandChange(
                f"every number is quantised to {form.name} once more",
                partial(on_numbers, partial(requantised, form)),
                by_row=form.block[0] == 1 and not form.tensor_scale,
            )


@operation
def requantised(form: BlockFormat, numbers: Tensor) -> Tensor:
    """Return numbers after a quantisation to a format, scales included."""
    return dequantise(quantise(numbers.float().contiguous(), form, CANONICAL), torch.float64)


# ---- block scales --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Solved:
    """Numbers that were solved for, with what they may be off, and the share that they give."""

    used: Tensor
    error: Tensor
    given: float


def _solved(parts_RSB: Tensor, equations: Equations) -> _Solved | None:
    """Solve for a factor of each part, for every row, on every other equation."""
    count, wide = parts_RSB.shape[1:]
    if count < 2 * wide + 2:
        return None
    weigh = 1 / equations.allowed.clamp(min=_TINY)
    fitted = slice(0, None, 2)
    a = (parts_RSB * weigh[..., None])[:, fitted]
    b = (equations.seen * weigh)[:, fitted]
    size = a.norm(dim=1).clamp(min=_TINY)
    a = a / size[:, None]
    gram = a.transpose(1, 2) @ a + 1e-12 * torch.eye(wide, dtype=a.dtype)
    inverse = torch.linalg.inv(gram)
    used = (inverse @ (a.transpose(1, 2) @ b[..., None]))[..., 0] / size
    error = inverse.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt() / size
    made = (parts_RSB * used[:, None]).sum(-1)
    loose = torch.maximum(equations.allowed, _ROUNDING * made.abs())
    near = (made - equations.seen).abs() <= 1.5 * loose
    return _Solved(used, error, float(near[:, 1::2].double().mean()))


def _solved_alike(parts_RS: Sequence[Tensor], equations: Equations) -> _Solved | None:
    """Solve for one factor of each part in all rows, whose equations are laid end to end."""
    seen, right, allowed = (
        side.reshape(1, -1) for side in (equations.seen, equations.right, equations.allowed)
    )
    flat = replace(
        equations, seen=seen, right=right, allowed=allowed, rows=equations.rows[:1]
    )  # fmt: skip
    return _solved(torch.stack(tuple(parts_RS), -1).reshape(1, -1, len(parts_RS)), flat)


def _are_no_parts(of: Callable[[Tensor, Tensor], Tensor], count: int, some: Equations) -> bool:
    """Return whether few equations show that one factor of each part does not give what was seen.

    `of` returns the parts [E, P] of the sums of some rows and rows of the other operand.
    """
    wrong, few = some.wrong.flatten().nonzero().flatten(), SCREENED * count + FEWEST_SCREENED
    if len(wrong) < max(4 * few, SCARCE * some.seen.numel()):
        return False  # too few, or so few that what holds may leave half of them
    spread = torch.arange(few, dtype=torch.float64) * _GOLDEN % 1
    at = wrong[(spread * len(wrong)).long()]
    rows, others = at // some.seen.shape[1], at % some.seen.shape[1]
    seen, right, allowed = (
        side.flatten()[at][None] for side in (some.seen, some.right, some.allowed)
    )
    flat = replace(some, seen=seen, right=right, allowed=allowed, rows=some.rows[:1])
    solved = _solved(of(rows, others)[None], flat)
    return solved is not None and solved.given < HARDLY


def _solved_scales(equations: Equations) -> _Solved | None:
    """Solve for the block scales that rows were multiplied with, the factor left out."""
    operand = equations.operand.of_rows(equations.rows)
    wide, columns = operand.width, operand.values.shape[1]
    if not bool(equations.seen.isfinite().all()) or columns > wide * operand.scales.shape[1]:
        return None
    values = operand.values * operand.factor
    parts = [
        values[:, begin : begin + wide] @ equations.other[:, begin : begin + wide].T
        for begin in range(0, columns, wide)
    ]
    return _solved(torch.stack(parts, -1), equations)


def _by_scales(some: Equations) -> Iterator[OperandChange]:
    solved = _solved_scales(some)
    if solved is None or solved.given < HOLDS:
        return
    operand = some.operand.of_rows(some.rows)
    stored, used, error = operand.scales, solved.used, solved.error
    known = error < 0.5 * used.abs().clamp(min=_TINY)
    for factor in _factors(stored, used, error):
        yield OperandChange(KEPT, partial(on_numbers, torch.clone), gain=factor)
    if operand.form is None:
        return
    yield from _named_scales(operand, solved)
    for each in grids():
        moved = _taken(each.of, some.operand.scales)[some.rows]
        if _near(moved[known], used[known], error[known]):
            yield OperandChange(
                f"block scales are {each.words}",
                partial(_on_scales, partial(_taken, each.of)),
            )
    for words, of in _REDUCED:
        if _near(of(some.operand.scales)[some.rows][known], used[known], error[known]):
            yield OperandChange(words, partial(_on_scales, of))


def _by_order_of_blocks(some: Equations) -> Iterator[OperandChange]:
    """Yield the block scales of other blocks, in an order that is the same in all rows."""
    solved = _solved_scales(some) if some.operand.form is not None else None
    if solved is None or solved.given < HOLDS:
        return
    order = _order_of_blocks(some.operand.of_rows(some.rows).scales, solved)
    if order is None:
        return
    others = [at for at, source in enumerate(order) if source != at]
    lines = tuple(f"block {at} has the scales of block {order[at]}" for at in others)
    shown = f"{', '.join(lines[:3])}{', ...' if lines[3:] else ''}"
    yield OperandChange(
        f"blocks of a row have the scales of others: {shown}",
        partial(_on_scales, partial(_scales_in_order, tuple(order))),
        table=lines,
    )


def _order_of_blocks(stored: Tensor, solved: _Solved) -> list[int] | None:
    """Return, for each block of a row, the one whose scale it has in every row; None if unclear."""
    count, order = stored.shape[1], list[int]()
    known = solved.error < 0.5 * solved.used.abs().clamp(min=_TINY)
    for at in range(count):
        rows = known[:, at]
        if int(rows.sum()) < FEWEST_ORDERED:
            return None
        used, error = solved.used[rows, at], solved.error[rows, at]
        near = [s for s in range(count) if _near(stored[rows, s], used, error)]
        if at in near:
            near = [at]
        if not near or any(not torch.equal(stored[:, s], stored[:, near[0]]) for s in near[1:]):
            return None
        order.append(near[0])
    return None if order == list(range(count)) else order


@operation
def _scales_in_order(order: tuple[int, ...], scales: Tensor) -> Tensor:
    return scales[:, list(order)] if scales.shape[1] == len(order) else scales


@operation
def _of_first(dims: tuple[int, ...], scales: Tensor) -> Tensor:
    first = scales
    for dim in dims:
        first = first.narrow(dim, 0, 1)
    return first.expand_as(scales)


@operation
def _of_largest(dims: tuple[int, ...], scales: Tensor) -> Tensor:
    return scales.amax(dims, keepdim=True).expand_as(scales)


@operation
def _always(made: Tensor, _own: Tensor) -> Tensor:
    return made


_REDUCED: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("every row has one block scale, its first", partial(_of_first, (1,))),
    ("every row has one block scale, its largest", partial(_of_largest, (1,))),
    ("all rows have the block scales of the first one", partial(_of_first, (0,))),
    ("all rows have one block scale a column, the largest", partial(_of_largest, (0,))),
    ("all blocks have one scale, the first", partial(_of_first, (0, 1))),
    ("all blocks have one scale, the largest", partial(_of_largest, (0, 1))),
)


def _factors(stored: Tensor, used: Tensor, error: Tensor) -> Iterator[float]:
    """Yield the one factor between used and stored numbers, where there is one."""
    weigh = (stored / error.clamp(min=_TINY)).square().nan_to_num(0, 0, 0)
    total = float(weigh.sum())
    if total <= 0:
        return
    ratio = torch.where(stored == 0, 0.0, used / stored)
    mean = float((ratio * weigh).sum() / total)
    if _near(stored * mean, used, error):
        yield mean


def _near(one: Tensor, other: Tensor, error: Tensor) -> bool:
    if not one.numel():
        return False
    slack = NEAR * error + EXACT * other.abs()
    return float(((one - other).abs() <= slack).double().mean()) >= HOLDS


def _named_scales(operand: StoredOperand, solved: _Solved) -> Iterator[OperandChange]:
    """Yield functions of the stored scale, or of its code, and one factor."""
    stored, used, error = operand.scales, solved.used, solved.error
    for each in functions():
        for factor in _factors(each.apply(stored), used, error):
            yield OperandChange(
                f"block scales are {each.words}",
                partial(_on_scales, each.apply),
                gain=factor,
                by_row=True,
            )
    codes, form = operand.scale_codes, operand.form
    if codes is None or form is None:
        return
    for each in readings(form.scale):
        for factor in _factors(each.apply(codes), used, error):
            yield OperandChange(
                f"block scales are {each.words}",
                partial(_on_scale_codes, each.apply),
                gain=factor,
                by_row=True,
            )
    yield from _clamped(operand, solved)
    yield from _table_of_scales(operand, solved)


def _clamped(operand: StoredOperand, solved: _Solved) -> Iterator[OperandChange]:
    """Yield a bound on the scales, or one below which they are 0."""
    stored, used, error = operand.scales, solved.used, solved.error
    top, bottom = float(used.max()), float(used.min())
    if float(stored.max()) > top * 1.02:
        held = [s for s in stored.unique().tolist() if abs(s - top) <= 0.02 * top] or [top]
        made = stored.clamp(max=held[0])
        if _near(made, used, error):
            yield OperandChange(
                f"block scales are not above {number(held[0], 4)}",
                partial(_on_scales, partial(torch.clamp, max=held[0])),
            )
    held_up = bottom > 0 and float(stored.min()) < bottom * 0.98
    if held_up and _near(stored.clamp(min=bottom), used, error):
        yield OperandChange(
            f"block scales are not below {number(bottom, 4)}",
            partial(_on_scales, partial(torch.clamp, min=bottom)),
        )


def _table_of_scales(operand: StoredOperand, solved: _Solved) -> Iterator[OperandChange]:
    """Yield what each code of a scale stood for, where codes alone decide; others as stored."""
    codes, form = operand.scale_codes, operand.form
    if codes is None or form is None:
        return
    read, lines = {}, []
    for code in codes.unique().tolist():
        held = codes == code
        weigh = 1 / solved.error[held].square().clamp(min=_TINY)
        mean = float((solved.used[held] * weigh).sum() / weigh.sum())
        slack = torch.tensor([float(weigh.sum()) ** -0.5])
        mean = float(_as_codes(operand, torch.tensor([mean], dtype=torch.float64), slack))
        own = float(operand.scales[held][0])
        if not _near(
            torch.full_like(solved.used[held], mean), solved.used[held], solved.error[held]
        ):
            return
        if abs(mean - own) > NEAR * float(weigh.sum()) ** -0.5 + EXACT * abs(own):
            read[code] = mean
            lines.append(f"scale code {code:#04x} stood for {mean:.4g} in place of {own:.4g}")
    if read:
        yield OperandChange(
            f"block scales are others by their code: {_listed(lines)}",
            partial(_on_scale_table, read),
            constant=True,
            table=tuple(lines),
        )


def _listed(lines: list[str]) -> str:
    shown = "; ".join(lines[:3])
    return shown + (f"; and {len(lines) - 3} codes more" if len(lines) > 3 else "")


def _by_table(own: Tensor, codes: Tensor | None, read: Mapping[int, float]) -> Tensor:
    assert codes is not None, "a table is read off codes"
    made = own.clone()
    for code, value in read.items():
        made[codes == code] = value
    return made


def _by_free_scales(equations: Equations) -> Iterator[OperandChange]:
    """Yield the block scales as they were solved for, where no rule gives them."""
    operand = equations.operand
    if operand.form is None or operand.scale_codes is None:
        return
    if len(equations.rows) < len(operand.values):
        return  # only a part of it was looked at
    solved = _solved_scales(equations)
    if solved is None or solved.given < HOLDS:
        return
    used, error = _as_codes(operand, solved.used, solved.error), solved.error
    same = (used - operand.scales).abs() <= NEAR * error + EXACT * operand.scales
    made = torch.where(same, operand.scales, used)
    apart = (~same).nonzero()
    if not len(apart):
        return
    wide = operand.width
    lines = [
        f"row {row}, columns {block * wide} to {block * wide + wide - 1}:"
        f" {float(used[row, block]):.4g} in place of {float(operand.scales[row, block]):.4g}"
        for row, block in apart[:8].tolist()
    ]
    yield OperandChange(
        f"{len(apart)} of {used.numel()} block scales are others, by no rule that was found"
        f" ({lines[0]})",
        partial(_on_scales, partial(_always, made)),
        constant=True,
        table=tuple(lines),
    )


def _as_codes(operand: StoredOperand, used: Tensor, error: Tensor) -> Tensor:
    """Return the scales that the format holds where they are as near as numbers are known."""
    assert operand.form is not None
    held = scale_values(operand.form.scale)
    at = torch.searchsorted(held, used.clamp(float(held[0]), float(held[-1])).contiguous())
    low, high = held[(at - 1).clamp(min=0)], held[at]
    near = torch.where((used - low).abs() < (high - used).abs(), low, high)
    return torch.where((near - used).abs() <= NEAR * error + EXACT * near.abs(), near, used)


@operation
def _taken(of: Callable[[int, int], Tensor], matrix: Tensor) -> Tensor:
    where, flat = of(*matrix.shape), matrix.reshape(-1)
    made = torch.where(where < 0, 0.0, flat[where.clamp(min=0)])
    return made.reshape(matrix.shape)


# ---- parts of the sum ----------------------------------------------------------------------------


def _by_parts(some: Equations) -> Iterator[OperandChange]:
    """Yield parts of the sum over columns that are left out, or counted otherwise, in every row."""
    operand = some.operand.of_rows(some.rows)
    numbers, columns = operand.numbers, operand.values.shape[1]
    if not bool(some.seen.isfinite().all()):
        return
    for wide in dict.fromkeys((columns // 2, columns // 4, columns // 8, 64, 16, 8)):
        if not wide or columns % wide or columns // wide < 2:
            continue
        if _are_no_parts(partial(_sums_over, numbers, some.other, wide), columns // wide, some):
            continue
        parts = [
            numbers[:, begin : begin + wide] @ some.other[:, begin : begin + wide].T
            for begin in range(0, columns, wide)
        ]
        solved = _solved_alike(parts, some)
        if solved is None or solved.given < HOLDS:
            continue
        factors = [
            simplest(f, max(NEAR * e, EXACT / 8))
            for f, e in zip(solved.used[0].tolist(), solved.error[0].tolist(), strict=True)
        ]
        if len(set(factors)) > 2 or all(f == 1 for f in factors):
            continue
        words = _parts_words(factors, wide)
        spread = torch.tensor(factors, dtype=torch.float64).repeat_interleave(wide)
        yield OperandChange(words, partial(on_numbers, partial(torch.mul, spread)))
        return


def _sums_over(
    numbers_RK: Tensor, other_SK: Tensor, wide: int, rows: Tensor, others: Tensor
) -> Tensor:
    every = numbers_RK[rows] * other_SK[others]
    return every.reshape(len(rows), -1, wide).sum(-1)


def _sums_by_code(
    numbers_RK: Tensor, codes_RK: Tensor, other_SK: Tensor, count: int, rows: Tensor, others: Tensor
) -> Tensor:
    made = other_SK.new_zeros(len(rows), count)
    return made.scatter_add_(1, codes_RK[rows], numbers_RK[rows] * other_SK[others])


def _parts_words(factors: list[float], wide: int) -> str:
    """Say which columns have which factor; runs of one factor are joined."""
    runs: list[tuple[int, int, float]] = []
    for at, factor in enumerate(factors):
        if runs and runs[-1][2] == factor:
            runs[-1] = (runs[-1][0], at, factor)
        else:
            runs.append((at, at, factor))
    said = [
        f"columns {a * wide} to {b * wide + wide - 1} "
        + ("are left out of the sum" if f == 0 else f"count {number(f, 4)} times")
        for a, b, f in runs
        if f != 1
    ]
    return " and ".join(said[:3]) + (f" and {len(said) - 3} parts more" if said[3:] else "")


# ---- elements ------------------------------------------------------------------------------------


def _by_elements(some: Equations) -> Iterator[OperandChange]:
    """Solve for what each code of an element stood for."""
    operand = some.operand.of_rows(some.rows)
    codes, form = operand.codes, operand.form
    if codes is None or form is None or not bool(some.seen.isfinite().all()):
        return
    yield from _by_half_of_elements(some)
    held = codes.unique().tolist()
    if len(held) > MOST_CODES or 2 * len(held) + 2 > some.seen.numel():
        return
    scaled = (operand.spread(operand.scales) * operand.factor).expand_as(operand.values)
    numbered = torch.searchsorted(torch.tensor(held), codes.contiguous())
    sums = partial(_sums_by_code, scaled, numbered, some.other, len(held))
    if _are_no_parts(sums, len(held), some):
        return
    parts = [torch.where(codes == code, scaled, 0.0) @ some.other.T for code in held]
    solved = _solved_alike(parts, some)
    if solved is None or solved.given < HOLDS:
        return
    used, error = solved.used[0], solved.error[0]
    stored = torch.stack([operand.values[codes == code][0] for code in held])
    asked = torch.tensor(held)
    for each in functions():
        for factor in _factors(each.apply(stored), used, error):
            yield OperandChange(
                f"elements are {each.words}",
                partial(_on_elements, each.apply),
                gain=factor,
                by_row=True,
            )
    for each in readings(form.element):
        for factor in _factors(each.apply(asked), used, error):
            yield OperandChange(
                f"elements are {each.words}",
                partial(_on_codes, each.apply),
                gain=factor,
                by_row=True,
            )
    read, lines = {}, []
    for code, own, value, slack in zip(
        held, stored.tolist(), used.tolist(), error.tolist(), strict=True
    ):
        if abs(value - own) > NEAR * slack + EXACT * abs(own):
            read[code] = simplest(value, NEAR * slack)
            lines.append(f"code {code:#x} stood for {read[code]:.4g} in place of {own:.4g}")
    if read:
        yield OperandChange(
            f"elements are others by their code: {_listed(lines)}",
            partial(_on_element_table, read),
            constant=len(held) < form.element.code_count // 2,
            table=tuple(lines),
        )


def _by_half_of_elements(some: Equations) -> Iterator[OperandChange]:
    """Try functions of the elements in even columns alone, and in odd ones."""
    columns = torch.arange(some.operand.values.shape[1])
    halves = (("even", columns % 2 == 0), ("odd", columns % 2 == 1))
    for words, chosen in halves:
        for each in functions():
            yield OperandChange(
                f"elements in {words} columns are {each.words}",
                partial(_on_elements, partial(_in_columns, chosen, each.apply)),
                by_row=True,
            )


# ---- places --------------------------------------------------------------------------------------


def _by_places(equations: Equations) -> Iterator[OperandChange]:
    """Try rules for places: of elements or of scales or of both, along columns and along rows."""
    wrong = equations.wrong.any(1).nonzero().flatten()
    few = equations.of(wrong[[0, len(wrong) // 2]])
    yield from few.giving(_columns_by_places(few))
    yield from few.giving(_rows_by_places(few))


def _columns_by_places(few: Equations) -> Iterator[tuple[OperandChange, Tensor]]:
    """Yield what moves columns of a row, with the numbers of these rows."""
    part = few.operand.of_rows(few.rows)
    columns, blocks = part.values.shape[1], part.scales.shape[1]
    whole, numbers = part.form is None, part.numbers
    scaled = part.spread(part.scales) * part.factor
    for each, index in _with_places(columns):
        moved = [("numbers", numbers[:, index])]
        if not whole:
            moved = [("elements", part.values[:, index] * scaled), *moved]
        for what, made in moved:
            words = f"{what} of columns are {_place_words(each.words, 'columns')}"
            yield OperandChange(words, partial(_columns_moved, what, each.of)), made
    for each in places(blocks) if not whole and blocks > 1 else ():
        words = f"block scales of a row are {_place_words(each.words, 'blocks')}"
        made = replace(part, scales=part.scales[:, each.of(blocks)]).numbers
        yield OperandChange(words, partial(_on_scales, partial(_columns_of, each.of))), made


def _rows_by_places(few: Equations) -> Iterator[tuple[OperandChange, Tensor]]:
    """Yield what moves rows, with the numbers that these rows then have."""
    operand, own = few.operand, few.operand.of_rows(few.rows)
    rows = len(operand.values)
    scaled = own.spread(own.scales) * own.factor
    for each, index in _with_places(rows) if rows > 1 else ():
        source = operand.of_rows(index[few.rows])
        tried = [("numbers", source.numbers)]
        if operand.form is not None:
            scales = own.values * source.spread(source.scales) * own.factor
            tried += [("elements", source.values * scaled), ("block scales", scales)]
            if len(own.factor) > 1:
                tensor_scales = own.values * own.spread(own.scales) * source.factor
                tried.append(("tensor scales", tensor_scales))
        for what, made in tried:
            words = f"{what} of rows are {_place_words(each.words, 'rows')}"
            yield OperandChange(words, partial(_rows_moved, what, each.of)), made


def _with_places(count: int) -> Iterator[tuple[Places, Tensor]]:
    """Yield the rules for so many places with the places that they give."""
    if count > MOST_KEPT_PLACES:
        yield from ((each, each.of(count)) for each in (*places(count), *rotations(count)))
    else:
        yield from _kept_places(count)


@lru_cache(maxsize=8)
def _kept_places(count: int) -> tuple[tuple[Places, Tensor], ...]:
    with torch.inference_mode(mode=False):
        return tuple((each, each.of(count)) for each in (*places(count), *rotations(count)))


def _place_words(words: str, of: str) -> str:
    if words.startswith("those"):
        return f"those of {of} {words.removeprefix('those ')}"
    return words


@operation
def _columns_moved(what: str, of: Callable[[int], Tensor], operand: StoredOperand) -> Tensor:
    index = of(operand.values.shape[1])
    if what == "numbers":
        return operand.numbers[:, index]
    return replace(operand, values=operand.values[:, index]).numbers


@operation
def _rows_moved(what: str, of: Callable[[int], Tensor], operand: StoredOperand) -> Tensor:
    source = operand.of_rows(of(len(operand.values)))
    match what:
        case "numbers":
            return source.numbers
        case "elements":
            return replace(operand, values=source.values).numbers
        case "block scales":
            return replace(operand, scales=source.scales).numbers
    return replace(operand, factor=source.factor).numbers
