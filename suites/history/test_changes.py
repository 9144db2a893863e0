"""What moved in a history is found in time, explained and shown; nothing else is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.history.changes import (
    LEARNING,
    TESTED,
    WINDOWS,
    ChangeDetector,
    bands,
    changes_of,
    explained_changes,
    last_green,
    place_differences,
    threshold,
)
from degarble.harness.history.panel import MOST, MOST_BANDS, history_of, history_panel
from degarble.harness.history.query import HistoryQuery, histories
from degarble.harness.history.records import BUDGETS, SPEED
from degarble.harness.history.store import HistoryStore, Stream
from degarble.harness.report.blocks import Details, Facts, Sentence, Table, Tone, Trends
from degarble.harness.report.verdict import Verdict
from degarble.suites.history.history_cases import PLACES, W2, history, night, run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


# --------------------------------------------------------------------------------------------------
# Change points: silence over simulated years, moves found in time, and the night that began them.
#
# The years are of 2,440 series (61 layers of 40 components), with noise that is normal, heavy-
# tailed, carried over, coarse, or none at all.

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
    changes = changes_of(noise(kind, seed))
    assert len(changes) <= YEARS, [
        (change.series, change.first, change.deviate) for change in changes
    ]


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
    within = {
        change.series: change for change in changes_of(values) if at <= change.found <= at + 1
    }
    assert len(within) / series >= least
    first = np.mean([change.first == at for change in within.values()])
    assert first >= 0.9
    assert all(np.sign(change.size) == sign[change.series] for change in within.values())


def test_one_wild_night_is_no_change_and_spoils_no_baseline(seed: int) -> None:
    values = noise("normal", seed, 300, 50)
    values[100] += 1e6
    values[200:, 7] += 8.0
    changes = changes_of(values)
    assert [(change.series, change.first, change.found) for change in changes] == [(7, 200, 201)]


def test_what_never_moved_moves_by_more_than_its_measure_grants() -> None:
    values = np.full((60, 3), 0.25)
    values[40:, 1] = 0.5
    values[40:, 2] = 0.25 + 0.005
    changes = changes_of(values, 0.01)
    assert [
        (change.series, change.first, change.last_before, change.found) for change in changes
    ] == [(1, 40, 39, 41)]
    assert (changes[0].before, changes[0].after, changes[0].noise) == (0.25, 0.5, 0.01)


def test_a_level_that_returns_is_two_changes(seed: int) -> None:
    values = noise("normal", seed, 200, 4)
    values[60:120, 2] += 20.0
    assert [(change.series, change.first) for change in changes_of(values)] == [(2, 60), (2, 120)]


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
    step = [change for night, row in enumerate(values) for change in watch.add_night(night, row)]
    assert step == changes_of(values)
    assert [change.series for change in step] == [4]


def test_the_threshold_shares_a_quarter_of_an_alarm_a_year() -> None:
    from statistics import NormalDist  # noqa: PLC0415

    beyond = 2 * (1 - NormalDist().cdf(threshold(SERIES)))
    assert beyond * SERIES * 365 * len(WINDOWS) == pytest.approx(0.25, rel=1e-6)


def test_a_single_list_is_refused() -> None:
    with pytest.raises(ShapeMismatch, match="nights x series"):
        changes_of(np.zeros(5))


# --------------------------------------------------------------------------------------------------
# Explanations from a history: the night, the commits between, and what else changed.


def test_which_night_and_which_commit_moved_it(tmp_path: Path, seed: int) -> None:
    with HistoryStore(str(tmp_path / "h.sqlite"), create=True) as store:
        for history_run in history(60, 45, seed):
            store.add(history_run)
        [stream] = store.streams()
        [change] = explained_changes(store.nights(stream, "budgets"), BUDGETS)
    assert (change.place, change.first, change.last_before, change.found) == (
        W2, night(45), night(44), night(46),
    )  # fmt: skip
    assert change.worse
    assert not change.red
    assert change.commits == "0000002c0000..0000002d0000"
    assert change.differs == (("torch", "2.13.0", "2.14.0"),)
    assert change.size == pytest.approx(0.4 / change.noise, rel=0.3)
    assert W2 in change.sentence
    assert night(45) in change.sentence
    assert "torch 2.13.0 -> 2.14.0" in change.sentence


@pytest.mark.parametrize(("after", "red"), [(0.83, False), (0.70, True), (1.10, False)])
def test_a_kernel_that_lost_a_tenth_of_its_speed_is_red(
    after: float, red: bool, tmp_path: Path
) -> None:
    with HistoryStore(str(tmp_path / "h.sqlite"), create=True) as store:
        for number in range(50):
            speed = {"quantise_nvfp4": 0.9 if number < 40 else after}
            store.add(run(number, values={"speed": speed}))
        [stream] = store.streams()
        [change] = explained_changes(store.nights(stream, "speed"), SPEED)
    assert (change.red, change.worse) == (red, after < 0.9)


def test_two_runs_are_compared() -> None:
    first = {"budgets": {"a": 0.1, "b": 0.2, "gone": 0.3}}
    second = {"budgets": {"a": 0.1, "b": 0.5, "new": 0.4}, "distance": {"a": 1e-6}}
    differences = place_differences(first, second)
    assert [(difference.place, difference.measure) for difference in differences[:3]] == [
        ("gone", "budgets"), ("new", "budgets"), ("a", "distance"),
    ]  # fmt: skip
    assert differences[3].place == "b"
    assert differences[3].move == pytest.approx(0.3)
    assert differences[-1].move == 0


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


# --------------------------------------------------------------------------------------------------
# Which histories a question is about, and what it refuses by name.

LAYERS = 300


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HistoryStore]:
    """Two checkpoints, one of them with many components."""
    with HistoryStore(str(tmp_path / "history.sqlite"), create=True) as opened:
        opened.add(run(0, {f"layers.{layer}.attn.wq_a": 0.25 for layer in range(LAYERS)}))
        opened.add(run(0, {W2: 0.5}, subject="V4-Pro"))
        yield opened


def test_a_pattern_leaves_what_fits_of_every_history(store: HistoryStore) -> None:
    found = histories(store, HistoryQuery(place="layers.23.*"))
    places = {each.stream.subject: [n.places for _, n in each.measured] for each in found}
    assert places == {"tiny": [("layers.23.attn.wq_a",)], "V4-Pro": [(W2,)]}
    [only] = histories(store, HistoryQuery(place="layers.23.*", subject="tiny"))
    assert only.stream.subject == "tiny"


@pytest.mark.parametrize(
    ("question", "remedy"),
    [
        (HistoryQuery(place="xyz*"), r"and 201 more\.$"),  # of 301 components
        (HistoryQuery(place="layers.23.attn.wq_b"), r"Did you mean layers\.23\.attn\.wq_a"),
        (HistoryQuery(subject="V4-Pr"), r"V4-Pro"),
        (HistoryQuery(machine="B300"), r"CPU: a processor"),
        (HistoryQuery(measure="budget"), r"budgets"),
    ],
)
def test_what_the_store_does_not_have_is_refused_by_name(
    store: HistoryStore, question: HistoryQuery, remedy: str
) -> None:
    with pytest.raises(UnknownName, match=remedy):
        histories(store, question)


# --------------------------------------------------------------------------------------------------
# The history panel: what moved stands first, and a page stays small.


def test_what_moved_last_night_is_the_sentence(tmp_path: Path, seed: int) -> None:
    with HistoryStore(str(tmp_path / "h.sqlite"), create=True) as store:
        for history_run in history(47, 45, seed):
            store.add(history_run)
        panel = history_panel(history_of(store, store.streams()[0]))
    assert panel.verdict is Verdict.AGREES
    assert panel.sentence.startswith("1 series moved, over 47 nights of tiny")
    changes, green, trends, runs = panel.blocks
    assert isinstance(changes, Table)
    assert changes.rows[0][:3] == (W2, "budgets", night(45))
    assert changes.rows[0][7] == "torch 2.13.0 -> 2.14.0"
    assert isinstance(green, Facts)
    assert isinstance(trends, Trends)
    assert (trends.rows[0].label, trends.rows[0].tone) == (W2, Tone.WARNING)
    assert trends.rows[0].moved_at == (45,)
    assert isinstance(runs, Table)
    assert runs.rows[0][1] == night(46)


def test_a_slower_kernel_turns_the_panel_red(tmp_path: Path) -> None:
    with HistoryStore(str(tmp_path / "h.sqlite"), create=True) as store:
        for number in range(42):
            store.add(run(number, values={"speed": {"gemm": 0.9 if number < 40 else 0.7}}))
        panel = history_panel(history_of(store, store.streams()[0]))
    assert panel.verdict is Verdict.DIFFERS


@pytest.mark.parametrize(("back", "verdict"), [(1, Verdict.DIFFERS), (2, Verdict.AGREES)])
def test_a_slower_kernel_stays_red_until_it_is_back_for_two_nights(
    tmp_path: Path, back: int, verdict: Verdict
) -> None:
    speeds = [0.9] * 40 + [0.7] * 5
    with HistoryStore(str(tmp_path / "h.sqlite"), create=True) as store:
        for number, speed in enumerate(speeds):
            store.add(run(number, values={"speed": {"gemm": speed}}))
        panel = history_panel(history_of(store, store.streams()[0]))
        assert panel.verdict is Verdict.DIFFERS
        assert panel.sentence.startswith("1 series not back, over 45 nights of tiny")
        for number in range(len(speeds), len(speeds) + back):
            store.add(run(number, values={"speed": {"gemm": 0.9}}))
        assert history_panel(history_of(store, store.streams()[0])).verdict is verdict


@pytest.mark.parametrize("later", [0.69, 0.75])
def test_a_further_change_does_not_end_what_is_lost(tmp_path: Path, later: float) -> None:
    with HistoryStore(str(tmp_path / "h.sqlite"), create=True) as store:
        for number, speed in enumerate([0.9] * 40 + [0.7] * 30 + [later] * 10):
            store.add(run(number, values={"speed": {"gemm": speed}}))
        found = history_of(store, store.streams()[0])
    assert [move.red for move in found.moves] == [False, True]
    assert found.lost == found.moves[1:]
    assert history_panel(found).verdict is Verdict.DIFFERS


@pytest.mark.parametrize(("since", "verdict"), [(7, Verdict.DIFFERS), (8, Verdict.AGREES)])
def test_a_lost_series_that_is_no_longer_measured_is_retired(
    tmp_path: Path, since: int, verdict: Verdict
) -> None:
    with HistoryStore(str(tmp_path / "h.sqlite"), create=True) as store:
        for number in range(45 + since):
            speeds = {"renamed": 0.9} if number >= 45 else {"gemm": 0.9 if number < 40 else 0.7}
            store.add(run(number, values={"speed": speeds}))
        assert history_panel(history_of(store, store.streams()[0])).verdict is verdict


def test_the_difference_to_the_last_green_run(tmp_path: Path) -> None:
    with HistoryStore(str(tmp_path / "h.sqlite"), create=True) as store:
        for number in range(3):
            verdict = Verdict.DIFFERS if number else Verdict.AGREES
            facts = {"driver": "580" if number < 2 else "590"}
            store.add(replace(run(number), verdict=verdict, facts=facts))
        panel = history_panel(history_of(store, store.streams()[0]))
        [first, *_rest] = store.runs()
    green = panel.blocks[1]
    assert isinstance(green, Details)
    assert isinstance(green.blocks[0], Facts)
    assert green.blocks[0].rows[0].value == f"{night(0)}, {first.id}"
    assert [fact.value for fact in green.blocks[0].rows[2:]] == ["580 -> 590"]


def test_a_history_that_never_was_green_says_so(tmp_path: Path) -> None:
    with HistoryStore(str(tmp_path / "h.sqlite"), create=True) as store:
        store.add(replace(run(0), verdict=Verdict.DIFFERS))
        panel = history_panel(history_of(store, store.streams()[0]))
    learning = "learning: 1 of 27 nights (20 to compare with, and the last 7), until then no change"
    learning += " can be found"
    assert panel.blocks[0] == Sentence(f"{learning.capitalize()}.", Tone.NOTE)
    assert panel.blocks[1] == Sentence("No run of this history was green.", Tone.BAD)


def test_what_moved_leads_after_quiet_nights(tmp_path: Path) -> None:
    with HistoryStore(str(tmp_path / "h.sqlite"), create=True) as store:
        for each in history(60, 45, 7):
            store.add(each)
        sentence = history_panel(history_of(store, store.streams()[0])).sentence
    assert sentence.startswith(f"1 earlier change: {W2} on {night(45)}, 0.253 to 0.640. Nothing")


@pytest.mark.parametrize("verdict", [Verdict.DIFFERS, Verdict.UNSTABLE])
def test_a_night_that_fails_leads_and_is_not_called_quiet(tmp_path: Path, verdict: Verdict) -> None:
    with HistoryStore(str(tmp_path / "h.sqlite"), create=True) as store:
        for number in range(3):
            store.add(run(number))
        store.add(replace(run(3, {**dict.fromkeys(PLACES, 0.25), W2: 178494.0}), verdict=verdict))
        panel = history_panel(history_of(store, store.streams()[0]))
    assert panel.verdict is verdict
    failed = f"The latest run {verdict}, on {night(3)}: {W2} at 178,494 of its budget."
    assert panel.sentence.startswith(f"{failed} Learning: 4 of 27 nights")
    assert "othing moved" not in panel.sentence
    trends = panel.blocks[2]
    assert isinstance(trends, Trends)
    worst = trends.rows[0]
    assert (worst.label, worst.tone, worst.note) == (W2, Tone.BAD, "beyond its budget")
    assert worst.logarithmic
    assert not trends.rows[1].logarithmic


@pytest.mark.parametrize("moved", [26, 27])
def test_learning_ends_with_the_first_night_that_is_tested(moved: int) -> None:
    """A change that is complete on night LEARNING + 1 is found, one night earlier it is not."""
    values = np.full((moved + 1, 1), 0.25)
    values[moved - 1 :] = 5.0
    assert len(changes_of(values, 0.01)) == (moved >= LEARNING)


def test_places_that_are_always_zero_are_counted(tmp_path: Path) -> None:
    places = {f"p{n:02d}": float(n % 2) / 2 for n in range(40)}
    with HistoryStore(str(tmp_path / "h.sqlite"), create=True) as store:
        for number in range(2):
            store.add(run(number, places))
        panel = history_panel(history_of(store, store.streams()[0]))
    trends = next(block for block in panel.blocks if isinstance(block, Trends))
    assert "20 quiet places not drawn, 20 of which are always 0" in trends.caption
    assert {row.latest for row in trends.rows} == {0.5}


def test_years_and_thousands_of_places_are_cut_to_a_page(tmp_path: Path) -> None:
    with HistoryStore(str(tmp_path / "h.sqlite"), create=True) as store:
        for number in range(150):
            store.add(run(number, {f"p{n:04d}": n / 1000 for n in range(MOST + 50)}))
        panel = history_panel(history_of(store, store.streams()[0]))
    trends, fold = panel.blocks[2:4]
    assert isinstance(trends, Trends)
    assert isinstance(fold, Details)
    [rest] = fold.blocks
    assert isinstance(rest, Trends)
    assert len(trends.rows) + len(rest.rows) == MOST
    assert len(trends.rows[0].bands) <= MOST_BANDS
    assert trends.rows[0].label == f"p{MOST + 49:04d}"
    assert "50 quiet places not drawn" in trends.caption


def test_a_stream_without_runs_is_refused(tmp_path: Path) -> None:
    with HistoryStore(str(tmp_path / "h.sqlite"), create=True) as store:
        store.add(run(0))
        with pytest.raises(InvalidArgument, match="one run at least"):
            history_of(store, Stream("nobody", "nowhere", 0, "", ""))
