"""The kernel steps of a nightly run: the suites for this device, and measured rates.

`kernels` runs each suite file for the device in its own process, and each kernel of a contract, so
that a kernel that corrupts the device affects no other suite, and names each kernel whose suite
fails; one that hangs is killed with all its children, and fails. `figures` runs the nightly
benchmark, whose shares of a measured ceiling go into the history as `speed`. Without a GPU, or
without a suite for it, both steps are UNDECIDED, never green.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import entry_points
from itertools import groupby, product
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.history.ledger import Failure
from degarble.harness.history.records import SPEED
from degarble.harness.inference.processes import usable_cores
from degarble.harness.nightly.night import NightConfig, StepResult
from degarble.harness.report.number_text import share
from degarble.harness.report.progress import duration
from degarble.harness.report.verdict import Verdict
from degarble.kernels.runtime.modules import MODULES
from degarble.kernels.runtime.targets import SM90A, SM100A, target_of_device

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MARKERS = {SM90A.name: ("h200", "gpu"), SM100A.name: ("b200", "gpu")}  # gpu: of any device
PROCESSES = 32  # at once, and no more than cores: each compiles, and they share the device
SUITE_SECONDS, BENCH_SECONDS = 1800, 1800
NO_SUITES = (
    "No suites of kernels are installed. Run it in a checkout of degarble, after: pip install -e ."
)
_LONG = 200  # characters of what a failing case says
_FEW = 12  # processes that are left are named by then
_SLOWEST = 5  # suites that are listed with their times
_RUNNING: set[int] = set()  # sessions of suites
_STOPPED = Event()  # no suite begins any more
_SHARES = "degarble.harness.plugins.shares"
_KERNEL = attrgetter("kernel")
_NO_MEMORY = (
    r"CUDA (\w+ )*(error: )?out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
    r"|STATUS_ALLOC_FAILED"
)
_NO_CASES = 5  # status of pytest; 0 and 1 are answers


class KernelSuites(NamedTuple):
    """Where the suites of the kernels are: their folders, and modules to run with `python -m`."""

    folders: tuple[Path, ...]
    bench: str
    first_minute: str  # of a Blackwell GPU
    contracts: tuple[Path, ...] = ()  # files of laws: ids of cases begin with a kernel's name
    shares: Mapping[str, int] = MappingProxyType({})  # in how many processes a long suite runs
    forms: Path | None = None  # list of the forms that suites take from the kernel cache


def installed_suites() -> KernelSuites | None:
    """Return the suites that the package metadata names; None without metadata or suites.

    Metadata keeps the product from naming the test tree.
    """
    for point in entry_points(group="degarble.kernel_suites"):
        with suppress(ModuleNotFoundError):  # a wheel may be installed without the suites
            kernel_suites: KernelSuites = point.load()
            return kernel_suites
    return None


class SuiteRun(NamedTuple):
    """What one process runs: a file, the cases of one kernel in it, or a share of its cases."""

    path: Path
    of_kernel: str = ""
    share: str = ""

    @property
    def name(self) -> str:
        """Return the name of the suite: the kernel, or what the file is called after."""
        return self.of_kernel or self.path.stem.removeprefix("test_")

    @property
    def label(self) -> str:
        """Return the name of the suite and which share of it this is."""
        return f"{self.name} {self.share}" if self.share else self.name


@dataclass(frozen=True)
class Suite:
    """The result of a kernel's suite: cases, the first failure, and why cases were skipped."""

    kernel: str
    cases: int = 0
    failed: int = 0
    first: str = ""
    broken: str = ""  # why there is no answer
    left: str = ""  # how many cases were not decided, and why the first was not
    seconds: float = field(default=0.0, compare=False)  # of its longest process
    lacked_memory: bool = False  # of the device, which others used at the same time
    again: bool = False  # it ran a second time, after the others, since it had lacked memory

    @property
    def verdict(self) -> Verdict:
        """Return DIFFERS if a case failed or the suite broke off."""
        return Verdict.DIFFERS if self.failed or self.broken else Verdict.AGREES

    @property
    def sentence(self) -> str:
        """Return a summary of one line."""
        said = f"{self.failed:,} of {self.cases:,} cases fail, first {self.first}"
        if not self.failed:
            said = f"{self.cases:,} cases agree with their definitions"
        if self.broken:
            return f"{self.broken}; {said}" if self.cases else self.broken
        return f"{said}; {self.left}" if self.left else said


def kernels(config: NightConfig, _: Mapping[str, StepResult]) -> StepResult:
    """Run the suites of the kernels on this machine's device."""
    if not config.gpu:
        return _without("kernels")
    suites = installed_suites()
    if suites is None:
        return StepResult(Verdict.UNDECIDED, NO_SUITES)
    markers = MARKERS[target_of_device().name]
    every = _run_all(suites, markers, config.say)
    found = [suite for suite in every if suite.cases or suite.broken]
    if not found:
        text = " or ".join(markers)
        return StepResult(Verdict.UNDECIDED, f"No suite of kernels marked {text} is here.")
    wrong = [suite for suite in found if suite.verdict is not Verdict.AGREES]
    cases = sum(suite.cases for suite in found)
    sentence = f"{len(found)} suites of kernels agree with definitions in {cases:,} cases."
    if wrong:
        first = f"{wrong[0].kernel}: {wrong[0].sentence}"
        sentence = f"{len(wrong)} of {len(found)} suites of kernels fail. {first}."
    return StepResult(
        Verdict.DIFFERS if wrong else Verdict.AGREES,
        sentence,
        failures=tuple(
            Failure(f"kernels.{suite.kernel}", Verdict.DIFFERS, None, suite.sentence)
            for suite in wrong
        ),
        judged=tuple(f"kernels.{suite.kernel}" for suite in found),
        facts={"longest suites": _longest(found), **_again(found)},
        lines=tuple(f"{e.kernel}: {e.sentence}" for e in found if e in wrong or e.left),
        rows=tuple((suite.kernel, str(suite.verdict), suite.sentence) for suite in found),
    )


def _longest(found: Sequence[Suite]) -> str:
    """Say which suites took longest: they are the ones to divide among more processes."""
    slowest = sorted(found, key=lambda suite: -suite.seconds)[:_SLOWEST]
    return ", ".join(f"{suite.kernel} {duration(suite.seconds)}" for suite in slowest)


def _again(found: Sequence[Suite]) -> dict[str, str]:
    """Name the suites that ran a second time."""
    names = ", ".join(suite.kernel for suite in found if suite.again)
    return {"suites that lacked memory and ran again": names} if names else {}


def _run_all(
    suites: KernelSuites, markers: Sequence[str], say: Callable[[str], None] = lambda _line: None
) -> list[Suite]:
    """Run every suite of a device, what takes longest first; return results by name.

    What lacked memory of the device beside other suites runs again when those have ended, one
    process after the other, until one lacks it even then.
    """
    runs, ended = runs_of(suites, markers), Lock()
    left = list(runs)

    def ran(folder: Path, number: int) -> Suite:
        suite = run_suite(folder / f"{number}.xml", markers, runs[number])
        with ended:
            left.remove(runs[number])
            say(_ended_line(runs[number], suite, left, len(runs)))
        return suite

    try:
        with (
            TemporaryDirectory() as folder,
            ThreadPoolExecutor(min(PROCESSES, usable_cores())) as pool,
        ):
            try:
                found = list(pool.map(partial(ran, Path(folder)), range(len(runs))))
                lacking = [number for number, suite in enumerate(found) if suite.lacked_memory]
                left += [runs[number] for number in lacking]
                for number in lacking:  # in a thread that stop() reaches
                    again = pool.submit(ran, Path(folder), number).result()
                    found[number] = replace(again, again=True)
                    if again.lacked_memory:  # whoever has it keeps it
                        break
                return joined(found)
            except BaseException:  # an interrupted night ends what it started
                stop()
                raise
    finally:
        _STOPPED.clear()


def _ended_line(run: SuiteRun, suite: Suite, left: Sequence[SuiteRun], whole: int) -> str:
    """Say that a process ended, and which are left once they are few."""
    named = 0 < len(left) <= _FEW
    last = f", left: {', '.join(each.label for each in left)}" if named else ""
    return (
        f"kernels: {whole - len(left)} of {whole} processes have ended{last};"
        f" {run.label} after {duration(suite.seconds)}: {suite.verdict}, {suite.sentence}"
    )


def stop() -> None:
    """End the suites that run, and let no other begin."""
    _STOPPED.set()
    for group in tuple(_RUNNING):
        _end(group)


def joined(found: Sequence[Suite]) -> list[Suite]:
    """Return suites by name, all runs of a name as one; one without an answer is broken."""
    made = []
    for kernel, suites in groupby(sorted(found, key=_KERNEL), _KERNEL):
        shares = list(suites)
        suite = Suite(
            kernel,
            sum(share.cases for share in shares),
            sum(share.failed for share in shares),
            next((share.first for share in shares if share.first), ""),
            "; ".join(share.broken for share in shares if share.broken),
            "; ".join(share.left for share in shares if share.left),
            max(share.seconds for share in shares),
            again=any(share.again for share in shares),
        )
        if suite.left and not (suite.cases or suite.broken):
            suite = replace(suite, broken=f"skipped every case: {suite.left}")
        made.append(suite)
    return made


def runs_of(suites: KernelSuites, markers: Sequence[str]) -> list[SuiteRun]:
    """Return shares of long suites, then each kernel of the contracts, then other files."""
    files = sorted(files_for(suites.folders, markers), key=lambda path: -path.stat().st_size)
    runs = [SuiteRun(path, kernel) for path, kernel in product(suites.contracts, MODULES)]
    runs += [SuiteRun(path) for path in files if path not in suites.contracts]
    long = [run for run in runs if run.name in suites.shares]
    parts = ((run, suites.shares[run.name]) for run in long)
    shared = [
        run._replace(share=f"{number + 1}/{count}")
        for run, count in parts
        for number in range(count)
    ]
    return [*shared, *(run for run in runs if run not in long)]


def files_for(folders: Sequence[Path], markers: Sequence[str]) -> list[Path]:
    """Return the files with suites of a device."""
    there = [path for folder in folders for path in folder.rglob("test_*.py")]
    return [path for path in there if _is_marked(path, markers)]


def _is_marked(path: Path, markers: Sequence[str]) -> bool:
    text = path.read_text(encoding="utf-8")
    return any(f"mark.{marker}" in text for marker in markers)


def run_suite(report: Path, markers: Sequence[str], run: SuiteRun) -> Suite:
    """Run a file, or a part of it, in its own process, and say how long that took."""
    begun = time.monotonic()
    return replace(_ran(report, markers, run), seconds=time.monotonic() - begun)


def _ran(report: Path, markers: Sequence[str], run: SuiteRun) -> Suite:
    path, of_kernel, own_share = run
    kernel, which = run.name, f"share {own_share} " if own_share else ""
    if _STOPPED.is_set():
        return Suite(kernel, broken=f"{which}did not begin, since the night was stopped")
    line = [sys.executable, "-m", "pytest", "-q", "-m", " or ".join(markers)]
    if of_kernel:
        longer = [name for name in MODULES if of_kernel in name and name != of_kernel]
        line += ["-k", " and not ".join([of_kernel, *longer])]
    if own_share:
        line += ["-p", _SHARES, "--share", own_share]
    line += ["-p", "no:cacheprovider", "--junitxml", str(report), str(path)]
    report.unlink(missing_ok=True)  # of a first run
    environment = {k: v for k, v in os.environ.items() if k not in _NIGHT_VARIABLES}
    environment["CI"] = "true"  # a package that is missing fails its cases, instead of hiding them
    status, said = _ended(line, environment)
    if status is None:
        return Suite(kernel, broken=f"{which}did not end in {SUITE_SECONDS // 60} minutes")
    if status == _NO_CASES:
        return Suite(kernel)
    if status not in (0, 1) or not report.exists():
        last = " ".join(said.split())[-_LONG:]
        why = f"{which}broke off with status {status}: {last}"
        return Suite(kernel, broken=why, lacked_memory=_lacks_memory(said))
    suite = suite_of(kernel, report)
    # Pytest failed outside of any case, for example in a fixture's teardown.
    if status and suite.verdict is Verdict.AGREES:
        return Suite(kernel, broken=f"{which}ended with status {status}, and no case failed")
    return suite


def _ended(line: Sequence[str], environment: Mapping[str, str]) -> tuple[int | None, str]:
    """Run a suite; return status and output. None if it hangs: it is killed with its children."""
    with subprocess.Popen(  # noqa: S603  ours
        line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        _RUNNING.add(process.pid)
        if _STOPPED.is_set():  # since it was started
            _end(process.pid)
        try:
            said, _ = process.communicate(timeout=SUITE_SECONDS)
        except subprocess.TimeoutExpired:
            _end(process.pid)
            return None, ""
        finally:
            _RUNNING.discard(process.pid)
    return process.returncode, said


def _end(group: int) -> None:
    """Kill a suite and all its children. Trap: it may just have ended by itself."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


# Of torchrun and of the night's own pytest: a suite of a kernel is a run of its own.
_NIGHT_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PYTEST_CURRENT_TEST", "PYTEST_ADDOPTS")


def suite_of(kernel: str, report: Path) -> Suite:
    """Read JUnit: cases that ran, and the first failure; skipped ones are reported, not counted."""
    cases = list(ET.parse(report).getroot().iter("testcase"))  # noqa: S314  written just now
    ran = [case for case in cases if case.find("skipped") is None]
    failed = [case for case in ran if _failure_element(case) is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    left = f"{len(skipped):,} undecided, first {_case_message(skipped[0])}" if skipped else ""
    first = _case_message(failed[0]) if failed else ""
    # A case that fails for another reason is the answer, whatever else lacked memory.
    lacked = bool(failed) and all(_lacks_memory(_case_message(case, None)) for case in failed)
    return Suite(kernel, len(ran), len(failed), first, left=left, lacked_memory=lacked)


def _lacks_memory(said: str) -> bool:
    """Whether torch or a library of CUDA found no memory of the device."""
    return re.search(_NO_MEMORY, said) is not None


def _case_message(case: ET.Element, most: int | None = _LONG) -> str:
    """Return a case's name, and why it failed or was skipped."""
    why = _failure_element(case)
    why = case.find("skipped") if why is None else why
    words = "" if why is None else why.get("message") or ""
    return f"{case.get('name')}: {' '.join(words.split())[:most]}"


def _failure_element(case: ET.Element) -> ET.Element | None:
    found = case.find("failure")
    return case.find("error") if found is None else found


def figures(config: NightConfig, _: Mapping[str, StepResult]) -> StepResult:
    """Measure each kernel's share of a copy's bandwidth, or of cuBLAS, in the same run."""
    if not config.gpu:
        return _without("speed")
    suites = installed_suites()
    if suites is None:
        return StepResult(Verdict.UNDECIDED, NO_SUITES)
    said = run_bench([sys.executable, "-m", suites.bench, "--json"])
    if isinstance(said, str):
        return StepResult(Verdict.UNDECIDED, f"No rate was measured: {said}")
    return bench_result(said)


def run_bench(line: Sequence[str]) -> dict[str, Any] | str:
    """Run the nightly benchmark; return its document, or why there is none."""
    try:
        done = subprocess.run(  # noqa: S603  ours
            line, capture_output=True, text=True, check=False, timeout=BENCH_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"The benchmark did not end in {BENCH_SECONDS // 60} minutes."
    last = done.stdout.strip().rpartition("\n")[2]
    try:
        found = json.loads(last)
    except ValueError:
        return f"status {done.returncode}: {' '.join(done.stderr.split())[-_LONG:] or 'no words'}"
    return found if isinstance(found, dict) else f"not a document: {last[:_LONG]}"


def bench_result(document: Mapping[str, Any]) -> StepResult:
    """Report a benchmark; a kernel that could not be timed leaves the step undecided."""
    speeds: Mapping[str, Mapping[str, Any]] = document["speeds"]
    failed: Mapping[str, str] = document["failed"]
    rows = [
        (
            name,
            "measured",
            f"{share(speed['share'])} of {speed['of']}, {speed['microseconds']:.1f} us",
        )
        for name, speed in speeds.items()
    ]
    rows += [(name, "not measured", f"not timed: {why}") for name, why in failed.items()]
    values = {f"kernels.{name}": float(speed["share"]) for name, speed in speeds.items()}
    sentence = f"{len(speeds)} kernels were timed with ceilings of the same run"
    slowest = min(speeds, key=lambda name: speeds[name]["share"], default=None)
    if slowest is not None:
        sentence += f"; furthest from its own: {slowest}, {share(speeds[slowest]['share'])}"
        sentence += f" of {speeds[slowest]['of']}"
    if failed:
        sentence = f"{', '.join(failed)} could not be timed. {sentence}"
    return StepResult(
        Verdict.UNDECIDED if failed or not speeds else Verdict.AGREES,
        f"{sentence}.",
        values={SPEED.name: values} if values else {},
        lines=tuple(f"{name}: {' '.join(why.split())[:_LONG]}" for name, why in failed.items()),
        rows=tuple(rows),
    )


def _without(what: str) -> StepResult:
    return StepResult(
        Verdict.UNDECIDED, f"{what} was not run: no GPU was requested (-m b200, -m h200).",
        asked=False,
    )  # fmt: skip
