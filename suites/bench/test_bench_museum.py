"""The bench of the museum: what a section says of a miss, and that the whole is run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.museum.museum import WHOLE, Museum
from degarble.harness.museum.plants import CauseAnswer, PlaceAnswer, PlantOutcome
from degarble.harness.museum.scores import HealthyRun
from degarble.suites.bench import bench_museum as bench
from degarble.suites.bench.figures import measure, rendered
from degarble.suites.bench.timing import Settings

if TYPE_CHECKING:
    import pytest

MADE = Museum(
    (
        PlantOutcome(
            "M10.nibble_order", "head", "a", "b", 9.0, PlaceAnswer.EXACT, CauseAnswer.FIRST
        ),
        PlantOutcome("M06.up", "norm", "a", "b", 90.0, PlaceAnswer.NOWHERE),
    ),
    (HealthyRun("a"),),
    ("M03.first",),
    12.0,
)


def test_it_runs_everything_and_reports_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def planted(*arguments: object) -> Museum:
        asked.append(arguments)
        return MADE

    monkeypatch.setattr(bench, "run_museum", planted)
    section = measure("museum", Settings())
    assert asked == [(tuple(MODEL_FAULTS), WHOLE, Settings().threads)]
    text = rendered(section, ("today",))
    assert "| M06.up | norm | 90.0x | nowhere | - |" in text
    assert "M03.first" in text
    met = {target.claim.partition(":")[0]: target.met for target in section.targets}
    assert met["localised to the component, from 3x"] is False
    assert met["alarms on healthy runs"] is True
    assert met["seconds in all"] is True
    measure("museum", Settings(rounds=1))
    assert asked[1][0] == ("M10.nibble_order",)
