"""Read a JSON request body field by field; every field is used, or is an error.

JSON is strict: UTF-8, one object, no key twice, no NaN, bounded depth. `null` means absent, as in
OpenAI's API. `end` raises on fields that nothing has read.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from degarble.harness.serve.refusals import ApiError, wrong

_SHOWN = 80


def read_object(body: bytes) -> dict[str, Any]:
    """Read a body that must be one JSON object."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(
            400, f"body: no UTF-8 at byte {error.start}", None, "invalid_json"
        ) from error
    try:
        found = json.loads(text, parse_constant=_no_number, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        told = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"body: no JSON: {told[:200]}", None, "invalid_json") from error
    if not isinstance(found, dict):
        raise ApiError(400, "body: a JSON object is expected", None, "invalid_json")
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key stands there twice")
    return made


def shown(value: object) -> str:
    """Return a value of a request, short and printable, for a message."""
    try:
        # ASCII, so that control characters of a request reach no terminal or log.
        text = ascii(value)
    except RecursionError:
        return "a value nested deeply"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


class Fields:
    """An object that is read field by field; `path` precedes its names in messages."""

    def __init__(self, raw: dict[str, Any], path: str = "") -> None:
        # null counts as absent, as in OpenAI's API.
        self._left = {key: value for key, value in raw.items() if value is not None}
        self._path = path

    def named(self, name: str) -> str:
        """Return a field's name from the body on."""
        return f"{self._path}{name}"

    def any(self, name: str) -> Any:
        """Take any value; None where it is absent."""
        return self._left.pop(name, None)

    def has(self, name: str) -> bool:
        """Return whether a field is there and was not taken yet."""
        return name in self._left

    def text(self, name: str, default: str | None = None) -> str:
        """Take a text; without a default it is required."""
        found = self.any(name)
        if found is None and default is not None:
            return default
        if found is None:
            raise wrong(self.named(name), "is required", "missing_required_parameter")
        if not isinstance(found, str):
            raise wrong(self.named(name), f"{shown(found)} is no text", "invalid_type")
        return found

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Take true or false."""
        found = self.any(name)
        if found is None:
            return default
        if not isinstance(found, bool):
            raise wrong(self.named(name), f"{shown(found)} is not true or false", "invalid_type")
        return found

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """Take a number within its range."""
        found = self.any(name)
        if found is None:
            return default
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise wrong(self.named(name), f"{shown(found)} is no number", "invalid_type")
        if not low <= found <= high or not math.isfinite(found):
            raise self._outside(name, found, low, high)
        return float(found)

    def whole(self, name: str, low: int, high: int) -> int | None:
        """Take a whole number within its range; None where it is absent."""
        found = self.any(name)
        if found is None:
            return None
        # bool is a subclass of int: true is no whole number.
        if isinstance(found, bool) or not isinstance(found, int):
            raise wrong(self.named(name), f"{shown(found)} is no whole number", "invalid_type")
        if not low <= found <= high:
            raise self._outside(name, found, low, high)
        return found

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """Take a text or a list of texts, none of them empty."""
        found = self.any(name)
        several = [found] if isinstance(found, str) else found or []
        if not isinstance(several, list) or not all(isinstance(each, str) for each in several):
            raise wrong(self.named(name), f"{shown(found)} is no text or list", "invalid_type")
        if len(several) > most or "" in several:
            raise wrong(self.named(name), f"at most {most} texts, none of them empty")
        return tuple(several)

    def inner(self, name: str) -> Fields | None:
        """Take an object; None where it is absent."""
        found = self.any(name)
        if found is None:
            return None
        if not isinstance(found, dict):
            raise wrong(self.named(name), f"{shown(found)} is no object", "invalid_type")
        return Fields(found, f"{self.named(name)}.")

    def only(self, name: str, *values: object) -> None:
        """Refuse a field whose value would have an effect that this server does not have."""
        found = self.any(name)
        # Types are compared as well: 1 is not true.
        if found is not None and not any(type(found) is type(v) and found == v for v in values):
            allowed = " or ".join(["leave it out", *(f"give {json.dumps(v)}" for v in values)])
            told = f"{shown(found)} is not supported; {allowed}"
            raise wrong(self.named(name), told, "unsupported_value")

    def end(self) -> None:
        """Refuse what is left."""
        for name in self._left:
            raise wrong(shown(self.named(name))[1:-1], "is not supported", "unsupported_parameter")

    def _outside(self, name: str, found: float, low: float, high: float) -> ApiError:
        return wrong(self.named(name), f"{shown(found)} is not within {low:g} and {high:g}")
