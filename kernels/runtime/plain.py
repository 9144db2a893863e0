"""Write records of constants, such as a kernel's form, as JSON, and read them back.

Reading names records of our own packages only: the records check their fields, and nothing else is
imported or called.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

from degarble.harness.base.errors import InvalidArgument

_OURS = ("degarble.kernels.", "degarble.harness.formats.")
_RECORD, _FIELDS, _TUPLE, _ENDLESS = "record", "fields", "tuple", "infinity"


def to_plain(value: Any) -> Any:
    """Return JSON data; raise for what is no constant and no record of ours."""
    if isinstance(value, float) and math.isinf(value):
        return {_ENDLESS: math.copysign(1, value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return {_TUPLE: [to_plain(part) for part in value]}
    kind = type(value)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if is_dataclass(value) and name.startswith(_OURS):
        parts = {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
        return {_RECORD: name, _FIELDS: parts}
    raise InvalidArgument(
        "form of a kernel", name, "a record of constants", "Keep objects out of it: name them."
    )


def from_plain(raw: Any) -> Any:
    """Read what `to_plain` returned; raise TypeError, ValueError, KeyError or ImportError."""
    if not isinstance(raw, dict):
        if raw is None or isinstance(raw, bool | int | float | str):
            return raw
        raise TypeError(type(raw).__name__)
    if _ENDLESS in raw:
        return math.copysign(math.inf, raw[_ENDLESS])
    if _TUPLE in raw:
        return tuple(from_plain(part) for part in raw[_TUPLE])
    kind = object_of_ours(raw[_RECORD])
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise TypeError(raw[_RECORD])
    given = {name: from_plain(part) for name, part in raw[_FIELDS].items()}
    if given.keys() != {field.name for field in fields(kind)}:
        raise TypeError(f"fields {sorted(given)}")
    return kind(**given)


def object_of_ours(place: str) -> Any:
    """Return what module:NAME names in our packages; raise ValueError for any other."""
    module, _, name = place.partition(":")
    if not module.startswith(_OURS) or not name.isidentifier():
        raise ValueError(place)
    return getattr(import_module(module), name)
