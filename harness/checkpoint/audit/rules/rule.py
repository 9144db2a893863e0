"""What a rule of the audit is: an id, a level, a statement, a source. Imports no sibling.

Owns the vocabulary of rules/files.py, rules/structure.py, rules/loader.py and rules/numbers.py,
which hold the rules themselves, one table each; findings.py joins the tables. A level is a property
of the rule, never of the place where it is broken, so that a user who knows the rule knows what the
exit status will be. Kept honest by suites/checkpoint/audit/rules/test_findings.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Level(StrEnum):
    """How bad it is that a rule is broken."""

    ERROR = "error"  # some engine computes wrong numbers from it, or cannot load it
    WARNING = "warning"  # right only if the reader knows; or a statement that is not so
    NOTE = "note"  # worth knowing; nothing is wrong

    @property
    def weight(self) -> int:
        """Order of levels, the worst one first."""
        return list(Level).index(self)


@dataclass(frozen=True)
class Rule:
    """One thing that must hold. `source`: who says so, or what happened where it did not hold."""

    id: str
    level: Level
    statement: str
    source: str


def rules_in(names: Mapping[str, object]) -> tuple[Rule, ...]:
    """Return every rule that a module defines, given its globals(): none can be forgotten."""
    return tuple(each for each in names.values() if isinstance(each, Rule))
