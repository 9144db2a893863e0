from __future__ import annotations

import json
from dataclasses import replace

from degarble.harness.engine.packing_diagnosis import Unexplained
from degarble.harness.record.page import Page, PanelKind, Provenance
from degarble.harness.record.page_json import page_from_json, page_to_json
from degarble.harness.record.verdict import Verdict
from degarble.harness.runs.demo import PLANTED, Story
from degarble.harness.runs.demo_page import demo_page
from degarble.reports.page_html import SIZE_LIMIT, page_html
from degarble.reports.page_text import page_text
from degarble.suites.runs.test_demo import whole_story
from degarble.suites.snapshots import assert_as_kept

PROVENANCE = Provenance("2026-01-02 03:04 UTC", "degarble demo", "CPU: a processor, 2 cores", ())


def default_story() -> Story:
    """The story as `degarble demo` tells it, taken from the whole one."""
    whole = whole_story()
    chosen = tuple(c for name in PLANTED for c in whole.damaged if c.fault and c.fault.id == name)
    return replace(whole, damaged=chosen)


def default_page() -> Page:
    """Its page."""
    return demo_page(default_story(), PROVENANCE)


def test_the_page_says_what_was_found() -> None:
    page = default_page()
    assert page.verdict is Verdict.DIFFERS
    assert page.sentence == (
        "The healthy copy agrees; 3 of 3 faults planted on purpose were found and named."
    )
    assert [finding.origin.fault for finding in page.findings] == list(PLANTED)
    for finding in page.findings:
        assert finding.origin.evidence
        assert finding.remedy
        assert finding.reproduction == f"degarble demo --fault {finding.origin.fault}"
    assert [panel.kind for panel in page.ordered_panels if panel.verdict] == [PanelKind.AUDIT]


def test_the_page_survives_its_file() -> None:
    page = default_page()
    again = page_from_json(page_to_json(page))
    assert page_to_json(again) == page_to_json(page)
    assert page_html(again) == page_html(page)


def test_the_page_is_small_enough_to_send() -> None:
    assert len(page_html(default_page()).encode()) < SIZE_LIMIT / 10


def test_the_key_follows_the_tensors() -> None:
    story = default_story()
    page = default_page()
    fewer = demo_page(replace(story, damaged=story.damaged[:1]), PROVENANCE)
    assert page.subject.key == default_page().subject.key
    assert page.subject.key != fewer.subject.key
    assert fewer.sentence == (
        "The healthy copy agrees; the fault planted on purpose is found and named."
    )


def test_text_is_as_kept() -> None:
    assert_as_kept("runs/demo.txt", page_text(default_page()))


def test_the_cosine_is_shown_to_be_blind() -> None:
    text = json.dumps(json.loads(page_to_json(default_page())))
    assert "A gate on the cosine passes the copy with M01.inverse" in text
    assert "A gate on the cosine passes the copy with M10" not in text


def test_what_nobody_knows_is_said_to_be_unknown() -> None:
    story = default_story()
    copy = story.damaged[0]
    cause = copy.diagnosis.causes[0]
    blank = replace(
        copy.diagnosis,
        causes=(),
        unexplained=(Unexplained(cause.difference, (("M99.other", 0.125),)),),
    )
    page = demo_page(replace(story, damaged=(replace(copy, diagnosis=blank),)), PROVENANCE)
    (finding,) = page.findings
    assert finding.cause == "No known fault explains the codes"
    assert finding.origin.fault is None
    assert "M99.other" in finding.note
    assert page.sentence.startswith("The healthy copy agrees; 0 of 1 faults")


def test_a_false_alarm_is_not_hidden() -> None:
    story = default_story()
    alarmed = replace(story.healthy, diagnosis=story.damaged[0].diagnosis)
    page = demo_page(replace(story, healthy=alarmed), PROVENANCE)
    assert page.sentence.startswith("The healthy copy raises a false alarm;")
