"""Ledger of known failures: each names an issue and an end date; expired or healed ones fail a run.

The ledger is a YAML list of entries with `component` (a name, or a pattern with `*`), `verdict`
(DIFFERS, UNSTABLE or UNDECIDED), `issue` (where it is followed), `until` (the last night on which
it is allowed), `why`, and optionally `fault` (the diagnosis that it must keep) and `subject`. A
failure is known only while it matches its whole entry: another cause at the same place is new.

Errors: an entry without issue, reason or end, an end more than MOST_DAYS ahead, a pattern that
covers everything, unknown keys, and two entries for one place.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from datetime import date, timedelta
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument, UnknownName, UnreadableFile
from degarble.harness.base.files import read_small_text
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MOST_DAYS = 90  # that an entry may look ahead: longer, and nobody looks at it again
_LARGEST = 4 << 20
_FAILING = (Verdict.DIFFERS, Verdict.UNSTABLE, Verdict.UNDECIDED)


@dataclass(frozen=True)
class Failure:
    """A failure of a run at one place."""

    component: str
    verdict: Verdict
    fault: str | None = None
    sentence: str = ""


@dataclass(frozen=True)
class LedgerEntry:
    """One known failure."""

    component: str
    verdict: Verdict
    issue: str
    until: date
    why: str
    fault: str | None = None
    subject: str = "*"

    def covers(self, failure: Failure, subject: str) -> bool:
        """Return whether the entry matches a failure."""
        return (
            fnmatchcase(failure.component, self.component)
            and fnmatchcase(subject, self.subject)
            and failure.verdict is self.verdict
            and (self.fault is None or failure.fault == self.fault)
        )


@dataclass(frozen=True)
class LedgerResult:
    """The result of comparing a run with the ledger: new and known failures, entries to remove."""

    new: tuple[Failure, ...] = ()
    known: tuple[tuple[Failure, LedgerEntry], ...] = ()
    expired: tuple[LedgerEntry, ...] = ()
    healed: tuple[LedgerEntry, ...] = ()
    asleep: tuple[LedgerEntry, ...] = field(default=())  # of other subjects

    @property
    def red(self) -> bool:
        """Whether the run must fail."""
        return bool(self.new or self.expired or self.healed)

    def lines(self) -> list[str]:
        """Return a line for each failure and entry; those that fail the run come first."""
        lines = [f"new: {each.component} {each.verdict}: {each.sentence}" for each in self.new]
        lines += [
            f"expired on {each.until}: {each.component} {each.verdict}, {each.issue}: mend it, "
            "or give the entry a new end with a reason"
            for each in self.expired
        ]
        lines += [
            f"healed: {each.component} is no longer {each.verdict}, {each.issue}: remove the entry"
            for each in self.healed
        ]
        lines += [
            f"known until {entry.until}: {each.component} {each.verdict}, {entry.issue}"
            for each, entry in self.known
        ]
        return lines


@dataclass(frozen=True)
class Ledger:
    """All entries of a ledger file."""

    entries: tuple[LedgerEntry, ...] = ()

    def settle(
        self, failures: Sequence[Failure], subject: str, today: date, judged: Sequence[str]
    ) -> LedgerResult:
        """Compare a run with the ledger.

        `judged` are the components that the run checked: entries of others are not healed.
        """
        new, known, met = [], [], set()
        for failure in failures:
            entry = next((e for e in self.entries if e.covers(failure, subject)), None)
            if entry is None:
                new.append(failure)
                continue
            met.add(entry)
            known.append((failure, entry))
        ours = [
            ledger_entry
            for ledger_entry in self.entries
            if fnmatchcase(subject, ledger_entry.subject)
        ]
        healed = [
            ledger_entry
            for ledger_entry in ours
            if ledger_entry not in met
            and any(fnmatchcase(name, ledger_entry.component) for name in judged)
        ]
        return LedgerResult(
            new=tuple(new),
            known=tuple(known),
            expired=tuple(ledger_entry for ledger_entry in ours if ledger_entry.until < today),
            healed=tuple(healed),
            asleep=tuple(ledger_entry for ledger_entry in self.entries if ledger_entry not in ours),
        )


def read_ledger(path: Path, today: date) -> Ledger:
    """Read a ledger file; a missing one raises, an empty one is an empty ledger."""
    import yaml  # noqa: PLC0415  only where there is a ledger

    try:
        found = yaml.safe_load(read_small_text(path, _LARGEST))
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        line = " ".join(str(error).split())
        raise UnreadableFile(
            f"ledger {path.name}", line, "a YAML list of known failures", "Mend the file."
        ) from error
    if found is None:
        return Ledger()
    if not isinstance(found, list):
        raise UnreadableFile(
            f"ledger {path.name}", type(found).__name__, "a list of known failures",
            "Begin each entry with '- component:'.",
        )  # fmt: skip
    entries = tuple(_read_entry(each, f"{path.name}[{n}]", today) for n, each in enumerate(found))
    seen: dict[tuple[str, str, Verdict, str | None], int] = {}
    for number, entry in enumerate(entries):
        key = (entry.component, entry.subject, entry.verdict, entry.fault)
        if key in seen:
            raise InvalidArgument(
                f"{path.name}[{number}]", entry.component,
                f"one entry a place; entry {seen[key]} says the same", "Remove one of the two.",
            )  # fmt: skip
        seen[key] = number
    return Ledger(entries)


_NEEDED = ("component", "verdict", "issue", "until", "why")


def _read_entry(given: Any, name: str, today: date) -> LedgerEntry:
    if not isinstance(given, dict):
        raise UnreadableFile(name, type(given).__name__, "keys and values", "See docs/nights.md.")
    known = [each.name for each in fields(LedgerEntry)]
    for key in given:
        if key not in known:
            raise UnknownName.among(f"key of {name}", str(key), known)
    for key in _NEEDED:
        if not str(given.get(key) or "").strip():
            raise InvalidArgument(
                f"{key} of {name}", given.get(key), "something that a reader can follow",
                "An entry names its component, verdict, issue, end and reason.",
            )  # fmt: skip
    component, until = str(given["component"]), given["until"]
    if not component.strip("*.?"):
        raise InvalidArgument(
            f"component of {name}", component, "a component, or a pattern of some",
            "A ledger that covers everything hides everything.",
        )  # fmt: skip
    if type(until) is not date or until > today + timedelta(days=MOST_DAYS):
        raise InvalidArgument(
            f"until of {name}", until, f"a date at most {MOST_DAYS} days ahead",
            "Write it as 2026-11-22; renew it when the issue was looked at.",
        )  # fmt: skip
    if given["verdict"] not in _FAILING:
        raise UnknownName.among(f"verdict of {name}", str(given["verdict"]), map(str, _FAILING))
    fault = given.get("fault")
    return LedgerEntry(
        component=component,
        verdict=Verdict(given["verdict"]),
        issue=str(given["issue"]),
        until=until,
        why=str(given["why"]),
        fault=None if fault is None else str(fault),
        subject=str(given.get("subject", "*")),
    )
