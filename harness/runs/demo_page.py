"""The demonstration as a page record: what a reader sees, in the order of every page.

Owns the words of the story; every figure comes from the diagnosis.
What keeps it honest: suites/runs/test_demo_page.py, and the snapshot of the page's text.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from degarble.harness.record.blocks import (
    Bar,
    Bars,
    Column,
    ColumnKind,
    Details,
    Fact,
    Facts,
    Sentence,
    Table,
    Tone,
)
from degarble.harness.record.page import Finding, Page, Panel, PanelKind, Subject
from degarble.harness.record.verdict import Origin, Verdict
from degarble.harness.record.wording import number
from degarble.harness.runs import demo
from degarble.harness.runs.demo_evidence import evidence_blocks

if TYPE_CHECKING:
    from degarble.harness.engine.packing_diagnosis import Cause, Unexplained
    from degarble.harness.record.blocks import Block
    from degarble.harness.record.page import Provenance
    from degarble.harness.runs.demo import Copy, Story

COSINE_GATE = 0.98  # the gate of the field: teams call a component broken below it
_SITE = f"layers.{demo.LAYER}.{demo.COMPONENT}.weight"


def demo_page(story: Story, provenance: Provenance) -> Page:
    """Make the page of a demonstration."""
    worst = max((copy.diagnosis.verdict for copy in story.copies), key=_severity)
    return Page(
        subject=Subject("demo weight", "Demonstration", f"sha256:{_identity(story)}"),
        provenance=provenance,
        verdict=worst,
        sentence=_sentence(story),
        findings=tuple(f for copy in story.damaged for f in _findings(copy)),
        panels=(_audit(story, worst), *_absent()),
    )


def _severity(verdict: Verdict) -> int:
    return verdict.exit_status


def _identity(story: Story) -> str:
    digest = hashlib.sha256()
    for copy in story.copies:
        digest.update(copy.name.encode())
        for part in (copy.tensor.codes, copy.tensor.block_scale, copy.tensor.tensor_scale):
            if part is not None:
                digest.update(part.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _sentence(story: Story) -> str:
    planted = [copy for copy in story.damaged if copy.has_effect]
    named = sum(copy.as_told for copy in planted)
    healthy = "agrees" if story.healthy.as_told else "raises a false alarm"
    if len(planted) == named == 1:
        return f"The healthy copy {healthy}; the fault planted on purpose is found and named."
    return (
        f"The healthy copy {healthy}; {named} of {len(planted)} faults planted on purpose "
        "were found and named."
    )


def _findings(copy: Copy) -> list[Finding]:
    found = [_named(copy, cause) for cause in copy.diagnosis.causes]
    return found + [_unnamed(copy, part) for part in copy.diagnosis.unexplained]


def _origin(copy: Copy, rows: str, fault: str | None, confidence: float, evidence: str) -> Origin:
    return Origin(
        layer=demo.LAYER,
        component=demo.COMPONENT,
        site=_SITE,
        where={"expert": demo.EXPERT, "rows": rows},
        fault=fault,
        cosine=copy.diagnosis.found.cosine,
        difference=copy.diagnosis.found.relative_l2,
        budget=copy.diagnosis.floor.relative_l2,
        confidence=confidence,
        evidence=evidence,
        reproducer=_command(copy),
    )


def _command(copy: Copy) -> str:
    return f"degarble demo --fault {copy.fault.id}" if copy.fault else "degarble demo"


def _named(copy: Copy, cause: Cause) -> Finding:
    match = cause.match
    origin = _origin(copy, cause.difference.where, cause.fault.id, match.reproduced, match.evidence)
    also = (
        f"{', '.join(cause.alternatives)} would look the same here." if cause.alternatives else ""
    )
    return Finding(cause.fault.title, cause.fault.remedy, origin, _command(copy), also)


def _unnamed(copy: Copy, part: Unexplained) -> Finding:
    nearest = ", ".join(f"{name} ({number(share)})" for name, share in part.excluded[:3])
    return Finding(
        f"No known fault explains the {part.difference.part}",
        "Send the reproducer: a fault that is not in the museum belongs there.",
        _origin(copy, part.difference.where, None, 0.0, part.difference.sentence),
        _command(copy),
        f"Nearest, by share reproduced: {nearest}." if nearest else "",
    )


def _audit(story: Story, verdict: Verdict) -> Panel:
    return Panel(
        PanelKind.AUDIT,
        "One weight of an expert in NVFP4, in several copies: one as a correct producer writes "
        "it, the others damaged on purpose. Each is judged without being told what was done.",
        verdict,
        (
            _copies_table(story),
            *_lessons(story),
            _bars(story),
            *(_details(copy) for copy in story.copies),
            _weight_facts(story),
        ),
    )


def _copies_table(story: Story) -> Table:
    columns = (
        Column("planted"),
        Column("verdict", ColumnKind.VERDICT),
        Column("cause named", ColumnKind.CODE),
        Column("matched", ColumnKind.SHARE, explanation="share that the fault reproduces"),
        Column("cosine", ColumnKind.NUMBER, explanation="against the BF16 weight"),
        Column("rel. L2", ColumnKind.NUMBER, explanation="relative difference, BF16 weight"),
        Column("gain", ColumnKind.NUMBER, explanation="least squares; 1 is right"),
        Column(f"gate {COSINE_GATE}", explanation="what a gate on the cosine would say"),
    )
    return Table("What was said about each copy", columns, tuple(map(_copy_row, story.copies)))


def _copy_row(copy: Copy) -> tuple[str | float | None, ...]:
    found = copy.diagnosis.found
    causes = ", ".join(cause.fault.id for cause in copy.diagnosis.causes)
    return (
        copy.planted if copy.has_effect or copy.fault is None else f"{copy.planted} (no effect)",
        str(copy.diagnosis.verdict),
        causes or None,
        min((cause.match.reproduced for cause in copy.diagnosis.causes), default=None),
        found.cosine,
        found.relative_l2,
        found.gain,
        "passes" if found.cosine >= COSINE_GATE else "fails",
    )


def _lessons(story: Story) -> list[Block]:
    blind = [
        copy
        for copy in story.damaged
        if copy.has_effect and copy.diagnosis.found.cosine >= COSINE_GATE
    ]
    return [
        Sentence(
            f"A gate on the cosine passes the copy {copy.name}: its cosine is "
            f"{number(copy.diagnosis.found.cosine)}, like the healthy one, while its values are "
            f"{number(copy.diagnosis.found.gain)} times as large as they should be.",
            Tone.WARNING,
        )
        for copy in blind
    ]


def _bars(story: Story) -> Bars:
    floor = story.healthy.diagnosis.floor.relative_l2
    return Bars(
        "Relative difference from the BF16 weight, logarithmic",
        tuple(
            Bar(
                copy.planted,
                copy.diagnosis.found.relative_l2,
                number(copy.diagnosis.found.relative_l2),
                Tone.GOOD if copy.diagnosis.verdict is Verdict.AGREES else Tone.BAD,
            )
            for copy in story.copies
        ),
        logarithmic=True,
        limit=floor,
        limit_text=f"what NVFP4 itself costs on this weight: {number(floor)}",
    )


def _details(copy: Copy) -> Details:
    blocks: list[Block] = [Sentence(copy.diagnosis.sentence)]
    for cause in copy.diagnosis.causes:
        blocks += [Sentence(cause.difference.sentence), Sentence(cause.match.evidence)]
        blocks.append(Sentence(f"What it does: {cause.fault.effect}.", Tone.NOTE))
    for part in copy.diagnosis.unexplained:
        blocks.append(Sentence(part.difference.sentence, Tone.BAD))
    blocks += evidence_blocks(copy)
    return Details(f"Copy {copy.name}", tuple(blocks))


def _weight_facts(story: Story) -> Facts:
    rows, columns = demo.SHAPE
    tensor = story.healthy.tensor
    digest = hashlib.sha256(story.weight.view(torch.uint8).numpy().tobytes()).hexdigest()
    return Facts(
        (
            Fact("Shape", f"{rows} x {columns}, BF16"),
            Fact("Seed", str(demo.SEED)),
            Fact("SHA-256 of the weight", digest[:16], code=True),
            Fact("Format", tensor.format.name),
            Fact("Dialect", tensor.dialect.name),
            Fact("Largest magnitude", number(float(story.weight.abs().max()))),
        ),
        "How the weight was made",
    )


def _absent() -> list[Panel]:
    reason = "Not part of this demonstration: it needs a captured run of a model."
    return [Panel(kind, reason) for kind in PanelKind if kind is not PanelKind.AUDIT]
