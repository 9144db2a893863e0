"""The history panel: what moved stands first, and a page stays small."""

from dataclasses import replace
from pathlib import Path

import pytest

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.history.panel import MOST, MOST_BANDS, history_of, history_panel
from degarble.harness.history.store import HistoryStore, Stream
from degarble.harness.report.blocks import Details, Facts, Sentence, Table, Tone, Trends
from degarble.harness.report.verdict import Verdict
from degarble.suites.history.history_cases import W2, history, night, run


def test_what_moved_last_night_is_the_sentence(tmp_path: Path, seed: int) -> None:
    with HistoryStore(str(tmp_path / "h.sqlite"), create=True) as store:
        for each in history(47, 45, seed):
            store.add(each)
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
    assert [each.red for each in found.moves] == [False, True]
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
    assert panel.blocks[0] == Sentence("No series has moved.", Tone.GOOD)
    assert panel.blocks[1] == Sentence("No run of this history was green.", Tone.BAD)


def test_years_and_thousands_of_places_are_cut_to_a_page(tmp_path: Path) -> None:
    with HistoryStore(str(tmp_path / "h.sqlite"), create=True) as store:
        for number in range(150):
            store.add(run(number, {f"p{n:04d}": n / 1000 for n in range(MOST + 50)}))
        panel = history_panel(history_of(store, store.streams()[0]))
    trends = panel.blocks[2]
    assert isinstance(trends, Trends)
    assert len(trends.rows) == MOST
    assert len(trends.rows[0].bands) <= MOST_BANDS
    assert trends.rows[0].label == f"p{MOST + 49:04d}"
    assert "50 quiet places not drawn" in trends.caption


def test_a_stream_without_runs_is_refused(tmp_path: Path) -> None:
    with HistoryStore(str(tmp_path / "h.sqlite"), create=True) as store:
        store.add(run(0))
        with pytest.raises(InvalidArgument, match="one run at least"):
            history_of(store, Stream("nobody", "nowhere", 0, "", ""))
