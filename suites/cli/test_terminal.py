from __future__ import annotations

import io
import json
import math
import sys
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import InvalidArgument, Undecided
from degarble.harness.cli.terminal import (
    Environment,
    Terminal,
    json_text,
    refusal_document,
    tell_refusal,
)
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
