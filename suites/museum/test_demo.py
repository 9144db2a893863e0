"""The demonstration: its fault is found and named, in the terminal and on the page."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.engine.diagnose.diagnose import Diagnosed
from degarble.harness.engine.faults.integers import INTEGER_GROUP_TENSOR_FAULTS
from degarble.harness.engine.faults.registry import FAULTS, MODEL_FAULTS
from degarble.harness.museum import demo
from degarble.harness.museum.demo import demo_fault, demo_result, plant
from degarble.harness.report.page import PanelKind
from degarble.harness.report.verdict import TOOL_WORKS, Verdict
from degarble.reports.page_html import SIZE_LIMIT, page_html
from degarble.reports.page_text import page_text
from degarble.suites.museum.demo_cases import PROVENANCE, story_told, whole_story

if TYPE_CHECKING:
    from degarble.harness.report.page import Page


def test_healthy_agrees_and_the_fault_is_named_in_its_expert() -> None:
    demonstration = whole_story()
    assert demonstration.healthy.localised.verdict is Verdict.AGREES
    assert demonstration.healthy.origins == ()
    assert demonstration.planted.component == "layers.3.ffn.experts.w2"
    (origin,) = demonstration.sick.origins
    assert origin.discrepancy.component == demonstration.planted.component
    assert origin.diagnosed is not None
    assert origin.diagnosed.named[0].id == demo.PLANTED
    assert origin.discrepancy.where["expert"] == 4
    assert demonstration.holds


def test_the_model_talks_and_the_fault_garbles_it() -> None:
    demonstration = whole_story()
    first = "".join(demonstration.healthy.answers[0])
    assert first.startswith("blue . recall : anna paints blue .")
    assert "".join(demonstration.healthy.answers[1]).startswith("7 .")
    assert demonstration.twin_answers == demonstration.healthy.answers
    assert demonstration.sick.answers[0] != demonstration.healthy.answers[0]
    assert all(len(pieces) == demo.NEW_TOKENS for pieces in demonstration.sick.answers)


def test_a_wrong_name_a_wrong_place_and_a_false_alarm_make_the_story_fail() -> None:
    demonstration = whole_story()
    (origin,) = demonstration.sick.origins
    unnamed = replace(origin, diagnosed=Diagnosed((), (), 1, "nothing"))
    assert not replace(demonstration, sick=replace(demonstration.sick, origins=(unnamed,))).holds
    elsewhere = replace(demonstration.planted, component="layers.1.ffn.experts.w2")
    assert not replace(demonstration, planted=elsewhere).holds
    other = replace(demonstration.planted, fault=MODEL_FAULTS["M01.inverse"])
    assert not replace(demonstration, planted=other).holds
    one_more = replace(demonstration.sick, origins=(origin, unnamed))
    assert not replace(demonstration, sick=one_more).holds
    at_two_inputs = replace(demonstration.sick, origins=(origin, origin))
    assert replace(demonstration, sick=at_two_inputs).holds
    assert not replace(demonstration, sick=replace(demonstration.sick, origins=())).holds
    assert not replace(demonstration, healthy=demonstration.sick).holds


def test_a_fault_without_effect_is_reported_and_passes_where_nothing_is_found() -> None:
    demonstration = whole_story()
    idle = replace(demonstration.planted, has_effect=False)
    assert replace(demonstration, planted=idle, sick=demonstration.healthy).holds
    assert not replace(demonstration, planted=idle).holds


def test_every_fault_can_be_requested_and_a_typo_is_refused() -> None:
    assert demo_fault(None).id == demo.PLANTED
    # The demonstrated model holds no integer weights.
    integers = {fault.id for fault in INTEGER_GROUP_TENSOR_FAULTS}
    wanted = {*FAULTS, *MODEL_FAULTS} - integers
    assert {demo_fault(name).id for name in wanted} == set(MODEL_FAULTS)
    with pytest.raises(UnknownName, match=r"Did you mean M02\.missing"):
        demo_fault("M02.mising")


def test_a_fault_that_fits_nowhere_is_refused() -> None:
    demonstration = whole_story()
    nowhere = replace(demo_fault(None), applies_to=lambda _context: False)
    with pytest.raises(InvalidArgument, match="a fault that the tiny V4 in NVFP4 can carry"):
        plant(demonstration.model, nowhere, demonstration.planted.run)


def default_page() -> Page:
    """The page of the default story."""
    return story_told()[0]


def test_the_default_page_names_the_planted_fault() -> None:
    page = default_page()
    assert (page.verdict, page.word) == (Verdict.AGREES, TOOL_WORKS)
    assert {panel.verdict for panel in page.panels} >= {Verdict.DIFFERS}
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
    demonstration = whole_story()
    (origin,) = demonstration.sick.origins
    unnamed = replace(demonstration.sick, origins=(replace(origin, diagnosed=None),))
    sentence = demo_result(replace(demonstration, sick=unnamed), PROVENANCE)[0].sentence
    assert sentence.startswith("The healthy run agrees; the fault planted on purpose is not named.")
    assert sentence.endswith("Layer 3, ffn.experts.w2: No known fault explains this.")
    idle = replace(
        demonstration,
        planted=replace(demonstration.planted, has_effect=False),
        sick=demonstration.healthy,
    )
    page, _ = demo_result(idle, PROVENANCE)
    assert "has no effect here" in page.sentence
    assert page.word != TOOL_WORKS  # nothing was found
    alarmed, _ = demo_result(replace(demonstration, healthy=demonstration.sick), PROVENANCE)
    assert alarmed.sentence.startswith("The healthy run raises a false alarm;")
