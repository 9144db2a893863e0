"""Change points: silence over simulated years, moves found in time, and the night that began them.

The years are of 2,440 series (61 layers of 40 components), with noise that is normal, heavy-tailed,
carried over, coarse, or none at all.
"""

import numpy as np
import pytest

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.history.changes import TESTED, WINDOWS, ChangeDetector, changes_of, threshold

SERIES = 61 * 40
YEARS = 5
NIGHTS = 365 * YEARS


def noise(kind: str, seed: int, nights: int = NIGHTS, series: int = SERIES) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape = (nights, series)
    if kind == "heavy":
        return rng.standard_t(5, shape)
    if kind == "coarse":
        return np.round(0.3 * rng.standard_normal(shape))
    values = rng.standard_normal(shape)
    if kind == "carried":
        for night in range(1, nights):
            values[night] += 0.5 * values[night - 1]
    if kind == "gaps":
        values[rng.random(shape) < 0.1] = np.nan
    return values


@pytest.mark.parametrize(
    "kind",
    [
        "normal",
        "carried",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("heavy", "coarse", "gaps")),
    ],
)
def test_healthy_years_bring_at_most_one_alarm_each(kind: str, seed: int) -> None:
    found = changes_of(noise(kind, seed))
    assert len(found) <= YEARS, [(each.series, each.first, each.deviate) for each in found]


def test_a_threshold_without_the_number_of_series_is_loud(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("degarble.harness.history.changes.threshold", lambda _series: threshold(1))
    assert len(changes_of(noise("normal", seed, 365))) > 20


@pytest.mark.parametrize(
    ("runs", "shift", "least"),
    [
        pytest.param(4, 3.0, 0.99, id="3 sigma, 4 runs a night"),
        pytest.param(1, 6.0, 0.99, id="6 sigma, one run"),
    ],
)
def test_a_shift_is_found_within_two_nights(
    runs: int, shift: float, least: float, seed: int
) -> None:
    at, series = 400, 1000
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((at + 4, series, runs)).mean(axis=2)
    sign = np.where(np.arange(series) % 2, 1.0, -1.0)
    values[at:] += shift * sign
    within = {each.series: each for each in changes_of(values) if at <= each.found <= at + 1}
    assert len(within) / series >= least
    first = np.mean([each.first == at for each in within.values()])
    assert first >= 0.9
    assert all(np.sign(each.size) == sign[each.series] for each in within.values())


def test_one_wild_night_is_no_change_and_spoils_no_baseline(seed: int) -> None:
    values = noise("normal", seed, 300, 50)
    values[100] += 1e6
    values[200:, 7] += 8.0
    found = changes_of(values)
    assert [(each.series, each.first, each.found) for each in found] == [(7, 200, 201)]


def test_what_never_moved_moves_by_more_than_its_measure_grants() -> None:
    values = np.full((60, 3), 0.25)
    values[40:, 1] = 0.5
    values[40:, 2] = 0.25 + 0.005
    found = changes_of(values, 0.01)
    assert [(each.series, each.first, each.last_before, each.found) for each in found] == [
        (1, 40, 39, 41)
    ]
    assert (found[0].before, found[0].after, found[0].noise) == (0.25, 0.5, 0.01)


def test_a_level_that_returns_is_two_changes(seed: int) -> None:
    values = noise("normal", seed, 200, 4)
    values[60:120, 2] += 20.0
    assert [(each.series, each.first) for each in changes_of(values)] == [(2, 60), (2, 120)]


def test_a_series_that_pauses_is_tested_on_the_nights_that_it_has(seed: int) -> None:
    values = noise("normal", seed, 200, 5)
    values[50:90] = np.nan
    values[100:, 3] += 12.0
    values[101, 3] = np.nan
    [change] = changes_of(values)
    assert (change.series, change.first, change.found) == (3, 100, 102)


def test_nothing_is_said_before_enough_was_learned(seed: int) -> None:
    values = noise("normal", seed, TESTED, 10)
    values[TESTED // 2 :] += 50.0
    assert changes_of(values) == []


def test_an_incremental_watch_finds_what_a_full_walk_finds(seed: int) -> None:
    values = noise("normal", seed, 150, 20)
    values[90:, 4] -= 9.0
    watch = ChangeDetector(20)
    step = [each for night, row in enumerate(values) for each in watch.see(night, row)]
    assert step == changes_of(values)
    assert [each.series for each in step] == [4]


def test_the_threshold_shares_a_quarter_of_an_alarm_a_year() -> None:
    from statistics import NormalDist  # noqa: PLC0415

    beyond = 2 * (1 - NormalDist().cdf(threshold(SERIES)))
    assert beyond * SERIES * 365 * len(WINDOWS) == pytest.approx(0.25, rel=1e-6)


def test_a_single_list_is_refused() -> None:
    with pytest.raises(ShapeMismatch, match="nights x series"):
        changes_of(np.zeros(5))
