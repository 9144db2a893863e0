"""The rules of the audit, their page, and how findings are gathered."""

from __future__ import annotations

import json

import pytest

from degarble.harness.checkpoint.audit import findings
from degarble.harness.checkpoint.audit import rules as rules_files
from degarble.harness.checkpoint.audit.findings import (
    RULES,
    FindingLocation,
    Findings,
    format_ranges,
)
from degarble.harness.checkpoint.audit.rules import AuditRule, Level
from degarble.harness.checkpoint.read.types import ProblemKind

INDEX = rules_files.BY_KIND[ProblemKind.UNREADABLE_INDEX]
STRAY = rules_files.BY_KIND[ProblemKind.STRAY_SHARD]


def test_every_rule_has_its_id_and_states_what_holds_and_why() -> None:
    for name, rule in RULES.items():
        assert name == rule.id
        area, _, what = name.partition(".")
        assert (area.isidentifier(), what.isidentifier()) == (True, True), name
        assert min(len(rule.statement), len(rule.source)) > 8, name
        assert not rule.statement.endswith("."), name


def test_every_kind_of_problem_has_a_rule_of_its_weight() -> None:
    assert set(rules_files.BY_KIND) == set(ProblemKind)
    for kind, rule in rules_files.BY_KIND.items():
        assert rule.level is (Level.ERROR if kind.is_fatal else Level.WARNING)


def test_two_rules_of_one_id_are_refused() -> None:
    with pytest.raises(AssertionError, match="two rules are called"):
        findings._table((INDEX,), (INDEX,))


def test_a_rule_outside_the_table_is_refused() -> None:
    with pytest.raises(AssertionError, match="in no table"):
        Findings().add(
            AuditRule("new.rule", Level.NOTE, "s", "s"), FindingLocation(), "message", "remedy"
        )


def test_findings_that_differ_in_the_expert_alone_are_one() -> None:
    gathered = Findings()
    for layer in (3, 4):
        for expert in (0, 1, 2, 7):
            name = f"layers.{layer}.ffn.experts.{expert}.w1.input_scale"
            gathered.add(
                INDEX,
                FindingLocation(name, None, layer),
                f"{name} is missing.",
                "Look.",
                got=expert,
            )
    gathered.add(STRAY, FindingLocation("b"), "b is stray.", "Remove it.")
    gathered.add(INDEX, FindingLocation("layers.3.attn.wq_a.weight", None, 3), "Another.", "Look.")
    first, second, third, last = gathered.sorted()
    assert (first.layer, first.tensor, first.count) == (3, "layers.3.attn.wq_a.weight", 1)
    assert (second.layer, second.count) == (3, 4)
    assert second.tensor == "layers.3.ffn.experts.0.w1.input_scale"
    assert second.message.endswith("is missing. And 3 more like it, experts 0-2, 7.")
    assert second.evidence["got"] == 0
    assert second.evidence["examples"][-1] == "layers.3.ffn.experts.7.w1.input_scale"
    assert (third.layer, third.count) == (4, 4)
    assert (last.level, last.rule) == (Level.WARNING, STRAY.id)


def test_examples_are_bounded_and_printable() -> None:
    gathered = Findings()
    for expert in range(1000):
        gathered.add(INDEX, FindingLocation(f"experts.{expert}.\x1b[31m" + "w" * 500), "m", "r")
    (finding,) = gathered.sorted()
    assert finding.count == 1000
    assert len(finding.evidence["examples"]) == 8
    assert finding.tensor is not None
    assert len(finding.tensor) < 200
    assert finding.tensor.isprintable()


def test_a_finding_is_plain_data() -> None:
    gathered = Findings()
    gathered.add(INDEX, FindingLocation(None, "layers.3.attn.wq_a", 3), "m", "r", shape=[1, 2])
    (finding,) = gathered.sorted()
    assert json.loads(json.dumps(finding.to_json())) == {
        "level": "error",
        "rule": "files.unreadable_index",
        "tensor": None,
        "module": "layers.3.attn.wq_a",
        "layer": 3,
        "layers": [3],
        "message": "m",
        "evidence": {"shape": [1, 2]},
        "remedy": "r",
        "count": 1,
    }


@pytest.mark.parametrize(
    ("numbers", "told"), [((), ""), ((4,), "4"), ((3, 1, 2), "1-3"), ((9, 0, 1), "0-1, 9")]
)
def test_numbers_are_written_as_ranges(numbers: tuple[int, ...], told: str) -> None:
    assert format_ranges(numbers) == told


def test_one_cause_in_several_layers_is_one_finding() -> None:
    gathered = Findings()
    for layer, cause in ((0, "a"), (1, "a"), (2, "a"), (2, "a"), (3, "b")):
        gathered.add(
            INDEX, FindingLocation(None, f"layers.{layer}.attn.wq_a", layer, cause), "M.", "r"
        )
    several, alone = gathered.sorted()
    assert (several.layer, several.layers, several.count) == (None, (0, 1, 2), 4)
    assert dict(several.by_layer) == {0: 1, 1: 1, 2: 2}
    assert several.message == "M. And 3 more like it, layers 0-2."
    assert (alone.layer, alone.layers, dict(alone.by_layer)) == (3, (3,), {})
