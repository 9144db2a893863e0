"""Validate the rows of a store, because other programs may write to the database.

A row that cannot be read is skipped and listed with its reason; it never blocks the store.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from degarble.harness.history.records import (
    LONGEST_COMMIT,
    LONGEST_START,
    LONGEST_TEXT,
    is_date,
    is_name,
)
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

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
class Told:
    """A run as the store returns it, without its numbers."""

    id: str
    subject: str
    night: str
    started: str
    machine: str
    commit: str
    verdict: Verdict
    facts: dict[str, str]


def told(row: Any) -> Told:
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
    return Told(
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
