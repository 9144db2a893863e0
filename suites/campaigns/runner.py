"""Run many seeded cases over processes, print a table and keep every failing case.

A campaign is the long form of a suite: thousands of generated inputs, far too many for `make test`.
Each case is named by its seed alone, so that a line of the report can be repeated by itself.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


@dataclass(frozen=True)
class CaseResult:
    """The outcome of one case: `ok`, or the kind of failure, with what is needed to repeat it."""

    seed: int
    kind: str
    outcome: str
    detail: str = ""
    seconds: float = 0.0


@dataclass
class CampaignReport:
    """All outcomes of a campaign."""

    name: str
    results: list[CaseResult] = field(default_factory=list)

    def failures(self) -> list[CaseResult]:
        """Return the cases that did not end as they should."""
        return [result for result in self.results if result.outcome != "ok"]

    def table(self) -> str:
        """Return counts by kind and outcome as Markdown."""
        outcomes = sorted({result.outcome for result in self.results} | {"ok"})
        counts = Counter((result.kind, result.outcome) for result in self.results)
        lines = [
            "| kind | cases | " + " | ".join(outcomes) + " |",
            "| --- " * (len(outcomes) + 2) + "|",
        ]
        for kind in sorted({result.kind for result in self.results}):
            cells = [counts[kind, outcome] for outcome in outcomes]
            lines.append(f"| {kind} | {sum(cells)} | " + " | ".join(map(str, cells)) + " |")
        total = [sum(r.outcome == outcome for r in self.results) for outcome in outcomes]
        lines.append(f"| all | {sum(total)} | " + " | ".join(map(str, total)) + " |")
        return "\n".join(lines)

    def write(self, out: Path) -> None:
        """Write the table, and every failing case as JSON."""
        out.mkdir(parents=True, exist_ok=True)
        failing = [asdict(result) for result in self.failures()]
        (out / f"{self.name}.json").write_text(
            json.dumps({"campaign": self.name, "cases": len(self.results), "failing": failing})
            + "\n",
            encoding="utf-8",
        )
        (out / f"{self.name}.md").write_text(self.table() + "\n", encoding="utf-8")


def arguments(description: str, *, count: int) -> argparse.ArgumentParser:
    """Return the options that every campaign has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--count", type=int, default=count, help="cases to run")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seed", type=int, default=0, help="the first case's seed")
    parser.add_argument("--out", type=Path, default=Path("out/campaigns"), help="where to write")
    parser.add_argument("--resume", action="store_true", help="keep what an earlier run wrote")
    return parser


def run_cases(
    name: str,
    case: Callable[[int], CaseResult],
    seeds: Sequence[int],
    jobs: int,
    out: Path | None = None,
    *,
    resume: bool = False,
) -> CampaignReport:
    """Run `case` for each seed in `jobs` spawned processes of one thread each.

    `case` is a module-level function, because a spawned process imports it by name. A process that
    dies is itself a result: its cases are run again, each in a process of its own. Below `out`
    each result is a line of NAME.jsonl as soon as it is known, for campaigns that are cut off: with
    `resume` these lines stay, and their cases do not run again.
    """
    for variable in THREADS:
        os.environ.setdefault(variable, "1")
    report = CampaignReport(name, _earlier(out, name) if resume else [])
    known = {result.seed for result in report.results}
    seeds = [seed for seed in seeds if seed not in known]
    with _lines(out, name, resume=resume) as lines:
        for seed, pooled in _pooled(case, seeds, jobs):
            result = pooled or _alone(case, seed)
            report.results.append(result)
            if lines is not None:
                lines.write(json.dumps(asdict(result)) + "\n")
    report.results.sort(key=lambda result: result.seed)
    return report


def run_campaign(
    name: str,
    case: Callable[[int], CaseResult],
    options: argparse.Namespace,
    *,
    seeds: Sequence[int] | None = None,
    wanted: Sequence[str] = ("ok",),
) -> int:
    """Run a campaign, write and print its report; return 1 where an outcome is not wanted."""
    if seeds is None:
        seeds = range(options.seed, options.seed + options.count)
    report = run_cases(name, case, seeds, options.jobs, options.out, resume=options.resume)
    report.write(options.out)
    sys.stdout.write(report.table() + "\n")
    return int(any(result.outcome not in wanted for result in report.results))


def _earlier(out: Path | None, name: str) -> list[CaseResult]:
    path = None if out is None else out / f"{name}.jsonl"
    if path is None or not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [CaseResult(**json.loads(line)) for line in lines]


@contextmanager
def _lines(out: Path | None, name: str, *, resume: bool) -> Iterator[TextIO | None]:
    if out is None:
        yield None
        return
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.jsonl"
    if not resume:
        path.unlink(missing_ok=True)
    with path.open("a", encoding="utf-8", buffering=1) as lines:
        yield lines


def _pooled(
    case: Callable[[int], CaseResult], seeds: Sequence[int], jobs: int
) -> Iterator[tuple[int, CaseResult | None]]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        waiting = {pool.submit(_timed, case, seed): seed for seed in seeds}
        for future in as_completed(waiting):
            try:
                yield waiting[future], future.result()
            except BrokenProcessPool:
                yield waiting[future], None


def _alone(case: Callable[[int], CaseResult], seed: int) -> CaseResult:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(_timed, case, seed).result()
        except BrokenProcessPool:
            return CaseResult(seed, "process", "died", "the process that ran this case ended")


def _timed(case: Callable[[int], CaseResult], seed: int) -> CaseResult:
    begin = time.perf_counter()
    try:
        result = case(seed)
    except Exception:  # noqa: BLE001  the other cases are worth their results
        result = CaseResult(seed, "stopped", "stopped", traceback.format_exc(limit=-4))
    seconds = time.perf_counter() - begin
    return CaseResult(result.seed, result.kind, result.outcome, result.detail, seconds)
