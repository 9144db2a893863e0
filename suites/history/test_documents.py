"""Checks as runs of the history, and what is no check."""

import json
from pathlib import Path
from typing import Any

import pytest

from degarble.harness.base.errors import Refused
from degarble.harness.history.records import failures_of, read_check, values_of
from degarble.harness.report.verdict import Verdict

LINES: list[dict[str, Any]] = [
    {"layer": 3, "component": "attn.wq_a", "output": "a", "budgets": 0.2,
     "candidate_reference": 0.99},
    {"layer": 3, "component": "attn.wq_a", "output": "b", "budgets": 0.4,
     "candidate_reference": None},
    {"layer": None, "component": "head", "output": "logits", "budgets": None},
    {"layer": None, "component": "attn.norm", "name": "mtp.0.attn.norm", "budgets": 0.1},
]  # fmt: skip
DOCUMENT: dict[str, Any] = {"schema": 1, "verdict": "DIFFERS", "cosines": LINES}


def test_the_worst_output_of_a_component_is_its_number() -> None:
    assert values_of(DOCUMENT) == {
        "budgets": {"layers.3.attn.wq_a": 0.4, "mtp.0.attn.norm": 0.1},
        "distance": {"layers.3.attn.wq_a": pytest.approx(0.01)},
    }


def test_origins_and_unstable_components_are_failures() -> None:
    origin = {"layer": 7, "component": "ffn.experts.w2", "fault": "M10.nibble_order",
              "evidence": "100 % of codes"}  # fmt: skip
    found = failures_of({"origins": [origin], "unstable": ["layers.1.ffn.topk"]})
    assert [(f.component, f.verdict, f.fault) for f in found] == [
        ("layers.7.ffn.experts.w2", Verdict.DIFFERS, "M10.nibble_order"),
        ("layers.1.ffn.topk", Verdict.UNSTABLE, None),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json",
        "[]",
        "{}",
        json.dumps({**DOCUMENT, "schema": 2}),
        json.dumps({**DOCUMENT, "verdict": "FINE"}),
        json.dumps({**DOCUMENT, "cosines": [1]}),
        "[" * 100_000,
        json.dumps({**DOCUMENT, "facts": [1]}),
        json.dumps({**DOCUMENT, "verdict": []}),
        json.dumps({**DOCUMENT, "checkpoint": 7}),
        json.dumps({**DOCUMENT, "cosines": [{**LINES[0], "budgets": float("nan")}]}),
    ],
)
def test_what_is_no_check_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(Refused):
        read_check(path)


def test_numbers_beyond_every_float_are_no_values() -> None:
    lines = [{**LINES[0], "budgets": 10**400}, LINES[3]]
    assert values_of({**DOCUMENT, "cosines": lines})["budgets"] == {"mtp.0.attn.norm": 0.1}


def test_a_check_without_a_judged_output_is_refused() -> None:
    with pytest.raises(Refused, match="judged outputs"):
        values_of({**DOCUMENT, "cosines": LINES[2:3]})
