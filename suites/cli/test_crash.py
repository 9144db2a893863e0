from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.cli.terminal import EXIT_CRASHED
from degarble.suites.commands.calls import call

if TYPE_CHECKING:
    import pytest


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
    assert "test_crash.py:" in lines["where"]
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
