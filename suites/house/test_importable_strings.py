"""Every string that names one of our modules names an existing one: code, configs, documents.

Entry points, workers, `python -m`, mock targets and names in documents are strings to every tool;
after a move only this suite detects a name that no longer exists.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import MissingDependency
from degarble.kernels.runtime.modules import MODULES
from degarble.suites.house.repository import (
    FOLDERS,
    ROOT,
    documents,
    modules,
    name_of,
    nodes,
    package_files,
    shown,
    texts_beside,
    tree,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_NAME = re.compile(rf"(?<![\w./-])degarble\.(?:{'|'.join(FOLDERS)})(?:[.:]\w+)*")
_PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w/-]+\.py\b")
OTHERS = ("Makefile", "Dockerfile", "pyproject.toml", "compose.yaml")
ELSEWHERE = ("degarble.suites", "degarble.kernels")  # imported by their suites, some need the DSL
_IMPORT = re.compile(r"(?m)^\s*(?:from|import) degarble.*$")
NOT_THERE = {  # examples
    "harness/model/new.py",
    "suites/kernels/__init__.py",
    "degarble.suites.campaigns.NAME",
}
PLANTING = "suites/house/"  # its strings are offences, and patterns


@cache
def known() -> dict[str, Path]:
    return {name_of(path): path for path in modules()}


@cache
def packages() -> frozenset[str]:
    """Every folder as a package, namespaces too."""
    found = {"degarble"}
    folders = {path.parent.relative_to(ROOT).parts for path in package_files()}
    for name in (*known(), *(".".join(["degarble", *parts, "*"]) for parts in folders)):
        parts = name.split(".")
        found |= {".".join(parts[:end]) for end in range(1, len(parts))}
    return frozenset(found)


def text_files() -> list[Path]:
    return [*documents(), *texts_beside(), *(ROOT / name for name in OTHERS)]


def named(text: str) -> Iterator[str]:
    """Yield the names of modules in a text; one that a value continues ends before it."""
    for match in _NAME.finditer(text):
        name = match[0].replace(":", ".")
        if text[match.end() :].startswith("{"):
            name = name.rpartition(".")[0]
        yield name.rstrip(".")


def problem(name: str) -> str:
    """Say what is wrong with a name: its beginning is a module, and the module has the rest."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        head, rest = ".".join(parts[:end]), parts[end:]
        if head in known():
            if not rest or rest[0] in names_in(tree(known()[head])):
                return ""
            return f"{head} has no {rest[0]}"
        if head in packages():
            return f"{head} has no {rest[0]}" if rest else ""
    return "no such module"


def names_in(source: ast.Module) -> set[str]:
    """What a module binds at its top level, by any statement, or takes from elsewhere."""
    found = {n.name for n in nodes(source, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)}
    found |= {node.id for node in nodes(source, ast.Name) if isinstance(node.ctx, ast.Store)}
    imports = nodes(source, ast.Import, ast.ImportFrom)
    aliases = [alias for node in imports for alias in node.names]
    return found | {(alias.asname or alias.name).split(".")[0] for alias in aliases}


def texts() -> Iterator[tuple[Path, str]]:
    """Yield every file that may name a module, without its own imports, which floors.py judges."""
    for path in (*modules(), *text_files()):
        if not path.is_relative_to(ROOT / PLANTING):
            yield path, _IMPORT.sub("", path.read_text(encoding="utf-8"))


def test_every_name_leads_to_a_module() -> None:
    wrong = [
        f"{shown(path)}: {name}: {why}"
        for path, text in texts()
        for name in named(text)
        if name not in NOT_THERE and (why := problem(name))
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_every_path_leads_to_a_file() -> None:
    wrong = [
        f"{shown(path)}: {name}"
        for path, text in texts()
        for name in _PATH.findall(text)
        if not (ROOT / name).is_file() and name not in NOT_THERE
    ]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("degarble.harness.formats.codec", ""),
        ("degarble.harness.formats.codec.walk", "degarble.harness.formats.codec has no walk"),
        ("run: python -m degarble.harness.cli.main", ""),
        ("degarble.harness.runs.audit", "degarble.harness has no runs"),
        ("degarble.harness.cli.main:run", ""),
        ("degarble.harness.cli.main:walk", "degarble.harness.cli.main has no walk"),
    ],
)
def test_planted_names_are_judged(text: str, expected: str) -> None:
    assert [problem(name) for name in named(text)] == [expected]


def importable() -> list[str]:
    """Modules of the product that are named outside of imports, but for kernels."""
    found = set()
    for _, text in texts():
        for name in named(text):
            parts = name.split(".")
            heads = (".".join(parts[:end]) for end in range(len(parts), 1, -1))
            found |= {head for head in heads if head in known()}
    return sorted(name for name in found if not name.startswith(ELSEWHERE))


def test_every_module_that_a_string_names_imports() -> None:
    """vLLM's classes may be absent; nothing else may."""
    for name in importable():
        try:
            import_module(name)
        except MissingDependency:
            assert ".vllm." in name, name


def test_every_kernel_that_a_name_stands_for_is_there() -> None:
    prefixes = ("simt_", "sm90_", "sm100_")
    kernels = {
        path.stem: name_of(path)
        for path in modules()
        if path.is_relative_to(ROOT / "kernels") and path.stem.startswith(prefixes)
    }
    assert dict(MODULES) == kernels
