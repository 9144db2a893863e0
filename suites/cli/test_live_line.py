from __future__ import annotations

import io
import sys

import pytest

from degarble.harness.cli.terminal import LiveLine, PlainLines, Terminal
from degarble.harness.report.progress import ProgressState


def _pace(done: int, elapsed: float, step: str = "") -> ProgressState:
    return ProgressState("audit", done, 1000, elapsed, None, step)


def test_a_screen_has_one_line_that_leaves_nothing_behind() -> None:
    stream, now = io.StringIO(), [0.0]
    line = LiveLine(stream, clock=lambda: now[0])
    line(_pace(100, 1, "a" * 70 + "\n\x1b[31m"))
    line(_pace(200, 1))  # too soon
    now[0] = 0.2
    line(_pace(300, 1))
    line.end()
    painted = stream.getvalue().split("\r\x1b[K")
    assert painted == ["", "audit  10 %  100 B of 1.00 kB", "audit  30 %  300 B of 1.00 kB", ""]


def test_control_characters_of_a_name_are_shown_not_sent() -> None:
    stream = io.StringIO()
    LiveLine(stream)(_pace(100, 1, "a\nb\x1b[31m"))
    assert "\n" not in stream.getvalue()
    assert "\\u001b[31m" in stream.getvalue()


def test_a_line_that_was_never_painted_needs_no_removal() -> None:
    stream = io.StringIO()
    LiveLine(stream).end()
    assert stream.getvalue() == ""


def test_a_log_gets_few_lines_of_long_runs_and_none_of_short_ones() -> None:
    short, long, slow = io.StringIO(), io.StringIO(), io.StringIO()
    for stream, seconds in ((short, 50), (long, 10_000), (slow, 300)):
        lines = PlainLines(stream)
        for done in range(1001):
            lines(_pace(done, seconds * done / 1000))
        lines.end()
    assert short.getvalue() == ""
    assert long.getvalue().count("\n") == 19  # each twentieth, apart from the end
    assert slow.getvalue().count("\n") == 4  # each minute


class _Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "stream", "seen"),
    [
        (Terminal(), _Screen(), True),
        (Terminal(json_wanted=True), _Screen(), True),
        (Terminal(quiet=True), _Screen(), False),
        (Terminal(), io.StringIO(), False),
    ],
)
def test_work_is_shown_on_a_screen(
    monkeypatch: pytest.MonkeyPatch, terminal: Terminal, stream: io.StringIO, seen: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with terminal.work("reading", 100) as progress:
        progress.advance(50, "first")
        assert progress.pace.done == 50
    assert ("reading" in stream.getvalue()) is seen


def test_an_interrupted_run_leaves_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _Screen()
    monkeypatch.setattr(sys, "stderr", stream)

    def interrupted() -> None:
        with Terminal().work("reading", 100) as progress:
            progress.advance(50)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert stream.getvalue().endswith("\r\x1b[K")
