"""Faults of a whole checkpoint at once, where no sibling is healthy: each is named all the same."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from degarble.harness.checkpoint.audit import rules as rules_structure
from degarble.harness.checkpoint.audit import value_rules as rules_numbers
from degarble.harness.checkpoint.audit.numbers.numbers import audit_numbers
from degarble.harness.checkpoint.audit.rules import Level
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.suites.checkpoint.audit.planted_numbers import CONFIG as V4
from degarble.suites.checkpoint.audit.planted_numbers import STATISTICS, Bytes
from degarble.suites.checkpoint.structure_cases import V32
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint
from degarble.suites.support.synthetic.statistics import Statistics

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from degarble.harness.checkpoint.audit.findings import Finding
    from degarble.harness.model.config.config import Config


def planted(
    folder: Path,
    made: tuple[Config, str],
    change: Callable[[Bytes, list[str]], None],
    statistics: Statistics = STATISTICS,
) -> list[Finding]:
    """Write a checkpoint, change its bytes, audit its numbers."""
    config, layout = made
    write_checkpoint(folder, Synthetic(config, layout, seed=5, statistics=statistics))
    with Checkpoint.open(folder) as checkpoint:
        names = list(checkpoint.entries)
    change(Bytes(folder), names)
    with Checkpoint.open(folder) as checkpoint:
        return audit_numbers(checkpoint).findings


def fold(files: Bytes, names: list[str]) -> None:
    for name in names:
        if name.endswith(".weight_scale_2"):
            files[name][...] *= files[name.replace("weight_scale_2", "input_scale")]


def invert(*suffixes: str) -> Callable[[Bytes, list[str]], None]:
    def change(files: Bytes, names: list[str]) -> None:
        for name in names:
            if name.endswith(suffixes):
                files[name][...] = 1 / files[name]

    return change


def count(findings: list[Finding], rule: str) -> int:
    return sum(each.count for each in findings if each.rule == rule)


@pytest.mark.parametrize(
    ("config", "layout", "modules"),
    [
        (replace(V32, n_routed_experts=8), "nvfp4-full", 32),
        (replace(V32, n_routed_experts=8), "nvfp4-experts", 24),
        (V4, "nvfp4-experts", 54),
    ],
    ids=["V3.2, full", "V3.2, experts", "V4, experts"],
)
def test_input_scales_inside_all_weight_scales(
    tmp_path: Path, config: Config, layout: str, modules: int
) -> None:
    findings = planted(tmp_path / "c", (config, layout), fold)
    rule = rules_structure.INPUT_SCALE_INSIDE.id
    assert {f.rule for f in findings if f.level is Level.ERROR} == {rule}
    assert count(findings, rule) == modules
    assert count(findings, rules_numbers.DEAD_EXPERT.id) == 0


@pytest.mark.parametrize(
    ("layout", "suffix"),
    [("nvfp4-experts", ".weight_scale_2"), ("compressed-tensors", ".weight_global_scale")],
)
def test_dead_experts_among_reversed_scales(tmp_path: Path, layout: str, suffix: str) -> None:
    config = replace(V4, n_routed_experts=24)
    findings = planted(tmp_path / "c", (config, layout), invert(suffix), Statistics())
    assert count(findings, rules_numbers.SCALE_DIRECTION.id) >= 24 * 3 * 3
    assert count(findings, rules_numbers.MAGNITUDE.id) == 0


def test_reversed_block_scales_of_one_module(tmp_path: Path) -> None:
    name = "layers.1.attn.wo"
    findings = planted(
        tmp_path / "c", (V32, "official"), invert("layers.1.self_attn.o_proj.weight_scale_inv")
    )
    (found,) = [each for each in findings if each.level is Level.ERROR]
    assert (found.rule, found.module) == (rules_numbers.SCALE_DIRECTION.id, name)
    assert (found.tensor or "").endswith("self_attn.o_proj.weight_scale_inv")


def test_most_experts_of_a_layer_are_never_dead(tmp_path: Path) -> None:
    def shrink(files: Bytes, names: list[str]) -> None:
        for name in names:
            if name.endswith(".weight_scale_2") and ".experts.5." not in name:
                files[name][...] *= 2.0**-20

    findings = planted(tmp_path / "c", (V4, "nvfp4-experts"), shrink)
    assert count(findings, rules_numbers.MAGNITUDE.id) == 3 * 5 * 3
    assert count(findings, rules_numbers.DEAD_EXPERT.id) == 0
