"""The options of a nightly run, the result of a step, and the journal for continuing.

The journal has one JSON file a step, written atomically, with a digest of all that the step depends
on. An interrupted night is continued from it; results for another checkpoint, commit or machine are
computed again. A finished night is marked as such, and the next one begins anew. A folder in which
another process runs a night is refused. An unreadable step file counts as a step that did not
finish.
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
    started: str = ""  # when, ISO 8601, UTC; of a night that continues, its first beginning

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


def files_told(path: Path | None) -> list[tuple[str, int, int]]:
    """Return name, size and time of every file, which stand for its content."""
    if path is None or not path.exists():
        return []
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    base = path.parent if path.is_file() else path
    return [
        (each.relative_to(base).as_posix(), (stat := each.stat()).st_size, stat.st_mtime_ns)
        for each in files
    ]


def refused(error: DegarbleError) -> StepResult:
    """Return the result of a step that could not be run as requested."""
    verdict = Verdict.UNDECIDED if isinstance(error, Undecided) else Verdict.REFUSED
    return StepResult(verdict, " ".join(str(error).split()))
