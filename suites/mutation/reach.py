"""Record which lines each test of a file executes, so that a mutant runs those alone.

A value that is kept between tests hides what made it: the first test executes the lines, the
others use them. So a cached value, a fixture of wider scope and an import each have a node of their
own, and a test reaches the lines of every node that it uses. What stays hidden is a value that a
module keeps in a dictionary of its own. In another process no line is traced: a test that starts
Python runs for every mutant of the modules that are loaded there.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path
    from types import CodeType, FrameType

LINKS = ".types/degarble/"
_PYTHON_STARTS = ("subprocess.Popen", "os.posix_spawn", "os.exec")


@dataclass(eq=False)
class Node:
    """Lines that ran for one test, fixture, cached value or for imports; what else it used."""

    left: dict[CodeType, set[int]] = field(default_factory=dict)  # lines that have not run
    uses: set[Node] = field(default_factory=set)
    starts: int = 0  # of Python in other processes

    def whole(self) -> set[Node]:
        """Return this node and all that it uses, directly or not."""
        nodes, waiting = {self}, [self]
        while waiting:
            for node in waiting.pop().uses - nodes:
                nodes.add(node)
                waiting.append(node)
        return nodes


@dataclass
class Test:
    """One test of the recorded file."""

    name: str
    node: Node
    seconds: float = 0.0  # of processor time, traced
    wall: float = 0.0
    passed: bool = True
    ran: bool = False
    elsewhere: set[str] = field(default_factory=set)  # modules loaded in processes that it starts


class Recorder:
    """A pytest plugin that traces the modules `files` below `root`, for one file of suites."""

    def __init__(self, root: Path, files: list[str], spare: Path) -> None:
        self._told = spare  # a folder in which the processes that a test starts say what they load
        self.tests: list[Test] = []
        self._root = str(root.resolve()) + os.sep
        self._files = set(files)
        self._known: dict[CodeType, tuple[str, frozenset[int]] | None] = {}
        self._imports = Node()
        self._base = self._imports
        self._local = threading.local()
        self._fixtures: dict[Any, Node] = {}
        self._collecting = 0.0

    def start(self) -> None:
        """Trace from now on; before any module of the product is imported."""
        functools.lru_cache = self._lru_cache
        functools.cache = self._lru_cache(maxsize=None)
        functools.cached_property = partial(_KeptProperty, self)  # type: ignore[misc,assignment]
        sys.addaudithook(self._audit)
        (self._told / "sitecustomize.py").write_text(_TELL.format(folder=str(self._told)))
        before = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(self._told), before])
        threading.settrace(self._call)
        sys.settrace(self._call)

    def stop(self) -> None:
        """Trace no more."""
        sys.settrace(None)
        threading.settrace(None)

    # Nodes: each thread has a stack, on top of the test that is running.

    def _stack(self) -> list[Node]:
        stack: list[Node] | None = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack

    @contextmanager
    def within(self, node: Node) -> Iterator[Node]:
        """Give what runs now to `node`."""
        stack = self._stack()
        stack.append(node)
        try:
            yield node
        finally:
            stack.remove(node)

    def use(self, node: Node) -> None:
        """Say that what runs now uses what `node` computed."""
        self._node().uses.add(node)

    def _node(self) -> Node:
        stack = self._stack()
        return stack[-1] if stack else self._base

    def _lru_cache(self, maxsize: Any = 128, typed: bool = False) -> Any:
        """Stand for functools.lru_cache: a value is kept with the node of its computation."""
        if callable(maxsize):
            return self._lru_cache()(maxsize)

        def decorate(function: Callable[..., Any]) -> Any:
            def computed(*args: Any, **named: Any) -> tuple[Any, Node]:
                with self.within(Node()) as node:
                    return function(*args, **named), node

            pair: Any = _REAL_LRU_CACHE(maxsize, typed)(computed)

            @functools.wraps(function)
            def cached(*args: Any, **named: Any) -> Any:
                value, node = pair(*args, **named)
                self.use(node)
                return value

            for name in ("cache_clear", "cache_info", "cache_parameters"):
                setattr(cached, name, getattr(pair, name))
            return cached

        return decorate

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.fork" or (event in _PYTHON_STARTS and _is_python(arguments)):
            self._node().starts += 1

    # Tracing

    def _call(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        code = frame.f_code
        try:
            known = self._known[code]
        except KeyError:
            known = self._known[code] = self._look_up(code)
        if known is None:
            return None
        if code.co_name == "<module>":
            return self._import(frame, code, known[1])
        return self._lines(self._node(), frame, code, known[1])

    def _look_up(self, code: CodeType) -> tuple[str, frozenset[int]] | None:
        name = code.co_filename
        if not name.startswith(self._root):
            return None
        file = name[len(self._root) :].removeprefix(LINKS)
        if file in self._files:
            return file, frozenset(line for _, _, line in code.co_lines() if line)
        return (file, frozenset()) if code.co_name == "<module>" else None

    def _lines(self, node: Node, frame: FrameType, code: CodeType, lines: frozenset[int]) -> Any:
        left = node.left.get(code)
        if left is None:
            left = node.left[code] = set(lines)
        left.discard(frame.f_lineno)
        if not left:
            return None

        def step(frame: FrameType, event: str, _argument: Any) -> Any:
            if event == "line":
                left.discard(frame.f_lineno)
            return step

        return step

    def _import(self, frame: FrameType, code: CodeType, lines: frozenset[int]) -> Any:
        """What an import runs is used by every test of this process."""
        stack = self._stack()
        stack.append(self._imports)
        inner = self._lines(self._imports, frame, code, lines)

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            if inner is not None:
                inner(frame, event, argument)
            if event == "return":
                stack.pop()
            return step

        return step

    # Hooks of pytest

    def pytest_collection_finish(self) -> None:
        self._collecting = time.process_time()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        test = Test(item.nodeid, Node())
        test.node.uses.add(self._imports)
        self.tests.append(test)
        self._base = test.node
        begin, wall = time.process_time(), time.monotonic()
        try:
            return (yield)
        finally:
            test.seconds, test.wall = time.process_time() - begin, time.monotonic() - wall
            self._base = self._imports
            request = getattr(item, "_request", None)
            used = {fixture for name, fixture in self._used(item, request)}
            test.node.uses.update(self._fixtures[f] for f in used if f in self._fixtures)
            test.elsewhere = self._loaded_elsewhere(test.node)

    def _loaded_elsewhere(self, node: Node) -> set[str]:
        """Return what the started processes loaded; * where not all of them told it."""
        starts = sum(used.starts for used in node.whole())
        paths = list(self._told.glob("*.loaded"))
        texts = [path.read_text(encoding="utf-8") for path in paths]
        for path in paths:
            path.unlink()
        found = {self._short(line) for text in texts for line in text.splitlines()}
        return found | ({"*"} if starts > len(paths) else set())

    def _short(self, path: str) -> str:
        return path.removeprefix(self._root).removeprefix(LINKS)

    @staticmethod
    def _used(item: Any, request: Any) -> list[tuple[str, Any]]:
        static = item._fixtureinfo.name2fixturedefs if hasattr(item, "_fixtureinfo") else {}
        found = [(name, fixture) for name, several in static.items() for fixture in several]
        return found + list(getattr(request, "_fixture_defs", {}).items())

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        with self.within(self._fixtures.setdefault(fixturedef, Node())):
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests[-1]
        test.passed = test.passed and not report.failed
        test.ran = test.ran or (report.when == "call" and not report.skipped)

    def result(self) -> dict[str, Any]:
        """Return the tests, and for each traced file the tests that execute its lines."""
        lines: dict[str, dict[int, set[int]]] = {}
        for index, test in enumerate(self.tests):
            for node in test.node.whole() - {self._imports}:
                for file, line in self._executed(node):
                    lines.setdefault(file, {}).setdefault(line, set()).add(index)
        return {
            "tests": [
                [test.name, test.seconds, test.wall, test.passed, test.ran, sorted(test.elsewhere)]
                for test in self.tests
            ],
            "lines": {
                file: {line: sorted(tests) for line, tests in reached.items()}
                for file, reached in lines.items()
            },
            "imports": sorted(set(self._executed(self._imports))),
            "modules": sorted(self._loaded()),
            "collecting": self._collecting,
        }

    def _executed(self, node: Node) -> list[tuple[str, int]]:
        return [
            (known[0], line)
            for code, left in node.left.items()
            if (known := self._known[code]) is not None
            for line in known[1] - left
        ]

    def _loaded(self) -> set[str]:
        paths = (getattr(module, "__file__", None) or "" for module in sys.modules.values())
        return {self._short(path) for path in paths if path.startswith(self._root)}


class _KeptProperty:
    """Stand for functools.cached_property: an object keeps the number of the node, too."""

    def __init__(self, recorder: Recorder, function: Callable[[Any], Any]) -> None:
        self._recorder, self._function = recorder, function
        self._nodes: list[Node] = []
        self.__doc__ = function.__doc__

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self._name] = value

    def __get__(self, instance: Any, _owner: type | None = None) -> Any:
        if instance is None:
            return self
        kept, number = instance.__dict__, f"{self._name} node"
        if self._name not in kept:
            with self._recorder.within(Node()) as node:
                kept[self._name] = self._function(instance)
            kept[number] = len(self._nodes)
            self._nodes.append(node)
        if number in kept:
            self._recorder.use(self._nodes[kept[number]])
        return kept[self._name]


# Run by each Python that a test starts; the site that it hides is not needed by a test.
_TELL = """
import atexit, os, sys, tempfile
def _tell():
    paths = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    with tempfile.NamedTemporaryFile("w", suffix=".loaded", dir={folder!r}, delete=False) as file:
        file.write("\\n".join(path for path in paths if path.endswith(".py")))
atexit.register(_tell)
"""
_REAL_LRU_CACHE = functools.lru_cache


def _is_python(arguments: tuple[Any, ...]) -> bool:
    given = arguments[1] if len(arguments) > 1 else ()
    words = [arguments[0], *([given] if isinstance(given, str | bytes) else given)]
    return any("python" in os.fsdecode(word) or "degarble" in os.fsdecode(word) for word in words)
