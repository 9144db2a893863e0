"""Imports go down only, deferred and type-only imports included, and never in a circle."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter

import pytest

from degarble.suites.house.floors import UNITS, cycle, unit_of, violations
from degarble.suites.house.repository import modules, name_of, tree


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
