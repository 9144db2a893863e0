from __future__ import annotations

import getpass
import platform
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from degarble.harness.base.version import VERSION
from degarble.harness.report.page import machine, provenance

if TYPE_CHECKING:
    import pytest


def test_it_says_when_where_and_with_what() -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=1)))
    told = provenance("degarble demo", moment)
    assert told.created == "2026-01-02 02:04 UTC"
    assert told.command == "degarble demo"
    assert told.machine.startswith("CPU: ")
    versions = dict(told.versions)
    assert versions["degarble"] == VERSION
    assert versions["Python"] == platform.python_version()
    assert set(versions) == {"degarble", "Python", "torch", "numpy", "numba"}


def test_it_names_no_person_and_no_place() -> None:
    told = repr(provenance("degarble demo"))
    assert platform.node() not in told
    assert str(Path.home()) not in told
    user = getpass.getuser()
    assert f"'{user}'" not in told


def test_a_machine_without_a_processor_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> str:
        raise PermissionError

    monkeypatch.setattr("degarble.harness.report.page.Path.read_text", refuse)
    monkeypatch.setattr("degarble.harness.report.page.os.cpu_count", lambda: 1)
    assert ", 1 core, " in machine()


def test_a_package_that_is_missing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("degarble.harness.report.page._PACKAGES", ("no-such-package-here",))
    assert [name for name, _ in provenance("x").versions] == ["degarble", "Python"]
