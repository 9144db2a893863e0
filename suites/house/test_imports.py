"""Imports go down, in no circle, and every module imports alone."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING

import pytest

from degarble.suites.hang_guard import HANG_SECONDS
from degarble.suites.house.floors import UNITS, cycle, unit_of, violations
from degarble.suites.house.repository import ROOT, modules, name_of, tree

if TYPE_CHECKING:
    from pathlib import Path


# --------------------------------------------------------------------------------------------------
# Every module imports alone, silently and without a warning; light modules load nothing heavy.
#
# pytest imports the suites, with warnings as errors as well.

# Loaded at every start of pytest or of the command line, or promised to run without torch.
LIGHT = (
    "degarble.harness.base.errors",
    "degarble.harness.base.protocols",
    "degarble.harness.base.version",
    "degarble.harness.capture.files.",
    "degarble.harness.plugins.",
    "degarble.harness.cli.",
    "degarble.harness.report.",
    "degarble.harness.vllm.",
    "degarble.reports.",
)

# Most of them derive from vLLM's classes: without it the refusal is typed, whatever comes first.
BOUND = "degarble.harness.vllm.bound."
NEEDS_VLLM = {f"{BOUND}{name}" for name in ("start", "model", "upstream")}
# Of the plugins these are loaded beside a model, or are programs of their own: torch is there.
BESIDE = (BOUND, "degarble.harness.vllm.engine.", "degarble.harness.vllm.verify_weights")


def failures(light: list[str], others: list[str], extra_path: Path) -> dict[str, str]:
    known = os.environ.get("PYTHONPATH")  # the package itself may be found by it
    path = os.pathsep.join((str(extra_path), *([known] if known else [])))
    environment = {**os.environ, "PYTHONPATH": path}
    script = "degarble.suites.house.import_alone"
    command = [sys.executable, "-m", script, *light, "--", *others]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_SECONDS,
    )
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.slow
def test_every_module_imports_alone(tmp_path: Path) -> None:
    plants = {
        "planted_warning": "import warnings\nwarnings.warn('old', DeprecationWarning)\n",
        "planted_print": "print('hello')\n",
        "planted_error": "import degarble.harness.there_is_no_such_module\n",
        "planted_heavy": "import torch\n",
    }
    for name, text in plants.items():
        (tmp_path / f"{name}.py").write_text(text)
    found_names = [name_of(path) for path in modules()]
    names = [name for name in found_names if not name.startswith("degarble.suites.")]
    light = [name for name in names if name.startswith(LIGHT) and not name.startswith(BESIDE)]
    light.append("degarble")
    others = [name for name in names if name not in light]
    found = failures(
        [*light, "planted_heavy"], [*others, *sorted(set(plants) - {"planted_heavy"})], tmp_path
    )
    assert found.pop("planted_warning") == "DeprecationWarning: old"
    assert found.pop("planted_print") == "prints on import: 'hello\\n'"
    assert found.pop("planted_error").startswith("ModuleNotFoundError")
    assert found.pop("planted_heavy").startswith("brings torch")
    refused = {name: found.pop(name) for name in names if name.startswith(BOUND) and name in found}
    told = refused.values()
    assert all(each.startswith("MissingDependency: vllm = ") for each in told), refused
    assert refused.keys() >= NEEDS_VLLM
    assert not found, "\n" + "\n".join(f"{name}: {error}" for name, error in found.items())


# --------------------------------------------------------------------------------------------------
# Imports go down only, deferred and type-only imports included, and never in a circle.


@cache
def sources() -> dict[str, ast.Module]:
    return {name_of(path): tree(path) for path in modules()}


def test_every_import_goes_down() -> None:
    upward = violations(sources())
    assert not upward, "\n" + "\n".join(upward)


def test_no_import_cycle() -> None:
    assert cycle(sources()) == []


def test_the_table_itself_goes_down() -> None:
    for name, unit in UNITS.items():
        for other in unit.below:
            assert UNITS[other].floor <= unit.floor, f"{name} reaches up to {other}"
    TopologicalSorter({name: unit.below for name, unit in UNITS.items()}).prepare()
    assert "kernels" not in UNITS["references"].below
    assert "references" not in UNITS["kernels"].below


@pytest.mark.parametrize(
    ("module", "text", "expected"),
    [
        (
            "degarble.harness.formats.planted",
            "def f():\n    from degarble.references import planted_reference\n",
            "degarble.harness.formats.planted:2: formats may not import references",
        ),
        (
            "degarble.kernels.planted",
            "if TYPE_CHECKING:\n    import degarble.references.planted_reference\n",
            "degarble.kernels.planted:2: kernels may not import references",
        ),
        (
            "degarble.reports.planted",
            "import importlib\nimportlib.import_module('degarble.harness.formats')\n",
            "degarble.reports.planted:2: reports may not import formats",
        ),
        (
            "degarble.harness.formats.planted",
            "from . import codec\n",
            "degarble.harness.formats.planted:1: imports degarble.<relative>",
        ),
        (
            "degarble.harness.attic.planted",
            "",
            "degarble.harness.attic.planted: belongs to no floor",
        ),
        (
            "degarble.harness.base.errors",
            "from degarble.harness.missing import x\n",
            "degarble.harness.base.errors:1: imports degarble.harness.missing",
        ),
    ],
)
def test_planted_violation_is_found(module: str, text: str, expected: str) -> None:
    planted = {
        "degarble.references.planted_reference": ast.parse(""),
        "degarble.harness.formats": ast.parse(""),
        module: ast.parse(text),
    }
    assert any(line.startswith(expected) for line in violations(planted)), violations(planted)


def test_planted_cycle_through_a_deferred_import_is_found() -> None:
    planted = {
        "degarble.harness.formats.a": ast.parse("from degarble.harness.formats import b"),
        "degarble.harness.formats.b": ast.parse(
            "def f():\n    from degarble.harness.formats.a import g"
        ),
    }
    assert {"degarble.harness.formats.a", "degarble.harness.formats.b"} == set(cycle(planted))


def test_a_name_counts_as_its_module() -> None:
    planted = {
        "degarble.harness.base.errors": ast.parse(""),
        "degarble.kernels.a": ast.parse("from degarble.harness.base.errors import Refused"),
    }
    assert violations(planted) == []
    assert unit_of("degarble.harness.base.errors") == "base"
    assert unit_of("degarble.harness.capture.files.reader") == "capture.files"
    assert unit_of("degarble.harness.capture.options") == "capture"
    assert unit_of("degarble.suites.house.floors") == "suites"
