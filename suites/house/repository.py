"""List the repository files as paths, module names and syntax trees.

Caches, the environment and outputs are left out.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
ROOT_PACKAGE = ROOT / ".types" / "degarble"  # degarble itself, beside links to the five folders
FOLDERS = ("harness", "references", "kernels", "suites", "reports")
TOP_FILES = (
    "conftest.py",
    "pyproject.toml",
    "constraints.txt",
    "Makefile",
    ".gitignore",
    "README.md",
    "NOTICE",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
)
TEXT_FOLDERS = ("docs", "changelog.d", ".ci", ".github")


def files_under(folder: Path) -> list[Path]:
    """Every file of a folder, without caches."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    )


@cache
def package_files() -> tuple[Path, ...]:
    """Every file of the five folders."""
    return tuple(path for folder in FOLDERS for path in files_under(ROOT / folder))


@cache
def modules() -> tuple[Path, ...]:
    """Every Python file of the five folders, the root package and the root conftest.py."""
    return (
        *(path for path in package_files() if path.suffix == ".py"),
        ROOT_PACKAGE / "__init__.py",
        ROOT / "conftest.py",
    )


@cache
def documents() -> tuple[Path, ...]:
    """Every Markdown file that people read."""
    top = [ROOT / name for name in TOP_FILES if name.endswith(".md")]
    return (*top, *(p for f in TEXT_FOLDERS for p in files_under(ROOT / f) if p.suffix == ".md"))


@cache
def texts_beside() -> tuple[Path, ...]:
    """Every text in the folders beside the five, without pictures."""
    files = (path for folder in TEXT_FOLDERS for path in files_under(ROOT / folder))
    return tuple(path for path in files if path.suffix != ".png")


@cache
def texts() -> tuple[Path, ...]:
    """Every file of the house, whatever its kind."""
    return (*package_files(), *(ROOT / name for name in TOP_FILES), *texts_beside())


def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file of `modules()`."""
    return _trees()[path]


@cache
def _trees() -> dict[Path, ast.Module]:
    """Parse all modules without the cycle collector, which would take five times as long.

    The trees stay until the process ends. They have millions of nodes, so they are set aside:
    later collections would walk them.
    """
    gc.collect()
    gc.disable()
    try:
        return {path: ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in modules()}
    finally:
        if "hypothesis" in sys.modules:  # conftest.py says why
            gc.freeze()
        gc.enable()


def nodes(source: ast.Module, *kinds: type[ast.AST]) -> Iterator[Any]:
    """Yield the nodes of these kinds, kind by kind; a tree is walked once for all who ask."""
    found = _by_kind(source)
    for kind in kinds:
        yield from found.get(kind, ())


@cache
def _by_kind(source: ast.Module) -> dict[type[ast.AST], list[Any]]:
    """Collect the nodes of a tree by their types, in the order of the text."""
    found = defaultdict[type[ast.AST], list[Any]](list)
    left: list[ast.AST] = [source]
    while left:
        node = left.pop()
        found[type(node)].append(node)
        for value in reversed(list(vars(node).values())):
            if isinstance(value, list):
                left += [each for each in reversed(value) if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST):
                left.append(value)
    return dict(found)


def name_of(path: Path) -> str:
    """Return a file's import name: harness/formats/codec.py is degarble.harness.formats.codec."""
    if path.parent == ROOT_PACKAGE:
        return "degarble"
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts == ["conftest"]:
        return "conftest"
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(["degarble", *parts])


def shown(path: Path) -> str:
    """A path as people write it, from the root of the repository."""
    return path.relative_to(ROOT).as_posix()
