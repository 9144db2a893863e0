"""Build the audit's page, and open it in a browser."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from degarble.harness.checkpoint.audit.findings import RULES, FindingLocation, Findings
from degarble.harness.commands.audit import page as audit_weights
from degarble.harness.commands.audit.audit import AuditRequest, audit
from degarble.harness.commands.audit.page import (
    MOST_COLUMNS,
    SHOWN_FINDINGS,
    audit_page,
    loader_blocks,
    weight_blocks,
)
from degarble.harness.report.blocks import Catalogue, Details, Facts, Sentence, Table, Tone, ToneMap
from degarble.harness.report.page import page_from_json, page_to_json, provenance
from degarble.reports.page_html import SIZE_LIMIT, page_html
from degarble.suites.commands.audit.audit_cases import sick_checkpoint
from degarble.suites.reports.test_page_browser import CONTRAST, TOO_WIDE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from degarble.harness.commands.audit.audit import Audit
    from degarble.harness.report.blocks import Block
    from degarble.harness.report.page import Page
    from degarble.suites.commands.browser import Window


WHERE = provenance("degarble audit sick-v4")


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Audit:
    return audit(AuditRequest(sick_checkpoint(tmp_path_factory), loader="vllm"))


def _blocks(page: Page) -> tuple[Block, ...]:
    return page.panels[0].blocks


def _map(page: Page) -> ToneMap:
    (tone_map,) = (block for block in _blocks(page) if isinstance(block, ToneMap))
    return tone_map


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
    for judged, sentence in ((healthy, "no rule of level error"), (sick, "a rule of level error")):
        text = page_html(audit_page(judged, WHERE))
        assert f"<span>{sentence} is broken" in text
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


def test_the_first_screen_shows_each_rule_once(sick: Audit) -> None:
    page = audit_page(sick, WHERE)
    rules = [finding.origin.where["rule"] for finding in page.findings]
    assert len(rules) == len(set(rules)) <= 5
    notes = {finding.origin.where["rule"]: finding.note for finding in page.findings}
    assert notes["numbers.scale_not_finite"] == "Broken in 3 places, layer 1."


def test_a_page_is_rebuilt_from_its_record(sick: Audit) -> None:
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
    text = f"{left:,} of {61 * len(RULES):,} findings are in the JSON alone."
    assert Sentence(text, Tone.NOTE) in _blocks(page)


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


@pytest.fixture(scope="module")
def weights_sick(tmp_path_factory: pytest.TempPathFactory) -> Audit:
    return audit(AuditRequest(sick_checkpoint(tmp_path_factory), loader="vllm:tp=2"))


def _listed(found: Audit) -> tuple[Catalogue, str]:
    *_, listed, told = weight_blocks(found)
    assert isinstance(listed, Catalogue)
    assert isinstance(told, Sentence)
    return listed, told.text


def _facts(found: Audit, weight: str) -> dict[str, str]:
    listed, _ = _listed(found)
    (entry,) = (
        catalogue_entry for catalogue_entry in listed.entries if catalogue_entry.cells[-1] == weight
    )
    (facts,) = entry.blocks
    assert isinstance(facts, Facts)
    return {fact.name: fact.value for fact in facts.rows}


def test_those_with_findings_come_first_and_every_role_is_there(weights_sick: Audit) -> None:
    listed, text = _listed(weights_sick)
    tones = [str(entry.cells[0]) for entry in listed.entries]
    assert tones == sorted(tones, key=["bad", "warning", "note", "good"].index)
    names = [entry.cells[-1] for entry in listed.entries]
    assert len(names) == len(set(names))
    for name in ("layers.1.ffn.experts.0.w1", "layers.0.attn_norm", "embed"):
        assert name in names
    assert weights_sick.table is not None
    assert text.startswith(f"{len(names)} of {len(weights_sick.table)} weights")


def test_a_packed_weight_shows_scales_magnitude_entropy_layout_and_order(
    weights_sick: Audit,
) -> None:
    facts = _facts(weights_sick, "layers.2.ffn.experts.2.w2")
    assert facts["Tensor scale"] == "0 is stored, decodes by 0"
    assert facts["As"] == "NVFP4, modelopt names"
    assert "bits a code" in facts["Entropy"]
    assert facts["Layout of scales"].startswith("row-major: scales and codes correlate by -0.")
    assert facts["Magnitude"] == "rms 0, amax 0"
    assert set(facts) >= {"Stored in", "Size", "Input scale", "Block scales", "Packing order"}
    assert set(_facts(weights_sick, "layers.0.attn_norm")) == {
        *("Stored in", "As", "Size", "Magnitude", "Zeros", "Entropy")
    }
    assert _facts(weights_sick, "layers.1.ffn.experts.0.w1")["Tensor scale"] == (
        "nan is stored, decodes by nan"
    )


def test_what_has_no_room_is_counted(weights_sick: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = _listed(weights_sick)
    monkeypatch.setattr(audit_weights, "SHOWN_WEIGHTS", 10)
    listed, text = _listed(weights_sick)
    assert len(listed.entries) == 10
    assert text.endswith(f" {len(whole.entries) - 10} more of these have no room here.")


def test_roles_are_a_table_and_the_dialect_a_sentence(weights_sick: Audit) -> None:
    dialect, roles, *_ = weight_blocks(weights_sick)
    assert isinstance(dialect, Sentence)
    assert "NVFP4 matrices under modelopt names" in dialect.text
    assert isinstance(roles, Details)
    (table,) = roles.blocks
    assert isinstance(table, Table)
    assert f"{len(table.rows)} roles" in roles.summary


def test_without_numbers_or_map_there_is_no_section(weights_sick: Audit) -> None:
    assert weight_blocks(replace(weights_sick, table=None)) == []
    assert loader_blocks(replace(weights_sick, loader=None)) == []


def test_loading_is_reported_in_counts_and_by_rank(weights_sick: Audit) -> None:
    counts, ranks = loader_blocks(weights_sick)
    assert isinstance(counts, Facts)
    assert isinstance(ranks, Table)
    assert ("Ranks", "2") in [(fact.name, fact.value) for fact in counts.rows]
    assert ranks.rows[0][0] == "0-1"


# --------------------------------------------------------------------------------------------------
# The audit panel in a real Chromium: filter, choose, sort, walk the map; light, dark, narrow.

UNFOLD = "document.querySelectorAll('details').forEach((fold) => { fold.open = true; })"
SHOWN = """
return Array.from(document.querySelector('.catalogue').tBodies[0].rows)
  .filter((row) => row.checkVisibility())
  .map((row) => Array.from(row.cells, (cell) =>
    (cell.querySelector('summary') || cell).textContent.trim()));
"""
TYPED = """
const fields = document.querySelector('.tools').querySelectorAll('input, select');
const field = fields[arguments[0]];
field.value = arguments[1];
field.dispatchEvent(new Event('input'));
"""
COUNT = "return document.querySelector('.tools .count').textContent"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = audit(AuditRequest(sick_checkpoint(tmp_path_factory), loader="vllm:tp=2"))
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page_html(audit_page(found, provenance("degarble audit x"))), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Window]:
    from degarble.suites.commands.browser import chromium  # noqa: PLC0415  only with selenium

    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def window(started: Window, page: Path) -> Window:
    started.media()
    started.open(page)
    return started


@pytest.mark.needs("chromium", "selenium")
def test_it_is_quiet_and_loads_nothing(window: Window, page: Path) -> None:
    assert window.complaints() == []
    others = [url for url in window.requests() if not url.startswith("data:image/svg+xml")]
    assert others == [page.as_uri()]


@pytest.mark.needs("chromium", "selenium")
def test_findings_are_filtered_by_words_and_choices(window: Window) -> None:
    everything = window.run(SHOWN)
    assert window.run(COUNT) == f"{len(everything)} shown"
    window.run(TYPED, 0, "NOT_FINITE  w1")
    (row,) = window.run(SHOWN)
    assert row[0] == "error"
    assert row[2] == "numbers.scale_not_finite"
    assert window.run(COUNT) == f"1 of {len(everything)} shown"
    window.run(TYPED, 0, "")
    window.run(TYPED, 1, "warning")
    assert {row[0] for row in window.run(SHOWN)} == {"warning"}
    window.run(TYPED, 2, "experts")
    assert {tuple(row[:2]) for row in window.run(SHOWN)} <= {("warning", "experts")}
    window.run(TYPED, 1, "")
    window.run(TYPED, 2, "")
    assert window.run(SHOWN) == everything


@pytest.mark.needs("chromium", "selenium")
def test_levels_are_sorted_by_weight_and_folds_by_their_names(window: Window) -> None:
    focus = "document.querySelectorAll('.catalogue .sorter')[arguments[0]].focus()"
    window.run(focus, 0)
    window.press("Enter", "\r")
    levels = [row[0] for row in window.run(SHOWN)]
    assert levels == sorted(levels, key=["error", "warning", "note"].index)
    window.press("Enter", "\r")
    assert [row[0] for row in window.run(SHOWN)] == levels[::-1]
    window.run(focus, 5)
    window.press("Enter", "\r")
    names = [row[5] for row in window.run(SHOWN)]
    assert names == sorted(names, key=str.lower)


@pytest.mark.needs("chromium", "selenium")
def test_a_cell_of_the_map_leads_to_its_finding_even_when_filtered(window: Window) -> None:
    window.run(TYPED, 0, "nothing has this name")
    assert window.run(SHOWN) == []
    window.run("document.querySelector('.tones a[tabindex=\"0\"]').focus()")
    anchor = window.run("return document.activeElement.hash.slice(1)")
    window.press("Enter", "\r")
    waited = """const done = arguments[arguments.length - 1];
                setTimeout(() => {
                  const fold = document.getElementById(arguments[0]);
                  done([fold.open, fold.checkVisibility(), fold.getBoundingClientRect().top]);
                }, 900)  // the page scrolls smoothly"""
    is_open, is_seen, top = window.driver.execute_async_script(waited, anchor)
    assert (is_open, is_seen) == (True, True)
    assert 0 <= top < 900


@pytest.mark.needs("chromium", "selenium")
def test_arrow_keys_walk_the_map(window: Window) -> None:
    window.run("document.querySelector('.tones a[tabindex=\"0\"]').focus()")
    before = window.run("return document.activeElement.hash")
    window.press("ArrowRight")
    assert window.run("return document.activeElement.closest('.tones') !== null")
    assert window.run("return document.activeElement.hash") != before


@pytest.mark.needs("chromium", "selenium")
def test_every_cell_of_the_map_says_more_than_its_colour(window: Window) -> None:
    script = """return Array.from(document.querySelectorAll('.tones tbody td'),
                (cell) => [cell.className, cell.querySelector('.quiet').textContent])"""
    cells = {tuple(each) for each in window.run(script)}
    assert ("good", "nothing found") in cells
    assert ("none", "nothing there") in cells
    assert any(name == "bad" and text.startswith("error, ") for name, text in cells)


@pytest.mark.needs("chromium", "selenium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_word_has_contrast(window: Window, scheme: str) -> None:
    window.media(scheme=scheme)
    window.run(UNFOLD)
    assert window.run(CONTRAST) == []


@pytest.mark.needs("chromium", "selenium")
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_runs_out_of_the_window(window: Window, width: int) -> None:
    window.media(width=width)
    window.run(UNFOLD)
    assert window.run(TOO_WIDE, width) == []


@pytest.mark.needs("chromium", "selenium")
def test_the_map_of_61_layers_needs_no_scrolling_on_a_desk(window: Window) -> None:
    script = """
    const table = document.querySelector('.tones');
    table.classList.remove('few');
    for (const row of table.rows) while (row.cells.length < 64) {
      const cell = row.cells[row.cells.length - 1].cloneNode(true);
      if (cell.tagName === 'TH') cell.textContent = '60';
      row.append(cell);
    }
    const region = table.closest('.scroll');
    return region.scrollWidth - region.clientWidth;
    """
    assert window.run(script) <= 0


@pytest.mark.needs("chromium", "selenium")
def test_on_paper_there_are_no_tools_and_everything_is_unfolded(window: Window) -> None:
    window.media("print", "light", 718)
    window.run("dispatchEvent(new Event('beforeprint'))")
    assert window.run("return document.querySelectorAll('details:not([open])').length") == 0
    assert window.run("return getComputedStyle(document.querySelector('.tools')).display") == "none"
    assert window.run("return document.documentElement.scrollWidth") <= 718
