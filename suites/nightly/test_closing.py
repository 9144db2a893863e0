"""A night in the history: what moved is told, a speed that fell is red; the museum's misses too."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any

from degarble.harness.history.records import BUDGETS, MUSEUM, SPEED
from degarble.harness.history.store import HistoryStore
from degarble.harness.museum import museum as museum_run
from degarble.harness.museum.museum import Museum
from degarble.harness.museum.plants import CauseAnswer, PlaceAnswer, PlantOutcome
from degarble.harness.museum.scores import HealthyRun
from degarble.harness.nightly import steps
from degarble.harness.nightly.night import NightConfig, StepResult
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

KERNEL = "kernels.quantise_nvfp4"


SPEED_LEDGER = """
- component: speed.kernels.*
  verdict: DIFFERS
  issue: https://example.org/12
  until: 2026-02-10
  why: being mended
"""


def asked(folder: Path, night: int = 0, **more: object) -> NightConfig:
    day = str(date(2026, 1, 1) + timedelta(days=night))
    made = NightConfig(
        folder, folder, folder, day, store=str(folder / "history.sqlite"),
        commit=f"{night:040x}", started=day, subject="tiny",
    )  # fmt: skip
    return replace(made, **more)  # type: ignore[arg-type]


def measured(speed: float, budget: float) -> dict[str, StepResult]:
    values = {SPEED.name: {KERNEL: speed}, BUDGETS.name: {"head": budget}}
    return {"check": StepResult(Verdict.AGREES, "well", values=values)}


def nights(folder: Path, speed: float, budget: float) -> StepResult:
    """32 nights that are alike, then two that are not."""
    for night in range(32):
        quiet = steps.history(asked(folder, night), measured(0.9 + night % 3 / 1000, 0.5))
        assert quiet.verdict is Verdict.AGREES
        assert quiet.lines == ()
    for night in (32, 33):
        found = steps.history(asked(folder, night), measured(speed, budget))
    return found


def test_a_speed_that_fell_turns_the_night_red(tmp_path: Path) -> None:
    found = nights(tmp_path, 0.7, 0.5)
    assert found.verdict is Verdict.DIFFERS
    assert found.failures[0].component == f"speed.{KERNEL}"
    assert "in the night 2026-02-02" in found.sentence
    assert f"commits {31:040x}"[:20] in found.sentence
    with HistoryStore(str(tmp_path / "history.sqlite")) as store:
        assert len(store.runs()) == 34
        assert [each.verdict for each in store.runs()[-2:]] == [Verdict.AGREES, Verdict.DIFFERS]
    # It stays red until the speed is back for two nights, or the ledger knows it.
    stays = steps.history(asked(tmp_path, 34), measured(0.7, 0.5))
    assert stays.verdict is Verdict.DIFFERS
    (tmp_path / "known.yaml").write_text(SPEED_LEDGER)
    known = asked(tmp_path, 35, ledger=tmp_path / "known.yaml")
    assert steps.history(known, measured(0.7, 0.5)).failures == stays.failures
    with HistoryStore(str(tmp_path / "history.sqlite")) as store:
        assert [each.verdict for each in store.runs()[-2:]] == [Verdict.DIFFERS, Verdict.AGREES]
    once = steps.history(asked(tmp_path, 36), measured(0.9, 0.5))
    assert once.verdict is Verdict.DIFFERS
    healed = steps.history(asked(tmp_path, 37), measured(0.9, 0.5))
    assert healed.verdict is Verdict.AGREES
    assert healed.judged == (f"speed.{KERNEL}",)


def test_slower_steps_and_budgets_are_reported_and_not_red(tmp_path: Path) -> None:
    found = nights(tmp_path, 1.0, 0.8)
    assert found.verdict is Verdict.AGREES
    assert {line.partition(":")[0] for line in found.lines} == {"speed", "budgets"}


def test_a_night_is_kept_with_its_verdict_facts_and_worst(tmp_path: Path) -> None:
    results = measured(0.9, 0.5) | {
        "audit": StepResult(Verdict.DIFFERS, "wrong", facts={"manifest": "sha256:1"}),
        "text": StepResult(Verdict.UNDECIDED, "not asked", asked=False),
    }
    run = steps.run_of(asked(tmp_path), results)
    assert run is not None
    assert run.verdict is Verdict.DIFFERS
    assert run.facts == {"manifest": "sha256:1"}
    assert steps.run_of(asked(tmp_path), {"audit": results["audit"]}) is None
    assert steps.history(asked(tmp_path), {"audit": results["audit"]}).red
    assert not steps.history(asked(tmp_path, store=None), results).red


def test_a_night_on_the_cpu_is_none_of_the_gpu_that_is_there(tmp_path: Path) -> None:
    facts = {"machine": "CPU: 2 cores", "GPU 0 name": "NVIDIA B200"}
    results = measured(0.9, 0.5) | {"environment": StepResult(Verdict.AGREES, "", facts=facts)}
    for gpu, machine in ((True, "NVIDIA B200"), (False, "CPU: 2 cores")):
        run = steps.run_of(asked(tmp_path, gpu=gpu), results)
        assert run is not None
        assert run.machine == machine


def museum(monkeypatch: pytest.MonkeyPatch, folder: Path, **more: Any) -> StepResult:
    made = Museum(outcomes=(), without_effect=(), **({"healthy": ()} | more))
    monkeypatch.setattr(museum_run, "run_museum", lambda *_, **__: made)
    return steps.museum(asked(folder), {})


def test_a_museum_with_an_alarm_is_red(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert museum(monkeypatch, tmp_path).verdict is Verdict.AGREES
    found = museum(monkeypatch, tmp_path, healthy=(HealthyRun("v4 long", ("head: wrong",)),))
    assert found.verdict is Verdict.DIFFERS
    assert [each.component for each in found.failures] == ["museum.v4 long"]


def test_models_of_nights_long_over_are_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = {"museum-2025-12-30", "museum-2025-12-31", "museum-of-somebody", "tiny"}
    for name in names:
        (tmp_path / "work" / name / "v4").mkdir(parents=True)
    museum(monkeypatch, tmp_path)
    left = {each.name for each in (tmp_path / "work").iterdir()}
    assert left == names - {"museum-2025-12-30"} | {"museum-2026-01-01"}


MUSEUM_LEDGER = """
- component: museum.M01.inverse
  verdict: DIFFERS
  issue: https://example.org/12
  until: 2026-01-02
  why: being mended
- component: museum.M26.weights
  verdict: DIFFERS
  issue: https://example.org/13
  until: 2026-01-02
  why: being mended
- component: kernels.another
  verdict: DIFFERS
  issue: https://example.org/14
  until: 2026-01-02
  why: being mended
"""


def test_only_what_was_planted_and_ran_can_heal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    planted = PlantOutcome(
        "M01.inverse", "head", "", "v4 long", 2.0, PlaceAnswer.EXACT, CauseAnswer.FIRST
    )
    made = Museum((planted,), (HealthyRun("v4 short"),), ())
    monkeypatch.setattr(museum_run, "run_museum", lambda *_, **__: made)
    found = steps.museum(asked(tmp_path), {})
    assert found.judged == ("museum.M01.inverse", "museum.v4 short")
    assert found.values == {
        MUSEUM.name: {"no alarms on healthy runs": 1.0, "healthy runs judged": 1.0}
    }
    (tmp_path / "known.yaml").write_text(MUSEUM_LEDGER)
    kernels = StepResult(Verdict.AGREES, "well", judged=(KERNEL,))
    given = asked(tmp_path, ledger=tmp_path / "known.yaml")
    settled = steps.ledger(given, {"museum": found, "kernels": kernels, "figures": kernels})
    assert [each.component for each in settled.failures] == ["ledger.museum.M01.inverse"]


def test_the_faults_of_a_short_night_exist() -> None:
    assert set(steps.PLANTED) <= set(museum_run.chosen(()))
