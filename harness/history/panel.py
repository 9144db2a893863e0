"""Build the history panel of a checkpoint's page: what moved, and a trend for every series.

The panel has one sentence, the changes with their commits, the last green run and the difference to
it, trends, and a table of the latest runs. Places that moved come first and quiet ones are folded.
To keep a page small, nights are grouped into bands, only the MOST places that differ most are
drawn, and places that are always 0 are counted. A history without runs raises an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.history.changes import (
    LEARNING,
    LONGEST,
    TESTED,
    bands,
    counted,
    explained_changes,
    last_green,
)
from degarble.harness.history.records import BUDGETS, MEASURES
from degarble.harness.report.blocks import (
    Block,
    Code,
    Column,
    ColumnKind,
    Details,
    Fact,
    Facts,
    Sentence,
    Table,
    Tone,
    Trend,
    Trends,
)
from degarble.harness.report.number_text import number
from degarble.harness.report.page import Panel, PanelKind
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from degarble.harness.history.changes import ExplainedChange
    from degarble.harness.history.records import Measure, StoredRun
    from degarble.harness.history.store import HistoryStore, Nights, Stream

MOST_BANDS = 60
MOST = 120  # places that are drawn
MOST_RUNS = 14  # latest runs in the table
_FEW = 12  # changes, and places, that are listed before a fold


@dataclass(frozen=True)
class History:
    """All measures of one stream, with the changes."""

    stream: Stream
    runs: tuple[StoredRun, ...]
    measured: tuple[tuple[Measure, Nights], ...]
    moves: tuple[ExplainedChange, ...]

    @property
    def fresh(self) -> tuple[ExplainedChange, ...]:
        """The changes that the latest night revealed."""
        last = self.runs[-1].night
        return tuple(move for move in self.moves if move.found == last)

    @property
    def latest(self) -> tuple[ExplainedChange, ...]:
        """The latest change of every series that has moved."""
        return _first_of_each(self.moves)

    @property
    def lost(self) -> tuple[ExplainedChange, ...]:
        """The latest red change of every series, until the series was back for two nights.

        A further change does not end it: a series that lost a fifth, then a further hundredth,
        is not back.
        """
        red = (move for move in self.moves if move.red and self._stands(move))
        return _first_of_each(red)

    @property
    def failed(self) -> StoredRun | None:
        """The latest run, if it was judged and did not agree."""
        last = self.runs[-1]
        return last if last.verdict in (Verdict.DIFFERS, Verdict.UNSTABLE) else None

    @property
    def learning(self) -> str:
        """How many nights are known, while they are too few to find a change; empty after that."""
        nights = max((len(nights.nights) for _, nights in self.measured), default=0)
        if nights > LEARNING:
            return ""
        known = f"learning: {nights} of {LEARNING} nights ({TESTED} to compare with, and the last"
        return f"{known} {LONGEST - 1}), until then no change can be found"

    def _stands(self, move: ExplainedChange) -> bool:
        """Whether one of its last two nights is still worse than its measure allows.

        Series without a value within the longest window are retired.
        """
        measure, nights = next(each for each in self.measured if each[0].name == move.measure)
        values = nights.values[-LONGEST:, nights.places.index(move.place)]
        away = (values[np.isfinite(values)][-2:] - move.before) * measure.worse
        return bool((away > measure.red * abs(move.before)).any())


def _first_of_each(moves: Iterable[ExplainedChange]) -> tuple[ExplainedChange, ...]:
    """Return the first change of every series; the latest come first."""
    found: dict[tuple[str, str], ExplainedChange] = {}
    for move in moves:
        found.setdefault((move.measure, move.place), move)
    return tuple(found.values())


def history_of(store: HistoryStore, stream: Stream, measures: Sequence[str] = ()) -> History:
    """Read a stream and detect its changes."""
    runs = store.runs(stream)
    if not runs:
        raise InvalidArgument(
            "history", stream.subject, "one run at least", "Add a run to the store."
        )
    kept = [MEASURES[name] for name in measures or MEASURES]
    read = [(measure, store.nights(stream, measure.name)) for measure in kept]
    measured = tuple((measure, nights) for measure, nights in read if nights.places)
    moves = [move for measure, nights in measured for move in explained_changes(nights, measure)]
    moves.sort(key=lambda move: (move.first, abs(move.deviate)), reverse=True)
    return History(stream, runs, measured, tuple(moves))


def history_panel(history: History) -> Panel:
    """Return the panel of a history."""
    verdict = Verdict.DIFFERS if history.lost else Verdict.AGREES
    if history.failed is not None:
        verdict = Verdict(history.failed.verdict)
    green = last_green(history.runs, Verdict.AGREES)
    blocks: list[Block] = [_changes(history), _green(history)]
    for measure, nights in history.measured:
        blocks += _drawn(trends_of(measure, nights, history.moves, green))
    return Panel(PanelKind.HISTORY, sentence_of(history), verdict, (*blocks, _runs(history)))


def sentence_of(history: History) -> str:
    """Return a summary in one line: what failed, what moved, or that nothing did."""
    nights = len({run.night for run in history.runs})
    over = f"{counted(nights, 'night')} of {history.stream.subject} on {history.stream.machine}"
    failed = history.failed
    front = "" if failed is None else f"The latest run {failed.verdict}, on {failed.night}"
    front += f"{_furthest(history)}. " if front else ""
    fresh = history.fresh
    if history.lost and not fresh:
        lost = counted(len(history.lost), "series")
        return f"{front}{lost} not back, over {over}: {history.lost[0].sentence}."
    if fresh:
        moved = counted(len(fresh), "series")
        return f"{front}{moved} moved, over {over}. {fresh[0].sentence}."
    if history.learning and not history.moves:
        return f"{front}{history.learning.capitalize()}, over {over}."
    if failed is not None:
        before = f"; {counted(len(history.moves), 'earlier change')}" if history.moves else ""
        return f"{front}No series moved that night, over {over}{before}."
    if history.moves:  # what moved leads, however long ago
        newest = history.moves[0]
        known = "earlier change" if len(history.moves) == 1 else "earlier changes, the latest"
        counts = f"{len(history.moves):,} {known}"
        return (
            f"{counts}: {newest.place} on {newest.first}, {number(newest.before, 3)} to"
            f" {number(newest.after, 3)}. Nothing moved last night, over {over}."
        )
    return f"Nothing moved last night, over {over}."


def _furthest(history: History) -> str:
    """Return the place that is furthest beyond its budget, as the end of a sentence."""
    found = [
        (float(value), place)
        for measure, nights in history.measured
        for value, place in zip(nights.values[-1], nights.places, strict=True)
        if _beyond(measure, float(value))
    ]
    if not found:
        return ""
    value, place = max(found)
    return f": {place} at {number(value, 6)} of its budget"


def _drawn(trends: Trends) -> Iterator[Block]:
    """Yield what moved and the worst places; fold the others."""
    moved = sum(row.tone is not Tone.PLAIN for row in trends.rows)
    first, rest = trends.rows[: max(moved, _FEW)], trends.rows[max(moved, _FEW) :]
    yield replace(trends, rows=first)
    if rest:
        summary = f"{counted(len(rest), 'quiet place')} of the same measure"
        yield Details(summary, (replace(trends, rows=rest),))


def _changes(history: History) -> Block:
    if not history.moves:
        if history.learning:
            return Sentence(f"{history.learning.capitalize()}.", Tone.NOTE)
        return Sentence("No series has moved.", Tone.GOOD)
    columns = (
        Column("place", ColumnKind.CODE),
        Column("measure"),
        Column("night", ColumnKind.CODE),
        Column("before", ColumnKind.NUMBER, 3),
        Column("after", ColumnKind.NUMBER, 3),
        Column("in nights' noise", ColumnKind.NUMBER, 3),
        Column("commits", ColumnKind.CODE),
        Column("also changed"),
    )
    rows = [
        (
            move.place, move.measure, move.first, move.before, move.after, move.size,
            move.commits or None,
            "; ".join(f"{name} {old or 'none'} -> {new or 'none'}"
                      for name, old, new in move.differs) or None,
        )
        for move in history.moves
    ]  # fmt: skip
    first = Table("What moved, the latest first", columns, tuple(rows[:_FEW]))
    if len(rows) <= _FEW:
        return first
    rest = Table("Earlier changes", columns, tuple(rows[_FEW:]))
    return Details(
        f"What moved: {counted(len(rows), 'change')}", (first, rest), anchor="history-changes"
    )


def _green(history: History) -> Block:
    green = last_green(history.runs, Verdict.AGREES)
    last = history.runs[-1]
    if green is None:
        return Sentence("No run of this history was green.", Tone.BAD)
    rows = [
        Fact("last green run", f"{green.night}, {green.id}"),
        Fact("its commit", green.commit or "unknown", code=True),
    ]
    if green.id == last.id:
        return Facts((*rows, Fact("the latest run", "is the last green one")))
    names = sorted({*green.facts, *last.facts})
    apart = [(n, green.facts.get(n, "none"), last.facts.get(n, "none")) for n in names]
    rows += [Fact(f"{n} since", f"{old} -> {new}") for n, old, new in apart if old != new]
    compare = Code(
        f"degarble history compare {green.id} {last.id}",
        "Every number of the two, side by side",
    )
    return Details("Since the last green run", (Facts(tuple(rows)), compare), "history-green")


def trends_of(
    measure: Measure, nights: Nights, moves: Sequence[ExplainedChange], green: StoredRun | None
) -> Trends:
    """Return the trends of one measure; places that moved or are worst come first."""
    ours = [
        explained_change for explained_change in moves if explained_change.measure == measure.name
    ]
    starts: dict[str, list[str]] = {}
    for change in ours:
        starts.setdefault(change.place, []).append(change.first)
    newest = {explained_change.place: explained_change for explained_change in reversed(ours)}
    latest = _latest(nights)
    worst = np.where(np.isfinite(latest), latest * measure.worse, -np.inf)
    zero = {at for at in range(len(nights.places)) if not np.nan_to_num(nights.values[:, at]).any()}
    hidden = zero if len(nights.places) > _FEW else set()
    order = sorted(
        (at for at in range(len(nights.places)) if at not in hidden),
        key=lambda at: (
            not _beyond(measure, float(latest[at])),
            nights.places[at] not in starts,
            -float(worst[at]),
        ),
    )[:MOST]
    per = max(1, -(-len(nights.nights) // MOST_BANDS))
    at_green = next((n for n, runs in enumerate(nights.runs) if green in runs), None)
    night_at = {night: number for number, night in enumerate(nights.nights)}
    rows = []
    for at in order:
        place = nights.places[at]
        known = nights.values[at_green, at] if at_green is not None else float("nan")
        move = newest.get(place)
        rows.append(
            Trend(
                label=place,
                bands=tuple(bands(nights.values[:, at].tolist(), MOST_BANDS)),
                latest=_known(latest[at]),
                green=_known(known),
                moved_at=tuple(night_at[each] // per for each in starts.get(place, ())),
                tone=_tone(measure, float(latest[at]), move),
                note="; ".join(
                    [_BEYOND] * _beyond(measure, float(latest[at]))
                    + ([f"moved on {move.first}"] if move is not None else [])
                ),
            )
        )
    left_out = len(nights.places) - len(rows)
    same = f", {len(hidden):,} of which are always 0" if hidden else ""
    more = f"; {counted(left_out, 'quiet place')} not drawn{same}" if left_out else ""
    caption = f"{measure.meaning[:1].upper()}{measure.meaning[1:]}, night by night{more}"
    return Trends(caption, nights.nights[0], nights.nights[-1], measure.unit, tuple(rows))


_BEYOND = "beyond its budget"


def _beyond(measure: Measure, value: float) -> bool:
    """Return whether the latest value is beyond a budget."""
    return measure.name == BUDGETS.name and bool(value > 1)


def _tone(measure: Measure, value: float, move: ExplainedChange | None) -> Tone:
    if _beyond(measure, value) or (move is not None and move.red):
        return Tone.BAD
    return Tone.PLAIN if move is None else Tone.WARNING


def _latest(nights: Nights) -> NDArray[np.float64]:
    """Return the latest value of each place."""
    out = np.full(len(nights.places), np.nan)
    for row in nights.values:
        out = np.where(np.isfinite(row), row, out)
    return out


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _runs(history: History) -> Table:
    columns = (
        Column("run", ColumnKind.CODE),
        Column("night", ColumnKind.CODE),
        Column("verdict", ColumnKind.VERDICT),
        Column("commit", ColumnKind.CODE),
    )
    latest = history.runs[-MOST_RUNS:][::-1]
    rows = tuple((run.id, run.night, run.verdict, run.commit[:12] or None) for run in latest)
    return Table("The latest runs", columns, rows)
