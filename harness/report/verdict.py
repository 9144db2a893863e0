"""The five verdicts with their exit statuses, and the record of an origin, as in `--json`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from degarble.harness.base.errors import EXIT_AGREES, EXIT_DIFFERS, EXIT_REFUSED

SCHEMA = 1


class Verdict(StrEnum):
    """Verdict on a candidate. Every verdict has one exit status."""

    AGREES = "AGREES"
    DIFFERS = "DIFFERS"
    UNSTABLE = "UNSTABLE"  # two runs of the same candidate disagree
    UNDECIDED = "UNDECIDED"  # the comparison cannot be made
    REFUSED = "REFUSED"  # the input is wrong

    @property
    def exit_status(self) -> int:
        """0 AGREES, 1 DIFFERS or UNSTABLE, 2 REFUSED or UNDECIDED."""
        return _EXIT_STATUS[self]

    @property
    def meaning(self) -> str:
        """One line for a reader who sees the word for the first time."""
        return _MEANING[self]


_EXIT_STATUS = {
    Verdict.AGREES: EXIT_AGREES,
    Verdict.DIFFERS: EXIT_DIFFERS,
    Verdict.UNSTABLE: EXIT_DIFFERS,
    Verdict.UNDECIDED: EXIT_REFUSED,
    Verdict.REFUSED: EXIT_REFUSED,
}

_MEANING = {
    Verdict.AGREES: "within its budget everywhere",
    Verdict.DIFFERS: "outside its budget in at least one place",
    Verdict.UNSTABLE: "two runs of the same candidate disagree",
    Verdict.UNDECIDED: "the comparison could not be made, so nothing is claimed",
    Verdict.REFUSED: "the input is wrong, nothing was judged",
}


# From what may be passed over to what may not: the worst of several is the verdict of all.
SEVERITY = (
    Verdict.AGREES,
    Verdict.UNDECIDED,
    Verdict.REFUSED,
    Verdict.UNSTABLE,
    Verdict.DIFFERS,
)


# What is shown in the place of AGREES where nothing was compared with anything.
NO_ERRORS = "NO ERRORS FOUND"
TOOL_WORKS = "THE TOOL WORKS"  # what the demonstration says of itself

LATER = "later"  # marks a field that pages of the first version lack


class AnswerLevel(StrEnum):
    """How much is known of the cause at an origin."""

    NAMED = "named"  # a known fault reproduces the outputs
    DESCRIBED = "described"  # recovered operands predict them
    PLACED = "placed"  # the component alone


@dataclass(frozen=True)
class Origin:
    """The place that added a difference. The fields are the keys of `origins` in `--json`.

    `difference` and `budget` are relative L2; `confidence` is how sure the cause is
    (`confidence_of` in engine/diagnose), 0 where the component is known alone.
    """

    layer: int | None
    component: str
    site: str
    where: Mapping[str, str | int | float] = field(default_factory=dict)
    fault: str | None = None
    cosine: float | None = None
    difference: float | None = None
    budget: float | None = None
    confidence: float = 0.0
    evidence: str = ""
    reproducer: str = ""
    level: AnswerLevel = field(default=AnswerLevel.PLACED, metadata={LATER: True})
    # What was recovered, row by row.
    changes: tuple[str, ...] = field(default=(), metadata={LATER: True})
