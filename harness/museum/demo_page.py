"""The demonstration as an HTML page: that of any check, with an introduction.

Every figure comes from the judgement.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from degarble.harness.commands.check.page import Checked, sentence_of
from degarble.harness.museum import demo
from degarble.harness.report.number_text import number
from degarble.harness.report.page import Subject
from degarble.harness.report.replay_record import PromptTexts, TextRecord
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from degarble.harness.museum.demo import Story
    from degarble.harness.report.page import Provenance


def demo_telling(story: Story, provenance: Provenance) -> Checked:
    """Return all data of a demonstration's page."""
    command = f"degarble demo --fault {story.planted.fault.id}"
    found = tuple(replace(each, reproduction=command) for each in story.sick.found)
    telling = Checked(
        Subject("tiny V4, nvfp4-full", "Demonstration", story.model.identity),
        provenance,
        story.sick.localised,
        found,
        story.sick.looker,
        _texts(story),
        _facts(story),
        preface=(_healthy(story), _planted(story)),
    )
    return replace(telling, sentence=f"{_lead(story)} {sentence_of(telling)}")


def _lead(story: Story) -> str:
    healthy = story.healthy.localised.verdict is Verdict.AGREES
    first = "The healthy run agrees" if healthy else "The healthy run raises a false alarm"
    if not story.planted.has_effect:
        return f"{first}; the fault planted on purpose has no effect here."
    if story.named:
        return f"{first}; the fault planted on purpose is found and named."
    return f"{first}; the fault planted on purpose is not named."


def _healthy(story: Story) -> str:
    rows = story.healthy.localised.rows
    worst = max((row.ratio for row in rows if row.ratio == row.ratio), default=0.0)
    verdict = story.healthy.localised.verdict
    return (
        f"Before: the healthy run of the same model is {verdict}, {len(rows):,} outputs, the "
        f"furthest at {number(worst, 3)} of its budget."
    )


def _planted(story: Story) -> str:
    planted = story.planted
    return f"Planted on purpose: {planted.fault.id}, {planted.way.words}, in {planted.component}."


def _texts(story: Story) -> TextRecord:
    voices = (
        ("The twin: what it should say", story.twin_said),
        ("Candidate, healthy", story.healthy.said),
        (f"Candidate with {story.planted.fault.id}", story.sick.said),
    )
    return TextRecord(
        tuple(
            PromptTexts(prompt, tuple((name, texts[at]) for name, texts in voices))
            for at, prompt in enumerate(demo.PROMPTS)
        )
    )


def _facts(story: Story) -> tuple[tuple[str, str], ...]:
    museum = story.model.museum
    return (
        ("Model", "the released tiny V4, references/tiny/v1/v4"),
        ("Recipe", museum.key.recipe),
        ("Candidate", "backend torch, products summed in float32"),
        ("Twin", "the same operands, products summed in float64"),
        ("Reference", "the same model in BF16"),
        ("Judged", f"{len(demo.PROMPTS)} prompts, {demo.JUDGED_STEPS} steps, on the CPU"),
    )
