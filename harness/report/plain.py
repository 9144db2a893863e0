"""Convert records to plain JSON values and back, by the type annotations of the records.

A record is an object, a tuple a list, an enum its word, a block an object with its name under
`block`. A number that JSON lacks (NaN, infinity) is an object `{"float": "nan"}`. Input that does
not match the annotations raises UnreadableFile with the path inside the document; nesting is
bounded.
"""

from __future__ import annotations

import math
import types
import typing
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from degarble.harness.base.errors import DegarbleError, UnreadableFile
from degarble.harness.report.blocks import BLOCKS

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]

_DEPTH_LIMIT = 64  # documents; a page nests to about 20
_BLOCK_NAMES: dict[type, str] = {record: name for name, record in BLOCKS.items()}
_FLOAT_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def to_plain(value: object) -> Plain:
    """`value`, a record or a part of one, as what json.dumps(allow_nan=False) accepts."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if is_dataclass(value):
        document = {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
        name = _BLOCK_NAMES.get(type(value))
        return document if name is None else {"block": name, **document}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if isinstance(value, typing.Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} has no plain form")


def from_plain(annotation: Any, plain: object, path: str) -> Any:
    """`plain` read as `annotation`; `path` names it in a refusal."""
    return _read(annotation, plain, path, 0)


def _refuse(path: str, plain: object, expectation: str) -> UnreadableFile:
    return UnreadableFile(
        path, plain, expectation, "The document is damaged or of another tool; write it again."
    )


def _read(annotation: Any, plain: object, path: str, depth: int) -> Any:
    if depth > _DEPTH_LIMIT:
        raise _refuse(path, "...", f"nesting of at most {_DEPTH_LIMIT} levels")
    origin = typing.get_origin(annotation)
    if origin in {typing.Union, types.UnionType}:
        return _read_union(typing.get_args(annotation), plain, path, depth)
    if origin is tuple:
        return _read_tuple(typing.get_args(annotation), plain, path, depth)
    if origin is not None:
        return _read_mapping(typing.get_args(annotation)[1], plain, path, depth)
    if is_dataclass(annotation):
        return _read_record(annotation, plain, path, depth)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        words = [str(member.value) for member in annotation]
        if plain not in words:
            raise _refuse(path, plain, f"one of {', '.join(words)}")
        return annotation(plain)
    return _read_scalar(annotation, plain, path)


def _read_scalar(annotation: Any, plain: object, path: str) -> Any:
    if annotation is float and isinstance(plain, dict) and set(plain) == {"float"}:
        word = plain["float"]
        if isinstance(word, str) and word in _FLOAT_WORDS:
            return _FLOAT_WORDS[word]
    if annotation is float and type(plain) is int:
        return float(plain)
    if type(plain) is annotation or (plain is None and annotation is types.NoneType):
        return plain
    raise _refuse(path, plain, f"a value of type {getattr(annotation, '__name__', annotation)}")


def _read_union(choices: tuple[Any, ...], plain: object, path: str, depth: int) -> Any:
    if all(is_dataclass(choice) for choice in choices):  # the blocks
        name = plain.get("block") if isinstance(plain, dict) else None
        if not isinstance(name, str) or name not in BLOCKS:
            raise _refuse(f"{path}.block", name, f"one of {', '.join(BLOCKS)}")
        return _read_record(BLOCKS[name], plain, path, depth)
    # Trap: an int is read as an int where both int and float are allowed, so exact matches go first
    exact = [c for c in choices if type(plain) is c]
    for choice in (*exact, *choices):
        try:
            return _read(choice, plain, path, depth)
        except UnreadableFile:
            continue
    names = ", ".join(str(getattr(choice, "__name__", choice)) for choice in choices)
    raise _refuse(path, plain, f"one of the types {names}")


def _read_tuple(arguments: tuple[Any, ...], plain: object, path: str, depth: int) -> Any:
    if not isinstance(plain, list):
        raise _refuse(path, plain, "a list")
    if arguments[-1] is Ellipsis:
        kinds: tuple[Any, ...] = (arguments[0],) * len(plain)
    else:
        kinds = arguments
    if len(kinds) != len(plain):
        raise _refuse(path, plain, f"a list of {len(kinds)}")
    return tuple(
        _read(kind, item, f"{path}[{index}]", depth + 1)
        for index, (kind, item) in enumerate(zip(kinds, plain, strict=True))
    )


def _read_mapping(kind: Any, plain: object, path: str, depth: int) -> dict[str, Any]:
    if not isinstance(plain, dict):
        raise _refuse(path, plain, "an object")
    return {str(k): _read(kind, item, f"{path}.{k}", depth + 1) for k, item in plain.items()}


def _read_record(record: Any, plain: object, path: str, depth: int) -> Any:
    if not isinstance(plain, dict):
        raise _refuse(path, plain, "an object")
    kinds = _field_types(record)
    given = set(plain) - {"block"}
    if given != set(kinds):
        odd = sorted(str(name) for name in given ^ set(kinds))
        raise _refuse(path, odd, f"exactly the fields {', '.join(kinds)}")
    values = {
        name: _read(kind, plain[name], f"{path}.{name}", depth + 1) for name, kind in kinds.items()
    }
    try:
        return record(**values)
    except DegarbleError as error:
        raise UnreadableFile(path, error.value, error.expectation, error.remedy) from error


@cache
def _field_types(record: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(record)
    return {f.name: hints[f.name] for f in fields(record)}
