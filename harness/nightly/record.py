"""What a night is asked, what a step of it says, and the journal that lets it continue.

Owns the records of a night, and the journal: one JSON file a step, written whole or not at all,
with the digest of all that the step depends on. A night that was interrupted is answered from it as
far as it went; what was asked of another checkpoint, commit or machine is run again. Once a night
is finished its journal says so, and the next one begins anew.
Refuses a folder in which another process has its night. A file that cannot be read as a step's is
no refusal, but a step that did not finish.
Kept honest by suites/nightly/test_record.py.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import DegarbleError, Undecided, UnwritablePath
from degarble.harness.history.ledger import Failure
from degarble.harness.report.files import usable_folder, write_text
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

JOURNAL_SCHEMA = 1
CAPTURES = "captures"  # folder of the captures that a night makes
REPEATS = 4
MUSEUMS = ("some", "published", "whole")


@dataclass(frozen=True)
class Asked:
    """What is to be judged in this night, and how far."""

    checkpoint: Path
    reference: Path
    folder: Path  # of pages, documents and the journal
    night: str  # its date, UTC
    captures: Path | None = None
    prompts: Path | None = None
    backend: str = "torch"
    gpu: bool = False  # asked by a marker of a device, so that one is here
    repeats: int = REPEATS
    ranks: int = 1  # that make captures together
    museum: str = MUSEUMS[0]
    store: str | None = None
    ledger: Path | None = None
    commit: str = ""
    subject: str = ""
    started: str = ""  # when, ISO 8601, UTC; of a night that continues, its first beginning

    @property
    def name(self) -> str:
        """What the history calls the checkpoint."""
        return self.subject or self.checkpoint.resolve().name

    @property
    def work(self) -> Path:
        """The folder of the journal and of what the steps leave for each other."""
        kept = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in self.name)
        return self.folder / "work" / (kept.strip(".") or "checkpoint")


@dataclass(frozen=True)
class StepResult:
    """What a step says. `asked`: UNDECIDED is red where the user wanted an answer."""

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
        """Whether the step fails, unless the ledger knows it."""
        if self.verdict is Verdict.UNDECIDED:
            return self.asked
        return self.verdict is not Verdict.AGREES


def to_plain(result: StepResult) -> dict[str, Any]:
    """Give a result as JSON has it."""
    return asdict(result)


def from_plain(raw: Mapping[str, Any]) -> StepResult:
    """Read what `to_plain` gave."""
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


class Journal:
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
        """Return what a finished step said, where it depends on the same."""
        try:
            raw = json.loads(self._path(step).read_text(encoding="utf-8"))
            if raw["schema"] != JOURNAL_SCHEMA or raw["key"] != key:
                return None
            return from_plain(raw["result"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, step: str, key: str, result: StepResult) -> None:
        """Keep a finished step."""
        document = {
            "schema": JOURNAL_SCHEMA,
            "step": step,
            "key": key,
            "result": to_plain(result),
        }
        write_text(self._path(step), json.dumps(document, ensure_ascii=True, indent=1) + "\n")

    def finish(self) -> None:
        """Say that the night is over: the next one is another."""
        write_text(self._finished, "")

    def _path(self, step: str) -> Path:
        return self._folder / f"{step}.json"


def _claim(folder: Path) -> None:
    """Keep other processes out of a folder until this one ends.

    Trap: to close any descriptor of the file would end it, so this one stays open.
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
    """One hash of all that something depends on."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def files_told(path: Path | None) -> list[tuple[str, int, int]]:
    """Name, size and time of every file: another content has another time."""
    if path is None or not path.exists():
        return []
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    base = path.parent if path.is_file() else path
    return [
        (each.relative_to(base).as_posix(), (stat := each.stat()).st_size, stat.st_mtime_ns)
        for each in files
    ]


def refused(error: DegarbleError) -> StepResult:
    """A step that could not be run as asked."""
    verdict = Verdict.UNDECIDED if isinstance(error, Undecided) else Verdict.REFUSED
    return StepResult(verdict, " ".join(str(error).split()))
