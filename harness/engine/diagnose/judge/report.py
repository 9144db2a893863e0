"""The result of judging one kernel: verdict, elements, budget and causes, and its text.

The text of a failure gives the count, the first and the worst element with coordinate, both codes
in hex and both values, the budget and its derivation, and the diagnosis. Snapshots hold these
texts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import max_pool2d

from degarble.harness.engine.adopted.statement import statement_of
from degarble.harness.engine.budget.budget import KIND
from degarble.harness.formats.codec import FORMAT_OF_DTYPE
from degarble.harness.report.blocks import Code, HeatMap, HeatScale
from degarble.harness.report.cards import Card, ShownAsCard
from degarble.harness.report.number_text import budgets, share, shortened
from degarble.harness.report.verdict import AnswerLevel, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.engine.budget.budget import LevelFinding, OutputResult
    from degarble.harness.engine.recover.described import Described
    from degarble.references.numerics import DecodedOperands

_CODES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_CELLS = 16  # of a picture, at most, either way
_FINDINGS = 3  # findings reported per output


@dataclass(frozen=True)
class NamedCause:
    """A cause: a known fault that reproduces the candidate within its budget."""

    fault: str
    title: str
    evidence: str
    ratio: float  # of the budget that the reproduction leaves
    words: str = ""  # the way in which it went wrong, without numbers of this call
    other: str = ""  # the component whose weight was taken
    place: str = ""  # `words` with the places and numbers of this call


@dataclass(frozen=True, eq=False)
class Causes:
    """What the search for causes says of a call: faults that explain it, or a description.

    `named` are faults that reproduce the candidate, the likeliest first; `tried` are all that were.
    `described` is what the kernel computed with, where no fault is named; `confidence` is how sure
    the first cause is; `wanted` says which data would tell more, where there is no cause.
    """

    named: tuple[NamedCause, ...] = ()
    tried: tuple[str, ...] = ()
    described: Described | None = None
    confidence: float = 0.0
    wanted: str = ""


@dataclass(frozen=True)
class Elements:
    """The number of elements beyond their own budget; lines for the first and the worst."""

    count: int
    total: int
    lines: tuple[str, ...] = ()
    region: str = ""  # that holds them all, where it is not the whole output
    picture: HeatMap | None = None  # rows by columns, each cell the worst of its elements


@dataclass(frozen=True, eq=False, repr=False)
class JudgedKernel(ShownAsCard):
    """The answer of `judge`; its truth value says whether the candidate agrees.

    `too_good` is how much nearer it is to the unquantised reference.
    """

    component: str
    verdict: Verdict
    outputs: Mapping[str, OutputResult] = field(default_factory=dict)
    elements: Mapping[str, Elements] = field(default_factory=dict)
    census: Mapping[str, str] = field(default_factory=dict)
    causes: Causes = field(default_factory=Causes)
    too_good: LevelFinding | None = None
    note: str = ""
    follows: DecodedOperands | None = None  # the convention that it fits, where it differs

    def __bool__(self) -> bool:
        return self.verdict is Verdict.AGREES

    @property
    def ratio(self) -> float:
        """Return the worst difference in units of budget; NaN where nothing is claimed."""
        known = [output.ratio for output in self.outputs.values()]
        return max(known, default=float("nan"))

    @property
    def distance(self) -> float:
        """Return the squared length of the difference over all outputs."""
        return math.fsum(output.distance for output in self.outputs.values())

    @property
    def named(self) -> tuple[NamedCause, ...]:
        """Return the causes that reproduce the candidate, the likeliest first."""
        return self.causes.named

    @property
    def tried(self) -> tuple[str, ...]:
        """Return the faults that were tried."""
        return self.causes.tried

    @property
    def level(self) -> AnswerLevel:
        """Return how much is known of the cause: named, described, or the place alone."""
        if self.named:
            return AnswerLevel.NAMED
        return AnswerLevel.DESCRIBED if self.causes.described else AnswerLevel.PLACED

    @property
    def cause(self) -> NamedCause | None:
        """Return the likeliest cause; None where no known fault reproduces the candidate."""
        return self.named[0] if self.named else None

    @property
    def sentence(self) -> str:
        """Return the answer in a sentence."""
        if self.verdict is Verdict.AGREES:
            equal = all(output.identical == 1 for output in self.outputs.values())
            how = "every number is equal" if equal else budgets(self.ratio)
            return f"{self.component} agrees with its twin: {how}."
        if self.verdict is Verdict.UNDECIDED:
            why = next((e.undecided for e in self.outputs.values() if e.undecided), "")
            return f"{self.component} is undecided: {why}"
        if self.causes.described is not None:
            return f"{self.component} differs from its twin. {self.causes.described.sentence}"
        if self.cause is None:
            if self.follows is not None or (self.note and not self.tried):
                return f"{self.component} differs from its twin: {self.note}."
            count = len(set(self.tried))
            text = f"{count} were tried" if count else "none is known for it"
            where = next((f" {e.region}" for e in self.elements.values() if e.region), "")
            return (
                f"{self.component} differs from its twin{where}{self._not_finite()}, and no known "
                f"fault explains it ({text})."
            )
        text = f"{self.cause.title} ({self.cause.fault})"
        place = f": {self.cause.place}" if self.cause.place else ""
        return f"{self.component} differs from its twin: {text}{place}."

    def _not_finite(self) -> str:
        for output in self.outputs.values():
            for finding in output.findings:
                if finding.level == KIND:
                    count = (
                        "1 value" if finding.measured == 1 else f"{finding.measured:,.0f} values"
                    )
                    return f": {count} NaN or infinite on one side only"
        return ""

    def lines(self) -> list[str]:
        """Return the full answer, line by line."""
        lines = [f"{self.verdict}: {self.sentence}"]
        for name, judged in self.outputs.items():
            lines += self._of_output(name, judged)
        if self.too_good is not None:
            lines.append(f"  {self.too_good}")
        for place, cause in enumerate(self.named):
            word = "cause" if not place else "or"
            lines.append(f"  {word}: {cause.fault}: {cause.evidence}")
        described = self.causes.described
        if described is not None:
            lines.append(f"  described: {described.evidence}")
            lines += [f"    {line}" for line in described.table]
            lines.append(f"  next: {described.remedy}")
        elif self.verdict is Verdict.DIFFERS and not self.named and self.tried:
            count = len(set(self.tried))
            lines.append(f"  none of {count} known causes reproduces it; `tried` has their ids")
        if self.causes.wanted:
            lines.append(f"  next: {self.causes.wanted}")
        return lines + ([f"  {self.note}"] if self.note else [])

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return shortened(str(self))

    def card(self) -> Card:
        """Return what a notebook shows: where the output differs, and the full answer."""
        pictures = [e.picture for e in self.elements.values() if e.picture is not None]
        return Card(self.verdict, self.sentence, (*pictures, Code("\n".join(self.lines()))))

    def require(self) -> JudgedKernel:
        """Return itself, or raise an AssertionError with the full answer."""
        if self.verdict is not Verdict.AGREES:
            raise AssertionError(str(self))
        return self

    def document(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "component": self.component,
            "verdict": str(self.verdict),
            "ratio": self.ratio,
            "findings": {
                name: [str(finding) for finding in judged.findings[:_FINDINGS]]
                for name, judged in self.outputs.items()
            },
            "level": str(self.level),
            "causes": [
                {"fault": cause.fault, "title": cause.title, "evidence": cause.evidence}
                for cause in self.named
            ],
            "described": None
            if self.causes.described is None
            else {
                "sentence": self.causes.described.sentence,
                "evidence": self.causes.described.evidence,
                "remedy": self.causes.described.remedy,
                "changes": list(self.causes.described.table),
                "statement": statement_of(self.causes.described),
            },
            "wanted": self.causes.wanted,
            "tried": list(dict.fromkeys(self.tried)),
        }

    def _of_output(self, name: str, judged: OutputResult) -> list[str]:
        told = []
        elements = self.elements.get(name)
        if elements is not None:
            told.append(
                f"  {name}: {elements.count:,} of {elements.total:,} elements are each beyond "
                f"their budget{', all of them ' if elements.region else ''}{elements.region}"
            )
            told += [f"    {line}" for line in elements.lines]
        if name in self.census:
            told.append(f"  {name}: {self.census[name]}")
        beyond = [finding for finding in judged.findings if finding.ratio > 1][:_FINDINGS]
        worst = [finding for finding in judged.findings[:1] if finding.measured]
        told += [f"  {name}: {finding}" for finding in beyond or worst]
        if beyond:
            told += [f"    budget: {line}" for line in judged.derivation]
        return told


def elements_of(candidate: Tensor, twin: Tensor, excess: Tensor) -> Elements:
    """Count elements beyond their budget; describe the first and the worst. `excess` in budgets."""
    beyond = (excess > 1).nonzero()
    if not len(beyond):
        at = _place(int(excess.argmax()), tuple(excess.shape))
        lines: tuple[str, ...] = (
            f"worst at {list(at)}: {_pair(candidate[at], twin[at], excess[at])}",
        )
        return Elements(0, excess.numel(), lines if float(excess[at]) else ())
    first = tuple(beyond[0].tolist())
    worst = _place(int(excess.argmax()), tuple(excess.shape))
    lines = tuple(
        f"{word} at {list(at)}: {_pair(candidate[at], twin[at], excess[at])}"
        for word, at in (("first", first), ("worst", worst))
    )
    return Elements(len(beyond), excess.numel(), lines, _region(beyond, excess), _picture(excess))


def _region(beyond: Tensor, excess: Tensor) -> str:
    """Name the rows and columns of a matrix that hold all wrong elements; empty where it is all."""
    if excess.ndim != 2:
        return ""
    words = []
    for axis, name in enumerate(("row", "column")):
        first, last = int(beyond[:, axis].min()), int(beyond[:, axis].max())
        if last - first + 1 < excess.shape[axis]:
            words.append(f"{name} {first}" if first == last else f"{name}s {first} to {last}")
    return f"in {', '.join(words)}" if words else ""


def _picture(excess: Tensor) -> HeatMap | None:
    """Return the worst difference of each part of a matrix, in budgets; parts within it are empty.

    Differences without a number, such as NaN, are shown as the largest one.
    """
    if excess.ndim < 2:
        return None
    rows = excess.reshape(-1, excess.shape[-1]).float()
    cell = tuple(-(-extent // _CELLS) for extent in rows.shape)
    worst = max_pool2d(rows[None], (cell[0], cell[1]), ceil_mode=True)[0]
    finite = worst[worst.isfinite()]
    top = max(2.0, float(finite.max())) if finite.numel() else 2.0
    shown = worst.nan_to_num(top, posinf=top)
    labels = [
        tuple(_span(first, size, extent) for first in range(0, extent, size))
        for size, extent in zip(cell, rows.shape, strict=True)
    ]
    values = tuple(tuple(each if each > 1 else None for each in row) for row in shown.tolist())
    return HeatMap(
        "The difference in budgets, by rows and columns of the output", "rows", "columns",
        labels[0], labels[1], values, HeatScale(1.0, top, "budgets"),
    )  # fmt: skip


def _span(first: int, size: int, extent: int) -> str:
    last = min(first + size, extent) - 1
    return str(first) if first == last else f"{first}-{last}"


def census_of(candidate: Tensor) -> str:
    """Describe values that are not finite, and the first place; empty where all are finite."""
    wrong = ~candidate.isfinite()
    if not candidate.dtype.is_floating_point or not bool(wrong.any()):
        return ""
    first = wrong.nonzero()[0].tolist()
    nan = int(candidate.isnan().sum())
    return (
        f"{nan:,} NaN and {int(wrong.sum()) - nan:,} infinities, "
        f"{share(int(wrong.sum()) / wrong.numel())} of it; the first at {first}"
    )


def _place(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(tensor) for tensor in torch.unravel_index(torch.tensor(flat), shape))


def _pair(found: Tensor, expected: Tensor, excess: Tensor) -> str:
    return f"{_one(found)}, expected {_one(expected)}: {budgets(float(excess))}"


def _one(value: Tensor) -> str:
    width = value.dtype.itemsize
    code = int(value.view(_CODES[width])) & ((1 << 8 * width) - 1)
    name = FORMAT_OF_DTYPE[value.dtype].name
    return f"{name} 0x{code:0{2 * width}x} ({float(value):.7g})"
