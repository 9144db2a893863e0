"""The audit panel of a checkpoint's HTML page: map of layers by kind of tensor, findings, weights.

Every part is bounded; what is omitted for its number is counted in a sentence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.checkpoint.audit.findings import RULES
from degarble.harness.checkpoint.audit.rules import Level
from degarble.harness.commands.audit.audit import by_rule, places
from degarble.harness.commands.audit.document import origin_of
from degarble.harness.commands.audit.kinds import KINDS, kind_of
from degarble.harness.commands.audit.weights import loader_blocks, weight_blocks
from degarble.harness.report.blocks import (
    Catalogue,
    CatalogueEntry,
    Column,
    ColumnKind,
    Fact,
    Facts,
    Mark,
    Sentence,
    Table,
    Tone,
    ToneMap,
)
from degarble.harness.report.number_text import number
from degarble.harness.report.page import Page, PageFinding, Panel, PanelKind
from degarble.harness.report.page import Subject as PageSubject
from degarble.harness.report.progress import size

if TYPE_CHECKING:
    from degarble.harness.checkpoint.audit.findings import Finding
    from degarble.harness.commands.audit.audit import Audit, Broken
    from degarble.harness.report.blocks import Block
    from degarble.harness.report.page import Provenance

SHOWN = 250  # findings on the page; all of them are in the JSON
MOST_COLUMNS = 200  # layers of the map
_FIRST = 5  # rules on the first screen
_TEXT = 400  # characters of one piece of evidence
TONES = {Level.ERROR: Tone.BAD, Level.WARNING: Tone.WARNING, Level.NOTE: Tone.NOTE}
_LEGEND = (
    (Tone.BAD, "error"),
    (Tone.WARNING, "warning"),
    (Tone.NOTE, "note"),
    (Tone.GOOD, "nothing found"),
)


def audit_page(audit: Audit, provenance: Provenance) -> Page:
    """Return the page of an audit."""
    errors = [each for each in audit.findings if each.level is Level.ERROR]
    return Page(
        subject=PageSubject(audit.subject.name, "Checkpoint", audit.subject.identity),
        provenance=provenance,
        verdict=audit.verdict,
        sentence=audit.sentence,
        findings=tuple(
            _first_screen(each, provenance.command) for each in by_rule(errors)[:_FIRST]
        ),
        panels=(audit_panel(audit),),
    )


def audit_panel(audit: Audit) -> Panel:
    """Return the panel alone, for a page that other runs have begun."""
    blocks: list[Block] = [
        _facts(audit),
        _parts(audit),
        *_map(audit),
        *_findings(audit),
        *loader_blocks(audit),
        *weight_blocks(audit),
    ]
    return Panel(PanelKind.AUDIT, audit.sentence, audit.verdict, tuple(blocks))


def _first_screen(broken: Broken, command: str) -> PageFinding:
    finding = broken.first
    return PageFinding(
        f"Not so: {RULES[finding.rule].statement}",
        finding.remedy,
        origin_of(finding, command),
        command,
        f"Broken {broken.extent}." if broken.extent else "",
    )


def _facts(audit: Audit) -> Facts:
    about, counts = audit.subject, audit.counts
    drafters = f" and {places(about.drafters, 'drafter')}" if about.drafters else ""
    return Facts(
        (
            Fact("Model", f"{about.family}, {places(about.layers, 'layer')}{drafters}"),
            Fact("Layout", about.layout),
            Fact("Tensors", f"{about.tensors:,} in {places(about.shards, 'file')}"),
            Fact("Size", size(about.nbytes)),
            Fact("Findings", ", ".join(places(counts[level], str(level)) for level in Level)),
        ),
        "What was looked at",
    )


def _parts(audit: Audit) -> Table:
    columns = (Column("part"), Column("judged"), Column("what, or why not"))
    rows = tuple((part.name, "yes" if part.judged else "no", part.told) for part in audit.parts)
    return Table("What was judged, and what not", columns, rows)


def _map(audit: Audit) -> list[Block]:
    """Return kinds by layers, coloured by the worst finding."""
    about = audit.subject
    worst: dict[tuple[int | None, str], Mark] = {}
    for index, finding in enumerate(audit.findings):  # the worst come first
        kind = kind_of(finding)
        spread: list[tuple[int | None, int]] = [*finding.by_layer.items()]
        for layer, count in spread or [(finding.layer, finding.count)]:
            mark = worst.get((layer, kind)) or Mark(TONES[finding.level], 0, _anchor(index))
            worst[layer, kind] = Mark(mark.tone, mark.count + count, mark.anchor)
    for key in about.places:
        worst.setdefault(key, Mark(Tone.GOOD))
    numbered = sorted({layer for layer, _ in worst if layer is not None})
    layers: list[int | None] = [*numbered[:MOST_COLUMNS], None]
    kinds = [kind for kind in KINDS if any((layer, kind) in worst for layer in layers)]
    if not kinds:
        return []
    blocks: list[Block] = [
        ToneMap(
            caption="The worst finding of each layer, by kind of tensor",
            row_title="kind",
            column_title="layer",
            row_labels=tuple(kinds),
            column_labels=tuple(_layer_told(layer, about.layers) for layer in layers),
            marks=tuple(tuple(worst.get((layer, kind)) for layer in layers) for kind in kinds),
            legend=_LEGEND,
        )
    ]
    hidden = len(numbered) - MOST_COLUMNS
    if hidden > 0:
        told = f"The map has {MOST_COLUMNS} layers of {len(numbered):,}; findings of all follow."
        blocks.append(Sentence(told, Tone.NOTE))
    return blocks


def _layer_told(layer: int | None, layers: int) -> str:
    if layer is None:
        return "all"
    return f"d{layer - layers}" if layers and layer >= layers else str(layer)


def _anchor(number: int) -> str:
    return f"finding-{number}" if number < SHOWN else ""


def _findings(audit: Audit) -> list[Block]:
    if not audit.findings:
        return [Sentence("No rule is broken.", Tone.GOOD)]
    entries = tuple(
        CatalogueEntry(
            (
                str(TONES[each.level]),
                kind_of(each),
                each.rule,
                each.layer,
                each.count,
                each.tensor or each.module or "the checkpoint",
            ),
            _explained(each),
            _anchor(index),
        )
        for index, each in enumerate(audit.findings[:SHOWN])
    )
    columns = (
        Column("level", ColumnKind.TONE),
        Column("kind"),
        Column("rule", ColumnKind.CODE),
        Column("layer", ColumnKind.NUMBER),
        Column("places", ColumnKind.NUMBER, 12),
        Column("where; unfold for evidence and remedy", ColumnKind.CODE),
    )
    blocks: list[Block] = [Catalogue("Findings, the worst first", columns, entries, choices=3)]
    hidden = len(audit.findings) - len(entries)
    if hidden > 0:
        told = f"{hidden:,} of {len(audit.findings):,} findings are in the JSON alone."
        blocks.append(Sentence(told, Tone.NOTE))
    return blocks


def _explained(finding: Finding) -> tuple[Block, ...]:
    rule = RULES[finding.rule]
    facts = [
        Fact("Expected", rule.statement),
        Fact("Remedy", finding.remedy),
        *(Fact(str(key), _shown(value), code=True) for key, value in finding.evidence.items()),
        Fact("Rule", f"{rule.id}, level {rule.level}: {rule.source}"),
    ]
    return (Sentence(finding.message), Facts(tuple(facts)))


def _shown(value: object) -> str:
    if value is None:
        return "not a number"
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return ", ".join(value)[:_TEXT]
    return number(value) if isinstance(value, float) else str(value)[:_TEXT]
