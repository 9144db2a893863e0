"""Check type and range of every config field by its annotation.

An int is an int (not a bool, not a string of digits), a float is finite and not negative, a name is
one of the known ones. Errors name the field.
"""

from __future__ import annotations

from dataclasses import fields
from math import isfinite
from sys import float_info
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.model.types import Yarn

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAY_BE_ZERO = ("mscale", "mscale_all_dim", "attention_factor")
REMEDY = "Correct the model's config.json; no value is assumed in its place."


def require(ok: bool, name: str, value: object, expectation: str) -> None:
    """Refuse the field `name` unless `ok`."""
    if not ok:
        raise InvalidArgument(name, value, expectation, REMEDY)


def require_fields(
    record: Any, lowest: Mapping[str, int], names: Mapping[str, frozenset[str]]
) -> None:
    """Check each field of a frozen record against its annotation.

    Integers start at 1 unless `lowest` says otherwise; strings come from `names`.
    """
    for field in fields(record):
        value = getattr(record, field.name)
        optional = str(field.type).endswith(" | None")
        if optional and value is None:
            continue
        match str(field.type).removesuffix(" | None"):
            case "int":
                _require_int(field.name, value, lowest.get(field.name, 1))
            case "float":
                _require_real(field.name, value, lowest.get(field.name))
            case "str":
                if not isinstance(value, str) or value not in names[field.name]:
                    raise UnknownName.among(field.name, value, names[field.name])
            case "tuple[int, ...]":
                require(isinstance(value, tuple), field.name, value, "a list of integers")
                for item in value:
                    _require_int(field.name, item, 0)
            case "bool":
                require(isinstance(value, bool), field.name, value, "true or false")
            case "Yarn":
                require(isinstance(value, Yarn), field.name, value, "YaRN parameters")
                require_yarn(value)
            case _:
                pass  # provenance, or a record that checks itself


def require_yarn(yarn: Yarn) -> None:
    """Refuse YaRN whose facts are out of range, each or together."""
    require_fields(yarn, dict.fromkeys(_MAY_BE_ZERO, 0), {})
    length = yarn.original_max_position_embeddings
    require(length < 1 << 63, "original_max_position_embeddings", length, "below 2^63")
    for name in ("beta_fast", "beta_slow"):
        turns = getattr(yarn, name)
        require(turns > length / float_info.max, name, turns, f"more turns within {length} tokens")
    for name, scale in (("mscale", yarn.rotation_scale), ("mscale_all_dim", yarn.logit_scale)):
        require(isfinite(scale), name, getattr(yarn, name), "a number whose scale is finite")


def _require_int(name: str, value: object, lowest: int) -> None:
    require(type(value) is int, name, value, "an integer")
    assert isinstance(value, int)
    require(value >= lowest, name, value, f"at least {lowest}")


def _require_real(name: str, value: object, lowest: int | None) -> None:
    # Trap: math.isfinite raises for an int beyond the largest float; NaN compares false.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    require(number, name, value, "a number")
    assert isinstance(value, int | float)
    finite = abs(value) <= float_info.max
    if lowest is None:
        require(finite and value > 0, name, value, "a finite number above 0")
    else:
        require(finite and value >= lowest, name, value, f"a finite number from {lowest}")
