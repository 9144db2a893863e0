"""Describe by a rule how numbers that were seen differ from the right ones.

Both are matrices: an output, an input that was solved for, or a weight. A rule is something done to
single numbers, or another order of lines, in a part of rows and columns. It has to give all numbers
that are known, those that are right among them; of the parts that do, the simplest is said.

Shape letters: R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product
from math import gcd
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.engine.recover.maps import Sides, moved, simplest
from degarble.harness.engine.recover.numbers import functions, lines_by, rule_of
from degarble.harness.engine.recover.stated import operation
from degarble.harness.report.number_text import number

if TYPE_CHECKING:
    from torch import Tensor

Function = Callable[["Tensor"], "Tensor"]
FEWEST = 4  # numbers that differ
FEWEST_ROWS = 3  # of tokens, that are every so many: any two are
MISSED = 1e-3  # of the numbers of a part, that a rule may miss by roundings
MOST_LISTED = 8  # lines by number
MOST_SAMPLED = 1 << 11  # wrong numbers on which a change is tried first
MOST_MATCHED = 1 << 26  # pairs of numbers, to find lines in other places
FEW_LINES = 24  # by which lines are matched first
FIRST_LINES = 2  # of these, that rule out most
MOST_EXCHANGED = 3  # values of codes or choices
MOST_OPEN = 0.5  # of the lines that moved, whose sources are not the only ones
NARROW = 3  # numbers of a line, at least, that have to match another line
_PARTS = (16, 8, 4, 3, 2)  # of what is allowed: numbers are mostly half a spacing off
_ROUNDING = 2.0**-7
_TINY = 1e-300
_ROLLS = (1, -1, 2, -2)  # rows


class RecoveredRule(NamedTuple):
    """What was done to a matrix, in words, and as a function of the right one [R, C]."""

    words: str
    apply: Function
    table: tuple[str, ...] = ()
    value: float = 0.0  # a number that was fitted, if `again` makes the rule with another one
    again: Callable[[float], RecoveredRule] | None = None
    adds: bool = False  # a sum may cancel what was rounded before


@operation
class Lines(NamedTuple):
    """Some rows or columns: words, empty for all of them, and which of `n` they are."""

    words: str
    of: Callable[[int], Tensor]


class NumberChange(NamedTuple):
    """What was done to every number of a part: the words that follow it."""

    words: str
    apply: Function
    table: tuple[str, ...] = ()
    whole: bool = False  # the words say which lines
    value: float = 0.0  # a number that was fitted, if `again` makes the change with another one
    again: Callable[[float], NumberChange] | None = None
    adds: bool = False  # a sum may cancel what was rounded before

    def rule(self, rows: Lines, columns: Lines) -> RecoveredRule:
        """Return the change in a part of rows and columns."""
        again, make = None, self.again
        if make is not None:
            again = lambda value: make(value).rule(rows, columns)  # noqa: E731
        apply = partial(_applied, self.apply, rows, columns)
        words = _words(self, rows, columns)
        return RecoveredRule(words, apply, self.table, self.value, again, self.adds)


def rules_of(sides: Sides, *, rows: bool = False) -> Iterator[RecoveredRule]:
    """Yield the rules that give everything seen; `rows` of a weight may be a part, or move.

    Rows of tokens may be every so many of a call only. Rows of which nothing is known end no part.
    """
    wrong = ~sides.equal(sides.seen, sides.right, sides.allowed)
    if int(wrong.sum()) < FEWEST or not bool(sides.seen[wrong].isfinite().all()):
        return
    known = sides.allowed.isfinite().any(1)
    some = _sampled(sides, wrong)
    for change in chain(
        (each for each in _of_numbers(sides, wrong) if not _misses_many(each, some, wrong)),
        _of_places(sides, wrong, rows=rows),
    ):
        made = change.apply(sides.right)
        given = sides.equal(sides.seen, made, sides.allowed)
        acts = None if sides.loose else wrong.any(0) | (made != sides.right).any(0)
        part = _part(wrong, given, (known, acts), rows=rows)
        if part is not None:
            yield change.rule(*part)


def _sampled(sides: Sides, wrong: Tensor) -> Sides:
    """Return some of the wrong numbers, in one row."""
    at = wrong.flatten().nonzero().flatten()
    at = at[:: -(-len(at) // MOST_SAMPLED)]
    seen, right, allowed = (
        side.flatten()[at][None] for side in (sides.seen, sides.right, sides.allowed)
    )
    return replace(sides, seen=seen, right=right, allowed=allowed)


def _misses_many(change: NumberChange, some: Sides, wrong: Tensor) -> bool:
    """Return whether some of the wrong numbers are enough that a change does not give."""
    given = some.equal(some.seen, change.apply(some.right), some.allowed)
    return _many(~given, wrong)


@operation
def _applied(of: Function, rows: Lines, columns: Lines, right: Tensor) -> Tensor:
    high, wide = right.shape
    where = rows.of(high)[:, None] & columns.of(wide)[None]
    return torch.where(where, of(right), right)


def _words(change: NumberChange, rows: Lines, columns: Lines) -> str:
    where = ", ".join(each.words for each in (rows, columns) if each.words)
    if change.whole:
        return f"{f'in {where}, ' if where else ''}{change.words}"
    return f"{f'the numbers of {where}' if where else 'all numbers'} {change.words}"


# ---- parts ---------------------------------------------------------------------------------------


def _part(
    wrong: Tensor, given: Tensor, known: tuple[Tensor, Tensor | None], *, rows: bool
) -> tuple[Lines, Lines] | None:
    """Return the simplest part that holds all wrong numbers and, as good as only, given ones.

    `known` are rows of which something is known, and columns in which the change would show.
    """
    if _many(wrong & ~given, wrong):
        return None
    wrong = wrong & given
    of_rows = parts_of(wrong.any(1), "row", known[0]) if rows else _of_tokens(wrong.any(1))
    of_columns = parts_of(wrong.any(0), "column", known[1])
    tried = list(product(enumerate(of_rows), enumerate(of_columns)))
    tried.sort(key=lambda pair: pair[0][0] + pair[1][0])
    high, wide = wrong.shape
    for (_, some), (_, columns) in tried:
        where = some.of(high)[:, None] & columns.of(wide)[None]
        if not _many(where & ~given, where):
            return some, columns
    return None


def _many(missed: Tensor, of: Tensor) -> bool:
    return int(missed.sum()) > MISSED * int(of.sum())


def parts_of(wrong: Tensor, kind: str, known: Tensor | None = None) -> list[Lines]:
    """Return sets of lines that hold the wrong ones, simplest first; lines may be unknown."""
    found = [Lines("", partial(between, (0, None, 1)))]
    at = wrong.nonzero().flatten().tolist()
    if not at:
        return found
    first, last = at[0], at[-1]
    if known is not None and not bool(known.all()):
        ends = [each for each in (first - 1, last + 1) if 0 <= each < len(wrong)]
        if not all(bool(known[each]) for each in ends):
            return found
        wrong = wrong | ~known
        at = [each for each in wrong.nonzero().flatten().tolist() if first <= each <= last]
        if len(at) < last - first + 1:
            return found
    every = "" if len(at) == 1 else f"s {first} to {last}"
    found.append(Lines(f"{kind}{every or f' {first}'}", partial(between, (first, last + 1, 1))))
    step = gcd(*(each - first for each in at))
    if step > 1:
        begin, end = first % step, len(wrong)
        if len(at) > 1:
            words = f"{kind}s {begin}, {begin + step}, ... (every {step})"
            found.insert(1, Lines(words, partial(between, (begin, end, step))))
        words = f"{kind}s {first} to {last} in steps of {step}"
        found.append(Lines(words, partial(between, (first, last + 1, step))))
    if len(at) < last - first + 1:
        listed = ", ".join(map(str, at[:MOST_LISTED])) + (", ..." if at[MOST_LISTED:] else "")
        found.append(Lines(f"{len(at)} {kind}s ({listed})", partial(_among, wrong)))
    return found


def _of_tokens(wrong: Tensor) -> list[Lines]:
    """Return all rows, and every so many: other rows are said by when a cause acts.

    Any two rows are some number apart.
    """
    many = int(wrong.sum()) >= FEWEST_ROWS
    return [
        each
        for each in parts_of(wrong, "row")
        if not each.words or (many and "(every" in each.words)
    ]  # fmt: skip


@operation
def between(ends: tuple[int, int | None, int], count: int) -> Tensor:
    """Mark lines by the ends and the step of a slice."""
    made = torch.zeros(count, dtype=torch.bool)
    made[slice(*ends)] = True
    return made


@operation
def _among(chosen: Tensor, count: int) -> Tensor:
    return chosen if len(chosen) == count else torch.zeros(count, dtype=torch.bool)


# ---- single numbers ------------------------------------------------------------------------------


def _of_numbers(sides: Sides, wrong: Tensor) -> Iterator[NumberChange]:
    """Yield what may have been done to the wrong numbers, those with one constant first."""
    seen, right, allowed = sides.seen[wrong], sides.right[wrong], sides.allowed[wrong]
    if not sides.loose:  # codes and choices are no numbers
        yield from _flipped(seen.long(), right.long())
        yield from _exchanged(seen, right)
        return
    ones = torch.ones_like(right)
    families = ((holding, seen, ones), (multiplied, seen, right), (shifted, seen - right, ones))
    yield from (NumberChange(f"are {each.words}", each.apply) for each in functions())
    for make, made, unit in families:
        value = _fitted(made, allowed, unit, seen)
        if value is not None:
            yield make(value)
    yield from _bounds(seen, right, allowed)


def holding(value: float) -> NumberChange:
    """Return the change to one number."""
    of = partial(torch.full_like, fill_value=value)
    return NumberChange(f"hold {number(value, 4)}", of, value=value, again=holding)


def multiplied(value: float) -> NumberChange:
    """Return the change by a factor."""
    words, of = f"are multiplied by {number(value, 4)}", partial(torch.mul, other=value)
    return NumberChange(words, of, value=value, again=multiplied)


def shifted(value: float) -> NumberChange:
    """Return the change by an addend."""
    words = f"are {number(abs(value), 4)} too {'large' if value > 0 else 'small'}"
    of = partial(torch.add, other=value)
    return NumberChange(words, of, value=value, again=shifted, adds=True)


def bounded(value: float) -> NumberChange:
    """Return the change to magnitudes that a bound limits."""
    words = f"are clamped to {number(-value, 4)} and {number(value, 4)}"
    of = partial(torch.clamp, min=-value, max=value)
    return NumberChange(words, of, value=value, again=bounded)


def _fitted(made: Tensor, allowed: Tensor, unit: Tensor, stored: Tensor) -> float | None:
    """Return the factor on `unit` that every number allows, or that fits all best."""
    held = unit != 0
    if not bool(held.any()):
        return None
    mean, allowed, size = made[held] / unit[held], allowed[held].clamp(min=_TINY), unit[held].abs()
    # What is rounded last is rounded by its own size, which may be less than the right number's.
    for slack in (torch.minimum(allowed, _ROUNDING * stored.abs()[held]) / size, allowed / size):
        for part in _PARTS:
            low, high = float((mean - slack / part).max()), float((mean + slack / part).min())
            if low <= high:
                return simplest((low + high) / 2, (high - low) / 2)
    weigh = (size / allowed).square()
    total = float(weigh.sum())
    return simplest(float((mean * weigh).sum()) / total, total**-0.5 / 6)


def _flipped(seen: Tensor, right: Tensor) -> Iterator[NumberChange]:
    """Yield bits that are turned in every code."""
    bits = int((seen ^ right)[0])
    if bool(((seen ^ right) == bits).all()):
        yield NumberChange(f"have bits {bits:#04x} turned", partial(bits_turned, bits))


@operation
def bits_turned(bits: int, right: Tensor) -> Tensor:
    """Return codes with some bits turned."""
    return (right.long() ^ bits).to(right.dtype)


def rows_rolled(sides: Sides) -> Iterator[RecoveredRule]:
    """Yield rows of a call that hold the numbers of others, a few rows away."""
    for by in _ROLLS:
        if len(sides.seen) > abs(by) + 1:
            given = sides.equal(sides.seen, sides.right.roll(by, 0), sides.allowed)
            if not _many(~given, given | True):
                far = f"{abs(by)} rows " if abs(by) > 1 else ""
                side = "before" if by > 0 else "after"
                where = f"the row {far}{side} it, around the end"
                words = f"each row of a call holds the numbers of {where}"
                yield RecoveredRule(words, partial(torch.roll, shifts=by, dims=0))


def _exchanged(seen: Tensor, right: Tensor) -> Iterator[NumberChange]:
    """Yield other numbers for a few: of codes and choices."""
    read: dict[float, float] = {}
    for value in right.unique().tolist():
        used = seen[right == value].unique().tolist()
        if len(used) > 1 or len(read) == MOST_EXCHANGED:
            return
        read[value] = used[0]
    words = " and ".join(f"{old:g} is {new:g}" for old, new in read.items())
    yield NumberChange(words, partial(by_value, read), whole=True)


@operation
def by_value(read: Mapping[int, int] | Mapping[float, float], right: Tensor) -> Tensor:
    """Return numbers of which some stand for others."""
    made = right.clone()
    for old, new in read.items():
        made[right == old] = new
    return made


def _bounds(seen: Tensor, right: Tensor, allowed: Tensor) -> Iterator[NumberChange]:
    """Yield bounds that the wrong numbers stand at, where right ones are beyond."""
    found = {}
    for side, beyond in (("above", right > seen), ("below", right < seen)):
        if bool(beyond.any()):
            own = seen[beyond]
            found[side] = _fitted(own, allowed[beyond], torch.ones_like(own), own)
    high, low = found.get("above"), found.get("below")
    if high is not None and low is not None and low < high:
        if abs(high + low) < 0.02 * abs(high):
            yield bounded(high)
            return
        words = f"are clamped to {number(low, 4)} and {number(high, 4)}"
        yield NumberChange(words, partial(torch.clamp, min=low, max=high))
    if high is not None:
        yield NumberChange(f"are not above {number(high, 4)}", partial(torch.clamp, max=high))
    if low is not None:
        yield NumberChange(f"are not below {number(low, 4)}", partial(torch.clamp, min=low))


# ---- lines in other places -----------------------------------------------------------------------


def _of_places(sides: Sides, wrong: Tensor, *, rows: bool) -> Iterator[NumberChange]:
    columns = _matched(sides, wrong)
    if columns is not None:
        yield _moved_change(*columns, "column", 1)
    if not rows:
        return
    turned = replace(
        sides, seen=sides.seen.T, right=sides.right.T, allowed=sides.allowed.T
    )  # fmt: skip
    lines = _matched(turned, wrong.T)
    if lines is not None:
        yield _moved_change(*lines, "row", 0)
    yield from _transposed(sides, wrong)


def _moved_change(places: Tensor, as_well: Sequence[int], kind: str, dim: int) -> NumberChange:
    """Return the change to other places; some lines may hold the numbers of several others."""
    words, table = moved(places, kind), tuple[str, ...]()
    if not words:
        others = (places != torch.arange(len(places))).nonzero().flatten().tolist()
        table = tuple(f"{kind} {at} holds {kind} {int(places[at])}" for at in others)
        shown = ", ".join(f"{int(places[at])} in {at}" for at in others[:3])
        words = f"{len(others)} {kind}s hold the numbers of others ({shown}, ...)"
    if as_well:
        listed = ", ".join(map(str, as_well[:MOST_LISTED]))
        lines = f"{kind}{'s' if len(as_well) > 1 else ''} {listed}"
        words = f"{words} (in {lines} others explain it as well)"
    rule = rule_of(places) if dim else None
    of = partial(_taken, places, dim) if rule is None else partial(lines_by, rule, dim)
    return NumberChange(words, of, table, whole=True)


@operation
def _taken(places: Tensor, dim: int, right: Tensor) -> Tensor:
    if right.shape[dim] != len(places):
        return right  # of another extent: nothing is known of it
    return right.index_select(dim, places)


def _matched(sides: Sides, wrong: Tensor) -> tuple[Tensor, list[int]] | None:
    """Return, for each column, the one whose numbers it holds; None where one holds no one's.

    With them come the columns of which others differ too little to be told apart; they are few.
    """
    rows, columns = wrong.any(1).nonzero().flatten(), wrong.any(0).nonzero().flatten()
    known = rows[sides.allowed[rows].isfinite().all(1)]
    if len(known) < min(NARROW, len(wrong)) or len(columns) < 1:
        return None
    few = known[:: -(-len(known) // FEW_LINES)]
    if len(few) * len(columns) * wrong.shape[1] > MOST_MATCHED:
        return None
    seen, right, allowed = (side[few] for side in (sides.seen, sides.right, sides.allowed))
    begin = slice(FIRST_LINES)  # which leave few pairs to compare in all lines
    near = sides.equal(
        seen[begin, columns, None], right[begin, None, :], allowed[begin, columns, None]
    ).all(0)  # fmt: skip
    which, sources = near.nonzero().unbind(1)
    struck = columns[which]
    near[which, sources] = sides.equal(
        seen[:, struck], right[:, sources], allowed[:, struck]
    ).all(0)  # fmt: skip
    places = torch.arange(wrong.shape[1])
    own, as_well = sides.right[known], list[int]()
    for at, column in enumerate(columns.tolist()):
        sources = near[at].nonzero().flatten()
        sources = sources[sources != column]
        if not len(sources) or not bool(right[:, sources[0]].any()):
            return None
        if len(sources) > 1:
            held = sides.equal(
                sides.seen[known][:, column, None], own[:, sources],
                sides.allowed[known][:, column, None],
            ).all(0)  # fmt: skip
            sources = sources[held]
            if not len(sources):
                return None
            if bool((own[:, sources] != own[:, sources[:1]]).any()):
                as_well.append(column)
                sources = sources[_nearest(sides, known, column, sources)]
        places[column] = sources[(sources - column).abs().argmin()]
    return (places, as_well) if len(as_well) <= MOST_OPEN * len(columns) else None


def _nearest(sides: Sides, known: Tensor, column: int, sources: Tensor) -> Tensor:
    """Mark the columns whose numbers are nearest to those of one."""
    gap = sides.seen[known][:, column, None] - sides.right[known][:, sources]
    far = (gap / sides.allowed[known][:, column, None].clamp(min=_TINY)).square().sum(0)
    return far == far.min()


def _transposed(sides: Sides, wrong: Tensor) -> Iterator[NumberChange]:
    """Yield a square part that holds its own transpose."""
    high, wide = wrong.shape
    of_rows, of_columns = parts_of(wrong.any(1), "row"), parts_of(wrong.any(0), "column")
    for rows, columns in product(of_rows, of_columns):
        down, across = rows.of(high).nonzero().flatten(), columns.of(wide).nonzero().flatten()
        side = min(len(down), len(across))
        if side < 2:
            continue
        index = (down[:side, None], across[None, :side])
        held = sides.equal(sides.seen[index], sides.right[index].T, sides.allowed[index])
        if bool(held.all()):
            where = " and ".join(each.words for each in (rows, columns) if each.words)
            words = f"the first {side} by {side} numbers{f' of {where}' if where else ''}"
            yield NumberChange(f"{words} are transposed", partial(_turned, index), whole=True)
            return


@operation
def _turned(index: tuple[Tensor, Tensor], right: Tensor) -> Tensor:
    made = right.clone()
    made[index] = right[index].T
    return made
