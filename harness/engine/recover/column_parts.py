"""Find the columns of an operand or an input in which one operation acts, from few rows.

What an operation changes is, in a product, the sum of what it changes in each column; in other
components it is nearly so. Two tables hold that for all sets of columns at once: what each column's
change has in common with the difference that was seen, and with every other column's. The best
range of columns, every so many of them, and all of them are read off these for each operation; a
number that it has is fitted. Solving for columns one by one takes as many outputs as columns.

Shape letters: P rows of the operand, Q rows of the other one, K columns, N numbers of an output
row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.engine.recover.differences import (
    Lines,
    NumberChange,
    between,
    bounded,
    holding,
    multiplied,
    parts_of,
    shifted,
)
from degarble.harness.engine.recover.maps import simplest
from degarble.harness.engine.recover.numbers import functions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from degarble.harness.engine.recover.changes import Equations
    from degarble.harness.engine.recover.differences import RecoveredRule
    from degarble.harness.engine.recover.products import ProductView
    from degarble.harness.engine.recover.responses import Seen, Tensors

LEAVES = 0.05  # of the difference's energy, at most
FEWEST = 3  # wrong rows, for a change with a number
MOST_ROWS = 64
MOST_COLUMNS = 1024
MOST_PROVED = 6
FEWEST_SCREENED = 4  # rows of an input, of which some are looked at first
MOST_COMPUTED = 1 << 11  # rows, with one number changed each
MOST_NUMBERS = 1 << 22  # that come out of these
_STEPS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_LIMITS = 24  # bounds that are tried, more of them where few numbers are larger
_SAME = 1e-9  # of the energy
_COARSE = 8.0  # times less is left by the bound that is fitted
_NEARLY = 0.8  # of the energy is left: a bound near to it may leave less
_NEAR = tuple(1 + step / 50 for step in range(-8, 9) if step)  # bounds next to a likely one
_DENSER = 0.78
_ALIKE = 1.02  # times what the best set of columns leaves: simpler sets are as good
_MOSTLY = 0.9  # of the rows of a part are wrong
_SLOPE = 0.25  # of a number, by which it is changed to learn how outputs answer
_SCREENED = 4  # part of these rows
_ADDITIVE = 1e-9  # of what columns change alone: together they change the sum
_TINY = 1e-300

Ends = tuple[int, int, int]
# For each set of columns its two sums, and which columns a place among them means.
ColumnSums = tuple["Tensor", "Tensor", "Callable[[int], Ends]"]
Moments = tuple["Tensor", "Tensor"]  # in common with the difference [K], and among columns [K, K]


class _Columns(NamedTuple):
    """A set of columns, what it leaves of the difference, and the fitted number."""

    left: float
    value: float
    error: float
    ends: Ends


class _Found(NamedTuple):
    left: float
    order: int
    rule: RecoveredRule


def rules_in_columns(tables: ColumnTables, rows: Lines | None = None) -> list[RecoveredRule]:
    """Return what one operation in some columns may have been, the likeliest first."""
    own, wide = tables.own, tables.own.shape[1]
    if not own.numel() or wide > MOST_COLUMNS or not bool(own.isfinite().all()):
        return []
    if not 0 < tables.energy < math.inf:
        return []
    some = rows or Lines("", partial(between, (0, None, 1)))
    found = []
    for order, (columns, change) in enumerate(_changes(tables)):
        if columns.left <= LEAVES:
            lines = _lines(columns.ends, wide)
            found.append(_Found(columns.left, order, change.rule(some, lines)))
    found.sort(key=lambda each: (math.floor(math.log(each.left + 1e-9, 4.0)), each.order))
    return [each.rule for each in found[:MOST_PROVED]]


def _lines(ends: Ends, wide: int) -> Lines:
    chosen = torch.zeros(wide, dtype=torch.bool)
    chosen[slice(*ends)] = True
    if bool(chosen.all()):
        return Lines("", partial(between, (0, None, 1)))
    return parts_of(chosen, "column")[1]


# ---- what columns change -------------------------------------------------------------------------


class ColumnTables(ABC):
    """The difference in units of what is allowed, and what changes of single columns give."""

    own: Tensor  # [P, K] of float64: the numbers of wrong rows
    energy: float

    @abstractmethod
    def sets(self, delta: Tensor) -> Iterator[ColumnSums]:
        """Yield the sums of sets of columns for a change [P, K]; none where it changes nothing."""

    def leaves_more(self, delta: Tensor, most: float) -> bool:
        """Return whether few rows show that every set leaves more than a part of the energy."""
        del delta, most
        return False


class ProductColumns(ColumnTables):
    """Rows of an operand that meet the rows of another."""

    def __init__(self, own: Tensor, other: Tensor, gap: Tensor, allowed: Tensor) -> None:
        held = allowed.isfinite()
        size = torch.where(held, allowed, 0.0).sum(1) / held.sum(1).clamp(min=1)
        self.own, self._rows = own, 1 / size.clamp(min=_TINY)[:, None]
        known = held.all(0)
        gap = gap[:, known] * self._rows
        self.energy = float(gap.square().sum())
        self._met = gap @ other[known]  # [P, K]
        self._alike = other[known].T @ other[known]

    def sets(self, delta: Tensor) -> Iterator[ColumnSums]:
        """Yield the sums of sets of columns for a change of the operand."""
        sums = self._sums(delta)
        if sums is not None:
            yield from _sets(*sums)

    def _sums(self, delta: Tensor) -> Moments | None:
        made = delta * self._rows
        if not bool(made.isfinite().all()) or not bool(made.any()):
            return None
        return (self._met * made).sum(0), made.T @ made * self._alike

    def held(self) -> Iterator[tuple[_Columns, NumberChange]]:
        """Yield columns in which all numbers are one: their own are taken away, and it is added."""
        ones = torch.ones_like(self.own)
        gone, filled = self._sums(self.own), self._sums(ones)
        if gone is None or filled is None:
            return
        both = (self.own * self._rows).T @ (ones * self._rows) * self._alike
        mixed = gone[0], (both + both.T) / 2
        for (lost, taken, ends), (added, size, _), (_, shared, _) in zip(
            _sets(*gone), _sets(*filled), _sets(*mixed), strict=True
        ):
            whole, along = size.clamp(min=_TINY), added + shared
            left = self.energy + 2 * lost + taken - along.square() / whole
            at = int(left.argmin())
            value = float((along / whole).flatten()[at])
            error = float(whole.flatten()[at]) ** -0.5
            part = max(0.0, float(left.flatten()[at]) / self.energy)
            yield _Columns(part, value, error, ends(at)), holding(simplest(value, 3 * error))


class InputColumns(ColumnTables):
    """Rows of a component's input, each column changed by itself and computed anew."""

    def __init__(self, seen: Seen, name: str) -> None:
        x = seen.inputs[name].double()
        self._shape, self._seen, self._name = x.shape, seen, name
        self.own = x.reshape(-1, x.shape[-1])
        self._right = seen.call(seen.inputs)
        self._weigh = torch.where(seen.allowed.isfinite(), 1 / seen.allowed, 0.0)
        self._gap = ((seen.outputs - self._right) * self._weigh).nan_to_num(0, 0, 0).flatten()
        self.energy = float(self._gap.square().sum())
        self._others: dict[int, Tensors] = {}

    @cached_property
    def _few(self) -> tuple[Tensor, InputColumns] | None:
        """Return the rows with most of the difference, and their own tables."""
        count = self._shape[0]
        if count < FEWEST_SCREENED:
            return None
        far = self._gap.reshape(count, -1).square().sum(1)
        kept = far.topk(count // _SCREENED).indices.sort().values
        inputs = {n: t[kept] if t.ndim else t for n, t in self._seen.inputs.items()}
        seen = replace(
            self._seen, inputs=inputs, outputs=self._seen.outputs[kept],
            allowed=self._seen.allowed[kept],
        )  # fmt: skip
        return kept, InputColumns(seen, self._name)

    def leaves_more(self, delta: Tensor, most: float) -> bool:
        """Return whether few rows show that every set leaves more than a part of the energy.

        What these rows leave, all rows leave at least.
        """
        if self._few is None:
            return False
        kept, few = self._few
        count, wide = self._shape[0], self._shape[-1]
        part = delta.reshape(count, -1, wide)[kept].reshape(-1, wide)
        if not bool(delta.isfinite().all()) or not bool(part.any()):
            return False
        least = min((float((few.energy - 2 * a + b).min()) for a, b, _ in few.sets(part)))
        return least > most * self.energy

    def sets(self, delta: Tensor) -> Iterator[ColumnSums]:
        """Yield the sums of sets of columns: those of ranges are added up, others are computed."""
        wide = self.own.shape[1]
        if not bool(delta.isfinite().all()) or not bool(delta.any()):
            return
        members, ends = _members(wide)
        # What changes in no row of a column changes no output.
        changed = delta.reshape(-1, wide).any(0)
        alone = torch.eye(wide, dtype=members.dtype)[changed]
        *_, every = made = self._made(delta, torch.cat([alone, changed[None].to(members.dtype)]))
        each = made[:-1]
        along, size = self._gap.new_zeros(wide), self._gap.new_zeros(wide, wide)
        along[changed], size[changed[:, None] & changed] = (
            each @ self._gap,
            (each @ each.T).flatten(),
        )
        if float((each.sum(0) - every).norm()) <= _ADDITIVE * float(each.norm()):
            yield from islice(_sets(along, size), 1, None)
            return
        some, which = (members.T * changed).unique(dim=0, return_inverse=True)
        whole = self._made(delta, some)[which]
        yield from islice(_sets(along, size), 1, 2)
        yield whole @ self._gap, whole.square().sum(1), ends.__getitem__

    def _made(self, delta: Tensor, chosen: Tensor) -> Tensor:
        """Return what outputs change, in units of what is allowed, for some sets of columns."""
        (count, *_, wide), each = self._shape, len(chosen)
        change = delta.reshape(count, 1, -1, wide) * chosen[None, :, None]  # [T, S, ..., K]
        change += self.own.reshape(count, 1, -1, wide)
        x = change.reshape(-1, *self._shape[1:])
        inputs = self._repeated(each)
        made = self._seen.call({**inputs, self._name: x}).reshape(count, each, -1)
        apart = made.sub_(self._right[:, None]).mul_(self._weigh[:, None]).nan_to_num_(0, 0, 0)
        found: Tensor = apart.transpose(0, 1).reshape(each, -1)
        return found

    def _repeated(self, each: int) -> Tensors:
        """Return the other inputs, every row so many times."""
        if each not in self._others:
            self._others[each] = {
                name: tensor.repeat_interleave(each, 0) if tensor.ndim else tensor
                for name, tensor in self._seen.inputs.items()
                if name != self._name
            }
        return self._others[each]


def columns_of_input(seen: Seen, name: str) -> InputColumns | None:
    """Return the tables of an input, for as few rows as are computed; None where it is too wide."""
    x = seen.inputs[name]
    wide = x.shape[-1]
    if not 1 < wide <= MOST_COLUMNS:
        return None
    rows = min(MOST_COMPUTED // wide + 1, MOST_NUMBERS // (wide * max(seen.outputs.shape[1], 1)))
    rows = min(rows, MOST_NUMBERS // (wide * max(1, x[0].numel())))
    if rows < 1:
        return None
    if rows < len(x):
        kept = torch.arange(0, len(x), -(-len(x) // rows))
        inputs = {n: t[kept] if t.ndim else t for n, t in seen.inputs.items()}
        seen = replace(seen, inputs=inputs, outputs=seen.outputs[kept], allowed=seen.allowed[kept])
    try:
        return InputColumns(seen, name)
    except CANNOT_RUN:
        return None


def columns_of_weight(view: ProductView) -> tuple[ProductColumns, Lines]:
    """Return the tables of a weight's wrong rows, and which rows these are."""
    wrong = view.wrong.any(0)
    every = torch.zeros(len(view.numbers), dtype=torch.bool)
    every[view.first_row : view.first_row + len(wrong)] = wrong
    lines = parts_of(every, "row")
    rows = next((each for each in lines if _fills(each.of(len(every)), every)), lines[-1])
    at = wrong.nonzero().flatten()
    at = at[:: -(-len(at) // MOST_ROWS)]
    own = view.numbers[view.first_row + at]
    return ProductColumns(own, view.x, (view.seen - view.product).T[at], view.allowed.T[at]), rows


def _fills(chosen: Tensor, wrong: Tensor) -> bool:
    return float(wrong[chosen].double().mean()) >= _MOSTLY


def columns_of_equations(equations: Equations) -> ProductColumns:
    """Return the tables of an operand's wrong rows."""
    at = equations.wrong.any(1).nonzero().flatten()
    some = equations.of(at[:: -(-len(at) // MOST_ROWS)] if len(at) else at)
    own = equations.operand.of_rows(some.rows).numbers
    return ProductColumns(own, equations.other, some.seen - some.right, some.allowed)


# ---- operations ----------------------------------------------------------------------------------


def _changes(tables: ColumnTables) -> Iterator[tuple[_Columns, NumberChange]]:
    """Yield the best columns of every operation."""
    own = tables.own
    for each in functions():
        delta = each.apply(own) - own
        for columns in () if tables.leaves_more(delta, LEAVES) else _best(tables, delta):
            yield columns, NumberChange(f"are {each.words}", each.apply)
    if len(own) < FEWEST:
        return
    size = float(own.abs().mean()) or 1.0
    for columns in _with_part(tables, own):
        yield columns, multiplied(simplest(1 + columns.value, 3 * columns.error))
    for columns in _with_part(tables, torch.full_like(own, size)):
        yield columns, shifted(simplest(columns.value * size, 3 * columns.error * size))
    if isinstance(tables, ProductColumns):
        yield from tables.held()
    yield from _bounded(tables)


def _with_part(tables: ColumnTables, unit: Tensor) -> list[_Columns]:
    """Return the best columns for a part of a change; twice, where outputs do not follow it."""
    slope, found = _SLOPE, list[_Columns]()
    for _ in range(2):
        best = list(_best(tables, unit * slope, free=True))
        found = [
            each._replace(value=each.value * slope, error=each.error * abs(slope)) for each in best
        ] or found
        if not best or isinstance(tables, ProductColumns):
            break
        slope = found[-1].value or _SLOPE
    return found


def _bounded(tables: ColumnTables) -> Iterator[tuple[_Columns, NumberChange]]:
    """Yield columns whose magnitudes are bounded, by the likeliest of a few bounds."""
    own = tables.own
    sizes = own.abs().flatten().sort().values
    places = (1 - 0.7 * _DENSER ** torch.arange(_LIMITS)) * (len(sizes) - 1)
    best: dict[int, tuple[_Columns, float]] = {}

    def tried(limit: float) -> None:
        for kind, columns in enumerate(_best(tables, own.clamp(-limit, limit) - own)):
            if kind not in best or columns.left < best[kind][0].left:
                best[kind] = columns, limit

    for limit in sizes[places.long()].unique().tolist():
        tried(limit)
    for columns, limit in sorted(best.values(), key=lambda each: each[0].left)[:1]:
        for part in _NEAR if columns.left < _NEARLY else ():
            tried(limit * part)
    for columns, limit in best.values():
        # The bound is between two that were tried: it is fitted when it is proved.
        yield columns._replace(left=columns.left / _COARSE), bounded(limit)


def _best(tables: ColumnTables, delta: Tensor, *, free: bool = False) -> Iterator[_Columns]:
    """Yield the best set of each kind; simpler kinds come first."""
    least, energy = math.inf, tables.energy
    for along, size, ends in tables.sets(delta):
        whole = size.clamp(min=_TINY)
        value = along / whole if free else torch.ones_like(along)
        left = energy - 2 * value * along + value.square() * size
        at = int((left <= left.min() + _SAME * energy).int().argmax())
        part = max(0.0, float(left.flatten()[at]) / energy)
        if part * _ALIKE < least:
            least = part
            error = float(whole.flatten()[at]) ** -0.5
            yield _Columns(part, float(value.flatten()[at]), error, ends(at))


# ---- sets of columns -----------------------------------------------------------------------------


def _sets(cross: Tensor, gram: Tensor) -> Iterator[ColumnSums]:
    """Yield sums over all columns, every range, every so many; and which set a place stands for."""
    wide = len(cross)
    yield cross.sum()[None], gram.sum()[None], lambda _at: (0, wide, 1)
    one = torch.nn.functional.pad(cross.cumsum(0), (1, 0))
    two = torch.nn.functional.pad(gram.cumsum(0).cumsum(1), (1, 0, 1, 0))
    square, (empty, narrow) = two.diagonal(), _ranges(wide)
    along = (one[None, :] - one[:, None]).masked_fill(empty, 0.0)  # [begin, end]
    size = (square[None, :] + square[:, None] - two - two.T).masked_fill(empty, 0.0)
    yield (
        along.flatten()[narrow],
        size.flatten()[narrow],
        lambda at: (int(narrow[at]) // (wide + 1), int(narrow[at]) % (wide + 1), 1),
    )
    members, every = _members(wide)
    yield cross @ members, (gram @ members * members).sum(0), every.__getitem__


@cache
def _ranges(wide: int) -> tuple[Tensor, Tensor]:
    """Return which ranges [begin, end] of columns are none, and their places, narrow ones first."""
    ends = torch.arange(wide + 1)
    # Of ranges that are as good, the narrowest comes first.
    narrow = (ends[None] - ends[:, None]).flatten().argsort(stable=True)
    return torch.ones(wide + 1, wide + 1, dtype=torch.bool).tril(), narrow


@cache
def _members(wide: int) -> tuple[Tensor, list[Ends]]:
    """Return which columns [K, S] belong to all of them, and to every so many; and their ends."""
    ends = [(0, wide, 1)]
    ends += [(offset, wide, step) for step in _STEPS if step < wide for offset in range(step)]
    made = torch.zeros(wide, len(ends), dtype=torch.float64)
    for number, each in enumerate(ends):
        made[slice(*each), number] = 1.0
    return made, ends
