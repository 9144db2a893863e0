"""The error budget of a component's output, and the judgement of a candidate by it.

A budget has one input, `slack`: an elementwise bound of the error before the one rounding to the
output's format, derived in rules.py. From it follow bounds for elements, for sums over places
(rows, tiles, heads, experts) and for counts of steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.base.sums import all_finite
from degarble.harness.engine.compare.compare import compare, values_of_any
from degarble.harness.formats.codec import FORMAT_OF_DTYPE
from degarble.harness.formats.number_formats import FP32
from degarble.harness.report.number_text import budgets, number, share
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.harness.engine.compare.compare import Comparison, NamedPlaces
    from degarble.harness.formats.number_formats import ElementFormat


# --------------------------------------------------------------------------------------------------
# Allowances: bounds of elements, aggregated over rows, tiles, heads and other places.
#
# An aggregate bounds three measures of a place: length, gain and steps. The bounds follow
# Bernstein's inequality. For independent terms with variances v, each between 0 and c, the sum
# exceeds its mean by more than sqrt(2 L v) + L c / 3 with probability MISTAKEN at most;
# L = log(1 / MISTAKEN).

if TYPE_CHECKING:
    Array = NDArray[np.float64]
    Sides = tuple[Array, Array, Array]  # the candidate's values, the twin's, and slacks [M, K]

MEASURED = "measured, not derived"  # how the derivation of such a budget begins
MISTAKEN = 1e-12  # probability that a place of a healthy run exceeds its bound
WIDTH = 10
_LOG = math.log(1 / MISTAKEN)
_SUMS = 7  # of WIDTH; the maxima follow


@dataclass(frozen=True, eq=False)
class Allowances:
    """Sums and maxima of places, along a last axis of WIDTH.

    Indices 0 to 6 are sums: squares, their squares, largest gain, squares of the gain terms,
    counted steps, expected steps, variance of steps. Indices 7 to 9 are maxima: largest square,
    largest gain term, largest count of one step. Only index 4, the counted steps, is a measurement;
    all others say what is allowed.
    """

    stack: Array

    @classmethod
    def from_sums(
        cls, sums: Sequence[Array], maxima: Sequence[Array], starts: NDArray[np.int64]
    ) -> Allowances:
        """Join elements [m, K] in runs of columns: [m, runs, WIDTH].

        A step counts 1 at most, so its variance is at most its mean.
        """
        stack = np.ones((sums[0].shape[0], len(starts), WIDTH))
        for k, term in enumerate(sums):
            stack[..., k] = np.add.reduceat(term, starts, axis=1)
        # The variance of the steps is bounded by their mean.
        stack[..., _SUMS - 1] = stack[..., _SUMS - 2]
        for k, term in enumerate(maxima):
            stack[..., _SUMS + k] = np.maximum.reduceat(term, starts, axis=1)
        return cls(stack)

    def scatter_into(self, at: NDArray[np.int64], into: Array) -> None:
        """Add these places to another stack at indices `at`; an index may repeat."""
        # np.add.at sums repeated indices; `into[at] +=` would keep the last one only.
        np.add.at(into[..., :_SUMS], at, self.stack[..., :_SUMS])
        np.maximum.at(into[..., _SUMS:], at, self.stack[..., _SUMS:])

    def folded(self, labels: NDArray[np.int64], count: int) -> Allowances:
        """Join all places that share a label; leave out negative labels."""
        kept = labels >= 0
        out = np.zeros((count, WIDTH))
        np.add.at(out[:, :_SUMS], labels[kept], self.stack[kept][:, :_SUMS])
        np.maximum.at(out[:, _SUMS:], labels[kept], self.stack[kept][:, _SUMS:])
        return Allowances(out)

    def in_runs(self, per: int, axis: int) -> Allowances:
        """Join every `per` neighbours along an axis."""
        count = self.stack.shape[axis]
        if per == 1 or not count:
            return self
        starts = np.arange(0, count, per)
        parts = (
            joined.reduceat(part, starts, axis=axis)
            for joined, part in (
                (np.add, self.stack[..., :_SUMS]),
                (np.maximum, self.stack[..., _SUMS:]),
            )
        )
        return Allowances(np.concatenate(tuple(parts), axis=-1))

    def joined(self, axis: int = 0) -> Allowances:
        """Join all places along an axis."""
        sums = self.stack[..., :_SUMS].sum(axis)
        largest = self.stack[..., _SUMS:].max(axis, initial=0.0)
        return Allowances(np.concatenate((sums, largest), axis=-1))

    def repeated(self, count: Array | float) -> Allowances:
        """Let `count` elements err together: the sum varies more, its mean and steps do not."""
        factors = np.ones((*np.shape(count), WIDTH))
        factors[..., [1, 3, 7, 8]] = np.expand_dims(count, -1)
        return Allowances(self.stack * factors)

    def shared(self, members: Array, known: int) -> Allowances:
        """Let places round together in groups of `members`; lengths and gains leave out `known`.

        `known` members are already accounted for. A step counts by the mean of its group; where
        more are known than the group has, by their sum.
        """
        made = self.repeated(np.maximum(members / known, 1.0)).stack
        more = np.maximum(known / members, 1.0)
        # Indices 4 to 6 are the steps: a group of equal roundings counts once, by its mean.
        made[..., 4:7] /= members[..., None]
        made[..., 6] *= more
        made[..., 9] *= more
        return Allowances(made)

    @property
    def length(self) -> Array:
        """Return the largest length of a place's difference."""
        squares, fourth, largest = (self.stack[..., k] for k in (0, 1, 7))
        # Bernstein: mean of the squares + sqrt(2 L v) + L c / 3.
        bound = squares + np.sqrt(2 * _LOG * fourth) + _LOG / 3 * largest
        allowed: Array = np.sqrt(bound)
        return allowed

    @property
    def pull(self) -> Array:
        """Return the largest sum of reference times difference."""
        most, squares, largest = (self.stack[..., k] for k in (2, 3, 8))
        allowed: Array = most + np.sqrt(2 * _LOG * squares) + _LOG / 3 * largest
        return allowed

    @property
    def stepped(self) -> Array:
        """Return the steps that were counted."""
        found: Array = self.stack[..., 4]
        return found

    @property
    def steps(self) -> Array:
        """Return the largest number of steps; an element's variance is at most its mean."""
        mean, variance, largest = (self.stack[..., k] for k in (5, 6, 9))
        allowed: Array = mean + np.sqrt(2 * _LOG * variance) + _LOG / 3 * largest
        return allowed


# --------------------------------------------------------------------------------------------------
# Steps: how many elements of a place moved to a neighbour, however small these are.
#
# With most = slack + spacing, an element counts |d| / most, at most 1. |RN(s + e) - RN(s)| is |e|
# on average, since a rounding boundary lies between both with probability |e| / spacing. So a place
# counts at most sum(slack / most) on average, plus chance. Lengths and gains are dominated by the
# largest elements; here all elements weigh the same. A signed sum has the same bound and is never
# larger, so it would add nothing.
#
# An error that a whole row shares (a norm's root, a scale) does not make roundings alike: given the
# error, each element steps or not by its own last digits. Elements with equal last digits do round
# alike:
#
# * in one row, elements that are equal but for sign and powers of two: few 8-bit numbers times one
#   factor, or weight rows that occur twice;
# * equal rows, such as those of one token, for a block of columns.
#
# Such a group counts by its mean, which varies no more than one member does. Groups are read off
# the twin; a wrong group weakens the level but never raises a false alarm.
#
# Shape letters: M rows, K columns.

STEP_BLOCK = 64  # columns compared at once: rotated features differ even where the others are equal
_FLOAT64_BITS = 52  # mantissa bits
_NARROW = 10  # mantissa bits; in wider formats elements are hardly ever equal by chance


class AlikeRows:
    """Detects rows that are equal but for sign and powers of two, by blocks of columns."""

    def __init__(self, shape: tuple[int, int], block: int = STEP_BLOCK) -> None:
        height, self._width = shape
        self.starts = np.arange(0, self._width, block)
        self._digests = np.zeros((height, len(self.starts)))

    def add(self, part: slice, t_MK: Array) -> None:
        """Add the next rows of the twin."""
        with np.errstate(invalid="ignore"):
            # A random projection of each block: equal blocks have equal projections.
            seen = np.add.reduceat(t_MK * _probe(self._width), self.starts, axis=1)
        self._digests[part] = np.where(np.isfinite(seen), seen, 0.0)

    def members(self) -> Array:
        """Return how many rows equal each one, itself included [M, blocks]."""
        # Mantissas ignore sign and powers of two.
        mantissas = np.frexp(np.abs(self._digests))[0]
        order = mantissas.argsort(axis=0)
        ranked = np.take_along_axis(mantissas, order, 0)
        # Equal neighbours of a column are one group; groups are numbered through all columns.
        first = np.ones(ranked.shape, dtype=bool)
        first[1:] = ranked[1:] != ranked[:-1]
        group = first.T.cumsum().reshape(first.T.shape).T - 1
        counts = np.bincount(group.reshape(-1))[group].astype(np.float64)
        found = np.empty(ranked.shape)
        np.put_along_axis(found, order, np.where(ranked > 0, counts, 1.0), 0)
        return found


@lru_cache(maxsize=16)
def _probe(width: int) -> Array:
    drawn: Array = np.random.default_rng(0).standard_normal(width)
    return drawn


def alike_in_row(t_MK: Array, output: ElementFormat) -> Array | None:
    """Return how many elements of its row each one equals; None in formats where few do."""
    bits = output.mantissa_bits
    if bits > _NARROW:
        return None
    classes = 1 << bits
    # The leading mantissa bits; keys are unique per row and mantissa.
    mantissas = (t_MK.view(np.int64) >> (_FLOAT64_BITS - bits)) & (classes - 1)
    keys = mantissas + (np.arange(len(t_MK)) * classes)[:, None]
    counts = np.bincount(keys.reshape(-1)).astype(np.float64)
    found: Array = counts[keys]
    return found


def counted(d: Array, e: Array, most: Array, alike: Array | None) -> Array:
    """Return each element's count, at most 1, and its allowed mean [2, M, K]; 0 where most is 0."""
    both = np.zeros((2, *d.shape))
    np.divide(d, most, out=both[0], where=most > 0)
    np.divide(e, most, out=both[1], where=most > 0)
    np.minimum(both[0], 1.0, out=both[0])
    return both if alike is None else np.divide(both, alike, out=both)


# --------------------------------------------------------------------------------------------------
# The budget and the judgement of a candidate by it, the same for every component.
#
# * An element: |RN(s + e) - RN(s)| <= |e| + ulp; where the slack is 0, nothing may differ.
# * A place: a rounding falls on the other side with probability |e| / ulp, so d^2 is at most
#   ulp * slack + slack^2 on average.
# * The gain of a place: the slack in full, as if all errors had one sign, and the roundings as
#   above.
#
# A healthy worst case reaches HEADROOM of its budget. A candidate that is too good is found by the
# triangle inequality: within its budget b of the twin, it cannot be nearer to the unquantised
# reference than the twin by more than b.

HEADROOM = 0.7  # of a budget: the most that a healthy worst case reaches
KIND = "kind of element"  # the level of elements that are finite on one side only
_PANEL = 1 << 20  # elements judged at once


@dataclass(frozen=True, eq=False)
class Budget:
    """The allowed difference of one output, and its derivation; `slack` broadcasts to the output.

    `repeats` is how many rows, and how many columns, may be equal: equal ones round alike. `free`
    marks elements that nothing reads; they may hold anything. `laws` add findings of their own.
    """

    output: ElementFormat
    slack: Tensor
    derivation: tuple[str, ...]
    repeats: tuple[int, int] = (1, 1)
    free: Tensor | None = None
    laws: Laws | None = None


class Laws(Protocol):
    """Laws that a whole output obeys, derived from its operands."""

    def findings(self, candidate: Tensor, twin: Tensor) -> Sequence[LevelFinding]:
        """Judge a candidate by each law."""
        ...


@dataclass(frozen=True)
class LevelFinding:
    """The worst result of one level; `place` is its index there, both numbers share one unit."""

    level: str
    place: tuple[int, ...]
    measured: float
    allowed: float

    @property
    def ratio(self) -> float:
        """Return the difference in units of budget."""
        if not self.measured:
            return 0.0
        return self.measured / self.allowed if self.allowed else math.inf

    def __str__(self) -> str:
        at = ", ".join(map(str, self.place))
        if self.level == KIND:
            return f"NaN or infinite on one side only: {self.measured:,.0f} elements, first {at}"
        kind, _, level = self.level.rpartition(" of ")
        level = "group of columns" if level == "columns" else level
        place = "the whole output" if level == "whole" else f"{level} {at}".rstrip()
        measured, allowed = number(self.measured), number(self.allowed)
        text = f"{self.level} {at}".rstrip() + f": {measured}"
        if kind == "gain":
            # A mean: half an output may be off by twice as much.
            text = f"on average {place} is too large or too small by {share(self.measured)}"
            allowed = share(self.allowed)
        elif kind == "length":
            text = f"the difference over {place} has a length of {measured}"
        elif self.level == "element":
            text = f"{place} is off by {measured}"
        return f"{text}, budget {allowed} ({budgets(self.ratio, 'it')})"


@dataclass(frozen=True)
class Flips:
    """Legal differences of a choice or of codes, reported apart: how many of how many, and where.

    `rows` are the tokens (or rows) that hold one, at most a few of them.
    """

    count: int = 0
    total: int = 0
    rows: tuple[int, ...] = ()
    words: str = ""


@dataclass(frozen=True, eq=False)
class ResultBasis:
    """The derivation and the comparison that a judgement rests on."""

    comparison: Comparison | None = None
    derivation: tuple[str, ...] = ()
    allowed_length: float = math.nan


@dataclass(frozen=True, eq=False)
class OutputResult:
    """The result for one output: findings (worst first), legal differences, and reasons.

    Where candidate and twin are equal the reasons are computed lazily, and so is the comparison of
    codes and choices.
    """

    output: str
    verdict: Verdict
    findings: tuple[LevelFinding, ...] = ()
    flips: Flips = Flips()
    undecided: str = ""  # why nothing is claimed
    reasons: Callable[[], ResultBasis] = ResultBasis

    @cached_property
    def _reasons(self) -> ResultBasis:
        return self.reasons()

    def settled(self) -> OutputResult:
        """Return the same result without references to tensors, to keep many of them in memory."""
        known = self._reasons
        return replace(self, reasons=lambda: known)

    @property
    def comparison(self) -> Comparison | None:
        """Return the comparison of candidate and twin; of codes, that of their values."""
        return self._reasons.comparison

    @property
    def derivation(self) -> tuple[str, ...]:
        """Return the derivation of the budget, in words."""
        return self._reasons.derivation

    @property
    def is_measured(self) -> bool:
        """Return whether the budget was measured, because none is derived for such a component."""
        return any(line.startswith(MEASURED) for line in self.derivation)

    @property
    def allowed_length(self) -> float:
        """Return the largest length of the whole difference; NaN for codes and choices."""
        return self._reasons.allowed_length

    @property
    def distance(self) -> float:
        """Return the squared length of the difference; 0 where nothing was compared."""
        return 0.0 if self.comparison is None else float(self.comparison.total.dd)

    @property
    def identical(self) -> float:
        """Return the share of equal codes; NaN where nothing was compared."""
        return math.nan if self.comparison is None else self.comparison.identical

    @property
    def relative_budget(self) -> float | None:
        """Return the largest length of the difference over the twin's; None where that is zero."""
        compared = self.comparison
        length = 0.0 if compared is None else math.sqrt(float(compared.total.rr))
        return self.allowed_length / length if length else None

    @property
    def ratio(self) -> float:
        """Return the worst difference in units of budget; NaN where nothing is claimed."""
        if self.verdict is Verdict.UNDECIDED:
            return math.nan
        return self.findings[0].ratio if self.findings else 0.0

    @property
    def worst(self) -> LevelFinding | None:
        """Return the finding that decides."""
        return self.findings[0] if self.findings else None


def judge(
    candidate: Tensor,
    twin: Tensor,
    budget: Budget,
    places: NamedPlaces | None = None,
    *,
    output: str = "out",
) -> OutputResult:
    """Judge a candidate against its twin by rows, tiles and every named place."""
    if budget.free is not None:
        # Elements that nothing reads count as equal.
        candidate = torch.where(budget.free, twin, candidate)
    comparison = compare(candidate, twin, places)
    element, rows, together, cells = _allowances(candidate, twin, budget, comparison)
    per = comparison.places.tile[1] // comparison.cell
    runs = cells.stack.shape[1]
    tiles = Allowances(cells.in_runs(per, 1).stack.reshape(-1, WIDTH))
    columns = cells.joined()
    whole = Allowances(columns.joined().stack[None])
    high, wide = budget.repeats
    # At most this many elements of a tile can round alike.
    in_tile = min(high, comparison.places.tile[0]) * min(wide, comparison.places.tile[1])
    levels = [
        ("row", comparison.rows.stack, rows.repeated(wide)),
        ("tile", comparison.tiles.stack.reshape(-1, 4), tiles.repeated(in_tile)),
        ("columns", comparison.columns.stack, columns.repeated(high * min(wide, comparison.cell))),
        ("whole", comparison.total.stack[None], whole.repeated(high * wide)),
    ]
    for name in comparison.names:
        in_rows = name in comparison.places.rows
        labels = (
            comparison.places.rows[name]
            if in_rows
            else np.arange(runs) // (comparison.places.columns[name] // comparison.cell)
        )
        allowances = (together if in_rows else columns).folded(
            labels, int(labels.max(initial=-1)) + 1
        )
        levels.append((name, comparison.by(name).stack, allowances.repeated(high * wide)))
    findings = [element, *(f for level in levels for f in _worst_of(*level))]
    if budget.laws is not None:
        findings.extend(budget.laws.findings(candidate, twin))
    if comparison.census.mismatched:
        at = comparison.census.first or (0, 0)
        findings.append(LevelFinding(KIND, at, float(comparison.census.mismatched), 0.0))
    findings.sort(key=lambda finding: -finding.ratio)
    basis = ResultBasis(comparison, budget.derivation, float(levels[3][2].length[0]) / HEADROOM)
    verdict = Verdict.AGREES if findings[0].ratio <= 1 else Verdict.DIFFERS
    return OutputResult(output, verdict, tuple(findings), reasons=lambda: basis)


def _worst_of(
    level: str, sums: NDArray[np.float64], allowances: Allowances
) -> Iterator[LevelFinding]:
    """Yield the worst length, the worst gain and the most steps of one level."""
    if not len(sums):
        return
    # sums: rr, cc, rd, dd of each place.
    of_length = np.sqrt(sums[:, 3]), allowances.length / HEADROOM
    pulls, allowed = np.abs(sums[:, 2]), allowances.pull / HEADROOM
    at = int(_ratios(pulls, allowed).argmax())
    # Pulls become gains when divided by the reference's energy rr.
    energy = float(sums[at, 0]) or 1.0
    yield _worst_measured(f"length of {level}", *of_length)
    yield LevelFinding(
        f"gain of {level}", (at,), float(pulls[at]) / energy, float(allowed[at]) / energy
    )
    yield _worst_measured(f"steps of {level}", allowances.stepped, allowances.steps / HEADROOM)


def _worst_measured(
    level: str, measured: NDArray[np.float64], allowed: NDArray[np.float64]
) -> LevelFinding:
    at = int(_ratios(measured, allowed).argmax())
    return LevelFinding(level, (at,), float(measured[at]), float(allowed[at]))


def _allowances(
    candidate: Tensor, twin: Tensor, budget: Budget, comparison: Comparison
) -> tuple[LevelFinding, Allowances, Allowances, Allowances]:
    """Return the worst element, and the allowances of rows [M], twice, and of cells [R, S].

    The first rows stand for themselves; the second are for joining, where equal rows round alike.
    """
    width = comparison.shape[-1] if comparison.shape else 1
    height, tall = len(comparison.rows.rr), comparison.places.tile[0]
    slack = _slack(budget, comparison.shape).reshape(height, width)
    pair = [side.detach().reshape(height, width) for side in (candidate, twin)]
    # Blocks must not straddle two cells.
    block, worst = math.gcd(comparison.cell, STEP_BLOCK), LevelFinding("element", (0, 0), 0.0, 0.0)
    rows, together = np.zeros((2, height, WIDTH))
    cells = np.zeros((*comparison.cells.rr.shape, WIDTH))
    step = max(1, _PANEL // max(1, width))
    starts = range(0, height if width else 0, step)
    panels = [slice(start, min(start + step, height)) for start in starts]
    alike = AlikeRows((height, width), block)
    values = np.empty((0, width))
    for part in panels:
        values = values_of_any(pair[1][part].cpu())
        alike.add(part, values)
    sums = _panel_sums if _has_loop(budget.output, block) else panel_definition
    # Equal rows have to be counted over the whole twin before the first panel is summed.
    members = alike.members()
    for part in panels:
        if len(panels) > 1:
            values = values_of_any(pair[1][part].cpu())
        c, e = values_of_any(pair[0][part].cpu()), slack[part].double().numpy()
        sides = (c, values, e) if comparison.census.clean else _finite(c, values, e)
        element, blocks = sums(sides, budget.output, alike.starts)
        row, *column = element.place
        element = replace(element, place=(row + part.start, *column))
        worst = max(worst, element, key=lambda finding: finding.ratio)
        rows[part] = blocks.joined(1).stack
        blocks = blocks.shared(members[part], budget.repeats[0])
        together[part] = blocks.joined(1).stack
        bands = np.arange(part.start, part.stop) // tall
        blocks.in_runs(comparison.cell // block, 1).scatter_into(bands, cells)
    return worst, Allowances(rows), Allowances(together), Allowances(cells)


def panel_definition(
    sides: Sides, output: ElementFormat, starts: NDArray[np.int64]
) -> tuple[LevelFinding, Allowances]:
    """Return the worst element of some rows, and what is allowed in runs of their columns."""
    c, t, e = sides
    d = np.abs(c - t)
    # |RN(s + e) - RN(s)| <= |e| + ulp
    most = np.where(e > 0, e + spacing(np.abs(t) + e, output), 0.0)
    # |d| is at most `most` and e on average, hence E[d^2] <= most * e.
    square, size, largest = most * e, np.abs(t), most * most
    steps, mean = counted(d, e, most, alike_in_row(t, output))
    # Order of the sums in Allowances: 0 to 5.
    terms = (square, square * largest, size * e, t * t * square, steps, mean)
    return _worst_element(d, most), Allowances.from_sums(terms, (largest, size * most), starts)


def _has_loop(output: ElementFormat, block: int) -> bool:
    return output.mantissa_bits <= FP32.mantissa_bits and block <= STEP_BLOCK


def _panel_sums(
    sides: Sides, output: ElementFormat, starts: NDArray[np.int64]
) -> tuple[LevelFinding, Allowances]:
    """Return what `panel_definition` does, in one pass."""
    from degarble.harness.engine.budget import loops  # noqa: PLC0415  numba

    c, t, e = (np.ascontiguousarray(side) for side in sides)
    block = int(starts[1]) if len(starts) > 1 else c.shape[1]
    stack = np.empty((len(c), len(starts), WIDTH))
    rule = output.min_exponent, output.mantissa_bits <= _NARROW
    row, column, off, most = loops.panel((c, t, e), block, output.mantissa_bits, rule, stack)
    element = LevelFinding("element", (row, column), off, most / HEADROOM)
    return element, Allowances(stack)


def _finite(c: Array, t: Array, e: Array) -> Sides:
    """Return 0 where a side is not finite."""
    known = np.isfinite(c) & np.isfinite(t)
    return np.where(known, c, 0.0), np.where(known, t, 0.0), np.where(known, e, 0.0)


def _slack(budget: Budget, shape: tuple[int, ...]) -> Tensor:
    slack = budget.slack.detach().cpu()
    if slack.numel() and not (bool(slack.min() >= 0) and all_finite(slack)):
        raise InvalidArgument(
            "slack", "negative, infinite or NaN", "finite bounds that are not negative",
            "A component whose operands are not finite has no budget; look at its inputs.",
        )  # fmt: skip
    return slack.expand(shape)


def _worst_element(d: NDArray[np.float64], most: NDArray[np.float64]) -> LevelFinding:
    row, column = divmod(int(_ratios(d, most).argmax()), d.shape[1])
    return LevelFinding(
        "element", (row, column), float(d[row, column]), float(most[row, column]) / HEADROOM
    )


def _ratios(measured: NDArray[np.float64], allowed: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return units of budget; infinite where something was measured and nothing is allowed."""
    with np.errstate(divide="ignore"):
        out: NDArray[np.float64] = np.zeros(measured.shape)
        np.divide(measured, allowed, out=out, where=measured > 0)
    return out


def spacing(magnitude: NDArray[np.float64], fmt: ElementFormat) -> NDArray[np.float64]:
    """Return the distance of neighbours of `fmt` at a magnitude."""
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, fmt.min_exponent)
    exponent = np.where(magnitude > 0, exponent, fmt.min_exponent)
    steps: NDArray[np.float64] = np.ldexp(1.0, exponent - fmt.mantissa_bits)
    return steps


def nearer_than_the_twin(
    judgement: OutputResult, candidate: Tensor, twin: Tensor, reference: Tensor
) -> LevelFinding:
    """Measure how much nearer a candidate is to the unquantised reference than its twin is.

    If that exceeds the budget of its distance to the twin, it did not use the quantised operands.
    """
    own, expected = (math.sqrt(compare(side, reference).total.dd) for side in (candidate, twin))
    return LevelFinding(
        "nearer to the reference than the twin", (), max(0.0, expected - own),
        judgement.allowed_length,
    )  # fmt: skip


@dataclass(frozen=True)
class LayerStep:
    """One component on the way through a layer.

    `relative` is its allowed relative length. `weight` is its output's share of the stream's
    length: 1 in a chain, less where a residual is added.
    """

    name: str
    relative: float
    weight: float = 1.0


def composed(steps: Sequence[LayerStep]) -> tuple[float, str]:
    """Return the relative drift that a layer of healthy components may show, and its derivation.

    Errors of different components are independent, so their squares add.
    """
    drift = math.sqrt(sum((step.relative * step.weight) ** 2 for step in steps))
    terms = " + ".join(
        f"({number(step.relative)} x {number(step.weight)})^2 [{step.name}]" for step in steps
    )
    return drift, f"sqrt({terms}) = {number(drift)}"


# --------------------------------------------------------------------------------------------------
# Evidence: the rows, heads or experts that a difference is certainly in, by their own budgets.
#
# A faint fault may put no single element beyond its budget, and then every rounding that fell the
# other way looks like the fault, in healthy heads and experts as well. So a place counts only where
# it alone is beyond its budget, and places are named only where all others together are within
# theirs.

Place = TypeVar("Place", int, str)
MOST_PLACES = 64  # of one kind; with more, only single elements count


@dataclass(frozen=True, eq=False)
class DifferenceEvidence:
    """Candidate and twin with the bound of their difference; `certain`: some elements exceed it."""

    candidate: Tensor
    twin: Tensor
    slack: Tensor
    certain: bool

    @classmethod
    def from_pair(
        cls, pair: tuple[Tensor, Tensor], slack: Tensor | None, *, certain: bool
    ) -> DifferenceEvidence:
        """Build evidence; without slack, and for codes, only the differing elements are known."""
        bound = torch.empty(0) if slack is None else slack.expand(pair[1].shape)
        return cls(*pair, bound, certain)

    def only(
        self, struck: Collection[Place], places: Mapping[Place, Tensor], *, columns: bool = False
    ) -> list[Place]:
        """Return the places that are certainly faulty; empty if none, all, or not all of them.

        `struck` holds the places with differing elements. `places` are masks of the leading
        extents, or of columns.
        """
        if not self._can_judge or len(places) > MOST_PLACES:
            found = [place for place in places if place in struck]
            return found if self.certain and len(found) < len(places) else []
        found = [
            place
            for place, mask in places.items()
            if (self.certain and place in struck) or self._ratio(mask, columns=columns) > 1
        ]
        others = [mask for place, mask in places.items() if place not in found]
        if not found or not others:
            return []
        # Places are named only if all others together are healthy.
        rest = torch.stack(others).any(0)
        return found if self._ratio(rest, columns=columns) <= HEADROOM else []

    @property
    def _can_judge(self) -> bool:
        known = self.candidate.dtype in FORMAT_OF_DTYPE and self.candidate.dtype.itemsize > 1
        # One-byte codes and integers can only be compared for equality.
        return known and self.slack.shape == self.twin.shape and bool(self.slack.isfinite().all())

    def _ratio(self, mask: Tensor, *, columns: bool) -> float:
        """Return the difference of a part in units of its own budget."""
        sides = (self.candidate, self.twin, self.slack)
        c, t, slack = (side[..., mask] if columns else side[mask] for side in sides)
        if not c.numel():
            return 0.0
        c, t, slack = (side.reshape(len(side), -1) for side in (c, t, slack))
        return judge(c, t, Budget(FORMAT_OF_DTYPE[c.dtype], slack, ())).ratio
