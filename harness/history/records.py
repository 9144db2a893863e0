"""Records of the history store: runs and measures.

A Run is one measurement of one subject (a checkpoint, by the name that its owner gave it) on one
machine on one night, with the facts that may have moved it. A Measure is a kind of number with its
least noise. Places without a value are left out, because JSON has no NaN or infinity. A run without
subject, night or values raises an error.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from typing import TYPE_CHECKING

from degarble.harness.base.errors import InvalidArgument, UnknownName

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.report.verdict import Verdict

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
MEASURES: Mapping[str, Measure] = {
    each.name: each for each in (BUDGETS, DISTANCE, SPEED, TEXT, MUSEUM)
}


def measure_named(name: str) -> Measure:
    """Return a measure; raise for an unknown name."""
    if name not in MEASURES:
        raise UnknownName.among("measure", name, MEASURES)
    return MEASURES[name]


@dataclass(frozen=True)
class Run:
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
        told = {
            "subject": self.subject,
            "night": self.night,
            "machine": self.machine,
            "verdict": str(self.verdict),
            "commit": self.commit,
            "started": self.started,
            "facts": dict(self.facts),
            "values": {name: dict(each) for name, each in self.values.items()},
        }
        text = json.dumps(told, sort_keys=True, ensure_ascii=True, allow_nan=False)
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
