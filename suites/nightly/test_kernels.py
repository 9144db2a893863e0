"""Kernels in a night: suites in processes of their own, rates in a document; never green unrun."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.history.records import SPEED
from degarble.harness.nightly import kernels as night_kernels
from degarble.harness.nightly.kernels import KernelSuites, Suite, SuiteRun
from degarble.harness.nightly.night import NightConfig
from degarble.harness.plugins import shares
from degarble.harness.plugins.shares import read_share
from degarble.harness.report.verdict import Verdict
from degarble.kernels.runtime.modules import MODULES
from degarble.kernels.runtime.targets import SM90A, TARGETS
from degarble.suites.hang_guard import until
from degarble.suites.support.kernel_suites import HERE

if TYPE_CHECKING:
    from collections.abc import Iterator

SUITE = """
import pytest

@pytest.mark.night
def test_good(): pass

@pytest.mark.night
@pytest.mark.parametrize("rows", (1, 2))
def test_bad(rows): assert rows == 3, f"{rows} rows\\nare wrong"

@pytest.mark.night
def test_left(): pytest.skip("not here")

@pytest.mark.night
def test_apart(): pytest.xfail("UNDECIDED: other bits")

def test_of_the_cpu(): raise AssertionError
"""
HANGS = """
import subprocess, sys, time
from pathlib import Path
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(86_400)"])
Path("{child}").write_text(str(child.pid))
time.sleep(86_400)
"""
SPEEDS = {"gemm_bf16": {"share": 1.01, "of": "cuBLAS", "microseconds": 310.0},
          "kv_write_fp8": {"share": 0.78, "of": "copy bandwidth", "microseconds": 5.0}}  # fmt: skip


def asked(folder: Path, *, gpu: bool = True) -> NightConfig:
    return NightConfig(folder, folder, folder, "2026-11-22", gpu=gpu)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(night_kernels, "target_of_device", lambda: SM90A)


def test_a_suite_is_run_and_read_case_by_case(tmp_path: Path) -> None:
    path = tmp_path / "test_sm90_planted.py"
    path.write_text(SUITE)
    suite = night_kernels.run_suite(tmp_path / "report.xml", ("night",), SuiteRun(path))
    assert (suite.kernel, suite.cases, suite.failed) == ("sm90_planted", 3, 2)
    assert suite.first.startswith("test_bad[1]: AssertionError: 1 rows are wrong")
    assert suite.left == "2 undecided, first test_left: not here"
    assert suite.verdict is Verdict.DIFFERS


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (5, "no tests ran", Suite("x")),
        (2, "no kernel", Suite("x", broken="broke off with status 2: no kernel")),
        (-11, "", Suite("x", broken="broke off with status -11: ")),
    ],
)  # fmt: skip
def test_a_suite_without_answers_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, text: str, expected: Suite
) -> None:
    monkeypatch.setattr(night_kernels, "_ended", lambda *_: (status, text))
    run = SuiteRun(tmp_path / "test_x.py")
    suite = night_kernels.run_suite(tmp_path / "none.xml", ("h200",), run)
    assert suite == expected
    assert suite.verdict is (Verdict.DIFFERS if expected.broken else Verdict.AGREES)


def test_what_a_suite_lacks_and_a_bad_end_are_no_agreement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = tmp_path / "report.xml"
    fields: dict[str, Any] = {}

    def ended(line: list[str], environment: dict[str, str]) -> tuple[int, str]:
        fields.update(environment, asked=line[line.index("pytest") + 3])
        report.write_text('<testsuites><testcase name="a"/></testsuites>')
        return 1, ""

    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(night_kernels, "_ended", ended)
    run = SuiteRun(tmp_path / "test_x.py")
    suite = night_kernels.run_suite(report, ("h200", "gpu"), run)
    assert suite.broken == "ended with status 1, and no case failed"
    # With CI the plugin fails what lacks a package, and does not leave it out.
    assert (fields["CI"], fields["asked"]) == ("true", "h200 or gpu")


def test_a_suite_that_hangs_is_ended_and_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, child = tmp_path / "test_x.py", tmp_path / "child"
    path.write_text(HANGS.format(child=child))
    for seconds in (3, 30, 300):  # on a busy machine a suite needs longer to begin
        monkeypatch.setattr(night_kernels, "SUITE_SECONDS", seconds)
        suite = night_kernels.run_suite(tmp_path / "report.xml", ("h200",), SuiteRun(path))
        if child.exists():
            break
    assert suite.broken.startswith("did not end in")
    assert ends(int(child.read_text()))


def ends(process: int) -> bool:
    """Whether a process is gone soon: whoever adopts it may take a moment to bury it."""
    state = Path(f"/proc/{process}/stat")
    until(lambda: not state.exists() or state.read_text().rpartition(") ")[2].startswith("Z"))
    return True


def suites_in(folder: Path) -> KernelSuites:
    return KernelSuites((folder,), "no.bench", "no.first_minute")


class _Running(set[int]):
    """Sessions in an order: those that are gone first."""

    def __init__(self, gone: tuple[int, ...]) -> None:
        super().__init__()
        self._gone = gone

    def __iter__(self) -> Iterator[int]:
        return chain(self._gone, super().__iter__())


def interrupt_once(child: Path) -> None:
    """Send SIGINT to the main thread once a child's id is written."""
    until(lambda: child.exists() and bool(child.read_text()))
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def run_interrupted(suites: KernelSuites) -> None:
    """Run suites until an interrupt ends them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            night_kernels._run_all(suites, ("h200",))
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("gone", [(), (2**22 + 1,)])
def test_an_interrupted_night_ends_its_suites(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gone: tuple[int, ...]
) -> None:
    """Also where another suite has just ended by itself: beyond the largest id there is none."""
    (tmp_path / "kernels").mkdir()
    child = tmp_path / "child"
    for name, text in (("hangs", HANGS.format(child=child)), ("stops", "")):
        (tmp_path / "kernels" / f"test_{name}.py").write_text(f"# mark.h200\n{text}")
    true = night_kernels.run_suite

    def run(report: Path, markers: tuple[str, ...], of: SuiteRun) -> Suite:
        if of.path.stem == "test_hangs":
            return true(report, markers, of)
        interrupt_once(child)
        return Suite("stops")

    monkeypatch.setattr(night_kernels, "run_suite", run)
    monkeypatch.setattr(night_kernels, "_RUNNING", _Running(gone))
    run_interrupted(suites_in(tmp_path))
    assert ends(int(child.read_text()))


def test_stopped_suites_end_and_no_other_begins(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    child = tmp_path / "child"
    (tmp_path / "kernels" / "test_hangs.py").write_text(f"# mark.h200\n{HANGS.format(child=child)}")
    for number in range(night_kernels.PROCESSES):
        path = tmp_path / "kernels" / f"test_{number}.py"
        path.write_text("# mark.h200\nimport time\ndef test_long(): time.sleep(600)\n")
    found: list[Suite] = []
    work = threading.Thread(
        target=lambda: found.extend(night_kernels._run_all(suites_in(tmp_path), ("h200",)))
    )
    work.start()
    until(lambda: child.exists() and bool(child.read_text()))
    night_kernels.stop()
    work.join(60)
    assert not work.is_alive()
    assert len(found) == night_kernels.PROCESSES + 1
    assert all(suite.broken for suite in found)
    assert all(suite.seconds > 0 for suite in found)
    assert ends(int(child.read_text()))


def test_skipping_every_case_is_no_agreement(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testcase name="a"><skipped/></testcase></testsuites>')
    skipped = night_kernels.suite_of("x", report)
    (alone,) = night_kernels.joined([skipped])
    assert alone.broken.startswith("skipped every case: 1 undecided, first a")
    assert alone.verdict is Verdict.DIFFERS
    (beside,) = night_kernels.joined([skipped, Suite("x", 3), Suite("x")])
    assert (beside.cases, beside.verdict) == (3, Verdict.AGREES)
    assert "1 undecided" in beside.sentence


@pytest.mark.usefixtures("on_hopper")
def test_what_a_suite_leaves_open_is_reported_next_to_what_agrees(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = tmp_path / "report.xml"
    skipped = '<testcase name="b"><skipped message="UNDECIDED: other\nbits"/></testcase>'
    report.write_text(f'<testsuites><testcase name="a"/>{skipped}</testsuites>')
    pair = night_kernels.suite_of("pair", report)
    text = "1 cases agree with their definitions; 1 undecided, first b: UNDECIDED: other bits"
    assert (pair.sentence, pair.verdict) == (text, Verdict.AGREES)
    monkeypatch.setattr(night_kernels, "_run_all", lambda *_: [Suite("gemm", 7), pair])
    result = night_kernels.kernels(asked(tmp_path), {})
    assert result.lines == (f"pair: {text}",)


@pytest.mark.usefixtures("on_hopper")
def test_the_step_names_the_kernel_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "kernels").mkdir()
    said = {"good": Suite("good", 7), "bad": Suite("bad", 5, 2, "test_tail[3]: 4 differ")}
    for name, mark in (("good", "gpu"), ("bad", "h200"), ("other", "b200")):
        (tmp_path / "kernels" / f"test_{name}.py").write_text(f"@pytest.mark.{mark}\n")

    def run(_: Path, markers: tuple[str, ...], of: SuiteRun) -> Suite:
        assert markers == ("h200", "gpu")
        return said[of.path.stem.removeprefix("test_")]

    monkeypatch.setattr(night_kernels, "installed_suites", lambda: suites_in(tmp_path))
    monkeypatch.setattr(night_kernels, "run_suite", run)
    result = night_kernels.kernels(asked(tmp_path), {})
    assert result.verdict is Verdict.DIFFERS
    assert result.judged == ("kernels.bad", "kernels.good")
    assert [failure.component for failure in result.failures] == ["kernels.bad"]
    assert result.lines == ("bad: 2 of 5 cases fail, first test_tail[3]: 4 differ",)
    said |= {"bad": Suite("bad", 5, seconds=61.0), "good": Suite("good", 7, seconds=200.0)}
    result = night_kernels.kernels(asked(tmp_path), {})
    assert result.verdict is Verdict.AGREES
    assert result.sentence == "2 suites of kernels agree with definitions in 12 cases."
    assert result.facts == {"longest suites": "good 3 min 20 s, bad 1 min 01 s"}
    said.update(good=Suite("good"), bad=Suite("bad"))
    assert night_kernels.kernels(asked(tmp_path), {}).red, "nothing ran, and it was asked for"


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("missing", [True, False])
def test_without_installed_suites_a_night_is_undecided(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, missing: bool
) -> None:
    def load() -> KernelSuites:
        raise ModuleNotFoundError("degarble.suites")

    points = [] if missing else [SimpleNamespace(load=load)]
    monkeypatch.setattr(night_kernels, "entry_points", lambda **_: points)
    for step in (night_kernels.kernels, night_kernels.figures):
        result = step(asked(tmp_path), {})
        assert result.verdict is Verdict.UNDECIDED
        assert "pip install -e ." in result.sentence


def test_the_installed_suites_are_those_of_this_checkout() -> None:
    assert night_kernels.installed_suites() == HERE
    for module in (HERE.bench, HERE.first_minute):
        assert find_spec(module) is not None
    assert all(folder.is_dir() for folder in HERE.folders)


def test_every_target_has_suites_of_its_own_and_of_all() -> None:
    assert set(night_kernels.MARKERS) == set(TARGETS)
    for markers in night_kernels.MARKERS.values():
        files = {path.stem for path in night_kernels.files_for(HERE.folders, markers)}
        assert "test_quantising" in files, "kernels without tensor cores are one source"
        assert "test_simt_probe_formats" in files, "the formats on any GPU"
        own = {"h200": "test_sm90_gemm", "b200": "test_sm100_gemm"}
        assert own[markers[0]] in files
        assert "test_night" not in files, "a night within a night"
    assert {"test_cutedsl_h200", "test_decoder_h200"} <= {
        path.stem for path in night_kernels.files_for(HERE.folders, night_kernels.MARKERS["sm_90a"])
    }


def test_each_kernel_of_the_contract_runs_in_a_process_of_its_own() -> None:
    (contract,) = HERE.contracts
    for markers in night_kernels.MARKERS.values():
        runs = night_kernels.runs_of(HERE, markers)
        whole = {run._replace(share="") for run in runs if run.path == contract}
        assert whole == {SuiteRun(contract, kernel) for kernel in MODULES}


def test_a_long_file_begins_first_in_shares_and_is_one_suite(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    short, long = (tmp_path / "kernels" / f"test_{name}.py" for name in ("short", "long"))
    short.write_text(SUITE + "\n" * 1000)
    long.write_text(SUITE)
    suites = suites_in(tmp_path)._replace(shares={"long": 3, "of_another_device": 2})
    expected = [SuiteRun(long, share=f"{number}/3") for number in (1, 2, 3)]
    assert night_kernels.runs_of(suites, ("night",)) == [*expected, SuiteRun(short)]
    said: list[str] = []
    whole, parts = night_kernels._run_all(suites, ("night",), said.append)[::-1]
    lines = sorted(line.rpartition(" processes have ended")[0] for line in said)
    assert lines == [f"kernels: {number} of 4" for number in (1, 2, 3, 4)]
    assert sum(f"; long {number}/3 after " in line for line in said for number in (1, 2, 3)) == 3
    assert all("DIFFERS, 1 of 1 cases fail" in line for line in said if "long 2/3 after" in line)
    assert not any(", left: " in line for line in said if "4 of 4" in line)
    assert sum(", left: " in line for line in said) == 3, "a night that is cut names what it lacks"
    assert (parts.kernel, parts.cases, parts.failed) == ("long", whole.cases, whole.failed)
    # A share without a case has nothing to say: five cases in all, one of them left out.
    assert night_kernels.run_suite(
        tmp_path / "none.xml", ("night",), SuiteRun(long, share="9/9")
    ) == Suite("long")


@pytest.mark.parametrize(("cores", "at_once"), [(1, 1), (2, 2), (64, 3)])
def test_as_many_suites_run_at_once_as_there_are_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cores: int, at_once: int
) -> None:
    (tmp_path / "kernels").mkdir()
    for number in range(3):
        (tmp_path / "kernels" / f"test_{number}.py").write_text("# mark.gpu\n")
    now, most = [0], [0]
    lock, together = threading.Lock(), threading.Event()

    def run(_: Path, __: tuple[str, ...], of: SuiteRun) -> Suite:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
            if now[0] == at_once:
                together.set()
        assert together.wait(30)
        time.sleep(0.05)
        with lock:
            now[0] -= 1
        return Suite(of.name, 1)

    monkeypatch.setattr(night_kernels, "run_suite", run)
    monkeypatch.setattr(night_kernels, "usable_cores", lambda: cores)
    assert len(night_kernels._run_all(suites_in(tmp_path), ("gpu",))) == 3
    assert most == [at_once]


NO_MEMORY = (
    "RuntimeError: CUDA out of memory. Tried to allocate 2.73 GiB.", "CUDA error: out of memory",
    "CUDA driver error: out of memory", "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
)  # fmt: skip
OTHER = "AssertionError: bits are out of place in memory"


@pytest.mark.parametrize(
    ("messages", "lacked"),
    [*(([text], True) for text in NO_MEMORY), ([], False), ([OTHER], False),
     ([NO_MEMORY[0], NO_MEMORY[1]], True), ([NO_MEMORY[0], OTHER], False)],
)  # fmt: skip
def test_only_a_suite_that_fails_for_nothing_else_lacked_memory(
    tmp_path: Path, messages: list[str], lacked: bool
) -> None:
    """What a traceback shows of the code says nothing about memory."""
    source = f"assert same  # {NO_MEMORY[0]}"
    failed = "".join(
        f'<testcase name="a"><failure message="{text}">{source}</failure></testcase>'
        for text in messages
    )
    report = tmp_path / "report.xml"
    report.write_text(f'<testsuites><testcase name="good"/>{failed}</testsuites>')
    assert night_kernels.suite_of("x", report).lacked_memory == lacked


@pytest.mark.parametrize(("text", "lacked"), [(NO_MEMORY[0], True), ("no kernel", False)])
def test_a_suite_that_breaks_off_may_have_lacked_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, lacked: bool
) -> None:
    monkeypatch.setattr(night_kernels, "_ended", lambda *_: (3, text))
    suite = night_kernels.run_suite(tmp_path / "none.xml", (), SuiteRun(tmp_path / "test_x.py"))
    assert suite.broken.startswith("broke off with status 3")
    assert suite.lacked_memory == lacked


def test_the_report_of_a_first_run_is_none_of_the_second(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testcase name="a"><failure message="x"/></testcase></testsuites>'
    )
    monkeypatch.setattr(night_kernels, "_ended", lambda *_: (1, "killed"))
    suite = night_kernels.run_suite(report, (), SuiteRun(tmp_path / "test_x.py"))
    assert suite.broken == "broke off with status 1: killed"


FULL = Suite("", 2, 1, f"test_large: {NO_MEMORY[0]}", lacked_memory=True)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("answers", "runs", "verdict", "again"),
    [
        ({"one": [FULL, Suite("", 2)]}, 4, Verdict.AGREES, "one"),
        ({"one": [FULL, Suite("", 2)], "two": [FULL, Suite("", 2)]}, 5, Verdict.AGREES, "one, two"),
        ({"one": [FULL, Suite("", 2, 1, OTHER)]}, 4, Verdict.DIFFERS, "one"),
        ({"one": [Suite("", 2, 1, OTHER), Suite("", 2)]}, 3, Verdict.DIFFERS, None),
        # If the memory stays full, no further suite runs again.
        ({"one": [FULL, FULL], "two": [FULL, Suite("", 2)]}, 4, Verdict.DIFFERS, "one"),
    ],
)
def test_suites_that_lacked_memory_run_again_after_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answers: dict[str, list[Suite]], runs: int,
    verdict: Verdict, again: str | None,
) -> None:  # fmt: skip
    """A device that others fill is no fault of a kernel; other failures are final."""
    (tmp_path / "kernels").mkdir()
    names = ("one", "two", "six")
    for size, name in enumerate(reversed(names)):  # larger files begin sooner
        (tmp_path / "kernels" / f"test_{name}.py").write_text(f"# mark.gpu{' ' * size}\n")
    seen: list[str] = []

    def run(_: Path, __: tuple[str, ...], of: SuiteRun) -> Suite:
        seen.append(of.name)
        given = answers.get(of.name, [Suite("", 1)])
        return replace(given[seen.count(of.name) - 1], kernel=of.name)

    monkeypatch.setattr(night_kernels, "installed_suites", lambda: suites_in(tmp_path))
    monkeypatch.setattr(night_kernels, "run_suite", run)
    said: list[str] = []
    result = night_kernels.kernels(replace(asked(tmp_path), say=said.append), {})
    assert sorted(seen[:3]) == sorted(names)
    assert (len(seen), len(said), result.verdict) == (runs, runs, verdict)
    assert result.facts.get("suites that lacked memory and ran again") == again


def test_an_interrupted_second_run_is_ended_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "kernels").mkdir()
    child = tmp_path / "child"
    hangs = HANGS.replace("86_400", "100").format(child=child)  # one that is left ends some time
    (tmp_path / "kernels" / "test_hangs.py").write_text(f"# mark.h200\n{hangs}")
    true, runs = night_kernels.run_suite, list[str]()

    def run(report: Path, markers: tuple[str, ...], of: SuiteRun) -> Suite:
        runs.append(of.name)
        if len(runs) == 1:
            return Suite("hangs", 1, 1, lacked_memory=True)
        threading.Thread(target=interrupt_once, args=(child,)).start()
        return true(report, markers, of)

    monkeypatch.setattr(night_kernels, "run_suite", run)
    begun = time.monotonic()
    run_interrupted(suites_in(tmp_path))
    assert time.monotonic() - begun < 60
    assert ends(int(child.read_text()))


def test_a_share_that_breaks_off_is_no_agreement() -> None:
    shares = [Suite("a", 3), Suite("b", 7), Suite("a", broken="broke off"), Suite("a", 2, 1, "x")]
    a, b = night_kernels.joined(shares)
    assert (a, b) == (Suite("a", 5, 1, "x", "broke off"), Suite("b", 7))
    assert a.verdict is Verdict.DIFFERS
    assert a.sentence == "broke off; 1 of 5 cases fail, first x"


def test_shares_have_every_case_once_in_whatever_order_they_were_collected() -> None:
    names = [f"test_x.py::test_a[{number}]" for number in range(7)]
    found = []
    for number in (1, 2, 3):
        items = [SimpleNamespace(nodeid=name) for name in names]
        items = items[::-1] if number == 2 else items
        hook = SimpleNamespace(pytest_deselected=lambda **_: None)
        asked: Any = SimpleNamespace(getoption=lambda _, share=f"{number}/3": share, hook=hook)
        kept: Any = items
        shares.pytest_collection_modifyitems(asked, kept)
        found += [item.nodeid for item in items]
    assert sorted(found) == names


def test_every_long_suite_is_one_of_a_device() -> None:
    names = {
        run.name
        for markers in night_kernels.MARKERS.values()
        for run in night_kernels.runs_of(HERE, markers)
    }
    assert set(HERE.shares) <= names


def test_what_is_no_share_is_refused() -> None:
    assert [read_share(text) for text in ("1/1", "2/6")] == [(1, 1), (2, 6)]
    for text in ("", "0/2", "3/2", "1/0", "a/b", "1/2/3", "-1/2"):
        with pytest.raises(pytest.UsageError, match="no share"):
            read_share(text)


CONTRACT = """
import pytest

@pytest.mark.night
@pytest.mark.parametrize("case", ("simt_mhc-post", "simt_mhc_project-3", "simt_router-7"))
def test_a_case(case): assert case == "simt_mhc-post", case
"""


@pytest.mark.parametrize(
    ("kernel", "cases", "failed"),
    [("simt_mhc", 1, 0), ("simt_mhc_project", 1, 1), ("simt_router", 1, 1), ("simt_embed", 0, 0)],
)
def test_cases_of_a_kernel_are_run_and_those_of_no_other(
    tmp_path: Path, kernel: str, cases: int, failed: int
) -> None:
    path = tmp_path / "test_contract.py"
    path.write_text(CONTRACT)
    suite = night_kernels.run_suite(tmp_path / "report.xml", ("night",), SuiteRun(path, kernel))
    assert (suite.kernel, suite.cases, suite.failed, suite.broken) == (kernel, cases, failed, "")


def bench_of(text: str) -> list[str]:
    return [sys.executable, "-c", f"import sys; print('a line'); {text}"]


def test_rates_are_kept_and_what_was_not_timed_is_reported() -> None:
    document = json.dumps({"target": "sm_90a", "speeds": SPEEDS, "failed": {}})
    said = night_kernels.run_bench(bench_of(f"print({document!r})"))
    assert isinstance(said, dict)
    result = night_kernels.bench_result(said)
    assert result.verdict is Verdict.AGREES
    assert result.values == {SPEED.name: {"kernels.gemm_bf16": 1.01, "kernels.kv_write_fp8": 0.78}}
    assert "furthest from its own: kv_write_fp8, 78.0 % of copy bandwidth" in result.sentence
    result = night_kernels.bench_result({**said, "failed": {"rmsnorm": "RuntimeError: a\nb"}})
    assert result.red
    assert result.lines == ("rmsnorm: RuntimeError: a b",)
    assert night_kernels.bench_result({"speeds": {}, "failed": {}}).red


@pytest.mark.usefixtures("on_hopper")
def test_a_bench_that_breaks_is_undecided_with_its_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = night_kernels.run_bench(bench_of("sys.exit('REFUSED: no device')"))
    assert said == "status 1: REFUSED: no device"
    monkeypatch.setattr(night_kernels, "run_bench", lambda _: said)
    result = night_kernels.figures(asked(tmp_path), {})
    assert result.verdict is Verdict.UNDECIDED
    assert result.red
    assert result.sentence == "No rate was measured: status 1: REFUSED: no device"


def test_without_a_gpu_both_say_so_and_claim_nothing(tmp_path: Path) -> None:
    for step in (night_kernels.kernels, night_kernels.figures):
        result = step(asked(tmp_path, gpu=False), {})
        assert (result.verdict, result.red) == (Verdict.UNDECIDED, False)
