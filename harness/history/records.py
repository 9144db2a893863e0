"""Records of a history: runs and measures, checks read as runs, and rows of a store validated."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from degarble.harness.base.errors import InvalidArgument, UnknownName, UnreadableFile
from degarble.harness.base.files import read_small_text
from degarble.harness.history.ledger import Failure
from degarble.harness.report.verdict import SCHEMA, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray


# --------------------------------------------------------------------------------------------------
# Records of the history store: runs and measures.
#
# A HistoryRun is one measurement of one subject (a checkpoint, by the name that its owner gave it)
# on one machine on one night, with the facts that may have moved it. A Measure is a kind of number,
# with its least noise. Places without a value are left out: JSON has no NaN or infinity. A run
# without subject, night or values raises an error.

LONGEST_TEXT = 500  # characters of a fact, a place or a name
LONGEST_COMMIT = 64
LONGEST_START = 40


@dataclass(frozen=True)
class Measure:
    """A kind of number. `floor` is the least noise of a night; `worse` its bad direction."""

    name: str
    unit: str
    floor: float
    worse: int  # 1: more is worse, -1: less is worse
    meaning: str
    red: float = math.inf  # relative move in the bad direction that turns a night red


BUDGETS = Measure(
    "budgets", "of its budget", 0.01, 1, "difference from the twin in units of its budget"
)
DISTANCE = Measure(
    "distance", "1 - cosine", 1e-6, 1, "distance from the BF16 reference: 1 - cosine"
)
SPEED = Measure(
    "speed", "of the ceiling", 0.005, -1,
    "kernel rate over copy bandwidth or cuBLAS of the same run", red=0.10,
)  # fmt: skip
TEXT = Measure("text", "", 1e-4, 1, "statistics of what the model says")
MUSEUM = Measure("museum", "of the cases", 0.005, -1, "claims of the museum of faults that held")
RANDOM_FAULTS = Measure(
    "random faults",
    "of the faults",
    0.005,
    -1,
    "random faults that were placed and told truthfully",
)
MEASURES: Mapping[str, Measure] = {
    measure.name: measure for measure in (BUDGETS, DISTANCE, SPEED, TEXT, MUSEUM, RANDOM_FAULTS)
}


def measure_named(name: str) -> Measure:
    """Return a measure; raise for an unknown name."""
    if name not in MEASURES:
        raise UnknownName.among("measure", name, MEASURES)
    return MEASURES[name]


@dataclass(frozen=True)
class HistoryRun:
    """One measurement of one subject. `values` are measure, then place, then number."""

    subject: str
    night: str  # the date, UTC, on which the night began
    machine: str  # series of different machines are never joined
    verdict: Verdict
    values: Mapping[str, Mapping[str, float]]
    commit: str = ""
    started: str = ""  # ISO 8601, UTC
    facts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not is_date(self.night):
            raise InvalidArgument(
                "night", self.night, "a date such as 2026-11-22", "Give the night's first day."
            )
        named = {"subject": self.subject, "machine": self.machine}
        for name, text in named.items():
            if not is_name(text):
                raise InvalidArgument(
                    name,
                    text,
                    f"1 to {LONGEST_TEXT} printable characters",
                    "Name what was measured, and where.",
                )
        limits = {"commit": (self.commit, LONGEST_COMMIT), "started": (self.started, LONGEST_START)}
        for name, (text, most) in limits.items():
            if len(text) > most or not text.isprintable():
                raise InvalidArgument(
                    name, text, f"at most {most} printable characters", f"Shorten the {name}."
                )
        if not any(self.values.values()):
            raise InvalidArgument(
                "values of the run", 0, "one number at least", "Add a run that measured something."
            )
        for name, values in self.values.items():
            measure_named(name)
            _require_numbers(name, values)

    @cached_property
    def id(self) -> str:
        """Digest of the whole run: the same run has one id, wherever it is added."""
        fields = {
            "subject": self.subject,
            "night": self.night,
            "machine": self.machine,
            "verdict": str(self.verdict),
            "commit": self.commit,
            "started": self.started,
            "facts": dict(self.facts),
            "values": {name: dict(value) for name, value in self.values.items()},
        }
        text = json.dumps(fields, sort_keys=True, ensure_ascii=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _require_numbers(measure: str, values: Mapping[str, float]) -> None:
    for place, value in values.items():
        if not math.isfinite(value):
            raise InvalidArgument(
                f"{measure} at {place}", value, "a finite number",
                "Leave a place out where nothing was measured.",
            )  # fmt: skip
        if not is_name(place):
            raise InvalidArgument(
                f"place of {measure}",
                place,
                f"1 to {LONGEST_TEXT} printable characters",
                "Name the component.",
            )


def is_date(text: str) -> bool:
    """Return whether a text is a date in ISO 8601 form (YYYY-MM-DD)."""
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def is_name(text: str) -> bool:
    """Return whether a text is safe in tables and terminals: no controls, no half characters."""
    return bool(text.strip()) and len(text) <= LONGEST_TEXT and text.isprintable()


# --------------------------------------------------------------------------------------------------
# Validate the rows of a store, because other programs may write to the database.
#
# A row that cannot be read is skipped and listed with its reason; it never blocks the store.

# Little-endian on every machine.
DOUBLES = np.dtype("<f8")
_ID = re.compile(r"[0-9a-f]{16}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class BadRowError(ValueError):
    """A row that cannot be read; the text is the reason."""


@dataclass(frozen=True)
class Skipped:
    """A row that was left out of an answer."""

    table: str
    key: str
    reason: str


@dataclass(frozen=True)
class StoredRun:
    """A run as the store returns it, without its numbers."""

    id: str
    subject: str
    night: str
    started: str
    machine: str
    commit: str
    verdict: Verdict
    facts: dict[str, str]


def stored_run(row: Any) -> StoredRun:
    """Return the run of a row, or raise BadRowError."""
    if not isinstance(row.id, str) or not _ID.fullmatch(row.id):
        raise BadRowError("its id is not 16 hexadecimal digits")
    for name, value in (("subject", row.subject), ("machine", row.machine)):
        if not isinstance(value, str) or not is_name(value):
            raise BadRowError(f"its {name} is not 1 to {LONGEST_TEXT} printable characters")
    if not isinstance(row.night, str) or not is_date(row.night):
        raise BadRowError("its night is not a date")
    for name, value, most in (
        ("started", row.started, LONGEST_START),
        ("commit", row.commit_id, LONGEST_COMMIT),
    ):
        if not isinstance(value, str) or not value.isprintable() or len(value) > most:
            raise BadRowError(f"its {name} is not at most {most} printable characters")
    if row.verdict not in list(Verdict):
        raise BadRowError("its verdict is none of this version of degarble")
    return StoredRun(
        id=row.id,
        subject=row.subject,
        night=row.night,
        started=row.started,
        machine=row.machine,
        commit=row.commit_id,
        verdict=Verdict(row.verdict),
        facts=_facts(row.facts),
    )


def _facts(text: object) -> dict[str, str]:
    facts = _json(text, "facts")
    if not isinstance(facts, dict) or not all(isinstance(value, str) for value in facts.values()):
        raise BadRowError("its facts are not a JSON object of texts")
    return facts


def _json(text: object, name: str) -> Any:
    if not isinstance(text, str):
        raise BadRowError(f"its {name} are no text")
    try:
        found = json.loads(text)
        text.encode()
    except (ValueError, RecursionError):
        raise BadRowError(f"its {name} are not JSON in UTF-8") from None
    return found


def places(digest: object, measure: object, text: object) -> list[str]:
    """Return the places of a layout, whose digest is that of its text."""
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise BadRowError("its digest is not 64 hexadecimal digits")
    found = _json(text, "places")
    if not isinstance(found, list) or not all(isinstance(e, str) and is_name(e) for e in found):
        raise BadRowError("its places are not a JSON list of names")
    if layout_digest(str(measure), str(text)) != digest:
        raise BadRowError("its places are not those of its digest")
    return found


def layout_digest(measure: str, places_text: str) -> str:
    """Return the digest of a list of places of one measure."""
    text = f"{measure}\n{places_text}"
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def doubles(found: object, count: int) -> NDArray[np.float64]:
    """Return the numbers of a row for `count` places."""
    if not isinstance(found, bytes):
        raise BadRowError("its numbers are no bytes")
    if len(found) != count * DOUBLES.itemsize:
        raise BadRowError(f"it has {len(found)} bytes for {count} places of {DOUBLES.itemsize}")
    values = np.frombuffer(found, DOUBLES).astype(np.float64, copy=False)
    if not np.isfinite(values).all():
        raise BadRowError("a number of it is infinite or none")
    return values


def require_sum(stored: object, computed: str) -> None:
    """Raise BadRowError where a row's checksum differs from the one stored when it was added."""
    if stored is not None and stored != computed:
        raise BadRowError("it is not as it was added: its checksum is another")


def require_numbers(layouts: Sequence[object]) -> None:
    """Raise BadRowError for a run without numbers: no such run is ever added."""
    if not layouts:
        raise BadRowError("it has no numbers")


def run_sum(row: Sequence[object], layouts: Sequence[str]) -> str:
    """Return the checksum of a run's row and of the digests of its lists of numbers."""
    text = json.dumps([*map(str, row), *sorted(layouts)])
    return hashlib.sha256(text.encode()).hexdigest()


def numbers_sum(run: str, layout: str, data: bytes) -> str:
    """Return the checksum of a row of numbers."""
    return hashlib.sha256(f"{run}\n{layout}\n".encode() + data).hexdigest()


# --------------------------------------------------------------------------------------------------
# Read a check's JSON document as a run of the history, so that any CI can add its results.
#
# A component has two numbers: its worst output in units of budget, and its worst distance from the
# BF16 reference. A document that is no check, or has no judged output, raises an error.

_LARGEST = 64 << 20


def read_check(path: Path) -> dict[str, Any]:
    """Read a file that `degarble check --json` wrote."""
    remedy = "Give a file that `degarble check --json FILE` wrote."
    try:
        document = json.loads(read_small_text(path, _LARGEST), parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(path.name, str(error), "a JSON document", remedy) from error
    lines = document.get("cosines") if isinstance(document, dict) else None
    if not isinstance(lines, list) or not all(isinstance(line, dict) for line in lines):
        raise UnreadableFile(path.name, "no cosines", "the document of a check", remedy)
    if document.get("schema") != SCHEMA:
        raise UnreadableFile(f"schema of {path.name}", document.get("schema"), str(SCHEMA), remedy)
    facts, name = document.get("facts"), document.get("checkpoint", "")
    if not isinstance(facts, dict | None) or not isinstance(name, str):
        raise UnreadableFile(path.name, "facts, checkpoint", "an object and a name", remedy)
    if document.get("verdict") not in list(Verdict):
        raise UnreadableFile(
            f"verdict of {path.name}", document.get("verdict"), "a verdict", remedy
        )
    found: dict[str, Any] = document
    return found


def _refused(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def _number(value: object) -> float | None:
    """Return a finite number, or None where nothing was measured."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def values_of(document: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the numbers of a check: measure, then component, then number."""
    budgets: dict[str, float] = {}
    distances: dict[str, float] = {}
    for line in document["cosines"]:
        name = component_of(line)
        ratio = _number(line.get("budgets"))
        cosine = _number(line.get("candidate_reference"))
        if ratio is not None:
            budgets[name] = max(budgets.get(name, 0.0), ratio)
        if cosine is not None:
            distances[name] = max(distances.get(name, 0.0), 1.0 - cosine)
    if not budgets:
        raise InvalidArgument(
            "judged outputs of the check", 0, "one at least", "Check a capture that holds tensors."
        )
    return {BUDGETS.name: budgets, DISTANCE.name: distances}


def failures_of(document: Mapping[str, Any]) -> tuple[Failure, ...]:
    """Return the failures of a check, as the ledger lists them."""
    failures = [
        Failure(
            component_of(origin),
            Verdict.DIFFERS,
            origin.get("fault"),
            str(origin.get("evidence") or document.get("sentence") or ""),
        )
        for origin in document.get("origins", ())
    ]
    failures += [
        Failure(str(name), Verdict.UNSTABLE, None, "two runs disagree")
        for name in document.get("unstable", ())
    ]
    return tuple(failures)


def component_of(line: Mapping[str, Any]) -> str:
    """Return the full name of a component: the document keeps layer and role apart."""
    layer, role = line.get("layer"), str(line.get("component", ""))
    if line.get("name"):
        return str(line["name"])
    return role if layer is None else f"layers.{layer}.{role}"
