"""How far a correct kernel may be from its twin, and whether a candidate is within.

Owns the record of a budget, the judgement by it, and the composition over a layer. The one input is
`slack`: a bound, element by element, of the error before the one rounding to the output's format;
harness.engine.budget_rules derives it. What follows is the same for every component:

* an element: |RN(s + e) - RN(s)| <= |e| + ulp; where the slack is 0, nothing may differ;
* a place (row, tile, column run, head, expert): a rounding falls on the other side with probability
  |e| / ulp, so that d^2 is at most ulp * slack + slack^2 on average; Bernstein's inequality bounds
  the sum of independent ones but for one case in 1 / MISTAKEN;
* its gain: the slack in full, as if all errors pulled one way, and the roundings as above.

A healthy worst case sits at HEADROOM of its budget. Too good is judged by the triangle: a candidate
within its budget b of the twin is not nearer to the reference than the twin by more than b. Refuses
a slack that is negative or no number. Kept honest by suites/engine/test_budget.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from degarble.harness.engine.compare import compare
from degarble.harness.engine.compare_definition import values_of_any
from degarble.harness.errors import InvalidArgument
from degarble.harness.record.verdict import Verdict
from degarble.harness.record.wording import number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.harness.engine.comparison import Comparison, Places
    from degarble.harness.formats.types import ElementFormat

HEADROOM = 0.7  # of a budget: where the healthy worst case sits at most
MISTAKEN = 1e-12  # probability with which a place of a healthy run may exceed its bound
KIND = "kind of element"  # the level of what is finite on one side only
_LOG = math.log(1 / MISTAKEN)
_PANEL = 1 << 20  # elements judged at once


@dataclass(frozen=True, eq=False)
class Budget:
    """What one output of a component may differ by, and why; `slack` broadcasts to the output.

    `repeats` says how many rows, and how many columns, may be equal: these round alike. `free`
    marks elements that nobody reads: they may hold anything.
    """

    output: ElementFormat
    slack: Tensor
    derivation: tuple[str, ...]
    repeats: tuple[int, int] = (1, 1)
    free: Tensor | None = None


@dataclass(frozen=True)
class Finding:
    """The worst of one level: `place` is its index there; measured and allowed in one unit."""

    level: str
    place: tuple[int, ...]
    measured: float
    allowed: float

    @property
    def ratio(self) -> float:
        """The difference in units of budget."""
        if not self.measured:
            return 0.0
        return self.measured / self.allowed if self.allowed else math.inf

    def __str__(self) -> str:
        at = ", ".join(map(str, self.place))
        if self.level == KIND:
            return f"NaN or infinite on one side only: {self.measured:,.0f} elements, first {at}"
        return (
            f"{self.level} {at}: {number(self.measured)}, budget {number(self.allowed)} "
            f"({number(self.ratio)} of it)"
        )


@dataclass(frozen=True, eq=False)
class Judgement:
    """A comparison and what its budget says; findings are sorted, the worst first."""

    comparison: Comparison
    budget: Budget
    findings: tuple[Finding, ...]
    allowed_length: float  # of the whole difference: what a healthy candidate's may be

    @property
    def worst(self) -> Finding:
        """The finding that decides."""
        return self.findings[0]

    @property
    def verdict(self) -> Verdict:
        """AGREES within the budget everywhere, else DIFFERS."""
        return Verdict.AGREES if self.worst.ratio <= 1 else Verdict.DIFFERS


@dataclass(frozen=True, eq=False)
class _Allowances:
    """Sums and maxima of what is allowed, along a last axis of 6.

    squares, squares of squares, gain at most, squares of gain; largest square, largest gain term.
    """

    stack: NDArray[np.float64]

    def folded(self, labels: NDArray[np.int64], count: int) -> _Allowances:
        """Join the places of one label."""
        kept = labels >= 0
        out = np.zeros((count, 6))
        np.add.at(out[:, :4], labels[kept], self.stack[kept][:, :4])
        np.maximum.at(out[:, 4:], labels[kept], self.stack[kept][:, 4:])
        return _Allowances(out)

    def in_runs(self, per: int, axis: int) -> _Allowances:
        """Join every `per` neighbours along an axis."""
        count = self.stack.shape[axis]
        if per == 1 or not count:
            return self
        starts = np.arange(0, count, per)
        parts = (
            joined.reduceat(part, starts, axis=axis)
            for joined, part in ((np.add, self.stack[..., :4]), (np.maximum, self.stack[..., 4:]))
        )
        return _Allowances(np.concatenate(tuple(parts), axis=-1))

    def joined(self) -> _Allowances:
        """Join all that lie along the first axis."""
        sums, largest = self.stack[..., :4].sum(0), self.stack[..., 4:].max(0, initial=0.0)
        return _Allowances(np.concatenate((sums, largest), axis=-1))

    def repeated(self, count: int) -> _Allowances:
        """Let `count` elements err together: their sum varies more, its mean stays."""
        factors = np.array([1, count, 1, count, count, count], np.float64)
        return _Allowances(self.stack * factors)

    @property
    def length(self) -> NDArray[np.float64]:
        """What the length of a place's difference may be."""
        squares, fourth, largest = (self.stack[..., k] for k in (0, 1, 4))
        bound = squares + np.sqrt(2 * _LOG * fourth) + _LOG / 3 * largest
        allowed: NDArray[np.float64] = np.sqrt(bound) / HEADROOM
        return allowed

    @property
    def pull(self) -> NDArray[np.float64]:
        """What the sum of reference times difference may be."""
        most, squares, largest = (self.stack[..., k] for k in (2, 3, 5))
        bound = most + np.sqrt(2 * _LOG * squares) + _LOG / 3 * largest
        allowed: NDArray[np.float64] = bound / HEADROOM
        return allowed


def judge(
    candidate: Tensor, twin: Tensor, budget: Budget, places: Places | None = None
) -> Judgement:
    """Judge a candidate against its twin by rows, tiles and every named place."""
    if budget.free is not None:
        candidate = torch.where(budget.free, twin, candidate)
    found = compare(candidate, twin, places)
    element, rows, cells = _allowances(candidate, twin, budget, found)
    per = found.places.tile[1] // found.cell
    runs = cells.shape[1]
    by_cell = _Allowances(cells)
    tiles = _Allowances(by_cell.in_runs(per, 1).stack.reshape(-1, 6))
    columns = by_cell.joined()
    whole = _Allowances(columns.joined().stack[None])
    high, wide = budget.repeats
    in_tile = min(high, found.places.tile[0]) * min(wide, found.places.tile[1])
    levels = [
        ("row", found.rows.stack, _Allowances(rows).repeated(wide)),
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
        allowances = (_Allowances(rows) if in_rows else columns).folded(
            labels, int(labels.max(initial=-1)) + 1
        )
        levels.append((name, found.by(name).stack, allowances.repeated(high * wide)))
    findings = [element, *(f for level in levels for f in _worst_of(*level))]
    if found.census.mismatched:
        at = found.census.first or (0, 0)
        findings.append(Finding(KIND, at, float(found.census.mismatched), 0.0))
    findings.sort(key=lambda each: -each.ratio)
    return Judgement(found, budget, tuple(findings), float(levels[3][2].length[0]))


def _worst_of(level: str, sums: NDArray[np.float64], allowances: _Allowances) -> Iterator[Finding]:
    """Yield the worst length and the worst gain of one level."""
    if not len(sums):
        return
    lengths, allowed = np.sqrt(sums[:, 3]), allowances.length
    pulls, allowed_pull = np.abs(sums[:, 2]), allowances.pull
    far, pulled = _ratios(lengths, allowed), _ratios(pulls, allowed_pull)
    at = int(far.argmax())
    yield Finding(f"length of {level}", (at,), float(lengths[at]), float(allowed[at]))
    at = int(pulled.argmax())
    energy = float(sums[at, 0]) or 1.0
    yield Finding(
        f"gain of {level}", (at,), float(pulls[at]) / energy, float(allowed_pull[at]) / energy
    )


def _allowances(
    candidate: Tensor, twin: Tensor, budget: Budget, found: Comparison
) -> tuple[Finding, NDArray[np.float64], NDArray[np.float64]]:
    """Return the worst element, and the allowances of rows [M, 6] and cells [R, S, 6]."""
    width = found.shape[-1] if found.shape else 1
    height, cell, tall = len(found.rows.rr), found.cell, found.places.tile[0]
    rows, cells = np.zeros((height, 6)), np.zeros((*found.cells.rr.shape, 6))
    worst = Finding("element", (0, 0), 0.0, 0.0)
    slack = _slack(budget, found.shape).reshape(height, width)
    c_MK, t_MK = (side.detach().reshape(height, width) for side in (candidate, twin))
    step, starts = max(1, _PANEL // max(1, width)), np.arange(0, width, cell)
    for start in range(0, height if width else 0, step):
        part = slice(start, min(start + step, height))
        c, t = values_of_any(c_MK[part].cpu()), values_of_any(t_MK[part].cpu())
        e = slack[part].double().numpy()
        if found.census.clean:
            d = np.abs(c - t)
        else:
            known = np.isfinite(c) & np.isfinite(t)
            t, e = np.where(known, t, 0.0), np.where(known, e, 0.0)
            d = np.where(known, np.abs(c - t), 0.0)
        most = np.where(e > 0, e + spacing(np.abs(t) + e, budget.output), 0.0)
        worst = max(worst, _worst_element(d, most, start), key=lambda each: each.ratio)
        square, size = (most - e) * e + e * e, np.abs(t)
        largest = most * most
        terms = (square, square * largest, size * e, t * t * square, largest, size * most)
        by_cell = np.empty((*d.shape[:-1], len(starts), 6))
        for k, term in enumerate(terms):
            by_cell[..., k] = (np.maximum if k > 3 else np.add).reduceat(term, starts, axis=1)
        rows[part, :4], rows[part, 4:] = by_cell[..., :4].sum(1), by_cell[..., 4:].max(1)
        if start // tall == (part.stop - 1) // tall:
            band = cells[start // tall]
            band[:, :4] += by_cell[..., :4].sum(0)
            np.maximum(band[:, 4:], by_cell[..., 4:].max(0), out=band[:, 4:])
            continue
        bands = np.arange(part.start, part.stop) // tall
        np.add.at(cells[..., :4], bands, by_cell[..., :4])
        np.maximum.at(cells[..., 4:], bands, by_cell[..., 4:])
    return worst, rows, cells


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
    """Units of budget; infinite where something was measured and nothing is allowed."""
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
    """A judgement that says how long the whole difference may be."""

    @property
    def allowed_length(self) -> float:
        """Of a healthy candidate."""
        ...


def nearer_than_the_twin(
    judgement: Allowing, candidate: Tensor, twin: Tensor, reference: Tensor
) -> Finding:
    """Say by how much a candidate is nearer to the unquantised reference than its twin is.

    More than the budget of its distance to the twin: then it did not use the quantised operands.
    """
    own, expected = (math.sqrt(compare(side, reference).total.dd) for side in (candidate, twin))
    return Finding(
        "nearer to the reference than the twin", (), max(0.0, expected - own),
        judgement.allowed_length,
    )  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One component on the way through a layer.

    `relative` is its allowed relative length; `weight` what its output is of the stream it ends in,
    in length: 1 in a chain, less where a residual is added.
    """

    name: str
    relative: float
    weight: float = 1.0


def composed(steps: Sequence[Step]) -> tuple[float, str]:
    """Return the relative drift that a layer of healthy components may show, and its derivation.

    Errors of different components are independent, hence their squares add.
    """
    drift = math.sqrt(sum((step.relative * step.weight) ** 2 for step in steps))
    terms = " + ".join(
        f"({number(step.relative)} x {number(step.weight)})^2 [{step.name}]" for step in steps
    )
    return drift, f"sqrt({terms}) = {number(drift)}"
