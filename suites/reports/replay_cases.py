"""A judged run of three layers for suites of the panels, all of its words being one text."""

from __future__ import annotations

import math

from degarble.harness.report.page import Page, Provenance, Subject
from degarble.harness.report.replay_record import (
    AxisProfile,
    CloseLook,
    Histogram,
    JudgedOutput,
    JudgedPlace,
    PromptTexts,
    ReplayRecord,
    TextRecord,
    WorstElement,
)
from degarble.harness.report.verdict import Verdict
from degarble.reports.replay_panel import LOOKS, replay_panel, text_panel

ROLES = ("attn.norm", "attn.wq_a", "ffn.experts.w2")
FILES = (("a-page-outputs.csv", "one row an output"), ("a-page-replay.json", "all of it"))


def look(text: str) -> CloseLook:
    """Everything that a click may unfold."""
    return CloseLook(
        WorstElement(text, "0x3f80", "0xbf80", 1.0, -1.0, 32513),
        (JudgedPlace(text, text, 2.0, 1.0, 2.0), JudgedPlace("row", "7", 0.5, 1.0, 0.5)),
        (
            AxisProfile("position", tuple(map(str, range(40))), (0.0,) * 39 + (1.5,)),
            AxisProfile(text, (text, "b"), (0.25, None)),
        ),
        Histogram("ulps", ("0", "1", "> 1"), (900, 12, 3)),
        (text, "K = 96 additions"),
        1.25,
        -2.0,
    )


def replay(text: str = "plain", verdict: Verdict = Verdict.DIFFERS) -> ReplayRecord:
    """Three layers; one output differs, one is undecided."""
    outputs = [JudgedOutput("embed", "embed", None, "out", Verdict.AGREES, 0.0, identical=1.0)]
    for layer in range(3):
        for role in ROLES:
            if (layer, role) == (0, "attn.wq_a"):
                continue  # not in every layer
            name = f"layers.{layer}.{role}"
            outputs.append(
                JudgedOutput(
                    name, role, layer, "out", Verdict.AGREES, 0.25 * layer,
                    (1 - 1e-9, 0.99, 0.991), 0.001, 0.002, 0.5, 128, 2, look=look(text),
                )
            )  # fmt: skip
    outputs.append(JudgedOutput("head", "head", None, "out", Verdict.AGREES, 0.1))
    if verdict is Verdict.DIFFERS:
        far = (0.5, 0.4, math.nan)
        outputs[-2] = JudgedOutput(
            f"layers.2.{ROLES[2]}", ROLES[2], 2, "out", verdict, 17210.0, far, 1.0, 0.002, 0.01, 64,
            1, 3, 9, look=look(text),
        )  # fmt: skip
        outputs[1] = JudgedOutput(
            f"layers.0.{ROLES[0]}", ROLES[0], 0, "out", Verdict.UNDECIDED, undecided=text
        )
    origins = (outputs[-2].site,) if verdict is Verdict.DIFFERS else ()
    notes = (text,)
    return ReplayRecord(verdict, text, tuple(outputs), origins, (text,), notes, ((text, text),))


def texts(text: str = "plain") -> TextRecord:
    """Two prompts; on the second the models part."""
    same = (text, " is", " blue")
    return TextRecord(
        (
            PromptTexts(text, (("Twin", same), ("Candidate", same))),
            PromptTexts(text, (("Twin", same), ("Candidate", (text, " was", " blue", text)))),
        ),
        (text,),
    )


def replay_page(text: str = "plain", most: int = LOOKS) -> Page:
    """A page with both panels."""
    record = replay(text)
    return Page(
        Subject("a checkpoint", "Checkpoint", "sha256:0123456789abcdef"),
        Provenance("2026-01-02 03:04 UTC", "degarble check x", "CPU: a processor, 2 cores", ()),
        Verdict.DIFFERS,
        text,
        (),
        (replay_panel(record, FILES, most), text_panel(texts(text), record.verdict)),
    )
