"""The stable surface: its names, and the examples of docs/api.md as they stand there."""

from __future__ import annotations

import re
import runpy
from typing import TYPE_CHECKING

import pytest

from degarble.harness import api
from degarble.suites.house.repository import ROOT

if TYPE_CHECKING:
    from pathlib import Path

PAGE = ROOT / "docs" / "api.md"
NAMES = {
    "NVFP4", "Checked", "CheckedModules", "DegarbleError", "JudgedKernel", "ModulePlace", "Place",
    "QuantisedTensor", "Setting", "Twin", "Verdict", "Weight", "capture", "check", "dequantise",
    "judge", "quantise",
}  # fmt: skip


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_names_are_the_contract() -> None:
    """Taking one away is a new major version; adding one is a line here and on the page."""
    assert set(api.__all__) == NAMES
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in sorted(NAMES) if f"`{name}" not in text] == []
    assert all(getattr(api, name) is not None for name in NAMES)


@pytest.mark.parametrize("number", range(4))
def test_examples_of_the_page_run(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "example.py").write_text(examples()[number])
    runpy.run_path(str(tmp_path / "example.py"))


def test_every_example_is_run() -> None:
    runnable = [
        example
        for example in examples()
        if "def test_" not in example and "def patch" not in example
    ]
    assert len(runnable) == 4
    assert examples()[:4] == runnable
