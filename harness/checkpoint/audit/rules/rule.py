"""Define what an audit rule is: an id, a level, a statement and a source.

The level belongs to the rule, never to the place where it is broken: whoever knows the rule knows
the exit status. The rules themselves are in the tables of this package, joined by findings.py.
Imports no sibling.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Level(StrEnum):
    """Severity of a broken rule."""

    ERROR = "error"  # some engine computes wrong numbers from it, or cannot load it
    WARNING = "warning"  # right only if the reader knows; or a statement that is not so
    NOTE = "note"  # worth knowing; nothing is wrong

    @property
    def weight(self) -> int:
        """Rank of the level, the worst one first."""
        return list(Level).index(self)


@dataclass(frozen=True)
class Rule:
    """A statement that must hold. `source`: who says so, or what happened where it did not hold."""

    id: str
    level: Level
    statement: str
    source: str


def rules_in(names: Mapping[str, object]) -> tuple[Rule, ...]:
    """Return every rule in a module's globals(), so that a table cannot miss one."""
    return tuple(each for each in names.values() if isinstance(each, Rule))
