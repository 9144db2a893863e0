"""Build the import graph of the repository from syntax; deferred and type-only imports count.

Relative imports are rejected, since they hide the folder that they reach.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from degarble.suites.house.repository import nodes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

PACKAGE = "degarble"


def edges_of(source: ast.Module, known: Collection[str]) -> set[tuple[str, int]]:
    """Collect (module, line) of every import of this package; a name counts as its module."""
    found = set()
    for target, line in _imports(source):
        if target.split(".")[0] == PACKAGE:
            parent = target.rpartition(".")[0]
            is_name = target not in known and parent in known
            found.add((parent if is_name else target, line))
    return found


def _imports(source: ast.Module) -> Iterator[tuple[str, int]]:
    for plain in nodes(source, ast.Import):
        yield from ((alias.name, plain.lineno) for alias in plain.names)
    for named in nodes(source, ast.ImportFrom):
        if named.level:
            yield f"{PACKAGE}.<relative>", named.lineno
        yield from ((f"{named.module}.{alias.name}", named.lineno) for alias in named.names)
    for call in nodes(source, ast.Call):
        if _is_import_call(call.func):
            yield from (
                (argument.value, call.lineno)
                for argument in call.args[:1]
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            )


def _is_import_call(function: ast.expr) -> bool:
    names = {"import_module", "__import__", "run_module"}
    return (isinstance(function, ast.Attribute) and function.attr in names) or (
        isinstance(function, ast.Name) and function.id in names
    )
