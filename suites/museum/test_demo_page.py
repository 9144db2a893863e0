from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from degarble.harness.commands.check.page import page_of, replay_record
from degarble.harness.museum.demo import demo_result
from degarble.harness.report.page import PanelKind
from degarble.harness.report.verdict import Verdict
from degarble.reports.page_html import SIZE_LIMIT, page_html
from degarble.reports.page_text import page_text
from degarble.suites.museum.demo_cases import PROVENANCE, story_telling, whole_story

if TYPE_CHECKING:
    from degarble.harness.report.page import Page


def default_page() -> Page:
    """The page of the default story."""
    telling = story_telling()
    return page_of(telling, replay_record(telling))


def test_the_page_tells_the_story() -> None:
    page = default_page()
    assert page.verdict is Verdict.DIFFERS
    assert page.sentence == (
        "The healthy run agrees; the fault planted on purpose is found and named. "
        "Layer 3, ffn.experts.w2: The two nibbles of every byte are swapped."
    )
    (finding,) = page.findings
    assert finding.origin.fault == "M10.nibble_order"
    assert finding.origin.layer == 3
    assert "reproduces 100.0 % of outputs within budget" in finding.origin.evidence
    assert finding.reproduction == "degarble demo --fault M10.nibble_order"
    ran = [panel.kind for panel in page.ordered_panels if panel.verdict]
    assert ran == [PanelKind.REPLAY, PanelKind.TEXT]


def test_the_terminal_tells_before_and_after() -> None:
    text = page_text(default_page(), width=120)
    healthy, sick = (
        next(line for line in text.splitlines() if line.startswith(name))
        for name in ("Candidate, healthy", "Candidate with M10.nibble_order")
    )
    assert "anna paints blue" in healthy
    assert "anna paints blue" not in sick
    assert "Before: the healthy run of the same model is AGREES" in text
    assert "Planted on purpose: M10.nibble_order" in text


def test_the_page_is_small_enough_to_send() -> None:
    assert len(page_html(default_page()).encode()) < SIZE_LIMIT / 2


def test_what_is_not_named_or_has_no_effect_is_said() -> None:
    story = whole_story()
    (found,) = story.sick.found
    unnamed = replace(story.sick, found=(replace(found, diagnosed=None),))
    sentence = demo_result(replace(story, sick=unnamed), PROVENANCE).sentence
    assert sentence.startswith("The healthy run agrees; the fault planted on purpose is not named.")
    assert sentence.endswith("Layer 3, ffn.experts.w2: No known fault explains this.")
    idle = replace(story, planted=replace(story.planted, has_effect=False), sick=story.healthy)
    assert "has no effect here" in demo_result(idle, PROVENANCE).sentence
    alarmed = demo_result(replace(story, healthy=story.sick), PROVENANCE)
    assert alarmed.sentence.startswith("The healthy run raises a false alarm;")
