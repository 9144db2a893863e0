"""The document of `degarble audit --json`, and docs/audit.md, which tells its fields."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.checkpoint.audit.findings import RULES, FindingLocation, Findings
from degarble.harness.cli.terminal import json_text
from degarble.harness.commands.audit.audit import AuditRequest, audit
from degarble.harness.commands.audit.document import MOST_ORIGINS, audit_document
from degarble.suites.commands.audit.audit_cases import healthy_checkpoint, sick_checkpoint
from degarble.suites.house.repository import ROOT

if TYPE_CHECKING:
    from degarble.harness.commands.audit.audit import Audit

PAGE = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8").partition("## The JSON")[2]
TOLD = set(re.findall(r"^\| (`.*?) \|", PAGE.partition("## ")[0], re.MULTILINE))
FIELDS = {name for cell in TOLD for name in re.findall(r"`([^`]+)`", cell)}
# Their keys are names, or are told in the text of the row.
OPEN = {
    *("origins[]", "cosines[]", "judged", "not_judged", "counts", "findings[].evidence"),
    *("numbers.unread", "against.unlike", "against.only_here", "against.only_there"),
    *("against.farthest[]", "loader.ranks", "loader.counts", "loader.shares[].bytes_by_kind"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Audit:
    healthy = healthy_checkpoint(tmp_path_factory)
    sick = sick_checkpoint(tmp_path_factory)
    return audit(AuditRequest(sick, loader="vllm:tp=2", against=healthy))


def _paths(value: Any, path: str = "") -> set[str]:
    if path in OPEN:
        return set()
    if isinstance(value, dict):
        inner = {f"{path}.{name}".lstrip("."): each for name, each in value.items()}
        return set(inner).union(*(_paths(each, name) for name, each in inner.items()))
    if isinstance(value, list):
        return set().union(*(_paths(each, f"{path}[]") for each in value))
    return set()


def test_the_page_tells_every_field_and_no_other(found: Audit) -> None:
    document = json.loads(json_text(audit_document(found, "degarble audit sick-v4")))
    not_here = {"report", "against.roles[].over_floor"}  # a page; a reference of another format
    assert _paths(document) | not_here == FIELDS


def test_a_field_that_is_not_told_is_seen(found: Audit) -> None:
    document = audit_document(found, "x") | {"schema": 1}
    document["numbers"]["roles"][0]["new"] = 1
    assert _paths(document) - FIELDS == {"numbers.roles[].new"}


def test_the_document_is_strict_json(found: Audit) -> None:
    text = json_text(audit_document(found, "degarble audit sick-v4"))
    document = json.loads(text, parse_constant=pytest.fail)
    assert document["schema"] == 1
    assert sum(each["count"] for each in document["findings"]) == sum(document["counts"].values())
    assert set(document["judged"]) == {"structure", "numbers", "against", "loader"}
    assert document["not_judged"] == {}


def test_origins_are_errors_and_bounded(found: Audit) -> None:
    findings = Findings()
    for layer in range(3):
        for rule in RULES.values():
            findings.add(rule, FindingLocation(f"layers.{layer}.x", None, layer), "m", "r")
    flooded = replace(found, findings=tuple(findings.sorted()))
    document = audit_document(flooded, "x")
    assert len(document["origins"]) == MOST_ORIGINS
    assert len(document["findings"]) == 3 * len(RULES)
    rules = {origin.where["rule"] for origin in document["origins"]}
    assert all(RULES[str(rule)].level == "error" for rule in rules)


def test_what_was_not_judged_is_null(found: Audit) -> None:
    document = audit_document(replace(found, table=None, loader=None, beside=None), "x")
    assert [document[name] for name in ("numbers", "loader", "against")] == [None, None, None]
    assert document["cosines"] == []
