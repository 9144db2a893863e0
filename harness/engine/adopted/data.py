"""Write a change as plain data (what JSON has), and read it back to the same change, bit by bit.

A change consists of registered operations (`recover/stated.py`) with their arguments. A function is
`{"do": name}`, with its arguments under `with`; a record is `{"is": name}` with its fields. What a
component's own weights are called depends on the component, so these names are written relative to
it. Reading runs nothing but registered operations, and refuses what has another form.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.engine.faults.model_faults import ComponentContext
from degarble.harness.engine.faults.regions import full_name
from degarble.harness.engine.recover.stated import OPERATIONS, RENAMED
from degarble.harness.formats.layouts import SCALE_LAYOUTS, ScaleLayout
from degarble.harness.formats.number_formats import (
    BLOCK_FORMATS,
    ELEMENT_FORMATS,
    TABLE_FORMATS,
    BlockFormat,
    NumberFormat,
    Rounding,
)
from degarble.references.numerics import Switches

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MOST_NUMBERS = 4096  # of a tensor: more are no description
DEEPEST = 40  # operations within operations
_NUMBER_FORMATS = {**ELEMENT_FORMATS, **TABLE_FORMATS}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
        torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
_NAMED = (  # kinds of values that have names: key, type, values by name
    ("number format", NumberFormat, _NUMBER_FORMATS),
    ("block format", BlockFormat, BLOCK_FORMATS),
    ("layout", ScaleLayout, SCALE_LAYOUTS),
    ("dtype", torch.dtype, _DTYPES),
)
_NOT_FINITE = ("nan", "inf", "-inf")


class NotStatable(InvalidArgument):
    """A change holds something that no file can state."""


def weight_key(context: ComponentContext, name: str) -> str:
    """Return what a weight is called relative to its component: without the component's name."""
    prefix = f"{context.name}."
    return name.removeprefix(context.name) if name.startswith(prefix) else name


def _own_names(context: ComponentContext) -> dict[str, str]:
    """Return the keys of a component's weights by their full names."""
    return {full_name(context, name): weight_key(context, name) for name in context.weights}


def general_words(context: ComponentContext, words: str) -> str:
    """Return words with the names of this component and of its weights replaced by keys."""
    for name, key in sorted(_own_names(context).items(), key=lambda each: -len(each[0])):
        words = words.replace(name, f"<{key}>")
    return words.replace(context.name, "<component>")


def local_words(context: ComponentContext, words: str) -> str:
    """Return general words with the names of a component and of its weights."""
    for name, key in _own_names(context).items():
        words = words.replace(f"<{key}>", name)
    return words.replace("<component>", context.name)


# ---- writing -------------------------------------------------------------------------------------


def written(value: Any, context: ComponentContext) -> Any:
    """Return a change as data; raise where a part of it is not registered, or is too large."""
    return _Writer(context).data(value)


class _Writer:
    """Write values of one component."""

    def __init__(self, context: ComponentContext) -> None:
        self._context = context
        self._own = _own_names(context)
        self._names = {id(made): name for name, made in OPERATIONS.items()}

    def data(self, value: Any) -> Any:
        if value is None or (isinstance(value, bool | int) and not isinstance(value, Enum)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"number": str(value)}
        if isinstance(value, Enum):
            return {"choice": type(value).__name__, "value": value.value}
        if isinstance(value, str):
            return {"weight": self._own[value]} if value in self._own else value
        if isinstance(value, torch.Tensor):
            return _tensor_data(value)
        for key, kind, _ in _NAMED:
            if isinstance(value, kind):
                return {key: getattr(value, "name", str(value).removeprefix("torch."))}
        if isinstance(value, ComponentContext):
            return {"component": "" if value.name == self._context.name else value.name}
        if isinstance(value, partial) or id(value) in self._names:
            return self._operation(value)
        if id(type(value)) in self._names:
            return self._record(value)
        return self._several(value)

    def _several(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            items = [self.data(each) for each in value]
            return items if isinstance(value, list) else {"tuple": items}
        if isinstance(value, frozenset):
            return {"set": [self.data(each) for each in sorted(value)]}
        if isinstance(value, dict):
            return {"map": [[self.data(key), self.data(each)] for key, each in value.items()]}
        shown = getattr(value, "__qualname__", type(value).__qualname__)
        raise NotStatable(
            "description", shown, "operations and records that are registered",
            f"No file can state this change: register {shown} by "
            "degarble.harness.engine.recover.stated.operation, or keep the reproducer instead.",
        )  # fmt: skip

    def _operation(self, value: Any) -> dict[str, Any]:
        function = value.func if isinstance(value, partial) else value
        name = self._names.get(id(function))
        if name is None:
            return self._several(function)  # type: ignore[no-any-return]
        found: dict[str, Any] = {"do": name}
        if isinstance(value, partial):
            given = dict(zip(parameters(function), value.args, strict=False))
            if len(given) == len(value.args):
                given |= value.keywords
                found["with"] = {key: self.data(each) for key, each in given.items()}
            else:  # a function of torch, whose parameters have no names here
                found["first"] = [self.data(each) for each in value.args]
                found["with"] = {key: self.data(each) for key, each in value.keywords.items()}
        return found

    def _record(self, value: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"is": self._names[id(type(value))]}
        for name in _stated_fields(type(value)):
            found[name] = self.data(getattr(value, name))
        return found


def parameters(function: Callable[..., Any]) -> dict[str, str]:
    """Return the parameters of a function with their types; none of torch's own functions."""
    if getattr(function, "__module__", "").startswith("degarble."):
        found = inspect.signature(function).parameters
        return {name: str(each.annotation) for name, each in found.items()}
    return {}


def _stated_fields(kind: Any) -> dict[str, str]:
    """Return the fields of a record that are written, with their types."""
    if is_dataclass(kind):
        return {
            each.name: str(each.type)
            for each in fields(kind)
            if each.init and each.metadata.get("stated", True)
        }
    held = kind.__annotations__.items()
    return {name: str(getattr(each, "__forward_arg__", each)) for name, each in held}


def _tensor_data(x: torch.Tensor) -> dict[str, Any]:
    """Write a tensor: runs of equal numbers, row after row."""
    name = next((name for name, dtype in _DTYPES.items() if dtype is x.dtype), None)
    numbers = x.detach().reshape(-1).tolist()
    runs: list[list[Any]] = []
    for each in numbers:
        shown = each if not isinstance(each, float) or math.isfinite(each) else str(each)
        same = runs and runs[-1][0] == shown and str(runs[-1][0]) == str(shown)
        if same:
            runs[-1][1] += 1
        else:
            runs.append([shown, 1])
    if name is None or len(runs) > MOST_NUMBERS:
        raise NotStatable(
            "description", f"{x.numel():,} numbers of {x.dtype}",
            f"a rule, or at most {MOST_NUMBERS:,} numbers",
            "A table of so many numbers is no fault that can be planted elsewhere: keep the "
            "reproducer instead.",
        )  # fmt: skip
    return {"tensor": name, "shape": list(x.shape), "runs": runs}


# ---- reading -------------------------------------------------------------------------------------


def read(data: Any, context: ComponentContext | None, name: str = "change") -> Any:
    """Return the change that data state, for a component; without one its form alone is checked."""
    return _Reader(context).value(data, name, 0)


def _refused(name: str, value: Any, expectation: str) -> InvalidArgument:
    return InvalidArgument(
        name, value, expectation, "Adopt the description again: degarble faults adopt VERDICT.json"
    )


class _Reader:
    """Read values for one component."""

    def __init__(self, context: ComponentContext | None) -> None:
        self._context = context
        own = {} if context is None else _own_names(context)
        self._full = {key: name for name, key in own.items()}

    def value(self, data: Any, name: str, depth: int) -> Any:
        if depth > DEEPEST:
            raise _refused(name, "...", f"at most {DEEPEST} operations within each other")
        if data is None or isinstance(data, bool | int | float | str):
            return data
        if isinstance(data, list):
            return [self.value(each, f"{name}[{n}]", depth + 1) for n, each in enumerate(data)]
        if not isinstance(data, dict) or not data:
            raise _refused(name, data, "a value, an operation or a record")
        for key, read_as in self._forms().items():
            if key in data:
                return read_as(data, name, depth + 1)
        raise _refused(name, sorted(data)[:4], f"one of the keys {', '.join(self._forms())}")

    def _forms(self) -> Mapping[str, Callable[[dict[str, Any], str, int], Any]]:
        return {
            "do": self._operation, "is": self._record, "tensor": _read_tensor,
            "choice": _read_choice, "number": _read_number, "weight": self._weight,
            "component": self._component, "tuple": self._tuple, "set": self._set, "map": self._map,
            **{key: partial(_read_named, key, known) for key, _, known in _NAMED},
        }  # fmt: skip

    def _operation(self, data: dict[str, Any], name: str, depth: int) -> Any:
        _only(data, name, {"do", "with", "first"})
        function = _registered(data["do"], name, kind=False)
        given = data.get("with", {})
        first = data.get("first", [])
        if not isinstance(given, dict) or not isinstance(first, list):
            raise _refused(f"{name}.with", given, "arguments by name")
        known = parameters(function)
        arguments = {}
        for key, each in given.items():
            where = f"{name}.{key}"
            if known and key not in known:
                raise _refused(where, key, f"one of {', '.join(known)}")
            arguments[key] = self.value(each, where, depth)
            _require_type(arguments[key], known.get(key, ""), where, self._context)
        if not known:
            some = [self.value(each, f"{name}[{n}]", depth) for n, each in enumerate(first)]
            return partial(function, *some, **arguments) if some or arguments else function
        if first:
            raise _refused(f"{name}.first", first, "arguments by name")
        # What comes before the first missing parameter is bound in order: the rest is given later.
        positional = []
        for key in known:
            if key not in arguments:
                break
            positional.append(arguments.pop(key))
        made = partial(function, *positional, **arguments)
        return made if positional or arguments else function

    def _record(self, data: dict[str, Any], name: str, depth: int) -> Any:
        kind = _registered(data["is"], name, kind=True)
        known = _stated_fields(kind)
        _only(data, name, {"is", *known})
        given = {}
        for key, type_name in known.items():
            if key in data:
                given[key] = self.value(data[key], f"{name}.{key}", depth)
                _require_type(given[key], type_name, f"{name}.{key}", self._context)
        try:
            return kind(**given)
        except TypeError as error:
            missing = [key for key in known if key not in given]
            raise _refused(name, missing, f"the fields {', '.join(known)}") from error

    def _weight(self, data: dict[str, Any], name: str, _depth: int) -> str:
        key = data["weight"]
        if not isinstance(key, str):
            raise _refused(name, key, "the name of a weight")
        if self._context is None:
            return key
        if key not in self._full:
            raise UnknownName.among("weight", key, self._full)
        return self._full[key]

    def _component(self, data: dict[str, Any], name: str, _depth: int) -> ComponentContext | None:
        other = data["component"]
        if not isinstance(other, str):
            raise _refused(name, other, "the name of a component")
        if self._context is None or not other:
            return self._context
        found = self._context.sibling(other)
        if found is None:
            raise UnknownName.among("component", other, self._context.bound.calls)
        return found

    def _items(self, data: dict[str, Any], key: str, name: str, depth: int) -> list[Any]:
        _only(data, name, {key})
        if not isinstance(data[key], list):
            raise _refused(name, data[key], "a list")
        found: list[Any] = self.value(data[key], name, depth)
        return found

    def _tuple(self, data: dict[str, Any], name: str, depth: int) -> tuple[Any, ...]:
        return tuple(self._items(data, "tuple", name, depth))

    def _set(self, data: dict[str, Any], name: str, depth: int) -> frozenset[Any]:
        return frozenset(self._items(data, "set", name, depth))

    def _map(self, data: dict[str, Any], name: str, depth: int) -> dict[Any, Any]:
        items = self._items(data, "map", name, depth)
        if any(not isinstance(each, list) or len(each) != 2 for each in items):
            raise _refused(name, items[:2], "pairs")
        return dict(items)


def _only(data: dict[str, Any], name: str, known: set[str]) -> None:
    other = sorted(set(data) - known)
    if other:
        raise _refused(name, other, f"none but {', '.join(sorted(known))}")


def _registered(asked: Any, name: str, *, kind: bool) -> Any:
    of_kind = {each: made for each, made in OPERATIONS.items() if isinstance(made, type) is kind}
    asked = RENAMED.get(asked, asked) if isinstance(asked, str) else asked
    if not isinstance(asked, str) or asked not in of_kind:
        raise UnknownName.among(f"{name}.{'is' if kind else 'do'}", asked, of_kind)
    return of_kind[asked]


_CHECKED: Mapping[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "str": (str,), "bool": (bool,), "Tensor": (torch.Tensor,),
    "torch.dtype": (torch.dtype,), "NumberFormat": (NumberFormat,), "BlockFormat": (BlockFormat,),
    "ScaleLayout": (ScaleLayout,), "ComponentContext": (ComponentContext,), "Rounding": (Rounding,),
    "str | None": (str, type(None)), "int | None": (int, type(None)),
    "float | None": (int, float, type(None)), "Tensor | None": (torch.Tensor, type(None)),
}  # fmt: skip
_FUNCTIONS = ("Callable[", "Function", "Numbers", "Scales", "Codes")


def _require_type(value: Any, annotation: str, name: str, context: ComponentContext | None) -> None:
    """Refuse an argument of another type, where a plain one is stated."""
    if annotation == "ComponentContext" and context is None:
        return
    known = _CHECKED.get(annotation)
    numeric = annotation.startswith(("int", "float"))
    wrong = known is not None and not isinstance(value, known)
    wrong |= numeric and isinstance(value, bool)
    wrong |= annotation.startswith(_FUNCTIONS) and not callable(value)
    wrong |= annotation.startswith("tuple[") and not isinstance(value, tuple)
    wrong |= annotation.startswith("Mapping[") and not isinstance(value, dict)
    if wrong:
        raise _refused(name, value, annotation)


def _read_named(
    key: str, known: Mapping[str, Any], data: dict[str, Any], name: str, _depth: int
) -> Any:
    _only(data, name, {key})
    if not isinstance(data[key], str) or data[key] not in known:
        raise UnknownName.among(f"{name}.{key}", data[key], known)
    return known[data[key]]


def _read_number(data: dict[str, Any], name: str, _depth: int) -> float:
    if data["number"] not in _NOT_FINITE:
        raise _refused(name, data["number"], f"one of {', '.join(_NOT_FINITE)}")
    return float(data["number"])


@cache
def _choices() -> dict[str, type[Enum]]:
    """Return the classes of choices: those of switches, and of roundings."""
    held = {type(getattr(Switches(), each.name)) for each in fields(Switches)}
    found = {each.__name__: each for each in held if issubclass(each, Enum)}
    return {Rounding.__name__: Rounding, **found}


def _read_choice(data: dict[str, Any], name: str, _depth: int) -> Enum:
    _only(data, name, {"choice", "value"})
    kinds = _choices()
    if data["choice"] not in kinds:
        raise UnknownName.among(f"{name}.choice", data["choice"], kinds)
    try:
        return kinds[data["choice"]](data.get("value"))
    except ValueError as error:
        values = [str(each.value) for each in kinds[data["choice"]]]
        raise _refused(f"{name}.value", data.get("value"), ", ".join(values)) from error


def _read_tensor(data: dict[str, Any], name: str, _depth: int) -> torch.Tensor:
    _only(data, name, {"tensor", "shape", "runs"})
    dtype = _read_named("tensor", _DTYPES, {"tensor": data["tensor"]}, name, 0)
    shape: Any = data.get("shape")
    runs: Any = data.get("runs")
    fits = isinstance(shape, list) and all(type(n) is int and 0 <= n < 1 << 24 for n in shape)
    fits = fits and isinstance(runs, list) and len(runs) <= MOST_NUMBERS
    fits = fits and all(
        isinstance(run, list) and len(run) == 2 and type(run[1]) is int and run[1] > 0
        and (isinstance(run[0], bool | int | float) or run[0] in _NOT_FINITE)
        for run in runs
    )  # fmt: skip
    total = sum(run[1] for run in runs) if fits else -1
    if not fits or total != math.prod(shape) or total > 1 << 24:
        raise _refused(name, data.get("shape"), "a shape, and runs of numbers that fill it")
    values = [float(run[0]) if isinstance(run[0], str) else run[0] for run in runs]
    try:
        made = torch.tensor(values, dtype=dtype)
    except (TypeError, RuntimeError, OverflowError) as error:
        raise _refused(name, values[:4], f"numbers of {data['tensor']}") from error
    counts = torch.tensor([run[1] for run in runs], dtype=torch.int64)
    return made.repeat_interleave(counts).reshape(shape)
