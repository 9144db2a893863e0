"""The audit panel of a checkpoint's page: a map of layers by kind of tensor, and every finding.

Owns how findings are grouped for reading; decides nothing about them.
What keeps it honest: suites/runs/test_audit.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from degarble.harness.checkpoint.findings import RULES
from degarble.harness.checkpoint.rules import Level
from degarble.harness.record.blocks import (
    Column,
    ColumnKind,
    Details,
    Fact,
    Facts,
    HeatMap,
    HeatScale,
    Sentence,
    Table,
    Tone,
)
from degarble.harness.record.page import Finding as PageFinding
from degarble.harness.record.page import Page, Panel, PanelKind, Subject
from degarble.harness.record.verdict import Origin
from degarble.harness.runs.audit import NOT_JUDGED

if TYPE_CHECKING:
    from degarble.harness.checkpoint.findings import Finding
    from degarble.harness.record.blocks import Block
    from degarble.harness.record.page import Provenance
    from degarble.harness.runs.audit import Audit

_SHOWN = 300  # findings on the page; all of them are in the JSON
_FIRST = 5  # findings on the first screen
_LEVEL_NUMBER = {Level.NOTE: 1.0, Level.WARNING: 2.0, Level.ERROR: 3.0}
# Kinds in the order of the map; the first pattern that matches decides.
_KINDS = (
    ("experts", r"\bexperts\.\d+"),
    ("shared experts", r"shared_experts"),
    ("router", r"\bgate\b(?!_)|tid2eid|correction_bias"),
    ("indexer", r"indexer"),
    ("compressor", r"compressor"),
    ("mixing", r"\b(hc_|attn_hc|ffn_hc)"),
    ("norms", r"norm"),
    ("attention", r"\b(attn|self_attn)\b"),
)
_OTHER = "other"


def audit_page(audit: Audit, provenance: Provenance) -> Page:
    """Make the page of an audit."""
    errors = [each for each in audit.findings if each.level is Level.ERROR]
    return Page(
        subject=Subject(audit.name, "Checkpoint", audit.identity),
        provenance=provenance,
        verdict=audit.verdict,
        sentence=audit.sentence,
        findings=tuple(_first_screen(each, provenance.command) for each in errors[:_FIRST]),
        panels=(audit_panel(audit),),
    )


def audit_panel(audit: Audit) -> Panel:
    """The panel alone, for a page that other runs have begun."""
    blocks: list[Block] = [
        _facts(audit),
        Sentence(NOT_JUDGED, Tone.NOTE),
        *_map(audit),
        *_table(audit),
        *(_details(number, each) for number, each in enumerate(audit.findings[:_SHOWN])),
    ]
    return Panel(PanelKind.AUDIT, audit.sentence, audit.verdict, tuple(blocks))


def kind_of(finding: Finding) -> str:
    """What kind of tensor a finding is about."""
    name = finding.tensor or finding.module or ""
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name)), _OTHER)


def _first_screen(finding: Finding, command: str) -> PageFinding:
    rule = RULES[finding.rule]
    origin = Origin(
        layer=finding.layer,
        component=kind_of(finding),
        site=finding.tensor or finding.module or "checkpoint",
        where={"places": finding.count},
        evidence=finding.message,
        reproducer=command,
    )
    return PageFinding(f"Not so: {rule.statement}", finding.remedy, origin, command)


def _facts(audit: Audit) -> Facts:
    counts = audit.counts
    return Facts(
        (
            Fact("Model", audit.family),
            Fact("Layout", audit.layout),
            Fact("Tensors", f"{audit.tensors:,} in {audit.shards:,} shards"),
            Fact("Size", f"{audit.nbytes / 1e9:,.2f} GB"),
            *(Fact(f"{str(level).capitalize()}s", f"{counts[level]:,}") for level in Level),
        ),
        "What was looked at",
    )


def _map(audit: Audit) -> list[Block]:
    """Layers by kinds, coloured by the worst finding."""
    if not audit.layers:
        return []
    kinds = (*(kind for kind, _ in _KINDS), _OTHER)
    worst: dict[tuple[int | None, str], float] = {}
    for finding in audit.findings:
        key = (finding.layer, kind_of(finding))
        worst[key] = max(worst.get(key, 0.0), _LEVEL_NUMBER[finding.level])
    layers: list[int | None] = [*range(audit.layers), None]
    return [
        HeatMap(
            caption="Worst finding by layer: 0 none, 1 note, 2 warning, 3 error",
            row_title="layer",
            column_title="kind of tensor",
            row_labels=tuple("model" if layer is None else str(layer) for layer in layers),
            column_labels=kinds,
            values=tuple(tuple(worst.get((layer, k), 0.0) for k in kinds) for layer in layers),
            scale=HeatScale(0.0, 3.0, digits=1),
        )
    ]


def _table(audit: Audit) -> list[Block]:
    if not audit.findings:
        return [Sentence("No rule is broken.", Tone.GOOD)]
    rows = tuple(
        (
            str(each.level),
            each.rule,
            each.layer,
            kind_of(each),
            each.tensor or each.module or "",
            each.count,
        )
        for each in audit.findings[:_SHOWN]
    )
    columns = (
        Column("level"),
        Column("rule", ColumnKind.CODE),
        Column("layer", ColumnKind.NUMBER),
        Column("kind"),
        Column("first place", ColumnKind.CODE),
        Column("places", ColumnKind.NUMBER, 12),
    )
    blocks: list[Block] = [Table("Findings, the worst first", columns, rows)]
    hidden = len(audit.findings) - len(rows)
    if hidden > 0:
        blocks.append(Sentence(f"{hidden:,} more findings are in the JSON.", Tone.NOTE))
    return blocks


def _details(number: int, finding: Finding) -> Details:
    facts = [
        Fact("Rule", RULES[finding.rule].statement),
        Fact("Remedy", finding.remedy),
        *(Fact(str(key), str(value)[:400], code=True) for key, value in finding.evidence.items()),
    ]
    where = finding.tensor or finding.module or "checkpoint"
    blocks = (Sentence(finding.message), Facts(tuple(facts)))
    return Details(f"{finding.rule}: {where}", blocks, f"finding-{number}")
