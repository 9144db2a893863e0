from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from degarble.harness.checkpoint.audit.findings import RULES, FindingLocation, Findings
from degarble.harness.commands.audit.audit import AuditRequest, audit
from degarble.harness.commands.audit.page import MOST_COLUMNS, SHOWN_FINDINGS, audit_page
from degarble.harness.report.blocks import Catalogue, Sentence, Tone, ToneMap
from degarble.harness.report.page import page_from_json, page_to_json, provenance
from degarble.reports.page_html import SIZE_LIMIT, page_html
from degarble.suites.commands.audit.audit_cases import sick_checkpoint

if TYPE_CHECKING:
    from degarble.harness.commands.audit.audit import Audit
    from degarble.harness.report.blocks import Block
    from degarble.harness.report.page import Page

WHERE = provenance("degarble audit sick-v4")


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Audit:
    return audit(AuditRequest(sick_checkpoint(tmp_path_factory), loader="vllm"))


def _blocks(page: Page) -> tuple[Block, ...]:
    return page.panels[0].blocks


def _map(page: Page) -> ToneMap:
    (found,) = (block for block in _blocks(page) if isinstance(block, ToneMap))
    return found


def _tone(page: Page, kind: str, layer: str) -> Tone | None:
    block = _map(page)
    mark = block.marks[block.row_labels.index(kind)][block.column_labels.index(layer)]
    return mark.tone if mark else None


def test_the_map_shows_the_worst_finding_where_it_is(sick: Audit) -> None:
    page = audit_page(sick, WHERE)
    assert _tone(page, "experts", "1") is Tone.BAD
    assert _tone(page, "norms", "0") is Tone.BAD
    assert _tone(page, "norms", "1") is Tone.GOOD
    assert _tone(page, "indexer", "0") is None  # a layer without one
    assert _tone(page, "embedding, head", "all") is Tone.GOOD
    assert _map(page).column_labels == ("0", "1", "2", "d0", "all")


def test_an_audit_has_no_budget(sick: Audit) -> None:
    healthy = replace(sick, findings=())
    for judged, told in ((healthy, "no rule of level error"), (sick, "a rule of level error")):
        text = page_html(audit_page(judged, WHERE))
        assert f"<span>{told} is broken" in text
        assert "its budget" not in text


def test_a_cause_of_several_layers_is_on_the_map_in_each(sick: Audit) -> None:
    findings = Findings()
    for layer in (0, 1, 1):
        place = FindingLocation(None, f"layers.{layer}.attn.wq_a", layer, "NVFP4 as FP8")
        findings.add(RULES["loader.format"], place, "m", "r")
    block = _map(audit_page(replace(sick, findings=tuple(findings.sorted())), WHERE))
    row = block.marks[block.row_labels.index("attention")]
    marks = dict(zip(block.column_labels, row, strict=True))
    counts = {layer: mark.count for layer, mark in marks.items() if mark and mark.count}
    assert counts == {"0": 1, "1": 2}
    assert {mark.anchor for mark in marks.values() if mark and mark.count} == {"finding-0"}


def test_what_is_missing_is_on_the_map_too(sick: Audit) -> None:
    findings = Findings()
    findings.add(
        RULES["structure.missing_block"], FindingLocation(None, "layers.40.attn", 40), "m", "r"
    )
    page = audit_page(replace(sick, findings=tuple(findings.sorted())), WHERE)
    layers = sick.subject.layers
    assert _tone(page, "attention", f"d{40 - layers}") is Tone.BAD


def test_every_mark_leads_to_its_finding(sick: Audit) -> None:
    page = audit_page(sick, WHERE)
    text = page_html(page)
    anchors = {m.anchor for row in _map(page).marks for m in row if m and m.anchor}
    assert anchors
    assert all(f'id="{anchor}"' in text for anchor in anchors)
    ids = re.findall(r' id="([^"]*)"', text)
    assert len(ids) == len(set(ids))


def test_the_first_screen_tells_each_rule_once(sick: Audit) -> None:
    page = audit_page(sick, WHERE)
    rules = [finding.origin.where["rule"] for finding in page.findings]
    assert len(rules) == len(set(rules)) <= 5
    notes = {finding.origin.where["rule"]: finding.note for finding in page.findings}
    assert notes["numbers.scale_not_finite"] == "Broken in 3 places, layer 1."


def test_a_page_comes_back_from_its_record(sick: Audit) -> None:
    page = audit_page(sick, WHERE)
    assert page_from_json(page_to_json(page)) == page


def _flooded(sick: Audit, layers: int, rules: int = len(RULES)) -> Audit:
    """Rules broken in every layer, and tensors by the hundred thousand."""
    findings = Findings()
    for layer in range(layers):
        for rule in list(RULES.values())[:rules]:
            name = f"layers.{layer}.ffn.experts.0.w1.weight_scale_2"
            findings.add(
                rule, FindingLocation(name, None, layer), "m" * 300, "r" * 100, got=list(range(99))
            )
    places: dict[tuple[int | None, str], int] = {
        (layer, "experts"): 300_000 // layers for layer in range(layers)
    }
    subject = replace(sick.subject, layers=layers, tensors=300_000, places=places)
    return replace(sick, subject=subject, findings=tuple(findings.sorted()))


def test_a_full_model_with_everything_broken_stays_small(sick: Audit) -> None:
    page = audit_page(_flooded(sick, 61), WHERE)
    assert len(page_html(page)) < SIZE_LIMIT
    (listed,) = (
        b for b in _blocks(page) if isinstance(b, Catalogue) and b.caption.startswith("Findings")
    )
    assert len(listed.entries) == SHOWN_FINDINGS
    left = 61 * len(RULES) - SHOWN_FINDINGS
    told = f"{left:,} of {61 * len(RULES):,} findings are in the JSON alone."
    assert Sentence(told, Tone.NOTE) in _blocks(page)


def test_a_config_of_ten_thousand_layers_has_a_map_that_can_be_read(sick: Audit) -> None:
    page = audit_page(_flooded(sick, 500, 2), WHERE)
    assert len(_map(page).column_labels) == MOST_COLUMNS + 1
    assert any("200 layers of 500" in str(block) for block in _blocks(page))


def test_without_findings_it_says_so(sick: Audit) -> None:
    page = audit_page(replace(sick, findings=()), WHERE)
    assert Sentence("No rule is broken.", Tone.GOOD) in _blocks(page)
    assert "DIFFERS" not in page_html(page).partition("<body>")[2].partition("<script>")[0]


def test_the_unjudged_parts_are_on_the_page(sick: Audit) -> None:
    assert "No reference was given. --against CKPT" in page_html(audit_page(sick, WHERE))
