"""What judging a component found, as plain numbers that another process or a file can hold.

A component is judged by its own inputs and weights alone, so it may be judged anywhere. What comes
back has no tensors. Those of a component that differs are read again where its discrepancy is
described.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from degarble.harness.base.sums import PairSums
from degarble.harness.engine.budget.budget import LevelFinding, OutputResult, ResultBasis
from degarble.harness.engine.localise.judged_run import JudgedComponent, OutputRow
from degarble.harness.engine.localise.replay import maker_of
from degarble.harness.engine.localise.screening import SampledRows  # noqa: TC001  read by from_plain
from degarble.harness.engine.localise.tensor_forms import NonFiniteOutput  # noqa: TC001  read by from_plain
from degarble.harness.report.replay_record import MeasuredOutput  # noqa: TC001  read by from_plain
from degarble.harness.report.verdict import Verdict  # noqa: TC001  read by from_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from degarble.harness.model.components import Component


@dataclass(frozen=True)
class JudgingTask:
    """Components that are judged together: a quantisation, and the linears that read it.

    `values` are the conventions by which their twin computes, where not those of the run.
    `briefly`: only until it is known whether they differ. `screened`: by sampled rows.
    """

    names: tuple[str, ...]
    values: tuple[tuple[str, Any], ...] = ()
    briefly: bool = False
    screened: bool = False

    @property
    def text(self) -> str:
        """Name the task in a message."""
        more = len(self.names) - 1
        return f"{self.names[0]} and {more} more" if more else self.names[0]


def tasks_of(
    found: Sequence[Component], values: Mapping[str, Any], *, briefly: bool = False
) -> list[JudgingTask]:
    """Divide components, given in the order of the run, into tasks."""
    stated = tuple(sorted(values.items()))
    if briefly:  # nothing is compared with the reference, so nothing is read from a quantisation
        return [JudgingTask((each.name,), stated, briefly=True) for each in found]
    known = {each.name for each in found}
    groups: dict[str, list[str]] = {}
    for each in found:
        maker = maker_of(each)
        groups.setdefault(maker if maker in known else each.name, []).append(each.name)
    return [JudgingTask(tuple(names), stated) for names in groups.values()]


@dataclass(frozen=True)
class JudgedNumbers:
    """The call of an output that is furthest off: what decides, and how its budget was derived."""

    verdict: Verdict
    worst: LevelFinding | None
    derivation: tuple[str, ...]

    @classmethod
    def of(cls, judged: OutputResult) -> JudgedNumbers:
        """Take over the numbers of a result."""
        worst = judged.worst
        if worst is not None:
            place = tuple(map(int, worst.place))
            worst = LevelFinding(worst.level, place, float(worst.measured), float(worst.allowed))
        return cls(judged.verdict, worst, judged.derivation)

    def result(self, output: str) -> OutputResult:
        """Return the result, without what it was computed from."""
        basis = ResultBasis(derivation=self.derivation)
        found = () if self.worst is None else (self.worst,)
        return OutputResult(output, self.verdict, found, reasons=lambda: basis)


@dataclass(frozen=True)
class RowNumbers:
    """An `OutputRow`, as numbers."""

    output: str
    verdict: Verdict
    judged: JudgedNumbers | None
    undecided: str
    budgetless: bool
    calls: int
    elements: int
    identical: int
    flips: int
    choices: int
    left_out: int
    judged_rows: int
    why_left_out: str
    cosines: dict[str, tuple[float, float, float, float]]  # rr, cc, rc, dd

    @classmethod
    def of(cls, row: OutputRow) -> RowNumbers:
        """Take over the numbers of a row."""
        judged = None if row.judged is None else JudgedNumbers.of(row.judged)
        sums = {name: (s.rr, s.cc, s.rc, s.dd) for name, s in row.cosines.items()}
        plain = {name: getattr(row, name) for name in _PLAIN}
        return cls(judged=judged, cosines=sums, **plain)

    def row(self, component: Component) -> OutputRow:
        """Return the row."""
        judged = None if self.judged is None else self.judged.result(self.output)
        sums = {name: PairSums(*four) for name, four in self.cosines.items()}
        plain = {name: getattr(self, name) for name in _PLAIN}
        return OutputRow(component, judged=judged, cosines=sums, **plain)


_PLAIN = tuple(each.name for each in fields(RowNumbers) if each.name not in ("judged", "cosines"))


@dataclass(frozen=True)
class ComponentAnswer:
    """What was found in one component."""

    name: str
    rows: tuple[RowNumbers, ...]
    differs: bool
    edges: int  # inputs that differ from what their producers imply
    non_finite: NonFiniteOutput | None
    looks: tuple[MeasuredOutput, ...] = ()  # its details, where a report is written
    sampled: SampledRows | None = None  # where not all of its rows were looked at

    def judged(self, component: Component) -> JudgedComponent:
        """Return the judged component, without the calls that differ."""
        rows = {each.output: each.row(component) for each in self.rows}
        return JudgedComponent(component, rows, non_finite=self.non_finite)


@dataclass(frozen=True)
class TaskAnswer:
    """What was found in the components of a task."""

    components: tuple[ComponentAnswer, ...]


class JudgedElsewhere(Protocol):
    """Where components are judged, other than by whoever asks; a context for as long as it is."""

    def __enter__(self) -> object: ...

    def __exit__(self, *_: object) -> None: ...

    def each(
        self, tasks: Sequence[JudgingTask], here: Callable[[JudgingTask], TaskAnswer], /
    ) -> Iterator[tuple[JudgingTask, TaskAnswer]]:
        """Yield each task with its answer, in any order; `here` judges it in this process."""
        ...
