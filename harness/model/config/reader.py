"""Read a dict of JSON values key by key, so that no key is read twice or forgotten.

A fact stated under two names must be stated alike; a fact stated nowhere is an error that names its
key. Keys that were not read remain as provenance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from degarble.harness.model.config.checks import require

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

REQUIRED = object()


class Reader:
    """A config dict, and the keys of it that have been taken."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self._taken: set[str] = set()

    def take(self, name: str, alias: str | None = None, default: object = REQUIRED) -> Any:
        """Return the value of `name`, also known as `alias`; null counts as not stated."""
        stated = [key for key in (name, alias) if key and self.raw.get(key) is not None]
        self._taken.update(key for key in (name, alias) if key)
        if not stated:
            known_as = f" (also called {alias})" if alias else ""
            require(default is not REQUIRED, name, "missing", f"this key{known_as}")
            return default
        value = self.raw[stated[0]]
        if len(stated) == 2:
            other = self.raw[stated[1]]
            require(other == value, name, value, f"{other!r}, as {alias} says")
        return value

    def optional(self, name: str, default: object = None) -> Any:
        """Return the value of `name` or `default`."""
        return self.take(name, None, default)

    def fields(self, keys: Iterable[tuple[str, str | None, object]]) -> dict[str, Any]:
        """Return one value for each (field, alias, default)."""
        return {field: self.take(field, alias, default) for field, alias, default in keys}

    def constants(self, values: Mapping[str, object]) -> None:
        """Refuse a stated value that differs from what the whole family has."""
        for name, value in values.items():
            stated = self.optional(name, value)
            same = stated == value and isinstance(stated, bool) == isinstance(value, bool)
            require(same, name, stated, f"{value!r}: this family has nothing else")

    def rest(self) -> dict[str, Any]:
        """Return the keys that nobody took."""
        return {key: value for key, value in self.raw.items() if key not in self._taken}
