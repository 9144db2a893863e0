"""Run a sample of mutants of the product against the suites that hold it.

    make mutation ARGS="--room formats --sample 200 --jobs 8 --json out/mutation.json"
    make mutation ARGS="--compare before.json after.json"

First every test of the chosen suites runs once, traced, without a mutant; then each mutant runs the
tests that execute its line, until one fails. A mutant that none of them fails has survived: it is
equivalent, or the suites have a hole there.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from degarble.suites.mutation import mutants as mutation
from degarble.suites.mutation import plan, results
from degarble.suites.mutation.worker import loops_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from degarble.suites.mutation.mutants import Mutant

ROOT = Path(__file__).resolve().parents[2]
TREE = ("harness", "references", "kernels", "reports", "suites", "docs", ".types", ".ci", ".github")
FILES = (
    "conftest.py",
    "pyproject.toml",
    "Makefile",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
)
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
PARTS = 4  # of a file of suites, recorded by as many workers


class WorkerEnded(Exception):
    """A worker's process is gone; another worker can do its job."""


class Process:
    """A worker: a copy of the tree and the process that forks in it."""

    def __init__(self, folder: Path, template: Path) -> None:
        self.folder = folder
        self.tree = folder / "tree"
        (folder / "tmp").mkdir(parents=True)
        (folder / "cache").mkdir(mode=0o700)
        # Links save the space; a mutated file is a new one, so the others keep theirs.
        shutil.copytree(template, self.tree, symlinks=True, copy_function=os.link)
        given = os.environ.get("PYTHONPATH", "")
        kept = [path for path in given.split(os.pathsep) if path and not _is_ours(Path(path))]
        environment = {
            **{name: value for name, value in os.environ.items() if name != "CI"},
            **dict.fromkeys(THREADS, "1"),
            "PYTHONPATH": os.pathsep.join([str(self.tree / ".types"), *kept]),
            "NUMBA_CACHE_DIR": str(folder / "cache"),
            "XDG_CACHE_HOME": str(folder / "others"),
            "CUDA_VISIBLE_DEVICES": "",  # workers by the dozen would share one GPU
            "TMPDIR": str(folder / "tmp"),
            "PYTHONHASHSEED": "0",
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._errors = (folder / "errors").open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "degarble.suites.mutation.worker", str(folder)],
            cwd=self.tree,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send one request and wait for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            errors = (self.folder / "errors").read_text(encoding="utf-8")
            raise WorkerEnded(f"a worker ended\n{errors[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()


def _is_ours(path: Path) -> bool:
    return path.resolve().is_relative_to(ROOT) and path.name == ".types"


class Pool:
    """Workers that take jobs from one queue."""

    def __init__(self, folder: Path, jobs: int) -> None:
        template = folder / "template"
        _copy_tree(template)
        with ThreadPoolExecutor(jobs) as threads:
            folders = [folder / f"worker{number}" for number in range(jobs)]
            self.workers = list(threads.map(lambda place: Process(place, template), folders))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.close()

    def run(self, jobs: Iterable[Callable[[Process], None]]) -> None:
        """Carry out all jobs, each on the first worker that is free; later jobs may be appended."""
        waiting = jobs if isinstance(jobs, deque) else deque(jobs)
        stop: list[BaseException] = []

        def work(worker: Process) -> None:
            while not stop:
                try:
                    job = waiting.popleft()
                except IndexError:
                    return
                try:
                    job(worker)
                except (WorkerEnded, BrokenPipeError) as error:
                    print(error, file=sys.stderr)  # noqa: T201
                    waiting.appendleft(job)
                    return
                except BaseException as error:  # noqa: BLE001  raised below, by the main thread
                    stop.append(error)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if stop:
            raise stop[0]
        if waiting:
            raise WorkerEnded(f"all workers ended, {len(waiting)} jobs are left")


def _copy_tree(template: Path) -> None:
    """Copy what the suites read, and compile it once for all workers."""
    ignored = shutil.ignore_patterns("__pycache__", ".pytest_cache", ".mypy_cache", ".hypothesis")
    for name in TREE:
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, template / name, symlinks=True, ignore=ignored)
    for name in FILES:
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, template / name)
    compileall.compile_dir(template, quiet=2, workers=min(8, os.cpu_count() or 1))


@dataclass
class Chosen:
    """One room of this run: its modules and suites, their map, the mutants in drawn order."""

    name: str
    modules: list[str]
    suites: list[str]
    mutants: list[Mutant]
    size: int
    reach: plan.Reach = field(default_factory=plan.Reach)
    results: list[dict[str, Any]] = field(default_factory=list)

    def traced(self, sources: plan.Sources, product: list[str]) -> list[str]:
        """Return its modules, and those that import its compiled loops."""
        loops = {m for m in self.modules if plan.LOOPS in _imported_names(sources, m)}
        users = {file for file in product if loops & sources.imports(file)}
        return sorted({*self.modules, *users})


def _imported_names(sources: plan.Sources, file: str) -> set[str]:
    own = plan.LOOPS.removeprefix("degarble.").replace(".", "/") + ".py"
    return {plan.LOOPS} if own in sources.imports(file) else set()


class Run:
    """A mutation run: record, draw, try, tell."""

    def __init__(self, options: argparse.Namespace, pool: Pool, rooms: list[Chosen]) -> None:
        self._options = options
        self._pool = pool
        self._rooms = rooms
        self._sources = plan.Sources(ROOT)
        self._product = plan.python_files(ROOT, ("harness", "references"))
        self._lock = threading.Lock()
        self._begin = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line with the seconds that have passed."""
        print(f"{time.monotonic() - self._begin:6.0f} s  {text}", file=sys.stderr, flush=True)  # noqa: T201

    def record(self) -> None:
        """Run every test once, traced."""
        parts = PARTS if self._options.jobs > PARTS else 1
        jobs = []
        for room in self._rooms:
            traced = room.traced(self._sources, self._product)
            # Long files first: the last job decides when all are done.
            for file in sorted(room.suites, key=lambda f: -(ROOT / f).stat().st_size):
                jobs += [self._recording(room, file, traced, (n, parts)) for n in range(parts)]
        self._pool.run(jobs)
        for room in self._rooms:
            seconds = sum(test.seconds for test in room.reach.tests.values())
            self.say(f"{room.name}: {len(room.reach.tests)} tests, {seconds:.0f} s traced")
            for name in room.reach.failed:
                self.say(f"left out, because it fails without a mutant: {name}")
        share_caches([(worker.folder / "cache", worker.tree) for worker in self._pool.workers])
        names = {file: n for room in self._rooms for file, n in room.reach.names.items()}
        path = self._pool.workers[0].folder.parent / "names.json"
        path.write_text(json.dumps(names), encoding="utf-8")
        self._pool_know(path)

    def _pool_know(self, path: Path) -> None:
        for worker in self._pool.workers:
            worker.ask(do="know", path=str(path))

    def _recording(
        self, room: Chosen, file: str, traced: list[str], part: tuple[int, int]
    ) -> Callable[[Process], None]:
        def job(worker: Process) -> None:
            answer = worker.ask(do="record", file=file, trace=traced, part=part)
            if "map" not in answer or answer["status"] not in (0, 1, 5):
                why = answer.get("error", f"pytest ended with {answer.get('status')}")
                self.say(f"left out: {file}: {why}")
            if "map" not in answer:
                return
            with self._lock:
                room.reach.add(file, answer["map"])
                seconds = sum(test[1] for test in answer["map"]["tests"])
                self.say(f"recorded {file}, part {part[0] + 1} of {part[1]}: {seconds:.0f} s")

        return job

    def try_mutants(self) -> None:
        """Run the tests of each drawn mutant; draw another one for each that is no Python."""
        waiting: deque[Callable[[Process], None]] = deque()
        first: list[tuple[float, str, Callable[[Process], None]]] = []
        for room in self._rooms:
            traced = room.traced(self._sources, self._product)
            selection = plan.Selection(self._sources, room.reach, traced)
            wanted = len(room.mutants) if room.size < 0 else room.size
            drawn = iter(room.mutants)
            for _, mutant in zip(range(wanted), drawn, strict=False):
                seconds = sum(test.seconds for test in selection.tests(mutant))
                trial = self._trial(room, mutant, selection, drawn, waiting)
                first.append((-seconds, mutant.key, trial))
        # Those that run longest where they survive come first, for an even end.
        waiting.extend(trial for *_, trial in sorted(first, key=lambda entry: entry[:2]))
        self._pool.run(waiting)
        for room in self._rooms:
            room.results.sort(key=lambda result: (result["file"], result["line"], result["key"]))

    def _trial(
        self,
        room: Chosen,
        mutant: Mutant,
        selection: plan.Selection,
        drawn: Iterator[Mutant],
        waiting: deque[Callable[[Process], None]],
    ) -> Callable[[Process], None]:
        def job(worker: Process) -> None:
            with self._lock:
                tests = selection.tests(mutant)
            if self._options.seconds:
                tests = _within(tests, self._options.seconds)
            answer = worker.ask(
                do="trial",
                mutant=asdict(mutant),
                tests=[test.limits() for test in tests],
                stale=self._stale(mutant.file),
                options=["-x", "--tb=line"],
                collecting=plan.LEAST_PROCESSOR + plan.PROCESSOR_FACTOR * room.reach.collecting,
            )
            with self._lock:
                self._take(room, mutant, selection, answer, len(tests))
                if answer["outcome"] == "invalid":
                    other = next(drawn, None)
                    if other is not None:
                        waiting.append(self._trial(room, other, selection, drawn, waiting))

        return job

    def _take(
        self,
        room: Chosen,
        mutant: Mutant,
        selection: plan.Selection,
        answer: dict[str, Any],
        tests: int,
    ) -> None:
        if answer["outcome"] == "invalid":
            return
        test = answer["failed"][0][0] if answer.get("failed") else answer.get("last", "")
        test = test if answer["outcome"] in results.DETECTED else ""
        if test:
            selection.killed(mutant, test)
        record = {
            **asdict(mutant), "room": room.name, "outcome": answer["outcome"], "test": test,
            "became": answer.get("became", ""), "chosen": tests, "run": answer.get("run", 0),
            "seconds": answer.get("seconds", 0.0), "status": answer.get("status"),
        }  # fmt: skip
        room.results.append(record)
        done = sum(len(room.results) for room in self._rooms)
        self.say(f"{done:4} {answer.get('seconds', 0):6.1f} s  {results.shown(record)}")
        if done % 25 == 0:  # a run that is cut keeps what it has
            self.write()

    def write(self) -> str:
        """Write every result so far as JSON, and return the table."""
        found = [result for room in self._rooms for result in room.results]
        population = {room.name: len(room.mutants) for room in self._rooms}
        facts = {
            "seed": self._options.seed, "sample": self._options.sample,
            "jobs": self._options.jobs, "seconds": round(time.monotonic() - self._begin),
            "limit": self._options.seconds, "python": platform.python_version(),
            "population": population, "excluded": [n for r in self._rooms for n in r.reach.failed],
        }  # fmt: skip
        text = json.dumps({**facts, "mutants": found}, indent=1)
        self._options.json.parent.mkdir(parents=True, exist_ok=True)
        self._options.json.write_text(text + "\n", encoding="utf-8")
        return results.table(found, population)

    def _stale(self, file: str) -> list[list[str]]:
        """Name the compiled loops that could contain code or constants of `file`."""
        return [
            [str(Path(loops).parent), Path(loops).stem]
            for loops in self._product
            if _imported_names(self._sources, loops) and file in self._sources.closure(loops)
        ]

    def control(self) -> None:
        """Run every test that killed alone with its like: one that fails without a mutant lied."""
        killers: dict[str, set[str]] = {}
        for room in self._rooms:
            for result in room.results:
                if result["outcome"] == "killed" and result["test"] in room.reach.tests:
                    killers.setdefault(result["test"].partition("::")[0], set()).add(result["test"])
        unsteady: set[str] = set()

        def controlling(tests: list[plan.Test]) -> Callable[[Process], None]:
            def job(worker: Process) -> None:
                answer = worker.ask(
                    do="trial", mutant=None, tests=[test.limits() for test in tests], stale=[],
                    options=["--tb=line"], collecting=0.0,
                )  # fmt: skip
                with self._lock:
                    unsteady.update(name for name, _ in answer["failed"])
                    if answer["outcome"] == "timed out":
                        unsteady.add(answer["last"])

            return job

        known = {name: t for room in self._rooms for name, t in room.reach.tests.items()}
        self._pool.run(
            [controlling([known[n] for n in sorted(names)]) for names in killers.values()]
        )
        for room in self._rooms:
            for result in room.results:
                if result["test"] in unsteady:
                    result["outcome"] = "broken"
        for name in sorted(unsteady):
            self.say(f"its kills do not count, because it failed without a mutant: {name}")


def _within(tests: list[plan.Test], seconds: float) -> list[plan.Test]:
    kept: list[plan.Test] = []
    total = 0.0
    for test in tests:
        total += test.seconds
        if total > seconds and kept:
            break
        kept.append(test)
    return kept


def share_caches(caches: list[tuple[Path, Path]]) -> None:
    """Give each worker the loops that any of them has compiled.

    Numba names a cache after the folder of the source, which is another one in each worker's tree.
    """
    folders = [
        str(path.parent.relative_to(caches[0][1]))
        for top in ("harness", "references")
        for path in (caches[0][1] / top).rglob("*.py")
    ]
    for folder in sorted(set(folders)):
        best: dict[tuple[str, str], tuple[int, Path]] = {}
        for cache, tree in caches:
            for index in cache.glob(f"degarble/*/{loops_folder(tree, folder)}/*.nbi"):
                key = (index.parent.parent.name, index.name)
                best[key] = max(best.get(key, (0, index)), (index.stat().st_size, index))
        for cache, tree in caches:
            for (digest, _), (_, index) in best.items():
                place = cache / "degarble" / digest / loops_folder(tree, folder)
                if place == index.parent:
                    continue
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
                for path in index.parent.glob(f"{index.stem}.*"):
                    shutil.copy2(path, place / path.name)


def _chosen(options: argparse.Namespace) -> list[Chosen]:
    names = options.room or list(plan.ROOMS)
    size = -1 if options.sample == "all" else int(options.sample)
    chosen = []
    for name in names:
        room = plan.ROOMS[name]
        modules = plan.python_files(ROOT, room.modules)
        if options.module:
            inside = set(plan.python_files(ROOT, options.module))
            modules = [module for module in modules if module in inside]
        files = plan.python_files(ROOT, options.suites or room.suites)
        suites = [file for file in files if Path(file).name.startswith("test_")]
        mutants = [mutant for module in modules for mutant in mutation.mutants_of(ROOT, module)]
        if mutants:
            chosen.append(
                Chosen(name, modules, suites, mutation.drawn(mutants, options.seed), size)
            )
    return chosen


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--room", action="append", choices=list(plan.ROOMS), help="default: all four")
    add("--module", action="append", help="only the mutants of this file or folder of the rooms")
    add("--suites", action="append", help="these files or folders instead of the room's own")
    add("--sample", default="200", help="mutants of each room, or all; default 200")
    add("--seed", type=int, default=0, help="of the sample; default 0")
    add("--seconds", type=float, default=0.0, help="most seconds of tests a mutant runs; 0: all")
    add("--jobs", type=int, default=2, help="processes")
    add("--json", type=Path, default=Path("out/mutation.json"), help="where each mutant is written")
    add("--work", type=Path, help="folder for the copies of the tree; default: a new one in TMPDIR")
    add("--compare", nargs=2, type=Path, metavar="JSON", help="hold two runs against each other")
    return parser.parse_args()


def main() -> int:
    """Run the command."""
    options = _arguments()
    if options.compare:
        text, kept = results.compare(*options.compare)
        print(text)  # noqa: T201
        return 0 if kept else 1
    if find_spec("cosmic_ray") is None:
        print("cosmic-ray is not installed: make setup EXTRAS=dev,gpu,mutation", file=sys.stderr)  # noqa: T201
        return 2
    rooms = _chosen(options)
    with ExitStack() as stack:
        work = options.work or stack.enter_context(tempfile.TemporaryDirectory(prefix="mutation"))
        run = Run(options, stack.enter_context(Pool(Path(work).resolve(), options.jobs)), rooms)
        run.record()
        run.try_mutants()
        run.control()
        print(run.write())  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
