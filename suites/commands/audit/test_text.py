from __future__ import annotations

import re
from dataclasses import replace

import pytest

from degarble.harness.checkpoint.audit.findings import RULES, Finding, FindingLocation, Findings
from degarble.harness.checkpoint.audit.rules import AuditRule, Level
from degarble.harness.commands.audit import text as audit_text
from degarble.harness.commands.audit.audit import (
    Audit,
    AuditedCheckpoint,
    AuditPart,
    AuditRequest,
    audit,
)
from degarble.harness.commands.audit.text import audit_text as text
from degarble.suites.commands.audit.audit_cases import healthy_checkpoint, sick_checkpoint
from degarble.suites.reports.page_cases import HOSTILE
from degarble.suites.snapshots import assert_as_kept

SCREEN = 50  # lines


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Audit:
    return audit(AuditRequest(sick_checkpoint(tmp_path_factory)))


RULES_OF_A_SUITE = {
    rule.id: rule
    for rule in (
        AuditRule(
            "scales.missing", Level.ERROR, "codes have every scale of their format", "a source"
        ),
        AuditRule("numbers.far", Level.WARNING, "a matrix is near its siblings", "a source"),
        AuditRule("numbers.who", Level.NOTE, "the bytes say who wrote them", "a source"),
    )
}


def _found(rule: str, name: str | None, layer: int | None, count: int) -> Finding:
    message = f"{name or 'All of it'} was looked at, and this is what was found there."
    level = RULES_OF_A_SUITE[rule].level
    return Finding(level, rule, name, None, layer, message, {}, "Do this.", count)


def test_the_words_are_as_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_text, "RULES", RULES_OF_A_SUITE)
    about = AuditedCheckpoint(
        "a-checkpoint", "sha256:0123456789abcdef", "deepseek_v4", "modelopt", 61, 1, 95,
        285_123, 881_000_000_000, {},
    )  # fmt: skip
    parts = (
        AuditPart(
            "structure", "285,123 tensors in 95 files, against the config of deepseek_v4.", True
        ),
        AuditPart("numbers", "143,000 weights, 881 GB read in 11 min 03 s (1.33 GB/s).", True),
        AuditPart("loader", "No map was given.", False),
    )
    findings = (
        _found("scales.missing", "layers.3.attn.wq_a.weight", 3, 1),
        _found("scales.missing", "layers.4.ffn.experts.0.w1.weight", 4, 384),
        _found("scales.missing", "layers.9.ffn.experts.0.w1.weight", 9, 384),
        _found("numbers.far", "layers.3.attn.wq_a", 3, 1),
        _found("numbers.who", None, None, 1),
    )
    bad = Audit(about, parts, findings)
    good = Audit(about, parts, findings[4:])
    told = "\n".join(
        text(each, width=width) for each, width in ((bad, 100), (bad, 60), (good, 100))
    )
    assert_as_kept("commands/audit/audit.txt", told)


@pytest.mark.parametrize("width", [40, 80, 100, 200])
def test_it_fits_one_screen(sick: Audit, width: int) -> None:
    lines = text(sick, width=width).splitlines()
    assert max(map(len, lines)) <= max(width, 78)  # ids of rules are not broken
    assert width < 80 or len(lines) <= SCREEN


def test_a_flood_of_findings_fits_too(sick: Audit) -> None:
    findings = Findings()
    for rule in RULES.values():
        for layer in range(61):
            findings.add(rule, FindingLocation(f"layers.{layer}.x", None, layer), "m " * 900, "r")
    flooded = replace(sick, findings=tuple(findings.sorted()))
    shown = text(flooded)
    assert len(shown.splitlines()) <= SCREEN
    assert f"and {len(RULES) - 12} rules more" in shown
    assert "in 61 places, layers 0-60" in shown


def test_a_healthy_one_has_its_notes(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = audit(AuditRequest(healthy_checkpoint(tmp_path_factory), numbers=False))
    quiet = replace(found, findings=())
    assert text(quiet).splitlines()[-1].startswith("            loader ")
    notes = replace(found, findings=tuple(f for f in found.findings if f.level == "note"))
    assert "\nNotes:\n   note     config.ignore_keeps_source" in text(notes)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_shown_and_not_obeyed(sick: Audit, name: str) -> None:
    findings = Findings()
    rule = next(iter(RULES.values()))
    findings.add(rule, FindingLocation(name, None, None), name, name)
    shown = text(replace(sick, findings=tuple(findings.sorted())))
    assert not set(shown) & {"\x1b", "\x07", "\x00", "\r", "\u202e"}


def test_colour_is_never_alone(sick: Audit) -> None:
    coloured = text(sick, colour=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == text(sick)
