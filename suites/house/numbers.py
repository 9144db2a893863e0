"""Limits on the length of files, functions, signatures and docstrings.

An exception needs a reason, and is removed when it is no longer needed. Ruff checks the length of a
line (E501).
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

FILE_LINES = 1000
FUNCTION_LINES = 60
DEVICE_BODY_LINES = 200
PARAMETERS = 6
MODULE_DOCSTRING_LINES = 40
FUNCTION_DOCSTRING_LINES = 20


@dataclass(frozen=True)
class Offence:
    """One number that is exceeded: where, which, by what value."""

    place: str
    what: str
    value: int
    limit: int

    def __str__(self) -> str:
        return f"{self.place}: {self.what} {self.value}, limit {self.limit}"


# (place, what) to (limit, reason). A place is a file, or a file and a function's dotted name.
EXCEPTIONS: dict[tuple[str, str], tuple[int, str]] = {
    ("harness/vllm/bound/linears.py::DegarbleLinear.create_weights", "parameters"): (
        7,
        "vLLM calls it, by place or by name",
    ),
    ("harness/api.py::capture", "parameters"): (
        7,
        "keywords of the public surface, each of which stands for itself",
    ),
}


def offences(file: str, text: str, source: ast.Module | None = None) -> Iterator[Offence]:
    """Yield every number of a Python file that is over its limit, exceptions not applied.

    `source` is the text's tree, where the caller has it.
    """
    yield from _over(file, "file lines", len(text.splitlines()), FILE_LINES)
    source = ast.parse(text) if source is None else source
    docstring = ast.get_docstring(source, clean=False) or ""
    yield from _over(file, "docstring lines", _count(docstring), MODULE_DOCSTRING_LINES)
    if not docstring and "/test_" not in file:  # a suite's name says what it proves
        yield Offence(file, "docstring missing", 0, 1)
    for name, function in _functions(source, ""):
        yield from _function_offences(f"{file}::{name}", function)


def accepted(offence: Offence) -> bool:
    """Return whether the table of exceptions covers an offence."""
    limit, _ = EXCEPTIONS.get((offence.place, offence.what), (offence.limit, ""))
    return offence.what != "docstring missing" and offence.value <= limit


def _function_offences(
    place: str, function: ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[Offence]:
    device = any(_is_device(decorator) for decorator in function.decorator_list)
    limit = DEVICE_BODY_LINES if device else FUNCTION_LINES
    yield from _over(place, "function lines", _own_lines(function), limit)
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    names += [a.arg for a in (given.vararg, given.kwarg) if a]
    count = len([name for name in names if name not in ("self", "cls")])
    yield from _over(place, "parameters", count, PARAMETERS)
    docstring = _count(ast.get_docstring(function, clean=False) or "")
    yield from _over(place, "docstring lines", docstring, FUNCTION_DOCSTRING_LINES)


def _own_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count from def to end, without the functions inside, which are judged by themselves."""
    inner = [function for _, function in _functions(function, "") if function.end_lineno]
    taken = {n for node in inner for n in range(node.lineno, (node.end_lineno or 0) + 1)}
    own = set(range(function.lineno, (function.end_lineno or function.lineno) + 1))
    return len(own - taken)


def _functions(
    node: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):  # holds no function that has a name
            continue
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{prefix}{child.name}", child
        inside = prefix
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inside = f"{prefix}{child.name}."
        yield from _functions(child, inside)


def _is_device(decorator: ast.expr) -> bool:
    """Return whether a decorator is cute.kernel or cute.jit."""
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(target) in ("cute.kernel", "cute.jit")


def _count(docstring: str) -> int:
    return len(docstring.strip().splitlines())


def _over(place: str, what: str, value: int, limit: int) -> Iterator[Offence]:
    if value > limit:
        yield Offence(place, what, value, limit)
