"""The night with small steps: order, continuing, what is red, pages, and ranks."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.base.errors import (
    EXIT_REFUSED,
    InvalidArgument,
    Refused,
    Undecided,
    UnreadableFile,
    UnwritablePath,
)
from degarble.harness.capture.files.reader import Capture
from degarble.harness.commands.report_folder import write_page
from degarble.harness.history.ledger import Failure
from degarble.harness.nightly import table as night_ranks
from degarble.harness.nightly.costs import StepCost
from degarble.harness.nightly.night import (
    Night,
    NightConfig,
    NightJournal,
    NightStep,
    StepResult,
    costs_of,
    files_digest,
    from_plain,
    require_no_workers,
    to_plain,
)
from degarble.harness.nightly.pages import markdown, page_of, write_night
from degarble.harness.nightly.steps import captures, environment, history, ledger
from degarble.harness.nightly.table import STEPS, follow, lead, over_ranks
from degarble.harness.plugins.pytest_plugin import NightOptions, RunOptions, read_within
from degarble.harness.report.page import PanelKind
from degarble.harness.report.verdict import NO_ERRORS, Verdict
from degarble.suites.checkpoint.reading_cases import TINY_V4
from degarble.suites.hang_guard import until
from degarble.suites.house.repository import ROOT
from degarble.suites.museum.torchrun import run_ranks
from degarble.suites.nights import test_night as entry
from degarble.suites.serve.talking_cases import write_tokenizer
from degarble.suites.snapshots import assert_as_kept
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable


# --------------------------------------------------------------------------------------------------
# The night with small steps: order, continuing, what is red, what the ledger excuses.

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


def _beside(result: StepResult | BaseException) -> tuple[list[NightStep], list[str], Event]:
    """Return steps of which the last one runs beside the second, what happened, and its end."""
    said: list[str] = []
    begun, ended = Event(), Event()

    def first(_config: NightConfig, _given: object) -> StepResult:
        assert not begun.is_set(), "what it needs is not done"
        return GREEN

    def second(_config: NightConfig, _given: object) -> StepResult:
        assert begun.wait(60)
        said.append("second")
        ended.set()
        return GREEN

    def long(_config: NightConfig, given: object) -> StepResult:
        assert given == {"first": GREEN}
        begun.set()
        assert ended.wait(60)
        said.append("long")
        if isinstance(result, BaseException):
            raise result
        return result

    def stop() -> None:
        said.append("stopped")
        ended.set()

    made = [NightStep("first", first), NightStep("second", second)]
    return [*made, NightStep("long", long, ("first",), stop=stop)], said, begun


def test_a_long_step_runs_beside_those_in_front_of_it(tmp_path: Path) -> None:
    made, said, _ = _beside(GREEN)
    night = Night(asked(tmp_path), made)
    assert night.run() is Verdict.AGREES
    night.close()
    assert said == ["second", "long"]


def test_a_step_beside_others_is_not_begun_again_by_a_night_that_continues(tmp_path: Path) -> None:
    made, said, _ = _beside(RED)
    assert Night(asked(tmp_path), made).run() is Verdict.DIFFERS
    again = Night(asked(tmp_path), made)
    assert again.run() is Verdict.DIFFERS
    assert again.continued == ["first", "second", "long"]
    assert said == ["second", "long"]


def test_what_a_step_beside_others_raises_counts_at_its_turn(tmp_path: Path) -> None:
    made, _, _ = _beside(InvalidArgument("kernels", 3, "some", "Give some."))
    night = Night(asked(tmp_path), made)
    assert night.result("first") == night.result("second") == GREEN
    assert night.result("long").verdict is Verdict.REFUSED
    crashing, _, _ = _beside(ZeroDivisionError("crash"))
    (tmp_path / "model" / "weights").write_text("two")
    night = Night(asked(tmp_path), crashing)
    with pytest.raises(ZeroDivisionError):
        night.run()
    assert night.crashed == ["long"]


def test_an_interrupted_night_stops_the_step_beside_it(tmp_path: Path) -> None:
    made, said, begun = _beside(GREEN)

    def interrupted(_config: NightConfig, _given: object) -> StepResult:
        assert begun.wait(60)
        raise KeyboardInterrupt

    made[1] = replace(made[1], run=interrupted)
    night = Night(asked(tmp_path), made)
    with pytest.raises(KeyboardInterrupt):
        night.run()
    night.close()
    assert said[0] == "stopped"
    assert night.missing == ["second", "long"]


def test_an_interrupted_night_keeps_what_ran_beside_it_and_is_done(tmp_path: Path) -> None:
    made, said, _ = _beside(RED)
    (long,) = (step for step in made if step.stop)
    ended = Event()

    def noted(config: NightConfig, given: Any) -> StepResult:
        result = long.run(config, given)
        ended.set()
        return result

    def interrupted(_config: NightConfig, _given: object) -> StepResult:
        assert ended.wait(60)
        raise KeyboardInterrupt

    steps = [*made[:2], NightStep("third", interrupted), replace(long, run=noted)]
    night = Night(asked(tmp_path), steps)
    with pytest.raises(KeyboardInterrupt):
        night.run()
    until(night._beside["long"].done)
    night.stop()
    assert night.results["long"] == RED
    again = Night(asked(tmp_path), steps)
    assert again.result("long") == RED
    assert again.continued == ["first", "long"]
    assert said == ["second", "long"]


def test_a_step_behind_runs_without_those_that_run_beside_others(tmp_path: Path) -> None:
    """Rates of kernels are measured alone, and nothing begins that nobody wants."""
    made, said, begun = _beside(GREEN)
    last = NightStep("last", lambda *_: said.append("last") or GREEN)  # type: ignore[func-returns-value]
    partial_night = Night(asked(tmp_path), [*made, last])
    assert partial_night.result("first") == partial_night.result("last") == GREEN
    assert not begun.is_set()
    night = Night(asked(tmp_path), [*made, replace(last, name="behind")])
    assert night.result("first") == night.result("second") == GREEN
    assert night.result("behind") == GREEN
    assert said == ["last", "second", "long", "last"]


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


@pytest.mark.slow
def test_a_killed_night_resumes_after_its_finished_steps(tmp_path: Path) -> None:
    asked(tmp_path)  # makes the model
    line = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path)]
    process = subprocess.Popen([*line, "forever"])
    until(lambda: bool(list(tmp_path.rglob(".second.*.part"))))
    with pytest.raises(UnwritablePath, match="no other night"):
        Night(asked(tmp_path), steps([], first=GREEN))
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = sorted(path.name for path in tmp_path.rglob("*.json"))
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
        entry._begun({}, run, gpu=False, say=print)
    assert end.value.returncode == EXIT_REFUSED


def looking(seen: list[bool]) -> list[NightStep]:
    """Make steps of which the second can be screened, and keeps whether it was."""

    def check(config: NightConfig, _: object) -> StepResult:
        seen.append(config.screen)
        return GREEN

    (first, last) = steps([], first=GREEN, last=GREEN)
    return [first, NightStep("check", check, screens=True), replace(last, needs=("check",))]


def of_costs(folder: Path, **more: object) -> NightConfig:
    """Return a night after one whose steps took an hour each, and 20 minutes when screened."""
    config = asked(folder, **more)
    costs = costs_of(config)
    costs.path.parent.mkdir(parents=True, exist_ok=True)
    for name in ("first", "check", "last"):
        costs.add(name, StepCost(3600.0, 2_000_000, "2026-11-21"))
    costs.add("check", StepCost(1200.0, 1_000_000, "2026-11-21"), screened=True)
    return config


_FIRST = "with check screened; first takes longest"


@pytest.mark.parametrize(
    ("within", "screened", "limit"),
    [
        (None, False, ""),
        (4 * 3600.0, False, "limit 4 h 00 min: it holds"),
        (5400.0, True, f"limit 1 h 30 min: exceeded by 50 min 00 s even so, {_FIRST}"),
    ],
)
def test_a_limit_is_held_by_screening(
    within: float | None, screened: bool, limit: str, tmp_path: Path
) -> None:
    seen: list[bool] = []
    night = Night(of_costs(tmp_path, within=within), looking(seen))
    total = "2 h 20 min, 5.00 MB" if screened else "3 h 00 min, 6.00 MB"
    assert night.plan[0] == f"cost of this night: {total} written, as 2026-11-21 took"
    assert night.plan[1 : len(night.plan) - 3] == [limit] * bool(limit)
    name = "  check --screen: 20 min 00 s, 1.00 MB" if screened else "  check: 1 h 00 min, 2.00 MB"
    assert night.plan[-2] == name
    night.run()
    assert seen == [screened]
    words = ("It looked at sampled rows first, to end within 1 h 30 min.",)
    assert night.results["check"].lines == words * screened


def test_what_is_not_known_is_said_and_does_not_pass_for_quick(tmp_path: Path) -> None:
    seen: list[bool] = []
    night = Night(asked(tmp_path, within=7200.0), looking(seen))
    assert night.plan == [
        "cost of this night: unknown: first, check, last",
        "limit 2 h 00 min: it holds as far as costs are known, with check screened",
        "  first: unknown",
        "  check --screen: unknown",
        "  last: unknown",
    ]
    night.run()
    night.close()
    assert seen == [True], "nobody knows that a whole check fits"
    again = Night(asked(tmp_path, within=7200.0), looking(seen))
    known = again.budget.costs
    assert set(known.steps) == {"first", "check --screen", "last"}
    assert again.plan[-2] == "  check: unknown", "16 times a moment fits as well"
    again.run()
    assert seen == [True, False]
    other = costs_of(asked(tmp_path, repeats=7))
    assert not other.steps, "a night of another kind costs otherwise"
    whole = known.path.read_text()
    seconds = re.sub(r'"seconds": [^,]+', '"seconds": NaN', whole)
    for damaged in ("[1]", seconds, re.sub(r'"nbytes": [^,]+', '"nbytes": 1e999', whole)):
        known.path.write_text(damaged)
        assert not costs_of(asked(tmp_path)).steps, "a damaged file is no history"
    known.path.write_text(whole)
    assert costs_of(asked(tmp_path)).steps


def test_a_screened_check_that_took_long_is_screened_again(tmp_path: Path) -> None:
    config = asked(tmp_path, within=7200.0)
    costs = costs_of(config)
    costs.path.parent.mkdir(parents=True, exist_ok=True)
    costs.add("check", StepCost(600.0, 1, "2026-11-21"), screened=True)
    seen: list[bool] = []
    night = Night(config, looking(seen))
    assert night.plan[1].endswith("it holds as far as costs are known, with check screened")
    night.run()
    assert seen == [True]


def test_the_plan_of_a_night_that_continues_is_of_what_is_left(tmp_path: Path) -> None:
    config = of_costs(tmp_path, within=4000.0)
    seen: list[bool] = []
    begun = Night(config, looking(seen))
    begun.result("first")
    begun.result("check")
    night = Night(config, looking(seen))
    assert night.plan == [
        "cost of this night: 1 h 00 min, 2.00 MB written, as 2026-11-21 took",
        "limit 1 h 06 min: it holds",
        "  last: 1 h 00 min, 2.00 MB",
    ]


def test_a_check_that_judged_nothing_is_no_measure_of_its_time(tmp_path: Path) -> None:
    undecided = StepResult(Verdict.UNDECIDED, "no captures")
    step = NightStep("check", lambda _config, _given: undecided, screens=True)
    night = Night(asked(tmp_path), [step])
    night.run()
    assert not night.budget.costs.steps


@pytest.mark.parametrize(
    ("text", "seconds"), [("2h", 7200.0), ("1h30m", 5400.0), ("45m", 2700.0), ("90s", 90.0)]
)
def test_a_limit_is_read(text: str, seconds: float) -> None:
    assert read_within(text) == seconds


@pytest.mark.parametrize("text", ["", "0h", "two hours", "2", "-1h", "1m2h"])
def test_a_limit_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--within"):
        read_within(text)


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


# --------------------------------------------------------------------------------------------------
# Results survive the journal; changed files are detected.

RESULT = StepResult(
    Verdict.UNSTABLE,
    "Two answers.",
    asked=False,
    values={"budgets": {"head": 0.5}},
    failures=(Failure("head", Verdict.UNSTABLE, None, "two"),),
    judged=("head", "norm"),
    facts={"machine": "CPU"},
    lines=("a", "b"),
    rows=(("run-1", "AGREES", "equal"),),
)


def test_a_result_round_trips_through_json() -> None:
    assert from_plain(json.loads(json.dumps(to_plain(RESULT)))) == RESULT


def test_a_journal_answers_for_the_same_key_alone(tmp_path: Path) -> None:
    journal = NightJournal(tmp_path / "work")
    assert not journal.continues
    journal.write("check", "key", RESULT)
    again = NightJournal(tmp_path / "work")
    assert again.continues
    assert again.started == journal.started
    assert again.read("check", "key") == RESULT
    assert again.read("check", "other") is None
    assert again.read("audit", "key") is None
    again.finish()
    assert NightJournal(tmp_path / "work").read("check", "key") is None


def test_a_changed_file_is_reported(tmp_path: Path) -> None:
    assert files_digest(None) == files_digest(tmp_path / "nothing") == []
    file = tmp_path / "a" / "b"
    file.parent.mkdir()
    file.write_text("one")
    told = files_digest(tmp_path)
    assert told[0][:2] == ("a/b", 3)
    assert files_digest(file)[0][:2] == ("b", 3)
    file.write_text("longer")
    assert files_digest(tmp_path) != told


def test_a_name_never_leads_out_of_the_folder(tmp_path: Path) -> None:
    for name in ("..", "../x", "/", "a/b", "\N{SNOWMAN}"):
        config = NightConfig(tmp_path, tmp_path, tmp_path, "2026-11-22", subject=name)
        assert config.work.parent == tmp_path / "work"
        assert config.work.name not in ("", ".", "..")


@pytest.mark.parametrize("killed_at", [0, 1, 2])
def test_a_journal_that_is_killed_while_it_is_cleared_begins_anew(
    killed_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = NightJournal(tmp_path)
    journal.write("one", "key", StepResult(Verdict.AGREES, "Well."))
    journal.finish()
    removed: list[Path] = []
    unlink = Path.unlink

    def until_killed(path: Path, **named: bool) -> None:
        if path.parent == tmp_path and not path.name.startswith("."):
            if len(removed) == killed_at:
                raise KeyboardInterrupt
            removed.append(path)
        unlink(path, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", until_killed)
        with pytest.raises(KeyboardInterrupt):
            NightJournal(tmp_path)
    assert not NightJournal(tmp_path).continues


# --------------------------------------------------------------------------------------------------
# A night over ranks: who does what, without processes; and one real night of two ranks.

RANKS = 2


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> deque[Any]:
    """What rank 0 says, in order; read again by whoever follows."""
    said: deque[Any] = deque()

    def report(word: Any = None) -> Any:
        if word is None:
            return said.popleft()
        said.append(json.loads(json.dumps(word)))
        return word

    monkeypatch.setattr(night_ranks, "broadcast_json", report)
    return said


@pytest.fixture
def ranks_asked(tmp_path: Path) -> NightConfig:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w7 w8")
    model = tmp_path / "model"
    return NightConfig(
        model, model, tmp_path / "out", "2026-11-22", repeats=2, ranks=RANKS, prompts=prompts
    )


def test_other_ranks_receive_what_a_step_reported(words: deque[Any]) -> None:
    assert lead("audit", lambda: GREEN) is GREEN
    assert follow("audit") == "AGREES: All is well."
    assert not words


@pytest.mark.usefixtures("words")
def test_a_crashed_step_leaves_no_rank_waiting() -> None:
    def crash() -> StepResult:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        lead("audit", crash)
    assert follow("audit") == "no answer: see rank 0"


@pytest.mark.usefixtures("words")
def test_every_rank_captures_in_a_process_of_its_own(
    ranks_asked: NightConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[dict[str, str]] = []

    def child(line: list[str], **named: Any) -> Any:
        ran.append(named["env"])
        assert line[0] == sys.executable
        assert line[1:5] == ["-m", "degarble.harness.cli.main", "--quiet", "capture"]
        return type("Done", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr("degarble.harness.nightly.table.subprocess.run", child)
    monkeypatch.setattr(Capture, "open", lambda _: SimpleNamespace(facts={}))
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    [step] = over_ranks([NightStep("captures", captures)], RANKS)
    result = lead("captures", lambda: step.run(ranks_asked, {}))
    assert result.facts["ranks"] == str(RANKS)
    assert [name for name, _, _ in result.rows] == ["run-1", "run-2"]
    first = list(ran)
    assert follow("captures").startswith("AGREES")
    assert ran == first * 2, "both ranks run the same, and meet at the same ports"
    assert len({each["MASTER_PORT"] for each in ran} - {"1"}) == ranks_asked.repeats
    assert not any("TORCHELASTIC_USE_AGENT_STORE" in each for each in ran)


@pytest.mark.usefixtures("words")
def test_a_capture_that_fails_says_why(
    ranks_asked: NightConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def child(*_: Any, **__: Any) -> Any:
        return type("Done", (), {"returncode": 2, "stderr": "no such\n  checkpoint"})

    monkeypatch.setattr("degarble.harness.nightly.table.subprocess.run", child)
    [step] = over_ranks([NightStep("captures", captures)], RANKS)
    with pytest.raises(InvalidArgument, match="no such checkpoint"):
        step.run(ranks_asked, {})


def test_kernels_and_captures_of_ones_own_are_refused(
    ranks_asked: NightConfig, tmp_path: Path
) -> None:
    [step] = over_ranks([NightStep("captures", captures)], RANKS)
    with pytest.raises(InvalidArgument, match="--backend"):
        step.run(replace(ranks_asked, backend="cutedsl"), {})
    with pytest.raises(InvalidArgument, match="--captures"):
        step.run(replace(ranks_asked, captures=tmp_path), {})


@pytest.mark.slow
def test_a_night_of_two_ranks_makes_one_report(tmp_path: Path) -> None:
    config = replace(TINY_V4, moe_intermediate_size=128 * RANKS)
    write_checkpoint(tmp_path / "model", Synthetic(config, "bf16", seed=3))
    write_tokenizer(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("w7 w8 w9\nw9 w8\n")
    out, xml = tmp_path / "out", tmp_path / "night.xml"
    line = ["-q", "-m", "night", str(ROOT / "suites" / "nights"), "--repeats", "2"]
    line += ["--checkpoint", str(tmp_path / "model"), "--reference", str(tmp_path / "model")]
    line += ["--prompts", str(tmp_path / "prompts.txt"), "--report-dir", str(out)]
    line += ["-k", "environment or captures or repeats or check", f"--junitxml={xml}"]
    run_ranks("pytest", RANKS, *line)
    captured = sorted((out / "work" / "model" / "captures").iterdir())
    assert [path.name for path in captured] == ["run-1", "run-2"]
    assert all(Capture.open(path).facts["ranks"] == RANKS for path in captured)
    text = xml.read_text(encoding="utf-8")
    assert 'failures="0"' in text
    assert "rank 0 judges" not in text


# --------------------------------------------------------------------------------------------------
# Summary, document and page of a night: every word, escaped names, panels in their order.

IDENTITY = "sha256:" + "5a" * 32
RESULTS = {
    "environment": StepResult(
        Verdict.AGREES,
        "CPU: of a suite; no GPU.",
        facts={"machine": "CPU: of a suite", "manifest": IDENTITY},
    ),
    "audit": StepResult(Verdict.AGREES, "No error in the structure of all 612 tensors."),
    "codecs": StepResult(Verdict.AGREES, "44 known answers of the formats are met."),
    "kernels": StepResult(Verdict.UNDECIDED, "No GPU was asked for.", asked=False),
    "check": StepResult(
        Verdict.DIFFERS,
        "Layer 3, ffn.experts.w2: the two nibbles of each byte are exchanged.",
        values={"budgets": {FAULT.component: 812.0, "head": 0.25}},
        failures=(FAULT,),
        judged=(FAULT.component, "head"),
        lines=("Layer 3, ffn.experts.w2: nibbles exchanged. Store the even element low.",),
    ),
    "text": StepResult(
        Verdict.DIFFERS,
        "perplexity: drift 0.9 nats.",
        rows=(("perplexity", "DIFFERS", "drift 0.9"), ("echo", "AGREES", "drift 0")),
        failures=(Failure("text.perplexity", Verdict.DIFFERS, None, "drift 0.9"),),
    ),
    "museum": StepResult(Verdict.UNDECIDED, "It was to run and could not: `a|b` <b>"),
}
LEDGER = """
- component: text.*
  verdict: DIFFERS
  issue: https://example.org/12
  until: 2026-12-01
  why: being mended
"""


def night_in(folder: Path) -> Night:
    checkpoint = folder / "tiny_[v4]"
    checkpoint.mkdir()
    (folder / "known.yaml").write_text(LEDGER)
    config = NightConfig(
        checkpoint, checkpoint, folder / "out", "2026-11-22", commit="4" * 40,
        store=str(folder / "history.sqlite"), ledger=folder / "known.yaml",
    )  # fmt: skip
    steps = [NightStep(name, lambda *_, each=result: each) for name, result in RESULTS.items()]
    closing = [
        NightStep("history", history, all_before=True),
        NightStep("ledger", ledger, all_before=True),
    ]
    night = Night(config, [*steps, *closing])
    night.run()
    return night


def test_the_summary_says_everything(tmp_path: Path) -> None:
    assert_as_kept("nightly/night.txt", markdown(night_in(tmp_path)))


def test_page_document_and_summary_are_written(tmp_path: Path) -> None:
    night = night_in(tmp_path)
    written = write_night(night)
    html = written.page.read_text()
    assert "drift 0.9" in html
    assert "Ledger: known until 2026-12-01" in html
    document = json.loads(written.document.read_text())
    assert document["verdict"] == "DIFFERS"
    assert document["red"] == ["check", "museum", "ledger"]
    assert document["steps"]["check"]["failures"][0]["fault"] == "M10.nibble_order"
    assert written.summary.read_text() == markdown(night)
    before = written.page.read_bytes()
    assert write_night(night).page.read_bytes()[:200] == before[:200]


def test_a_night_that_failed_is_not_headed_by_the_word_of_its_check(tmp_path: Path) -> None:
    night = night_in(tmp_path)
    checked = replace(page_of(night), verdict=Verdict.AGREES, word=NO_ERRORS)
    write_page(night.asked.folder, checked)
    page = page_of(night)
    assert (page.verdict, page.word) == (Verdict.DIFFERS, "")


def test_the_page_has_the_panels_that_a_night_has(tmp_path: Path) -> None:
    page = page_of(night_in(tmp_path))
    assert page.verdict is Verdict.DIFFERS
    assert page.sentence.startswith("check: Layer 3, ffn.experts.w2: the two nibbles")
    found = {panel.kind: panel for panel in page.panels}
    assert set(found) == {PanelKind.TEXT, PanelKind.KERNELS, PanelKind.HISTORY}
    assert found[PanelKind.KERNELS].verdict is Verdict.UNDECIDED  # codecs alone prove no kernel
    assert found[PanelKind.TEXT].verdict is Verdict.DIFFERS
    assert page.subject.manifest_hash == IDENTITY
