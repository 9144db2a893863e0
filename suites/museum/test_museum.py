"""The museum as one run: what is done for which ids, what has no effect, and what decides."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from degarble.harness.engine.faults.fault_strength import DIALS
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.museum import museum
from degarble.harness.museum.cases import MuseumCase, Stage
from degarble.harness.museum.museum import (
    CHOSEN,
    Museum,
    MuseumExtent,
    MuseumTask,
    chosen,
    lines_to,
    run_museum,
    tasks,
)
from degarble.harness.museum.plants import CauseAnswer, PlaceAnswer, PlantOutcome, RepeatedRun
from degarble.harness.report.page import to_plain
from degarble.harness.report.verdict import Verdict
from degarble.suites.museum.museum_stages import KEY, root

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

SMALL = MuseumExtent(plants=2, healthy=0, cases=(MuseumCase(KEY, 1, (40, 7)),))


def test_ids_and_families_are_chosen_in_order() -> None:
    assert chosen(()) == tuple(MODEL_FAULTS)
    assert chosen(("M10.nibble_order",)) == ("M10.nibble_order",)
    family = tuple(name for name in MODEL_FAULTS if name.startswith("M10."))
    assert chosen(("M10", "M10.nibble_order")) == family
    assert len(family) > 1


def test_every_fault_is_a_task_and_some_are_asked_without_their_family() -> None:
    found = tasks(tuple(MODEL_FAULTS), museum.WHOLE)
    once = [task for task in found if not task.twice]
    planted = [task.fault for task in once if task.fault]
    assert sorted(planted) == sorted(MODEL_FAULTS)
    assert set(planted[: len(DIALS)]) == set(DIALS), "the longest first"
    assert sum(task.healthy is not None for task in once) >= 200
    assert {task.extent.leave_out for task in once if task.fault} == {1}
    some = tasks(tuple(MODEL_FAULTS), museum.PUBLISHED)
    assert {task.extent.leave_out for task in some if task.fault and not task.twice} == {0, 1}
    assert all(task.extent.leave_out for task in tasks(("M10.nibble_order",), CHOSEN))


def test_a_fault_is_planted_where_it_has_an_effect(tmp_path: Path) -> None:
    heard: list[str] = []
    with lines_to(tmp_path / "lines.jsonl") as ended:
        made = run_museum(("M10.nibble_order",), SMALL, told=heard.append, root=root(), ended=ended)
        (line,) = (tmp_path / "lines.jsonl").read_text().splitlines()
    told = json.loads(line)
    assert (told["task"], told["seconds"] > 0) == ("M10.nibble_order", True)
    assert [each["place"] for each in told["found"]] == ["exact", "exact"]
    assert heard == ["M10.nibble_order"]
    assert len(made.outcomes) == 2
    assert len({each.component for each in made.outcomes}) == 2
    assert all(
        (each.place, each.cause) == (PlaceAnswer.EXACT, CauseAnswer.FIRST) for each in made.outcomes
    )
    assert (made.verdict, made.missed, made.without_effect) == (Verdict.AGREES, (), ())
    document = to_plain(made.document())
    assert isinstance(document, dict)
    assert document["verdict"] == "AGREES"
    assert document["families"]["M10"]["plants"] == 2  # type: ignore[index,call-overload]


def test_races_and_healthy_cases_are_run_twice() -> None:
    found = [task for task in tasks(tuple(MODEL_FAULTS), museum.WHOLE) if task.twice]
    assert {task.fault for task in found} >= {"M36.workspace", "M37.tile", "M37.scales", ""}
    assert all(task.name.endswith(", twice") for task in found)
    race = MuseumTask(replace(SMALL, repeats=1), "M37.tile", twice=True)
    (made,) = museum.perform(root(), race)
    assert isinstance(made, RepeatedRun)
    assert made.right, made
    (same,) = museum.perform(
        root(), MuseumTask(SMALL, healthy=MuseumCase(KEY, 2, (9,)), twice=True)
    )
    assert isinstance(same, RepeatedRun)
    assert (same.fault, same.verdict) == ("", Verdict.AGREES)
    whole = Museum((), (), (), repeats=(made, same))
    assert whole.verdict is Verdict.AGREES
    wrong = replace(made, blamed=("head",)), replace(same, verdict=Verdict.UNSTABLE)
    assert Museum((), (), (), repeats=wrong[:1]).missed == ("M37.tile",)
    assert Museum((), (), (), repeats=wrong[1:]).verdict is Verdict.DIFFERS


def test_a_family_with_few_plants_is_told() -> None:
    plants = [PlantOutcome(f"M10.{n}", "head", "a", "b", 9.0, PlaceAnswer.EXACT) for n in range(3)]
    plants += [
        PlantOutcome("M06.up", "head", "a", "b", each, PlaceAnswer.EXACT)
        for each in (9.0, 9.0, 0.5)
    ]
    assert Museum(tuple(plants), (), ()).thin == ("M06",)


def test_mild_plants_are_added() -> None:
    made = run_museum(("M43.whole",), replace(SMALL, plants=1, mild=1), root=root())
    assert len(made.outcomes) == 4
    assert sum(1 <= each.effect < 16 for each in made.outcomes) >= 3


def test_a_fault_without_a_place_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(museum, "touches", lambda *_: False)
    made = run_museum(("M10.nibble_order",), SMALL, root=root())
    assert made.outcomes == ()
    assert made.without_effect == ("M10.nibble_order",)
    assert made.verdict is Verdict.AGREES


def test_healthy_runs_raise_no_alarm_and_a_planted_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = MuseumCase(KEY, 2, (9,), new_tokens=2)
    assert museum.judge_healthy(root(), case).alarms == ()

    def ill(self: Stage) -> object:
        bound = plain(self)
        call = bound.calls["norm"]
        bound.calls["norm"] = lambda inputs, weights: {
            name: 1.1 * each for name, each in call(inputs, weights).items()
        }
        return bound

    plain = Stage.candidate
    monkeypatch.setattr(Stage, "candidate", ill)
    found = museum.judge_healthy(root(), case)
    assert [alarm.split(":")[0] for alarm in found.alarms] == ["norm"]
