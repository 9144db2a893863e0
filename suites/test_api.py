"""The stable surface: its names, and the examples of docs/api.md as they stand there."""

from __future__ import annotations

import doctest
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import degarble
from degarble.harness import api
from degarble.harness.base.version import VERSION
from degarble.suites.house.repository import ROOT

PAGE = ROOT / "docs" / "api.md"
NAMES = {
    "NVFP4", "Checked", "CheckedModules", "DegarbleError", "JudgedKernel", "ModulePlace", "Place",
    "QuantisedTensor", "Setting", "Twin", "Verdict", "Weight", "capture", "check", "dequantise",
    "fp8", "judge", "mxfp4", "mxfp8", "nvfp4", "quantise",
}  # fmt: skip


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_names_are_the_contract() -> None:
    """Taking one away is a new major version; adding one is a line here and on the page."""
    assert set(api.__all__) == NAMES
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in sorted(NAMES) if f"`{name}" not in text] == []
    assert all(getattr(api, name) is not None for name in NAMES)


def test_the_root_package_gives_the_same_names() -> None:
    assert set(degarble.__all__) == {*NAMES, "__version__"}
    assert [name for name in NAMES if getattr(degarble, name) is not getattr(api, name)] == []
    assert set(dir(degarble)) >= set(degarble.__all__)
    assert degarble.__version__ == VERSION
    with pytest.raises(AttributeError, match="no attribute 'judged'"):
        degarble.judged  # noqa: B018
    assert (Path(degarble.__file__).parent / "py.typed").is_file()


def test_every_name_that_is_called_has_an_example_that_runs() -> None:
    results = {"CheckedModules", "Checked", "JudgedKernel", "QuantisedTensor"}  # others make them
    kinds = {"DegarbleError", "NVFP4", "Verdict"}
    finder, without = doctest.DocTestFinder(recurse=False), []
    for name in sorted(NAMES - results - kinds):
        (example,) = finder.find(getattr(api, name), name, globs={}) or (None,)
        if example is None or not example.examples:
            without.append(name)
            continue
        runner = doctest.DocTestRunner(verbose=False)
        runner.run(example)
        assert runner.summarize(verbose=False).failed == 0, name
    assert without == []


def test_the_root_package_is_light() -> None:
    """`import degarble` takes a millisecond of its own: it loads nothing but the version."""
    script = (
        "import sys; before = set(sys.modules); import degarble; print(*set(sys.modules) - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) <= {
        *("degarble", "degarble.harness", "degarble.harness.base", "degarble.harness.base.version"),
        *(name for name in done.stdout.split() if name.split(".")[0] in sys.stdlib_module_names),
    }


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
