"""What a history tells: the night, the commits between, and what else changed."""

from dataclasses import replace
from pathlib import Path

import pytest

from degarble.harness.history.changes import bands, explained_changes, last_green, place_differences
from degarble.harness.history.records import BUDGETS, SPEED
from degarble.harness.history.store import HistoryStore
from degarble.harness.report.verdict import Verdict
from degarble.suites.history.history_cases import W2, history, night, run


def test_which_night_and_which_commit_moved_it(tmp_path: Path, seed: int) -> None:
    with HistoryStore(str(tmp_path / "h.sqlite"), create=True) as store:
        for each in history(60, 45, seed):
            store.add(each)
        [stream] = store.streams()
        [found] = explained_changes(store.nights(stream, "budgets"), BUDGETS)
    assert (found.place, found.first, found.last_before, found.found) == (
        W2, night(45), night(44), night(46),
    )  # fmt: skip
    assert found.worse
    assert not found.red
    assert found.commits == "0000002c0000..0000002d0000"
    assert found.differs == (("torch", "2.13.0", "2.14.0"),)
    assert found.size == pytest.approx(0.4 / found.noise, rel=0.3)
    assert W2 in found.sentence
    assert night(45) in found.sentence
    assert "torch 2.13.0 -> 2.14.0" in found.sentence


@pytest.mark.parametrize(("after", "red"), [(0.83, False), (0.70, True), (1.10, False)])
def test_a_kernel_that_lost_a_tenth_of_its_speed_is_red(
    after: float, red: bool, tmp_path: Path
) -> None:
    with HistoryStore(str(tmp_path / "h.sqlite"), create=True) as store:
        for number in range(50):
            speed = {"quantise_nvfp4": 0.9 if number < 40 else after}
            store.add(run(number, values={"speed": speed}))
        [stream] = store.streams()
        [found] = explained_changes(store.nights(stream, "speed"), SPEED)
    assert (found.red, found.worse) == (red, after < 0.9)


def test_two_runs_are_compared() -> None:
    first = {"budgets": {"a": 0.1, "b": 0.2, "gone": 0.3}}
    second = {"budgets": {"a": 0.1, "b": 0.5, "new": 0.4}, "distance": {"a": 1e-6}}
    found = place_differences(first, second)
    assert [(each.place, each.measure) for each in found[:3]] == [
        ("gone", "budgets"), ("new", "budgets"), ("a", "distance"),
    ]  # fmt: skip
    assert found[3].place == "b"
    assert found[3].move == pytest.approx(0.3)
    assert found[-1].move == 0


def test_the_last_green_run(tmp_path: Path) -> None:
    with HistoryStore(str(tmp_path / "h.sqlite"), create=True) as store:
        for number in range(4):
            wrong = number == 3
            store.add(replace(run(number), verdict=Verdict.DIFFERS if wrong else Verdict.AGREES))
        runs = store.runs()
    green = last_green(runs, Verdict.AGREES)
    assert green is not None
    assert green.night == night(2)
    assert last_green(runs[3:], Verdict.AGREES) is None


def test_bands_keep_the_extremes_of_neighbouring_nights() -> None:
    nan = float("nan")
    assert bands([1.0, 3.0, nan, nan, 2.0, nan], 3) == [(1.0, 3.0), None, (2.0, 2.0)]
    assert bands([1.0, 2.0], 5) == [(1.0, 1.0), (2.0, 2.0)]
