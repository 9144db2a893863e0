from __future__ import annotations

import threading

import pytest

from degarble.harness.report.progress import Progress, ProgressState, duration, size


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rate_and_time_left_follow_the_last_half_minute() -> None:
    clock = _Clock()
    progress = Progress("audit", 1000, clock=clock)
    for _ in range(100):  # a slow start: 1 a second
        clock.now += 1
        progress.advance(1)
    assert progress.pace.rate == pytest.approx(1)
    for _ in range(40):  # then 10 a second
        clock.now += 1
        progress.advance(10)
    pace = progress.pace
    assert pace.rate == pytest.approx(10)
    assert pace.left == pytest.approx(50)
    assert pace.share == 0.5


def test_earlier_work_counts_as_done_and_not_for_the_rate() -> None:
    clock = _Clock()
    progress = Progress("quantise", 1000, clock=clock)
    progress.skip(900)
    clock.now += 2
    progress.advance(10)
    assert progress.pace.done == 910
    assert progress.pace.rate == pytest.approx(5)


def test_work_that_is_known_late_has_a_rate_of_its_own() -> None:
    clock = _Clock()
    shown: list[str] = []
    progress = Progress("audit", 0, lambda pace: shown.append(pace.text()), clock)
    progress.step("structure")
    clock.now += 20
    progress.expect(100)
    clock.now += 2
    progress.advance(20)
    assert shown == [
        "audit  structure",
        "audit  0 %  0 B of 100 B  structure",
        "audit  20 %  20 B of 100 B  10 B/s  8 s left  structure",
    ]


def test_there_is_no_estimate_before_the_first_measurement() -> None:
    clock = _Clock()
    progress = Progress("audit", 1000, clock=clock)
    clock.now += 0.1
    progress.advance(500)
    assert progress.pace.rate is None
    assert progress.pace.text() == "audit  50 %  500 B of 1.00 kB"
    clock.now += 5
    assert progress.pace.left == pytest.approx(5.1)


def test_a_long_piece_has_a_rate_of_its_own() -> None:
    clock = _Clock()
    progress = Progress("audit", 1000, clock=clock)
    clock.now += 100
    progress.advance(100)
    assert progress.pace.rate == pytest.approx(1)


def test_no_work_is_done_work() -> None:
    assert Progress("audit", 0).pace.share == 1.0


def test_threads_lose_nothing() -> None:
    shown: list[ProgressState] = []
    progress = Progress("audit", 8000, shown.append)

    def advance() -> None:
        for _ in range(1000):
            progress.advance(1)

    threads = [threading.Thread(target=advance) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert progress.pace.done == 8000
    assert [pace.done for pace in shown] == list(range(1, 8001))


PACE = ProgressState("audit", 412_300_000_000, 881_200_000_000, 300, 1.31e9, "layers.17")


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (100, "audit  46 %  412 GB of 881 GB  1.31 GB/s  5 min 58 s left  layers.17"),
        (60, "audit  46 %  412 GB of 881 GB  1.31 GB/s  5 min 58 s left"),
        (40, "audit  46 %  5 min 58 s left"),
        (12, "audit  46 %"),
        (4, "46 %"),
        (0, ""),
    ],
)
def test_a_narrow_screen_keeps_what_matters(width: int, text: str) -> None:
    assert PACE.text(width) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (9_996_000, "10.0 MB"), (99_960_000, "100 MB"),
     (999_600_000, "1.00 GB"), (881_000_000_000, "881 GB"), (5.5e12, "5.50 TB")],
)  # fmt: skip
def test_sizes(nbytes: float, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (3599, "59 min 59 s"),
     (7260, "2 h 01 min")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
