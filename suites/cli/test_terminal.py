"""What a screen, a file and a program get: results, progress, refusals, crashes."""

from __future__ import annotations

import io
import json
import math
import sys
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.base.errors import InvalidArgument, Undecided
from degarble.harness.cli.terminal import (
    EXIT_CRASHED,
    Environment,
    LiveLine,
    PlainLines,
    Terminal,
    first_pass,
    json_text,
    refusal_document,
    tell_refusal,
)
from degarble.harness.report.progress import ProgressState
from degarble.suites.commands.calls import call
from degarble.suites.reports.page_cases import HOSTILE

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("terminal", "out"),
    [
        (Terminal(), "hello\n"),
        (Terminal(quiet=True), ""),
        (Terminal(json_wanted=True), '{\n "schema": 1,\n "a": 1\n}\n'),
        (Terminal(json_wanted=True, quiet=True), '{\n "schema": 1,\n "a": 1\n}\n'),
    ],
)
def test_people_or_programs(
    capsys: pytest.CaptureFixture[str], terminal: Terminal, out: str
) -> None:
    terminal.say("hello")
    terminal.emit({"a": 1})
    assert capsys.readouterr().out == out


def test_a_file_takes_the_document_and_people_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal(json_file=tmp_path / "a.json")
    terminal.say("hello")
    terminal.emit({"verdict": "AGREES"})
    assert capsys.readouterr().out == "hello\n"
    written = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert written == {"schema": 1, "verdict": "AGREES"}


def test_json_is_strict_about_numbers() -> None:
    text = json_text({"cosine": math.nan})
    assert json.loads(text, parse_constant=pytest.fail) == {
        "schema": 1,
        "cosine": {"float": "nan"},
    }


@pytest.mark.parametrize("text", HOSTILE)
def test_a_refusal_shows_hostile_text_and_obeys_none_of_it(
    capsys: pytest.CaptureFixture[str], text: str
) -> None:
    error = InvalidArgument(text, text, text, text)
    assert tell_refusal(error, json_wanted=True) == 2
    captured = capsys.readouterr()
    assert not set(captured.err) & {"\x1b", "\x07", "\x00", "\r", "\u202e"}
    if text.startswith("[bold"):
        assert captured.err.count("[bold red]") == 4
    document = json.loads(captured.out)
    assert document["verdict"] == "REFUSED"
    assert document["error"]["name"] == text


def test_undecided_is_reported_as_such() -> None:
    document = refusal_document(Undecided("a", 1, "b", "c"))
    assert document["verdict"] == "UNDECIDED"


@pytest.mark.parametrize(("value", "wanted"), [(None, False), ("0", False), ("1", True)])
def test_the_environment(monkeypatch: pytest.MonkeyPatch, value: str | None, wanted: bool) -> None:
    monkeypatch.delenv("DEGARBLE_TRACEBACK", raising=False)
    if value is not None:
        monkeypatch.setenv("DEGARBLE_TRACEBACK", value)
    assert Environment.read().traceback is wanted


class _Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for stream, seen in ((_Screen(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with Terminal().progress("reading", total=2) as step:
            step("first")
            step("second")
        assert ("reading" in stream.getvalue()) is seen


def test_colour_is_for_screens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", _Screen())
    assert Terminal().colour
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Terminal().colour
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert not Terminal().colour
    assert Terminal().width == 100


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


# --------------------------------------------------------------------------------------------------
# The first pass over streamed weights is shown until it is over; held weights show nothing.


class Streamed:
    total = 1000
    heard: Any = None


def test_bytes_are_heard_until_it_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    streamed: Any = Streamed()
    with first_pass(Terminal(), streamed) as over:
        streamed.on_read(400, "layers.0.attn.wq_a")
        over()
        assert streamed.on_read is None
    with first_pass(Terminal(quiet=True), streamed):
        assert streamed.on_read is not None
    assert streamed.on_read is None
    with first_pass(Terminal(), None) as over:
        over()
    assert capsys.readouterr().out == ""


def _break(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: object) -> int:
        raise ZeroDivisionError("one over\x1b[2J zero")

    monkeypatch.setattr("degarble.harness.cli.main.dispatch", broken)


def test_an_internal_error_is_reported_as_ours_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _break(monkeypatch)
    monkeypatch.delenv("DEGARBLE_TRACEBACK", raising=False)
    result = call(capsys, "demo", "--out", "a b")
    assert result.status == EXIT_CRASHED
    assert result.out == ""
    assert "Traceback" not in result.err
    assert "\x1b" not in result.err
    lines = dict(line.strip().split(maxsplit=1) for line in result.err.splitlines()[1:])
    assert lines["what"] == "ZeroDivisionError: one over?[2J zero"
    assert "test_terminal.py:" in lines["where"]
    assert lines["command"] == "degarble demo --out 'a b'"
    assert lines["version"].startswith("degarble ")
    assert "DEGARBLE_TRACEBACK=1" in lines["remedy"]


def test_the_traceback_is_printed_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _break(monkeypatch)
    monkeypatch.setenv("DEGARBLE_TRACEBACK", "1")
    assert "Traceback (most recent call last)" in call(capsys, "demo").err


def test_credentials_in_an_address_are_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _break(monkeypatch)
    result = call(capsys, "history", "runs", "--store", "postgresql://me:se@cret@host/db")
    assert "cret" not in result.err
    assert "postgresql://***@host/db" in result.err
