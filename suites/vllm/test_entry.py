"""An installed plugin changes nothing until it is named."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from degarble.harness.base.errors import MissingDependency
from degarble.harness.vllm import entry
from degarble.harness.vllm.installed import VARIABLE
from degarble.suites.hang_guard import HANG_SECONDS
from degarble.suites.house.repository import ROOT


def test_the_entry_points_name_what_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for group, path in (
        ("vllm.general_plugins", "harness/vllm/entry.py"),
        ("vllm.stat_logger_plugins", "harness/vllm/bound/metrics.py"),
    ):
        (value,) = project["entry-points"][group].values()
        module, _, name = value.partition(":")
        assert module == "degarble." + path.removesuffix(".py").replace("/", ".")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {name}(" in text or f"class {name}(" in text


def test_unnamed_it_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(entry, "require_vllm", lambda: pytest.fail("looked for vLLM"))
    entry.register()


def test_named_it_needs_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> str:
        raise MissingDependency("vllm", "not installed", "vLLM", "Install it.")

    monkeypatch.setenv(VARIABLE, "x,degarble")
    monkeypatch.setattr(entry, "require_vllm", absent)
    with pytest.raises(MissingDependency):
        entry.register()


def test_degarble_itself_never_imports_vllm() -> None:
    script = (
        "import sys, degarble.harness.api, degarble.harness.vllm.entry,"
        " degarble.harness.vllm.proof, degarble.harness.vllm.contract;"
        " sys.exit(any(name.split('.')[0] == 'vllm' for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=HANG_SECONDS)
    assert done.returncode == 0
