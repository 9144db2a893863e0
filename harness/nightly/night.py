"""A nightly run: its options, an ordered list of steps over one checkpoint, a journal, a ledger."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, date, datetime
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import DegarbleError, InvalidArgument, Undecided, UnwritablePath
from degarble.harness.history.ledger import Failure, Ledger, read_ledger
from degarble.harness.history.store import HistoryStore, address_of
from degarble.harness.nightly.costs import NightBudget, NightCosts, StepCost
from degarble.harness.report.files import usable_folder, write_text
from degarble.harness.report.page import kernel_versions, machine, provenance
from degarble.harness.report.progress import duration
from degarble.harness.report.verdict import SEVERITY, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path


# --------------------------------------------------------------------------------------------------
# The options of a nightly run, the result of a step, and the journal for continuing.
#
# The journal has one JSON file a step, written atomically, with a digest of all that the step
# depends on. An interrupted night is continued from it; results for another checkpoint, commit or
# machine are computed again. A finished night is marked as such, and the next one begins anew. A
# folder in which another process runs a night is refused. An unreadable step file counts as a step
# that did not finish.

JOURNAL_SCHEMA = 1
CAPTURES = "captures"  # folder of the captures that a night makes
REPEATS = 4
MUSEUMS = ("some", "published", "whole")


def _unheard(_line: str) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class NightConfig:
    """The options of a night."""

    checkpoint: Path
    reference: Path
    folder: Path  # of pages, documents and the journal
    night: str  # its date, UTC
    captures: Path | None = None
    prompts: Path | None = None
    backend: str = "torch"
    gpu: bool = False  # requested by a device marker, so a GPU is present
    repeats: int = REPEATS
    ranks: int = 1  # that make captures together
    museum: str = MUSEUMS[0]
    store: str | None = None
    ledger: Path | None = None
    commit: str = ""
    subject: str = ""
    within: float | None = None  # seconds that it may take
    screen: bool = False  # this step has to look at samples first
    started: str = ""  # when, ISO 8601, UTC; of a night that continues, its first beginning
    say: Callable[[str], None] = _unheard  # a line of progress while a step runs

    @property
    def name(self) -> str:
        """Return the checkpoint's name in the history."""
        return self.subject or self.checkpoint.resolve().name

    @property
    def work(self) -> Path:
        """Return the folder of the journal and of the steps' intermediate files."""
        kept = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in self.name)
        return self.folder / "work" / (kept.strip(".") or "checkpoint")


@dataclass(frozen=True)
class StepResult:
    """The result of a step. `asked`: the user requested an answer, so UNDECIDED is red."""

    verdict: Verdict
    sentence: str
    asked: bool = True
    values: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    judged: tuple[str, ...] = ()  # components that were looked at, for the ledger
    facts: Mapping[str, str] = field(default_factory=dict)
    lines: tuple[str, ...] = ()  # what else a person must read
    rows: tuple[tuple[str, str, str], ...] = ()  # name, verdict, what was measured

    @property
    def red(self) -> bool:
        """Return whether the step fails, unless the ledger excuses it."""
        if self.verdict is Verdict.UNDECIDED:
            return self.asked
        return self.verdict is not Verdict.AGREES


def to_plain(result: StepResult) -> dict[str, Any]:
    """Return a result as JSON data."""
    return asdict(result)


def from_plain(raw: Mapping[str, Any]) -> StepResult:
    """Read what `to_plain` returned."""
    failures = tuple(
        Failure(each["component"], Verdict(each["verdict"]), each["fault"], each["sentence"])
        for each in raw["failures"]
    )
    rows = tuple((str(a), str(b), str(c)) for a, b, c in raw["rows"])
    return StepResult(
        verdict=Verdict(raw["verdict"]),
        sentence=str(raw["sentence"]),
        asked=bool(raw["asked"]),
        values={name: dict(each) for name, each in raw["values"].items()},
        failures=failures,
        judged=tuple(raw["judged"]),
        facts=dict(raw["facts"]),
        lines=tuple(raw["lines"]),
        rows=rows,
    )


class NightJournal:
    """The finished steps of a night, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = usable_folder("night folder", folder)
        _claim(folder)
        self._finished, self._begun = folder / "finished", folder / "begun"
        if self._finished.exists():
            for path in self._folder.glob("*.json"):
                path.unlink()
            # Killed in between, the next one begins anew, with a time of its own.
            self._begun.unlink(missing_ok=True)
            self._finished.unlink()
        self.continues = self._begun.exists()
        if not self.continues:
            write_text(self._begun, datetime.now(UTC).isoformat(timespec="seconds"))
        self.started = self._begun.read_text(encoding="utf-8")

    def read(self, step: str, key: str) -> StepResult | None:
        """Return the result of a finished step, if its dependencies are unchanged."""
        try:
            raw = json.loads(self._path(step).read_text(encoding="utf-8"))
            if raw["schema"] != JOURNAL_SCHEMA or raw["key"] != key:
                return None
            return from_plain(raw["result"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, step: str, key: str, result: StepResult) -> None:
        """Store a finished step."""
        document = {
            "schema": JOURNAL_SCHEMA,
            "step": step,
            "key": key,
            "result": to_plain(result),
        }
        write_text(self._path(step), json.dumps(document, ensure_ascii=True, indent=1) + "\n")

    def finish(self) -> None:
        """Mark the night as finished, so that the next one begins anew."""
        write_text(self._finished, "")

    def _path(self, step: str) -> Path:
        return self._folder / f"{step}.json"


def _claim(folder: Path) -> None:
    """Lock a folder against other processes until this one ends.

    Trap: closing any descriptor of the file releases the lock, so this one stays open.
    """
    descriptor = os.open(folder / "claimed", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EACCES, errno.EAGAIN):  # others: a file system without locks
            raise UnwritablePath(
                "--report-dir", str(folder), "a folder in which no other night runs",
                "Wait until it has ended, or give this one another folder.",
            ) from error  # fmt: skip


def digest_of(*parts: object) -> str:
    """Return one hash of all that something depends on."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def files_digest(path: Path | None) -> list[tuple[str, int, int]]:
    """Return name, size and time of every file, which stand for its content."""
    if path is None or not path.exists():
        return []
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    base = path.parent if path.is_file() else path
    return [
        (file.relative_to(base).as_posix(), (stat := file.stat()).st_size, stat.st_mtime_ns)
        for file in files
    ]


def refused(error: DegarbleError) -> StepResult:
    """Return the result of a step that could not be run as requested."""
    verdict = Verdict.UNDECIDED if isinstance(error, Undecided) else Verdict.REFUSED
    return StepResult(verdict, " ".join(str(error).split()))


# --------------------------------------------------------------------------------------------------
# A nightly run: an ordered list of steps over one checkpoint, with a journal and a ledger.
#
# A step runs after those that it needs, and gets their results; an interrupted night continues from
# its journal. A night is red if a step DIFFERS, is UNSTABLE, was REFUSED, or is UNDECIDED although
# it was requested, and the ledger has no entry for it; a step that crashed or did not finish is
# UNDECIDED. No entry excuses a failure of the step `ledger` itself. The steps are in table.py.
#
# Before anything runs these are refused: xdist workers, an unreadable ledger, an address or file
# that is no store (a server may be down until it is needed), a folder in which another night runs.

if TYPE_CHECKING:
    StepRun = Callable[[NightConfig, Mapping[str, StepResult]], StepResult]

LEDGER = "ledger"  # the step that no entry excuses


@dataclass(frozen=True)
class NightStep:
    """One step. `needs` are the steps whose results it gets; with `all_before` it gets all.

    `screens`: it can look at samples first, which takes less time. A step with `stop` runs in
    processes of its own, from when what it needs is done, at the same time as the steps listed
    before it; `stop` kills it.
    """

    name: str
    run: StepRun
    needs: tuple[str, ...] = ()
    all_before: bool = False
    screens: bool = False
    stop: Callable[[], None] | None = None


class Night:
    """One night over one checkpoint."""

    def __init__(self, config: NightConfig, steps: Sequence[NightStep]) -> None:
        self.ledger = _ledger_of(config)
        usable_folder("--report-dir", config.folder)
        _require_store(config.store)
        self._steps = {step.name: step for step in steps}
        self._order = [step.name for step in steps]
        self.journal = NightJournal(config.work)
        self.asked = replace(config, started=self.journal.started)
        self._key = _key_of(config)
        self.budget = NightBudget(costs_of(config), config.within)
        self.results: dict[str, StepResult] = {}
        self.continued: list[str] = []  # answered from the journal
        self.crashed: list[str] = []  # ended by an error that is none of ours
        self._beside: dict[str, Future[StepResult]] = {}  # that run beside other steps

    def result(self, name: str) -> StepResult:
        """Run a step after those that it needs, or read its result from the journal."""
        if name in self.results:
            return self.results[name]
        step = self._steps[name]
        given = {each: self.result(each) for each in self._needed(step)}
        self._end_beside(name)
        self._begin_beside(name)
        key = self._key_with(name, given)
        result = self._kept(name, key)
        if result is not None:
            self.continued.append(name)
        else:
            try:
                result = self._run(step, given)
            except DegarbleError as error:
                result = refused(error)
            except Exception as error:
                self.crashed.append(name)  # and not in the journal: it is tried again
                self.results[name] = _crash(error)
                raise
            self.journal.write(name, key, result)
        self.results[name] = result
        return result

    def _end_beside(self, name: str) -> None:
        """Wait for steps that began early and stand before this one, which runs without them."""
        for each in self._order[: self._order.index(name)]:
            if each in self._beside and each not in self.results:
                self.result(each)

    def _begin_beside(self, name: str) -> None:
        """Begin long steps, from this one on, where what they need is done."""
        for each in self._order[self._order.index(name) :]:
            step = self._steps[each]
            begun = each in self.results or each in self._beside
            if step.stop is None or begun or not set(step.needs) <= set(self.results):
                continue
            given = {need: self.results[need] for need in step.needs}
            if self._kept(each, self._key_with(each, given)) is None:
                self._beside[each] = Future()
                work = partial(_work, step, self.asked, given, self._beside[each])
                Thread(target=work, name=each, daemon=True).start()

    def _needed(self, step: NightStep) -> Sequence[str]:
        return self._order[: self._order.index(step.name)] if step.all_before else step.needs

    def _key_with(self, name: str, given: Mapping[str, StepResult]) -> str:
        fields = {each: to_plain(result) for each, result in given.items()}
        return digest_of(name, self._key, fields)

    def _kept(self, name: str, key: str) -> StepResult | None:
        """Return the result of a step that the journal has; what was refused is tried again."""
        result = self.journal.read(name, key)
        return None if result is None or result.verdict is Verdict.REFUSED else result

    def _remaining(self) -> list[NightStep]:
        """Return the steps that the journal has no result of."""
        kept: dict[str, StepResult] = {}
        for name in self._order:
            given = {each: kept[each] for each in self._needed(self._steps[name]) if each in kept}
            if len(given) == len(self._needed(self._steps[name])):
                result = self._kept(name, self._key_with(name, given))
                if result is not None:
                    kept[name] = result
        return [self._steps[name] for name in self._order if name not in kept]

    def _run(self, step: NightStep, given: Mapping[str, StepResult]) -> StepResult:
        """Run a step, screened where the limit asks for it, and keep what it cost."""
        later = [self._steps[name] for name in self._order[self._order.index(step.name) + 1 :]]
        screen = self.budget.must_screen(step, later)
        before, begun = _bytes_in(self.asked.folder), time.monotonic()
        if step.name in self._beside:
            result = self._beside[step.name].result()  # it costs what is left to wait for
        else:
            result = step.run(replace(self.asked, screen=screen), given)
        grown = max(0, _bytes_in(self.asked.folder) - before)
        cost = StepCost(time.monotonic() - begun, grown, self.asked.night)
        # A check that judged nothing says nothing about how long one takes.
        if not step.screens or result.verdict not in (Verdict.REFUSED, Verdict.UNDECIDED):
            self.budget.costs.add(step.name, cost, screened=screen)
        if screen:
            limit = duration(self.asked.within or 0)
            words = f"It looked at sampled rows first, to end within {limit}."
            result = replace(result, lines=(*result.lines, words))
        return result

    @property
    def plan(self) -> list[str]:
        """Return what the steps that are yet to run will cost, as text."""
        return list(self.budget.lines(self._remaining()))

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
        verdicts = [self.results[name].verdict for name in self.results if self.red(name)]
        verdicts += [Verdict.UNDECIDED] * bool(self.missing)
        return max(verdicts, key=SEVERITY.index, default=Verdict.AGREES)

    @property
    def sentence(self) -> str:
        """Return the result in one sentence."""
        red = [name for name in self._order if name in self.results and self.red(name)]
        unfinished = f" Not finished: {', '.join(self.missing)}." if self.missing else ""
        if red:
            first = self.results[red[0]].sentence.removesuffix(".")
            more = f" Red as well: {', '.join(red[1:])}." if red[1:] else ""
            return f"{red[0]}: {first}.{more}{unfinished}"
        ran = [
            name for name, result in self.results.items() if result.verdict is not Verdict.UNDECIDED
        ]
        left = [name for name in self.results if name not in ran]
        known = [n for n in ran if self.results[n].red]
        text = f"{len(ran)} of {len(self._order)} steps ran, none of them red"
        text += f"; known by the ledger: {', '.join(known)}" if known else ""
        text += f"; not run: {', '.join(left)}" if left else ""
        return f"{text}.{unfinished}"

    def stop(self) -> None:
        """End what began early and is not done: the night was interrupted. Keep what is done."""
        for name, result in self._beside.items():
            stop = self._steps[name].stop
            if name in self.results or stop is None:
                continue
            if result.done():
                with suppress(Exception):  # noted as at its turn
                    self.result(name)
            else:
                stop()

    def close(self) -> None:
        """End the night: a complete one is never continued, a green one keeps no captures."""
        self.stop()
        if not self.complete:
            return
        self.journal.finish()
        if self.verdict is Verdict.AGREES:
            shutil.rmtree(self.asked.work / CAPTURES, ignore_errors=True)


def _work(
    step: NightStep,
    config: NightConfig,
    given: Mapping[str, StepResult],
    future: Future[StepResult],
) -> None:
    try:
        future.set_result(step.run(config, given))
    except BaseException as error:  # noqa: BLE001  raised where the step's turn comes
        future.set_exception(error)


def costs_of(config: NightConfig) -> NightCosts:
    """Read what steps cost in nights like this one."""
    files = (config.prompts, config.captures)
    told = (config.gpu, config.backend, config.repeats, config.museum, config.ranks)
    key = (machine(), *("" if file is None else file.name for file in files), *map(str, told))
    return NightCosts.read(config.work / "costs", key)


def _bytes_in(folder: Path) -> int:
    """Return how many bytes the files of a folder have."""
    return sum(nbytes for _, nbytes, _ in files_digest(folder))


def _crash(error: Exception) -> StepResult:
    said = " ".join(str(error).split())[:400]
    return StepResult(Verdict.UNDECIDED, f"The step crashed: {type(error).__name__}: {said}")


def failures_of_step(name: str, result: StepResult) -> tuple[Failure, ...]:
    """Return a red step's failures; a step that names no component is itself one."""
    if not result.red:
        return ()
    whole = Failure(f"night.{name}", result.verdict, None, result.sentence)
    return result.failures or (whole,)


def excused(config: NightConfig, ledger: Ledger | None, name: str, result: StepResult) -> bool:
    """Return whether the ledger knows every failure of a step."""
    failures = failures_of_step(name, result)
    return ledger is not None and all(
        any(entry.covers(failure, config.name) for entry in ledger.entries) for failure in failures
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


def _ledger_of(config: NightConfig) -> Ledger | None:
    if config.ledger is None:
        return None
    return read_ledger(config.ledger, date.fromisoformat(config.night))


def _require_store(url: str | None) -> None:
    if url is None:
        return
    engine = address_of(url, create=True).engine
    engine.dispose()
    if engine.dialect.name == "sqlite":
        with HistoryStore(url, create=True):
            pass


def _key_of(config: NightConfig) -> str:
    """Return a digest of what every step depends on."""
    places = (config.checkpoint, config.reference, config.prompts, config.captures, config.ledger)
    told = (config.night, config.backend, config.gpu, config.repeats, config.museum, config.store)
    ranks = config.ranks
    versions = (provenance("").versions, kernel_versions())
    where = (machine(), versions, config.commit, config.name)
    return digest_of(told, ranks, where, [(str(place), files_digest(place)) for place in places])
