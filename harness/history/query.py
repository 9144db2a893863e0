"""Answer `degarble history`: lines for a terminal and a document for a machine.

A question selects histories by subject, machine, measure, and places by name or pattern. A subject,
machine or place that the store does not have raises an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import UnknownName
from degarble.harness.history.changes import counted, place_differences
from degarble.harness.history.panel import History, history_of, sentence_of
from degarble.harness.history.records import measure_named
from degarble.harness.report.number_text import number, visible
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from degarble.harness.history.changes import ExplainedChange
    from degarble.harness.history.records import StoredRun
    from degarble.harness.history.store import HistoryStore, Nights, Stream

_KEY = 40  # characters of a row's key that are shown
_FEW = 5  # skipped rows that are named one by one
_APART = 20  # places that a comparison prints


@dataclass(frozen=True)
class HistoryQuery:
    """A selection of histories; `place` may be a pattern with `*`."""

    place: str | None = None
    subject: str | None = None
    machine: str | None = None
    measure: str | None = None


def histories(store: HistoryStore, question: HistoryQuery) -> list[History]:
    """Read the histories that a question selects."""
    if question.measure is not None:
        measure_named(question.measure)
    measures = (question.measure,) if question.measure else ()
    found = [history_of(store, stream, measures) for stream in _streams(store, question)]
    if question.place is None:
        return found
    kept = [_narrowed(history, question.place) for history in found]
    if not any(history.measured for history in kept):
        known = sorted(
            {place for history in found for _, n in history.measured for place in n.places}
        )
        raise UnknownName.among("COMPONENT", question.place, known)
    return [history for history in kept if history.measured]


def _streams(store: HistoryStore, question: HistoryQuery) -> list[Stream]:
    streams = store.streams()
    for name, wanted in (("subject", question.subject), ("machine", question.machine)):
        known = {getattr(stream, name) for stream in streams}
        if wanted is not None and wanted not in known:
            raise UnknownName.among(f"--{name}", wanted, sorted(known))
    return [
        stream
        for stream in streams
        if question.subject in (None, stream.subject) and question.machine in (None, stream.machine)
    ]


def _narrowed(history: History, pattern: str) -> History:
    measured = tuple(
        (measure, kept)
        for measure, nights in history.measured
        if (kept := _places(nights, pattern)).places
    )
    moves = tuple(move for move in history.moves if fnmatchcase(move.place, pattern))
    return replace(history, measured=measured, moves=moves)


def _places(nights: Nights, pattern: str) -> Nights:
    at = [n for n, place in enumerate(nights.places) if fnmatchcase(place, pattern)]
    places = tuple(nights.places[n] for n in at)
    return replace(nights, places=places, values=nights.values[:, at])


def changes_lines(found: Sequence[History]) -> list[str]:
    """Return a line for every change, the latest first."""
    lines = []
    for history in found:
        lines.append(sentence_of(history))
        lines += [f"  {move.measure}  {move.sentence}" for move in history.moves]
    return [visible(line) for line in lines]


def changes_document(found: Sequence[History]) -> dict[str, Any]:
    """Return the changes as JSON values."""
    return {
        "verdict": changes_verdict(found),
        "histories": [_named(history) for history in found],
        "changes": [
            {"subject": h.stream.subject, "machine": h.stream.machine, **_moved(move)}
            for h in found
            for move in h.moves
        ],
    }


def changes_verdict(found: Sequence[History]) -> Verdict:
    """Return DIFFERS where anything moved; `degarble history changes` exits with its status."""
    return Verdict.DIFFERS if any(history.moves for history in found) else Verdict.AGREES


def _named(history: History) -> dict[str, Any]:
    stream = history.stream
    return {
        "subject": stream.subject,
        "machine": stream.machine,
        "runs": len(history.runs),
        "first": stream.first,
        "last": stream.last,
        "measures": {measure.name: len(nights.places) for measure, nights in history.measured},
    }


def _moved(change: ExplainedChange) -> dict[str, Any]:
    return {
        "measure": change.measure,
        "place": change.place,
        "first": change.first,
        "last_before": change.last_before or None,
        "found": change.found,
        "before": change.before,
        "after": change.after,
        "noise": change.noise,
        "deviate": change.deviate,
        "worse": change.worse,
        "red": change.red,
        "commits": change.commits or None,
        "good": change.good or None,
        "bad": change.bad or None,
        "differs": [list(fact) for fact in change.differs],
    }


def trends_document(found: Sequence[History]) -> dict[str, Any]:
    """Return every number of every night as JSON values; null where a place has none."""
    series = [
        {
            "subject": history.stream.subject,
            "machine": history.stream.machine,
            "measure": measure.name,
            "place": place,
            "nights": list(nights.nights),
            "values": [None if value != value else value for value in column],  # noqa: PLR0124
        }
        for history in found
        for measure, nights in history.measured
        for place, column in zip(nights.places, nights.values.T.tolist(), strict=True)
    ]
    return {"verdict": changes_verdict(found), "series": series}


def compared(store: HistoryStore, first: str, second: str) -> tuple[list[str], dict[str, Any]]:
    """Compare two runs: lines and document."""
    runs = [store.run(name) for name in (first, second)]
    differences = place_differences(*(store.numbers(run) for run in runs))
    names = [f"{run.id} ({run.night}, {run.verdict}, {run.commit[:12] or 'no commit'})"
             for run in runs]  # fmt: skip
    same = sum(each.move == 0 for each in differences)
    lines = [f"{names[0]} and {names[1]}: {same:,} of {counted(len(differences), 'number')} equal."]
    lines += [f"  {name}: {old} -> {new}" for name, old, new in _facts(*runs)]
    moved = [each for each in differences if each.move][:_APART]
    lines += [
        f"  {each.measure}  {each.place}: {_value(each.first)} -> {_value(each.second)}"
        for each in moved
    ]
    rest = len(differences) - same - len(moved)
    lines += [f"  {rest:,} more that moved less; --json has them"] if rest else []
    lines = [visible(line) for line in lines]
    document = {
        "verdict": Verdict.AGREES if same == len(differences) else Verdict.DIFFERS,
        "runs": [_run(run) for run in runs],
        "numbers": [
            {"measure": e.measure, "place": e.place, "first": e.first, "second": e.second}
            for e in differences
        ],
    }
    return lines, document


def _facts(first: StoredRun, second: StoredRun) -> list[tuple[str, str, str]]:
    names = sorted({*first.facts, *second.facts})
    pairs = ((n, first.facts.get(n, "none"), second.facts.get(n, "none")) for n in names)
    return [(n, mine, theirs) for n, mine, theirs in pairs if mine != theirs]


def _value(value: float | None) -> str:
    return "none" if value is None else number(value)


def _run(run: StoredRun) -> dict[str, Any]:
    return {
        "id": run.id,
        "subject": run.subject,
        "night": run.night,
        "machine": run.machine,
        "commit": run.commit,
        "verdict": run.verdict,
        "facts": run.facts,
    }


def runs_lines(runs: Sequence[StoredRun]) -> list[str]:
    """Return one line a run."""
    return [
        visible(
            f"{run.id}  {run.night}  {run.verdict!s:<9}  {run.commit[:12] or '-':<12}  "
            f"{run.subject} on {run.machine}"
        )
        for run in runs
    ]


def runs_document(runs: Sequence[StoredRun]) -> dict[str, Any]:
    """Return the runs as JSON values."""
    return {"verdict": Verdict.AGREES, "runs": [_run(run) for run in runs]}


def skipped_lines(store: HistoryStore) -> list[str]:
    """Return lines about skipped rows and how to remove them; none where there are none."""
    rows = store.skipped
    if not rows:
        return []
    count = counted(len(rows), "row")
    lines = [
        f"degarble: {count} of {store.name} cannot be read; the answer is about the others only"
    ]
    lines += [f"  {row.table}  {row.key[:_KEY]}: {row.reason}" for row in rows[:_FEW]]
    lines += [f"  {len(rows) - _FEW:,} more; --json has them"] if len(rows) > _FEW else []
    lines.append("  remedy  Restore the store, or delete these rows and add their runs again.")
    return [visible(line) for line in lines]
