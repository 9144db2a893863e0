"""On which side of the sources' disagreements a captured run computed, as its manifest says it.

Owns the reading of a manifest's `conventions` back into switches of the references' arithmetic, so
that a twin computes what the candidate's kernels were written for. A convention is told by `check`,
never guessed from numbers. Refuses switches and values that the references do not have. Kept honest
by suites/runs/test_conventions.py.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

from degarble.harness.errors import InvalidArgument, UnknownName
from degarble.references.numerics import Switches

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY = "conventions"


def conventions_in(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The switches that a capture's facts name; none where all is as the official code has it."""
    stated = facts.get(KEY, {})
    if not isinstance(stated, dict):
        raise InvalidArgument(
            f"{KEY} of the capture", type(stated).__name__, "switches by name", "Capture it again."
        )
    return {name: _value(name, each) for name, each in stated.items()}


def conventions_line(conventions: Mapping[str, Any]) -> str:
    """Tell them in a line."""
    return ", ".join(f"{name}: {value}" for name, value in sorted(conventions.items()))


def _value(name: str, stated: Any) -> Any:
    known = Switches()
    if name not in known.__dataclass_fields__:
        raise UnknownName.among(f"{KEY} of the capture", name, known.__dataclass_fields__)
    default = getattr(known, name)
    if isinstance(default, StrEnum):
        kinds = {str(each): each for each in type(default)}
        if stated not in kinds:
            raise UnknownName.among(f"{name} of the capture", stated, kinds)
        return kinds[stated]
    if isinstance(stated, bool | int | float) and not isinstance(stated, str):
        return stated
    raise InvalidArgument(f"{name} of the capture", stated, "a switch's value", "Capture it again.")
