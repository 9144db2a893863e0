"""The error budget of a component's output, and the judgement of a candidate by it.

The only input is `slack`, an elementwise bound of the error before the one rounding to the output's
format; budget/rules.py derives it. The rest is the same for every component:

* An element: |RN(s + e) - RN(s)| <= |e| + ulp; where the slack is 0, nothing may differ.
* A place (row, tile, column run, head, expert): a rounding falls on the other side with probability
  |e| / ulp, so d^2 is at most ulp * slack + slack^2 on average. Bernstein's inequality bounds the
  sum of independent terms but for a probability of MISTAKEN.
* The gain of a place: the slack in full, as if all errors had one sign, and the roundings as above.

A healthy worst case reaches HEADROOM of its budget. A candidate that is too good is found by the
triangle inequality: within its budget b of the twin, it cannot be nearer to the unquantised
reference than the twin by more than b.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.engine.budget.allowances import WIDTH, Allowances
from degarble.harness.engine.budget.steps import BLOCK, AlikeRows, alike_in_row, counted
from degarble.harness.engine.compare.compare import compare
from degarble.harness.engine.compare.definition import values_of_any
from degarble.harness.report.number_text import number
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.harness.engine.compare.comparison import Comparison, Places
    from degarble.harness.formats.types import ElementFormat

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

    def findings(self, candidate: Tensor, twin: Tensor) -> Sequence[Finding]:
        """Judge a candidate by each law."""
        ...


@dataclass(frozen=True)
class Finding:
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
        level = f"{self.level} {at}".rstrip()
        return (
            f"{level}: {number(self.measured)}, budget {number(self.allowed)} "
            f"({number(self.ratio)} of it)"
        )


@dataclass(frozen=True, eq=False)
class Judgement:
    """A comparison and its findings by budget, the worst first."""

    comparison: Comparison
    budget: Budget
    findings: tuple[Finding, ...]
    allowed_length: float  # of the whole difference: what a healthy candidate's may be

    @property
    def worst(self) -> Finding:
        """Return the finding that decides."""
        return self.findings[0]

    @property
    def verdict(self) -> Verdict:
        """Return AGREES if every finding is within budget, else DIFFERS."""
        return Verdict.AGREES if self.worst.ratio <= 1 else Verdict.DIFFERS


def judge(
    candidate: Tensor, twin: Tensor, budget: Budget, places: Places | None = None
) -> Judgement:
    """Judge a candidate against its twin by rows, tiles and every named place."""
    if budget.free is not None:
        # Elements that nothing reads count as equal.
        candidate = torch.where(budget.free, twin, candidate)
    found = compare(candidate, twin, places)
    element, rows, together, cells = _allowances(candidate, twin, budget, found)
    per = found.places.tile[1] // found.cell
    runs = cells.stack.shape[1]
    tiles = Allowances(cells.in_runs(per, 1).stack.reshape(-1, WIDTH))
    columns = cells.joined()
    whole = Allowances(columns.joined().stack[None])
    high, wide = budget.repeats
    # At most this many elements of a tile can round alike.
    in_tile = min(high, found.places.tile[0]) * min(wide, found.places.tile[1])
    levels = [
        ("row", found.rows.stack, rows.repeated(wide)),
        ("tile", found.tiles.stack.reshape(-1, 4), tiles.repeated(in_tile)),
        ("columns", found.columns.stack, columns.repeated(high * min(wide, found.cell))),
        ("whole", found.total.stack[None], whole.repeated(high * wide)),
    ]
    for name in found.names:
        in_rows = name in found.places.rows
        labels = (
            found.places.rows[name]
            if in_rows
            else np.arange(runs) // (found.places.columns[name] // found.cell)
        )
        allowances = (together if in_rows else columns).folded(
            labels, int(labels.max(initial=-1)) + 1
        )
        levels.append((name, found.by(name).stack, allowances.repeated(high * wide)))
    findings = [element, *(f for level in levels for f in _worst_of(*level))]
    if budget.laws is not None:
        findings.extend(budget.laws.findings(candidate, twin))
    if found.census.mismatched:
        at = found.census.first or (0, 0)
        findings.append(Finding(KIND, at, float(found.census.mismatched), 0.0))
    findings.sort(key=lambda each: -each.ratio)
    return Judgement(found, budget, tuple(findings), float(levels[3][2].length[0]) / HEADROOM)


def _worst_of(level: str, sums: NDArray[np.float64], allowances: Allowances) -> Iterator[Finding]:
    """Yield the worst length, the worst gain and the most steps of one level."""
    if not len(sums):
        return
    # sums: rr, cc, rd, dd of each place.
    of_length = np.sqrt(sums[:, 3]), allowances.length / HEADROOM
    pulls, allowed = np.abs(sums[:, 2]), allowances.pull / HEADROOM
    at = int(_ratios(pulls, allowed).argmax())
    # Pulls become gains when divided by the reference's energy rr.
    energy = float(sums[at, 0]) or 1.0
    yield _most(f"length of {level}", *of_length)
    yield Finding(f"gain of {level}", (at,), float(pulls[at]) / energy, float(allowed[at]) / energy)
    yield _most(f"steps of {level}", allowances.stepped, allowances.steps / HEADROOM)


def _most(level: str, measured: NDArray[np.float64], allowed: NDArray[np.float64]) -> Finding:
    at = int(_ratios(measured, allowed).argmax())
    return Finding(level, (at,), float(measured[at]), float(allowed[at]))


def _allowances(
    candidate: Tensor, twin: Tensor, budget: Budget, found: Comparison
) -> tuple[Finding, Allowances, Allowances, Allowances]:
    """Return the worst element, and the allowances of rows [M], twice, and of cells [R, S].

    The first rows stand for themselves; the second are for joining, where equal rows round alike.
    """
    width = found.shape[-1] if found.shape else 1
    height, tall = len(found.rows.rr), found.places.tile[0]
    slack = _slack(budget, found.shape).reshape(height, width)
    pair = [side.detach().reshape(height, width) for side in (candidate, twin)]
    # Blocks must not straddle two cells.
    block, worst = math.gcd(found.cell, BLOCK), Finding("element", (0, 0), 0.0, 0.0)
    rows, together = np.zeros((2, height, WIDTH))
    cells = np.zeros((*found.cells.rr.shape, WIDTH))
    step = max(1, _PANEL // max(1, width))
    starts = range(0, height if width else 0, step)
    panels = [slice(start, min(start + step, height)) for start in starts]
    alike = AlikeRows((height, width), block)
    for part in panels:
        alike.add(part, values_of_any(pair[1][part].cpu()))
    # Equal rows have to be counted over the whole twin before the first panel is summed.
    members = alike.members()
    for part in panels:
        d, t, e = _finite(pair, slack, part, clean=found.census.clean)
        # |RN(s + e) - RN(s)| <= |e| + ulp
        most = np.where(e > 0, e + spacing(np.abs(t) + e, budget.output), 0.0)
        worst = max(worst, _worst_element(d, most, part.start), key=lambda each: each.ratio)
        # |d| is at most `most` and e on average, hence E[d^2] <= most * e.
        square, size, largest = most * e, np.abs(t), most * most
        steps, mean = counted(d, e, most, alike_in_row(t, budget.output))
        # Order of the sums in Allowances: 0 to 5.
        terms = (square, square * largest, size * e, t * t * square, steps, mean)
        blocks = Allowances.of(terms, (largest, size * most), alike.starts)
        rows[part] = blocks.joined(1).stack
        blocks = blocks.shared(members[part], budget.repeats[0])
        together[part] = blocks.joined(1).stack
        bands = np.arange(part.start, part.stop) // tall
        blocks.in_runs(found.cell // block, 1).put(bands, cells)
    return worst, Allowances(rows), Allowances(together), Allowances(cells)


def _finite(
    pair: Sequence[Tensor], slack: Tensor, part: slice, *, clean: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return distances, the twin's values and slacks of some rows; 0 where a side is not finite."""
    c, t = (values_of_any(side[part].cpu()) for side in pair)
    e = slack[part].double().numpy()
    if clean:
        return np.abs(c - t), t, e
    known = np.isfinite(c) & np.isfinite(t)
    with np.errstate(invalid="ignore"):
        d = np.abs(c - t)
    return np.where(known, d, 0.0), np.where(known, t, 0.0), np.where(known, e, 0.0)


def _slack(budget: Budget, shape: tuple[int, ...]) -> Tensor:
    slack = budget.slack.detach().cpu()
    if not bool((slack >= 0).all()) or not bool(slack.isfinite().all()):
        raise InvalidArgument(
            "slack", "negative, infinite or NaN", "finite bounds that are not negative",
            "A component whose operands are not finite has no budget; look at its inputs.",
        )  # fmt: skip
    return slack.expand(shape)


def _worst_element(d: NDArray[np.float64], most: NDArray[np.float64], start: int) -> Finding:
    row, column = divmod(int(_ratios(d, most).argmax()), d.shape[1])
    place = (row + start, column)
    return Finding("element", place, float(d[row, column]), float(most[row, column]) / HEADROOM)


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


class Allowing(Protocol):
    """A judgement that bounds the length of the whole difference."""

    @property
    def allowed_length(self) -> float:
        """Return the largest length of a healthy candidate's difference."""
        ...


def nearer_than_the_twin(
    judgement: Allowing, candidate: Tensor, twin: Tensor, reference: Tensor
) -> Finding:
    """Measure how much nearer a candidate is to the unquantised reference than its twin is.

    If that exceeds the budget of its distance to the twin, it did not use the quantised operands.
    """
    own, expected = (math.sqrt(compare(side, reference).total.dd) for side in (candidate, twin))
    return Finding(
        "nearer to the reference than the twin", (), max(0.0, expected - own),
        judgement.allowed_length,
    )  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One component on the way through a layer.

    `relative` is its allowed relative length. `weight` is its output's share of the stream's
    length: 1 in a chain, less where a residual is added.
    """

    name: str
    relative: float
    weight: float = 1.0


def composed(steps: Sequence[Step]) -> tuple[float, str]:
    """Return the relative drift that a layer of healthy components may show, and its derivation.

    Errors of different components are independent, so their squares add.
    """
    drift = math.sqrt(sum((step.relative * step.weight) ** 2 for step in steps))
    terms = " + ".join(
        f"({number(step.relative)} x {number(step.weight)})^2 [{step.name}]" for step in steps
    )
    return drift, f"sqrt({terms}) = {number(drift)}"
