"""A nightly run: an ordered list of steps over one checkpoint, with a journal and a ledger.

A step runs after those that it needs, and gets their results; an interrupted night continues from
its journal. A night is red if a step DIFFERS, is UNSTABLE, was REFUSED, or is UNDECIDED although it
was requested, and the ledger has no entry for it; a step that crashed or did not finish is
UNDECIDED. No entry excuses a failure of the step `ledger` itself. The steps are in table.py.

Before anything runs these are refused: xdist workers, an unreadable ledger, an address or file that
is no store (a server may be down until it is needed), a folder in which another night runs.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING

from degarble.harness.base.errors import DegarbleError, InvalidArgument
from degarble.harness.history.ledger import Failure, Ledger, read_ledger
from degarble.harness.history.store import HistoryStore, address_of
from degarble.harness.nightly.record import (
    CAPTURES,
    Asked,
    Journal,
    StepResult,
    digest_of,
    files_told,
    refused,
    to_plain,
)
from degarble.harness.report.files import usable_folder
from degarble.harness.report.page import kernel_versions, machine, provenance
from degarble.harness.report.verdict import SEVERITY, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    StepRun = Callable[[Asked, Mapping[str, StepResult]], StepResult]

LEDGER = "ledger"  # the step that no entry excuses


@dataclass(frozen=True)
class Step:
    """One step. `needs` are the steps whose results it gets; with `all_before` it gets all."""

    name: str
    run: StepRun
    needs: tuple[str, ...] = ()
    all_before: bool = False


class Night:
    """One night over one checkpoint."""

    def __init__(self, asked: Asked, steps: Sequence[Step]) -> None:
        self.ledger = _ledger_of(asked)
        usable_folder("--report-dir", asked.folder)
        _require_store(asked.store)
        self._steps = {step.name: step for step in steps}
        self._order = [step.name for step in steps]
        self.journal = Journal(asked.work)
        self.asked = replace(asked, started=self.journal.started)
        self._key = _key_of(asked)
        self.results: dict[str, StepResult] = {}
        self.continued: list[str] = []  # answered from the journal
        self.crashed: list[str] = []  # ended by an error that is none of ours

    def result(self, name: str) -> StepResult:
        """Run a step after those that it needs, or read its result from the journal."""
        if name in self.results:
            return self.results[name]
        step = self._steps[name]
        before = self._order[: self._order.index(name)] if step.all_before else step.needs
        given = {each: self.result(each) for each in before}
        told = {each: to_plain(result) for each, result in given.items()}
        key = digest_of(name, self._key, told)
        found = self.journal.read(name, key)
        if found is not None and found.verdict is not Verdict.REFUSED:
            self.continued.append(name)
        else:
            try:
                found = step.run(self.asked, given)
            except DegarbleError as error:
                found = refused(error)
            except Exception as error:
                self.crashed.append(name)  # and not in the journal: it is tried again
                self.results[name] = _crash(error)
                raise
            self.journal.write(name, key, found)
        self.results[name] = found
        return found

    def run(self) -> Verdict:
        """Run every step; return the night's results."""
        for name in self._order:
            self.result(name)
        return self.verdict

    @property
    def complete(self) -> bool:
        """Return whether every step has a result, and none crashed."""
        return not self.missing and not self.crashed

    @property
    def missing(self) -> list[str]:
        """Return the steps without a result: not reached, interrupted, or left out."""
        return [name for name in self._order if name not in self.results]

    def red(self, name: str) -> bool:
        """Return whether a step fails the night: it is red, and the ledger does not excuse it."""
        result = self.results[name]
        known = name not in (*self.crashed, LEDGER) and excused(
            self.asked, self.ledger, name, result
        )
        return result.red and not known

    @property
    def verdict(self) -> Verdict:
        """Return the worst of what is red; AGREES if a whole night is green."""
        found = [self.results[name].verdict for name in self.results if self.red(name)]
        found += [Verdict.UNDECIDED] * bool(self.missing)
        return max(found, key=SEVERITY.index, default=Verdict.AGREES)

    @property
    def sentence(self) -> str:
        """Return the result in one sentence."""
        red = [name for name in self._order if name in self.results and self.red(name)]
        unfinished = f" Not finished: {', '.join(self.missing)}." if self.missing else ""
        if red:
            first = self.results[red[0]].sentence.removesuffix(".")
            more = f" Red as well: {', '.join(red[1:])}." if red[1:] else ""
            return f"{red[0]}: {first}.{more}{unfinished}"
        ran = [name for name, each in self.results.items() if each.verdict is not Verdict.UNDECIDED]
        left = [name for name in self.results if name not in ran]
        known = [n for n in ran if self.results[n].red]
        told = f"{len(ran)} of {len(self._order)} steps ran, none of them red"
        told += f"; known by the ledger: {', '.join(known)}" if known else ""
        told += f"; not run: {', '.join(left)}" if left else ""
        return f"{told}.{unfinished}"

    def close(self) -> None:
        """End the night: a complete one is never continued, a green one keeps no captures."""
        if not self.complete:
            return
        self.journal.finish()
        if self.verdict is Verdict.AGREES:
            shutil.rmtree(self.asked.work / CAPTURES, ignore_errors=True)


def _crash(error: Exception) -> StepResult:
    said = " ".join(str(error).split())[:400]
    return StepResult(Verdict.UNDECIDED, f"The step crashed: {type(error).__name__}: {said}")


def failures_of_step(name: str, result: StepResult) -> tuple[Failure, ...]:
    """Return a red step's failures; a step that names no component is itself one."""
    if not result.red:
        return ()
    whole = Failure(f"night.{name}", result.verdict, None, result.sentence)
    return result.failures or (whole,)


def excused(asked: Asked, ledger: Ledger | None, name: str, result: StepResult) -> bool:
    """Return whether the ledger knows every failure of a step."""
    failures = failures_of_step(name, result)
    return ledger is not None and all(
        any(entry.covers(each, asked.name) for entry in ledger.entries) for each in failures
    )


def require_no_workers(environment: Mapping[str, str]) -> None:
    """Raise in an xdist worker: steps have an order."""
    worker = environment.get("PYTEST_XDIST_WORKER")
    if worker:
        raise InvalidArgument(
            "PYTEST_XDIST_WORKER", worker, "a night whose steps run in their order",
            "Start pytest without -n. Several ranks: torchrun, see docs/nights.md.",
        )  # fmt: skip


def today() -> str:
    """Return the night's date, UTC."""
    return str(datetime.now(UTC).date())


def _ledger_of(asked: Asked) -> Ledger | None:
    if asked.ledger is None:
        return None
    return read_ledger(asked.ledger, date.fromisoformat(asked.night))


def _require_store(url: str | None) -> None:
    if url is None:
        return
    engine = address_of(url, create=True).engine
    engine.dispose()
    if engine.dialect.name == "sqlite":
        with HistoryStore(url, create=True):
            pass


def _key_of(asked: Asked) -> str:
    """Return a digest of what every step depends on."""
    places = (asked.checkpoint, asked.reference, asked.prompts, asked.captures, asked.ledger)
    told = (asked.night, asked.backend, asked.gpu, asked.repeats, asked.museum, asked.store)
    ranks = asked.ranks
    versions = (provenance("").versions, kernel_versions())
    where = (machine(), versions, asked.commit, asked.name)
    return digest_of(told, ranks, where, [(str(each), files_told(each)) for each in places])
