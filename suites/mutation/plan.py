"""Choose the rooms, and for each mutant the tests that can kill it."""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from degarble.suites.mutation.mutants import Mutant


@dataclass(frozen=True)
class Room:
    """Folders or files of the product, and the suites that hold them."""

    modules: tuple[str, ...]
    suites: tuple[str, ...]


ROOMS = {
    "formats": Room(("harness/formats",), ("suites/formats",)),
    "budget": Room(("harness/engine/budget",), ("suites/engine/budget",)),
    "diagnose": Room(("harness/engine/diagnose",), ("suites/engine/diagnose",)),
    "audit": Room(("harness/checkpoint/audit",), ("suites/checkpoint/audit",)),
}
LOOPS = "degarble.harness.base.compiled_loops"
LEAST_PROCESSOR, LEAST_WALL = 10.0, 60.0  # seconds
PROCESSOR_FACTOR, WALL_FACTOR = 5.0, 20.0


def python_files(root: Path, places: Iterable[str]) -> list[str]:
    """Return the modules at or below `places`, shown from `root`."""
    found = set()
    for place in places:
        path = root / place
        paths = path.rglob("*.py") if path.is_dir() else [path]
        found |= {str(file.relative_to(root)) for file in paths}
    return sorted(found)


class Sources:
    """What the modules of the tree import, and where they mention a name."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._trees: dict[str, ast.Module] = {}
        self._imports: dict[str, set[str]] = {}

    def tree(self, file: str) -> ast.Module:
        """Return the syntax tree of a file, parsed once."""
        if file not in self._trees:
            self._trees[file] = ast.parse((self._root / file).read_text(encoding="utf-8"))
        return self._trees[file]

    def imports(self, file: str) -> set[str]:
        """Return the files that `file` imports; imports inside functions count."""
        if file not in self._imports:
            names = set()
            for node in ast.walk(self.tree(file)):
                if isinstance(node, ast.Import):
                    names |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    names |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
            self._imports[file] = {path for name in names if (path := self._path(name))}
        return self._imports[file]

    def _path(self, name: str) -> str:
        if not name.startswith("degarble."):
            return ""
        path = name.removeprefix("degarble.").replace(".", "/")
        return next((p for p in (f"{path}.py",) if (self._root / p).is_file()), "")

    def closure(self, file: str) -> set[str]:
        """Return `file` and all files that it imports, directly or not."""
        found, waiting = {file}, [file]
        while waiting:
            for path in self.imports(waiting.pop()) - found:
                found.add(path)
                waiting.append(path)
        return found

    def mentions(self, file: str, names: set[str]) -> set[int]:
        """Return the lines of a file's functions that mention one of `names`."""
        lines: set[int] = set()
        for function in ast.walk(self.tree(file)):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.Name | ast.Attribute):
                        named = node.id if isinstance(node, ast.Name) else node.attr
                        lines |= {node.lineno} if named in names else set()
        return lines

    def callers(self, file: str, name: str) -> set[str]:
        """Return `name` and the functions of its file that call it, directly or not."""
        found = {name}
        while True:
            functions = [n for n in ast.walk(self.tree(file)) if isinstance(n, ast.FunctionDef)]
            more = {
                function.name
                for function in functions
                for node in ast.walk(function)
                if isinstance(node, ast.Name) and node.id in found
            }
            if more <= found:
                return found
            found |= more

    def defined(self, file: str, line: int) -> set[str]:
        """Return the names that the statement at module or class level around `line` defines."""
        names: set[str] = set()
        for statement in ast.walk(self.tree(file)):
            if not isinstance(statement, ast.stmt):
                continue
            if statement.lineno <= line <= (statement.end_lineno or 0):
                if isinstance(statement, ast.Assign | ast.AnnAssign):
                    names |= {
                        node.id
                        for node in ast.walk(statement)
                        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
                    }
                elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
                    names.add(statement.name)
        return names


@dataclass(frozen=True)
class Test:
    """A test as it was recorded without a mutant."""

    name: str
    seconds: float
    wall: float
    elsewhere: frozenset[str]  # modules in the processes that it starts, or *

    @property
    def file(self) -> str:
        """The file of suites that it is in."""
        return self.name.partition("::")[0]

    def limits(self) -> list[Any]:
        """Return its name, and the seconds of processor and wall that it may take."""
        processor = LEAST_PROCESSOR + PROCESSOR_FACTOR * self.seconds
        return [self.name, processor, LEAST_WALL + WALL_FACTOR * self.wall]


@dataclass
class Reach:
    """Which tests execute which lines of a room."""

    tests: dict[str, Test] = field(default_factory=dict)
    lines: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    imports: set[tuple[str, int]] = field(default_factory=set)
    users: dict[str, set[str]] = field(default_factory=dict)  # files of suites that load a module
    failed: list[str] = field(default_factory=list)
    names: dict[str, list[str]] = field(default_factory=dict)  # all tests of a file
    collecting: float = 0.0

    def add(self, file: str, recorded: dict[str, Any]) -> None:
        """Take what one part of one file of suites recorded."""
        usable = []
        for name, seconds, wall, passed, ran, elsewhere in recorded["tests"]:
            self.names.setdefault(file, []).append(name)
            usable.append(name if passed and ran else "")
            if usable[-1]:
                self.tests[name] = Test(name, seconds, wall, frozenset(elsewhere))
            elif not passed:
                self.failed.append(name)
        for module, lines in recorded["lines"].items():
            for line, indices in lines.items():
                reached = {usable[index] for index in indices} - {""}
                self.lines.setdefault((module, int(line)), set()).update(reached)
        self.imports |= {(module, line) for module, line in recorded["imports"]}
        for module in recorded["modules"]:
            self.users.setdefault(module, set()).add(file)
        self.collecting = max(self.collecting, recorded["collecting"])

    def at(self, file: str, lines: Iterable[int]) -> set[str]:
        """Return the tests that execute one of the lines."""
        return set().union(*(self.lines.get((file, line), set()) for line in lines))


class Selection:
    """Choose and order the tests of each mutant; tests that killed before come first."""

    def __init__(self, sources: Sources, reach: Reach, traced: list[str]) -> None:
        self._sources = sources
        self._reach = reach
        self._traced = traced
        self._killers: Counter[tuple[str, str]] = Counter()
        by_file: dict[str, set[str]] = {}
        for test in reach.tests.values():
            by_file.setdefault(test.file, set()).add(test.name)
        self._by_file = by_file

    def killed(self, mutant: Mutant, test: str) -> None:
        """Remember which test killed a mutant."""
        self._killers[mutant.file, test] += 1
        self._killers[f"{mutant.file}|{mutant.scope}", test] += 2

    def tests(self, mutant: Mutant) -> list[Test]:
        """Return the tests that can kill a mutant, the most promising first."""
        lines = range(mutant.lines[0], mutant.lines[1] + 1)
        direct = self._reach.at(mutant.file, lines)
        elsewhere = {mutant.file, "*"}
        others = {test.name for test in self._reach.tests.values() if test.elsewhere & elsewhere}
        if mutant.compiled:
            names = self._sources.callers(mutant.file, mutant.compiled)
            direct |= self._mentioning(mutant.file, names)
        if not mutant.scope:
            names = self._sources.defined(mutant.file, mutant.line)
            direct |= self._reach.at(mutant.file, self._sources.mentions(mutant.file, names))
        if not mutant.scope or any((mutant.file, line) in self._reach.imports for line in lines):
            for file in self._reach.users.get(mutant.file, ()):
                others |= self._by_file.get(file, set())
        return self._ordered(mutant, direct) + self._ordered(mutant, others - direct)

    def _mentioning(self, file: str, names: set[str]) -> set[str]:
        """Return the tests that run a line which names a compiled loop: none inside is traced."""
        found: set[str] = set()
        for module in self._traced:
            if module == file or file in self._sources.imports(module):
                found |= self._reach.at(module, self._sources.mentions(module, names))
        for suite, tests in self._by_file.items():
            if file in self._sources.imports(suite):
                found |= tests
        return found

    def _ordered(self, mutant: Mutant, names: set[str]) -> list[Test]:
        def rank(test: Test) -> tuple[float, str]:
            kills = self._killers[mutant.file, test.name]
            kills += self._killers[f"{mutant.file}|{mutant.scope}", test.name]
            return -(kills + 0.02) / (test.seconds + 0.05), test.name

        return sorted((self._reach.tests[name] for name in names), key=rank)


def digest(root: Path, files: Iterable[str]) -> str:
    """Return a digest of files: a map recorded for other texts is not used."""
    total = hashlib.sha256()
    for file in sorted(files):
        total.update(file.encode() + b"\0" + (root / file).read_bytes() + b"\0")
    return total.hexdigest()[:16]
