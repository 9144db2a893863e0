"""The last steps of a nightly run: the museum's score, the history, the ledger of known failures.

A short night plants a subset of faults. Of changes in the history only one turns a night red: a
speed that fell by more than its measure allows. Others are listed, because budgets decide whether a
change is a fault.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING

from degarble.harness.history.ledger import Failure, read_ledger
from degarble.harness.history.panel import History, history_of
from degarble.harness.history.panel import sentence_of as history_sentence
from degarble.harness.history.query import skipped_lines
from degarble.harness.history.records import MUSEUM, HistoryRun
from degarble.harness.history.store import HistoryStore
from degarble.harness.inference.processes import workers_for
from degarble.harness.museum import museum as museum_run
from degarble.harness.museum.museum import percent
from degarble.harness.nightly.night import LEDGER, excused, failures_of_step
from degarble.harness.nightly.record import Asked, StepResult
from degarble.harness.report.files import usable_folder
from degarble.harness.report.verdict import SEVERITY, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from degarble.harness.museum.scores import MuseumScore

    Results = Mapping[str, StepResult]

# One of each kind: scales, codes, layouts, experts, router, rotation, a race.
PLANTED = (
    "M01.inverse", "M03.experts_first", "M10.nibble_order", "M11.swizzle_skipped",
    "M12.previous_expert", "M26.weights", "M28.pairing",
)  # fmt: skip
SOME = museum_run.MuseumExtent(plants=1, healthy=4)
_EXTENTS = {"some": SOME, "published": museum_run.PUBLISHED, "whole": museum_run.WHOLE}


def museum(asked: Asked, _: Results) -> StepResult:
    """Plant faults in the embedded models: with a blind engine every other step is void."""
    faults = PLANTED if asked.museum == "some" else museum_run.chosen(())
    models = _models(asked)
    extent = _EXTENTS[asked.museum]
    workers = workers_for(museum_run.WORKER_BYTES)
    found = museum_run.run_museum(faults, extent, workers, root=models)
    scores = [each for each in found.scores if each.total]
    rows = tuple((each.claim.strip(), str(each.share), percent(each)) for each in scores)
    wrong = [*found.missed, *(each.case for each in found.alarms)]
    looked = [each.fault for each in found.outcomes]
    looked += [each.fault for each in found.repeats if each.fault]
    looked += [each.case for each in found.healthy]
    judged = tuple(f"museum.{each}" for each in dict.fromkeys(looked))
    values = {MUSEUM.name: {held(each): well(each) for each in scores if each.wanted is not None}}
    counts = f"{len(faults)} faults planted {len(found.outcomes)} times, {len(found.healthy)} "
    counts += "healthy runs"
    if not wrong and found.verdict is Verdict.AGREES:
        return StepResult(
            Verdict.AGREES, f"{counts}: all that was said is true.",
            values=values, judged=judged, rows=rows,
        )  # fmt: skip
    failures = tuple(
        Failure(f"museum.{each}", Verdict.DIFFERS, None, "missed, or a false alarm")
        for each in wrong
    )
    sentence = f"{counts}: the engine missed or mistook {', '.join(wrong) or 'a repeated run'}."
    return StepResult(Verdict.DIFFERS, sentence, values=values, failures=failures, judged=judged,
                      rows=rows)  # fmt: skip


def _models(asked: Asked) -> Path:
    """Return the folder of tonight's models, shared by all checkpoints; remove older ones."""
    for old in (asked.folder / "work").glob("museum-*"):
        with suppress(ValueError):  # of another making
            apart = date.fromisoformat(asked.night) - date.fromisoformat(old.name[len("museum-") :])
            if apart.days > 1:  # a night that began yesterday may still run
                shutil.rmtree(old, ignore_errors=True)
    return usable_folder("museum", asked.folder / "work" / f"museum-{asked.night}")


def held(score: MuseumScore) -> str:
    """Phrase a claim so that a larger share is better."""
    return score.claim if score.at_least else f"no {score.claim}"


def well(score: MuseumScore) -> float:
    """Return the share of cases in which the claim so phrased held."""
    return score.share if score.at_least else 1.0 - score.share


def history(asked: Asked, results: Results) -> StepResult:
    """Add the night to the store, and report what changed."""
    if asked.store is None:
        return StepResult(Verdict.UNDECIDED, "No --store was given.", asked=False)
    run = run_of(asked, results)
    if run is None:
        return StepResult(Verdict.UNDECIDED, "Nothing was measured, so nothing is kept.")
    with HistoryStore(asked.store, create=True) as store:
        with store.trying(run):
            told = _moved(history_in(store, run))
        told = replace(told, lines=(*told.lines, *skipped_lines(store)))
        # The store keeps the verdict of the whole night, with these reds and the ledger's.
        whole = {**results, "history": told}
        closed = run_of(asked, {**whole, "ledger": ledger(asked, whole)})
        assert closed is not None, "it measured what `run` did"
        store.add(closed)
    return replace(told, facts={"run": closed.id})


def _moved(found: History) -> StepResult:
    """Return red while a red change of a series stands; others are reported once."""
    red = found.lost
    series = {(each.measure, each.place) for each in red}
    failures = tuple(
        Failure(f"{each.measure}.{each.place}", Verdict.DIFFERS, None, each.sentence)
        for each in red
    )
    return StepResult(
        Verdict.DIFFERS if red else Verdict.AGREES,
        f"{red[0].sentence}." if red else history_sentence(found),
        failures=failures,
        judged=tuple(
            f"{each.measure}.{each.place}"
            for each in found.latest
            if (each.measure, each.place) not in series
        ),
        lines=tuple(f"{each.measure}: {each.sentence}" for each in found.fresh),
    )


def history_in(store: HistoryStore, run: HistoryRun) -> History:
    """Return the history that a run belongs to."""
    stream = next(
        each for each in store.streams()
        if (each.subject, each.machine) == (run.subject, run.machine)
    )  # fmt: skip
    return history_of(store, stream)


def run_of(asked: Asked, results: Results) -> HistoryRun | None:
    """Return the night as one run; None if no step measured anything."""
    values: dict[str, dict[str, float]] = {}
    facts: dict[str, str] = {}
    for result in results.values():
        facts |= {str(name): str(value)[:500] for name, value in result.facts.items() if value}
        for measure, places in result.values.items():
            values.setdefault(measure, {}).update(places)
    if not any(values.values()):
        return None
    known = None
    if asked.ledger is not None:
        known = read_ledger(asked.ledger, date.fromisoformat(asked.night))
    red = [
        each.verdict
        for name, each in results.items()
        if each.red and (name == LEDGER or not excused(asked, known, name, each))
    ]
    # A night on the CPU of a machine with a GPU is no night of that GPU.
    gpu = facts.get("GPU 0 name") if asked.gpu else None
    return HistoryRun(
        subject=asked.name,
        night=asked.night,
        machine=gpu or facts.get("machine", "unknown"),
        verdict=max(red, key=SEVERITY.index, default=Verdict.AGREES),
        values=values,
        commit=asked.commit[:64],
        started=asked.started,
        facts=facts,
    )


def ledger(asked: Asked, results: Results) -> StepResult:
    """Compare the night with the ledger: new, expired and healed entries turn it red."""
    if asked.ledger is None:
        return StepResult(Verdict.UNDECIDED, "No --ledger was given.", asked=False)
    today = date.fromisoformat(asked.night)
    known = read_ledger(asked.ledger, today)
    failures = [f for name, each in results.items() for f in failures_of_step(name, each)]
    judged = [name for each in results.values() for name in each.judged]
    ran = {name for name, each in results.items() if each.verdict not in _UNRUN}
    judged += [f"night.{name}" for name in ran]
    # An audit looks at all tensors: whatever an entry names there was looked at.
    if "audit" in ran:
        judged += [e.component for e in known.entries if e.component.startswith("audit.")]
    settled = known.settle(failures, asked.name, today, judged)
    lines = tuple(settled.lines())
    if not settled.red:
        count = len(settled.known)
        sentence = f"All that failed is known: {count}." if count else "Nothing failed."
        return StepResult(Verdict.AGREES, sentence, lines=lines)
    wrong = [*settled.expired, *settled.healed]
    told = tuple(
        Failure(f"ledger.{each.component}", Verdict.DIFFERS, None, each.issue) for each in wrong
    )
    sentence = (
        f"{len(settled.new)} new, {len(settled.expired)} expired, {len(settled.healed)} healed."
    )
    return StepResult(Verdict.DIFFERS, sentence, failures=told, lines=lines)


_UNRUN = (Verdict.UNDECIDED, Verdict.REFUSED)
