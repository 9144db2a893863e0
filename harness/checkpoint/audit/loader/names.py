"""Apply the name rules of a loader map (skip, elsewhere, rename, stack) to stored tensor names.

A pattern is searched for only in names that contain the literal text which each of its matches must
contain: a shortcut that does not change the outcome. Names longer than LONGEST_NAME are dropped
without a search: no parameter has one, and searching a hostile one could take for ever.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.checkpoint.audit.loader.maps import EXPERT_GROUP, compiled

if TYPE_CHECKING:
    from collections.abc import Container

    from degarble.harness.checkpoint.audit.loader.maps import LoaderMap, Split


class Outcome(StrEnum):
    """Result of the rules for one stored tensor."""

    PLACED = "placed"
    CONVERTED = "converted"  # into other tensors, which are placed
    SKIPPED = "skipped"
    ELSEWHERE = "elsewhere"
    DROPPED = "dropped"


class Resolved(NamedTuple):
    """Destination of a name. `slot` None: the whole parameter. `by`: the deciding pattern."""

    outcome: Outcome
    target: str = ""
    slot: int | None = None
    expert: int | None = None
    by: str = ""


LONGEST_NAME = 256
_MOST_DIGITS = 9

_PLAIN = re.compile(r"[A-Za-z0-9_ \-]")
_ESCAPED = frozenset(".-_+*?()[]{}^$|\\/")


def needed_literal(pattern: str) -> str:
    """Return the longest text that every match of a pattern contains, or an empty one."""
    runs, run, depth, index = [""], "", 0, 0
    if "(?" in pattern.replace("(?P<", "").replace("(?=", "").replace("(?:", ""):
        return ""  # flags and lookbehinds are not parsed
    while index < len(pattern):
        sign, step = pattern[index], 1
        following = pattern[index + 1 : index + 2]
        if sign == "\\" and following in _ESCAPED:
            sign, step = following, 2
        elif sign == "|" and depth == 0:
            return ""
        elif not _PLAIN.match(sign):
            sign = ""
            if pattern[index] == "\\":
                step = 2
            elif pattern[index] == "[":
                step = _class_length(pattern, index)
            depth += {"(": 1, ")": -1}.get(pattern[index], 0)
        optional = pattern[index + step : index + step + 1] in {"*", "?", "{"}
        if sign and depth == 0 and not optional:
            run += sign
            # `a+` may match more than one, so the run ends after it.
            if pattern[index + step : index + step + 1] != "+":
                index += step
                continue
        runs.append(run)
        run = ""
        index += step
    return max([*runs, run], key=len)


def _class_length(pattern: str, index: int) -> int:
    end = index + 1
    if pattern[end : end + 1] == "^":
        end += 1
    end += 1  # a bracket in first place is meant literally
    while end < len(pattern) and pattern[end] != "]":
        end += 2 if pattern[end] == "\\" else 1
    return end + 1 - index


class _Pattern:
    """A compiled pattern, with a text that each of its matches contains."""

    def __init__(self, what: str, text: str) -> None:
        self.text = text
        self.literal = needed_literal(text)
        self.expression = compiled(what, text)
        self.used = False

    def search(self, name: str) -> re.Match[str] | None:
        if self.literal not in name:
            return None
        found = self.expression.search(name)
        self.used = self.used or found is not None
        return found


class NameRules:
    """The name rules of one map. `known`: names of the engine's parameters."""

    def __init__(self, loader_map: LoaderMap, known: Container[str]) -> None:
        self._known = known
        self._skip = [_Pattern("skip", each) for each in loader_map.skip]
        self._elsewhere = [_Pattern("elsewhere", each.match) for each in loader_map.elsewhere]
        self._rename = [(_Pattern("rename", each.match), each.to) for each in loader_map.rename]
        self._stack = [(_Pattern("stack", each.match), each) for each in loader_map.stack]

    def resolve(self, name: str) -> Resolved:
        """Return the destination of one stored tensor's name."""
        if len(name) > LONGEST_NAME:
            return Resolved(Outcome.DROPPED, name)
        for pattern in self._skip:
            if pattern.search(name):
                return Resolved(Outcome.SKIPPED, by=pattern.text)
        for pattern in self._elsewhere:
            if pattern.search(name):
                return Resolved(Outcome.ELSEWHERE, by=pattern.text)
        # Checking the literal here saves a call; a full model runs this eight million times.
        for pattern, replacement in self._rename:
            if pattern.literal in name and pattern.search(name):
                name = pattern.expression.sub(replacement, name)
                if len(name) > LONGEST_NAME:  # before the next rule makes it longer still
                    return Resolved(Outcome.DROPPED, name)
        for pattern, stack in self._stack:
            match = pattern.search(name) if pattern.literal in name else None
            if match is None:
                continue
            # sub() keeps the parsed template; expand() parses it again for each of 280,000 names.
            target = pattern.expression.sub(stack.into, name, count=1)
            if target in self._known:
                number = match.groupdict().get(EXPERT_GROUP) or ""
                counts = number.isdecimal() and len(number) <= _MOST_DIGITS
                expert = int(number) if counts else None
                return Resolved(Outcome.PLACED, target, stack.slot, expert, pattern.text)
        if name in self._known:
            return Resolved(Outcome.PLACED, name)
        return Resolved(Outcome.DROPPED, name)

    def dead(self) -> list[tuple[str, str]]:
        """Return (kind, pattern) of the rules that matched no name so far."""
        kinds = {
            "skip": self._skip,
            "elsewhere": self._elsewhere,
            "rename": [pattern for pattern, _ in self._rename],
            "stack": [pattern for pattern, _ in self._stack],
        }
        return [
            (kind, pattern.text)
            for kind, patterns in kinds.items()
            for pattern in patterns
            if not pattern.used
        ]


class Splits:
    """The split rules of a map, looked up by parameter: the first matching rule counts."""

    def __init__(self, splits: tuple[Split, ...]) -> None:
        self._splits = [(_Pattern("split", each.match), each) for each in splits]
        self._known: dict[str, Split | None] = {}

    def of(self, target: str) -> Split | None:
        """Return the rule, or None where every rank holds the whole parameter."""
        if target not in self._known:
            found = (split for pattern, split in self._splits if pattern.search(target))
            self._known[target] = next(found, None)
        return self._known[target]

    def dead(self) -> list[tuple[str, str]]:
        """Return the rules that matched no parameter so far."""
        return [("split", pattern.text) for pattern, _ in self._splits if not pattern.used]
