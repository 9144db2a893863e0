"""The demonstration: its fault is found and named, in the terminal and on the page."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.engine.diagnose.diagnose import Diagnosed
from degarble.harness.engine.faults.registry import FAULTS, MODEL_FAULTS
from degarble.harness.museum import demo
from degarble.harness.museum.demo import demo_fault, demo_result, plant
from degarble.harness.report.page import PanelKind
from degarble.harness.report.verdict import Verdict
from degarble.reports.page_html import SIZE_LIMIT, page_html
from degarble.reports.page_text import page_text
from degarble.suites.museum.demo_cases import PROVENANCE, story_told, whole_story

if TYPE_CHECKING:
    from degarble.harness.report.page import Page


def test_healthy_agrees_and_the_fault_is_named_in_its_expert() -> None:
    story = whole_story()
    assert story.healthy.localised.verdict is Verdict.AGREES
    assert story.healthy.found == ()
    assert story.planted.component == "layers.3.ffn.experts.w2"
    (found,) = story.sick.found
    assert found.trouble.component == story.planted.component
    assert found.diagnosed is not None
    assert found.diagnosed.named[0].id == demo.PLANTED
    assert found.trouble.where["expert"] == 4
    assert story.holds


def test_the_model_talks_and_the_fault_garbles_it() -> None:
    story = whole_story()
    first = "".join(story.healthy.said[0])
    assert first.startswith("blue . recall : anna paints blue .")
    assert "".join(story.healthy.said[1]).startswith("7 .")
    assert story.twin_said == story.healthy.said
    assert story.sick.said[0] != story.healthy.said[0]
    assert all(len(pieces) == demo.NEW_TOKENS for pieces in story.sick.said)


def test_a_wrong_name_a_wrong_place_and_a_false_alarm_make_the_story_fail() -> None:
    story = whole_story()
    (found,) = story.sick.found
    unnamed = replace(found, diagnosed=Diagnosed((), (), 1, "nothing"))
    assert not replace(story, sick=replace(story.sick, found=(unnamed,))).holds
    elsewhere = replace(story.planted, component="layers.1.ffn.experts.w2")
    assert not replace(story, planted=elsewhere).holds
    other = replace(story.planted, fault=MODEL_FAULTS["M01.inverse"])
    assert not replace(story, planted=other).holds
    one_more = replace(story.sick, found=(found, unnamed))
    assert not replace(story, sick=one_more).holds
    at_two_inputs = replace(story.sick, found=(found, found))
    assert replace(story, sick=at_two_inputs).holds
    assert not replace(story, sick=replace(story.sick, found=())).holds
    assert not replace(story, healthy=story.sick).holds


def test_a_fault_without_effect_is_reported_and_passes_where_nothing_is_found() -> None:
    story = whole_story()
    idle = replace(story.planted, has_effect=False)
    assert replace(story, planted=idle, sick=story.healthy).holds
    assert not replace(story, planted=idle).holds


def test_every_fault_can_be_requested_and_a_typo_is_refused() -> None:
    assert demo_fault(None).id == demo.PLANTED
    assert {demo_fault(name).id for name in (*FAULTS, *MODEL_FAULTS)} == set(MODEL_FAULTS)
    with pytest.raises(UnknownName, match=r"Did you mean M02\.missing"):
        demo_fault("M02.mising")


def test_a_fault_that_fits_nowhere_is_refused() -> None:
    story = whole_story()
    nowhere = replace(demo_fault(None), sits=lambda _scene: False)
    with pytest.raises(InvalidArgument, match="a fault that the tiny V4 in NVFP4 can carry"):
        plant(story.model, nowhere, story.planted.run)


def default_page() -> Page:
    """The page of the default story."""
    return story_told()[0]


def test_the_default_page_names_the_planted_fault() -> None:
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


def test_the_terminal_shows_before_and_after() -> None:
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
    sentence = demo_result(replace(story, sick=unnamed), PROVENANCE)[0].sentence
    assert sentence.startswith("The healthy run agrees; the fault planted on purpose is not named.")
    assert sentence.endswith("Layer 3, ffn.experts.w2: No known fault explains this.")
    idle = replace(story, planted=replace(story.planted, has_effect=False), sick=story.healthy)
    assert "has no effect here" in demo_result(idle, PROVENANCE)[0].sentence
    alarmed, _ = demo_result(replace(story, healthy=story.sick), PROVENANCE)
    assert alarmed.sentence.startswith("The healthy run raises a false alarm;")
