"""The night with small steps: order, continuing, what is red, what the ledger excuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import (
    EXIT_REFUSED,
    InvalidArgument,
    Refused,
    Undecided,
    UnreadableFile,
    UnwritablePath,
)
from degarble.harness.history.ledger import Failure
from degarble.harness.nightly.night import (
    Night,
    NightConfig,
    NightStep,
    StepResult,
    require_no_workers,
)
from degarble.harness.nightly.pages import markdown, write_night
from degarble.harness.nightly.steps import environment, ledger
from degarble.harness.nightly.table import STEPS
from degarble.harness.plugins.pytest_plugin import NightOptions, RunOptions
from degarble.harness.report.verdict import Verdict
from degarble.suites.hang_guard import until
from degarble.suites.nights import test_night as entry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NIGHT = "2026-11-22"
GREEN = StepResult(Verdict.AGREES, "All is well.")
FAULT = Failure("layers.3.ffn.experts.w2", Verdict.DIFFERS, "M10.nibble_order", "nibbles swapped")
RED = StepResult(
    Verdict.DIFFERS, "Layer 3 is wrong.", failures=(FAULT,), judged=(FAULT.component, "head")
)
ENTRY = """
- component: layers.3.ffn.experts.*
  verdict: DIFFERS
  issue: https://example.org/12
  until: {until}
  why: being mended
"""


def asked(folder: Path, **more: object) -> NightConfig:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    if not (model / "weights").exists():  # its time belongs to what is judged
        (model / "weights").write_text("one")
    return NightConfig(model, model, folder / "out", NIGHT, **more)  # type: ignore[arg-type]


def steps(ran: list[str], **results: StepResult | BaseException) -> list[NightStep]:
    def step(name: str, result: StepResult | BaseException) -> Callable[..., StepResult]:
        def run(_: NightConfig, given: object) -> StepResult:
            assert isinstance(given, dict)
            ran.append(f"{name}({','.join(given)})")
            if isinstance(result, BaseException):
                raise result
            return result

        return run

    made, before = [], ""
    for name, result in results.items():
        made.append(NightStep(name, step(name, result), (before,) if before else ()))
        before = name
    return made


def with_ledger(folder: Path, until: str = "2026-12-01", text: str = ENTRY) -> NightConfig:
    (folder / "ledger.yaml").write_text(text.format(until=until))
    return asked(folder, ledger=folder / "ledger.yaml")


SETTLE = NightStep("ledger", ledger, all_before=True)


def test_a_step_runs_once_after_those_that_it_needs(tmp_path: Path) -> None:
    ran: list[str] = []
    night = Night(asked(tmp_path), steps(ran, first=GREEN, second=GREEN, third=GREEN))
    assert night.result("second") == GREEN
    assert night.run() is Verdict.AGREES
    assert ran == ["first()", "second(first)", "third(second)"]
    assert night.sentence == "3 of 3 steps ran, none of them red."


def test_an_interrupted_night_continues(tmp_path: Path) -> None:
    ran: list[str] = []
    with pytest.raises(ZeroDivisionError):
        Night(asked(tmp_path), steps(ran, first=GREEN, second=ZeroDivisionError("crash"))).run()
    begun = next(tmp_path.rglob("begun")).read_text()
    ran.clear()
    night = Night(asked(tmp_path), steps(ran, first=GREEN, second=RED))
    assert night.run() is Verdict.DIFFERS
    assert ran == ["second(first)"]
    assert night.continued == ["first"]
    assert night.asked.started == begun
    assert night.results["second"] == RED


def test_another_compiler_of_kernels_is_reported_and_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = "nvidia-cutlass-dsl"
    monkeypatch.setattr("degarble.harness.report.page._version", lambda name: f"1 of {name}")
    assert environment(asked(tmp_path), {}).facts[compiler] == f"1 of {compiler}"
    ran: list[str] = []
    Night(asked(tmp_path), steps(ran, first=GREEN)).run()
    versions = {compiler: "2"}
    monkeypatch.setattr("degarble.harness.nightly.night.kernel_versions", lambda: versions)
    Night(asked(tmp_path), steps(ran, first=GREEN)).run()
    Night(asked(tmp_path), steps(ran, first=GREEN)).run()
    assert ran == ["first()"] * 2


PROGRAM = """
import sys, time
from pathlib import Path
from degarble.harness.report.verdict import Verdict
from degarble.harness.nightly.night import Night, NightConfig, NightStep, StepResult
from degarble.harness.nightly.steps import environment
from degarble.harness.nightly.table import STEPS
from degarble.suites.nights import test_night as entry

folder, forever = Path(sys.argv[1]), sys.argv[2] == "forever"

def first(asked, given):
    return StepResult(Verdict.AGREES, "first ran")

def second(asked, given):
    (asked.work / ".second.json.1.part").write_text('{"schema": 1, "st')
    while forever:
        time.sleep(0.01)
    return StepResult(Verdict.AGREES, "second ran")

night = Night(NightConfig(folder / "model", folder / "model", folder / "out", "2026-11-22"),
              [NightStep("first", first), NightStep("second", second)])
print(night.run(), night.continued, flush=True)
"""


def test_a_killed_night_resumes_after_its_finished_steps(tmp_path: Path) -> None:
    asked(tmp_path)  # makes the model
    line = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path)]
    process = subprocess.Popen([*line, "forever"])
    until(lambda: bool(list(tmp_path.rglob(".second.*.part"))))
    with pytest.raises(UnwritablePath, match="no other night"):
        Night(asked(tmp_path), steps([], first=GREEN))
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = sorted(each.name for each in tmp_path.rglob("*.json"))
    assert kept == ["first.json"]
    done = subprocess.run([*line, "on"], capture_output=True, text=True, check=True)
    assert done.stdout == "AGREES ['first']\n"


@pytest.mark.parametrize(
    ("store", "kind"),
    [
        ("mysql://me@host/history", InvalidArgument),
        ("{}/nowhere/history.sqlite", UnwritablePath),
        ("{}/model/weights", UnreadableFile),
    ],
)
def test_what_can_be_no_store_is_refused_before_anything_runs(
    store: str, kind: type[Refused], tmp_path: Path
) -> None:
    given = asked(tmp_path, store=store.format(tmp_path))
    with pytest.raises(kind):
        Night(given, STEPS)
    assert not given.work.exists()
    # On pytest's command line that is status 2 and one line, not a failure of every step.
    of_night, folder = NightOptions(store=given.store), tmp_path / "out"
    run = RunOptions(given.checkpoint, given.reference, None, "torch", folder, False, of_night)
    with pytest.raises(pytest.exit.Exception, match="REFUSED: ") as end:
        entry._begun({}, run, gpu=False)
    assert end.value.returncode == EXIT_REFUSED


def test_a_half_written_step_runs_again(tmp_path: Path) -> None:
    ran: list[str] = []
    Night(asked(tmp_path), steps(ran, first=GREEN, second=GREEN)).run()
    path = next(tmp_path.rglob("second.json"))
    for spoilt in (path.read_text()[:-40], "[]", '{"schema": 1, "key": 3}', "\xff"):
        path.write_text(spoilt)
        ran.clear()
        Night(asked(tmp_path), steps(ran, first=GREEN, second=GREEN)).run()
        assert ran == ["second(first)"]


def test_another_model_commit_or_number_of_repeats_runs_again(tmp_path: Path) -> None:
    ran: list[str] = []
    Night(asked(tmp_path), steps(ran, first=GREEN)).run()
    changed = asked(tmp_path)
    time.sleep(0.01)
    (changed.checkpoint / "weights").write_text("two")
    for other in (changed, asked(tmp_path, commit="abc"), asked(tmp_path, repeats=3)):
        ran.clear()
        Night(other, steps(ran, first=GREEN)).run()
        assert ran == ["first()"]


def test_a_finished_night_is_not_continued(tmp_path: Path) -> None:
    ran: list[str] = []
    for _ in range(2):
        night = Night(asked(tmp_path), steps(ran, first=GREEN))
        night.run()
        night.close()
    assert ran == ["first()", "first()"]


@pytest.mark.parametrize(
    ("result", "red", "verdict"),
    [
        (GREEN, False, Verdict.AGREES),
        (RED, True, Verdict.DIFFERS),
        (StepResult(Verdict.UNSTABLE, "two answers"), True, Verdict.UNSTABLE),
        (StepResult(Verdict.UNDECIDED, "no GPU"), True, Verdict.UNDECIDED),
        (StepResult(Verdict.UNDECIDED, "not asked", asked=False), False, Verdict.AGREES),
        (InvalidArgument("x", 1, "2", "Mend."), True, Verdict.REFUSED),
        (Undecided("x", 1, "2", "Mend."), True, Verdict.UNDECIDED),
    ],
)
def test_what_is_red(
    tmp_path: Path, result: StepResult | Exception, red: bool, verdict: Verdict
) -> None:
    night = Night(asked(tmp_path), steps([], only=result))
    assert night.run() is verdict
    assert night.red("only") is red


def test_a_refused_step_is_tried_again(tmp_path: Path) -> None:
    ran: list[str] = []
    Night(asked(tmp_path), steps(ran, only=InvalidArgument("x", 1, "2", "Mend."))).run()
    assert Night(asked(tmp_path), steps(ran, only=GREEN)).run() is Verdict.AGREES


def test_what_the_ledger_knows_is_no_alarm(tmp_path: Path) -> None:
    night = Night(with_ledger(tmp_path), [*steps([], check=RED), SETTLE])
    assert night.run() is Verdict.AGREES
    assert not night.red("check")
    assert "known by the ledger: check" in night.sentence
    assert night.results["ledger"].lines[0].startswith("known until 2026-12-01")


def test_a_healed_or_expired_entry_turns_the_night_red(tmp_path: Path) -> None:
    well = StepResult(Verdict.AGREES, "well", judged=RED.judged)
    healed = Night(with_ledger(tmp_path), [*steps([], check=well), SETTLE])
    assert healed.run() is Verdict.DIFFERS
    assert healed.results["ledger"].lines[0].startswith("healed: layers.3")
    old = Night(with_ledger(tmp_path, "2026-11-21"), [*steps([], check=RED), SETTLE])
    assert old.run() is Verdict.DIFFERS
    assert "0 new, 1 expired, 0 healed." in old.sentence


def test_no_entry_excuses_the_ledger_itself(tmp_path: Path) -> None:
    text = ENTRY.replace("layers.3.ffn", "'*.ffn").replace("experts.*", "experts.*'")
    night = Night(with_ledger(tmp_path, "2026-11-21", text), [*steps([], check=RED), SETTLE])
    assert night.run() is Verdict.DIFFERS
    assert night.results["ledger"].failures[0].component == "ledger.*.ffn.experts.*"
    assert night.red("ledger")


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_night_that_did_not_finish_is_never_green(tmp_path: Path, error: BaseException) -> None:
    night = Night(asked(tmp_path), steps([], first=GREEN, second=error, third=GREEN))
    with pytest.raises(type(error)):
        night.run()
    assert night.verdict is Verdict.UNDECIDED
    assert not night.complete
    assert night.missing == ["second", "third"][isinstance(error, Exception) :]
    assert f"Not finished: {', '.join(night.missing)}." in night.sentence
    document = json.loads(write_night(night).document.read_text())
    assert (document["verdict"], document["missing"]) == ("UNDECIDED", night.missing)
    assert "UNDECIDED" in markdown(night).splitlines()[0]
    if isinstance(error, Exception):
        assert night.red("second")
        assert night.sentence.startswith("second: The step crashed: RuntimeError: out of memory.")
    night.close()
    again = Night(asked(tmp_path), steps([], first=GREEN, second=GREEN, third=GREEN))
    assert again.run() is Verdict.AGREES
    assert again.continued == ["first"]


def test_a_new_failure_is_red_even_with_a_known_one(tmp_path: Path) -> None:
    other = Failure("head", Verdict.DIFFERS, None, "head is wrong")
    both = StepResult(Verdict.DIFFERS, "two", failures=(FAULT, other), judged=RED.judged)
    night = Night(with_ledger(tmp_path), [*steps([], check=both), SETTLE])
    assert night.run() is Verdict.DIFFERS
    assert night.red("check")
    assert night.results["ledger"].sentence == "1 new, 0 expired, 0 healed."


def test_a_step_without_component_is_known_by_its_name(tmp_path: Path) -> None:
    text = ENTRY.replace("layers.3.ffn.experts.*", "night.text")
    drift = StepResult(Verdict.DIFFERS, "drifts")
    known = Night(with_ledger(tmp_path, text=text), [*steps([], text=drift), SETTLE])
    assert known.run() is Verdict.AGREES
    healed = Night(with_ledger(tmp_path, text=text), [*steps([], text=GREEN), SETTLE])
    assert healed.run() is Verdict.DIFFERS


def test_a_bad_ledger_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "ledger.yaml").write_text("component: x")
    ran: list[str] = []
    with pytest.raises(UnreadableFile):
        Night(asked(tmp_path, ledger=tmp_path / "ledger.yaml"), steps(ran, first=GREEN))
    assert not ran
    assert not (tmp_path / "out").exists()


def test_workers_of_xdist_are_refused_by_name() -> None:
    require_no_workers({})
    require_no_workers({"WORLD_SIZE": "8"})
    with pytest.raises(InvalidArgument, match="PYTEST_XDIST_WORKER"):
        require_no_workers({"PYTEST_XDIST_WORKER": "gw0"})
