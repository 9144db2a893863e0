"""Faults of loading, planted one at a time: each breaks its own rule, and no other.

The cases are in loader_fault_cases.py; every rule of loading is broken by one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from degarble.harness.checkpoint.audit.findings import RULES
from degarble.harness.checkpoint.audit.rules import STRUCTURE_RULES, Level
from degarble.suites.checkpoint.audit.loader.loader_cases import proven
from degarble.suites.checkpoint.audit.loader.loader_fault_cases import (
    ATTN,
    FAULTS,
    LISTED_ALONE,
    NOTED,
    OTHERS,
    SOURCES,
    WARNED,
    Case,
)
from degarble.suites.checkpoint.structure_cases import errors, replant, told, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from degarble.harness.checkpoint.audit.findings import Finding

LOADER_RULES = [rule for rule in STRUCTURE_RULES if rule.id.startswith("loader.")]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def write_once(source: str) -> Path:
        if source not in made:
            folder = tmp_path_factory.mktemp("faults") / "c"
            made[source] = write(folder, *SOURCES[source])
        return made[source]

    return write_once


def found_in(written: Callable[[str], Path], folder: Path, case: Case) -> list[Finding]:
    source = written(case.source)
    if case.change is not None:
        source = replant(source, folder / "c", case.change)
    return proven(source, {**case.base, **case.rules}).findings


@pytest.mark.parametrize("fault", [*FAULTS, *OTHERS])
def test_a_fault_breaks_its_rule_and_no_other(
    tmp_path: Path, written: Callable[[str], Path], fault: str
) -> None:
    case = {**FAULTS, **OTHERS}[fault]
    found = found_in(written, tmp_path, case)
    ignored = LISTED_ALONE if "parameters" in case.base else set()
    assert errors(found) - ignored == {case.breaks}
    for each in told(found, case.breaks):
        assert each.remedy
        assert each.message.endswith(".")


@pytest.mark.parametrize("what", [*WARNED, *NOTED])
def test_what_is_no_error_is_told_as_such(
    tmp_path: Path, written: Callable[[str], Path], what: str
) -> None:
    case = {**WARNED, **NOTED}[what]
    found = found_in(written, tmp_path, case)
    assert errors(found) == set()
    level = "warning" if what in WARNED else "note"
    assert {each.level for each in told(found, case.breaks)} == {level}


def test_every_rule_is_broken_by_a_case() -> None:
    cases = {**FAULTS, **OTHERS, **WARNED, **NOTED}.values()
    assert {case.breaks for case in cases} == {rule.id for rule in LOADER_RULES}
    by_level = {rule.id: rule.level for rule in LOADER_RULES}
    assert {by_level[case.breaks] for case in WARNED.values()} == {Level.WARNING}
    assert {by_level[case.breaks] for case in NOTED.values()} == {Level.NOTE}


def test_every_rule_has_its_source() -> None:
    for rule in LOADER_RULES:
        assert RULES[rule.id] is rule
        assert rule.id.startswith("loader.")
        assert rule.source


def test_a_skipped_scale_says_what_it_leaves_unwritten(
    tmp_path: Path, written: Callable[[str], Path]
) -> None:
    case = FAULTS["7: a pattern for fused parameters that also skips scales"]
    found = found_in(written, tmp_path, case)
    message = next(each.message for each in found if each.tensor == f"{ATTN}.wo_b.scale")
    assert "the block_scale of layers.1.attn.wo_b, is skipped" in message
    assert "the pattern \\.(wq_b|wo_a|wo_b)\\.scale$ covers it" in message
    assert "model.layers.1.attn.wo_b.weight_scale_inv stays as the engine found it" in message


def test_a_wrong_write_names_both_sides_and_all_ranks(
    tmp_path: Path, written: Callable[[str], Path]
) -> None:
    found = found_in(written, tmp_path, OTHERS["the neighbour's layer"])
    first = next(each for each in found if each.tensor == "layers.0.attn.wq_b.weight")
    assert first.module == "model.layers.1.attn.wq_b.weight"
    assert "ranks 0-1: it is layers.0.attn.wq_b (codes)" in first.message
    assert first.evidence["ranks"] == [0, 1]
