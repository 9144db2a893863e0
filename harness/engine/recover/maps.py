"""Recover what was done to the right outputs: rows or columns moved, numbers clamped or cut.

Needs no weights, so it holds for every component. A map is read off a part of the elements and has
to give the others: rows are matched by every other column, columns by every other row, and numbers
of a map of single elements come from every other row.

Shape letters: T rows, F columns of an output viewed as a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.engine.faults.regions import box, flat
from degarble.harness.engine.localise.discrepancy import spans
from degarble.harness.engine.recover.numbers import lines_by, rule_of
from degarble.harness.engine.recover.stated import operation
from degarble.harness.report.number_text import number

if TYPE_CHECKING:
    from torch import Tensor

Function = Callable[["Tensor"], "Tensor"]
MOST_MOVED = 1 << 12  # rows, or columns, that are matched
MOST_BITS = 6  # of a mantissa that is cut
FEWEST_CLAMPED = 3  # elements at one bound
FEWEST_FILLED = 16  # elements of a part that holds one number
MOST_COMPARED = 1 << 25  # numbers, for a part that holds another one's
MOST_SOURCES = 16  # of such a part that are looked at
FACTOR_ERRORS = 8.0  # standard errors within which factors of columns are one
LARGE = 2.0**-6  # of the largest magnitude, at least, for a bound that clamps
_ROUNDING = 2.0**-7


class OutputMap(NamedTuple):
    """What was done to one output, in words, and as a function of the right output [T, F]."""

    output: str
    words: str
    apply: Function
    here: bool = False  # it speaks of rows of this call


@dataclass(frozen=True, eq=False)
class Sides:
    """One output of a call: what was returned, what should have been, and what may differ."""

    output: str
    seen: Tensor  # [T, F] of float64
    right: Tensor  # [T, F] of float64
    allowed: Tensor  # [T, F]
    loose: float = _ROUNDING  # of a number, which is nothing where numbers are codes

    def equal(self, one: Tensor, other: Tensor, allowed: Tensor) -> Tensor:
        """Mark numbers that are as near as roundings leave them."""
        bound = torch.maximum(one.abs(), other.abs()).mul_(self.loose)
        gap = (one - other).abs_()
        near = gap <= torch.maximum(allowed, bound)
        near |= one == other
        if bool(gap.sum().isnan()):
            near |= one.isnan() & other.isnan()
        return near


def maps_of(sides: Sides) -> Iterator[OutputMap]:
    """Yield maps that give what was seen where they were read off; the caller proves them."""
    ways = [_filled, _moved_part]
    if bool(sides.seen.isfinite().all()):
        ways += [_gains] if sides.loose else []
        ways += [_moved_rows, _moved_columns]
        ways += [_clamped, _cut, _signs] if sides.loose else []
    for propose in ways:
        found = propose(sides)
        if found is not None:
            yield found


# ---- rows and columns in other places ------------------------------------------------------------


def _moved_rows(sides: Sides) -> OutputMap | None:
    return _moved_lines(sides, "row", 0)


def _moved_columns(sides: Sides) -> OutputMap | None:
    turned = Sides(sides.output, sides.seen.T, sides.right.T, sides.allowed.T, sides.loose)
    return _moved_lines(turned, "column", 1)


def _moved_lines(sides: Sides, kind: str, dim: int) -> OutputMap | None:
    places = _places(sides)
    words = "" if places is None else moved(places, kind)
    if places is None or not words:
        return None
    by = int(places[0])
    if not dim and torch.equal(places, (torch.arange(len(places)) + by) % len(places)):
        by = by if 2 * by <= len(places) else by - len(places)
        words = f"rows of a call are rotated by {by}"
        return OutputMap(sides.output, words, partial(torch.roll, shifts=-by, dims=0))
    rule = rule_of(places) if dim else None
    if rule is not None:
        return OutputMap(sides.output, words, partial(lines_by, rule, dim))
    return OutputMap(sides.output, words, partial(_taken, places=places, dim=dim), here=not dim)


@operation
def _taken(right: Tensor, places: Tensor, dim: int) -> Tensor:
    if right.shape[dim] != len(places):
        return right  # a call of another extent: the map says nothing about it
    return right.index_select(dim, places)


def _places(sides: Sides) -> Tensor | None:
    """Return, for each line, the line whose numbers it holds; None where one holds no line's."""
    seen, right = sides.seen, sides.right
    count, width = seen.shape
    wrong = ~sides.equal(seen, right, sides.allowed).all(1)
    if not 1 < int(wrong.sum()) <= MOST_MOVED or count > MOST_MOVED or width < 4:
        return None
    places = torch.arange(count)
    half = slice(0, None, 2)
    for line in wrong.nonzero().flatten().tolist():
        same = sides.equal(
            seen[line, half], right[:, half], sides.allowed[line, half].expand(count, -1)
        ).all(1)
        same[line] = False
        found = same.nonzero().flatten()
        if not len(found) or not bool(right[found[0]].any()):
            return None
        places[line] = found[(found - line).abs().argmin()]
    return places


def moved(places: Tensor, kind: str) -> str:
    """Say by what rule lines moved; empty where there is none: a table is no description."""
    count = len(places)
    own = torch.arange(count)
    others = (places != own).nonzero().flatten()
    begin, end = int(others[0]), int(others[-1])
    shifts = (places - own)[others].unique().tolist()
    where = f"{kind}s {begin} to {end}" if len(others) < count else f"all {kind}s"
    if len(others) <= end - begin:
        where = f"{kind}s {spans(others.tolist())}"
    if len(shifts) == 1:
        by = shifts[0]
        side = "before" if by < 0 else "after"
        return f"{where} hold the numbers of the {kind} {abs(by)} {side} them"
    around = ((places - own)[others] % count).unique().tolist()
    if len(around) == 1 and len(others) == count:
        return f"{kind}s are rotated by {around[0]}"
    if bool((places[begin : end + 1] == own[begin : end + 1].flip(0)).all()):
        return f"{where} are reversed"
    for step in range(1, count // 2 + 1):
        if bool(((own ^ step) == places)[others].all()):
            return f"{where} are exchanged with those {step} beside them"
    sources = places[others].unique()
    if len(sources) == 1:
        return f"{where} hold the numbers of {kind} {int(sources[0])}"
    for wide in (n for n in range(2, count // 2 + 1) if count % n == 0):
        if torch.equal(own.reshape(wide, -1).T.reshape(-1), places):
            return f"{kind}s are transposed as {wide} by {count // wide}"
    return ""


# ---- parts that hold one number, or have a factor ------------------------------------------------


def _filled(sides: Sides) -> OutputMap | None:
    """Find a part, rows by columns, that holds one number: it was never written."""
    wrong = ~sides.equal(sides.seen, sides.right, sides.allowed)
    if int(wrong.sum()) < FEWEST_FILLED:
        return None
    part = box(wrong)
    held = sides.seen[part.index]
    value = float(held[0, 0]) + 0.0  # minus zero is told as zero
    if not bool(((held == value) | (held.isnan() if value != value else False)).all()):  # noqa: PLR0124
        return None
    (top, bottom), (left, right) = part.rows, part.columns
    count, width = sides.seen.shape
    rows = "" if (top, bottom) == (0, count) else lines_from("row", top, bottom)
    columns = "" if (left, right) == (0, width) else lines_from("column", left, right)
    where = ", ".join(each for each in (rows, columns) if each) or "all numbers"
    shape = tuple(sides.seen.shape) if rows else ()
    filled = partial(_with_filled, shape, part.rows, part.columns, value)
    also = number_of_a_column(value, sides.right[top:bottom])
    one = not rows and right - left == 1
    words = f"{where} {'holds' if one else 'hold'} {number(value, 4)}{also}"
    return OutputMap(sides.output, words, filled, here=bool(rows))


def number_of_a_column(value: float, right: Tensor) -> str:
    """Say which column has a number in all of these rows [R, F]: it may have been copied.

    Zeros and ones are more likely a buffer's than a column's.
    """
    if value in {0.0, 1.0}:
        return ""
    found = (right == value).all(0).nonzero().flatten().tolist()
    return f" (or the number of column {found[0]}: these explain it as well)" if found else ""


def lines_from(kind: str, begin: int, end: int) -> str:
    """Say which rows or columns are those of a range that ends before a number."""
    return f"{kind} {begin}" if end - begin == 1 else f"{kind}s {begin} to {end - 1}"


Ends = tuple[int, int]


@operation
def _with_filled(
    shape: tuple[int, ...], rows: Ends, columns: Ends, value: float, right: Tensor
) -> Tensor:
    made = right.clone()
    if shape and right.shape != shape:
        return made  # a call of other rows: the part says nothing about it
    made[slice(*rows) if shape else slice(None), slice(*columns)] = value
    return made


def _moved_part(sides: Sides) -> OutputMap | None:
    """Find a part, rows by columns, that holds the numbers of another part of its size."""
    wrong = ~sides.equal(sides.seen, sides.right, sides.allowed)
    if int(wrong.sum()) < FEWEST_FILLED:
        return None
    part = box(wrong)
    (top, bottom), (left, right) = part.rows, part.columns
    (count, width), high, wide = sides.seen.shape, bottom - top, right - left
    if (high == count and wide == width) or count * width * wide > MOST_COMPARED:
        return None
    pieces = sides.right.unfold(1, wide, 1)[: count - high + 1]  # [T, F, wide]
    line, allowed = sides.seen[top, left:right], sides.allowed[top, left:right]
    near = sides.equal(line, pieces, allowed.expand_as(pieces)).all(-1)
    sources = [
        (row, column)
        for row, column in near.nonzero().tolist()[:MOST_SOURCES]
        if bool(sides.equal(
            sides.seen[part.index], sides.right[row : row + high, column : column + wide],
            sides.allowed[part.index],
        ).all())
    ]  # fmt: skip
    if not sources or not bool(sides.seen[part.index].any()):
        return None
    row, column = min(sources, key=lambda each: abs(each[0] - top) + abs(each[1] - left))
    everywhere = high == count
    shape = () if everywhere else tuple(sides.seen.shape)
    moved_part = partial(_with_part, shape, (top, row, high), (left, column, wide))
    rows = "" if everywhere else f"{lines_from('row', top, bottom)}, "
    of = "" if everywhere or row == top else f"{lines_from('row', row, row + high)}, "
    holds = "holds" if wide == 1 else "hold"
    words = (
        f"{rows}{lines_from('column', left, right)} {holds} the numbers of"
        f" {of}{lines_from('column', column, column + wide)}"
    )
    return OutputMap(sides.output, words, moved_part, here=not everywhere)


@operation
def _with_part(
    shape: tuple[int, ...],
    rows: tuple[int, int, int],
    columns: tuple[int, int, int],
    right: Tensor,
) -> Tensor:
    """Copy a part: places of rows and columns, those they are copied from, and how many."""
    made = right.clone()
    if shape and right.shape != shape:
        return made
    (top, row, high), (left, column, wide) = rows, columns
    to, source = (slice(top, top + high), slice(row, row + high)) if shape else (slice(None),) * 2
    made[to, left : left + wide] = right[source, column : column + wide]
    return made


def _gains(sides: Sides) -> OutputMap | None:
    """Find factors of columns, one or a few, that hold in every row."""
    fitted = slice(0, None, 2)
    seen, right = sides.seen[fitted], sides.right[fitted]
    weigh = 1 / torch.maximum(sides.allowed[fitted], _ROUNDING * seen.abs()).clamp(min=1e-300)
    along = (right * weigh).square().sum(0)
    factors = (seen * right * weigh.square()).sum(0) / along.clamp(min=1e-300)
    wrong = ~sides.equal(sides.seen, sides.right, sides.allowed).all(0)
    if not bool(wrong.any()) or bool((along[wrong] <= 0).any()):
        return None
    slack = FACTOR_ERRORS / along.sqrt().clamp(min=1e-300)
    mean = float((factors * along)[wrong].sum() / along[wrong].sum())
    if not bool(((factors - mean).abs() <= slack)[wrong].all()):
        return None
    mean = simplest(mean, FACTOR_ERRORS / float(along[wrong].sum().sqrt()))
    if mean < 0 and not bool((sides.right[:, wrong] > 0).any()):
        return None  # numbers without their sign would be the same
    own = torch.where(wrong, mean, 1.0)
    columns = wrong.nonzero().flatten()
    begin, end = int(columns[0]), int(columns[-1])
    whole = len(columns) == end - begin + 1
    few = ", ".join(map(str, columns[:8].tolist()))
    where = f"columns {begin} to {end}" if whole else f"{len(columns)} columns ({few}, ...)"
    where = "all numbers" if len(columns) == len(wrong) else where
    words = f"{where} are multiplied by {number(mean, 4)}"
    return OutputMap(sides.output, words, partial(torch.mul, own))


def simplest(factor: float, slack: float) -> float:
    """Return the number of fewest digits that is as near as a factor is known."""
    if abs(factor) <= slack:
        return 0.0
    shown = (float(f"{factor:.{digits}g}") for digits in range(1, 8))
    return next((each for each in shown if abs(each - factor) <= slack), factor)


# ---- numbers of single elements ------------------------------------------------------------------


def _clamped(sides: Sides) -> OutputMap | None:
    """Find a bound that magnitudes do not exceed, though right ones do."""
    fitted = slice(0, None, 2)
    high, low = float(sides.seen[fitted].max()), float(sides.seen[fitted].min())
    right = sides.right[fitted]
    above, below = int((right > high).sum()), int((right < low).sum())
    largest = float(right.abs().amax())
    if above + below < FEWEST_CLAMPED or max(abs(high), abs(low)) < LARGE * largest:
        return None
    if not above:
        return _clamp(sides.output, low, torch.inf, f"numbers are not below {low:.4g}")
    if not below:
        return _clamp(sides.output, -torch.inf, high, f"numbers are not above {high:.4g}")
    return _clamp(sides.output, low, high, f"numbers are clamped to {low:.4g} and {high:.4g}")


def _clamp(output: str, low: float, high: float, words: str) -> OutputMap:
    return OutputMap(output, words, partial(torch.clamp, min=low, max=high))


def _cut(sides: Sides) -> OutputMap | None:
    """Find a mantissa of few bits to which numbers were rounded, or cut."""
    seen = sides.seen
    for bits in range(MOST_BITS, -1, -1):
        if not torch.equal(_rounded(seen, bits, torch.trunc), seen):
            continue
        for rounding, words in ((torch.round, "rounded"), (torch.trunc, "cut")):
            near = _rounded(sides.right, bits, rounding)
            step = torch.where(seen == 0, 0.0, 2.0 ** (torch.frexp(seen)[1] - 1 - bits))
            # Right numbers are rounded already; beside a border of the cut either side is theirs.
            if float(((near - seen).abs() > step * 1.001).double().mean()) == 0.0:
                text = f"numbers are {words} to {bits} bits of a mantissa"
                return OutputMap(
                    sides.output, text, partial(_rounded, bits=bits, rounding=rounding)
                )
    return None


@operation
def _rounded(x: Tensor, bits: int, rounding: Function) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    scaled = rounding(mantissa * 2.0 ** (bits + 1))
    return torch.ldexp(scaled, exponent - bits - 1)


def _signs(sides: Sides) -> OutputMap | None:
    """Find signs that were lost, or negative numbers that became 0."""
    fitted = slice(0, None, 2)
    seen, right = sides.seen[fitted], sides.right[fitted]
    allowed = sides.allowed[fitted]
    pairs: tuple[tuple[str, Function], ...] = (
        ("signs are lost", torch.abs), ("negative numbers are 0", torch.relu),
        ("signs are turned", torch.neg),
    )  # fmt: skip
    for words, function in pairs:
        if bool(sides.equal(seen, function(right), allowed).all()):
            return OutputMap(sides.output, words, function)
    return None


def as_matrix(x: Tensor) -> Tensor:
    """View an output as a matrix of float64."""
    return flat(x).double()
