"""Run the tests of one mutant after another, each in a fork of a process that has imported torch.

A new interpreter spends 3 s of processor time on torch, numba and Hypothesis before the first test
of the product begins. So this process imports them once, and nothing of the product: each fork
imports that from the worker's own copy of the tree, in which one file is mutated. Requests and
answers are lines of JSON.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from degarble.suites.mutation.mutants import Mutant

PRELOADED = (
    "numpy", "torch", "numba", "hypothesis", "hypothesis.strategies", "hypothesis.extra.numpy",
    "safetensors.torch", "yaml", "rich.console", "typer", "_pytest.assertion.rewrite",
)  # fmt: skip
MEMORY = 64 << 30  # of addresses: a mutated shape must not take the machine's memory
BROKEN = 70  # the status of a fork that failed outside pytest
HANG_SECONDS = 600.0  # of a test that was never seen before


@dataclass(frozen=True)
class Limit:
    """What a test may take before its mutant counts as timed out."""

    processor: float
    wall: float


class TrialPlugin:
    """Run the named tests in their order, and say which one begins or fails."""

    def __init__(
        self, wanted: list[str], limits: dict[str, Limit], known: set[str], out: int
    ) -> None:
        self._place = {name: index for index, name in enumerate(wanted)}
        self._limits = limits
        self._known = known
        self._out = out

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        """Trap: a mutant can rename a parametrised test, which then is one that no map knows."""
        kept = [i for i in items if i.nodeid in self._place or i.nodeid not in self._known]
        kept.sort(key=lambda item: self._place.get(item.nodeid, len(self._place)))
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        limit = self._limits.get(nodeid, Limit(HANG_SECONDS, HANG_SECONDS))
        signal.setitimer(signal.ITIMER_PROF, limit.processor)
        self._say("begin", nodeid, limit.wall)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._say("failed", report.nodeid, str(report.longrepr)[-300:])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._say("failed", report.nodeid, str(report.longrepr)[-300:])

    def _say(self, *words: object) -> None:
        os.write(self._out, (json.dumps(words) + "\n").encode())


class Worker:
    """One copy of the tree, and the forks that run in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tree = folder / "tree"
        self._known: dict[str, list[str]] = {}
        for name in PRELOADED:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        from degarble.suites.mutation import mutants, reach  # noqa: PLC0415  after the heavy ones

        self._mutants, self._reach = mutants, reach
        gc.freeze()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one request."""
        if request["do"] == "know":
            self._known = json.loads(Path(request["path"]).read_text(encoding="utf-8"))
            return {}
        if request["do"] == "record":
            return self._record(request)
        mutant = request["mutant"]
        if mutant is None:
            return self._trial(request, self._folder / "cache")
        return self._mutated(self._mutants.Mutant(**mutant), request)

    def _record(self, request: dict[str, Any]) -> dict[str, Any]:
        part, parts = request["part"]
        result = self._folder / "recorded.json"
        result.unlink(missing_ok=True)

        def child(out: int) -> int:
            recorder = self._reach.Recorder(self._tree, request["trace"], self._folder / "tmp")
            chooser = _Part(part, parts, out)
            recorder.start()
            try:
                status = self._pytest([request["file"]], [recorder, chooser])
            finally:
                recorder.stop()
            result.write_text(json.dumps(recorder.result()), encoding="utf-8")
            return status

        told, status = self._fork(child, self._folder / "cache", HANG_SECONDS * 2)
        if not result.exists():
            log = (self._folder / "log").read_text(encoding="utf-8", errors="replace")
            return {"error": f"{request['file']} ended with {status}\n{log[-3000:]}", "told": told}
        return {"map": json.loads(result.read_text(encoding="utf-8")), "status": status}

    def _mutated(self, mutant: Mutant, request: dict[str, Any]) -> dict[str, Any]:
        path = self._tree / mutant.file
        source = path.read_text(encoding="utf-8")
        text = self._mutants.mutated(source, mutant)
        if text is None:
            return {"outcome": "invalid"}
        became = _first_difference(source, text)
        if not request["tests"]:
            return {"outcome": "not reached", "became": became}
        cache = self._folder / "cache"
        if request["stale"]:
            cache = self._cache_without(request["stale"])
        state = path.stat()
        try:
            _replace(path, text)
            return {**self._trial(request, cache), "became": became}
        finally:
            _replace(path, source, state.st_mtime_ns)

    def _cache_without(self, stale: list[list[str]]) -> Path:
        """Copy the cache of compiled loops without those that the mutant could change."""
        cache = self._folder / "scratch"
        shutil.rmtree(cache, ignore_errors=True)
        shutil.copytree(self._folder / "cache", cache)
        for folder, stem in stale:
            for path in cache.glob(f"degarble/*/{loops_folder(self._tree, folder)}/{stem}.*"):
                path.unlink()
        return cache

    def _trial(self, request: dict[str, Any], cache: Path) -> dict[str, Any]:
        wanted = [test[0] for test in request["tests"]]
        limits = {name: Limit(*limit) for name, *limit in request["tests"]}
        files = list(dict.fromkeys(name.partition("::")[0] for name in wanted))
        known = {name for file in files for name in self._known.get(file, ())}

        def child(out: int) -> int:
            plugin = TrialPlugin(wanted, limits, known, out)
            return self._pytest([*files, *request["options"]], [plugin])

        begin = time.monotonic()
        collecting = request["collecting"]
        told, status = self._fork(child, cache, HANG_SECONDS, collecting)
        failed = [words[1:] for words in told if words[0] == "failed"]
        begun = [words[1] for words in told if words[0] == "begin"]
        return {
            "outcome": _outcome(status, failed),
            "failed": failed,
            "last": begun[-1] if begun else "",
            "run": len(begun),
            "seconds": round(time.monotonic() - begin, 2),
            "status": status,
        }

    def _pytest(self, words: list[str], plugins: list[Any]) -> int:
        base = self._folder / "tmp" / "pytest"
        # Pytest warns of plugins that were imported before it could rewrite their assertions.
        quiet = "ignore::pytest.PytestAssertRewriteWarning"
        given = [
            "-q",
            "-W",
            quiet,
            "-p",
            "no:cacheprovider",
            "--no-header",
            f"--basetemp={base}",
            *words,
        ]
        return int(pytest.main(given, plugins=plugins))

    def _fork(
        self, child: Callable[[int], int], cache: Path, hang: float, processor: float = 0.0
    ) -> tuple[list[Any], int]:
        """Run `child` in a fork; return what it said and its status, negative for a signal.

        `processor` is the time that it may take before its first test begins; 0 is no limit.
        """
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reader)
            self._become_child(cache)
            signal.setitimer(signal.ITIMER_PROF, processor)
            status = BROKEN
            try:
                status = child(writer)
            except BaseException:  # noqa: BLE001  the log tells it, and the status that it did
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        os.close(writer)
        told, status = _wait(pid, reader, hang)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what its tests started and left
        shutil.rmtree(self._folder / "tmp", ignore_errors=True)
        (self._folder / "tmp").mkdir()
        return told, status

    def _become_child(self, cache: Path) -> None:
        os.setsid()
        log = os.open(self._folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for old, new in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(old, new)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.environ["NUMBA_CACHE_DIR"] = str(cache)
        numba = sys.modules.get("numba")
        if numba is not None:
            numba.config.CACHE_DIR = str(cache)


def loops_folder(tree: Path, folder: str) -> str:
    """Return numba's name for the compiled loops of a folder of the tree."""
    from numba.core import caching  # noqa: PLC0415  heavy

    locator: Any = caching._CacheLocator
    return str(locator.get_suitable_cache_subpath(str(tree / ".types/degarble" / folder / "x.py")))


class _Part:
    """Keep one part of a file's tests: a long file is recorded by several workers."""

    def __init__(self, part: int, parts: int, out: int) -> None:
        self._part, self._parts, self._out = part, parts, out

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = items[self._part :: self._parts]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        os.write(self._out, (json.dumps(["begin", nodeid, 2 * HANG_SECONDS]) + "\n").encode())


def _wait(pid: int, reader: int, hang: float) -> tuple[list[Any], int]:
    """Read what a fork says until it ends; kill it where one test takes far longer than before."""
    text, limit, since = b"", hang, time.monotonic()
    while True:
        ready, _, _ = select.select([reader], [], [], 0.05)
        if ready and (said := os.read(reader, 65536)):
            text += said
            latest = json.loads(text[:-1].rpartition(b"\n")[2]) if text.endswith(b"\n") else []
            limit = latest[2] if latest[:1] == ["begin"] else limit
            since = time.monotonic()
        elif ready:
            time.sleep(0.02)  # closed: it is about to end
        ended, state = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if time.monotonic() - since > limit:
            os.killpg(pid, signal.SIGKILL)
            _, state = os.waitpid(pid, 0)
            break
    os.set_blocking(reader, False)
    with contextlib.suppress(BlockingIOError):
        while said := os.read(reader, 65536):
            text += said
    os.close(reader)
    return [json.loads(line) for line in text.split(b"\n")[:-1]], os.waitstatus_to_exitcode(state)


def _outcome(status: int, failed: list[Any]) -> str:
    if status in (-signal.SIGPROF, -signal.SIGKILL):
        return "timed out"
    if status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) and not failed:
        return "survived"
    return "broken" if status == BROKEN else "killed"


def _first_difference(before: str, after: str) -> str:
    pairs = zip_longest(before.splitlines(), after.splitlines(), fillvalue="")
    return next(new.strip() for old, new in pairs if old != new)


def _replace(path: Path, text: str, modified: int | None = None) -> None:
    """Write a module, and delete what was compiled from it: two mutants can be of one size."""
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    if modified is not None:
        os.utime(new, ns=(modified, modified))
    new.replace(path)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def serve(folder: Path) -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    worker = Worker(folder)
    for line in sys.stdin:
        try:
            answer = worker.answer(json.loads(line))
        except Exception:  # noqa: BLE001  this mutant is not judged, the next ones are
            answer = {"outcome": "broken", "failed": [], "error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
